"""Trainer ranks on some GPUs and engines on others, NCCL between them. Without a GPU, all are on the CPU, with gloo."""

from dataclasses import replace

import ray

from ..errors import RunError
from ..rollouts.options import EngineSetting
from ..run.actors import by_node, engine_seat, reserve, seat
from .base import Topology
from .link import TrainerActor, connect_by_group

MEMORY_SHARE = 0.8  # of its GPUs' memory that an engine takes unless a flag says it


class Separate(Topology):
    """Each trainer rank and each engine worker has a GPU of its own."""

    def place(self) -> None:
        args, gpus = self.args, int(ray.cluster_resources().get("GPU", 0))
        tp = args.engine.tensor_parallel_size or 2
        trainers, engines = args.placement.trainers or 1, args.placement.engines or 1
        self.memory_share = args.engine.gpu_memory_utilization or MEMORY_SHARE
        args.engine = replace(args.engine, tensor_parallel_size=tp, gpu_memory_utilization=self.memory_share)
        args.placement = replace(args.placement, trainers=trainers, engines=engines)
        wanted = trainers + engines * tp
        if 0 < gpus < wanted:
            raise RunError(
                f"this topology wants {wanted} GPUs, {trainers} for the trainer and {tp} for each engine, and there are"
                f" {gpus}: lower --tensor-parallel-size, or use --topology shared"
            )
        self.device = "cuda" if gpus else "cpu"
        if gpus:
            placement = reserve([{"GPU": 1}] * wanted, "PACK")
            bundles = by_node(placement)  # so that an engine spans as few nodes as possible
            self.trainer_seats = [seat(placement, bundle, num_gpus=1) for bundle in bundles[:trainers]]
            engine_bundles = [bundles[begin : begin + tp] for begin in range(trainers, wanted, tp)]
            self.engine_seats = [engine_seat(placement, workers, 1) for workers in engine_bundles]
            if gpus > wanted:
                self.remark = f"{gpus - wanted} GPUs stay unused: --trainers and --engines take more"
            return
        placement = reserve([{"CPU": 1 / trainers}] * trainers + [{"CPU": 1 / engines}] * engines, "SPREAD")
        self.trainer_seats = [seat(placement, bundle, num_cpus=1 / trainers) for bundle in range(trainers)]
        # An engine's workers are processes of its actor; by their numbers, llm_options divides the cores among them.
        engine_workers = [list(range(begin, begin + tp)) for begin in range(trainers, wanted, tp)]
        self.engine_seats = [seat(placement, trainers + i, workers) for i, workers in enumerate(engine_workers)]
        self.remark = f"no GPU: the trainer and a TP={tp} engine run on CPU, with gloo between them"

    def start_actors(self, cls: type[TrainerActor], model: str) -> None:
        engines = self.args.placement.engines
        self.setting = EngineSetting(self.device, "WorkerExtension", engines, sequences=self.sequences(engines))
        super().start_actors(cls, model)

    def connect(self) -> None:
        connect_by_group(self.trainers, self.engines, self.args.engine.tensor_parallel_size)
        self.receive_arguments = [(self.args.run.timeout,)] * len(self.engines)
