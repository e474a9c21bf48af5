"""The server that agents ask: OpenAI's /v1/chat/completions and /v1/models, in the driver.

Tokens in, tokens out. A request whose messages begin with those of an earlier one, and with the answer that it got,
goes to the engine as the ids of that conversation, followed by those of the messages since. If there is none, or the
template would change what was sampled (Qwen3's drops earlier thinking), a new sample begins, whose prompt the template
renders. If that conversation has gone on already, a new sample begins as well, whose prompt is what was sampled by
then. So a rollout has one sample or several, and each token that was sampled is learned from in one of them.
"""

import asyncio
import json
import math
import secrets
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace

import numpy as np

from ..errors import TaskError
from ..learning.rollout import Rollout
from ..tasks.agent import Agent
from ..tasks.dataset import Row, content_text
from ..tasks.environment import event_loop
from ..tasks.rewards import AGENT, AGENT_ERROR, Group
from .conversation import Transcript, Turn, json_of, unicode_text

IGNORED = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty")  # the run has its
IGNORED += ("repetition_penalty", "parallel_tool_calls", "reasoning_effort", "verbosity", "chat_template_kwargs")
LIMITS = ("max_completion_tokens", "max_tokens")
TAKEN = {"messages", "model", "tools", "tool_choice", "n", "response_format", "stop", "stream", "stream_options"}
TAKEN |= {"logprobs", *LIMITS, *IGNORED, "user", "store", "metadata", "service_tier", "safety_identifier", "session_id"}
TAKEN |= {"prompt_cache_key", "cache_salt", "request_id", "priority"}  # which change no completion
Sampler = Callable[[Turn], Awaitable[Rollout]]


class Refused(Exception):
    """A request that is answered with an error: its reason, and the HTTP status."""


