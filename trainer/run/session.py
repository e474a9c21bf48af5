"""Ray for one run: start or join it, wait for actors, say which one failed, and leave no process behind."""

import asyncio
import io
import os
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent import futures
from contextlib import ExitStack, chdir, suppress
from importlib import import_module
from pathlib import Path

import psutil
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError

from rlhf_utils import WeightSyncError

from ..errors import EngineError, RunError, UserError
from .arguments import RunArguments
from .resource_tracker import WORKING_FOLDER
from .timeline import DRIVER, Timeline

USER_ERRORS = (UserError, WeightSyncError)  # their message is all that a user needs
SHUTDOWN_SECONDS = 10.0  # limit for vLLM to end its processes when it is asked to
AFTER_ERROR_SECONDS = 5.0  # the same after an error, when an engine may be too busy to be asked
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # signals that end a run
ROOT = Path(__file__).parents[2]  # the folder in which vLLM's workers find rlhf_utils


class RaySession:
    """A context in which Ray runs, started here or joined at --ray-address. On exit, it ends every process that it has
    started and, if it has started Ray, removes vLLM's sockets.

    Every wait for actors takes no longer than --timeout, and calls `progress(phase, seconds, actors)` every second,
    with the names of those that have not answered. The `timeline` gets the waits and the answers.
    """

    def __init__(
        self,
        args: RunArguments,
        progress: Callable[[str, int, list[str]], None],
        timeline: Timeline | None = None,
    ):
        self.timeline = timeline or Timeline()
        self.address, self.timeout, self.progress, self.ending = args.ray_address, args.timeout, progress, False
        self.actors: dict[str, ray.actor.ActorHandle] = {}  # the death of one of these ends every wait
        self.pings: dict[str, ray.ObjectRef] = {}  # the last call of each actor, which fails if it has died

    def __enter__(self) -> "RaySession":
        variables = {"VLLM_LOGGING_STREAM": "ext://sys.stderr"}  # so stdout has only what somebody prints
        script_folder = os.path.dirname(getattr(sys.modules["__main__"], "__file__", ""))
        paths = filter(None, [str(ROOT), script_folder, os.environ.get("PYTHONPATH")])
        variables |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
        variables |= {name: os.environ[name] for name in ("VLLM_API_KEY",) if name in os.environ}  # of the servers
        variables[WORKING_FOLDER] = os.getcwd()
        runtime_env = {"env_vars": variables, "worker_process_setup_hook": "trainer.run.resource_tracker.set_up_worker"}
        options = {"runtime_env": runtime_env, "logging_level": "error"}
        if self.address is None:
            options |= {"num_cpus": max(2, os.cpu_count() or 2), "object_store_memory": 512 << 20}
            options |= {"include_dashboard": False}
            self.sockets = tempfile.TemporaryDirectory(prefix="rlhf-", ignore_cleanup_errors=True)
            variables["VLLM_RPC_BASE_PATH"] = self.sockets.name
        try:
            address = self.address or ""
            if "//" not in address and (address.count(":") == 1 or "[" in address):
                host, _, port = address.rpartition(":")
                socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()  # else Ray tries for minutes
            before = psutil.Process().children()
            # In ROOT, whose modules Ray's workers are to find first, and those of the working folder last.
            with chdir(ROOT), futures.ThreadPoolExecutor(1) as meanwhile:
                meanwhile.submit(import_module, "transformers.modeling_utils")  # it takes 3 s, as Ray does
                ray.init(self.address or "local", **options)  # whatever RAY_ADDRESS says
            self.started = [process for process in psutil.Process().children() if process not in before]
        except SystemExit as error:  # Ray's own handler of SIGTERM
            raise KeyboardInterrupt from error
        except Exception as error:
            what = f"reach Ray at {self.address}" if self.address else "start Ray"
            cause = error
            while cause.__cause__ or cause.__context__:  # the outermost error does not say why
                cause = cause.__cause__ or cause.__context__
            raise RunError(f"cannot {what}: {one_line(cause)}") from error
        finally:
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # not Ray's
        return self

    def __exit__(self, _, error: BaseException | None, __) -> None:
        self.ending = True
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in ENDINGS}  # the run is ending already
        with suppress(Exception):  # an actor may have died
            self.end(dict(self.actors), AFTER_ERROR_SECONDS if error else SHUTDOWN_SECONDS)
        family = [*self.started]  # and not what others have started in this process, such as W&B
        for process in self.started:
            with suppress(psutil.NoSuchProcess):
                family += process.children(recursive=True)
        raylets = {str(process.pid) for process in self.started}
        for process in psutil.process_iter():  # a signal may have ended the raylet, and so made orphans of its workers
            with suppress(psutil.Error):
                if process.environ().get("RAY_RAYLET_PID") in raylets:
                    family.append(process)
        ray.shutdown()
        for process in _running(family, 3):
            with suppress(psutil.Error):
                process.kill()
        _running(family, 3)  # a killed process takes a moment to go
        if self.address is None:
            self.sockets.cleanup()
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def end(self, actors: dict[str, ray.actor.ActorHandle], patience: float = SHUTDOWN_SECONDS) -> None:
        """End these actors. Those with a method `shutdown`, as engines, have `patience` seconds for it."""
        refs = {name: actor.shutdown.remote() for name, actor in actors.items() if hasattr(actor, "shutdown")}
        self._kill({name: actor for name, actor in actors.items() if name not in refs})  # for whom an engine may wait
        ray.wait([*refs.values()], num_returns=len(refs), timeout=patience)
        self._kill({name: actors[name] for name in refs})

    def _kill(self, actors: dict[str, ray.actor.ActorHandle]) -> None:
        for name, actor in actors.items():
            ray.kill(actor)
            del self.actors[name]
            self.pings.pop(name, None)

    def wait(self, phase: str, *groups: dict[str, ray.ObjectRef]) -> list[list]:
        """The results of each group's calls, in the order of its actors. Raises what an actor raised, or says which one
        died, even if nobody waits for that one."""
        started, results = time.monotonic(), {}
        pending = {ref: name for calls in groups for name, ref in calls.items()}
        with self.timeline.span(DRIVER, phase):
            while pending:
                ready, _ = ray.wait(list(pending), num_returns=1, timeout=1)
                for ref in ready:
                    self.timeline.end(ref)
                    results[ref] = answer = _answer(ref)
                    if isinstance(answer, Exception):
                        raise self._blame(phase, pending)
                    del pending[ref]
                if not ready:
                    self._check(phase, started, pending)
        return [[results[ref] for ref in calls.values()] for calls in groups]

    async def answer(self, phase: str, actor: str, call: ray.ObjectRef):
        """As `wait`, for a call, in the event loop of a thread for which the main thread waits by `wait_for_thread`."""
        try:
            return await asyncio.wrap_future(call.future())
        except Exception as error:  # whatever the actor raised
            raise explain(phase, actor, error) from error

    def wait_for_thread(self, future: futures.Future, phase_of: Callable[[], str]) -> None:
        """As `wait`, for a thread of this process, whose error stays in the future. `phase_of` is called every second
        for what the thread does now; it may raise."""
        phase = None
        with ExitStack() as span:
            while not future.done():
                if (current := phase_of()) != phase:
                    phase, started = current, time.monotonic()
                    span.close()
                    span.enter_context(self.timeline.span(DRIVER, phase))
                futures.wait([future], timeout=1)
                self._check(phase, started, {})

    def _check(self, phase: str, started: float, pending: dict[ray.ObjectRef, str]) -> None:
        """What a wait does every second."""
        seconds = time.monotonic() - started
        if dead := self._failed_pings():
            raise self._blame(phase, pending | dead)
        if seconds > self.timeout:
            raise RunError(f"{phase} was not done within {self.timeout:g} s (--timeout)")
        self.progress(phase, round(seconds), sorted(set(pending.values())))

    def _failed_pings(self) -> dict[ray.ObjectRef, str]:
        """The pings of actors that have died. Others get the next ping when they have answered the last."""
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
        """The error to raise for these calls: a death, else an error meant for the user, such as a failed sync. The
        rest are consequences."""
        self._failed_pings()  # so that each actor has a ping
        calls = calls | {ping: name for name, ping in self.pings.items()}  # one may have died that nobody waits for
        ray.wait(list(calls), num_returns=len(calls), timeout=3)  # other actors may be about to fail
        answers = [(actor, _answer(ref)) for ref, actor in calls.items()]
        errors = [(actor, answer) for actor, answer in answers if isinstance(answer, Exception)]
        deaths = [(actor, error) for actor, error in errors if _died(error)]
        deaths = deaths or [(actor, error) for actor, error in errors if _is_out_of_reach(error)]
        for_user = [(actor, error) for actor, error in errors if isinstance(_cause(error), USER_ERRORS)]
        return explain(phase, *(deaths or for_user or errors)[0])


