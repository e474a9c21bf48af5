"""Both ends of a weight sync: a trainer's parameters into every worker of a running vLLM engine.

    trainer process                            each engine worker
    WeightSender.send_weights(params)   --->   WorkerExtension.receive_weights()             on other GPUs, or
                                               ColocateWorkerExtension.receive_weights(...)  on the trainer's own

Between GPUs the bytes travel by broadcast (NCCL; gloo between CPUs), packed into a few buckets, several in flight. On
one GPU both processes have mapped the same memory (CUDA IPC): the trainer's parameters themselves or, if the trainer is
sharded, buckets into which its ranks gather them. Beside the bytes runs one small socket per worker, the link. It
carries what the two ends must agree on, it ends the wait of either side when the other fails, and it breaks at once
when a process dies. One sync, in order:

1. Preflight, unless the tensors are those of the last sync; while the trainer looks, the workers wake up. Each worker
   runs vLLM's own weight loaders over tensors without storage and notes what would be copied where. A parameter that
   the engine does not know, lacks or shapes otherwise is an error that names it, before a byte moves. The answer also
   says in which dtype the engine keeps each parameter; that is the dtype sent, so fp32 master weights travel as bf16 to
   a bf16 engine.
2. The buckets. *Reload* hands the tensors to vLLM's loader inside one of its reload brackets
   (`initialize_layerwise_reload` ... `finalize_layerwise_reload`), which is right for every model, quantization and
   device: layers are loaded, repacked or quantized as they complete. *Replay* repeats just what such a load comes down
   to: copies straight from the bucket (copies.py), and a quantized layer's processing, by vLLM's own method. It is
   taken from the second sync on if in the first one, after other weights had been loaded, it gave what reload had
   given, bit for bit, on every worker.
3. Every worker notes the digest of what it wrote and the weight version, and answers.

The engine must not be generating, and its prefix cache holds keys and values of the old weights: the caller runs
`reset_prefix_cache` before the next prompt. If either side fails, both learn why, the session is closed, and the
engine's weights are undefined until a later session has completed a sync.

The protocols of vLLM's examples work too, code written for them runs unchanged: one parameter at a time
(`init_weight_update_group`, `update_weight`), buckets over ZMQ and CUDA IPC (`update_weights_from_ipc`), handles by
name (`update_weights_from_ipc_handles`), and after each of them `check_weights_changed`. The last section plugs gloo
into vLLM's own weight-transfer API, as an example of a transport. Imports need torch alone; vLLM is imported by the
functions that use it.

Where the time is, of 46.2 ms for a 7B over NCCL (NVIDIA H200): 43.2 are the broadcast of its bytes. Messages, wake-ups
and launches are 1.8 for OPT-125M, and should be here; the first bucket's packing and the last one's copying, which
nothing hides, 0.4 by their bytes. What is left, the gaps between 57 broadcasts perhaps, has not been taken apart.

On one GPU, of 8.5 to 8.9 ms, the kernel that copies takes 7.5; a plain copy takes 7.3. Some 0.4 are the trainer's look
at its tensors, under which the worker wakes up; the others are messages, launches and the way back. The worker's call
is back in its engine 0.6 ms later.
"""

import functools
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from copies import Copies
from engine_model import EngineModel, repack_tied_layers
from weight_transport import (
    CONNECT_SECONDS,
    LANES,
    BroadcastChannel,
    BroadcastLanes,
    Lanes,
    Link,
    Piece,
    SharedLanes,
    SharedMemoryChannel,
    TrainersMemory,
    WeightSyncError,
    broadcast,
    bucket_nbytes,
    connect_group,
    connect_path,
    device_id_of,
    dtype_name,
    pack_handle,
    part_of,
    rebuild_ipc,
    seconds_allowed,
    share_tensor,
    stateless_init_process_group,
    synchronize,
    unpack_handle,
    wait_until,
    wire_buckets,
    wire_of,
)

__all__ = [
    "ColocateWorkerExtension",
    "Comparison",
    "SharedMemoryChannel",
    "SyncReport",
    "WeightSender",
    "WeightSyncError",
    "WorkerExtension",
    "rebuild_ipc",
    "share_tensor",
    "stateless_init_process_group",
]

STAGING_BYTES = 1000 << 20  # for buckets, at each end; with the tables of copies 1 GiB, a reload takes more besides
REASON_BYTES = 1000  # of what one trainer rank tells the others
ANSWER_SECONDS = 600.0  # preflight and the first sync of the largest models take less; a dead peer is noticed at once
ROUNDING_SLACK = 1.001  # how much more than the error of rounding passes: comparing rounds as well


