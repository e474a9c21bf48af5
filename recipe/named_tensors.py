"""A model's tensors by the names of its checkpoint: what a weight sync sends."""

import torch
from torch.overrides import TorchFunctionMode

from weight_sync.lora import LoRAWeight

from .lora import adapted_weights
from .sharding import local_part


class NamedTensors:
    """Called, it returns views of a transformers model's tensors, named and shaped as in its checkpoint, which is how
    an engine loads them. Tied tensors come once. A weight with an adapter comes as a LoRAWeight.

    The modules differ from that where transformers fuses what checkpoints keep apart: a mixture's experts, which are
    views of the fused tensors. `shard` refuses such a model.

    Hundreds of names take milliseconds. Views stay right whatever is written to the tensors, so they are made once, and
    again after a tensor of the model has moved in memory.
    """

    def __init__(self, model):
        self.model = model
        self.places = [  # where modules keep their tensors
            (tensors, name)
            for module in model.modules()
            for tensors in (module._parameters, module._buffers)
            for name, tensor in tensors.items()
            if tensor is not None
        ]
        self.addresses: list[int] = []
        self.views: dict[str, torch.Tensor | LoRAWeight] = {}

    @torch.no_grad()
    def __call__(self) -> dict[str, torch.Tensor | LoRAWeight]:
        if not self.views or self.addresses != self._addresses():
            named = self._named()
            self.addresses = self._addresses()  # only now: state_dict() makes FSDP put its shards back
            memory = {_memory(tensors[name]) for tensors, name in self.places}
            views = all(_memory(tensor) in memory for tensor in named.values())
            adapted = {_memory(weight.base): weight for weight in adapted_weights(self.model)}
            named = {name: adapted.get(_memory(tensor), tensor) for name, tensor in named.items()}
            if not views:
                return named  # some conversion of this model copies
            self.views = named
        return self.views

    def _named(self) -> dict[str, torch.Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        tied = self.model.all_tied_weights_keys
        tensors = {
            name.replace(".base_layer.", "."): tensor  # where peft keeps the layer that it has put an adapter to
            for name, tensor in self.model.state_dict().items()
            if name not in tied and ".lora_" not in name
        }
        with _WithoutCopies():
            return revert_weight_conversion(self.model, tensors)

    def _addresses(self) -> list[int]:
        return [local_part(tensors[name]).data_ptr() for tensors, name in self.places]


def _memory(tensor: torch.Tensor) -> int:
    return local_part(tensor).untyped_storage().data_ptr()


class _WithoutCopies(TorchFunctionMode):
    """Parts of a fused tensor stay views of it: transformers would make them contiguous, in memory of their own."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))
