"""Agents: what they may ask, which tokens are learned from, and how they end.

pytest tests/test_agents.py            the server, without vLLM's engine
pytest tests/test_agents.py -m slow    a run of train_grpo.py; -m long: a command as an agent, and ahead of learning
"""

import asyncio
import functools
import json
import math
import random
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import torch
import torch.distributed as dist
from conftest import arguments_of, code_of, cpu_only, is_alive, metrics_of, task_of, title_of
from fakes import Engines as FakeEngines
from fakes import write_lines
from learners import CPU, LOSSES, assert_same, config, numbers, on_ranks, rollouts, use_sgd, vector_of, weights_of
from test_tools import chat_model, of_template

import train_distill
import train_grpo
from trainer.errors import TaskError
from trainer.learning.distill import DistillLearner
from trainer.learning.grpo import GRPOLearner
from trainer.learning.rollout import Rollout, SamplingMask
from trainer.rollouts import teacher
from trainer.rollouts.agents import AgentRollout, AgentServer, Refused
from trainer.rollouts.rollouts import Rollouts
from trainer.tasks.agent import Agent
from trainer.tasks.chat_template import ChatTemplate
from trainer.tasks.dataset import Row
from trainer.tasks.rewards import Batch, Group
from trainer.tasks.tools import ToolArguments

TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}]
DEEP = functools.reduce(lambda inner, _: {"a": inner}, range(995), {})  # too deep to be encoded
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "é%d"}}\n</tool_call>'


# What is sampled, and what is learned from


class Policy:
    """Stands for an engine: says what `says` gives, as text or ids. Every token's log-probability is its own."""

    def __init__(self, tokenizer, says):
        self.tokenizer, self.says, self.turns, self.count = tokenizer, says, [], 0

    async def sample(self, turn):
        await asyncio.sleep(0)  # others come in between
        said = self.says()
        ids = said if isinstance(said, list) else [*self.tokenizer.encode(said), self.tokenizer.eos_token_id]
        cut, stops = ids[: turn.max_tokens], turn.options.get("stop", ())
        ends = [i for i in range(len(cut)) if any(self.tokenizer.decode(cut[:i]).endswith(own) for own in stops)]
        cut = np.array(cut[: min(ends, default=None)])
        logprobs = -np.arange(self.count, self.count + len(cut), dtype=np.float32)
        self.count += len(cut)
        self.turns.append((turn, cut.tolist(), logprobs.tolist()))
        truncated, versions = not ends and cut[-1] != self.tokenizer.eos_token_id, np.zeros(len(cut), np.int32)
        return Rollout(turn.prompt_ids, cut, logprobs, truncated=bool(truncated), versions=versions)


async def nothing(base_url, api_key, row):
    return None


def agent_of(template="qwen2_5", **flags):
    agent = Agent(ToolArguments(**{"agent": "test_agents:nothing"} | flags))
    agent.prepare(ChatTemplate(of_template(template), {}))
    return agent


def asked(says, template="qwen2_5", max_tokens=400, max_model_len=None):
    """A completion to ask for, and its policy."""
    agent = agent_of(template)
    policy = Policy(agent.template.tokenizer, says)
    return AgentRollout(agent, policy.sample, 3, max_tokens, max_model_len), policy


def user(text):
    return {"role": "user", "content": text}


def ask(rollout, messages, **body):
    body = json.loads(json.dumps({"messages": messages} | body))
    return asyncio.run(rollout.answer(body))["choices"][0]["message"]


def samples_of(rollout):
    return rollout.rollout(Row("", {}, ""), {"reward": 1.0}).samples


def assert_learned_as_sampled(rollout, policy):
    """Every token that was sampled is sampled in one of the samples, after the very tokens that the engine got, and no
    other token is."""
    samples, learned = samples_of(rollout), []
    for own in samples:
        ids = [*own.prompt_ids, *own.completion_ids]
        begin = len(own.prompt_ids)
        learned += [(lp, ids[: begin + i], ids[begin + i]) for i, lp in enumerate(own.logprobs) if own.mask[i]]
    assert len(learned) == policy.count
    by_logprob = {logprob: rest for logprob, *rest in learned}
    for turn, ids, logprobs in policy.turns:
        for i, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            if i in (0, len(ids) - 1):
                assert by_logprob[logprob] == [turn.prompt_ids + ids[:i], token]
            assert by_logprob[logprob][1] == token
    return samples


