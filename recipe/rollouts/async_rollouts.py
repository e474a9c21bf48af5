"""Rollouts for the next steps, generated while the trainer learns, and the weights that each token comes from.

Weights have a version: the number of learning steps behind them. Step s learns with weights of version s - 1. A token
that was sampled from version v is (s - 1) - v updates old then, its staleness.

Every step learns from its own prompts, in the order of the data, and not from those that happen to be finished: these
would be the ones with short completions. So the prompts of step s may start as soon as the engines serve version
s - 1 - `max_staleness`, and no token is ever too old. Nothing is thrown away: a step waits for its longest completion,
which has had the time of `max_staleness` more steps.

The completions of a prompt, a group, go to the engine with the fewest groups in flight. They get their rewards as soon
as they are complete.
"""

import asyncio
import itertools
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt
from transformers.hf_argparser import HfArg

from rlhf_utils import WeightSyncError

from ..errors import RunError, TaskError
from ..learning.rollout import Rollout
from ..run.actors import ActorGroup
from ..run.session import die_with_children, explain
from ..tasks.dataset import Row
from ..tasks.environment import event_loop
from ..tasks.rewards import Batch, Group, Scores, reward_metrics
from ..tasks.task import Task
from .conversation import Conversation, group_of
from .engine import replace_equal_groups, rollouts_of, sampling_options, sampling_params, turn_options
from .evaluation import evaluate

PROOF_TOKENS = 256  # of a step at least prove the sync before it: a mean over fewer would vary too much for a bound


@dataclass
class AsyncArguments:
    """How far generation runs ahead of learning."""

    max_staleness: Annotated[int, Ge(0)] = HfArg(
        default=2,
        help="updates, at most, between the weights that sample a token and those that learn from it; 0: on-policy",
    )
    in_flight: Annotated[int | None, Ge(1)] = HfArg(
        default=None, help="prompts whose completions are generated at the same time (default: those of two steps)"
    )
    reward_timeout: Annotated[float, Gt(0)] = HfArg(
        default=600.0, help="seconds that the rewards of one prompt's completions may take"
    )


class AsyncEngineActor:
    """A Ray actor around vllm.AsyncLLM, many of whose methods run at one time. It reserves no GPU: vLLM's workers take
    bundles of its placement group."""

    def __init__(self, number: int):
        self.number, self.names, self.leaving = number, itertools.count(), False
        self.running, self.paused, self.idle = 0, False, 0.0  # requests in flight; seconds without, since the last sync
        self.share = 0.0  # of the time between the last two syncs in which nothing was generated

    async def load(self, model: str, options: dict) -> int:
        """Start the engine. Returns the tokens that a prompt and its completion may have."""
        from vllm import AsyncEngineArgs  # only now: `llm_options` has set its environment variables
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        # Proofs and evaluations go before what has not begun.
        options = {"scheduling_policy": "priority", "disable_log_stats": True} | options
        # As vllm.LLM does: its default batches are larger.
        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model, **options), usage_context=UsageContext.LLM_CLASS)
        die_with_children(unless=lambda: self.leaving)
        self.since = self.resumed = time.perf_counter()
        return self.llm.model_config.max_model_len

    async def sample(
        self, prompts: list[list[int]], sampling: list[dict], evaluation: bool = False, waits: bool = False
    ) -> list[Rollout]:
        """As `EngineActor.sample`, with the version of each token's weights.

        What `waits` comes after all that does not, in vLLM's queue.
        """
        params = map(sampling_params, sampling)
        requests = await asyncio.gather(
            *(self._generate(*each, priority=int(waits)) for each in zip(prompts, params, strict=True))
        )
        if evaluation:
            await self.llm.reset_prefix_cache()  # which vLLM leaves as it is while it generates: the next sync does it
        spans = [output.weight_versions for request in requests for output in request.outputs]
        return [
            replace(rollout, versions=np.array([int(s.version) for s in own for _ in range(s.start, s.end)], np.int32))
            for rollout, own in zip(rollouts_of(requests, self.llm.get_tokenizer()), spans, strict=True)
        ]

    async def _generate(self, prompt_ids: list[int], params, priority: int):
        from vllm import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params.output_kind = RequestOutputKind.FINAL_ONLY
        self._count(+1)
        try:
            prompt, name = TokensPrompt(prompt_token_ids=prompt_ids), str(next(self.names))
            (request,) = [output async for output in self.llm.generate(prompt, params, name, priority=priority)]
            return request
        finally:
            self._count(-1)

    async def take_weights(self, version: int, *args) -> bool:
        """Have every worker take part in a sync, while generation pauses. Returns whether all of them serve exactly
        what was sent; only then generation goes on, with tokens of this version."""
        # What pause_generation does for text, without its sleep of 20 ms afterwards. What is half generated goes on
        # with the next weights: its cache is cleared.
        await self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)
        self._count(0, paused=True)
        for result in await self.llm.collective_rpc("receive_weights", args=args):
            if "error" in result:
                raise WeightSyncError(result["error"])
        served = all(await self.llm.collective_rpc("check_weights_changed"))
        if served:
            await self.llm.update_weight_version(str(version))  # while paused, or vLLM labels some tokens wrongly
            await self.llm.resume_generation()
            self._count(0, paused=False)
            self.share, self.idle, self.resumed = self.idle / (self.since - self.resumed), 0.0, self.since
        return served

    async def idle_share(self) -> float:
        return self.share

    async def shutdown(self) -> None:
        self.leaving = True
        self.llm.shutdown()

    def _count(self, requests: int, paused: bool | None = None) -> None:
        """Add to the number of requests in flight. Time without any counts as idle, and so does a pause."""
        now = time.perf_counter()
        if self.paused or not self.running:
            self.idle += now - self.since
        self.since = now
        self.running += requests
        self.paused = self.paused if paused is None else paused


