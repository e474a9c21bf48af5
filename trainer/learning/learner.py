"""A learner: a model, its optimizer, and the loop of updates that GRPO and PPO have in common.

A step learns from B rollouts of up to T tokens. It goes through them `--num-epochs` times, in `--num-mini-batches`
mini-batches, each of which makes one update of the weights. A mini-batch passes through the model in micro-batches.
Their size does not change its gradient: a token's weight in the loss depends on its mini-batch alone.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..errors import MismatchError, RunError
from .config import LearnerConfig
from .layout import as_tensor
from .lora import load_adapters, without_adapters
from .model import Model, RankBatch
from .objectives import PolicyLossConfig, importance_weights, kl_estimate, loss_weights, token_losses
from .rollout import Rollout
from .saving import load_state, write_model, write_state
from .sharding import Offload, stray_weights, whole

WARM_UP_ROWS, WARM_UP_LENGTHS = 8, (24, 40)  # made-up rollouts, and two sizes of them: kernels are for any size
MERGED = "merged"  # a checkpoint's folder with the whole model, of save_merged
LEARNING_RATE, ADAPTERS_LEARNING_RATE = 1e-6, 1e-5  # adapters need ten times as much (LoRA Without Regret, 2025)


class Learner:
    """A model that learns, or one rank of it. All ranks call every method together.

    A subclass has an objective: `_losses`. `steps` is the number of steps in the run, which linear and cosine schedules
    of the learning rate need.
    """

    def __init__(self, model: Model, config: LearnerConfig, seed: int = 0, steps: int | None = None):
        self.model, self.config, self.seed, self.step = model, config, seed, 0
        self.parameters = [p for p in model.module.parameters() if p.requires_grad]  # what learns
        self.rate = rate_schedule(config, steps)
        self.optimizer = torch.optim.AdamW(  # fused, to make no temporary copies of the weights
            self.parameters,
            lr=self.rate(0),
            betas=(0.9, 0.95),
            eps=config.optimizer.adam_eps,
            weight_decay=0.0,
            fused=True,
        )
        self.offload = Offload(self.optimizer)
        self.extra_state: dict[str, float] = {}  # what else a subclass keeps in checkpoints, by name

    def remarks(self) -> str:
        """Lines to print at the start of a run."""
        return self.model.remarks()

    def release_memory(self, offload_optimizer: bool = False) -> None:
        """Free the gradients and torch's cached memory. `offload_optimizer` moves the optimizer's state to the host."""
        self.optimizer.zero_grad(set_to_none=True)
        if offload_optimizer:
            self.offload.to_host()
        self.model.release_memory()

    def save(self, folder: Path) -> None:
        """Write the model or its adapters, and the tokenizer, in Hugging Face format, and what `load_state` needs.

        All ranks call this, and each writes files of its own. Any number of ranks can go on from them.
        """
        model, model_folder = self.model, folder
        if model.adapters:
            model_folder = folder / MERGED if self.config.model.save_merged else None
            if model.rank == 0:
                state = model.module.state_dict()
                adapters = {name: tensor for name, tensor in state.items() if not isinstance(tensor, DTensor)}
                model.module.save_pretrained(folder, state_dict=adapters)  # without it, this would gather shards
                model.tokenizer.save_pretrained(folder)
        if model_folder:
            write_model(model.module, model.named_tensors(), model.processor, model_folder)
        write_state(folder, self.optimizer, step=self.step, **self.extra_state)

    def load_state(self, folder: Path) -> None:
        """Load adapters, the optimizer's state and the step from the checkpoint that the learner was made from."""
        if self.model.adapters:
            load_adapters(self.model.module, folder)
        state = load_state(folder, self.parameters, self.optimizer)
        self.step = state["step"]
        self.extra_state |= {name: state[name] for name in self.extra_state if name in state}
        if self.config.optimizer.offload_optimizer:
            self.offload.to_host()

    def _run_updates(
        self, rollouts: list[Rollout], tensors: dict[str, torch.Tensor], token_weights: Callable
    ) -> dict[str, float]:
        """All updates of a step on B rollouts. Returns the means of their metrics over the updates.

        `tensors` are [B, ...]; "mask" [B, T] is 1 for the tokens that count. `token_weights(tensors)` gives the weights
        [b, T] of a mini-batch's tokens in its loss.
        """
        totals, updates = {}, 0
        for rows in self._mini_batches(len(rollouts)):
            mini_batch = {name: tensor[rows] for name, tensor in tensors.items()}
            batch = self._rank_batch([rollouts[row] for row in rows], mini_batch, token_weights)
            metrics = self._backward(batch, self._losses) | {"grad_norm": self._optimizer_step()}
            totals = {name: totals.get(name, 0.0) + value for name, value in metrics.items()}
            updates += 1
        return self._end_step({name: total / updates for name, total in totals.items()})

    def _end_step(self, metrics: dict[str, float]) -> dict[str, float]:
        if (remark := self.model.settle_checkpointing()) and self.model.rank == 0:
            print(f"step {self.step + 1}: {remark}", flush=True)
        self.step += 1
        return metrics | {"learning_rate": self.optimizer.param_groups[0]["lr"]}

    def _mini_batches(self, count: int) -> Iterator[list[int]]:
        """The rows of each mini-batch of each epoch, in an order that the seed and the step determine."""
        mini_batches = min(self.config.optimizer.num_mini_batches, count)
        for epoch in range(self.config.optimizer.num_epochs):
            order = random.Random(f"{self.seed} {self.step} {epoch}").sample(range(count), count)
            yield from (order[i::mini_batches] for i in range(mini_batches))

    def _rank_batch(
        self, rollouts: list[Rollout], tensors: dict[str, torch.Tensor], token_weights: Callable
    ) -> RankBatch:
        """This rank's part of a mini-batch, with its tokens' "loss_weights" and their "mean_weights" in metrics."""
        mask = tensors["mask"]
        tensors = tensors | {"loss_weights": token_weights(tensors), "mean_weights": mask / mask.sum()}
        tensors = {name: tensor.to(self.model.device) for name, tensor in tensors.items()}
        return self.model.rank_batch(rollouts, tensors["loss_weights"].any(1).tolist(), tensors)

    def _backward(self, batch: RankBatch, losses_of: Callable) -> dict[str, float]:
        """Compute the gradient of a mini-batch's loss, by a function like `_losses`. Returns the loss, and the means of
        the metrics over the mini-batch's tokens. Rollouts that are not learned from add 0."""
        model, width = self.model, batch.tensors["mask"].shape[1]
        self.optimizer.zero_grad(set_to_none=True)
        sums, learns = {}, bool(batch.micro_batches)
        # If nothing is learned, make gradients of 0: momentum moves the weights all the same.
        micro_batches = batch.micro_batches or batch.forward_only[:1]
        with model.computing():
            for micro_batch in micro_batches:
                model.keep_gathered(True, micro_batch is not micro_batches[-1])
                tensors = {name: tensor[micro_batch] for name, tensor in batch.tensors.items()}
                losses, others = losses_of(batch.rollouts[micro_batch], width, tensors)
                loss = (losses * tensors["loss_weights"]).sum()
                (loss * model.ranks).backward()  # FSDP averages the gradients of the ranks, whose losses add up
                means = {name: (values * tensors["mean_weights"]).sum() * learns for name, values in others.items()}
                for name, value in ({"loss": loss} | means).items():
                    sums[name] = sums.get(name, 0.0) + value.detach()  # a tensor: reading it would wait for the GPU
        model.keep_gathered(False, False)  # a pass without a backward would leave weights that the update makes old
        return dict(zip(sums, model.sum_over_ranks(*sums.values()), strict=True))

    def _losses(
        self, rollouts: list[Rollout], width: int, tensors: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The losses of the tokens of a micro-batch of b rollouts with these tensors, and metrics: [b, width] each."""
        raise NotImplementedError

    def _optimizer_step(self) -> float:
        """Clip the gradients, and update the weights. Returns the gradients' norm before clipping. Raises
        RunError, before anything is updated, if it is not finite: the update would make every weight a NaN; or if the
        model computes with a weight that the optimizer does not update."""
        if stray := stray_weights(self.model.module, self.parameters):
            raise RunError(f"{stray[0]} would not learn: the model computes with another tensor than the optimizer has")
        if self.model.adapters and self.model.ranks > 1:  # every rank has whole adapters, which FSDP leaves alone
            gradients = [parameter.grad for parameter in self.parameters]
            total = torch.nn.utils.parameters_to_vector(gradients)
            dist.all_reduce(total)
            torch.nn.utils.vector_to_parameters(total / self.model.ranks, gradients)
        norm = whole(torch.nn.utils.clip_grad_norm_(self.parameters, self.config.optimizer.max_grad_norm))
        if not norm.isfinite():
            raise RunError(f"step {self.step + 1}: the gradient is not finite: {self._overflow_cause()}")
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(self.step)
        self.offload.to_device()
        self.optimizer.step()
        if self.config.optimizer.offload_optimizer:
            self.offload.to_host()
        return float(norm)

    def _overflow_cause(self) -> str:
        """What may have made a number that is not finite, and what to do about it."""
        if self.optimizer.state:  # there was an update
            return "if the last update was too large, lower --learning-rate"
        return (
            "nothing was learned yet, and the loaded weights are finite, so look for huge rewards, and for prompts that"
            " start with the padding token, whose embedding is zero"
        )


@dataclass(frozen=True)
class Proof:
    """What a script knows of its engine, and so what a mismatch means."""

    max_mismatch: float | None = None  # the largest that rounding explains in the script's precision
    exact: Literal["on", "auto", "off"] = "off"  # whether every token must have the engine's bits, or may
    workers: int = 1  # of an engine, which an exact trainer adds up as


@dataclass(eq=False)
class PolicyScores:
    """The policy's log-probabilities [B, T] of B rollouts, right-padded with zeros, on the CPU, and metrics."""

    logprobs: torch.Tensor
    metrics: dict[str, float]


def falls_back(method: Callable) -> Callable:
    """A PolicyLearner's method that proves the last sync. With `exact` "auto", it is called again, with transformers'
    own kernels from now on, if the engine's take log-probabilities further from the engine than `max_mismatch`."""

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
        self, model: Model, config: LearnerConfig, seed: int = 0, steps: int | None = None, proof: Proof | None = None
    ):
        super().__init__(model, config, seed, steps)
        self.proof = proof or Proof()
        self.reference: Model | None = None  # to which the loss has a KL
        self.exact = self.proof.exact
        self.reported = ""  # what was said of exactness: "equal", "different"
        if self.exact != "off":
            model.make_exact(self.proof.workers)
        self.example = ""  # a token whose log-probability is not the engine's, as the end of a message
        self.max_mismatch, self.bound_remark = config.loss.max_mismatch or self.proof.max_mismatch, ""
        if config.loss.max_mismatch is None and self.max_mismatch and 2 * model.rounding > self.max_mismatch:
            self.max_mismatch = 2 * model.rounding
            self.bound_remark = f"\nbf16 moves the model's log-probabilities by {model.rounding:.2g} on average:"
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
                tensors = self._completion_tensors(rollouts) | {"left_out": torch.zeros(WARM_UP_ROWS, dtype=torch.bool)}
                tensors["advantage"] = torch.ones(WARM_UP_ROWS, 1)
                batch = self._rank_batch(rollouts, tensors, self._token_weights)
                self._backward(batch, lambda *passed: self._single_losses(*passed)[0])
                if keeps_all:
                    model.start_checkpointing()
        self.optimizer.zero_grad(set_to_none=True)
        model.longest_sequence = longest
        if model.checkpointing:
            model.checkpointing.block_bytes = 0.0  # which the first step measures on sequences of its own

    @falls_back
    def mismatch(self, rollouts: list[Rollout]) -> float:
        """Mean distance of the engine's log-probabilities from the trainer's. Raises MismatchError as `score` does."""
        return self._check_mismatch(self._score_mismatch(rollouts))["logprobs/mismatch"]

    @falls_back
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
        if self.exact != "off" and len(different := distances.nonzero()):
            row, column = different[0].tolist()
            completion, distance = int(tensors["row"][row]), float(distances[row, column])
            self.example = f": token {column} of completion {completion} by {distance:.2g}, for one"
        return torch.stack([distances.sum(), tensors["current"].sum(), (distances != 0).sum()])

    def _check_mismatch(self, sums: torch.Tensor) -> dict[str, float]:
        """Metrics of these `_mismatch_sums`. Raises MismatchError if the mean distance exceeds `max_mismatch`, if there
        is no token and, with --exact on, if one differs."""
        total, tokens, different = sums.tolist()
        if not tokens:
            raise MismatchError("no token comes from the weights that the trainer holds: the last sync has no proof")
        mismatch = total / tokens
        if self.max_mismatch and not mismatch <= self.max_mismatch:  # a NaN does not pass
            if math.isnan(mismatch):
                cause = self._overflow_cause()
                raise MismatchError(f"log-probabilities of engine or trainer are not numbers: {cause}")
            raise MismatchError(
                f"the engine's log-probabilities are {mismatch:.3g} from the trainer's on average, over the bound of"
                f" {self.max_mismatch:g}. The two compute different functions: these usually differ by the attention's"
                " implementation or soft-capping, the variant of GELU, or a scale that one side leaves out. If"
                " docs/guarantees.md says so of this family of models, --max-mismatch raises the bound"
            )
        if self.exact == "off":
            return {"logprobs/mismatch": mismatch}
        if not different and not self.reported:
            self.reported = "equal"
            self._say(f"exact: all {tokens:.0f} log-probabilities are the engine's, bit for bit")
        if different and self.reported != "different":
            examples = [self.example]
            if self.model.ranks > 1:  # the token may be on another rank
                examples *= self.model.ranks
                dist.all_gather_object(examples, self.example)
            difference = f"{different:.0f} of {tokens:.0f} log-probabilities are not the engine's bit for bit"
            difference += next(filter(None, examples), "")
            if self.exact == "on":
                raise MismatchError(f"--exact on: at step {self.step + 1} {difference}")
            self.reported = "different"
            self._say(f"not exact: {difference}; importance weights correct for that")
        return {"logprobs/mismatch": mismatch, "logprobs/different_tokens": different}

    def _say(self, text: str) -> None:
        if self.model.rank == 0:
            print(f"step {self.step + 1}: {text}", flush=True)

    def _completion_tensors(self, rollouts: list[Rollout]) -> dict[str, torch.Tensor]:
        """Tensors [B, T], right-padded with zeros, and the number of each "row" [B]. "mask" is 1 for tokens that the
        policy sampled, "current" for those that this learner's version of the weights sampled."""
        logprobs = [as_tensor(rollout.logprobs).float() for rollout in rollouts]
        masks = [as_tensor(rollout.mask).float() for rollout in rollouts]
        current = [
            mask if rollout.versions is None else mask * as_tensor(rollout.versions).eq(self.step)
            for mask, rollout in zip(masks, rollouts, strict=True)
        ]
        tensors = {"mask": masks, "engine_logprobs": logprobs, "current": current}
        pad = torch.nn.utils.rnn.pad_sequence
        padded = {name: pad(rows, batch_first=True) for name, rows in tensors.items()}
        return padded | {"row": torch.arange(len(rollouts))}

    def _run_policy_updates(
        self,
        rollouts: list[Rollout],
        advantage: torch.Tensor,
        left_out: torch.Tensor,
        scores: PolicyScores | None,
        reference_logprobs: torch.Tensor | None = None,
        proof_rollouts: list[Rollout] = (),
    ) -> dict[str, float]:
        """All updates of a step. `advantage` is [B, 1] or [B, T]; completions that are `left_out` [B] weigh nothing.

        The ratio is to the policy that gave these `scores`. None: the step has one update, whose own forward pass gives
        them, and proves the sync together with `proof_rollouts`.
        """
        tensors = self._completion_tensors(rollouts) | {"advantage": advantage.float(), "left_out": left_out}
        if reference_logprobs is not None:
            tensors["reference_logprobs"] = reference_logprobs
        if scores is None:
            return self._run_single_update(rollouts, tensors, proof_rollouts)
        tensors["old_logprobs"] = scores.logprobs
        means = _token_means(tensors | {"mean_weights": tensors["mask"] / tensors["mask"].sum()}, self.config.loss)
        means = {name: float(mean) for name, mean in means.items()}
        return self._run_updates(rollouts, tensors, self._token_weights) | scores.metrics | means

    @falls_back
    def _run_single_update(
        self, rollouts: list[Rollout], tensors: dict[str, torch.Tensor], proof_rollouts: list[Rollout]
    ) -> dict[str, float]:
        """A step's only update. Each rollout passes through the model once, which is still the policy that the step
        began with."""
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
        max_tokens = self.config.sampling.max_tokens
        return loss_weights(tensors["mask"], tensors["advantage"], tensors["left_out"], self.config.loss, max_tokens)

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


def rate_schedule(config: LearnerConfig, steps: int | None) -> Callable[[int], float]:
    """The learning rate as a function of the step (the first is 0), by a schedule of transformers.

    It depends on the step alone, so that a checkpoint need not have it: a run resumed with another rate, schedule or
    number of steps goes on as a run that had them from its start.
    """
    from transformers import get_scheduler

    rate, optimizer = learning_rate(config), config.optimizer
    name = "constant_with_warmup" if optimizer.lr_scheduler == "constant" else optimizer.lr_scheduler
    any_optimizer = torch.optim.SGD([torch.zeros(1)], lr=rate)
    (factor,) = get_scheduler(name, any_optimizer, optimizer.warmup_steps, steps).lr_lambdas
    return lambda step: rate * factor(step)


def learning_rate(config: LearnerConfig) -> float:
    """The learning rate that was given, or the default."""
    default = ADAPTERS_LEARNING_RATE if config.model.lora_rank else LEARNING_RATE
    return default if config.optimizer.learning_rate is None else config.optimizer.learning_rate
