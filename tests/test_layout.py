"""Completions behind the prompt that they share, against rows of their own: the same log-probabilities and gradients.

pytest tests/test_layout.py
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from test_exact import torch_arithmetic  # noqa: F401 - a fixture
from test_learning import CPU, LLAMA, MODELS, config, rollouts, use_sgd, write_model
from test_sharded import on_ranks, weights_of

from recipe.learning import layout
from recipe.learning.grpo import GRPOLearner
from recipe.learning.layout import SHARED, lay_out
from recipe.learning.model import Model

APART = 10**9  # tokens: no prompt is so long
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


def groups_of_three(learner, count=9, seed=0):
    """Rollouts in groups behind prompts of 8 to 12 tokens. The last group's is shorter, so that it passes in rows."""
    drafts = rollouts(learner, seed, count)
    lengths = [2 if row + 3 >= count else 8 + 2 * (row // 3) for row in range(count)]
    batch = [
        replace(d, prompt_ids=[row // 3 + 5] * length)
        for row, (d, length) in enumerate(zip(drafts, lengths, strict=True))
    ]
    batch = [replace(rollout, truncated=row == 0) for row, rollout in enumerate(batch)]
    logprobs = learner.model.score_all(batch)[0]
    return [replace(r, logprobs=row[: len(r.completion_ids)].tolist()) for r, row in zip(batch, logprobs, strict=True)]


def scores_and_gradients(model, group, entropy=True):
    model.module.zero_grad()
    logprobs, entropies = model.score(group, 8, entropy)
    logprobs.square().sum().backward()
    return (
        logprobs.detach(),
        entropies,
        {name: p.grad.clone() for name, p in model.module.named_parameters() if p.requires_grad},
    )


@pytest.mark.parametrize("exactly", [False, True])
@pytest.mark.parametrize("architecture", SHARING)
def test_completions_behind_one_prompt_are_scored_as_in_rows_of_their_own(
    request, tmp_path, monkeypatch, architecture, exactly
):
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


def learn(folder, model, batches, **changes):
    """Two steps, with shared prompts and without. The first rank saves weights and metrics."""
    results = []
    for layout.SHARED_TOKENS in (8, APART):
        learner = GRPOLearner(model, config(group_size=3, max_grad_norm=0.01, **changes), CPU)
        use_sgd(learner)
        results.append(([learner.learn(batch) for batch in batches], weights_of(learner)))
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(results, folder / f"results-{learner.model.ranks}.pt")


def assert_same(results, atol=1e-6):
    (expected_metrics, expected), *others = results
    for metrics, weights in others:
        for row, expected_row in zip(metrics, expected_metrics, strict=True):
            assert row == pytest.approx(expected_row, rel=1e-4, abs=1e-6)
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=atol)


@pytest.fixture
def llama(tmp_path):
    return write_model("Llama", tmp_path / "model", **LLAMA)


@pytest.fixture
def batches(llama, monkeypatch):
    monkeypatch.setattr(layout, "SHARED_TOKENS", 8)  # restored after `learn`
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
    learn(tmp_path, llama, batches, **changes)
    assert_same(torch.load(tmp_path / "results-1.pt"))


def test_long_and_short_prompts_together_get_rows_of_their_own(batches):
    for rows in (slice(6), slice(9)):  # without the group of the short prompt, and with it
        assert bool(lay_out(batches[0][rows], True).group_shapes) == (rows.stop == 6)


def test_two_ranks_with_shared_prompts_learn_what_one_learns(tmp_path, llama, batches):
    settings = {"mask_truncated_completions": True, "micro_batch_tokens": 30}
    learn(tmp_path, llama, batches, **settings)
    on_ranks(2, learn_masked, tmp_path, llama, batches, settings)
    assert_same([result for ranks in (1, 2) for result in torch.load(tmp_path / f"results-{ranks}.pt")])


def learn_masked(folder, model, batches, settings):
    learn(folder, model, batches, **settings)


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
