"""--topology servers: servers that are lost and return, what they are refused for, and a whole run.

pytest tests/test_serve.py            against servers of this file's own, without an engine
pytest tests/test_serve.py -m long    runs with two of vLLM's, one of which is lost and returns, once and 20 times
"""

import asyncio
import json
import random
import signal
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from conftest import ROOT, Script, arguments_of, cpu_only, metrics_of, settings_of
from torch.distributed import HashStore

import train_grpo
from rlhf_utils import SyncReport, WeightSender
from trainer.errors import RunError
from trainer.flags import flat
from trainer.learning.config import SamplingConfig
from trainer.rollouts.sampling import sampling_options, settle_sampling
from trainer.run.arguments import parse
from trainer.run.folder import RunFolder
from trainer.tasks.tiny_model import build_tiny_model, byte_tokenizer
from trainer.topologies import server_pool
from trainer.topologies.link import MAX_MISMATCH
from trainer.topologies.server import Server, ServerLost
from trainer.topologies.server_pool import ServerPool

REPORT = SyncReport(1, 36, 1000, 0.1, "replay")


class FakeServer:
    """Speaks as vLLM's server does. A completion is as many tokens as there are in its prompt, of value `seed`."""

    def __init__(self):
        self.version, self.paused, self.silent, self.reason = "default", False, threading.Event(), "stop"
        self.silent.set()  # while it is not, nothing is answered
        self.refuses = self.redirects = None  # a path
        self.length, self.page = 64, None  # page: what it answers in place of JSON
        self.lacks, self.calls, self.proof, self.resets = None, [], "True", True
        self.masks = False
        self.begun, self.goes_on = threading.Event(), threading.Event()
        self.goes_on.set()
        self.start(0)

    def start(self, port: int) -> None:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_GET(self):
                self.do_POST()

            def do_POST(self):
                (path, _, query), http = self.path.partition("?"), owner.http
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
                owner.silent.wait()
                status, answer = owner.answer(path, query, body, self.headers.get("Authorization"))
                if http is not owner.http:  # it died meanwhile
                    return
                data = owner.page or json.dumps(answer).encode()
                with suppress(OSError):
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port, self.url = self.http.server_port, f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def die(self) -> None:
        http, self.http = self.http, None
        http.shutdown()
        http.server_close()
        self.goes_on.set()

    def restart(self) -> None:
        self.version, self.paused = "default", False
        self.start(self.port)

    def answer(self, path: str, query: str, body: dict | None, key: str | None) -> tuple[int, object]:
        if path == "/is_paused":
            return 200, {"is_paused": self.paused}
        self.calls.append((path, body))
        if path == self.lacks:
            return 500 if path == "/collective_rpc" else 404, {"detail": "Not Found"}
        if path == self.redirects:
            return 307, {}
        if path == self.refuses:
            return 400, {"error": "not now"}
        if path == "/inference/v1/generate":
            return self.generate(body) if body else (400, {})
        if path == "/update_weight_version":
            assert self.paused
            self.version = body["new_version"]
        self.paused = {"/pause": True, "/resume": False}.get(path, self.paused)
        answers = {"/v1/models": {"data": [{"max_model_len": self.length}]}, "/get_world_size": {"world_size": 1}}
        if path == "/reset_prefix_cache":  # while requests wait, vLLM resets nothing unless it is to reset them as well
            resets_waiting = "reset_running_requests=true" in query
            answers[path] = {"success": self.resets and (resets_waiting or not self.paused)}
        if path == "/collective_rpc":
            results = {"receive_weights": {"version": 1}, "check_weights_changed": self.proof}
            results["close_weight_update_group"] = None
            first = "True" if body["method"] == "check_weights_changed" else results.get(body["method"])
            answers[path] = {"results": [first, results.get(body["method"])]}
        return 401 if path == "/v1/models" and key != "Bearer secret" else 200, answers.get(path, {})

    def generate(self, body: dict) -> tuple[int, dict]:
        self.begun.set()
        self.goes_on.wait()
        length, sampling = len(body["token_ids"]), body["sampling_params"]
        choice = {
            "finish_reason": self.reason,
            "logprobs": {"content": [{"logprob": -0.5}] * length},
            "weight_versions": [{"version": self.version, "start": 0, "end": length}],
        }
        if self.masks:
            choice["sampling_mask"] = [[5, 6]] * length
        first = sampling.get("seed", 0) % 256  # so a test sees whose answer it is
        choices = [choice | {"index": i, "token_ids": [first + i] * length} for i in range(sampling.get("n", 1))]
        return 200, {"choices": choices[::-1]}  # in the order in which they were finished


