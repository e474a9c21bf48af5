"""Whether an engine can be exact: a trainer then computes its log-probabilities bit for bit."""

from collections.abc import Sequence
from dataclasses import replace

from ..errors import RunError
from ..learning.config import ModelConfig
from ..learning.exact import GPU, attention_backend, missing_operation
from ..run.folder import RunFolder
from .options import EngineArguments

LEAST_CAPABILITY = 90  # of a GPU: on SM80, that mode replaces more operations than are known here
BLACKWELL = 100  # has no FlashAttention 3
LEAST_NCCL = (2, 29, 7)  # from which on vLLM's settings are for its own communicators only
ORDERED_SUMS = (4, 6, 8)  # workers for which vLLM's own all-reduce adds in the order of ranks; 2 have only one order


def settle_exactness(
    run: RunFolder,
    args: EngineArguments,
    config: ModelConfig,
    model: str,
    gpu: GPU | None,
    by_nccl: bool = True,
    engine_url: Sequence[str] = (),
    images: bool = False,
) -> EngineArguments:
    """The arguments, with `--exact off` if no engine of this model can be exact. Says why, or raises RunError with
    `--exact on`. `gpu` is a trainer's, None on CPU. `by_nccl` says whether trainers send the weights so, and `images`
    whether prompts have some."""
    from transformers import AutoConfig

    if args.exact == "off" or (args.exact == "auto" and gpu is None):
        return replace(args, exact="off")
    workers, of_model = args.tensor_parallel_size, AutoConfig.from_pretrained(model)
    hidden_size = of_model.get_text_config().hidden_size
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
        "the engine's weights are quantized (--quantization)": args.quantization,
        "others have started the engines (--engine-url)": engine_url,
        "inductor rounds in other places (compile)": config.compile,
    }
    reason = next((reason for reason, holds in obstacles.items() if holds), "")
    if not reason and (missing := missing_operation(of_model)):
        reason = f"the trainer does not know the engine's arithmetic of {missing}"
    if not reason and gpu.capability >= BLACKWELL and attention_backend(of_model) == "FLASH_ATTN":
        reason = "FlashAttention 3, which this model takes, is for compute capability 9 alone"
    if not reason:
        return args
    if args.exact == "on":
        raise RunError(f"--exact on: {reason}")
    run.say(f"not exact: {reason}")
    return replace(args, exact="off")
