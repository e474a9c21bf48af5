"""What a run writes down, shows and reports: completions.jsonl, the screen, TensorBoard, and a stand-in for others.

pytest tests/test_reporting.py
"""

import importlib
import inspect
import json
import sys
import time
import tracemalloc
from dataclasses import replace
from types import SimpleNamespace

import pytest
from accelerate import PartialState
from accelerate.utils import LoggerType
from conftest import ROOT, arguments_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train_grpo
from trainer.errors import RunError
from trainer.learning.rollout import Rollout
from trainer.run.folder import RunFolder
from trainer.run.trackers import Trackers, as_text
from trainer.tasks.dataset import Row
from trainer.tasks.rewards import Batch, Group

METRICS = {"reward/mean": 0.5, "reward/std": 0.1, "logprobs/mismatch": 1e-7, "time/sync": 0.02}
REPORT = SimpleNamespace(seconds=0.01, gigabytes_per_second=0.1)  # of a sync
STAND_IN = """
calls = []

class Run:
    def log(self, metrics, step):
        calls.append(("log", metrics, step))

    def finish(self):
        calls.append(("finish",))

class config:
    def update(values, allow_val_change):
        calls.append(("config", values))

def init(**options):
    calls.append(("init", options))
    return Run()

def Table(columns, data, dataframe):
    return [dict(zip(columns, row)) for row in data]
"""


def arguments(tmp_path, *report_to, **changes):
    own = {"output": tmp_path / "run", "group_size": 2, "steps": 3, "report_to": list(report_to)}
    return arguments_of(train_grpo, **own | changes)


def batch(*rewards, prompt="3+4=", text="a|"):
    """One prompt of chat messages, with completions of three tokens."""
    rollouts = [
        Rollout([1], [2, 3, 4], [-1.0] * 3, reward, f"{text}{i}\n", rewards={"exact": reward}, extra={"parsed": i})
        for i, reward in enumerate(rewards)
    ]
    return Batch([Group(Row([{"role": "user", "content": prompt}], {}, ""), rollouts)], {"rewards/exact/mean": 0.5})


@pytest.fixture
def installed(monkeypatch):
    """Has accelerate know a tracker's package, which is a module of this test. Returns the calls of its functions."""

    def install(name):
        module = SimpleNamespace()
        exec(STAND_IN, vars(module))
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr("accelerate.tracking._available_trackers", [LoggerType(name)])
        monkeypatch.setattr(PartialState, "_shared_state", {})  # as in a new process
        return module.calls

    return install


def test_completions_of_repeated_steps_are_dropped(tmp_path):
    args = arguments(tmp_path, "none")
    with RunFolder(args.run, "test") as run:
        run.start_metrics(0, args)
        for step in (1, 2, 3):
            run.log_step(step, batch(1.0, 0.0), REPORT, METRICS | {"advantage": [0.5, -0.5]})
    with run.completions_file.open("a") as file:
        file.write('{"step": 2, "pro')  # a kill cut it short
    args = replace(args, run=replace(args.run, resume=run.path))
    with RunFolder(args.run, "test") as run:
        run.start_metrics(1, args)
        run.log_step(2, batch(0.0, None), REPORT, METRICS | {"advantage": [0.0, 0.0]})
    rows = [json.loads(line) for line in run.completions_file.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 1, 2, 2]
    prompt = [{"role": "user", "content": "3+4="}]
    expected = {"step": 1, "prompt": prompt, "text": "a|0\n", "rewards": {"exact": 1.0}, "advantage": 0.5, "parsed": 0}
    assert rows[0] == expected
    assert "advantage" not in json.loads(run.metrics_file.read_text().splitlines()[0])
    assert [row["rewards"]["exact"] for row in rows] == [1.0, 0.0, 0.0, None]
    assert [row["advantage"] for row in rows[1:]] == [-0.5, 0, 0]
    assert not (run.path / "tensorboard").exists()


def test_resuming_does_not_read_all_completions_into_memory(tmp_path):
    args = arguments(tmp_path, "none")
    with RunFolder(args.run, "test") as run:
        run.start_metrics(0, args)
        run.completions_file.write_text((json.dumps({"step": 1, "text": "a" * 2**20}) + "\n") * 30)
    args = replace(args, run=replace(args.run, resume=run.path))
    with RunFolder(args.run, "test") as run:
        tracemalloc.start()
        run.start_metrics(1, args)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert len(run.completions_file.read_text().splitlines()) == 30
    assert peak < 10 * 2**20


