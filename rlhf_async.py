"""RLHF on separate GPUs, nobody waiting: the engine generates for the next steps while the trainer learns.

    python rlhf_async.py                             # 3 GPUs: facebook/opt-125m, trainer + TP=2 engine
    python rlhf_async.py --max-staleness 0           # on-policy: what rlhf.py does
    python rlhf_async.py                             # no GPU: a small built-in model, the same topology, gloo
    python rlhf_async.py --ray-address auto          # on a running Ray cluster

    GPU 0     trainer actor: fp32 master weights, GRPO (recipe/grpo.py), WeightSender (rlhf_utils.py)
    GPU 1..N  engine actor: vllm.AsyncLLM with N workers, each with rlhf_utils.WorkerExtension

1. Place: one Ray placement group, with a bundle for the trainer and one for each engine worker.
2. Connect trainer and workers, and sync once: now the engine serves the trainer's weights.
3. Each step: take rollouts, learn, sync. The engine generates all the time, except during a sync: unfinished
   completions go on with the new weights. vLLM labels every token with the version of its weights; no token is
   more than --max-staleness updates old when a step learns from it. Of the newest ones, the engine's log-probabilities
   must be the trainer's, or the run ends with an error; for older ones, the loss is weighted (recipe/objectives.py).
4. Generate once more to prove the last sync, and print.

The last line is `OK: ...`. After an error it is `error: ...`, and the exit status is not 0.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import ray
import torch
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from recipe.arguments import RunArguments, parse
from recipe.async_rollouts import AsyncArguments, InFlight, RolloutsAhead
from recipe.checkpoint import Models, choose_models, write_checkpoint
from recipe.engine import EngineArguments, llm_options
from recipe.errors import RunError
from recipe.grpo import GRPOConfig, GRPOLearner
from recipe.learner import Rollout
from recipe.ray_session import RaySession, die_with_children, run_main
from recipe.run_folder import RunFolder
from recipe.task import TaskArguments, load_task
from rlhf_utils import SyncReport, WeightSender, WeightSyncError, stateless_init_process_group

MAX_MISMATCH = {"cpu": 1e-5, "cuda": 0.02}  # mean |Δ logprob| that rounding explains, in fp32 and bf16


@dataclass
class Arguments(GRPOConfig, TaskArguments, EngineArguments, AsyncArguments, RunArguments):
    """What the command line sets."""


class Engine:
    """A Ray actor around vllm.AsyncLLM, many of whose methods run at one time. It reserves no GPU, as in rlhf.py."""

    def __init__(self, model: str, args: Arguments, device: str):
        bundles = range(1, 1 + args.tensor_parallel_size)  # bundle 0 is the trainer's
        options = {"worker_extension_cls": "rlhf_utils.WorkerExtension", "disable_log_stats": True}
        options |= {"scheduling_policy": "priority"}  # proofs and evaluations go before what has not begun
        options = llm_options(args, device, bundles, **options)
        from vllm import AsyncEngineArgs  # only now: llm_options has set its environment variables
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        # As vllm.LLM does: its default batches are larger.
        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model, **options), usage_context=UsageContext.LLM_CLASS)
        self.in_flight = InFlight(self.llm, args.in_flight or 2 * args.prompts_per_step)
        die_with_children()

    async def start(self) -> int:
        """Returns once the engine has started: the tokens that a prompt and its completion may have."""
        return self.llm.model_config.max_model_len

    async def sample(
        self, prompts: list[list[int]], args: Arguments, seed: int, first: int, evaluation: bool, waits: bool = False
    ) -> list[Rollout]:
        return await self.in_flight.sample(prompts, args, seed, first, evaluation, waits)

    async def init_weight_update_group(self, address: str, port: int, world_size: int) -> None:
        await self.llm.collective_rpc("init_weight_update_group", args=(address, port, 1, world_size))

    async def receive_weights(self, version: int) -> bool:
        """Take part in a sync, while generation pauses. Returns whether every worker serves exactly what was sent."""
        await self.in_flight.pause()
        for result in await self.llm.collective_rpc("receive_weights"):
            if "error" in result:
                raise WeightSyncError(result["error"])
        served = all(await self.llm.collective_rpc("check_weights_changed"))
        if served:
            await self.in_flight.resume(version)
        return served

    async def idle_share(self) -> float:
        return self.in_flight.idle_share

    async def shutdown(self) -> None:
        self.llm.shutdown()


class Trainer:
    """A Ray actor around the learner. It is rank 0 of the group in which the weights travel."""

    def __init__(self, models: Models, args: Arguments, device: str):
        torch.set_num_threads(len(os.sched_getaffinity(0)))  # Ray sets one thread
        here = torch.device(device, 0)  # Ray makes one GPU visible
        self.learner = GRPOLearner(models.loaded, args, here, args.seed, args.steps, initial=models.initial)
        if models.checkpoint:
            self.learner.load_state(models.checkpoint)

    def address(self) -> tuple[str, int]:
        from vllm.utils.network_utils import get_open_port

        return ray.util.get_node_ip_address(), get_open_port()

    def init_weight_update_group(self, address: str, port: int, world_size: int) -> None:
        group = stateless_init_process_group(address, port, 0, world_size, self.learner.device)
        self.sender = WeightSender(group)

    def send_weights(self) -> SyncReport:
        return self.sender.send_weights(self.learner.named_tensors().items())

    def learn(self, rollouts: list[Rollout], proof: list[Rollout]) -> dict[str, float]:
        return self.learner.learn(rollouts, proof)

    def mismatch(self, rollouts: list[Rollout]) -> float:
        return self.learner.mismatch(rollouts)

    def start(self) -> tuple[int, str]:
        """Returns once the model is loaded: the steps it has done, and what is to be said of it."""
        return self.learner.step, self.learner.remarks()

    def save(self, run_folder: Path) -> None:
        write_checkpoint(run_folder, self.learner.step, self.learner.save)


def place(args: Arguments) -> tuple[str, dict, dict]:
    """Reserve the topology. Returns the device, and the Ray options that place the trainer and the engine."""
    gpus = int(ray.cluster_resources().get("GPU", 0))
    wanted = 1 + args.tensor_parallel_size
    if 0 < gpus < wanted:
        raise RunError(
            f"this topology wants {wanted} GPUs, 1 for the trainer and {args.tensor_parallel_size} for the engine, and"
            f" there are {gpus}: lower --tensor-parallel-size, or use rlhf_colocate.py, which shares GPUs"
        )
    bundles = [{"GPU": 1}] * wanted if gpus else [{"CPU": 1}] * 2
    group = placement_group(bundles, strategy="PACK" if gpus else "SPREAD")
    if not group.wait(timeout_seconds=60):
        raise RunError(f"Ray could not reserve {bundles} within 60 s: another run may hold them")

    def at(bundle: int, **resources) -> dict:
        strategy = PlacementGroupSchedulingStrategy(group, bundle, placement_group_capture_child_tasks=True)
        return {"scheduling_strategy": strategy, **resources}

    trainer = at(0, num_gpus=1, num_cpus=0) if gpus else at(0, num_cpus=1)
    return "cuda" if gpus else "cpu", trainer, at(1, num_cpus=0)


def main(args: Arguments) -> None:
    task = load_task(args)
    with RunFolder(args, Path(__file__).stem) as run, RaySession(run, args.ray_address) as session:
        # 1. Place
        device, trainer_options, engine_options = place(args)
        models = choose_models(run.path, args, device)
        task.tokenize(models.loaded, args.max_model_len)
        tp = args.tensor_parallel_size
        if device == "cpu":
            run.say(f"no GPU: the trainer and a TP={tp} engine run on CPU, with gloo between them")
        run.say(f"model {models.checkpoint or models.initial}\nrun folder {run.path}")
        args.default_max_mismatch, args.weights_proven = MAX_MISMATCH[device], True
        trainer = ray.remote(Trainer).options(**trainer_options).remote(models, args, device)
        engine = ray.remote(Engine).options(**engine_options).remote(models.loaded, args, device)
        session.actors |= {"trainer": trainer, "engine": engine}
        (steps_done, remarks), room = session.wait(
            "starting", trainer=trainer.start.remote(), engine=engine.start.remote()
        )
        task.check_lengths(room)
        run.say(remarks)

        # 2. Connect, and serve what the trainer holds
        connect(session, trainer, engine, tp)
        report = sync(session, trainer, engine.receive_weights.remote(steps_done))
        run.say(f"first sync: {report.tensors} tensors, {report.nbytes / 1e9:.3f} GB; from now on by {report.loader}")
        run.start_metrics(steps_done)

        # 3. Take rollouts, learn, sync; meanwhile the engine generates for the next steps
        ahead = RolloutsAhead(session, engine, task, args, steps_done)
        if args.eval_every and not steps_done:
            run.log_metrics(0, ahead.evaluate(0))
        for step in range(steps_done + 1, args.steps + 1):
            started = time.perf_counter()
            batch = ahead.take(step)
            proof = ahead.proof(step, batch)
            generated = time.perf_counter()
            (metrics,) = session.wait("learning", trainer=trainer.learn.remote(batch.rollouts, proof))
            learned = time.perf_counter()
            report = sync(session, trainer, engine.receive_weights.remote(step))
            synced = time.perf_counter()
            (engine_idle,) = session.wait("syncing", engine=engine.idle_share.remote())
            metrics |= {
                "time/rollout": generated - started,
                "time/train": learned - generated,
                "time/sync": synced - learned,
                "sync/transfer": report.seconds,
                "sync/GBps": report.gigabytes_per_second,
                "async/engine_idle": engine_idle,
                "async/trainer_idle": (generated - started) / (synced - started),
            }
            run.log_step(step, batch, metrics | ahead.evaluate(step))
            if run.saves(step):
                session.wait("saving", trainer=trainer.save.remote(run.path))
                run.draw()

        # 4. Generate again, and prove the last sync
        batch = ahead.take(args.steps + 1)
        (mismatch,) = session.wait("proving", trainer=trainer.mismatch.remote(batch.rollouts))
        run.say(f"generated again with the last weights: mismatch {mismatch:.1e}")
        run.show(batch)
        summary = run.summary(batch.rollouts)
    print(summary)


def connect(session: RaySession, trainer, engine, tensor_parallel_size: int) -> None:
    """Join the trainer (rank 0) and the engine's workers in one broadcast group."""
    (address,) = session.wait("connecting", trainer=trainer.address.remote())
    actors = {"trainer": trainer, "engine": engine}
    world_size = 1 + tensor_parallel_size
    calls = {name: actor.init_weight_update_group.remote(*address, world_size) for name, actor in actors.items()}
    session.wait("connecting", **calls)


def sync(session: RaySession, trainer, listening: ray.ObjectRef) -> SyncReport:
    """Send the trainer's weights to the engine, which already runs `receive_weights` (`listening`)."""
    report, served = session.wait("syncing", trainer=trainer.send_weights.remote(), engine=listening)
    if not served:
        raise RunError(f"after sync {report.version}, the engine does not serve what was sent")
    return report


if __name__ == "__main__":
    run_main(main, parse(Arguments, __doc__))
