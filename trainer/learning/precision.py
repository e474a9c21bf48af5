"""The precision of weights. On a GPU, weights that learn are fp32 and compute in bf16; frozen ones are bf16."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from weight_sync.ranks import is_sharded


@contextmanager
def bf16_weights(model) -> Iterator[None]:
    """Inside, the model computes with bf16 copies of its fp32 weights. Gradients arrive at the fp32 weights, in fp32.
    Adapters stay fp32, since a merge wants them so; elsewhere autocast rounds them.

    Backward belongs inside as well: what gradient checkpointing computes again must find the copies.

    Autocast alone would leave the embeddings, the norms and so the residual stream in fp32: twice the memory, and a
    cast wherever a layer reads it. In bf16 it is as in the engine, and as FSDP2 computes (sharding.py).
    """
    slots = [
        (module._parameters, name, weight)
        for path, module in model.named_modules()
        for name, weight in module._parameters.items()
        if weight is not None and weight.dtype == torch.float32 and ".lora_" not in path
    ]
    copies = {weight: weight.bfloat16() for weight in dict.fromkeys(weight for *_, weight in slots)}  # tied ones once
    try:
        for parameters, name, weight in slots:
            parameters[name] = copies[weight]
        yield
    finally:
        for parameters, name, weight in slots:
            parameters[name] = weight


def freeze(model, dtype: torch.dtype, *learning: torch.nn.Module) -> None:
    """Stop all weights from learning, and cast them to `dtype`, except those of the modules `learning`."""
    kept = {parameter for module in learning for parameter in module.parameters()}
    for parameter in model.parameters():  # not buffers: rotary frequencies stay fp32
        if parameter not in kept:
            parameter.requires_grad_(False)
            if not is_sharded(parameter):  # a sharded model stays in the dtype that it was loaded in
                parameter.data = parameter.data.to(dtype)
