"""Why an engine cannot start, as vLLM's processes have logged it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from pydantic import ValidationError

from ..errors import EngineError, RunError

UNEXPLAINED = re.compile(r"(Engine core|WorkerProc) initialization failed")  # how vLLM refers to another process
LOG_PREFIX = re.compile(r"^\(\S+ pid=\d+\) (?:ERROR \S+ \S+ \[\S+\] ?)?", re.MULTILINE)
RAISED = re.compile(r"^([\w.]*(?:Error|Exception): .*(?:\n  (?!File ).*)*)", re.MULTILINE)


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
