"""Rewards, called as TRL's GRPOTrainer calls them: by name, with one entry per completion in each list.

    def reward(prompts, completions, completion_ids, **columns) -> list[float | None]: ...

Each call has the completions of one prompt. If the prompt is a list of chat messages, a completion is as well:
[{"role": "assistant", "content": text}], and with tools all messages of the conversation. Besides the columns of the
dataset, a reward gets `trainer_state` (`global_step`, `max_steps`), `log_extra(column, values)`,
`log_metric(name, value)` and, if there are any, `environments`. It may be `async`, or an object with `__call__`. Each
completion's entries are its own, in each call: a reward may change them.

This module says what a reward is. trainer/rollouts/reward_workers.py calls rewards, most of them in other processes.
"""

import asyncio
import copy
import inspect
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np

from ..errors import TaskError
from ..functions import failed, named_function
from ..images import ImagesOfCompletions
from .dataset import Row, content_text
from .environment import Environment

if TYPE_CHECKING:  # it imports torch, and a reward's process starts sooner without it
    from ..learning.rollout import Rollout

OWN_COLUMNS = ("step", "prompt", "text", "messages", "rewards", "advantage")  # of completions.jsonl
AGENT, AGENT_ERROR = "agent", "agent_error"  # an agent's reward, and columns of what it returned and of its error
FROM_THE_RUN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


@dataclass
class Group:
    """A prompt and its completions, whose rewards are compared. `logged` are numbers whose means become metrics.
    `environments` are the completions' environments, until the rewards are known. `columns` are for the rewards, too.
    """

    row: Row
    rollouts: list["Rollout"]
    logged: dict[str, list[float]] = field(default_factory=dict)
    environments: list[Environment] = field(default_factory=list)
    columns: dict[str, list] = field(default_factory=dict)

    @property
    def prompts(self) -> list[str | list[dict]]:
        """The prompt of each completion, with what the environment's reset has returned."""
        return [rollout.prompt or self.row.prompt for rollout in self.rollouts]

    @property
    def completions(self) -> list[str | list[dict]]:
        """The completions as rewards get them: texts, or messages if the prompt is."""
        if isinstance(self.row.prompt, str):
            return [rollout.text for rollout in self.rollouts]
        return [own.messages or [{"role": "assistant", "content": own.text}] for own in self.rollouts]

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
    def rollouts(self) -> list["Rollout"]:
        """All completions. Those of one prompt stand together."""
        return [rollout for group in self.groups for rollout in group.rollouts]

    def known_rollouts(self) -> list["Rollout"]:
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


@dataclass
class Returned:
    """The values that a reward has returned for a prompt's completions, and what it has logged."""

    extra: list[dict]  # each completion's columns
    logged: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    values: list[float | None] = field(default_factory=list)

    def log_extra(self, column: str, values: list) -> None:
        if column in OWN_COLUMNS:
            raise ValueError(f"log_extra: completions have a column {column!r} already")
        try:
            json.dumps(values, default=str)
        except (TypeError, ValueError) as error:  # keys of a dict, say
            raise ValueError(f"log_extra: JSON cannot have the column {column!r}: {error}") from error
        for extra, value in zip(self.extra, values, strict=True):
            extra[column] = value

    def log_metric(self, name: str, value: float) -> None:
        self.logged[name].append(float(value))


@dataclass
class RewardCall:
    """A call of the reward `name` for a prompt's completions, which another process may make.

    It raises TaskError, with the reward's name, for what the function raises, and if that returns anything but a finite
    number or None for each completion.
    """

    name: str
    arguments: dict
    texts: list[str]  # of the completions
    origin: str  # of the prompt

    def make(self, function: Callable) -> Returned:
        with self._named_errors() as returned:
            return self._checked(function(**self._own_arguments(returned)), returned)

    async def make_async(self, function: Callable) -> Returned:
        with self._named_errors() as returned:
            return self._checked(await function(**self._own_arguments(returned)), returned)

    @contextmanager
    def _named_errors(self) -> Iterator[Returned]:
        try:
            yield Returned([{} for _ in self.texts])
        except TaskError:
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # all that the users' code may raise
            raise failed(f"the reward {self.name}", error) from error

    def _own_arguments(self, returned: Returned) -> dict:
        """The arguments, with each completion's entries copied: what a reward changes reaches no other completion, no
        other reward and no later step."""
        own = self.arguments | {"log_extra": returned.log_extra, "log_metric": returned.log_metric}
        for name, entries in self.arguments.items():
            if name == "images":
                own[name] = ImagesOfCompletions(entries)
            elif isinstance(entries, list) and name != "environments":
                copy_of = np.ndarray.tolist if name == "completion_ids" else copy.deepcopy  # which would take longer
                own[name] = [*map(copy_of, entries)]
        return own

    def _checked(self, values, returned: Returned) -> Returned:
        what = f"the reward {self.name} returned"
        if not isinstance(values, Iterable) or isinstance(values, (str, bytes, Mapping, Set)):
            raise TaskError(f"{what} {values!r}, and not a list with a number or None for each completion")
        returned.values = list(values)
        if len(returned.values) != len(self.texts):
            raise TaskError(f"{what} {len(returned.values)} values for {len(self.texts)} completions")
        for i, value in enumerate(returned.values):
            try:
                returned.values[i] = number = None if value is None else float(value)
            except (TypeError, ValueError):
                number = math.nan
            if number is not None and not math.isfinite(number):
                raise TaskError(f"{what} {value!r}, no finite number, for {self.texts[i]!r} ({self.origin})")
        return returned


