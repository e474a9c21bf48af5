"""Syncs of full-precision weights into an engine that torchao quantizes as it loads; train_grpo.py --quantization as a
user runs it.

pytest tests/test_quantized.py            what needs no engine
pytest tests/test_quantized.py -m slow    syncs into an engine; a run of the script on shared devices
pytest tests/test_quantized.py -m long    on separate devices; a benchmark of memory
"""

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import arguments_of, cpu_only, metrics_of
from pair import Pair, compare

import train_grpo
from rlhf_utils import WeightSyncError
from trainer.errors import MismatchError
from trainer.learning.grpo import GRPOLearner
from trainer.rollouts.extensions import fuse_quantization
from trainer.run.arguments import parse
from trainer.tasks.tiny_model import build_tiny_model
from trainer.topologies.link import MAX_QUANTIZED_MISMATCH as MAX_MISMATCH
from weight_sync.comparison import ROUNDING_SLACK, check_errors, compare_quantized, rounding_errors
from weight_sync.lora import LoRAWeight
from weight_sync.trace import Write

pytestmark = cpu_only
FC1 = "model.decoder.layers.0.fc1.weight"


def test_torchao_quantizes_to_fp8_by_the_functions_that_are_compiled(monkeypatch):
    from torchao.quantization import Float8Tensor, PerRow

    functions, called = Float8Tensor.from_hp.__func__.__globals__, []
    for name in ("_choose_scale_float8", "_quantize_affine_float8"):
        monkeypatch.setitem(functions, name, functions[name])  # put back after the test

    def compiled(function, dynamic):
        return lambda *args, **options: called.append(function) or function(*args, **options)

    monkeypatch.setattr(torch, "compile", compiled)
    before = [functions["_choose_scale_float8"], functions["_quantize_affine_float8"]]
    fuse_quantization()
    weight = torch.randn(8, 32, dtype=torch.bfloat16)
    quantized = Float8Tensor.from_hp(weight, granularity=PerRow())
    assert called == before
    torch.testing.assert_close(quantized.dequantize(torch.bfloat16), weight, atol=0.2, rtol=0.07)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """An engine with each kind of weight that can be compared: int8 and FP8, with scales of rows, groups and all."""
    from torchao import quantization as torchao
    from torchao.core.config import config_to_dict

    config = torchao.FqnToConfig(
        {
            "re:.*layers.0.fc2": torchao.Int8WeightOnlyConfig(granularity=torchao.PerGroup(32)),
            "re:.*layers.0.*": torchao.Int8DynamicActivationInt8WeightConfig(),
            "re:.*layers.1.fc2": torchao.Float8WeightOnlyConfig(granularity=torchao.PerTensor()),
            "_default": torchao.Float8WeightOnlyConfig(),
        }
    )
    with Pair(
        build_tiny_model(tmp_path_factory.mktemp("model")),
        dtype="bfloat16",
        max_mismatch=MAX_MISMATCH,
        quantization="torchao",
        hf_overrides={"quantization_config_dict_json": json.dumps(config_to_dict(config))},
    ) as pair:
        yield pair


@pytest.mark.slow
def test_weights_are_quantized_again_at_every_sync(pair):
    from_disk = pair.rpc("digest")
    report = pair.sync()
    assert report.loader == "replay"
    assert pair.rpc("digest") == from_disk  # what vLLM's own loading of the checkpoint gives, bit for bit
    pair.set(pair.perturbed(3))
    with pytest.raises(MismatchError):
        pair.mismatch()
    pair.sync()
    assert pair.mismatch() < MAX_MISMATCH
    assert pair.rpc("check_weights_changed") == [True, True]
    whole = pair.rpc("digest")
    assert whole != from_disk
    pair.set(pair.original)
    pair.sync()
    assert pair.rpc("digest") == from_disk

    pair.set(pair.perturbed(3))
    *_, last = pair.sync_one_parameter_at_a_time()
    assert last
    assert pair.rpc("check_weights_changed") == [True, True]
    assert pair.rpc("digest") == whole


