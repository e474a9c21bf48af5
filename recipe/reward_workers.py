"""Rewards beside the driver: functions as Ray tasks on any node, and a reward model's ranks as Ray actors."""

import json
from dataclasses import dataclass
from typing import Annotated

import ray
from annotated_types import Ge
from pydantic import AfterValidator
from transformers.hf_argparser import HfArg

from .arguments import json_object
from .ranks import Ranks
from .ray_session import RaySession
from .rewards import Rewards

REWARD_MODEL = "reward_model"  # its name among the rewards


@dataclass
class RewardArguments:
    """A reward model, and where rewards are computed."""

    reward_model: str | None = HfArg(
        default=None,
        help="Hugging Face model or folder of a sequence classifier with one output, or module:function(folder, seed)"
        " that writes one; with --reward, the weighted sum of both",
    )
    reward_workers: Annotated[int, Ge(1)] = HfArg(
        default=1, help="Ray tasks, on any node, that share the completions of a step for each --reward"
    )
    reward_resources: Annotated[str, AfterValidator(json_object)] = HfArg(
        default='{"CPU": 0}', help="of each such task, for Ray"
    )


class RayRewards:
    """Calls the functions of `rewards`, and the reward model if `ranks` has one, outside of this process.

    The completions of a prompt stay together. Ray runs a task again, on another node if need be, if it died with its
    process or node: three times. After that, and when a function raises, the run ends.
    """

    def __init__(self, rewards: Rewards, session: RaySession, ranks: Ranks, args: RewardArguments):
        self.names, self.session, self.ranks, self.workers = rewards.names, session, ranks, args.reward_workers
        resources = json.loads(args.reward_resources)
        cpus, gpus = resources.pop("CPU", 0), resources.pop("GPU", 0)
        options = {"num_cpus": cpus, "num_gpus": gpus, "resources": resources, "scheduling_strategy": "SPREAD"}
        self.task = ray.remote(run_reward).options(**options)

    def __call__(self, arguments: dict) -> dict[str, list]:
        """What each reward returns, by name."""
        log_extra, log_metric = arguments["log_extra"], arguments["log_metric"]
        arguments = {name: value for name, value in arguments.items() if name not in ("log_extra", "log_metric")}
        parts = [
            {name: value[begin:end] if isinstance(value, list) else value for name, value in arguments.items()}
            for begin, end in _bounds(arguments["prompts"], self.workers)
        ]
        calls = {
            f"reward {name}" + f" (part {i + 1} of {len(parts)})" * (len(parts) > 1): self.task.remote(full, part)
            for name, full in self.names.items()
            for i, part in enumerate(parts)
        }
        scoring = {}
        if REWARD_MODEL in self.ranks.actors:
            scoring = self.ranks.each(REWARD_MODEL, "run", "score", arguments["prompts"], arguments["completions"])
        results = self.session.wait("rewarding", **calls, **scoring)
        values = {}
        for i, name in enumerate(self.names):
            own = results[i * len(parts) : (i + 1) * len(parts)]
            values[name] = [value for returned, _, _ in own for value in returned]
            columns = dict.fromkeys(column for _, extra, _ in own for column in extra)
            for column in columns:
                blank = [[None] * len(returned) for returned, _, _ in own]
                found = [extra.get(column, none) for (_, extra, _), none in zip(own, blank, strict=True)]
                log_extra(column, [value for part in found for value in part])
            for _, _, numbers in own:
                for number in numbers:
                    log_metric(*number)
        if scoring:
            values[REWARD_MODEL] = results[len(calls)]
        return values


def run_reward(name: str, arguments: dict) -> tuple[list, dict[str, list], list[tuple[str, float]]]:
    """What the reward `name` ("module:function") returns, and what it logs: columns, and numbers by name."""
    rewards, extra, numbers = Rewards([name], None, []), {}, []
    (returned,) = rewards.call(
        arguments | {"log_extra": extra.__setitem__, "log_metric": lambda *number: numbers.append(number)}
    ).values()
    return list(returned), extra, numbers


def _bounds(prompts: list, workers: int) -> list[tuple[int, int]]:
    """Where parts of the completions begin and end: at most so many parts, of whole groups of one prompt."""
    starts = [i for i in range(len(prompts)) if i == 0 or prompts[i] != prompts[i - 1]]
    count = min(workers, len(starts))
    begins = [starts[i * len(starts) // count] for i in range(count)]
    return list(zip(begins, [*begins[1:], len(prompts)], strict=True))
