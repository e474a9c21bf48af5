"""RLHF on shared GPUs: each GPU has a trainer rank and an engine worker, with CUDA IPC between them.

    python rlhf_colocate.py                          # 4 GPUs: facebook/opt-125m, 4 trainer ranks, two TP=2 engines
    python rlhf_colocate.py                          # 1 GPU: one trainer, one engine
    python rlhf_colocate.py --engines 1 --tensor-parallel-size 8 --offload-optimizer --sleep weights
    python rlhf_colocate.py                          # no GPU: a small built-in model, 2 ranks, 2 engines, shared memory
    python rlhf_colocate.py --ray-address auto       # on a running Ray cluster

    every GPU  trainer actor: a rank of the learner (recipe/grpo.py), sharded by FSDP2, and its WeightSender
               a worker of an engine actor: vllm.LLM with rlhf_utils.ColocateWorkerExtension

1. Place: one Ray placement group, with a bundle for each GPU. The engines start first, since vLLM measures the free
   memory, and release the memory of their KV cache. Then the trainer ranks load.
2. Connect each rank with the worker on its GPU, and sync once: the engines wake up and serve the trainer's weights.
3. Each step: generate, then put the engines to sleep; reward; learn, then free the trainer's memory; sync, which wakes
   the engines. Where both fit into memory awake, nobody sleeps from the third step on. The rollouts after a sync prove
   it: the engine's log-probabilities of the tokens it sampled must be the trainer's, or the run ends with an error.
4. Generate once more to prove the last sync, and print.

The last line is `OK: ...`. After an error it is `error: ...`, and the exit status is not 0.
"""

import gc
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import ray
import torch
from annotated_types import Ge, Gt, Le
from ray.util.placement_group import placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from transformers.hf_argparser import HfArg

from recipe.arguments import RunArguments, parse
from recipe.checkpoint import Models, choose_models, write_checkpoint
from recipe.engine import EngineArguments, generate, llm_options, release_memory, sample, serves_checkpoint
from recipe.errors import RunError
from recipe.evaluation import evaluate
from recipe.grpo import GRPOConfig, GRPOLearner
from recipe.learner import Rollout
from recipe.memory import engine_memory, measure, memory_table, rank_memory, sleep_level
from recipe.ray_session import RaySession, die_with_children, run_main
from recipe.run_folder import RunFolder
from recipe.sharding import join_ranks
from recipe.task import TaskArguments, load_task
from rlhf_utils import SharedMemoryChannel, SyncReport, WeightSender, WeightSyncError
from weight_sync.groups import refuse_expandable_segments

MAX_MISMATCH = {"cpu": 1e-5, "cuda": 0.02}  # mean |Δ logprob| that rounding explains, in fp32 and bf16
GPU_SHARE = 0.4  # the share of a GPU that Ray counts for a trainer rank, and for an engine worker: both fit on one


@dataclass
class Arguments(GRPOConfig, TaskArguments, EngineArguments, RunArguments):
    """What the command line sets."""

    engines: Annotated[int | None, Ge(1)] = HfArg(default=None, help="default: as many as fit (CPU: 2 workers)")
    tensor_parallel_size: Annotated[int | None, Ge(1)] = HfArg(
        default=None, help="workers of an engine (default: 2, or 1 if the GPUs are odd or none)"
    )
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = HfArg(default=0.4, help="an engine's share of its GPUs")
    sleep: Literal["auto", "kv", "weights", "none"] = HfArg(
        default="auto",
        help="memory that engines release while trainers learn: kv (the KV cache), weights (the weights as well), none,"
        " or auto (kv, unless both fit awake)",
    )


