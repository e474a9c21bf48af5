"""One model and its optimizer over several ranks, by PyTorch's FSDP2.

A sharded tensor is a DTensor: every rank holds some of its rows. A single rank has plain tensors; the functions here
take those too, and leave them as they are. Of several ranks, none ever holds the whole model: each reads its own rows.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist

from weight_sync.link import host_and_port
from weight_sync.ranks import ShardedPart, is_sharded, local_part

from ..errors import RunError

GATHERED_SHARE = 0.1  # of a GPU's memory, for weights that stay gathered through all passes of an update
RANKS_SECONDS = 1800  # how long ranks wait for each other; loading a large model takes long


def join_ranks(address: str, port: int, rank: int, ranks: int, device: torch.device) -> None:
    """Join the torch.distributed group of all ranks. The first one listens on this port. A single rank has no group."""
    if ranks > 1:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"tcp://{host_and_port(address, port)}",
            timeout=timedelta(seconds=RANKS_SECONDS),
            rank=rank,
            world_size=ranks,
            device_id=device if device.type == "cuda" else None,
        )


def rank_and_ranks() -> tuple[int, int]:
    """This process's rank, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def load_model(
    auto_class, path: str, config, device: torch.device, mixed_precision: bool = False, frozen: bool = False
) -> tuple:
    """Load a transformers model with fp32 weights. Returns it, and the names of the parameters that its checkpoint
    lacks. Raises RunError if a weight has a NaN or an infinity among this rank's rows.

    On several ranks, FSDP2 shards each block, then the rest, and every rank reads its own rows. A block is gathered for
    its own forward and backward pass only. A model that `fits_gathered` is gathered at once. With `mixed_precision`, on
    a GPU, weights are gathered in bf16 and compute as on a single rank (precision.py), and `frozen` ones are bf16. What
    learns, the optimizer's state and sums of gradients over the ranks stay fp32. Autocast remains necessary for what is
    not a parameter.
    """
    from transformers.distributed import DistributedConfig

    _, ranks = rank_and_ranks()
    mixed_precision = mixed_precision and device.type == "cuda"
    options = {"dtype": torch.bfloat16 if mixed_precision and frozen else torch.float32}
    with _own_groups(device) if ranks > 1 else nullcontext():
        if ranks > 1:
            options["distributed_config"] = DistributedConfig(fsdp_size=ranks, fsdp_mixed_precision=mixed_precision)
        model, report = auto_class.from_pretrained(path, config=config, output_loading_info=True, **options)
    if ranks > 1:
        _merge_tied_shards(model)
        model.set_reshard_after_forward(True, recurse=False)
        model.config.distributed_config = None  # with it, saving would gather the model in one rank's memory
    for name, parameter in model.named_parameters():
        if not local_part(parameter.detach()).sum().isfinite():  # a sum, because `isfinite` of them all takes memory
            raise RunError(f"{path}: {name} has values that are not finite: nothing can be learned from these weights")
    return model, sorted(report["missing_keys"])


@contextmanager
def _own_groups(device: torch.device) -> Iterator[None]:
    """Inside, transformers shards each block of a model on its own, and the rest together: not by the plans that
    the model's class, its config and its sub-models have. A group of the head alone would gather it for each chunk of
    positions, and a final norm that is kept gathered would not learn."""
    from transformers import modeling_utils
    from transformers.distributed import fsdp

    def groups_and_kept(model, plan) -> tuple[list[tuple[str, torch.nn.Module]], list]:  # of a model without memory yet
        # Of a model that fits, the hooks of each block would only delay the launches of every pass.
        own = set() if fits_gathered(model, device) else set(blocks(model))
        return [(name, module) for name, module in model.named_modules() if module in own], []

    # On a GPU, the warm-up would first allocate the whole model, if its config has no plan for tensor parallelism.
    with (
        patch.object(fsdp, "expand_fsdp_plan", groups_and_kept),
        patch.object(modeling_utils, "caching_allocator_warmup"),
    ):
        yield