# --- The trainer's end ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SyncReport:
    """One completed sync, as the trainer saw it: from weights ready to every worker's answer."""

    version: int  # of the engine's weights: 1 after the first sync
    tensors: int
    nbytes: int  # sent, in the engine's dtypes
    seconds: float
    loader: str  # "replay", or "reload" with the reason why not

    @property
    def gigabytes_per_second(self) -> float:
        return self.nbytes / self.seconds / 1e9


@dataclass(frozen=True)
class Comparison:
    """Quantized weights that are what was sent, but for rounding."""

    weights: int  # of all workers
    changed: int  # those whose scales and values both changed since the last comparison


class WeightSender:
    """The trainer's end of the sync.

    `channel` is either `stateless_init_process_group`'s communicator, with rank 0, or the `SharedMemoryChannel` to the
    worker on this trainer rank's own device. With `replay=False`, every sync is a reload.
    """

    def __init__(self, channel, replay: bool = True):
        self.channel = channel if isinstance(channel, SharedMemoryChannel) else BroadcastChannel(channel)
        self.replay, self.closed, self.version = replay, False, 0
        self.links: list[Link] = []
        # What both ends have agreed on: name, address, dtype, shape and strides of each tensor; name, dtype and shape
        # of each, tied ones once; the buckets and the copies that fill them; "replay", or "reload" and why.
        self.sources = self.metadata = self.lanes = None
        self.buckets: list[list[Piece]] = []
        self.packing: list[Copies] = []
        self.group, self.rank = None, 0  # of the ranks among which the tensors are sharded, and of this one
        self.nbytes, self.loader = 0, ""

    @torch.no_grad()
    def send_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> SyncReport:
        """Bring every engine worker to these weights, named as in the Hugging Face checkpoint, any dtype.

        Runs while `receive_weights` runs on every worker. Tied tensors travel once. DTensors, sharded by rows as FSDP2
        does, are gathered a bucket at a time, so that every rank of their mesh calls this together. Raises
        WeightSyncError, also with the workers' own errors; the session is closed then, and a new one needs a new
        channel on both sides.
        """
        if self.closed:
            raise WeightSyncError("this weight sync session was closed by an earlier error")
        started = time.perf_counter()
        try:
            for link in self.links:
                link.send(coming=True)  # the workers wake up while this side looks at its tensors
            named_tensors = list(named_tensors)
            with torch.cuda.device_of(next((tensor for _, tensor in named_tensors), torch.empty(0))):
                self._agree(named_tensors)
                self.version += 1
                if self.loader:
                    self._transmit("replay" if self.loader == "replay" else "reload")
                else:
                    self._first_sync()
        except BaseException as error:  # an interrupt too leaves half a session, which must not be used again
            self.close(_reason(error))
            raise
        return SyncReport(self.version, len(self.metadata), self.nbytes, time.perf_counter() - started, self.loader)

    def close(self, error: str | None = None) -> None:
        """End the session; with `error`, workers that are waiting raise it."""
        self.closed = True
        for link in self.links:
            link.close(error)
        self.links, self.lanes, self.packing = [], None, []
        self.channel.close(error)

    def _agree(self, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Preflight, unless names, dtypes and shapes are those of the last sync; find the copies that pack a bucket."""
        sources = [(name, _local(t).data_ptr(), t.dtype, t.shape, t.stride()) for name, t in named_tensors]
        if sources == self.sources:
            return
        tensors = _without_ties(named_tensors)
        metadata = [(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()]
        moved = isinstance(self.lanes, TrainersMemory)  # the workers read where the tensors no longer are
        self.packing, (self.group, self.rank) = [], _ranks_of(tensors)
        if metadata != self.metadata or moved:
            self.lanes = None  # its memory goes before the new one's comes
            self._preflight(metadata, tensors, direct=not moved)
        if not isinstance(self.lanes, TrainersMemory):
            for i, bucket in enumerate(self.buckets):
                views = [self.lanes.view(i, piece) for piece in bucket]
                pairs = [self._part(tensors[p.name], p, view) for p, view in zip(bucket, views, strict=True)]
                self.packing.append(Copies(views[0].device, [pair for pair in pairs if pair]))
        self.sources = sources

    def _preflight(self, metadata: list, tensors: dict[str, torch.Tensor], direct: bool) -> None:
        """Have every worker try the load without a byte; agree on dtypes and buckets. Raises what does not fit."""
        if not self.links:
            self.channel.accept(self.links)
        for link in self.links:
            link.send(metadata=metadata)
        answers = [link.recv(ANSWER_SECONDS) for link in self.links]
        dtypes, problems = [], sorted({problem for answer in answers for problem in answer["problems"]})
        for i, (name, _, shape) in enumerate(metadata):
            wanted = {answer["dtypes"][i] for answer in answers} - {None}
            if not wanted and not problems:
                problems.append(f"{name} {list(shape)}: the engine's loader ignores it")
            if len(wanted) > 1:
                problems.append(f"{name}: workers keep it in different dtypes, {sorted(wanted)}")
            dtypes.append(next(iter(wanted), None))
        if problems:
            raise WeightSyncError("preflight, nothing was sent:\n  " + "\n  ".join(problems))
        wire = [(name, dtype, shape) for (name, _, shape), dtype in zip(metadata, dtypes, strict=True)]
        direct = direct and self.replay and self.channel.reaches(tensors.values())
        bucket_bytes = 1 << 62 if direct else STAGING_BYTES // LANES
        self.buckets = wire_buckets(wire, bucket_bytes)
        if direct:
            self.lanes, offer = TrainersMemory(tensors), {"memory": list(tensors.values())}
        else:
            device = next(iter(tensors.values())).device
            self.lanes, offer = self.channel.open_lanes(self.links, self.buckets, device)
        for link in self.links:
            link.send(wire=wire, bucket_bytes=bucket_bytes, **{k: list(map(pack_handle, v)) for k, v in offer.items()})
        self.nbytes = sum(piece.nbytes for bucket in self.buckets for piece in bucket)
        self.metadata, self.loader = metadata, "" if self.replay else "reload: replay is switched off"
        self.version = max(answer["version"] for answer in answers)  # which a failed sync leaves uneven

    def _first_sync(self) -> None:
        """Reload; then, if every worker has recorded its copies, let replay show that it gives the same bits."""
        if refused := self._first_true([answer["refused"] for answer in self._transmit("first")]):
            self.loader = f"reload: {refused}"
        elif not self._first_true([not answer["same"] for answer in self._transmit("trial")]):
            self.loader = "replay"
        elif not self._first_true([not answer["same"] for answer in self._transmit("repair")]):
            self.loader = "reload: replay did not reproduce it bit for bit"
        else:
            raise WeightSyncError("a second reload of the same tensors gave other weights than the first")
        for link in self.links:
            link.send(mode="end")

    def _first_true(self, values: list) -> str:
        """The first true value's text, if any, also of the ranks among which tensors are sharded: each has asked its
        own worker, but a pass gathers from all of them, so that they must go the same way."""
        text = str(next(filter(None, values), ""))
        if self.group is None:
            return text
        said = torch.zeros(self.group.size(), REASON_BYTES, dtype=torch.uint8, device=self.packing[0].device)
        mine = torch.tensor(list(text.encode()[:REASON_BYTES]), dtype=torch.uint8)
        said[self.rank, : len(mine)] = mine
        self._add_up(said, time.monotonic() + seconds_allowed(self.buckets))
        texts = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in said.tolist()]
        return next(filter(None, texts), "")

    def _transmit(self, mode: str) -> list[dict]:
        """One pass of all bytes, and the workers' answers to it."""
        deadline = time.monotonic() + seconds_allowed(self.buckets)
        if not self.packing:
            synchronize(next(iter(self.lanes.tensors.values())).device)  # the optimizer step may still be under way
        for link in self.links:
            link.send(mode=mode, version=self.version)
        started: list[Callable[[], bool]] = []
        for i in range(len(self.packing)):
            if i >= LANES:
                wait_until(started[i - LANES], self.links, deadline)
            self._pack(i, deadline)
            started.append(self.lanes.start(i))
        for done in started[-LANES:]:
            wait_until(done, self.links, deadline)
        return [link.recv(max(0.0, deadline - time.monotonic()), soon=True) for link in self.links]

    def _part(self, tensor: torch.Tensor, piece: Piece, view: torch.Tensor) -> tuple | None:
        """(destination, source) of what this rank brings of a piece, whose place in a bucket is `view`, if anything:
        its own rows, and only the first rank what is not sharded."""
        if not isinstance(tensor, DTensor):
            part = part_of(tensor, piece)
            return None if self.rank else (view.view(part.shape), part)
        rows, local = -(-tensor.shape[0] // self.group.size()), tensor.to_local()  # as torch.chunk shares them out
        first = self.rank * rows * (tensor.numel() // tensor.shape[0])
        begin, end = max(piece.begin, first), min(piece.begin + piece.count, first + local.numel())
        if begin >= end:
            return None
        return view[begin - piece.begin : end - piece.begin], local.view(-1)[begin - first : end - first]

    def _pack(self, i: int, deadline: float) -> None:
        """Fill bucket `i`, together with the other ranks if it is sharded: each adds its bytes to the others' zeros.

        A sum moves twice what gathering would, but its result is in place: there is no buffer beside the bucket and no
        other copy, and rows may be on one rank only.
        """
        if self.group is None:
            self.packing[i].run()
            return
        bucket = self.lanes.buffers[i % LANES][: bucket_nbytes(self.buckets[i])]
        bucket.zero_()
        self.packing[i].run()
        self._add_up(bucket, deadline)

    def _add_up(self, tensor: torch.Tensor, deadline: float) -> None:
        """Sum a tensor over the ranks, in place."""
        summing = dist.all_reduce(tensor, group=self.group, async_op=True)
        wait_until(summing.is_completed, self.links, deadline)  # a rank that has failed never comes
        summing.wait()

    @torch.no_grad()
    def compare_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Comparison:
        """Send the tensors of the last sync again, while every worker compares its quantized weights with them.

        Runs while `compare_weights` runs on every worker. Raises WeightSyncError if a weight is further from what was
        sent than rounding to its format explains: a scale that is 1 % off is.
        """
        if not self.links:
            raise WeightSyncError("there was no sync to compare with")
        found = {}
        try:
            tensors = _without_ties(list(named_tensors))
            for name, dtype, _ in wire_of(self.buckets):
                tensor = tensors[name].to(getattr(torch, dtype)).contiguous()
                broadcast(self.channel.communicator, tensor, self.links)
            for link in self.links:
                found |= {f"{name} of {link.peer}": row for name, row in link.recv(ANSWER_SECONDS)["compared"].items()}
        except BaseException as error:
            self.close(_reason(error))
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


def _without_ties(named_tensors: list[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The tensors by name, the first name only where two share their memory."""
    tensors, seen = {}, set()
    for name, tensor in named_tensors:
        local = _local(tensor)
        # By identity: a shard without rows has no address.
        memory = (local.untyped_storage()._cdata, local.storage_offset(), tensor.shape)
        if tensor.numel() and memory not in seen:
            seen.add(memory)
            tensors[name] = tensor.detach()
    if not tensors:
        raise WeightSyncError("there is nothing to send: the model has no parameters")
    return tensors


def _ranks_of(tensors: dict[str, torch.Tensor]) -> tuple[dist.ProcessGroup | None, int]:
    """The group of the ranks among which DTensors are sharded, and this rank in it; None without DTensors."""
    found = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            over = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
            if [tensor.placements[dim] for dim in over] != [Shard(0)]:
                raise WeightSyncError(f"{name} is placed as {tensor.placements}: only rows are gathered")
            found[tensor.device_mesh.get_group(over[0])] = tensor.device_mesh.get_local_rank(over[0])
    if len(found) > 1:
        raise WeightSyncError("the tensors are sharded over different groups of ranks")
    return next(iter(found.items()), (None, 0))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor, any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# --- The workers' end -------------------------------------------------------------------------------------------------


class _WeightReceiver:
    """The workers' end of a `WeightSender`'s syncs, by whatever channel."""

    weight_link: Link | None = None
    weight_lanes: Lanes | None = None

    def check_weights_changed(self) -> bool:
        """Whether every element served is, bit for bit, what the last completed sync left.

        False before a sync, while one is partial (some parameters sent, others not), and without parameters.
        """
        return self._engine_model().unchanged()

    def _receive(self, timeout: float, connect: Callable[[], Link]) -> dict:
        # An exception would break the engine: vLLM reads no worker's answer beyond the first exception, and takes what
        # is left for answers to its next call.
        try:
            return {"version": self._take_part(timeout, connect)}
        except Exception as error:
            self._close_link(_reason(error))
            return {"error": _reason(error)}

    def _take_part(self, timeout: float, connect: Callable[[], Link]) -> int:
        model = self._engine_model()
        if model.loading:
            model.finish()  # what a failed sync, or one parameter at a time, left half done
        if self.weight_link is None:
            self.weight_link = connect()
        link = self.weight_link
        message = link.recv(timeout)
        if "coming" in message:
            message = link.recv(timeout, soon=True)
        if "metadata" in message:
            dtypes, problems = model.preflight(message["metadata"])
            link.send(dtypes=dtypes, problems=problems, version=model.version)
            offer = link.recv(ANSWER_SECONDS)
            model.moves = self.weight_lanes = None  # their memory goes before the new one's comes
            self.weight_buckets = wire_buckets(offer["wire"], offer["bucket_bytes"])
            self.weight_lanes = self._open_lanes(link, offer)
            message = link.recv(ANSWER_SECONDS)
        mode = message["mode"]
        model.digest = None  # until all have come: this worker may fail before it loads a byte
        written = self._load(mode)
        model.complete(message["version"], written)
        if mode != "first":
            link.send(done=True)
            return model.version
        refused = model.record(self.weight_buckets, self.weight_lanes)
        reloaded = None if refused else model.state_digest()
        link.send(refused=refused)
        while (mode := link.recv(ANSWER_SECONDS)["mode"]) != "end":
            if mode == "trial":  # other weights first, so that nothing that a replay leaves out can pass for right
                self._load_other_weights()
            else:
                model.moves = None
            model.digest = self._load(mode)
            link.send(same=model.digest == written == model.take_digest() and model.state_digest() == reloaded)
        return model.version

    def _load(self, mode: str) -> int | None:
        """Load all buckets as they arrive; returns the digest of what was written."""
        arrivals = _arrivals(self.weight_buckets, self.weight_lanes, self.weight_link)
        if mode in ("replay", "trial"):
            return self._engine_model().replay(arrivals)
        _reload(self._engine_model(), self.weight_buckets, self.weight_lanes, arrivals)
        return self._engine_model().take_digest()

    def _load_other_weights(self) -> None:
        buckets = self.weight_buckets
        _reload(self._engine_model(), buckets, _OtherWeights(self.device), range(len(buckets)))

    def _close_link(self, error: str | None = None) -> None:
        """Leave the session; with `error`, a trainer that is waiting raises it."""
        if self.weight_link is not None:
            self.weight_link.close(error)
        self.weight_link = self.weight_lanes = None
        if hasattr(self, "weight_model"):
            self.weight_model.moves = None

    def _engine_model(self) -> EngineModel:
        if not hasattr(self, "weight_model"):
            self.weight_model = EngineModel(self)
        return self.weight_model


class WorkerExtension(_WeightReceiver):
    """Methods for vLLM's workers (`worker_extension_cls="rlhf_utils.WorkerExtension"`), run by `collective_rpc`."""

    model_update_group = None

    def init_weight_update_group(self, master_address: str, master_port: int, rank_offset: int, world_size: int):
        """Join the group that the trainer opens as rank 0 with `stateless_init_process_group`.

        This worker's rank is its rank in the engine plus `rank_offset` (1 behind a single trainer); `world_size`
        counts the trainer and all workers of all engines. vLLM takes an exception of a worker, here or in
        `update_weight`, out of step with its other answers: start the engine anew after one.
        """
        from vllm.distributed.parallel_state import get_world_group

        self.close_weight_update_group()
        rank = get_world_group().rank + rank_offset
        self.model_update_group = stateless_init_process_group(
            master_address, master_port, rank, world_size, self.device
        )

    def receive_weights(self, timeout: float = 3600.0) -> dict:
        """Take part in one `WeightSender.send_weights` that starts within `timeout` seconds.

        Returns {"version": n}, n counting the weights served from now on, or {"error": reason} with the trainer's
        error if that is what failed; the trainer in turn raises this worker's.
        """

        def connect() -> Link:
            group = self._joined_group().group
            return connect_group(group, group.rank, timeout)

        answer = self._receive(timeout, connect)
        if "error" in answer:
            self.close_weight_update_group()
        return answer

    def update_weight(self, name: str, dtype_name: str, shape) -> None:
        """Receive one parameter, which the trainer broadcasts from rank 0, and load it."""
        weight = torch.empty(tuple(shape), dtype=getattr(torch, dtype_name), device=self.device)
        group = self._joined_group()
        if self.device.type == "cuda":
            group.broadcast(weight, src=0, stream=torch.cuda.current_stream())
        else:
            group.broadcast(weight, src=0)
        self._engine_model().load_some([(name, weight)])

    def close_weight_update_group(self) -> None:
        """Leave the group."""
        self._close_link()
        if hasattr(self.model_update_group, "destroy"):
            self.model_update_group.destroy()  # a broadcast that will never end must not hold the GPU
        self.model_update_group = None

    def weight_bytes(self) -> int:
        """Memory of the weights that this worker serves, scales of quantized ones included."""
        return sum(tensor.nbytes for tensor in self._engine_model().served_tensors())

    def compare_weights(self) -> None:
        """Take part in one `WeightSender.compare_weights`, which raises what fails here."""
        try:
            group, wire = self._joined_group(), wire_of(self.weight_buckets)

            def receive(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
                broadcast(group, tensor, [self.weight_link])
                return tensor

            self.weight_link.send(compared=self._engine_model().compare(wire, receive))
        except Exception as error:
            self._close_link(_reason(error))
            self.close_weight_update_group()

    def _joined_group(self):
        if self.model_update_group is None:
            raise WeightSyncError("no weight update group: init_weight_update_group was not called, or a sync failed")
        return self.model_update_group

    def _open_lanes(self, link: Link, offer: dict) -> Lanes:
        return BroadcastLanes(self.model_update_group, self.weight_buckets, self.device)


class ColocateWorkerExtension(_WeightReceiver):
    """Methods for workers that share their device with a trainer rank; no broadcast, the weights are there already."""

    weight_path = ""

    def report_device_id(self) -> str:
        """The UUID of this worker's GPU; on CPU "cpu:" and its rank in the engine."""
        return device_id_of(torch.device("cpu", self.rank) if self.device.type == "cpu" else self.device)

    def receive_weights(self, handles: dict[str, str], timeout: float = 3600.0) -> dict:
        """As `WorkerExtension.receive_weights`; `handles` are those of the trainer ranks' `SharedMemoryChannel`s."""
        path = handles.get(self.report_device_id(), "")
        if path != self.weight_path:
            self._close_link()
            self.weight_path = path

        def connect() -> Link:
            if not path:
                raise WeightSyncError(f"no trainer rank is on {self.report_device_id()}: they are on {[*handles]}")
            return connect_path(path, self.rank, timeout)

        return self._receive(timeout, connect)

    def weight_digests(self) -> tuple[int | None, int | None]:
        """Digests of what this worker serves, and of that with all other tensors that its model's layers keep."""
        model = self._engine_model()
        return model.take_digest(), model.state_digest()

    def empty_cache(self) -> None:
        """Give back the GPU memory that torch keeps for tensors to come."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def update_weights_from_ipc(self, zmq_handles: dict[str, str], timeout: float = 600.0) -> None:
        """Load weights from a buffer of the trainer on this device, as vLLM's colocation example sends them.

        `zmq_handles` has an address by device id, at which the trainer's REQ socket is bound. It sends: a handle of a
        uint8 buffer (`reduce_tensor`'s, or `share_tensor`'s); then, as often as it fills the buffer, a list with name,
        shape, dtype and offset in bytes of every tensor in it; at the end None. This answers each with b"" or, once
        something has failed, the traceback of that, and raises it at the end. What the trainer sends are pickles: the
        address must be private. Raises WeightSyncError if the trainer is silent for `timeout` seconds.
        """
        import zmq

        buffer, error, message = None, None, ()
        with zmq.Context() as context, context.socket(zmq.REP) as socket_:
            socket_.setsockopt(zmq.RCVTIMEO, int(timeout * 1000))
            socket_.setsockopt(zmq.LINGER, 1000)
            socket_.connect(zmq_handles[self.report_device_id()])
            while message is not None:
                try:
                    message = socket_.recv_pyobj()
                    if isinstance(message, tuple):
                        buffer = rebuild_ipc(message, self.device.index)
                    elif message and not error:
                        weights = [(item["name"], _item(buffer, **item).clone()) for item in message]
                        self._engine_model().load_some(weights)
                    synchronize(self.device)  # the trainer may fill the buffer anew
                except zmq.Again as silence:
                    raise error or WeightSyncError(f"the trainer sent nothing for {timeout:.0f} s") from silence
                except Exception as failure:
                    error = error or failure
                    # A trainer that does not look at the answers goes on to the end; one that does may say no more.
                    socket_.setsockopt(zmq.RCVTIMEO, int(min(timeout, CONNECT_SECONDS) * 1000))
                if message is None:
                    buffer = None
                socket_.send(_reason(error).encode() if error else b"")
        if error:
            raise error

    def update_weights_from_ipc_handles(self, ipc_handles: dict[str, dict[str, tuple]]) -> None:
        """Load weights straight from the memory of the trainer on this device.

        `ipc_handles` has, by device id, a handle (`reduce_tensor`'s, or `share_tensor`'s) by parameter name. vLLM lets
        them pass with VLLM_ALLOW_INSECURE_SERIALIZATION=1.
        """
        weights, held = [], 0
        for name, handle in ipc_handles[self.report_device_id()].items():
            theirs = rebuild_ipc(handle, self.device.index)
            if weights and held + theirs.nbytes > STAGING_BYTES // LANES:
                self._engine_model().load_some(weights)
                weights, held = [], 0
            weights.append((name, theirs.clone()))
            held += theirs.nbytes
        self._engine_model().load_some(weights)
        synchronize(self.device)

    def _open_lanes(self, link: Link, offer: dict) -> Lanes:
        def mapped(texts: list[str]) -> list[torch.Tensor]:
            return [rebuild_ipc(unpack_handle(text), self.device.index) for text in texts]

        if "memory" in offer:
            names = [name for name, *_ in offer["wire"]]
            return TrainersMemory(dict(zip(names, mapped(offer["memory"]), strict=True)))
        return SharedLanes(link, mapped(offer["buffers"]), self.weight_buckets, says="emptied", hears="filled")


def _item(buffer: torch.Tensor, name: str, shape, dtype: torch.dtype, offset: int, **_) -> torch.Tensor:
    """A tensor in a buffer of bytes."""
    nbytes = dtype.itemsize * torch.Size(shape).numel()
    return buffer[offset : offset + nbytes].view(dtype).view(torch.Size(shape))


def _arrivals(buckets: list[list[Piece]], lanes: Lanes, link: Link) -> Iterator[int]:
    """Yield each bucket's number once it has arrived, with the next ones on the wire.

    What reads a bucket must be queued, on a GPU in the current stream, before the next number is asked for.
    """
    deadline = time.monotonic() + seconds_allowed(buckets)
    arriving: list[Callable[[], bool]] = []
    for i in range(len(buckets)):
        while len(arriving) < min(i + LANES, len(buckets)):
            arriving.append(lanes.start(len(arriving)))
        wait_until(arriving[i], [link], deadline)
        yield i
        lanes.release(i)


class _OtherWeights(Lanes):
    """Stands for buckets whose every element is another than is sent, most likely; takes no memory."""

    def __init__(self, device: torch.device):
        super().__init__([], [])
        self.device = device

    def view(self, i: int, piece: Piece) -> torch.Tensor:
        return torch.full((), 0.5, dtype=piece.dtype, device=self.device).expand(piece.count)


def _reload(model: EngineModel, buckets: list[list[Piece]], lanes: Lanes, arrivals: Iterator[int]) -> None:
    """Hand the tensors to vLLM's loader, bucket after bucket, in memory of their own: it keeps them for a while."""
    partial, weights, held = {}, [], 0
    for i in arrivals:
        for piece in buckets[i]:
            view = lanes.view(i, piece)
            if piece.name not in partial:
                partial[piece.name] = torch.empty(piece.shape, dtype=piece.dtype, device=view.device)
            whole = partial[piece.name]
            whole.view(-1)[piece.begin : piece.begin + piece.count].copy_(view)
            held += piece.nbytes
            if piece.begin + piece.count == whole.numel():
                weights.append((piece.name, partial.pop(piece.name)))
            if weights and (piece is buckets[i][-1] or held > STAGING_BYTES // LANES):
                model.load(weights)
                weights, held = [], 0
    model.finish(complete=True)


def _reason(error: BaseException) -> str:
    """What the other side is told: this package's own words, or the traceback of anything else."""
    return str(error) if isinstance(error, WeightSyncError) else "".join(traceback.format_exception(error))


# --- A transport of one's own for vLLM's native weight-transfer API: gloo --------------------------------------------
#
# What rlhf_nccl.py runs on where there is no GPU, and how a transport is plugged into vLLM. It has a half for each of
# the engine's workers and one for the trainer, which vLLM's two factories find by name. The trainer drives both:
#
# init_weight_transfer_engine  once: trainer and workers join a group
# start_weight_update          the workers open vLLM's reload bracket
# update_weights               once a buffer of packed tensors: what they are by this call, their bytes by a broadcast
# finish_weight_update         the workers close the bracket and serve what has come


@contextmanager
def known_api() -> Iterator[None]:
    """Raise a WeightSyncError where vLLM's weight-transfer API is another than those this was written for."""
    try:
        yield
    except (ImportError, AttributeError, TypeError) as error:
        import vllm

        raise WeightSyncError(
            f"cannot use the weight-transfer API of vLLM {vllm.__version__} (that of 0.32 and 0.33 is known): {error}"
        ) from error


class GlooTransferWorker:
    """A worker extension that makes the transport "gloo" known to vLLM's workers (`worker_extension_cls`).

    Every worker process must know it before it loads its model. An installed package sees to that with an entry point
    in the group `vllm.general_plugins`, which vLLM runs in all of its processes. A module that was copied has none, but
    vLLM imports it for its extension class and makes the worker from that class.
    """

    def __new__(cls, *args, **kwargs):
        with known_api():
            register_gloo_worker()
        return super().__new__(cls)


def register_gloo_worker() -> None:
    """Register the workers' half, which `weight_transfer_config={"backend": "gloo"}` names."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory, base
    from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    @dataclass
    class InitInfo(base.WeightTransferInitInfo):
        master_address: str
        master_port: int
        world_size: int  # the trainer and all workers

    @dataclass
    class UpdateInfo(base.WeightTransferUpdateInfo):
        tensors: list[tuple[str, str, list[int], int]]  # name, dtype, shape and bytes of each, as they are packed

    class WorkerTransfer(base.WeightTransferEngine):
        init_info_cls, update_info_cls = InitInfo, UpdateInfo

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            rank = 1 + self.parallel_config.rank  # the trainer is rank 0
            self.group = stateless_init_process_group(
                init_info.master_address, init_info.master_port, rank, init_info.world_size, self.device
            )

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: UpdateInfo) -> None:
            # Memory of its own for each buffer: the reload keeps views of it until their layers are complete.
            names, dtype_names, shapes, sizes = zip(*update_info.tensors, strict=True)
            packed = torch.empty(sum(sizes), dtype=torch.uint8)
            self.group.broadcast(packed, src=0)
            dtypes = [getattr(torch, name) for name in dtype_names]
            for name, tensor in unpack_tensor(packed, names, shapes, dtypes, sizes):
                try:
                    self.model.load_weights([(name, tensor)])
                except Exception as error:  # of which vLLM passes on the text, and some have none
                    raise WeightSyncError(f"{name} {list(tensor.shape)}: {error!r}") from error

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)
            repack_tied_layers(self.model)  # which the bracket leaves as they were

        def shutdown(self) -> None:
            self.group = None

    WeightTransferEngineFactory.register_engine("gloo", WorkerTransfer)


@functools.cache
def register_gloo_trainer() -> type:
    """Register the trainer's half. Returns its init info, by which `WeightTransferTrainerFactory` finds it."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory, base
    from vllm.distributed.weight_transfer.packed_tensor import pack_tensors

    @dataclass
    class TrainerInitInfo(base.TrainerInitInfo):
        backend = "gloo"
        master_address: str
        master_port: int
        world_size: int
        packed_buffer_size_bytes: int

    class TrainerTransfer(base.TrainerWeightTransferEngine):
        init_info_cls = TrainerInitInfo

        @classmethod
        def trainer_init(cls, init_info: TrainerInitInfo, *, client, source=None) -> "TrainerTransfer":
            transfer = cls(client=client, source=source)
            transfer.buffer_bytes = init_info.packed_buffer_size_bytes
            transfer.calls = ThreadPoolExecutor(1)  # the workers' half of a collective runs beside the trainer's
            address = {name: getattr(init_info, name) for name in ("master_address", "master_port", "world_size")}
            joining = transfer.calls.submit(client.init_weight_transfer_engine, address)
            transfer.group = stateless_init_process_group(**address, rank=0, device="cpu")
            joining.result()
            return transfer

        def send_weights(self) -> None:
            # vLLM 0.33 gave the pass over a source a name.
            weights = self.source.iter_full() if hasattr(self.source, "iter_full") else iter(self.source)
            self.client.start_weight_update()
            while chunk := pack_tensors(weights, lambda item: item[1], self.buffer_bytes):
                dtype_names = [dtype_name(dtype) for dtype in chunk.dtypes]
                tensors = list(zip(chunk.names, dtype_names, chunk.shapes, chunk.tensor_sizes, strict=True))
                loading = self.calls.submit(self.client.update_weights, {"tensors": tensors})
                self.group.broadcast(chunk.packed_tensor, src=0)
                loading.result()
            self.client.finish_weight_update()

        def shutdown(self) -> None:
            self.group = None

    WeightTransferTrainerFactory.register_engine("gloo", TrainerTransfer)
    return TrainerInitInfo
