"""A trainer and a vLLM engine with a group between them, on whatever hardware there is."""

import gc
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

import rlhf
from grpo import GRPOConfig, Learner, Rollout
from ray_session import shared_memory_of
from rlhf_utils import SyncReport, WeightSender, stateless_init_process_group

PROMPTS = ["Hello, my name is", "The capital of France is", "a", "The future of AI is " * 4]
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
DTYPE = "bfloat16" if DEVICE.type == "cuda" else "float32"
MAX_MISMATCH = rlhf.MAX_MISMATCH[DEVICE.type]
MAX_HOST_GROWTH = 8 << 20  # bytes; 200 of the smallest weights of the built-in model are more


class Pair:
    """A trainer in this process (on GPUs: on the first), an engine beside it (on the next ones)."""

    def __init__(self, model: Path, tensor_parallel_size: int = 2, max_mismatch: float = MAX_MISMATCH, **options):
        config = GRPOConfig(group_size=2, max_tokens=8, max_mismatch=max_mismatch)
        self.learner = Learner(str(model), config, DEVICE)
        self.original = {name: tensor.clone() for name, tensor in self.learner.model.named_parameters()}
        self.world_size = 1 + tensor_parallel_size
        from vllm import LLM

        with _environment(tensor_parallel_size):
            self.llm = LLM(
                model=str(model),
                enforce_eager=True,
                tensor_parallel_size=tensor_parallel_size,
                distributed_executor_backend="mp",
                kv_cache_memory_bytes=128 << 20,
                logprobs_mode="processed_logprobs",
                worker_extension_cls="engine_probe.Probe",
                **{"dtype": DTYPE} | options,
            )
        self.thread = ThreadPoolExecutor(1)
        self.connect()

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *_) -> None:
        shared_memory = shared_memory_of(psutil.Process().children(recursive=True))
        self.llm.llm_engine.engine_core.shutdown()
        for file in shared_memory:
            Path(file).unlink(missing_ok=True)  # vLLM leaves some

    def start(self, method: str, *args):
        """Run a method on every worker, while this process goes on; `.result()` is a list with one result a worker."""
        return self.thread.submit(self.llm.collective_rpc, method, args=args)

    def rpc(self, method: str, *args) -> list:
        return self.start(method, *args).result()

    def connect(self) -> None:
        from vllm.utils.network_utils import get_open_port

        port = get_open_port()
        joining = self.start("init_weight_update_group", "127.0.0.1", port, 1, self.world_size)
        self.group = stateless_init_process_group("127.0.0.1", port, 0, self.world_size, DEVICE)
        joining.result()
        self.sender = WeightSender(self.group)

    def sync(self, tensors=None, reset_prefix_cache: bool = True) -> SyncReport:
        if reset_prefix_cache:
            self.llm.reset_prefix_cache()
        receiving = self.start("receive_weights")
        try:
            return self.sender.send_weights(self.learner.named_tensors().items() if tensors is None else tensors)
        finally:
            self.answers = receiving.result()

    def sync_one_parameter_at_a_time(self) -> Iterator[str]:
        """As vLLM's example does it; yields the names as they are done."""
        for name, parameter in self.learner.model.named_parameters():
            receiving = self.start("update_weight", name, str(parameter.dtype).split(".")[-1], tuple(parameter.shape))
            self.group.broadcast(parameter.data, src=0)
            receiving.result()
            yield name

    def generate(self, seed: int | None = None, prompts: list[str] = PROMPTS) -> list[Rollout]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0 if seed is None else 1, seed=seed, max_tokens=8, logprobs=0)
        rollouts = []
        for request in self.llm.generate(prompts, params, use_tqdm=False):
            ids = list(request.outputs[0].token_ids)
            logprobs = [row[token].logprob for row, token in zip(request.outputs[0].logprobs, ids, strict=True)]
            rollouts.append(Rollout(list(request.prompt_token_ids), ids, logprobs, 0.0))
        return rollouts

    def mismatch(self) -> float:
        """Raises MismatchError if the engine does not serve the trainer's weights."""
        return self.learner.mismatch(self.generate(seed=1))

    @torch.no_grad()
    def set(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.learner.model.named_parameters():
            parameter.copy_(tensors[name])

    def perturbed(self, seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        noise = {name: torch.randn(t.shape, generator=generator).to(t.device) for name, t in self.original.items()}
        return {name: t + 0.02 * noise[name] for name, t in self.original.items()}

    def footprint(self) -> dict[str, int]:
        """What both sides hold: bytes of host, shared and GPU memory, and open file descriptors."""
        gc.collect()  # what earlier tests of this process left
        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        on_gpus = torch.cuda.memory_allocated(DEVICE) if DEVICE.type == "cuda" else 0
        return {
            "host": sum(process.memory_info().rss for process in family),
            "shared": sum(os.path.getsize(file) for file in shared_memory_of(family)),
            "gpu": on_gpus + sum(self.rpc("gpu_memory")),
            "descriptors": sum(process.num_fds() for process in family),
        }


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
    assert grown.pop("host") < MAX_HOST_GROWTH, (before, after)
    assert all(growth <= 0 for growth in grown.values()), (before, after)


def swap_layers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of layer 0 under the names of layer 1, and the other way round."""
    return {name: tensors[re.sub(r"\.([01])\.", lambda n: f".{1 - int(n[1])}.", name, count=1)] for name in tensors}


@contextmanager
def _environment(workers: int) -> Iterator[None]:
    """What the engine's processes inherit: where the code lies, and their share of cores or GPUs."""
    tests = Path(__file__).parent
    path = os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": path, "TORCH_COMPILE_DISABLE": "1"}
    if DEVICE.type == "cuda":
        # By now this process uses the first GPU; hidden from the workers, it does not count as one of theirs.
        every_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(every_gpu.split(",")[1 : 1 + workers])
    else:
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(workers)))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield
