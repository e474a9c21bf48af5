"""LoRA: what learns, what is sent, what is saved; into engines in test_sync.py, test_native.py and test_quantized.py.

pytest tests/test_lora.py
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import arguments_of, cpu_only, metrics_of
from fakes import materialized
from learners import CPU, build, config, numbers, on_ranks, rollouts, save, weights_of
from pair import Pair
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import train_grpo
from trainer.errors import MismatchError, RunError
from trainer.flags import with_values
from trainer.learning.grpo import GRPOLearner
from trainer.learning.lora import add_adapters, load_adapters
from trainer.learning.named_tensors import NamedTensors
from trainer.run.arguments import parse
from trainer.run.checkpoint import write_checkpoint
from trainer.run.models import Models, choose_models
from weight_sync.lora import LoRAWeight

LORA = {"lora_rank": 4, "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def batches(model):
    learner = GRPOLearner(model, config(), CPU)
    return [rollouts(learner, seed=seed, count=8) for seed in range(3)]


def adapters_of(learner):
    return [parameter.detach().clone() for parameter in learner.model.adapters]


def sent(learner):
    return {name: materialized(weight).clone() for name, weight in learner.model.named_tensors().items()}


def peft_model(path, seed, std=0.02, **options):
    """peft's own model, with adapters that have learned something."""
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    adapted = get_peft_model(base, LoraConfig(target_modules="all-linear", **options))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=std)
    return adapted


@pytest.mark.parametrize("architecture", ["OPT", "GPT2", "Qwen2", "Gemma2", "Phi3", "Granite", "Falcon"])
def test_what_is_sent_is_the_checkpoint_then_pefts_merge(tmp_path, architecture):
    build(architecture, tmp_path / "model")
    adapted = peft_model(tmp_path / "model", 1, r=4, lora_alpha=8)
    adapted.save_pretrained(tmp_path / "adapters")
    learner = GRPOLearner(str(tmp_path / "model"), config(lora_rank=4, lora_alpha=8), CPU)
    saved, first = load_file(tmp_path / "model" / "model.safetensors"), sent(learner)
    assert first.keys() == saved.keys()
    assert all(first[name].equal(saved[name]) for name in saved)
    load_adapters(learner.model.module, tmp_path / "adapters")
    merged, now = adapted.merge_and_unload().state_dict(), sent(learner)
    changed = {name for name, weight in learner.model.named_tensors().items() if isinstance(weight, LoRAWeight)}
    assert len(changed) >= 8
    assert all(now[name].equal(merged[name]) for name in saved)
    assert {name for name in saved if not now[name].equal(saved[name])} == changed


def test_unlearned_adapter_is_its_base_to_the_sign_of_zero():
    base = torch.tensor([[-0.0, 0.0, 1.0]]).bfloat16()
    merged = LoRAWeight(base, torch.randn(2, 3), torch.zeros(1, 2), 2.0).merge(base)
    assert merged.dtype == torch.float32
    assert merged.signbit().tolist() == [[True, False, False]]
    assert merged.equal(base.float())


def test_a_base_of_half_precision_is_merged_in_fp32():
    generator = torch.Generator().manual_seed(0)
    base, (lora_A, lora_B) = (
        torch.randn(64, 32, generator=generator).bfloat16(),
        (torch.randn(shape, generator=generator) * 0.01 for shape in ((4, 32), (64, 4))),
    )
    expected = base.float() + (lora_B @ lora_A) * 2.0
    for _ in range(200):
        merged = LoRAWeight(base, lora_A, lora_B, 2.0).merge(base)
    assert merged.equal(expected)
    assert not merged.equal(base.float())
    with torch.autocast("cpu"):
        assert LoRAWeight(base, lora_A, lora_B, 2.0).merge(base).equal(expected)
    in_place = base.clone()
    for _ in range(200):  # what merging into the base itself does to it
        in_place += ((lora_B @ lora_A) * 2.0).bfloat16()
        in_place -= ((lora_B @ lora_A) * 2.0).bfloat16()
    assert not in_place.equal(base)


