"""How tensors are cut into pieces, and packed into buckets. Both ends compute the same plan, so only bytes travel.

One trainer rank holds a piece. Pieces of all ranks take turns, so that all ranks send at the same time.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise, zip_longest

import torch

from .link import CONNECT_SECONDS

STAGING_BYTES = 1000 << 20  # all staging buffers of one end; with the tables of copies this stays below 1 GiB
STAGING_BUFFERS = 3  # how many buffers share STAGING_BYTES, and so how many buckets are in flight
PIECE_BYTES = 8 << 20  # about the largest piece of a tensor that several ranks hold
ALIGN_BYTES = 256  # pieces start at multiples of this, so that every copy is vectorized
SLOWEST_BYTES_PER_SECOND = 50e6  # a slower transfer counts as stuck


@dataclass(frozen=True)
class Piece:
    """Elements [begin, begin + count) of a flattened tensor. They lie at byte `offset` of their rank's part of a
    bucket."""

    number: int  # among all pieces of the plan
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    rank: int  # the trainer rank that holds them
    first: int  # the first element of the tensor that this rank holds
    begin: int
    count: int
    offset: int

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    @property
    def row(self) -> int:
        """Elements in a row of the tensor."""
        return row_of(self.shape)


def plan_buckets(wire: Iterable[tuple], bucket_bytes: int) -> list[list[Piece]]:
    """Pack tensors, in order, into buckets of at most `bucket_bytes` bytes, a multiple of ALIGN_BYTES.

    `wire` has (name, name of the dtype, shape, bounds) of each tensor: rank r holds the elements from bounds[r] to
    bounds[r + 1]. Pieces end between rows. They have as many rows as fit in a bucket, or with several ranks in
    PIECE_BYTES, and at least one. Only a row that no bucket can hold is cut.
    """
    buckets, ends, number = [[]], {}, 0  # ends: of the ranks' parts of the last bucket, in bytes
    for name, type_name, shape, bounds in wire:
        dtype, several_ranks = getattr(torch, type_name), bounds[1:-1]
        row, most = row_of(shape), bucket_bytes // dtype.itemsize
        largest = min(most, max(PIECE_BYTES // dtype.itemsize, row)) if several_ranks else most
        step = largest // row * row or largest
        shares = [
            [(rank, first, begin, min(step, end - begin)) for begin in range(first, end, step)]
            for rank, (first, end) in enumerate(pairwise(bounds))
        ]
        for rank, first, begin, count in (cut for turn in zip_longest(*shares) for cut in turn if cut):
            nbytes = aligned(count * dtype.itemsize)
            if buckets[-1] and sum(ends.values()) + nbytes > bucket_bytes:
                buckets.append([])
                ends = {}
            offset = ends.get(rank, 0)
            buckets[-1].append(Piece(number, name, dtype, tuple(shape), rank, first, begin, count, offset))
            ends[rank] = offset + nbytes
            number += 1
    return buckets


def largest_bucket(times: int = 1) -> int:
    """The bytes of a bucket: those of a staging buffer, or so many times that, if no end has more than a part of it."""
    return min(STAGING_BYTES, times * STAGING_BYTES // STAGING_BUFFERS) // ALIGN_BYTES * ALIGN_BYTES


def staging_buffers(bucket_bytes: int) -> int:
    """How many staging buffers of this size one end has."""
    return STAGING_BYTES // bucket_bytes


def wire_of(buckets: list[list[Piece]]) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, name of the dtype, shape) of each tensor in these buckets, in order."""
    return list(dict.fromkeys((p.name, dtype_name(p.dtype), p.shape) for bucket in buckets for p in bucket))


def part_sizes(bucket: list[Piece], ranks: int) -> list[int]:
    """The bytes of each rank's part of a bucket."""
    sizes = [0] * ranks
    for piece in bucket:
        sizes[piece.rank] = piece.offset + aligned(piece.nbytes)
    return sizes


def seconds_allowed(buckets: list[list[Piece]]) -> float:
    """How long one pass over these buckets may take before it counts as stuck."""
    return CONNECT_SECONDS + sum(piece.nbytes for bucket in buckets for piece in bucket) / SLOWEST_BYTES_PER_SECOND


def row_of(shape: tuple[int, ...]) -> int:
    """The number of elements in a row of a tensor of this shape."""
    return max(1, torch.Size(shape[1:]).numel())


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
