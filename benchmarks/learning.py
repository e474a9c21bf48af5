"""What a real model learns: the same problems, reward, batch and number of steps by our scripts and by TRL.

    python benchmarks/learning.py                                       # a GPU: exact, off and trl, three seeds each
    python benchmarks/learning.py --ways lora quantized flat --seeds 0
    python benchmarks/learning.py --ways stale0 stale2 --seeds 0        # 2 GPUs
    python benchmarks/learning.py --ways off trl --seeds 0 1 2 3 --jobs 4    # 4 GPUs, a run on each
    python benchmarks/learning.py --tags --dataset-config '{"gcd": {"max_value": 50}}' --folder runs/tags
    python benchmarks/learning.py --ways off trl --seeds 0 --steps 2 --prompts 2 --completions 4 --tokens 8 \
        --dataset-config '{"chain_sum": {"size": 40}}'                  # no GPU

| way | what it is |
| --- | --- |
| exact, off | train_grpo.py with `--exact on` and `--exact off`: learning and generating on one GPU |
| stale0, stale2 | train_grpo.py on separate GPUs, on-policy and with `--max-staleness 2` |
| lora | train_grpo.py with adapters of rank 32, at ten times the learning rate |
| quantized | train_grpo.py with an engine in FP8 (CPU: int8) |
| flat | rlhf_colocate.py, which has no evaluation, and whose own reward compares the final number |
| trl | TRL's GRPOTrainer with vLLM in its process (CPU: transformers generates) |

The model is SmolLM2-135M-Instruct, the problems are reasoning-gym's (docs/tasks.md says what to install). The reward is
1 for a right answer and 0 for any other. TRL gets our AdamW (betas, epsilon, constant learning rate), and what
benchmarks/step.py tells it; all else are its defaults, and ours. Held-out problems are answered greedily before the
first step, after every `--eval-every` steps and after the last one.

Each run is a process, started as a user starts it. Seconds count from its command to a line of its output, to within
half a second; evaluations are in them. What a run has printed goes to WAY-SEED.jsonl in `--folder`, once it has ended
well: its workload in the first line, then a line for each step. A run that is there is not done again. The folders of
several machines can be put together. With more `--jobs` than GPUs, runs share a GPU, and their seconds are not shown.

Prints a table of all runs in the folder: means over the seeds and, in brackets, the least and the most. Draws
learning.png there, if matplotlib is installed. Ends with an error if exact or off learns less than TRL: if its mean
after the last step is lower by more than the distance of the two seeds that are furthest apart.
"""

import importlib.util
import json
import os
import queue
import random
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Le
from learning_trl import rows_of
from pydantic import AfterValidator
from shapes import device_kind
from step import ROOT, run_way

from trainer.errors import RunError
from trainer.flags import arg
from trainer.functions import json_object, named_function
from trainer.run.arguments import parse
from trainer.run.session import run_main
from trainer.tasks.reasoning_gym import DEFAULTS

OURS, TRL = ("exact", "off"), "trl"
SEPARATE = "--topology separate --tensor-parallel-size 1"
FLAGS = {  # of train_grpo.py
    "exact": "--exact on",
    "off": "--exact off",
    "stale0": SEPARATE,
    "stale2": f"{SEPARATE} --max-staleness 2",
    "lora": "--lora-rank 32",
    "quantized": "--quantization auto",
}
WAYS = (*FLAGS, "flat", TRL)
STEP = re.compile(r"^step +(\d+)/\d+ (.*)\n", re.M)  # a line that a run prints
VALUE = re.compile(r"\b(reward|eval|mismatch) +(\S+)")
FEW = 10  # steps at the beginning and at the end, whose mean reward the table has


