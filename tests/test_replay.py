"""Replay on modules that load as vLLM's do, at two ranks: taken where it is exact, refused where a load is more.

pytest tests/test_replay.py
"""

import asyncio
import gc
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import cpu_only
from fakes import (
    HIDDEN,
    MODEL_SHAPES,
    PADDING,
    QUANTIZED,
    RANKS,
    VOCABULARY,
    Model,
    ModelEngine,
    PerRow,
    Quantized,
    QuantizedEngine,
    Receiving,
    Worker,
    groups,
    model_tensors,
    quantizable,
    same_bits,
)
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from rlhf_utils import WeightSender, WeightSyncError
from trainer.rollouts.engine import EngineActor
from weight_sync import buckets, receiver, replay
from weight_sync.buckets import plan_buckets
from weight_sync.engine_model import EngineModel, computes_with_copy, expected_writes, pack_experts_when_loaded

PADDED = VOCABULARY // RANKS + PADDING


def expected(rank, weights):
    model = Model(rank)
    model.load_weights(weights.items())
    return model


class Sync:
    """A trainer and two workers around models of a class."""

    def __init__(self, model=Model, syncs=1):
        trainer, *others = groups(1 + RANKS)
        self.engines = [ModelEngine(model(rank)) for rank in range(RANKS)]
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
                model.process_weights()
            for name, parameter in model.named_parameters():
                assert same_bits(parameter.data, engine.model.get_parameter(name).data), name
            assert engine.unchanged()
        return report.loader


@pytest.mark.parametrize("bucket_bytes", [4096, 1 << 20])
def test_copies_are_replayed_bit_for_bit(monkeypatch, bucket_bytes):
    monkeypatch.setattr(buckets, "STAGING_BYTES", buckets.STAGING_BUFFERS * bucket_bytes)
    sync = Sync(syncs=4)
    assert sync(model_tensors(1)) == "replay"
    loads = [engine.loads for engine in sync.engines]
    for seed in (2, 3, 4):
        source = model_tensors(1)
        for name, tensor in model_tensors(seed).items():
            source[name].copy_(tensor)
        # Other tensors of the same names, dtypes and shapes: what was agreed on still holds.
        assert sync(source) == "replay"
        assert [engine.version for engine in sync.engines] == [seed, seed]
    assert [engine.loads for engine in sync.engines] == loads


def test_same_tensors_with_other_values_load_nothing():
    sync = Sync(syncs=3)
    weights = model_tensors(1)
    assert sync(weights) == "replay"
    loads = [engine.loads for engine in sync.engines]
    for seed in (2, 3):
        for name, tensor in model_tensors(seed).items():
            weights[name].copy_(tensor)
        assert sync(weights) == "replay"
    assert [engine.loads for engine in sync.engines] == loads


def test_tensors_cut_into_rows_are_replayed(monkeypatch):
    monkeypatch.setattr(buckets, "STAGING_BYTES", buckets.STAGING_BUFFERS * 512)  # the embedding has 2,560 bytes
    assert Sync()(model_tensors(1)) == "replay"


class ClearsFirst(Model):
    def load_embed(self, weight):
        self.embed.data.zero_()
        super().load_embed(weight)


def test_tensor_is_not_cleared_between_its_rows(monkeypatch):
    monkeypatch.setattr(buckets, "STAGING_BYTES", buckets.STAGING_BUFFERS * 512)
    assert Sync(ClearsFirst)(model_tensors(1)) == "replay"


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
        (Scales, "reload (norm: its loader computes"),
        (CastsUp, "reload (norm: its loader computes"),
        (Concatenates, "reload (norm: its loader computes"),
        (ScalesInPlace, "reload (norm: its loader computes"),
    ],
)
def test_loader_that_does_more_than_copy_is_refused(model, reason):
    sync = Sync(model, syncs=2)
    weights = model_tensors(1)
    assert sync(weights).startswith(reason)
    assert sync(weights).startswith(reason)


@pytest.fixture
def forgetful(monkeypatch):
    """Replays leave out a copy."""
    record = ModelEngine.record

    def record_less(self, buckets, staging):
        refused = record(self, buckets, staging)
        self.replay_steps[-1][-1].torch_copies.pop()
        return refused

    monkeypatch.setattr(ModelEngine, "record", record_less)


