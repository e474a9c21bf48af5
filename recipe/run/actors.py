"""Groups of Ray actors: where they go, how they are called, and what a step of theirs takes, in seconds and memory.

A group is N actors of one class, each on a bundle of a placement group. Trainers are a group, and so are engines, also
where there is one of each: so one GPU, eight, and several nodes have the same loop.
"""

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import psutil
import ray
import torch
from annotated_types import Ge
from ray.util.placement_group import placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from transformers.hf_argparser import HfArg

from weight_sync.groups import device_id_of

from ..errors import RunError
from ..learning.learner import Learner
from ..learning.model import Model
from ..learning.rollout import Rollout
from ..learning.sharding import join_ranks
from .checkpoint import write_checkpoint
from .session import RaySession

RESERVE_SECONDS = 60  # limit for Ray to reserve a placement group


@dataclass
class LayoutArguments:
    """How many trainers and engines there are, on separate devices."""

    trainers: Annotated[int, Ge(1)] = HfArg(
        default=1, help="trainer ranks, each on a GPU; FSDP2 shards the model over them"
    )
    engines: Annotated[int, Ge(1)] = HfArg(default=1, help="engines, among which the prompts of a step are divided")


@dataclass(frozen=True)
class Seat:
    """Where an actor goes: Ray's options, and the bundles of a placement group that it, or its workers, take."""

    options: dict
    bundles: list[int]


def reserve(bundles: list[dict], strategy: str):
    """A placement group of these bundles. Raises RunError if Ray does not get them."""
    group = placement_group(bundles, strategy=strategy)
    if not group.wait(timeout_seconds=RESERVE_SECONDS):
        raise RunError(f"Ray could not reserve {bundles} within {RESERVE_SECONDS} s: another run may hold them")
    return group


def by_node(group) -> list[int]:
    """The bundles of this placement group, node by node."""
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return sorted(nodes, key=lambda bundle: (nodes[bundle], bundle))


def seat(group, bundle: int, workers: list[int] | None = None, **resources) -> Seat:
    """For an actor with these resources in this bundle; the `workers` that it starts take theirs."""
    strategy = PlacementGroupSchedulingStrategy(group, bundle, placement_group_capture_child_tasks=True)
    return Seat({"scheduling_strategy": strategy, "num_cpus": 0, **resources}, workers or [bundle])


class ActorGroup:
    """Ray actors of one class, one on each of these seats. Their constructor gets the actor's number."""

    def __init__(self, session: RaySession, name: str, cls: type, seats: list[Seat]):
        self.session, self.cls = session, cls
        names = [f"{name} {i}" for i in range(len(seats))] if len(seats) > 1 else [name]
        self.seats, self.actors = dict(zip(names, seats, strict=True)), {}
        self.restart()

    def restart(self) -> None:
        """End these actors, and what they have started, and begin with new ones."""
        self.session.end(self.actors)
        cls = ray.remote(self.cls)
        self.actors = {own: cls.options(**place.options).remote(i) for i, (own, place) in enumerate(self.seats.items())}
        self.session.actors |= self.actors

    def __len__(self) -> int:
        return len(self.seats)

    @property
    def bundles(self) -> list[tuple[list[int]]]:
        """Each actor's bundles, as an argument of its own."""
        return [(seat.bundles,) for seat in self.seats.values()]

    def begin(self, method: str, *args, each: list[tuple] | None = None) -> dict[str, ray.ObjectRef]:
        """Call this method of every actor: with these arguments and then, if `each` is given, its own. Returns the
        calls by actor, as `RaySession.wait` takes them."""
        put = [ray.put(arg) for arg in args] if len(self) > 1 else args  # large ones travel once to each node
        own = each or [()] * len(self)
        return {
            name: getattr(actor, method).remote(*put, *more)
            for (name, actor), more in zip(self.actors.items(), own, strict=True)
        }

    def call(self, phase: str, method: str, *args, each: list[tuple] | None = None) -> list:
        """As `begin`, and wait. Returns the results, in the order of the actors."""
        return self.session.wait(phase, self.begin(method, *args, each=each))

    def first(self, phase: str, method: str, *args, each: list[tuple] | None = None):
        """As `call`, with the first actor's result. Ranks of a learner all return the same."""
        return self.call(phase, method, *args, each=each)[0]

    def rank_0(self, phase: str, method: str, *args):
        """Call this method of the first actor alone."""
        name, actor = next(iter(self.actors.items()))
        return self.session.wait(phase, {name: getattr(actor, method).remote(*args)})[0]


