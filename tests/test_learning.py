"""The learning step, against numbers worked out by hand, and everything else that needs no engine.

pytest tests/test_learning.py
"""

import argparse
import json
import math
import os
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import run_folder
from grpo import (
    DivergenceError,
    GRPOConfig,
    Learner,
    MismatchError,
    Rollout,
    advantages,
    kl_estimate,
    token_losses,
    token_weights,
)
from run_folder import RunError, RunFolder, choose_models, last_checkpoint, parse_args, share, write_checkpoint
from task import PROMPTS, TaskError, check_lengths, draw_prompts, load_prompts, load_reward, score, uppercase
from tiny_model import build_tiny_model, byte_tokenizer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(build_tiny_model(tmp_path_factory.mktemp("model")))


def config(**changes):
    return GRPOConfig(**{"group_size": 2, "max_tokens": 8, "learning_rate": 1e-3, **changes})


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # Groups (1, 3) and (0, 8): means 2 and 4, standard deviations sqrt(2) and sqrt(32); of all four, centered,
        # (-1, 1, -4, 4): sqrt(34 / 3).
        ("grpo", [-1 / (math.sqrt(2) + 1e-4), 1 / (math.sqrt(2) + 1e-4), -4 / (math.sqrt(32) + 1e-4), 0.70709]),
        ("dr_grpo", [-1, 1, -4, 4]),
        ("rloo", [-2, 2, -8, 8]),
        ("reinforce++", [v / (math.sqrt(34 / 3) + 1e-4) for v in (-1, 1, -4, 4)]),
    ],
)
def test_advantages(kind, expected):
    result = advantages(torch.tensor([1.0, 3.0, 0.0, 8.0]), 2, kind)
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float32), atol=1e-5, rtol=1e-5)


def test_advantages_of_equal_rewards_are_zero():
    for kind in ("grpo", "dr_grpo", "rloo", "reinforce++"):
        for reward in (0.5, 0.1, 1000.1):  # of which the mean of eight may be another, by rounding
            assert advantages(torch.full((16,), reward), 8, kind).tolist() == [0] * 16


def test_unknown_advantage_is_an_error():
    with pytest.raises(ValueError, match="unknown advantage"):
        advantages(torch.ones(4), 2, "ppo")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("grpo", [[0.5, 0, 0, 0], [1 / 6, 1 / 6, 1 / 6, 0]]),
        ("dr_grpo", [[1 / 16, 0, 0, 0], [1 / 16, 1 / 16, 1 / 16, 0]]),
        ("rloo", [[1 / 4, 0, 0, 0], [1 / 4, 1 / 4, 1 / 4, 0]]),
        ("reinforce++", [[1 / 4, 0, 0, 0], [1 / 4, 1 / 4, 1 / 4, 0]]),
    ],
)
def test_token_weights(kind, expected):
    mask = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 0]])
    torch.testing.assert_close(token_weights(mask, config(advantage=kind)), torch.tensor(expected))


def test_clipping_is_higher_above_and_only_where_it_lowers_the_objective():
    ratios = torch.tensor([[1.5, 0.5, 1.2, 0.9], [1.5, 0.5, 1.2, 0.9]])
    zeros = torch.zeros_like(ratios)
    losses = token_losses(ratios.log(), zeros, zeros, torch.tensor([1.0, -1.0]), config())
    expected = torch.tensor([[-1.28, -0.5, -1.2, -0.9], [1.5, 0.8, 1.2, 0.9]])
    torch.testing.assert_close(losses, expected)


def test_importance_weights_are_truncated():
    old, engine = torch.tensor([[-1.0, -1.0, -1.0]]), torch.tensor([[-1.0, -2.0, 0.0]])
    losses = token_losses(old, old, engine, torch.tensor([1.0]), config())
    torch.testing.assert_close(losses, -torch.tensor([[1.0, 2.0, math.exp(-1)]]))


def test_kl_estimate_and_its_weight():
    logprobs, reference = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0, -1.5]])
    kl = kl_estimate(logprobs, reference)
    torch.testing.assert_close(kl, torch.tensor([[0.0, math.exp(-0.5) + 0.5 - 1]]))
    losses = token_losses(logprobs, logprobs, logprobs, torch.tensor([2.0]), config(kl_coef=0.1), reference)
    torch.testing.assert_close(losses, -2 + 0.1 * kl)


