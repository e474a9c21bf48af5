"""What the learning step minimizes, as functions on tensors. docs/objectives.md has them in one table.

A step has B = P * G completions, G of each of P prompts in a row, of up to T tokens. Its loss is

    sum over b, t of  weight[b, t] * (importance[b, t] * policy_loss[b, t] + kl_coef * kl[b, t])

- `advantages` (--advantage) compares each reward with those of the same prompt's other completions.
- `policy_losses` and `token_weights` (--loss) are the loss of each token and its weight in the sum.
- `importance_weights` (--mismatch-correction) makes up for the engine, whose probabilities are not the trainer's.
- `kl_estimate` (--kl-coef) is the distance from the model that the run began with.

Log-probabilities and masks are [B, T], right-padded. A mask is 1 for a completion's tokens and 0 for padding.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Le
from transformers.hf_argparser import HfArg

CLIP = {  # by --loss: how far below and above 1 the ratio to the old policy is clipped
    "grpo": (0.2, 0.28),  # clip-higher (DAPO)
    "dr_grpo": (0.2, 0.28),
    "dapo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 4.0),  # only above
}
IMPORTANCE_CAP = {"tis": 2.0, "icepop": 5.0, "sequence_mask": 3.0}  # by --mismatch-correction


@dataclass
class MismatchConfig:
    """What makes up for an engine whose probabilities are not the trainer's."""

    mismatch_correction: Literal["tis", "icepop", "sequence_mask", "none"] = HfArg(
        default="tis",
        help="the importance weight, trainer over engine: cap it (tis), or drop tokens or completions out of bounds",
    )
    importance_cap: Annotated[float | None, Ge(1)] = HfArg(
        default=None, help="upper bound of that weight (default: tis 2, icepop 5, sequence_mask 3)"
    )
    importance_floor: Annotated[float, Ge(0), Le(1)] = HfArg(default=0.5, help="its lower bound (icepop)")


@dataclass
class ObjectiveConfig(MismatchConfig):
    """What is to be maximized."""

    group_size: Annotated[int, Ge(2)] = HfArg(default=8, help="G: completions of each prompt, which are compared")
    max_tokens: Annotated[int, Ge(1)] = HfArg(default=16, help="T: length of a completion, at most")
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce++"] = HfArg(
        default="grpo", help="how rewards become advantages"
    )
    loss: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"] = HfArg(
        default="grpo", help="a token's loss and its weight (docs/objectives.md)"
    )
    clip_low: Annotated[float | None, Gt(0)] = HfArg(
        default=None, help="the ratio to the old policy is clipped at 1 - this (default: 0.2; gspo 3e-4, cispo 1)"
    )
    clip_high: Annotated[float | None, Gt(0)] = HfArg(
        default=None, help="and at 1 + this (default: 0.28; gspo 4e-4, cispo 4)"
    )
    mask_truncated_completions: bool = HfArg(
        default=False, help="learn nothing from completions that max_tokens cut off"
    )
    kl_coef: Annotated[float, Ge(0)] = HfArg(default=0.0, help="of the KL to the initial model; 0: none")


def advantages(rewards: torch.Tensor, group_size: int, kind: str) -> torch.Tensor:
    """Advantages [B] of rewards [B], in groups of `group_size` completions of one prompt.

    - `grpo` (DeepSeekMath, Shao et al. 2024, arXiv:2402.03300): reward less the group's mean, over the group's standard
      deviation.
    - `dr_grpo` (Understanding R1-Zero-Like Training, Liu et al. 2025, arXiv:2503.20783): less the group's mean; no
      division, which favours easy prompts.
    - `rloo` (Back to Basics, Ahmadian et al. 2024, arXiv:2402.14740): less the mean of the group's other completions.
    - `reinforce++` (REINFORCE++, Hu et al. 2025, arXiv:2501.03262, the baseline variant): less the group's mean, then
      over the standard deviation of the whole batch.
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


def token_losses(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    engine_logprobs: torch.Tensor,
    advantage: torch.Tensor,
    mask: torch.Tensor,
    config: ObjectiveConfig,
    reference_logprobs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Losses [B, T] of tokens with log-probabilities [B, T] under the policy that learns, the one that the step began
    with and the engine's; `advantage` is [B]. With a reference, `kl_coef` times the estimate of the KL is added.
    """
    importance, _ = importance_weights(old_logprobs, engine_logprobs, mask, config)
    losses = importance * policy_losses(logprobs, old_logprobs, advantage, mask, config)
    if reference_logprobs is not None:
        losses = losses + config.kl_coef * kl_estimate(logprobs, reference_logprobs)
    return losses


