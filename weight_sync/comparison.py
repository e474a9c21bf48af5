"""Compare an engine's quantized weights with what was sent. A digest cannot, since quantization rounds."""

import math
from collections.abc import Iterable

import torch

from .engine_model import EngineModel
from .link import WeightSyncError
from .trace import strided_as

ROUNDING_SLACK = 1.001  # a weight may be off by this times its rounding error, since the comparison rounds as well


def check_errors(errors: dict[str, float]) -> None:
    """Raise WeightSyncError if one of these errors, which `compare_quantized` returned on all workers, is more than
    rounding, or if there is none.

    Rounding leaves each element at the nearest value of its format. So a weight that a sync has left behind is found as
    soon as learning has moved one of its elements past the middle of two values.
    """
    wrong = {name: error for name, error in errors.items() if error > ROUNDING_SLACK}
    if wrong:
        worst = max(wrong, key=wrong.get)
        raise WeightSyncError(
            f"{len(wrong)} of {len(errors)} quantized weights are not what was sent: {worst} is off by"
            f" {wrong[worst]:.3g} times what rounding explains"
        )
    if not errors:
        raise WeightSyncError("none of the engine's weights is quantized")


@torch.no_grad()
def compare_quantized(model: EngineModel, wire: list, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, float]:
    """Compare each quantized weight with what was sent: these tensors, in the order of `wire`.

    Returns by weight its largest error, in units of the rounding error of its format at that element (infinite for a
    NaN). Raises WeightSyncError for weights that are neither int8 nor FP8.
    """
    quantized = {name: p for name, p in model.model.named_parameters() if hasattr(p, "__tensor_flatten__")}
    if unknown := {type(p).__name__ for p in quantized.values()} - {"Int8Tensor", "Float8Tensor"}:
        raise WeightSyncError(f"weights kept as {', '.join(unknown)} cannot be compared; int8 and FP8 can")
    traced, _ = model.trace(wire)
    last_tensor = {write.target: name for name, writes in traced.items() for write in writes}  # into each parameter
    sent, largest = {}, dict.fromkeys(quantized, math.inf)
    for name, tensor in tensors:
        for write in traced[name]:
            if write.target in quantized:
                if write.target not in sent:
                    sent[write.target] = torch.full(quantized[write.target].shape, math.nan, device=tensor.device)
                arrived = strided_as(tensor, write.value, tensor.storage_offset())
                strided_as(sent[write.target], write.destination).copy_(arrived)
        for target in [target for target in sent if last_tensor[target] == name]:
            weight = quantized[target]
            errors = weight.dequantize(torch.float32).sub_(sent.pop(target)).abs_().div_(rounding_errors(weight))
            largest[target] = float(errors.max().nan_to_num(math.inf))
    return largest


def rounding_errors(weight: torch.Tensor) -> torch.Tensor:
    """The largest rounding error at each element: half a step of the format. Broadcasts to the weight's shape."""
    scale = weight.scale  # one for each block of elements: a row, a part of a row, a square
    for dim, blocks in enumerate(scale.shape):
        if blocks > 1:
            scale = scale.repeat_interleave(weight.size(dim) // blocks, dim)
    if not weight.qdata.is_floating_point():
        return scale / 2
    finfo = torch.finfo(weight.qdata.dtype)
    return weight.qdata.float().abs_().clamp_(min=finfo.smallest_normal).mul_(scale * finfo.eps / 2)
