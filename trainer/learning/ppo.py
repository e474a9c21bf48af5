"""PPO: a policy and a critic learn from a reward at each completion's end and a KL penalty at every token.

This is PPO (Schulman et al. 2017, arXiv:1707.06347) as RLHF has used it since Ziegler et al. 2019 (arXiv:1909.08593).
One step takes B rollouts of up to T tokens:

    rewards     token_rewards: the clipped reward at the last token, less kl_coef * (log p - log p_reference) at each
    advantages  gae: from the critic's value before each token; whitened over the batch
    policy      token_losses (objectives.py): the ratio to the policy that the step began with is clipped; importance
                weights correct for the engine
    critic      value_losses: values are clipped around the step's first ones

Tensors are [B, T], right-padded; a mask is 1 for a completion's tokens and 0 for padding. All means are over tokens.
docs/objectives.md has the names that TRL and OpenRLHF use.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le

from ..flags import arg, with_values
from .config import LearnerConfig
from .layout import padded
from .learner import Learner, learning_rate
from .objectives import PolicyLossConfig
from .policy import PolicyLearner, PolicyScores
from .rollout import Rollout
from .value_models import ValueModel

CRITIC_LEARNING_RATE = 1e-5  # the smallest default: a new value head has everything to learn


@dataclass
class PPOLossConfig(PolicyLossConfig):
    """PPO's options."""

    cliprange_value: Annotated[float, Gt(0)] = arg(
        0.5, help="the critic's loss clips values to within ± this of the values before the step"
    )
    gamma: Annotated[float, Ge(0), Le(1)] = arg(1.0, help="discount of later rewards, per token")
    lam: Annotated[float, Ge(0), Le(1)] = arg(
        1.0, help="lambda of GAE (advantage estimation): 1 has no bias, 0 the least variance"
    )
    kl_coef: Annotated[float, Ge(0)] = arg(
        0.01, help="coefficient of the KL penalty in the rewards, which keeps the policy near the initial model"
    )
    reward_clip: Annotated[float, Gt(0)] = arg(10.0, help="completions' rewards are clipped to ± this")
    critic_learning_rate: Annotated[float | None, Gt(0)] = arg(
        None, help="the critic's learning rate (default: the policy's, but at least 1e-5)"
    )


@dataclass(eq=False)
class Experience:
    """What policy and critic learn from in a step: B rollouts, and tensors [B, T] of their tokens."""

    rollouts: list[Rollout]
    mask: torch.Tensor
    old_policy: PolicyScores  # of the policy that the step began with
    advantages: torch.Tensor
    old_values: torch.Tensor
    returns: torch.Tensor


def whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The values [B, T] less their mean, over their standard deviation, where the mask is 1, and else 0 (What
    Matters in On-Policy Reinforcement Learning, Andrychowicz et al. 2020, arXiv:2006.05990)."""
    of_tokens = values[mask.bool()]
    return (values - of_tokens.mean()) * torch.rsqrt(of_tokens.var(correction=0) + 1e-8) * mask


def token_rewards(
    rewards: torch.Tensor, kl: torch.Tensor, mask: torch.Tensor, kl_coef: float, reward_clip: float
) -> torch.Tensor:
    """Rewards [B, T] of tokens: -kl_coef * kl [B, T] at each, and at the last one also the completion's reward [B],
    clipped (Ziegler et al. 2019, arXiv:1909.08593)."""
    last = mask.sum(1).long() - 1
    penalties = -kl_coef * kl * mask
    return penalties.scatter_add(1, last[:, None], rewards.clamp(-reward_clip, reward_clip)[:, None])


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns [B, T] (Generalized Advantage Estimation, Schulman et al. 2016, arXiv:1506.02438):
    A[t] = delta[t] + gamma * lam * A[t + 1] with delta[t] = r[t] + gamma * V[t + 1] - V[t], and A + V. After the last
    token, A and V are 0.
    """
    rewards, values = rewards * mask, values * mask
    next_values = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
    deltas = rewards + gamma * next_values - values
    advantages, advantage = torch.zeros_like(values), torch.zeros(len(values))
    for t in reversed(range(values.shape[1])):
        advantage = (deltas[:, t] + gamma * lam * advantage) * mask[:, t]
        advantages[:, t] = advantage
    return advantages, advantages + values


