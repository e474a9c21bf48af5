"""Tools and environments: what a conversation's tokens are, which of them are learned from, and what tools may do.

pytest tests/test_tools.py
"""

import asyncio
import functools
import json
import re
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import PIL.Image
import pytest
import torch
import trl
from conftest import ROOT, arguments_of, code_of, cpu_only, metrics_of, task_of
from fakes import Engines as FakeEngines
from learners import CPU, LOSSES, config, numbers, rollouts, use_sgd, vector_of
from transformers import AutoTokenizer
from vllm.tool_parsers import ToolParser, ToolParserManager

import train_grpo
import train_ppo
from trainer.errors import MismatchError, TaskError
from trainer.learning.config import SamplingConfig
from trainer.learning.grpo import GRPOLearner
from trainer.learning.policy import Proof
from trainer.learning.rollout import Rollout, SamplingMask
from trainer.rollouts import sampling
from trainer.rollouts.conversation import Turn
from trainer.rollouts.evaluation import evaluate
from trainer.rollouts.rollouts import Rollouts
from trainer.rollouts.sampling import request_seed, sampling_options
from trainer.run.arguments import parse
from trainer.tasks import lookup
from trainer.tasks.chat_template import ChatTemplate
from trainer.tasks.task import TaskArguments, load_task
from trainer.tasks.tiny_model import build_tiny_model, byte_tokenizer
from trainer.tasks.tools import ToolArguments

# Which tokens are learned from


def with_answers(learner, at_tools=0.0):
    """Rollouts whose tokens 2 and 3 a tool has said, with the learner's own log-probabilities at the others and
    `at_tools` there."""
    drafts = []
    for own in rollouts(learner):
        ids = [*own.completion_ids[:2], 65, 66, *own.completion_ids[2:]]
        drafts.append(
            replace(own, completion_ids=ids, sampled=[i not in (2, 3) or len(ids) < 4 for i in range(len(ids))])
        )
    with torch.no_grad():
        scores, _ = learner.model.score(drafts, max(len(draft.completion_ids) for draft in drafts))
    return [
        replace(draft, logprobs=np.where(draft.mask, row[: len(draft.mask)], at_tools).tolist())
        for draft, row in zip(drafts, scores, strict=True)
    ]


def test_only_sampled_tokens_have_log_probabilities(model):
    learner = GRPOLearner(model, config(), CPU)
    ids = [5, 6, 7, 8, 9]
    masked = Rollout(ids[:2], ids[2:], [], 0.0, sampled=[True, False, True])
    with torch.no_grad():
        logits = learner.model.module(torch.tensor([ids])).logits[0]
        logprobs, entropies = learner.model.score([masked], 4, entropy=True)
    expected = logits.log_softmax(-1)
    torch.testing.assert_close(
        logprobs[0], torch.stack([expected[1, 7], torch.tensor(0.0), expected[3, 9], torch.tensor(0.0)])
    )
    assert (entropies[0] != 0).tolist() == [True, False, True, False]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("updates", [1, 2])
def test_tokens_of_tools_weigh_nothing(model, loss, updates):
    """Whatever stands for their log-probabilities: the same metrics, of which lengths count sampled tokens, and the
    same weights afterwards."""
    results = []
    for at_tools in (0.0, -7.0):
        learner = GRPOLearner(model, config(loss=loss, kl_coef=0.1, num_mini_batches=updates), CPU)
        use_sgd(learner)
        batch = with_answers(learner, at_tools)
        metrics = learner.learn(batch)
        results.append((metrics["advantage"], numbers(metrics), vector_of(learner)))
        assert metrics["logprobs/mismatch"] < 1e-6
        assert metrics["completions/mean_length"] == sum(sum(own.sampled) for own in batch) / len(batch)
    (advantages, before, weights), (same, after, others) = results
    assert advantages == same
    assert before == pytest.approx(after, abs=1e-7)
    torch.testing.assert_close(weights, others)


def test_loss_of_a_conversation_is_its_sampled_tokens_mean(model):
    learner = GRPOLearner(model, config(loss="grpo", max_grad_norm=1e9), CPU)
    use_sgd(learner)
    batch, before = with_answers(learner)[:2], vector_of(learner)
    batch = [replace(batch[0], reward=1.0), replace(batch[1], reward=0.0)]
    learner.learn(batch)
    moved = vector_of(learner)

    reference = GRPOLearner(model, config(), CPU)
    loss = 0.0
    for own, advantage in zip(batch, (1, -1), strict=True):
        ids, begin = torch.tensor(own.prompt_ids + own.completion_ids), len(own.prompt_ids)
        logprobs = reference.model.module(ids[None]).logits[0].log_softmax(-1)
        sampled = [logprobs[begin + i - 1, ids[begin + i]] for i, counts in enumerate(own.sampled) if counts]
        loss -= advantage * 0.5**0.5 * sum(sampled) / len(sampled) / len(batch)  # 0.5 ** 0.5: over the deviation
    loss.backward()
    gradient = torch.nn.utils.parameters_to_vector([p.grad for p in reference.parameters])
    torch.testing.assert_close(moved - before, -gradient, atol=1e-5, rtol=1e-3)


def test_wrong_token_between_turns_is_a_mismatch(model):
    learner = GRPOLearner(model, config(), CPU, proof=Proof(1e-5))
    batch = [own for own in with_answers(learner) if len(own.completion_ids) > 4]
    assert learner.mismatch(batch) < 1e-6
    ids = list(batch[0].completion_ids)
    ids[3] += 1  # of the tool's answer: what was sampled after it does not have these log-probabilities
    with pytest.raises(MismatchError):
        learner.mismatch([replace(batch[0], completion_ids=ids), *batch[1:]])


