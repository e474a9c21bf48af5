"""RLHF on separate GPUs with vLLM's own weight-transfer API. The engine starts with dummy weights, then gets real ones.

    python rlhf_nccl.py                              # 3 GPUs: facebook/opt-125m, trainer + TP=2 engine, NCCL
    python rlhf_nccl.py --quantization fp8           # the engine in FP8, the trainer not
    python rlhf_nccl.py --backend ipc                # 1 GPU, which trainer and engine share, CUDA IPC
    python rlhf_nccl.py                              # no GPU: a small built-in model, the same topology, gloo
    python rlhf_nccl.py --ray-address auto           # on a running Ray cluster

    GPU 0     trainer actor: fp32 master weights, GRPO (recipe/grpo.py), vLLM's trainer-side transfer engine
    GPU 1..N  engine actor: vllm.LLM with N workers, each with vLLM's worker-side transfer engine

1. Place: one Ray placement group, with a bundle for the trainer and one for each engine worker.
2. Generate with dummy weights: nonsense. Connect trainer and workers, sync, and generate again. Now the engine's greedy
   tokens must be the trainer's, apart from ties (a quantized engine's are only counted), and the log-probabilities of
   sampled tokens must be the trainer's as well.
3. Each step: generate, reward, learn, sync. The rollouts after a sync prove it: the engine's log-probabilities of the
   tokens it sampled must be the trainer's, or the run ends with an error. This bound cannot see one missed small
   update. rlhf.py checks the weights exactly; vLLM's API has no equivalent.
4. Generate once more to prove the last sync, and print.

With --backend ipc, the optimizer's state waits in host memory while the engine generates. A 7B's weights, gradients and
Adam state still take 114 of an H200's 140 GiB at the end of a learning step. Beside them, an engine fits with
--gpu-memory-utilization 0.13 --max-model-len 512 --micro-batch-tokens 2048.

Take this script if you want vLLM's supported API: on GPUs, no code of ours runs in the engine's workers, and vLLM's
other transports and its HTTP server work the same way. Take rlhf.py if the sync matters most: it checks names and
shapes before a byte moves, checks bit for bit what the engine serves, passes a worker's error to the trainer, and is
faster. vLLM has no transport for CPU, so there the script uses its own (last section of recipe/native_transfer.py).

The last line is `OK: ...`. After an error it is `error: ...`, and the exit status is not 0.
"""

import dataclasses
import math
import os
import time
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
from recipe.checkpoint import Models, choose_models, write_checkpoint
from recipe.engine import EngineArguments, complete, generate, llm_options, reset_prefix_cache, sample
from recipe.errors import MismatchError, RunError
from recipe.evaluation import evaluate
from recipe.grpo import GRPOConfig, GRPOLearner
from recipe.learner import Rollout
from recipe.native_transfer import NativeRunFolder, NativeSender
from recipe.ray_session import RaySession, die_with_children, run_main
from recipe.task import TaskArguments, load_task
from rlhf_utils import SyncReport

MAX_MISMATCH = {"cpu": 1e-5, "cuda": 0.02, "fp8": 0.1}  # mean |Δ logprob| that rounding explains
MAX_GREEDY_GAP = {"cpu": 1e-3, "cuda": 0.5, "fp8": math.inf}  # logits this close count as tied: a few bf16 steps
WIRE_DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}  # the engine's: half the bytes of the fp32 master weights
IPC_SHARE = 0.5  # --backend ipc: the share of the GPU that Ray counts for the trainer, and for the engine


