"""Rewards beside the driver: functions as Ray tasks on any node, and a reward model's ranks as Ray actors."""

import itertools
import json
from dataclasses import dataclass
from typing import Annotated

import ray
from annotated_types import Ge
from pydantic import AfterValidator
from transformers.hf_argparser import HfArg

from ..functions import json_object
from ..run.actors import ActorGroup
from ..run.session import RaySession
from ..tasks.rewards import Batch, Rewards, begin, finish

REWARD_MODEL = "reward_model"  # its name among the rewards


@dataclass
class RewardArguments:
    """A reward model, and where rewards are computed."""

    reward_model: str | None = HfArg(
        default=None,
        help="a sequence classifier with one output: on the Hugging Face hub, a folder, or module:function, which gets"
        " (folder, seed) and writes one; its score is added to those of --reward, and its weight comes last",
    )
    reward_workers: Annotated[int, Ge(1)] = HfArg(
        default=1, help="Ray tasks, on any node, among which each --reward's prompts of a step are divided"
    )
    reward_resources: Annotated[str, AfterValidator(json_object)] = HfArg(
        default='{"CPU": 0}', help="Ray's resources for each such task, as JSON"
    )


class RewardWorkers:
    """Calls the functions of `rewards`, and the ranks of a reward model, if there are any, outside of this process.

    Ray runs a task again, on another node if need be, if it died with its process or node: three times. After that, and
    when a function raises, the run ends.
    """

    def __init__(self, session: RaySession, rewards: Rewards, reward_model: ActorGroup | None, args):
        self.session, self.rewards, self.reward_model = session, rewards, reward_model
        self.workers = args.reward_workers
        resources = json.loads(args.reward_resources)
        cpus, gpus = resources.pop("CPU", 0), resources.pop("GPU", 0)
        options = {"num_cpus": cpus, "num_gpus": gpus, "resources": resources, "scheduling_strategy": "SPREAD"}
        self.task = ray.remote(run_reward).options(**options)

    def score(self, batch: Batch, steps_done: int) -> Batch:
        """As `Rewards.score`."""
        return self.rewards.score(batch, steps_done, self.call)

    def call(self, groups: list[dict]) -> list[dict[str, list]]:
        """What each reward returns, by name, for the completions of each of these groups, given as its arguments."""
        plain = [{name: value for name, value in group.items() if not callable(value)} for group in groups]
        count = min(self.workers, len(groups))
        bounds = [i * len(groups) // count for i in range(count + 1)]
        calls = {
            f"reward {name}" + f" (part {i + 1} of {count})" * (count > 1): self.task.remote(full, plain[begin:end])
            for name, full in self.rewards.names.items()
            for i, (begin, end) in enumerate(itertools.pairwise(bounds))
        }
        scoring = {}
        if self.reward_model:
            texts = [[text for group in groups for text in group[name]] for name in ("prompts", "completions")]
            scoring = self.reward_model.begin("run", "rewards", *texts)
        results = self.session.wait("rewarding", calls | scoring)
        answers = [{} for _ in groups]
        for k, name in enumerate(self.rewards.names):
            own = [group for part in results[k * count : (k + 1) * count] for group in part]
            for arguments, answer, (values, columns, numbers) in zip(groups, answers, own, strict=True):
                answer[name] = values
                for column in columns.items():
                    arguments["log_extra"](*column)
                for number in numbers:
                    arguments["log_metric"](*number)
        if scoring:
            scores = iter(results[len(calls)])
            for group, answer in zip(groups, answers, strict=True):
                answer[REWARD_MODEL] = [next(scores) for _ in group["prompts"]]
        return answers


def run_reward(name: str, groups: list[dict]) -> list[tuple[list, dict[str, list], list[tuple[str, float]]]]:
    """What the reward `name` ("module:function") returns for each group, and what it logs: columns, and numbers."""
    functions, begun, answers = Rewards([name], None, []).functions, [], []
    for plain in groups:  # a coroutine runs for all groups at once
        columns, numbers = {}, []
        log = {"log_extra": columns.__setitem__, "log_metric": lambda *number, own=numbers: own.append(number)}
        begun.append((plain | log, begin(functions, plain | log), columns, numbers))
    for arguments, futures, columns, numbers in begun:
        (returned,) = finish(functions, arguments, futures).values()
        answers.append((list(returned), columns, numbers))
    return answers
