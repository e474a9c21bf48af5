"""The operations of an exact trainer, with torch's arithmetic in the place of vLLM's kernels.

The kernels themselves are seen on a GPU alone, by every run with --exact: docs/exact.md has what they gave.

pytest tests/test_exact.py
"""

import math
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import arguments_of
from learners import CPU, MODELS, config, rollouts, write_model
from transformers import AutoConfig, FalconMambaConfig
from transformers.models.llama import modeling_llama

import train_grpo
from trainer.errors import MismatchError, RunError
from trainer.learning import exact, exact_mlp
from trainer.learning.grpo import GRPOLearner
from trainer.learning.model import Model
from trainer.learning.policy import Proof
from trainer.rollouts.exactness import settle_exactness
from trainer.rollouts.extensions import scores_of_dense_rows
from weight_sync.lora import LoRAWeight

pytestmark = pytest.mark.usefixtures("torch_arithmetic")
EXACT = {"Llama": MODELS["Llama"], "Qwen2": MODELS["Llama"], "Mistral": MODELS["Llama"]}
EXACT |= {"Qwen3": {**MODELS["Llama"], "head_dim": 32}, "OPT": MODELS["OPT"]}
MOE = {"num_experts": 6, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
EXACT |= {"Mixtral": {**MODELS["Llama"], "num_local_experts": 6}, "Qwen3Moe": {**EXACT["Qwen3"], **MOE}}


@pytest.mark.parametrize(("adapters", "workers"), [({}, 1), ({}, 2), ({"lora_rank": 4}, 4)])
@pytest.mark.parametrize("architecture", EXACT)
def test_exact_model_computes_what_transformers_computes_and_has_its_gradients(
    tmp_path, architecture, adapters, workers
):
    path = write_model(architecture, tmp_path, **EXACT[architecture])
    proofs = Proof(), Proof(exact="on", workers=workers)
    plain, exactly = (GRPOLearner(path, config(temperature=0.7, **adapters), CPU, proof=proof) for proof in proofs)
    batch, gradients = rollouts(plain), []
    for learner in (plain, exactly):
        torch.manual_seed(1)
        for parameter in learner.model.adapters:
            torch.nn.init.normal_(parameter, std=0.1)
        logprobs, entropies = learner.model.score(batch, 8, entropy=True)
        logprobs.square().sum().backward()
        named = {name: p for name, p in learner.model.module.named_parameters() if p.requires_grad}
        gradients.append((logprobs, entropies, {name: p.grad for name, p in named.items()}))
    (logprobs, entropies, expected), (own, own_entropies, found) = gradients
    torch.testing.assert_close(own, logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(own_entropies, entropies, atol=1e-5, rtol=1e-5)
    for name, gradient in expected.items():
        if architecture == "OPT" and name.endswith("k_proj.bias"):
            continue  # 0 but for rounding: it moves all scores of a query alike
        assert found[name].dtype == gradient.dtype
        assert gradient.abs().max() > 0, name
        assert (found[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6, name


def test_queries_of_opt_are_not_rounded_before_scaling(tmp_path, monkeypatch):
    model = Model(write_model("OPT", tmp_path, **EXACT["OPT"]), config(), CPU)
    attention, attend = model.module.model.decoder.layers[0].self_attn, exact.attention_kernel
    projected, taken = [], []
    attention.q_proj.register_forward_hook(lambda module, inputs, output: projected.append(output))
    monkeypatch.setattr(exact, "attention_kernel", lambda *args: taken.append(args) or attend(*args))
    for _ in range(2):
        model.make_exact(1)
    model.module.bfloat16()(torch.arange(2, 20)[None])
    queries, _, _, scale, _ = taken[0]
    assert queries.flatten(2).equal(projected[0]) and scale == attention.head_dim**-0.5


@pytest.mark.parametrize(("architecture", "divided"), [("Llama", "down_proj o_proj"), ("OPT", "fc2 out_proj")])
def test_layers_whose_inputs_an_engine_divides_are_added_up_in_parts(tmp_path, monkeypatch, architecture, divided):
    model = Model(write_model(architecture, tmp_path, **EXACT[architecture]), config(), CPU)
    names, taken = {parameter: name for name, parameter in model.module.named_parameters()}, []
    apply = exact.Linear.apply
    monkeypatch.setattr(exact.Linear, "apply", lambda *args: taken.append((args[1], args[-1])) or apply(*args))
    model.make_exact(2)
    model.module(torch.arange(2, 20)[None])
    in_parts = sorted(names[weight].split(".")[-2] for weight, parts in taken if parts == 2)
    assert in_parts == sorted(2 * divided.split())  # in both blocks


@pytest.mark.parametrize("architecture", ["Llama", "OPT"])
def test_model_is_plain_again_where_it_is_told_so(tmp_path, architecture):
    model = Model(write_model(architecture, tmp_path, **EXACT[architecture]), config(), CPU)
    ids = torch.arange(2, 20)[None]
    with torch.no_grad():
        before = model.module(ids).logits
        model.make_exact(2)
        assert model.module.config._attn_implementation == "exact"
        model.make_exact(0)
        assert model.module(ids).logits.equal(before)
    assert not [name for name, submodule in model.module.named_modules() if "forward" in vars(submodule)]


@pytest.mark.parametrize("again", ["true", "false"])
def test_backward_computes_again_with_the_kernels_of_forward(tmp_path, monkeypatch, again):
    route, libraries, forward = exact_mlp.routing_kernel, ["cublaslt"], []
    monkeypatch.setattr(exact, "_choose_kernels", lambda library, split_k: libraries.append(library))
    monkeypatch.setattr(exact_mlp, "routing_kernel", lambda *args: forward.append(libraries[-1]) or route(*args))
    path = write_model("Mixtral", tmp_path, **EXACT["Mixtral"])
    learner = GRPOLearner(path, config(gradient_checkpointing=again), CPU)
    learner.model.make_exact(1)
    learner.learn(rollouts(learner))
    assert set(forward) == {"cublaslt"} and libraries[-1] == "cublaslt"
    # Two blocks, of rollouts that are learned from and of others; backward is one.
    assert (len(forward), libraries.count("cublas")) == ((6, 0) if again == "true" else (4, 1))


def test_another_model_of_the_family_stays_plain(tmp_path):
    path = write_model("Llama", tmp_path, **EXACT["Llama"])
    other = Model(path, config(), CPU)
    ids = torch.arange(2, 20)[None]
    with torch.no_grad():
        before = other.module(ids).logits
        Model(path, config(), CPU).make_exact(2)
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
        ("qwen2_moe", {}, "its Qwen2MoeSparseMoeBlock"),  # with a shared expert
        ("granitemoe", {}, "its GraniteMoeMoE"),  # with a router of another form
        ("minimax_m2", {}, "its MiniMaxM2SparseMoeBlock"),  # by sigmoids
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
def test_confident_tokens_gradient_in_bf16_is_that_of_fp32(probability, temperature):
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
    path = write_model("Llama", tmp_path, **EXACT["Llama"])
    learner = GRPOLearner(path, config(), CPU, proof=Proof(exact="on"))
    batch = rollouts(learner)
    assert learner.learn(batch)["logprobs/different_tokens"] == 0
    assert "step 1: exact: all " in capsys.readouterr().out
    wrong = rollouts(learner)
    shifted = list(wrong[2].logprobs)
    shifted[0] += 1e-6
    wrong[2] = replace(wrong[2], logprobs=shifted)
    with pytest.raises(MismatchError, match=r"--exact on: at step 2 1 of \d+ log-probabilities are not the engine's"):
        learner.learn(wrong)
    learner.exact = "auto"
    for _ in range(2):
        assert learner.learn(wrong)["logprobs/different_tokens"] >= 1
    assert capsys.readouterr().out.count("importance weights correct for that") == 1


@pytest.mark.parametrize("options", [{}, {"num_mini_batches": 2}])
def test_difference_over_the_bound_brings_back_the_trainers_kernels(tmp_path, monkeypatch, capsys, options):
    attend = exact.attention_kernel
    monkeypatch.setattr(exact, "attention_kernel", lambda q, *args: attend(q.neg(), *args))  # wrong
    path = write_model("Llama", tmp_path, **EXACT["Llama"])
    batch = rollouts(GRPOLearner(path, config(), CPU))
    with pytest.raises(MismatchError, match="over the bound of 1e-05"):
        GRPOLearner(path, config(**options), CPU, proof=Proof(1e-5, exact="on")).learn(batch)
    learner = GRPOLearner(path, config(kl_coef=0.1, **options), CPU, proof=Proof(1e-5, exact="auto"))
    assert learner.reference.exact_workers == 1
    metrics = learner.learn(batch)
    assert metrics["logprobs/mismatch"] < 1e-6 and learner.step == 1
    assert (learner.model.exact_workers, learner.reference.exact_workers) == (0, 0)
    assert capsys.readouterr().out.count("not exact, so the trainer computes with transformers' kernels") == 1


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("adapted", [False, True])
def test_parts_are_rounded_then_added_in_rank_order(parts, adapted):
    generator = torch.Generator().manual_seed(0)
    # Whole numbers, so that a product has the same bits in whatever order it adds.
    draw = lambda *shape: torch.randint(-9, 10, shape, generator=generator).float()  # noqa: E731
    x, weight, bias = draw(2, 5, 64).bfloat16(), draw(24, 64).bfloat16(), draw(24).bfloat16()
    adapter = (draw(4, 64), draw(24, 4), 0.5) if adapted else (None, None, 0.0)
    engines = LoRAWeight(weight, *adapter).merge(weight).bfloat16() if adapted else weight
    total = torch.zeros(2, 5, 24)
    for i, (part, columns) in enumerate(zip(x.split(64 // parts, -1), engines.split(64 // parts, 1), strict=True)):
        total += torch.nn.functional.linear(part.contiguous(), columns.contiguous(), None if i else bias).float()
    found = exact.Linear.apply(x, weight, bias, *adapter, parts)
    assert found.dtype == torch.bfloat16 and found.equal(total.bfloat16())
    assert parts == 1 or not found.equal(torch.nn.functional.linear(x, engines, bias))  # else this shows nothing


def test_experts_of_several_workers_are_rounded_and_then_added():
    generator = torch.Generator().manual_seed(0)
    x, gate, up, down = (
        torch.randn(*shape, generator=generator).bfloat16() for shape in [(7, 32), *[(4, 24, 32)] * 2, (4, 32, 24)]
    )
    weights, chosen = exact_mlp.routing_kernel(torch.randn(7, 4, generator=generator), 2, True)
    total, gate_up = torch.zeros(7, 32), torch.cat((gate, up), 1)
    for own in (slice(0, 12), slice(12, 24)):
        own_gate_up = torch.cat((gate[:, own], up[:, own]), 1)
        total += exact_mlp.experts_kernel(x, own_gate_up, down[:, :, own], weights, chosen).float()
    found = exact_mlp.Experts.apply(x, gate_up, down, weights, chosen, 2)
    assert found.dtype == torch.bfloat16 and found.equal(total.bfloat16())
    assert not found.equal(exact_mlp.Experts.apply(x, gate_up, down, weights, chosen, 1))


def test_logits_have_the_stride_of_an_engines(monkeypatch):
    monkeypatch.undo()  # the kernel itself
    strides = []
    names = {"vllm.v1.worker.gpu.sample.gumbel": "apply_temperature"}
    names |= {"vllm.v1.worker.gpu.sample.logprob": "compute_token_logprobs"}

    def computed(logits, token_ids):
        strides.append(logits.stride(0))
        return logits.float().log_softmax(-1).gather(1, token_ids)

    for module, name in names.items():
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{name: computed}))
    for vocabulary in (258, 320):
        logits, targets = torch.randn(3, vocabulary), torch.tensor([0, 5, vocabulary - 1])
        expected = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        torch.testing.assert_close(exact.logprob_kernel(logits, targets, 1.0), expected)
    assert strides == [320, 320]


@pytest.mark.parametrize("rows", [1, 3])
def test_engine_adds_up_one_row_of_its_copied_logits_as_it_does_many(rows):
    """vLLM makes the copy in this way. Of one row it keeps the stride, which has the vocabulary's padding."""
    logits = torch.randn(rows, 320)[:, :258]
    copied = torch.empty_like(logits, dtype=torch.float32).copy_(logits)
    assert copied.stride(0) == {1: 320, 3: 258}[rows]
    seen = scores_of_dense_rows(lambda logits, *rest: (logits, *rest), copied, 5)
    assert seen[0].equal(logits) and seen[0].stride() == (258, 1) and seen[1:] == (5,)
    uncut = logits.bfloat16()[:, :258]
    assert scores_of_dense_rows(lambda logits: logits, uncut) is uncut


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernel_sees_what_an_engine_has_made_of_tokens_that_it_does_not_sample(monkeypatch, temperature, dtype):
    monkeypatch.undo()  # the kernel itself
    seen = []
    kernels = {
        "vllm.v1.worker.gpu.sample.gumbel": {"apply_temperature": lambda logits, _, value: logits.div_(value)},
        "vllm.v1.worker.gpu.sample.logprob": {"compute_token_logprobs": lambda *args: seen.append(args[0]) or args[1]},
    }
    for module, own in kernels.items():
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**own))
    logits = torch.randn(2, 258).to(dtype)
    before, targets, ids = logits.clone(), torch.tensor([3, 7]), torch.tensor([[3, 5, 3], [7, 257, 0]])
    assert exact.logprob_kernel(logits, targets, temperature, ids).equal(targets)
    (masked,) = seen
    expected = torch.full((2, 258), -torch.inf)
    for row, kept in enumerate(ids):
        expected[row, kept] = before[row, kept].float() / temperature
    assert masked.equal(expected) and masked.stride() == (258, 1)
    assert logits.equal(before)


def test_block_table_reaches_to_the_end_of_a_tile(monkeypatch):
    monkeypatch.undo()  # the kernel itself

    def read(q, k, out, block_table, max_seqlen_k, **_):
        memory = torch.empty(0, dtype=torch.int32).set_(block_table.untyped_storage())
        for tile in (32, 128):  # tokens that vLLM's kernel takes at a time, on a Hopper and on a Blackwell
            pages = torch.arange(math.ceil(max_seqlen_k / tile) * tile) // k.shape[1]
            for row in range(len(block_table)):
                memory[row * block_table.stride(0) + pages]
        out.copy_(q)

    module = SimpleNamespace(unified_attention=read)
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.ops.triton_unified_attention", module)
    q, k, v = torch.randn(3, 2, 41, 4, 32)
    assert exact.attention_kernel(q, k, v, 1.0, None)[0].equal(q)


def settled(gpu, say=lambda _: None, **options):
    args = arguments_of(train_grpo, **{"tensor_parallel_size": 2} | options)  # as a topology settles it
    return settle_exactness(SimpleNamespace(say=say), args.engine, args.model, args.run.model, gpu)


H200 = exact.GPU(90, (2, 30, 7), 8, 150 << 30)
B200 = replace(H200, capability=100)


@pytest.mark.parametrize(("gpu", "head_dim", "expected"), [(H200, 128, "auto"), (B200, 64, "auto"), (B200, 128, "off")])
def test_gpu_without_flash_attention_3_is_exact_where_triton_computes_attention(tmp_path, gpu, head_dim, expected):
    model = write_model("Llama", tmp_path, **EXACT["Llama"] | {"head_dim": head_dim})
    assert settled(gpu, model=model).exact == expected


def test_model_without_heads_is_not_exact_on_any_gpu(tmp_path):
    said = []
    FalconMambaConfig(num_hidden_layers=2, hidden_size=32, vocab_size=99).save_pretrained(tmp_path)
    assert [settled(gpu, said.append, model=str(tmp_path)).exact for gpu in (H200, B200)] == ["off"] * 2
    assert all("arithmetic of its FalconMambaMixer" in line for line in said)


@pytest.mark.parametrize(
    ("gpu", "options", "reason"),
    [
        (H200, {}, ""),
        (H200, {"tensor_parallel_size": 4}, ""),
        (H200, {"tensor_parallel_size": 8}, ""),
        (replace(H200, capability=80), {}, "the GPU's compute capability is below 9.0"),
        (replace(H200, nccl=(2, 28, 9)), {}, "NCCL 2.28.9 takes vLLM's settings for all groups"),
        (H200, {"tensor_parallel_size": 3}, "NCCL adds up for 3 workers, in an order of its own"),
        (H200, {"tensor_parallel_size": 16}, "NCCL adds up for 16 workers"),
        (replace(H200, linked=0), {"tensor_parallel_size": 4}, "NCCL adds up for 4 workers"),
        (replace(H200, linked=0), {"tensor_parallel_size": 2}, ""),
        (H200, {"quantization": "auto"}, "the engine's weights are quantized (--quantization)"),
        (H200, {"compile": True}, "inductor rounds in other places (compile)"),
        (None, {"exact": "on"}, "there is no GPU"),
    ],
)
def test_what_rules_exactness_out_is_said_before_anything_starts(tmp_path, gpu, options, reason):
    options["model"], said = write_model("Llama", tmp_path, **EXACT["Llama"]), []
    if gpu:
        assert settled(gpu, said.append, **options).exact == ("off" if reason else "auto")
        assert len(said) == bool(reason) and all(line.startswith(f"not exact: {reason}") for line in said)
    if reason:
        with pytest.raises(RunError, match=re.escape(f"--exact on: {reason}")):
            settled(gpu, **options | {"exact": "on"})
    assert settled(None, **options | {"exact": "auto"}).exact == "off"
