"""The trainer ranks that hold shards of the tensors."""

import json
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from .link import CONNECT_SECONDS, Link, WeightSyncError, connect, listen, wait_until

REASON_BYTES = 1000  # longest text that one rank tells the others
HINT = "every rank of rank 0's replica calls send_weights, rank 0 with the broadcast group and the others with None"


@dataclass(frozen=True, eq=False)
class ShardedPart:
    """A weight that is part of a sharded tensor, such as one expert's weight in a mixture's fused tensor.

    `base` is sharded by rows. The weight has this `shape`; its elements begin at element `begin` of `base`.
    """

    base: DTensor
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

    def stride(self) -> tuple[int, ...]:
        return torch.empty(self.shape, device="meta").stride()

    def detach(self) -> "ShardedPart":
        return self

    def to_local(self) -> torch.Tensor:
        return self.base.to_local()

    def local(self, rank: int, ranks: int) -> tuple[int, torch.Tensor]:
        """The weight's elements [n] on this rank of `ranks`, and where in the flat weight they begin."""
        rows = -(-self.base.shape[0] // ranks)  # divided as by torch.chunk
        shard, first = self.base.to_local().flatten(), rank * rows * self.base.shape[1:].numel()
        begin = max(self.begin, first)
        end = max(begin, min(self.begin + self.numel(), first + len(shard)))
        return begin - self.begin, shard[begin - first : end - first]


class Ranks:
    """The ranks over which the trainer's tensors are sharded, or, without a group, this rank alone.

    Either each of them sends to a worker of its own, or rank 0 sends to all and is linked with the others: `connect`.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, rank: int = 0):
        self.group, self.rank, self.size = group, rank, group.size() if group else 1
        self.links: list[Link] = []  # from rank 0 to all others, from another one to rank 0

    def connect(self, host: str | None, device: torch.device) -> None:
        """Link rank 0 with the others. Rank 0 listens on `host`, an address of its node; the others pass None.

        Raises WeightSyncError if they pass something else, or if a rank does not connect within CONNECT_SECONDS.
        """
        if bool(host) != (self.rank == 0):
            raise WeightSyncError(f"trainer rank {self.rank} has {'a' if host else 'no'} broadcast group: {HINT}")
        text = torch.zeros(REASON_BYTES, dtype=torch.uint8, device=device)

        def broadcast() -> None:
            work = dist.broadcast(text, group_src=0, group=self.group, async_op=True)
            self._wait(work, [], time.monotonic() + CONNECT_SECONDS)

        def announce(endpoint: dict) -> None:
            text.copy_(_encode(json.dumps(endpoint)))
            broadcast()

        if host:
            listen(host, self.size - 1, announce, self.links, "trainer ranks", HINT)
        else:
            broadcast()
            self.links.append(connect(json.loads(_decode(text)), f"trainer rank {self.rank}"))

    def sum(self, tensor: torch.Tensor, links: list[Link], deadline: float) -> None:
        """Sum a tensor over the ranks, in place. If only rank 0 sends, only rank 0 gets the sum.

        Raises WeightSyncError if a rank fails, or a worker behind one of `links`, or after the deadline.
        """
        if self.size > 1:
            if self.links:
                work = dist.reduce(tensor, group_dst=0, group=self.group, async_op=True)
            else:
                work = dist.all_reduce(tensor, group=self.group, async_op=True)
            self._wait(work, links, deadline)

    def first_text(self, text: str, device: torch.device, links: list[Link], deadline: float) -> str:
        """The text of the lowest rank whose text is not empty, "" if all are."""
        texts = torch.zeros(self.size, REASON_BYTES, dtype=torch.uint8, device=device)
        texts[self.rank] = _encode(text)
        self.sum(texts, links, deadline)
        return next(filter(None, map(_decode, texts)), "")

    def _wait(self, work: dist.Work, links: list[Link], deadline: float) -> None:
        wait_until(lambda: work.is_completed() and work.wait(), [*links, *self.links], deadline)


def ranks_of(tensors: dict[str, torch.Tensor]) -> Ranks:
    """The ranks over which the DTensors among these are sharded.

    Raises WeightSyncError for DTensors that are not sharded by rows, or over different groups.
    """
    rank_by_group = {}
    for name, weight in tensors.items():
        tensor = weight.base if isinstance(weight, ShardedPart) else weight
        if isinstance(tensor, DTensor):
            mesh_dims = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
            if [tensor.placements[dim] for dim in mesh_dims] != [Shard(0)]:
                raise WeightSyncError(f"{name} is placed as {tensor.placements}: a sync only gathers shards of rows")
            group = tensor.device_mesh.get_group(mesh_dims[0])
            rank_by_group[group] = tensor.device_mesh.get_local_rank(mesh_dims[0])
    if len(rank_by_group) > 1:
        raise WeightSyncError("the tensors are sharded over different groups of ranks")
    return Ranks(*next(iter(rank_by_group.items()), ()))


def _encode(text: str) -> torch.Tensor:
    encoded = text.encode()[:REASON_BYTES]
    return torch.tensor(list(encoded.ljust(REASON_BYTES, b"\0")), dtype=torch.uint8)


def _decode(text: torch.Tensor) -> str:
    return bytes(text.tolist()).rstrip(b"\0").decode(errors="replace")
