"""Weights from two trainer ranks into the two workers of a real engine beside them, by every protocol that it speaks.

pytest tests/test_colocate_engine.py
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import cpu_only
from fakes import PlainSender
from pair import engine_environment, stop
from transformers import AutoModelForCausalLM

from rlhf_utils import SharedMemoryChannel, WeightSender, WeightSyncError, share_tensor
from trainer.tasks.tiny_model import build_tiny_model
from weight_sync.groups import shared_buffer

pytestmark = cpu_only


class Engine:
    """An engine with two workers, and the weights that it began with."""

    def __init__(self, model: Path):
        from vllm import LLM

        with engine_environment(workers=2):
            self.llm = LLM(
                model=str(model),
                dtype="float32",
                enforce_eager=True,
                tensor_parallel_size=2,
                distributed_executor_backend="mp",
                kv_cache_memory_bytes=64 << 20,
                worker_extension_cls="engine_probe.ColocateProbe",
            )
        self.original = dict(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).named_parameters())
        self.threads = ThreadPoolExecutor(3)

    def rpc(self, method: str, *args) -> list:
        return self.llm.collective_rpc(method, args=args)

    def perturbed(self, seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {n: t.detach() + 0.02 * torch.randn(t.shape, generator=generator) for n, t in self.original.items()}

    def sync(self, tensors: dict[str, torch.Tensor], channels=None) -> list[int]:
        """By a `WeightSender` beside each worker, once; returns the workers' digests."""
        channels = channels or [SharedMemoryChannel(torch.device("cpu", rank)) for rank in range(2)]
        answers = self.threads.submit(self.rpc, "receive_weights", channels[0].handles | channels[1].handles)
        senders = [self.threads.submit(WeightSender(channel).send_weights, tensors.items()) for channel in channels]
        try:
            self.reports = [sender.result() for sender in senders]
        finally:
            self.answers = answers.result()  # before anything else asks the engine, whose core is in this process
        return self.rpc("digest")


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    engine = Engine(build_tiny_model(tmp_path_factory.mktemp("model")))
    yield engine
    stop(engine.llm)


def test_senders_bring_what_the_checkpoint_holds(engine):
    from_disk, with_state = engine.rpc("digest"), engine.rpc("weight_digests")
    assert [served for served, _ in with_state] == from_disk
    assert engine.rpc("report_device_id") == ["cpu:0", "cpu:1"]
    assert engine.rpc("check_weights_changed") == [False, False]
    assert engine.sync(engine.perturbed(1)) != from_disk
    assert engine.rpc("check_weights_changed") == [True, True]
    assert engine.sync(engine.original) == from_disk
    assert engine.rpc("weight_digests") == with_state
    assert [report.version for report in engine.reports] == [2, 2]


def test_buckets_over_zmq_bring_the_same(engine, tmp_path):
    tensors = engine.perturbed(2)
    expected = engine.sync(tensors)
    engine.sync(engine.original)
    addresses = {f"cpu:{rank}": f"ipc://{tmp_path}/{rank}" for rank in range(2)}
    for _ in range(2):
        senders = [PlainSender(address, tensors, 512 << 10) for address in addresses.values()]
        engine.rpc("update_weights_from_ipc", addresses)
        for sender in senders:
            sender.join(10)
            assert set(sender.answers) == {b""}
        assert engine.rpc("digest") == expected
        assert engine.rpc("check_weights_changed") == [True, True]


def test_handles_bring_the_same(engine):
    tensors = engine.perturbed(3)
    expected = engine.sync(tensors)
    engine.sync(engine.original)
    buffers, handles = [], {}
    for name, tensor in tensors.items():
        buffers.append(shared_buffer(tensor.nbytes, torch.device("cpu")))
        buffers[-1].copy_(tensor.reshape(-1).view(torch.uint8))
        handles[name] = share_tensor(buffers[-1].view(tensor.dtype).view(tensor.shape))
    half = dict(list(handles.items())[: len(handles) // 2])
    engine.rpc("update_weights_from_ipc_handles", {"cpu:0": half, "cpu:1": half})
    assert engine.rpc("check_weights_changed") == [False, False]
    engine.rpc("update_weights_from_ipc_handles", {"cpu:0": handles, "cpu:1": handles})
    assert engine.rpc("digest") == expected
    assert engine.rpc("check_weights_changed") == [True, True]


def test_wrong_tensor_ends_the_sync_on_both_sides(engine):
    before = engine.rpc("digest")
    wrong = engine.perturbed(4) | {"model.decoder.final_layer_norm.bias": torch.ones(3)}
    with pytest.raises(WeightSyncError, match=r"final_layer_norm\.bias \[3\]: the engine cannot load it"):
        engine.sync(wrong)
    assert engine.rpc("digest") == before
    assert engine.sync(engine.perturbed(4)) != before
