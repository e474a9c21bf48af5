"""Syncs of whole families of models into a real vLLM engine: what is sent is served, and comes back bit for bit.

pytest tests/test_architectures.py             what the trainer sends of each, without an engine
pytest tests/test_architectures.py -m slow     into engines; -m long: more families
"""

import pytest
import torch
import transformers
from conftest import arguments_of
from learners import ARCHITECTURES, MORE_ARCHITECTURES, build
from pair import CORE_IN_PROCESS, DEVICE, Pair, swap_layers
from safetensors.torch import load_file

import train_grpo
from rlhf_utils import WeightSyncError
from trainer.errors import MismatchError
from trainer.learning.grpo import GRPOLearner

RELOADED = {"Bloom"}  # whose loader computes
# As they are, a swap of two layers moves the log-probabilities by less than the mismatch's bound in bf16.
LOUDER = {"Bloom": {"initializer_range": 0.06}, "Cohere2": {"logit_scale": 1.0}}
ENGINE_OPTIONS = {}
if DEVICE.type == "cpu":
    RELOADED |= {"Mixtral", "Qwen3Moe"}  # whose experts vLLM packs there
    # vLLM's kernel for RoPE goes wrong on the parts that MLA rotates, and AMX_MLA takes no fp32
    mla = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}, "attention_backend": "CPU_MLA"}
    ENGINE_OPTIONS["DeepseekV3"] = mla
else:  # ALiBi needs FlashAttention 2, and on Hopper vLLM 0.33 calls it with a schedule for version 3
    ENGINE_OPTIONS["Bloom"] = {"attention_config": {"flash_attn_version": 2}}


def differs_on_cpu(reason: str):
    return pytest.mark.xfail(DEVICE.type == "cpu", raises=MismatchError, strict=True, reason=reason)


DIFFERENCES = {  # docs/guarantees.md has more on them
    "Bloom": differs_on_cpu("vLLM computes the exact GELU, where Bloom has the approximation by tanh"),
    "Apertus": differs_on_cpu("vLLM computes xIELU's two coefficients in bf16"),
    "Cohere2": differs_on_cpu("vLLM's window is longer by one token"),
}


@pytest.fixture(autouse=True)
def engine_core_in_this_process(monkeypatch):
    for name, value in CORE_IN_PROCESS.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("architecture", ARCHITECTURES | MORE_ARCHITECTURES)
def test_trainer_sends_its_checkpoints_tensors_without_copying_them(tmp_path, architecture):
    build(architecture, tmp_path)
    learner = GRPOLearner(str(tmp_path), arguments_of(train_grpo, group_size=2, max_tokens=8), torch.device("cpu"))
    memory = {tensor.untyped_storage().data_ptr() for tensor in learner.model.module.state_dict().values()}
    sent, saved = learner.model.named_tensors(), load_file(tmp_path / "model.safetensors")
    assert len(learner.parameters) == len(list(learner.model.module.parameters()))  # nothing is frozen
    assert sent.keys() == saved.keys()
    assert all(sent[name].equal(saved[name]) for name in saved)
    assert all(tensor.untyped_storage().data_ptr() in memory for tensor in sent.values())


def case(architecture: str, size: int):
    """A family at this TP, with its marks."""
    marks = [pytest.mark.gpu(1 + size, or_cpu=True)]
    marks += [pytest.mark.slow if architecture in IN_CI else pytest.mark.long]
    marks += [DIFFERENCES[architecture]] if architecture in DIFFERENCES else []
    return pytest.param(architecture, size, id=f"{architecture}-TP{size}", marks=marks)


IN_CI = {"Llama", "Mixtral"}  # OPT and Qwen2 are other tests' models
SIZES = dict.fromkeys([*ARCHITECTURES, "Llama-odd", "Qwen3Moe"], 2)
SIZES |= dict.fromkeys(["Olmoe", "DeepseekV3", *DIFFERENCES], 1)


@pytest.mark.parametrize(("architecture", "tensor_parallel_size"), [case(*each) for each in SIZES.items()])
def test_weights_arrive_and_come_back(tmp_path, architecture, tensor_parallel_size):
    build(architecture, tmp_path, **LOUDER.get(architecture, {}))
    with Pair(tmp_path, tensor_parallel_size, **ENGINE_OPTIONS.get(architecture, {})) as pair:
        from_disk = pair.rpc("digest", False), pair.generate()
        assert pair.mismatch() >= 0  # raises if the engine did not load the trainer's weights

        pair.set(pair.perturbed(1))
        with pytest.raises(MismatchError):
            pair.mismatch()
        assert (pair.sync().loader == "replay") == (architecture not in RELOADED)
        pair.mismatch()
        perturbed = pair.rpc("digest")

        pair.set(swap_layers(pair.perturbed(1)))
        with pytest.raises(MismatchError):
            pair.mismatch()
        pair.sync()
        pair.mismatch()
        assert not set(pair.rpc("digest")) & set(perturbed)

        pair.set(pair.original)
        pair.sync()
        assert (pair.rpc("digest", False), pair.generate()) == from_disk  # weights, log-probabilities: to the last bit


@pytest.mark.long
@pytest.mark.gpu(2, or_cpu=True)
def test_model_of_another_architecture_fails_in_preflight(tmp_path):
    for architecture in ("Llama", "OPT", "GPT2"):
        build(architecture, tmp_path / architecture)
    build("Llama", tmp_path / "wide", intermediate_size=512)
    with Pair(tmp_path / "Llama", tensor_parallel_size=1) as pair:
        before = pair.rpc("digest")
        for other, name in [
            ("OPT", r"model\.decoder\.embed_positions\.weight"),
            ("GPT2", r"transformer\.h\.0\.attn\.c_attn\.weight"),
            ("wide", r"model\.layers\.0\.mlp\.gate_proj\.weight \[512, 128\]"),
        ]:
            model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / other).to(DEVICE)
            with pytest.raises(WeightSyncError, match=rf"nothing was sent:\n(.|\n)*{name}"):
                pair.sync(model.state_dict().items())
            assert pair.rpc("digest") == before
            pair.connect()
        pair.sync()
        assert pair.rpc("digest") == before
