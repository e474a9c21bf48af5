"""Models of transformers, loaded and made ready to learn or to be compared with."""

import torch

from ..errors import RunError
from .checkpointing import Checkpointing
from .config import ModelConfig
from .lora import add_adapters
from .multimodal import is_multimodal, learning_modules
from .precision import freeze
from .sharding import compile_blocks


def prepare(
    module, config: ModelConfig, device: torch.device, learns: bool, seed: int, new_head: str | None
) -> Checkpointing | None:
    """Freeze what does not learn, or give the model adapters; compile its blocks, and checkpoint them."""
    module.eval()  # no dropout: ratios compare log-probabilities by the same function
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if config.train_vision and (config.lora_rank or not is_multimodal(module.config.model_type)):
        raise RunError("--train-vision is for multimodal models, without adapters")
    if not learns:
        freeze(module, dtype)
    elif config.lora_rank:
        torch.manual_seed(seed)  # the same adapters on all ranks
        add_adapters(module, config, dtype, new_head)
    elif not config.train_vision:
        freeze(module, dtype, *learning_modules(module, new_head))
    if config.compile:
        compile_blocks(module)
    if not learns or config.gradient_checkpointing == "false":
        return None
    # Around what is compiled: torch compiles nothing inside.
    return Checkpointing(module, measures=config.gradient_checkpointing == "auto" and device.type == "cuda")


def make_savable(generation_config) -> None:
    """Set `do_sample` if a temperature needs it: some models lack it, and transformers refuses to save them."""
    try:
        generation_config.validate(strict=True)
    except ValueError:
        generation_config.do_sample = True
        generation_config.validate(strict=True)  # anything else that is wrong ends the run here, not at a checkpoint
