"""What the tests share: a way to run a script as a user would, what it leaves, and fixtures."""

import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import psutil
import pytest
import torch

cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="drives vLLM's CPU build")
REQUIRE_GPU = os.environ.get("REQUIRE_GPU") == "1"  # a GPU test that cannot run is a failure
os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")  # importing TRL would set it to ERROR, for what tests start as well
# Two tests at a time share the cores: a thread that waits for another leaves its core, instead of spinning on it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# In the background of a shell Ctrl-C is ignored, which the scripts would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
ROOT = Path(__file__).resolve().parent.parent
SYNC = ("rlhf_utils.py", "weight_sync")  # all that the sync needs
HANGS_SECONDS = 600  # a run that takes longer hangs; slow machines, with two runs on two cores, need a third of it
sys.path.insert(0, str(ROOT))
# Ranks and workers of tests are forked from a process that has imported, once, what takes seconds in each.
multiprocessing.set_forkserver_preload(
    ["torch._dynamo", "torch.distributed.fsdp", "transformers.modeling_utils", "peft", "vllm.distributed.utils"]
)


def arguments_of(script, **values):
    """The arguments of this script, with these values of flags."""
    from trainer.flags import flags_in, with_values

    assert values.keys() <= flags_in(script.Arguments).keys()
    return with_values(script.Arguments(), values)


def settings_of(folder, **settings):
    """The flags of the default task with these settings, which have no flags."""
    text = f"from trainer.tasks.uppercase import DEFAULTS\n\nDEFAULTS = DEFAULTS | {settings!r}\n"
    (folder / "with_settings.py").write_text(text)
    return ["--task", "with_settings"]


@pytest.fixture
def flags(monkeypatch):
    """The arguments of a script with these flags."""
    from trainer.run.arguments import parse

    def parse_flags(script, *given):
        monkeypatch.setattr("sys.argv", ["script.py", *map(str, given)])
        return parse(script.Arguments, script.__doc__)

    return parse_flags


def task_of(args):
    """The task of a script that takes tools, with these arguments. Rewards are computed in this process."""
    from fakes import local_rewards

    from trainer.tasks.task import load_task

    task = load_task(args.task, args.run.seed, args.run.steps, args.tools)
    task.rewards = local_rewards(task.rewards)
    return task


def pytest_runtest_setup(item):
    """Skip a test whose GPUs are not there: `gpu(count)` says how many it needs, `or_cpu` that it also runs on none."""
    for marker in item.iter_markers("gpu"):
        (wanted,), there = marker.args, torch.cuda.device_count()
        if there < wanted and not (there == 0 and marker.kwargs.get("or_cpu") and not REQUIRE_GPU):
            stop = pytest.fail if REQUIRE_GPU else pytest.skip
            stop(f"needs {wanted} GPUs, there are {there}")


