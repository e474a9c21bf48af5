"""The folder of a run: its arguments, metrics, picture, log and checkpoints.

args.json             the arguments, and which of them were given: those are the defaults of --resume
metrics.jsonl         one line per step; step 0 has the evaluation before the first
completions.jsonl     one line per completion: step, prompt, text, rewards, advantage (PPO's are of tokens: none)
tensorboard/          both as TensorBoard events, or wandb/ with --report-to wandb
reward.png            reward, evaluation, mismatch and sync time over the steps
run.log               everything that Ray, vLLM and the actors printed
lock                  locked during a run
checkpoint-000010/    model or adapters in Hugging Face format, trainer_state.pt for --resume; the last two are kept
"""

import dataclasses
import fcntl
import gc
import io
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TextIO

import torch

from rlhf_utils import WeightSyncError

from .arguments import NOT_SAVED, RunArguments
from .checkpoint import disk_errors, replace_file
from .errors import RunError, UserError
from .learner import Rollout
from .objectives import advantages
from .reporting import TRACKERS
from .rewards import Batch

RAY_THREADS = "ray_"  # how the names of the threads begin that print what actors, and the raylet, say
ON_SCREEN = {  # of a step's metrics
    "reward/mean": "reward {:.3f}",
    "logprobs/mismatch": "mismatch {:.1e}",
    "time/rollout": "rollout {:.2f} s",
    "time/train": "train {:.2f} s",
    "time/sync": "sync {:.4f} s",
    "sync/GBps": "{:.2f} GB/s",
    "tokens/s": "{:6,.0f} tokens/s",
    "eval/reward": "eval {:.3f}",
}
ACTORS = "Trainer|Engine|Critic|Reference|RewardModel|run_reward"
PRINTED_BY_ACTOR = rf"\(({ACTORS}) pid=[^)]*\) (?!\(|\[Gloo\])"  # vLLM's processes add their own name in brackets


class Screen(io.TextIOBase):
    """sys.stdout during a run: shows what the script, its actors or a reward print.

    Threads of Ray print the output of the actors, and what Ray itself has to say, such as that an actor has ended. From
    those threads, only what actors print themselves is shown; lines of vLLM's processes, libraries and Ray go to the
    log. So does everything on stderr, which includes vLLM's own log lines (`VLLM_LOGGING_STREAM`).
    """

    def __init__(self, say: Callable[[str], None], log: TextIO):
        self.say, self.log, self.line = say, log, threading.local()

    def write(self, text: str) -> int:
        line = getattr(self.line, "text", "") + text
        *lines, self.line.text = line.split("\n")
        for line in lines:
            plain = re.sub(r"\x1b\[\d*m", "", line)
            if not threading.current_thread().name.startswith(RAY_THREADS) or re.match(PRINTED_BY_ACTOR, plain):
                self.say(plain)
            else:
                self.log.write(line + "\n")
        return len(text)


