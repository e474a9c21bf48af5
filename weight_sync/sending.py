"""The two ways in which a trainer rank sends its weights: over a group, or by memory that workers map."""

from collections.abc import Callable
from dataclasses import replace

import torch

from .buckets import largest_bucket, plan_buckets
from .copies import BatchedCopy, CopiesDigester, digest_together, load_kernel
from .groups import Wire, can_share, shared_buffer
from .link import Link, wait_until
from .regions import Region, whole
from .staging import RANK_NUMBERS, Staging, TrainerMemory, WiredStaging, compares
from .weights import Weights


class Packing:
    """The copies that fill payloads of a staging with this rank's weights. They digest what they write.

    Of each bucket, they fill the payloads of these indices. `number(i)` is what the digests of bucket i begin with.
    """

    def __init__(self, weights: Weights, staging: Staging, payloads: list[int], number: Callable[[int], int]):
        device = weights.device
        self.totals = torch.zeros(len(payloads), dtype=torch.int64, device=device)  # of the digests, by payload
        self.copies = []  # by bucket and payload
        for i in range(len(staging.buckets)):
            self.copies.append([])
            for n in payloads:
                copies = [weights.copy(elements, region) for elements, region in staging.views(i, n)]
                self.copies[i].append(BatchedCopy(device, copies))
                digest_together(self.copies[i][-1:], [staging.payloads[i][n]], number(i))

    def pack(self, i: int) -> None:
        """Fill the payloads of bucket i."""
        for n, copy in enumerate(self.copies[i]):
            copy.run(self.totals[n : n + 1])

    def digests(self) -> list[int]:
        """The digest of what was packed for each payload since the last call."""
        digests = self.totals.tolist()
        self.totals.zero_()  # now, so that the next sync need not
        return digests


class GroupSending:
    """In buckets, over a group: whole ones to all workers or, once it is known what they need, only that."""

    maps_tensors = False  # whether workers read the tensors where they are

    def __init__(self, communicator, weights: Weights, wire: list, answers: list[dict], replay: bool):
        # The busiest link belongs to a worker, or to a rank, which sends to every engine. It must not carry more than
        # all weights.
        ranks, size = weights.ranks.size, min(answer["size"] for answer in answers)
        routes = replay and max(ranks, size) > 1 and len(answers) <= ranks * size
        self.workers = [answer["rank"] for answer in answers] if routes else []
        self.bucket_bytes = largest_bucket(min(ranks, size) if routes else 1)
        self.buckets, self.wire = plan_buckets(wire, self.bucket_bytes), Wire(communicator, weights.device)
        self.handshake = {"bucket_bytes": self.bucket_bytes, "routes": routes}  # what workers must know
        self.whole: WiredStaging | None = None  # for all that this rank has
        self.routed: WiredStaging | None = None  # for what the workers need
        self.use(weights)

    def use(self, weights: Weights) -> None:
        """Send these weights from now on. They differ from the last ones in where they lie."""
        self.weights, self.packings = weights, {}

    def route(self, needs: list[list[list[Region]]]) -> None:
        """Send nothing but what workers need. `needs` has the regions that each one wants of this rank, by bucket."""
        if self.workers:
            self.whole, self.packings = None, {}  # free their memory before allocating anew
            different, self.part_of = distinct(needs)  # one payload for all workers that need the same
            transfers = [("send", n, worker) for n, worker in zip(self.part_of, self.workers, strict=True)]
            self.routed = WiredStaging(self.buckets, different, transfers, self.wire)

    def start(self, mode: str, version: int) -> None:
        """Nothing: no bucket is packed before the workers wait for it."""

    def send(self, mode: str, version: int, announce: Callable[[], None], links: list[Link], deadline: float) -> list:
        """Announce a pass, and send all buckets. Returns the digest of what each worker gets."""
        announce()
        if mode == "fallback":
            self.routed, self.packings = None, {}
        routed = self.routed is not None and mode in ("replay", "verify")
        if not routed and not self.whole:
            self.whole = WiredStaging.broadcast(self.buckets, self.bucket_bytes, self.weights.ranks.size, self.wire)
        staging = self.routed if routed else self.whole
        packing = self._packing(staging)
        transfers: list[Callable[[], bool]] = []  # whether each bucket has gone
        for i in range(len(self.buckets)):
            if i >= staging.in_flight:
                wait_until(transfers[i - staging.in_flight], links, deadline)
            packing.pack(i)
            transfers.append(staging.start(i))
        digests = packing.digests()  # while the last buckets are on their way
        for has_gone in transfers[-staging.in_flight :]:
            wait_until(has_gone, links, deadline)
        if self.routed and not routed:  # for a comparison: no sync needs it
            self.packings.pop(staging)
            self.whole = None
        return [digests[n] for n in self.part_of] if routed else digests * len(links)

    def _packing(self, staging: WiredStaging) -> Packing:
        if staging not in self.packings:
            ranks = self.weights.ranks
            own = [ranks.rank] if staging is self.whole else list(range(len(staging.needs)))
            self.packings[staging] = Packing(self.weights, staging, own, lambda i: i * ranks.size + ranks.rank)
        return self.packings[staging]