class Trainer:
    """Holds weights of version `step`; to a server in `failing` it cannot send."""

    def __init__(self):
        self.step, self.failing, self.joined = 4, {}, []
        self.init_server_group = SimpleNamespace(remote=self.join)
        self.send_to_servers = SimpleNamespace(remote=self.send)

    async def join(self, name, host, size, timeout):
        self.joined.append((name, host, size))
        return "127.0.0.1", 1234

    async def send(self, names, timeout):
        return self.step, {name: self.failing.get(name, REPORT) for name in names}


@pytest.fixture
def servers(monkeypatch):
    monkeypatch.setattr(server_pool, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(server_pool, "RETRY_SECONDS", 0.02)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda _: byte_tokenizer())
    servers = [FakeServer(), FakeServer()]
    yield servers
    for server in servers:
        server.silent.set()
        server.goes_on.set()
        if server.http:
            server.die()


def arguments(servers: list, **options) -> train_grpo.Arguments:
    urls = [server.url for server in servers]
    defaults = {"engine_url": urls, "engine_timeout": 20.0, "group_size": 2, "max_tokens": 8}
    return arguments_of(train_grpo, **defaults | options)


def start(pool: ServerPool, args: train_grpo.Arguments, trainer: Trainer):
    return pool.start("model", args.servers, args.engine, args.run.timeout, trainer)


def test_completions_end_at_the_runs_own_limit_as_well(servers):
    for limit, tokens in ((None, 64), (24, 24), (100, 64)):
        assert asyncio.run(start(ServerPool(0), arguments(servers, max_model_len=limit), Trainer())) == tokens

    async def act(pool, args):
        pool.max_model_len = 6
        await sample(pool, args)

    pool_of(servers, act)
    for body in (body for server in servers for path, body in server.calls if path.endswith("generate") and body):
        assert len(body["token_ids"]) + body["sampling_params"]["max_tokens"] == 6


def pool_of(servers: list, act, **options) -> tuple:
    """What `act(pool, args)` returns, with a pool of these servers that serve. And its trainer."""

    async def run():
        pool, args, trainer = ServerPool(0), arguments(servers, **options), Trainer()
        args.sampling, args.engine = settle_sampling(None, args.sampling, args.engine, None)
        assert await start(pool, args, trainer) == 64
        await pool.begin()
        try:
            return await act(pool, args), trainer
        finally:
            await pool.shutdown()

    return asyncio.run(asyncio.wait_for(run(), 30))


async def until(holds) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def seeds(server: FakeServer) -> list[int]:
    """Of the requests that it was sent."""
    return [body["sampling_params"]["seed"] for path, body in server.calls if path.endswith("generate") and body]


PROMPTS = [[5, 6, 7], [8, 9], [10], [11, 12]]


def sample(pool, args):
    sampling = [sampling_options(args.sampling, 0, 1, i) for i in range(len(PROMPTS))]
    return pool.sample(PROMPTS, sampling, [None], low_priority=True)


def test_server_serves_after_its_proof_and_prompts_are_shared(servers):
    rollouts, trainer = pool_of(servers, sample)
    assert [rollout.prompt_ids.tolist() for rollout in rollouts] == [ids for ids in PROMPTS for _ in range(2)]
    assert [rollout.versions.tolist() for rollout in rollouts] == [[4] * len(ids) for ids in PROMPTS for _ in range(2)]
    assert [rollout.logprobs.tolist() for rollout in rollouts[:2]] == [[-0.5] * 3] * 2
    first, second = ([int(own.completion_ids[0]) for own in rollouts[i::2]] for i in (0, 1))
    assert second == [token + 1 for token in first]  # siblings in the order of their seeds, whichever ends first
    assert trainer.joined == [("engine 0", "127.0.0.1", 2), ("engine 1", "127.0.0.1", 2)]
    for server in servers:
        done = [body["method"] if path == "/collective_rpc" else path for path, body in server.calls][3:]
        paused = ["/pause", "/reset_prefix_cache", "/reset_encoder_cache"]
        proven = ["receive_weights", "check_weights_changed", "/update_weight_version", "/resume"]
        assert done[1:9] == ["init_weight_update_group", *paused, *proven]
        assert len(seeds(server)) == 2
    assert len(set(seeds(servers[0]) + seeds(servers[1]))) == 4


