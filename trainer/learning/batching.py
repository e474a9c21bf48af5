"""How the rollouts of a batch are divided: over ranks, and on each rank into micro-batches."""

from collections import defaultdict
from dataclasses import dataclass

import torch

from .layout import is_long, prompt_key
from .rollout import Rollout


@dataclass
class RankBatch:
    """The rollouts of a batch that one rank scores. Slices of them are its micro-batches."""

    rollouts: list[Rollout]
    tensors: dict[str, torch.Tensor]  # the rollouts' rows of tensors [B, ...]
    micro_batches: list[slice]  # of the rollouts that are learned from
    forward_only: list[slice]  # micro-batches of the others


def rank_batch(
    rollouts: list[Rollout],
    learned: list[bool],
    tensors: dict[str, torch.Tensor],
    rank: int,
    ranks: int,
    max_tokens: int,
    shares_prompts: bool,
) -> RankBatch:
    """A rank's part of B rollouts, of which some are `learned` from, and of tensors [B, ...].

    All ranks get equally many rollouts and slice them alike, so that their passes through the sharded model match: the
    k-th rollouts of all ranks are similar in length, and belong to the same group where groups share prompts. If the
    ranks do not divide a group, copies of its shortest rollout fill up; their rows of the tensors are 0.
    """
    count, rows, tensor_rows, micro_batches = len(rollouts), [], [], {}
    for learns in (True, False):
        first, sizes = len(rows), []
        groups = _groups(rollouts, [row for row in range(count) if learned[row] == learns], shares_prompts)
        for key, group in groups.items():
            fillers = -len(group) % ranks
            filled = group + fillers * group[-1:]
            prompt_tokens = len(rollouts[group[0]].prompt_ids) if key and not rollouts[group[0]].images else 0
            # The first rank's rollout is the longest. All ranks slice by its size, and so alike.
            sizes += [(key, prompt_tokens, tokens(rollouts[row]) - prompt_tokens) for row in filled[::ranks]]
            rows += filled[rank::ranks]
            tensor_rows += (group + fillers * [count])[rank::ranks]
        slices = micro_batch_slices(sizes, max_tokens)
        micro_batches[learns] = [slice(first + own.start, first + own.stop) for own in slices]
    tensors = {name: torch.cat([t, torch.zeros_like(t[:1])])[tensor_rows] for name, t in tensors.items()}
    return RankBatch([rollouts[row] for row in rows], tensors, micro_batches[True], micro_batches[False])


def tokens(rollout: Rollout) -> int:
    """The number of tokens of its prompt and its completion."""
    return len(rollout.prompt_ids) + len(rollout.completion_ids)


def _groups(rollouts: list[Rollout], rows: list[int], shares_prompts: bool) -> dict[bytes, list[int]]:
    """These rows, the longest first, by the prompt or the images that they share; by b"" if they share none."""
    groups = defaultdict(list)
    for row in sorted(rows, key=lambda row: -tokens(rollouts[row])):
        together = rollouts[row].images or (shares_prompts and is_long(rollouts[row]))
        groups[prompt_key(rollouts[row]) if together else b""].append(row)
    return groups


def micro_batch_slices(sizes: list[tuple[bytes, int, int]], max_tokens: int) -> list[slice]:
    """Slices of sequences with these sizes: each has at most `max_tokens`, padding included, or a single sequence.

    A size is a group's key, the tokens that the group shares, and the sequence's own tokens. A group's sequences are
    neighbours, and the first is the longest. A group that shares no tokens is in slices of its own.
    """
    slices, begin, tokens, group, group_shares, width = [], 0, 0, None, 0, 0
    for row, (key, shared_tokens, own_tokens) in enumerate(sizes):
        new_group = key != group
        added = shared_tokens + own_tokens if new_group else width
        if row > begin and (tokens + added > max_tokens or (new_group and 0 in (shared_tokens, group_shares))):
            slices.append(slice(begin, row))
            begin, tokens, new_group, added = row, 0, True, shared_tokens + own_tokens
        if new_group:
            group, group_shares, width = key, shared_tokens, own_tokens
        tokens += added
    return [*slices, slice(begin, len(sizes))] if sizes else []
