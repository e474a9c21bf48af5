"""Rewards, called as TRL's GRPOTrainer calls them: by name, with one entry per completion in each list.

    def reward(prompts, completions, completion_ids, **columns) -> list[float | None]: ...

If a prompt is a list of chat messages, its completions are as well: [{"role": "assistant", "content": text}], and with
tools all messages of a conversation. Beside the dataset's columns a reward gets `environments`, where there are any,
`trainer_state` (`global_step`, `max_steps`), `log_extra(column, values)` and `log_metric(name, value)`. It may be
`async`, or an object with `__call__`. Each call has the completions of one prompt.
"""

import asyncio
import inspect
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace

import numpy as np

from ..errors import TaskError
from ..functions import failed, named_function
from ..learning.rollout import Rollout
from .dataset import Row
from .environment import Environment, event_loop

OWN_COLUMNS = ("step", "prompt", "text", "messages", "rewards", "advantage")  # of completions.jsonl
FROM_THE_RUN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


@dataclass
class Group:
    """A prompt and its completions, which are compared with each other. `logged` are numbers whose means are metrics.
    `environments` are those of the completions, until these are scored."""

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
    """The prompts of one step with their completions. `metrics` are of the rewards."""

    groups: list[Group]
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def rollouts(self) -> list[Rollout]:
        """All completions, those of one prompt in a row."""
        return [rollout for group in self.groups for rollout in group.rollouts]

    def known_rollouts(self) -> list[Rollout]:
        """The completions whose rewards are known. Raises TaskError if there is none."""
        known = [rollout for rollout in self.rollouts if rollout.reward is not None]
        if not known:
            raise TaskError("the rewards of all completions of this step are None: there is nothing to learn from")
        return known


