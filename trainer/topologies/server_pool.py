"""Engines as services: vLLM servers that somebody has started, and that may die or hang, and come back.

A pool is a Ray actor that speaks with all servers. To the rest of a run it is one engine: `sample` sends each prompt to
the server with the fewest requests in flight. Sampling changes nothing in a server, and each request has its seed. So
if a server is lost, its unfinished requests go to others as they are, and its own answers are not read. Calls that
change a server are never repeated: one that was lost and answers again, whoever has started it, joins a new group and
gets the trainer's weights. Once it has proven that it serves them, it gets work. With no server left, the run waits for
one.

A server is lost if it closes a connection, answers with an error of its own, or is silent for `engine_timeout` seconds.
To notice silence, the pool asks every half second for something that vLLM's engine core has to answer.
"""

import asyncio
import math
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated

from annotated_types import Gt

from rlhf_utils import SyncReport

from ..errors import RunError
from ..flags import arg, setting
from ..learning.rollout import Rollout
from ..rollouts.options import EngineArguments
from ..rollouts.sampling import rollouts_of
from ..run.session import one_line
from .server import Server, ServerLost

POLL_SECONDS = 0.5  # from one question whether a server answers to the next
RETRY_SECONDS = 5.0  # until a server that answers, but could not be given weights, is tried again


@dataclass
class ServerArguments:
    """Which vLLM servers generate, with --topology servers."""

    engine_url: list[str] = arg(list, help="URL of a vLLM server; may be given several times")
    engine_timeout: Annotated[float, Gt(0)] = setting(
        60.0, help="seconds of silence after which a server counts as lost; a sync must take less"
    )


