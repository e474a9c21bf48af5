"""The task: prompts to learn from, prompts to evaluate on, and rewards. The default task is uppercase.py.

`--task NAME` takes the module NAME of this folder or of the working folder. Its `DEFAULTS` are the defaults of other
flags. docs/tasks.md shows how to write one.
"""

import functools
import json
import random
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge, Gt, Lt
from pydantic import AfterValidator

from ..errors import TaskError
from ..flags import arg, setting
from ..functions import json_object
from ..learning.multimodal import image_tokens, is_multimodal, load_tokenizer
from .agent import Agent
from .chat_template import ChatTemplate
from .dataset import Row, file_ending, load_rows, without_parts
from .rewards import AGENT, FROM_THE_RUN, Rewards
from .tools import ToolArguments, Tools

EMPTY = [{"role": "user", "content": ""}]  # the prompt where the environment's `reset` says what there is to do


@dataclass
class TaskArguments:
    """Prompts and rewards."""

    task: str = arg(
        "uppercase",
        help="a module in trainer/tasks/ or in the working folder; its DEFAULTS are the defaults of other flags",
    )
    dataset: str | None = arg(
        None,
        alias="--prompts",
        help="a file (.jsonl, .ndjson, .csv, .tsv, .json, .parquet), a folder, a dataset on the Hugging Face hub, or"
        " module:function, which gets the split and returns rows",
    )
    dataset_config: str | None = arg(
        None, help="configuration of a dataset on the hub; of module:function, more arguments, as a JSON object"
    )
    dataset_split: str = setting("train", help='split to learn from; a slice as well: "train[:1000]"')
    map: str | None = arg(
        None, help='module:function that turns a row into one with a "prompt", or returns None to drop it'
    )
    eval_dataset: str | None = arg(None, help="dataset to evaluate on (default: --dataset, if --eval-split is given)")
    eval_split: str | None = arg(
        None, help="split to evaluate on (default: none; with --eval-dataset: test, or train of a file)"
    )
    eval_share: Annotated[float, Ge(0), Lt(1)] = arg(0.0, help="share of the prompts that is held out to evaluate on")
    system_prompt: str | None = arg(None, help="system message of chats that begin without one")
    chat_template_kwargs: Annotated[str, AfterValidator(json_object)] = setting(
        "{}", help="arguments of the chat template, as JSON: '{\"enable_thinking\": false}'"
    )
    reward: list[str] | None = arg(
        None,
        help="reward functions, as module:function, with TRL's signature: reward(prompts, completions, **columns)"
        " returns a number or None for each completion",
    )
    reward_weights: list[float] | None = arg(
        None, help="weights of the rewards in their sum, in the order of --reward (default: 1 each)"
    )
    reward_timeout: Annotated[float, Gt(0)] = arg(
        600.0,
        help="seconds that the rewards of one prompt's completions may take; then the run ends with an error",
    )
    eval_every: Annotated[int, Ge(0)] = arg(
        0, help="evaluate before the first step, after every so many steps and after the last; 0: never"
    )
    eval_samples: Annotated[int, Ge(0)] = arg(
        0, help="completions to sample for each prompt of an evaluation, for pass@k; 0: one greedy completion"
    )
    pass_reward: float = setting(1.0, help="a completion passes an evaluation if its reward is at least this")
    prompts_per_step: Annotated[int, Ge(1)] = arg(8, help="prompts of a step, each with --group-size completions")


