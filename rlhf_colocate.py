"""RLHF on shared GPUs: each has a rank of the trainer (FSDP2) and a worker of a vLLM engine, CUDA IPC between them.

    python rlhf_colocate.py    # all GPUs: facebook/opt-125m; no GPU: a small model made on the spot, shared memory
    python rlhf_colocate.py --model Qwen/Qwen2.5-0.5B-Instruct --prompts sums.jsonl --max-tokens 256 --steps 200

    GPU 0, 1  Trainer, ranks 0 and 1: shards of transformers' model in fp32, AdamW, rlhf_utils.WeightSender
              Engine 0: vllm.LLM with two workers, extended by rlhf_utils.ColocateWorkerExtension
    GPU 2, 3  Trainer, ranks 2 and 3; Engine 1. With one GPU there is one rank, and an engine with one worker

1. Place: one Ray placement group with a bundle for each GPU. The engines start first: vLLM measures the free memory.
2. Connect: each rank opens a channel to the workers beside it. Sync once: now the engines serve the trainer's weights.
3. Each step: generate, reward, learn while the engines' KV cache sleeps, sync. In a sync, each worker reads the weights
   from the GPU memory of all ranks. Then it compares what it serves with what was sent.

The algorithm is rlhf.py's, whose docstring explains it. This script is for dense models: a mixture of experts has other
names in transformers than in its checkpoint. The last line is `OK: ...`. After an error it is `error: ...`, and the
exit status is not 0. To copy this file, take rlhf_utils.py and weight_sync/ along, and for machines without a GPU
rlhf_cpu.py.
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
import torch.distributed as dist
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from rlhf_utils import SharedMemoryChannel, SyncReport, WeightSender

MICRO_BATCH_TOKENS = 8192  # of the trainer's passes, padding included; fewer take less memory
GPU_SHARE = 0.4  # of each GPU, for the engine; the trainer takes what is left
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
    """vllm.LLM in a Ray actor. It reserves no GPU: its workers take these bundles of its placement group."""

    def __init__(self, model: str, bundles: list[int], device: str):
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray hides the GPUs from an actor that reserves none
        os.environ["VLLM_RAY_BUNDLE_INDICES"] = ",".join(map(str, bundles))
        os.environ["VLLM_RAY_PER_WORKER_GPUS"] = str(GPU_SHARE)
        options = {
            "distributed_executor_backend": "ray",
            "dtype": "bfloat16",
            "gpu_memory_utilization": GPU_SHARE,
            "enable_sleep_mode": True,
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},  # graphs alone start sooner
        }
        if device == "cpu":
            import rlhf_cpu

            options = rlhf_cpu.engine_options(len(bundles))
        from vllm import LLM  # not before: it reads the environment

        self.llm = LLM(
            model,
            tensor_parallel_size=len(bundles),
            worker_extension_cls="rlhf_utils.ColocateWorkerExtension",
            logprobs_mode="processed_logprobs",  # of the distribution that is sampled from
            **options,
        )
        processes = [process.sentinel for process in multiprocessing.active_children()]
        threading.Thread(target=self.end_with, args=[processes], daemon=True).start()
        self.can_sleep = device == "cuda"
        self.sleep()  # until the first sync

    def end_with(self, processes: list[int]) -> None:
        """End this actor with the first of vLLM's processes: vllm.LLM would wait for a killed one forever."""
        if multiprocessing.connection.wait(processes):
            time.sleep(1)  # vLLM may be about to raise an error that says more
            os._exit(1)

    def generate(self, prompts: list, group_size: int, max_tokens: int) -> list[Sample]:
        """`group_size` completions of each prompt, in the order of the prompts. Afterwards the engine sleeps."""
        from vllm import SamplingParams

        generate = self.llm.generate if isinstance(prompts[0], str) else self.llm.chat
        fast = {"flat_logprobs": True, "detokenize": False}  # no object for each token; all texts at once, below
        params = SamplingParams(n=group_size, max_tokens=max_tokens, logprobs=0, **fast)  # 0: of sampled tokens only
        requests = generate(prompts, params, use_tqdm=False)
        outputs = [(list(request.prompt_token_ids), output) for request in requests for output in request.outputs]
        self.sleep()
        texts = self.llm.get_tokenizer().batch_decode([o.token_ids for _, o in outputs], skip_special_tokens=True)
        return [
            Sample(prompt_ids + list(output.token_ids), len(prompt_ids), list(output.logprobs.logprobs), text)
            for (prompt_ids, output), text in zip(outputs, texts, strict=True)
        ]

    def sleep(self) -> None:
        """Give the memory of the KV cache to the trainer."""
        if not self.llm.reset_prefix_cache():  # it has keys and values that a sync makes old
            raise RuntimeError("vLLM did not reset its prefix cache")
        if self.can_sleep:
            self.llm.sleep(level=0)
            self.llm.release_kv_cache_memory()
            self.llm.collective_rpc("empty_cache")

    def receive_weights(self, handles: dict[str, str]) -> bool:
        """Take part in a sync, and wake up. Returns whether every worker serves, bit for bit, what was sent.

        A worker finds the rank beside it by the id of their GPU: `handles` has each rank's.
        """
        for answer in self.llm.collective_rpc("receive_weights", args=(handles,)):
            if "error" in answer:
                raise RuntimeError(answer["error"])
        if self.can_sleep and not self.llm.wake_up(tags=["kv_cache"]):
            raise RuntimeError("vLLM did not wake up")
        return all(self.llm.collective_rpc("check_weights_changed"))


