"""vLLM's own weight transfer in rlhf_nccl.py: what it makes of faults, and what it takes of vLLM's API.

pytest tests/test_native.py            functions
pytest tests/test_native.py -m long    runs of the script, with a worker that fails in a transfer
"""

import inspect
import os
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, Script, cpu_only, is_alive

import rlhf_nccl


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
@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("raise", "this worker cannot load"),
        ("raise second", r"TimeoutError in Trainer\.\w+: no end of a transfer"),
        ("hang", "Engine"),
    ],
    ids=["raises", "second raises", "killed"],
)
def test_worker_that_fails_in_mid_transfer_ends_the_run(tmp_path, fault, kind, message):
    flags = ["--steps", "10000", "--tensor-parallel-size", "2"]
    run = Script(tmp_path, sys.executable, str(ROOT / "rlhf_nccl.py"), *flags)
    run.wait_for("step 2/")
    family = run.descendants()
    fault.write_text(kind)
    if kind == "hang":
        while not fault.with_name("hanging").exists():
            time.sleep(0.05)
        run.descendant("VLLM::Worker_TP1").kill()
    failed = time.monotonic()
    text = run.finish(60)
    assert kind == "hang" or "this worker cannot load" in text
    assert run.process.returncode == 1
    assert re.match(f"RuntimeError: .*{message}", text.splitlines()[-1]), text
    while [process for process in family if is_alive(process)]:
        assert time.monotonic() - failed < 60
        time.sleep(0.1)


class Failing:
    """An engine's actor, whose calls raise."""

    def __init__(self, *errors: Exception):
        self.errors, self.call = list(errors), self
        self.remote = lambda *_: self.errors.pop(0)


@pytest.fixture
def trainer(monkeypatch):
    """The script's trainer, without a model."""

    def get(error: Exception):
        raise error

    monkeypatch.setattr(rlhf_nccl.ray, "get", get)
    trainer = object.__new__(rlhf_nccl.Trainer)
    trainer.thread = ThreadPoolExecutor(1)
    trainer.client = rlhf_nccl.Client(Failing(ValueError("the first"), ValueError("that follows from it")))
    return trainer


def test_first_error_of_the_engine_ends_a_wait_for_vllm(trainer):
    def send_weights() -> None:
        with pytest.raises(ValueError, match="the first"):
            trainer.client.start_weight_update()
        with pytest.raises(ValueError, match="that follows from it"):
            trainer.client.finish_weight_update()
        waits.wait()  # as a broadcast to a worker that has failed, which never ends

    waits, started = threading.Event(), time.monotonic()
    with pytest.raises(ValueError, match="the first"):
        trainer.unless_engine_fails(send_weights)
    assert time.monotonic() - started < 2
    waits.set()


def test_wait_for_vllm_ends(trainer, monkeypatch):
    assert trainer.unless_engine_fails(lambda: "what it returns") == "what it returns"
    with pytest.raises(ZeroDivisionError):
        trainer.unless_engine_fails(lambda: 1 / 0)
    monkeypatch.setattr(rlhf_nccl, "SYNC_SECONDS", 0.1)
    with pytest.raises(TimeoutError, match="a worker may have failed"):
        trainer.unless_engine_fails((waits := threading.Event()).wait)
    waits.set()


# --- What vLLM gets and has ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("later", "buffers"), [(False, 1), (True, 2)], ids=["0.32", "0.33"])
def test_transfer_is_packed_in_buffers_that_this_vllm_keeps_apart(monkeypatch, device, later, buffers):
    """vLLM 0.33 has `WeightSource.iter_full`, and waits for a buffer before it loads the next one."""
    from vllm.distributed import weight_transfer

    made = []
    factory = weight_transfer.WeightTransferTrainerFactory
    monkeypatch.setattr(factory, "trainer_init", lambda info, **_: made.append(info))
    monkeypatch.setattr(weight_transfer, "WeightSource", SimpleNamespace(iter_full=None) if later else object)
    trainer = object.__new__(rlhf_nccl.Trainer)
    trainer.device, trainer.model = torch.device(device), torch.nn.Linear(1, 1)
    trainer.connect("engine", "127.0.0.1", 1234, 3)
    (info,) = made
    assert (info.master_address, info.master_port, info.world_size, info.rank) == ("127.0.0.1", 1234, 3, 0)
    assert info.backend == ("gloo" if device == "cpu" else "nccl")
    if device == "cuda":
        assert (info.packed, info.packed_num_buffers) == (True, buffers)


def test_this_vllm_has_the_api_that_is_used():
    """A contract with vLLM: all that rlhf_nccl.py and rlhf_cpu.py call, with as many arguments."""
    from vllm import LLM
    from vllm.distributed import weight_transfer
    from vllm.distributed.weight_transfer import packed_tensor
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import reload

    for owner, name, arguments in [
        (LLM, "init_weight_transfer_engine", 2),
        (LLM, "start_weight_update", 1),
        (LLM, "update_weights", 2),
        (LLM, "finish_weight_update", 2),
        (LLM, "sleep", 2),
        (LLM, "wake_up", 2),
        (LLM, "reset_prefix_cache", 1),
        (weight_transfer.WeightTransferEngineFactory, "register_engine", 2),
        (weight_transfer.WeightTransferTrainerFactory, "register_engine", 2),
        (weight_transfer, "ModuleSource", 1),
        (packed_tensor, "pack_tensors", 3),
        (packed_tensor, "unpack_tensor", 5),
        (reload, "initialize_layerwise_reload", 1),
        (reload, "finalize_layerwise_reload", 2),
    ]:
        inspect.signature(getattr(owner, name)).bind(*range(arguments))
    trainer_init = weight_transfer.WeightTransferTrainerFactory.trainer_init
    inspect.signature(trainer_init).bind(None, client=None, source=weight_transfer.WeightSource)
    inspect.signature(EngineArgs).bind(weight_transfer_config=None, load_format=None)
