"""Where the bytes of a sync lie at one end, step by step: in staging buffers, or in memory that both ends map."""

import base64
import functools
import pickle
from collections.abc import Callable
from itertools import chain, product

import torch

from .buckets import STAGING_BUFFERS, Piece, aligned, part_sizes, staging_buffers
from .copies import Digester
from .groups import Wire, rebuild_ipc, share_tensor
from .lora import LoRAWeight, map_tensors
from .regions import Region, copy_of, merged, whole

RANK_NUMBERS = 1 << 20  # digests number what a rank shares from this times the rank on
COMPARED_SYNCS = 64  # one of so many replays from mapped memory is compared, which takes as long as the copy


class Staging:
    """Whole buckets. Each rank has a part of each: `parts[i]` are the parts of step i, uint8 [n] each."""

    is_mapped = False  # whether workers read memory of the trainer's
    part_of: list[int] | None = None  # the part of each step that each worker gets; None: all get the same
    in_flight = 1

    def __init__(self, steps: list[list[Piece]], parts: list[list[torch.Tensor | None]]):
        self.steps, self.parts = steps, parts

    def view(self, i: int, piece: Piece) -> torch.Tensor:
        """The elements [count] of a piece, in the part of its rank."""
        return self.parts[i][piece.rank][piece.offset : piece.offset + piece.nbytes].view(piece.dtype)

    def copy(self, i: int, piece: Piece, region: Region, destination: torch.Tensor) -> tuple:
        """The copy (destination, source) of a region, which a replay repeats."""
        return copy_of(destination, region, piece, self.view(i, piece))

    def sent(self, i: int, rank: int) -> list[tuple[torch.Tensor, list[tuple[torch.Tensor, Region]]]]:
        """The parts of step i that this trainer rank fills, each with the places of the regions that go there."""
        return [(self.parts[i][rank], [(self.view(i, p), whole(p)) for p in self.steps[i] if p.rank == rank])]

    def digest(self, i: int, total: torch.Tensor) -> None:
        """Add the digest of step i, as it lies in its parts, to `total`, int64 [1]."""
        self._digesters[i].run(total)

    @functools.cached_property
    def _digesters(self) -> list[Digester]:
        return [Digester(parts, i * len(parts)) for i, parts in enumerate(self.parts)]

    def start(self, i: int) -> Callable[[], bool]:
        """Start to send or to receive step i, after the copies queued so far. Returns a check for its end."""
        return lambda: True


class WiredStaging(Staging):
    """Staging buffers of this end, as many as steps in flight. `sizes` are the bytes of each step's parts.

    `transfers` has, of each step, what passes over the wire, as `Wire.start` takes it, with a part's index for the
    tensor.
    """

    def __init__(
        self, steps: list, sizes: list[list[int]], transfers: list[tuple], wire: Wire, buffers: int = STAGING_BUFFERS
    ):
        self.in_flight = min(buffers, len(sizes))
        largest = [max(map(sum, sizes[i :: self.in_flight])) for i in range(self.in_flight)]
        memory = [torch.empty(nbytes, dtype=torch.uint8, device=wire.device) for nbytes in largest]
        parts = [list(memory[i % self.in_flight][: sum(each)].split(each)) for i, each in enumerate(sizes)]
        super().__init__(steps, parts)
        self.wire, self.transfers = wire, transfers

    def start(self, i: int) -> Callable[[], bool]:
        parts = self.parts[i]
        return self.wire.start([(kind, parts[n], peer) for kind, n, peer in self.transfers if len(parts[n])])


