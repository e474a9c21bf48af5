"""RLHF on shared GPUs: each has a rank of the trainer (FSDP2) and workers of vLLM engines, CUDA IPC between them.

    python rlhf_colocate.py    # all GPUs: facebook/opt-125m; no GPU: a small model made on the spot, shared memory
    python rlhf_colocate.py --model Qwen/Qwen2.5-0.5B-Instruct --prompts sums.jsonl --max-tokens 256 --steps 200

    GPU 0, 1  Trainer, ranks 0 and 1: shards of transformers' model in fp32, AdamW, rlhf_utils.WeightSender
              Engine 0: vllm.LLM with two workers, extended by rlhf_utils.ColocateWorkerExtension
    GPU 2, 3  Trainer, ranks 2 and 3; Engine 1

With --tensor-parallel-size 1, the default for an odd number of GPUs, each GPU has two engines. All ranks and engines
have equally many completions: --group-size is rounded up for that, from 8 to 9 on three GPUs.

In a sync, each worker reads the weights from the GPU memory of all ranks: several GPUs need access to each other's
memory, as over NVLink. The engines' KV cache sleeps while the trainer learns. A parameter takes 18 bytes over all ranks
and 2 in each engine; while a rank loads, its GPU holds the whole model in fp32 beside the engines. The algorithm is
rlhf.py's, whose docstring explains it.

To copy this file, take rlhf_utils.py and weight_sync/ along, and for machines without a GPU rlhf_cpu.py.
"""

import argparse
import json
import math
import os
import random
import re
import socket
import sys
import time
from typing import NamedTuple

import ray
import torch
import torch.distributed as dist
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils.rnn import pad_sequence

from rlhf_utils import SharedMemoryChannel, WeightSender, end_with_children, wait_for

TEMPERATURE = 1.0  # of the distribution that is sampled from, and learned
MICRO_BATCH_TOKENS = 8192  # of the trainer's passes, padding included; fewer take less memory
MISMATCH_GROWTH = 3  # the run ends if the mismatch exceeds so many times the first one,
MAX_MISMATCH = 0.2  # or this: rounding to bf16 makes up to 0.06
KV_CACHE_BYTES = 4 << 30  # of each engine's worker; if it is too small, vLLM computes again what did not fit
ENGINES_PER_GPU = 2  # with TP=1. One keeps a GPU busy if the model has more than a billion parameters

# --- Yours to replace: prompts, reward and loss -----------------------------------------------------------------------

# Or --prompts FILE, with lines such as {"prompt": "2 + 3 = ", "answer": 5}, or for a model that chats
# {"prompt": [{"role": "user", "content": "What is 2 + 3?"}], "answer": 5}. This reward compares numbers.
TEXTS = ["The captain shouted: ", "Read the sign: ", "The headline said: ", "Dear Sir or Madam, "]
TEXTS += ["The crowd roared: ", "On the wall was written: ", "The machine printed: ", "Once upon a time "]
PROMPTS = [{"prompt": text} for text in TEXTS]


def reward(text: str, answer: str | float | None = None) -> float:
    """1 if the last number of the completion is the answer; for a prompt without one, the share of capital letters."""
    if answer is None:
        return sum("A" <= letter <= "Z" for letter in text) / max(len(text), 1)
    numbers = re.findall(r"(?<!\d)-?\d+(?:\.\d+)?", text.replace(",", ""))
    return float(bool(numbers) and float(numbers[-1]) == float(str(answer).replace(",", "")))