KERNEL = """
import torch
from weight_sync.lora import LoRAWeight, Merge

# rows, columns, rank, first row, first column, transposed
for rows, columns, rank, first, left, transposed in [
    (70, 99, 5, 0, 0, False), (64, 65, 40, 13, 0, False), (66, 90, 4, 7, 0, True), (30, 90, 4, 7, 9, True),
]:
    outputs, inputs = (columns, rows) if transposed else (rows, columns)
    lora_A, lora_B = torch.randn(rank, inputs), torch.randn(outputs, rank)
    base = torch.randn(rows, columns).bfloat16()
    weight, merged = LoRAWeight(base, lora_A, lora_B, 0.7, transposed), torch.full((rows, columns), 7.0)
    Merge(weight, base[first:, left:], first, left)._by_kernel(merged[first:, left:])
    expected = weight.merge(base)[first:, left:]
    torch.testing.assert_close(merged[first:, left:], expected, atol=1e-5, rtol=1e-5)
    assert (merged[:first] == 7).all() and (merged[:, :left] == 7).all()
"""


def test_kernel_merges_any_shape():
    # Triton's interpreter runs it here, and adds in another order than a GPU (tests/test_gpu.py: bit for bit).
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    subprocess.run([sys.executable, "-c", KERNEL], env=environment, check=True)


def test_only_adapters_learn(model, batches):
    learner = GRPOLearner(model, config(**LORA), CPU)
    before, first = weights_of(learner), sent(learner)
    for batch in batches:
        learner.max_mismatch = None  # of what other weights sampled
        learner.learn(batch)
    moved = {name for name, tensor in weights_of(learner).items() if not tensor.equal(before[name])}
    assert moved == {name for name in before if ".lora_" in name}
    assert len(moved) == 2 * 6 * 2
    assert learner.optimizer.state.keys() == set(learner.model.adapters)
    assert sum(not first[name].equal(tensor) for name, tensor in sent(learner).items()) == 12
    assert not any(module.training for module in learner.model.module.modules())  # which would drop some


@pytest.mark.parametrize(
    "other",
    [
        {"micro_batch_tokens": 20},
        {"gradient_checkpointing": "true"},
        pytest.param({"compile": True}, marks=pytest.mark.long),
    ],
)
def test_gradient_is_the_same_however_it_is_computed(model, batches, other):
    gradients = []
    for changes in ({}, other):
        learner = GRPOLearner(model, config(**LORA, max_grad_norm=1e9, **changes), CPU)
        learner.learn(batches[0])
        learner.learn(batches[1])  # only now has lora_A a gradient
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in learner.model.adapters]))
        assert gradients[-1].norm() > 1e-3
    assert (gradients[1] - gradients[0]).norm() < 1e-5 * gradients[0].norm()


def test_the_kl_is_to_the_base(model, batches):
    learner, base = (GRPOLearner(model, config(kl_coef=0.1, **changes), CPU) for changes in (LORA, {}))
    assert learner.reference is None
    assert learner.learn(batches[0])["kl"] == pytest.approx(0, abs=1e-9)
    first = base.learn(batches[0])["kl"]
    assert first == pytest.approx(0, abs=1e-9)
    with torch.no_grad():  # the same policy, as a whole model
        for name, parameter in base.model.module.named_parameters():
            parameter.copy_(sent(learner).get(name, parameter))
    kl = learner.learn(batches[1])["kl"]
    assert kl > 1e-4
    assert kl == pytest.approx(base.learn(batches[1])["kl"], rel=1e-4)
    assert all(parameter.requires_grad for parameter in learner.model.adapters)


def learn_lora(folder, model, batches):
    learner = GRPOLearner(model, config(**LORA, kl_coef=0.1, num_mini_batches=2, save_merged=True), CPU)
    learner.optimizer = torch.optim.SGD(learner.parameters, lr=1.0)
    metrics = [numbers(learner.learn(batch)) for batch in batches[:2]]
    assert all(type(parameter) is torch.nn.Parameter for parameter in learner.model.adapters)
    weights = {name: getattr(weight, "base", weight) for name, weight in learner.model.named_tensors().items()}
    assert learner.model.ranks == 1 or all(hasattr(tensor, "full_tensor") for tensor in weights.values())
    save(learner, folder / f"ranks-{learner.model.ranks}")
    if learner.model.rank == 0:
        torch.save((metrics, adapters_of(learner)), folder / f"learned-{learner.model.ranks}.pt")


