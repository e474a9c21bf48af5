"""One model and its optimizer over several ranks: PyTorch's FSDP2, whole states from shards, and back.

What is sharded is a DTensor, of which every rank holds some rows. Everything here takes plain tensors as well, which
are what a single rank has, and leaves them as they are.
"""

from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

RANKS_SECONDS = 1800  # the ranks wait for each other so long: they load a model one after the other


def join_ranks(address: str, port: int, rank: int, ranks: int, device: torch.device) -> None:
    """Make this process one of the ranks; the first of them opens this port. A single rank needs no group."""
    if ranks > 1:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"tcp://{address}:{port}",
            timeout=timedelta(seconds=RANKS_SECONDS),
            rank=rank,
            world_size=ranks,
            device_id=device if device.type == "cuda" else None,
        )


def shard(model, mesh: DeviceMesh):
    """Shard each block of a transformers model, then what is left of it, in place. Returns the model.

    Each is gathered for its own forward and backward pass only. Weights and optimizer state stay fp32; the compute is
    bf16 on a GPU, and gradients are summed over the ranks in fp32.

    On a GPU, this rounds more than autocast, which is all that a single rank does: weights are gathered in bf16, so
    that norms and embeddings compute with rounded ones and the residual stream is bf16, as it is in the engine. In fp32
    they would be those of a single rank, for twice the traffic. Autocast remains, for what is no parameter.

    Raises ValueError for a model whose modules fuse what its checkpoint keeps apart, a mixture's experts: every rank
    would have to gather all experts at once to tell them apart again.
    """
    from transformers.core_model_loading import WeightConverter

    if any(isinstance(conversion, WeightConverter) for conversion in getattr(model, "_weight_conversions", None) or ()):
        raise ValueError(f"{type(model).__name__} fuses its checkpoint's weights (experts): it trains on one rank only")
    dtype = torch.bfloat16 if mesh.device_type == "cuda" else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    blocks = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
    for module in reversed([model, *blocks]):  # what is within others first
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of which this rank may hold a shard. All ranks call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def gather_states(model, optimizer: torch.optim.Optimizer, rank: int) -> tuple[dict, dict]:
    """Their state dicts for a checkpoint of no number of ranks: what is sharded is whole, in rank 0's host memory.

    Goes from tensor to tensor through the device, wherever the optimizer's state is. Tied weights come once.
    """

    def gather(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor | None:
        if not isinstance(parameter, DTensor):
            return tensor
        gathered = whole(_like(parameter, _local(tensor)))
        return gathered.cpu() if rank == 0 else None

    names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    weights = {name: gather(tensor, tensor) for name, tensor in model.state_dict().items() if name in names}
    parameters, state = list(model.parameters()), optimizer.state_dict()
    for i, moments in state["state"].items():
        state["state"][i] = {k: v if k == "step" else gather(v, parameters[i]) for k, v in moments.items()}
    return weights, state


def load_optimizer_state(model, optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Take over what `gather_states` returned, on as many ranks as there are now: each its own rows."""
    for i, parameter in enumerate(model.parameters()):
        moments = state["state"].get(i, {})
        for name in moments.keys() - {"step"} if isinstance(parameter, DTensor) else ():
            layout = parameter.device_mesh, parameter.placements
            # A clone, since the shard is a view of the whole tensor.
            moments[name] = distribute_tensor(moments[name], *layout, src_data_rank=None).clone()
    optimizer.load_state_dict(state)


class Offload:
    """Moves an optimizer's moments, with Adam twice the size of the weights, to host memory and back."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self.memory: torch.Tensor | None = None
        self.on_host = False

    def to_host(self) -> None:
        moments = [(state, name, _local(state[name])) for _, state, name in self._moments()]
        sizes = [local.numel() for *_, local in moments]
        if self.memory is None:
            self.memory = torch.empty(sum(sizes))
            if moments[0][2].is_cuda:  # torch's own page-locked memory comes in powers of two
                register = torch.cuda.cudart().cudaHostRegister
                torch.cuda.check_error(register(self.memory.data_ptr(), self.memory.nbytes, 0))
        for (state, name, local), part in zip(moments, self.memory.split(sizes), strict=True):
            state[name] = part.view_as(local).copy_(local, non_blocking=True)
        self.on_host = True

    def to_device(self) -> None:
        for parameter, state, name in self._moments() if self.on_host else ():
            state[name] = _like(parameter, state[name])
        self.on_host = False

    def _moments(self) -> Iterator[tuple[torch.Tensor, dict, str]]:
        for parameter, state in self.optimizer.state.items():
            yield from ((parameter, state, name) for name in state if name != "step")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """What this is the local part of: a tensor on the parameter's device, over the ranks as the parameter is."""
    local = local.to(parameter.device, non_blocking=True)
    if not isinstance(parameter, DTensor):
        return local
    layout = parameter.device_mesh, parameter.placements
    return DTensor.from_local(local, *layout, shape=parameter.shape, stride=parameter.stride())
