"""Checkpoints of any number of ranks, for any number of ranks.

Each rank writes a part: a file with its share of the weights, and one with its rows of the optimizer's state. It needs
memory for these and for one whole tensor. A single rank's parts are the whole.
"""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from weight_sync.lora import LoRAWeight

from .sharding import like, local_part, whole

WEIGHTS_FILE, STATE_FILE = "model.safetensors", "trainer_state.pt"


def write_model(model, weights: dict[str, torch.Tensor | LoRAWeight], tokenizer, folder: Path) -> None:
    """Write a model with these weights, and its tokenizer, in Hugging Face format. Adapters are merged.

    Tensors are gathered one at a time. All ranks call this.
    """
    from safetensors.torch import save_file

    rank, ranks = _rank_and_ranks()
    mine, files, nbytes = {}, {}, [0] * ranks
    for name, weight in weights.items():
        base = weight.base if isinstance(weight, LoRAWeight) else weight
        owner = nbytes.index(min(nbytes))
        files[name] = _part_name(WEIGHTS_FILE, owner, ranks)
        nbytes[owner] += base.numel() * base.dtype.itemsize
        tensor = whole(base)
        if owner == rank:
            tensor = tensor if base is weight else weight.merge(tensor)
            mine[name] = tensor.detach().to("cpu", base.dtype).contiguous()
    folder.mkdir(exist_ok=True)
    save_file(mine, folder / _part_name(WEIGHTS_FILE, rank, ranks), {"format": "pt"})
    if rank:
        return
    if ranks > 1:
        index = {"metadata": {"total_size": sum(nbytes)}, "weight_map": files}
        (folder / f"{WEIGHTS_FILE}.index.json").write_text(json.dumps(index, indent=2))
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_state(folder: Path, optimizer: torch.optim.Optimizer, **others) -> None:
    """Write the state of the optimizer, also while it is offloaded, and `others` beside it. All ranks call this."""
    state = optimizer.state_dict()
    for i, moments in state["state"].items():
        state["state"][i] = {name: local_part(tensor) for name, tensor in moments.items()}
    torch.save({"optimizer": state} | others, folder / _part_name(STATE_FILE, *_rank_and_ranks()))


def state_files(folder: Path) -> list[Path]:
    """What `write_state` has written on all ranks."""
    return sorted(folder.glob(STATE_FILE.replace(".", "*.")))


def load_state(folder: Path, parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> dict:
    """Load the state of the optimizer of these parameters: this rank's rows, whatever the number of ranks was. Returns
    what was written beside it."""
    parts = [torch.load(file, map_location="cpu", mmap=True, weights_only=True) for file in state_files(folder)]
    state = parts[0].pop("optimizer")
    moments = [state["state"], *(part["optimizer"]["state"] for part in parts[1:])]
    for i, parameter in enumerate(parameters):
        for name in state["state"].get(i, {}).keys() - {"step"}:
            state["state"][i][name] = like(parameter, _rows(parameter, [part[i][name] for part in moments]))
    optimizer.load_state_dict(state)
    return parts[0]


def _rows(parameter: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
    """This rank's rows of what the parts of all ranks add up to. Of adapters, each part is whole."""
    if parts[0].shape == parameter.shape:
        parts = parts[:1]
    if not isinstance(parameter, DTensor):
        return torch.cat(parts) if parts[1:] else parts[0]
    rows = -(-parameter.shape[0] // parameter.device_mesh.size())  # divided as by torch.chunk
    begin, found = parameter.device_mesh.get_local_rank() * rows, []
    for part in parts:
        found.append(part[max(0, begin) : max(0, begin + rows)])
        begin -= len(part)
    return torch.cat(found)


def _part_name(name: str, rank: int, ranks: int) -> str:
    """Of model.safetensors: model-00001-of-00002.safetensors."""
    stem, ending = name.split(".")
    return f"{stem}-{rank + 1:05}-of-{ranks:05}.{ending}" if ranks > 1 else name


def _rank_and_ranks() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