class AgentRollout:
    """What an agent asks for the completion of this `number` in a step. `sample` has an engine take a turn, of at most
    `max_tokens`. A sample has at most `max_model_len`, with its prompt."""

    def __init__(self, agent: Agent, sample: Sampler, number: int, max_tokens: int, max_model_len: int | None):
        self.agent, self.sample, self.number = agent, sample, number
        self.max_tokens, self.max_model_len = max_tokens, max_model_len or math.inf
        self.key, self.turns = secrets.token_urlsafe(16), 0
        self.samples: list[Transcript] = []  # the one with the last turn is the last
        # By the tools and messages until a turn's end: its sample, the number of ids by then, the last of them (None if
        # the turn was cut off), and the messages with their reasoning.
        self.ends: dict[tuple[str, ...], list[tuple[Transcript, int, int | None, list[dict]]]] = {}
        self.requests: dict[asyncio.Task, tuple] = {}  # with the body, and the last client that has waited for it

    async def answer(self, body: dict) -> dict:
        """OpenAI's answer to the body of a request for a chat completion. Raises Refused."""
        request, messages, keys = _validated(body)
        tools, stop = body.get("tools"), request["stop"]
        self.turns, index = self.turns + 1, self.turns  # in the order of the requests, which the seeds follow
        sample = self._continued(messages, keys) or await self._begun(messages, tools)
        sample.schemas = None if request["tool_choice"] == "none" else tools
        prompt_ids = sample.prompt_ids + sample.ids
        room = min(self.max_tokens, self.max_model_len - len(prompt_ids))
        most = min([room, *(request[name] for name in LIMITS if request[name])])
        options = {"logprobs": 0} if request["logprobs"] else {}  # which an evaluation goes without
        options |= {"stop": stop, "detokenize": True} if stop else {}
        sampled = await self.sample(Turn(prompt_ids, self.number, index, most, options))
        message = sample.messages[-1] = _sent(sample.add_turn(sampled, stop), index)
        sample.truncated &= most == room  # by the run, and not by the agent's own limit
        last, until = sample.ids[-1] if sample.ended else None, [*sample.prompt, *sample.messages]
        self.ends.setdefault((*keys, _key(message)), []).append((sample, len(sample.ids), last, until))
        self.samples.sort(key=lambda own: own is sample)
        finish = "tool_calls" if "tool_calls" in message else "length" if sampled.truncated else "stop"
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        if request["logprobs"]:
            texts = [self.agent.template.tokenizer.decode([own]) for own in sampled.completion_ids.tolist()]
            pairs = zip(texts, sampled.logprobs.tolist(), strict=True)
            content = [{"token": t, "logprob": lp, "bytes": [*t.encode()], "top_logprobs": []} for t, lp in pairs]
            choice["logprobs"] = {"content": content}
        counts = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(sampled.completion_ids)}
        about = {"id": f"chatcmpl-{index}", "object": "chat.completion", "created": int(time.time())}
        about |= {"model": request["model"] or AGENT, "usage": counts | {"total_tokens": sum(counts.values())}}
        return about | {"choices": [choice]}

    def _continued(self, messages: list[dict], keys: tuple[str, ...]) -> Transcript | None:
        """The sample that these messages continue, with the last of them, or a new one with its tokens as prompt."""
        known = (end for n in range(len(messages) - 1, 0, -1) for end in reversed(self.ends.get(keys[: n + 1], ())))
        sample, length, last, until = next((end for end in known if _same_reasoning(messages, end[-1])), [None] * 4)
        if not sample or "assistant" in (own["role"] for own in messages[len(until) :]):
            return None
        new = messages[len(until) :]
        try:
            ids = self.agent.template.answer_ids(new, last, any("reasoning_content" in own for own in until))
        except TaskError:
            return None
        prompt_ids = sample.prompt_ids + sample.ids[:length] + ids
        if length < len(sample.ids) or not ids:  # it has gone on, or is about to
            return self._added(until + new, prompt_ids)
        self._check_room(prompt_ids)
        sample.add_answers(new, ids)
        return sample

    async def _begun(self, messages: list[dict], tools: list[dict] | None) -> Transcript:
        """A new sample, after these messages as the template renders them."""
        try:
            if tools:
                self.agent.template.check_tools()
            render = self.agent.prompts.prompt_ids
            prompt_ids = await asyncio.to_thread(render, messages, tools, "a request", of_agent=True)
        except Exception as error:  # the tokenizer's as well
            raise Refused(str(error), 400) from error
        return self._added(messages, prompt_ids)

    def _added(self, messages: list[dict], prompt_ids: list[int]) -> Transcript:
        self._check_room(prompt_ids)
        self.samples.append(Transcript(self.agent, messages, prompt_ids, None, None))
        return self.samples[-1]

    def _check_room(self, prompt_ids: list[int]) -> None:
        if len(prompt_ids) >= self.max_model_len:
            most = f"the engine takes {self.max_model_len} with the completion's: --max-model-len"
            raise Refused(f"context_length_exceeded: the messages have {len(prompt_ids)} tokens, and {most}", 400)

    def rollout(self, row: Row, returned: dict) -> Rollout:
        """The completion, for which the agent has `returned` this. Its `rest` are the samples but for the last."""
        ids, numbers = np.zeros(0, np.int32), np.zeros(0, np.float32)
        nothing = Rollout(row.prompt_ids, ids, numbers, versions=ids)
        *rest, own = [sample.rollout() for sample in self.samples] or [nothing]
        extra = {AGENT: returned} if "reward" in returned else {AGENT_ERROR: returned["error"]}
        truncated = any(each.truncated for each in (own, *rest))
        return replace(own, rest=rest, truncated=truncated, rewards={AGENT: returned.get("reward")}, extra=extra)


