"""The learning step, and everything else that needs no engine; what it minimizes is in test_objectives.py.

pytest tests/test_learning.py
"""

import errno
import json
import math
import re
import shutil
import sys
from dataclasses import replace

import pytest
import torch
import transformers
from conftest import arguments_of, settings_of
from learners import CPU, LOSSES, MODELS, config, gemma2, rollouts, rounding_learner, use_sgd, vector_of, write_model

import train_distill
import train_grpo
import train_ppo
from trainer.errors import MismatchError, RunError
from trainer.flags import flags_in, with_values
from trainer.learning.batching import micro_batch_slices
from trainer.learning.grpo import GRPOLearner
from trainer.learning.learner import learning_rate, rate_schedule
from trainer.learning.objectives import advantages, kl_estimate
from trainer.learning.offload import Offload
from trainer.learning.policy import Proof, _token_means
from trainer.learning.precision import bf16_weights
from trainer.learning.rollout import Rollout
from trainer.learning.saving import STATE_FILE
from trainer.run import checkpoint
from trainer.run.arguments import RunArguments, of_today, parse, resumed
from trainer.run.checkpoint import Models, choose_models, last_checkpoint, write_checkpoint
from trainer.run.folder import RunFolder
from trainer.tasks.dataset import Row
from trainer.tasks.rewards import Batch, Group
from trainer.tasks.tiny_model import build_tiny_model, byte_tokenizer


def test_log_probabilities_are_the_models_at_the_temperature(model):
    learner = GRPOLearner(model, config(temperature=0.7), CPU)
    rollout = Rollout([5, 6, 7], [8, 9], [], 0.0)
    longer = Rollout([4], [3, 3, 3, 3], [], 0.0)
    with torch.no_grad():
        logits = learner.model.module(torch.tensor([[5, 6, 7, 8, 9]])).logits[0] / 0.7
        logprobs, entropies = learner.model.score([rollout, longer], 4, entropy=True)
    expected = logits.log_softmax(-1)[[2, 3], [8, 9]]
    torch.testing.assert_close(logprobs[0], torch.cat([expected, torch.zeros(2)]))
    entropy = torch.distributions.Categorical(logits=logits[2]).entropy()
    torch.testing.assert_close(entropies[0, 0], entropy)


@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_does_not_depend_on_micro_batches(model, loss):
    weights = []
    for tokens in (1, 30, 1000):
        learner = GRPOLearner(model, config(micro_batch_tokens=tokens, loss=loss, max_grad_norm=1e9), CPU)
        use_sgd(learner)
        learner.learn(rollouts(learner, count=8))
        weights.append(vector_of(learner))
    torch.testing.assert_close(weights[0], weights[1], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(weights[0], weights[2], atol=1e-6, rtol=1e-5)


def test_kl_of_truncated_completions_does_not_depend_on_micro_batches(model):
    kls = []
    for tokens in (1, 1000):
        settings = {"kl_coef": 0.1, "mask_truncated_completions": True, "learning_rate": 1e-3}
        learner = GRPOLearner(model, config(micro_batch_tokens=tokens, **settings), CPU)
        learner.learn(rollouts(learner))  # away from the reference
        truncated = [replace(rollout, truncated=True) for rollout in rollouts(learner, seed=1, count=8)]
        kls.append(learner.learn(truncated)["kl"])
    assert kls[0] == pytest.approx(kls[1], rel=1e-4)
    assert kls[0] > 0


def test_micro_batches_hold_so_many_tokens_with_their_padding():
    def split(sizes, tokens):
        return [sizes[part] for part in micro_batch_slices([(b"", 0, size) for size in sizes], tokens)]

    assert split([9, 7, 5, 5, 3, 2, 1], 10) == [[9], [7], [5, 5], [3, 2, 1]]
    assert split([4, 4, 1], 3) == [[4], [4], [1]]  # no fewer than one sequence
    assert split([], 3) == []
    mixed = [(b"a", 4, 2), (b"", 0, 3), (b"b", 4, 2), (b"b", 4, 1)]  # a group, a sequence of its own, a group
    assert micro_batch_slices(mixed, 100) == [slice(0, 1), slice(1, 2), slice(2, 4)]


def plain_gradient(learner, batch):
    """Of the loss of a first update, whose terms are worked out one completion at a time from all of its logits."""
    config, loss, entropy = learner.config, 0, 0
    group_size, temperature = config.sampling.group_size, config.sampling.temperature
    tokens = sum(len(rollout.completion_ids) for rollout in batch)
    weights = advantages(torch.tensor([r.reward for r in batch]), group_size, config.loss.advantage)
    for rollout, weight in zip(batch, weights, strict=True):
        begin, targets = len(rollout.prompt_ids), torch.tensor(rollout.completion_ids)
        ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids])
        logits = learner.model.module(ids, use_cache=False).logits[0, begin - 1 : -1]
        distribution = torch.distributions.Categorical(logits=logits / temperature)
        logprobs = distribution.log_prob(targets)
        importance = (logprobs.detach() - torch.tensor(rollout.logprobs)).exp().clamp(max=2)
        loss -= (importance * weight * (logprobs - logprobs.detach()).exp()).sum() / tokens
        entropy += distribution.entropy().sum().item() / tokens
    loss.backward()
    return {name: p.grad for name, p in learner.model.module.named_parameters()}, loss.item(), entropy


def assert_gradient_is_the_plain_one(path, **changes):
    settings = {"temperature": 0.7, "max_grad_norm": 1e9, "learning_rate": 0.0, "micro_batch_tokens": 30}
    learner = GRPOLearner(path, config(**settings, **changes), CPU)
    batch = rollouts(learner, count=8)
    batch[2:4] = [replace(r, reward=0.5) for r in batch[2:4]]  # no gradient, but part of the means
    batch = [replace(r, logprobs=[logprob - 0.1 * i for logprob in r.logprobs]) for i, r in enumerate(batch)]
    expected, loss, entropy = plain_gradient(learner, batch)
    learner.model.module.zero_grad(set_to_none=True)
    metrics = learner.learn(batch)
    gradient = {name: parameter.grad for name, parameter in learner.model.module.named_parameters()}
    for name, tensor in expected.items():
        norm = tensor.norm()
        assert (gradient[name] - tensor).norm() <= 1e-5 * norm + 1e-7, name
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)  # what is left of fp32 terms of about 1
    assert metrics["entropy"] == pytest.approx(entropy, rel=1e-5)
    return learner


@pytest.mark.parametrize("gradient_checkpointing", ["false", "true"])
@pytest.mark.parametrize("architecture", MODELS)
def test_gradient_is_that_of_all_logits(tmp_path, monkeypatch, architecture, gradient_checkpointing):
    monkeypatch.setattr("trainer.learning.logprobs.CHUNK", 7)
    path = write_model(architecture, tmp_path, **MODELS[architecture])
    learner = assert_gradient_is_the_plain_one(path, gradient_checkpointing=gradient_checkpointing)
    assert (learner.model.attention[0] == "eager") == (architecture == "Gemma2")


def test_model_without_a_trunk_is_refused(model, monkeypatch):
    monkeypatch.setattr(transformers.OPTForCausalLM, "get_decoder", lambda self: self)  # as Llama 4's text model
    with pytest.raises(RunError, match=r"trunk and its head separately, and OPTForCausalLM has no such trunk"):
        GRPOLearner(model, config(), CPU)