class Engine:
    """A Ray actor around vllm.LLM. The actor reserves no GPU: vLLM's workers take `bundles` of its placement group."""

    def __init__(self, model: str, args: Arguments, device: str, bundles: list[int]):
        self.device = device
        workers = args.engines * args.tensor_parallel_size
        extension = "rlhf_utils.ColocateWorkerExtension"
        options = {"worker_extension_cls": extension, "enable_sleep_mode": args.sleep != "none"}
        os.environ["VLLM_RAY_PER_WORKER_GPUS"] = str(GPU_SHARE)
        options = llm_options(args, device, bundles, workers, **options)
        from vllm import LLM  # only now: llm_options has set its environment variables

        self.llm = LLM(model, **options)
        die_with_children()

    def start(self, level: str) -> int:
        """Returns once the engine has started and sleeps: the tokens that a prompt and its completion may have."""
        self.loaded = self.llm.collective_rpc("weight_digests")  # of the weights from disk
        self.lost_weights = level == "weights"  # until the first sync
        self.sleep(level)  # the trainers load next
        return self.llm.model_config.max_model_len

    def sample(
        self, prompts: list[list[int]], args: Arguments, seed: int, first: int, evaluation: bool
    ) -> list[Rollout]:
        return sample(self.llm, prompts, args, seed, first, evaluation)

    def device_ids(self) -> list[str]:
        return self.llm.collective_rpc("report_device_id")

    def sleep(self, level: str) -> None:
        """Drop the prefix cache, and release the memory that --sleep names, until the next sync.

        Nothing is generated until that sync is over, so the prefix cache stays empty.
        """
        release_memory(self.llm, level)
        self.asleep = level

    def receive_weights(self, handles: dict[str, str]) -> tuple[bool, float]:
        """Take part in a sync with the trainer ranks behind these handles, and wake up.

        Returns whether every worker serves exactly what was sent, and the seconds that waking took.
        """
        started = time.perf_counter()
        if self.asleep == "weights":
            self.llm.wake_up(tags=["weights"])
        waking = time.perf_counter() - started
        for result in self.llm.collective_rpc("receive_weights", args=(handles,)):
            if "error" in result:
                raise WeightSyncError(result["error"])
        started = time.perf_counter()
        if self.asleep != "none" and not self.llm.wake_up(tags=["kv_cache"]):
            raise RunError("vLLM did not wake up")
        waking += time.perf_counter() - started
        self.asleep = "none"
        return all(self.llm.collective_rpc("check_weights_changed")), waking

    def serves_checkpoint(self) -> bool:
        """Whether the first sync sent, bit for bit, the weights that this engine had loaded from disk."""
        return serves_checkpoint(self.loaded, self.llm.collective_rpc("weight_digests"), slept=self.lost_weights)

    def memory(self) -> dict[str, float]:
        return engine_memory(self.device)

    def shutdown(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


class Trainer:
    """A Ray actor around one rank of the learner. It sends to the worker on the same device."""

    def __init__(self, rank: int):
        self.rank = rank  # loads nothing yet: the engines start first

    def address(self) -> tuple[str, int]:
        from vllm.utils.network_utils import get_open_port

        return ray.util.get_node_ip_address(), get_open_port()

    def load(self, address: tuple, models: Models, args: Arguments, device: str) -> dict[str, str]:
        """Join the other ranks (the first one is at `address`) and load. Returns the handle for the worker."""
        ranks = args.engines * args.tensor_parallel_size
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))  # Ray sets one thread
        here = torch.device(device, 0)  # Ray makes one GPU visible
        join_ranks(*address, self.rank, ranks, here)
        self.learner = GRPOLearner(models.loaded, args, here, args.seed, args.steps, initial=models.initial)
        if models.checkpoint:
            self.learner.load_state(models.checkpoint)
        self.learner.release_memory()  # loading held whole tensors
        gc.freeze()  # what is here now stays: `release_memory` need not look through it at every step
        worker = 0 if device == "cuda" else self.rank % args.tensor_parallel_size  # all ranks share the CPU
        channel = SharedMemoryChannel(torch.device(device, worker))
        self.sender = WeightSender(channel)
        return channel.handles

    def send_weights(self) -> SyncReport:
        return self.sender.send_weights(self.learner.named_tensors().items())

    def learn(self, rollouts: list[Rollout], make_room: bool) -> dict[str, float]:
        metrics = self.learner.learn(rollouts)
        if make_room:
            self.learner.release_memory()  # for the engine
        return metrics

    def mismatch(self, rollouts: list[Rollout]) -> float:
        return self.learner.mismatch(rollouts)

    def start(self) -> tuple[int, str]:
        """Returns once the model is loaded: the steps it has done, and what is to be said of it."""
        return self.learner.step, self.learner.remarks()

    def save(self, run_folder: Path) -> None:
        if self.rank == 0:
            write_checkpoint(run_folder, self.learner.step, self.learner.save)
        else:
            self.learner.save(None)

    def memory(self) -> dict[str, float]:
        return rank_memory(self.learner.device)


