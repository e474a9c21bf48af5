"""The learning step of on-policy distillation: a student learns from a teacher's opinion of each token it has sampled.

It is that of GRPO (grpo.py) with other advantages: minus the reverse KL of each token, log p_teacher - log p_student,
by the engines' log-probabilities (`reverse_kl` in objectives.py). They are not compared within a group: where the
teacher agrees with the student, there is nothing to learn. The clipped ratio, the importance weights and the proof of
each sync are GRPO's.

Only sampled tokens count, so a step needs one number a token from the teacher. With `reward_coef`, the advantages of
the rewards (`--advantage`) are added, times this, to those of all of a completion's tokens.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge

from ..flags import arg
from .grpo import GRPOLearner
from .layout import padded
from .objectives import ObjectiveConfig, reverse_kl
from .rollout import Rollout, known_rewards, samples_of


@dataclass
class DistillLossConfig(ObjectiveConfig):
    """The loss of distillation."""

    reward_coef: Annotated[float, Ge(0)] = arg(
        0.0, help="weight of the rewards' advantages, which are added to the teacher's; 0: rewards only measure"
    )


class DistillLearner(GRPOLearner):
    """A student, whose rollouts have `teacher_logprobs`. Those without a reward are learned from as well."""

    def learn(self, rollouts: list[Rollout], proof_rollouts: list[Rollout] = ()) -> dict[str, float]:
        """As `GRPOLearner.learn`. `distill/reverse_kl` is the mean over the tokens that the student sampled."""
        samples, owners = samples_of(rollouts)
        tensors = self._completion_tensors(samples)
        teacher = padded([own.teacher_logprobs for own in samples]).float()
        distances = reverse_kl(tensors["engine_logprobs"], teacher, tensors["mask"])
        of_rewards = self.advantages(known_rewards(rollouts))[owners, None]
        advantage = self.config.loss.reward_coef * of_rewards - distances
        metrics = self._learn(rollouts, advantage, torch.zeros(len(rollouts), dtype=torch.bool), proof_rollouts)
        mean = float(distances.sum()) / sum(rollout.length for rollout in rollouts)
        return metrics | {"distill/reverse_kl": mean}
