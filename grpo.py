"""The learning step: rollouts in, metrics out. GRPO and its near relatives on token log-probabilities.

One step, on P prompts with G completions each (B = P * G rollouts of up to T tokens):

1. advantages of the B rewards, against the other completions of the same prompt (`advantages`);
2. per token: the clipped ratio to the policy that the step began with, weighted by the truncated importance weight of
   that policy over the engine's, plus an optional KL penalty (`token_losses`);
3. a weighted sum over tokens (`token_weights`), whose gradient does not depend on the size of the micro-batches;
4. gradient clipping, AdamW. Master weights are fp32, since an update of 1e-6 vanishes in bf16; the compute is bf16 by
   autocast on a GPU and fp32 on CPU.

The engine's log-probabilities come with the rollouts. Their distance to the trainer's, on the same tokens and before
any update, is `logprobs/mismatch`: rollouts that follow a sync prove it, every token of them.

In a torch.distributed group, the ranks are one learner: FSDP2 shards weights, gradients and optimizer state over them,
and each computes on its share of the rollouts. All are given the same ones, and the result is that of a single rank,
but for how a GPU rounds (sharding.py).
"""

import gc
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import TorchFunctionMode

from sharding import Offload, gather_states, load_optimizer_state, shard, whole

STATE_FILE = "trainer_state.pt"


@dataclass(frozen=True)
class Rollout:
    """One sampled completion."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]  # the engine's, of each completion token, at the sampling temperature
    reward: float


@dataclass(frozen=True)
class GRPOConfig:
    group_size: int  # G: completions of one prompt, which follow each other in the rollouts
    max_tokens: int  # T
    temperature: float = 1.0
    learning_rate: float = 1e-6
    advantage: str = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.28  # above clip_low ("clip-higher"): leaves room for unlikely tokens to gain
    importance_cap: float = 2.0
    kl_coef: float = 0.0
    max_grad_norm: float = 1.0
    updates: int = 1  # optimizer steps on the same rollouts
    micro_batch_size: int = 16
    max_mismatch: float = float("inf")


class MismatchError(RuntimeError):
    """Engine and trainer disagree about the log-probabilities of the same tokens: the last sync went wrong."""


class DivergenceError(RuntimeError):
    """The gradient is not finite: going on would make every weight a NaN."""


def advantages(rewards: torch.Tensor, group_size: int, kind: str) -> torch.Tensor:
    """Advantages [B] of rewards [B], in groups of `group_size` completions of one prompt.

    - `grpo` (Shao et al. 2024, arXiv:2402.03300): reward less the group's mean, over the group's standard deviation.
    - `dr_grpo` (Liu et al. 2025, arXiv:2503.20783): less the group's mean; no division, which favours easy prompts.
    - `rloo` (Ahmadian et al. 2024, arXiv:2402.14740): less the mean of the group's other completions.
    - `reinforce++` (Hu et al. 2025, arXiv:2501.03262, the baseline variant): less the group's mean, then over the
      standard deviation of the whole batch.
    """
    groups = rewards.view(-1, group_size)
    groups = groups - groups[:, :1]  # equal rewards are exactly 0 from here on, which their mean need not be
    centered = groups - groups.mean(1, keepdim=True)
    if kind == "grpo":
        return (centered / (groups.std(1, keepdim=True) + 1e-4)).flatten()
    if kind == "dr_grpo":
        return centered.flatten()
    if kind == "rloo":
        return (centered * group_size / (group_size - 1)).flatten()
    if kind == "reinforce++":
        return (centered / (centered.std() + 1e-4)).flatten()
    raise ValueError(f"unknown advantage {kind!r}")


ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce++")


def token_weights(mask: torch.Tensor, config: GRPOConfig) -> torch.Tensor:
    """Weights [B, T] of the tokens in the loss, for a mask [B, T] of the completions' tokens.

    GRPO averages over each completion, then over completions. Dr.GRPO divides by the constant B * T, so that long
    completions count no less. The others average over all tokens.
    """
    if config.advantage == "grpo":
        return mask / mask.sum(1, keepdim=True).clamp(min=1) / len(mask)
    if config.advantage == "dr_grpo":
        return mask / (len(mask) * config.max_tokens)
    return mask / mask.sum().clamp(min=1)


def token_losses(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    engine_logprobs: torch.Tensor,
    advantage: torch.Tensor,
    config: GRPOConfig,
    reference_logprobs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Losses [B, T] of tokens with log-probabilities [B, T] under the policy that learns, the one that the step began
    with and the engine's; `advantage` is [B]. With a reference, `kl_coef` times the k3 estimate of the KL is added.
    """
    advantage = advantage[:, None]
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    importance = (old_logprobs - engine_logprobs).exp().clamp(max=config.importance_cap)
    losses = -importance * torch.minimum(ratio * advantage, clipped * advantage)
    if reference_logprobs is not None:
        losses = losses + config.kl_coef * kl_estimate(logprobs, reference_logprobs)
    return losses


