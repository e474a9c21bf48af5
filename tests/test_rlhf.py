"""rlhf.py as a user runs it, with the real engine on whatever hardware there is.

pytest tests/test_rlhf.py            the default run, and what is refused before one starts
pytest tests/test_rlhf.py -m slow    a copy of the script, resumed; two ranks; a mixture of experts
pytest tests/test_rlhf.py -m long    addition
"""

import json
import re
import runpy
import shutil
import sys

import psutil
import pytest
from conftest import ROOT, SYNC, Script, arguments_of, assert_removed, copy, cpu_only, metrics_of, shared_memory_of
from learners import build
from pair import CORE_IN_PROCESS

from trainer.errors import RunError
from trainer.run.arguments import RunArguments
from trainer.run.checkpoint import last_checkpoint, write_checkpoint
from trainer.run.session import RaySession
from trainer.tasks.tiny_model import build_tiny_model

pytestmark = cpu_only


def timeless(run):
    """The run's metrics, but for those that depend on time."""
    times = ("time/", "tokens/", "sync/", "memory/")
    return [{name: row[name] for name in row if not name.startswith(times)} for row in metrics_of(run)]


def test_default_run_learns_and_proves_every_sync(script, tmp_path):
    run = script("rlhf.py", "--output", "run")
    run.wait_for("step  1/30")
    shared = shared_memory_of(run.descendants())
    text = run.finish(180)
    assert shared
    assert_removed(shared)
    assert not [path for path in run.temporary.iterdir() if path.is_socket()]
    assert text.splitlines()[-1].startswith("OK: reward "), text
    assert "the trainer's attention: sdpa, whose logits are eager's but for rounding\n" in text
    assert not [line for line in text.splitlines() if "INFO" in line or "pid=" in line], text
    folder = tmp_path / "run"
    metrics = metrics_of(folder)
    assert [row["step"] for row in metrics] == list(range(1, 31))
    assert metrics[0]["reward/mean"] < 0.25
    assert metrics[-1]["reward/mean"] > 0.75
    assert max(row["logprobs/mismatch"] for row in metrics) < 1e-5
    assert {p.name for p in folder.iterdir()} >= {
        "args.json", "run.log", "tensorboard", "checkpoint-000020", "checkpoint-000030",
    }  # fmt: skip
    assert "(EngineCore pid=" in (folder / "run.log").read_text()  # what vLLM says

    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(folder / "checkpoint-000030")
    AutoTokenizer.from_pretrained(folder / "checkpoint-000030")


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    """The folder of a run of six steps, with an engine of one worker."""
    folder = tmp_path_factory.mktemp("short")
    flags = "--steps", "6", "--save-every", "3", "--tensor-parallel-size", "1", "--output", "run"
    text = Script(folder, sys.executable, str(ROOT / "rlhf.py"), *flags).finish()
    assert text.splitlines()[-1].startswith("OK: reward "), text
    return folder / "run"


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
    copied = copy(tmp_path / "project", *SYNC, "trainer", "rlhf.py") / "rlhf.py"
    text = copied.read_text()
    for method in ("return self.learner.learn(", "return self.take_weights("):
        assert text.count(method) == 1
        text = text.replace(method, f"print('printed by {method[7:-1]}')\n        {method}")
    copied.write_text(text)

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
    for what in ("self.learner.learn", "self.take_weights", "the reward"):
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
    text = script("rlhf.py", *flags, **CORE_IN_PROCESS).finish()
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


@pytest.mark.slow
def test_two_ranks_send_a_mixture_of_experts_to_two_workers(script, tmp_path):
    """Its experts' weights are one tensor on each rank, of which every rank has some experts."""
    build("Qwen3Moe", tmp_path / "model")
    flags = "--model", tmp_path / "model", "--trainers", 2, "--steps", 2, "--learning-rate", 1e-3, "--output", "run"
    text = script("rlhf.py", *flags, **CORE_IN_PROCESS).finish()
    assert text.splitlines()[-1].startswith("OK: reward "), text
    assert max(row["logprobs/mismatch"] for row in metrics_of(tmp_path / "run")) < 1e-5


