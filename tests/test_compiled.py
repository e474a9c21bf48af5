"""Syncs into an engine that vLLM has compiled: it computes with what was sent, as an eager one does.

pytest -m slow tests/test_compiled.py
"""

from types import SimpleNamespace

import pytest
import torch
from conftest import cpu_only
from pair import MAX_MISMATCH, Pair, swap_layers
from test_quantized import compare

import rlhf_online_quant
from recipe.errors import MismatchError
from recipe.rollouts.quantization import quantize_by_torchao
from recipe.tasks.tiny_model import build_tiny_model
from rlhf_utils import WeightSyncError
from weight_sync.engine_model import folds_weights


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
            return
        pair.rpc("freeze", True)
        pair.connect()
        with pytest.raises(WeightSyncError, match="compiled with its weights as constants"):
            pair.sync()
        pair.rpc("freeze", False)
        pair.connect()
        pair.sync()


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


@pytest.mark.parametrize(
    ("mode", "device", "options", "folded"),
    [
        (0, "cpu", {"max_autotune": True}, False),  # eager, with or without graphs
        (2, "cpu", {}, False),
        (2, "cpu", {"max_autotune": True}, True),
        (3, "cuda", {"max_autotune": True}, False),
        (3, "cuda", {"freezing": True}, True),
    ],
)
def test_engine_that_keeps_its_weights_as_constants_is_told_from_others(mode, device, options, folded):
    config = SimpleNamespace(mode=mode, inductor_compile_config=options)
    worker = SimpleNamespace(device=torch.device(device), vllm_config=SimpleNamespace(compilation_config=config))
    assert folds_weights(worker) == folded
