"""Workers that map the trainer ranks' own memory, as by CUDA IPC, and what is compared then. Triton's interpreter runs
the kernel, on memory of the CPU.

pytest tests/test_mapped.py            what is served, and what is compared when
pytest tests/test_mapped.py -m slow    the kernel
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fakes import (
    HIDDEN,
    ColocatedWorker,
    Model,
    ModelEngine,
    Receiving,
    adapted,
    materialized,
    model_tensors,
    same_bits,
)

from rlhf_utils import SharedMemoryChannel, WeightSender, WeightSyncError
from weight_sync import sending, staging

MAPPED = """
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch
from fakes import ColocatedWorker, FakeDTensor, Model, ModelEngine, Receiving, materialized, model_tensors

from rlhf_utils import SharedMemoryChannel, WeightSender, WeightSyncError, rebuild_ipc, share_tensor
from weight_sync import buckets, copies, sending, staging, weights
from weight_sync import ranks as ranks_module
from weight_sync.groups import shared_buffer
from weight_sync.lora import LoRAWeight

CPU = torch.device("cpu")
DIFFERS = "what the engine now serves is not what the trainer has: their digests differ"
copies._has_kernel, copies.SHORTEST_RUN = lambda device: True, 32
staging.COMPARED_SYNCS = 2
buckets.PIECE_BYTES = 256
weights.ranks_of = lambda tensors: next(iter(tensors.values())).base.ranks_of()
lock, run = threading.Lock(), copies.Table.run  # the interpreter runs one kernel at a time


def run_alone(table, *args):
    with lock:
        run(table, *args)


copies.Table.run, sending.load_kernel = run_alone, lambda device: None


class Casting(Model):
    # One worker's half of most tensors, of `embed` in bf16, and of `last` half a word, which torch copies.
    def __init__(self, rank):
        super().__init__(rank)
        for name, tensor in (("embed", self.embed.bfloat16()), ("last", torch.zeros(1).bfloat16())):
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))

    def load_last(self, weight):
        self.last.data.copy_(weight)


def values(seed, model=Casting):
    made = model_tensors(seed) | ({"last": torch.full((1,), float(seed))} if model is Casting else {})
    return made | {"embed": made["embed"].bfloat16().float()}  # the interpreter truncates where a GPU rounds


class Shard(FakeDTensor):
    # What a rank holds of a tensor, in memory that other processes can map.
    def __init__(self, whole, rank, ranks):
        super().__init__(whole, rank, ranks)
        self.move()

    def move(self):
        shard, memory = self._local_tensor, shared_buffer(max(4, self._local_tensor.nbytes), CPU)
        self._local_tensor = memory[: shard.nbytes].view(shard.dtype).view(shard.shape).copy_(shard)

    def ranks_of(self):
        group = SimpleNamespace(size=lambda: self.ranks) if self.ranks > 1 else None
        return Ranks(group, self.rank)


class Ranks(ranks_module.Ranks):
    said = {}

    def texts(self, text, device):  # as by torch.distributed
        self.said[self.rank] = text
        while len(self.said) < self.size:
            time.sleep(0.01)
        return [self.said[rank] for rank in range(self.size)]


