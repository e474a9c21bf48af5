"""The trainer's end of a weight sync."""

import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain

import torch

from .buckets import Piece, dtype_name, largest_bucket, part_sizes, plan_buckets, seconds_allowed
from .channels import GroupChannel, SharedMemoryChannel
from .comparison import Comparison, comparison_of
from .copies import BatchedCopy, CopiesDigester, digest_together, load_kernel
from .groups import Wire, can_share, shared_buffer
from .link import ANSWER_SECONDS, Link, WeightSyncError, reason_of, recv_all, wait_until
from .lora import LoRAWeight, Merge
from .ranks import Ranks, ShardedPart, local_part, ranks_of
from .regions import Region, copy_of
from .staging import RANK_NUMBERS, RoutedStaging, Staging, TrainerMemory, broadcast_staging, compares
from .trace import storage_id


@dataclass(frozen=True)
class SyncReport:
    """One completed sync, as the trainer saw it."""

    version: int  # of the engine's weights: 1 after the first sync
    tensors: int  # sent, tied ones once
    nbytes: int  # sent, in the engine's dtypes
    seconds: float  # from the call of `send_weights` to the last worker's answer
    loader: str  # of the next syncs: "replay", or "reload (REASON)"

    @property
    def gigabytes_per_second(self) -> float:
        return self.nbytes / self.seconds / 1e9


class Packing:
    """The copies that fill the parts of each step that a rank sends. They digest what they write."""

    def __init__(self, copies: list[list[BatchedCopy]], device: torch.device):
        self.copies = copies  # by step and part; several if workers get different ones
        self.totals = torch.zeros(len(copies[0]), dtype=torch.int64, device=device)  # of the digests, by part

    def pack(self, i: int) -> None:
        """Fill the parts of step i."""
        for part, copy in enumerate(self.copies[i]):
            copy.run(self.totals[part : part + 1])

    def digests(self) -> list[int]:
        """The digest of what was packed for each part since the last call."""
        digests = self.totals.tolist()
        self.totals.zero_()  # now, so that the next sync need not
        return digests


