"""RLHF on separate GPUs by vLLM's own weight-transfer API: the engine starts with dummy weights and gets the trainer's.

    python rlhf_nccl.py                              # 3 GPUs: facebook/opt-125m, trainer + TP=2 engine, NCCL
    python rlhf_nccl.py --quantization fp8           # the engine in FP8, the trainer not
    python rlhf_nccl.py --backend ipc                # 1 GPU, which trainer and engine share, CUDA IPC
    python rlhf_nccl.py                              # no GPU: a small built-in model, the same topology, gloo
    python rlhf_nccl.py --ray-address auto           # on a running Ray cluster

    GPU 0     trainer actor: fp32 master weights, GRPO (grpo.py), vLLM's trainer-side transfer engine
    GPU 1..N  engine actor: vllm.LLM with N workers, each with vLLM's worker-side transfer engine

1. Place: one Ray placement group, a bundle for the trainer and one for each engine worker.
2. Generate with dummy weights: nonsense. Connect trainer and workers, sync, and generate again: the greedy tokens must
   be the trainer's own, ties set aside (counted only, if quantized), and the log-probabilities of sampled ones its too.
3. Each step: generate, reward, learn, sync. The rollouts that follow a sync prove it: the engine's log-probabilities
   of the tokens it sampled must be the trainer's, or the step raises. One small step left out would be below the bound:
   what rlhf.py knows of that, vLLM's API has no way to ask.
4. Generate again with the last weights, prove them as well, and print.

With --backend ipc the optimizer's state waits in host memory while the engine generates. A 7B's weights, gradients and
Adam's state are still 114 of an H200's 140 GiB when a learning step ends; beside that, an engine fits with
--gpu-memory-utilization 0.13 --max-model-len 512 --micro-batch-size 4.

Take this script where vLLM's supported API is what counts: on GPUs no code of ours runs in the engine's workers; vLLM's
other transports and its HTTP server are driven in the same way. Take rlhf.py where the sync itself counts: it checks
names and shapes before a byte moves, knows bit for bit what is served, carries a worker's error to the trainer, and is
faster. On CPU, where vLLM has no transport, this script brings its own, the last section of rlhf_utils.py.

The last line is `OK: ...`; on an error it is `error: ...`, and the exit status is not 0.
"""

import argparse
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ray
import torch
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from grpo import GRPOConfig, Learner, MismatchError, Rollout
from native_transfer import NativeSender, check_native_api, worker_error
from ray_session import RaySession, die_with_children, run_main
from rlhf_utils import SyncReport, WeightSyncError
from run_folder import RunError, RunFolder, choose_models, count, grpo_config, parse_args, share, write_checkpoint
from task import check_lengths, draw_prompts, load_prompts, load_reward, score

MAX_MISMATCH = {"cpu": 1e-4, "cuda": 0.02, "fp8": 0.1}  # mean |Δ logprob| that fp32, bf16, FP8 arithmetic explain
MAX_GREEDY_GAP = {"cpu": 1e-3, "cuda": 0.5, "fp8": math.inf}  # between logits that count as tied: a few bf16 steps
WIRE_DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}  # the engine's: half the bytes of the fp32 master weights
IPC_SHARE = 0.5  # of the one GPU, to Ray, for trainer and engine each


