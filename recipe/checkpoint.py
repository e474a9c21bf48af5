"""Models and checkpoints: which model a run starts or continues from, and how a checkpoint is written."""

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .arguments import RunArguments
from .dataset import named_function
from .errors import RunError
from .lora import adapted_model, check_adapters, check_flags

DEFAULT_MODEL = "facebook/opt-125m"
BUILTIN_MODEL = "recipe.tiny_model:build_tiny_model"
BUILTIN_BASE = "recipe.tiny_model:build_tiny_base"  # of adapters
BUILTIN_LEARNING_RATE = 3e-3
CHECKPOINTS_KEPT = 2


@dataclass(frozen=True)
class Models:
    """What a run begins with: names of models on the hub, or folders."""

    initial: str  # that the run began with when it was new
    loaded: str  # by trainer and engine: the same or, with --resume, the last checkpoint, if that is a whole model
    checkpoint: Path | None  # whose training state the trainer goes on from, with --resume


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """If a write to the folder fails because of the disk, raise the disk's error, such as "No space left on device".

    Writers hide it: torch.save says "unexpected pos 2929408 vs 2929296".
    """
    try:
        yield
    except Exception as error:
        try:
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(bytes(1 << 20))
                probe.flush()
                os.fsync(probe.fileno())
        except OSError as cause:
            raise OSError(cause.errno, cause.strerror, str(folder)) from error
        raise


def write_checkpoint(run_folder: Path, step: int, save: Callable[[Path], None]) -> Path:
    """Write a checkpoint with `save(folder)`, and return its folder. Old checkpoints are removed.

    The folder gets its final name last, so a kill at any moment leaves a whole checkpoint.
    """
    final = run_folder / f"checkpoint-{step:06d}"
    unfinished = run_folder / f"unfinished-{step:06d}"
    shutil.rmtree(unfinished, ignore_errors=True)
    with disk_errors(run_folder):
        unfinished.mkdir(parents=True)
        save(unfinished)
        for path in [*unfinished.rglob("*"), unfinished]:
            flush_to_disk(path)
    shutil.rmtree(final, ignore_errors=True)
    unfinished.rename(final)
    flush_to_disk(run_folder)
    for old in sorted(run_folder.glob("checkpoint-*"))[:-CHECKPOINTS_KEPT]:
        shutil.rmtree(old)
    return final


def last_checkpoint(run_folder: Path, of_model: str) -> Path:
    """The newest checkpoint. Raises RunError if there is none, or if its model differs from `of_model`."""
    checkpoints = sorted(run_folder.glob("checkpoint-*"))
    if not checkpoints:
        raise RunError(f"{run_folder} has no checkpoint to continue from")
    shapes = [check_model(str(path)) for path in (adapted_model(checkpoints[-1]) or checkpoints[-1], of_model)]
    if shapes[0] != shapes[1]:
        raise RunError(f"{checkpoints[-1]} is a checkpoint of another model than {of_model}: {shapes[0]}, {shapes[1]}")
    return checkpoints[-1]


def choose_models(run_folder: Path, args: RunArguments, device: str) -> Models:
    """The models of a new run, or of the one to resume.

    Without --model, the built-in model on CPU, with its own learning rate unless another was chosen. A model that is a
    function's to make is made in the run's folder. Raises RunError if a model cannot be loaded, or if the run to resume
    has no checkpoint or no steps left.
    """
    check_flags(args)
    name = args.model or DEFAULT_MODEL
    if args.model is None and ((run_folder / "model").is_dir() if args.resume else device == "cpu"):
        name = BUILTIN_BASE if args.lora_rank else BUILTIN_MODEL
        if "learning_rate" not in args.given and args.learning_rate == type(args).learning_rate:  # nor by a task
            args.learning_rate = BUILTIN_LEARNING_RATE
    initial = load_or_make(name, run_folder / "model", args)
    checkpoint = last_checkpoint(run_folder, of_model=initial) if args.resume else None
    if checkpoint:
        check_adapters(checkpoint, args)
        if (done := int(checkpoint.name.rpartition("-")[2])) >= args.steps:
            raise RunError(f"that run has done its {done} steps: ask for more with --steps")
    if args.ray_address:
        folders = {path for path in (initial, str(checkpoint or initial)) if os.path.isdir(path)}
        check_nodes(sorted(folders), "GPU" if device == "cuda" else "CPU")
    return Models(initial, initial if args.lora_rank else str(checkpoint or initial), checkpoint)


def load_or_make(name: str, folder: Path, args: RunArguments, flag: str = "--model") -> str:
    """The model of this name. If that is module:function, this folder, where the function has made it for a new run.

    Raises RunError if it cannot be loaded.
    """
    if re.fullmatch(r"[\w.]+:\w+", name):
        builder, name = name, str(folder)
        if not (args.resume and folder.is_dir()):
            named_function(flag, builder)(name, args.seed)
    check_model(name)
    return name


def check_nodes(folders: list[str], resource: str) -> None:
    """Raise RunError if a node with this resource, where Ray may place trainer or engine, lacks one of the folders."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

    lacking = ray.remote(lambda: [folder for folder in folders if not os.path.isdir(folder)])
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get(resource)]
    answers = [
        lacking.options(num_cpus=0, scheduling_strategy=On(node["NodeID"], soft=False)).remote() for node in nodes
    ]
    for node, missing in zip(nodes, ray.get(answers, timeout=60), strict=True):
        if missing:
            raise RunError(
                f"{missing[0]} is not on the node {node['NodeManagerAddress']}: on a cluster, a model's folder, and the"
                " --output of a run to --resume, must be on every node at the same path, or on a disk that all share"
            )


def check_model(model: str) -> dict:
    """The sizes that tell two models apart. Raises RunError if transformers cannot load the configuration."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model).to_dict()
    except Exception as error:  # transformers and its hub client raise different errors by version
        folder = "no such folder, and the hub has none" if not Path(model).exists() else "not a model's folder"
        raise RunError(f"cannot load the model {model}: {folder} ({str(error).splitlines()[0]})") from error
    names = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    return {name: config.get(name) for name in names}


def replace_file(path: Path, text: str) -> None:
    """Replace a file atomically: a kill at any moment leaves the old or the new text."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(text)
    flush_to_disk(unfinished)
    unfinished.rename(path)


def flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
