"""A rollout: one completion that the engine sampled, with its log-probabilities and its reward."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from ..images import Images
from .objectives import advantages, known_std


class SamplingMask(NamedTuple):
    """From which tokens each token of a completion was sampled: those that top-k, top-p and min-p had left, packed."""

    token_ids: np.ndarray  # int32, of one token of the completion after another
    counts: np.ndarray  # int32, how many of them each token of the completion has; 0 if the policy did not sample it


@dataclass(frozen=True, eq=False)
class Rollout:
    """One sampled completion.

    If the policy calls tools, the completion is a conversation, and `completion_ids` also has the tools' answers. At
    their tokens, `sampled` is False and the log-probability 0.

    In a run, token ids, log-probabilities and versions are numpy arrays: they travel between processes without being
    copied number by number.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    # The engine's, of each completion token, at the sampling temperature and among the tokens of `sampling_mask`.
    logprobs: Sequence[float]
    reward: float | None = None  # None: unknown, so nothing is learned from it
    text: str = ""
    truncated: bool = False  # it was cut off, at `max_tokens` or the engine's longest sequence
    rewards: dict[str, float | None] = field(default_factory=dict)  # by name; `reward` is their weighted sum
    extra: dict = field(default_factory=dict)  # columns that reward functions logged (TRL's log_extra)
    versions: Sequence[int] | None = None  # the learning step that made each token's weights; None: the learner's last
    teacher_logprobs: Sequence[float] | None = None  # the teacher's, of each completion token
    sampling_mask: SamplingMask | None = None  # None: from all tokens
    sampled: Sequence[bool] | None = None  # which tokens the policy sampled, and learns from; None: all
    prompt: list[dict] | None = None  # messages, with what the environment's reset returned; None: the row's
    messages: list[dict] | None = None  # the conversation after the prompt
    images: Images | None = None  # of the prompt, for which `prompt_ids` have a token for each feature
    rest: Sequence["Rollout"] = ()  # an agent's other conversations, which share this one's reward

    @property
    def mask(self) -> np.ndarray:
        """`sampled` as a bool array, one element for each completion token."""
        return np.ones(len(self.completion_ids), bool) if self.sampled is None else np.asarray(self.sampled, bool)

    @property
    def length(self) -> int:
        """The number of tokens that the policy sampled."""
        return int(self.mask.sum()) + sum(own.length for own in self.rest)

    @property
    def samples(self) -> list["Rollout"]:
        """The sequences of tokens that are learned from: this one and the `rest`, without those that have none."""
        return [own for own in (replace(self, rest=()), *self.rest) if len(own.completion_ids)]


def samples_of(rollouts: Sequence[Rollout]) -> tuple[list[Rollout], torch.Tensor]:
    """The S samples of B rollouts, and the number [S] of the rollout of each."""
    samples = [(own, number) for number, rollout in enumerate(rollouts) for own in rollout.samples]
    return [own for own, _ in samples], torch.tensor([number for _, number in samples])


def known_rewards(rollouts: list[Rollout]) -> torch.Tensor:
    """The rewards [B] in float64; NaN where a reward is unknown."""
    rewards = [math.nan if rollout.reward is None else rollout.reward for rollout in rollouts]
    return torch.tensor(rewards, dtype=torch.float64)


def rollout_metrics(rollouts: list[Rollout], group_size: int) -> dict[str, float]:
    """Metrics of B rollouts, `group_size` of each prompt in a row. Unknown rewards count for nothing."""
    rewards = known_rewards(rollouts)
    known = rewards[~rewards.isnan()]
    metrics = {"reward/mean": float(known.mean()), "reward/std": float(known_std(known, dim=0))} if len(known) else {}
    deviations = advantages(rewards, group_size, "dr_grpo").view(-1, group_size)
    return metrics | {
        "frac_reward_zero_std": float((deviations == 0).all(1).double().mean()),
        "completions/mean_length": sum(rollout.length for rollout in rollouts) / len(rollouts),
        "completions/clipped_ratio": sum(rollout.truncated for rollout in rollouts) / len(rollouts),
    }
