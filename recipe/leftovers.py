"""What a session with Ray leaves behind when it is cut short, processes and files, and who removes it.

python recipe/leftovers.py [FOLDER]    what `outlive` starts
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import psutil

MARK = "RLHF_SESSION_FOLDER"  # in the environment of every process of a session
# Python's, which removes from /dev/shm what others have left, once they have all ended:
RESOURCE_TRACKER = "multiprocessing.resource_tracker"


def outlive(folder: str = "", screen: IO | int = subprocess.DEVNULL) -> subprocess.Popen:
    """Start a process that cleans up as soon as this one has ended, even by SIGKILL.

    It reads lines from its standard input: files in /dev/shm, which it removes once nobody has them mapped, the phase
    that begins ("while learning"), or an error. With the `folder` of a session, it ends the session's processes, and
    prints the error that it was told.
    """
    command = [sys.executable, os.path.abspath(__file__), folder]
    pipes = {"stdin": subprocess.PIPE, "stdout": screen, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, **pipes, text=True, bufsize=1, start_new_session=True)  # Ctrl-C is not for it


@contextmanager
def unmarked() -> Iterator[None]:
    """Processes that are started within do not belong to the session, and may outlive it."""
    mark = os.environ.pop(MARK, None)
    try:
        yield
    finally:
        if mark:
            os.environ[MARK] = mark


def clean_up(folder: str, files: set[str]) -> None:
    """End all processes of a session; remove its folder, these files, and what its processes have in /dev/shm."""
    files = files | shared_memory_of(processes_of(folder))
    for spared in (RESOURCE_TRACKER, None):
        for process in processes_of(folder):
            with suppress(psutil.Error):
                if spared is None or spared not in " ".join(process.cmdline()):
                    process.kill()
        deadline = time.monotonic() + 3
        while processes_of(folder) and time.monotonic() < deadline:
            time.sleep(0.1)
    _remove(files)  # a process that was killed did not
    shutil.rmtree(folder, ignore_errors=True)


def processes_of(folder: str) -> list[psutil.Process]:
    """The living processes of a session: by their environment or, where a title has overwritten that, their logs."""
    mark, found = f"{MARK}={folder}".encode(), []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):  # it has ended, or is another user's
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            files = process.open_files() if environment.startswith(b"\0") else []
            if mark in environment.split(b"\0") or any(file.path.startswith(folder + "/") for file in files):
                found.append(process)
    return found


def shared_memory_of(processes: list[psutil.Process]) -> set[str]:
    """Paths of the files in /dev/shm that these processes have mapped."""
    inodes = set()
    for process in processes:
        try:
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        except OSError:
            continue  # it has ended
        # By inode: a semaphore's file is mapped under a temporary name, and renamed.
        inodes |= {int(line.split()[4]) for line in lines if " /dev/shm/" in line}
    return {entry.path for entry in os.scandir("/dev/shm") if entry.inode() in inodes}


def agent_that_died(folder: str) -> str | None:
    """Ray's agent whose end ended the raylet, by the raylet's log in the folder of a session; None: no agent's did."""
    logs = [log.read_text(errors="replace") for log in Path(folder).glob("session_2*/logs/raylet.*")]
    agents = re.findall(r"one Ray agent failed, agent_name = (\w+)", "".join(logs))
    return agents[0].replace("_", " ") if agents else None


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _remove(files: set[str]) -> None:
    for file in files:
        Path(file).unlink(missing_ok=True)


if __name__ == "__main__":
    folder, told = sys.argv[1], sys.stdin.read().splitlines()  # which is complete when the other has ended
    reasons = [line for line in told if line.startswith("error: ")]
    phases = ["while starting", *(line for line in told if line.startswith("while "))]
    files = set(told) - set(reasons) - set(phases)
    if folder:
        agent = agent_that_died(folder)  # Ray ends the driver with the raylet, perhaps before the driver has seen why
        reasons.append(f"error: Ray's {agent} died {phases[-1]}" if agent else "error: the driver died")
        clean_up(folder, files)
        print(reasons[0], flush=True)
    while files & shared_memory_of(list(psutil.process_iter())):
        time.sleep(1)
    _remove(files)
