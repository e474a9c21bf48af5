"""Transports: a group (NCCL, gloo) between devices, and memory that processes of one node share (CUDA IPC)."""

import os
import socket
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo

from .link import CONNECT_SECONDS, WeightSyncError, address_family, host_and_port


class GlooCommunicator:
    """A group for tensors on CPU, with the interface of vLLM's PyNcclCommunicator."""

    def __init__(self, group):
        self.group, self.rank, self.world_size, self.disabled = group, group.rank, group.world_size, False
        store, timeout = PrefixStore("gloo", group.store), timedelta(seconds=CONNECT_SECONDS)
        self._gloo = ProcessGroupGloo(store, group.rank, group.world_size, timeout=timeout)
        # Each thread waits for a transfer: of a send, gloo does not say that it is done.
        self._threads = ThreadPoolExecutor(64)

    def start(self, kind: str, tensor: torch.Tensor, peer: int) -> Future:
        """Start to "send" a contiguous tensor to a rank, or to "recv" or "broadcast" it from there."""
        if not tensor.is_contiguous():
            raise ValueError(f"a {kind} needs a contiguous tensor")
        tensors, options = [tensor.detach().view(-1).view(torch.uint8)], BroadcastOptions()
        options.rootRank = peer
        arguments = (options,) if kind == "broadcast" else (peer, 0)
        try:
            return self._threads.submit(getattr(self._gloo, kind)(tensors, *arguments).wait)
        except RuntimeError as error:  # the peer has left: told as if it had left a moment later
            failed = Future()
            failed.set_exception(error)
            return failed

    def broadcast(self, tensor: torch.Tensor, src: int, stream=None) -> None:
        """Broadcast a contiguous tensor in place and wait for it. `stream` is ignored."""
        self.start("broadcast", tensor, src).result()

    def destroy(self) -> None:
        """Leave the group, in a thread: gloo waits for unfinished transfers, for CONNECT_SECONDS at most."""
        only_reference = [vars(self).pop("_gloo", None)]  # whoever drops it waits
        threading.Thread(target=only_reference.clear).start()  # no daemon: a process that ends meanwhile would abort


class Wire:
    """Transfers between the members of a communicator's group, beside the work of the current stream."""

    def __init__(self, communicator, device: torch.device):
        self.communicator, self.device, self.stream = communicator, device, None
        if device.type == "cuda":
            # High priority: a copy kernel that fills the GPU must not keep the next transfer from starting.
            self.stream = torch.cuda.Stream(device, priority=-1)
        elif not isinstance(communicator, GlooCommunicator):
            raise WeightSyncError("the tensors are on the CPU, and NCCL sends those of a GPU")

    def start(self, transfers: list[tuple[str, torch.Tensor, int]]) -> Callable[[], bool]:
        """Start these transfers, as `GlooCommunicator.start` describes them, on a GPU after what is queued so far.
        Returns a check for their end."""
        if self.stream is None:
            running = [self.communicator.start(*transfer) for transfer in transfers]
            return lambda: all(each.done() and each.result() for each in running)
        self.stream.wait_stream(torch.cuda.current_stream())
        self.communicator.group_start()
        try:
            for kind, tensor, peer in transfers:
                getattr(self.communicator, kind)(tensor, peer, stream=self.stream)
        finally:  # an open group would hold back what this thread's other communicators do
            self.communicator.group_end()
        return self.stream.record_event().query


