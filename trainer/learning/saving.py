"""Checkpoints written by any number of ranks, and read by any other number.

Each rank writes two files: some of the weights, each one whole, and its rows of the optimizer's state. It needs memory
for these and for one more weight. A single rank's files hold everything.
"""

import json
from pathlib import Path

import torch

from weight_sync.lora import LoRAWeight
from weight_sync.ranks import is_sharded, local_part

from ..errors import RunError
from .sharding import rank_and_ranks, sharded_like, whole

WEIGHTS_FILE, STATE_FILE = "model.safetensors", "trainer_state.pt"


def write_model(model, weights: dict[str, torch.Tensor | LoRAWeight], processor, folder: Path) -> None:
    """Write a model with these weights, and its tokenizer or processor, in Hugging Face format. Adapters are merged.

    Weights are gathered one at a time. All ranks call this.
    """
    from safetensors.torch import save_file

    rank, ranks = rank_and_ranks()
    tensors, weight_map, nbytes = {}, {}, [0] * ranks
    for name, weight in weights.items():
        base = weight.base if isinstance(weight, LoRAWeight) else weight
        owner = nbytes.index(min(nbytes))
        weight_map[name] = _file_name(WEIGHTS_FILE, owner, ranks)
        nbytes[owner] += base.numel() * base.dtype.itemsize
        tensor = whole(base)
        if owner == rank:
            tensor = tensor if base is weight else weight.merge(tensor)
            tensors[name] = tensor.detach().to("cpu", base.dtype).contiguous()
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / _file_name(WEIGHTS_FILE, rank, ranks), {"format": "pt"})
    if rank:
        return
    if ranks > 1:
        index = {"metadata": {"total_size": sum(nbytes)}, "weight_map": weight_map}
        (folder / f"{WEIGHTS_FILE}.index.json").write_text(json.dumps(index, indent=2))
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    processor.save_pretrained(folder)


def write_state(folder: Path, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write the optimizer's state, which may be offloaded, and the step. All ranks call this."""
    folder.mkdir(exist_ok=True)
    state = optimizer.state_dict()
    for i, moments in state["state"].items():
        state["state"][i] = {name: local_part(tensor) for name, tensor in moments.items()}
    torch.save({"optimizer": state, "step": step}, folder / _file_name(STATE_FILE, *rank_and_ranks()))


def state_files(folder: Path) -> list[Path]:
    """The files that `write_state` has written on all ranks, in the order of the ranks."""
    return sorted(folder.glob(STATE_FILE.replace(".", "*.")))


def load_state(folder: Path, parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> int:
    """Load the optimizer's state for these parameters, of which this rank takes its rows. Returns the step
    that was saved with it. Raises RunError if other parameters learned then, or if a file is missing."""
    saved = [torch.load(file, map_location="cpu", mmap=True, weights_only=True) for file in state_files(folder)]
    if not saved:
        raise RunError(f"{folder} has no {STATE_FILE}, so no run can go on from it")
    state = saved[0].pop("optimizer")
    if (count := len(state["param_groups"][0]["params"])) != len(parameters):
        raise RunError(f"{count} tensors learned in that run, and {len(parameters)} now: is --train-vision as it was?")
    moments = [state["state"], *(other["optimizer"]["state"] for other in saved[1:])]
    for i, parameter in enumerate(parameters):
        for name in state["state"].get(i, {}).keys() - {"step"}:
            shards = [rank_moments[i][name] for rank_moments in moments]
            rows = _local_rows(parameter, shards)
            if rows.shape != local_part(parameter.detach()).shape:  # AdamW would go beyond their end
                raise RunError(f"{folder} lacks files of the {STATE_FILE} that several ranks wrote")
            state["state"][i][name] = sharded_like(parameter, rows)
    state["param_groups"] = optimizer.state_dict()["param_groups"]  # with this run's flags
    optimizer.load_state_dict(state)
    return saved[0]["step"]


def _local_rows(parameter: torch.Tensor, shards: list[torch.Tensor]) -> torch.Tensor:
    """The rows that this rank has of a parameter, cut out of the shards of all ranks that saved."""
    if shards[0].shape == parameter.shape:
        shards = shards[:1]  # of an adapter, each rank saved the whole
    if not is_sharded(parameter):
        return torch.cat(shards) if shards[1:] else shards[0]
    count = -(-parameter.shape[0] // parameter.device_mesh.size())  # divided as by torch.chunk
    begin, rows = parameter.device_mesh.get_local_rank() * count, []
    for shard in shards:
        rows.append(shard[max(0, begin) : max(0, begin + count)])
        begin -= len(shard)
    return torch.cat(rows)


def _file_name(name: str, rank: int, ranks: int) -> str:
    """The name of a rank's file: of model.safetensors, model-00001-of-00002.safetensors."""
    stem, ending = name.split(".")
    return f"{stem}-{rank + 1:05}-of-{ranks:05}.{ending}" if ranks > 1 else name
