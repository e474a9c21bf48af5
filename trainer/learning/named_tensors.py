"""A model's tensors by the names of its checkpoint: what a weight sync sends."""

import torch
from torch.overrides import TorchFunctionMode

from weight_sync.lora import LoRAWeight
from weight_sync.ranks import ShardedPart, is_sharded, local_part

from .lora import adapted_weights


class NamedTensors:
    """Called, it returns views of a transformers model's tensors, with the names and shapes of its checkpoint, which
    an engine loads. Tied tensors come once. A weight with an adapter comes as a LoRAWeight.

    transformers fuses some tensors that checkpoints keep separate, such as a mixture's experts. Those come as views of
    the fused tensor or, if that is sharded, each as a ShardedPart of it.

    Naming hundreds of tensors takes milliseconds. Views show whatever is written to the tensors, so they are made once,
    and again only after a tensor has moved in memory.
    """

    def __init__(self, model):
        self.model = model
        self.slots = [  # where modules keep their tensors
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
            storages = {_storage(tensors[name]) for tensors, name in self.slots}
            are_views = all(_storage(tensor) in storages for tensor in named.values())
            adapted = {_storage(weight.base): weight for weight in adapted_weights(self.model)}
            named = {name: adapted.get(_storage(tensor), tensor) for name, tensor in named.items()}
            if not are_views:
                return named  # made again by each call, because a conversion of this model copies
            self.views = named
        return self.views

    def _named(self) -> dict[str, torch.Tensor | ShardedPart]:
        from transformers.core_model_loading import revert_weight_conversion

        tied = self.model.all_tied_weights_keys
        tensors = {
            name.replace(".base_layer.", "."): tensor  # where peft keeps the layer that it has put an adapter to
            for name, tensor in self.model.state_dict().items()
            if name not in tied and ".lora_" not in name
        }
        sharded = {}  # by a stand-in's storage: splitting a sharded tensor itself would gather it
        for name, tensor in tensors.items():
            if is_sharded(tensor):
                tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                sharded[_storage(tensors[name])] = tensor
        with _WithoutCopies():
            named = revert_weight_conversion(self.model, tensors)
        return {name: _sharded_part(sharded.get(_storage(tensor)), tensor, name) for name, tensor in named.items()}

    def _addresses(self) -> list[int]:
        return [local_part(tensors[name]).data_ptr() for tensors, name in self.slots]


def _sharded_part(sharded: torch.Tensor | None, view: torch.Tensor, name: str) -> torch.Tensor | ShardedPart:
    """The part of `sharded` that this view of its stand-in stands for; the view itself if it is of no stand-in."""
    if sharded is None:
        return view
    if not view.is_contiguous():
        raise ValueError(f"{name} is not in one piece in this model's fused weights: it trains on one rank only")
    return sharded if view.shape == sharded.shape else ShardedPart(sharded, view.storage_offset(), view.shape)


def _storage(tensor: torch.Tensor | ShardedPart) -> int:
    """The identity of a tensor's storage: equal for tensors, and stand-ins, that share their memory."""
    return local_part(tensor).untyped_storage()._cdata


class _WithoutCopies(TorchFunctionMode):
    """Parts of a fused tensor stay views of it: transformers would make them contiguous, in memory of their own."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))
