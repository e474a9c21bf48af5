"""A vLLM plugin, for tests: a fault in one of the engine's workers while it loads what a sync brings.

The fault is the text of the file that $ENGINE_FAULT names, once it exists. "raise": the first worker raises, while the
other one waits as for the rest of a broadcast. "raise second": the other way round. "hang": the second worker hangs,
and says so in a file beside it.
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
        if kind in ("raise", "raise second"):
            if rank == ("raise", "raise second").index(kind):
                raise ValueError("this worker cannot load")
            time.sleep(3600)
        elif kind == "hang" and rank == 1:
            fault.with_name("hanging").touch()
            time.sleep(3600)
        return load(model, weights)

    OPTForCausalLM.load_weights = load_weights
