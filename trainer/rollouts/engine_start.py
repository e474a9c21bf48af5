"""How an engine's processes start, and why they cannot, as vLLM has logged it."""

import multiprocessing
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from unittest.mock import patch

import psutil
import torch
from pydantic import ValidationError

from ..errors import EngineError, RunError

UNEXPLAINED = re.compile(r"(Engine core|WorkerProc) initialization failed")  # how vLLM refers to another process
LOG_PREFIX = re.compile(r"^\(\S+ pid=\d+\) (?:ERROR \S+ \S+ \[\S+\] ?)?", re.MULTILINE)
RAISED = re.compile(r"^([\w.]*(?:Error|Exception): .*(?:\n  (?!File ).*)*)", re.MULTILINE)

START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"  # of the engine core, for its workers


class EngineCoreProcess(ForkServerProcess):
    """A process that is forked from this actor's fork server, with the environment that the actor has by then."""

    def start(self) -> None:
        self.environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.update(self.environment)
        if threads := os.environ.get("OMP_NUM_THREADS"):  # which torch has read already
            torch.set_num_threads(int(threads))
        super().run()


class EngineCoreContext(ForkServerContext):
    Process = EngineCoreProcess


def fork_engine_core(device: str) -> None:
    """Have vLLM fork its engine core from a process that imports vLLM while this actor does, and on GPUs fork the
    core's worker as well. In an actor of Ray, vLLM would spawn them, and each would import vLLM again: 12 s."""
    multiprocessing.set_forkserver_preload([f"{__package__}.preload"])
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # Ray has added the script's folder
        forkserver.ensure_running()
    probe = EngineCoreContext().Process(target=torch.cuda.init if device == "cuda" else int)
    probe.start()
    from vllm.utils.system_utils import get_mp_context
    from vllm.v1.engine import utils

    def context() -> EngineCoreContext:
        before = os.environ.get(START_METHOD)  # on CPU, vLLM has set it by now
        get_mp_context()  # tells the engine core where Ray is, and to spawn its workers
        os.environ.pop(START_METHOD)
        if before:
            os.environ[START_METHOD] = before
        return EngineCoreContext()

    probe.join()
    if not probe.exitcode:  # else an import of this version of vLLM has initialized CUDA
        utils.get_mp_context = context


def unlink_shared_memory(parent: psutil.Process) -> None:
    """Remove the names of what vLLM's workers below this process share on a CPU, which no resource tracker knows. By
    now all of them have it open."""
    for process in parent.children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            for path in {mapping.path for mapping in process.memory_maps()}:
                if path.startswith("/dev/shm/vllm_dist_"):
                    Path(path).unlink(missing_ok=True)


@contextmanager
def engine_start() -> Iterator[None]:
    """Raise RunError, with vLLM's reason alone, if it refuses an engine's options, and EngineError, with what its
    processes have logged, if they cannot start."""
    try:
        yield
        unlink_shared_memory(psutil.Process())
    except ValidationError as error:
        raise RunError(f"vLLM refuses these options of the engine: {error.errors()[0]['msg']}") from error
    except TypeError as error:
        if "EngineArgs" not in str(error):
            raise
        raise RunError(f"--engine-args: {error}") from error
    except Exception as error:
        if not UNEXPLAINED.search(str(error)):
            raise
        raise EngineError(logged_reason()) from error


def logged_reason() -> str:
    """The first error that this actor and its child processes have logged: later ones only follow from it."""
    log = Path("/proc/self/fd/2")
    text = LOG_PREFIX.sub("", log.read_text(errors="replace")) if log.is_file() else ""
    reasons = (" ".join(found.split()) for found in RAISED.findall(text) if not UNEXPLAINED.search(found))
    return next(reasons, "one of vLLM's processes ended")