def test_two_ranks_learn_and_save_what_one_does(model, tmp_path, batches):
    learn_lora(tmp_path, model, batches)
    on_ranks(2, learn_lora, tmp_path, model, batches)
    (metrics, adapters), (metrics_two, adapters_of_two) = (
        torch.load(tmp_path / f"learned-{ranks}.pt") for ranks in (1, 2)
    )
    for one, two in zip(metrics, metrics_two, strict=True):
        assert two == pytest.approx(one, rel=1e-4, abs=1e-6)
    for one, two in zip(adapters, adapters_of_two, strict=True):
        assert (one - two).norm() <= 1e-5 * one.norm()
    for pattern in ("adapter_model.safetensors", "merged/model*.safetensors"):
        one, two = (tensors_of(tmp_path / f"ranks-{ranks}", pattern) for ranks in (1, 2))
        assert one.keys() == two.keys()
        for name, tensor in one.items():
            torch.testing.assert_close(tensor, two[name], rtol=1e-4, atol=1e-6)


def tensors_of(folder, pattern):
    return {name: tensor for file in folder.glob(pattern) for name, tensor in load_file(file).items()}


def test_checkpoint_is_pefts_and_goes_on_bit_for_bit(model, tmp_path, batches):
    settings = config(**LORA, save_merged=True)
    learner = GRPOLearner(model, settings, CPU)
    learner.learn(batches[0])
    save(learner, tmp_path / "checkpoint-000001")
    checkpoint, now = tmp_path / "checkpoint-000001", sent(learner)
    learner.learn(batches[1])
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, checkpoint).merge_and_unload().state_dict()
    whole_model = AutoModelForCausalLM.from_pretrained(checkpoint / "merged", dtype=torch.float32).state_dict()
    for name, tensor in now.items():
        assert merged[name].equal(tensor)
        assert whole_model[name].equal(tensor)
    assert AutoTokenizer.from_pretrained(checkpoint / "merged").vocab_size == 258
    torch.manual_seed(123)  # as another process would
    resumed = GRPOLearner(model, settings, CPU)
    resumed.load_state(checkpoint)
    resumed.learn(batches[1])
    assert resumed.step == 2
    assert all(a.equal(b) for a, b in zip(adapters_of(learner), adapters_of(resumed), strict=True))


def test_resume_with_other_adapters_is_an_error_that_says_so(model, tmp_path):
    run = tmp_path / "run"
    for rank in (4, None):
        learner = GRPOLearner(model, config(lora_rank=rank), CPU)
        write_checkpoint(run if rank else tmp_path / "whole", 7, learner.save)
    args = arguments_of(train_grpo, model=model, resume=run, steps=9, lora_rank=4)
    last = run / "checkpoint-000007"
    assert choose_models(run, args, "cpu")[0] == Models(model, model, last)
    for change, message in (
        ({"lora_rank": 8}, "has adapters of rank 4, and --resume cannot go on with adapters of rank 8"),
        ({"lora_rank": None}, "has adapters of rank 4, and --resume cannot go on with a whole model"),
        ({"lora_alpha": 5}, "has adapters of lora_alpha 32, not 5"),
    ):
        with pytest.raises(RunError, match=message):
            choose_models(run, with_values(args, change), "cpu")
    with pytest.raises(RunError, match="has a whole model, and --resume cannot go on with adapters of rank 4"):
        choose_models(tmp_path / "whole", with_values(args, {"resume": tmp_path / "whole"}), "cpu")
    fewer = GRPOLearner(model, config(lora_rank=4, lora_targets=["fc1"]), CPU)
    with pytest.raises(RunError, match=r"has adapters of other lora_targets: .*fc2"):
        fewer.load_state(last)
    write_checkpoint(tmp_path / "fewer", 7, fewer.save)
    with pytest.raises(RunError, match=r"has adapters of other lora_targets: .*fc2"):
        GRPOLearner(model, config(lora_rank=4), CPU).load_state(tmp_path / "fewer" / "checkpoint-000007")
    assert json.loads((last / "adapter_config.json").read_text())["base_model_name_or_path"] == model


def test_adapters_go_on_where_their_base_is_now(model, tmp_path):
    base, run = shutil.copytree(model, tmp_path / "base"), tmp_path / "run"
    write_checkpoint(run, 7, GRPOLearner(str(base), config(**LORA), CPU).save)
    args = arguments_of(train_grpo, model=str(base), resume=run, steps=9, **LORA)
    base.rename(tmp_path / "moved")
    with pytest.raises(RunError, match=f"cannot load the model {base}: no such folder"):
        choose_models(run, args, "cpu")
    models, _ = choose_models(run, with_values(args, {"model": str(tmp_path / "moved")}), "cpu")
    GRPOLearner(models.loaded, config(**LORA), CPU).load_state(models.checkpoint)


