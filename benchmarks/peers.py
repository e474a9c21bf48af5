"""The worker side of the ways that benchmarks/sync.py compares, beside this project's own."""

import math

import torch

from rlhf_utils import WorkerExtension, _plain_tensors


class PeerExtension(WorkerExtension):
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

    def poison(self) -> None:
        """Overwrite every parameter that can be written."""
        for parameter in self.model_runner.get_model().parameters():
            for tensor in _plain_tensors(parameter.data):
                tensor.fill_(math.nan if tensor.is_floating_point() else -1)

    def digest(self) -> int:
        return self._engine_model().take_digest()
