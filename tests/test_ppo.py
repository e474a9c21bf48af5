"""PPO: its formulas by hand, what policy and critic learn, the models beside the policy, and whole runs of rlhf_ppo.py.

pytest tests/test_ppo.py            functions, and the models beside the policy
pytest tests/test_ppo.py -m slow    runs; rewards as Ray tasks
"""

import argparse
import json
import os
import random
import re
import shutil
import sys
import time
from dataclasses import replace

import psutil
import pytest
import ray
import torch
import torch.distributed as dist
from conftest import ROOT, Script, cpu_only
from pair import CORE_IN_PROCESS
from safetensors.torch import load_file, save_file
from test_learning import CPU, rollouts
from test_sharded import on_ranks, weights_of
from test_task import chat_tokenizer
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

import rlhf_ppo
from recipe import ppo
from recipe.arguments import RunArguments
from recipe.errors import MismatchError, RunError, TaskError
from recipe.learner import Rollout
from recipe.ppo import CriticLearner, PPOConfig, PPOLearner, estimate
from recipe.ppo_models import RewardScorer, Scorer, check_critic, check_reward_model, choose_ppo_models
from recipe.precision import bf16_weights, freeze
from recipe.ray_session import RaySession
from recipe.reward_workers import RayRewards, run_reward
from recipe.rewards import Group
from recipe.run_folder import RunFolder
from recipe.task import load_task
from recipe.tiny_model import build_tiny_model
from recipe.tiny_reward_model import build_tiny_reward_model, examples, points
from rlhf_utils import WeightSyncError


def config(**changes):
    return PPOConfig(**{"group_size": 2, "max_tokens": 8, "learning_rate": 1e-3, "num_mini_batches": 2, **changes})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(build_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    return str(build_tiny_reward_model(tmp_path_factory.mktemp("reward_model")))


# --- The formulas -----------------------------------------------------------------------------------------------------

MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])


def test_advantages_are_sums_of_discounted_errors_and_returns_end_with_the_completion():
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 2.0, 9.0]])  # the 9 is padding
    values = torch.tensor([[0.5, 0.5, 0.5], [1.0, 0.0, 9.0]])
    advantages, returns = ppo.gae(rewards, values, MASK, gamma=1.0, lam=0.5)
    # errors 0, 0, 1 - 0.5 and 0 - 1, 2
    torch.testing.assert_close(advantages, torch.tensor([[0.125, 0.25, 0.5], [0.0, 2.0, 0.0]]))
    torch.testing.assert_close(returns, torch.tensor([[0.625, 0.75, 1.0], [1.0, 2.0, 0.0]]))
    # errors 0.5 * 0.5 - 0.5, the same, 0.5 and -1, 2
    advantages, _ = ppo.gae(rewards, values, MASK, gamma=0.5, lam=1.0)
    torch.testing.assert_close(advantages, torch.tensor([[-0.25, 0.0, 0.5], [0.0, 2.0, 0.0]]))


def test_reward_is_the_clipped_score_at_the_last_token_less_the_kl_at_each():
    kl = torch.tensor([[1.0, -1.0, 2.0], [0.5, 1.0, 7.0]])
    rewards = ppo.token_rewards(torch.tensor([2.0, -30.0]), kl, MASK, kl_coef=0.1, reward_clip=10.0)
    torch.testing.assert_close(rewards, torch.tensor([[-0.1, 0.1, 1.8], [-0.05, -10.1, 0.0]]))


def test_whitening_is_over_the_tokens_alone():
    values = torch.tensor([[1.0, 3.0, 1.0], [3.0, 2.0, 99.0]])  # mean 2, variance 0.8
    expected = torch.tensor([[-1.0, 1.0, -1.0], [1.0, 0.0, 0.0]]) / 0.8**0.5
    torch.testing.assert_close(ppo.whiten(values, MASK), expected)
    torch.testing.assert_close(ppo.whiten(values, MASK, shift_mean=False), expected + 2 * MASK)