def test_only_completions_go_through_the_head_and_again_in_backward(model, monkeypatch):
    monkeypatch.setattr("trainer.learning.logprobs.CHUNK", 7)
    learner, sizes = GRPOLearner(model, config(), CPU), []
    batch = rollouts(learner, count=4)
    learner.model.module.lm_head.register_forward_hook(
        lambda module, inputs, output: sizes.append(inputs[0].shape[:-1].numel())
    )
    logprobs, _ = learner.model.score(batch, 8)
    tokens = sum(len(rollout.completion_ids) for rollout in batch)
    assert sizes == [7] * (tokens // 7) + [tokens % 7] * (tokens % 7 > 0)
    logprobs.sum().backward()
    assert sum(sizes) == 2 * tokens


def test_checkpointed_blocks_run_again_in_backward(model):
    runs = {}
    for on in ("false", "true", "auto"):  # auto measures only on a GPU
        learner, count = GRPOLearner(model, config(gradient_checkpointing=on), CPU), []
        attention = learner.model.module.model.decoder.layers[0].self_attn
        attention.register_forward_hook(lambda *_, count=count: count.append(1))
        logprobs, _ = learner.model.score([Rollout([5], [6, 7], [], 0.0)], 2)
        logprobs.sum().backward()
        runs[on] = len(count)
    assert runs == {"false": 1, "true": 2, "auto": 2}


@pytest.mark.parametrize(("free", "tokens"), [(10**9, 30_000), (132 * 10**6, 6_000), (50 * 10**6, None)])
def test_blocks_keep_activations_once_there_is_memory_for_them(model, monkeypatch, free, tokens):
    used = iter(range(0, 10**9, 100_000))  # each look at the memory finds 100,000 bytes more in use
    memory = {"mem_get_info": lambda: (free, 10**6), "memory_reserved": lambda: 0}
    for name, value in {**memory, "memory_allocated": lambda: next(used)}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    learner = GRPOLearner(model, config(gradient_checkpointing="true", micro_batch_tokens=30_000), CPU)
    batch = [replace(rollouts(learner, count=1)[0], reward=reward) for reward in (0.0, 1.0)]
    *others, last = learner.model.checkpointing.forwards
    learner.model.checkpointing.measure()
    counts = {block: [] for block in (last, others[0])}
    for block, count in counts.items():
        block.self_attn.register_forward_hook(lambda *_, count=count: count.append(1))
    heads = []
    learner.model.module.lm_head.register_forward_hook(lambda *_: heads.append(1))
    learner.learn(batch)
    assert [len(count) for count in counts.values()] == [1, 2]
    assert len(heads) == 2
    learner.learn(batch)
    assert [len(count) for count in counts.values()] == ([2, 3] if tokens else [2, 4])
    assert len(heads) == (3 if tokens else 4)
    assert learner.model.micro_batch_tokens == pytest.approx(tokens or 30_000, rel=0.1)


def test_a_sequence_longer_than_what_was_measured_is_computed_again(model):
    learner = GRPOLearner(model, config(gradient_checkpointing="true"), CPU)
    batch = rollouts(learner, count=2)
    learner.model.checkpointing.stop()
    learner.model.micro_batch_tokens = 1
    assert not learner.model.computes_again
    learner.learn(batch)
    assert learner.model.computes_again
    assert learner.model.micro_batch_tokens == learner.config.model.micro_batch_tokens


@pytest.mark.parametrize("architecture", MODELS)
def test_bf16_weights_compute_in_bf16_and_fp32_ones_get_gradients(tmp_path, architecture):
    path = write_model(architecture, tmp_path, **MODELS[architecture])
    learner, peer = GRPOLearner(path, config(gradient_checkpointing="true"), CPU), GRPOLearner(path, config(), CPU)
    weights, batch = list(learner.model.module.parameters()), rollouts(learner)
    for weight in peer.model.module.parameters():  # not buffers: rotary frequencies stay fp32
        weight.data = weight.data.bfloat16()
    with bf16_weights(learner.model.module):
        for _ in range(2):  # as two micro-batches do
            logprobs, _ = learner.model.score(batch, 8)
            logprobs.sum().backward()
    expected, _ = peer.model.score(batch, 8)
    expected.sum().backward()
    assert logprobs.equal(expected)
    assert all(mine is weight for mine, weight in zip(learner.model.module.parameters(), weights, strict=True))
    for mine, other in zip(weights, peer.model.module.parameters(), strict=True):
        assert mine.grad.dtype == torch.float32
        assert mine.grad.equal(2 * other.grad.float())


def test_step_raises_the_probability_of_what_was_rewarded(model):
    learner = GRPOLearner(model, config(), CPU)
    batch = rollouts(learner, count=2)
    batch = [
        Rollout(r.prompt_ids, r.completion_ids, r.logprobs, reward) for r, reward in zip(batch, (1.0, 0.0), strict=True)
    ]
    metrics = learner.learn(batch)
    with torch.no_grad():
        after, _ = learner.model.score(batch, 8)
    before = [sum(rollout.logprobs) for rollout in batch]
    assert after[0].sum() > before[0]
    assert after[1].sum() < before[1]
    assert metrics["logprobs/mismatch"] < 1e-6
    assert metrics["reward/mean"] == 0.5


def graded(batch, *rewards):
    return [replace(rollout, reward=reward) for rollout, reward in zip(batch, rewards, strict=True)]


def passes(learner, monkeypatch):
    """The rollouts of each forward pass from now on, by the number of their prompts' tokens, and whether it learns."""
    seen, score = [], learner.model.score

    def watched(rollouts, *args, **options):
        seen.append((sorted(len(rollout.prompt_ids) for rollout in rollouts), torch.is_grad_enabled()))
        return score(rollouts, *args, **options)

    monkeypatch.setattr(learner.model, "score", watched)
    return seen


def numbered(learner, batch):
    """The rollouts with prompts of 1, 2, 3, ... tokens, as the engine would score them, and the entropies."""
    batch = [replace(rollout, prompt_ids=[9] * (i + 1)) for i, rollout in enumerate(batch)]
    with torch.no_grad():
        logprobs, entropies = learner.model.score(batch, 8, entropy=True)
    rows = (row[: len(rollout.completion_ids)].tolist() for rollout, row in zip(batch, logprobs, strict=True))
    return [replace(rollout, logprobs=row) for rollout, row in zip(batch, rows, strict=True)], entropies


@pytest.mark.parametrize(
    ("epochs", "expected"),
    [
        (1, [([1, 2], True), ([3, 4, 5, 6], False)]),
        (2, [([1, 2, 3, 4, 5, 6], False), ([1, 2], True), ([1, 2], True)]),  # all are scored before the first update
    ],
)
def test_groups_of_equal_rewards_cost_one_forward_pass(model, monkeypatch, epochs, expected):
    learner = GRPOLearner(model, config(num_epochs=epochs, max_mismatch=1e-3), CPU)
    batch, entropies = numbered(learner, graded(rollouts(learner, count=6), 1.0, 0.0, 0.5, 0.5, 0.0, 0.0))
    seen = passes(learner, monkeypatch)
    metrics = learner.learn(batch)
    assert seen == expected
    assert metrics["frac_reward_zero_std"] == pytest.approx(2 / 3)
    assert metrics["entropy"] == pytest.approx(float(entropies.sum()) / sum(len(r.completion_ids) for r in batch))
    assert metrics["logprobs/mismatch"] < 1e-6

    batch[4] = replace(batch[4], logprobs=[logprob - 1 for logprob in batch[4].logprobs])
    with pytest.raises(MismatchError):
        learner.learn(batch)


def test_tokens_of_fillers_count_for_nothing_however_unlikely(model):
    learner = GRPOLearner(model, config(kl_coef=0.1), CPU)
    (rollout,) = rollouts(learner, count=1)
    with torch.no_grad():
        learner.model.module.model.decoder.final_layer_norm.weight.mul_(1e4)
    learner.model.rank, learner.model.ranks = 1, 2  # of one rollout, the second rank has a copy
    tensors = learner._completion_tensors([rollout])
    tensors |= {"advantage": torch.ones(1, 1), "left_out": torch.tensor([False])}
    tensors |= dict.fromkeys(("reference_logprobs", "old_logprobs"), tensors["engine_logprobs"])
    batch = learner._rank_batch([rollout], tensors, learner._token_weights)
    learner.model.ranks, width = 1, tensors["mask"].shape[1]
    assert learner.model.score(batch.rollouts, width)[0].min() < -100
    metrics = learner._backward(batch, learner._losses)
    assert metrics == dict.fromkeys(metrics, 0.0)
    assert not any(parameter.grad.any() for parameter in learner.parameters)
    logprobs = learner.model.score(batch.rollouts, width)[0].detach()
    means = _token_means(batch.tensors | {"old_logprobs": logprobs}, learner.config.loss)
    assert means == dict.fromkeys(means, 0.0)


def gradients_of(learner):
    """The gradient of each update from now on, in which the weights stay as they are."""
    use_sgd(learner, rate=0.0)
    gradients = []
    learner.optimizer.register_step_pre_hook(
        lambda *_: gradients.append(torch.cat([parameter.grad.flatten() for parameter in learner.parameters]))
    )
    return gradients


def test_completion_without_a_reward_counts_for_nothing(model, monkeypatch):
    learner, peer = (GRPOLearner(model, config(group_size=size, max_grad_norm=1e9), CPU) for size in (3, 2))
    batch, _ = numbered(learner, graded(rollouts(learner, count=6), 1.0, None, 0.0, None, None, None))
    seen, (gradients, expected) = passes(learner, monkeypatch), map(gradients_of, (learner, peer))
    metrics = learner.learn(batch)
    assert [prompts for prompts, learns in seen if learns] == [[1, 3]]
    peer.learn([batch[0], batch[2]])  # as if there were no others
    torch.testing.assert_close(gradients[0], expected[0])
    assert (metrics["reward/mean"], metrics["reward/std"]) == (0.5, pytest.approx(0.5**0.5))
    assert metrics["frac_reward_zero_std"] == 0.5

    metrics = learner.learn(batch[3:])
    assert "reward/mean" not in metrics
    assert (metrics["loss"], metrics["grad_norm"]) == (0, 0)


def test_steps_first_policy_is_measured_against_the_initial_model(model):
    learner = GRPOLearner(model, config(num_epochs=3, kl_coef=0.1), CPU)
    metrics = learner.learn(rollouts(learner))
    assert metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["loss"] != 0


def test_one_of_several_updates_is_what_a_single_one_is(model, tmp_path):
    initial = str(build_tiny_model(tmp_path, seed=1))
    learners = [
        GRPOLearner(model, config(num_epochs=epochs, kl_coef=0.1, max_grad_norm=1e9), CPU, initial=initial)
        for epochs in (1, 2)
    ]
    batch = graded(rollouts(learners[0], count=6), 1.0, 0.0, 0.5, 0.5, 0.2, None)
    batch[0] = replace(batch[0], logprobs=[logprob + 0.1 for logprob in batch[0].logprobs])
    gradients = [gradients_of(learner) for learner in learners]
    alone, first = (learner.learn(batch) for learner in learners)  # twice the same, since the weights stay
    for gradient in gradients[1]:
        torch.testing.assert_close(gradient, gradients[0][0], atol=1e-6, rtol=1e-4)
    assert (len(gradients[0]), len(gradients[1])) == (1, 2)
    assert first == pytest.approx(alone, rel=1e-4, abs=1e-6)
    assert alone["kl"] > 1e-3


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_epoch_of_mini_batches_has_every_completion_once(model, monkeypatch, loss):
    single, learner = (
        GRPOLearner(model, config(loss=loss, max_grad_norm=1e9, **changes), CPU)
        for changes in ({}, {"num_mini_batches": 2, "num_epochs": 2})
    )
    batch, _ = numbered(single, rollouts(single, count=6))
    (whole, parts), seen = map(gradients_of, (single, learner)), passes(learner, monkeypatch)
    single.learn(batch)
    learner.learn(batch)
    learned = [prompts for prompts, learns in seen if learns]
    assert [len(prompts) for prompts in learned] == [3] * 4
    assert sorted(learned[0] + learned[1]) == sorted(learned[2] + learned[3]) == [1, 2, 3, 4, 5, 6]
    assert learned[0] not in learned[2:]
    lengths = [len(rollout.completion_ids) for rollout in batch]
    for begin in (0, 2):  # a mean over completions, or over tokens
        shares = [
            0.5 if loss == "grpo" else sum(lengths[prompt - 1] for prompt in prompts) / sum(lengths)
            for prompts in learned[begin : begin + 2]
        ]
        expected = sum(share * part for share, part in zip(shares, parts[begin:], strict=False))
        torch.testing.assert_close(whole[0], expected, atol=1e-6, rtol=1e-4)


def test_there_are_no_more_mini_batches_than_completions(model, monkeypatch):
    learner = GRPOLearner(model, config(num_mini_batches=8), CPU)
    batch, seen, updates = rollouts(learner, count=4), passes(learner, monkeypatch), []
    learner.optimizer.register_step_post_hook(lambda *_: updates.append(1))
    learner.learn(batch)
    assert [len(prompts) for prompts, learns in seen if learns] == [1] * 4
    assert len(updates) == 4


def test_later_updates_are_clipped_by_the_steps_first_policy(model):
    once, twice = (GRPOLearner(model, config(num_epochs=epochs, max_grad_norm=1e9), CPU) for epochs in (1, 2))
    batch = graded(rollouts(once, count=4), 1.0, 0.0, 0.0, 1.0)
    for learner in (once, twice):
        use_sgd(learner)
    (old,) = once.model.score_all(batch)
    metrics = once.learn(batch)
    assert (metrics["clip_fraction"], metrics["approx_kl"]) == (0, 0)
    (new,) = once.model.score_all(batch)
    mask = (old != 0).float()
    advantage = torch.tensor([1.0, -1.0, -1.0, 1.0])[:, None] * 0.5 / (0.5**0.5 + 1e-4)
    ratio = (new - old).exp()
    losses = torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.28) * advantage)
    clipped = (losses > -ratio * advantage) * mask
    assert 0 < clipped.sum() < mask.sum()
    learned, tokens = twice.learn(batch), mask.sum()  # its metrics are means over both updates
    assert learned["clip_fraction"] == pytest.approx(float(clipped.sum() / tokens) / 2)
    assert learned["approx_kl"] == pytest.approx(float((kl_estimate(old, new, mask)).sum() / tokens) / 2, rel=1e-3)
    assert 2 * learned["loss"] - metrics["loss"] == pytest.approx(float((losses * mask).sum() / tokens), rel=1e-3)


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_truncated_completions_are_masked_if_asked_for(model, monkeypatch, kl_coef):
    learner = GRPOLearner(model, config(mask_truncated_completions=True, kl_coef=kl_coef), CPU)
    batch = [replace(r, truncated=i % 2 == 0) for i, r in enumerate(rollouts(learner, count=4))]
    seen = passes(learner, monkeypatch)
    metrics = learner.learn(batch)
    learned = [sum(prompts) for prompts, learns in seen if learns]
    assert learned == [len(batch[1].prompt_ids) + len(batch[3].prompt_ids)]
    assert metrics["completions/clipped_ratio"] == 0.5


