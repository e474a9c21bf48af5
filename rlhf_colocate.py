"""RLHF on shared GPUs: each GPU has a trainer rank and engine workers, with CUDA IPC between them.

    python rlhf_colocate.py                          # 4 GPUs: facebook/opt-125m, 4 trainer ranks, two TP=2 engines
    python rlhf_colocate.py                          # 1 GPU: one trainer, two engines, since the model is small
    python rlhf_colocate.py --engines 1 --tensor-parallel-size 8 --offload-optimizer --sleep weights
    python rlhf_colocate.py                          # no GPU: a small built-in model, 2 ranks, 2 engines, shared memory
    python rlhf_colocate.py --ray-address auto       # on a running Ray cluster

    every GPU  trainer actor: a rank of the learner (trainer/learning/grpo.py), sharded by FSDP2, and its WeightSender
               a worker of each engine actor there: vllm.LLM with rlhf_utils.ColocateWorkerExtension

1. Place: one Ray placement group, with a bundle for each GPU. The engines start first, since vLLM measures the free
   memory, and release the memory of their KV cache. Then the trainer ranks load.
2. Connect each rank with the worker on its GPU, and sync once: the engines wake up and serve the trainer's weights.
3. Each step: generate, reward, put the engines to sleep, learn, free the trainer's memory, and sync, which wakes the
   engines. If trainer and engine fit into memory together, no engine sleeps from the third step on. The rollouts after
   a sync prove it: the engines' log-probabilities of the tokens they sampled must equal the trainer's but for rounding
   (with --exact on, bit for bit), or the run ends with an error.
4. Generate once more to prove the last sync, and print.

The last line is `OK: ...`. After an error it is `error: ...`, and the exit status is not 0.
"""

import gc
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import ray
import torch
from annotated_types import Ge

from rlhf_utils import SharedMemoryChannel, SyncReport, WeightSender
from trainer.errors import RunError
from trainer.flags import arg, section, setting
from trainer.learning.grpo import GRPOConfig, GRPOLearner
from trainer.learning.learner import Proof
from trainer.learning.multimodal import auto_class
from trainer.learning.rollout import Rollout
from trainer.rollouts.engine import EngineActor, complete, llm_options, resample
from trainer.rollouts.evaluation import evaluate
from trainer.rollouts.exact_engine import ExactEngineArguments, exact_options, settle_exactness
from trainer.rollouts.reward_workers import RewardWorkers
from trainer.run.actors import (
    ActorArguments,
    ActorGroup,
    LearnerActor,
    Seat,
    StepClock,
    by_node,
    reserve,
    seat,
)
from trainer.run.arguments import RunArguments, parse
from trainer.run.checkpoint import Models, choose_models
from trainer.run.folder import RunFolder
from trainer.run.session import RaySession, run_main
from trainer.tasks.task import TaskArguments, load_task
from trainer.tasks.tools import ToolArguments
from weight_sync.groups import refuse_expandable_segments

MAX_MISMATCH = {"cpu": 1e-5, "cuda": 0.02}  # mean |Δ logprob| that rounding explains, in fp32 and bf16
GPU_SHARE = 0.4  # the share of a GPU that Ray counts for a trainer rank, and for all workers there: both fit on one
SPARE_SHARE = 0.1  # the share of a GPU's memory that stays free where trainer and engine are both awake
SMALL_MODEL = 1e9  # parameters, below which a GPU waits for vLLM's Python in half of a decode step (seen with 0.5e9)


@dataclass
class Arguments:
    """The flags of this script."""

    run: RunArguments = section(RunArguments)
    engine: ExactEngineArguments = section(
        ExactEngineArguments,
        gpu_memory_utilization=arg(0.4, help="fraction of a GPU's memory that its engines take"),
        tensor_parallel_size=arg(
            None, help="GPUs that an engine is spread over (default: 2; with an odd number of GPUs, or none: 1)"
        ),
    )
    actors: ActorArguments = section(
        ActorArguments, engines=arg(None, help="engines (default: as many as the GPUs hold; CPU: 2 workers in all)")
    )
    tools: ToolArguments = section(ToolArguments)
    task: TaskArguments = section(TaskArguments)
    learner: GRPOConfig = section(GRPOConfig)
    engines_per_gpu: Annotated[int | None, Ge(1)] = setting(
        None,
        help="engines where there would be one, with a part of its prompts each: while one computes, another prepares"
        " its next step (default: 2 if each has one GPU and the model is small, else 1)",
    )
    sleep: Literal["auto", "kv", "weights", "none"] = arg(
        "auto",
        help="memory that engines release while trainers learn: the KV cache's (kv), the weights' as well (weights),"
        " none, or the KV cache's unless trainer and engine fit together (auto)",
    )


