"""Exact engines, whose log-probabilities a trainer computes bit for bit: whether there can be one, and options.

vLLM takes the workers' extension from this module, and so imports it in every worker before it loads the model. If
VLLM_BATCH_INVARIANT=1 is set, the import makes linear layers `torch.nn.functional.linear`. That mode has cuBLAS work
without split-K, so they give the same bits as vLLM's Triton kernel, and a decode step takes 2.8 ms instead of 5.1
(1.5B, 128 sequences, one H200).
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from rlhf_utils import ColocateWorkerExtension, WorkerExtension  # noqa: F401 - vLLM takes one of them from here

from ..errors import RunError
from ..flags import arg
from ..learning.exact import attention_backend, missing_operation
from ..learning.model import ModelConfig
from ..run.actors import ActorGroup, LearnerActor
from ..run.folder import RunFolder
from .engine import EngineArguments

LEAST_CAPABILITY = 90  # of a GPU: on SM80, that mode replaces more operations than are known here
LEAST_NCCL = (2, 29, 7)  # from which on vLLM's settings are for its own communicators only
ORDERED_SUMS = (4, 6, 8)  # workers for which vLLM's own all-reduce adds in the order of ranks; 2 have only one order


@dataclass
class ExactEngineArguments(EngineArguments):
    """Whether trainers compute what engines compute, bit for bit."""

    exact: Literal["auto", "on", "off"] = arg(
        "auto",
        help="whether trainers compute the engines' log-probabilities bit for bit (docs/exact.md): if they can (auto),"
        " or else the run ends (on), or not (off)",
    )


if os.environ.get("VLLM_BATCH_INVARIANT") == "1":
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    for module in (linear, vocab_parallel_embedding):
        module.linear_batch_invariant = torch.nn.functional.linear


def settle_exactness(
    run: RunFolder,
    args: ExactEngineArguments,
    config: ModelConfig,
    model: str,
    trainers: ActorGroup,
    by_nccl: bool = True,
    engine_url: Sequence[str] = (),
    images: bool = False,
) -> ExactEngineArguments:
    """The arguments, with `--exact off` if no engine of this model can be exact. Says why, or raises RunError with
    `--exact on`. `trainers` have started, and load no model yet; `by_nccl` says whether they send the weights so,
    and `images` whether prompts have some."""
    from transformers import AutoConfig

    gpu = None if args.exact == "off" else trainers.call_rank_0("starting", LearnerActor.gpu)
    if args.exact == "off" or (args.exact == "auto" and gpu is None):
        return replace(args, exact="off")
    workers, hidden_size = args.tensor_parallel_size, AutoConfig.from_pretrained(model).get_text_config().hidden_size
    obstacles = {
        "there is no GPU": gpu is None,
        f"the GPU's compute capability is below {LEAST_CAPABILITY / 10}": gpu and gpu.capability < LEAST_CAPABILITY,
        f"NCCL {gpu and gpu.nccl_version} takes vLLM's settings for all groups, and the first sync would hang": (
            gpu and by_nccl and gpu.nccl < LEAST_NCCL
        ),
        f"NCCL adds up for {workers} workers, in an order of its own (--tensor-parallel-size)": (
            gpu and workers > 2 and (workers not in ORDERED_SUMS or workers > gpu.linked or hidden_size % 8)  # noqa: PLR2004
        ),
        "prompts have images": images,
        "others have started the engines (--engine-url)": engine_url,
        "inductor rounds in other places (compile)": config.compile,
    }
    reason = next((reason for reason, holds in obstacles.items() if holds), "")
    if not reason and (missing := missing_operation(AutoConfig.from_pretrained(model))):
        reason = f"the trainer does not know the engine's arithmetic of {missing}"
    if not reason:
        return args
    if args.exact == "on":
        raise RunError(f"--exact on: {reason}")
    run.say(f"not exact: {reason}")
    return replace(args, exact="off")


def exact_options(exact: str, model: str, extension: str) -> dict:
    """vLLM's options for an engine with this worker extension of rlhf_utils, and if it is to be exact, for that. Then
    sets the environment variable that its workers inherit."""
    from transformers import AutoConfig

    if exact == "off":
        return {"worker_extension_cls": f"rlhf_utils.{extension}"}
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    backend = attention_backend(AutoConfig.from_pretrained(model))
    return {"worker_extension_cls": f"{__name__}.{extension}", "attention_backend": backend}
