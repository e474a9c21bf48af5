"""Syncs of whole families of models into a real vLLM engine: what is sent is served, and comes back bit for bit.

pytest tests/test_architectures.py             what the trainer sends of each, without an engine
pytest tests/test_architectures.py -m slow     into engines; -m long: more families
"""

import pytest
import torch
import transformers
from pair import CORE_IN_PROCESS, DEVICE, Pair, swap_layers
from safetensors.torch import load_file

from recipe.errors import MismatchError
from recipe.learning.grpo import GRPOConfig, GRPOLearner
from recipe.tasks.tiny_model import byte_tokenizer
from rlhf_utils import WeightSyncError

SMALL = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 128}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
WINDOW = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}  # shorter than the prompts
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": 64}
ARCHITECTURES = {
    "OPT": {**SMALL, "num_attention_heads": 4, "word_embed_proj_dim": 128, "ffn_dim": 256},
    "GPT2": {"n_layer": 2, "n_embd": 128, "n_head": 4, "n_positions": 128},  # transposed linear weights
    "Llama": SMALL | HEADS,  # grouped queries
    "Qwen2": {**SMALL, **HEADS, "tie_word_embeddings": True},  # biases
    "Qwen3": SMALL | HEADS,  # normalized queries and keys
    "Gemma2": {**SMALL, **HEADS, **WINDOW, "query_pre_attn_scalar": 32},  # soft-capped attention
    "Gemma3Text": SMALL | HEADS | WINDOW,  # tied, scaled embeddings
    "Phi3": SMALL | HEADS,  # fused projections, in the checkpoint too
    "Mixtral": {**SMALL, **HEADS, "num_local_experts": 4},  # experts, which transformers fuses
}
# What comes before a dash is transformers' name.
MORE_ARCHITECTURES = {
    "Llama-linear": {**SMALL, **HEADS, "rope_parameters": LINEAR},
    "Llama-odd": {**SMALL, **HEADS, "vocab_size": 261, "tie_word_embeddings": True},  # vLLM pads the vocabulary
    "Mistral": {**SMALL, **HEADS, "sliding_window": 16},
    "Qwen3Moe": {**SMALL, **HEADS, "num_experts": 4, "moe_intermediate_size": 64, "num_experts_per_tok": 2},
    "Qwen2-window": {**SMALL, **HEADS, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0},
    "Gemma": SMALL | HEADS,
    "Granite": {**SMALL, "num_attention_heads": 4, "attention_multiplier": 0.05, "logits_scaling": 4.0},
    "Cohere": {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2},  # one norm beside both blocks
    "Olmo3": {**SMALL, "num_attention_heads": 4, **WINDOW},  # norms after the blocks
    "Falcon": {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4},  # one key for all heads
    "GPTJ": {"n_layer": 2, "n_embd": 128, "n_head": 4, "n_positions": 128, "rotary_dim": 16},
    "GPTNeoX": {**SMALL, "num_attention_heads": 4},
    "Nemotron": SMALL | HEADS,
    "Bloom": {"n_layer": 2, "hidden_size": 128, "n_head": 4},
    "Apertus": SMALL | HEADS,
    "Cohere2": SMALL | HEADS | WINDOW,
    # Experts of a size that vLLM pads on CPU.
    "Olmoe": {**SMALL, **HEADS, "intermediate_size": 240, "num_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": {**SMALL, **MLA, "num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 2},
}
PACKED = ("Mixtral", "Qwen3Moe")  # whose experts vLLM packs on a CPU
ENGINE_OPTIONS = {}
if DEVICE.type == "cpu":  # vLLM's kernel for RoPE goes wrong on the parts that MLA rotates, and AMX_MLA takes no fp32
    mla = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}, "attention_backend": "CPU_MLA"}
    ENGINE_OPTIONS["DeepseekV3"] = mla
LOUDNESS = 3 if DEVICE.type == "cpu" else 1  # of the weights: quiet ones hide what differs, loud ones what bf16 rounds


def differs_on_cpu(reason: str):
    return pytest.mark.xfail(DEVICE.type == "cpu", raises=MismatchError, strict=True, reason=reason)


DIFFERENCES = {  # docs/guarantees.md has more on them
    "Bloom": differs_on_cpu("vLLM computes the exact GELU, where Bloom has the approximation by tanh"),
    "Apertus": differs_on_cpu("vLLM computes xIELU's two coefficients in bf16"),
    "Cohere2": differs_on_cpu("vLLM's window is longer by one token"),
}


def build(architecture: str, folder, **changes) -> None:
    """Write a model of two small layers with random weights, and a byte tokenizer."""
    tokenizer = byte_tokenizer()
    special = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": 1, "eos_token_id": tokenizer.eos_token_id}
    config = getattr(transformers, architecture.split("-", maxsplit=1)[0] + "Config")(
        **{"vocab_size": len(tokenizer)} | special | (ARCHITECTURES | MORE_ARCHITECTURES)[architecture] | changes
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.mul_(LOUDNESS if parameter.dim() > 1 else 1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(autouse=True)
def engine_core_in_this_process(monkeypatch):
    for name, value in CORE_IN_PROCESS.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("architecture", ARCHITECTURES | MORE_ARCHITECTURES)
def test_trainer_sends_its_checkpoints_tensors_without_copying_them(tmp_path, architecture):
    build(architecture, tmp_path)
    learner = GRPOLearner(str(tmp_path), GRPOConfig(group_size=2, max_tokens=8), torch.device("cpu"))
    memory = {tensor.untyped_storage().data_ptr() for tensor in learner.model.module.state_dict().values()}
    sent, saved = learner.model.named_tensors(), load_file(tmp_path / "model.safetensors")
    assert len(learner.parameters) == len(list(learner.model.module.parameters()))  # nothing is frozen
    assert sent.keys() == saved.keys()
    assert all(sent[name].equal(saved[name]) for name in saved)
    assert all(tensor.untyped_storage().data_ptr() in memory for tensor in sent.values())


def case(architecture: str, size: int):
    """Every day: transposed weights."""
    marks = [pytest.mark.gpu(1 + size, or_cpu=True)]
    marks += [pytest.mark.slow if architecture in ARCHITECTURES else pytest.mark.long]
    marks += [DIFFERENCES[architecture]] if architecture in DIFFERENCES else []
    return pytest.param(architecture, size, id=f"{architecture}-TP{size}", marks=marks)


SIZES = dict.fromkeys([*ARCHITECTURES, "Llama-odd", "Qwen3Moe"], 2)
SIZES |= dict.fromkeys(["Olmoe", "DeepseekV3", *DIFFERENCES], 1)


@pytest.mark.parametrize(("architecture", "tensor_parallel_size"), [case(*each) for each in SIZES.items()])
def test_weights_arrive_and_come_back(tmp_path, architecture, tensor_parallel_size):
    build(architecture, tmp_path)
    with Pair(tmp_path, tensor_parallel_size, **ENGINE_OPTIONS.get(architecture, {})) as pair:
        from_disk = pair.rpc("digest"), pair.generate()
        assert pair.mismatch() >= 0  # raises if the engine did not load the trainer's weights

        pair.set(pair.perturbed(1))
        with pytest.raises(MismatchError):
            pair.mismatch()
        assert pair.sync().loader == "replay" or architecture in PACKED
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