def _running(processes: list[psutil.Process], patience: float) -> list[psutil.Process]:
    """Those of the processes that still run after so many seconds."""
    deadline = time.monotonic() + patience
    while running := [process for process in processes if _runs(process)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return running


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE  # which has ended
    except psutil.NoSuchProcess:
        return False


def explain(phase: str, actor: str, error: Exception) -> Exception:
    """The error to raise in this process for an actor's error."""
    cause = _cause(error)
    if isinstance(cause, EngineError):
        return RunError(f"the {actor} cannot start: {cause}; more in {sys.stderr.name}")  # which is run.log
    if isinstance(cause, USER_ERRORS):
        return cause
    if _died(error) or _is_out_of_reach(error):
        node = " with its Ray node" if "its node has died" in str(error) else ""
        return RunError(f"the {actor} died{node} while {phase}")
    if "EngineDeadError" in str(error):
        return RunError(f"the {actor} died while {phase}: one of vLLM's processes ended; run.log says why")
    failure = RunError(f"the {actor} failed while {phase}: {one_line(error)}")
    failure.details = str(error)  # with the traceback in the actor
    return failure


def _died(error: Exception) -> bool:
    """Whether the actor's process died. Ray also says so of an actor whose constructor raised."""
    own = isinstance(error, ActorDiedError) and not isinstance(error, RayTaskError)  # which passes on another's death
    return own and "creation task" not in str(error)


def _is_out_of_reach(error: Exception) -> bool:
    """Whether Ray cannot reach the actor, as when it has died, and the news of that takes more than a second."""
    return type(error) is ActorUnavailableError


def _cause(error: Exception) -> Exception:
    """What the actor raised, which Ray has wrapped."""
    return getattr(error, "cause", None) or error


PENDING = object()


def _answer(ref: ray.ObjectRef):
    """The result of a call, the error that it raised, or PENDING."""
    if not ray.wait([ref], timeout=0)[0]:
        return PENDING
    try:
        return ray.get(ref)
    except Exception as error:  # whatever the actor raised
        return error


def run_main(main: Callable, args) -> None:
    """Run a script's `main`. An error becomes one message, and an exit status that is not 0."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the same as Ctrl-C
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as it is with nohup
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    if isinstance(sys.stdout, io.TextIOWrapper):  # and not a notebook's
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: what a terminal cannot show must not end the run
    try:
        main(args)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        print(f"error: {error if isinstance(error, USER_ERRORS) else one_line(error)}", file=sys.stderr)
        sys.exit(1)


def one_line(error: BaseException) -> str:
    """The message of an error in one line; after its type, if an actor has raised it."""
    cause, text = _cause(error), str(error)
    if isinstance(cause, RayError):  # the actor's error cannot be pickled: here is the end of its traceback
        text = re.sub(r'(?s).*\n  File "[^\n]*(\n [^\n]*)*\n', "", text)
    elif cause is not error:
        text = "".join(traceback.format_exception_only(cause))
    return " ".join(text.split()) or type(error).__name__
