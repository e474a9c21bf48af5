"""Worker extensions, for tests: they flip one bit of an exact engine's last worker, behind a sync's back.

As soon as $FLIP_AFTER syncs have been checked, the lowest bit of one element of the first layer changes.
"""

import os

import torch

from trainer.rollouts.extensions import ExactColocateWorkerExtension, ExactWorkerExtension


class Flipping:
    checked = 0

    def check_weights_changed(self) -> bool:
        serves = super().check_weights_changed()
        self.checked += 1
        is_last = self.rank == self.parallel_config.world_size - 1
        if is_last and self.checked == int(os.environ["FLIP_AFTER"]) and "VLLM_BATCH_INVARIANT" in os.environ:
            weight = self.model_runner.get_model().model.layers[0].mlp.down_proj.weight
            weight.data.view(torch.int16)[7, 7] ^= 1
        return serves


class FlippingExtension(Flipping, ExactWorkerExtension):
    pass


class FlippingColocateExtension(Flipping, ExactColocateWorkerExtension):
    pass
