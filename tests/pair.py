"""A trainer and a vLLM engine with a group between them, on whatever hardware there is."""

import gc
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
import torch
from conftest import arguments_of, shared_memory_of
from engine_probe import gpu_memory
from fakes import materialized
from peft import PeftModel
from transformers import AutoModelForCausalLM

import train_grpo
from rlhf_utils import LoRAWeight, SharedMemoryChannel, SyncReport, WeightSender, stateless_init_process_group
from trainer.errors import MismatchError
from trainer.flags import with_values
from trainer.learning.grpo import GRPOLearner
from trainer.learning.rollout import Rollout
from trainer.topologies import link

# Of vLLM's engine, which starts in half the time. In the process of an actor, which imported torch before it began to
# load an engine, what a script sets comes too late to keep vLLM from compiling.
CORE_IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1"}
PROMPTS = ["Hello, my name is", "The capital of France is", "a", "The future of AI is " * 4]
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
DTYPE = "bfloat16" if DEVICE.type == "cuda" else "float32"
PLAIN_WORKER = "plain_worker.PlainWorker"  # on a CPU, an engine with it replays as on a GPU
DEFAULTS = {"dtype": DTYPE, "enforce_eager": True}  # of vLLM's options
if DEVICE.type == "cpu":
    DEFAULTS["worker_cls"] = PLAIN_WORKER
MAX_MISMATCH = link.MAX_MISMATCH[DEVICE.type]
# Bytes by which 200 syncs may let grow what is counted in pages or segments: 200 of the smallest weights of the
# built-in model are more than 8 MiB of host memory, 200 times all of a worker's weights more than 32 MiB of a GPU.
MAX_GROWTH = {"host": 8 << 20, "driver": 32 << 20}


