"""Conversations: the policy's turns and the messages between them, as tokens.

A turn's prompt is what was sampled before, id for id, followed by the ids of the messages since, such as tools'
answers. Sampled ids are never decoded and encoded again: the text may have another tokenization, which is not what the
policy has sampled.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from ..errors import TaskError
from ..images import Images
from ..learning.rollout import Rollout, SamplingMask
from ..tasks.dataset import Row, content_text
from ..tasks.environment import Environment
from ..tasks.rewards import Group
from ..tasks.tools import Tools, request_with


@dataclass
class Turn:
    """What an engine is to continue."""

    prompt_ids: list[int]
    number: int  # of the completion in the step
    index: int  # of the turn in the completion
    max_tokens: int
    options: dict = field(default_factory=dict)  # vLLM's, of this turn


class Transcript:
    """What the policy has said after a prompt, and what it was answered, in these `tools`' template."""

    def __init__(
        self, tools: Tools, prompt: list[dict], prompt_ids: list[int], schemas: list[dict] | None, images: Images | None
    ):
        self.tools, self.prompt, self.prompt_ids, self.schemas, self.images = tools, prompt, prompt_ids, schemas, images
        self.messages: list[dict] = []
        self.ids: list[int] = []  # the completion's
        self.parts: list[Rollout] = []  # what was sampled and what was answered, in turns
        self.truncated, self.ended = False, True  # ended: by a token of the model's, which is the last

    def add_turn(self, sampled: Rollout, stop: Sequence[str] = ()) -> dict:
        """Append what was sampled, which one of the texts `stop` may have ended. Returns it as a message."""
        sampled_ids = np.asarray(sampled.completion_ids).tolist()
        self.ids += sampled_ids
        self.parts.append(sampled)
        text = self.tools.template.tokenizer.decode(sampled_ids, skip_special_tokens=True)
        self.truncated = sampled.truncated
        self.ended = not self.truncated and not any(own in text for own in stop)
        message = parse(self.tools, self.schemas, sampled_ids, self.ended, stop)
        self.messages.append(message)
        return message

    def add_answers(self, messages: list[dict], ids: list[int]) -> None:
        """Append messages that others have written, with these token ids."""
        self.messages += messages
        self.ids += ids
        before, count = self.parts[-1], len(ids)
        versions = None if before.versions is None else np.full(count, before.versions[-1], np.int32)
        logprobs = np.zeros(count if len(before.logprobs) else 0, np.float32)  # an evaluation has none
        mask = before.sampling_mask and SamplingMask(np.zeros(0, np.int32), np.zeros(count, np.int32))
        sampled = np.zeros(count, bool)
        self.parts.append(Rollout([], ids, logprobs, versions=versions, sampling_mask=mask, sampled=sampled))

    def rollout(self) -> Rollout:
        """The whole completion, without rewards."""
        versions = [part.versions for part in self.parts]
        masks = [part.sampling_mask for part in self.parts]
        return Rollout(
            self.parts[0].prompt_ids,  # as the engine took them: with a token for each feature of an image
            np.array(self.ids, np.int32),
            np.concatenate([part.logprobs for part in self.parts]).astype(np.float32),
            text=self.tools.template.tokenizer.decode(self.ids, skip_special_tokens=True),
            truncated=self.truncated,
            versions=None if versions[0] is None else np.concatenate(versions),
            sampling_mask=SamplingMask(*map(np.concatenate, zip(*masks, strict=True))) if all(masks) else None,
            sampled=np.concatenate([part.mask for part in self.parts]),
            prompt=self.prompt,
            messages=self.messages,
            images=self.images,
        )


