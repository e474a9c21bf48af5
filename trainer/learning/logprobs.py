"""Log-probabilities of tokens under any causal language model of transformers.

Logits are the largest tensor of a learning step: [tokens, vocabulary], many times the hidden states. So only the states
that predict target tokens go through the head, a chunk at a time. Unless there is memory for all of them, backward
computes a chunk's logits again.

A head is more than its matrix: Gemma 2 soft-caps logits, Cohere and Granite scale them. So the head runs inside the
model's own `forward`, whose trunk (the embeddings and blocks below the head) returns states that were computed before.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from .multimodal import states_with_images

CHUNK = 1024  # states whose logits are in memory at one time: 0.6 GB in fp32 for a vocabulary of 150,000


def token_scores(
    model,
    inputs: dict[str, torch.Tensor],
    targets: torch.Tensor,
    states_at: torch.Tensor,
    temperature: float,
    entropy: bool,
    score_logits: Callable,
    logits_again: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probabilities [N] of the targets [N] and, if `entropy`, entropies [N] of their distributions; else None.

    The inputs are the model's, from layout.py. They have no mask for padding on the right, since plain causal attention
    is faster. `states_at` [N] are the positions, in `input_ids.flatten()`, of the states that predict the targets.
    `score_logits` is `scores_of_logits`, or a function like it. With `logits_again`, backward computes logits again.

    This calls the trunk by itself: call it by `as_forward` (sharding.py), since the model may be sharded.
    """
    if "pixels" in inputs:
        output = states_with_images(model, **inputs)
    else:
        output = model.get_decoder()(**inputs, use_cache=False)

    def score(states: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return score_logits(_head(model, type(output), states, targets), targets, temperature, entropy)

    states = output.last_hidden_state.flatten(0, 1)[states_at]
    if logits_again:
        score = partial(checkpoint, score, use_reentrant=False, preserve_rng_state=False)
    chunks = map(score, states.split(CHUNK), targets.split(CHUNK))
    logprobs, entropies = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropies) if entropy else None


def scores_of_logits(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probabilities [N] of the targets [N] by these logits [N, V], and entropies [N] if `entropy`, else None."""
    logits = logits.float()
    log_softmax = (logits if temperature == 1 else logits / temperature).log_softmax(-1)
    logprobs = log_softmax.gather(-1, targets[:, None])[:, 0]
    # Last: backward computes a chunk again up to the last tensor that it needs, and so not the entropies.
    with torch.no_grad():
        return logprobs, -(log_softmax.exp() * log_softmax).sum(-1) if entropy else None


def _head(model, output_type: type, states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The logits [N, V] that the model makes of these hidden states [N, H]. Only the shape of the ids [N] matters."""
    with _trunk_returning(model.get_decoder(), output_type(last_hidden_state=states[None])):
        return model.forward(input_ids=ids[None], use_cache=False).logits.flatten(0, 1)  # [0] would copy their gradient


@contextmanager
def _trunk_returning(trunk: torch.nn.Module, output) -> Iterator[None]:
    trunk.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        del trunk.forward
