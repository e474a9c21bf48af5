"""Rollouts for the next steps, generated while the trainer learns, and the weights that each token comes from.

Weights have a version: the number of learning steps behind them. Step s learns with weights of version s - 1. A token
that was sampled from version v is (s - 1) - v steps old then, its staleness.

Every step learns from its own prompts, in the order of the data. It does not take whichever completions are finished:
these would be the short ones. So the prompts of step s may start as soon as the engines serve version
s - 1 - `max_staleness`, and no token is ever too old. Nothing is thrown away: a step waits for its longest completion,
which has had the time of `max_staleness` more steps.

The completions of a prompt, a group, go to the engine with the fewest groups in flight. They get their rewards as soon
as they are complete.
"""

import asyncio
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated

import numpy as np
from annotated_types import Ge

from rlhf_utils import WeightSyncError

from ..errors import RunError
from ..flags import arg, setting
from ..images import Images
from ..learning.grpo import GRPOConfig
from ..learning.rollout import Rollout
from ..run.actors import ActorGroup
from ..run.session import die_with_children
from ..tasks.dataset import Row
from ..tasks.environment import together
from ..tasks.rewards import Batch, Group, reward_metrics
from ..tasks.task import Task
from .conversation import Conversation, Turn, converse, group_of
from .engine import (
    KEPT_PREFIX_CACHE,
    engine_prompt,
    engine_start,
    replace_equal_groups,
    rollouts_of,
    sampling_options,
    sampling_params,
    set_environment,
    with_images,
)

PROOF_TOKENS = 256  # a batch with fewer proves no sync: their mean varies too much to have a bound
PROOF_LENGTH = 8  # of a completion that is only a proof: the trainer computes its prompt as well, which costs more


@dataclass
class AsyncArguments:
    """How far generation runs ahead of learning."""

    max_staleness: Annotated[int, Ge(0)] = arg(
        2, help="how many steps old the weights that sampled a token may be when a step learns from it; 0: on-policy"
    )
    in_flight: Annotated[int | None, Ge(1)] = setting(
        None, help="limit of the prompts whose completions are generated at a time (default: two steps')"
    )


class AsyncEngineActor:
    """A Ray actor around vllm.AsyncLLM, many of whose methods run at the same time. It reserves no GPU: vLLM's workers
    use bundles of its placement group."""

    def __init__(self, number: int):
        self.request_ids, self.leaving = itertools.count(), False
        self.running, self.paused = 0, False  # requests in flight
        self.idle = 0.0  # seconds since the last sync in which nothing was generated
        self.last_idle_share = 0.0

    async def load(self, model: str, options: dict, environment: dict[str, str]) -> int:
        """As `EngineActor.load`."""
        set_environment(environment)
        from vllm import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        options = {"scheduling_policy": "priority", "disable_log_stats": True} | options
        with engine_start():
            arguments = AsyncEngineArgs(model, **options)
            # The usage context of vllm.LLM: with AsyncLLM's, batches are larger.
            self.llm = AsyncLLM.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)
        die_with_children(unless=lambda: self.leaving)
        self.since = self.resumed = time.perf_counter()
        return self.llm.model_config.max_model_len

    async def sample(
        self,
        prompts: list[list[int]],
        sampling: list[dict],
        evaluation: bool = False,
        images: Sequence[Images | None] | None = None,
        low_priority: bool = False,
    ) -> list[Rollout]:
        """As `EngineActor.sample`, with the version of each token's weights.

        Prompts of `low_priority` wait behind all others in vLLM's queue.
        """
        inputs = map(engine_prompt, prompts, images or [None] * len(prompts))
        calls = [self._generate(*request, low_priority) for request in zip(inputs, sampling, strict=True)]
        requests = await asyncio.gather(*calls)
        if evaluation:
            await self.llm.reset_prefix_cache()  # vLLM does not while it generates for others; the next sync does
        return rollouts_of(requests, self.llm.get_tokenizer(), labelled=True)

    async def _generate(self, prompt: dict, options: dict, low_priority: bool):
        from vllm.sampling_params import RequestOutputKind

        params = sampling_params(options)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        self._count(+1)
        try:
            outputs = self.llm.generate(prompt, params, str(next(self.request_ids)), priority=int(low_priority))
            (request,) = [output async for output in outputs]
            return request
        finally:
            self._count(-1)

    async def take_weights(self, version: int, *args) -> bool:
        """Have every worker take part in a sync, while generation pauses. Returns whether all of them serve exactly
        what was sent. Only then does generation go on, with tokens of this version."""
        await self.llm.engine_core.pause_scheduler_async(mode="keep")  # pause_generation would sleep for 20 ms as well
        self._count(0, paused=True)
        await self._reset_caches()
        for result in await self.llm.collective_rpc("receive_weights", args=args):
            if "error" in result:
                raise WeightSyncError(result["error"])
        served = all(await self.llm.collective_rpc("check_weights_changed"))
        if served:
            await self.llm.update_weight_version(str(version))  # while paused, or vLLM labels some tokens wrongly
            await self.llm.resume_generation()
            self._count(0, paused=False)
            self.last_idle_share = self.idle / (self.since - self.resumed)
            self.idle, self.resumed = 0.0, self.since
        return served

    async def _reset_caches(self) -> None:
        """Drop what was computed with the old weights. Unfinished completions compute their keys and values anew."""
        if not await self.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
            raise RunError(KEPT_PREFIX_CACHE)
        await self.llm.reset_mm_cache()
        await self.llm.reset_encoder_cache()

    async def idle_share(self) -> float:
        """The share of the time between the last two syncs in which nothing was generated."""
        return self.last_idle_share

    async def shutdown(self) -> None:
        self.leaving = True
        self.llm.shutdown()

    def _count(self, requests: int, paused: bool | None = None) -> None:
        """Add to the number of requests in flight. The time until now was idle if it was without any, or paused."""
        now = time.perf_counter()
        if self.paused or not self.running:
            self.idle += now - self.since
        self.since = now
        self.running += requests
        if paused is not None:
            self.paused = paused


