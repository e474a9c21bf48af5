"""How a micro-batch of rollouts passes through a model: in a row each, or in one row behind the prompt they share.

The completions of a group repeat their prompt. With a prompt of 4,096 tokens and 8 completions of 512, a row each does
seven eighths of the prompt's work again. One row does it once:

    prompt | completion 0 | completion 1 | ...

Each completion's positions go on from the prompt's. Its tokens attend to the prompt and to what precedes them in their
own completion: `shared_attention` sees to that with two calls of a causal attention.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.nn.attention.bias import causal_lower_right

from .rollout import Rollout

SHARED = "sdpa_shared"  # what transformers' attention interface calls sdpa by `shared_attention`
SHARED_TOKENS = 512  # of a prompt that passes once; with shorter ones, many groups in a micro-batch are faster


@dataclass(frozen=True)
class Layout:
    """A model's inputs for b completions, and where they are in `input_ids.flatten()`."""

    inputs: dict[str, torch.Tensor]  # input_ids [rows, S]; for a shared prompt also position_ids and attention_mask
    begins: torch.Tensor  # the position of each completion's first token, [b]
    before: torch.Tensor  # of the token before it, whose state predicts it, [b]

    def tokens(self, rows: torch.Tensor, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids [N] of the completions' tokens at these columns, and the positions [N] of the states that predict
        them."""
        at = self.begins[rows] + columns
        return self.inputs["input_ids"].flatten()[at], torch.where(columns > 0, at - 1, self.before[rows])


def lay_out(rollouts: list[Rollout], shares: bool) -> Layout:
    """One row for all, if the model `shares` prompts and all have the same long one; else a row for each."""
    (_, shared), *others = groups(rollouts, range(len(rollouts)), shares)
    if shared and not others and len(rollouts) > 1:
        return one_row(rollouts)
    return rows_apart(rollouts)


def rows_apart(rollouts: list[Rollout]) -> Layout:
    """A row for each rollout."""
    ids = _padded([np.concatenate([rollout.prompt_ids, rollout.completion_ids]) for rollout in rollouts])
    begins = torch.arange(len(ids)) * ids.shape[1] + torch.tensor([len(rollout.prompt_ids) for rollout in rollouts])
    return Layout({"input_ids": ids}, begins, begins - 1)


def groups(rollouts: list[Rollout], rows: Iterable[int], shares: bool) -> list[tuple[list[int], int]]:
    """These rows, by who may pass together, and how many tokens of a prompt they share.

    If the model `shares` prompts, the rollouts of each long prompt are a group. All others are one, which shares 0.
    """
    found = {}
    for row in rows:
        prompt = rollouts[row].prompt_ids
        shared = len(prompt) if shares and len(prompt) >= SHARED_TOKENS else 0
        found.setdefault(np.asarray(prompt[:shared], np.int64).tobytes(), ([], shared))[0].append(row)
    return list(found.values())


def one_row(rollouts: list[Rollout]) -> Layout:
    """The prompt that all have, and their completions behind it. The model's attention is `shared_attention`."""
    prompt, completions = as_tensor(rollouts[0].prompt_ids).long(), _padded([r.completion_ids for r in rollouts])
    (shared,), (count, length) = prompt.shape, completions.shape
    positions = torch.cat([torch.arange(shared), torch.arange(shared, shared + length).repeat(count)])
    begins = shared + length * torch.arange(count)
    inputs = {
        "input_ids": torch.cat([prompt, completions.flatten()])[None],
        "position_ids": positions[None],
        "attention_mask": torch.ones(1, dtype=torch.bool).expand(count, 1, length, shared + length),
    }
    return Layout(inputs, begins, torch.full_like(begins, shared - 1))


def shared_attention(attend: Callable, module, query, key, value, attention_mask=None, **options):
    """An attention function of transformers: `attend`, which is causal, also where completions share a prompt.

    Queries, keys and values are [B, heads, S, D]. With a row of P prompt tokens and G completions of T tokens comes a
    mask [G, 1, T, P + T], of which only the shape is read: `attend` aligns the last query with the last key.
    """
    if attention_mask is None:
        return attend(module, query, key, value, None, **options)
    if options.get("sliding_window"):
        raise ValueError("a layer with a sliding window has no shared prompts")
    count, _, length, whole = attention_mask.shape
    prompts, completions = zip(*(_split(tensor, whole - length, count) for tensor in (query, key, value)), strict=True)
    of_prompt, _ = attend(module, *prompts, None, **options)  # [1, P, heads, D]
    queries, *seen = completions
    seen = (
        torch.cat([prompt.expand(count, -1, -1, -1), own], 2) for prompt, own in zip(prompts[1:], seen, strict=True)
    )
    of_completions, _ = attend(module, queries, *seen, causal_lower_right(length, whole), **options)  # [G, T, heads, D]
    return torch.cat([of_prompt, of_completions.flatten(0, 1)[None]], 1), None


def _split(tensor: torch.Tensor, prompt: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The prompt's part [1, heads, P, D] and the completions' [G, heads, T, D]."""
    return tensor[:, :, :prompt], tensor[0, :, prompt:].unflatten(1, (count, -1)).transpose(0, 1)


def register_shared() -> None:
    """Let transformers know sdpa by `shared_attention`."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(SHARED, partial(shared_attention, sdpa_attention_forward))


def as_tensor(numbers) -> torch.Tensor:
    """As torch.tensor(numbers), which takes four times as long for a list: the GPU waits for a step's first tensors."""
    return torch.from_numpy(np.array(numbers))


def _padded(rows: list) -> torch.Tensor:
    """Token ids [rows, S], padded on the right, which no earlier token sees."""
    return torch.nn.utils.rnn.pad_sequence([as_tensor(row) for row in rows], batch_first=True).long()
