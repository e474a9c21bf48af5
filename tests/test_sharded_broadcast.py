"""Two trainer ranks with shards of FSDP2 broadcast them in one group, to two engines with two workers each.

pytest tests/test_sharded_broadcast.py
"""

import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import wait
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fakes import Engine, Receiving, Worker, communicator, materialized, same_bits
from torch.distributed import TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rlhf_utils
from rlhf_utils import LoRAWeight, WeightSender, WeightSyncError
from weight_sync import buckets, receiver
from weight_sync.sending import Packing
from weight_sync.staging import Staging

RANKS, ENGINES, WORKERS = 2, 2, 2
WORLD = RANKS + ENGINES * WORKERS
DTYPES = {"adapted": "bfloat16"}  # of the engines
SYNCS, TENSORS = 3, 6


class Model(torch.nn.Module):
    """Rows that two ranks share unevenly, tensors that are cut, one that rank 1 has no row of."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.odd = torch.nn.Linear(20, 101), torch.nn.Linear(7, 5, bias=False)
        self.one = torch.nn.Parameter(torch.randn(1, 3))


def weights_of(model, sync):
    """What is sent in a sync: the model's tensors, one that every rank has, and one with an adapter."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + sync)
    generator = torch.Generator().manual_seed(sync)
    adapter = torch.randn(3, 20, generator=generator), torch.randn(101, 3, generator=generator)
    weights = dict(model.named_parameters())
    return weights | {
        "plain": torch.full((301,), sync).half(),
        "adapted": LoRAWeight(weights["wide.weight"].detach().clone(), *adapter, 0.7),
    }


def join(port, rank):
    return communicator(TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20)), rank, WORLD)


def worker_of(port, index):
    return Worker(Engine(dtypes=DTYPES), join(port, RANKS + index), WORKERS)


def _rank(rank, port, trainer_port, fault, said):
    buckets.STAGING_BYTES = buckets.STAGING_BUFFERS * 1024  # tensors are cut, and buckets are more than staging buffers
    store = TCPStore("127.0.0.1", trainer_port, is_master=False, timeout=timedelta(seconds=20))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=300))
    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    sender = WeightSender(join(port, rank))
    try:
        for sync in range(1, SYNCS + 1):
            weights = weights_of(model, sync)
            if sync == SYNCS and fault == f"rank {rank} is killed":
                die_at_bucket_3(Packing, "pack")
            if sync == SYNCS and fault == f"rank {rank} has other tensors":
                del weights["one"]
            if sync == SYNCS and fault == "no engine knows a tensor":
                weights["unknown"] = torch.ones(3)
            said.put((f"rank {rank}", sender.send_weights(weights.items()).version))
        said.put((f"rank {rank}", sender.compare_weights(reversed(weights.items()))))
    except Exception as error:
        said.put((f"rank {rank}", str(error)))
    os._exit(0)  # whatever gloo still waits for


def die_at_bucket_3(kind, method):
    """Be killed when this method of any such object is called for that bucket."""
    call = getattr(kind, method)
    setattr(kind, method, lambda it, i, *rest: os.kill(os.getpid(), signal.SIGKILL) if i == 3 else call(it, i, *rest))


def compare_quantized(model, wire, tensors):
    """That all are right, of those that arrive as in the last sync."""
    return {name: 0.5 for name, tensor in tensors if same_bits(tensor, model.weights[name])}


def _worker(port, index, fault, said):
    worker = worker_of(port, index)
    for sync in range(1, SYNCS + 1):
        if sync == SYNCS and fault == "a worker is killed":
            die_at_bucket_3(Staging, "digest")
        answer = worker.receive_weights(timeout=20)
        said.put(("process", answer.get("error", answer.get("version"))))
    if not fault:
        receiver.compare_quantized = compare_quantized
        worker.compare_weights()
        said.put(("process", len(worker.weight_model.weights)))
        wait([worker.weight_links[0].connection], 20)  # for rank 0's end: until then, other workers may have to answer


@pytest.fixture
def said():
    """A queue whose `put` is over when the item is in it, so that a process that is killed then has said it."""
    with mp.get_context("forkserver").Manager() as manager:
        yield manager.Queue()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("", None),
        ("rank 1 is killed", r"trainer rank 1 \(pid \d+ on .*\) died"),
        ("rank 0 is killed", r"trainer rank 0 \(pid \d+ on .*\) died"),
        ("a worker is killed", r"engine 1's worker 0 \(pid \d+ on .*\) died"),
        ("rank 1 has other tensors", r"trainer rank 1 .* sends other tensors than trainer rank 0"),
        ("rank 0 has other tensors", r"trainer rank 1 .* sends other tensors than trainer rank 0"),
        ("no engine knows a tensor", r"preflight, nothing was sent:\n  unknown: unknown"),
    ],
)
def test_shards_reach_every_worker_or_everyone_says_why_not(monkeypatch, said, fault, reason):
    monkeypatch.setattr(receiver, "compare_quantized", compare_quantized)
    group, trainer = (TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2))
    context, apart = mp.get_context("forkserver"), WORKERS  # engine 1's worker 0 is a process
    processes = [
        context.Process(target=_rank, args=(rank, group.port, trainer.port, fault, said)) for rank in range(RANKS)
    ]
    processes.append(context.Process(target=_worker, args=(group.port, apart, fault, said)))
    for process in processes:
        process.start()
    indices = [i for i in range(ENGINES * WORKERS) if i != apart]
    with ThreadPoolExecutor(len(indices)) as threads:
        workers = list(threads.map(lambda i: worker_of(group.port, i), indices))
    receiving = [Receiving(worker, SYNCS) for worker in workers]
    if not fault:
        for thread in receiving:
            threading.Thread(target=lambda t=thread: (t.join(), t.worker.compare_weights())).start()

    killed = {"rank 1 is killed": "rank 1", "rank 0 is killed": "rank 0", "a worker is killed": "process"}.get(fault)
    heard = {name: [] for name in ("rank 0", "rank 1", "process")}
    while any(len(answers) < SYNCS + (not fault) - (name == killed) for name, answers in heard.items()):
        name, answer = said.get(timeout=30)
        heard[name].append(answer)
    for each in (*receiving, *processes):
        each.join(20)
    if not fault:
        assert heard["process"] == [1, 2, 3, TENSORS]
        assert heard["rank 0"] == heard["rank 1"] == [1, 2, 3, ENGINES * WORKERS * TENSORS]
        assert [thread.error for thread in receiving] == [None] * len(receiving)
        model = Model()
        for sync in range(1, SYNCS + 1):
            sent = {name: materialized(weight) for name, weight in weights_of(model, sync).items()}
        sent["adapted"] = sent["adapted"].bfloat16()
        for worker in workers:
            received = worker.weight_model.weights
            assert received.keys() == sent.keys()
            assert all(same_bits(received[name], tensor) for name, tensor in sent.items())
    for name, answers in heard.items():
        assert not fault or name == killed or re.search(reason, answers[-1]), (name, answers)
    # Short buckets fit into sockets' buffers: other workers may have them all before this one dies.
    failed = [each for each in receiving if killed != "process" or each.worker.weight_model.version < SYNCS]
    assert not fault or all(re.search(reason, each.error) for each in failed), [each.error for each in failed]


def _replicated_rank(rank, port, trainer_port):
    store = TCPStore("127.0.0.1", trainer_port, is_master=False, timeout=timedelta(seconds=20))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2 * RANKS, timeout=timedelta(seconds=60))
    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, RANKS), mesh_dim_names=("replicas", "shards")))
    if rank < RANKS:
        WeightSender(join(port, rank)).send_weights(model.named_parameters())
    dist.barrier()
    os._exit(0)  # whatever gloo still waits for


def test_ranks_of_one_replica_send_for_all():
    group, trainer = (TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2))
    context = mp.get_context("forkserver")
    ranks = [context.Process(target=_replicated_rank, args=(i, group.port, trainer.port)) for i in range(2 * RANKS)]
    for process in ranks:
        process.start()
    workers = range(ENGINES * WORKERS)
    with ThreadPoolExecutor(len(workers)) as threads:
        receiving = list(threads.map(lambda i: Receiving(worker_of(group.port, i)), workers))
    for each in (*receiving, *ranks):
        each.join(60)
    assert [process.exitcode for process in ranks] == [0] * len(ranks)
    assert [thread.error for thread in receiving] == [None] * len(receiving)
    for thread in receiving:
        received = thread.worker.weight_model.weights
        assert all(same_bits(received[name], tensor.detach()) for name, tensor in Model().named_parameters())


def test_rank_without_a_communicator_says_what_to_do():
    with pytest.raises(WeightSyncError, match="each rank calls stateless_init_process_group with its own rank, and"):
        WeightSender(None)


@pytest.mark.parametrize(
    ("ranks", "offset", "world_size", "role"),
    [
        (1, 1, 3, "engine worker 1"),
        (1, 1, 5, "engine 0's worker 1"),
        (1, 3, 5, "engine 1's worker 1"),
        (2, 2, 4, "engine worker 1"),
        (2, 4, 6, "engine 1's worker 1"),
    ],
)
def test_worker_of_several_engines_is_called_by_its_engine(monkeypatch, ranks, offset, world_size, role):
    from vllm.distributed import parallel_state

    def join(*arguments):
        joined.append(arguments)
        return SimpleNamespace(world_size=world_size, group=None)

    joined, called = [], []
    monkeypatch.setattr(parallel_state, "get_world_group", lambda: SimpleNamespace(rank=1, world_size=WORKERS))
    monkeypatch.setattr(rlhf_utils, "stateless_init_process_group", join)
    monkeypatch.setattr(
        rlhf_utils, "connect_group", lambda _, links, role_beside, *__: called.append(role_beside(ranks))
    )
    worker = Worker(Engine(), SimpleNamespace(rank=0, world_size=1))
    worker.init_weight_update_group("host", 1, offset, world_size)
    assert joined == [("host", 1, 1 + offset, world_size, worker.device)]
    worker.receive_weights()
    assert called == [role]
