"""Rewards, called as TRL's GRPOTrainer calls them: by name, with one entry per completion in each list.

    def reward(prompts, completions, completion_ids, **columns) -> list[float | None]: ...

Each call has the completions of one prompt. If the prompt is a list of chat messages, a completion is as well:
[{"role": "assistant", "content": text}], and with tools all messages of the conversation. Besides the columns of the
dataset, a reward gets `trainer_state` (`global_step`, `max_steps`), `log_extra(column, values)`,
`log_metric(name, value)` and, if there are any, `environments`. It may be `async`, or an object with `__call__`. Each
completion's entries are its own, in each call: a reward may change them.
"""

import asyncio
import copy
import inspect
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np

from ..errors import TaskError
from ..functions import failed, named_function
from ..images import ImagesOfCompletions
from ..learning.rollout import Rollout
from .dataset import Row, content_text
from .environment import Environment, UserThread, is_async, together

OWN_COLUMNS = ("step", "prompt", "text", "messages", "rewards", "advantage")  # of completions.jsonl
FROM_THE_RUN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


@dataclass
class Group:
    """A prompt and its completions, whose rewards are compared. `logged` are numbers whose means become metrics.
    `environments` are the completions' environments, until the rewards are known."""

    row: Row
    rollouts: list[Rollout]
    logged: dict[str, list[float]] = field(default_factory=dict)
    environments: list[Environment] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        """Whether all known rewards are equal: then every advantage is 0, and there is nothing to learn."""
        return len({rollout.reward for rollout in self.rollouts} - {None}) <= 1


@dataclass
class Batch:
    """The prompts of one step with their completions, and the metrics of their rewards."""

    groups: list[Group]
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def rollouts(self) -> list[Rollout]:
        """All completions. Those of one prompt stand together."""
        return [rollout for group in self.groups for rollout in group.rollouts]

    def known_rollouts(self) -> list[Rollout]:
        """The completions whose rewards are known. Raises TaskError if there is none."""
        known = [rollout for rollout in self.rollouts if rollout.reward is not None]
        if not known:
            raise TaskError("the rewards of all completions of this step are None: there is nothing to learn from")
        return known


def completion_text(completion: str | list[dict]) -> str:
    """The text of a completion, as a reward gets it; that of the assistant's last message, if it is a conversation."""
    if isinstance(completion, str):
        return completion
    last = next(message for message in reversed(completion) if message["role"] == "assistant")
    return content_text(last.get("content"))


def exact(completions: list, answer: list, **_) -> list[float | None]:
    """1 for a completion that is the answer, a text or a number, and nothing else; 0 otherwise. None if the row has no
    answer."""

    def score(text: str, right) -> float:
        whole = isinstance(right, float) and right.is_integer()  # "7" is 7.0: `datasets` makes floats of integers
        return float(text == str(right) or (whole and text == str(int(right))))

    pairs = zip(map(completion_text, completions), answer, strict=True)
    return [None if right is None else score(text, right) for text, right in pairs]


