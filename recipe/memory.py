"""The memory that trainers and engines take in each phase of a run, when they share devices."""

import re
import time

import psutil
import torch

from .ray_session import RaySession

SPARE = 0.1  # the share of a GPU's memory that stays free where trainer and engine are both awake


def rank_memory(device: torch.device) -> dict[str, float]:
    """GB on this rank's GPU: "own", the peak of this process's tensors since the last call, "others", all other memory
    in use now (the engine's, and CUDA's and NCCL's for both), and "gpu", of which both are parts. On CPU only "own":
    this process's memory."""
    if device.type == "cpu":
        return {"own": psutil.Process().memory_info().rss / 1e9}
    free, total = torch.cuda.mem_get_info()
    peak = torch.cuda.max_memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    others = total - free - torch.cuda.memory_reserved()
    return {"own": peak / 1e9, "others": others / 1e9, "gpu": total / 1e9}


def engine_memory(device: str) -> dict[str, float]:
    """GB that vLLM's processes, children of this one, hold on CPU. On a GPU `rank_memory` reports it instead."""
    processes = psutil.Process().children(recursive=True) if device == "cpu" else []
    return {"own": sum(process.memory_info().rss for process in processes) / 1e9}


def measure(session: RaySession, phase: str) -> dict[str, float]:
    """GB at the end of a phase, of each kind of actor ("trainer" for "trainer0") what the largest one takes; and the
    smallest GPU's. Every actor needs a method `memory`.

    On a GPU, the engine's is all that a rank finds in use beside its own, with what others have kept. torch caches
    freed memory, so it is the engine's peak as well.
    """
    metrics = {}

    def note(kind: str, size: float) -> None:
        name = f"memory/{phase}/{kind}"
        metrics[name] = max(size, metrics.get(name, 0.0))

    actors = session.actors
    answers = session.wait("measuring", **{name: actor.memory.remote() for name, actor in actors.items()})
    for name, answer in zip(actors, answers, strict=True):
        note(name.rstrip("0123456789"), answer["own"])
        if "others" in answer:
            note("engine", answer["others"])
    gpus = [answer["gpu"] for answer in answers if "gpu" in answer]
    return metrics | ({"memory/gpu": min(gpus)} if gpus else {})


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
        """A phase ends, and the next one begins. Its metrics are `time/` it, in seconds, and those of `measure`."""
        self.metrics |= {f"time/{phase}": time.perf_counter() - self.since} | measure(self.session, phase)
        self.since = time.perf_counter()


def sleep_level(memory: dict[str, float]) -> tuple[str, str]:
    """How engines are to sleep while trainers learn, "none" or "kv", and why: by the results of `measure` in a step in
    which they slept. A tenth of each GPU stays free."""
    trainer, engine, gpu = (memory[f"memory/{name}"] for name in ("learning/trainer", "generating/engine", "gpu"))
    fit = trainer + engine <= (1 - SPARE) * gpu
    reason = f"learning takes {trainer:.1f} GB and an engine awake {engine:.1f} GB of {gpu:.1f}"
    return ("none" if fit else "kv"), reason
