"""PPO: a policy, a critic, a reference and a reward model as Ray actors around one vLLM engine.

    python rlhf_ppo.py                               # 1 GPU: facebook/opt-125m, all five on it
    python rlhf_ppo.py --tensor-parallel-size 4      # 4 GPUs: a TP=4 engine, the others sharded over the same GPUs
    python rlhf_ppo.py --placement split             # 2 GPUs or more: an engine apart, NCCL between it and the policy
    python rlhf_ppo.py --dataset prompts.jsonl --reward-model NAME --reward graded:reward
    python rlhf_ppo.py                               # no GPU: small built-in models, all five on CPU

    Engine       vllm.LLM, whose workers have an extension of rlhf_utils.py
    Trainer      the policy (PPO's actor): fp32 master weights, PPO (trainer/learning/ppo.py), WeightSender
    Critic       the policy's trunk with a value head, and an optimizer of its own
    Reference    the model that the run began with, frozen; with --lora-rank, the policy without its adapters instead
    RewardModel  a sequence classifier with one output, frozen

1. Place: one Ray placement group. `colocated`: each GPU has a bundle with a rank of each model and a worker of the
   engine. They take turns: the engine sleeps, and idle models wait in host memory, except for the policy's weights,
   which the engine reads where they are. (In an evaluation, the engine stays awake beside the reward model.) `split`:
   nothing moves. Trainer and critic share a GPU. Reference and reward model share another, if there is one to spare,
   else the same one. The engine has GPUs of its own.
2. Connect the trainer with the engine's workers, and sync once: now the engine serves the trainer's weights.
3. Each step: generate, reward, compute log-probabilities and values, estimate advantages, learn, sync. The rollouts
   after a sync prove it: the engine's log-probabilities of the tokens it sampled must equal the trainer's but for
   rounding, or the run ends with an error.
4. Generate once more to prove the last sync, and print.

The last line is `OK: ...`. After an error it is `error: ...`, and the exit status is not 0.
"""

import gc
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import ray
import torch

from rlhf_utils import SharedMemoryChannel, SyncReport, WeightSender, stateless_init_process_group
from trainer.errors import RunError
from trainer.flags import arg, section
from trainer.learning.learner import Proof
from trainer.learning.model import Model
from trainer.learning.ppo import CriticLearner, PPOConfig, PPOLearner, estimate
from trainer.learning.rollout import Rollout, rollout_metrics
from trainer.learning.value_models import RewardModel
from trainer.rollouts.engine import EngineActor, complete, llm_options
from trainer.rollouts.evaluation import evaluate
from trainer.rollouts.exact_engine import ExactEngineArguments, exact_options, settle_exactness
from trainer.rollouts.reward_workers import REWARD_MODEL, RewardArguments, RewardWorkers
from trainer.run.actors import ActorGroup, LearnerActor, Seat, StepClock, in_turn, reserve, seat
from trainer.run.arguments import RunArguments, parse
from trainer.run.checkpoint import CRITIC, choose_ppo_models, disk_errors, end_checkpoint, new_checkpoint
from trainer.run.folder import RunFolder
from trainer.run.session import RaySession, run_main
from trainer.tasks.task import TaskArguments, load_task
from weight_sync.groups import refuse_expandable_segments

MAX_MISMATCH = {"cpu": 1e-5, "cuda": 0.02}  # mean |Δ logprob| that rounding explains, in fp32 and bf16
GPU_SHARE = 0.2  # the share of a GPU that Ray counts for each of five actors on it
AT_ONCE = 2  # models that share the cores of a CPU: policy and critic, which learn at the same time


@dataclass
class Arguments:
    """The flags of this script."""

    run: RunArguments = section(RunArguments)
    engine: ExactEngineArguments = section(
        ExactEngineArguments,
        gpu_memory_utilization=0.4,
        tensor_parallel_size=arg(
            1, help="GPUs that the engine is spread over and, colocated, each model is sharded over"
        ),
    )
    task: TaskArguments = section(TaskArguments, task="tiny_reward_model")
    rewards: RewardArguments = section(RewardArguments)
    learner: PPOConfig = section(PPOConfig, num_mini_batches=2)
    placement: Literal["colocated", "split"] = arg(
        "colocated", help="all actors on the same GPUs, or the engine on GPUs of its own (split)"
    )
    sleep: Literal["kv", "weights", "none"] = arg(
        "kv",
        help="memory that an engine on shared GPUs releases while it generates nothing: the KV cache's (kv), the"
        " weights' as well (weights), or none",
    )
    critic_model: str | None = arg(
        None, help="the policy or reward model that the critic begins as (default: the policy)"
    )


