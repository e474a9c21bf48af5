"""Both ends of a weight sync: a trainer's parameters into every worker of a running vLLM engine.

    trainer process                            each engine worker
    WeightSender.send_weights(params)   --->   WorkerExtension.receive_weights()             on other GPUs, or
                                               ColocateWorkerExtension.receive_weights(...)  on the trainer's own

Between GPUs the bytes travel by broadcast (NCCL; gloo between CPUs), packed into a few buckets, several in flight. On
one GPU both processes have mapped the same memory (CUDA IPC): the trainer's parameters themselves or, if the trainer is
sharded, buckets into which its ranks gather them. Beside the bytes runs one small socket per worker, the link. It
carries what the two ends must agree on, it ends the wait of either side when the other fails, and it breaks at once
when a process dies. One sync, in order:

1. Preflight, unless the tensors are those of the last sync. Each worker runs vLLM's own weight loaders over tensors
   without storage and notes what would be copied where. A parameter that the engine does not know, lacks or shapes
   otherwise is an error that names it, before a byte moves. The answer also says in which dtype the engine keeps each
   parameter; that is the dtype sent, so fp32 master weights travel as bf16 to a bf16 engine.
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

Where the time is, of 46.2 ms for a 7B over NCCL (NVIDIA H200): 43.2 are the broadcast of its bytes. The first bucket's
packing and the last one's copying are not hidden behind it, 0.4 ms; messages, wake-ups and launches are the rest.
"""

import base64
import copy
import errno
import functools
import json
import logging
import math
import operator
import os
import pickle
import shutil
import socket
import tempfile
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from copies import Copies, digest, digest_together

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

STAGING_BYTES = 1 << 30  # memory that each end takes beyond the weights, at most
LANES = 4  # buckets in flight, which share it
ALIGN_BYTES = 256  # tensors start at multiples of this, so that every copy is vectorized
CONNECT_SECONDS = 60.0  # the other side starts its half of a rendezvous within this time
ANSWER_SECONDS = 600.0  # preflight and the first sync of the largest models take less; a dead peer is noticed at once
SILENT_SECONDS = 15  # a link whose peer acknowledges nothing for this long is broken (dead node, cut network)
UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)  # which the system says of such a link
PROCESSED = "_already_called_process_weights_after_loading"  # a flag that vLLM's quantization methods leave on a layer
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

    def destroy(self) -> None:
        """Leave the group. gloo itself would wait, until its timeout, for broadcasts that will never end."""
        threading.Thread(target=[vars(self).pop("_gloo", None)].clear, daemon=True).start()


def stateless_init_process_group(master_address: str, master_port: int, rank: int, world_size: int, device):
    """Join a broadcast group of trainer (rank 0) and engine workers, apart from torch.distributed's global groups.

    Every rank calls this at about the same time. Returns vLLM's `PyNcclCommunicator` on a GPU, `GlooCommunicator` on
    `cpu`. Raises WeightSyncError where vLLM would build a disabled communicator, whose broadcasts do nothing.
    """
    from vllm.distributed.utils import StatelessProcessGroup

    try:
        group = StatelessProcessGroup.create(
            host=master_address, port=master_port, rank=rank, world_size=world_size, store_timeout=int(CONNECT_SECONDS)
        )
    except OSError as error:  # of rank 0, which listens there
        raise WeightSyncError(f"no group at {master_address}:{master_port}: {error}") from error
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
    """A socket's connection, with JSON messages; `peer` is how errors call the other end."""

    def __init__(self, sock: socket.socket):
        sock.settimeout(None)
        if sock.family == socket.AF_INET:
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

    def meet(self, token: str, timeout: float = CONNECT_SECONDS) -> None:
        """Learn who the peer is. Raises if it does not know the token."""
        hello = self.recv(timeout)
        if hello.get("token") != token:
            raise WeightSyncError("a stranger connected to the weight sync's port")
        self.peer = hello["peer"]

    def send(self, **message) -> None:
        try:
            self.connection.send_bytes(json.dumps(message).encode())
        except OSError as error:
            self.watch()  # the peer may have said why it left
            raise self._gone(error) from error

    def recv(self, timeout: float) -> dict:
        """The next message, within `timeout` seconds. Raises the peer's own error if it reports one."""
        if self.early:
            return self.early.pop(0)
        try:
            if not self.connection.poll(timeout):
                raise WeightSyncError(f"{self.peer} did not answer within {timeout:.0f} s")
            return self._read()
        except (EOFError, OSError) as error:
            raise self._gone(error) from error

    def watch(self) -> None:
        """Raise if the peer has failed; keep what else it said for `recv`."""
        try:
            while self.connection.poll(0):
                self.early.append(self._read())
        except (EOFError, OSError) as error:
            raise self._gone(error) from error

    def said(self, **message) -> bool:
        """Whether `watch` has seen this message, which is then forgotten."""
        if message not in self.early:
            return False
        self.early.remove(message)
        return True

    def close(self) -> None:
        self.connection.close()

    def _read(self) -> dict:
        message = json.loads(self.connection.recv_bytes())
        if "error" in message:
            raise WeightSyncError(f"{self.peer} failed: {message['error']}")
        return message

    def _gone(self, error: Exception) -> WeightSyncError:
        if getattr(error, "errno", None) in UNREACHABLE:
            return WeightSyncError(f"{self.peer} cannot be reached over the network: {error.strerror}")
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
    """Staging buffers: some buckets are under way while others are packed or loaded."""

    def __init__(self, buffers: list[torch.Tensor], buckets: list[list[Piece]]):
        self.buffers, self.buckets = buffers, buckets

    def view(self, i: int, piece: Piece) -> torch.Tensor:
        """The elements [count] of a piece of bucket `i`."""
        return self.buffers[i % LANES][piece.offset : piece.offset + piece.nbytes].view(piece.dtype)

    def release(self, i: int) -> None:
        """Bucket `i` has been read, on a GPU by what is queued in the current stream."""