@dataclass(eq=False)
class Task:
    """Prompts to learn from and to evaluate on, the rewards of their completions, and the tools, if there are any."""

    rows: list[Row]
    eval_rows: list[Row]
    rewards: Rewards
    args: TaskArguments
    seed: int
    steps: int
    tools: Tools | None

    @property
    def has_images(self) -> bool:
        """Whether a prompt has images."""
        return any(row.images for row in [*self.rows, *self.eval_rows])

    def draw(self, step: int) -> list[Row]:
        """The rows of one step (the first is 1). Each epoch has its own order, which depends on the seed alone."""
        count, drawn = self.args.prompts_per_step, []
        for position in range((step - 1) * count, step * count):
            epoch, index = divmod(position, len(self.rows))
            drawn.append(self.rows[_order(len(self.rows), self.seed, epoch)[index]])
        return drawn

    def draw_others(self, step: int, count: int, drawn: list[Row]) -> list[Row]:
        """`count` rows, or as many as there are, that are not among those drawn for this step. They depend on the seed,
        the step and the number of rows drawn."""
        drawn_ids = {id(row) for row in drawn}
        rng = random.Random(f"{self.seed} {step} {len(drawn)}")
        candidates = rng.sample(self.rows, min(len(self.rows), count + len(drawn_ids)))
        return [row for row in candidates if id(row) not in drawn_ids][:count]

    def tokenized(self, model: str, max_model_len: int | None = None) -> "Task":
        """This task, with the token ids of its rows. With `max_model_len`, their lengths are checked as well.

        Raises TaskError for the first row without a token, with a token that the model has no embedding for, with
        messages that the chat template refuses, or with images that the model does not take; with tools, also if the
        template or the parser does not fit.
        """
        from transformers import AutoConfig

        tokenizer, _ = load_tokenizer(model)
        template = ChatTemplate(tokenizer, json.loads(self.args.chat_template_kwargs))
        config = AutoConfig.from_pretrained(model)
        embeddings = config.get_text_config().vocab_size
        appends_end = tokenizer.encode("a")[-1:] == [tokenizer.eos_token_id]
        if is_multimodal(config.model_type):
            self._refuse_tokens([*filter(None, tokenizer.convert_ids_to_tokens(image_tokens(config)))])
        else:
            self.refuse_images(f"{model} takes text alone")

        def with_ids(row: Row) -> Row:
            ids = self._prompt_ids(row, template, appends_end)
            if not ids:
                raise TaskError(f"{row.origin}: the model's tokenizer makes no token of the prompt {row.text!r}")
            if max(ids) >= embeddings:
                raise TaskError(
                    f"{row.origin}: the tokenizer of {model} makes token {max(ids)} of the prompt, and the model has"
                    f" embeddings for {embeddings}: they do not belong together"
                )
            return replace(row, prompt_ids=ids)

        task = replace(self, rows=[*map(with_ids, self.rows)], eval_rows=[*map(with_ids, self.eval_rows)])
        if self.tools:
            self.tools.prepare(template)
        if isinstance(self.tools, Agent):
            self.refuse_images("an agent's requests are text")
        if max_model_len:
            task.check_lengths(max_model_len)
        thinking = sum(_begins_thought(row, tokenizer) for row in task.rows)
        if thinking and self.rewards.functions:
            print(
                f"{thinking} of {len(task.rows)} prompts open <think> at their end: rewards get what comes after it, so"
                " one that looks for <think>, such as trl.rewards:think_format_reward, does not find it"
            )
        return task

    def _prompt_ids(self, row: Row, template: ChatTemplate, appends_end: bool) -> list[int]:
        if not isinstance(row.prompt, str):
            schemas = self.tools.schemas_of(row) if self.tools else row.columns.get("tools")
            return template.prompt_ids(row.prompt, schemas, row.origin)
        if self.tools and not isinstance(self.tools, Agent):
            raise TaskError(f"{row.origin}: --tools and --environment are for chat messages, not for a text")
        ids = template.tokenizer.encode(row.prompt)
        ids = ids[:-1] if appends_end else ids  # some tokenizers do: after it, a completion would begin a new text
        own = template.tokenizer.encode(row.prompt, add_special_tokens=False)
        begin = ids[: len(ids) - len(own)]  # what the tokenizer puts before a text
        return own if own[: len(begin)] == begin else ids  # a template has rendered this one, with its beginning

    def refuse_images(self, reason: str) -> None:
        """Raise TaskError for the first row with images."""
        for row in [*self.rows, *self.eval_rows]:
            if row.images:
                raise TaskError(f"{row.origin}: the prompt has images, and {reason}: --map can drop them")

    def _refuse_tokens(self, tokens: list[str]) -> None:
        """Raise TaskError for the first row with one of the `tokens` that stand for an image in its text."""
        for row in [*self.rows, *self.eval_rows]:
            text = json.dumps(row.prompt, ensure_ascii=False)
            if found := [token for token in tokens if token in text]:
                raise TaskError(
                    f"{row.origin}: the text of the prompt has {found[0]}, which stands for an image: --map can drop it"
                )

    def check_lengths(self, max_model_len: int) -> None:
        """Raise TaskError for the longest prompt if there is no room for a completion: the engine takes at most
        `max_model_len` tokens of both."""
        longest = self._longest
        if len(longest.prompt_ids) >= max_model_len:
            raise TaskError(
                f"{longest.origin}: the prompt {longest.text[:30]!r}... has {len(longest.prompt_ids)} tokens, and the"
                f" engine takes {max_model_len} with the completion's: --max-model-len"
            )

    def length_remark(self, max_model_len: int, max_tokens: int) -> str:
        """A line to print if there may be no room for a completion of `max_tokens` after the longest prompt."""
        longest = len(self._longest.prompt_ids)
        if longest + max_tokens <= max_model_len or self.has_images:  # only the engine counts an image's tokens
            return ""
        return (
            f"\nthe engine takes {max_model_len} tokens: after the longest prompt, of {longest}, a completion ends at"
            f" {max_model_len - longest}, and not at --max-tokens {max_tokens}"
        )

    @property
    def _longest(self) -> Row:
        return max([*self.rows, *self.eval_rows], key=lambda row: len(row.prompt_ids))


def _begins_thought(row: Row, tokenizer) -> bool:
    """Whether the prompt ends in the middle of reasoning, which the row or the chat template has begun."""
    if isinstance(row.prompt, list) and row.prompt[-1]["role"] == "assistant":
        _, begins, thought = row.text.rpartition("<think>")
        return bool(begins) and "</think>" not in thought
    return tokenizer.decode(row.prompt_ids[-8:]).rstrip().endswith("<think>")  # which may be several tokens


