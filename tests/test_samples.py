"""A worker that reads the trainer's own memory, as by CUDA IPC: what a sample finds. Triton's interpreter runs the
kernel, on memory of the CPU.

pytest tests/test_samples.py
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from weight_sync import copies
from weight_sync.copies import BLOCK_WORDS, BatchedCopy
from weight_sync.link import WeightSyncError
from weight_sync.lora import LoRAWeight, Merge
from weight_sync.samples import SAMPLED_BLOCKS, SYNCS, Samples, TrainerSamples, columns_of

MAPPED = """
import itertools
import threading

import torch
from test_replay import Engine, Model, tensors
from test_shared_memory import CPU, Worker
from test_transport import Receiving

import rlhf_utils
from rlhf_utils import SharedMemoryChannel, WeightSender, WeightSyncError, rebuild_ipc
from weight_sync import copies
from weight_sync.channels import TrainerMemory
from weight_sync.groups import shared_buffer
from weight_sync.lora import LoRAWeight, materialized

DIFFERS = "a sample of what the engine now serves is not what the trainer has"
copies._has_kernel, copies.SHORTEST_RUN = lambda device: True, 32
SharedMemoryChannel.can_map = lambda self, tensors: True
lock, run = threading.Lock(), copies.Table.run  # the interpreter runs one kernel at a time


def run_alone(table, *args):
    with lock:
        run(table, *args)


copies.Table.run = run_alone


class Casting(Model):
    # One rank's half of most tensors, of `embed` in bf16, and of `last` half a word, which torch copies.
    def __init__(self, rank):
        super().__init__(rank)
        for name, tensor in (("embed", self.embed.bfloat16()), ("last", torch.zeros(1).bfloat16())):
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))

    def load_last(self, weight):
        self.last.data.copy_(weight)


def values(seed):
    made = tensors(seed) | {"last": torch.ones(1)}
    return made | {"embed": made["embed"].bfloat16().float()}  # the interpreter truncates where a GPU rounds


class Mapped:
    def __init__(self, stale=None, adapters=(), workers=1):
        # A trainer whose memory a worker reads. Or the memory that the tensor `stale` had, and has left.
        self.version, given = 0, values(0)
        for name in adapters:
            given |= {f"{name}.A": torch.ones(1, given[name].shape[1]), f"{name}.B": torch.ones(len(given[name]), 1)}
        self.memory = {n: shared_buffer(t.nbytes, CPU).view(t.dtype).view(t.shape) for n, t in given.items()}
        for name, value in given.items():
            self.memory[name].copy_(value)
        self.trainer = {name: self.memory[name] for name in values(0)}
        for name in adapters:
            self.trainer[name] = LoRAWeight(*(self.memory[name + end] for end in ("", ".A", ".B")), 0.5)
        mapped = itertools.cycle(self.memory)
        rlhf_utils.rebuild_ipc = lambda *a: rebuild_ipc(*a).clone() if next(mapped) == stale else rebuild_ipc(*a)
        channel = SharedMemoryChannel(CPU, workers)
        self.workers = [Worker(Engine(Casting(rank=1)), channel.handles) for _ in range(workers)]
        self.worker, self.sender = self.workers[0], WeightSender(channel)

    def sync(self):
        self.version += 1
        for name, value in values(self.version).items():
            self.memory[name].copy_(value)
        for name, tensor in self.memory.items():
            if name.endswith(".B"):
                tensor.fill_(self.version)
        receivings = [Receiving(worker) for worker in self.workers]
        try:
            assert self.sender.send_weights(self.trainer.items()).loader == "replay"
        finally:
            for receiving in receivings:
                receiving.join(20)
            self.error = receivings[0].error


def assert_serves(pair):
    expected = Casting(rank=1)
    expected.load_weights((name, materialized(weight)) for name, weight in pair.trainer.items())
    for worker in pair.workers:
        model = worker.weight_model.model
        assert all(parameter.equal(expected.get_parameter(name)) for name, parameter in model.named_parameters())


pair = Mapped()
pair.sync()
assert isinstance(pair.sender.staging, TrainerMemory) and pair.worker.check_weights_changed()
for _ in range(4):
    pair.sync()
    assert pair.error is None and pair.worker.check_weights_changed()
    assert_serves(pair)
pair.sender.close()
assert pair.worker.check_weights_changed() and pair.worker.check_weights_changed()

pair = Mapped(adapters=("q", "o", "fc"))  # copied by rows, by columns, and transposed
for _ in range(3):
    pair.sync()
    assert isinstance(pair.sender.staging, TrainerMemory) and pair.worker.check_weights_changed()
    assert_serves(pair)

weight = pair.trainer["q"]
weight.lora_B.data = weight.lora_B.data.clone()  # a factor that moves is noticed like any other tensor
pair.memory["q.B"] = weight.lora_B
pair.sync()
assert not isinstance(pair.sender.staging, TrainerMemory)
assert_serves(pair)

pair = Mapped()
pair.trainer["tied"] = pair.trainer["q"]
pair.sync()
comparing = threading.Thread(target=pair.worker.compare_weights)
comparing.start()
try:
    pair.sender.compare_weights(pair.trainer.items())
except WeightSyncError as error:
    assert "none of the engine's weights is quantized" in str(error), error  # after all of them have come
comparing.join(20)
pair.sync()
assert isinstance(pair.sender.staging, TrainerMemory)

