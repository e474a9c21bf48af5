"""PPO on tokens: a policy and a critic learn from a reward at each completion's end and a KL penalty at every token.

The algorithm is that of Schulman et al. 2017 (arXiv:1707.06347) as RLHF has it since Ziegler et al. 2019
(arXiv:1909.08593). One step takes B = P * G rollouts of up to T tokens:

    rewards     token_rewards: the clipped score at the last token, less kl_coef * (log p - log p_reference) at each
    advantages  gae: by the critic's values of the states before each token; whitened over the batch
    policy      clipped_losses of the ratio to the policy that the step began with, times importance_weights, which make
                up for the engine (both in objectives.py)
    critic      value_losses, clipped around the values that the step began with
    kl_coef     fixed, or adapted to a target of the KL

Tensors are [B, T], right-padded; a mask is 1 for a completion's tokens and 0 for padding. All means are over tokens, so
the size of the micro-batches does not change a gradient. docs/objectives.md has the names that TRL and OpenRLHF use.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le
from transformers.hf_argparser import HfArg

from .grpo import rollout_metrics
from .learner import LearnerConfig, Rollout, distance_of
from .lora import dropout, without_adapters
from .objectives import MismatchConfig, clipped_losses, importance_weights, kl_estimate
from .ppo_models import Classifier, Scorer, longest
from .sharding import whole_gradients_fit

CRITIC_LEARNING_RATE = 1e-5  # at least, unless it is given: a new value head has all to learn
KL_ERROR = 0.2  # of the adaptive coefficient: the relative error that counts, at most


@dataclass
class PPOConfig(MismatchConfig, LearnerConfig):
    """What the learning step is told."""

    group_size: Annotated[int, Ge(1)] = HfArg(default=8, help="G: completions of each prompt")
    max_tokens: Annotated[int, Ge(1)] = HfArg(default=16, help="T: length of a completion, at most")
    num_ppo_epochs: Annotated[int, Ge(1)] = HfArg(default=4, help="passes over the rollouts of a step")
    num_mini_batches: Annotated[int, Ge(1)] = HfArg(default=2, help="optimizer steps in each of them")
    cliprange: Annotated[float, Gt(0)] = HfArg(default=0.2, help="the ratio to the old policy is kept within 1 ± this")
    cliprange_value: Annotated[float, Gt(0)] = HfArg(default=0.2, help="and a value within the old one ± this")
    gamma: Annotated[float, Ge(0), Le(1)] = HfArg(default=1.0, help="discount of later rewards")
    lam: Annotated[float, Ge(0), Le(1)] = HfArg(default=0.95, help="GAE's: 1 is no bias, 0 is least variance")
    kl_coef: Annotated[float, Ge(0)] = HfArg(default=0.05, help="of the KL to the initial model, in the reward")
    kl_target: Annotated[float | None, Gt(0)] = HfArg(
        default=None, help="KL per token to which the coefficient is adapted (default: it stays)"
    )
    kl_horizon: Annotated[int, Ge(1)] = HfArg(default=10_000, help="completions in which it adapts")
    early_stop_kl: Annotated[float | None, Gt(0)] = HfArg(
        default=None, help="KL per token to the old policy that ends a step's updates (default: none does)"
    )
    reward_clip: Annotated[float, Gt(0)] = HfArg(default=10.0, help="scores are kept within ± this")
    whiten_rewards: bool = HfArg(default=False, help="divide the tokens' rewards by their standard deviation")
    critic_learning_rate: Annotated[float | None, Gt(0)] = HfArg(
        default=None, help="the critic's (default: the policy's, but 1e-5 at least)"
    )


@dataclass
class Experience:
    """What policy and critic learn from in a step: B rollouts and, for their tokens, tensors [B, T]. `kl` is the mean
    over tokens of the KL to the reference."""

    rollouts: list[Rollout]
    mask: torch.Tensor
    old_logprobs: torch.Tensor
    engine_logprobs: torch.Tensor
    advantages: torch.Tensor
    old_values: torch.Tensor
    returns: torch.Tensor
    kl: float


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mean of the values [B, T] where the mask is 1."""
    return (values * mask).sum() / mask.sum()


