"""Where a run reports beside its own folder: TensorBoard, Weights & Biases, Trackio, or nowhere.

A tracker gets the metrics of each step, and its completions as a table.
"""

import importlib
import json
import os
from pathlib import Path

from .errors import RunError
from .leftovers import unmarked


class Tracker:
    """`--report-to none`: takes everything and does nothing. The others override what they can show."""

    def start(self, folder: Path, steps_done: int, config: dict) -> None:
        """Begin a run, or go on after `steps_done`. `config` are the run's arguments."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Metrics of a step."""

    def log_completions(self, step: int, table: list[dict]) -> None:
        """Completions of a step, one row each: the columns of completions.jsonl, by name."""

    def finish(self, failed: bool) -> None:
        """End the run."""


class TensorBoard(Tracker):
    """Events in the run's folder."""

    def start(self, folder: Path, steps_done: int, config: dict) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(folder / "tensorboard", purge_step=steps_done + 1)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def log_completions(self, step: int, table: list[dict]) -> None:
        self.writer.add_text("completions", markdown(table), step)


class WandB(Tracker):
    """A run at Weights & Biases, in the project that WANDB_PROJECT names, "rlhf" by default."""

    package = "wandb"

    def __init__(self):
        try:
            self.api = importlib.import_module(self.package)
        except ImportError as error:
            reason = f"--report-to {self.package}: {error} (pip install {self.package})"
            raise RunError(reason) from error
        self.project = os.environ.get(f"{self.package.upper()}_PROJECT", "rlhf")

    def start(self, folder: Path, steps_done: int, config: dict) -> None:
        names = [path.name.rpartition("run-")[2] for path in folder.glob("wandb/*run-*")]  # run-DATE_TIME-ID
        run_id = max(names).rpartition("-")[2] if names and steps_done else None
        names = {"project": self.project, "name": folder.name, "dir": str(folder)}
        with unmarked():  # it uploads in a process of its own, also once those of the session have ended
            self.api.init(**names, config=config, id=run_id, resume="allow")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.api.log(metrics, step=step)

    def log_completions(self, step: int, table: list[dict]) -> None:
        from pandas import DataFrame  # which both packages know, and `datasets` brings

        table = [{name: as_text(value) for name, value in row.items()} for row in table]
        self.api.log({"completions": self.api.Table(dataframe=DataFrame(table))}, step=step)

    def finish(self, failed: bool) -> None:
        self.api.finish(exit_code=int(failed))


class Trackio(WandB):
    """A run in Trackio, in the project that TRACKIO_PROJECT names. Its functions are wandb's, with fewer options."""

    package = "trackio"

    def start(self, folder: Path, steps_done: int, config: dict) -> None:
        resume = "allow" if steps_done else "never"
        self.api.init(project=self.project, name=folder.name, config=config, resume=resume)

    def finish(self, failed: bool) -> None:
        self.api.finish()


TRACKERS = {"tensorboard": TensorBoard, "wandb": WandB, "trackio": Trackio, "none": Tracker}


def tracker_names(names: list[str]) -> list[str]:
    """The names, if each is a tracker's; a ValueError if not."""
    if unknown := [name for name in names if name not in TRACKERS]:
        raise ValueError(f"{unknown[0]} is none of {', '.join(TRACKERS)}")
    return names


def markdown(table: list[dict]) -> str:
    """A table in Markdown."""
    rows = [[*table[0]], ["---"] * len(table[0]), *(row.values() for row in table)]
    cells = ([str(as_text(value)).replace("|", "\\|").replace("\n", "<br>") for value in row] for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def as_text(value) -> str | float:
    """A cell of a table: a number as it is, messages and rewards as JSON."""
    return value if isinstance(value, (str, float, int)) else json.dumps(value, default=str)
