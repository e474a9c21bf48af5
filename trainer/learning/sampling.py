"""How completions are sampled. Engines do it, and learners must know it: their log-probabilities depend on it."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from ..flags import arg


@dataclass
class SamplingConfig:
    """How completions are sampled."""

    temperature: Annotated[float, Ge(0.01)] = arg(1.0, help="sampling temperature, at least 0.01")
    max_tokens: Annotated[int, Ge(1)] = arg(16, help="largest number of tokens in a completion (T)")
    group_size: Annotated[int, Ge(1)] = arg(8, help="completions of each prompt (G)")