def test_tokens_of_older_weights_and_of_tools_prove_nothing(model):
    learner = GRPOLearner(model, config(), CPU, proof=Proof(1e-5))
    own = next(own for own in with_answers(learner) if len(own.completion_ids) > 4)
    versions = [0] * len(own.completion_ids)
    shifted = np.array(own.logprobs) + np.where(own.mask, 0, 3.0)
    assert learner.mismatch([replace(own, logprobs=shifted, versions=versions)]) < 1e-6
    versions = [0 if not counts else -1 for counts in own.sampled]
    with pytest.raises(MismatchError, match="no token comes from the weights"):
        learner.mismatch([replace(own, versions=versions)])


# Conversations, with a policy that is a function


PLACES = {}  # of requests in a run, by their seeds


class Engines(FakeEngines):
    """Stands for engines whose policy says `says(text, number)` after a prompt of this text, as tokens of its own."""

    def __init__(self, tokenizer, says, count=2, version=0):
        super().__init__(*[says] * count, version=version)
        self.tokenizer, self.says, self.turns, self.seeds = tokenizer, says, [], []

    def complete(self, engine, prompt_ids, options) -> list[Rollout]:
        *_, index, number = PLACES[options["seed"]]
        turn = Turn(prompt_ids, number, index, options["max_tokens"])
        self.turns.append(turn)
        self.seeds.append(options["seed"])
        said = self.says(self.tokenizer.decode(prompt_ids), number)
        ids = said if isinstance(said, list) else self.tokenizer.encode(f"{said}</s>")
        cut = np.array(ids[: turn.max_tokens])
        logprobs, versions = np.full(len(cut), -1.0 - turn.index), np.full(len(cut), self.version)
        own = {"versions": versions, "sampling_mask": SamplingMask(cut, np.ones(len(cut), np.int32))}
        return [Rollout(prompt_ids, cut, logprobs, truncated=len(cut) < len(ids), **own)]


def shout(text: str, times: int = 1) -> str:
    """
    Say it loud.

    Args:
        text: What to say.
        times: How often.
    """
    return text.upper() * times


async def whisper(text: str) -> str:
    """
    Say it softly.

    Args:
        text: What to say.
    """
    await asyncio.sleep(0.01)
    return text.lower()


def sing(text: str) -> str:
    """
    Say it with a melody.

    Args:
        text: What to sing.
    """
    return whisper(f"~{text}~")  # a coroutine


class Wrapped:
    """A function, as an object that is called like it."""

    def __init__(self, function):
        functools.update_wrapper(self, function)

    async def __call__(self, **arguments):
        return await self.__wrapped__(**arguments)


hum = Wrapped(whisper)


def other_shouts():
    def shout(text: str) -> str:
        """
        Say it even louder.

        Args:
            text: What to say.
        """

    return shout


other_shout = other_shouts()


def fail(kind: str) -> str:
    """
    Go wrong.

    Args:
        kind: How.
    """
    if kind == "exit":
        sys.exit("gone")
    if kind == "sleep":
        time.sleep(2)
    raise {"stop": StopIteration("stopped"), "value": ValueError("no good")}[kind]


async def cancel() -> str:
    """
    Give up.
    """
    raise asyncio.CancelledError


async def leave() -> str:
    """
    Go.
    """
    sys.exit("gone")


async def sleep() -> str:
    """
    Answer late.
    """
    await asyncio.sleep(60)


class Counter:
    """As TRL's documentation has it: state that tools change. Its connection belongs to one thread."""

    made = 0

    def __init__(self):
        type(self).made += 1
        self.database = sqlite3.connect(":memory:")
        self.database.execute("create table numbers (number integer)")

    @property
    def broken(self):
        raise AssertionError("nobody asked for this")

    def reset(self, **row) -> str | None:
        self.row = row
        self.database.execute("delete from numbers")
        return row.get("says")

    def add(self, number: int) -> str:
        """
        Add a number.

        Args:
            number: The number.
        """
        self.database.execute("insert into numbers values (?)", (number,))
        return f"sum {self.get_reward():.0f}"

    def wait(self) -> str:
        """
        Take too long.
        """
        time.sleep(3)

    def _hidden(self):
        raise AssertionError

    def get_reward(self) -> float:
        return float(self.database.execute("select coalesce(sum(number), 0) from numbers").fetchone()[0])


class Silent:
    """An environment without a reward."""

    def reset(self, **row):
        assert "environment" not in row

    def hum(self) -> str:
        """
        Hum.
        """
        return "mm"


Loud = type("Loud", (Silent,), {"shout": other_shout})
SAME_NAME = "the tools test_tools:shout and test_tools:other_shouts.<locals>.shout have the same name"
BOTH = {"counter": Counter, "silent": Silent}
NAMESAKES = {"counter": Counter, "other": type("Counter", (Counter,), {})}
MESSAGES = [{"role": "user", "content": "go"}]


def prompts(split):
    return [{"prompt": MESSAGES, "number": i} for i in range(2)]


def none(completions, **_):
    return [0.0] * len(completions)


def chat_model(folder):
    """Writes the built-in model with a chat template. Returns its tokenizer."""
    build_tiny_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = lookup.TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.fixture
def folder(tmp_path):
    chat_model(tmp_path)
    return tmp_path


