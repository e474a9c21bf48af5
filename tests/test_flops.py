"""The arithmetic of learning, counted by hand: what passes forwards, what backwards too, and what passes once for many.

pytest tests/test_flops.py
"""

import math
from dataclasses import replace

import pytest
import torch
from conftest import arguments_of
from learners import CPU, config, rollouts, write_model

import train_ppo
from trainer.learning import flops
from trainer.learning.flops import Work, peak_flops
from trainer.learning.grpo import GRPOLearner
from trainer.learning.layout import PromptGroups
from trainer.learning.ppo import CriticLearner
from trainer.learning.rollout import Rollout

# Of each of 2 layers: queries and output, keys and values of one head, the MLP, and two norms; and the last norm.
BLOCKS = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 64 + 2 * 64) + 64
HEAD = 64 * 258


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model("Llama", tmp_path_factory.mktemp("llama"), num_key_value_heads=1, intermediate_size=64)


def by_hand(batch, blocks=BLOCKS):
    """FLOPs of these rollouts, forwards."""
    sizes = [(len(r.prompt_ids) + len(r.completion_ids), len(r.completion_ids)) for r in batch]
    return sum(2 * (blocks * length + HEAD * scored + 2 * 64 * length**2) for length, scored in sizes)


def graded(batch, *rewards):
    return [replace(rollout, reward=reward) for rollout, reward in zip(batch, rewards, strict=True)]


@pytest.mark.parametrize("epochs", [1, 2])
def test_mfu_is_of_what_passes_in_the_updates(model, monkeypatch, epochs):
    monkeypatch.setitem(flops.PEAK_FLOPS, "cpu", 1e9)
    learner = GRPOLearner(model, config(num_epochs=epochs), CPU)
    batch = graded(rollouts(learner, count=6), 1.0, 0.0, 0.5, 0.5, 0.0, 1.0)
    metrics = learner.learn(batch)
    expected = 3 * by_hand(batch[:2] + batch[4:]) * epochs
    expected += by_hand(batch[2:4]) if epochs == 1 else 0  # what is not learned from: else, it was scored before
    assert learner.model.work.flops == expected
    tokens = sum(len(r.prompt_ids) + len(r.completion_ids) for r in (batch if epochs == 1 else batch[:2] + batch[4:]))
    seconds = tokens * epochs / metrics["perf/train_tokens_per_second"]
    assert metrics["perf/mfu"] == pytest.approx(expected / seconds / 1e9)
    monkeypatch.delitem(flops.PEAK_FLOPS, "cpu")
    metrics = learner.learn(batch)
    assert "perf/mfu" not in metrics
    assert metrics["perf/train_tokens_per_second"] > 0


def test_weights_that_do_not_learn_take_two_thirds(model):
    learner = GRPOLearner(model, config(lora_rank=4, lora_alpha=4), CPU)
    batch = graded(rollouts(learner), 1.0, 0.0, 0.0, 1.0)
    learner.learn(batch)
    adapters = sum(parameter.numel() for parameter in learner.model.adapters)
    tokens = sum(len(r.prompt_ids) + len(r.completion_ids) for r in batch)
    attention = sum(4 * 64 * (len(r.prompt_ids) + len(r.completion_ids)) ** 2 for r in batch)
    frozen = by_hand(batch) - attention
    assert learner.model.work.flops == 2 * frozen + 3 * attention + 6 * adapters * tokens


def test_critics_head_has_one_row(model):
    learner = CriticLearner(model, arguments_of(train_ppo), CPU)
    learner.model.score([Rollout([2] * 3, [3] * 2, [])], 2)
    assert learner.model.work.flops == 6 * (BLOCKS * 5 + 64 * 2 + 2 * 64 * 25)


def test_shared_prompt_counts_once(model):
    work = Work(GRPOLearner(model, config(), CPU).model.module)
    batch = [Rollout([2] * 512, [3] * length, []) for length in (5, 7)]
    with torch.no_grad():
        work.add(batch, PromptGroups([(512, 2, 7)]), scored=12)
    attended = 512**2 + (517**2 - 512**2) + (519**2 - 512**2)
    assert work.flops == 2 * (BLOCKS * (512 + 12) + HEAD * 12 + 2 * 64 * attended)
    assert work.tokens == 512 + 12


def test_images_have_no_count(model):
    work = Work(GRPOLearner(model, config(), CPU).model.module)
    work.add([Rollout([2], [3], [], images=object())], None, scored=1)
    assert math.isnan(work.flops)


def test_of_a_mixtures_experts_only_those_chosen_count():
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 40, "moe_intermediate_size": 8, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 2}
    mixture = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes))
    attention = 2 * 16 * 32 + 2 * 16 * 16 + 2 * 8  # heads that are wider than the model together, and their norms
    blocks = attention + 6 * 16 + 2 * (3 * 16 * 8) + 3 * 16  # the router, two experts, and norms
    assert Work(mixture).flops_of(10, 4, 100, backward=True) == 6 * (blocks * 10 + 16 * 40 * 4 + 32 * 100)
    vars(mixture.config)["num_experts_per_tok"] = None  # as some families have it, whatever this one's checks say
    assert math.isnan(Work(mixture).flops_of(10, 4, 100, backward=True))


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("cpu", None),
    ],
)
def test_peak_is_known_by_the_gpus_name(device, peak):
    assert peak_flops(device) == peak


def test_layers_of_several_widths_have_no_count():
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 40, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "global_head_dim": 16, "num_kv_shared_layers": 0}
    sizes |= {"layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 8}
    model = transformers.AutoModelForCausalLM.from_config(transformers.Gemma4TextConfig(**sizes))
    assert math.isnan(Work(model).flops_of(10, 4, 100, backward=True))
