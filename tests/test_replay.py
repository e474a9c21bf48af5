"""Replay on modules that load as vLLM's do, at two ranks: taken where it is exact, refused where a load is more.

pytest tests/test_replay.py
"""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from test_transport import Receiving, Worker, groups, same_bits

import rlhf_utils
from rlhf_utils import WeightSender, WeightSyncError, _EngineModel

HIDDEN, VOCABULARY, RANKS = 16, 40, 2
SHAPES = {
    "embed": (VOCABULARY, HIDDEN),
    "q": (HIDDEN, HIDDEN),
    "k": (HIDDEN // 2, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "fc": (HIDDEN, 4 * HIDDEN),
    "bias": (4 * HIDDEN,),
    "norm": (HIDDEN,),
}
PADDED = 24  # rows of each rank's share of the vocabulary, 20 of them used


class Model(torch.nn.Module):
    """One rank's shards: rows, fused rows, columns, a transposed weight, and a padded vocabulary."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        shapes = {
            "embed": (PADDED, HIDDEN),
            "qk": (HIDDEN // RANKS + HIDDEN // 2 // RANKS, HIDDEN),
            "o": (HIDDEN, HIDDEN // RANKS),
            "fc": (4 * HIDDEN // RANKS, HIDDEN),
            "bias": (4 * HIDDEN // RANKS,),
            "norm": (HIDDEN,),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape), requires_grad=False))

    def share(self, weight, dim):
        size = weight.size(dim) // RANKS
        return weight.narrow(dim, self.rank * size, size)

    def load_weights(self, weights):
        for name, weight in weights:
            getattr(self, f"load_{name}")(weight)

    def load_embed(self, weight):
        share = self.share(weight, 0)
        self.embed[: len(share)].data.copy_(share)
        self.embed[len(share) :].data.fill_(0)

    def load_q(self, weight):
        self.qk.data.narrow(0, 0, HIDDEN // RANKS).copy_(self.share(weight, 0))

    def load_k(self, weight):
        self.qk.data.narrow(0, HIDDEN // RANKS, HIDDEN // 2 // RANKS).copy_(self.share(weight, 0))

    def load_o(self, weight):
        self.o.data.copy_(self.share(weight, 1))

    def load_fc(self, weight):
        self.fc.data.copy_(self.share(weight.t(), 0))

    def load_bias(self, weight):
        self.bias.data.copy_(self.share(weight, 0))

    def load_norm(self, weight):
        self.norm.data.copy_(weight)


class Engine(_EngineModel):
    """The real preflight, record, replay and digest, over such a model instead of vLLM's."""

    def __init__(self, model):
        super().__init__(
            SimpleNamespace(
                model_runner=SimpleNamespace(get_model=lambda: model),
                model_config=SimpleNamespace(dtype=torch.float32),
                parallel_config=SimpleNamespace(tensor_parallel_size=RANKS),
            )
        )
        self.loads = 0
        self.required = {name: parameter.numel() for name, parameter in model.named_parameters()}

    def load(self, weights):
        self.loads += 1
        self.model.load_weights(weights)

    def finish(self, complete=False):
        pass

    def _loadable_parameters(self):
        return nullcontext(dict(self.model.named_parameters()))


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def expected(rank, weights):
    model = Model(rank)
    model.load_weights(weights.items())
    return model


class Sync:
    """A trainer and two workers around models of a class."""

    def __init__(self, model=Model, syncs=1):
        trainer, *others = groups(1 + RANKS)
        self.engines = [Engine(model(rank)) for rank in range(RANKS)]
        self.workers = [Worker(engine, other) for engine, other in zip(self.engines, others, strict=True)]
        self.receiving = [Receiving(worker, syncs) for worker in self.workers]
        self.sender = WeightSender(trainer)

    def __call__(self, weights):
        """Sync, check every worker's every bit, and return how the tensors were loaded."""
        report = self.sender.send_weights(weights.items())
        for engine in self.engines:
            with torch.no_grad():
                model = type(engine.model)(engine.model.rank)
                model.load_weights(weights.items())
            for name, parameter in model.named_parameters():
                assert same_bits(parameter.data, engine.model.get_parameter(name).data), name
            assert engine.unchanged()
        return report.loader


@pytest.mark.parametrize("bucket_bytes", [4096, 1 << 20])
def test_copies_are_replayed_bit_for_bit(monkeypatch, bucket_bytes):
    monkeypatch.setattr(rlhf_utils, "STAGING_BYTES", rlhf_utils.LANES * bucket_bytes)
    sync = Sync(syncs=4)
    assert sync(tensors(1)) == "replay"
    loads = [engine.loads for engine in sync.engines]
    for seed in (2, 3, 4):
        source = tensors(1)
        for name, tensor in tensors(seed).items():
            source[name].copy_(tensor)
        # Other tensors of the same names, dtypes and shapes: what was agreed on still holds.
        assert sync(source) == "replay"
        assert [engine.version for engine in sync.engines] == [seed, seed]
    assert [engine.loads for engine in sync.engines] == loads


def test_same_tensors_with_other_values_load_nothing():
    sync = Sync(syncs=3)
    weights = tensors(1)
    assert sync(weights) == "replay"
    loads = [engine.loads for engine in sync.engines]
    for seed in (2, 3):
        for name, tensor in tensors(seed).items():
            weights[name].copy_(tensor)
        assert sync(weights) == "replay"
    assert [engine.loads for engine in sync.engines] == loads


class WithoutTransposed(Model):
    def __init__(self, rank):
        super().__init__(rank)
        del self.fc


def test_tensors_cut_into_rows_are_replayed(monkeypatch):
    monkeypatch.setattr(rlhf_utils, "STAGING_BYTES", rlhf_utils.LANES * 512)  # the embedding has 2,560 bytes
    sync = Sync(WithoutTransposed)
    weights = tensors(1)
    del weights["fc"]
    assert sync(weights) == "replay"


def test_transposed_tensor_that_is_cut_stays_with_reload(monkeypatch):
    monkeypatch.setattr(rlhf_utils, "STAGING_BYTES", rlhf_utils.LANES * 512)
    assert "fc: it is larger than a bucket, and not copied by rows" in Sync()(tensors(1))


class Scales(Model):
    def load_norm(self, weight):
        self.norm.data.copy_(weight * 2)


class CastsUp(Model):
    def load_norm(self, weight):
        self.norm.data.copy_(weight.double())


class Concatenates(Model):
    def load_norm(self, weight):
        self.norm.data.copy_(torch.cat([weight[8:], weight[:8]]))


class ScalesInPlace(Model):
    def load_norm(self, weight):
        self.norm.data.copy_(weight)
        self.norm.data.mul_(2)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Scales, "reload: norm: its loader computes"),
        (CastsUp, "reload: norm: its loader computes"),
        (Concatenates, "reload: norm: its loader computes"),
        (ScalesInPlace, "reload: norm: its loader computes"),
    ],
)
def test_loader_that_does_more_than_copy_is_refused(model, reason):
    sync = Sync(model, syncs=2)
    weights = tensors(1)
    assert sync(weights).startswith(reason)
    assert sync(weights).startswith(reason)