@pytest.fixture
def converse(folder, monkeypatch):
    """Completions, with rewards, of a step's conversations with a policy that is a function. `made` has the rest."""
    made = SimpleNamespace()

    def noted_seed(*place):
        PLACES[request_seed(*place)] = place
        return request_seed(*place)

    monkeypatch.setattr(sampling, "request_seed", noted_seed)

    def run(says, **flags):
        own = {"dataset": "test_tools:prompts", "reward": ["test_tools:none"], "group_size": 2, "prompts_per_step": 2}
        own |= {"max_tokens": 100, "tool_parser": "pythonic"}
        made.args = arguments_of(train_grpo, **own | flags)
        if not hasattr(made, "task"):
            made.task = task_of(made.args).tokenized(str(folder), 256)
        made.tokenizer = made.task.tools.template.tokenizer
        made.engines = Engines(made.tokenizer, says)
        made.rollouts = Rollouts(made.engines, made.task, made.args.sampling, 0, max_model_len=256)
        made.batch = made.rollouts.take(1)
        return made.batch.rollouts

    run.made = made
    return run


def call_once(call):
    """A policy that makes this call, and is done when it has an answer."""
    return lambda text, _: "done" if call in text else call


def answers(rollout):
    return [message["content"] for message in rollout.messages if message["role"] == "tool"]


def test_turns_are_sampled_tokens_and_those_of_answers(converse):
    def says(text, number):
        if "=" in text:
            return "fine"
        # "</s>" as four bytes, which nobody makes of a text: its text becomes one token
        return (
            [*converse.made.tokenizer.encode("</s>", split_special_tokens=True), 1] if number else '[shout(text="a")]'
        )

    first, second, *_ = converse(says, tools=["test_tools:shout", "test_tools:whisper"])
    tokenizer, turns = converse.made.tokenizer, converse.made.engines.turns
    assert tokenizer.decode(first.prompt_ids) == "go:"
    assert tokenizer.decode(first.completion_ids) == '[shout(text="a")]</s>=A:fine</s>'
    assert first.messages == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "shout", "arguments": {"text": "a"}}}],
        },
        {"role": "tool", "name": "shout", "content": "A"},
        {"role": "assistant", "content": "fine"},
    ]
    sampled = [18, 3, 5]  # tokens of the call, of the answer, of the rest
    assert first.mask.tolist() == [True] * 18 + [False] * 3 + [True] * 5
    assert first.logprobs.tolist() == [-1.0] * 18 + [0.0] * 3 + [-2.0] * 5
    assert first.sampling_mask.counts.tolist() == [1] * 18 + [0] * 3 + [1] * 5
    assert first.sampling_mask.token_ids.tolist() == first.completion_ids[first.mask].tolist()
    assert first.length == sampled[0] + sampled[2]
    assert second.completion_ids.tolist() == [*tokenizer.encode("</s>", split_special_tokens=True), 1]
    assert second.messages == [{"role": "assistant", "content": "</s>"}]
    later = [turn for turn in turns if turn.index]
    assert [turn.prompt_ids for turn in later] == [[*first.prompt_ids, *first.completion_ids[:21]]]
    assert [turn.max_tokens for turn in later] == [100 - 21]
    assert converse.made.batch.metrics["tools/call_frequency"] == 1 / 4
    assert converse.made.batch.metrics["tools/failure_frequency"] == 0
    assert converse.made.batch.metrics["turns/mean"] == 5 / 4
    assert not first.truncated


def test_several_calls_of_a_turn_are_answered_in_their_order(converse):
    says = call_once('[whisper(text="A"), shout(text="b", times=2)]')
    first, *_ = converse(says, tools=["test_tools:shout", "test_tools:whisper"])
    assert answers(first) == ["a", "BB"]
    assert converse.made.tokenizer.decode(first.completion_ids).endswith("</s>=a=BB:done</s>")


@pytest.mark.parametrize(("tool", "answer"), [("whisper", "a"), ("hum", "a"), ("sing", "~a~")])
def test_coroutines_are_awaited_whatever_makes_them(converse, tool, answer):
    called = "sing" if tool == "sing" else "whisper"
    first, *_ = converse(call_once(f'[{called}(text="A")]'), tools=[f"test_tools:{tool}"])
    assert answers(first) == [answer]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("[unknown(a=1)]", "Tool unknown not found."),
        ("[shout(loud=1)]", "shout() got an unexpected keyword argument 'loud'"),
        ('[fail(kind="value")]', "no good"),
        ('[fail(kind="stop")]', "StopIteration: stopped"),
        ('[fail(kind="exit")]', "SystemExit: gone"),
        ('[fail(kind="sleep")]', "no answer within 0.2 s"),
        ("[sleep()]", "no answer within 0.2 s"),
        ("[cancel()]", "cancelled"),
        ("[leave()]", "SystemExit: gone"),
    ],
)
def test_tool_that_fails_answers_its_error(converse, call, error):
    tools = [f"test_tools:{name}" for name in ("shout", "fail", "sleep", "cancel", "leave")]
    rollouts = converse(call_once(call), tools=tools, tool_timeout=0.2 if "sleep" in call else 20, max_tokens=150)
    assert answers(rollouts[0]) == [str({"error": error})]
    assert {rollout.messages[-1]["content"] for rollout in rollouts} == {"done"}
    assert converse.made.batch.metrics["tools/failure_frequency"] == 1


