"""The server that agents ask: OpenAI's /v1/chat/completions and /v1/models, in the driver.

Tokens in, tokens out. A request that continues a conversation, by messages that begin with those of an earlier request
and with the answer that it got, goes to the engine as the ids of that conversation, followed by those of the messages
since. If it continues none, or the template would change what was sampled (Qwen3's drops earlier thinking), a new
sample begins, whose prompt is the template's rendering of the request. If the conversation has gone on in another way
already, a new sample begins as well, and its prompt is what was sampled until then. So a rollout has one sample or
several, and every token that was sampled is sampled in one of them.
"""

import asyncio
import copy
import json
import math
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ..errors import TaskError
from ..learning.rollout import Rollout
from ..tasks.agent import Agent
from ..tasks.dataset import Row, content_text
from ..tasks.environment import event_loop
from ..tasks.rewards import AGENT, AGENT_ERROR, Group
from .conversation import Transcript, Turn, json_of, unicode_text

# What would change how tokens are sampled, and is left to the run, and what nobody could learn from.
IGNORED = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty")
IGNORED += ("repetition_penalty", "parallel_tool_calls", "reasoning_effort", "chat_template_kwargs")
REFUSED = (
    "logit_bias",
    "top_logprobs",
    "functions",
    "structured_outputs",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
)
REFUSED += ("ignore_eos", "stop_token_ids", "prompt_logprobs", "echo", "continue_final_message")
LIMITS = ("max_completion_tokens", "max_tokens")


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, reason: str, status: int = 400, code: str | None = None):
        super().__init__(reason)
        kind = "authentication_error" if status == 401 else "invalid_request_error"  # noqa: PLR2004
        self.status, self.body = status, {"error": {"message": reason, "type": kind, "param": None, "code": code}}


class Sample(Transcript):
    """A conversation of an agent with the policy. `end` is its end, unless a request is about to move it."""

    end: "End | None" = None


@dataclass(eq=False)
class End:
    """Where a turn of a sample has ended."""

    sample: Sample
    length: int  # of the ids by then
    last: int | None  # the id that ended the turn; None if it was cut off
    thought: bool  # whether the turn had reasoning


class AgentRollout:
    """What an agent asks for one completion, the one of this `number` in its step. `sample` has an engine continue a
    turn, which has at most `max_tokens`. A sample has at most `max_model_len`, with its prompt."""

    def __init__(
        self,
        agent: Agent,
        sample: Callable[[Turn], Awaitable[Rollout]],
        number: int,
        max_tokens: int,
        max_model_len: int | None,
    ):
        self.agent, self.sample, self.number = agent, sample, number
        self.max_tokens, self.max_model_len = max_tokens, max_model_len or math.inf
        self.key = secrets.token_urlsafe(16)
        self.samples: list[Sample] = []
        self.ends: dict[tuple[str, ...], End] = {}  # by the tools and the messages until then
        self.requests: list[asyncio.Task] = []
        self.turns = 0

    async def answer(self, body: dict) -> dict:
        """OpenAI's answer to the body of a request for a chat completion. Raises Refused."""
        request, messages = _validated(body)
        keys = (json.dumps(body.get("tools") or [], sort_keys=True), *map(_key, messages))
        sample = self._extended(messages, keys) or self._begun(messages, body.get("tools"))
        sample.schemas = body.get("tools") if request.tool_choice not in (None, "none") else None
        stop = [request.stop] if isinstance(request.stop, str) else [*filter(None, request.stop or ())]
        options = {"stop": stop, "detokenize": True} if stop else {}
        options |= {"logprobs": 0} if request.logprobs else {}  # which an evaluation goes without
        prompt_ids, limits = sample.prompt_ids + sample.ids, [self.max_tokens]
        limits += [body[name] for name in LIMITS if body.get(name)]
        most = min(*limits, self.max_model_len - len(prompt_ids))
        self.turns, index = self.turns + 1, self.turns
        sampled = await self.sample(Turn(prompt_ids, None, self.number, index, most, options))
        message = self._sent(sample.add_turn(sampled, stop), index)
        sample.messages[-1] = message
        last = sample.ids[-1] if sample.ended else None
        sample.end = End(sample, len(sample.ids), last, "reasoning_content" in message)
        self.ends[*keys, _key(message)] = sample.end
        self.samples.remove(sample)
        self.samples.append(sample)  # the one with the last turn is the last
        finish = "tool_calls" if "tool_calls" in message else "length" if sampled.truncated else "stop"
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        if request.logprobs:
            choice["logprobs"] = {"content": [*map(self._logprob, sampled.completion_ids, sampled.logprobs)]}
        counts = len(prompt_ids), len(sampled.completion_ids)
        usage = dict(zip(("prompt_tokens", "completion_tokens", "total_tokens"), (*counts, sum(counts)), strict=True))
        about = {"id": f"chatcmpl-{index}", "object": "chat.completion", "created": int(time.time())}
        return about | {"model": request.model or AGENT, "choices": [choice], "usage": usage}

    def _extended(self, messages: list[dict], keys: tuple[str, ...]) -> Sample | None:
        """The sample that these messages continue, with the last of them, or a new one with its tokens as prompt."""
        known = next((n for n in range(len(messages) - 1, 0, -1) if keys[: n + 1] in self.ends), None)
        if known is None or messages[-1]["role"] == "assistant":
            return None
        end, new = self.ends[keys[: known + 1]], messages[known:]
        try:
            ids = self.agent.template.answer_ids(new, end.last, end.thought)
        except TaskError:
            return None
        prompt_ids = end.sample.prompt_ids + end.sample.ids[: end.length] + ids
        self._check_room(prompt_ids)
        if end.sample.end is not end:
            return self._added(messages, prompt_ids)
        end.sample.add_answers(new, ids)
        end.sample.end = None
        return end.sample

    def _begun(self, messages: list[dict], tools: list[dict] | None) -> Sample:
        try:
            if tools:
                self.agent.check_tools()
            prompt_ids = self.agent.template.prompt_ids(messages, tools, "a request", complete=False)
        except Exception as error:  # the tokenizer's as well
            raise Refused(str(error)) from error
        self._check_room(prompt_ids)
        return self._added(messages, prompt_ids)

    def _added(self, messages: list[dict], prompt_ids: list[int]) -> Sample:
        self.samples.append(Sample(self.agent, messages, prompt_ids, None, None))
        return self.samples[-1]

    def _check_room(self, prompt_ids: list[int]) -> None:
        if len(prompt_ids) >= self.max_model_len:
            reason = f"the messages have {len(prompt_ids)} tokens, and the engine takes {self.max_model_len} with the"
            raise Refused(f"{reason} completion's: --max-model-len", code="context_length_exceeded")

    def _sent(self, message: dict, turn: int) -> dict:
        """A turn's message as it is sent. Its calls have ids of nine letters and digits, as Mistral's template wants."""
        calls = []
        for i, call in enumerate(message.get("tool_calls", ())):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
            function = {"name": unicode_text(name), "arguments": unicode_text(arguments)}
            calls.append({"id": f"call{turn:03}{i:02}", "type": "function", "function": function})
        return message | ({"tool_calls": calls, "content": message["content"] or None} if calls else {})

    def _logprob(self, token_id: int, logprob: float) -> dict:
        text = self.agent.template.tokenizer.decode([int(token_id)])
        return {"token": text, "logprob": float(logprob), "bytes": [*text.encode()], "top_logprobs": []}

    async def settle(self) -> None:
        """Wait for what is still sampled. Raises what has failed, but for requests that were refused."""
        errors = await asyncio.gather(*self.requests, return_exceptions=True)
        for error in errors:
            if isinstance(error, BaseException) and not isinstance(error, Refused):
                raise error

    def rollout(self, row: Row, returned: dict) -> Rollout:
        """The completion, for which the agent has `returned` this. Its `rest` are the samples but for the last."""
        *rest, own = [sample.rollout() for sample in self.samples] or [_nothing(row)]
        failed = "reward" not in returned
        extra = {AGENT_ERROR: returned["error"]} if failed else {AGENT: returned}
        reward = {AGENT: returned.get("reward")}
        truncated = any(each.truncated for each in (own, *rest))
        return replace(own, rest=rest, truncated=truncated, rewards=reward, extra=extra)


