"""The memory that trainers and engines take in each phase of a run, when they share devices."""

import re
import time

import psutil
import torch

from weight_sync.groups import device_id_of

from .ray_session import RaySession
from .run_folder import RunFolder

SPARE = 0.1  # the share of a GPU's memory that stays free where trainer and engine are both awake


def rank_memory(device: torch.device) -> dict[str, float | str]:
    """GB of this rank: "own", the most that torch held for it on the GPU since the last call, and "kept", what it holds
    now; "device", that GPU's id, "used", what all processes take of it, and "gpu", its size. On CPU only "own": this
    process's memory."""
    if device.type == "cpu":
        return {"own": psutil.Process().memory_info().rss / 1e9}
    free, total = torch.cuda.mem_get_info()
    sizes = {"own": torch.cuda.max_memory_reserved(), "kept": torch.cuda.memory_reserved()}
    torch.cuda.reset_peak_memory_stats()
    sizes |= {"used": total - free, "gpu": total}
    return {"device": device_id_of(device)} | {name: size / 1e9 for name, size in sizes.items()}


def engine_memory(device: str) -> dict[str, float]:
    """GB that vLLM's processes, children of this one, hold on CPU. On a GPU `measure` finds it instead."""
    processes = psutil.Process().children(recursive=True) if device == "cpu" else []
    return {"own": sum(process.memory_info().rss for process in processes) / 1e9}


def measure(session: RaySession, phase: str) -> dict[str, float]:
    """GB at the end of a phase: for each kind of actor ("trainer" for "trainer0") the largest one's, and the smallest
    GPU's. Every actor needs a method `memory`; that of an engine with GPUs of its own returns nothing.

    On a GPU, an engine's is all that is in use beside the ranks' tensors, CUDA's and NCCL's memory as well. torch
    caches freed memory, so it is the engine's peak as well.
    """
    actors = session.actors
    answers = session.wait("measuring", **{name: actor.memory.remote() for name, actor in actors.items()})
    on_gpus = [answer for answer in answers if "gpu" in answer]
    beside = {answer["device"]: answer["used"] for answer in on_gpus}
    for answer in on_gpus:
        beside[answer["device"]] -= answer["kept"]
    found = [(name.rstrip("0123456789"), answer["own"]) for name, answer in zip(actors, answers, strict=True) if answer]
    found += [("engine", size) for size in beside.values() if all(answers)]
    metrics = {}
    for kind, size in found:
        name = f"memory/{phase}/{kind}"
        metrics[name] = max(size, metrics.get(name, 0.0))
    return metrics | ({"memory/gpu": min(answer["gpu"] for answer in on_gpus)} if on_gpus else {})


def memory_table(metrics: dict[str, float]) -> str:
    """The results of `measure`, among other metrics, a line for each phase."""
    sizes = {tuple(name.split("/")[1:]): size for name, size in metrics.items() if re.match("memory/.*/", name)}
    phases, kinds = (list(dict.fromkeys(part)) for part in zip(*sizes, strict=True))
    lines = [f"  {'GB':10}" + "".join(f"  {kind:>12}" for kind in kinds)]
    lines += [f"  {phase:10}" + "".join(f"  {sizes[phase, kind]:12.1f}" for kind in kinds) for phase in phases]
    return "\n".join(lines)


class Phases:
    """The seconds that each phase of a step took, and the memory in it."""

    def __init__(self, session: RaySession):
        self.session, self.metrics, self.since = session, {}, time.perf_counter()

    def end(self, phase: str) -> None:
        """A phase ends, and the next one begins. Its metrics are `time/PHASE`, in seconds, and those of `measure`."""
        self.metrics |= {f"time/{phase}": time.perf_counter() - self.since} | measure(self.session, phase)
        self.since = time.perf_counter()


def sleep_level(run: RunFolder, level: str, metrics: dict[str, float]) -> str:
    """How engines are to sleep while trainers learn: "none" if the results of `measure` say that both fit, with a tenth
    of each GPU to spare, else "kv". Says so, if that is not the `level` until now.

    "none" is to be looked at again after each step: completions, and what learning from them takes, may grow.
    """
    trainer, engine, gpu = (metrics[f"memory/{name}"] for name in ("learning/trainer", "generating/engine", "gpu"))
    settled = "none" if trainer + engine <= (1 - SPARE) * gpu else "kv"
    if settled != level:
        reason = f"learning takes {trainer:.1f} GB and an engine awake {engine:.1f} GB of {gpu:.1f}"
        run.say(f"--sleep {settled} from now on: {reason}")
    return settled