class Engine(EngineActor):
    """A Ray actor around vllm.LLM."""

    def start(self, model: str, args: Arguments, device: str, bundles: list[int], before: int | None) -> int:
        """Start the engine, after the one on the same GPUs that has returned `before`."""
        options = {"enable_sleep_mode": args.sleep != "none"}
        options |= exact_options(args.engine.exact, model, "ColocateWorkerExtension")
        os.environ["VLLM_RAY_PER_WORKER_GPUS"] = str(GPU_SHARE / args.engines_per_gpu)
        share = args.engine.gpu_memory_utilization / args.engines_per_gpu
        engine = replace(args.engine, gpu_memory_utilization=share)
        max_model_len = self.load(model, *llm_options(engine, device, bundles, args.actors.engines, **options))
        self.remember_weights()
        self.sleep(args.sleep)  # the trainers load next
        return max_model_len

    def receive_weights(self, timeout: float, handles: dict[str, str]) -> tuple[bool, float]:
        """Take part in a sync with the trainer ranks behind these handles, and wake up.

        Returns whether every worker serves exactly what was sent, and the seconds that waking took.
        """
        started = time.perf_counter()
        self.wake("weights")
        waking = time.perf_counter() - started
        served = self.take_weights(handles, timeout)
        started = time.perf_counter()
        self.wake("kv_cache")
        return served, waking + time.perf_counter() - started


class Trainer(LearnerActor):
    """A Ray actor around one rank of the learner. It sends to the workers on the same device."""

    def load(self, address: tuple[str, int], models: Models, args: Arguments, device: str) -> tuple[int, str]:
        run, exact, tp = args.run, args.engine.exact, args.engine.tensor_parallel_size
        torch_device = self.join(address, args.actors.engines * tp, device, exact)
        proof = Proof(MAX_MISMATCH[device], exact, tp)
        self.learner = GRPOLearner(
            models.loaded, args.learner, torch_device, run.seed, steps=run.steps, initial=models.initial, proof=proof
        )
        resumed = self.resume(models.checkpoint)
        self.learner.release_memory()  # loading held whole tensors
        gc.freeze()  # what is here now stays: `release_memory` need not look through it at every step
        return resumed

    def open_channel(self, args: Arguments) -> dict[str, str]:
        """Open the channel to the workers on this device. Returns their handle, by device id."""
        device = self.learner.model.device.type  # on CPU, which all ranks share, the worker's rank is the index
        index = 0 if device == "cuda" else self.rank % args.engine.tensor_parallel_size
        channel = SharedMemoryChannel(torch.device(device, index), args.engines_per_gpu)
        self.sender = WeightSender(channel)
        return channel.handles

    def send_weights(self) -> SyncReport:
        return self.sender.send_weights(self.learner.model.named_tensors().items())

    def learn(self, rollouts: list[Rollout], frees_memory: bool) -> dict[str, float]:
        metrics = self.learner.learn(rollouts)
        if frees_memory:
            self.learner.release_memory()  # for the engine
        return metrics


