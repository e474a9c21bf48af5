"""Where the weights lie at one end on their way: in staging buffers, or in memory that both ends map."""

import base64
import functools
import pickle
from collections.abc import Callable

import torch

from .buckets import STAGING_BUFFERS, Piece, staging_buffers
from .copies import Digester
from .groups import Wire, rebuild_ipc, share_tensor
from .lora import LoRAWeight, map_tensors
from .regions import Region, copy_of, merged, whole

RANK_NUMBERS = 1 << 20  # digests of a rank's memory count from this times the rank
COMPARED_SYNCS = 64  # one of so many replays from mapped memory is compared, which takes as long as the copy


class Staging:
    """Each bucket in payloads, uint8 [n]: what one trainer rank sends at once. `payloads[i]` are those of bucket i.

    `needs[n][i]` has the regions in payload n of bucket i. They lie there one after the other.
    """

    is_mapped = False  # whether workers read memory of the trainer's
    in_flight = 1  # how many buckets are on their way at the same time

    def __init__(self, buckets: list[list[Piece]], needs: list[list[list[Region]]], payloads: list[list]):
        self.buckets, self.needs, self.payloads = buckets, needs, payloads

    def elements(self, piece: Piece) -> torch.Tensor:
        """The elements [count] of a piece that is here as a whole."""
        elements, adapted = self._source(piece)
        return elements if adapted is None else merged(piece, elements, adapted)

    def copy(self, region: Region, destination: torch.Tensor) -> tuple:
        """The copy (destination, source) of a region, which a replay repeats."""
        if region in self._views:
            return destination.view(region.size), self._views[region]
        return copy_of(destination, region, *self._source(region.piece))

    def views(self, i: int, n: int) -> list[tuple[torch.Tensor, Region]]:
        """The regions in payload n of bucket i, each with its elements there, in the region's size."""
        regions = self.needs[n][i]
        payload = zip(self.payloads[i][n].split([region.nbytes for region in regions]), regions, strict=True)
        return [(each.view(r.piece.dtype)[: r.numel].view(r.size), r) for each, r in payload]

    @functools.cached_property
    def _views(self) -> dict[Region, torch.Tensor]:
        indices = [(i, n) for i, payloads in enumerate(self.payloads) for n, p in enumerate(payloads) if p is not None]
        return {region: elements for i, n in indices for elements, region in self.views(i, n)}

    def _source(self, piece: Piece) -> tuple[torch.Tensor, LoRAWeight | None]:
        """The elements [count] of a piece and, if they are an adapted weight's base, that weight."""
        return self._views[whole(piece)].view(-1), None

    def digest(self, i: int, total: torch.Tensor) -> None:
        """Add the digest of bucket i, as it lies here, to `total`, int64 [1]."""
        self._digesters[i].run(total)

    @functools.cached_property
    def _digesters(self) -> list[Digester]:
        return [Digester(payloads, i * len(payloads)) for i, payloads in enumerate(self.payloads)]

    def start(self, i: int) -> Callable[[], bool]:
        """Start to send or to receive bucket i, after the copies queued so far. Returns a check for its end."""
        return lambda: True


class WiredStaging(Staging):
    """Staging buffers of this end, as many as buckets in flight. `transfers` has what passes over the wire for each
    bucket, as `Wire.start` takes it, with a payload's index for the tensor."""

    def __init__(
        self,
        buckets: list[list[Piece]],
        needs: list[list[list[Region]]],
        transfers: list[tuple[str, int, int]],
        wire: Wire,
        buffers: int = STAGING_BUFFERS,
    ):
        sizes = [[sum(region.nbytes for region in each[i]) for each in needs] for i in range(len(buckets))]
        self.in_flight = min(buffers, len(sizes))
        largest = [max(map(sum, sizes[i :: self.in_flight])) for i in range(self.in_flight)]
        memory = [torch.empty(nbytes, dtype=torch.uint8, device=wire.device) for nbytes in largest]
        payloads = [list(memory[i % self.in_flight][: sum(each)].split(each)) for i, each in enumerate(sizes)]
        super().__init__(buckets, needs, payloads)
        self.wire, self.transfers = wire, transfers

    @classmethod
    def broadcast(cls, buckets: list[list[Piece]], bucket_bytes: int, ranks: int, wire: Wire) -> "WiredStaging":
        """Whole buckets, at any end. Each rank broadcasts its payload to all other members of the group."""
        transfers = [("broadcast", rank, rank) for rank in range(ranks)]
        return cls(buckets, all_pieces(buckets, ranks), transfers, wire, staging_buffers(bucket_bytes))

    @classmethod
    def of_worker(cls, buckets: list[list[Piece]], needs: list[list[Region]], ranks: int, wire: Wire) -> "WiredStaging":
        """A payload from each rank, with what this worker needs of it. `needs` has the regions of each bucket."""
        by_rank = [[[region for region in each if region.piece.rank == r] for each in needs] for r in range(ranks)]
        return cls(buckets, by_rank, [("recv", rank, rank) for rank in range(ranks)], wire)

    def start(self, i: int) -> Callable[[], bool]:
        payloads = self.payloads[i]
        return self.wire.start([(kind, payloads[n], peer) for kind, n, peer in self.transfers if len(payloads[n])])


class TrainerMemory(Staging):
    """Memory of the trainer ranks that workers map, with all weights in a single bucket.

    `memory` has for each rank either its tensors by name, or a payload with copies of them in the dtypes that travel;
    for a rank whose memory this process does not hold, None. The tensors are the rank's elements [n] or, of a weight
    with an adapter, the base's with both factors, which a worker merges while it reads.
    """

    is_mapped = True

    def __init__(self, buckets: list[list[Piece]], memory: list[torch.Tensor | dict | None]):
        payloads = [held if isinstance(held, torch.Tensor) else None for held in memory]
        super().__init__(buckets, all_pieces(buckets, len(memory)), [payloads])
        self.memory = memory

    def handle(self, rank: int) -> str:
        """What another process needs to map the memory of this rank."""
        return base64.b64encode(pickle.dumps(map_tensors(share_tensor, self.memory[rank]))).decode()

    @classmethod
    def mapped(cls, buckets: list[list[Piece]], handles: list[str], device: int | None) -> "TrainerMemory":
        """The memory behind the `handle` of each rank, in this process."""
        shared = [pickle.loads(base64.b64decode(handle)) for handle in handles]
        return cls(buckets, [map_tensors(lambda each: rebuild_ipc(each, device), held) for held in shared])

    def _source(self, piece: Piece) -> tuple[torch.Tensor, LoRAWeight | None]:
        if isinstance(self.memory[piece.rank], torch.Tensor):
            return super()._source(piece)
        weight = self.memory[piece.rank][piece.name]
        elements = getattr(weight, "base", weight)[piece.begin - piece.first :][: piece.count]
        return elements, weight if isinstance(weight, LoRAWeight) else None

    def digest(self, i: int, total: torch.Tensor) -> None:
        for rank, held in enumerate(self.memory):
            tensors = []
            map_tensors(tensors.append, {} if held is None else held)
            if tensors:
                Digester(tensors, rank * RANK_NUMBERS).run(total)  # a new one: it keeps copies of odd tensors


def compares(version: int) -> bool:
    """Whether the replay of this version from mapped memory is compared. A reload always is."""
    return version % COMPARED_SYNCS == 0


def all_pieces(buckets: list[list[Piece]], ranks: int) -> list[list[list[Region]]]:
    """All that each rank has of each bucket, as the `needs` of a Staging."""
    return [[[whole(piece) for piece in bucket if piece.rank == rank] for bucket in buckets] for rank in range(ranks)]