@pytest.mark.usefixtures("forgetful")
def test_replay_that_leaves_out_an_element_is_found_and_repaired():
    sync = Sync(syncs=2)
    weights = model_tensors(1)
    assert sync(weights) == "reload (replay did not reproduce it bit for bit)"
    assert sync(weights) == "reload (replay did not reproduce it bit for bit)"


@pytest.mark.usefixtures("forgetful")
def test_worker_whose_replay_was_wrong_vouches_for_nothing(monkeypatch):
    def dies_before_the_reload(mode):
        if mode == "fallback":
            raise MemoryError("the trainer")
        return transmit(mode)

    sync = Sync()
    transmit = sync.sender._transmit
    monkeypatch.setattr(sync.sender, "_transmit", dies_before_the_reload)
    with pytest.raises(MemoryError):
        sync.sender.send_weights(model_tensors(1).items())
    for receiving in sync.receiving:
        receiving.join(5)
    assert [engine.unchanged() for engine in sync.engines] == [False, False]


class Absorbs(Model):
    """Keeps a tensor that is computed from a weight when that is loaded, as multi-head latent attention does."""

    def process_weights(self):
        self.squared = self.norm.data**2


class AbsorbsIntoBuffer(Model):
    def process_weights(self):
        self.register_buffer("squared", self.norm.data**2)


@pytest.mark.parametrize("model", [Absorbs, AbsorbsIntoBuffer])
def test_replay_that_leaves_computed_tensors_stale_is_refused(model):
    sync = Sync(model, syncs=2)
    for seed in (1, 2):
        assert sync(model_tensors(seed)) == "reload (replay did not reproduce it bit for bit)"
        assert all(engine.model.squared.equal(engine.model.norm.data**2) for engine in sync.engines)


class KeepsCache(Model):
    """With a KV cache, which holds what it likes."""

    def process_weights(self):
        self.kv_cache = torch.rand(3)


def test_cache_is_no_difference_between_replay_and_reload():
    assert Sync(KeepsCache)(model_tensors(1)) == "replay"


class CutsOff(Model):
    def load_norm(self, weight):
        self.norm.data.copy_(weight[:HIDDEN])


def test_tensor_that_would_load_in_part_is_refused():
    wrong, half = torch.ones(3 * HIDDEN), torch.ones(2 * HIDDEN)  # half of a tensor may be this worker's share
    sync = Sync(CutsOff)
    with pytest.raises(WeightSyncError, match=r"norm \[48\]: the engine would load only a part of it"):
        sync(model_tensors(1) | {"norm": wrong})
    assert not ModelEngine(CutsOff(0)).trace([("norm", "float32", tuple(half.shape))])[1]


class ForTheOtherRank(Model):
    def load_norm(self, weight):
        if self.rank:
            self.norm.data.copy_(weight)


def test_tensor_for_other_workers_is_no_problem():
    assert ModelEngine(ForTheOtherRank(0)).trace([("norm", "float32", (HIDDEN,))]) == ({"norm": []}, [])


def test_a_loaders_reason_is_cut_short_between_words():
    class Refuses(Model):
        def load_weights(self, weights):
            raise ValueError("word " * 50)

    (problem,) = ModelEngine(Refuses(0)).trace([("norm", "float32", (HIDDEN,))])[1]
    assert problem.endswith("word word ...)")


class WithBuffer(Model):
    def __init__(self, rank):
        super().__init__(rank)
        del self.norm
        self.register_buffer("norm", torch.zeros(HIDDEN))


def test_tensor_that_is_loaded_into_a_buffer_is_replayed():
    sync = Sync(WithBuffer, syncs=2)
    for seed in (1, 2):
        weights = model_tensors(seed)
        assert sync(weights) == "replay"
        assert all(engine.model.norm.equal(weights["norm"]) for engine in sync.engines)
        assert all(engine.unchanged() for engine in sync.engines)
    for engine in sync.engines:
        engine.model.norm[-1] += 1
        assert not engine.unchanged()


def test_buffer_that_a_sync_brings_first_is_no_difference():
    weights, sync = model_tensors(1), Sync(WithBuffer)
    for engine in sync.engines:
        engine.model.load_weights(weights.items())

    async def collective_rpc(method):
        return [getattr(worker, method)() for worker in sync.workers]

    actor = EngineActor(0)
    actor.llm = SimpleNamespace(collective_rpc=collective_rpc)
    actor.from_disk, actor.slept = asyncio.run(collective_rpc("weight_digests")), True  # as its `start` and `sleep` do
    sync(weights)
    assert asyncio.run(actor.serves_checkpoint())


