"""The folder of a run: its arguments, metrics, log and checkpoints.

args.json             the arguments, and the names of those given, which are the defaults of --resume
metrics.jsonl         one line per step; step 0 is the evaluation before the first
completions.jsonl     one line per completion: step, prompt, text, messages of a conversation, rewards, advantage (none
                      with PPO or a teacher, where each token has its own)
tensorboard/          metrics as TensorBoard events; with --report-to wandb also wandb/
run.log               what vLLM and other libraries log, in all processes
timeline.json         with --timeline, what each process did when, since the run was started or resumed
lock                  locked during a run
checkpoint-000010/    model or adapters in Hugging Face format, and trainer_state.pt for --resume; each trainer rank
                      writes its part; the last two checkpoints are kept
"""

import fcntl
import json
import logging
import math
import re
import shutil
import sys
import time
import traceback
import uuid
from contextlib import redirect_stderr, suppress
from datetime import datetime, timedelta
from pathlib import Path

import psutil

from rlhf_utils import SyncReport, WeightSyncError

from ..errors import RunError, UserError
from ..flags import flat
from ..learning.rollout import known_rewards
from ..tasks.dataset import content_text
from ..tasks.rewards import Batch
from .arguments import NOT_SAVED, RunArguments
from .checkpoint import checkpoints, disk_errors, replace_file
from .timeline import Timeline
from .trackers import Trackers

REVERSE_KL = "distill/reverse_kl"  # from a teacher, if the run has one
SHOWN_CHARS = 100  # of a prompt, and of a completion, on the screen
LOGGED_BY_VLLM = re.compile(r"(?:INFO \S+ \S+ \[\S+\] |^(?=Capturing))(.{1,60})", re.M)
ON_SCREEN = {  # the metrics in a step's line
    REVERSE_KL: "reverse KL {:.3f}",
    "reward/mean": "reward {:.3f}",
    "logprobs/mismatch": "mismatch {:.1e}",
    "time/rollout": "rollout {:.2f} s",
    "time/train": "train {:.2f} s",
    "time/sync": "sync {:.4f} s",
    "sync/GBps": "{:.2f} GB/s",
    "tokens/s": "{:6,.0f} tokens/s",
    "eval/reward": "eval {:.3f}",
}