class RolloutsAhead:
    """The rollouts of the steps after `steps_done`, in order. The engines generate for some steps ahead.

    Coroutines among the rewards run for several groups at once. Other rewards run in one thread, group after group, so
    that a slow one stops neither the engines nor the trainer, and none is called twice at one time.
    """

    def __init__(self, engines: ActorGroup, task: Task, args, steps_done: int):
        self.engines, self.session, self.task, self.args = engines, engines.session, task, args
        self.begun, self.ahead = steps_done, deque()
        self.limit = args.in_flight or 2 * args.prompts_per_step
        self.flying = dict.fromkeys(engines.actors, 0)  # groups that each engine generates
        self.waiting: deque[tuple[_Groups, int]] = deque()  # for their turn
        self.scoring: tuple[float, str] | None = None  # since when the thread waits for rewards, and of what
        self.jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # of the thread
        self.lock, self.closed = threading.RLock(), False
        threading.Thread(target=self._work, daemon=True).start()

    def __enter__(self) -> "RolloutsAhead":
        return self

    def __exit__(self, *_) -> None:
        with self.lock:
            self.closed = True  # or calls from other threads would start Ray anew

    def take(self, step: int) -> Batch:
        """The prompts of this step, with completions and their rewards. The engines serve version `step` - 1 by now.

        So they may begin with the prompts of step `step` + `max_staleness`. Raises what the reward raised; TaskError if
        it takes too long; RunError if a token's label is older than allowed, or newer than the weights.
        """
        while self.begun < max(step, min(step + self.args.max_staleness, self.args.steps)):
            self.begun += 1
            self.ahead.append(_Groups(self, self.begun, self.task.draw(self.begun), waits=True))
        batch = self._result(self.ahead.popleft())
        ages = step - 1 - np.concatenate([rollout.versions[rollout.mask] for rollout in batch.rollouts])
        oldest, newest = int(ages.max()), int(ages.min())
        if newest < 0 or oldest > self.args.max_staleness:
            raise RunError(
                f"step {step}: by the engine's labels, tokens are {newest} to {oldest} updates old, and not 0 to"
                f" {self.args.max_staleness}"
            )
        batch.metrics |= {"async/staleness_mean": float(ages.mean()), "async/staleness_max": oldest}
        return batch

    def resample(self, batch: Batch, step: int) -> Batch:
        """As `recipe.rollouts.engine.resample`, by groups that go before all others."""
        return replace_equal_groups(
            self.task, batch, self.args, step, lambda rows: self._result(_Groups(self, step, rows, waits=False))
        )

    def evaluate(self, step: int) -> dict[str, float]:
        """As `recipe.rollouts.evaluation.evaluate`, with the rewards in the thread."""

        def score(batch: Batch, steps_done: int) -> Batch:
            scored = Future()
            what = f"the evaluation after step {step}"
            self.jobs.put(lambda: _settle(scored, lambda: self._timed(what, lambda: score_here(batch, steps_done))))
            self.session.wait_for_thread(scored, self._phase)
            return scored.result()

        score_here = self.task.rewards.score
        return evaluate(self.engines, self.task, self.args, step, score)

    def idle_shares(self, seconds: dict[str, float]) -> dict[str, float]:
        """The shares of a step in which engines generated nothing, by the engine, and in which trainers had nothing to
        learn from, by the `seconds` of its phases."""
        shares = self.engines.call("syncing", "idle_share")
        own = {f"async/engine_idle/{i}": share for i, share in enumerate(shares)} if shares[1:] else {}
        idle = {"async/engine_idle": sum(shares) / len(shares), **own}
        return idle | {"async/trainer_idle": seconds["time/rollout"] / sum(seconds.values())}

    def proof(self, step: int, batch: Batch) -> list[Rollout]:
        """Short rollouts to prove the sync before this step, if too few of the step's tokens are as new as that."""
        new = sum(int((rollout.mask & (rollout.versions == step - 1)).sum()) for rollout in batch.rollouts)
        if new >= PROOF_TOKENS:
            return []
        prompts = [group.row.prompt_ids for group in batch.groups]
        short = replace(self.args, max_tokens=math.ceil(PROOF_TOKENS / len(batch.rollouts)))
        sampling = [sampling_options(short, step, number) for number in range(len(prompts))]
        return [rollout for part in self.engines.call("proving", "sample", prompts, sampling) for rollout in part]

    def _result(self, groups: "_Groups") -> Batch:
        self.session.wait_for_thread(groups.result, self._phase)
        return groups.result.result()

    def _phase(self) -> str:
        """What goes on now. Raises TaskError if rewards have been computed for too long; they may never be done."""
        since, what = self.scoring or (time.monotonic(), "")
        if time.monotonic() - since > self.args.reward_timeout:
            raise TaskError(f"the rewards of {what} took longer than {self.args.reward_timeout:g} s: --reward-timeout")
        return "rewarding" if what and not any(self.flying.values()) else "generating"

    def _dispatch(self, *groups: tuple["_Groups", int]) -> None:
        """Have engines generate these groups, and as many of those that wait as there is room for."""
        with self.lock:
            ready = list(groups)
            while self.waiting and sum(self.flying.values()) + len(ready) < self.limit:
                ready.append(self.waiting.popleft())
            for step, i in ready if not self.closed else ():
                name = min(self.flying, key=self.flying.get)
                self.flying[name] += 1
                call = self._begin(step, i, self.engines.actors[name])
                call.add_done_callback(lambda done, own=(step, i), name=name: self._arrived(done, name, *own))

    def _begin(self, step: "_Groups", i: int, engine) -> Future:
        """The completions of row `i`, or its group of conversations, on their way in this engine."""
        if self.task.tools:
            return asyncio.run_coroutine_threadsafe(self._conversations(step, i, engine), event_loop("conversations"))
        sampling = sampling_options(self.args, step.number, i)
        return engine.sample.remote([step.rows[i].prompt_ids], [sampling], False, step.waits).future()

    async def _conversations(self, step: "_Groups", i: int, engine) -> Group:
        size = self.args.group_size
        every = [
            Conversation(self.task.tools, step.rows[i], number, self.args.max_tokens, evaluation=False)
            for number in range(i * size, (i + 1) * size)
        ]
        await asyncio.gather(*(self._converse(own, engine, step) for own in every))
        return group_of(every)

    async def _converse(self, conversation: Conversation, engine, step: "_Groups") -> None:
        """A conversation from its beginning to its end. What has begun comes before what has not."""
        await conversation.start()
        while conversation.goes_on:
            with self.lock:
                if self.closed:
                    raise RunError("the run has ended")
                turn = conversation.turn
                sampling, waits = turn_options(self.args, step.number, turn), step.waits and not turn.index
                call = engine.sample.remote([turn.prompt_ids], [sampling], False, waits)
            (sampled,) = await asyncio.wrap_future(call.future())
            await conversation.take(sampled)

    def _arrived(self, done: Future, engine: str, step: "_Groups", i: int) -> None:
        """A group is complete: another one may begin, and its rewards are computed."""
        with self.lock:
            self.flying[engine] -= 1
            self._dispatch()
        try:
            found = done.result()
            group = found if isinstance(found, Group) else Group(step.rows[i], found)
            scores = Scores(self.task.rewards, group, step.number - 1)
            scores.begin()
        except Exception as error:  # for the one who waits for it
            step.fail(explain("generating", engine, error))
        else:
            compute = lambda: scores.scored(scores.finish())  # noqa: E731 - called in the thread
            self.jobs.put(lambda: step.settle(i, lambda: self._timed(f"step {step.number}", compute)))

    def _timed(self, what: str, compute: Callable):
        """What `compute` returns, with its time under watch."""
        self.scoring = time.monotonic(), what
        try:
            return compute()
        finally:
            self.scoring = None

    def _work(self) -> None:
        while True:
            self.jobs.get()()


class _Groups:
    """Groups on their way: rows whose completions are generated and scored, each by itself. `result` is the batch."""

    def __init__(self, ahead: RolloutsAhead, number: int, rows: list[Row], waits: bool):
        self.number, self.rows, self.waits, self.result = number, rows, waits, Future()
        self.groups: list[Group | None] = [None] * len(rows)
        own = [(self, i) for i in range(len(rows))]
        if waits:
            ahead.waiting.extend(own)
        ahead._dispatch(*(() if waits else own))

    def settle(self, i: int, compute: Callable[[], Group]) -> None:
        try:
            self.groups[i] = compute()
        except BaseException as error:  # for the one who waits for it
            self.fail(error)
        if all(self.groups) and not self.result.done():
            self.result.set_result(Batch(self.groups, reward_metrics(self.groups)))

    def fail(self, error: BaseException) -> None:
        if not self.result.done():
            self.result.set_exception(error)


def _settle(future: Future, compute: Callable) -> None:
    try:
        future.set_result(compute())
    except BaseException as error:  # for the one who waits for it
        future.set_exception(error)
