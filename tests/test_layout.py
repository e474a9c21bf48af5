"""Completions behind the prompt that they share, against rows of their own: the same log-probabilities and gradients.

pytest tests/test_layout.py
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from learners import (
    APART,
    CPU,
    LLAMA,
    MODELS,
    assert_same,
    config,
    groups_of_three,
    learn_in_both_layouts,
    on_ranks,
    scores_and_gradients,
    write_model,
)

from trainer.learning import layout
from trainer.learning.grpo import GRPOLearner
from trainer.learning.layout import SHARED, lay_out, one_row
from trainer.learning.model import Model

SHARING = {
    "Llama": LLAMA,
    "Qwen2": LLAMA,
    "Mistral": LLAMA | {"sliding_window": None},
    "OPT": MODELS["OPT"],
    "GPT2": {},
    "GPTNeoX": {},
}
JAMBA = {"mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False, "num_experts": 1}
WITHOUT = {
    "windows of other layers": ("Gemma3Text", LLAMA | {"head_dim": 32, "sliding_window": 4096}),
    "one window for all": ("Mistral", LLAMA | {"sliding_window": 4096}),
    "states of Mamba layers": ("Jamba", LLAMA | JAMBA | {"attn_layer_period": 2, "attn_layer_offset": 1}),
    "positions of its own": ("Bloom", {"n_head": 2}),
}


@pytest.mark.parametrize("exactly", [False, True])
@pytest.mark.parametrize("architecture", SHARING)
def test_completions_behind_one_prompt_score_as_in_own_rows(request, tmp_path, monkeypatch, architecture, exactly):
    if exactly:
        request.getfixturevalue("torch_arithmetic")
    if exactly and architecture not in ("Llama", "Qwen2", "Mistral"):
        pytest.skip("its operations have no exact ones")
    learner = GRPOLearner(write_model(architecture, tmp_path, **SHARING[architecture]), config(), CPU)
    assert learner.model.attention[0] == SHARED
    group = groups_of_three(learner)[:6]  # two groups
    learner.model.make_exact(int(exactly))
    found = []
    for tokens, rows in ((8, 1), (APART, 6)):
        monkeypatch.setattr(layout, "SHARED_TOKENS", tokens)
        assert len(lay_out(group, learner.model.shares_prompts).inputs["input_ids"]) == rows
        found.append(scores_and_gradients(learner.model, group))
    (logprobs, entropies, gradients), (expected, expected_entropies, expected_gradients) = found
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropies, expected_entropies, atol=1e-5, rtol=1e-5)
    whole = torch.stack([gradient.norm() for gradient in expected_gradients.values()]).norm()
    for name, gradient in expected_gradients.items():
        assert (gradients[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7 * whole, name


@pytest.mark.parametrize("kind", WITHOUT)
def test_models_with_more_than_attention_to_all_pass_in_rows(tmp_path, kind):
    architecture, options = WITHOUT[kind]
    model = Model(write_model(architecture, tmp_path, **options), config(), CPU)
    assert not model.shares_prompts


@pytest.fixture
def llama(tmp_path):
    return write_model("Llama", tmp_path / "model", **LLAMA)


@pytest.fixture
def batches(llama, monkeypatch):
    monkeypatch.setattr(layout, "SHARED_TOKENS", 8)  # restored after `learn_in_both_layouts`
    learner = GRPOLearner(llama, config(), CPU)
    return [groups_of_three(learner, seed=seed) for seed in range(2)]


@pytest.mark.parametrize(
    "changes",
    [
        {"mask_truncated_completions": True},  # a group of which one completion teaches nothing
        {"kl_coef": 0.1},
        {"micro_batch_tokens": 15},  # a group in parts
        {"num_mini_batches": 2, "gradient_checkpointing": "false"},
        {"lora_rank": 4},
        pytest.param({"compile": True}, marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_steps_with_shared_prompts_are_those_without(tmp_path, llama, batches, changes):
    learn_in_both_layouts(tmp_path, llama, batches, **changes)
    assert_same(torch.load(tmp_path / "results-1.pt"))


def test_long_and_short_prompts_together_get_rows_of_their_own(batches):
    for rows in (slice(6), slice(9)):  # without the group of the short prompt, and with it
        assert bool(lay_out(batches[0][rows], True).groups) == (rows.stop == 6)


def test_two_ranks_with_shared_prompts_learn_what_one_learns(tmp_path, llama, batches):
    settings = {"mask_truncated_completions": True, "micro_batch_tokens": 30}
    learn_in_both_layouts(tmp_path, llama, batches, **settings)
    on_ranks(2, learn_masked, tmp_path, llama, batches, settings)
    assert_same([result for ranks in (1, 2) for result in torch.load(tmp_path / f"results-{ranks}.pt")])


def learn_masked(folder, model, batches, settings):
    learn_in_both_layouts(folder, model, batches, **settings)


@pytest.mark.slow
def test_compiled_blocks_take_any_number_of_shared_prompts(llama, monkeypatch):
    graphs, compiled = [], torch.compile

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(compiled, backend=count))
    learner = GRPOLearner(llama, config(compile=True), CPU)
    batch = groups_of_three(learner, seed=0)[:6]
    seen = []
    for copies in (1, 2, 3, 4):
        groups = [replace(each, prompt_ids=[*each.prompt_ids[1:], i]) for i in range(copies) for each in batch]
        with learner.model.computing(), torch.no_grad():
            learner.model.module.get_decoder()(**one_row(groups).inputs_on(CPU), use_cache=False)
        seen.append(len(graphs))
    assert seen[-1] == seen[1], seen


def test_micro_batches_count_a_shared_prompt_once(llama, batches):
    batch = [replace(rollout, completion_ids=[7] * 8) for rollout in batches[0]]  # prompts of 8, 10 and 2 tokens
    for tokens, expected in [
        (26, [[3, 4], [5], [0, 1], [2], [6, 7], [8]]),
        (55, [[3, 4, 5, 0], [1, 2], [6, 7, 8]]),  # what has a prompt once, and what has not, pass apart
        (1000, [[3, 4, 5, 0, 1, 2], [6, 7, 8]]),
        (1, [[row] for row in (3, 4, 5, 0, 1, 2, 6, 7, 8)]),
    ]:
        learner = GRPOLearner(llama, config(micro_batch_tokens=tokens), CPU)
        part = learner.model.rank_batch(batch, [True] * 9, {"row": torch.arange(9)})
        assert [part.tensors["row"][micro_batch].tolist() for micro_batch in part.micro_batches] == expected
