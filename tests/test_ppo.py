"""PPO: its formulas by hand, what policy and critic learn, the models beside the policy, and runs of train_ppo.py.

pytest tests/test_ppo.py            functions, and the models beside the policy
pytest tests/test_ppo.py -m slow    runs
"""

import random
import re
import shutil
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import arguments_of, cpu_only, metrics_of, timeless
from learners import CPU, chat_tokenizer, numbers, on_ranks, rollouts, use_sgd, vector_of, weights_of
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import train_ppo
from rlhf_utils import WeightSyncError
from trainer.errors import MismatchError, RunError, TaskError
from trainer.learning import ppo
from trainer.learning.learner import MERGED
from trainer.learning.model import Model
from trainer.learning.objectives import kl_estimate
from trainer.learning.policy import PolicyScores
from trainer.learning.ppo import CriticLearner, PPOLearner, estimate
from trainer.learning.precision import bf16_weights, freeze
from trainer.learning.rollout import Rollout
from trainer.learning.saving import state_files
from trainer.learning.value_models import RewardModel
from trainer.run.checkpoint import CRITIC, checkpoints
from trainer.run.models import check_reward_model, check_vocabulary, choose_ppo_models
from trainer.tasks.task import TaskArguments, load_task
from trainer.tasks.tiny_reward_model import build_tiny_reward_model, examples, points


def config(**changes):
    settings = {"group_size": 2, "max_tokens": 8, "learning_rate": 1e-3, "num_mini_batches": 2}
    return arguments_of(train_ppo, **settings | changes)


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    return str(build_tiny_reward_model(tmp_path_factory.mktemp("reward_model")))


# --- The formulas -----------------------------------------------------------------------------------------------------

MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])


def test_advantages_are_sums_of_discounted_errors():
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 2.0, 9.0]])  # the 9 is padding
    values = torch.tensor([[0.5, 0.5, 0.5], [1.0, 0.0, 9.0]])
    advantages, returns = ppo.gae(rewards, values, MASK, gamma=1.0, lam=0.5)
    # errors 0, 0, 1 - 0.5 and 0 - 1, 2
    torch.testing.assert_close(advantages, torch.tensor([[0.125, 0.25, 0.5], [0.0, 2.0, 0.0]]))
    torch.testing.assert_close(returns, torch.tensor([[0.625, 0.75, 1.0], [1.0, 2.0, 0.0]]))
    # errors 0.5 * 0.5 - 0.5, the same, 0.5 and -1, 2
    advantages, _ = ppo.gae(rewards, values, MASK, gamma=0.5, lam=1.0)
    torch.testing.assert_close(advantages, torch.tensor([[-0.25, 0.0, 0.5], [0.0, 2.0, 0.0]]))


def test_reward_is_at_the_last_token_and_kl_at_each():
    kl = torch.tensor([[1.0, -1.0, 2.0], [0.5, 1.0, 7.0]])
    rewards = ppo.token_rewards(torch.tensor([2.0, -30.0]), kl, MASK, kl_coef=0.1, reward_clip=10.0)
    torch.testing.assert_close(rewards, torch.tensor([[-0.1, 0.1, 1.8], [-0.05, -10.1, 0.0]]))


def test_whitening_is_over_the_tokens_alone():
    values = torch.tensor([[1.0, 3.0, 1.0], [3.0, 2.0, 99.0]])  # mean 2, variance 0.8
    expected = torch.tensor([[-1.0, 1.0, -1.0], [1.0, 0.0, 0.0]]) / 0.8**0.5
    torch.testing.assert_close(ppo.whiten(values, MASK), expected)


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