@pytest.mark.long
def test_addition_rises_on_sums_that_no_step_learned_from(script, tmp_path):
    """The beginning of the run: from half of the sums to nine tenths it takes 500 steps."""
    text = script("rlhf.py", "--task", "addition", "--steps", 40, "--output", "run").finish()
    assert text.splitlines()[-1].startswith("OK: reward "), text
    evaluated = [row["eval/reward"] for row in metrics_of(tmp_path / "run") if "eval/reward" in row]
    assert len(evaluated) == 3
    assert 0.3 < evaluated[0] < 0.65
    assert evaluated[-1] > evaluated[0] + 0.1


@pytest.fixture
def placed(monkeypatch):
    """Where rlhf.py places its actors on so many GPUs: the bundles, and the seats of trainers and engines."""
    import rlhf

    def place(gpus, order=(), **arguments):
        reserved = []
        monkeypatch.setattr(rlhf.ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": float(gpus)})
        monkeypatch.setattr(rlhf, "reserve", lambda bundles, strategy: reserved.append((bundles, strategy)))
        monkeypatch.setattr(rlhf, "by_node", lambda _: order or list(range(gpus)))
        _, remark, trainers, engines = rlhf.place(arguments_of(rlhf, **arguments))
        return reserved, remark, trainers, engines

    return place


def bundle_of(seat) -> int:
    return seat.options["scheduling_strategy"].placement_group_bundle_index


def test_every_rank_and_every_worker_has_a_gpu(placed):
    reserved, remark, trainers, engines = placed(8, trainers=3, engines=2, tensor_parallel_size=2)
    assert reserved == [([{"GPU": 1}] * 7, "PACK")]
    assert remark == "1 GPUs stay unused: --trainers and --engines take more"
    assert [bundle_of(seat) for seat in trainers] == [0, 1, 2]
    assert [seat.bundles for seat in engines] == [[3, 4], [5, 6]]
    assert [bundle_of(seat) for seat in engines] == [3, 5]
    assert {seat.options["num_gpus"] for seat in trainers} == {1}
    assert not any("num_gpus" in seat.options for seat in engines)  # its workers have them


def test_workers_of_an_engine_are_on_one_node(placed):
    order = [1, 3, 5, 0, 2, 4]  # Ray has put every other bundle on the other node
    _, _, trainers, engines = placed(6, order, trainers=1, engines=1, tensor_parallel_size=2)
    assert [bundle_of(seat) for seat in trainers] == [1]
    assert [seat.bundles for seat in engines] == [[3, 5]]
    assert [bundle_of(seat) for seat in engines] == [3]


def test_without_gpus_trainers_and_engines_share_a_core_each(placed):
    reserved, remark, trainers, engines = placed(0, trainers=2, engines=4)
    assert reserved == [([{"CPU": 0.5}] * 2 + [{"CPU": 0.25}] * 4, "SPREAD")]
    assert "no GPU" in remark
    assert [bundle_of(seat) for seat in trainers + engines] == [0, 1, 2, 3, 4, 5]
    assert [seat.bundles for seat in engines] == [[2, 3], [4, 5], [6, 7], [8, 9]]  # of cores


def test_too_few_gpus_is_an_error_with_their_number(placed):
    with pytest.raises(RunError, match=r"wants 3 GPUs, 1 .* 2 .*there\s+are 2.*rlhf_colocate\.py"):
        placed(2)
    with pytest.raises(RunError, match=r"wants 6 GPUs, 2 .* 2 .*there\s+are 5"):
        placed(5, trainers=2, engines=2)


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
        (["--group-size", "1"], "error: argument --group-size: Input should be greater than or equal to 2, not 1"),
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
    monkeypatch.setattr(sys, "argv", ["rlhf.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "rlhf.py"), run_name="__main__")
    said = [capsys.readouterr().err, str(ended.value.code)]  # by the parser, or by Python as it exits
    assert ended.value.code
    assert message in "".join(said)
    assert list(tmp_path.iterdir()) == []


def test_model_that_is_missing_ends_the_run_before_actors_start(script):
    run = script("rlhf.py", "--model", "/no/such/model")
    text = run.finish(60)
    run.assert_failed_cleanly(text, [])
    assert "cannot load the model /no/such/model: no such folder" in text.splitlines()[-1]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1"])
def test_ray_that_is_missing_is_named(address):
    session = RaySession(RunArguments(ray_address=address), None)
    with pytest.raises(RunError, match="^cannot reach Ray at " + re.escape(address)), session:
        pass


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


def test_importing_a_script_starts_nothing():
    children = set(psutil.Process().children(recursive=True))
    import rlhf

    assert not rlhf.ray.is_initialized()
    assert set(psutil.Process().children(recursive=True)) == children
