"""PPO: a policy, a critic, a reference and a reward model as Ray actors around one vLLM engine.

    python train_ppo.py                              # 1 GPU: facebook/opt-125m, all five on it
    python train_ppo.py --tensor-parallel-size 4      # 4 GPUs: a TP=4 engine, the others sharded over the same GPUs
    python train_ppo.py --topology separate          # 2 GPUs or more: an engine apart, NCCL between it and the policy
    python train_ppo.py --dataset prompts.jsonl --reward-model NAME --reward graded:reward
    python train_ppo.py                               # no GPU: small built-in models, all five on CPU

    Engine       vllm.AsyncLLM, whose workers have an extension of rlhf_utils.py
    Trainer      the policy (PPO's actor): fp32 master weights, PPO (trainer/learning/ppo.py), WeightSender
    Critic       the policy's trunk with a value head, and an optimizer of its own
    Reference    the model that the run began with, frozen; with --lora-rank, the policy without its adapters instead
    RewardModel  a sequence classifier with one output, frozen

1. Place: one Ray placement group. `--topology shared`: each GPU has a bundle with a rank of each model and a worker of
   the engine. They take turns: the engine sleeps, and idle models wait in host memory, except for the policy's weights,
   which the engine reads where they are. (In an evaluation, the engine stays awake beside the reward model.)
   `--topology separate`: nothing moves. Trainer and critic share a GPU. Reference and reward model share another, if
   there is one to spare, else the same one. The engine has GPUs of its own.
2. Start: the engine, then all models.
3. Connect the trainer with the engine's workers, and sync once: now the engine serves the trainer's weights.
4. Each step: generate, reward, compute log-probabilities and values, estimate advantages, learn, sync. The rollouts
   after a sync prove it: the engine's log-probabilities of the tokens it sampled must equal the trainer's but for
   rounding, or the run ends with an error.
5. Generate once more to prove the last sync, and print.

The last line is `OK: ...`. After an error it is `error: ...`, and the exit status is not 0.
"""

import gc
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import ray
import torch

from trainer.errors import RunError
from trainer.flags import arg, section
from trainer.learning.config import ModelConfig, OptimizerConfig, SamplingConfig
from trainer.learning.model import Model
from trainer.learning.policy import PolicyScores
from trainer.learning.ppo import CriticLearner, Experience, PPOLearner, PPOLossConfig, estimate
from trainer.learning.rollout import Rollout, rollout_metrics
from trainer.learning.value_models import RewardModel
from trainer.rollouts.engine import EngineActor
from trainer.rollouts.evaluation import evaluate
from trainer.rollouts.exactness import settle_exactness
from trainer.rollouts.options import EngineArguments, EngineSetting
from trainer.rollouts.reward_workers import REWARD_MODEL, RewardArguments, RewardWorkers
from trainer.rollouts.rollouts import Rollouts
from trainer.rollouts.sampling import settle_sampling
from trainer.run.actors import (
    ActorGroup,
    LearnerActor,
    Seat,
    StepClock,
    by_node,
    engine_seat,
    on_one_node,
    reserve,
    seat,
)
from trainer.run.arguments import RunArguments, parse
from trainer.run.checkpoint import CRITIC, disk_errors, end_checkpoint, new_checkpoint
from trainer.run.folder import RunFolder
from trainer.run.models import choose_ppo_models
from trainer.run.session import RaySession, run_main
from trainer.tasks.rewards import Batch
from trainer.tasks.task import TaskArguments, load_task
from trainer.topologies.link import (
    SendingActor,
    connect_by_group,
    connect_by_memory,
    proof_of,
    say_first_sync,
    sync,
)
from weight_sync.groups import refuse_expandable_segments

GPU_SHARE = 0.2  # the share of a GPU that each of five actors on it reserves
AT_ONCE = 2  # models that share the cores of a CPU: policy and critic, which learn at the same time


