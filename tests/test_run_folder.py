"""A run's folder: metrics, completions, the log and what is printed.

pytest tests/test_run_folder.py
"""

import json
import sys

import pytest
from conftest import arguments_of

import train_grpo
from trainer.errors import RunError
from trainer.flags import with_values
from trainer.learning.rollout import Rollout
from trainer.run.arguments import RunArguments
from trainer.run.checkpoint import write_checkpoint
from trainer.run.folder import RunFolder
from trainer.tasks.dataset import Row
from trainer.tasks.rewards import Batch, Group


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


@pytest.mark.parametrize(("every", "steps"), [(4, [4, 8, 10]), (1, list(range(1, 11))), (0, [])])
def test_checkpoints_are_written_as_often_as_asked(tmp_path, monkeypatch, every, steps):
    with RunFolder(RunArguments(save_every=every, steps=10, output=tmp_path / "run"), "test") as run:
        assert [step for step in range(1, 11) if run.saves(step)] == steps
        run.rows = [{"step": 1, "reward/mean": 0.5, "reward/std": 0.1, "logprobs/mismatch": 1e-7, "time/sync": 0.02}]
        batch = Batch([Group(Row("a", {}, "row 0"), [Rollout([1], [2], [0.0], 1.0)])])
        assert run.summary(batch, 0.0).startswith("OK: reward 0.500 -> 1.000")