def test_servers_return_sampling_masks_where_a_run_needs_them(servers):
    for server in servers:
        server.masks = True
    rollouts, _ = pool_of(servers, sample, top_k=2)
    assert [own.sampling_mask.counts.tolist() for own in rollouts] == [[2] * len(ids) for ids in PROMPTS for _ in "ab"]
    bodies = [body for path, body in servers[0].calls if path.endswith("generate") and body]
    assert {body["sampling_params"]["top_k"] for body in bodies} == {2}


def test_an_evaluation_leaves_nothing_in_servers_caches(servers):
    async def act(pool, args):
        await sample(pool, args)
        await pool.drop_caches()

    pool_of(servers, act)
    assert [server.calls[-1] for server in servers] == [("/reset_prefix_cache", None)] * 2


def test_a_proxy_in_the_environment_is_not_asked(servers, monkeypatch):
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    rollouts, _ = pool_of(servers, sample)
    assert len(rollouts) == 8


def test_certificates_in_the_environment_are_trusted(monkeypatch, tmp_path):
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "missing.pem"))
    with pytest.raises(FileNotFoundError):
        Server("engine", "https://a:8000", None, 1)


@pytest.mark.parametrize("fault", ["death", "silence", "shutdown", "restart"])
def test_unfinished_requests_of_a_lost_server_keep_their_seeds(servers, fault):
    lost, other = servers

    async def act(pool, args):
        lost.goes_on.clear()
        sampling = asyncio.ensure_future(sample(pool, args))
        await until(lambda: len(seeds(lost)) == 2 and len(seeds(other)) == 2)
        if fault == "death":
            await asyncio.to_thread(lost.die)
        elif fault == "silence":
            lost.silent.clear()
        elif fault == "shutdown":
            lost.reason = "abort"
        else:
            lost.version = "default"  # it was started again, unnoticed
        if fault != "silence":
            lost.goes_on.set()
        rollouts = await sampling
        unfinished = seeds(lost)[:2]
        assert set(seeds(other)[2:] + seeds(lost)[2:]) == set(unfinished)
        return rollouts

    rollouts, _ = pool_of(servers, act, engine_timeout=5.0 if fault == "silence" else 20.0)
    assert [rollout.prompt_ids.tolist() for rollout in rollouts] == [ids for ids in PROMPTS for _ in range(2)]
    assert all(rollout.versions.tolist() == [4] * len(rollout.prompt_ids) for rollout in rollouts)
    first = [sampling_options(SamplingConfig(group_size=2), 0, 1, i)["seed"] % 256 for i in range(4)]
    assert [int(rollout.completion_ids[0]) for rollout in rollouts] == [seed + i for seed in first for i in range(2)]


def test_returning_server_takes_the_weights_before_a_request(servers, capsys):
    async def act(pool, args):
        trainer = pool.trainer
        servers[0].die()
        await until(lambda: (pool._serving()) == pool.servers[1:])
        assert await pool.metrics() == {"engines/alive": 1}
        trainer.step = 5
        await pool.take_weights()
        servers[0].restart()
        servers[0].calls.clear()
        await until(lambda: len(pool._serving()) == 2)
        await sample(pool, args)
        paths = [path for path, body in servers[0].calls if body or path == "/resume"]
        assert paths.index("/inference/v1/generate") > paths.index("/resume")
        assert servers[0].version == servers[1].version == "5"
        metrics = await pool.metrics()
        assert metrics["engines/alive"] == 2
        assert 0 < metrics["engines/return"] < 5
        assert await pool.metrics() == {"engines/alive": 2}

    pool_of(servers, act)
    said = capsys.readouterr().out
    assert "engine 0 is lost" in said
    assert "engine 0 serves again" in said


def test_with_none_left_a_run_waits_for_one_to_return(servers, capsys):
    async def act(pool, args):
        for server in servers:
            server.die()
        await until(lambda: not pool._serving())
        pool.trainer.step = 5
        syncing, sampling = asyncio.ensure_future(pool.take_weights()), asyncio.ensure_future(sample(pool, args))
        await asyncio.sleep(0.2)
        assert not syncing.done()
        assert not sampling.done()
        servers[1].restart()
        assert await syncing == REPORT
        return await sampling

    rollouts, _ = pool_of(servers, act)
    assert {version for rollout in rollouts for version in rollout.versions.tolist()} == {5}
    assert "no engine is left: the run waits for one to return" in capsys.readouterr().out


