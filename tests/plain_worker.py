"""A worker of vLLM on a CPU whose linear layers compute with plain weights, as on a GPU: so syncs replay there as well.

vLLM's own worker packs them, after every load. The scripts keep it on a CPU, although this one is as fast: MKL rounds a
plain product by how many rows it has, so a run would not be repeated bit for bit.
"""

import torch
from vllm.model_executor.layers import utils
from vllm.v1.worker.cpu_worker import CPUWorker

pack = utils.dispatch_cpu_unquantized_gemm


def keep_plain(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Replaces `pack`, which vLLM calls for each layer that it has loaded."""
    if layer.weight.shape[2:]:  # of a convolution
        pack(layer, remove_weight)
    else:
        layer.cpu_linear = torch.nn.functional.linear


utils.dispatch_cpu_unquantized_gemm = keep_plain


class PlainWorker(CPUWorker):
    """For `worker_cls`: vLLM imports this module in every worker, before it loads the model."""
