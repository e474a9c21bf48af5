"""How tensors are packed into buckets. Both ends compute the same plan, so only bytes travel."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .copies import WORD_BYTES
from .link import CONNECT_SECONDS, WeightSyncError

STAGING_BYTES = 1000 << 20  # all staging buffers of one end; with the tables of copies this stays below 1 GiB
STAGING_BUFFERS = 4  # of a broadcast: how many buffers share STAGING_BYTES, and so how many buckets are in flight
ALIGN_BYTES = 256  # tensors start at multiples of this, so that every copy is vectorized
SLOWEST_BYTES_PER_SECOND = 50e6  # a slower transfer counts as stuck


@dataclass(frozen=True)
class Piece:
    """Elements [begin, begin + count) of a flattened tensor. They lie at byte `offset` of a bucket."""

    number: int  # among all pieces of the plan
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    count: int
    offset: int

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    @property
    def padded_nbytes(self) -> int:
        """`nbytes`, rounded up to whole words."""
        return -(-self.nbytes // WORD_BYTES) * WORD_BYTES


def plan_buckets(metadata: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], bucket_bytes: int) -> list[list[Piece]]:
    """Pack tensors, in order, into buckets of at most `bucket_bytes` bytes, a multiple of ALIGN_BYTES.

    `metadata` holds (name, dtype, shape) of each tensor. A tensor larger than a bucket is cut between rows.
    """
    buckets, offset, number = [[]], 0, 0
    for name, dtype, shape in metadata:
        numel = torch.Size(shape).numel()
        row = max(1, numel // shape[0]) if shape else 1
        begin = 0
        while begin < numel:
            room = (bucket_bytes - offset) // dtype.itemsize
            count = min(numel - begin, room)
            if count < numel - begin:
                # What does not fit starts in a fresh bucket. Only a tensor that no bucket can hold is cut.
                if offset:
                    buckets.append([])
                    offset = 0
                    continue
                count = max(count // row * row, min(count, row))
            buckets[-1].append(Piece(number, name, dtype, tuple(shape), begin, count, offset))
            number += 1
            begin += count
            offset += -(-count * dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES
    return buckets


def staging_buffer_bytes(buffers: int = STAGING_BUFFERS) -> int:
    """The size of one of so many staging buffers, and so of the largest bucket."""
    return STAGING_BYTES // buffers


def wire_buckets(wire: list, bucket_bytes: int) -> list[list[Piece]]:
    """`plan_buckets` for metadata from a message: (name, name of the dtype, shape) of each tensor."""
    metadata = [(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in wire]
    return plan_buckets(metadata, bucket_bytes)


def wire_of(buckets: list[list[Piece]]) -> list[tuple[str, str, tuple[int, ...]]]:
    """The inverse of `wire_buckets`: (name, name of the dtype, shape) of each tensor in these buckets."""
    return list(dict.fromkeys((p.name, dtype_name(p.dtype), p.shape) for bucket in buckets for p in bucket))


def bucket_nbytes(bucket: list[Piece]) -> int:
    return bucket[-1].offset + bucket[-1].padded_nbytes


def seconds_allowed(buckets: list[list[Piece]]) -> float:
    """How long one pass over these buckets may take before it counts as stuck."""
    return CONNECT_SECONDS + sum(map(bucket_nbytes, buckets)) / SLOWEST_BYTES_PER_SECOND


def piece_of(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """A view of the piece's elements: flat [count], or rows if the tensor is not contiguous.

    Raises WeightSyncError for a piece of a non-contiguous tensor that does not consist of whole rows.
    """
    if tensor.is_contiguous():
        return tensor.view(-1)[piece.begin : piece.begin + piece.count]
    row = tensor[0].numel()
    if piece.begin % row or piece.count % row:
        raise WeightSyncError(f"{piece.name} is not contiguous, and one row of it is larger than a bucket")
    return tensor[piece.begin // row : (piece.begin + piece.count) // row]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