class Trainer:
    """One rank of the policy, in a Ray actor on a GPU that it shares."""

    def __init__(self, rank: int, ranks: int, device: str):
        self.rank, self.ranks, self.device, self.max_mismatch = rank, ranks, torch.device(device, 0), None

    def address(self) -> tuple[str, int]:
        """The address of this actor's node, and a free port there."""
        from vllm.utils.network_utils import get_open_port

        return ray.util.get_node_ip_address(), get_open_port()

    def connect(self, model: str, learning_rate: float, address: str, port: int) -> dict[str, str]:
        """Join the other ranks, load this one's shard of the model, and open the channel to the workers beside it.
        Returns its handle."""
        from transformers import AutoModelForCausalLM

        cuda = self.device.type == "cuda"
        ranks = {"init_method": f"tcp://{address}:{port}", "rank": self.rank, "world_size": self.ranks}
        dist.init_process_group("nccl" if cuda else "gloo", **ranks)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(self.device).eval()
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if cuda else None, reduce_dtype=torch.float32)
        for block in max((m for m in self.model.modules() if isinstance(m, torch.nn.ModuleList)), key=len):
            fully_shard(block, mp_policy=precision)
        fully_shard(self.model, mp_policy=precision)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate, weight_decay=0.0, fused=True)
        torch.cuda.empty_cache()  # of whole tensors
        channel = SharedMemoryChannel(self.device if cuda else torch.device("cpu", self.rank))
        self.sender = WeightSender(channel)
        return channel.handles

    def send_weights(self) -> SyncReport:
        return self.sender.send_weights(self.model.named_parameters())

    def learn(self, samples: list[Sample], advantages: torch.Tensor) -> float:
        """One update by the samples and their advantages [n], in micro-batches of similar lengths.

        Returns the mismatch. If it has grown too much, raises RuntimeError instead of the update. Each rank takes every
        `ranks`-th sample, and as many micro-batches as the others: the ranks pass together.
        """
        tokens = sum(len(sample.logprobs) for sample in samples)
        distance = torch.zeros((), device=self.device)
        for rows in micro_batches(samples, self.rank, self.ranks):
            logprobs, engine_logprobs, mask = self.logprobs([samples[i] for i in rows])
            losses = token_losses(logprobs, engine_logprobs, advantages[rows, None].to(self.device))
            ((losses * mask).sum() / tokens * self.ranks).backward()  # FSDP takes the mean of the ranks' gradients
            distance += ((logprobs.detach() - engine_logprobs).abs() * mask).sum()
        dist.all_reduce(distance)
        mismatch = float(distance) / tokens
        self.max_mismatch = self.max_mismatch or max(3 * mismatch, 1e-5)  # of the first batch, after a proven sync
        if not mismatch <= self.max_mismatch:  # not `>`, which NaN would pass
            raise RuntimeError(f"trainer and engine no longer compute the same: mismatch {mismatch:.2g}")
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, error_if_nonfinite=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch.cuda.empty_cache()  # for the engine
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
        logits = self.model(ids[:, :-1], use_cache=False, logits_to_keep=ids.shape[1] - begin).logits  # [b, T, V]
        # A row at a time, and again in the backward pass: all logits in fp32 would take more memory than all else.
        rows = zip(logits, ids[:, begin:], strict=True)
        logprobs = torch.stack([checkpoint(logprobs_of, *row, use_reentrant=False) for row in rows])
        return logprobs, engine_logprobs, mask


