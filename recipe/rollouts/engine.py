"""Engines: what the engine actors of all scripts have in common, vLLM's options for this hardware, and rollouts."""

import itertools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np
import psutil
from annotated_types import Ge, Gt, Le
from pydantic import AfterValidator
from transformers.hf_argparser import HfArg

from rlhf_utils import WeightSyncError

from ..errors import RunError
from ..functions import json_object
from ..learning.rollout import Rollout
from ..run.actors import ActorGroup
from ..run.session import die_with_children
from ..tasks.dataset import Row
from ..tasks.rewards import Batch, Group, reward_metrics
from ..tasks.task import Task
from ..tasks.tools import Tools
from .conversation import Conversation, Turn, group_of, together

# vLLM's own default compiles the model as well, for a longer start and no faster rollouts.
NEXT_TURN = 500_009  # between the seeds of a completion's turns: no run has as many steps
DECODE_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


@dataclass
class EngineArguments:
    """How large an engine is, and how vLLM runs it."""

    tensor_parallel_size: Annotated[int, Ge(1)] = HfArg(
        default=2, help="GPUs that an engine is spread over (CPU: groups of cores)"
    )
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = HfArg(
        default=0.8, help="fraction of each GPU's memory that an engine takes"
    )
    max_model_len: Annotated[int | None, Ge(1)] = HfArg(
        default=None, help="tokens that a prompt and its completion may have together (default: the model's limit)"
    )
    enforce_eager: bool = HfArg(default=False, help="decode without CUDA graphs (CPU: always)")
    engine_args: Annotated[str, AfterValidator(json_object)] = HfArg(
        default="{}", help="more options of vllm.LLM, as JSON, which override the script's: '{\"max_num_seqs\": 512}'"
    )
    ignore_eos: bool = field(default=False, init=False)  # completions go on to `max_tokens`; no flag


class EngineActor:
    """A Ray actor around vllm.LLM. It reserves no GPU: vLLM's workers take bundles of its placement group."""

    def __init__(self, number: int):
        self.number, self.asleep, self.leaving = number, "none", False

    def load(self, model: str, options: dict) -> int:
        """Start the engine. Returns the tokens that a prompt and its completion may have."""
        from vllm import LLM  # only now: `llm_options` has set its environment variables

        self.llm = LLM(model, **options)
        die_with_children(unless=lambda: self.leaving)
        return self.llm.model_config.max_model_len

    def sample(self, prompts: list[list[int]], sampling: list[dict], evaluation: bool = False) -> list[Rollout]:
        """Completions of each prompt's tokens, in order, without rewards; `sampling` has each one's options.

        The prefix cache is reset after an `evaluation`: a run that was resumed in between would not have it, and must
        compute the same.
        """
        if not prompts:
            return []
        from vllm import TokensPrompt

        requests = self.llm.generate(
            [TokensPrompt(prompt_token_ids=ids) for ids in prompts], [*map(sampling_params, sampling)], use_tqdm=False
        )
        if evaluation:
            self.reset_prefix_cache()
        return rollouts_of(requests, self.llm.get_tokenizer())

    def reset_prefix_cache(self) -> None:
        """Drop the keys and values of the old weights, or raise RunError."""
        if not self.llm.reset_prefix_cache():
            raise RunError("vLLM did not reset its prefix cache, which holds keys and values of the old weights")

    def take_weights(self, *args) -> bool:
        """Have every worker take part in a sync. Returns whether all of them serve exactly what was sent."""
        for result in self.llm.collective_rpc("receive_weights", args=args):
            if "error" in result:
                raise WeightSyncError(result["error"])
        return all(self.llm.collective_rpc("check_weights_changed"))

    def shutdown(self) -> None:
        self.leaving = True
        self.llm.llm_engine.engine_core.shutdown()

    # Of engines that share their devices with trainers

    def remember_weights(self) -> None:
        """Note what was loaded from disk, for `serves_checkpoint`."""
        self.from_disk, self.slept = self.llm.collective_rpc("weight_digests"), False

    def sleep(self, level: str) -> None:
        """Drop the prefix cache, and release the memory of the KV cache ("kv"), of the weights as well ("weights"), or
        none ("none"), until `wake`. Nothing is generated until then, so the prefix cache stays empty."""
        self.reset_prefix_cache()
        if level == "weights":
            self.llm.sleep(level=2)  # keeps no copy of the weights: a sync follows
            self.slept = True
        elif level != "none":
            self.llm.sleep(level=0)
            self.llm.release_kv_cache_memory()
            self.llm.collective_rpc("empty_cache")  # level 2 does that itself
        self.asleep = level

    def wake(self, what: str) -> None:
        """Take back the memory of the "weights", before a sync, or of the "kv_cache", after it."""
        if self.asleep == "weights" and what == "weights":
            self.llm.wake_up(tags=["weights"])
        if self.asleep != "none" and what == "kv_cache":
            if not self.llm.wake_up(tags=["kv_cache"]):
                raise RunError("vLLM did not wake up")
            self.asleep = "none"

    def device_ids(self) -> list[str]:
        return self.llm.collective_rpc("report_device_id")

    def serves_checkpoint(self) -> bool:
        """Whether the first sync sent, bit for bit, the weights that this engine had loaded from disk.

        Weights of another dtype may differ where a loader computes. After a sleep of level 2, vLLM restores parameters
        and buffers alone: then this raises RunError where the layers keep other tensors that have changed.
        """
        now = self.llm.collective_rpc("weight_digests")
        same = all(served == before for (served, _), (before, _) in zip(now, self.from_disk, strict=True))
        if same and self.slept and now != self.from_disk:
            raise RunError("layers of this model keep tensors that vLLM loses in its sleep: not with --sleep weights")
        return same

    def memory(self) -> dict[str, float]:
        """Memory in GB: on CPU, that of vLLM's processes, which are children of this one. `measure` finds a GPU's."""
        from vllm.platforms import current_platform

        processes = psutil.Process().children(recursive=True) if current_platform.is_cpu() else []  # takes 10 ms
        return {"actor": sum(process.memory_info().rss for process in processes) / 1e9}


