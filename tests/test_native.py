"""rlhf_nccl.py and the transport under it: vLLM's native weight transfer, and what it makes of faults.

pytest tests/test_native.py
"""

import functools
import json
import os
import random
import re
import time
from argparse import Namespace
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import ROOT, cpu_only

import rlhf_nccl
from grpo import GRPOConfig, Learner, MismatchError, Rollout
from rlhf_utils import WeightSyncError, transfer_init_info, weight_source
from tiny_model import build_tiny_model

DEAD_SIDE_SECONDS = 30
BIAS, WEIGHT = "model.decoder.layers.0.fc1.bias", "model.decoder.layers.1.self_attn.q_proj.weight"


# --- The script, as a user runs it ------------------------------------------------------------------------------------


@cpu_only
def test_dummy_engine_gets_the_trainers_weights_and_learns(script, tmp_path):
    text = script("rlhf_nccl.py", "--seed", random.randrange(1000), "--output", "run").finish(180)
    assert text.splitlines()[-1].startswith("OK: reward "), text
    assert re.search(r"^(\d+) of \1 greedy tokens are the trainer's own", text, re.MULTILINE)
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == list(range(1, 31))
    assert metrics[0]["reward/mean"] < 0.25
    assert metrics[-1]["reward/mean"] > 0.75
    assert max(row["logprobs/mismatch"] for row in metrics) < 1e-4


@pytest.fixture
def fault(tmp_path, monkeypatch):
    """The file that causes a fault in the engine of a script, by a plugin that vLLM finds on PYTHONPATH."""
    plugin = tmp_path / "plugin" / "fault-1.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: fault\nVersion: 1\n")
    (plugin / "entry_points.txt").write_text("[vllm.general_plugins]\nfault = engine_fault:register\n")
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, str(plugin.parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("ENGINE_FAULT", str(tmp_path / "fault"))
    return tmp_path / "fault"


@cpu_only
@pytest.mark.parametrize(
    ("kind", "message"),
    [("raise", r"the engine failed: .* ValueError\(.this worker cannot load.\)"), ("hang", "the engine died")],
    ids=["raises", "killed"],
)
def test_worker_that_fails_in_mid_transfer_ends_the_run(script, tmp_path, fault, kind, message):
    run = script("rlhf_nccl.py", "--steps", 10_000, "--output", "run")
    run.wait_for_step(tmp_path / "run", 2)
    family = run.descendants()
    fault.write_text(kind)
    failed = time.monotonic()
    if kind == "hang":
        while not fault.with_name("hanging").exists():
            time.sleep(0.05)
        failed = time.monotonic()
        run.descendant("VLLM::Worker_TP1").kill()
    text = run.finish(60)
    assert time.monotonic() - failed < DEAD_SIDE_SECONDS
    print(text)
    run.assert_failed_cleanly(text, family)
    assert re.search(message, text.splitlines()[-1])


@cpu_only
def test_what_needs_a_gpu_says_so(script):
    run = script("rlhf_nccl.py", "--quantization", "fp8")
    text = run.finish(60)
    run.assert_failed_cleanly(text, [])
    assert text.splitlines()[-1] == "error: --backend ipc and --quantization fp8 want a GPU, and Ray sees none"


@pytest.mark.parametrize(
    ("backend", "workers", "message"),
    [("nccl", None, r"wants 3 GPUs.*there\s+are 1.*--backend ipc"), ("ipc", 2, "--tensor-parallel-size must be 1")],
)
def test_one_gpu(monkeypatch, backend, workers, message):
    monkeypatch.setattr(rlhf_nccl.ray, "cluster_resources", lambda: {"GPU": 1.0})
    args = Namespace(backend=backend, tensor_parallel_size=workers, quantization=None, gpu_memory_utilization=None)
    with pytest.raises(rlhf_nccl.RunError, match=message):
        rlhf_nccl.place(args)


# --- The transport and the source, in this process --------------------------------------------------------------------


class Pair:
    """A trainer and an engine with one worker. It is the client as well, by the four methods that vLLM calls."""

    def __init__(self, model: Path):
        from vllm import LLM

        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        os.environ.update(VLLM_CPU_OMP_THREADS_BIND="0", TORCH_COMPILE_DISABLE="1")
        self.llm = LLM(
            model=str(model),
            dtype="float32",
            enforce_eager=True,
            distributed_executor_backend="mp",
            kv_cache_memory_bytes=128 << 20,
            logprobs_mode="processed_logprobs",
            load_format="dummy",
            weight_transfer_config={"backend": "gloo"},
            worker_extension_cls="rlhf_utils.GlooTransferWorker",
        )
        config = GRPOConfig(group_size=2, max_tokens=8, max_mismatch=1e-4)
        self.learner = Learner(str(model), config, torch.device("cpu"))

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self.llm.start_weight_update()

    def update_weights(self, update_info: dict) -> None:
        self.buckets += 1
        self.llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.llm.finish_weight_update("7")

    def sync(self, source, buffer_bytes: int = 1 << 20) -> None:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        init_info = transfer_init_info("gloo", "127.0.0.1", 2, buffer_bytes)
        self.buckets = 0
        WeightTransferTrainerFactory.trainer_init(init_info, client=self, source=source).send_weights()
        assert self.llm.reset_prefix_cache()

    def rollouts(self, temperature: float) -> list[Rollout]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=temperature, seed=1, max_tokens=8, logprobs=0)
        rollouts = []
        for request in self.llm.generate(["Hello, my name is", "a"], params, use_tqdm=False):
            ids = list(request.outputs[0].token_ids)
            logprobs = [row[token].logprob for row, token in zip(request.outputs[0].logprobs, ids, strict=True)]
            rollouts.append(Rollout(list(request.prompt_token_ids), ids, logprobs, 0.0))
        return rollouts

    def mismatch(self) -> float:
        """Raises MismatchError if the engine does not serve the trainer's weights."""
        return self.learner.mismatch(self.rollouts(temperature=1))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    pair = Pair(build_tiny_model(tmp_path_factory.mktemp("model")))
    yield pair
    pair.llm.llm_engine.engine_core.shutdown()


