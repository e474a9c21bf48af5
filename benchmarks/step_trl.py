"""TRL's GRPOTrainer on the workload of benchmarks/step.py, which starts this script, and the reward of all ways.

On a GPU, vLLM runs in the same process, or in the server that benchmarks/step.py has started; on CPU, transformers
generates. Writes steps.json.
"""

import json
import os
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil


def reward(prompts: list, completions: list, **columns) -> list[float]:
    """Rewards that depend on the completions alone, and differ among those of a prompt."""
    return [zlib.crc32(str(completion).encode()) % 1000 / 1000 for completion in completions]


DEFAULTS = {"compile": True}  # of the way "compiled", for which this is the task


class Parts:
    """The seconds of each step of a trainer, and of the step's parts; and `start`, of this process until the end of the
    first step."""

    def __init__(self, synchronize: Callable):
        self.synchronize, self.seconds, self.steps, self.began = synchronize, Counter(), [], None
        self.start = 0.0

    def time(self, owner, name: str) -> None:
        """Time this method of `owner` from now on."""
        method = getattr(owner, name)

        def run(*args, **options):
            self.synchronize()
            started = time.perf_counter()
            result = method(*args, **options)
            self.synchronize()
            self.seconds[name] += time.perf_counter() - started
            return result

        setattr(owner, name, run)

    def next_step(self) -> None:
        """End the current step, if there is one, and begin the next."""
        now, parts = time.perf_counter(), self.seconds
        if self.began:
            generating, sync = parts["_generate_single_turn"], parts["sync_weights"]  # sync is a part of generating
            learn = parts["training_step"] - generating - parts["_calculate_rewards"] + parts["step"]
            step = {"whole": now - self.began, "rollout": generating - sync, "learn": learn, "sync": sync}
            self.steps.append(step)
            self.start = self.start or time.time() - psutil.Process().create_time()
        self.began = now
        self.seconds.clear()


def grpo_config(workload: dict, **options):
    """What TRL is told of the workload, and these options: all else are its defaults. Call it before CUDA starts."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # a colocated vLLM runs in this process
    os.environ["CUDA_VISIBLE_DEVICES"] = workload["gpus"]  # not the server's, or Trainer would learn on those as well
    from trl import GRPOConfig

    gpu = bool(workload["gpus"])
    return GRPOConfig(
        output_dir="trl",
        per_device_train_batch_size=workload["trl_batch"],
        gradient_accumulation_steps=workload["accumulation"],
        num_generations=workload["completions"],
        max_completion_length=workload["tokens"],
        max_steps=workload["steps"],
        gradient_checkpointing=False,
        bf16=gpu,
        use_cpu=not gpu,
        use_vllm=gpu,
        vllm_gpu_memory_utilization=workload["gpu_memory_utilization"],
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **options,
    )


def main(workload: dict) -> None:
    model, gpu = Path("../model").resolve(), bool(workload["gpus"])
    from transformers import AutoConfig

    token = getattr(AutoConfig.from_pretrained(model), "image_token_id", None)
    config = grpo_config(
        workload,
        vllm_mode="server" if workload["topology"] == "separate" else "colocate",
        # A model with random weights samples image tokens, and TRL stops at one. Without vLLM, it bars them itself.
        generation_kwargs={"logit_bias": {token: -100.0}} if gpu and token else None,
    )
    import torch
    from datasets import Dataset, Image, List
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    parts = Parts(torch.cuda.synchronize if gpu else lambda: None)

    class Clock(TrainerCallback):
        def on_train_begin(self, *_, optimizer, **__):
            parts.time(optimizer, "step")

        def on_step_begin(self, *_, **__):
            parts.next_step()

        def on_train_end(self, *_, **__):
            parts.next_step()

    rows = [json.loads(line) for line in (model / "prompts.jsonl").read_text().splitlines()]
    dataset = Dataset.from_list(rows)
    if "images" in dataset.features:
        dataset = dataset.cast_column("images", List(Image()))
    options = {"reward_funcs": reward, "args": config, "callbacks": [Clock()]}
    if rank := workload["lora_rank"]:
        from peft import LoraConfig

        options["peft_config"] = LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear")
    trainer = GRPOTrainer(model=str(model), train_dataset=dataset, **options)
    for method in ("training_step", "_generate_single_turn", "_calculate_rewards"):
        parts.time(trainer, method)
    if gpu:
        parts.time(trainer.vllm_generation, "sync_weights")
    trainer.train()
    lengths = [row["completions/mean_length"] for row in trainer.state.log_history if "completions/mean_length" in row]
    if trainer.accelerator.is_main_process:
        results = {"start": parts.start, "steps": parts.steps, "lengths": lengths}
        Path("steps.json").write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
