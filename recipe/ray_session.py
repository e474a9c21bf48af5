"""Ray for the time of one run: start or join it, wait for actors, say which side failed, leave nothing behind."""

import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from pathlib import Path

import psutil
import ray
from ray.exceptions import ActorDiedError

from rlhf_utils import WeightSyncError

from .arguments import RunArguments
from .errors import RunError, UserError
from .leftovers import MARK, agent_that_died, clean_up, is_alive, outlive, processes_of, shared_memory_of
from .run_folder import RunFolder

USER_ERRORS = (UserError, WeightSyncError)  # their text says it all
PHASE_SECONDS = 3600.0  # no phase of a step takes longer
EXIT_SECONDS = 15.0  # nor does the way out
MAX_SOCKET_CHARS = 107  # of a socket's path
RAY_SOCKET_CHARS = 82  # of it, below the folder for temporary files: /rlhf-ray-.../session_.../sockets/plasma_store
WORKER_RAISED = r"Worker failed with error '(.*)', please check"  # which vLLM tells its log alone
RAISED_AT_START = r"recipe\.errors\.\w+: (.*)"  # how Ray quotes an error for the user from an actor's constructor
RAY = {  # how a word of each process's title ends, and its name
    "dashboard/agent.py": "dashboard agent",
    "ray::DashboardAgent": "dashboard agent",
    "runtime_env/agent/main.py": "runtime env agent",
    "ray::RuntimeEnvAgent": "runtime env agent",
    "gcs_server": "gcs_server",
    "raylet": "raylet",
    "dashboard/dashboard.py": "dashboard",
    "_private/log_monitor.py": "log monitor",
    "_private/monitor.py": "monitor",
}


