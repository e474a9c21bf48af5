"""A topology of train_grpo.py: where trainer ranks and engines run, and how a step goes from one to the other."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from rlhf_utils import Comparison, SyncReport, WeightSyncError

from ..flags import arg
from ..learning.rollout import Rollout
from ..rollouts.engine import EngineActor
from ..rollouts.options import EngineSetting
from ..run.actors import ActorGroup, LearnerActor, Seat, StepClock
from ..run.checkpoint import Models
from ..run.folder import RunFolder
from ..run.session import RaySession
from .link import SendingActor, TrainerActor, say_first_sync, sync


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
    engines_per_gpu: Annotated[int | None, Ge(1)] = arg(
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
    remark = ""  # for the user
    device: str
    trainer_seats: list[Seat]
    engine_seats: list[Seat]
    setting: EngineSetting

    def __init__(self, args, run: RunFolder, session: RaySession):
        """Reserve the devices. What is chosen here replaces what is None in `args`."""
        self.args, self.run, self.session = args, run, session
        self.level = "none"  # how engines sleep while trainers learn
        self.receive_arguments: list[tuple] = []  # of each engine's `receive_weights`
        self.place()

    def place(self) -> None:
        """Reserve the devices, and fill in what is not chosen."""
        raise NotImplementedError

    def start_trainers(self, cls: type[TrainerActor]) -> ActorGroup:
        """Start the trainer's ranks, which load no model yet."""
        self.trainers = ActorGroup(self.session, "trainer", cls, self.trainer_seats)
        return self.trainers

    def load_trainers(self, models: Models) -> dict:
        """Begin to load the trainer's ranks."""
        address = self.trainers.call_rank_0("starting", LearnerActor.address)
        ranks = len(self.trainers)
        return self.trainers.begin(TrainerActor.load, address, ranks, models, self.args, self.device, self.frees_memory)

    def start(self, models: Models) -> tuple[int, str, int]:
        """Start engines and trainers. Returns the number of steps done, lines to print, and the tokens that a prompt
        and its completion may have."""
        self.engines = ActorGroup(self.session, "engine", EngineActor, self.engine_seats)
        loading = self.load_trainers(models)
        engine = (models.loaded, self.args.engine, self.setting, self.level)
        starting = self.engines.begin(EngineActor.start, *engine, each=self.engines.bundles)
        loaded, lengths = self.session.wait("starting", loading, starting)
        return *loaded[0], lengths[0]

    def connect(self) -> None:
        """Connect trainers and engines, and sync once: now the engines serve the trainer's weights."""
        raise NotImplementedError

    def first_sync(self, steps_done: int) -> None:
        """Sync, and say what was sent."""
        say_first_sync(self.run, self.sync(steps_done), self.engines)
        if self.args.engine.quantization:
            self.run.say(f"engine weights by torchao's {self.engines.agreed('starting', EngineActor.quantized_by)}")
            self.compare(must_change=False)

    def rest(self) -> dict:
        """Begin to have the engines sleep; they drop what was computed with weights that will be old."""
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

    def compare(self, must_change: bool) -> None:
        """Send the weights again. The engines compare their quantized weights with them.

        Raises WeightSyncError if one is off by more than rounding, or if none has changed since the last comparison
        although the trainer has learned: `must_change`.
        """
        comparing = self.trainers.begin(SendingActor.compare_weights)
        taking_part = self.engines.begin(EngineActor.compare_weights)
        comparison: Comparison = self.session.wait("comparing", comparing, taking_part)[0][0]
        self.run.say(
            f"{comparison.weights} quantized weights are what was sent, but for rounding; scales and values of"
            f" {comparison.changed} have changed since the last comparison"
        )
        if must_change and not comparison.changed:
            raise WeightSyncError("the trainer has learned, but none of the engine's quantized weights has changed")
