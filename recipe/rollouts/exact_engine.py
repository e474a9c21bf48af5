"""Exact engines, whose log-probabilities a trainer computes bit for bit: whether there can be one, options, a check.

Since the workers' extension is here, vLLM imports this module in every worker before it loads the model. If
VLLM_BATCH_INVARIANT=1 is set, the import makes linear layers `torch.nn.functional.linear`. That mode has cuBLAS work
without split-K, so they give the same bits as vLLM's Triton kernel, and a decode step takes 2.8 ms instead of 5.1
(1.5B, 128 sequences, one H200).
"""

import os
from dataclasses import dataclass, replace
from typing import Literal

import torch
from transformers.hf_argparser import HfArg

from rlhf_utils import ColocateWorkerExtension

from ..errors import MismatchError, RunError
from ..learning.exact import attention_backend, missing_operation
from ..run.actors import ActorGroup
from ..run.checkpoint import replace_flags
from ..run.folder import RunFolder
from ..tasks.task import Task
from .engine import complete

LEAST_CAPABILITY = 90  # of a GPU: on SM80, that mode replaces more operations than are known here
CHECKED_TOKENS = 600  # in each completion of the check: longer than a page, a chunk and most tilings


@dataclass
class ExactArguments:
    """Whether trainers compute what engines compute, bit for bit."""

    exact: Literal["auto", "on", "off"] = HfArg(
        default="auto",
        help="whether trainers compute the engines' log-probabilities bit for bit (docs/exact.md): if they can (auto),"
        " or else the run ends (on), or not (off)",
    )


if os.environ.get("VLLM_BATCH_INVARIANT") == "1":
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    for module in (linear, vocab_parallel_embedding):
        module.linear_batch_invariant = torch.nn.functional.linear


class ExactWorkerExtension(ColocateWorkerExtension):
    """`ColocateWorkerExtension`, for an exact engine."""


def settle_exactness(run: RunFolder, args, model: str, capability: int | None):
    """The arguments, with `--exact off` if no engine of this model can be exact. Says why, or raises RunError with
    `--exact on`. `capability` is that of the GPU, as 90 for 9.0; None without one."""
    from transformers import AutoConfig

    if args.exact == "off" or (args.exact == "auto" and capability is None):
        return replace_flags(args, exact="off")
    obstacles = {
        "there is no GPU": capability is None,
        f"the GPU's compute capability is below {LEAST_CAPABILITY / 10}": (capability or 0) < LEAST_CAPABILITY,
        "several workers add up in another order (--tensor-parallel-size)": args.tensor_parallel_size > 1,
        "adapters are merged in the engine, and not in the trainer": bool(args.lora_rank),
        "inductor rounds in other places (--compile)": args.compile,
        "trainers would not use the attention that was asked for (--attention)": args.attention is not None,
    }
    reason = next((reason for reason, holds in obstacles.items() if holds), "")
    if not reason and (missing := missing_operation(AutoConfig.from_pretrained(model))):
        reason = f"the trainer does not know the engine's arithmetic of {missing}"
    if not reason:
        return args
    if args.exact == "on":
        raise RunError(f"--exact on: {reason}")
    run.say(f"not exact: {reason}")
    return replace_flags(args, exact="off")


def exact_options(model: str) -> dict:
    """vLLM's options for an exact engine of this model. Sets the environment variable that its workers inherit."""
    from transformers import AutoConfig

    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    backend = attention_backend(AutoConfig.from_pretrained(model))
    return {"worker_extension_cls": f"{__name__}.ExactWorkerExtension", "attention_backend": backend}


def is_exact(run: RunFolder, engines: ActorGroup, trainers: ActorGroup, task: Task, args, max_model_len: int) -> bool:
    """Have the engines sample a few long completions, and the trainers score them. Returns whether all
    log-probabilities are equal, and says so, or what differs. With `--exact on`, a difference raises MismatchError."""
    rows = task.draw(1)[:4]
    tokens = min(CHECKED_TOKENS, max_model_len - max(len(row.prompt_ids) for row in rows))
    probe = replace(args, max_tokens=tokens, group_size=2)
    probe.ignore_eos = True
    batch = complete(engines, rows * len(engines), probe, step=0)
    trainers.call("proving", "make_exact", "on")
    try:
        trainers.first("proving", "mismatch", batch.rollouts)
    except MismatchError as difference:
        if args.exact == "on":
            raise
        reason = str(difference).removeprefix("--exact on: ")
        run.say(f"not exact: {reason}; the engines start again, as with --exact off")
        trainers.call("proving", "make_exact", "off")
        return False
    trainers.call("proving", "make_exact", args.exact)
    run.say(f"exact: in completions of {tokens} tokens, the trainers' log-probabilities are the engines', bit for bit")
    return True