class MappedSending:
    """By memory that workers map: the tensors themselves, or copies of them.

    Copies are made where another process cannot map the tensors, and with other ranks of fp32 weights, so that half as
    many bytes cross the links between GPUs.
    """

    def __init__(self, _channel, weights: Weights, wire: list, _answers: list[dict], _replay: bool):
        self.buckets, ranks, held = plan_buckets(wire, bucket_bytes := 1 << 62), weights.ranks, weights.held()
        self.number = ranks.rank * RANK_NUMBERS  # of the first digest
        pieces = [piece for piece in self.buckets[0] if piece.rank == ranks.rank]
        few_bytes = ranks.size == 1 or sum(t.nbytes for t in held.values()) <= sum(piece.nbytes for piece in pieces)
        self.maps_tensors = weights.are_contiguous and few_bytes and all(map(can_share, held.values()))
        if self.maps_tensors:
            own = held | {n: replace(weights.adapted[n], base=held[n]) for n in held.keys() & weights.adapted}
        else:
            size = sum(whole(piece).nbytes for piece in pieces)
            own = shared_buffer(max(1, size), weights.device)[:size]
        load_kernel(weights.device)  # or a later sync would wait for its compilation
        self.memory = TrainerMemory(self.buckets, [own if r == ranks.rank else None for r in range(ranks.size)])
        self.handshake = {"bucket_bytes": bucket_bytes, "routes": False, "handle": self.memory.handle(ranks.rank)}
        self.different: list[list[Region]] = []  # what workers read, those that read the same together
        self.use(weights)

    def use(self, weights: Weights) -> None:
        """As `GroupSending.use`."""
        self.weights, own = weights, [] if self.maps_tensors else [weights.ranks.rank]
        self.packing = Packing(weights, self.memory, own, lambda _: self.number)
        self.digesters: list[CopiesDigester] = []  # of each of `different`
        self.filled: torch.Tensor | None = None  # the memory is filled for the next sync: the digests, int64 [n]

    def route(self, needs: list[list[list[Region]]]) -> None:
        """Compare what workers read. `needs` has the regions of the only bucket that each one reads of this rank."""
        self.different, self.part_of = distinct([regions for (regions,) in needs])
        self._region_digesters()  # now, and not in the next sync's time

    def start(self, mode: str, version: int) -> None:
        """Start to make the copies that workers map, and to digest what each worker is to compare."""
        self.packing.totals.zero_()
        self.packing.pack(0)
        count = len(self.different) if mode == "replay" else 1
        self.filled = torch.zeros(count, dtype=torch.int64, device=self.weights.device)
        if mode == "replay":
            for i, digester in enumerate(self._region_digesters() if compares(version) else ()):
                digester.run(self.filled[i : i + 1])
        elif self.maps_tensors:
            self.memory.digest(0, self.filled)
        else:
            self.filled += self.packing.totals  # of what was read, and not of what lies in the copies

    def send(self, mode: str, version: int, announce: Callable[[], None], links: list[Link], deadline: float) -> list:
        """Fill the memory, and announce it. Returns the digest that each worker is to compare with its own."""
        if self.filled is None:
            self.start(mode, version)
        digests, self.filled = self.filled.tolist(), None
        announce()  # from now on, the workers' GPUs are theirs
        return [digests[n] for n in self.part_of] if mode == "replay" else digests * len(links)

    def _region_digesters(self) -> list[CopiesDigester]:
        """What digests the regions that workers read: of this rank's own tensors, also where workers read copies."""
        if not self.digesters:
            for regions in self.different:
                like = [torch.empty(region.size, dtype=region.piece.dtype, device="meta") for region in regions]
                copies = list(map(self.weights.copy, like, regions))
                self.digesters.append(CopiesDigester(self.weights.device, copies, self.number))
        return self.digesters


def distinct(needs: list[list]) -> tuple[list[list], list[int]]:
    """The different ones among what the workers need and, for each worker, which of them it needs."""
    different = [each for i, each in enumerate(needs) if each not in needs[:i]]
    return different, [different.index(each) for each in needs]