class WeightSender:
    """The trainer's end of a weight sync: one for each trainer rank.

    `channel` is the communicator that `stateless_init_process_group` returned to this rank, or this rank's
    `SharedMemoryChannel`. With `replay=False`, every sync is a reload. With a `timeout`, a worker has failed if an
    answer, or one pass over the weights, takes longer than so many seconds. Without, the limit depends on the size of
    the weights. A channel serves one sender: another one on it raises WeightSyncError. A sender keeps the tensors of
    its last sync alive until the next one, or until `close`.
    """

    def __init__(self, channel, replay: bool = True, timeout: float = math.inf):
        if channel is None:
            raise WeightSyncError(
                "this trainer rank has no communicator: each rank calls stateless_init_process_group with its own rank,"
                " and the workers' rank_offset is the number of ranks"
            )
        if getattr(channel, "has_sender", False):
            raise WeightSyncError("this channel has a WeightSender: call that one, or make a new channel on both sides")
        channel.has_sender = True
        self.maps = isinstance(channel, SharedMemoryChannel)  # workers map memory of the trainer's
        self.channel = channel if self.maps else GroupChannel(channel)
        self.replay, self.timeout, self.closed, self.version = replay, timeout, False, 0
        self.links: list[Link] = []  # to the workers
        # What the last handshake agreed on:
        self.sources = None  # (name, address, dtype, shape, strides) of each tensor, and of the factors of LoRAWeights
        self.metadata = None  # (name, name of the dtype, shape) of each tensor, tied ones once
        self.tensors: dict[str, torch.Tensor] = {}  # tied ones once; of weights with adapters, the bases
        self.adapted: dict[str, LoRAWeight] = {}
        self.kept: list[tuple[torch.Tensor, int]] = []  # their memory, and where it was: FSDP2 frees it
        self.bounds: list[list[int]] = []  # of what each rank holds of the tensors
        self.ranks = Ranks()  # which hold shards of the tensors
        self.buckets: list[list[Piece]] = []
        self.routes: list[int] = []  # the workers' ranks in the group, if each is to get only what it needs
        self.whole: Staging | None = None  # of all that this rank has
        self.routing: RoutedStaging | None = None  # of what each worker needs
        self.packings: dict[Staging, Packing] = {}
        self.regions: list[list[Region]] = []  # what workers read of the memory that they map
        self.regions_of: list[int] = []  # by worker, its index in `regions`: workers that read the same share one
        self.digesters: list[CopiesDigester] = []  # of each of `regions`
        self.filled: torch.Tensor | None = None  # that memory is filled for the next sync: the digests, int64 [n]
        self.nbytes, self.loader = 0, ""  # loader as in `SyncReport`; "" before the first sync

    @torch.inference_mode(False)  # what one sync allocates, another one writes
    @torch.no_grad()
    def send_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor | LoRAWeight]]) -> SyncReport:
        """Send these weights to every engine worker. Names are those of the Hugging Face checkpoint; any dtype.

        The tensors are read after the iterable has ended, and until this returns. Meanwhile, `receive_weights` runs on
        every worker. Tied tensors travel once. DTensors must be sharded by rows, as FSDP2 shards them; all ranks that
        hold shards, with HSDP those of one replica, call this together, and each sends its own. Raises WeightSyncError
        with the reason of the side that failed. The session is then closed, and a new one needs new channels on both
        sides.
        """
        started = time.perf_counter()
        return self._in_session(named_tensors, lambda: self._sync(started))

    @torch.inference_mode(False)
    @torch.no_grad()
    def compare_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor | LoRAWeight]]) -> Comparison:
        """Send the tensors of the last sync again. Every worker compares its quantized weights with them.

        Runs while `compare_weights` runs on every worker, on every rank that calls `send_weights`. Raises
        WeightSyncError if a weight differs from what was sent by more than rounding to its format explains; a scale
        that is 1 % off does.
        """
        if not self.metadata:
            raise WeightSyncError("compare_weights needs a sync before it")
        return comparison_of(self._in_session(named_tensors, self._compare, [name for name, *_ in self.sources or ()]))

    def close(self, error: str | None = None) -> None:
        """End the session, for good. With `error`, waiting workers raise it."""
        if self.closed:
            return
        self.closed = True
        for link in self.links:
            link.close(error)
        self.links, self.tensors, self.adapted, self.kept, self.sources = [], {}, {}, [], None
        self._free()
        self.channel.close(error)

    def _in_session(self, named_tensors: Iterable, send: Callable[[], object], names: Iterable[str] = ()) -> object:
        """Agree with the workers on these tensors, or those of them that `names` has, and send them.

        Any error ends the session.
        """
        if self.closed:
            raise WeightSyncError("this session is closed: make a new channel and a new WeightSender")
        try:
            for link in self.links:
                link.send(prepare=True)  # workers wake up while this side goes through its tensors
            weights = dict(named_tensors)
            if names:
                weights = {name: weights[name] for name in names}
            adapted = {name: weight for name, weight in weights.items() if isinstance(weight, LoRAWeight)}
            tensors = weights | {name: weight.base for name, weight in adapted.items()}
            with torch.cuda.device_of(local_part(next(iter(tensors.values()), torch.empty(0)))):
                if any(tensor.data_ptr() != address for tensor, address in self.kept):
                    self.sources = []  # other tensors may lie where the last ones did
                elif self.maps and self.loader == "replay" and not names:
                    self._fill_memory("replay", self.version + 1)  # a GPU does it while this side checks its tensors
                self._agree(tensors, adapted)
                return send()
        except BaseException as error:  # KeyboardInterrupt as well: half a session must not be used again
            self.close(reason_of(error))
            raise

    def _agree(self, tensors: dict[str, torch.Tensor], adapted: dict[str, LoRAWeight]) -> None:
        """Preflight, unless the tensors are those of the last sync. Raises WeightSyncError for what cannot be sent."""
        local = {name: local_part(tensor) for name, tensor in tensors.items()}
        sources = [(name, *_memory(tensor)) for name, tensor in local.items()]
        for name, weight in adapted.items():
            sources.append((name, weight.scaling, weight.transposed, _memory(weight.lora_A), _memory(weight.lora_B)))
        if sources == self.sources:
            return
        factors = [factor for weight in adapted.values() for factor in (weight.lora_A, weight.lora_B)]
        _check(local, factors)
        for name, weight in adapted.items():
            weight.check(name)
        self.tensors, self.adapted = _without_ties(tensors, adapted), adapted
        self.packings, self.digesters = {}, []
        metadata = [(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in self.tensors.items()]
        ranks = ranks_of(self.tensors)
        if self.sources is None:
            self.ranks = ranks
        elif ranks.size > 1 and (ranks.size, ranks.rank) != (self.ranks.size, self.ranks.rank):
            raise WeightSyncError("tensors are sharded, and none was in the first sync: make a new session")
        bounds = [self.ranks.bounds(tensor) for tensor in self.tensors.values()]
        in_place = self.maps and self.whole and self.whole.parts[0][self.ranks.rank] is None
        cut = self.routes and not all(tensor.is_contiguous() for tensor in local.values())
        if (
            (metadata, bounds) != (self.metadata, self.bounds)
            or in_place  # workers map memory that the tensors may have left
            or cut  # workers get parts of tensors, which then lay in one piece
        ):
            self._preflight(metadata)
        self.sources, self.bounds, self.filled = sources, bounds, None  # what was filled is from the last tensors
        self.kept = [(t, t.data_ptr()) for t in (*map(local_part, self.tensors.values()), *factors)]

    def _preflight(self, metadata: list) -> None:
        """The handshake: every worker checks names, dtypes and shapes, and both ends agree on dtypes and buckets.

        Raises WeightSyncError with all problems.
        """
        self._free()  # before allocating anew
        if not self.links:
            self.channel.accept(self.links, self.ranks)
            self.links.sort(key=lambda link: link.peer)  # on all ranks in the same order
        for link in self.links:
            link.send(metadata=metadata)
        answers = recv_all(self.links, min(ANSWER_SECONDS, self.timeout))
        dtypes, problems = [], sorted({problem for answer in answers for problem in answer["problems"]})
        workers_reject = bool(problems)  # which can leave a tensor without a dtype
        for i, (name, _, shape) in enumerate(metadata):
            engine_dtypes = {answer["dtypes"][i] for answer in answers} - {None}  # None: not on that worker
            if not engine_dtypes and not workers_reject:
                problems.append(f"{name} {list(shape)}: the engine's loader ignores it")
            if len(engine_dtypes) > 1:
                problems.append(f"{name}: workers keep it in different dtypes, {sorted(engine_dtypes)}")
            dtypes.append(next(iter(engine_dtypes), None))
        if problems:
            raise WeightSyncError("preflight, nothing was sent:\n  " + "\n  ".join(problems))
        wire = [
            (name, dtype, shape, self.ranks.bounds(self.tensors[name]))
            for (name, _, shape), dtype in zip(metadata, dtypes, strict=True)
        ]
        # A worker's part can be cut out of a tensor only if the tensor lies in one piece. The busiest link belongs to a
        # worker, or to a rank, which sends to every engine. It must not carry more than all weights.
        ranks, size = self.ranks.size, min(answer["size"] for answer in answers)
        in_one_piece = all(local_part(tensor).is_contiguous() for tensor in self.tensors.values())
        routes = (
            self.replay and not self.maps and in_one_piece and max(ranks, size) > 1 and len(answers) <= ranks * size
        )
        self.routes = [answer["rank"] for answer in answers] if routes else []
        self.bucket_bytes = 1 << 62 if self.maps else largest_bucket(min(ranks, size) if routes else 1)
        self.buckets = plan_buckets(wire, self.bucket_bytes)
        if self.maps:
            self.whole = self._share_memory(in_one_piece)
        else:
            self.wire = Wire(self.channel.communicator, self._device)
        handle = self.whole.handle(self.ranks.rank) if self.maps else None
        for link in self.links:
            link.send(wire=wire, bucket_bytes=self.bucket_bytes, routes=routes, handle=handle)
        self.metadata, self.nbytes = metadata, sum(piece.nbytes for piece in chain(*self.buckets))
        self.loader = "" if self.replay else "reload (replay is switched off)"
        self.version = max(answer["version"] for answer in answers)  # a failed sync may leave different ones

    def _free(self) -> None:
        self.whole = self.routing = None
        self.packings, self.regions, self.digesters, self.filled = {}, [], [], None

    def _share_memory(self, in_one_piece: bool) -> TrainerMemory:
        """What workers map: the tensors, or copies of them.

        Copies are made where another process cannot map the tensors, and with other ranks of fp32 weights, so that half
        as many bytes cross the links between GPUs.
        """
        own, memory, shares = self.ranks.rank, [None] * self.ranks.size, self._shares()
        sent_bytes = sum(piece.nbytes for piece in self.buckets[0] if piece.rank == own)
        few_bytes = self.ranks.size == 1 or sum(share.nbytes for share in shares.values()) <= sent_bytes
        if all(map(can_share, shares.values())) and in_one_piece and few_bytes:
            adapted = {name: replace(self.adapted[name], base=shares[name]) for name in shares.keys() & self.adapted}
            memory[own] = shares | adapted
        else:
            size = part_sizes(self.buckets[0], self.ranks.size)[own]
            memory[own] = shared_buffer(max(1, size), self._device)[:size]
        load_kernel(self._device)  # or a later sync would wait for its compilation
        return TrainerMemory(self.buckets, memory)

    @property
    def _device(self) -> torch.device:
        return local_part(next(iter(self.tensors.values()))).device

    def _shares(self) -> dict[str, torch.Tensor]:
        """What this rank sends of each tensor, by name: elements [n]."""
        shares = {name: self.ranks.elements(tensor) for name, tensor in self.tensors.items()}
        return {name: share for name, share in shares.items() if len(share)}

    def _elements(self, piece: Piece) -> torch.Tensor:
        """The elements [count] of a piece that this rank sends."""
        return self.ranks.elements(self.tensors[piece.name])[piece.begin - piece.first :][: piece.count]

    def _packing(self, staging: Staging) -> Packing:
        """The copies that fill this rank's parts of a staging."""
        if staging not in self.packings:
            rank = self.ranks.rank
            pieces = {piece.number: piece for piece in chain(*self.buckets)}

            def copy(place: torch.Tensor, region: Region) -> tuple:
                piece = pieces[region.piece]
                tensor, adapted = self.tensors[piece.name], self.adapted.get(piece.name)
                if not local_part(tensor).is_contiguous():  # then it is sent whole
                    if isinstance(tensor, ShardedPart):
                        raise WeightSyncError(f"{piece.name} is a part of a tensor that does not lie in one piece")
                    first, begin = piece.begin // piece.row, (piece.begin - piece.first) // piece.row
                    rows = local_part(tensor)[begin:][: piece.count // piece.row]
                    return place.view(rows.shape), Merge(adapted, rows, first) if adapted else rows
                return copy_of(place, region, piece, self._elements(piece), adapted)

            copies = [[] for _ in staging.steps]
            for i, step in enumerate(copies):
                for part, places in staging.sent(i, rank):
                    step.append(BatchedCopy(self._device, [copy(*place) for place in places]))
                    number = rank * RANK_NUMBERS if self.maps else i * self.ranks.size + rank
                    digest_together(step[-1:], [part], number)
            self.packings[staging] = Packing(copies, self._device)
        return self.packings[staging]

    def _sync(self, started: float) -> SyncReport:
        self.version += 1
        if self.loader and any("again" in answer for answer in self._transmit(self.loader.partition(" ")[0])):
            self._preflight(self.metadata)  # the tensors of another rank have moved in memory
            self.version += 1
        if not self.loader:
            self._first_sync()
        seconds = time.perf_counter() - started
        return SyncReport(self.version, len(self.metadata), self.nbytes, seconds, self.loader)

    def _compare(self) -> dict:
        """What `compare_quantized` returned on all workers, by weight and worker."""
        answers = zip(self.links, self._transmit("compare"), strict=True)
        return {f"{name} of {link.peer}": result for link, each in answers for name, result in each["found"].items()}

    def _first_sync(self) -> None:
        """Reload and record. If every worker could record, verify that replay gives the same bits as the reload did."""
        answers = self._transmit("record")
        regions = [[list(map(Region.read, step)) for step in answer["regions"]] for answer in answers]
        if refused := next(filter(None, (answer["refused"] for answer in answers)), None):
            self.loader = f"reload ({refused})"
        else:
            if self.routes:
                self.whole, self.packings = None, {}  # free their memory before allocating anew
                self.routing = RoutedStaging.of_rank(self.buckets, regions, self.routes, self.wire)
            if all(answer["same"] for answer in self._transmit("verify")):
                self.loader = "replay"
            elif all(answer["same"] for answer in self._transmit("fallback")):
                self.loader = "reload (replay did not reproduce it bit for bit)"
            else:
                raise WeightSyncError("a second reload of the same tensors gave other weights than the first")
        for link in self.links:
            link.send(mode="end", replays=self.loader == "replay")
        recv_all(self.links, min(ANSWER_SECONDS, self.timeout))
        if self.loader != "replay":
            self.routing = None
        elif self.maps:
            read = [step for (step,) in regions]
            self.regions = [each for i, each in enumerate(read) if each not in read[:i]]
            self.regions_of = [self.regions.index(each) for each in read]
            self._region_digesters()  # now, and not in the next sync's time

    def _region_digesters(self) -> list[CopiesDigester]:
        """What digests the regions that workers read."""
        if not self.digesters:
            pieces = {piece.number: piece for piece in self.buckets[0]}
            for regions in self.regions:
                copies = [self._source(pieces[region.piece], region) for region in regions]
                self.digesters.append(CopiesDigester(self._device, copies, self.ranks.rank * RANK_NUMBERS))
        return self.digesters

    def _source(self, piece: Piece, region: Region) -> tuple:
        """What a region is compared with: this rank's own tensor, also where workers read a copy of it. Only what
        cannot be cut out of the tensor is compared with the copy."""
        place = torch.empty(region.size, dtype=piece.dtype, device="meta")
        if piece.rank == self.ranks.rank and local_part(self.tensors[piece.name]).is_contiguous():
            with suppress(NotImplementedError):
                return copy_of(place, region, piece, self._elements(piece), self.adapted.get(piece.name))
        return self.whole.copy(0, piece, region, place)

    def _transmit(self, mode: str) -> list[dict]:
        """Have the workers read everything once. Returns their answers."""
        deadline = time.monotonic() + min(seconds_allowed(self.buckets), self.timeout)
        if self.maps:  # the workers' GPUs are theirs from the next message on
            if self.filled is None:
                self._fill_memory(mode, self.version)
            digests, self.filled = self.filled.tolist(), None
            digests = [digests[i] for i in self.regions_of] if mode == "replay" else digests * len(self.links)
        for link in self.links:
            link.send(mode=mode, version=self.version)
        if not self.maps:
            digests = self._send_steps(mode, deadline)
        for link, digest in zip(self.links, digests, strict=True):
            link.send(digest=digest)  # the worker compares it with its own
        return recv_all(self.links, max(0.0, deadline - time.monotonic()), expected_soon=True)

    def _send_steps(self, mode: str, deadline: float) -> list[int]:
        """Pack and send all steps. Returns the digest of what each worker gets."""
        if not (staging := self.routing if mode in ("replay", "verify") and self.routing else self.whole):
            staging = self.whole = broadcast_staging(self.buckets, self.bucket_bytes, self.ranks.size, self.wire)
        packing = self._packing(staging)
        transfers: list[Callable[[], bool]] = []  # whether each step has gone
        for i in range(len(staging.steps)):
            if i >= staging.in_flight:
                wait_until(transfers[i - staging.in_flight], self.links, deadline)
            packing.pack(i)
            transfers.append(staging.start(i))
        digests = packing.digests()  # while the last steps are on their way
        for has_gone in transfers[-staging.in_flight :]:
            wait_until(has_gone, self.links, deadline)
        if staging is self.whole and self.routing:  # for a comparison: no sync needs it
            self.whole = self.packings.pop(staging) and None
        return [digests[part] for part in staging.part_of or [0] * len(self.links)]

    def _fill_memory(self, mode: str, version: int) -> None:
        """Start to make the copies that workers map, and to digest what each worker is to compare."""
        packing = self._packing(self.whole)
        packing.totals.zero_()
        packing.pack(0)
        digests = len(self.regions) if mode == "replay" else 1
        self.filled = torch.zeros(digests, dtype=torch.int64, device=self._device)
        if mode == "replay":
            for i, digester in enumerate(self._region_digesters() if compares(version) else ()):
                digester.run(self.filled[i : i + 1])
        elif len(packing.totals):
            self.filled += packing.totals  # of what was read, and not of what lies in the copies
        else:
            self.whole.digest(0, self.filled)


def _memory(tensor: torch.Tensor) -> tuple:
    """What tells whether copies from this tensor are still those that it needs."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _check(tensors: dict[str, torch.Tensor], factors: list[torch.Tensor]) -> None:
    """Raise WeightSyncError for tensors on several devices, or without memory."""
    if len(devices := {str(tensor.device) for tensor in (*tensors.values(), *factors)}) > 1:
        raise WeightSyncError(f"the tensors are on {', '.join(sorted(devices))}: a sync sends those of one device")
    for name, tensor in tensors.items():
        if tensor.numel() and not tensor.data_ptr():  # freed, or of a subclass that wraps others, such as torchao's
            raise WeightSyncError(f"{name} ({type(tensor).__name__}) has no memory, or none any more")


def _without_ties(named_tensors: dict[str, torch.Tensor], adapted: dict[str, LoRAWeight]) -> dict[str, torch.Tensor]:
    """The tensors by name; of tensors that share memory (tied weights), only the first.

    Raises WeightSyncError for tied weights that do not have the same adapter.
    """
    tensors, first_names = {}, {}
    for name, tensor in named_tensors.items():
        local = local_part(tensor)
        begin = tensor.begin if isinstance(tensor, ShardedPart) else local.storage_offset()
        memory = (storage_id(local), begin, tensor.shape, local.stride())  # a shard without rows has no address
        first = first_names.setdefault(memory, name)
        if first == name and tensor.numel():
            tensors[name] = tensor if isinstance(tensor, ShardedPart) else tensor.detach()
        elif tensor.numel() and adapted.get(first) is not adapted.get(name):
            raise WeightSyncError(f"{first} and {name} are tied, and do not have the same adapter")
    if not tensors:
        raise WeightSyncError("there is nothing to send: the model has no parameters")
    return tensors
