"""An agent: a program that asks the policy by OpenAI's HTTP API, once for each completion, and returns its reward.

    async def run(base_url: str, api_key: str, row: dict) -> float | dict | None: ...   # --agent module:run

A function that is not async runs in a thread. trainer/rollouts/agents.py is the server that it asks.
"""

import asyncio
import copy
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
from typing import BinaryIO

from ..errors import TaskError
from ..functions import failed, named_function
from .chat_template import ChatTemplate
from .dataset import Row
from .environment import in_thread
from .tools import ToolArguments, Tools

TAIL = 1 << 16  # bytes of what a command prints that are read
POLL_SECONDS = 0.05
# Runs "$@". As soon as nobody holds the other end of its input, it kills all processes of the group.
LEASH = 'exec 3<&0 </dev/null; (read -r _ <&3; kill -9 0) >/dev/null 2>&1 & exec 3<&-; exec "$@"'


class Agent(Tools):
    """The agent of `--agent` or `--agent-command`, whose requests bring tools of their own."""

    def __init__(self, args: ToolArguments):
        super().__init__(ToolArguments(tool_parser=args.tool_parser))
        self.flag = f"--agent {args.agent}" if args.agent else f"--agent-command {args.agent_command}"
        self.function = named_function("--agent", args.agent) if args.agent else None
        self.command, self.timeout = args.agent_command, args.agent_timeout

    def prepare(self, template: ChatTemplate) -> None:
        super().prepare(template)
        # For threads: to encode text that has special tokens as text sets a switch of the other tokenizer.
        self.prompts = ChatTemplate(copy.deepcopy(template.tokenizer), template.options)

    def schemas_of(self, row: Row) -> list[dict] | None:
        return row.columns.get("tools")

    async def call(self, base_url: str, api_key: str, row: Row) -> dict:
        """What it returned for this row, with its "reward", or {"error": text}."""
        own = copy.deepcopy({"prompt": row.prompt} | row.columns)  # the agent may change what it gets
        try:
            async with asyncio.timeout(self.timeout) as limit:
                if self.command:
                    return self._checked(await self._run(base_url, api_key, own))
                begun = in_thread(self.function, base_url=base_url, api_key=api_key, row=own)
                return self._checked(await asyncio.wrap_future(begun))
        except (Exception, asyncio.CancelledError) as error:  # of the user's code, which may cancel itself
            if limit.expired():
                return {"error": f"{self.flag} took longer than {self.timeout:g} s (the setting agent_timeout)"}
            return {"error": str(error if isinstance(error, TaskError) else failed(self.flag, error))}

    async def _run(self, base_url: str, api_key: str, row: dict):
        """Run the command, and return what its last line says. No process of its group outlives the call, or the
        trainer."""
        words = [word.replace("{row}", json.dumps(row, default=str)) for word in shlex.split(self.command)]
        direct = f"127.0.0.1,{os.environ.get('no_proxy') or os.environ.get('NO_PROXY', '')}".rstrip(",")
        env = os.environ | {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
        env |= {"NO_PROXY": direct, "no_proxy": direct}
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as log:
            options = {"stdin": subprocess.PIPE, "stdout": output, "stderr": log, "env": env}
            process = subprocess.Popen(["sh", "-c", LEASH, "sh", *words], start_new_session=True, **options)
            try:
                await _ended(process)
            finally:
                process.stdin.close()  # kills what is left of the group
                await _ended(process)
            lines, errors = _last_lines(output), _last_lines(log)
        if process.returncode:
            print(*errors, sep="\n", file=sys.stderr)  # run.log
            raise TaskError(f"{self.flag} ended with status {process.returncode}: {' '.join(errors[-1:])}")
        try:
            return json.loads(lines[-1])
        except (IndexError, ValueError) as error:
            raise TaskError(f"{self.flag}: its last line is no reward, but {lines[-1:]}") from error

    def _checked(self, returned) -> dict:
        """What the agent returned, as a dict with its reward. Raises TaskError if that is no number."""
        own = returned if isinstance(returned, dict) else {"reward": returned}
        try:
            reward = None if own.get("reward") is None else float(own["reward"])
            json.dumps(own, default=str)
        except (TypeError, ValueError):
            reward = math.nan
        if reward is None or math.isfinite(reward):
            return own | {"reward": reward}
        raise TaskError(f'{self.flag} returned {returned!r}, and not a finite number, None, or a dict with a "reward"')


async def _ended(process: subprocess.Popen) -> None:
    """Wait for the end of this process. asyncio's own waits for its pipes as well, which its children may have."""
    while process.poll() is None:
        await asyncio.sleep(POLL_SECONDS)


def _last_lines(file: BinaryIO) -> list[str]:
    """The last lines of a file, but for empty ones."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
    return [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