class Malformed(ToolParser):
    """Says that tools are called and finds no call, as vLLM's ernie45 and deepseek_v3 do when they cannot read it."""

    def extract_tool_calls(self, model_output, request):
        return SimpleNamespace(tools_called=True, tool_calls=[], content=None)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        *(("pythonic", text) for text in ("[shout(text=]", "shout", "[1]", "[shout(text=open)]")),
        ("internlm", "<|action_start|><|plugin|>[shout]"),  # vLLM's parser raises
        ("malformed", "go"),
    ],
)
def test_what_is_no_call_is_text_and_ends_the_conversation(converse, monkeypatch, parser, text):
    monkeypatch.setitem(ToolParserManager.tool_parsers, "malformed", Malformed)
    first, *_ = converse(lambda *_: text, tools=["test_tools:shout"], tool_parser=parser)
    assert first.messages == [{"role": "assistant", "content": text}]


class Deep(ToolParser):
    """Finds a call whose arguments are nested as deeply as a policy that repeats itself may nest them."""

    def extract_tool_calls(self, model_output, request):
        function = SimpleNamespace(name="shout", arguments="[" * 5000)
        return SimpleNamespace(tools_called=True, tool_calls=[SimpleNamespace(function=function)], content=None)


def test_arguments_that_json_cannot_read_fail_the_call(converse, monkeypatch):
    monkeypatch.setitem(ToolParserManager.tool_parsers, "deep", Deep)
    first, *_ = converse(lambda *_: "go", tools=["test_tools:shout"], tool_parser="deep")
    assert first.truncated  # by the error's text
    assert converse.made.batch.metrics["tools/failure_frequency"] == 1


def test_reasoning_is_no_content_and_calls_no_tools(converse):
    call = '<tool_call>{"name": "shout", "arguments": {"text": "%s"}}</tool_call>'
    said = (
        f"<think>\nPerhaps {call % 'a'}.\n</think>\n\nSo: {call % 'b'}",
        "Hm.</think>It said B.",
        "<think>\n\n</think>\n\nB",
    )

    def says(text, number):
        return said[1 + number % 2] if "=B" in text else said[0]

    first, second, *_ = converse(says, tools=["test_tools:shout"], tool_parser="hermes", max_tokens=220)
    turn, answer, end = first.messages
    assert (turn["reasoning_content"], turn["content"]) == (f"Perhaps {call % 'a'}.", "So: ")
    assert answer["content"] == "B"
    assert end == {"role": "assistant", "reasoning_content": "Hm.", "content": "It said B."}
    assert second.messages[-1] == {"role": "assistant", "content": "B"}
    assert converse.made.tokenizer.decode(first.completion_ids) == f"{said[0]}</s>=B:{said[1]}</s>"


def parts() -> list[dict]:
    """
    Answer in parts.
    """
    return [{"type": "text", "text": "one, "}, {"type": "text", "text": "two"}]


def halves() -> str:
    """
    Answer with half an emoji.
    """
    return "a\ud83d"


class Mute(Exception):
    """It has no text."""

    def __str__(self):
        raise self


def textless(kind: str) -> object:
    """
    Answer what cannot be written.

    Args:
        kind: What it is.
    """
    if kind == "error":
        raise Mute
    nested = []
    for _ in range(100_000 if kind == "deep" else 0):
        nested = [nested]
    return {"long": 9**9999, "deep": nested, "mute": Mute(), "part": [{"type": "text", "text": 1}]}[kind]


@pytest.mark.parametrize(
    ("kind", "error"),
    [("long", "ValueError"), ("deep", "RecursionError"), ("mute", "Mute"), ("part", "TypeError"), ("error", "Mute")],
)
def test_answer_that_cannot_become_text_is_the_tools_error(converse, kind, error):
    rollouts = converse(call_once(f'[textless(kind="{kind}")]'), tools=["test_tools:textless"], max_tokens=150)
    assert answers(rollouts[0]) == [str({"error": f"the answer cannot become text: {error}"})]
    assert {rollout.messages[-1]["content"] for rollout in rollouts} == {"done"}
    assert converse.made.batch.metrics["tools/failure_frequency"] == 1


@pytest.mark.parametrize(("tool", "answer"), [("parts", "one, two"), ("halves", "a?")])
def test_answers_are_text_that_any_template_takes(converse, tool, answer):
    first, *_ = converse(call_once(f"[{tool}()]"), tools=[f"test_tools:{tool}"])
    assert answers(first) == [answer]
    assert f"={answer}:" in converse.made.tokenizer.decode(first.completion_ids)


def test_half_a_character_in_a_tools_name_ends_no_run(converse):
    says = call_once(r'<tool_call>{"name": "a\ud83d", "arguments": {}}</tool_call>')
    first, *_ = converse(says, tools=["test_tools:shout"], tool_parser="hermes", max_tokens=150)
    assert [message.get("name") for message in first.messages] == [None, "a?", None]


@pytest.mark.parametrize(("limit", "turns"), [(0, 1), (2, 3), (None, 4)])
def test_tools_are_called_in_as_many_turns_as_allowed(converse, limit, turns):
    first, *_ = converse(
        lambda *_: '[shout(text="a")]', tools=["test_tools:shout"], max_tool_iterations=limit, max_tokens=80
    )
    assert [message["role"] for message in first.messages] == ["assistant", "tool"] * (turns - 1) + ["assistant"]
    assert first.truncated == (limit is None)  # 3 x 21 tokens, and the call in the last 17 is cut off


def test_answer_that_does_not_fit_is_rolled_back(converse):
    def after(max_tokens):
        del converse.made.__dict__["task"]
        first, *_ = converse(call_once('[shout(text="a")]'), tools=["test_tools:shout"], max_tokens=max_tokens)
        return [message["role"] for message in first.messages], len(first.completion_ids), first.truncated

    converse.made.task = None
    assert after(20) == (["assistant"], 18, True)
    assert after(21) == (["assistant", "tool"], 21, True)  # no token is left to sample, as in TRL
    assert after(22) == (["assistant", "tool", "assistant"], 22, True)
    assert after(26) == (["assistant", "tool", "assistant"], 26, False)


