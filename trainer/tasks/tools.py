"""Tools that the policy calls, and environments that it acts in, by TRL's interface.

A tool is a function with types and a Google-style docstring, sync or async. An environment is a class of the user's:

    class Counter:
        def reset(self, **row) -> str | None: ...   # before each conversation; the text is appended to the prompt
        def add(self, number: int) -> str: ...      # public methods are tools
        def get_reward(self) -> float: ...          # optional: one more reward

`--environment` names a factory: the class, or another function that makes an instance. Or it names a dict of factories;
the column `environment` of each row chooses one.
"""

import asyncio
import copy
import inspect
import itertools
import json
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Annotated

from annotated_types import Ge, Gt

from ..errors import TaskError
from ..flags import arg, setting
from ..functions import failed, named_function, named_value
from ..images import Images
from .chat_template import ChatTemplate
from .dataset import Row
from .environment import Environment, in_thread


@dataclass
class ToolArguments:
    """Tools that the policy calls, environments that it acts in, and agents that ask it."""

    tools: list[str] | None = arg(
        None, help="module:function, with types and a Google-style docstring; prompts must be chat messages"
    )
    environment: str | None = arg(
        None, help="module:factory of environments as TRL has them, or a dict of such; their methods are tools"
    )
    tool_parser: str = arg("hermes", help="vLLM's parser of the calls (vllm serve's --tool-call-parser)")
    max_tool_iterations: Annotated[int | None, Ge(0)] = arg(
        None, help="turns of a conversation whose calls are answered (default: no limit but --max-tokens)"
    )
    tool_timeout: Annotated[float, Gt(0)] = setting(60.0, help="seconds that a call of a tool may take")
    agent: str | None = arg(
        None,
        help="module:function of an agent that asks the policy by OpenAI's API, called for each completion with"
        " (base_url, api_key, row); returns a reward, or a dict with one",
    )
    agent_command: str | None = arg(
        None,
        help="such an agent as a command, in which {row} becomes the row as JSON; it has OPENAI_BASE_URL and"
        " OPENAI_API_KEY, and its last line is the reward",
    )
    agent_timeout: Annotated[float, Gt(0)] = setting(600.0, help="seconds that an agent may take for a completion")


