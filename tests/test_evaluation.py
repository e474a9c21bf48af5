"""Evaluation without an engine, and the task whose skill is seen to rise: what is held out, what its model is taught.

pytest tests/test_evaluation.py
"""

import re
import shutil
from dataclasses import replace

import pytest
from conftest import arguments_of, task_of
from fakes import Engines

import train_grpo
from trainer.errors import TaskError
from trainer.flags import with_values
from trainer.learning.learner import learning_rate
from trainer.rollouts.evaluation import evaluate, pass_at_k
from trainer.rollouts.rollouts import Rollouts
from trainer.rollouts.sampling import sampling_options
from trainer.run.checkpoint import write_checkpoint
from trainer.run.models import Models, choose_models
from trainer.tasks import addition
from trainer.tasks.rewards import Batch, exact
from trainer.tasks.task import load_task

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]


def dataset(split):
    return ROWS


def graded(completions, answer, trainer_state, log_metric, **_):
    log_metric("steps_done", trainer_state.global_step)
    return [float(len(set(completion) & set(answer))) for completion, answer in zip(completions, answer, strict=True)]


def share(completions, answer, **_):
    return [1 / 3 + 1 / 3 + 0.1 + 0.1 + 0.1 + 0.1 - 1 / 30 - 1 / 30 for _ in completions]  # 1, but for rounding


def arguments(**changes):
    own = {"dataset": "test_evaluation:dataset", "eval_share": 0.5, "reward": ["test_evaluation:graded"]}
    return arguments_of(train_grpo, **own | {"steps": 10, "eval_every": 4} | changes)


def engine_of(*texts):
    """One engine, which answers each prompt with these completions, in a row."""
    return Engines(lambda text, i: texts[i % len(texts)])


def evaluated(engines, args, step):
    """The metrics of an evaluation of this task by these engines."""
    return evaluate(Rollouts(engines, task_of(args), args.sampling, step), step)


def test_pass_at_k():
    assert pass_at_k(5, 0, 1) == 0
    assert pass_at_k(5, 2, 1) == pytest.approx(2 / 5)
    assert pass_at_k(5, 2, 2) == pytest.approx(1 - 3 / 10)  # 3 of the 10 pairs have none that passes
    assert pass_at_k(5, 2, 4) == 1


def test_engines_share_the_held_out_prompts_and_answer_greedily():
    args, two = arguments(temperature=0.7), Engines(lambda *_: "1", lambda *_: "5")
    metrics = evaluated(two, args, 8)
    assert [call.engine for call in two.calls] == [0, 0, 1, 1]
    greedy = replace(args.sampling, group_size=1, temperature=0.0)
    sampling = [options for call in two.calls for options in call.sampling]
    assert sampling == [sampling_options(greedy, 0, 0, number, True) for number in range(4)]
    assert two.drops == 2  # each engine's caches
    names = {"eval/reward", "eval/rewards/graded/mean", "eval/steps_done", "eval/pass@1", "time/eval"}
    assert metrics.keys() == names


def test_samples_at_the_temperature_of_training():
    args = arguments(eval_samples=6, temperature=0.7, reward=["trainer.tasks.rewards:exact"])
    engine = engine_of("1", "2", "3", "4", "5", "6")
    metrics = evaluated(engine, args, 4)
    assert [(call.sampling[0]["n"], call.sampling[0]["temperature"]) for call in engine.calls] == [(6, 0.7)] * 4
    right = sum(row.columns["answer"] in "123456" for row in task_of(args).eval_rows) / 4  # one sample of six is
    assert 0 < right <= 1
    assert metrics["eval/reward"] == pytest.approx(right / 6)
    assert metrics["eval/pass@1"] == pytest.approx(right / 6)
    assert metrics["eval/pass@2"] == pytest.approx(right / 3)
    assert metrics["eval/pass@4"] == pytest.approx(right * 4 / 6)
    assert metrics["eval/pass@6"] == pytest.approx(right)


def known(completions, **_):
    return [None if completion == "?" else float(completion) for completion in completions]


