"""How bytes and messages travel between a trainer and the workers of an engine.

A *channel* reaches workers: `BroadcastChannel` all of a broadcast group, `SharedMemoryChannel` the one on the same
device. It gives a *link* to each, a socket for messages that breaks at once when a process dies, and *lanes*, the
staging buffers through which the weights travel in *buckets* of whole tensors, or of rows of large ones.
"""

import base64
import errno
import json
import os
import pickle
import shutil
import socket
import struct
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait

import torch
from torch.distributed.tensor import DTensor

LANES = 4  # buckets in flight, which share the staging memory
ALIGN_BYTES = 256  # tensors start at multiples of this, so that every copy is vectorized
CONNECT_SECONDS = 60.0  # the other side starts its half of a rendezvous within this time
HELLO_SECONDS = 5.0  # a worker that has connected says who it is within this time
HELLO_BYTES = 1 << 12  # of a first message, at most
SILENT_SECONDS = 15  # a link whose peer acknowledges nothing for this long is broken (dead node, cut network)
AWAKE_SECONDS = 0.02  # a message that comes soon is polled for so long: waking a process up takes 0.1 to 0.3 ms
LINK_KEY = "rlhf_utils/link"  # in a group's store, where the trainer listens
UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)  # which the system says of such a link
SLOWEST_BYTES_PER_SECOND = 50e6  # a transfer slower than this is taken for stuck


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
    refuse_disabled(communicator)
    return communicator


def refuse_disabled(communicator) -> None:
    """Raise a WeightSyncError if vLLM built a communicator whose broadcasts do nothing."""
    if communicator.disabled:
        raise WeightSyncError(
            "vLLM built a disabled NCCL communicator, which would broadcast nothing: NCCL is absent or too old for this"
            " vLLM, VLLM_DISABLE_PYNCCL is set, or the group has one rank (world_size must count trainer and workers)"
        )


# --- The link: messages between the trainer and one worker ------------------------------------------------------------


class Link:
    """A socket's connection, with JSON messages; `peer` is how errors call the other end."""

    def __init__(self, sock: socket.socket):
        sock.settimeout(None)
        limit = struct.pack("ll", int(CONNECT_SECONDS), 0)  # a message that has begun goes on, and is taken
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
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
        hello = self.recv(timeout, HELLO_BYTES)
        if hello.get("token") != token:
            raise WeightSyncError("a stranger connected to the weight sync's port")
        self.peer = hello["peer"]

    def send(self, **message) -> None:
        try:
            self.connection.send_bytes(json.dumps(message).encode())
        except OSError as error:
            self.watch()  # the peer may have said why it left
            raise self._gone(error) from error

    def recv(self, timeout: float, most: int | None = None, soon: bool = False) -> dict:
        """The next message, within `timeout` seconds, of `most` bytes. Raises the peer's own error if it is one.

        With `soon` it is expected any moment: this thread stays awake for it a while.
        """
        if self.early:
            return self.early.pop(0)
        try:
            asleep = time.monotonic() + (AWAKE_SECONDS if soon else 0)
            while time.monotonic() < asleep and not self.connection.poll(0):
                pass
            if not self.connection.poll(timeout):
                raise WeightSyncError(f"{self.peer} did not answer within {timeout:.0f} s")
            return self._read(most)
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

    def close(self, error: str | None = None) -> None:
        """End the session; a peer that is waiting raises `error`, or that this side closed it."""
        try:
            self.send(**{"error": error} if error else {"closed": True})
        except WeightSyncError:
            pass  # the peer is the side that is gone
        self.connection.close()

    def _read(self, most: int | None = None) -> dict:
        try:
            message = json.loads(self.connection.recv_bytes(most))
        except ValueError as error:
            raise WeightSyncError(f"{self.peer} sent what is no message of a weight sync") from error
        if "error" in message:
            raise WeightSyncError(f"{self.peer} failed: {message['error']}")
        if "closed" in message:
            raise WeightSyncError(f"{self.peer} closed the weight sync session")
        return message

    def _gone(self, error: Exception) -> WeightSyncError:
        if getattr(error, "errno", None) in UNREACHABLE:
            return WeightSyncError(f"{self.peer} cannot be reached over the network: {error.strerror}")
        if isinstance(error, BlockingIOError):
            return WeightSyncError(f"{self.peer} stopped in the middle of a message")
        return WeightSyncError(f"{self.peer} died: its connection to the weight sync closed")


