"""A teacher: engines that no sync touches. They score the tokens that the student has sampled."""

import asyncio
import itertools
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from annotated_types import Ge

from ..errors import RunError
from ..flags import arg
from ..learning.rollout import Rollout
from ..run.actors import ActorGroup
from ..tasks.rewards import Batch
from ..tasks.task import Task
from .engine import EngineActor
from .sampling import in_parts


@dataclass
class TeacherArguments:
    """The teacher."""

    teacher: str | None = arg(
        None,
        help="the model to learn from, with the token ids of --model: on the Hugging Face hub, a folder, or"
        " module:function, which is called with (folder, seed) and writes one there",
    )
    teacher_engines: Annotated[int, Ge(1)] = arg(
        1, help="the teacher's engines; the completions of a step are divided among them"
    )
    teacher_tensor_parallel_size: Annotated[int, Ge(1)] = arg(
        1, help="GPUs that each of the teacher's engines is spread over (CPU: groups of cores)"
    )


class TeacherActor(EngineActor):
    """An engine that scores tokens, and samples none."""

    async def score(self, completions: list[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
        """The log-probabilities [L], at temperature 1, of the tokens of each completion, (prompt ids, completion ids).

        vLLM computes each prompt anew: its prefix cache has keys and values, but no hidden states to score.
        """
        prompts, options = [], []
        # Model Runner V2 can score from a position on. V1, which runs on a CPU, scores the prompt as well.
        from_position = self.llm.vllm_config.use_v2_model_runner
        for prompt_ids, completion_ids in completions:
            prompts.append({"prompt_token_ids": [*prompt_ids.tolist(), *completion_ids.tolist()]})
            ids = {"prompt_logprob_token_ids": completion_ids[:, None], "prompt_logprob_start": len(prompt_ids) - 1}
            scored = ids if from_position else {"prompt_logprobs": 0}
            options.append({"max_tokens": 1, "temperature": 0.0, "detokenize": False} | scored)  # vLLM samples a token
        requests = await asyncio.gather(*map(self.generate, prompts, options))
        return [
            request.prompt_token_id_logprobs[:, 0]
            if from_position
            else np.array(request.prompt_logprobs.logprobs[-len(completion_ids) :], np.float32)
            for request, (_, completion_ids) in zip(requests, completions, strict=True)
        ]


def score(teachers: ActorGroup, batch: Batch) -> Batch:
    """The batch, with the teacher's log-probabilities of all completions. They are divided among its engines."""
    completions = [(own.prompt_ids, own.completion_ids) for rollout in batch.rollouts for own in rollout.samples]
    parts = [(part,) for part in in_parts(completions, len(teachers))]
    scores = itertools.chain(*teachers.call("scoring", TeacherActor.score, each=parts))

    def scored(rollout: Rollout) -> Rollout:
        own = next(scores) if len(rollout.completion_ids) else None
        return replace(rollout, teacher_logprobs=own, rest=[*map(scored, rollout.rest)])

    groups = [replace(group, rollouts=[*map(scored, group.rollouts)]) for group in batch.groups]
    return replace(batch, groups=groups)


def differing_ends(teacher: str, student: str) -> str:
    """A line to print if these models end a text with other tokens."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    texts = []
    for model in (teacher, student):
        tokenizer = AutoTokenizer.from_pretrained(model)
        try:
            ids = GenerationConfig.from_pretrained(model).eos_token_id
        except OSError:  # vLLM, too, then takes the model's own
            ids = AutoConfig.from_pretrained(model).get_text_config().eos_token_id
        ids = {tokenizer.eos_token_id, *(ids if isinstance(ids, list) else [ids])} - {None}
        texts.append(" or ".join(map(repr, tokenizer.convert_ids_to_tokens(sorted(ids)))) or "nothing")
    if texts[0] == texts[1]:
        return ""
    return (
        f"\nthe teacher ends a text with {texts[0]}, and the student with {texts[1]}: the student may learn not to end,"
        " or to go on after the teacher's end. The same eos_token_id in both files generation_config.json prevents that"
    )


def shared_length(task: Task, max_model_len: int, teacher_max_model_len: int, max_tokens: int) -> int:
    """The tokens that a prompt and its completion may have for student and teacher. vLLM wants room for one that the
    teacher samples.

    Raises TaskError as `Task.check_lengths` does, and RunError if the student may make more than the teacher takes.
    """
    shared = min(max_model_len, teacher_max_model_len - 1)
    task.check_lengths(shared)
    if shared < max_model_len and task.length_remark(shared, max_tokens):
        raise RunError(
            f"the teacher scores {shared} tokens, of a prompt and its completion together, and the student may make"
            " more: lower --max-tokens, or raise --max-model-len"
        )
    return shared