@dataclass
class Arguments:
    """What is learned, and by which ways."""

    ways: list[Literal[WAYS]] = arg(lambda: [*OURS, TRL], help="the ways to learn (default: exact off trl)")
    seeds: list[Annotated[int, Ge(0)]] = arg(lambda: [0, 1, 2], help="a run of each way for each seed")
    jobs: Annotated[int, Ge(1)] = arg(1, help="runs at a time, each on its share of the visible GPUs")
    folder: Path = arg(Path("runs/learning"), help="where results accumulate")
    model: str = arg(DEFAULTS["model"], help="a folder, or module:function that writes a model to a folder")
    dataset_config: Annotated[str, AfterValidator(json_object)] = arg(
        '{"chain_sum": {"max_terms": 3, "max_digits": 2, "size": 5000}}',
        help="reasoning-gym's generators, with their parameters, as JSON; held out are a tenth of the size",
    )
    tags: bool = arg(
        False,
        help="two solved problems come before each, as turns of the chat, and an answer is right only in <answer> tags,"
        " as theirs are",
    )
    steps: Annotated[int, Ge(1)] = arg(100, help="steps of each run")
    prompts: Annotated[int, Ge(1)] = arg(32, help="prompts in a step")
    completions: Annotated[int, Ge(2)] = arg(8, help="completions of each prompt")
    tokens: Annotated[int, Ge(1)] = arg(128, help="tokens of a completion, at most")
    learning_rate: Annotated[float, Gt(0)] = arg(1e-5, help="learning rate, in all steps")
    eval_every: Annotated[int, Ge(1)] = arg(10, help="steps from one evaluation to the next")
    trl_batch: Annotated[int, Ge(1)] = arg(64, help="completions in a forward pass of TRL")
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = arg(
        0.3, help="fraction of the GPU's memory that vLLM takes, in our scripts and in TRL"
    )


NO_WORKLOAD = ("ways", "seeds", "jobs", "folder", "trl_batch", "gpu_memory_utilization")


@dataclass
class Run:
    """What a run has printed. `steps` have the seconds from the command and what the step's line says: "reward" and
    "mismatch", and "eval" where it has evaluated."""

    way: str
    seed: int
    device: str
    alone: bool  # no other run shared its GPU
    workload: dict
    seconds: float  # from the command to its end
    steps: list[dict]

    def values(self) -> dict[str, float | None]:
        """The table's numbers; None where the run has none."""
        learned = [step for step in self.steps if step["step"]]
        evaluations = [step["eval"] for step in self.steps if "eval" in step] or [None]
        mismatches = [step["mismatch"] for step in learned if "mismatch" in step]
        return {
            "reward, first": mean(step["reward"] for step in learned[:FEW]),
            "reward, last": mean(step["reward"] for step in learned[-FEW:]),
            "held-out, before": evaluations[0],
            "held-out, after": evaluations[-1],
            "mismatch": mean(mismatches) if mismatches else None,
            "s to step 1": learned[0]["seconds"] if self.alone else None,
            "s to the end": self.seconds if self.alone else None,
        }


class Watch:
    """Notes the steps in a run's output, with the seconds from now on."""

    def __init__(self, output: Path):
        self.output, self.began, self.steps = output, time.perf_counter(), []

    def seconds(self) -> float:
        return time.perf_counter() - self.began

    def __call__(self) -> None:
        for number, text in STEP.findall(self.output.read_text(errors="replace"))[len(self.steps) :]:
            values = {name: float(value) for name, value in VALUE.findall(text)}
            self.steps.append({"step": int(number), "seconds": self.seconds()} | values)


def workload_of(args: Arguments) -> dict:
    """What all runs of a folder have in common."""
    return {name: value for name, value in asdict(args).items() if name not in NO_WORKLOAD}