def _merge_tied_shards(model) -> None:
    """Have FSDP gather each tied weight once, for all modules that share it.

    transformers (5.19) ties weights only after fully_shard has taken them for separate ones. If the ranks do not divide
    the rows, FSDP (torch 2.11 to 2.14) then pads a copy for each module, and updates reach one copy only
    (pytorch#176076): the other modules would go on computing with the last rows as they were loaded.
    """
    group = model._get_fsdp_state()._fsdp_param_group  # of what is in no block
    firsts = {}
    for shard in list(group.fsdp_params):
        module, name = shard._module_info.module, shard._module_info.param_name
        first = firsts.setdefault(getattr(module, name), shard)
        if first is not shard:
            first._module_info.shared_modules.append(module)
            first._module_info.shared_param_names.append(name)
            shard._post_load_hook_handle.remove()
            group.fsdp_params.remove(shard)


def stray_weights(model, held: list[torch.nn.Parameter]) -> list[str]:
    """The names of weights that learn, but with which the model computes from other tensors, or from other memory, than
    an optimizer that has `held` these parameters updates. Called after a backward pass, when shards are in place."""
    weights, copies = {parameter: name for name, parameter in model.named_parameters()}, set()
    for module in model.modules():
        group = module._get_fsdp_state()._fsdp_param_group if hasattr(module, "_get_fsdp_state") else None
        for shard in group.fsdp_params if group else ():
            parts = shard._sharded_param_data, local_part(shard.sharded_param.detach())
            if parts[0].untyped_storage().data_ptr() != parts[1].untyped_storage().data_ptr():
                copies.add(shard.sharded_param)
    lost = (weights.keys() - held) | (copies & weights.keys())
    return sorted(weights[parameter] for parameter in lost if parameter.requires_grad)


def add_method(model, name: str, function: Callable) -> None:
    """Give the model a method that calls function(model, ...), and before which FSDP gathers the weights, as before a
    forward pass. The method needs an argument: on a GPU, FSDP of torch 2.11 fails without."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    setattr(model, name, partial(function, model))  # FSDP wraps methods only
    register_fsdp_forward_method(model, name)


def fits_gathered(model, device: torch.device) -> bool:
    """Whether whole weights in bf16, and fp32 gradients of what learns, take a small share of a GPU."""
    size = sum(parameter.numel() * (6 if parameter.requires_grad else 2) for parameter in model.parameters())
    return device.type == "cpu" or size < GATHERED_SHARE * torch.cuda.get_device_properties(device).total_memory


def keep_gathered(model, after_forward: bool, after_backward: bool) -> None:
    """Whether the passes that follow leave a sharded model's weights gathered. While backward passes do, each rank adds
    up its own gradients. The first that does not sums them over the ranks."""
    model.set_reshard_after_forward(not after_forward)
    model.set_reshard_after_backward(not after_backward)
    model.set_requires_gradient_sync(not after_backward)


def compile_blocks(model) -> None:
    """Compile each block in place, for batches and sequences of any size. Equal blocks are compiled once."""
    for block in blocks(model, "compile"):
        block.forward = torch.compile(block.forward, dynamic=True)


def blocks(model, needed_by: str = "shards") -> list[torch.nn.Module]:
    """The model's blocks: modules of the classes that it must not split. Raises ValueError if there are none."""
    names = model._no_split_modules or ()
    found = [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in names]
    if not found:
        raise ValueError(f"{type(model).__name__} does not name its blocks: it cannot have {needed_by}")
    return found


def whole(tensor: torch.Tensor | ShardedPart) -> torch.Tensor:
    """The whole tensor, gathered if this rank holds a shard of it. All ranks call this."""
    if isinstance(tensor, ShardedPart):
        begin, shard = tensor.local(dist.get_rank(), dist.get_world_size())
        gathered = torch.zeros(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        gathered[begin : begin + len(shard)] = shard
        dist.all_reduce(gathered)
        return gathered.view(tensor.shape)
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def sharded_like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A tensor on the parameter's device, sharded as the parameter is. `local` is this rank's part of it."""
    local = local.to(parameter.device, non_blocking=True)
    if not is_sharded(parameter):
        return local
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(local, mesh, placements, shape=parameter.shape, stride=parameter.stride())