def test_experience_is_what_its_numbers_give_by_hand():
    batch = [Rollout([5], [6, 7], [], 1.0), Rollout([5], [8], [], -2.0)]
    logprobs, reference = torch.tensor([[-1.0, -2.0], [-0.5, 0.0]]), torch.tensor([[-1.5, -1.0], [-0.5, 0.0]])
    old_policy = PolicyScores(logprobs, {})
    values, settings = torch.tensor([[0.5, 1.0], [0.25, 0.0]]), config(kl_coef=0.1).loss
    made, metrics = estimate(batch, old_policy, reference, values, settings)
    # KL 0.5, -1 and 0, so rewards -0.05, 1.1 and -2. Returns are their sums from there on.
    returns, values = torch.tensor([1.05, 1.1, -2.0]), torch.tensor([0.5, 1.0, 0.25])
    advantages, tokens = returns - values, made.mask.bool()
    torch.testing.assert_close(made.returns[tokens], returns)
    whitened = (advantages - advantages.mean()) / advantages.std(correction=0)
    torch.testing.assert_close(made.advantages[tokens], whitened)
    expected = {"kl": -0.5 / 3, "kl_coef": 0.1, "returns/mean": returns.mean(), "values/mean": values.mean()}
    expected |= {"advantages/std": advantages.std(correction=0)}
    expected |= {"ppo/explained_variance": 1 - advantages.var(correction=0) / returns.var(correction=0)}
    assert metrics == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-5)


# --- What policy and critic learn -------------------------------------------------------------------------------------


def experience(model, settings, count=6, seed=0):
    """Of rollouts of random lengths, with the learners that they are for: log-probabilities and values are their own
    but for noise, so that ratios are clipped and values as well."""
    policy, critic = PPOLearner(model, settings, CPU), CriticLearner(model, settings, CPU)
    batch = rollouts(policy, seed, count)
    generator = torch.Generator().manual_seed(seed)
    old_policy = policy.score(batch)
    logprobs = old_policy.logprobs
    noise = [torch.randn(logprobs.shape, generator=generator) * 0.3 for _ in range(3)]
    made, _ = estimate(batch, old_policy, logprobs + noise[1], critic.values(batch) + noise[0], settings.loss)
    return policy, critic, replace(made, old_policy=replace(old_policy, logprobs=logprobs + noise[2] * made.mask))


def test_gradients_do_not_depend_on_micro_batches(model):
    changes = []
    for tokens in (1, 30, 1000):
        *learners, made = experience(model, config(micro_batch_tokens=tokens, max_grad_norm=1e9, num_epochs=2))
        before = [vector_of(learner) for learner in learners]
        for learner in learners:
            use_sgd(learner, rate=0.1)
            learner.learn(made)
        changes.append([vector_of(learner) - old for learner, old in zip(learners, before, strict=True)])
    for other in changes[1:]:
        for change, same in zip(changes[0], other, strict=True):
            assert change.norm() > 0.01
            assert (same - change).norm() < 1e-5 * change.norm()


def test_first_losses_are_those_worked_out_token_by_token(model):
    """Of a whole batch at once, by a model whose weights stay: log-probabilities and values are what was estimated."""
    settings = config(num_mini_batches=1, num_epochs=1, cliprange_value=0.2, mismatch_correction="none")
    policy, critic, made = experience(model, settings)
    (logprobs,), values = policy.model.score_all(made.rollouts), critic.values(made.rollouts)
    policy_loss = value_loss = clipped = kl = tokens = 0
    for b, rollout in enumerate(made.rollouts):
        for t in range(len(rollout.completion_ids)):
            old_logprob = made.old_policy.logprobs[b, t]
            ratio = float((logprobs[b, t] - old_logprob).exp())
            advantage, old, value = (float(x[b, t]) for x in (made.advantages, made.old_values, values))
            bounded = min(max(ratio, 0.8), 1.2)
            policy_loss -= min(ratio * advantage, bounded * advantage)
            clipped += ratio * advantage > bounded * advantage
            kl += float(kl_estimate(old_logprob, logprobs[b, t], 1))
            error, bounded = value - float(made.returns[b, t]), min(max(value, old - 0.2), old + 0.2)
            value_loss += max(error**2, (bounded - float(made.returns[b, t])) ** 2) / 2
            tokens += 1
    metrics = policy.learn(made) | critic.learn(made)
    assert metrics["loss"] == pytest.approx(policy_loss / tokens, rel=1e-4)
    assert metrics["critic/loss"] == pytest.approx(value_loss / tokens, rel=1e-4)
    assert metrics["clip_fraction"] == pytest.approx(clipped / tokens)
    assert metrics["approx_kl"] == pytest.approx(kl / tokens, rel=1e-4)
    assert 0 < clipped < tokens
    assert metrics["critic/clip_fraction"] > 0
    assert policy.step == critic.step == 1