def place(args: Arguments) -> tuple[str, list[dict], list[tuple[list[int], dict]]]:
    """Choose and reserve the topology.

    Returns the device, the Ray options of every trainer rank, and for every engine the bundles of its workers, which it
    shares with as many ranks, and its Ray options.
    """
    resources = ray.cluster_resources()
    gpus = int(resources.get("GPU", 0))
    if gpus:
        refuse_expandable_segments()
    else:
        args.sleep = "none"  # on CPU, vLLM has no sleep mode
    tp = args.tensor_parallel_size = args.tensor_parallel_size or (2 if gpus and gpus % 2 == 0 else 1)
    args.engines = args.engines or max(1, (gpus or 2) // tp)
    wanted, there = args.engines * tp, gpus or int(resources["CPU"])
    if wanted > there:
        raise RunError(
            f"rlhf_colocate.py wants {wanted} {'GPUs' if gpus else 'CPU cores'} for the TP={tp} workers of"
            f" {args.engines} engines, and there are {there}: lower --engines or --tensor-parallel-size"
        )
    bundles = [{"GPU": 1, "CPU": 0} if gpus else {"CPU": 1}] * wanted
    group = placement_group(bundles, strategy="PACK" if gpus else "STRICT_PACK")
    if not group.wait(timeout_seconds=60):
        raise RunError(f"Ray could not reserve {bundles} within 60 s: another run may hold them")
    nodes = placement_group_table(group)["bundles_to_node_id"]
    order = sorted(range(wanted), key=nodes.get)  # node by node: an engine spans as few nodes as possible
    workers = [order[begin : begin + tp] for begin in range(0, wanted, tp)]

    def at(bundle: int, **resources) -> dict:
        strategy = PlacementGroupSchedulingStrategy(group, bundle, placement_group_capture_child_tasks=True)
        return {"scheduling_strategy": strategy, **resources}

    trainers = [at(bundle, **({"num_gpus": GPU_SHARE, "num_cpus": 0} if gpus else {"num_cpus": 1})) for bundle in order]
    return "cuda" if gpus else "cpu", trainers, [(bundles, at(bundles[0], num_cpus=0)) for bundles in workers]


def main(args: Arguments) -> None:
    task = load_task(args)
    with RunFolder(args, Path(__file__).stem) as run, RaySession(run, args.ray_address) as session:
        # 1. Place
        device, trainer_options, engine_options = place(args)
        models = choose_models(run.path, args, device)
        task.tokenize(models.loaded, args.max_model_len)
        if device == "cpu":
            run.say("no GPU: trainer ranks and engines on CPU, where vLLM has no sleep mode: engines stay awake")
        run.say(f"model {models.checkpoint or models.initial}\nrun folder {run.path}")
        args.default_max_mismatch, args.weights_proven = MAX_MISMATCH[device], True
        trainers = [ray.remote(Trainer).options(**o).remote(rank) for rank, o in enumerate(trainer_options)]
        engines = [
            ray.remote(Engine).options(**options).remote(models.loaded, args, device, bundles)
            for bundles, options in engine_options
        ]
        by_name = {f"engine{i}": engine for i, engine in enumerate(engines)}
        session.actors |= {f"trainer{rank}": trainer for rank, trainer in enumerate(trainers)} | by_name
        room, *_ = session.wait("starting", **each("engine", engines, "start", args.sleep))
        task.check_lengths(room)
        (address,) = session.wait("loading", trainer0=trainers[0].address.remote())
        loading = each("trainer", trainers, "load", address, models, args, device)
        handles = session.wait("loading", **loading)
        ((steps_done, remarks),) = session.wait("loading", trainer0=trainers[0].start.remote())
        run.say(remarks)

        # 2. Connect, and serve what the trainer holds
        handles = connect(session, run, engines, handles)
        report, _ = sync(session, trainers, engines, handles)
        same = all(session.wait("comparing", **each("engine", engines, "serves_checkpoint")))
        loaded = measure(session, "loading")
        run.say(
            f"first sync: {report.tensors} tensors, {report.nbytes / 1e9:.3f} GB, {'' if same else 'not '}bit for bit"
            f" what the engines had loaded from disk; from now on by {report.loader}"
        )
        run.start_metrics(steps_done)

        # 3. Generate, reward, learn, sync
        level = args.sleep
        if args.eval_every and not steps_done:
            run.log_metrics(0, evaluate(session, by_name, task, args, 0))
        for step in range(steps_done + 1, args.steps + 1):
            started = time.perf_counter()
            batch = generate(session, by_name, task, args, step)
            metrics = loaded | {"time/rollout": time.perf_counter() - started} | measure(session, "generating")
            metrics |= learn(session, trainers, engines, batch.rollouts, level) | measure(session, "learning")
            metrics |= sync(session, trainers, engines, handles)[1] | measure(session, "syncing")
            run.log_step(step, batch, metrics | evaluate(session, by_name, task, args, step))
            if step in (steps_done + 1, args.steps):
                run.say(memory_table(metrics))
            if args.sleep == "auto" and level != "kv" and step > steps_done + 1:  # Adam made its moments in the first
                level = sleep_level(run, level, metrics)
            if run.saves(step):
                session.wait("saving", **each("trainer", trainers, "save", run.path))
                run.draw()

        # 4. Generate again, and prove the last sync
        batch = generate(session, by_name, task, args, args.steps + 1)
        session.wait("sleeping", **each("engine", engines, "sleep", level))
        mismatch, *_ = session.wait("proving", **each("trainer", trainers, "mismatch", ray.put(batch.rollouts)))
        run.say(f"generated again with the last weights: mismatch {mismatch:.1e}")
        run.show(batch)
        summary = run.summary(batch.rollouts)
    print(summary)


def each(name: str, actors: list, method: str, *args) -> dict[str, ray.ObjectRef]:
    """Call a method of each actor. Returns the calls by actor name, as `RaySession.wait` takes them."""
    return {f"{name}{i}": getattr(actor, method).remote(*args) for i, actor in enumerate(actors)}


def connect(session: RaySession, run: RunFolder, engines: list, handles: list[dict]) -> list[dict[str, str]]:
    """Check that each trainer rank shares its device with a worker, and print the layout.

    Returns for each engine the handles of its ranks.
    """
    beside, lines = [], [f"{'device':40}  trainer  engine  worker"]
    for i, ids in enumerate(session.wait("connecting", **each("engine", engines, "device_ids"))):
        ranks = range(i * len(ids), (i + 1) * len(ids))
        beside.append({device: path for rank in ranks for device, path in handles[rank].items()})
        if beside[i].keys() != set(ids):
            raise RunError(f"engine {i} runs on {sorted(ids)}, and its trainer ranks on {sorted(beside[i])}")
        for rank in ranks:
            (device,) = handles[rank]
            lines.append(f"{device:40}  {rank:7}  {i:6}  {ids.index(device):6}")
    run.say("\n".join(lines))
    return beside


def learn(session: RaySession, trainers: list, engines: list, rollouts: list[Rollout], level: str) -> dict[str, float]:
    """Put the engines to sleep, at this level, and do one learning step on all ranks. Returns its metrics."""
    started = time.perf_counter()
    sleeping = each("engine", engines, "sleep", level)
    if level != "none":
        session.wait("sleeping", **sleeping)  # the trainers need the memory
    asleep = time.perf_counter()
    learning = each("trainer", trainers, "learn", ray.put(rollouts), level != "none")
    metrics, *_ = session.wait("learning", **learning, **sleeping)
    return metrics | {"time/sleep": asleep - started, "time/train": time.perf_counter() - asleep}


def sync(
    session: RaySession, trainers: list, engines: list, handles: list[dict]
) -> tuple[SyncReport, dict[str, float]]:
    """Send the trainers' weights, each rank to the worker on its device, and wake the engines.

    Returns rank 0's report of the transfer, and metrics: `time/sync` until the engines may generate, `time/wake`, the
    slowest engine's share for waking, and `sync/transfer` and `sync/GBps` of the transfer alone.
    """
    started = time.perf_counter()
    sending = each("trainer", trainers, "send_weights")
    receiving = {f"engine{i}": engine.receive_weights.remote(handles[i]) for i, engine in enumerate(engines)}
    report, *results = session.wait("syncing", **sending, **receiving)
    served, waking = zip(*results[len(trainers) - 1 :], strict=True)
    if not all(served):
        raise RunError(f"after sync {report.version}, an engine does not serve what was sent")
    metrics = {"time/sync": time.perf_counter() - started, "time/wake": max(waking)}
    return report, metrics | {"sync/transfer": report.seconds, "sync/GBps": report.gigabytes_per_second}


if __name__ == "__main__":
    run_main(main, parse(Arguments, __doc__))
