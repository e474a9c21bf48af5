"""Time a whole GRPO step and its parts: rollout, learning, weight sync, rest. TRL's step is timed beside it.

    python benchmarks/step.py --shape qwen2.5-0.5b --prompt-tokens 128 --tokens 512
    python benchmarks/step.py --shape qwen2.5-7b --prompts 8 --tokens 1024 \
        --options '--offload-optimizer --sleep weights'
    python benchmarks/step.py --shape qwen2.5-7b --prompts 8 --tokens 1024 --lora-rank 32
    python benchmarks/step.py --topology separate --shape qwen2.5-0.5b --prompt-tokens 128 --tokens 1024 \
        --mean-tokens 256 --steps 10                 # 2 GPUs
    python benchmarks/step.py --trainers 2 --engines 2 --prompts 32       # 2 GPUs, shared by trainers and engines
    python benchmarks/step.py --topology separate --trainers 2 --engines 2    # 4 GPUs
    python benchmarks/step.py --topology separate --tensor-parallel-size 2 --ways ours exact    # 3 GPUs
    python benchmarks/step.py --shape qwen2.5-vl-3b --prompt-tokens 128 --tokens 512 --ways ours exact
    python benchmarks/step.py --shape qwen2.5-vl-3b --prompt-tokens 64 --image-side 448 --ways ours TRL
    python benchmarks/step.py                        # no GPU: a small shape; TRL generates with transformers

Runs train_grpo.py as a user does, with its defaults but for vLLM's share of the GPU and `--exact off` ("ours"). On a
GPU, runs it again with `--exact on` ("exact"), and prints what the steps have proven, and with learner and engine
compiled ("compiled"). If trl is installed, runs TRL's GRPOTrainer ("TRL"), a rank with an engine of its own on each
GPU. With `--topology separate`, each trainer rank and each engine worker has a GPU of its own. Then there is no
"compiled", but a run with `--max-staleness 2` ("async"), and "TRL" is TRL's server mode: the ranks on the first GPUs,
and on the others one `trl vllm-serve`, with an engine for each of its data-parallel ranks.

All ways get the same model, prompts, reward and batch. The model has random weights. It cannot sample its tokenizer's
end token, so every completion has all its tokens. With `--mean-tokens M`, one in M tokens of the vocabulary ends a
completion. The model samples all of them nearly equally often, so completions end after M tokens on average, and at
`--tokens` at the latest.

Times are medians of the steps after the first. A step lasts until the next one begins, so the clock leaves nothing
out: "rest" is what is in none of the other parts, and "sync" has sleeping and waking in it. Tokens/s are the median of
a step's tokens over that of its time. TRL is told to use no gradient checkpointing, to learn from `--trl-batch`
completions at a time, and which share of the GPU is vLLM's. All else are its defaults: its weights are fp32 and it
computes in bf16, as we do. Its parts are timed from outside, and each ends when the GPU has done its work.

With `--topology separate`, the table also has the shares of a step in which the engine and the trainer are idle. They
wait for each other: the engine is idle in all parts but the rollout, and the trainer in the rollout. "async" logs its
shares itself; its "rollout" is the time that the trainer waits for rollouts.

MFU is the share of the bf16 peak of all trainers' GPUs that the arithmetic of learning takes (trainer/learning/flops.py
counts it), every prompt with each of its completions, over the seconds of "learn"; a run's own `perf/mfu` is over those
of its updates. With `--mean-tokens` and with images there is no MFU here: lengths differ, and towers are not counted.
Memory is the peak of what is in use on all GPUs together; on CPU, of the processes' resident memory. "start" is the
seconds from the command to the end of the first step. Writes a table, step.json and step.png.
"""

import importlib.util
import json
import multiprocessing
import os
import random
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402 - the project's modules are found by the line above
from annotated_types import Ge, Gt, Le  # noqa: E402
from shapes import MULTIMODAL, SHAPES, device_kind  # noqa: E402

from trainer.errors import RunError  # noqa: E402
from trainer.flags import arg  # noqa: E402
from trainer.learning.flops import Work, peak_flops  # noqa: E402
from trainer.learning.multimodal import auto_class  # noqa: E402
from trainer.run.arguments import parse  # noqa: E402
from trainer.run.session import run_main  # noqa: E402

PARTS = {"rollout": "tab:blue", "learn": "tab:orange", "sync": "tab:green", "rest": "tab:gray"}  # and their colors
COMPILED = ["--task", "step_trl", "--engine-args", '{"compilation_config": {}}']
TOPOLOGIES = ("shared", "separate")
TEMPLATE = """
{%- for message in messages %}
    {%- for part in message.content if message.content is not string %}
        {{- "<|image_pad|>" if part.type == "image" else part.text }}
    {%- else %}
        {{- message.content }}
    {%- endfor %}
{%- endfor %}"""
SHAPES = SHAPES | MULTIMODAL