def policy_losses(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantage: torch.Tensor,
    mask: torch.Tensor,
    config: ObjectiveConfig,
) -> torch.Tensor:
    """Losses [B, T] of tokens whose completions have these advantages [B], by the ratio r = p / p_old."""
    below, above = CLIP[config.loss]
    low = 1 - (below if config.clip_low is None else config.clip_low)
    high = 1 + (above if config.clip_high is None else config.clip_high)
    advantage, log_ratio = advantage[:, None], logprobs - old_logprobs
    if config.loss == "cispo":
        return cispo_losses(logprobs, log_ratio.exp(), advantage, low, high)
    if config.loss == "gspo":
        log_ratio = sequence_mean(log_ratio, mask)
    return clipped_losses(log_ratio.exp(), advantage, low, high)


def clipped_losses(ratio: torch.Tensor, advantage: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """-min(r A, clip(r, low, high) A) (PPO, Schulman et al. 2017, arXiv:1707.06347)."""
    return -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)


def cispo_losses(
    logprobs: torch.Tensor, ratio: torch.Tensor, advantage: torch.Tensor, low: float, high: float
) -> torch.Tensor:
    """-sg(clip(r, low, high)) A log p, where sg lets no gradient through: a token far off loses weight, but never its
    gradient (MiniMax-M1, 2025, arXiv:2506.13585).
    """
    return -ratio.clamp(low, high).detach() * advantage * logprobs


def sequence_mean(log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mean over each completion's tokens, at each of them: [B, T]. Its exponential is the ratio of GSPO (Group
    Sequence Policy Optimization, Zheng et al. 2025, arXiv:2507.18071), s = (p / p_old) ** (1 / length) of the whole.
    """
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    return ((log_ratio * mask).sum(1, keepdim=True) / lengths).expand_as(mask)


def importance_weights(
    old_logprobs: torch.Tensor, engine_logprobs: torch.Tensor, mask: torch.Tensor, config: MismatchConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [B, T] by the ratio w = p_old / p_engine, and where it was out of bounds: a bool [B, T].

    - `tis`: min(w, cap) (Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, Yao et al. 2025).
    - `icepop`: w if floor <= w <= cap, else 0 (Every Step Evolves, Ling Team 2025, arXiv:2510.18855).
    - `sequence_mask`: the completion's product of w if that is at most the cap, else 0 (When Speed Kills Stability, Liu
      et al. 2025).
    - `none`: 1.
    """
    log_ratio = old_logprobs - engine_logprobs
    if config.mismatch_correction == "none":
        return torch.ones_like(log_ratio), torch.zeros_like(log_ratio, dtype=torch.bool)
    if config.mismatch_correction == "sequence_mask":
        log_ratio = (log_ratio * mask).sum(1, keepdim=True).expand_as(mask)
    ratio, cap = log_ratio.exp(), config.importance_cap or IMPORTANCE_CAP[config.mismatch_correction]
    if config.mismatch_correction == "tis":
        return ratio.clamp(max=cap), ratio > cap
    floor = config.importance_floor if config.mismatch_correction == "icepop" else 0
    outside = (ratio < floor) | (ratio > cap)
    return ratio.masked_fill(outside, 0), outside


def kl_estimate(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """Schulman's k3 estimate of KL(policy || reference) per token, r - log r - 1 with r = p_reference / p: unbiased,
    never negative (Approximating KL Divergence, 2020, joschu.net/blog/kl-approx.html).
    """
    log_ratio = reference_logprobs - logprobs
    return log_ratio.exp() - log_ratio - 1


def token_weights(mask: torch.Tensor, config: ObjectiveConfig) -> torch.Tensor:
    """Weights [B, T] of the tokens in the loss, for a mask [B, T] of those that count.

    - `grpo`, `gspo`: the mean over each completion, then over all B, those without a token included.
    - `dr_grpo`: the sum over the constant B * max_tokens, so that tokens of long completions count no less.
    - `dapo`, `cispo`: the mean over all tokens (DAPO, Yu et al. 2025, arXiv:2503.14476).
    """
    if config.loss in ("grpo", "gspo"):
        return mask / mask.sum(1, keepdim=True).clamp(min=1) / len(mask)
    if config.loss == "dr_grpo":
        return mask / (len(mask) * config.max_tokens)
    return mask / mask.sum().clamp(min=1)


def loss_weights(
    mask: torch.Tensor, advantage: torch.Tensor, truncated: torch.Tensor, config: ObjectiveConfig
) -> torch.Tensor:
    """`token_weights` [B, T], but 0 where there is no gradient: completions with an advantage [B] of 0, unless the KL
    makes one, and those `truncated` [B], if asked for (DAPO's overlong filtering). Truncated ones also leave the mean
    over tokens of `dapo` and `cispo`; B stays.
    """
    if config.mask_truncated_completions:
        mask = mask * ~truncated[:, None]
    weights = token_weights(mask, config)
    return weights if config.kl_coef else weights * (advantage != 0)[:, None]