def _listen(group, links: list[Link]) -> None:
    """Trainer's side: append one link to every other rank of the group, in no particular order."""
    token, workers, deadline = os.urandom(16).hex(), group.world_size - 1, time.monotonic() + CONNECT_SECONDS
    with socket.create_server((group.store.host, 0), family=socket.AF_INET, backlog=workers) as server:
        group.store.set(LINK_KEY, json.dumps({"port": server.getsockname()[1], "token": token}))
        while len(links) < workers:
            server.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                link = Link(server.accept()[0])
            except TimeoutError as error:
                raise WeightSyncError(
                    f"{workers - len(links)} of {workers} engine workers did not connect within"
                    f" {CONNECT_SECONDS:.0f} s: is receive_weights running on every worker?"
                ) from error
            try:
                link.meet(token, HELLO_SECONDS)
            except WeightSyncError:
                link.close()  # a stranger; the workers are still to come
            else:
                link.introduce("the trainer", token)
                links.append(link)


def connect_group(group, rank: int, timeout: float) -> Link:
    """A worker's side of `_listen`, which begins within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    try:
        while not group.store.check([LINK_KEY]):
            if time.monotonic() > deadline:
                raise WeightSyncError(f"no trainer called send_weights within {timeout:.0f} s")
            time.sleep(0.01)
        offer = json.loads(group.store.get(LINK_KEY))
        if "error" in offer:
            raise WeightSyncError(f"the trainer failed: {offer['error']}")
        link = Link(socket.create_connection((group.store.host, offer["port"]), timeout=CONNECT_SECONDS))
    except WeightSyncError:
        raise
    except (OSError, RuntimeError) as error:  # TCPStore raises RuntimeErrors of its own
        raise WeightSyncError(f"the trainer is gone: {error}") from error
    link.introduce(f"engine worker {rank - 1}", offer["token"])
    link.meet(offer["token"])
    return link


def connect_path(path: str, rank: int, timeout: float) -> Link:
    """A worker's side of `SharedMemoryChannel.accept`, which begins within `timeout` seconds."""
    socket_ = socket.socket(socket.AF_UNIX)
    try:
        socket_.connect(path)
    except OSError as error:
        raise WeightSyncError(f"the trainer is gone: {error}") from error
    link = Link(socket_)
    link.introduce(f"engine worker {rank}", os.path.dirname(path))
    link.meet(os.path.dirname(path), timeout)
    return link


def wait_until(done: Callable[[], bool], links: list[Link], deadline: float) -> None:
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


# --- Buckets: what travels --------------------------------------------------------------------------------------------


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