def place(args: Arguments) -> tuple[str, Arguments, list[Seat], list[Seat]]:
    """Choose and reserve the topology.

    Returns the device, the arguments with what was chosen, and the seats of trainers and engines. The workers of the
    first engine are beside the first ranks, and so on.
    """
    resources = ray.cluster_resources()
    gpus = int(resources.get("GPU", 0))
    if gpus:
        refuse_expandable_segments()
    tp = args.engine.tensor_parallel_size or (2 if gpus and gpus % 2 == 0 else 1)
    engines = args.actors.engines or max(1, (gpus or 2) // tp)
    wanted, available = engines * tp, gpus or int(resources["CPU"])
    if wanted > available:
        raise RunError(
            f"rlhf_colocate.py wants {wanted} {'GPUs' if gpus else 'CPU cores'} for the TP={tp} workers of"
            f" {engines} engines, and there are {available}: lower --engines or --tensor-parallel-size"
        )
    sleep = args.sleep if gpus else "none"  # on CPU, vLLM has no sleep mode
    actors, engine = replace(args.actors, engines=engines), replace(args.engine, tensor_parallel_size=tp)
    args = replace(args, actors=actors, engine=engine, sleep=sleep)
    placement = reserve([{"GPU": 1, "CPU": 0} if gpus else {"CPU": 1}] * wanted, "PACK" if gpus else "STRICT_PACK")
    bundles = by_node(placement)  # so that an engine spans as few nodes as possible
    share = {"num_gpus": GPU_SHARE} if gpus else {"num_cpus": 1}
    trainer_seats = [seat(placement, bundle, **share) for bundle in bundles]
    engine_bundles = [bundles[begin : begin + tp] for begin in range(0, wanted, tp)]
    engine_seats = [seat(placement, workers[0], workers) for workers in engine_bundles]
    return "cuda" if gpus else "cpu", args, trainer_seats, engine_seats


def main(args: Arguments) -> None:
    task = load_task(args.task, args.run.seed, args.run.steps, args.tools)
    with RunFolder(args.run, Path(__file__).stem) as run, RaySession(args.run, run.progress) as session:
        # 1. Place
        device, args, trainer_seats, engine_seats = place(args)
        models, args.learner = choose_models(run.path, args.run, args.learner, device)
        task.tokenize(models.loaded, args.engine.max_model_len)
        run.say("no GPU: all on CPU, where vLLM has no sleep mode: engines stay awake" if device == "cpu" else "")
        run.say(f"model {models.checkpoint or models.initial}\nrun folder {run.path}")
        task.rewards = RewardWorkers(task.rewards, session)
        trainers = ActorGroup(session, "trainer", Trainer, trainer_seats)
        args.engine = settle_exactness(
            run, args.engine, args.learner, models.loaded, trainers, by_nccl=False, images=task.has_images
        )
        args.engines_per_gpu = args.engines_per_gpu or choose_engines_per_gpu(run, args, models.loaded, device)
        engines = ActorGroup(session, "engine", Engine, engine_seats * args.engines_per_gpu)
        max_model_len = start(engines, models.loaded, args, device)
        address = trainers.call_rank_0("loading", Trainer.address)
        steps_done, remarks = trainers.agreed("loading", Trainer.load, address, models, args, device)
        run.say(remarks + task.check_lengths(max_model_len, args.learner.max_tokens))

        # 2. Connect, and serve what the trainer holds
        handles = connect(run, trainers, engines, args)
        level = args.sleep
        run.start_metrics(steps_done, args)

        # 3. Generate, reward, learn, sync
        if not steps_done and args.task.eval_every:
            run.log_metrics(0, evaluate(engines, task, args.learner, 0))
        for step in range(steps_done + 1, args.run.steps + 1):
            clock = StepClock(trainers)
            batch = complete(engines, task, task.draw(step), args.learner, step)
            batch = task.rewards.compute(batch, step - 1)
            if args.learner.dynamic_sampling:
                batch = resample(engines, task, batch, args.learner, step)
            clock.end("rollout")
            learning_metrics = learn(trainers, engines, batch.rollouts, level, clock)
            report, clock.metrics["time/wake"] = sync(trainers, engines, handles, args)
            clock.end("sync")
            metrics = learning_metrics | clock.metrics
            metrics |= evaluate(engines, task, args.learner, step)
            if run.saves(step):
                trainers.call("saving", Trainer.save, run.path)
            run.log_step(step, batch, report, metrics)
            if step > steps_done + 1:  # the first step made Adam's moments
                level = sleep_level(run, args, level, metrics)

        # 4. Generate again, and prove the last sync
        batch = complete(engines, task, task.draw(args.run.steps + 1), args.learner, args.run.steps + 1)
        batch = task.rewards.compute(batch, args.run.steps)
        engines.call("sleeping", Engine.sleep, level)
        mismatch = trainers.agreed("proving", Trainer.mismatch, batch.rollouts)
        summary = run.summary(batch, mismatch)
    print(summary)


def choose_engines_per_gpu(run: RunFolder, args: Arguments, model: str, device: str) -> int:
    """How many engines there are on each GPU unless a flag says it. Says why if there are more than one."""
    from transformers import AutoConfig

    if device == "cpu" or args.engine.tensor_parallel_size > 1:
        return 1
    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in auto_class(config).from_config(config).parameters())
    if parameters >= SMALL_MODEL:
        return 1
    size = f"{parameters / 1e6:.0f} million parameters"
    run.say(f"two engines per GPU: with {size}, one engine would often leave its GPU idle between decode steps")
    return 2