def test_rewards_metric_called_step_does_not_change_the_step(tmp_path):
    args = arguments(tmp_path, "none")
    with RunFolder(args.run, "test") as run:
        run.start_metrics(0, args)
        run.log_step(1, batch(1.0, 0.0), REPORT, METRICS | {"step": 7.0})
    assert json.loads(run.metrics_file.read_text())["step"] == 1


def test_screen_has_speed_time_left_and_evaluation(tmp_path, monkeypatch, capsys):
    args, now = arguments(tmp_path, "none"), [10.0]
    monkeypatch.setattr("trainer.run.folder.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("trainer.run.folder.time.time", lambda: now[0])
    with RunFolder(args.run, "test") as run:
        run.last_started = 3.0
        run.started("models")
        run.start_metrics(0, args)
        run.log_metrics(0, {"eval/reward": 0.25, "eval/pass@1": 0.25})
        now[0] += 3
        run.log_step(1, batch(1.0, 0.0), REPORT, METRICS | {"eval/reward": 0.75, "time/eval": 1.0})
        assert run.rows[1]["time/step"] == 2  # the evaluation is no part of it
        assert run.rows[1]["tokens/s"] == 3
        assert run.summary(batch(1.0, 1.0, None), 1e-7) == (
            "OK: reward 0.500 -> 1.000 in 1 steps, 0.0200 s per sync (median), eval 0.250 -> 0.750"
        )
    started, before, line, *_ = capsys.readouterr().out.splitlines()
    assert started == "started in 7 s: models 7"
    assert [row.get("time/start") for row in run.rows] == [7, None]
    assert before == "step 0/3  eval 0.250"
    assert line == (
        "step 1/3  reward 0.500  mismatch 1.0e-07  sync 0.0200 s  0.10 GB/s       3 tokens/s  eval 0.750  0:00:06 left"
    )


def test_a_start_says_for_whom_it_waits_and_what_vllm_does(tmp_path, capsys):
    args = arguments(tmp_path, "none")
    with RunFolder(args.run, "test") as run:
        print("INFO 11-28 19:15:14 [loader.py:506] of the run before", file=sys.stderr)
    with RunFolder(args.run, "test") as run:
        run.progress("starting", 10, ["engine 0", "engine 1"])
        print("(EngineCore pid=7) INFO 11-28 19:15:14 [loader.py:506] Loading weights took 0.07 s", file=sys.stderr)
        run.progress("starting", 19, ["engine 0", "engine 1"])
        run.progress("starting", 20, ["engine 1"])
        print("\rCapturing CUDA graphs (FULL):  18%|", file=sys.stderr)
        run.progress("starting", 30, ["engine 1"])
        run.progress("learning", 10, [])
    assert capsys.readouterr().out.splitlines() == [
        "starting (engine 0, engine 1) ... 10 s",
        "starting (engine 1) ... 20 s: Loading weights took 0.07 s",
        "starting (engine 1) ... 30 s: Capturing CUDA graphs (FULL):  18%|",
        "learning ... 10 s",
    ]


def test_step_without_any_reward_is_shown_without_one(tmp_path, capsys):
    args = arguments(tmp_path, "none")
    with RunFolder(args.run, "test") as run:
        run.start_metrics(0, args)
        unknown = {name: value for name, value in METRICS.items() if not name.startswith("reward")}
        run.log_step(1, batch(None, None), REPORT, unknown)
        assert run.summary(batch(1.0, 0.0), 1e-7).startswith("OK: reward nan -> 0.500 in 1 steps")
    said = capsys.readouterr().out
    assert said.startswith("step 1/3  mismatch 1.0e-07")
    assert "\nstep 1: no completion has a reward, so nothing is learned\n" in said


@pytest.mark.parametrize("name", sorted(path.stem for path in ROOT.glob("train_*.py")))
def test_a_step_is_saved_before_anything_is_said_about_it(name):
    _, loop = inspect.getsource(importlib.import_module(name).main).split("for step in")
    *before, after = loop.split('.call("saving", ')
    assert before and "run.log_step(" in after
    assert not any(word in part for word in ("run.log_step(", "run.say(", "after_step(") for part in before)


def test_samples_on_the_screen_are_cut_to_a_line_each(tmp_path, capsys):
    with RunFolder(arguments(tmp_path, "none").run, "test") as run:
        run.show(batch(0.5, 1.0))
        run.show(batch(None, prompt="p" * 101, text="two\nlines " * 100))
    short, long = capsys.readouterr().out.splitlines()
    assert short == r"   0.50  '3+4=' -> 'a|0\n'"
    assert long == f"  '{'p' * 100}...' -> '" + r"two\nlines " * 10 + "...'"


# --- Trackers ---------------------------------------------------------------------------------------------------------


def test_tensorboard_has_the_metrics_and_those_of_repeated_steps_once(tmp_path):
    args = arguments(tmp_path, "tensorboard")
    with RunFolder(args.run, "test") as run:
        run.start_metrics(0, args)
        run.log_metrics(0, {"eval/reward": 0.25})
        for step in (1, 2):
            run.log_step(step, batch(1.0, 0.0), REPORT, METRICS)
    time.sleep(1)  # events are read in the order of their files' names, which begin with the second
    args = replace(args, run=replace(args.run, resume=run.path))
    with RunFolder(args.run, "test") as run:
        run.start_metrics(1, args)
        run.log_step(2, batch(1.0, 0.0), REPORT, METRICS | {"reward/mean": 0.75})
    events = EventAccumulator(str(run.path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("eval/reward")] == [(0, 0.25)]
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.5), (2, 0.75)]
    assert [event.value for event in events.Scalars("rewards/exact/mean")] == [0.5, 0.5]


