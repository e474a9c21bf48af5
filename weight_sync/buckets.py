"""How tensors are cut into pieces, and packed into buckets. Both ends compute the same plan, so only bytes travel.

One trainer rank holds a piece. Pieces of all ranks take turns, so that all ranks send at the same time. The words,
here and in the other modules:

piece       consecutive rows of a tensor, which one rank holds
region      the elements of a piece that one copy of a worker's loaders reads, with strides
bucket      pieces that travel at the same time
payload     the bytes of a bucket that one rank sends at once: of whole pieces, or of regions
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise, zip_longest

import torch

from .link import CONNECT_SECONDS

STAGING_BYTES = 1000 << 20  # all staging buffers of one end; with the tables of copies this stays below 1 GiB
STAGING_BUFFERS = 3  # how many buffers share STAGING_BYTES, and so how many buckets are in flight
PIECE_BYTES = 8 << 20  # of a tensor that several ranks hold, unless a row of it is larger
ALIGN_BYTES = 256  # pieces start at multiples of this, so that every copy is vectorized
SLOWEST_BYTES_PER_SECOND = 50e6  # a slower transfer counts as stuck


@dataclass(frozen=True)
class Piece:
    """Elements [begin, begin + count) of a flattened tensor."""

    number: int  # among all pieces of the plan
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    rank: int  # the trainer rank that holds them
    first: int  # the first element of the tensor that this rank holds
    begin: int
    count: int

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    @property
    def row(self) -> int:
        """Elements in a row of the tensor."""
        return row_of(self.shape)


def plan_buckets(wire: Iterable[tuple], bucket_bytes: int) -> list[list[Piece]]:
    """Pack tensors, in order, into buckets of at most `bucket_bytes` bytes, or of a single row that is larger.

    `wire` has (name, name of the dtype, shape, bounds) of each tensor: rank r holds the elements from bounds[r] to
    bounds[r + 1]. Pieces are made of whole rows, as many as fit in a bucket, or with several ranks in PIECE_BYTES.
    """
    buckets, filled, number = [[]], 0, 0  # filled: bytes of the last bucket
    for name, type_name, shape, bounds in wire:
        dtype, row = getattr(torch, type_name), row_of(shape)
        largest = min(bucket_bytes, PIECE_BYTES) if bounds[1:-1] else bucket_bytes
        step = max(1, largest // (row * dtype.itemsize)) * row
        by_rank = [
            [(rank, first, begin, min(step, end - begin)) for begin in range(first, end, step)]
            for rank, (first, end) in enumerate(pairwise(bounds))
        ]
        for rank, first, begin, count in (cut for turn in zip_longest(*by_rank) for cut in turn if cut):
            nbytes = aligned(count * dtype.itemsize)
            if buckets[-1] and filled + nbytes > bucket_bytes:
                buckets.append([])
                filled = 0
            buckets[-1].append(Piece(number, name, dtype, tuple(shape), rank, first, begin, count))
            filled, number = filled + nbytes, number + 1
    return buckets


def largest_bucket(times: int = 1) -> int:
    """The bytes of a bucket: those of a staging buffer, or so many times that if each end has only a fraction of it."""
    return min(STAGING_BYTES, times * STAGING_BYTES // STAGING_BUFFERS) // ALIGN_BYTES * ALIGN_BYTES


def staging_buffers(bucket_bytes: int) -> int:
    """How many staging buffers of this size one end has."""
    return STAGING_BYTES // bucket_bytes


def wire_of(buckets: list[list[Piece]]) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, name of the dtype, shape) of each tensor in these buckets, in order."""
    return list(dict.fromkeys((p.name, dtype_name(p.dtype), p.shape) for bucket in buckets for p in bucket))


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