def test_each_mini_batch_updates_policy_and_critic(model):
    policy, critic, made = experience(model, config(num_epochs=3, num_mini_batches=2))
    for learner in (policy, critic):
        updates = []
        learner.optimizer.register_step_post_hook(lambda *_, updates=updates: updates.append(1))
        learner.learn(made)
        assert (len(updates), learner.step) == (6, 1)


def test_values_are_the_heads_of_the_states_before_each_token(model):
    critic = CriticLearner(model, config(), CPU)
    assert critic.values([Rollout([5, 6], [7, 8, 9], [], None)]).tolist() == [[0, 0, 0]]  # a new head
    torch.nn.init.normal_(critic.model.module.score.weight)
    with torch.no_grad():
        states = critic.model.module.model(torch.tensor([[5, 6, 7, 8, 9]])).last_hidden_state[0]
        expected = critic.model.module.score(states)[1:4, 0]
    values = critic.values([Rollout([4], [3, 3, 3, 3, 3, 3], [], None), Rollout([5, 6], [7, 8, 9], [], None)])
    torch.testing.assert_close(values[1], torch.cat([expected, torch.zeros(3)]))


def test_logprobs_prove_the_sync(model):
    policy = PPOLearner(model, config(max_mismatch=1e-3), CPU)
    good, bad = rollouts(policy, count=2)
    scores = policy.score([good, bad])
    assert scores.metrics["logprobs/mismatch"] < 1e-6
    assert 5 < scores.metrics["entropy"] < 5.6  # of 258 tokens, nearly equal
    torch.testing.assert_close(scores.logprobs[0, : len(good.logprobs)], torch.tensor(good.logprobs))
    with pytest.raises(MismatchError, match="The two compute different functions"):
        policy.score([good, replace(bad, logprobs=[logprob - 0.01 for logprob in bad.logprobs])])


def test_with_adapters_the_reference_is_the_policy_without_them(model):
    plain, policy = PPOLearner(model, config(), CPU), PPOLearner(model, config(lora_rank=4), CPU)
    for name, parameter in policy.model.module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    batch = rollouts(policy)
    logprobs, reference = policy.score(batch).logprobs, policy.reference_logprobs(batch)
    assert reference.equal(plain.model.score_all(batch)[0])
    assert (logprobs - reference).abs().max() > 0.01


def test_model_that_does_not_learn_is_frozen_and_without_adapters(model):
    plain = PPOLearner(model, config(), CPU)
    reference = Model(model, config(lora_rank=4), CPU)
    assert not reference.adapters and not any(weight.requires_grad for weight in reference.module.parameters())
    batch = rollouts(plain)
    with bf16_weights(plain.model.module):
        (expected,) = plain.model.score_all(batch)
    freeze(reference.module, torch.bfloat16)  # as on a GPU
    assert {weight.dtype for weight in reference.module.parameters()} == {torch.bfloat16}
    assert reference.score_all(batch)[0].equal(expected)


def test_critic_learns_faster_than_a_slow_policy_unless_told(model):
    assert CriticLearner(model, config(learning_rate=1e-6), CPU).config.optimizer.learning_rate == 1e-5
    assert CriticLearner(model, config(learning_rate=1e-3), CPU).config.optimizer.learning_rate == 1e-3
    assert CriticLearner(model, config(critic_learning_rate=1e-4), CPU).config.optimizer.learning_rate == 1e-4
    assert CriticLearner(model, config(learning_rate=None), CPU).config.optimizer.learning_rate == 1e-5


