"""The wire of a trainer and a worker on one device, without vLLM: shared memory, and vLLM's colocation protocols.

pytest tests/test_shared_memory.py
"""

import contextlib
import gc
import os
import socket
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.multiprocessing as mp
from conftest import shared_memory_of
from fakes import ColocatedWorker, Engine, PlainSender, Receiving, materialized, random_tensors, same_bits
from torch.distributed import TCPStore

from rlhf_utils import (
    SharedMemoryChannel,
    WeightSender,
    WeightSyncError,
    rebuild_ipc,
    share_tensor,
)
from weight_sync import buckets, channels, example_protocols, ranks
from weight_sync.engine_model import EngineModel
from weight_sync.groups import shared_buffer
from weight_sync.lora import LoRAWeight
from weight_sync.ranks import Ranks

CPU = torch.device("cpu")


class LoadingEngine(Engine, EngineModel):
    """Needs some tensors, which the protocols of vLLM's examples bring, and refuses some."""

    def __init__(self, needed, refused=(), fail_at=None):
        super().__init__(fail_at=fail_at)
        self.needed, self.refused, self.collected = set(needed), refused, {}

    def trace(self, metadata):
        for name, _, _ in metadata:
            if name in self.refused:
                raise ValueError(f"cannot load {name}")
        writes = {name: [SimpleNamespace(elements=name, value=None)] for name in self.needed}
        return {name: writes.get(name, []) for name, _, _ in metadata}, []

    def missing(self, expected):
        return self.needed - expected.keys()


def test_adapters_that_each_sync_wraps_anew_take_one_handshake(monkeypatch):
    channel = SharedMemoryChannel(CPU)
    receiving, sender = Receiving(ColocatedWorker(Engine(), channel.handles), syncs=3), WeightSender(channel)
    handshakes, preflight = [], receiving.worker.weight_model.preflight
    monkeypatch.setattr(
        receiving.worker.weight_model, "preflight", lambda metadata: handshakes.append(metadata) or preflight(metadata)
    )
    tensors = torch.randn(6, 4).t(), torch.randn(2, 6), torch.randn(4, 2)  # a base that does not lie in one piece
    for scaling in (0.5, 0.5, 2.0):
        tensors[1].add_(1)
        sender.send_weights({"w": LoRAWeight(*tensors, scaling)}.items())
        expected = materialized(LoRAWeight(*tensors, scaling))
        assert same_bits(receiving.worker.weight_model.weights["w"], expected)
    receiving.join(10)
    assert len(handshakes) == 1


@pytest.mark.parametrize("freed", [True, False])
def test_memory_that_the_trainer_has_freed_is_not_read(freed):
    """FSDP2 frees the storage of gathered weights, and then has other tensors by the same names."""
    channel = SharedMemoryChannel(CPU)
    receiving, sender = Receiving(ColocatedWorker(ReplayingEngine(), channel.handles), syncs=3), WeightSender(channel)
    first = torch.randn(1 << 20)
    for _ in range(2):
        assert sender.send_weights([("w", first)]).loader == "replay"
    first.untyped_storage().resize_(0)
    if freed:
        with pytest.raises(WeightSyncError, match=r"^w \(Tensor\) has no memory, or none any more$"):
            sender.send_weights([("w", first)])
    else:
        assert sender.send_weights([("w", torch.randn(1 << 20))]).loader == "replay"
    receiving.join(10)


def test_long_path_of_the_folder_for_temporary_files_is_not_a_sockets(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("long" * 20)))
    (path,) = SharedMemoryChannel(CPU).handles.values()
    assert path.startswith("/tmp/weight-sync-")


def test_worker_without_a_trainer_beside_it_says_so():
    answer = ColocatedWorker(Engine(), {"GPU-1": "somewhere"}).receive_weights(timeout=5)
    assert answer == {"error": "no trainer rank is on cpu:0: they are on ['GPU-1']"}


def test_memory_of_a_former_shared_buffer_cannot_be_mapped():
    buffer = shared_buffer(64, CPU)
    share_tensor(buffer)
    with pytest.raises(WeightSyncError, match="only contiguous views of a shared_buffer can"):
        share_tensor(buffer.view(8, 8).t())
    address = buffer.data_ptr()
    del buffer
    with pytest.raises(WeightSyncError, match="only contiguous views of a shared_buffer can"):
        storage = SimpleNamespace(data_ptr=lambda: address)  # what torch then put there
        share_tensor(SimpleNamespace(is_cuda=False, untyped_storage=lambda: storage))