@dataclass
class Arguments(GRPOConfig, TaskArguments, EngineArguments, RunArguments):
    """What the command line sets."""

    tensor_parallel_size: Annotated[int | None, Ge(1)] = HfArg(default=None, help="of the engine (default: 2; ipc: 1)")
    gpu_memory_utilization: Annotated[float | None, Gt(0), Le(1)] = HfArg(
        default=None, help="share of each engine GPU (default: 0.8; ipc: 0.3)"
    )
    backend: Literal["nccl", "ipc"] = HfArg(default="nccl", help="ipc: trainer and engine on one GPU; no GPU: gloo")
    quantization: Literal["fp8"] | None = HfArg(default=None, help="vLLM quantizes the engine's weights as they arrive")

    def __post_init__(self):
        shared = self.backend == "ipc"
        self.tensor_parallel_size = self.tensor_parallel_size or (1 if shared else 2)
        self.gpu_memory_utilization = self.gpu_memory_utilization or (0.3 if shared else 0.8)


class Engine:
    """A Ray actor around vllm.LLM. The actor reserves no GPU: vLLM's workers take bundles of its placement group."""

    def __init__(self, model: str, args: Arguments, device: str):
        shared = args.backend == "ipc"
        first = 0 if shared else 1  # bundle 0 is the trainer's
        bundles = range(first, first + args.tensor_parallel_size)
        options = {"load_format": "dummy", "quantization": args.quantization and "fp8_per_tensor"}
        options |= {"weight_transfer_config": {"backend": args.backend if device == "cuda" else "gloo"}}
        if device == "cpu":
            options |= {"worker_extension_cls": "recipe.native_transfer.GlooTransferWorker"}
        if shared:
            os.environ["VLLM_RAY_PER_WORKER_GPUS"] = str(IPC_SHARE)
            os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # memory handles are pickled
        options = llm_options(args, device, bundles, **options)
        from vllm import LLM  # only now: llm_options has set its environment variables

        self.llm = LLM(model, **options)
        die_with_children()

    def start(self) -> int:
        """Returns once the engine has started: the tokens that a prompt and its completion may have."""
        return self.llm.model_config.max_model_len

    def sample(
        self, prompts: list[list[int]], args: Arguments, seed: int, first: int, evaluation: bool
    ) -> list[Rollout]:
        return sample(self.llm, prompts, args, seed, first, evaluation)

    def sleep(self) -> None:
        self.llm.sleep(level=0)  # level 0 pauses the scheduler; weights and KV cache stay in place

    def transfer(self, method: str, *args) -> None:
        """Run one of the four methods of a weight transfer, for the trainer's `NativeSender`."""
        getattr(self.llm, method)(*args)

    def wake_up(self) -> str:
        """Resume generation with the new weights. Returns their version."""
        self.llm.wake_up(tags=["scheduling"])
        reset_prefix_cache(self.llm)
        return self.llm.get_weight_version()

    def shutdown(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


class Trainer:
    """A Ray actor around the learner. It is rank 0 of the group in which the weights travel."""

    def __init__(self, models: Models, args: Arguments, device: str):
        torch.set_num_threads(len(os.sched_getaffinity(0)))  # Ray sets one thread
        here = torch.device(device, 0)  # Ray makes one GPU visible
        self.learner = GRPOLearner(models.loaded, args, here, args.seed, args.steps, initial=models.initial)
        self.wire_dtype, self.precision = WIRE_DTYPE[device], args.quantization or device
        self.shares_gpu = args.backend == "ipc"
        if models.checkpoint:
            self.learner.load_state(models.checkpoint)
            self.make_room()

    def connect(self, engine, backend: str, world_size: int) -> None:
        """Make the trainer's transfer engine, which also sets up those of the engine's workers."""
        self.sender = NativeSender(
            lambda method, *args: ray.get(engine.transfer.remote(method, *args)),
            self.learner.named_tensors,
            self.wire_dtype,
            backend,
            ray.util.get_node_ip_address(),
            world_size,
        )

    def send_weights(self) -> SyncReport:
        return self.sender.send_weights()

    @torch.no_grad()
    def prove_greedy(self, rollouts: list[Rollout]) -> str:
        """Check that the trainer's greedy tokens are these, apart from ties. Returns the result as text.

        Raises MismatchError if they are not.
        """
        gaps = []  # how far each token's logit is below the highest one
        for rollout in rollouts:
            ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids], device=self.learner.device)
            with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=ids.is_cuda):
                logits = self.learner.model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            chosen = logits.gather(1, ids[0, 1:, None])[:, 0]  # logits at t predict token t + 1
            gaps.append((logits.max(-1).values - chosen)[len(rollout.prompt_ids) - 1 :])
        gaps = torch.cat(gaps)
        if not gaps.max() <= MAX_GREEDY_GAP[self.precision]:  # max() returns a NaN, which does not pass
            raise MismatchError(
                f"the engine's greedy tokens are not the trainer's, by logits of {gaps.max():.3g}: it does not serve"
                " the trainer's weights, or the two compute different functions"
            )
        return f"{int((gaps == 0).sum())} of {len(gaps)} greedy tokens are the trainer's own"

    def learn(self, rollouts: list[Rollout]) -> dict[str, float]:
        metrics = self.learner.learn(rollouts)
        self.make_room()
        return metrics

    def make_room(self) -> None:
        """On a shared GPU, free memory for vLLM's packing and loading of the weights."""
        if self.shares_gpu:
            self.learner.release_memory(offload_optimizer=True)

    def mismatch(self, rollouts: list[Rollout]) -> float:
        return self.learner.mismatch(rollouts)

    def start(self) -> tuple[int, str]:
        """Returns once the model is loaded: the steps it has done, and what is to be said of it."""
        return self.learner.step, self.learner.remarks()

    def save(self, run_folder: Path) -> None:
        write_checkpoint(run_folder, self.learner.step, self.learner.save)