class Trainer:
    # A rank whose memory workers read. Or, of the tensor `stale`, memory that it had and has left.
    def __init__(self, rank, ranks, adapters, model):
        self.model, self.rank = model, rank
        self.shards = {name: Shard(value, rank, ranks) for name, value in values(0, model).items()}
        self.factors = {}
        for name in adapters:
            rows, columns = values(0)[name].shape
            for end, shape in ((".A", (1, columns)), (".B", (rows, 1))):
                factor = shared_buffer(4 * sum(shape) - 4, CPU).view(torch.float32)
                self.factors[name + end] = factor.view(shape).fill_(1)
        self.channel = SharedMemoryChannel(torch.device("cpu", rank))
        self.sender, self.delay = WeightSender(self.channel), 0
        self.weights = {name: ranks_module.ShardedPart(shard, 0, shard.shape) for name, shard in self.shards.items()}
        for name in adapters:
            factors = self.factors[name + ".A"], self.factors[name + ".B"]
            self.weights[name] = LoRAWeight(self.weights[name], *factors, 0.5)

    def sync(self, version):
        time.sleep(self.delay)
        for name, value in values(version, self.model).items():
            shard = self.shards[name]
            shard.whole = value
            rows = -(-len(value) // shard.ranks)
            shard._local_tensor.copy_(value[shard.rank * rows :][: len(shard._local_tensor)])
        for name, factor in self.factors.items():
            if name.endswith(".B"):
                factor.fill_(version)
        try:
            return self.sender.send_weights(self.weights.items()).loader
        except WeightSyncError as error:
            return str(error)


class Sync:
    def __init__(self, ranks=1, workers=1, adapters=(), model=Casting, stale=None):
        Ranks.said = {}
        self.version, self.adapters, self.model = 0, adapters, model
        self.trainers = [Trainer(rank, ranks, adapters, model) for rank in range(ranks)]
        self.workers = []
        for rank, trainer in enumerate(self.trainers):
            trainer.channel.workers = workers
            for _ in range(workers):
                self.workers.append(ColocatedWorker(ModelEngine(model(rank=rank % 2)), trainer.channel.handles))
                self.workers[-1].rank = rank
        stale_handles = [share_tensor(tensor) for tensor in self.memory(stale)] if stale else []

        def rebuild(handle, *rest):
            tensor = rebuild_ipc(handle, *rest)
            is_stale = handle in stale_handles or (stale == "copies" and tensor.dtype == torch.uint8)
            return tensor.clone() if is_stale else tensor

        staging.rebuild_ipc = rebuild

    def memory(self, name):
        for trainer in self.trainers:
            if name in trainer.shards:
                yield trainer.shards[name]._local_tensor.flatten()
            if name in trainer.factors:
                yield trainer.factors[name]

    def send(self):
        self.version += 1
        receivings = [Receiving(worker) for worker in self.workers]
        with ThreadPoolExecutor(len(self.trainers)) as threads:
            answers = list(threads.map(lambda trainer: trainer.sync(self.version), self.trainers))
        for receiving in receivings:
            receiving.join(30)
        self.errors = [receiving.error for receiving in receivings]
        return answers

    def __call__(self):
        assert set(answers := self.send()) == {"replay"}, answers
        assert self.errors == [None] * len(self.workers)
        weights = values(self.version, self.model)
        for name in self.adapters:
            factors = self.trainers[0].factors
            weights[name] = materialized(LoRAWeight(weights[name], factors[name + ".A"], factors[name + ".B"], 0.5))
        for worker in self.workers:
            model = worker.weight_model.model
            expected = self.model(rank=model.rank)
            expected.load_weights(weights.items())
            assert all(p.equal(expected.get_parameter(name)) for name, p in model.named_parameters())
            assert worker.check_weights_changed()

    @property
    def maps_copies(self):
        return {not trainer.sender.sending.maps_tensors for trainer in self.trainers}


for options in (
    {},
    {"adapters": ("q", "o", "fc")},  # copied by rows, by columns, and transposed
    {"workers": 2},  # of two engines on one device
    {"ranks": 2},
    {"ranks": 3},  # uneven shards, and ranks that have no part of `last`
    {"ranks": 2, "adapters": ("q", "o", "fc")},
    {"ranks": 2, "adapters": ("q", "o", "fc"), "model": Model},
):
    sync = Sync(**options)
    for _ in range(3):
        sync()
    # What other devices read is in the engine's dtypes.
    assert sync.maps_copies == {len(sync.trainers) > 1 and sync.model is Casting}
    for trainer in sync.trainers:
        trainer.sender.close()
    assert all(worker.check_weights_changed() for worker in sync.workers)

sync = Sync(ranks=2)
sync()
for late in (0, 1):  # no worker reads before every rank is done
    sync.trainers[late].delay = 1
    sync()
    sync.trainers[late].delay = 0

sync.trainers[1].shards["q"].move()  # on one rank alone: all agree anew
sync()
sync()

sync = Sync(ranks=2)
sync()
comparing = [threading.Thread(target=worker.compare_weights) for worker in sync.workers]
for thread in comparing:
    thread.start()


def compare(trainer):
    try:
        trainer.sender.compare_weights(trainer.weights.items())
    except WeightSyncError as error:
        assert "none of the engine's weights is quantized" in str(error), error  # after all of them have come
        return True


with ThreadPoolExecutor(2) as threads:
    assert all(threads.map(compare, sync.trainers))
for thread in comparing:
    thread.join(20)
sync()

for stale, options in (
    ("q", {}),  # copied
    ("embed", {}),  # cast
    ("last", {}),  # by torch
    ("q.B", {"adapters": ("q",)}),  # merged
    ("copies", {"ranks": 2}),
):
    sync = Sync(stale=stale, **options)
    sync()
    found = set()  # by which side
    for _ in range(staging.COMPARED_SYNCS):
        sides = {"ranks": sync.send(), "workers": sync.errors}
        found |= {side for side, said in sides.items() for each in said if DIFFERS in str(each)}
    assert found == {"ranks", "workers"}, (stale, found)
    assert not all(worker.check_weights_changed() for worker in sync.workers)


pack = sending.Packing.pack


def pack_wrongly(packing, i):
    # One bit of the copy that workers map is not what was read.
    pack(packing, i)
    for trainer in sync.trainers:
        if packing is getattr(trainer.sender.sending, "packing", None):  # none before its handshake
            trainer.sender.sending.memory.memory[trainer.rank][0] ^= 1


sync = Sync(ranks=2)
sync()
sending.Packing.pack = pack_wrongly
sides = [side for _ in range(staging.COMPARED_SYNCS) for side in (sync.send(), sync.errors)]
assert sum(DIFFERS in str(side) for side in sides) == 2, sides  # both of one sync, which ends the session
sync = Sync(ranks=2)
assert all("what arrived is not what the trainer sent" in str(side) for side in (sync.send(), sync.errors))
"""


@pytest.mark.slow
def test_workers_read_what_ranks_hold_and_find_other_memory():
    tests = Path(__file__).resolve().parent
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}"}
    subprocess.run([sys.executable, "-c", MAPPED], env=environment, check=True, timeout=240)


class Colocated:
    """A trainer rank and a worker that reads its memory, of a model of this class."""

    def __init__(self, model=Model):
        channel = SharedMemoryChannel(torch.device("cpu"))
        self.engine, self.sender = ModelEngine(model(0)), WeightSender(channel)
        self.engine.required_elements.pop("one", None)
        self.worker = ColocatedWorker(self.engine, channel.handles)

    def __call__(self, weights):
        receiving = Receiving(self.worker)
        try:
            assert self.sender.send_weights(weights.items()).loader == "replay"
        finally:
            receiving.join(10)
            self.error = receiving.error


@pytest.mark.parametrize("adapters", [False, True])
def test_replay_that_went_wrong_is_found_in_the_64th_sync(adapters):
    class Spoiled:
        def run(self, total):
            sync.engine.model.bias.data.view(torch.int32)[-1] ^= 1

    sync, weights = Colocated(), model_tensors(1)
    if adapters:
        weights["fc"] = adapted(weights["fc"])
    sync(weights)
    sync.engine.replay_steps[-1].append(Spoiled())
    for _ in range(62):
        sync(weights)
    assert sync.engine.version == 63
    with pytest.raises(WeightSyncError, match="what the engine now serves is not what the trainer has"):
        sync(weights)
    assert "what the engine now serves is not what the trainer has" in sync.error
    assert not sync.engine.unchanged()


def test_copy_of_what_is_not_contiguous_is_compared_with_the_tensor(monkeypatch):
    def packs_wrongly(packing, i):
        pack(packing, i)
        (copy,) = (elements for elements, region in sync.sender.sending.memory.views(i, 0) if region.piece.name == "q")
        copy.view(torch.int32)[0, 0] ^= 1

    monkeypatch.setattr(staging, "COMPARED_SYNCS", 1)  # each sync is compared
    sync, weights, pack = Colocated(), model_tensors(1), sending.Packing.pack
    weights["q"] = weights["q"].t().contiguous().t()
    sync(weights)
    sync(weights)
    monkeypatch.setattr(sending.Packing, "pack", packs_wrongly)
    with pytest.raises(WeightSyncError, match="what the engine now serves is not what the trainer has"):
        sync(weights)


class Odd(Model):
    """Takes the rows of `q` in turns, and of `one` a single element, which it keeps with a stride."""

    size = 1

    def __init__(self, rank):
        super().__init__(rank)
        self.gate = torch.nn.Parameter(torch.zeros(HIDDEN, 1), requires_grad=False)
        self.one = torch.nn.Parameter(torch.zeros(3, 5), requires_grad=False)

    def load_q(self, weight):
        for turn in range(2):
            self.qk.data.narrow(0, turn * HIDDEN // 2, HIDDEN // 2).copy_(weight[turn::2])

    def load_gate(self, weight):
        self.gate.data.copy_(weight)

    def load_one(self, weight):
        self.one.data.t()[1:2, 1:2].copy_(weight.t())


def odd_tensors(seed):
    weights = model_tensors(seed) | {"gate": torch.randn(HIDDEN, 1), "one": torch.randn(1, 1)}
    for name in ("q", "gate", "fc"):
        weights[name] = adapted(weights[name])
    return weights


def test_replaced_tensors_and_adapters_of_every_shape_are_served(monkeypatch):
    monkeypatch.setattr(staging, "COMPARED_SYNCS", 1)  # each sync is compared
    sync = Colocated(Odd)
    for seed in (1, 2, 3):
        weights, expected = odd_tensors(seed), Odd(0)
        sync(weights)
        expected.load_weights((name, materialized(weight)) for name, weight in weights.items())
        for name, parameter in expected.named_parameters():
            assert same_bits(parameter.data, sync.engine.model.get_parameter(name).data), (seed, name)
