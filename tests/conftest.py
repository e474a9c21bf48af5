"""What the tests share: a way to run a script as a user would, and one engine for the tests that need one."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch

cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="drives vLLM's CPU build")
REQUIRE_GPU = os.environ.get("REQUIRE_GPU") == "1"  # a GPU test that cannot run is a failure
# In the background of a shell Ctrl-C is ignored, which the scripts would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from recipe.leftovers import shared_memory_of  # noqa: E402 - found by the line above


def pytest_runtest_setup(item):
    """Skip a test whose GPUs are not there: `gpu(count)` says how many it needs, `or_cpu` that it also runs on none."""
    for marker in item.iter_markers("gpu"):
        (wanted,), there = marker.args, torch.cuda.device_count()
        if there < wanted and not (there == 0 and marker.kwargs.get("or_cpu") and not REQUIRE_GPU):
            stop = pytest.fail if REQUIRE_GPU else pytest.skip
            stop(f"needs {wanted} GPUs, there are {there}")


class Script:
    """A command that runs a script of this project, with all that it started."""

    def __init__(self, folder: Path, *command: str, **environment: str):
        # A short path: sockets lie below it. What the script leaves there, or in shared memory, is what it left.
        self.temporary = Path(tempfile.mkdtemp(prefix="t-"))
        self.output = self.temporary / "output.txt"
        self.shared_memory = set(os.listdir("/dev/shm"))
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=os.environ | {"TMPDIR": str(self.temporary)} | environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def finish(self, timeout: float) -> str:
        """Wait for the end and return what was printed."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            family = psutil.Process(self.process.pid).children(recursive=True)
            for process in [self.process, *family]:
                process.kill()
            pytest.fail(f"not done after {timeout:.0f} s:\n{self.text()[-3000:]}")
        return self.text()

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_for(self, text: str, timeout: float = 120) -> None:
        """Wait until this has been printed."""
        deadline = time.monotonic() + timeout
        while text not in self.text():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.05)

    def wait_for_step(self, run: Path, step: int, timeout: float = 120) -> None:
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
        """One message, an exit status that says so, and nothing left running or lying about."""
        assert self.process.returncode not in (0, None), text
        assert "Traceback" not in text, text
        assert "error: " in text.splitlines()[-1], text
        assert [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
        assert list(self.temporary.glob("rlhf-ray-*")) == []
        left = set(os.listdir("/dev/shm")) - self.shared_memory
        in_use = {os.path.basename(file) for file in shared_memory_of(list(psutil.process_iter()))}  # by other programs
        assert {file for file in left - in_use if os.path.exists(f"/dev/shm/{file}")} == set()


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
