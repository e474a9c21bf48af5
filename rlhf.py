"""RLHF on separate GPUs: a trainer on one, a tensor-parallel vLLM engine on the others, NCCL between them.

    python rlhf.py                             # 3 GPUs: facebook/opt-125m; no GPU: a small model made on the spot, gloo
    python rlhf.py --tensor-parallel-size 1    # 2 GPUs
    python rlhf.py --model Qwen/Qwen2.5-0.5B-Instruct --prompts sums.jsonl --max-tokens 256 --steps 200

    GPU 0     Trainer: transformers' model in fp32, AdamW (18 bytes per parameter), rlhf_utils.WeightSender
    GPU 1..N  Engine: vllm.LLM with N workers, extended by rlhf_utils.WorkerExtension

This is GRPO without KL, with the mean over all tokens, and with one update a step, so there is no ratio to clip. Engine
and trainer round differently: a token's loss is weighted by min(p_trainer / p_engine, 2), since the engine sampled it:
truncated importance sampling. `mismatch`, the mean distance of the two log-probabilities, is measured before each
update. If it is large, or exceeds three times the first one, the run ends. The model must be dense: a mixture of
experts has other names in transformers than in its checkpoint.

To copy this file, take rlhf_utils.py and weight_sync/ along, and for machines without a GPU rlhf_cpu.py.
"""

import argparse
import json
import os
import random
import re
import sys
import time
from typing import NamedTuple

import ray
import torch
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.nn.utils.rnn import pad_sequence

from rlhf_utils import WeightSender, end_with_children, stateless_init_process_group, wait_for

TEMPERATURE = 1.0  # of the distribution that is sampled from, and learned
MICRO_BATCH_TOKENS = 8192  # of the trainer's passes, padding included; fewer take less memory
MISMATCH_GROWTH = 3  # the run ends if the mismatch exceeds so many times the first one,
MAX_MISMATCH = 0.2  # or this: rounding to bf16 makes up to 0.06

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
    """vllm.LLM in a Ray actor, which reserves the GPUs of its workers."""

    def load(self, model: str, tensor_parallel_size: int, device: str) -> None:
        options = {
            "distributed_executor_backend": "mp",  # processes start sooner than Ray's actors
            "dtype": "bfloat16",
            "gpu_memory_utilization": 0.8,  # a sync needs memory, too
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},  # no torch.compile: starts sooner
        }
        if device == "cpu":
            import rlhf_cpu

            options = rlhf_cpu.engine_options(tensor_parallel_size)
        from vllm import LLM  # not before: it reads the environment

        self.llm = LLM(
            model,
            tensor_parallel_size=tensor_parallel_size,
            worker_extension_cls="rlhf_utils.WorkerExtension",
            logprobs_mode="processed_logprobs",  # of the distribution that is sampled from
            **options,
        )
        end_with_children()  # vllm.LLM would wait for a killed process forever

    def generate(self, prompts: list, max_tokens: int) -> list[Sample]:
        """A completion of each prompt."""
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
        return samples

    def connect(self, address: str, port: int, world_size: int) -> None:
        """Have the workers join the trainer, which is rank 0."""
        self.llm.collective_rpc("init_weight_update_group", args=(address, port, 1, world_size))  # ranks 1 to N

    def receive_weights(self) -> None:
        """Take part in a sync. Raises RuntimeError unless every worker serves what was sent."""
        if not self.llm.reset_prefix_cache():  # it has keys and values of the old weights
            raise RuntimeError("vLLM did not reset its prefix cache")
        for answer in self.llm.collective_rpc("receive_weights"):
            if "error" in answer:
                raise RuntimeError(answer["error"])
        if not all(self.llm.collective_rpc("check_weights_changed")):  # vLLM's examples call it so
            raise RuntimeError("the engine does not serve what was sent")