def masked_var(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Their variance, without Bessel's correction."""
    return masked_mean((values - masked_mean(values, mask)).square(), mask)


def whiten(values: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True) -> torch.Tensor:
    """The values [B, T] over their standard deviation where the mask is 1, less their mean unless that is to stay
    (Implementation Matters in Deep Policy Gradients, Engstrom et al. 2020, arXiv:2005.12729)."""
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + 1e-8)
    return (whitened if shift_mean else whitened + mean) * mask


def token_rewards(
    scores: torch.Tensor, kl: torch.Tensor, mask: torch.Tensor, kl_coef: float, reward_clip: float
) -> torch.Tensor:
    """Rewards [B, T]: -kl_coef * kl [B, T] at each token, and at the last one also the score [B], clipped (Ziegler et
    al. 2019, arXiv:1909.08593)."""
    rewards = -kl_coef * kl * mask
    last = mask.sum(1).long() - 1
    return rewards.scatter_add(1, last[:, None], scores.clamp(-reward_clip, reward_clip)[:, None])


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns [B, T] (Generalized Advantage Estimation, Schulman et al. 2016, arXiv:1506.02438):
    A[t] = delta[t] + gamma * lam * A[t + 1] with delta[t] = r[t] + gamma * V[t + 1] - V[t], and A + V. Nothing follows
    the last token.
    """
    rewards, values = rewards * mask, values * mask
    advantages, later = torch.zeros_like(values), torch.zeros(len(values))
    next_values = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
    deltas = rewards + gamma * next_values - values
    for t in reversed(range(values.shape[1])):
        later = (deltas[:, t] + gamma * lam * later) * mask[:, t]
        advantages[:, t] = later
    return advantages, advantages + values


def value_losses(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, cliprange: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """max((V - R)^2, (clip(V, V_old ± cliprange) - R)^2) / 2, and where the second is larger: [B, T] both (Engstrom
    et al. 2020, arXiv:2005.12729; not in PPO's paper)."""
    plain = (values - returns).square()
    clipped = (values.clamp(old_values - cliprange, old_values + cliprange) - returns).square()
    return torch.maximum(plain, clipped) / 2, clipped > plain


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
    """1 - Var(R - V) / Var(R) over all tokens: 1 if the critic knows the returns, 0 if it says a constant."""
    variance = masked_var(returns, mask)
    return float(1 - masked_var(returns - values, mask) / variance) if variance > 0 else 0.0


def adapted_kl_coef(kl_coef: float, kl: float, completions: int, config: PPOConfig) -> float:
    """The next coefficient: times 1 + clip(kl / target - 1, ± 0.2) * completions / horizon (Ziegler et al. 2019,
    arXiv:1909.08593, section 2.2). Without a target, the same one."""
    if config.kl_target is None:
        return kl_coef
    error = max(-KL_ERROR, min(KL_ERROR, kl / config.kl_target - 1))
    return kl_coef * (1 + error * completions / config.kl_horizon)


def estimate(
    rollouts: list[Rollout],
    logprobs: torch.Tensor,
    reference_logprobs: torch.Tensor,
    values: torch.Tensor,
    kl_coef: float,
    config: PPOConfig,
) -> tuple[Experience, dict[str, float]]:
    """What the step learns from, and its metrics: by the log-probabilities of policy and reference, and the critic's
    values, of B rollouts, [B, T] each."""
    pad = torch.nn.utils.rnn.pad_sequence
    rows = [torch.tensor(rollout.logprobs, dtype=torch.float32) for rollout in rollouts]
    engine_logprobs, mask = pad(rows, batch_first=True), pad([torch.ones_like(row) for row in rows], batch_first=True)
    kl = (logprobs - reference_logprobs) * mask
    scores = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float32)
    rewards = token_rewards(scores, kl, mask, kl_coef, config.reward_clip)
    if config.whiten_rewards:
        rewards = whiten(rewards, mask, shift_mean=False)
    advantages, returns = gae(rewards, values, mask, config.gamma, config.lam)
    metrics = rollout_metrics(rollouts, config.group_size) | {
        "kl": float(masked_mean(kl, mask)),
        "kl_coef": kl_coef,
        "advantages/std": float(masked_var(advantages, mask).sqrt()),
        "returns/mean": float(masked_mean(returns, mask)),
        "values/mean": float(masked_mean(values, mask)),
        "ppo/explained_variance": explained_variance(values, returns, mask),
    }
    advantages = whiten(advantages, mask)
    experience = Experience(rollouts, mask, logprobs, engine_logprobs, advantages, values, returns, metrics["kl"])
    return experience, metrics