class Pair:
    """A trainer in this process (on GPUs: on the first), an engine beside it: on the next ones, the weights sent by
    broadcast, or, `colocated`, its one worker on the trainer's own device, which they share."""

    def __init__(
        self,
        model: Path,
        tensor_parallel_size: int = 2,
        max_mismatch: float = MAX_MISMATCH,
        colocated: bool = False,
        **options,
    ):
        config = arguments_of(train_grpo, group_size=2, max_tokens=8, max_mismatch=max_mismatch)
        self.learner = GRPOLearner(str(model), config, DEVICE)
        self.original = {name: tensor.clone() for name, tensor in self.learner.model.module.named_parameters()}
        self.world_size, self.colocated, self.handles = 1 + tensor_parallel_size, colocated, []
        from vllm import LLM

        compiled = not options.get("enforce_eager", True)
        with engine_environment(tensor_parallel_size, first_gpu=0 if colocated else 1, compiled=compiled):
            self.llm = LLM(
                model=str(model),
                tensor_parallel_size=tensor_parallel_size,
                distributed_executor_backend="mp",
                kv_cache_memory_bytes=128 << 20,
                gpu_memory_utilization=0.05,  # no more has to be free: others may use these GPUs
                logprobs_mode="processed_logprobs",
                worker_extension_cls="engine_probe.ColocateProbe" if colocated else "engine_probe.Probe",
                **DEFAULTS | options,
            )
        self.thread = ThreadPoolExecutor(1)
        self.connect()

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *_) -> None:
        stop(self.llm)

    def start(self, method: str, *args):
        """Run a method on every worker, while this process goes on; `.result()` is a list with one result a worker."""
        return self.thread.submit(self.llm.collective_rpc, method, args=args)

    def rpc(self, method: str, *args) -> list:
        return self.start(method, *args).result()

    def connect(self) -> None:
        if self.colocated:
            channel = SharedMemoryChannel(DEVICE)
            self.handles, self.sender = [channel.handles], WeightSender(channel)
            return
        from vllm.utils.network_utils import get_open_port

        port = get_open_port()
        joining = self.start("init_weight_update_group", "127.0.0.1", port, 1, self.world_size)
        self.group = stateless_init_process_group("127.0.0.1", port, 0, self.world_size, DEVICE)
        joining.result()
        self.sender = WeightSender(self.group)

    def sync(self, tensors=None, reset_prefix_cache: bool = True) -> SyncReport:
        if reset_prefix_cache:
            self.llm.reset_prefix_cache()
        receiving = self.start("receive_weights", *self.handles)
        try:
            return self.sender.send_weights(self.learner.model.named_tensors().items() if tensors is None else tensors)
        finally:
            self.answers = receiving.result()

    def sync_one_parameter_at_a_time(self) -> Iterator[str]:
        """As vLLM's example does it; yields the names as they are done."""
        for name, parameter in self.learner.model.module.named_parameters():
            receiving = self.start("update_weight", name, str(parameter.dtype).split(".")[-1], tuple(parameter.shape))
            self.group.broadcast(parameter.data, src=0)
            receiving.result()
            yield name

    def generate(self, seed: int | None = None, prompts: list[str] = PROMPTS, **options) -> list["Sampled"]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0 if seed is None else 1, seed=seed, max_tokens=8, logprobs=0)
        rollouts = []
        for request in self.llm.generate(prompts, params, use_tqdm=False, **options):
            ids = list(request.outputs[0].token_ids)
            logprobs = [row[token].logprob for row, token in zip(request.outputs[0].logprobs, ids, strict=True)]
            rollouts.append(Sampled(list(request.prompt_token_ids), ids, logprobs, 0.0))
        return rollouts

    def mismatch(self) -> float:
        """Raises MismatchError if the engine does not serve the trainer's weights."""
        return self.learner.mismatch(self.generate(seed=1))

    @torch.no_grad()
    def set(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.learner.model.module.named_parameters():
            parameter.copy_(tensors[name])

    def perturbed(self, seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        noise = {name: torch.randn(t.shape, generator=generator).to(t.device) for name, t in self.original.items()}
        return {name: t + 0.02 * noise[name] for name, t in self.original.items()}

    def footprint(self) -> dict[str, int]:
        """What both sides hold: open file descriptors, and bytes of host memory, of shared memory, of tensors on GPUs,
        and of those GPUs as the driver counts, with all that is not torch's (a GPU that both sides share twice)."""
        gc.collect()  # what earlier tests of this process left
        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        tensors, driver = zip(gpu_memory(DEVICE), *self.rpc("gpu_memory"), strict=True)
        host = descriptors = 0
        for process in family:
            with suppress(psutil.NoSuchProcess):  # it has just ended
                host, descriptors = host + process.memory_info().rss, descriptors + process.num_fds()
        return {
            "host": host,
            "shared": sum(os.path.getsize(file) for file in shared_memory_of(family)),
            "gpu": sum(tensors),
            "driver": sum(driver),
            "descriptors": descriptors,
        }


@dataclass(frozen=True)
class Sampled(Rollout):
    """A rollout that is equal to one with the same tokens and log-probabilities, to the last bit."""


def stop(llm) -> None:
    def kill(workers: list) -> None:
        for worker in workers:
            worker.kill()

    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    shared_memory = shared_memory_of(psutil.Process().children(recursive=True))
    with pytest.MonkeyPatch.context() as patch:  # vLLM would wait 4 s for the workers to go by themselves
        patch.setattr(MultiprocExecutor, "_ensure_worker_termination", staticmethod(kill))
        llm.llm_engine.engine_core.shutdown()
    for file in shared_memory:
        Path(file).unlink(missing_ok=True)  # vLLM leaves some


def assert_memory_is_flat(pair: Pair, syncs: int) -> None:
    """Sync other values each time. The first tenth of the syncs may take what is kept for the others."""
    for i in range(syncs):
        pair.set(pair.perturbed(i))
        pair.sync()
        if i == syncs // 10:
            before = pair.footprint()
    after = pair.footprint()
    pair.mismatch()
    grown = {name: after[name] - before[name] for name in after}
    assert all(growth <= MAX_GROWTH.get(name, 0) for name, growth in grown.items()), (before, after)


def assert_adapters_are_exact(pair: Pair, syncs: int) -> None:
    """What arrives of adapters is what peft merges. The pair has synced what its engine had loaded from disk."""
    from_disk, path = pair.rpc("digest"), pair.learner.model.module.name_or_path
    config = with_values(pair.learner.config, {"lora_rank": 4})
    learner = GRPOLearner(path, config, DEVICE)
    weights = learner.model.named_tensors()
    bases = {name: getattr(weight, "base", weight).clone() for name, weight in weights.items()}
    pair.sync(weights.items())  # before anything is learned
    assert pair.rpc("digest") == from_disk
    learner.mismatch(pair.generate(seed=1))

    for _ in range(syncs):
        for name, parameter in learner.model.module.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
        assert pair.sync(weights.items(), reset_prefix_cache=False).tensors == len(pair.original)
    assert all(getattr(weight, "base", weight).equal(bases[name]) for name, weight in weights.items())
    right = pair.rpc("digest")

    adapted = {name: weight for name, weight in weights.items() if isinstance(weight, LoRAWeight)}
    for wrong in (
        {name: weight.base for name, weight in adapted.items()},  # not sent
        {name: replace(weight, base=materialized(weight)) for name, weight in adapted.items()},  # sent twice
        {name: replace(weight, scaling=weight.scaling**2) for name, weight in adapted.items()},  # scaled twice
    ):
        pair.sync((weights | wrong).items())
        with pytest.raises(MismatchError):
            learner.mismatch(pair.generate(seed=1))
    pair.sync(weights.items())
    assert pair.rpc("digest") == right
    learner.mismatch(pair.generate(seed=1))

    with TemporaryDirectory() as folder:
        learner.save(Path(folder))
        base = AutoModelForCausalLM.from_pretrained(path, dtype=next(iter(adapted.values())).base.dtype)
        merged = PeftModel.from_pretrained(base.to(DEVICE).float(), folder).merge_and_unload()
    pair.set(pair.original)
    pair.sync()
    pair.sync(merged.named_parameters())
    assert pair.rpc("digest") == right


def assert_syncs_are_exact(pair: Pair) -> None:
    """Other weights arrive, layers that were swapped are seen, and the original ones come back bit for bit."""
    from_disk = pair.rpc("digest")
    pair.sync()
    assert pair.rpc("digest") == from_disk
    for tensors in (pair.perturbed(1), pair.perturbed(2), swap_layers(pair.perturbed(2))):
        pair.set(tensors)
        with pytest.raises(MismatchError):
            pair.mismatch()
        pair.sync()
        pair.mismatch()
        assert all(pair.rpc("check_weights_changed"))
        assert not set(pair.rpc("digest")) & set(from_disk)
    pair.set(pair.original)
    pair.sync()
    assert pair.rpc("digest") == from_disk


def compare(pair: Pair, weights=None) -> int:
    comparing = pair.start("compare_weights")
    try:
        return pair.sender.compare_weights(weights or pair.learner.model.module.named_parameters())
    finally:
        comparing.result()


def swap_layers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of layer 0 under the names of layer 1, and the other way round."""
    return {name: tensors[re.sub(r"\.([01])\.", lambda n: f".{1 - int(n[1])}.", name, count=1)] for name in tensors}


def gpus(which: slice) -> str:
    """Some of the GPUs that this process may use, for CUDA_VISIBLE_DEVICES."""
    every = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
    return ",".join(every.split(",")[which])


@contextmanager
def engine_environment(workers: int, first_gpu: int = 0, compiled: bool = False) -> Iterator[None]:
    """What an engine that starts now inherits: where the code lies, and its share of cores or GPUs."""
    tests = Path(__file__).parent
    path = os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": path}
    if DEVICE.type == "cuda":
        # By now this process uses the first GPU; hidden from the workers, it does not count as one of theirs.
        variables["CUDA_VISIBLE_DEVICES"] = gpus(slice(first_gpu, first_gpu + workers))
    else:
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(workers)))
        variables |= CORE_IN_PROCESS
    variables["TORCH_COMPILE_DISABLE"] = str(int(not compiled))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield
