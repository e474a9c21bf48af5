"""Rollouts for the next steps, generated while the trainer learns, and the weights that each token comes from.

Weights have a version: the number of learning steps behind them. Step s learns with weights of version s - 1. A token
that was sampled from version v is (s - 1) - v updates old then, its staleness.

Every step learns from its own prompts, in the order of the data, and not from those that happen to be finished: these
would be the ones with short completions. So the prompts of step s may start as soon as the engine serves version
s - 1 - `max_staleness`, and no token is ever too old. Nothing is thrown away: a step waits for its longest completion,
which has had the time of `max_staleness` more steps.
"""

import asyncio
import itertools
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Annotated

import ray
from annotated_types import Ge, Gt, Le
from transformers.hf_argparser import HfArg

from .dataset import Row
from .engine import in_groups, rollouts_of, sample_batch, sampling_params, step_seed
from .errors import RunError, TaskError
from .evaluation import evaluate
from .learner import Rollout
from .ray_session import PHASE_SECONDS, RaySession
from .rewards import Batch
from .task import Task

PROOF_TOKENS = 256  # that prove a sync, at least: over fewer, the mean of what bf16 rounds varies too much for a bound


@dataclass
class AsyncArguments:
    """How far generation runs ahead of learning."""

    max_staleness: Annotated[int, Ge(0)] = HfArg(
        default=2, help="updates between the weights that sampled a token and those that learn from it; 0: on-policy"
    )
    in_flight: Annotated[int | None, Ge(1)] = HfArg(
        default=None, help="prompts whose completions are generated at one time (default: those of two steps)"
    )
    reward_timeout: Annotated[float, Gt(0), Le(PHASE_SECONDS)] = HfArg(
        default=600.0, help="seconds that the rewards of one step may take, or those of an evaluation"
    )


class InFlight:
    """The groups that a vllm.AsyncLLM generates, at most `limit` of them at one time, first come, first served."""

    def __init__(self, llm, limit: int):
        self.llm, self.slots, self.names = llm, asyncio.Semaphore(limit), itertools.count()
        self.running, self.paused = 0, False
        self.idle, self.idle_share = 0.0, 0.0  # seconds since the last sync; share of the time between the last two
        self.since = self.resumed = time.perf_counter()

    async def sample(
        self, prompts: list[list[int]], args, seed: int, first: int, evaluation: bool, waits: bool
    ) -> list[Rollout]:
        """As `recipe.engine.sample`, with the version of each token's weights.

        Unless it `waits` for its turn, it goes before all that has not begun.
        """

        async def group(number: int, prompt_ids: list[int]):
            async with self.slots if waits else nullcontext():
                params = sampling_params(args, seed, first + number, evaluation)
                return await self._generate(prompt_ids, params, priority=0 if waits else -1)

        requests = await asyncio.gather(*itertools.starmap(group, enumerate(prompts)))
        if evaluation:
            await self.llm.reset_prefix_cache()  # which vLLM leaves as it is while it generates: the next sync does it
        spans = [output.weight_versions for request in requests for output in request.outputs]
        return [
            replace(rollout, versions=[int(span.version) for span in own for _ in range(span.start, span.end)])
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

    async def pause(self) -> None:
        """Stop generation where it is. What is half generated goes on with the next weights: its cache is cleared."""
        # What pause_generation does for text, without its sleep of 20 ms afterwards.
        await self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)
        self._count(0, paused=True)

    async def resume(self, version: int) -> None:
        """Go on. From here on, tokens come from weights of this version."""
        await self.llm.update_weight_version(str(version))  # while paused, or vLLM labels some tokens wrongly
        await self.llm.resume_generation()
        self._count(0, paused=False)
        self.idle_share, self.idle, self.resumed = self.idle / (self.since - self.resumed), 0.0, self.since

    def _count(self, groups: int, paused: bool | None = None) -> None:
        """Add to the number of groups in flight. Time in which there is none counts as idle, and so does a pause."""
        now = time.perf_counter()
        if self.paused or not self.running:
            self.idle += now - self.since
        self.since = now
        self.running += groups
        self.paused = self.paused if paused is None else paused