def test_batch_of_equal_rewards_moves_the_weights_by_momentum_alone(model):
    learner = GRPOLearner(model, config(), CPU)
    learner.learn(rollouts(learner, seed=1))
    before = {name: tensor.detach().clone() for name, tensor in learner.model.module.named_parameters()}
    momentum = [state["exp_avg"].clone() for state in learner.optimizer.state.values()]
    metrics = learner.learn(graded(rollouts(learner, seed=2), 0.5, 0.5, 0.5, 0.5))
    assert (metrics["loss"], metrics["grad_norm"], metrics["frac_reward_zero_std"]) == (0, 0, 1)
    assert metrics["entropy"] > 0
    for state, old in zip(learner.optimizer.state.values(), momentum, strict=True):
        torch.testing.assert_close(state["exp_avg"], 0.9 * old)
    moved = {name for name, tensor in learner.model.module.named_parameters() if not tensor.equal(before[name])}
    assert moved >= {name for name, tensor in before.items() if tensor.dim() > 1}
    learner.max_mismatch = 1e-3
    with pytest.raises(MismatchError):  # such a batch proves the sync as well
        learner.learn([replace(r, logprobs=[p - 1 for p in r.logprobs]) for r in graded(rollouts(learner), *[0.5] * 4)])


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("loss", ["dapo", "cispo"])
def test_step_that_learns_nothing_has_the_metrics_of_others(model, loss, epochs):
    settings = config(loss=loss, num_epochs=epochs, learning_rate=0.01, mask_truncated_completions=True)
    learner = GRPOLearner(model, settings, CPU)
    learned = learner.learn(rollouts(learner, seed=1))  # its momentum moves the weights in all later updates
    batch = [replace(r, logprobs=[p - 9 for p in r.logprobs], truncated=True) for r in rollouts(learner, seed=2)]
    for rewards in [0.1, 0.2, 0.3, 0.4], [0.5] * 4, [None] * 4:
        metrics = learner.learn(graded(batch, *rewards))
        assert learned.keys() - metrics.keys() <= {"reward/mean", "reward/std"}
        assert ("reward/mean" in metrics) == (rewards[0] is not None)
        assert all(map(math.isfinite, metrics.values()))
        assert {metrics[name] for name in ("loss", "grad_norm", "clip_fraction", "approx_kl")} == {0}
        assert metrics["importance/clipped"] == pytest.approx(1)  # of all tokens


