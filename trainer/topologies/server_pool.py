"""Engines as services: vLLM servers, reached over HTTP. Each may die or hang, and come back.

A pool is a Ray actor that speaks with all servers, its replicas. To the rest of a run it is one engine: `sample` sends
each prompt to the replica with the fewest requests in flight. Sampling changes nothing in a server, and each request
has its seed. So if a replica is lost, its unfinished requests go to others as they are, and its own answers are not
read. Calls that change a server are never repeated: a replica that was lost and answers again, whoever has started it,
joins a new group and gets the trainer's weights. Once it has proven that it serves them, it gets work. With no server
left, the run waits for one.

A replica is lost if it closes a connection, answers with an error of its own, or is silent for `engine_timeout`
seconds. To notice silence, the pool asks every half second for something that vLLM's engine core has to answer.
"""

import asyncio
import ctypes
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated

import httpx
import psutil
import ray
from annotated_types import Gt

from rlhf_utils import SyncReport

from ..errors import EngineError, RunError
from ..flags import arg, setting
from ..learning.rollout import Rollout
from ..rollouts.engine import logged_reason, unlink_shared_memory
from ..rollouts.options import EngineArguments, EngineSetting, llm_options
from ..rollouts.sampling import rollouts_of
from ..run.session import one_line

EXTENSION = "rlhf_utils.WorkerExtension"
SERVER = """
import runpy
from trainer.run.resource_tracker import start_tracker
start_tracker()
runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
"""
PR_SET_PDEATHSIG = 1  # Linux: a process gets a signal when its parent ends
POLL_SECONDS = 0.5  # from one question whether a server answers to the next
SHOWN_CHARS = 200  # of a server's error
RETRY_SECONDS = 5.0  # until a server that answers, but could not be given weights, is tried again
HOW_TO_START = (
    f"VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --worker-extension-cls {EXTENSION} --enable-scale-out"
    " --logprobs-mode processed_logprobs"
)


@dataclass
class ServerArguments:
    """Which vLLM servers generate, with --topology servers."""

    engine_url: list[str] = arg(
        list, help="URL of a vLLM server; may be given several times (default: the run starts --engines servers)"
    )
    engine_timeout: Annotated[float, Gt(0)] = setting(
        60.0, help="seconds of silence after which a server counts as lost; a sync must take less"
    )


class ReplicaError(Exception):
    """A replica is lost, for this reason."""