class ServerPool:
    """A Ray actor that is one engine to a run, and speaks with all servers. Many of its methods run at the same
    time."""

    def __init__(self, number: int):
        self.servers: list[Server] = []
        self.sync_lock = asyncio.Lock()  # held by a sync of all, or of a server that returns
        self.syncing: set[Server] = set()
        self.return_seconds: list[float] = []  # from "answers again" to "serves again", since the last `metrics`
        self.watching: list[asyncio.Future] = []

    async def prepare(self, device: str, bundles: list[int]) -> None:
        """Nothing: servers have started."""

    async def sleep(self, level: str) -> None:
        """Nothing: others may ask for completions."""

    async def start(self, model: str, args: ServerArguments, engine: EngineArguments, timeout: float, trainer) -> int:
        """Reach the servers at --engine-url. Syncs are with this `trainer`, and take at most `timeout` seconds. Returns
        the tokens that a prompt and its completion may have."""
        from transformers import AutoTokenizer

        self.trainer, self.timeout, self.engine_timeout = trainer, timeout, args.engine_timeout
        urls, key = dict.fromkeys(url.rstrip("/") for url in args.engine_url), os.environ.get("VLLM_API_KEY")
        self.servers = [Server(f"engine {i}", url, key, args.engine_timeout) for i, url in enumerate(urls)]
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        lengths = await asyncio.gather(*(server.check() for server in self.servers))
        self.max_model_len = min(*lengths, engine.max_model_len or math.inf)
        return self.max_model_len

    async def connect(self, server: Server) -> None:
        """Join the trainer and this server's workers in a group."""
        world_size = 1 + server.workers
        group = self.trainer.init_server_group
        address = await group.remote(server.name, server.host, world_size, self.engine_timeout)
        await server.rpc("init_weight_update_group", *address, 1, world_size)

    async def sync(self, servers: list[Server]) -> None:
        """Sync these servers at the same time: each pauses, receives, proves, gets the version's label, and resumes."""
        self.syncing |= set(servers)
        try:
            paused = await self.together(servers, Server.pause)
            receiving = {
                server: asyncio.ensure_future(server.rpc("receive_weights", self.timeout, timeout=None))
                for server in paused
            }
            names = [server.name for server in paused]
            # The trainer sends as soon as it is not learning.
            version, reports = await self.trainer.send_to_servers.remote(names, self.engine_timeout)
            await self.together(paused, lambda own: own.prove(receiving[own], reports[own.name], version))
        finally:
            self.syncing -= set(servers)

    async def begin(self) -> SyncReport:
        """Connect all servers, and sync. From now on, a lost server may return."""
        async with self.sync_lock:
            await self.sync(await self.together(self.servers, self.connect))
        if missing := [server for server in self.servers if not server.serving]:
            raise RunError("; ".join(f"{server.name} at {server.url}: {server.reason}" for server in missing))
        self.watching = [asyncio.ensure_future(self._watch(server)) for server in self.servers]
        return self._report()

    async def take_weights(self) -> SyncReport:
        """Sync all servers that serve. If none is left, wait for one to return, which takes the same weights."""
        async with self.sync_lock:
            await self.sync(self._serving())
        await self._until_some_serve()
        return self._report()

    def _report(self) -> SyncReport:
        """The report of the slowest server in the last sync."""
        return max((server.report for server in self._serving()), key=lambda report: report.seconds)

    async def sample(
        self,
        prompts: list[list[int]],
        sampling: list[dict],
        images: Sequence[None] | None = None,
        low_priority: bool = False,
    ) -> list[Rollout]:
        """Prompts are divided among the servers. These take no images, and know no priority, for which a server would
        want one more flag."""
        answers = await asyncio.gather(*map(self._generate, prompts, sampling))
        requests = [
            SimpleNamespace(prompt_token_ids=ids, outputs=[_output(choice) for choice in choices])
            for ids, choices in zip(prompts, answers, strict=True)
        ]
        return rollouts_of(requests, self.tokenizer)

    async def drop_caches(self) -> None:
        await self.together(self._serving(), lambda server: server.call("/reset_prefix_cache"))

    async def _generate(self, token_ids: list[int], sampling: dict) -> list[dict]:
        room = self.max_model_len - len(token_ids)  # of this run: a server may have more
        sampling = sampling | {"max_tokens": min(sampling["max_tokens"], room)}
        while True:
            await self._until_some_serve()
            server = min(self._serving(), key=lambda server: server.in_flight)
            try:
                return await server.generate(token_ids, sampling)
            except ServerLost as error:
                self.lose(server, str(error))

    async def metrics(self) -> dict[str, float]:
        """How many servers serve and, if some have returned since the last call, the longest return in seconds."""
        metrics = {"engines/alive": len(self._serving())}
        if self.return_seconds:
            metrics["engines/return"] = max(self.return_seconds)
            self.return_seconds = []
        return metrics

    async def shutdown(self) -> None:
        for task in self.watching:
            task.cancel()

    def lose(self, server: Server, reason: str) -> None:
        """Give this server's unfinished requests to others, and no more to it until it returns."""
        server.reason = reason
        if not server.serving:
            return
        print(f"{server.name} is lost, and its {server.in_flight} requests go to others: {reason}", flush=True)
        server.end_serving()
        if not self._serving():
            print("no engine is left: the run waits for one to return", flush=True)

    async def together(self, servers: list[Server], act: Callable[[Server], Awaitable]) -> list[Server]:
        """Do this with these servers, side by side. Returns those with which it succeeded; the others are lost."""

        async def succeeds(server: Server) -> bool:
            try:
                await act(server)
            except ServerLost as error:
                self.lose(server, str(error))
                return False
            return True

        results = await asyncio.gather(*map(succeeds, servers))
        return [server for server, success in zip(servers, results, strict=True) if success]

    def _serving(self) -> list[Server]:
        return [server for server in self.servers if server.serving]

    async def _until_some_serve(self) -> None:
        while not self._serving():
            await asyncio.sleep(POLL_SECONDS)

    async def _watch(self, server: Server) -> None:
        """Notice when this server falls silent, and take it in again when it answers."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if server in self.syncing:  # a sync keeps its engine core busy, and has a timeout of its own
                continue
            serving, silence = server.serving, await server.silence()
            if serving and silence and server not in self.syncing:
                self.lose(server, silence)
            elif not serving and not silence:
                await self._return(server)

    async def _return(self, server: Server) -> None:
        answered, known_reason = time.perf_counter(), server.reason
        try:
            if (length := await server.check()) < self.max_model_len:
                raise RunError(f"it takes {length} tokens, and this run up to {self.max_model_len}")
            async with self.sync_lock:
                await self.sync(await self.together([server], self.connect))
        except Exception as error:  # of the server's check, or of the trainer: both are asked again
            server.reason = one_line(error)
        if server.serving:
            self.return_seconds.append(time.perf_counter() - answered)
            print(f"{server.name} serves again, {self.return_seconds[-1]:.2f} s after it answered", flush=True)
            return
        if server.reason != known_reason:
            print(f"{server.name} at {server.url} answers, and cannot return: {server.reason}", flush=True)
        await asyncio.sleep(RETRY_SECONDS)


def _output(choice: dict) -> SimpleNamespace:
    """A choice of `/inference/v1/generate` in the form of a vllm.CompletionOutput."""
    content = (choice["logprobs"] or {}).get("content")
    return SimpleNamespace(
        token_ids=choice["token_ids"],
        logprobs=content and SimpleNamespace(logprobs=[token["logprob"] for token in content]),
        finish_reason=choice["finish_reason"],
        weight_versions=[SimpleNamespace(**span) for span in choice["weight_versions"]],
        sampling_mask=(mask := choice.get("sampling_mask")) and SimpleNamespace(token_ids=mask),
    )
