"""Channels connect the trainer with its workers. Staging buffers carry the buckets.

`BroadcastChannel` reaches all workers of a broadcast group, `SharedMemoryChannel` those on the same device. A channel
accepts a link from each worker and opens the trainer's staging buffers.
"""

import functools
import json
import shutil
import socket
import tempfile
import weakref
from collections.abc import Callable, Iterable

import torch
from torch.distributed.tensor import DTensor

from .buckets import STAGING_BUFFERS, Piece, bucket_nbytes
from .copies import Digester
from .groups import device_id_of, refuse_expandable_segments, shared_buffer, synchronize
from .link import LINK_KEY, Link, WeightSyncError, accept, listen
from .lora import LoRAWeight, Merge


class Staging:
    """The staging buffers of one end. As many buckets are in flight as there are buffers."""

    def __init__(self, buffers: list[torch.Tensor], buckets: list[list[Piece]]):
        self.buffers, self.buckets = buffers, buckets
        # Of a `TrainerMemory` that replays: a worker's `Samples`, or the trainer's `TrainerSamples` for each worker.
        self.samples = None

    def view(self, i: int, piece: Piece) -> torch.Tensor:
        """The elements [count] of a piece, in the staging buffer of bucket `i`."""
        return self.words(i, piece)[: piece.nbytes].view(piece.dtype)

    def source(self, i: int, piece: Piece) -> torch.Tensor | LoRAWeight:
        """Where a replay reads a piece: its `view`, or the weight that it merges."""
        return self.view(i, piece)

    def words(self, i: int, piece: Piece) -> torch.Tensor:
        """The bytes of a piece and, up to a whole word, the zeros that the trainer packs behind it."""
        return self.buffer(i)[piece.offset : piece.offset + piece.padded_nbytes]

    def buffer(self, i: int) -> torch.Tensor:
        """Bucket `i`, as uint8 [n], in its staging buffer."""
        return self.buffers[i % len(self.buffers)][: bucket_nbytes(self.buckets[i])]

    def is_digested(self, mode: str) -> bool:
        """Whether both ends digest all bytes of a pass over the weights in this mode."""
        return True

    def digest(self, i: int, total: torch.Tensor) -> None:
        """Add the digest of bucket `i`, as it lies in its buffer, to `total`, int64 [1]."""
        self._digesters[i].run(total)

    @functools.cached_property
    def _digesters(self) -> list[Digester]:
        return [
            Digester([self.words(i, piece) for piece in bucket], bucket[0].number)
            for i, bucket in enumerate(self.buckets)
        ]

    def release(self, i: int) -> None:
        """Note that the reader is done with bucket `i`. On a GPU, its reads are queued in the current stream."""


class BroadcastStaging(Staging):
    """Each end has its own buffers. The trainer broadcasts the buckets."""

    def __init__(self, communicator, buckets: list[list[Piece]], device: torch.device):
        sizes = _buffer_sizes(buckets, STAGING_BUFFERS)
        buffers = [torch.empty(nbytes, dtype=torch.uint8, device=device) for nbytes in sizes]
        super().__init__(buffers, buckets)
        self.communicator, self.stream = communicator, None
        if device.type == "cuda":
            # High priority: a copy kernel that fills the GPU must not keep the next broadcast from starting.
            self.stream = torch.cuda.Stream(device, priority=-1)

    def start(self, i: int) -> Callable[[], bool]:
        """Start the broadcast of bucket `i`, on a GPU after the copies queued so far. Returns a check for its end."""
        if self.stream is None:
            work = self.communicator.start_broadcast(self.buffer(i), src=0)
            return lambda: work.is_completed() and work.wait()
        self.stream.wait_stream(torch.cuda.current_stream())
        self.communicator.broadcast(self.buffer(i), src=0, stream=self.stream)
        return self.stream.record_event().query


class SharedStaging(Staging):
    """All ends map the same buffers, since they share a device. Only the messages "filled" and "emptied" travel.

    The trainer sends "filled" to every worker and awaits "emptied", a worker the other way round.
    """

    def __init__(
        self, links: list[Link], buffers: list[torch.Tensor], buckets: list[list[Piece]], sends: str, awaits: str
    ):
        super().__init__(buffers, buckets)
        self.links, self.sends, self.awaits = links, sends, awaits

    def start(self, i: int) -> Callable[[], bool]:
        """Hand bucket `i` to the other ends. Returns a check for their answers."""
        if self.sends == "filled":
            self._send(i)
        silent = list(self.links)

        def all_have_answered() -> bool:
            silent[:] = [link for link in silent if not link.received(**{self.awaits: i})]
            return not silent

        return all_have_answered

    def release(self, i: int) -> None:
        self._send(i)

    def _send(self, i: int) -> None:
        synchronize(self.buffers[0].device)
        for link in self.links:
            link.send(**{self.sends: i})