def test_special_tokens_in_a_tools_text_are_text(converse):
    first, *_ = converse(call_once('[shout(text="x</S>y", times=1)]'), tools=["test_tools:whisper", "test_tools:shout"])
    first, *_ = converse(call_once('[whisper(text="x</S>y")]'))
    answer = first.completion_ids[~first.mask]
    assert converse.made.tokenizer.decode(answer) == "=x</s>y:"
    assert converse.made.tokenizer.eos_token_id not in answer.tolist()


def test_text_that_looks_like_the_mark_of_a_special_token_is_text(converse):
    converse(lambda *_: "end", tools=["test_tools:shout"])
    template = converse.made.task.tools.template
    for number in (0, 99):
        ids = template.answer_ids([{"role": "tool", "name": "f", "content": f"a\ue000{number}\ue001b"}], 0)
        assert template.tokenizer.decode(ids).count(f"a{number}b") == 1


def test_each_completion_has_an_environment_that_is_used_again(converse):
    def says(text, number):
        return [f"[add(number={number})]", f"[add(number={10 * number})]", "end"][text.count("=sum")]

    before = Counter.made
    for step in range(2):
        rollouts = converse(says, environment="test_tools:Counter")
        assert [answers(own)[-1] for own in rollouts] == ["sum 0", "sum 11", "sum 22", "sum 33"], step
        assert [own.rewards for own in rollouts] == [{"none": 0.0, "Counter": 11.0 * i} for i in range(4)]
        assert [own.reward for own in rollouts] == [0, 11, 22, 33]
    assert Counter.made - before == 4
    (tools,) = [[schema["function"]["name"] for schema in own] for own in converse.made.task.tools.schemas.values()]
    assert tools == ["add", "wait"]
    made = converse.made
    evaluated = made.rollouts.complete(made.task.draw(1), made.args.sampling)
    assert [answers(own)[-1] for own in evaluated.rollouts] == ["sum 0", "sum 11", "sum 22", "sum 33"]
    assert Counter.made - before == 8  # an evaluation has its own


def held_out(split):
    return [{"prompt": MESSAGES, "number": 100 + i} for i in range(7)]


@pytest.mark.parametrize("samples", [1, 2])
def test_evaluation_has_no_more_environments_than_a_step(converse, samples):
    def says(text, _):
        return "end" if "=sum" in text else "[add(number=1)]"

    flags = {"eval_dataset": "test_tools:held_out", "eval_every": 1, "eval_samples": samples}
    converse(says, environment="test_tools:Counter", **flags)
    before, made = Counter.made, converse.made
    metrics = evaluate(made.rollouts, 0)
    assert Counter.made - before == 4  # for 4 / samples of the seven prompts
    assert (metrics["eval/reward"], metrics["eval/turns/mean"]) == (1, 2)
    assert len(made.engines.turns) == 2 * (4 + 7 * samples)
    seeds = made.engines.seeds[2 * 4 :]
    assert len(set(seeds)) == len(seeds)


def test_resets_text_is_appended_and_rewards_see_it(converse, monkeypatch):
    seen = []
    monkeypatch.setattr(
        sys.modules[__name__],
        "none",
        lambda prompts, completions, environments, completion_ids, **_: (
            seen.append((prompts, completions, environments, completion_ids)) or [0.0] * 2
        ),
    )
    monkeypatch.setattr(
        sys.modules[__name__], "prompts", lambda split: [{"prompt": MESSAGES, "says": " on", "number": 7}]
    )
    first, _, third, _ = converse(call_once("[add(number=5)]"), environment="test_tools:Counter")
    assert converse.made.tokenizer.decode(first.prompt_ids) == "go on:"
    (prompts_seen, completions, environments, ids), _ = seen
    assert prompts_seen == [[{"role": "user", "content": "go on"}]] * 2
    assert completions[0] == first.messages
    assert [own.row for own in environments] == [{"prompt": MESSAGES, "says": " on", "number": 7}] * 2
    assert ids[0] == first.completion_ids.tolist()
    assert MESSAGES == [{"role": "user", "content": "go"}]
    assert json.loads(json.dumps(third.messages)) == third.messages  # for completions.jsonl


def test_environment_gets_a_rows_images_as_a_reward_does(monkeypatch):
    image = PIL.Image.new("RGB", (2, 2), "red")
    rows = [{"prompt": MESSAGES, "image": image}]
    monkeypatch.setattr(sys.modules[__name__], "prompts", lambda split: rows)
    args = TaskArguments(dataset="test_tools:prompts", prompts_per_step=1)
    task = load_task(args, 0, 1, ToolArguments(environment="test_tools:Counter"))
    (row,) = task.rows
    environment, _ = asyncio.run(task.tools.open(row, evaluation=False, images=row.images))
    assert environment.instance.row["images"] == [image]


def test_environment_has_its_own_copy_of_a_row(converse, monkeypatch):
    rows = [{"prompt": MESSAGES, "board": [0]}]
    monkeypatch.setattr(sys.modules[__name__], "prompts", lambda split: rows)
    monkeypatch.setattr(Counter, "reset", lambda self, board, **_: board.append(1) or str(board))
    rollouts = converse(lambda *_: "end", environment="test_tools:Counter")
    assert {converse.made.tokenizer.decode(own.prompt_ids) for own in rollouts} == {"go[0, 1]:"}
    assert converse.made.task.rows[0].columns["board"] == [0]


