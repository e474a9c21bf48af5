"""Weights with LoRA adapters, which travel merged: nobody ever holds a merged copy of the model."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .link import WeightSyncError
from .ranks import is_sharded

TILING = {"ROWS": 32, "COLUMNS": 64, "RANKS": 16, "num_warps": 2}  # of the kernel


@dataclass(frozen=True, eq=False)
class LoRAWeight:
    """A weight to send: base + scaling * lora_B @ lora_A (Hu et al. 2021, arXiv:2106.09685).

    `base` is [out, in], in any dtype, or a DTensor of this shape; it is only read. lora_A is [r, in] and lora_B
    [out, r], whole on every rank. If `transposed`, the base is [in, out], as in transformers' Conv1D.
    """

    base: torch.Tensor
    lora_A: torch.Tensor
    lora_B: torch.Tensor
    scaling: float
    transposed: bool = False

    def check(self, name: str) -> None:
        """Raise WeightSyncError, with this name, if the factors do not fit the base: the kernel would not notice."""
        outputs, inputs = reversed(self.base.shape) if self.transposed else self.base.shape
        factors, rank = (self.lora_A, self.lora_B), len(self.lora_A)
        if any(map(is_sharded, factors)):
            raise WeightSyncError(f"{name}: lora_A and lora_B must be whole on every rank, and not DTensors")
        if (shapes := [tuple(factor.shape) for factor in factors]) != [(rank, inputs), (outputs, rank)]:
            raise WeightSyncError(f"{name}: lora_A and lora_B are {shapes}, and not [r, {inputs}] and [{outputs}, r]")

    def merge(self, base: torch.Tensor) -> torch.Tensor:
        """`base` + scaling * lora_B @ lora_A in fp32: bit for bit what peft merges. Makes one new tensor."""
        return Merge(self, base).merged()


@dataclass(frozen=True, eq=False)
class Merge:
    """A merged weight, or some rows and columns of it, as a source of `BatchedCopy`."""

    weight: LoRAWeight
    base: torch.Tensor  # [m, n]: the rows and columns of the weight's base from `first_row` and `first_column` on
    first_row: int = 0
    first_column: int = 0

    def merged(self) -> torch.Tensor:
        """The merged weight [m, n] in fp32, a new tensor."""
        lora_A, lora_B, (rows, columns) = self.weight.lora_A.float(), self.weight.lora_B.float(), self._slices()
        with torch.autocast(self.base.device.type, enabled=False):
            delta = (lora_B @ lora_A).T[rows, columns] if self.weight.transposed else lora_B[rows] @ lora_A[:, columns]
        # Subtract -delta: where nothing has been learned yet it is +0, and a weight of -0 stays -0.
        delta = delta.mul_(-self.weight.scaling).add_(0.0)
        return torch.sub(self.base, delta, out=delta)

    def __call__(self, out: torch.Tensor) -> None:
        """Write the merged weight to `out`, rounded to its dtype. On a GPU, the merge takes no memory."""
        if out.device.type == "cuda":
            self._by_kernel(out)
        else:
            out.copy_(self.merged())

    def _slices(self) -> tuple[slice, slice]:
        begins = (self.first_row, self.first_column)
        return tuple(slice(begin, begin + size) for begin, size in zip(begins, self.base.shape, strict=True))

    def _by_kernel(self, out: torch.Tensor) -> None:
        left, right, (i, j) = self.weight.lora_B, self.weight.lora_A, self._slices()
        if self.weight.transposed:
            left, right = right.T, left.T
        (rows, columns), left, right = self.base.shape, left[i], right[:, j]  # the delta's factors: [m, r] and [r, n]
        strides = [stride for tensor in (self.base, left, right, out) for stride in tensor.stride()]
        _kernel()[(-(-columns // TILING["COLUMNS"]), -(-rows // TILING["ROWS"]))](
            *(self.base, left, right, out, -self.weight.scaling, rows, columns, right.shape[0], *strides),
            **TILING,
            enable_fp_fusion=False,  # torch rounds a product before it adds
        )


def map_tensors(function: Callable, held):
    """`function` of a tensor; a dictionary or LoRAWeight like this one, with `function` of each tensor in it."""
    if isinstance(held, dict):
        return {name: map_tensors(function, each) for name, each in held.items()}
    if isinstance(held, LoRAWeight):
        tensors = map(function, (held.base, held.lora_A, held.lora_B))
        return LoRAWeight(*tensors, held.scaling, held.transposed)
    return function(held)


@functools.cache
def _kernel():
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(
        base, left, right, out, factor, rows, columns, rank,
        base_row, base_column, left_row, left_rank, right_rank, right_column, out_row, out_column,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr,
    ):  # fmt: skip
        # Programs that run at the same time have the same rows, which lie together in memory.
        i = (tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
        j = (tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        delta = tl.zeros([ROWS, COLUMNS], tl.float32)
        for begin in range(0, rank, RANKS):
            k = begin + tl.arange(0, RANKS)
            a = tl.load(left + i * left_row + k[None, :] * left_rank, (i < rows) & (k < rank)[None, :], 0.0)
            b = tl.load(right + k[:, None] * right_rank + j * right_column, (k < rank)[:, None] & (j < columns), 0.0)
            delta = tl.dot(a.to(tl.float32), b.to(tl.float32), delta, input_precision="ieee")  # in the order of k
        inside = (i < rows) & (j < columns)
        # Loaded now, so that it takes no registers during the product.
        weight = tl.load(base + i * base_row + j * base_column, inside, 0.0).to(tl.float32)
        merged = weight - (delta * factor + 0.0)
        tl.store(out + i * out_row + j * out_column, merged.to(out.dtype.element_ty), inside)

    return kernel
