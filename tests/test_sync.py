"""Syncs into a real vLLM engine with two workers: exact, complete, and noticed where they are not.

pytest tests/test_sync.py            all but the next
pytest tests/test_sync.py -m slow    200 syncs leave memory as it was
"""

import time

import pytest
import torch
from conftest import cpu_only
from pair import Pair, assert_adapters_are_exact, assert_memory_is_flat, swap_layers

from rlhf_utils import WeightSyncError, stateless_init_process_group
from trainer.errors import MismatchError
from trainer.tasks.tiny_model import build_tiny_model
from weight_sync import buckets

pytestmark = cpu_only
LAYERS = "model.decoder.layers."
WRONG_REPLAY = "reload (replay did not reproduce it bit for bit)"


@pytest.fixture(scope="module")
def shared_pair(tmp_path_factory):
    with Pair(build_tiny_model(tmp_path_factory.mktemp("model"))) as pair:
        yield pair


@pytest.fixture
def pair(shared_pair):
    """The pair with its original weights on both sides and a healthy group, whose syncs replay."""
    yield shared_pair
    shared_pair.rpc("tamper_with_loads", "heal")
    if shared_pair.sender.closed or shared_pair.sender.loader != "replay":
        shared_pair.connect()
    shared_pair.set(shared_pair.original)
    assert shared_pair.sync().loader == "replay"


def test_weights_count_as_changed_only_after_a_sync(pair):
    # The first test: the engine has loaded these weights from disk, by vLLM's own loader.
    from_disk, tokens = pair.rpc("digest"), pair.generate()
    assert pair.rpc("check_weights_changed") == [False, False]
    report = pair.sync()
    assert (report.version, report.loader) == (1, "replay")
    assert pair.rpc("check_weights_changed") == [True, True]
    assert pair.rpc("digest") == from_disk
    assert pair.generate() == tokens
    for name in ("model.decoder.embed_tokens.weight", LAYERS + "0.fc1.bias", LAYERS + "1.self_attn.qkv_proj.weight"):
        pair.rpc("flip_bit", name)
        assert pair.rpc("check_weights_changed") == [False, False]
        pair.rpc("flip_bit", name)
    assert pair.rpc("check_weights_changed") == [True, True]


def test_perturbed_weights_arrive_and_originals_come_back_bit_for_bit(pair):
    before = pair.generate(), pair.rpc("digest")
    for seed in range(3):
        pair.set(pair.perturbed(seed))
        with pytest.raises(MismatchError):
            pair.mismatch()
        pair.sync()
        assert pair.mismatch() < 1e-5
        assert pair.rpc("digest") != before[1]
    pair.set(pair.original)
    pair.sync()
    assert (pair.generate(), pair.rpc("digest")) == before  # tokens, and log-probabilities to the last bit


def test_swapped_layers_are_seen(pair):
    pair.set(pair.perturbed(7))
    pair.sync()
    before = pair.rpc("digest")
    pair.set(swap_layers(pair.perturbed(7)))
    with pytest.raises(MismatchError):
        pair.mismatch()
    pair.sync()
    assert pair.mismatch() < 1e-5
    assert all(new != old for new, old in zip(pair.rpc("digest"), before, strict=True))


@pytest.mark.parametrize(
    ("part", "named"),
    [
        (LAYERS + "0.", LAYERS + "0."),
        ("q_proj.weight", "self_attn.qkv_proj and 1 more: "),
        ("embed_tokens", "embed_tokens.weight: "),
        ("fc1.bias", "fc1.bias and 1 more: "),
    ],
)
def test_sync_that_skips_something_fails(pair, part, named):
    pair.set(pair.perturbed(7))
    pair.rpc("tamper_with_loads", "skip", part)
    pair.connect()  # the first sync of a session is a reload
    with pytest.raises(WeightSyncError, match=f"did not load all that was sent for .*{named}"):
        pair.sync()
    assert pair.rpc("check_weights_changed") == [False, False]
    if part == LAYERS + "0.":  # whole layers keep their old weights; half a layer would be garbage
        with pytest.raises(MismatchError):
            pair.mismatch()
    pair.rpc("tamper_with_loads", "heal")
    pair.connect()
    pair.sync()
    assert pair.mismatch() < 1e-5


def test_adapters_arrive_merged_by_peft_and_no_other_way(pair):
    assert_adapters_are_exact(pair, syncs=200)


def test_proof_fails_if_the_loader_swaps_layers(pair):
    pair.set(pair.perturbed(7))
    pair.rpc("tamper_with_loads", "swap")
    pair.connect()
    assert pair.sync().loader == WRONG_REPLAY  # of copies that were recorded without that
    with pytest.raises(MismatchError):
        pair.mismatch()


def test_copy_that_was_not_recorded_is_found_and_reloaded(pair):
    pair.set(pair.perturbed(9))
    pair.rpc("forget_copy")
    pair.connect()
    assert pair.sync().loader == WRONG_REPLAY
    assert pair.rpc("check_weights_changed") == [True, True]
    assert pair.mismatch() < 1e-5


@pytest.mark.parametrize("bucket_bytes", [pytest.param(1024, marks=pytest.mark.slow), 66_048, 1 << 20])
def test_buckets_of_any_size(pair, monkeypatch, bucket_bytes):
    monkeypatch.setattr(
        buckets, "STAGING_BYTES", buckets.STAGING_BUFFERS * bucket_bytes
    )  # the largest tensor has 262,144 bytes
    pair.connect()
    pair.set(pair.perturbed(bucket_bytes))
    for _ in range(2):
        pair.sync()
        assert pair.mismatch() < 1e-5
    whole = pair.rpc("digest")
    monkeypatch.undo()
    pair.connect()
    pair.sync()
    assert pair.rpc("digest") == whole


