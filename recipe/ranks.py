"""Ray actors of several models, each of one or more ranks, that may share their devices and then take turns."""

import gc
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
import torch

from weight_sync.groups import device_id_of

from .learner import Learner
from .memory import rank_memory
from .ray_session import RaySession
from .sharding import join_ranks

AT_ONCE = 2  # models that share the cores of a CPU: policy and critic learn at the same time (three models score)


class Rank:
    """What the Ray actors of all models have in common: each is one rank of a model.

    Where models share a device, each is on it only during a call, and otherwise in host memory. With `weights_stay`,
    only the optimizer's state moves.
    """

    learner_class: type[Learner]
    weights_stay = False
    learns = False  # False: frozen, without adapters

    def __init__(self, rank: int):
        self.rank = rank  # loads nothing yet: others start first

    def address(self) -> tuple[str, int]:
        from vllm.utils.network_utils import get_open_port

        return ray.util.get_node_ip_address(), get_open_port()

    def load(
        self, address: tuple | None, ranks: int, path: str, state: Path | None, args, device: str, shared: bool
    ) -> None:
        """Join the other ranks (the first one is at `address`; None: there is none) and load, with the training state
        in this folder, if any."""
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // (AT_ONCE * ranks)))  # Ray sets one thread
        here = torch.device(device, 0)  # Ray makes one GPU visible
        if address:
            join_ranks(*address, self.rank, ranks, here)
        self.learner = self.learner_class(path, args, here, args.seed, args.steps, self.learns)
        self.shared = shared
        if state:
            self.learner.load_state(state)
        with self._turn():
            pass  # the next model needs the memory that loading took
        gc.freeze()  # what is here now stays: `release_memory` need not look through it at every call

    def run(self, method: str, *args):
        """Call this method of the learner."""
        with self._turn():
            return getattr(self.learner, method)(*args)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """The model is on its device within."""
        learner, moves = self.learner, self.shared and not self.weights_stay
        if moves:
            learner.model.to(learner.device)
        yield
        if moves:
            learner.optimizer.zero_grad(set_to_none=True)  # gradients would move with their weights
            learner.model.to("cpu")
        if self.shared:
            learner.release_memory(offload_optimizer=True)

    def device_id(self) -> str:
        return device_id_of(self.learner.device)

    def memory(self) -> dict[str, float]:
        return rank_memory(self.learner.device)


class Ranks:
    """The actors of these classes, by name. `places` has a bundle and Ray options for each rank of each of them."""

    def __init__(self, session: RaySession, classes: dict[str, type[Rank]], places: dict[str, list], shared: bool):
        self.session, self.shared = session, shared
        self.actors = {
            name: [ray.remote(cls).options(**options).remote(rank) for rank, (_, options) in enumerate(places[name])]
            for name, cls in classes.items()
        }
        session.actors |= {f"{name}{i}": actor for name, own in self.actors.items() for i, actor in enumerate(own)}

    def load(self, paths: dict[str, str], args, device: str, states: dict[str, Path]) -> None:
        """Load each model from its path, in turn if they share devices, and the training states of some."""
        calls = {name: own[0].address.remote() for name, own in self.actors.items() if len(own) > 1}
        addresses = dict(zip(calls, self.session.wait("starting", **calls), strict=True))
        more = args, device, self.shared
        self._in_turn(
            "starting",
            (
                self.each(name, "load", addresses.get(name), len(own), paths[name], states.get(name), *more)
                for name, own in self.actors.items()
            ),
        )

    def each(self, name: str, method: str, *args) -> dict[str, ray.ObjectRef]:
        """Call a method of each actor of a model. Returns the calls by actor, as `RaySession.wait` takes them."""
        return {f"{name}{i}": getattr(actor, method).remote(*args) for i, actor in enumerate(self.actors[name])}

    def call(self, phase: str, *args, **methods: str) -> list:
        """Call these methods of the learners. Returns the first rank's result, for each model that there is. They run
        at the same time or, if the models share devices, one after the other."""
        put = [ray.put(arg) for arg in args]
        there = ((name, method) for name, method in methods.items() if name in self.actors)
        return self._in_turn(phase, (self.each(name, "run", method, *put) for name, method in there))

    def _in_turn(self, phase: str, calls: Iterable[dict[str, ray.ObjectRef]]) -> list:
        """The first result of each of these calls, which begin when they are drawn."""
        if self.shared:
            return [self.session.wait(phase, **refs)[0] for refs in calls]
        begun = list(calls)
        every = {name: ref for refs in begun for name, ref in refs.items()}
        results = dict(zip(every, self.session.wait(phase, **every), strict=True))
        return [results[next(iter(refs))] for refs in begun]
