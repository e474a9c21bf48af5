"""The losses of policies, as functions on tensors. docs/objectives.md has them in one table.

A step has B = P * G completions, G of each of P prompts in a row, of up to T tokens. Its loss is

    sum over b, t of  weight[b, t] * (importance[b, t] * policy_loss[b, t] + kl_coef * ratio[b, t] * kl[b, t])

where `ratio` is the policy's probability of the token over what it was when the step began.

- `advantages` (--advantage) compares each reward with those of the same prompt's other completions.
- `token_losses` and `token_weights` (--loss) are the loss of each token and its weight in the sum.
- `importance_weights` (--mismatch-correction) corrects for the engine, whose probabilities differ from the trainer's.
- `kl_estimate` (--kl-coef) is the distance from the model that the run began with.

Log-probabilities and masks are [B, T], right-padded. A mask is 1 for the tokens that the policy sampled, and else 0.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le

from ..flags import arg, setting

CLIP = {  # by --loss: how far below and above 1 the ratio is clipped
    "grpo": (0.2, 0.28),  # clip-higher (DAPO)
    "dr_grpo": (0.2, 0.28),
    "dapo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 4.0),  # only above
    "ppo": (0.2, 0.2),
}
IMPORTANCE_CAP = {"tis": 2.0, "icepop": 5.0, "sequence_mask": 3.0}  # by --mismatch-correction
STD_EPS = 1e-4  # added to a standard deviation before dividing by it


@dataclass
class PolicyLossConfig:
    """The loss of the policy."""

    loss: ClassVar[str] = "ppo"
    clip_low: Annotated[float | None, Gt(0), Le(1)] = setting(
        None, help="the loss clips the probability ratio at 1 minus this (default: 0.2; gspo: 3e-4; cispo: 1)"
    )
    clip_high: Annotated[float | None, Gt(0)] = setting(
        None, help="the loss clips the probability ratio at 1 plus this (default: 0.28; PPO: 0.2; gspo: 4e-4; cispo: 4)"
    )
    mismatch_correction: Literal["tis", "icepop", "sequence_mask", "none"] = arg(
        "tis",
        help="what to do with a token's importance weight, the trainer's probability over the engine's: cap it (tis),"
        " drop tokens (icepop) or whole completions (sequence_mask) that are out of bounds, or leave it out (none); not"
        " with --loss cispo",
    )
    importance_cap: Annotated[float | None, Ge(1)] = setting(
        None, help="upper bound of the importance weight (default: tis 2, icepop 5, sequence_mask 3)"
    )
    importance_floor: Annotated[float, Ge(0), Le(1)] = setting(
        0.5, help="lower bound of the importance weight, with --mismatch-correction icepop"
    )
    max_mismatch: Annotated[float | None, Gt(0)] = arg(
        None,
        help="the run ends if the mean |Δ logprob| between engine and trainer exceeds this (default: the script's"
        " bound, or twice the measured rounding of bf16, if that is more)",
    )


@dataclass
class ObjectiveConfig(PolicyLossConfig):
    """Advantages, losses and the KL penalty."""

    advantage: Literal["grpo", "dr_grpo", "reinforce++"] = arg(
        "grpo", help="how rewards become advantages (docs/objectives.md)"
    )
    loss: Literal["dapo", "grpo", "dr_grpo", "gspo", "cispo"] = arg(
        "dapo", help="the loss of a token, and its weight in the sum of all tokens (docs/objectives.md)"
    )
    mask_truncated_completions: bool = setting(
        False, help="learn nothing from completions that were cut off, such as at --max-tokens"
    )
    kl_coef: Annotated[float, Ge(0)] = arg(
        0.0, help="coefficient of the KL penalty, which keeps the policy near the initial model; 0: none"
    )


def advantages(rewards: torch.Tensor, group_size: int, kind: str) -> torch.Tensor:
    """Advantages [B] of rewards [B], in groups of `group_size` completions of one prompt.

    - `grpo` (DeepSeekMath, Shao et al. 2024, arXiv:2402.03300): reward less the group's mean, over the group's standard
      deviation.
    - `dr_grpo` (Understanding R1-Zero-Like Training, Liu et al. 2025, arXiv:2503.20783): less the group's mean. A
      division would favour prompts that are nearly always, or hardly ever, answered well.
    - `reinforce++` (REINFORCE++, Hu et al. 2025, arXiv:2501.03262, the baseline variant): less the group's mean, then
      over the standard deviation of the whole batch.

    An unknown reward is a NaN. It counts for no mean and no deviation, and its advantage is 0. Raises ValueError for
    another `kind`.
    """
    groups = rewards.view(-1, group_size)
    # Less the first known reward, equal rewards are exactly 0. Less their mean, they need not be.
    groups = groups - groups.gather(1, groups.isfinite().int().argmax(1, keepdim=True))
    centered = groups - groups.nanmean(1, keepdim=True)
    if kind == "grpo":
        centered = centered / (known_std(centered, dim=1) + STD_EPS)
    elif kind == "reinforce++":
        centered = centered / (known_std(centered.view(1, -1), dim=1) + STD_EPS)
    elif kind != "dr_grpo":
        raise ValueError(f"unknown advantage {kind!r}")
    return centered.flatten().nan_to_num(0.0)


def reverse_kl(engine_logprobs: torch.Tensor, teacher_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The estimate [B, T] of KL(student || teacher) at each sampled token: log p_engine - log p_teacher.

    If its negative is the advantage, the expected gradient at a token, given those before it, is that of the KL over
    the whole vocabulary (On-Policy Distillation of Language Models, Agarwal et al. 2024, arXiv:2306.13649; On-Policy
    Distillation, Thinking Machines 2025).
    """
    return (engine_logprobs - teacher_logprobs) * mask


