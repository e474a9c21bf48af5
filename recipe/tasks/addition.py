"""`--task addition`: a small model learns to carry, as seen on sums that no step learns from.

    python rlhf.py --task addition

The model is made on the spot: the built-in one (tiny_model.py), taught by supervised steps, nearly all of them on sums
without a carry in the ones, such as 12+34. Of the others, such as 17+25, it gets few right. The rest it learns from the
reward alone. Neither part sees the sums that it is evaluated on, in either order.
"""

import random
from itertools import combinations_with_replacement
from pathlib import Path

import torch

from .tiny_model import build_tiny_model

LARGEST, HELD_OUT = 99, 250  # the largest number; pairs of numbers to evaluate on, of 5,050
PROMPT = -100  # what transformers calls a position without a label
BATCH, LEARNING_RATE = 128, 1e-3  # of the supervised steps
CARRIES, RIGHT = 0.05, 0.9  # the share of their sums with a carry; they stop at this share of right answers


def problems(split: str) -> list[dict]:
    """Sums of two numbers: those to evaluate on (`split` "test"), or all others."""
    pairs = list(combinations_with_replacement(range(LARGEST + 1), 2))
    random.Random(0).shuffle(pairs)
    pairs = pairs[:HELD_OUT] if split == "test" else pairs[HELD_OUT:]
    both_orders = [order for a, b in pairs for order in dict.fromkeys([(a, b), (b, a)])]
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b), "carry": (a % 10 + b % 10) // 10} for a, b in both_orders]


def exact(completions: list[str], answer: list[str], **_) -> list[float]:
    """1 for the answer and nothing else, 0 otherwise."""
    return [float(completion == expected) for completion, expected in zip(completions, answer, strict=True)]


def build_model(folder: Path, seed: int) -> None:
    """Write the built-in model to `folder`, taught until the fraction `RIGHT` of its answers is right.

    What counts are its greedy answers in the last ten steps or so, before it learned from them.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    build_tiny_model(folder, seed)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    rows, rng, steps, right = problems("train"), random.Random(seed), 0, 0.0
    by_carry = {carry: [row for row in rows if row["carry"] == carry] for carry in (0, 1)}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # there is no work for more
    while right < RIGHT:
        batch = [rng.choice(by_carry[rng.random() < CARRIES]) for _ in range(BATCH)]
        prompts = tokenizer([row["prompt"] for row in batch])["input_ids"]
        answers = tokenizer([row["answer"] + tokenizer.eos_token for row in batch])["input_ids"]
        ids = [torch.tensor(prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)]
        labels = [torch.tensor([PROMPT] * len(p) + answer) for p, answer in zip(prompts, answers, strict=True)]
        labels = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=PROMPT)
        output = model(input_ids=torch.nn.utils.rnn.pad_sequence(ids, batch_first=True), labels=labels)
        hits = (output.logits[:, :-1].argmax(-1) == labels[:, 1:]) | (labels[:, 1:] == PROMPT)
        right, steps = 0.9 * right + 0.1 * float(hits.all(1).float().mean()), steps + 1
        optimizer.zero_grad()
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    torch.set_num_threads(threads)
    model.save_pretrained(folder)
    print(f"{steps} supervised steps have taught a small model to add, mostly without a carry")


DEFAULTS = {
    "dataset": "recipe.tasks.addition:problems",
    "eval_split": "test",
    "reward": ["recipe.tasks.addition:exact"],
    "model": "recipe.tasks.addition:build_model",
    "max_tokens": 4,  # three digits and the end
    "steps": 500,
    "prompts_per_step": 64,
    "learning_rate": 2e-4,
    "lr_scheduler": "linear",
    "warmup_steps": 10,
    "save_every": 50,
    "eval_every": 20,
}