class Engine:
    """A Ray actor around vllm.LLM. It has no GPU of its own: vLLM's workers take the placement group's bundles."""

    def __init__(self, model: str, args: argparse.Namespace, device: str, **more):
        check_native_api()
        options = {"load_format": "dummy", "quantization": args.quantization and "fp8_per_tensor"}
        options |= {"tensor_parallel_size": args.tensor_parallel_size, "enforce_eager": args.enforce_eager}
        if device == "cuda":
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray hides the GPUs from an actor that asked for none
            first = 0 if args.backend == "ipc" else 1
            os.environ["VLLM_RAY_BUNDLE_INDICES"] = ",".join(str(first + i) for i in range(args.tensor_parallel_size))
            if args.backend == "ipc":
                os.environ["VLLM_RAY_PER_WORKER_GPUS"] = str(IPC_SHARE)
                os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # memory handles are pickled
            options |= {"weight_transfer_config": {"backend": args.backend}}
            options |= {"dtype": "bfloat16", "distributed_executor_backend": "ray"}
            options |= {"gpu_memory_utilization": args.gpu_memory_utilization}
        else:
            # vLLM has no Ray executor on CPU; its workers are processes of this actor, each bound to its cores.
            cores = sorted(os.sched_getaffinity(0))
            shares = [cores[i :: args.tensor_parallel_size] or cores for i in range(args.tensor_parallel_size)]
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, share)) for share in shares)
            os.environ["TORCH_COMPILE_DISABLE"] = "1"  # compiling takes longer than such a run
            options |= {"weight_transfer_config": {"backend": "gloo"}}
            options |= {"worker_extension_cls": "rlhf_utils.GlooTransferWorker"}
            options |= {"dtype": "float32", "distributed_executor_backend": "mp", "kv_cache_memory_bytes": 256 << 20}
        from vllm import LLM

        self.llm = LLM(
            model=model,
            logprobs_mode="processed_logprobs",  # of the distribution that is sampled from, temperature included
            seed=args.seed,
            max_model_len=args.max_model_len,
            **options | more,
        )
        die_with_children()

    def start(self, prompts: list[dict]) -> None:
        """Returns once the engine has started. Raises TaskError if it has no room for one of these prompts."""
        check_lengths(prompts, self.llm)

    def rollout(self, prompts: list[str], args: argparse.Namespace, seed: int) -> list[tuple]:
        """`group_size` completions of each prompt: (prompt ids, completion ids, log-probabilities, text), in order."""
        from vllm import SamplingParams

        # Without top-p and top-k, the log-probabilities are of the whole vocabulary, as the trainer's are.
        params = [
            SamplingParams(
                n=args.group_size,
                temperature=args.temperature,
                max_tokens=args.max_tokens,
                logprobs=0,
                seed=(seed * len(prompts) + i) * args.group_size % 2**31,
            )
            for i in range(len(prompts))
        ]
        requests = self.llm.generate(prompts, params, use_tqdm=False)
        return [
            (
                list(request.prompt_token_ids),
                list(output.token_ids),
                [position[token].logprob for position, token in zip(output.logprobs, output.token_ids, strict=True)],
                output.text,
            )
            for request in requests
            for output in request.outputs
        ]

    def sleep(self) -> None:
        self.llm.sleep(level=0)  # the scheduler pauses; weights and KV cache stay where they are

    def transfer(self, method: str, *args) -> None:
        """One of the four calls of a weight transfer, which the trainer makes (`NativeSender`)."""
        getattr(self.llm, method)(*args)

    def wake_up(self) -> str:
        """Go on with the weights that have come; returns their version."""
        self.llm.wake_up(tags=["scheduling"])
        # The prefix cache holds keys and values of the old weights.
        if not self.llm.reset_prefix_cache():
            raise RunError("vLLM did not reset its prefix cache, which holds keys and values of the old weights")
        return self.llm.get_weight_version()

    def shutdown(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


class Trainer:
    """A Ray actor around the learner, and rank 0 of the group that the weights travel in."""

    def __init__(self, model: str, initial: str, config: GRPOConfig, device: str, args: argparse.Namespace):
        check_native_api()
        torch.set_num_threads(os.cpu_count())  # Ray sets one thread
        self.learner = Learner(model, config, torch.device(device, 0), args.seed, initial)  # Ray shows it one GPU
        self.wire_dtype, self.precision = WIRE_DTYPE[device], args.quantization or device
        self.shares_gpu = args.backend == "ipc"
        if args.resume:
            self.learner.load_state(Path(model))
            self.make_room()

    def connect(self, engine, backend: str, world_size: int) -> None:
        """Make this actor's transfer engine; it makes those of the engine's workers."""
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
        """Raise MismatchError if greedy decoding here takes other tokens, ties set aside. Returns what was found."""
        gaps = []  # by how much each token's logit is below the highest
        for rollout in rollouts:
            ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids], device=self.learner.device)
            with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=ids.is_cuda):
                logits = self.learner.model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            chosen = logits.gather(1, ids[0, 1:, None])[:, 0]  # the logits at one position are of the token at the next
            gaps.append((logits.max(-1).values - chosen)[len(rollout.prompt_ids) - 1 :])
        gaps = torch.cat(gaps)
        if not gaps.max() <= MAX_GREEDY_GAP[self.precision]:  # a NaN, which is its own maximum, does not pass
            raise MismatchError(f"the engine's greedy tokens are not the trainer's, by logits of {gaps.max():.3g}")
        return f"{int((gaps == 0).sum())} of {len(gaps)} greedy tokens are the trainer's own"

    def learn(self, rollouts: list[Rollout]) -> dict[str, float]:
        metrics = self.learner.learn(rollouts)
        self.make_room()
        return metrics

    def make_room(self) -> None:
        """On a GPU that the engine is on as well: for what vLLM packs the weights into, and loads them into."""
        if self.shares_gpu:
            self.learner.release_memory(offload_optimizer=True)

    def mismatch(self, rollouts: list[Rollout]) -> float:
        return self.learner.mismatch(rollouts)

    def step(self) -> int:
        return self.learner.step

    def save(self, run_folder: Path) -> None:
        write_checkpoint(run_folder, self.learner.step, self.learner.save)


