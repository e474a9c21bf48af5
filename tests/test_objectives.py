"""What the learning step minimizes, against numbers worked out by hand and against TRL.

pytest tests/test_objectives.py
"""

import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from trainer.learning.objectives import (
    ObjectiveConfig,
    advantages,
    importance_weights,
    kl_estimate,
    loss_weights,
    sequence_mean,
    token_losses,
    token_weights,
)

LOSSES = ("grpo", "dr_grpo", "dapo", "gspo", "cispo")


def config(**changes):
    return ObjectiveConfig(**changes)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # Groups (1, 3) and (0, 8): means 2 and 4, standard deviations sqrt(2) and sqrt(32); of all four, centered,
        # (-1, 1, -4, 4): sqrt(34 / 3).
        ("grpo", [-1 / (math.sqrt(2) + 1e-4), 1 / (math.sqrt(2) + 1e-4), -4 / (math.sqrt(32) + 1e-4), 0.70709]),
        ("dr_grpo", [-1, 1, -4, 4]),
        ("reinforce++", [v / (math.sqrt(34 / 3) + 1e-4) for v in (-1, 1, -4, 4)]),
    ],
)
def test_advantages(kind, expected):
    result = advantages(torch.tensor([1.0, 3.0, 0.0, 8.0]), 2, kind)
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float32), atol=1e-5, rtol=1e-5)


def test_advantages_of_equal_rewards_are_zero():
    for kind in ("grpo", "dr_grpo", "reinforce++"):
        for reward in (0.5, 0.1, 1000.1):  # of which the mean of eight may be another, by rounding
            assert advantages(torch.full((16,), reward), 8, kind).tolist() == [0] * 16


def test_reward_that_is_not_known_counts_for_nothing():
    unknown = math.nan
    one_of_each = torch.tensor([1.0, 0.0] + [unknown] * 6)
    assert advantages(one_of_each, 8, "grpo").tolist() == pytest.approx([0.70701, -0.70701] + [0] * 6, abs=1e-4)
    batch = torch.tensor([unknown, 1.0, 3.0, unknown, 5.0, unknown, unknown, unknown])
    assert advantages(batch, 4, "dr_grpo").tolist() == [0, -1, 1, 0, 0, 0, 0, 0]
    # Centered, 1, 3 and 5 are -1, 1 and 0: their deviation is 1.
    assert advantages(batch, 4, "reinforce++").tolist() == pytest.approx([0, -1, 1, 0, 0, 0, 0, 0], abs=1e-3)


def test_unknown_advantage_is_an_error():
    with pytest.raises(ValueError, match="unknown advantage"):
        advantages(torch.ones(4), 2, "ppo")


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("grpo", [[0.5, 0, 0, 0], [1 / 6, 1 / 6, 1 / 6, 0]]),
        ("gspo", [[0.5, 0, 0, 0], [1 / 6, 1 / 6, 1 / 6, 0]]),
        ("dr_grpo", [[1 / 16, 0, 0, 0], [1 / 16, 1 / 16, 1 / 16, 0]]),
        ("dapo", [[1 / 4, 0, 0, 0], [1 / 4, 1 / 4, 1 / 4, 0]]),
        ("cispo", [[1 / 4, 0, 0, 0], [1 / 4, 1 / 4, 1 / 4, 0]]),
    ],
)
def test_token_weights(loss, expected):
    mask = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 0]])
    torch.testing.assert_close(token_weights(mask, config(loss=loss), max_tokens=8), torch.tensor(expected))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"loss": "dapo"}, [[1 / 6] * 2, [1 / 6] * 2, [0, 0]]),  # the mean is over the last two tokens as well
        ({"loss": "dapo", "kl_coef": 0.1}, [[1 / 6] * 2, [1 / 6] * 2, [1 / 6] * 2]),
        ({"loss": "dapo", "left_out": True}, [[1 / 4] * 2, [0, 0], [0, 0]]),
        ({"loss": "grpo", "left_out": True}, [[1 / 6] * 2, [0, 0], [0, 0]]),
        ({"loss": "grpo", "left_out": True, "kl_coef": 0.1}, [[1 / 6] * 2, [0, 0], [1 / 6] * 2]),
    ],
)
def test_completions_without_a_gradient_or_left_out_weigh_nothing(changes, expected):
    advantage, left_out = torch.tensor([[1.0], [-1.0], [0.0]]), torch.tensor([False, "left_out" in changes, False])
    changes.pop("left_out", None)
    weights = loss_weights(torch.ones(3, 2), advantage, left_out, config(**changes), max_tokens=8)
    torch.testing.assert_close(weights, torch.tensor(expected))


