"""The workers' side of the benchmarks: what they measure."""

import math

import torch

from rlhf_utils import ColocateWorkerExtension, WorkerExtension
from trainer.rollouts.extensions import FusedQuantization
from weight_sync.trace import plain_tensors


class AllocationPeak:
    """Measures how much torch allocates on a GPU from now on. On CPU it measures nothing."""

    def __init__(self, device: torch.device):
        self.device, self.before = device, 0
        if device.type == "cuda":
            torch.cuda.ipc_collect()  # free memory that the other process has unmapped
            self.before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)

    def peak(self) -> int:
        """Peak bytes since the last call."""
        if self.device.type == "cpu":
            return 0
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak - self.before


class _Peer:
    def staging(self) -> int:
        return self.allocation_peak.peak()

    def release(self) -> None:
        """Free a session's buffers, so that the next way's memory can be measured."""
        self._close_links()
        self.allocation_peak = AllocationPeak(self.device)

    def poison(self) -> None:
        """Overwrite all weights. On CPU, load others: vLLM computes with packed copies there."""
        if self.device.type == "cpu":
            self._load_other_weights()
            return
        for parameter in self.model_runner.get_model().parameters():
            for tensor in plain_tensors(parameter.data):
                tensor.fill_(math.nan if tensor.is_floating_point() else -1)
        torch.cuda.synchronize()  # not in the time of the way that comes next

    def digest(self) -> int:
        return self.weight_model.weights_digest()


class PeerExtension(_Peer, WorkerExtension):
    def raw_broadcast(self, nbytes: int) -> None:
        """Receive `nbytes` into one buffer, repeatedly."""
        buffer = torch.empty(min(nbytes, 1 << 28), dtype=torch.uint8, device=self.device)
        for _ in range(1 + nbytes // buffer.numel()):  # the first broadcast only synchronizes both sides
            self.model_update_group.broadcast(buffer, src=0)
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class QuantizedPeerExtension(FusedQuantization, PeerExtension):
    """`PeerExtension` of engines that torchao quantizes."""


class ColocatePeerExtension(_Peer, ColocateWorkerExtension):
    """`ColocateWorkerExtension`, measured."""


class QuantizedColocatePeerExtension(FusedQuantization, ColocatePeerExtension):
    """`ColocatePeerExtension` of engines that torchao quantizes."""
