"""Time all ways to sync weights for one model shape, in one run.

    python benchmarks/sync.py --shape qwen2.5-7b                             # 3 GPUs: 1 trainer -> TP=2, NCCL
    python benchmarks/sync.py --shape qwen2.5-7b --topology ipc              # 1 GPU, which trainer and engine share
    python benchmarks/sync.py --shape qwen2.5-7b --topology ipc --trainers 4 --tensor-parallel-size 1   # 4 such GPUs
    python benchmarks/sync.py --shape qwen2.5-7b --trainer-dtype float32     # from fp32 master weights
    python benchmarks/sync.py --shape qwen2.5-7b --quantization auto         # into an engine that torchao quantizes
    python benchmarks/sync.py --shape qwen2.5-7b --topology ipc --lora-rank 32    # adapters, which arrive merged
    python benchmarks/sync.py --shape qwen2.5-7b --trainers 4 --engines 2    # 8 GPUs: FSDP2 shards -> 2 x TP=2, NCCL
    python benchmarks/sync.py                                                # no GPU: a small shape over gloo

Models have random weights and are made from their configuration. Before each round of a way (except the ceiling), the
benchmark overwrites the engine's weights. After the rounds of a way, the weights must be, bit for bit, those of a
reload.

A time is the median of the rounds after the first two, from the end of learning until the engine may generate: it
begins with naming the trainer's tensors, and ends when both sides' calls have returned. It is train_grpo.py's
`time/sync` without its check of what arrived. With our way, the prefix cache was reset before, as it is while
train_grpo.py's trainer learns, and the workers wait already; train_grpo.py calls them in the sync, which takes longer.
The output also says how long the transfer alone took, until the workers had told the trainer (`sync/transfer`). With
vLLM's native engine, which is timed on GPUs, the last call resets the prefix cache. There, the engine has captured CUDA
graphs, as in the scripts.

With several trainers or engines, or with adapters, vLLM's engine does not apply: only the ceiling and ours are timed.
The ceiling is one broadcast from rank 0 to all workers, or one copy on the first device. Several ranks and workers can
be faster, since a worker needs only its part.

Staging is the peak of GPU memory that a way allocates beyond the weights, trainer + worker, in the last round. If the
first round differs, it is printed as well: in it, the first sync verifies replay. Writes a table, sync.json and
sync.png.
"""

import json
import os
import statistics
import sys
import time
from collections import ChainMap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import ray  # noqa: E402 - the project's modules are found by the line above
import torch  # noqa: E402
from annotated_types import Ge  # noqa: E402
from peers import AllocationPeak  # noqa: E402
from shapes import SHAPES, BenchmarkArguments, BenchmarkEngineArguments, device_kind  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from rlhf_utils import (  # noqa: E402
    SharedMemoryChannel,
    SyncReport,
    WeightSender,
    WeightSyncError,
    stateless_init_process_group,
)
from trainer.errors import RunError  # noqa: E402
from trainer.flags import arg, flat, section  # noqa: E402
from trainer.learning.config import LoRAArguments  # noqa: E402
from trainer.learning.lora import adapter_parameters, add_adapters  # noqa: E402
from trainer.learning.named_tensors import NamedTensors  # noqa: E402
from trainer.learning.sharding import join_ranks  # noqa: E402
from trainer.rollouts.engine import EngineActor  # noqa: E402
from trainer.rollouts.options import EngineSetting, llm_options  # noqa: E402
from trainer.rollouts.quantization import quantize_by_torchao  # noqa: E402
from trainer.run.actors import (  # noqa: E402
    ActorArguments,
    ActorGroup,
    LearnerActor,
    Seat,
    by_node,
    engine_seat,
    reserve,
    seat,
)
from trainer.run.arguments import parse  # noqa: E402
from trainer.run.folder import RunFolder  # noqa: E402
from trainer.run.session import RaySession, run_main  # noqa: E402
from trainer.topologies.separate import Separate  # noqa: E402
from trainer.topologies.shared import GPU_SHARE  # noqa: E402