def test_value_loss_is_the_larger_of_plain_and_clipped():
    values, old = torch.tensor([[1.0, 0.1, 1.0]]), torch.tensor([[0.0, 0.0, 0.0]])
    losses, clipped = ppo.value_losses(values, old, torch.tensor([[2.0, 2.0, 0.0]]), cliprange=0.2)
    torch.testing.assert_close(losses, torch.tensor([[1.8**2 / 2, 1.9**2 / 2, 1 / 2]]))
    assert clipped.tolist() == [[True, False, False]]


def test_explained_variance():
    returns = torch.tensor([[0.0, 2.0, 4.0], [2.0, 2.0, 99.0]])  # variance 1.6
    assert ppo.explained_variance(returns + 5, returns, MASK) == pytest.approx(1)
    assert ppo.explained_variance(0 * returns, returns, MASK) == pytest.approx(0)
    errors = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])  # variance 0.2 - 0.04
    assert ppo.explained_variance(returns - errors, returns, MASK) == pytest.approx(1 - 0.16 / 1.6)
    assert ppo.explained_variance(returns, 0 * returns, MASK) == 0


@pytest.mark.parametrize(
    ("kl", "target", "factor"), [(0.9, None, 1), (0.11, 0.1, 1 + 0.1 * 0.5), (5.0, 0.1, 1.1), (0.0, 0.1, 0.9)]
)
def test_coefficient_of_the_kl_moves_towards_its_target(kl, target, factor):
    settings = config(kl_target=target, kl_horizon=128)
    assert ppo.adapted_kl_coef(0.05, kl, 64, settings) == pytest.approx(0.05 * factor)


# --- What policy and critic learn -------------------------------------------------------------------------------------


def experience(model, settings, count=6, seed=0):
    """Of rollouts of random lengths, with the learners that they are for: log-probabilities and values are their own
    but for noise, so that ratios are clipped and values as well."""
    policy, critic = PPOLearner(model, settings, CPU), CriticLearner(model, settings, CPU)
    batch = rollouts(policy, seed, count)
    generator = torch.Generator().manual_seed(seed)
    metrics, logprobs, *_ = policy.score(batch)
    noise = [torch.randn(logprobs.shape, generator=generator) * 0.3 for _ in range(3)]
    values = critic.values(batch) + noise[0]
    made, _ = estimate(batch, logprobs, logprobs + noise[1], values, metrics["kl_coef"], settings)
    return policy, critic, replace(made, old_logprobs=logprobs + noise[2] * made.mask)


def test_gradients_do_not_depend_on_micro_batches(model):
    ends = []
    for tokens in (1, 30, 1000):
        settings = config(micro_batch_tokens=tokens, max_grad_norm=1e9, num_ppo_epochs=2)
        *learners, made = experience(model, settings)
        for learner in learners:
            learner.optimizer = torch.optim.SGD(learner.model.parameters(), lr=1.0)
            learner.rate = lambda step: 0.1
            learner.learn(made)
        ends.append([torch.nn.utils.parameters_to_vector(learner.model.parameters()) for learner in learners])
    for other in ends[1:]:
        for weights, same in zip(ends[0], other, strict=True):
            torch.testing.assert_close(weights, same, atol=1e-6, rtol=1e-5)
    before = torch.nn.utils.parameters_to_vector(PPOLearner(model, config(), CPU).model.parameters())
    assert (ends[0][0] - before).norm() > 0.01


def test_first_losses_are_those_worked_out_token_by_token(model):
    """Of a whole batch at once, by a model whose weights stay: log-probabilities and values are what was estimated."""
    settings = config(num_mini_batches=1, num_ppo_epochs=1, mismatch_correction="none")
    policy, critic, made = experience(model, settings)
    logprobs, values = policy.logprobs(made.rollouts), critic.values(made.rollouts)
    policy_loss = value_loss = clipped = tokens = 0
    for b, rollout in enumerate(made.rollouts):
        for t in range(len(rollout.completion_ids)):
            ratio = float((logprobs[b, t] - made.old_logprobs[b, t]).exp())
            advantage, old, value = (float(x[b, t]) for x in (made.advantages, made.old_values, values))
            bounded = min(max(ratio, 0.8), 1.2)
            policy_loss -= min(ratio * advantage, bounded * advantage)
            clipped += ratio * advantage > bounded * advantage
            error, bounded = value - float(made.returns[b, t]), min(max(value, old - 0.2), old + 0.2)
            value_loss += max(error**2, (bounded - float(made.returns[b, t])) ** 2) / 2
            tokens += 1
    metrics = policy.learn(made) | critic.learn(made)
    assert metrics["ppo/policy_loss"] == pytest.approx(policy_loss / tokens, rel=1e-4)
    assert metrics["ppo/value_loss"] == pytest.approx(value_loss / tokens, rel=1e-4)
    assert metrics["ppo/clipfrac"] == pytest.approx(clipped / tokens)
    assert 0 < clipped < tokens
    assert metrics["ppo/value_clipfrac"] > 0