def test_with_adapters_the_critics_trunk_stays_and_its_head_learns(model):
    _, critic, made = experience(model, config(lora_rank=4, learning_rate=1e-2, num_epochs=2))  # lora_A moves last
    before = weights_of(critic)
    critic.learn(made)
    moved = {name for name, tensor in weights_of(critic).items() if not tensor.equal(before[name])}
    assert moved == {name for name in before if ".lora_" in name} | {"score.modules_to_save.default.weight"}
    assert sum(before[name].numel() for name in moved) < 0.1 * sum(map(torch.numel, before.values()))


def learn_on_this_rank(folder, model, reward_model, lora_rank):
    """A step of both learners, with plain SGD, the metrics, and scores of texts."""
    settings = config(micro_batch_tokens=25, num_epochs=2, lora_rank=lora_rank)
    *learners, made = experience(model, settings)  # 3 rollouts in a mini-batch
    results = [RewardModel(reward_model, config(), CPU).rewards(["a: "] * 3, ["ABC", "x", "AB yes"]), made.advantages]
    for learner in learners:
        use_sgd(learner, rate=0.1)
        results += [numbers(learner.learn(made)), weights_of(learner)]
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(results, folder / f"results-{learner.model.ranks}.pt")


@pytest.mark.parametrize("lora_rank", [pytest.param(rank, marks=pytest.mark.slow) for rank in (None, 4)])
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
    settings = config(lora_rank=lora_rank, save_merged=bool(lora_rank))
    policy, critic, made = experience(model, settings)
    for learner in (policy, critic):
        learner.learn(made)
    policy.save(tmp_path)
    (tmp_path / "critic").mkdir()
    critic.save(tmp_path / "critic")
    assert [(folder / MERGED).exists() for folder in (tmp_path, tmp_path / "critic")] == [bool(lora_rank), False]
    folders = tmp_path, tmp_path / "critic"
    paths = [model if lora_rank else str(folder) for folder in folders]
    resumed = PPOLearner(paths[0], settings, CPU), CriticLearner(paths[1], settings, CPU)
    for learner, other, folder in zip((policy, critic), resumed, folders, strict=True):
        other.load_state(folder)
        learner.learn(made)
        other.learn(made)
        assert learner.step == other.step
        for name, tensor in weights_of(learner).items():
            assert tensor.equal(weights_of(other)[name]), name


def save_on_this_rank(folder, model):
    """Save as a run does. The critic is younger than the policy, as after a checkpoint of another script."""
    settings = config(lora_rank=4)
    trainer, critic = train_ppo.Trainer(0), train_ppo.Critic(0)
    trainer.learner, critic.learner = PPOLearner(model, settings, CPU), CriticLearner(model, settings, CPU)
    for actor, step in ((trainer, 7), (critic, 1)):
        actor.rank, actor.model, actor.learner.step = actor.learner.model.rank, actor.learner.model, step
    if critic.rank == 0:  # it is late
        save = critic.learner.save
        critic.learner.save = lambda path: time.sleep(2) or save(path)
    critic.save(folder / "run", 7)
    assert not checkpoints(folder / "run")
    trainer.save(folder / "run")


def test_critic_begins_a_checkpoint_that_the_trainer_completes(model, tmp_path):
    run = tmp_path / "run"
    (run / "unfinished-000007").mkdir(parents=True)
    (run / "unfinished-000007" / "left").touch()  # by a run that was killed
    on_ranks(2, save_on_this_rank, tmp_path, model)
    (checkpoint,) = run.iterdir()
    assert (checkpoint.name, (checkpoint / "left").exists()) == ("checkpoint-000007", False)
    for folder in (checkpoint, checkpoint / CRITIC):
        assert len(state_files(folder)) == len([*folder.glob("adapter_model.safetensors")]) * 2 == 2


