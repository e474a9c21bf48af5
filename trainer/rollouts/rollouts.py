"""The rollouts of a run's steps: which engine completes which prompts, when, and with weights of which version.

Weights have a version: the number of learning steps behind them. Step s learns with weights of version s - 1. A token
that was sampled from version v is (s - 1) - v steps old then, its staleness.

Every step learns from its own prompts, in the order of the data. It does not take whichever completions are finished:
these would be the short ones. So the prompts of step s may start as soon as the engines serve version
s - 1 - `max_staleness`, and no token is ever too old. Nothing is thrown away: a step waits for its longest completion,
which has had the time of `max_staleness` more steps. With a `max_staleness` of 0, a run is on-policy.

The completions of a prompt, a group, stay with one engine: on-policy, with the engine that has this part of the step's
prompts, and ahead of learning with the engine that has the fewest groups in flight. A group gets its rewards as soon as
it is complete.
"""

import asyncio
import itertools
import math
import threading
import time
from collections import deque
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import numpy as np
from annotated_types import Ge

from ..errors import RunError, TaskError
from ..flags import arg, setting
from ..learning.config import SamplingConfig
from ..learning.rollout import Rollout, samples_of
from ..run.actors import ActorGroup
from ..tasks.agent import Agent
from ..tasks.dataset import Row
from ..tasks.environment import in_thread, together
from ..tasks.rewards import AGENT_ERROR, Batch, Group, reward_metrics
from ..tasks.task import Task
from .agents import AgentRollout, AgentServer
from .conversation import Conversation, Turn, group_of
from .engine import EngineActor
from .sampling import in_parts, sampling_options

PROOF_TOKENS = 256  # a batch with fewer proves no sync: their mean varies too much to have a bound
PROOF_LENGTH = 8  # of a completion that is only a proof: the trainer computes its prompt as well, which costs more
READERS = 32  # prompts whose images are read at a time


@dataclass
class AheadArguments:
    """How far generation runs ahead of learning, and which prompts are replaced."""

    max_staleness: Annotated[int, Ge(0)] = arg(
        0, help="how many steps old the weights that sampled a token may be when a step learns from it; 0: on-policy"
    )
    in_flight: Annotated[int | None, Ge(1)] = setting(
        None,
        help="with --max-staleness, limit of the prompts whose completions are generated at a time (default: two"
        " steps')",
    )
    dynamic_sampling: Annotated[int, Ge(0)] = arg(
        0,
        help="DAPO's dynamic sampling: replace prompts whose completions all have the same reward, in so many rounds at"
        " most; 0: do not",
    )


