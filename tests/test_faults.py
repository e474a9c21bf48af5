"""Faults in a run: it ends within seconds, says what happened, leaves no process, and --resume goes on from there.

pytest tests/test_faults.py            a run that is told to end, a full disk, a taken port
pytest tests/test_faults.py -m slow    a worker killed in a sync
pytest tests/test_faults.py -m long    actors and engine cores killed, in each door; a full disk; interrupts
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
import torch
from conftest import ROOT, Script, assert_removed, cpu_only, is_alive
from pair import PLAIN_WORKER

from rlhf_utils import WeightSyncError, stateless_init_process_group
from trainer.run.arguments import RunArguments
from trainer.run.checkpoint import write_checkpoint
from trainer.run.session import RaySession

pytestmark = cpu_only
FAULT_SECONDS = 30
# Script, fault, the run's last line. --resume keeps the options: with one worker, an engine starts sooner.
IN_SYNC = r"engine worker 0 \(pid .*\) died: its connection to the weight sync closed"
NOTICED = "the engine died while (learning|generating|proving|syncing)"  # by the first who waits for it
SEPARATE = "train_grpo.py --topology separate"
TWO_BY_TWO = f"{SEPARATE} --trainers 2 --engines 2 --tensor-parallel-size 1"
ONE_BY_TWO = "--engines 1 --tensor-parallel-size 2"
KILLS = [
    (
        f"{SEPARATE} --trainers 1 {ONE_BY_TWO}",
        "syncing 3 kill VLLM::Worker_TP1",
        IN_SYNC.replace("worker 0", "worker 1"),
    ),
]
OTHERS = [
    (
        f"{SEPARATE} --max-staleness 2 --tensor-parallel-size 1",
        "learning 2 kill VLLM::EngineCore",
        f"{NOTICED}|{IN_SYNC}",
    ),
    (TWO_BY_TWO, "learning 2 kill ray::Trainer 1", "the trainer [01] died while learning"),
    # Ahead of learning, as the run before was, a run need not wait for what is generated.
    (f"{TWO_BY_TWO} --max-staleness 0", "generating 2 kill ray::Engine 1", "the engine [01] died while generating"),
    (
        f"train_grpo.py --topology shared {ONE_BY_TWO}",
        "saving 2 kill ray::Trainer 1",
        "the trainer [01] died while saving",
    ),
    (
        f"{SEPARATE} --trainers 1 --engines 1",
        "syncing 3 fill",
        "the trainer failed while saving: .*No space left on device",
    ),
    (f"{SEPARATE} --max-staleness 2", "learning 2 interrupt", "interrupted"),
    (SEPARATE, "learning 1 group", "interrupted"),
    (
        f"{SEPARATE} --max-staleness 0 --quantization auto --tensor-parallel-size 1",
        "generating 2 kill VLLM::EngineCore",
        "the engine died while generating",
    ),
]
PPO = [
    ("train_ppo.py", "rewarding 2 kill ray::Reward", "the reward_model died while rewarding"),
    ("train_ppo.py", "saving 2 kill ray::Critic", "the critic died while saving"),
]
DISTILL = [
    (
        "train_distill.py --teacher trainer.tasks.tiny_model:build_tiny_base",
        "scoring 2 kill ray::Teacher",
        "the teacher died while scoring",
    )
]


@pytest.fixture
def small_disk(tmp_path):
    """The run folder, on a disk of 64 MiB. Yields whether it is."""
    folder = tmp_path / "run"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder]
    mounted = subprocess.run(mount, check=False, capture_output=True).returncode == 0
    yield mounted
    if mounted:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(KILLS, id="kills", marks=pytest.mark.slow),
        pytest.param(OTHERS, id="others", marks=pytest.mark.long),
        pytest.param(PPO, id="ppo", marks=pytest.mark.long),
        pytest.param(DISTILL, id="distill", marks=pytest.mark.long),
    ],
)
def test_run_ends_at_a_fault_and_goes_on_after_it(script, tmp_path, subtests, small_disk, faults):
    """One run with one fault after the other: each begins where the one before has ended, be it in another topology."""
    run, done = tmp_path / "run", 0
    how = ["--output", "run", "--save-every", 1, "--steps", 10_000]
    how += ["--engine-args", json.dumps({"worker_cls": PLAIN_WORKER})]  # whose syncs replay
    for command, fault, message in faults:
        name, *options = command.split()
        with subtests.test(f"{name} {fault}"):
            if "fill" in fault and not small_disk:
                pytest.skip("filling a disk needs the right to mount a small one")
            (tmp_path / "fault.json").unlink(missing_ok=True)
            process = script("tests/fault.py", fault, ROOT / name, *options, *how, PYTHONPATH=str(ROOT / "tests"))
            how = ["--resume", "run"]
            text = process.finish()
            print(text)
            happened = json.loads((tmp_path / "fault.json").read_text())
            assert time.time() - happened["time"] < FAULT_SECONDS
            process.assert_failed_cleanly(text, happened["family"])
            assert re.search(message, text.splitlines()[-1]), text
            assert_removed(happened["shared"])
            assert "; from now on by replay\n" in text
            (run / "filler").unlink(missing_ok=True)
            before, done = done, int(max(run.glob("checkpoint-*")).name[-6:])
            assert done > before or fault.startswith(("starting", "learning 1"))

    process = script(name, *how, "--steps", done + 2, PYTHONPATH=str(ROOT / "tests"))
    beside = [script(name, *options, "--output", "beside", "--steps", 1)] if faults is OTHERS else []
    process.wait_for("run folder")  # which this run holds from now on
    again = script(name, "--resume", "run").finish(60)
    assert again.splitlines()[-1].startswith("error: another run is using "), again
    for text in [each.finish() for each in (process, *beside)]:
        assert text.splitlines()[-1].startswith("OK: "), text
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, done + 3))


STARTED = """
import signal

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run by nohup
import multiprocessing, ray, time
from multiprocessing import shared_memory
from trainer.run.arguments import RunArguments
from trainer.run.session import RaySession, run_main

