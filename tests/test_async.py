"""Rollouts, on-policy and ahead of learning: what steps learn from, which weights each token comes from, whole runs.

pytest tests/test_async.py            functions, and the engine and the trainer of train_grpo.py without Ray
pytest tests/test_async.py -m long    runs of train_grpo.py
"""

import asyncio
import itertools
import json
import shutil
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import AsyncMock

import psutil
import pytest
import ray
import torch
from conftest import arguments_of, cpu_only, metrics_of, spans_of, timeless, timeline_of
from fakes import Engines, local_rewards
from learners import CPU, config, rollouts
from pair import PLAIN_WORKER

import train_grpo
from rlhf_utils import WeightSyncError
from trainer.errors import MismatchError, RunError, TaskError
from trainer.learning.grpo import GRPOLearner
from trainer.learning.rollout import Rollout
from trainer.rollouts import engine
from trainer.rollouts.engine import EngineActor
from trainer.rollouts.evaluation import evaluate
from trainer.rollouts.options import EngineSetting
from trainer.rollouts.rollouts import Rollouts
from trainer.rollouts.sampling import sampling_options
from trainer.run.models import Models
from trainer.run.timeline import Timeline
from trainer.tasks.dataset import Row
from trainer.tasks.rewards import Batch, Rewards
from trainer.tasks.tiny_model import byte_tokenizer
from trainer.topologies.link import MAX_MISMATCH as MAX_MISMATCHES

MAX_MISMATCH = MAX_MISMATCHES["cpu"]
MAX_GROWTH = 48 << 20  # bytes, in 60 syncs: of the weights alone that is 120 MiB


# What a step learns from: without an engine


def one(completions, **_):
    return [1.0] * len(completions)


class Ahead(Rollouts):
    """Of two prompts a step, whose one token is the step's number, scored by the function `reward`."""

    def __init__(self, reward=one, engines: int = 1, **arguments):
        defaults = {"group_size": 2, "prompts_per_step": 2, "steps": 6, "in_flight": 100}
        args = arguments_of(train_grpo, **defaults | arguments)
        sys.modules[__name__].reward_of_this_test = reward  # rewards are found by their names
        task = SimpleNamespace(
            draw=lambda step: [Row(f"{step}", {}, "", [step])] * args.task.prompts_per_step,
            draw_others=lambda step, count, drawn: [Row("other", {}, "", [99])] * count,
            rewards=local_rewards(
                Rewards([f"{__name__}:reward_of_this_test"], None, [], timeout=args.task.reward_timeout)
            ),
            tools=None,
            args=args.task,
            seed=0,
            steps=args.run.steps,
        )
        super().__init__(Engines(*[lambda *_: "A"] * engines), task, args.sampling, 0, args.ahead)

    def nothing_is_left(self) -> bool:
        """Whether all batches that have begun are complete."""
        return all(request.result.done() for request in self.batches)

    def steps(self) -> list[int]:
        """The steps whose groups an engine has been given, in this order."""
        return [call.prompts[0][0] for call in self.engines.calls]


@pytest.mark.parametrize(
    ("max_staleness", "begun"), [(0, [1, 2, 3, 4, 5, 6, 7]), (2, [3, 4, 5, 6, 6, 6, 7]), (9, [6, 6, 6, 6, 6, 6, 7])]
)
def test_engine_begins_only_what_will_not_be_too_old(max_staleness, begun):
    ahead = Ahead(max_staleness=max_staleness)
    for step, last in enumerate(begun, 1):
        batch = ahead.take(step)
        assert {group.row.prompt_ids[0] for group in batch.groups} == {step}  # in the order of the data
        wait_until(ahead.nothing_is_left)
        assert ahead.steps() == [number for number in range(1, last + 1) for _ in range(2)]
        oldest = step - 1 - int(batch.rollouts[0].versions[0])
        metrics = {"async/staleness_mean": oldest, "async/staleness_max": oldest} if max_staleness else {}
        assert batch.metrics.pop("perf/generation_tokens_per_second", 1.0) > 0  # without any, if nothing was generated
        assert batch.metrics == metrics | {"rewards/reward_of_this_test/mean": 1.0}
        ahead.engines.version = step  # learned and synced
    assert oldest == 0  # of what proves the last sync


