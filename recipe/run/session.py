"""Ray for the time of one run: start or join it, wait for actors, name the one that failed, leave no process behind."""

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path

import psutil
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError

from rlhf_utils import WeightSyncError

from ..errors import RunError, UserError
from .arguments import RunArguments

USER_ERRORS = (UserError, WeightSyncError)  # their text says it all
SHUTDOWN_SECONDS = 10.0  # limit for vLLM to end its processes when it is asked to
AFTER_ERROR_SECONDS = 5.0  # the same after an error, when an engine may be too busy to hear of it
ROOT = Path(__file__).parents[2]  # where vLLM's workers find rlhf_utils


class RaySession:
    """A context in which Ray runs, started here or joined at --ray-address. On its way out, all its processes go.

    A wait calls `progress(phase, seconds)` every second, and takes no longer than --timeout.
    """

    def __init__(self, args: RunArguments, progress: Callable[[str, int], None]):
        self.address, self.timeout, self.progress = args.ray_address, args.timeout, progress
        self.actors: dict[str, ray.actor.ActorHandle] = {}  # a death of one of these ends every wait
        self.pings: dict[str, ray.ObjectRef] = {}  # the last call to each, which fails if it has died

    def __enter__(self) -> "RaySession":
        # vLLM's own setting: its log goes where the libraries' does. What is left on stdout, somebody has printed.
        variables = {"VLLM_LOGGING_STREAM": "ext://sys.stderr"}
        variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        options = {"runtime_env": {"env_vars": variables}, "logging_level": "error"}
        if self.address is None:
            options |= {"num_cpus": max(2, os.cpu_count() or 2), "object_store_memory": 512 << 20}
            options |= {"include_dashboard": False}
        try:
            if self.address and "//" not in self.address and (self.address.count(":") == 1 or "[" in self.address):
                host, _, port = self.address.rpartition(":")
                socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()  # Ray would try for minutes
            ray.init(self.address or "local", **options)  # whatever RAY_ADDRESS says
        except SystemExit as error:  # by Ray's own handler of SIGTERM
            raise KeyboardInterrupt from error
        except Exception as error:
            what = f"reach Ray at {self.address}" if self.address else "start Ray"
            cause = error
            while cause.__cause__ or cause.__context__:  # Ray's outermost error does not say why
                cause = cause.__cause__ or cause.__context__
            raise RunError(f"cannot {what}: {last_line(cause)}") from error
        finally:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        return self

    def __exit__(self, _, error: BaseException | None, __) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # this is the way out already
        family = psutil.Process().children(recursive=True)
        with suppress(Exception):  # an actor may be what failed
            self.end(dict(self.actors), AFTER_ERROR_SECONDS if error else SHUTDOWN_SECONDS)
        ray.shutdown()
        for process in _running(family, 3):
            with suppress(psutil.Error):
                process.kill()
        _running(family, 3)  # a killed process takes a moment to go
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def end(self, actors: dict[str, ray.actor.ActorHandle], patience: float = SHUTDOWN_SECONDS) -> None:
        """End these actors; engines first end their processes."""
        refs = [actor.shutdown.remote() for actor in actors.values() if hasattr(actor, "shutdown")]
        ray.wait(refs, num_returns=len(refs), timeout=patience)
        for name, actor in actors.items():
            ray.kill(actor)
            del self.actors[name]
            self.pings.pop(name, None)

    def wait(self, phase: str, refs: dict[str, ray.ObjectRef]) -> list:
        """Results of these calls by actor, in order. Raises what an actor raised, or says which one died."""
        started, pending, results = time.monotonic(), {ref: name for name, ref in refs.items()}, {}
        while pending:
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=1)
            for ref in ready:
                results[ref] = answer = _answer(ref)
                if isinstance(answer, Exception):
                    raise self._blame(phase, pending)
                del pending[ref]
            if not ready:  # also for an actor that nobody waits for now, or that has answered already
                self._check(phase, started, pending)
        return [results[ref] for ref in refs.values()]

    def wait_for_thread(self, future: futures.Future, phase_of: Callable[[], str]) -> None:
        """Wait as in `wait`, for a thread of this process. `phase_of` says every second what it does; it may raise."""
        phase = None
        while not future.done():
            if (now := phase_of()) != phase:
                phase, started = now, time.monotonic()
            futures.wait([future], timeout=1)
            self._check(phase, started, {})

    def _check(self, phase: str, started: float, pending: dict[ray.ObjectRef, str]) -> None:
        seconds = time.monotonic() - started
        if dead := self._failed_pings():
            raise self._blame(phase, pending | dead)
        if seconds > self.timeout:
            raise RunError(f"{phase} was not done within {self.timeout:g} s (--timeout)")
        self.progress(phase, round(seconds))

    def _failed_pings(self) -> dict[ray.ObjectRef, str]:
        """Pings of actors that have died. One that is busy answers later; one that has answered gets the next."""
        dead = {}
        for name, actor in self.actors.items():
            ping = self.pings.get(name)
            answer = _answer(ping) if ping is not None else None
            if isinstance(answer, Exception):
                dead[ping] = name
            elif ping is None or answer is not PENDING:
                self.pings[name] = actor.__ray_ready__.remote()
        return dead

    def _blame(self, phase: str, calls: dict[ray.ObjectRef, str]) -> Exception:
        """The error to report: an actor's death comes before a failed sync, a failed sync before anything else."""
        ray.wait(list(calls), num_returns=len(calls), timeout=3)  # let the other side say what it saw
        answers = [(actor, _answer(ref)) for ref, actor in calls.items()]
        errors = [(actor, answer) for actor, answer in answers if isinstance(answer, Exception)]
        said = [each for each in errors if isinstance(_cause(each[1]), USER_ERRORS)]
        return explain(phase, *([each for each in errors if _died(each[1])] or said or errors)[0])


