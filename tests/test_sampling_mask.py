"""Rollouts whose tokens were sampled from some tokens alone (--top-p, --top-k, --min-p): what the trainer computes of
them, against whole sequences in which the logits of all other tokens are -inf; and what an engine is asked for.

pytest tests/test_sampling_mask.py
"""

import math
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import cpu_only
from learners import (
    CPU,
    LLAMA,
    assert_same,
    config,
    groups_of_three,
    learn_in_both_layouts,
    on_ranks,
    rollouts,
    write_model,
)
from pair import Pair

from trainer.errors import MismatchError, RunError
from trainer.learning import layout, logprobs
from trainer.learning.config import SamplingConfig
from trainer.learning.grpo import GRPOLearner
from trainer.learning.policy import Proof
from trainer.learning.rollout import SamplingMask
from trainer.rollouts.options import EngineArguments, EngineSetting, llm_options
from trainer.rollouts.sampling import rollouts_of, sampling_options, settle_sampling
from trainer.tasks.tiny_model import build_tiny_model, byte_tokenizer

CUT = {"top_p": 0.9, "temperature": 0.7}


@pytest.fixture
def llama(tmp_path):
    return write_model("Llama", tmp_path / "model", **LLAMA)


@torch.no_grad()
def sampled(learner, batch, seed=0):
    """The rollouts, each of whose tokens was sampled from itself and up to 9 others, as an engine with the learner's
    weights returns them."""
    draw, made = np.random.default_rng(seed), []
    for own in batch:
        ids = [
            {token, *draw.integers(2, 250, draw.integers(10))} if counts else {}
            for token, counts in zip(own.completion_ids, own.mask, strict=True)
        ]
        mask = SamplingMask(np.int32([*chain(*map(sorted, ids))]), np.int32([*map(len, ids)]))
        masked, engines = replace(own, sampling_mask=mask), np.zeros(len(own.mask))
        engines[own.mask] = expected(learner, masked)[0]
        made.append(replace(masked, logprobs=engines.tolist()))
    return made


def expected(learner, own):
    """Log-probabilities and entropies of a rollout's sampled tokens."""
    ids, begin = torch.tensor([*own.prompt_ids, *own.completion_ids]), len(own.prompt_ids)
    logits = learner.model.module(ids[None]).logits[0, begin - 1 : -1] / learner.model.temperature
    rows = torch.arange(len(logits)).repeat_interleave(torch.tensor(own.sampling_mask.counts))
    inside = torch.zeros_like(logits, dtype=torch.bool)
    inside[rows, own.sampling_mask.token_ids] = True
    distributions = logits.masked_fill(~inside, -torch.inf)[own.mask].log_softmax(-1)
    entropies = torch.special.entr(distributions.exp()).sum(-1)
    return distributions.gather(1, ids[begin:][own.mask][:, None])[:, 0], entropies