def test_step_has_its_own_prompts_whichever_are_complete_first():
    ahead, held = Ahead(max_staleness=2, steps=3), []
    answer = hold(ahead.engines, held)
    taking = beside(ahead.take, 1)
    wait_until(lambda: len(held) == 6)  # of three steps
    for each in reversed(held):
        answer(*each)
    batches = [taking.result(timeout=30), ahead.take(2), ahead.take(3)]
    assert [[own.prompt_ids.tolist() for own in batch.rollouts] for batch in batches] == [[[i]] * 4 for i in (1, 2, 3)]


def hold(engines: Engines, held: list):
    """From now on, these engines answer no call: it goes to this list. Returns the function that answers one."""
    answer, engines.answer = engines.answer, lambda *call: held.append(call)
    return answer


@pytest.mark.parametrize(("version", "ages"), [(3, "-3 to -3"), (-3, "3 to 3")])
def test_labels_that_cannot_be_are_an_error(version, ages):
    ahead = Ahead(max_staleness=2)
    ahead.engines.version = version
    with pytest.raises(RunError, match=rf"step 1: .* tokens are {ages} steps old, and not 0 to 2"):
        ahead.take(1)


def test_no_more_groups_are_in_flight_than_asked_for():
    ahead, held = Ahead(max_staleness=2, in_flight=3, engines=2, dynamic_sampling=1), []
    answer = hold(ahead.engines, held)
    taking = beside(ahead.take, 1)
    wait_until(lambda: len(held) == 3)
    time.sleep(0.1)
    assert [(call.engine, call.prompts, call.sampling) for call in ahead.engines.calls] == [
        (0, [[1]], [sampling_options(ahead.config, 0, 1, 0)]),
        (1, [[1]], [sampling_options(ahead.config, 0, 1, 1)]),  # to the engine with the fewest
        (0, [[2]], [sampling_options(ahead.config, 0, 2, 0)]),
    ]
    for each in held[:2]:
        answer(*each)
    wait_until(lambda: len(held) == 7)  # two more have room, and two replace those that are equal
    assert ahead.steps() == [1, 1, 2, 2, 3, 99, 99]
    assert [call.low_priority for call in ahead.engines.calls] == [True] * 5 + [False] * 2
    assert [(call.prompts, call.sampling) for call in ahead.engines.calls[5:]] == [
        ([[99]], [sampling_options(ahead.config, 0, 1, i, round_number=1)]) for i in range(2)
    ]
    ahead.engines.answer = answer
    for each in held[2:]:
        answer(*each)
    assert len(taking.result(timeout=30).rollouts) == 4
    wait_until(ahead.nothing_is_left)
    assert ahead.steps() == [1, 1, 2, 2, 3, 99, 99, 3]


def beside(function, *args) -> Future:
    """What a thread makes of this call. It may never be done."""
    future = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def wait_until(holds) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_slow_judge_scores_several_prompts_at_once():
    """Coroutines of all prompts that are complete wait at the same time, also those of several steps."""
    waiting, most, many = 0, 0, asyncio.Event()

    async def judge(completions, **_):
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        if most >= 16:
            many.set()
        await many.wait()
        await asyncio.sleep(0.5)
        waiting -= 1
        return one(completions)

    ahead, started = Ahead(judge, max_staleness=2, prompts_per_step=8), time.monotonic()
    for step in range(1, 7):
        beside(ahead.take, step).result(timeout=30)
        ahead.engines.version = step
    assert time.monotonic() - started < 6  # of 24 s that 48 prompts take, one after the other


def test_rewards_are_computed_while_the_step_has_prompts_without_completions():
    scored, one_is_scored = [], threading.Event()

    def reward(completions, **_):
        scored.append(len(completions))
        one_is_scored.set()
        return one(completions)

    ahead = Ahead(reward, max_staleness=0)
    answer = ahead.engines.answer

    def answer_second_when_first_is_scored(future, call):
        if call is not ahead.engines.calls[0]:
            one_is_scored.wait(30)
        answer(future, call)

    ahead.engines.answer = answer_second_when_first_is_scored
    assert len(beside(ahead.take, 1).result(timeout=30).rollouts) == 4
    assert scored == [2, 2]


