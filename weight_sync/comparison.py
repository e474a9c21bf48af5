"""Compare an engine's quantized weights with what was sent. A digest cannot, since quantization rounds."""

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .copies import digest
from .engine_model import EngineModel
from .link import WeightSyncError
from .trace import strided_as

ROUNDING_SLACK = 1.001  # a weight may be off by this times its rounding error, since the comparison rounds as well


@dataclass(frozen=True)
class Comparison:
    """The result of `compare_weights`: every quantized weight is what was sent, up to rounding."""

    weights: int  # number of those compared, on all workers
    changed: int  # number of those with other scales and other values than at the last comparison


def comparison_of(results: dict[str, tuple[float, bool]]) -> Comparison:
    """Sum up what `compare_quantized` returned on all workers.

    Raises WeightSyncError if a weight is off by more than rounding, or if there is none.
    """
    wrong = {name: error for name, (error, _) in results.items() if error > ROUNDING_SLACK}
    if wrong:
        worst = max(wrong, key=wrong.get)
        raise WeightSyncError(
            f"{len(wrong)} of {len(results)} quantized weights are not what was sent: {worst} is off by"
            f" {wrong[worst]:.3g} times what rounding explains"
        )
    if not results:
        raise WeightSyncError("none of the engine's weights is quantized")
    return Comparison(len(results), sum(changed for _, changed in results.values()))


@torch.no_grad()
def compare_quantized(model: EngineModel, wire: list, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict:
    """Compare each quantized weight with what was sent: these tensors, in the order of `wire`.

    Returns by weight its largest error, in units of the rounding error of its format at that element (infinite for a
    NaN), and whether both its scales and its values have changed since the last comparison. Raises WeightSyncError for
    weights that are neither int8 nor FP8.
    """
    quantized = {name: p for name, p in model.model.named_parameters() if hasattr(p, "__tensor_flatten__")}
    if unknown := {type(p).__name__ for p in quantized.values()} - {"Int8Tensor", "Float8Tensor"}:
        raise WeightSyncError(f"weights kept as {', '.join(unknown)} cannot be compared; int8 and FP8 can")
    traced, _ = model.trace(wire)
    last_tensor = {write.target: name for name, writes in traced.items() for write in writes}  # into each parameter
    sent, results = {}, dict.fromkeys(quantized, (math.inf, False))
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
            # A single scale for the whole weight is left out: it may stay the same although the values change.
            digests = [digest([part]) for part in (weight.scale, weight.qdata) if part.numel() > 1]
            changed = all(map(operator.ne, digests, model.compared_digests.get(target, digests)))
            results[target] = float(errors.max().nan_to_num(math.inf)), changed
            model.compared_digests[target] = digests
    return results


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