class Engine(EngineActor):
    """A Ray actor around vllm.LLM."""

    def start(self, model: str, args: Arguments, device: str, bundles: list[int]) -> int:
        colocated = args.placement == "colocated"
        options = {"enable_sleep_mode": args.sleep != "none"}
        extension = "ColocateWorkerExtension" if colocated else "WorkerExtension"
        options |= exact_options(args.engine.exact, model, extension)
        if colocated:
            os.environ["VLLM_RAY_PER_WORKER_GPUS"] = str(GPU_SHARE)
        max_model_len = self.load(model, *llm_options(args.engine, device, bundles, **options))
        self.remember_weights()
        self.sleep(args.sleep)  # the models load next
        return max_model_len

    def init_weight_update_group(self, address: str, port: int, world_size: int) -> None:
        self.llm.collective_rpc("init_weight_update_group", args=(address, port, 1, world_size))

    def receive_weights(self, *args) -> bool:
        """Take part in a sync, and wake up. Returns whether every worker serves exactly what was sent."""
        self.wake("weights")
        served = self.take_weights(*args)
        self.wake("kv_cache")
        return served


class Rank(LearnerActor):
    """A Ray actor around one rank of a model."""

    def load(self, path: str, state: Path | None, args: Arguments, device: str) -> tuple[int, str]:
        self.shared = device == "cuda" and args.placement == "colocated"
        self.make(path, args, torch.device(device, 0))
        resumed = self.resume(state) if self.learner else (0, "")
        with self.turn():
            pass  # the next model needs the memory that loading took
        gc.freeze()  # what is here now stays: `release_memory` need not look through it at every call
        return resumed


class Reference(Rank):
    """A rank of the model that the run began with."""

    def make(self, path: str, args: Arguments, device: torch.device) -> None:
        self.model = Model(path, args.learner, device)
        if args.engine.exact != "off":  # as the policy, or the KL would not begin at 0
            self.model.make_exact(args.engine.tensor_parallel_size)

    def reference_logprobs(self, rollouts: list[Rollout]) -> torch.Tensor:
        with self.turn():
            return self.model.score_all(rollouts)[0]


class Reward(Rank):
    """A rank of the reward model."""

    rewards = in_turn(RewardModel.rewards)

    def make(self, path: str, args: Arguments, device: torch.device) -> None:
        self.model = RewardModel(path, args.learner, device)


class Critic(Rank):
    """A rank of the critic."""

    values = in_turn(CriticLearner.values)
    learn = in_turn(CriticLearner.learn)

    def make(self, path: str, args: Arguments, device: torch.device) -> None:
        self.learner = CriticLearner(path, args.learner, device, args.run.seed, args.run.steps)

    def save(self, run_folder: Path, step: int) -> None:
        """Begin a checkpoint, which the trainer's ranks, on the same nodes, complete."""
        folder = new_checkpoint(run_folder, step, self.rank) / CRITIC
        with disk_errors(run_folder), self.turn():
            self.learner.save(folder)


class Trainer(Rank):
    """A rank of the policy. It sends to the worker on the same device, or to a group."""

    weights_stay = True  # on the GPU, where the engine reads them
    logprobs = in_turn(PPOLearner.logprobs)
    reference_logprobs = in_turn(PPOLearner.reference_logprobs)
    learn = in_turn(PPOLearner.learn)

    def make(self, path: str, args: Arguments, device: torch.device) -> None:
        proof = Proof(MAX_MISMATCH[device.type], args.engine.exact, args.engine.tensor_parallel_size)
        self.learner = PPOLearner(path, args.learner, device, args.run.seed, args.run.steps, proof)

    def open_channel(self, tensor_parallel_size: int) -> dict[str, str]:
        """Open the channel to the worker on this device. Returns the worker's handle, by device id."""
        device = self.model.device.type  # on CPU, which all ranks share, the worker's rank is the index
        channel = SharedMemoryChannel(torch.device(device, 0 if device == "cuda" else self.rank % tensor_parallel_size))
        self.sender = WeightSender(channel)
        return channel.handles

    def init_weight_update_group(self, address: str, port: int, world_size: int) -> None:
        group = stateless_init_process_group(address, port, 0, world_size, self.model.device)
        self.sender = WeightSender(group)

    def send_weights(self) -> SyncReport:
        return self.sender.send_weights(self.model.named_tensors().items())

    def save(self, run_folder: Path) -> None:
        """Complete the checkpoint that the critic has begun."""
        end_checkpoint(run_folder, self.learner.step, self.learner.save, self.rank)


RANKS = {"trainer": Trainer, "critic": Critic, "reference": Reference, REWARD_MODEL: Reward}