@pytest.mark.parametrize("workers", [1, 2])
def test_sync_delivers_every_bit(workers):
    channel = SharedMemoryChannel(CPU, workers)
    receivings = [Receiving(ColocatedWorker(Engine(), channel.handles), syncs=3) for _ in range(workers)]
    sender = WeightSender(channel)
    for sync in range(1, 4):
        tensors = random_tensors(seed=sync)
        if sync == 3:  # another set of parameters: agreed anew
            tensors = dict(list(tensors.items())[:7])
        assert sender.send_weights(tensors.items()).version == sync
        for receiving in receivings:
            weights = receiving.worker.weight_model.weights
            assert all(same_bits(weights[name], tensor) for name, tensor in tensors.items())
    for receiving in receivings:
        receiving.join(10)
        assert receiving.error is None


@pytest.mark.parametrize("late", [False, True])
def test_worker_that_fails_beside_another_ends_the_sync_of_both(late):
    channel = SharedMemoryChannel(CPU, workers=2)
    workers = [ColocatedWorker(Engine(), channel.handles), ColocatedWorker(Engine(fail_at="b"), channel.handles)]
    sender = WeightSender(channel)

    def map_memory():
        while sender.links:
            time.sleep(0.01)
        raise RuntimeError("the trainer has freed it")

    if late:
        workers[0]._open_staging = map_memory
    receivings = [Receiving(worker) for worker in workers]
    with pytest.raises(WeightSyncError, match="ValueError: cannot load b"):
        sender.send_weights([(name, torch.ones(4)) for name in "abc"])
    for receiving in receivings:
        receiving.join(10)
        assert "ValueError: cannot load b" in receiving.error
    assert not workers[1].check_weights_changed()


def test_fifty_syncs_leave_memory_and_files_as_they_were():
    channel = SharedMemoryChannel(CPU)
    assert not os.stat(channel.folder).st_mode & 0o077  # nobody else reaches the socket, nor the pickles on it
    receiving = Receiving(ColocatedWorker(Engine(), channel.handles), syncs=60)
    sender, tensors = WeightSender(channel), {"w": torch.randn(1 << 20), "b": torch.randn(7)}
    process = psutil.Process()
    shared = shared_memory_of([process])
    for _ in range(10):
        sender.send_weights(tensors.items())
    gc.collect()  # what earlier tests left
    before = process.memory_info().rss, process.num_fds()
    for _ in range(50):
        tensors["w"] += 1
        sender.send_weights(tensors.items())
        assert same_bits(receiving.worker.weight_model.weights["w"], tensors["w"])
    assert process.memory_info().rss - before[0] < 64 << 20  # 50 copies of the weights are 200 MiB
    assert process.num_fds() <= before[1]
    assert shared_memory_of([process]) <= shared
    assert not os.path.exists(channel.folder)


def test_channel_that_nobody_used_leaves_no_folder():
    channel = SharedMemoryChannel("cpu")
    folder = channel.folder
    del channel
    assert not os.path.exists(folder)


def test_file_of_a_shared_buffer_closes_with_its_tensor():
    buffer = shared_buffer(1 << 12, CPU)
    _, (path, *_) = share_tensor(buffer)
    assert "weight sync" in os.readlink(path)
    del buffer
    assert not (os.path.lexists(path) and "weight sync" in os.readlink(path))  # it may be another's by now


def test_worker_that_raises_ends_the_sync_with_its_traceback():
    channel = SharedMemoryChannel(CPU)
    worker = ColocatedWorker(Engine(fail_at="b"), channel.handles)
    receiving = Receiving(worker)
    sender = WeightSender(channel)
    with pytest.raises(WeightSyncError, match=r"engine worker 0 (.|\n)*ValueError: cannot load b"):
        sender.send_weights([(name, torch.ones(4)) for name in "abc"])
    receiving.join(10)
    assert "ValueError: cannot load b" in receiving.error
    with pytest.raises(WeightSyncError, match="session is closed: make a new"):
        sender.send_weights([("a", torch.ones(4))])
    assert "the trainer is gone or on another node, or its channel was used" in worker.receive_weights(5)["error"]