class RolloutsAhead:
    """The rollouts of the steps after `steps_done`, in order. The engine generates for some steps ahead.

    A thread scores them, so that a slow reward stops neither the engine nor the trainer.
    """

    def __init__(self, session: RaySession, engine, task: Task, args, steps_done: int):
        self.session, self.engine, self.task, self.args = session, engine, task, args
        self.begun = steps_done
        self.ahead: deque[_Step] = deque()
        self.to_score: queue.SimpleQueue[_Step] = queue.SimpleQueue()
        self.scoring = threading.Lock()  # no reward is called twice at one time
        self.scored: _Scores | None = None  # by the thread that has the lock
        threading.Thread(target=self._score, daemon=True).start()

    def take(self, step: int) -> Batch:
        """The prompts of this step, with completions and their rewards. The engine serves version `step` - 1 by now.

        So it may begin with the prompts of step `step` + `max_staleness`. Raises what the reward raised; TaskError if
        it takes too long; RunError if a token's label is older than allowed, or newer than the weights.
        """
        while self.begun < max(step, min(step + self.args.max_staleness, self.args.steps)):
            self.begun += 1
            self.ahead.append(_Step(self.args, self.begun, self.task.draw(self.begun), self._sample))
            self.to_score.put(self.ahead[-1])
        taken = self.ahead.popleft()
        self.session.wait_for_thread(taken.result, taken.phase)
        self.session.wait("generating", engine=taken.call)  # raises what the engine raised
        batch = taken.result.result()
        ages = [step - 1 - version for rollout in batch.rollouts for version in rollout.versions]
        oldest, newest = max(ages), min(ages)
        if newest < 0 or oldest > self.args.max_staleness:
            raise RunError(
                f"step {step}: by the engine's labels, tokens are {newest} to {oldest} updates old, and not 0 to"
                f" {self.args.max_staleness}"
            )
        batch.metrics |= {"async/staleness_mean": sum(ages) / len(ages), "async/staleness_max": oldest}
        return batch

    def evaluate(self, step: int) -> dict[str, float]:
        """As `recipe.evaluation.evaluate`, with a thread for the rewards. Raises TaskError if they take too long."""

        def phase() -> str:
            return self.scored.phase() if self.scored else "rewarding"  # what has its turn may be a step

        def in_thread(score: Callable[[], dict[str, float]]) -> dict[str, float]:
            scores = _Scores(self.args, f"the evaluation after step {step}")
            threading.Thread(target=self._compute, args=(scores, score), daemon=True).start()
            self.session.wait_for_thread(scores.result, phase)
            return scores.result.result()

        return evaluate(self.session, {"engine": self.engine}, self.task, self.args, step, in_thread)

    def proof(self, step: int, batch: Batch) -> list[Rollout]:
        """Short rollouts to prove the sync before this step with, if too few tokens of its own are as new as that."""
        if sum(rollout.versions.count(step - 1) for rollout in batch.rollouts) >= PROOF_TOKENS:
            return []
        prompts = [group.row.prompt_ids for group in batch.groups]
        short = replace(self.args, max_tokens=math.ceil(PROOF_TOKENS / len(batch.rollouts)))
        seed = step_seed(self.args, step)
        return self.session.wait("proving", engine=self.engine.sample.remote(prompts, short, seed, 0, False))[0]

    def _sample(self, step: int, rows: list[Row], waits: bool) -> ray.ObjectRef:
        if self.session.leaving:
            raise RunError("the run has ended")  # or this call, from the thread, would start Ray anew
        prompts, seed = [row.prompt_ids for row in rows], step_seed(self.args, step)
        return self.engine.sample.remote(prompts, self.args, seed, 0, False, waits)

    def _score(self) -> None:
        while True:
            step = self.to_score.get()
            wait([step.rollouts])
            self._compute(step, lambda step=step: sample_batch(self.task, self.args, step.number, step.complete))

    def _compute(self, scores: "_Scores", score: Callable[[], object]) -> None:
        """Compute these scores once no others are being computed. Their result is what `score` returns, or raises."""
        with self.scoring:
            self.scored, scores.since = scores, time.monotonic()
            try:
                scores.result.set_result(score())
            except BaseException as error:  # for the one who waits for it
                scores.result.set_exception(error)
            scores.since = None


class _Scores:
    """Rewards of a step or an evaluation, which a thread computes. `result` is what comes of them."""

    def __init__(self, args: AsyncArguments, what: str):
        self.what, self.seconds, self.result = what, args.reward_timeout, Future()
        self.since: float | None = None

    def phase(self) -> str:
        """What goes on now. Raises TaskError if rewards have been computed for too long; they may never be done."""
        since = self.since
        if since and time.monotonic() - since > self.seconds:
            raise TaskError(f"the rewards of {self.what} took longer than {self.seconds:g} s: --reward-timeout")
        return "rewarding" if since else "generating"


class _Step(_Scores):
    """A step whose rollouts are on their way: the engine generates from `rows` already."""

    def __init__(self, args, number: int, rows: list[Row], sample: Callable[[int, list[Row], bool], ray.ObjectRef]):
        super().__init__(args, f"step {number}")
        self.number, self.rows, self.sample = number, rows, sample
        self._begin(rows, waits=True)

    def _begin(self, rows: list[Row], waits: bool) -> None:
        self.call = self.sample(self.number, rows, waits)
        self.rollouts = self.call.future()  # for the thread: once Ray has ended, ray.get and ray.wait start it anew

    def complete(self, rows: list[Row]) -> Batch:
        """The completions of these rows: the step's own, or replacements for some of them."""
        self.since = None
        if rows != self.rows:
            self._begin(rows, waits=False)  # this step is the next one
        batch = in_groups(rows, self.rollouts.result())
        self.since = time.monotonic()
        return batch
