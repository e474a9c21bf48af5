"""Tools and environments, by TRL's interface: what the policy may call, and what it acts in.

A tool is a function with types and a Google-style docstring, sync or async. An environment is a class of the user's:

    class Counter:
        def reset(self, **row) -> str | None: ...   # before each conversation; text is appended to the prompt
        def add(self, number: int) -> str: ...      # public methods are tools
        def get_reward(self) -> float: ...          # if there is one: one more reward

`--environment` names the class, or another function that makes an instance, or a dict of such factories, of which the
column `environment` of each row chooses one.
"""

import asyncio
import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from annotated_types import Ge, Gt
from transformers.hf_argparser import HfArg
from transformers.utils import get_json_schema

from ..errors import TaskError
from ..functions import failed, named_function, named_value
from .chat_template import ChatTemplate
from .dataset import Row
from .environment import Environment


@dataclass
class ToolArguments:
    """Tools that the policy calls, and environments that it acts in."""

    tools: list[str] | None = HfArg(
        default=None, help="module:function, with types and a Google-style docstring, for prompts of chat messages"
    )
    environment: str | None = HfArg(
        default=None, help="module:factory of TRL's environments, or a dict of factories: their methods are tools"
    )
    tool_parser: str = HfArg(default="hermes", help="finds the calls: vllm serve's --tool-call-parser")
    max_tool_iterations: Annotated[int | None, Ge(0)] = HfArg(
        default=None, help="turns of a conversation after which tools are called (default: no limit but --max-tokens)"
    )
    tool_timeout: Annotated[float, Gt(0)] = HfArg(default=60.0, help="seconds that a call of a tool may take")


class Tools:
    """What `--tools` and `--environment` name. Raises TaskError for what cannot be used."""

    def __init__(self, args: ToolArguments):
        self.args, self.longest = args, None  # the tokens that an engine takes
        self.functions = [named_function("--tools", name) for name in args.tools or ()]
        found = named_value("--environment", args.environment) if args.environment else None
        self.chooses = isinstance(found, dict)
        self.factories = found if self.chooses else {None: found}
        if args.environment and not all(map(callable, self.factories.values())):
            raise TaskError(f"--environment {args.environment}: not a factory, and not a dict of factories")
        self.pools = {(name, evaluation): [] for name in self.factories for evaluation in (False, True)}
        self.schemas: dict[str | None, list[dict]] = {}  # by the environment's name
        self.rewards: dict[str, Callable] = {}  # by the name of the class that gives one
        self.owners = weakref.WeakValueDictionary()  # the Environment of each instance, by its id
        for name, factory in self.factories.items():
            try:
                first = Environment(factory, self.functions, self.pools[name, False])
            except Exception as error:  # the user's code
                raise failed(f"--environment {args.environment}", error) from error
            self.owners[id(first.instance)], kind = first, type(first.instance)
            if factory and not callable(getattr(kind, "reset", None)):
                raise TaskError(f"--environment {args.environment}: {kind.__name__} has no method reset")
            if inspect.isfunction(getattr(kind, "get_reward", None)):
                self.rewards[kind.__name__] = partial(self._rewards_of, kind)
            self.schemas[name] = [_schema(tool) for tool in first.tools.values()]
            first.release()

    def prepare(self, template: ChatTemplate) -> None:
        """Get ready for conversations by this chat template."""
        from vllm.tool_parsers import ToolParserManager

        self.template = template
        self.template.check_tools()
        try:
            self.parser = ToolParserManager.get_tool_parser(self.args.tool_parser)
            self.parser(template.tokenizer)
        except Exception as error:  # an unknown name, or a tokenizer without the parser's tokens
            raise TaskError(f"--tool-parser {self.args.tool_parser}: {error}") from error

    def name_of(self, row: Row) -> str | None:
        """The environment's name, where there are several. Raises TaskError if there is none of this name."""
        if not self.chooses:
            return None
        name = row.columns.get("environment")
        if name not in self.factories:
            raise TaskError(f'{row.origin}: "environment" is {name!r}, and not one of {", ".join(self.factories)}')
        return name

    def schemas_of(self, row: Row) -> list[dict]:
        """The JSON schemas of the tools that this row's conversations have."""
        return self.schemas[self.name_of(row)]

    async def open(self, row: Row, evaluation: bool) -> tuple[Environment, str | None]:
        """An environment for a conversation, and what its `reset` returned. Evaluations have instances of their own."""
        name = self.name_of(row)
        pool = self.pools[name, evaluation]
        try:
            if pool:
                environment = pool.pop()
            else:
                new = partial(Environment, self.factories[name], self.functions, pool)
                environment = await asyncio.to_thread(new)
                self.owners[id(environment.instance)] = environment
            if environment.instance is None:
                return environment, None
            columns = {k: v for k, v in row.columns.items() if not (self.chooses and k == "environment")}
            reset = environment.begin(environment.instance.reset, prompt=row.prompt, **columns)
            return environment, await asyncio.wrap_future(reset)
        except Exception as error:  # the user's code
            raise failed(f"{row.origin}: reset of --environment {self.args.environment}", error) from error

    def _rewards_of(self, kind: type, environments: list, **_) -> list[float | None]:
        """What `get_reward` returns in those instances that are of this class; None of one that is lost."""
        begun = []
        for instance in environments:
            owner = self.owners[id(instance)]
            asked = type(instance) is kind and not owner.lost
            begun.append(owner.begin(instance.get_reward) if asked else None)
        return [reward and reward.result() for reward in begun]


def _schema(tool: Callable) -> dict:
    try:
        return get_json_schema(tool)
    except Exception as error:  # transformers says what is missing
        raise TaskError(f"the tool {getattr(tool, '__name__', tool)}: {error}") from error
