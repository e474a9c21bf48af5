"""`--task reasoning_gym`: problems of reasoning-gym's generators, whose own scores are the reward.

    python train_grpo.py --task reasoning_gym                  # sums; the model is in a package as well: smollm2.py
    python train_grpo.py --task reasoning_gym --dataset-config '{"gcd": {}, "chain_sum": {"max_terms": 4}}'
    python train_grpo.py --task reasoning_gym --map trainer.tasks.reasoning_gym:as_text --model facebook/opt-125m

It takes `pip install reasoning-gym`. `--dataset-config` has the generators' names and their parameters. Of these,
`size` is how many problems there are to learn from. A tenth as many, of other seeds, are held out.
"""

import functools
import json
import re
from collections.abc import Callable

from .gsm8k import NUMBER, final_number
from .rewards import completion_text

try:
    import reasoning_gym
    from reasoning_gym.utils import extract_answer
except ImportError as error:
    raise ImportError(f"pip install reasoning-gym ({error})") from error

HELD_OUT_SEED = 2**24  # far from the others: problem i of a seed is problem 0 of seed + i


@functools.cache
def generator(name: str, config: str):
    """The generator of this name, with the JSON of its parameters: a sequence of problems."""
    return reasoning_gym.create_dataset(name, **json.loads(config))


def problems(split: str, **generators: dict) -> list[dict]:
    """The problems of these generators, which have their parameters; `split` "test" has those to evaluate on."""
    rows = []
    for name, parameters in generators.items():
        config = {"size": 2000, "seed": 0} | parameters
        if split == "test":
            config |= {"size": max(1, config["size"] // 10), "seed": config["seed"] + HELD_OUT_SEED}
        for problem in generator(name, text := json.dumps(config)):
            prompt = [{"role": "user", "content": problem["question"]}]
            rows.append({"prompt": prompt, "answer": problem["answer"], "problem": problem, "source": [name, text]})
    return rows


def as_text(row: dict) -> dict:
    """For a model without a chat template: the row with the question as its prompt."""
    return row | {"prompt": row["prompt"][0]["content"] + "\n"}


def score(completions: list, problem: list[dict], source: list[list[str]], log_metric: Callable, **_) -> list[float]:
    """What the generator's `score_answer` says of each completion's answer: 1 if it is right, and less if it has the
    right answer in it or, by some generators, if it is nearly right."""
    scores = [score_completion(*each) for each in zip(completions, problem, source, strict=True)]
    for (name, _config), value in zip(source, scores, strict=True):
        log_metric(f"reasoning_gym/{name}", value)
    return scores


def score_completion(completion: str | list[dict], problem: dict, source: list[str]) -> float:
    try:
        return float(generator(*source).score_answer(given_answer(completion, problem["answer"]), problem))
    except Exception:  # some raise for an answer that they cannot read
        return 0.0


def given_answer(completion: str | list[dict], right: str | None) -> str:
    """The answer in a completion: what its last <answer> tags hold, which a system prompt may ask for. Without tags, it
    is the final number if the `right` answer is a number, since a small model answers "The sum is 7.", and else all of
    the text after </think>: the scores are higher, the less there is beside the right answer."""
    text = completion_text(completion).rpartition("</think>")[2]
    if (tagged := extract_answer(text)) is not None:
        return tagged
    if not re.fullmatch(NUMBER, right or ""):
        return text.strip()
    number = final_number(text)
    return "" if number is None else f"{number:f}"


DEFAULTS = {
    "dataset": "trainer.tasks.reasoning_gym:problems",
    "dataset_config": '{"chain_sum": {"max_terms": 3, "max_digits": 2}}',
    "eval_split": "test",
    "reward": ["trainer.tasks.reasoning_gym:score"],
    "model": "trainer.tasks.smollm2:build_model",
    "learning_rate": 1e-5,
    "prompts_per_step": 32,
    "max_tokens": 128,
    "max_model_len": 1024,
    "eval_every": 20,
}