class _BroadcastLanes(_Lanes):
    """Each end has buffers of its own, and buckets are broadcast."""

    def __init__(self, communicator, buckets: list[list[Piece]], device: torch.device):
        buffers = [torch.empty(nbytes, dtype=torch.uint8, device=device) for nbytes in _lane_sizes(buckets)]
        super().__init__(buffers, buckets)
        self.communicator, self.stream = communicator, None
        if device.type == "cuda":
            # The wire goes first: a copy that fills the GPU must not keep the next broadcast from starting.
            self.stream = torch.cuda.Stream(device, priority=-1)

    def start(self, i: int) -> Callable[[], bool]:
        """Begin to broadcast bucket `i`, on a GPU behind the copies queued so far. Returns: is it through?"""
        buffer = self.buffers[i % LANES][: _bucket_nbytes(self.buckets[i])]
        if self.stream is None:
            work = self.communicator.start_broadcast(buffer, src=0)
            return lambda: work.is_completed() and work.wait()
        self.stream.wait_stream(torch.cuda.current_stream())
        self.communicator.broadcast(buffer, src=0, stream=self.stream)
        return self.stream.record_event().query


class _SharedLanes(_Lanes):
    """Both ends, on one device, have mapped the same buffers; only "filled" and "emptied" travel."""

    def __init__(self, link: _Link, buffers: list[torch.Tensor], buckets: list[list[Piece]], says: str, hears: str):
        super().__init__(buffers, buckets)
        self.link, self.says, self.hears = link, says, hears

    def start(self, i: int) -> Callable[[], bool]:
        """Bucket `i` is the other end's turn. Returns: is it done?"""
        if self.says == "filled":
            self._say(i)
        return lambda: self.link.said(**{self.hears: i})

    def release(self, i: int) -> None:
        self._say(i)

    def _say(self, i: int) -> None:
        _synchronize(self.buffers[0].device)
        self.link.send(**{self.says: i})


class _TrainersMemory(_Lanes):
    """No buffers at all: the worker has mapped the parameters of the trainer beside it."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        super().__init__([], [])
        self.tensors = tensors

    def view(self, i: int, piece: Piece) -> torch.Tensor:
        return self.tensors[piece.name].view(-1)[piece.begin : piece.begin + piece.count]

    def start(self, i: int) -> Callable[[], bool]:
        return lambda: True


def _lane_sizes(buckets: list[list[Piece]]) -> list[int]:
    return [max(map(_bucket_nbytes, buckets[i::LANES])) for i in range(min(LANES, len(buckets)))]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


# --- Memory that two processes share ----------------------------------------------------------------------------------


def share_tensor(tensor: torch.Tensor) -> tuple:
    """A handle by which another process on this device maps a tensor's memory, with `rebuild_ipc`.

    On a GPU any tensor has one, `reduce_tensor`'s (CUDA IPC). On CPU only `shared_buffer`'s tensors, and what views
    the whole of one, do; raises WeightSyncError for others.
    """
    if tensor.is_cuda:
        from torch.multiprocessing.reductions import reduce_tensor

        return reduce_tensor(tensor.detach())
    path = _shared.get(tensor.data_ptr())
    if path is None:
        raise WeightSyncError("on CPU, another process can map shared_buffer's tensors alone")
    return _map_memory, (path, tensor.dtype, tensor.shape)


_shared: dict[int, str] = {}  # paths of shared_buffer's files on CPU, by address


def shared_buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """A uint8 tensor [nbytes] that `share_tensor` has a handle of."""
    if device.type == "cuda":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    # A file without a name: it is gone with the last process that has it open or mapped, however that one ends.
    file = os.memfd_create("weight sync")
    os.ftruncate(file, nbytes)
    path = f"/proc/{os.getpid()}/fd/{file}"
    tensor = _map_memory(path, torch.uint8, (nbytes,))
    address = tensor.data_ptr()
    _shared[address] = path
    weakref.finalize(tensor.untyped_storage(), lambda: (_shared.pop(address), os.close(file)))
    return tensor


def _map_memory(path: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=torch.Size(shape).numel(), dtype=dtype).view(shape)


def rebuild_ipc(handle: tuple, device_id: int | None = None) -> torch.Tensor:
    """The tensor behind `share_tensor`'s, or torch's `reduce_tensor`'s, handle, in the sender's memory.

    `device_id` is the index of the GPU in this process, where it differs from the sender's.
    """
    function, arguments = handle
    arguments = list(arguments)
    if device_id is not None and function is not _map_memory:
        arguments[6] = device_id  # of the arguments of torch's rebuild_cuda_tensor
    return function(*arguments)


def _device_id(device: torch.device) -> str:
    """As NVIDIA's tools name a GPU, whatever its index in this process; "cpu:" and the index on CPU."""
    if device.type == "cuda":
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return f"cpu:{device.index or 0}"


# Handles hold bytes, and messages are JSON. Pickles are read from nowhere but a socket in a folder of the user's own.
def _packed(tensor: torch.Tensor) -> str:
    return base64.b64encode(pickle.dumps(share_tensor(tensor))).decode()


def _unpacked(text: str) -> tuple:
    return pickle.loads(base64.b64decode(text))


# --- Channels: where the trainer finds its workers, and how buckets reach them ----------------------------------------