def kl_estimate(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """Schulman's k3 estimate of KL(policy || reference) per token: unbiased, never negative."""
    log_ratio = reference_logprobs - logprobs
    return log_ratio.exp() - log_ratio - 1


class Learner:
    """A causal language model and its optimizer, or one rank of it: every method runs on all ranks together.

    `path` is a Hugging Face model, or a checkpoint that `save` wrote; `initial` is the model that a run began with,
    if `path` is not: the one that the KL is measured to.
    """

    def __init__(self, path: str, config: GRPOConfig, device: torch.device, seed: int = 0, initial: str | None = None):
        from transformers import AutoTokenizer

        torch.manual_seed(seed)
        self.config, self.device = config, device
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = self._load(path)
        self.reference = self._load(initial or path).requires_grad_(False) if config.kl_coef else None
        self.optimizer = torch.optim.AdamW(  # fused: it makes no temporary copies of the weights
            self.model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.offload = Offload(self.optimizer)
        self.step = 0

    def _load(self, path: str):
        """The model with fp32 weights, or this rank's shards of it."""
        from transformers import AutoModelForCausalLM

        mesh = init_device_mesh(self.device.type, (self.ranks,)) if self.ranks > 1 else None
        for turn in range(self.ranks):  # one rank after the other: a node holds one whole model at a time
            if turn == self.rank:
                model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
                _make_savable(model.generation_config)
                model = shard(model, mesh) if mesh else model.to(self.device)
            if mesh:
                dist.barrier()
        return model.eval()  # no dropout: the ratios compare log-probabilities of one and the same function

    def learn(self, rollouts: list[Rollout]) -> dict[str, float]:
        """One step on B rollouts, `group_size` of each prompt in a row. Returns its metrics.

        Raises MismatchError, before anything is updated, if the engine's log-probabilities are further from the
        trainer's than `max_mismatch` on average.
        """
        config = self.config
        rewards = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64)
        advantage = advantages(rewards, config.group_size, config.advantage).to(self.device, torch.float32)
        mask, engine_logprobs = (tensor.to(self.device) for tensor in _completion_tensors(rollouts))
        weights = token_weights(mask, config)
        tokens = mask.sum()
        mine, advantage, mask, engine_logprobs, weights = self._share(
            rollouts, advantage, mask, engine_logprobs, weights
        )
        old_logprobs = torch.zeros_like(engine_logprobs)
        totals = dict.fromkeys(("loss", "entropy", "kl"), 0.0)
        for update in range(config.updates):
            self.optimizer.zero_grad(set_to_none=True)
            totals["loss"] = 0.0
            for begin in range(0, len(mine), config.micro_batch_size):
                part = slice(begin, begin + config.micro_batch_size)
                logprobs, entropy = self.token_logprobs(mine[part], mask.shape[1])
                reference_logprobs = None
                if self.reference is not None:
                    with torch.no_grad():
                        reference_logprobs, _ = self.token_logprobs(mine[part], mask.shape[1], self.reference)
                if update == 0:
                    old_logprobs[part] = logprobs.detach()
                    totals["entropy"] += float((entropy * mask[part]).sum() / tokens)
                    if reference_logprobs is not None:
                        kl = kl_estimate(logprobs.detach(), reference_logprobs)
                        totals["kl"] += float((kl * mask[part]).sum() / tokens)
                losses = token_losses(
                    logprobs, old_logprobs[part], engine_logprobs[part], advantage[part], config, reference_logprobs
                )
                loss = (losses * weights[part]).sum()
                (loss * self.ranks).backward()  # FSDP averages the gradients of the ranks, whose losses add up
                totals["loss"] += loss.item()
            if update == 0:
                mismatch = self._proven(old_logprobs, engine_logprobs, mask)
            grad_norm = whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.max_grad_norm))
            if not grad_norm.isfinite():
                raise DivergenceError(f"step {self.step + 1}: the gradient is not finite; lower --learning-rate")
            self.offload.to_device()
            self.optimizer.step()
        self.step += 1
        return {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
            "completions/mean_length": float(tokens) / len(rollouts),
            "grad_norm": float(grad_norm),
            "logprobs/mismatch": mismatch,
            **dict(zip(totals, self._sum(*totals.values()), strict=True)),
        }

    @torch.no_grad()
    def mismatch(self, rollouts: list[Rollout]) -> float:
        """Mean distance of the engine's log-probabilities from the trainer's. Raises MismatchError as `learn` does."""
        mask, engine_logprobs = (tensor.to(self.device) for tensor in _completion_tensors(rollouts))
        mine, mask, engine_logprobs = self._share(rollouts, mask, engine_logprobs)
        size = self.config.micro_batch_size
        parts = [mine[begin : begin + size] for begin in range(0, len(mine), size)]
        logprobs = torch.cat([self.token_logprobs(part, mask.shape[1])[0] for part in parts])
        return self._proven(logprobs, engine_logprobs, mask)

    def _proven(self, logprobs: torch.Tensor, engine_logprobs: torch.Tensor, mask: torch.Tensor) -> float:
        distance, tokens = self._sum(((logprobs - engine_logprobs).abs() * mask).sum(), mask.sum())
        mismatch = distance / tokens
        if not mismatch <= self.config.max_mismatch:  # a NaN does not pass
            raise MismatchError(
                f"the engine's log-probabilities are {mismatch:.3g} from the trainer's on average, over the bound of"
                f" {self.config.max_mismatch:g}: the engine does not serve the trainer's weights"
            )
        return mismatch

    def _share(self, rollouts: list[Rollout], *tensors: torch.Tensor) -> tuple:
        """This rank's rollouts, and its rows of tensors [B, ...].

        All ranks get as many, so that their passes through the sharded model match: if B is not a multiple of the
        ranks, the last are rollouts of others again, with rows of zeros.
        """
        rows = range(self.rank, -(-len(rollouts) // self.ranks) * self.ranks, self.ranks)
        own = torch.tensor([[row < len(rollouts)] for row in rows], device=self.device)
        rows = [row % len(rollouts) for row in rows]
        return [rollouts[row] for row in rows], *(t[rows] * own.view(-1, *[1] * (t.dim() - 1)) for t in tensors)

    def _sum(self, *values: float | torch.Tensor) -> list[float]:
        """The sums of these values over the ranks."""
        sums = torch.tensor([float(value) for value in values], dtype=torch.float64, device=self.device)
        if self.ranks > 1:
            dist.all_reduce(sums)
        return sums.tolist()

    def token_logprobs(self, rollouts: list[Rollout], width: int, model=None) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies [B, width] of the completions' tokens, right-padded with zeros."""
        sequences = [torch.tensor(r.prompt_ids + r.completion_ids) for r in rollouts]
        ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True).to(self.device)
        attention_mask = torch.zeros_like(ids)
        for row, sequence in zip(attention_mask, sequences, strict=True):
            row[: len(sequence)] = 1
        autocast = torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda")
        with autocast:
            logits = (model or self.model)(input_ids=ids, attention_mask=attention_mask, use_cache=False).logits
        logprobs = ids.new_zeros(len(rollouts), width, dtype=torch.float32)
        entropies = torch.zeros_like(logprobs)
        for i, rollout in enumerate(rollouts):
            begin, length = len(rollout.prompt_ids), len(rollout.completion_ids)
            # The logits at one position are of the token at the next.
            log_softmax = (logits[i, begin - 1 : begin - 1 + length].float() / self.config.temperature).log_softmax(-1)
            logprobs[i, :length] = log_softmax.gather(1, ids[i, begin : begin + length, None])[:, 0]
            with torch.no_grad():
                entropies[i, :length] = -(log_softmax.exp() * log_softmax).sum(-1)
        return logprobs, entropies

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Views of the model's tensors, named and shaped as in its checkpoint, which is how an engine loads them.

        The modules differ from that where transformers fuses what checkpoints keep apart: a mixture's experts, which
        are views of the fused tensors. `shard` refuses such a model.
        """
        from transformers.core_model_loading import revert_weight_conversion

        tied = self.model.all_tied_weights_keys
        tensors = {name: tensor for name, tensor in self.model.state_dict().items() if name not in tied}
        with _WithoutCopies():
            return revert_weight_conversion(self.model, tensors)

    def release_memory(self, offload_optimizer: bool) -> None:
        """Free what the next `learn` makes anew, and move the optimizer's state to host memory until then."""
        self.optimizer.zero_grad(set_to_none=True)
        if offload_optimizer:
            self.offload.to_host()
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.ipc_collect()  # what an engine had mapped and has let go, such as the buffers of a closed sync
            torch.cuda.empty_cache()

    def save(self, folder: Path | None) -> None:
        """Write the model and tokenizer in Hugging Face format, and beside them what `load_state` needs.

        The first rank writes; the others, whose folder is None, help to gather. Any number of ranks can go on from it.
        """
        weights, optimizer = gather_states(self.model, self.optimizer, self.rank)
        if folder is None:
            return
        self.model.save_pretrained(folder, state_dict=weights)
        self.tokenizer.save_pretrained(folder)
        state = {"step": self.step, "optimizer": optimizer, "random": torch.get_rng_state()}
        if self.device.type == "cuda":
            state["random_cuda"] = torch.cuda.get_rng_state(self.device)
        torch.save(state, folder / STATE_FILE)

    def load_state(self, folder: Path) -> None:
        """Go on from a checkpoint whose model this learner was made from: optimizer, step and random states."""
        state = torch.load(folder / STATE_FILE, map_location="cpu", mmap=True, weights_only=True)
        self.step = state["step"]
        load_optimizer_state(self.model, self.optimizer, state["optimizer"])
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate
        torch.set_rng_state(state["random"])
        if "random_cuda" in state and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["random_cuda"], self.device)


def _make_savable(generation_config) -> None:
    """A temperature without `do_sample`, as some models come with, is what transformers loads but refuses to save."""
    try:
        generation_config.validate(strict=True)
    except ValueError:
        generation_config.do_sample = True
        generation_config.validate(strict=True)  # what else is wrong ends the run here, not at its first checkpoint


class _WithoutCopies(TorchFunctionMode):
    """Parts of a fused tensor stay views of it: transformers would make them contiguous, in memory of their own."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def _completion_tensors(rollouts: list[Rollout]) -> tuple[torch.Tensor, torch.Tensor]:
    """The mask of the completions' tokens and the engine's log-probabilities, both [B, T], right-padded with zeros."""
    logprobs = [torch.tensor(rollout.logprobs, dtype=torch.float32) for rollout in rollouts]
    padded = torch.nn.utils.rnn.pad_sequence(logprobs, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in logprobs], batch_first=True)
    return mask, padded
