"""The arithmetic of learning, and its share of the GPUs' peak: MFU.

Counted is what the model's definition asks for, whatever backward computes again. Each token takes 2 FLOPs forwards for
each weight of the blocks, 2 backwards for the gradient of its state and, if the weight learns, 2 for the weight's own;
the head counts for the tokens that it scores, and of a mixture's experts those that a token chooses. The attention of a
token takes 2 * layers * width * length forwards, where the width is that of all heads, and twice as many backwards: on
average, half of its sequence comes before it. A prompt that passes once for its group counts once. Towers are not
counted, so there is no MFU with images.
"""

import math
import time
from contextlib import suppress

import torch

from .batching import tokens
from .layout import PromptGroups
from .multimodal import learning_modules
from .rollout import Rollout

# Dense bf16, from the data sheets, by the beginning of the GPU's name.
PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA B200": 2250e12,
}


def peak_flops(device: str) -> float | None:
    """The peak of a GPU with this name, in FLOPs per second; None if it is unknown, as of a CPU or a part of a GPU."""
    known = [name for name in PEAK_FLOPS if device.startswith(name) and "MIG" not in device]
    return PEAK_FLOPS[max(known, key=len)] if known else None


class Work:
    """What passes through a model that learns: tokens and their FLOPs, since `begin`.

    `module` is the model, with its own head or the submodule `new_head`. What needs no gradient does not learn. The
    FLOPs are NaN if they are not known.
    """

    def __init__(self, module: torch.nn.Module, new_head: str | None = None):
        language_model, head = learning_modules(module, new_head)
        config = language_model.config
        looked_up = {part.weight for part in language_model.modules() if isinstance(part, torch.nn.Embedding)}
        chosen = getattr(config, "num_experts_per_tok", None) or math.nan
        sizes = [
            (weight.numel() * (chosen / weight.shape[0] if ".experts." in name else 1), weight.requires_grad)
            for name, weight in language_model.named_parameters()
            if weight not in looked_up
        ]
        self.blocks, self.head = _of_weights(sizes), _of_weights([(head.weight.numel(), head.weight.requires_grad)])
        self.attention = (math.nan, math.nan)
        with suppress(Exception):  # Gemma 4's layers have several widths, and other models no heads
            has_width = getattr(config, "head_dim", None)
            width = config.num_attention_heads * config.head_dim if has_width else config.hidden_size
            self.attention = tuple(factor * config.num_hidden_layers * width for factor in (2, 6))
        self.begin()

    def begin(self) -> None:
        self.tokens, self.flops, self.began = 0, 0.0, time.perf_counter()

    def flops_of(self, tokens: int, scored: int, squares: int, backward: bool) -> float:
        """The FLOPs of a forward pass, and of the `backward` pass if there is one, of so many tokens, of which the head
        scores some. `squares` is the sum of the squares of the sequences' lengths."""
        return tokens * self.blocks[backward] + scored * self.head[backward] + squares * self.attention[backward]

    def add(self, rollouts: list[Rollout], groups: PromptGroups | None, scored: int) -> None:
        """Count a micro-batch, of which the head scores so many tokens. `groups` share their prompts."""
        lengths = [tokens(rollout) for rollout in rollouts]
        saved = [(count - 1, length) for length, count, _ in groups.shapes] if groups else []
        passed = sum(lengths) - sum(count * length for count, length in saved)
        squares = sum(length**2 for length in lengths) - sum(count * length**2 for count, length in saved)
        self.tokens += passed
        known = math.nan if rollouts[0].images else 1.0
        self.flops += known * self.flops_of(passed, scored, squares, torch.is_grad_enabled())


def _of_weights(sizes: list[tuple[float, bool]]) -> tuple[float, float]:
    """FLOPs of a token that passes these weights, (size, whether it learns), forwards alone and with its backward."""
    return 2 * sum(size for size, _ in sizes), sum(size * (6 if learns else 4) for size, learns in sizes)