@dataclass
class Arguments:
    """The flags of this script."""

    run: RunArguments = section(RunArguments)
    engine: EngineArguments = section(
        EngineArguments,
        gpu_memory_utilization=arg(0.4, help="fraction of each of its GPUs' memory that the engine takes"),
        tensor_parallel_size=arg(
            1, help="GPUs that the engine is spread over and, on shared GPUs, each model is sharded over"
        ),
    )
    task: TaskArguments = section(TaskArguments, task="tiny_reward_model")
    rewards: RewardArguments = section(RewardArguments)
    sampling: SamplingConfig = section(SamplingConfig)
    loss: PPOLossConfig = section(PPOLossConfig)
    optimizer: OptimizerConfig = section(OptimizerConfig, num_mini_batches=2)
    model: ModelConfig = section(ModelConfig)
    topology: Literal["shared", "separate"] = arg(
        "shared", help="all actors on the same GPUs, or the engine on GPUs of its own"
    )
    sleep: Literal["kv", "weights", "none"] = arg(
        "kv",
        help="memory that an engine on shared GPUs releases while it generates nothing: the KV cache's (kv), the"
        " weights' as well (weights), or none",
    )
    critic_model: str | None = arg(
        None, help="the policy or reward model that the critic begins as (default: the policy)"
    )


class Rank(LearnerActor):
    """A Ray actor around one rank of a model."""

    def load(self, path: str, state: Path | None, args: Arguments, device: str) -> tuple[int, str]:
        self.shared = device == "cuda" and args.topology == "shared"
        self.make(path, args, torch.device(device, 0))
        resumed = self.resume(state) if self.learner else (0, "")
        with self.on_device():
            pass  # the next model needs the memory that loading took
        gc.freeze()  # what is here now stays: `release_memory` need not look through it at every call
        return resumed


class Reference(Rank):
    """A rank of the model that the run began with."""

    def make(self, path: str, args: Arguments, device: torch.device) -> None:
        self.model = Model(path, args, device)
        if args.engine.exact != "off":  # as the policy, or the KL would not begin at 0
            self.model.make_exact(args.engine.tensor_parallel_size)

    def reference_logprobs(self, rollouts: list[Rollout]) -> torch.Tensor:
        with self.on_device():
            return self.model.score_all(rollouts)[0]


class Reward(Rank):
    """A rank of the reward model."""

    def make(self, path: str, args: Arguments, device: torch.device) -> None:
        self.model = RewardModel(path, args, device)

    def rewards(self, prompts: list, completions: list) -> list[float]:
        with self.on_device():
            return self.model.rewards(prompts, completions)


class Critic(Rank):
    """A rank of the critic."""

    def make(self, path: str, args: Arguments, device: torch.device) -> None:
        self.learner = CriticLearner(path, args, device, args.run.seed, args.run.steps)

    def values(self, rollouts: list[Rollout]) -> torch.Tensor:
        with self.on_device():
            return self.learner.values(rollouts)

    def learn(self, experience: Experience) -> dict[str, float]:
        with self.on_device():
            return self.learner.learn(experience)

    def save(self, run_folder: Path, step: int) -> None:
        """Begin a checkpoint, which the trainer's ranks, on the same nodes, complete."""
        folder = new_checkpoint(run_folder, step, self.rank) / CRITIC
        with disk_errors(run_folder), self.on_device():
            self.learner.save(folder)


class Trainer(Rank, SendingActor):
    """A rank of the policy. It sends to the worker on the same device, or to a group."""

    weights_stay = True  # on the GPU, where the engine reads them

    def make(self, path: str, args: Arguments, device: torch.device) -> None:
        proof = proof_of(args.engine, device.type)
        self.learner = PPOLearner(path, args, device, args.run.seed, args.run.steps, proof)

    def logprobs(self, rollouts: list[Rollout]) -> PolicyScores:
        with self.on_device():
            return self.learner.score(rollouts)

    def reference_logprobs(self, rollouts: list[Rollout]) -> torch.Tensor:
        with self.on_device():
            return self.learner.reference_logprobs(rollouts)

    def learn(self, experience: Experience) -> dict[str, float]:
        with self.on_device():
            return self.learner.learn(experience)

    def save(self, run_folder: Path) -> None:
        """Complete the checkpoint that the critic has begun."""
        end_checkpoint(run_folder, self.learner.step, self.learner.save, self.rank)


