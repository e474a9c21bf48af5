"""Groups of Ray actors: where they run, how they are called, and the seconds and the memory that a step takes.

An ActorGroup is N actors of one class, each on a bundle of Ray's placement group. Trainers are such a group, and so are
engines, even where there is one of each. So the loop of a run is the same on one GPU, on eight, and on several nodes.
"""

import inspect
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Protocol

import ray
import torch
from annotated_types import Ge
from ray.util.placement_group import placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..errors import RunError
from ..flags import arg
from ..learning.exact import GPU, match_engine
from ..learning.learner import Learner
from ..learning.model import Model
from ..learning.rollout import Rollout
from ..learning.sharding import join_ranks
from .checkpoint import write_checkpoint
from .session import RaySession

MAX_CALLS = 100_000  # of an async actor at a time: by Ray's limit of 1,000, a sync would wait behind requests
RESERVE_SECONDS = 60  # limit for Ray to reserve a placement group


@dataclass
class ActorArguments:
    """How many trainers and engines there are, on devices of their own."""

    engines: Annotated[int, Ge(1)] = arg(1, help="engines; the prompts of a step are divided among them")
    trainers: Annotated[int, Ge(1)] = arg(1, help="trainer ranks, each on a GPU; FSDP2 shards the model over them")


@dataclass(frozen=True)
class Seat:
    """Where an actor runs: Ray's options for it, and the bundles of the placement group that it or its workers use."""

    options: dict
    bundles: list[int]


def reserve(bundles: list[dict], strategy: str):
    """A placement group of these bundles. Raises RunError if Ray cannot reserve them in time."""
    placement = placement_group(bundles, strategy=strategy)
    if not placement.wait(timeout_seconds=RESERVE_SECONDS):
        raise RunError(f"Ray could not reserve {bundles} within {RESERVE_SECONDS} s: another run may hold them")
    return placement


def on_one_node(resource: str) -> int:
    """How many GPUs or CPUs the node has that has most of them."""
    return max(int(node["Resources"].get(resource, 0)) for node in ray.nodes() if node["Alive"])


def by_node(placement) -> list[int]:
    """The indices of this placement group's bundles, node by node, those of nodes with few bundles first. Single actors
    come first, and so take what an engine would not fit into."""
    node_of = placement_group_table(placement)["bundles_to_node_id"]
    bundles_of = Counter(node_of.values())
    return sorted(node_of, key=lambda bundle: (bundles_of[node_of[bundle]], node_of[bundle], bundle))


def seat(placement, bundle: int, workers: list[int] | None = None, **resources) -> Seat:
    """The seat of an actor that gets these resources in this bundle. `workers` are the bundles of the processes that it
    starts, if these use others."""
    strategy = PlacementGroupSchedulingStrategy(placement, bundle)
    return Seat({"scheduling_strategy": strategy, "num_cpus": 0, **resources}, workers or [bundle])


def engine_seat(placement, workers: list[int], gpu_share: float) -> Seat:
    """The seat of an engine's actor, whose workers use these bundles. It reserves this share of one worker's GPU. Ray
    cannot give an actor shares of several: such an engine reserves none, and asks for their names (`gpus_of`)."""
    return seat(placement, workers[0], workers, num_gpus=gpu_share if len(workers) == 1 else 0)