class BracketedEngine(EngineModel):
    """Loads in vLLM's own reload brackets."""

    def __init__(self, model):
        worker = SimpleNamespace(get_model=lambda: model, device=torch.device("cpu"))
        worker.model_config = SimpleNamespace(dtype=torch.float32)
        worker.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(mode=0))
        worker.parallel_config = SimpleNamespace(tensor_parallel_size=1)
        super().__init__(worker)

    def _context(self):
        return torch.no_grad()


class Padded(torch.nn.Module):
    """A vocabulary whose last rows are padding, which no checkpoint has."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Module()
        self.embed.weight = torch.nn.Parameter(torch.zeros(PADDED, HIDDEN), requires_grad=False)
        self.embed.weight.weight_loader = self.load
        record_metadata_for_reloading(self)

    def load(self, param, weight):
        param[: len(weight)].data.copy_(weight)

    def load_weights(self, weights):
        for name, weight in weights:
            parameter = self.get_parameter(name)
            parameter.weight_loader(parameter, weight)


@pytest.mark.parametrize("left_out", [0, 1])
def test_rows_that_are_padding_are_not_missed_but_others_are(left_out):
    engine, rows = BracketedEngine(Padded()), torch.randn(20, HIDDEN)
    engine.expected = expected_writes(engine.trace([("embed.weight", "float32", (20, HIDDEN))])[0].values())
    batches = [[("embed.weight", rows[left_out:])]]
    if left_out:
        with pytest.raises(WeightSyncError, match=r"did not load all that was sent for embed"):
            engine.reload(batches, engine.expected)
    else:
        engine.reload(batches, engine.expected)
        assert engine.model.embed.weight[:20].equal(rows)


class Doubles(Padded):
    def load(self, param, weight):
        super().load(param, weight)
        param[: len(weight)].data.mul_(2)


def test_elements_that_a_loader_writes_twice_count_once():
    engine, rows = BracketedEngine(Doubles()), torch.randn(20, HIDDEN)
    expected = expected_writes(engine.trace([("embed.weight", "float32", (20, HIDDEN))])[0].values())
    engine.reload([[("embed.weight", rows)]], expected)
    assert engine.model.embed.weight[:20].equal(2 * rows)


class TiedByLoader(Padded):
    def get_parameter(self, name):
        return super().get_parameter(name.replace("head", "embed"))


class TiedByParameter(Padded):
    """As vLLM ties an lm_head. In a reload bracket, the two have parameters of their own."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Module()
        self.head.weight = self.embed.weight
        record_metadata_for_reloading(self)


@pytest.mark.parametrize("tied", [TiedByLoader, TiedByParameter])
def test_tensors_that_only_the_engine_ties_are_refused(tied):
    engine = BracketedEngine(tied())
    metadata = [(name, "float32", (PADDED, HIDDEN)) for name in ("embed.weight", "head.weight")]
    assert engine.preflight(metadata)[1] == ["embed.weight and head.weight: the engine has one weight for them"]
    assert engine.preflight(metadata[:1])[1] == []


class WithScale(Padded):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Module()
        self.layer.register_buffer("scale", torch.ones(HIDDEN))
        record_metadata_for_reloading(self)

    def load_weights(self, weights):
        for name, weight in weights:
            tensor = self.layer.scale if name == "layer.scale" else self.embed.weight
            getattr(tensor, "weight_loader", default_weight_loader)(tensor, weight)


def test_buffer_is_vouched_for_after_a_sync_without_it():
    engine, weights = BracketedEngine(WithScale()), {"embed.weight": torch.ones(PADDED, HIDDEN)}
    for sent in (weights | {"layer.scale": torch.full((HIDDEN,), 2.0)}, weights):
        metadata = [(name, "float32", tuple(tensor.shape)) for name, tensor in sent.items()]
        engine.reload([list(sent.items())], expected_writes(engine.trace(metadata)[0].values()))
        engine.digest = engine.weights_digest()
    assert engine.model.layer.scale.tolist() == [2.0] * HIDDEN
    assert engine.unchanged()
    engine.model.layer.scale[3] = 1
    assert not engine.unchanged()