RANKS = {"trainer": Trainer, "critic": Critic, "reference": Reference, REWARD_MODEL: Reward}


def place(args: Arguments) -> tuple[str, bool, Arguments, dict[str, list[Seat]]]:
    """Choose and reserve the topology.

    Returns the device, whether models take turns on it, the arguments with what was chosen, and the seats of the engine
    and of each model's ranks.
    """
    colocated, tp = args.topology == "shared", args.engine.tensor_parallel_size
    gpus = on_one_node("GPU") if colocated else int(ray.cluster_resources().get("GPU", 0))
    wanted = tp if colocated else 1 + tp
    if 0 < gpus < wanted:
        raise RunError(
            f"--topology {args.topology} with --tensor-parallel-size {tp} wants {wanted} GPUs, and there are {gpus}:"
            " lower --tensor-parallel-size, or use --topology shared"
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
    placement = reserve(resources, "STRICT_PACK" if colocated else "PACK" if gpus else "SPREAD")
    share, order = {"num_gpus": GPU_SHARE} if gpus else {}, by_node(placement)
    seats = {name: [seat(placement, order[bundle], **share) for bundle in ranks] for name, ranks in bundles.items()}
    workers = [order[bundle] for bundle in workers]
    seats["engine"] = [engine_seat(placement, workers, (GPU_SHARE if colocated else 1) if gpus else 0)]
    return "cuda" if gpus else "cpu", bool(gpus) and colocated, args, seats


def main(args: Arguments) -> None:
    task = load_task(args.task, args.run.seed, args.run.steps, reward_model=args.rewards.reward_model)
    task.refuse_images("a critic reads text alone")
    with RunFolder(args.run, Path(__file__).stem) as run, RaySession(args.run, run.progress, run.timeline) as session:
        # 1. Place
        run.started("ray")
        device, shared, args, seats = place(args)
        args.sampling, args.engine = settle_sampling(run, args.sampling, args.engine, device)
        paths, states, args.optimizer = choose_ppo_models(run.path, args, device)
        task = task.tokenized(paths["trainer"], args.engine.max_model_len)
        run.say("no GPU: all actors run on CPU, where vLLM has no sleep mode" if device == "cpu" else "")
        run.say(f"model {paths['trainer']}\nrun folder {run.path}")
        models = {name: ActorGroup(session, name, RANKS[name], seats[name]) for name in paths}
        # A policy with adapters is the reference without them.
        trainer, critic, reference = models["trainer"], models["critic"], models.get("reference", models["trainer"])
        engine = ActorGroup(session, "engine", EngineActor, seats["engine"])
        gpu = trainer.call("starting", LearnerActor.gpu)[0]
        by_nccl = args.topology == "separate"
        args.engine = settle_exactness(run, args.engine, args.model, paths["trainer"], gpu, by_nccl)
        task.rewards = RewardWorkers(task.rewards, session, models.get(REWARD_MODEL))
        starting = (paths["trainer"], args.engine, engine_setting(args, device), args.sleep)
        max_model_len = engine.agreed("starting", EngineActor.start, *starting, each=engine.bundles)
        steps_done, remarks = load(models, paths, states, args, device, shared)
        task.check_lengths(max_model_len)
        run.say(remarks + task.length_remark(max_model_len, args.sampling.max_tokens))
        run.started("models")

        # 3. Connect, and serve what the trainer holds
        receive_arguments = connect(run, trainer, engine, args)
        say_first_sync(run, sync(trainer, engine, steps_done, receive_arguments), engine)
        run.started("sync")
        run.start_metrics(steps_done, args)

        # 4. Generate, reward, compute log-probabilities and values, estimate advantages, learn, sync
        # A reward model waits for its turn, so rollouts come without rewards.
        with Rollouts(engine, task, args.sampling, steps_done, rewarded=False) as rollouts:
            if not steps_done and args.task.eval_every:
                run.log_metrics(0, evaluate(rollouts, 0))
            for step in range(steps_done + 1, args.run.steps + 1):
                clock = StepClock()
                batch = rollouts.take(step)
                clock.end("rollout")
                engine.call("sleeping", EngineActor.sleep, args.sleep)
                batch = task.rewards.compute(batch, step - 1)
                clock.end("reward")
                metrics = learn(trainer, critic, reference, batch, args, shared, clock)
                report = sync(trainer, engine, step, receive_arguments)
                clock.end("sync")
                metrics |= clock.metrics
                metrics |= evaluate(rollouts, step)
                if run.saves(step):
                    critic.call("saving", Critic.save, run.path, step)
                    trainer.call("saving", Trainer.save, run.path)
                run.log_step(step, batch, report, metrics)

            # 5. Generate again, and prove the last sync
            batch = rollouts.take(args.run.steps + 1)
        engine.call("sleeping", EngineActor.sleep, args.sleep)
        batch = task.rewards.compute(batch, args.run.steps)
        summary = run.summary(batch, trainer.agreed("proving", Trainer.mismatch, batch.rollouts))
    print(summary)


def learn(
    trainer: ActorGroup,
    critic: ActorGroup,
    reference: ActorGroup,
    batch: Batch,
    args: Arguments,
    shared: bool,
    clock: StepClock,
) -> dict[str, float]:
    """One step of policy and critic on this batch, which has rewards. Returns its metrics."""
    known = batch.known_rollouts()
    turns = [
        (trainer, Trainer.logprobs, known),
        (critic, Critic.values, known),
        (reference, Reference.reference_logprobs, known),
    ]
    old_policy, values, reference_logprobs = take_turns("scoring", shared, turns)
    clock.end("score")
    experience, estimates = estimate(known, old_policy, reference_logprobs, values, args.loss)
    turns = [(critic, Critic.learn, experience), (trainer, Trainer.learn, experience)]
    critic_metrics, policy_metrics = take_turns("learning", shared, turns)
    clock.end("train")
    return rollout_metrics(batch.rollouts, args.sampling.group_size) | estimates | critic_metrics | policy_metrics


def connect(run: RunFolder, trainer: ActorGroup, engine: ActorGroup, args: Arguments) -> list[tuple]:
    """Connect the trainer with the engine's workers. Returns the arguments of their `receive_weights`."""
    if args.topology == "separate":
        connect_by_group(trainer, engine, args.engine.tensor_parallel_size)
        return [(args.run.timeout,)]
    ((handles,),) = connect_by_memory(run, trainer, engine, 1)
    return [(handles, args.run.timeout)]


def engine_setting(args: Arguments, device: str) -> EngineSetting:
    """How the engine runs: beside all models, or apart."""
    extension = "WorkerExtension" if args.topology == "separate" else "ColocateWorkerExtension"
    return EngineSetting(device, extension, options={"enable_sleep_mode": args.sleep != "none"})


def load(models: dict[str, ActorGroup], paths: dict, states: dict, args: Arguments, device: str, shared: bool) -> tuple:
    """Load all models. Returns the number of steps done, and lines to print about the policy."""
    for name, model in models.items():  # before any loads, since nothing keeps an address's port free
        address = model.call("loading", Rank.address)[0]
        exact = args.engine.exact if name in ("trainer", "reference") else "off"  # no engine has the others' bits
        model.call("loading", Rank.join, address, len(model), device, exact, AT_ONCE)
    turns = [(model, Rank.load, paths[name], states.get(name), args, device) for name, model in models.items()]
    return take_turns("loading", shared, turns)[0]


def take_turns(phase: str, shared: bool, turns: list[tuple]) -> list:
    """Call models, at the same time or, if they share devices, one after the other. Each turn is a model, a method, and
    its arguments. Returns the results of each model's first rank."""
    if shared:
        return [model.agreed(phase, *call) for model, *call in turns]
    session, running = turns[0][0].session, [model.begin(*call) for model, *call in turns]
    return [results[0] for results in session.wait(phase, *running)]


if __name__ == "__main__":
    run_main(main, parse(Arguments, __doc__))