def test_values_are_the_heads_of_the_states_before_each_token(model):
    critic = CriticLearner(model, config(), CPU)
    assert critic.values([Rollout([5, 6], [7, 8, 9], [], None)]).tolist() == [[0, 0, 0]]  # a new head
    torch.nn.init.normal_(critic.model.score.weight)
    with torch.no_grad():
        states = critic.model.model(torch.tensor([[5, 6, 7, 8, 9]])).last_hidden_state[0]
        expected = critic.model.score(states)[1:4, 0]
    values = critic.values([Rollout([4], [3, 3, 3, 3, 3, 3], [], None), Rollout([5, 6], [7, 8, 9], [], None)])
    torch.testing.assert_close(values[1], torch.cat([expected, torch.zeros(3)]))


def test_updates_stop_when_the_policy_has_moved_as_far_as_it_may(model):
    for bound, expected in ((None, 8), (1e-3, 1), (1e9, 8)):
        settings = config(learning_rate=1e-2, early_stop_kl=bound)
        policy, critic, made = experience(model, settings)
        made = replace(made, old_logprobs=policy.logprobs(made.rollouts))
        metrics = policy.learn(made)
        assert metrics["ppo/updates"] == expected
        assert critic.learn(made)["ppo/value_loss"] > 0
        assert policy.step == critic.step == 1


def test_scores_prove_the_sync(model):
    policy = PPOLearner(model, config(max_mismatch=1e-3), CPU)
    good, bad = rollouts(policy, count=2)
    metrics, logprobs = policy.score([good, bad])
    assert metrics["logprobs/mismatch"] < 1e-6
    assert 5 < metrics["entropy"] < 5.6  # of 258 tokens, nearly equal
    assert metrics["kl_coef"] == 0.05
    torch.testing.assert_close(logprobs[0, : len(good.logprobs)], torch.tensor(good.logprobs))
    with pytest.raises(MismatchError, match="The engine does not serve"):
        policy.score([good, replace(bad, logprobs=[logprob - 0.01 for logprob in bad.logprobs])])


def test_with_adapters_the_reference_is_the_policy_without_them(model):
    plain, policy = PPOLearner(model, config(), CPU), PPOLearner(model, config(lora_rank=4), CPU)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    batch = rollouts(policy)
    _, logprobs, reference = policy.score(batch)
    assert reference.equal(plain.logprobs(batch))
    assert (logprobs - reference).abs().max() > 0.01


def test_what_does_not_learn_is_frozen_without_adapters_and_scores_as_it_was(model):
    plain = PPOLearner(model, config(), CPU)
    reference = Scorer(model, config(lora_rank=4), CPU, learns=False)
    assert not reference.adapters and not any(weight.requires_grad for weight in reference.model.parameters())
    batch = rollouts(plain)
    with bf16_weights(plain.model):
        expected = plain.logprobs(batch)
    freeze(reference.model, torch.bfloat16)  # as on a GPU
    assert {weight.dtype for weight in reference.model.parameters()} == {torch.bfloat16}
    assert reference.logprobs(batch).equal(expected)


def test_critic_learns_faster_than_a_slow_policy_unless_told(model):
    assert CriticLearner(model, config(learning_rate=1e-6), CPU).config.learning_rate == 1e-5
    assert CriticLearner(model, config(learning_rate=1e-3), CPU).config.learning_rate == 1e-3
    assert CriticLearner(model, config(critic_learning_rate=1e-4), CPU).config.learning_rate == 1e-4


