"""The operations of an exact trainer, with torch's arithmetic in the place of vLLM's kernels.

The kernels themselves are seen on a GPU alone, by every run with --exact: docs/exact.md has what they gave.

pytest tests/test_exact.py
"""

import math
from types import SimpleNamespace

import pytest
import torch
from test_learning import CPU, MODELS, config, rollouts, write_model
from transformers import AutoConfig
from transformers.models.llama import modeling_llama

import rlhf_colocate
from recipe.errors import RunError
from recipe.learning import exact
from recipe.learning.grpo import GRPOLearner
from recipe.learning.model import Model
from recipe.rollouts.exact_engine import settle_exactness
from recipe.run.checkpoint import replace_flags

EXACT = {"Llama": MODELS["Llama"], "Qwen2": MODELS["Llama"], "Mistral": MODELS["Llama"]}
EXACT |= {"Qwen3": {**MODELS["Llama"], "head_dim": 32}, "OPT": MODELS["OPT"]}


@pytest.fixture(autouse=True)
def torch_arithmetic(monkeypatch):
    """vLLM's kernels want a GPU."""

    def rms_norm(x, weight, eps, first):
        x = x.float()
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight).to(weight.dtype)

    def rotate(q, k, positions, table):
        cos, sin = (half.repeat(1, 2)[positions][:, None] for half in table.chunk(2, -1))
        halves = (torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1) for x in (q, k))
        return tuple(x * cos + half * sin for x, half in zip((q, k), halves, strict=True))

    def attend(q, k, v, scale, window):
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        out = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=seen, scale=scale, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None

    def attend_backward(grad, q, k, v, out, lse, scale, window):
        with torch.enable_grad():
            own = [x.detach().requires_grad_() for x in (q, k, v)]
            attend(*own, scale, window)[0].backward(grad)
        return tuple(x.grad for x in own)

    def table(config, device):
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        positions = torch.arange(config.max_position_embeddings)[None]
        cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
        half = cos.shape[-1] // 2
        return torch.cat((cos[0, :, :half], sin[0, :, :half]), -1)

    monkeypatch.setattr(exact, "rms_norm_kernel", rms_norm)
    monkeypatch.setattr(exact, "rotary_kernel", rotate)
    monkeypatch.setattr(exact, "attention_kernel", attend)
    monkeypatch.setattr(exact, "attention_backward_kernel", attend_backward)
    monkeypatch.setattr(exact, "rotary_table", table)
    monkeypatch.setattr(
        exact,
        "logprob_kernel",
        lambda logits, targets, temperature: (
            (logits.float() / temperature).log_softmax(-1).gather(1, targets[:, None])[:, 0]
        ),
    )


