"""Evaluation without an engine, and the task whose skill is seen to rise: what is held out, what its model is taught.

pytest tests/test_evaluation.py
"""

import dataclasses
import re
import shutil
from types import SimpleNamespace

import pytest

import rlhf
from recipe import addition, task
from recipe.checkpoint import Models, choose_models, write_checkpoint
from recipe.errors import TaskError
from recipe.evaluation import evaluate, pass_at_k
from recipe.learner import Rollout

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]


def dataset(split):
    return ROWS


def graded(completions, answer, log_metric, **_):
    log_metric("length", 2.0)
    return [float(len(set(completion) & set(answer))) for completion, answer in zip(completions, answer, strict=True)]


def share(completions, answer, **_):
    return [1 / 3 + 1 / 3 + 0.1 + 0.1 + 0.1 + 0.1 - 1 / 30 - 1 / 30 for _ in completions]  # 1, but for rounding


def arguments(**changes):
    own = {"dataset": "test_evaluation:dataset", "eval_share": 0.5, "reward": ["test_evaluation:graded"]}
    return rlhf.Arguments(**own | {"steps": 10, "eval_every": 4} | changes)


class Engine:
    """Answers with the completions it was made with: one per sample, for each of its prompts."""

    def __init__(self, *texts):
        self.texts, self.calls, self.sample = texts, [], SimpleNamespace(remote=self.answer)

    def answer(self, prompts, args, seed, first, evaluation):
        self.calls.append((len(prompts), args, seed, first, evaluation))
        return [
            Rollout(ids, [1], [], None, self.texts[i % len(self.texts)])
            for ids in prompts
            for i in range(args.group_size)
        ]


SESSION = SimpleNamespace(wait=lambda phase, **calls: list(calls.values()))


def test_pass_at_k():
    assert pass_at_k(5, 0, 1) == 0
    assert pass_at_k(5, 2, 1) == pytest.approx(2 / 5)
    assert pass_at_k(5, 2, 2) == pytest.approx(1 - 3 / 10)  # 3 of the 10 pairs have none that passes
    assert pass_at_k(5, 2, 4) == 1


def test_engines_share_the_held_out_prompts_and_answer_greedily():
    args, engines = arguments(temperature=0.7), {"a": Engine("1"), "b": Engine("5")}
    metrics = evaluate(SESSION, engines, task.load_task(args), args, 8)
    assert [
        (count, first, evaluation) for engine in engines.values() for count, _, _, first, evaluation in engine.calls
    ]
    (a,), (b,) = (engine.calls for engine in engines.values())
    assert (a[0], a[3], b[0], b[3]) == (2, 0, 2, 2)
    assert a[4] and b[4]
    assert (a[1].group_size, a[1].temperature, a[1].max_tokens) == (1, 0.0, args.max_tokens)
    assert metrics.keys() == {"eval/reward", "eval/rewards/graded/mean", "eval/length", "eval/pass@1", "time/eval"}


def test_samples_at_the_temperature_of_training():
    args = arguments(eval_samples=6, temperature=0.7, reward=["test_evaluation:exact"])
    engine, held_out = Engine("1", "2", "3", "4", "5", "6"), task.load_task(args)
    metrics = evaluate(SESSION, {"engine": engine}, held_out, args, 4)
    assert (engine.calls[0][1].group_size, engine.calls[0][1].temperature) == (6, 0.7)
    right = sum(row.columns["answer"] in "123456" for row in held_out.eval_rows) / 4  # one sample of six is
    assert 0 < right <= 1
    assert metrics["eval/reward"] == pytest.approx(right / 6)
    assert metrics["eval/pass@1"] == pytest.approx(right / 6)
    assert metrics["eval/pass@2"] == pytest.approx(right / 3)
    assert metrics["eval/pass@4"] == pytest.approx(right * 4 / 6)
    assert metrics["eval/pass@6"] == pytest.approx(right)


def exact(completions, answer, **_):
    return addition.exact(completions, answer)


@pytest.mark.parametrize(("pass_reward", "passes"), [(1.0, 1), (1.01, 0), (0.5, 1)])
def test_what_passes(pass_reward, passes):
    args = arguments(pass_reward=pass_reward, reward=["test_evaluation:share"])
    assert evaluate(SESSION, {"engine": Engine("")}, task.load_task(args), args, 4)["eval/pass@1"] == passes


@pytest.mark.parametrize(("every", "due"), [(4, [0, 4, 8, 10]), (5, [0, 5, 10]), (0, [])])
def test_when_it_is_due(every, due):
    args = arguments(eval_every=every)
    loaded = task.load_task(args)
    assert [step for step in range(11) if evaluate(SESSION, {"engine": Engine("1")}, loaded, args, step)] == due


def test_it_leaves_the_training_run_alone():
    """The same requests whatever the step, which no step of learning sends, and no metric left for the next step."""
    args = arguments()
    loaded, engine = task.load_task(args), Engine("1")
    for step in (0, 4):
        evaluate(SESSION, {"engine": engine}, loaded, args, step)
    assert engine.calls[0][2:] == engine.calls[1][2:]
    assert loaded.rewards.metrics([]) == {}


def test_nothing_to_evaluate_on_is_an_error():
    with pytest.raises(TaskError, match=r"^--eval-every: nothing to evaluate on"):
        task.load_task(arguments(eval_share=0.0))


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
    assert addition.exact(["46", "46 ", "4", "", "046"], ["46"] * 5) == [1, 0, 0, 0, 0]


def test_tasks_model_is_taught_once_in_the_runs_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(addition, "RIGHT", 1e-4)  # one answer
    args = dataclasses.replace(arguments(), model="recipe.addition:build_model", seed=3)
    assert choose_models(tmp_path, args, "cuda") == Models(*(str(tmp_path / "model"),) * 2, None)
    assert re.match(r"\d+ supervised steps have taught a small model to add", capsys.readouterr().out)
    assert args.learning_rate == 1e-6  # not that of the built-in model

    write_checkpoint(tmp_path, 7, lambda folder: shutil.copytree(tmp_path / "model", folder, dirs_exist_ok=True))
    monkeypatch.delattr(addition, "build_model")
    args.resume = tmp_path
    checkpoint = tmp_path / "checkpoint-000007"
    assert choose_models(tmp_path, args, "cpu") == Models(str(tmp_path / "model"), str(checkpoint), checkpoint)
