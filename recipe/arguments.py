"""Command-line flags made from dataclasses. A field gives a flag's name, default and help, and its type the bounds."""

import argparse
import copy
import dataclasses
import json
import os
from pathlib import Path
from typing import Annotated

from annotated_types import Ge
from pydantic import AfterValidator, TypeAdapter, ValidationError
from transformers.hf_argparser import HfArg, HfArgumentParser

from .dataset import import_module
from .errors import TaskError
from .reporting import TRACKERS, tracker_names

NOT_SAVED = {"resume", "output", "verbose", "ray_address"}  # arguments that --resume does not take over
NOT_SAVED |= {"default_max_mismatch", "weights_proven"}  # a script's, and no flags


@dataclasses.dataclass
class RunArguments:
    """Which model, how many steps, where the results go."""

    model: str | None = HfArg(
        default=None,
        help="Hugging Face model or folder, or module:function(folder, seed) that writes one (default: the script's"
        " choice for the hardware)",
    )
    steps: Annotated[int, Ge(1)] = HfArg(default=30, help="learning steps")
    seed: Annotated[int, Ge(0)] = HfArg(default=0, help="for the order of prompts, sampling and the built-in model")
    ray_address: str | None = HfArg(
        default=None, help='address of a Ray cluster, or "auto" (default: start Ray here, for this run)'
    )
    output: Path | None = HfArg(default=None, help="run folder (default: a new one under runs/)")
    save_every: Annotated[int, Ge(0)] = HfArg(
        default=10, help="steps between checkpoints, with one more at the end; 0: none"
    )
    report_to: Annotated[list[str], AfterValidator(tracker_names)] = HfArg(
        default_factory=lambda: ["tensorboard"], help="where metrics and completions go: " + ", ".join(TRACKERS)
    )
    resume: Path | None = HfArg(default=None, help="run folder: continue from its last checkpoint")
    verbose: bool = HfArg(default=False, help="also show what Ray and vLLM print to run.log")
    # Names of the arguments that were set, now or in the run to --resume.
    given: list[str] = dataclasses.field(default_factory=list, init=False)


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """--help with each flag in one spelling, and without "(default: None)"."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        action = copy.copy(action)
        action.option_strings = [flag for flag in action.option_strings if "_" not in flag]
        return super()._format_action_invocation(action)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if isinstance(action, argparse._StoreFalseAction):  # a --no-flag
            return "turn this off"
        return action.help if action.default is None else super()._get_help_string(action)


def parse(cls: type[RunArguments], description: str) -> RunArguments:
    """An instance of this dataclass from the command line. With --resume, the flags given to that run are the defaults.

    `description` is the script's docstring; its first line heads --help. Exits with a usage error for bad arguments.
    """
    adapter, types = TypeAdapter(cls), {field: field.type for field in dataclasses.fields(cls)}
    headline, usage = description.splitlines()[0], "%(prog)s [--flag value ...]"
    parser = HfArgumentParser(cls, description=headline, usage=usage, formatter_class=Help)
    for field, bounded in types.items():
        field.type = bounded  # the parser strips the bounds, also from the classes that this one inherits
    parser.parse_args()  # while it knows the defaults: for --help, and to reject unknown flags
    parser.set_defaults(**{field.name: None for field in dataclasses.fields(cls)})
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    if folder := given.get("resume"):
        if "output" in given:
            parser.error("--resume continues in that run's folder: it takes no --output")
        try:
            saved = json.loads((folder / "args.json").read_text())
            # Not the rest: those are that script's defaults, which need not suit this one.
            given = {name: saved[name] for name in saved["given"]} | given
        except (OSError, ValueError, KeyError) as error:
            parser.error(f"--resume {folder}: not a run folder ({error!r})")
    for name in ("model", "critic_model", "reward_model", "dataset", "eval_dataset"):
        if (path := given.get(name)) and os.path.exists(path):
            given[name] = os.path.abspath(path)  # actors, and a run resumed elsewhere, have another working folder
    try:
        args = adapter.validate_python(task_defaults(cls, given) | given)
    except TaskError as error:
        parser.error(str(error))
    except ValidationError as invalid:
        error = invalid.errors()[0]
        parser.error(f"argument --{str(error['loc'][0]).replace('_', '-')}: {error['msg']}, not {error['input']}")
    args.given = [name for name in given if name not in NOT_SAVED and hasattr(args, name)]  # not another script's own
    return args


def task_defaults(cls: type, given: dict) -> dict:
    """What the task sets: `DEFAULTS` of the module recipe/`task`.py, or of one in the working folder.

    If a dataset is given, the task's splits and its evaluation do not apply; if a reward or a reward model is given,
    its rewards do not. Raises TaskError if there is no such module, or no such flag.
    """
    if not (task := given.get("task", getattr(cls, "task", None))):
        return {}
    ours = Path(__file__).with_name(f"{task}.py").exists()
    module = import_module(f"--task {task}", f"recipe.{task}" if ours else task)
    if not isinstance(defaults := getattr(module, "DEFAULTS", None), dict):
        raise TaskError(f"--task {task}: {module.__file__} has no DEFAULTS")
    if unknown := defaults.keys() - {field.name for field in dataclasses.fields(cls)}:
        raise TaskError(f"--task {task}: DEFAULTS has {' and '.join(sorted(unknown))}, for which there is no flag")
    replaced = ("dataset", "eval_") if "dataset" in given else ()
    replaced += ("reward",) if {"reward", "reward_model"} & given.keys() else ()
    return {name: value for name, value in defaults.items() if not name.startswith(replaced)}


def json_object(text: str) -> str:
    """`text`, if it is a JSON object; a ValueError if not."""
    if not isinstance(json.loads(text), dict):
        raise ValueError("a JSON object is wanted")
    return text