class RunFolder:
    """A run's folder. While it is open, sys.stderr is run.log.

    So that is where vLLM's log and the libraries' warnings go, from here and from the actors, whose output Ray passes
    on. What is printed, by a reward or in an actor, stays on the screen.
    """

    def __init__(self, args: RunArguments, script: str):
        name = f"{script}-{datetime.now():%Y%m%d-%H%M%S-%f}"  # several runs may begin in a second
        self.path = (args.resume or args.output or Path("runs", name)).resolve()
        if not args.resume and checkpoints(self.path):
            raise RunError(f"{self.path} holds a run already: --resume it, or choose another --output")
        self.args, self.steps_done = args, None
        self.trackers = Trackers(args.report_to)  # first: if it raises, no folder is left behind
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock = (self.path / "lock").open("w")
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.log = (self.path / "run.log").open("a", buffering=1, errors="backslashreplace")  # as stderr
            self.log_began = self.log.tell()  # behind what an earlier run has logged
            self.timeline = Timeline(self.path / "timeline.json" if args.timeline else None)
        except BlockingIOError as error:
            raise RunError(f"another run is using {self.path}") from error
        self.metrics_file, self.completions_file = self.path / "metrics.jsonl", self.path / "completions.jsonl"
        self.rows: list[dict] = []
        self.start_seconds: dict[str, float] = {}
        self.last_started = psutil.Process().create_time()

    def __enter__(self) -> "RunFolder":
        self.redirected = redirect_stderr(self.log)
        self.redirected.__enter__()
        logging.getLogger("torch").setLevel(logging.ERROR)  # its handler still writes to the screen
        for remark in self.args.remarks:
            self.say(remark)
        return self

    def __exit__(self, _, error: BaseException | None, __) -> None:
        if details := getattr(error, "details", None):  # an actor's traceback
            self.say(details)
        elif isinstance(error, Exception) and not isinstance(error, (UserError, WeightSyncError, OSError)):
            self.say("".join(traceback.format_exception(error)).rstrip())
        if error and self.steps_done is not None and checkpoints(self.path):
            self.say(f"the last checkpoint is whole; to go on: --resume {self.path}")
        try:
            if error is None:
                self.trackers.finish()  # after an error, trackers themselves see that this process fails
        finally:
            self.redirected.__exit__(None, None, None)
        for file in (self.log, self.timeline):
            with suppress(OSError):  # the disk may be full
                file.close()
        self.lock.close()

    def say(self, text: str) -> None:
        """Print this for the user, if it is not empty."""
        if text:
            print(f"\x1b[K{text}" if sys.stdout.isatty() else text, flush=True)

    def started(self, phase: str) -> None:
        """Note the seconds that this part of the start took, since the last one or since the command."""
        now = time.time()
        self.start_seconds[f"time/start/{phase}"] = now - self.last_started
        self.last_started = now

    def progress(self, phase: str, seconds: int, actors: list[str]) -> None:
        """Show the phase of the run and for whom it waits: in a terminal's line, which the next output overwrites, or
        every ten seconds. Of a start also what vLLM has logged last."""
        if not sys.stdout.isatty() and (not seconds or seconds % 10):
            return
        text = f"{phase} ({', '.join(actors)}) ... {seconds} s" if actors else f"{phase} ... {seconds} s"
        if phase == "starting":
            with open(self.log.name, errors="replace") as log_file:  # universal newlines: progress bars are lines
                log_file.seek(self.log_began)
                log = log_file.read()
            text += "".join(f": {logged.strip()}" for logged in LOGGED_BY_VLLM.findall(log)[-1:])
        if sys.stdout.isatty():
            print(f"\x1b[K{text[: shutil.get_terminal_size().columns - 1]}", end="\r", flush=True)
        else:
            self.say(text)

    def start_metrics(self, steps_done: int, args) -> None:
        """Save the script's `Arguments`, as it has settled them; drop metrics and completions of steps after
        `steps_done`; start the trackers."""
        if not steps_done and self.metrics_file.exists() and self.metrics_file.stat().st_size:
            self.say(f"{self.path} had metrics of an earlier run, which these replace")
        for rows in (self.metrics_file, self.completions_file):
            _keep_rows(rows, steps_done)
        self.rows = [*map(json.loads, self.metrics_file.read_text().splitlines())]
        file = self.path / "args.json"
        before = json.loads(file.read_text()) if steps_done and file.exists() else {}
        config = {name: value for name, value in flat(args).items() if name not in NOT_SAVED}
        config |= self.args.given | {"given": [*self.args.given]}  # --resume takes what was given
        config["run_id"] = before.get("run_id") or uuid.uuid4().hex[:8]
        replace_file(file, json.dumps(config, indent=1, default=str) + "\n")
        self.trackers.start(self.path, config["run_id"], steps_done, config)
        self.steps_done = steps_done
        self.began = self.logged = time.perf_counter()
        parts = ", ".join(f"{name.rpartition('/')[2]} {seconds:.0f}" for name, seconds in self.start_seconds.items())
        self.start_seconds["time/start"] = sum(self.start_seconds.values())
        self.say(f"started in {self.start_seconds['time/start']:.0f} s: {parts}" if parts else "")
        self.timeline.end_part("start")

    def log_step(self, step: int, batch: Batch, report: SyncReport, metrics: dict[str, float | list[float]]) -> None:
        """Append a step's completions to completions.jsonl, each with its value of the lists among the metrics, and the
        other metrics as `log_metrics` does. The step's checkpoint is saved before: nothing that fails here may lose it.

        Adds the metrics of the batch and of the sync; `time/step`, the seconds since the last step was logged, but for
        evaluation; and `tokens/s`, those of the batch's completions over that. Shows completions of the first step and
        the last one.
        """
        values = {name: value for name, value in metrics.items() if isinstance(value, list)}
        metrics = batch.metrics | {name: value for name, value in metrics.items() if name not in values}
        metrics |= {"sync/transfer": report.seconds, "sync/GBps": report.gigabytes_per_second}
        seconds = time.perf_counter() - self.logged - metrics.get("time/eval", 0.0)
        tokens = sum(rollout.length for rollout in batch.rollouts)
        completions = self._completions(step, batch, values)
        with disk_errors(self.path), self.completions_file.open("a") as file:
            file.writelines(json.dumps(row, default=str) + "\n" for row in completions)
        self.trackers.log_completions(step, completions)
        self.log_metrics(step, metrics | {"time/step": seconds, "tokens/s": tokens / seconds})
        if all(rollout.reward is None and rollout.teacher_logprobs is None for rollout in batch.rollouts):
            self.say(f"step {step}: no completion has a reward, so nothing is learned")
        if step in (self.steps_done + 1, self.args.steps):
            self.show(batch)

    def _completions(self, step: int, batch: Batch, values: dict[str, list[float]]) -> list[dict]:
        rows = []
        for group in batch.groups:
            for rollout in group.rollouts:
                row = {"step": step, "prompt": rollout.prompt or group.row.prompt, "text": rollout.text}
                if rollout.messages:
                    row["messages"] = rollout.messages
                rows.append(row | {"rewards": rollout.rewards})
        for name, of_rollouts in values.items():
            rows = [row | {name: value} for row, value in zip(rows, of_rollouts, strict=True)]
        return [row | rollout.extra for row, rollout in zip(rows, batch.rollouts, strict=True)]

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Append one step's metrics to metrics.jsonl, give them to the trackers, and print the main ones."""
        metrics, self.start_seconds = metrics | self.start_seconds, {}  # the start's, once
        self.rows.append({"step": step} | metrics | {"step": step})  # whatever a reward calls its metrics
        with disk_errors(self.path):
            with self.metrics_file.open("a") as file:
                file.write(json.dumps(self.rows[-1]) + "\n")
            self.trackers.log(step, metrics)
            self.timeline.end_part(f"step {step}")
        self.logged = time.perf_counter()
        steps, done = self.args.steps, step - self.steps_done
        parts = [f"step {step:{len(str(steps))}}/{steps}"]
        parts += [text.format(metrics[name]) for name, text in ON_SCREEN.items() if name in metrics]
        if done and step < steps:
            left = (self.logged - self.began) / done * (steps - step)
            parts.append(f"{timedelta(seconds=round(left))} left")
        self.say("  ".join(parts))

    def saves(self, step: int) -> bool:
        """Whether to save a checkpoint after this step, by --save-every."""
        interval = self.args.save_every
        return interval > 0 and (step % interval == 0 or step == self.args.steps)

    def show(self, batch: Batch) -> None:
        """Print the first completion of each of three prompts, in a line."""
        for group in batch.groups[:3]:
            first = group.rollouts[0]
            reward = "" if first.reward is None else f"{first.reward:5.2f}  "
            prompt = content_text(first.prompt[-1].get("content")) if first.prompt else group.row.text
            self.say(f"  {reward}{_line(prompt)} -> {_line(first.text)}")

    def summary(self, batch: Batch, mismatch: float) -> str:
        """The last line of a run, to print when its processes have ended. Shows the mismatch that proves the last sync,
        and completions of the last weights."""
        self.say(f"generated again with the last weights: mismatch {mismatch:.1e}")
        self.show(batch)
        steps = [row for row in self.rows if row["step"]]  # 0: the evaluation before the first
        evaluations = [row for row in self.rows if "eval/reward" in row]
        first, last = steps[0].get("reward/mean", math.nan), float(known_rewards(batch.rollouts).nanmean())
        seconds = sorted(row["time/sync"] for row in steps)[len(steps) // 2]
        learned = f"reward {first:.3f} -> {last:.3f}"
        if REVERSE_KL in steps[-1]:
            first = next(row[REVERSE_KL] for row in steps if REVERSE_KL in row)
            learned = f"reverse KL {first:.3f} -> {steps[-1][REVERSE_KL]:.3f}"
        line = f"OK: {learned} in {len(steps)} steps, {seconds:.4f} s per sync (median)"
        if evaluations:
            line += f", eval {evaluations[0]['eval/reward']:.3f} -> {evaluations[-1]['eval/reward']:.3f}"
        return line


def _line(text: str) -> str:
    """The text as it would stand in code, cut to a line."""
    return repr(text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "...")


def _keep_rows(file: Path, steps_done: int) -> None:
    """Keep only the rows of steps up to `steps_done` in a JSON-lines file, which may be large; none, if that is 0."""
    with file.open("a+b") as lines:
        lines.seek(0)
        end = 0
        for line in lines if steps_done else ():
            is_whole = line.endswith(b"\n")  # a kill may have cut the last one
            if not is_whole or json.loads(line)["step"] > steps_done:
                break
            end += len(line)
        lines.truncate(end)