def token_losses(logprobs: torch.Tensor, engine_logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """The loss of each token [b, T], by the log-probabilities [b, T] and the completions' advantages [b, 1]."""
    importance = (logprobs.detach() - engine_logprobs).exp().clamp(max=2)  # detached: it is a weight, and not learned
    return -importance * advantages * logprobs


# ----------------------------------------------------------------------------------------------------------------------


def json_lines(path: str) -> list[dict]:
    try:
        with open(path) as file:
            return [json.loads(line) for line in file if line.strip()]
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{path}: {error}") from error


class Sample(NamedTuple):
    prompt_ids: list[int]
    ids: list[int]  # of the completion
    logprobs: list[float]  # of `ids`, by the engine
    text: str


class Engine:
    """vllm.LLM in a Ray actor. It reserves no GPU: its workers are on those of the trainer's ranks."""

    def load(self, model: str, gpu_ids: list[str], device: str, seed: int) -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_ids)
        options = {
            "distributed_executor_backend": "mp",  # processes start sooner than Ray's actors
            "dtype": "bfloat16",
            "kv_cache_memory_bytes": KV_CACHE_BYTES,
            "max_model_len": -1,  # the model's own, or as many tokens as the KV cache holds
            "gpu_memory_utilization": 0.1,  # sizes nothing now, but so much must be free at the start
            "enable_sleep_mode": True,
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},  # no torch.compile: starts sooner
        }
        if device == "cpu":
            import rlhf_cpu

            options = rlhf_cpu.engine_options(len(gpu_ids))
        from vllm import LLM  # not before: it reads the environment

        self.llm = LLM(
            model,
            tensor_parallel_size=len(gpu_ids),
            seed=seed,  # with one seed, engines that share a prompt would sample the same
            worker_extension_cls="rlhf_utils.ColocateWorkerExtension",
            logprobs_mode="processed_logprobs",  # of the distribution that is sampled from
            **options,
        )
        end_with_children()  # vllm.LLM would wait for a killed process forever
        self.can_sleep = device == "cuda"
        self.sleep()  # until the first sync

    def generate(self, prompts: list, max_tokens: int) -> list[Sample]:
        """A completion of each prompt. Afterwards the engine sleeps."""
        from vllm import SamplingParams

        complete = self.llm.generate if isinstance(prompts[0], str) else self.llm.chat
        params = SamplingParams(
            temperature=TEMPERATURE,
            max_tokens=max_tokens,
            logprobs=0,  # of the sampled tokens alone
            flat_logprobs=True,
            detokenize=False,  # vLLM would decode token by token
        )
        tokenizer, samples = self.llm.get_tokenizer(), []
        for request in complete(prompts, params, use_tqdm=False):
            (output,) = request.outputs
            text = tokenizer.decode(output.token_ids, skip_special_tokens=True)
            samples.append(Sample(request.prompt_token_ids, output.token_ids, output.logprobs.logprobs, text))
        self.sleep()
        return samples

    def sleep(self) -> None:
        """Give the memory of the KV cache to the trainer."""
        if not self.llm.reset_prefix_cache():  # the next sync makes its keys and values old
            raise RuntimeError("vLLM did not reset its prefix cache")
        if self.can_sleep:
            self.llm.sleep(level=0)
            self.llm.release_kv_cache_memory()
            self.llm.collective_rpc("empty_cache")

    def receive_weights(self, handles: dict[str, str]) -> None:
        """Take part in a sync, and wake up. Raises RuntimeError unless every worker serves what was sent.

        A worker finds the rank beside it by the id of their GPU: `handles` has each rank's.
        """
        for answer in self.llm.collective_rpc("receive_weights", args=(handles,)):
            if "error" in answer:
                raise RuntimeError(answer["error"])
        if self.can_sleep and not self.llm.wake_up(tags=["kv_cache"]):
            raise RuntimeError("vLLM did not wake up")
        if not all(self.llm.collective_rpc("check_weights_changed")):  # vLLM's examples call it so
            raise RuntimeError("the engine does not serve what was sent")


