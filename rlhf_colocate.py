"""RLHF on shared GPUs: each has a trainer rank and an engine worker, with CUDA IPC between them.

    python rlhf_colocate.py                          # 4 GPUs: facebook/opt-125m, 4 trainer ranks, two TP=2 engines
    python rlhf_colocate.py                          # 1 GPU: one trainer, one engine
    python rlhf_colocate.py --engines 1 --tensor-parallel-size 8 --offload-optimizer --sleep-weights
    python rlhf_colocate.py                          # no GPU: a small built-in model, 2 ranks, 2 engines, shared memory
    python rlhf_colocate.py --ray-address auto       # on a running Ray cluster

    every GPU  trainer actor: a rank of the learner, sharded by FSDP2 (grpo.py), and its WeightSender (rlhf_utils.py)
               a worker of an engine actor: vllm.LLM, rlhf_utils.ColocateWorkerExtension

1. Place: one Ray placement group, a bundle for each GPU. The engines start first, since vLLM measures what memory is
   free, and give back their KV cache's; then the trainer's ranks load.
2. Connect each rank and the worker on its GPU, and sync once: the engines wake and serve what the trainer holds.
3. Each step: generate, after which the engines sleep; reward; learn, after which the ranks free what they can; sync,
   which wakes the engines. The rollouts that follow a sync prove it: the engine's log-probabilities of the tokens it
   sampled must be the trainer's, or the step raises.
4. Generate again with the last weights, prove them as well, and print.

The last line is `OK: ...`; on an error it is `error: ...`, and the exit status is not 0.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import ray
import torch
from ray.util.placement_group import placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from grpo import GRPOConfig, Learner, Rollout
from ray_session import RaySession, die_with_children, run_main
from rlhf_utils import SharedMemoryChannel, SyncReport, WeightSender, WeightSyncError
from run_folder import RunError, RunFolder, choose_models, count, grpo_config, parse_args, share, write_checkpoint
from sharding import join_ranks
from task import check_lengths, draw_prompts, load_prompts, load_reward, score
from weight_transport import refuse_expandable_segments

MAX_MISMATCH = {"cpu": 1e-4, "cuda": 0.02}  # mean |Δ logprob| that fp32 and bf16 arithmetic explain
GPU_SHARE = 0.4  # of a GPU, as Ray counts: a trainer rank and an engine worker fit on one


class Engine:
    """A Ray actor around vllm.LLM. It has no GPU of its own: vLLM's workers take these bundles of its group."""

    def __init__(self, model: str, args: argparse.Namespace, device: str, bundles: list[int], **more):
        options = {"worker_extension_cls": "rlhf_utils.ColocateWorkerExtension"}
        options |= {"tensor_parallel_size": args.tensor_parallel_size, "enforce_eager": args.enforce_eager}
        if device == "cuda":
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray hides the GPUs from an actor that asked for none
            os.environ["VLLM_RAY_BUNDLE_INDICES"] = ",".join(map(str, bundles))
            os.environ["VLLM_RAY_PER_WORKER_GPUS"] = str(GPU_SHARE)
            options |= {"dtype": "bfloat16", "distributed_executor_backend": "ray", "enable_sleep_mode": True}
            options |= {"gpu_memory_utilization": args.gpu_memory_utilization}
        else:
            # vLLM has no Ray executor on CPU; its workers are processes of this actor, each bound to its cores.
            cores = sorted(os.sched_getaffinity(0))
            shares = [cores[i :: args.engines * args.tensor_parallel_size] or cores for i in bundles]
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, share)) for share in shares)
            os.environ["TORCH_COMPILE_DISABLE"] = "1"  # compiling takes longer than such a run
            options |= {"dtype": "float32", "distributed_executor_backend": "mp", "kv_cache_memory_bytes": 256 << 20}
        from vllm import LLM

        self.llm = LLM(
            model=model,
            logprobs_mode="processed_logprobs",  # of the distribution that is sampled from, temperature included
            seed=args.seed,
            max_model_len=args.max_model_len,
            **options | more,
        )
        self.sleeps, self.sleep_weights, self.asleep = device == "cuda", args.sleep_weights, False
        die_with_children()

    def start(self, prompts: list[dict]) -> None:
        """Returns once the engine has started, with the digests of what it has loaded from disk. Raises TaskError if it
        has no room for one of these prompts."""
        check_lengths(prompts, self.llm)
        self.from_disk = self.llm.collective_rpc("weight_digests")

    def device_ids(self) -> list[str]:
        return self.llm.collective_rpc("report_device_id")

    def rollout(self, prompts: list[str], first: int, args: argparse.Namespace, seed: int) -> list[tuple]:
        """`group_size` completions of each prompt: (prompt ids, completion ids, log-probabilities, text), in order.

        `first` is the number of the first of these prompts in the step: what is sampled depends on no engine.
        """
        from vllm import SamplingParams

        # Without top-p and top-k, the log-probabilities are of the whole vocabulary, as the trainer's are.
        params = [
            SamplingParams(
                n=args.group_size,
                temperature=args.temperature,
                max_tokens=args.max_tokens,
                logprobs=0,
                seed=(seed * args.prompts_per_step + first + i) * args.group_size % 2**31,
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
        """Give back the KV cache's memory, with --sleep-weights the weights' too. The next sync wakes the engine."""
        if self.sleeps:
            self.llm.sleep(level=2 if self.sleep_weights else 0)  # 2 keeps no copy of the weights: a sync follows
            if not self.sleep_weights:
                self.llm.release_kv_cache_memory()
                self.llm.collective_rpc("empty_cache")  # of what generating took, as level 2 does by itself
            self.asleep = True

    def receive_weights(self, handles: dict[str, str]) -> tuple[bool, float]:
        """Take part in a sync with the ranks of these handles, and be awake after it. Returns whether every worker
        serves exactly what it left, and the seconds that waking took."""
        started = time.perf_counter()
        if self.asleep and self.sleep_weights:
            self.llm.wake_up(tags=["weights"])
        waking = time.perf_counter() - started
        for result in self.llm.collective_rpc("receive_weights", args=(handles,)):
            if "error" in result:
                raise WeightSyncError(result["error"])
        # The prefix cache holds keys and values of the old weights.
        if not self.llm.reset_prefix_cache():
            raise RunError("vLLM did not reset its prefix cache, which holds keys and values of the old weights")
        started = time.perf_counter()
        if self.asleep and not self.llm.wake_up(tags=["kv_cache"]):
            raise RunError("vLLM did not wake up")
        waking += time.perf_counter() - started
        self.asleep = False
        return all(self.llm.collective_rpc("check_weights_changed")), waking

    def serves_checkpoint(self) -> bool:
        """Whether the first sync, of the model that this engine had loaded from disk, brought the same bits. Those of
        another dtype may differ where a loader computes.

        After a sleep of level 2, vLLM restores parameters and buffers alone. Raises RunError if the layers keep other
        tensors that are no more what they were.
        """
        now = self.llm.collective_rpc("weight_digests")
        same = all(served == before for (served, _), (before, _) in zip(now, self.from_disk, strict=True))
        if same and self.sleep_weights and now != self.from_disk:
            raise RunError("layers of this model keep tensors that vLLM loses in its sleep: not with --sleep-weights")
        return same

    def memory(self) -> dict[str, float]:
        """GB that vLLM's processes hold on CPU. (On a GPU, the rank beside them sees what they hold.)"""
        processes = [] if self.sleeps else psutil.Process().children(recursive=True)
        return {"engine": sum(process.memory_info().rss for process in processes) / 1e9}

    def shutdown(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


class Trainer:
    """A Ray actor around one rank of the learner, and the sender to the worker on the same device."""

    def __init__(self, rank: int):
        self.rank = rank  # and nothing on the GPU yet

    def address(self) -> tuple[str, int]:
        from vllm.utils.network_utils import get_open_port

        return ray.util.get_node_ip_address(), get_open_port()

    def load(
        self, address: tuple, model: str, initial: str, config: GRPOConfig, device: str, args: argparse.Namespace
    ) -> dict[str, str]:
        """Join the other ranks, of which the first is at this address, and load. Returns the handle for the worker."""
        ranks = args.engines * args.tensor_parallel_size
        torch.set_num_threads(max(1, os.cpu_count() // ranks))  # Ray sets one thread
        here = torch.device(device, 0)  # Ray shows it one GPU
        join_ranks(*address, self.rank, ranks, here)
        self.learner, self.offload_optimizer = Learner(model, config, here, args.seed, initial), args.offload_optimizer
        if args.resume:
            self.learner.load_state(Path(model))
        self.learner.release_memory(bool(args.resume) and self.offload_optimizer)  # whole tensors came before shards
        worker = 0 if device == "cuda" else self.rank % args.tensor_parallel_size  # on CPU, all share one device
        channel = SharedMemoryChannel(torch.device(device, worker))
        self.sender = WeightSender(channel)
        return channel.handles

    def send_weights(self) -> SyncReport:
        return self.sender.send_weights(self.learner.named_tensors().items())

    def learn(self, rollouts: list[Rollout]) -> dict[str, float]:
        metrics = self.learner.learn(rollouts)
        self.learner.release_memory(self.offload_optimizer)  # for the engine
        return metrics

    def mismatch(self, rollouts: list[Rollout]) -> float:
        return self.learner.mismatch(rollouts)

    def step(self) -> int:
        return self.learner.step

    def save(self, run_folder: Path) -> None:
        if self.rank == 0:
            write_checkpoint(run_folder, self.learner.step, self.learner.save)
        else:
            self.learner.save(None)

    def memory(self) -> dict[str, float]:
        """GB: the most that this rank's tensors have held of its GPU since the last call, and all else that is held of
        it now: by the engine, and by CUDA and NCCL for both; on CPU, what this rank holds now."""
        if self.learner.device.type == "cpu":
            return {"trainer": psutil.Process().memory_info().rss / 1e9}
        free, total = torch.cuda.mem_get_info()
        peak = torch.cuda.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        return {"trainer": peak / 1e9, "engine": (total - free - torch.cuda.memory_reserved()) / 1e9}


def place(args: argparse.Namespace) -> tuple[str, list[dict], list[tuple[list[int], dict]]]:
    """Settle and reserve the topology. Returns the device, the Ray options that put every trainer rank in its place,
    and for every engine the bundles of its workers, which are those of as many ranks, and its Ray options."""
    resources = ray.cluster_resources()
    gpus = int(resources.get("GPU", 0))
    if gpus:
        refuse_expandable_segments()
    tp = args.tensor_parallel_size = args.tensor_parallel_size or (2 if gpus and gpus % 2 == 0 else 1)
    args.engines = args.engines or max(1, (gpus or 2) // tp)
    wanted, there = args.engines * tp, gpus or int(resources["CPU"])
    if wanted > there:
        raise RunError(
            f"rlhf_colocate.py wants {wanted} {'GPUs' if gpus else 'CPU cores'} for the TP={tp} workers of"
            f" {args.engines} engines, and there are {there}: lower --engines or --tensor-parallel-size"
        )
    bundles = [{"GPU": 1, "CPU": 0} if gpus else {"CPU": 1}] * wanted
    group = placement_group(bundles, strategy="PACK" if gpus else "STRICT_PACK")
    if not group.wait(timeout_seconds=60):
        raise RunError(f"Ray could not reserve {bundles} within 60 s: another run may hold them")
    nodes = placement_group_table(group)["bundles_to_node_id"]
    order = sorted(range(wanted), key=nodes.get)  # node by node, so that an engine is on as few as can be
    workers = [order[begin : begin + tp] for begin in range(0, wanted, tp)]

    def at(bundle: int, **resources) -> dict:
        strategy = PlacementGroupSchedulingStrategy(group, bundle, placement_group_capture_child_tasks=True)
        return {"scheduling_strategy": strategy, **resources}

    trainers = [at(bundle, **({"num_gpus": GPU_SHARE, "num_cpus": 0} if gpus else {"num_cpus": 1})) for bundle in order]
    return "cuda" if gpus else "cpu", trainers, [(bundles, at(bundles[0], num_cpus=0)) for bundles in workers]


def main(args: argparse.Namespace) -> None:
    prompts, reward = load_prompts(args.prompts), load_reward(args.reward)
    with RunFolder(args, "rlhf_colocate") as run, RaySession(run, args.ray_address) as session:
        # 1. Place
        device, trainer_options, engine_options = place(args)
        initial, model = choose_models(run, args, device)
        if device == "cpu":
            run.say("no GPU: trainer ranks and engines on CPU, where vLLM has no sleep mode: engines stay awake")
        run.say(f"model {model}\nrun folder {run.path}")
        config = grpo_config(args, max_mismatch=MAX_MISMATCH[device])
        trainers = [ray.remote(Trainer).options(**o).remote(rank) for rank, o in enumerate(trainer_options)]
        engines = [
            ray.remote(Engine).options(**options).remote(model, args, device, bundles)
            for bundles, options in engine_options
        ]
        session.actors |= {f"trainer{rank}": trainer for rank, trainer in enumerate(trainers)}
        session.actors |= {f"engine{i}": engine for i, engine in enumerate(engines)}
        session.wait("starting", **each("engine", engines, "start", prompts))
        session.wait("sleeping", **each("engine", engines, "sleep"))
        (address,) = session.wait("loading", trainer0=trainers[0].address.remote())
        given = (address, model, initial, config, device, args)
        handles = session.wait("loading", **each("trainer", trainers, "load", *given))
        (first_step,) = session.wait("loading", trainer0=trainers[0].step.remote())
        run.start_metrics(first_step)

        # 2. Connect, and serve what the trainer holds
        handles = connect(session, run, engines, handles)
        report, _ = sync(session, trainers, engines, handles)
        same = all(session.wait("comparing", **each("engine", engines, "serves_checkpoint")))
        memory = measure(session, "loading", trainers, engines)
        run.say(
            f"first sync: {report.tensors} tensors, {report.nbytes / 1e9:.3f} GB, {'' if same else 'not '}bit for bit"
            f" what the engines had loaded from disk; from now on by {report.loader}"
        )

        # 3. Generate, reward, learn, sync
        for step in range(first_step + 1, args.steps + 1):
            started = time.perf_counter()
            rows = draw_prompts(prompts, args.prompts_per_step, step, args.seed)
            rollouts, texts = generate(session, engines, rows, reward, args, step)
            metrics = {"time/rollout": time.perf_counter() - started}
            memory |= measure(session, "generating", trainers, engines)
            metrics |= learn(session, trainers, engines, rollouts)
            memory |= measure(session, "learning", trainers, engines)
            report, seconds = sync(session, trainers, engines, handles)
            memory |= measure(session, "syncing", trainers, engines)
            metrics |= seconds | {"sync/GBps": report.gigabytes_per_second}
            run.log_metrics(step, metrics | memory)
            if step in (first_step + 1, args.steps):
                run.show(rows, rollouts, texts)
                run.say("  GB: " + ", ".join(f"{name.removeprefix('memory/')} {gb:.1f}" for name, gb in memory.items()))
            if run.saves(step):
                session.wait("saving", **each("trainer", trainers, "save", run.path))
                run.draw()

        # 4. Generate again, and prove the last sync
        rows = draw_prompts(prompts, args.prompts_per_step, args.steps + 1, args.seed)
        rollouts, texts = generate(session, engines, rows, reward, args, args.steps + 1)
        session.wait("sleeping", **each("engine", engines, "sleep"))
        mismatch, *_ = session.wait("proving", **each("trainer", trainers, "mismatch", ray.put(rollouts)))
        run.say(f"generated again with the last weights: mismatch {mismatch:.1e}")
        run.show(rows, rollouts, texts)
        summary = run.summary(rollouts)
    print(summary)


def each(name: str, actors: list, method: str, *args) -> dict[str, ray.ObjectRef]:
    """One call to each of these actors, by names for `RaySession.wait`."""
    return {f"{name}{i}": getattr(actor, method).remote(*args) for i, actor in enumerate(actors)}


def connect(session: RaySession, run: RunFolder, engines: list, handles: list[dict]) -> list[dict[str, str]]:
    """Check that the trainer ranks' devices are those of the workers beside them, and print who is where. Returns for
    each engine the handles of its ranks."""
    beside, lines = [], [f"{'device':40}  trainer  engine  worker"]
    for i, ids in enumerate(session.wait("connecting", **each("engine", engines, "device_ids"))):
        ranks = range(i * len(ids), (i + 1) * len(ids))
        beside.append({device: path for rank in ranks for device, path in handles[rank].items()})
        if beside[i].keys() != set(ids):
            raise RunError(f"engine {i} runs on {sorted(ids)}, and its trainer ranks on {sorted(beside[i])}")
        for rank in ranks:
            (device,) = handles[rank]
            lines.append(f"{device:40}  {rank:7}  {i:6}  {ids.index(device):6}")
    run.say("\n".join(lines))
    return beside


def generate(
    session: RaySession, engines: list, rows: list[dict], reward: Callable, args: argparse.Namespace, step: int
) -> tuple[list[Rollout], list[str]]:
    """Completions of these rows with their rewards, `group_size` of each in a row, and their texts."""
    prompts, seed = [row["prompt"] for row in rows], args.seed * 1_000_003 + step
    bounds = [i * len(prompts) // len(engines) for i in range(len(engines) + 1)]
    calls = {
        f"engine{i}": engine.rollout.remote(prompts[bounds[i] : bounds[i + 1]], bounds[i], args, seed)
        for i, engine in enumerate(engines)
    }
    outputs = [output for part in session.wait("generating", **calls) for output in part]
    texts = [text for *_, text in outputs]
    rewards = score(reward, [row for row in rows for _ in range(args.group_size)], texts)
    return [Rollout(*output[:3], value) for output, value in zip(outputs, rewards, strict=True)], texts


def learn(session: RaySession, trainers: list, engines: list, rollouts: list[Rollout]) -> dict[str, float]:
    """One learning step of the ranks, for which the engines go to sleep. Returns its metrics."""
    started = time.perf_counter()
    session.wait("sleeping", **each("engine", engines, "sleep"))
    asleep = time.perf_counter()
    metrics, *_ = session.wait("learning", **each("trainer", trainers, "learn", ray.put(rollouts)))
    return metrics | {"time/sleep": asleep - started, "time/train": time.perf_counter() - asleep}


def sync(
    session: RaySession, trainers: list, engines: list, handles: list[dict]
) -> tuple[SyncReport, dict[str, float]]:
    """Send the trainers' weights to the engines, each rank to the worker beside it, and wake engines that sleep.

    Returns rank 0's report of the transfer, and the seconds: of all, from weights that are ready to engines that may
    generate, prefix-cache reset and digests included, and of the slowest engine's waking, which is part of it.
    """
    started = time.perf_counter()
    sending = each("trainer", trainers, "send_weights")
    receiving = {f"engine{i}": engine.receive_weights.remote(handles[i]) for i, engine in enumerate(engines)}
    report, *results = session.wait("syncing", **sending, **receiving)
    served, waking = zip(*results[len(trainers) - 1 :], strict=True)
    if not all(served):
        raise RunError(f"after sync {report.version}, an engine does not serve what was sent")
    return report, {"time/sync": time.perf_counter() - started, "time/wake": max(waking)}


def measure(session: RaySession, phase: str, trainers: list, engines: list) -> dict[str, float]:
    """GB of memory in a phase that ends: the most that the tensors of any trainer rank have held, and what any engine
    holds now, with all of CUDA's and NCCL's. Since torch keeps what it has had, that is the engine's most as well."""
    answers = session.wait(phase, **each("trainer", trainers, "memory"), **each("engine", engines, "memory"))
    return {f"memory/{phase}/{side}": max(a.get(side, 0.0) for a in answers) for side in ("trainer", "engine")}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--engines", type=count, help="default: as many as there are GPUs for (CPU: 2 workers)")
    add(
        "--tensor-parallel-size", type=count, help="workers of an engine (default: 2, or 1 if the GPUs are odd or none)"
    )
    add("--gpu-memory-utilization", type=share, default=0.4, help="an engine's share of its GPUs (default %(default)s)")
    add("--sleep-weights", action="store_true", help="engines give back their weights' memory too while trainers learn")
    add("--offload-optimizer", action="store_true", help="its state waits in host memory while the engines generate")
    add("--max-model-len", type=count, help="tokens of prompt and completion (default: the model's)")
    add("--enforce-eager", action=argparse.BooleanOptionalAction, default=True, help="no compilation")
    run_main(main, parse_args(parser))
