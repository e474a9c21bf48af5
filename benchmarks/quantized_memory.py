"""Measure the memory that quantization saves: an engine in bf16, then one that torchao quantizes, without a trainer.

    python benchmarks/quantized_memory.py --tensor-parallel-size 1 --gpu-memory-utilization 0.4   # 1 GPU, OPT-125M
    python benchmarks/quantized_memory.py --model Qwen/Qwen2.5-7B                                 # 2 GPUs, TP=2
    python benchmarks/quantized_memory.py                                                         # no GPU: built-in

Prints the size of a worker's weights, how many KV-cache blocks fit beside them, and the tokens per second of rollouts.
"""

import asyncio
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ray
from shapes import BenchmarkArguments, BenchmarkEngineArguments

from trainer.errors import RunError
from trainer.flags import arg, section
from trainer.rollouts.engine import EngineActor
from trainer.rollouts.options import EngineSetting, llm_options
from trainer.rollouts.quantization import AUTO, quantize_by_torchao
from trainer.run.actors import ActorGroup, Seat, engine_seat, reserve
from trainer.run.arguments import parse
from trainer.run.folder import RunFolder
from trainer.run.models import BUILTIN_MODEL, DEFAULT_MODEL, load_or_make
from trainer.run.session import RaySession, run_main
from trainer.tasks.uppercase import PROMPTS

BATCH = {"cpu": (8, 8, 16), "cuda": (64, 8, 256)}  # prompts, completions of each, their tokens: enough to fill a GPU
ROUNDS = {"cpu": 1, "cuda": 3}


@dataclass
class Arguments:
    """What to measure."""

    run: BenchmarkArguments = section(BenchmarkArguments)
    engine: BenchmarkEngineArguments = section(
        BenchmarkEngineArguments,
        tensor_parallel_size=arg(2, help="GPUs that the engine is spread over (CPU: groups of cores)"),
        gpu_memory_utilization=arg(0.8, help="fraction of each of its GPUs' memory that the engine takes"),
        quantization=AUTO,
    )


class Engine(EngineActor):
    """A Ray actor around vllm.AsyncLLM, in bf16 or quantized."""

    async def start(
        self, model: str, args: Arguments, device: str, bundles: list[int], quantized: bool
    ) -> tuple[str, str]:
        """Start the engine. Returns whether it is compiled and has CUDA graphs, and the name of the quantization."""
        extension = "QuantizedPeerExtension" if quantized else "PeerExtension"
        options = {"worker_extension_cls": f"peers.{extension}", "dtype": "bfloat16"}
        options, environment = llm_options(args.engine, model, EngineSetting(device, options=options), bundles)
        await self.prepare(device, bundles)
        os.environ.update(environment)
        torchao_options, quantization = quantize_by_torchao(args.engine.quantization) if quantized else ({}, "")
        await self.load(model, torchao_options | options)
        compilation = self.llm.vllm_config.compilation_config
        compiled = "compiled, " if compilation.mode else ""
        return f"{compiled}CUDA graphs {compilation.cudagraph_mode.name}", quantization

    async def measure(
        self, prompts: list[str], completions: int, tokens: int, rounds: int
    ) -> tuple[int, int, int, float]:
        """Bytes of a worker's weights, KV-cache blocks, tokens in a block, and tokens per second of rollouts."""
        options = {"n": completions, "max_tokens": tokens, "ignore_eos": True, "seed": 0}
        options |= {"logprobs": 0, "detokenize": False}  # as rollouts
        tokenizer = self.llm.get_tokenizer()
        inputs = [{"prompt_token_ids": tokenizer.encode(prompt)} for prompt in prompts]

        async def generate() -> int:
            requests = await asyncio.gather(*(self.generate(prompt, options) for prompt in inputs))
            return sum(len(output.token_ids) for request in requests for output in request.outputs)

        await generate()  # warms up
        started = time.perf_counter()
        count = sum([await generate() for _ in range(rounds)])
        speed = count / (time.perf_counter() - started)
        cache = self.llm.vllm_config.cache_config
        stored = max(stored for stored, _ in await self.llm.collective_rpc("weight_bytes"))
        return stored, cache.num_gpu_blocks, cache.block_size, speed


def place(tensor_parallel_size: int) -> tuple[str, Seat]:
    """Reserve the engine's GPUs. Returns the device, and the engine's seat."""
    gpus, bundles = int(ray.cluster_resources().get("GPU", 0)), list(range(tensor_parallel_size))
    if 0 < gpus < tensor_parallel_size:
        raise RunError(f"--tensor-parallel-size {tensor_parallel_size} takes as many GPUs, and there are {gpus}")
    if gpus:
        return "cuda", engine_seat(reserve([{"GPU": 1}] * tensor_parallel_size, "PACK"), bundles, 1)
    return "cpu", Seat({"num_cpus": 0}, bundles)


def main(args: Arguments) -> None:
    table, folder = [], str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])  # workers import peers.py
    with RunFolder(args.run, Path(__file__).stem) as run:
        for quantized in (False, True):
            with RaySession(args.run, run.progress) as session:
                device, own_seat = place(args.engine.tensor_parallel_size)
                name = args.run.model or (BUILTIN_MODEL if device == "cpu" else DEFAULT_MODEL)
                model = load_or_make(name, run.path / "model", args.run)
                prompt_count, *batch = BATCH[device]
                prompts = [PROMPTS[i % len(PROMPTS)] for i in range(prompt_count)]
                engine = ActorGroup(session, "engine", Engine, [own_seat])
                start_arguments = (model, args, device, own_seat.bundles, quantized)
                mode, quantization = engine.agreed("starting", Engine.start, *start_arguments)
                table += engine.call("generating", Engine.measure, prompts, *batch, ROUNDS[device])
    print(f"model {model}, {mode}, TP={args.engine.tensor_parallel_size}")
    print(f"quantized by torchao's {quantization}")
    print("rollouts of {} prompts x {} completions of {} tokens, or as many as the model takes".format(*BATCH[device]))
    print(f"{'':10}{'weights of a worker':>22}{'KV-cache blocks':>18}{'of tokens':>12}{'rollout':>18}")
    for name, (weights, blocks, block_size, speed) in zip(("bf16", "quantized"), table, strict=True):
        print(f"{name:10}{weights / 2**30:18.4g} GiB{blocks:18,}{block_size:12}{speed:9,.0f} tokens/s")
    if device == "cpu":
        print("on CPU the KV cache has a fixed size: it does not get the memory that smaller weights leave free")
    print(f"OK: quantized, the weights take {table[1][0] / table[0][0]:.2f} of their memory in bf16")


if __name__ == "__main__":
    run_main(main, parse(Arguments, __doc__))
