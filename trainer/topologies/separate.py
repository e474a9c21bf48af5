"""Trainer ranks on some GPUs and engines on others, NCCL between them. Without a GPU, all are on the CPU, with gloo."""

from dataclasses import replace

import ray

from ..errors import RunError
from ..rollouts.options import EngineSetting
from ..rollouts.sampling import in_parts
from ..run.actors import Seat, by_node, engine_seat, reserve, seat
from .base import Topology
from .link import TrainerActor, connect_by_group

MEMORY_SHARE = 0.8  # of its GPUs' memory that an engine takes unless a flag says it


class Separate(Topology):
    """Each trainer rank and each engine worker has a GPU of its own."""

    gpu_share = 1.0  # of its GPU, for an engine with one worker

    def place(self) -> None:
        args, gpus = self.args, int(ray.cluster_resources().get("GPU", 0))
        tp = args.engine.tensor_parallel_size or 2
        trainers, engines = args.placement.trainers or 1, args.placement.engines or 1
        self.memory_share = args.engine.gpu_memory_utilization or MEMORY_SHARE
        args.engine = replace(args.engine, tensor_parallel_size=tp, gpu_memory_utilization=self.memory_share)
        args.placement = replace(args.placement, trainers=trainers, engines=engines)
        wanted = self.settle_gpus(trainers, engines * tp, gpus)
        self.device = "cuda" if gpus else "cpu"
        if gpus:
            self.placement, share = reserve([{"GPU": 1}] * wanted, "PACK"), {"num_gpus": 1}
            self.bundles = by_node(self.placement)
            if gpus > wanted:
                self.remark = self.remark or f"{gpus - wanted} GPUs stay unused: --trainers and --engines take more"
        else:
            resources = [{"CPU": 1 / trainers}] * trainers + [{"CPU": 1 / engines}] * engines
            self.placement, share = reserve(resources, "SPREAD"), {"num_cpus": 1 / trainers}
            self.bundles = list(range(wanted))  # a worker's is its number
            self.remark = f"no GPU: the trainer and a TP={tp} engine run on CPU, with gloo between them"
        self.trainer_seats = [seat(self.placement, bundle, **share) for bundle in self.bundles[:trainers]]
        self.engine_seats = self.seats(self.bundles[trainers : trainers + engines * tp], engines)

    def settle_gpus(self, trainers: int, workers: int, gpus: int) -> int:
        """How many of these GPUs the trainer's ranks and the engines' workers get. Raises RunError for too few GPUs."""
        wanted, tp = trainers + workers, self.args.engine.tensor_parallel_size
        if 0 < gpus < wanted:
            raise RunError(
                f"this topology wants {wanted} GPUs, {trainers} for the trainer and {tp} for each engine, and there are"
                f" {gpus}: lower --tensor-parallel-size, or use --topology shared"
            )
        return wanted

    def seats(self, bundles: list[int], engines: int) -> list[Seat]:
        """The seats of so many engines, whose workers are divided among these bundles."""
        parts = in_parts(bundles, engines)
        if self.device == "cuda":
            return [engine_seat(self.placement, workers, self.gpu_share) for workers in parts]
        # An engine's workers are processes of its actor; by their numbers, llm_options divides the cores among them.
        first, reserved = self.args.placement.trainers, self.args.placement.engines
        return [seat(self.placement, first + i % reserved, workers) for i, workers in enumerate(parts)]

    def start_actors(self, cls: type[TrainerActor], model: str) -> None:
        engines = self.args.placement.engines
        self.setting = EngineSetting(self.device, "WorkerExtension", engines, self.sequences(engines))
        super().start_actors(cls, model)

    def connect(self) -> None:
        connect_by_group(self.trainers, self.engines, self.args.engine.tensor_parallel_size)
        self.receive_arguments = [(self.args.run.timeout,)] * len(self.engines)