def test_new_sender_gives_back_the_last_ones_memory():
    ended, trainer = threading.Event(), train_grpo.Trainer(0)
    communicator = SimpleNamespace(group=SimpleNamespace(store=HashStore()), destroy=ended.set)
    trainer.set_sender("engine 0", lambda: WeightSender(communicator))
    trainer.set_sender("engine 0", lambda: None)
    assert ended.wait(10)


@pytest.mark.parametrize("fault", ["cache", "transfer", "proof"])
def test_server_that_a_sync_did_not_reach_stays_paused(servers, fault):
    async def act(pool, args):
        if fault == "cache":
            servers[0].resets = False
        elif fault == "transfer":
            pool.trainer.failing["engine 0"] = "engine worker 0 died"
        else:
            servers[0].proof = "False"
        pool.trainer.step = 5
        await pool.take_weights()
        assert pool._serving() == pool.servers[1:]
        assert (servers[0].version, servers[0].paused) == ("4", True)
        before = len(seeds(servers[0]))
        rollouts = await sample(pool, args)
        assert len(seeds(servers[0])) == before
        assert {version for rollout in rollouts for version in rollout.versions.tolist()} == {5}
        pool.trainer.failing.clear()
        servers[0].proof, servers[0].resets = "True", True
        await until(lambda: len(pool._serving()) == 2)
        assert (servers[0].version, servers[0].paused) == ("5", False)

    pool_of(servers, act)


def test_what_vllm_refuses_ends_the_run(servers):
    servers[0].refuses = servers[1].refuses = "/inference/v1/generate"
    with pytest.raises(RunError, match=r"engine \d at http:.* refuses /inference/v1/generate: .*not now"):
        pool_of(servers, sample)


def test_error_of_the_trainers_own_gpu_ends_the_run(servers):
    """No server is lost by it."""

    def fail(weights):
        raise torch.OutOfMemoryError("CUDA out of memory")

    async def act(pool, args):
        async def send(names, timeout):
            trainer = train_grpo.Trainer(0)
            trainer.learner, trainer.model = SimpleNamespace(step=5), SimpleNamespace(named_tensors=dict)
            for name in names:
                trainer.set_sender(name, lambda: SimpleNamespace(send_weights=fail))
            return trainer.send_to_servers(names, timeout)

        pool.trainer.send_to_servers = SimpleNamespace(remote=send)
        with pytest.raises(torch.OutOfMemoryError):
            await pool.take_weights()
        assert len(pool._serving()) == 2

    pool_of(servers, act)


@pytest.mark.parametrize("lacks", ["/get_world_size", "/inference/v1/generate", "/collective_rpc", "/v1/models"])
def test_wrongly_started_server_is_refused_with_how_to_start_it(servers, lacks):
    servers[1].lacks = lacks
    start = "start it with VLLM_SERVER_DEV_MODE=1 vllm serve .*WorkerExtension --enable-scale-out"
    with pytest.raises(RunError, match=rf"^--engine-url {servers[1].url}: it answered {lacks} with (404|500).*{start}"):
        pool_of(servers, sample)


def test_missing_server_and_wrong_key_are_refused(servers, monkeypatch):
    servers[1].die()
    with pytest.raises(RunError, match=rf"^--engine-url {servers[1].url}: no answer: .*; start it with"):
        pool_of(servers, sample)
    with monkeypatch.context() as other:
        other.setenv("VLLM_API_KEY", "other")
        with pytest.raises(RunError, match=r"^--engine-url \S+: it answered /v1/models with 401.*VLLM_API_KEY"):
            pool_of(servers[:1], sample)
    servers[0].redirects = "/v1/models"
    with pytest.raises(RunError, match=r"^--engine-url \S+: it answered /v1/models with 307"):
        pool_of(servers[:1], sample)
    with pytest.raises(RunError, match=r"^--engine-url localhost:8000: no answer: .*protocol"):
        pool_of([SimpleNamespace(url="localhost:8000")], sample)
    servers[0].redirects = None
    pool_of([*servers[:1], SimpleNamespace(url=f"{servers[0].url}/")], sample)  # one server
    servers[0].page = b"<html>"
    with pytest.raises(RunError, match=r"^--engine-url \S+: it answered /v1/models with something that is not JSON"):
        pool_of(servers[:1], sample)
    with pytest.raises(RunError, match=r"^--engine-url http://a:80a0: Invalid port: '80a0'$"):
        pool_of([SimpleNamespace(url="http://a:80a0")], sample)


