"""A trainer on a GPU, and vLLM's servers as engines: those at --engine-url, or servers that this run starts."""

from dataclasses import replace

import ray

from rlhf_utils import SyncReport

from ..errors import RunError
from ..rollouts.options import EngineSetting
from ..run.actors import reserve, seat
from .base import Topology
from .server_pool import ServerPool

MEMORY_SHARE = 0.8  # of its GPUs' memory that a server of the run's own takes unless a flag says it


class Servers(Topology):
    """The servers are anywhere. Those that this run starts have GPUs of their own, on one machine, and end with it."""

    engine_class, engine_name = ServerPool, "engines"

    def place(self) -> None:
        args, gpus = self.args, int(ray.cluster_resources().get("GPU", 0))
        tp, engines = args.engine.tensor_parallel_size or 2, args.placement.engines or 1
        self.memory_share = args.engine.gpu_memory_utilization or MEMORY_SHARE
        args.engine = replace(args.engine, tensor_parallel_size=tp, gpu_memory_utilization=self.memory_share)
        args.placement = replace(args.placement, engines=engines)
        servers = 0 if args.servers.engine_url else engines
        wanted = 1 + servers * tp
        if 0 < gpus < wanted:
            raise RunError(
                f"this topology wants {wanted} GPUs, 1 for the trainer and {tp} for each engine, and there are {gpus}:"
                " lower --tensor-parallel-size, or start servers elsewhere and give their --engine-url"
            )
        self.device = "cuda" if gpus else "cpu"
        resource, server_gpus = "GPU" if gpus else "CPU", wanted - 1 if gpus else 0
        server_bundle = [{resource: server_gpus or 1}] if servers else []
        placement = reserve([{resource: 1}, *server_bundle], "PACK")
        self.trainer_seats = [seat(placement, 0, **{f"num_{resource.lower()}s": 1})]
        self.engine_seats = [seat(placement, 1 if servers else 0, num_gpus=server_gpus)]
        options = {"enable_scale_out": True} | ({"distributed_executor_backend": "mp"} if gpus else {})
        self.setting = EngineSetting(self.device, "WorkerExtension", engines, options=options)
        if not gpus:
            self.remark = (
                "no GPU: the trainer runs on CPU, and so do the servers that it starts, with gloo between them"
            )

    def start_engines(self, model: str) -> dict[str, ray.ObjectRef]:
        pool = (model, self.args.servers, self.args.engine, self.setting, self.args.run.timeout)
        return self.engines.begin(ServerPool.start, *pool, *self.trainers.actors.values())

    def connect(self) -> None:
        """Nothing yet: the first sync connects each server."""

    def first_sync(self, steps_done: int) -> None:
        report = self.engines.agreed("connecting", ServerPool.begin)
        sent = f"{report.tensors} tensors, {report.nbytes / 1e9:.3f} GB"
        self.run.say(f"first sync: {sent}; from now on by {report.loader}")

    def sync(self, version: int) -> SyncReport:
        return self.engines.agreed("syncing", ServerPool.take_weights)

    def after_step(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        return self.engines.agreed("syncing", ServerPool.metrics)
