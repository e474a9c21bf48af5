"""The learning step: GRPO and its near relatives on token log-probabilities.

It differs from textbook GRPO (Shao et al. 2024, arXiv:2402.03300) in five points:

- The engine samples, the trainer learns, and their log-probabilities never agree exactly. Each token's loss is weighted
  by the truncated importance ratio min(p_trainer / p_engine, `importance_cap`). Textbook GRPO has no such weight.
- The clip range is asymmetric (clip-higher, Yu et al. 2025, arXiv:2503.14476): [1 - 0.2, 1 + 0.28] by default.
- There is no KL penalty by default (`kl_coef` 0), and then no reference model is loaded.
- Each token has a weight that depends on the whole batch alone, so the size of the micro-batches does not change the
  gradient.
- Every step proves the sync before it: if the engine's log-probabilities of the sampled tokens are further from the
  trainer's than `max_mismatch`, on average, the step raises MismatchError and updates nothing.

One step takes P prompts with G completions each, that is B = P * G rollouts of up to T tokens. Their rewards and
log-probabilities make a loss (objectives.py), and its gradients an update (learner.py).

Rollouts whose loss is 0, such as those of a group whose rewards are all equal, go through the model once, for the proof
and the metrics, and cost no backward pass.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge
from transformers.hf_argparser import HfArg

from .learner import Learner, LearnerConfig, Rollout, distance_of
from .lora import dropout, without_adapters
from .objectives import ObjectiveConfig, advantages, importance_weights, kl_estimate, loss_weights, token_losses
from .sharding import whole_gradients_fit


@dataclass
class GRPOConfig(ObjectiveConfig, LearnerConfig):
    """What GRPO is told."""

    updates: Annotated[int, Ge(1)] = HfArg(default=1, help="optimizer steps on the same rollouts")
    dynamic_sampling: Annotated[int, Ge(0)] = HfArg(
        default=0, help="rounds, at most, in which other prompts replace those whose rewards are all equal (DAPO)"
    )


class GRPOLearner(Learner):
    """A learner whose steps are GRPO's. The KL is measured to the model `initial` that the run began with, if `path` is
    a checkpoint; with adapters, to the model that they adapt."""

    def __init__(self, path: str, *args, initial: str | None = None, **options):
        super().__init__(path, *args, **options)
        self.reference = None
        if self.config.kl_coef and not self.adapters:
            self.reference = self._load(initial or path, learns=False)

    def learn(self, rollouts: list[Rollout], proof: list[Rollout] = ()) -> dict[str, float]:
        """One step on B rollouts, `group_size` of each prompt in a row. Returns its metrics.

        Raises MismatchError, before anything is updated, if the engine's log-probabilities are further from the
        trainer's than `max_mismatch` on average. Tokens that older weights sampled do not count for that; those of the
        rollouts in `proof` do as well.
        """
        config = self.config
        rewards = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64)
        advantage = advantages(rewards, config.group_size, config.advantage).to(self.device, torch.float32)
        mask, engine_logprobs, current = self._completion_tensors(rollouts)
        truncated = torch.tensor([rollout.truncated for rollout in rollouts], device=self.device)
        weights = loss_weights(mask, advantage, truncated, config)
        tokens = mask.sum()
        parts, idle, mine, advantage, mask, engine_logprobs, current, weights = self._share(
            rollouts, weights.any(1).tolist(), advantage, mask, engine_logprobs, current, weights
        )
        parts = parts or [idle.pop(0)]  # momentum moves the weights even where all gradients are 0
        old_logprobs, entropies = torch.zeros_like(engine_logprobs), torch.zeros_like(engine_logprobs)
        with torch.no_grad(), self._computing(self.model):  # with dropout, what learns is not what sampled
            for part in idle + parts if config.lora_dropout else idle:
                old_logprobs[part], entropies[part] = self.token_logprobs(mine[part], mask.shape[1], entropy=True)
        reference_logprobs = None
        if config.kl_coef:
            with without_adapters(self.model) if self.adapters else nullcontext():
                reference_logprobs = self._all_logprobs(parts + idle, mine, mask, self.reference or self.model)
        reduce_once = self.ranks > 1 and self._sum(whole_gradients_fit(self.parameters, self.device))[0] == self.ranks
        self._seed_dropout()
        for update in range(config.updates):
            self.optimizer.zero_grad(set_to_none=True)
            total_loss, first = 0.0, update == 0 and not config.lora_dropout
            with dropout(self.model), self._computing(self.model):
                for part in parts:
                    if self.ranks > 1:
                        self.model.set_requires_gradient_sync(part is parts[-1] or not reduce_once)
                    logprobs, entropy = self.token_logprobs(mine[part], mask.shape[1], entropy=first)
                    if first:
                        old_logprobs[part], entropies[part] = logprobs.detach(), entropy
                    losses = token_losses(
                        logprobs,
                        old_logprobs[part],
                        engine_logprobs[part],
                        advantage[part],
                        mask[part],
                        config,
                        None if reference_logprobs is None else reference_logprobs[part],
                    )
                    loss = (losses * weights[part]).sum()
                    (loss * self.ranks).backward()  # FSDP averages the gradients of the ranks, whose losses add up
                    total_loss = total_loss + loss.detach()  # a tensor: reading it would wait for the GPU
            if update == 0:
                distance = distance_of(old_logprobs, engine_logprobs, current)
                mismatch = self._proven(distance + self._distance_of(proof) if proof else distance)
            grad_norm = self._update()
        self.step += 1
        importance, outside = importance_weights(old_logprobs, engine_logprobs, mask, config)
        means = {"entropy": entropies, "importance/mean": importance, "importance/clipped": outside}
        means["kl"] = kl_estimate(old_logprobs, old_logprobs if reference_logprobs is None else reference_logprobs)
        totals = {"loss": total_loss} | {name: (values * mask).sum() / tokens for name, values in means.items()}
        return rollout_metrics(rollouts, config.group_size) | {
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "grad_norm": grad_norm,
            "logprobs/mismatch": mismatch,
            **dict(zip(totals, self._sum(*totals.values()), strict=True)),
        }


def rollout_metrics(rollouts: list[Rollout], group_size: int) -> dict[str, float]:
    """What is known of rollouts before anything is learned from them."""
    rewards = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64)
    groups = rewards.view(-1, group_size)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(correction=min(1, len(rewards) - 1))),
        "frac_reward_zero_std": float((groups == groups[:, :1]).all(1).double().mean()),
        "completions/mean_length": sum(len(rollout.completion_ids) for rollout in rollouts) / len(rollouts),
        "completions/clipped_ratio": sum(rollout.truncated for rollout in rollouts) / len(rollouts),
    }