def test_reward_that_raises_ends_its_step():
    for kind in (lambda function: function, as_coroutine):

        def reward(prompts, completions, **_):
            if prompts[0] == "2":
                raise ValueError("no luck")
            return one(completions)

        ahead = Ahead(kind(reward), max_staleness=2)
        ahead.take(1)
        with pytest.raises(TaskError, match=r"the reward reward_of_this_test raised ValueError: no luck \(test_async"):
            ahead.take(2)


def as_coroutine(function):
    async def reward(prompts, completions, **columns):
        return function(prompts, completions, **columns)

    return reward


def never(completions, **_):
    threading.Event().wait()


async def never_either(completions, **_):
    await asyncio.Event().wait()


LATE = r"^the reward reward_of_this_test took longer than 0.5 s for one prompt's completions: --reward-timeout$"


@pytest.mark.parametrize("reward", [never, never_either])
def test_reward_that_hangs_stops_neither_engine_nor_run(reward):
    ahead = Ahead(reward, max_staleness=2, reward_timeout=0.5)
    with pytest.raises(TaskError, match=LATE):
        ahead.take(1)
    assert ahead.steps() == [1, 1, 2, 2, 3, 3]


def test_evaluation_waits_for_rewards_as_long_as_a_step():
    ahead = Ahead(never, max_staleness=2, reward_timeout=0.5, eval_every=1)
    ahead.task.eval_rows = [Row("held out", {}, "", [5])]
    with pytest.raises(TaskError, match=LATE):
        ahead.take(1)
    with pytest.raises(TaskError, match=LATE):
        evaluate(ahead, 1)


def test_engine_that_fails_ends_the_step_that_waits():
    ahead = Ahead(max_staleness=2, engines=2)
    ahead.engines.complete = lambda number, prompt_ids, _: [][prompt_ids[0]]
    with pytest.raises(RunError, match=r"^the engine [01] failed while generating: list index out of range"):
        ahead.take(1)


def test_equal_groups_are_replaced_while_others_are_in_flight():
    def reward(prompts, completions, **_):
        return [float(i) if prompts[0] == "other" else 1.0 for i in range(len(completions))]

    ahead = Ahead(reward, max_staleness=1, dynamic_sampling=1)
    batch = ahead.take(1)
    assert [group.row.prompt for group in batch.groups] == ["other", "other"]
    assert [rollout.prompt_ids.tolist() for rollout in batch.rollouts] == [[99]] * 4
    assert [call.low_priority for call in ahead.engines.calls] == [True] * 4 + [False] * 2  # two steps', the others
    assert batch.metrics["dynamic_sampling/replaced"] == 2
    assert batch.metrics["async/staleness_max"] == 0


def test_metrics_are_of_what_is_learned_from():
    def reward(prompts, completions, log_metric, **_):
        log_metric(f"length of {prompts[0]}", 1.0)
        return [float(i) if prompts[0] == "other" else 1.0 for i in range(len(completions))]

    def resampled(rows: int, version: int) -> Batch:
        """Step 2, by weights a step old. So many of its two prompts are replaced, by weights of this version."""
        ahead = Ahead(reward, max_staleness=1, dynamic_sampling=1, steps=2)
        ahead.task.draw_others = lambda step, *_: [Row("other", {}, "", [99])] * (rows if step == 2 else 0)
        ahead.take(1)
        wait_until(ahead.nothing_is_left)
        ahead.engines.version = version
        return ahead.take(2)

    for replaced, others in (1, ["length of 2"]), (2, []):
        metrics = resampled(replaced, version=1).metrics
        ages = metrics["async/staleness_mean"], metrics["async/staleness_max"]
        assert ages == (1 - replaced / 2, 2 - replaced)
        assert {name for name in metrics if name.startswith("length of")} == {*others, "length of other"}
    with pytest.raises(RunError, match=r"step 2: .* tokens are -1 to 1 steps old, and not 0 to 1"):
        resampled(1, version=2)


def test_end_of_a_run_does_not_start_ray_anew():
    """A call of an actor does."""
    with Ahead(max_staleness=2, in_flight=1) as ahead:
        ahead.engines.free.clear()
        beside(ahead.take, 1)
        wait_until(lambda: ahead.engines.calls)
    ahead.engines.free.set()
    wait_until(ahead.nothing_is_left)
    time.sleep(0.1)
    assert ahead.steps() == [1]  # of six groups
    assert not ray.is_initialized()


