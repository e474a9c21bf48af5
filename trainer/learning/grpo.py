"""The learning step of GRPO and its near relatives.

It differs from textbook GRPO (Shao et al. 2024, arXiv:2402.03300) in six points:

- The engine samples and the trainer learns, so their log-probabilities may differ. By default, each token's loss is
  weighted by the truncated importance ratio min(p_trainer / p_engine, `importance_cap`).
- The clip range is asymmetric (clip-higher, Yu et al. 2025, arXiv:2503.14476): [1 - 0.2, 1 + 0.28] by default. It acts
  from the second update of a step on (--num-mini-batches, --num-epochs).
- The loss is the mean over all tokens of the batch, not over each completion's tokens first (`--loss dapo`).
- There is no KL penalty by default (`kl_coef` 0), and then no reference model is loaded.
- An unknown reward (None) stays out of its group's mean and deviation, and nothing is learned from it.
- Every step proves the sync before it: if the engine's log-probabilities of the sampled tokens are further from the
  trainer's than `max_mismatch` on average, the step raises MismatchError and updates nothing.

One step takes P prompts with G completions each: B = P * G rollouts of up to T tokens. objectives.py makes a loss of
their rewards and log-probabilities, and learner.py updates the weights by its gradient. A rollout of an agent may have
several samples, each a prompt and a completion: they share its advantage.

Rollouts whose loss has no gradient, such as those of a group with equal rewards, pass through the model once, for the
proof and the metrics, without a backward pass.
"""

import torch

from .config import LearnerConfig
from .model import Model
from .objectives import advantages
from .policy import PolicyLearner
from .rollout import Rollout, known_rewards, rollout_metrics, samples_of


class GRPOLearner(PolicyLearner):
    """A policy that learns by GRPO.

    With a checkpoint, `initial` is the model that the run began with. The KL is to that model; with adapters, to the
    model that they adapt.
    """

    def __init__(
        self, path: str, config: LearnerConfig, device: torch.device, *args, initial: str | None = None, **options
    ):
        super().__init__(path, config, device, *args, **options)
        if config.loss.kl_coef and not self.model.adapters:
            self.reference = Model(initial or path, config, device, like=self.model)
        if device.type == "cuda":  # nothing is compiled for a CPU
            self.warm_up()

    def learn(self, rollouts: list[Rollout], proof_rollouts: list[Rollout] = ()) -> dict[str, float | list[float]]:
        """One step on B rollouts, `group_size` of each prompt in a row. Returns its metrics, and each rollout's
        "advantage".

        Raises MismatchError, before anything is updated, if the engine's log-probabilities are further from the
        trainer's than `max_mismatch` on average. Tokens that older weights sampled do not count there; tokens of
        `proof_rollouts`, from which nothing is learned, do.
        """
        rewards = known_rewards(rollouts)
        advantage = self.advantages(rewards)
        of_samples = advantage[samples_of(rollouts)[1], None]
        metrics = self._learn(rollouts, of_samples, rewards.isnan(), proof_rollouts)
        return metrics | {"advantage": advantage.tolist()}

    def advantages(self, rewards: torch.Tensor) -> torch.Tensor:
        """Advantages [B] of rewards [B]."""
        return advantages(rewards, self.config.sampling.group_size, self.config.loss.advantage)

    def _learn(
        self, rollouts: list[Rollout], advantage: torch.Tensor, unknown: torch.Tensor, proof_rollouts: list[Rollout]
    ) -> dict[str, float]:
        """One step with these advantages, [S, 1] or [S, T] of the rollouts' samples. Some rollouts [B] have none."""
        loss, optimizer = self.config.loss, self.config.optimizer
        truncated = torch.tensor([rollout.truncated for rollout in rollouts])
        samples, owners = samples_of(rollouts)
        left_out = (unknown | truncated & loss.mask_truncated_completions)[owners]  # (DAPO's overlong filtering)
        several_updates = optimizer.num_epochs * optimizer.num_mini_batches > 1
        scores = self.score(samples, proof_rollouts) if several_updates else None
        reference = self.reference_logprobs(samples) if loss.kl_coef else None
        metrics = self._run_policy_updates(samples, advantage, left_out, scores, reference, proof_rollouts, owners)
        return rollout_metrics(rollouts, self.config.sampling.group_size) | metrics