def test_other_dtypes_are_cast_to_the_engines(pair):
    halves = {name: tensor.bfloat16() for name, tensor in pair.perturbed(3).items()}
    report = pair.sync(halves.items())
    pair.set({name: tensor.float() for name, tensor in halves.items()})
    assert pair.mismatch() < 1e-5
    assert report.nbytes == sum(4 * tensor.numel() for tensor in halves.values())


def trainer_with_other_weights(pair) -> list[int]:
    """Give the trainer other weights than the engine has. Returns the digests that the engine should have with them."""
    pair.set(pair.perturbed(5))
    pair.sync()
    expected = pair.rpc("digest")
    pair.set(pair.original)
    pair.sync()
    assert pair.rpc("digest") != expected
    pair.set(pair.perturbed(5))
    return expected


def test_one_parameter_protocol(pair):
    expected, before = trainer_with_other_weights(pair), pair.rpc("digest")
    for name in pair.sync_one_parameter_at_a_time():
        if name == LAYERS + "0.fc1.bias":
            assert pair.rpc("check_weights_changed") == [False, False]
            assert pair.rpc("digest") == before  # until all have come
    assert pair.rpc("check_weights_changed") == [True, True]
    assert pair.rpc("digest") == expected
    pair.llm.reset_prefix_cache()
    assert pair.mismatch() < 1e-5


@pytest.mark.parametrize("last", ["0.final_layer_norm.bias", "1.self_attn.v_proj.weight"])  # of a layer, within one
def test_trainer_that_starts_over_leaves_nothing_half_loaded(pair, last):
    expected = trainer_with_other_weights(pair)
    next(name for name in pair.sync_one_parameter_at_a_time() if name == LAYERS + last)
    served = [pair.rpc("check_weights_changed") for _ in pair.sync_one_parameter_at_a_time()]
    assert served.pop() == [True, True]
    assert all(answers == [False, False] for answers in served)
    assert pair.rpc("digest") == expected


def without(tensors, name):
    return [(other, tensor) for other, tensor in tensors.items() if other != name]


def test_preflight_names_what_does_not_fit(pair):
    before = pair.rpc("digest")
    bias, weight = LAYERS + "0.fc1.bias", LAYERS + "1.self_attn.q_proj.weight"
    cases = [
        ([*pair.original.items(), (LAYERS + "0.fc9.bias", torch.ones(3))], r"layers\.0\.fc9\.bias \[3\]"),
        (
            without(pair.original, bias),
            r"nothing that is sent goes to the engine's model\.decoder\.layers\.0\.fc1\.bias",
        ),
        (without(pair.original, weight), r"the engine's model\.decoder\.layers\.1\.self_attn\.qkv_proj\.weight"),
        ((pair.original | {bias: torch.ones(7)}).items(), r"layers\.0\.fc1\.bias \[7\]: the engine cannot load it"),
        ((pair.original | {weight: torch.ones(128, 64)}).items(), r"q_proj\.weight \[128, 64\]"),
        ((pair.original | {"model.decoder.embed_tokens.weight": torch.ones(258, 1)}).items(), r"embed_tokens\.weight"),
    ]
    for tensors, message in cases:
        with pytest.raises(WeightSyncError, match=message):
            pair.sync(tensors)
        assert pair.rpc("digest") == before
        pair.connect()
    assert pair.generate()


@pytest.mark.parametrize(
    ("how", "part", "error"),
    [
        ("raise", "embed_positions", "ValueError: this worker cannot load"),
        ("raise", "layers.1.final_layer_norm.bias", "ValueError: this worker cannot load"),
        ("exhaust", "layers.0.fc2.weight", "can't allocate memory"),
    ],
)
def test_sync_recovers_from_a_worker_that_failed(pair, monkeypatch, how, part, error):
    monkeypatch.setattr(buckets, "STAGING_BYTES", buckets.STAGING_BUFFERS * 66_048)  # many buckets: some are loaded
    pair.connect()
    pair.set(pair.perturbed(13))
    pair.rpc("tamper_with_loads", how, part)
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=rf"engine worker [01] \(pid (.|\n)*{error}"):
        pair.sync()
    assert time.monotonic() - started < 30
    assert all(error in answer["error"] for answer in pair.answers)
    assert not all(pair.rpc("check_weights_changed"))  # a worker that loaded nothing serves what it did
    with pytest.raises(WeightSyncError, match="session is closed: make a new"):
        pair.sender.send_weights(pair.learner.model.named_tensors().items())
    with pytest.raises(WeightSyncError, match="session is closed: make a new"):
        pair.sender.compare_weights(pair.learner.model.named_tensors().items())
    pair.rpc("tamper_with_loads", "heal")
    pair.connect()
    pair.sync()
    assert pair.mismatch() < 1e-5


def test_prefix_cache_keeps_old_weights_until_it_is_reset(pair):
    prompts = ["The quick brown fox jumps over the lazy dog. " * 4]
    pair.generate(prompts=prompts)
    pair.set(pair.perturbed(11))
    pair.sync(reset_prefix_cache=False)
    with pytest.raises(MismatchError):
        pair.learner.mismatch(pair.generate(prompts=prompts))
    assert pair.llm.reset_prefix_cache()
    assert pair.learner.mismatch(pair.generate(prompts=prompts)) < 1e-5


@pytest.mark.slow
def test_memory_is_flat_over_200_syncs(pair):
    assert_memory_is_flat(pair, syncs=200)


def test_communicator_that_would_do_nothing_is_an_error():
    from vllm.utils.network_utils import get_open_port

    with pytest.raises(WeightSyncError, match="disabled NCCL communicator"):
        stateless_init_process_group("127.0.0.1", get_open_port(), 0, 1, torch.device("cuda:0"))
