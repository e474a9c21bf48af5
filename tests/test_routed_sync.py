"""Several trainer ranks, whose bytes go only to the workers that need them. No vLLM: modules that load as vLLM's do.

pytest tests/test_routed_sync.py
"""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from fakes import (
    HIDDEN,
    PADDING,
    FakeDTensor,
    Model,
    ModelEngine,
    Quantized,
    QuantizedEngine,
    Receiving,
    Worker,
    adapted,
    groups,
    materialized,
    model_tensors,
    quantizable,
    same_bits,
)

from rlhf_utils import LoRAWeight, WeightSender
from weight_sync import buckets
from weight_sync import weights as weights_module
from weight_sync.ranks import Ranks, ShardedPart
from weight_sync.staging import WiredStaging


class Whole(Model):
    """An engine of a single worker."""

    size = 1


def sharded(weights, rank, ranks):
    """What a rank holds of these weights: rows, and of a LoRAWeight rows of its base."""

    def part(tensor):
        return ShardedPart(FakeDTensor(tensor, rank, ranks), 0, tensor.shape)

    return {
        name: LoRAWeight(part(weight.base), weight.lora_A, weight.lora_B, weight.scaling, weight.transposed)
        if isinstance(weight, LoRAWeight)
        else part(weight)
        for name, weight in weights.items()
    }


@pytest.fixture(autouse=True)
def ranks_without_a_group(monkeypatch):
    def ranks_of(tensors):
        base = next(tensor.base for tensor in tensors.values() if isinstance(tensor, ShardedPart))
        return Ranks(SimpleNamespace(size=lambda: base.ranks) if base.ranks > 1 else None, base.rank)

    monkeypatch.setattr(weights_module, "ranks_of", ranks_of)


class Sync:
    """So many trainer ranks and engines, whose workers have models of this class."""

    def __init__(self, ranks, engines, model=Model, engine=ModelEngine, syncs=1):
        self.ranks, self.model = ranks, model
        members = groups(ranks + engines * model.size)
        models = [model(rank) for _ in range(engines) for rank in range(model.size)]
        self.workers = [Worker(engine(m), other, model.size) for m, other in zip(models, members[ranks:], strict=True)]
        self.receiving = [Receiving(worker, syncs) for worker in self.workers]
        self.senders = [WeightSender(trainer) for trainer in members[:ranks]]
        self.transfers = []  # (kind, address, other rank) of what ranks have sent
        for trainer in members[:ranks]:
            trainer.start = self.noting(trainer.start)

    def noting(self, start):
        def starts(kind, tensor, peer):
            self.transfers.append((kind, tensor.data_ptr(), peer))
            return start(kind, tensor, peer)

        return starts

    def send(self, weights):
        """Sync. Returns each rank's report, or the text of its error."""

        def send(rank):
            try:
                return self.senders[rank].send_weights(sharded(weights, rank, self.ranks).items())
            except Exception as error:
                return str(error)

        with ThreadPoolExecutor(self.ranks) as threads:
            return list(threads.map(send, range(self.ranks)))

    def __call__(self, weights):
        """Sync, check every worker's every bit, and return how the next sync loads."""
        (loader,) = {getattr(answer, "loader", answer) for answer in self.send(weights)}
        for worker in self.workers:
            engine = worker.weight_model
            expected = type(engine.model)(engine.model.rank)
            expected.load_weights((name, materialized(weight)) for name, weight in weights.items())
            expected.process_weights()
            for name, parameter in expected.named_parameters():
                assert same_bits(parameter.data, engine.model.get_parameter(name).data), name
            assert engine.unchanged()
        return loader

    def sent(self):
        """Elements that each rank sends to each worker in a sync."""
        return [
            [
                sum(region.numel for regions in sender.sending.routed.needs[n] for region in regions)
                for n in sender.sending.part_of
            ]
            for sender in self.senders
        ]


