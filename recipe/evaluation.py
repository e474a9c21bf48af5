"""Evaluation: what the policy makes of prompts that no step learns from."""

import dataclasses
import math
import time
from collections.abc import Callable

from .engine import complete
from .ray_session import RaySession
from .rewards import Batch
from .task import Task


def evaluate(
    session: RaySession, engines: dict, task: Task, args, step: int, run: Callable = lambda score: score()
) -> dict[str, float]:
    """Metrics of completions of the held-out prompts, or none if no evaluation is due after this step.

    One is due every `eval_every` steps, after the last one, and before the first, which is step 0. Each prompt gets one
    greedy completion or, with `eval_samples`, so many at the temperature of training. A completion passes if its reward
    is at least `pass_reward`. Returns `eval/reward`, the mean, `eval/pass@1`, `eval/pass@k` for k = 2, 4, ... and
    `eval_samples`, and `time/eval` in seconds. `run` calls the function that computes the rewards.

    Nothing of it reaches the training run: each request has a seed of its own, the same ones in every evaluation, and
    the engines forget the prompts.
    """
    if not is_due(args, step):
        return {}
    started, samples = time.perf_counter(), args.eval_samples or 1
    temperature = args.temperature if args.eval_samples else 0.0
    sampling = dataclasses.replace(args, group_size=samples, temperature=temperature)
    batch = complete(session, engines, task.eval_rows, sampling, step=0, evaluation=True)
    metrics = run(lambda: score(task, args, step, batch))
    return metrics | {"time/eval": time.perf_counter() - started}


def score(task: Task, args, step: int, batch: Batch) -> dict[str, float]:
    """The metrics of an evaluation's completions."""
    samples = args.eval_samples or 1
    groups = task.rewards.score(batch.groups, step, args.steps)
    rewards = [[rollout.reward for rollout in group.rollouts] for group in groups]
    metrics = {f"eval/{name}": value for name, value in task.rewards.metrics(groups).items()}
    metrics["eval/reward"] = sum(map(sum, rewards)) / (samples * len(rewards))
    passed = [sum(reward > args.pass_reward - 1e-6 for reward in group) for group in rewards]  # sums of floats: rounded
    for k in sorted({2**i for i in range(samples.bit_length())} | {samples}):
        metrics[f"eval/pass@{k}"] = sum(pass_at_k(samples, correct, k) for correct in passed) / len(passed)
    return metrics


def is_due(args, step: int) -> bool:
    return bool(args.eval_every) and (step % args.eval_every == 0 or step == args.steps)


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """The probability that at least one of k completions passes, estimated without bias from n samples of which c pass:
    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374)."""
    return 1 - math.comb(samples - passed, k) / math.comb(samples, k)