class RewardWorker:
    """Calls functions by their names, one at a time; in a Ray actor, in its process' main thread."""

    def __init__(self, names: list[str]):
        for name in names:
            named_function("--reward", name)  # imports it, before the first call

    def call(self, name: str, call: RewardCall) -> Returned:
        return call.make(named_function("--reward", name))


class CoroutineWorker(RewardWorker):
    """Calls coroutine functions, all at the same time in one event loop: a web service's client belongs to a loop."""

    async def call(self, name: str, call: RewardCall) -> Returned:
        return await call.make_async(named_function("--reward", name))


class Rewards:
    """The reward functions of these names ("module:function"), and the sum of what they return, by `weights`.

    `models` are names of rewards that are not functions; their weights come last. `environments` says whether functions
    get those of the completions. `timeout` is --reward-timeout, in seconds. Raises TaskError if a function cannot be
    imported, or cannot be called with the columns of one of these rows.
    """

    def __init__(
        self,
        names: list[str],
        weights: list[float] | None,
        rows: Iterable[Row],
        steps: int = 1,
        models: Iterable[str] = (),
        environments: bool = False,
        timeout: float = math.inf,
    ):
        if weights and len(weights) != len(names) + len(models):
            raise TaskError(f"--reward-weights: {len(weights)} weights for {len(names) + len(models)} rewards")
        short_names = [name.rpartition(":")[2] for name in names]
        self.functions = {
            name if short_names.count(short_name) > 1 else short_name: named_function("--reward", name)
            for name, short_name in zip(names, short_names, strict=True)
        }
        if taken := self.functions.keys() & set(models):
            raise TaskError(f"--reward {min(taken)}: the run has a reward of this name")
        if len(self.functions) < len(names):
            raise TaskError(f"--reward {' '.join(names)}: one of them is there twice")
        self.names, self.steps, self.timeout = dict(zip(self.functions, names, strict=True)), steps, timeout
        self.with_environments: set[str] = set()  # rewards that take environments, which live in this process
        weighted = [*self.functions, *models]
        self.weights = dict(zip(weighted, weights or [1.0] * len(weighted), strict=True))
        given = [*FROM_THE_RUN, *["environments"] * environments, *{AGENT}.intersection(models)]
        for row in rows:
            for name, function in self.functions.items():
                parameters = _parameters(self.names[name], function, [*given, *row.columns])
                if environments and "environments" in parameters:
                    self.with_environments.add(name)

    def add(self, name: str, function: Callable) -> None:
        """One more reward, of weight 1: an environment's own."""
        if name in self.functions:
            raise TaskError(f"--reward {name}: an environment's own reward has this name")
        self.functions[name], self.weights[name] = function, 1.0
        self.with_environments.add(name)

    def __str__(self) -> str:
        return " + ".join(f"{weight:g} x {name}" for name, weight in self.weights.items()) or "none"

    def calls(self, group: Group, steps_done: int) -> list[RewardCall]:
        """The call of each function for this group."""
        count, images = len(group.rollouts), group.row.images
        arguments = {column: [value] * count for column, value in group.row.columns.items()} | group.columns
        arguments |= {
            "prompts": group.prompts,
            "completions": group.completions,
            "completion_ids": [np.asarray(rollout.completion_ids) for rollout in group.rollouts],
            "trainer_state": SimpleNamespace(global_step=steps_done, max_steps=self.steps),
        }
        if images:
            arguments["images"] = [rollout.images or images for rollout in group.rollouts]
        live = {"environments": [environment.instance for environment in group.environments]}
        texts, origin = [rollout.text for rollout in group.rollouts], group.row.origin
        return [
            RewardCall(name, arguments | (live if name in self.with_environments else {}), texts, origin)
            for name in self.functions
        ]

    def rewarded(self, group: Group, returned: dict[str, Returned]) -> Group:
        """The group with what rewards have returned, by name, in addition to those it has.

        If one returned None for a completion, the others' values are added. If all did, its reward is None.
        """
        logged, rollouts = defaultdict(list, group.logged), []
        for own in returned.values():
            for name, values in own.logged.items():
                logged[name] = logged[name] + values
        for i, rollout in enumerate(group.rollouts):
            rewards = rollout.rewards | {name: own.values[i] for name, own in returned.items()}
            extra = dict(rollout.extra)
            for own in returned.values():
                extra |= own.extra[i]
            reward = None if AGENT_ERROR in extra else self.sum(rewards)
            rollouts.append(replace(rollout, rewards=rewards, reward=reward, extra=extra))
        for environment in group.environments:
            environment.release()
        return Group(group.row, rollouts, dict(logged))

    def sum(self, rewards: dict[str, float | None]) -> float | None:
        """The weighted sum of the rewards that are known; None if none is."""
        parts = [self.weights[name] * value for name, value in rewards.items() if value is not None]
        return sum(parts) if parts else None


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


def _parameters(name: str, function: Callable, arguments: list[str]) -> Iterable[str]:
    """The names of this function's parameters. Raises TaskError if it cannot be called with these arguments."""
    try:
        signature = inspect.signature(function)
        signature.bind(**dict.fromkeys(arguments))
    except TypeError as error:
        call = f"{name.rpartition(':')[2]}({', '.join(arguments)})"
        raise TaskError(f"--reward {name} cannot be called as {call}, all by name: {error}") from error
    except ValueError:  # a builtin has no signature
        return ()
    return signature.parameters