def test_with_adapters_the_critics_trunk_stays_and_its_head_learns(model):
    _, critic, made = experience(model, config(lora_rank=4, learning_rate=1e-2))
    before = weights_of(critic)
    critic.learn(made)
    moved = {name for name, tensor in weights_of(critic).items() if not tensor.equal(before[name])}
    assert moved == {name for name in before if ".lora_" in name} | {"score.modules_to_save.default.weight"}
    assert sum(before[name].numel() for name in moved) < 0.1 * sum(map(torch.numel, before.values()))


def learn_on_this_rank(folder, model, reward_model, lora_rank):
    """A step of both learners, with plain SGD, the metrics, and scores of texts."""
    settings = config(micro_batch_tokens=25, num_ppo_epochs=2, lora_rank=lora_rank)
    *learners, made = experience(model, settings)  # 3 rollouts in a mini-batch
    results = [RewardScorer(reward_model, config(), CPU).score(["a: "] * 3, ["ABC", "x", "AB yes"]), made.advantages]
    for learner in learners:
        learner.optimizer = torch.optim.SGD(learner.parameters, lr=1.0)
        learner.rate = lambda step: 0.1
        results += [learner.learn(made), weights_of(learner)]
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(results, folder / f"results-{learner.ranks}.pt")


@pytest.mark.parametrize("lora_rank", [None, 4])
def test_two_ranks_learn_what_one_learns(model, reward_model, tmp_path, lora_rank):
    learn_on_this_rank(tmp_path, model, reward_model, lora_rank)
    on_ranks(2, learn_on_this_rank, tmp_path, model, reward_model, lora_rank)
    ours, theirs = (torch.load(tmp_path / f"results-{ranks}.pt") for ranks in (1, 2))
    assert theirs[0] == pytest.approx(ours[0], abs=1e-5)
    torch.testing.assert_close(theirs[1], ours[1], atol=1e-5, rtol=1e-5)
    for own, other in zip(ours[2:], theirs[2:], strict=True):
        for name, value in own.items():
            torch.testing.assert_close(other[name], value, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("lora_rank", [None, 4])
def test_checkpoints_go_on_bit_for_bit(model, tmp_path, lora_rank):
    settings = config(kl_target=0.1, kl_horizon=20, lora_rank=lora_rank, save_merged=bool(lora_rank))
    policy, critic, made = experience(model, settings)
    for learner in (policy, critic):
        learner.learn(made)
    policy.save(tmp_path)
    (tmp_path / "critic").mkdir()
    critic.save(tmp_path / "critic")
    folders = tmp_path, tmp_path / "critic"
    paths = [model if lora_rank else str(folder) for folder in folders]
    resumed = PPOLearner(paths[0], settings, CPU), CriticLearner(paths[1], settings, CPU)
    for learner, other, folder in zip((policy, critic), resumed, folders, strict=True):
        other.load_state(folder)
        learner.learn(made)
        other.learn(made)
        assert learner.own_state == other.own_state
        for name, tensor in weights_of(learner).items():
            assert tensor.equal(weights_of(other)[name]), name
    assert policy.own_state["kl_coef"] != settings.kl_coef
    changed = PPOLearner(paths[0], replace(settings, kl_target=None, kl_coef=0.7), CPU)
    changed.load_state(tmp_path)
    assert changed.own_state["kl_coef"] == 0.7


# --- The models beside the policy -------------------------------------------------------------------------------------


def test_built_in_reward_model_scores_text(reward_model):
    scorer = RewardScorer(reward_model, config(micro_batch_tokens=100), CPU)
    prompts, completions = examples(random.Random(99), 200)
    scores, wanted = torch.tensor(scorer.score(prompts, completions)), torch.tensor([*map(points, completions)])
    assert 1 - (scores - wanted).square().mean() / wanted.var() > 0.95
    alone = [
        scorer.score([prompt], [completion])[0] for prompt, completion in zip(prompts[:5], completions, strict=False)
    ]
    assert scores[:5].tolist() == pytest.approx(alone, abs=1e-5)


def test_last_token_is_scored_whatever_it_is(reward_model):
    scorer = RewardScorer(reward_model, config(), CPU)
    rows = [[5, 6, token] for token in (0, 1, scorer.tokenizer.pad_token_id, scorer.tokenizer.eos_token_id)] + [[7] * 9]
    scores = scorer._last_scores([Rollout(row, [], [], None) for row in rows])
    with torch.no_grad():
        states = [scorer.model.base_model(torch.tensor([row])).last_hidden_state[0, -1] for row in rows]
        torch.testing.assert_close(scores, scorer.model.score(torch.stack(states)), atol=1e-5, rtol=1e-5)


def test_reward_model_reads_chats_by_its_own_template_and_the_end_of_what_is_too_long(reward_model, tmp_path):
    folder = shutil.copytree(reward_model, tmp_path / "chat")
    chat_tokenizer(folder)
    scorer, plain = RewardScorer(str(folder), config(), CPU), RewardScorer(reward_model, config(), CPU)
    chat = [{"role": "user", "content": "Shout"}]
    answer = [{"role": "assistant", "content": "AB"}]
    text = scorer.tokenizer.apply_chat_template([*chat, *answer], tokenize=False)
    assert "Shout" in text and "AB" in text
    assert scorer.score([chat], [answer]) == plain.score([text], [""])
    assert plain.score(["x" * 300], ["AB"]) == plain.score([""], ["x" * 254 + "AB"])


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        ("deberta-v2", {"position_biased_input": False}),  # names no blocks that could be checkpointed
        ("roberta", {"max_position_embeddings": 130}),  # whose positions begin at 2
    ],
)
def test_reward_models_that_are_encoders_score_as_transformers_does(reward_model, tmp_path, kind, architecture):
    tokenizer = AutoTokenizer.from_pretrained(reward_model, model_max_length=128)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    encoder = AutoConfig.for_model(kind, vocab_size=300, num_labels=1, **size, **architecture)
    AutoModelForSequenceClassification.from_config(encoder).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    check_reward_model(str(tmp_path))
    scorer = RewardScorer(str(tmp_path), config(), CPU, learns=False)
    short, long = scorer.score(["a: ", "a: "], ["ABC", "x" * 200])
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    for text, score in (("a: ABC", short), ("x" * 128, long)):
        expected = plain(**tokenizer(text, return_tensors="pt", truncation=True)).logits
        assert score == pytest.approx(float(expected.detach()), abs=1e-5)


