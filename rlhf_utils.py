"""Both ends of a weight sync: a trainer's parameters into every worker of a running vLLM engine.

    trainer process                            each engine worker
    WeightSender.send_weights(params)   --->   WorkerExtension.receive_weights()

The bytes travel by broadcast (NCCL between GPUs, gloo between CPUs), packed into a few buckets, several in flight.
Beside them runs one small TCP connection per worker, the link. It carries what the two ends must agree on, it ends the
wait of either side when the other fails, and it breaks at once when a process dies. One sync, in order:

1. Preflight, unless the tensors are those of the last sync. Each worker runs vLLM's own weight loaders over tensors
   without storage and notes what would be copied where. A parameter that the engine does not know, lacks or shapes
   otherwise is an error that names it, before a byte moves. The answer also says in which dtype the engine keeps each
   parameter; that is the dtype sent, so fp32 master weights travel as bf16 to a bf16 engine.
2. The buckets. *Reload* hands the tensors to vLLM's loader inside one of its reload brackets
   (`initialize_layerwise_reload` ... `finalize_layerwise_reload`), which is right for every model, quantization and
   device: layers are loaded, repacked or quantized as they complete. *Replay* repeats just the copies that such a load
   comes down to, straight from the bucket. It is taken from the second sync on if in the first one, into overwritten
   parameters, it gave what reload had given, bit for bit, on every worker.
3. Every worker takes a digest of what it now serves, notes the weight version and answers.

The engine must not be generating, and its prefix cache holds keys and values of the old weights: the caller runs
`reset_prefix_cache` before the next prompt. If either side fails, both learn why, the session is closed, and the
engine's weights are undefined until a later session has completed a sync.

The one-parameter protocol of vLLM's example (`init_weight_update_group`, `update_weight`, `check_weights_changed`)
works too, with `stateless_init_process_group` on the trainer's side. Imports need torch alone; vLLM is imported by the
functions that use it.
"""

import functools
import json
import logging
import math
import operator
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "Comparison",
    "SyncReport",
    "WeightSender",
    "WeightSyncError",
    "WorkerExtension",
    "stateless_init_process_group",
]

STAGING_BYTES = 1 << 30  # memory that each end takes beyond the weights, at most
LANES = 4  # buckets in flight, which share it
ALIGN_BYTES = 256  # tensors start at multiples of this, so that every copy is vectorized
CONNECT_SECONDS = 60.0  # the other side starts its half of a rendezvous within this time
ANSWER_SECONDS = 600.0  # preflight and the first sync of the largest models take less; a dead peer is noticed at once
SILENT_SECONDS = 20  # a link whose peer acknowledges nothing for this long is broken (dead node, cut network)
LARGE_COPY_BYTES = 4 << 20  # from here on, a copy of its own is faster than a share of a kernel for many
MIX = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)  # odd numbers below 2**62, for the digest
ROUNDING_SLACK = 1.001  # how much more than the error of rounding passes: comparing rounds as well
SLOWEST_BYTES_PER_SECOND = 50e6  # a sync slower than this is taken for stuck


class WeightSyncError(RuntimeError):
    """A weight sync that did not happen, with the reason of the side that failed."""


# --- The group that broadcasts ----------------------------------------------------------------------------------------


class GlooCommunicator:
    """PyNcclCommunicator's `broadcast`, for tensors on CPU."""

    def __init__(self, group):
        from torch.distributed import PrefixStore, ProcessGroupGloo

        self.group, self.rank, self.world_size = group, group.rank, group.world_size
        self.disabled = False
        self._gloo = ProcessGroupGloo(
            PrefixStore("gloo", group.store), group.rank, group.world_size, timeout=timedelta(seconds=CONNECT_SECONDS)
        )

    def start_broadcast(self, tensor: torch.Tensor, src: int):
        """Begin to broadcast a contiguous tensor in place; returns torch.distributed's Work."""
        from torch.distributed import BroadcastOptions

        if not tensor.is_contiguous():
            raise ValueError("broadcast needs a contiguous tensor")
        options = BroadcastOptions()
        options.rootRank = src
        return self._gloo.broadcast([tensor.detach().view(-1).view(torch.uint8)], options)

    def broadcast(self, tensor: torch.Tensor, src: int, stream=None) -> None:
        """Broadcast a contiguous tensor in place and wait for it; `stream` is PyNcclCommunicator's, unused on CPU."""
        self.start_broadcast(tensor, src).wait()


def stateless_init_process_group(master_address: str, master_port: int, rank: int, world_size: int, device):
    """Join a broadcast group of trainer (rank 0) and engine workers, apart from torch.distributed's global groups.

    Every rank calls this at about the same time. Returns vLLM's `PyNcclCommunicator` on a GPU, `GlooCommunicator` on
    `cpu`. Raises WeightSyncError where vLLM would build a disabled communicator, whose broadcasts do nothing.
    """
    from vllm.distributed.utils import StatelessProcessGroup

    group = StatelessProcessGroup.create(
        host=master_address, port=master_port, rank=rank, world_size=world_size, store_timeout=int(CONNECT_SECONDS)
    )
    if torch.device(device).type == "cpu":
        return GlooCommunicator(group)
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

    communicator = PyNcclCommunicator(group, device=device)
    if communicator.disabled:
        raise WeightSyncError(
            "vLLM built a disabled NCCL communicator, which would broadcast nothing: NCCL is absent or too old for this"
            " vLLM, VLLM_DISABLE_PYNCCL is set, or the group has one rank (world_size must count trainer and workers)"
        )
    return communicator


# --- The link: messages between the trainer and one worker ------------------------------------------------------------


