"""What a run writes down, and where it reports: completions.jsonl, TensorBoard, and stand-ins for wandb and trackio.

pytest tests/test_reporting.py
"""

import json
import os
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import rlhf
from recipe.arguments import parse
from recipe.dataset import Row
from recipe.errors import RunError
from recipe.learner import Rollout
from recipe.leftovers import MARK
from recipe.rewards import Batch, Group
from recipe.run_folder import RunFolder

METRICS = {"reward/mean": 0.5, "reward/std": 0.1, "logprobs/mismatch": 1e-7, "time/sync": 0.02}
STAND_IN = """
import os

calls = []

def init(**options):
    assert "RLHF_SESSION_FOLDER" not in os.environ, "the session's end would end the process that uploads"
    calls.append(("init", options))

def log(metrics, step):
    calls.append(("log", metrics, step))

def finish(**options):
    calls.append(("finish", options))

def Table(dataframe):
    return dataframe.to_dict("records")
"""


def arguments(tmp_path, *report_to, **changes):
    return rlhf.Arguments(output=tmp_path / "run", group_size=2, steps=3, report_to=list(report_to), **changes)


def batch(*rewards):
    """One prompt of chat messages, with two completions of three tokens."""
    rollouts = [
        Rollout([1], [2, 3, 4], [-1.0] * 3, reward, f"a|{i}\n", rewards={"exact": reward}, extra={"parsed": i})
        for i, reward in enumerate(rewards)
    ]
    return Batch([Group(Row([{"role": "user", "content": "3+4="}], {}, ""), rollouts)], {"rewards/exact/mean": 0.5})


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Makes a module that can be imported, and notes the calls of its functions."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(name):
        (tmp_path / f"{name}.py").write_text(STAND_IN)
        sys.modules.pop(name, None)
        return __import__(name)

    yield make
    for name in ("wandb", "trackio"):
        sys.modules.pop(name, None)


def test_completions_of_repeated_steps_are_dropped(tmp_path):
    args = arguments(tmp_path, "none")
    with RunFolder(args, "test") as run:
        run.start_metrics(0)
        for step in (1, 2, 3):
            run.log_step(step, batch(1.0, 0.0), METRICS)
    with run.completions_file.open("a") as file:
        file.write('{"step": 2, "pro')  # a kill cut it short
    args.resume = run.path
    with RunFolder(args, "test") as run:
        run.start_metrics(1)
        run.log_step(2, batch(0.0, 3.0), METRICS)
    rows = [json.loads(line) for line in run.completions_file.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 1, 2, 2]
    prompt = [{"role": "user", "content": "3+4="}]
    advantage = rows[0].pop("advantage")
    assert advantage == pytest.approx(0.5 / (0.5**0.5 + 1e-4))  # GRPO's, by the standard deviation of 1 and 0
    assert rows[0] == {"step": 1, "prompt": prompt, "text": "a|0\n", "rewards": {"exact": 1.0}, "parsed": 0}
    assert [row["rewards"]["exact"] for row in rows] == [1.0, 0.0, 0.0, 3.0]
    assert not (run.path / "tensorboard").exists()