def rollouts(learner, seed=0, count=4):
    """Rollouts of random lengths, with the learner's own log-probabilities for the engine's."""
    generator = torch.Generator().manual_seed(seed)

    def draw(least):
        length = int(torch.randint(least, 8, (1,), generator=generator))
        return torch.randint(2, 250, (length,), generator=generator).tolist()

    drafts = [Rollout(draw(2), draw(1), [], float(torch.rand(1, generator=generator))) for _ in range(count)]
    width = max(len(draft.completion_ids) for draft in drafts)
    with torch.no_grad():
        logprobs, _ = learner.token_logprobs(drafts, width)
    rows = (row[: len(draft.completion_ids)].tolist() for draft, row in zip(drafts, logprobs, strict=True))
    return [replace(draft, logprobs=row) for draft, row in zip(drafts, rows, strict=True)]


def test_token_logprobs_are_the_models_at_the_temperature(model):
    learner = Learner(model, config(temperature=0.7), CPU)
    rollout = Rollout([5, 6, 7], [8, 9], [], 0.0)
    longer = Rollout([4], [3, 3, 3, 3], [], 0.0)
    with torch.no_grad():
        logits = learner.model(torch.tensor([[5, 6, 7, 8, 9]])).logits[0] / 0.7
        logprobs, entropies = learner.token_logprobs([rollout, longer], 4)
    expected = logits.log_softmax(-1)[[2, 3], [8, 9]]
    torch.testing.assert_close(logprobs[0], torch.cat([expected, torch.zeros(2)]))
    entropy = torch.distributions.Categorical(logits=logits[2]).entropy()
    torch.testing.assert_close(entropies[0, 0], entropy)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "reinforce++"])
