"""A vLLM plugin, for tests: a fault in one of the engine's workers while it loads what a sync brings.

The fault is the text of the file that $ENGINE_FAULT names, once it exists: "raise", while the second worker waits as
for the rest of a broadcast; or "hang", which is said in a file beside it.
"""

import os
import time
from pathlib import Path


def register() -> None:
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.model_executor.models.opt import OPTForCausalLM

    load, fault = OPTForCausalLM.load_weights, Path(os.environ["ENGINE_FAULT"])

    def load_weights(model, weights):
        kind, rank = fault.read_text() if fault.exists() else None, get_tensor_model_parallel_rank()
        if kind == "raise" and rank == 1:
            time.sleep(3600)
        elif kind == "raise":
            raise ValueError("this worker cannot load")
        elif kind == "hang" and rank == 1:
            fault.with_name("hanging").touch()
            time.sleep(3600)
        return load(model, weights)

    OPTForCausalLM.load_weights = load_weights