@dataclass
class Arguments:
    """The workload."""

    topology: Literal[TOPOLOGIES] = arg(
        "shared", help="trainers and engines on the same GPUs (CPU: shared memory), or on others (NCCL; CPU: gloo)"
    )
    trainers: Annotated[int, Ge(1)] = arg(1, help="trainer ranks, each on a GPU")
    engines: Annotated[int, Ge(1)] = arg(1, help="engines; with --topology shared, they take the trainers' GPUs")
    tensor_parallel_size: Annotated[int, Ge(1)] = arg(1, help="GPUs of an engine")
    ways: list[str] | None = arg(
        None, help="what to time (default: all; shared: ours exact compiled TRL; separate: ours exact async TRL)"
    )
    shape: Literal[tuple(SHAPES)] = arg("tiny", help="shape of the model")
    prompts: Annotated[int, Ge(1)] = arg(16, help="prompts in a step")
    completions: Annotated[int, Ge(2)] = arg(8, help="completions of each prompt")
    tokens: Annotated[int, Ge(1)] = arg(64, help="tokens of each completion")
    mean_tokens: Annotated[int | None, Ge(2)] = arg(
        None, help="completions end at random, after so many tokens on average and --tokens at most"
    )
    prompt_tokens: Annotated[int, Ge(1)] = arg(64, help="tokens of each prompt")
    image_side: Annotated[int, Ge(0)] = arg(
        0, help="of a multimodal shape, each prompt has a square image with sides of so many pixels; 0: none"
    )
    steps: Annotated[int, Ge(2)] = arg(6, help="steps of each way; the first is not counted")
    lora_rank: Annotated[int | None, Ge(1)] = arg(None, help="rank of adapters on all linear layers")
    options: str = arg("", help="more flags of our scripts")
    trl_batch: Annotated[int, Ge(1)] = arg(16, help="completions in a forward pass of TRL")
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = arg(
        0.3, help="fraction of the GPU's memory that vLLM takes, in our scripts and in TRL"
    )
    output: Path | None = arg(None, help="folder for the results (default: a new one under runs/)")


def build_model(folder: Path, args: Arguments, device: str) -> None:
    """Write a model with random weights, its tokenizer, and prompts.jsonl."""
    import torch
    from PIL import Image
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, PreTrainedTokenizerFast

    config = AutoConfig.for_model(**SHAPES[args.shape])
    text = config.get_text_config()
    text.bos_token_id, text.pad_token_id, text.eos_token_id = 0, 1, None
    words = ["<s>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"w{i}" for i in range(len(words), text.vocab_size)]
    if config is not text:
        words[config.image_token_id], words[config.video_token_id] = "<|image_pad|>", "<|video_pad|>"
    words += ["</s>"]  # the head has no row for it
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    tokenizer.save_pretrained(folder)
    if config is not text:
        from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

        tokenizer.add_special_tokens({"extra_special_tokens": ["<|image_pad|>", "<|video_pad|>"]})
        parts = Qwen2VLImageProcessor(), tokenizer, Qwen2VLVideoProcessor()
        tokenizer.chat_template = TEMPLATE
        Qwen2_5_VLProcessor(*parts, chat_template=tokenizer.chat_template).save_pretrained(folder)
    torch.manual_seed(0)
    with torch.device(device):
        model = auto_class(config).from_config(config, dtype=torch.bfloat16)
    if args.mean_tokens:  # vLLM and TRL stop at the EOS tokens in generation_config.json
        count = text.vocab_size // args.mean_tokens
        model.generation_config.eos_token_id = list(range(text.vocab_size - count, text.vocab_size))
    model.save_pretrained(folder)
    letters, generator = "abcdefghijklmnopqrstuvwxyz ", random.Random(0)
    prompts = ["".join(generator.choices(letters, k=args.prompt_tokens)) for _ in range(args.prompts * args.steps)]
    rows = [{"prompt": prompt} for prompt in prompts]
    for number, row in enumerate(rows if args.image_side else ()):
        image = folder / f"{number}.png"
        Image.effect_noise((args.image_side, args.image_side), 64).convert("RGB").save(image)
        row |= {"prompt": [{"role": "user", "content": row["prompt"]}], "images": [str(image)]}
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / "prompts.jsonl").write_text("".join(lines))


