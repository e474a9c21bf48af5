"""Run a script, with a fault at a chosen moment: python fault.py "syncing 3 kill VLLM::Worker_TP1" rlhf.py --steps 30

When the third `syncing` begins: `kill` a process whose title contains that, `interrupt` or `terminate` the run, `fill`
the disk of its folder, `take` the port that the trainer has chosen. When it happened, and the driver's processes of
that moment, go to fault.json.
"""

import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import psutil

sys.path.insert(0, os.path.dirname(sys.argv[2]))
from ray_session import RaySession

PHASE, COUNT, ACT, *TARGET = sys.argv[1].split()
seen, family, taken = [], [], []
wait = RaySession.wait


def wait_with_fault(session: RaySession, phase: str, **refs) -> list:
    seen.append(phase)
    now = phase == PHASE and seen.count(phase) == int(COUNT)
    if phase == "starting":
        threading.Thread(target=kill_when_started, daemon=True).start() if now else None
        return wait(session, phase, **refs)
    if not family:  # look ahead of time: a sync is over in the time that this takes
        family.extend(psutil.Process().children(recursive=True))
    if now:
        note()
        if ACT == "kill":
            next(victims()).kill()
        elif ACT == "interrupt":
            os.killpg(0, signal.SIGINT)  # as Ctrl-C does: every process of the terminal's foreground group
        elif ACT == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        elif ACT == "fill":
            fill(session.run.path / "filler")
    results = wait(session, phase, **refs)
    if now and ACT == "take":
        taken.append(socket.create_server(results[0]))
    return results


def kill_when_started() -> None:
    victim = None
    while not victim:
        time.sleep(0.01)
        family[:] = psutil.Process().children(recursive=True)
        victim = next(victims(), None)
    note()
    victim.kill()


def victims():
    for process in family:
        try:
            if TARGET[0] in " ".join(process.cmdline()):
                yield process
        except psutil.Error:
            pass


def fill(path: Path) -> None:
    """Leave room for a line of metrics, not for a checkpoint."""
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 16)):
                pass
        except OSError:
            file.truncate(file.tell() - (1 << 20))


def note() -> None:
    pids = [process.pid for process in family]
    Path("fault.json").write_text(json.dumps({"time": time.time(), "family": pids}))


if __name__ == "__main__":
    RaySession.wait = wait_with_fault
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
