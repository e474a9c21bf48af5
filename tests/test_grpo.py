"""train_grpo.py as a user runs it, with the real engine on whatever hardware there is.

pytest tests/test_grpo.py            the default run, and what is refused before one starts
pytest tests/test_grpo.py -m slow    a copy of the script, resumed; two ranks
pytest tests/test_grpo.py -m long    on separate devices; two engines on a device; experts; addition
"""

import json
import multiprocessing
import re
import runpy
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import psutil
import pytest
import ray
from conftest import (
    ROOT,
    SYNC,
    Script,
    assert_removed,
    copy,
    cpu_only,
    metrics_of,
    settings_of,
    shared_memory_of,
    spans_of,
    timeless,
    timeline_of,
)
from learners import build

import trainer
from trainer.errors import RunError
from trainer.run.arguments import RunArguments
from trainer.run.session import RaySession

pytestmark = cpu_only


def test_default_run_learns_and_proves_every_sync(script, tmp_path):
    run = script("train_grpo.py", "--output", "run", "--timeline")
    run.wait_for("step  1/30")
    shared = shared_memory_of(run.descendants())
    text = run.finish(180)
    assert shared
    assert_removed(shared)
    assert not [path for path in run.temporary.iterdir() if path.is_socket()]
    assert text.splitlines()[-1].startswith("OK: reward "), text
    assert "--topology shared\nno GPU: all on CPU" in text
    assert "the trainer's attention: sdpa, whose logits are eager's but for rounding\n" in text
    assert re.search(r"^first sync: \d+ tensors, .* GB, bit for bit what the engines had loaded", text, re.M)
    assert neighbours_in(text) == [["cpu:0", "0", "0", "0"]]
    assert not [line for line in text.splitlines() if "INFO" in line or "pid=" in line], text
    folder = tmp_path / "run"
    metrics = metrics_of(folder)
    assert [row["step"] for row in metrics] == list(range(1, 31))
    assert metrics[0]["reward/mean"] < 0.25
    assert metrics[-1]["reward/mean"] > 0.75
    assert max(row["logprobs/mismatch"] for row in metrics) < 1e-5
    assert all(row[f"time/{part}"] > 0 for row in metrics for part in ("rollout", "train", "sync"))
    for row in metrics:  # what passes takes no longer than what is timed from outside
        assert row["perf/train_tokens_per_second"] * row["time/train"] > 8 * 8 * row["completions/mean_length"]
        assert row["perf/generation_tokens_per_second"] * row["time/rollout"] > 8 * 8 * row["completions/mean_length"]
    assert "perf/mfu" not in metrics[0]  # a CPU's peak is unknown
    assert {p.name for p in folder.iterdir()} >= {
        "args.json", "run.log", "tensorboard", "checkpoint-000020", "checkpoint-000030",
    }  # fmt: skip
    assert "(EngineCore pid=" in (folder / "run.log").read_text()  # what vLLM says

    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(folder / "checkpoint-000030")
    AutoTokenizer.from_pretrained(folder / "checkpoint-000030")

    spans = timeline_of(folder)
    steps, learning = spans_of(spans, "driver", "step "), spans_of(spans, "trainer", "learn")
    assert len(steps) == len(learning) == 30
    assert len(spans_of(spans, "engine", "prepare")) == 1
    assert all(begin < learns < learned < end for (begin, end), (learns, learned) in zip(steps, learning, strict=True))
    for begin, end in spans_of(spans, "engine: prompts"):  # on-policy
        assert not [1 for learns, learned in learning if learns < end and begin < learned]


def neighbours_in(text):
    """The printed table: device, trainer rank, engine, its worker."""
    table = text[text.index("trainer  engine  worker") :].splitlines()
    return [line.split() for line in table if line.startswith("cpu:")]


@pytest.mark.long
def test_run_on_separate_devices_learns_and_proves_every_sync(script, tmp_path):
    flags = "--topology separate --offload-optimizer --steps 12 --learning-rate 1e-2 --output run"
    text = script("train_grpo.py", *flags.split()).finish()
    assert text.splitlines()[-1].startswith("OK: reward "), text
    assert "no GPU: the trainer and a TP=2 engine run on CPU" in text
    assert re.search(r"^first sync: \d+ tensors, .* GB, bit for bit what the engines had loaded", text, re.M)
    metrics = metrics_of(tmp_path / "run")
    assert [row["step"] for row in metrics] == list(range(1, 13))
    assert metrics[0]["reward/mean"] < 0.25
    assert metrics[-1]["reward/mean"] > 0.75
    assert max(row["logprobs/mismatch"] for row in metrics) < 1e-5


