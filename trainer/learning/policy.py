"""A learner of the policy that an engine samples from: its step, and the proof of the sync before it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Literal

import numpy as np
import torch

from ..errors import MismatchError
from .config import LearnerConfig
from .layout import padded
from .learner import OVERFLOW, Learner
from .lora import without_adapters
from .model import Model
from .objectives import PolicyLossConfig, importance_weights, kl_estimate, loss_weights, token_losses
from .rollout import Rollout, SamplingMask, samples_of

MISMATCH_GROWTH = 3
WARM_UP_ROWS, WARM_UP_LENGTHS = 8, (24, 40)  # made-up rollouts, and two sizes of them: kernels are for any size


@dataclass(frozen=True)
class Proof:
    """What a script knows of its engine, and so what a mismatch means."""

    max_mismatch: float | None = None  # the largest that rounding explains in the script's precision
    exact: Literal["on", "auto", "off"] = "off"  # whether every token must have the engine's bits, or may
    workers: int = 1  # of an engine, which an exact trainer adds up as
    first_mismatch: float | None = None  # the largest of the first batch; later ones may have MISMATCH_GROWTH times its


@dataclass(eq=False)
class PolicyScores:
    """The policy's log-probabilities [B, T] of B rollouts, right-padded with zeros, on the CPU, and metrics."""

    logprobs: torch.Tensor
    metrics: dict[str, float]


def proves_sync(method: Callable) -> Callable:
    """A PolicyLearner's method that raises MismatchError. With `exact` "auto", it is called a second time then, with
    transformers' own kernels from now on: the engine's may be what takes log-probabilities away from the engine."""

    @wraps(method)
    def call(self, *args, **options):
        try:
            return method(self, *args, **options)
        except MismatchError as error:
            if self.exact != "auto":
                raise
            self._say(f"not exact, so the trainer computes with transformers' kernels from now on: {error}")
            self.exact = "off"
            for model in filter(None, (self.model, self.reference)):
                model.make_exact(0)
            return method(self, *args, **options)

    return call


