"""Two hosts on one machine, with a cable between them that can be cut: network namespaces, which root can make.

pytest tests/test_nodes.py -m slow     a sync between them
pytest tests/test_nodes.py -m long     a run on a Ray cluster of the two
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, Script, cpu_only, shared_memory_of, title_of

pytestmark = cpu_only
FAULT_SECONDS = 30
A, B = "10.77.0.1", "10.77.0.2"
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "eth0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
# How soon Ray gives a silent node up: in 15 s instead of 65.
HEALTH = {"RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "2000"}


class Hosts:
    """Network namespaces, named by the address that each has on its end of the cable."""

    def __init__(self):
        self.name = {host: f"rlhf-{os.getpid()}-{host}" for host in (A, B)}
        made = subprocess.run(["ip", "netns", "add", self.name[A]], check=False, capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"cannot make network namespaces: {made.stderr.strip()}")
        ip(f"netns add {self.name[B]}")
        ip(f"-n {self.name[A]} link add eth0 type veth peer name eth0 netns {self.name[B]}")
        for host, name in self.name.items():
            ip(f"-n {name} addr add {host}/24 dev eth0")
            ip(f"-n {name} link set lo up")
        self.plug("up")

    def plug(self, state: str) -> None:
        """The cable's end at host B: "up" or "down"."""
        ip(f"-n {self.name[A]} link set eth0 up")
        ip(f"-n {self.name[B]} link set eth0 {state}")

    def on(self, host: str, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.name[host], *command]

    def processes(self, host: str) -> list[psutil.Process]:
        return [psutil.Process(int(pid)) for pid in ip(f"netns pids {self.name[host]}").split()]

    def switch_off(self, host: str) -> None:
        processes = self.processes(host)
        shared_memory = shared_memory_of(processes)
        for process in processes:
            process.kill()
        for file in shared_memory:
            Path(file).unlink(missing_ok=True)  # the two hosts have one /dev/shm


def ip(command: str) -> str:
    return subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def hosts():
    hosts = Hosts()
    yield hosts
    for host in (A, B):
        hosts.switch_off(host)
        ip(f"netns del {hosts.name[host]}")


ENDS = """
import sys, torch, rlhf_utils
from datetime import timedelta
from torch.distributed import TCPStore
from weight_sync import buckets
from fakes import Engine, Worker, communicator

buckets.STAGING_BYTES = 64 << 20
address, rank = sys.argv[1], int(sys.argv[2])
store = TCPStore(address, 29500, is_master=not rank, wait_for_workers=False, timeout=timedelta(seconds=20))
group = communicator(store, rank, 2)
if rank:
    engine = Engine()
    engine.reload = lambda batches, sent: [print("loading", flush=True) for _ in batches]
    print(Worker(engine, group).receive_weights(20)["error"], flush=True)
else:
    whole = torch.zeros(5 << 20)
    try:
        rlhf_utils.WeightSender(group).send_weights((str(i), whole[i : i + (4 << 20)]) for i in range(1000))  # 16 GB
    except rlhf_utils.WeightSyncError as error:
        print(error, flush=True)
"""


@pytest.mark.slow
def test_cut_cable_ends_a_sync_on_both_hosts(hosts):
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    trainer, worker = (
        subprocess.Popen(
            hosts.on(host, sys.executable, "-c", ENDS, A, rank), env=environment, stdout=subprocess.PIPE, text=True
        )
        for host, rank in ((A, "0"), (B, "1"))
    )
    assert worker.stdout.readline() == "loading\n"
    hosts.plug("down")
    cut = time.monotonic()
    (error,) = trainer.stdout.readline().splitlines()
    assert "engine worker 0" in error and "cannot be reached over the network" in error
    error = next(line for line in worker.stdout if line != "loading\n")
    assert "the trainer" in error and "cannot be reached over the network" in error
    assert time.monotonic() - cut < FAULT_SECONDS


@pytest.mark.long
def test_run_over_two_nodes_ends_with_the_cable_and_resumes(hosts, tmp_path):
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as ray_folder:  # a short path: sockets lie below it
        start_ray(
            hosts, A, ray_folder, "--head", "--port=6379", f"--temp-dir={ray_folder}", "--include-dashboard=false"
        )
        start_ray(hosts, B, ray_folder, f"--address={A}:6379")

        run = start_run(hosts, tmp_path, "--output", "run", "--save-every", "1", "--steps", "10000")
        run.wait_for("step     2/")
        where = {title: place_of(hosts, title) for title in ("ray::Trainer", "ray::Engine", "VLLM::EngineCore")}
        assert where["ray::Trainer"] != where["ray::Engine"] == where["VLLM::EngineCore"], where
        hosts.plug("down")
        cut = time.monotonic()
        text = run.finish()
        print(text)
        assert time.monotonic() - cut < FAULT_SECONDS
        psutil.wait_procs([p for p in hosts.processes(A) if "VLLM" in title_of(p)], timeout=20)  # Ray ends them
        time.sleep(2)
        run.assert_failed_cleanly(text, [])
        assert "with its Ray node" in text.splitlines()[-1] or "over the network" in text.splitlines()[-1]

        hosts.switch_off(B)
        hosts.plug("up")
        start_ray(hosts, B, ray_folder, f"--address={A}:6379")
        step = max(int(path.name[-6:]) for path in (tmp_path / "run").glob("checkpoint-*"))
        two = "--trainers", "2", "--engines", "2"
        text = start_run(hosts, tmp_path, "--resume", "run", *two, "--steps", str(step + 2)).finish()
        assert text.splitlines()[-1].startswith("OK: "), text
        for host in (A, B):
            assert not [
                p for p in hosts.processes(host) if any(n in title_of(p) for n in ("VLLM", "Trainer", "Engine"))
            ]


def start_ray(hosts: Hosts, host: str, folder: str, *arguments: str) -> None:
    """A Ray node with one CPU, and on host B with a folder of its own under the path that host A gives it."""
    ray = [os.path.join(os.path.dirname(sys.executable), "ray"), "start", f"--node-ip-address={host}", "--num-cpus=1"]
    alone = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs tmpfs {folder} && exec "$@"', "sh"] if host == B else []
    environment = os.environ | ENVIRONMENT | HEALTH
    subprocess.run(hosts.on(host, *alone, *ray, *arguments), env=environment, check=True, capture_output=True)


def start_run(hosts: Hosts, folder, *arguments: str) -> Script:
    options = ["--topology", "separate", "--ray-address", f"{A}:6379", "--tensor-parallel-size", "1"]
    command = hosts.on(A, sys.executable, str(ROOT / "train_grpo.py"), *options, *arguments)
    return Script(folder, *command, **ENVIRONMENT)


def place_of(hosts: Hosts, title: str) -> str:
    (host,) = {host for host in (A, B) for process in hosts.processes(host) if title in title_of(process)}
    return host