class _Link:
    """One TCP connection with JSON messages; `peer` is how errors call the other end."""

    def __init__(self, sock: socket.socket):
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A process that dies closes its socket; a node that vanishes does not, so let TCP itself probe the peer.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_SECONDS * 1000)
        self.connection = Connection(sock.detach())
        self.peer = "the other side"
        self.early: list[dict] = []  # messages that arrived while this side watched for failures

    def introduce(self, role: str, token: str) -> None:
        """Say who this side is; the token says that it is of this group."""
        self.send(peer=f"{role} (pid {os.getpid()} on {socket.gethostname()})", token=token)

    def meet(self, token: str) -> None:
        """Learn who the peer is. Raises if it does not know the token."""
        hello = self.recv(CONNECT_SECONDS)
        if hello.get("token") != token:
            raise WeightSyncError("a stranger connected to the weight sync's port")
        self.peer = hello["peer"]

    def send(self, **message) -> None:
        try:
            self.connection.send_bytes(json.dumps(message).encode())
        except OSError as error:
            raise self._gone() from error

    def recv(self, timeout: float) -> dict:
        """The next message, within `timeout` seconds. Raises the peer's own error if it reports one."""
        if self.early:
            return self.early.pop(0)
        try:
            if not self.connection.poll(timeout):
                raise WeightSyncError(f"{self.peer} did not answer within {timeout:.0f} s")
            return self._read()
        except (EOFError, OSError) as error:
            raise self._gone() from error

    def watch(self) -> None:
        """Raise if the peer has failed; keep what else it said for `recv`."""
        try:
            while self.connection.poll(0):
                self.early.append(self._read())
        except (EOFError, OSError) as error:
            raise self._gone() from error

    def close(self) -> None:
        self.connection.close()

    def _read(self) -> dict:
        message = json.loads(self.connection.recv_bytes())
        if "error" in message:
            raise WeightSyncError(f"{self.peer} failed: {message['error']}")
        return message

    def _gone(self) -> WeightSyncError:
        return WeightSyncError(f"{self.peer} died: its connection to the weight sync closed")


def _listen(group, links: list[_Link]) -> None:
    """Trainer's side: append one link to every other rank of the group, in no particular order."""
    token, workers = os.urandom(16).hex(), group.world_size - 1
    with socket.create_server(("", 0), family=socket.AF_INET, backlog=workers) as server:
        server.settimeout(CONNECT_SECONDS)
        group.store.set("rlhf_utils/link", f"{server.getsockname()[1]} {token}")
        while len(links) < workers:
            try:
                links.append(_Link(server.accept()[0]))
            except TimeoutError as error:
                raise WeightSyncError(
                    f"{workers - len(links)} of {workers} engine workers did not connect within"
                    f" {CONNECT_SECONDS:.0f} s: is receive_weights running on every worker?"
                ) from error
            links[-1].meet(token)
            links[-1].introduce("the trainer", token)


def _connect(group, rank: int, timeout: float) -> _Link:
    """A worker's side of `_listen`, which begins within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    try:
        while not group.store.check(["rlhf_utils/link"]):
            if time.monotonic() > deadline:
                raise WeightSyncError(f"no trainer called send_weights within {timeout:.0f} s")
            time.sleep(0.01)
        port, token = group.store.get("rlhf_utils/link").decode().split()
        link = _Link(socket.create_connection((group.store.host, int(port)), timeout=CONNECT_SECONDS))
    except WeightSyncError:
        raise
    except (OSError, RuntimeError) as error:  # TCPStore raises RuntimeErrors of its own
        raise WeightSyncError(f"the trainer is gone: {error}") from error
    link.introduce(f"engine worker {rank - 1}", token)
    link.meet(token)
    return link


def _wait_until(done: Callable[[], bool], links: list[_Link], deadline: float) -> None:
    """Poll `done()` while watching the links, so that a transfer whose peer failed ends with that peer's error."""
    try:
        while not done():
            for link in links:
                link.watch()
            if time.monotonic() > deadline:
                raise WeightSyncError("the weight transfer is stuck: it ran into its deadline")
            time.sleep(20e-6)
    except WeightSyncError:
        raise
    except RuntimeError:  # gloo's own, of a closed connection: a link knows whose, at once or a moment later
        wait([link.connection for link in links], timeout=1.0)
        for link in links:
            link.watch()
        raise


# --- What travels -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """Elements [begin, begin + count) of one flattened tensor, at byte `offset` of a bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    count: int
    offset: int

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


