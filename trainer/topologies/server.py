"""One vLLM server, reached over HTTP, with the paths of its dev mode."""

import asyncio
from contextlib import suppress

import httpx

from rlhf_utils import SyncReport

from ..errors import RunError

SHOWN_CHARS = 200  # of a server's error
HOW_TO_START = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --worker-extension-cls rlhf_utils.WorkerExtension --enable-scale-out"
    " --logprobs-mode processed_logprobs, and with this run's VLLM_API_KEY, if it has one"
)


class ServerLost(Exception):
    """A server is lost, for this reason."""


class Server:
    """A vLLM server. Its methods raise ServerLost if it is lost, and RunError for what it refuses."""

    def __init__(self, name: str, url: str, api_key: str | None, timeout: float):
        self.name, self.url, self.timeout = name, url, timeout
        self.serving, self.in_flight = False, 0  # in_flight: requests
        self.workers = 0
        self.report: SyncReport | None = None  # of its last sync
        self.reason = ""  # why it was lost, or could not return
        try:
            self.host = httpx.URL(url).host
        except httpx.InvalidURL as error:
            raise RunError(f"--engine-url {url}: {error}") from error
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
            raise ServerLost(f"it did not answer {path} within {self.timeout:g} s") from error
        except httpx.RequestError as error:
            raise ServerLost(f"no answer: {error or type(error).__name__}") from error
        if answer.status_code in (httpx.codes.BAD_REQUEST, httpx.codes.UNPROCESSABLE_ENTITY):
            raise RunError(f"{self.name} at {self.url} refuses {path}: {answer.text[:SHOWN_CHARS]}")
        if not answer.is_success:
            raise ServerLost(f"it answered {path} with {answer.status_code}: {answer.text[:SHOWN_CHARS]}")
        try:
            return answer.json() if answer.content else {}
        except ValueError as error:  # a proxy's page, say
            raise ServerLost(f"it answered {path} with something that is not JSON") from error

    async def rpc(self, method: str, *args, **options) -> list:
        """What this method returns in all workers. Anything but dicts and lists comes as text: "True"."""
        return (await self.call("/collective_rpc", {"method": method, "args": args}, **options))["results"]

    async def pause(self) -> None:
        """Pause generation, and drop what was computed with the old weights. Unfinished completions wait, and compute
        their keys and values anew."""
        await self.call("/pause", params={"mode": "keep"})
        every = {"reset_running_requests": True, "reset_external": True}
        if not (await self.call("/reset_prefix_cache", params=every))["success"]:
            raise ServerLost("it did not reset its prefix cache")
        await self.call("/reset_encoder_cache")

    async def silence(self) -> str:
        """Why the server, or the engine core behind it, does not answer; "" if both do."""
        try:
            await self.call("/is_paused", method="GET")
        except (ServerLost, RunError) as error:
            return str(error)
        return ""

    async def check(self) -> int:
        """Ask for what a run needs. Returns the tokens that a prompt and its completion may have.

        Raises RunError, which says how to start a server, if this one lacks something.
        """
        try:
            models = await self.call("/v1/models", method="GET")
            self.workers = (await self.call("/get_world_size", method="GET"))["world_size"]
            with suppress(RunError):
                await self.call("/inference/v1/generate", {})  # which it refuses, if it has that path
            await self.rpc("close_weight_update_group")  # which only WorkerExtension has, and which ends an old session
            return models["data"][0]["max_model_len"]
        except (ServerLost, LookupError, TypeError) as error:
            reason = error if isinstance(error, ServerLost) else "what answers there is no server of vLLM"
            raise RunError(f"--engine-url {self.url}: {reason}; start it with {HOW_TO_START}") from error

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
                raise ServerLost("it was lost")
            choices = sorted(request.result()["choices"], key=lambda choice: choice["index"])
        finally:
            self.in_flight -= 1
            request.cancel()
        if any(choice["finish_reason"] not in ("stop", "length") for choice in choices):
            raise ServerLost("it cut a completion short")  # as a server does that shuts down
        if not all(span["version"].isdecimal() for choice in choices for span in choice["weight_versions"]):
            raise ServerLost("it was started again, and has weights that no sync has brought")
        return choices

    async def prove(self, receiving: asyncio.Future, report: SyncReport | str, version: int) -> None:
        """Once the trainer has sent all weights of this version, with this report or a reason why it could not, wait
        for the workers and ask whether they serve them. Only then go on generating."""
        if isinstance(report, str):
            receiving.cancel()
            raise ServerLost(report)
        try:
            results = await asyncio.wait_for(receiving, self.timeout)
        except TimeoutError as error:
            raise ServerLost(f"its workers were not done within {self.timeout:g} s") from error
        if errors := [result["error"] for result in results if "error" in result]:
            raise ServerLost(errors[0])
        if any(answer != "True" for answer in await self.rpc("check_weights_changed")):
            raise ServerLost("it does not serve what was sent")
        await self.call("/update_weight_version", {"new_version": str(version)})  # while paused
        await self.call("/resume")
        if not self.serving:
            self.serving, self.lost = True, asyncio.get_running_loop().create_future()
        self.report = report

    def end_serving(self) -> None:
        """It is lost: each `generate` in flight raises."""
        self.serving = False
        self.lost.set_result(None)
