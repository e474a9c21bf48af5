"""The worker side of the ways that benchmarks/sync.py compares, beside this project's own."""

import math

import torch

from engine_model import plain_tensors
from rlhf_utils import ColocateWorkerExtension, WorkerExtension, rebuild_ipc


class Staging:
    """What torch allocates on a GPU beyond what it has now; on CPU nothing."""

    def __init__(self, device: torch.device):
        self.device, self.before = device, 0
        if device.type == "cuda":
            torch.cuda.ipc_collect()  # what the other process has let go of
            self.before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)

    def peak(self) -> int:
        """Bytes at most since the last call."""
        if self.device.type == "cpu":
            return 0
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak - self.before


class _Peer:
    def staging(self) -> int:
        return self.staged.peak()

    def release(self) -> None:
        """Let go of a session's buffers, so that what the next way allocates can be seen."""
        self._close_link()
        self.staged = Staging(self.device)

    def poison(self) -> None:
        """Overwrite all weights. On CPU vLLM computes with packed copies, which only a load writes."""
        if self.device.type == "cpu":
            self._load_other_weights()
            return
        for parameter in self.model_runner.get_model().parameters():
            for tensor in plain_tensors(parameter.data):
                tensor.fill_(math.nan if tensor.is_floating_point() else -1)

    def digest(self) -> int:
        return self._engine_model().take_digest()


class PeerExtension(_Peer, WorkerExtension):
    def raw_broadcast(self, nbytes: int) -> None:
        """Receive `nbytes` into one buffer over and over."""
        buffer = torch.empty(min(nbytes, 1 << 28), dtype=torch.uint8, device=self.device)
        for _ in range(1 + nbytes // buffer.numel()):  # the first one is for both sides to arrive
            self.model_update_group.broadcast(buffer, src=0)
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def upstream_update_weight(self, name: str, dtype_name: str, shape) -> None:
        """As in vLLM's example: receive one parameter, and load it at once. On CPU that needs a reload bracket."""
        if self.device.type == "cpu":
            self.update_weight(name, dtype_name, shape)
            return
        weight = torch.empty(tuple(shape), dtype=getattr(torch, dtype_name), device=self.device)
        self.model_update_group.broadcast(weight, src=0)
        self.model_runner.model.load_weights(weights=[(name, weight)])
        del weight


class ColocatePeerExtension(_Peer, ColocateWorkerExtension):
    def upstream_update_weights_from_ipc(self, zmq_handles: dict[str, str]) -> None:
        """As in vLLM's example: load each filling of the buffer at once. On CPU that needs a reload bracket."""
        import zmq

        if self.device.type == "cpu":
            self.update_weights_from_ipc(zmq_handles)
            return
        with zmq.Context() as context, context.socket(zmq.REP) as socket:
            socket.connect(zmq_handles[self.report_device_id()])
            buffer = None
            while (message := socket.recv_pyobj()) is not None:
                if isinstance(message, tuple):
                    buffer = rebuild_ipc(message, self.device.index)
                else:
                    weights = []
                    for item in message:
                        nbytes = item["dtype"].itemsize * item["shape"].numel()
                        flat = buffer[item["offset"] : item["offset"] + nbytes]
                        weights.append((item["name"], flat.view(item["dtype"]).view(item["shape"])))
                    self.model_runner.model.load_weights(weights=weights)
                torch.cuda.synchronize()
                socket.send(b"")
            socket.send(b"")
