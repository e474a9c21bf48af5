"""Command-line flags from dataclasses. A field gives a flag's name, default and help, and its type gives the bounds."""

import argparse
import dataclasses
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, TypeAdapter, ValidationError

from ..errors import RunError, TaskError
from ..flags import Flag, arg, flags_in, flat, with_values
from ..functions import import_module

NOT_SAVED = {"resume", "output", "ray_address", "remarks"}  # arguments that a resumed run does not inherit
OF_A_TOPOLOGY = ("trainers", "engines_per_gpu", "engine_url")  # flags that others refuse, and that cannot be unset
PATHS = ("model", "critic_model", "reward_model", "teacher", "dataset", "eval_dataset")  # may be files or folders
TASKS = Path(__file__).parents[1] / "tasks"
REFUSED = [  # flags, what each of them is told, and whether these arguments are wrong for it
    (("eval_samples",), "needs --eval-every", lambda a: not a.eval_every),
    (("eval_share",), "is no share of --eval-dataset or --eval-split", lambda a: a.eval_dataset or a.eval_split),
    (("max_tool_iterations",), "needs --tools or --environment", lambda a: not (a.tools or a.environment)),
    (
        ("agent", "agent_command"),
        "has the conversations alone, without --tools, --environment or a second agent",
        lambda a: bool(a.agent) + bool(a.agent_command) + bool(a.tools or a.environment) > 1,
    ),
    (("mismatch_correction",), "does nothing with --loss cispo, which clips the ratio", lambda a: a.loss == "cispo"),
    (("group_size",), "is at least 2 in GRPO", lambda a: a.group_size == 1 and a.dynamic_sampling is not None),
    (("reward_coef",), "needs a --group-size of 2 or more", lambda a: a.group_size == 1),
    (
        ("engines", "engine_args", "gpu_memory_utilization"),
        "is for engines that a run starts: --engine-url names servers",
        lambda a: a.engine_url,
    ),
    (("output",), "is another folder than that of --resume", lambda a: a.resume),
]
# Flags that are gone: the value that they have now, and what to do instead.
GONE = {
    "enforce_eager": (False, "--engine-args '{\"enforce_eager\": true}' does that"),
    "attention": (None, "the trainer finds out which attention is right"),
    "kl_target": (None, "--kl-coef stays as it is"),
    "kl_horizon": (10_000, "--kl-coef stays as it is"),
    "reward_workers": (1, "as many processes as the CPUs allow compute rewards"),
    "reward_resources": ('{"CPU": 0}', "a reward asks Ray for what it needs"),
}
# By a flag that only one of the scripts before train_grpo.py had: its topology. The others had separate devices.
TOPOLOGIES = {"engine_url": "servers", "engines_per_gpu": "shared"}


@dataclasses.dataclass
class RunArguments:
    """Which model, how many steps, where the results go."""

    model: str | None = arg(
        None,
        help="a model on the Hugging Face hub, a folder, or module:function, which is called with (folder, seed) and"
        " writes a model there (default: facebook/opt-125m; CPU: a small built-in one)",
    )
    steps: Annotated[int, Ge(1)] = arg(30, help="learning steps")
    seed: Annotated[int, Ge(0), Lt(2**32)] = arg(
        0, help="seed of the order of the prompts, of sampling and of the built-in model"
    )
    ray_address: str | None = arg(
        None, help='address of a Ray cluster to join; "auto": the one on this machine (default: start Ray)'
    )
    output: Path | None = arg(None, help="run folder (default: a new one under runs/)")
    save_every: Annotated[int, Ge(0)] = arg(10, help="save a checkpoint every so many steps and at the end; 0: never")
    report_to: list[str] = arg(
        lambda: ["tensorboard"],
        help="where metrics go, in addition to the run folder: tensorboard, wandb, trackio, mlflow or another of"
        " accelerate's trackers, or none",
    )
    resume: Path | None = arg(None, help="folder of a run to continue from its last checkpoint")
    timeout: Annotated[float, Gt(0), Le(1e6)] = arg(
        3600.0,
        help="seconds that a phase (starting, generating, learning, syncing) may take; then the run ends with an error",
    )
    timeline: bool = arg(
        False, help="write what each process does when to timeline.json in the run folder, which ui.perfetto.dev opens"
    )
    # No flags: the flags that were given, now or to the run to --resume, and remarks on the latter.
    given: dict[str, object] = dataclasses.field(default_factory=dict)
    remarks: list[str] = dataclasses.field(default_factory=list)