class PolicyLearner(Learner):
    """A learner of the policy that an engine samples from. The engine's log-probabilities prove each sync."""

    def __init__(
        self,
        path: str,
        config: LearnerConfig,
        device: torch.device,
        seed: int = 0,
        steps: int | None = None,
        proof: Proof | None = None,
    ):
        super().__init__(path, config, device, seed, steps)
        self.proof, rounding = proof or Proof(), self.model.rounding
        self.reference: Model | None = None  # to which the loss has a KL
        self.exact = self.proof.exact
        self.reported = ""  # what was said of exactness: "equal", "different"
        if self.exact != "off":
            self.model.make_exact(self.proof.workers)
        self.first_mismatch = self.proof.first_mismatch if config.loss.max_mismatch is None else None
        self.max_mismatch, self.bound_remark = config.loss.max_mismatch or self.proof.max_mismatch, ""
        if config.loss.max_mismatch is None and self.max_mismatch and 2 * rounding > self.max_mismatch:
            self.max_mismatch = 2 * rounding
            self.bound_remark = f"\nbf16 moves the model's log-probabilities by {rounding:.2g} on average:"
            self.bound_remark += f" the bound of the mismatch is {self.max_mismatch:.2g}"

    def remarks(self) -> str:
        return super().remarks() + self.bound_remark

    def warm_up(self) -> None:
        """Pass made-up rollouts forwards and backwards, so that kernels are compiled while engines start and not in the
        first step. Nothing that a step learns from changes."""
        model, longest = self.model, self.model.longest_sequence
        vocabulary = model.module.config.get_text_config().vocab_size
        generator = torch.Generator().manual_seed(0)
        for length in WARM_UP_LENGTHS:
            for keeps_all in {False, model.computes_again}:  # as the first step computes, and as later ones may
                if keeps_all:
                    model.checkpointing.stop()
                ids = torch.randint(vocabulary, (WARM_UP_ROWS, 2, length), generator=generator).tolist()
                rollouts = [Rollout(ids[0][0], completion, [0.0] * length) for _, completion in ids]
                if model.is_cut:
                    counts = np.full(length, 2, np.int32)
                    masks = [SamplingMask(np.repeat(np.int32(own.completion_ids), 2), counts) for own in rollouts]
                    rollouts = [replace(own, sampling_mask=mask) for own, mask in zip(rollouts, masks, strict=True)]
                tensors = self._completion_tensors(rollouts) | {"left_out": torch.zeros(WARM_UP_ROWS, dtype=torch.bool)}
                tensors["advantage"] = torch.ones(WARM_UP_ROWS, 1)
                batch = self._rank_batch(rollouts, tensors, self._token_weights)
                self._backward(batch, lambda *passed: self._single_losses(*passed)[0])
                if keeps_all:
                    model.checkpointing.reset()
        self.optimizer.zero_grad(set_to_none=True)
        model.longest_sequence = longest
        if model.checkpointing:
            model.checkpointing.block_bytes = 0.0  # which the first step measures on sequences of its own

    @proves_sync
    def mismatch(self, rollouts: list[Rollout]) -> float:
        """Mean distance of the engine's log-probabilities from the trainer's. Raises MismatchError as `score` does."""
        return self._check_mismatch(self._score_mismatch(samples_of(rollouts)[0]))["logprobs/mismatch"]

    @proves_sync
    def score(self, rollouts: list[Rollout], proof_rollouts: list[Rollout] = ()) -> PolicyScores:
        """The policy's scores of these rollouts, which prove the last sync together with `proof_rollouts`: raises
        MismatchError if the engine's log-probabilities are further off than `max_mismatch` on average."""
        logprobs, entropies = self.model.score_all(rollouts, entropy=True)
        tensors = self._completion_tensors(rollouts)
        sums = self._mismatch_sums(logprobs, tensors)
        if proof_rollouts:
            sums = sums + self._score_mismatch(proof_rollouts)
        metrics = self._check_mismatch(sums)
        entropy = float((entropies * tensors["mask"]).sum() / tensors["mask"].sum())
        return PolicyScores(logprobs, metrics | {"entropy": entropy})

    def reference_logprobs(self, rollouts: list[Rollout]) -> torch.Tensor:
        """Log-probabilities [B, T] by the reference: a frozen model or, if there is none, this one without adapters."""
        if self.reference:
            return self.reference.score_all(rollouts)[0]
        with without_adapters(self.model.module):
            return self.model.score_all(rollouts)[0]

    def _score_mismatch(self, rollouts: list[Rollout]) -> torch.Tensor:
        """Score rollouts for their `_mismatch_sums`."""
        (logprobs,) = self.model.score_all(rollouts)
        return self._mismatch_sums(logprobs, self._completion_tensors(rollouts))

    def _mismatch_sums(self, logprobs: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """Sums [3] over the "current" tokens: the distances of these log-probabilities from the engine's, the number of
        tokens, and the number of tokens that differ at all."""
        distances = (logprobs - tensors["engine_logprobs"]).abs() * tensors["current"]
        return torch.stack([distances.sum(), tensors["current"].sum(), (distances != 0).sum()])

    def _check_mismatch(self, sums: torch.Tensor) -> dict[str, float]:
        """Metrics of these `_mismatch_sums`. Raises MismatchError if the mean distance exceeds `max_mismatch`, if there
        is no token and, with --exact on, if one differs."""
        total, tokens, different = sums.tolist()
        if not tokens:
            raise MismatchError("no token comes from the weights that the trainer holds: the last sync has no proof")
        mismatch = total / tokens
        if self.max_mismatch and math.isnan(mismatch):
            raise MismatchError(f"log-probabilities of engine or trainer are not numbers: {OVERFLOW}")
        bound = max(self.first_mismatch or 0, self.max_mismatch or 0)
        if bound and mismatch > bound:
            raise MismatchError(
                f"the engine's log-probabilities are {mismatch:.3g} from the trainer's on average, over the bound of"
                f" {bound:g}. The two compute different functions: these usually differ by the attention's"
                " implementation or soft-capping, the variant of GELU, or a scale that one side leaves out. If"
                " docs/guarantees.md says so of this family of models, --max-mismatch raises the bound"
            )
        if self.first_mismatch:
            self.max_mismatch = max(self.max_mismatch, min(self.first_mismatch, MISMATCH_GROWTH * mismatch))
            self.first_mismatch = None
        if self.exact == "off":
            return {"logprobs/mismatch": mismatch}
        self._report_exactness(tokens, different)
        return {"logprobs/mismatch": mismatch, "logprobs/different_tokens": different}

    def _report_exactness(self, tokens: float, different: float) -> None:
        """Say once that all tokens are equal, and once that some differ, which with --exact on is an error."""
        if not different and not self.reported:
            self.reported = "equal"
            self._say(f"exact: all {tokens:.0f} log-probabilities are the engine's, bit for bit")
        if not different or self.reported == "different":
            return
        difference = f"{different:.0f} of {tokens:.0f} log-probabilities are not the engine's bit for bit"
        if self.exact == "on":
            raise MismatchError(f"--exact on: at step {self.step + 1} {difference}")
        self.reported = "different"
        self._say(f"not exact: {difference}; importance weights correct for that")

    def _say(self, text: str) -> None:
        if self.model.rank == 0:
            print(f"step {self.step + 1}: {text}", flush=True)

    def _completion_tensors(self, rollouts: list[Rollout]) -> dict[str, torch.Tensor]:
        """Tensors [B, T], right-padded with zeros. "mask" is 1 for tokens that the policy sampled, "current" for those
        that this learner's version of the weights sampled."""
        current = [
            own.mask if own.versions is None else own.mask & (np.asarray(own.versions) == self.step) for own in rollouts
        ]
        rows = {"mask": [own.mask for own in rollouts], "engine_logprobs": [own.logprobs for own in rollouts]}
        return {name: padded(each).float() for name, each in (rows | {"current": current}).items()}

    def _run_policy_updates(
        self,
        rollouts: list[Rollout],
        advantage: torch.Tensor,
        left_out: torch.Tensor,
        scores: PolicyScores | None,
        reference_logprobs: torch.Tensor | None = None,
        proof_rollouts: list[Rollout] = (),
        owners: torch.Tensor | None = None,
    ) -> dict[str, float]:
        """All updates of a step. `advantage` is [B, 1] or [B, T]; completions that are `left_out` [B] weigh nothing.
        Those with the same number in `owners` [B] are samples of one rollout.

        The ratio is to the policy that gave these `scores`. None: the step has one update, whose own forward pass gives
        them, and proves the sync together with `proof_rollouts`.
        """
        tensors = self._completion_tensors(rollouts) | {"advantage": advantage.float(), "left_out": left_out}
        tensors["owners"] = torch.arange(len(rollouts)) if owners is None else owners
        if reference_logprobs is not None:
            tensors["reference_logprobs"] = reference_logprobs
        if scores is None:
            return self._run_single_update(rollouts, tensors, proof_rollouts)
        tensors["old_logprobs"] = scores.logprobs
        means = _token_means(tensors | {"mean_weights": tensors["mask"] / tensors["mask"].sum()}, self.config.loss)
        means = {name: float(mean) for name, mean in means.items()}
        return self._run_updates(rollouts, tensors, self._token_weights) | scores.metrics | means

    @proves_sync
    def _run_single_update(
        self, rollouts: list[Rollout], tensors: dict[str, torch.Tensor], proof_rollouts: list[Rollout]
    ) -> dict[str, float]:
        """A step's only update. Each rollout passes through the model once, which is still the policy that the step
        began with."""
        self.model.work.begin()
        batch, width = self._rank_batch(rollouts, tensors, self._token_weights), tensors["mask"].shape[1]
        passed = []  # log-probabilities and entropies, in the order of the batch's rows

        def losses(*micro_batch) -> tuple:
            losses, scores = self._single_losses(*micro_batch)
            passed.append(scores)
            return losses

        metrics = self._backward(batch, losses)
        # If nothing is learned, `_backward` has taken the first of these micro-batches.
        forward_only = batch.forward_only if batch.micro_batches else batch.forward_only[1:]
        with torch.no_grad(), self.model.computing():
            passed += [self.model.score(batch.rollouts[rows], width, entropy=True) for rows in forward_only]
        old_logprobs, entropies = map(torch.cat, zip(*passed, strict=True))
        tensors = batch.tensors | {"old_logprobs": old_logprobs, "entropies": entropies}
        rank_sums = self._mismatch_sums(old_logprobs, tensors)
        sums = torch.tensor(self.model.sum_over_ranks(*rank_sums))
        if proof_rollouts:
            sums = sums + self._score_mismatch(proof_rollouts)
        metrics |= self._check_mismatch(sums)  # before the weights change
        metrics["grad_norm"] = self._optimizer_step()
        means = _token_means(tensors, self.config.loss)
        return self._end_step(metrics | dict(zip(means, self.model.sum_over_ranks(*means.values()), strict=True)))

    def _single_losses(self, rollouts: list[Rollout], width: int, tensors: dict[str, torch.Tensor]) -> tuple:
        """As `_losses`, of the policy that the step began with; and its log-probabilities and entropies."""
        logprobs, entropies = self.model.score(rollouts, width, entropy=True)
        losses = self._policy_losses(logprobs, tensors | {"old_logprobs": logprobs.detach()})
        return losses, (logprobs.detach(), entropies)

    def _token_weights(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        of_loss = (self.config.loss, self.config.sampling.max_tokens, tensors.get("owners"))
        return loss_weights(tensors["mask"], tensors["advantage"], tensors["left_out"], *of_loss)

    def _losses(
        self, rollouts: list[Rollout], width: int, tensors: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return self._policy_losses(self.model.score(rollouts, width)[0], tensors)

    def _policy_losses(
        self, logprobs: torch.Tensor, tensors: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """As `_losses`, of tokens with these log-probabilities [b, width] by the policy that learns."""
        old_logprobs, engine_logprobs, config = tensors["old_logprobs"], tensors["engine_logprobs"], self.config.loss
        advantage, mask, reference = tensors["advantage"], tensors["mask"], tensors.get("reference_logprobs")
        losses, clipped = token_losses(logprobs, old_logprobs, engine_logprobs, advantage, mask, config, reference)
        approx_kl = kl_estimate(old_logprobs, logprobs.detach(), mask)
        return losses, {"clip_fraction": clipped.float(), "approx_kl": approx_kl}


def _token_means(tensors: dict[str, torch.Tensor], config: PolicyLossConfig) -> dict[str, torch.Tensor]:
    """Metrics of the policy that a step began with: sums over tokens, by their "mean_weights"."""
    old_logprobs = tensors["old_logprobs"]
    mask = tensors["mask"]
    importance, outside = importance_weights(old_logprobs, tensors["engine_logprobs"], mask, config)
    values = {"importance/mean": importance, "importance/clipped": outside}
    if "entropies" in tensors:
        values["entropy"] = tensors["entropies"]
    if "reference_logprobs" in tensors:
        values["kl"] = kl_estimate(old_logprobs, tensors["reference_logprobs"], mask)
    return {name: (value * tensors["mean_weights"]).sum() for name, value in values.items()}
