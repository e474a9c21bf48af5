"""The engine's MLPs and mixtures of experts in the trainer, bit for bit (docs/exact.md).

A mixture's router is a linear layer. vLLM's kernels choose the experts by its logits, and compute them in its
batch-invariant mode with one tile for all sizes of a batch.
"""

from collections.abc import Callable
from copy import deepcopy
from functools import cache, partial

import torch
from torch.nn.functional import grouped_mm

SMALL = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 16)  # a probe's sizes
SMALL |= {"num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2}


def mlp(module, x: torch.Tensor) -> torch.Tensor:
    """Replaces the forward of a gated MLP."""
    return module.down_proj(SwiGLU.apply(module.gate_proj(x), module.up_proj(x)))


def mixture(module, workers: int, x: torch.Tensor) -> torch.Tensor:
    """Replaces the forward of a mixture of experts."""
    router, experts, rows = module.gate, module.experts, x.flatten(0, -2)
    logits = torch.nn.functional.linear(rows, router.weight)
    weights, chosen = Routing.apply(logits, router.top_k, _renormalizes(router))
    return Experts.apply(rows, experts.gate_up_proj, experts.down_proj, weights, chosen, workers).view_as(x)


@torch.no_grad()
def is_plain_mixture(module) -> bool:
    """Whether a small mixture of this kind adds up its experts, silu(gate) * up each, with weights by the softmax of
    its router's logits. May raise anything if it has another form."""
    config, generator = deepcopy(module.experts.config), torch.Generator().manual_seed(0)
    for name, size in SMALL.items():
        setattr(config, name, size)
    config._experts_implementation = "eager"
    with torch.device("meta"):
        module = type(module)(config).eval()
    for tensor in module.to_empty(device="cpu").state_dict().values():
        tensor.normal_(generator=generator)
    router, experts, x = module.gate, module.experts, torch.randn(5, config.hidden_size, generator=generator)
    probabilities = torch.nn.functional.linear(x, router.weight).softmax(-1)
    weights, chosen = probabilities.topk(router.top_k)
    weights = weights / weights.sum(-1, keepdim=True) if _renormalizes(router) else weights
    activated = _swiglu(*(x @ experts.gate_up_proj.mT).chunk(2, -1))
    weights = torch.zeros_like(probabilities).scatter(1, chosen, weights)
    expected = torch.einsum("te,etn->tn", weights, activated @ experts.down_proj.mT)
    return torch.allclose(module(x[None])[0], expected, rtol=1e-4, atol=1e-3)


def _renormalizes(router) -> bool:
    """Whether the weights of a token's experts add up to 1."""
    return getattr(router, "norm_topk_prob", True)


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up, with the rounding between the two: forward and backward in a kernel each."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return compiled(_swiglu)(gate, up)

    @staticmethod
    def backward(ctx, grad):
        return compiled(_swiglu_gradients)(grad, *ctx.saved_tensors)


class Routing(torch.autograd.Function):
    """The weights [N, k] in fp32 of the k experts that logits [N, E] choose, and the experts [N, k]."""

    @staticmethod
    def forward(ctx, logits, k, renormalizes):
        weights, chosen = routing_kernel(logits, k, renormalizes)
        ctx.save_for_backward(logits, weights, chosen)
        ctx.mark_non_differentiable(chosen)
        ctx.renormalizes = renormalizes
        return weights, chosen

    @staticmethod
    def backward(ctx, grad, _):
        logits, weights, chosen = ctx.saved_tensors
        chosen, weighted = chosen.long(), weights * grad
        if ctx.renormalizes:  # a softmax over the chosen ones alone
            probabilities = torch.zeros_like(logits, dtype=weights.dtype).scatter_(1, chosen, weights)
        else:
            probabilities = logits.to(weights.dtype).softmax(-1)
        grads = -probabilities * weighted.sum(-1, keepdim=True)
        return grads.scatter_add_(1, chosen, weighted).to(logits.dtype), None, None


class Experts(torch.autograd.Function):
    """The weighted sum [N, n] of what k chosen experts make of each row of x [N, n], by fused weights [E, 2 * i, n] and
    [E, n, i]. Of several `parts`, a worker each, every one has a part of i and rounds its sum. vLLM adds these in fp32,
    in the order of ranks.
    """

    @staticmethod
    def forward(ctx, x, gate_up, down, weights, chosen, parts):
        ctx.save_for_backward(x, gate_up, down, weights, chosen)
        if parts == 1:
            return experts_kernel(x, gate_up, down, weights, chosen)
        total, gate_ups = 0, gate_up.unflatten(1, (2, -1)).chunk(parts, 2)
        for own_gate_up, own_down in zip(gate_ups, down.chunk(parts, 2), strict=True):
            own = own_gate_up.flatten(1, 2), own_down.contiguous()
            total = total + experts_kernel(x, *own, weights, chosen).float()
        return total.to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, gate_up, down, weights, chosen = ctx.saved_tensors
        experts, order = chosen.flatten().sort(stable=True)
        numbers = torch.arange(len(down), dtype=experts.dtype, device=experts.device)
        product = partial(grouped_mm, offs=torch.searchsorted(experts, numbers, right=True, out_int32=True))
        tokens = order // chosen.shape[1]
        inputs, outputs = x[tokens], grad[tokens]
        weight_grads, weighted, projected_grads = compiled(_expert_gradients)(
            product(outputs, down), product(inputs, gate_up.mT), weights.flatten()[order, None]
        )
        grads = [None] * 6
        if ctx.needs_input_grad[1]:
            grads[1] = product(projected_grads.mT, inputs)
        if ctx.needs_input_grad[2]:
            grads[2] = product(outputs.mT, weighted)
        grads[0] = _scattered(product(projected_grads, gate_up), order).unflatten(0, chosen.shape).sum(1)
        grads[3] = _scattered(weight_grads, order).view_as(weights)
        return tuple(grads)


def _scattered(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(rows).index_copy_(0, order, rows)


def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate) * up


def _swiglu_gradients(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    fp32_gate, sigmoid = gate.float(), gate.float().sigmoid()
    gate_grad = grad * up * sigmoid * (1 + fp32_gate * (1 - sigmoid))
    return gate_grad.to(gate.dtype), (grad * fp32_gate * sigmoid).to(up.dtype)


def _expert_gradients(
    grad: torch.Tensor, projected: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of weights [S, 1] as [S] and of projections [S, 2 * i], and weighted activations [S, i], by a
    gradient [S, i] of activations that are not weighted."""
    gate, up = projected.chunk(2, -1)
    activated = _swiglu(gate, up)
    projected_grads = torch.cat(_swiglu_gradients((grad * weights).to(grad.dtype), gate, up), -1)
    return (grad.float() * activated).sum(-1), (activated * weights).to(activated.dtype), projected_grads


@cache
def compiled(function: Callable) -> Callable:
    """The function, compiled on a GPU, where it then reads and writes its large tensors once."""
    if not torch.cuda.is_available():
        return function
    options = {"emulate_precision_casts": True}  # round where the function does: inductor would stay in fp32
    options["triton.mix_order_reduction_non_strict_mode"] = True  # else it compiles again for large batches
    return torch.compile(function, dynamic=True, options=options)


# vLLM's kernels, for which tests/test_exact.py substitutes torch's arithmetic.


def routing_kernel(logits: torch.Tensor, k: int, renormalizes: bool) -> tuple[torch.Tensor, torch.Tensor]:
    from vllm.model_executor.layers.fused_moe import fused_topk

    return fused_topk(logits, logits, k, renormalizes)[:2]


def experts_kernel(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    from vllm.model_executor.layers.fused_moe import fused_experts

    return fused_experts(x.contiguous(), gate_up, down, weights, chosen)