def test_reward_model_without_its_head_is_refused(reward_model, tmp_path):
    folder = shutil.copytree(reward_model, tmp_path / "headless")
    weights = load_file(folder / "model.safetensors")
    weights["v_head.weight"] = weights.pop("score.weight")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(RunError, match=r"headless lacks score\.weight, so it is no OPTForSequenceClassification"):
        RewardScorer(str(folder), config(), CPU, learns=False)
    assert not CriticLearner(str(folder), config(), CPU).model.score.weight.any()  # a critic may begin without


def test_critic_begins_with_a_reward_models_head(reward_model):
    critic = CriticLearner(reward_model, config(), CPU)
    expected = AutoModelForSequenceClassification.from_pretrained(reward_model)
    assert critic.model.score.weight.equal(expected.score.weight)


def test_models_that_do_not_fit_are_refused(model, reward_model, tmp_path):
    check_critic(reward_model, model)
    check_reward_model(reward_model)
    with pytest.raises(RunError, match="is a OPTForCausalLM: a "):
        check_reward_model(model)
    several = AutoModelForSequenceClassification.from_pretrained(model, num_labels=3)
    several.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(RunError, match="has 3 outputs: one is wanted"):
        check_reward_model(str(tmp_path))
    AutoModelForSequenceClassification.from_pretrained(model, num_labels=1).save_pretrained(tmp_path)
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(RunError, match="the tokenizer of another vocabulary: token 258, and 258 embeddings"):
        check_reward_model(str(tmp_path))
    with pytest.raises(RunError, match="has another tokenizer than"):
        check_critic(str(tmp_path), model)
    with pytest.raises(RunError, match="--kl-target multiplies --kl-coef, which is 0"):
        choose_ppo_models(tmp_path, rlhf_ppo.Arguments(kl_target=0.1, kl_coef=0.0), "cpu")


# --- Rewards as Ray tasks, and the placement --------------------------------------------------------------------------

