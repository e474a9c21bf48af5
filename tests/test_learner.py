"""The learning step: what a learner updates, and the metrics. What it minimizes is in test_objectives.py.

pytest tests/test_learner.py
"""

import math
from dataclasses import replace

import pytest
import torch
from learners import CPU, LOSSES, config, numbers, rollouts, rounding_learner, use_sgd, vector_of

from trainer.errors import MismatchError, RunError
from trainer.learning.grpo import GRPOLearner
from trainer.learning.learner import rate_schedule
from trainer.learning.objectives import kl_estimate
from trainer.learning.offload import Offload
from trainer.learning.policy import Proof, _token_means
from trainer.learning.rollout import Rollout, known_rewards
from trainer.tasks.tiny_model import build_tiny_model


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
    assert first.pop("advantage") == alone.pop("advantage") == learners[0].advantages(known_rewards(batch)).tolist()
    assert numbers(first) == pytest.approx(numbers(alone), rel=1e-4, abs=1e-6)
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
    del learned["advantage"]
    batch = [replace(r, logprobs=[p - 9 for p in r.logprobs], truncated=True) for r in rollouts(learner, seed=2)]
    for rewards in [0.1, 0.2, 0.3, 0.4], [0.5] * 4, [None] * 4:
        metrics = learner.learn(graded(batch, *rewards))
        assert len(metrics.pop("advantage")) == len(batch)
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
    with pytest.raises(MismatchError, match="are not numbers: was the last update too large"):
        learner.mismatch(batch)
    learner.learn(rollouts(learner))
    with pytest.raises(MismatchError, match="are not numbers: "):
        learner.mismatch(batch)


@pytest.mark.parametrize(("first", "bound"), [(0.02, 0.1), (0.1, 0.3), (0.4, 0.5), (0.6, None)])
def test_first_batch_of_a_quantized_engine_sets_the_bound(model, first, bound):
    learner = GRPOLearner(model, config(), CPU, proof=Proof(0.1, first_mismatch=0.5))
    sums = lambda mismatch: torch.tensor([10 * mismatch, 10.0, 10.0])  # noqa: E731
    if bound is None:
        with pytest.raises(MismatchError, match=r"over the bound of 0\.5"):
            learner._check_mismatch(sums(first))
        return
    learner._check_mismatch(sums(first))
    learner._check_mismatch(sums(bound - 0.001))  # does not move it
    with pytest.raises(MismatchError, match=f"over the bound of {bound}"):
        learner._check_mismatch(sums(bound + 0.001))
    given = GRPOLearner(model, config(max_mismatch=0.05), CPU, proof=Proof(0.1, first_mismatch=0.5))
    with pytest.raises(MismatchError, match=r"over the bound of 0\.05"):
        given._check_mismatch(sums(0.06))


def test_gradient_that_is_not_finite_updates_nothing(model):
    learner = GRPOLearner(model, config(advantage="dr_grpo"), CPU)
    before = vector_of(learner)
    with pytest.raises(RunError, match=r"step 1: the gradient is not finite: .*--learning-rate"):
        learner.learn(graded(rollouts(learner), 1e38, 0.0, 1e38, 0.0))
    assert before.equal(vector_of(learner))
    learner.learn(rollouts(learner))
    with pytest.raises(RunError, match="step 2: the gradient is not finite: "):
        learner.learn(graded(rollouts(learner), 1e38, 0.0, 1e38, 0.0))


def test_reference_is_frozen_and_has_no_optimizer(model):
    learner = GRPOLearner(model, config(kl_coef=0.1), CPU)
    assert not any(parameter.requires_grad for parameter in learner.reference.module.parameters())
    assert not hasattr(learner.reference, "optimizer")
    learner.learn(rollouts(learner))
    assert learner.learn(rollouts(learner, seed=1))["kl"] > 0  # it stays as it was


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


def test_weight_that_the_optimizer_does_not_have_is_named(model):
    learner = GRPOLearner(model, config(), CPU)
    norm = learner.model.module.model.decoder.final_layer_norm
    norm.weight = torch.nn.Parameter(norm.weight.detach().clone())
    before = vector_of(learner)
    with pytest.raises(RunError, match=r"^model.decoder.final_layer_norm.weight would not learn: "):
        learner.learn(rollouts(learner))
    assert vector_of(learner).equal(before)