RATIOS = torch.tensor([[1.5, 0.5, 1.2, 0.9]])


def losses_and_slopes(advantage, mask=None, ratios=RATIOS, **changes):
    """Losses of tokens whose probabilities were 1, also the engine's, and are these ratios; their slopes by
    log-probability; and where they are clipped."""
    logprobs = ratios.log().requires_grad_()
    mask, ones = torch.ones_like(ratios) if mask is None else mask, torch.zeros_like(ratios)
    losses, clipped = token_losses(logprobs, ones, ones, torch.tensor([advantage]), mask, config(**changes))
    losses.sum().backward()
    return losses.detach(), logprobs.grad, clipped


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize(
    ("advantage", "expected", "slopes"),
    [
        (1.0, [[-1.28, -0.5, -1.2, -0.9]], [[0, -0.5, -1.2, -0.9]]),
        (-1.0, [[1.5, 0.8, 1.2, 0.9]], [[1.5, 0, 1.2, 0.9]]),
    ],
)
def test_clipping_is_higher_above_and_only_lowers_the_objective(loss, advantage, expected, slopes):
    losses, gradient, clipped = losses_and_slopes(advantage, loss=loss)
    torch.testing.assert_close(losses, torch.tensor(expected))
    torch.testing.assert_close(gradient, torch.tensor(slopes))
    assert clipped.equal(gradient == 0)


def test_clip_range_can_be_set():
    losses, *_ = losses_and_slopes(1.0, clip_low=0.05, clip_high=0.1)
    torch.testing.assert_close(losses, -torch.tensor([[1.1, 0.5, 1.1, 0.9]]))
    losses, *_ = losses_and_slopes(-1.0, loss="cispo", clip_low=0.05, clip_high=0.1)
    torch.testing.assert_close(losses, torch.tensor([[1.1, 0.95, 1.1, 0.95]]) * RATIOS.log())


def test_gspo_has_one_ratio_for_each_completion():
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0]])  # the last is padding
    mean = (1.5 * 0.5 * 1.2) ** (1 / 3)
    losses, gradient, _ = losses_and_slopes(1.0, mask, loss="gspo", clip_low=0.2, clip_high=0.28)
    torch.testing.assert_close(losses, torch.full((1, 4), -mean))
    torch.testing.assert_close(gradient, torch.full((1, 4), -mean))
    losses, gradient, _ = losses_and_slopes(-1.0, mask, loss="gspo")  # 0.965 is below its own 1 - 3e-4
    torch.testing.assert_close(losses, torch.full((1, 4), 1 - 3e-4))
    assert gradient.tolist() == [[0] * 4]
    losses, *_ = losses_and_slopes(1.0, ratios=1 / RATIOS, loss="gspo")
    torch.testing.assert_close(losses, torch.full((1, 4), -1 - 4e-4))


def test_gspo_gives_a_completion_without_tokens_a_ratio_of_1():
    assert sequence_mean(torch.zeros(1, 3), torch.zeros(1, 3)).tolist() == [[0.0] * 3]


def test_gspo_has_no_gradient_of_tokens_that_a_correction_drops():
    logprobs = torch.tensor([[-1.0, -2.0, -1.5]], requires_grad=True)
    old = logprobs.detach()
    engine = old - torch.tensor([[0.0, 3.0, 0.1]])  # w of the second token is e^3, which IcePop drops
    settings = config(loss="gspo", mismatch_correction="icepop")
    losses, _ = token_losses(logprobs, old, engine, torch.tensor([1.0]), torch.ones(1, 3), settings)
    losses.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-1.0, 0.0, -math.exp(0.1)]]))