class WithHead(Padded):
    def __init__(self, tied):
        super().__init__()
        self.head = torch.nn.Linear(HIDDEN, PADDED, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        record_metadata_for_reloading(self)

    def load_weights(self, weights):
        for name, weight in weights:
            parameter = self.get_parameter(name)
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, weight)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("next_one", ["preflight", "reload"])
def test_load_that_broke_off_leaves_no_bracket_open(tied, next_one):
    def weights(seed):
        generator = torch.Generator().manual_seed(seed)
        names = ["embed.weight"] if tied else ["embed.weight", "head.weight"]
        return {name: torch.randn(PADDED, HIDDEN, generator=generator) for name in names}

    def batches():
        yield [("embed.weight", weights(1)["embed.weight"])]
        raise MemoryError("the trainer")

    engine = BracketedEngine(WithHead(tied))
    served, metadata = dict(engine.model.named_parameters()), [(n, "float32", (PADDED, HIDDEN)) for n in weights(1)]
    assert engine.preflight(metadata)[1] == []
    engine.digest = engine.weights_digest()
    with pytest.raises(MemoryError):
        engine.reload(batches(), engine.expected)
    assert not engine.unchanged()
    if next_one == "preflight":
        assert engine.preflight(metadata)[1] == []
    sent = weights(2)
    engine.reload([list(sent.items())], engine.expected)
    assert engine.model.embed.weight.equal(sent["embed.weight"])
    assert engine.model.head.weight.equal(sent["embed.weight" if tied else "head.weight"])
    assert all(engine.model.get_parameter(name) is parameter for name, parameter in served.items())


class RegistersAnew(Padded):
    """As vLLM's Transformers backend does with the `lm_head.bias` of Phi, here in a layer with a weight or alone."""

    def __init__(self, layer="embed"):
        super().__init__()
        self.layer = layer

    def load_weights(self, weights):
        for name, weight in weights:
            if name == "bias":
                layer = self.get_submodule(self.layer)
                layer.bias = torch.nn.Parameter(torch.empty(len(weight)), requires_grad=False)
                layer.bias.data.copy_(weight)
            else:
                super().load_weights([(name, weight)])


@pytest.mark.parametrize("layer", ["embed", ""])
def test_parameter_that_its_loader_registers_anew_is_served_where_it_was(layer):
    def weights():
        return {"embed.weight": torch.randn(PADDED, HIDDEN), "bias": torch.randn(PADDED)}

    trainer, worker = groups(2)
    engine = BracketedEngine(RegistersAnew(layer))
    engine.model.load_weights(weights().items())
    served = dict(engine.model.named_parameters())
    receiving, sender = Receiving(Worker(engine, worker), syncs=4), WeightSender(trainer)
    for sync in range(4):
        if sync == 2:  # the first two syncs replay, the last two reload
            sender.weights, sender.replay = None, False
        sent = weights()
        loader = sender.send_weights(sent.items()).loader
        assert loader.startswith("replay" if sync < 2 else "reload")
        assert engine.unchanged()
        for name, parameter in served.items():
            assert engine.model.get_parameter(name) is parameter
            assert parameter.equal(sent["bias" if name.endswith("bias") else name]), (sync, name)
    receiving.join(10)
    assert receiving.error is None


def test_parameter_that_the_engine_has_not_and_its_loader_registers_is_refused():
    engine = BracketedEngine(RegistersAnew())  # as with dummy weights, which come without a load
    before = dict(engine.model.named_parameters())
    metadata = [("embed.weight", "float32", (PADDED, HIDDEN)), ("bias", "float32", (PADDED,))]
    dtypes, problems = engine.preflight(metadata)
    assert dtypes == ["float32", None]  # the trainer refuses to send what no worker loads
    assert problems == []
    assert dict(engine.model.named_parameters()) == before


def test_tensor_its_loader_leaves_out_is_an_error_alone_too(monkeypatch):
    engine = BracketedEngine(WithHead(tied=False))
    load = engine.model.load_weights
    tampered = lambda weights: load([(name, w) for name, w in weights if w.is_meta or name != "head.weight"])  # noqa: E731
    monkeypatch.setattr(engine.model, "load_weights", tampered)
    with pytest.raises(WeightSyncError, match=r"vLLM's loader did not load all that was sent for head\.weight"):
        for name in ("embed.weight", "head.weight"):
            engine.collect([(name, torch.ones(PADDED, HIDDEN))])
            engine.load_if_complete()
    assert not engine.unchanged()


