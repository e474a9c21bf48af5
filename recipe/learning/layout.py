"""How a micro-batch of rollouts passes through a model: in a row each, or in one row that has every prompt once.

The completions of a group repeat their prompt. With a prompt of 4,096 tokens and 8 completions of 512, a row each does
seven eighths of the prompt's work again. One row does it once:

    prompt 0 | completion 0 | completion 1 | ... | prompt 1 | completion 8 | ...

Each completion's positions go on from its prompt's. Its tokens attend to the prompt and to what precedes them in their
own completion: `shared_attention` sees to that with two calls of a causal attention for each group.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np
import torch
from torch.nn.attention.bias import causal_lower_right

from .rollout import Rollout

SHARED = "sdpa_shared"  # what transformers' attention interface calls sdpa by `shared_attention`
SHARED_TOKENS = 512  # of a prompt that is worth it


@dataclass(frozen=True)
class Layout:
    """Where b completions are in a model's inputs, by positions in `input_ids.flatten()`."""

    inputs: dict[str, torch.Tensor]  # input_ids [rows, S], and if there is one row, position_ids [1, S]
    begins: torch.Tensor  # the position of each completion's first token, [b]
    before: torch.Tensor  # of the token before it, whose state predicts it, [b]
    shapes: list[tuple[int, int, int]] | None = None  # of one row's groups, as `shared_attention` takes them

    def tokens(self, rows: torch.Tensor, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids [N] of the completions' tokens at these columns, and the positions [N] of the states that predict
        them."""
        at = self.begins[rows] + columns
        return self.inputs["input_ids"].flatten()[at], torch.where(columns > 0, at - 1, self.before[rows])

    def inputs_on(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The inputs as arguments of the model."""
        inputs = {name: tensor.to(device) for name, tensor in self.inputs.items()}
        if self.shapes:
            # transformers hands a mask of four dimensions to every attention as it is.
            inputs["attention_mask"] = torch.empty(1, 1, 1, 1, dtype=torch.bool, device=device)
            inputs["attention_mask"].shapes = self.shapes
        return inputs


def lay_out(rollouts: list[Rollout], shares: bool) -> Layout:
    """One row, if the model `shares` prompts and all of these are long; else a row for each."""
    return one_row(rollouts) if shares and all(map(is_long, rollouts)) else rows_apart(rollouts)


def is_long(rollout: Rollout) -> bool:
    """Whether its prompt passes once for its group."""
    return len(rollout.prompt_ids) >= SHARED_TOKENS


def rows_apart(rollouts: list[Rollout]) -> Layout:
    """A row for each rollout."""
    ids = _padded([np.concatenate([rollout.prompt_ids, rollout.completion_ids]) for rollout in rollouts])
    begins = torch.arange(len(ids)) * ids.shape[1] + torch.tensor([len(rollout.prompt_ids) for rollout in rollouts])
    return Layout({"input_ids": ids}, begins, begins - 1)


def one_row(rollouts: list[Rollout]) -> Layout:
    """One row with each prompt once, for a model with `shared_attention`. Rollouts of one prompt are neighbours."""
    ids, positions, begins, before, shapes, end = [], [], [], [], [], 0
    for group in (list(group) for _, group in groupby(rollouts, prompt_key)):
        completions = _padded([rollout.completion_ids for rollout in group])
        prompt, (count, length) = as_tensor(group[0].prompt_ids).long(), completions.shape
        ids += [prompt, completions.flatten()]
        positions += [torch.arange(len(prompt)), torch.arange(len(prompt), len(prompt) + length).repeat(count)]
        end += len(prompt)
        begins.append(end + length * torch.arange(count))
        before += [end - 1] * count
        shapes.append((len(prompt), count, length))
        end += completions.numel()
    inputs = {"input_ids": torch.cat(ids)[None], "position_ids": torch.cat(positions)[None]}
    return Layout(inputs, torch.cat(begins), torch.tensor(before), shapes)


def prompt_key(rollout: Rollout) -> bytes:
    return np.asarray(rollout.prompt_ids, np.int64).tobytes()


def shared_attention(attend: Callable, module, query, key, value, attention_mask=None, **options):
    """An attention function of transformers: `attend`, which is causal, also where completions share a prompt.

    Queries, keys and values are [B, heads, S, D]. A mask comes with `one_row` alone, for its attribute `shapes`: of
    each group the tokens P of the prompt, the completions G, and the tokens T of each of those, padding included.
    """
    if attention_mask is None:
        return attend(module, query, key, value, None, **options)
    return _attend_by_group(attend, module, query, key, value, attention_mask.shapes, **options), None


@torch.compiler.disable
def _attend_by_group(attend: Callable, module, query, key, value, shapes: list[tuple[int, int, int]], **options):
    if options.get("sliding_window"):
        raise ValueError("a layer with a sliding window has no shared prompts")
    sizes, out = [prompt + count * length for prompt, count, length in shapes], []
    groups = zip(*(tensor.split(sizes, 2) for tensor in (query, key, value)), strict=True)
    for (prompt, count, length), group in zip(shapes, groups, strict=True):
        # [1, heads, P, D] and [G, heads, T, D]
        q, k, v = (tensor[:, :, :prompt] for tensor in group)
        queries, *own = (tensor[0, :, prompt:].unflatten(1, (count, length)).transpose(0, 1) for tensor in group)
        keys, values = (torch.cat([t.expand(count, -1, -1, -1), o], 2) for t, o in zip((k, v), own, strict=True))
        last = causal_lower_right(length, prompt + length)  # the last query is at the last key
        out.append(attend(module, q, k, v, None, **options)[0])
        out.append(attend(module, queries, keys, values, last, **options)[0].flatten(0, 1)[None])
    return torch.cat(out, 1)


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
