"""RLHF with a quantized engine: rlhf.py's topology; torchao quantizes the engine's weights as they are loaded.

    python rlhf_online_quant.py                             # 3 GPUs: facebook/opt-125m; no GPU: a small model, int8
    python rlhf_online_quant.py --tensor-parallel-size 1    # 2 GPUs
    python rlhf_online_quant.py --model Qwen/Qwen2.5-0.5B-Instruct --prompts sums.jsonl --max-tokens 256 --steps 200

    GPU 0     Trainer: transformers' model in fp32, AdamW, rlhf_utils.WeightSender
    GPU 1..N  Engine: vllm.LLM with N workers, extended by rlhf_utils.WorkerExtension; weights and activations in FP8

1. Place: one Ray placement group, with a bundle for the trainer and one for each of the engine's workers.
2. Connect the trainer with the workers, and sync once: now the engine serves the trainer's weights, quantized.
3. Each step: generate, reward, learn, sync. After a sync, each worker compares what it serves with what the sync left.

The trainer sends whole weights, and each sync quantizes them anew. `diff rlhf.py rlhf_online_quant.py` shows what that
takes. The algorithm is rlhf.py's, but here its importance weights matter: a quantized engine gives a token another
probability than the trainer does. `mismatch`, the mean distance of the two log-probabilities, is never small, and the
loss weights each token by min(p_trainer / p_engine, 2), as if the trainer had sampled it.

The last line is `OK: ...`. After an error it is `error: ...`, and the exit status is not 0. To copy this file, take
rlhf_utils.py and weight_sync/ along, and for machines without a GPU rlhf_cpu.py.
"""

import argparse
import itertools
import json
import multiprocessing.connection
import os
import random
import re
import sys
import threading
import time
import traceback
from dataclasses import dataclass

import ray
import torch
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from rlhf_utils import SyncReport, WeightSender, stateless_init_process_group

MICRO_BATCH_TOKENS = 8192  # of the trainer's passes, padding included; fewer take less memory
WAIT_SECONDS = 3600  # limit of each wait

# --- Yours to replace: prompts, reward and loss -----------------------------------------------------------------------

# Or --prompts FILE, whose lines are {"prompt": ..., "answer": ...}. A prompt is a text or a list of chat messages.
TEXTS = ["The captain shouted: ", "Read the sign: ", "The headline said: ", "Dear Sir or Madam, "]
TEXTS += ["The crowd roared: ", "On the wall was written: ", "The machine printed: ", "Once upon a time "]
PROMPTS = [{"prompt": text} for text in TEXTS]


def reward(text: str, answer: str | None = None) -> float:
    """1 if the last number of the completion is the answer; for a prompt without one, the share of capital letters."""
    if answer is None:
        return sum("A" <= letter <= "Z" for letter in text) / max(len(text), 1)
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
    return float(bool(numbers) and float(numbers[-1]) == float(answer))


