"""The trainer ranks that hold shards of the tensors."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .buckets import row_of
from .link import CONNECT_SECONDS, WeightSyncError, wait_until

if TYPE_CHECKING:  # the import takes a second, and a process that has no DTensor does without
    from torch.distributed.tensor import DTensor

TEXT_BYTES = 1000  # longest text that one rank tells the others


@dataclass(frozen=True, eq=False)
class ShardedPart:
    """A weight that is a part of a sharded tensor, such as one expert's in a mixture's fused tensor.

    `base` is sharded by rows. The weight has this `shape`; its elements begin at element `begin` of `base`.
    """

    base: "DTensor"
    begin: int
    shape: torch.Size

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    @property
    def device(self) -> torch.device:
        return self.base.device

    def numel(self) -> int:
        return self.shape.numel()

    def bounds(self, ranks: int) -> list[int]:
        """Where in the flat weight each rank's elements begin, and where the last rank's end: [ranks + 1]."""
        rows = -(-self.base.shape[0] // ranks)  # divided as by torch.chunk
        begins = [rank * rows * row_of(self.base.shape) - self.begin for rank in range(ranks + 1)]
        return [min(max(begin, 0), self.numel()) for begin in begins]

    def local(self, rank: int, ranks: int) -> tuple[int, torch.Tensor]:
        """The weight's elements [n] on this rank of `ranks`, and where in the flat weight they begin."""
        begin, end = self.bounds(ranks)[rank : rank + 2]
        first = self.begin + begin - rank * -(-self.base.shape[0] // ranks) * row_of(self.base.shape)  # in the shard
        return begin, local_part(self.base).flatten()[first : first + end - begin]


class Ranks:
    """The ranks over which the trainer's tensors are sharded, or, without a group, this rank alone."""

    def __init__(self, group: dist.ProcessGroup | None = None, rank: int = 0):
        self.group, self.rank, self.size = group, rank, group.size() if group else 1
        self.role = f"trainer rank {rank}" if self.size > 1 else "the trainer"  # what errors call this rank

    def bounds(self, tensor: torch.Tensor | ShardedPart) -> list[int]:
        """As `ShardedPart.bounds`. Of a tensor that is not sharded, rank 0 sends all."""
        if not is_sharded(tensor):
            return [0] + [tensor.numel()] * self.size
        return _part(tensor).bounds(self.size)

    def elements(self, tensor: torch.Tensor | ShardedPart) -> torch.Tensor:
        """What this rank sends of a tensor: elements [n], in the tensor's own memory if it is contiguous."""
        if is_sharded(tensor):
            return _part(tensor).local(self.rank, self.size)[1]
        return tensor.reshape(-1)[: 0 if self.rank else tensor.numel()]

    def texts(self, text: str, device: torch.device | str) -> list[str]:
        """The text of each rank. Raises WeightSyncError if one is missing for CONNECT_SECONDS."""
        if self.size == 1:
            return [text]
        rows = torch.zeros(self.size, TEXT_BYTES, dtype=torch.uint8, device=device)
        rows[self.rank] = torch.tensor(list(text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")), dtype=torch.uint8)
        summed = dist.all_reduce(rows, group=self.group, async_op=True)
        wait_until(lambda: summed.is_completed() and summed.wait(), [], time.monotonic() + CONNECT_SECONDS)
        return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows.tolist()]


def ranks_of(tensors: dict[str, torch.Tensor]) -> Ranks:
    """The ranks over which the DTensors among these are sharded.

    Raises WeightSyncError for DTensors that are not sharded by rows, or over different groups.
    """
    rank_by_group = {}
    for name, weight in tensors.items():
        tensor = weight.base if isinstance(weight, ShardedPart) else weight
        if is_sharded(tensor):
            from torch.distributed.tensor import Shard

            mesh_dims = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
            if [tensor.placements[dim] for dim in mesh_dims] != [Shard(0)]:
                raise WeightSyncError(f"{name} is placed as {tensor.placements}: a sync only sends shards of rows")
            group = tensor.device_mesh.get_group(mesh_dims[0])
            rank_by_group[group] = tensor.device_mesh.get_local_rank(mesh_dims[0])
    if len(rank_by_group) > 1:
        raise WeightSyncError("the tensors are sharded over different groups of ranks")
    return Ranks(*next(iter(rank_by_group.items()), ()))


def is_sharded(tensor: torch.Tensor | ShardedPart) -> bool:
    """Whether this is a DTensor, which alone has placements, or a part of one."""
    return isinstance(tensor, ShardedPart) or hasattr(tensor, "placements")


def local_part(tensor: torch.Tensor | ShardedPart) -> torch.Tensor:
    """This rank's rows of the tensor, or the tensor if it is not sharded."""
    tensor = tensor.base if isinstance(tensor, ShardedPart) else tensor
    # Not to_local(): it takes 20 us for a parameter, and a sync has hundreds. Nor can its result be kept, since FSDP2
    # gives a parameter another local tensor in place.
    return getattr(tensor, "_local_tensor", tensor)


def _part(tensor: "DTensor | ShardedPart") -> ShardedPart:
    return tensor if isinstance(tensor, ShardedPart) else ShardedPart(tensor, 0, tensor.shape)