REWARDS = """
import asyncio, os

def where(prompts, completions, log_extra, log_metric, **_):
    log_extra("pid", [os.getpid()] * len(prompts))
    log_metric("parts", 1.0)
    return [float(len(c)) for c in completions]

async def half(completions, log_likelihood, **_):
    return [0.5 if a else None for a in log_likelihood]

async def loop(completions, log_extra, **_):
    log_extra("loop", [id(asyncio.get_running_loop())] * len(completions))
    return [1.0] * len(completions)

def dies_once(completions, **_):
    if not os.path.exists("died"):
        open("died", "w").close()
        os._exit(1)
    return [1.0] * len(completions)

def dies(completions, **_):
    os._exit(1)

def raises(completions, **_):
    raise ValueError("no luck")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with rewards and prompts."""
    (tmp_path / "functions.py").write_text(REWARDS)
    rows = [{"prompt": text, "log_likelihood": answer} for text, answer in (("a", "1"), ("b", ""), ("c", "1"))]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def scored(session, *reward, score=None, **changes):
    """Rewards of two completions of each of three prompts, "" and "x"."""
    args = rlhf_ppo.Arguments(reward=[f"functions:{name}" for name in reward], dataset="data.jsonl", **changes)
    task = load_task(args)
    ranks = argparse.Namespace(actors={"reward_model": []} if score else {}, each=score)
    task.rewards.call = RayRewards(task.rewards, session, ranks, args)
    pairs = [[Rollout([5], [6], [0.0], None, text) for text in ("", "x")] for _ in task.rows]
    groups = task.rewards.score([Group(row, pair) for row, pair in zip(task.rows, pairs, strict=True)])
    return [rollout for group in groups for rollout in group.rollouts], task.rewards.metrics(groups)


@pytest.mark.slow
def test_rewards_are_ray_tasks_that_share_the_prompts(folder):
    def score(name, run, method, prompts, completions):
        return {f"{name}0": ray.put([10.0 * (p == "c") for p in prompts]), f"{name}1": ray.put(None)}

    with RunFolder(RunArguments(output=folder / "run"), "test") as run, RaySession(run, None) as session:
        weighted = {"reward_model": "x", "reward_workers": 2, "reward_weights": [1, 2, 3]}
        rollouts, metrics = scored(session, "where", "half", score=score, **weighted)
        assert [rollout.reward for rollout in rollouts] == [1, 2, 0, 1, 31, 32]
        assert metrics == {
            "parts": 1, "rewards/where/mean": 0.5, "rewards/half/mean": 0.5, "rewards/reward_model/mean": 10 / 3,
        }  # fmt: skip
        processes = [rollout.extra["pid"] for rollout in rollouts]
        assert os.getpid() not in processes
        assert processes[2] == processes[5]  # one prompt is the first task's, two are the other's

        finished = time.time()
        time.sleep(5)  # as long as a step may take, after which the same processes are still there
        again, _ = scored(session, "where", reward_workers=2)
        assert all(psutil.Process(rollout.extra["pid"]).create_time() < finished for rollout in again)
        with pytest.raises(TaskError, match=r"^the reward raises raised ValueError: no luck \(functions.py, line 26\)"):
            scored(session, "where", "raises")


def test_calls_of_a_coroutine_in_one_process_share_an_event_loop(folder):
    (_, first, _), (_, second, _) = (run_reward("functions:loop", {"completions": ["a"]}) for _ in range(2))
    assert first == second


@pytest.mark.slow
def test_reward_task_that_dies_runs_again_and_one_that_always_does_is_named(folder):
    with RunFolder(RunArguments(output=folder / "run"), "test") as run, RaySession(run, None) as session:
        rollouts, _ = scored(session, "dies_once")
        assert [rollout.reward for rollout in rollouts] == [1] * 6
        with pytest.raises(RunError, match=r"^the reward dies failed while rewarding: .*died"):
            scored(session, "dies")


def test_weights_are_for_functions_and_the_reward_model(folder):
    args = rlhf_ppo.Arguments(reward=["functions:where"], dataset="data.jsonl", reward_weights=[1.0], reward_model="x")
    with pytest.raises(TaskError, match="1 weights for 2 rewards"):
        load_task(args)