def plan_buckets(metadata: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], bucket_bytes: int) -> list[list[Piece]]:
    """Lay tensors, in order, into buckets of at most `bucket_bytes` bytes; one that does not fit is cut at rows.

    `bucket_bytes` is a multiple of ALIGN_BYTES. Both ends compute this from the same metadata, so only bytes travel.
    """
    buckets, offset = [[]], 0
    for name, dtype, shape in metadata:
        numel = torch.Size(shape).numel()
        row = max(1, numel // shape[0]) if shape else 1
        begin = 0
        while begin < numel:
            room = (bucket_bytes - offset) // dtype.itemsize
            count = min(numel - begin, room)
            if count < numel - begin:
                # Start in a fresh bucket rather than cut, and cut only what no bucket can hold.
                if offset:
                    buckets.append([])
                    offset = 0
                    continue
                count = max(count // row * row, min(count, row))
            buckets[-1].append(Piece(name, dtype, tuple(shape), begin, count, offset))
            begin += count
            offset += -(-count * dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES
    return buckets


def _bucket_nbytes(bucket: list[Piece]) -> int:
    return bucket[-1].offset + bucket[-1].nbytes


def _view(buffer: torch.Tensor, piece: Piece) -> torch.Tensor:
    return buffer[piece.offset : piece.offset + piece.nbytes].view(piece.dtype)


def _part(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The view of a tensor that a piece is of: flat, or rows if the tensor is not contiguous."""
    if tensor.is_contiguous():
        return tensor.view(-1)[piece.begin : piece.begin + piece.count]
    row = tensor[0].numel()
    if piece.begin % row or piece.count % row:
        raise WeightSyncError(f"{piece.name} is not contiguous, and one row of it is larger than a bucket")
    return tensor[piece.begin // row : (piece.begin + piece.count) // row]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Lanes:
    """The staging buffers: some buckets are on the wire while others are packed or loaded."""

    def __init__(self, communicator, buckets: list[list[Piece]], device: torch.device):
        self.communicator = communicator
        nbytes = max(map(_bucket_nbytes, buckets))
        self.buffers = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(min(LANES, len(buckets)))]
        self.wire = self.copies = None
        if device.type == "cuda":
            # The wire goes first: a copy that fills the GPU must not keep the next broadcast from starting.
            self.wire, self.copies = torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device)
            self.wire.wait_stream(torch.cuda.current_stream(device))  # whose freed memory the buffers may be

    def start(self, i: int, nbytes: int):
        """Begin to broadcast bucket `i`, on a GPU behind the copies so far; `query()` of the result: is it through?"""
        buffer = self.buffers[i % LANES][:nbytes]
        if self.wire is None:
            return _GlooTransfer(self.communicator.start_broadcast(buffer, src=0))
        self.communicator.broadcast(buffer, src=0, stream=self.wire)
        return self.wire.record_event()

    def copying(self):
        """A context whose copies on a GPU run in the stream for copies, behind the work of the current stream."""
        if self.copies is None:
            return nullcontext()
        self.copies.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.copies)


class _GlooTransfer:
    """A gloo broadcast with a CUDA event's `query`."""

    def __init__(self, work):
        self.work = work

    def query(self) -> bool:
        return self.work.is_completed() and self.work.wait()


def _broadcast(communicator, tensor: torch.Tensor, links: list[_Link]) -> None:
    """Broadcast one tensor from the trainer and wait for it, watching the other side."""
    if tensor.is_cuda:
        stream = torch.cuda.current_stream(tensor.device)
        communicator.broadcast(tensor, src=0, stream=stream)
        transfer = stream.record_event()
    else:
        transfer = _GlooTransfer(communicator.start_broadcast(tensor, src=0))
    _wait_until(transfer.query, links, time.monotonic() + CONNECT_SECONDS + tensor.nbytes / SLOWEST_BYTES_PER_SECOND)


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


@dataclass
class _Session:
    """What the two ends of the trainer's links have agreed on."""

    links: list[_Link] = field(default_factory=list)
    sources: list | None = None  # name, address, dtype, shape and strides of each tensor
    metadata: list = field(default_factory=list)  # name, dtype and shape of each, tied ones once
    buckets: list[list[Piece]] = field(default_factory=list)
    lanes: _Lanes | None = None
    copies: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = field(default_factory=list)  # to, from, by bucket
    loader: str = ""
    version: int = 0


class WeightSender:
    """The trainer's end of the sync.

    `communicator` is `stateless_init_process_group`'s, with rank 0. With `replay=False`, every sync is a reload.
    """

    def __init__(self, communicator, replay: bool = True):
        self.communicator = communicator
        self.loader = "" if replay else "reload: replay is switched off"
        self.session: _Session | None = _Session()

    @torch.no_grad()
    def send_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> SyncReport:
        """Bring every engine worker to these weights, named as in the Hugging Face checkpoint, any dtype.

        Runs while `receive_weights` runs on every worker. Tied tensors travel once. Raises WeightSyncError, also with
        the workers' own errors; the session is closed then, and a new one needs new groups on both sides.
        """
        if self.session is None:
            raise WeightSyncError("this weight sync session was closed by an earlier error")
        started = time.perf_counter()
        try:
            self._agree(list(named_tensors))
            self.session.version += 1
            if self.session.loader:
                self._transmit("replay" if self.session.loader == "replay" else "reload")
            else:
                self._first_sync()
        except BaseException as error:  # an interrupt too leaves half a session, which must not be used again
            self.close(_reason(error))
            raise
        session = self.session
        pieces = [piece for bucket in session.buckets for piece in bucket]
        seconds = time.perf_counter() - started
        tensors = len({piece.name for piece in pieces})
        return SyncReport(session.version, tensors, sum(p.nbytes for p in pieces), seconds, session.loader)

    def close(self, error: str | None = None) -> None:
        """End the session; with `error`, workers that are waiting raise it."""
        session, self.session = self.session, None
        for link in session.links if session else []:
            try:
                if error:
                    link.send(error=error)
            except WeightSyncError:
                pass  # that worker is the one that is gone
            link.close()
        if error and hasattr(self.communicator, "destroy"):
            self.communicator.destroy()  # a broadcast that will never end must not hold the GPU

    def _agree(self, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Preflight, unless names, dtypes and shapes are those of the last sync; find the copies that pack a bucket."""
        sources = [(name, t.data_ptr(), t.dtype, t.shape, t.stride()) for name, t in named_tensors]
        session = self.session
        if sources == session.sources:
            return
        tensors = _without_ties(named_tensors)
        metadata = [(name, _dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()]
        session.copies = []
        if metadata != session.metadata:
            session.lanes = None  # its memory goes before the new one's comes
            self._preflight(metadata, next(iter(tensors.values())).device)
        for i, bucket in enumerate(session.buckets):
            parts = [_part(tensors[piece.name], piece) for piece in bucket]
            views = [_view(session.lanes.buffers[i % LANES], piece) for piece in bucket]
            session.copies.append(([view.view(part.shape) for view, part in zip(views, parts, strict=True)], parts))
        session.sources = sources

    def _preflight(self, metadata: list, device: torch.device) -> None:
        """Have every worker try the load without a byte; agree on dtypes and buckets. Raises what does not fit."""
        session = self.session
        if not session.links:
            _listen(self.communicator.group, session.links)
        for link in session.links:
            link.send(metadata=metadata)
        answers = [link.recv(ANSWER_SECONDS) for link in session.links]
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
        bucket_bytes = STAGING_BYTES // LANES
        for link in session.links:
            link.send(wire=wire, bucket_bytes=bucket_bytes)
        session.buckets = _wire_buckets(wire, bucket_bytes)
        session.lanes = _Lanes(self.communicator, session.buckets, device)
        session.metadata, session.loader = metadata, self.loader
        session.version = max(answer["version"] for answer in answers)  # which a failed sync leaves uneven

    def _first_sync(self) -> None:
        """Reload; then, if every worker has recorded its copies, let replay show that it gives the same bits."""
        session, answers = self.session, self._transmit("first")
        refusals = [answer["refused"] for answer in answers if answer["refused"]]
        if refusals:
            session.loader = f"reload: {refusals[0]}"
        elif all(answer["same"] for answer in self._transmit("trial")):
            session.loader = "replay"
        elif all(answer["same"] for answer in self._transmit("repair")):
            session.loader = "reload: replay did not reproduce it bit for bit"
        else:
            raise WeightSyncError("a second reload of the same tensors gave other weights than the first")
        for link in session.links:
            link.send(mode="end")

    def _transmit(self, mode: str) -> list[dict]:
        """One pass of all bytes, and the workers' answers to it."""
        session, lanes, sent = self.session, self.session.lanes, []
        deadline = time.monotonic() + _seconds_allowed(session.buckets)
        for link in session.links:
            link.send(mode=mode, version=session.version)
        with lanes.copying():  # behind the optimizer step, which may still be under way
            for i, (views, sources) in enumerate(session.copies):
                if i >= LANES:
                    _wait_until(sent[i - LANES].query, session.links, deadline)
                torch._foreach_copy_(views, sources)
                if lanes.wire:
                    lanes.wire.wait_event(lanes.copies.record_event())
                sent.append(lanes.start(i, _bucket_nbytes(session.buckets[i])))
        for transfer in sent[-LANES:]:
            _wait_until(transfer.query, session.links, deadline)
        return [link.recv(max(0.0, deadline - time.monotonic())) for link in session.links]

    @torch.no_grad()
    def compare_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Comparison:
        """Send the tensors of the last sync again, while every worker compares its quantized weights with them.

        Runs while `compare_weights` runs on every worker. Raises WeightSyncError if a weight is further from what was
        sent than rounding to its format explains: a scale that is 1 % off is.
        """
        session, found = self.session, {}
        try:
            tensors = _without_ties(list(named_tensors))
            for name, dtype, _ in _wire_of(session.buckets):
                _broadcast(self.communicator, tensors[name].to(getattr(torch, dtype)).contiguous(), session.links)
            for link in session.links:
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
        memory = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape)
        if tensor.numel() and memory not in seen:
            seen.add(memory)
            tensors[name] = tensor.detach()
    if not tensors:
        raise WeightSyncError("there is nothing to send: the model has no parameters")
    return tensors


def _wire_buckets(wire: list, bucket_bytes: int) -> list[list[Piece]]:
    metadata = [(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in wire]
    return plan_buckets(metadata, bucket_bytes)


def _wire_of(buckets: list[list[Piece]]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype and shape of each tensor that travels in these buckets."""
    return list(dict.fromkeys((p.name, _dtype_name(p.dtype), p.shape) for bucket in buckets for p in bucket))


# --- The worker's end -------------------------------------------------------------------------------------------------


def _memory(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage, also where it has no address (meta tensors)."""
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True)
class _Write:
    """One write of a weight loader into a parameter."""

    owner: str  # the parameter's name
    parameter: torch.Tensor  # in the form in which the loader sees it
    destination: torch.Tensor  # the view of it that is written
    value: object  # the view of the loaded tensor that is copied, the number that is filled in, or None: computed

    @property
    def region(self) -> tuple:
        return self.owner, self.destination.storage_offset(), self.destination.size(), self.destination.stride()


class _WriteTrace(TorchDispatchMode):
    """Lets a weight loader run without effect on parameters: its writes are noted instead."""

    def __init__(self, parameters: dict[str, torch.Tensor], source: torch.Tensor):
        super().__init__()
        self.owners = {_memory(parameter): (name, parameter) for name, parameter in parameters.items()}
        self.source, self.writes = _memory(source), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        written = func._schema.is_mutable and isinstance(args[0], torch.Tensor) and self.owners.get(_memory(args[0]))
        if not written:
            return func(*args, **(kwargs or {}))
        value = None
        if func is torch.ops.aten.copy_.default:
            if args[0].numel() != args[1].numel():
                raise ValueError(f"{list(args[1].shape)} does not fit {list(args[0].shape)}")
            value = args[1] if _memory(args[1]) == self.source else None
        elif func is torch.ops.aten.fill_.Scalar:
            value = args[1]
        elif func is torch.ops.aten.zero_.default:
            value = 0
        self.writes.append(_Write(*written, args[0], value))
        return args[0]


class _EngineModel:
    """What a sync needs of the model inside a vLLM worker: preflight, loading, digest."""

    def __init__(self, worker):
        self.worker = worker
        self.model = worker.model_runner.get_model()
        self.loading = False
        self.required: dict[str, int] = {}  # elements by parameter that a sync must write, known after a trace
        self.expected: dict[str, int] = {}  # elements by layer that a load of the agreed tensors copies
        self.written: set[str] = set()  # the parameters that they are copied to
        self.covered: set[tuple] = set()  # regions written one parameter at a time since the last completed sync
        self.digest: int | None = None  # of what a completed sync left, None where there was none
        self.version = 0
        self.moves: list[_Moves] | None = None  # what a replay copies out of each bucket
        self.compared: dict[str, tuple] = {}  # digests of quantized weights at the last comparison

    def preflight(self, metadata: list) -> tuple[list[str | None], list[str]]:
        """Returns per tensor the dtype in which the engine keeps it (None: not on this worker), and the problems."""
        traced, problems = self._trace(metadata)
        dtypes = [next(map(self._wire_dtype, traced.get(name, [])), None) for name, _, _ in metadata]
        writes = [write for writes in traced.values() for write in writes]
        self.written = {write.owner for write in writes}
        self.expected = {}
        for write in writes:
            if not isinstance(write.value, int | float):
                layer = _layer_of(write.owner)
                self.expected[layer] = self.expected.get(layer, 0) + write.destination.numel()
        missing = self.required.keys() - self._complete({write.region for write in writes})
        if missing and not problems:
            problems = [f"nothing is sent for the engine's {name}" for name in sorted(missing)]
        return dtypes, problems

    def _wire_dtype(self, write: _Write) -> str:
        """A loader that copies gets the parameter's own dtype; one that computes on its way, the model's."""
        return _dtype_name(self.worker.model_config.dtype if write.value is None else write.destination.dtype)

    def load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Load tensors, which the reload keeps until their layer is complete."""
        with self._context():
            if not self.loading:
                from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

                self.digest = None
                self.loading = True
                initialize_layerwise_reload(self.model)
            self.model.load_weights(weights)

    def finish(self, complete: bool = False) -> None:
        """Close the reload bracket: what was loaded is what the engine serves. With `complete`, that must be all."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        missed = self._missed_layers() if complete else []
        with self._context():
            finalize_layerwise_reload(self.model, self.worker.model_config)
            self._repack_tied_layers()
        self.loading = False
        if missed:
            raise WeightSyncError(f"vLLM's loader did not load all that was sent for {', '.join(missed)}")

    def _missed_layers(self) -> list[str]:
        """Layers into which fewer elements were copied than the preflight's trace of the same load saw."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        infos = {name: get_layerwise_info(module) for name, module in self.model.named_modules()}
        # A layer that has all its elements is processed and put back at once; the bracket still holds the others.
        return [
            name for name, numel in self.expected.items() if infos[name].can_load() and infos[name].load_numel < numel
        ]

    def complete(self, version: int) -> None:
        """Every parameter was written: this version of the weights is in place."""
        self.covered.clear()
        self.digest = self.take_digest()
        self.version = version

    def record(self, buckets: list[list[Piece]], buffers: list[torch.Tensor]) -> str | None:
        """Find the copies that a load of these buckets comes down to. Returns the reason if it is more than copies."""
        self.moves, moves = None, [_Moves() for _ in buckets]
        places: dict[str, list[tuple[int, Piece]]] = {}
        for i, bucket in enumerate(buckets):
            for piece in bucket:
                places.setdefault(piece.name, []).append((i, piece))
        pieces = [parts[0][1] for parts in places.values()]
        traced, _ = self._trace([(piece.name, _dtype_name(piece.dtype), piece.shape) for piece in pieces])
        served = dict(self.model.named_parameters())
        for name, parts in places.items():
            for write in traced[name]:
                parameter = served.get(write.owner)
                if write.value is None:
                    return f"{name}: its loader computes"
                if parameter is None or _form(parameter) != _form(write.parameter):
                    return f"{name}: the engine keeps {write.owner} in another form"
                view = write.destination
                destination = parameter.data.as_strided(view.size(), view.stride(), view.storage_offset())
                if not isinstance(write.value, torch.Tensor):
                    moves[parts[0][0]].fills.append((destination, write.value))
                    continue
                for i, piece in parts:
                    if not moves[i].add(destination, write.value, piece, _view(buffers[i % LANES], piece)):
                        return f"{name}: it is larger than a bucket, and not copied by rows"
        self.moves = moves
        return None

    def poison(self) -> None:
        """Overwrite every parameter that a load writes, so that what a replay leaves out cannot pass for right."""
        self.digest = None
        for name, parameter in self.model.named_parameters():
            if name in self.written:
                parameter.data.fill_(math.nan if parameter.is_floating_point() else -1)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        """The one-parameter protocol: load, and serve as soon as no layer is half written."""
        traced, problems = self._trace([(name, _dtype_name(weight.dtype), tuple(weight.shape))])
        if problems:
            raise WeightSyncError(problems[0])
        self.load([(name, weight)])
        self.covered |= {write.region for write in traced[name]}
        unwritten = self.required.keys() - self._complete(self.covered)
        if not {_layer_of(name) for name in unwritten} & {_layer_of(name) for name, *_ in self.covered}:
            self.finish()
            if not unwritten:
                self.complete(self.version + 1)

    def unchanged(self) -> bool:
        return self.digest is not None and not self.loading and self.take_digest() == self.digest

    def _trace(self, metadata: list) -> tuple[dict[str, list[_Write]], list[str]]:
        """Run the loaders without effect. Returns their writes by tensor, and what they cannot load."""
        traced, problems = {}, []
        with self._loadable_parameters() as parameters:
            for name, dtype, shape in metadata:
                source = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
                try:
                    with _WriteTrace(parameters, source) as trace:
                        self.model.load_weights([(name, source)])
                    traced[name] = trace.writes
                except Exception as error:  # whatever a loader raises for a name or a shape that it cannot take
                    reason = f"{type(error).__name__}: {error}".splitlines()[0][:120]
                    problems.append(f"{name} {list(shape)}: the engine cannot load it ({reason})")
        return traced, problems

    @contextmanager
    def _loadable_parameters(self) -> Iterator[dict[str, torch.Tensor]]:
        """The parameters as a checkpoint's tensors fit them, by a reload bracket that loads nothing."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        with self._context():
            if not self.loading:
                optional = self._optional_parameters()
                initialize_layerwise_reload(self.model)
                parameters = self.model.named_parameters()
                self.required = {name: _loadable(p) for name, p in parameters if name not in optional}
            parameters = dict(self.model.named_parameters())
            try:
                with _unwrapped_loaders(parameters.values()):
                    yield parameters
            finally:
                if not self.loading:
                    finalize_layerwise_reload(self.model, self.worker.model_config)

    def _optional_parameters(self) -> set[str]:
        """Parameters that need no write: tied ones but for their first name, and the attention layers' scales."""
        from vllm.model_executor.layers.attention import is_deferred_attention_layer

        scaled = {name for name, module in self.model.named_modules() if is_deferred_attention_layer(module)}
        firsts = {name for name, _ in self.model.named_parameters()}
        names = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        return {name for name in names if name not in firsts or _layer_of(name) in scaled}

    def _complete(self, regions: set[tuple]) -> set[str]:
        """Names of the parameters that these regions cover."""
        written = {}
        for name, _, size, _ in regions:
            written[name] = written.get(name, 0) + size.numel()
        return {name for name, numel in self.required.items() if written.get(name, 0) >= numel}

    def _repack_tied_layers(self) -> None:
        """A layer tied to another receives no weights of its own; on CPU its packed copy must be made again."""
        owners = {}
        for module in self.model.modules():
            weight = getattr(module, "weight", None)
            tied = weight is not None and owners.setdefault(id(weight), module) is not module
            if tied and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)

    @torch.no_grad()
    def take_digest(self) -> int | None:
        """A number that any changed, moved or swapped element changes; None for a model without parameters."""
        return _digest(list(self._served_tensors()))

    def _served_tensors(self) -> Iterator[torch.Tensor]:
        for parameter in self.model.parameters():
            if parameter.numel():
                yield from _plain_tensors(parameter.detach())
        for module in self.model.modules():
            # On CPU, vLLM keeps linear weights packed in a form that cannot be read: read them by what they compute.
            if hasattr(module, "cpu_linear") and not module.weight.numel():
                identity = torch.eye(module.input_size_per_partition, dtype=module.weight.dtype)
                yield module.cpu_linear(identity, module.weight, None)

    @torch.no_grad()
    def compare(self, wire: list, receive: Callable) -> dict[str, tuple[float, bool]]:
        """Compare each quantized weight with what `receive(dtype, shape)` brings, the tensors of `wire` one by one.

        Returns its largest error, over the largest that rounding to the format makes there (a NaN counts as infinite),
        and whether both its scales and its values changed since the last comparison.
        """
        quantized = {name: p for name, p in self.model.named_parameters() if hasattr(p, "__tensor_flatten__")}
        if unknown := {type(p).__name__ for p in quantized.values()} - {"Int8Tensor", "Float8Tensor"}:
            raise WeightSyncError(f"weights that torchao keeps as {', '.join(unknown)} cannot be compared yet")
        traced, _ = self._trace(wire)
        last = {write.owner: name for name, writes in traced.items() for write in writes}
        sent, found = {}, dict.fromkeys(quantized, (math.inf, False))
        for name, dtype, shape in wire:
            tensor = receive(dtype, shape)
            for write in traced[name]:
                if write.owner in quantized:
                    if write.owner not in sent:
                        sent[write.owner] = torch.full(quantized[write.owner].shape, math.nan, device=tensor.device)
                    _strided_as(sent[write.owner], write.destination).copy_(_strided_as(tensor, write.value))
            for owner in [owner for owner in sent if last[owner] == name]:  # all its parts are here
                weight = quantized[owner]
                errors = weight.dequantize(torch.float32).sub_(sent.pop(owner)).abs_().div_(_half_steps(weight))
                digests = _digest([weight.scale]), _digest([weight.qdata])
                before = self.compared.get(owner, digests)
                found[owner] = float(errors.max().nan_to_num(math.inf)), all(map(operator.ne, digests, before))
                self.compared[owner] = digests
        return found

    @contextmanager
    def _context(self):
        from vllm.config import set_current_vllm_config

        # vLLM warns of every layer that a bracket leaves as it was, which a trace or a single parameter does to most.
        logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            with torch.no_grad(), set_current_vllm_config(self.worker.vllm_config):
                yield
        finally:
            logger.setLevel(level)


def _form(parameter: torch.Tensor) -> tuple:
    """What must agree for a copy into one to be one into the other. A quantized tensor only looks like a plain one."""
    quantized = hasattr(parameter, "__tensor_flatten__")
    return parameter.dtype, parameter.shape, parameter.stride(), parameter.storage_offset(), quantized


def _loadable(parameter: torch.Tensor) -> int:
    """Elements of a parameter that a checkpoint brings: all but the padding that vLLM declares."""
    return getattr(parameter, "weight_loader_numel", parameter.numel())


def _layer_of(parameter_name: str) -> str:
    return parameter_name.rpartition(".")[0]


@contextmanager
def _unwrapped_loaders(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Take the bracket's wrappers, which count and process, off the weight loaders, which only copy."""
    wrapped = []
    for parameter in parameters:
        loader = getattr(parameter, "weight_loader", None)
        if getattr(loader, "__name__", "") == "online_process_loader":
            wrapped.append((parameter, loader))
            while loader.__name__ == "online_process_loader":
                loader = loader.__wrapped__
            parameter.weight_loader = loader
    try:
        yield
    finally:
        for parameter, loader in wrapped:
            parameter.weight_loader = loader


def _plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that a quantized tensor consists of, or the tensor itself."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain_tensors(getattr(tensor, name))
    else:
        yield tensor.as_subclass(torch.Tensor)


def _half_steps(weight: torch.Tensor) -> torch.Tensor:
    """Half the distance from each element of a quantized tensor to the next value of its format; broadcasts to it."""
    if not weight.qdata.is_floating_point():
        return weight.scale / 2
    format = torch.finfo(weight.qdata.dtype)
    return weight.qdata.float().abs_().clamp_(min=format.smallest_normal).mul_(weight.scale * format.eps / 2)


def _strided_as(tensor: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided(view.size(), view.stride(), tensor.storage_offset() + view.storage_offset())


@dataclass
class _Moves:
    """The copies out of one bucket. One kernel moves many small blocks; large and strided ones get a copy each."""

    blocks: tuple[list[torch.Tensor], list[torch.Tensor]] = field(default_factory=lambda: ([], []))  # to, from
    others: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    fills: list[tuple[torch.Tensor, object]] = field(default_factory=list)

    def add(self, destination: torch.Tensor, copied: torch.Tensor, piece: Piece, buffer: torch.Tensor) -> bool:
        """Note a copy of `copied`, a view of the tensor without storage that stands for `piece`'s tensor.

        Returns False if the buffer holds a part of the tensor, and that is not simply some rows of the view.
        """
        offset = copied.storage_offset()
        if piece.count < torch.Size(piece.shape).numel():
            row = torch.Size(piece.shape[1:]).numel()
            if copied.stride(0) != row or piece.begin % row or piece.count % row:
                return False
            first, view_first = piece.begin // row, offset // row
            begin = max(first, view_first)
            end = max(begin, min(first + piece.count // row, view_first + copied.size(0)))
            destination = destination[begin - view_first : end - view_first]
            copied = copied[begin - view_first : end - view_first]
            offset = copied.storage_offset() - piece.begin
        if copied.numel():
            source = buffer.as_strided(copied.size(), copied.stride(), buffer.storage_offset() + offset)
            block = source.is_contiguous() and destination.is_contiguous() and source.nbytes < LARGE_COPY_BYTES
            if block:
                self.blocks[0].append(destination)
                self.blocks[1].append(source)
            else:
                self.others.append((destination, source))
        return True

    def run(self) -> None:
        for destination, source in self.others:
            destination.copy_(source)
        if self.blocks[0]:
            torch._foreach_copy_(*self.blocks)
        for destination, value in self.fills:
            destination.fill_(value)


def _digest(tensors: list[torch.Tensor]) -> int | None:
    """One number for the bits of all tensors: the sum of their 32-bit words, each hashed with its position."""
    if not tensors:
        return None
    words, start = [], 0
    for tensor in tensors:
        flat = tensor.contiguous().view(-1)
        if flat.nbytes % 4:
            flat = torch.nn.functional.pad(flat.view(torch.uint8), (0, -flat.nbytes % 4))
        words.append((flat.view(torch.int32), start))
        start += len(words[-1][0])
    if words[0][0].is_cuda:
        return _digest_on_gpu(words)
    total = 0
    for flat, begin in words:
        mixed = (flat + MIX[0] * torch.arange(begin, begin + len(flat))) * MIX[1]
        mixed = (mixed ^ (mixed >> 32)) * MIX[2]
        total += int((mixed ^ (mixed >> 29)).sum())
    return total % 2**64


def _digest_on_gpu(words: list[tuple[torch.Tensor, int]]) -> int:
    """The same number in one kernel over all tensors, at the speed of memory."""
    places = tuple((flat.data_ptr(), len(flat)) for flat, _ in words)
    addresses, counts, starts = _digest_table(places, words[0][0].device)
    sums = torch.empty_like(starts)
    _digest_kernel()[(len(sums),)](addresses, counts, starts, sums, *MIX, BLOCK=4096)
    return int(sums.sum()) % 2**64


@functools.lru_cache(maxsize=4)
def _digest_table(places: tuple[tuple[int, int], ...], device: torch.device) -> torch.Tensor:
    """Address, number of words and position [3, chunks] of chunks of tensors, given as (address, words) each."""
    chunk, start, rows = 1 << 20, 0, []
    for address, count in places:
        for offset in range(0, count, chunk):
            rows.append((address + 4 * offset, min(chunk, count - offset), start + offset))
        start += count
    return torch.tensor(rows, dtype=torch.int64).T.contiguous().to(device)


@functools.cache
def _digest_kernel():
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(
        addresses, counts, starts, sums, MIX0: tl.constexpr, MIX1: tl.constexpr, MIX2: tl.constexpr, BLOCK: tl.constexpr
    ):
        chunk = tl.program_id(0)
        words = tl.load(addresses + chunk).to(tl.pointer_type(tl.int32))
        count, start = tl.load(counts + chunk), tl.load(starts + chunk)
        total = tl.zeros([BLOCK], tl.int64)
        for offset in range(0, count, BLOCK):
            i = offset + tl.arange(0, BLOCK)
            word = tl.load(words + i, mask=i < count, other=0).to(tl.int64)
            mixed = (word + MIX0 * (start + i)) * MIX1
            mixed = (mixed ^ (mixed >> 32)) * MIX2
            total += tl.where(i < count, mixed ^ (mixed >> 29), 0)
        tl.store(sums + chunk, tl.sum(total))

    return kernel


class WorkerExtension:
    """Methods for vLLM's workers (`worker_extension_cls="rlhf_utils.WorkerExtension"`), run by `collective_rpc`."""

    model_update_group = None
    weight_link: _Link | None = None

    def init_weight_update_group(self, master_address: str, master_port: int, rank_offset: int, world_size: int):
        """Join the group that the trainer opens as rank 0 with `stateless_init_process_group`.

        This worker's rank is its rank in the engine plus `rank_offset` (1 behind a single trainer); `world_size`
        counts the trainer and all workers of all engines.
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
        error if that is what failed; the trainer in turn raises this worker's. An exception would break the engine:
        vLLM reads no worker's answer beyond the first exception, and takes what is left for answers to its next call.
        """
        try:
            return {"version": self._receive_weights(timeout)}
        except Exception as error:
            self.close_weight_update_group(_reason(error))
            return {"error": _reason(error)}

    def _receive_weights(self, timeout: float) -> int:
        model, group = self._engine_model(), self._joined_group()
        if model.loading:
            model.finish()  # what a failed sync, or one parameter at a time, left half done
        if self.weight_link is None:
            self.weight_link = _connect(group.group, group.rank, timeout)
        link = self.weight_link
        message = link.recv(timeout)
        if "metadata" in message:
            dtypes, problems = model.preflight(message["metadata"])
            link.send(dtypes=dtypes, problems=problems, version=model.version)
            message = link.recv(ANSWER_SECONDS)
            model.moves = self.weight_lanes = None  # their memory goes before the new one's comes
            self.weight_buckets = _wire_buckets(message["wire"], message["bucket_bytes"])
            self.weight_lanes = _Lanes(group, self.weight_buckets, self.device)
            message = link.recv(ANSWER_SECONDS)
        buckets, lanes = self.weight_buckets, self.weight_lanes
        if message["mode"] == "replay":
            _replay(model, buckets, lanes, link)
        else:
            _reload(model, buckets, lanes, link)
        model.complete(message["version"])
        if message["mode"] != "first":
            link.send(done=True)
            return model.version
        link.send(refused=model.record(buckets, lanes.buffers))
        reloaded = model.digest
        while (mode := link.recv(ANSWER_SECONDS)["mode"]) != "end":
            if mode == "trial":
                model.poison()
                _replay(model, buckets, lanes, link)
            else:
                _reload(model, buckets, lanes, link)
            model.digest = model.take_digest()
            link.send(same=model.digest == reloaded)
        return model.version

    def update_weight(self, name: str, dtype_name: str, shape) -> None:
        """Receive one parameter, which the trainer broadcasts from rank 0, and load it."""
        weight = torch.empty(tuple(shape), dtype=getattr(torch, dtype_name), device=self.device)
        group = self._joined_group()
        if self.device.type == "cuda":
            group.broadcast(weight, src=0, stream=torch.cuda.current_stream())
        else:
            group.broadcast(weight, src=0)
        self._engine_model().load_one(name, weight)

    def check_weights_changed(self) -> bool:
        """Whether every element served is, bit for bit, what the last completed sync left.

        False before a sync, while one is partial (some parameters sent, others not), and without parameters.
        """
        return self._engine_model().unchanged()

    def close_weight_update_group(self, error: str | None = None) -> None:
        """Leave the group; with `error`, a trainer that is waiting raises it."""
        if self.weight_link is not None:
            try:
                if error:
                    self.weight_link.send(error=error)
            except WeightSyncError:
                pass  # the trainer is the side that is gone
            self.weight_link.close()
        if hasattr(self.model_update_group, "destroy"):
            self.model_update_group.destroy()  # a broadcast that will never end must not hold the GPU
        self.weight_link = self.model_update_group = self.weight_lanes = None
        if hasattr(self, "weight_model"):
            self.weight_model.moves = None

    def weight_bytes(self) -> int:
        """Memory of the weights that this worker serves, scales of quantized ones included."""
        return sum(tensor.nbytes for tensor in self._engine_model()._served_tensors())

    def compare_weights(self) -> None:
        """Take part in one `WeightSender.compare_weights`, which raises what fails here."""
        try:
            group, wire = self._joined_group(), _wire_of(self.weight_buckets)

            def receive(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
                _broadcast(group, tensor, [self.weight_link])
                return tensor

            self.weight_link.send(compared=self._engine_model().compare(wire, receive))
        except Exception as error:
            self.close_weight_update_group(_reason(error))

    def _joined_group(self):
        if self.model_update_group is None:
            raise WeightSyncError("no weight update group: init_weight_update_group was not called, or a sync failed")
        return self.model_update_group

    def _engine_model(self) -> _EngineModel:
        if not hasattr(self, "weight_model"):
            self.weight_model = _EngineModel(self)
        return self.weight_model


def _arrivals(buckets: list[list[Piece]], lanes: _Lanes, link: _Link) -> Iterator[int]:
    """Yield each bucket's number once it has arrived, with the next ones on the wire.

    What reads a bucket must be queued, on a GPU in the current stream, before the next number is asked for.
    """
    deadline = time.monotonic() + _seconds_allowed(buckets)
    arriving, emptied = [], []
    for i in range(len(buckets)):
        while len(arriving) < min(i + LANES, len(buckets)):
            if len(arriving) >= LANES and lanes.wire:
                lanes.wire.wait_event(emptied[len(arriving) - LANES])
            arriving.append(lanes.start(len(arriving), _bucket_nbytes(buckets[len(arriving)])))
        _wait_until(arriving[i].query, [link], deadline)
        yield i
        if lanes.wire:
            emptied.append(torch.cuda.current_stream().record_event())
    if lanes.wire:
        _wait_until(emptied[-1].query, [link], deadline)


def _reload(model: _EngineModel, buckets: list[list[Piece]], lanes: _Lanes, link: _Link) -> None:
    """Hand the tensors to vLLM's loader, bucket after bucket, in memory of their own: it keeps them for a while."""
    partial = {}
    for i in _arrivals(buckets, lanes, link):
        weights = []
        for piece in buckets[i]:
            view = _view(lanes.buffers[i % LANES], piece)
            if piece.name not in partial:
                partial[piece.name] = torch.empty(piece.shape, dtype=piece.dtype, device=view.device)
            whole = partial[piece.name]
            whole.view(-1)[piece.begin : piece.begin + piece.count].copy_(view)
            if piece.begin + piece.count == whole.numel():
                weights.append((piece.name, partial.pop(piece.name)))
        if weights:
            model.load(weights)
    model.finish(complete=True)


@torch.no_grad()
def _replay(model: _EngineModel, buckets: list[list[Piece]], lanes: _Lanes, link: _Link) -> None:
    """Copy the tensors straight to where a reload brought them."""
    model.digest = None
    with lanes.copying():
        for i in _arrivals(buckets, lanes, link):
            model.moves[i].run()


def _seconds_allowed(buckets: list[list[Piece]]) -> float:
    return CONNECT_SECONDS + sum(map(_bucket_nbytes, buckets)) / SLOWEST_BYTES_PER_SECOND


def _reason(error: BaseException) -> str:
    """What the other side is told: this package's own words, or the traceback of anything else."""
    return str(error) if isinstance(error, WeightSyncError) else "".join(traceback.format_exception(error))
