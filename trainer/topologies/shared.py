"""Trainer ranks and engines on the same GPUs, CUDA IPC between them. Without a GPU, they share the CPU's memory."""

from dataclasses import replace

import ray

from weight_sync.groups import refuse_expandable_segments

from ..errors import RunError
from ..rollouts.options import EngineSetting
from ..run.actors import StepClock, engine_seat, on_one_node, reserve, seat
from ..run.models import Models
from .base import Topology
from .link import TrainerActor, connect_by_memory
from .memory import ModelSize

MEMORY_SHARE = 0.4  # of a GPU's memory that its engines take unless a flag says it
GPU_SHARE = 0.4  # the share of a GPU that a trainer rank reserves, and that all engines with one worker there do
SPARE_SHARE = 0.1  # the share of a GPU's memory that stays free where trainer and engine are both awake
SMALL_MODEL = 1e9  # parameters, below which a GPU waits for vLLM's Python in half of a decode step (seen with 0.5e9)


class Shared(Topology):
    """Each GPU has a trainer rank and a worker of one or more engines. They compute in turn.

    The engines start before trainers load if vLLM measures the free memory, or if there is no room for both. Unless
    trainer and engine fit together, engines release memory while trainers learn.
    """

    by_nccl = False
    frees_memory = True

    def place(self) -> None:
        args, gpus = self.args, on_one_node("GPU")  # a worker maps the memory of all ranks
        self.device = "cuda" if gpus else "cpu"
        if gpus:
            refuse_expandable_segments()
        tp = args.engine.tensor_parallel_size or (2 if gpus and gpus % 2 == 0 else 1)
        engines = args.placement.engines or max(1, (gpus or 1) // tp)  # without a GPU, one starts soonest
        wanted, available = engines * tp, gpus or on_one_node("CPU")
        if wanted > available:
            raise RunError(
                f"--topology shared wants {wanted} {'GPUs' if gpus else 'CPU cores'} of one node, for the TP={tp}"
                f" workers of {engines} engines, and there are {available}: lower --engines or --tensor-parallel-size"
            )
        sleep = args.placement.sleep if gpus else "none"  # on CPU, vLLM has no sleep mode
        args.placement, self.level = replace(args.placement, engines=engines, sleep=sleep), sleep
        memory = args.engine.gpu_memory_utilization or MEMORY_SHARE
        args.engine = replace(args.engine, tensor_parallel_size=tp, gpu_memory_utilization=memory)
        self.placement = reserve([{"GPU": 1, "CPU": 0} if gpus else {"CPU": 1}] * wanted, "STRICT_PACK")
        self.bundles = list(range(wanted))
        share = {"num_gpus": GPU_SHARE} if gpus else {"num_cpus": 1}
        self.trainer_seats = [seat(self.placement, bundle, **share) for bundle in self.bundles]
        self.remark = "" if gpus else "no GPU: all on CPU, where vLLM has no sleep mode: engines stay awake"

    def start_actors(self, cls: type[TrainerActor], model: str) -> None:
        args, tp = self.args, self.args.engine.tensor_parallel_size
        per_gpu = args.placement.engines_per_gpu or self._engines_per_gpu(model)
        args.placement = replace(args.placement, engines_per_gpu=per_gpu)
        share, engines = GPU_SHARE / per_gpu if self.device == "cuda" else 0, args.placement.engines * per_gpu
        self.memory_share = args.engine.gpu_memory_utilization / per_gpu
        options = {"enable_sleep_mode": self.level != "none"}
        sequences = self.sequences(engines)
        self.setting = EngineSetting(self.device, "ColocateWorkerExtension", engines, sequences, options=options)
        engine_bundles = [self.bundles[begin : begin + tp] for begin in range(0, len(self.bundles), tp)]
        self.engine_seats = [engine_seat(self.placement, workers, share) for workers in engine_bundles] * per_gpu
        super().start_actors(cls, model)

    def start(self, models: Models) -> tuple[int, str, int]:
        self.settle_kv_cache()
        vllm_measures = self.gpu and not self.setting.kv_cache_bytes  # the free memory: trainers load afterwards
        if not vllm_measures and (self.level == "none" or self._loads_beside()):
            return super().start(models)
        starting = self.start_engines(models.loaded), self.preparing
        lengths = self.session.wait("starting", *starting)[0]  # and sleep, before trainers load
        loaded = self.session.wait("loading", self.load_trainers(models))[0]
        return *loaded[0], lengths[0]

    def start_engines(self, model: str) -> dict[str, ray.ObjectRef]:
        if self.setting.kv_cache_bytes or not self.gpu:
            return super().start_engines(model)
        # vLLM measures the free memory, so those of a GPU start one after another.
        starting: dict[str, ray.ObjectRef] = {}
        last: dict[int, ray.ObjectRef] = {}  # that starts on a GPU
        for (name, actor), (bundles,) in zip(self.engines.actors.items(), self.engines.bundles, strict=True):
            starting[name] = actor.start.remote(*self.start_arguments(model), bundles, last.get(bundles[0]))
            last[bundles[0]] = starting[name]
            self.session.timeline.begin(starting[name], name, "start")
        return starting

    def connect(self) -> None:
        handles = connect_by_memory(self.run, self.trainers, self.engines, self.args.placement.engines_per_gpu)
        self.receive_arguments = [(*of_engine, self.args.run.timeout) for of_engine in handles]

    def first_sync(self, steps_done: int) -> None:
        super().first_sync(steps_done)
        self.first_step = steps_done + 1

    def clock(self) -> StepClock:
        return StepClock(self.trainers)

    def after_step(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Settles how engines sleep from now on. With --sleep auto: not at all as long as, by the metrics of memory,
        trainer and engine fit together with a tenth of each GPU to spare. Completions may grow, and the memory to learn
        from them. Once they do not fit: "kv", for good."""
        # The first step makes Adam's moments.
        if self.args.placement.sleep == "auto" and self.level != "kv" and step > self.first_step:
            trainer, engine, gpu = (metrics[f"memory/{name}"] for name in ("train/trainer", "rollout/engine", "gpu"))
            level = "none" if trainer + engine <= (1 - SPARE_SHARE) * gpu else "kv"
            if level != self.level:
                self.level = level
                reason = f"learning takes {trainer:.1f} GB and an engine awake {engine:.1f} GB of {gpu:.1f}"
                self.run.say(f"--sleep {level} from now on: {reason}")
        return {}

    def _loads_beside(self) -> bool:
        """Whether trainers can load while engines are awake."""
        return self.size.loads_beside(self.args.engine.gpu_memory_utilization * self.gpu.memory, self.gpu.memory)

    def _engines_per_gpu(self, model: str) -> int:
        """How many engines there are on each GPU unless a flag says it. Says why if there are more than one."""
        if self.device == "cpu" or self.args.engine.tensor_parallel_size > 1:
            return 1
        parameters = ModelSize.of(model).parameters
        if parameters >= SMALL_MODEL:
            return 1
        size = f"{parameters / 1e6:.0f} million parameters"
        self.run.say(f"two engines per GPU: with {size}, one engine would often leave its GPU idle between steps")
        return 2
