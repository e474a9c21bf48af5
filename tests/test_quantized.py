"""Syncs of full-precision weights into an engine that torchao quantizes as it loads.

pytest tests/test_quantized.py
"""

import json

import pytest
from conftest import cpu_only
from pair import Pair

from grpo import MismatchError
from tiny_model import build_tiny_model

pytestmark = cpu_only
MAX_MISMATCH = 0.05  # int8 activations and weights, bf16 the rest


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    from torchao.core.config import config_to_dict
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig

    config = json.dumps(config_to_dict(Int8DynamicActivationInt8WeightConfig()))
    pair = Pair(
        build_tiny_model(tmp_path_factory.mktemp("model")),
        dtype="bfloat16",
        max_mismatch=MAX_MISMATCH,
        quantization="torchao",
        hf_overrides={"quantization_config_dict_json": config},
    )
    yield pair
    pair.llm.llm_engine.engine_core.shutdown()


def test_weights_are_quantized_again_at_every_sync(pair):
    from_disk = pair.rpc("digest")
    report = pair.sync()
    assert report.loader.startswith("reload: ")
    assert pair.rpc("digest") == from_disk  # what vLLM's own loading of the checkpoint gives, bit for bit
    pair.set(pair.perturbed(3))
    with pytest.raises(MismatchError):
        pair.mismatch()
    pair.sync()
    assert pair.mismatch() < MAX_MISMATCH
    assert pair.rpc("check_weights_changed") == [True, True]
    whole = pair.rpc("digest")
    assert whole != from_disk
    pair.set(pair.original)
    pair.sync()
    assert pair.rpc("digest") == from_disk

    pair.set(pair.perturbed(3))
    *_, last = pair.sync_one_parameter_at_a_time()
    assert last
    assert pair.rpc("check_weights_changed") == [True, True]
    assert pair.rpc("digest") == whole