class _BroadcastChannel:
    """To all workers of a broadcast group."""

    def __init__(self, communicator):
        self.communicator = communicator

    def accept(self, links: list[_Link]) -> None:
        _listen(self.communicator.group, links)

    def reaches(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether a worker can map these tensors' memory."""
        return False

    def open_lanes(self, links: list[_Link], buckets: list[list[Piece]], device: torch.device) -> tuple[_Lanes, dict]:
        """The trainer's staging buffers, and the workers' share in them by kind."""
        return _BroadcastLanes(self.communicator, buckets, device), {}

    def close(self, error: str | None) -> None:
        if error and hasattr(self.communicator, "destroy"):
            self.communicator.destroy()  # a broadcast that will never end must not hold the GPU


class SharedMemoryChannel:
    """From a trainer rank to the one engine worker on the same device: CUDA IPC, or shared memory between CPUs.

    `handles` has this rank's address by its device's id, for `ColocateWorkerExtension.receive_weights`. On CPU, where
    all share one device, the index of `device` is the rank of the worker in its engine.
    """

    def __init__(self, device: torch.device):
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            if device.type == "cuda" and "expandable_segments:True" in os.environ.get(name, ""):
                raise WeightSyncError(
                    f"{name} has expandable_segments:True, whose memory CUDA IPC cannot share: unset it"
                )
        self.device = device
        self.folder = tempfile.mkdtemp(prefix="weight-sync-")  # which nobody else may enter
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(f"{self.folder}/link")
        self.server.listen(1)
        self.handles = {_device_id(device): f"{self.folder}/link"}

    def accept(self, links: list[_Link]) -> None:
        self.server.settimeout(CONNECT_SECONDS)
        try:
            links.append(_Link(self.server.accept()[0]))
        except TimeoutError as error:
            raise WeightSyncError(
                f"the engine worker on {_device_id(self.device)} did not connect within {CONNECT_SECONDS:.0f} s:"
                " is receive_weights running there, with this rank's handle?"
            ) from error
        links[-1].meet(self.folder)
        links[-1].introduce("the trainer", self.folder)
        self._stop_listening()

    def reaches(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether the worker can map these tensors' memory."""
        return all(_local(tensor) is tensor and tensor.is_cuda and tensor.is_contiguous() for tensor in tensors)

    def open_lanes(self, links: list[_Link], buckets: list[list[Piece]], device: torch.device) -> tuple[_Lanes, dict]:
        """The staging buffers, and the worker's share in them by kind."""
        buffers = [shared_buffer(nbytes, device) for nbytes in _lane_sizes(buckets)]
        return _SharedLanes(links[0], buffers, buckets, says="filled", hears="emptied"), {"buffers": buffers}

    def close(self, error: str | None) -> None:
        self._stop_listening()

    def _stop_listening(self) -> None:
        self.server.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _connect_path(path: str, rank: int, timeout: float) -> _Link:
    """A worker's side of `SharedMemoryChannel.accept`, which begins within `timeout` seconds."""
    socket_ = socket.socket(socket.AF_UNIX)
    try:
        socket_.connect(path)
    except OSError as error:
        raise WeightSyncError(f"the trainer is gone: {error}") from error
    link = _Link(socket_)
    link.introduce(f"engine worker {rank}", os.path.dirname(path))
    link.meet(os.path.dirname(path), timeout)
    return link


def _broadcast(communicator, tensor: torch.Tensor, links: list[_Link]) -> None:
    """Broadcast one tensor from the trainer and wait for it, watching the other side."""
    if tensor.is_cuda:
        stream = torch.cuda.current_stream(tensor.device)
        communicator.broadcast(tensor, src=0, stream=stream)
        done = stream.record_event().query
    else:
        done = communicator.start_broadcast(tensor, src=0).is_completed
    _wait_until(done, links, time.monotonic() + CONNECT_SECONDS + tensor.nbytes / SLOWEST_BYTES_PER_SECOND)


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
        self.channel = channel if isinstance(channel, SharedMemoryChannel) else _BroadcastChannel(channel)
        self.replay, self.closed, self.version = replay, False, 0
        self.links: list[_Link] = []
        # What both ends have agreed on: name, address, dtype, shape and strides of each tensor; name, dtype and shape
        # of each, tied ones once; the buckets and the copies that fill them; "replay", or "reload" and why.
        self.sources = self.metadata = self.lanes = None
        self.buckets: list[list[Piece]] = []
        self.packing: list[Copies] = []
        self.sharded: dict[str, torch.Tensor] = {}
        self.nbytes, self.loader = 0, ""

    @torch.no_grad()
    def send_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> SyncReport:
        """Bring every engine worker to these weights, named as in the Hugging Face checkpoint, any dtype.

        Runs while `receive_weights` runs on every worker. Tied tensors travel once. DTensors are gathered a bucket at
        a time, so that every rank of their mesh calls this together. Raises WeightSyncError, also with the workers'
        own errors; the session is closed then, and a new one needs a new channel on both sides.
        """
        if self.closed:
            raise WeightSyncError("this weight sync session was closed by an earlier error")
        started = time.perf_counter()
        try:
            self._agree(list(named_tensors))
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
            try:
                if error:
                    link.send(error=error)
            except WeightSyncError:
                pass  # that worker is the one that is gone
            link.close()
        self.links, self.lanes, self.packing = [], None, []
        self.channel.close(error)

    def _agree(self, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Preflight, unless names, dtypes and shapes are those of the last sync; find the copies that pack a bucket."""
        sources = [(name, _local(t).data_ptr(), t.dtype, t.shape, t.stride()) for name, t in named_tensors]
        if sources == self.sources:
            return
        tensors = _without_ties(named_tensors)
        metadata = [(name, _dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()]
        moved = isinstance(self.lanes, _TrainersMemory)  # the workers read where the tensors no longer are
        self.packing = []
        if metadata != self.metadata or moved:
            self.lanes = None  # its memory goes before the new one's comes
            self._preflight(metadata, tensors, direct=not moved)
        self.sharded = {name: tensor for name, tensor in tensors.items() if _local(tensor) is not tensor}
        if not isinstance(self.lanes, _TrainersMemory):
            for i, bucket in enumerate(self.buckets):
                pairs = []
                for piece in bucket:
                    if piece.name not in self.sharded:
                        part = _part(tensors[piece.name], piece)
                        pairs.append((self.lanes.view(i, piece).view(part.shape), part))
                self.packing.append(Copies(self.lanes.buffers[0].device, pairs))
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
        self.buckets = _wire_buckets(wire, bucket_bytes)
        if direct:
            self.lanes, offer = _TrainersMemory(tensors), {"memory": list(tensors.values())}
        else:
            device = next(iter(tensors.values())).device
            self.lanes, offer = self.channel.open_lanes(self.links, self.buckets, device)
        for link in self.links:
            link.send(wire=wire, bucket_bytes=bucket_bytes, **{k: list(map(_packed, v)) for k, v in offer.items()})
        self.nbytes = sum(piece.nbytes for bucket in self.buckets for piece in bucket)
        self.metadata, self.loader = metadata, "" if self.replay else "reload: replay is switched off"
        self.version = max(answer["version"] for answer in answers)  # which a failed sync leaves uneven

    def _first_sync(self) -> None:
        """Reload; then, if every worker has recorded its copies, let replay show that it gives the same bits."""
        answers = self._transmit("first")
        refusals = [answer["refused"] for answer in answers if answer["refused"]]
        if refusals:
            self.loader = f"reload: {refusals[0]}"
        elif all(answer["same"] for answer in self._transmit("trial")):
            self.loader = "replay"
        elif all(answer["same"] for answer in self._transmit("repair")):
            self.loader = "reload: replay did not reproduce it bit for bit"
        else:
            raise WeightSyncError("a second reload of the same tensors gave other weights than the first")
        for link in self.links:
            link.send(mode="end")

    def _transmit(self, mode: str) -> list[dict]:
        """One pass of all bytes, and the workers' answers to it."""
        deadline = time.monotonic() + _seconds_allowed(self.buckets)
        if not self.packing:
            _synchronize(next(iter(self.lanes.tensors.values())).device)  # the optimizer step may still be under way
        for link in self.links:
            link.send(mode=mode, version=self.version)
        started: list[Callable[[], bool]] = []
        for i, copies in enumerate(self.packing):
            if i >= LANES:
                _wait_until(started[i - LANES], self.links, deadline)
            copies.run()
            self._gather(i)
            started.append(self.lanes.start(i))
        for done in started[-LANES:]:
            _wait_until(done, self.links, deadline)
        return [link.recv(max(0.0, deadline - time.monotonic())) for link in self.links]

    def _gather(self, i: int) -> None:
        """Fill bucket `i` with what is sharded: a collective of the trainer's ranks, who all have these buckets."""
        for piece in self.buckets[i]:
            if piece.name in self.sharded:
                if piece.begin == 0:
                    self.gathered = self.sharded[piece.name].to(piece.dtype).full_tensor()
                view = self.lanes.view(i, piece)
                view.copy_(_part(self.gathered, piece).reshape(view.shape))
                if piece.begin + piece.count == self.gathered.numel():
                    self.gathered = None  # one whole tensor at a time

    @torch.no_grad()
    def compare_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Comparison:
        """Send the tensors of the last sync again, while every worker compares its quantized weights with them.

        Runs while `compare_weights` runs on every worker. Raises WeightSyncError if a weight is further from what was
        sent than rounding to its format explains: a scale that is 1 % off is.
        """
        found = {}
        try:
            tensors = _without_ties(list(named_tensors))
            for name, dtype, _ in _wire_of(self.buckets):
                tensor = tensors[name].to(getattr(torch, dtype)).contiguous()
                _broadcast(self.channel.communicator, tensor, self.links)
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
        memory = (local.untyped_storage().data_ptr(), local.storage_offset(), tensor.shape)
        if tensor.numel() and memory not in seen:
            seen.add(memory)
            tensors[name] = tensor.detach()
    if not tensors:
        raise WeightSyncError("there is nothing to send: the model has no parameters")
    return tensors


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor, any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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
        self.covered: set[tuple] = set()  # regions written one parameter at a time since the last completed sync
        self.digest: int | None = None  # of what a completed sync left, None where there was none
        self.version = 0
        self.moves: list[list] | None = None  # the steps of a replay, by bucket
        self.fused = False  # do they take the digest as well?
        self.compared: dict[str, tuple] = {}  # digests of quantized weights at the last comparison

    def preflight(self, metadata: list) -> tuple[list[str | None], list[str]]:
        """Returns per tensor the dtype in which the engine keeps it (None: not on this worker), and the problems."""
        traced, problems = self._trace(metadata)
        dtypes = [next(map(self._wire_dtype, traced.get(name, [])), None) for name, _, _ in metadata]
        writes = [write for writes in traced.values() for write in writes]
        self.expected = {}
        for write in writes:
            if not isinstance(write.value, int | float):
                layer = _layer_of(write.owner)
                self.expected[layer] = self.expected.get(layer, 0) + write.destination.numel()
        for name, _, shape in metadata:
            if self._cuts(traced.get(name, []), torch.Size(shape).numel()):
                problems.append(f"{name} {list(shape)}: the engine would load only a part of it")
        missing = self.required.keys() - self._complete({write.region for write in writes})
        if missing and not problems:
            problems = [f"nothing is sent for the engine's {name}" for name in sorted(missing)]
        return dtypes, problems

    def _cuts(self, writes: list[_Write], numel: int) -> bool:
        """Whether the workers together load less than the tensor: some loaders cut off what is too large."""
        if any(not isinstance(w.value, torch.Tensor) or _loadable(w.parameter) < w.parameter.numel() for w in writes):
            return False  # computed, or of a share that is padded on some workers
        loaded = sum(write.destination.numel() for write in writes)
        return 0 < loaded < numel / self.worker.parallel_config.tensor_parallel_size

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

    def complete(self, version: int, written: int | None) -> None:
        """Every parameter was written, with this digest: this version of the weights is in place."""
        self.covered.clear()
        self.digest, self.version = written, version

    def record(self, buckets: list[list[Piece]], lanes: _Lanes) -> str | None:
        """Find what a load of these buckets comes down to, for `replay`. Returns the reason if that cannot be."""
        self.moves, self.fused = None, False
        tensors = {piece.name: (piece.name, _dtype_name(piece.dtype), piece.shape) for b in buckets for piece in b}
        traced, _ = self._trace(list(tensors.values()))
        try:
            recording = _Recording(self, traced, buckets, lanes)
            moves = [recording.steps(i) for i in range(len(buckets))]
        except NotImplementedError as reason:
            return str(reason)
        if packed := [name for name, module in self.model.named_modules() if hasattr(module, "cpu_linear")]:
            return f"{packed[0]}: the engine computes with a packed copy, as vLLM does on CPU"
        if not recording.layers:
            self.fused = digest_together([copies for (copies,) in moves], list(self._served_tensors()))
        self.moves = _captured(moves) if recording.layers and recording.device.type == "cuda" else moves
        return None

    @torch.no_grad()
    def replay(self, arrivals: Iterator[int], device: torch.device) -> int | None:
        """Copy each bucket, as it arrives, straight to where a reload brought it. Returns the digest of all."""
        self.digest, total = None, torch.zeros(1, dtype=torch.int64, device=device)
        for i in arrivals:
            for step in self.moves[i]:
                step.run(total)
        return int(total) % 2**64 if self.fused else self.take_digest()

    def scramble(self, buckets: list[list[Piece]], device: torch.device) -> None:
        """Load other weights, so that nothing that a replay leaves out can pass for right."""
        for bucket in buckets:
            first = [piece for piece in bucket if piece.begin == 0]
            self.load([(p.name, torch.full(p.shape, 0.5, dtype=p.dtype, device=device)) for p in first])
        self.finish()

    def state_digest(self) -> int | None:
        """The digest of what is served and of all other tensors that the model's layers keep, but for the KV cache.

        Some are computed from the weights when those are loaded, and would be stale after a replay.
        """
        others = [
            value
            for module in self.model.modules()
            for name, value in vars(module).items()
            if isinstance(value, torch.Tensor) and value.device == self.worker.device and name != "kv_cache"
        ]
        return digest([tensor for tensor in (*self._served_tensors(), *others) if tensor.numel()])

    def load_some(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Load tensors that are not all there are, and serve them as soon as no layer is half written."""
        traced, problems = self._trace([(name, _dtype_name(w.dtype), tuple(w.shape)) for name, w in weights])
        if problems:
            raise WeightSyncError(problems[0])
        self.load(weights)
        self.covered |= {write.region for writes in traced.values() for write in writes}
        unwritten = self.required.keys() - self._complete(self.covered)
        if not {_layer_of(name) for name in unwritten} & {_layer_of(name) for name, *_ in self.covered}:
            self.finish()
            if not unwritten:
                self.complete(self.version + 1, self.take_digest())

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
        return digest(list(self._served_tensors()))

    def _served_tensors(self) -> Iterator[torch.Tensor]:
        for parameter in self.model.parameters():
            if parameter.numel():
                yield from _plain_tensors(parameter.detach())
        for module in self.model.modules():
            # On CPU, vLLM keeps linear weights packed in a form that cannot be read: read them by what they compute.
            if hasattr(module, "cpu_linear"):
                whole = module.weight.size(-1) if module.weight.numel() else module.input_size  # where it is replicated
                identity = torch.eye(getattr(module, "input_size_per_partition", whole), dtype=module.weight.dtype)
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
                digests = digest([weight.scale]), digest([weight.qdata])
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


class _Recording:
    """The steps that a load of some buckets comes down to: copies, and the processing of layers that they complete.

    Raises NotImplementedError, with the reason, if it comes down to anything else.
    """

    def __init__(self, engine: _EngineModel, traced: dict[str, list[_Write]], buckets: list[list[Piece]], lanes):
        self.traced, self.buckets, self.lanes = traced, buckets, lanes
        self.device = lanes.view(0, buckets[0][0]).device
        self.served = dict(engine.model.named_parameters())
        self.layers: dict[str, _ProcessedLayer] = {}
        self.free: dict[tuple, list[torch.Tensor]] = {}  # scratch memory by shape and dtype
        parts = Counter(piece.name for bucket in buckets for piece in bucket)
        for name, writes in traced.items():
            for write in writes:
                if write.value is None:
                    raise NotImplementedError(f"{name}: its loader computes")
                if _form(self.served.get(write.owner)) != _form(write.parameter):
                    layer, _, parameter = write.owner.rpartition(".")
                    self.layers.setdefault(layer, _ProcessedLayer(engine.model.get_submodule(layer), engine._context))
                    self.layers[layer].loadable[parameter] = write.parameter
                    self.layers[layer].awaited += parts[name]
        for write in (write for writes in traced.values() for write in writes):
            layer, _, parameter = write.owner.rpartition(".")
            if layer in self.layers and parameter not in self.layers[layer].loadable:
                self.layers[layer].copied.add(parameter)

    def steps(self, i: int) -> list:
        """The steps that bucket `i` allows."""
        steps, pairs, fills = [], [], []
        for piece in self.buckets[i]:
            for write in self.traced[piece.name]:
                layer, parameter = self._place(piece, write)
                view = write.destination
                destination = parameter.as_strided(view.size(), view.stride(), view.storage_offset())
                if isinstance(write.value, torch.Tensor):
                    pairs += _pairs(destination, write.value, piece, self.lanes.view(i, piece))
                elif piece.begin == 0:
                    fills.append((destination, write.value))
                if layer and layer.is_complete(self.free):
                    steps += [Copies(self.device, pairs, fills), layer]
                    pairs, fills = [], []
        return [*steps, Copies(self.device, pairs, fills)]

    def _place(self, piece: Piece, write: _Write) -> tuple["_ProcessedLayer | None", torch.Tensor]:
        """Where a write goes: to what is served, or to the scratch memory of a layer that is processed first."""
        layer, parameter = self.layers.get(_layer_of(write.owner)), write.owner.rpartition(".")[2]
        if layer is None or parameter not in layer.loadable:
            return None, self.served[write.owner].data
        if not layer.scratch and not layer.begin(self.free, self.device):
            raise NotImplementedError(f"{piece.name}: the engine keeps {write.owner} in another form")
        return layer, layer.scratch[parameter]


class _ProcessedLayer:
    """A layer that vLLM processes once it is loaded, quantizes for instance.

    It is loaded into scratch memory, processed there by vLLM's own method, and the result is copied to what is served.
    """

    def __init__(self, module: torch.nn.Module, context: Callable):
        self.module, self.context = module, context
        self.loadable: dict[str, torch.Tensor] = {}  # its parameters' form when they are loaded
        self.scratch: dict[str, torch.Tensor] = {}
        self.awaited = 0  # writes that a load makes to them
        self.copied: set[str] = set()  # its parameters that are served as they are loaded

    def begin(self, free: dict[tuple, list], device: torch.device) -> bool:
        """Take scratch memory that no other layer uses now. Returns whether processing gives the form of the served."""
        for name, loadable in self.loadable.items():
            unused = free.setdefault((loadable.shape, loadable.dtype), [])
            new = unused.pop() if unused else torch.zeros(loadable.shape, dtype=loadable.dtype, device=device)
            self.scratch[name] = new
        try:
            served, results = self._process()
        except Exception:  # whatever vLLM's method makes of a layer that it has seen before
            return False
        return [_form(t) for t in served] == [_form(t) for t in results] and all(t.numel() for t in served)

    def is_complete(self, free: dict[tuple, list]) -> bool:
        """Note a write. Was it the last? Then the scratch memory is free for the layers behind this one."""
        self.awaited -= 1
        for scratch in self.scratch.values() if not self.awaited else ():
            free[scratch.shape, scratch.dtype].append(scratch)
        return not self.awaited

    def run(self, _) -> None:
        for served, result in zip(*self._process(), strict=True):
            served.copy_(result)

    def _process(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What is served, and what vLLM makes of the scratch memory, tensor by tensor."""
        stub, served = copy.copy(self.module), self.module._parameters
        # Of its own: what is loaded, in scratch memory, and what processing makes of it, such as scales.
        own = [name for name, parameter in served.items() if parameter is not None and name not in self.copied]
        stub._parameters = dict(served)
        for name in own:
            tensor = self.scratch[name] if name in self.scratch else served[name].detach().clone()
            stub._parameters[name] = torch.nn.Parameter(tensor, requires_grad=False)
        vars(stub).pop(PROCESSED, None)
        before = dict(vars(stub))
        with self.context():
            stub.quant_method.process_weights_after_loading(stub)
        vars(stub).pop(PROCESSED, None)
        if vars(stub).keys() != before.keys() or any(vars(stub)[name] is not value for name, value in before.items()):
            raise NotImplementedError("more than the layer's parameters would have to be copied")
        return tuple(
            [tensor for name in own for tensor in _plain_tensors(module._parameters[name].detach())]
            for module in (self.module, stub)
        )


class _Graph:
    """Steps as one CUDA graph, which is launched without the time that Python takes for each."""

    def __init__(self, steps: list, pool):
        self.steps, self.graph = steps, torch.cuda.CUDAGraph()  # keeps what the graph's addresses belong to
        # Not torch.cuda.graph, which collects garbage for each of a hundred graphs.
        with torch.cuda.stream(torch.cuda.Stream()):
            self.graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            for step in steps:
                step.run(None)
            self.graph.capture_end()

    def run(self, _) -> None:
        self.graph.replay()


def _captured(moves: list[list]) -> list[list]:
    torch.cuda.synchronize()
    pool = torch.cuda.graph_pool_handle()  # one for all: they run one after the other
    return [[_Graph(steps, pool)] for steps in moves]


def _form(parameter: torch.Tensor | None) -> tuple | None:
    """What must agree for a copy into one to be one into the other. A quantized tensor only looks like a plain one."""
    if parameter is None:
        return None
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


def _pairs(
    destination: torch.Tensor, copied: torch.Tensor, piece: Piece, source: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(destination, source) of the part of a copy that reads `piece`, whose elements are `source`, in any dtype.

    `copied` is a view of the tensor without storage that stands for the whole. Raises NotImplementedError if the piece
    is a part of the whole, and what is copied of it is not simply some rows of the view.
    """
    offset = copied.storage_offset()
    if piece.count < torch.Size(piece.shape).numel():
        row = torch.Size(piece.shape[1:]).numel()
        if copied.stride(0) != row or piece.begin % row or piece.count % row:
            raise NotImplementedError(f"{piece.name}: it is larger than a bucket, and not copied by rows")
        first, view_first = piece.begin // row, offset // row
        begin = max(first, view_first)
        end = max(begin, min(first + piece.count // row, view_first + copied.size(0)))
        destination = destination[begin - view_first : end - view_first]
        copied = copied[begin - view_first : end - view_first]
        offset = copied.storage_offset() - piece.begin
    if not copied.numel():
        return []
    return [(destination, source.as_strided(copied.size(), copied.stride(), source.storage_offset() + offset))]


class _WeightReceiver:
    """The workers' end of a `WeightSender`'s syncs, by whatever channel."""

    weight_link: _Link | None = None
    weight_lanes: _Lanes | None = None

    def check_weights_changed(self) -> bool:
        """Whether every element served is, bit for bit, what the last completed sync left.

        False before a sync, while one is partial (some parameters sent, others not), and without parameters.
        """
        return self._engine_model().unchanged()

    def _receive(self, timeout: float, connect: Callable[[], _Link]) -> dict:
        # An exception would break the engine: vLLM reads no worker's answer beyond the first exception, and takes what
        # is left for answers to its next call.
        try:
            return {"version": self._take_part(timeout, connect)}
        except Exception as error:
            self._close_link(_reason(error))
            return {"error": _reason(error)}

    def _take_part(self, timeout: float, connect: Callable[[], _Link]) -> int:
        model = self._engine_model()
        if model.loading:
            model.finish()  # what a failed sync, or one parameter at a time, left half done
        if self.weight_link is None:
            self.weight_link = connect()
        link = self.weight_link
        message = link.recv(timeout)
        if "metadata" in message:
            dtypes, problems = model.preflight(message["metadata"])
            link.send(dtypes=dtypes, problems=problems, version=model.version)
            offer = link.recv(ANSWER_SECONDS)
            model.moves = self.weight_lanes = None  # their memory goes before the new one's comes
            self.weight_buckets = _wire_buckets(offer["wire"], offer["bucket_bytes"])
            self.weight_lanes = self._open_lanes(link, offer)
            message = link.recv(ANSWER_SECONDS)
        mode = message["mode"]
        written = self._load(mode)
        model.complete(message["version"], written)
        if mode != "first":
            link.send(done=True)
            return model.version
        refused = model.record(self.weight_buckets, self.weight_lanes)
        reloaded = None if refused else model.state_digest()
        link.send(refused=refused)
        while (mode := link.recv(ANSWER_SECONDS)["mode"]) != "end":
            if mode == "trial":
                model.scramble(self.weight_buckets, self.device)
            model.digest = self._load(mode)
            link.send(same=model.digest == written == model.take_digest() and model.state_digest() == reloaded)
        return model.version

    def _load(self, mode: str) -> int | None:
        """Load all buckets as they arrive; returns the digest of what was written."""
        arrivals = _arrivals(self.weight_buckets, self.weight_lanes, self.weight_link)
        if mode in ("replay", "trial"):
            return self._engine_model().replay(arrivals, self.device)
        _reload(self._engine_model(), self.weight_buckets, self.weight_lanes, arrivals)
        return self._engine_model().take_digest()

    def _close_link(self, error: str | None = None) -> None:
        """Leave the session; with `error`, a trainer that is waiting raises it."""
        if self.weight_link is not None:
            try:
                if error:
                    self.weight_link.send(error=error)
            except WeightSyncError:
                pass  # the trainer is the side that is gone
            self.weight_link.close()
        self.weight_link = self.weight_lanes = None
        if hasattr(self, "weight_model"):
            self.weight_model.moves = None

    def _engine_model(self) -> _EngineModel:
        if not hasattr(self, "weight_model"):
            self.weight_model = _EngineModel(self)
        return self.weight_model


class WorkerExtension(_WeightReceiver):
    """Methods for vLLM's workers (`worker_extension_cls="rlhf_utils.WorkerExtension"`), run by `collective_rpc`."""

    model_update_group = None

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
        error if that is what failed; the trainer in turn raises this worker's.
        """

        def connect() -> _Link:
            group = self._joined_group().group
            return _connect(group, group.rank, timeout)

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
            self._close_link(_reason(error))
            self.close_weight_update_group()

    def _joined_group(self):
        if self.model_update_group is None:
            raise WeightSyncError("no weight update group: init_weight_update_group was not called, or a sync failed")
        return self.model_update_group

    def _open_lanes(self, link: _Link, offer: dict) -> _Lanes:
        return _BroadcastLanes(self.model_update_group, self.weight_buckets, self.device)


class ColocateWorkerExtension(_WeightReceiver):
    """Methods for workers that share their device with a trainer rank; no broadcast, the weights are there already."""

    weight_path = ""

    def report_device_id(self) -> str:
        """The UUID of this worker's GPU; on CPU "cpu:" and its rank in the engine."""
        return _device_id(torch.device("cpu", self.rank) if self.device.type == "cpu" else self.device)

    def receive_weights(self, handles: dict[str, str], timeout: float = 3600.0) -> dict:
        """As `WorkerExtension.receive_weights`; `handles` are those of the trainer ranks' `SharedMemoryChannel`s."""
        path = handles[self.report_device_id()]
        if path != self.weight_path:
            self._close_link()
            self.weight_path = path
        return self._receive(timeout, lambda: _connect_path(path, self.rank, timeout))

    def update_weights_from_ipc(self, zmq_handles: dict[str, str], timeout: float = 600.0) -> None:
        """Load weights from a buffer of the trainer on this device, as vLLM's colocation example sends them.

        `zmq_handles` has an address by device id, at which the trainer's REQ socket is bound. It sends, and this
        answers each with b"" or the traceback of what failed: a handle of a uint8 buffer (`reduce_tensor`'s, or
        `share_tensor`'s); then, as often as it fills the buffer, a list with name, shape, dtype and offset in bytes of
        every tensor in it; at the end None. What it sends are pickles: the address must be private. Raises
        WeightSyncError if the trainer is silent for `timeout` seconds.
        """
        import zmq

        with zmq.Context() as context, context.socket(zmq.REP) as socket_:
            socket_.setsockopt(zmq.RCVTIMEO, int(timeout * 1000))
            socket_.setsockopt(zmq.LINGER, 1000)
            socket_.connect(zmq_handles[self.report_device_id()])
            try:
                buffer = None
                while (message := socket_.recv_pyobj()) is not None:
                    if isinstance(message, tuple):
                        buffer = rebuild_ipc(message, self.device.index)
                    else:
                        weights = [(item["name"], _item(buffer, **item).clone()) for item in message]
                        self._engine_model().load_some(weights)
                    _synchronize(self.device)  # the trainer may fill the buffer anew
                    socket_.send(b"")
                del buffer
                socket_.send(b"")
            except zmq.Again as error:
                raise WeightSyncError(f"the trainer sent nothing for {timeout:.0f} s") from error
            except Exception as error:
                socket_.send(_reason(error).encode())
                raise

    def update_weights_from_ipc_handles(self, ipc_handles: dict[str, dict[str, tuple]]) -> None:
        """Load weights straight from the memory of the trainer on this device.

        `ipc_handles` has, by device id, a handle (`reduce_tensor`'s, or `share_tensor`'s) by parameter name. vLLM lets
        them pass with VLLM_ALLOW_INSECURE_SERIALIZATION=1.
        """
        handles = ipc_handles[self.report_device_id()]
        weights = [(name, rebuild_ipc(handle, self.device.index).clone()) for name, handle in handles.items()]
        self._engine_model().load_some(weights)
        _synchronize(self.device)

    def _open_lanes(self, link: _Link, offer: dict) -> _Lanes:
        def mapped(texts: list[str]) -> list[torch.Tensor]:
            return [rebuild_ipc(_unpacked(text), self.device.index) for text in texts]

        if "memory" in offer:
            names = [name for name, *_ in offer["wire"]]
            return _TrainersMemory(dict(zip(names, mapped(offer["memory"]), strict=True)))
        return _SharedLanes(link, mapped(offer["buffers"]), self.weight_buckets, says="emptied", hears="filled")


def _item(buffer: torch.Tensor, name: str, shape, dtype: torch.dtype, offset: int, **_) -> torch.Tensor:
    """A tensor in a buffer of bytes."""
    nbytes = dtype.itemsize * torch.Size(shape).numel()
    return buffer[offset : offset + nbytes].view(dtype).view(torch.Size(shape))


def _arrivals(buckets: list[list[Piece]], lanes: _Lanes, link: _Link) -> Iterator[int]:
    """Yield each bucket's number once it has arrived, with the next ones on the wire.

    What reads a bucket must be queued, on a GPU in the current stream, before the next number is asked for.
    """
    deadline = time.monotonic() + _seconds_allowed(buckets)
    arriving: list[Callable[[], bool]] = []
    for i in range(len(buckets)):
        while len(arriving) < min(i + LANES, len(buckets)):
            arriving.append(lanes.start(len(arriving)))
        _wait_until(arriving[i], [link], deadline)
        yield i
        lanes.release(i)


def _reload(model: _EngineModel, buckets: list[list[Piece]], lanes: _Lanes, arrivals: Iterator[int]) -> None:
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


def _seconds_allowed(buckets: list[list[Piece]]) -> float:
    return CONNECT_SECONDS + sum(map(_bucket_nbytes, buckets)) / SLOWEST_BYTES_PER_SECOND


def _reason(error: BaseException) -> str:
    """What the other side is told: this package's own words, or the traceback of anything else."""
    return str(error) if isinstance(error, WeightSyncError) else "".join(traceback.format_exception(error))


# --- vLLM's native weight-transfer API: the trainer's half ------------------------------------------------------------


@contextmanager
def _known_api() -> Iterator[None]:
    """Raise a WeightSyncError where vLLM's weight-transfer API is another than those this was written for."""
    try:
        yield
    except (ImportError, AttributeError, TypeError) as error:
        import vllm

        raise WeightSyncError(
            f"cannot use the weight-transfer API of vLLM {vllm.__version__} (that of 0.32 and 0.33 is known): {error}"
        ) from error


def weight_source(model: torch.nn.Module, dtype: torch.dtype):
    """A model's parameters as vLLM's trainer side takes them: named as in the checkpoint, each cast on its way."""
    with _known_api():
        from vllm.distributed.weight_transfer import ParamMeta, WeightSource

        class Parameters(WeightSource):
            taken = 0.0  # when the last tensor was, on time.monotonic's clock

            def metadata(self) -> list[ParamMeta]:
                return [ParamMeta(name, dtype, tuple(p.shape)) for name, p in model.named_parameters()]

            if hasattr(WeightSource, "iter_full"):  # vLLM 0.33, which also wants this:
                metadata = functools.cached_property(metadata)

            def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
                for name, parameter in model.named_parameters():
                    self.taken = time.monotonic()
                    yield name, parameter.detach().to(dtype)

            __iter__ = iter_full  # vLLM 0.32

        return Parameters()


def transfer_init_info(backend: str, address: str, world_size: int, buffer_bytes: int):
    """What vLLM's trainer side is told of a transport ("nccl", "ipc", "gloo"), and tells the workers.

    Tensors travel packed in buffers; one that is larger than `buffer_bytes` fails with "ipc".
    """
    with _known_api():
        from vllm.utils.network_utils import get_open_port

        if backend == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            return IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=buffer_bytes)
        if backend == "nccl":
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo as InitInfo
        else:
            InitInfo = register_gloo_trainer()
        return InitInfo(address, get_open_port(), world_size, rank=0, packed_buffer_size_bytes=buffer_bytes)


# --- A transport of one's own for that API: gloo ----------------------------------------------------------------------
#
# What rlhf_nccl.py runs on where there is no GPU, and how a transport is plugged into vLLM. It has a half for each of
# the engine's workers and one for the trainer, which vLLM's two factories find by name. The trainer drives both:
#
# init_weight_transfer_engine  once: trainer and workers join a group
# start_weight_update          the workers open vLLM's reload bracket
# update_weights               once a buffer of packed tensors: what they are by this call, their bytes by a broadcast
# finish_weight_update         the workers close the bracket and serve what has come


class GlooTransferWorker:
    """A worker extension that makes the transport "gloo" known to vLLM's workers (`worker_extension_cls`).

    Every worker process must know it before it loads its model. An installed package sees to that with an entry point
    in the group `vllm.general_plugins`, which vLLM runs in all of its processes. A module that was copied has none, but
    vLLM imports it for its extension class and makes the worker from that class.
    """

    def __new__(cls, *args, **kwargs):
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
            _EngineModel._repack_tied_layers(self)  # which the bracket leaves as they were

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
                dtype_names = [_dtype_name(dtype) for dtype in chunk.dtypes]
                tensors = list(zip(chunk.names, dtype_names, chunk.shapes, chunk.tensor_sizes, strict=True))
                loading = self.calls.submit(self.client.update_weights, {"tensors": tensors})
                self.group.broadcast(chunk.packed_tensor, src=0)
                loading.result()
            self.client.finish_weight_update()

        def shutdown(self) -> None:
            self.group = None

    WeightTransferTrainerFactory.register_engine("gloo", TrainerTransfer)
    return TrainerInitInfo
