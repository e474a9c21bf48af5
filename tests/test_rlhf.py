"""rlhf.py as a user runs it, with the real engine on whatever hardware there is.

pytest tests/test_rlhf.py            the default run, and what is refused before one starts
pytest tests/test_rlhf.py -m slow    a copy of the script, resumed; the addition run
"""

import io
import json
import random
import runpy
import shutil
import sys
import threading
import time

import psutil
import pytest
from conftest import ROOT, Script, cpu_only
from test_extending import SYNC, copy

from recipe.checkpoint import last_checkpoint, write_checkpoint
from recipe.errors import RunError
from recipe.run_folder import Screen
from recipe.tiny_model import build_tiny_model

pytestmark = cpu_only


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def default_run(tmp_path_factory):
    """The folder of a run with the default arguments."""
    folder, started = tmp_path_factory.mktemp("default"), time.monotonic()
    text = Script(
        folder, sys.executable, str(ROOT / "rlhf.py"), "--seed", str(random.randrange(1000)), "--output", "run"
    ).finish(180)
    assert time.monotonic() - started < 180
    assert text.splitlines()[-1].startswith("OK: reward "), text
    assert "the trainer's attention: sdpa, whose logits are eager's but for rounding\n" in text
    return folder / "run"


def test_default_run_learns_and_proves_every_sync(default_run):
    metrics = rows(default_run)
    assert [row["step"] for row in metrics] == list(range(1, 31))
    assert metrics[0]["reward/mean"] < 0.25
    assert metrics[-1]["reward/mean"] > 0.75
    assert max(row["logprobs/mismatch"] for row in metrics) < 1e-5
    assert {p.name for p in default_run.iterdir()} >= {
        "args.json", "reward.png", "run.log", "tensorboard", "checkpoint-000020", "checkpoint-000030",
    }  # fmt: skip

    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(default_run / "checkpoint-000030")
    AutoTokenizer.from_pretrained(default_run / "checkpoint-000030")


REWARD = """
import recipe.uppercase as task
calls = []

def uppercase(completions, **_):
    calls.append(1)
    print('printed by the reward')
    if len(calls) > 10:
        raise ValueError('no luck')
    return task.uppercase(completions)
"""


