"""rlhf.py as a user runs it, with the real engine on whatever hardware there is.

pytest tests/test_rlhf.py
"""

import json
import random
import time

import psutil
import pytest
from conftest import cpu_only

pytestmark = cpu_only


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_default_run_learns_and_proves_every_sync(script, tmp_path):
    started = time.monotonic()
    text = script("rlhf.py", "--seed", random.randrange(1000), "--output", "run").finish(180)
    assert time.monotonic() - started < 180
    assert text.splitlines()[-1].startswith("OK: reward "), text
    metrics = rows(tmp_path / "run")
    assert [row["step"] for row in metrics] == list(range(1, 31))
    assert metrics[0]["reward/mean"] < 0.25
    assert metrics[-1]["reward/mean"] > 0.75
    assert max(row["logprobs/mismatch"] for row in metrics) < 1e-4
    assert {p.name for p in (tmp_path / "run").iterdir()} >= {
        "args.json", "reward.png", "run.log", "tensorboard", "checkpoint-000020", "checkpoint-000030",
    }  # fmt: skip

    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-000030")
    AutoTokenizer.from_pretrained(tmp_path / "run" / "checkpoint-000030")


def test_resume_continues_as_if_never_interrupted(script, tmp_path):
    whole = script("rlhf.py", "--steps", 4, "--save-every", 2, "--output", "whole").finish(180)
    assert "OK: " in whole, whole
    first = script("rlhf.py", "--steps", 2, "--output", "parts").finish(180)
    assert "OK: " in first, first
    second = script("rlhf.py", "--resume", "parts", "--steps", 4).finish(180)
    assert "OK: " in second, second
    timeless = [
        [{name: value for name, value in row.items() if not name.startswith(("time/", "sync/"))} for row in rows(run)]
        for run in (tmp_path / "whole", tmp_path / "parts")
    ]
    assert timeless[0] == timeless[1]


def test_reward_that_raises(script, tmp_path):
    (tmp_path / "mine.py").write_text("def reward(prompts, completions, **columns):\n    raise ValueError('no luck')\n")
    run = script("rlhf.py", "--reward", "mine:reward")
    while not (family := run.descendants()) or not any("EngineCore" in " ".join(p.cmdline()) for p in family):
        time.sleep(0.5)
    text = run.finish(180)
    run.assert_failed_cleanly(text, family)
    assert text.splitlines()[-1] == "error: the reward reward raised ValueError: no luck (mine.py, line 2)"


def test_too_few_gpus_is_an_error_that_says_how_many_there_are(monkeypatch):
    import argparse

    import rlhf

    monkeypatch.setattr(rlhf.ray, "cluster_resources", lambda: {"GPU": 2.0})
    with pytest.raises(rlhf.RunError, match=r"wants 3 GPUs.*there\s+are 2.*rlhf_colocate\.py"):
        rlhf.place(argparse.Namespace(tensor_parallel_size=2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/no/such/model"], "cannot load the model /no/such/model: no such folder"),
        (["--prompts", "none.jsonl"], "cannot read the prompts file none.jsonl"),
        (["--reward", "nope:reward"], "--reward nope:reward cannot be imported"),
        (["--resume", "nowhere"], "not a run folder"),
        (["--group-size", "1"], "at least 2"),
        (["--ray-address", "127.0.0.1:1"], "cannot reach Ray at 127.0.0.1:1"),
    ],
)
def test_bad_arguments_end_before_anything_starts(script, arguments, message):
    run = script("rlhf.py", *arguments)
    text = run.finish(60)
    run.assert_failed_cleanly(text, [])
    assert message in text.splitlines()[-1]


def test_resume_refuses_another_model(script, tmp_path):
    import torch

    from grpo import GRPOConfig, Learner
    from run_folder import write_checkpoint
    from tiny_model import build_tiny_model

    model = build_tiny_model(tmp_path / "model")
    learner = Learner(str(model), GRPOConfig(group_size=2, max_tokens=4), torch.device("cpu"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "args.json").write_text("{}")
    write_checkpoint(tmp_path / "run", 0, learner.save)
    other = json.loads((model / "config.json").read_text()) | {"hidden_size": 64}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(other))
    run = script("rlhf.py", "--resume", "run", "--model", "other")
    text = run.finish(60)
    run.assert_failed_cleanly(text, [])
    assert "is a checkpoint of another model" in text


def test_importing_a_script_starts_nothing():
    children = set(psutil.Process().children(recursive=True))
    import rlhf

    assert not rlhf.ray.is_initialized()
    assert set(psutil.Process().children(recursive=True)) == children
