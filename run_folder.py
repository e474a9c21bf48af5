"""What a run leaves behind: a folder with its arguments, metrics, picture, log and checkpoints.

args.json             the arguments, and which of them were given: those are --resume's defaults
metrics.jsonl         one line a step
tensorboard/          the same as TensorBoard events
reward.png            reward, mismatch and sync time over the steps
run.log               everything that Ray, vLLM and the actors printed
lock                  is locked while a run goes on
checkpoint-000010/    Hugging Face model and tokenizer, and trainer_state.pt to go on from; the last two are kept
"""

import argparse
import fcntl
import gc
import json
import os
import re
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from grpo import ADVANTAGES, DivergenceError, GRPOConfig, MismatchError, Rollout
from rlhf_utils import WeightSyncError
from task import TaskError

DEFAULT_MODEL = "facebook/opt-125m"
CHECKPOINTS_KEPT = 2


class RunError(RuntimeError):
    """A reason to end the run, said in words for the user."""


USER_ERRORS = (RunError, TaskError, MismatchError, DivergenceError, WeightSyncError)  # their text says it all


# --- Arguments --------------------------------------------------------------------------------------------------------


def parse_args(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Add the arguments that every script has, and parse. With --resume, what that run was given are the defaults."""
    add = parser.add_argument
    task = parser.add_argument_group("task")
    task.add_argument("--model", help="Hugging Face model or folder (default: the script's choice for the hardware)")
    task.add_argument("--prompts", metavar="FILE.jsonl", help='a "prompt" per line, other columns go to the reward')
    task.add_argument("--reward", metavar="MODULE:FUNCTION", help="reward(prompts, completions, **columns) -> floats")
    task.add_argument("--prompts-per-step", type=count, default=8, help="default %(default)s")
    task.add_argument(
        "--group-size", type=group_size, default=8, help="completions of each prompt (default %(default)s)"
    )
    task.add_argument(
        "--max-tokens", type=count, default=16, help="length of a completion, at most (default %(default)s)"
    )
    task.add_argument("--temperature", type=temperature, default=1.0, help="default %(default)s")
    learning = parser.add_argument_group("learning")
    learning.add_argument("--steps", type=count, default=30, help="default %(default)s")
    learning.add_argument("--learning-rate", type=positive, help="default: 3e-3 for the built-in model, else 1e-5")
    learning.add_argument("--advantage", choices=ADVANTAGES, default="grpo", help="default %(default)s")
    learning.add_argument("--clip-low", type=positive, default=0.2, help="default %(default)s")
    learning.add_argument("--clip-high", type=positive, default=0.28, help="default %(default)s")
    learning.add_argument(
        "--importance-cap",
        type=positive,
        default=2.0,
        help="of trainer over engine probabilities (default %(default)s)",
    )
    learning.add_argument(
        "--kl-coef",
        type=not_negative,
        default=0.0,
        help="of the KL to the initial model (0: none) (default %(default)s)",
    )
    learning.add_argument("--max-grad-norm", type=positive, default=1.0, help="default %(default)s")
    learning.add_argument(
        "--updates", type=count, default=1, help="optimizer steps on the same rollouts (default %(default)s)"
    )
    learning.add_argument(
        "--micro-batch-size", type=count, default=16, help="completions in one forward pass (default %(default)s)"
    )
    learning.add_argument(
        "--max-mismatch",
        type=positive,
        help="of engine and trainer, mean |Δ logprob| (default: 1e-4 in fp32, 0.02 in bf16, more if quantized)",
    )
    learning.add_argument("--seed", type=interval, default=0, help="default %(default)s")
    add("--ray-address", help='of a Ray cluster to join, or "auto" (default: start Ray here, for this run)')
    add("--output", type=Path, help="run folder (default: a new one under runs/)")
    add(
        "--save-every",
        type=interval,
        default=10,
        metavar="STEPS",
        help=f"write a checkpoint, also at the end; keep the last {CHECKPOINTS_KEPT}; 0: none (default %(default)s)",
    )
    add("--resume", type=Path, metavar="RUN_FOLDER", help="go on from the last checkpoint of that run")
    add("--verbose", action="store_true", help="show what Ray and vLLM print, which goes to run.log")
    defaults, first = vars(parser.parse_args([])), parser.parse_args()
    if first.resume:
        if first.output:
            parser.error("--resume goes on in that run's folder: there is no other --output")
        try:
            saved = json.loads((first.resume / "args.json").read_text())
            # The rest were that script's defaults, which need not suit another.
            parser.set_defaults(**{name: saved[name] for name in saved["given"]})
        except (OSError, ValueError, KeyError) as error:
            parser.error(f"--resume {first.resume}: not a run folder ({error!r})")
    args = parser.parse_args()
    for name in ("model", "prompts"):
        if (path := getattr(args, name)) and os.path.exists(path):
            setattr(args, name, os.path.abspath(path))  # as the actors, and a run that goes on from elsewhere, find it
    args.given = [name for name, value in vars(args).items() if value != defaults.get(name) and name not in _NOT_SAVED]
    return args


def grpo_config(args: argparse.Namespace, max_mismatch: float) -> GRPOConfig:
    """The arguments that the learning step takes; `max_mismatch` holds unless one is given."""
    given = {k: v for k, v in vars(args).items() if k in GRPOConfig.__dataclass_fields__}
    return GRPOConfig(**given | {"max_mismatch": args.max_mismatch or max_mismatch})


def _number(text: str, kind: Callable, least: float, what: str):
    try:
        value = kind(text)
    except ValueError:
        value = least - 1
    if not value >= least:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def count(text: str) -> int:
    return _number(text, int, 1, "a whole number of at least 1")


def interval(text: str) -> int:
    return _number(text, int, 0, "a whole number of at least 0")


def group_size(text: str) -> int:
    return _number(text, int, 2, "a whole number of at least 2, which a comparison within the group needs")


def not_negative(text: str) -> float:
    return _number(text, float, 0.0, "a number of at least 0")


def temperature(text: str) -> float:
    return _number(text, float, 0.01, "a number of at least 0.01, the lowest that vLLM samples at")


def share(text: str) -> float:
    if positive(text) > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is more than the whole, 1")
    return float(text)


def positive(text: str) -> float:
    return _number(text, float, sys.float_info.min, "a number above 0")


# --- Checkpoints, written by the trainer's process --------------------------------------------------------------------


def write_checkpoint(run_folder: Path, step: int, save: Callable[[Path], None]) -> Path:
    """Let `save` fill a folder, then give it its name, so that a kill at any moment leaves the last one whole."""
    final = run_folder / f"checkpoint-{step:06d}"
    unfinished = run_folder / f"unfinished-{step:06d}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    save(unfinished)
    for path in [*unfinished.rglob("*"), unfinished]:
        _flush_to_disk(path)
    shutil.rmtree(final, ignore_errors=True)
    unfinished.rename(final)
    _flush_to_disk(run_folder)
    for old in sorted(run_folder.glob("checkpoint-*"))[:-CHECKPOINTS_KEPT]:
        shutil.rmtree(old)
    return final


def last_checkpoint(run_folder: Path, of_model: str) -> Path:
    """The newest whole checkpoint. Raises RunError if there is none, or if it is not of the model `of_model`."""
    checkpoints = sorted(run_folder.glob("checkpoint-*"))
    if not checkpoints:
        raise RunError(f"{run_folder} has no checkpoint to go on from")
    shapes = [_shape_of(str(path)) for path in (checkpoints[-1], of_model)]
    if shapes[0] != shapes[1]:
        raise RunError(f"{checkpoints[-1]} is a checkpoint of another model than {of_model}: {shapes[0]}, {shapes[1]}")
    return checkpoints[-1]


def choose_models(run: "RunFolder", args: argparse.Namespace, device: str) -> tuple[str, str]:
    """The model to begin with, --model or what the hardware allows, and the one to go on from: the same, or its last
    checkpoint when resuming."""
    builtin = args.model is None and ((run.path / "model").is_dir() if args.resume else device == "cpu")
    if args.learning_rate is None:
        args.learning_rate = 3e-3 if builtin else 1e-5
    initial = str(run.path / "model") if builtin else args.model or DEFAULT_MODEL
    if builtin and not args.resume:
        from tiny_model import build_tiny_model

        build_tiny_model(initial, args.seed)
    model = str(last_checkpoint(run.path, of_model=initial)) if args.resume else check_model(initial)
    if args.resume and (done := int(model.rpartition("-")[2])) >= args.steps:
        raise RunError(f"that run has done its {done} steps: ask for more with --steps")
    if args.ray_address:
        check_nodes(
            sorted(path for path in {initial, model} if os.path.isdir(path)), "GPU" if device == "cuda" else "CPU"
        )
    return initial, model


def check_nodes(folders: list[str], resource: str) -> None:
    """Raise RunError if a node where Ray may put the trainer or the engine, one with this resource, lacks a folder."""
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


def check_model(model: str) -> str:
    """Returns `model` if it is a model that transformers can load the configuration of; raises RunError if not."""
    _shape_of(model)
    return model


def _shape_of(model: str) -> dict:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model).to_dict()
    except Exception as error:  # what transformers and its hub client raise differs by version
        folder = "no such folder, and the hub has none" if not Path(model).exists() else "not a model's folder"
        raise RunError(f"cannot load the model {model}: {folder} ({str(error).splitlines()[0]})") from error
    names = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    return {name: config.get(name) for name in names}


def _replace(path: Path, text: str) -> None:
    """Write a file so that a kill at any moment leaves the old or the new one."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(text)
    _flush_to_disk(unfinished)
    unfinished.rename(path)


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- The folder, kept by the driver -----------------------------------------------------------------------------------


class RunFolder:
    """A run's folder. While it is open, only `say` reaches the screen; all other output goes to run.log."""

    def __init__(self, args: argparse.Namespace, script: str):
        self.path = (
            args.resume or args.output or Path("runs") / f"{script}-{time.strftime('%Y%m%d-%H%M%S')}"
        ).resolve()
        if not args.resume and any(self.path.glob("checkpoint-*")):
            raise RunError(f"{self.path} holds a run already: --resume it, or choose another --output")
        self.saved = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k not in _NOT_SAVED}
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock = (self.path / "lock").open("w")
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunError(f"another run is using {self.path}") from error
        except OSError as error:
            raise RunError(f"cannot write to the run folder {self.path}: {error}") from error
        self.log_file, self.verbose = self.path / "run.log", args.verbose
        self.metrics_file = self.path / "metrics.jsonl"
        self.rows: list[dict] = []
        self.screen = sys.stdout
        self.tail = ""  # of the log when an actor failed
        self._ticking, self._ended = False, threading.Event()

    def __enter__(self) -> "RunFolder":
        # File descriptors, not sys.stdout alone: the log of processes that Ray starts ends up there as well.
        sys.stdout.flush()
        self._saved = os.dup(1), os.dup(2)
        self.screen = os.fdopen(os.dup(1), "w", buffering=1)
        log = os.open(self.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        if self.verbose:
            self._follower = threading.Thread(target=self._follow, args=[self.log_file.stat().st_size], daemon=True)
            self._follower.start()
        return self

    def _follow(self, begin: int) -> None:
        """Show what the log gets, from byte `begin` on, until the end."""
        with self.log_file.open(errors="replace") as log:
            log.seek(begin)
            ended = False
            while not ended:
                ended = self._ended.wait(0.2)
                self.screen.write(log.read())

    def __exit__(self, _, error: BaseException | None, __) -> None:
        if self.tail:
            self.say(f"--- {self.log_file} ends with ---\n{self.tail}\n---")
        elif isinstance(error, Exception) and not isinstance(error, USER_ERRORS):
            traceback.print_exception(error)
            self.say(f"unexpected: the traceback is in {self.log_file}")
        if error and any(self.path.glob("checkpoint-*")):
            self.say(f"the last checkpoint is whole; to go on: --resume {self.path}")
        if self._ticking:
            self.screen.write("\n")
        sys.stdout.flush()
        sys.stderr.flush()
        if self.verbose:
            self._ended.set()
            self._follower.join()
        for saved, descriptor in zip(self._saved, (1, 2), strict=True):
            os.dup2(saved, descriptor)
            os.close(saved)
        self.screen.close()
        self.lock.close()

    def say(self, text: str) -> None:
        """Print a line for the user."""
        self.screen.write(("\r\x1b[K" if self._ticking else "") + text + "\n")
        self.screen.flush()
        self._ticking = False

    def tick(self, text: str, seconds: int) -> None:
        """Show that a phase goes on: a line that changes on a terminal, one line in ten seconds elsewhere."""
        if self.screen.isatty():
            self.screen.write(f"\r\x1b[K{text} ... {seconds} s")
            self.screen.flush()
            self._ticking = True
        elif seconds and seconds % 10 == 0:
            self.say(f"{text} ... {seconds} s")

    def keep_log_tail(self, lines: int = 12) -> None:
        """Keep the log's last lines, but for the frames of tracebacks, to explain an actor's failure."""
        time.sleep(1)  # Ray brings other processes' output with a delay
        log = re.sub(r"\x1b\[\d*m", "", self.log_file.read_text(errors="replace")).splitlines()
        said = [line for line in log if not re.match(_FRAME, line)]
        self.tail = "\n".join(said[-lines:])

    def start_metrics(self, last_step: int) -> None:
        """Begin after `last_step`: note the arguments, drop the metrics of later steps, open TensorBoard."""
        from torch.utils.tensorboard import SummaryWriter

        if self.metrics_file.exists() and last_step:
            for line in self.metrics_file.read_text().splitlines():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError:
                    break  # a kill cut the last line short
                self.rows += [row] if row["step"] <= last_step else []
        _replace(self.metrics_file, "".join(json.dumps(row) + "\n" for row in self.rows))
        _replace(self.path / "args.json", json.dumps(self.saved, indent=1) + "\n")
        self.tensorboard = SummaryWriter(self.path / "tensorboard", purge_step=last_step + 1)

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Append one step's metrics, everywhere, and print what to watch."""
        self.rows.append({"step": step, **metrics})
        with self.metrics_file.open("a") as file:
            file.write(json.dumps(self.rows[-1]) + "\n")
        for name, value in metrics.items():
            self.tensorboard.add_scalar(name, value, step)
        self.tensorboard.flush()
        steps = self.saved["steps"]
        self.say(
            f"step {step:{len(str(steps))}}/{steps}  reward {metrics['reward/mean']:.3f}"
            f"  mismatch {metrics['logprobs/mismatch']:.1e}  rollout {metrics['time/rollout']:.2f} s"
            f"  train {metrics['time/train']:.2f} s  sync {metrics['time/sync']:.4f} s"
            f" ({metrics['sync/GBps']:.2f} GB/s)"
        )

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is due after this step: after every so many and the last one, or never."""
        every = self.saved["save_every"]
        return every > 0 and (step % every == 0 or step == self.saved["steps"])

    def show(self, rows: list[dict], rollouts: list[Rollout], texts: list[str], count: int = 3) -> None:
        """Print the first completion of a few prompts."""
        group = len(rollouts) // len(rows)
        for i, row in enumerate(rows[:count]):
            self.say(f"  {rollouts[i * group].reward:5.2f}  {row['prompt']!r} -> {texts[i * group]!r}")

    def summary(self, rollouts: list[Rollout]) -> str:
        """The last line of a run whose last weights gave these rollouts; its picture is there from now on."""
        if not self.saved["save_every"]:
            self.draw()  # which otherwise goes with each checkpoint
        first, last = self.rows[0]["reward/mean"], sum(rollout.reward for rollout in rollouts) / len(rollouts)
        seconds = sorted(row["time/sync"] for row in self.rows)[len(self.rows) // 2]
        return f"OK: reward {first:.3f} -> {last:.3f} in {len(self.rows)} steps, {seconds:.4f} s per sync (median)"

    def draw(self) -> Path:
        """Write reward.png: reward, mismatch and sync time over the steps."""
        picture = self.path / "reward.png"
        self._figure().savefig(picture, dpi=120)
        gc.collect()  # the parts of a figure refer to one another: old ones, of megabytes each, would wait for this
        return picture

    def _figure(self):
        from matplotlib.figure import Figure

        steps = [row["step"] for row in self.rows]
        mean, std, mismatch, sync = (
            [row[name] for row in self.rows] for name in ("reward/mean", "reward/std", "logprobs/mismatch", "time/sync")
        )
        figure = Figure(figsize=(8, 8))
        top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1))
        top.plot(steps, mean, color="tab:blue", label="mean")
        low, high = ([m + sign * s for m, s in zip(mean, std, strict=True)] for sign in (-1, 1))
        top.fill_between(steps, low, high, color="tab:blue", alpha=0.15, linewidth=0, label="± 1 std of the batch")
        top.set_ylabel("reward")
        top.legend(loc="lower right", frameon=False)
        middle.semilogy(steps, mismatch, color="tab:red")
        middle.set_ylabel("mean |Δ logprob|\nengine - trainer")
        bottom.plot(steps, [1e3 * seconds for seconds in sync], color="tab:green")
        bottom.set_ylim(bottom=0)
        bottom.set_ylabel("weight sync (ms)")
        bottom.set_xlabel("step")
        bottom.xaxis.get_major_locator().set_params(integer=True)
        for axes in (top, middle, bottom):
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
        top.set_title(self.path.name)
        figure.tight_layout()
        return figure


# Behind the names of processes and vLLM's "ERROR 11-20 21:00:00 [file.py:1]": what is indented, "Traceback", nothing.
_FRAME = r"(\([^)]*pid=\d+\)(?: |$))*([A-Z]+ [\d-]+ [\d:]+ \[[^\]]*\](?: |$))?(\s|Traceback|$)"
_NOT_SAVED = {"resume", "output", "verbose", "ray_address"}