class NativeRunFolder(RunFolder):
    """A run's folder, in whose log the driver finds what vLLM keeps from the trainer: the error of a worker."""

    def __enter__(self) -> "NativeRunFolder":
        super().__enter__()
        self.log_begin = self.log_file.stat().st_size  # an earlier part is of a resumed run
        return self

    def tick(self, text: str, seconds: int) -> None:
        super().tick(text, seconds)
        if text == "syncing" and self._worker_error():
            self.keep_log_tail()  # by now the traceback is whole
            raise WeightSyncError(f"the engine failed, with a traceback in run.log: {self._worker_error()}")

    def _worker_error(self) -> str | None:
        return worker_error(self.log_file.read_bytes()[self.log_begin :].decode(errors="replace"))


def place(args: argparse.Namespace) -> tuple[str, dict, dict]:
    """Reserve the topology. Returns the device, and the Ray options that put trainer and engine in their places."""
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
    trainer, engine = (
        PlacementGroupSchedulingStrategy(group, bundle, placement_group_capture_child_tasks=True)
        for bundle in (0, 0 if shared else 1)
    )
    resources = {"num_gpus": IPC_SHARE if shared else 1, "num_cpus": 0} if gpus else {"num_cpus": 1}
    return (
        "cuda" if gpus else "cpu",
        {"scheduling_strategy": trainer, **resources},
        {"scheduling_strategy": engine, "num_cpus": 0},
    )


def main(args: argparse.Namespace) -> None:
    prompts, reward = load_prompts(args.prompts), load_reward(args.reward)
    with NativeRunFolder(args, Path(__file__).stem) as run, RaySession(run, args.ray_address) as session:
        # 1. Place
        device, trainer_options, engine_options = place(args)
        initial, model = choose_models(run, args, device)
        tp, backend = args.tensor_parallel_size, "gloo" if device == "cpu" else args.backend
        if device == "cpu":
            run.say(f"no GPU: the trainer and a TP={tp} engine run on CPU, with gloo between them")
        run.say(f"model {model}\nrun folder {run.path}")
        config = grpo_config(args, max_mismatch=MAX_MISMATCH[args.quantization or device])
        engine = ray.remote(Engine).options(**engine_options).remote(model, args, device)
        session.actors["engine"] = engine
        if backend == "ipc":
            session.wait("starting", engine=engine.start.remote(prompts))  # alone on the GPU, whose memory it measures
        session.actors["trainer"] = trainer = (
            ray.remote(Trainer).options(**trainer_options).remote(model, initial, config, device, args)
        )
        first_step, _ = session.wait("starting", trainer=trainer.step.remote(), engine=engine.start.remote(prompts))
        run.start_metrics(first_step)

        # 2. Generate with dummy weights, connect, sync, and generate what the trainer would
        greedy = argparse.Namespace(**vars(args) | {"temperature": 0.0, "group_size": 1})
        rows = draw_prompts(prompts, args.prompts_per_step, first_step + 1, args.seed)
        run.say("with dummy weights the engine generates nonsense:")
        run.show(rows, *generate(session, engine, rows, reward, greedy, first_step))
        session.wait("connecting", trainer=trainer.connect.remote(engine, backend, 1 + tp))
        report = sync(session, trainer, engine)
        rollouts, texts = generate(session, engine, rows, reward, greedy, first_step)
        sampled, _ = generate(session, engine, rows, reward, args, first_step)
        run.say(
            f"first sync, by vLLM's {backend} backend: {report.tensors} tensors, {report.nbytes / 1e9:.3f} GB\n"
            f"{prove_first_sync(session, trainer, rollouts, sampled)}, of at most {config.max_mismatch:g}"
        )
        run.show(rows, rollouts, texts)

        # 3. Generate, reward, learn, sync
        for step in range(first_step + 1, args.steps + 1):
            started = time.perf_counter()
            rows = draw_prompts(prompts, args.prompts_per_step, step, args.seed)
            rollouts, texts = generate(session, engine, rows, reward, args, step)
            generated = time.perf_counter()
            (metrics,) = session.wait("learning", trainer=trainer.learn.remote(rollouts))
            learned = time.perf_counter()
            report = sync(session, trainer, engine)
            metrics |= {"time/rollout": generated - started, "time/train": learned - generated}
            metrics |= {"time/sync": report.seconds, "sync/GBps": report.gigabytes_per_second}
            run.log_metrics(step, metrics)
            if step in (first_step + 1, args.steps):
                run.show(rows, rollouts, texts)
            if run.saves(step):
                session.wait("saving", trainer=trainer.save.remote(run.path))
                run.draw()

        # 4. Generate again, and prove the last sync
        rows = draw_prompts(prompts, args.prompts_per_step, args.steps + 1, args.seed)
        rollouts, texts = generate(session, engine, rows, reward, args, args.steps + 1)
        (mismatch,) = session.wait("proving", trainer=trainer.mismatch.remote(rollouts))
        run.say(f"generated again with the last weights: mismatch {mismatch:.1e}")
        run.show(rows, rollouts, texts)
        summary = run.summary(rollouts)
    print(summary)


