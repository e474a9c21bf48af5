"""Rewards, called as TRL's GRPOTrainer calls them: by name, with one entry per completion in each list.

    def reward(prompts, completions, completion_ids, **columns) -> list[float | None]: ...

If a prompt is a list of chat messages, its completions are as well: [{"role": "assistant", "content": text}]. Beside
the dataset's columns a reward gets `trainer_state` (`global_step`, `max_steps`), `log_extra(column, values)` and
`log_metric(name, value)`. It may be `async`, or an object with `__call__`.
"""

import asyncio
import inspect
import math
import statistics
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import SimpleNamespace

from .dataset import Row, failed, named_function
from .errors import TaskError
from .learner import Rollout

OWN_COLUMNS = ("step", "prompt", "text", "rewards", "advantage")  # of completions.jsonl
FROM_THE_RUN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


@dataclass
class Group:
    """A prompt and its completions, which are compared with each other."""

    row: Row
    rollouts: list[Rollout]

    @property
    def is_equal(self) -> bool:
        """Whether all rewards are equal: then every advantage is 0, and there is nothing to learn."""
        return len({rollout.reward for rollout in self.rollouts}) == 1


@dataclass
class Batch:
    """The prompts of one step with their completions. `metrics` are of the rewards."""

    groups: list[Group]
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def rollouts(self) -> list[Rollout]:
        """All completions, those of one prompt in a row."""
        return [rollout for group in self.groups for rollout in group.rollouts]


def completion_text(completion: str | list[dict]) -> str:
    """The text of a completion as a reward gets it."""
    return completion if isinstance(completion, str) else completion[0]["content"]


class Rewards:
    """The functions that `names` ("module:function") stand for, and the sum of what they return, by `weights`.

    `others` are names of rewards that are no functions: a reward model's, whose weights come last. `call` gets a step's
    arguments and returns what each reward returns, by name; who computes rewards elsewhere puts another in its place.
    Raises TaskError if one of them cannot be imported, or called with the columns of one of these rows.
    """

    def __init__(self, names: list[str], weights: list[float] | None, rows: Iterable[Row], others: Iterable[str] = ()):
        if weights and len(weights) != len(names) + len(others):
            raise TaskError(f"--reward-weights: {len(weights)} weights for {len(names) + len(others)} rewards")
        short = [name.rpartition(":")[2] for name in names]
        self.functions = {
            name if short.count(own) > 1 else own: named_function("--reward", name)
            for name, own in zip(names, short, strict=True)
        }
        if len(self.functions) < len(names):
            raise TaskError(f"--reward {' '.join(names)}: one of them is there twice")
        self.names = dict(zip(self.functions, names, strict=True))
        every = [*self.functions, *others]
        self.weights = dict(zip(every, weights or [1.0] * len(every), strict=True))
        self.logged = defaultdict(list)  # by `log_metric`
        for row in rows:
            for name, function in zip(names, self.functions.values(), strict=True):
                _check_signature(name, function, [*FROM_THE_RUN, *row.columns])

    def score(self, groups: list[Group], step: int = 1, steps: int = 1) -> list[Group]:
        """These groups, with rewards.

        A function's None leaves it out of that completion's sum. A completion that all functions leave out gets the
        mean of its group's others, which makes its advantage 0. Raises TaskError if a function fails, or returns
        anything but a finite number or None for each completion.
        """
        rows = [group.row for group in groups for _ in group.rollouts]
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        extra = [{} for _ in rollouts]

        def log_extra(column: str, values: list) -> None:
            if column in OWN_COLUMNS:
                raise ValueError(f"log_extra: completions have a column {column!r} already")
            for own, value in zip(extra, values, strict=True):
                own[column] = value

        arguments = {column: [row.columns[column] for row in rows] for column in rows[0].columns}
        arguments |= {
            "prompts": [row.prompt for row in rows],
            "completions": [
                rollout.text if isinstance(row.prompt, str) else [{"role": "assistant", "content": rollout.text}]
                for row, rollout in zip(rows, rollouts, strict=True)
            ],
            "completion_ids": [rollout.completion_ids for rollout in rollouts],
            "trainer_state": SimpleNamespace(global_step=step - 1, max_steps=steps),  # the steps that are done
            "log_extra": log_extra,
            "log_metric": lambda name, value: self.logged[name].append(float(value)),
        }
        values = {
            name: _checked(f"the reward {name}", returned, rows, rollouts)
            for name, returned in self.call(arguments).items()
        }
        scored = iter(
            replace(rollout, rewards={name: values[name][i] for name in values}, extra=extra[i])
            for i, rollout in enumerate(rollouts)
        )
        return [Group(group.row, self._sum([next(scored) for _ in group.rollouts])) for group in groups]

    def metrics(self, groups: list[Group]) -> dict[str, float]:
        """The mean of each reward in these groups, without its Nones, and of what went to `log_metric` since the last
        call."""
        numbers, self.logged = self.logged, defaultdict(list)
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            for name, value in rollout.rewards.items():
                numbers[f"rewards/{name}/mean"] += [] if value is None else [value]
        return {name: sum(values) / len(values) for name, values in numbers.items() if values}

    def _sum(self, rollouts: list[Rollout]) -> list[Rollout]:
        """The rollouts of one group, with their weighted sums as rewards."""
        sums = []
        for rollout in rollouts:
            parts = [self.weights[name] * value for name, value in rollout.rewards.items() if value is not None]
            sums.append(sum(parts) if parts else None)
        known = [total for total in sums if total is not None]
        mean = statistics.mean(known) if known else 0.0  # exact: equal rewards stay equal
        return [
            replace(rollout, reward=mean if total is None else total)
            for rollout, total in zip(rollouts, sums, strict=True)
        ]

    def call(self, arguments: dict) -> dict[str, Iterable]:
        """What each function returns. They run together: coroutines in one event loop, other functions in threads.

        The first of those others runs in this thread: where that is the main one, timeouts by signals work.
        """
        futures, here = {}, None
        for name, function in self.functions.items():
            call, futures[name] = partial(function, **arguments), Future()
            if _is_async(function):
                futures[name] = asyncio.run_coroutine_threadsafe(call(), _event_loop())
            elif here is None:
                here = call, futures[name]
            else:
                threading.Thread(target=_run, args=(call, futures[name]), daemon=True).start()
        if here:
            _run(*here)
        wait(futures.values(), return_when=FIRST_EXCEPTION)
        for name, future in futures.items():
            if future.done() and (error := future.exception()):  # the user's code can raise anything
                raise failed(f"the reward {name}", error) if isinstance(error, Exception) else error
        return {name: future.result() for name, future in futures.items()}


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One for the whole process, since clients of web services belong to a loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


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


def _checked(what: str, returned: Iterable, rows: list[Row], rollouts: list[Rollout]) -> list[float | None]:
    try:
        values = list(returned)
    except TypeError as error:
        raise TaskError(f"{what} returned {returned!r}, which is not a list") from error
    if len(values) != len(rows):
        raise TaskError(f"{what} returned {len(values)} values for {len(rows)} completions")
    for i, value in enumerate(values):
        where = f"for {rollouts[i].text!r} ({rows[i].place})"
        try:
            values[i] = None if value is None else float(value)
        except (TypeError, ValueError) as error:
            raise TaskError(f"{what} returned {value!r}, which is not a number, {where}") from error
        if value is not None and not math.isfinite(values[i]):
            raise TaskError(f"{what} returned {values[i]} {where}")
    return values
