"""How a model attends: settled before it is used, by trying it on random prompts, and not by a list of models."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from .layout import SHARED, Layout, one_row, register_shared, rows_apart
from .logprobs import scores_of_logits, token_scores
from .rollout import Rollout

MAX_ROUNDING = 4  # times the measured rounding by which two ways to compute the same function may differ


def random_prompts(module) -> torch.Tensor:
    """The ids [2, 64] of two prompts, always the same, on the model's device."""
    vocabulary = module.config.get_text_config().vocab_size
    return torch.randint(vocabulary, (2, 64), generator=torch.Generator().manual_seed(0)).to(module.device)


@torch.no_grad()
def choose_attention(module, asked: str | None = None, forward: Callable | None = None) -> tuple[str, str]:
    """The attention that this fp32 model computes with from now on, and a remark on it: the model's default if its
    logits of random prompts are eager's, or if it was asked for; else eager. `forward` computes the logits, if that is
    not the model's own; hidden states do as well.

    transformers' fast attention leaves out what it does not know, without a word, such as Gemma 2's soft-capping.

    Rounding is measured, as what eager's logits change by when every element of the embeddings becomes a neighbouring
    float. In 40 families, of whatever depth and scale, equal implementations differ by 0.2 to 1.4 times that; Gemma 2
    by 7 with weights so small that its log-probabilities are only 2e-6 off, by thousands with larger ones.
    """
    own, config = module.config._attn_implementation, module.config.get_text_config()
    if own == "eager" or getattr(config, "alibi", False):  # Falcon's eager adds ALiBi twice, as of transformers 5.19
        return own, own
    ids = random_prompts(module)
    window = getattr(config, "sliding_window", None)
    if window:
        config.sliding_window = min(window, ids.shape[1] // 4)  # for both: it is at work in a short prompt as well

    def logits(attention: str) -> torch.Tensor:
        module.config._attn_implementation = attention  # its setter reaches models that set_attn_implementation refuses
        return (forward or module)(input_ids=ids, use_cache=False)[0]

    eager = logits("eager")
    distance = (logits(own) - eager).abs().mean()
    with _nudged(module):
        rounding = (logits("eager") - eager).abs().mean()
    if window:
        config.sliding_window = window
    if distance <= MAX_ROUNDING * rounding:
        return own, f"{own}, whose logits are eager's but for rounding"
    off = f"{distance:.1g} from eager's, {distance / rounding:.0f} times what rounding explains"
    if asked:
        return own, f"{own}, as asked for; its logits are {off}"
    return "eager", f"eager, which is slower: {own}'s logits are {off} (--attention {own} takes it all the same)"


@torch.no_grad()
def can_share_prompts(module, head_apart: bool) -> bool:
    """Whether this fp32 model of sdpa's attention gives completions behind one prompt (layout.py) the
    log-probabilities of rows of their own.

    They differ if more than attention reaches from one completion to the next, such as the state of a Mamba layer, or
    if a model makes its own positions.
    """
    config = module.config.get_text_config()
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:  # windows may be longer than what is tried
        return False
    register_shared()
    first, second = random_prompts(module).tolist()
    pair = [Rollout(first[:32], first[32:], []), Rollout(first[:32], second[:16], [])]

    def logprobs(layout: Layout) -> torch.Tensor:
        tokens = layout.tokens(torch.tensor([0] * 32 + [1] * 16), torch.tensor([*range(32), *range(16)]))
        targets, states_at = (tensor.to(module.device) for tensor in tokens)
        inputs = layout.inputs_on(module.device)
        return token_scores(module, inputs, targets, states_at, 1.0, False, head_apart, scores_of_logits)[0]

    apart = logprobs(rows_apart(pair))
    with _nudged(module):
        rounding = (logprobs(rows_apart(pair)) - apart).abs().mean()
    module.config._attn_implementation = SHARED
    try:
        distance = (logprobs(one_row(pair)) - apart).abs().mean()
    except (TypeError, ValueError, RuntimeError):  # it takes no positions, or no such mask
        distance = float("inf")
    module.config._attn_implementation = "sdpa"
    return bool(distance <= MAX_ROUNDING * rounding)


@contextmanager
def _nudged(module) -> Iterator[None]:
    """Every element of the embeddings is a neighbouring float."""
    generator = torch.Generator().manual_seed(1)

    def nudge(_, inputs, embeddings: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(2, embeddings.shape, generator=generator).to(embeddings) * 2 - 1
        return embeddings * (1 + signs * torch.finfo(torch.float32).eps)

    hook = module.get_input_embeddings().register_forward_hook(nudge)
    try:
        yield
    finally:
        hook.remove()
