"""Syncs into an engine that vLLM has compiled: it computes with what was sent, as an eager one does.

pytest -m slow tests/test_compiled.py
"""

import pytest
from conftest import cpu_only
from pair import MAX_MISMATCH, Pair, assert_syncs_are_exact, compare

from trainer.rollouts.quantization import quantize_by_torchao
from trainer.tasks.tiny_model import build_tiny_model
from trainer.topologies.link import MAX_QUANTIZED_MISMATCH


@cpu_only
@pytest.mark.parametrize(
    "quantized", [pytest.param(False, marks=pytest.mark.long), pytest.param(True, marks=pytest.mark.slow)]
)
def test_compiled_engine_computes_with_what_was_sent(tmp_path, quantized):
    options, bound = {}, MAX_MISMATCH
    if quantized:
        options, bound = quantize_by_torchao()[0], MAX_QUANTIZED_MISMATCH
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
            pair.set(pair.perturbed(3))
            pair.sync()
            assert compare(pair) == 8  # fused and split linear layers