def learning_flops(args: Arguments) -> float:
    """FLOPs of learning from one step's completions, as the module's docstring counts them."""
    import torch
    from transformers import AutoConfig

    config = AutoConfig.for_model(**SHAPES[args.shape])
    with torch.device("meta"):
        work = Work(auto_class(config).from_config(config).requires_grad_(not args.lora_rank))
    length, sequences = args.prompt_tokens + args.tokens, args.prompts * args.completions
    return sequences * work.flops_of(length, args.tokens, length**2, backward=True)


def choose_gpus(args: Arguments) -> str:
    """The first GPUs that are visible, as many as the topology takes. Raises RunError if there are fewer."""
    import torch

    wanted = args.trainers + (args.engines * args.tensor_parallel_size if args.topology == "separate" else 0)
    available = torch.cuda.device_count()
    if available < wanted:
        raise RunError(f"--topology {args.topology} takes {wanted} GPUs, and there are {available}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(available)))
    return ",".join(visible.split(",")[:wanted])


@contextmanager
def started(folder: Path, command: list[str], gpus: str) -> Iterator[subprocess.Popen]:
    """Start a command in a new folder, with its output in output.txt there. It is ended with the context.

    The command sees these `gpus`; on CPU, that is "".
    """
    folder.mkdir()
    paths = [str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(paths)}  # where the reward is found
    environment |= {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}
    with (folder / "output.txt").open("w") as file:
        output = {"stdout": file, "stderr": subprocess.STDOUT}
        process = subprocess.Popen([sys.executable, *command], cwd=folder, env=os.environ | environment, **output)
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


def run_way(folder: Path, command: list[str], gpus: str, watch: Callable[[], None] = lambda: None) -> float:
    """Run a command, as `started` does, to its end. Returns the peak of memory in use, in GB. `watch` is called twice a
    second, and at the end.

    Raises RunError if it fails: with the last error in the output, or its last line if there is none.
    """
    peak = 0.0
    with started(folder, command, gpus) as process:
        while process.poll() is None:
            in_use = sum(map(gpu_memory, gpus.split(","))) if gpus else resident_memory(process.pid)
            peak = max(peak, in_use)
            watch()
            time.sleep(0.5)
    watch()
    if process.returncode:
        lines = (folder / "output.txt").read_text(errors="replace").strip().splitlines() or ["no output"]
        errors = [line for line in lines if re.search(r"[Ee]rror: .", line)]  # torchrun's summary comes after them
        raise RunError(f"{folder.name}: {(errors or lines)[-1]} (all of it in {folder}/output.txt)")
    return peak


def gpu_memory(gpu: str) -> float:
    """GB in use on this GPU, by any process."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", gpu]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout) * 2**20 / 1e9


def resident_memory(pid: int) -> float:
    """GB of host memory of this process and its descendants."""
    total = 0
    try:
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            total += process.memory_info().rss
    except psutil.NoSuchProcess:  # one that has just ended
        pass
    return total / 1e9


def our_step(folder: Path, args: Arguments, gpus: str, more: Sequence[str]) -> tuple[list[dict], float]:
    """Run train_grpo.py with `more` flags. Returns its steps but the first, with seconds by part, tokens, idle shares
    and the run's start, and the peak of memory."""
    model = folder.parent / "model"
    flags = {"model": model, "dataset": model / "prompts.jsonl", "prompts-per-step": args.prompts, "steps": args.steps}
    flags |= {"group-size": args.completions, "max-tokens": args.tokens, "reward": "step_trl:reward", "save-every": 0}
    flags |= {"tensor-parallel-size": args.tensor_parallel_size, "gpu-memory-utilization": args.gpu_memory_utilization}
    flags |= {"topology": args.topology, "engines": args.engines}
    flags |= {"trainers": args.trainers} if args.topology == "separate" else {}
    flags |= {"lora-rank": args.lora_rank} if args.lora_rank else {}
    options = [f"--{name}={value}" for name, value in flags.items()]
    command = [str(ROOT / "train_grpo.py"), *options, "--output", "run", *shlex.split(args.options), *more]
    peak = run_way(folder, command, gpus)
    steps = []
    for row in map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines()):
        step = {"whole": row["time/step"], "rollout": row["time/rollout"], "learn": row["time/train"]}
        step |= {"sync": row.get("time/sleep", 0.0) + row["time/sync"]}
        step |= {"mismatch": row["logprobs/mismatch"], "different_tokens": row.get("logprobs/different_tokens", 0)}
        step |= {"tokens": step_tokens(folder.name, row["completions/mean_length"], args)}
        if args.topology == "separate":
            step |= idle_shares(step, row)
        start = steps[0]["start"] if steps else row["time/start"] + row["time/step"]
        steps.append(step | {"start": start})
    return steps[1:], peak