def rewritten(message, rng):
    """A message of the server as clients may send it back."""
    message = dict(message)
    if rng.random() < 0.5:
        message.pop("reasoning_content", None)
    if calls := message.get("tool_calls"):
        message["content"] = rng.choice(
            [message["content"], message["content"] or "", None][: 2 + (not message["content"])]
        )
        message["tool_calls"] = [
            c
            | {"function": c["function"] | {"arguments": json.dumps(json.loads(c["function"]["arguments"]), indent=1)}}
            for c in calls
        ]
    return message | rng.choice([{}, {"refusal": None, "audio": None, "annotations": []}])


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3_1"])
def test_what_is_learned_is_what_was_sampled(template):
    """In 1000 conversations, with tools, branches, several requests at a time, and thinking that the template drops."""
    rng, counts = random.Random(template), Counter()

    def says():
        tokenizer = policy.tokenizer
        thought = "<think>\nHm é.\n</think>\n\n" if rng.random() < 0.3 else ""
        said = thought + rng.choice(["", "Yes.", " é ", "No </think>", CALL % rng.randrange(9), f"So: {CALL % 1}"])
        if rng.random() < 0.2:  # tokens that nobody makes of a text
            return [*tokenizer.encode(said + "<|im_end|>", split_special_tokens=True), tokenizer.eos_token_id]
        return tokenizer.encode(f"{said}.") if rng.random() < 0.1 else said  # cut off

    async def converse(rollout):
        talks = [[user("Who?")]]
        for _ in range(rng.randrange(2, 6)):
            talk = rng.choice(talks[-3:])
            if rng.random() < 0.2:
                talk = [{"role": "system", "content": "Be <|im_end|> brief."}, user(f"{rng.random()}")]
                talks.append(talk)
            body = json.dumps({"messages": talk} | ({"tools": TOOLS} if template != "llama3_1" else {}))
            answers = await asyncio.gather(*(rollout.answer(json.loads(body)) for _ in range(rng.choice([1, 1, 1, 2]))))
            for answer in answers:
                message = answer["choices"][0]["message"]
                counts["turns"] += 1
                counts["thoughts"] += "reasoning_content" in message
                calls = message.get("tool_calls", ())
                counts["calls"] += len(calls)
                more = [{"role": "tool", "tool_call_id": c["id"], "content": "found <|im_end|>"} for c in calls]
                more = more if more and rng.random() < 0.9 else [user("And?")]
                talks.append([*talk, rewritten(message, rng), *more])

    first, policy = asked(says, template)
    for _ in range(250):
        rollout = AgentRollout(first.agent, policy.sample, 3, 400, None)
        policy.turns, policy.count = [], 0
        asyncio.run(converse(rollout))
        counts["samples"] += len(assert_learned_as_sampled(rollout, policy))
    assert counts["calls"] > 50 or template == "llama3_1"
    assert counts["turns"] / 4 < counts["samples"] < 0.95 * counts["turns"], counts


def test_continuation_is_a_sample_and_what_is_not_begins_another():
    said = iter([CALL % 1, "Found.", "Bye.", "Other.", "Third."])
    rollout, policy = asked(lambda: next(said))
    talk = [user("Who?")]
    call = ask(rollout, talk, tools=TOOLS)
    assert call["content"] is None
    assert call["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": "\\u00e91"}'}
    talk += [call, {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "a"}]
    talk += [ask(rollout, talk, tools=TOOLS), user("Thanks.")]
    ask(rollout, [*talk, user("And now?")], tools=TOOLS)
    (own,) = assert_learned_as_sampled(rollout, policy)
    decode = policy.tokenizer.decode
    assert own.prompt == [{"role": "user", "content": "Who?"}]
    roles = ["assistant", "tool", "assistant", "user", "user", "assistant"]
    assert [message["role"] for message in own.messages] == roles
    assert decode(own.completion_ids).startswith(f"{CALL % 1}<|im_end|>\n<|im_start|>user\n<tool_response>\na\n")
    # The conversation has gone on already: the same tokens, as a prompt.
    branch = ask(rollout, [*talk, user("Why?")], tools=TOOLS)
    assert branch["content"] == "Other."
    second, _ = assert_learned_as_sampled(rollout, policy)  # that of the last turn is the first
    assert [*second.prompt_ids][: len(own.prompt_ids) + 40] == [*own.prompt_ids, *own.completion_ids[:40]]
    # Other tools are another conversation, which the template renders.
    ask(rollout, [*talk, user("And now?")])
    assert len(assert_learned_as_sampled(rollout, policy)) == 3


