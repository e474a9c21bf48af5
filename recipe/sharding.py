"""One model and its optimizer over several ranks, by PyTorch's FSDP2; checkpoints from shards, and shards from them.

A sharded tensor is a DTensor, of which every rank holds some rows. A single rank has plain tensors, which everything
here takes as well and leaves as they are.
"""

import socket
from collections.abc import Iterator
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from weight_sync.link import host_and_port

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


def turns_on_node() -> tuple[int, int]:
    """This rank's number among those of its node, and how many the fullest node has. All ranks call this."""
    hosts, rank = [None] * dist.get_world_size(), dist.get_rank()
    dist.all_gather_object(hosts, socket.gethostname())
    return hosts[:rank].count(hosts[rank]), max(map(hosts.count, hosts))


def shard(model, mesh: DeviceMesh, replicated: list[torch.nn.Parameter] = ()):
    """Shard each block of a transformers model, then the rest of it, in place. Returns the model.

    The `replicated` parameters stay whole on every rank, with a gradient of each rank's own.

    FSDP2 gathers a block for its own forward and backward pass only. Weights and optimizer state stay fp32. On a GPU,
    blocks are gathered in bf16, so that the compute is a single rank's (precision.py), and gradients are summed over
    the ranks in fp32. Autocast stays on for what is not a parameter.

    Raises ValueError for a model that fuses tensors of its checkpoint, such as a mixture's experts: to split them
    again, every rank would have to gather all experts at once.
    """
    if fuses_weights(model):
        raise ValueError(f"{type(model).__name__} fuses its checkpoint's weights (experts): it trains on one rank only")
    dtype = torch.bfloat16 if mesh.device_type == "cuda" else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in reversed([model, *_blocks(model)]):  # inner modules first
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True, ignored_params=set(replicated))
    for parameter in replicated:
        parameter.data = parameter.data.to(mesh.device_type)
    return model


def fuses_weights(model) -> bool:
    """Whether the model fuses tensors of its checkpoint, such as a mixture's experts."""
    from transformers.core_model_loading import WeightConverter

    conversions = getattr(model, "_weight_conversions", None) or ()
    return any(isinstance(conversion, WeightConverter) for conversion in conversions)


def checkpoint_blocks(model, has_dropout: bool) -> None:
    """Keep no more of a block than its inputs for backward, which computes the rest again, with the same dropout.

    transformers' own way wants modules in training mode, with their dropout.
    """
    for block in _blocks(model, "--gradient-checkpointing"):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=has_dropout)


def compile_blocks(model) -> None:
    """Compile each block in place, for batches and lengths of any size. Equal blocks share one compilation."""
    for block in _blocks(model, "--compile"):
        block.forward = torch.compile(block.forward, dynamic=True)


def _blocks(model, needed_by: str = "") -> list[torch.nn.Module]:
    """The model's blocks, by the class that it names. Raises ValueError if an option needs them and there are none."""
    blocks = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
    if needed_by and not blocks:
        raise ValueError(f"{type(model).__name__} does not name its blocks: it has no {needed_by}")
    return blocks


def whole_gradients_fit(parameters: list[torch.nn.Parameter], device: torch.device) -> bool:
    """Whether whole gradients of these parameters, in fp32, take less than half of the memory that this rank has free.

    Then ranks can add up those of their micro-batches by themselves, and reduce them once.
    """
    if device.type == "cpu":
        return True
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return 2 * 4 * sum(parameter.numel() for parameter in parameters) < free


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, gathered if this rank holds a shard of it. All ranks call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def gather_states(
    model, parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, rank: int
) -> tuple[dict, dict]:
    """State dicts of the optimizer and of the model, these parameters and its buffers, for a checkpoint that does not
    depend on the number of ranks: shards are gathered on rank 0.

    Gathers one tensor at a time on the device, then moves it to rank 0's host memory; other ranks get None. This also
    works while the optimizer's state is offloaded. Tied weights come once.
    """

    def gather(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor | None:
        if not isinstance(parameter, DTensor):
            return tensor
        gathered = whole(_like(parameter, local_part(tensor)))
        return gathered.cpu() if rank == 0 else None

    learned = set(map(id, parameters))
    names = {name for name, parameter in model.named_parameters() if id(parameter) in learned}
    names |= {name for name, _ in model.named_buffers()}
    weights = {name: gather(tensor, tensor) for name, tensor in model.state_dict().items() if name in names}
    state = optimizer.state_dict()
    for i, moments in state["state"].items():
        state["state"][i] = {k: v if k == "step" else gather(v, parameters[i]) for k, v in moments.items()}
    return weights, state


def load_optimizer_state(parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Load the optimizer state from `gather_states`. Each rank takes its own rows, whatever the number of ranks."""
    for i, parameter in enumerate(parameters):
        moments = state["state"].get(i, {})
        for name in moments.keys() - {"step"} if isinstance(parameter, DTensor) else ():
            layout = parameter.device_mesh, parameter.placements
            # Clone: the shard is a view that would keep the whole tensor alive.
            moments[name] = distribute_tensor(moments[name], *layout, src_data_rank=None).clone()
    optimizer.load_state_dict(state)


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
            state[name] = _like(parameter, state[name])
        self.on_host = False

    def _moments(self) -> Iterator[tuple[torch.Tensor, dict, str]]:
        for parameter, state in self.optimizer.state.items():
            yield from ((parameter, state, name) for name in state if name != "step")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows of the tensor, or the tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """The tensor with this local part, on the parameter's device and sharded as the parameter is."""
    local = local.to(parameter.device, non_blocking=True)
    if not isinstance(parameter, DTensor):
        return local
    layout = parameter.device_mesh, parameter.placements
    return DTensor.from_local(local, *layout, shape=parameter.shape, stride=parameter.stride())
