"""benchmarks/sync.py: every way is timed, and leaves exactly the weights that a reload does; what it makes of faults.

pytest tests/test_benchmark.py
"""

import argparse
import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import ray
from conftest import ROOT, cpu_only
from pair import CORE_IN_PROCESS, gpus

import rlhf
from rlhf_utils import WeightSyncError
from run_folder import RunError

PEERS = {"nccl": ["raw broadcast", "one RPC a parameter"], "ipc": ["device copy", "ZMQ + IPC buckets"]}
NATIVE = ["vLLM native, unpacked", "vLLM native, packed"]
H200, H100 = 143771 << 20, 81559 << 20  # bytes of memory


@pytest.fixture
def sync(monkeypatch):
    """The benchmark's module."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import sync

    return sync


def assert_every_way_is_exact(run, expected):
    results = json.loads((run / "sync.json").read_text())
    assert [row["way"] for row in results["ways"]] == expected
    assert [row["exact"] for row in results["ways"]] == [None] + [True] * (len(expected) - 1)
    assert all(len(row["rounds"]) == 2 and min(row["rounds"]) > 0 for row in results["ways"])
    returned = {row["way"]: row["returned"] for row in results["ways"] if "returned" in row}
    assert list(returned) == [way for way in expected if way.startswith("ours")]
    assert min(returned.values()) > 0
    assert (run / "sync.png").read_bytes().startswith(b"\x89PNG")


@cpu_only
@pytest.mark.parametrize(
    ("topology", "quantized"), [("nccl", False), pytest.param("nccl", True, marks=pytest.mark.slow), ("ipc", False)]
)
def test_every_way_is_timed_and_exact(script, tmp_path, topology, quantized):
    arguments = ["--topology", topology, "--rounds", 2, "--output", "run"] + ["--quantized"] * quantized
    text = script("benchmarks/sync.py", *arguments, **CORE_IN_PROCESS).finish(180)
    assert text.splitlines()[-1].startswith("OK: "), text
    peers = PEERS[topology][:1] if quantized else PEERS[topology]
    assert_every_way_is_exact(tmp_path / "run", [*peers, "ours, reload", "ours, default"])


@pytest.mark.parametrize(
    ("topology", "where"),
    [
        pytest.param("nccl", slice(0, 3), marks=pytest.mark.gpu(3)),
        pytest.param("ipc", slice(-1, None), marks=pytest.mark.gpu(1)),  # of several GPUs not the first
    ],
)
def test_every_way_is_exact_on_gpus(script, tmp_path, topology, where):
    arguments = ["--topology", topology, "--shape", "opt-125m", "--rounds", 2, "--output", "run"]
    text = script("benchmarks/sync.py", *arguments, CUDA_VISIBLE_DEVICES=gpus(where)).finish(300)
    assert text.splitlines()[-1].startswith("OK: "), text
    assert_every_way_is_exact(tmp_path / "run", [*PEERS[topology], *NATIVE, "ours, reload", "ours, replay"])


@pytest.mark.parametrize(("given", "kept"), [([], None), (["3"], "3")])
def test_engine_keeps_the_gpu_that_ray_gave_it(monkeypatch, given, kept):
    seen = []
    vllm = SimpleNamespace(LLM=lambda **_: seen.append(os.environ.get("CUDA_VISIBLE_DEVICES")))
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setattr(rlhf.ray, "get_gpu_ids", lambda: given)
    monkeypatch.setattr(rlhf, "die_with_children", lambda: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("VLLM_RAY_BUNDLE_INDICES", "")
    options = {"tensor_parallel_size": 1, "enforce_eager": True, "gpu_memory_utilization": 0.1}
    rlhf.Engine("model", argparse.Namespace(seed=0, max_model_len=256, **options), "cuda")
    assert seen == [kept]


@pytest.mark.parametrize(
    ("total", "topology", "trainer_dtype", "workers", "fits"),
    [
        (H200, "nccl", "bfloat16", 1, True),
        (H200, "nccl", "float32", 2, True),
        (H200, "ipc", "bfloat16", 1, True),
        (H200, "ipc", "float32", 1, False),
        (H100, "nccl", "bfloat16", 1, True),
        (H100, "nccl", "float32", 2, False),
        (H100, "ipc", "bfloat16", 1, False),
    ],
)
def test_32b_runs_where_it_fits(sync, total, topology, trainer_dtype, workers, fits):
    options = {"topology": topology, "trainer_dtype": trainer_dtype, "tensor_parallel_size": workers}
    for shape in sync.SHAPES:
        args = argparse.Namespace(shape=shape, **options)
        if fits or shape != "qwen2.5-32b":
            sync.check_memory(args, total)
        else:
            with pytest.raises(RunError, match=r"32b from .* GiB of weights on one GPU"):
                sync.check_memory(args, total)


@pytest.mark.parametrize("fault", ["raises", "waits"])
def test_way_that_would_wait_for_ever_ends(sync, monkeypatch, fault):
    def get(call, timeout):
        raise ray.exceptions.RayError("no luck") if fault == "raises" else ray.exceptions.GetTimeoutError

    monkeypatch.setattr(sync, "ray", SimpleNamespace(get=get, exceptions=ray.exceptions))
    monkeypatch.setattr(sync, "ROUND_SECONDS", 1)
    ended, trainer = threading.Event(), object.__new__(sync.BenchTrainer)
    trainer.thread = ThreadPoolExecutor(1)
    trainer.engine = sync.Watched(SimpleNamespace(rpc=SimpleNamespace(remote=lambda method: method)))
    trainer.way = lambda: (trainer.engine.rpc.remote("receive"), ended.wait())
    with pytest.raises(
        WeightSyncError, match="the engine failed: no luck" if fault == "raises" else "way was not done"
    ):
        trainer.run("way")
    ended.set()