def place(args: Arguments) -> tuple[str, bool, Arguments, dict[str, list[Seat]]]:
    """Choose and reserve the topology.

    Returns the device, whether models take turns on it, the arguments with what was chosen, and the seats of the engine
    and of each model's ranks.
    """
    gpus, tp = int(ray.cluster_resources().get("GPU", 0)), args.engine.tensor_parallel_size
    colocated = args.placement == "colocated"
    wanted = tp if colocated else 1 + tp
    if 0 < gpus < wanted:
        split = f", 1 for trainer and critic and {tp} for the engine" if not colocated else ""
        raise RunError(
            f"--placement {args.placement} with --tensor-parallel-size {tp} wants {wanted} GPUs{split}, and there are"
            f" {gpus}: lower --tensor-parallel-size"
            + ("" if colocated else ", or use --placement colocated, for which one GPU is enough")
        )
    if gpus and colocated:
        refuse_expandable_segments()
    else:
        args = replace(args, sleep="none")  # on CPU, vLLM has no sleep mode; split, nobody needs the memory
    frozen = 1 if gpus > wanted else 0  # split: the bundle of reference and reward model
    bundles = {"trainer": [0], "critic": [0], "reference": [frozen], REWARD_MODEL: [frozen]}
    workers = list(range(frozen + 1, frozen + 1 + tp))
    if colocated:
        workers = list(range(tp))
        bundles = dict.fromkeys(bundles, workers)
    resources = [{"GPU": 1, "CPU": 0} if gpus else {"CPU": 0.5}] * (1 + workers[-1])
    placement = reserve(resources, "PACK" if gpus else "STRICT_PACK" if colocated else "SPREAD")
    share = {"num_gpus": GPU_SHARE} if gpus else {}
    seats = {name: [seat(placement, bundle, **share) for bundle in ranks] for name, ranks in bundles.items()}
    seats["engine"] = [seat(placement, workers[0], workers)]
    return "cuda" if gpus else "cpu", bool(gpus) and colocated, args, seats


def main(args: Arguments) -> None:
    task = load_task(args.task, args.run.seed, args.run.steps, reward_model=args.rewards.reward_model)
    task.refuse_images("a critic reads text alone")
    with RunFolder(args.run, Path(__file__).stem) as run, RaySession(args.run, run.progress) as session:
        # 1. Place
        device, shared, args, seats = place(args)
        paths, states, args.learner = choose_ppo_models(
            run.path, args.run, args.learner, args.critic_model, args.rewards.reward_model, device, task.is_chat
        )
        task.tokenize(paths["trainer"], args.engine.max_model_len)
        run.say("no GPU: all actors run on CPU, where vLLM has no sleep mode" if device == "cpu" else "")
        run.say(f"model {paths['trainer']}\nrun folder {run.path}")
        models = {name: ActorGroup(session, name, RANKS[name], seats[name]) for name in paths}
        # A policy with adapters is the reference without them.
        trainer, critic, reference = models["trainer"], models["critic"], models.get("reference", models["trainer"])
        args.engine = settle_exactness(
            run, args.engine, args.learner, paths["trainer"], trainer, by_nccl=args.placement == "split"
        )
        task.rewards = RewardWorkers(task.rewards, session, models.get(REWARD_MODEL))
        engine = ActorGroup(session, "engine", Engine, seats["engine"])
        max_model_len = engine.agreed("starting", Engine.start, paths["trainer"], args, device, each=engine.bundles)
        steps_done, remarks = load(models, paths, states, args, device, shared)
        run.say(remarks + task.check_lengths(max_model_len, args.learner.max_tokens))

        # 2. Connect, and serve what the trainer holds
        receive_arguments = connect(run, engine, models, args)
        run.start_metrics(steps_done, args)

        # 3. Generate, reward, compute log-probabilities and values, estimate advantages, learn, sync
        if not steps_done and args.task.eval_every:
            run.log_metrics(0, evaluate(engine, task, args.learner, 0))
        for step in range(steps_done + 1, args.run.steps + 1):
            clock = StepClock()
            batch = complete(engine, task, task.draw(step), args.learner, step)
            clock.end("rollout")
            engine.call("sleeping", Engine.sleep, args.sleep)
            batch = task.rewards.compute(batch, step - 1)
            clock.end("reward")
            known = batch.known_rollouts()
            turns = [
                (trainer, Trainer.logprobs, known),
                (critic, Critic.values, known),
                (reference, Reference.reference_logprobs, known),
            ]
            old_policy, values, reference_logprobs = take_turns("scoring", shared, turns)
            clock.end("score")
            experience, estimates = estimate(known, old_policy, reference_logprobs, values, args.learner)
            turns = [(critic, Critic.learn, experience), (trainer, Trainer.learn, experience)]
            critic_metrics, policy_metrics = take_turns("learning", shared, turns)
            clock.end("train")
            report = sync(trainer, engine, receive_arguments)
            clock.end("sync")
            metrics = rollout_metrics(batch.rollouts, args.learner.group_size) | estimates
            metrics |= critic_metrics | policy_metrics | clock.metrics
            metrics |= evaluate(engine, task, args.learner, step)
            if run.saves(step):
                critic.call("saving", Critic.save, run.path, step)
                trainer.call("saving", Trainer.save, run.path)
            run.log_step(step, batch, report, metrics)

        # 4. Generate again, and prove the last sync
        batch = complete(engine, task, task.draw(args.run.steps + 1), args.learner, args.run.steps + 1)
        engine.call("sleeping", Engine.sleep, args.sleep)
        batch = task.rewards.compute(batch, args.run.steps)
        summary = run.summary(batch, trainer.agreed("proving", Trainer.mismatch, batch.rollouts))
    print(summary)