def completion_text(completion: str | list[dict]) -> str:
    """The text of a completion as a reward gets it; of a conversation the last message's."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


class Rewards:
    """The functions that `names` ("module:function") stand for, and the sum of what they return, by `weights`.

    `others` are names of rewards that are no functions: a reward model's, whose weights come last. `given` are names of
    arguments that they get beside the usual ones. Raises TaskError if one of them cannot be imported, or called with
    the columns of one of these rows.
    """

    def __init__(
        self,
        names: list[str],
        weights: list[float] | None,
        rows: Iterable[Row],
        steps: int = 1,
        others: Iterable[str] = (),
        given: Iterable[str] = (),
    ):
        if weights and len(weights) != len(names) + len(others):
            raise TaskError(f"--reward-weights: {len(weights)} weights for {len(names) + len(others)} rewards")
        short = [name.rpartition(":")[2] for name in names]
        self.functions = {
            name if short.count(own) > 1 else own: named_function("--reward", name)
            for name, own in zip(names, short, strict=True)
        }
        if len(self.functions) < len(names):
            raise TaskError(f"--reward {' '.join(names)}: one of them is there twice")
        self.names, self.steps = dict(zip(self.functions, names, strict=True)), steps
        every = [*self.functions, *others]
        self.weights = dict(zip(every, weights or [1.0] * len(every), strict=True))
        for row in rows:
            for name, function in zip(names, self.functions.values(), strict=True):
                _check_signature(name, function, [*FROM_THE_RUN, *given, *row.columns])

    def add(self, name: str, function: Callable) -> None:
        """One more reward, of weight 1."""
        if name in self.functions:
            raise TaskError(f"--reward {name}: an environment's own reward has this name")
        self.functions[name], self.weights[name] = function, 1.0

    def __str__(self) -> str:
        return " + ".join(f"{weight:g} x {name}" for name, weight in self.weights.items())

    def score(self, batch: Batch, steps_done: int = 0, call: Callable | None = None) -> Batch:
        """This batch, with rewards and their metrics.

        A function's None leaves it out of that completion's sum. The reward of a completion that all functions leave
        out is None. `call` takes the arguments of each group and returns what each reward returns, by name, for each
        group (default: `begin` and `finish`). Raises TaskError if a function fails, or returns anything but a finite
        number or None for each completion.
        """
        scores = [Scores(self, group, steps_done) for group in batch.groups]
        if call:
            returned = call([score.arguments for score in scores])
        else:
            for score in scores:
                score.begin()
            returned = [score.finish() for score in scores]
        groups = [score.scored(values) for score, values in zip(scores, returned, strict=True)]
        return Batch(groups, batch.metrics | reward_metrics(groups))

    def sum(self, rewards: dict[str, float | None]) -> float | None:
        """The weighted sum of those that are known; None of none."""
        parts = [self.weights[name] * value for name, value in rewards.items() if value is not None]
        return sum(parts) if parts else None


class Scores:
    """The rewards of one group, which are on their way between `begin` and `finish`."""

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
        if group.environments:
            self.arguments["environments"] = [environment.instance for environment in group.environments]

    def begin(self) -> None:
        """Start the rewards that are coroutines."""
        self.begun = begin(self.rewards.functions, self.arguments)

    def finish(self) -> dict[str, Iterable]:
        """What each reward returns."""
        return finish(self.rewards.functions, self.arguments, self.begun)

    def scored(self, returned: dict[str, Iterable]) -> Group:
        """The group with these rewards, by name."""
        values = {name: _checked(f"the reward {name}", own, self.group) for name, own in returned.items()}
        rows = [{name: own[i] for name, own in values.items()} for i in range(len(self.group.rollouts))]
        rollouts = [
            replace(rollout, rewards=row, reward=self.rewards.sum(row), extra=extra)
            for rollout, row, extra in zip(self.group.rollouts, rows, self.extra, strict=True)
        ]
        for environment in self.group.environments:
            environment.release()
        return Group(self.group.row, rollouts, dict(self.logged))

    def _log_extra(self, column: str, values: list) -> None:
        if column in OWN_COLUMNS:
            raise ValueError(f"log_extra: completions have a column {column!r} already")
        for own, value in zip(self.extra, values, strict=True):
            own[column] = value


def _completion(row: Row, rollout: Rollout) -> str | list[dict]:
    if isinstance(row.prompt, str):
        return rollout.text
    return rollout.messages or [{"role": "assistant", "content": rollout.text}]


def begin(functions: dict[str, Callable], arguments: dict) -> dict[str, Future]:
    """Start those functions that are coroutines, in one event loop."""
    return {
        name: asyncio.run_coroutine_threadsafe(function(**arguments), event_loop())
        for name, function in functions.items()
        if _is_async(function)
    }


def finish(functions: dict[str, Callable], arguments: dict, begun: dict[str, Future]) -> dict[str, Iterable]:
    """What each function returns, of which some have `begun`. The first of the others runs in this thread: where that
    is the main one, timeouts by signals work. The rest run beside it, in threads of their own."""
    futures, here = dict(begun), None
    for name, function in functions.items():
        if name not in begun:
            futures[name] = Future()
            job = partial(function, **arguments), futures[name]
            if here is None:
                here = job
            else:
                threading.Thread(target=_run, args=job, daemon=True).start()
    if here:
        _run(*here)
    wait(futures.values(), return_when=FIRST_EXCEPTION)
    for name, future in futures.items():
        if future.done() and (error := future.exception()):  # the user's code can raise anything
            raise failed(f"the reward {name}", error) if isinstance(error, Exception) else error
    return {name: futures[name].result() for name in functions}


def reward_metrics(groups: list[Group]) -> dict[str, float]:
    """The mean of each reward in these groups, without its Nones, and of what went to `log_metric`."""
    numbers = defaultdict(list)
    for group in groups:
        for name, values in group.logged.items():
            numbers[name] += values
        for rollout in group.rollouts:
            for name, value in rollout.rewards.items():
                numbers[f"rewards/{name}/mean"] += [] if value is None else [value]
    return {name: sum(values) / len(values) for name, values in numbers.items() if values}


def _check_signature(name: str, function: Callable, arguments: list[str]) -> None:
    try:
        inspect.signature(function).bind(**dict.fromkeys(arguments))
    except TypeError as error:
        call = f"{name.rpartition(':')[2]}({', '.join(arguments)})"
        raise TaskError(f"--reward {name} cannot be called as {call}, all by name: {error}") from error
    except ValueError:
        pass  # a builtin without a signature


def _is_async(function: Callable) -> bool:
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


def _run(call: Callable, future: Future) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # also an exit, which would leave those that wait without an answer
        future.set_exception(error)


def _checked(what: str, returned: Iterable, group: Group) -> list[float | None]:
    try:
        values = list(returned)
    except TypeError as error:
        raise TaskError(f"{what} returned {returned!r}, which is not a list") from error
    if len(values) != len(group.rollouts):
        raise TaskError(f"{what} returned {len(values)} values for {len(group.rollouts)} completions")
    for i, value in enumerate(values):
        what_for = f"for {group.rollouts[i].text!r} ({group.row.origin})"
        try:
            values[i] = None if value is None else float(value)
        except (TypeError, ValueError) as error:
            raise TaskError(f"{what} returned {value!r}, which is not a number, {what_for}") from error
        if value is not None and not math.isfinite(values[i]):
            raise TaskError(f"{what} returned {values[i]} {what_for}")
    return values
