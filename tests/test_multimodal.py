"""The text of multimodal checkpoints: what learns, what stays frozen, what is sent and saved; also in train_grpo.py.

pytest tests/test_multimodal.py             without an engine
pytest tests/test_multimodal.py -m slow     two ranks; -m long: runs with an engine
"""

import re
from itertools import product
from pathlib import Path

import pytest
import torch
import transformers
from colour import TEMPLATE
from conftest import cpu_only, metrics_of, settings_of
from fakes import materialized
from learners import (
    APART,
    CPU,
    HEADS,
    LOUDNESS,
    SMALL,
    WINDOW,
    assert_same,
    config,
    groups_of_three,
    learn_in_both_layouts,
    on_ranks,
    rollouts,
    scores_and_gradients,
)
from safetensors.torch import load_file, save_file

from trainer.errors import RunError
from trainer.learning import layout
from trainer.learning.exact import missing_operation
from trainer.learning.grpo import GRPOLearner
from trainer.learning.layout import SHARED
from trainer.learning.learner import MERGED
from trainer.run.models import check_model
from trainer.tasks.tiny_model import byte_tokenizer
from weight_sync.lora import LoRAWeight

QWEN_TOKENS = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
QWEN_TOKENS |= {"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}
GEMMA_TOKENS = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
GEMMA_TOKENS |= {f"newlines_{count}": "\n" * count for count in range(1, 5)}  # vLLM looks for them
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}}
INTERLEAVED = {"rope_parameters": MROPE["rope_parameters"] | {"mrope_interleaved": True}}
LINEAR = {f"linear_{name}": 128 for name in ("key_head_dim", "value_head_dim")}  # attention, of a half of the layers
LINEAR |= {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
LINEAR |= {"tie_word_embeddings": True}  # which vLLM reads here
LINEAR |= {"rope_parameters": MROPE["rope_parameters"] | {"partial_rotary_factor": 1.0}}
TOWER = {"hidden_size": 64, "intermediate_size": 96}
QWEN_TOWER = TOWER | {"depth": 1, "patch_size": 14, "num_heads": 2, "out_hidden_size": 128}
IMAGES = {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 4}
# By transformers' name: the special tokens, the language model, the tower, the images that its processor makes.
FAMILIES = {
    "Qwen2_5_VL": (QWEN_TOKENS, MROPE, QWEN_TOWER | {"fullatt_block_indexes": [0]}, IMAGES),
    "Qwen3VL": (
        QWEN_TOKENS,
        INTERLEAVED,
        QWEN_TOWER | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        IMAGES,
    ),
    "Qwen3_5": (QWEN_TOKENS, LINEAR, QWEN_TOWER | {"num_position_embeddings": 16}, IMAGES),
    "Gemma3": (
        GEMMA_TOKENS,
        WINDOW,
        TOWER
        | {
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
            "vision_use_head": False,
        },
        {"size": {"height": 28, "width": 28}},
    ),
}


def build(family: str, folder, loudness: float = LOUDNESS) -> str:
    """Write a model of two small layers and a tower of one, with random weights, and its processor."""
    tokens, text, tower, images = FAMILIES[family]
    plain = byte_tokenizer()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer, **plain.special_tokens_map, extra_special_tokens=tokens
    )
    special = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": 1, "eos_token_id": tokenizer.eos_token_id}
    text = {"vocab_size": len(tokenizer)} | SMALL | HEADS | special | text
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}
    ids |= {name.replace("_id", "_index"): number for name, number in ids.items()}  # as Gemma's config has them
    gemma = {"mm_tokens_per_image": 1} if family == "Gemma3" else {}
    model_config = getattr(transformers, f"{family}Config")(
        text_config=text, vision_config=tower, tie_word_embeddings=True, **ids, **gemma
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(model_config)
    for parameter in model.parameters():
        if not parameter.any() and parameter.dim() > 1:  # Gemma's projector begins with zeros
            torch.nn.init.normal_(parameter, std=0.02)
        parameter.data.mul_(loudness if parameter.dim() > 1 else 1)
    model.save_pretrained(folder)
    if family == "Gemma3":
        file = f"{folder}/model.safetensors"  # gets the hub's names: vLLM knows none that transformers makes anew
        tensors = {re.sub("^vision_tower", "vision_tower.vision_model", name): t for name, t in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
        images = transformers.Gemma3ImageProcessor(**images)
        processor = transformers.Gemma3Processor(images, tokenizer, image_seq_length=1)
    else:
        images, videos = transformers.Qwen2VLImageProcessor(**images), transformers.Qwen2VLVideoProcessor(**images)
        name = family.replace("Qwen3_5", "Qwen3VL")  # which has its processor
        processor = getattr(transformers, f"{name}Processor")(images, tokenizer, videos)
    start = "<start_of_image>" if family == "Gemma3" else "<|vision_start|><|image_pad|><|vision_end|>"
    processor.tokenizer.chat_template = TEMPLATE.replace("<image>", start)
    processor.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    return build(request.param, tmp_path_factory.mktemp(request.param))


def of_language_model(name: str) -> bool:
    """Whether a parameter of this name, as transformers loads it, is of the language model."""
    return "language_model." in name or name.startswith("lm_head.")


def test_model_without_its_processor_is_refused(tmp_path):
    """vLLM starts no engine of it, unless the engine has no tower either, to which a sync would send."""
    model = build("Qwen2_5_VL", tmp_path)
    check_model(model)
    (tmp_path / "processor_config.json").unlink()
    with pytest.raises(RunError, match=r"^cannot load the processor, without which vLLM serves no text either, of "):
        check_model(model)


@pytest.mark.parametrize("adapters", [{}, {"lora_rank": 2, "save_merged": True}], ids=["all", "adapters"])
def test_language_model_learns_and_the_whole_checkpoint_is_sent(model, tmp_path, adapters):
    learner = GRPOLearner(model, config(**adapters), CPU)
    parameters, loaded = dict(learner.model.module.named_parameters()), load_file(f"{model}/model.safetensors")
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    sent = {name: materialized(weight).clone() for name, weight in learner.model.named_tensors().items()}
    assert sent.keys() == loaded.keys()
    assert all(sent[name].equal(loaded[name]) for name in loaded)
    memory = {tensor.untyped_storage().data_ptr() for tensor in learner.model.module.state_dict().values()}
    tensors = [getattr(weight, "base", weight) for weight in learner.model.named_tensors().values()]
    assert all(tensor.untyped_storage().data_ptr() in memory for tensor in tensors)

    for seed in range(2):  # only from the second step on, lora_A changes
        learner.learn(rollouts(learner, seed))
    changed = {name for name in before if not parameters[name].equal(before[name])}
    assert changed == {name for name in before if of_language_model(name) and (not adapters or ".lora_" in name)}
    assert changed == {name for name in before if parameters[name].requires_grad}
    assert any(not of_language_model(name) for name in before)

    learner.save(tmp_path)
    saved, now = tmp_path / MERGED if adapters else tmp_path, learner.model.named_tensors()
    assert any(isinstance(weight, LoRAWeight) for weight in now.values()) == bool(adapters)
    again = transformers.AutoModelForImageTextToText.from_pretrained(saved)
    assert type(again) is type(learner.model.module)
    assert type(transformers.AutoProcessor.from_pretrained(saved)) is type(learner.model.processor)
    written = load_file(saved / "model.safetensors")
    assert written.keys() == loaded.keys()
    assert all(written[name].equal(materialized(weight)) for name, weight in now.items())
    resumed = GRPOLearner(model if adapters else str(tmp_path), config(**adapters), CPU)
    resumed.load_state(tmp_path)
    assert all(materialized(resumed.model.named_tensors()[name]).equal(written[name]) for name in written)


@pytest.mark.usefixtures("torch_arithmetic")
def test_text_has_the_same_scores_in_every_layout_and_exactly(model, monkeypatch):
    learner = GRPOLearner(model, config(), CPU)
    module = learner.model.module
    missing = {"gemma3": "its activation gelu_pytorch_tanh", "qwen3_5": "its Qwen3_5GatedDeltaNet"}
    assert missing_operation(module.config) == missing.get(module.config.model_type, "")
    assert learner.model.shares_prompts == (module.config.model_type not in missing)  # one has windows, one a state
    if not learner.model.shares_prompts:
        return
    group, found = groups_of_three(learner)[:6], []
    for workers, tokens in product((0, 2), (APART, 8)):
        monkeypatch.setattr(layout, "SHARED_TOKENS", tokens)
        learner.model.make_exact(workers)
        assert module.config.get_text_config()._attn_implementation == ("exact" if workers else SHARED)
        found.append(scores_and_gradients(learner.model, group))
    (expected, _, expected_gradients), *others = found
    ids = torch.tensor([[*group[0].prompt_ids, *group[0].completion_ids]])
    begin, count = len(group[0].prompt_ids), len(group[0].completion_ids)
    with torch.no_grad():
        logprobs = module(ids).logits[0, begin - 1 : -1].log_softmax(-1).gather(1, ids[0, begin:, None])[:, 0]
    torch.testing.assert_close(expected[0, :count], logprobs, atol=1e-5, rtol=1e-5)
    for logprobs, _, gradients in others:
        torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
        for name, gradient in expected_gradients.items():
            assert (gradients[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-5, name


def learn_all(folder, batches_by_model):
    for model, batches in batches_by_model.items():
        learn_in_both_layouts(Path(model), model, batches)


@pytest.mark.slow
def test_two_ranks_learn_what_one_learns(tmp_path):
    batches = {}
    for family in ("Qwen3VL", "Gemma3"):
        model = build(family, tmp_path / family, loudness=1)
        learner = GRPOLearner(model, config(), CPU)
        batches[model] = [groups_of_three(learner, seed=seed) for seed in range(2)]
    learn_all(tmp_path, batches)
    on_ranks(2, learn_all, tmp_path, batches)
    for model in batches:
        assert_same([*torch.load(f"{model}/results-1.pt"), *torch.load(f"{model}/results-2.pt")], atol=1e-4)


BFLOAT16 = ["--max-mismatch", 0.02, "--engine-args", '{"dtype": "bfloat16", "enable_prefix_caching": false}']


@cpu_only
@pytest.mark.parametrize(
    ("family", "flags"),
    [
        pytest.param("Qwen2_5_VL", ["--tensor-parallel-size", 2], marks=pytest.mark.long),
        pytest.param("Qwen3VL", ["--lora-rank", 2, "--task", "with_settings"], marks=pytest.mark.long),
        pytest.param("Gemma3", [], marks=pytest.mark.long),
        pytest.param("Qwen3_5", BFLOAT16, marks=pytest.mark.long),  # vLLM's linear attention for CPUs has no fp32
    ],
)
def test_run_from_a_saved_checkpoint_proves_every_sync(script, tmp_path, family, flags):
    adapters = {"lora_rank": 2, "save_merged": True} if "--lora-rank" in flags else {}
    learner = GRPOLearner(build(family, tmp_path / "model"), config(**adapters), CPU)
    learner.learn(rollouts(learner))
    learner.save(tmp_path / "saved")
    size = ["--tensor-parallel-size", 1, "--steps", 2, "--prompts-per-step", 2, "--group-size", 2, "--max-tokens", 8]
    saved = tmp_path / "saved" / MERGED if adapters else tmp_path / "saved"
    settings_of(tmp_path, save_merged=True)
    options = "--topology", "separate", "--model", saved, "--output", "run", *size, *flags
    text = script("train_grpo.py", *options).finish()
    assert text.splitlines()[-1].startswith("OK: reward "), text
    assert f"first sync: {len(learner.model.named_tensors())} tensors" in text
    bound = 0.02 if "--max-mismatch" in flags else 1e-5
    assert max(row["logprobs/mismatch"] for row in metrics_of(tmp_path / "run")) < bound
