"""A learner: a model, its optimizer, and the loop of updates that GRPO and PPO have in common.

A step learns from B rollouts of up to T tokens. It goes through them `--num-epochs` times, in `--num-mini-batches`
mini-batches, each of which makes one update of the weights. A mini-batch passes through the model in micro-batches.
Their size does not change its gradient: a token's weight in the loss depends on its mini-batch alone.
"""

import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from weight_sync.ranks import is_sharded

from ..errors import RunError
from .config import LearnerConfig
from .flops import peak_flops
from .lora import load_adapters
from .model import Model, RankBatch
from .offload import Offload
from .rollout import Rollout
from .saving import load_state, write_model, write_state
from .sharding import stray_weights, whole

OVERFLOW = (  # what may have made a number that is not finite
    "was the last update too large (--learning-rate), is a reward huge, or does a prompt start with the padding token?"
)
MERGED = "merged"  # a checkpoint's folder with the whole model, of save_merged
LEARNING_RATE, ADAPTERS_LEARNING_RATE = 1e-6, 1e-5  # adapters need ten times as much (LoRA Without Regret, 2025)


class Learner:
    """A model that learns, or one rank of it. All ranks call every method together.

    A subclass has an objective: `_losses`. `path` is a model or a checkpoint. `steps` is the number of steps in the
    run, which linear and cosine schedules of the learning rate need.
    """

    model_class = Model

    def __init__(self, path: str, config: LearnerConfig, device: torch.device, seed: int = 0, steps: int | None = None):
        self.model = self.model_class(path, config, device, learns=True, seed=seed)
        self.config, self.seed, self.step = config, seed, 0
        self.parameters = [p for p in self.model.module.parameters() if p.requires_grad]  # what learns
        self.rate = rate_schedule(config, steps)
        options = {"betas": (0.9, 0.95), "eps": config.optimizer.adam_eps, "weight_decay": 0.0}
        # Fused, to make no temporary copies of the weights.
        self.optimizer = torch.optim.AdamW(self.parameters, lr=self.rate(0), fused=True, **options)
        self.offload = Offload(self.optimizer)

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
                adapters = {name: tensor for name, tensor in state.items() if not is_sharded(tensor)}
                model.module.save_pretrained(folder, state_dict=adapters)  # without it, this would gather shards
                model.tokenizer.save_pretrained(folder)
        if model_folder:
            write_model(model.module, model.named_tensors(), model.processor, model_folder)
        write_state(folder, self.optimizer, self.step)

    def load_state(self, folder: Path) -> None:
        """Load adapters, the optimizer's state and the step from the checkpoint that the learner was made from."""
        if self.model.adapters:
            load_adapters(self.model.module, folder)
        self.step = load_state(folder, self.parameters, self.optimizer)
        if self.config.optimizer.offload_optimizer:
            self.offload.to_host()

    def _run_updates(
        self, rollouts: list[Rollout], tensors: dict[str, torch.Tensor], token_weights: Callable
    ) -> dict[str, float]:
        """All updates of a step on B rollouts. Returns the means of their metrics over the updates.

        `tensors` are [B, ...]; "mask" [B, T] is 1 for the tokens that count. `token_weights(tensors)` gives the weights
        [b, T] of a mini-batch's tokens in its loss.
        """
        self.model.work.begin()
        totals, updates = {}, 0
        for rows in self._mini_batches(tensors.get("owners", torch.arange(len(rollouts))).tolist()):
            mini_batch = {name: tensor[rows] for name, tensor in tensors.items()}
            batch = self._rank_batch([rollouts[row] for row in rows], mini_batch, token_weights)
            metrics = self._backward(batch, self._losses) | {"grad_norm": self._optimizer_step()}
            totals = {name: totals.get(name, 0.0) + value for name, value in metrics.items()}
            updates += 1
        return self._end_step({name: total / updates for name, total in totals.items()})

    def _end_step(self, metrics: dict[str, float]) -> dict[str, float]:
        metrics = metrics | self._performance()
        if (remark := self.model.settle_checkpointing()) and self.model.rank == 0:
            print(f"step {self.step + 1}: {remark}", flush=True)
        self.step += 1
        return metrics | {"learning_rate": self.optimizer.param_groups[0]["lr"]}

    def _performance(self) -> dict[str, float]:
        """Metrics of the step's updates: the tokens that passed through the model per second, and `perf/mfu` (flops.py)
        if the GPU's peak is known."""
        model, work = self.model, self.model.work
        seconds = time.perf_counter() - work.began
        tokens, flops, seconds = model.sum_over_ranks(work.tokens, work.flops, seconds)  # seconds: of all GPUs
        metrics = {"perf/train_tokens_per_second": tokens / (seconds / model.ranks)}
        on_gpu = model.device.type == "cuda"
        peak = peak_flops(torch.cuda.get_device_name(model.device) if on_gpu else model.device.type)
        if peak and math.isfinite(flops):
            metrics["perf/mfu"] = flops / (seconds * peak)
        return metrics

    def _mini_batches(self, owners: list[int]) -> Iterator[list[int]]:
        """The rows of each mini-batch of each epoch, in an order that the seed and the step determine. Those with the
        same number in `owners` stay together."""
        together = defaultdict(list)
        for row, owner in enumerate(owners):
            together[owner].append(row)
        rows, count = [*together.values()], len(together)
        mini_batches = min(self.config.optimizer.num_mini_batches, count)
        for epoch in range(self.config.optimizer.num_epochs):
            order = random.Random(f"{self.seed} {self.step} {epoch}").sample(range(count), count)
            yield from ([row for k in order[i::mini_batches] for row in rows[k]] for i in range(mini_batches))

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
                with model.differentiating():
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
        """Clip the gradients, and update the weights. Returns the gradients' norm before clipping. Raises RunError,
        before anything is updated, if it is not finite, which would make every weight a NaN; or if the model computes
        with a weight that the optimizer does not update."""
        if stray := stray_weights(self.model.module, self.parameters):
            raise RunError(f"{stray[0]} would not learn: the model computes with another tensor than the optimizer has")
        if self.model.adapters and self.model.ranks > 1:  # every rank has whole adapters, which FSDP leaves alone
            gradients = [parameter.grad for parameter in self.parameters]
            total = torch.nn.utils.parameters_to_vector(gradients)
            dist.all_reduce(total)
            torch.nn.utils.vector_to_parameters(total / self.model.ranks, gradients)
        norm = whole(torch.nn.utils.clip_grad_norm_(self.parameters, self.config.optimizer.max_grad_norm))
        if not norm.isfinite():
            raise RunError(f"step {self.step + 1}: the gradient is not finite: {OVERFLOW}")
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(self.step)
        self.offload.to_device()
        self.optimizer.step()
        if self.config.optimizer.offload_optimizer:
            self.offload.to_host()
        return float(norm)


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