class Trainer:
    """One rank of the policy, in a Ray actor on a GPU that it shares."""

    def gpu(self) -> str:
        """This rank's GPU, as CUDA_VISIBLE_DEVICES names it."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def url(self) -> str:
        """Where the other ranks can join this one."""
        with socket.socket() as unused:
            unused.bind(("", 0))  # to a free port
            return f"tcp://{ray.util.get_node_ip_address()}:{unused.getsockname()[1]}"

    def load(
        self, model: str, learning_rate: float, device: str, workers: int, url: str, ranks: int, rank: int
    ) -> dict[str, str]:
        """Join the other ranks at the URL, load this one's shard of the model, and open the channel to so many workers
        on its GPU. Returns its handle."""
        self.device, self.max_mismatch, self.rank, self.ranks = torch.device(device, 0), None, rank, ranks
        cuda = self.device.type == "cuda"
        dist.init_process_group("nccl" if cuda else "gloo", init_method=url, rank=rank, world_size=ranks)
        from transformers import AutoModelForCausalLM  # takes seconds, in which others might take the URL's port

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(self.device)  # in eval mode
        if ranks > 1:  # one rank has nothing to shard, and FSDP's hooks take time
            precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if cuda else None, reduce_dtype=torch.float32)
            for block in max((m for m in self.model.modules() if isinstance(m, torch.nn.ModuleList)), key=len):
                fully_shard(block, mp_policy=precision)
            fully_shard(self.model, mp_policy=precision)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate, weight_decay=0.0, fused=True)
        torch.cuda.empty_cache()  # of what is sharded now
        channel = SharedMemoryChannel(self.device if cuda else torch.device("cpu", rank), workers)
        self.sender = WeightSender(channel)
        return channel.handles

    def send_weights(self) -> None:
        self.sender.send_weights(self.model.named_parameters())

    def learn(self, samples: list[Sample], advantages: torch.Tensor) -> float:
        """One update by samples and their advantages [n], in micro-batches of similar lengths. Returns the mismatch.

        A rank takes every `ranks`-th sample, and as many micro-batches as the others: FSDP's ranks pass together.
        """
        if not advantages.isfinite().all():
            raise RuntimeError("a reward is no finite number")
        tokens = sum(len(sample.ids) for sample in samples)
        lengths = torch.tensor([len(sample.prompt_ids) + len(sample.ids) for sample in samples])
        size = max(1, MICRO_BATCH_TOKENS // int(lengths.max()))  # completions of a micro-batch
        distance = torch.zeros((), device=self.device)
        for indices in lengths.argsort()[self.rank :: self.ranks].split(size):
            logprobs, engine_logprobs, mask = self.logprobs([samples[i] for i in indices])
            losses = token_losses(logprobs, engine_logprobs, advantages[indices, None].to(self.device))
            ((losses * mask).sum() / tokens * self.ranks).backward()  # FSDP takes the mean of the ranks' gradients
            distance += ((logprobs.detach() - engine_logprobs).abs() * mask).sum()
        dist.all_reduce(distance)
        mismatch = float(distance) / tokens
        # By the first batch, after the first sync. 1e-5 is more than rounding in fp32.
        self.max_mismatch = self.max_mismatch or min(max(MISMATCH_GROWTH * mismatch, 1e-5), MAX_MISMATCH)
        if not mismatch <= self.max_mismatch:  # not `>`, which NaN would pass
            excess = f"{mismatch:.2g} > {self.max_mismatch:.2g}"
            raise RuntimeError(f"trainer and engine do not compute the same: mismatch {excess}")
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, error_if_nonfinite=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch.cuda.empty_cache()  # for the engine
        return mismatch

    def logprobs(self, samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The trainer's log-probabilities [b, T], the engine's, and a mask that is 1 for the completions' tokens."""

        def padded(rows: list[list]) -> torch.Tensor:  # on the right, where a causal model does not look
            return pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(self.device)

        ids = padded([sample.prompt_ids + sample.ids for sample in samples])
        engine_logprobs = padded([[0.0] * len(sample.prompt_ids) + sample.logprobs for sample in samples])
        mask = padded([[0.0] * len(sample.prompt_ids) + [1.0] * len(sample.ids) for sample in samples])
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.model(ids[:, :-1], use_cache=False).logits  # [b, T, V]
        # Row by row: autograd keeps one copy of the logits in fp32, and temporary ones are as small as a row
        rows = zip(logits, ids[:, 1:, None], strict=True)
        logprobs = [(row.float() / TEMPERATURE).log_softmax(-1).gather(1, targets)[:, 0] for row, targets in rows]
        return torch.stack(logprobs), engine_logprobs[:, 1:], mask[:, 1:]