@pytest.mark.parametrize("architecture", EXACT)
def test_exact_model_computes_what_transformers_computes_and_has_its_gradients(tmp_path, architecture):
    path = write_model(architecture, tmp_path, **EXACT[architecture])
    plain, exactly = (GRPOLearner(path, config(temperature=0.7), CPU) for _ in range(2))
    batch = rollouts(plain)
    exactly.make_exact("on")
    gradients = []
    for learner in (plain, exactly):
        logprobs, entropies = learner.model.score(batch, 8, entropy=True)
        logprobs.square().sum().backward()
        gradients.append((logprobs, entropies, {n: p.grad for n, p in learner.model.module.named_parameters()}))
    (logprobs, entropies, expected), (own, own_entropies, found) = gradients
    torch.testing.assert_close(own, logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(own_entropies, entropies, atol=1e-5, rtol=1e-5)
    for name, gradient in expected.items():
        if architecture == "OPT" and name.endswith("k_proj.bias"):
            continue  # 0 but for rounding: it moves all scores of a query alike
        assert gradient.abs().max() > 0, name
        assert (found[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6, name


def test_queries_of_opt_are_not_rounded_before_the_kernel_scales_their_products(tmp_path, monkeypatch):
    model = Model(write_model("OPT", tmp_path, **EXACT["OPT"]), config(), CPU)
    attention, attend = model.module.model.decoder.layers[0].self_attn, exact.attention_kernel
    projected, taken = [], []
    attention.q_proj.register_forward_hook(lambda module, inputs, output: projected.append(output))
    monkeypatch.setattr(exact, "attention_kernel", lambda *args: taken.append(args) or attend(*args))
    for _ in range(2):  # a run calls it again after its check
        model.make_exact(True)
    model.module.bfloat16()(torch.arange(2, 20)[None])
    queries, _, _, scale, _ = taken[0]
    assert queries.flatten(2).equal(projected[0]) and scale == attention.head_dim**-0.5


@pytest.mark.parametrize("architecture", ["Llama", "OPT"])
def test_model_is_plain_again_where_it_is_told_so(tmp_path, architecture):
    model = Model(write_model(architecture, tmp_path, **EXACT[architecture]), config(), CPU)
    ids = torch.arange(2, 20)[None]
    with torch.no_grad():
        before = model.module(ids).logits
        model.make_exact(True)
        assert model.module.config._attn_implementation == "exact"
        model.make_exact(False)
        assert model.module(ids).logits.equal(before)
    assert not [name for name, submodule in model.module.named_modules() if "forward" in vars(submodule)]


def test_another_model_of_the_family_stays_plain(tmp_path):
    path = write_model("Llama", tmp_path, **EXACT["Llama"])
    other = Model(path, config(), CPU)
    ids = torch.arange(2, 20)[None]
    with torch.no_grad():
        before = other.module(ids).logits
        Model(path, config(), CPU).make_exact(True)
        assert other.module(ids).logits.equal(before)


@pytest.mark.parametrize(
    ("architecture", "missing"),
    [
        *((name, "") for name in EXACT),
        ("Gemma2", "its activation gelu_pytorch_tanh"),
        ("Cohere", "CohereAttention"),
    ],
)
def test_operation_that_is_not_known_is_named(tmp_path, architecture, missing):
    options = (MODELS | EXACT)[architecture]
    found = exact.missing_operation(AutoConfig.from_pretrained(write_model(architecture, tmp_path, **options)))
    assert found.endswith(missing) and bool(found) == bool(missing)


@pytest.mark.parametrize(
    ("architecture", "options", "missing"),
    [
        ("qwen3_5_text", {"layer_types": ["full_attention"]}, "its Qwen3_5RMSNorm"),  # without `variance_epsilon`
        ("qwen3_5_text", {"layer_types": ["linear_attention"]}, "its Qwen3_5GatedDeltaNet"),
        ("falcon_mamba", {}, "its FalconMambaMixer"),  # without heads, too
    ],
)
def test_module_of_another_kind_is_a_reason_and_no_crash(architecture, options, missing):
    config = AutoConfig.for_model(architecture, num_hidden_layers=1, **options)
    assert exact.missing_operation(config) == missing


def test_whatever_a_probe_raises_the_operation_is_named(monkeypatch):
    def raises(*_):
        raise AssertionError

    config = AutoConfig.for_model("llama", num_hidden_layers=1)
    assert exact.missing_operation(config) == ""
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", raises)
    assert exact.missing_operation(config) == "its LlamaRMSNorm"
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", raises)
    assert exact.missing_operation(config) == "the rotary embedding of its LlamaAttention"


def test_gated_relu_is_not_known(tmp_path):
    config = AutoConfig.from_pretrained(write_model("Llama", tmp_path, **EXACT["Llama"]))
    config.hidden_act = "relu"
    assert exact.missing_operation(config) == "its LlamaMLP"


@pytest.mark.parametrize("probability", [0.5, 0.995, 0.9999])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradient_of_a_confident_token_in_bf16_is_that_of_fp32(probability, temperature):
    gap = temperature * math.log(probability / (1 - probability) * 255)
    logits = torch.zeros(1, 256, dtype=torch.bfloat16)
    logits[0, 3] = gap
    logits, target = logits.requires_grad_(), torch.tensor([3])
    exact.TokenLogprobs.apply(logits, target, temperature).backward(torch.ones(1))
    own = logits.detach().float().requires_grad_()
    (own / temperature).log_softmax(-1)[0, 3].backward()
    torch.testing.assert_close(logits.grad.float(), own.grad, atol=0, rtol=2**-8)


@pytest.mark.parametrize(
    ("sizes", "backend"),
    [
        ({"hidden_size": 256, "num_attention_heads": 2}, "FLASH_ATTN"),
        ({"hidden_size": 256, "num_attention_heads": 4}, "TRITON_ATTN"),
        ({"hidden_size": 256, "num_attention_heads": 4, "head_dim": 128}, "FLASH_ATTN"),
    ],
)
def test_attention_that_is_exact_depends_on_the_head_dimension(sizes, backend):
    assert exact.attention_backend(AutoConfig.for_model("llama", **sizes)) == backend


def test_token_that_differs_is_an_error_or_said_once(tmp_path, capsys):
    from dataclasses import replace

    from recipe.errors import MismatchError

    learner = GRPOLearner(write_model("Llama", tmp_path, **EXACT["Llama"]), config(), CPU)
    learner.make_exact("on")
    batch = rollouts(learner)
    assert learner.learn(batch)["logprobs/different_tokens"] == 0
    wrong = rollouts(learner)
    shifted = list(wrong[2].logprobs)
    shifted[0] += 1e-6
    wrong[2] = replace(wrong[2], logprobs=shifted)
    with pytest.raises(MismatchError, match=r"--exact on: at step 2 1 of .* token 0 of completion 2 by "):
        learner.learn(wrong)
    learner.make_exact("auto")
    for _ in range(2):
        assert learner.learn(wrong)["logprobs/different_tokens"] >= 1
    assert capsys.readouterr().out.count("importance weights correct for that") == 1


def test_attention_that_was_asked_for_is_used(tmp_path):
    model, said = write_model("Llama", tmp_path, **EXACT["Llama"]), []
    for attention, exactly in ((None, "auto"), ("eager", "off")):
        args = rlhf_colocate.Arguments(tensor_parallel_size=1, attention=attention)
        args = settle_exactness(SimpleNamespace(say=said.append), args, model, 90)
        assert args.exact == exactly
    assert said == ["not exact: trainers would not use the attention that was asked for (--attention)"]
    with pytest.raises(RunError, match="--exact on: trainers would not use the attention"):
        settle_exactness(None, replace_flags(args, exact="on"), model, 90)