def wire_buckets(wire: list, bucket_bytes: int) -> list[list[Piece]]:
    metadata = [(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in wire]
    return plan_buckets(metadata, bucket_bytes)


def wire_of(buckets: list[list[Piece]]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype and shape of each tensor that travels in these buckets."""
    return list(dict.fromkeys((p.name, dtype_name(p.dtype), p.shape) for bucket in buckets for p in bucket))


def bucket_nbytes(bucket: list[Piece]) -> int:
    return bucket[-1].offset + bucket[-1].nbytes


def seconds_allowed(buckets: list[list[Piece]]) -> float:
    return CONNECT_SECONDS + sum(map(bucket_nbytes, buckets)) / SLOWEST_BYTES_PER_SECOND


def part_of(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The view of a tensor that a piece is of: flat, or rows if the tensor is not contiguous."""
    if tensor.is_contiguous():
        return tensor.view(-1)[piece.begin : piece.begin + piece.count]
    row = tensor[0].numel()
    if piece.begin % row or piece.count % row:
        raise WeightSyncError(f"{piece.name} is not contiguous, and one row of it is larger than a bucket")
    return tensor[piece.begin // row : (piece.begin + piece.count) // row]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- Lanes: the memory that it travels through ------------------------------------------------------------------------


class Lanes:
    """Staging buffers: some buckets are under way while others are packed or loaded."""

    def __init__(self, buffers: list[torch.Tensor], buckets: list[list[Piece]]):
        self.buffers, self.buckets = buffers, buckets

    def view(self, i: int, piece: Piece) -> torch.Tensor:
        """The elements [count] of a piece of bucket `i`."""
        return self.buffers[i % LANES][piece.offset : piece.offset + piece.nbytes].view(piece.dtype)

    def release(self, i: int) -> None:
        """Bucket `i` has been read, on a GPU by what is queued in the current stream."""


class BroadcastLanes(Lanes):
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
        buffer = self.buffers[i % LANES][: bucket_nbytes(self.buckets[i])]
        if self.stream is None:
            work = self.communicator.start_broadcast(buffer, src=0)
            return lambda: work.is_completed() and work.wait()
        self.stream.wait_stream(torch.cuda.current_stream())
        self.communicator.broadcast(buffer, src=0, stream=self.stream)
        return self.stream.record_event().query


class SharedLanes(Lanes):
    """Both ends, on one device, have mapped the same buffers; only "filled" and "emptied" travel."""

    def __init__(self, link: Link, buffers: list[torch.Tensor], buckets: list[list[Piece]], says: str, hears: str):
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
        synchronize(self.buffers[0].device)
        self.link.send(**{self.says: i})


class TrainersMemory(Lanes):
    """No buffers at all: the worker has mapped the parameters of the trainer beside it."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        super().__init__([], [])
        self.tensors = tensors

    def view(self, i: int, piece: Piece) -> torch.Tensor:
        return self.tensors[piece.name].view(-1)[piece.begin : piece.begin + piece.count]

    def start(self, i: int) -> Callable[[], bool]:
        return lambda: True


def _lane_sizes(buckets: list[list[Piece]]) -> list[int]:
    return [max(map(bucket_nbytes, buckets[i::LANES])) for i in range(min(LANES, len(buckets)))]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def broadcast(communicator, tensor: torch.Tensor, links: list[Link]) -> None:
    """Broadcast one tensor from the trainer and wait for it, watching the other side."""
    if tensor.is_cuda:
        stream = torch.cuda.current_stream(tensor.device)
        communicator.broadcast(tensor, src=0, stream=stream)
        done = stream.record_event().query
    else:
        work = communicator.start_broadcast(tensor, src=0)
        done = lambda: work.is_completed() and work.wait()  # noqa: E731 - which raises what failed
    wait_until(done, links, time.monotonic() + CONNECT_SECONDS + tensor.nbytes / SLOWEST_BYTES_PER_SECOND)


# --- Memory that two processes share ----------------------------------------------------------------------------------


def refuse_expandable_segments() -> None:
    """Raise WeightSyncError if torch is told to allocate GPU memory in a way that CUDA IPC cannot share."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in "".join(os.environ.get(name, "").lower().split()):
            raise WeightSyncError(f"{name} has expandable_segments:True, whose memory CUDA IPC cannot share: unset it")


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


def device_id_of(device: torch.device) -> str:
    """As NVIDIA's tools name a GPU, whatever its index in this process; "cpu:" and the index on CPU."""
    if device.type == "cuda":
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return f"cpu:{device.index or 0}"


def pack_handle(tensor: torch.Tensor) -> str:
    return base64.b64encode(pickle.dumps(share_tensor(tensor))).decode()


def unpack_handle(text: str) -> tuple:
    return pickle.loads(base64.b64decode(text))


# --- Channels: where the trainer finds its workers, and how buckets reach them ----------------------------------------


class BroadcastChannel:
    """To all workers of a broadcast group."""

    def __init__(self, communicator):
        self.communicator = communicator

    def accept(self, links: list[Link]) -> None:
        _listen(self.communicator.group, links)

    def reaches(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether a worker can map these tensors' memory."""
        return False

    def open_lanes(self, links: list[Link], buckets: list[list[Piece]], device: torch.device) -> tuple[Lanes, dict]:
        """The trainer's staging buffers, and the workers' share in them by kind."""
        return BroadcastLanes(self.communicator, buckets, device), {}

    def close(self, error: str | None) -> None:
        if error:
            # Workers that have no link yet look here for one.
            self.communicator.group.store.set(LINK_KEY, json.dumps({"error": error}))
            if hasattr(self.communicator, "destroy"):
                self.communicator.destroy()  # a broadcast that will never end must not hold the GPU


class SharedMemoryChannel:
    """From a trainer rank to the one engine worker on the same device: CUDA IPC, or shared memory between CPUs.

    `handles` has this rank's address by its device's id, for `ColocateWorkerExtension.receive_weights`. On CPU, where
    all share one device, the index of `device` is the rank of the worker in its engine.
    """

    def __init__(self, device: torch.device):
        if device.type == "cuda":
            refuse_expandable_segments()
        self.device = device
        self.folder = tempfile.mkdtemp(prefix="weight-sync-")  # which nobody else may enter
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(f"{self.folder}/link")
        self.server.listen(1)
        self.handles = {device_id_of(device): f"{self.folder}/link"}

    def accept(self, links: list[Link]) -> None:
        self.server.settimeout(CONNECT_SECONDS)
        try:
            links.append(Link(self.server.accept()[0]))
        except TimeoutError as error:
            raise WeightSyncError(
                f"the engine worker on {device_id_of(self.device)} did not connect within {CONNECT_SECONDS:.0f} s:"
                " is receive_weights running there, with this rank's handle?"
            ) from error
        links[-1].meet(self.folder)
        links[-1].introduce("the trainer", self.folder)
        self._stop_listening()

    def reaches(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether the worker can map these tensors' memory."""
        return all(tensor.is_cuda and tensor.is_contiguous() and not isinstance(tensor, DTensor) for tensor in tensors)

    def open_lanes(self, links: list[Link], buckets: list[list[Piece]], device: torch.device) -> tuple[Lanes, dict]:
        """The staging buffers, and the worker's share in them by kind."""
        buffers = [shared_buffer(nbytes, device) for nbytes in _lane_sizes(buckets)]
        return SharedLanes(links[0], buffers, buckets, says="filled", hears="emptied"), {"buffers": buffers}

    def close(self, error: str | None) -> None:
        self._stop_listening()

    def _stop_listening(self) -> None:
        self.server.close()
        shutil.rmtree(self.folder, ignore_errors=True)