@pytest.mark.long
def test_two_engines_on_a_device_serve_the_trainers_weights(script, tmp_path):
    flags = *settings_of(tmp_path, engines_per_gpu=2), "--steps", 3, "--save-every", 0, "--output", "run"
    text = script("train_grpo.py", *flags).finish()
    assert text.splitlines()[-1].startswith("OK: reward "), text
    assert neighbours_in(text) == [["cpu:0", "0", "0", "0"], ["cpu:0", "0", "1", "0"]]
    assert re.search(r"^first sync: .* bit for bit what the engines had loaded", text, re.M)
    metrics = metrics_of(tmp_path / "run")
    assert len(metrics) == 3
    assert max(row["logprobs/mismatch"] for row in metrics) < 1e-5


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    """The folder of a run of six steps, with an engine of one worker."""
    folder = tmp_path_factory.mktemp("short")
    flags = "--topology separate --steps 6 --save-every 3 --tensor-parallel-size 1 --output run"
    text = Script(folder, sys.executable, str(ROOT / "train_grpo.py"), *flags.split()).finish()
    assert text.splitlines()[-1].startswith("OK: reward "), text
    return folder / "run"


# Lines of the trainer's actor and of the engine's, in each step.
LEARNS = "metrics = self.learner.learn(rollouts, proof_rollouts)"
RECEIVES = "served = all(answers)"
REWARD = """
import mmap, subprocess, sys
import trainer.tasks.uppercase as task

def open_shared_memory(path):
    with open(path, 'r+b') as file:
        return mmap.mmap(file.fileno(), 0)

shared, calls = [], []

def uppercase(completions, **_):
    if not calls:
        shared.append(open_shared_memory(PATH))
        code = 'import time, mine; shared = mine.open_shared_memory(mine.PATH); time.sleep(3600)'
        shared.append(subprocess.Popen([sys.executable, '-c', code]))
    calls.append(1)
    print('printed by the reward')
    if len(calls) > 3 * 8:
        raise ValueError('no luck')
    return task.uppercase(completions)
"""