class Script:
    """A command that runs a script of this project, with all that it started. It ends with its test."""

    running: ClassVar[list["Script"]] = []

    def __init__(self, folder: Path, *command: str, **environment: str):
        self.temporary = Path(tempfile.mkdtemp(prefix="t-"))  # a short path: sockets lie below it
        self.output = self.temporary / "output.txt"
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=os.environ | {"TMPDIR": str(self.temporary)} | environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.running.append(self)

    def finish(self, timeout: float = HANGS_SECONDS) -> str:
        """Wait for the end and return what was printed."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"not done after {timeout:.0f} s:\n{self.text()[-3000:]}")
        return self.text()

    def kill(self) -> None:
        """End it now, with all that it started; nothing happens if it has ended."""
        if self.process.poll() is None:
            for process in [*self.descendants(), self.process]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.wait()

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_for(self, text: str, timeout: float = HANGS_SECONDS) -> None:
        """Wait until this has been printed."""
        self.wait_for_count(text, 1, timeout)

    def wait_for_count(self, text: str, count: int, timeout: float = HANGS_SECONDS) -> None:
        """Wait until this has been printed so many times."""
        deadline = time.monotonic() + timeout
        while self.text().count(text) < count:
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.05)

    def wait_for_step(self, run: Path, step: int, timeout: float = HANGS_SECONDS) -> None:
        metrics, deadline = run / "metrics.jsonl", time.monotonic() + timeout
        while not metrics.exists() or len(metrics.read_text().splitlines()) < step:
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.05)

    def descendant(self, name: str) -> psutil.Process:
        """The one process whose title begins so."""
        (process,) = (p for p in psutil.Process(self.process.pid).children(recursive=True) if name in title_of(p))
        return process

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def assert_failed_cleanly(self, text: str, family: list[psutil.Process | int]) -> None:
        """One message, an exit status that says so, and nothing left running."""
        assert self.process.returncode not in (0, None), text
        assert "error: " in text.splitlines()[-1], text
        assert [p for p in family if is_alive(p)] == []


def is_alive(process: psutil.Process | int) -> bool:
    """Whether this process, or the one with this number, still runs. A killed orphan does not, but is a zombie until
    PID 1 has waited for it: on a busy machine, that takes a moment."""
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def shared_memory_of(processes: list[psutil.Process]) -> set[str]:
    """Paths of the files in /dev/shm that these processes have mapped."""
    inodes = set()
    for process in processes:
        try:
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        except OSError:
            continue  # it has ended
        # By inode: a semaphore's file is mapped under a temporary name, and renamed.
        inodes |= {int(line.split()[4]) for line in lines if " /dev/shm/" in line}
    return {entry.path for entry in os.scandir("/dev/shm") if entry.inode() in inodes}


def assert_removed(files: set[str]) -> None:
    """These files go within seconds: resource trackers end after the run."""
    deadline = time.monotonic() + 30
    while left := [file for file in files if os.path.exists(file)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def title_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def code_of(document: str) -> list[str]:
    """The Python blocks of a document."""
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.S)


def copy(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        path = ROOT / name
        copied = shutil.copytree if path.is_dir() else shutil.copy
        copied(path, folder / name)
    return folder


def metrics_of(run: Path) -> list[dict]:
    """The lines of a run folder's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def timeless(run: Path) -> list[dict]:
    """The metrics of a run, but for those that depend on time and on the machine."""
    machine = ("time/", "tokens/", "sync/", "memory/", "perf/", "critic/perf/")
    return [{name: row[name] for name in row if not name.startswith(machine)} for row in metrics_of(run)]


def timeline_of(run: Path) -> list[dict]:
    """The spans of a run folder's timeline.json, in the order of their beginnings: each with its `process`."""
    events = json.loads((run / "timeline.json").read_text())
    processes = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [event | {"process": processes[event["pid"]]} for event in events if event["ph"] == "X"]
    assert len(spans) + len(processes) == len(events)
    return sorted(spans, key=lambda span: span["ts"])


def spans_of(spans: list[dict], process: str, name: str = "") -> list[tuple[float, float]]:
    """When the spans of this process, and of this name, began and ended, in microseconds."""
    chosen = [span for span in spans if span["process"] == process and span["name"].startswith(name)]
    return [(span["ts"], span["ts"] + span["dur"]) for span in chosen]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The path of the built-in model."""
    from trainer.tasks.tiny_model import build_tiny_model

    return str(build_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def script(tmp_path):
    """Start a script: script("train_grpo.py", "--steps", 3, CUDA_VISIBLE_DEVICES="0") in a folder that has nothing but
    a module `trainer` of the user's own, which no process of a run may take for ours."""
    (tmp_path / "trainer.py").write_text("raise SystemExit('not ours')\n")

    def start(name: str, *arguments, **environment: str) -> Script:
        return Script(tmp_path, sys.executable, str(ROOT / name), *map(str, arguments), **environment)

    return start