def token_losses(logprobs: torch.Tensor, engine_logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """The loss of each token [b, T], by the log-probabilities [b, T] and the completions' advantages [b, 1]."""
    importance = (logprobs.detach() - engine_logprobs).exp().clamp(max=2)  # detached: it is a weight, and not learned
    return -importance * advantages * logprobs


# ----------------------------------------------------------------------------------------------------------------------


@dataclass
class Sample:
    """A prompt with one completion."""

    ids: list[int]  # of both
    prompt_length: int
    logprobs: list[float]  # of the completion's tokens, by the engine
    text: str  # of the completion


class Engine:
    """vllm.LLM in a Ray actor. It reserves no GPU: its workers take bundles 1 to N of its placement group."""

    def __init__(self, model: str, tensor_parallel_size: int, device: str):
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray hides the GPUs from an actor that reserves none
        os.environ["VLLM_RAY_BUNDLE_INDICES"] = ",".join(str(1 + i) for i in range(tensor_parallel_size))
        options = {
            "distributed_executor_backend": "ray",
            "dtype": "bfloat16",
            "gpu_memory_utilization": 0.8,  # a sync needs memory, too
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},  # graphs alone start sooner
        }
        if device == "cpu":
            import rlhf_cpu

            options = rlhf_cpu.engine_options(tensor_parallel_size)
        from torchao import quantization
        from torchao.core.config import config_to_dict
        from vllm import LLM  # not before: it reads the environment

        config = quantization.Float8DynamicActivationFloat8WeightConfig(granularity=quantization.PerRow())
        if device == "cpu":  # which has no FP8
            config = quantization.Int8DynamicActivationInt8WeightConfig()
        self.llm = LLM(
            model,
            tensor_parallel_size=tensor_parallel_size,
            worker_extension_cls="rlhf_utils.WorkerExtension",
            logprobs_mode="processed_logprobs",  # of the distribution that is sampled from
            quantization="torchao",
            hf_overrides={"quantization_config_dict_json": json.dumps(config_to_dict(config))},
            **options,
        )
        processes = [process.sentinel for process in multiprocessing.active_children()]
        threading.Thread(target=self.end_with, args=[processes], daemon=True).start()

    def end_with(self, processes: list[int]) -> None:
        """End this actor with the first of vLLM's processes: vllm.LLM would wait for a killed one forever."""
        if multiprocessing.connection.wait(processes):
            time.sleep(1)  # vLLM may be about to raise an error that says more
            os._exit(1)

    def generate(self, prompts: list, group_size: int, max_tokens: int) -> list[Sample]:
        """`group_size` completions of each prompt, in the order of the prompts."""
        from vllm import SamplingParams

        generate = self.llm.generate if isinstance(prompts[0], str) else self.llm.chat
        fast = {"flat_logprobs": True, "detokenize": False}  # no object for each token; all texts at once, below
        params = SamplingParams(n=group_size, max_tokens=max_tokens, logprobs=0, **fast)  # 0: of sampled tokens only
        requests = generate(prompts, params, use_tqdm=False)
        outputs = [(list(request.prompt_token_ids), output) for request in requests for output in request.outputs]
        texts = self.llm.get_tokenizer().batch_decode([o.token_ids for _, o in outputs], skip_special_tokens=True)
        return [
            Sample(prompt_ids + list(output.token_ids), len(prompt_ids), list(output.logprobs.logprobs), text)
            for (prompt_ids, output), text in zip(outputs, texts, strict=True)
        ]

    def weight_bytes(self) -> list[tuple[int, int]]:
        """For each worker: the bytes of its weights, and what they would take without quantization."""
        return self.llm.collective_rpc("weight_bytes")

    def connect(self, address: str, port: int, world_size: int) -> None:
        """Have the workers join the trainer, which is rank 0."""
        self.llm.collective_rpc("init_weight_update_group", args=(address, port, 1, world_size))

    def receive_weights(self) -> bool:
        """Take part in a sync. Returns whether every worker serves, bit for bit, what was sent."""
        if not self.llm.reset_prefix_cache():  # it has keys and values of the old weights
            raise RuntimeError("vLLM did not reset its prefix cache")
        for answer in self.llm.collective_rpc("receive_weights"):
            if "error" in answer:
                raise RuntimeError(answer["error"])
        return all(self.llm.collective_rpc("check_weights_changed"))


