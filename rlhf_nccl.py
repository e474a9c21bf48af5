"""RLHF on separate GPUs with vLLM's own weight-transfer API. The engine starts with dummy weights, then gets real ones.

    python rlhf_nccl.py                              # 3 GPUs: facebook/opt-125m, trainer + TP=2 engine, NCCL
    python rlhf_nccl.py --quantization fp8           # the engine in FP8, the trainer not
    python rlhf_nccl.py --backend ipc                # 1 GPU, which trainer and engine share, CUDA IPC
    python rlhf_nccl.py                              # no GPU: a small built-in model, the same topology, gloo
    python rlhf_nccl.py --ray-address auto           # on a running Ray cluster

    GPU 0     trainer actor: fp32 master weights, GRPO (trainer/learning/grpo.py), vLLM's trainer-side transfer engine
    GPU 1..N  engine actor: vllm.LLM with N workers, each with vLLM's worker-side transfer engine

1. Place: one Ray placement group, with a bundle for the trainer and one for each engine worker.
2. Generate with dummy weights: nonsense. Connect the trainer with all workers, sync, and generate again. Now the greedy
   tokens of the engine must be the trainer's, apart from ties (a quantized engine's are only counted), and its
   log-probabilities of sampled tokens must equal the trainer's but for rounding.
3. Each step: generate, reward, learn, sync. The rollouts after a sync prove it: the engine's log-probabilities of the
   tokens it sampled must equal the trainer's but for rounding, or the run ends with an error. This cannot show that one
   small update is missing. rlhf.py checks the weights exactly; vLLM's API has no equivalent.
4. Generate once more to prove the last sync, and print.

With --backend ipc, the optimizer's state waits in host memory while the engine generates. A 7B's weights, gradients and
Adam state still take 114 of an H200's 140 GiB at the end of a learning step. Beside them, an engine fits with
--gpu-memory-utilization 0.13 --max-model-len 512 --micro-batch-tokens 2048.

Take this script if you want vLLM's supported API: on GPUs, none of our code runs in the engine's workers, and vLLM's
other transports and its HTTP server work the same way. Take rlhf.py if the sync matters most: it checks names and
shapes before a byte moves, checks bit for bit what the engine serves, passes a worker's error to the trainer, and is
faster. vLLM has no transport for CPU: there, the script uses one of its own (trainer/rollouts/native_transfer.py).

The last line is `OK: ...`. After an error it is `error: ...`, and the exit status is not 0.
"""

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import ray
import torch

from rlhf_utils import SyncReport
from trainer.errors import MismatchError, RunError
from trainer.flags import arg, section
from trainer.learning.grpo import GRPOConfig, GRPOLearner
from trainer.learning.learner import Proof
from trainer.learning.logprobs import token_scores
from trainer.learning.rollout import Rollout
from trainer.rollouts.engine import EngineActor, EngineArguments, complete, llm_options, resample
from trainer.rollouts.evaluation import evaluate
from trainer.rollouts.native_transfer import NativeSender
from trainer.rollouts.reward_workers import RewardWorkers
from trainer.run.actors import ActorGroup, LearnerActor, Seat, StepClock, reserve, seat
from trainer.run.arguments import RunArguments, parse
from trainer.run.checkpoint import Models, choose_models
from trainer.run.folder import RunFolder
from trainer.run.session import RaySession, run_main
from trainer.tasks.rewards import Batch
from trainer.tasks.task import TaskArguments, load_task

MAX_MISMATCH = {"cpu": 1e-5, "cuda": 0.02, "fp8": 0.1}  # mean |Δ logprob| that rounding explains
MAX_GREEDY_GAP = {"cpu": 1e-3, "cuda": 0.5, "fp8": math.inf}  # logits that are so close count as tied: a few bf16 steps
WIRE_DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}  # the engine's: half the bytes of the fp32 master weights
IPC_SHARE = 0.5  # --backend ipc: the share of the GPU that Ray counts for the trainer, and for the engine


@dataclass
class Arguments:
    """The flags of this script."""

    run: RunArguments = section(RunArguments)
    engine: EngineArguments = section(
        EngineArguments,
        tensor_parallel_size=arg(None, help="GPUs of the engine (default: 2; ipc: 1)"),
        gpu_memory_utilization=arg(
            None, help="fraction of each GPU's memory that the engine takes (default: 0.8; ipc: 0.3)"
        ),
    )
    task: TaskArguments = section(TaskArguments)
    learner: GRPOConfig = section(GRPOConfig)
    backend: Literal["nccl", "ipc"] = arg("nccl", help="vLLM's transport; ipc: trainer and engine on one GPU")
    quantization: Literal["fp8"] | None = arg(None, help="vLLM quantizes the engine's weights as they arrive")