def known_std(values: torch.Tensor, dim: int) -> torch.Tensor:
    """The standard deviation along `dim`, kept with length 1, of the values that are not NaN; 0 for fewer than two."""
    count = values.isfinite().sum(dim, keepdim=True)
    squares = (values - values.nanmean(dim, keepdim=True)).square().nansum(dim, keepdim=True)
    return (squares / (count - 1).clamp(min=1)).sqrt()


def token_losses(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    engine_logprobs: torch.Tensor,
    advantage: torch.Tensor,
    mask: torch.Tensor,
    config: PolicyLossConfig,
    reference_logprobs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses [B, T] of tokens, and where their ratio was clipped: a bool [B, T].

    The log-probabilities [B, T] come from the policy that learns, the policy that the step began with (`old`), the
    engine and, if there is one, the reference. With a reference, the losses include `kl_coef` times the KL. `advantage`
    is [B, 1] or [B, T].
    """
    if config.loss == "cispo":
        importance, clipped = importance_weights(logprobs.detach(), engine_logprobs, mask, config)
        losses = -importance * advantage * logprobs
    else:
        log_ratio = logprobs - old_logprobs
        if config.loss == "gspo":
            log_ratio = logprobs - logprobs.detach() + sequence_mean(log_ratio, mask).detach()
        losses, clipped = clipped_losses(log_ratio.exp(), advantage, *clip_range(config))
        importance, _ = importance_weights(old_logprobs, engine_logprobs, mask, config)
        losses = importance * losses
    if reference_logprobs is not None:
        # Alone, k3 has the gradient of KL(reference || policy); times the ratio, that of KL(policy || reference)
        # (DeepSeek-V3.2, 2025, arXiv:2512.02556).
        ratio = (logprobs - old_logprobs).exp()
        losses = losses + config.kl_coef * ratio * kl_estimate(logprobs, reference_logprobs, mask)
    return losses, clipped


def clip_range(config: PolicyLossConfig) -> tuple[float, float]:
    """The smallest and the largest ratio that the loss does not clip."""
    below, above = CLIP[config.loss]
    below = below if config.clip_low is None else config.clip_low
    above = above if config.clip_high is None else config.clip_high
    return 1 - below, 1 + above


def clipped_losses(
    ratio: torch.Tensor, advantage: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """-min(r A, clip(r, low, high) A) (PPO, Schulman et al. 2017, arXiv:1707.06347), and where the clipped term is the
    loss: [B, T] both."""
    unclipped, clipped = -ratio * advantage, -ratio.clamp(low, high) * advantage
    return torch.maximum(unclipped, clipped), clipped > unclipped


def sequence_mean(log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mean of the log-ratio [B, T] over each completion's tokens, repeated at each token: [B, T].

    Its exponential is the ratio of GSPO, (p / p_old) ** (1 / length) of the whole completion (Group Sequence Policy
    Optimization, Zheng et al. 2025, arXiv:2507.18071). `token_losses` gives each token this value, but its own gradient
    (GSPO-token), so that importance weights act on single tokens.
    """
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    return ((log_ratio * mask).sum(1, keepdim=True) / lengths).expand_as(mask)


def importance_weights(
    old_logprobs: torch.Tensor, engine_logprobs: torch.Tensor, mask: torch.Tensor, config: PolicyLossConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [B, T] made of the ratio w = p_old / p_engine, and where that was out of bounds: a bool [B, T].

    - `tis`: min(w, cap) (Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, Yao et al. 2025).
    - `icepop`: w if floor <= w <= cap, else 0 (Every Step Evolves, Ling Team 2025, arXiv:2510.18855).
    - `sequence_mask`: the product of w over the completion if that is at most the cap, else 0 (When Speed Kills
      Stability, Liu et al. 2025).
    - `none`: 1.

    `cispo` weights its loss with w itself, clipped to its `clip_range` (MiniMax-M1, 2025, arXiv:2506.13585; the ratio
    to the engine is ScaleRL's, 2025, arXiv:2510.13786): a clipped token has less weight, but keeps its gradient.
    """
    log_ratio, kind = old_logprobs - engine_logprobs, config.mismatch_correction
    if config.loss == "cispo":
        ratio, (low, high) = log_ratio.exp(), clip_range(config)
        return ratio.clamp(low, high), (ratio < low) | (ratio > high)
    if kind == "none":
        return torch.ones_like(log_ratio), torch.zeros_like(log_ratio, dtype=torch.bool)
    if kind == "sequence_mask":
        log_ratio = (log_ratio * mask).sum(1, keepdim=True).expand_as(mask)
    ratio, cap = log_ratio.exp(), config.importance_cap or IMPORTANCE_CAP[kind]
    if kind == "tis":
        return ratio.clamp(max=cap), ratio > cap
    floor = config.importance_floor if kind == "icepop" else 0
    outside = (ratio < floor) | (ratio > cap)
    return ratio.masked_fill(outside, 0), outside


def kl_estimate(logprobs: torch.Tensor, reference_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The k3 estimate [B, T] of KL(policy || reference), per token: r - log r - 1 with r = p_reference / p (Schulman,
    Approximating KL Divergence, 2020, joschu.net/blog/kl-approx.html). 0 where the mask is.

    It is never negative, and unbiased for tokens that the policy sampled. Its gradient is biased.
    """
    log_ratio = (reference_logprobs - logprobs) * mask  # before exp: a filler's reference is 0, and its r may be inf
    return log_ratio.exp() - log_ratio - 1


def token_weights(
    mask: torch.Tensor, config: PolicyLossConfig, max_tokens: int, owners: torch.Tensor | None = None
) -> torch.Tensor:
    """Weights [B, T] in the loss of the tokens where the mask [B, T] is 1. Rows with the same number in `owners` [B]
    are samples of one rollout, and count as one completion with all of their tokens. An agent's rollout without any
    sample has no row, and is not among the B.

    - `grpo`, `gspo`: the mean over each completion's tokens, then over all B completions, also those with no token.
    - `dr_grpo`: the sum over the constant B * max_tokens, so that tokens of long completions count no less.
    - `dapo`, `cispo`, `ppo`: the mean over all tokens (DAPO, Yu et al. 2025, arXiv:2503.14476).
    """
    owners = torch.arange(len(mask)) if owners is None else owners.unique(return_inverse=True)[1]
    completions = int(owners.max()) + 1
    if config.loss in ("grpo", "gspo"):
        lengths = mask.new_zeros(completions).index_add(0, owners.to(mask.device), mask.sum(1))
        return mask / lengths[owners, None].clamp(min=1) / completions
    if config.loss == "dr_grpo":
        return mask / (completions * max_tokens)
    return mask / mask.sum().clamp(min=1)


def loss_weights(
    mask: torch.Tensor,
    advantage: torch.Tensor,
    left_out: torch.Tensor,
    config: PolicyLossConfig,
    max_tokens: int,
    owners: torch.Tensor | None = None,
) -> torch.Tensor:
    """`token_weights` [B, T], but 0 for completions that are `left_out` [B]. With a `kl_coef` of 0, also where the
    advantage ([B, 1] or [B, T]) is 0: there the loss has no gradient.

    Completions that are left out also leave the mean over all tokens, but B still counts them.
    """
    weights = token_weights(mask * ~left_out[:, None], config, max_tokens, owners)
    return weights if config.kl_coef else weights * (advantage != 0)