def test_gradient_does_not_depend_on_micro_batches(model, kind):
    weights = []
    for size in (1, 3, 8):
        learner = Learner(model, config(advantage=kind, micro_batch_size=size, max_grad_norm=1e9), CPU)
        learner.optimizer = torch.optim.SGD(learner.model.parameters(), lr=1.0)
        learner.learn(rollouts(learner, count=8))
        weights.append(torch.nn.utils.parameters_to_vector(learner.model.parameters()))
    torch.testing.assert_close(weights[0], weights[1], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(weights[0], weights[2], atol=1e-6, rtol=1e-5)


def test_step_raises_the_probability_of_what_was_rewarded(model):
    learner = Learner(model, config(), CPU)
    batch = rollouts(learner, count=2)
    batch = [
        Rollout(r.prompt_ids, r.completion_ids, r.logprobs, reward) for r, reward in zip(batch, (1.0, 0.0), strict=True)
    ]
    metrics = learner.learn(batch)
    with torch.no_grad():
        after, _ = learner.token_logprobs(batch, 8)
    before = [sum(rollout.logprobs) for rollout in batch]
    assert after[0].sum() > before[0]
    assert after[1].sum() < before[1]
    assert metrics["logprobs/mismatch"] < 1e-6
    assert metrics["reward/mean"] == 0.5


def test_several_updates_use_the_first_policy_for_the_ratio(model):
    learner = Learner(model, config(updates=3, kl_coef=0.1), CPU)
    metrics = learner.learn(rollouts(learner))
    assert metrics["kl"] == pytest.approx(0, abs=1e-6)  # against the initial model, before the first update
    assert metrics["loss"] != 0


def test_mismatch_over_the_bound_updates_nothing(model):
    learner = Learner(model, config(max_mismatch=1e-4), CPU)
    before = torch.nn.utils.parameters_to_vector(learner.model.parameters()).clone()
    batch = [
        Rollout(r.prompt_ids, r.completion_ids, [p - 0.01 for p in r.logprobs], r.reward) for r in rollouts(learner)
    ]
    with pytest.raises(MismatchError, match="does not serve the trainer's weights"):
        learner.learn(batch)
    assert before.equal(torch.nn.utils.parameters_to_vector(learner.model.parameters()))
    batch[0].logprobs[0] = math.nan
    with pytest.raises(MismatchError):
        learner.mismatch(batch)


def test_gradient_that_is_not_finite_updates_nothing(model):
    learner = Learner(model, config(), CPU)
    before = torch.nn.utils.parameters_to_vector(learner.model.parameters()).clone()
    batch = [replace(rollout, reward=math.inf) for rollout in rollouts(learner)]
    with pytest.raises(DivergenceError, match="step 1: the gradient is not finite"):
        learner.learn(batch)
    assert before.equal(torch.nn.utils.parameters_to_vector(learner.model.parameters()))


@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
def test_resumed_update_is_bit_for_bit_the_uninterrupted_one(model, tmp_path, kl_coef):
    whole = Learner(model, config(kl_coef=kl_coef), CPU)
    first, second = rollouts(whole, seed=1), rollouts(whole, seed=2)
    whole.learn(first)
    checkpoint = write_checkpoint(tmp_path, whole.step, whole.save)
    random_state = torch.get_rng_state()
    whole.learn(second)

    resumed = Learner(str(checkpoint), config(kl_coef=kl_coef), CPU, seed=123, initial=model)
    resumed.load_state(checkpoint)
    assert torch.get_rng_state().equal(random_state)
    assert resumed.step == 1
    resumed.learn(second)
    for (name, a), b in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert a.equal(b), name


def test_checkpoint_that_is_cut_short_leaves_the_last_one(tmp_path):
    write_checkpoint(tmp_path, 1, lambda folder: (folder / "weights").write_text("one"))

    def dies(folder):
        (folder / "weights").write_text("tw")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path, 2, dies)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-000001"]
    for step in (2, 3):
        write_checkpoint(tmp_path, step, lambda folder: (folder / "weights").write_text("whole"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-000002", "checkpoint-000003"]


def test_run_without_checkpoint_cannot_be_resumed(tmp_path):
    with pytest.raises(RunError, match="no checkpoint"):
        last_checkpoint(tmp_path, None)


def test_run_folder_keeps_metrics_and_draws_them(tmp_path):
    args = argparse.Namespace(resume=None, output=tmp_path / "run", verbose=False, steps=3)
    row = {"reward/mean": 0.5, "reward/std": 0.1, "logprobs/mismatch": 1e-7, "time/sync": 0.02}
    row |= {"time/rollout": 1.0, "time/train": 1.0, "sync/GBps": 0.1}
    with RunFolder(args, "test") as run:
        run.start_metrics(0)
        for step in (1, 2, 3):
            run.log_metrics(step, row)
        os.write(1, b"for the log")
        picture = run.draw()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "for the log" in (tmp_path / "run" / "run.log").read_text()
    assert json.loads((tmp_path / "run" / "args.json").read_text()) == {"steps": 3}
    with run.metrics_file.open("a") as file:
        file.write('{"step": 4, "rew')  # a kill cut it short
    write_checkpoint(tmp_path / "run", 2, lambda folder: None)
    with pytest.raises(RunError, match="holds a run already"):
        RunFolder(args, "test")
    with RunFolder(argparse.Namespace(resume=tmp_path / "run", output=None, verbose=False, steps=3), "test") as run:
        run.start_metrics(2)  # the checkpoint is of step 2: what came after will be done again
        run.log_metrics(3, row)
    steps = [json.loads(line)["step"] for line in run.metrics_file.read_text().splitlines()]
    assert steps == [1, 2, 3]


def test_verbose_run_shows_its_log(tmp_path, capfd):
    args = argparse.Namespace(resume=None, output=tmp_path / "run", verbose=True, steps=3)
    with RunFolder(args, "test") as run:
        os.write(1, b"for the log\n")
    assert "for the log\n" in capfd.readouterr().out
    assert "for the log\n" in run.log_file.read_text()


def test_resume_keeps_what_was_given_and_takes_this_scripts_defaults(tmp_path, monkeypatch):
    def parse(default, *command):
        parser = argparse.ArgumentParser()
        parser.add_argument("--gpu-memory-utilization", type=share, default=default)
        monkeypatch.setattr("sys.argv", ["script.py", *command])
        return parse_args(parser)

    run = str(tmp_path / "run")
    for default, command in (0.8, ["--output", run, "--group-size", "4"]), (0.4, ["--resume", run]):
        args = parse(default, *command)
        assert (args.group_size, args.gpu_memory_utilization) == (4, default)
        with RunFolder(args, "test") as folder:
            folder.start_metrics(0)
    assert parse(0.3, "--resume", run, "--group-size", "2").group_size == 2


def test_finished_run_is_not_resumed(tmp_path):
    model = build_tiny_model(tmp_path / "model")
    write_checkpoint(tmp_path / "run", 7, lambda folder: shutil.copytree(model, folder, dirs_exist_ok=True))
    args = argparse.Namespace(model=str(model), learning_rate=1e-3, resume=True, steps=7, ray_address=None)
    with pytest.raises(RunError, match="that run has done its 7 steps: ask for more with --steps"):
        choose_models(argparse.Namespace(path=tmp_path / "run"), args, "cpu")
    args.steps = 8
    assert choose_models(argparse.Namespace(path=tmp_path / "run"), args, "cpu")[1].endswith("checkpoint-000007")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("builtin", "learning_rate"), [(False, 1e-5), (True, 3e-3)])
def test_run_goes_on_with_its_default_model_on_other_hardware(tmp_path, monkeypatch, device, builtin, learning_rate):
    run = tmp_path / "run"
    model = build_tiny_model(run / "model" if builtin else tmp_path / "default")
    monkeypatch.setattr(run_folder, "DEFAULT_MODEL", str(model))
    write_checkpoint(run, 7, lambda folder: shutil.copytree(model, folder, dirs_exist_ok=True))
    args = argparse.Namespace(model=None, learning_rate=None, resume=True, steps=8, ray_address=None)
    initial, checkpoint = choose_models(argparse.Namespace(path=run), args, device)
    assert (initial, checkpoint) == (str(model), str(run / "checkpoint-000007"))
    assert args.learning_rate == learning_rate


def test_model_that_transformers_loads_but_would_not_save_is_saved(model, tmp_path):
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"temperature": 0.9}')
    Learner(str(tmp_path / "model"), config(), CPU).save(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["temperature"] == 0.9


@pytest.mark.parametrize(("every", "steps"), [("4", [4, 8, 10]), ("1", list(range(1, 11))), ("0", [])])
def test_checkpoints_are_written_as_often_as_asked_and_never_with_0(tmp_path, monkeypatch, every, steps):
    command = ["rlhf.py", "--save-every", every, "--steps", "10", "--output", str(tmp_path / "run")]
    monkeypatch.setattr("sys.argv", command)
    with RunFolder(parse_args(argparse.ArgumentParser()), "test") as run:
        assert [step for step in range(1, 11) if run.saves(step)] == steps
        run.rows = [{"step": 1, "reward/mean": 0.5, "reward/std": 0.1, "logprobs/mismatch": 1e-7, "time/sync": 0.02}]
        assert run.summary([Rollout([1], [2], [0.0], 1.0)]).startswith("OK: reward 0.500 -> 1.000")
    assert (run.path / "reward.png").exists() == (every == "0")  # otherwise drawn with each checkpoint


def test_every_epoch_draws_every_prompt_in_its_own_order():
    rows = [{"prompt": str(i)} for i in range(10)]
    drawn = [row["prompt"] for step in range(1, 6) for row in draw_prompts(rows, 4, step, seed=0)]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == [row["prompt"] for row in rows]
    assert drawn[:10] != drawn[10:]
    assert drawn != [row["prompt"] for step in range(1, 6) for row in draw_prompts(rows, 4, step, seed=1)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": 3}\n', "line 2: not an object with a non-empty string"),
        ('{"prompt": "a"}\n\n{"prompt": \n', "line 3: not JSON"),
        ('{"prompt": "a"}\n["prompt"]\n', "line 2: not an object"),
        ('{"prompt": "a", "answer": 1}\n{"prompt": "b"}\n', "line 2: columns"),
        ('{"prompt": "a", "completions": "b"}\n', "line 1: a reward gets completions from the run itself"),
        ("\n", "has no prompts"),
    ],
)
def test_broken_prompts_file_is_named_by_line(tmp_path, text, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(TaskError, match=message):
        load_prompts(str(path))


def test_prompt_without_room_for_a_completion_is_named():
    def llm(room: int):
        return SimpleNamespace(model_config=SimpleNamespace(max_model_len=room), get_tokenizer=byte_tokenizer)

    rows = [{"prompt": "short"}, {"prompt": "7 bytes"}]
    check_lengths(rows, llm(8))
    with pytest.raises(TaskError, match=r"prompt 2, '7 bytes'\.\.\., has 7 tokens, and the engine has room for 7"):
        check_lengths(rows, llm(7))


def test_reward_gets_the_columns(tmp_path, monkeypatch):
    (tmp_path / "graded.py").write_text(
        "def reward(prompts, completions, answer):\n"
        "    return [float(p + a == c) for p, a, c in zip(prompts, answer, completions)]\n"
    )
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "c", "answer": "d"}\n')
    monkeypatch.chdir(tmp_path)
    rows = load_prompts("prompts.jsonl")
    assert score(load_reward("graded:reward"), rows, ["ab", "xx"]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda prompts, completions: [1.0], "returned 1 values for 2 completions"),
        (lambda prompts, completions: [1.0, math.nan], "returned nan for 'y'"),
        (lambda prompts, completions: [1.0, None], "returned None, which is not a number"),
        (lambda prompts, completions: 1 / 0, r"raised ZeroDivisionError: division by zero \(test_learning.py, line"),
    ],
)
def test_reward_that_returns_nonsense(reward, message):
    with pytest.raises(TaskError, match=message):
        score(reward, PROMPTS[:2], ["x", "y"])


def test_built_in_reward():
    assert uppercase(["", "", ""], ["ABcd", "", "É!"]) == [0.5, 0.0, 0.0]


def test_byte_tokenizer_round_trips():
    tokenizer = byte_tokenizer()
    text = "Grüße, 世界!\n"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