def test_cispo_clips_the_engines_ratio_and_keeps_the_gradient():
    logprobs, old = torch.tensor([[-1.0, -1.0, -1.0]], requires_grad=True), torch.tensor([[-1.0, -1.1, -0.8]])
    engine = logprobs.detach() - torch.tensor([[7.0, 0.01, 1.2]]).log()
    for advantage in (1.0, -1.0):
        logprobs.grad = None
        losses, clipped = token_losses(
            logprobs, old, engine, torch.tensor([advantage]), torch.ones(1, 3), config(loss="cispo")
        )
        losses.sum().backward()
        assert clipped.tolist() == [[True, False, False]]
        weights = torch.tensor([[5.0, 0.01, 1.2]])  # bounded above only
        torch.testing.assert_close(losses.detach(), advantage * weights)
        torch.testing.assert_close(logprobs.grad, -advantage * weights)
    weights, outside = importance_weights(logprobs.detach(), engine, torch.ones(1, 3), config(loss="cispo"))
    torch.testing.assert_close(weights, torch.tensor([[5.0, 0.01, 1.2]]))
    assert outside.tolist() == [[True, False, False]]


def test_gradient_of_the_kl_estimate_is_the_kls():
    """Over all tokens of a small vocabulary, each as likely as the policy says."""
    scores = torch.tensor([0.3, -1.0, 0.7, 0.1], requires_grad=True)
    reference = torch.tensor([-0.4, 0.2, 0.5, -0.1]).log_softmax(0)
    logprobs = scores.log_softmax(0)
    (logprobs.exp() * (logprobs - reference)).sum().backward()
    expected, scores.grad = scores.grad.clone(), None
    logprobs = scores.log_softmax(0)[None]
    old = logprobs.detach()
    losses, _ = token_losses(
        logprobs, old, old, torch.zeros(1), torch.ones_like(old), config(kl_coef=1.0), reference[None]
    )
    (old.exp() * losses).sum().backward()
    torch.testing.assert_close(scores.grad, expected)


@pytest.mark.parametrize(
    ("changes", "weights", "outside"),
    [
        # Ratios 1, e and 1/e, with a product of 1; 2, 2 and 1/8, 1/2; the last token of the second row is padding.
        ({}, [[1, 2, math.exp(-1)], [2, 2, 0.125]], [[0, 1, 0], [0, 0, 0]]),
        ({"importance_cap": 1.5}, [[1, 1.5, math.exp(-1)], [1.5, 1.5, 0.125]], [[0, 1, 0], [1, 1, 0]]),
        ({"mismatch_correction": "none"}, [[1] * 3] * 2, [[0] * 3] * 2),
        ({"mismatch_correction": "icepop"}, [[1, math.e, 0], [2, 2, 0]], [[0, 0, 1], [0, 0, 1]]),
        (
            {"mismatch_correction": "icepop", "importance_cap": 2.5, "importance_floor": 0.1},
            [[1, 0, math.exp(-1)], [2, 2, 0.125]],
            [[0, 1, 0], [0, 0, 0]],
        ),
        ({"mismatch_correction": "sequence_mask"}, [[1] * 3, [0] * 3], [[0] * 3, [1] * 3]),
        ({"mismatch_correction": "sequence_mask", "importance_cap": 4.5}, [[1] * 3, [4] * 3], [[0] * 3] * 2),
    ],
)
def test_importance_weights(changes, weights, outside):
    log_ratios = torch.tensor([[0.0, 1.0, -1.0], [math.log(2), math.log(2), math.log(0.125)]])
    old, mask = torch.tensor([[-1.0, -0.5, -2.0], [-1.0, -1.0, -3.0]]), torch.tensor([[1.0, 1, 1], [1, 1, 0]])
    result, out_of_bounds = importance_weights(old, old - log_ratios, mask, config(**changes))
    torch.testing.assert_close(result, torch.tensor(weights, dtype=torch.float32))
    assert out_of_bounds.int().tolist() == outside


def test_sequence_mask_keeps_what_the_trainer_finds_less_likely():
    old, engine = torch.tensor([[-3.0, -2.0]]), torch.tensor([[-1.0, -1.0]])  # a product of e^-3, below the floor
    result, out_of_bounds = importance_weights(
        old, engine, torch.ones(1, 2), config(mismatch_correction="sequence_mask", importance_floor=0.5)
    )
    torch.testing.assert_close(result, torch.full((1, 2), math.exp(-3)))
    assert not out_of_bounds.any()