class AgentServer:
    """The server, for the agents of a run, on a free port of this host. It runs in the event loop of conversations."""

    def __init__(self, agent: Agent):
        import uvicorn

        self.agent, self.rollouts = agent, {}  # by their keys
        self.calls: set[asyncio.Future] = set()
        self.remarks: set[str] = set()  # that were printed
        options = {"log_config": None, "access_log": False, "lifespan": "off", "ws": "none", "interface": "asgi3"}
        options["headers"] = [("connection", "close")]  # for each request, httpx polls all that its pool has kept
        self.server = uvicorn.Server(uvicorn.Config(self._respond, **options))
        listening, self.loop = socket.create_server(("127.0.0.1", 0)), event_loop("conversations")
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        asyncio.run_coroutine_threadsafe(self.server.serve([listening]), self.loop)

    def close(self) -> None:
        """End the server, and the agents that still run."""
        self.server.should_exit = self.server.force_exit = True
        self.loop.call_soon_threadsafe(lambda: [call.cancel() for call in self.calls])

    async def group(self, row: Row, rollouts: list[AgentRollout]) -> Group:
        """The group of this row, once the agent has been called for each of these completions."""
        returned = await asyncio.gather(*(self._call(row, own) for own in rollouts))
        made = [own.rollout(row, each) for own, each in zip(rollouts, returned, strict=True)]
        errors = [own.extra[AGENT_ERROR] for own in made if AGENT_ERROR in own.extra]
        for error in errors if not self.server.should_exit else ():  # a run that ends cancels its agents
            self._say("a completion has no reward", f": {error}")
        logged = {
            "agent/failure_frequency": [len(errors) / len(made)],
            "agent/samples": [float(len(own.samples)) for own in rollouts],
            "turns/mean": [float(own.turns) for own in rollouts],
        }
        for name, value in [pair for own in returned for pair in own.items()]:
            is_metric = name not in ("reward", "samples", "failure_frequency") and isinstance(value, int | float)
            if is_metric and abs(value) <= sys.float_info.max:  # which a NaN is not either
                logged.setdefault(f"agent/{name}", []).append(float(value))
        return Group(row, made, logged, columns={AGENT: [own.extra.get(AGENT) for own in made]})

    async def _call(self, row: Row, rollout: AgentRollout) -> dict:
        """What the agent returns for this completion, when all that it has asked for is sampled."""
        self.rollouts[rollout.key] = rollout
        self.calls.add(call := asyncio.ensure_future(self.agent.call(f"{self.url}/{rollout.key}/v1", rollout.key, row)))
        try:
            return await call
        finally:
            self.calls.discard(call)
            del self.rollouts[rollout.key]
            for error in await asyncio.gather(*rollout.requests, return_exceptions=True):
                if isinstance(error, BaseException) and not isinstance(error, Refused):
                    raise error

    async def _respond(self, scope: dict, receive: Callable, send: Callable) -> None:
        """The ASGI application."""
        from starlette.requests import Request
        from starlette.responses import JSONResponse, StreamingResponse

        request = Request(scope, receive)
        path, text = scope["path"], await request.body()
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        rollout = self.rollouts.get(path[1:].partition("/")[0]) or self.rollouts.get(key)
        try:
            if not rollout:
                raise Refused("no completion is being made with this key", 401)
            if path.endswith("/v1/models"):
                model = {"id": AGENT, "object": "model", "created": 0, "owned_by": "trainer"}
                response = JSONResponse({"object": "list", "data": [model]})
            elif path.endswith("/v1/chat/completions"):
                answer, body = await self._answer(rollout, text, request)
                events = _events(answer, body) if body.get("stream") else None
                response = StreamingResponse(events, media_type="text/event-stream") if events else JSONResponse(answer)
            else:
                raise Refused("only /v1/chat/completions and /v1/models are here", 404)
        except Refused as error:
            message, status = error.args
            about = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
            response = JSONResponse({"error": about}, status)
        await response(scope, receive, send)

    async def _answer(self, rollout: AgentRollout, text: bytes, client) -> tuple[dict, dict]:
        """The answer to this body, and what it says. If a client waits no longer, its request goes on, and is answered
        to the next one with the same body."""
        if not isinstance(body := json_of(text), dict):
            raise Refused("the body is no JSON object", 400)
        if ignored := [name for name in IGNORED if body.get(name) is not None]:
            self._say(f"agents set {', '.join(ignored)}", ", which the run's own sampling replaces")
        known = list(rollout.requests.items())
        repeated = (asked for asked, (same, gone) in known if same == text and await gone.is_disconnected())
        asked = await anext(repeated, None) or asyncio.ensure_future(rollout.answer(body))
        rollout.requests[asked] = text, client
        answer = await asyncio.shield(asked)
        if not await client.is_disconnected():
            rollout.requests[asked] = None, client  # who asks again wants another
        return answer, body

    def _say(self, remark: str, more: str) -> None:
        """Print this remark once."""
        if remark not in self.remarks:
            self.remarks.add(remark)
            print(f"{remark}{more}", flush=True)