def micro_batches(samples: list[Sample], rank: int, ranks: int) -> list[list[int]]:
    """This rank's indices of samples of similar lengths, as many at a time as MICRO_BATCH_TOKENS allows."""
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].ids))
    size = max(1, MICRO_BATCH_TOKENS // len(samples[order[-1]].ids))
    order = order[rank::ranks]
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


def place(args: argparse.Namespace) -> tuple[list[ray.actor.ActorHandle], list[ray.actor.ActorHandle]]:
    """Start Ray, and in it the trainer's ranks and the engines, on the same GPUs."""
    variables = {"PYTHONPATH": os.pathsep.join(sys.path)}  # by which vLLM's workers find rlhf_utils
    runtime_env = {"env_vars": variables | {"VLLM_LOGGING_LEVEL": "ERROR"}}
    ray.init(runtime_env=runtime_env, include_dashboard=False, logging_level="error")
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if not gpus:
        import rlhf_cpu

        rlhf_cpu.complete(args)
    args.model, args.learning_rate = args.model or "facebook/opt-125m", args.learning_rate or 1e-6
    tp = args.tensor_parallel_size or (1 if gpus % 2 else 2)
    ranks = gpus or tp
    if ranks % tp or args.prompts_per_step % ranks:
        raise RuntimeError(f"--tensor-parallel-size must divide the {ranks} GPUs, and they --prompts-per-step")
    placement = placement_group([{"GPU": 1} if gpus else {"CPU": 0.1}] * ranks)
    if not placement.wait(timeout_seconds=60):
        raise RuntimeError("Ray could not reserve the GPUs: another run may hold them")
    device = "cuda" if gpus else "cpu"

    def actor(cls: type, bundle: int, **resources):
        where = PlacementGroupSchedulingStrategy(placement, bundle, placement_group_capture_child_tasks=True)
        return ray.remote(cls).options(num_cpus=0, scheduling_strategy=where, **resources)

    bundles = [list(range(begin, begin + tp)) for begin in range(0, ranks, tp)]
    engines = [actor(Engine, own[0]).remote(args.model, own, device) for own in bundles]
    share = GPU_SHARE if gpus else 0
    trainers = [actor(Trainer, rank, num_gpus=share).remote(rank, ranks, device) for rank in range(ranks)]
    return trainers, engines


def main(args: argparse.Namespace) -> str:
    rows = PROMPTS
    if args.prompts:
        with open(args.prompts) as file:
            rows = [json.loads(line) for line in file]

    # 1. Place
    trainers, engines = place(args)
    actors = trainers + engines

    # 2. Connect, and sync once
    (address, port), *_ = wait_for(actors, trainers[0].address.remote(), *(e.__ray_ready__.remote() for e in engines))
    loading = args.model, args.learning_rate, address, port
    of_ranks = wait_for(actors, *(trainer.connect.remote(*loading) for trainer in trainers))
    handles = {device_id: handle for of_rank in of_ranks for device_id, handle in of_rank.items()}

    def sync() -> SyncReport:
        sending = [trainer.send_weights.remote() for trainer in trainers]
        report, *results = wait_for(actors, *sending, *(engine.receive_weights.remote(handles) for engine in engines))
        if not all(results[-len(engines) :]):
            raise RuntimeError(f"after sync {report.version}, an engine does not serve what was sent")
        return report

    report = sync()
    print(f"first sync: {report.tensors} tensors, {report.nbytes / 1e9:.3f} GB; from now on by {report.loader}")

    # 3. Generate, reward, learn, sync; at last, generate once more
    random.Random(0).shuffle(rows)
    stream, means = itertools.cycle(rows), []
    for step in range(1, args.steps + 2):
        started = time.perf_counter()
        batch = list(itertools.islice(stream, args.prompts_per_step))
        prompts, answers = [row["prompt"] for row in batch], [row.get("answer") for row in batch]
        n = len(prompts) // len(engines)  # prompts for each engine
        options = args.group_size, args.max_tokens
        calls = [engine.generate.remote(prompts[i * n : (i + 1) * n], *options) for i, engine in enumerate(engines)]
        samples = [sample for part in wait_for(actors, *calls) for sample in part]
        rewards = [reward(sample.text, answers[i // args.group_size]) for i, sample in enumerate(samples)]
        groups = torch.tensor(rewards).view(-1, args.group_size)
        means.append(float(groups.mean()))
        shown = step % len(samples)
        print(f"  {rewards[shown]:.2f}  {prompts[shown // args.group_size]!r} -> {samples[shown].text!r}")
        if step > args.steps:
            break
        generated = time.perf_counter()
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        mismatch, *_ = wait_for(actors, *(trainer.learn.remote(samples, advantages.flatten()) for trainer in trainers))
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
    parser.add_argument("--tensor-parallel-size", type=int, help="GPUs of an engine (default: 2; odd or no GPUs: 1)")
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