@pytest.mark.parametrize("again", ["true", "false"])
@pytest.mark.parametrize("exactly", [False, True])
def test_scores_and_gradients_are_those_of_logits_in_which_the_others_are_masked(
    request, llama, monkeypatch, exactly, again
):
    monkeypatch.setattr(logprobs, "CHUNK", 4)  # fewer than the tokens
    if exactly:
        request.getfixturevalue("torch_arithmetic")
    learner = GRPOLearner(llama, config(**CUT, gradient_checkpointing=again), CPU)
    drafts = rollouts(GRPOLearner(llama, config(), CPU))
    drafts[1] = replace(drafts[1], completion_ids=[5, 6, 7], sampled=[True, False, True])  # a tool has said 6
    batch = sampled(learner, drafts)
    weights = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    loss, means = 0.0, []
    for own, row in zip(batch, weights, strict=True):
        values, entropies = expected(learner, own)
        loss, means = loss + (values * row[: len(own.mask)][own.mask]).sum(), [*means, entropies.detach()]
    loss.backward()
    gradients = [parameter.grad for parameter in learner.parameters]
    learner.optimizer.zero_grad()
    learner.model.make_exact(int(exactly))
    values, entropies = learner.model.score(batch, 8, entropy=True)
    (values * weights).sum().backward()
    for own, row, entropy, mean in zip(batch, values, entropies, means, strict=True):
        torch.testing.assert_close(row[: len(own.mask)].detach(), torch.tensor(own.logprobs), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(entropy[: len(own.mask)][own.mask], mean, atol=1e-5, rtol=1e-5)
    for parameter, gradient in zip(learner.parameters, gradients, strict=True):
        assert (parameter.grad - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6


@pytest.mark.parametrize("updates", [{}, {"num_mini_batches": 2}])
def test_mask_that_is_ignored_is_a_mismatch_and_one_that_is_missing_an_error(llama, updates):
    learner = GRPOLearner(llama, config(**CUT, **updates, kl_coef=0.1), CPU, proof=Proof(1e-5))
    batch = sampled(learner, rollouts(GRPOLearner(llama, config(), CPU)))
    means = [expected(learner, own)[1].detach() for own in batch]
    metrics = learner.learn(batch)
    assert metrics["logprobs/mismatch"] < 1e-6
    assert metrics["importance/mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["kl"] == pytest.approx(0, abs=1e-6)  # the reference normalizes over the same tokens
    assert metrics["entropy"] == pytest.approx(float(torch.cat(means).mean()), rel=1e-4)

    learner = GRPOLearner(llama, config(**CUT, **updates), CPU, proof=Proof(1e-5))
    every = np.arange(258, dtype=np.int32)
    length = len(batch[0].completion_ids)
    ignored = SamplingMask(np.tile(every, length), np.full(length, len(every), np.int32))
    with pytest.raises(MismatchError):
        learner.learn([replace(batch[0], sampling_mask=ignored), *batch[1:]])
    with pytest.raises(RunError, match=r"^--top-p, --top-k and --min-p: the engine has not said from which"):
        learner.learn([replace(batch[0], sampling_mask=None), *batch[1:]])
    assert learner.step == 0


def learn_cut(folder, model, batches):
    learn_in_both_layouts(folder, model, batches, **CUT, kl_coef=0.1, micro_batch_tokens=30)


@pytest.mark.parametrize("ranks", [[1], pytest.param([1, 2], marks=pytest.mark.slow)], ids=len)
def test_shared_prompts_micro_batches_and_ranks_learn_the_same(tmp_path, llama, monkeypatch, ranks):
    monkeypatch.setattr(layout, "SHARED_TOKENS", 8)  # restored after `learn_cut`
    plain, learner = (GRPOLearner(llama, config(**cut), CPU) for cut in ({}, CUT))
    batches = [sampled(learner, groups_of_three(plain, seed=seed), seed) for seed in range(2)]
    learn_cut(tmp_path, llama, batches)
    if 2 in ranks:
        on_ranks(2, learn_cut, tmp_path, llama, batches)
    assert_same([result for count in ranks for result in torch.load(tmp_path / f"results-{count}.pt")])


# --- The engine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [True, False])
def test_masks_of_an_engine_become_packed_arrays(asked):
    output = SimpleNamespace(
        token_ids=[5, 6, 1],
        finish_reason="stop",
        logprobs=SimpleNamespace(logprobs=[-1.0] * 3) if asked else None,
        weight_versions=[SimpleNamespace(version="3", start=0, end=3)],
        sampling_mask=SimpleNamespace(token_ids=[[4, 5, 9], [6], [1, 2]]),
    )
    (rollout,) = rollouts_of([SimpleNamespace(prompt_token_ids=[7], outputs=[output])], byte_tokenizer())
    if not asked:  # an evaluation
        assert rollout.sampling_mask is None
        return
    assert [own.tolist() for own in rollout.sampling_mask] == [[4, 5, 9, 6, 1, 2], [3, 1, 2]]
    assert [own.dtype for own in rollout.sampling_mask] == [np.int32] * 2


@pytest.mark.parametrize(
    ("flags", "cut"),
    [
        ({"top_p": 0.9}, {"top_p": 0.9, "top_k": 1024, "min_p": 0.0}),
        ({"min_p": 0.1}, {"top_p": 1.0, "top_k": 1024, "min_p": 0.1}),
        ({"top_k": 20, "top_p": 0.5}, {"top_p": 0.5, "top_k": 20, "min_p": 0.0}),
        ({}, {}),
    ],
)
def test_engine_that_returns_masks_gets_a_bound_and_no_greedy_request(flags, cut):
    said = []
    settled = settle_sampling(SimpleNamespace(say=said.append), SamplingConfig(**flags), EngineArguments(), "cuda")
    sampling, engine = settled
    assert len(said) == (cut.get("top_k") == 1024) and all(
        "comes with --top-k 1024, which cuts as well" in line for line in said
    )
    asked, greedy = (
        sampling_options(replace(sampling, temperature=temperature), 0, 1, 0, not temperature)
        for temperature in (0.7, 0.0)
    )
    assert {name: asked.get(name) for name in cut} == cut
    assert "top_k" in asked or not cut
    assert asked["temperature"] == 0.7
    assert (greedy["temperature"], greedy.get("top_k")) == ((1.0, 1) if cut else (0.0, None))

    of_student, of_teacher = (
        llm_options(replace(engine, exact="off"), "model", EngineSetting("cuda", extension), [0])[0]
        for extension in ("WorkerExtension", None)
    )
    assert of_student.get("return_sampling_mask", False) == bool(cut)
    assert "return_sampling_mask" not in of_teacher  # whose requests are greedy


def test_flags_are_refused_where_engines_return_no_masks():
    for flags, name in (({"top_p": 0.9}, "--top-p"), ({"top_k": 5}, "--top-k"), ({"min_p": 0.1}, "--min-p")):
        with pytest.raises(RunError, match=f"^{name}: vLLM does not say on a CPU"):
            settle_sampling(None, SamplingConfig(**flags), EngineArguments(), "cpu")
    assert settle_sampling(None, SamplingConfig(), EngineArguments(), "cpu")[1].sampling_mask is False


@cpu_only
@pytest.mark.slow
def test_trainer_normalizes_over_what_vllms_sampler_leaves(tmp_path):
    """On a CPU, an engine returns no masks. What stands for them: all tokens that it gives a probability above 0."""
    from vllm import SamplingParams

    def output_of(output):
        rows = [{token: own.logprob for token, own in row.items()} for row in output.logprobs]
        return SimpleNamespace(
            token_ids=output.token_ids,
            finish_reason=output.finish_reason,
            logprobs=SimpleNamespace(logprobs=[row[token] for row, token in zip(rows, output.token_ids, strict=True)]),
            weight_versions=[SimpleNamespace(version="0", start=0, end=len(rows))],
            sampling_mask=SimpleNamespace(token_ids=[[own for own in row if row[own] > -math.inf] for row in rows]),
        )

    with Pair(build_tiny_model(tmp_path), 1, max_logprobs=258) as pair:
        for flags in ({"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.3}, {"top_p": 0.5, "top_k": 20, "min_p": 0.1}):
            args = config(**flags, temperature=0.7)
            args.sampling, _ = settle_sampling(SimpleNamespace(say=print), args.sampling, args.engine, None)
            options = sampling_options(args.sampling, 0, 1, 0) | {"logprobs": 258}
            requests = pair.llm.generate(["Hello", "the capital"], SamplingParams(**options), use_tqdm=False)
            requests = [
                SimpleNamespace(prompt_token_ids=own.prompt_token_ids, outputs=[*map(output_of, own.outputs)])
                for own in requests
            ]
            batch = rollouts_of(requests, byte_tokenizer())
            assert max(int(own.sampling_mask.counts.max()) for own in batch) < 258
            learner = GRPOLearner(str(tmp_path), args, CPU, proof=Proof(1e-5))
            assert learner.mismatch(batch) < 1e-6
            ignoring = GRPOLearner(str(tmp_path), config(temperature=0.7), CPU, proof=Proof(1e-5))
            with pytest.raises(MismatchError):
                ignoring.mismatch(batch)


@cpu_only
@pytest.mark.long
@pytest.mark.parametrize("door", ["train_grpo.py", "train_ppo.py", "train_distill.py --teacher some"])
def test_run_on_a_cpu_ends_before_anything_loads(script, door):
    run = script(*door.split(), "--top-p", 0.9)
    text = run.finish()
    run.assert_failed_cleanly(text, [])
    assert text.splitlines()[-1].startswith("error: --top-p: vLLM does not say on a CPU which tokens it has left")
