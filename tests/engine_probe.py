"""The worker extension with ways to look at an engine's weights and to harm them, for tests."""

import torch

from rlhf_utils import WorkerExtension


class Probe(WorkerExtension):
    def digest(self) -> int:
        """Of what is served now, whether or not a sync brought it."""
        return self._engine_model().take_digest()

    def flip_bit(self, name: str) -> None:
        """Flip the lowest bit of one element of a served parameter."""
        parameter = self.model_runner.get_model().get_parameter(name)
        parameter.data.view(torch.int32).view(-1)[parameter.numel() // 2] ^= 1

    def skip_when_loading(self, part: str | None) -> None:
        """Make the next syncs drop the tensors whose names contain `part`; "raise" makes them fail; None heals."""
        model = self._engine_model()
        vars(model).pop("load", None)
        if part == "raise":
            model.load = _raise
        elif part:
            load = model.load
            model.load = lambda weights: load([(name, weight) for name, weight in weights if part not in name])


def _raise(weights):
    raise ValueError("this worker cannot load")
