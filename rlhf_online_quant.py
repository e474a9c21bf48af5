"""RLHF with a quantized engine: rlhf.py's topology, the engine's weights quantized by torchao, the trainer's not.

    python rlhf_online_quant.py                             # 3 GPUs: facebook/opt-125m, trainer + TP=2 engine in FP8
    python rlhf_online_quant.py --tensor-parallel-size 4    # 5 GPUs
    python rlhf_online_quant.py                             # no GPU: a small built-in model, int8, gloo
    python rlhf_online_quant.py --ray-address auto          # on a running Ray cluster
    python rlhf_online_quant.py --compare-memory            # bf16 against quantized: memory, KV cache, tokens/s

    GPU 0     trainer actor: fp32 master weights, GRPO (grpo.py), WeightSender (rlhf_utils.py)
    GPU 1..N  engine actor: vllm.LLM with N workers, each with rlhf_utils.WorkerExtension; FP8 weights and activations

1. Place: one Ray placement group, a bundle for the trainer and one for each engine worker.
2. Connect trainer and workers, and sync once: the engine serves what the trainer holds.
3. Each step: generate, reward, learn, sync. The rollouts that follow a sync prove it: the engine's log-probabilities
   of the tokens it sampled must be the trainer's, or the step raises. Quantized weights are never exactly that:
   `mismatch` says how far off, truncated importance weights (grpo.py) correct for it. It hardly shows scales that a
   sync left behind: so each quantized weight is compared with what was sent, at first, after the first and the last
   step, and with every checkpoint.
4. Generate again with the last weights, prove them as well, and print.

The last line is `OK: ...`; on an error it is `error: ...`, and the exit status is not 0.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import ray
import torch
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from grpo import GRPOConfig, Learner, Rollout
from quantization import compare_memory, quantize_by_torchao, read_torchao_config
from ray_session import RaySession, die_with_children, run_main
from rlhf_utils import Comparison, SyncReport, WeightSender, WeightSyncError, stateless_init_process_group
from run_folder import RunError, RunFolder, choose_models, count, grpo_config, parse_args, share, write_checkpoint
from task import check_lengths, draw_prompts, load_prompts, load_reward, score

# Mean |Δ logprob| that int8 and FP8 explain. In FP8, random weights of Qwen2.5-0.5B's and 7B's shapes had up to 0.095,
# the built-in model 0.01: --max-mismatch raises it. That a sync left nothing behind is shown by `compare`, not by this.
MAX_MISMATCH = {"cpu": 0.1, "cuda": 0.1}


class Engine:
    """A Ray actor around vllm.LLM. It has no GPU of its own: vLLM's workers take the placement group's bundles."""

    def __init__(self, model: str, args: argparse.Namespace, device: str, **more):
        options = {"worker_extension_cls": "rlhf_utils.WorkerExtension"}
        options |= {"tensor_parallel_size": args.tensor_parallel_size, "enforce_eager": args.enforce_eager}
        if device == "cuda":
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray hides the GPUs from an actor that asked for none
            os.environ["VLLM_RAY_BUNDLE_INDICES"] = ",".join(str(1 + i) for i in range(args.tensor_parallel_size))
            options |= {"dtype": "bfloat16", "distributed_executor_backend": "ray"}
            options |= {"gpu_memory_utilization": args.gpu_memory_utilization}
        else:
            # vLLM has no Ray executor on CPU; its workers are processes of this actor, each bound to its cores.
            cores = sorted(os.sched_getaffinity(0))
            shares = [cores[i :: args.tensor_parallel_size] or cores for i in range(args.tensor_parallel_size)]
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, share)) for share in shares)
            os.environ["TORCH_COMPILE_DISABLE"] = "1"  # compiling takes longer than such a run
            options |= {"dtype": "bfloat16", "distributed_executor_backend": "mp", "kv_cache_memory_bytes": 256 << 20}
        quantized, self.quantization = quantize_by_torchao(args.quantization_config)
        options |= quantized
        from vllm import LLM

        self.llm = LLM(
            model=model,
            logprobs_mode="processed_logprobs",  # of the distribution that is sampled from, temperature included
            seed=args.seed,
            max_model_len=args.max_model_len,
            **options | more,
        )
        die_with_children()

    def start(self, prompts: list[dict]) -> str:
        """Returns once the engine has started, by what its weights are quantized. Raises TaskError if it has no room
        for one of these prompts."""
        check_lengths(prompts, self.llm)
        return self.quantization

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

    def init_weight_update_group(self, address: str, port: int, world_size: int) -> None:
        self.llm.collective_rpc("init_weight_update_group", args=(address, port, 1, world_size))

    def receive_weights(self) -> bool:
        """Wait for a sync and take part in it. Returns whether every worker serves exactly what it left."""
        # The prefix cache holds keys and values of the old weights. Nothing is generated between here and the sync.
        if not self.llm.reset_prefix_cache():
            raise RunError("vLLM did not reset its prefix cache, which holds keys and values of the old weights")
        for result in self.llm.collective_rpc("receive_weights"):
            if "error" in result:
                raise WeightSyncError(result["error"])
        return all(self.llm.collective_rpc("check_weights_changed"))

    def compare_weights(self) -> None:
        self.llm.collective_rpc("compare_weights")

    def shutdown(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


class Trainer:
    """A Ray actor around the learner, and rank 0 of the group that the weights travel in."""

    def __init__(self, model: str, initial: str, config: GRPOConfig, device: str, args: argparse.Namespace):
        torch.set_num_threads(os.cpu_count())  # Ray sets one thread
        self.learner = Learner(model, config, torch.device(device, 0), args.seed, initial)  # Ray shows it one GPU
        if args.resume:
            self.learner.load_state(Path(model))

    def address(self) -> tuple[str, int]:
        from vllm.utils.network_utils import get_open_port

        return ray.util.get_node_ip_address(), get_open_port()

    def init_weight_update_group(self, address: str, port: int, world_size: int) -> None:
        group = stateless_init_process_group(address, port, 0, world_size, self.learner.device)
        self.sender = WeightSender(group)

    def send_weights(self) -> SyncReport:
        return self.sender.send_weights(self.learner.named_tensors().items())

    def compare_weights(self) -> Comparison:
        return self.sender.compare_weights(self.learner.named_tensors().items())

    def learn(self, rollouts: list[Rollout]) -> dict[str, float]:
        return self.learner.learn(rollouts)

    def mismatch(self, rollouts: list[Rollout]) -> float:
        return self.learner.mismatch(rollouts)

    def step(self) -> int:
        return self.learner.step

    def save(self, run_folder: Path) -> None:
        write_checkpoint(run_folder, self.learner.step, self.learner.save)


def place(args: argparse.Namespace) -> tuple[str, dict, dict]:
    """Reserve the topology. Returns the device, and the Ray options that put trainer and engine in their places."""
    gpus = int(ray.cluster_resources().get("GPU", 0))
    wanted = 1 + args.tensor_parallel_size
    if 0 < gpus < wanted:
        raise RunError(
            f"this topology wants {wanted} GPUs, 1 for the trainer and {args.tensor_parallel_size} for the engine, and"
            f" there are {gpus}: lower --tensor-parallel-size, or use rlhf_colocate.py, which shares GPUs"
        )
    bundles = [{"GPU": 1}] * wanted if gpus else [{"CPU": 1}] * 2
    group = placement_group(bundles, strategy="PACK" if gpus else "SPREAD")
    if not group.wait(timeout_seconds=60):
        raise RunError(f"Ray could not reserve {bundles} within 60 s: another run may hold them")
    trainer, engine = (
        PlacementGroupSchedulingStrategy(group, bundle, placement_group_capture_child_tasks=True) for bundle in (0, 1)
    )
    resources = {"num_gpus": 1, "num_cpus": 0} if gpus else {"num_cpus": 1}
    return (
        "cuda" if gpus else "cpu",
        {"scheduling_strategy": trainer, **resources},
        {"scheduling_strategy": engine, "num_cpus": 0},
    )


def main(args: argparse.Namespace) -> None:
    if args.compare_memory:
        return compare_memory(args, Engine)
    prompts, reward = load_prompts(args.prompts), load_reward(args.reward)
    with RunFolder(args, Path(__file__).stem) as run, RaySession(run, args.ray_address) as session:
        # 1. Place
        device, trainer_options, engine_options = place(args)
        initial, model = choose_models(run, args, device)
        tp = args.tensor_parallel_size
        if device == "cpu":
            run.say(f"no GPU: the trainer and a TP={tp} engine run on CPU, with gloo between them")
        run.say(f"model {model}\nrun folder {run.path}")
        config = grpo_config(args, max_mismatch=MAX_MISMATCH[device])
        trainer = ray.remote(Trainer).options(**trainer_options).remote(model, initial, config, device, args)
        engine = ray.remote(Engine).options(**engine_options).remote(model, args, device)
        session.actors |= {"trainer": trainer, "engine": engine}
        first_step, quantization = session.wait(
            "starting", trainer=trainer.step.remote(), engine=engine.start.remote(prompts)
        )
        run.say(f"engine weights by torchao's {quantization}")
        run.start_metrics(first_step)

        # 2. Connect, and serve what the trainer holds
        connect(session, trainer, engine, tp)
        report = sync(session, trainer, engine.receive_weights.remote())
        run.say(f"first sync: {report.tensors} tensors, {report.nbytes / 1e9:.3f} GB; from now on by {report.loader}")
        compare(run, session, trainer, engine, learned=False)

        # 3. Generate, reward, learn, sync
        for step in range(first_step + 1, args.steps + 1):
            started = time.perf_counter()
            rows = draw_prompts(prompts, args.prompts_per_step, step, args.seed)
            rollouts, texts = generate(session, engine, rows, reward, args, step)
            generated = time.perf_counter()
            listening = engine.receive_weights.remote()  # the engine is ready before the weights are
            (metrics,) = session.wait("learning", trainer=trainer.learn.remote(rollouts))
            learned = time.perf_counter()
            report = sync(session, trainer, listening)
            metrics |= {"time/rollout": generated - started, "time/train": learned - generated}
            metrics |= {"time/sync": report.seconds, "sync/GBps": report.gigabytes_per_second}
            run.log_metrics(step, metrics)
            if step in (first_step + 1, args.steps):
                run.show(rows, rollouts, texts)
            if run.saves(step) or step in (first_step + 1, args.steps):
                # Adam's first step is as large as the learning rate; later ones may be too small to show.
                compare(run, session, trainer, engine, learned=step == 1 and metrics["grad_norm"] > 0)
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


def connect(session: RaySession, trainer, engine, tensor_parallel_size: int) -> None:
    """Join the trainer, rank 0, and the engine's workers in one broadcast group."""
    (address,) = session.wait("connecting", trainer=trainer.address.remote())
    actors = {"trainer": trainer, "engine": engine}
    world_size = 1 + tensor_parallel_size
    calls = {name: actor.init_weight_update_group.remote(*address, world_size) for name, actor in actors.items()}
    session.wait("connecting", **calls)