class RoutedStaging(WiredStaging):
    """Nothing but what workers need. `needs` has the regions in each part, by part and step: they lie one after the
    other."""

    def __init__(self, steps: list[list[Piece]], needs: list[list[list[Region]]], transfers: list[tuple], wire: Wire):
        self.needs, self.dtypes = needs, {piece.number: piece.dtype for piece in chain(*steps)}
        sizes = [[sum(self._rooms(part)) for part in step] for step in zip(*needs, strict=True)]
        super().__init__(steps, sizes, transfers, wire)

    @classmethod
    def of_rank(
        cls, steps: list[list[Piece]], needs: list[list[list[Region]]], workers: list[int], wire: Wire
    ) -> "RoutedStaging":
        """What a rank sends: a part for all workers that need the same. `needs` has the regions that each worker wants
        of this rank, by step, and `workers` their ranks in the group."""
        different = [each for i, each in enumerate(needs) if each not in needs[:i]]
        part_of = [different.index(each) for each in needs]
        transfers = [("send", part, to) for part, to in zip(part_of, workers, strict=True)]
        staging = cls(steps, different, transfers, wire)
        staging.part_of = part_of
        return staging

    @classmethod
    def of_worker(cls, steps: list[list[Piece]], needs: list[list[Region]], ranks: int, wire: Wire) -> "RoutedStaging":
        """What a worker gets: a part from each rank. `needs` has the regions that it wants, by step."""
        holder = {piece.number: piece.rank for piece in chain(*steps)}
        parts = [[[region for region in step if holder[region.piece] == r] for step in needs] for r in range(ranks)]
        return cls(steps, parts, [("recv", rank, rank) for rank in range(ranks)], wire)

    def _rooms(self, regions: list[Region]) -> list[int]:
        """The bytes that these regions take."""
        return [aligned(region.numel * self.dtypes[region.piece].itemsize) for region in regions]

    def _places(self, i: int, part: int) -> list[tuple[torch.Tensor, Region]]:
        """The regions in a part of step i, each with its place in the region's size."""
        regions = self.needs[part][i]
        rooms = zip(self.parts[i][part].split(self._rooms(regions)), regions, strict=True)
        typed = [(room.view(self.dtypes[region.piece]), region) for room, region in rooms]
        return [(room[: region.numel].view(region.size), region) for room, region in typed]

    @functools.cached_property
    def _place_of(self) -> dict[Region, torch.Tensor]:
        """Where each region lies, of those of a worker."""
        parts = product(range(len(self.steps)), range(len(self.needs)))
        return {region: place for i, part in parts for place, region in self._places(i, part)}

    def copy(self, i: int, piece: Piece, region: Region, destination: torch.Tensor) -> tuple:
        return destination, self._place_of[region]

    def sent(self, i: int, rank: int) -> list[tuple[torch.Tensor, list[tuple[torch.Tensor, Region]]]]:
        return [(part, self._places(i, n)) for n, part in enumerate(self.parts[i])]


class TrainerMemory(Staging):
    """Memory of the ranks that workers map, and read in a single step.

    `memory` has of each rank either its tensors by name, or its part, with copies of them in the dtypes that travel; of
    a rank whose memory this process does not hold, None. The tensors are the rank's elements [n] or, of a weight with
    an adapter, the base's with both factors, which a worker merges while it reads.
    """

    is_mapped = True

    def __init__(self, steps: list[list[Piece]], memory: list[torch.Tensor | dict | None]):
        super().__init__(steps, [[held if isinstance(held, torch.Tensor) else None for held in memory]])
        self.memory = memory

    def handle(self, rank: int) -> str:
        """What another process needs to map the memory of this rank."""
        return base64.b64encode(pickle.dumps(map_tensors(share_tensor, self.memory[rank]))).decode()

    @classmethod
    def mapped(cls, steps: list[list[Piece]], handles: list[str], device: int | None) -> "TrainerMemory":
        """The memory behind the `handle` of each rank, in this process."""
        shared = [pickle.loads(base64.b64decode(handle)) for handle in handles]
        return cls(steps, [map_tensors(lambda each: rebuild_ipc(each, device), held) for held in shared])

    def view(self, i: int, piece: Piece) -> torch.Tensor:
        elements, adapted = self._elements(piece)
        return elements if adapted is None else merged(piece, elements, adapted)

    def copy(self, i: int, piece: Piece, region: Region, destination: torch.Tensor) -> tuple:
        return copy_of(destination, region, piece, *self._elements(piece))

    def _elements(self, piece: Piece) -> tuple[torch.Tensor, LoRAWeight | None]:
        if isinstance(self.memory[piece.rank], torch.Tensor):
            return super().view(0, piece), None
        weight = self.memory[piece.rank][piece.name]
        adapted = weight if isinstance(weight, LoRAWeight) else None
        return getattr(weight, "base", weight)[piece.begin - piece.first :][: piece.count], adapted

    def sent(self, i: int, rank: int) -> list[tuple[torch.Tensor, list[tuple[torch.Tensor, Region]]]]:
        return [] if self.parts[0][rank] is None else super().sent(i, rank)

    def digest(self, i: int, total: torch.Tensor) -> None:
        for rank, held in enumerate(self.memory):
            tensors = []
            map_tensors(tensors.append, {} if held is None else held)
            if tensors:
                Digester(tensors, rank * RANK_NUMBERS).run(total)  # a new one: it keeps copies of odd tensors


def compares(version: int) -> bool:
    """Whether the replay of this version from mapped memory is compared. A reload always is."""
    return version % COMPARED_SYNCS == 0


def broadcast_staging(buckets: list[list[Piece]], bucket_bytes: int, ranks: int, wire: Wire) -> WiredStaging:
    """Whole buckets. Each rank broadcasts its part to all other members of the group."""
    sizes, transfers = [part_sizes(bucket, ranks) for bucket in buckets], [("broadcast", r, r) for r in range(ranks)]
    return WiredStaging(buckets, sizes, transfers, wire, staging_buffers(bucket_bytes))