class AgentServer:
    """The server, for the agents of a run, on a free port of this host. It runs in the event loop of conversations."""

    def __init__(self, agent: Agent):
        import uvicorn
        from starlette.applications import Starlette
        from starlette.routing import Route

        self.agent, self.rollouts = agent, {}  # by their keys
        self.remarks: set[str] = set()  # that were printed
        routes = []
        for prefix in ("/{key}/v1", "/v1"):
            routes.append(Route(f"{prefix}/chat/completions", partial(self._answer, self._complete), methods=["POST"]))
            routes.append(Route(f"{prefix}/models", partial(self._answer, self._models)))
        routes.append(Route("/{path:path}", partial(self._answer, self._unknown), methods=["GET", "POST"]))
        self.app = Starlette(routes=routes)
        options = {"log_config": None, "access_log": False, "lifespan": "off", "ws": "none"}
        self.server = uvicorn.Server(uvicorn.Config(self.app, timeout_keep_alive=3600, **options))
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self.calls: set[asyncio.Task] = set()
        self.loop = event_loop("conversations")
        asyncio.run_coroutine_threadsafe(self.server.serve([listening]), self.loop)

    def close(self) -> None:
        """End the server, and the agents that still run."""
        self.server.should_exit = self.server.force_exit = True
        self.loop.call_soon_threadsafe(lambda: [call.cancel() for call in self.calls])

    async def group(self, row: Row, rollouts: list[AgentRollout]) -> Group:
        """The group of this row, once the agent has been called for each of these completions."""
        returned = await asyncio.gather(*(self._call(row, own) for own in rollouts))
        failed = [own["error"] for own in returned if "reward" not in own]
        for error in failed[:1]:
            self._say("a completion has no reward", f": {error}")
        logged = {
            "agent/failure_frequency": [1.0] * len(failed) + [0.0] * (len(rollouts) - len(failed)),
            "agent/samples": [float(len(own.samples)) for own in rollouts],
            "turns/mean": [float(own.turns) for own in rollouts],
        }
        for own in returned:
            for name, value in own.items():
                if name != "reward" and isinstance(value, int | float):
                    logged.setdefault(f"agent/{name}", []).append(float(value))
        made = [own.rollout(row, each) for own, each in zip(rollouts, returned, strict=True)]
        return Group(row, made, logged, columns={AGENT: [own.extra.get(AGENT) for own in made]})

    async def _call(self, row: Row, rollout: AgentRollout) -> dict:
        self.rollouts[rollout.key] = rollout
        call = asyncio.ensure_future(self.agent.call(f"{self.url}/{rollout.key}/v1", rollout.key, row))
        self.calls.add(call)
        try:
            return await call
        finally:
            self.calls.discard(call)
            del self.rollouts[rollout.key]
            await rollout.settle()

    async def _answer(self, handle: Callable, request):
        from starlette.responses import JSONResponse, StreamingResponse

        key = request.path_params.get("key") or request.headers.get("authorization", "").removeprefix("Bearer ")
        text = await request.body()  # before the key: the agent may end meanwhile
        try:
            if key not in self.rollouts and handle != self._unknown:
                raise Refused("no completion is being made with this key", 401, "invalid_api_key")
            answer, options = await handle(self.rollouts.get(key), text)
            if options is None:
                return JSONResponse(answer)
            return StreamingResponse(_events(answer, options), media_type="text/event-stream")
        except Refused as error:
            return JSONResponse(error.body, error.status)

    async def _complete(self, rollout: AgentRollout, text: bytes) -> tuple[dict, dict | None]:
        try:
            body = json.loads(text)
        except ValueError as error:
            raise Refused(f"the body is not JSON: {error}") from error
        if ignored := [name for name in IGNORED if isinstance(body, dict) and body.get(name) is not None]:
            self._say(f"agents set {', '.join(ignored)}", ", which the run's own sampling replaces")
        answering = asyncio.ensure_future(rollout.answer(body))  # which goes on if the agent waits no longer
        rollout.requests.append(answering)
        answer = await asyncio.shield(answering)
        return answer, (body.get("stream_options") or {}) if body.get("stream") else None

    async def _models(self, rollout: AgentRollout, _) -> tuple[dict, None]:
        model = {"id": AGENT, "object": "model", "created": 0, "owned_by": "trainer"}
        return {"object": "list", "data": [model | {"max_model_len": rollout.max_model_len}]}, None

    async def _unknown(self, *_) -> None:
        raise Refused("only /v1/chat/completions and /v1/models are here", 404)

    def _say(self, remark: str, more: str) -> None:
        if remark not in self.remarks:
            self.remarks.add(remark)
            print(f"{remark}{more}", flush=True)


