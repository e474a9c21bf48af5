"""`--task uppercase`, the default: a few prompts, and a reward for upper-case letters. Any model learns it."""

from .rewards import completion_text

PROMPTS = [
    "The captain shouted: ",
    "Read the sign: ",
    "The headline said: ",
    "Dear Sir or Madam, ",
    "The crowd roared: ",
    "On the wall was written: ",
    "The machine printed: ",
    "Once upon a time ",
]


def prompts(split: str) -> list[dict]:
    return [{"prompt": prompt} for prompt in PROMPTS]


def uppercase(completions: list, **_) -> list[float]:
    """The share of a completion's characters that are upper-case letters A to Z."""
    return [sum("A" <= c <= "Z" for c in text) / max(len(text), 1) for text in map(completion_text, completions)]


DEFAULTS = {"dataset": "trainer.tasks.uppercase:prompts", "reward": ["trainer.tasks.uppercase:uppercase"]}