class RolloutsAhead:
    """The rollouts of the steps after `steps_done`, in order. The engines generate for some steps ahead.

    A slow reward stops neither the engines nor the trainer.
    """

    def __init__(self, engines: ActorGroup, task: Task, args: AsyncArguments, config: GRPOConfig, steps_done: int):
        self.engines, self.session, self.task, self.args, self.config = engines, engines.session, task, args, config
        self.last_begun, self.batches = steps_done, deque()  # the batches of the steps begun and not taken
        self.max_in_flight = args.in_flight or 2 * task.args.prompts_per_step
        self.in_flight = dict.fromkeys(engines.actors, 0)  # groups that each engine generates
        self.queued: deque[tuple[_PendingBatch, int]] = deque()  # groups that no engine has yet
        self.lock, self.closed = threading.RLock(), False

    def __enter__(self) -> "RolloutsAhead":
        return self

    def __exit__(self, *_) -> None:
        with self.lock:
            self.closed = True  # or calls from other threads would start Ray anew

    def take(self, step: int) -> Batch:
        """The prompts of this step, with completions and their rewards. The engines serve version `step` - 1 by now.

        So they may begin with the prompts of step `step` + `max_staleness`. Raises what `compute_group` of the rewards
        raises, and RunError as `_with_staleness` does.
        """
        while self.last_begun < max(step, min(step + self.args.max_staleness, self.task.steps)):
            self.last_begun += 1
            rows = self.task.draw(self.last_begun)
            self.batches.append(self._begin(self.last_begun, rows))
        return self._with_staleness(self._wait_for(self.batches.popleft().result), step)

    def resample(self, batch: Batch, step: int) -> Batch:
        """As `trainer.rollouts.engine.resample`, by groups that go before all others."""

        def complete_and_reward(rows: list[Row], round_number: int) -> Batch:
            return self._wait_for(self._begin(step, rows, round_number).result)

        rounds = self.config.dynamic_sampling
        return self._with_staleness(replace_equal_groups(self.task, batch, rounds, step, complete_and_reward), step)

    def idle_shares(self, seconds: dict[str, float]) -> dict[str, float]:
        """Metrics: the shares of a step in which engines generated nothing, as they measure it, and in which the
        trainers had nothing to learn from, by the `seconds` of the step's phases."""
        shares = self.engines.call("syncing", AsyncEngineActor.idle_share)
        metrics = {"async/engine_idle": sum(shares) / len(shares)}
        if len(shares) > 1:
            metrics |= {f"async/engine_idle/{i}": share for i, share in enumerate(shares)}
        return metrics | {"async/trainer_idle": seconds["time/rollout"] / sum(seconds.values())}

    def proof(self, step: int, batch: Batch) -> list[Rollout]:
        """Short rollouts that prove the sync before this step, if too few tokens of its batch come from its weights."""
        new = sum(int((rollout.mask & (rollout.versions == step - 1)).sum()) for rollout in batch.rollouts)
        if new >= PROOF_TOKENS:
            return []
        length = min(PROOF_LENGTH, self.config.max_tokens)
        count = math.ceil(PROOF_TOKENS / length)
        groups = batch.groups[:count]
        prompts = [group.row.prompt_ids for group in groups]
        images = [group.rollouts[0].images for group in groups]
        size = math.ceil(count / len(groups))
        short = replace(self.config, group_size=size, max_tokens=length)
        sampling = [sampling_options(short, self.task.seed, step, number) for number in range(len(prompts))]
        rollouts = itertools.chain(
            *self.engines.call("proving", AsyncEngineActor.sample, prompts, sampling, False, images)
        )
        return [replace(own, images=images[i // size % len(images)]) for i, own in enumerate(rollouts)]

    def _with_staleness(self, batch: Batch, step: int) -> Batch:
        """This batch of a step, with metrics of how many steps old its tokens are. Raises RunError if a token's label
        is older than allowed, or newer than the weights."""
        ages = step - 1 - np.concatenate([rollout.versions[rollout.mask] for rollout in batch.rollouts])
        oldest, newest = int(ages.max()), int(ages.min())
        if newest < 0 or oldest > self.args.max_staleness:
            raise RunError(
                f"step {step}: by the engine's labels, tokens are {newest} to {oldest} steps old, and not 0 to"
                f" {self.args.max_staleness}"
            )
        batch.metrics |= {"async/staleness_mean": float(ages.mean()), "async/staleness_max": oldest}
        return batch

    def _begin(self, step: int, rows: list[Row], round_number: int = 0) -> "_PendingBatch":
        """Begin a batch of these rows: when fewer groups are in flight or, if it replaces others, at once."""
        batch = _PendingBatch(step, rows, round_number)
        groups = [(batch, i) for i in range(len(rows))]
        if batch.low_priority:
            self.queued.extend(groups)
            groups = []
        self._dispatch(groups)
        return batch

    def _wait_for(self, future: Future):
        self.session.wait_for_thread(future, self._phase)
        return future.result()

    def _phase(self) -> str:
        return "generating" if any(self.in_flight.values()) else "rewarding"

    def _dispatch(self, groups: list[tuple["_PendingBatch", int]]) -> None:
        """Have engines generate these groups, and as many of those queued as there is room for."""
        with self.lock:
            while self.queued and sum(self.in_flight.values()) + len(groups) < self.max_in_flight:
                groups = [*groups, self.queued.popleft()]
            for batch, i in groups if not self.closed else ():
                engine = min(self.in_flight, key=self.in_flight.get)
                self.in_flight[engine] += 1
                completing = together([self._complete(batch, i, engine)])
                completing.add_done_callback(partial(batch.settle, i))

    async def _complete(self, batch: "_PendingBatch", i: int, engine: str) -> Group:
        """The group of row `i`, generated by this engine, with rewards."""
        try:
            group = await self._generate(batch, i, engine)
        finally:
            with self.lock:
                self.in_flight[engine] -= 1
                self._dispatch([])
        return await self.task.rewards.compute_group(group, batch.step - 1)

    async def _generate(self, batch: "_PendingBatch", i: int, engine: str) -> Group:
        row, size, actor = batch.rows[i], self.config.group_size, self.engines.actors[engine]
        sampling = partial(sampling_options, self.config, self.task.seed, batch.step, round_number=batch.round_number)

        images = row.images and row.images.read()

        async def sample(prompt_ids: list[int], options: dict, low_priority: bool) -> list[Rollout]:
            with self.lock:
                if self.closed:
                    raise RunError("the run has ended")
                call = actor.sample.remote([prompt_ids], [options], False, [images], low_priority)
            return (await self.session.answers("generating", {engine: call}))[0]

        async def sample_turn(turns: list[Turn]) -> list[Rollout]:
            (turn,) = turns
            low_priority = batch.low_priority and not turn.index  # what has begun goes before what has not
            return await sample(turn.prompt_ids, sampling(turn.number, turn=turn), low_priority)

        if not self.task.tools:
            return Group(row, with_images(await sample(row.prompt_ids, sampling(i), batch.low_priority), images))
        conversations = [
            Conversation(self.task.tools, row, images, number, self.config.max_tokens)
            for number in range(i * size, (i + 1) * size)
        ]
        await asyncio.gather(*(converse([conversation], sample_turn) for conversation in conversations))
        return group_of(conversations)


@dataclass
class _PendingBatch:
    """Rows of a step whose completions are generated and rewarded, group by group. `result` is the batch."""

    step: int
    rows: list[Row]
    round_number: int = 0  # of dynamic sampling; 0: the step's own prompts
    result: Future = field(default_factory=Future)
    groups: dict[int, Group] = field(default_factory=dict)  # complete groups, by row

    @property
    def low_priority(self) -> bool:
        return not self.round_number

    def settle(self, i: int, completing: Future) -> None:
        """The group of row `i` has its rewards, or there was an error."""
        if self.result.done():  # the first error counts
            return
        if error := completing.exception():  # for whoever waits for the batch
            self.result.set_exception(error)
            return
        (self.groups[i],) = completing.result()
        if len(self.groups) == len(self.rows):
            groups = [self.groups[i] for i in range(len(self.rows))]
            self.result.set_result(Batch(groups, reward_metrics(groups)))