def llm_options(
    args: EngineArguments, device: str, bundles: Sequence[int], workers: int | None = None, **options
) -> dict:
    """Returns the options of a vllm.LLM, and sets the environment variables that its workers inherit.

    The engine's workers take these `bundles` of its placement group. On CPU, all engines' `workers` share the cores
    (default: this one's). `options` are the script's own.
    """
    workers = workers or len(bundles)
    options = {
        "tensor_parallel_size": args.tensor_parallel_size,
        "max_model_len": args.max_model_len,
        "seed": args.seed,
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from, temperature included
    } | options
    if device == "cuda":
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray hides the GPUs from an actor that asked for none
        os.environ["VLLM_RAY_BUNDLE_INDICES"] = ",".join(map(str, bundles))
        hardware = {"dtype": "bfloat16", "distributed_executor_backend": "ray"}
        hardware |= {"gpu_memory_utilization": args.gpu_memory_utilization}
        hardware |= {"enforce_eager": args.enforce_eager, "compilation_config": DECODE_GRAPHS}
    else:
        # vLLM has no Ray executor on CPU; its workers are processes of this actor, each bound to its cores.
        cores = sorted(os.sched_getaffinity(0))
        shares = [cores[bundle % workers :: workers] or cores for bundle in bundles]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, share)) for share in shares)
        os.environ["TORCH_COMPILE_DISABLE"] = "1"  # compiling takes longer than such a run
        hardware = {"dtype": "float32", "distributed_executor_backend": "mp", "kv_cache_memory_bytes": 256 << 20}
        # A prompt in two parts would rewind its seed's generator, which those of a CPU cannot.
        hardware |= {"enforce_eager": True, "enable_chunked_prefill": False}
    return hardware | options | json.loads(args.engine_args)


def sampling_options(args, step: int, number: int, evaluation: bool = False) -> dict:
    """vLLM's options for `group_size` completions of this step's prompt of this number.

    The seed is the prompt's own: what is sampled does not depend on which engine does it. Completions for an
    `evaluation` have no log-probabilities, which take time.
    """
    # Without top-p and top-k, the log-probabilities are of the whole vocabulary, as the trainer's are.
    return {
        "n": args.group_size,
        "temperature": args.temperature,
        "max_tokens": args.max_tokens,
        "ignore_eos": args.ignore_eos,
        "logprobs": None if evaluation else 0,
        "detokenize": False,  # vLLM would decode token by token; `_texts` decodes once
        "seed": ((args.seed * 1_000_003 + step) * args.prompts_per_step + number) * args.group_size % 2**31,
    }


def turn_options(args, step: int, turn: Turn, evaluation: bool = False) -> dict:
    """vLLM's options for this turn of a completion."""
    of_all = args.prompts_per_step * args.group_size
    one = replace(args, group_size=1, prompts_per_step=of_all, max_tokens=turn.max_tokens)
    return sampling_options(one, step + NEXT_TURN * turn.index, turn.number, evaluation)


def sampling_params(options: dict):
    """The vllm.SamplingParams with these options."""
    from vllm import SamplingParams

    return SamplingParams(flat_logprobs=True, **options)  # two lists per completion instead of an object per token


def rollouts_of(requests: list, tokenizer) -> list[Rollout]:
    """The completions of finished vllm.RequestOutputs, in order, without rewards."""
    outputs = [(list(request.prompt_token_ids), output) for request in requests for output in request.outputs]
    texts = _texts(tokenizer, outputs)
    return [
        Rollout(
            np.array(prompt_ids, np.int32),
            np.array(output.token_ids, np.int32),
            np.array(output.logprobs.logprobs if output.logprobs else [], np.float32),
            text=text,
            truncated=output.finish_reason == "length",
        )
        for (prompt_ids, output), text in zip(outputs, texts, strict=True)
    ]