# --- The models beside the policy -------------------------------------------------------------------------------------


def test_built_in_reward_model_scores_text(reward_model):
    scorer = RewardModel(reward_model, config(micro_batch_tokens=100), CPU)
    prompts, completions = examples(random.Random(99), 200)
    scores, wanted = torch.tensor(scorer.rewards(prompts, completions)), torch.tensor([*map(points, completions)])
    assert 1 - (scores - wanted).square().mean() / wanted.var() > 0.95
    alone = [
        scorer.rewards([prompt], [completion])[0] for prompt, completion in zip(prompts[:5], completions, strict=False)
    ]
    assert scores[:5].tolist() == pytest.approx(alone, abs=1e-5)


def test_text_without_tokens_has_a_score(reward_model):
    scorer = RewardModel(reward_model, config(), CPU)
    (score,) = scorer.rewards([""], [""])
    assert score == scorer.score_all([Rollout([], [scorer.tokenizer.eos_token_id], [])])[0][0, 0]


def test_last_token_is_scored_whatever_it_is(reward_model):
    scorer = RewardModel(reward_model, config(), CPU)
    rows = [[5, 6, token] for token in (0, 1, scorer.tokenizer.pad_token_id, scorer.tokenizer.eos_token_id)] + [[7] * 9]
    (scores,) = scorer.score_all([Rollout([], row, []) for row in rows])
    with torch.no_grad():
        states = [scorer.module.base_model(torch.tensor([row])).last_hidden_state[0, -1] for row in rows]
        torch.testing.assert_close(scores[:, :1], scorer.module.score(torch.stack(states)), atol=1e-5, rtol=1e-5)


def test_reward_model_has_its_own_template_and_reads_the_end(reward_model, tmp_path):
    folder = shutil.copytree(reward_model, tmp_path / "chat")
    chat_tokenizer(folder)
    scorer, plain = RewardModel(str(folder), config(), CPU), RewardModel(reward_model, config(), CPU)
    chat = [{"role": "user", "content": "Shout"}]
    answer = [{"role": "assistant", "content": "AB"}]
    text = scorer.tokenizer.apply_chat_template([*chat, *answer], tokenize=False)
    assert "Shout" in text and "AB" in text
    assert scorer.rewards([chat], [answer]) == plain.rewards([text], [""])
    begun, rest = [{"role": "assistant", "content": "A"}], [{"role": "assistant", "content": "B"}]
    assert scorer.rewards([[*chat, *begun]], [rest]) == scorer.rewards([chat], [answer])  # which the prompt has begun
    assert plain.rewards(["x" * 300], ["AB"]) == plain.rewards([""], ["x" * 254 + "AB"])


@pytest.mark.parametrize(
    ("kind", "architecture", "model_max_length"),
    [
        ("deberta-v2", {"position_biased_input": False}, 128),  # names no blocks that could be checkpointed
        ("roberta", {"max_position_embeddings": 130}, None),  # whose positions begin at 2
    ],
)
def test_reward_models_that_are_encoders_score_as_transformers_does(
    reward_model, tmp_path, kind, architecture, model_max_length
):
    tokenizer = AutoTokenizer.from_pretrained(reward_model, model_max_length=model_max_length)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    encoder = AutoConfig.for_model(kind, vocab_size=300, num_labels=1, **size, **architecture)
    AutoModelForSequenceClassification.from_config(encoder).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    check_reward_model(str(tmp_path))
    scorer = RewardModel(str(tmp_path), config(), CPU)
    short, long = scorer.rewards(["a: ", "a: "], ["ABC", "x" * 200])
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    for text, score in (("a: ABC", short), ("x" * 128, long)):
        expected = plain(**tokenizer(text, return_tensors="pt", truncation=True, max_length=128)).logits
        assert score == pytest.approx(float(expected.detach()), abs=1e-5)