def test_replay_that_leaves_out_an_element_is_found_and_repaired(monkeypatch):
    record = Engine.record

    def forgetful(self, buckets, lanes):
        refused = record(self, buckets, lanes)
        self.moves[-1].plain.pop()
        return refused

    monkeypatch.setattr(Engine, "record", forgetful)
    sync = Sync(syncs=2)
    weights = tensors(1)
    assert sync(weights) == "reload: replay did not reproduce it bit for bit"
    assert sync(weights) == "reload: replay did not reproduce it bit for bit"


def test_changed_set_of_parameters_is_recorded_anew():
    sync = Sync(syncs=2)
    weights = tensors(1)
    assert sync(weights) == "replay"
    weights["norm"] = torch.ones(HIDDEN)
    assert sync(weights) == "replay"


def test_plan_is_dropped_after_a_failure(monkeypatch):
    sync = Sync(syncs=2)
    weights = tensors(1)
    assert sync(weights) == "replay"

    def fails(total):
        raise ValueError("no memory")

    monkeypatch.setattr(sync.engines[1].moves[-1], "run", fails)
    with pytest.raises(WeightSyncError, match="ValueError: no memory"):
        sync.sender.send_weights(weights.items())
    for thread in sync.receiving:
        thread.join(10)
    assert not sync.engines[1].unchanged()
    trainer, *others = groups(1 + RANKS)
    for worker, other in zip(sync.workers, others, strict=True):
        worker.close_weight_update_group()
        worker.model_update_group = other
    loads = [engine.loads for engine in sync.engines]
    sync.receiving = [Receiving(worker) for worker in sync.workers]
    sync.sender = WeightSender(trainer)
    assert sync(weights) == "replay"
    assert all(engine.loads > before for engine, before in zip(sync.engines, loads, strict=True))
