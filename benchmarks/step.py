"""Time a whole GRPO step on one GPU, and where it goes: rollout, learning, weight sync, rest. Beside it TRL's.

    python benchmarks/step.py --shape qwen2.5-0.5b --prompt-tokens 128 --tokens 512
    python benchmarks/step.py --shape qwen2.5-7b --prompts 8 --tokens 1024 \
        --options '--offload-optimizer --sleep weights'
    python benchmarks/step.py --shape qwen2.5-7b --prompts 8 --tokens 1024 --lora-rank 32
    python benchmarks/step.py                        # no GPU: a small shape; TRL generates with transformers

Runs rlhf_colocate.py as a user does: with its defaults, then (on a GPU) with learner and engine compiled. Then TRL's
GRPOTrainer, if trl is installed, with vLLM on the same GPU. Model, prompts, reward and batch are the same. The model
has random weights, and its tokenizer's end token is none that it can sample, so every completion has all its tokens.

Times are medians of the steps after the first. A step lasts until the next one begins, so the clock leaves nothing
out: "rest" is what is in none of the other parts, and "sync" has sleeping and waking in it. TRL is told to use no
gradient checkpointing, to learn from `--trl-batch` completions at a time, and which share of the GPU is vLLM's. All
else are its defaults: it learns in the checkpoint's bf16, while our master weights are fp32. Its parts are timed from
outside, and each ends when the GPU has done its work.

MFU is the share of the GPU's peak in bf16 (PEAK_FLOPS) that learning's own arithmetic took, without any recomputation:
6 FLOPs for each weight of the blocks and each token, for each weight of the head and each token of a completion, and
6 * layers * hidden size * length for the attention of each token; with adapters 4 for the weights, which get no
gradient. Memory is the peak of all of the GPU that is in use;
on CPU, of the processes' resident memory. Writes a table, step.json and step.png.
"""

import importlib.util
import json
import multiprocessing
import os
import random
import shlex
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402 - the project's modules are found by the line above
from annotated_types import Ge, Gt, Le  # noqa: E402
from shapes import SHAPES, device_kind  # noqa: E402
from transformers.hf_argparser import HfArg  # noqa: E402

from recipe.arguments import parse  # noqa: E402
from recipe.errors import RunError  # noqa: E402
from recipe.ray_session import run_main  # noqa: E402

PEAK_FLOPS = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12}  # dense bf16, from the data sheets
PARTS = {"rollout": "tab:blue", "learn": "tab:orange", "sync": "tab:green", "rest": "tab:gray"}  # "sync" with sleeping
COMPILED = ["--compile", "--engine-args", '{"compilation_config": {}}']


@dataclass
class Arguments:
    """The workload."""

    shape: Literal[tuple(SHAPES)] = HfArg(default="tiny", help="the model's")
    prompts: Annotated[int, Ge(1)] = HfArg(default=16, help="in a step")
    completions: Annotated[int, Ge(2)] = HfArg(default=8, help="of each prompt")
    tokens: Annotated[int, Ge(1)] = HfArg(default=64, help="of each completion")
    prompt_tokens: Annotated[int, Ge(1)] = HfArg(default=64, help="of each prompt")
    steps: Annotated[int, Ge(2)] = HfArg(default=6, help="of each way; the first is not counted")
    lora_rank: Annotated[int | None, Ge(1)] = HfArg(default=None, help="of adapters on all linear layers")
    options: str = HfArg(default="", help="more flags of rlhf_colocate.py")
    trl_batch: Annotated[int, Ge(1)] = HfArg(default=16, help="completions in a forward pass of TRL")
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = HfArg(default=0.3, help="of the engine, whose-ever it is")
    output: Path | None = HfArg(default=None, help="folder for the results (default: a new one under runs/)")