class Tools:
    """The functions of `--tools` and the environments of `--environment`. Raises TaskError for what cannot be used."""

    def __init__(self, args: ToolArguments):
        self.args = args
        self.functions = [named_function("--tools", name) for name in args.tools or ()]
        factory = named_value("--environment", args.environment) if args.environment else None
        self.rows_choose = isinstance(factory, dict)
        self.factories = factory if self.rows_choose else {None: factory}
        self.pools = {(name, evaluation): [] for name in self.factories for evaluation in (False, True)}
        self.rewards: dict[str, Callable] = {}  # by the name of the environment's class
        self.environments = weakref.WeakValueDictionary()  # by the id of the instance
        function_schemas = [_schema(function) for function in self.functions]
        self.schemas: dict[str | None, list[dict]] = {}  # by the environment's name
        for name, factory in self.factories.items():
            environment = self._first(factory, self.pools[name, False])
            self.schemas[name] = function_schemas + [_schema(method) for method in environment.methods]
            environment.release()

    def _first(self, factory: Callable | None, pool: list[Environment]) -> Environment:
        """The first environment that this factory makes, which shows whether others can be used."""
        flag = f"--environment {self.args.environment}"
        if self.args.environment and not callable(factory):
            raise TaskError(f"{flag}: not a factory, and not a dict of factories")
        try:
            environment = Environment(factory, self.functions, pool)
            environment.made.result()
        except Exception as error:  # the user's code
            raise failed(flag, error) from error
        self.environments[id(environment.instance)], cls = environment, type(environment.instance)
        if factory and not callable(getattr(cls, "reset", None)):
            raise TaskError(f"{flag}: {cls.__name__} has no method reset")
        if inspect.isfunction(getattr(cls, "get_reward", None)):
            reward = self.rewards.setdefault(cls.__name__, partial(self._rewards_of, cls))
            if reward.args != (cls,):
                raise TaskError(f"{flag}: two classes have the name {cls.__name__}")
        tools = [*self.functions, *environment.methods]
        for one, other in itertools.combinations(tools, 2):
            if one.__name__ == other.__name__ and one is not other:  # the policy could call only one of them
                both = " and ".join(f"{each.__module__}:{each.__qualname__}" for each in (one, other))
                raise TaskError(f"the tools {both} have the same name")
        return environment

    def prepare(self, template: ChatTemplate) -> None:
        """Prepare for conversations in this chat template."""
        from vllm.tokenizers.hf import get_cached_tokenizer
        from vllm.tool_parsers import ToolParserManager

        self.template = template
        if self.functions or self.args.environment:  # an agent's requests may have none
            self.template.check_tools()
        tokenizer = get_cached_tokenizer(template.tokenizer)  # most parsers read the whole vocabulary, in every turn
        try:
            self.parser = partial(ToolParserManager.get_tool_parser(self.args.tool_parser), tokenizer)
            self.parser().extract_tool_calls("", request_with("null"))
        except Exception as error:  # an unknown name, a tokenizer without its tokens, or calls that only servers find
            raise TaskError(f"--tool-parser {self.args.tool_parser}: {type(error).__name__}: {error}") from error

    def name_of(self, row: Row) -> str | None:
        """The name of the environment that this row chooses, if rows choose. Raises TaskError for an unknown name."""
        if not self.rows_choose:
            return None
        name = row.columns.get("environment")
        if name not in self.factories:
            raise TaskError(f'{row.origin}: "environment" is {name!r}, and not one of {", ".join(self.factories)}')
        return name

    def schemas_of(self, row: Row) -> list[dict]:
        """The JSON schemas of the tools in this row's conversations."""
        return self.schemas[self.name_of(row)]

    async def open(self, row: Row, evaluation: bool, images: Images | None = None) -> tuple[Environment, str | None]:
        """An environment for a conversation about this row and its images, which have been read, and what its `reset`
        returned. Evaluations use instances of their own."""
        name = self.name_of(row)
        pool = self.pools[name, evaluation]
        try:
            if pool:
                environment = pool.pop()
            else:
                environment = Environment(self.factories[name], self.functions, pool)
                await asyncio.wrap_future(environment.made)
                self.environments[id(environment.instance)] = environment
            if environment.instance is None:
                return environment, None
            columns = {k: v for k, v in row.columns.items() if not (self.rows_choose and k == "environment")}
            own = copy.deepcopy({"prompt": row.prompt} | columns)  # the environment may change what it gets
            if images:
                own["images"] = await asyncio.wrap_future(in_thread(images.decoded))
            text = await asyncio.wrap_future(environment.begin(environment.instance.reset, **own))
        except Exception as error:  # the user's code
            raise failed(f"{row.origin}: reset of --environment {self.args.environment}", error) from error
        if text is not None and not isinstance(text, str):
            raise TaskError(f"--environment {self.args.environment}: reset returned {text!r}, and not a text or None")
        return environment, text

    def _rewards_of(self, cls: type, environments: list, **_) -> list[float | None]:
        """What `get_reward` returns for those instances that are of this class; None for others, and for a lost one."""
        calls = []
        for instance in environments:
            environment = self.environments[id(instance)]
            has_reward = type(instance) is cls and not environment.lost
            calls.append(environment.begin(instance.get_reward) if has_reward else None)
        return [call and call.result() for call in calls]


@lru_cache(maxsize=1000)
def request_with(schemas: str):
    """vLLM's request with tools of these schemas, as JSON. Parsers want one; to make it takes longer than to parse."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(messages=[{"role": "user", "content": ""}], tools=json.loads(schemas) or None)


def _schema(tool: Callable) -> dict:
    from transformers.utils import get_json_schema  # it takes a second: not before a run has tools

    try:
        return get_json_schema(tool)
    except Exception as error:  # its text says what is missing
        raise TaskError(f"the tool {getattr(tool, '__name__', tool)}: {error}") from error