@pytest.mark.parametrize(
    ("template", "thought", "after_tools", "after_users"),
    [("qwen3", "So.", 1, 2), ("qwen2_5", "So.", 2, 3), ("glm4moe", "", 1, 2)],
)
def test_thinking_that_the_template_drops_begins_a_sample(template, thought, after_tools, after_users):
    said = iter([f"<think>\nHm.\n</think>\n\n{CALL % 1}", f"<think>\n{thought}\n</think>\n\nFound.", "Bye."])
    rollout, policy = asked(lambda: next(said), template)
    talk = [user("Who?")]
    call = ask(rollout, talk, tools=TOOLS)
    assert call["reasoning_content"] == "Hm."
    talk += [call, {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "a"}]
    talk += [ask(rollout, talk, tools=TOOLS), user("Thanks.")]
    assert len(assert_learned_as_sampled(rollout, policy)) == after_tools
    ask(rollout, talk, tools=TOOLS)
    last, *_ = assert_learned_as_sampled(rollout, policy)
    assert not {"Hm.", "So."} & {*policy.tokenizer.decode([*last.prompt_ids]).split()}
    assert len(rollout.samples) == after_users


def test_answers_that_differ_in_their_reasoning_are_two_conversations():
    said = iter(["<think>\nA.\n</think>\n\nYes.", "<think>\nB.\n</think>\n\nYes.", "One.", "Two.", "Three."])
    rollout, policy = asked(lambda: next(said), "qwen3_training")
    one, two = (ask(rollout, [user("Who?")]) for _ in range(2))
    for answer, thought in ((one, "A."), (two, "B."), ({"role": "assistant", "content": "Yes."}, "B.")):
        ask(rollout, [user("Who?"), answer, user("Why?")])
        assert {"A.", "B."} & {*policy.tokenizer.decode(policy.turns[-1][0].prompt_ids).split()} == {thought}
    assert_learned_as_sampled(rollout, policy)


@pytest.mark.parametrize("more", [[{"role": "tool", "tool_call_id": "b", "content": "No."}], []])
def test_turn_of_another_in_a_continuation_begins_a_sample(more):
    rollout, policy = asked(lambda: "Hm.")
    call = {"id": "b", "type": "function", "function": {"name": "look", "arguments": '{"at": "b"}'}}
    talk = [user("Who?"), ask(rollout, [user("Who?")]), user("Look.")]
    ask(rollout, [*talk, {"role": "assistant", "content": "Mine.", "tool_calls": [call]}, *more])
    assert len(assert_learned_as_sampled(rollout, policy)) == 2
    text = policy.tokenizer.decode(policy.turns[-1][0].prompt_ids)
    assert '"arguments": {"at": "b"}' in text
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_evaluation_has_no_sampling_masks_if_one_turn_has_none():
    rollout, policy = asked(lambda: "Yes.")

    async def sample(turn):
        own = await policy.sample(turn)
        counts = np.ones(len(own.completion_ids), np.int32)
        mask = SamplingMask(own.completion_ids, counts) if "logprobs" in turn.options else None
        return replace(own, sampling_mask=mask)

    rollout.sample, talk = sample, [user("Who?")]
    ask(rollout, [*talk, ask(rollout, talk, logprobs=True), user("Why?")])
    (own,) = samples_of(rollout)
    assert own.sampling_mask is None


# Requests


def test_calls_are_parsed_if_there_are_tools_to_call():
    rollout, _ = asked(lambda: CALL % 1)
    for body, calls in (({"tools": TOOLS}, 1), ({"tools": TOOLS, "tool_choice": "none"}, 0), ({}, 0)):
        message = ask(rollout, [user("Who?")], **body)
        assert len(message.get("tool_calls", ())) == calls
        assert message["content"] == (None if calls else CALL % 1)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"n": 2}, "n above 1"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"tools": TOOLS, "tool_choice": "required"}, "a forced tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "look"}}}, "a forced tool_choice"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": []}, "a request without messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]}, "text alone"),
        ({"messages": "go"}, "messages"),
        ({"max_tokens": 0}, "max_tokens below 1"),
        ({"stop": ""}, "an empty stop"),
        ({"stop": ["a", ""]}, "an empty stop"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"add_generation_prompt": False, "continue_final_message": True}, "continue_final_message"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"chat_template": "a"}, "chat_template"),
        ({"of_another_server": 1}, "of_another_server"),
        ({"tools": [{**TOOLS[0], "function": {"name": "a", "parameters": DEEP}}]}, "recursion"),
        ({"messages": [user("a" * 300)]}, "--max-model-len"),
    ],
)
def test_what_cannot_be_sampled_as_the_run_samples_is_refused(body, reason):
    rollout, policy = asked(lambda: "no", max_model_len=200)
    with pytest.raises(Refused, match=reason) as refused:
        asyncio.run(rollout.answer({"messages": [user("go")]} | body))
    assert refused.value.args[1] == 400
    assert not policy.turns


