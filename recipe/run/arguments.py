"""Command-line flags from dataclasses. A field gives a flag's name, default and help, and its type gives the bounds."""

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Gt, Lt
from pydantic import TypeAdapter, ValidationError
from transformers.hf_argparser import HfArg, HfArgumentParser

from ..errors import TaskError
from ..functions import import_module

NOT_SAVED = {"resume", "output", "ray_address", "remarks", "api_key"}  # arguments that a resumed run does not inherit
PATHS = ("model", "critic_model", "reward_model", "teacher", "dataset", "eval_dataset")  # may be files or folders
TASKS = Path(__file__).parents[1] / "tasks"
NEEDS = [  # flags that do nothing alone: what they need, in words, and whether these arguments have it
    (("lora_alpha", "lora_targets", "save_merged"), "--lora-rank", lambda a: a.lora_rank),
    (("eval_samples", "pass_reward"), "--eval-every", lambda a: a.eval_every),
    (
        ("tool_parser", "max_tool_iterations", "tool_timeout"),
        "--tools or --environment",
        lambda a: a.tools or a.environment,
    ),
    (("mismatch_correction", "importance_cap"), "another --loss: cispo clips the ratio", lambda a: a.loss != "cispo"),
    (("importance_cap",), "a --mismatch-correction", lambda a: a.mismatch_correction != "none"),
    (("importance_floor",), "--mismatch-correction icepop", lambda a: a.mismatch_correction == "icepop"),
    (("kl_horizon",), "--kl-target", lambda a: a.kl_target),
    (("reward_coef",), "--reward or --environment", lambda a: a.reward or a.environment),
]