@ray.remote
class Engine:
    def start(self):
        multiprocessing.get_context("spawn").Process(target=time.sleep, args=[600]).start()
        self.memory = shared_memory.SharedMemory(create=True, size=1)
        return self.memory.name

def main(args):
    with RaySession(args, print):
        engine = Engine.remote()
        print("Ray has started", ray.get(engine.start.remote()), flush=True)
        time.sleep(600)  # as a reward function does: nobody waits for Ray

run_main(main, RunArguments())
"""


def test_session_ends_its_own_processes_and_no_others():
    """W&B, for one, has a process of its own, which still sends metrics when the session has ended."""
    others = [subprocess.Popen(["sleep", "600"])]
    try:
        with RaySession(RunArguments(), print) as session:
            others.append(subprocess.Popen(["sleep", "600"]))
            processes = [child for process in session.started for child in process.children(recursive=True)]
        assert [process.poll() for process in others] == [None, None]
        assert len(session.started) > 1
        assert [process for process in [*session.started, *processes] if is_alive(process)] == []
    finally:
        for process in others:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("number", "to"),
    [
        (signal.SIGTERM, os.kill),
        pytest.param(signal.SIGHUP, os.killpg, marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, os.killpg, marks=pytest.mark.slow),
    ],
)
def test_signal_ends_a_run_that_waits_for_no_actor(tmp_path, number, to):
    run = Script(tmp_path, sys.executable, "-c", STARTED, PYTHONPATH=str(ROOT))
    run.wait_for("Ray has started")
    family, told, memory = run.descendants(), time.monotonic(), "/dev/shm/" + re.search(r"psm_\w+", run.text())[0]
    assert os.path.exists(memory)
    raylet = next(process for process in family if process.name() == "raylet")
    sleeping = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
    environment = {"RAY_RAYLET_PID": str(raylet.pid)}  # as a worker is if the raylet dies
    orphan = subprocess.Popen(sleeping, env=environment, stdout=subprocess.PIPE)
    orphan.stdout.readline()  # by then, others can read its environment
    to(run.process.pid, number)
    text = run.finish(FAULT_SECONDS)
    run.assert_failed_cleanly(text, family)
    assert orphan.wait(5) == -signal.SIGKILL
    assert text.splitlines()[-1] == "error: interrupted"
    assert time.monotonic() - told < FAULT_SECONDS
    assert_removed({memory})
    assert not [*run.temporary.glob("rlhf-*")]


BEGUN = """
import time
from trainer.run.session import run_main