def test_absent_worker_is_an_error_that_names_the_device(monkeypatch):
    monkeypatch.setattr(channels, "CONNECT_SECONDS", 0.2)
    with pytest.raises(WeightSyncError, match=r"1 of 1 engine workers on cpu:3 did not connect within 0\.2 s"):
        WeightSender(SharedMemoryChannel(torch.device("cpu", 3))).send_weights([("w", torch.ones(3))])


def test_connected_worker_is_told_that_its_trainer_left():
    channel = SharedMemoryChannel(CPU)
    receiving = Receiving(ColocatedWorker(Engine(), channel.handles))
    time.sleep(0.2)  # it connects meanwhile
    WeightSender(channel).close()
    receiving.join(10)
    assert "the trainer" in receiving.error or "the other side died" in receiving.error


def test_strangers_do_not_prolong_the_wait_for_the_worker(monkeypatch):
    monkeypatch.setattr(channels, "CONNECT_SECONDS", 0.5)
    channel, started = SharedMemoryChannel(CPU), time.monotonic()

    def knock():
        while os.path.exists(channel.folder):
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(channel.handles["cpu:0"])
            time.sleep(0.1)

    knocking = threading.Thread(target=knock)
    knocking.start()
    threading.Timer(5, channel.close, args=(None,)).start()
    with pytest.raises(WeightSyncError, match=r"1 of 1 engine workers on cpu:0 did not connect within 0\.5 s"):
        channel.accept([], Ranks())
    assert time.monotonic() - started < 3
    channel.close(None)
    knocking.join()


def test_calls_that_timed_out_do_not_disturb_the_next():
    channel, tensors = SharedMemoryChannel(CPU), {"w": torch.ones(4)}
    worker = ColocatedWorker(Engine(), channel.handles)
    for _ in range(3):  # more than the channel's queue holds
        answer = worker.receive_weights(timeout=0.2)
        assert answer["error"].endswith(("did not answer within 0.2 s", "no trainer called send_weights within 0.2 s"))
    receiving = Receiving(worker)
    assert WeightSender(channel).send_weights(tensors.items()).version == 1
    receiving.join(5)
    assert receiving.error is None
    assert same_bits(worker.weight_model.weights["w"], tensors["w"])


def _trainer_that_dies(handles):
    channel = SharedMemoryChannel(CPU)
    handles.put(channel.handles)
    sender = WeightSender(channel)
    sender.send_weights([("w", torch.ones(1000))])
    os._exit(1)


def test_trainer_that_dies_ends_the_workers_wait():
    context = mp.get_context("forkserver")
    handles = context.Queue()
    process = context.Process(target=_trainer_that_dies, args=(handles,))
    process.start()
    worker = ColocatedWorker(Engine(), handles.get(timeout=60))
    receiving = Receiving(worker, syncs=2)
    receiving.join(30)
    assert "the trainer (pid" in receiving.error
    assert "died" in receiving.error
    process.join()


class ReplayingEngine(Engine):
    """Replays, to this digest, unless it refuses to."""

    compared = ()

    def __init__(self, refusal=None, replayed=0):
        super().__init__()
        self.refusal, self.replayed = refusal, replayed

    def record(self, steps, open_staging):
        return self.refusal

    def state_digest(self):
        return 0

    def replay(self, arrivals):
        list(arrivals)
        return self.replayed


def _ranks_on_two_nodes(rank, shards, failures):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    socket.gethostname = lambda: f"node{rank}"
    with pytest.raises(WeightSyncError, match=f"rank {rank} is on the node node{rank}, and .* on node{1 - rank}: "):
        WeightSender(SharedMemoryChannel(CPU)).send_weights(shards.items())
    channel = SharedMemoryChannel(CPU)
    receiving = Receiving(ColocatedWorker(Engine(), channel.handles))
    replicas = init_device_mesh("cpu", (2, 1))  # a replica on each node
    WeightSender(channel).send_weights([("w", distribute_tensor(torch.ones(8), replicas, [Replicate(), Shard(0)]))])
    if not receiving.worker.weight_model.weights["w"].equal(torch.ones(8)):
        failures.put(rank)


def _rank_without_the_others(shards, failures):
    ranks.CONNECT_SECONDS, channel = 0.5, SharedMemoryChannel(CPU)
    receiving = Receiving(ColocatedWorker(ReplayingEngine(), channel.handles))
    with pytest.raises(WeightSyncError, match="and send_weights on every rank that has shards"):
        WeightSender(channel).send_weights(shards.items())
    receiving.join(10)
    if "the other side died" not in receiving.error:
        failures.put(receiving.error)


