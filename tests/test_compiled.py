"""Syncs into an engine that vLLM has compiled: it computes with what was sent, as an eager one does.

pytest -m long tests/test_compiled.py
"""

import pytest
from conftest import cpu_only
from pair import MAX_MISMATCH, Pair, swap_layers
from test_quantized import compare

import rlhf_online_quant
from recipe.errors import MismatchError
from recipe.rollouts.quantization import quantize_by_torchao
from recipe.tasks.tiny_model import build_tiny_model


@cpu_only
@pytest.mark.long
@pytest.mark.parametrize("quantized", [False, True])
def test_compiled_engine_computes_with_what_was_sent(tmp_path, quantized):
    options, bound = {}, MAX_MISMATCH
    if quantized:
        options, bound = quantize_by_torchao(None)[0], rlhf_online_quant.MAX_MISMATCH["cpu"]
        options |= {"dtype": "bfloat16"}
    with Pair(build_tiny_model(tmp_path), 1, max_mismatch=bound, enforce_eager=False, **options) as pair:
        config = pair.llm.llm_engine.vllm_config.compilation_config
        assert (config.mode.name, config.backend) == ("DYNAMO_TRACE_ONCE", "inductor")
        pair.sync()
        tokens = pair.generate()
        assert_syncs_are_exact(pair)
        pair.llm.reset_prefix_cache()
        assert pair.generate() == tokens  # and their log-probabilities, to the last bit
        if quantized:
            compare(pair)
            pair.set(pair.perturbed(3))
            pair.sync()
            assert compare(pair) == (8, 8)  # fused and split linear layers


def assert_syncs_are_exact(pair) -> None:
    """Other weights arrive, layers that were swapped are seen, and the original ones come back bit for bit."""
    from_disk = pair.rpc("digest")
    pair.sync()
    assert pair.rpc("digest") == from_disk
    for tensors in (pair.perturbed(1), pair.perturbed(2), swap_layers(pair.perturbed(2))):
        pair.set(tensors)
        with pytest.raises(MismatchError):
            pair.mismatch()
        pair.sync()
        pair.mismatch()
        assert all(pair.rpc("check_weights_changed"))
        assert not set(pair.rpc("digest")) & set(from_disk)
    pair.set(pair.original)
    pair.sync()
    assert pair.rpc("digest") == from_disk
