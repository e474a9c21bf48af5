"""What the engine actors of all scripts have in common: vLLM's options for this hardware, and rollouts."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le
from pydantic import AfterValidator
from transformers.hf_argparser import HfArg

from .arguments import json_object
from .dataset import Row
from .errors import RunError
from .learner import Rollout
from .ray_session import RaySession
from .rewards import Batch, Group
from .task import Task

# vLLM's own default compiles the model as well, for a longer start and no faster rollouts.
DECODE_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


@dataclass
class EngineArguments:
    """How large an engine is, and how vLLM runs it."""

    tensor_parallel_size: Annotated[int, Ge(1)] = HfArg(default=2, help="GPUs of an engine (CPU: groups of cores)")
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = HfArg(default=0.8, help="share of each of its GPUs")
    max_model_len: Annotated[int | None, Ge(1)] = HfArg(
        default=None, help="tokens of prompt and completion (default: the model's)"
    )
    enforce_eager: bool = HfArg(default=False, help="no CUDA graphs of decoding (CPU: there are none)")
    engine_args: Annotated[str, AfterValidator(json_object)] = HfArg(
        default="{}", help="more options of vllm.LLM, which override the script's: '{\"max_num_seqs\": 512}'"
    )


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
        hardware |= {"enforce_eager": True}
    return hardware | options | json.loads(args.engine_args)


def sample(llm, prompts: list[list[int]], args, seed: int, first: int = 0, evaluation: bool = False) -> list[Rollout]:
    """`group_size` completions of each prompt's tokens, in order, without rewards.

    `first` is the number of the first of these prompts in the step: what is sampled does not depend on how many
    engines share it. Completions for an `evaluation` have no log-probabilities, which take time. The prefix cache is
    reset after it: a run that was resumed in between would not have it, and must compute the same.
    """
    from vllm import TokensPrompt

    params = [sampling_params(args, seed, first + i, evaluation) for i in range(len(prompts))]
    requests = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], params, use_tqdm=False)
    if evaluation:
        reset_prefix_cache(llm)
    return rollouts_of(requests, llm.get_tokenizer())


def sampling_params(args, seed: int, number: int, evaluation: bool):
    """The vllm.SamplingParams of a step's prompt of this number."""
    from vllm import SamplingParams

    # Without top-p and top-k, the log-probabilities are of the whole vocabulary, as the trainer's are.
    return SamplingParams(
        n=args.group_size,
        temperature=args.temperature,
        max_tokens=args.max_tokens,
        logprobs=None if evaluation else 0,
        flat_logprobs=True,  # two lists per completion instead of an object per token
        detokenize=False,  # vLLM would decode token by token; `_texts` decodes once
        seed=(seed * args.prompts_per_step + number) * args.group_size % 2**31,
    )


def rollouts_of(requests: list, tokenizer) -> list[Rollout]:
    """The completions of finished vllm.RequestOutputs, in order, without rewards."""
    outputs = [(list(request.prompt_token_ids), output) for request in requests for output in request.outputs]
    texts = _texts(tokenizer, outputs)
    return [
        Rollout(
            prompt_ids,
            list(output.token_ids),
            output.logprobs.logprobs if output.logprobs else [],
            None,
            text,
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
    sequences = [prompt_ids + own for (prompt_ids, _), own in zip(outputs, ids, strict=True)]
    prompts, wholes = (
        tokenizer.batch_decode(part, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for part in ([prompt_ids for prompt_ids, _ in outputs], sequences)
    )
    return [whole[len(prompt) :].rstrip("\ufffd") for prompt, whole in zip(prompts, wholes, strict=True)]


def complete(session: RaySession, engines: dict, rows: list[Row], args, step: int, evaluation: bool = False) -> Batch:
    """`group_size` completions of each of these rows, without rewards; for an `evaluation`, as `sample` says.

    `engines` are engine actors by name, each with a method `sample`; they share the prompts.
    """
    prompts, seed = [row.prompt_ids for row in rows], step_seed(args, step)
    bounds = [i * len(prompts) // len(engines) for i in range(len(engines) + 1)]
    calls = {
        name: engine.sample.remote(prompts[begin:end], args, seed, begin, evaluation)
        for (name, engine), begin, end in zip(engines.items(), bounds, bounds[1:], strict=False)
        if begin < end
    }
    parts = session.wait("evaluating" if evaluation else "generating", **calls)
    return in_groups(rows, [rollout for part in parts for rollout in part])


def step_seed(args, step: int) -> int:
    """The seed of what is sampled for this step."""
    return args.seed * 1_000_003 + step


def in_groups(rows: list[Row], rollouts: list[Rollout]) -> Batch:
    """The rows with their rollouts, of which each has as many."""
    size = len(rollouts) // len(rows)
    return Batch([Group(row, rollouts[i * size : (i + 1) * size]) for i, row in enumerate(rows)])


def generate(session: RaySession, engines: dict, task: Task, args, step: int) -> Batch:
    """The prompts of this step, with completions and their rewards."""
    return sample_batch(task, args, step, lambda rows: complete(session, engines, rows, args, step))


def sample_batch(task: Task, args, step: int, complete: Callable[[list[Row]], Batch]) -> Batch:
    """As `generate`, with completions by `complete`.

    With --dynamic-sampling (Yu et al. 2025, arXiv:2503.14476), groups whose rewards are all equal are replaced by those
    of other prompts, in so many rounds at most. What is equal after that stays.
    """

    def scored(rows: list[Row]) -> list[Group]:
        return task.rewards.score(complete(rows).groups, step, args.steps)

    drawn = task.draw(step)
    groups, replaced = scored(drawn), 0
    for _ in range(args.dynamic_sampling):
        equal = [i for i, group in enumerate(groups) if group.is_equal]
        others = task.draw_others(step, len(equal), drawn)
        if not others:  # none is equal, or all prompts have been tried
            break
        drawn = drawn + others
        for i, group in zip(equal, (group for group in scored(others) if not group.is_equal), strict=False):
            groups[i] = group
            replaced += 1
    metrics = {"dynamic_sampling/replaced": replaced} if args.dynamic_sampling else {}
    return Batch(groups, metrics | task.rewards.metrics(groups))


def reset_prefix_cache(llm) -> None:
    """Drop the keys and values of the old weights, or raise RunError."""
    if not llm.reset_prefix_cache():
        raise RunError("vLLM did not reset its prefix cache, which holds keys and values of the old weights")


def release_memory(llm, level: str) -> None:
    """Drop the prefix cache, and release the memory of the KV cache ("kv"), of the weights as well ("weights"), or none
    ("none")."""
    reset_prefix_cache(llm)
    if level == "weights":
        llm.sleep(level=2)  # keeps no copy of the weights: a sync follows
    elif level != "none":
        llm.sleep(level=0)
        llm.release_kv_cache_memory()
        llm.collective_rpc("empty_cache")  # level 2 does that itself


def serves_checkpoint(loaded: list, now: list, slept: bool) -> bool:
    """Whether an engine serves, bit for bit, what it had loaded from disk, by its workers' `weight_digests`.

    Weights of another dtype may differ where a loader computes. After a sleep of level 2, vLLM restores parameters and
    buffers alone: if it `slept`, this raises RunError where the layers keep other tensors that have changed.
    """
    same = all(served == before for (served, _), (before, _) in zip(now, loaded, strict=True))
    if same and slept and now != loaded:
        raise RunError("layers of this model keep tensors that vLLM loses in its sleep: not with --sleep weights")
    return same