class Engine(EngineActor):
    """A Ray actor around vllm.LLM."""

    def start(self, model: str, args: Arguments, device: str, bundles: list[int]) -> int:
        options = {"load_format": "dummy", "quantization": args.quantization and "fp8_per_tensor"}
        options |= {"weight_transfer_config": {"backend": args.backend if device == "cuda" else "gloo"}}
        if device == "cpu":
            options |= {"worker_extension_cls": "trainer.rollouts.native_transfer.GlooTransferWorker"}
        if args.backend == "ipc":
            os.environ["VLLM_RAY_PER_WORKER_GPUS"] = str(IPC_SHARE)
            os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # memory handles are pickled
        return self.load(model, *llm_options(args.engine, device, bundles, **options))

    def pause(self) -> None:
        self.llm.sleep(level=0)  # level 0 pauses the scheduler; weights and KV cache stay

    def transfer(self, method: str, *args) -> None:
        """Run one of the four methods of a weight transfer for the trainer's `NativeSender`."""
        getattr(self.llm, method)(*args)

    def resume(self) -> str:
        """Resume generation with the new weights. Returns their version."""
        self.llm.wake_up(tags=["scheduling"])
        self.reset_caches()
        return self.llm.get_weight_version()


class Trainer(LearnerActor):
    """A Ray actor around the learner. It is rank 0 of the group in which the weights travel."""

    def load(self, address: tuple[str, int], models: Models, args: Arguments, device: str) -> tuple[int, str]:
        run, torch_device = args.run, self.join(address, 1, device)
        self.wire_dtype, self.precision = WIRE_DTYPE[device], args.quantization or device
        self.shares_gpu = args.backend == "ipc"
        proof = Proof(MAX_MISMATCH[self.precision])
        self.learner = GRPOLearner(
            models.loaded, args.learner, torch_device, run.seed, steps=run.steps, initial=models.initial, proof=proof
        )
        resumed = self.resume(models.checkpoint)
        self.free_memory()
        return resumed

    def connect(self, engine, backend: str, world_size: int) -> None:
        """Make the trainer's transfer engine, which also sets up those of the engine's workers."""
        self.sender = NativeSender(
            lambda method, *args: ray.get(engine.transfer.remote(method, *args)),
            self.model.named_tensors,
            self.wire_dtype,
            backend,
            ray.util.get_node_ip_address(),
            world_size,
        )

    def send_weights(self) -> SyncReport:
        return self.sender.send_weights()

    @torch.no_grad()
    def prove_greedy(self, rollouts: list[Rollout]) -> str:
        """Check that the trainer would choose the same greedy tokens, apart from ties. Returns the result as text.

        Raises MismatchError if it would not.
        """
        options = 1.0, False, greedy_gaps, False  # temperature, no entropies, gaps of logits, no checkpointing
        gaps = [self.model.score_tokens(token_scores, [each], each.length, *options)[0][0] for each in rollouts]
        gaps = torch.cat(gaps)
        if not gaps.max() <= MAX_GREEDY_GAP[self.precision]:  # not `>`: a NaN must not pass
            raise MismatchError(
                f"the engine's greedy tokens are not the trainer's, by logits of {gaps.max():.3g}: it does not serve"
                " the trainer's weights, or the two compute different functions"
            )
        return f"{int((gaps == 0).sum())} of {len(gaps)} greedy tokens are the trainer's own"

    def learn(self, rollouts: list[Rollout]) -> dict[str, float]:
        metrics = self.learner.learn(rollouts)
        self.free_memory()
        return metrics

    def free_memory(self) -> None:
        """On a shared GPU, free memory in which vLLM packs and loads the weights."""
        if self.shares_gpu:
            self.learner.release_memory(offload_optimizer=True)


def greedy_gaps(logits: torch.Tensor, targets: torch.Tensor, *_) -> tuple[torch.Tensor, None]:
    """How far the logit of each target [N] is below the highest of its logits [N, V]: instead of `scores_of_logits`."""
    logits = logits.float()
    return logits.max(-1).values - logits.gather(1, targets[:, None])[:, 0], None


def place(args: Arguments) -> tuple[str, EngineArguments, list[Seat], list[Seat]]:
    """Choose and reserve the topology. Returns the device, the engine's arguments with what was chosen, and the seats
    of the trainer and of the engine."""
    gpus, shares_gpu = int(ray.cluster_resources().get("GPU", 0)), args.backend == "ipc"
    tp = args.engine.tensor_parallel_size or (1 if shares_gpu else 2)
    memory = args.engine.gpu_memory_utilization or (0.3 if shares_gpu else 0.8)
    engine = replace(args.engine, tensor_parallel_size=tp, gpu_memory_utilization=memory)
    wanted = 1 if shares_gpu else 1 + tp
    if not gpus and (shares_gpu or args.quantization):
        raise RunError("--backend ipc and --quantization fp8 want a GPU, and Ray sees none")
    if shares_gpu and tp > 1:
        raise RunError("--backend ipc: the engine shares the trainer's one GPU, so --tensor-parallel-size must be 1")
    if 0 < gpus < wanted:
        raise RunError(
            f"this topology wants {wanted} GPUs, 1 for the trainer and {tp} for the engine, and there are {gpus}: lower"
            " --tensor-parallel-size, or let both share one with --backend ipc"
        )
    placement = reserve([{"GPU": 1}] * wanted if gpus else [{"CPU": 1}] * 2, "PACK" if gpus else "SPREAD")
    share = {"num_gpus": IPC_SHARE if shares_gpu else 1} if gpus else {"num_cpus": 1}
    workers = [0] if shares_gpu else list(range(1, 1 + tp))
    return "cuda" if gpus else "cpu", engine, [seat(placement, 0, **share)], [seat(placement, workers[0], workers)]