class Rewards:
    """The reward functions of these names ("module:function"), and the sum of what they return, by `weights`.

    `models` are names of rewards that are not functions; their weights come last. `more_arguments` are names of
    arguments that functions get besides the usual ones. `timeout` is --reward-timeout, in seconds. Raises TaskError if
    a function cannot be imported, or cannot be called with the columns of one of these rows.
    """

    def __init__(
        self,
        names: list[str],
        weights: list[float] | None,
        rows: Iterable[Row],
        steps: int = 1,
        models: Iterable[str] = (),
        more_arguments: Iterable[str] = (),
        timeout: float = math.inf,
    ):
        if weights and len(weights) != len(names) + len(models):
            raise TaskError(f"--reward-weights: {len(weights)} weights for {len(names) + len(models)} rewards")
        short_names = [name.rpartition(":")[2] for name in names]
        self.functions = {
            name if short_names.count(short_name) > 1 else short_name: named_function("--reward", name)
            for name, short_name in zip(names, short_names, strict=True)
        }
        if len(self.functions) < len(names):
            raise TaskError(f"--reward {' '.join(names)}: one of them is there twice")
        self.names, self.steps = dict(zip(self.functions, names, strict=True)), steps
        self.threads: defaultdict[str, UserThread] = defaultdict(UserThread)  # of each function
        self.timeout, self.last_done = timeout, 0.0
        self.running: list[dict[str, Future]] = []  # the calls for each prompt, the oldest first
        weighted = [*self.functions, *models]
        self.weights = dict(zip(weighted, weights or [1.0] * len(weighted), strict=True))
        for row in rows:
            for name, function in zip(names, self.functions.values(), strict=True):
                _check_signature(name, function, [*FROM_THE_RUN, *more_arguments, *row.columns])

    def add(self, name: str, function: Callable) -> None:
        """One more reward, of weight 1."""
        if name in self.functions:
            raise TaskError(f"--reward {name}: an environment's own reward has this name")
        self.functions[name], self.weights[name] = function, 1.0

    def __str__(self) -> str:
        return " + ".join(f"{weight:g} x {name}" for name, weight in self.weights.items()) or "none"

    def compute(self, batch: Batch, steps_done: int, session) -> Batch:
        """This batch, with rewards and their metrics. The main thread waits by `session`, a RaySession.

        If a function returns None for a completion, the others' results are added. If all do, its reward is None.
        Raises TaskError if a function fails, returns anything but a finite number or None for each completion, or takes
        longer than --reward-timeout.
        """
        computing = together(self.compute_group(group, steps_done) for group in batch.groups)
        session.wait_for_thread(computing, self.phase)
        groups = computing.result()
        return Batch(groups, batch.metrics | reward_metrics(groups))

    async def compute_group(self, group: Group, steps_done: int) -> Group:
        """This group, with rewards."""
        call = RewardCall(self, group, steps_done)
        return call.rewarded(await self.call(call.arguments))

    async def call(self, arguments: dict) -> dict[str, list]:
        """The values that each function returns, by name. Coroutines run in one event loop, each other function in a
        thread of its own, which calls it for one prompt after another."""
        calls = {
            name: self.threads[name].begin(_call_of(name, function), arguments=arguments)
            for name, function in self.functions.items()
        }
        if not self.running:
            self.last_done = time.monotonic()
        self.running.append(calls)
        try:
            values = await asyncio.gather(*map(asyncio.wrap_future, calls.values()))
        finally:
            self.running.remove(calls)
            self.last_done = time.monotonic()
        return dict(zip(calls, values, strict=True))

    def phase(self) -> str:
        """The phase of a run that waits for rewards. Raises TaskError if those of one prompt take too long."""
        for calls in self.running[:1]:
            late = [name for name, call in calls.items() if not call.done()]
            if late and time.monotonic() - self.last_done > self.timeout:
                raise TaskError(
                    f"the reward {' and '.join(late)} took longer than {self.timeout:g} s for one prompt's completions:"
                    " --reward-timeout"
                )
        return "rewarding"

    def sum(self, rewards: dict[str, float | None]) -> float | None:
        """The weighted sum of the rewards that are known; None if none is."""
        parts = [self.weights[name] * value for name, value in rewards.items() if value is not None]
        return sum(parts) if parts else None


class RewardCall:
    """The rewards of one group: the `arguments` of the functions, and what these log."""

    def __init__(self, rewards: Rewards, group: Group, steps_done: int):
        self.rewards, self.group = rewards, group
        self.extra, self.logged = [{} for _ in group.rollouts], defaultdict(list, group.logged)
        row, rollouts = group.row, group.rollouts
        self.arguments = {column: [value] * len(rollouts) for column, value in row.columns.items()}
        self.arguments |= {
            "prompts": [rollout.prompt or row.prompt for rollout in rollouts],
            "completions": [_completion(row, rollout) for rollout in rollouts],
            "completion_ids": [np.asarray(rollout.completion_ids).tolist() for rollout in rollouts],
            "trainer_state": SimpleNamespace(global_step=steps_done, max_steps=rewards.steps),
            "log_extra": self._log_extra,
            "log_metric": lambda name, value: self.logged[name].append(float(value)),
        }
        if row.images:
            self.arguments["images"] = ImagesOfCompletions(row.images, len(rollouts))
        if group.environments:
            self.arguments["environments"] = [environment.instance for environment in group.environments]

    def rewarded(self, returned: dict[str, list]) -> Group:
        """The group with these rewards, by name."""
        by_name = {name: _checked(name, values, self.group) for name, values in returned.items()}
        by_rollout = [{name: values[i] for name, values in by_name.items()} for i in range(len(self.group.rollouts))]
        rollouts = [
            replace(rollout, rewards=rewards, reward=self.rewards.sum(rewards), extra=extra)
            for rollout, rewards, extra in zip(self.group.rollouts, by_rollout, self.extra, strict=True)
        ]
        for environment in self.group.environments:
            environment.release()
        return Group(self.group.row, rollouts, dict(self.logged))

    def _log_extra(self, column: str, values: list) -> None:
        if column in OWN_COLUMNS:
            raise ValueError(f"log_extra: completions have a column {column!r} already")
        try:
            json.dumps(values, default=str)
        except (TypeError, ValueError) as error:  # keys of a dict, say
            raise ValueError(f"log_extra: JSON cannot have the column {column!r}: {error}") from error
        for extra, value in zip(self.extra, values, strict=True):
            extra[column] = value


