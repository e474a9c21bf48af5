"""RLHF with a quantized engine: rlhf.py's topology; torchao quantizes the engine's weights, not the trainer's.

    python rlhf_online_quant.py                             # 3 GPUs: facebook/opt-125m, trainer + TP=2 engine in FP8
    python rlhf_online_quant.py --trainers 4 --engines 2    # 8 GPUs: 4 trainer ranks (FSDP2), two TP=2 engines
    python rlhf_online_quant.py                             # no GPU: a small built-in model, int8, gloo
    python rlhf_online_quant.py --ray-address auto          # on a running Ray cluster

    GPU 0..      trainer actors: fp32 master weights, GRPO (trainer/learning/grpo.py), WeightSender (rlhf_utils.py)
    other GPUs   engine actors: vllm.LLM with TP workers each, extended by rlhf_utils.WorkerExtension; FP8 weights and
                 activations

1. Place: one Ray placement group, with a bundle for each trainer rank and one for each engine worker.
2. Connect all trainer ranks with all workers, and sync once: now the engines serve the trainer's weights, quantized.
3. Each step: generate, reward, learn, sync. The rollouts after a sync prove it: the engines' log-probabilities of the
   tokens they sampled must be close to the trainer's, or the run ends with an error. Quantization always leaves a
   distance, `mismatch`; truncated importance weights (trainer/learning/objectives.py) correct for it. `mismatch` barely
   reacts to stale scales. So the engines also compare their quantized weights with what was sent: after the first sync,
   after the first and the last step, and with every checkpoint.
4. Generate once more to prove the last sync, and print.

The last line is `OK: ...`. After an error it is `error: ...`, and the exit status is not 0.
"""

from dataclasses import dataclass
from pathlib import Path

import ray

from rlhf_utils import Comparison, SyncReport, WeightSender, WeightSyncError, stateless_init_process_group
from trainer.errors import RunError
from trainer.flags import section
from trainer.learning.grpo import GRPOConfig, GRPOLearner
from trainer.learning.learner import Proof
from trainer.learning.rollout import Rollout
from trainer.rollouts.engine import EngineActor, EngineArguments, complete, llm_options, resample, set_environment
from trainer.rollouts.evaluation import evaluate
from trainer.rollouts.quantization import QuantizationArguments, quantize_by_torchao
from trainer.rollouts.reward_workers import RewardWorkers
from trainer.run.actors import ActorGroup, LearnerActor, Seat, SeparateActorArguments, StepClock, by_node, reserve, seat
from trainer.run.arguments import RunArguments, parse
from trainer.run.checkpoint import Models, choose_models
from trainer.run.folder import RunFolder
from trainer.run.session import RaySession, run_main
from trainer.tasks.task import TaskArguments, load_task
from trainer.tasks.tools import ToolArguments

# Mean |Δ logprob| that int8 and FP8 explain: in FP8, random weights of Qwen2.5's shapes had up to 0.095. This bound
# cannot prove that a sync left no weight behind; `compare` can.
MAX_MISMATCH = {"cpu": 0.1, "cuda": 0.1}


@dataclass
class Arguments:
    """The flags of this script."""

    run: RunArguments = section(RunArguments)
    engine: EngineArguments = section(EngineArguments)
    actors: SeparateActorArguments = section(SeparateActorArguments)
    quantization: QuantizationArguments = section(QuantizationArguments, quantization="auto")
    tools: ToolArguments = section(ToolArguments)
    task: TaskArguments = section(TaskArguments)
    learner: GRPOConfig = section(GRPOConfig)


class Engine(EngineActor):
    """A Ray actor around vllm.LLM."""

    def start(self, model: str, args: Arguments, device: str, bundles: list[int]) -> int:
        options = {
            "worker_extension_cls": "trainer.rollouts.quantization.QuantizedWorkerExtension",
            "dtype": "bfloat16",
        }
        options, environment = llm_options(args.engine, device, bundles, args.actors.engines, **options)
        set_environment(environment)  # the next line imports vLLM
        torchao_options, self.quantization = quantize_by_torchao(args.quantization.quantization)
        return self.load(model, torchao_options | options, environment)

    def quantized_by(self) -> str:
        return self.quantization

    def init_weight_update_group(self, address: str, port: int, world_size: int, rank_offset: int) -> None:
        self.llm.collective_rpc("init_weight_update_group", args=(address, port, rank_offset, world_size))

    def receive_weights(self, timeout: float) -> bool:
        """Wait for a sync and take part in it. Returns whether every worker serves exactly what was sent."""
        self.reset_caches()  # now: the engine generates nothing until the sync
        return self.take_weights(timeout)

    def compare_weights(self) -> None:
        self.llm.collective_rpc("compare_weights")