LAYOUTS = [(1, 1, Model), (2, 1, Model), (3, 1, Model), (2, 2, Model), (2, 1, Whole), (3, 2, Whole)]


@pytest.mark.parametrize(("ranks", "engines", "model"), LAYOUTS)
@pytest.mark.parametrize("bucket_bytes", [1024, 1 << 20])
def test_each_worker_gets_what_it_needs_from_each_rank(monkeypatch, ranks, engines, model, bucket_bytes):
    monkeypatch.setattr(buckets, "STAGING_BYTES", buckets.STAGING_BUFFERS * bucket_bytes)
    monkeypatch.setattr(buckets, "PIECE_BYTES", 256)
    sync = Sync(ranks, engines, model, syncs=3)
    for seed in (1, 2, 3):
        assert sync(model_tensors(seed)) == "replay"
    needed = sum(parameter.numel() for parameter in model(0).parameters()) - PADDING * HIDDEN
    by_rank = sync.sent()
    assert [sum(elements) for elements in zip(*by_rank, strict=True)] == [needed] * engines * model.size
    if ranks == 2:
        assert sum(by_rank[0]) == sum(by_rank[1])  # so the links of both carry the same


def test_what_several_workers_need_is_packed_once():
    sync = Sync(ranks=2, engines=2, model=Model)
    sync(model_tensors(1))
    sent = [(address, peer) for kind, address, peer in sync.transfers if kind == "send"]
    addresses = {frozenset(address for address, peer in sent if peer == worker) for worker in range(2, 6)}
    assert len(sent) == 8 and len(addresses) == 2  # in the pass that verifies the replay


def test_more_engines_than_ranks_get_whole_buckets():
    sync = Sync(ranks=1, engines=2, model=Model, syncs=2)
    for seed in (1, 2):
        assert sync(model_tensors(seed)) == "replay"
    assert {kind for kind, *_ in sync.transfers} == {"broadcast"}


def test_staging_memory_is_that_of_one_way_at_a_time():
    sync = Sync(ranks=2, engines=1)
    sync(model_tensors(1))
    assert all(sender.sending.whole is None for sender in sync.senders)
    assert all(worker.weight_staging is None for worker in sync.workers)


class Forgets(ModelEngine):
    """Its replays leave out a copy."""

    def record(self, *arguments):
        refused = super().record(*arguments)
        self.replay_steps[-1][-1].torch_copies.pop()
        return refused


def test_memory_of_a_replay_that_was_wrong_is_freed(monkeypatch):
    def noted(staging, *arguments):
        stagings.add(staging)
        make(staging, *arguments)

    stagings, make = weakref.WeakSet(), WiredStaging.__init__
    monkeypatch.setattr(WiredStaging, "__init__", noted)
    sync = Sync(ranks=2, engines=1, engine=Forgets)
    assert sync(model_tensors(1)) == "reload (replay did not reproduce it bit for bit)"
    sync.receiving[0].join(10)
    gc.collect()
    assert len(stagings) == len(sync.senders) + len(sync.workers)  # of whole buckets


@pytest.mark.parametrize("model", [Model, Whole])
def test_adapters_are_merged_where_they_are_packed(monkeypatch, model):
    monkeypatch.setattr(buckets, "PIECE_BYTES", 256)
    sync = Sync(ranks=2, engines=1, model=model, syncs=2)
    for seed in (1, 2):
        weights = model_tensors(seed)
        for name in ("q", "o", "fc"):  # copied by rows, by columns, and transposed
            weights[name] = adapted(weights[name])
        assert sync(weights) == "replay"