run_main(lambda seconds: [print("begun \u00e9", flush=True), time.sleep(seconds)], 1)
"""


@pytest.mark.slow
def test_run_goes_on_without_its_terminal(tmp_path):
    run = Script(tmp_path, "nohup", sys.executable, "-c", BEGUN, PYTHONPATH=str(ROOT), PYTHONIOENCODING="ascii")
    run.wait_for("begun")
    run.process.send_signal(signal.SIGHUP)
    assert r"begun \xe9" in run.finish(60)
    assert run.process.returncode == 0


NOTEBOOK = """
import io, sys
from trainer.run.folder import RunFolder
from trainer.run.session import run_main

shown = sys.stdout = io.StringIO()  # a notebook's stream is none of a file, either
run_main(lambda args: RunFolder.say(None, "begun"), None)
sys.exit("begun" not in shown.getvalue())
"""


@pytest.mark.slow
def test_run_needs_no_stdout_of_its_own(tmp_path):
    run = Script(tmp_path, sys.executable, "-c", NOTEBOOK, PYTHONPATH=str(ROOT))
    assert run.finish(60) == ""
    assert run.process.returncode == 0


FULL_RUN = """
import pathlib, sys
from types import SimpleNamespace
import train_grpo
from trainer.run.arguments import RunArguments
from trainer.run.session import run_main
from trainer.run.folder import RunFolder

def main(args):
    row = {name: 1.0 for name in ("reward/mean", "reward/std", "logprobs/mismatch", "time/rollout", "time/train")}
    row |= {"time/sync": 1.0, "sync/transfer": 1.0, "sync/GBps": 1.0}
    with RunFolder(args, "test") as run:
        run.start_metrics(0, train_grpo.Arguments())
        run.rows.append({"step": 1, **row})
        with (run.path / "filler").open("wb", buffering=0) as file:
            try:
                while file.write(bytes(1 << 12)):
                    pass
            except OSError:
                pass
        sys.stderr.write("for the log")
        run.log_metrics(2, row)

run_main(main, RunArguments(output=pathlib.Path("run"), steps=3))
"""


def test_full_disk_is_named_where_the_writer_hides_it(tmp_path, small_disk):
    if not small_disk:
        pytest.skip("filling a disk needs the right to mount a small one")
    with (tmp_path / "run" / "filler").open("wb") as filler:
        filler.write(bytes(63 << 20))  # a MiB is left

    def save(folder):
        torch.save(torch.zeros(1 << 19), folder / "state.pt")

    with pytest.raises(OSError, match="No space left on device"):
        write_checkpoint(tmp_path / "run", 1, save)


@pytest.mark.slow
def test_full_disk_is_named_where_the_driver_writes(tmp_path, small_disk):
    if not small_disk:
        pytest.skip("filling a disk needs the right to mount a small one")
    command = [sys.executable, "-c", FULL_RUN]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stdout == ""
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("error: [Errno 28] No space left on device") and str(tmp_path / "run") in last, ended.stderr


def test_taken_port_is_an_error_that_names_it():
    taken_port = r"no group at [\d.:]+: .*Address already in use"
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(WeightSyncError, match=taken_port):
        stateless_init_process_group("127.0.0.1", taken.getsockname()[1], 0, 2, torch.device("cpu"))


CHILD_OF_AN_ACTOR = """
import multiprocessing, sys, time
from rlhf_utils import end_with_children

child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=[600], daemon=True)
if __name__ == "__main__":
    child.start()
    end_with_children(unless=lambda: "leaving" in sys.argv)
    print(child.pid, flush=True)
    child.join()
    time.sleep(5)
"""


@pytest.mark.slow
@pytest.mark.parametrize("leaving", [False, True])
def test_engines_actor_goes_with_its_processes_unless_it_ended_them(tmp_path, leaving):
    (tmp_path / "main.py").write_text(CHILD_OF_AN_ACTOR)
    actor = Script(tmp_path, sys.executable, "main.py", *["leaving"] * leaving, PYTHONPATH=str(ROOT))
    actor.wait_for("\n")
    psutil.Process(int(actor.text())).kill()
    actor.finish(30)
    assert actor.process.returncode == (0 if leaving else 1)