def test_reward_model_without_its_head_is_refused(reward_model, tmp_path):
    folder = shutil.copytree(reward_model, tmp_path / "headless")
    weights = load_file(folder / "model.safetensors")
    weights["v_head.weight"] = weights.pop("score.weight")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(RunError, match=r"headless lacks score\.weight, so it is no OPTForSequenceClassification"):
        RewardModel(str(folder), config(), CPU)
    assert not CriticLearner(str(folder), config(), CPU).model.module.score.weight.any()  # a critic may begin without


def test_nothing_keeps_a_models_memory_after_its_turn(model):
    critic = train_ppo.Critic(0)
    critic.shared, critic.model = True, Model(model, config(), CPU)
    with critic.on_device():
        views = [weakref.ref(view) for view in critic.model.named_tensors().values()]  # as saving does
    assert views
    assert not any(view() is not None for view in views)


def test_critic_begins_with_a_reward_models_head(reward_model):
    critic = CriticLearner(reward_model, config(), CPU)
    expected = AutoModelForSequenceClassification.from_pretrained(reward_model)
    assert critic.model.module.score.weight.equal(expected.score.weight)


def test_models_that_do_not_fit_are_refused(model, reward_model, tmp_path):
    check_vocabulary("the critic", reward_model, model, "--critic-model")
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
        check_vocabulary("the critic", str(tmp_path), model, "--critic-model")
    larger = AutoModelForCausalLM.from_pretrained(model)
    larger.resize_token_embeddings(300)
    larger.save_pretrained(tmp_path / "larger")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "larger")
    with pytest.raises(RunError, match=r"^the critic has 258 embeddings, and .*larger 300, so it may sample an id"):
        check_vocabulary("the critic", reward_model, str(tmp_path / "larger"), "--critic-model")
    AutoConfig.for_model("granite").save_pretrained(tmp_path)
    for flag in ("critic_model", "reward_model"):
        args = arguments_of(train_ppo, model=model, **{flag: str(tmp_path)})
        with pytest.raises(RunError, match=r"type granite, for which .* no class \.\.\.ForSequenceClassification"):
            choose_ppo_models(tmp_path, args, "cpu")


# --- The placement ----------------------------------------------------------------------------------------------------


def test_weights_are_for_functions_and_the_reward_model():
    functions = {"dataset": "trainer.tasks.uppercase:prompts", "reward": ["trainer.tasks.uppercase:uppercase"]}
    args = TaskArguments(**functions, reward_weights=[1.0])
    with pytest.raises(TaskError, match="1 weights for 2 rewards"):
        load_task(args, 0, 1, reward_model="x")


SEPARATE = {"topology": "separate"}


def set_resources(monkeypatch, resources):
    """Ray has one node, with these resources."""
    monkeypatch.setattr(train_ppo.ray, "cluster_resources", lambda: resources)
    monkeypatch.setattr(train_ppo.ray, "nodes", lambda: [{"Alive": True, "Resources": resources}])


