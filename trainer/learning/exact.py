"""The engine's arithmetic in the trainer: log-probabilities that are the engine's, bit for bit (docs/exact.md).

An engine with VLLM_BATCH_INVARIANT=1 gives a token the same bits whatever is beside it. Most of what transformers
computes has the engine's bits as it is: linear layers (by cuBLAS without split-K), silu(gate) * up, additions,
embeddings and LayerNorm. The rest runs here on vLLM's own kernels, each with a backward pass:

    row-parallel layers with TP=N, the sum of N products, in the order in which vLLM's all-reduce adds them
    mixtures of experts vLLM's router and its Triton kernel for fused experts (exact_mlp.py)
    layers with LoRA    one product with the merged weight, rounded as the sync rounds it
    RMSNorm             vLLM adds the residual and normalizes in one kernel, which gets the sum and zeros here
    rotary embedding    by vLLM's kernel, with the engine's table of cosines and sines in bf16
    attention           FlashAttention 3 for a head dimension of 128, else vLLM's Triton kernel
    log-probability     by the function of vLLM's sampler

The run checks that all this is exact, with every sampled token.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from weight_sync.lora import LoRAWeight, Merge

from .exact_mlp import compiled, is_plain_mixture, mixture, mlp
from .layout import shared_attention
from .logprobs import allowed_logits
from .multimodal import auto_class, learning_modules

FLASH_HEAD_DIM = 128  # with which FlashAttention 3 gives a token the same bits in decode and in a whole sequence
PAGE = 16  # tokens in a block of the Triton kernel's keys and values
TILE = 128  # the most tokens that the kernel takes at a time
KNOWN_LAYERS = torch.nn.Linear, torch.nn.Embedding, torch.nn.LayerNorm  # exact as transformers has them
ROW_PARALLEL = ("o_proj", "down_proj", "fc2", "out_proj")  # layers whose inputs vLLM divides among workers
VOCABULARY_PADDING = 64  # vLLM pads a vocabulary to a multiple of this
NORMS_WITHOUT_RESIDUAL = ("layers.0.input_layernorm", ".q_norm", ".k_norm")


@dataclass(frozen=True)
class GPU:
    """What a run depends on, of a GPU and its node."""

    capability: int  # as 90 for 9.0
    nccl: tuple[int, ...]  # the version that vLLM loads
    linked: int  # how many GPUs the node has, each linked with all others; 0 if they are not
    memory: int  # in bytes

    @property
    def nccl_version(self) -> str:
        return ".".join(map(str, self.nccl))

    @classmethod
    def here(cls) -> "GPU | None":
        """The GPU of this process; None on CPU."""
        from vllm.platforms import current_platform

        if not current_platform.is_cuda():
            return None
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
        from vllm.third_party import pynvml

        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()  # also GPUs that Ray hides
        nccl = tuple(map(int, NCCLLibrary().ncclGetVersion().split(".")))
        linked = count if current_platform.is_fully_connected(list(range(count))) else 0
        capability = current_platform.get_device_capability().to_int()
        return cls(capability, nccl, linked, current_platform.get_device_total_memory())


def match_engine() -> None:
    """Make vLLM's kernels and cuBLAS compute as in a batch-invariant engine: cuBLAS without split-K. Call this in the
    trainer's process before any CUDA computation."""
    os.environ["VLLM_BATCH_INVARIANT"] = "1"  # vLLM's C++ kernels read it as well
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    os.environ["CUBLASLT_WORKSPACE_SIZE"] = "1"
    _choose_kernels("cublaslt", split_k=False)


@contextmanager
def any_kernels() -> Iterator[None]:
    """For products whose bits no engine has: inside, cuBLAS chooses a kernel for each in 0.02 ms of the CPU's time.
    cuBLASLt takes 0.13 to 0.2 ms without the workspace that `match_engine` denies it."""
    _choose_kernels("cublas", split_k=True)
    try:
        yield
    finally:
        _choose_kernels("cublaslt", split_k=False)


