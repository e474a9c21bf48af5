"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168): word problems whose answer is a number. Take a chat model.

    python train_grpo.py --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k

A solution in the dataset ends with "#### 42".
"""

import re
from decimal import Decimal

from .rewards import completion_text

NUMBER = r"((?<![\w.])-?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?)"


def to_chat(row: dict) -> dict:
    """A row of the dataset as a chat prompt, and the number that answers it."""
    return {"prompt": [{"role": "user", "content": row["question"]}], "answer": f"{final_number(row['answer']):f}"}


def correct(completions: list, answer: list[str], **_) -> list[float]:
    """1 for a completion whose final number is the answer, else 0."""
    return [
        float(final_number(completion_text(completion)) == Decimal(number))
        for completion, number in zip(completions, answer, strict=True)
    ]


def final_number(text: str) -> Decimal | None:
    r"""The number after the last "####", else the one in the last \boxed{}, else the last number, if there is any."""
    text = text.replace("\N{MINUS SIGN}", "-").replace("{,}", ",")  # LaTeX: 1{,}000
    for pattern in (rf"####[^\d\n]*?{NUMBER}", rf"\\boxed{{[^\d}}]*?{NUMBER}", NUMBER):
        if numbers := re.findall(pattern, text):
            return Decimal(re.sub("[$,]", "", numbers[-1]))
    return None


DEFAULTS = {
    "dataset": "openai/gsm8k",
    "dataset_config": "main",
    "eval_split": "test",
    "map": "trainer.tasks.gsm8k:to_chat",
    "reward": ["trainer.tasks.gsm8k:correct"],
    "system_prompt": "Reason step by step. Then write the answer, a number, after ####.",
    "max_tokens": 512,
    "eval_every": 50,
}
