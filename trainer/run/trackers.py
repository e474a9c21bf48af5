"""Where a run reports, beside its own folder: accelerate's trackers, such as TensorBoard, Weights & Biases and Trackio.

A tracker gets the metrics of each step. One that has tables (wandb, clearml) gets the completions as well.
"""

import json
import os
import re
from pathlib import Path

from ..errors import RunError

NONE = "none"


class Trackers:
    """The trackers with these names. Raises RunError for an unknown name, and if a package is not installed."""

    def __init__(self, names: list[str]):
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

        if unknown := [name for name in names if name not in (NONE, *LOGGER_TYPE_TO_CLASS)]:
            raise RunError(f"--report-to {unknown[0]} is none of {', '.join((NONE, *LOGGER_TYPE_TO_CLASS))}")
        self.names = [name for name in names if name != NONE]
        available = {str(kind.value) for kind in get_available_trackers()}
        if missing := [name for name in self.names if name not in available]:
            raise RunError(f"--report-to {missing[0]}: its package is not installed (pip install {missing[0]})")
        self.running = []

    def start(self, folder: Path, run_id: str, steps_done: int, config: dict) -> None:
        """Begin to report a run, or go on after `steps_done`. `config` has the run's arguments.

        The project is "rlhf", or what the tracker's environment variable names, such as WANDB_PROJECT.
        """
        from accelerate import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        PartialState()  # without it, the messages of accelerate's trackers are errors
        options = {
            "tensorboard": {"logging_dir": folder, "purge_step": steps_done + 1},
            "wandb": {"name": folder.name, "dir": str(folder), "id": run_id, "resume": "allow"},
            "trackio": {"name": folder.name, "resume": "allow" if steps_done else "never"},
        }
        for name in self.names:
            project = name if name == "tensorboard" else os.environ.get(f"{name.upper()}_PROJECT", "rlhf")
            tracker = LOGGER_TYPE_TO_CLASS[name](project, **options.get(name, {}))
            tracker.start()
            if name != "tensorboard":  # which would show them as a run of their own
                tracker.store_init_configuration({key: as_text(value) for key, value in config.items()})
            self.running.append(tracker)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for tracker in self.running:
            taken = metrics
            if tracker.name == "mlflow":  # which refuses other names, such as eval/pass@1
                taken = {re.sub(r"[^\w/:. -]", "_", name): value for name, value in metrics.items()}
            tracker.log(taken, step=step)

    def log_completions(self, step: int, table: list[dict]) -> None:
        """Report the completions of a step: a row each, with the columns of completions.jsonl by name."""
        columns = list(dict.fromkeys(column for row in table for column in row))  # a reward may log one for some rows
        rows = [[as_text(row.get(column)) for column in columns] for row in table]
        for tracker in self.running:
            if hasattr(tracker, "log_table"):
                tracker.log_table("completions", columns=columns, data=rows, step=step)

    def finish(self) -> None:
        for tracker in self.running:
            tracker.finish()


def as_text(value) -> str | float | None:
    """A cell of a table: text and numbers as they are, anything else as JSON."""
    return value if value is None or isinstance(value, (str, float, int)) else json.dumps(value, default=str)