def idle_shares(step: dict, logged: dict) -> dict[str, float]:
    """The shares of a step in which engine and trainer are idle: as logged, or of two that wait for each other."""
    rollout = step["rollout"] / step["whole"]
    shares = {"engine_idle": 1 - rollout, "trainer_idle": rollout}
    return {name: logged.get(f"async/{name}", share) for name, share in shares.items()}


def trl_step(folder: Path, args: Arguments, gpus: str) -> tuple[list[dict], float]:
    """As `our_step`, for TRL."""
    completions = args.prompts * args.completions // args.trainers  # of a rank
    batch = min(args.trl_batch, completions)
    if args.prompts * args.completions % (args.trainers * batch):
        raise RunError(f"--trl-batch {batch} does not divide the {completions} completions of a rank")
    workload = {name: value for name, value in asdict(args).items() if name not in ("options", "output")}
    learning, serving = gpus.split(",")[: args.trainers], gpus.split(",")[args.trainers :]
    workload |= {"gpus": ",".join(learning), "trl_batch": batch, "accumulation": completions // batch}
    command = [str(ROOT / "benchmarks" / "step_trl.py"), json.dumps(workload)]
    if args.trainers > 1:
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.trainers}", *command]
    flags = {"model": folder.parent / "model", "data-parallel-size": args.engines}
    flags |= {"tensor-parallel-size": args.tensor_parallel_size, "gpu-memory-utilization": args.gpu_memory_utilization}
    server = ["-m", "trl.scripts.vllm_serve", *(f"--{name}={value}" for name, value in flags.items())]
    with started(folder.with_name("trl-server"), server, ",".join(serving)) if serving else nullcontext():
        peak = run_way(folder, command, gpus)
    result = json.loads((folder / "steps.json").read_text())
    for step, length in zip(result["steps"], result["lengths"], strict=True):
        step |= {"tokens": step_tokens(folder.name, length, args), "start": result["start"]}
        if args.topology == "separate":
            step.update(idle_shares(step, logged={}))
    return result["steps"][1:], peak


def step_tokens(way: str, length: float, args: Arguments) -> float:
    """Tokens of a step whose completions have this mean length. Raises RunError if completions ended early."""
    if length != args.tokens and not args.mean_tokens:
        raise RunError(f"{way}: completions have {length:g} tokens on average, and not {args.tokens}")
    return length * args.prompts * args.completions


def choose_ways(args: Arguments, gpus: str) -> dict[str, Callable[[Path], tuple[list[dict], float]]]:
    """The ways to time, by name: functions that take a folder. Raises RunError if --ways has another name."""
    flags = {"ours": ["--exact", "off"]}
    if args.topology == "separate":
        flags["async"] = ["--exact", "off", "--max-staleness", "2"]
    if gpus:
        flags["exact"] = ["--exact", "on"]
    if gpus and args.topology == "shared":
        flags["compiled"] = COMPILED
    ways = {way: partial(our_step, args=args, gpus=gpus, more=more) for way, more in flags.items()}
    if importlib.util.find_spec("trl") and (gpus or args.topology == "shared"):  # TRL's server takes weights by NCCL
        ways["TRL"] = partial(trl_step, args=args, gpus=gpus)
    if unknown := [name for name in args.ways or () if name not in ways]:
        raise RunError(f"--ways: there is no {unknown[0]} here, but {', '.join(ways)}")
    return {name: ways[name] for name in args.ways or ways}


def summary(way: str, steps: list[dict], peak: float, flops: float | None, peak_flops: float) -> dict:
    """A row of the table: medians, in seconds."""
    for step in steps:
        step["rest"] = step["whole"] - step["rollout"] - step["learn"] - step["sync"]
    row = {name: statistics.median(step[name] for step in steps) for name in steps[0]}
    row |= {"way": way, "steps": steps, "peak_GB": peak, "tokens_per_second": row["tokens"] / row["whole"]}
    return row | {"MFU": flops / row["learn"] / peak_flops if flops and peak_flops else None}


def over_bound(rows: list[dict]) -> float | None:
    """The step of "async" over the longer of generating alone and learning + sync alone, if "ours" was timed as
    well."""
    medians = {row["way"]: row for row in rows}
    if not medians.keys() >= {"ours", "async"}:
        return None
    alone = medians["ours"]
    return medians["async"]["whole"] / max(alone["rollout"], alone["learn"] + alone["sync"])