def value_losses(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, cliprange: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """max((V - R)^2, (clip(V, V_old ± cliprange) - R)^2) / 2, and where the clipped term is the larger: [B, T] both
    (Engstrom et al. 2020, arXiv:2005.12729; not in PPO's paper)."""
    unclipped = (values - returns).square()
    clipped = (values.clamp(old_values - cliprange, old_values + cliprange) - returns).square()
    return torch.maximum(unclipped, clipped) / 2, clipped > unclipped


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
    """1 - Var(R - V) / Var(R) over all tokens: 1 if the critic knows the returns, 0 if its values are constant."""
    values, returns = values[mask.bool()], returns[mask.bool()]
    variance = returns.var(correction=0)
    return float(1 - (returns - values).var(correction=0) / variance) if variance > 0 else 0.0


def estimate(
    rollouts: list[Rollout],
    old_policy: PolicyScores,
    reference_logprobs: torch.Tensor,
    values: torch.Tensor,
    config: PPOLossConfig,
) -> tuple[Experience, dict[str, float]]:
    """What the step learns from, and metrics. Takes B rollouts, the policy's log-probabilities, the reference's [B, T],
    and the critic's values [B, T]."""
    mask = padded([rollout.mask for rollout in rollouts]).float()
    kl = (old_policy.logprobs - reference_logprobs) * mask
    rewards = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float32)
    rewards = token_rewards(rewards, kl, mask, config.kl_coef, config.reward_clip)
    advantages, returns = gae(rewards, values, mask, config.gamma, config.lam)
    tokens = mask.bool()
    metrics = {
        "kl": float(kl[tokens].mean()),
        "kl_coef": config.kl_coef,
        "advantages/std": float(advantages[tokens].std(correction=0)),
        "returns/mean": float(returns[tokens].mean()),
        "values/mean": float(values[tokens].mean()),
        "ppo/explained_variance": explained_variance(values, returns, mask),
    }
    advantages = whiten(advantages, mask)
    return Experience(rollouts, mask, old_policy, advantages, values, returns), metrics


class PPOLearner(PolicyLearner):
    """A policy that learns by PPO."""

    def learn(self, experience: Experience) -> dict[str, float]:
        """Update the policy. Returns metrics."""
        rollouts, left_out = experience.rollouts, torch.zeros(len(experience.rollouts), dtype=torch.bool)
        # The KL is in the reward, so the loss needs no reference.
        return self._run_policy_updates(rollouts, experience.advantages, left_out, experience.old_policy)


class CriticLearner(Learner):
    """The critic: a trunk like the policy's, and a head that gives the value of the state before each token."""

    model_class = ValueModel

    def __init__(self, path: str, config: LearnerConfig, *args):
        rate = config.loss.critic_learning_rate or max(learning_rate(config), CRITIC_LEARNING_RATE)
        config = with_values(config, {"learning_rate": rate, "save_merged": False})
        super().__init__(path, config, *args)

    def values(self, rollouts: list[Rollout]) -> torch.Tensor:
        """Values [B, T] of the states before the completions' tokens, right-padded with zeros, on the CPU."""
        return self.model.score_all(rollouts)[0]

    def learn(self, experience: Experience) -> dict[str, float]:
        """Update the critic. Returns metrics."""
        tensors = {"mask": experience.mask, "old_values": experience.old_values, "returns": experience.returns}
        metrics = self._run_updates(experience.rollouts, tensors, lambda batch: batch["mask"] / batch["mask"].sum())
        return {f"critic/{name}": value for name, value in metrics.items()}

    def _losses(
        self, rollouts: list[Rollout], width: int, tensors: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        (values,) = self.model.score(rollouts, width)
        cliprange = self.config.loss.cliprange_value
        losses, clipped = value_losses(values, tensors["old_values"], tensors["returns"], cliprange)
        return losses, {"clip_fraction": clipped.float()}