@pytest.mark.slow
def test_adapters_are_quantized_with_what_they_adapt(pair):
    pair.set(pair.original)
    pair.sync()
    path, changes = pair.learner.model.module.name_or_path, {"lora_rank": 4, "max_mismatch": MAX_MISMATCH}
    learner = GRPOLearner(
        path, arguments_of(train_grpo, group_size=2, max_tokens=8, **changes), pair.learner.model.device
    )
    weights = learner.model.named_tensors()
    for weight in weights.values():
        if isinstance(weight, LoRAWeight):
            torch.nn.init.normal_(weight.lora_B, std=0.02)
    pair.sync(weights.items())
    assert compare(pair, weights.items()) == 16
    assert learner.mismatch(pair.generate(seed=1)) < MAX_MISMATCH
    with pytest.raises(WeightSyncError, match="quantized weights are not what was sent"):
        compare(pair)  # with the base alone
    pair.connect()


@pytest.mark.slow
@pytest.mark.parametrize("growth", [1.01, 1.03, 0.97])
def test_scales_that_a_sync_left_behind_fail_the_comparison(pair, growth):
    pair.set(pair.original)
    pair.sync()
    pair.rpc("keep_scales", True)
    pair.set({name: growth * tensor for name, tensor in pair.original.items()})
    pair.sync()
    assert pair.rpc("check_weights_changed") == [True, True]
    assert pair.mismatch() < MAX_MISMATCH  # scales that are wrong by so little hardly move a log-probability
    with pytest.raises(WeightSyncError, match="16 of 16 quantized weights are not what was sent"):
        compare(pair)
    pair.rpc("keep_scales", False)
    pair.sync()
    assert compare(pair) == 16


@pytest.mark.slow
def test_layer_that_a_sync_left_behind_fails_the_comparison(pair):
    pair.set(pair.original)
    pair.sync()
    changed = pair.original | {FC1: pair.perturbed(4)[FC1]}
    pair.set(changed)
    with pytest.raises(WeightSyncError, match=f"2 of 16 quantized weights are not what was sent: {FC1} of engine"):
        compare(pair)
    pair.sync()
    assert compare(pair) == 16


@pytest.mark.parametrize(
    "topology", [pytest.param("shared", marks=pytest.mark.slow), pytest.param("separate", marks=pytest.mark.long)]
)
def test_run_quantizes_learns_and_proves_every_sync(script, tmp_path, topology):
    flags = f"--quantization auto --topology {topology} --output run --steps 12 --save-every 6 --learning-rate 1e-2"
    text = script("train_grpo.py", *flags.split()).finish()
    assert text.splitlines()[-1].startswith("OK: reward "), text
    assert "engine weights by torchao's Int8DynamicActivationInt8WeightConfig: FP8 takes a GPU of compute" in text
    weights = {"separate": "16", "shared": "8"}[topology]  # of two workers, and of one
    assert text.count(f"{weights} quantized weights are what was sent, but for rounding\n") == 4
    metrics = metrics_of(tmp_path / "run")
    assert metrics[0]["reward/mean"] < 0.25
    assert metrics[-1]["reward/mean"] > 0.75
    mismatch = [row["logprobs/mismatch"] for row in metrics]
    assert min(mismatch) > 1e-4  # not by chance an engine that is not quantized
    assert max(mismatch) < MAX_MISMATCH


