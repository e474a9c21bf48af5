"""The trainer's end of a weight sync."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from .buckets import (
    STAGING_BUFFERS,
    Piece,
    bucket_nbytes,
    dtype_name,
    piece_of,
    seconds_allowed,
    staging_buffer_bytes,
    wire_buckets,
    wire_of,
)
from .channels import BroadcastChannel, SharedMemoryChannel, TrainerMemory
from .copies import Copies
from .groups import broadcast, pack_handle, synchronize
from .link import ANSWER_SECONDS, Link, WeightSyncError, reason_of, wait_until
from .lora import LoRAWeight, materialized

REASON_BYTES = 1000  # longest text that one trainer rank tells the others
ROUNDING_SLACK = 1.001  # a weight may be off by this times the rounding error, since the comparison rounds as well


@dataclass(frozen=True)
class SyncReport:
    """One completed sync, as the trainer saw it."""

    version: int  # of the engine's weights: 1 after the first sync
    tensors: int  # sent, tied ones once
    nbytes: int  # sent, in the engine's dtypes
    seconds: float  # from the call of `send_weights` to the last worker's answer
    loader: str  # of the next syncs: "replay", or "reload: " and the reason

    @property
    def gigabytes_per_second(self) -> float:
        return self.nbytes / self.seconds / 1e9


@dataclass(frozen=True)
class Comparison:
    """The result of `compare_weights`: every quantized weight is what was sent, up to rounding."""

    weights: int  # how many were compared, on all workers
    changed: int  # how many have other scales and other values than at the last comparison


class WeightSender:
    """The trainer's end of a weight sync.

    `channel` is the communicator that `stateless_init_process_group` returned to rank 0, or this trainer rank's
    `SharedMemoryChannel` to the worker on the same device. With `replay=False`, every sync is a reload.
    """

    def __init__(self, channel, replay: bool = True):
        self.channel = channel if isinstance(channel, SharedMemoryChannel) else BroadcastChannel(channel)
        self.replay, self.closed, self.version = replay, False, 0
        self.links: list[Link] = []
        # What the last handshake agreed on:
        self.sources = None  # (name, address, dtype, shape, strides, LoRAWeight) of each tensor
        self.adapted: dict[str, LoRAWeight] = {}  # those that have adapters
        self.metadata = None  # (name, name of the dtype, shape) of each tensor, tied ones once
        self.staging = None
        self.buckets: list[list[Piece]] = []
        self.packing: list[Copies] = []  # by bucket: the copies that fill it
        self.group, self.rank = None, 0  # the ranks that hold shards of the tensors, and this one among them
        self.nbytes, self.loader = 0, ""  # loader as in `SyncReport`; "" before the first sync

    @torch.no_grad()
    def send_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor | LoRAWeight]]) -> SyncReport:
        """Send these weights to every engine worker. Names are those of the Hugging Face checkpoint; any dtype.

        Runs while `receive_weights` runs on every worker. Tied tensors travel once. DTensors must be sharded by rows,
        as FSDP2 shards them; they are gathered a bucket at a time, so every rank of their mesh calls this together.
        Raises WeightSyncError with the reason of the side that failed. The session is then closed, and a new one needs
        a new channel on both sides.
        """
        if self.closed:
            raise WeightSyncError("this weight sync session was closed by an earlier error")
        started = time.perf_counter()
        try:
            for link in self.links:
                link.send(prepare=True)  # workers wake up while this side looks through its tensors
            weights = dict(named_tensors)
            adapted = {name: weight for name, weight in weights.items() if isinstance(weight, LoRAWeight)}
            tensors = weights | {name: weight.base for name, weight in adapted.items()}
            with torch.cuda.device_of(next(iter(tensors.values()), torch.empty(0))):
                self._agree(tensors, adapted)
                self.version += 1
                if self.loader:
                    self._transmit("replay" if self.loader == "replay" else "reload")
                else:
                    self._first_sync()
        except BaseException as error:  # KeyboardInterrupt as well: half a session must not be used again
            self.close(reason_of(error))
            raise
        return SyncReport(self.version, len(self.metadata), self.nbytes, time.perf_counter() - started, self.loader)

    def close(self, error: str | None = None) -> None:
        """End the session. With `error`, waiting workers raise it."""
        self.closed = True
        for link in self.links:
            link.close(error)
        self.links, self.staging, self.packing = [], None, []
        self.channel.close(error)

    def _agree(self, tensors: dict[str, torch.Tensor], adapted: dict[str, LoRAWeight]) -> None:
        """Unless the tensors are those of the last sync: preflight, and prepare the copies that pack the buckets."""
        sources = [
            (name, _local(t).data_ptr(), t.dtype, t.shape, t.stride(), adapted.get(name)) for name, t in tensors.items()
        ]
        if sources == self.sources:
            return
        if len(devices := {str(tensor.device) for tensor in tensors.values()}) > 1:
            raise WeightSyncError(f"the tensors are on {', '.join(sorted(devices))}: a sync sends those of one device")
        tensors, self.adapted = _without_ties(tensors, adapted), adapted
        metadata = [(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()]
        moved = isinstance(self.staging, TrainerMemory)  # workers have mapped memory that the tensors have left
        self.packing, (self.group, self.rank) = [], _sharding_group(tensors)
        if metadata != self.metadata or moved:
            self.staging = None  # free its memory before allocating anew
            self._preflight(metadata, tensors, may_map=not moved)
        if not isinstance(self.staging, TrainerMemory):
            for i, bucket in enumerate(self.buckets):
                views = [self.staging.view(i, piece) for piece in bucket]
                pairs = [self._packing_copy(tensors[p.name], p, view) for p, view in zip(bucket, views, strict=True)]
                self.packing.append(Copies(views[0].device, [pair for pair in pairs if pair]))
        self.sources = sources

    def _preflight(self, metadata: list, tensors: dict[str, torch.Tensor], may_map: bool) -> None:
        """The handshake: every worker checks names, dtypes and shapes, and both ends agree on dtypes and buckets.

        With `may_map`, workers that can map the tensors' memory get no staging buffers. Raises WeightSyncError with all
        problems.
        """
        if not self.links:
            self.channel.accept(self.links)
        for link in self.links:
            link.send(metadata=metadata)
        answers = [link.recv(ANSWER_SECONDS) for link in self.links]
        dtypes, problems = [], sorted({problem for answer in answers for problem in answer["problems"]})
        explained = bool(problems)  # a problem can leave its tensor without a dtype
        for i, (name, _, shape) in enumerate(metadata):
            wanted = {answer["dtypes"][i] for answer in answers} - {None}  # None: not on that worker
            if not wanted and not explained:
                problems.append(f"{name} {list(shape)}: the engine's loader ignores it")
            if len(wanted) > 1:
                problems.append(f"{name}: workers keep it in different dtypes, {sorted(wanted)}")
            dtypes.append(next(iter(wanted), None))
        if problems:
            raise WeightSyncError("preflight, nothing was sent:\n  " + "\n  ".join(problems))
        wire = [(name, dtype, shape) for (name, _, shape), dtype in zip(metadata, dtypes, strict=True)]
        mapped = may_map and self.replay and not self.adapted and self.channel.can_map(tensors.values())
        bucket_bytes = 1 << 62 if mapped else staging_buffer_bytes()
        self.buckets = wire_buckets(wire, bucket_bytes)
        if mapped:
            self.staging, shared = TrainerMemory(tensors), {"memory": list(tensors.values())}
        else:
            device = next(iter(tensors.values())).device
            self.staging, shared = self.channel.open_staging(self.links, self.buckets, device)
        handles = {kind: list(map(pack_handle, tensors)) for kind, tensors in shared.items()}
        for link in self.links:
            link.send(wire=wire, bucket_bytes=bucket_bytes, **handles)
        self.nbytes = sum(piece.nbytes for bucket in self.buckets for piece in bucket)
        self.metadata, self.loader = metadata, "" if self.replay else "reload: replay is switched off"
        self.version = max(answer["version"] for answer in answers)  # a failed sync may leave different ones

    def _first_sync(self) -> None:
        """Reload and record. If every worker could record, verify that replay gives the same bits as the reload did."""
        if refused := self._any_worker([answer["refused"] for answer in self._transmit("record")]):
            self.loader = f"reload: {refused}"
        elif not self._any_worker([not answer["same"] for answer in self._transmit("verify")]):
            self.loader = "replay"
        elif not self._any_worker([not answer["same"] for answer in self._transmit("fallback")]):
            self.loader = "reload: replay did not reproduce it bit for bit"
        else:
            raise WeightSyncError("a second reload of the same tensors gave other weights than the first")
        for link in self.links:
            link.send(mode="end")

    def _any_worker(self, values: list) -> str:
        """The first true value of any worker as text, "" if there is none.

        With sharded tensors, every rank asks its own worker, but each pass gathers from all ranks. So they exchange
        their answers and all take the first one.
        """
        text = str(next(filter(None, values), ""))
        if self.group is None:
            return text
        answers = torch.zeros(self.group.size(), REASON_BYTES, dtype=torch.uint8, device=self.packing[0].device)
        own_answer = torch.tensor(list(text.encode()[:REASON_BYTES]), dtype=torch.uint8)
        answers[self.rank, : len(own_answer)] = own_answer
        self._sum_over_ranks(answers, time.monotonic() + seconds_allowed(self.buckets))
        texts = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in answers.tolist()]
        return next(filter(None, texts), "")

    def _transmit(self, mode: str) -> list[dict]:
        """Send all buckets once. Returns the workers' answers."""
        deadline = time.monotonic() + seconds_allowed(self.buckets)
        if not self.packing:
            synchronize(next(iter(self.staging.tensors.values())).device)  # the optimizer step may still be running
        for link in self.links:
            link.send(mode=mode, version=self.version)
        started: list[Callable[[], bool]] = []
        for i in range(len(self.packing)):
            if i >= STAGING_BUFFERS:
                wait_until(started[i - STAGING_BUFFERS], self.links, deadline)
            self._pack(i, deadline)
            started.append(self.staging.start(i))
        for done in started[-STAGING_BUFFERS:]:
            wait_until(done, self.links, deadline)
        return [link.recv(max(0.0, deadline - time.monotonic()), expected_soon=True) for link in self.links]

    def _packing_copy(self, tensor: torch.Tensor, piece: Piece, view: torch.Tensor) -> tuple | None:
        """The copy (destination, source) that packs this rank's elements of a piece, or None if it has none.

        `view` is the piece's place in the bucket. Of a tensor that is not sharded, the first rank packs everything.
        """
        begin, row = piece.begin, torch.Size(tensor.shape[1:]).numel()
        if isinstance(tensor, DTensor):
            rows, local = -(-tensor.shape[0] // self.group.size()), tensor.to_local()  # rows divided as by torch.chunk
            first = self.rank * rows * row
            begin, end = max(piece.begin, first), min(piece.begin + piece.count, first + local.numel())
            if begin >= end:
                return None
            view, part = view[begin - piece.begin : end - piece.begin], local.view(-1)[begin - first : end - first]
        elif self.rank:
            return None
        else:
            part = piece_of(tensor, piece)
        if piece.name in self.adapted:
            part = part.reshape(-1, row)
            merge = self.adapted[piece.name].merge_into
            return view.view(part.shape), partial(merge, base=part, first_row=begin // row)
        return view.view(part.shape), part

    def _pack(self, i: int, deadline: float) -> None:
        """Fill bucket `i`. With sharded tensors, each rank packs its own bytes over zeros, and an all-reduce sums them.

        An all-reduce moves twice as many bytes as an all-gather, but it works in place, without a second buffer or
        copy, and the ranks' shares of a bucket may differ in size.
        """
        if self.group is None:
            self.packing[i].run()
            return
        bucket = self.staging.buffers[i % STAGING_BUFFERS][: bucket_nbytes(self.buckets[i])]
        bucket.zero_()
        self.packing[i].run()
        self._sum_over_ranks(bucket, deadline)

    def _sum_over_ranks(self, tensor: torch.Tensor, deadline: float) -> None:
        """All-reduce a tensor in place."""
        summing = dist.all_reduce(tensor, group=self.group, async_op=True)
        wait_until(summing.is_completed, self.links, deadline)  # a failed rank never joins
        summing.wait()

    @torch.no_grad()
    def compare_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor | LoRAWeight]]) -> Comparison:
        """Send the tensors of the last sync again. Every worker compares its quantized weights with them.

        Runs while `compare_weights` runs on every worker. Raises WeightSyncError if a weight differs from what was sent
        by more than rounding to its format explains; a scale that is 1 % off does.
        """
        if not self.links or isinstance(self.channel, SharedMemoryChannel):
            raise WeightSyncError("compare_weights needs a broadcast group, and a sync before it")
        found = {}
        try:
            weights = dict(named_tensors)
            for name, dtype, _ in wire_of(self.buckets):
                tensor = materialized(weights[name]).detach().to(getattr(torch, dtype)).contiguous()
                broadcast(self.channel.communicator, tensor, self.links)
            for link in self.links:
                found |= {
                    f"{name} of {link.peer}": row for name, row in link.recv(ANSWER_SECONDS)["comparison"].items()
                }
        except BaseException as error:
            self.close(reason_of(error))
            raise
        wrong = {name: error for name, (error, _) in found.items() if error > ROUNDING_SLACK}
        if wrong:
            worst = max(wrong, key=wrong.get)
            raise WeightSyncError(
                f"{len(wrong)} of {len(found)} quantized weights are not what was sent: {worst} is off by"
                f" {wrong[worst]:.3g} times what rounding explains"
            )
        if not found:
            raise WeightSyncError("none of the engine's weights is quantized")
        return Comparison(len(found), sum(changed for _, changed in found.values()))


