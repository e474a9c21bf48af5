"""The default task of train_ppo.py: the prompts of uppercase.py, and a small reward model that is made on the spot.

The model is an OPT of one layer that reads bytes. In seconds, it is taught to count the upper-case letters A to Z of a
completion. Like any reward model, it estimates the score from the text.
"""

import random
from pathlib import Path

import torch
from transformers import OPTForSequenceClassification

from .tiny_model import byte_tokenizer, opt_config
from .uppercase import PROMPTS

POINTS = 3 / 16  # for each upper-case letter: 3 for a completion of 16 of them
LONGEST = 16  # bytes of the longest completion that it is taught with
HIDDEN_SIZE, STEPS, BATCH, LEARNING_RATE = 64, 200, 32, 5e-3


def build_tiny_reward_model(folder: str | Path, seed: int = 0) -> Path:
    """Write the model to `folder` and return the folder."""
    tokenizer, rng = byte_tokenizer(), random.Random(seed)
    random_state, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # there is no work for more
    config = opt_config(tokenizer, HIDDEN_SIZE, HIDDEN_SIZE, layers=1, heads=2, num_labels=1, dropout=0.0)
    model = OPTForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    for _ in range(STEPS):
        prompts, completions = examples(rng, BATCH)
        texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        scores = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits[:, 0]
        loss = (scores - torch.tensor([points(completion) for completion in completions])).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    torch.set_rng_state(random_state)
    torch.set_num_threads(threads)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{STEPS} supervised steps have taught a small reward model to count upper-case letters")
    return Path(folder)


def points(completion: str) -> float:
    """The score that a completion should get."""
    return POINTS * sum("A" <= character <= "Z" for character in completion)


def examples(rng: random.Random, count: int) -> tuple[list[str], list[str]]:
    """Prompts, and completions of upper-case letters and random bytes, mixed in any proportion."""

    def completion() -> str:
        share = rng.random()
        codes = [
            rng.randrange(65, 91) if rng.random() < share else rng.randrange(256)
            for _ in range(rng.randint(1, LONGEST))
        ]
        return bytes(codes).decode(errors="replace")

    return [rng.choice(PROMPTS) for _ in range(count)], [completion() for _ in range(count)]


DEFAULTS = {
    "dataset": "trainer.tasks.uppercase:prompts",
    "reward_model": "trainer.tasks.tiny_reward_model:build_tiny_reward_model",
}