@pytest.mark.parametrize(
    ("gpus", "changes", "expected"),
    [
        (0, {}, {"trainer": [0], "critic": [0], "reference": [0], "reward_model": [0], "engine": [0]}),
        (1, {}, {"trainer": [0], "critic": [0], "reference": [0], "reward_model": [0], "engine": [0]}),
        (4, {"tensor_parallel_size": 2}, {"trainer": [0, 1], "reward_model": [0, 1], "engine": [0, 1]}),
        (0, SEPARATE, {"trainer": [0], "critic": [0], "reference": [0], "engine": [1]}),
        (2, SEPARATE, {"trainer": [0], "critic": [0], "reference": [0], "engine": [1]}),
        (4, SEPARATE | {"tensor_parallel_size": 2}, {"trainer": [0], "reward_model": [1], "engine": [2, 3]}),
    ],
)
def test_who_shares_a_bundle_with_whom(monkeypatch, gpus, changes, expected):
    made = []

    def group(bundles, strategy):
        made.append((bundles, strategy))
        return SimpleNamespace(wait=lambda timeout_seconds: True)

    monkeypatch.setattr("trainer.run.actors.placement_group", group)
    monkeypatch.setattr(train_ppo, "by_node", lambda _: [0, 1, 2, 3])
    set_resources(monkeypatch, {"GPU": float(gpus)} if gpus else {"CPU": 2.0})
    args = arguments_of(train_ppo, **changes)
    device, shared, settled, seats = train_ppo.place(args)
    assert device == ("cuda" if gpus else "cpu")
    assert shared == (bool(gpus) and args.topology == "shared")
    assert (settled.sleep, args.sleep) == ("kv" if shared else "none", "kv")
    taken = {name: [bundle for seat in own for bundle in seat.bundles] for name, own in seats.items()}
    assert taken.items() >= expected.items()
    assert len(seats["engine"]) == 1
    (bundles, _) = made[0]
    assert len(bundles) == 1 + max(bundle for own in taken.values() for bundle in own)
    every = [seat for own in seats.values() for seat in own]
    for bundle in range(len(bundles)):
        there = [seat.options.get("num_gpus", 0) for seat in every if bundle in seat.bundles]
        assert sum(there) <= 1 - 0.01 * (seats["engine"][0].options["num_gpus"] == 0) + 1e-9  # 0.01: `gpus_of`


@pytest.mark.parametrize(
    ("gpus", "changes", "message"),
    [
        (1, SEPARATE, "separate with --tensor-parallel-size 1 wants 2 GPUs, and there are 1: "),
        (2, {"tensor_parallel_size": 4}, "shared with --tensor-parallel-size 4 wants 4 GPUs, and there are 2"),
    ],
)
def test_too_few_gpus_is_an_error_that_says_what_fits(monkeypatch, gpus, changes, message):
    set_resources(monkeypatch, {"GPU": float(gpus)})
    with pytest.raises(RunError, match=f"{message}.*lower --tensor-parallel-size"):
        train_ppo.place(arguments_of(train_ppo, **changes))


def test_expandable_segments_are_refused_on_shared_gpus(monkeypatch):
    set_resources(monkeypatch, {"GPU": 1.0})
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(WeightSyncError, match="PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True"):
        train_ppo.place(train_ppo.Arguments())


@pytest.mark.parametrize(("shared", "order"), [(True, "a called, b called"), (False, "a begun, b begun, waited")])
def test_models_that_share_devices_are_called_in_turn(shared, order):
    seen = []

    def wait(phase, *groups):
        seen.append("waited")
        return [list(calls.values()) for calls in groups]

    def group(name):
        def begin(method, *args):
            seen.append(f"{name} begun")
            return {f"{name} {rank}": f"{name}{rank} {method} {args}" for rank in range(2)}

        def agreed(phase, method, *args):
            seen.append(f"{name} called")
            return f"{name}0 {method} {args}"

        return SimpleNamespace(begin=begin, agreed=agreed, session=SimpleNamespace(wait=wait))

    turns = [(group("a"), "load", 1), (group("b"), "learn", 2, 3)]
    assert train_ppo.take_turns("loading", shared, turns) == ["a0 load (1,)", "b0 learn (2, 3)"]
    assert ", ".join(seen) == order


def test_only_models_whose_bits_an_engine_has_compute_as_it_does():
    class Model:
        def __init__(self):
            self.called = {}

        def __len__(self):
            return 1

        def call(self, phase, method, *args):
            self.called[method.__name__] = args
            return ["address"]

        def agreed(self, phase, method, *args):
            return 0, ""

    models = {name: Model() for name in train_ppo.RANKS}
    assert train_ppo.load(models, dict.fromkeys(models, "path"), {}, arguments_of(train_ppo, exact="on"), "cuda", True)
    exact = {name: "on" in model.called["join"] for name, model in models.items()}
    assert exact == {"trainer": True, "reference": True, "critic": False, "reward_model": False}