@pytest.mark.parametrize("epochs", [1, 2])
def test_importance_metrics_are_of_all_tokens(model, epochs):
    learner = GRPOLearner(model, config(mismatch_correction="icepop", num_epochs=epochs), CPU)
    batch = rollouts(learner, count=4)
    batch[0] = replace(batch[0], logprobs=[logprob + 1 for logprob in batch[0].logprobs])
    batch[1] = replace(batch[1], logprobs=[logprob - 0.5 for logprob in batch[1].logprobs])
    batch[2:] = graded(batch[2:], 0.5, 0.5)
    lengths = [len(rollout.completion_ids) for rollout in batch]
    metrics = learner.learn(batch)
    assert metrics["importance/clipped"] == pytest.approx(lengths[0] / sum(lengths))  # 1 / e is under the floor
    mean = (math.exp(0.5) * lengths[1] + lengths[2] + lengths[3]) / sum(lengths)
    assert metrics["importance/mean"] == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant", [0, 0.5, 1, 1, 1, 1]),
        ("linear", [0, 0.5, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0, 0.5] + [(1 + math.cos(math.pi * done / 4)) / 2 for done in range(4)]),
    ],
)
def test_learning_rates(schedule, factors):
    rate = rate_schedule(config(learning_rate=0.1, lr_scheduler=schedule, warmup_steps=2), steps=6)
    assert [rate(step) for step in range(6)] == pytest.approx([0.1 * factor for factor in factors])


def test_learning_rate_is_the_optimizers(model):
    learner = GRPOLearner(model, config(lr_scheduler="linear", warmup_steps=1), CPU, steps=3)
    start, rates, moved = vector_of(learner), [], []
    for seed in range(3):
        rates.append(learner.learn(rollouts(learner, seed=seed))["learning_rate"])
        moved.append(not vector_of(learner).equal(start))
    assert rates == pytest.approx([0, 1e-3, 5e-4])
    assert moved == [False, True, True]


