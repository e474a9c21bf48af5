"""TRL's GRPOTrainer on the workload of benchmarks/learning.py, which starts this script, and the reward of all ways.

Prints a line for each step, as ours do. The held-out problems are answered greedily, by the engine that generates.
"""

import json
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

from step_trl import grpo_config

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from reasoning_gym.utils import extract_answer

from trainer.tasks.reasoning_gym import generator, problems, score_completion
from trainer.tasks.rewards import completion_text

EXAMPLES_SEED = 2**25  # far from those of the problems to learn from and to evaluate on


def correct(completions: list, problem: list[dict], source: list[list[str]], **_) -> list[float]:
    """1 for a completion whose answer is right, else 0."""
    return [float(score_completion(*each) >= 1) for each in zip(completions, problem, source, strict=True)]


def correct_in_tags(completions: list, **columns) -> list[float]:
    """1 for a completion whose answer is right and in <answer> tags, else 0."""
    tagged = [extract_answer(completion_text(completion)) is not None for completion in completions]
    return [right * is_tagged for right, is_tagged in zip(correct(completions, **columns), tagged, strict=True)]


def with_examples(row: dict) -> dict:
    """The row with two solved problems of its generator before its own, whose answers are in <answer> tags."""
    name, config = row["source"]
    turns, solved = [], generator(name, json.dumps(json.loads(config) | {"seed": EXAMPLES_SEED}))
    for problem in (solved[0], solved[1]):
        turns.append({"role": "user", "content": problem["question"]})
        turns.append({"role": "assistant", "content": f"<answer>{problem['answer']}</answer>"})
    return row | {"prompt": turns + row["prompt"]}


def rows_of(dataset_config: str, tags: bool) -> tuple[list[dict], list[dict]]:
    """The problems to learn from and those held out, as train_grpo.py has them; `tags` is learning.py's."""
    train, held_out = (
        [with_examples(row) if tags else row for row in problems(split, **json.loads(dataset_config))]
        for split in ("train", "test")
    )
    prompts = [row["prompt"] for row in held_out]
    return [row for row in train if row["prompt"] not in prompts], held_out


@contextmanager
def greedy(trainer):
    """The trainer generates without sampling."""
    if trainer.use_vllm:
        options, name, value = trainer.vllm_generation, "temperature", 0.0
    else:
        options, name, value = trainer.generation_config, "do_sample", False
    before = getattr(options, name)
    setattr(options, name, value)
    yield
    setattr(options, name, before)


def evaluate(trainer, rows: list[dict], reward: Callable) -> float:
    """The share of right answers among greedy completions. The engine gets the trainer's weights, once for a step."""
    with greedy(trainer):
        ids, *more = trainer._tokenize_prompts([row["prompt"] for row in rows])
        completion_ids, *_ = trainer._generate_single_turn(ids, *more, 1)
    texts = trainer.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
    columns = {name: [row[name] for row in rows] for name in ("problem", "source")}
    return sum(reward(texts, **columns)) / len(rows)


def main(workload: dict) -> None:
    optimizer = {"adam_beta2": 0.95, "adam_epsilon": 1e-15, "lr_scheduler_type": "constant"}  # as ours
    config = grpo_config(
        workload,
        learning_rate=workload["learning_rate"],
        seed=workload["seed"],
        vllm_max_model_length=workload["max_model_len"],
        **optimizer,
    )
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    rows, held_out = rows_of(workload["dataset_config"], workload["tags"])
    reward = correct_in_tags if workload["tags"] else correct
    steps, every, gpu = workload["steps"], workload["eval_every"], bool(workload["gpus"])

    class Log(TrainerCallback):
        def on_train_begin(self, *_, **__):
            print(f"step 0/{steps}  eval {evaluate(trainer, held_out, reward):.3f}", flush=True)

        def on_log(self, _args, state, _control, logs, **_):
            if "reward" in logs:  # and not the summary at the end
                line = f"step {state.global_step}/{steps}  reward {logs['reward']:.3f}"
                if gpu:
                    line += f"  mismatch {logs['sampling/sampling_logp_difference/mean']:.1e}"
                if state.global_step % every == 0 or state.global_step == steps:
                    line += f"  eval {evaluate(trainer, held_out, reward):.3f}"
                print(line, flush=True)

    options = {"model": workload["model"], "reward_funcs": reward, "args": config, "callbacks": [Log()]}
    trainer = GRPOTrainer(train_dataset=Dataset.from_list(rows), **options)
    trainer.train()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
