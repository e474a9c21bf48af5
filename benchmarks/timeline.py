"""Draw some steps of a run's timeline.json, which train_grpo.py and the others write with `--timeline`.

    python benchmarks/timeline.py --file runs/NAME/timeline.json --first 5 --last 6 --output timeline.png

A row is a process of the file. What it did at the same time, such as prompts, lies on top of each other, the more the
darker; the prompts of a step have a gray of their own.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from annotated_types import Ge

from trainer.errors import RunError
from trainer.flags import arg
from trainer.run.arguments import parse
from trainer.run.session import run_main
from trainer.run.timeline import DRIVER


@dataclass
class Arguments:
    """What is drawn."""

    file: Path = arg(Path("timeline.json"), help="the timeline")
    first: Annotated[int, Ge(1)] = arg(1, help="the first step")
    last: Annotated[int, Ge(1)] = arg(3, help="the last step")
    output: Path = arg(Path("timeline.png"), help="the picture")


def main(args: Arguments) -> None:
    from matplotlib.figure import Figure

    text = args.file.read_text()
    events = json.loads(text if text.endswith("]\n") else text + "]")  # a run that was killed has not ended it
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [(names[e["pid"]], e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e["ph"] == "X"]
    steps = {name: (began, began + seconds) for process, name, began, seconds in spans if process == DRIVER}
    if missing := {f"step {args.first}", f"step {args.last}"} - steps.keys():
        raise RunError(f"{args.file} has no {min(missing)}")
    begin, end = steps[f"step {args.first}"][0], steps[f"step {args.last}"][1]
    shown = [span for span in spans if span[2] < end and begin < span[2] + span[3]]
    rows = sorted({process for process, *_ in shown}, key=lambda name: (name != DRIVER, name))
    calls = dict.fromkeys(name for _, name, *_ in shown if not name.startswith("step "))
    colors = {name: f"C{i % 10}" for i, name in enumerate(calls)}
    figure = Figure(figsize=(11, 0.6 * len(rows) + 1))
    axes, labeled = figure.subplots(), set()
    for process, name, began, seconds in shown:
        row, is_step = rows.index(process), name.startswith("step ")
        left, right = max(began, begin) - begin, min(began + seconds, end) - begin
        if process == DRIVER and is_step:
            axes.text((left + right) / 2, row - 0.5, name, ha="center", fontsize=8)
            axes.axvline(right, color="black", linewidth=0.8)
            continue
        label = None if is_step or name in labeled else labeled.add(name) or name
        color = f"{0.2 + int(name[5:]) % 3 / 5:.1f}" if is_step else colors[name]
        many = is_step or process == "rewards"
        axes.barh(row, right - left, 0.8, left, color=color, alpha=0.3 if many else 1, label=label)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(args.output, dpi=120, bbox_inches="tight")
    print(f"OK: {args.output}")


if __name__ == "__main__":
    run_main(main, parse(Arguments, __doc__))