def test_bound_of_the_mismatch_is_at_least_twice_the_rounding(model):
    learner = rounding_learner(model, 1e-5, temperature=0.5)
    module = learner.model.module
    ids = torch.randint(module.config.vocab_size, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact = (module(ids).logits / 0.5).log_softmax(-1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rounded = (module(ids).logits.float() / 0.5).log_softmax(-1)
    expected = (exact.exp() * (exact - rounded).abs()).sum(-1).mean()
    assert 1e-4 < learner.model.rounding == pytest.approx(float(expected), rel=1e-5)
    assert learner.max_mismatch == 2 * learner.model.rounding
    assert f"the bound of the mismatch is {learner.max_mismatch:.2g}" in learner.remarks()

    for default, changes, bound in [(0.1, {}, 0.1), (1e-5, {"max_mismatch": 1e-4}, 1e-4)]:
        learner = rounding_learner(model, default, **changes)
        assert learner.max_mismatch == bound
        assert learner.remarks() == "the trainer's attention: sdpa, whose logits are eager's but for rounding"
    exact = GRPOLearner(model, config(compile=True), CPU, proof=Proof(1e-5))  # in fp32, as on CPU
    assert exact.max_mismatch == 1e-5


@pytest.mark.parametrize("updates", [{}, {"num_epochs": 2}, {"num_mini_batches": 2}])
def test_mismatch_over_the_bound_updates_nothing(model, updates):
    learner = GRPOLearner(model, config(max_mismatch=1e-5, **updates), CPU)
    before = vector_of(learner)
    batch = [replace(r, logprobs=[p - 0.01 for p in r.logprobs]) for r in rollouts(learner)]
    with pytest.raises(MismatchError, match=r"0\.01 .*the bound of 1e-05\. The two compute different functions"):
        learner.learn(batch)
    assert before.equal(vector_of(learner))
    with pytest.raises(MismatchError):  # rollouts that only prove count as well
        learner.learn(rollouts(learner), batch)
    assert before.equal(vector_of(learner))
    batch[0].logprobs[0] = math.nan
    with pytest.raises(MismatchError, match="are not numbers: nothing was learned yet"):
        learner.mismatch(batch)
    learner.learn(rollouts(learner))
    with pytest.raises(MismatchError, match=r"are not numbers: .* lower --learning-rate"):
        learner.mismatch(batch)


@pytest.mark.parametrize("scale", [3.5, 8.0])  # whose log-probabilities are 7e-6 and 2e-3 off
def test_attention_that_leaves_something_out_is_not_taken(tmp_path, scale):
    path = gemma2(tmp_path, scale)
    learner = GRPOLearner(path, config(kl_coef=0.1), CPU)
    assert "eager, which is slower: sdpa's logits are" in learner.model.attention[1]
    for model in learner.model, learner.reference:
        assert model.module.config._attn_implementation == "eager"
        assert model.module.config.sliding_window == 4096


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_attention_that_is_right_stays(tmp_path, scale):
    learner = GRPOLearner(gemma2(tmp_path, scale, attn_logit_softcapping=None), config(), CPU)
    assert learner.model.attention == ("sdpa", "sdpa, whose logits are eager's but for rounding")


def test_attention_of_a_model_whose_eager_is_wrong_stays(tmp_path):
    from transformers import FalconConfig, FalconForCausalLM

    FalconForCausalLM(
        FalconConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=258, alibi=True)
    ).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    assert GRPOLearner(str(tmp_path), config(), CPU).model.attention == ("sdpa", "sdpa")


def test_attention_that_does_not_know_the_window_is_not_taken(tmp_path, monkeypatch):
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    path = gemma2(tmp_path, 1.0, attn_logit_softcapping=None)
    assert GRPOLearner(path, config(), CPU).model.attention[0] == "sdpa"

    def without_mask(module, query, key, value, attention_mask, **options):
        return sdpa_attention_forward(module, query, key, value, None, **options)

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", without_mask)
    assert GRPOLearner(path, config(), CPU).model.attention[0] == "eager"


def test_mixture_that_returns_its_routers_loss_is_measured_by_its_logits(tmp_path, monkeypatch):
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    sizes = {"num_key_value_heads": 1, "intermediate_size": 64, "num_local_experts": 4}
    path = write_model("Mixtral", tmp_path, output_router_logits=True, **sizes)
    learner = rounding_learner(path, 1e-5)
    assert learner.model.attention[0] != "eager"
    assert learner.model.rounding > 0
    for parameter in (module := learner.model.module).parameters():
        if parameter.shape == (4, 64):
            parameter.data.zero_()  # the router's: now its loss is the same for all prompts
    module.save_pretrained(tmp_path)

    def doubled(*args, **options):
        return 2 * sdpa_attention_forward(*args, **options)[0], None

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", doubled)
    assert GRPOLearner(path, config(), CPU).model.attention[0] == "eager"


def test_gradient_that_is_not_finite_updates_nothing(model):
    learner = GRPOLearner(model, config(advantage="dr_grpo"), CPU)
    before = vector_of(learner)
    with pytest.raises(RunError, match="step 1: the gradient is not finite: nothing was learned yet"):
        learner.learn(graded(rollouts(learner), 1e38, 0.0, 1e38, 0.0))
    assert before.equal(vector_of(learner))
    learner.learn(rollouts(learner))
    with pytest.raises(RunError, match=r"step 2: the gradient is not finite: .* lower --learning-rate"):
        learner.learn(graded(rollouts(learner), 1e38, 0.0, 1e38, 0.0))


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_weights_that_are_not_finite_are_named_at_loading(tmp_path, value):
    folder = build_tiny_model(tmp_path)
    module = transformers.AutoModelForCausalLM.from_pretrained(folder)
    module.model.decoder.layers[1].fc1.bias.data[3] = value
    module.save_pretrained(folder)
    with pytest.raises(RunError, match=r"model\.decoder\.layers\.1\.fc1\.bias has values that are not finite"):
        GRPOLearner(str(folder), config(), CPU)


def test_reference_is_frozen_and_has_no_optimizer(model):
    learner = GRPOLearner(model, config(kl_coef=0.1), CPU)
    assert not any(parameter.requires_grad for parameter in learner.reference.module.parameters())
    assert not hasattr(learner.reference, "optimizer")
    learner.learn(rollouts(learner))
    assert learner.learn(rollouts(learner, seed=1))["kl"] > 0  # it stays as it was


@pytest.mark.parametrize(
    ("changes", "seed"),
    [
        ({}, 123),
        ({"kl_coef": 0.5}, 123),
        ({"lr_scheduler": "cosine", "warmup_steps": 1}, 123),
        ({"num_mini_batches": 2}, 0),  # which the run's seed draws
    ],
)
def test_resumed_update_is_bit_for_bit_the_uninterrupted_one(model, tmp_path, changes, seed):
    whole = GRPOLearner(model, config(**changes), CPU, steps=3)
    first, second = rollouts(whole, seed=1), rollouts(whole, seed=2)
    whole.learn(first)
    checkpoint = write_checkpoint(tmp_path, whole.step, whole.save)
    expected = whole.learn(second)

    resumed = GRPOLearner(str(checkpoint), config(**changes), CPU, seed=seed, initial=model, steps=3)
    resumed.load_state(checkpoint)
    assert resumed.step == 1
    assert resumed.learn(second) == expected
    for (name, a), b in zip(whole.model.module.named_parameters(), resumed.model.module.parameters(), strict=True):
        assert a.equal(b), name


def test_resumed_optimizer_has_this_runs_epsilon(model, tmp_path):
    first = GRPOLearner(model, config(), CPU)
    first.learn(rollouts(first))
    checkpoint = write_checkpoint(tmp_path, 1, first.save)
    resumed = GRPOLearner(str(checkpoint), config(adam_eps=1e-3), CPU)
    resumed.load_state(checkpoint)
    assert [group["eps"] for group in resumed.optimizer.param_groups] == [1e-3]


def test_checkpoint_has_the_models_buffers(tmp_path):
    sizes = {"intermediate_size": 16, "moe_intermediate_size": 16, "q_lora_rank": 16, "kv_lora_rank": 16}
    sizes |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    path = write_model("DeepseekV3", tmp_path / "model", **sizes, num_key_value_heads=2, first_k_dense_replace=1)
    learner = GRPOLearner(path, config(), CPU)
    buffer = learner.model.module.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias")
    buffer.normal_()
    checkpoint = write_checkpoint(tmp_path, 1, learner.save)
    resumed = GRPOLearner(str(checkpoint), config(), CPU)
    assert resumed.model.module.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias").equal(buffer)


def test_offloaded_optimizer_leaves_the_device_each_time_and_not_once(monkeypatch):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    offload, state = Offload(optimizer), optimizer.state[parameter]
    monkeypatch.setattr("trainer.learning.offload.sharded_like", lambda parameter, local: local.clone())  # as to a GPU
    offload.to_host()  # there is nothing yet
    parameter.grad = torch.ones(3)
    for _ in range(3):
        optimizer.step()
        expected = state["exp_avg"].clone()
        offload.to_host()
        assert state["exp_avg"].untyped_storage().data_ptr() == offload.memory.untyped_storage().data_ptr()
        assert state["exp_avg"].equal(expected)
        offload.to_device()
        assert state["exp_avg"].untyped_storage().data_ptr() != offload.memory.untyped_storage().data_ptr()
        assert state["exp_avg"].equal(expected)


def test_checkpoint_that_is_cut_short_leaves_the_last_one(tmp_path):
    write_checkpoint(tmp_path, 1, lambda folder: (folder / "weights").write_text("one"))

    def dies(folder):
        (folder / "weights").write_text("tw")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path, 2, dies)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-000001"]
    copies = ["checkpoint-000001-good", "checkpoint-best"]  # a user's own
    for name in copies:
        (tmp_path / name).mkdir()
    for step in (2, 3):
        write_checkpoint(tmp_path, step, lambda folder: (folder / "weights").write_text("whole"))
    left = {"checkpoint-000002", "checkpoint-000003", *copies}
    assert {path.name for path in tmp_path.iterdir()} == left


def test_run_goes_on_if_an_old_checkpoint_cannot_be_removed(tmp_path, monkeypatch):
    def busy(path, **options):
        raise OSError(errno.EBUSY, "Device or resource busy", path)

    def write(*steps):
        for step in steps:
            write_checkpoint(tmp_path, step, lambda folder: (folder / "weights").write_text("whole"))
        return sorted(int(path.name[-6:]) for path in tmp_path.iterdir())

    with monkeypatch.context() as patch:
        patch.setattr("os.unlink", busy)
        assert write(1, 2, 3) == [1, 2, 3]
    assert write(4) == [3, 4]


def test_run_without_checkpoint_cannot_be_resumed(tmp_path):
    with pytest.raises(RunError, match="no checkpoint"):
        last_checkpoint(tmp_path, None)


@pytest.mark.parametrize("name", ["model.safetensors", STATE_FILE])
def test_corrupt_checkpoint_names_its_file_and_the_checkpoint_before_it(model, tmp_path, name):
    learner = GRPOLearner(model, config(), CPU)
    first, last = (write_checkpoint(tmp_path, step, learner.save) for step in (1, 2))
    assert last_checkpoint(tmp_path, model) == last
    (last / name).write_bytes((last / name).read_bytes()[:-100])
    unreadable = rf"{re.escape(str(last / name))} cannot be read \(.+\)"
    with pytest.raises(RunError, match=rf"^{unreadable}; to go on from {first.name}, remove {re.escape(str(last))}$"):
        last_checkpoint(tmp_path, model)
    shutil.rmtree(first)
    with pytest.raises(RunError, match=f"^{unreadable}, and there is no other checkpoint$"):
        last_checkpoint(tmp_path, model)


def test_runs_of_the_same_second_have_their_own_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with RunFolder(RunArguments(), "test") as one, RunFolder(RunArguments(), "test") as other:
        assert one.path != other.path
    assert {path.name[:5] for path in (tmp_path / "runs").iterdir()} == {"test-"}


