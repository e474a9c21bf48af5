"""A learner: a model, its optimizer, and the loop of updates that GRPO and PPO share.

A step learns from B rollouts of up to T tokens. `--num-epochs` times it goes through them, in `--num-mini-batches`
parts; each part makes one update of the weights. Each token has a weight that depends on its mini-batch alone, so the
size of the micro-batches, in which a mini-batch passes through the model, does not change its gradient.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.distributed as dist
from annotated_types import Ge, Gt
from torch.distributed.tensor import DTensor
from transformers.hf_argparser import HfArg

from ..errors import DivergenceError, MismatchError
from .layout import as_tensor
from .lora import load_adapters
from .model import Model, ModelConfig, Share
from .objectives import PolicyLossConfig, kl_estimate, loss_weights, token_importance, token_losses
from .rollout import Rollout
from .saving import load_state, write_model, write_state
from .sharding import Offload, whole, whole_gradients_fit

MERGED = "merged"  # a checkpoint's folder with the whole model, of --save-merged
LEARNING_RATE, ADAPTERS_LEARNING_RATE = 1e-6, 1e-5  # adapters want ten times as much (LoRA Without Regret, 2025)


@dataclass
class LearnerConfig(ModelConfig):
    """How a model learns: the optimizer and its updates."""

    learning_rate: Annotated[float | None, Gt(0)] = HfArg(
        default=None, help="AdamW's learning rate (default: 1e-6; adapters: 1e-5; the built-in model: 3e-3)"
    )
    adam_eps: Annotated[float, Gt(0)] = HfArg(
        default=1e-15, help="AdamW's epsilon; the default is ScaleRL's, arXiv:2510.13786"
    )
    lr_scheduler: Literal["constant", "linear", "cosine"] = HfArg(
        default="constant", help="the learning rate after the warm-up; linear and cosine reach 0 at the end of the run"
    )
    warmup_steps: Annotated[int, Ge(0)] = HfArg(default=0, help="first steps, in which the learning rate rises from 0")
    max_grad_norm: Annotated[float, Gt(0)] = HfArg(
        default=1.0, help="largest norm of a gradient: larger ones are scaled down"
    )
    num_epochs: Annotated[int, Ge(1)] = HfArg(default=1, help="times that a step learns from all its rollouts")
    num_mini_batches: Annotated[int, Ge(1)] = HfArg(default=1, help="mini-batches of an epoch; each makes one update")
    offload_optimizer: bool = HfArg(default=False, help="keep the optimizer's state in host memory between updates")
    max_mismatch: Annotated[float | None, Gt(0)] = HfArg(
        default=None,
        help="bound of the mean |Δ logprob| between engine and trainer, above which the run ends (default: the"
        " script's, or twice what bf16 rounds, if that is more)",
    )


class Learner:
    """A model that learns, or one rank of it: every method runs on all ranks together.

    A subclass has an objective: `_losses`. `steps` are the run's: a schedule of the learning rate that ends wants to
    know when.
    """

    def __init__(self, model: Model, config: LearnerConfig, seed: int = 0, steps: int | None = None):
        self.model, self.config, self.seed, self.step = model, config, seed, 0
        self.parameters = model.adapters or list(model.module.parameters())  # what learns
        self.rate = rate_schedule(config, steps)
        self.optimizer = torch.optim.AdamW(  # fused: it makes no temporary copies of the weights
            self.parameters, lr=self.rate(0), betas=(0.9, 0.95), eps=config.adam_eps, weight_decay=0.0, fused=True
        )
        self.offload = Offload(self.optimizer)
        self.own_state: dict[str, float] = {}  # of a subclass: what else a checkpoint keeps, by name

    def remarks(self) -> str:
        """Lines to print at the start of a run."""
        return self.model.remarks()

    def release_memory(self, offload_optimizer: bool = False) -> None:
        """Free what the next `learn` makes anew; with `offload_optimizer`, its state moves to host memory."""
        self.optimizer.zero_grad(set_to_none=True)
        if offload_optimizer:
            self.offload.to_host()
        self.model.release_memory()

    def save(self, folder: Path) -> None:
        """Write the model or its adapters, and the tokenizer, in Hugging Face format, and beside them what `load_state`
        needs. All ranks call this; each writes its part. Any number of ranks can go on from it."""
        model, whole_model = self.model, folder
        if model.adapters:
            whole_model = folder / MERGED if self.config.save_merged else None
            if model.rank == 0:
                state = model.module.state_dict()
                adapters = {name: tensor for name, tensor in state.items() if not isinstance(tensor, DTensor)}
                model.module.save_pretrained(folder, state_dict=adapters)  # which would gather shards
                model.tokenizer.save_pretrained(folder)
        if whole_model:
            write_model(model.module, model.named_tensors(), model.tokenizer, whole_model)
        write_state(folder, self.optimizer, step=self.step, **self.own_state)

    def load_state(self, folder: Path) -> None:
        """Go on from a checkpoint whose model this learner was made from: adapters, optimizer, step."""
        if self.model.adapters:
            load_adapters(self.model.module, folder)
        state = load_state(folder, self.parameters, self.optimizer)
        self.step = state["step"]
        self.own_state |= {name: state[name] for name in self.own_state if name in state}
        if self.config.offload_optimizer:
            self.offload.to_host()

    def _learn(self, rollouts: list[Rollout], tensors: dict[str, torch.Tensor], weigh: Callable) -> dict[str, float]:
        """All updates of a step, by these tensors [B, ...], of which "mask" [B, T] is 1 for the tokens that count.

        `weigh(tensors)` gives the weights [b, T] of a mini-batch's tokens in its loss. Returns the means over the
        updates of what `_losses` returns, and of "grad_norm".
        """
        totals, updates = {}, 0
        for rows in self._mini_batches(len(rollouts)):
            share = self._share([rollouts[row] for row in rows], {name: t[rows] for name, t in tensors.items()}, weigh)
            sums = self._gradients(share) | {"grad_norm": self._update()}
            totals = {name: totals.get(name, 0.0) + value for name, value in sums.items()}
            updates += 1
        return self._finish({name: total / updates for name, total in totals.items()})

    def _finish(self, metrics: dict[str, float]) -> dict[str, float]:
        self.step += 1
        return metrics | {"learning_rate": self.optimizer.param_groups[0]["lr"]}

    def _mini_batches(self, count: int) -> Iterator[list[int]]:
        """The rows of each mini-batch of each epoch, in an order that the seed and the step settle."""
        parts = min(self.config.num_mini_batches, count)
        for epoch in range(self.config.num_epochs):
            order = random.Random(f"{self.seed} {self.step} {epoch}").sample(range(count), count)
            yield from (order[i::parts] for i in range(parts))

    def _share(self, rollouts: list[Rollout], tensors: dict[str, torch.Tensor], weigh: Callable) -> Share:
        """This rank's part of a mini-batch, with the "weights" of its tokens in its loss and in its "means"."""
        tensors = tensors | {"weights": weigh(tensors), "means": tensors["mask"] / tensors["mask"].sum().clamp(min=1)}
        tensors = {name: tensor.to(self.model.device) for name, tensor in tensors.items()}
        return self.model.share(rollouts, tensors["weights"].any(1).tolist(), tensors)

    def _gradients(self, share: Share) -> dict[str, float]:
        """Make the gradient of a mini-batch's loss. Returns the loss, and what else `_losses` returns as means over all
        tokens that count; tokens without a weight add 0."""
        model, width = self.model, share.tensors["mask"].shape[1]
        reduce_once = (
            model.ranks > 1 and model.sum(whole_gradients_fit(self.parameters, model.device))[0] == model.ranks
        )
        self.optimizer.zero_grad(set_to_none=True)
        sums = {}
        parts = share.learned or share.others[:1]  # momentum moves the weights even where all gradients are 0
        with model.computing():
            for part in parts:
                if model.ranks > 1:
                    model.module.set_requires_gradient_sync(part is parts[-1] or not reduce_once)
                tensors = {name: tensor[part] for name, tensor in share.tensors.items()}
                losses = self._losses(share.rollouts[part], width, tensors)
                loss = (losses.pop("loss") * tensors["weights"]).sum()
                (loss * model.ranks).backward()  # FSDP averages the gradients of the ranks, whose losses add up
                own = {"loss": loss} | {name: (values * tensors["means"]).sum() for name, values in losses.items()}
                # Tensors: reading them would wait for the GPU.
                sums = {name: sums.get(name, 0.0) + value.detach() for name, value in own.items()}
        return dict(zip(sums, model.sum(*sums.values()), strict=True))

    def _losses(self, rollouts: list[Rollout], width: int, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The "loss" and metrics, [b, T] each, of a micro-batch of b rollouts with these tensors."""
        raise NotImplementedError

    def _update(self) -> float:
        """An optimizer step with the gradients that there are, clipped. Returns their norm. Raises DivergenceError."""
        if self.model.adapters and self.model.ranks > 1:  # every rank has all of them: FSDP leaves them alone
            gradients = [parameter.grad for parameter in self.parameters]
            total = torch.nn.utils.parameters_to_vector(gradients)
            dist.all_reduce(total)
            torch.nn.utils.vector_to_parameters(total / self.model.ranks, gradients)
        norm = whole(torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm))
        if not norm.isfinite():
            raise DivergenceError(f"step {self.step + 1}: the gradient is not finite; lower --learning-rate")
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(self.step)
        self.offload.to_device()
        self.optimizer.step()
        if self.config.offload_optimizer:
            self.offload.to_host()
        return float(norm)


@dataclass(frozen=True)
class Proof:
    """What a script knows of its engine, and so what a mismatch means."""

    max_mismatch: float | None = None  # that rounding explains in the script's precision
    weights_proven: bool = False  # after every sync, by digests


@dataclass(eq=False)
class PolicyScores:
    """What one pass through the policy gives for B rollouts: [B, T] each, right-padded with zeros, on the CPU."""

    logprobs: torch.Tensor
    entropies: torch.Tensor
    reference_logprobs: torch.Tensor | None = None  # by the model that adapters adapt, where that is the reference
    metrics: dict[str, float] | None = None


class PolicyLearner(Learner):
    """A learner of the policy that an engine samples from. The engine's log-probabilities prove each sync."""

    def __init__(
        self, model: Model, config: LearnerConfig, seed: int = 0, steps: int | None = None, proof: Proof | None = None
    ):
        super().__init__(model, config, seed, steps)
        self.proof, self.exactly = proof or Proof(), "off"
        self.said, self.where = False, ""  # that a token differs, and which one
        self.max_mismatch = config.max_mismatch
        if self.max_mismatch is None and self.proof.max_mismatch is not None:
            self.max_mismatch = max(self.proof.max_mismatch, 2 * model.rounding)

    def remarks(self) -> str:
        text = super().remarks()
        if self.max_mismatch == 2 * self.model.rounding:
            text += f"\nbf16 moves the model's log-probabilities by {self.model.rounding:.2g} on average:"
            text += f" the bound of the mismatch is {self.max_mismatch:.2g}"
        return text

    def mismatch(self, rollouts: list[Rollout]) -> float:
        """Mean distance of the engine's log-probabilities from the trainer's. Raises MismatchError as `learn` does."""
        return self._prove(self._distance(rollouts))["logprobs/mismatch"]

    def make_exact(self, exactly: Literal["on", "auto", "off"]) -> None:
        """From now on, compute what the engine computes, bit for bit, or as transformers does ("off").

        With "on", a token whose log-probability is another than the engine's is a MismatchError. With "auto" it is said
        once, and importance weights correct for it.
        """
        self.exactly = exactly
        self.model.make_exact(exactly != "off")

    def score(self, rollouts: list[Rollout], proof: list[Rollout] = ()) -> PolicyScores:
        """The policy's scores of these rollouts, which prove the last sync, with those of `proof`: raises MismatchError
        if the engine's log-probabilities are further off than `max_mismatch` on average."""
        logprobs, entropies = self.model.score_all(rollouts, entropy=True)
        tensors = self._completion_tensors(rollouts)
        distance = self._compare(logprobs, tensors)
        metrics = self._prove(distance + self._distance(proof) if proof else distance)
        entropy = float((entropies * tensors["mask"]).sum() / tensors["mask"].sum())
        return PolicyScores(logprobs, entropies, metrics=metrics | {"entropy": entropy})

    def _distance(self, rollouts: list[Rollout]) -> torch.Tensor:
        tensors, (logprobs,) = self._completion_tensors(rollouts), self.model.score_all(rollouts)
        return self._compare(logprobs, tensors)

    def _compare(self, logprobs: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """Of the tokens that this learner's version of the weights has sampled: the sum of the distances of these
        log-probabilities from the engine's, how many tokens there are, and how many of them differ at all."""
        distances = (logprobs - tensors["engine_logprobs"]).abs() * tensors["current"]
        if self.exactly != "off" and len(found := distances.nonzero()):
            row, column = found[0].tolist()
            completion, by = int(tensors["row"][row]), float(distances[row, column])
            self.where = f": token {column} of completion {completion} by {by:.2g}, for one"
        return torch.stack([distances.sum(), tensors["current"].sum(), (distances != 0).sum()])

    def _prove(self, distance: torch.Tensor) -> dict[str, float]:
        """Metrics of the distance, as `_compare` returns it. Raises MismatchError if its mean is over the bound."""
        total, tokens, different = distance.tolist()
        if not tokens:
            raise MismatchError("no token comes from the weights that the trainer holds: the last sync has no proof")
        mismatch = total / tokens
        if self.max_mismatch and not mismatch <= self.max_mismatch:  # a NaN does not pass
            if self.proof.weights_proven:
                known = (
                    "The digests of what the trainer sent, what arrived and what the engine serves agree, so engine and"
                    " trainer compute different functions of the same weights."
                )
            else:
                known = "The engine does not serve the trainer's weights, or the two compute different functions."
            raise MismatchError(
                f"the engine's log-probabilities are {mismatch:.3g} from the trainer's on average, over the bound of"
                f" {self.max_mismatch:g}. {known} Functions usually differ by the attention's implementation"
                " (--attention) or soft-capping, the variant of GELU, or a scale that one side leaves out. If"
                " docs/guarantees.md says so of this family of models, --max-mismatch raises the bound"
            )
        if self.exactly == "off":
            return {"logprobs/mismatch": mismatch}
        if different and not self.said:
            self._say_different(f"{different:.0f} of {tokens:.0f} log-probabilities are not the engine's bit for bit")
        return {"logprobs/mismatch": mismatch, "logprobs/different_tokens": different}

    def _say_different(self, found: str) -> None:
        """Raise MismatchError, or say once that importance weights correct for what was `found`."""
        if self.exactly == "on":
            raise MismatchError(f"--exact on: at step {self.step + 1} {found}{self.where}")
        self.said = True
        print(f"step {self.step + 1}: {found}{self.where}; importance weights correct for that", flush=True)

    def _completion_tensors(self, rollouts: list[Rollout]) -> dict[str, torch.Tensor]:
        """The "mask" of the tokens that the policy sampled, the "engine_logprobs", and the mask of the "current" ones,
        which weights of this learner's version sampled: all [B, T], right-padded with zeros. And each "row"'s number
        [B]."""
        logprobs = [as_tensor(rollout.logprobs).float() for rollout in rollouts]
        mask = [as_tensor(rollout.mask).float() for rollout in rollouts]
        current = [
            row if rollout.versions is None else row * as_tensor(rollout.versions).eq(self.step)
            for row, rollout in zip(mask, rollouts, strict=True)
        ]
        pad, rows = torch.nn.utils.rnn.pad_sequence, {"mask": mask, "engine_logprobs": logprobs, "current": current}
        padded = {name: pad(tensors, batch_first=True) for name, tensors in rows.items()}
        return padded | {"row": torch.arange(len(rollouts))}

    def _learn_policy(
        self,
        rollouts: list[Rollout],
        advantage: torch.Tensor,
        left_out: torch.Tensor,
        scores: PolicyScores | None,
        reference_logprobs: torch.Tensor | None = None,
        proof: list[Rollout] = (),
    ) -> dict[str, float]:
        """All updates of a step. `advantage` is [B, 1] or [B, T]; completions that are `left_out` [B] weigh nothing.

        The ratio is to the policy that gave these `scores`. None: the step has one update, whose own pass gives them
        and proves the sync, with the rollouts in `proof`.
        """
        tensors = self._completion_tensors(rollouts) | {"advantage": advantage.float(), "left_out": left_out}
        if reference_logprobs is not None:
            tensors["reference_logprobs"] = reference_logprobs
        if scores:
            tensors["old_logprobs"] = scores.logprobs
            means = _token_means(tensors | {"means": tensors["mask"] / tensors["mask"].sum()}, self.config)
            means = {name: float(mean) for name, mean in means.items()}
            return self._learn(rollouts, tensors, self._weigh) | scores.metrics | means
        blank = torch.zeros_like(tensors["mask"])
        share = self._share(rollouts, tensors | {"old_logprobs": blank, "entropies": blank}, self._weigh)
        mine, width = share.tensors, blank.shape[1]
        with torch.no_grad(), self.model.computing():
            for part in share.others if share.learned else share.others[1:]:  # `_gradients` takes one in any case
                scores = self.model.score(share.rollouts[part], width, entropy=True)
                mine["old_logprobs"][part], mine["entropies"][part] = scores
        sums = self._gradients(share)
        distance = torch.tensor(self.model.sum(*self._compare(mine["old_logprobs"], mine)))
        sums |= self._prove(distance + self._distance(proof) if proof else distance)
        sums["grad_norm"] = self._update()
        means = _token_means(mine, self.config)
        return self._finish(sums | dict(zip(means, self.model.sum(*means.values()), strict=True)))

    def _weigh(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return loss_weights(tensors["mask"], tensors["advantage"], tensors["left_out"], self.config)

    def _losses(self, rollouts: list[Rollout], width: int, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        first = "entropies" in tensors  # before the step's only update: this is the old policy
        logprobs, entropies = self.model.score(rollouts, width, entropy=first)
        if first:
            tensors["old_logprobs"].copy_(logprobs.detach())
            tensors["entropies"].copy_(entropies)
        losses, clipped = token_losses(
            logprobs,
            tensors["old_logprobs"],
            tensors["engine_logprobs"],
            tensors["advantage"],
            tensors["mask"],
            self.config,
            tensors.get("reference_logprobs"),
        )
        approx_kl = kl_estimate(tensors["old_logprobs"], logprobs.detach())
        return {"loss": losses, "clip_fraction": clipped.float(), "approx_kl": approx_kl}


def _token_means(tensors: dict[str, torch.Tensor], config: PolicyLossConfig) -> dict[str, torch.Tensor]:
    """Metrics of the policy that a step began with: sums over tokens, by their weights in "means"."""
    old_logprobs = tensors["old_logprobs"]
    importance, outside = token_importance(old_logprobs, tensors["engine_logprobs"], tensors["mask"], config)
    values = {"importance/mean": importance, "importance/clipped": outside}
    if "entropies" in tensors:
        values["entropy"] = tensors["entropies"]
    if "reference_logprobs" in tensors:
        values["kl"] = kl_estimate(old_logprobs, tensors["reference_logprobs"])
    return {name: (value * tensors["means"]).sum() for name, value in values.items()}


def rate_schedule(config: LearnerConfig, steps: int | None) -> Callable[[int], float]:
    """The learning rate of each step (the first is 0), by a schedule of transformers.

    It depends on the step alone, so that a checkpoint need not have it: a run resumed with another rate, schedule or
    number of steps goes on with what a whole run with those would have from there.
    """
    from transformers import get_scheduler

    rate = learning_rate(config)
    name = "constant_with_warmup" if config.lr_scheduler == "constant" else config.lr_scheduler
    stand_in = torch.optim.SGD([torch.zeros(1)], lr=rate)
    (factor,) = get_scheduler(name, stand_in, config.warmup_steps, steps).lr_lambdas
    return lambda step: rate * factor(step)


def learning_rate(config: LearnerConfig) -> float:
    """The one that is given, or the default."""
    return config.learning_rate or (ADAPTERS_LEARNING_RATE if config.lora_rank else LEARNING_RATE)