def _sharded_rank(rank, port, failures, done):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    timeout = timedelta(seconds=20)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, timeout=timeout, rank=rank, world_size=2)
    buckets.STAGING_BYTES = 1024  # `w` has 8,400 bytes: it is cut
    channel = SharedMemoryChannel(CPU)
    receiving = Receiving(ColocatedWorker(Engine(dtypes={"w": "bfloat16"}), channel.handles), syncs=5)
    # Uneven shards, two without rows on rank 1, tensors that are cut, one that is not sharded, two with adapters.
    whole = {"a": torch.randn(1), "w": torch.randn(101, 20), "b": torch.randn(7), "u": torch.randn(2, 3, 100)}
    whole |= {"e": torch.randn(1), "h": torch.randn(5, 3).half(), "plain": torch.randn(301)}
    for tensor in whole.values():
        dist.broadcast(tensor, src=0)
    mesh, sender = init_device_mesh("cpu", (2,)), WeightSender(channel)
    shards = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items() if name != "plain"}
    shards["plain"] = whole["plain"]
    torch.manual_seed(0)
    for name, transposed in (("w", False), ("t", True)):
        base, lora_A, lora_B = torch.randn(101, 20), torch.randn(3, 20), torch.randn(101, 3)
        base, adapter = (base.T.contiguous() if transposed else base), (lora_A, lora_B, 0.7, transposed)
        shards[name] = LoRAWeight(distribute_tensor(base, mesh, [Shard(0)]), *adapter)
        whole[name] = materialized(LoRAWeight(base, *adapter))
    shards["turned"] = distribute_tensor(whole["w"].t().contiguous(), mesh, [Shard(1)]).t()  # not in one piece
    whole["turned"] = whole["w"].clone()
    local, plain = shards["u"]._local_tensor, whole["plain"]
    moved = local + 1 if rank else local  # on one rank, which has row 1, it comes to lie elsewhere
    sharded = distribute_tensor(plain, mesh, [Shard(0)])  # as FSDP2's parameters after a forward pass, and before
    states = (local, plain), (local, plain), (moved, plain), (moved, sharded), (moved, plain)
    for i, (shards["u"]._local_tensor, shards["plain"]) in enumerate(states):
        whole["u"][1] += i == 2
        sender.send_weights(shards.items())
        received = receiving.worker.weight_model.weights
        if not all(same_bits(received[n], t.bfloat16() if n == "w" else t) for n, t in whole.items()):
            failures.put(rank)
    for engines, loader in (
        ([ReplayingEngine(), ReplayingEngine()], "replay"),
        ([ReplayingEngine(refusal="not here"), ReplayingEngine()], "reload (not here)"),
        ([ReplayingEngine(), ReplayingEngine(refusal="nor here")], "reload (nor here)"),
        ([ReplayingEngine(refusal="not here"), ReplayingEngine(refusal="nor here")], "reload (not here)"),
        ([ReplayingEngine(), ReplayingEngine(replayed=1)], "reload (replay did not reproduce it bit for bit)"),
    ):
        channel = SharedMemoryChannel(CPU)
        receiving = Receiving(ColocatedWorker(engines[rank], channel.handles), syncs=2)
        sender = WeightSender(channel)
        for shards["u"]._local_tensor in (local, moved):
            report = sender.send_weights(shards.items())
            if report.loader != loader:
                failures.put((rank, report))
        receiving.join(10)
    _ranks_on_two_nodes(rank, shards, failures)
    if rank == 0:  # the other rank never comes: it has failed, say
        _rank_without_the_others(shards, failures)
        done.set()
    done.wait(10)
    dist.destroy_process_group()


