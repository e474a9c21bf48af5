"""A trainer on a GPU, and vLLM's servers as engines: those at --engine-url, wherever they are."""

from dataclasses import replace

import ray

from rlhf_utils import SyncReport

from ..errors import RunError
from ..run.actors import reserve, seat
from .base import Topology
from .server_pool import ServerPool


class Servers(Topology):
    """One trainer, and a pool that speaks with all servers. It starts none, and ends none."""

    engine_class, engine_name = ServerPool, "engines"

    def place(self) -> None:
        args = self.args
        if not args.servers.engine_url:
            raise RunError("--topology servers: --engine-url is missing: where is a server of vLLM?")
        gpus = int(ray.cluster_resources().get("GPU", 0))
        args.engine = replace(args.engine, tensor_parallel_size=1)  # servers have their own
        self.device, resource = ("cuda", "GPU") if gpus else ("cpu", "CPU")
        placement = reserve([{resource: 1}], "PACK")
        self.trainer_seats = [seat(placement, 0, **{f"num_{resource.lower()}s": 1})]
        self.engine_seats = [seat(placement, 0, num_gpus=0)]
        self.remark = "" if gpus else "no GPU: the trainer runs on CPU, with gloo between it and the servers"

    def start_engines(self, model: str) -> dict[str, ray.ObjectRef]:
        args = self.args
        pool = (model, args.servers, args.engine, args.run.timeout)
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