def test_batch_with_few_new_tokens_gets_more_as_proof(monkeypatch):
    monkeypatch.setattr("trainer.rollouts.rollouts.PROOF_TOKENS", 20)
    ahead = Ahead(max_staleness=1, engines=2)
    new, old = ahead.take(1), ahead.take(2)
    wait_until(ahead.nothing_is_left)
    ahead.engines.version, ahead.engines.calls = 1, []
    proof = ahead.proof(2, old)
    assert [rollout.versions.tolist() for rollout in proof] == [[1]] * 8  # of each engine, which has its own workers
    asked = [(call.engine, len(call.prompts), call.sampling[0]) for call in ahead.engines.calls]
    # Of two prompts, two completions of 8 tokens each are enough.
    assert [(*call, sampling["n"], sampling["max_tokens"]) for *call, sampling in asked] == [(0, 2, 2, 8), (1, 2, 2, 8)]
    monkeypatch.setattr("trainer.rollouts.rollouts.PROOF_TOKENS", 4)
    assert ahead.proof(1, new) == []
    of_tools = [replace(group, rollouts=[replace(r, sampled=[False]) for r in group.rollouts]) for group in new.groups]
    assert ahead.proof(1, Batch(of_tools))
    on_policy = Ahead()
    assert on_policy.proof(1, on_policy.take(1)) == []  # all tokens are new, however few


def test_proof_has_the_images_of_its_own_prompts(monkeypatch):
    monkeypatch.setattr("trainer.rollouts.rollouts.PROOF_TOKENS", 20)
    ahead = Ahead(max_staleness=1, engines=2)
    groups = ahead.take(1).groups
    images = ["of the first", "of the second"]
    with_images = [
        replace(group, rollouts=[replace(rollout, images=own) for rollout in group.rollouts])
        for group, own in zip(groups, images, strict=True)
    ]
    wait_until(ahead.nothing_is_left)  # else a call for the next step may be among the last
    proof = ahead.proof(2, Batch(with_images))
    assert [call.images for call in ahead.engines.calls[-2:]] == [images] * 2
    assert [rollout.images for rollout in proof] == [images[0], images[0], images[1], images[1]] * 2


def test_tokens_of_the_trainers_own_weights_prove_a_batch(model):
    learner = GRPOLearner(model, config(max_mismatch=1e-5), CPU)
    learner.step = 3
    batch = rollouts(learner)

    def labelled(*rows: list[int]) -> list[Rollout]:
        """The batch with these labels, in turns. The log-probabilities of tokens labelled 2 are other weights' own."""
        return [
            replace(
                rollout,
                versions=(labels := [rows[i % len(rows)][j % 2] for j in range(len(rollout.logprobs))]),
                logprobs=[own - (label == 2) / 10 for own, label in zip(rollout.logprobs, labels, strict=True)],
            )
            for i, rollout in enumerate(batch)
        ]

    mixed, old = labelled([2, 3], [2, 2], [3, 3]), labelled([2, 2])
    assert learner.mismatch(mixed) < 1e-6
    wrong = [replace(rollout, versions=[3] * len(rollout.versions)) for rollout in mixed]
    with pytest.raises(MismatchError, match="over the bound"):
        learner.learn(wrong)
    with pytest.raises(MismatchError, match="no token comes from the weights that the trainer holds"):
        learner.learn(old)
    with pytest.raises(MismatchError, match="over the bound"):
        learner.learn(old, proof_rollouts=wrong)
    assert learner.step == 3
    assert learner.learn(old, proof_rollouts=mixed)["logprobs/mismatch"] < 1e-6
    learner.step = 3
    assert learner.learn([replace(rollout, versions=None) for rollout in rollouts(learner)])["logprobs/mismatch"] < 1e-6


