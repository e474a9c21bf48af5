"""`--task addition`: a small model learns to carry, as seen on sums that no step learns from.

    python train_grpo.py --task addition
    python train_distill.py --task addition --teacher trainer.tasks.addition:build_teacher --steps 300

The model is made on the spot: the built-in one (tiny_model.py), taught by supervised steps. Nearly all of them are on
sums without a carry in the ones, such as 12+34. Of the others, such as 17+25, it gets few right, and learns them from
the reward alone; in train_distill.py from a teacher, whom supervised steps have taught all sums. No step of any kind
sees a sum that the model is evaluated on, in either order.
"""

import random
from itertools import combinations_with_replacement
from pathlib import Path

from .tiny_model import END, Part, build_tiny_model, teach

LARGEST, HELD_OUT = 99, 250  # the largest number; pairs of numbers to evaluate on, of 5,050
CARRIES, TEACHER_CARRIES = 0.05, 0.5  # the share of sums with a carry in the supervised steps
RIGHT, TEACHER_RIGHT = 0.9, 0.95  # the share of right answers at which the supervised steps end


def problems(split: str) -> list[dict]:
    """Sums of two numbers: those to evaluate on (`split` "test"), or all others."""
    pairs = list(combinations_with_replacement(range(LARGEST + 1), 2))
    random.Random(0).shuffle(pairs)
    pairs = pairs[:HELD_OUT] if split == "test" else pairs[HELD_OUT:]
    ordered = [order for a, b in pairs for order in dict.fromkeys([(a, b), (b, a)])]
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b), "carry": (a % 10 + b % 10) // 10} for a, b in ordered]


def build_model(folder: Path, seed: int) -> None:
    """Write the built-in model to `folder`, taught until the share `RIGHT` of its answers is right."""
    build_tiny_model(folder, seed)
    steps = teach_sums(folder, seed, CARRIES, RIGHT)
    print(f"{steps} supervised steps have taught a small model to add, mostly without a carry")


def build_teacher(folder: Path, seed: int) -> None:
    """Write a teacher to `folder`: what `build_model` makes of another seed, taught to carry as well."""
    build_model(folder, seed + 1)
    steps = teach_sums(folder, seed, TEACHER_CARRIES, TEACHER_RIGHT)
    print(f"{steps} more have taught it to carry")


def teach_sums(folder: Path, seed: int, carries: float, right: float) -> int:
    """Teach the model in this folder by supervised steps until it gets the share `right` of sums right, of which the
    share `carries` has a carry in the ones. Returns how many steps there were."""
    rows, rng = problems("train"), random.Random(seed)
    by_carry = {carry: [row for row in rows if row["carry"] == carry] for carry in (0, 1)}

    def example() -> list[Part]:
        row = rng.choice(by_carry[rng.random() < carries])
        return [Part(row["prompt"]), Part(row["answer"] + END, taught=True, counts=True)]

    return teach(folder, example, right)


DEFAULTS = {
    "dataset": "trainer.tasks.addition:problems",
    "eval_split": "test",
    "reward": ["trainer.tasks.rewards:exact"],
    "model": "trainer.tasks.addition:build_model",
    "max_tokens": 4,  # three digits and the end
    "steps": 500,
    "prompts_per_step": 64,
    "learning_rate": 2e-4,
    "lr_scheduler": "linear",
    "warmup_steps": 10,
    "save_every": 50,
    "eval_every": 20,
}