def _choose_kernels(library: str, split_k: bool) -> None:
    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (split_k, split_k)
        torch.backends.cuda.preferred_blas_library(library)


def attention_backend(config) -> str:
    """vLLM's name for the attention that is exact in a model of this configuration."""
    return "FLASH_ATTN" if head_dim(config) == FLASH_HEAD_DIM else "TRITON_ATTN"


def head_dim(config) -> int:
    config = config.get_text_config()
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def missing_operation(config) -> str:
    """An operation of a model of this configuration that is not known to be exact, as words for a message; "" if all
    are known."""
    text = config.get_text_config()
    names = ("hidden_activation", "hidden_act", "activation_function")  # the first that is set counts
    activation = next((value for name in names if (value := getattr(text, name, None))), None)
    if activation not in ("silu", "relu"):
        return f"its activation {activation}"
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(text, name, None):
            return f"its soft-capping ({name})"
    with torch.device("meta"):
        language_model, head = learning_modules(auto_class(config).from_config(config))
    in_mixtures = set()
    for submodule in [*language_model.modules(), head]:
        cls = type(submodule)
        if hasattr(submodule, "experts"):
            known = _holds(is_plain_mixture, submodule)
            in_mixtures.update(submodule.modules())
        elif submodule in in_mixtures:
            continue
        elif cls.__name__.endswith("RMSNorm"):
            known = _holds(_is_plain_norm, cls)
        else:
            known = isinstance(submodule, KNOWN_LAYERS) or not list(submodule.parameters(recurse=False))
        if not known or (hasattr(submodule, "gate_proj") and activation != "silu"):
            return f"its {cls.__name__}"
        rotate = getattr(sys.modules[cls.__module__], "apply_rotary_pos_emb", None)
        if cls.__name__.endswith("Attention") and rotate and not _holds(_is_plain_rotation, rotate):
            return f"the rotary embedding of its {cls.__name__}"
    return ""


def _holds(probe: Callable, operation: Callable) -> bool:
    """The probe's answer; False if the operation has another form than the probe expects, which may raise anything."""
    try:
        return probe(operation)
    except Exception:
        return False


def _is_plain_norm(cls: type) -> bool:
    """Whether this RMSNorm is weight * (x / rms), rounded before it is weighted."""
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    norm = cls(16).bfloat16()
    torch.nn.init.uniform_(norm.weight, 0.5, 2)
    scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm(x).equal(norm.weight * scaled.bfloat16())


def _is_plain_rotation(rotate: Callable) -> bool:
    """Whether this function rotates queries and keys in pairs of dimensions i and i + D / 2, and all dimensions."""
    generator = torch.Generator().manual_seed(0)
    q, k, cos, sin = (torch.randn(1, 2, 3, 8, generator=generator) for _ in range(4))
    cos, sin = cos[:, 0], sin[:, 0]
    rotated = rotate(q, k, cos, sin)[0]
    swapped = torch.cat((-q[..., 4:], q[..., :4]), -1)
    return rotated.shape == q.shape and torch.allclose(rotated, q * cos[:, None] + swapped * sin[:, None])


