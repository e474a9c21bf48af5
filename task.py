"""What a run learns from: prompts, and a reward for their completions. Both are built in, both can be the user's.

A prompts file is JSON lines, each with a `prompt`; other columns go to the reward. A reward is named
`module:function` and has TRL's signature: it gets lists with one entry a completion and returns as many numbers.

    def reward(prompts, completions, **columns) -> list[float]: ...
"""

import functools
import importlib
import json
import math
import os
import random
import sys
import traceback
from collections.abc import Callable


class TaskError(ValueError):
    """Prompts or a reward that cannot be used, said in words for the user."""


PROMPTS = [
    {"prompt": prompt}
    for prompt in (
        "The captain shouted: ",
        "Read the sign: ",
        "The headline said: ",
        "Dear Sir or Madam, ",
        "The crowd roared: ",
        "On the wall was written: ",
        "The machine printed: ",
        "Once upon a time ",
    )
]


def uppercase(prompts: list[str], completions: list[str], **columns) -> list[float]:
    """The built-in reward: the share of a completion's characters that are upper-case letters A to Z."""
    return [sum("A" <= c <= "Z" for c in text) / max(len(text), 1) for text in completions]


def load_prompts(path: str | None) -> list[dict]:
    """The rows of a prompts file, or the built-in ones. Raises TaskError with the number of a line that is wrong."""
    if path is None:
        return PROMPTS
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.readlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"cannot read the prompts file {path}: {error}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise TaskError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str) or not row["prompt"]:
            raise TaskError(f'{path}, line {number}: not an object with a non-empty string "prompt"')
        if taken := row.keys() & {"prompts", "completions"}:
            raise TaskError(f"{path}, line {number}: a reward gets {' and '.join(sorted(taken))} from the run itself")
        if rows and row.keys() != rows[0].keys():
            raise TaskError(f"{path}, line {number}: columns {sorted(row)}, unlike line 1's {sorted(rows[0])}")
        rows.append(row)
    if not rows:
        raise TaskError(f"the prompts file {path} has no prompts")
    return rows


def check_lengths(rows: list[dict], llm) -> None:
    """Raise a TaskError for the first prompt that a vllm.LLM would refuse, since no token of an answer has room."""
    for number, row in enumerate(rows, 1):
        length, room = len(llm.get_tokenizer().encode(row["prompt"])), llm.model_config.max_model_len
        if length >= room:
            raise TaskError(
                f"prompt {number}, {row['prompt'][:30]!r}..., has {length} tokens, and the engine has room for {room}"
                " with the completion's: --max-model-len"
            )


def load_reward(name: str | None) -> Callable:
    """The function that `module:function` names, or the built-in one. The working folder is searched for modules."""
    if name is None:
        return uppercase
    module, _, function = name.partition(":")
    if not module or not function:
        raise TaskError(f"--reward {name}: not of the form module:function")
    sys.path.insert(0, os.getcwd())
    try:
        reward = getattr(importlib.import_module(module), function)
    except Exception as error:  # importing runs the user's code, which can raise anything
        raise TaskError(f"--reward {name} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(reward):
        raise TaskError(f"--reward {name} is not a function")
    return reward


def draw_prompts(rows: list[dict], count: int, step: int, seed: int) -> list[dict]:
    """The `count` rows of one step (from 1): every epoch in an order of its own, which depends on the seed alone."""
    drawn = []
    for position in range((step - 1) * count, step * count):
        epoch, index = divmod(position, len(rows))
        drawn.append(rows[_order(len(rows), seed, epoch)[index]])
    return drawn


@functools.lru_cache(maxsize=2)
def _order(count: int, seed: int, epoch: int) -> list[int]:
    return random.Random(f"{seed} {epoch}").sample(range(count), count)


def score(reward: Callable, rows: list[dict], completions: list[str]) -> list[float]:
    """Rewards of completions of these rows, one each. Raises TaskError for a reward that fails or returns nonsense."""
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
    name = f"the reward {getattr(reward, '__name__', reward)}"
    try:
        values = list(reward(prompts=[row["prompt"] for row in rows], completions=completions, **columns))
    except Exception as error:  # the user's code can raise anything
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{os.path.basename(frame.filename)}, line {frame.lineno}"
        raise TaskError(f"{name} raised {type(error).__name__}: {error} ({place})") from error
    if len(values) != len(completions):
        raise TaskError(f"{name} returned {len(values)} values for {len(completions)} completions")
    for i, value in enumerate(values):
        try:
            values[i] = float(value)
        except (TypeError, ValueError) as error:
            raise TaskError(f"{name} returned {value!r}, which is not a number, for {completions[i]!r}") from error
        if not math.isfinite(values[i]):
            raise TaskError(f"{name} returned {values[i]} for {completions[i]!r}")
    return values