class PPO(Scorer):
    """What both learners do in a step: epochs of mini-batches, in an order that the seed and the step settle.

    Subclasses have `_losses`, which gives the "loss" and metrics, [b, T] each, of a micro-batch of b rollouts.
    """

    def _mini_batches(self, count: int) -> Iterator[list[int]]:
        """The numbers of the rollouts in each mini-batch of each epoch."""
        parts = min(self.config.num_mini_batches, count)
        for epoch in range(self.config.num_ppo_epochs):
            order = random.Random(f"{self.seed} {self.step} {epoch}").sample(range(count), count)
            yield from (order[i::parts] for i in range(parts))

    def _learn(self, experience: Experience, *names: str, stop_above: float | None = None) -> dict[str, float]:
        """All updates of a step, on these tensors of the experience. Stops before an update, never before the first,
        whose "approxkl" is above `stop_above`. Returns the means of what `_losses` returns, and the number of updates.
        """
        reduce_once = self.ranks > 1 and self._sum(whole_gradients_fit(self.parameters, self.device))[0] == self.ranks
        totals, updates = {}, 0
        self._seed_dropout()
        for rows in self._mini_batches(len(experience.rollouts)):
            tensors = [getattr(experience, name)[rows].to(self.device) for name in ("mask", *names)]
            tokens, rollouts = tensors[0].sum(), [experience.rollouts[row] for row in rows]
            parts, _, mine, *tensors = self._share(rollouts, [True] * len(rows), *tensors)
            self.optimizer.zero_grad(set_to_none=True)
            sums = {}
            with dropout(self.model), self._computing(self.model):
                for part in parts:
                    if self.ranks > 1:
                        self.model.set_requires_gradient_sync(part is parts[-1] or not reduce_once)
                    mask, *others = (tensor[part] for tensor in tensors)
                    losses = self._losses(mine[part], mask, *others)
                    means = {name: (values * mask).sum() / tokens for name, values in losses.items()}
                    (means["loss"] * self.ranks).backward()  # FSDP averages gradients of ranks, whose losses add up
                    sums = {name: sums.get(name, 0.0) + mean.detach() for name, mean in means.items()}
            sums = dict(zip(sums, self._sum(*sums.values()), strict=True))
            if updates and stop_above is not None and sums["approxkl"] > stop_above:
                break
            sums["grad_norm"] = self._update()
            totals = {name: totals.get(name, 0.0) + value for name, value in sums.items()}
            updates += 1
        self.step += 1
        rate = self.optimizer.param_groups[0]["lr"]
        return {name: total / updates for name, total in totals.items()} | {"updates": updates, "learning_rate": rate}


