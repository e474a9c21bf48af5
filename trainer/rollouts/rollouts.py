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
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
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
from ..tasks.environment import together
from ..tasks.rewards import AGENT_ERROR, Batch, Group, reward_metrics
from ..tasks.task import Task
from .agents import AgentRollout, AgentServer
from .conversation import Conversation, Turn, group_of
from .engine import Engine
from .sampling import in_parts, sampling_options, with_images

PROOF_TOKENS = 256  # a batch with fewer proves no sync: their mean varies too much to have a bound
PROOF_LENGTH = 8  # of a completion that is only a proof: the trainer computes its prompt as well, which costs more


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
        self.max_in_flight = self.args.in_flight or 2 * task.args.prompts_per_step
        self.in_flight = dict.fromkeys(engines.actors, 0)  # groups that each engine generates
        self.queued: deque[tuple[_Request, int]] = deque()  # groups that no engine has yet
        self.lock, self.closed = threading.RLock(), False
        # Since the last metric: tokens, and seconds in which groups were in flight, which are counted until `since`.
        self.generated, self.generating, self.since = 0, 0.0, time.perf_counter()
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
        rollouts = itertools.chain(*self.engines.call("proving", Engine.sample, prompts, sampling, images))
        return [replace(own, images=images[i // size % len(images)]) for i, own in enumerate(rollouts)]

    def idle_shares(self, seconds: dict[str, float]) -> dict[str, float]:
        """Metrics of a run ahead: the shares of a step in which engines generated nothing, if they measure it, and in
        which the trainers had nothing to learn from, by the `seconds` of the step's phases."""
        if not self.args.max_staleness:
            return {}
        metrics = {"async/trainer_idle": seconds["time/rollout"] / sum(seconds.values())}
        shares = self.engines.call("syncing", Engine.idle_share)
        if None not in shares:
            metrics["async/engine_idle"] = sum(shares) / len(shares)
        if len(shares) > 1:
            metrics |= {f"async/engine_idle/{i}": share for i, share in enumerate(shares)}
        return metrics

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
        now = time.perf_counter()
        self.generating += now - self.since if any(self.in_flight.values()) else 0.0
        self.since = now

    def _wait_for(self, request: "_Request") -> Batch:
        self.session.wait_for_thread(request.result, partial(self._phase, request))
        return request.result.result()

    def _phase(self, request: "_Request") -> str:
        """The phase to show."""
        if any(self.in_flight.values()):
            return "evaluating" if request.evaluation else "generating"
        return "rewarding"

    def _begin(self, request: "_Request") -> "_Request":
        """Begin with this request's groups: at once or, if they are for a later step, when fewer are in flight."""
        groups = [(request, i) for i in range(len(request.rows))]
        if self._waits(request):
            self.queued.extend(groups)
            groups = []
        self._dispatch(groups)
        return request

    def _waits(self, request: "_Request") -> bool:
        """Whether other groups go before those of this request: it may be for a later step."""
        return bool(self.args.max_staleness) and not request.evaluation and not request.round_number

    def _dispatch(self, groups: list[tuple["_Request", int]]) -> None:
        """Have engines generate these groups, and as many of those queued as there is room for."""
        with self.lock:
            while self.queued and sum(self.in_flight.values()) + len(groups) < self.max_in_flight:
                groups = [*groups, self.queued.popleft()]
            for request, i in groups if not self.closed else ():
                engine = self._engine(request, i)
                self._count_seconds()
                self.in_flight[engine] += 1
                completing = together([self._complete(request, i, engine)])
                completing.add_done_callback(partial(request.settle, i))

    def _engine(self, request: "_Request", i: int) -> str:
        """The engine for the group of row `i`."""
        if self.args.max_staleness:
            return min(self.in_flight, key=self.in_flight.get)
        parts = in_parts(range(len(request.rows)), len(self.in_flight))  # the same in every run
        return next(engine for engine, part in zip(self.in_flight, parts, strict=True) if i in part)

    async def _complete(self, request: "_Request", i: int, engine: str) -> Group:
        """The group of row `i`, generated by this engine, with rewards if they are wanted."""
        part, tokens = "evaluation" if request.evaluation else f"step {request.step}", 0
        try:
            with self.session.timeline.span(f"{engine}: prompts", part):
                group = await self._generate(request, i, engine)
            tokens = sum(rollout.length for rollout in group.rollouts)
        finally:
            with self.lock:
                self._count_seconds()
                self.generated += tokens
                self.in_flight[engine] -= 1
                self._dispatch([])
        return await self.task.rewards.compute_group(group, request.step - 1) if request.rewarded else group

    async def _generate(self, request: "_Request", i: int, engine: str) -> Group:
        row, size, actor = request.rows[i], request.config.group_size, self.engines.actors[engine]
        sampling, images = request.sampling(self.task.seed), row.images and row.images.read()

        async def sample(prompt_ids: list[int], options: dict, low_priority: bool) -> list[Rollout]:
            with self.lock:
                if self.closed:
                    raise RunError("the run has ended")
                call = actor.sample.remote([prompt_ids], [options], [images], low_priority)
            return (await self.session.answers("generating", {engine: call}))[0]

        async def sample_turn(turn: Turn) -> Rollout:
            low_priority = self._waits(request) and not turn.index  # what has begun goes before what has not
            return (await sample(turn.prompt_ids, sampling(turn.number, turn=turn), low_priority))[0]

        if not self.task.tools:
            return Group(row, with_images(await sample(row.prompt_ids, sampling(i), self._waits(request)), images))
        numbers, limits = range(i * size, (i + 1) * size), (request.config.max_tokens, self.max_model_len)
        if self.server:
            asked = [AgentRollout(self.task.tools, sample_turn, number, *limits) for number in numbers]
            return await self.server.group(row, asked)
        conversations = [Conversation(self.task.tools, row, images, n, *limits, request.evaluation) for n in numbers]
        await asyncio.gather(*(conversation.run(sample_turn) for conversation in conversations))
        return group_of(conversations)


@dataclass
class _Request:
    """Rows whose completions are generated and, if wanted, rewarded, group by group. `result` is their Batch."""

    rows: list[Row]
    config: SamplingConfig
    step: int
    round_number: int = 0  # of dynamic sampling, or the part of an evaluation; 0: the step's own prompts
    evaluation: bool = False
    rewarded: bool = True
    result: Future = field(default_factory=Future)
    groups: dict[int, Group] = field(default_factory=dict)  # complete groups, by row

    def sampling(self, seed: int) -> Callable[..., dict]:
        """`sampling_options` of one of its rows."""
        where = {"evaluation": self.evaluation, "round_number": self.round_number}
        return partial(sampling_options, self.config, seed, self.step, **where)

    def settle(self, i: int, completing: Future) -> None:
        """The group of row `i` is complete, or there was an error."""
        if self.result.done():  # the first error counts
            return
        if error := completing.exception():  # for whoever waits for the batch
            self.result.set_exception(error)
            return
        (self.groups[i],) = completing.result()
        if len(self.groups) == len(self.rows):
            groups = [self.groups[i] for i in range(len(self.rows))]
            self.result.set_result(Batch(groups, reward_metrics(groups)))