def place(args: Arguments) -> tuple[str, dict, dict]:
    """Reserve the topology. Returns the device, and the Ray options that place the trainer and the engine."""
    gpus = int(ray.cluster_resources().get("GPU", 0))
    shared = args.backend == "ipc"
    wanted = 1 if shared else 1 + args.tensor_parallel_size
    if not gpus and (shared or args.quantization):
        raise RunError("--backend ipc and --quantization fp8 want a GPU, and Ray sees none")
    if shared and args.tensor_parallel_size > 1:
        raise RunError("--backend ipc: the engine shares the trainer's one GPU, so --tensor-parallel-size must be 1")
    if 0 < gpus < wanted:
        raise RunError(
            f"this topology wants {wanted} GPUs, 1 for the trainer and {args.tensor_parallel_size} for the engine, and"
            f" there are {gpus}: lower --tensor-parallel-size, or let both share one with --backend ipc"
        )
    bundles = [{"GPU": 1}] * wanted if gpus else [{"CPU": 1}] * 2
    group = placement_group(bundles, strategy="PACK" if gpus else "SPREAD")
    if not group.wait(timeout_seconds=60):
        raise RunError(f"Ray could not reserve {bundles} within 60 s: another run may hold them")

    def at(bundle: int, **resources) -> dict:
        strategy = PlacementGroupSchedulingStrategy(group, bundle, placement_group_capture_child_tasks=True)
        return {"scheduling_strategy": strategy, **resources}

    trainer = at(0, num_gpus=IPC_SHARE if shared else 1, num_cpus=0) if gpus else at(0, num_cpus=1)
    return "cuda" if gpus else "cpu", trainer, at(0 if shared else 1, num_cpus=0)