@functools.lru_cache(maxsize=2)
def _order(count: int, seed: int, epoch: int) -> list[int]:
    return random.Random(f"{seed} {epoch}").sample(range(count), count)


def load_task(
    args: TaskArguments,
    seed: int,
    steps: int,
    tool_args: ToolArguments | None = None,
    reward_model: str | None = None,
    needs_reward: bool = True,
) -> Task:
    """The task that these arguments describe, of a run with so many steps.

    Raises TaskError, which names the row, flag or function that is wrong.
    """
    tools = _tools_of(tool_args) if tool_args else None
    environment, reward_models = tools and tool_args.environment, ["reward_model"] if reward_model else []
    reward_models += [AGENT] * isinstance(tools, Agent)
    if not args.dataset and not environment:
        reason = f"--task {args.task} has no default"
        if isinstance(tools, Agent):
            reason = "an agent gets a row of it, or of the dataset of a --task"
        raise TaskError(f"--dataset is missing: {reason}")
    if not args.dataset and tools.rows_choose:
        raise TaskError(
            f"--dataset is missing: --environment {environment} names several: each row of a dataset chooses one"
        )
    has_reward = args.reward or reward_models or (tools and tools.rewards)
    if not has_reward and (needs_reward or args.eval_every):
        raise TaskError(f"--reward is missing: what is a completion for a prompt of {args.dataset} worth?")

    environment = environment or isinstance(tools, Agent)  # which gets all columns as well, and may need no prompt
    all_rows = _load(args, args.dataset, args.dataset_split, environment)
    eval_rows = _load_eval_rows(args, all_rows, seed, environment)
    rows = _without(eval_rows, all_rows, environment)
    if args.eval_every and not eval_rows:
        raise TaskError("--eval-every: nothing to evaluate on without --eval-dataset, --eval-split or --eval-share")
    if not rows:
        raise TaskError("no prompt is left to learn from: all are among those to evaluate on")

    known = [rows[0], *eval_rows[:1]], steps, reward_models, bool(tools and tool_args.environment), args.reward_timeout
    rewards = Rewards(args.reward or [], args.reward_weights, *known)
    for name, function in tools.rewards.items() if tools else ():
        rewards.add(name, function)

    print(f"{len(rows)} prompts of {args.dataset or environment}; reward: {rewards}")
    if (left_out := len(all_rows) - len(rows)) and not args.eval_share:
        print(f"{left_out} of {len(all_rows)} prompts are not learned from: they are among those to evaluate on")
    if eval_rows and not args.eval_every:
        print(f"{len(eval_rows)} prompts are held out, and no step evaluates on them: --eval-every is 0")
    return Task(rows, eval_rows, rewards, args, seed, steps, tools)


def _tools_of(args: ToolArguments) -> Tools | None:
    kind = Agent if args.agent or args.agent_command else Tools if args.environment or args.tools else None
    return kind and kind(args)


def _without(held_out: list[Row], rows: list[Row], environment: str | None) -> list[Row]:
    """The rows whose prompts are not among those held out."""
    keys = {_key(row, environment) for row in held_out}
    return [row for row in rows if _key(row, environment) not in keys] if keys else rows


def _load_eval_rows(args: TaskArguments, rows: list[Row], seed: int, environment: str | None) -> list[Row]:
    """The rows to evaluate on: of another dataset or split, or a part of these rows. Equal prompts stay together."""
    if args.eval_dataset or args.eval_split:
        name = args.eval_dataset or args.dataset
        return _load(args, name, args.eval_split or ("train" if file_ending(name) else "test"), environment)
    if not args.eval_share:
        return []
    prompts = sorted({_key(row, environment) for row in rows})
    held_out = set(random.Random(f"{seed} eval").sample(prompts, max(1, round(args.eval_share * len(prompts)))))
    return [row for row in rows if _key(row, environment) in held_out]


def _load(args: TaskArguments, name: str | None, split: str, environment: str | None) -> list[Row]:
    """The rows of this dataset. An environment needs neither prompts nor a dataset: it says what there is to do."""
    if name:
        config, default_prompt = args.dataset_config if name == args.dataset else None, EMPTY if environment else None
        rows = load_rows(name, config, split, args.map, [*FROM_THE_RUN, "environments"], default_prompt)
    else:
        rows = [Row(EMPTY, {}, f"--environment {environment}") for _ in range(args.prompts_per_step)]
    for row in rows if args.system_prompt else ():
        if isinstance(row.prompt, str):
            raise TaskError(f"{row.origin}: --system-prompt is for chat messages, and this prompt is a text")
        if row.prompt[0]["role"] != "system":
            row.prompt = [{"role": "system", "content": args.system_prompt}, *row.prompt]
    return rows


def _key(row: Row, environment: str | None) -> str:
    """A text that is equal for equal prompts; with an environment, for rows that are equal to its `reset`."""
    images, columns = row.images and row.images.key.hex(), row.columns if environment else None
    return json.dumps([without_parts(row.prompt), images, columns], sort_keys=True, default=str)