def test_losses_are_weighted_by_importance_and_the_kl_is_not():
    logprobs, engine = torch.tensor([[-1.0, -1.0, -1.0]]), torch.tensor([[-1.0, -2.0, 0.0]])
    advantage, mask = torch.tensor([2.0]), torch.ones(1, 3)
    importance = torch.tensor([[1.0, 2.0, math.exp(-1)]])
    losses, _ = token_losses(logprobs, logprobs, engine, advantage, mask, config())
    torch.testing.assert_close(losses, -2 * importance)
    reference = torch.tensor([[-1.0, -1.5, -1.0]])
    kl = kl_estimate(logprobs, reference, mask)
    torch.testing.assert_close(kl, torch.tensor([[0.0, math.exp(-0.5) + 0.5 - 1, 0.0]]))
    losses, _ = token_losses(logprobs, logprobs, engine, advantage, mask, config(kl_coef=0.1), reference)
    torch.testing.assert_close(losses, -2 * importance + 0.1 * kl)


def trl_loss(logprobs, old_logprobs, importance, advantage, mask, reference_logprobs, settings):
    """GRPOTrainer's loss for one batch, with its own settings. It would compute these log-probabilities itself."""
    from trl import GRPOTrainer

    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        args=SimpleNamespace(use_bias_correction_kl=True, delta=None, steps_per_generation=1),
        current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        **settings,
    )
    ids = torch.ones_like(mask)
    inputs = {"prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": mask}
    inputs |= {"advantages": advantage, "old_per_token_logps": old_logprobs, "importance_sampling_ratio": importance}
    inputs |= {"ref_per_token_logps": reference_logprobs, "num_items_in_batch": mask.sum()}
    return GRPOTrainer._compute_loss(trainer, trainer.model, inputs)


@pytest.mark.slow  # importing TRL takes 12 s
@pytest.mark.parametrize(
    ("loss", "kl_coef"),
    # TRL multiplies the KL of GSPO by the completion's ratio, which leaves it biased: no comparison.
    [(loss, kl_coef) for loss in LOSSES for kl_coef in (0.0, 0.1) if (loss, kl_coef) != ("gspo", 0.1)],
)
def test_loss_and_gradient_are_those_of_trl(loss, kl_coef):
    generator, lengths = torch.Generator().manual_seed(0), torch.tensor([5, 1, 3, 4, 2, 5])
    mask = (torch.arange(5) < lengths[:, None]).float()
    logprobs, old, engine, reference = (
        mask * (-2 + spread * torch.randn(mask.shape, generator=generator)) for spread in (0.5, 0.5, 0.7, 0.5)
    )
    advantage = torch.tensor([1.0, -1.0, 0.0, 0.0, 0.3, -0.3])[:, None]
    left_out = torch.tensor([True, False, False, True, False, False])
    ours = config(loss=loss, kl_coef=kl_coef, clip_low=0.1, clip_high=0.2)
    settings = {"loss_type": loss, "importance_sampling_level": "token", "beta": kl_coef, "max_completion_length": 8}
    settings |= {"epsilon_low": 0.1, "epsilon_high": 0.2}
    if loss == "gspo":
        settings |= {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    if loss == "cispo":
        ours.clip_low, settings["epsilon_high"] = 1.0, 1.2  # TRL names the bound itself, and has no lower one
    if loss in ("gspo", "cispo"):
        engine = old  # TRL weights the completion's mean, or the clipped ratio, by each token's importance

    def ours_of(logprobs):
        weights = loss_weights(mask, advantage, left_out, ours, max_tokens=8)
        losses, _ = token_losses(logprobs, old, engine, advantage, mask, ours, reference)
        return (losses * weights).sum()

    def theirs_of(logprobs):
        importance, _ = importance_weights(old, engine, mask, ours)
        kept = mask * ~left_out[:, None]
        return trl_loss(logprobs, old, importance, advantage[:, 0], kept, reference, settings)

    results = []
    for function in (ours_of, theirs_of):
        variable = logprobs.clone().requires_grad_()
        value = function(variable)
        value.backward()
        results.append((value.detach(), variable.grad))
    (value, gradient), (their_value, their_gradient) = results
    assert value.abs() > 1e-3
    torch.testing.assert_close(value, their_value)
    torch.testing.assert_close(gradient, their_gradient)