def test_limits_and_stops_are_each_requests_own():
    said = iter(["One, two. Three", "One, two.", "Four."])
    rollout, policy = asked(lambda: policy.tokenizer.encode(next(said)), max_tokens=12)
    talk = [user("Count.")]
    talk += [ask(rollout, talk, max_tokens="5", stop="zz", ignore_eos=False), user("On.")]
    assert not rollout.samples[-1].truncated  # by the run
    assert talk[1]["content"] == "One, "  # cut off: its end follows, unsampled
    talk += [ask(rollout, talk, stop=["two", "w"]), user("On!")]
    assert talk[3]["content"] == "One, t"
    assert not rollout.samples[-1].truncated
    ask(rollout, talk, max_completion_tokens=12.0)
    (own,) = assert_learned_as_sampled(rollout, policy)
    text = "One, <|im_end|>\n<|im_start|>user\nOn.<|im_end|>\n<|im_start|>assistant\n"
    assert policy.tokenizer.decode(own.completion_ids).startswith(f"{text}One, tw<|im_end|>")
    turns = [turn for turn, *_ in policy.turns]
    assert [turn.max_tokens for turn in turns] == [5, 12, 12]
    assert [turn.options.get("stop") for turn in turns] == [["zz"], ["two", "w"], None]
    assert [(turn.number, turn.index) for turn in turns] == [(3, 0), (3, 1), (3, 2)]


# The server, in a step's rollouts


class Engines(FakeEngines):
    """Stands for engines whose policy calls a tool once, if it is asked to, and then says how long its prompt is."""

    def __init__(self, tokenizer):
        super().__init__(str, str)
        self.tokenizer, self.asked = tokenizer, []

    def complete(self, number, prompt_ids, options):
        self.asked.append(options)
        text = self.tokenizer.decode(prompt_ids)
        said = '[look(at="here")]' if "Look" in text and "found" not in text else f"yes {len(text)}"
        said = "[add(numbers=[1, 2])]" if "Add" in text and "=" not in text else said
        ids = np.array([*self.tokenizer.encode(said), self.tokenizer.eos_token_id][: options["max_tokens"]])
        logprobs, versions = -np.arange(len(ids), dtype=np.float32), np.zeros(len(ids), np.int32)
        truncated = ids[-1] != self.tokenizer.eos_token_id
        return [Rollout(prompt_ids, ids, logprobs, truncated=bool(truncated), versions=versions)]


def prompts(split):
    return [{"prompt": [user("Look.")], "answer": i} for i in range(2)]


def by_answer(completions, agent, answer, **_):
    return [None if own is None else own["share"] + len(talk) for own, talk in zip(agent, completions, strict=True)]


@pytest.fixture
def serve(tmp_path):
    """A step's batch with this agent. Closes the server."""
    tokenizer, opened = chat_model(tmp_path), []

    def run(**flags):
        own = {"dataset": "test_agents:prompts", "group_size": 2, "prompts_per_step": 2, "max_tokens": 50}
        args = arguments_of(train_grpo, **own | {"tool_parser": "pythonic"} | flags)
        task = task_of(args).tokenized(str(tmp_path), 256)
        opened.append(Rollouts(Engines(tokenizer), task, args.sampling, 0, max_model_len=256))
        return opened[-1].take(1)

    yield run
    for rollouts_ in opened:
        rollouts_.__exit__()


