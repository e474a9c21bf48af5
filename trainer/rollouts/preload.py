"""vLLM, imported once for an engine's processes: the fork server of its actor imports this module, and forks them.

A process that has initialized CUDA can fork none that uses it. vLLM imports torchao, which asks torch for the GPU's
capability and so would initialize CUDA. NVML answers instead, by way of vLLM.
"""

import gc
from unittest.mock import patch

import setproctitle
import torch
from torch._dynamo.device_interface import CudaInterface

setproctitle.getproctitle()  # finds the place of a process's title, which it could not once the environment has changed

gc.disable()  # what is imported is no garbage, and nine searches of it took 2 s

from vllm.platforms import current_platform  # noqa: E402  # it changes the environment


def capability(device: int | None = None) -> tuple[int, int]:
    return tuple(current_platform.get_device_capability())


def has_triton(device: int | None = None) -> bool:
    return capability() >= (7, 0)


with (
    patch.object(torch.cuda, "get_device_capability", capability),
    patch.object(CudaInterface, "is_triton_capable", has_triton),
):
    import vllm.v1.engine.async_llm  # noqa: F401
    from vllm.sampling_params import SamplingParams

with_every_option = SamplingParams.for_sampler_warmup


def without_top_k_and_top_p() -> SamplingParams:
    """What an engine samples with while it starts. vLLM's kernel of top-k and top-p has many forms, and few runs use
    one: compiling them took 15 s of a first run."""
    parameters = with_every_option()
    parameters.top_k, parameters.top_p = 0, 1.0
    return parameters


SamplingParams.for_sampler_warmup = without_top_k_and_top_p

gc.freeze()  # or each process that is forked searches all this: an engine's worker ten times, for half a second each
gc.enable()