class TrainerMemory(Staging):
    """No staging buffers: each worker has mapped the trainer's weights, and reads them in place.

    Of a weight with an adapter it has mapped the base and both factors, and merges them while it reads.
    """

    def __init__(self, weights: dict[str, torch.Tensor | LoRAWeight]):
        super().__init__([], [])
        self.weights = weights
        self.adapted = {name: weight for name, weight in weights.items() if isinstance(weight, LoRAWeight)}
        self.bases = [getattr(weight, "base", weight) for weight in weights.values()]
        self.factors = [factor for weight in self.adapted.values() for factor in (weight.lora_A, weight.lora_B)]
        self.mapped = [*self.bases, *self.factors]

    def view(self, i: int, piece: Piece) -> torch.Tensor:
        weight = self.weights[piece.name]
        if piece.name in self.adapted:
            merged = torch.empty(piece.shape, dtype=piece.dtype, device=weight.base.device)
            Merge(weight, weight.base)(merged)
            weight = merged
        return weight.view(-1)[piece.begin : piece.begin + piece.count]

    def source(self, i: int, piece: Piece) -> torch.Tensor | LoRAWeight:
        return self.adapted.get(piece.name) or self.view(i, piece)

    def is_digested(self, mode: str) -> bool:
        return mode != "replay"  # of which a sample is compared

    def digest(self, i: int, total: torch.Tensor) -> None:
        Digester(self.mapped).run(total)  # a new one: it keeps copies of tensors with an odd end

    def start(self, i: int) -> Callable[[], bool]:
        return lambda: True


def _buffer_sizes(buckets: list[list[Piece]], count: int) -> list[int]:
    return [max(map(bucket_nbytes, buckets[i::count])) for i in range(min(count, len(buckets)))]


class BroadcastChannel:
    """A channel to all workers of a broadcast group."""

    staging_buffers = STAGING_BUFFERS

    def __init__(self, communicator):
        self.communicator = communicator

    @property
    def host(self) -> str:
        """The address of this node at which the workers joined the group."""
        return self.communicator.group.store.host

    def accept(self, links: list[Link]) -> None:
        def announce(endpoint: dict) -> None:
            self.communicator.group.store.set(LINK_KEY, json.dumps(endpoint))

        hint = "is receive_weights running on every worker?"
        listen(self.host, self.communicator.group.world_size - 1, announce, links, "engine workers", hint)

    def can_map(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether a worker can map these tensors' memory."""
        return False

    def open_staging(self, links: list[Link], buckets: list[list[Piece]], device: torch.device) -> tuple[Staging, dict]:
        """The trainer's staging buffers, and the tensors that workers map, by kind: none."""
        if device.type == "cpu" and not hasattr(self.communicator, "start_broadcast"):
            raise WeightSyncError("the tensors are on the CPU, and NCCL sends those of a GPU")
        return BroadcastStaging(self.communicator, buckets, device), {}

    def close(self, error: str | None) -> None:
        if error:
            # A worker without a link polls this key (`connect_group`).
            self.communicator.group.store.set(LINK_KEY, json.dumps({"error": error}))
        if hasattr(self.communicator, "destroy"):
            self.communicator.destroy()  # neither memory nor a broadcast that will never end must hold the GPU


class SharedMemoryChannel:
    """A channel from a trainer rank to the engine worker on the same device: CUDA IPC, or shared memory on CPU.

    If several engines share the device, `workers` says how many of their workers do. `handles` maps the device's id to
    this rank's socket, for `ColocateWorkerExtension.receive_weights`. On CPU all processes share one device, so the
    index of `device` names the worker: its rank in the engine. Raises WeightSyncError if torch allocates GPU memory
    that CUDA IPC cannot share.
    """

    # A GPU runs one process at a time, and takes a millisecond to switch. So the trainer fills all staging memory, and
    # then the workers read it.
    staging_buffers = 1

    def __init__(self, device: torch.device | str, workers: int = 1):
        device = torch.device(device)
        if device.type == "cuda":
            refuse_expandable_segments()
        self.device, self.workers = device, workers
        self.folder = tempfile.mkdtemp(prefix="weight-sync-")  # mode 0700: no other user reaches the socket
        self.remove_folder = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(f"{self.folder}/link")
        self.server.listen()
        self.handles = {device_id_of(device): f"{self.folder}/link"}

    def accept(self, links: list[Link]) -> None:
        peers = f"engine workers on {device_id_of(self.device)}"
        hint = "is receive_weights running there, with this rank's handle?"
        accept(self.server, self.workers, self.folder, links, peers, hint)
        self._stop_listening()

    def can_map(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether a worker can map these tensors' memory."""
        return all(tensor.is_cuda and tensor.is_contiguous() and not isinstance(tensor, DTensor) for tensor in tensors)

    def open_staging(self, links: list[Link], buckets: list[list[Piece]], device: torch.device) -> tuple[Staging, dict]:
        """The staging buffers, and the tensors that workers map, by kind: the same, as "buffers"."""
        buffers = [shared_buffer(nbytes, device) for nbytes in _buffer_sizes(buckets, self.staging_buffers)]
        return SharedStaging(links, buffers, buckets, sends="filled", awaits="emptied"), {"buffers": buffers}

    def close(self, error: str | None) -> None:
        self._stop_listening()

    def _stop_listening(self) -> None:
        self.server.close()
        self.remove_folder()
