"""A topology of a run: where trainer ranks and engines are, and how a step goes from one to the other."""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import ray
from annotated_types import Ge

from rlhf_utils import SyncReport

from ..flags import arg, setting
from ..learning.exact import GPU
from ..learning.rollout import Rollout
from ..rollouts.engine import EngineActor
from ..rollouts.options import EngineSetting
from ..run.actors import ActorGroup, LearnerActor, Seat, StepClock
from ..run.folder import RunFolder
from ..run.models import Models
from ..run.session import RaySession
from ..tasks.task import Task
from .link import SendingActor, TrainerActor, say_first_sync, sync
from .memory import ModelSize


@dataclass
class TopologyArguments:
    """Where trainers and engines run."""

    topology: Literal["shared", "separate", "servers"] | None = arg(
        None,
        help="trainers and engines share GPUs, or have GPUs of their own, or engines are vLLM's servers, which may die"
        " and come back (default: servers with --engine-url, separate with --max-staleness or --trainers, else shared)",
    )
    trainers: Annotated[int | None, Ge(1)] = arg(
        None, help="trainer ranks on GPUs of their own; FSDP2 shards the model over them (default: 1)"
    )
    engines: Annotated[int | None, Ge(1)] = arg(
        None,
        help="engines; the prompts of a step are divided among them (default: 1; shared: as many as the GPUs hold)",
    )
    engines_per_gpu: Annotated[int | None, Ge(1)] = setting(
        None,
        help="engines where there would be one, on shared GPUs, with a part of its prompts each: while one computes,"
        " another prepares its next step (default: 2 if each has one GPU and the model is small, else 1)",
    )
    sleep: Literal["auto", "kv", "weights", "none"] = arg(
        "auto",
        help="memory that engines on shared GPUs release while trainers learn: the KV cache's (kv), the weights' as"
        " well (weights), none, or the KV cache's unless trainer and engine fit together (auto)",
    )


class Topology:
    """Trainer ranks and engines of a run. A subclass says where they are, and how they connect."""

    by_nccl = True  # how weights travel
    frees_memory = False  # trainers leave memory to engines
    engine_class, engine_name = EngineActor, "engine"
    remark = ""  # for the user
    device: str
    trainer_seats: list[Seat]
    engine_seats: list[Seat]
    setting: EngineSetting
    memory_share: float  # of its GPUs' memory that an engine takes

    def __init__(self, args, task: Task, run: RunFolder, session: RaySession):
        """Reserve the devices. What is chosen here replaces what is None in `args`."""
        self.args, self.task, self.run, self.session = args, task, run, session
        self.level = "none"  # how engines sleep while trainers learn
        self.receive_arguments: list[tuple] = []  # of each engine's `receive_weights`
        self.place()

    def place(self) -> None:
        """Reserve the devices, and fill in what is not chosen."""
        raise NotImplementedError

    def start_actors(self, cls: type[TrainerActor], model: str) -> None:
        """Start the actors of trainer ranks and engines of this model. They import what they need, and load nothing."""
        self.trainers = ActorGroup(self.session, "trainer", cls, self.trainer_seats)
        self.engines = ActorGroup(self.session, self.engine_name, self.engine_class, self.engine_seats)
        self.preparing = self.engines.begin(EngineActor.prepare, self.device, each=self.engines.bundles)
        self.gpu: GPU | None = None
        if self.device == "cuda":
            self.size = ModelSize.of(model)
            self.gpu = self.trainers.call("starting", LearnerActor.gpu)[0]

    def start(self, models: Models) -> tuple[int, str, int]:
        """Start engines and trainers. Returns the number of steps done, lines to print, and the tokens that a prompt
        and its completion may have."""
        loading = self.load_trainers(models)
        loaded, lengths, _ = self.session.wait("starting", loading, self.start_engines(models.loaded), self.preparing)
        return *loaded[0], lengths[0]

    def load_trainers(self, models: Models) -> dict[str, ray.ObjectRef]:
        """Begin to load the trainer's ranks."""
        address = self.trainers.call("starting", LearnerActor.address)[0]
        options = (len(self.trainers), models, self.args, self.device, self.frees_memory)
        return self.trainers.begin(TrainerActor.load, address, *options)

    def start_engines(self, model: str) -> dict[str, ray.ObjectRef]:
        """Begin to start the engines."""
        self.settle_kv_cache()
        return self.engines.begin(EngineActor.start, *self.start_arguments(model), each=self.engines.bundles)

    def start_arguments(self, model: str) -> tuple:
        """What all engines are started with."""
        return model, replace(self.args.engine, gpu_memory_utilization=self.memory_share), self.setting, self.level

    def settle_kv_cache(self) -> None:
        """Reckon how large the engines' KV caches are to be, from their share of a GPU's memory."""
        if self.gpu:
            workers = self.args.engine.tensor_parallel_size
            kv_cache_bytes = self.size.kv_cache_bytes(self.memory_share * self.gpu.memory, workers)
            self.setting = replace(self.setting, kv_cache_bytes=kv_cache_bytes)

    def sequences(self, engines: int) -> int:
        """How many sequences one of so many engines generates at a time, at most."""
        task, ahead = self.task.args, self.args.ahead
        prompts = task.prompts_per_step
        if ahead.max_staleness:
            prompts = ahead.in_flight or 2 * prompts
        evaluated = len(self.task.eval_rows) * max(1, task.eval_samples) if task.eval_every else 0
        return math.ceil(max(prompts * self.args.sampling.group_size, evaluated) / engines)

    def connect(self) -> None:
        """Connect trainers and engines, and sync once: now the engines serve the trainer's weights."""
        raise NotImplementedError

    def first_sync(self, steps_done: int) -> None:
        """Sync, and say what was sent."""
        say_first_sync(self.run, self.sync(steps_done), self.engines)
        if self.args.engine.quantization:
            self.run.say(f"engine weights by torchao's {self.engines.agreed('starting', EngineActor.quantized_by)}")
            self.compare()

    def rest(self) -> dict[str, ray.ObjectRef]:
        """Begin to have the engines sleep until the next sync, unless they are to go on for later steps."""
        if self.args.ahead.max_staleness:
            return {}
        resting = self.engines.begin(EngineActor.sleep, self.level)
        if self.level == "none":
            return resting
        self.session.wait("sleeping", resting)  # the trainers need the memory
        return {}

    def learn(self, rollouts: list[Rollout], proof_rollouts: list[Rollout], clock: StepClock) -> dict[str, float]:
        """Have all ranks do one learning step, while engines rest or go on for later steps. Returns its metrics."""
        resting = self.rest()
        if self.level != "none":
            clock.end("sleep")
        learning = self.trainers.begin(TrainerActor.learn, rollouts, proof_rollouts, self.level != "none")
        learned, _ = self.session.wait("learning", learning, resting)
        clock.end("train")
        return learned[0]

    def sync(self, version: int) -> SyncReport:
        """Send the trainer's weights, of this version, to all engines, which prove that they serve them."""
        return sync(self.trainers, self.engines, version, self.receive_arguments)

    def after_step(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """More metrics of this step, which has these."""
        return {}

    def clock(self) -> StepClock:
        """A clock for the phases of a step."""
        return StepClock()

    def compare(self) -> None:
        """Send the weights again, and have the engines compare their quantized weights with them: raises
        WeightSyncError if one is off by more than rounding."""
        comparing = self.trainers.begin(SendingActor.compare_weights)
        taking_part = self.engines.begin(EngineActor.compare_weights)
        weights = self.session.wait("comparing", comparing, taking_part)[0][0]
        self.run.say(f"{weights} quantized weights are what was sent, but for rounding")