class RaySession:
    """A context in which Ray runs. On its way out, every process, socket and shared-memory file of the run goes."""

    def __init__(self, run: RunFolder, address: str | None):
        self.run, self.address = run, address
        self.actors: dict[str, ray.actor.ActorHandle] = {}  # a death of one of these ends every wait
        self.pings: dict[str, ray.ObjectRef] = {}  # the last call to each, which fails if it has died
        self.shared_memory: set[str] = set()  # seen in use by processes of this session
        self.phase = "starting"
        self.phases: set[str] = set()  # that have ended at least once
        self.ray: dict[str, psutil.Process] = {}  # Ray's processes, of a node that was started here
        self.starting_ray = True
        self.leaving: tuple[float, BaseException | None] | None = None  # since when, because of what
        self.left, self.ending = threading.Event(), threading.Lock()

    def __enter__(self) -> "RaySession":
        self.handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # what is left on stdout, a script has printed
        beside = None if len(tempfile.gettempdir()) + RAY_SOCKET_CHARS <= MAX_SOCKET_CHARS else "/tmp"
        self.folder = tempfile.mkdtemp(prefix="rlhf-ray-", dir=beside)
        self.heir = outlive(self.folder, self.run.screen)
        os.environ[MARK] = self.folder
        code = str(Path(__file__).resolve().parent.parent)  # where vLLM's workers find rlhf_utils
        python_path = os.pathsep.join([code, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {"PYTHONPATH": python_path, "VLLM_LOGGING_STREAM": os.environ["VLLM_LOGGING_STREAM"]}
        options = {"runtime_env": {"env_vars": environment}, "logging_level": "warning"}
        if self.address is None:
            # Otherwise Ray kills, with an actor, the resource tracker that removes what the actor's other processes
            # have left in /dev/shm.
            os.environ.setdefault("RAY_process_group_cleanup_enabled", "0")
            os.environ.setdefault("RAY_kill_child_processes_on_worker_exit", "0")
            # How long Ray waits before it looks whether a process that it starts is alive. No thread of ours runs then.
            os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "15")  # 30 by default
            os.environ.setdefault("RAY_worker_register_timeout_seconds", "20")  # 60 by default
            # Tasks' processes stay for minutes, not 1 s: the next step's rewards need not import everything again.
            os.environ.setdefault("RAY_idle_worker_killing_time_threshold_ms", "600000")
            environment["TMPDIR"] = self.folder  # vLLM leaves its sockets there
            options |= {"num_cpus": max(2, os.cpu_count() or 2), "object_store_memory": 512 << 20}
            options |= {"include_dashboard": False, "_temp_dir": self.folder}
        threading.Thread(target=self._watch, daemon=True).start()
        try:
            if self.address and ":" in self.address and "//" not in self.address:
                host, _, port = self.address.rpartition(":")
                socket.create_connection((host, int(port)), timeout=5).close()  # Ray itself would try for minutes
            ray.init(self.address or "local", **options)  # whatever RAY_ADDRESS says
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray has put a handler of its own
            self.starting_ray = False
        except BaseException as error:
            self.__exit__(None, error, None)
            if not isinstance(error, Exception):
                raise
            where = f"reach Ray at {self.address}" if self.address else "start Ray"
            cause = error
            while cause.__cause__ or cause.__context__:  # Ray's outermost error does not say why
                cause = cause.__cause__ or cause.__context__
            raise RunError(f"cannot {where}: {_last_line(cause)}") from error
        return self

    def __exit__(self, _, error: BaseException | None, __) -> None:
        self.leaving = time.monotonic(), error
        for number in self.handlers:
            signal.signal(number, signal.SIG_IGN)  # this is the way out already
        self._note_shared_memory()
        if self.address:  # on a node that was started here, all processes are ended below, at once
            with suppress(Exception):  # an actor may be what failed
                refs = [actor.shutdown.remote() for actor in self.actors.values() if hasattr(actor, "shutdown")]
                ray.wait(refs, num_returns=len(refs), timeout=5)
        ray.shutdown()
        with self.ending:
            self._clean_up()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def wait(self, phase: str, **refs: ray.ObjectRef) -> list:
        """Results of one call to each named actor, in order. Raises what an actor raised, or says which one died."""
        self._begin(phase)
        started, pending, answers = time.monotonic(), list(refs.values()), refs
        while pending:
            ready, pending = ray.wait(pending, num_returns=1, timeout=1)
            failed = any(_error_of(ref) for ref in ready)
            if not ready:  # also for an actor that nobody waits for now, or that has answered already
                dead = self._failed_pings()
                failed, answers = bool(dead), refs | dead
            if failed:
                ray.wait(pending, num_returns=len(pending), timeout=3)  # let the other side say what it saw
                self._end_if_ray_died()
                raise self._blame(phase, answers)
            if not ready:
                self._tick(phase, started)
        if phase not in self.phases:  # what it has made, it has made the first time
            self.phases.add(phase)
            self._note_shared_memory()
        return ray.get(list(refs.values()))

    def wait_for_thread(self, future: futures.Future, phase_of: Callable[[], str]) -> None:
        """Wait as in `wait`, for a thread of this process. `phase_of` says every second what it does; it may raise."""
        phase = None
        while True:
            if (now := phase_of()) != phase:
                phase, started = now, time.monotonic()
                self._begin(phase)
            if futures.wait([future], timeout=1).done:
                return
            if dead := self._failed_pings():
                self._end_if_ray_died()
                raise self._blame(phase, dead)
            self._tick(phase, started)

    def _tick(self, phase: str, started: float) -> None:
        seconds = time.monotonic() - started
        if seconds > PHASE_SECONDS:
            raise RunError(f"{phase} was not done within {PHASE_SECONDS:.0f} s")
        self._note_shared_memory()
        self.run.tick(phase, round(seconds))

    def _begin(self, phase: str) -> None:
        self.phase = phase
        self._tell_heir(f"while {phase}")

    def _failed_pings(self) -> dict[str, ray.ObjectRef]:
        """Pings of actors that have died. One that is busy answers later; one that has answered gets the next."""
        for name, actor in self.actors.items():
            ping = self.pings.get(name)
            if ping is None or (ray.wait([ping], timeout=0)[0] and not _error_of(ping)):
                self.pings[name] = actor.__ray_ready__.remote()
        return {name: ping for name, ping in self.pings.items() if _error_of(ping)}

    def _note_shared_memory(self) -> None:
        """Note what is in use now: when a process has been killed, nobody knows any more what it had mapped."""
        new = shared_memory_of(processes_of(self.folder)) - self.shared_memory
        self.shared_memory |= new
        self._tell_heir(*new)

    def _tell_heir(self, *lines: str) -> None:
        with suppress(OSError):  # it was killed
            self.heir.stdin.writelines(line + "\n" for line in lines)

    def _watch(self) -> None:
        """Runs in a thread: once a process of Ray's has died, a call to Ray may not come back."""
        while not self.left.wait(0.2):
            if self.starting_ray and self.address is None:
                self._find_ray()
            if self.leaving is None:
                self._end_if_ray_died()
            elif time.monotonic() - self.leaving[0] > EXIT_SECONDS:
                self._end(self.leaving[1] or RunError(f"Ray did not end within {EXIT_SECONDS:.0f} s"))

    def _find_ray(self) -> None:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                title = process.cmdline()[:3] if is_alive(process) else [process.name()]
                for part, name in RAY.items():
                    if any(argument.endswith(part) for argument in title):
                        self.ray.setdefault(name, process)

    def _end_if_ray_died(self) -> None:
        dead = [name for name, process in self.ray.items() if not is_alive(process)]
        if "raylet" in dead:  # which ends with any of its agents, as they do with it
            dead = [agent_that_died(self.folder) or "raylet"]
        if dead:
            self._end(RunError(f"Ray's {dead[0]} died while {self.phase}"))

    def _end(self, error: BaseException) -> None:
        """End the run here and now, whatever the main thread is waiting for."""
        with self.ending:
            if not self.left.is_set():
                line = f"error: {_in_words(error)}"
                self._tell_heir(line)  # Ray may end this process at any moment now
                self._clean_up()
                self.run.__exit__(type(error), error, None)
                print(line, file=sys.stderr, flush=True)
                os._exit(1)

    def _clean_up(self) -> None:
        clean_up(self.folder, self.shared_memory)
        os.environ.pop(MARK, None)
        self.heir.kill()
        self.heir.wait()
        self.left.set()

    def _blame(self, phase: str, answers: dict[str, ray.ObjectRef]) -> Exception:
        """The error to report: an actor's death comes before a failed sync, a failed sync before anything else."""
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
            if reason := re.search(WORKER_RAISED, self.run.details):
                self.run.details = ""  # that says it all
                return RunError(f"the {actor} failed while {phase}: {reason[1]}")
            return RunError(f"the {actor} died while {phase}: one of vLLM's processes ended")
        if found := re.match(RAISED_AT_START, _last_line(error)):
            self.run.details = ""  # as above
            return RunError(found[1])
        if actor.startswith("trainer"):  # whose traceback says more than the log; a full disk needs none
            self.run.details = "" if isinstance(getattr(error, "cause", None), OSError) else str(error)
        return RunError(f"the {actor} failed while {phase}: {_last_line(error)}")


def run_main(main: Callable, args: RunArguments) -> None:
    """Run a script's `main`; an error becomes one message and an exit status that is not 0, never a traceback."""
    try:
        main(args)
    except (Exception, KeyboardInterrupt) as error:
        print(f"error: {_in_words(error)}", file=sys.stderr)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def die_with_children() -> None:
    """End this actor as soon as one of the processes it has started by now ends.

    vLLM's `LLM` waits for ever for an engine core that was killed; an actor that is gone is noticed by all who wait.
    Ray ends an actor without asking it; what shared memory its processes leave is removed by one that outlives them,
    on a node of a cluster, which is not the driver's to clean up.
    """
    children, heir = psutil.Process().children(), outlive()
    files = shared_memory_of(psutil.Process().children(recursive=True))
    heir.stdin.writelines(f"{file}\n" for file in files)

    def watch(_) -> None:
        while all(map(is_alive, children)):
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, args=[heir], daemon=True).start()  # which keeps the pipe to the heir open


def _error_of(ref: ray.ObjectRef) -> Exception | None:
    try:
        ray.get(ref, timeout=0)
    except ray.exceptions.GetTimeoutError:
        return None
    except Exception as error:  # whatever the actor raised
        return error
    return None


def _in_words(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return str(error) if isinstance(error, USER_ERRORS) else _last_line(error)


def _last_line(error: BaseException) -> str:
    """What a traceback ends with, in one line: the last one that speaks of an error, if one does."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    speaking = [line for line in lines if "error" in line.lower() and "http" not in line]
    return (speaking or lines or [type(error).__name__])[-1]