class ModelActor:
    """A Ray actor around one rank of a model, which may learn.

    Where models share a device (`shared`), each takes its turn on it, and is in host memory otherwise. With
    `weights_stay`, only the optimizer's state moves.
    """

    shared = weights_stay = False

    def __init__(self, rank: int):
        self.rank = rank  # loads nothing yet: engines may have to start first, since vLLM measures the free memory
        self.model: Model | None = None
        self.learner: Learner | None = None

    def address(self) -> tuple[str, int]:
        from vllm.utils.network_utils import get_open_port

        return ray.util.get_node_ip_address(), get_open_port()

    def join(self, address: tuple[str, int], ranks: int, device: str, at_once: int = 1) -> torch.device:
        """Join the other ranks, of which the first one listens at `address`. On CPU, take this rank's part of the
        cores, on which so many models compute `at_once`. Returns this rank's device."""
        if device == "cpu":  # else the one thread that Ray sets is faster: small tensors are not worth waking others
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // (ranks * at_once)))
        own = torch.device(device, 0)  # Ray makes one GPU visible
        join_ranks(*address, self.rank, ranks, own)
        return own

    def capability(self) -> int | None:
        """The compute capability of this actor's GPU, as 90 for 9.0; None on CPU."""
        from vllm.platforms import current_platform

        found = current_platform.get_device_capability() if current_platform.is_cuda() else None
        return found and found.to_int()

    def run(self, method: str, *args):
        """Call this method of the learner, or of a model that does not learn, in its turn."""
        with self.turn():
            return getattr(self.learner or self.model, method)(*args)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The model is on its device within."""
        moves = self.shared and not self.weights_stay
        if moves:
            self.model.module.to(self.model.device)
        yield
        if self.shared and self.learner:
            self.learner.release_memory(offload_optimizer=True)  # gradients would move with their weights
        if moves:
            self.model.module.to("cpu")
            self.model.release_memory()

    def device_id(self) -> str:
        return device_id_of(self.model.device)

    def memory(self) -> dict[str, float | str]:
        """GB of this rank: "own", the most that torch held for it on the GPU since the last call, and "kept", what it
        holds now; "device", that GPU's id, "used", what all processes take of it, and "gpu", its size. On CPU only
        "own": this process's memory."""
        if self.model.device.type == "cpu":
            return {"own": psutil.Process().memory_info().rss / 1e9}
        free, total = torch.cuda.mem_get_info()
        sizes = {"own": torch.cuda.max_memory_reserved(), "kept": torch.cuda.memory_reserved()}
        torch.cuda.reset_peak_memory_stats()
        sizes |= {"used": total - free, "gpu": total}
        return {"device": self.device_id()} | {name: size / 1e9 for name, size in sizes.items()}


class LearnerActor(ModelActor):
    """A Ray actor around one rank of a learner."""

    def resume(self, checkpoint: Path | None) -> tuple[int, str]:
        """Go on from this checkpoint's training state, if there is one. Returns the steps that are done, and lines to
        print about the learner."""
        self.model = self.learner.model
        if checkpoint:
            self.learner.load_state(checkpoint)
        return self.learner.step, self.learner.remarks()

    def mismatch(self, rollouts: list[Rollout]) -> float:
        return self.learner.mismatch(rollouts)

    def make_exact(self, exactly: str) -> None:
        self.learner.make_exact(exactly)

    def save(self, run_folder: Path) -> None:
        """Write a checkpoint. All ranks call this; each writes its part."""
        write_checkpoint(run_folder, self.learner.step, self.learner.save, self.rank)


@dataclass
class StepClock:
    """The seconds of each phase of a step and, where models share devices, the memory in it."""

    shared: RaySession | None = None  # whose actors share devices, and are asked for their memory
    metrics: dict[str, float] = field(default_factory=dict)
    since: float = field(default_factory=time.perf_counter)

    def end(self, phase: str) -> None:
        """A phase ends, and the next one begins. Its metrics are `time/PHASE`, in seconds, and those of `measure`."""
        self.metrics[f"time/{phase}"] = time.perf_counter() - self.since
        if self.shared:
            self.metrics |= measure(self.shared, phase)
        self.since = time.perf_counter()


def measure(session: RaySession, phase: str) -> dict[str, float]:
    """GB at the end of a phase: for each group of actors the largest one's, and the smallest GPU's. Every actor has a
    method `memory`; that of an engine with GPUs of its own returns nothing.

    On a GPU, an engine's is all that is in use beside the ranks' tensors, CUDA's and NCCL's memory as well. torch
    caches freed memory, so it is the engine's peak as well.
    """
    calls = {name: actor.memory.remote() for name, actor in session.actors.items()}
    answers = dict(zip(calls, session.wait("measuring", calls), strict=True))
    on_gpus = [answer for answer in answers.values() if "gpu" in answer]
    beside = {answer["device"]: answer["used"] for answer in on_gpus}
    for answer in on_gpus:
        beside[answer["device"]] -= answer["kept"]
    found = [(name.split()[0], answer["own"]) for name, answer in answers.items() if answer]
    found += [("engine", size) for size in beside.values() if all(answers.values())]
    metrics = {}
    for group, size in found:
        name = f"memory/{phase}/{group}"
        metrics[name] = max(size, metrics.get(name, 0.0))
    return metrics | ({"memory/gpu": min(answer["gpu"] for answer in on_gpus)} if on_gpus else {})


def memory_table(metrics: dict[str, float]) -> str:
    """The results of `measure`, among other metrics, a line for each phase."""
    sizes = {tuple(name.split("/")[1:]): size for name, size in metrics.items() if re.match("memory/.*/", name)}
    phases, groups = (list(dict.fromkeys(part)) for part in zip(*sizes, strict=True))
    lines = [f"  {'GB':10}" + "".join(f"  {group:>12}" for group in groups)]
    lines += [f"  {phase:10}" + "".join(f"  {sizes[phase, group]:12.1f}" for group in groups) for phase in phases]
    return "\n".join(lines)
