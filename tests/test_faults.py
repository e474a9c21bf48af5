"""Faults in a run: it ends within seconds, says what happened, leaves nothing behind, and --resume goes on from there.

pytest tests/test_faults.py            faults without an engine
pytest tests/test_faults.py -m slow    a worker and a trainer killed, each in another script; others
pytest tests/test_faults.py -m long    the rest; an eighth of all kills of each process in each phase of each script,
                                       KILLS=0 to 7 says which; any process killed at random moments, RANDOM_KILLS=20
                                       times if you like, with another FAULT_SEED
"""

import itertools
import json
import os
import random
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
from conftest import ROOT, Script, cpu_only, title_of
from pair import CORE_IN_PROCESS

from recipe import ray_session
from recipe.arguments import RunArguments
from recipe.checkpoint import write_checkpoint
from recipe.errors import RunError
from recipe.leftovers import is_alive
from recipe.ray_session import RAY, RaySession
from recipe.run_folder import RunFolder
from rlhf_utils import WeightSyncError, stateless_init_process_group

pytestmark = cpu_only
FAULT_SECONDS = 30
FAULTS = [
    ("rlhf_colocate.py --engines 1", "saving 2 kill ray::Trainer", "the trainer0 died while saving"),
    ("rlhf.py", "syncing 3 kill VLLM::Worker_TP1", r"engine worker 1 \(pid .*\) died: its connection to the"),
]
TAKEN = r"no group at [\d.:]+: .*Address already in use"
SCRIPTS = [
    "rlhf.py",
    "rlhf_colocate.py",
    "rlhf_nccl.py",
    "rlhf_online_quant.py",
    "rlhf_async.py",
]  # PPO has those of rlhf_ppo.py
VICTIMS = {"VLLM::Worker": "engine", "VLLM::EngineCore": "engine", "ray::Trainer": "trainer", "raylet/raylet": "raylet"}
KILLS = int(os.environ.get("KILLS", "0"))  # which eighth of all kills in all phases
RANDOM_KILLS, FAULT_SEED = int(os.environ.get("RANDOM_KILLS", "2")), int(os.environ.get("FAULT_SEED", "7"))
PHASES = ("generating 4", "learning 2", "syncing 3", "saving 2", "starting 1")
# When a death is noticed, if that is not at once: by the first who waits for that side.
NOTICED = {
    ("engine", "learning"): "learning|syncing",
    ("engine", "saving"): "saving|generating",
    ("trainer", "generating"): "generating|learning",
    ("trainer", "starting"): "starting|loading",
}
OTHERS = [  # --resume keeps the options: all have one worker, which starts sooner
    (
        "rlhf_online_quant.py --tensor-parallel-size 1 --warmup-steps 1",
        "generating 2 kill VLLM::EngineCore",
        "died while generating",
    ),
    ("rlhf.py", "syncing 3 fill", "the trainer failed while saving: .*No space left on device"),
    ("rlhf_async.py", "learning 2 interrupt", "interrupted"),
    ("rlhf.py", "syncing 3 terminate", "interrupted"),
]
MORE = [
    ("rlhf_nccl.py --tensor-parallel-size 1", "learning 2 kill raylet/raylet", "Ray's raylet died while learning"),
    ("rlhf.py", "starting 1 interrupt VLLM::Worker", "interrupted"),
    ("rlhf.py", "connecting 1 take", TAKEN),
]
PPO = [("rlhf_ppo.py", "rewarding 2 kill ray::RewardModel", "the reward_model0 died while rewarding")]
MORE_PPO = [
    ("rlhf_ppo.py", "scoring 2 kill ray::Reference", "the reference0 died while scoring"),
    ("rlhf_ppo.py", "saving 2 kill ray::Critic", "the critic0 died while saving"),
]
IN_SYNC = r"died: its connection to the weight sync closed|the engine died: one of vLLM's processes ended"