class Known(SimpleNamespace):
    """The values of a script's flags; None for those that other scripts have."""

    def __getattr__(self, _):
        return None


class Parser(argparse.ArgumentParser):
    """The parser of these flags. --help groups them under the first lines of the classes that declare them."""

    def __init__(self, flags: dict[str, Flag], description: str):
        settings = ", ".join(f"{name} ({each.default})" for name, each in flags.items() if each.is_setting)
        super().__init__(
            description=description,
            usage="%(prog)s [--flag value ...]",
            epilog=f"DEFAULTS of a task (docs/tasks.md) may also set: {settings}".replace("%", "%%"),
            argument_default=argparse.SUPPRESS,  # what is not given is not there
            allow_abbrev=False,
        )
        self.flags, groups = flags, {}
        for name, each in flags.items():
            if each.is_setting:
                continue
            if each.title not in groups:
                groups[each.title] = self.add_argument_group(each.title)
            options = {"dest": name}
            for type_ in (each.type, *get_args(each.type)):
                if type_ is bool:
                    options |= {"nargs": "?", "const": True}
                elif get_origin(type_) is list:
                    options |= {"nargs": "+", "action": "extend"}
                elif get_origin(type_) is Literal:
                    options |= {"choices": get_args(type_)}
            default = "" if each.default is None else f" (default: {each.default})"
            help_text = (each.help + default).replace("%", "%%")
            groups[each.title].add_argument(*filter(None, (flag(name), each.alias)), help=help_text, **options)
            if "_" in name:
                self.add_argument(f"--{name}", help=argparse.SUPPRESS, **options)

    def check(self, values: dict, source: str = "argument") -> dict:
        """These values of flags, or their texts, with the flags' types. One that is wrong is a usage error."""
        checked = {}
        for name, value in values.items():
            if "" in (value if isinstance(value, list) else [value]):
                self.error(f"{source} {flag(name)} is empty: is a variable of the shell not set?")
            try:
                checked[name] = validated(self.flags[name], value)
            except ValidationError as invalid:
                error = invalid.errors()[0]
                label = name if self.flags[name].is_setting else flag(name)
                self.error(f"{source} {label}: {error['msg']}, not {error['input']}")
        return checked


def validated(flag: Flag, value):
    """The value, or its text, with the flag's type. Raises ValidationError if it has another or is not finite."""
    return TypeAdapter(flag.type, config=ConfigDict(allow_inf_nan=False)).validate_python(value)


def parse(cls: type, description: str):
    """An instance of this dataclass from the command line. With --resume, the flags given to that run are the defaults.

    `description` is the script's docstring; its first line heads --help. Bad arguments exit with a usage error.
    """
    flags, remarks = flags_in(cls), []
    parser = Parser(flags, description.splitlines()[0])
    now = given = parser.check(vars(parser.parse_args()))
    paths = [name for name in PATHS if os.path.exists(given.get(name, ""))]
    given |= {name: os.path.abspath(given[name]) for name in paths}  # actors, and --resume, have another working folder
    if folder := given.get("resume"):
        try:
            saved = of_today(flags, json.loads((folder / "args.json").read_text()))
            given, remarks = resumed(flags, saved, given)
        except (OSError, ValueError, KeyError) as error:
            parser.error(f"--resume {folder}: not a run folder, which has args.json and checkpoints ({error!r})")
        except RunError as error:
            parser.error(f"--resume {folder}: {error}")
    task = given.get("task", flags["task"].default if "task" in flags else "")
    try:
        defaults = task_defaults(task, flags, given)
    except TaskError as error:
        parser.error(str(error))
    values = parser.check(defaults, f"DEFAULTS of --task {task}:") | given
    saved = {name: value for name, value in given.items() if name not in NOT_SAVED}
    args = with_values(cls(), values | {"given": saved, "remarks": remarks})
    for names, told, is_wrong in REFUSED:
        wrong = [name for name in names if name in now]  # now: a saved flag cannot be dropped
        if wrong and is_wrong(Known(**flat(args))):
            parser.error(f"{flag(wrong[0])} {told}")
    own = {name for name, each in flags.items() if not each.is_setting}
    if options := json.loads(now.get("engine_args", "{}")).keys() & own:
        parser.error(f"--engine-args: {min(options)} has a flag of its own, {flag(min(options))}")
    return args