def test_recording_that_fails_leaves_the_sync_with_reload(monkeypatch):
    def fails(*_):
        raise MemoryError("no room for scratch")

    monkeypatch.setattr(replay, "BatchedCopy", fails)
    assert Sync()(model_tensors(1)) == "reload (MemoryError: no room for scratch)"


class Notes(PerRow):
    def process_weights_after_loading(self, layer):
        super().process_weights_after_loading(layer)
        layer.largest = layer.scale.max()


class InPlace(PerRow):
    """Writes the scales of a layer that has some where they are."""

    def process_weights_after_loading(self, layer):
        before = getattr(layer, "scale", None)
        super().process_weights_after_loading(layer)
        if before is not None:
            layer.scale = torch.nn.Parameter(before.data.copy_(layer.scale), requires_grad=False)


class Experts:
    """A method of vLLM's for a layer of experts on a CPU, of an engine that has started."""

    def __init__(self):
        self.done = []
        pack = lambda layer: self.done.append(("pack", layer))  # noqa: E731
        experts = SimpleNamespace(isa="amx", process_weights_after_loading=pack)
        self.moe_kernel = SimpleNamespace(fused_experts=experts)

    def process_weights_after_loading(self, layer):
        self.done.append(("process", layer))


def test_experts_are_packed_after_each_load():
    layer = torch.nn.Module()
    layer.quant_method = Experts()
    for _ in range(2):  # of two trainers
        pack_experts_when_loaded(torch.nn.ModuleList([layer]))
    for _ in range(2):
        layer.quant_method.process_weights_after_loading(layer)
    assert layer.quant_method.done == [("process", layer), ("pack", layer)] * 2


@cpu_only
@pytest.mark.parametrize("packs", [True, False])
def test_layers_that_compute_with_a_copy_are_known(monkeypatch, packs):
    from vllm import _custom_ops
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    monkeypatch.setattr(_custom_ops, "_supports_onednn", packs)
    layer = torch.nn.Linear(HIDDEN, HIDDEN)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    layer.weight.data.zero_()
    assert computes_with_copy(layer) == layer.cpu_linear(torch.eye(HIDDEN), layer.weight, None).any() == packs


@pytest.mark.parametrize(("version", "rank", "warnings"), [("0.33.1", 0, 0), ("0.34.0", 0, 1), ("0.34.0", 1, 0)])
def test_one_worker_warns_of_an_unproven_vllm(monkeypatch, caplog, version, rank, warnings):
    monkeypatch.setattr("vllm.__version__", version)
    EngineModel(SimpleNamespace(rank=rank, get_model=lambda: Model(0)))
    assert len(caplog.messages) == warnings
    assert all(f"not with {version}: in its repository, run `make test" in message for message in caplog.messages)


class Reshapes(PerRow):
    """Gives a layer that has scales others of another shape."""

    def process_weights_after_loading(self, layer):
        repeated = hasattr(layer, "scale")
        super().process_weights_after_loading(layer)
        if repeated:
            layer.scale = torch.nn.Parameter(layer.scale[:, 0], requires_grad=False)


def quantized_sync(monkeypatch, method=PerRow):
    monkeypatch.setattr(sys.modules[__name__], "ModelEngine", QuantizedEngine)
    return Sync(lambda rank: Quantized(rank, method), syncs=3)


@pytest.mark.parametrize("bucket_bytes", [512, 1 << 20])
def test_quantization_is_repeated_bit_for_bit(monkeypatch, bucket_bytes):
    monkeypatch.setattr(buckets, "STAGING_BYTES", buckets.STAGING_BUFFERS * bucket_bytes)
    sync = quantized_sync(monkeypatch)
    for seed in (1, 2, 3):
        assert sync(quantizable(seed)) == "replay"
    assert [engine.version for engine in sync.engines] == [3, 3]
    # `o` and `fc` have one shape, and one after the other the same scratch memory.
    steps = [step for bucket in sync.engines[0].replay_steps for step in bucket]
    layers = [step for step in steps if isinstance(step, replay.ProcessedLayer)]
    assert len(layers) == 3
    assert layers[1].scratch["weight"] is layers[2].scratch["weight"]


