"""`--task lookup`: a small model learns to look a number up, as seen on drawers that no step learns from.

    python rlhf.py --task lookup

A prompt names one of a hundred drawers, and no drawer has the same number twice: only the tool `look` knows it. The
model is made on the spot: the built-in one (tiny_model.py), taught by supervised steps to guess a number. It can also
call the tool and repeat what that says, but seldom begins with it. When to call it, it learns from the reward alone.
Neither part sees the drawers that it is evaluated on.
"""

import random
from pathlib import Path

from .tiny_model import END, build_tiny_model, teach

DRAWERS = [letter + digit for letter in "abcdefghij" for digit in "0123456789"]
HELD_OUT, NUMBERS = 20, 10  # drawers to evaluate on; rows of each of the others, with a number each
CALLS, RIGHT = 0.1, 0.99  # the share of calls that are taught as the beginning; the supervised steps stop at this share
TEMPLATE = """
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {{- ":" + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- "[" + call.function.name + "(" }}
            {%- for name, value in call.function.arguments.items() %}{{ name ~ '="' ~ value ~ '"' }}{% endfor %}
            {{- ")]" }}
        {%- endfor %}
        {{- "</s>" }}
    {%- else %}
        {{- ("=" if message.role == "tool" else "") + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ ":" }}{% endif %}"""


class Drawers:
    """A drawer with a number in it."""

    def reset(self, drawer: str, number: str, **_) -> None:
        self.drawer, self.number = drawer, number

    def look(self, drawer: str) -> str:
        """
        Look into a drawer.

        Args:
            drawer: The drawer's name.

        Returns:
            The number in it.
        """
        return self.number if drawer == self.drawer else "??"


def drawers(split: str) -> list[dict]:
    """Drawers to evaluate on (`split` "test"), or all others, each several times with another number."""
    rng = random.Random(0)
    names = rng.sample(DRAWERS, len(DRAWERS))
    names = names[:HELD_OUT] if split == "test" else names[HELD_OUT:] * NUMBERS
    return [
        {"prompt": [{"role": "user", "content": f"{name}?"}], "drawer": name, "number": f"{rng.randrange(100):02}"}
        for name in names
    ]


def exact(completions: list[list[dict]], number: list[str], **_) -> list[float]:
    """1 if the last message is the number and nothing else, 0 otherwise."""
    return [float(own[-1]["content"] == expected) for own, expected in zip(completions, number, strict=True)]


def build_model(folder: Path, seed: int) -> None:
    """Write the built-in model to `folder`, taught until a share `RIGHT` of its calls and repetitions is right."""
    from transformers import AutoTokenizer

    build_tiny_model(folder, seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    names, rng = [row["drawer"] for row in drawers("train")], random.Random(seed)
    steps = teach(folder, lambda: _example(rng, rng.choice(names)), RIGHT)
    print(f"{steps} supervised steps have taught a small model to guess, and how it could look")


def _example(rng: random.Random, name: str) -> list[tuple[str, bool, bool]]:
    """A conversation about a drawer, a guess or a call, as `teach` takes it. How a completion begins does not count."""
    number = f"{rng.randrange(100):02}"
    if rng.random() < 1 / 2:
        return [(f"{name}?:", False, False), (number + END, True, False)]
    begins = rng.random() <= CALLS
    return [
        (f"{name}?:", False, False),
        ("[", begins, False),
        (f'look(drawer="{name}")]{END}', True, True),
        (f"={number}:", False, False),
        (number + END, True, True),
    ]


DEFAULTS = {
    "dataset": "recipe.tasks.lookup:drawers",
    "eval_split": "test",
    "environment": "recipe.tasks.lookup:Drawers",
    "tool_parser": "pythonic",
    "reward": ["recipe.tasks.lookup:exact"],
    "model": "recipe.tasks.lookup:build_model",
    "max_tokens": 32,
    "steps": 40,
    "prompts_per_step": 16,
    "learning_rate": 2e-4,
    "save_every": 20,
    "eval_every": 5,
}