CEILINGS = ("raw broadcast", "device copy")  # of the topologies "nccl" and "ipc"
TOPOLOGIES = {
    "nccl": "{trainers} trainer -> {engines} x TP={tp}, NCCL",
    "ipc": "{trainers} trainer and {engines} x TP={tp} on the same devices",
}
ROUND_SECONDS = 300  # a longer round counts as stuck


@dataclass
class SyncRunArguments(BenchmarkArguments):
    """A run whose model the benchmark makes."""

    model: None = field(default=None, init=False)  # no flag
    ray_address: None = field(default=None, init=False)  # both ends of a sync are timed by the clock of one machine


@dataclass
class Arguments:
    """What to measure."""

    run: SyncRunArguments = section(SyncRunArguments)
    # The KV cache has a fixed size, so vLLM only checks that this share of the GPU is free when it starts.
    engine: BenchmarkEngineArguments = section(
        BenchmarkEngineArguments,
        tensor_parallel_size=arg(2, help="GPUs that each engine is spread over (CPU: groups of cores)"),
        gpu_memory_utilization=arg(0.1, help="share of the GPU that must be free when the engine starts"),
        max_model_len=arg(256, help="tokens of a sequence (the engine generates none)"),
    )
    actors: ActorArguments = section(ActorArguments)
    shape: Literal[tuple(SHAPES)] = arg("tiny", help="shape of the model")
    topology: Literal[tuple(TOPOLOGIES)] = arg(
        "nccl",
        help="trainers and engines on separate GPUs (nccl; CPU: gloo), or on the same (ipc; CPU: shared memory; then"
        " there are engines for all GPUs of the trainers)",
    )
    trainer_dtype: Literal["bfloat16", "float32"] = arg("bfloat16", help="dtype of the weights that are sent")
    lora_rank: Annotated[int | None, Ge(1)] = arg(None, help="rank of adapters on all linear layers")
    rounds: Annotated[int, Ge(1)] = arg(6, help="rounds of each way")


class BenchEngine(EngineActor):
    """A Ray actor around vllm.AsyncLLM, whose workers support every way."""

    async def start(self, model: str, args: Arguments, device: str, bundles: list[int]) -> str:
        """Start the engine. Returns the kind of its CUDA graphs."""
        ipc, quantization = args.topology == "ipc", args.engine.quantization
        options = {"skip_tokenizer_init": True, "load_format": "dummy"}
        extension = f"{'Quantized' if quantization else ''}{'Colocate' if ipc else ''}PeerExtension"
        options |= {"worker_extension_cls": f"peers.{extension}"}
        # The engine generates nothing, so it gets little memory beyond the weights, whatever is free.
        options |= {"kv_cache_memory_bytes": 256 << 20, "max_num_seqs": 8, "max_num_batched_tokens": 256}
        options |= {"dtype": "bfloat16"} if quantization else {}
        if device == "cuda":
            options |= {"weight_transfer_config": {"backend": args.topology}}
        setting = EngineSetting(device, None, args.actors.engines, options=options)
        options, environment = llm_options(args.engine, model, setting, bundles)
        await self.prepare(device, bundles)
        os.environ.update(environment)
        torchao_options = quantize_by_torchao(quantization)[0] if quantization else {}
        await self.load(model, torchao_options | options)
        return self.llm.vllm_config.compilation_config.cudagraph_mode.name

    async def rpc(self, method: str, *args) -> list:
        return await self.llm.collective_rpc(method, args=args)

    async def reset_caches(self) -> None:
        await self.llm.reset_prefix_cache()

    async def receive_weights(self, *handles) -> float:
        """Returns when the call has returned, by time.monotonic(), which all processes of a machine share."""
        await self.reset_caches()
        results, returned = await self.rpc("receive_weights", *handles), time.monotonic()
        for result in results:
            if "error" in result:
                raise WeightSyncError(result["error"])
        if not all(await self.rpc("check_weights_changed")):
            raise WeightSyncError("the engine does not serve what was sent")
        return returned

    # vLLM's own weight transfer calls these methods.
    async def init_weight_transfer_engine(self, request) -> None:
        await self.llm.init_weight_transfer_engine(request)

    async def start_weight_update(self) -> None:
        await self.llm.start_weight_update()

    async def update_weights(self, request) -> None:
        await self.llm.update_weights(request)

    async def finish_weight_update(self, *args, **kwargs) -> None:
        await self.llm.finish_weight_update(*args, **kwargs)


