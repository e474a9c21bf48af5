"""The conversation of one completion: the policy's turns, and what tools answer, token in and token out.

A turn's prompt is what was sampled before, id for id, and behind it the ids of the tools' answers. What was sampled is
never made from its text again: another tokenization of that is not what the policy sampled, and learns from.
"""

import asyncio
import json
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from ..errors import TaskError
from ..learning.rollout import Rollout
from ..tasks.dataset import Row
from ..tasks.environment import Environment, event_loop
from ..tasks.rewards import Group
from ..tasks.tools import Tools


@dataclass
class Turn:
    """What an engine is to continue, in at most `max_tokens`: turn `index` of the completion with this number in the
    step."""

    prompt_ids: list[int]
    number: int
    index: int
    max_tokens: int


class Conversation:
    """A completion of this row's prompt, of `max_tokens` with the answers of its tools. Its `number` is of the step.

    After `start`, as long as it `goes_on`, an engine continues `turn`, and `take` calls the tools.
    """

    def __init__(self, tools: Tools, row: Row, number: int, max_tokens: int, evaluation: bool):
        self.tools, self.row, self.number, self.evaluation = tools, row, number, evaluation
        self.max_tokens, self.limit = max_tokens, tools.args.max_tool_iterations
        self.prompt, self.prompt_ids, self.schemas = row.prompt, row.prompt_ids, tools.schemas_of(row)
        self.messages: list[dict] = []
        self.ids: list[int] = []  # of the completion
        self.parts: list[Rollout] = []  # what was sampled, and between that what was answered
        self.turns, self.calls, self.failures = 0, 0, 0
        self.goes_on, self.truncated = True, False
        self.environment: Environment | None = None

    async def start(self) -> None:
        """Reset the environment. Text that it returns goes to the end of the prompt's last message."""
        self.environment, said = await self.tools.open(self.row, self.evaluation)
        if said is not None:
            last = self.prompt[-1]
            self.prompt = [*self.prompt[:-1], last | {"content": last["content"] + said}]
            self.prompt_ids = self.tools.template.prompt_ids(self.prompt, self.schemas, self.row.origin)
        if self.tools.longest and len(self.prompt_ids) >= self.tools.longest:
            raise TaskError(
                f"{self.row.origin}: with what reset returned, the prompt has {len(self.prompt_ids)} tokens, and the"
                f" engine takes {self.tools.longest} with the completion's: --max-model-len"
            )

    @property
    def turn(self) -> Turn:
        """What comes next."""
        return Turn(self.prompt_ids + self.ids, self.number, self.turns, self.room)

    @property
    def room(self) -> int:
        """How many tokens the completion may still have."""
        room = self.max_tokens - len(self.ids)
        return min(room, self.tools.longest - len(self.prompt_ids) - len(self.ids)) if self.tools.longest else room

    async def take(self, sampled: Rollout) -> None:
        """Add what was sampled, and call the tools that it names.

        Their answers come behind it. If they do not fit, they are left out, and the conversation ends there.
        """
        self.ids += np.asarray(sampled.completion_ids).tolist()
        self.parts.append(sampled)
        self.turns += 1
        message = parse(self.tools, self.schemas, self.ids[-len(sampled.completion_ids) :], sampled.truncated)
        self.messages.append(message)
        self.goes_on, self.truncated = False, sampled.truncated
        calls = message.get("tool_calls")
        if not calls or (self.limit is not None and self.turns > self.limit):
            return
        answers = await self._call([call["function"] for call in calls])
        ids = self.tools.template.answer_ids(answers, self.ids[-1])
        self.truncated = len(ids) >= self.room
        if len(ids) > self.room:
            return
        self.messages += answers
        self.ids += ids
        self.parts.append(_answered(ids, sampled))
        self.goes_on = not self.truncated

    async def _call(self, functions: list[dict]) -> list[dict]:
        """What the tools answer, as messages. Calls of one turn begin at once; those that block run one by one."""
        tools, begun = self.environment.tools, []
        for function in functions:
            tool, arguments = tools.get(function["name"]), function["arguments"]
            if tool and isinstance(arguments, dict):
                begun.append(self.environment.begin(tool, **arguments))
            else:
                begun.append(Future())
                error = f"{arguments!r} is no JSON object" if tool else f"Tool {function['name']} not found."
                begun[-1].set_exception(ValueError(error))
        answers = []
        for function, call in zip(functions, begun, strict=True):
            result, failed = await self._result(call)
            self.calls, self.failures = self.calls + 1, self.failures + failed
            content = result if isinstance(result, list) else str(result)
            answers.append({"role": "tool", "name": function["name"], "content": content})
        return answers

    async def _result(self, call: Future) -> tuple[object, bool]:
        """What this call returned, or its error, and whether it is an error."""
        waiting = asyncio.wrap_future(call)
        done, _ = await asyncio.wait([waiting], timeout=self.tools.args.tool_timeout)
        if not done:
            waiting.cancel()  # a coroutine ends, and what waits for the thread never begins
            self.environment.lost = True
            return {"error": f"no answer within {self.tools.args.tool_timeout:g} s"}, True
        if error := waiting.exception():
            return {"error": str(error)}, True
        return waiting.result(), False

    def rollout(self) -> Rollout:
        """The whole, without rewards."""
        versions = [part.versions for part in self.parts]
        return Rollout(
            np.array(self.prompt_ids, np.int32),
            np.array(self.ids, np.int32),
            np.concatenate([part.logprobs for part in self.parts]).astype(np.float32),
            text=self.tools.template.tokenizer.decode(self.ids, skip_special_tokens=True),
            truncated=self.truncated,
            versions=None if versions[0] is None else np.concatenate(versions),
            sampled=np.concatenate([part.mask for part in self.parts]),
            prompt=self.prompt,
            messages=self.messages,
        )


