"""What the tests share: a way to run a script as a user would, and one engine for the tests that need one."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import psutil
import pytest
import torch

cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="drives vLLM's CPU build")
REQUIRE_GPU = os.environ.get("REQUIRE_GPU") == "1"  # a GPU test that cannot run is a failure
os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")  # importing TRL would set it to ERROR, for what tests start as well
# In the background of a shell Ctrl-C is ignored, which the scripts would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
ROOT = Path(__file__).resolve().parent.parent
HANGS_SECONDS = 600  # a run that takes longer hangs; slow machines, with two runs on two cores, need a third of it
sys.path.insert(0, str(ROOT))


def pytest_runtest_setup(item):
    """Skip a test whose GPUs are not there: `gpu(count)` says how many it needs, `or_cpu` that it also runs on none."""
    for marker in item.iter_markers("gpu"):
        (wanted,), there = marker.args, torch.cuda.device_count()
        if there < wanted and not (there == 0 and marker.kwargs.get("or_cpu") and not REQUIRE_GPU):
            stop = pytest.fail if REQUIRE_GPU else pytest.skip
            stop(f"needs {wanted} GPUs, there are {there}")


class Script:
    """A command that runs a script of this project, with all that it started. It ends with its test."""

    running: ClassVar[list["Script"]] = []

    def __init__(self, folder: Path, *command: str, **environment: str):
        self.temporary = Path(tempfile.mkdtemp(prefix="t-"))  # a short path: sockets lie below it
        self.output = self.temporary / "output.txt"
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=os.environ | {"TMPDIR": str(self.temporary)} | environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.running.append(self)

    def finish(self, timeout: float = HANGS_SECONDS) -> str:
        """Wait for the end and return what was printed."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"not done after {timeout:.0f} s:\n{self.text()[-3000:]}")
        return self.text()

    def kill(self) -> None:
        """End it now, with all that it started; nothing happens if it has ended."""
        if self.process.poll() is None:
            for process in [*self.descendants(), self.process]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.wait()

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_for(self, text: str, timeout: float = HANGS_SECONDS) -> None:
        """Wait until this has been printed."""
        self.wait_for_count(text, 1, timeout)

    def wait_for_count(self, text: str, count: int, timeout: float = HANGS_SECONDS) -> None:
        """Wait until this has been printed so many times."""
        deadline = time.monotonic() + timeout
        while self.text().count(text) < count:
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.05)

    def wait_for_step(self, run: Path, step: int, timeout: float = HANGS_SECONDS) -> None:
        metrics, deadline = run / "metrics.jsonl", time.monotonic() + timeout
        while not metrics.exists() or len(metrics.read_text().splitlines()) < step:
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.05)

    def descendant(self, name: str) -> psutil.Process:
        """The one process whose title begins so."""
        (process,) = (p for p in psutil.Process(self.process.pid).children(recursive=True) if name in title_of(p))
        return process

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def assert_failed_cleanly(self, text: str, family: list[psutil.Process]) -> None:
        """One message, an exit status that says so, and nothing left running."""
        assert self.process.returncode not in (0, None), text
        assert "error: " in text.splitlines()[-1], text
        assert [p for p in family if is_alive(p)] == []


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


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


def assert_removed(files: set[str]) -> None:
    """These files go within seconds: resource trackers end after the run."""
    deadline = time.monotonic() + 30
    while left := [file for file in files if os.path.exists(file)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def title_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.fixture
def script(tmp_path):
    """Start a script: script("rlhf.py", "--steps", 3, CUDA_VISIBLE_DEVICES="0") in an empty folder."""

    def start(name: str, *arguments, **environment: str) -> Script:
        return Script(tmp_path, sys.executable, str(ROOT / name), *map(str, arguments), **environment)

    return start


@pytest.fixture(autouse=True)
def no_script_outlives_its_test():
    """A test that fails leaves no run to slow the ones after it."""
    yield
    while Script.running:
        Script.running.pop().kill()


@pytest.fixture
def shared_memory_file():
    """A file in /dev/shm that no run has made."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(b"of another program")
        file.flush()
        yield Path(file.name)
