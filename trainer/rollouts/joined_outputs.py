"""A request's tokens leave vLLM's engine core several at a time.

vLLM sends each token on its own. That takes the process that receives them 27 us (18 to decode three arrays of one
element), and 4 us if 32 come together (measured on a CPU). An engine of a small model can sample more tokens than
that process takes: what was sent before a sync would keep the sync waiting.
"""

from collections import deque
from itertools import chain

import numpy as np
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.outputs import LogprobsLists, SamplingMaskLists

STEPS = 32  # of the engine. More would change little, and be late at the end of a rollout


class JoinedOutputs:
    """The output queue of an engine core, for the thread that sends what it gets.

    A request's tokens of up to `STEPS` steps and one version of the weights are joined. They wait in `held` until
    there are so many, the request ends, or another version's come. Where vLLM decodes tokens as they come, to find
    stop strings, they do not wait.
    """

    def __init__(self, core: EngineCoreProc):
        self.core, self.queue, self.put_nowait = core, core.output_queue, core.output_queue.put_nowait
        self.held: dict[str, list[EngineCoreOutput]] = {}
        self.version: str | None = None
        self.ready = deque()

    def get(self) -> tuple[int, EngineCoreOutputs] | bytes:
        while not self.ready:
            item = self.queue.get()
            if isinstance(item, bytes) or not item[1].outputs:
                self.ready.append(item)
            else:
                self._join(*item)
        return self.ready.popleft()

    def _join(self, client: int, message: EngineCoreOutputs) -> None:
        if message.weight_version not in (None, self.version):
            if self.held:
                outputs = [joined(parts) for parts in self.held.values()]
                self.ready.append((client, EngineCoreOutputs(outputs=outputs, weight_version=self.version)))
                self.held = {}
            self.version = message.weight_version
        outputs = []
        for output in message.outputs:
            parts = self.held.setdefault(output.request_id, [])
            parts.append(output)
            if len(parts) == STEPS or not self._can_wait(output):
                outputs.append(joined(self.held.pop(output.request_id)))
        message.outputs, message.weight_version = outputs, self.version  # an abort's has none
        if outputs or message.scheduler_stats:
            self.ready.append((client, message))

    def _can_wait(self, output: EngineCoreOutput) -> bool:
        request = self.core.scheduler.requests.get(output.request_id)
        if output.finished or output.prefill_stats or not request:
            return False
        return request.sampling_params is not None and not request.sampling_params.detokenize


def joined(parts: list[EngineCoreOutput]) -> EngineCoreOutput:
    """The last of these outputs of a request, with the tokens of all."""
    last = parts[-1]
    if len(parts) > 1:
        last.new_token_ids = [token for part in parts for token in part.new_token_ids]
        if logprobs := [part.new_logprobs[:3] for part in parts if part.new_logprobs]:
            last.new_logprobs = LogprobsLists(*map(np.concatenate, zip(*logprobs, strict=True)))
        if masks := [part.new_sampling_mask for part in parts if part.new_sampling_mask]:
            counts = [[len(mask.token_ids)] if mask.offsets is None else np.diff(mask.offsets) for mask in masks]
            offsets = np.cumsum([0, *chain(*counts)])
            last.new_sampling_mask = SamplingMaskLists(np.concatenate([mask.token_ids for mask in masks]), offsets)
    return last


def join_outputs() -> None:
    """Have an engine core in this process join its outputs."""
    send = EngineCoreProc.process_output_sockets

    def send_joined(core: EngineCoreProc, *args) -> None:
        core.output_queue = JoinedOutputs(core)
        send(core, *args)

    EngineCoreProc.process_output_sockets = send_joined
