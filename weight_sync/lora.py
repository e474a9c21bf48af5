"""Weights with LoRA adapters, which travel merged: nobody ever holds a merged copy of the model."""

from dataclasses import dataclass

import torch


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

    @property
    def shape(self) -> torch.Size:
        return self.base.shape

    def numel(self) -> int:
        return self.base.numel()

    def merge(self, base: torch.Tensor, first_row: int = 0) -> torch.Tensor:
        """`base`, which holds rows of this weight from the first one on, merged in fp32: bit for bit what peft merges.

        Makes one new tensor.
        """
        lora_A, lora_B, end = self.lora_A.float(), self.lora_B.float(), first_row + base.shape[0]
        delta = (lora_B @ lora_A).T[first_row:end] if self.transposed else lora_B[first_row:end] @ lora_A
        # Subtract the opposite: where nothing has been learned yet it is +0, and a weight of -0 stays what it was.
        delta = delta.mul_(-self.scaling).add_(0.0)
        return torch.sub(base, delta, out=delta)


def materialized(weight: torch.Tensor | LoRAWeight) -> torch.Tensor:
    """The tensor itself, or the merged weight [out, in] in fp32."""
    return weight.merge(weight.base) if isinstance(weight, LoRAWeight) else weight
