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
from trainer.rollouts.evaluation import evaluate
from trainer.rollouts.exactness import settle_exactness
from trainer.rollouts.options import EngineArguments, EngineSetting
from trainer.rollouts.reward_workers import RewardWorkers
from trainer.rollouts.rollouts import AheadArguments, Rollouts
from trainer.rollouts.sampling import settle_sampling
from trainer.rollouts.teacher import TeacherActor, TeacherArguments, differing_ends, score, shared_length
from trainer.run.actors import ActorArguments, ActorGroup
from trainer.run.arguments import RunArguments, parse
from trainer.run.folder import RunFolder
from trainer.run.models import choose_models, choose_teacher
from trainer.run.session import RaySession, run_main
from trainer.tasks.task import TaskArguments, load_task
from trainer.tasks.tools import ToolArguments
from trainer.topologies.link import TrainerActor
from trainer.topologies.separate import Separate


@dataclass
class Arguments:
    """The flags of this script."""

    run: RunArguments = section(RunArguments)
    engine: EngineArguments = section(
        EngineArguments,
        tensor_parallel_size=arg(1, help="GPUs that each engine is spread over (CPU: groups of cores)"),
        gpu_memory_utilization=arg(0.8, help="fraction of each of its GPUs' memory that an engine takes"),
    )
    placement: ActorArguments = section(ActorArguments)
    tools: ToolArguments = section(ToolArguments)
    task: TaskArguments = section(TaskArguments)
    teacher: TeacherArguments = section(TeacherArguments)
    sampling: SamplingConfig = section(SamplingConfig)
    loss: DistillLossConfig = section(DistillLossConfig)
    optimizer: OptimizerConfig = section(OptimizerConfig)
    model: ModelConfig = section(ModelConfig)
    ahead = AheadArguments()  # no flags: a teacher scores what the last weights have sampled


class Trainer(TrainerActor):
    """A Ray actor around one rank of the student."""

    learner_class = DistillLearner


class BesideTeacher(Separate):
    """The teacher's engines as well have GPUs of their own or, if there are too few, share those of the student's."""

    gpu_share = 0.5  # an engine of the student's and one of the teacher's fit on one GPU
    teacher: str  # its model

    def place(self) -> None:
        super().place()
        self.teacher_seats = self.seats(self.bundles[-self.teacher_workers :], self.args.teacher.teacher_engines)

    def settle_gpus(self, trainers: int, workers: int, gpus: int) -> int:
        self.teacher_workers = self.args.teacher.teacher_engines * self.args.teacher.teacher_tensor_parallel_size
        shared, apart = max(workers, self.teacher_workers), workers + self.teacher_workers
        if not 0 < gpus < trainers + apart:
            return trainers + apart
        if gpus < trainers + shared:
            raise RunError(
                f"this topology wants {trainers + shared} GPUs, {trainers} for the trainer and {shared} that engines"
                f" and teacher share, and there are {gpus}"
            )
        self.remark = "engines and teacher share GPUs: each takes half of --gpu-memory-utilization"
        self.memory_share /= 2
        return trainers + shared

    def start_actors(self, cls: type[TrainerActor], model: str) -> None:
        self.teachers = ActorGroup(self.session, "teacher", TeacherActor, self.teacher_seats)
        self.teachers_preparing = self.teachers.begin(TeacherActor.prepare, self.device, each=self.teachers.bundles)
        super().start_actors(cls, model)

    def start_engines(self, model: str) -> dict[str, ray.ObjectRef]:
        # The teacher before the engines, which may be on the same GPUs: vLLM measures the free memory.
        setting = EngineSetting(self.device, None, len(self.teachers), options={"enforce_eager": True})  # no decoding
        engine = replace(self.args.engine, gpu_memory_utilization=self.memory_share)
        options = (self.teacher, engine, setting, "none")
        starting = self.teachers.begin(TeacherActor.start, *options, each=self.teachers.bundles)
        (self.teacher_max_model_len, *_), _ = self.session.wait("starting", starting, self.teachers_preparing)
        return super().start_engines(model)


def main(args: Arguments) -> None:
    task = load_task(args.task, args.run.seed, args.run.steps, args.tools, needs_reward=args.loss.reward_coef > 0)
    task.refuse_images("a teacher scores text alone")
    with RunFolder(args.run, Path(__file__).stem) as run, RaySession(args.run, run.progress, run.timeline) as session:
        # 1. Place
        run.started("ray")
        task.rewards = RewardWorkers(task.rewards, session)
        topology = BesideTeacher(args, task, run, session)
        args.sampling, args.engine = settle_sampling(run, args.sampling, args.engine, topology.device)
        models, args.optimizer = choose_models(run.path, args, topology.device)
        teacher = topology.teacher = choose_teacher(run.path, args, models.loaded)
        run.say(topology.remark)
        ends = differing_ends(teacher, models.loaded)
        run.say(f"model {models.checkpoint or models.initial}\nteacher {teacher}{ends}\nrun folder {run.path}")

        # 2. Start
        topology.start_actors(Trainer, models.loaded)
        task = task.tokenized(models.loaded, args.engine.max_model_len)
        args.engine = settle_exactness(run, args.engine, args.model, models.loaded, topology.gpu)
        steps_done, remarks, max_model_len = topology.start(models)
        max_model_len = shared_length(task, max_model_len, topology.teacher_max_model_len, args.sampling.max_tokens)
        run.say(remarks + task.length_remark(max_model_len, args.sampling.max_tokens))
        run.started("models")

        # 3. Connect, and serve what the trainer holds
        topology.connect()
        topology.first_sync(steps_done)
        run.started("sync")
        run.start_metrics(steps_done, args)

        # 4. Take rollouts, score, learn, sync
        with Rollouts(topology.engines, task, args.sampling, steps_done, max_model_len=max_model_len) as rollouts:
            if not steps_done and args.task.eval_every:
                run.log_metrics(0, evaluate(rollouts, 0))
            for step in range(steps_done + 1, args.run.steps + 1):
                clock = topology.clock()
                batch = rollouts.take(step)
                clock.end("rollout")
                batch = score(topology.teachers, batch)
                clock.end("score")
                metrics = topology.learn(batch.rollouts, [], clock)
                report = topology.sync(step)
                clock.end("sync")
                metrics |= clock.metrics | evaluate(rollouts, step)
                if run.saves(step):
                    topology.trainers.call("saving", Trainer.save, run.path)
                run.log_step(step, batch, report, metrics)

            # 5. Generate again, and prove the last sync
            batch = rollouts.take(args.run.steps + 1)
        mismatch = topology.trainers.agreed("proving", Trainer.mismatch, batch.rollouts)
        summary = run.summary(batch, mismatch)
    print(summary)


if __name__ == "__main__":
    run_main(main, parse(Arguments, __doc__))
