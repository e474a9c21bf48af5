"""Tools and environments: what a conversation's tokens are, which of them are learned from, and what tools may do.

pytest tests/test_tools.py
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_learning import CPU, LOSSES, config, rollouts, use_sgd, vector_of

from recipe.errors import MismatchError
from recipe.learning.grpo import GRPOLearner
from recipe.learning.learner import Proof
from recipe.learning.rollout import Rollout
from recipe.tasks.tiny_model import build_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(build_tiny_model(tmp_path_factory.mktemp("model")))


# Which tokens are learned from


def with_answers(learner, at_tools=0.0):
    """Rollouts whose tokens 2 and 3 a tool has said, with the learner's own log-probabilities at the others and
    `at_tools` there."""
    drafts = []
    for own in rollouts(learner):
        ids = [*own.completion_ids[:2], 65, 66, *own.completion_ids[2:]]
        drafts.append(
            replace(own, completion_ids=ids, sampled=[i not in (2, 3) or len(ids) < 4 for i in range(len(ids))])
        )
    with torch.no_grad():
        scores, _ = learner.model.score(drafts, max(len(draft.completion_ids) for draft in drafts))
    return [
        replace(draft, logprobs=np.where(draft.mask, row[: len(draft.mask)], at_tools).tolist())
        for draft, row in zip(drafts, scores, strict=True)
    ]


def test_only_sampled_tokens_have_log_probabilities(model):
    learner = GRPOLearner(model, config(), CPU)
    ids = [5, 6, 7, 8, 9]
    masked = Rollout(ids[:2], ids[2:], [], 0.0, sampled=[True, False, True])
    with torch.no_grad():
        logits = learner.model.module(torch.tensor([ids])).logits[0]
        logprobs, entropies = learner.model.score([masked], 4, entropy=True)
    expected = logits.log_softmax(-1)
    torch.testing.assert_close(
        logprobs[0], torch.stack([expected[1, 7], torch.tensor(0.0), expected[3, 9], torch.tensor(0.0)])
    )
    assert (entropies[0] != 0).tolist() == [True, False, True, False]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("updates", [1, 2])
def test_tokens_of_tools_weigh_nothing(model, loss, updates):
    """Whatever stands for their log-probabilities: the same metrics, of which lengths count sampled tokens, and the
    same weights afterwards."""
    results = []
    for at_tools in (0.0, -7.0):
        learner = GRPOLearner(model, config(loss=loss, kl_coef=0.1, num_mini_batches=updates), CPU)
        use_sgd(learner)
        batch = with_answers(learner, at_tools)
        metrics = learner.learn(batch)
        results.append((metrics, vector_of(learner)))
        assert metrics["logprobs/mismatch"] < 1e-6
        assert metrics["completions/mean_length"] == sum(sum(own.sampled) for own in batch) / len(batch)
    (before, weights), (after, others) = results
    assert before == pytest.approx(after, abs=1e-7)
    torch.testing.assert_close(weights, others)


def test_loss_of_a_conversation_is_the_mean_over_its_sampled_tokens(model):
    learner = GRPOLearner(model, config(loss="grpo", max_grad_norm=1e9), CPU)
    use_sgd(learner)
    batch, before = with_answers(learner)[:2], vector_of(learner)
    batch = [replace(batch[0], reward=1.0), replace(batch[1], reward=0.0)]
    learner.learn(batch)
    moved = vector_of(learner)

    reference = GRPOLearner(model, config(), CPU)
    loss = 0.0
    for own, advantage in zip(batch, (1, -1), strict=True):
        ids, begin = torch.tensor(own.prompt_ids + own.completion_ids), len(own.prompt_ids)
        logprobs = reference.model.module(ids[None]).logits[0].log_softmax(-1)
        sampled = [logprobs[begin + i - 1, ids[begin + i]] for i, counts in enumerate(own.sampled) if counts]
        loss -= advantage * 0.5**0.5 * sum(sampled) / len(sampled) / len(batch)  # 0.5 ** 0.5: over the deviation
    loss.backward()
    gradient = torch.nn.utils.parameters_to_vector([p.grad for p in reference.parameters])
    torch.testing.assert_close(moved - before, -gradient, atol=1e-5, rtol=1e-3)


def test_wrong_token_between_turns_is_a_mismatch(model):
    learner = GRPOLearner(model, config(), CPU, proof=Proof(1e-5))
    batch = [own for own in with_answers(learner) if len(own.completion_ids) > 4]
    assert learner.mismatch(batch) < 1e-6
    ids = list(batch[0].completion_ids)
    ids[3] += 1  # of the tool's answer: what was sampled after it does not have these log-probabilities
    with pytest.raises(MismatchError):
        learner.mismatch([replace(batch[0], completion_ids=ids), *batch[1:]])


def test_tokens_of_older_weights_and_of_tools_prove_nothing(model):
    learner = GRPOLearner(model, config(), CPU, proof=Proof(1e-5))
    own = next(own for own in with_answers(learner) if len(own.completion_ids) > 4)
    versions = [0] * len(own.completion_ids)
    shifted = np.array(own.logprobs) + np.where(own.mask, 0, 3.0)
    assert learner.mismatch([replace(own, logprobs=shifted, versions=versions)]) < 1e-6
    versions = [0 if not counts else -1 for counts in own.sampled]
    with pytest.raises(MismatchError, match="no token comes from the weights"):
        learner.mismatch([replace(own, versions=versions)])