class Trainer(LearnerActor):
    """A Ray actor around one rank of the learner, which sends what it has of the weights."""

    def load(self, address: tuple[str, int], models: Models, args: Arguments, device: str) -> tuple[int, str]:
        run, torch_device = args.run, self.join(address, args.actors.trainers, device)
        proof = Proof(MAX_MISMATCH[device])
        self.learner = GRPOLearner(
            models.loaded, args.learner, torch_device, run.seed, steps=run.steps, initial=models.initial, proof=proof
        )
        return self.resume(models.checkpoint)

    def init_weight_update_group(self, address: str, port: int, world_size: int) -> None:
        group = stateless_init_process_group(address, port, self.rank, world_size, self.learner.model.device)
        self.sender = WeightSender(group)

    def send_weights(self) -> SyncReport:
        return self.sender.send_weights(self.learner.model.named_tensors().items())

    def compare_weights(self) -> Comparison:
        return self.sender.compare_weights(self.learner.model.named_tensors().items())

    def learn(self, rollouts: list[Rollout]) -> dict[str, float]:
        return self.learner.learn(rollouts)


def place(args: Arguments) -> tuple[str, str, list[Seat], list[Seat]]:
    """Reserve the topology. Returns the device, a remark on it, and the seats of trainers and engines."""
    gpus, tp = int(ray.cluster_resources().get("GPU", 0)), args.engine.tensor_parallel_size
    trainers, engines = args.actors.trainers, args.actors.engines
    wanted = trainers + engines * tp
    if 0 < gpus < wanted:
        raise RunError(
            f"this topology wants {wanted} GPUs, {trainers} for the trainer and {tp} for each engine, and there are"
            f" {gpus}: lower --tensor-parallel-size, or use rlhf_colocate.py, which shares GPUs"
        )
    if gpus:
        placement = reserve([{"GPU": 1}] * wanted, "PACK")
        bundles = by_node(placement)  # so that an engine spans as few nodes as possible
        trainer_seats = [seat(placement, bundle, num_gpus=1) for bundle in bundles[:trainers]]
        engine_bundles = [bundles[begin : begin + tp] for begin in range(trainers, wanted, tp)]
        engine_seats = [seat(placement, workers[0], workers) for workers in engine_bundles]
        remark = f"{gpus - wanted} GPUs stay unused: --trainers and --engines take more" if gpus > wanted else ""
        return "cuda", remark, trainer_seats, engine_seats
    placement = reserve([{"CPU": 1 / trainers}] * trainers + [{"CPU": 1 / engines}] * engines, "SPREAD")
    trainer_seats = [seat(placement, bundle, num_cpus=1 / trainers) for bundle in range(trainers)]
    # An engine's workers are processes of its actor; by their numbers, llm_options divides the cores among them.
    engine_workers = [list(range(begin, begin + tp)) for begin in range(trainers, wanted, tp)]
    engine_seats = [seat(placement, trainers + i, workers) for i, workers in enumerate(engine_workers)]
    remark = f"no GPU: the trainer and a TP={tp} engine run on CPU, with gloo between them"
    return "cpu", remark, trainer_seats, engine_seats


