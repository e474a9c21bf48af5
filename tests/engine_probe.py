"""The worker extension with ways to look at an engine's weights and to harm them, for tests."""

import torch

from rlhf_utils import ColocateWorkerExtension, WorkerExtension
from weight_sync.engine_model import EngineModel


def gpu_memory(device: torch.device) -> tuple[int, int]:
    """Bytes of this GPU in use by this process's tensors, and by all that the driver knows of; on CPU none."""
    if device.type == "cpu":
        return 0, 0
    free, total = torch.cuda.mem_get_info(device)
    return torch.cuda.memory_allocated(device), total - free


class _Probe:
    graph_replays = 0

    def count_graph_replays(self) -> int:
        """How many CUDA graphs this worker has replayed since the last call. The first call begins to count."""
        replay, counted = torch.cuda.CUDAGraph.replay, self.graph_replays

        def counting(graph) -> None:
            self.graph_replays += 1
            replay(graph)

        if not hasattr(replay, "counts"):
            counting.counts = True
            torch.cuda.CUDAGraph.replay = counting
        self.graph_replays = 0
        return counted

    def digest(self, buffers: bool = True) -> int:
        """Of what is served now, whether or not a sync brought it; with the buffers that syncs have written, or not."""
        return self.weight_model.weights_digest(buffers)

    def gpu_memory(self) -> tuple[int, int]:
        return gpu_memory(self.device)

    def flip_bit(self, name: str) -> None:
        """Flip the lowest bit of one element of a served parameter."""
        parameter = self.get_model().get_parameter(name)
        parameter.data.view(torch.int32).view(-1)[parameter.numel() // 2] ^= 1

    def keep_scales(self, keep: bool) -> None:
        """Have every sync leave the scales of quantized weights as they are now, unseen by its digest; or no more."""
        model = self.weight_model
        vars(model).pop("weights_digest", None)
        scales = [(p.scale, p.scale.clone()) for p in model.model.parameters() if hasattr(p, "scale")]
        weights_digest = model.weights_digest

        def stale() -> int:
            for scale, old in scales:
                scale.copy_(old)
            return weights_digest()

        if keep:
            model.weights_digest = stale

    def forget_copy(self) -> None:
        """Have the first worker's next recording leave out a copy."""
        model, record = self.weight_model, EngineModel.record

        def forgetful(*args) -> str | None:
            del model.record
            refused = record(model, *args)
            model.replay_steps[-1][-1].torch_copies.pop()
            return refused

        if self.rank == 0:
            model.record = forgetful

    def spoil_replay(self) -> None:
        """Have replays flip a bit of each element after they have copied it, and vouch for the result."""
        model = self.weight_model

        class Spoiled:
            def run(self, total: torch.Tensor) -> None:
                for parameter in model.model.parameters():
                    parameter.data.view(torch.int16).bitwise_xor_(1)

        model.replay_steps[-1].append(Spoiled())

    def tamper_with_loads(self, how: str, part: str = "") -> None:
        """Change what the next loads do: "skip" drops the tensors whose names contain `part`, "raise" and "exhaust" (of
        memory) fail at the first such tensor, "swap" exchanges two layers; "heal" undoes it."""
        model = self.get_model()
        vars(model).pop("load_weights", None)
        load = model.load_weights

        def tampered(weights):
            weights = list(weights)
            if weights[0][1].is_meta:
                return load(weights)  # a trace, before anything is loaded
            if any(part in name for name, _ in weights):
                if how == "raise":
                    raise ValueError("this worker cannot load")
                if how == "exhaust":
                    torch.empty(1 << 46, dtype=torch.uint8)
            if how == "swap":
                weights = [(_exchange(name), weight) for name, weight in weights]
            return load([(name, weight) for name, weight in weights if how != "skip" or part not in name])

        if how != "heal":
            model.load_weights = tampered


class Probe(_Probe, WorkerExtension):
    pass


class ColocateProbe(_Probe, ColocateWorkerExtension):
    pass


def _exchange(name: str) -> str:
    return name.replace("layers.0.", "layers.x.").replace("layers.1.", "layers.0.").replace("layers.x.", "layers.1.")