def test_run_folder_keeps_metrics(tmp_path):
    args = arguments_of(train_grpo, output=tmp_path / "run", steps=3, learning_rate=1e-4)
    args.run.given = {"learning_rate": 1e-4}
    row = {"reward/mean": 0.5, "reward/std": 0.1, "logprobs/mismatch": 1e-7, "time/sync": 0.02}
    row |= {"time/rollout": 1.0, "time/train": 1.0, "sync/transfer": 0.01, "sync/GBps": 0.1}
    with RunFolder(args.run, "test") as run:
        run.start_metrics(0, with_values(args, {"learning_rate": 1e-3, "group_size": 4}))  # what a script has settled
        for step in (1, 2, 3):
            run.log_metrics(step, row)
    settled = {"steps": 3, "group_size": 4, "learning_rate": 1e-4, "given": ["learning_rate"]}  # given: for --resume
    assert json.loads((tmp_path / "run" / "args.json").read_text()).items() >= settled.items()
    with run.metrics_file.open("a") as file:
        file.write('{"step": 4, "rew')  # a kill cut it short
    write_checkpoint(tmp_path / "run", 2, lambda folder: None)
    with pytest.raises(RunError, match="holds a run already"):
        RunFolder(args.run, "test")
    resumed = arguments_of(train_grpo, resume=tmp_path / "run", steps=3)
    with RunFolder(resumed.run, "test") as run:
        run.start_metrics(2, resumed)  # the checkpoint is of step 2: what came after will be done again
        run.log_metrics(3, row)
    steps = [json.loads(line)["step"] for line in run.metrics_file.read_text().splitlines()]
    assert steps == [1, 2, 3]


def test_metrics_of_an_earlier_run_without_checkpoints_are_replaced(tmp_path, capsys):
    args = arguments_of(train_grpo, output=tmp_path / "run")
    for says in ("", f"{tmp_path / 'run'} had metrics of an earlier run, which these replace\n"):
        with RunFolder(args.run, "test") as run:
            run.start_metrics(0, args)
            assert capsys.readouterr().out == says
            run.log_metrics(1, {"reward/mean": 0.5})
            capsys.readouterr()
        assert len(run.metrics_file.read_text().splitlines()) == 1


def test_libraries_write_to_the_log_and_prints_to_the_screen(tmp_path, capsys):
    with RunFolder(RunArguments(output=tmp_path / "run"), "test"):
        print("printed")
        print("a library's \ud83d", file=sys.stderr)  # half an emoji
    assert capsys.readouterr() == ("printed\n", "")
    assert (tmp_path / "run" / "run.log").read_text() == "a library's \\ud83d\n"


class ActorsError(RunError):
    details = "a traceback in the actor"


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (RunError("no such model"), ""),  # its message, which ends the run, is enough
        (ActorsError("the engine failed"), "a traceback in the actor\n"),
        (KeyError("unexpected"), "Traceback (most recent call last):"),
    ],
)
def test_failed_run_shows_details_and_how_to_go_on(tmp_path, capsys, error, shown):
    args = arguments_of(train_grpo, output=tmp_path / "run")
    for begun in (False, True):
        with pytest.raises(type(error)), RunFolder(args.run, "test") as run:
            if begun:  # before, its checkpoints may be what is wrong
                run.start_metrics(0, args)
                write_checkpoint(run.path, 1, lambda folder: None)
            raise error
        text = capsys.readouterr().out
        assert text.startswith(shown)
        assert text.endswith(f"the last checkpoint is whole; to go on: --resume {run.path}\n") == begun
        assert (text == "") == (not shown and not begun)


@pytest.mark.parametrize(
    ("changes", "default", "builtin"),
    [
        ({}, 1e-6, 3e-3),
        ({"lora_rank": 4}, 1e-5, 3e-3),
        ({"learning_rate": 1e-6}, 1e-6, 1e-6),
        ({"learning_rate": 1e-4, "lora_rank": 4}, 1e-4, 1e-4),
    ],
)
def test_learning_rate_depends_on_what_learns_unless_it_is_given(model, tmp_path, changes, default, builtin):
    for name, used in ((model, default), (None, builtin)):
        args = arguments_of(train_grpo, model=name, **changes)
        _, optimizer = choose_models(tmp_path, args, "cpu")
        assert learning_rate(replace(args, optimizer=optimizer)) == used
        assert args == arguments_of(train_grpo, model=name, **changes)  # what the user said stays as it is


# --- Flags ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def flags(monkeypatch):
    """The arguments of a script with these flags."""

    def parse_flags(script, *given):
        monkeypatch.setattr("sys.argv", ["script.py", *map(str, given)])
        return parse(script.Arguments, script.__doc__)

    return parse_flags


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--group", "4"], "unrecognized arguments: --group 4"),  # no abbreviations
        (["--lr", "1e-3"], "unrecognized arguments: --lr 1e-3"),
        (["--updates", "2"], "unrecognized arguments: --updates 2"),
        (["--num-epochs", "0"], "argument --num-epochs: Input should be greater than or equal to 1, not 0"),
        (["--timeout", "0"], "argument --timeout: Input should be greater than 0, not 0"),
        (["--timeout", "inf"], "argument --timeout: Input should be a finite number, not inf"),
        (["--timeout", "3e6"], "argument --timeout: Input should be less than or equal to 1000000, not 3e6"),
        (["--reward-weights", "1", "nan"], "argument --reward-weights: Input should be a finite number, not nan"),
        (["--seed", "1732612345678"], "argument --seed: Input should be less than 4294967296, not 1732612345678"),
        (["--clip-low", "0.1"], "unrecognized arguments: --clip-low 0.1"),  # a setting is no flag
        (["--model", ""], "argument --model is empty: is a variable of the shell not set?"),
        (["--reward", "mine:right", ""], "argument --reward is empty: is a variable of the shell not set?"),
        (["--resume", "nowhere"], "--resume nowhere: not a run folder"),
    ],
)
def test_flags_that_cannot_be_are_usage_errors(flags, capsys, given, message):
    with pytest.raises(SystemExit):
        flags(train_grpo, *given)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "given", "message"),
    [
        (train_grpo, "--eval-samples 4", "--eval-samples needs --eval-every"),
        (
            train_grpo,
            "--eval-share 0.5 --eval-split test",
            "--eval-share is no share of --eval-dataset or --eval-split",
        ),
        (train_grpo, "--max-tool-iterations 5", "--max-tool-iterations needs --tools or --environment"),
        (train_grpo, "--loss cispo --mismatch-correction tis", "--mismatch-correction does nothing with --loss cispo"),
        (train_grpo, "--engine-url http://a:1 --engines 2", "--engines is for a run's own servers"),
        (train_ppo, "--kl-target 0.1 --kl-coef 0", "--kl-target multiplies --kl-coef, which is 0"),
        (train_grpo, '--engine-args {"max_model_len":64}', "max_model_len has a flag of its own, --max-model-len"),
        (train_grpo, '--engine-args {"quantization":"fp8"}', "quantization has a flag of its own, --quantization"),
        (train_distill, "--group-size 1 --reward-coef 1", "--reward-coef needs a --group-size of 2 or more"),
    ],
)
def test_flag_that_would_do_nothing_is_a_usage_error(flags, capsys, script, given, message):
    with pytest.raises(SystemExit):
        flags(script, *given.split())
    assert message in capsys.readouterr().err


def test_flags_have_both_spellings_lists_grow_and_false_turns_off(flags):
    given = ["--group_size", "4", "--train-vision", "false", "--offload-optimizer", "--tools", "a:b", "--tools", "c:d"]
    args = flags(train_grpo, *given)
    assert (args.sampling.group_size, args.model.train_vision, args.optimizer.offload_optimizer) == (4, False, True)
    assert args.tools.tools == ["a:b", "c:d"]
    assert args.run.given.keys() == {"group_size", "train_vision", "offload_optimizer", "tools"}