def load(models: dict[str, ActorGroup], paths: dict, states: dict, args: Arguments, device: str, shared: bool) -> tuple:
    """Load all models. Returns the number of steps done, and lines to print about the policy."""
    for model in models.values():  # before any loads, since nothing keeps an address's port free
        address = model.call_rank_0("loading", Rank.address)
        model.call("loading", Rank.join, address, len(model), device, args.engine.exact, AT_ONCE)
    turns = [(model, Rank.load, paths[name], states.get(name), args, device) for name, model in models.items()]
    return take_turns("loading", shared, turns)[0]


def take_turns(phase: str, shared: bool, turns: list[tuple]) -> list:
    """Call models, at the same time or, if they share devices, one after the other. Each turn is a model, a method, and
    its arguments. Returns the results of each model's first rank."""
    if shared:
        return [model.agreed(phase, *call) for model, *call in turns]
    session, running = turns[0][0].session, [model.begin(*call) for model, *call in turns]
    return [results[0] for results in session.wait(phase, *running)]


def connect(run: RunFolder, engine: ActorGroup, models: dict[str, ActorGroup], args: Arguments) -> tuple:
    """Print the topology, connect the trainer with the engine's workers, and sync once. Each rank sends to the worker
    on its device or, split, the one rank to all workers, in a group. Returns the arguments of `receive_weights`."""
    devices = {name: group.call("connecting", Rank.device_id) for name, group in models.items()}
    devices["engine"] = engine.agreed("connecting", Engine.device_ids)
    lines = [f"{'device':40}  actor"]
    lines += [f"{device:40}  {name} {i}" for name, ids in devices.items() for i, device in enumerate(ids)]
    run.say("\n".join(lines))
    trainer, workers = models["trainer"], len(devices["engine"])
    if args.placement == "split":
        group = (*trainer.call_rank_0("connecting", Trainer.address), 1 + workers)
        joining = trainer.begin(Trainer.init_weight_update_group, *group)
        engine.session.wait("connecting", joining, engine.begin(Engine.init_weight_update_group, *group))
        receive_arguments = (args.run.timeout,)
    else:
        rank_handles = trainer.call("connecting", Trainer.open_channel, workers)
        handles = {device_id: path for rank in rank_handles for device_id, path in rank.items()}
        if handles.keys() != set(devices["engine"]):
            raise RunError(
                f"the engine runs on {sorted(devices['engine'])}, and the trainer ranks on {sorted(handles)}"
            )
        receive_arguments = handles, args.run.timeout
    report = sync(trainer, engine, receive_arguments)
    same = engine.agreed("comparing", Engine.serves_checkpoint)
    run.say(
        f"first sync: {report.tensors} tensors, {report.nbytes / 1e9:.3f} GB, {'' if same else 'not '}bit for bit"
        f" what the engine had loaded from disk; from now on by {report.loader}"
    )
    return receive_arguments


def sync(trainer: ActorGroup, engine: ActorGroup, receive_arguments: tuple) -> SyncReport:
    """Send the trainer's weights to the engine, which wakes up."""
    receiving = engine.begin(Engine.receive_weights, *receive_arguments)
    reports, (served,) = engine.session.wait("syncing", trainer.begin(Trainer.send_weights), receiving)
    if not served:
        raise RunError(f"after sync {reports[0].version}, the engine does not serve what was sent")
    return reports[0]


if __name__ == "__main__":
    run_main(main, parse(Arguments, __doc__))
