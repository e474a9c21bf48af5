"""Run a script, with a fault at a chosen moment: fault.py "syncing 3 kill VLLM::Worker_TP1" train_grpo.py --steps 30

When the third `syncing` begins: `kill` the first process whose title contains that (or the one of this number, from 0),
`interrupt` the run as Ctrl-C does, `terminate` its driver alone or its whole `group`, `fill` the disk of the folder
`run`. A sync is over in 20 ms; the one of the fault is held open by stopping the engine's workers before it, until the
fault has happened. What is to happen while `starting` does so as soon as there is such a process. When it happened, and
the driver's processes of that moment, with the files in /dev/shm that they share, go to fault.json.
"""

import json
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import psutil
from conftest import shared_memory_of

sys.path.insert(0, os.path.dirname(sys.argv[2]))
from trainer.run.session import RaySession

PHASE, COUNT, ACT, *TARGET = sys.argv[1].split()
COUNT = int(COUNT)
seen, family, stopped = [], [], []
wait, wait_for_thread = RaySession.wait, RaySession.wait_for_thread


def wait_with_fault(session: RaySession, phase: str, *groups: dict) -> list:
    begin(phase, {name: ref for calls in groups for name, ref in calls.items()})
    results = wait(session, phase, *groups)
    if PHASE == "syncing" and (phase, seen.count(phase)) == ("learning", COUNT - 1) and not stopped:
        stopped.extend(processes("VLLM::Worker"))
        for worker in stopped:
            worker.suspend()
    return results


def wait_for_thread_with_fault(session: RaySession, future: Future, phase_of: Callable[[], str]) -> None:
    def phase_with_fault() -> str:
        begin(phase := phase_of(), {})
        return phase

    wait_for_thread(session, future, phase_with_fault)


def begin(phase: str, refs: dict) -> None:
    """A wait for these calls begins, or goes on, in this phase. If it is the fault's, that happens."""
    if seen[-1:] != [phase]:  # several calls in a row are one phase
        seen.append(phase)
    if phase == "starting":
        if fault_begins(phase, refs):
            threading.Thread(target=act_when_started, daemon=True).start()
        return
    if not family and phase != "loading":  # ahead of time: most phases are over in the time that this takes
        family.extend(psutil.Process().children(recursive=True))
    if fault_begins(phase, refs):
        time.sleep(1 if stopped else 0)  # by now, all that is not stopped is busy with the sync
        note()
        try:
            act()
        finally:
            resume(stopped)


def fault_begins(phase: str, refs: dict) -> bool:
    at = phase == PHASE and seen.count(phase) == COUNT and not os.path.exists("fault.json")
    return at and (phase != "syncing" or any(name.startswith("trainer") for name in refs))  # who sends the weights


def act() -> None:
    if ACT == "kill":
        processes(TARGET[0])[int(TARGET[1]) if TARGET[1:] else 0].kill()
    elif ACT == "interrupt":
        os.killpg(0, signal.SIGINT)  # every process of the terminal's foreground group
    elif ACT == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
    elif ACT == "group":
        os.killpg(0, signal.SIGTERM)  # as `timeout` and job runners do
    elif ACT == "fill":
        fill(Path("run") / "filler")


def act_when_started() -> None:
    while not processes(TARGET[0]):
        time.sleep(0.01)
        family[:] = psutil.Process().children(recursive=True)
    note()
    act()


def resume(workers: list[psutil.Process]) -> None:
    for worker in workers:
        try:
            worker.resume()
        except psutil.NoSuchProcess:
            pass  # it is the victim


def processes(title: str) -> list[psutil.Process]:
    found = []
    for process in family:
        try:
            if title in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            pass  # it has ended
    return found


def fill(path: Path) -> None:
    """Leave room for a line of metrics, not for a checkpoint."""
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 16)):
                pass
        except OSError:
            file.truncate(file.tell() - (1 << 20))


def note() -> None:
    pids, shared = [process.pid for process in family], [f for f in shared_memory_of(family) if "/psm_" in f]
    Path("fault.json").write_text(json.dumps({"time": time.time(), "family": pids, "shared": shared}))


if __name__ == "__main__":
    RaySession.wait, RaySession.wait_for_thread = wait_with_fault, wait_for_thread_with_fault
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