def test_settings_come_from_a_task_alone(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "with_settings", raising=False)
    task = settings_of(tmp_path, importance_cap=3, chat_template_kwargs="[]")
    with pytest.raises(SystemExit):
        flags(train_grpo, *task)
    wrong = "DEFAULTS of --task with_settings: chat_template_kwargs: Value error, a JSON object is wanted"
    assert wrong in capsys.readouterr().err
    monkeypatch.delitem(sys.modules, "with_settings")
    args = flags(train_grpo, *settings_of(tmp_path, importance_cap="3"))
    assert args.loss.importance_cap == 3
    assert args.run.given.keys() == {"task"}
    monkeypatch.delitem(sys.modules, "with_settings")


@pytest.mark.parametrize(("script", "workers"), [(train_grpo, None), (train_distill, 1), (train_ppo, 1)])
def test_script_has_defaults_of_its_own_and_what_is_given_replaces_them(flags, script, workers):
    assert flags(script).engine.tensor_parallel_size == workers
    assert flags(script, "--tensor-parallel-size", 4).engine.tensor_parallel_size == 4


def test_flags_that_need_others_are_taken_with_them(flags, tmp_path):
    args = flags(train_grpo, "--output", tmp_path, "--eval-samples", 4, "--eval-every", 5, "--eval-share", 0.5)
    assert args.task.eval_samples == 4
    with RunFolder(args.run, "test") as run:
        run.start_metrics(0, args)
    assert flags(train_grpo, "--resume", tmp_path, "--eval-every", 0).task.eval_samples == 4  # it cannot go
    options = '{"max_num_seqs":5,"kv_cache_dtype":"fp8"}'
    assert flags(train_grpo, "--engine-args", options).engine.engine_args == options


@pytest.mark.parametrize("script", [train_grpo, train_ppo])
def test_help_has_every_flag_once_under_what_it_belongs_to(flags, capsys, script):
    with pytest.raises(SystemExit):
        flags(script, "--help")
    text = capsys.readouterr().out
    heads = re.findall(r"^(\S.*):$", text, re.M)
    assert {"Prompts and rewards", "Which model, how many steps, where the results go"} <= set(heads)
    assert len(heads) == len(set(heads))
    names = re.findall(r"^  (--[\w-]+)", text, re.M)
    taken = flags_in(script.Arguments)
    assert {name.removeprefix("--").replace("-", "_") for name in names} == {
        n for n in taken if not taken[n].is_setting
    }
    (settings,) = re.findall(r"DEFAULTS of a task \(docs/tasks.md\) may also set: (.*)", " ".join(text.split()))
    assert set(re.findall(r"(\w+) \(", settings)) == {name for name in taken if taken[name].is_setting}
    assert len(names) == len(set(names))
    parts = dict(zip(heads, re.split(r"^\S.*:$", text, flags=re.M)[1:], strict=True))
    assert "--dataset" in parts["Prompts and rewards"]
    assert "--kl-coef" not in parts["Prompts and rewards"]
    assert "a longer sequence passes alone (default: 32768)" in " ".join(text.split())
    assert "default: None" not in text


def test_resume_keeps_what_was_given_and_takes_this_scripts_defaults(flags, tmp_path):
    run = str(tmp_path / "run")
    left_out = ["that run had --sleep, which this script does not know: left out"]
    for script, share, given, remarks in (
        (train_grpo, None, ["--output", run, "--group-size", "4", "--learning-rate", "1e-6", "--sleep", "kv"], []),
        (train_distill, 0.8, ["--resume", run], left_out),
        (train_grpo, None, ["--resume", run], []),
    ):
        args = flags(script, *given)
        assert (args.sampling.group_size, args.engine.gpu_memory_utilization) == (4, share)
        # Also one that is what the default is:
        assert set(args.run.given) - {"sleep"} == {"group_size", "learning_rate"}
        assert args.run.remarks == remarks
        with RunFolder(args.run, "test") as folder:
            folder.start_metrics(0, args)
    assert flags(train_grpo, "--resume", run, "--group-size", "2").sampling.group_size == 2


def test_resumed_run_names_flags_that_are_gone_or_differ(flags, tmp_path, capsys):
    args = flags(
        train_grpo, "--output", tmp_path, "--group-size", 4, "--reward", "a:b", "c:d", "--reward-weights", 1, 2
    )
    with RunFolder(args.run, "test") as run:
        run.start_metrics(0, args)
    saved = json.loads((tmp_path / "args.json").read_text())
    saved |= {"updates": 2, "lora_dropout": 0.1, "advantage": "rloo"}
    saved["given"] += ["updates", "lora_dropout", "advantage"]
    (tmp_path / "args.json").write_text(json.dumps(saved))
    capsys.readouterr()

    args = flags(train_grpo, "--resume", tmp_path, "--group-size", 2, "--steps", 40)
    assert (args.sampling.group_size, args.task.reward, args.task.reward_weights) == (2, ["a:b", "c:d"], [1, 2])
    assert args.loss.advantage == "grpo"
    with RunFolder(args.run, "test"):
        pass
    assert capsys.readouterr().out.splitlines() == [
        "that run had --lora-dropout, --updates, --advantage rloo, which this script does not know: left out",
        "not as in that run: --group-size 2 (4), --steps 40 (30)",
    ]
    args = flags(train_grpo, "--resume", tmp_path, "--reward", "e:f")  # whose weight is another matter
    assert (args.task.reward, args.task.reward_weights) == (["e:f"], None)
    assert args.run.remarks[1:] == ["not as in that run: --reward ['e:f'] (['a:b', 'c:d'])"]


GRPO = {"steps": 30, "group_size": 4, "dynamic_sampling": 0, "tensor_parallel_size": 2, "lora_alpha": 32}
INT8 = '{"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}'
ASYNC = GRPO | {"max_staleness": 2, "in_flight": None}


@pytest.mark.parametrize(
    ("saved", "given", "expected"),
    [
        (GRPO, [], {"topology": "separate"}),  # rlhf.py
        (ASYNC, [], {"topology": "separate", "max_staleness": 2}),
        (ASYNC | {"max_staleness": 5}, ["max_staleness"], {"topology": "separate", "max_staleness": 5}),
        (ASYNC | {"engine_url": ["http://a:1"]}, [], {"topology": "servers", "max_staleness": 2}),
        (GRPO | {"engines_per_gpu": None, "sleep": "auto"}, [], {"topology": "shared"}),
        (GRPO | {"quantization_config": None}, [], {"topology": "separate", "quantization": "auto"}),
        (
            GRPO | {"quantization_config": INT8},
            ["quantization_config"],
            {"topology": "separate", "quantization": INT8},
        ),
        ({"placement": "colocated", "group_size": 4}, [], {"topology": "shared"}),  # rlhf_ppo.py
        ({"placement": "split", "group_size": 4}, ["placement"], {"topology": "separate"}),
        (GRPO | {"topology": "shared", "max_staleness": 0}, ["topology"], {"topology": "shared"}),  # train_grpo.py
        (
            GRPO | {"reward": ["recipe.tasks.gsm8k:correct", "mine:recipe"], "map": "recipe.tasks.gsm8k:to_chat"},
            ["reward", "map"],
            {"topology": "separate", "reward": ["trainer.tasks.gsm8k:correct", "mine:recipe"]}
            | {"map": "trainer.tasks.gsm8k:to_chat"},
        ),
        (GRPO | {"lora_alpha": 64}, ["lora_alpha"], {"topology": "separate", "lora_alpha": 64}),  # now a setting
        (GRPO | {"enforce_eager": False}, ["enforce_eager"], {"topology": "separate"}),
    ],
)
def test_runs_of_older_scripts_have_todays_flags(saved, given, expected):
    flags = flags_in(train_grpo.Arguments)
    assert resumed(flags, of_today(flags, saved | {"given": given}), {})[0] == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [("enforce_eager", True), ("attention", "eager"), ("reward_workers", 4), ("reward_resources", "{}")],
)
def test_flag_that_is_gone_is_named_if_it_had_another_value(flags, tmp_path, capsys, name, value):
    (tmp_path / "args.json").write_text(json.dumps(GRPO | {name: value, "given": [name]}))
    with pytest.raises(SystemExit):
        flags(train_grpo, "--resume", tmp_path)
    error = capsys.readouterr().err
    assert f"that run had --{name.replace('_', '-')} {value}. The flag is gone: " in error
    assert f'without "{name}" among those "given" in args.json, the run goes on' in error