@pytest.fixture(autouse=True)
def no_script_outlives_its_test():
    """A test that fails leaves no run to slow the ones after it; and none leaves its files in the temporary folder."""
    yield
    while Script.running:
        script = Script.running.pop()
        script.kill()
        shutil.rmtree(script.temporary, ignore_errors=True)


@pytest.fixture
def shared_memory_file():
    """A file in /dev/shm that no run has made."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(b"of another program")
        file.flush()
        yield Path(file.name)


@pytest.fixture
def torch_arithmetic(monkeypatch):
    """Torch's arithmetic in the place of the kernels of vLLM that an exact trainer uses: they want a GPU."""
    from trainer.learning import exact, exact_mlp

    def rms_norm(x, weight, eps, first):
        x = x.float()
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight).to(weight.dtype)

    def rotate(q, k, positions, table):
        positions = positions.view(-1, *positions.shape[-2:])[0]  # of M-RoPE's three equal ones, the first
        cos, sin = (half.repeat(1, 2)[positions][:, None] for half in table.chunk(2, -1))
        halves = (torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1) for x in (q, k))
        return tuple(x * cos + half * sin for x, half in zip((q, k), halves, strict=True))

    def attend(q, k, v, scale, window):
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        out = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=seen, scale=scale, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None

    def attend_backward(grad, q, k, v, out, lse, scale, window):
        with torch.enable_grad():
            own = [x.detach().requires_grad_() for x in (q, k, v)]
            attend(*own, scale, window)[0].backward(grad)
        return tuple(x.grad for x in own)

    def table(config, device):
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        config = config.get_text_config()
        positions = torch.arange(config.max_position_embeddings)[None]
        cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
        half = cos.shape[-1] // 2
        return torch.cat((cos[0, :, :half], sin[0, :, :half]), -1)

    def route(logits, k, renormalizes):
        weights, chosen = logits.float().softmax(-1).topk(k)
        return weights / weights.sum(-1, keepdim=True) if renormalizes else weights, chosen.int()

    def compute_experts(x, gate_up, down, weights, chosen):
        gate, up = torch.einsum("tn,tkin->tki", x, gate_up[chosen]).chunk(2, -1)
        outputs = torch.einsum("tki,tkni->tkn", torch.nn.functional.silu(gate) * up, down[chosen])
        return (outputs * weights[..., None]).sum(1).to(x.dtype)

    def logprobs(logits, targets, temperature, ids=None):
        logits = logits.float() / temperature
        if ids is not None:
            logits = torch.full_like(logits, -torch.inf).scatter(1, ids, logits.gather(1, ids))
        return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]

    monkeypatch.setattr(exact, "rms_norm_kernel", rms_norm)
    monkeypatch.setattr(exact_mlp, "routing_kernel", route)
    monkeypatch.setattr(exact_mlp, "experts_kernel", compute_experts)
    monkeypatch.setattr(exact, "rotary_kernel", rotate)
    monkeypatch.setattr(exact, "attention_kernel", attend)
    monkeypatch.setattr(exact, "attention_backward_kernel", attend_backward)
    monkeypatch.setattr(exact, "rotary_table", table)
    monkeypatch.setattr(exact, "logprob_kernel", logprobs)


@pytest.fixture
def load(tmp_path, monkeypatch):
    """A task as flags and settings describe it, in an empty working folder whose modules are this test's. If they name
    neither a reward nor a task, there is a `reward`."""
    from train_grpo import Arguments
    from trainer.flags import with_values
    from trainer.run.arguments import parse

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    modules = set(sys.modules)

    def load_from_flags(*flags, reward="trainer.tasks.uppercase:uppercase", **settings):
        own = ("--reward", reward) if reward and not {"--reward", "--task"} & set(flags) else ()
        monkeypatch.setattr(sys, "argv", ["train_grpo.py", *map(str, flags), *own])
        return task_of(with_values(parse(Arguments, "a test"), settings))

    yield load_from_flags
    for name in sys.modules.keys() - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