class HeldLLM:
    """Generates one token for each prompt, once `goes_on` is set. `begun` are the prompts that it has begun with.

    A generation, a pause and a resumption take a second each of the `clock`.
    """

    def __init__(self):
        self.begun, self.goes_on, self.clock = [], asyncio.Event(), 0.0
        self.priorities, self.labels, self.served, self.fails = [], [], True, ""
        self.resets, self.while_resetting = True, AsyncMock()
        self.dropped, self.ends = [], "length"  # caches, and why a completion ends

    async def generate(self, prompt, params, name, priority):
        self.begun.append(prompt["prompt_token_ids"])
        self.priorities.append(priority)
        await self.goes_on.wait()
        self.clock += 1
        span, logprobs = SimpleNamespace(version="4", start=0, end=1), SimpleNamespace(logprobs=[-1.0])
        output = {"token_ids": [70], "finish_reason": self.ends, "logprobs": logprobs, "weight_versions": [span]}
        output = SimpleNamespace(**output, sampling_mask=None)
        yield SimpleNamespace(prompt_token_ids=self.begun[-1], outputs=[output])

    async def sleep(self, level, mode):
        assert (level, mode) == (0, "keep")
        self.clock += 1

    async def reset_prefix_cache(self, reset_running_requests, reset_connector):
        assert reset_running_requests
        assert reset_connector
        await self.while_resetting()
        self.dropped.append("prefix")
        return self.resets

    async def reset_encoder_cache(self):
        self.dropped.append("encoder")

    async def collective_rpc(self, method, args=()):
        received = [{"version": 1}, {"error": self.fails} if self.fails else {"version": 1}]
        return received if method == "receive_weights" else [True, self.served]

    async def update_weight_version(self, version):
        self.labels.append(version)

    async def resume_generation(self):
        self.clock += 1

    def get_tokenizer(self):
        return byte_tokenizer()


@pytest.fixture
def held():
    """An engine actor around a `HeldLLM`."""
    actor = EngineActor(0)
    actor.llm = HeldLLM()
    return actor


def test_what_waits_comes_after_all_that_does_not(held):
    async def run():
        held.llm.goes_on.set()
        waiting = await held.sample([[5], [6]], [{}, {}], low_priority=True)
        proof = await held.sample([[7]], [{}])
        assert [rollout.versions.tolist() for rollout in waiting + proof] == [[4]] * 3
        assert held.llm.begun == [[5], [6], [7]]
        assert held.llm.priorities == [1, 1, 0]  # the lowest number goes first

    asyncio.run(run())


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_completion_that_vllm_could_not_finish_is_an_error(held, reason):
    held.llm.ends = reason
    held.llm.goes_on.set()
    with pytest.raises(RunError, match=r"^vLLM could not finish a completion: run\.log has its error$"):
        asyncio.run(held.sample([[5]], [{}]))
    assert not held.running


def test_generation_goes_on_only_if_all_serve_what_was_sent(held):
    async def run():
        held.llm.served = False
        assert not await held.receive_weights(3, 60.0)
        assert (held.llm.labels, held.llm.clock) == ([], 1)  # paused
        held.llm.served = True
        assert await held.receive_weights(3, 60.0)
        assert (held.llm.labels, held.llm.clock) == (["3"], 3)
        held.llm.fails = "engine worker 1 (pid 7) failed: no memory"
        with pytest.raises(WeightSyncError, match=r"^engine worker 1 \(pid 7\) failed: no memory$"):
            await held.receive_weights(4, 60.0)
        assert (held.llm.labels, held.llm.clock) == (["3"], 4)

    asyncio.run(run())


EVERY_CACHE = ["prefix", "encoder"]


def test_caches_are_dropped_after_an_evaluation_or_by_the_next_sync(held):
    """Images' as well. While others generate, the next sync drops what an evaluation leaves."""

    async def run():
        llm = held.llm
        await held.receive_weights(0)
        assert llm.dropped == []  # nothing was computed
        llm.goes_on.set()
        await held.sample([[5]], [{}])
        await held.drop_caches()
        assert llm.dropped == EVERY_CACHE
        llm.goes_on.clear()
        other = asyncio.create_task(held.sample([[6]], [{}]))
        while len(llm.begun) < 2:
            await asyncio.sleep(0)
        await held.drop_caches()
        assert llm.dropped == EVERY_CACHE
        await held.receive_weights(1)
        assert llm.dropped == EVERY_CACHE * 2
        llm.goes_on.set()
        await other  # of whose keys and values some are older than the next sync
        await held.receive_weights(2)
        assert llm.dropped == EVERY_CACHE * 3
        await held.sample([[7]], [{}])
        llm.resets = False
        with pytest.raises(RunError, match="vLLM did not reset its prefix cache"):
            await held.receive_weights(3)
        assert llm.labels == ["0", "1", "2"]

    asyncio.run(run())