def build_model(folder: Path, args: Arguments, device: str) -> None:
    """Write a model with random weights, a tokenizer of which every token is text, and prompts.jsonl."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    config = AutoConfig.for_model(**SHAPES[args.shape])
    config.bos_token_id, config.pad_token_id, config.eos_token_id = 0, 1, None
    words = ["<s>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"w{i}" for i in range(len(words), config.vocab_size)]
    words += ["</s>"]  # the head has no row for it
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    letters, generator = "abcdefghijklmnopqrstuvwxyz ", random.Random(0)
    prompts = ["".join(generator.choices(letters, k=args.prompt_tokens)) for _ in range(args.prompts * args.steps)]
    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in prompts]
    (folder / "prompts.jsonl").write_text("".join(lines))


def learning_flops(args: Arguments) -> float:
    """FLOPs of learning from one step's completions (see above)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[args.shape]))
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    blocks = sum(p.numel() for p in model.parameters()) - sum(w.numel() for w in {embeddings, head})
    length, sequences = args.prompt_tokens + args.tokens, args.prompts * args.completions
    attention = model.config.num_hidden_layers * model.config.hidden_size * length
    weights = blocks * length + head.numel() * args.tokens
    return sequences * ((4 if args.lora_rank else 6) * weights + 6 * attention * length)


def run_way(folder: Path, command: list[str], gpu: bool) -> float:
    """Run a command whose output goes to output.txt in this folder. Returns the peak of memory in use, in GB.

    Raises RunError with the last line of the output if it fails.
    """
    folder.mkdir()
    paths = [str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(paths)}  # of the reward
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    environment |= {"CUDA_VISIBLE_DEVICES": visible} if gpu else {}
    with (folder / "output.txt").open("w") as file:
        output = {"stdout": file, "stderr": subprocess.STDOUT}
        process = subprocess.Popen([sys.executable, *command], cwd=folder, env=os.environ | environment, **output)
        peak = 0.0
        while process.poll() is None:
            peak = max(peak, gpu_memory(visible) if gpu else resident_memory(process.pid))
            time.sleep(0.5)
    if process.returncode:
        lines = (folder / "output.txt").read_text(errors="replace").strip().splitlines() or ["no output"]
        raise RunError(f"{folder.name}: {lines[-1]} (all of it in {folder}/output.txt)")
    return peak


def gpu_memory(gpu: str) -> float:
    """GB of this GPU in use, whoever uses them."""
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


def our_step(folder: Path, args: Arguments, gpu: bool, more: list[str]) -> tuple[list[dict], float]:
    """Seconds of each counted step of rlhf_colocate.py by part, and the peak of memory."""
    model = folder.parent / "model"
    flags = {"model": model, "dataset": model / "prompts.jsonl", "prompts-per-step": args.prompts, "steps": args.steps}
    flags |= {"group-size": args.completions, "max-tokens": args.tokens, "reward": "step_trl:reward", "save-every": 0}
    flags |= {"engines": 1, "tensor-parallel-size": 1, "gpu-memory-utilization": args.gpu_memory_utilization}
    flags |= {"lora-rank": args.lora_rank} if args.lora_rank else {}
    options = [f"--{name}={value}" for name, value in flags.items()]
    command = [str(ROOT / "rlhf_colocate.py"), *options, "--output", "run", *shlex.split(args.options), *more]
    peak = run_way(folder, command, gpu)
    steps = []
    for row in map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines()):
        check_length(folder.name, row["completions/mean_length"], args.tokens)
        step = {"whole": row["time/step"], "rollout": row["time/rollout"], "learn": row["time/train"]}
        steps.append(step | {"sync": row["time/sleep"] + row["time/sync"]})
    return steps[1:], peak


def trl_step(folder: Path, args: Arguments, gpu: bool) -> tuple[list[dict], float]:
    """As `our_step`, of TRL."""
    batch = min(args.trl_batch, args.prompts * args.completions)
    if args.prompts * args.completions % batch:
        raise RunError(
            f"--trl-batch {batch} does not divide the {args.prompts * args.completions} completions of a step"
        )
    workload = {name: value for name, value in asdict(args).items() if name not in ("options", "output")}
    workload |= {"gpu": gpu, "trl_batch": batch}
    peak = run_way(folder, [str(ROOT / "benchmarks" / "step_trl.py"), json.dumps(workload)], gpu)
    result = json.loads((folder / "steps.json").read_text())
    for length in result["lengths"]:
        check_length(folder.name, length, args.tokens)
    return result["steps"][1:], peak