class PPOLearner(PPO):
    """The policy. Its checkpoint keeps the coefficient of the KL."""

    def __init__(self, *args):
        super().__init__(*args)
        self.own_state = {"kl_coef": self.config.kl_coef}

    def load_state(self, folder: Path) -> None:
        super().load_state(folder)
        if self.config.kl_target is None:  # nothing has adapted it: what the run is told now counts
            self.own_state["kl_coef"] = self.config.kl_coef

    def score(self, rollouts: list[Rollout]) -> tuple[dict[str, float] | torch.Tensor, ...]:
        """Metrics, with the step's `kl_coef`, and log-probabilities [B, T] of the tokens before the step. With adapters
        also those by the model that they adapt, which is the reference.

        They prove the last sync: raises MismatchError if the engine's are further off than `max_mismatch` on average.
        """
        width = longest(rollouts)
        scores = self._of_all(
            rollouts, 2 * width, lambda mine, _: torch.cat(self.token_logprobs(mine, width, entropy=True), 1)
        )
        logprobs, entropies = scores.split(width, 1)
        mask, engine_logprobs, _ = (tensor.cpu() for tensor in self._completion_tensors(rollouts))
        mismatch = self._proven(distance_of(logprobs, engine_logprobs, mask))
        metrics = {"logprobs/mismatch": mismatch, "entropy": float(masked_mean(entropies, mask))}
        scores = metrics | self.own_state, logprobs
        if not self.adapters:
            return scores
        with without_adapters(self.model):
            return *scores, self.logprobs(rollouts)

    def learn(self, experience: Experience) -> dict[str, float]:
        """The policy's updates of a step. Returns their metrics."""
        kl_coef, count = self.own_state["kl_coef"], len(experience.rollouts)
        learned = self._learn(
            experience, "old_logprobs", "engine_logprobs", "advantages", stop_above=self.config.early_stop_kl
        )
        self.own_state["kl_coef"] = adapted_kl_coef(kl_coef, experience.kl, count, self.config)
        ppo = {f"ppo/{name}": learned.pop(name) for name in ("clipfrac", "approxkl", "updates")}
        return {"ppo/policy_loss": learned.pop("loss")} | ppo | learned

    def _losses(self, rollouts, mask, old_logprobs, engine_logprobs, advantages) -> dict[str, torch.Tensor]:
        logprobs, _ = self.token_logprobs(rollouts, mask.shape[1])
        ratio, low, high = (logprobs - old_logprobs).exp(), 1 - self.config.cliprange, 1 + self.config.cliprange
        losses = clipped_losses(ratio, advantages, low, high)
        importance, outside = importance_weights(old_logprobs, engine_logprobs, mask, self.config)
        return {
            "loss": importance * losses,
            "clipfrac": (losses > -ratio * advantages).float(),  # where clipping made it larger
            "approxkl": kl_estimate(old_logprobs, logprobs),
            "importance/mean": importance,
            "importance/clipped": outside.float(),
        }


class CriticLearner(PPO, Classifier):
    """The critic: a trunk like the policy's, and a head that gives the value of what comes before each token."""

    may_lack_head = True  # begun with a policy

    def __init__(self, path: str, config: PPOConfig, *args):
        rate = config.critic_learning_rate or max(config.learning_rate, CRITIC_LEARNING_RATE)
        super().__init__(path, replace(config, learning_rate=rate, save_merged=False), *args)

    def values(self, rollouts: list[Rollout]) -> torch.Tensor:
        """Values [B, T] of the states before the completions' tokens, right-padded with zeros, on the CPU."""
        return self._of_all(rollouts, longest(rollouts), self._token_values)

    def learn(self, experience: Experience) -> dict[str, float]:
        """The critic's updates of a step. Returns their metrics."""
        learned = self._learn(experience, "old_values", "returns")
        names = {"loss": "ppo/value_loss", "clipfrac": "ppo/value_clipfrac"}
        return {names.get(name, f"critic/{name}"): value for name, value in learned.items() if name != "updates"}

    def _token_values(self, rollouts: list[Rollout], width: int) -> torch.Tensor:
        return self._token_scores(rollouts, width, self.model)[0]

    def _losses(self, rollouts, mask, old_values, returns) -> dict[str, torch.Tensor]:
        values = self._token_values(rollouts, mask.shape[1])
        losses, clipped = value_losses(values, old_values, returns, self.config.cliprange_value)
        return {"loss": losses, "clipfrac": clipped.float()}
