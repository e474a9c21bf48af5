"""On-policy distillation: a teacher's engines score each token that the student has sampled.

    python train_distill.py --teacher Qwen/Qwen2.5-7B-Instruct --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k
                                                     # 3 GPUs: trainer, the student's engine, the teacher's engine
                                                     # 2 GPUs: the same; both engines share one of them
    python train_distill.py --task addition --teacher trainer.tasks.addition:build_teacher --steps 300
                                                     # no GPU: small models made on the spot, gloo

    GPU 0..      trainer actors: fp32 master weights, the student (trainer/learning/distill.py), WeightSender
    other GPUs   engine actors: vllm.AsyncLLM with TP workers each, extended by rlhf_utils.WorkerExtension
    other GPUs   teacher actors: vllm.AsyncLLM as it is (trainer/rollouts/teacher.py), or on the engines' GPUs

1. Place: one Ray placement group, with a bundle for each trainer rank, each engine worker and, if there are as many
   GPUs, each worker of the teacher. If there are fewer, the teacher's workers and the engines' share GPUs.
2. Start: engines, teacher and trainers load their models.
3. Connect the trainer's ranks with all workers of the engines, and sync once: now the engines serve the trainer's
   weights. The teacher's weights stay as they were loaded.
4. Each step: take rollouts, score them by the teacher, learn, sync. The rollouts after a sync prove it: the engines'
   log-probabilities of the tokens they sampled must equal the trainer's, with --exact bit for bit, else but for
   rounding.
5. Generate once more to prove the last sync, and print.

The last line is `OK: ...`. After an error it is `error: ...`, and the exit status is not 0.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import ray

from trainer.errors import RunError
from trainer.flags import arg, section
from trainer.learning.config import ModelConfig, OptimizerConfig, SamplingConfig
from trainer.learning.distill import DistillLearner, DistillLossConfig
from trainer.rollouts.engine import EngineActor
from trainer.rollouts.evaluation import evaluate
from trainer.rollouts.exactness import settle_exactness
from trainer.rollouts.options import EngineArguments, EngineSetting
from trainer.rollouts.reward_workers import RewardWorkers
from trainer.rollouts.rollouts import Rollouts
from trainer.rollouts.sampling import in_parts, settle_sampling
from trainer.rollouts.teacher import TeacherActor, TeacherArguments, differing_ends, score, shared_length
from trainer.run.actors import (
    ActorArguments,
    ActorGroup,
    LearnerActor,
    Seat,
    StepClock,
    by_node,
    engine_seat,
    reserve,
    seat,
)
from trainer.run.arguments import RunArguments, parse
from trainer.run.folder import RunFolder
from trainer.run.models import Models, choose_models, choose_teacher
from trainer.run.session import RaySession, run_main
from trainer.tasks.task import TaskArguments, load_task
from trainer.tasks.tools import ToolArguments
from trainer.topologies.link import TrainerActor, connect_by_group, say_first_sync, sync

GPU_SHARE = 0.5  # the share of a GPU that Ray counts for a worker: the student's and the teacher's fit on one


@dataclass
class Arguments:
    """The flags of this script."""

    run: RunArguments = section(RunArguments)
    engine: EngineArguments = section(
        EngineArguments,
        tensor_parallel_size=arg(1, help="GPUs that each engine is spread over (CPU: groups of cores)"),
        gpu_memory_utilization=arg(0.8, help="fraction of each of its GPUs' memory that an engine takes"),
    )
    actors: ActorArguments = section(ActorArguments)
    tools: ToolArguments = section(ToolArguments)
    task: TaskArguments = section(TaskArguments)
    teacher: TeacherArguments = section(TeacherArguments)
    sampling: SamplingConfig = section(SamplingConfig)
    loss: DistillLossConfig = section(DistillLossConfig)
    optimizer: OptimizerConfig = section(OptimizerConfig)
    model: ModelConfig = section(ModelConfig)


class Trainer(TrainerActor):
    """A Ray actor around one rank of the student."""

    learner_class = DistillLearner


def place(args: Arguments) -> tuple[str, str, EngineArguments, list[Seat], list[Seat], list[Seat]]:
    """Choose and reserve the topology. Returns the device, a remark on it, the engine's arguments with what was chosen,
    and the seats of trainers, engines and teachers."""
    gpus, engine = int(ray.cluster_resources().get("GPU", 0)), args.engine
    tp = engine.tensor_parallel_size
    trainers, engines = args.actors.trainers, args.actors.engines
    workers, teacher_workers = engines * tp, args.teacher.teacher_engines * args.teacher.teacher_tensor_parallel_size
    wanted, apart = trainers + max(workers, teacher_workers), trainers + workers + teacher_workers
    if 0 < gpus < wanted:
        raise RunError(
            f"this topology wants {wanted} GPUs, {trainers} for the trainer and {wanted - trainers} that engines and"
            f" teacher share, and there are {gpus}"
        )
    if gpus:
        remark = f"{gpus - apart} GPUs stay unused: --trainers and --engines take more" if gpus > apart else ""
        if gpus < apart:
            remark = "engines and teacher share GPUs: each takes half of --gpu-memory-utilization"
            engine = replace(engine, gpu_memory_utilization=engine.gpu_memory_utilization / 2)
        placement = reserve([{"GPU": 1}] * (wanted if gpus < apart else apart), "PACK")
        bundles = by_node(placement)  # so that an engine spans as few nodes as possible
        trainer_seats = [seat(placement, bundle, num_gpus=1) for bundle in bundles[:trainers]]
        engine_bundles = in_parts(bundles[trainers : trainers + workers], engines)
        engine_seats = [engine_seat(placement, part, GPU_SHARE) for part in engine_bundles]
        teacher_bundles = in_parts(bundles[-teacher_workers:], args.teacher.teacher_engines)
        teacher_seats = [engine_seat(placement, part, GPU_SHARE) for part in teacher_bundles]
        return "cuda", remark, engine, trainer_seats, engine_seats, teacher_seats
    placement = reserve([{"CPU": 1 / trainers}] * trainers + [{"CPU": 1 / engines}] * engines, "SPREAD")
    trainer_seats = [seat(placement, bundle, num_cpus=1 / trainers) for bundle in range(trainers)]
    # An engine's workers are processes of its actor; by their numbers, llm_options divides the cores among them.
    engine_cores = in_parts(list(range(workers)), engines)
    engine_seats = [seat(placement, trainers + i, part) for i, part in enumerate(engine_cores)]
    teacher_cores = in_parts(list(range(teacher_workers)), args.teacher.teacher_engines)
    teacher_seats = [seat(placement, trainers + i % engines, part) for i, part in enumerate(teacher_cores)]
    remark = f"no GPU: the trainer, a TP={tp} engine and the teacher run on CPU, with gloo between trainer and engine"
    return "cpu", remark, engine, trainer_seats, engine_seats, teacher_seats


def main(args: Arguments) -> None:
    task = load_task(args.task, args.run.seed, args.run.steps, args.tools, needs_reward=args.loss.reward_coef > 0)
    task.refuse_images("a teacher scores text alone")
    with RunFolder(args.run, Path(__file__).stem) as run, RaySession(args.run, run.progress, run.timeline) as session:
        # 1. Place
        run.started("ray")
        task.rewards = RewardWorkers(task.rewards, session)
        device, remark, args.engine, trainer_seats, engine_seats, teacher_seats = place(args)
        args.sampling, args.engine = settle_sampling(run, args.sampling, args.engine, device)
        models, args.optimizer = choose_models(run.path, args, device)
        teacher = choose_teacher(run.path, args, models.loaded)
        task = task.tokenized(models.loaded, args.engine.max_model_len)
        run.say(remark)
        ends = differing_ends(teacher, models.loaded)
        run.say(f"model {models.checkpoint or models.initial}\nteacher {teacher}{ends}\nrun folder {run.path}")

        # 2. Start
        trainers = ActorGroup(session, "trainer", Trainer, trainer_seats)
        engines = ActorGroup(session, "engine", EngineActor, engine_seats)
        teachers = ActorGroup(session, "teacher", TeacherActor, teacher_seats)
        gpu = trainers.call_rank_0("starting", LearnerActor.gpu)
        args.engine = settle_exactness(run, args.engine, args.model, models.loaded, gpu)
        (steps_done, remarks), lengths = start(trainers, engines, teachers, models, teacher, args, device)
        max_model_len = shared_length(task, *lengths, args.sampling.max_tokens)
        run.say(remarks + task.length_remark(max_model_len, args.sampling.max_tokens))
        run.started("models")

        # 3. Connect, and serve what the trainer holds
        connect_by_group(trainers, engines, args.engine.tensor_parallel_size)
        receive_arguments = [(args.run.timeout,)] * len(engines)
        say_first_sync(run, sync(trainers, engines, steps_done, receive_arguments), engines)
        run.started("sync")
        run.start_metrics(steps_done, args)

        # 4. Take rollouts, score, learn, sync
        with Rollouts(engines, task, args.sampling, steps_done, max_model_len=max_model_len) as rollouts:
            if not steps_done and args.task.eval_every:
                run.log_metrics(0, evaluate(rollouts, 0))
            for step in range(steps_done + 1, args.run.steps + 1):
                clock = StepClock()
                batch = rollouts.take(step)
                clock.end("rollout")
                batch = score(teachers, batch)
                clock.end("score")
                resting = engines.begin(EngineActor.sleep, "none")
                learning = trainers.begin(Trainer.learn, batch.rollouts, [], False)
                learned, _ = session.wait("learning", learning, resting)
                clock.end("train")
                report = sync(trainers, engines, step, receive_arguments)
                clock.end("sync")
                metrics = learned[0] | clock.metrics
                metrics |= evaluate(rollouts, step)
                if run.saves(step):
                    trainers.call("saving", Trainer.save, run.path)
                run.log_step(step, batch, report, metrics)

            # 5. Generate again, and prove the last sync
            batch = rollouts.take(args.run.steps + 1)
        mismatch = trainers.agreed("proving", Trainer.mismatch, batch.rollouts)
        summary = run.summary(batch, mismatch)
    print(summary)


def start(
    trainers: ActorGroup,
    engines: ActorGroup,
    teachers: ActorGroup,
    models: Models,
    teacher: str,
    args: Arguments,
    device: str,
) -> tuple[tuple[int, str], tuple[int, int]]:
    """Load all models. Returns the number of steps done and lines to print, and the tokens that a prompt and its
    completion may have for the engines and for the teacher."""
    address = trainers.call_rank_0("starting", LearnerActor.address)
    loading = trainers.begin(Trainer.load, address, len(trainers), models, args, device, False)
    # The teacher before the engines, which may be on the same GPUs: vLLM measures the free memory.
    setting = EngineSetting(device, None, len(teachers), GPU_SHARE, options={"enforce_eager": True})  # no decoding
    scoring = (teacher, args.engine, setting, "none")
    teacher_lengths = teachers.call("starting", TeacherActor.start, *scoring, each=teachers.bundles)
    setting = EngineSetting(device, "WorkerExtension", len(engines), GPU_SHARE)
    sampling = (models.loaded, args.engine, setting, "none")
    starting = engines.begin(EngineActor.start, *sampling, each=engines.bundles)
    loaded, lengths = trainers.session.wait("starting", loading, starting)
    return loaded[0], (lengths[0], teacher_lengths[0])


if __name__ == "__main__":
    run_main(main, parse(Arguments, __doc__))