def test_what_is_computed_while_caches_are_dropped_is_dropped_by_the_next_sync(held):
    async def run():
        llm = held.llm
        llm.goes_on.set()
        await held.sample([[5]], [{}])
        llm.while_resetting = lambda: held.sample([[6]], [{}])
        await held.drop_caches()
        llm.while_resetting = AsyncMock()
        await held.receive_weights(1)
        assert llm.dropped == EVERY_CACHE * 2

    asyncio.run(run())


def test_engines_are_idle_without_prompts_and_in_a_sync(monkeypatch):
    now, seconds = [0.0], {"time/rollout": 1.0, "time/train": 2.0, "time/sync": 1.0}
    assert Ahead().idle_shares(seconds) == {}  # on-policy
    monkeypatch.setattr("trainer.rollouts.rollouts.time.perf_counter", lambda: now[0])
    ahead = Ahead(engines=2, max_staleness=1)
    first, second = ahead.in_flight
    for name, until in (first, 2.0), (second, 6.0):
        ahead._count(name, +1)
        now[0] = until
    # One of two engines had nothing for two seconds of six, and both were in a sync for one.
    assert ahead.idle_shares(seconds) == {"async/engine_idle": 2 / 6, "async/trainer_idle": 0.25}
    now[0] = 8.0
    assert ahead.idle_shares(seconds)["async/engine_idle"] == 1 / 2  # since then
    now[0] = 8.5
    assert ahead.idle_shares(seconds)["async/engine_idle"] == 1.0  # the sync began before


def test_timeline_has_the_prompts_that_are_generated_while_the_trainer_learns(tmp_path):
    ahead = Ahead(max_staleness=1, prompts_per_step=3)
    ahead.session.timeline = ahead.task.rewards.session.timeline = Timeline(tmp_path / "timeline.json")
    ahead.take(1)
    wait_until(ahead.nothing_is_left)
    ahead.engines.version = 1
    ahead.engines.free.clear()  # the prompts of step 3 take until it has learned
    ahead.take(2)
    wait_until(lambda: ahead.steps().count(3) == 3)
    with ahead.session.timeline.span("trainer", "learn"):
        time.sleep(0.01)
    ahead.engines.free.set()
    wait_until(ahead.nothing_is_left)
    wait_until(lambda: (tmp_path / "timeline.json").read_text().count("reward_of_this_test") == 9)
    ahead.session.timeline.close()
    spans = timeline_of(tmp_path)
    ((learns, learned),) = spans_of(spans, "trainer", "learn")
    of_steps = [spans_of(spans, "engine 0: prompts", f"step {step}") for step in (1, 2, 3)]
    assert [*map(len, of_steps)] == [3, 3, 3]
    assert all(end < learns for _, end in of_steps[0] + of_steps[1])
    assert all(begin < learns and learned < end for begin, end in of_steps[2])
    assert spans_of(spans, "driver", "generating")