def main(args: Arguments) -> None:
    task = load_task(args)
    with NativeRunFolder(args, Path(__file__).stem) as run, RaySession(run, args.ray_address) as session:
        # 1. Place
        device, trainer_options, engine_options = place(args)
        models = choose_models(run.path, args, device)
        task.tokenize(models.loaded, args.max_model_len)
        tp, backend = args.tensor_parallel_size, "gloo" if device == "cpu" else args.backend
        if device == "cpu":
            run.say(f"no GPU: the trainer and a TP={tp} engine run on CPU, with gloo between them")
        run.say(f"model {models.checkpoint or models.initial}\nrun folder {run.path}")
        args.default_max_mismatch = MAX_MISMATCH[args.quantization or device]
        engine = ray.remote(Engine).options(**engine_options).remote(models.loaded, args, device)
        session.actors["engine"] = engine
        if backend == "ipc":
            session.wait("starting", engine=engine.start.remote())  # first: vLLM measures the GPU's free memory
        session.actors["trainer"] = trainer = (
            ray.remote(Trainer).options(**trainer_options).remote(models, args, device)
        )
        (steps_done, remarks), room = session.wait(
            "starting", trainer=trainer.start.remote(), engine=engine.start.remote()
        )
        task.check_lengths(room)
        run.say(remarks)

        # 2. Generate with dummy weights, connect, sync, and prove the first sync
        greedily = dataclasses.replace(args, temperature=0.0, group_size=1)
        rows = task.draw(steps_done + 1)
        run.say("with dummy weights the engine generates nonsense:")
        run.show(complete(session, {"engine": engine}, rows, greedily, steps_done))
        session.wait("connecting", trainer=trainer.connect.remote(engine, backend, 1 + tp))
        report = sync(session, trainer, engine)
        greedy = complete(session, {"engine": engine}, rows, greedily, steps_done)
        sampled = complete(session, {"engine": engine}, rows, args, steps_done)
        run.say(
            f"first sync, by vLLM's {backend} backend: {report.tensors} tensors, {report.nbytes / 1e9:.3f} GB\n"
            f"{prove_first_sync(session, trainer, greedy.rollouts, sampled.rollouts)}"
        )
        run.show(greedy)
        run.start_metrics(steps_done)

        # 3. Generate, reward, learn, sync
        if args.eval_every and not steps_done:
            run.log_metrics(0, evaluate(session, {"engine": engine}, task, args, 0))
        for step in range(steps_done + 1, args.steps + 1):
            started = time.perf_counter()
            batch = generate(session, {"engine": engine}, task, args, step)
            generated = time.perf_counter()
            (metrics,) = session.wait("learning", trainer=trainer.learn.remote(batch.rollouts))
            learned = time.perf_counter()
            report = sync(session, trainer, engine)
            metrics |= {
                "time/rollout": generated - started,
                "time/train": learned - generated,
                "time/sync": time.perf_counter() - learned,
                "sync/transfer": report.seconds,
                "sync/GBps": report.gigabytes_per_second,
            }
            run.log_step(step, batch, metrics | evaluate(session, {"engine": engine}, task, args, step))
            if run.saves(step):
                session.wait("saving", trainer=trainer.save.remote(run.path))
                run.draw()

        # 4. Generate again, and prove the last sync
        batch = generate(session, {"engine": engine}, task, args, args.steps + 1)
        (mismatch,) = session.wait("proving", trainer=trainer.mismatch.remote(batch.rollouts))
        run.say(f"generated again with the last weights: mismatch {mismatch:.1e}")
        run.show(batch)
        summary = run.summary(batch.rollouts)
    print(summary)


def prove_first_sync(session: RaySession, trainer, greedy: list[Rollout], sampled: list[Rollout]) -> str:
    """Compare greedy tokens and sampled tokens' log-probabilities. Only the latter can prove a quantized engine.

    Returns the results as text. Raises MismatchError if the engine does not serve the trainer's weights.
    """
    (proof,) = session.wait("proving", trainer=trainer.prove_greedy.remote(greedy))
    (mismatch,) = session.wait("proving", trainer=trainer.mismatch.remote(sampled))
    return f"{proof}; the sampled ones' mismatch is {mismatch:.1e}"


def sync(session: RaySession, trainer, engine) -> SyncReport:
    """Pause the engine, send it the trainer's weights, and resume it."""
    session.wait("syncing", engine=engine.sleep.remote())
    (report,) = session.wait("syncing", trainer=trainer.send_weights.remote())
    (served,) = session.wait("syncing", engine=engine.wake_up.remote())
    if served != str(report.version):
        raise RunError(f"after sync {report.version}, the engine serves version {served}")
    return report


if __name__ == "__main__":
    run_main(main, parse(Arguments, __doc__))