def start(engines: ActorGroup, model: str, args: Arguments, device: str) -> int:
    """Start the engines; those of a GPU one after another, since vLLM measures the free memory. Returns the tokens that
    a prompt and its completion may have."""
    before: list[ray.ObjectRef | None] = [None] * args.actors.engines
    for actor, (bundles,) in zip(engines.actors.values(), engines.bundles, strict=True):
        before.append(actor.start.remote(model, args, device, bundles, before[-args.actors.engines]))
    calls = dict(zip(engines.actors, before[args.actors.engines :], strict=True))
    return engines.session.wait("starting", calls)[0][0]


def connect(run: RunFolder, trainers: ActorGroup, engines: ActorGroup, args: Arguments) -> list[tuple[dict[str, str]]]:
    """Check that each trainer rank shares its device with a worker, print the topology, and sync once.

    Returns for each engine the handles of the ranks beside its workers, by device id.
    """
    rank_handles = trainers.call("connecting", Trainer.open_channel, args)
    engine_handles, lines = [], [f"{'device':40}  trainer  engine  worker"]
    for i, device_ids in enumerate(engines.call("connecting", Engine.device_ids)):
        first = i * len(device_ids) % len(trainers)
        ranks = range(first, first + len(device_ids))
        handles = {device_id: path for rank in ranks for device_id, path in rank_handles[rank].items()}
        if handles.keys() != set(device_ids):
            raise RunError(f"engine {i} runs on {sorted(device_ids)}, and its trainer ranks on {sorted(handles)}")
        for rank in ranks:
            (device_id,) = rank_handles[rank].keys()
            lines.append(f"{device_id:40}  {rank:7}  {i:6}  {device_ids.index(device_id):6}")
        engine_handles.append((handles,))
    run.say("\n".join(lines))
    report, _ = sync(trainers, engines, engine_handles, args)
    same = all(engines.call("comparing", Engine.serves_checkpoint))
    run.say(
        f"first sync: {report.tensors} tensors, {report.nbytes / 1e9:.3f} GB, {'' if same else 'not '}bit for bit"
        f" what the engines had loaded from disk; from now on by {report.loader}"
    )
    return engine_handles


def learn(
    trainers: ActorGroup, engines: ActorGroup, rollouts: list[Rollout], level: str, clock: StepClock
) -> dict[str, float]:
    """Put the engines to sleep at this level, and have all ranks do one learning step. Returns its metrics."""
    sleeping = engines.begin(Engine.sleep, level)
    if level != "none":
        trainers.session.wait("sleeping", sleeping)  # the trainers need the memory
        clock.end("sleep")
    learned, _ = trainers.session.wait("learning", trainers.begin(Trainer.learn, rollouts, level != "none"), sleeping)
    clock.end("train")
    return learned[0]


def sync(
    trainers: ActorGroup, engines: ActorGroup, handles: list[tuple[dict[str, str]]], args: Arguments
) -> tuple[SyncReport, float]:
    """Send the trainers' weights, each rank to the worker on its device, and wake the engines.

    Returns rank 0's report, and the seconds that the slowest engine took to wake up.
    """
    receiving = engines.begin(Engine.receive_weights, args.run.timeout, each=handles)
    reports, received = trainers.session.wait("syncing", trainers.begin(Trainer.send_weights), receiving)
    if not all(serves for serves, _ in received):
        raise RunError(f"after sync {reports[0].version}, an engine does not serve what was sent")
    return reports[0], max(seconds for _, seconds in received)


def sleep_level(run: RunFolder, args: Arguments, level: str, metrics: dict[str, float]) -> str:
    """How engines are to sleep from now on. With --sleep auto: "none" as long as, by the metrics of memory, trainer and
    engine fit together with a tenth of each GPU to spare. Completions may grow, and the memory to learn from them. Once
    they do not fit: "kv", for good."""
    if args.sleep != "auto" or level == "kv":
        return level
    trainer, engine, gpu = (metrics[f"memory/{name}"] for name in ("train/trainer", "rollout/engine", "gpu"))
    new_level = "none" if trainer + engine <= (1 - SPARE_SHARE) * gpu else "kv"
    if new_level != level:
        reason = f"learning takes {trainer:.1f} GB and an engine awake {engine:.1f} GB of {gpu:.1f}"
        run.say(f"--sleep {new_level} from now on: {reason}")
    return new_level


if __name__ == "__main__":
    run_main(main, parse(Arguments, __doc__))