# --- Whole runs -------------------------------------------------------------------------------------------------------


@cpu_only
@pytest.mark.slow
def test_default_run_learns_and_its_critic_explains_the_returns(script, tmp_path):
    text = script("train_ppo.py", "--output", "run").finish()
    assert text.splitlines()[-1].startswith("OK: reward "), text
    assert re.search(r"^first sync: \d+ tensors, .* GB, bit for bit what the engines had loaded", text, re.M)
    assert re.search(r"^device +trainer +engine +worker\ncpu:0 +0 +0 +0$", text, re.M)
    metrics = metrics_of(tmp_path / "run")
    assert [row["step"] for row in metrics] == list(range(1, 31))
    assert metrics[0]["reward/mean"] < 0.6
    assert metrics[-1]["reward/mean"] > metrics[0]["reward/mean"] + 1
    assert metrics[0]["kl"] == 0
    assert metrics[-1]["ppo/explained_variance"] > 0.3
    assert max(row["logprobs/mismatch"] for row in metrics) < 1e-5
    for phase in ("rollout", "reward", "score", "train", "sync"):
        assert metrics[-1][f"time/{phase}"] > 0


@cpu_only
@pytest.mark.long
def test_resumed_run_goes_on_bit_for_bit(script, tmp_path):
    flags = "--steps", 4, "--save-every", 2, "--output", "whole"
    script("train_ppo.py", *flags).finish()
    whole, run = tmp_path / "whole", shutil.copytree(tmp_path / "whole", tmp_path / "run")
    shutil.rmtree(run / "checkpoint-000004")  # as if it had been killed before
    text = script("train_ppo.py", "--resume", "run").finish()
    assert text.splitlines()[-1].startswith("OK: reward "), text
    assert timeless(run) == timeless(whole)
    for part in ("model.safetensors", "critic/model.safetensors"):
        ours, theirs = (load_file(folder / "checkpoint-000004" / part) for folder in (run, whole))
        assert all(tensor.equal(theirs[name]) for name, tensor in ours.items())


@cpu_only
@pytest.mark.long
def test_separate_run_with_reward_model_and_function_is_evaluated(script, tmp_path):
    flags = """
        --topology separate --tensor-parallel-size 2 --steps 6 --eval-every 3 --eval-share 0.25
        --reward trainer.tasks.uppercase:uppercase
        --reward-model trainer.tasks.tiny_reward_model:build_tiny_reward_model
        --reward-weights 2 0.5 --num-epochs 2 --output run
    """
    text = script("train_ppo.py", *flags.split()).finish()
    assert re.search(r"^OK: reward .*, eval -?\d\.\d{3} -> \d\.\d{3}$", text.splitlines()[-1]), text
    before, *metrics = metrics_of(tmp_path / "run")
    assert metrics[-1]["eval/reward"] > before["eval/reward"]
    for row in metrics:
        parts = row["rewards/uppercase/mean"], row["rewards/reward_model/mean"]
        assert row["reward/mean"] == pytest.approx(2 * parts[0] + 0.5 * parts[1])
    assert metrics[0]["kl_coef"] == 0.01
    assert all(row["approx_kl"] > 0 for row in metrics)
    assert max(row["clip_fraction"] for row in metrics) > 0


@cpu_only
@pytest.mark.long
def test_two_ranks_beside_two_workers_learn(script, tmp_path):
    text = script("train_ppo.py", "--tensor-parallel-size", 2, "--steps", 12, "--output", "run").finish()
    assert text.splitlines()[-1].startswith("OK: reward "), text
    metrics = metrics_of(tmp_path / "run")
    assert metrics[-1]["reward/mean"] > metrics[0]["reward/mean"] + 0.3