@pytest.mark.slow
def test_copied_script_resumes_as_if_never_interrupted(short_run, tmp_path, shared_memory_file):
    """It runs from another folder than it lies in, and shows what a user prints, not what Ray and vLLM do."""
    copied = copy(tmp_path / "project", *SYNC, "trainer", "train_grpo.py") / "train_grpo.py"
    for module, line in (("topologies/link.py", LEARNS), ("rollouts/engine.py", RECEIVES)):
        text = (copied.parent / "trainer" / module).read_text()
        assert text.count(line) == 1
        text = text.replace(line, f"print('printed by {module}')\n        {line}")
        (copied.parent / "trainer" / module).write_text(text)

    shutil.copytree(short_run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-000006")  # as if it had been killed before
    (tmp_path / "mine.py").write_text(f"PATH = {str(shared_memory_file)!r}{REWARD}")
    run = Script(tmp_path, sys.executable, str(copied), "--resume", "run", "--reward", "mine:uppercase")
    run.wait_for_step(tmp_path / "run", 4)
    family = run.descendants()
    text = run.finish()
    run.assert_failed_cleanly(text, family)
    assert text.splitlines()[-1] == "error: the reward uppercase raised ValueError: no luck (mine.py, line 19)"
    assert "not as in that run: --reward ['mine:uppercase']" in text
    assert_shows_only_what_a_user_prints(text)
    assert timeless(short_run) == timeless(tmp_path / "run")
    assert shared_memory_file.read_bytes() == b"of another program"


def assert_shows_only_what_a_user_prints(text):
    for what in ("topologies/link.py", "rollouts/engine.py", "the reward"):
        assert f"printed by {what}" in text
    actors = [line for line in text.splitlines() if "pid=" in line and "ray::" not in line]  # but for a traceback
    # Ray's workers write a text and its newline apart. When Ray reads in between, it passes an empty line on.
    strangers = [line for line in actors if "printed by" not in line and not line.endswith(")\x1b[0m ")]
    assert strangers == []
    assert "INFO" not in text


@pytest.mark.slow
def test_two_ranks_feed_two_engines_what_one_and_one_had(short_run, script, tmp_path):
    """As many prompts for each, the same samples, and the same updates but for rounding."""
    flags = "--trainers", 2, "--engines", 2, "--tensor-parallel-size", 1, "--steps", 3, "--output", "run"
    text = script("train_grpo.py", *flags).finish()
    assert text.splitlines()[-1].startswith("OK: reward "), text
    assert not [line for line in text.splitlines() if "pid=" in line], text
    texts = [
        [json.loads(line)["text"] for line in (run / "completions.jsonl").read_text().splitlines()]
        for run in (short_run, tmp_path / "run")
    ]
    assert texts[0][:64] == texts[1][:64]
    for before, now in zip(timeless(short_run)[:3], timeless(tmp_path / "run"), strict=True):
        assert now["logprobs/mismatch"] < 1e-5
        assert now["grad_norm"] == pytest.approx(before["grad_norm"], rel=0.05)
        assert now["reward/mean"] == pytest.approx(before["reward/mean"], abs=0.05)


@pytest.mark.long
def test_two_ranks_send_a_mixture_of_experts_to_two_workers(script, tmp_path):
    """Its experts' weights are one tensor on each rank, of which every rank has some experts."""
    build("Qwen3Moe", tmp_path / "model")
    flags = "--model", tmp_path / "model", "--trainers", 2, "--steps", 2, "--learning-rate", 1e-3, "--output", "run"
    text = script("train_grpo.py", *flags).finish()
    assert text.splitlines()[-1].startswith("OK: reward "), text
    assert max(row["logprobs/mismatch"] for row in metrics_of(tmp_path / "run")) < 1e-5


@pytest.mark.long
def test_addition_rises_on_sums_that_no_step_learned_from(script, tmp_path):
    """The beginning of the run: from half of the sums to nine tenths it takes 500 steps."""
    text = script("train_grpo.py", "--task", "addition", "--steps", 40, "--output", "run").finish()
    assert text.splitlines()[-1].startswith("OK: reward "), text
    evaluated = [row["eval/reward"] for row in metrics_of(tmp_path / "run") if "eval/reward" in row]
    assert len(evaluated) == 3
    assert 0.3 < evaluated[0] < 0.65
    assert evaluated[-1] > evaluated[0] + 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--prompts", "none.jsonl", "--reward", "x:y"],
            "error: cannot load the dataset none.jsonl: FileNotFoundError",
        ),
        (["--reward", "nope:reward"], "error: --reward nope:reward cannot be imported"),
        (["--reward", "json:loads"], "error: --reward json:loads cannot be called as loads(prompts, completions, "),
        (["--resume", "nowhere"], "error: --resume nowhere: not a run folder"),
        (["--group-size", "1"], "error: --group-size is at least 2 in GRPO"),
        (
            ["--gpu-memory-utilization", "80"],
            "error: argument --gpu-memory-utilization: Input should be less than or equal to 1",
        ),
        (["--save-every", "1.5"], "error: argument --save-every: Input should be a valid integer"),
        (["--timeout", "0"], "error: argument --timeout: Input should be greater than 0, not 0"),
        (["--report-to", "nobody"], "error: --report-to nobody is none of none, "),
    ],
)
def test_bad_arguments_end_before_anything_starts(monkeypatch, tmp_path, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_grpo.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "train_grpo.py"), run_name="__main__")
    said = [capsys.readouterr().err, str(ended.value.code)]  # by the parser, or by Python as it exits
    assert ended.value.code
    assert message in "".join(said)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_model_that_is_missing_ends_the_run_before_actors_start(script):
    run = script("train_grpo.py", "--model", "/no/such/model")
    text = run.finish(60)
    run.assert_failed_cleanly(text, [])
    assert "cannot load the model /no/such/model: no such folder" in text.splitlines()[-1]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1"])
def test_ray_that_is_missing_is_named(address):
    session = RaySession(RunArguments(ray_address=address), None)
    with pytest.raises(RunError, match="^cannot reach Ray at " + re.escape(address)), session:
        pass


@pytest.mark.slow
def test_trainer_of_the_user_in_the_working_folder_does_not_win(tmp_path, monkeypatch):
    def trainers():
        """What an actor imports, and its processes."""
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            of_process = pool.submit(eval, "__import__('trainer').__file__").result()
        return trainer.__file__, of_process

    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__init__.py").write_text("raise ImportError('of the user')")
    monkeypatch.chdir(tmp_path)
    with RaySession(RunArguments(), lambda *_: None):
        found = ray.get(ray.remote(trainers).remote(), timeout=120)
    assert {*found} == {str(ROOT / "trainer" / "__init__.py")}
    assert subprocess.check_output([sys.executable, ROOT / "train_grpo.py", "--help"]).startswith(b"usage: ")


def test_importing_a_script_starts_nothing():
    children = set(psutil.Process().children(recursive=True))
    import train_grpo

    assert train_grpo.Arguments and not ray.is_initialized()
    assert set(psutil.Process().children(recursive=True)) == children