def kills(script: str) -> list[tuple[str, str, str]]:
    """This script's part of an eighth of all kills of each victim in each phase."""
    faults = []
    for (i, at), (j, (victim, side)) in itertools.product(enumerate(PHASES), enumerate(VICTIMS.items())):
        if (i + j + 2 * SCRIPTS.index(script) + KILLS) % 8:
            continue
        phase, _ = at.split()
        noticed = NOTICED.get((side, phase), phase)
        if script == "rlhf_async.py" and phase != "starting":  # where everything goes on at the same time
            noticed = "generating|proving|learning|syncing|saving"
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
        pytest.param(FAULTS, id="killed", marks=pytest.mark.slow),
        pytest.param(OTHERS, id="others", marks=pytest.mark.slow),
        pytest.param(PPO, id="ppo", marks=pytest.mark.slow),
        pytest.param(MORE, id="more", marks=pytest.mark.long),
        pytest.param(MORE_PPO, id="more-ppo", marks=pytest.mark.long),
        pytest.param(list(itertools.chain(*map(kills, SCRIPTS))), id=f"kills-{KILLS}", marks=pytest.mark.long),
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

    process = script(name, *how, "--steps", done + 2, **CORE_IN_PROCESS)
    beside = [script(name, "--output", "beside", "--steps", 1, **CORE_IN_PROCESS)] if faults is OTHERS else []
    process.wait_for("run folder")  # which this run holds from now on
    again = script(name, "--resume", "run").finish(60)
    assert again.splitlines()[-1].startswith("error: another run is using "), again
    for text in [each.finish(180) for each in (process, *beside)]:
        assert text.splitlines()[-1].startswith("OK: "), text
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, done + 3))


