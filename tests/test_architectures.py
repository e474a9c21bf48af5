"""Syncs of whole families of models into a real vLLM engine: what is sent is served, and comes back bit for bit.

pytest tests/test_architectures.py             each at TP=2, three of them at TP=1
pytest tests/test_architectures.py -m slow     the others at TP=1
"""

import pytest
import torch
import transformers
from pair import CORE_IN_PROCESS, DEVICE, Pair, swap_layers
from safetensors.torch import load_file

from grpo import GRPOConfig, Learner, MismatchError
from rlhf_utils import WeightSyncError
from tiny_model import byte_tokenizer

SMALL = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 128}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
ARCHITECTURES = {
    "OPT": {**SMALL, "num_attention_heads": 4, "word_embed_proj_dim": 128, "ffn_dim": 256},
    "GPT2": {"n_layer": 2, "n_embd": 128, "n_head": 4, "n_positions": 128},  # transposed linear weights
    "Llama": SMALL | HEADS,  # grouped queries
    "Qwen2": {**SMALL, **HEADS, "tie_word_embeddings": True},  # biases
    "Qwen3": SMALL | HEADS,  # normalized queries and keys
    "Gemma3Text": SMALL | HEADS,  # tied, scaled embeddings
    "Phi3": SMALL | HEADS,  # fused projections, in the checkpoint too
    "Mixtral": {**SMALL, **HEADS, "num_local_experts": 4},  # experts, which transformers fuses
    "Qwen3Moe": {**SMALL, **HEADS, "num_experts": 4, "moe_intermediate_size": 64, "num_experts_per_tok": 2},
}
NOT_ON_CPU = pytest.mark.xfail(
    DEVICE.type == "cpu",
    raises=MismatchError,
    strict=True,
    reason="vLLM 0.32's CPU engine packs experts when it starts, but not when it loads again",
)


def build(architecture: str, folder, **changes) -> None:
    """Write a model of two small layers with random weights, and a byte tokenizer."""
    tokenizer = byte_tokenizer()
    special = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": 1, "eos_token_id": tokenizer.eos_token_id}
    config = getattr(transformers, architecture + "Config")(
        vocab_size=len(tokenizer), **special, **ARCHITECTURES[architecture] | changes
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(autouse=True)
def engine_core_in_this_process(monkeypatch):
    for name, value in CORE_IN_PROCESS.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_trainer_sends_its_checkpoints_tensors_without_copying_them(tmp_path, architecture):
    build(architecture, tmp_path)
    learner = Learner(str(tmp_path), GRPOConfig(group_size=2, max_tokens=8), torch.device("cpu"))
    memory = {parameter.untyped_storage().data_ptr() for parameter in learner.model.parameters()}
    sent, saved = learner.named_tensors(), load_file(tmp_path / "model.safetensors")
    assert sent.keys() == saved.keys()
    assert all(sent[name].equal(saved[name]) for name in saved)
    assert all(tensor.untyped_storage().data_ptr() in memory for tensor in sent.values())


def at_both_sizes(architecture: str) -> list:
    """A case of each size. Most of TP=1, where nothing is split, are left to those who ask for them."""
    marks = [NOT_ON_CPU] if architecture in ("Mixtral", "Qwen3Moe") else []
    slow = [] if architecture in ("GPT2", "Qwen2", "Phi3") else [pytest.mark.slow]
    return [
        pytest.param(
            architecture, size, id=f"{architecture}-TP{size}", marks=[pytest.mark.gpu(1 + size, or_cpu=True), *more]
        )
        for size, more in ((1, marks + slow), (2, marks))
    ]


@pytest.mark.parametrize(
    ("architecture", "tensor_parallel_size"), [case for name in ARCHITECTURES for case in at_both_sizes(name)]
)
def test_weights_arrive_and_come_back(tmp_path, architecture, tensor_parallel_size):
    build(architecture, tmp_path)
    with Pair(tmp_path, tensor_parallel_size) as pair:
        from_disk = pair.rpc("digest"), pair.generate()
        assert pair.mismatch() >= 0  # raises if the engine did not load the trainer's weights

        pair.set(pair.perturbed(1))
        with pytest.raises(MismatchError):
            pair.mismatch()
        pair.sync()
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
        assert (pair.rpc("digest"), pair.generate()) == from_disk  # weights, tokens, log-probabilities: to the last bit


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
