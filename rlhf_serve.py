"""RLHF with engines as services: `vllm serve` on any machines. A server may die or hang, and come back.

    python rlhf_serve.py --engine-url http://a:8000 --engine-url http://b:8000 --model NAME    # see docs/cluster.md
    python rlhf_serve.py                             # starts a server itself: 3 GPUs, trainer + TP=2 engine
    python rlhf_serve.py --engines 2 --tensor-parallel-size 1     # starts two; no GPU: a small built-in model, gloo

    GPU 0        trainer actor: fp32 master weights, GRPO (trainer/learning/grpo.py), a WeightSender for each server
    CPU          engines actor: speaks HTTP with all servers (trainer/rollouts/replicas.py)
    elsewhere    vLLM's servers, extended by rlhf_utils.WorkerExtension; on GPU 0: by rlhf_utils.ColocateWorkerExtension

1. Place: one Ray placement group, for the trainer and for the servers that this run starts.
2. Connect the trainer with each server in a group of their own, and sync once: now all serve the trainer's weights.
3. Each step: take rollouts, learn, sync, as in rlhf_async.py. If a server is lost, only its group breaks, and the other
   servers get its unfinished requests, with the same seeds. If it answers again at its URL, whoever has started it, it
   joins a new group and gets the weights. Once it has proven that it serves them, it gets work. With no server left,
   the run waits for one.
4. Generate once more to prove the last sync, and print.

The last line is `OK: ...`. After an error it is `error: ...`, and the exit status is not 0.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import ray
import torch

from rlhf_utils import SharedMemoryChannel, SyncReport, WeightSender, stateless_init_process_group
from trainer.errors import RunError
from trainer.flags import arg, section
from trainer.learning.grpo import GRPOConfig, GRPOLearner
from trainer.learning.learner import Proof
from trainer.learning.rollout import Rollout
from trainer.rollouts.async_rollouts import AsyncArguments, RolloutsAhead
from trainer.rollouts.evaluation import evaluate
from trainer.rollouts.exact_engine import ExactEngineArguments, settle_exactness
from trainer.rollouts.replicas import Replica, ReplicaError, ReplicaPool, ServeArguments
from trainer.rollouts.reward_workers import RewardWorkers
from trainer.run.actors import ActorGroup, LearnerActor, Seat, StepClock, reserve, seat
from trainer.run.arguments import RunArguments, parse
from trainer.run.checkpoint import Models, choose_models
from trainer.run.folder import RunFolder
from trainer.run.session import RaySession, run_main
from trainer.tasks.task import TaskArguments, load_task
from trainer.tasks.tools import ToolArguments
from weight_sync.link import address_towards

MAX_MISMATCH = {"cpu": 1e-5, "cuda": 0.02}  # mean |Δ logprob| that rounding explains, in fp32 and bf16


@dataclass
class Arguments:
    """The flags of this script."""

    run: RunArguments = section(RunArguments)
    engine: ExactEngineArguments = section(ExactEngineArguments)
    servers: ServeArguments = section(
        ServeArguments, engines=arg(1, help="servers to start, all on one machine, if there is no --engine-url")
    )
    ahead: AsyncArguments = section(AsyncArguments)
    tools: ToolArguments = section(ToolArguments)
    task: TaskArguments = section(TaskArguments)
    learner: GRPOConfig = section(GRPOConfig)


class Engines(ReplicaPool):
    """A Ray actor that speaks with all servers. Many of its methods run at the same time."""

    async def start(self, model: str, args: Arguments, device: str, trainer: ray.actor.ActorHandle) -> int:
        self.trainer, self.timeout = trainer, args.run.timeout
        return await self.load(model, args.servers, args.engine, device)

    async def connect(self, replica: Replica) -> None:
        replica.arguments = ()
        if replica.shares_device:
            replica.arguments = (await self.trainer.share_memory.remote(replica.name),)
            return
        # The servers that this run has started listen on 127.0.0.1, maybe on another node than the trainer's.
        host = ray.util.get_node_ip_address() if self.servers else replica.host
        world_size = 1 + replica.workers
        address = await self.trainer.init_weight_update_group.remote(replica.name, host, world_size)
        await replica.rpc("init_weight_update_group", *address, 1, world_size)

    async def sync(self, replicas: list[Replica]) -> None:
        """Sync these servers at the same time: each pauses, receives, proves, gets the version's label, and resumes."""
        replicas = await self.together(replicas, Replica.pause)
        receiving = {
            replica: asyncio.ensure_future(
                replica.rpc("receive_weights", *replica.arguments, self.timeout, timeout=None)
            )
            for replica in replicas
        }
        # The trainer sends as soon as it is not learning.
        version, reports = await self.trainer.send_weights.remote([replica.name for replica in replicas])

        async def prove(replica: Replica) -> None:
            if isinstance(report := reports[replica.name], str):
                receiving[replica].cancel()
                raise ReplicaError(report)
            await replica.within_timeout(receiving[replica])
            if any(answer != "True" for answer in await replica.rpc("check_weights_changed")):
                raise ReplicaError("it does not serve what was sent")
            await replica.call("/update_weight_version", {"new_version": str(version)})  # while paused
            await replica.call("/resume")
            replica.begin_serving(report)

        await self.together(replicas, prove)