def _completion(row: Row, rollout: Rollout) -> str | list[dict]:
    if isinstance(row.prompt, str):
        return rollout.text
    return rollout.messages or [{"role": "assistant", "content": rollout.text}]


def reward_metrics(groups: list[Group]) -> dict[str, float]:
    """The mean of each reward in these groups, without its Nones, and of what went to `log_metric`."""
    values_of = defaultdict(list)
    for group in groups:
        for name, values in group.logged.items():
            values_of[name] += values
        for rollout in group.rollouts:
            for name, value in rollout.rewards.items():
                values_of[f"rewards/{name}/mean"] += [] if value is None else [value]
    return {name: sum(values) / len(values) for name, values in values_of.items() if values}


def _check_signature(name: str, function: Callable, arguments: list[str]) -> None:
    try:
        inspect.signature(function).bind(**dict.fromkeys(arguments))
    except TypeError as error:
        call = f"{name.rpartition(':')[2]}({', '.join(arguments)})"
        raise TaskError(f"--reward {name} cannot be called as {call}, all by name: {error}") from error
    except ValueError:
        pass  # a builtin without a signature


def _call_of(name: str, function: Callable) -> Callable[[dict], list]:
    """A function that calls this one with copies of its arguments, and returns a list. Its errors have the reward's
    name."""

    def call(arguments: dict) -> list:
        with _named_errors(name):
            return _listed(name, function(**_copied(arguments)))

    async def call_async(arguments: dict) -> list:
        with _named_errors(name):
            return _listed(name, await function(**_copied(arguments)))

    return call_async if is_async(function) else call


@contextmanager
def _named_errors(name: str) -> Iterator[None]:
    try:
        yield
    except TaskError:
        raise
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # all that the users' code may raise
        raise failed(f"the reward {name}", error) from error


def _copied(arguments: dict) -> dict:
    """Arguments for one call, with each completion's entries copied: what a reward changes reaches no other completion,
    no other reward and no later step."""
    copied = dict(arguments)
    for name, entries in arguments.items():
        if isinstance(entries, list) and name != "environments":
            copy_of = list if name == "completion_ids" else copy.deepcopy  # of so many numbers, ten times as fast
            try:
                copied[name] = [copy_of(entry) for entry in entries]
            except Exception as error:  # of an object in a row that a function has made
                raise TaskError(f"the column {name!r} cannot be copied for each completion ({error})") from error
    return copied


def _listed(name: str, returned) -> list:
    if not isinstance(returned, Iterable) or isinstance(returned, (str, bytes, Mapping, Set)):
        wanted = "a list with a number or None for each completion"
        raise TaskError(f"the reward {name} returned {returned!r}, and not {wanted}")
    return list(returned)


def _checked(name: str, values: list, group: Group) -> list[float | None]:
    if len(values) != len(group.rollouts):
        raise TaskError(f"the reward {name} returned {len(values)} values for {len(group.rollouts)} completions")
    for i, value in enumerate(values):
        where = f"for {group.rollouts[i].text!r} ({group.row.origin})"
        try:
            values[i] = None if value is None else float(value)
        except (TypeError, ValueError) as error:
            raise TaskError(f"the reward {name} returned {value!r}, which is not a number, {where}") from error
        except OverflowError as error:  # of an integer; Python may refuse to print it
            raise TaskError(f"the reward {name} returned a number that is too large for a float {where}") from error
        if value is not None and not math.isfinite(values[i]):
            raise TaskError(f"the reward {name} returned {values[i]} {where}")
    return values