def test_completions_whose_reward_is_not_known_neither_pass_nor_fail():
    args = arguments(eval_samples=4, reward=["test_evaluation:known"])
    metrics = evaluated(engine_of("1", "?", "0", "?"), args, 4)
    assert metrics["eval/reward"] == 0.5
    assert (metrics["eval/pass@1"], metrics["eval/pass@2"]) == (0.5, 1)
    assert "eval/pass@4" not in metrics  # of no prompt are as many known
    metrics = evaluated(engine_of("?"), args, 4)
    assert metrics.keys() == {"time/eval"}


@pytest.mark.parametrize("step", [0, 4, 10])
def test_reward_is_told_how_many_steps_are_done(step):
    assert evaluated(engine_of("1"), arguments(), step)["eval/steps_done"] == step


@pytest.mark.parametrize(("pass_reward", "passes"), [(1.0, 1), (1.01, 0), (0.5, 1)])
def test_what_passes(pass_reward, passes):
    args = arguments(pass_reward=pass_reward, reward=["test_evaluation:share"])
    assert evaluated(engine_of(""), args, 4)["eval/pass@1"] == passes


@pytest.mark.parametrize(("every", "due"), [(4, [0, 4, 8, 10]), (5, [0, 5, 10]), (0, [])])
def test_when_it_is_due(every, due):
    args = arguments(eval_every=every)
    assert [step for step in range(11) if evaluated(engine_of("1"), args, step)] == due


def test_it_leaves_the_training_run_alone():
    """The same requests whatever the step, which no step of learning sends, and no metric left for the next step."""
    args = arguments()
    task, engine = task_of(args), engine_of("1")
    rollouts = Rollouts(engine, task, args.sampling, 0)
    for step in (0, 4):
        evaluate(rollouts, step)
    first, second = engine.calls[:4], engine.calls[4:]
    assert first == second
    learned = [sampling_options(args.sampling, 0, step, number) for step in range(1, 11) for number in range(8)]
    assert not {call.sampling[0]["seed"] for call in first} & {own["seed"] for own in learned}
    assert task.rewards.compute(Batch([]), 0).metrics == {}


def test_nothing_to_evaluate_on_is_an_error():
    with pytest.raises(TaskError, match=r"^--eval-every: nothing to evaluate on"):
        task_of(arguments(eval_share=0.0))


def test_evaluation_without_a_reward_is_an_error():
    args = arguments(reward=None)
    with pytest.raises(TaskError, match=r"^--reward is missing"):
        load_task(args.task, 0, 4, needs_reward=False)


def test_sums_that_are_evaluated_on_are_taught_in_neither_order():
    held_out, taught = (
        {tuple(sorted(map(int, row["prompt"][:-1].split("+")))) for row in addition.problems(split)}
        for split in ("test", "train")
    )
    assert len(held_out) == addition.HELD_OUT
    assert len(held_out | taught) == 5050
    assert not held_out & taught
    assert len({row["prompt"] for split in ("test", "train") for row in addition.problems(split)}) == 10_000


def test_answer_and_nothing_else_is_right():
    assert exact(["46", "46 ", "4", "", "046"], ["46"] * 5) == [1, 0, 0, 0, 0]


def test_tasks_model_is_taught_once_in_the_runs_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(addition, "RIGHT", 1e-4)  # one answer
    args = arguments(model="trainer.tasks.addition:build_model", seed=3)
    models, optimizer = choose_models(tmp_path, args, "cpu")
    assert models == Models(*(str(tmp_path / "model"),) * 2, None)
    said = r".*addition:build_model makes a model in .*/model\n\d+ supervised steps have taught a small model to add"
    assert re.match(said, capsys.readouterr().out)
    assert learning_rate(replace(args, optimizer=optimizer)) == 1e-6  # not that of the built-in model

    write_checkpoint(tmp_path, 7, lambda folder: shutil.copytree(tmp_path / "model", folder, dirs_exist_ok=True))
    monkeypatch.delattr(addition, "build_model")
    models, _ = choose_models(tmp_path, with_values(args, {"resume": tmp_path}), "cpu")
    checkpoint = tmp_path / "checkpoint-000007"
    assert models == Models(str(tmp_path / "model"), str(checkpoint), checkpoint)