class ActorGroup:
    """Ray actors of one class, one on each of these seats. The class is called with the actor's number."""

    def __init__(self, session: RaySession, name: str, cls: type, seats: list[Seat]):
        self.session = session
        names = [f"{name} {i}" for i in range(len(seats))] if len(seats) > 1 else [name]
        self.seats = dict(zip(names, seats, strict=True))
        is_async = inspect.getmembers(cls, inspect.iscoroutinefunction)
        remote_class = ray.remote(max_concurrency=MAX_CALLS if is_async else 1)(cls)
        numbered_seats = enumerate(self.seats.items())
        self.actors = {name: remote_class.options(**seat.options).remote(i) for i, (name, seat) in numbered_seats}
        self.session.actors |= self.actors

    def __len__(self) -> int:
        return len(self.seats)

    @property
    def bundles(self) -> list[tuple[list[int]]]:
        """The bundles of each actor, as `begin` takes them for `each`."""
        return [(seat.bundles,) for seat in self.seats.values()]

    def begin(self, method: Callable, *args, each: list[tuple] | None = None) -> dict[str, ray.ObjectRef]:
        """Call this method of the class on every actor, with `args` and then, if `each` is given, the actor's own.
        Returns the calls by actor, as `RaySession.wait` takes them."""
        if len(self) > 1:
            args = [ray.put(arg) for arg in args]  # so a large one travels only once to each node
        each = each or [()] * len(self)
        calls = {
            name: getattr(actor, method.__name__).remote(*args, *more)
            for (name, actor), more in zip(self.actors.items(), each, strict=True)
        }
        for name, call in calls.items():
            self.session.timeline.begin(call, name, method.__name__)
        return calls

    def call(self, phase: str, method: Callable, *args, each: list[tuple] | None = None) -> list:
        """As `begin`, and wait, in this phase of the run. Returns the results in the order of the actors."""
        return self.session.wait(phase, self.begin(method, *args, each=each))[0]

    def agreed(self, phase: str, method: Callable, *args, each: list[tuple] | None = None):
        """As `call`, for a method that returns the same on all actors, such as a learner's ranks. Returns that."""
        return self.call(phase, method, *args, each=each)[0]


class SyncedModel(Protocol):
    """What a sync needs of a learner's model."""

    device: torch.device

    def named_tensors(self) -> Mapping[str, torch.Tensor]:
        """The weights on `device`, all that the model's checkpoint has, by its names and in its shapes. The engine gets
        them in its own dtype. Return the same tensors each time: then a sync has no new copies to plan.

        With several ranks, the tensors may be DTensors that are sharded by rows."""


class LearnerProtocol(Protocol):
    """What train_grpo.py calls of its learner. A trainer of your own with these methods takes GRPOLearner's place
    there: docs/extending.md has one.

    With several trainer ranks, each has a learner. All get the same calls, and return the same from `learn` and
    `mismatch`.
    """

    model: SyncedModel
    step: int  # learning steps done

    def remarks(self) -> str:
        """Lines to print at the start of a run."""

    def learn(self, rollouts: list[Rollout], proof_rollouts: list[Rollout]) -> dict[str, float | list[float]]:
        """Learn from B rollouts, `--group-size` of each prompt in a row, and add 1 to `step`. Returns metrics, of which
        the run's output shows "reward/mean" and "logprobs/mismatch". A list of B values, such as "advantage", goes to
        completions.jsonl instead.

        Raises MismatchError as `mismatch` does, before the weights change. With --max-staleness, B rollouts may have
        too few tokens of the last weights; then `proof_rollouts` have some, and are not learned from."""

    def release_memory(self) -> None:
        """Free what the next step can do without: engines on the same GPU want it."""

    def mismatch(self, rollouts: list[Rollout]) -> float:
        """The mean |Δ logprob|, in nats, between engine and learner, over the tokens that the engine sampled at
        `--temperature`, among those of a rollout's `sampling_mask` if it has one. It proves the last sync: raises
        MismatchError if it is more than rounding explains."""

    def save(self, folder: Path) -> None:
        """Write the model and its tokenizer in Hugging Face format to this folder, and what `load_state` needs."""

    def load_state(self, folder: Path) -> None:
        """Go on from the state, and the `step`, that `save` wrote there. The learner has been made with that model."""