@pytest.mark.slow
def test_copied_script_resumes_as_if_never_interrupted_until_the_reward_raises(default_run, tmp_path):
    """It runs from another folder than it lies in, and shows what a user prints, not what Ray and vLLM do."""
    copied = copy(tmp_path / "project", *SYNC, "recipe", "rlhf.py") / "rlhf.py"
    text = copied.read_text()
    for method in ("return self.learner.learn(", "return sample(self.llm"):
        assert method in text
        text = text.replace(method, f"print('printed by {method[7:-1]}')\n        {method}")
    copied.write_text(text)

    shutil.copytree(default_run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-000030")  # as if it had been killed before
    (tmp_path / "mine.py").write_text(REWARD)
    run = Script(tmp_path, sys.executable, str(copied), "--resume", "run", "--reward", "mine:uppercase")
    run.wait_for_step(tmp_path / "run", 21)
    family = run.descendants()
    text = run.finish(180)
    run.assert_failed_cleanly(text, family)
    assert text.splitlines()[-1] == "error: the reward uppercase raised ValueError: no luck (mine.py, line 9)"
    for what in ("self.learner.learn", "sample(self.ll", "the reward"):
        assert f"printed by {what}" in text
    assert "INFO" not in text
    timeless = [
        [
            {name: value for name, value in row.items() if not name.startswith(("time/", "tokens/", "sync/"))}
            for row in rows(run)
        ]
        for run in (default_run, tmp_path / "run")
    ]
    assert timeless[0] == timeless[1]


@pytest.mark.slow
def test_addition_rises_on_sums_that_no_step_learned_from(script, tmp_path):
    """The beginning of the run: from half of the sums to nine tenths it takes 500 steps."""
    text = script("rlhf.py", "--task", "addition", "--steps", 40, "--output", "run").finish(300)
    assert text.splitlines()[-1].startswith("OK: reward "), text
    evaluated = [row["eval/reward"] for row in rows(tmp_path / "run") if "eval/reward" in row]
    assert len(evaluated) == 3
    assert 0.3 < evaluated[0] < 0.65
    assert evaluated[-1] > evaluated[0] + 0.1


def test_too_few_gpus_is_an_error_that_says_how_many_there_are(monkeypatch):
    import rlhf

    monkeypatch.setattr(rlhf.ray, "cluster_resources", lambda: {"GPU": 2.0})
    with pytest.raises(rlhf.RunError, match=r"wants 3 GPUs.*there\s+are 2.*rlhf_colocate\.py"):
        rlhf.place(rlhf.Arguments())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "none.jsonl"], "error: cannot read none.jsonl: [Errno 2] No such file"),
        (["--reward", "nope:reward"], "error: --reward nope:reward cannot be imported"),
        (["--reward", "json:loads"], "error: --reward json:loads cannot be called as loads(prompts, completions, "),
        (["--resume", "nowhere"], "error: --resume nowhere: not a run folder"),
        (["--resume", "here", "--output", "there"], "error: --resume continues in that run's folder"),
        (["--group-size", "1"], "error: argument --group-size: Input should be greater than or equal to 2, not 1"),
        (
            ["--gpu-memory-utilization", "80"],
            "error: argument --gpu-memory-utilization: Input should be less than or equal to 1",
        ),
    ],
)
def test_bad_arguments_end_before_anything_starts(monkeypatch, tmp_path, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["rlhf.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "rlhf.py"), run_name="__main__")
    said = [capsys.readouterr().err, str(ended.value.code)]  # by the parser, or by Python as it exits
    assert ended.value.code
    assert message in "".join(said)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/no/such/model"], "cannot load the model /no/such/model: no such folder"),
        (["--ray-address", "127.0.0.1:1"], "cannot reach Ray at 127.0.0.1:1"),
    ],
)
def test_what_is_not_there_ends_the_run_before_an_actor_starts(script, arguments, message):
    run = script("rlhf.py", *arguments)
    text = run.finish(60)
    run.assert_failed_cleanly(text, [])
    assert message in text.splitlines()[-1]


def test_resume_refuses_another_model(tmp_path):
    model = build_tiny_model(tmp_path / "model")
    other = json.loads((model / "config.json").read_text()) | {"hidden_size": 64}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(other))
    (tmp_path / "run").mkdir()
    write_checkpoint(tmp_path / "run", 7, lambda folder: shutil.copytree(model, folder, dirs_exist_ok=True))
    assert last_checkpoint(tmp_path / "run", str(model)).name == "checkpoint-000007"
    with pytest.raises(RunError, match="checkpoint-000007 is a checkpoint of another model"):
        last_checkpoint(tmp_path / "run", str(tmp_path / "other"))


def test_what_ray_says_of_its_own_goes_to_the_log():
    said, log = [], io.StringIO()
    screen = Screen(said.append, log)
    # As threads of Ray do it: one passes on what actors print, the other that an actor has ended, also after the OK.
    for thread, text in (
        ("ray_print_logs", "(Trainer pid=7) printed\n"),
        ("ray_print_logs", "(Engine pid=8) (EngineCore pid=9) vLLM\n"),
        ("ray_listen_error_messages", "(raylet) A worker died\n"),
        ("reward", "also printed\n"),
    ):
        writer = threading.Thread(target=screen.write, args=[text], name=thread)
        writer.start()
        writer.join()
    assert said == ["(Trainer pid=7) printed", "also printed"]
    assert log.getvalue() == "(Engine pid=8) (EngineCore pid=9) vLLM\n(raylet) A worker died\n"


def test_importing_a_script_starts_nothing():
    children = set(psutil.Process().children(recursive=True))
    import rlhf

    assert not rlhf.ray.is_initialized()
    assert set(psutil.Process().children(recursive=True)) == children