def _texts(tokenizer, outputs: list[tuple]) -> list[str]:
    """The texts of (prompt ids, vllm.CompletionOutput), equal to those that vLLM decodes token by token.

    A completion is decoded together with its prompt, because some tokenizers drop a space where a text begins. The
    token that ended the completion is left out, and so is a last character whose bytes are not all there.
    """
    ids = [output.token_ids[: -1 if output.finish_reason == "stop" else None] for _, output in outputs]
    sequences = [prompt_ids + list(own) for (prompt_ids, _), own in zip(outputs, ids, strict=True)]
    prompts, wholes = (
        tokenizer.batch_decode(part, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for part in ([prompt_ids for prompt_ids, _ in outputs], sequences)
    )
    return [whole[len(prompt) :].rstrip("\ufffd") for prompt, whole in zip(prompts, wholes, strict=True)]


def complete(
    engines: ActorGroup, rows: list[Row], args, step: int, evaluation: bool = False, tools: Tools | None = None
) -> Batch:
    """`group_size` completions of each of these rows, which are divided among the engines, without rewards. With
    `tools`, they are conversations."""
    if tools:
        return converse(engines, rows, args, step, evaluation, tools)
    bounds = [i * len(rows) // len(engines) for i in range(len(engines) + 1)]
    prompts = [row.prompt_ids for row in rows]
    sampling = [sampling_options(args, step, number, evaluation) for number in range(len(rows))]
    shares = [(prompts[begin:end], sampling[begin:end], evaluation) for begin, end in itertools.pairwise(bounds)]
    phase = "evaluating" if evaluation else "generating"
    parts = engines.session.wait(phase, engines.begin("sample", each=shares))
    return in_groups(rows, [rollout for part in parts for rollout in part])


def converse(engines: ActorGroup, rows: list[Row], args, step: int, evaluation: bool, tools: Tools) -> Batch:
    """As `complete`: conversations take their turns in lock-step. Each stays with one engine, which has its cache."""
    size, phase = args.group_size, "evaluating" if evaluation else "generating"
    every = [
        Conversation(tools, row, i * size + k, args.max_tokens, evaluation)
        for i, row in enumerate(rows)
        for k in range(size)
    ]
    bounds = [i * len(every) // len(engines) for i in range(len(engines) + 1)]
    work = together(own.start() for own in every)
    while True:
        engines.session.wait_for_thread(work, lambda: f"{phase}, in tools")
        work.result()
        shares = [[own for own in every[begin:end] if own.goes_on] for begin, end in itertools.pairwise(bounds)]
        if not any(shares):
            return Batch([group_of(every[i : i + size]) for i in range(0, len(every), size)])
        turns = [[own.turn for own in share] for share in shares]
        prompts = ([turn.prompt_ids for turn in own] for own in turns)
        sampling = ([turn_options(args, step, turn, evaluation) for turn in own] for own in turns)
        each = [(*both, evaluation) for both in zip(prompts, sampling, strict=True)]
        sampled = engines.session.wait(phase, engines.begin("sample", each=each))
        pairs = zip(itertools.chain(*shares), itertools.chain(*sampled), strict=True)
        work = together([own.take(rollout) for own, rollout in pairs])


def in_groups(rows: list[Row], rollouts: list[Rollout]) -> Batch:
    """The rows with their rollouts, of which each has as many."""
    size = len(rollouts) // len(rows)
    return Batch([Group(row, rollouts[i * size : (i + 1) * size]) for i, row in enumerate(rows)])


def resample(engines: ActorGroup, task: Task, batch: Batch, args, step: int) -> Batch:
    """The batch, with groups whose rewards are all equal replaced by those of other prompts (--dynamic-sampling; Yu et
    al. 2025, arXiv:2503.14476), in so many rounds at most. What is equal after that stays."""

    def scored(rows: list[Row]) -> Batch:
        return task.rewards.score(complete(engines, rows, args, step, tools=task.tools), step - 1)

    return replace_equal_groups(task, batch, args, step, scored)


def replace_equal_groups(task: Task, batch: Batch, args, step: int, scored: Callable[[list[Row]], Batch]) -> Batch:
    """As `resample`, where `scored` gives the completions of rows, with their rewards."""
    groups, drawn, replaced = list(batch.groups), [group.row for group in batch.groups], 0
    for _ in range(args.dynamic_sampling):
        equal = [i for i, group in enumerate(groups) if group.is_equal]
        others = task.draw_others(step, len(equal), drawn)
        if not others:  # none is equal, or all prompts have been tried
            break
        drawn = drawn + others
        for i, group in zip(equal, (group for group in scored(others).groups if not group.is_equal), strict=False):
            groups[i] = group
            replaced += 1
    return Batch(groups, {"dynamic_sampling/replaced": replaced} | reward_metrics(groups))