def make_exact(module, workers: int) -> None:
    """Make this transformers model compute as an engine of so many workers (its TP) does. It must have no
    `missing_operation`."""
    from peft.tuners.lora import LoraLayer
    from transformers import AttentionInterface

    for name, submodule in module.named_modules():
        kind, modeling = type(submodule).__name__, sys.modules[type(submodule).__module__]
        parts = workers if name.endswith(ROW_PARALLEL) else 1
        if parts > 1 or isinstance(submodule, LoraLayer):
            submodule.forward = partial(_linear, submodule, parts)
        if kind.endswith("RMSNorm"):
            submodule.forward = partial(_norm, submodule, f".{name}".endswith(NORMS_WITHOUT_RESIDUAL))
        elif hasattr(submodule, "gate_proj"):
            submodule.forward = partial(mlp, submodule)
        elif hasattr(submodule, "experts"):
            submodule.forward = partial(mixture, submodule, workers)
        elif kind.endswith("RotaryEmbedding"):
            submodule.forward = partial(_positions, rotary_table(module.config, module.device))
        elif kind.endswith("Attention") and callable(rotate := getattr(modeling, "apply_rotary_pos_emb", None)):
            modeling.apply_rotary_pos_emb = rotate if isinstance(rotate, partial) else partial(_rotate, rotate)
        elif kind == "OPTAttention":  # it scales queries, which rounds them; the engine's kernel scales the products
            submodule.kernel_scaling, submodule.scaling = submodule.head_dim**-0.5, 1.0
    AttentionInterface.register("exact", shared_attention(attention))
    module.config._attn_implementation = "exact"


def make_plain(module, attention: str) -> None:
    """Undo `make_exact`. The model computes with this attention of transformers again."""
    for submodule in module.modules():
        if getattr(vars(submodule).get("forward"), "func", None) in (_linear, _norm, _positions, mlp, mixture):
            del submodule.forward
        if hasattr(submodule, "kernel_scaling"):
            submodule.scaling = vars(submodule).pop("kernel_scaling")
    module.config._attn_implementation = attention


@torch.no_grad()
def rotary_table(config, device: torch.device) -> torch.Tensor:
    """The engine's table [positions, D] of cosines and sines for a head dimension D, in bf16, as vLLM makes it."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    config = config.get_text_config()
    with torch.device(device), set_current_vllm_config(VllmConfig()):
        rope = get_rope(
            head_dim(config),
            max_position=config.max_position_embeddings,
            rope_parameters=config.rope_parameters,
            dtype=torch.bfloat16,
        )
    return rope.cos_sin_cache.to(device, torch.bfloat16)


def scores_of_logits(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    entropy: bool,
    allowed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `logprobs.scores_of_logits`, with the logarithm that the engine takes."""
    logprobs = TokenLogprobs.apply(logits, targets, temperature, allowed)
    with torch.no_grad():
        if not entropy:
            return logprobs, None
        lse = _log_sum_exp(logits, targets, logprobs, temperature)
        own = logits if allowed is None else allowed_logits(logits, targets, allowed)[1]
        return logprobs, compiled(_entropies)(own, lse, temperature)


def _linear(layer, parts: int, x: torch.Tensor) -> torch.Tensor:
    base = getattr(layer, "base_layer", layer)
    adapter = None, None, 0.0
    if base is not layer and not layer.disable_adapters:
        (lora_A,), (lora_B,), (scaling,) = layer.lora_A.values(), layer.lora_B.values(), layer.scaling.values()
        adapter = lora_A.weight, lora_B.weight, scaling
    return Linear.apply(x, base.weight, base.bias, *adapter, parts)


def _norm(norm, without_residual: bool, x: torch.Tensor) -> torch.Tensor:
    return RMSNorm.apply(x, norm.weight.to(x.dtype), norm.variance_epsilon, without_residual)