# --- Models and checkpoints of a run ----------------------------------------------------------------------------------


def test_run_goes_on_after_folder_and_model_moved(model, tmp_path):
    run, base = tmp_path / "run", shutil.copytree(model, tmp_path / "base")
    write_checkpoint(run, 1, GRPOLearner(str(base), config(), CPU).save)
    run, args = run.rename(tmp_path / "moved"), arguments_of(train_grpo, model=str(base), steps=9)
    args.run.resume, last = run, str(run / "checkpoint-000001")
    base.rename(tmp_path / "new base")
    assert choose_models(run, args, "cpu")[0] == Models(last, last, run / last)
    args.loss.kl_coef = 0.1  # the model is the reference
    with pytest.raises(RunError, match=f"is no longer at {base}: --model says where it is now"):
        choose_models(run, args, "cpu")
    args.run.model = str(tmp_path / "new base")
    assert choose_models(run, args, "cpu")[0] == Models(args.run.model, last, run / last)


def test_finished_run_is_not_resumed(tmp_path):
    model = build_tiny_model(tmp_path / "model")
    write_checkpoint(tmp_path / "run", 7, lambda folder: shutil.copytree(model, folder, dirs_exist_ok=True))
    args = arguments_of(train_grpo, model=str(model), resume=tmp_path / "run", steps=7)
    with pytest.raises(RunError, match="that run has done its 7 steps: ask for more with --steps"):
        choose_models(tmp_path / "run", args, "cpu")
    models, _ = choose_models(tmp_path / "run", with_values(args, {"steps": 8}), "cpu")
    assert models.loaded.endswith("checkpoint-000007")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("builtin", "rate"), [(False, 1e-6), (True, 3e-3)])
def test_run_goes_on_with_its_default_model_on_other_hardware(tmp_path, monkeypatch, device, builtin, rate):
    run = tmp_path / "run"
    model = build_tiny_model(run / "model" if builtin else tmp_path / "default")
    monkeypatch.setattr(checkpoint, "DEFAULT_MODEL", str(model))
    write_checkpoint(run, 7, lambda folder: shutil.copytree(model, folder, dirs_exist_ok=True))
    args = arguments_of(train_grpo, resume=run, steps=8)
    models, optimizer = choose_models(run, args, device)
    last = run / "checkpoint-000007"
    assert models == Models(str(model), str(last), last)
    assert learning_rate(replace(args, optimizer=optimizer)) == rate


@pytest.mark.parametrize(
    ("file", "settings", "message"),
    [
        (
            "adapter_config.json",
            {"base_model_name_or_path": "some/model"},
            "has adapters: give the model that they adapt, some/model, or merge them into it",
        ),
        (
            "config.json",
            {"quantization_config": {"quant_method": "gptq"}},
            r"is quantized \(gptq\): give the unquantized",
        ),
        (
            "config.json",
            {"model_type": "qwen", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}},
            r"is of the type qwen, for which transformers has no class \.\.\.ForCausalLM; code that comes with a model",
        ),
        ("config.json", {"model_type": "t5"}, "is of the type t5, for which"),
        ("config.json", {"model_type": None}, "not a model's folder"),
        (
            "tokenizer_config.json",
            {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Tokenizer", None]}},
            "cannot load the tokenizer of .* contains custom code",
        ),
        ("config.json", {"auto_map": {"AutoModelForCausalLM": "mine.Model"}, "quantization_config": None}, None),
    ],
)
def test_model_that_cannot_be_trained_is_refused_by_its_settings(model, tmp_path, monkeypatch, file, settings, message):
    """Without a question on the screen: transformers would ask whether to run a model's own code."""
    monkeypatch.setattr("builtins.input", pytest.fail)
    folder = shutil.copytree(model, tmp_path / "model")
    kind = {"model_type": "llama"} if file == "tokenizer_config.json" else {}  # which has no tokenizer of its own
    for name, changes in (("config.json", kind), (file, settings)):
        old = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps(old | changes))
    args = arguments_of(train_grpo, model=str(folder))
    if message:
        with pytest.raises(RunError, match=message):
            choose_models(tmp_path, args, "cpu")
    else:
        assert choose_models(tmp_path, args, "cpu")[0].loaded == str(folder)


def test_model_that_transformers_loads_but_would_not_save_is_saved(model, tmp_path):
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"temperature": 0.9}')
    GRPOLearner(str(tmp_path / "model"), config(), CPU).save(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["temperature"] == 0.9
    (tmp_path / "model" / "generation_config.json").write_text('{"early_stopping": true}')
    with pytest.raises(ValueError, match="`early_stopping`: `num_beams`"):  # now, not at the first checkpoint
        GRPOLearner(str(tmp_path / "model"), config(), CPU)


@pytest.mark.parametrize(("every", "steps"), [(4, [4, 8, 10]), (1, list(range(1, 11))), (0, [])])
def test_checkpoints_are_written_as_often_as_asked(tmp_path, monkeypatch, every, steps):
    with RunFolder(RunArguments(save_every=every, steps=10, output=tmp_path / "run"), "test") as run:
        assert [step for step in range(1, 11) if run.saves(step)] == steps
        run.rows = [{"step": 1, "reward/mean": 0.5, "reward/std": 0.1, "logprobs/mismatch": 1e-7, "time/sync": 0.02}]
        batch = Batch([Group(Row("a", {}, "row 0"), [Rollout([1], [2], [0.0], 1.0)])])
        assert run.summary(batch, 0.0).startswith("OK: reward 0.500 -> 1.000")


def test_byte_tokenizer_round_trips():
    tokenizer = byte_tokenizer()
    text = "Grüße, 世界!\n"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_named_tensors_are_made_again_where_a_tensor_moved(tmp_path):
    learner = GRPOLearner(str(build_tiny_model(tmp_path)), config(), CPU)
    name, parameter = next(iter(learner.model.module.named_parameters()))
    sent = learner.model.named_tensors()
    assert learner.model.named_tensors() is sent
    with torch.no_grad():
        parameter.add_(1)
    assert learner.model.named_tensors()[name].equal(parameter)
    for move in ("storage", "parameter"):
        if move == "storage":
            parameter.data = parameter.data.clone()
        else:
            parameter = torch.nn.Parameter(parameter.detach().clone())
            learner.model.module.get_submodule(name.rpartition(".")[0]).register_parameter("weight", parameter)
        moved = learner.model.named_tensors()
        assert moved is not sent
        assert moved[name].data_ptr() == parameter.data_ptr()
        assert learner.model.named_tensors() is moved
        sent = moved


def test_tensors_that_a_conversion_computes_are_computed_for_every_sync(tmp_path, monkeypatch):
    learner = GRPOLearner(str(build_tiny_model(tmp_path)), config(), CPU)
    name, parameter = next(iter(learner.model.module.named_parameters()))
    monkeypatch.setattr(
        "transformers.core_model_loading.revert_weight_conversion", lambda model, tensors: {name: 2 * tensors[name]}
    )
    for _ in range(2):
        with torch.no_grad():
            parameter.add_(1)
        assert learner.model.named_tensors()[name].equal(2 * parameter)
