"""How a micro-batch of rollouts passes through a model: in a row each, or in one row that has every prompt once.

The completions of a group share their prompt. With a row each, a group of 8 computes its prompt 8 times. One row
computes it once:

    prompt 0 | completion 0 | completion 1 | ... | prompt 1 | completion 8 | ...

Each completion's positions go on from its prompt's. Its tokens attend to the prompt, and to earlier tokens of the same
completion: `shared_attention` does this with two calls of a causal attention for each group.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np
import torch

from .rollout import Rollout

SHARED = "sdpa_shared"  # the name of `shared_attention` by sdpa in transformers' attention interface
SHARED_TOKENS = 512  # a prompt of at least so many passes once for its group


@dataclass
class PromptGroups:
    """An argument of attention functions: the groups of `one_row`. An object, since torch would compile a block anew
    for each length of a list."""

    shapes: list[tuple[int, int, int]]  # tokens P of a prompt, its completions G, tokens T of each, padding included


@dataclass(frozen=True)
class Layout:
    """Where b completions are in a model's inputs. Positions are those in `input_ids.flatten()`."""

    inputs: dict[str, torch.Tensor]  # input_ids [rows, S] and, of one row with shared prompts, position_ids [1, S]
    first_tokens: torch.Tensor  # positions [b] of the completions' first tokens
    first_states: torch.Tensor  # positions [b] of the states that predict those: of the prompts' last tokens
    groups: PromptGroups | None = None  # of one row

    def tokens(self, rows: torch.Tensor, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids [N] of tokens, by the numbers [N] of their completions (`rows`) and within those (`columns`), and the
        positions [N] of the states that predict them."""
        positions = self.first_tokens[rows] + columns
        ids = self.inputs["input_ids"].flatten()[positions]
        return ids, torch.where(columns > 0, positions - 1, self.first_states[rows])

    def inputs_on(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The inputs as arguments of the model."""
        inputs = {name: to_device(tensor, device) for name, tensor in self.inputs.items()}
        return inputs | ({"prompt_groups": self.groups} if self.groups else {})


def lay_out(rollouts: list[Rollout], share_prompts: bool) -> Layout:
    """One row with shared prompts, if all prompts are long and the model can `share_prompts`; else a row each."""
    return one_row(rollouts) if share_prompts and all(map(is_long, rollouts)) else separate_rows(rollouts)


def is_long(rollout: Rollout) -> bool:
    """Whether the prompt is long enough to pass once for its group. None with images does: the model makes their
    positions itself."""
    return not rollout.images and len(rollout.prompt_ids) >= SHARED_TOKENS


def separate_rows(rollouts: list[Rollout]) -> Layout:
    """A row for each rollout: its prompt and its completion."""
    ids = padded([np.concatenate([rollout.prompt_ids, rollout.completion_ids]) for rollout in rollouts]).long()
    prompt_lengths = torch.tensor([len(rollout.prompt_ids) for rollout in rollouts])
    first_tokens = torch.arange(len(ids)) * ids.shape[1] + prompt_lengths
    return Layout({"input_ids": ids}, first_tokens, first_tokens - 1)


def one_row(rollouts: list[Rollout]) -> Layout:
    """One row with each prompt once, for a model with `shared_attention`. Rollouts of one prompt are neighbours."""
    ids, position_ids, first_tokens, first_states, shapes, end = [], [], [], [], [], 0
    for group in (list(group) for _, group in groupby(rollouts, prompt_key)):
        prompt = as_tensor(group[0].prompt_ids).long()
        completions = padded([rollout.completion_ids for rollout in group]).long()
        count, length = completions.shape
        ids += [prompt, completions.flatten()]
        position_ids += [torch.arange(len(prompt)), torch.arange(len(prompt), len(prompt) + length).repeat(count)]
        end += len(prompt)
        first_tokens.append(end + length * torch.arange(count))
        first_states += [end - 1] * count
        shapes.append((len(prompt), count, length))
        end += completions.numel()
    inputs = {"input_ids": torch.cat(ids)[None], "position_ids": torch.cat(position_ids)[None]}
    return Layout(inputs, torch.cat(first_tokens), torch.tensor(first_states), PromptGroups(shapes))


def prompt_key(rollout: Rollout) -> bytes:
    """Equal for rollouts of equal prompts."""
    return np.asarray(rollout.prompt_ids, np.int64).tobytes() + (rollout.images.key if rollout.images else b"")


def shared_attention(attend: Callable) -> Callable:
    """An attention function of transformers: `attend`, which is causal, also where completions share a prompt.

    Queries, keys and values are [B, heads, S, D]. For an attention that transformers does not know it makes no mask.
    What else a model is called with, such as `prompt_groups`, it hands down.
    """
    by_group = torch.compiler.disable(partial(_attend_by_group, attend))

    def attention(module, query, key, value, attention_mask, prompt_groups: PromptGroups | None = None, **options):
        if prompt_groups is None:
            return attend(module, query, key, value, None, **options)
        return by_group(module, query, key, value, prompt_groups, **options), None

    return attention


def _attend_by_group(attend: Callable, module, query, key, value, groups: PromptGroups, **options):
    from torch.nn.attention.bias import causal_lower_right  # imports torch.compile: not in a driver

    if options.get("sliding_window"):
        raise ValueError("a layer with a sliding window has no shared prompts")
    sizes = [prompt_length + count * length for prompt_length, count, length in groups.shapes]
    rows = zip(*(tensor.split(sizes, 2) for tensor in (query, key, value)), strict=True)
    outputs = []
    for (prompt_length, count, length), row in zip(groups.shapes, rows, strict=True):
        prompt_q, prompt_k, prompt_v = (tensor[:, :, :prompt_length] for tensor in row)  # [1, heads, P, D]
        q, k, v = (  # of the completions: [G, heads, T, D]
            tensor[0, :, prompt_length:].unflatten(1, (count, length)).transpose(0, 1) for tensor in row
        )
        k = torch.cat([prompt_k.expand(count, -1, -1, -1), k], 2)
        v = torch.cat([prompt_v.expand(count, -1, -1, -1), v], 2)
        mask = causal_lower_right(length, prompt_length + length)  # the last query is at the last key
        outputs.append(attend(module, prompt_q, prompt_k, prompt_v, None, **options)[0])
        outputs.append(attend(module, q, k, v, mask, **options)[0].flatten(0, 1)[None])
    return torch.cat(outputs, 1)


def register_shared() -> None:
    """Register `shared_attention` by sdpa with transformers."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(SHARED, shared_attention(sdpa_attention_forward))


def as_tensor(numbers) -> torch.Tensor:
    """As torch.tensor(numbers), in a quarter of its time for a list: the GPU waits for a step's first tensors."""
    return torch.from_numpy(np.array(numbers))


def padded(rows: list) -> torch.Tensor:
    """Rows of numbers as a tensor [rows, S], padded with zeros on the right, where no earlier token attends to them."""
    return torch.nn.utils.rnn.pad_sequence([as_tensor(row) for row in rows], batch_first=True)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on this device. The next launches do not wait for what a GPU computes, as they would after a copy from
    memory that is not pinned."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