class Trainer:
    """The policy, in a Ray actor with a GPU of its own."""

    def __init__(self, model: str, learning_rate: float, device: str):
        from transformers import AutoModelForCausalLM

        self.device, self.max_mismatch = torch.device(device, 0), None
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(self.device).eval()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate, weight_decay=0.0, fused=True)

    def address(self) -> tuple[str, int]:
        """The address of this actor's node, and a free port there."""
        from vllm.utils.network_utils import get_open_port

        return ray.util.get_node_ip_address(), get_open_port()

    def connect(self, address: str, port: int, world_size: int) -> None:
        self.sender = WeightSender(stateless_init_process_group(address, port, 0, world_size, self.device))

    def send_weights(self) -> SyncReport:
        return self.sender.send_weights(self.model.named_parameters())

    def learn(self, samples: list[Sample], advantages: torch.Tensor) -> float:
        """One update by the samples and their advantages [n], in micro-batches of similar lengths.

        Returns the mismatch. If it has grown too much, raises RuntimeError instead of the update.
        """
        tokens = sum(len(sample.logprobs) for sample in samples)
        distance = torch.zeros((), device=self.device)
        for rows in micro_batches(samples):
            logprobs, engine_logprobs, mask = self.logprobs([samples[i] for i in rows])
            losses = token_losses(logprobs, engine_logprobs, advantages[rows, None].to(self.device))
            ((losses * mask).sum() / tokens).backward()
            distance += ((logprobs.detach() - engine_logprobs).abs() * mask).sum()
        mismatch = float(distance) / tokens
        self.max_mismatch = self.max_mismatch or max(3 * mismatch, 1e-5)  # of the first batch, after a proven sync
        if not mismatch <= self.max_mismatch:  # not `>`, which NaN would pass
            raise RuntimeError(f"trainer and engine no longer compute the same: mismatch {mismatch:.2g}")
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, error_if_nonfinite=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return mismatch

    def logprobs(self, samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The trainer's log-probabilities [b, T], the engine's, and a mask that is 1 for the completions' tokens.

        Column 0 is where the first completion begins.
        """

        def padded(rows: list[list]) -> torch.Tensor:  # on the right, where a causal model does not look
            return pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(self.device)

        begin = min(sample.prompt_length for sample in samples)
        ids = padded([sample.ids for sample in samples])
        engine_logprobs = padded([[0.0] * (sample.prompt_length - begin) + sample.logprobs for sample in samples])
        mask = padded([[0.0] * (s.prompt_length - begin) + [1.0] * len(s.logprobs) for s in samples])
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.model(ids[:, :-1], use_cache=False, logits_to_keep=ids.shape[1] - begin).logits  # [b, T, V]
        # A row at a time, and again in the backward pass: all logits in fp32 would take more memory than all else.
        rows = zip(logits, ids[:, begin:], strict=True)
        logprobs = torch.stack([checkpoint(logprobs_of, *row, use_reentrant=False) for row in rows])
        return logprobs, engine_logprobs, mask


def micro_batches(samples: list[Sample]) -> list[list[int]]:
    """Indices of samples of similar lengths, as many at a time as MICRO_BATCH_TOKENS allows."""
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].ids))
    size = max(1, MICRO_BATCH_TOKENS // len(samples[order[-1]].ids))
    return [order[begin : begin + size] for begin in range(0, len(order), size)]


def logprobs_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [T] of the ids [T] by the logits [T, V]."""
    return -torch.nn.functional.cross_entropy(logits.float(), ids, reduction="none")


def wait_for(actors: list, *calls: ray.ObjectRef) -> list:
    """The results of the calls. Raises the error of one, or the death of an actor, even of one that is not called."""
    for _ in range(WAIT_SECONDS):
        done, running = ray.wait([*calls], num_returns=len(calls), timeout=1)
        if not running:
            return ray.get([*calls])
        pings = [actor.__ray_ready__.remote() for actor in actors]  # a busy actor answers later
        ray.get(done + ray.wait(pings, num_returns=len(pings), timeout=0.1)[0])
    raise TimeoutError(f"not done within {WAIT_SECONDS} s")


def place(args: argparse.Namespace) -> tuple[ray.actor.ActorHandle, ray.actor.ActorHandle]:
    """Start Ray, and in it the trainer and the engine, each on GPUs of its own."""
    variables = {"PYTHONPATH": os.pathsep.join(sys.path)}  # by which vLLM's workers find rlhf_utils
    runtime_env = {"env_vars": variables | {"VLLM_LOGGING_LEVEL": "ERROR"}}
    ray.init(runtime_env=runtime_env, include_dashboard=False, logging_level="error")
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if not gpus:
        import rlhf_cpu

        rlhf_cpu.complete(args)
    args.model, args.learning_rate = args.model or "facebook/opt-125m", args.learning_rate or 1e-6
    args.tensor_parallel_size = args.tensor_parallel_size or 2
    wanted = 1 + args.tensor_parallel_size
    if 0 < gpus < wanted:
        raise RuntimeError(f"this takes {wanted} GPUs, and there are {gpus}: rlhf_colocate.py takes any number")
    placement = placement_group([{"GPU": 1} if gpus else {"CPU": 0.1}] * wanted)
    if not placement.wait(timeout_seconds=60):
        raise RuntimeError("Ray could not reserve the GPUs: another run may hold them")
    device = "cuda" if gpus else "cpu"

    def actor(cls: type, bundle: int, **resources):
        where = PlacementGroupSchedulingStrategy(placement, bundle, placement_group_capture_child_tasks=True)
        return ray.remote(cls).options(num_cpus=0, scheduling_strategy=where, **resources)

    trainer = actor(Trainer, 0, num_gpus=min(gpus, 1)).remote(args.model, args.learning_rate, device)
    return trainer, actor(Engine, 1).remote(args.model, args.tensor_parallel_size, device)


def main(args: argparse.Namespace) -> str:
    rows = PROMPTS
    if args.prompts:
        with open(args.prompts) as file:
            rows = [json.loads(line) for line in file]

    # 1. Place
    actors = trainer, engine = place(args)

    # 2. Connect, and sync once
    (address, port), _ = wait_for(actors, trainer.address.remote(), engine.__ray_ready__.remote())
    world_size = 1 + args.tensor_parallel_size
    wait_for(actors, *(actor.connect.remote(address, port, world_size) for actor in actors))

    def sync() -> SyncReport:
        report, served = wait_for(actors, trainer.send_weights.remote(), engine.receive_weights.remote())
        if not served:
            raise RuntimeError(f"after sync {report.version}, the engine does not serve what was sent")
        return report

    report = sync()
    ((quantized, plain), *_), *_ = wait_for(actors, engine.weight_bytes.remote())
    print(f"weights of an engine's worker: {quantized / 1e6:.1f} MB; without quantization, {plain / 1e6:.1f} MB")
    print(f"first sync: {report.tensors} tensors, {report.nbytes / 1e9:.3f} GB; from now on by {report.loader}")

    # 3. Generate, reward, learn, sync; at last, generate once more
    random.Random(0).shuffle(rows)
    stream, means = itertools.cycle(rows), []
    for step in range(1, args.steps + 2):
        started = time.perf_counter()
        batch = list(itertools.islice(stream, args.prompts_per_step))
        prompts, answers = [row["prompt"] for row in batch], [row.get("answer") for row in batch]
        (samples,) = wait_for(actors, engine.generate.remote(prompts, args.group_size, args.max_tokens))
        rewards = [reward(sample.text, answers[i // args.group_size]) for i, sample in enumerate(samples)]
        groups = torch.tensor(rewards).view(-1, args.group_size)
        means.append(float(groups.mean()))
        shown = step % len(samples)
        print(f"  {rewards[shown]:.2f}  {prompts[shown // args.group_size]!r} -> {samples[shown].text!r}")
        if step > args.steps:
            break
        generated = time.perf_counter()
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        (mismatch,) = wait_for(actors, trainer.learn.remote(samples, advantages.flatten()))
        learned = time.perf_counter()
        sync()
        print(
            f"step {step}/{args.steps}  reward {means[-1]:.3f}  mismatch {mismatch:.1e}"
            f"  rollout {generated - started:.2f} s  learn {learned - generated:.2f} s"
            f"  sync {time.perf_counter() - learned:.3f} s"
        )
    return f"OK: reward {means[0]:.3f} -> {means[-1]:.3f} in {args.steps} steps"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="name or folder (default: facebook/opt-125m; no GPU: a small one)")
    parser.add_argument("--prompts", help="JSON lines, each with a `prompt`, text or chat messages, and an `answer`")
    parser.add_argument("--prompts-per-step", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--max-tokens", type=int, default=16, help="of a completion")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--learning-rate", type=float, help="default: 1e-6; the small model: 3e-3")
    parser.add_argument("--tensor-parallel-size", type=int, help="GPUs of the engine (default: 2; no GPU: 1 process)")
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # a completion may be any text
    try:
        last_line, status = main(parser.parse_args()), 0
    except (Exception, KeyboardInterrupt) as error:
        traceback.print_exc()
        cause = getattr(error, "cause", error)  # what an actor raised
        last_line, status = f"error: {type(cause).__name__}: {' '.join(str(cause).split())}", 1
    ray.shutdown()  # so that no actor prints after the last line
    print(last_line)
    sys.exit(status)
