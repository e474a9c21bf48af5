"""The learning step: GRPO and its near relatives on token log-probabilities.

It differs from textbook GRPO (Shao et al. 2024, arXiv:2402.03300) in five points:

- The engine samples, the trainer learns, and their log-probabilities need not agree exactly. Each token's loss is
  weighted by the truncated importance ratio min(p_trainer / p_engine, `importance_cap`).
- The clip range is asymmetric (clip-higher, Yu et al. 2025, arXiv:2503.14476): [1 - 0.2, 1 + 0.28] by default. It acts
  from the second update of a step on (--num-mini-batches, --num-epochs).
- There is no KL penalty by default (`kl_coef` 0), and then no reference model is loaded.
- A reward that is not known (None) stays out of its group's mean and deviation, and nothing is learned from it.
- Every step proves the sync before it: if the engine's log-probabilities of the sampled tokens are further from the
  trainer's than `max_mismatch`, on average, the step raises MismatchError and updates nothing.

One step takes P prompts with G completions each, that is B = P * G rollouts of up to T tokens. Their rewards and
log-probabilities make a loss (objectives.py), and its gradients an update (learner.py).

Rollouts whose loss is 0, such as those of a group whose rewards are all equal, go through the model once, for the proof
and the metrics, and cost no backward pass.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge
from transformers.hf_argparser import HfArg

from .learner import LearnerConfig, PolicyLearner, Proof
from .lora import without_adapters
from .model import Model
from .objectives import ObjectiveConfig, advantages
from .rollout import Rollout, known_rewards, rollout_metrics


@dataclass
class GRPOConfig(ObjectiveConfig, LearnerConfig):
    """GRPO's options."""

    dynamic_sampling: Annotated[int, Ge(0)] = HfArg(
        default=0, help="rounds, at most, of replacing prompts whose rewards are all equal by others (DAPO)"
    )


class GRPOLearner(PolicyLearner):
    """A learner whose steps are GRPO's.

    `path` is a model or a checkpoint. The KL is measured to the model `initial` that the run began with, if `path` is a
    checkpoint; with adapters, to the model that they adapt.
    """

    def __init__(
        self,
        path: str,
        config: GRPOConfig,
        device: torch.device,
        seed: int = 0,
        steps: int | None = None,
        initial: str | None = None,
        proof: Proof | None = None,
    ):
        super().__init__(Model(path, config, device, learns=True, seed=seed), config, seed, steps, proof)
        self.reference = None
        if config.kl_coef and not self.model.adapters:
            self.reference = Model(initial or path, config, device, like=self.model)

    def learn(self, rollouts: list[Rollout], proof: list[Rollout] = ()) -> dict[str, float]:
        """One step on B rollouts, `group_size` of each prompt in a row. Returns its metrics.

        Raises MismatchError, before anything is updated, if the engine's log-probabilities are further from the
        trainer's than `max_mismatch` on average. Tokens that older weights sampled do not count for that; those of the
        rollouts in `proof` do as well.
        """
        config, rewards = self.config, known_rewards(rollouts)
        advantage = advantages(rewards, config.group_size, config.advantage)
        truncated = torch.tensor([rollout.truncated for rollout in rollouts])
        left_out = rewards.isnan() | truncated & config.mask_truncated_completions  # (DAPO's overlong filtering)
        several = config.num_epochs * config.num_mini_batches > 1
        scores = self.score(rollouts, proof) if several else None
        reference = self._reference_logprobs(rollouts) if config.kl_coef else None
        metrics = self._run_policy_updates(rollouts, advantage[:, None], left_out, scores, reference, proof)
        return rollout_metrics(rollouts, config.group_size) | metrics

    def make_exact(self, exactly: str) -> None:
        super().make_exact(exactly)
        if self.reference:
            self.reference.make_exact(exactly != "off")

    def _reference_logprobs(self, rollouts: list[Rollout]) -> torch.Tensor:
        if self.reference:
            return self.reference.score_all(rollouts)[0]
        with without_adapters(self.model.module):
            return self.model.score_all(rollouts)[0]