async def with_tools(base_url, api_key, row):
    """An agent by the openai package, which streams every other answer."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        (model,) = [each.id async for each in await client.models.list()]
        talk, options = [*row["prompt"]], {"model": model, "tools": TOOLS, "temperature": 0.3}
        options |= {"logprobs": True, "store": False}
        answer = await client.chat.completions.create(messages=talk, **options)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert [token.logprob for token in choice.logprobs.content] == [float(-i) for i in range(18)]
        assert answer.usage.completion_tokens == 18
        (call,) = choice.message.tool_calls
        assert json.loads(call.function.arguments) == {"at": "here"}
        talk += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "found it"}]
        options["stream_options"] = {"include_usage": True}
        chunks = [own async for own in await client.chat.completions.create(messages=talk, stream=True, **options)]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert (chunks[-2].choices[0].finish_reason, chunks[-1].usage.completion_tokens) == ("stop", len(text) + 1)
        apart = await asyncio.gather(
            *(client.chat.completions.create(messages=[user(f"{i}?")], model=model) for i in range(3))
        )
        assert [own.choices[0].message.content for own in apart] == ["yes 3"] * 3
        with pytest.raises(openai.BadRequestError, match="the trainer does not take n above 1"):
            await client.chat.completions.create(messages=talk, model=model, n=3)
    async with openai.AsyncOpenAI(base_url=base_url.replace(api_key, "other"), api_key="other") as client:
        with pytest.raises(openai.AuthenticationError, match="no completion is being made with this key"):
            await client.models.list()
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}) as client:
        models = await client.get(base_url.replace(f"/{api_key}", "") + "/models")
        assert (models.json()["data"][0]["id"], models.headers["connection"]) == (model, "close")
        assert (await client.post(f"{base_url}/responses", json={})).status_code == 404
        for content in (b"5", b"[]", b"\xff", b"[" * 100000):
            assert (await client.post(f"{base_url}/chat/completions", content=content)).status_code == 400
    others = {"samples": 9, "failure_frequency": 9, "infinite": math.inf, "huge": 10**400}  # are no metrics
    return {"reward": row["answer"], "share": 0.5, "text": text} | others


def with_tools_of_its_own(row):
    return row | {"tools": TOOLS}


def test_tools_of_a_row_count_for_its_prompts_length(tmp_path):
    tokenizer = chat_model(tmp_path)
    tokenizer.chat_template = "{{ tools | tojson }}" + tokenizer.chat_template
    tokenizer.save_pretrained(tmp_path)
    own = {"dataset": "test_agents:prompts", "agent": "test_agents:with_tools", "tool_parser": "pythonic"}
    maps = None, "test_agents:with_tools_of_its_own"
    tasks = [task_of(arguments_of(train_grpo, **own, map=each)).tokenized(str(tmp_path), 1000) for each in maps]
    assert all(
        len(row.prompt_ids) + 20 < len(more.prompt_ids) for row, more in zip(*(t.rows for t in tasks), strict=True)
    )


def test_agent_by_the_openai_package(serve, capsys):
    batch = serve(agent="test_agents:with_tools", reward=["test_agents:by_answer"], reward_weights=[0.1, 2.0])
    for rollout, answer in zip(batch.rollouts, (1, 1, 0, 0), strict=True):
        assert "agent_error" not in rollout.extra, rollout.extra
        assert rollout.rewards == {"agent": answer, "by_answer": 1.5}  # of the last conversation, which has one turn
        assert rollout.reward == pytest.approx(2 * answer + 0.15)
        assert len(rollout.samples) == 4
        talk = rollout.rest[0]
        assert [message["role"] for message in talk.messages] == ["assistant", "tool", "assistant"]
        assert rollout.length == sum(own.mask.sum() for own in rollout.samples) == talk.mask.sum() + 3 * 6
    metrics = batch.metrics
    assert (metrics["agent/samples"], metrics["turns/mean"], metrics["agent/failure_frequency"]) == (4, 5, 0)
    assert (metrics["rewards/agent/mean"], metrics["agent/share"]) == (0.5, 0.5)
    assert not {"agent/infinite", "agent/huge"} & metrics.keys()
    assert capsys.readouterr().out.count("agents set temperature, which the run's own sampling replaces") == 1


GAVE_UP = threading.Event()


async def impatient(base_url, api_key, row):
    request = {"url": f"{base_url}/chat/completions", "json": {"messages": row["prompt"]}}
    async with httpx.AsyncClient() as client:
        for _ in range(2):
            with pytest.raises(httpx.ReadTimeout):
                await client.post(**request, timeout=httpx.Timeout(60, read=0.1))
        GAVE_UP.set()
        return {"reward": 1, "ids": [(await client.post(**request)).json()["id"] for _ in range(2)]}


def test_request_that_is_repeated_since_its_client_waits_no_longer_is_sampled_once():
    agent = agent_of(agent="test_agents:impatient")
    policy, server = Policy(agent.template.tokenizer, lambda: "Yes."), AgentServer(agent)

    async def sample(turn):
        await asyncio.to_thread(GAVE_UP.wait, 60)
        return await policy.sample(turn)

    own = AgentRollout(agent, sample, 0, 50, None)
    making = server.group(Row([user("Who?")], {}, ""), [own])
    (made,) = asyncio.run_coroutine_threadsafe(making, server.loop).result(60).rollouts
    server.close()
    assert made.extra["agent"]["ids"] == ["chatcmpl-0", "chatcmpl-1"]  # who has the answer gets another
    assert len(assert_learned_as_sampled(own, policy)) == 2


def sums(split):
    return [{"prompt": [user("Add.")], "answer": answer} for answer in ("yes", "no")]


def test_agent_of_the_documentation(serve, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("adder.py").write_text(code_of("docs/tasks.md")[-1])
    batch = serve(agent="adder:run", dataset="test_agents:sums")
    assert sorted(rollout.reward for rollout in batch.rollouts) == [0.0, 0.0, 1.0, 1.0]
    assert {message["content"] for message in batch.rollouts[0].messages} == {None, "3", "yes 33"}


def in_a_thread(base_url, api_key, row):
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        client.chat.completions.create(messages=row["prompt"], model="any")
    return 1.0


async def wrong(base_url, api_key, row):
    in_a_thread(base_url, api_key, row)
    return "a lot"


async def raises(base_url, api_key, row):
    if not row["answer"]:
        raise ValueError("no luck")
    return await asyncio.to_thread(in_a_thread, base_url, api_key, row)


async def never(base_url, api_key, row):
    await asyncio.to_thread(in_a_thread, base_url, api_key, row)
    await asyncio.sleep(60)


PROGRAM = """
import json, os, subprocess, sys, time, urllib.request
row, how = json.loads(sys.argv[1]), sys.argv[2]
body = json.dumps({"messages": row["prompt"]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
print(json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers))))
child = subprocess.Popen(["sleep", "60"])
open(f"child-{how}-{child.pid}", "w")
if how == "crash":
    sys.exit("gone wrong")