def test_half_a_character_in_resets_text_ends_no_run(converse, monkeypatch):
    monkeypatch.setattr(Counter, "reset", lambda self, **_: " on\ud83d")
    first, *_ = converse(lambda *_: "end", environment="test_tools:Counter")
    assert converse.made.tokenizer.decode(first.prompt_ids) == "go on?:"


def test_text_of_reset_follows_content_in_parts(converse, monkeypatch):
    content = [{"type": "text", "text": "go"}]
    rows = [{"prompt": [{"role": "user", "content": content}], "says": " on", "number": 7}]
    monkeypatch.setattr(sys.modules[__name__], "prompts", lambda split: rows)
    monkeypatch.setattr(ChatTemplate, "prompt_ids", lambda self, prompt, *_: [len(prompt[-1]["content"])])
    first, *_ = converse(lambda *_: "end", environment="test_tools:Counter")
    assert first.prompt_ids == [2]
    assert first.prompt[-1]["content"] == [*content, {"type": "text", "text": " on"}]


def test_reset_that_returns_no_text_is_an_error(converse, monkeypatch):
    monkeypatch.setattr(Counter, "reset", lambda self, **_: ("seen", {}))
    with pytest.raises(TaskError, match=r"--environment test_tools:Counter: reset returned \('seen', {}\), and not a"):
        converse(lambda *_: "end", environment="test_tools:Counter")


def test_calls_behind_one_that_timed_out_are_not_waited_for(converse, monkeypatch):
    waits, clock, wait = [], [], asyncio.wait

    async def noted(calls, timeout):
        waits.append(timeout)
        clock.append(time.monotonic())
        answer = await wait(calls, timeout=timeout)
        clock.append(time.monotonic())
        return answer

    monkeypatch.setattr(asyncio, "wait", noted)
    said = "[wait(), add(number=1), add(number=2), add(number=3)]"
    rollouts = converse(call_once(said), environment="test_tools:Counter", tool_timeout=0.4, max_tokens=400)
    assert answers(rollouts[0]) == [str({"error": f"no answer within {seconds} s"}) for seconds in ("0.4",) * 4]
    assert sorted(waits) == [0] * 12 + [0.4] * 4  # of four conversations
    assert max(clock) - min(clock) < 1.2  # not four times 0.4 s


def test_environment_whose_call_timed_out_is_thrown_away(converse):
    before = Counter.made

    def says(text, number):
        return "end" if text.count("=") > text.count("(number=") else "[wait()]" if number == 1 else "[add(number=1)]"

    rollouts = converse(says, environment="test_tools:Counter", tool_timeout=1)
    assert [own.rewards["Counter"] for own in rollouts] == [1, None, 1, 1]
    converse(call_once("[add(number=1)]"))
    assert Counter.made - before == 5


HANGS = """
import threading
from concurrent.futures import wait
from test_tools import MESSAGES, Counter, arguments_of, task_of, train_grpo
from trainer.tasks.dataset import Row
from trainer.tasks.environment import together

tools = task_of(arguments_of(train_grpo, environment="test_tools:Counter", dataset=None, reward=[])).tools
Counter.__init__ = lambda self: threading.Event().wait()
row = Row(MESSAGES, {}, "row 0")
opening = together(tools.open(row, evaluation=False) for _ in range(2))  # one of them is there
assert not wait([opening], timeout=0.5).done
"""


@pytest.mark.slow
def test_process_ends_although_an_environment_is_never_made():
    subprocess.run([sys.executable, "-c", HANGS], timeout=240, check=True, cwd=Path(__file__).parent)


NEVER_READ = """
import asyncio, threading
from trainer.tasks.environment import in_thread, together

async def read():
    begun.set()
    await asyncio.wrap_future(in_thread(threading.Event().wait))

begun = threading.Event()
reading = together([read()])
begun.wait()
assert not reading.done()
"""


def test_process_ends_although_a_call_in_a_thread_does_not():
    subprocess.run([sys.executable, "-c", NEVER_READ], timeout=60, check=True, cwd=ROOT)


def test_row_chooses_among_several_environments(converse, monkeypatch):
    rows = [{"prompt": MESSAGES, "environment": name} for name in BOTH]
    monkeypatch.setattr(sys.modules[__name__], "prompts", lambda split: rows)
    rollouts = converse(call_once("[hum()]"), environment="test_tools:BOTH")
    of = {group.row.columns["environment"]: group.rollouts for group in converse.made.batch.groups}
    assert len(rollouts) == 4
    assert answers(of["silent"][0]) == ["mm"]
    assert answers(of["counter"][0]) == [str({"error": "Tool hum not found."})]
    assert [own.rewards["Counter"] for own in of["counter"] + of["silent"]] == [0.0, 0.0, None, None]
    rows[0]["environment"] = "other"
    del converse.made.task
    with pytest.raises(TaskError, match="\"environment\" is 'other', and not one of counter, silent"):
        converse(call_once("[hum()]"), environment="test_tools:BOTH")


