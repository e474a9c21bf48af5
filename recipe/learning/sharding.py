"""One model and its optimizer over several ranks, by PyTorch's FSDP2.

A sharded tensor is a DTensor, of which every rank holds some rows. A single rank has plain tensors, which everything
here takes as well and leaves as they are. No rank ever holds a whole model: it reads its own rows.
"""

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from weight_sync.link import host_and_port
from weight_sync.ranks import ShardedPart

RANKS_SECONDS = 1800  # limit for ranks to wait for each other; loading a large model takes long


def join_ranks(address: str, port: int, rank: int, ranks: int, device: torch.device) -> None:
    """Join torch.distributed's group of all ranks. The first rank listens at this port. A single rank joins none."""
    if ranks > 1:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"tcp://{host_and_port(address, port)}",
            timeout=timedelta(seconds=RANKS_SECONDS),
            rank=rank,
            world_size=ranks,
            device_id=device if device.type == "cuda" else None,
        )


def wait_for_ranks() -> None:
    """Return once all ranks have called this."""
    if dist.is_initialized():
        dist.barrier()


def load_model(auto_class, path: str, config, mixed_precision: bool, **options) -> tuple:
    """A transformers model and the names of parameters that its checkpoint lacks. On several ranks, FSDP2 shards each
    block of it, then the rest, and every rank reads its own rows.

    FSDP2 gathers a block for its own forward and backward pass only. With `mixed_precision`, weights and optimizer
    state stay fp32, and blocks are gathered in bf16, so that the compute is a single rank's (precision.py); gradients
    are summed over the ranks in fp32. Autocast stays on for what is not a parameter.
    """
    from transformers.distributed import DistributedConfig

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks > 1:
        with torch.device("meta"):
            model = auto_class.from_config(config)
        blocks = set(_blocks(model))
        names = [name for name, module in model.base_model.named_modules() if module in blocks]
        config.base_model_fsdp_plan = dict.fromkeys(names, "free_full_weight")  # after its forward pass
        type(model)._fsdp_plan = {}  # of the head, which would have a group of its own: it is called in chunks
        options["distributed_config"] = DistributedConfig(fsdp_size=ranks, fsdp_mixed_precision=mixed_precision)
    model, report = auto_class.from_pretrained(path, config=config, output_loading_info=True, **options)
    if ranks > 1:
        model.set_reshard_after_forward(True, recurse=False)
        model.config.distributed_config = None  # or it would gather a checkpoint in one rank's memory
    return model, sorted(report["missing_keys"])


def fuses_weights(model) -> bool:
    """Whether the model fuses tensors of its checkpoint, such as a mixture's experts."""
    from transformers.core_model_loading import WeightConverter

    conversions = getattr(model, "_weight_conversions", None) or ()
    return any(isinstance(conversion, WeightConverter) for conversion in conversions)


def add_forward(model, name: str, method: Callable) -> None:
    """Give the model this method, as method(model, ...). FSDP takes it for a forward pass: it gathers the weights
    around it."""
    setattr(model, name, partial(method, model))
    register_fsdp_forward_method(model, name)


def checkpoint_blocks(model) -> None:
    """Keep no more of a block than its inputs for backward, which computes the rest again.

    transformers' own way wants modules in training mode, with their dropout.
    """
    for block in _blocks(model, "--gradient-checkpointing"):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def compile_blocks(model) -> None:
    """Compile each block in place, for batches and lengths of any size. Equal blocks share one compilation."""
    for block in _blocks(model, "--compile"):
        block.forward = torch.compile(block.forward, dynamic=True)


def _blocks(model, needed_by: str = "shards") -> list[torch.nn.Module]:
    """The model's blocks: modules of the class that it names. Raises ValueError if there are none."""
    names = model._no_split_modules or ()
    blocks = [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in names]
    if not blocks:
        raise ValueError(f"{type(model).__name__} does not name its blocks: it cannot have {needed_by}")
    return blocks


def whole_gradients_fit(parameters: list[torch.nn.Parameter], device: torch.device) -> bool:
    """Whether whole gradients of these parameters, in fp32, take less than half of the memory that this rank has free.

    Then ranks can add up those of their micro-batches by themselves, and reduce them once.
    """
    if device.type == "cpu":
        return True
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return 2 * 4 * sum(parameter.numel() for parameter in parameters) < free


def whole(tensor: torch.Tensor | ShardedPart) -> torch.Tensor:
    """The whole tensor, gathered if this rank holds a shard of it. All ranks call this."""
    if isinstance(tensor, ShardedPart):
        first, own = tensor.local(dist.get_rank(), dist.get_world_size())
        gathered = torch.zeros(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        gathered[first : first + len(own)] = own
        dist.all_reduce(gathered)
        return gathered.view(tensor.shape)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Offload:
    """Moves an optimizer's moments (with Adam, twice the size of the weights) to host memory and back."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self.memory: torch.Tensor | None = None
        self.on_host = False

    def to_host(self) -> None:
        moments = [(state, name, local_part(state[name])) for _, state, name in self._moments()]
        if self.on_host or not moments:
            return
        sizes = [local.numel() for *_, local in moments]
        if self.memory is None:
            self.memory = torch.empty(sum(sizes))
            if moments[0][2].is_cuda:  # page-lock it; torch's own pinned memory rounds up to powers of two
                register = torch.cuda.cudart().cudaHostRegister
                torch.cuda.check_error(register(self.memory.data_ptr(), self.memory.nbytes, 0))
        for (state, name, local), part in zip(moments, self.memory.split(sizes), strict=True):
            state[name] = part.view_as(local).copy_(local)
        self.on_host = True

    def to_device(self) -> None:
        for parameter, state, name in self._moments() if self.on_host else ():
            state[name] = like(parameter, state[name])
        self.on_host = False

    def _moments(self) -> Iterator[tuple[torch.Tensor, dict, str]]:
        for parameter, state in self.optimizer.state.items():
            yield from ((parameter, state, name) for name in state if name != "step")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows of the tensor, or the tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """The tensor with this local part, on the parameter's device and sharded as the parameter is."""
    local = local.to(parameter.device, non_blocking=True)
    if not isinstance(parameter, DTensor):
        return local
    layout = parameter.device_mesh, parameter.placements
    return DTensor.from_local(local, *layout, shape=parameter.shape, stride=parameter.stride())
