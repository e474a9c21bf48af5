"""PPO: a policy, a critic, a reference and a reward model as Ray actors around one vLLM engine.

    python rlhf_ppo.py                               # 1 GPU: facebook/opt-125m, all five on it
    python rlhf_ppo.py --tensor-parallel-size 4      # 4 GPUs: a TP=4 engine, the others sharded over the same GPUs
    python rlhf_ppo.py --placement split             # 2 GPUs or more: an engine apart, NCCL between it and the policy
    python rlhf_ppo.py --dataset prompts.jsonl --reward-model NAME --reward graded:reward --reward-workers 4
    python rlhf_ppo.py                               # no GPU: small built-in models, all five on CPU

    Engine       vllm.LLM, whose workers have an extension of rlhf_utils.py
    Trainer      the policy (PPO's actor): fp32 master weights, PPO (recipe/ppo.py), WeightSender (rlhf_utils.py)
    Critic       the policy's trunk with a value head (recipe/ppo_models.py), and an optimizer of its own
    Reference    the model that the run began with, frozen; with --lora-rank, the policy without its adapters instead
    RewardModel  a sequence classifier with one output, frozen; rewards that are functions run as Ray tasks

1. Place: one Ray placement group. `colocated`: each GPU has a bundle with a rank of each model and a worker of the
   engine. They take turns: the engine sleeps, and idle models wait in host memory, except for the policy's weights,
   which the engine reads in place. `split`: nothing moves. Trainer and critic share a GPU; reference and reward model
   share another, if one is left; the engine has the rest.
2. Connect trainer and workers, and sync once: now the engine serves the trainer's weights.
3. Each step: generate, reward, score (log-probabilities and values), estimate advantages, learn, sync. The scores after
   a sync prove it: the engine's log-probabilities of the tokens it sampled must be the trainer's, or the run ends with
   an error.
4. Generate once more to prove the last sync, and print.

The last line is `OK: ...`. After an error it is `error: ...`, and the exit status is not 0.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import ray
import torch
from annotated_types import Ge, Gt, Le
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from transformers.hf_argparser import HfArg

from recipe.arguments import RunArguments, parse
from recipe.checkpoint import disk_errors, write_checkpoint
from recipe.engine import EngineArguments, complete, llm_options, release_memory, sample, serves_checkpoint
from recipe.errors import RunError
from recipe.evaluation import evaluate
from recipe.learner import Rollout
from recipe.memory import Phases, engine_memory, memory_table
from recipe.ppo import CriticLearner, PPOConfig, PPOLearner, estimate
from recipe.ppo_models import RewardScorer, Scorer, choose_ppo_models
from recipe.ranks import Rank, Ranks
from recipe.ray_session import RaySession, die_with_children, run_main
from recipe.reward_workers import RayRewards, RewardArguments
from recipe.rewards import Batch
from recipe.run_folder import RunFolder
from recipe.task import Task, TaskArguments, load_task
from rlhf_utils import SharedMemoryChannel, SyncReport, WeightSender, WeightSyncError, stateless_init_process_group
from weight_sync.groups import refuse_expandable_segments

MAX_MISMATCH = {"cpu": 1e-5, "cuda": 0.02}  # mean |Δ logprob| that rounding explains, in fp32 and bf16
NO_GPU = "no GPU: all actors run on CPU, where vLLM has no sleep mode\n"
GPU_SHARE = 0.2  # the share of a GPU that Ray counts for each of five actors on it


@dataclass
class Arguments(PPOConfig, RewardArguments, TaskArguments, EngineArguments, RunArguments):
    """What the command line sets."""

    task: str = HfArg(
        default="tiny_reward_model",
        help="a module of recipe/, or your own: its DEFAULTS set the defaults of other flags",
    )
    placement: Literal["colocated", "split"] = HfArg(
        default="colocated", help="all actors on the same GPUs, or the engine on its own"
    )
    tensor_parallel_size: Annotated[int, Ge(1)] = HfArg(
        default=1, help="GPUs of the engine; colocated, also of the others, which are sharded over them"
    )
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = HfArg(default=0.4, help="the engine's share of its GPUs")
    sleep: Literal["kv", "weights"] = HfArg(
        default="kv", help="memory that an engine on shared GPUs releases: the KV cache's, or the weights' as well"
    )
    critic_model: str | None = HfArg(
        default=None, help="to begin the critic with: a policy or reward model (default: the policy)"
    )


class Engine:
    """A Ray actor around vllm.LLM. The actor reserves no GPU: vLLM's workers take `bundles` of its placement group."""

    def __init__(self, model: str, args: Arguments, device: str, bundles: list[int]):
        self.device, self.apart = device, device == "cuda" and args.placement == "split"
        options = {"worker_extension_cls": "rlhf_utils.WorkerExtension", "enable_sleep_mode": args.sleep != "none"}
        if args.placement == "colocated":
            options["worker_extension_cls"] = "rlhf_utils.ColocateWorkerExtension"
            os.environ["VLLM_RAY_PER_WORKER_GPUS"] = str(GPU_SHARE)
        options = llm_options(args, device, bundles, **options)
        from vllm import LLM  # only now: llm_options has set its environment variables

        self.llm = LLM(model, **options)
        die_with_children()

    def start(self, level: str) -> int:
        """Returns once the engine has started and sleeps: the tokens that a prompt and its completion may have."""
        self.loaded = self.llm.collective_rpc("weight_digests")  # of the weights from disk
        self.lost_weights = level == "weights"  # until the first sync
        self.sleep(level)  # the others load next
        return self.llm.model_config.max_model_len

    def sample(
        self, prompts: list[list[int]], args: Arguments, seed: int, first: int, evaluation: bool
    ) -> list[Rollout]:
        return sample(self.llm, prompts, args, seed, first, evaluation)

    def device_ids(self) -> list[str]:
        return self.llm.collective_rpc("report_device_id")

    def init_weight_update_group(self, address: str, port: int, world_size: int) -> None:
        self.llm.collective_rpc("init_weight_update_group", args=(address, port, 1, world_size))

    def sleep(self, level: str) -> None:
        """Drop the prefix cache, and release the memory that --sleep names, until the next sync.

        Nothing is generated until that sync is over, so the prefix cache stays empty.
        """
        release_memory(self.llm, level)
        self.asleep = level

    def receive_weights(self, *handles: dict[str, str]) -> bool:
        """Take part in a sync, colocated with the ranks behind these handles, and wake up.

        Returns whether every worker serves exactly what was sent.
        """
        if self.asleep == "weights":
            self.llm.wake_up(tags=["weights"])
        for result in self.llm.collective_rpc("receive_weights", args=handles):
            if "error" in result:
                raise WeightSyncError(result["error"])
        if self.asleep != "none" and not self.llm.wake_up(tags=["kv_cache"]):
            raise RunError("vLLM did not wake up")
        self.asleep = "none"
        return all(self.llm.collective_rpc("check_weights_changed"))

    def serves_checkpoint(self) -> bool:
        """Whether the first sync sent, bit for bit, the weights that this engine had loaded from disk."""
        return serves_checkpoint(self.loaded, self.llm.collective_rpc("weight_digests"), slept=self.lost_weights)

    def memory(self) -> dict[str, float]:
        return {} if self.apart else engine_memory(self.device)  # apart: none of what the others have

    def shutdown(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


class Reference(Rank):
    """A rank of the model that the run began with: `logprobs`."""

    learner_class = Scorer


class RewardModel(Rank):
    """A rank of the reward model: `score`."""

    learner_class = RewardScorer


class Critic(Rank):
    """A rank of the critic: `values`, `learn`."""

    learner_class = CriticLearner
    learns = True

    def save(self, run_folder: Path) -> None:
        """To a folder from which the trainer, on the same node, takes it into its checkpoint."""
        folder = run_folder / "unfinished-critic"
        with disk_errors(run_folder):
            folder.mkdir(exist_ok=True)
            self.run("save", folder if self.rank == 0 else None)


class Trainer(Rank):
    """A rank of the policy: `score`, `learn`, `mismatch`. It sends to the worker on its device, or to a group."""

    learner_class = PPOLearner
    weights_stay = True  # on the GPU, where the engine reads them
    learns = True

    def channel(self, ranks: int) -> dict[str, str]:
        """Colocated: make the channel to the worker. Returns the handle for it."""
        worker = 0 if self.learner.device.type == "cuda" else self.rank % ranks  # all ranks share the CPU
        channel = SharedMemoryChannel(torch.device(self.learner.device.type, worker))
        self.sender = WeightSender(channel)
        return channel.handles

    def init_weight_update_group(self, address: str, port: int, world_size: int) -> None:
        group = stateless_init_process_group(address, port, 0, world_size, self.learner.device)
        self.sender = WeightSender(group)

    def send_weights(self) -> SyncReport:
        return self.sender.send_weights(self.learner.named_tensors().items())

    def start(self) -> tuple[int, str]:
        """Returns once the model is loaded: the steps it has done, and what is to be said of it."""
        return self.learner.step, self.learner.remarks()

    def save(self, run_folder: Path) -> None:
        if self.rank == 0:
            critic = run_folder / "unfinished-critic"
            write_checkpoint(
                run_folder, self.learner.step, lambda to: (self.learner.save(to), critic.rename(to / "critic"))
            )
        else:
            self.learner.save(None)


MODELS = {"trainer": Trainer, "critic": Critic, "reference": Reference, "reward_model": RewardModel}


def place(args: Arguments) -> tuple[str, bool, dict[str, list[tuple[int, dict]]]]:
    """Choose and reserve the topology.

    Returns the device, whether models take turns on it, and the bundle and Ray options of each rank of each model; of
    the engine, of each worker.
    """
    gpus, tp = int(ray.cluster_resources().get("GPU", 0)), args.tensor_parallel_size
    colocated = args.placement == "colocated"
    wanted = tp if colocated else 1 + tp
    if 0 < gpus < wanted:
        split = f", 1 for trainer and critic and {tp} for the engine" if not colocated else ""
        raise RunError(
            f"--placement {args.placement} with --tensor-parallel-size {tp} wants {wanted} GPUs{split}, and there are"
            f" {gpus}: lower --tensor-parallel-size, or use --placement colocated, where one GPU does"
        )
    if gpus and colocated:
        refuse_expandable_segments()
    else:
        args.sleep = "none"  # on CPU, vLLM has no sleep mode; split, nobody needs the memory
    frozen = 1 if gpus > wanted else 0  # split: the bundle of reference and reward model
    where = {"trainer": [0], "critic": [0], "reference": [frozen], "reward_model": [frozen]}
    where["engine"] = list(range(frozen + 1, frozen + 1 + tp))
    if colocated:
        where = {name: list(range(tp)) for name in where}
    bundles = [{"GPU": 1, "CPU": 0} if gpus else {"CPU": 0.5}] * (1 + where["engine"][-1])
    group = placement_group(bundles, strategy="PACK" if gpus else "STRICT_PACK" if colocated else "SPREAD")
    if not group.wait(timeout_seconds=60):
        raise RunError(f"Ray could not reserve {bundles} within 60 s: another run may hold them")

    def at(name: str, bundle: int) -> tuple[int, dict]:
        strategy = PlacementGroupSchedulingStrategy(group, bundle, placement_group_capture_child_tasks=True)
        share = {"num_gpus": GPU_SHARE} if gpus and name != "engine" else {}
        return bundle, {"scheduling_strategy": strategy, "num_cpus": 0, **share}

    places = {name: [at(name, bundle) for bundle in own] for name, own in where.items()}
    return "cuda" if gpus else "cpu", bool(gpus) and colocated, places


def main(args: Arguments) -> None:
    task = load_task(args)
    with RunFolder(args, Path(__file__).stem) as run, RaySession(run, args.ray_address) as session:
        # 1. Place
        device, shared, places = place(args)
        paths, states = choose_ppo_models(run.path, args, device)
        task.tokenize(paths["trainer"], args.max_model_len)
        run.say(f"{NO_GPU if device == 'cpu' else ''}model {paths['trainer']}\nrun folder {run.path}")
        args.default_max_mismatch, args.weights_proven = MAX_MISMATCH[device], True
        (_, options), bundles = places["engine"][0], [bundle for bundle, _ in places["engine"]]
        engine = ray.remote(Engine).options(**options).remote(paths["trainer"], args, device, bundles)
        session.actors["engine"] = engine
        ranks = Ranks(session, {name: MODELS[name] for name in paths}, places, shared)
        task.rewards.call = RayRewards(task.rewards, session, ranks, args)
        room, (steps_done, remarks) = start(session, engine, ranks, paths, args, device, states)
        task.check_lengths(room)
        run.say(remarks)

        # 2. Connect, and serve what the trainer holds
        handles = connect(session, run, engine, ranks, places, args)
        report = sync(session, ranks, engine, handles)
        (same,) = session.wait("comparing", engine=engine.serves_checkpoint.remote())
        run.say(
            f"first sync: {report.tensors} tensors, {report.nbytes / 1e9:.3f} GB, {'' if same else 'not '}bit for bit"
            f" what the engine had loaded from disk; from now on by {report.loader}"
        )
        run.start_metrics(steps_done)

        # 3. Generate, reward, score, estimate, learn, sync
        if args.eval_every and not steps_done:
            run.log_metrics(0, evaluate(session, {"engine": engine}, task, args, 0))
        for step in range(steps_done + 1, args.steps + 1):
            phases = Phases(session)
            batch = complete(session, {"engine": engine}, task.draw(step), args, step)
            phases.end("rollout")
            batch = reward(session, engine, task, batch, args, step)
            phases.end("reward")
            (metrics, *logprobs), values, *reference = ranks.call(
                "scoring", batch.rollouts, trainer="score", critic="values", reference="logprobs"
            )
            phases.end("score")
            experience, estimates = estimate(batch.rollouts, *logprobs, *reference, values, metrics["kl_coef"], args)
            critic, policy = ranks.call("learning", experience, critic="learn", trainer="learn")
            phases.end("train")
            report = sync(session, ranks, engine, handles)
            phases.end("sync")
            metrics |= estimates | critic | policy | phases.metrics
            metrics |= {"sync/transfer": report.seconds, "sync/GBps": report.gigabytes_per_second}
            run.log_step(step, batch, metrics | evaluate(session, {"engine": engine}, task, args, step))
            if step in (steps_done + 1, args.steps):
                run.say(memory_table(metrics))
            if run.saves(step):
                session.wait("saving", **ranks.each("critic", "save", run.path))
                session.wait("saving", **ranks.each("trainer", "save", run.path))
                run.draw()

        # 4. Generate again, and prove the last sync
        completed = complete(session, {"engine": engine}, task.draw(args.steps + 1), args, args.steps + 1)
        batch = reward(session, engine, task, completed, args, args.steps + 1)
        (mismatch,) = ranks.call("proving", batch.rollouts, trainer="mismatch")
        run.say(f"generated again with the last weights: mismatch {mismatch:.1e}")
        run.show(batch)
        summary = run.summary(batch.rollouts)
    print(summary)


def start(
    session: RaySession,
    engine,
    ranks: Ranks,
    paths: dict[str, str],
    args: Arguments,
    device: str,
    states: dict[str, Path],
) -> tuple[int, tuple[int, str]]:
    """Load all models: where GPUs are shared, the engine's first, since vLLM measures the free memory. Returns what
    `start` of engine and trainer return."""
    starting = engine.start.remote(args.sleep)
    if ranks.shared:
        session.wait("starting", engine=starting)
    ranks.load(paths, args, device, states)
    room, loaded, *_ = session.wait("starting", engine=starting, **ranks.each("trainer", "start"))
    return room, loaded


def connect(
    session: RaySession, run: RunFolder, engine, ranks: Ranks, places: dict[str, list], args: Arguments
) -> list[dict[str, str]]:
    """Print the layout, and connect the trainer with the engine's workers: each rank with the one on its device or, if
    they share none, rank 0 with all of them in one broadcast group. Returns the arguments of `receive_weights`."""
    devices = {name: session.wait("connecting", **ranks.each(name, "device_id")) for name in ranks.actors}
    (devices["engine"],) = session.wait("connecting", engine=engine.device_ids.remote())
    lines = [f"{'device':40}  {'actor':14}  bundle"]
    for name, ids in devices.items():
        lines += [f"{own:40}  {name:12} {i}  {places[name][i][0]:6}" for i, own in enumerate(ids)]
    run.say("\n".join(lines))
    if args.placement == "split":
        (address,) = session.wait("connecting", **ranks.each("trainer", "address"))
        world = (*address, 1 + len(devices["engine"]))
        joining = ranks.each("trainer", "init_weight_update_group", *world)
        session.wait("connecting", **joining, engine=engine.init_weight_update_group.remote(*world))
        return []
    channels = session.wait("connecting", **ranks.each("trainer", "channel", len(devices["engine"])))
    handles = {device: path for channel in channels for device, path in channel.items()}
    if handles.keys() != set(devices["engine"]):
        raise RunError(f"the engine runs on {sorted(devices['engine'])}, and the trainer ranks on {sorted(handles)}")
    return [handles]


def reward(session: RaySession, engine, task: Task, batch: Batch, args: Arguments, step: int) -> Batch:
    """Put the engine to sleep, and return the batch with its rewards and their metrics."""
    session.wait("sleeping", engine=engine.sleep.remote(args.sleep))
    groups = task.rewards.score(batch.groups, step, args.steps)
    return Batch(groups, task.rewards.metrics(groups))


def sync(session: RaySession, ranks: Ranks, engine, handles: list[dict[str, str]]) -> SyncReport:
    """Send the trainer's weights to the engine, which wakes up."""
    sending, receiving = ranks.each("trainer", "send_weights"), engine.receive_weights.remote(*handles)
    report, *_, served = session.wait("syncing", **sending, engine=receiving)
    if not served:
        raise RunError(f"after sync {report.version}, the engine does not serve what was sent")
    return report


if __name__ == "__main__":
    run_main(main, parse(Arguments, __doc__))
