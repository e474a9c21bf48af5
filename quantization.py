"""Engines whose weights torchao quantizes as they are loaded: in which way, and what that saves.

`compare_memory` is rlhf_online_quant.py's --compare-memory: the same engine with weights in bf16 and then quantized, in
the same memory, without a trainer.
"""

import argparse
import json
import time
from pathlib import Path

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ray_session import RaySession
from run_folder import RunError, RunFolder, choose_models
from task import draw_prompts, load_prompts

BATCH = {"cpu": (8, 8, 16), "cuda": (64, 8, 256)}  # prompts, completions of each, their tokens: enough to fill a GPU
ROUNDS = {"cpu": 1, "cuda": 3}


def quantize_by_torchao(config: dict | None) -> tuple[dict, str]:
    """vLLM's options for weights quantized by this configuration or the best one for this hardware, and its name."""
    from torchao import quantization
    from torchao.core.config import config_to_dict
    from vllm.platforms import current_platform

    why = ""
    if config is None and current_platform.supports_fp8():
        config = quantization.Float8DynamicActivationFloat8WeightConfig(granularity=quantization.PerRow())
        config = config_to_dict(config)
    elif config is None:
        config = config_to_dict(quantization.Int8DynamicActivationInt8WeightConfig())
        why = ": FP8 takes a GPU of compute capability 8.9"
    options = {"quantization": "torchao", "hf_overrides": {"quantization_config_dict_json": json.dumps(config)}}
    return options, config["_type"] + why


def read_torchao_config(path: str) -> dict:
    """A file that holds `json.dumps(config_to_dict(config))`. Raises argparse's error for what torchao cannot read."""
    from torchao.core.config import AOBaseConfig, config_from_dict

    try:
        config = json.loads(Path(path).read_text())
        if not isinstance(config_from_dict(config), AOBaseConfig):
            raise ValueError(f"{config['_type']} is not a quantization")
    except Exception as error:  # torchao's own differ by what is wrong
        raise argparse.ArgumentTypeError(f"{path}: {error}") from error
    return config


class Measured:
    """What an engine actor, which has `llm`, needs beside for `compare_memory`."""

    def measure(self, prompts: list[str], completions: int, tokens: int, rounds: int) -> tuple[int, int, int, float]:
        """Bytes of weights on each GPU, KV-cache blocks, tokens in a block, and tokens a second of rollouts."""
        from vllm import SamplingParams

        params = SamplingParams(n=completions, max_tokens=tokens, ignore_eos=True, logprobs=0, seed=0)
        self.llm.generate(prompts, params, use_tqdm=False)  # warms up
        count, started = 0, time.perf_counter()
        for _ in range(rounds):
            requests = self.llm.generate(prompts, params, use_tqdm=False)
            count += sum(len(output.token_ids) for request in requests for output in request.outputs)
        speed = count / (time.perf_counter() - started)
        cache = self.llm.llm_engine.vllm_config.cache_config
        return max(self.llm.collective_rpc("weight_bytes")), cache.num_gpu_blocks, cache.block_size, speed


def compare_memory(args: argparse.Namespace, engine_class: type) -> None:
    """Run the engine in bf16 and then quantized, in the same memory, and print what a user decides by."""
    engine_class, table = type("MeasuredEngine", (Measured, engine_class), {}), []
    with RunFolder(args, "compare-memory") as run:
        for more in ({"quantization": None, "hf_overrides": None}, {}):
            with RaySession(run, args.ray_address) as session:
                device, options = place_engine(args.tensor_parallel_size)
                model, _ = choose_models(run, args, device)
                args.enforce_eager |= device == "cpu"  # where compiling takes longer than such a run
                count, *batch = BATCH[device]
                rows = draw_prompts(load_prompts(args.prompts), count, 1, args.seed)
                prompts = [row["prompt"] for row in rows]
                engine = ray.remote(engine_class).options(**options).remote(model, args, device, **more)
                session.actors["engine"] = engine
                (quantization,) = session.wait("starting", engine=engine.start.remote(rows))
                table += session.wait("generating", engine=engine.measure.remote(prompts, *batch, ROUNDS[device]))
    print(f"model {model}, {'eager' if args.enforce_eager else 'compiled'}, TP={args.tensor_parallel_size}")
    print(f"quantized by torchao's {quantization}")
    print("rollouts of {} prompts x {} completions of {} tokens, or as many as the model takes".format(*BATCH[device]))
    print(f"{'':10}{'weights of a worker':>22}{'KV-cache blocks':>18}{'of tokens':>12}{'rollout':>18}")
    for name, (weights, blocks, block_size, speed) in zip(("bf16", "quantized"), table, strict=True):
        print(f"{name:10}{weights / 2**30:18.4g} GiB{blocks:18,}{block_size:12}{speed:9,.0f} tokens/s")
    if device == "cpu":
        print("on CPU the KV cache has a size of its own: what the weights leave is not given to it")
    print(f"OK: quantized, the weights take {table[1][0] / table[0][0]:.2f} of their memory in bf16")


def place_engine(tensor_parallel_size: int) -> tuple[str, dict]:
    """Reserve what the engine takes. Returns the device, and the Ray options that put the engine in its place."""
    gpus, options = int(ray.cluster_resources().get("GPU", 0)), {"num_cpus": 0}
    if 0 < gpus < tensor_parallel_size:
        raise RunError(f"--tensor-parallel-size {tensor_parallel_size} takes as many GPUs, and there are {gpus}")
    if gpus:
        # The engine's workers take the bundles from 1 on: where a trainer would be, bundle 0 is next to nothing.
        group = placement_group([{"CPU": 0.01}] + [{"GPU": 1}] * tensor_parallel_size)
        if not group.wait(timeout_seconds=60):
            raise RunError(f"Ray could not reserve {tensor_parallel_size} GPUs within 60 s: another run may hold them")
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            group, 1, placement_group_capture_child_tasks=True
        )
    return "cuda" if gpus else "cpu", options