class Watched:
    """An actor's handle that also keeps the calls made through it."""

    def __init__(self, actor):
        self.actor, self.calls = actor, []

    def __getattr__(self, method: str):
        return SimpleNamespace(remote=lambda *args, **kwargs: self._call(getattr(self.actor, method), *args, **kwargs))

    def _call(self, method, *args, **kwargs) -> ray.ObjectRef:
        self.calls.append(method.remote(*args, **kwargs))
        return self.calls[-1]


class BenchTrainer:
    """The parameters of one model, or a rank's shards of them, and all ways to send them to the engines. A way is a
    method that returns seconds."""

    def __init__(self, rank: int):
        self.rank = rank

    def load(self, model: str, args: Arguments, device: str, address: tuple[str, int], engines: list) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        if device == "cpu":
            torch.set_num_threads(max(1, os.cpu_count() // args.actors.trainers))
        torch.manual_seed(0)
        self.device, self.topology, self.group = torch.device(device, 0), args.topology, None
        # On CPU, which all ranks share, the index names the worker beside this rank.
        self.place = (
            self.device if device == "cuda" else torch.device("cpu", self.rank % args.engine.tensor_parallel_size)
        )
        self.engines, self.thread = [Watched(engine) for engine in engines if not self.rank], ThreadPoolExecutor(1)
        join_ranks(*address, self.rank, args.actors.trainers, self.device)
        dtype = getattr(torch, args.trainer_dtype)
        with self.device:
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=dtype)
        self.model = model.requires_grad_(False)
        if args.lora_rank:
            add_adapters(model, LoRAArguments(lora_rank=args.lora_rank), dtype)
            for parameter in adapter_parameters(model):
                torch.nn.init.normal_(parameter, std=0.02)
        if args.actors.trainers > 1:
            fully_shard(self.model)
        self.named_tensors = NamedTensors(self.model)

    def run(self, method: str, *args):
        """Run a method that calls engines. If an engine fails, raise its error: most methods would wait for ever."""
        for engine in self.engines:
            engine.calls.clear()
        running, deadline = self.thread.submit(getattr(self, method), *args), time.monotonic() + ROUND_SECONDS
        while not wait([running], timeout=5).done:  # rarely, since polling would slow the way down
            for call in [call for engine in self.engines for call in engine.calls]:
                try:
                    ray.get(call, timeout=0)
                except ray.exceptions.GetTimeoutError:
                    pass
                except ray.exceptions.RayError as error:
                    raise WeightSyncError(f"the engine failed: {getattr(error, 'cause', error)}") from error
            if time.monotonic() > deadline:
                raise WeightSyncError(f"{method} was not done within {ROUND_SECONDS} s")
        return running.result()

    address = LearnerActor.address

    @property
    def engine(self) -> Watched:
        """The engine, for ways that take only one."""
        (engine,) = self.engines
        return engine

    def join(self, address: str, port: int, ranks: int, workers: int) -> None:
        """Join the first `ranks` ranks with the workers."""
        if self.rank < ranks:
            self.group = stateless_init_process_group(address, port, self.rank, ranks + workers, self.device)

    def last_report(self) -> SyncReport:
        """The report of the last sync by our way."""
        return self.report

    def staging(self) -> int:
        return self.allocation_peak.peak()

    def release(self) -> None:
        """Free what the last way has allocated, so that the next way's memory can be measured."""
        self.sender = self.native = None
        self.allocation_peak = AllocationPeak(self.device)

    def ceiling(self, nbytes: int) -> float:
        """Broadcast, or copy on this device, one buffer until it has moved `nbytes`."""
        if self.rank:
            return 0.0
        buffer = torch.zeros(min(nbytes, 1 << 28), dtype=torch.uint8, device=self.device)
        if self.topology == "nccl":
            refs = [engine.rpc.remote("raw_broadcast", nbytes) for engine in self.engines]
            self.group.broadcast(buffer, src=0)  # both sides are ready now
        else:
            target = torch.empty_like(buffer)
        self._synchronize()
        started = time.perf_counter()
        for _ in range(nbytes // buffer.numel()):
            self.group.broadcast(buffer, src=0) if self.topology == "nccl" else target.copy_(buffer)
        self._synchronize()
        seconds = time.perf_counter() - started
        if self.topology == "nccl":
            ray.get(refs)
        return seconds * nbytes / (nbytes // buffer.numel() * buffer.numel())

    def connect_native(self, packed: bool, address: str, port: int, world_size: int) -> None:
        from vllm.distributed.weight_transfer.base import ModuleSource
        from vllm.distributed.weight_transfer.clients import RayVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        largest = max(parameter.nbytes for parameter in self.model.parameters())
        options = {"rank": 0, "packed": packed, "packed_buffer_size_bytes": max(1 << 30, largest)}
        if self.topology == "nccl":
            info = NCCLTrainerInitInfo(master_address=address, master_port=port, world_size=world_size, **options)
        else:
            info = IPCTrainerInitInfo(**options)
        self.native = WeightTransferTrainerFactory.trainer_init(
            info, client=RayVLLMWeightSyncClient(self.engine), source=ModuleSource(self.model)
        )

    def native_engine(self) -> float:
        """vLLM's own weight transfer."""
        started = time.perf_counter()
        self.native.send_weights()
        self._synchronize()
        ray.get(self.engine.reset_caches.remote())
        return time.perf_counter() - started

    def open_sender(self, replay: bool) -> dict[str, str]:
        """Returns the handles of the channel."""
        channel = SharedMemoryChannel(self.place) if self.topology == "ipc" else self.group
        self.sender = WeightSender(channel, replay=replay)
        return getattr(channel, "handles", {})

    def ours(self, expected_loader: str, handles: list[dict[str, str]], started: float) -> float:
        """Our `WeightSender`, on all ranks from the same moment on. The engines already wait, with an empty prefix
        cache, as at the end of learning. They get these handles."""
        handles = [[each] if each else [] for each in handles]
        refs = [engine.receive_weights.remote(*each) for engine, each in zip(self.engines, handles, strict=False)]
        time.sleep(max(0.0, started - time.monotonic()))
        self.report = self.sender.send_weights(self.named_tensors().items())
        sent = time.monotonic()
        seconds = max([sent, *ray.get(refs)]) - started  # either side may return first
        assert self.report.loader.startswith(expected_loader), self.report.loader
        return seconds

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def place_apart(args: Arguments) -> tuple[str, list[Seat], list[Seat]]:
    """Place trainer ranks and workers on GPUs of their own. Returns the device, and the seats of ranks and engines."""
    topology = Separate(SimpleNamespace(engine=args.engine, placement=args.actors), None, None, None)
    return topology.device, topology.trainer_seats, topology.engine_seats


def place_together(args: Arguments) -> tuple[str, list[Seat], list[Seat]]:
    """As `place_apart`, with each trainer rank beside a worker."""
    device = "cuda" if ray.cluster_resources().get("GPU", 0) else "cpu"
    share, tp = {"num_gpus": GPU_SHARE if device == "cuda" else 0}, args.engine.tensor_parallel_size
    placement = reserve([{"GPU": 1} if device == "cuda" else {"CPU": 1}] * args.actors.trainers, "PACK")
    bundles = by_node(placement)
    workers = [bundles[begin : begin + tp] for begin in range(0, len(bundles), tp)]
    engine_seats = [engine_seat(placement, each, GPU_SHARE if device == "cuda" else 0) for each in workers]
    return device, [seat(placement, bundle, **share) for bundle in bundles], engine_seats


class Bench:
    """The trainer's ranks, the engines, and the rows of the table so far."""

    def __init__(self, run: RunFolder, session: RaySession, args: Arguments):
        self.run, self.args, self.rows = run, args, []
        self.ipc = args.topology == "ipc"
        device, trainer_seats, engine_seats = (place_together if self.ipc else place_apart)(args)
        self.gpu = device == "cuda"
        model = run.path / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(SHAPES[args.shape] | {"torch_dtype": "bfloat16"}))
        self.engine = ActorGroup(session, "engine", BenchEngine, engine_seats)
        self.trainer = ActorGroup(session, "trainer", BenchTrainer, trainer_seats)
        starting = self.engine.begin(BenchEngine.start, str(model), args, device, each=self.engine.bundles)
        engines = list(self.engine.actors.values())
        loading = self.trainer.begin(BenchTrainer.load, str(model), args, device, self.address(), engines)
        (self.graphs, *_), _ = session.wait("starting", starting, loading)

    def run_way(self, method: str, *args) -> float | None:
        """Returns the seconds of the slowest rank, if the method has a time."""
        return max(filter(None, self.trainer.call(method, BenchTrainer.run, method, *args)), default=None)

    def run_ours(self, expected_loader: str) -> float:
        return self.run_way("ours", expected_loader, self.handles, time.monotonic() + 0.1)

    def ask_trainer(self, method: Callable, *args):
        return self.trainer.agreed(method.__name__, method, *args)

    def ask_workers(self, method: str, *args) -> list:
        return [answer for engine in self.engine.call(method, BenchEngine.rpc, method, *args) for answer in engine]

    def address(self) -> tuple[str, int]:
        return self.trainer.call("connecting", BenchTrainer.address)[0]

    @property
    def workers(self) -> int:
        return self.args.actors.engines * self.args.engine.tensor_parallel_size

    def release(self) -> None:
        self.ask_workers("release")
        self.ask_trainer(BenchTrainer.release)

    def reconnect(self, ranks: int) -> None:
        """Join the first `ranks` trainer ranks and all workers in a new group, if they are on different devices."""
        self.release()
        if not self.ipc:
            address, tp = self.address(), self.args.engine.tensor_parallel_size
            joining = self.trainer.begin(BenchTrainer.join, *address, ranks, self.workers)
            offsets = [(ranks + i * tp,) for i in range(self.args.actors.engines)]
            world_size, join_group = ranks + self.workers, BenchEngine.init_weight_update_group
            following = self.engine.begin(join_group, *address, world_size, each=offsets)
            self.trainer.session.wait("connecting", joining, following)

    def open_sender(self, replay: bool) -> None:
        self.reconnect(self.args.actors.trainers)
        handles = self.trainer.call("connecting", BenchTrainer.open_sender, replay)
        tp = self.args.engine.tensor_parallel_size
        # An engine gets those of the ranks beside its workers.
        self.handles = [dict(ChainMap(*handles[i * tp :][:tp])) for i in range(self.args.actors.engines)]

    def staging(self) -> tuple[int, int]:
        return self.ask_trainer(BenchTrainer.staging), max(self.ask_workers("staging"))

    def measure(self, name: str, method: str, *args) -> None:
        """Time a way, a method of the trainer, check the weights that it left, and add a row to the table."""
        seconds, staging, transfers = [], [], []
        for _ in range(self.args.rounds):
            if name not in CEILINGS:
                self.ask_workers("poison")
            seconds.append(self.run_ours(*args) if method == "ours" else self.run_way(method, *args))
            staging.append(self.staging())
            if method == "ours":
                transfers.append(self.ask_trainer(BenchTrainer.last_report).seconds)
        exact = None if name in CEILINGS else self.ask_workers("digest") == self.reference
        first_counted = min(2, len(seconds) - 1)
        median = statistics.median(seconds[first_counted:])
        row = {"way": name, "seconds": median, "GBps": self.nbytes / median / 1e9, "exact": exact, "rounds": seconds}
        self.rows.append(row)
        row |= {"share_of_ceiling": self.rows[0]["seconds"] / median, "staging": staging}
        row |= {"transfer": statistics.median(transfers[first_counted:])} if transfers else {}
        self.run.say(line(row))


def main(args: Arguments) -> None:
    if args.lora_rank and args.actors.trainers > 1:
        raise RunError("--lora-rank is for one trainer")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    if args.topology == "ipc":
        tp = args.engine.tensor_parallel_size if args.actors.trainers > 1 else 1
        if args.actors.engines > 1 or args.actors.trainers % tp:
            raise RunError("--topology ipc takes no --engines: there are --trainers / --tensor-parallel-size of them")
        args.engine.tensor_parallel_size, args.actors.engines = tp, args.actors.trainers // tp
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # vLLM's native engine pickles its handles
    with RunFolder(args.run, "sync") as run, RaySession(args.run, run.progress) as session:
        bench = Bench(run, session, args)
        where = TOPOLOGIES[args.topology].format(**asdict(args.actors), tp=args.engine.tensor_parallel_size)
        native_applies = args.actors.trainers == args.actors.engines == 1 and not args.lora_rank
        bench.open_sender(replay=False)
        bench.run_ours("reload")
        bench.nbytes = bench.ask_trainer(BenchTrainer.last_report).nbytes
        run.say(
            f"{args.shape}, {bench.nbytes / 1e9:.3f} GB from {args.trainer_dtype}, {where}, CUDA graphs {bench.graphs}"
        )
        bench.reference = bench.ask_workers("digest")
        bench.reconnect(ranks=1)
        bench.measure(CEILINGS[bench.ipc], "ceiling", bench.nbytes)
        for packed in (False, True) if bench.gpu and native_applies else ():
            bench.release()
            bench.run_way("connect_native", packed, *bench.address(), 1 + bench.workers)
            bench.measure(f"vLLM native, {'packed' if packed else 'unpacked'}", "native_engine")
        bench.open_sender(replay=False)
        bench.measure("ours, reload", "ours", "reload")
        bench.open_sender(replay=True)
        loader = "replay" if bench.gpu else ""
        bench.measure(f"ours, {loader or 'default'}", "ours", loader)
        finish(run, args, bench.rows, bench.nbytes)


def finish(run: RunFolder, args: Arguments, rows: list[dict], nbytes: int) -> None:
    """Write the results. Raises RunError if a way did not leave the weights that a reload does."""
    results = {"shape": args.shape, "device": device_kind(), "nbytes": nbytes, "ways": rows}
    settings = "topology quantization lora_rank trainer_dtype tensor_parallel_size trainers engines"
    results |= {name: flat(args)[name] for name in settings.split()}
    (run.path / "sync.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(results, run.path / "sync.png")
    if wrong := [row["way"] for row in rows if row["exact"] is False]:
        raise RunError(f"other weights than a reload's after {', '.join(wrong)}")
    run.say(f"OK: {run.path}/sync.png")


def line(row: dict) -> str:
    exact = {None: "", True: "exact", False: "WRONG"}[row["exact"]]
    share = f"{100 * row['share_of_ceiling']:6.1f} %"
    first, last = (" + ".join(f"{nbytes / 2**20:.0f}" for nbytes in row["staging"][i]) for i in (0, -1))
    staging = last if first == last else f"{last} (first {first})"
    return (
        f"{row['way']:24} {1e3 * row['seconds']:10.2f} ms {row['GBps']:8.2f} GB/s {share} of the ceiling"
        f"  staging {staging} MiB  {exact}"
        + (f", transfer {1e3 * row['transfer']:.2f} ms" if "transfer" in row else "")
    )


def draw(results: dict, path: Path) -> None:
    """Draw a bar for each way, and the ceiling as a line."""
    from matplotlib.figure import Figure

    ceiling, *rows = results["ways"]
    rows = rows[::-1]
    figure = Figure(figsize=(8, 0.5 * len(rows) + 1.6))
    axes = figure.subplots()
    colors = ["tab:blue" if row["way"].startswith("ours") else "tab:gray" for row in rows]
    bars = axes.barh([row["way"] for row in rows], [1e3 * row["seconds"] for row in rows], color=colors)
    axes.bar_label(bars, [f"{1e3 * row['seconds']:,.1f} ms" for row in rows], padding=4)
    axes.axvline(1e3 * ceiling["seconds"], color="tab:red", linestyle="--", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(1e3 * ceiling["seconds"] / 2, 3e3 * max(row["seconds"] for row in rows))
    axes.set_xlabel(f"weight sync, ms (dashed: {ceiling['way']}, {1e3 * ceiling['seconds']:,.1f} ms)")
    title = f"{results['shape']}, {results['nbytes'] / 1e9:.2f} GB from {results['trainer_dtype']}, {results['device']}"
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    run_main(main, parse(Arguments, __doc__))
