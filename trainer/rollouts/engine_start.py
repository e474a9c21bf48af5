"""How an engine's processes start, and why they cannot, as vLLM has logged it."""

import asyncio
import gc
import multiprocessing
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from unittest.mock import patch

import psutil
import ray
import torch
from pydantic import ValidationError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..errors import EngineError, RunError

UNEXPLAINED = re.compile(r"(Engine core|WorkerProc) initialization failed")  # how vLLM refers to another process
LOG_PREFIX = re.compile(r"^\(\S+ pid=\d+\) (?:ERROR \S+ \S+ \[\S+\] ?)?", re.MULTILINE)
RAISED = re.compile(r"^([\w.]*(?:Error|Exception): .*(?:\n  (?!File ).*)*)", re.MULTILINE)


class EngineCoreProcess(ForkServerProcess):
    """A process that is forked from this actor's fork server, with the environment that the actor has by then. It ends
    with the actor."""

    def start(self) -> None:
        self.environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        threading.Thread(target=_die_with_parent, daemon=True).start()
        os.environ.update(self.environment)
        if threads := os.environ.get("OMP_NUM_THREADS"):  # which torch has read already
            torch.set_num_threads(int(threads))
        super().run()


class EngineCoreContext(ForkServerContext):
    Process = EngineCoreProcess


async def gpus_of(bundles: list[int]) -> str:
    """The GPUs of these bundles of this actor's placement group, as CUDA_VISIBLE_DEVICES names them. Raises RunError if
    they are on several nodes. Ray names a GPU only to who reserves a part of it, so a task in each bundle asks."""

    def place() -> tuple[str, str]:
        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_accelerator_ids()["GPU"][0]

    placement, task = ray.util.get_current_placement_group(), ray.remote(num_cpus=0, num_gpus=0.01)(place)
    where = (PlacementGroupSchedulingStrategy(placement, bundle) for bundle in bundles)
    places = await asyncio.gather(*(task.options(scheduling_strategy=each).remote() for each in where))
    if len({node for node, _ in places}) > 1:
        raise RunError(
            "an engine's GPUs are on two nodes: choose tensor-parallel sizes and numbers of actors that fill nodes"
        )
    return ",".join(gpu for _, gpu in places)


def import_vllm() -> None:
    """Import vLLM, here and in this actor's fork server at the same time. A third process would import it to look at
    the model's class, if no earlier run has left the answer in vLLM's cache."""
    own = os.environ.get("PYTHONPATH", "")
    multiprocessing.set_forkserver_preload([f"{__package__}.preload"])
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # to which Ray has added the script's folder
    with patch.object(tempfile, "tempdir", os.environ.get("VLLM_RPC_BASE_PATH")):  # which the session removes
        forkserver.ensure_running()
    os.environ["PYTHONPATH"] = own
    gc.disable()  # as the fork server does (preload.py)
    import vllm.v1.engine.async_llm  # noqa: F401
    from vllm.model_executor.models import registry

    gc.freeze()
    gc.enable()
    registry._run_in_subprocess = lambda look: look()  # vLLM keeps CUDA out of a process that forks: this one does not


def fork_engine_core() -> None:
    """Have vLLM fork its engine core from the process of `import_vllm`, and on GPUs the core's workers as well. In an
    actor of Ray, vLLM would spawn them, and each would import vLLM again: 12 s. So it does if that process has
    initialized CUDA, which no version of requirements.txt does."""
    from vllm.v1.engine import utils

    probe = EngineCoreContext().Process(target=_use_cuda)
    with suppress(EOFError, OSError):  # the import has ended the fork server
        probe.start()
        probe.join()
    if probe.exitcode == 0:
        utils.get_mp_context = EngineCoreContext
    else:
        print("vLLM's engine core is spawned, and not forked, which takes longer")


def _use_cuda() -> None:
    with suppress(Exception):
        if torch.cuda.is_available():
            torch.cuda.init()
        os._exit(0)
    os._exit(1)


def _die_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def unlink_shared_memory(parent: psutil.Process) -> None:
    """Remove the names of what vLLM's workers below this process share on a CPU, which no resource tracker knows. By
    now all of them have it open."""
    if not any(name.startswith("vllm_dist_") for name in os.listdir("/dev/shm")):
        return  # as with GPUs, whose workers map so much that it takes long to list
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