def _running(processes: list[psutil.Process], patience: float) -> list[psutil.Process]:
    """Those of the processes that still run after so many seconds. A zombie has ended, whether or not it is reaped."""
    deadline = time.monotonic() + patience
    while running := [each for each in processes if each.is_running() and _status(each) != psutil.STATUS_ZOMBIE]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return running


def _status(process: psutil.Process) -> str:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


def explain(phase: str, actor: str, error: Exception) -> Exception:
    """The error to raise for what this actor has raised."""
    cause = _cause(error)
    if isinstance(cause, USER_ERRORS):
        return cause
    if _died(error):
        node = " with its Ray node" if "its node has died" in str(error) else ""
        return RunError(f"the {actor} died{node} while {phase}")
    if "EngineDeadError" in str(error):
        return RunError(f"the {actor} died while {phase}: one of vLLM's processes ended; run.log says why")
    failure = RunError(f"the {actor} failed while {phase}: {last_line(error)}")
    failure.details = str(error)  # with the traceback in the actor
    return failure


def _died(error: Exception) -> bool:
    return isinstance(error, ActorDiedError) and "creation task" not in str(error)


def _cause(error: Exception) -> Exception:
    """What the actor raised: Ray wraps it."""
    return getattr(error, "cause", None) or error


PENDING = object()


def _answer(ref: ray.ObjectRef):
    """The result of a call, the error that it raised, or `PENDING`."""
    try:
        return ray.get(ref, timeout=0)
    except GetTimeoutError:
        return PENDING
    except Exception as error:  # whatever the actor raised
        return error


def run_main(main: Callable, args) -> None:
    """Run a script's `main`; an error becomes one message and an exit status that is not 0."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        main(args)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        print(f"error: {error if isinstance(error, USER_ERRORS) else last_line(error)}", file=sys.stderr)
        sys.exit(1)


def die_with_children(unless: Callable[[], bool] = lambda: False) -> None:
    """End this actor as soon as one of the processes it has started by now ends, `unless` they are meant to end.

    vLLM's `LLM` waits for ever for an engine core that was killed; an actor that is gone is noticed by all who wait.
    """
    sentinels = [process.sentinel for process in multiprocessing.active_children()]

    def watch() -> None:
        wait_for_any(sentinels)
        time.sleep(1)  # vLLM may be about to say why
        if not unless():
            os._exit(1)

    if sentinels:
        threading.Thread(target=watch, daemon=True).start()


def last_line(error: BaseException) -> str:
    """What a traceback ends with, in one line: the last one that speaks of an error, if one does."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    speaking = [line for line in lines if "error" in line.lower() and "http" not in line]
    return (speaking or lines or [type(error).__name__])[-1]