def group_of(conversations: list[Conversation]) -> Group:
    """Conversations of one prompt that have ended, with their metrics, and with the environments, for the rewards."""
    calls, failures = (sum(getattr(own, name) for own in conversations) for name in ("calls", "failures"))
    logged = {
        "tools/call_frequency": [float(own.calls) for own in conversations],
        "tools/failure_frequency": [1.0] * failures + [0.0] * (calls - failures),
        "turns/mean": [float(own.turns) for own in conversations],
    }
    environments = [own.environment for own in conversations]
    group = Group(conversations[0].row, [own.rollout() for own in conversations], logged)
    if environments[0].instance is not None:
        group.environments = environments
    else:
        for environment in environments:
            environment.release()
    return group


def together(coroutines: Iterable) -> Future:
    """Run these coroutines at one time, in a thread that no user's coroutine can block."""

    async def gather() -> list:
        return await asyncio.gather(*coroutines)

    return asyncio.run_coroutine_threadsafe(gather(), event_loop("conversations"))


def parse(tools: Tools, schemas: list[dict], ids: list[int], truncated: bool) -> dict:
    """A turn of the policy as a message. What vLLM's parser does not take for calls of tools is plain text."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    tokenizer = tools.template.tokenizer
    text = tokenizer.decode(ids if truncated else ids[:-1], skip_special_tokens=False)  # they may delimit calls
    request = ChatCompletionRequest(messages=[{"role": "user", "content": ""}], tools=schemas or None)
    found = tools.parser(tokenizer, request.tools).extract_tool_calls(text, request)
    if not found.tools_called:
        return {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
    calls = [
        {"name": call.function.name, "arguments": _arguments(call.function.arguments)} for call in found.tool_calls
    ]
    calls = [{"type": "function", "function": function} for function in calls]
    return {"role": "assistant", "content": found.content or "", "tool_calls": calls}


def _arguments(text: str):
    try:
        return json.loads(text)
    except ValueError:
        return text  # which `_call` answers


def _answered(ids: list[int], before: Rollout) -> Rollout:
    """The tokens of tools' answers, which nobody sampled."""
    none = np.zeros(len(ids), np.float32)
    versions = None if before.versions is None else np.full(len(ids), before.versions[-1], np.int32)
    logprobs = none if len(before.logprobs) else none[:0]  # as in an evaluation
    return Rollout([], ids, logprobs, versions=versions, sampled=none.astype(bool))