@pytest.mark.parametrize(
    ("gpus", "changes", "expected"),
    [
        (0, {}, {"trainer": [0], "critic": [0], "reference": [0], "reward_model": [0], "engine": [0]}),
        (1, {}, {"trainer": [0], "critic": [0], "reference": [0], "reward_model": [0], "engine": [0]}),
        (4, {"tensor_parallel_size": 2}, {"trainer": [0, 1], "reward_model": [0, 1], "engine": [0, 1]}),
        (0, {"placement": "split"}, {"trainer": [0], "critic": [0], "reference": [0], "engine": [1]}),
        (2, {"placement": "split"}, {"trainer": [0], "critic": [0], "reference": [0], "engine": [1]}),
        (4, {"placement": "split", "tensor_parallel_size": 2}, {"trainer": [0], "reward_model": [1], "engine": [2, 3]}),
    ],
)
def test_who_shares_a_bundle_with_whom(monkeypatch, gpus, changes, expected):
    made = []

    def group(bundles, strategy):
        made.append((bundles, strategy))
        return argparse.Namespace(wait=lambda timeout_seconds: True)

    monkeypatch.setattr(rlhf_ppo, "placement_group", group)
    monkeypatch.setattr(rlhf_ppo.ray, "cluster_resources", lambda: {"GPU": float(gpus)} if gpus else {"CPU": 2.0})
    args = rlhf_ppo.Arguments(**changes)
    device, shared, places = rlhf_ppo.place(args)
    assert device == ("cuda" if gpus else "cpu")
    assert shared == (bool(gpus) and args.placement == "colocated")
    assert args.sleep == ("kv" if shared else "none")
    for name, bundles in expected.items():
        assert [bundle for bundle, _ in places[name]] == bundles
    (bundles, _) = made[0]
    assert len(bundles) == 1 + max(bundle for own in places.values() for bundle, _ in own)
    for bundle in range(len(bundles)):  # engine workers on shared GPUs ask for as much as the others
        there = [options.get("num_gpus", 0) for own in places.values() for b, options in own if b == bundle]
        assert sum(there) + rlhf_ppo.GPU_SHARE * shared <= 1 + 1e-9


@pytest.mark.parametrize(
    ("gpus", "changes", "message"),
    [
        (1, {"placement": "split"}, "wants 2 GPUs, 1 for trainer and critic and 1 for the engine, and there are 1"),
        (2, {"tensor_parallel_size": 4}, "colocated with --tensor-parallel-size 4 wants 4 GPUs, and there are 2"),
    ],
)
def test_too_few_gpus_is_an_error_that_says_what_fits(monkeypatch, gpus, changes, message):
    monkeypatch.setattr(rlhf_ppo.ray, "cluster_resources", lambda: {"GPU": float(gpus)})
    with pytest.raises(RunError, match=f"{message}.*lower --tensor-parallel-size"):
        rlhf_ppo.place(rlhf_ppo.Arguments(**changes))


def test_expandable_segments_are_refused_on_shared_gpus(monkeypatch):
    monkeypatch.setattr(rlhf_ppo.ray, "cluster_resources", lambda: {"GPU": 1.0})
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(WeightSyncError, match="PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True"):
        rlhf_ppo.place(rlhf_ppo.Arguments())


# --- Whole runs -------------------------------------------------------------------------------------------------------


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def timeless(run):
    """The metrics of a run, but for what depends on the machine."""
    machine = ("time/", "tokens/", "sync/", "memory/")
    return [{name: row[name] for name in row if not name.startswith(machine)} for row in rows(run)]


@pytest.fixture(scope="module")
def default_run(tmp_path_factory):
    """The folder of a run with the default arguments, and what it printed."""
    folder = tmp_path_factory.mktemp("default")
    command = (sys.executable, str(ROOT / "rlhf_ppo.py"), "--output", "run")
    return folder / "run", Script(folder, *command, **CORE_IN_PROCESS).finish(400)