def test_speed_of_generation_is_over_the_time_in_which_there_is_any(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("trainer.rollouts.rollouts.time.perf_counter", lambda: clock[0])
    ahead = Ahead(prompts_per_step=2)
    ahead.engines.free.clear()
    taking = threading.Thread(target=lambda: speeds.append(ahead.take(1).metrics), daemon=True)
    speeds, clock[0] = [], 5.0  # idle until now
    taking.start()
    wait_until(lambda: len(ahead.engines.calls) == 2)
    clock[0] += 4.0
    ahead.engines.free.set()
    taking.join(30)
    assert speeds[0]["perf/generation_tokens_per_second"] == 2 * 2 / 4  # prompts, completions of a token


# Which weights tokens come from: train_grpo.py's trainer in this process, its engine in an event loop of a thread


class Pair:
    def __init__(self, model: str):
        self.args = arguments_of(
            train_grpo,
            tensor_parallel_size=1,
            group_size=2,
            prompts_per_step=2,
            max_tokens=200,
            max_mismatch=MAX_MISMATCH,
            exact="off",
            # Whose cache is soon touched as a whole.
            engine_args=json.dumps({"kv_cache_memory_bytes": 8 << 20, "worker_cls": PLAIN_WORKER}),
        )
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.engine, self.trainer = EngineActor(0), train_grpo.Trainer(0)
        setting, models = EngineSetting("cpu", "WorkerExtension"), Models(model, model, None)
        assert self.start(self.engine.start(model, self.args.engine, setting, "none", [0])).result() == 256
        assert self.trainer.load(("127.0.0.1", 0), 1, models, self.args, "cpu", False)[0] == 0
        self.learner = self.trainer.learner
        self.original = {name: weight.detach().clone() for name, weight in self.learner.model.module.named_parameters()}
        from vllm.utils.network_utils import get_open_port

        group = "127.0.0.1", get_open_port(), 2
        joining = self.start(self.engine.init_weight_update_group(*group, 1))
        self.trainer.init_weight_update_group(*group)
        joining.result()
        self.sync(0)

    def start(self, call) -> Future:
        return asyncio.run_coroutine_threadsafe(call, self.loop)

    def sample(self, seed: int, prompts=((5, 6, 7, 8), (9, 10, 11))) -> Future:
        sampling = [sampling_options(self.args.sampling, 0, seed, i) for i in range(len(prompts))]
        return self.start(self.engine.sample([list(ids) for ids in prompts], sampling))

    @torch.no_grad()
    def hold(self, version: int) -> None:
        """Make the trainer's weights those of this version."""
        self.learner.step = version
        for name, weight in self.learner.model.module.named_parameters():
            weight.copy_(self.original[name] * (1 + version / 100))

    def sync(self, version: int, label: int | None = None) -> None:
        self.hold(version)
        receiving = self.start(self.engine.receive_weights(version if label is None else label, 60.0))
        assert self.trainer.send_weights().loader == "replay"
        assert receiving.result()


@pytest.fixture(scope="module")
def pair(model):
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("OMP_NUM_THREADS", "TORCH_COMPILE_DISABLE"):
            patch.setenv(name, "")  # so that what the engine sets goes again
        patch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8")  # or it grows with each new length of a prompt
        patch.setattr(engine, "end_with_children", lambda unless: None)  # this process is not an actor
        patch.setattr(engine, "import_vllm", lambda: None)
        patch.setattr(engine, "fork_engine_core", lambda: None)
        patch.setattr(engine, "get_temp_dir", lambda: "none")
        patch.setattr(engine.ray, "get_gpu_ids", list)
        patch.setattr(engine.gc, "freeze", lambda: None)
        pair = Pair(model)
        yield pair
        asyncio.run(pair.engine.shutdown())
        del pair.engine  # while vLLM can still end it once more
    torch.set_num_threads(threads)


@cpu_only
@pytest.mark.parametrize("syncs", [10, pytest.param(100, marks=pytest.mark.long)])
def test_every_token_has_the_weights_that_its_label_says(pair, syncs):
    """Also where a completion has begun under others. All are generated across syncs, which leave memory as it was."""
    family, memory, sampled = psutil.Process().children(recursive=True), [], []
    running = {seed: pair.sample(seed) for seed in range(2)}
    for version in range(1, syncs + 1):
        time.sleep(0.02)  # a few tokens
        pair.sync(version)
        for seed in [seed for seed, call in running.items() if call.done()]:
            sampled += running.pop(seed).result()
            running[seed + 2] = pair.sample(seed + 2)
        if version % 20 == 0:
            memory.append(sum(process.memory_full_info().uss for process in family))
    sampled += [rollout for call in running.values() for rollout in call.result()]
    assert len(memory) < 2 or memory[-1] - memory[1] < MAX_GROWTH  # the first forty take what is kept for the others
    versions = [rollout.versions.tolist() for rollout in sampled]
    assert all(own == sorted(own) for own in versions)
    assert max(len(set(own)) for own in versions) > 5
    seen = set(itertools.chain(*versions))
    assert len(seen) > syncs / 2
    for version in seen:
        pair.hold(version)
        assert pair.learner.mismatch([rollout for rollout in sampled if version in rollout.versions]) < MAX_MISMATCH


@cpu_only
def test_a_label_without_its_weights_is_noticed(pair):
    pair.sync(3)
    call = pair.sample(1)
    time.sleep(0.1)
    pair.sync(4, label=5)
    pair.hold(5)
    with pytest.raises(MismatchError, match="over the bound"):
        pair.learner.mismatch(call.result())


@cpu_only
def test_tensor_that_a_sync_leaves_unchanged_is_noticed(pair, monkeypatch):
    """The engine serves what was sent, bit for bit, and it is not what the trainer holds."""
    pair.sync(6)
    named_tensors, (name, *_) = pair.learner.model.named_tensors, pair.original
    stale = {name: named_tensors()[name].clone()}
    monkeypatch.setattr(pair.learner.model, "named_tensors", lambda: named_tensors() | stale)
    call = pair.sample(1)
    pair.sync(7)
    with pytest.raises(MismatchError, match="over the bound"):
        pair.learner.mismatch(call.result())


@cpu_only
def test_keys_and_values_do_not_outlive_a_sync(pair, monkeypatch):
    prompts = [list(range(5, 185))] * 2  # longer than a block of the cache
    pair.sync(8)
    pair.sample(1, prompts).result()
    pair.sync(9)
    assert pair.learner.mismatch(pair.sample(2, prompts).result()) < MAX_MISMATCH
    monkeypatch.setattr(pair.engine, "_reset_caches", AsyncMock())
    pair.sync(10)
    with pytest.raises(MismatchError, match="over the bound"):
        pair.learner.mismatch(pair.sample(3, prompts).result())


# Runs


@cpu_only
@pytest.mark.slow
def test_timeline_of_a_run_ahead_has_engines_that_generate_while_trainers_learn(script, tmp_path):
    options = ["--max-staleness", 1, "--tensor-parallel-size", 1, "--steps", 4, "--save-every", 0, "--timeline"]
    text = script("train_grpo.py", *options, "--output", "run").finish()
    assert text.splitlines()[-1].startswith("OK: reward "), text
    spans = timeline_of(tmp_path / "run")
    steps, learning = spans_of(spans, "driver", "step "), spans_of(spans, "trainer", "learn")
    syncs = [spans_of(spans, *call) for call in (("trainer", "send_weights"), ("engine", "receive_weights"))]
    for (begin, end), (learns, learned), *calls in zip(steps, learning, *(calls[1:] for calls in syncs), strict=True):
        assert begin < learns < learned < end
        assert all(learned < call_begin < call_end < end for call_begin, call_end in calls)
    for step in (2, 3, 4):  # their prompts begin before the step before them has learned
        learned = learning[step - 2][1]
        assert min(begin for begin, _ in spans_of(spans, "engine: prompts", f"step {step}")) < learned


@cpu_only
@pytest.mark.long
def test_run_of_a_hundred_updates_has_no_old_token(script, tmp_path):
    options = ["--max-staleness", 2, "--steps", 100, "--save-every", 0, "--output", "run"]
    text = script("train_grpo.py", *options).finish()
    assert text.splitlines()[-1].startswith("OK: reward "), text
    metrics = metrics_of(tmp_path / "run")
    assert metrics[35]["reward/mean"] > 0.95  # on-policy, as much after 30 steps
    assert [row["async/staleness_max"] for row in metrics[:3]] == [0, 1, 2]
    assert all(0 <= row["async/staleness_mean"] <= row["async/staleness_max"] <= 2 for row in metrics)
    assert max(row["logprobs/mismatch"] for row in metrics) < 1e-5
    assert all(0 <= row[f"async/{side}_idle"] <= 1 for row in metrics for side in ("engine", "trainer"))


@cpu_only
@pytest.mark.long
def test_resumed_run_with_tools_is_the_uninterrupted_one(script, tmp_path):
    options = ["--topology", "separate", "--tensor-parallel-size", 1, "--task", "lookup", "--eval-every", 0]
    script("train_grpo.py", *options, "--steps", 4, "--save-every", 2, "--output", "run").finish()
    expected = timeless(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-000004")
    script("train_grpo.py", "--resume", "run").finish()
    assert timeless(tmp_path / "run") == expected