def check_length(way: str, length: float, tokens: int) -> None:
    if length != tokens:
        raise RunError(f"{way}: completions have {length:g} tokens on average, and not {tokens}")


def summary(way: str, steps: list[dict], peak: float, args: Arguments, flops: float, peak_flops: float | None) -> dict:
    """A row of the table: medians, in seconds."""
    for step in steps:
        step["rest"] = step["whole"] - step["rollout"] - step["learn"] - step["sync"]
    row = {name: statistics.median(step[name] for step in steps) for name in ("whole", *PARTS)}
    tokens = args.prompts * args.completions * args.tokens
    row |= {"way": way, "steps": steps, "peak_GB": peak, "tokens_per_second": tokens / row["whole"]}
    return row | {"MFU": flops / row["learn"] / peak_flops if peak_flops else None}


def main(args: Arguments) -> None:
    folder = (args.output or Path("runs") / f"step-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    folder.mkdir(parents=True)
    device = device_kind()[0]
    gpu, flops = device != "CPU", learning_flops(args)
    # In a process of its own, which leaves nothing on the GPU.
    building = multiprocessing.get_context("spawn").Process(
        target=build_model, args=(folder / "model", args, "cuda" if gpu else "cpu")
    )
    building.start()
    building.join()
    if building.exitcode:
        raise RunError("the model could not be made")
    ways = {"ours": lambda path: our_step(path, args, gpu, [])}
    if gpu:
        ways["ours, compiled"] = lambda path: our_step(path, args, gpu, COMPILED)
    if importlib.util.find_spec("trl"):
        ways["TRL"] = lambda path: trl_step(path, args, gpu)
    print(
        f"{args.shape}, {args.prompts} prompts of {args.prompt_tokens} tokens x {args.completions} completions of"
        f" {args.tokens}, {device}\n{'':15}{'rollout':>10}{'learn':>10}{'sync':>10}{'rest':>10}{'step':>10}"
        f"{'tokens/s':>12}{'MFU':>8}{'memory':>10}"
    )
    rows, failed = [], {}
    for way, measure in ways.items():
        try:
            steps, peak = measure(folder / way.replace(", ", "-").lower())
        except RunError as error:
            if way != "TRL":
                raise
            failed[way] = str(error)  # such as no memory, which is a result as well
            print(f"{way:15}{error}")
            continue
        rows.append(summary(way, steps, peak, args, flops, PEAK_FLOPS.get(device)))
        print(line(rows[-1]))
    workload = {name: value for name, value in asdict(args).items() if name != "output"}
    results = {"device": device, "workload": workload, "learning_flops": flops, "ways": rows, "failed": failed}
    (folder / "step.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(results, folder / "step.png")
    print(f"OK: {folder}/step.png")


def line(row: dict) -> str:
    parts = "".join(f"{row[name]:8.3f} s" for name in (*PARTS, "whole"))
    mfu = "" if row["MFU"] is None else f"{100 * row['MFU']:.1f} %"
    return f"{row['way']:15}{parts}{row['tokens_per_second']:12,.0f}{mfu:>8}{row['peak_GB']:7.1f} GB"


def draw(results: dict, path: Path) -> None:
    """A bar for each way, made of its parts."""
    from matplotlib.figure import Figure

    rows, workload = results["ways"][::-1], results["workload"]
    figure = Figure(figsize=(8, 0.6 * len(rows) + 1.8))
    axes, ways, left = figure.subplots(), [row["way"] for row in rows], [0.0] * len(rows)
    for part, color in PARTS.items():
        seconds = [row[part] for row in rows]
        axes.barh(ways, seconds, left=left, color=color, label={"sync": "sleep, sync, wake"}.get(part, part))
        left = [begin + width for begin, width in zip(left, seconds, strict=True)]
    for way, row, end in zip(ways, rows, left, strict=True):
        axes.text(end, way, f" {row['whole']:.2f} s", va="center")
    axes.set_xlim(0, 1.15 * max(left))
    axes.set_xlabel("seconds of a step (medians)")
    axes.set_title(
        "{shape}, {prompts} x {completions} x {tokens} tokens, ".format(**workload) + results["device"], fontsize=11
    )
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.35), ncols=len(PARTS), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    run_main(main, parse(Arguments, __doc__))