def of_today(flags: dict[str, Flag], saved: dict) -> dict:
    """The arguments `saved` in args.json, by the names of today. Raises RunError for a flag that is gone, if that run
    had it with another value than it has now."""
    saved = json.loads(re.sub(r'"recipe\.(?=[\w.]+:)', '"trainer.', json.dumps(saved)))  # as the package was called
    for name in set(saved["given"]) & GONE.keys():
        constant, advice = GONE[name]
        if saved[name] != constant:
            go_on = f'without "{name}" among those "given" in args.json, the run goes on'
            raise RunError(f"that run had {flag(name)} {saved[name]}. The flag is gone: {advice}; {go_on}")
    changes = {}
    if "topology" in flags and "dynamic_sampling" in saved and "topology" not in saved:  # a script before train_grpo.py
        changes["topology"] = next((value for name, value in TOPOLOGIES.items() if name in saved), "separate")
        if "max_staleness" in saved:
            changes["max_staleness"] = saved["max_staleness"]  # whose default was 2
        if "quantization_config" in saved:
            changes["quantization"] = saved["quantization_config"] or "auto"
    if "placement" in saved:  # PPO's
        changes["topology"] = {"colocated": "shared", "split": "separate"}[saved["placement"]]
    given = [name for name in saved["given"] if name not in {*GONE, "quantization_config", "placement"}]
    return saved | changes | {"given": [*given, *changes]}


def resumed(flags: dict[str, Flag], saved: dict, now: dict) -> tuple[dict, list[str]]:
    """The flags of a run that goes on: those given to it before, by its `saved` arguments, overridden by those given
    `now`. Also returns remarks on them for the user."""
    before = {name: saved[name] for name in saved["given"]}
    unknown = [flag(name) for name in sorted(before.keys() - flags.keys())]
    for name in before.keys() & flags.keys() - now.keys():
        try:
            before[name] = validated(flags[name], before[name])
        except ValidationError:
            unknown.append(f"{flag(name)} {before.pop(name)}")
    if {"reward", "reward_model"} & now.keys():
        before.pop("reward_weights", None)  # they were those of other rewards
    if now.get("topology", saved.get("topology")) != saved.get("topology"):
        before = {name: value for name, value in before.items() if name not in OF_A_TOPOLOGY}
    changed = [name for name, value in now.items() if name not in NOT_SAVED and saved.get(name, value) != value]
    remarks = []
    if unknown:
        remarks.append(f"that run had {', '.join(unknown)}, which this script does not know: left out")
    if changed:
        remarks.append("not as in that run: " + ", ".join(f"{flag(n)} {now[n]} ({saved[n]})" for n in changed))
    return {name: value for name, value in before.items() if name in flags} | now, remarks


def flag(name: str) -> str:
    """The flag of the argument with this name."""
    return f"--{name.replace('_', '-')}"


def task_defaults(task: str, flags: dict[str, Flag], given: dict) -> dict:
    """What the task sets: `DEFAULTS` of the module trainer/tasks/`task`.py, or of one in the working folder.

    Leaves out what the `given` flags replace. A dataset replaces the task's, with its splits and its evaluation, and
    the rewards of a task that nobody asked for. A reward or a reward model replaces the task's rewards. An environment
    needs no dataset, and replaces a task that nobody asked for.

    Raises TaskError if there is no such module, or no flag for one of its defaults.
    """
    if not task:
        return {}
    is_built_in = (TASKS / f"{task}.py").exists()
    module = import_module(f"--task {task}", f"trainer.tasks.{task}" if is_built_in else task)
    if not isinstance(defaults := getattr(module, "DEFAULTS", None), dict):
        raise TaskError(f"--task {task}: {module.__file__} has no DEFAULTS")
    if unknown := defaults.keys() - flags.keys():
        raise TaskError(f"--task {task}: DEFAULTS has {' and '.join(sorted(unknown))}, for which there is no flag")
    if {"environment", "agent", "agent_command"} & given.keys() and "task" not in given:
        return {}
    replaced = ()  # the beginnings of the names of defaults that do not apply
    if "dataset" in given:
        replaced += ("dataset", "eval_")
    if given.keys() & {"eval_dataset", "eval_split", "eval_share"}:
        replaced += ("eval_dataset", "eval_split", "eval_share")
    if "reward" in given or "reward_model" in given or ("dataset" in given and "task" not in given):
        replaced += ("reward",)
    return {name: value for name, value in defaults.items() if not name.startswith(replaced)}
