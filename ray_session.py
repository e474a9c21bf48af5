"""Ray for the time of one run: start or join it, wait for actors, say which side failed, leave nothing behind."""

import ctypes
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import psutil
import ray

from grpo import MismatchError
from rlhf_utils import WeightSyncError
from run_folder import RunError, RunFolder
from task import TaskError

USER_ERRORS = (RunError, TaskError, MismatchError, WeightSyncError)  # their text is the whole message
PHASE_SECONDS = 3600.0  # no phase of a step takes longer
PR_SET_CHILD_SUBREAPER = 36


class RaySession:
    """A context in which Ray runs. On its way out, every process, socket and shared-memory file of the run goes."""

    def __init__(self, run: RunFolder, address: str | None):
        self.run, self.address = run, address
        self.farewells: list[Callable[[], ray.ObjectRef]] = []  # calls that end an actor's own processes

    def __enter__(self) -> "RaySession":
        # Whatever a killed process leaves running becomes a child of this one, and is found when the session ends.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        signal.signal(signal.SIGTERM, _interrupt)
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")
        self.folder = tempfile.mkdtemp(prefix="rlhf-ray-")
        code = os.path.dirname(os.path.abspath(__file__))
        python_path = os.pathsep.join([code, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {"PYTHONPATH": python_path}
        options = {"runtime_env": {"env_vars": environment}, "logging_level": "warning"}
        if self.address is None:
            environment["TMPDIR"] = self.folder  # vLLM leaves its sockets there
            options |= {"num_cpus": max(2, os.cpu_count() or 2), "object_store_memory": 512 << 20}
            options |= {"include_dashboard": False, "_temp_dir": self.folder}
        try:
            ray.init(self.address, **options)
        except Exception as error:
            self.__exit__()
            where = f"reach Ray at {self.address}" if self.address else "start Ray"
            raise RunError(f"cannot {where}: {_last_line(error)}") from error
        return self

    def __exit__(self, *_) -> None:
        for interrupt in (signal.SIGINT, signal.SIGTERM):
            signal.signal(interrupt, signal.SIG_IGN)  # this is the way out already
        family = psutil.Process().children(recursive=True)
        segments = _shared_memory_of(family)
        for farewell in self.farewells:
            try:
                ray.get(farewell(), timeout=5)
            except Exception:  # that actor may be what failed; its processes are ended below
                pass
        ray.shutdown()
        family = [process for process in family if process.is_running()]
        for stop in (signal.SIGTERM, signal.SIGKILL):
            for process in family:
                try:
                    process.send_signal(stop)
                except psutil.NoSuchProcess:
                    pass
            _, family = psutil.wait_procs(family + psutil.Process().children(recursive=True), timeout=3)
        for segment in segments:
            segment.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def wait(self, phase: str, **refs: ray.ObjectRef) -> list:
        """Results of one call to each named actor, in order. Raises what an actor raised, or says which one died."""
        started, pending = time.monotonic(), list(refs.values())
        while pending:
            ready, pending = ray.wait(pending, num_returns=1, timeout=1)
            if any(_error_of(ref) for ref in ready):
                ray.wait(pending, num_returns=len(pending), timeout=3)  # let the other side say what it saw
                raise self._blame(phase, refs)
            seconds = time.monotonic() - started
            if seconds > PHASE_SECONDS:
                raise RunError(f"{phase} was not done within {PHASE_SECONDS:.0f} s")
            if not ready:
                self.run.tick(phase, round(seconds))
        return ray.get(list(refs.values()))

    def _blame(self, phase: str, refs: dict[str, ray.ObjectRef]) -> Exception:
        """The error that explains the others: a death before a failed sync, that before anything else."""
        done, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=0)
        errors = [(actor, error) for actor, ref in refs.items() if ref in done and (error := _error_of(ref))]
        for actor, error in errors:
            if isinstance(error, ray.exceptions.ActorDiedError) and "creation task" not in str(error):
                return RunError(f"the {actor} died while {phase}")
        for _, error in errors:
            cause = getattr(error, "cause", None)
            if isinstance(cause, USER_ERRORS):
                return cause
        actor, error = errors[0]
        return RunError(f"the {actor} failed while {phase}: {_last_line(error)}")


def run_main(main: Callable[[RunFolder], None], run: Callable[[], RunFolder]) -> None:
    """Run a script's `main`; an error becomes one message and a non-zero exit status, never a traceback."""
    code = 0
    try:
        with run() as folder:
            message = ""
            try:
                main(folder)
            except KeyboardInterrupt:
                code, message = 130, "interrupted"
            except USER_ERRORS as error:
                code, message = 1, str(error)
            except Exception as error:
                code, message = 1, f"{_last_line(error)} (a bug: its traceback is in the log)"
                traceback.print_exc()
            if code:
                tail = folder.log_tail()
                if tail and code == 1:
                    folder.say(f"--- the last lines of {folder.log_file} ---\n{tail}\n---")
                if any(folder.path.glob("checkpoint-*")):
                    message += f"\nthe last checkpoint is whole; go on with --resume {folder.path}"
                folder.say(f"error: {message}")
    except USER_ERRORS as error:
        sys.exit(f"error: {error}")
    sys.exit(code)


def _interrupt(*_) -> None:
    raise KeyboardInterrupt


def _error_of(ref: ray.ObjectRef) -> Exception | None:
    try:
        ray.get(ref, timeout=0)
    except ray.exceptions.GetTimeoutError:
        return None
    except Exception as error:  # whatever the actor raised
        return error
    return None


def _last_line(error: Exception) -> str:
    """What a traceback ends with: the error itself, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _shared_memory_of(processes: list[psutil.Process]) -> set[Path]:
    """Files in /dev/shm that these processes have mapped."""
    segments = set()
    for process in processes:
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
        except OSError:
            continue
        for line in maps.splitlines():
            _, found, name = line.partition(" /dev/shm/")
            if found and not name.endswith(" (deleted)"):
                segments.add(Path("/dev/shm") / name)
    return segments