def main(args: argparse.Namespace) -> str:
    # 1. Place: a GPU for each rank; engines reserve none
    gpus = int(max(node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]))  # of one node
    device = "cuda" if gpus else "cpu"
    if device == "cpu":
        import rlhf_cpu

        rlhf_cpu.complete(args)
    tensor_parallel_size = args.tensor_parallel_size or (1 if gpus % 2 else 2)
    ranks = gpus or tensor_parallel_size
    engines_per_gpu = ENGINES_PER_GPU if tensor_parallel_size == 1 else 1
    if ranks % tensor_parallel_size:
        raise RuntimeError(f"--tensor-parallel-size {tensor_parallel_size} does not divide the {ranks} GPUs")
    multiple = math.lcm(args.prompts_per_step, ranks * engines_per_gpu) // args.prompts_per_step
    args.group_size = math.ceil(args.group_size / multiple) * multiple  # so that none has more completions than others
    placement = placement_group([{"GPU": 1} if gpus else {"CPU": 0.1}] * ranks, strategy="STRICT_PACK")
    if not placement.wait(timeout_seconds=20):
        raise RuntimeError(
            f"this takes {ranks} GPUs of one node, all free: CUDA_VISIBLE_DEVICES hides others from a Ray started here"
        )

    def start(cls: type, bundle: int, num_gpus: int) -> ray.actor.ActorHandle:
        where = PlacementGroupSchedulingStrategy(placement, bundle)
        return ray.remote(cls).options(num_cpus=0, num_gpus=num_gpus, scheduling_strategy=where).remote()

    trainers = [start(Trainer, rank, int(gpus > 0)) for rank in range(ranks)]
    first_ranks = [*range(0, ranks, tensor_parallel_size)] * engines_per_gpu  # beside each engine
    engines = [start(Engine, rank, 0) for rank in first_ranks]
    actors = trainers + engines

    # 2. Load
    model = args.model or "facebook/opt-125m"
    learning_rate = 1e-5 if args.learning_rate is None else args.learning_rate
    url, *gpu_of = wait_for(actors, trainers[0].url.remote(), *(trainer.gpu.remote() for trainer in trainers))
    arguments = model, learning_rate, device, engines_per_gpu, url, ranks
    loading = [trainer.load.remote(*arguments, rank) for rank, trainer in enumerate(trainers)]
    for i, rank in enumerate(first_ranks):
        loading.append(engines[i].load.remote(model, gpu_of[rank : rank + tensor_parallel_size], device, i))
    handles = {}
    for of_rank in wait_for(actors, *loading)[:ranks]:
        handles |= of_rank

    # 3. Sync, generate, reward, learn
    means = []
    for step in range(1, args.steps + 1):
        started = time.perf_counter()
        sending = [trainer.send_weights.remote() for trainer in trainers]
        wait_for(actors, *sending, *(engine.receive_weights.remote(handles) for engine in engines))
        synced = time.perf_counter()
        drawn = random.Random(step).sample(args.prompts, args.prompts_per_step)
        batch = [row for row in drawn for _ in range(args.group_size)]  # a row for each completion
        prompts, n = [row["prompt"] for row in batch], len(batch) // len(engines)
        parts = [prompts[i * n : (i + 1) * n] for i in range(len(engines))]
        calls = [engine.generate.remote(part, args.max_tokens) for engine, part in zip(engines, parts, strict=True)]
        samples = [sample for part in wait_for(actors, *calls) for sample in part]
        generated = time.perf_counter()
        rewards = [reward(sample.text, row.get("answer")) for sample, row in zip(samples, batch, strict=True)]
        groups = torch.tensor(rewards).view(-1, args.group_size)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        mismatch, *_ = wait_for(actors, *(trainer.learn.remote(samples, advantages.flatten()) for trainer in trainers))
        means.append(float(groups.mean()))
        print(f"  {rewards[0]:.2f}  {batch[0]['prompt']!r} -> {samples[0].text!r}")
        print(
            f"step {step}/{args.steps}  reward {means[-1]:.3f}  mismatch {mismatch:.1e}"
            f"  tokens {sum(len(sample.ids) for sample in samples)}"
            f"  sync {synced - started:.3f} s  rollout {generated - synced:.2f} s"
            f"  learn {time.perf_counter() - generated:.2f} s"
        )
    return f"OK: reward {means[0]:.3f} -> {means[-1]:.3f} in {args.steps} steps"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="name or folder (default: facebook/opt-125m; no GPU: a small one)")
    parser.add_argument("--prompts", type=json_lines, default=PROMPTS, help="JSON lines, as shown at the script's top")
    parser.add_argument("--prompts-per-step", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8, help="completions of each prompt, rounded up for all GPUs")
    parser.add_argument("--max-tokens", type=int, default=16, help="of a completion")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, help="default: 1e-5; the small model: 3e-3")
    parser.add_argument("--tensor-parallel-size", type=int, help="GPUs of an engine (default: 2; odd or no GPUs: 1)")
    args = parser.parse_args()
    if min(args.steps, args.max_tokens, args.prompts_per_step, args.group_size - 1) < 1:
        parser.error("--group-size is at least 2, and --prompts-per-step, --max-tokens and --steps are at least 1")
    kinds = {type(row.get("prompt")) if isinstance(row, dict) else None for row in args.prompts}
    if len(args.prompts) < args.prompts_per_step or kinds not in ({str}, {list}):
        parser.error(f"a step takes {args.prompts_per_step} lines of --prompts, with texts as `prompt`, or with chats")
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # a completion may be any text
    variables = {"PYTHONPATH": os.pathsep.join(sys.path), "VLLM_LOGGING_LEVEL": "ERROR"}  # workers find rlhf_utils
    with ray.init(runtime_env={"env_vars": variables}, include_dashboard=False, logging_level="error"):
        last_line = main(args)
    print(last_line)  # when no actor prints any more