class Conversation(Transcript):
    """The completion of this number in a step, for this row's prompt with these images. It has at most `max_tokens`,
    with the answers of the tools, and fits with its prompt into `max_model_len`."""

    def __init__(
        self,
        tools: Tools,
        row: Row,
        images: Images | None,
        number: int,
        max_tokens: int,
        max_model_len: int | None = None,
        evaluation: bool = False,
    ):
        super().__init__(tools, row.prompt, row.prompt_ids, tools.schemas_of(row), images)
        self.row, self.number, self.evaluation = row, number, evaluation
        self.max_tokens, self.max_model_len = max_tokens, max_model_len
        self.turns, self.calls, self.failures, self.goes_on = 0, 0, 0, True
        self.environment: Environment | None = None

    async def run(self, sample: Callable[[Turn], Awaitable[Rollout]]) -> None:
        """Take this conversation to its end. `sample` has an engine continue the next turn."""
        await self.start()
        while self.goes_on:
            await self.take(await sample(self.turn))

    async def start(self) -> None:
        """Reset the environment. Text that it returns goes to the end of the prompt's last message."""
        self.environment, text = await self.tools.open(self.row, self.evaluation, self.images)
        if text is not None:
            text, last = unicode_text(text), self.prompt[-1]
            content = last.get("content", "")
            content = content + ([{"type": "text", "text": text}] if isinstance(content, list) else text)
            self.prompt = [*self.prompt[:-1], last | {"content": content}]
            self.prompt_ids = self.tools.template.prompt_ids(self.prompt, self.schemas, self.row.origin)
        if self.max_model_len and len(self.prompt_ids) >= self.max_model_len:
            raise TaskError(
                f"{self.row.origin}: with the text that reset returned, the prompt has {len(self.prompt_ids)} tokens,"
                f" and the engine takes {self.max_model_len} with the completion's: --max-model-len"
            )

    @property
    def turn(self) -> Turn:
        """The next turn."""
        return Turn(self.prompt_ids + self.ids, self.number, self.turns, self.room)

    @property
    def room(self) -> int:
        """How many tokens the completion may still have."""
        prompt_ids = self.parts[0].prompt_ids if self.parts else self.prompt_ids  # the engine expands images
        most = self.max_model_len - len(prompt_ids) if self.max_model_len else self.max_tokens
        return min(self.max_tokens, most) - len(self.ids)

    async def take(self, sampled: Rollout) -> None:
        """Append what was sampled, call the tools that it names, and append their answers.

        Answers that do not fit are left out, and the conversation ends.
        """
        message = self.add_turn(sampled)
        self.turns += 1
        self.goes_on = False
        calls, max_iterations = message.get("tool_calls"), self.tools.args.max_tool_iterations
        if not calls or (max_iterations is not None and self.turns > max_iterations):
            return
        answers = await self._call([call["function"] for call in calls])
        ids = self.tools.template.answer_ids(answers, self.ids[-1])
        self.truncated = len(ids) >= self.room
        if len(ids) > self.room:
            return
        self.add_answers(answers, ids)
        self.goes_on = not self.truncated

    async def _call(self, functions: list[dict]) -> list[dict]:
        """The tools' answers, as messages. All calls of a turn begin at once; blocking ones run one by one."""
        calls = []
        for function in functions:
            tool, arguments = self.environment.tools.get(function["name"]), function["arguments"]
            if tool and isinstance(arguments, dict):
                calls.append(self.environment.begin(tool, **arguments))
            else:
                error = f"{arguments!r} is no JSON object" if tool else f"Tool {function['name']} not found."
                calls.append(Future())
                calls[-1].set_exception(ValueError(error))
        answers = []
        for function, call in zip(functions, calls, strict=True):
            try:
                result, failed = await self._result(call)
                content = _answer_text(result)
            except Exception as error:  # of `str`, which runs the tool's code, or has no more than 4300 digits
                content, failed = str({"error": f"the answer cannot become text: {type(error).__name__}"}), True
            self.calls += 1
            self.failures += failed
            answers.append({"role": "tool", "name": unicode_text(function["name"]), "content": unicode_text(content)})
        return answers

    async def _result(self, call: Future) -> tuple[object, bool]:
        """What this call returned or, as {"error": text}, raised; and whether it raised."""
        waiting = asyncio.wrap_future(call)
        # After a call that did not return in time, those behind it in the environment's thread will not either.
        seconds = 0 if self.environment.lost else self.tools.args.tool_timeout
        done, _ = await asyncio.wait([waiting], timeout=seconds)
        if not done:
            waiting.cancel()  # this ends a coroutine; a function that waits for the thread will not begin
            self.environment.lost = True
            return {"error": f"no answer within {self.tools.args.tool_timeout:g} s"}, True
        if waiting.cancelled():  # by the tool itself, as clients that use anyio may
            return {"error": "cancelled"}, True
        if error := waiting.exception():
            return {"error": str(error)}, True
        return waiting.result(), False