def test_targets_are_layers(model, tmp_path):
    for targets, adapted in ((["q_proj", "v_proj"], 4), (["self_attn.q_proj"], 2), (["all-linear"], 12)):
        learner = GRPOLearner(model, config(lora_rank=2, lora_targets=targets), CPU)
        assert len(learner.model.adapters) == 2 * adapted
    build("Mixtral", tmp_path)
    for path, targets, message in (
        (
            model,
            ["q_proj", "nope"],
            "OPTForCausalLM has no layer nope; its linear layers are fc1, fc2, k_proj",
        ),
        (model, ["proj"], "has no layer proj"),
        (model, ["lm_head"], "has no layer lm_head"),  # it is tied to the embeddings
        (str(tmp_path), ["w1"], "MixtralForCausalLM has no layer w1; its linear layers are k_proj, o_proj"),
    ):
        with pytest.raises(RunError, match=f"lora_targets: .*{message}"):
            GRPOLearner(path, config(lora_rank=2, lora_targets=targets), CPU)


def test_base_alone_is_kept_in_half_precision(tmp_path):
    build("Qwen2", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    add_adapters(model, config(lora_rank=2).model, torch.bfloat16)
    learning = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    assert learning == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
    weights = NamedTensors(model)()
    adapted = [weight for weight in weights.values() if isinstance(weight, LoRAWeight)]
    assert {weight.base.dtype for weight in adapted} == {torch.bfloat16}
    assert len(adapted) == 14
    ids = torch.arange(2, 20)[None]
    with torch.autocast("cpu", torch.bfloat16):
        assert model(input_ids=ids).logits.isfinite().all()


def test_rank_of_0_is_a_usage_error(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["train_grpo.py", "--lora-rank", "0"])
    with pytest.raises(SystemExit):
        parse(train_grpo.Arguments, train_grpo.__doc__)
    assert "--lora-rank: Input should be greater than or equal to 1" in capsys.readouterr().err


def test_run_says_which_layers_have_adapters(tmp_path):
    build("Qwen3Moe", tmp_path)
    learner = GRPOLearner(str(tmp_path), config(lora_rank=2), CPU)
    said = "adapters of rank 2 on k_proj, o_proj, q_proj, v_proj; its fused experts have none"
    assert said in learner.remarks().splitlines()


def test_a_new_head_is_not_rounded(model):
    classifier = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
    before = classifier.score.weight.clone()
    add_adapters(classifier, config(lora_rank=2).model, torch.bfloat16, "score")
    assert not before.equal(before.bfloat16().float())
    assert classifier.score.modules_to_save["default"].weight.equal(before)


@cpu_only
@pytest.mark.slow
def test_script_with_adapters_learns_and_goes_on(script, tmp_path):
    flags = ("--lora-rank", 8, "--save-every", 14, "--steps", 14, "--output", "run")
    text = script("train_grpo.py", *flags).finish()
    assert text.splitlines()[-1].startswith("OK: reward "), text
    metrics = metrics_of(tmp_path / "run")
    assert metrics[0]["reward/mean"] < 0.25
    assert metrics[-1]["reward/mean"] > 0.75
    assert (tmp_path / "run" / "checkpoint-000014" / "adapter_model.safetensors").exists()
    text = script("train_grpo.py", "--resume", "run", "--steps", 16).finish()
    assert text.splitlines()[-1].startswith("OK: reward "), text
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == list(range(1, 17))
    assert metrics_of(tmp_path / "run")[-2]["reward/mean"] > 0.7


@cpu_only
@pytest.mark.long
def test_vllm_serves_a_checkpoints_adapters(model, tmp_path):
    learner = GRPOLearner(model, config(lora_rank=8, max_mismatch=1e-5), CPU)
    for name, parameter in learner.model.module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    save(learner, tmp_path / "it")
    from vllm.lora.request import LoRARequest

    with Pair(Path(model), 1, enable_lora=True, max_lora_rank=8) as pair:
        assert learner.mismatch(pair.generate(seed=1, lora_request=LoRARequest("it", 1, str(tmp_path / "it")))) < 1e-5
        with pytest.raises(MismatchError):
            learner.mismatch(pair.generate(seed=1))