def test_workers_beside_two_ranks_get_both_shards_and_load_alike():
    context, store = mp.get_context("forkserver"), TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    failures, done = context.Queue(), context.Event()
    ranks = [context.Process(target=_sharded_rank, args=(rank, store.port, failures, done)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 0]
    assert failures.empty(), failures.get()


def test_buckets_over_zmq(tmp_path):
    tensors = random_tensors()
    worker = ColocatedWorker(LoadingEngine(tensors))
    sender = PlainSender(f"ipc://{tmp_path}/s", tensors, 64 << 10)
    worker.update_weights_from_ipc({"cpu:0": f"ipc://{tmp_path}/s", "cpu:1": "ipc://elsewhere"})
    sender.join(10)
    assert all(same_bits(worker.weight_model.weights[name], tensor) for name, tensor in tensors.items())
    assert len(sender.answers) > 4
    assert set(sender.answers) == {b""}


@pytest.mark.parametrize(("fault", "good"), [({"refused": "b"}, 2), ({"fail_at": "b"}, 4)])
def test_failure_over_zmq_is_answered_with_the_traceback(tmp_path, fault, good):
    worker = ColocatedWorker(LoadingEngine("abc", **fault))
    sender = PlainSender(f"ipc://{tmp_path}/s", {name: torch.ones(4) for name in "abc"}, buffer_bytes=256)
    with pytest.raises(ValueError, match="cannot load b"):
        worker.update_weights_from_ipc({"cpu:0": f"ipc://{tmp_path}/s"})
    sender.join(10)  # it comes to its end without a look at the answers
    assert sender.answers[:good] == [b""] * good
    assert len(sender.answers) == 5
    assert all(answer.endswith(b"ValueError: cannot load b\n") for answer in sender.answers[good:])
    assert not worker.check_weights_changed()


def test_trainer_over_zmq_that_leaves_hides_no_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(example_protocols, "CONNECT_SECONDS", 0.2)
    sender = PlainSender(f"ipc://{tmp_path}/s", {name: torch.ones(4) for name in "abc"}, 256, heeds_answers=True)
    with pytest.raises(ValueError, match="cannot load b"):
        ColocatedWorker(LoadingEngine("abc", refused="b")).update_weights_from_ipc({"cpu:0": f"ipc://{tmp_path}/s"})
    sender.join(10)
    assert len(sender.answers) == 3


def test_silent_trainer_over_zmq_is_an_error(tmp_path):
    with pytest.raises(WeightSyncError, match=r"the trainer sent nothing for 0\.1 s"):
        ColocatedWorker(LoadingEngine("a")).update_weights_from_ipc({"cpu:0": f"ipc://{tmp_path}/s"}, timeout=0.1)


def test_handles_by_name():
    buffer = shared_buffer(64, CPU)
    buffer.copy_(torch.arange(64, dtype=torch.uint8))
    worker = ColocatedWorker(LoadingEngine("w"))
    worker.update_weights_from_ipc_handles({"cpu:0": {"w": share_tensor(buffer)}})
    assert same_bits(worker.weight_model.weights["w"], buffer)
    rebuild_ipc(share_tensor(buffer), device_id=0)[3] = 77  # the same memory
    assert buffer[3] == 77
    assert worker.weight_model.weights["w"][3] == 3  # which the engine does not serve from


def test_parts_are_loaded_and_vouched_for_once_all_came():
    worker, parts = ColocatedWorker(LoadingEngine("abc")), {name: torch.full((4,), i) for i, name in enumerate("abcd")}
    for version in (1, 2):
        for name in "dab":  # `d` is not for this worker
            worker.load_parameter(name, parts[name])
            assert worker.check_weights_changed() == (version == 2 and name == "d")
        assert version == 2 or not worker.weight_model.weights
        worker.load_parameter("c", parts["c"])
        assert worker.check_weights_changed()
        assert worker.weight_model.version == version
    assert worker.weight_model.weights.keys() == set("abc")


def test_sync_of_a_sender_drops_parts_that_came_before_it():
    channel = SharedMemoryChannel(CPU)
    worker, sender = ColocatedWorker(LoadingEngine("ab"), channel.handles), WeightSender(channel)
    for version in (1, 2):  # of a new session, and of the same one
        worker.load_parameter("a", torch.zeros(4))
        receiving = Receiving(worker)
        sender.send_weights([(name, torch.ones(4)) for name in "ab"])
        receiving.join(10)
        assert (worker.weight_model.version, worker.check_weights_changed()) == (version, True)
    worker.load_parameter("b", torch.zeros(4))  # of another trainer, whose `a` has not come
    assert (worker.weight_model.version, worker.check_weights_changed()) == (2, False)
    assert worker.weight_model.weights["b"].equal(torch.ones(4))


def test_expandable_segments_are_refused(monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64, expandable_segments: True")
    with pytest.raises(WeightSyncError, match=r"expandable_segments:True, whose memory CUDA IPC cannot share"):
        SharedMemoryChannel(torch.device("cuda", 0))
