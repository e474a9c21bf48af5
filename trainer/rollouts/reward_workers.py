"""Where rewards are computed: functions in Ray actors on any node, a reward model by its ranks.

Functions are called in the main threads of a few processes, so that `signal.alarm` works. All coroutine functions are
in one process, which makes their calls at the same time. Only a function that takes the environments of --environment
is called in this process, where they live.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial

import ray

from ..errors import RunError, TaskError
from ..flags import arg
from ..learning.value_models import RewardModel
from ..run.actors import ActorGroup
from ..run.session import RaySession
from ..tasks.dataset import without_parts
from ..tasks.environment import UserThread, is_async, together
from ..tasks.rewards import Batch, CoroutineWorker, Group, Returned, RewardCall, Rewards, RewardWorker, reward_metrics

REWARD_MODEL = "reward_model"  # the name of its scores among the rewards
CPUS_PER_WORKER, MAX_WORKERS = 4, 8  # a process for each so many CPUs of the cluster, and at most so many
AT_ONCE = 1000  # calls of coroutine functions: Ray's limit for an actor
OPTIONS = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": 3, "scheduling_strategy": "SPREAD"}

Caller = Callable[[RewardCall], Awaitable[Returned]]


@dataclass
class RewardArguments:
    """A reward model."""

    reward_model: str | None = arg(
        None,
        help="a sequence classifier with one output: on the Hugging Face hub, a folder, or module:function, which is"
        " called with (folder, seed) and writes one there; its score is one more reward beside those of --reward, and"
        " its weight is the last of --reward-weights",
    )


class RewardWorkers:
    """Computes these rewards, and the scores of the reward model's ranks, if there are any. Its processes begin at once
    to import the functions.

    If a process dies, alone or with its node, Ray starts another one and repeats the call, up to three times.
    """

    def __init__(self, rewards: Rewards, session: RaySession, reward_model: ActorGroup | None = None):
        self.rewards, self.session, self.reward_model = rewards, session, reward_model
        self.functions = rewards.functions
        # By reward: what may make its next call. What makes several at a time is there as often.
        self.idle: dict[str, asyncio.Queue[Caller]] = {}
        elsewhere = {False: [], True: []}  # rewards that other processes compute, by whether they are coroutines
        for name, function in rewards.functions.items():
            if name in rewards.with_environments:
                thread = partial(self._by_thread, UserThread())
                self.idle[name] = _queue([thread] * (AT_ONCE if is_async(function) else 1))
            else:
                elsewhere[is_async(function)].append(name)
        for cls, own in ((RewardWorker, elsewhere[False]), (CoroutineWorker, elsewhere[True])):
            self.idle |= dict.fromkeys(own, _queue(self._start(cls, own) if own else ()))

    def _start(self, cls: type, names: list[str]) -> list[Caller]:
        """Start the processes that compute these rewards."""
        cpus = int(ray.cluster_resources().get("CPU", 0))
        count = 1 if cls is CoroutineWorker else min(MAX_WORKERS, max(1, cpus // CPUS_PER_WORKER))
        full_names = [self.rewards.names[name] for name in names]
        actors = [ray.remote(**OPTIONS)(cls).remote(full_names) for _ in range(count)]
        return [partial(self._by_actor, actor) for actor in actors] * (AT_ONCE if cls is CoroutineWorker else 1)

    def compute(self, batch: Batch, steps_done: int) -> Batch:
        """This batch, with all rewards and their metrics. The main thread calls this."""
        computing = together(self.compute_group(group, steps_done) for group in batch.groups)
        self.session.wait_for_thread(computing, lambda: "rewarding")
        groups = self.score(computing.result())
        return Batch(groups, batch.metrics | reward_metrics(groups))

    async def compute_group(self, group: Group, steps_done: int) -> Group:
        """This group, with the rewards of all functions, in the event loop of `together`.

        Raises TaskError if one fails, returns anything but a finite number or None for each completion, or takes longer
        than --reward-timeout.
        """
        calls = self.rewards.calls(group, steps_done)
        returned = await asyncio.gather(*map(self._answer, calls))
        return self.rewards.rewarded(group, {call.name: own for call, own in zip(calls, returned, strict=True)})

    def score(self, groups: list[Group]) -> list[Group]:
        """These groups, with the reward model's scores, if there is one. The main thread calls this."""
        if not self.reward_model or not groups:
            return groups
        prompts = [without_parts(prompt) for group in groups for prompt in group.prompts]
        completions = [without_parts(completion) for group in groups for completion in group.completions]
        scores = iter(self.reward_model.agreed("rewarding", RewardModel.rewards, prompts, completions))
        scored = []
        for group in groups:
            own = [next(scores) for _ in group.rollouts]
            call = RewardCall(REWARD_MODEL, {}, [rollout.text for rollout in group.rollouts], group.row.origin)
            scored.append(self.rewards.rewarded(group, {REWARD_MODEL: call.make(lambda own=own, **_: own)}))
        return scored

    async def _answer(self, call: RewardCall) -> Returned:
        idle, timeout = self.idle[call.name], self.rewards.timeout
        caller = await idle.get()
        try:
            with self.session.timeline.span("rewards", call.name):
                return await asyncio.wait_for(caller(call), timeout)
        except TimeoutError as error:
            late = f"the reward {call.name} took longer than {timeout:g} s for one prompt's completions"
            raise TaskError(f"{late}: --reward-timeout") from error
        finally:
            idle.put_nowait(caller)

    async def _by_actor(self, actor: ray.actor.ActorHandle, call: RewardCall) -> Returned:
        if self.session.ending:
            raise RunError("the run has ended")  # the call would start Ray anew
        answer = actor.call.remote(self.rewards.names[call.name], call)
        return await self.session.answer("rewarding", f"reward {call.name}", answer)

    async def _by_thread(self, thread: UserThread, call: RewardCall) -> Returned:
        function = self.rewards.functions[call.name]
        make = call.make_async if is_async(function) else call.make
        return await asyncio.wrap_future(thread.begin(make, function=function))


def _queue(callers: Iterable[Caller]) -> asyncio.Queue[Caller]:
    queue = asyncio.Queue()
    for caller in callers:
        queue.put_nowait(caller)
    return queue