def stateless_init_process_group(master_address: str, master_port: int, rank: int, world_size: int, device):
    """Join a group of the trainer's ranks (the first ones) and the engine workers, beside torch.distributed's groups.

    Every rank calls this at about the same time. Returns vLLM's `PyNcclCommunicator` on a GPU,
    `GlooCommunicator` on `cpu`. Raises WeightSyncError if the port is taken, or if vLLM would build a disabled
    communicator, whose broadcasts do nothing.
    """
    from vllm.distributed.utils import StatelessProcessGroup

    options = {"store_timeout": int(CONNECT_SECONDS)}
    try:
        family = address_family(master_address)
        if rank == 0 and family != socket.AF_INET:  # vLLM would listen on IPv4
            options["listen_socket"] = socket.create_server((master_address, master_port), family=family)
        group = StatelessProcessGroup.create(master_address, master_port, rank, world_size, **options)
        if torch.device(device).type == "cpu":
            return GlooCommunicator(group)
    except (OSError, torch.distributed.DistError) as error:  # rank 0 cannot listen there, or a rank is missing
        # If a rank is missing, vLLM closes a socket that TCPStore has closed, and fails at that.
        reason = error.__context__ if isinstance(error.__context__, torch.distributed.DistError) else error
        raise WeightSyncError(f"no group at {host_and_port(master_address, master_port)}: {reason}") from error
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.utils.nccl import unpinned_nccl_env

    with unpinned_nccl_env():  # VLLM_BATCH_INVARIANT=1 sets NCCL's algorithm only in workers: both ends would hang
        communicator = PyNcclCommunicator(group, device=device)
    if communicator.disabled:
        raise WeightSyncError(
            "vLLM built a disabled NCCL communicator, which would broadcast nothing: NCCL is absent or too old for this"
            " vLLM, VLLM_DISABLE_PYNCCL is set, or the group has one rank (world_size must count trainer and workers)"
        )
    return communicator


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def refuse_expandable_segments() -> None:
    """Raise WeightSyncError if torch allocates GPU memory in expandable segments, which CUDA IPC cannot share."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in "".join(os.environ.get(name, "").lower().split()):
            raise WeightSyncError(f"{name} has expandable_segments:True, whose memory CUDA IPC cannot share: unset it")


def share_tensor(tensor: torch.Tensor) -> tuple:
    """A handle with which another process on this node maps the tensor's memory, by `rebuild_ipc`.

    On a GPU this is torch's `reduce_tensor` (CUDA IPC) and works for any tensor. On CPU it works for a contiguous view
    of a `shared_buffer`, and raises WeightSyncError for others.
    """
    if tensor.is_cuda:
        from torch.multiprocessing.reductions import reduce_tensor

        return reduce_tensor(tensor.detach())
    if not (can_share(tensor) and tensor.is_contiguous()):
        raise WeightSyncError("on CPU, only contiguous views of a shared_buffer can be mapped by another process")
    address = tensor.untyped_storage().data_ptr()
    return _map_memory, (_shared_paths[address], tensor.dtype, tensor.shape, tensor.data_ptr() - address)


def can_share(tensor: torch.Tensor) -> bool:
    """Whether `share_tensor` can share this tensor, which is contiguous."""
    return tensor.is_cuda or tensor.untyped_storage().data_ptr() in _shared_paths


_shared_paths: dict[int, str] = {}  # by address of a `shared_buffer` on CPU: its file


def shared_buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """A uint8 tensor [nbytes] that `share_tensor` can share."""
    if device.type == "cuda":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    # A file without a name: it disappears with the last process that has it open or mapped, however that ends.
    file = os.memfd_create("weight sync")
    os.ftruncate(file, nbytes)
    path = f"/proc/{os.getpid()}/fd/{file}"
    tensor = _map_memory(path, torch.uint8, (nbytes,))
    address = tensor.data_ptr()
    _shared_paths[address] = path
    weakref.finalize(tensor.untyped_storage(), lambda: (_shared_paths.pop(address), os.close(file)))
    return tensor


def _map_memory(path: str, dtype: torch.dtype, shape: tuple[int, ...], begin: int = 0) -> torch.Tensor:
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    memory = torch.from_file(path, shared=True, size=begin + nbytes, dtype=torch.uint8)
    return memory[begin:].view(dtype).view(shape)


def rebuild_ipc(handle: tuple, device_id: int | None = None) -> torch.Tensor:
    """The tensor behind a handle of `share_tensor` or torch's `reduce_tensor`. It lies in the sender's memory.

    `device_id` is the GPU's index in this process, needed if it differs from the index in the sender's.
    """
    function, arguments = handle
    arguments = list(arguments)
    if device_id is not None and function is not _map_memory:
        arguments[6] = device_id  # parameter storage_device of torch's rebuild_cuda_tensor
    return function(*arguments)


def device_id_of(device: torch.device) -> str:
    """A GPU's UUID as nvidia-smi prints it, the same in every process; on CPU "cpu:" and the index."""
    if device.type == "cuda":
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return f"cpu:{device.index or 0}"