FULL_RUN = """
import pathlib, sys
from recipe.arguments import RunArguments
from recipe.ray_session import run_main
from recipe.run_folder import RunFolder

def main(args):
    row = {name: 1.0 for name in ("reward/mean", "reward/std", "logprobs/mismatch", "time/rollout", "time/train")}
    row |= {"time/sync": 1.0, "sync/transfer": 1.0, "sync/GBps": 1.0}
    with RunFolder(args, "test") as run:
        run.start_metrics(0)
        run.rows.append({"step": 1, **row})
        with (run.path / "filler").open("wb", buffering=0) as file:
            try:
                while file.write(bytes(1 << 12)):
                    pass
            except OSError:
                pass
        sys.__stdout__.write("for the log")
        run.draw() if sys.argv[1] == "draw" else run.log_metrics(2, row)

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


@pytest.mark.parametrize("write", ["log_metrics", "draw"])
def test_full_disk_is_named_where_the_driver_writes(tmp_path, small_disk, write):
    if not small_disk:
        pytest.skip("filling a disk needs the right to mount a small one")
    command = [sys.executable, "-c", FULL_RUN, write]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.splitlines()[-1].startswith("error: [Errno 28] No space left on device"), ended.stderr


def test_taken_port_is_an_error_that_names_it():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(WeightSyncError, match=TAKEN):
        stateless_init_process_group("127.0.0.1", taken.getsockname()[1], 0, 2, torch.device("cpu"))


@pytest.mark.slow
def test_death_of_an_actor_that_has_answered_or_was_not_asked_ends_the_wait(tmp_path):
    class Sleeper:
        def sleep(self, seconds: float) -> int:
            time.sleep(seconds)
            return os.getpid()

        def answer_and_die(self) -> None:
            threading.Timer(1, os.abort).start()

    args = RunArguments(output=tmp_path / "run")
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


ENGINE_LOG = b"""\
(EngineCore pid=2) ERROR 11-22 06:39:21 [dump_input.py:72] Dumping input data for V1 LLM engine with config: ...
(EngineCore pid=2) ERROR 11-22 06:39:21 [core.py:1512] EngineCore encountered a fatal error.
(EngineCore pid=2) ERROR 11-22 06:39:21 [core.py:1512]     raise RuntimeError(
(EngineCore pid=2) ERROR 11-22 06:39:21 [core.py:1512] RuntimeError: Worker failed with error 'Unsupported \
CPU attention configuration: head_dim=16', please check the stack trace above for the root cause
"""


def test_what_a_worker_raised_is_the_one_line_that_is_said(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(ray_session.ray, "wait", lambda refs, **_: (refs, []))
    monkeypatch.setattr(ray_session, "_error_of", lambda _: RuntimeError("vllm.v1.engine.exceptions.EngineDeadError"))
    args = RunArguments(output=tmp_path / "run")
    for log, message in (
        (b"", "the engine died while generating: one of vLLM's processes ended"),
        (ENGINE_LOG.splitlines(keepends=True)[0], "the engine died while generating: one of vLLM's processes ended"),
        (ENGINE_LOG, "the engine failed while generating: Unsupported CPU attention configuration: head_dim=16"),
    ):
        with RunFolder(args, "test") as run:
            os.write(1, log)
            assert str(RaySession(run, None)._blame("generating", {"engine": "ref"})) == message
    assert capfd.readouterr().out == ""


def test_what_is_wrong_with_an_argument_is_said_as_it_is_also_by_an_actor_that_begins(tmp_path, monkeypatch):
    quoted = "The actor died because of an error raised in its creation task\nrecipe.errors.RunError: no layer nope"
    monkeypatch.setattr(ray_session.ray, "wait", lambda refs, **_: (refs, []))
    monkeypatch.setattr(ray_session, "_error_of", lambda _: RuntimeError(quoted))
    with RunFolder(RunArguments(output=tmp_path / "run"), "test") as run:
        assert str(RaySession(run, None)._blame("starting", {"trainer": "ref"})) == "no layer nope"
        assert run.details == ""


SESSION = """
import pathlib, time
from recipe.arguments import RunArguments
from recipe.ray_session import RaySession, run_main
from recipe.run_folder import RunFolder

def main(args):
    with RunFolder(args, "test") as run, RaySession(run, None) as session:
        run.say(f"Ray is {', '.join(sorted(session.ray))}")
        time.sleep(600)  # as a reward function does: nobody waits for Ray

run_main(main, RunArguments(output=pathlib.Path("run")))
"""
STARTED = "Ray is dashboard, dashboard agent, gcs_server, log monitor, monitor, raylet, runtime env agent"


DEATHS = {
    "gcs_server": "Ray's gcs_server died while starting",
    "ray::DashboardAgent": "Ray's dashboard agent died while starting",
    "autoscaler/_private/monitor.py": "Ray's monitor died while starting",
    "": "the driver died",
    "raylet/raylet": "Ray's raylet died while starting",
    "ray::RuntimeEnvAgent": "Ray's runtime env agent died while starting",
}
EVERY_DEATH = [(victim, ready) for victim in DEATHS for ready in (True, False)]
EVERY_DAY = [("gcs_server", False), ("ray::DashboardAgent", True), ("", True)]


@pytest.mark.parametrize(
    ("victim", "ready"),
    [pytest.param(*each, marks=[] if each in EVERY_DAY else pytest.mark.slow) for each in EVERY_DEATH],
)
def test_death_of_ray_or_of_the_driver_ends_the_run_while_nobody_waits(tmp_path, victim, ready):
    """Ready or, with Ray still starting, as soon as there is such a process, and has been for as long as a look takes.
    The driver is killed once there is a gcs_server."""
    run = Script(tmp_path, sys.executable, "-c", SESSION, PYTHONPATH=str(ROOT))
    if ready:
        run.wait_for(STARTED)
    while not (found := [p for p in run.descendants() if (victim or "gcs_server") in title_of(p)]):
        assert run.process.poll() is None, run.text()
        time.sleep(0.05)
    time.sleep(0 if ready else 0.4)
    family, killed = run.descendants(), time.monotonic()
    (found[0] if victim else run.process).kill()
    run.finish(FAULT_SECONDS)
    wait_until_gone(family)
    run.assert_failed_cleanly(run.text(), family)
    assert time.monotonic() - killed < FAULT_SECONDS
    assert run.text().splitlines()[-1] == f"error: {DEATHS[victim]}"


@pytest.mark.parametrize(
    ("log", "told", "reason"),
    [
        ("one Ray agent failed, agent_name = runtime_env_agent.", "", "Ray's runtime env agent died while starting"),
        (
            "one Ray agent failed, agent_name = dashboard_agent.",
            "while a\nwhile b\n",
            "Ray's dashboard agent died while b",
        ),
        ("one Ray agent failed, agent_name = dashboard_agent.", "while a\nerror: no room\n", "no room"),
        ("all is well", "while a\n", "the driver died"),
    ],
)
def test_who_outlives_the_driver_says_which_agent_died(tmp_path, log, told, reason):
    logs = tmp_path / "session_2026" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.out").write_text(log)
    command = [sys.executable, ROOT / "recipe" / "leftovers.py", tmp_path]
    heir = subprocess.run(command, input=told, capture_output=True, text=True, check=True)
    assert heir.stdout == f"error: {reason}\n"
    assert not tmp_path.exists()


def wait_until_gone(family: list[psutil.Process]) -> None:
    """Also the process that cleans up after a driver that was killed."""
    deadline = time.monotonic() + FAULT_SECONDS
    while any(map(is_alive, family)) and time.monotonic() < deadline:
        time.sleep(0.1)


@pytest.mark.slow
def test_worker_killed_while_ray_starts_it_delays_the_run_by_no_more_than_a_fault_may(tmp_path):
    class Actor:
        def answer(self) -> int:
            return os.getpid()

    args = RunArguments(output=tmp_path / "run")
    with RunFolder(args, "test") as run, RaySession(run, None) as session:
        answer = ray.remote(Actor).options(num_cpus=1).remote().answer.remote()
        raylet = session.ray["raylet"]
        while not (found := [p for p in raylet.children() if "default_worker" in title_of(p) and p.name() != "raylet"]):
            time.sleep(0.01)
        for worker in found:
            worker.kill()
        started = time.monotonic()
        (pid,) = session.wait("starting", actor=answer)
        assert pid not in [worker.pid for worker in found]
        assert time.monotonic() - started < FAULT_SECONDS


MODELS = ("Critic", "Reference", "RewardModel")
RANDOMLY_KILLED = [*SCRIPTS, "rlhf_ppo.py"]
MATTERS = (*RAY, *RANDOMLY_KILLED, *(f"ray::{name}" for name in ("Trainer", "Engine", *MODELS)), "VLLM::")


@pytest.mark.long
@pytest.mark.parametrize("number", range(RANDOM_KILLS))
def test_any_process_killed_at_any_moment_ends_the_run_or_does_not_matter(script, number):
    chance = random.Random(f"{FAULT_SEED} {number}")
    name, seconds = chance.choice(RANDOMLY_KILLED), chance.uniform(0, 15) if number % 2 else chance.uniform(15, 50)
    run = script(name, "--output", "run", "--save-every", 5, "--steps", 200)
    while not any("leftovers.py" in title_of(process) for process in run.descendants()):
        time.sleep(0.01)
    time.sleep(seconds)
    family = [psutil.Process(run.process.pid), *run.descendants()]
    victim = chance.choice(family)
    title = title_of(victim)
    print(f"FAULT_SEED={FAULT_SEED} {name}: {title[:200]!r} killed {seconds:.2f} s after the session began")
    victim.kill()
    killed = time.monotonic()
    matters = any(matter in argument for argument in title.split()[:3] for matter in MATTERS)
    if matters:
        run.finish(FAULT_SECONDS)
    run.finish(240)
    wait_until_gone(family)
    text = run.text()  # also what was said for a driver that was killed
    print(f"ended {time.monotonic() - killed:.1f} s after the kill:\n{text[-2000:]}")
    if run.process.returncode or matters:
        assert time.monotonic() - killed < FAULT_SECONDS
        assert sum(line.startswith("error: ") for line in text.splitlines()) == 1
        run.assert_failed_cleanly(text, family)
    else:
        assert text.splitlines()[-1].startswith("OK: "), text


OF_AN_ENGINE = """
import mmap, sys, time

with open(sys.argv[1], "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 0)
print(flush=True)
time.sleep(600)
"""
ACTOR = """
import subprocess, sys, time
from recipe.ray_session import die_with_children

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
