"""Evaluation: the rewards of completions for prompts that no step learns from."""

import dataclasses
import math
import time

from ..tasks.rewards import reward_metrics
from .engine import EngineActor
from .rollouts import Rollouts


def evaluate(rollouts: Rollouts, step: int) -> dict[str, float]:
    """Metrics of completions of the held-out prompts; {} if no evaluation is due after this step.

    One is due before the first step, after every `eval_every` steps, and after the last one. Each prompt gets one
    greedy completion or, with `eval_samples`, so many at the temperature of training. A completion passes if its reward
    is at least `pass_reward`; one whose reward is not known counts for nothing. Returns `eval/reward`, the mean;
    `eval/pass@k` for k = 1, 2, 4, ... and `eval_samples`; the means of the single rewards; and `time/eval` in seconds.

    An evaluation changes nothing in training: each request has its seed, the same in every evaluation, and the engines
    drop the prompts from their caches.
    """
    task, config, args = rollouts.task, rollouts.config, rollouts.task.args
    if not args.eval_every or (step % args.eval_every and step != task.steps):
        return {}
    started, samples = time.perf_counter(), args.eval_samples or 1
    temperature = config.temperature if args.eval_samples else 0.0
    sampling = dataclasses.replace(config, group_size=samples, temperature=temperature)
    rows, groups = task.eval_rows, []
    # Each conversation has a thread and an environment: no more at a time than in a step of training.
    at_once = max(1, args.prompts_per_step * config.group_size // samples) if task.tools else len(rows)
    for part, first in enumerate(range(0, len(rows), at_once)):
        batch = rollouts.complete(rows[first : first + at_once], sampling, part)
        groups += task.rewards.compute(batch, step).groups
    rollouts.engines.call("evaluating", EngineActor.drop_caches)  # a run that is resumed here has none
    known = [[rollout.reward for rollout in group.rollouts if rollout.reward is not None] for group in groups]
    rewards = [reward for group in known for reward in group]
    metrics = {f"eval/{name}": value for name, value in reward_metrics(groups).items()}
    if rewards:
        metrics["eval/reward"] = sum(rewards) / len(rewards)
    least = args.pass_reward - 1e-6  # a reward may be a sum, which is rounded
    counts = [(len(group), sum(reward > least for reward in group)) for group in known]
    for k in sorted({2**i for i in range(samples.bit_length())} | {samples}):
        chances = [pass_at_k(count, passed, k) for count, passed in counts if count >= k]
        if chances:
            metrics[f"eval/pass@{k}"] = sum(chances) / len(chances)
    return metrics | {"time/eval": time.perf_counter() - started}


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """The unbiased estimate of the probability that at least one of k completions passes, from n `samples` of which c
    have `passed`: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374)."""
    return 1 - math.comb(samples - passed, k) / math.comb(samples, k)