def _without_ties(named_tensors: dict[str, torch.Tensor], adapted: dict[str, LoRAWeight]) -> dict[str, torch.Tensor]:
    """The tensors by name. Of tensors that share memory (tied weights), only the first.

    Raises WeightSyncError for tied weights that do not have the same adapter.
    """
    tensors, seen = {}, {}
    for name, tensor in named_tensors.items():
        local = _local(tensor)
        # By the storage's identity: a shard without rows has no address.
        memory = (local.untyped_storage()._cdata, local.storage_offset(), tensor.shape, tensor.stride())
        first = seen.setdefault(memory, name)
        if first == name and tensor.numel():
            tensors[name] = tensor.detach()
        elif tensor.numel() and adapted.get(first) is not adapted.get(name):
            raise WeightSyncError(f"{first} and {name} are tied, and do not have the same adapter")
    if not tensors:
        raise WeightSyncError("there is nothing to send: the model has no parameters")
    return tensors


def _sharding_group(tensors: dict[str, torch.Tensor]) -> tuple[dist.ProcessGroup | None, int]:
    """The process group over which DTensors are sharded, and this rank in it; (None, 0) without DTensors.

    Raises WeightSyncError for DTensors that are not sharded by rows, or over different groups.
    """
    found = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            over = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
            if [tensor.placements[dim] for dim in over] != [Shard(0)]:
                raise WeightSyncError(f"{name} is placed as {tensor.placements}: a sync only gathers shards of rows")
            found[tensor.device_mesh.get_group(over[0])] = tensor.device_mesh.get_local_rank(over[0])
    if len(found) > 1:
        raise WeightSyncError("the tensors are sharded over different groups of ranks")
    return next(iter(found.items()), (None, 0))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor, any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