@cpu_only
@pytest.mark.slow
def test_default_run_learns_and_its_critic_explains_the_returns(default_run):
    run, text = default_run
    assert text.splitlines()[-1].startswith("OK: reward "), text
    assert re.search(r"^first sync: \d+ tensors, .* GB, bit for bit what the engine had loaded", text, re.M)
    table = re.findall(r"^cpu:0 +(\w+) +0 +0$", text, re.M)
    assert table == ["trainer", "critic", "reference", "reward_model", "engine"]
    metrics = rows(run)
    assert [row["step"] for row in metrics] == list(range(1, 31))
    assert metrics[0]["reward/mean"] < 0.6
    assert metrics[-1]["reward/mean"] > metrics[0]["reward/mean"] + 1
    assert metrics[0]["kl"] == 0
    assert metrics[-1]["ppo/explained_variance"] > 0.3
    assert max(row["logprobs/mismatch"] for row in metrics) < 1e-5
    for phase in ("rollout", "reward", "score", "train", "sync"):
        assert metrics[-1][f"time/{phase}"] > 0
        assert 0.1 < metrics[-1][f"memory/{phase}/critic"] < 4
        assert 0.1 < metrics[-1][f"memory/{phase}/engine"] < 16


@cpu_only
@pytest.mark.slow
def test_resumed_run_goes_on_bit_for_bit(script, tmp_path):
    flags = "--steps", 4, "--save-every", 2, "--output", "whole"
    script("rlhf_ppo.py", *flags, **CORE_IN_PROCESS).finish(600)
    whole, run = tmp_path / "whole", shutil.copytree(tmp_path / "whole", tmp_path / "run")
    shutil.rmtree(run / "checkpoint-000004")  # as if it had been killed before
    text = script("rlhf_ppo.py", "--resume", "run", **CORE_IN_PROCESS).finish(600)
    assert text.splitlines()[-1].startswith("OK: reward "), text
    assert timeless(run) == timeless(whole)
    for part in ("model.safetensors", "critic/model.safetensors"):
        ours, theirs = (load_file(folder / "checkpoint-000004" / part) for folder in (run, whole))
        assert all(tensor.equal(theirs[name]) for name, tensor in ours.items())


@cpu_only
@pytest.mark.slow
def test_split_run_with_a_reward_model_and_a_function_is_evaluated(script, tmp_path):
    flags = """
        --placement split --tensor-parallel-size 2 --steps 6 --eval-every 3 --eval-share 0.25 --reward-workers 2
        --reward recipe.uppercase:uppercase --reward-model recipe.tiny_reward_model:build_tiny_reward_model
        --reward-weights 2 0.5 --kl-target 0.01 --kl-horizon 100 --early-stop-kl 0.05 --whiten-rewards --output run
    """
    text = script("rlhf_ppo.py", *flags.split()).finish(600)
    assert re.search(r"^OK: reward .*, eval -?\d\.\d{3} -> \d\.\d{3}$", text.splitlines()[-1]), text
    assert re.findall(r"^cpu:\d +(\w+) +(\d) +(\d)$", text, re.M) == [
        ("trainer", "0", "0"), ("critic", "0", "0"), ("reference", "0", "0"), ("reward_model", "0", "0"),
        ("engine", "0", "1"), ("engine", "1", "2"),
    ]  # fmt: skip
    before, *metrics = rows(tmp_path / "run")
    assert metrics[-1]["eval/reward"] > before["eval/reward"]
    for row in metrics:
        parts = row["rewards/uppercase/mean"], row["rewards/reward_model/mean"]
        assert row["reward/mean"] == pytest.approx(2 * parts[0] + 0.5 * parts[1])
    assert metrics[0]["kl_coef"] == 0.05
    assert metrics[2]["kl_coef"] > metrics[1]["kl_coef"]  # more KL than the target
    assert all(1 <= row["ppo/updates"] <= 8 for row in metrics)
    assert min(row["ppo/updates"] for row in metrics) < 8


@cpu_only
@pytest.mark.long
def test_two_ranks_beside_two_workers_learn(script, tmp_path):
    text = script("rlhf_ppo.py", "--tensor-parallel-size", 2, "--output", "run").finish(600)
    assert text.splitlines()[-1].startswith("OK: reward "), text
    metrics = rows(tmp_path / "run")
    assert metrics[-1]["reward/mean"] > metrics[0]["reward/mean"] + 1
    assert metrics[-1]["ppo/explained_variance"] > 0.3