def group_of(conversations: list[Conversation]) -> Group:
    """The group of a prompt's conversations, which have ended. It keeps their environments, for the rewards."""
    calls = sum(conversation.calls for conversation in conversations)
    failures = sum(conversation.failures for conversation in conversations)
    logged = {
        "tools/call_frequency": [float(conversation.calls) for conversation in conversations],
        "tools/failure_frequency": [1.0] * failures + [0.0] * (calls - failures),
        "turns/mean": [float(conversation.turns) for conversation in conversations],
    }
    rollouts = [conversation.rollout() for conversation in conversations]
    group = Group(conversations[0].row, rollouts, logged)
    environments = [conversation.environment for conversation in conversations]
    if environments[0].instance is not None:
        group.environments = environments
    else:
        for environment in environments:
            environment.release()
    return group


def parse(tools: Tools, schemas: list[dict] | None, ids: list[int], ended: bool, stop: Sequence[str]) -> dict:
    """A turn of the policy as a message. What comes before `</think>` calls no tools, and what vLLM's parser does not
    recognize as calls is plain text. With `schemas` None, there are no tools to call. If the turn has `ended`, its last
    token is no text. It may have a text of `stop` at its end, which is left out."""
    tokenizer, parsed = tools.template.tokenizer, None
    # Special tokens may delimit calls.
    text = _until(stop, tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False))
    message, said = _without_reasoning(text)
    if schemas is not None:
        with suppress(Exception):  # of some parsers, for calls that are malformed or nested too deeply
            request = request_with(json.dumps(schemas))
            parsed = tools.parser(request.tools).extract_tool_calls(said, request)
    if not parsed or not parsed.tool_calls:  # some parsers say that tools are called, and find no call they can read
        message, said = _without_reasoning(_until(stop, tokenizer.decode(ids, skip_special_tokens=True)))
        return message | {"content": said}
    calls = []
    for call in parsed.tool_calls:
        function = {"name": call.function.name, "arguments": json_of(call.function.arguments)}
        calls.append({"type": "function", "function": function})
    return message | {"content": parsed.content or "", "tool_calls": calls}


def _without_reasoning(text: str) -> tuple[dict, str]:
    """The assistant's message with its reasoning, if there is any, and the text after that."""
    reasoning, end, said = text.partition("</think>")
    reasoning = reasoning.replace("<think>", "", 1).strip()
    message = {"role": "assistant"} | ({"reasoning_content": reasoning} if end and reasoning else {})
    return message, said.lstrip() if end else text


def _answer_text(result) -> str:
    """What a tool returned, which may be parts of a message's content, as text."""
    are_parts = isinstance(result, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in result)
    return content_text(result) if result and are_parts else str(result)


def json_of(text: str):
    """What this JSON says, or the text if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def unicode_text(text: str) -> str:
    """The text with "?" for each half of a character: no tokenizer takes one."""
    return text.encode(errors="replace").decode()


def _until(stop: Sequence[str], text: str) -> str:
    return text[: min((text.index(own) for own in stop if own in text), default=len(text))]