def _validated(body: dict) -> tuple[dict, list[dict], tuple[str, ...]]:
    """The fields of the body as vLLM's ChatCompletionRequest has them, with "stop" as a list, its messages as chat
    templates take them, and the keys of its tools and of these. Raises Refused for what is malformed, and for what
    would be sampled in another way than the run's: a field that is not TAKEN may have its default. Changes the body's
    messages, as vLLM does: "reasoning_content" becomes "reasoning"."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    try:
        request, fields = dict(ChatCompletionRequest(**body)), ChatCompletionRequest.model_fields
        messages, stop = _plain(body["messages"]), request["stop"]
        keys = (json.dumps(body.get("tools"), sort_keys=True), *map(_key, messages))
        request["stop"] = [*map(unicode_text, [stop] if isinstance(stop, str) else stop or [])]
        default = {name: fields[name].get_default(call_default_factory=True) for name in fields.keys() & body.keys()}
        refused = {name: (request[name] or None) != (default.get(name) or None) for name in body.keys() - TAKEN} | {
            "n above 1": (request["n"] or 1) > 1,
            "response_format": request["response_format"] and request["response_format"].type != "text",
            "a forced tool_choice": request["tool_choice"] not in (None, "none", "auto"),
            "max_tokens below 1": any(request[name] is not None and request[name] < 1 for name in LIMITS),
            "an empty stop": "" in request["stop"],
            "a request without messages": not messages,
        }
    except Exception as error:  # pydantic's and vLLM's, or of a message that has another form than OpenAI's
        raise Refused(" ".join(str(error).split()), 400) from error
    if any(refused.values()):
        raise Refused(f"the trainer does not take {', '.join(filter(refused.get, refused))}", 400)
    return request, messages, keys


def _plain(messages: list[dict]) -> list[dict]:
    """Messages as chat templates take them: with text alone, with tools' names, and without what clients add."""
    plain, names = [], {}
    for message in messages:
        content, role, call_id = message.get("content"), message["role"], message.get("tool_call_id")
        if isinstance(content, list) and {part["type"] for part in content} - {"text"}:
            raise ValueError("the trainer takes parts of the type text alone")
        own = {"role": "system" if role == "developer" else role, "content": unicode_text(content_text(content))}
        for call in message.get("tool_calls") or ():
            function = {key: unicode_text(call["function"][key]) for key in ("name", "arguments")}
            own.setdefault("tool_calls", []).append({"id": call["id"], "type": "function", "function": function})
            names[call["id"]] = function["name"]
        if reasoning := message.get("reasoning_content") or message.get("reasoning"):
            own["reasoning_content"] = unicode_text(reasoning)
        if role == "tool":
            own |= {"name": unicode_text(message.get("name") or names.get(call_id, "")), "tool_call_id": call_id}
        plain.append(own)
    return plain


def _sent(message: dict, turn: int) -> dict:
    """A turn's message as it is sent. Its calls have ids of nine letters and digits, as Mistral's template wants."""
    calls = []
    for i, call in enumerate(message.get("tool_calls", ())):
        name, arguments = call["function"].values()
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
        function = {"name": unicode_text(name), "arguments": unicode_text(arguments)}
        calls.append({"id": f"call{turn:03}{i:02}", "type": "function", "function": function})
    return message | ({"tool_calls": calls, "content": message["content"] or None} if calls else {})


def _key(message: dict) -> str:
    """Equal for messages that clients write in different ways: a turn without its reasoning, or without space around
    its text, and calls' arguments in another JSON."""
    content, functions = message["content"] or "", [(c["id"], c["function"]) for c in message.get("tool_calls", ())]
    calls = [(call_id, function["name"], json_of(function["arguments"])) for call_id, function in functions]
    content = content.strip() if message["role"] == "assistant" else content
    return json.dumps([message["role"], content, calls, message.get("tool_call_id")], sort_keys=True)


def _same_reasoning(messages: list[dict], until: list[dict]) -> bool:
    """Whether those `until` a turn's end come with the reasoning that they had, or without."""
    pairs = zip(messages, until, strict=False)
    return all(own.get("reasoning_content") in (None, had.get("reasoning_content")) for own, had in pairs)


def _events(answer: dict, body: dict) -> Iterator[str]:
    """The answer as a stream, of one event with all of the message."""
    (choice,), about = answer["choices"], answer | {"object": "chat.completion.chunk", "usage": None}
    calls = [call | {"index": i} for i, call in enumerate(choice["message"].get("tool_calls", ()))]
    delta = choice["message"] | ({"tool_calls": calls} if calls else {})
    yield f"data: {json.dumps(about | {'choices': [choice | {'delta': delta}]})}\n\n"
    if (body.get("stream_options") or {}).get("include_usage"):
        yield f"data: {json.dumps(about | {'choices': [], 'usage': answer['usage']})}\n\n"
    yield "data: [DONE]\n\n"
