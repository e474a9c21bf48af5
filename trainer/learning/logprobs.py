"""Log-probabilities of tokens under any causal language model of transformers.

Logits are the largest tensor of a learning step: [tokens, vocabulary], many times the hidden states. So only the states
that predict target tokens go through the head, a chunk at a time. Unless there is memory for all of them, backward
computes a chunk's logits again.

Where a token was sampled from some tokens only (top-k, top-p, min-p), the engine has normalized over these, and so does
the trainer: it takes their logits alone from a chunk.

A head may be more than its matrix: Gemma 2 soft-caps logits, Cohere and Granite scale them. `choose_head` finds out.
"""

from collections.abc import Callable
from functools import partial
from itertools import repeat
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from ..errors import RunError
from .layout import to_device
from .multimodal import states_with_images
from .rollout import Rollout

CHUNK = 2048  # states whose logits are in memory at one time: 1.2 GB in fp32 for a vocabulary of 150,000
PADDING = -1e30  # a logit whose probability is 0; finite, so that the entropy, p log p, is a number


class Allowed(NamedTuple):
    """From which tokens N tokens were sampled: their sampling masks, packed, on the model's device."""

    token_ids: torch.Tensor
    places: torch.Tensor  # [N, 2]: where each token's ids begin, and how many there are
    width: int  # the largest number

    @classmethod
    def of(cls, rollouts: list[Rollout], device: torch.device) -> "Allowed":
        """Of the tokens that the policy sampled, in order. Raises RunError if the engine has returned no masks."""
        masks = [rollout.sampling_mask for rollout in rollouts]
        if not all(masks):
            missing = "the engine has not said from which tokens it has sampled (return_sampling_mask)"
            raise RunError(f"--top-p, --top-k and --min-p: {missing}")
        counts = np.concatenate([own.counts[rollout.mask] for own, rollout in zip(masks, rollouts, strict=True)])
        places = np.stack([counts.cumsum() - counts, counts], 1)
        arrays = np.concatenate([own.token_ids for own in masks]), places
        return cls(*(to_device(torch.from_numpy(own), device) for own in arrays), int(counts.max()))

    def padded(self, places: torch.Tensor) -> torch.Tensor:
        """The ids [n, width] of n tokens, with -1 behind them."""
        columns, (begins, counts) = torch.arange(self.width, device=places.device), places[..., None].unbind(1)
        ids = self.token_ids[(begins + columns).clamp(max=len(self.token_ids) - 1)]
        return torch.where(columns < counts, ids.long(), -1)


def token_scores(
    model,
    inputs: dict[str, torch.Tensor],
    targets: torch.Tensor,
    states_at: torch.Tensor,
    temperature: float,
    entropy: bool,
    head: Callable,
    score_logits: Callable,
    logits_again: bool,
    allowed: Allowed | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probabilities [N] of the targets [N] and, if `entropy`, entropies [N] of their distributions; else None.

    The inputs are the model's, from layout.py. They have no mask for padding on the right, since plain causal attention
    is faster. `states_at` [N] are the positions, in `input_ids.flatten()`, of the states that predict the targets.
    `head` is one that `choose_head` returns, `score_logits` is `scores_of_logits` or a function like it. With
    `logits_again`, backward computes logits again. Distributions are over the `allowed` tokens, or over all.

    This calls the trunk by itself. So it is a method of the model, `score`, before which FSDP gathers the weights.
    """
    if "pixels" in inputs:
        states = states_with_images(model, **inputs)
    else:
        states = model.get_decoder()(**inputs, use_cache=False).last_hidden_state

    def score(states: torch.Tensor, targets: torch.Tensor, places: torch.Tensor | None) -> tuple:
        own = None if places is None else allowed.padded(places)
        return score_logits(head(model, states), targets, temperature, entropy, own)

    states = states.flatten(0, 1)[states_at]
    if logits_again:
        score = partial(checkpoint, score, use_reentrant=False, preserve_rng_state=False)
    places = allowed.places.split(CHUNK) if allowed else repeat(None)
    chunks = map(score, states.split(CHUNK), targets.split(CHUNK), places)
    logprobs, entropies = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropies) if entropy else None


def scores_of_logits(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    entropy: bool,
    allowed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probabilities [N] of the targets [N] by these logits [N, V], and entropies [N] if `entropy`, else None. The
    distributions are over the `allowed` tokens, ids [N, W] with -1 behind them, or over all."""
    if allowed is not None:
        logits, targets = allowed_logits(logits, targets, allowed)[1], torch.zeros_like(targets)
    logits = logits.float()
    log_softmax = (logits if temperature == 1 else logits / temperature).log_softmax(-1)
    logprobs = log_softmax.gather(-1, targets[:, None])[:, 0]
    # Last: backward computes a chunk again up to the last tensor that it needs, and so not the entropies.
    with torch.no_grad():
        return logprobs, -(log_softmax.exp() * log_softmax).sum(-1) if entropy else None


def allowed_logits(
    logits: torch.Tensor, targets: torch.Tensor, allowed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids [N, 1 + W] of each target [N] and of what else is `allowed` [N, W], and their logits, of [N, V]. What
    fills up repeats the target's id, with a probability of 0."""
    filler = (allowed < 0) | (allowed == targets[:, None])
    ids = torch.cat((targets[:, None], torch.where(filler, targets[:, None], allowed)), 1)
    filler = torch.cat((torch.zeros_like(filler[:, :1]), filler), 1)
    return ids, logits.gather(1, ids).masked_fill(filler, PADDING)


def plain_head(model, states: torch.Tensor) -> torch.Tensor:
    """The logits [N, V] of these hidden states [N, H], if the head is a matrix and no more."""
    return model.get_output_embeddings()(states)


def own_head(trunk_output: type, model, states: torch.Tensor) -> torch.Tensor:
    """As `plain_head`, with all that the model's own forward pass does to logits, whose trunk returns these states."""
    output, ids = trunk_output(last_hidden_state=states[None]), states.new_zeros(1, len(states), dtype=torch.long)
    with patch.object(model.get_decoder(), "forward", lambda *_, **__: output):
        return model.forward(input_ids=ids, use_cache=False).logits.flatten(0, 1)  # [0] would copy their gradient


@torch.no_grad()
def choose_head(module, ids: torch.Tensor) -> Callable:
    """`plain_head` or, if it gives other logits, `own_head`, tried on these prompts [2, S] of an fp32 model. Raises
    RunError if trunk and head do not give the log-probabilities of a whole forward pass."""
    trunk, outputs, same = module.get_decoder(), [], []
    if trunk is not module:
        with trunk.register_forward_hook(lambda *call: outputs.append(type(call[-1]))):
            logits = module(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
        own = partial(own_head, *outputs)

        def both(model, states: torch.Tensor) -> torch.Tensor:
            logits = own(model, states)
            same.append(logits.equal(plain_head(model, states)))
            return logits

        targets, states_at = ids[:, 1:].flatten(), torch.arange(ids.numel(), device=ids.device).view_as(ids)[:, :-1]
        options = 1.0, False, both, scores_of_logits, False
        logprobs, _ = module.score({"input_ids": ids}, targets, states_at.flatten(), *options)
        if logprobs.allclose(scores_of_logits(logits, targets, 1.0, False)[0], rtol=1e-3, atol=1e-3):
            return plain_head if all(same) else own
    raise RunError(f"the trainer calls a trunk and its head separately, and {type(module).__name__} has no such trunk")