def main(args: Arguments) -> None:
    task = load_task(args.task, args.run.seed, args.run.steps, args.tools)
    with RunFolder(args.run, Path(__file__).stem) as run, RaySession(args.run, run.progress) as session:
        # 1. Place
        device, remark, trainer_seats, engine_seats = place(args)
        models, args.learner = choose_models(run.path, args.run, args.learner, device)
        task.tokenize(models.loaded, args.engine.max_model_len)
        run.say(remark)
        run.say(f"model {models.checkpoint or models.initial}\nrun folder {run.path}")
        task.rewards = RewardWorkers(task.rewards, session)
        trainers = ActorGroup(session, "trainer", Trainer, trainer_seats)
        engines = ActorGroup(session, "engine", Engine, engine_seats)
        address = trainers.call_rank_0("starting", Trainer.address)
        loading = trainers.begin(Trainer.load, address, models, args, device)
        starting = engines.begin(Engine.start, models.loaded, args, device, each=engines.bundles)
        loaded, lengths = session.wait("starting", loading, starting)
        steps_done, remarks = loaded[0]
        run.say(remarks + task.check_lengths(lengths[0], args.learner.max_tokens))
        run.say(f"engine weights by torchao's {engines.agreed('starting', Engine.quantized_by)}")

        # 2. Connect, and serve what the trainer holds
        connect(trainers, engines, args.engine.tensor_parallel_size)
        report = sync(trainers, engines.begin(Engine.receive_weights, args.run.timeout))
        run.say(f"first sync: {report.tensors} tensors, {report.nbytes / 1e9:.3f} GB; from now on by {report.loader}")
        compare(run, trainers, engines, must_change=False)
        run.start_metrics(steps_done, args)

        # 3. Generate, reward, learn, sync
        if not steps_done and args.task.eval_every:
            run.log_metrics(0, evaluate(engines, task, args.learner, 0))
        for step in range(steps_done + 1, args.run.steps + 1):
            clock = StepClock()
            batch = complete(engines, task, task.draw(step), args.learner, step)
            batch = task.rewards.compute(batch, step - 1)
            if args.learner.dynamic_sampling:
                batch = resample(engines, task, batch, args.learner, step)
            clock.end("rollout")
            receiving = engines.begin(Engine.receive_weights, args.run.timeout)  # early, to be ready for the weights
            metrics = trainers.agreed("learning", Trainer.learn, batch.rollouts)
            clock.end("train")
            report = sync(trainers, receiving)
            clock.end("sync")
            metrics |= clock.metrics
            metrics |= evaluate(engines, task, args.learner, step)
            if run.saves(step):
                trainers.call("saving", Trainer.save, run.path)
            run.log_step(step, batch, report, metrics)
            if run.saves(step) or step in (steps_done + 1, args.run.steps):
                # Adam's first update is as large as the learning rate. Later ones may be too small to change a scale.
                updated = metrics["grad_norm"] > 0 and metrics["learning_rate"] > 0  # a warm-up's first rate is 0
                compare(run, trainers, engines, must_change=step == 1 and updated)

        # 4. Generate again, and prove the last sync
        batch = complete(engines, task, task.draw(args.run.steps + 1), args.learner, args.run.steps + 1)
        batch = task.rewards.compute(batch, args.run.steps)
        mismatch = trainers.agreed("proving", Trainer.mismatch, batch.rollouts)
        summary = run.summary(batch, mismatch)
    print(summary)


def connect(trainers: ActorGroup, engines: ActorGroup, tensor_parallel_size: int) -> None:
    """Join the trainer's ranks and, after them, the workers of all engines in one group."""
    address = trainers.call_rank_0("connecting", Trainer.address)
    world_size = len(trainers) + len(engines) * tensor_parallel_size
    rank_offsets = [(len(trainers) + i * tensor_parallel_size,) for i in range(len(engines))]
    joining = trainers.begin(Trainer.init_weight_update_group, *address, world_size)
    following = engines.begin(Engine.init_weight_update_group, *address, world_size, each=rank_offsets)
    trainers.session.wait("connecting", joining, following)


def sync(trainers: ActorGroup, receiving: dict[str, ray.ObjectRef]) -> SyncReport:
    """Send the trainer's weights to the engines, which already run `receive_weights`: `receiving` are these calls."""
    reports, served = trainers.session.wait("syncing", trainers.begin(Trainer.send_weights), receiving)
    if not all(served):
        raise RunError(f"after sync {reports[0].version}, an engine does not serve what was sent")
    return reports[0]


def compare(run: RunFolder, trainers: ActorGroup, engines: ActorGroup, must_change: bool) -> None:
    """Send the weights again. The engines compare their quantized weights with them.

    Raises WeightSyncError if one is off by more than rounding, or if none has changed since the last comparison
    although the trainer has learned: `must_change`.
    """
    comparing, taking_part = trainers.begin(Trainer.compare_weights), engines.begin(Engine.compare_weights)
    comparison = trainers.session.wait("comparing", comparing, taking_part)[0][0]
    run.say(
        f"{comparison.weights} quantized weights are what was sent, but for rounding; scales and values of"
        f" {comparison.changed} have changed since the last comparison"
    )
    if must_change and not comparison.changed:
        raise WeightSyncError("the trainer has learned, but none of the engine's quantized weights has changed")


if __name__ == "__main__":
    run_main(main, parse(Arguments, __doc__))