def command_of(way: str, seed: int, args: Arguments, model: str, gpus: str) -> list[str]:
    """The command of a run. The prompts of "flat" are written to the folder."""
    if way == TRL:
        batch = min(args.trl_batch, completions := args.prompts * args.completions)
        if completions % batch:
            raise RunError(f"--trl-batch {batch} does not divide the {completions} completions of a step")
        workload = workload_of(args) | {"model": model, "seed": seed, "gpus": gpus, "trl_batch": batch}
        workload |= {"accumulation": completions // batch, "max_model_len": DEFAULTS["max_model_len"]}
        workload |= {"gpu_memory_utilization": args.gpu_memory_utilization}
        return [str(ROOT / "benchmarks" / "learning_trl.py"), json.dumps(workload)]
    flags = {"model": model, "steps": args.steps, "prompts-per-step": args.prompts, "group-size": args.completions}
    flags |= {"max-tokens": args.tokens, "learning-rate": args.learning_rate * (10 if way == "lora" else 1)}
    if way == "flat":
        rows, _ = rows_of(args.dataset_config, args.tags)
        random.Random(seed).shuffle(rows)
        lines = [json.dumps({"prompt": row["prompt"], "answer": row["answer"]}) + "\n" for row in rows]
        prompts = args.folder / f"prompts-{seed}.jsonl"
        prompts.write_text("".join(lines))
        flags |= {"prompts": prompts, "tensor-parallel-size": 1}
        return [str(ROOT / "rlhf_colocate.py"), *(f"--{name}={value}" for name, value in flags.items())]
    flags |= {"task": "reasoning_gym", "dataset-config": args.dataset_config, "reward": "learning_trl:correct"}
    flags |= {"map": "learning_trl:with_examples", "reward": "learning_trl:correct_in_tags"} if args.tags else {}
    flags |= {"seed": seed, "eval-every": args.eval_every, "save-every": 0, "output": "run"}
    flags |= {"gpu-memory-utilization": args.gpu_memory_utilization}
    return [str(ROOT / "train_grpo.py"), *(f"--{name}={value}" for name, value in flags.items()), *FLAGS[way].split()]


def make_model(args: Arguments) -> str:
    """The folder of the model. One that a function makes is in the results' folder, and made once."""
    if ":" not in args.model:
        return str(Path(args.model).resolve())
    model, part = args.folder / "model", args.folder / "model.part"
    if not model.exists():
        named_function("--model", args.model)(part, 0)
        part.rename(model)
    return str(model)


def learn(way: str, seed: int, args: Arguments, model: str, device: str, gpus: str) -> None:
    """Do a run on the first of these GPUs, and write its record. Raises RunError if it fails."""
    gpus = ",".join(gpus.split(",")[: gpus_of(way)])
    folder = args.folder / f"{way}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)  # of a run that did not end
    watch = Watch(folder / "output.txt")
    run_way(folder, command_of(way, seed, args, model, gpus), gpus, watch)
    if [step["step"] for step in watch.steps if step["step"]] != [*range(1, args.steps + 1)]:
        raise RunError(f"{folder.name}: not every step is in {watch.output}")
    alone = args.jobs <= max(1, torch.cuda.device_count())
    record = asdict(Run(way, seed, device, alone, workload_of(args), watch.seconds(), watch.steps))
    lines = [record, *record.pop("steps")]
    part = folder.with_suffix(".part")
    part.write_text("".join(json.dumps(line) + "\n" for line in lines))
    part.rename(folder.with_suffix(".jsonl"))
    print(f"{folder.name}: {watch.seconds():.0f} s, {lines[-1]}", flush=True)


def gpus_of(way: str) -> int:
    """The number of GPUs that a run takes."""
    return 2 if SEPARATE in FLAGS.get(way, "") else 1


def gpus_of_jobs(args: Arguments) -> list[str]:
    """The GPUs of each job. Raises RunError if a way takes more."""
    count = torch.cuda.device_count()
    if not count:
        return [""] * args.jobs
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")
    size = max(1, count // args.jobs)
    if larger := [way for way in args.ways if gpus_of(way) > size]:
        raise RunError(
            f"{larger[0]} takes {gpus_of(larger[0])} GPUs, and each of {args.jobs} jobs has {size} of {count}"
        )
    return [",".join(visible[(job * size + i) % count] for i in range(size)) for job in range(args.jobs)]


def load_runs(args: Arguments) -> dict[str, list[Run]]:
    """The runs in the folder, by way. Raises RunError for one with another workload."""
    runs = {}
    for way in WAYS:
        for file in sorted(args.folder.glob(f"{way}-*.jsonl")):
            first, *steps = map(json.loads, file.read_text().splitlines())
            if first["workload"] != workload_of(args):
                raise RunError(f"{file} is of another workload, {first['workload']}: choose another --folder")
            runs.setdefault(way, []).append(Run(**first, steps=steps))
    return runs


def table(runs: dict[str, list[Run]]) -> str:
    """A line for each way: means over its seeds, with the least and the most of them."""
    rows = []
    for way, of_way in runs.items():
        columns = [run.values() for run in of_way]
        cells = {name: cell([values[name] for values in columns]) for name in columns[0]}
        rows.append({"": way, "seeds": str(len(of_way))} | cells)
    widths = {name: max(len(text) for text in (name, *(row[name] for row in rows))) for name in rows[0]}
    lines = [{name: name for name in rows[0]}, *rows]
    return "\n".join("  ".join(line[name].ljust(width) for name, width in widths.items()).rstrip() for line in lines)


def cell(values: list[float | None]) -> str:
    """The mean of the values that there are and, if these are several, the least and the most."""
    if not (known := [value for value in values if value is not None]):
        return "-"
    mean_, *ends = (f"{value:.3g}" for value in (mean(known), min(known), max(known)))
    spread = f" ({' to '.join(ends)})" if len(known) > 1 else ""
    return mean_ + spread + (f", {len(known)} of {len(values)}" if len(known) < len(values) else "")


def check(runs: dict[str, list[Run]]) -> None:
    """Raise RunError if a way of ours has learned less than TRL, by more than the distance of two seeds."""
    after = {way: [run.values()["held-out, after"] for run in of_way] for way, of_way in runs.items()}
    for way in OURS:
        pair = [after.get(way, []), after.get(TRL, [])]
        if min(map(len, pair)) > 1:
            spread = max(max(values) - min(values) for values in pair)
            if mean(pair[0]) < mean(pair[1]) - spread:
                raise RunError(f"{way} is below TRL: {cell(pair[0])} of held-out problems right, and {cell(pair[1])}")


def draw(runs: dict[str, list[Run]], title: str, path: Path) -> None:
    """Draw the share of held-out problems that is right, by step and, for runs with a GPU of their own, by seconds.
    Lines are means, and bands reach from the least seed to the largest."""
    from matplotlib.figure import Figure

    panels = {"step": "step"}
    if any(run.alone for of_way in runs.values() for run in of_way):
        panels["seconds"] = "seconds from the command"
    figure = Figure(figsize=(5.5 * len(panels), 4))
    columns = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (name, label) in zip(columns, panels.items(), strict=True):
        for way, of_way in runs.items():
            shown = [run for run in of_way if run.alone or name == "step"]
            evaluations = [*zip(*([step for step in run.steps if "eval" in step] for run in shown), strict=True)]
            if evaluations:
                x = [mean(step[name] for step in same) for same in evaluations]
                low, middle, high = (
                    [f(step["eval"] for step in same) for same in evaluations] for f in (min, mean, max)
                )
                color = f"C{WAYS.index(way)}"
                axes.plot(x, middle, marker=".", color=color, label=f"{way} ({len(shown)})")
                axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
        axes.set_xlabel(label)
        if axes.lines:
            axes.legend(frameon=False)
    columns[0].set_ylabel("held-out problems right")
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main(args: Arguments) -> None:
    args.folder = args.folder.resolve()
    device, free, failed = device_kind(), queue.SimpleQueue(), []
    for gpus in gpus_of_jobs(args):
        free.put(gpus)
    done = {(run.way, run.seed) for of_way in load_runs(args).values() for run in of_way}
    todo = [(way, seed) for seed in args.seeds for way in args.ways if (way, seed) not in done]
    args.folder.mkdir(parents=True, exist_ok=True)
    model = make_model(args) if todo else ""

    def run(way: str, seed: int) -> None:
        gpus = free.get()
        try:
            learn(way, seed, args, model, device, gpus)
        except RunError as error:  # the others go on
            failed.append(str(error))
            print(error, flush=True)
        free.put(gpus)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda each: run(*each), todo))
    if runs := load_runs(args):
        devices = ", ".join(sorted({run.device for of_way in runs.values() for run in of_way}))
        title = f"{args.prompts} prompts x {args.completions} completions of {args.tokens} tokens, {devices}"
        print(f"{title}\n{table(runs)}")
        if importlib.util.find_spec("matplotlib"):
            draw(runs, title, args.folder / "learning.png")
    if failed:
        raise RunError(f"{len(failed)} of {len(todo)} runs failed: {failed[0]}")
    check(runs)
    print(f"OK: {args.folder}")


if __name__ == "__main__":
    run_main(main, parse(Arguments, __doc__))
