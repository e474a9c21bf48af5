"""A rollout: one completion that the engine sampled, and what is known of it before anything is learned."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from .objectives import advantages, known_std


@dataclass(frozen=True, eq=False)
class Rollout:
    """One sampled completion. Token ids, log-probabilities and versions are numpy arrays in a run: they travel between
    processes without being copied number by number.

    Where the policy calls tools, the completion is a conversation: `completion_ids` has the tools' answers as well, at
    whose tokens `sampled` is False and the log-probability 0.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    logprobs: Sequence[float]  # the engine's, of each completion token, at the sampling temperature
    reward: float | None = None  # None: not known, so nothing is learned from it
    text: str = ""
    truncated: bool = False  # it reached `max_tokens` and has no end
    rewards: dict[str, float | None] = field(default_factory=dict)  # by name; `reward` is their weighted sum
    extra: dict = field(default_factory=dict)  # what a reward says of this completion (TRL's log_extra)
    versions: Sequence[int] | None = None  # of each token's weights: learning steps behind them; None: the learner's
    sampled: Sequence[bool] | None = None  # which completion tokens the policy sampled, and learns from; None: all
    prompt: list[dict] | None = None  # with what an environment said at the start; None: the row's
    messages: list[dict] | None = None  # the conversation after the prompt

    @property
    def mask(self) -> np.ndarray:
        """`sampled` as a bool array [T]."""
        return np.ones(len(self.completion_ids), bool) if self.sampled is None else np.asarray(self.sampled, bool)

    @property
    def length(self) -> int:
        """How many tokens the policy sampled."""
        return int(self.mask.sum())


def known_rewards(rollouts: list[Rollout]) -> torch.Tensor:
    """The rewards [B], float64. A NaN is one that is not known."""
    rewards = [math.nan if rollout.reward is None else rollout.reward for rollout in rollouts]
    return torch.tensor(rewards, dtype=torch.float64)


def rollout_metrics(rollouts: list[Rollout], group_size: int) -> dict[str, float]:
    """Metrics of B rollouts, `group_size` of each prompt in a row. Rewards that are not known count for nothing."""
    rewards = known_rewards(rollouts)
    known, deviations = rewards[~rewards.isnan()], advantages(rewards, group_size, "dr_grpo").view(-1, group_size)
    of_rewards = {"reward/mean": float(known.mean()), "reward/std": float(known_std(known, dim=0))}
    return (of_rewards if len(known) else {}) | {
        "frac_reward_zero_std": float((deviations == 0).all(1).double().mean()),
        "completions/mean_length": sum(rollout.length for rollout in rollouts) / len(rollouts),
        "completions/clipped_ratio": sum(rollout.truncated for rollout in rollouts) / len(rollouts),
    }