class LearnerActor:
    """A Ray actor around one rank of a model, which may learn.

    Where models share a device (`shared`), each is on it for its turn, and in host memory the rest of the time. With
    `weights_stay`, only the optimizer's state moves.
    """

    shared = weights_stay = False

    def __init__(self, rank: int):
        self.rank = rank  # it loads no model yet: engines may have to start first, since vLLM measures the free memory
        self.model: Model | None = None
        self.learner: Learner | None = None

    def address(self) -> tuple[str, int]:
        """The address of this actor's node, and a free port there."""
        from vllm.utils.network_utils import get_open_port

        return ray.util.get_node_ip_address(), get_open_port()

    def join(
        self, address: tuple[str, int], ranks: int, device: str, exact: str = "off", at_once: int = 1
    ) -> torch.device:
        """Join the other ranks of this model. The first one listens at `address`. Returns this rank's device.

        `exact` is the value of --exact. On CPU, all ranks of the models that compute `at_once` share the cores.
        """
        if exact != "off":
            match_engine()
        if device == "cpu":  # beside a GPU, Ray's one thread is faster: waking others takes longer than they save
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // (ranks * at_once)))
        rank_device = torch.device(device, 0)  # Ray makes one GPU visible
        join_ranks(*address, self.rank, ranks, rank_device)
        return rank_device

    def gpu(self) -> GPU | None:
        """What is known of this actor's GPU; None on CPU."""
        return GPU.here()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """A context in which the model is on its device."""
        moves = self.shared and not self.weights_stay
        if moves:
            self.model.module.to(self.model.device)
        yield
        if self.shared and self.learner:
            self.learner.release_memory(offload_optimizer=True)  # gradients would move with their weights
        if moves:
            self.model.module.to("cpu")
            self.model.named_tensors.views = {}  # they keep the GPU's memory
            self.model.release_memory()

    def memory(self) -> dict[str, float]:
        """Memory of this rank's GPU, in GB: the most that torch has reserved here since the last call ("trainer"), what
        all other processes take ("engine"), and the GPU's size ("gpu"). On CPU, {}."""
        if self.model.device.type == "cpu":
            return {}
        free, total = torch.cuda.mem_get_info()
        sizes = {"trainer": torch.cuda.max_memory_reserved(), "engine": total - free - torch.cuda.memory_reserved()}
        torch.cuda.reset_peak_memory_stats()
        return {name: size / 1e9 for name, size in (sizes | {"gpu": total}).items()}

    def resume(self, checkpoint: Path | None) -> tuple[int, str]:
        """Go on from this checkpoint's training state, if there is one. Returns the number of steps done, and lines to
        print about the learner."""
        self.model = self.learner.model
        if checkpoint:
            self.learner.load_state(checkpoint)
        return self.learner.step, self.learner.remarks()

    def mismatch(self, rollouts: list[Rollout]) -> float:
        return self.learner.mismatch(rollouts)

    def save(self, run_folder: Path) -> None:
        """Write a checkpoint. All ranks call this; each writes its part."""
        write_checkpoint(run_folder, self.learner.step, self.learner.save, self.rank)


@dataclass
class StepClock:
    """The seconds of each phase of a step and, with trainers that share GPUs with engines, the memory in it."""

    trainers: ActorGroup | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    phase_began: float = field(default_factory=time.perf_counter)

    def end(self, phase: str) -> None:
        """End a phase, and begin the next one. Its metrics are `time/PHASE`, in seconds, and on GPUs
        `memory/PHASE/trainer` and `memory/PHASE/engine`, in GB, of the GPU where it is most, and `memory/gpu`, the size
        of the smallest."""
        self.metrics[f"time/{phase}"] = time.perf_counter() - self.phase_began
        of_ranks = self.trainers.call("measuring", LearnerActor.memory) if self.trainers else []
        for memory in filter(None, of_ranks):
            for name in ("trainer", "engine"):
                metric = f"memory/{phase}/{name}"
                self.metrics[metric] = max(memory[name], self.metrics.get(metric, 0.0))
            self.metrics["memory/gpu"] = min(memory["gpu"], self.metrics.get("memory/gpu", memory["gpu"]))
        self.phase_began = time.perf_counter()  # measuring is in no phase
