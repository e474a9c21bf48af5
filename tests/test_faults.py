"""Faults in a run: it ends within seconds, says what happened, leaves nothing behind, and --resume goes on from there.

pytest tests/test_faults.py            one fault of each kind, each script killed once
pytest tests/test_faults.py -m slow    every process killed in every phase, in each script (10 minutes a script)
"""

import argparse
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time

import psutil
import pytest
import ray
import torch
from conftest import ROOT, cpu_only

from ray_session import RaySession
from rlhf_utils import WeightSyncError, stateless_init_process_group
from run_folder import RunError, RunFolder

pytestmark = cpu_only
FAULT_SECONDS = 30
FAULTS = [  # --resume keeps the options, so that all but the first have one worker, which starts sooner
    ("rlhf.py", "syncing 3 kill VLLM::Worker_TP1", r"engine worker 1 \(pid .*\) died: its connection to the"),
    ("rlhf_online_quant.py --tensor-parallel-size 1", "generating 2 kill VLLM::EngineCore", "died while generating"),
    ("rlhf_colocate.py --engines 1", "saving 2 kill ray::Trainer", "the trainer0 died while saving"),
    ("rlhf_nccl.py", "learning 2 kill raylet/raylet", "Ray's raylet died while learning"),
    ("rlhf.py", "syncing 3 fill", "the trainer failed while saving: .*No space left on device"),
    ("rlhf.py", "starting 1 interrupt VLLM::Worker", "interrupted"),
]
TAKEN = r"no group at [\d.:]+: .*Address already in use"
SCRIPTS = ["rlhf.py", "rlhf_colocate.py", "rlhf_nccl.py", "rlhf_online_quant.py"]
VICTIMS = {"VLLM::Worker": "engine", "VLLM::EngineCore": "engine", "ray::Trainer": "trainer", "raylet/raylet": "raylet"}
PHASES = ("generating 4", "learning 2", "syncing 3", "saving 2", "starting 1")
# When a death is noticed, if that is not at once: by the first who waits for that side.
NOTICED = {
    ("engine", "learning"): "learning|syncing",
    ("engine", "saving"): "saving|generating",
    ("trainer", "generating"): "generating|learning",
    ("trainer", "starting"): "starting|loading",
}
OTHERS = [
    ("rlhf.py", "learning 2 interrupt", "interrupted"),
    ("rlhf.py", "syncing 3 terminate", "interrupted"),
    ("rlhf.py", "connecting 1 take", TAKEN),
]
IN_SYNC = r"died: its connection to the weight sync closed|the engine died: one of vLLM's processes ended"


def every_kill(script: str) -> list[tuple[str, str, str]]:
    faults = []
    for (victim, side), at in itertools.product(VICTIMS.items(), PHASES):
        phase, _ = at.split()
        noticed = NOTICED.get((side, phase), phase)
        message = rf"{side}\d? (died|failed) while ({noticed})" + (f"|{IN_SYNC}" if "syncing" in noticed else "")
        faults.append((script, f"{at} kill {victim}", message))
    return faults


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
        pytest.param(FAULTS, id="one-of-each"),
        pytest.param(OTHERS, id="others", marks=pytest.mark.slow),
        *(pytest.param(every_kill(name), id=f"{name}-every-kill", marks=pytest.mark.slow) for name in SCRIPTS),
    ],
)
def test_run_ends_at_a_fault_and_goes_on_after_it(script, tmp_path, subtests, small_disk, faults):
    """One run with one fault after the other: each begins where the one before has ended, be it another script's."""
    run, done = tmp_path / "run", 0
    how = ["--output", "run", "--save-every", 1, "--steps", 10_000]
    for command, fault, message in faults:
        name, *options = command.split()
        with subtests.test(f"{name} {fault}"):
            if "fill" in fault and not small_disk:
                pytest.skip("filling a disk needs the right to mount a small one")
            (tmp_path / "fault.json").unlink(missing_ok=True)
            process = script("tests/fault.py", fault, ROOT / name, *options, *how)
            how = ["--resume", "run"]
            text = process.finish(180)
            print(text)
            happened = json.loads((tmp_path / "fault.json").read_text())
            assert time.time() - happened["time"] < FAULT_SECONDS
            process.assert_failed_cleanly(text, [psutil.Process(p) for p in happened["family"] if psutil.pid_exists(p)])
            assert re.search(message, text.splitlines()[-1]), text
            (run / "filler").unlink(missing_ok=True)
            before, done = done, int(max(run.glob("checkpoint-*")).name[-6:])
            assert done > before or fault.startswith(("starting", "connecting"))

    process = script(name, *how, "--steps", done + 2)
    beside = script(name, "--output", "beside", "--tensor-parallel-size", 1, "--steps", 1)
    process.wait_for("run folder")  # which this run holds from now on
    again = script(name, "--resume", "run").finish(60)
    assert again.splitlines()[-1].startswith("error: another run is using "), again
    for text in (process.finish(180), beside.finish(180)):
        assert text.splitlines()[-1].startswith("OK: "), text
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, done + 3))


def test_taken_port_is_an_error_that_names_it():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(WeightSyncError, match=TAKEN):
        stateless_init_process_group("127.0.0.1", taken.getsockname()[1], 0, 2, torch.device("cpu"))


def test_death_of_an_actor_that_has_answered_or_was_not_asked_ends_the_wait(tmp_path):
    class Sleeper:
        def sleep(self, seconds: float) -> int:
            time.sleep(seconds)
            return os.getpid()

        def answer_and_die(self) -> None:
            threading.Timer(1, os.abort).start()

    args = argparse.Namespace(resume=None, output=tmp_path / "run", verbose=False)
    with RunFolder(args, "test") as run, RaySession(run, None) as session:
        session.actors = {name: ray.remote(Sleeper).remote() for name in ("trainer", "engine")}
        trainer, engine = session.actors.values()
        (pid,) = session.wait("generating", engine=engine.sleep.remote(3))
        psutil.Process(pid).kill()
        with pytest.raises(RunError, match="the engine died while learning"):
            session.wait("learning", trainer=trainer.sleep.remote(60))

        session.pings.clear()
        session.actors["engine"] = engine = ray.remote(Sleeper).remote()
        started = time.monotonic()
        with pytest.raises(RunError, match="the engine died while starting"):
            session.wait("starting", engine=engine.answer_and_die.remote(), trainer=trainer.sleep.remote(60))
        assert time.monotonic() - started < FAULT_SECONDS


OF_AN_ENGINE = """
import mmap, sys, time

with open(sys.argv[1], "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 0)
print(flush=True)
time.sleep(600)
"""
ACTOR = """
import subprocess, sys, time
from ray_session import die_with_children

child = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], stdout=subprocess.PIPE)
child.stdout.readline()
die_with_children()
print(child.pid, flush=True)
time.sleep(600)
"""


def test_shared_memory_of_an_engine_goes_with_it_when_its_actor_is_killed():
    with tempfile.NamedTemporaryFile(dir="/dev/shm", delete=False) as file:
        file.write(bytes(4096))
    command = [sys.executable, "-c", ACTOR, OF_AN_ENGINE, file.name]
    actor = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    engine = psutil.Process(int(actor.stdout.readline()))
    actor.kill()
    actor.wait()
    time.sleep(2)
    assert os.path.exists(file.name)  # the engine may still be using it
    engine.kill()
    deadline = time.monotonic() + 10
    while os.path.exists(file.name):
        assert time.monotonic() < deadline
        time.sleep(0.1)