def test_environment_needs_no_dataset(converse, monkeypatch):
    monkeypatch.setattr(Counter, "reset", lambda self, prompt: "begin" + prompt[0]["content"])
    first, *others = converse(lambda *_: "end", environment="test_tools:Counter", dataset=None, reward=None)
    assert len(others) == 3
    assert converse.made.tokenizer.decode(first.prompt_ids) == "begin:"
    assert first.rewards == {"Counter": 0.0}


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ({"tools": ["test_tools:Undocumented"]}, "Undocumented"),
        ({"tools": ["test_tools:NAMELESS"]}, "the tool .*Wrapped object.*: .*is not a module, class, method"),
        ({"environment": "test_tools:MESSAGES"}, "not a factory"),
        ({"environment": "test_tools:Engines"}, "raised TypeError"),
        ({"environment": "test_tools:SimpleNamespace"}, "has no method reset"),
        ({"environment": "test_tools:NAMESAKES"}, "two classes have the name Counter"),
        ({"tools": ["test_tools:shout", "test_tools:other_shout"]}, SAME_NAME),
        ({"tools": ["test_tools:shout"], "environment": "test_tools:Loud"}, SAME_NAME),
        ({"environment": "test_tools:BOTH", "dataset": None}, "--dataset"),
        ({"environment": "test_tools:Silent", "reward": None}, "--reward is missing"),
        ({"tools": ["test_tools:shout"], "tool_parser": "nobody"}, "--tool-parser nobody"),
        ({"tools": ["test_tools:shout"], "tool_parser": "abstract"}, "--tool-parser abstract: NotImplementedError"),
        (
            {"tools": ["test_tools:shout"], "dataset": "trainer.tasks.uppercase:prompts"},
            "chat messages, not for a text",
        ),
    ],
)
def test_what_cannot_be_used_is_said_before_the_engine_starts(converse, monkeypatch, flags, error):
    monkeypatch.setitem(ToolParserManager.tool_parsers, "abstract", ToolParser)  # as gpt-oss's and Cohere's are
    with pytest.raises(TaskError, match=error):
        converse(lambda *_: "end", **flags)
    assert not hasattr(converse.made, "engines")


def test_no_turn_reads_the_vocabulary_anew(converse, monkeypatch):
    """With 150,000 tokens that takes 50 ms, and most parsers want it."""

    class Reading(ToolParserManager.get_tool_parser("pythonic")):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            assert self.vocab

    monkeypatch.setitem(ToolParserManager.tool_parsers, "reading", Reading)
    converse(lambda *_: "end", tools=["test_tools:shout"], tool_parser="reading")
    tokenizer_class, reads = type(converse.made.tokenizer), []
    get_vocab = tokenizer_class.get_vocab
    monkeypatch.setattr(tokenizer_class, "get_vocab", lambda self: reads.append(1) or get_vocab(self))
    first, *_ = converse(call_once('[shout(text="a")]'))
    assert answers(first) == ["A"]
    assert not reads


def test_environment_of_the_documentation_runs_as_printed(converse, monkeypatch, tmp_path):
    (tmp_path / "higher.py").write_text(code_of("docs/tasks.md")[-2])
    monkeypatch.syspath_prepend(tmp_path)

    def says(text, number):
        """Half of what is left, as the answers say."""
        low, high = 1, 99
        for guess, answer in re.findall(r"number=(\d+)\)]</s>=(\w+?):", text):
            low, high = (int(guess) + 1, high) if answer == "higher" else (low, int(guess) - 1)
        return "found" if "=right" in text else f"[guess(number={(low + high) // 2})]"

    flags = {"dataset": "higher:games", "environment": "higher:HigherOrLower", "reward": None, "max_tokens": 200}
    first, second, *_ = converse(says, **flags)
    assert first.prompt[0]["content"] == "A game. Find my number, from 1 to 99."
    assert answers(first)[-1] == "right"
    assert first.rewards == {"HigherOrLower": 1.0}
    assert first.completion_ids.tolist() == second.completion_ids.tolist()  # a group has one game


def test_each_turn_of_a_completion_has_its_own_seed():
    """In 25 rounds of two steps, for two seeds of the run. An evaluation has others."""
    turns = [Turn([1], number, index, 50) for number in range(32) for index in range(4)]
    options = [
        sampling_options(SamplingConfig(group_size=4), seed, step, turn.number, evaluation, rounds, turn)
        for seed in (0, 1)
        for step in (0, 1)
        for evaluation in (False, True)
        for rounds in range(25)
        for turn in turns
    ]
    assert len({own["seed"] for own in options}) == len(options) == 2 * 2 * 2 * 25 * 32 * 4
    assert {(own["n"], own["max_tokens"]) for own in options} == {(1, 50)}


def test_seed_of_a_request_is_the_same_in_every_process():
    assert request_seed(0, False, 1, 0, 0, 2) == 281162756510625
    assert max(request_seed(i) for i in range(1000)) < 2**48


def test_ppo_refuses_tools_with_a_word(monkeypatch, capsys):
    for flags, word in (
        (["--environment", "a:B"], "unrecognized arguments: --environment"),
        (["--task", "lookup"], "no flag"),
    ):
        monkeypatch.setattr(sys, "argv", ["train_ppo.py", *flags])
        with pytest.raises(SystemExit):
            parse(train_ppo.Arguments, train_ppo.__doc__)
        assert word in capsys.readouterr().err


# The chat templates of others


def of_template(name, eos="<|im_end|>"):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": eos})
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    return tokenizer