def test_another_model_is_the_preflights_error(servers, monkeypatch):
    reason = "preflight, nothing was sent:\n  lm_head.weight [261, 64]: the engine's loader ignores it"
    monkeypatch.setattr(Trainer, "send", lambda self, names, timeout: answer(self.step, dict.fromkeys(names, reason)))

    async def answer(*values):
        return values

    with pytest.raises(RunError, match=r"^engine 0 at http:\S+: preflight, nothing was sent:\n  lm_head"):
        pool_of(servers, sample)


@pytest.mark.parametrize("wrong", [{"lacks": "/inference/v1/generate"}, {"length": 24}])
def test_wrongly_restarted_server_stays_out_and_is_named_once(servers, capsys, wrong):
    printed = []

    async def act(pool, args):
        servers[0].die()
        await until(lambda: len(pool._serving()) == 1)
        vars(servers[0]).update(wrong)
        servers[0].restart()
        await until(lambda: printed.append(capsys.readouterr().out) or "engine 0 at http" in "".join(printed))
        await asyncio.sleep(0.5)  # in which it is asked again
        assert len(pool._serving()) == 1
        assert len(await sample(pool, args)) == 8

    pool_of(servers, act)
    assert "".join([*printed, capsys.readouterr().out]).count("engine 0 at http") == 1


def test_server_that_refuses_its_sync_is_asked_again(servers, capsys):
    async def act(pool, args):
        for _ in range(2):  # it says so each time
            servers[0].die()
            await until(lambda: len(pool._serving()) == 1)
            servers[0].refuses = "/pause"
            servers[0].restart()
            await until(lambda: capsys.readouterr().out.count("cannot return: engine 0 at http"))
            servers[0].refuses = None
            await until(lambda: len(pool._serving()) == 2)

    pool_of(servers, act)


def test_server_that_cannot_join_is_asked_again(servers, capsys):
    async def act(pool, args):
        servers[0].die()
        await until(lambda: len(pool._serving()) == 1)
        join, errors = pool.trainer.join, [OSError("no route to host")]

        async def fails_once(*arguments):
            if errors:
                raise errors.pop()
            return await join(*arguments)

        pool.trainer.init_server_group.remote = fails_once
        servers[0].restart()
        await until(lambda: len(pool._serving()) == 2)

    pool_of(servers, act)
    assert "answers, and cannot return: no route to host" in capsys.readouterr().out


def test_reset_connection_is_a_lost_server_and_no_error(servers):
    async def act(pool, args):
        server = Server("engine", servers[0].url, None, 0.2)
        servers[0].silent.clear()
        with pytest.raises(ServerLost, match=r"^it did not answer /pause within 0.2 s$"):
            await server.call("/pause")
        servers[0].silent.set()
        servers[0].die()
        server = Server("engine", servers[0].url, None, 20)
        with pytest.raises(ServerLost, match=r"^no answer: "):
            await server.call("/pause")

    pool_of(servers, act)