class Trainer:
    """The policy, in a Ray actor with a GPU of its own."""

    def load(self, model: str, learning_rate: float, device: str) -> None:
        from transformers import AutoModelForCausalLM

        self.device, self.max_mismatch = torch.device(device, 0), None
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(self.device)  # in eval mode
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate, weight_decay=0.0, fused=True)

    def address(self) -> tuple[str, int]:
        """The address of this node and a free port, at which the workers can join."""
        from vllm.utils.network_utils import get_open_port

        return ray.util.get_node_ip_address(), get_open_port()

    def connect(self, address: str, port: int, world_size: int) -> None:
        self.sender = WeightSender(stateless_init_process_group(address, port, 0, world_size, self.device))

    def send_weights(self) -> None:
        self.sender.send_weights(self.model.named_parameters())

    def learn(self, samples: list[Sample], advantages: torch.Tensor) -> float:
        """One update by samples and their advantages [n], in micro-batches of similar lengths. Returns the mismatch."""
        if not advantages.isfinite().all():
            raise RuntimeError("a reward is no finite number")
        tokens = sum(len(sample.ids) for sample in samples)
        lengths = torch.tensor([len(sample.prompt_ids) + len(sample.ids) for sample in samples])
        size = max(1, MICRO_BATCH_TOKENS // int(lengths.max()))  # completions of a micro-batch
        distance = torch.zeros((), device=self.device)
        for indices in lengths.argsort().split(size):
            logprobs, engine_logprobs, mask = self.logprobs([samples[i] for i in indices])
            losses = token_losses(logprobs, engine_logprobs, advantages[indices, None].to(self.device))
            ((losses * mask).sum() / tokens).backward()
            distance += ((logprobs.detach() - engine_logprobs).abs() * mask).sum()
        mismatch = float(distance) / tokens
        # By the first batch, after the first sync. 1e-5 is more than rounding in fp32.
        self.max_mismatch = self.max_mismatch or min(max(MISMATCH_GROWTH * mismatch, 1e-5), MAX_MISMATCH)
        if not mismatch <= self.max_mismatch:  # not `>`, which NaN would pass
            excess = f"{mismatch:.2g} > {self.max_mismatch:.2g}"
            raise RuntimeError(f"trainer and engine do not compute the same: mismatch {excess}")
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, error_if_nonfinite=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
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
    # 1. Place: a GPU for the trainer, and the engine's on one node
    device = "cuda" if ray.cluster_resources().get("GPU") else "cpu"
    if device == "cpu":
        import rlhf_cpu

        rlhf_cpu.complete(args)
    tensor_parallel_size = args.tensor_parallel_size or 2
    world_size = 1 + tensor_parallel_size
    gpus = [1, tensor_parallel_size] if device == "cuda" else [0, 0]
    placement = placement_group([{"GPU": n} if n else {"CPU": 0.1} for n in gpus])
    if not placement.wait(timeout_seconds=20):
        raise RuntimeError(
            f"{world_size} free GPUs are needed, {tensor_parallel_size} of them on one node: --tensor-parallel-size 1"
            " takes 2, rlhf_colocate.py 1"
        )

    def start(cls: type, bundle: int) -> ray.actor.ActorHandle:
        where = PlacementGroupSchedulingStrategy(placement, bundle)
        return ray.remote(cls).options(num_cpus=0, num_gpus=gpus[bundle], scheduling_strategy=where).remote()

    actors = trainer, engine = start(Trainer, 0), start(Engine, 1)

    # 2. Load and connect
    model = args.model or "facebook/opt-125m"
    learning_rate = 1e-5 if args.learning_rate is None else args.learning_rate
    loading = trainer.load.remote(model, learning_rate, device), engine.load.remote(model, tensor_parallel_size, device)
    wait_for(actors, *loading)
    ((address, port),) = wait_for(actors, trainer.address.remote())  # late, or others may take the port
    wait_for(actors, *(actor.connect.remote(address, port, world_size) for actor in actors))

    # 3. Sync, generate, reward, learn
    means = []
    for step in range(1, args.steps + 1):
        started = time.perf_counter()
        wait_for(actors, trainer.send_weights.remote(), engine.receive_weights.remote())
        synced = time.perf_counter()
        drawn = random.Random(step).sample(args.prompts, args.prompts_per_step)
        batch = [row for row in drawn for _ in range(args.group_size)]  # a row for each completion
        (samples,) = wait_for(actors, engine.generate.remote([row["prompt"] for row in batch], args.max_tokens))
        generated = time.perf_counter()
        rewards = [reward(sample.text, row.get("answer")) for sample, row in zip(samples, batch, strict=True)]
        groups = torch.tensor(rewards).view(-1, args.group_size)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        (mismatch,) = wait_for(actors, trainer.learn.remote(samples, advantages.flatten()))
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
    parser.add_argument("--group-size", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--max-tokens", type=int, default=16, help="of a completion")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, help="default: 1e-5; the small model: 3e-3")
    parser.add_argument("--tensor-parallel-size", type=int, help="GPUs of the engine (default: 2; no GPU: 1 process)")
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