def _positions(table: torch.Tensor, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Replaces a rotary embedding's forward: `_rotate` gets these instead of cosines and sines."""
    return position_ids, table


def _rotate(
    original: Callable, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args, **options
):
    """Replaces `apply_rotary_pos_emb` in its module, where models that are not exact call it as well."""
    if cos.is_floating_point():
        return original(q, k, cos, sin, *args, **options)
    return Rotary.apply(q, k, cos, sin)


def attention(module, query, key, value, attention_mask, scaling: float, sliding_window: int | None = None, **_):
    """An attention function of transformers, causal: of queries [B, H, S, D], the last one is at the last key."""
    return Attention.apply(query, key, value, getattr(module, "kernel_scaling", scaling), sliding_window), None


class Linear(torch.autograd.Function):
    """x [..., k] by a weight [n, k] in bf16, to which an adapter [r, k], [n, r] in fp32 may be added. Of several
    `parts`, a worker each, every one rounds its product of a part of k. vLLM adds them in fp32, in the order of ranks.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, lora_A, lora_B, scaling, parts):
        x = x.to(weight.dtype)
        ctx.save_for_backward(x, weight, lora_A, lora_B)
        ctx.scaling = scaling
        merged, total = _merged(weight, lora_A, lora_B, scaling), 0
        if parts == 1:
            return torch.nn.functional.linear(x, merged, bias)
        for part, columns in zip(x.chunk(parts, -1), merged.chunk(parts, 1), strict=True):
            # Contiguous, as a worker has them: what cuBLAS does with a bias depends on it.
            total = total + torch.nn.functional.linear(part.contiguous(), columns.contiguous(), bias).float()
            bias = None  # the first worker adds it
        return total.to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight, lora_A, lora_B = ctx.saved_tensors
        rows, inputs = grad.flatten(0, -2), x.flatten(0, -2)
        grads = [None] * 7
        if ctx.needs_input_grad[0]:
            grads[0] = grad @ _merged(weight, lora_A, lora_B, ctx.scaling)
        if ctx.needs_input_grad[1]:
            grads[1] = rows.T @ inputs
        if ctx.needs_input_grad[2]:
            grads[2] = rows.sum(0)
        if lora_A is not None:  # never the gradient of the whole weight
            grads[3] = ctx.scaling * (rows @ lora_B.to(x.dtype)).T @ inputs
            grads[4] = ctx.scaling * rows.T @ (inputs @ lora_A.to(x.dtype).T)
        return tuple(grads)


def _merged(
    weight: torch.Tensor, lora_A: torch.Tensor | None, lora_B: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """The weight that the engine has."""
    if lora_A is None:
        return weight
    merged = torch.empty_like(weight)
    Merge(LoRAWeight(weight, lora_A, lora_B, scaling), weight)(merged)
    return merged


class RMSNorm(torch.autograd.Function):
    """RMSNorm of x [..., n] in bf16, with a weight [n]."""

    @staticmethod
    def forward(ctx, x, weight, eps, without_residual):
        normed = rms_norm_kernel(x, weight, eps, without_residual)
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return normed

    @staticmethod
    def backward(ctx, grad):
        return *compiled(_norm_gradients)(grad, *ctx.saved_tensors, ctx.eps), None, None


class Rotary(torch.autograd.Function):
    """Rotary embedding of queries [B, H, S, D] and keys [B, K, S, D] at positions [1 or B, S] or, of M-RoPE,
    [3, 1 or B, S], by a `rotary_table`."""

    @staticmethod
    def forward(ctx, q, k, positions, table):
        ctx.save_for_backward(positions, table)
        return rotary_kernel(q, k, positions, table)

    @staticmethod
    def backward(ctx, grad_q, grad_k):
        positions, table = ctx.saved_tensors
        cos, sin = table.chunk(2, -1)
        return *rotary_kernel(grad_q, grad_k, positions, torch.cat((cos, -sin), -1)), None, None


class Attention(torch.autograd.Function):
    """Causal attention [B, S, H, D] of queries [B, H, S, D], at the last S of the positions of keys and values
    [B, K, L, D]."""

    @staticmethod
    def forward(ctx, q, k, v, scale, window):
        q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in (q, k, v))
        out, lse = attention_kernel(q, k, v, scale, window)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.window = scale, window
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        grads = attention_backward_kernel(grad.contiguous(), q, k, v, out, lse, ctx.scale, ctx.window)
        return *(tensor.transpose(1, 2) for tensor in grads), None, None


class TokenLogprobs(torch.autograd.Function):
    """Log-probabilities [N] of targets [N], by logits [N, V] at a temperature, among the allowed tokens or all."""

    @staticmethod
    def forward(ctx, logits, targets, temperature, allowed=None):
        ids = None if allowed is None else allowed_logits(logits, targets, allowed)[0]
        logprobs = logprob_kernel(logits, targets, temperature, ids)
        ctx.save_for_backward(logits, targets, logprobs, allowed)
        ctx.temperature = temperature
        return logprobs

    @staticmethod
    def backward(ctx, grad):
        logits, targets, logprobs, allowed = ctx.saved_tensors
        lse = _log_sum_exp(logits, targets, logprobs, ctx.temperature)
        ids, own = (None, logits) if allowed is None else allowed_logits(logits, targets, allowed)
        grad = grad / ctx.temperature  # a tensor of its own: for the view that autograd gives, torch compiles again
        grads = compiled(_softmax_gradient)(own, lse, grad, ctx.temperature)
        if ids is not None:
            grads = torch.zeros_like(logits).scatter_(1, ids, grads)
        own = -logprobs.expm1() * grad  # of the target: bf16 would round 1 - p to 0 for a p near 1
        grads.scatter_(1, targets[:, None], own[:, None].to(grads.dtype))
        return grads, None, None, None


def _log_sum_exp(
    logits: torch.Tensor, targets: torch.Tensor, logprobs: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Of each row [N] of logits [N, V], by the log-probabilities [N] of targets [N]."""
    return logits.gather(1, targets[:, None])[:, 0].float() / temperature - logprobs


def _softmax_gradient(logits: torch.Tensor, lse: torch.Tensor, grad: torch.Tensor, temperature: float) -> torch.Tensor:
    """The gradient of logits [N, V], by the gradient of log-probabilities [N] over the temperature."""
    probabilities = (logits.float() / temperature - lse[:, None]).exp()
    return (-probabilities * grad[:, None]).to(logits.dtype)


def _norm_gradients(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    normed, weighted_grad = x.float() * rstd, grad.float() * weight.float()
    x_grad = rstd * (weighted_grad - normed * (weighted_grad * normed).mean(-1, keepdim=True))
    weight_grad = (grad.float() * normed).flatten(0, -2).sum(0)
    return x_grad.to(x.dtype), weight_grad.to(weight.dtype)


def _entropies(logits: torch.Tensor, lse: torch.Tensor, temperature: float) -> torch.Tensor:
    log_softmax = logits.float() / temperature - lse[:, None]
    return -(log_softmax.exp() * log_softmax).sum(-1)


# vLLM's kernels, for which tests/test_exact.py substitutes torch's arithmetic.


def rms_norm_kernel(x: torch.Tensor, weight: torch.Tensor, eps: float, without_residual: bool) -> torch.Tensor:
    if without_residual:
        from vllm.model_executor.determinism.batch_invariant import rms_norm_batch_invariant

        return rms_norm_batch_invariant(x, weight, eps)
    from vllm import _custom_ops as ops

    normed = torch.zeros_like(x)
    ops.fused_add_rms_norm(normed, x.data, weight, eps)  # in place: x becomes 0 + x, which autograd need not know
    return normed


def rotary_kernel(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    from vllm import _custom_ops as ops

    batch, _, length, dim = q.shape
    positions = positions.expand(*positions.shape[:-2], batch, length).flatten(-2)
    rotated = [tensor.transpose(1, 2).reshape(batch * length, -1).clone() for tensor in (q, k)]
    if positions.dim() > 1:  # M-RoPE: three for each token, which are equal in a text
        from vllm.model_executor.layers.rotary_embedding.mrope import triton_mrope

        cos, sin = table[positions].chunk(2, -1)
        triton_mrope(*rotated, cos, sin, [dim // 2, 0, 0], dim, dim, False, True)  # in place
    else:
        ops.rotary_embedding(positions, *rotated, dim, table, True)  # in place
    return tuple(tensor.view(batch, length, -1, dim).transpose(1, 2) for tensor in rotated)


def attention_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output [B, S, H, D] of queries [B, S, H, D], and the log-sum-exp [H, B * S] if the kernel returns it. The
    queries are at the last S of the positions of keys and values [B, L, K, D]."""
    (batch, length, _, dim), key_length = q.shape, k.shape[1]
    window_size = (window - 1, 0) if window else (-1, -1)
    if dim == FLASH_HEAD_DIM:
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        out, lse = flash_attn_varlen_func(
            *(tensor.flatten(0, 1) for tensor in (q, k, v)),
            max_seqlen_q=length,
            cu_seqlens_q=_bounds(batch, length, q.device),
            max_seqlen_k=key_length,
            cu_seqlens_k=_bounds(batch, key_length, q.device),
            return_softmax_lse=True,
            softmax_scale=scale,
            causal=True,
            window_size=list(window_size),
            fa_version=3,
            num_splits=1,
        )
        return out.view_as(q), lse
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    pages = -(-key_length // PAGE)
    padding = (0, 0, 0, 0, 0, pages * PAGE - key_length)
    k, v = (torch.nn.functional.pad(t, padding).view(-1, PAGE, *t.shape[2:]) for t in (k, v))
    # A tile may end behind the last page, and the kernel reads the block table up to there.
    table = torch.arange(batch * pages + TILE // PAGE, dtype=torch.int32, device=q.device)[: batch * pages]
    out = torch.empty_like(q)
    unified_attention(
        q=q.flatten(0, 1),
        k=k,
        v=v,
        out=out.flatten(0, 1),
        cu_seqlens_q=_bounds(batch, length, q.device),
        max_seqlen_q=length,
        seqused_k=torch.full((batch,), key_length, dtype=torch.int32, device=q.device),
        max_seqlen_k=key_length,
        softmax_scale=scale,
        causal=True,
        window_size=window_size,
        block_table=table.view(batch, pages),
        softcap=0.0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
    )
    return out, None


def attention_backward_kernel(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries [B, S, H, D], keys and values [B, L, K, D], by torch's FlashAttention."""
    (batch, length), key_length = q.shape[:2], k.shape[1]
    options = {"scale": scale} | ({"window_size_left": window - 1, "window_size_right": 0} if window else {})
    bounds = _bounds(batch, length, q.device), _bounds(batch, key_length, q.device)
    arguments = (*bounds, length, key_length, 0.0, True)  # no dropout, causal
    grad, q, k, v, out = (tensor.flatten(0, 1) for tensor in (grad, q, k, v, out))
    if lse is None:  # the Triton kernel does not return it
        _, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *arguments, False, **options)
    random_state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, so unused
    grads = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse.contiguous(), *arguments, random_state, random_state[:1], **options
    )
    return tuple(tensor.unflatten(0, (batch, -1)) for tensor in grads)


def logprob_kernel(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, ids: torch.Tensor | None = None
) -> torch.Tensor:
    """Log-probabilities [N] of targets [N], by logits [N, V]; among the tokens with these ids [N, W], if given."""
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    if temperature != 1 or ids is not None:
        logits = logits.to(torch.float32, copy=True)
        requests = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)  # all rows have one temperature
        apply_temperature(logits, requests, torch.tensor([temperature], device=logits.device))  # in place
        if ids is not None:  # the engine adds up the whole vocabulary as well
            kept = logits.gather(1, ids)
            logits.fill_(-torch.inf).scatter_(1, ids, kept)
    elif unaligned := -logits.shape[1] % VOCABULARY_PADDING:
        # The kernel's order of additions depends on the distance of two rows, which in the engine includes padding.
        logits = torch.nn.functional.pad(logits, (0, unaligned))[:, :-unaligned]
    return compute_token_logprobs(logits, targets[:, None])[:, 0]


def _bounds(batch: int, length: int, device: torch.device) -> torch.Tensor:
    """Where each of the equally long sequences begins and ends in a flat batch: [batch + 1]."""
    return torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)