pair = Mapped(workers=2)  # two engines on one device
for _ in range(3):
    pair.sync()
    assert isinstance(pair.sender.staging, TrainerMemory)
    assert all(worker.check_weights_changed() for worker in pair.workers)
    assert_serves(pair)

for stale, adapters in ("q", ()), ("embed", ()), ("q.B", ("q",)):  # a copy, a cast, what is merged
    pair = Mapped(stale, adapters)
    pair.sync()
    assert pair.worker.check_weights_changed()
    try:
        pair.sync()
    except WeightSyncError as error:
        assert "engine worker 0 (pid " in str(error) and DIFFERS in str(error), error
    else:
        raise AssertionError("a sync of other memory than the trainer's succeeded")
    assert pair.error == DIFFERS and not pair.worker.check_weights_changed()
"""


def test_sample_finds_a_worker_that_reads_other_memory_than_the_trainers():
    tests = Path(__file__).resolve().parent
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}"}
    subprocess.run([sys.executable, "-c", MAPPED], env=environment, check=True, timeout=120)


def sampled(words: list[int]) -> tuple[Samples, TrainerSamples, list[torch.Tensor]]:
    """The samples of both ends, for tensors of so many words, and the tensors that the engine serves."""
    read, served = ([torch.zeros(n) for n in words] for _ in range(2))
    samples = Samples([BatchedCopy(torch.device("cpu"), list(zip(served, read, strict=True)))], read, served)
    return samples, TrainerSamples(samples.blocks.tolist(), read, [torch.float32] * len(read)), served


def drawn(words: list[int]) -> list[list[tuple[int, int, int]]]:
    """The blocks of each sync of tensors with so many words: tensors' numbers, first bytes and words."""
    samples, _, _ = sampled(words)
    return [[*map(tuple, samples.blocks[:, columns_of(sync, samples.blocks)].T.tolist())] for sync in range(SYNCS)]


@pytest.fixture
def kernel(monkeypatch):
    """Copies are by the kernel, which adds the numbers of the blocks instead of hashing them."""
    monkeypatch.setattr(copies, "_has_kernel", lambda device: True)
    monkeypatch.setattr(copies.Table, "of_blocks", lambda address, words, cast, number, device: Numbers(number))


class Numbers:
    """In the place of a table: adds up the numbers of blocks."""

    def __init__(self, numbers):
        self.numbers = numbers

    def run(self, total, columns):
        total += 1 + self.numbers[columns].sum()


def test_every_tensor_and_every_block_has_its_turn(kernel):
    syncs = drawn([2 * BLOCK_WORDS + 3, *range(1, 2 * SAMPLED_BLOCKS)])
    assert {tensor for blocks in syncs[:2] for tensor, *_ in blocks} == set(range(2 * SAMPLED_BLOCKS))
    assert {block[1:] for blocks in syncs for block in blocks if block[0] == 0} == {
        (0, BLOCK_WORDS), (4 * BLOCK_WORDS, BLOCK_WORDS), (8 * BLOCK_WORDS, 3),
    }  # fmt: skip


def test_each_sync_of_each_session_has_a_sample_of_its_own(kernel):
    syncs = {tuple(blocks) for _ in range(2) for blocks in drawn([100 * BLOCK_WORDS])}
    assert len(syncs) == 2 * SYNCS


def test_after_so_many_syncs_the_first_comes_again(kernel):
    samples, trainer, _ = sampled([BLOCK_WORDS])
    totals = []
    for sync in (5, SYNCS + 5, 2 * SYNCS + 5):
        samples.hash(sync)
        totals.append(trainer.digest(sync))
        assert totals[-1] == int(samples.total)
    assert totals[0] > 5 * SAMPLED_BLOCKS**2
    assert totals == [totals[0] * n for n in (1, 2, 3)]


def test_nothing_to_sample_is_a_digest_of_nothing():
    weight = torch.zeros(4, dtype=torch.bfloat16)
    samples = Samples([BatchedCopy(torch.device("cpu"), [(weight.clone(), weight)])], [weight], [weight])  # by torch
    samples.hash(1)
    assert TrainerSamples(samples.blocks.tolist(), [weight], [torch.bfloat16]).digest(1) == int(samples.total) == 0


def test_a_wrong_merge_of_the_trainers_own_is_found(kernel, monkeypatch):
    """Any of those that a sync samples, not always the same."""
    weights = [LoRAWeight(torch.zeros(64, 64), torch.ones(1, 64), torch.ones(64, 1), 1.0) for _ in range(4)]
    pairs = [(torch.zeros(64, 64), Merge(weight, weight.base)) for weight in weights]
    bases, served = [weight.base for weight in weights], [out for out, _ in pairs]
    samples = Samples([BatchedCopy(torch.device("cpu"), pairs)], bases, served)
    trainer = TrainerSamples(samples.blocks.tolist(), weights, [torch.float32] * 4)
    for sync in range(20):
        trainer.digest(sync)
    checked = set()
    count_wrong = Merge.count_wrong
    monkeypatch.setattr(
        Merge, "count_wrong", lambda merge, *args: checked.add(id(merge.weight)) or count_wrong(merge, *args)
    )
    for sync in range(20):
        trainer.digest(sync)
    assert len(checked) == len(weights)
    monkeypatch.setattr(Merge, "__call__", lambda merge, out: out.copy_(merge.merged() + 0.01))
    with pytest.raises(WeightSyncError):
        trainer.digest(21)
