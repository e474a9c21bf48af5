"""The trainer's end of a weight sync."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import torch
from torch.distributed.tensor import DTensor

from .buckets import (
    Piece,
    bucket_nbytes,
    dtype_name,
    seconds_allowed,
    staging_buffer_bytes,
    wire_buckets,
)
from .channels import BroadcastChannel, SharedMemoryChannel, Staging, TrainerMemory
from .comparison import Comparison, comparison_of
from .copies import digest, load_kernel
from .groups import pack_handle, synchronize
from .link import ANSWER_SECONDS, Link, WeightSyncError, reason_of, recv_all, wait_until
from .lora import LoRAWeight
from .packing import Packing
from .ranks import Ranks, ShardedPart, ranks_of
from .samples import TrainerSamples
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


class WeightSender:
    """The trainer's end of a weight sync.

    `channel` is the communicator that `stateless_init_process_group` returned to rank 0, or this trainer rank's
    `SharedMemoryChannel` to the workers on the same device. If rank 0 of a sharded trainer has a communicator, the
    other ranks pass None: they help rank 0 to gather. With `replay=False`, every sync is a reload. With a `timeout`, a
    worker has failed if an answer, or one pass over the weights, takes longer than so many seconds. Without, the limit
    depends on the size of the weights. A channel serves one sender: another one on it raises WeightSyncError. A sender
    keeps the tensors of its last sync alive until the next one, or until `close`.
    """

    def __init__(self, channel, replay: bool = True, timeout: float = math.inf):
        is_communicator = channel is not None and not isinstance(channel, SharedMemoryChannel)
        self.channel = BroadcastChannel(channel) if is_communicator else channel
        if getattr(channel, "has_sender", False):
            raise WeightSyncError("this channel has a WeightSender: call that one, or make a new channel on both sides")
        if channel:
            channel.has_sender = True
        self.replay, self.timeout, self.closed, self.version = replay, timeout, False, 0
        self.links: list[Link] = []  # to the workers
        # What the last handshake agreed on:
        self.sources = None  # (name, address, dtype, shape, strides, LoRAWeight) of each tensor; addresses of factors
        self.metadata = None  # (name, name of the dtype, shape) of each tensor, tied ones once
        self.staging: Staging | None = None
        self.buckets: list[list[Piece]] = []
        self.ranks = Ranks()  # which hold shards of the tensors
        self.packing: Packing | None = None  # None if workers read the tensors where they are
        self.nbytes, self.loader = 0, ""  # loader as in `SyncReport`; "" before the first sync

    @torch.no_grad()
    def send_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor | LoRAWeight]]) -> SyncReport:
        """Send these weights to every engine worker. Names are those of the Hugging Face checkpoint; any dtype.

        Runs while `receive_weights` runs on every worker. Tied tensors travel once. DTensors must be sharded by rows,
        as FSDP2 shards them. They are gathered a bucket at a time, so all ranks that hold shards call this together;
        with HSDP and a communicator, only those of rank 0's replica.
        Raises WeightSyncError with the reason of the side that failed. The session is then closed, and a new one needs
        a new channel on both sides.
        """
        started = time.perf_counter()
        return self._in_session(named_tensors, lambda: self._sync(started))

    @torch.no_grad()
    def compare_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor | LoRAWeight]]) -> Comparison:
        """Send the tensors of the last sync again. Every worker compares its quantized weights with them.

        Runs while `compare_weights` runs on every worker, on every rank that calls `send_weights`. Raises
        WeightSyncError if a weight differs from what was sent by more than rounding to its format explains; a scale
        that is 1 % off does.
        """
        if not self.metadata:
            raise WeightSyncError("compare_weights needs a sync before it")
        return comparison_of(self._in_session(named_tensors, self._compare, [name for name, *_ in self.sources]))

    def close(self, error: str | None = None) -> None:
        """End the session, for good. With `error`, waiting workers raise it."""
        if self.closed:
            return
        self.closed = True
        for link in (*self.links, *self.ranks.links):
            link.close(error)
        self.links, self.ranks, self.sources, self.staging, self.packing = [], Ranks(), None, None, None
        if self.channel:
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
            with torch.cuda.device_of(next(iter(tensors.values()), torch.empty(0))):
                self._agree(tensors, adapted)
                return send() if self.channel else self._help()
        except BaseException as error:  # KeyboardInterrupt as well: half a session must not be used again
            self.close(reason_of(error))
            raise

    def _agree(self, tensors: dict[str, torch.Tensor], adapted: dict[str, LoRAWeight]) -> None:
        """Unless the tensors are those of the last sync: preflight, and prepare the copies that pack the buckets."""
        sources = [
            (name, _local(t).data_ptr(), t.dtype, t.shape, t.stride(), adapted.get(name)) for name, t in tensors.items()
        ]
        sources += [(name, weight.lora_A.data_ptr(), weight.lora_B.data_ptr()) for name, weight in adapted.items()]
        if sources == self.sources:
            return
        if len(devices := {str(tensor.device) for tensor in tensors.values()}) > 1:
            raise WeightSyncError(f"the tensors are on {', '.join(sorted(devices))}: a sync sends those of one device")
        tensors = _without_ties(tensors, adapted)
        metadata = [(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()]
        moved = isinstance(self.staging, TrainerMemory)  # workers have mapped memory that the tensors have left
        self.packing, ranks = None, ranks_of(tensors)
        if self.sources is None:
            self.ranks = ranks
            if self.channel is None or (ranks.size > 1 and isinstance(self.channel, BroadcastChannel)):
                ranks.connect(self.channel and self.channel.host, next(iter(tensors.values())).device)
        if metadata != self.metadata or moved:
            self.staging = None  # free its memory before allocating anew
            if self.channel:
                self._preflight(metadata, tensors, adapted, may_map=self.replay and not moved)
            else:
                self._follow(metadata, next(iter(tensors.values())).device)
            self.metadata = metadata
        if not isinstance(self.staging, TrainerMemory):
            self.packing = Packing(tensors, adapted, self.buckets, self.staging, self.ranks)
        self.sources = sources

    def _preflight(
        self, metadata: list, tensors: dict[str, torch.Tensor], adapted: dict[str, LoRAWeight], may_map: bool
    ) -> None:
        """The handshake: every worker checks names, dtypes and shapes, and both ends agree on dtypes and buckets.

        With `may_map`, workers map the tensors' memory if they can, and there are no staging buffers. Raises
        WeightSyncError with all problems.
        """
        if not self.links:
            self.channel.accept(self.links)
        for link in self.links:
            link.send(metadata=metadata)
        answers = recv_all(self.links, min(ANSWER_SECONDS, self.timeout), self.ranks.links)
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
        wire = [(name, dtype, shape) for (name, _, shape), dtype in zip(metadata, dtypes, strict=True)]
        memory = TrainerMemory({name: adapted.get(name, tensor) for name, tensor in tensors.items()})
        is_mapped, device = may_map and self.channel.can_map(memory.mapped), memory.bases[0].device
        # One bucket if workers map all.
        bucket_bytes = 1 << 62 if is_mapped else staging_buffer_bytes(self.channel.staging_buffers)
        self.buckets = wire_buckets(wire, bucket_bytes)
        if is_mapped:
            self.staging, shared = memory, {"memory": memory.bases, "factors": memory.factors}
            load_kernel(device)  # or a later sync would wait for its compilation
        else:
            self.staging, shared = self.channel.open_staging(self.links, self.buckets, device)
        handles = {kind: [pack_handle(tensor) for tensor in tensors] for kind, tensors in shared.items()}
        adapters = {name: (weight.scaling, weight.transposed) for name, weight in memory.adapted.items()}
        for link in (*self.links, *self.ranks.links):
            link.send(wire=wire, bucket_bytes=bucket_bytes, adapters=adapters, **handles)
        self.nbytes = sum(piece.nbytes for bucket in self.buckets for piece in bucket)
        self.loader = "" if self.replay else "reload (replay is switched off)"
        self.version = max(answer["version"] for answer in answers)  # a failed sync may leave different ones

    def _follow(self, metadata: list, device: torch.device) -> None:
        """Learn from rank 0 what it and the workers have agreed on."""
        message = self.ranks.links[0].recv(ANSWER_SECONDS)
        wire = message.get("wire", [])
        if [(name, tuple(shape)) for name, _, shape in wire] != [(name, shape) for name, _, shape in metadata]:
            raise WeightSyncError("rank 0 sends other tensors than this rank has")
        self.buckets = wire_buckets(wire, message["bucket_bytes"])
        buffer = torch.empty(max(map(bucket_nbytes, self.buckets)), dtype=torch.uint8, device=device)
        self.staging = Staging([buffer], self.buckets)  # nobody reads it: one is enough

    def _sync(self, started: float) -> SyncReport:
        self.version += 1
        if self.loader:
            self._transmit("replay" if self.loader == "replay" else "reload")
        else:
            self._first_sync()
        seconds = time.perf_counter() - started
        report = SyncReport(self.version, len(self.metadata), self.nbytes, seconds, self.loader)
        for link in self.ranks.links:
            link.send(report=asdict(report))
        return report

    def _compare(self) -> dict:
        """What `compare_quantized` returned on all workers, by weight and worker."""
        results = {}
        for link, answer in zip(self.links, self._transmit("compare"), strict=True):
            results |= {f"{name} of {link.peer}": result for name, result in answer["found"].items()}
        for link in self.ranks.links:
            link.send(found=results)
        return results

    def _help(self) -> SyncReport | dict:
        """Help rank 0 to gather until it sends its report or comparison, and return that."""
        while "mode" in (message := self.ranks.links[0].recv(ANSWER_SECONDS)):
            self.version, deadline = message["version"], time.monotonic() + seconds_allowed(self.buckets)
            for i in range(len(self.buckets)):
                self.packing.pack(i, self.version, [], deadline)
            self.packing.digest([], deadline)
        if "wire" in message:
            raise WeightSyncError("rank 0 sends other tensors than this rank has")
        return SyncReport(**message["report"]) if "report" in message else message["found"]

    def _first_sync(self) -> None:
        """Reload and record. If every worker could record, verify that replay gives the same bits as the reload did."""
        if refused := self._any_worker([answer["refused"] for answer in self._transmit("record")]):
            self.loader = f"reload ({refused})"
        elif not self._any_worker([not answer["same"] for answer in self._transmit("verify")]):
            self.loader = "replay"
        elif not self._any_worker([not answer["same"] for answer in self._transmit("fallback")]):
            self.loader = "reload (replay did not reproduce it bit for bit)"
        else:
            raise WeightSyncError("a second reload of the same tensors gave other weights than the first")
        for link in self.links:
            link.send(mode="end", replays=self.loader == "replay")
        answers = recv_all(self.links, min(ANSWER_SECONDS, self.timeout), self.ranks.links)
        if self.loader == "replay" and not self.packing:
            weights, dtypes = list(self.staging.weights.values()), [piece.dtype for piece in self.buckets[0]]
            self.staging.samples = [TrainerSamples(answer["blocks"], weights, dtypes) for answer in answers]

    def _any_worker(self, values: list) -> str:
        """The first true value as text, "" if there is none. `values` has one of each worker.

        If every rank has a worker of its own, each pass gathers from all ranks. So the ranks exchange their workers'
        values and all take the first true one.
        """
        text = str(next(filter(None, values), ""))
        if self.ranks.size == 1 or self.ranks.links:
            return text
        deadline = time.monotonic() + seconds_allowed(self.buckets)
        return self.ranks.first_text(text, self.packing.total.device, self.links, deadline)

    def _transmit(self, mode: str) -> list[dict]:
        """Send all buckets once. Returns the workers' answers."""
        deadline = time.monotonic() + min(seconds_allowed(self.buckets), self.timeout)
        peers = [*self.links, *self.ranks.links]
        if not self.packing:
            synchronize(self.staging.bases[0].device)  # the optimizer step may still be running
        for link in peers:
            link.send(mode=mode, version=self.version)
        transfers: list[Callable[[], bool]] = []  # whether each bucket has gone
        in_flight = len(self.staging.buffers)
        for i in range(len(self.buckets) if self.packing else 0):
            if i >= in_flight:
                wait_until(transfers[i - in_flight], peers, deadline)
            self.packing.pack(i, self.version, self.links, deadline)
            transfers.append(self.staging.start(i))
        if self.staging.is_digested(mode):  # the last buckets are on their way
            total = self.packing.digest(self.links, deadline) if self.packing else digest(self.staging.mapped)
            totals = [total] * len(self.links)
        else:  # now, while the workers' copies have hardly begun: later, the trainer would wait for its turn on the GPU
            totals = [samples.digest(self.version) for samples in self.staging.samples]
        for link, total in zip(self.links, totals, strict=True):
            link.send(digest=total)  # the worker compares it with its own
        for has_gone in transfers[-in_flight:]:
            wait_until(has_gone, peers, deadline)
        return recv_all(self.links, max(0.0, deadline - time.monotonic()), self.ranks.links, expected_soon=True)


def _without_ties(named_tensors: dict[str, torch.Tensor], adapted: dict[str, LoRAWeight]) -> dict[str, torch.Tensor]:
    """The tensors by name; of those that share memory (tied weights), only the first.

    Raises WeightSyncError for tied weights that do not have the same adapter.
    """
    tensors, first_names = {}, {}
    for name, tensor in named_tensors.items():
        local = _local(tensor)
        begin = tensor.begin if isinstance(tensor, ShardedPart) else local.storage_offset()
        memory = (storage_id(local), begin, tensor.shape, tensor.stride())  # a shard without rows has no address
        first = first_names.setdefault(memory, name)
        if first == name and tensor.numel():
            tensors[name] = tensor.detach()
        elif tensor.numel() and adapted.get(first) is not adapted.get(name):
            raise WeightSyncError(f"{first} and {name} are tied, and do not have the same adapter")
    if not tensors:
        raise WeightSyncError("there is nothing to send: the model has no parameters")
    return tensors


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a sharded tensor, any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, (DTensor, ShardedPart)) else tensor  # faster than a union type