class Replica:
    """One vLLM server. Its methods raise ReplicaError if it is lost, and RunError for what it refuses."""

    def __init__(self, name: str, url: str, api_key: str | None, timeout: float):
        self.name, self.url, self.timeout = name, url, timeout
        self.serving, self.in_flight = False, 0  # in_flight: requests
        self.workers, self.shares_device = 0, False  # shares_device: its worker is on the trainer's GPU
        self.arguments: tuple = ()  # of `receive_weights`, beside the timeout
        try:
            self.host = httpx.URL(url).host
        except httpx.InvalidURL as error:
            raise RunError(f"--engine-url {url}: {error}") from error
        self.report: SyncReport | None = None  # of its last sync
        self.reason = ""  # why it was lost, or could not return
        self.client = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=timeout,
            # A transport of its own: a proxy that the environment names would not reach the inner network.
            # No connection is used twice: a server may just be closing an idle one, which would look like its death.
            transport=httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)),
        )

    async def call(self, path: str, body: dict | None = None, method: str = "POST", **options) -> dict:
        """The JSON that the server answers at this path."""
        try:
            answer = await self.client.request(method, path, json=body, **options)
        except httpx.TimeoutException as error:
            raise ReplicaError(f"it did not answer {path} within {self.timeout:g} s") from error
        except httpx.TransportError as error:
            raise ReplicaError(f"no answer: {error or type(error).__name__}") from error
        if answer.status_code in (httpx.codes.BAD_REQUEST, httpx.codes.UNPROCESSABLE_ENTITY):
            raise RunError(f"{self.name} at {self.url} refuses {path}: {answer.text[:SHOWN_CHARS]}")
        if not answer.is_success:
            raise ReplicaError(f"it answered {path} with {answer.status_code}: {answer.text[:SHOWN_CHARS]}")
        try:
            return answer.json() if answer.content else {}
        except ValueError as error:  # a proxy's page, say
            raise ReplicaError(f"it answered {path} with something that is not JSON") from error

    async def rpc(self, method: str, *args, **options) -> list:
        """What this method returns in all workers. Anything but dicts and lists comes as text: "True"."""
        return (await self.call("/collective_rpc", {"method": method, "args": args}, **options))["results"]

    async def pause(self) -> None:
        """Pause generation, and drop what was computed with the old weights. Unfinished completions wait, and compute
        their keys and values anew."""
        await self.call("/pause", params={"mode": "keep"})
        every = {"reset_running_requests": True, "reset_external": True}
        if not (await self.call("/reset_prefix_cache", params=every))["success"]:
            raise ReplicaError("it did not reset its prefix cache")
        await self.call("/reset_mm_cache")
        await self.call("/reset_encoder_cache")

    async def silence(self) -> str:
        """Why the server, or the engine core behind it, does not answer; "" if both do."""
        try:
            await self.call("/is_paused", method="GET")
        except (ReplicaError, RunError) as error:
            return str(error)
        return ""

    async def check(self) -> int:
        """Ask for what a run needs. Returns the tokens that a prompt and its completion may have.

        Raises RunError if it lacks something; the message says how to start it.
        """

        def refuse(lacks: str) -> RunError:
            return RunError(f"--engine-url {self.url}: {lacks}; start it with {HOW_TO_START}")

        try:
            models = await self.client.get("/v1/models")
            if models.status_code == httpx.codes.UNAUTHORIZED:
                raise RunError(f"--engine-url {self.url}: it wants another key than $VLLM_API_KEY")
            if not models.is_success:
                raise refuse("it has no /v1/models, as a server of vLLM has below http://HOST:PORT")
            world_size = await self.client.get("/get_world_size")
            if world_size.is_error:
                raise refuse("it runs without VLLM_SERVER_DEV_MODE=1")
            if (await self.client.post("/inference/v1/generate", json={})).status_code == httpx.codes.NOT_FOUND:
                raise refuse("it runs without --enable-scale-out")
            channels = await self.client.post("/collective_rpc", json={"method": "report_channel"})
            if channels.is_error:
                raise refuse(f"its workers are without --worker-extension-cls {EXTENSION}")
            self.workers = world_size.json()["world_size"]
            self.shares_device = channels.json()["results"][0] == "shared memory"
            max_model_len = models.json()["data"][0]["max_model_len"]
        except httpx.TransportError as error:
            raise refuse(f"nobody answers there ({error or type(error).__name__})") from error
        except (ValueError, LookupError, TypeError) as error:
            raise refuse("what answers there is no server of vLLM") from error
        if self.shares_device and self.workers > 1:
            raise RunError(f"--engine-url {self.url}: of its {self.workers} workers, one can be on the trainer's GPU")
        return max_model_len

    async def generate(self, token_ids: list[int], sampling: dict) -> list[dict]:
        """The completions of one prompt, as `/inference/v1/generate` returns them. Waits for as long as it takes."""
        body = {"token_ids": token_ids, "sampling_params": sampling}
        timeout = httpx.Timeout(self.timeout, read=None)
        request = asyncio.ensure_future(self.call("/inference/v1/generate", body, timeout=timeout))
        lost = self.lost  # if it returns, it gets another future
        self.in_flight += 1
        try:
            await asyncio.wait({request, lost}, return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                raise ReplicaError("it was lost")
            choices = sorted(request.result()["choices"], key=lambda choice: choice["index"])
        finally:
            self.in_flight -= 1
            request.cancel()
        if any(choice["finish_reason"] not in ("stop", "length") for choice in choices):
            raise ReplicaError("it cut a completion short")  # as a server does that shuts down
        if not all(span["version"].isdecimal() for choice in choices for span in choice["weight_versions"]):
            raise ReplicaError("it was started again, and has weights that no sync has brought")
        return choices

    async def within_timeout(self, receiving: asyncio.Future) -> None:
        """Wait for the workers' answers, after the trainer has sent all weights. Raises what they report."""
        try:
            results = await asyncio.wait_for(receiving, self.timeout)
        except TimeoutError as error:
            raise ReplicaError(f"its workers were not done within {self.timeout:g} s") from error
        for result in results:
            if "error" in result:
                raise ReplicaError(result["error"])

    def begin_serving(self, report: SyncReport) -> None:
        """It has proven its weights, in the sync of this report: from now on it may have requests."""
        if not self.serving:
            self.serving, self.lost = True, asyncio.get_running_loop().create_future()
        self.report = report

    def end_serving(self) -> None:
        """It is lost: each `generate` in flight raises."""
        self.serving = False
        self.lost.set_result(None)


class ServerPool:
    """A Ray actor that is one engine to a run, and speaks with all servers. Many of its methods run at the same
    time."""

    def __init__(self, number: int):
        self.replicas: list[Replica] = []
        self.servers: list[subprocess.Popen] = []
        self.sync_lock = asyncio.Lock()  # held by a sync of all, or of a replica that returns
        self.syncing: set[Replica] = set()
        self.return_seconds: list[float] = []  # from "answers again" to "serves again", since the last `metrics`

    async def prepare(self) -> None:
        """Servers import vLLM themselves."""

    async def start(
        self,
        model: str,
        args: ServerArguments,
        engine: EngineArguments,
        setting: EngineSetting,
        timeout: float,
        trainer,
    ) -> int:
        """Reach the servers at --engine-url, or start them. Syncs are with this `trainer`, and take at most
        `timeout` seconds. Returns the tokens that a prompt and its completion may have."""
        from transformers import AutoTokenizer

        self.trainer, self.timeout, self.engine_timeout = trainer, timeout, args.engine_timeout
        key = os.environ.get("VLLM_API_KEY")
        urls = list(dict.fromkeys(url.rstrip("/") for url in args.engine_url)) or [
            self._start_server(model, engine, setting, i, key) for i in range(setting.engines)
        ]
        self.replicas = [Replica(f"engine {i}", url, key, args.engine_timeout) for i, url in enumerate(urls)]
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        if self.servers:
            await asyncio.gather(*map(self._until_started, self.replicas, self.servers))
        lengths = await asyncio.gather(*(replica.check() for replica in self.replicas))
        self.max_model_len = min(*lengths, engine.max_model_len or math.inf)
        return self.max_model_len

    async def connect(self, replica: Replica) -> None:
        """Join the trainer and this replica in a group or, on the trainer's GPU, by its memory."""
        replica.arguments = ()
        if replica.shares_device:
            replica.arguments = (await self.trainer.share_memory.remote(replica.name, self.engine_timeout),)
            return
        # The servers that this run has started listen on 127.0.0.1, maybe on another node than the trainer's.
        host = ray.util.get_node_ip_address() if self.servers else replica.host
        world_size = 1 + replica.workers
        address = await self.trainer.init_server_group.remote(replica.name, host, world_size, self.engine_timeout)
        await replica.rpc("init_weight_update_group", *address, 1, world_size)

    async def sync(self, replicas: list[Replica]) -> None:
        """Sync these servers at the same time: each pauses, receives, proves, gets the version's label, and resumes."""
        replicas = await self.together(replicas, Replica.pause)
        receiving = {
            replica: asyncio.ensure_future(
                replica.rpc("receive_weights", *replica.arguments, self.timeout, timeout=None)
            )
            for replica in replicas
        }
        # The trainer sends as soon as it is not learning.
        version, reports = await self.trainer.send_to_servers.remote(
            [replica.name for replica in replicas], self.engine_timeout
        )

        async def prove(replica: Replica) -> None:
            if isinstance(report := reports[replica.name], str):
                receiving[replica].cancel()
                raise ReplicaError(report)
            await replica.within_timeout(receiving[replica])
            if any(answer != "True" for answer in await replica.rpc("check_weights_changed")):
                raise ReplicaError("it does not serve what was sent")
            await replica.call("/update_weight_version", {"new_version": str(version)})  # while paused
            await replica.call("/resume")
            replica.begin_serving(report)

        await self.together(replicas, prove)

    async def begin(self) -> SyncReport:
        """Connect all replicas, and sync. From now on, a lost replica may return."""
        async with self.sync_lock:
            await self._sync(await self.together(self.replicas, self.connect))
        if missing := [replica for replica in self.replicas if not replica.serving]:
            raise RunError("; ".join(f"{replica.name} at {replica.url}: {replica.reason}" for replica in missing))
        self.watching = [asyncio.ensure_future(self._watch(replica)) for replica in self.replicas]
        return self._report()

    async def take_weights(self) -> SyncReport:
        """Sync all replicas that serve. If none is left, wait for one to return, which takes the same weights."""
        async with self.sync_lock:
            await self._sync(self._serving())
        await self._until_some_serve()
        return self._report()

    def _report(self) -> SyncReport:
        """The report of the slowest replica in the last sync."""
        return max((replica.report for replica in self._serving()), key=lambda report: report.seconds)

    async def sample(
        self,
        prompts: list[list[int]],
        sampling: list[dict],
        images: Sequence[None] | None = None,
        low_priority: bool = False,
    ) -> list[Rollout]:
        """As `EngineActor.sample`, with the prompts divided among the replicas. They take no images, and know no
        priority: a server would want one more flag for it."""
        answers = await asyncio.gather(*map(self._generate, prompts, sampling))
        requests = [
            SimpleNamespace(prompt_token_ids=ids, outputs=[_output(choice) for choice in choices])
            for ids, choices in zip(prompts, answers, strict=True)
        ]
        return rollouts_of(requests, self.tokenizer)

    async def drop_caches(self) -> None:
        """As `EngineActor.drop_caches`."""
        await self.together(self._serving(), lambda replica: replica.call("/reset_prefix_cache"))

    async def sleep(self, level: str) -> None:
        """Servers have their GPUs, and go on while the trainer learns."""

    async def idle_share(self) -> None:
        """Not known of servers, which others may use as well."""

    async def _generate(self, token_ids: list[int], sampling: dict) -> list[dict]:
        room = self.max_model_len - len(token_ids)  # of this run: a server may have more
        sampling = sampling | {"max_tokens": min(sampling["max_tokens"], room)}
        while True:
            await self._until_some_serve()
            replica = min(self._serving(), key=lambda replica: replica.in_flight)
            try:
                return await replica.generate(token_ids, sampling)
            except ReplicaError as error:
                self.lose(replica, str(error))

    async def metrics(self) -> dict[str, float]:
        """How many replicas serve and, if some have returned since the last call, the longest return in seconds."""
        metrics = {"engines/alive": len(self._serving())}
        if self.return_seconds:
            metrics["engines/return"] = max(self.return_seconds)
            self.return_seconds = []
        return metrics

    async def shutdown(self) -> None:
        for task in getattr(self, "watching", []):
            task.cancel()
        processes = [psutil.Process(server.pid) for server in self.servers if server.poll() is None]
        family = [child for process in processes for child in process.children(recursive=True)]
        for process in processes:
            process.terminate()
        _, left = await asyncio.to_thread(psutil.wait_procs, processes + family, 5)
        for process in left:
            process.kill()

    def lose(self, replica: Replica, reason: str) -> None:
        """Give this replica's unfinished requests to others, and no more to it until it returns."""
        replica.reason = reason
        if not replica.serving:
            return
        print(f"{replica.name} is lost, and its {replica.in_flight} requests go to others: {reason}", flush=True)
        replica.end_serving()
        if not self._serving():
            print("no engine is left: the run waits for one to return", flush=True)

    async def together(self, replicas: list[Replica], act: Callable[[Replica], Awaitable]) -> list[Replica]:
        """Do this with these replicas, side by side. Returns those with which it succeeded; the others are lost."""

        async def succeeds(replica: Replica) -> bool:
            try:
                await act(replica)
            except ReplicaError as error:
                self.lose(replica, str(error))
                return False
            return True

        results = await asyncio.gather(*map(succeeds, replicas))
        return [replica for replica, success in zip(replicas, results, strict=True) if success]

    def _serving(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.serving]

    async def _until_some_serve(self) -> None:
        while not self._serving():
            if self.servers and all(server.poll() is not None for server in self.servers):
                raise RunError("all servers that this run has started have ended; run.log says why")
            await asyncio.sleep(POLL_SECONDS)

    async def _sync(self, replicas: list[Replica]) -> None:
        self.syncing |= set(replicas)
        try:
            await self.sync(replicas)
        finally:
            self.syncing -= set(replicas)

    async def _watch(self, replica: Replica) -> None:
        """Notice when this replica falls silent, and take it in again when it answers."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if replica in self.syncing:  # a sync keeps its engine core busy, and has a timeout of its own
                continue
            serving, silence = replica.serving, await replica.silence()
            if serving and silence and replica not in self.syncing:
                self.lose(replica, silence)
            elif not serving and not silence:
                await self._return(replica)

    async def _return(self, replica: Replica) -> None:
        answered, known_reason = time.perf_counter(), replica.reason
        try:
            if (length := await replica.check()) < self.max_model_len:
                raise RunError(f"it takes {length} tokens, and this run up to {self.max_model_len}")
            async with self.sync_lock:
                await self._sync(await self.together([replica], self.connect))
        except Exception as error:  # of the server's check, or of the trainer: both are asked again
            replica.reason = one_line(error)
        if replica.serving:
            seconds = time.perf_counter() - answered
            self.return_seconds.append(seconds)
            print(f"{replica.name} serves again, {seconds:.2f} s after it answered", flush=True)
        else:
            if replica.reason != known_reason:
                print(f"{replica.name} at {replica.url} answers, and cannot return: {replica.reason}", flush=True)
            await asyncio.sleep(RETRY_SECONDS)

    # Servers that this run starts. They end with it, and none is started again.

    def _start_server(
        self, model: str, args: EngineArguments, setting: EngineSetting, number: int, api_key: str | None
    ) -> str:
        """Start server `number` on its part of this actor's devices. Returns its URL."""
        from vllm.utils.network_utils import get_open_port

        tp, port = args.tensor_parallel_size, get_open_port()
        bundles = list(range(number * tp, (number + 1) * tp))
        options, environment = llm_options(args, model, setting, bundles)
        command = [sys.executable, "-c", SERVER, "--model", model]
        command += [*flags_of(options), "--host", "127.0.0.1", "--port", str(port)]
        environment |= {"VLLM_SERVER_DEV_MODE": "1"} | ({"VLLM_API_KEY": api_key} if api_key else {})
        if setting.device == "cuda":
            gpus = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[i] for i in bundles)
        libc = ctypes.CDLL(None)
        server = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdout=sys.stderr.fileno(),
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),  # noqa: PLW1509 - it does nothing else
        )
        self.servers.append(server)
        return f"http://127.0.0.1:{port}"

    async def _until_started(self, replica: Replica, server: subprocess.Popen) -> None:
        while await replica.silence():
            if server.poll() is not None:
                raise EngineError(f"{replica.name}: {logged_reason()}")
            await asyncio.sleep(POLL_SECONDS)
        unlink_shared_memory(psutil.Process(server.pid))


def flags_of(options: dict) -> list[str]:
    """The options of a vllm.LLM as flags of vLLM's server."""
    flags = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return flags


def _output(choice: dict) -> SimpleNamespace:
    """A choice of `/inference/v1/generate` in the form of a vllm.CompletionOutput."""
    content = (choice["logprobs"] or {}).get("content")
    return SimpleNamespace(
        token_ids=choice["token_ids"],
        logprobs=content and SimpleNamespace(logprobs=[token["logprob"] for token in content]),
        finish_reason=choice["finish_reason"],
        weight_versions=[SimpleNamespace(**span) for span in choice["weight_versions"]],
    )