@pytest.mark.parametrize(
    ("name", "trls", "eos"),
    [
        ("qwen2_5", "qwen2_5", "<|im_end|>"),
        ("qwen3", "qwen3_training", "<|im_end|>"),  # TRL replaces it by one that keeps its prefix
        ("qwen3_instruct_2507", "qwen3_instruct_2507", "<|im_end|>"),
        ("llama3_1", "llama3_1", "<|eot_id|>"),
        ("glm4moe", "glm4moe", "<|endoftext|>"),
    ],
)
def test_tokens_of_answers_are_trls(name, trls, eos):
    from trl import GRPOTrainer

    messages = [{"role": "tool", "name": "look", "content": text} for text in ("found it", "{'error': 'nothing'}")]
    tokenizer, other = of_template(name, eos), of_template(trls, eos)
    trainer = SimpleNamespace(processing_class=other, _tokenizer=other, _is_vlm=False, chat_template=None)
    trainer.chat_template_kwargs = {}
    template = ChatTemplate(tokenizer, {})
    template.check_tools()
    for some in (messages[:1], messages):
        assert template.answer_ids(some, tokenizer.eos_token_id) == GRPOTrainer._get_tool_suffix_ids(trainer, some)


@pytest.mark.parametrize(
    ("name", "end", "begins"),
    [
        ("glm4moe", "<|endoftext|>", "<|observation|>\n<tool_response>\nfound it"),
        ("glm4moe", "<|observation|>", "\n<tool_response>\nfound it"),  # which the policy has sampled
        ("glm4moe", "<|user|>", "<|observation|>\n<tool_response>\nfound it"),
        ("gemma4", "<|tool_response>", "response:look{value:"),
        ("gemma4", "<turn|>", "response:look{value:"),
        ("llama3_1", "<|eom_id|>", "<|start_header_id|>ipython<|end_header_id|>"),
    ],
)
def test_answers_follow_a_turn_that_another_token_has_ended(name, end, begins):
    """It comes once, and nothing of the placeholders for the turns before is in the answers."""
    tokenizer = of_template(name, {"glm4moe": "<|endoftext|>", "gemma4": "<eos>", "llama3_1": "<|eot_id|>"}[name])
    tokenizer.add_tokens([end], special_tokens=True)
    messages = [{"role": "tool", "name": "look", "content": "found it"}]
    ids = ChatTemplate(tokenizer, {}).answer_ids(messages, tokenizer.convert_tokens_to_ids(end))
    assert tokenizer.decode(ids).startswith(begins)


def test_special_token_in_a_tools_name_is_text():
    tokenizer = of_template("gemma4", "<eos>")
    answer = {"role": "tool", "name": "a<eos>", "content": "found it"}
    ids = ChatTemplate(tokenizer, {}).answer_ids([answer], tokenizer.eos_token_id)
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode(ids).startswith("response:a<eos>{value:")


@pytest.mark.parametrize("name", ["llama3", "phi3"])
def test_template_that_is_not_made_for_tools_is_refused(name):
    with pytest.raises(TaskError, match="the chat template"):
        ChatTemplate(of_template(name), {}).check_tools()


# Each conversation by itself


NAMELESS = object.__new__(Wrapped)
HELD = threading.Event()


def hold() -> str:
    """
    Answer when the test says so.
    """
    HELD.wait(30)
    return "held"


def test_no_conversation_waits_for_the_tool_of_another(converse):
    tools = ["test_tools:hold", "test_tools:shout"]
    converse(lambda *_: "end", tools=tools)
    task = converse.made.task
    args = arguments_of(train_grpo, group_size=2, prompts_per_step=2, steps=6, max_tokens=100, max_staleness=2)
    HELD.clear()

    def says(text, number):
        if "=" in text.partition("]")[2]:
            return "end"
        return "[hold()]" if number == 3 and engines.version else '[shout(text="a")]'

    engines = Engines(converse.made.tokenizer, says, count=1, version=-1)
    with Rollouts(engines, task, args.sampling, 0, args.ahead) as ahead, ThreadPoolExecutor(1) as beside:
        taking = beside.submit(ahead.take, 1)
        deadline = time.monotonic() + 20
        while len(engines.turns) < 3 * (4 + 3) and time.monotonic() < deadline:  # all of three steps but for the held
            time.sleep(0.01)
        assert len(engines.turns) == 3 * (4 + 3)
        assert not taking.done()
        engines.version = 0  # as after a sync
        HELD.set()
        batch = taking.result(timeout=30)
    *others, held = batch.rollouts
    assert [answers(own) for own in batch.rollouts] == [["A"]] * 3 + [["held"]]
    assert set(others[0].versions) == {-1}
    call, end = len("[hold()]") + 1, len("end") + 1
    assert held.versions[held.mask].tolist() == [-1] * call + [0] * end
    assert batch.metrics["tools/call_frequency"] == 1
    older = 3 * others[0].length + call  # sampled tokens: those of the tools count for nothing
    assert batch.metrics["async/staleness_mean"] == pytest.approx(older / (older + end))


# Whole runs


@cpu_only
@pytest.mark.long
@pytest.mark.parametrize("topology", ["separate", "separate --max-staleness 2", "shared"])
def test_model_learns_to_call_the_tool_that_knows_the_answer(script, tmp_path, topology):
    options = ["--topology", *topology.split(), "--task", "lookup", "--output", "run", "--steps", 10]
    text = script("train_grpo.py", *options).finish()
    rows = metrics_of(tmp_path / "run")
    before, *steps = rows
    assert before["eval/reward"] < 0.2
    assert rows[-1]["eval/reward"] > 0.9, text
    assert rows[-1]["eval/turns/mean"] > 1.9
    assert steps[0]["tools/call_frequency"] < steps[-1]["tools/call_frequency"]
    assert max(row["logprobs/mismatch"] for row in steps) < 1e-5
    completions = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    assert [message["role"] for message in completions[-1]["messages"]][:1] == ["assistant"]
    assert any(len(row["messages"]) > 2 for row in completions)
