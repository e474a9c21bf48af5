"""Rewards in other processes: functions as Ray tasks on any node, and a reward model's ranks as Ray actors."""

import itertools
import json
from concurrent.futures import wait
from dataclasses import dataclass
from functools import cache
from typing import Annotated

import ray
from annotated_types import Ge
from pydantic import AfterValidator

from ..errors import RunError, TaskError
from ..flags import arg
from ..functions import json_object
from ..learning.value_models import RewardModel
from ..run.actors import ActorGroup
from ..run.session import RaySession
from ..tasks.dataset import without_parts
from ..tasks.environment import together
from ..tasks.rewards import Batch, RewardCall, Rewards, reward_metrics
from .sampling import in_parts

REWARD_MODEL = "reward_model"  # the name of its scores among the rewards


@dataclass
class RewardArguments:
    """A reward model, and where rewards are computed."""

    reward_model: str | None = arg(
        None,
        help="a sequence classifier with one output: on the Hugging Face hub, a folder, or module:function, which is"
        " called with (folder, seed) and writes one there; its score is one more reward beside those of --reward, and"
        " its weight is the last of --reward-weights",
    )
    reward_workers: Annotated[int, Ge(1)] = arg(
        1, help="Ray tasks, on any node, for each --reward; the prompts of a step are divided among them"
    )
    reward_resources: Annotated[str, AfterValidator(json_object)] = arg(
        '{"CPU": 0}', help="the Ray resources of each of --reward-workers, as JSON"
    )


class RewardWorkers:
    """Calls the functions of `rewards` and the reward model, if there is one, outside of this process.

    If a task dies with its process or node, Ray runs it again, on another node if need be, up to three times. After
    that, and if a function raises, the run ends.
    """

    def __init__(self, rewards: Rewards, reward_model: ActorGroup | None, args: RewardArguments):
        self.rewards, self.reward_model = rewards, reward_model
        self.workers = args.reward_workers
        resources = {name: float(amount) for name, amount in json.loads(args.reward_resources).items()}
        offers = [node["Resources"] for node in ray.nodes() if node["Alive"]] if any(resources.values()) else [{}]
        if not any(all(0 <= amount <= offer.get(name, 0) for name, amount in resources.items()) for offer in offers):
            raise RunError(f"--reward-resources {args.reward_resources}: no node has these, so no reward could begin")
        cpus, gpus = resources.pop("CPU", 0), resources.pop("GPU", 0)
        options = {"num_cpus": cpus, "num_gpus": gpus, "resources": resources, "scheduling_strategy": "SPREAD"}
        self.task = ray.remote(run_reward).options(**options)

    def compute(self, batch: Batch, steps_done: int, session: RaySession) -> Batch:
        """As `Rewards.compute`."""
        calls = [RewardCall(self.rewards, group, steps_done) for group in batch.groups]
        returned = self.call([call.arguments for call in calls], session)
        groups = [call.rewarded(values) for call, values in zip(calls, returned, strict=True)]
        return Batch(groups, batch.metrics | reward_metrics(groups))

    def call(self, groups: list[dict], session: RaySession) -> list[dict[str, list]]:
        """For each group of completions, given as the arguments of its rewards: the values of each reward, by name."""
        plain = [{name: value for name, value in group.items() if not callable(value)} for group in groups]
        parts = in_parts(plain, min(self.workers, len(groups)))
        calls = {
            f"reward {name}" + f" (part {i} of {len(parts)})" * (len(parts) > 1): self.task.remote(
                full_name, self.rewards.timeout, part
            )
            for name, full_name in self.rewards.names.items()
            for i, part in enumerate(parts, 1)
        }
        scoring = {}
        if self.reward_model:
            texts = [
                [without_parts(text) for own in groups for text in own[name]] for name in ("prompts", "completions")
            ]
            scoring = self.reward_model.begin(RewardModel.rewards, *texts)
        results, scores_of_ranks = session.wait("rewarding", calls, scoring)
        values_of_groups = [{} for _ in groups]
        parts_of_rewards = [results[i : i + len(parts)] for i in range(0, len(calls), len(parts))]
        for name, results_of_parts in zip(self.rewards.names, parts_of_rewards, strict=True):
            answers = itertools.chain(*results_of_parts)
            for group, values_of, (values, logged) in zip(groups, values_of_groups, answers, strict=True):
                values_of[name] = values
                for log, *arguments in logged:
                    try:
                        group[log](*arguments)
                    except Exception as error:  # of what a user's function gave it
                        raise TaskError(f"the reward {name}: {log}: {error}") from error
        if scoring:
            scores = iter(scores_of_ranks[0])
            for group, values_of in zip(groups, values_of_groups, strict=True):
                values_of[REWARD_MODEL] = [next(scores) for _ in group["prompts"]]
        return values_of_groups


def run_reward(name: str, timeout: float, groups: list[dict]) -> list[tuple[list, list[tuple]]]:
    """For each group: the values of the reward `name` ("module:function"), and its calls of `log_extra` and
    `log_metric`."""
    rewards, logs = _rewards_of(name, timeout), [[] for _ in groups]
    calling = together(
        rewards.call(
            group
            | {
                "log_extra": lambda column, values, log=log: log.append(("log_extra", column, values)),
                "log_metric": lambda name, value, log=log: log.append(("log_metric", name, value)),
            }
        )
        for group, log in zip(groups, logs, strict=True)
    )
    while not calling.done():
        rewards.phase()
        wait([calling], timeout=1)
    return [(*values.values(), log) for values, log in zip(calling.result(), logs, strict=True)]


@cache
def _rewards_of(name: str, timeout: float) -> Rewards:
    """The reward of this name, whose thread calls it in one task after another."""
    return Rewards([name], None, [], timeout=timeout)