class Interleaves(Model):
    """Takes the rows of `q` in turns, and has a weight with one input column, and a transposed one."""

    def __init__(self, rank):
        super().__init__(rank)
        self.gate = torch.nn.Parameter(torch.zeros(HIDDEN // self.size, 1), requires_grad=False)
        self.turned = torch.nn.Parameter(torch.zeros(1, HIDDEN // self.size), requires_grad=False)

    def load_q(self, weight):
        self.qk.data.narrow(0, 0, HIDDEN // self.size).copy_(weight[self.rank :: self.size])

    def load_gate(self, weight):
        self.gate.data.copy_(self.share(weight, 0))

    def load_turned(self, weight):
        self.turned.data.copy_(self.share(weight.t(), 1))


@pytest.mark.parametrize(("ranks", "loader"), [(1, "replay"), (2, "reload (q: it is cut, and not copied by rows)")])
def test_adapters_of_every_shape_and_order_are_merged(ranks, loader):
    sync = Sync(ranks, engines=1, model=Interleaves, syncs=2)
    for seed in (1, 2):
        weights = model_tensors(seed) | {name: torch.randn(HIDDEN, 1) for name in ("gate", "turned")}
        for name in ("q", "gate", "turned"):
            weights[name] = adapted(weights[name])
        assert sync(weights) == loader


def test_tensor_that_is_laid_out_anew_is_sent_as_before(monkeypatch):
    monkeypatch.setattr(weights_module, "ranks_of", lambda tensors: Ranks())
    monkeypatch.setitem(globals(), "sharded", lambda weights, *_: weights)
    sync, weights = Sync(ranks=1, engines=1, syncs=4), model_tensors(1)
    assert sync(weights) == "replay"
    sync.transfers.clear()
    weights |= {name: weights[name].t().contiguous().t() for name in ("q", "o", "fc")}
    for _ in range(2):
        weights["q"].mul_(2)
        assert sync(weights) == "replay"
    assert sync(weights | {name: adapted(weights[name]) for name in ("q", "o", "fc")}) == "replay"
    assert {kind for kind, *_ in sync.transfers} == {"send"}


@pytest.mark.parametrize("side", ["rank", "worker"])
def test_flipped_bit_to_one_worker_ends_the_sync_everywhere(monkeypatch, side):
    sync = Sync(ranks=2, engines=2, syncs=2)
    assert sync(model_tensors(1)) == "replay"
    rank, worker = sync.senders[1].channel.communicator, sync.workers[3].model_update_group
    end, other = (rank, worker) if side == "rank" else (worker, rank)
    start = end.start

    def starts(kind, tensor, peer):
        if side == "rank" and peer == other.rank:
            tensor[5] ^= 1
        passing = start(kind, tensor, peer)
        if side == "worker" and peer == other.rank:
            passing.result()
            tensor[5] ^= 1
        return passing

    end.start = starts
    answers = sync.send(model_tensors(2))
    assert all("what arrived is not what the trainer sent" in answer for answer in answers)
    assert side == "rank" or all("engine 1's worker 1" in answer for answer in answers)
    sync.receiving[3].join(10)
    assert "what arrived is not what the trainer sent" in sync.receiving[3].error
    assert not sync.workers[3].check_weights_changed()


def test_rank_that_fails_ends_the_sync_everywhere(monkeypatch):
    sync = Sync(ranks=2, engines=2, syncs=2)
    assert sync(model_tensors(1)) == "replay"
    monkeypatch.setattr(sync.senders[1].sending, "send", lambda *_: torch.empty(1 << 60))
    monkeypatch.setattr(sync.senders[1], "_agree", lambda *_: None)
    answers = sync.send(model_tensors(2))
    assert all("can't allocate memory" in answer for answer in answers)
    assert "trainer rank 1" in answers[0]
    for receiving in sync.receiving:
        receiving.join(10)
        assert "trainer rank 1" in receiving.error and "can't allocate memory" in receiving.error


def test_layers_that_are_processed_after_loading_are_routed_too():
    sync = Sync(ranks=2, engines=1, model=Quantized, engine=QuantizedEngine, syncs=2)
    for seed in (1, 2):
        assert sync(quantizable(seed)) == "replay"