def _validated(body: dict) -> tuple:
    """The body as vLLM's ChatCompletionRequest, and its messages as chat templates take them. Raises Refused for what
    is malformed, and for what would be sampled in another way than the run's."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    try:
        request = ChatCompletionRequest(**copy.deepcopy(body))  # which changes messages
        messages = _plain(body["messages"])
    except Exception as error:  # pydantic's and vLLM's, or of a message that has another form than OpenAI's
        raise Refused(" ".join(str(error).split())) from error
    refused = [name for name in REFUSED if body.get(name)]
    refused += ["n above 1"] * ((request.n or 1) > 1)
    refused += ["response_format"] * bool(request.response_format and request.response_format.type != "text")
    refused += ["a forced tool_choice"] * (request.tool_choice not in (None, "none", "auto"))
    refused += ["max_tokens below 1"] * any(body[name] < 1 for name in LIMITS if body.get(name) is not None)
    refused += ["a request without messages"] * (not messages)
    if refused:
        raise Refused(f"the trainer does not take {', '.join(refused)}")
    return request, messages


def _plain(messages: list[dict]) -> list[dict]:
    """Messages as chat templates take them: with text alone, with tools' names, and without what clients add."""
    plain, names = [], {}
    for message in messages:
        content, role = message.get("content"), message["role"]
        parts = content if isinstance(content, list) else ()
        if other := {part.get("type") for part in parts} - {"text"}:
            raise ValueError(f"the trainer takes text alone, and no part of the type {min(map(str, other))}")
        own = {"role": "system" if role == "developer" else role, "content": unicode_text(content_text(content))}
        if calls := message.get("tool_calls"):
            functions = [{key: call["function"].get(key) or "" for key in ("name", "arguments")} for call in calls]
            pairs = zip(calls, functions, strict=True)
            own["tool_calls"] = [{"id": c.get("id"), "type": "function", "function": f} for c, f in pairs]
            names |= {call["id"]: call["function"]["name"] for call in own["tool_calls"]}
        if reasoning := message.get("reasoning_content") or message.get("reasoning"):
            own["reasoning_content"] = unicode_text(reasoning)
        if role == "tool":
            call_id = message.get("tool_call_id")
            name = message.get("name") or names.get(call_id, "")
            own |= {"name": unicode_text(name), "tool_call_id": call_id}
        plain.append(own)
    return plain


def _key(message: dict) -> str:
    """Equal for messages that clients may write in different ways: a turn's space around its text, without its
    reasoning, calls' arguments in another JSON."""
    content, is_turn = message["content"] or "", message["role"] == "assistant"
    calls = [
        (call["id"], call["function"]["name"], json_of(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    ]
    text = content.strip() if is_turn else content
    return json.dumps([message["role"], text, calls, message.get("tool_call_id")], sort_keys=True)


def _events(answer: dict, options: dict) -> Iterator[str]:
    """The answer as a stream of events: a delta with all of the message, and its end."""
    (choice,) = answer["choices"]
    about = answer | {"object": "chat.completion.chunk"}
    usage = about.pop("usage")
    calls = [call | {"index": i} for i, call in enumerate(choice["message"].get("tool_calls", ()))]
    delta = choice["message"] | ({"tool_calls": calls} if calls else {})
    whole = {"index": 0, "delta": delta, "logprobs": choice["logprobs"], "finish_reason": None}
    end = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
    chunks = [{"choices": [whole]}, {"choices": [end]}]
    chunks += [{"choices": [], "usage": usage}] if options.get("include_usage") else []
    for chunk in chunks:
        yield f"data: {json.dumps(about | chunk)}\n\n"
    yield "data: [DONE]\n\n"


def _nothing(row: Row) -> Rollout:
    """The completion of an agent that has asked for nothing."""
    return Rollout(row.prompt_ids, np.zeros(0, np.int32), np.zeros(0, np.float32), versions=np.zeros(0, np.int32))
