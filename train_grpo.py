"""Train a policy with vLLM by GRPO and its near relatives: on shared GPUs, on separate ones, or with servers.

    python train_grpo.py                                       # facebook/opt-125m on all GPUs; CPU: a small model
    python train_grpo.py --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k --max-model-len 1024 --steps 200
    python train_grpo.py --topology separate --trainers 4 --engines 2    # 8 GPUs: 4 trainer ranks, two TP=2 engines
    python train_grpo.py --max-staleness 2                     # the engines generate ahead while the trainer learns
    python train_grpo.py --engine-url http://a:8000 --engine-url http://b:8000 --model NAME    # vLLM's servers
    python train_grpo.py --quantization auto                   # engines in FP8; CPU: int8

1. Place: a topology reserves devices for trainer ranks (FSDP2) and engines (vllm.AsyncLLM).
2. Start: engines and trainers load the model.
3. Connect trainers and engines, and sync once: now the engines serve the trainer's weights.
4. Each step: take rollouts with their rewards, learn, sync. The rollouts after a sync prove it: the engines'
   log-probabilities of the tokens they sampled must equal the trainer's: bit for bit if the run is exact, and otherwise
   but for rounding. Of older tokens (--max-staleness), importance weights correct the loss.
5. Generate once more to prove the last sync, and print.

The last line is `OK: ...`. After an error it is `error: ...`, and the exit status is not 0.
"""

from dataclasses import dataclass
from pathlib import Path

from trainer.flags import section
from trainer.learning.config import ModelConfig, OptimizerConfig, SamplingConfig
from trainer.learning.grpo import GRPOLearner
from trainer.learning.objectives import ObjectiveConfig
from trainer.rollouts.evaluation import evaluate
from trainer.rollouts.exactness import settle_exactness
from trainer.rollouts.options import QuantizedEngineArguments
from trainer.rollouts.reward_workers import RewardWorkers
from trainer.rollouts.rollouts import AheadArguments, Rollouts
from trainer.rollouts.sampling import settle_sampling
from trainer.run.arguments import RunArguments, parse
from trainer.run.folder import RunFolder
from trainer.run.models import choose_models
from trainer.run.session import RaySession, run_main
from trainer.tasks.task import TaskArguments, load_task
from trainer.tasks.tools import ToolArguments
from trainer.topologies.base import TopologyArguments
from trainer.topologies.choose import choose_topology
from trainer.topologies.link import TrainerActor
from trainer.topologies.server_pool import ServerArguments


@dataclass
class Arguments:
    """The flags of this script."""

    run: RunArguments = section(RunArguments)
    placement: TopologyArguments = section(TopologyArguments)
    servers: ServerArguments = section(ServerArguments)
    engine: QuantizedEngineArguments = section(QuantizedEngineArguments)
    ahead: AheadArguments = section(AheadArguments)
    tools: ToolArguments = section(ToolArguments)
    task: TaskArguments = section(TaskArguments)
    sampling: SamplingConfig = section(SamplingConfig)
    loss: ObjectiveConfig = section(ObjectiveConfig)
    optimizer: OptimizerConfig = section(OptimizerConfig)
    model: ModelConfig = section(ModelConfig)


class Trainer(TrainerActor):
    """A Ray actor around one rank of the learner, which may be your own: docs/extending.md has one."""

    learner_class = GRPOLearner


def main(args: Arguments) -> None:
    task = load_task(args.task, args.run.seed, args.run.steps, args.tools)
    with RunFolder(args.run, Path(__file__).stem) as run, RaySession(args.run, run.progress, run.timeline) as session:
        # 1. Place
        run.started("ray")
        task.rewards = RewardWorkers(task.rewards, session)
        topology = choose_topology(args, task, run, session)
        engines_on = None if args.servers.engine_url else topology.device
        args.sampling, args.engine = settle_sampling(run, args.sampling, args.engine, engines_on)
        models, args.optimizer = choose_models(run.path, args, topology.device)
        run.say(f"model {models.checkpoint or models.initial}\nrun folder {run.path}")

        # 2. Start
        topology.start_actors(Trainer, models.loaded)
        task = task.tokenized(models.loaded, args.engine.max_model_len)
        known = (topology.gpu, topology.by_nccl, args.servers.engine_url, task.has_images)
        args.engine = settle_exactness(run, args.engine, args.model, models.loaded, *known)
        steps_done, remarks, max_model_len = topology.start(models)
        task.check_lengths(max_model_len)
        run.say(remarks + task.length_remark(max_model_len, args.sampling.max_tokens))
        run.started("models")

        # 3. Connect, and serve what the trainer holds
        topology.connect()
        topology.first_sync(steps_done)
        run.started("sync")
        run.start_metrics(steps_done, args)

        # 4. Take rollouts, learn, sync
        options = {"args": args.ahead, "max_model_len": max_model_len}
        with Rollouts(topology.engines, task, args.sampling, steps_done, **options) as rollouts:
            if not steps_done and args.task.eval_every:
                run.log_metrics(0, evaluate(rollouts, 0))
            for step in range(steps_done + 1, args.run.steps + 1):
                clock = topology.clock()
                batch = rollouts.take(step)
                proof_rollouts = rollouts.proof(step, batch)
                clock.end("rollout")
                metrics = topology.learn(batch.rollouts, proof_rollouts, clock)
                report = topology.sync(step)
                clock.end("sync")
                metrics |= clock.metrics | rollouts.idle_shares(clock.metrics)
                metrics |= evaluate(rollouts, step)
                if run.saves(step):
                    topology.trainers.call("saving", Trainer.save, run.path)
                metrics |= topology.after_step(step, metrics)
                run.log_step(step, batch, report, metrics)
                if args.engine.quantization and (run.saves(step) or step in (steps_done + 1, args.run.steps)):
                    topology.compare()

            # 5. Generate again, and prove the last sync
            batch = rollouts.take(args.run.steps + 1)
        topology.rest()
        mismatch = topology.trainers.agreed("proving", Trainer.mismatch, batch.rollouts)
        summary = run.summary(batch, mismatch)
    print(summary)


if __name__ == "__main__":
    run_main(main, parse(Arguments, __doc__))