class Rollouts:
    """The rollouts of the steps after `steps_done`, in order, with rewards unless they are to be computed later
    (`rewarded`). Conversations with tools fit into `max_model_len`. A slow reward stops neither the engines nor the
    trainer."""

    def __init__(
        self,
        engines: ActorGroup,
        task: Task,
        config: SamplingConfig,
        steps_done: int,
        args: AheadArguments | None = None,
        rewarded: bool = True,
        max_model_len: int | None = None,
    ):
        self.engines, self.session, self.task, self.config = engines, engines.session, task, config
        self.args, self.rewarded, self.max_model_len = args or AheadArguments(), rewarded, max_model_len
        self.last_begun, self.batches = steps_done, deque()  # the batches of the steps begun and not taken
        self.room = asyncio.Semaphore(self.args.in_flight or 2 * task.args.prompts_per_step)  # for later steps' groups
        self.reading = asyncio.Semaphore(READERS)
        self.in_flight = dict.fromkeys(engines.actors, 0)  # groups that each engine generates
        self.lock, self.closed = threading.Lock(), False
        # Since the last metric: tokens, and seconds in which groups were in flight, which are counted until `since`.
        # Since `idle_since`, when idle shares were last asked for: seconds in which an engine had none.
        self.generated, self.generating, self.idle = 0, 0.0, 0.0
        self.idle_since = self.since = time.perf_counter()
        self.server = AgentServer(task.tools) if isinstance(task.tools, Agent) else None

    def __enter__(self) -> "Rollouts":
        return self

    def __exit__(self, *_) -> None:
        with self.lock:
            self.closed = True  # or calls from other threads would start Ray anew
        if self.server:
            self.server.close()

    def take(self, step: int) -> Batch:
        """The prompts of this step, with completions and their rewards. The engines serve version `step` - 1 by now.

        So they may begin with the prompts of step `step` + `max_staleness`. Raises what `compute_group` of the rewards
        raises, and RunError as `_with_staleness` does.
        """
        while self.last_begun < max(step, min(step + self.args.max_staleness, self.task.steps)):
            self.last_begun += 1
            rows = self.task.draw(self.last_begun)
            self.batches.append(self._begin(_Request(rows, self.config, self.last_begun, rewarded=self.rewarded)))
        batch = self._wait_for(self.batches.popleft())
        if self.args.dynamic_sampling and step <= self.task.steps:  # the batch after them is for the proof alone
            batch = self._resample(batch, step, self.args.dynamic_sampling)
        batch = self._with_staleness(batch, step)
        batch.metrics |= self._generation_speed()
        return batch

    def complete(self, rows: list[Row], config: SamplingConfig, part: int = 0) -> Batch:
        """Completions of these rows, part of an evaluation's, without rewards."""
        return self._wait_for(self._begin(_Request(rows, config, 0, part, evaluation=True, rewarded=False)))

    def proof(self, step: int, batch: Batch) -> list[Rollout]:
        """Short rollouts that prove the sync before this step, if too few tokens of its batch come from its weights."""
        new = sum(int((own.mask & (own.versions == step - 1)).sum()) for own in samples_of(batch.rollouts)[0])
        if not self.args.max_staleness or new >= PROOF_TOKENS:
            return []
        length = min(PROOF_LENGTH, self.config.max_tokens)
        count = math.ceil(PROOF_TOKENS / length)
        groups = batch.groups[:count]
        prompts = [group.row.prompt_ids for group in groups]
        images = [group.rollouts[0].images for group in groups]
        size = math.ceil(count / len(groups))
        short = replace(self.config, group_size=size, max_tokens=length)
        sampling = [sampling_options(short, self.task.seed, step, number) for number in range(len(prompts))]
        rollouts = itertools.chain(*self.engines.call("proving", EngineActor.sample, prompts, sampling, images))
        return [replace(own, images=images[i // size % len(images)]) for i, own in enumerate(rollouts)]

    def idle_shares(self, seconds: dict[str, float]) -> dict[str, float]:
        """Metrics of a run ahead, by the `seconds` of the step's phases: the share of the time since the last ones in
        which engines had no prompts, or were paused for a sync; and the share of the step in which the trainers had
        nothing to learn from."""
        if not self.args.max_staleness:
            return {}
        with self.lock:
            self._count_seconds()
            engine = min(1.0, (self.idle + seconds["time/sync"]) / (self.since - self.idle_since))
            self.idle, self.idle_since = 0.0, self.since
        return {"async/engine_idle": engine, "async/trainer_idle": seconds["time/rollout"] / sum(seconds.values())}

    def _resample(self, batch: Batch, step: int, rounds: int) -> Batch:
        """The batch, in which groups whose rewards are all equal are replaced by groups of other prompts, in at most so
        many rounds (Yu et al. 2025, arXiv:2503.14476). What is still equal after that stays. The step's own prompts
        were round 0."""
        groups, drawn, replaced = list(batch.groups), [group.row for group in batch.groups], 0
        for round_number in range(1, rounds + 1):
            equal = [i for i, group in enumerate(groups) if group.is_equal]
            rows = self.task.draw_others(step, len(equal), drawn)
            if not rows:  # no group is equal, or all prompts have been tried
                break
            drawn = drawn + rows
            completed = self._wait_for(self._begin(_Request(rows, self.config, step, round_number)))
            unequal = [group for group in completed.groups if not group.is_equal]
            for i, group in zip(equal, unequal, strict=False):
                groups[i] = group
                replaced += 1
        return Batch(groups, {"dynamic_sampling/replaced": replaced} | reward_metrics(groups))

    def _with_staleness(self, batch: Batch, step: int) -> Batch:
        """This batch of a step and, in a run ahead, metrics of how many steps old its tokens are. Raises RunError if a
        token's label is older than allowed, or newer than the weights."""
        if not (samples := samples_of(batch.rollouts)[0]):
            error = next((own.extra[AGENT_ERROR] for own in batch.rollouts if AGENT_ERROR in own.extra), "no error")
            raise TaskError(f"step {step}: no agent has asked for a completion: {error}")
        ages = step - 1 - np.concatenate([own.versions[own.mask] for own in samples])
        oldest, newest = int(ages.max()), int(ages.min())
        if newest < 0 or oldest > self.args.max_staleness:
            raise RunError(
                f"step {step}: by the engine's labels, tokens are {newest} to {oldest} steps old, and not 0 to"
                f" {self.args.max_staleness}"
            )
        if self.args.max_staleness:
            batch.metrics |= {"async/staleness_mean": float(ages.mean()), "async/staleness_max": oldest}
        return batch

    def _generation_speed(self) -> dict[str, float]:
        """The tokens of the groups completed since the last metric, over the seconds in which any was in flight, as a
        metric; {} if none was completed."""
        with self.lock:
            self._count_seconds()
            if not self.generated:
                return {}
            speed, self.generated, self.generating = self.generated / self.generating, 0, 0.0
        return {"perf/generation_tokens_per_second": speed}

    def _count_seconds(self) -> None:
        """Count the time until now, before the number of groups in flight changes."""
        now, groups = time.perf_counter(), [*self.in_flight.values()]
        self.generating += now - self.since if any(groups) else 0.0
        self.idle += (now - self.since) * groups.count(0) / len(groups)
        self.since = now

    def _count(self, engine: str, groups: int, tokens: int = 0) -> None:
        """Add to the groups that this engine generates, and to the tokens of those completed."""
        with self.lock:
            self._count_seconds()
            self.in_flight[engine] += groups
            self.generated += tokens

    def _wait_for(self, request: "_Request") -> Batch:
        self.session.wait_for_thread(request.result, partial(self._phase, request))
        groups = request.result.result()
        return Batch(groups, reward_metrics(groups))

    def _phase(self, request: "_Request") -> str:
        """The phase to show."""
        if not request.left:
            return "rewarding"
        return "evaluating" if request.evaluation else "generating"

    def _begin(self, request: "_Request") -> "_Request":
        """Begin with this request's groups, side by side. Those for a later step may have to wait for room."""
        request.left = len(request.rows)
        request.result = together(self._complete(request, i) for i in range(request.left))
        return request

    def _waits(self, request: "_Request") -> bool:
        """Whether other groups go before those of this request: it may be for a later step."""
        return bool(self.args.max_staleness) and not request.evaluation and not request.round_number

    def _engine(self, request: "_Request", i: int) -> str:
        """The engine for the group of row `i`."""
        if self.args.max_staleness:
            return min(self.in_flight, key=self.in_flight.get)
        parts = in_parts(range(len(request.rows)), len(self.in_flight))  # the same in every run
        return next(engine for engine, part in zip(self.in_flight, parts, strict=True) if i in part)

    async def _complete(self, request: "_Request", i: int) -> Group:
        """The group of row `i`, generated by one engine, with rewards if they are wanted."""
        part, tokens = "evaluation" if request.evaluation else f"step {request.step}", 0
        async with self.room if self._waits(request) else nullcontext():
            if self.closed:
                raise RunError("the run has ended")
            engine = self._engine(request, i)
            self._count(engine, +1)
            try:
                with self.session.timeline.span(f"{engine}: prompts", part):
                    group = await self._generate(request, i, engine)
                tokens = sum(rollout.length for rollout in group.rollouts)
            finally:
                self._count(engine, -1, tokens)
                request.left -= 1
        return await self.task.rewards.compute_group(group, request.step - 1) if request.rewarded else group

    async def _generate(self, request: "_Request", i: int, engine: str) -> Group:
        row, size, actor = request.rows[i], request.config.group_size, self.engines.actors[engine]
        where = {"evaluation": request.evaluation, "round_number": request.round_number}
        sampling = partial(sampling_options, request.config, self.task.seed, request.step, **where)
        async with self.reading:
            images = row.images and await asyncio.wrap_future(in_thread(row.images.read))

        async def sample(prompt_ids: list[int], options: dict, low_priority: bool) -> list[Rollout]:
            with self.lock:
                if self.closed:
                    raise RunError("the run has ended")
                call = actor.sample.remote([prompt_ids], [options], [images], low_priority)
            return await self.session.answer("generating", engine, call)

        async def sample_turn(turn: Turn) -> Rollout:
            low_priority = self._waits(request) and not turn.index  # what has begun goes before what has not
            return (await sample(turn.prompt_ids, sampling(turn.number, turn=turn), low_priority))[0]

        if not self.task.tools:
            sampled = await sample(row.prompt_ids, sampling(i), self._waits(request))
            return Group(row, [replace(own, images=images) for own in sampled])
        numbers, limits = range(i * size, (i + 1) * size), (request.config.max_tokens, self.max_model_len)
        if self.server:
            asked = [AgentRollout(self.task.tools, sample_turn, number, *limits) for number in numbers]
            return await self.server.group(row, asked)
        conversations = [Conversation(self.task.tools, row, images, n, *limits, request.evaluation) for n in numbers]
        await asyncio.gather(*(conversation.run(sample_turn) for conversation in conversations))
        return group_of(conversations)


@dataclass
class _Request:
    """Rows whose completions are generated and, if wanted, rewarded. `result` is of their groups, in order."""

    rows: list[Row]
    config: SamplingConfig
    step: int
    round_number: int = 0  # of dynamic sampling, or the part of an evaluation; 0: the step's own prompts
    evaluation: bool = False
    rewarded: bool = True
    result: Future | None = None
    left: int = 0  # groups that are not generated yet
