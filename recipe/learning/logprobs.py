"""Log-probabilities of tokens under any causal language model of transformers, without keeping logits for backward.

Logits are the largest tensor of a learning step: [tokens, vocabulary], many times the hidden states. So only positions
that predict a token in question go through the head, a chunk at a time, and backward computes a chunk's logits again.

A head is more than its matrix: Gemma 2 soft-caps logits, Cohere and Granite scale them. Therefore it is not taken out
of its model. The model's own `forward` runs, while its trunk (the embeddings and blocks below the head) answers with
hidden states that it has computed before.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.utils.checkpoint import checkpoint

CHUNK = 1024  # positions with logits at one time: 0.6 GB in fp32 for a vocabulary of 150,000


def token_scores(
    model,
    inputs: dict[str, torch.Tensor],
    targets: torch.Tensor,
    states_at: torch.Tensor,
    temperature: float,
    entropy: bool,
    head_apart: bool,
    scores: Callable,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probabilities [N] of the targets [N], and entropies [N] of what they were drawn from, if asked for.

    The model gets these inputs, as layout.py lays them out: padding on the right needs no mask, and attention that is
    causal alone is faster. `states_at` [N] are the positions, in `input_ids.flatten()`, of the states that predict the
    targets. `scores` makes log-probabilities and entropies of logits, as `scores_of_logits` does.
    """
    if head_apart:
        output = model.get_decoder()(**inputs, use_cache=False)
        states = output.last_hidden_state
    else:
        states = model.forward(**inputs, use_cache=False).logits

    def score(states: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits = _head(model, type(output), states, targets) if head_apart else states
        return scores(logits, targets, temperature, entropy)

    states = states.flatten(0, 1)[states_at]
    chunks = [
        checkpoint(score, *chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(states.split(CHUNK), targets.split(CHUNK), strict=True)
    ]
    logprobs, entropies = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropies) if entropy else None


def scores_of_logits(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probabilities [N] of the targets [N] by these logits [N, V], and entropies [N] if asked for."""
    logits = logits.float()
    log_softmax = (logits if temperature == 1 else logits / temperature).log_softmax(-1)
    logprobs = log_softmax.gather(-1, targets[:, None])[:, 0]
    # Last: backward computes a chunk again up to the last tensor that it needs, so not the entropy.
    with torch.no_grad():
        return logprobs, -(log_softmax.exp() * log_softmax).sum(-1) if entropy else None


def _head(model, output_type: type, states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The logits [N, V] that the model makes of these hidden states [N, H]; of the ids [N], only the shape counts."""
    with _trunk_that_answers(model.get_decoder(), output_type(last_hidden_state=states[None])):
        return model.forward(input_ids=ids[None], use_cache=False).logits[0]


@contextmanager
def _trunk_that_answers(trunk: torch.nn.Module, answer) -> Iterator[None]:
    trunk.forward = lambda *args, **kwargs: answer
    try:
        yield
    finally:
        del trunk.forward


@torch.no_grad()
def has_head_apart(model) -> bool:
    """Whether this model's logits are what its head makes of each hidden state of its trunk: seen on a short prompt.

    This and `token_scores` call a part of the model by itself, so that shards want an `add_forward`.
    """
    trunk = model.get_decoder()
    if trunk is model:
        return False
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (1, 32), generator=torch.Generator().manual_seed(0)).to(model.device)
    places = torch.arange(31, -1, -1, device=model.device)  # backwards, since what stands beside a state may not matter
    logits = model.forward(input_ids=ids, use_cache=False).logits[0, places]
    try:
        output = trunk(input_ids=ids, use_cache=False)
        again = _head(model, type(output), output.last_hidden_state[0, places], ids[0])
    except (AttributeError, KeyError, TypeError, ValueError):  # it has no such trunk, or wants more of it
        return False
    return again.shape == logits.shape and bool((again - logits).abs().max() <= 1e-4 * logits.abs().max())