def main(args: Arguments) -> None:
    task = load_task(args.task, args.run.seed, args.run.steps)
    with RunFolder(args.run, Path(__file__).stem) as run, RaySession(args.run, run.progress) as session:
        # 1. Place
        device, args.engine, trainer_seats, engine_seats = place(args)
        models, args.learner = choose_models(run.path, args.run, args.learner, device)
        task.tokenize(models.loaded, args.engine.max_model_len)
        tp, backend = args.engine.tensor_parallel_size, "gloo" if device == "cpu" else args.backend
        run.say(f"trainer and TP={tp} engine on {'CPU' if device == 'cpu' else 'GPUs'}, by vLLM's {backend} backend")
        run.say(f"model {models.checkpoint or models.initial}\nrun folder {run.path}")
        task.rewards = RewardWorkers(task.rewards, session)
        engine = ActorGroup(session, "engine", Engine, engine_seats)
        starting = engine.begin(Engine.start, models.loaded, args, device, each=engine.bundles)
        if backend == "ipc":
            session.wait("starting", starting)  # first: vLLM measures the GPU's free memory
        trainer = ActorGroup(session, "trainer", Trainer, trainer_seats)
        address = trainer.agreed("starting", Trainer.address)
        loading = trainer.begin(Trainer.load, address, models, args, device)
        [(steps_done, remarks)], [max_model_len] = session.wait("starting", loading, starting)
        run.say(remarks + task.check_lengths(max_model_len, args.learner.max_tokens))

        # 2. Generate with dummy weights, connect, sync, and prove the first sync
        greedy = replace(args.learner, temperature=0.0, group_size=1)
        rows = task.draw(steps_done + 1)
        run.say("with dummy weights the engine generates nonsense:")
        run.show(complete(engine, task, rows, greedy, steps_done))
        trainer.call("connecting", Trainer.connect, *engine.actors.values(), backend, 1 + tp)
        report = sync(trainer, engine)
        run.say(f"first sync: {report.tensors} tensors, {report.nbytes / 1e9:.3f} GB")
        batches = [complete(engine, task, rows, each, steps_done) for each in (greedy, args.learner)]
        prove_first_sync(run, trainer, *batches)
        run.start_metrics(steps_done, args)

        # 3. Generate, reward, learn, sync
        if not steps_done and args.task.eval_every:
            run.log_metrics(0, evaluate(engine, task, args.learner, 0))
        for step in range(steps_done + 1, args.run.steps + 1):
            clock = StepClock()
            batch = complete(engine, task, task.draw(step), args.learner, step)
            batch = task.rewards.compute(batch, step - 1)
            if args.learner.dynamic_sampling:
                batch = resample(engine, task, batch, args.learner, step)
            clock.end("rollout")
            metrics = trainer.agreed("learning", Trainer.learn, batch.rollouts)
            clock.end("train")
            report = sync(trainer, engine)
            clock.end("sync")
            metrics |= clock.metrics
            metrics |= evaluate(engine, task, args.learner, step)
            if run.saves(step):
                trainer.call("saving", Trainer.save, run.path)
            run.log_step(step, batch, report, metrics)

        # 4. Generate again, and prove the last sync
        batch = complete(engine, task, task.draw(args.run.steps + 1), args.learner, args.run.steps + 1)
        batch = task.rewards.compute(batch, args.run.steps)
        mismatch = trainer.agreed("proving", Trainer.mismatch, batch.rollouts)
        summary = run.summary(batch, mismatch)
    print(summary)


def prove_first_sync(run: RunFolder, trainer: ActorGroup, greedy: Batch, sampled: Batch) -> None:
    """Prove it by both batches: only the sampled one proves a quantized engine."""
    run.show(greedy)
    result = trainer.agreed("proving", Trainer.prove_greedy, greedy.rollouts)
    mismatch = trainer.agreed("proving", Trainer.mismatch, sampled.rollouts)
    run.say(f"{result}; the sampled ones' mismatch is {mismatch:.1e}")


def sync(trainer: ActorGroup, engine: ActorGroup) -> SyncReport:
    """Pause the engine, send it the trainer's weights, and resume it."""
    engine.call("syncing", Engine.pause)
    report = trainer.agreed("syncing", Trainer.send_weights)
    served = engine.agreed("syncing", Engine.resume)
    if served != str(report.version):
        raise RunError(f"after sync {report.version}, the engine serves version {served}")
    return report


if __name__ == "__main__":
    run_main(main, parse(Arguments, __doc__))