class Trainer(LearnerActor):
    """A Ray actor around the learner. It is rank 0 of a group with each server."""

    def load(self, address: tuple[str, int], models: Models, args: Arguments, device: str) -> tuple[int, str]:
        run, torch_device = args.run, self.join(address, 1, device, args.engine.exact)
        proof = Proof(MAX_MISMATCH[device], args.engine.exact, args.engine.tensor_parallel_size)
        self.learner = GRPOLearner(
            models.loaded, args.learner, torch_device, run.seed, steps=run.steps, initial=models.initial, proof=proof
        )
        self.senders, self.timeout, self.threads = {}, args.servers.engine_timeout, ThreadPoolExecutor(64)
        return self.resume(models.checkpoint)

    def init_weight_update_group(self, name: str, host: str, world_size: int) -> tuple[str, int]:
        """Begin to open a group with the server of this name. Returns the address where its workers join."""
        address, port = address_towards(host), self.address()[1]

        def join() -> WeightSender:
            group = stateless_init_process_group(address, port, 0, world_size, self.learner.model.device)
            return WeightSender(group, timeout=self.timeout)

        self.set_sender(name, join)  # in a thread, since `join` waits for the workers
        return address, port

    def share_memory(self, name: str) -> dict[str, str]:
        """Begin to share this device's memory with the server of this name. Returns the handle for its worker."""
        channel = SharedMemoryChannel(self.learner.model.device)
        self.set_sender(name, lambda: WeightSender(channel, timeout=self.timeout))
        return channel.handles

    def set_sender(self, name: str, make_sender: Callable[[], WeightSender]) -> None:
        """From now on, the server of this name gets its weights by the sender that this function makes in a thread."""
        if name in self.senders:
            self.threads.submit(lambda sender: sender.result().close(), self.senders.pop(name))
        self.senders[name] = self.threads.submit(make_sender)

    def send_weights(self, names: list[str]) -> tuple[int, dict[str, SyncReport | str]]:
        """Send to these servers at the same time. Returns the version of the weights and, for each server, a report or
        the reason why there is none."""
        weights = list(self.learner.model.named_tensors().items())

        def send(name: str) -> SyncReport | str:
            try:
                return self.senders[name].result(self.timeout).send_weights(weights)
            except (torch.OutOfMemoryError, torch.AcceleratorError):  # the trainer's own: no server is to blame
                raise
            except (RuntimeError, TimeoutError) as error:  # RuntimeError: WeightSyncError, and gloo's
                return str(error) or "its workers did not join their group"

        return self.learner.step, dict(zip(names, self.threads.map(send, names), strict=True))

    def learn(self, rollouts: list[Rollout], proof_rollouts: list[Rollout]) -> dict[str, float]:
        return self.learner.learn(rollouts, proof_rollouts)


