"""What only GPUs can show: the run over NCCL, replay, the digest's kernel, memory. Skips where they are too few.

make test-gpu    (REQUIRE_GPU=1 makes a skip a failure)
"""

import json

import pytest
import torch
from pair import Pair, assert_memory_is_flat

from copies import digest
from tiny_model import build_tiny_model


@pytest.mark.gpu(3)
@pytest.mark.parametrize("name", ["rlhf.py"])
def test_run_learns_and_proves_every_sync(script, tmp_path, name):
    model = build_tiny_model(tmp_path / "model")
    text = script(name, "--model", model, "--learning-rate", "3e-3", "--output", "run").finish(480)
    assert text.splitlines()[-1].startswith("OK: reward "), text
    assert "from now on by replay" in text, text
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 30
    assert rows[0]["reward/mean"] < 0.25
    assert rows[-1]["reward/mean"] > 0.75
    assert max(row["logprobs/mismatch"] for row in rows) < 0.02


@pytest.fixture(scope="module")
def shared_pair(tmp_path_factory):
    with Pair(build_tiny_model(tmp_path_factory.mktemp("model")), enable_sleep_mode=True) as pair:
        yield pair


@pytest.fixture
def pair(shared_pair):
    """The pair after a sync of its original weights, with the digests that the engine had from disk."""
    shared_pair.set(shared_pair.original)
    assert shared_pair.sync().loader == "replay"
    return shared_pair


def assert_replayed(pair: Pair, seed: int) -> None:
    """Other values arrive by replay, and are what a reload would have left."""
    pair.set(pair.perturbed(seed))
    assert pair.sync().loader == "replay"
    pair.mismatch()
    assert all(pair.rpc("check_weights_changed"))


@pytest.mark.gpu(3)
def test_replay_survives_other_values(pair):
    original = pair.rpc("digest")
    for seed in range(3):
        assert_replayed(pair, seed)
        assert not set(pair.rpc("digest")) & set(original)
    pair.set(pair.original)
    pair.sync()
    assert pair.rpc("digest") == original


@pytest.mark.gpu(3)
@pytest.mark.parametrize("level", [1, 2])
def test_replay_survives_sleep(pair, level):
    original = pair.rpc("digest")
    pair.llm.sleep(level=level)
    pair.llm.wake_up(tags=["weights"])
    if level == 1:  # the weights went to host memory and came back; on level 2 they are lost
        assert pair.rpc("digest") == original
    assert pair.sync(reset_prefix_cache=False).loader == "replay"
    assert pair.rpc("digest") == original
    pair.llm.wake_up(tags=["kv_cache"])
    assert_replayed(pair, seed=level)


@pytest.mark.gpu(3)
def test_replay_is_recorded_anew_for_other_tensors(pair):
    original = pair.rpc("digest")
    halves = {name: tensor.bfloat16() for name, tensor in pair.learner.named_tensors().items()}
    assert pair.sync(reversed(halves.items())).loader == "replay"
    assert pair.rpc("digest") == original  # bf16 is what the engine keeps
    assert_replayed(pair, seed=5)


@pytest.mark.gpu(3)
def test_memory_is_flat_over_200_syncs(pair):
    assert_memory_is_flat(pair, syncs=200)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
def test_digest_on_the_gpu_is_the_one_on_cpu(dtype):
    tensors = [torch.randint(0, 100, shape).to(dtype) for shape in [(5000,), (300, 7), (3,), (), (1 << 21,)]]
    assert digest([tensor.cuda() for tensor in tensors]) == digest(tensors)
