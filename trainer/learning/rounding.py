"""How far rounding moves what a model computes, measured on random prompts."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def random_prompts(module) -> torch.Tensor:
    """The ids [2, 64] of two prompts, always the same, on the model's device."""
    vocabulary = module.config.get_text_config().vocab_size
    return torch.randint(vocabulary, (2, 64), generator=torch.Generator().manual_seed(0)).to(module.device)


@torch.no_grad()
def prompt_logprobs(module, temperature: float) -> torch.Tensor:
    """Log-probabilities [2, 64, vocabulary] of all tokens, after each token of random prompts."""
    logits = module(input_ids=random_prompts(module), use_cache=False).logits
    return (logits.float() / temperature).log_softmax(-1)


@contextmanager
def nudged_embeddings(module) -> Iterator[None]:
    """Inside, every element of the embeddings is a neighbouring float."""
    generator = torch.Generator().manual_seed(1)

    def nudge(_, inputs, embeddings: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(2, embeddings.shape, generator=generator).to(embeddings) * 2 - 1
        return embeddings * (1 + signs * torch.finfo(torch.float32).eps)

    hook = module.get_input_embeddings().register_forward_hook(nudge)
    try:
        yield
    finally:
        hook.remove()