def main(args: Arguments) -> None:
    if args.mean_tokens and args.mean_tokens >= args.tokens:
        raise RunError(f"--mean-tokens {args.mean_tokens} is not below --tokens {args.tokens}")
    if args.image_side and args.shape not in MULTIMODAL:
        raise RunError(f"--image-side is for the shapes {', '.join(MULTIMODAL)}")
    if args.topology == "shared" and args.trainers != args.engines * args.tensor_parallel_size:
        raise RunError("--topology shared takes as many --trainers as the engines have workers")
    device = device_kind()
    gpus = "" if device == "CPU" else choose_gpus(args)
    ways, flops = choose_ways(args, gpus), None if args.mean_tokens or args.image_side else learning_flops(args)
    folder = (args.output or Path("runs") / f"step-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    folder.mkdir(parents=True)
    # In a process of its own, so that nothing stays on the GPU.
    building = multiprocessing.get_context("spawn").Process(
        target=build_model, args=(folder / "model", args, "cuda" if gpus else "cpu")
    )
    building.start()
    building.join()
    if building.exitcode:
        raise RunError("the model could not be made")
    length = f"~{args.mean_tokens} (at most {args.tokens})" if args.mean_tokens else args.tokens
    devices = f"{len(gpus.split(','))} x {device}" if gpus else device
    title = (
        f"{args.shape}, {args.prompts} prompts of {args.prompt_tokens} tokens"
        f"{f' and an image of {args.image_side} x {args.image_side}' if args.image_side else ''}"
        f" x {args.completions} completions of {length}, {devices}"
    )
    idle = f"{'engine idle':>13}{'trainer idle':>14}" if args.topology == "separate" else ""
    print(
        f"{title}\n{'':15}{'rollout':>10}{'learn':>10}{'sync':>10}{'rest':>10}{'step':>10}"
        f"{'tokens/s':>12}{'MFU':>8}{'memory':>10}{'start':>8}{idle}"
    )
    rows, failed, peak_of_all = [], {}, args.trainers * (peak_flops(device) or 0)
    for way, measure in ways.items():
        try:
            steps, peak = measure(folder / way.lower())
        except RunError as error:
            if way != "TRL" or len(ways) == 1:
                raise
            failed[way] = str(error)  # running out of memory is a result as well
            print(f"{way:15}{error}")
            continue
        rows.append(summary(way, steps, peak, flops, peak_of_all))
        print(line(rows[-1]))
        if way == "exact":
            worst, different = (max(step[name] for step in steps) for name in ("mismatch", "different_tokens"))
            print(f"{'':15}mismatch at most {worst:g}, {different:g} different tokens in a step, of {len(steps)} steps")
    workload = {name: value for name, value in asdict(args).items() if name != "output"}
    results = {"device": device, "workload": workload, "learning_flops": flops, "ways": rows, "failed": failed}
    if ratio := over_bound(rows):
        results["async_over_bound"] = ratio
        print(f"async: a step is {ratio:.2f} times the longer of generating alone and learning + sync alone (ours)")
    (folder / "step.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(rows[::-1], title, folder / "step.png")
    print(f"OK: {folder}/step.png")


def line(row: dict) -> str:
    parts = "".join(f"{row[name]:8.3f} s" for name in (*PARTS, "whole"))
    mfu = "" if row["MFU"] is None else f"{100 * row['MFU']:.1f} %"
    idle = f"{100 * row['engine_idle']:11.1f} %{100 * row['trainer_idle']:12.1f} %" if "engine_idle" in row else ""
    more = f"{row['tokens_per_second']:12,.0f}{mfu:>8}{row['peak_GB']:7.1f} GB{row['start']:6.0f} s"
    return f"{row['way']:15}{parts}{more}{idle}"


def draw(rows: list[dict], title: str, path: Path) -> None:
    """Draw a bar for each way, from the bottom up, made of its parts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.6 * len(rows) + 1.8))
    axes, ways, left = figure.subplots(), [row["way"] for row in rows], [0.0] * len(rows)
    for part, color in PARTS.items():
        seconds = [row[part] for row in rows]
        axes.barh(ways, seconds, left=left, color=color, label=part)
        left = [begin + width for begin, width in zip(left, seconds, strict=True)]
    for way, row, end in zip(ways, rows, left, strict=True):
        axes.text(end, way, f" {row['whole']:.2f} s", va="center")
    axes.set_xlim(0, 1.15 * max(left))
    axes.set_xlabel("seconds of a step (medians)")
    axes.set_title(title, fontsize=11)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.35), ncols=len(PARTS), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    run_main(main, parse(Arguments, __doc__))
