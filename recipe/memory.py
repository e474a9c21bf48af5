"""The memory that trainers and engines take in each phase of a run, when they share devices."""

import time

import psutil
import torch

from .ray_session import RaySession

SPARE = 0.1  # the share of a GPU's memory that stays free where trainer and engine are both awake


def rank_memory(device: torch.device) -> dict[str, float]:
    """GB on this rank's GPU: "trainer", the peak of this process's tensors since the last call, "engine", all other
    memory in use now (the engine's, and CUDA's and NCCL's for both), and "gpu", of which both are parts. On CPU only
    "trainer": this process's memory."""
    if device.type == "cpu":
        return {"trainer": psutil.Process().memory_info().rss / 1e9}
    free, total = torch.cuda.mem_get_info()
    peak = torch.cuda.max_memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    engine = total - free - torch.cuda.memory_reserved()
    return {"trainer": peak / 1e9, "engine": engine / 1e9, "gpu": total / 1e9}


def engine_memory(device: str) -> dict[str, float]:
    """GB that vLLM's processes, children of this one, hold on CPU. On a GPU `rank_memory` reports it instead."""
    processes = psutil.Process().children(recursive=True) if device == "cpu" else []
    return {"engine": sum(process.memory_info().rss for process in processes) / 1e9}


def measure(session: RaySession, phase: str) -> dict[str, float]:
    """GB at the end of a phase: the peak of any trainer rank, and what any engine holds now; and the smallest GPU's.

    torch caches freed memory, so the second is the engine's peak as well. Every actor needs a method `memory`.
    """
    answers = session.wait(phase, **{name: actor.memory.remote() for name, actor in session.actors.items()})
    sides = {f"memory/{phase}/{side}": max(a.get(side, 0.0) for a in answers) for side in ("trainer", "engine")}
    gpus = [answer["gpu"] for answer in answers if "gpu" in answer]
    return sides | ({"memory/gpu": min(gpus)} if gpus else {})


class Phases:
    """The seconds that each phase of a step took, and each actor's memory in it."""

    def __init__(self, session: RaySession):
        self.session, self.metrics, self.since = session, {}, time.perf_counter()

    def end(self, phase: str) -> None:
        """A phase ends, and the next one begins.

        Its metrics are `time/` it, in seconds, and `memory/` it by actor, in GB: the peak of the actor's own tensors.
        On a GPU, the engine's is all that a trainer rank finds in use beside its own, with what others have kept.
        """
        self.metrics[f"time/{phase}"] = time.perf_counter() - self.since
        actors = self.session.actors
        answers = self.session.wait("measuring", **{name: actor.memory.remote() for name, actor in actors.items()})
        for name, answer in zip(actors, answers, strict=True):
            own = "engine" if name == "engine" else "trainer"
            beside = [each["engine"] for each in answers if "gpu" in each] if name == "engine" else []
            self.metrics[f"memory/{phase}/{name}"] = max([answer.get(own, 0.0), *beside])
        self.since = time.perf_counter()

    def table(self) -> str:
        """The memory in each phase so far, a line each."""
        phases = [name.removeprefix("time/") for name in self.metrics if name.startswith("time/")]
        lines = [f"  {'GB':8}" + "".join(f"  {name:>13}" for name in self.session.actors)]
        for phase in phases:
            numbers = (self.metrics[f"memory/{phase}/{name}"] for name in self.session.actors)
            lines.append(f"  {phase:8}" + "".join(f"  {number:13.2f}" for number in numbers))
        return "\n".join(lines)


def sleep_level(memory: dict[str, float]) -> tuple[str, str]:
    """How engines are to sleep while trainers learn, "none" or "kv", and why: by the results of `measure` in a step in
    which they slept. A tenth of each GPU stays free."""
    trainer, engine, gpu = (memory[f"memory/{name}"] for name in ("learning/trainer", "generating/engine", "gpu"))
    fit = trainer + engine <= (1 - SPARE) * gpu
    reason = f"learning takes {trainer:.1f} GB and an engine awake {engine:.1f} GB of {gpu:.1f}"
    return ("none" if fit else "kv"), reason


def memory_summary(metrics: dict[str, float]) -> str:
    """The results of `measure`, among other metrics, in one line."""
    return "  GB: " + ", ".join(f"{n.removeprefix('memory/')} {v:.1f}" for n, v in metrics.items() if "memory/" in n)
