"""Which attention a model computes with: chosen by trying it on random prompts, and not by a list of models."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from .layout import SHARED, Layout, one_row, register_shared, separate_rows
from .logprobs import scores_of_logits
from .rollout import Rollout
from .rounding import nudged_embeddings, random_prompts

MAX_ROUNDING = 4  # times the measured rounding by which two ways to compute the same function may differ


class AttentionChoice(NamedTuple):
    name: str  # in transformers' attention interface
    remark: str  # for the user


@torch.no_grad()
def choose_attention(module, forward: Callable | None = None) -> AttentionChoice:
    """The attention that this fp32 model was loaded with, if that gives eager's logits of random prompts; else eager.

    The model is left with the attention that was tried last. `forward` computes the logits instead of the model's own
    forward pass; hidden states will do as well.

    transformers' fast attentions silently leave out what they do not know, such as Gemma 2's soft-capping.

    Rounding is measured: how much eager's logits change when every element of the embeddings becomes a neighbouring
    float. In 40 families, of whatever depth and scale, equal implementations differ by 0.2 to 1.4 times that. Gemma 2's
    differ by 7 times that with weights so small that its log-probabilities are only 2e-6 off, and by thousands with
    larger weights.
    """
    loaded, config = module.config._attn_implementation, module.config.get_text_config()
    if loaded == "eager" or getattr(config, "alibi", False):  # Falcon's eager adds ALiBi twice (transformers 5.19)
        return AttentionChoice(loaded, loaded)
    ids = random_prompts(module)
    window = getattr(config, "sliding_window", None)
    if window:
        config.sliding_window = min(window, ids.shape[1] // 4)  # so that a short prompt is longer than the window

    def logits(attention: str) -> torch.Tensor:
        module.config._attn_implementation = attention  # its setter reaches models that set_attn_implementation refuses
        # Not [0], which is the loss of a mixture's router if its config says output_router_logits.
        return forward(input_ids=ids) if forward else module(input_ids=ids, use_cache=False).logits

    eager = logits("eager")
    distance = (logits(loaded) - eager).abs().mean()
    with nudged_embeddings(module):
        rounding = (logits("eager") - eager).abs().mean()
    if window:
        config.sliding_window = window
    if distance <= MAX_ROUNDING * rounding:
        return AttentionChoice(loaded, f"{loaded}, whose logits are eager's but for rounding")
    difference = f"{distance:.1g} from eager's, {distance / rounding:.0f} times what rounding explains"
    return AttentionChoice("eager", f"eager, which is slower: {loaded}'s logits are {difference}")


@torch.no_grad()
def can_share_prompts(module, ids: torch.Tensor, head: Callable) -> bool:
    """Whether this fp32 model gives completions behind one prompt (layout.py) the same log-probabilities as in rows of
    their own, tried on `random_prompts`. Its attention is sdpa.

    They differ if anything but attention reaches from one completion to the next, such as the state of a Mamba layer,
    or if a model makes its own positions.
    """
    config = module.config.get_text_config()
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:  # windows may exceed these prompts
        return False
    register_shared()
    first, second = ids.tolist()
    pair = [Rollout(first[:32], first[32:], []), Rollout(first[:32], second[:16], [])]

    def logprobs(layout: Layout) -> torch.Tensor:
        tokens = layout.tokens(torch.tensor([0] * 32 + [1] * 16), torch.tensor([*range(32), *range(16)]))
        targets, states_at = (tensor.to(module.device) for tensor in tokens)
        inputs = layout.inputs_on(module.device)
        return module.score(inputs, targets, states_at, 1.0, False, head, scores_of_logits, False)[0]

    expected = logprobs(separate_rows(pair))
    with nudged_embeddings(module):
        rounding = (logprobs(separate_rows(pair)) - expected).abs().mean()
    module.config._attn_implementation = SHARED
    try:
        distance = (logprobs(one_row(pair)) - expected).abs().mean()
    except (TypeError, ValueError, RuntimeError):  # it takes no positions, or no such mask
        distance = float("inf")
    module.config._attn_implementation = "sdpa"
    return bool(distance <= MAX_ROUNDING * rounding)