def generate(
    session: RaySession, engine, rows: list[dict], reward: Callable, args: argparse.Namespace, step: int
) -> tuple[list[Rollout], list[str]]:
    """Completions of these rows with their rewards, `group_size` of each in a row, and their texts."""
    prompts, seed = [row["prompt"] for row in rows], args.seed * 1_000_003 + step
    (outputs,) = session.wait("generating", engine=engine.rollout.remote(prompts, args, seed))
    texts = [text for *_, text in outputs]
    rewards = score(reward, [row for row in rows for _ in range(args.group_size)], texts)
    return [Rollout(*output[:3], value) for output, value in zip(outputs, rewards, strict=True)], texts


def sync(session: RaySession, trainer, listening: ray.ObjectRef) -> SyncReport:
    """Send the trainer's weights to the engine, whose `receive_weights` is under way."""
    report, served = session.wait("syncing", trainer=trainer.send_weights.remote(), engine=listening)
    if not served:
        raise RunError(f"after sync {report.version}, the engine does not serve what was sent")
    return report


def compare(run: RunFolder, session: RaySession, trainer, engine, learned: bool) -> None:
    """Have the engine compare its quantized weights with what was sent, which the trainer sends again.

    Raises WeightSyncError if one is not that, or if the trainer has `learned` since the last time and none changed.
    """
    actors = {"trainer": trainer, "engine": engine}
    found, _ = session.wait("comparing", **{name: actor.compare_weights.remote() for name, actor in actors.items()})
    run.say(
        f"{found.weights} quantized weights are what was sent, but for rounding; scales and values of {found.changed}"
        " have changed since the last comparison"
    )
    if learned and not found.changed:
        raise WeightSyncError("the trainer has learned, but none of the engine's quantized weights has changed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensor-parallel-size", type=count, default=2, help="GPUs (CPU: core groups) of the engine")
    parser.add_argument("--gpu-memory-utilization", type=share, default=0.8, help="share of each engine GPU")
    parser.add_argument("--max-model-len", type=count, help="tokens of prompt and completion (default: the model's)")
    parser.add_argument("--enforce-eager", action=argparse.BooleanOptionalAction, help="no compilation")
    parser.add_argument(
        "--quantization-config", type=read_torchao_config, metavar="FILE", help="torchao's, int8 or FP8 (default: FP8)"
    )
    parser.add_argument("--compare-memory", action="store_true", help="measure the engine in bf16 and quantized, only")
    args = parse_args(parser)
    if args.enforce_eager is None:
        args.enforce_eager = not args.compare_memory  # which measures the engine as it would serve
    run_main(main, args)