if how == "sleep":
    time.sleep(60)
print("text" if how == "text" else json.dumps({"reward": row["answer"] / 2, "more": how}) if how == "dict" else 0.25)
print()
"""


@pytest.mark.parametrize(
    ("flags", "rewards", "error"),
    [
        ({"agent": "in_a_thread"}, [1.0] * 4, None),
        ({"agent": "wrong"}, [None] * 4, "--agent test_agents:wrong returned 'a lot', and not a finite number, None,"),
        ({"agent": "raises"}, [1.0, 1.0, None, None], "raised ValueError: no luck (test_agents.py, line"),
        ({"agent": "never"}, [None] * 4, "took longer than 10 s (the setting agent_timeout)"),
        ({"agent_command": "float"}, [0.25] * 4, None),
        ({"agent_command": "dict"}, [0.5, 0.5, 0.0, 0.0], None),
        ({"agent_command": "text"}, [None] * 4, "its last line is no reward, but ['text']"),
        ({"agent_command": "crash"}, [None] * 4, "ended with status 1: gone wrong"),
        ({"agent_command": "sleep"}, [None] * 4, "took longer than 10 s (the setting agent_timeout)"),
    ],
)
def test_what_an_agent_returns_is_its_reward_and_a_failure_is_none(
    serve, tmp_path, monkeypatch, capsys, flags, rewards, error
):
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(PROGRAM)
    ((flag, how),) = flags.items()
    if flag == "agent_command":
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # where nobody listens
    value = f"test_agents:{how}" if flag == "agent" else f"'{sys.executable}' program.py {{row}} {how}"
    batch = serve(**{flag: value, "agent_timeout": 10.0 if how in ("never", "sleep") else 60.0})
    assert [rollout.reward for rollout in batch.rollouts] == rewards
    failed = rewards.count(None)
    assert batch.metrics["agent/failure_frequency"] == failed / 4
    assert [error in own.extra.get("agent_error", "") for own in batch.rollouts if error] == [
        r is None for r in rewards if error
    ]
    assert capsys.readouterr().out.count("a completion has no reward: ") == bool(failed)
    assert [rollout.length for rollout in batch.rollouts if rollout.reward is not None] == [18] * (4 - failed)
    children = [int(file.name.rpartition("-")[2]) for file in tmp_path.glob("child-*")]
    assert len(children) == (4 if flag == "agent_command" else 0)
    deadline = time.monotonic() + 10
    while any(map(is_alive, children)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def silent(base_url, api_key, row):
    raise ValueError("no luck")


def test_step_without_a_token_is_an_error(serve):
    with pytest.raises(TaskError, match=r"no agent has asked for a completion: .* raised ValueError: no luck"):
        serve(agent="test_agents:silent")


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ({"agent": "test_agents:user"}, r"no agent has asked for a completion: .* raised TypeError: user\(\) got"),
        ({"agent_command": "no-such-program {row}"}, "ended with status 127: .*no-such-program: not found"),
        ({"agent_command": "python '"}, "raised ValueError: No closing quotation"),
        ({"agent": "test_agents:nothing", "reward": ["test_agents:agent"]}, "the run has a reward of this name"),
        ({"agent": "test_agents:nothing", "dataset": None}, "--dataset is missing: an agent gets a row of it, or of"),
    ],
)
def test_agent_that_cannot_be_called_is_refused(serve, flags, error):
    with pytest.raises(TaskError, match=error):
        serve(**flags)


def agent(completions, **_):
    return [0.0] * len(completions)


# One rollout, several samples


# In a second update, gspo's ratio is each sample's own.
@pytest.mark.parametrize(("loss", "updates"), [(own, n) for own in LOSSES for n in (1, 2) if (own, n) != ("gspo", 2)])
def test_splitting_a_conversation_into_samples_leaves_its_gradient(model, loss, updates):
    results = []
    for splits in (False, True):
        learner = GRPOLearner(model, config(loss=loss, num_mini_batches=updates, kl_coef=0.1, max_grad_norm=1e9), CPU)
        use_sgd(learner)
        batch = [replace(own, completion_ids=[*own.completion_ids] * 2, logprobs=[]) for own in rollouts(learner)]
        logprobs = learner.model.score_all(batch)[0]
        batch = [
            replace(own, logprobs=row[: len(own.completion_ids)].tolist(), versions=[0] * len(own.completion_ids))
            for own, row in zip(batch, logprobs, strict=True)
        ]
        batch = [split(own) if splits else own for own in batch]
        metrics = learner.learn(batch)
        assert metrics["logprobs/mismatch"] < 1e-6
        results.append((metrics["advantage"], numbers(metrics), vector_of(learner)))
    (advantages, before, weights), (same, after, others) = results
    assert (advantages, len(same)) == (same, 4)
    assert after == pytest.approx(before, rel=1e-4, abs=1e-6)
    torch.testing.assert_close(weights, others, rtol=1e-4, atol=1e-5)


class Teachers:
    """Stands for a group of one teacher, with these scores of all samples."""

    def __init__(self, scores):
        self.scores = scores

    def __len__(self):
        return 1

    def call(self, phase, method, each):
        ((samples,),) = each
        assert [len(completion_ids) for _, completion_ids in samples] == [*map(len, self.scores)]
        return [self.scores]


def test_distillation_scores_each_sample(model):
    results = []
    for splits in (False, True):
        args = arguments_of(train_distill, group_size=2, learning_rate=1.0, max_grad_norm=1e9, reward_coef=0.5)
        learner = DistillLearner(model, args, CPU)
        use_sgd(learner)
        batch = [split(own) if splits else own for own in rollouts(learner)]
        scores = [[own.logprobs[i] - 0.1 * i for i in range(len(own.logprobs))] for own in rollouts(learner)]
        parts = [np.split(each, [len(each) // 3] * splits)[::-1] for each in scores]  # the last sample is the first
        teachers = Teachers([own for part in parts for own in part])
        metrics = learner.learn(teacher.score(teachers, Batch([Group(None, batch)])).rollouts)
        results.append((metrics["distill/reverse_kl"], vector_of(learner)))
    (before, weights), (after, others) = results
    assert after == pytest.approx(before)
    torch.testing.assert_close(weights, others, rtol=1e-4, atol=1e-5)


def learn_samples(folder, model):
    learner = GRPOLearner(model, config(loss="grpo", num_mini_batches=2, max_grad_norm=0.01), CPU)
    use_sgd(learner)
    batch = [split(own) if len(own.completion_ids) > 3 else own for own in rollouts(learner)]
    metrics, weights = numbers(learner.learn(batch)), weights_of(learner)
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save([([metrics], weights)], folder / f"results-{learner.model.ranks}.pt")


@pytest.mark.slow
def test_ranks_learn_from_samples_as_one_does(model, tmp_path):
    learn_samples(tmp_path, model)
    on_ranks(2, learn_samples, tmp_path, model)
    assert_same([own for ranks in (1, 2) for own in torch.load(tmp_path / f"results-{ranks}.pt")])


def split(own):
    """The same tokens in two samples."""
    half = len(own.completion_ids) // 3
    own = replace(own, versions=[0] * len(own.completion_ids))
    first = replace(own, completion_ids=own.completion_ids[:half], logprobs=own.logprobs[:half], versions=[0] * half)
    ids = [*own.prompt_ids, *own.completion_ids[:half]]
    last = replace(own, prompt_ids=ids, completion_ids=own.completion_ids[half:], logprobs=own.logprobs[half:])
    return replace(last, versions=last.versions[half:], rest=[first])


# Whole runs

DRAWERS = """
import asyncio, json, os, sys

