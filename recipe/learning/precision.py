"""The precision of weights. On a GPU, those that learn are fp32 and compute in bf16; frozen ones are bf16."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def bf16_weights(model) -> Iterator[None]:
    """The model has bf16 copies of its fp32 weights, made once. Their gradients are added to the weights' own, in fp32.

    Backward belongs inside: what gradient checkpointing computes again must find the copies.

    Autocast alone would leave the embeddings, the norms and so the residual stream in fp32: twice the memory, and
    casts wherever a layer reads it. In bf16 it is as in the engine, and as FSDP2 computes (sharding.py).
    """
    places = [
        (module._parameters, name, weight)
        for module in model.modules()
        for name, weight in module._parameters.items()
        if weight is not None and weight.dtype == torch.float32
    ]
    copies = {weight: weight.bfloat16() for weight in dict.fromkeys(weight for *_, weight in places)}  # tied ones once
    try:
        for parameters, name, weight in places:
            parameters[name] = copies[weight]
        yield
    finally:
        for parameters, name, weight in places:
            parameters[name] = weight


def freeze(model, dtype: torch.dtype, but: str | None = None) -> None:
    """No weights learn from now on, but for those of one submodule. They have this dtype."""
    for name, parameter in model.named_parameters():  # not buffers: rotary frequencies stay fp32
        if name.rpartition(".")[0] != but:
            parameter.requires_grad_(False)
            if parameter.dtype != dtype:  # shards were loaded so
                parameter.data = parameter.data.to(dtype)