def test_tensorboard_has_metrics_and_completions(tmp_path):
    with RunFolder(arguments(tmp_path, "tensorboard"), "test") as run:
        run.start_metrics(0)
        run.log_metrics(0, {"eval/reward": 0.25})
        run.log_step(1, batch(1.0, 0.0), METRICS)
    events = EventAccumulator(str(run.path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("eval/reward")] == [(0, 0.25)]
    assert [(event.step, event.value) for event in events.Scalars("rewards/exact/mean")] == [(1, 0.5)]
    (text,) = events.Tensors("completions/text_summary")
    head, _, first, _ = text.tensor_proto.string_val[0].decode().splitlines()
    assert head == "| step | prompt | text | rewards | advantage | parsed |"
    assert first.startswith('| 1 | [{"role": "user", "content": "3+4="}] | a\\|0<br> | {"exact": 1.0} | 0.7')


def test_screen_has_speed_time_left_and_evaluation(tmp_path, capfd):
    with RunFolder(arguments(tmp_path, "none"), "test") as run:
        run.start_metrics(0)
        run.log_metrics(0, {"eval/reward": 0.25, "eval/pass@1": 0.25})
        run.logged -= 2  # as if the step had taken two seconds more
        run.log_step(1, batch(1.0, 0.0), METRICS | {"eval/reward": 0.75, "time/eval": 1.0})
        assert run.rows[1]["time/step"] == pytest.approx(1, abs=0.2)  # the evaluation is no part of it
        assert run.rows[1]["tokens/s"] == pytest.approx(6 / run.rows[1]["time/step"])
        assert run.summary(batch(1.0, 1.0).rollouts) == (
            "OK: reward 0.500 -> 1.000 in 1 steps, 0.0200 s per sync (median), eval 0.250 -> 0.750"
        )
        run.draw()
    before, line, *_ = capfd.readouterr().out.splitlines()
    assert before == "step 0/3  eval 0.250"
    assert line.startswith("step 1/3  reward 0.500  mismatch 1.0e-07  sync 0.0200 s       ")
    assert line.endswith(" tokens/s  eval 0.750  0:00:00 left")


def saved(run):
    return json.loads((run.path / "args.json").read_text())


def test_wandb_gets_metrics_and_tables_and_goes_on_with_its_run(tmp_path, stand_in, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv(MARK, "a session's")
    wandb, args = stand_in("wandb"), arguments(tmp_path, "wandb", "none")
    with pytest.raises(ZeroDivisionError), RunFolder(args, "test") as run:
        (run.path / "wandb" / "run-20260101_000000-other").mkdir(parents=True)  # of a run that was not resumed
        run.start_metrics(0)
        run.log_step(1, batch(1.0, 0.0), METRICS)
        _ = 1 / 0
    started, completions, metrics, finished = wandb.calls
    options = {"project": "mine", "name": "run", "dir": str(run.path), "config": saved(run), "resume": "allow"}
    assert started == ("init", options | {"id": None})
    assert os.environ[MARK] == "a session's"
    assert completions[1]["completions"][1].items() >= {"text": "a|1\n", "rewards": '{"exact": 0.0}'}.items()
    assert metrics[1].items() >= {"reward/mean": 0.5, "rewards/exact/mean": 0.5}.items()
    assert [completions[2], metrics[2], finished] == [1, 1, ("finish", {"exit_code": 1})]

    (run.path / "wandb" / "offline-run-20260102_000000-abc1").mkdir()  # the stand-in makes none
    args.resume = run.path
    with RunFolder(args, "test") as run:
        run.start_metrics(1)
    assert wandb.calls[-2][1] == options | {"id": "abc1", "config": saved(run)}
    assert wandb.calls[-1] == ("finish", {"exit_code": 0})


def test_trackio_takes_fewer_options(tmp_path, stand_in, monkeypatch):
    monkeypatch.delenv("TRACKIO_PROJECT", raising=False)
    trackio = stand_in("trackio")
    with RunFolder(arguments(tmp_path, "trackio"), "test") as run:
        run.start_metrics(0)
    (_, started), finished = trackio.calls
    assert started.keys() == {"project", "name", "config", "resume"}
    assert (started["project"], started["resume"], finished) == ("rlhf", "never", ("finish", {}))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_package_that_is_not_there_is_one_error_and_leaves_nothing(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RunError, match=rf"^--report-to {name}: .*pip install {name}"):
        RunFolder(arguments(tmp_path, "tensorboard", name), "test")
    assert list(tmp_path.iterdir()) == []


def test_unknown_tracker_is_a_usage_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rlhf.py", "--report-to", "tensorboard", "wandbb"])
    with pytest.raises(SystemExit):
        parse(rlhf.Arguments, "a test")
    assert "wandbb is none of tensorboard, wandb, trackio, none" in capsys.readouterr().err