def source_of(tensors: dict[str, torch.Tensor]):
    """The source of a model that has these parameters."""
    model = Namespace(named_parameters=tensors.items)
    return weight_source(model, torch.float32)


@pytest.fixture
def trainer():
    """The script's trainer actor, but for what needs an engine."""
    trainer = object.__new__(rlhf_nccl.Trainer)
    trainer.precision, trainer.thread, trainer.source = "cpu", ThreadPoolExecutor(1), Namespace()
    trainer.client = Namespace(failed=Future())
    return trainer


@cpu_only
def test_source_that_disagrees_with_the_engine(pair, trainer):
    trainer.learner, model = pair.learner, pair.learner.model
    tensors = dict(model.named_parameters())
    with pytest.raises(MismatchError):
        pair.mismatch()  # dummy weights
    with pytest.raises(MismatchError):
        trainer.prove_greedy(pair.rollouts(temperature=0))
    pair.sync(weight_source(model, torch.float32), buffer_bytes=1 << 18)  # the size of the largest tensor
    assert pair.buckets > 4
    assert pair.mismatch() < 1e-5
    assert trainer.prove_greedy(pair.rollouts(temperature=0)).startswith("16 of 16 greedy tokens")
    assert pair.llm.get_weight_version() == "7"

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter + 0.02 * torch.randn_like(parameter)).bfloat16())
    pair.sync(weight_source(model, torch.bfloat16))
    assert pair.buckets == 1
    assert pair.mismatch() < 1e-5

    with torch.no_grad():
        tensors[WEIGHT].mul_(2)
    del tensors[WEIGHT]
    pair.sync(source_of(tensors))  # vLLM has nothing to say about a missing name
    with pytest.raises(MismatchError):
        pair.mismatch()
    for name, tensor, message in [
        ("model.decoder.layers.0.fc9.bias", torch.ones(3), "There is no module or parameter named"),
        (BIAS, torch.ones(7), "exceeds dimension size"),
        (WEIGHT, torch.ones(128, 64), "AssertionError"),
    ]:
        with pytest.raises(Exception, match=re.escape(f"{name} {list(tensor.shape)}: ") + f".*{message}"):
            pair.sync(source_of({name: tensor}))


def test_wait_for_vllm_ends(trainer):
    assert trainer._watched(lambda: "sent", seconds=1) == "sent"
    with pytest.raises(ValueError, match="of the trainer's own"):
        trainer._watched(functools.partial(int, "of the trainer's own"), seconds=1)
    with pytest.raises(WeightSyncError, match=r"nothing has moved for 0\.5 s"):
        trainer._watched(functools.partial(time.sleep, 3), seconds=0.5)

    trainer.client.failed.set_exception(WeightSyncError("the engine died"))
    for call in (functools.partial(time.sleep, 3), functools.partial(int, "the connection closed")):
        with pytest.raises(WeightSyncError, match="the engine died"):
            trainer._watched(call, seconds=30)


def test_unknown_api_is_an_error_that_says_which_versions_work(monkeypatch):
    from vllm.distributed import weight_transfer

    model = torch.nn.Linear(2, 3)

    class LaterSource:
        """What vLLM 0.33 asks of a source and 0.32 does not."""

        def __init_subclass__(cls):
            if not isinstance(cls.__dict__["metadata"], functools.cached_property):
                raise TypeError("metadata must be a cached_property")

        def iter_full(self):
            raise NotImplementedError

    monkeypatch.setattr(weight_transfer, "WeightSource", LaterSource)
    source = weight_source(model, torch.bfloat16)
    assert [(meta.name, meta.shape) for meta in source.metadata] == [("weight", (3, 2)), ("bias", (3,))]
    assert [(name, tensor.dtype) for name, tensor in source.iter_full()] == [
        ("weight", torch.bfloat16),
        ("bias", torch.bfloat16),
    ]

    monkeypatch.delattr(weight_transfer, "WeightSource")
    with pytest.raises(WeightSyncError, match=r"that of 0\.32 and 0\.33 is known\): cannot import name 'WeightSource'"):
        weight_source(model, torch.bfloat16)


@pytest.mark.parametrize("backend", ["nccl", "ipc", "gloo"])
def test_transfer_is_packed_in_buffers_of_the_size_asked_for(backend):
    init_info = transfer_init_info(backend, "127.0.0.1", 3, 12_345)
    assert (init_info.backend, init_info.packed_buffer_size_bytes) == (backend, 12_345)
    assert backend == "gloo" or init_info.packed