@pytest.mark.long
def test_memory_table_of_a_configuration(script, tmp_path):
    from torchao.core.config import config_to_dict
    from torchao.quantization import Int8WeightOnlyConfig

    config = json.dumps(config_to_dict(Int8WeightOnlyConfig()))
    arguments = ["--quantization", config, "--tensor-parallel-size", 1]
    text = script("benchmarks/quantized_memory.py", *arguments).finish()
    assert text.splitlines()[-1].startswith("OK: "), text
    assert "/model, CUDA graphs NONE, TP=1\n" in text
    assert "rollouts of 8 prompts x 8 completions of 16 tokens" in text
    assert "quantized by torchao's Int8WeightOnlyConfig" in text
    cells = {
        name: re.search(rf"^{name} +([\d.]+) GiB +([\d,]+) +(\d+) +([\d,]+) tokens/s$", text, re.M).groups()
        for name in ("bf16", "quantized")
    }
    # The built-in model, in bytes. Some CPUs keep packed copies of embedding and head; what they keep of bf16's linear
    # layers differs more.
    plain, ends, elements, channels = 941_568, 2 * 81_920, 393_216, 2_304
    size = {name: float(cell[0]) for name, cell in cells.items()}
    sizes = [plain + packed - elements + 5 * channels for packed in (0, ends)]
    assert size["quantized"] in [pytest.approx(each / 2**30, rel=1e-3) for each in sizes]
    assert plain / 2**30 < 1.001 * size["bf16"] < (plain + ends + 2 * elements + 2 * channels) / 2**30 * 1.002
    share = float(re.search(r"OK: quantized, the weights take ([\d.]+) of their memory in bf16", text)[1])
    assert share == pytest.approx(size["quantized"] / size["bf16"], abs=0.006)
    assert cells["bf16"][1:3] == cells["quantized"][1:3]
    assert "on CPU the KV cache has a fixed size" in text
    assert all(float(speed.replace(",", "")) > 100 for *_, speed in cells.values())


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("fp8", r"neither auto nor the JSON of what config_to_dict of torchao gives"),
        ("{", "Expecting property name"),
        ("[]", "Expected dictionary"),
        ('{"_type": "Float5WeightConfig", "_data": {}}', "Failed to find class Float5WeightConfig"),
        ('{"_type": "Int8WeightOnlyConfig", "_data": {"bits": 3}}', "unexpected keyword argument 'bits'"),
        ('{"_type": "PerRow", "_data": {}}', "that is no quantization"),
    ],
)
def test_text_that_is_no_quantization_is_named(monkeypatch, capsys, text, fault):
    monkeypatch.setattr("sys.argv", ["train_grpo.py", "--quantization", text])
    with pytest.raises(SystemExit):
        parse(train_grpo.Arguments, "A script.")
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.search(f"argument --quantization: .*{fault}.*, not {re.escape(text)}", error)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("granularity", ["PerTensor()", "PerRow()", "PerGroup(32)", "PerBlock([16, 32])"])
def test_half_steps_are_the_largest_error_of_rounding(dtype, granularity):
    from torchao import quantization as torchao

    tensor_class = {"int8": torchao.Int8Tensor, "fp8": torchao.Float8Tensor}[dtype]
    granularity = eval(granularity, vars(torchao))
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    quantized = tensor_class.from_hp(weight, granularity=granularity)

    def largest_error() -> float:
        return float(((quantized.dequantize(torch.float32) - weight).abs() / rounding_errors(quantized)).max())

    assert 0.8 < largest_error() <= ROUNDING_SLACK
    quantized.scale[-1] *= 1.05  # of some blocks, or all
    assert largest_error() > ROUNDING_SLACK


@pytest.fixture
def quantized_engine():
    """An engine with one weight, in FP8 by rows, what was sent for it, and what the messages call that."""
    from torchao.quantization import Float8Tensor, PerRow

    weight = torch.randn(17, 32, generator=torch.Generator().manual_seed(0))[1:]
    model = torch.nn.Linear(32, 16, bias=False)
    model.weight = torch.nn.Parameter(Float8Tensor.from_hp(weight, granularity=PerRow()), requires_grad=False)
    whole = torch.empty(16, 32, device="meta")
    write = Write("weight", whole, whole, whole)
    engine = SimpleNamespace(model=model, trace=lambda wire: ({"w": [write]}, []))
    return engine, weight, [("w", "float32", (16, 32))]


@pytest.mark.parametrize("part", ["scale", "value"])
def test_weight_that_is_nan_is_not_what_was_sent(quantized_engine, part):
    engine, weight, wire = quantized_engine
    check_errors(compare_quantized(engine, wire, [("w", weight)]))
    if part == "scale":
        engine.model.weight.scale[3] = math.nan
    else:
        engine.model.weight.qdata[3, 4] = math.nan
    with pytest.raises(WeightSyncError, match="1 of 1 quantized weights are not what was sent: weight is off by inf"):
        check_errors(compare_quantized(engine, wire, [("w", weight)]))


def test_weight_for_which_nothing_arrives_is_not_what_was_sent(quantized_engine):
    engine, _, wire = quantized_engine
    with pytest.raises(WeightSyncError, match="weight is off by inf times"):
        check_errors(compare_quantized(engine, wire, []))


def test_small_update_that_did_not_arrive_is_found(quantized_engine):
    engine, weight, wire = quantized_engine
    with pytest.raises(WeightSyncError, match=r"weight is off by 1\.72 times"):
        check_errors(compare_quantized(engine, wire, [("w", weight + 1e-4)]))