def test_wandb_gets_metrics_and_tables_and_resumes_its_run(tmp_path, installed, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    calls, args = installed("wandb"), arguments(tmp_path, "wandb", "none")
    with pytest.raises(ZeroDivisionError), RunFolder(args.run, "test") as run:
        run.start_metrics(0, args)
        run.log_step(1, batch(1.0, None), REPORT, METRICS)
        _ = 1 / 0
    saved = json.loads((run.path / "args.json").read_text())
    started, config, completions, metrics = calls  # and wandb itself sees that this process fails
    options = {"project": "mine", "name": "run", "dir": str(run.path), "resume": "allow", "id": saved["run_id"]}
    assert started == ("init", options)
    assert config == ("config", {name: as_text(value) for name, value in saved.items()})
    first = {"text": "a|0\n", "rewards": '{"exact": 1.0}', "parsed": 0}
    first["prompt"] = '[{"role": "user", "content": "3+4="}]'
    assert completions[1]["completions"][0].items() >= first.items()
    assert completions[1]["completions"][1]["rewards"] == '{"exact": null}'
    assert metrics[1].items() >= {"reward/mean": 0.5, "rewards/exact/mean": 0.5, "sync/GBps": 0.1}.items()
    assert [completions[2], metrics[2]] == [1, 1]

    args = replace(args, run=replace(args.run, resume=run.path))
    with RunFolder(args.run, "test") as run:
        run.start_metrics(1, args)
    assert calls[4:] == [("init", options), ("config", config[1]), ("finish",)]


def test_tables_have_columns_logged_for_some_completions():
    calls, trackers = [], Trackers(["none"])
    trackers.running = [SimpleNamespace(log_table=lambda name, **table: calls.append(table))]
    trackers.log_completions(1, [{"step": 1, "a": "A"}, {"step": 1, "b": "B", "a": "A"}])
    assert calls == [{"columns": ["step", "a", "b"], "data": [[1, "A", None], [1, "A", "B"]], "step": 1}]


def test_mlflow_gets_names_that_it_takes():
    calls, trackers = [], Trackers(["none"])
    for name in ("mlflow", "other"):
        trackers.running.append(SimpleNamespace(name=name, log=lambda metrics, step: calls.append(metrics)))
    trackers.log(1, {"eval/pass@1": 1.0, "GB per s: x": 2.0})
    assert calls == [{"eval/pass_1": 1.0, "GB per s: x": 2.0}, {"eval/pass@1": 1.0, "GB per s: x": 2.0}]


def test_trackio_has_no_tables(tmp_path, installed, monkeypatch):
    monkeypatch.delenv("TRACKIO_PROJECT", raising=False)
    calls, args = installed("trackio"), arguments(tmp_path, "trackio")
    with RunFolder(args.run, "test") as run:
        run.start_metrics(0, args)
        run.log_step(1, batch(1.0, 0.0), REPORT, METRICS)
    started, config, metrics, finished = calls
    assert started == ("init", {"project": "rlhf", "name": "run", "resume": "never"})
    assert config[1]["group_size"] == 2
    assert metrics[1].items() >= METRICS.items()
    assert finished == ("finish",)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wandb", "its package is not installed (pip install wandb)"),
        ("trackio", "its package is not installed (pip install trackio)"),
        ("wandbb", "is none of none, "),
    ],
)
def test_missing_tracker_is_one_error_and_leaves_nothing(tmp_path, monkeypatch, name, message):
    monkeypatch.setattr("accelerate.tracking._available_trackers", [LoggerType.TENSORBOARD])
    with pytest.raises(RunError) as error:
        RunFolder(arguments(tmp_path, "tensorboard", name).run, "test")
    assert str(error.value).startswith(f"--report-to {name}")
    assert message in str(error.value)
    assert list(tmp_path.iterdir()) == []