def test_trial_of_in_place_processing_leaves_served_scales_alone(monkeypatch):
    assert quantized_sync(monkeypatch, InPlace)(quantizable(1)) == "replay"


class Once(PerRow):
    """Leaves a layer alone that it has processed, by vLLM's flag."""

    def process_weights_after_loading(self, layer):
        if not getattr(layer, replay.PROCESSED, False):
            super().process_weights_after_loading(layer)
            setattr(layer, replay.PROCESSED, True)


def test_processing_is_repeated_though_the_layer_calls_it_done(monkeypatch):
    sync = quantized_sync(monkeypatch, Once)
    for engine in sync.engines:
        for name in QUANTIZED:
            setattr(getattr(engine.model, name), replay.PROCESSED, True)
    for seed in (1, 2):
        assert sync(quantizable(seed)) == "replay"


def test_stale_scales_are_found(monkeypatch):
    run = replay.ProcessedLayer.run

    def forgets(layer, total):
        scale = layer.module.scale.clone()
        run(layer, total)
        layer.module.scale.data.copy_(scale)

    monkeypatch.setattr(replay.ProcessedLayer, "run", forgets)
    assert quantized_sync(monkeypatch)(quantizable(1)) == "reload (replay did not reproduce it bit for bit)"


@pytest.mark.parametrize("method", [Notes, Reshapes])
def test_layer_that_keeps_more_than_parameters_is_refused(monkeypatch, method):
    loader = quantized_sync(monkeypatch, method)(quantizable(1))
    assert loader == "reload (vLLM packs qk.weight on a CPU, so replay is off)"


@pytest.mark.parametrize("enabled", [False, True])
def test_garbage_collection_is_off_during_a_capture_alone(monkeypatch, enabled):
    during = []
    monkeypatch.setattr(replay, "load_kernel", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(replay, "_Graph", lambda *_: during.append(gc.isenabled()))
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        replay.capture([[object()]], torch.zeros(1))
        assert (during, gc.isenabled()) == ([False], enabled)
    finally:
        (gc.enable if before else gc.disable)()


def test_reload_hands_over_one_bucket_at_a_time(monkeypatch):
    """Also of one bucket that holds everything, as where the worker reads the trainer's own memory."""
    monkeypatch.setattr(buckets, "STAGING_BYTES", buckets.STAGING_BUFFERS * 1024)
    metadata = [(n, "float32", shape, [0, torch.Size(shape).numel()]) for n, shape in MODEL_SHAPES.items()]
    planned = plan_buckets(metadata, 1 << 20)
    assert len(planned) == 1
    batches = receiver._batches(planned, lambda piece: torch.zeros(piece.count, dtype=piece.dtype), range(1))
    loaded = [sum(weight.nbytes for _, weight in batch) for batch in batches]
    largest = max(torch.Size(shape).numel() * 4 for shape in MODEL_SHAPES.values())
    assert sum(loaded) == sum(torch.Size(shape).numel() * 4 for shape in MODEL_SHAPES.values())
    assert max(loaded) <= 1024 + largest


def test_changed_set_of_parameters_is_recorded_anew():
    sync = Sync(syncs=2)
    weights = model_tensors(1)
    assert sync(weights) == "replay"
    weights["norm"] = torch.ones(HIDDEN)
    assert sync(weights) == "replay"


def test_plan_is_dropped_after_a_failure(monkeypatch):
    sync = Sync(syncs=2)
    weights = model_tensors(1)
    assert sync(weights) == "replay"

    def fails(total):
        raise ValueError("no memory")

    monkeypatch.setattr(sync.engines[1].replay_steps[-1][-1], "run", fails)
    with pytest.raises(WeightSyncError, match="ValueError: no memory"):
        sync.sender.send_weights(weights.items())
    for thread in sync.receiving:
        thread.join(10)
    assert not sync.engines[1].unchanged()
    trainer, *others = groups(1 + RANKS)
    for worker, other in zip(sync.workers, others, strict=True):
        worker.close_weight_update_group()
        assert worker.weight_model.replay_steps is None
        worker.model_update_group = other
    loads = [engine.loads for engine in sync.engines]
    sync.receiving = [Receiving(worker) for worker in sync.workers]
    sync.sender = WeightSender(trainer)
    assert sync(weights) == "replay"
    assert all(engine.loads > before for engine, before in zip(sync.engines, loads, strict=True))