def place(args: Arguments) -> tuple[str, list[Seat], list[Seat]]:
    """Reserve the topology. Returns the device, and the seats of the trainer and of the actor that starts servers."""
    gpus, tp = int(ray.cluster_resources().get("GPU", 0)), args.engine.tensor_parallel_size
    servers = 0 if args.servers.engine_url else args.servers.engines
    wanted = 1 + servers * tp
    if 0 < gpus < wanted:
        raise RunError(
            f"this topology wants {wanted} GPUs, 1 for the trainer and {tp} for each engine, and there are {gpus}:"
            " lower --tensor-parallel-size, or start servers elsewhere and give their --engine-url"
        )
    resource, server_gpus = "GPU" if gpus else "CPU", wanted - 1 if gpus else 0
    server_bundle = [{resource: server_gpus or 1}] if servers else []
    placement = reserve([{resource: 1}, *server_bundle], "PACK")
    trainer_seat = seat(placement, 0, **{f"num_{resource.lower()}s": 1})
    engines_seat = seat(placement, 1 if servers else 0, num_gpus=server_gpus)
    return "cuda" if gpus else "cpu", [trainer_seat], [engines_seat]


def main(args: Arguments) -> None:
    task = load_task(args.task, args.run.seed, args.run.steps, args.tools)
    task.refuse_images("servers get token ids alone")
    with RunFolder(args.run, Path(__file__).stem) as run, RaySession(args.run, run.progress) as session:
        # 1. Place
        device, trainer_seats, engine_seats = place(args)
        models, args.learner = choose_models(run.path, args.run, args.learner, device)
        task.tokenize(models.loaded, args.engine.max_model_len)
        if device == "cpu":
            run.say("no GPU: the trainer runs on CPU, and so do the servers that it starts, with gloo between them")
        run.say(f"model {models.checkpoint or models.initial}\nrun folder {run.path}")
        task.rewards = RewardWorkers(task.rewards, session)
        trainers = ActorGroup(session, "trainer", Trainer, trainer_seats)
        args.engine = settle_exactness(
            run, args.engine, args.learner, models.loaded, trainers, engine_url=args.servers.engine_url
        )
        engines = ActorGroup(session, "engines", Engines, engine_seats)
        address = trainers.call_rank_0("starting", Trainer.address)
        loading = trainers.begin(Trainer.load, address, models, args, device)
        starting = engines.begin(Engines.start, models.loaded, args, device, trainers.actors["trainer"])
        [(steps_done, remarks)], [max_model_len] = session.wait("starting", loading, starting)
        run.say(remarks + task.check_lengths(max_model_len, args.learner.max_tokens))

        # 2. Connect, and serve what the trainer holds
        report = engines.agreed("connecting", Engines.begin)
        run.say(f"first sync: {report.tensors} tensors, {report.nbytes / 1e9:.3f} GB; from now on by {report.loader}")
        run.start_metrics(steps_done, args)

        # 3. Take rollouts, learn, sync
        with RolloutsAhead(engines, task, args.ahead, args.learner, steps_done) as ahead:
            if not steps_done and args.task.eval_every:
                run.log_metrics(0, evaluate(engines, task, args.learner, 0))
            for step in range(steps_done + 1, args.run.steps + 1):
                clock = StepClock()
                batch = ahead.take(step)
                if args.learner.dynamic_sampling:
                    batch = ahead.resample(batch, step)
                proof_rollouts = ahead.proof(step, batch)
                clock.end("rollout")
                metrics = trainers.agreed("learning", Trainer.learn, batch.rollouts, proof_rollouts)
                clock.end("train")
                report = engines.agreed("syncing", Engines.take_weights)
                clock.end("sync")
                metrics |= clock.metrics | engines.agreed("syncing", Engines.metrics)
                metrics |= evaluate(engines, task, args.learner, step)
                if run.saves(step):
                    trainers.call("saving", Trainer.save, run.path)
                run.log_step(step, batch, report, metrics)

            # 4. Generate again, and prove the last sync
            batch = ahead.take(args.run.steps + 1)
        mismatch = trainers.agreed("proving", Trainer.mismatch, batch.rollouts)
        summary = run.summary(batch, mismatch)
    print(summary)


if __name__ == "__main__":
    run_main(main, parse(Arguments, __doc__))