def test_urls_may_be_repeated(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_grpo.py", "--engine-url", "http://a:1", "--engine-url", "http://b:1"])
    assert parse(train_grpo.Arguments, "A script.").servers.engine_url == ["http://a:1", "http://b:1"]


def test_resumed_run_may_have_another_topology(monkeypatch, tmp_path):
    """What its own topology alone has, and no flag unsets, is left out. The rest stays."""

    def arguments_now(*flags):
        monkeypatch.setattr(sys, "argv", ["train_grpo.py", *map(str, flags)])
        return parse(train_grpo.Arguments, "A script.")

    for topology, flag, *values in ("servers", "engine_url", "http://a:1"), ("separate", "trainers", 2):
        run = tmp_path / topology
        given = "--topology", topology, f"--{flag.replace('_', '-')}", *values, "--max-model-len", 64
        args = arguments_now("--output", run, *given)
        with RunFolder(args.run, "test") as folder:
            folder.start_metrics(0, args)
        for now, kept in ([], True), (["--topology", topology], True), (["--topology", "shared"], False):
            args = arguments_now("--resume", run, *now)
            assert bool(flat(args)[flag]) == kept
            assert args.engine.max_model_len == 64


# A run

MARKING = """
import os, pathlib
from rlhf_utils import WorkerExtension
class Marking(WorkerExtension):
    def receive_weights(self, *arguments):
        pathlib.Path(os.environ["RECEIVING"]).touch()
        return super().receive_weights(*arguments)
"""
SLOW_REWARD = """
import asyncio
async def reward(completions, **_):
    await asyncio.sleep(1)
    return [sum(character.isupper() for character in text) / max(1, len(text)) for text in completions]
"""


def server_of(folder: Path, model: Path, number: int, port: int) -> Script:
    """One of vLLM's, as docs/cluster.md starts it, on a core of its own. A worker leaves a file when a sync begins."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--worker-extension-cls", "marking.Marking", "--enable-scale-out"]
    command += ["--logprobs-mode", "processed_logprobs", "--dtype", "float32", "--enforce-eager"]
    command += ["--no-enable-chunked-prefill", "--kv-cache-memory-bytes", str(64 << 20)]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_API_KEY": "secret", "PYTHONPATH": f"{folder}:{ROOT}"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": str(number), "TORCH_COMPILE_DISABLE": "1"}
    return Script(folder, *command, **environment, RECEIVING=str(folder / f"receiving-{number}"))


def signal_all(server: Script, number: int) -> None:
    """To the server and all that it has started."""
    for process in [psutil.Process(server.process.pid), *server.descendants()]:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


@cpu_only
@pytest.mark.long
@pytest.mark.parametrize("faults", [1, 20])
def test_run_outlives_its_servers_and_takes_them_in_again(script, tmp_path, faults):
    from vllm.utils.network_utils import get_open_port

    model, run, ports = build_tiny_model(tmp_path / "model"), tmp_path / "run", [get_open_port(), get_open_port()]
    (tmp_path / "marking.py").write_text(MARKING)
    (tmp_path / "slow.py").write_text(SLOW_REWARD)  # so that steps are left when a server is back
    servers, chance = [server_of(tmp_path, model, i, port) for i, port in enumerate(ports)], random.Random(faults)
    rows = lambda: metrics_of(run)  # noqa: E731
    for server in servers:
        server.wait_for("Application startup complete")
    urls = [word for port in ports for word in ("--engine-url", f"http://127.0.0.1:{port}")]
    options = ["--model", model, "--learning-rate", 3e-3, "--reward", "slow:reward", "--max-staleness", 2]
    options += ["--steps", 10_000, "--save-every", 0, "--output", "run", *settings_of(tmp_path, engine_timeout=10)]
    process = script("train_grpo.py", *urls, *options, VLLM_API_KEY="secret")
    process.wait_for_step(run, 3)
    for fault in range(1, faults + 1):
        i, stops, receives = chance.randrange(2), chance.random() < 0.5, chance.random() < 0.5
        mark = tmp_path / f"receiving-{i}"
        mark.unlink(missing_ok=True)
        while receives and not mark.exists():
            assert process.process.poll() is None, process.text()
            time.sleep(0.001)
        time.sleep(chance.random() * (0.05 if receives else 2))
        signal_all(servers[i], signal.SIGSTOP if stops else signal.SIGKILL)
        process.wait_for_count("is lost", fault, 30)
        process.wait_for_step(run, len(rows()) + 2)
        if stops:
            signal_all(servers[i], signal.SIGCONT)
        else:
            servers[i].kill()
            servers[i] = server_of(tmp_path, model, i, ports[i])
        process.wait_for_count("serves again", fault)
        process.wait_for_step(run, len(rows()) + 2)
        print(f"fault {fault}: engine {i}, {'stopped' if stops else 'killed'},", "in a sync" * receives)
    process.process.terminate()
    text = process.finish(60)
    assert text.splitlines()[-1] == "error: interrupted", text
    assert [text.count(f"engine {said}") for said in ("0 is lost", "1 is lost")] == [
        text.count(f"engine {said}") for said in ("0 serves again", "1 serves again")
    ]
    assert [row["step"] for row in rows()] == list(range(1, len(rows()) + 1))
    alive = [row["engines/alive"] for row in rows()]
    assert alive[0] == alive[-1] == 2
    assert 1 in alive
    assert max(row["logprobs/mismatch"] for row in rows()) < MAX_MISMATCH["cpu"]
    seconds = [row["engines/return"] for row in rows() if "engines/return" in row]
    assert len(seconds) == faults
    assert max(seconds) < 30
    print(f"{faults} faults in {len(rows())} steps; serves again after {min(seconds):.2f} to {max(seconds):.2f} s")
    steps = [json.loads(line)["step"] for line in (run / "completions.jsonl").read_text().splitlines()]
    args = train_grpo.Arguments()
    assert {steps.count(row["step"]) for row in rows()} == {args.task.prompts_per_step * args.sampling.group_size}