import openai

from trainer.tasks import lookup

DEFAULTS = {k: v for k, v in lookup.DEFAULTS.items() if k not in ("environment", "reward")}
PARAMETERS = {"type": "object", "properties": {"drawer": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}]


async def run(base_url=None, api_key=None, row=None):
    drawer, talk = lookup.Drawers(), [*row["prompt"]]
    drawer.reset(**row)
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(3):
            answer = await client.chat.completions.create(model="any", messages=talk, tools=TOOLS)
            message = answer.choices[0].message
            talk.append(message)
            for call in message.tool_calls or ():
                try:
                    content = drawer.look(**json.loads(call.function.arguments))
                except (TypeError, ValueError) as error:
                    content = str(error)
                talk.append({"role": "tool", "tool_call_id": call.id, "content": content})
            if not message.tool_calls:
                break
    return float(message.content == row["answer"])


if __name__ == "__main__":
    print(asyncio.run(run(row=json.loads(sys.argv[1]))))
"""


AHEAD = pytest.param("--max-staleness 2 --topology separate --trainers 2", marks=pytest.mark.long)


@cpu_only
@pytest.mark.parametrize("ahead", [pytest.param("", marks=pytest.mark.slow), AHEAD])
def test_model_learns_by_an_agent_to_call_the_tool_that_knows_the_answer(script, tmp_path, ahead):
    (tmp_path / "drawers.py").write_text(DRAWERS)
    flags = f"--task drawers --agent drawers:run --output run --steps 8 --eval-every 8 {ahead}"
    text = script("train_grpo.py", *flags.split()).finish()
    before, *steps = metrics_of(tmp_path / "run")
    assert before["eval/reward"] < 0.2, text
    assert steps[-1]["eval/reward"] > 0.9, text
    assert steps[-1]["eval/turns/mean"] > 1.9
    assert all(row["agent/failure_frequency"] == 0 and row["agent/samples"] == 1 for row in steps)
    assert all(row["logprobs/mismatch"] < 1e-5 for row in steps)


@cpu_only
@pytest.mark.long
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_command_is_an_agent_that_no_trainer_leaves_behind(script, tmp_path, end):
    """Three steps, and a fourth in whose midst the trainer ends."""
    chat_model(tmp_path / "model")
    (tmp_path / "program.py").write_text(PROGRAM.replace('how == "sleep"', "len(os.listdir()) > LEAST"))
    least = len([*tmp_path.iterdir()]) + 1 + 3 * 4  # a file for each call, and the run's folder
    (tmp_path / "program.py").write_text((tmp_path / "program.py").read_text().replace("LEAST", str(least)))
    flags = (
        "--model model --dataset rows.jsonl --group-size 2 --prompts-per-step 2 --output run --tensor-parallel-size 1"
    )
    write_lines(tmp_path / "rows.jsonl", *prompts("train"))
    run = script("train_grpo.py", *flags.split(), "--agent-command", f"{sys.executable} program.py {{row}} dict")
    run.wait_for_step(tmp_path / "run", 3)
    deadline = time.monotonic() + 60
    while len(children := [*tmp_path.glob("child-*")]) < 4 * 4:
        assert time.monotonic() < deadline, run.text()
        time.sleep(0.05)
    agents = [p for p in run.descendants() if "program.py" in title_of(p) or title_of(p) == "sleep 60"]
    assert len(agents) > 4
    run.process.send_signal(end)
    run.process.wait(60)
    assert all(row["logprobs/mismatch"] < 1e-5 for row in metrics_of(tmp_path / "run"))
    deadline = time.monotonic() + 5
    while left := [p for p in agents if is_alive(p)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert len(children) == 4 * 4