class RunFolder:
    """A run's folder. While it is open, what Ray, vLLM and libraries print goes to run.log, not to the screen."""

    def __init__(self, args: RunArguments, script: str):
        self.path = (
            args.resume or args.output or Path("runs") / f"{script}-{time.strftime('%Y%m%d-%H%M%S')}"
        ).resolve()
        if not args.resume and any(self.path.glob("checkpoint-*")):
            raise RunError(f"{self.path} holds a run already: --resume it, or choose another --output")
        self.args, self.given = args, {name: getattr(args, name) for name in args.given}
        self.trackers = [TRACKERS[name]() for name in args.report_to]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock = (self.path / "lock").open("w")
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunError(f"another run is using {self.path}") from error
        except OSError as error:
            raise RunError(f"cannot write to the run folder {self.path}: {error}") from error
        self.log_file, self.verbose = self.path / "run.log", args.verbose
        self.metrics_file, self.completions_file = self.path / "metrics.jsonl", self.path / "completions.jsonl"
        self.rows: list[dict] = []
        self.screen = sys.stdout
        self.details = ""  # of an actor's failure, to be shown
        self._ticking, self._ended = False, threading.Event()

    def __enter__(self) -> "RunFolder":
        # Redirect file descriptors, not only sys.stdout: processes that Ray starts write to them as well.
        sys.stdout.flush()
        self._saved = os.dup(1), os.dup(2)
        self.screen = os.fdopen(os.dup(1), "w", buffering=1)
        log = os.open(self.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        self.stdout, sys.stdout = sys.stdout, Screen(self.say, sys.stdout)
        if self.verbose:
            self._follower = threading.Thread(target=self._follow, args=[self.log_file.stat().st_size], daemon=True)
            self._follower.start()
        return self

    def _follow(self, begin: int) -> None:
        """Show the log while it grows, from byte `begin`, until the run ends."""
        with self.log_file.open(errors="replace") as log:
            log.seek(begin)
            ended = False
            while not ended:
                ended = self._ended.wait(0.2)
                self.screen.write(log.read())

    def __exit__(self, _, error: BaseException | None, __) -> None:
        if self.details:
            self.say(self.details)
        elif isinstance(error, Exception) and not isinstance(error, (UserError, WeightSyncError, OSError)):
            self.say("".join(traceback.format_exception(error)).rstrip())
        if error and any(self.path.glob("checkpoint-*")):
            self.say(f"the last checkpoint is whole; to go on: --resume {self.path}")
        for tracker in self.trackers:
            with suppress(Exception):  # how the run ended matters more than a tracker that cannot be reached
                tracker.finish(failed=error is not None)
        if self._ticking:
            self.screen.write("\n")
        sys.stdout = self.stdout
        for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
            try:
                stream.flush()
            except OSError:  # the disk is full: drop the rest, which would follow the run's last line on the screen
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
                stream.flush()
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
        """Show progress: on a terminal a line that counts the seconds, elsewhere a line every ten seconds."""
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
        said = [line for line in log if not re.match(_FRAME, line) and "[dump_input.py:" not in line]  # of many kB
        self.details = "\n".join([f"--- {self.log_file} ends with ---", *said[-lines:], "---"]) if said else ""

    def start_metrics(self, steps_done: int) -> None:
        """Save the arguments, drop metrics and completions of steps after `steps_done`, and start the trackers."""
        self.rows = _keep_rows(self.metrics_file, steps_done)
        _keep_rows(self.completions_file, steps_done)
        settled = {name: value for name, value in dataclasses.asdict(self.args).items() if name not in NOT_SAVED}
        config = settled | self.given  # --resume takes over what was given, as it was given
        replace_file(self.path / "args.json", json.dumps(config, indent=1) + "\n")
        for tracker in self.trackers:
            tracker.start(self.path, steps_done, config)
        self.steps_done, self.began, self.logged = steps_done, time.perf_counter(), time.perf_counter()

    def log_step(self, step: int, batch: Batch, metrics: dict[str, float]) -> None:
        """Append a step's completions to completions.jsonl, and its metrics as `log_metrics` does.

        Adds the batch's metrics, `time/step`, which is the seconds since the last step's line without evaluation, and
        `tokens/s`, the completions' tokens over that. Shows some completions of the first step and of the last one.
        """
        seconds = time.perf_counter() - self.logged - metrics.get("time/eval", 0.0)
        tokens = sum(len(rollout.completion_ids) for rollout in batch.rollouts)
        completions = self._completions(step, batch)
        with disk_errors(self.path), self.completions_file.open("a") as file:
            file.writelines(json.dumps(row, default=str) + "\n" for row in completions)
        for tracker in self.trackers:
            tracker.log_completions(step, completions)
        self.log_metrics(step, batch.metrics | metrics | {"time/step": seconds, "tokens/s": tokens / seconds})
        if step in (self.steps_done + 1, self.args.steps):
            self.show(batch)

    def _completions(self, step: int, batch: Batch) -> list[dict]:
        rewards = torch.tensor([rollout.reward for rollout in batch.rollouts], dtype=torch.float64)
        kind = getattr(self.args, "advantage", None)  # PPO's are of tokens, not of completions
        advantage = iter(advantages(rewards, self.args.group_size, kind).tolist() if kind else ())
        return [
            {"step": step, "prompt": group.row.prompt, "text": rollout.text}
            | {"rewards": rollout.rewards}
            | ({"advantage": next(advantage)} if kind else {})
            | rollout.extra
            for group in batch.groups
            for rollout in group.rollouts
        ]

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Append one step's metrics to metrics.jsonl, give them to the trackers, and print the main ones."""
        self.rows.append({"step": step, **metrics})
        with disk_errors(self.path):
            with self.metrics_file.open("a") as file:
                file.write(json.dumps(self.rows[-1]) + "\n")
            for tracker in self.trackers:
                tracker.log(step, metrics)
        self.logged = time.perf_counter()
        steps, done = self.args.steps, step - self.steps_done
        said = [f"step {step:{len(str(steps))}}/{steps}"]
        said += [text.format(metrics[name]) for name, text in ON_SCREEN.items() if name in metrics]
        if done and step < steps:
            left = (self.logged - self.began) / done * (steps - step)
            said.append(f"{timedelta(seconds=round(left))} left")
        self.say("  ".join(said))

    def saves(self, step: int) -> bool:
        """Whether to save a checkpoint after this step: every `save_every` steps and at the end, or never (0)."""
        every = self.args.save_every
        return every > 0 and (step % every == 0 or step == self.args.steps)

    def show(self, batch: Batch, count: int = 3) -> None:
        """Print the first completion of a few prompts."""
        for group in batch.groups[:count]:
            first = group.rollouts[0]
            said = "" if first.reward is None else f"{first.reward:5.2f}  "
            self.say(f"  {said}{group.row.text!r} -> {first.text!r}")

    def summary(self, rollouts: list[Rollout]) -> str:
        """The last line of a run, for rollouts generated with the last weights. Draws reward.png if it is missing."""
        if not self.args.save_every:
            self.draw()  # otherwise drawn with each checkpoint
        steps, evaluated = self._steps_and_evaluations()
        first, last = steps[0]["reward/mean"], sum(rollout.reward for rollout in rollouts) / len(rollouts)
        seconds = sorted(row["time/sync"] for row in steps)[len(steps) // 2]
        said = f"OK: reward {first:.3f} -> {last:.3f} in {len(steps)} steps, {seconds:.4f} s per sync (median)"
        if evaluated:
            said += ", eval {:.3f} -> {:.3f}".format(*(evaluated[i]["eval/reward"] for i in (0, -1)))
        return said

    def _steps_and_evaluations(self) -> tuple[list[dict], list[dict]]:
        """The rows of metrics with a learning step, and those with an evaluation, which step 0 has alone."""
        return [row for row in self.rows if row["step"]], [row for row in self.rows if "eval/reward" in row]

    def draw(self) -> Path:
        """Write reward.png: reward, evaluation, mismatch and sync time over the steps."""
        picture = self.path / "reward.png"
        with disk_errors(self.path):
            self._figure().savefig(picture, dpi=120)
        gc.collect()  # figures contain reference cycles and take megabytes each
        return picture

    def _figure(self):
        from matplotlib.figure import Figure

        rows, evaluated = self._steps_and_evaluations()
        steps = [row["step"] for row in rows]
        mean, std, mismatch, sync = (
            [row[name] for row in rows] for name in ("reward/mean", "reward/std", "logprobs/mismatch", "time/sync")
        )
        figure = Figure(figsize=(8, 8))
        top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1))
        top.plot(steps, mean, color="tab:blue", label="mean")
        low, high = ([m + sign * s for m, s in zip(mean, std, strict=True)] for sign in (-1, 1))
        top.fill_between(steps, low, high, color="tab:blue", alpha=0.15, linewidth=0, label="± 1 std of the batch")
        if evaluated:
            held_out = [row["eval/reward"] for row in evaluated]
            top.plot([row["step"] for row in evaluated], held_out, "o-", color="tab:orange", label="held-out prompts")
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


def _keep_rows(file: Path, steps_done: int) -> list[dict]:
    """Drop a JSON-lines file's rows of steps after `steps_done`, or all if that is 0. Returns what is left."""
    rows = []
    with file.open("a+b") as lines:
        lines.seek(0)
        end = 0
        for line in lines if steps_done else ():
            if not line.endswith(b"\n") or (row := json.loads(line))["step"] > steps_done:  # a kill truncates the last
                break
            rows.append(row)
            end += len(line)
        lines.truncate(end)
    return rows


# After process names and vLLM's "ERROR 11-20 21:00:00 [file.py:1]": an indented line, "Traceback", or nothing.
_FRAME = r"(\([^)]*pid=\d+\)(?: |$))*([A-Z]+ [\d-]+ [\d:]+ \[[^\]]*\](?: |$))?(\s|Traceback|$)"