def generate(
    session: RaySession, engine, rows: list[dict], reward: Callable, args: argparse.Namespace, step: int
) -> tuple[list[Rollout], list[str]]:
    """Completions of these rows with their rewards, `group_size` of each in a row, and their texts."""
    prompts, seed = [row["prompt"] for row in rows], args.seed * 1_000_003 + step
    (outputs,) = session.wait("generating", engine=engine.rollout.remote(prompts, args, seed))
    texts = [text for *_, text in outputs]
    rewards = score(reward, [row for row in rows for _ in range(args.group_size)], texts)
    return [Rollout(*output[:3], value) for output, value in zip(outputs, rewards, strict=True)], texts


def prove_first_sync(session: RaySession, trainer, greedy: list[Rollout], sampled: list[Rollout]) -> str:
    """Returns what was found: by greedy tokens, and by log-probabilities, all that can prove a quantized engine's."""
    (proof,) = session.wait("proving", trainer=trainer.prove_greedy.remote(greedy))
    (mismatch,) = session.wait("proving", trainer=trainer.mismatch.remote(sampled))
    return f"{proof}; the sampled ones' mismatch is {mismatch:.1e}"


def sync(session: RaySession, trainer, engine) -> SyncReport:
    """Pause the engine, bring it to the trainer's weights, and let it go on: all of it is the report's time."""
    started = time.perf_counter()
    session.wait("syncing", engine=engine.sleep.remote())
    (report,) = session.wait("syncing", trainer=trainer.send_weights.remote())
    (served,) = session.wait("syncing", engine=engine.wake_up.remote())
    if served != str(report.version):
        raise RunError(f"after sync {report.version}, the engine serves version {served}")
    return replace(report, seconds=time.perf_counter() - started)


def engine_size(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments with what depends on the backend, where it was not given: the engine's GPUs, its share of each."""
    shared = args.backend == "ipc"
    args.tensor_parallel_size = args.tensor_parallel_size or (1 if shared else 2)
    args.gpu_memory_utilization = args.gpu_memory_utilization or (0.3 if shared else 0.8)
    return args


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("nccl", "ipc"), default="nccl", help="ipc: all on one GPU; no GPU: gloo")
    parser.add_argument("--quantization", choices=("fp8",), help="of the engine, by vLLM as the weights come")
    parser.add_argument("--tensor-parallel-size", type=count, help="GPUs of the engine (default: 2; ipc: 1)")
    parser.add_argument("--gpu-memory-utilization", type=share, help="share of each engine GPU (0.8; ipc: 0.3)")
    parser.add_argument("--max-model-len", type=count, help="tokens of prompt and completion (default: the model's)")
    parser.add_argument("--enforce-eager", action=argparse.BooleanOptionalAction, default=True, help="no compilation")
    run_main(main, engine_size(parse_args(parser)))