@dataclasses.dataclass
class RunArguments:
    """Which model, how many steps, where the results go."""

    model: str | None = HfArg(
        default=None,
        help="a model on the Hugging Face hub, a folder, or module:function, which is called with (folder, seed) and"
        " writes a model there (default: facebook/opt-125m; CPU: a small built-in one)",
    )
    steps: Annotated[int, Ge(1)] = HfArg(default=30, help="learning steps")
    seed: Annotated[int, Ge(0), Lt(2**32)] = HfArg(
        default=0, help="seed of the order of the prompts, of sampling and of the built-in model"
    )
    ray_address: str | None = HfArg(
        default=None, help='address of a Ray cluster to join; "auto": the one on this machine (default: start Ray)'
    )
    output: Path | None = HfArg(default=None, help="run folder (default: a new one under runs/)")
    save_every: Annotated[int, Ge(0)] = HfArg(
        default=10, help="save a checkpoint every so many steps and at the end; 0: never"
    )
    report_to: list[str] = HfArg(
        default_factory=lambda: ["tensorboard"],
        help="where metrics go, in addition to the run folder: tensorboard, wandb, trackio, mlflow or another of"
        " accelerate's trackers, or none",
    )
    resume: Path | None = HfArg(default=None, help="folder of a run to continue from its last checkpoint")
    timeout: Annotated[float, Gt(0)] = HfArg(
        default=3600.0,
        help="seconds that a phase (starting, generating, learning, syncing) may take; then the run ends with an error",
    )
    # No flags: the names of the arguments that were given, now or to the run to --resume, and remarks on the latter.
    given: list[str] = dataclasses.field(default_factory=list, init=False)
    remarks: list[str] = dataclasses.field(default_factory=list, init=False)


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """--help without "(default: None)"."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if isinstance(action, argparse._StoreFalseAction):  # a --no-flag
            return "turn this off"
        return action.help if action.default is None else super()._get_help_string(action)


class Parser(HfArgumentParser):
    """The flags of a dataclass. --help groups them under the first lines of the classes that declare them."""

    def __init__(self, cls: type, description: str):
        types = {field: field.type for field in dataclasses.fields(cls)}
        super().__init__(
            cls,
            description=description,
            usage="%(prog)s [--flag value ...]",
            formatter_class=Help,
            allow_abbrev=False,
        )
        for field, bounded in types.items():
            field.type = bounded  # HfArgumentParser strips the bounds, also from the classes that this one inherits
        groups = {}
        for action in [action for action in self._actions if action.dest != "help"]:
            action.option_strings = [name for name in action.option_strings if "_" not in name]  # --a_b works unnamed
            declaring = (base for base in reversed(cls.__mro__) if action.dest in vars(base).get("__annotations__", ()))
            title = next(declaring, cls).__doc__.splitlines()[0].rstrip(".")
            if title not in groups:
                groups[title] = self.add_argument_group(title)
            self._optionals._group_actions.remove(action)
            groups[title]._group_actions.append(action)

    def given(self) -> dict:
        """The values of the flags on the command line, and no others."""
        unset = argparse.Namespace(**{action.dest: None for action in self._actions})  # or it would get the defaults
        return {name: value for name, value in vars(self.parse_args(namespace=unset)).items() if value is not None}


def parse(cls: type[RunArguments], description: str) -> RunArguments:
    """An instance of this dataclass from the command line. With --resume, the flags given to that run are the defaults.

    `description` is the script's docstring; its first line heads --help. Bad arguments exit with a usage error.
    """
    adapter, parser = TypeAdapter(cls), Parser(cls, description.splitlines()[0])
    now = given = parser.given()
    remarks = []
    paths = [name for name in PATHS if os.path.exists(given.get(name, ""))]
    given |= {name: os.path.abspath(given[name]) for name in paths}  # actors, and --resume, have another working folder
    if folder := given.get("resume"):
        if "output" in given:
            parser.error("--resume continues in that run's folder: it takes no --output")
        try:
            given, remarks = resumed(cls, json.loads((folder / "args.json").read_text()), given)
        except (OSError, ValueError, KeyError) as error:
            parser.error(f"--resume {folder}: not a run folder, which has args.json and checkpoints ({error!r})")
    try:
        args = adapter.validate_python(task_defaults(cls, given) | given)
    except TaskError as error:
        parser.error(str(error))
    except ValidationError as invalid:
        error = invalid.errors()[0]
        source = "argument" if error["loc"][0] in given else f"DEFAULTS of --task {given.get('task', cls.task)}:"
        parser.error(f"{source} {flag(error['loc'][0])}: {error['msg']}, not {error['input']}")
    for names, need, has_it in NEEDS:
        if (idle := [name for name in names if name in now]) and not has_it(args):  # a saved flag cannot be dropped
            parser.error(f"{flag(idle[0])} needs {need}")
    if options := json.loads(now.get("engine_args", "{}")).keys() & vars(args).keys():
        parser.error(f"--engine-args: {min(options)} has a flag of its own, {flag(min(options))}")
    args.given, args.remarks = [name for name in given if name not in NOT_SAVED], remarks
    return args


def resumed(cls: type, saved: dict, now: dict) -> tuple[dict, list[str]]:
    """The flags of a run that goes on: those given to it before, by its `saved` arguments, overridden by those given
    `now`. Also returns remarks on them for the user."""
    types = {field.name: field.type for field in dataclasses.fields(cls)}
    before = {name: saved[name] for name in saved["given"]}
    unknown = [flag(name) for name in sorted(before.keys() - types.keys())]
    for name in before.keys() & types.keys() - now.keys():
        try:
            TypeAdapter(types[name]).validate_python(before[name])
        except ValidationError:
            unknown.append(f"{flag(name)} {before.pop(name)}")
    if {"reward", "reward_model"} & now.keys():
        before.pop("reward_weights", None)  # they were those of other rewards
    changed = [name for name, value in now.items() if name not in NOT_SAVED and saved.get(name, value) != value]
    remarks = []
    if unknown:
        remarks.append(f"that run had {', '.join(unknown)}, which this script does not know: left out")
    if changed:
        remarks.append("not as in that run: " + ", ".join(f"{flag(n)} {now[n]} ({saved[n]})" for n in changed))
    return {name: value for name, value in before.items() if name in types} | now, remarks


def flag(name: str) -> str:
    """The flag of the argument with this name."""
    return f"--{name.replace('_', '-')}"


def task_defaults(cls: type, given: dict) -> dict:
    """What the task sets: `DEFAULTS` of the module recipe/tasks/`task`.py, or of one in the working folder.

    Leaves out what the `given` flags replace. A dataset replaces the task's, with its splits and its evaluation, and
    the rewards of a task that nobody asked for. A reward or a reward model replaces the task's rewards. An environment
    needs no dataset, and replaces a task that nobody asked for.

    Raises TaskError if there is no such module, or no flag for one of its defaults.
    """
    if not (task := given.get("task", getattr(cls, "task", None))):
        return {}
    is_built_in = (TASKS / f"{task}.py").exists()
    module = import_module(f"--task {task}", f"recipe.tasks.{task}" if is_built_in else task)
    if not isinstance(defaults := getattr(module, "DEFAULTS", None), dict):
        raise TaskError(f"--task {task}: {module.__file__} has no DEFAULTS")
    if unknown := defaults.keys() - {field.name for field in dataclasses.fields(cls)}:
        raise TaskError(f"--task {task}: DEFAULTS has {' and '.join(sorted(unknown))}, for which there is no flag")
    if "environment" in given and "task" not in given:
        return {}
    replaced = ()  # the beginnings of the names of defaults that do not apply
    if "dataset" in given:
        replaced += ("dataset", "eval_")
    if given.keys() & {"eval_dataset", "eval_split", "eval_share"}:
        replaced += ("eval_dataset", "eval_split", "eval_share")
    if "reward" in given or "reward_model" in given or ("dataset" in given and "task" not in given):
        replaced += ("reward",)
    return {name: value for name, value in defaults.items() if not name.startswith(replaced)}
