"""What leaves an engine core: a request's tokens together, in order, and nothing late that somebody waits for.

pytest tests/test_joined_outputs.py
"""

import queue
from types import SimpleNamespace

import numpy as np
import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason, UtilityOutput
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists, SamplingMaskLists

from trainer.rollouts.joined_outputs import STEPS, JoinedOutputs


def core_output(request_id: str, *tokens: int, finish_reason=None, **more) -> EngineCoreOutput:
    """What a core says of a request's new tokens. The log-probability of token n is -n, and n + 1 tokens were left."""
    if tokens:
        column, one = np.array(tokens)[:, None], len(tokens) == 1
        logprobs = LogprobsLists(column, -column.astype(np.float32), np.ones(len(tokens), int))
        left = np.concatenate([np.arange(token + 1) for token in tokens])
        mask = SamplingMaskLists(left, None if one else np.cumsum([0, *(token + 1 for token in tokens)]))
        more |= {"new_logprobs": logprobs, "new_sampling_mask": mask}
    return EngineCoreOutput(request_id, list(tokens), finish_reason=finish_reason, **more)


@pytest.fixture
def joining():
    """The queue of a core with requests a and b, and c, whose tokens are decoded."""
    params = {name: SimpleNamespace(detokenize=name == "c") for name in "abc"}
    requests = {name: SimpleNamespace(sampling_params=own) for name, own in params.items()}
    core = SimpleNamespace(output_queue=queue.Queue(), scheduler=SimpleNamespace(requests=requests))
    return JoinedOutputs(core)


def put(joining: JoinedOutputs, version: str | None, *outputs: EngineCoreOutput) -> None:
    joining.put_nowait((0, EngineCoreOutputs(outputs=[*outputs], weight_version=version)))


def sent(joining: JoinedOutputs) -> list[EngineCoreOutputs]:
    """All messages until the core's end."""
    joining.put_nowait(EngineCoreProc.ENGINE_CORE_DEAD)
    return [message for _, message in iter(joining.get, EngineCoreProc.ENGINE_CORE_DEAD)]


def tokens_of(message: EngineCoreOutputs) -> dict[str, list[int]]:
    return {own.request_id: own.new_token_ids for own in message.outputs}


def test_tokens_of_a_request_leave_the_core_together(joining):
    for token in range(STEPS + 1):
        put(joining, "0", core_output("a", token), core_output("b", token, token))
    put(joining, "0", core_output("a", 1, finish_reason=FinishReason.STOP), core_output("b", 2))
    put(joining, "0", core_output("b", finish_reason=FinishReason.LENGTH))
    first, second, third = sent(joining)
    assert tokens_of(first) == {"a": [*range(STEPS)], "b": [token for token in range(STEPS) for _ in range(2)]}
    assert tokens_of(second) == {"a": [STEPS, 1]}
    assert tokens_of(third) == {"b": [STEPS, STEPS, 2]}
    assert [own.finish_reason for own in (*second.outputs, *third.outputs)] == [FinishReason.STOP, FinishReason.LENGTH]
    for own in (*first.outputs, *second.outputs, *third.outputs):
        assert own.new_logprobs.logprob_token_ids[:, 0].tolist() == own.new_token_ids
        assert own.new_logprobs.logprobs[:, 0].tolist() == [-token for token in own.new_token_ids]
        assert len(own.new_logprobs.sampled_token_ranks) == len(own.new_token_ids)
        assert own.new_sampling_mask.to_nested_list() == [[*range(token + 1)] for token in own.new_token_ids]


def test_joined_tokens_have_the_version_that_sampled_them(joining):
    put(joining, "0", core_output("a", 1), core_output("b", 2))
    put(joining, "1", core_output("a", 3), core_output("b", 4, finish_reason=FinishReason.STOP))
    put(joining, "1", core_output("a", 5, finish_reason=FinishReason.STOP))
    messages = [(message.weight_version, tokens_of(message)) for message in sent(joining)]
    assert messages == [("0", {"a": [1], "b": [2]}), ("1", {"b": [4]}), ("1", {"a": [3, 5]})]


def test_what_others_wait_for_leaves_the_core_at_once(joining):
    prefill = core_output("a", 1, prefill_stats=PrefillStats())
    answer = EngineCoreOutputs(utility_output=UtilityOutput(7))
    put(joining, "0", prefill, core_output("b", 2), core_output("c", 3), core_output("gone", 4))
    joining.put_nowait((0, answer))
    put(joining, None, core_output("b", finish_reason=FinishReason.ABORT))
    first, second, third = sent(joining)
    assert tokens_of(first) == {"a": [1], "c": [3], "gone": [4]}
    assert second is answer
    assert (third.weight_version, tokens_of(third)) == ("0", {"b": [2]})
    assert not joining.held
