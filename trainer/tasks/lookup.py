"""`--task lookup`: a small model learns to look a number up, as seen on drawers that no step learns from.

    python train_grpo.py --task lookup

A prompt names one of a hundred drawers. Each row draws the number in it anew, so only the tool `look` knows it. The
model is made on the spot: the built-in one (tiny_model.py), taught by supervised steps to guess a number. It can also
call the tool and repeat the answer, but it seldom begins with a call. When to call, it learns from the reward alone. No
step of either kind sees a drawer that the model is evaluated on.
"""

import random
from pathlib import Path

from .tiny_model import END, Part, build_tiny_model, teach

DRAWERS = [letter + digit for letter in "abcdefghij" for digit in "0123456789"]
HELD_OUT, NUMBERS = 20, 10  # drawers to evaluate on; rows of each of the others, with a number each
CALLS = 0.1  # of the supervised examples with a call, the share that teaches to begin with it
RIGHT = 0.99  # the share of right calls and repetitions at which the supervised steps end
TEMPLATE = """
{%- for message in messages %}
    {%- if message.role != "assistant" %}{{ ("=" if message.role == "tool" else "") + message.content }}
    {%- else %}{{ ":" + message.content }}
        {%- for call in message.tool_calls or [] %}{{ "[" + call.function.name + "(" }}
          {%- for name, value in call.function.arguments.items() %}{{ name ~ '="' ~ value ~ '"' }}{% endfor %}{{ ")]" }}
        {%- endfor %}{{ "</s>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ ":" }}{% endif %}"""


class Drawers:
    """A drawer with a number in it."""

    def reset(self, drawer: str, answer: str, **_) -> None:
        self.drawer, self.number = drawer, answer

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
    """Rows of drawers: those to evaluate on (`split` "test"), or the others, each several times with other numbers."""
    rng = random.Random(0)
    names = rng.sample(DRAWERS, len(DRAWERS))
    names = names[:HELD_OUT] if split == "test" else names[HELD_OUT:] * NUMBERS
    return [
        {"prompt": [{"role": "user", "content": f"{name}?"}], "drawer": name, "answer": f"{rng.randrange(100):02}"}
        for name in names
    ]


def build_model(folder: Path, seed: int) -> None:
    """Write the built-in model to `folder`, taught until the share `RIGHT` of its calls and repetitions is right."""
    from transformers import AutoTokenizer

    build_tiny_model(folder, seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    names, rng = [row["drawer"] for row in drawers("train")], random.Random(seed)
    steps = teach(folder, lambda: _example(rng, rng.choice(names)), RIGHT)
    print(f"{steps} supervised steps have taught a small model to guess, and how it could look")


def _example(rng: random.Random, name: str) -> list[Part]:
    """A conversation about a drawer, with a guess or a call, for `teach`."""
    number = f"{rng.randrange(100):02}"
    if rng.random() < 1 / 2:
        return [Part(f"{name}?:"), Part(number + END, taught=True)]
    return [
        Part(f"{name}?:"),
        Part("[", taught=rng.random() <= CALLS),
        Part(f'look(drawer="{name}")]{END}', taught=True, counts=True),
        Part(f"={number}:"),
        Part(number + END, taught=True, counts=True),
    ]


DEFAULTS = {
    "dataset": "trainer.tasks.lookup:drawers",
    "eval_split": "test",
    "environment": "trainer.tasks.lookup:Drawers",
    "tool_parser": "pythonic",
    "reward": ["trainer.tasks.rewards:exact"],
    "model": "trainer.tasks.lookup:build_model",
    "max_tokens": 32,
    "steps": 40,
    "prompts_per_step": 16,
    "learning_rate": 2e-4,
    "save_every": 20,
    "eval_every": 5,
}
