"""Ray for the time of one run: start or join it, wait for actors, say which side failed, leave nothing behind."""

import argparse
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import ray
from ray.exceptions import ActorDiedError

from run_folder import USER_ERRORS, RunError, RunFolder

PHASE_SECONDS = 3600.0  # no phase of a step takes longer
PR_SET_CHILD_SUBREAPER = 36
MAX_SOCKET_CHARS = 107  # of a socket's path
RAY_SOCKET_CHARS = 82  # of it, below the folder for temporary files: /rlhf-ray-.../session_.../sockets/plasma_store
TRACKER = "multiprocessing.resource_tracker"  # removes from /dev/shm what others have left, once they have all ended


class RaySession:
    """A context in which Ray runs. On its way out, every process, socket and shared-memory file of the run goes."""

    def __init__(self, run: RunFolder, address: str | None):
        self.run, self.address = run, address
        self.actors: dict[str, ray.actor.ActorHandle] = {}  # a death of one of these ends every wait
        self.pings: dict[str, ray.ObjectRef] = {}  # the last call to each, which fails if it has died
        self.shared_memory: set[str] = set()  # seen in use by processes of this session
        self.phases: set[str] = set()  # that have ended at least once
        self.ray_processes: list[psutil.Process] = []  # of a node that was started here

    def __enter__(self) -> "RaySession":
        self.handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self.not_ours = set(psutil.Process().children(recursive=True))
        # Whatever a killed process leaves running becomes a child of this one, and is found when the session ends.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")
        beside = None if len(tempfile.gettempdir()) + RAY_SOCKET_CHARS <= MAX_SOCKET_CHARS else "/tmp"
        self.folder = tempfile.mkdtemp(prefix="rlhf-ray-", dir=beside)
        code = os.path.dirname(os.path.abspath(__file__))
        python_path = os.pathsep.join([code, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {"PYTHONPATH": python_path}
        options = {"runtime_env": {"env_vars": environment}, "logging_level": "warning"}
        if self.address is None:
            # Or Ray ends, with an actor, the process that removes what the actor's others have left in /dev/shm.
            os.environ.setdefault("RAY_process_group_cleanup_enabled", "0")
            os.environ.setdefault("RAY_kill_child_processes_on_worker_exit", "0")
            environment["TMPDIR"] = self.folder  # vLLM leaves its sockets there
            options |= {"num_cpus": max(2, os.cpu_count() or 2), "object_store_memory": 512 << 20}
            options |= {"include_dashboard": False, "_temp_dir": self.folder}
        try:
            if self.address and ":" in self.address and "//" not in self.address:
                host, _, port = self.address.rpartition(":")
                socket.create_connection((host, int(port)), timeout=5).close()  # Ray itself would try for minutes
            ray.init(self.address or "local", **options)  # whatever RAY_ADDRESS says
            signal.signal(signal.SIGTERM, _interrupt)  # Ray has put a handler of its own
            self.ray_processes = [child for child in psutil.Process().children() if child not in self.not_ours]
        except BaseException as error:
            self.__exit__()
            if not isinstance(error, Exception):
                raise
            where = f"reach Ray at {self.address}" if self.address else "start Ray"
            cause = error
            while cause.__cause__ or cause.__context__:  # Ray's outermost error does not say why
                cause = cause.__cause__ or cause.__context__
            raise RunError(f"cannot {where}: {_last_line(cause)}") from error
        return self

    def __exit__(self, *_) -> None:
        for number in self.handlers:
            signal.signal(number, signal.SIG_IGN)  # this is the way out already
        self._note_shared_memory()
        with suppress(Exception):  # an actor may be what failed; its processes are ended below
            refs = [actor.shutdown.remote() for actor in self.actors.values() if hasattr(actor, "shutdown")]
            ray.wait(refs, num_returns=len(refs), timeout=5)
        ray.shutdown()
        for stop, spared in ((signal.SIGTERM, TRACKER), (signal.SIGKILL, TRACKER), (signal.SIGKILL, None)):
            family = self._family()
            for process in family:
                with suppress(psutil.NoSuchProcess):
                    if spared is None or spared not in " ".join(process.cmdline()):
                        process.send_signal(stop)
            psutil.wait_procs(family, timeout=3)
        for file in self.shared_memory:
            Path(file).unlink(missing_ok=True)  # a process that was killed did not
        shutil.rmtree(self.folder, ignore_errors=True)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def wait(self, phase: str, **refs: ray.ObjectRef) -> list:
        """Results of one call to each named actor, in order. Raises what an actor raised, or says which one died."""
        started, pending, answers = time.monotonic(), list(refs.values()), refs
        while pending:
            ready, pending = ray.wait(pending, num_returns=1, timeout=1)
            failed = any(_error_of(ref) for ref in ready)
            if not ready:  # also for an actor that nobody waits for now, or that has answered already
                dead = self._failed_pings()
                failed, answers = bool(dead), refs | dead
            if failed:
                ray.wait(pending, num_returns=len(pending), timeout=3)  # let the other side say what it saw
            for process in self.ray_processes:
                if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                    raise RunError(f"Ray's {process.name()} died while {phase}")
            if failed:
                raise self._blame(phase, answers)
            seconds = time.monotonic() - started
            if seconds > PHASE_SECONDS:
                raise RunError(f"{phase} was not done within {PHASE_SECONDS:.0f} s")
            if not ready:
                self._note_shared_memory()
                self.run.tick(phase, round(seconds))
        if phase not in self.phases:  # what it has made, it has made the first time
            self.phases.add(phase)
            self._note_shared_memory()
        return ray.get(list(refs.values()))

    def _failed_pings(self) -> dict[str, ray.ObjectRef]:
        """Pings of actors that have died. One that is busy answers later; one that has answered gets the next."""
        for name, actor in self.actors.items():
            ping = self.pings.get(name)
            if ping is None or (ray.wait([ping], timeout=0)[0] and not _error_of(ping)):
                self.pings[name] = actor.__ray_ready__.remote()
        return {name: ping for name, ping in self.pings.items() if _error_of(ping)}

    def _family(self) -> list[psutil.Process]:
        """All processes of this session."""
        return [child for child in psutil.Process().children(recursive=True) if child not in self.not_ours]

    def _note_shared_memory(self) -> None:
        """Note what is in use now: when a process has been killed, nobody knows any more what it had mapped."""
        self.shared_memory |= shared_memory_of(self._family())

    def _blame(self, phase: str, answers: dict[str, ray.ObjectRef]) -> Exception:
        """The error that explains the others: a death before a failed sync, that before anything else."""
        done, _ = ray.wait(list(answers.values()), num_returns=len(answers), timeout=0)
        errors = [(actor, error) for actor, ref in answers.items() if ref in done and (error := _error_of(ref))]
        died = [each for each in errors if isinstance(each[1], ActorDiedError) and "creation task" not in str(each[1])]
        said = [cause for _, error in errors if isinstance(cause := getattr(error, "cause", None), USER_ERRORS)]
        if said and not died:
            return said[0]
        self.run.keep_log_tail()  # the others do not say it all
        actor, error = (died or errors)[0]
        if died:
            node = " with its Ray node" if "its node has died" in str(error) else ""
            return RunError(f"the {actor} died{node} while {phase}")
        if "EngineDeadError" in str(error):
            return RunError(f"the {actor} died while {phase}: one of vLLM's processes ended")
        return RunError(f"the {actor} failed while {phase}: {_last_line(error)}")


def run_main(main: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> None:
    """Run a script's `main`; an error becomes one message and an exit status that is not 0, never a traceback."""
    try:
        main(args)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        sys.exit(f"error: {error if isinstance(error, USER_ERRORS) else _last_line(error)}")


def die_with_children() -> None:
    """End this actor as soon as one of the processes it has started by now ends.

    vLLM's `LLM` waits for ever for an engine core that was killed; an actor that is gone is noticed by all who wait.
    Ray ends an actor without asking it; what shared memory its processes leave is removed by one that outlives them,
    on a node of a cluster, which is not the driver's to clean up.
    """
    family, children = psutil.Process().children(recursive=True), psutil.Process().children()
    arguments = [" ".join(shared_memory_of(family)), *(str(process.pid) for process in family)]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(["setsid", "--fork", "sh", "-c", _REMOVE_AFTER, "sh", *arguments], check=True, **quiet)

    def watch() -> None:
        while all(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children):
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# A process that has ended maps nothing, also while nobody has asked for its exit status.
_REMOVE_AFTER = "files=$1; shift; for pid; do while grep -qs . /proc/$pid/maps; do sleep 1; done; done; rm -f $files"


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
    """What a traceback ends with, in one line: the last one that speaks of an error, if one does."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    speaking = [line for line in lines if "error" in line.lower() and "http" not in line]
    return (speaking or lines or [type(error).__name__])[-1]


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
