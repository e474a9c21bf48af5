"""The wire, without vLLM: buckets, both ends of a sync over gloo, and what happens when one of them fails.

pytest tests/test_transport.py
"""

import contextlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.multiprocessing as mp
from conftest import ROOT
from fakes import Engine, Receiving, Worker, communicator, groups, materialized, random_tensors, same_bits
from torch.distributed import TCPStore, rendezvous

from rlhf_utils import WeightSender, WeightSyncError, stateless_init_process_group
from trainer.learning.sharding import join_ranks
from weight_sync import buckets, channels, link, receiver
from weight_sync import groups as groups_module
from weight_sync.buckets import ALIGN_BYTES, aligned, dtype_name, plan_buckets
from weight_sync.channels import LINK_KEY, GroupChannel
from weight_sync.groups import Wire
from weight_sync.link import BUSY_POLL_SECONDS
from weight_sync.lora import LoRAWeight
from weight_sync.ranks import Ranks, ranks_of
from weight_sync.sending import Packing
from weight_sync.staging import Staging


@pytest.mark.parametrize("bucket_bytes", [ALIGN_BYTES, 1024, 4096, 1 << 20])
def test_buckets_hold_every_element_once(bucket_bytes):
    metadata = [(name, dtype_name(t.dtype), tuple(t.shape), [0, t.numel()]) for name, t in random_tensors().items()]
    buckets = plan_buckets(metadata, bucket_bytes)
    elements = {}
    for bucket in buckets:
        for piece in bucket:
            assert piece.begin == elements.get(piece.name, 0)
            assert piece.count % piece.row == 0
            elements[piece.name] = piece.begin + piece.count
        one_row = len(bucket) == 1 and bucket[0].count == bucket[0].row
        assert sum(map(aligned, (piece.nbytes for piece in bucket))) <= bucket_bytes or one_row
    assert elements == {name: end for name, _, _, (_, end) in metadata}


def test_tensor_larger_than_a_bucket_is_cut_at_rows():
    first, *middle, last = plan_buckets([("a", "int8", (10,), [0, 10]), ("b", "int8", (9, 300), [0, 2700])], 1024)
    assert [piece.name for piece in first] == ["a"]
    assert [(piece.begin, piece.count) for bucket in [*middle, last] for piece in bucket] == [
        (0, 900), (900, 900), (1800, 900),
    ]  # fmt: skip


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("bucket_bytes", [4096, 1 << 20])
def test_sync_delivers_every_bit(monkeypatch, workers, bucket_bytes):
    monkeypatch.setattr(buckets, "STAGING_BYTES", buckets.STAGING_BUFFERS * bucket_bytes)
    trainer, *others = groups(1 + workers)
    receiving = [Receiving(Worker(Engine(), other), syncs=3) for other in others]
    sender = WeightSender(trainer)
    for sync in range(1, 4):
        tensors = random_tensors(seed=sync)
        if sync == 3:  # another set of parameters: agreed anew
            tensors = dict(list(tensors.items())[:7])
        report = sender.send_weights(tensors.items())
        assert report.version == sync
        assert report.nbytes == sum(tensor.nbytes for tensor in tensors.values())
        for thread in receiving:
            weights = thread.worker.weight_model.weights
            assert all(same_bits(weights[name], tensor) for name, tensor in tensors.items())
    for thread in receiving:
        thread.join(10)
        assert thread.error is None


@pytest.mark.parametrize("side", ["trainer", "worker"])
@pytest.mark.parametrize(("bucket", "byte"), [(0, 0), (0, -1), (-1, -1)])
def test_flipped_bit_on_the_way_ends_both_sides_sync(monkeypatch, side, bucket, byte):
    monkeypatch.setattr(buckets, "STAGING_BYTES", buckets.STAGING_BUFFERS * 1024)
    trainer, *others = groups(3)
    receiving = [Receiving(Worker(Engine(), other), syncs=2) for other in others]
    sender, tensors = WeightSender(trainer), random_tensors()
    sender.send_weights(tensors.items())
    end = trainer if side == "trainer" else others[1]
    start, broadcasts = end.start, []

    def starts(kind, tensor, peer):  # the last pass of the first sync had as many
        broadcasts.append(tensor)
        flips = len(broadcasts) - 1 == bucket % count
        if flips and side == "trainer":
            tensor[byte] ^= 1
        arriving = start(kind, tensor, peer)
        if flips and side == "worker":
            arriving.result()
            tensor[byte] ^= 1
        return arriving

    count = len(
        plan_buckets([(n, dtype_name(t.dtype), tuple(t.shape), [0, t.numel()]) for n, t in tensors.items()], 1024)
    )
    end.start = starts
    with pytest.raises(WeightSyncError, match=r"engine worker \d .* what arrived is not what the trainer sent"):
        sender.send_weights(tensors.items())
    receiving[1].join(10)
    assert "what arrived is not what the trainer sent: their digests differ" in receiving[1].error
    assert not receiving[1].worker.check_weights_changed()


@pytest.fixture
def ipv6_port():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
            return server.getsockname()[1]
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")


def test_sync_over_ipv6(ipv6_port):
    def join(rank):
        return stateless_init_process_group("::1", ipv6_port, rank, 2, torch.device("cpu"))

    with ThreadPoolExecutor(2) as threads:
        trainer, other = threads.map(join, range(2))
    receiving, sender = Receiving(Worker(Engine(), other)), WeightSender(trainer)
    sender.send_weights([("w", torch.ones(4))])
    with socket.socket(fileno=os.dup(sender.links[0].connection.fileno())) as socket_:
        assert (socket_.family, socket_.getpeername()[0]) == (socket.AF_INET6, "::1")
        assert socket_.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)  # a node that vanishes is noticed here too
    receiving.join(5)
    assert receiving.error is None
    assert receiving.worker.weight_model.weights["w"].equal(torch.ones(4))


def test_taken_ipv6_port_is_an_error_that_names_it(ipv6_port):
    with (
        socket.create_server(("::1", ipv6_port), family=socket.AF_INET6),
        pytest.raises(WeightSyncError, match=rf"no group at \[::1\]:{ipv6_port}: .*in use"),
    ):
        stateless_init_process_group("::1", ipv6_port, 0, 2, torch.device("cpu"))


def test_trainer_ranks_meet_over_ipv6(monkeypatch, ipv6_port):
    def meet(backend, init_method, rank, world_size, **_):
        store, *_ = next(rendezvous(init_method, rank, world_size))
        store.set(str(rank), backend)
        store.wait([str(1 - rank)], timedelta(seconds=20))

    monkeypatch.setattr(torch.distributed, "init_process_group", meet)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda rank: join_ranks("::1", ipv6_port, rank, 2, torch.device("cpu")), range(2)))


def test_engines_dtype_travels_and_tied_tensors_once():
    trainer, other = groups(2)
    receiving = Receiving(Worker(Engine(dtypes={"w": "bfloat16", "t": "float32"}), other))
    weight, embedding = torch.randn(33, 7), torch.randn(16, 16)
    report = WeightSender(trainer).send_weights([("w", weight), ("t", embedding.t()), ("tied", embedding.t())])
    receiving.join(10)
    received = receiving.worker.weight_model.weights
    assert received.keys() == {"w", "t"}
    assert same_bits(received["w"], weight.bfloat16())
    assert same_bits(received["t"], embedding.t().contiguous())
    assert report.nbytes == 2 * weight.numel() + 4 * embedding.numel()


def test_what_is_sent_again_is_what_the_tensors_are_now():
    """Of the same memory: a transposed view, another adapter, an adapter on a view."""
    trainer, other = groups(2)
    receiving, sender = Receiving(Worker(Engine(), other), syncs=4), WeightSender(trainer)
    square, base = torch.randn(8, 8), torch.randn(8, 8)
    one, other_one = (LoRAWeight(base, torch.randn(2, 8), torch.randn(8, 2), 1.0) for _ in range(2))
    on_view = replace(one, base=base.t())
    for view, adapted in ((square, one), (square.t(), one), (square.t(), other_one), (square, on_view)):
        sender.send_weights([("w", view), ("adapted", adapted)])
        received = receiving.worker.weight_model.weights
        assert same_bits(received["w"], view.contiguous())
        assert same_bits(received["adapted"], materialized(adapted))
    receiving.join(10)


def test_tensor_without_elements_is_left_out():
    trainer, other = groups(2)
    receiving = Receiving(Worker(Engine(), other))
    report = WeightSender(trainer).send_weights([("empty", torch.empty(0, 4)), ("w", torch.ones(4))])
    receiving.join(10)
    assert (report.tensors, receiving.worker.weight_model.weights.keys()) == (1, {"w"})


def test_sync_that_was_interrupted_ends_the_session():
    def interrupted():
        yield "w", torch.ones(4)
        raise KeyboardInterrupt

    trainer, other = groups(2)
    receiving, sender = Receiving(Worker(Engine(), other), syncs=2), WeightSender(trainer)
    sender.send_weights([("w", torch.ones(4))])
    with pytest.raises(KeyboardInterrupt):
        sender.send_weights(interrupted())
    receiving.join(10)
    assert "KeyboardInterrupt" in receiving.error
    with pytest.raises(WeightSyncError, match="session is closed: make a new channel and a new WeightSender"):
        sender.send_weights([("w", torch.ones(4))])


WEIGHT, META = torch.randn(6, 4), torch.ones(3, device="meta")
ADAPTED = LoRAWeight(WEIGHT, torch.randn(2, 4), torch.randn(6, 2), 1.0)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, "there is nothing to send: the model has no parameters"),
        ({"a": WEIGHT, "b": ADAPTED}, "a and b are tied, and do not have the same adapter"),
        ({"a": WEIGHT, "b": META}, "the tensors are on cpu, meta: a sync sends those of one device"),
        (
            {"a": replace(ADAPTED, lora_A=META.expand(2, 3))},
            "the tensors are on cpu, meta: a sync sends those of one device",
        ),
        *(
            (
                {"a": LoRAWeight(WEIGHT, torch.randn(lora_A), torch.randn(lora_B), 1.0, transposed)},
                rf"a: lora_A and lora_B are {re.escape(str([lora_A, lora_B]))}, and not \[r, \d\] and \[\d, r\]",
            )
            for lora_A, lora_B, transposed in [
                ((4, 2), (2, 6), False),
                ((2, 4), (6, 3), False),
                ((2, 4), (6, 2), True),
                ((2, 6), (4, 2), False),
            ]
        ),
    ],
)
def test_weights_that_cannot_be_sent_are_named(weights, message):
    with pytest.raises(WeightSyncError, match=f"^{message}$"):
        WeightSender(groups(1)[0]).send_weights(weights.items())


def test_tensors_of_a_cpu_are_not_nccls():
    with pytest.raises(WeightSyncError, match="the tensors are on the CPU, and NCCL sends those of a GPU"):
        Wire(SimpleNamespace(broadcast=None), torch.device("cpu"))  # as vLLM's PyNcclCommunicator


def test_sync_in_inference_mode_leaves_later_ones_as_they_are():
    trainer, other = groups(2)
    receiving, sender = Receiving(Worker(Engine(), other), syncs=3), WeightSender(trainer)
    weight = torch.randn(9)
    for inference in (True, False, True):
        with torch.inference_mode(inference):
            weight.add_(1)
            sender.send_weights([("w", weight)])
        assert same_bits(receiving.worker.weight_model.weights["w"], weight)
    receiving.join(10)


def test_every_tensor_that_the_engine_ignores_is_named():
    trainer, other = groups(2)
    receiving = Receiving(Worker(Engine(dtypes={"a": None, "b": None}), other))
    with pytest.raises(WeightSyncError, match=r"a \[4\]: the engine's loader ignores it\n  b \[4\]: the engine"):
        WeightSender(trainer).send_weights([(name, torch.ones(4)) for name in "abc"])
    receiving.join(10)


def test_group_that_does_not_come_together_is_an_error(monkeypatch):
    monkeypatch.setattr(groups_module, "CONNECT_SECONDS", 3.0)  # in which rank 0 must connect to its own store
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for rank, reason in [(0, "Timed out .* waiting for clients"), (1, "The client socket has timed out")]:
        with pytest.raises(WeightSyncError, match=f"no group at 127.0.0.1:{port}: {reason}"):
            stateless_init_process_group("127.0.0.1", port, rank, 2, torch.device("cpu"))


def test_worker_that_counts_fewer_ranks_has_the_trainers_error(monkeypatch):
    monkeypatch.setattr(groups_module, "CONNECT_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with ThreadPoolExecutor() as ranks:
        joining = [ranks.submit(stateless_init_process_group, "127.0.0.1", port, r, 3 - r, "cpu") for r in (0, 1)]
        for each in joining:
            with pytest.raises(WeightSyncError, match=f"no group at 127.0.0.1:{port}"):
                each.result()


def test_second_sender_on_a_group_is_refused():
    trainer, other = groups(2)
    receiving = Receiving(Worker(Engine(), other), syncs=2)
    sender = WeightSender(trainer)
    for version in (1, 2):
        assert sender.send_weights([("w", torch.ones(4))]).version == version
        with pytest.raises(WeightSyncError, match="has a WeightSender: call that one"):
            WeightSender(trainer)
    receiving.join(10)
    assert receiving.error is None


def test_a_second_sync_without_a_receiver_asks_for_one(monkeypatch):
    trainer, other = groups(2)
    receiving, sender = Receiving(Worker(Engine(), other)), WeightSender(trainer)
    sender.send_weights([("w", torch.ones(4))])
    receiving.join(10)
    monkeypatch.setattr(buckets, "CONNECT_SECONDS", 0.5)
    with pytest.raises(WeightSyncError, match=r"stuck: .* is receive_weights running on every worker"):
        sender.send_weights([("w", torch.ones(4))])


LEAVES_DURING_A_BROADCAST = """
import torch
from fakes import groups

trainer, other = groups(2)
trainer.start("broadcast", torch.zeros(1 << 26), 0)
trainer.destroy()
other.destroy()
"""


def test_process_that_leaves_during_a_broadcast_does_not_abort():
    paths = os.pathsep.join(map(str, [Path(__file__).parent, ROOT]))
    command = [sys.executable, "-c", LEAVES_DURING_A_BROADCAST]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, check=True)


def test_workers_with_different_dtypes_of_a_tensor_are_an_error():
    trainer, *others = groups(3)
    engines = [Engine(dtypes={"w": "float32"}), Engine(dtypes={"w": "bfloat16", "b": None})]
    receiving = [Receiving(Worker(engine, other)) for engine, other in zip(engines, others, strict=True)]
    with pytest.raises(
        WeightSyncError, match=r"sent:\n  w: workers keep it in different dtypes, \['bfloat16', 'float32'\]$"
    ):
        WeightSender(trainer).send_weights([(name, torch.ones(4)) for name in "wb"])
    for thread in receiving:
        thread.join(10)


def test_version_goes_on_from_the_latest_of_any_worker():
    trainer, *others = groups(4)
    workers = [Worker(Engine(), other) for other in others]
    for worker, version in zip(workers, (3, 5, 4), strict=True):  # as failed syncs may leave them
        worker.weight_model.version = version
    receiving = [Receiving(worker) for worker in workers]
    assert WeightSender(trainer).send_weights([("w", torch.ones(4))]).version == 6
    for thread in receiving:
        thread.join(10)
    assert [worker.weight_model.version for worker in workers] == [6, 6, 6]


def test_preflight_names_the_problem_on_both_sides():
    trainer, *others = groups(3)
    receiving = [Receiving(Worker(Engine(), other)) for other in others]
    sender = WeightSender(trainer)
    with pytest.raises(WeightSyncError, match=r"nothing was sent:\n  unknown.weight: unknown"):
        sender.send_weights([("unknown.weight", torch.ones(3))])
    for thread in receiving:
        thread.join(10)
        assert "unknown.weight" in thread.error
    with pytest.raises(WeightSyncError, match="session is closed: make a new"):
        sender.send_weights([("w", torch.ones(3))])


def test_worker_that_raises_ends_the_trainers_wait_with_its_traceback():
    trainer, *others = groups(3)
    engines = [Engine(), Engine(fail_at="b")]
    receiving = [Receiving(Worker(engine, other), syncs=2) for engine, other in zip(engines, others, strict=True)]
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"engine worker 1 (.|\n)*ValueError: cannot load b"):
        WeightSender(trainer).send_weights([(name, torch.ones(4)) for name in "abc"])
    assert time.monotonic() - started < 10
    for thread in receiving:
        thread.join(10)
        assert not thread.is_alive()
        assert thread.worker.model_update_group is None  # no half-open session is used again
    named = r"engine worker 1 (.|\n)*ValueError: cannot load b"
    assert re.search(named, receiving[0].error)  # which had loaded all, and waited for the next
    assert "no weight update group" in receiving[0].worker.receive_weights()["error"]


def _worker_process(port, rank, world_size, ready):
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
    worker = Worker(Engine(), communicator(store, rank, world_size))
    worker.weight_model.reload = lambda *_: (ready.set(), time.sleep(60))  # dies while it loads
    worker.receive_weights(timeout=20)


@pytest.mark.parametrize(
    ("number", "timeout", "said"),
    [
        (signal.SIGKILL, math.inf, r"engine worker 0 \(pid \d+ on .*\) died"),
        (signal.SIGSTOP, 5, "the weight transfer is stuck"),
    ],
    ids=["killed", "stopped"],
)
def test_lost_worker_ends_the_trainers_wait(number, timeout, said):
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    context = mp.get_context("forkserver")
    ready = context.Event()
    process = context.Process(target=_worker_process, args=(server.port, 1, 2, ready))
    process.start()
    sender = WeightSender(communicator(server, 0, 2), timeout=timeout)
    killer = threading.Thread(target=lambda: (ready.wait(30), os.kill(process.pid, number)))
    killer.start()
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=said):
        sender.send_weights([(name, torch.ones(1000)) for name in "abcd"])
    assert time.monotonic() - started < 30
    killer.join()
    process.kill()
    process.join()


def test_trainer_that_leaves_ends_the_workers_wait():
    trainer, other = groups(2)
    receiving = Receiving(Worker(Engine(), other), syncs=2)
    sender = WeightSender(trainer)
    sender.send_weights([("w", torch.ones(4))])
    sender.close()
    receiving.join(5)
    assert re.fullmatch(r"the trainer \(pid .*\) closed the weight sync session", receiving.error)


@pytest.mark.parametrize("syncs", [0, 2])
def test_trainer_that_fails_before_a_sync_ends_the_workers_wait(syncs):
    trainer, other = groups(2)
    receiving = Receiving(Worker(Engine(), other), syncs=syncs + 1)
    sender = WeightSender(trainer)

    def tensors():  # which take longer than a worker stays awake for them
        time.sleep(2 * BUSY_POLL_SECONDS)
        yield "w", torch.ones(4)

    for version in range(1, syncs + 1):
        assert sender.send_weights(tensors()).version == version
    with pytest.raises(WeightSyncError, match="nothing to send"):
        sender.send_weights([])
    receiving.join(5)
    trainer = r"the trainer \(pid .*\)" if syncs else "the trainer"  # before the first it has not introduced itself
    assert re.match(rf"{trainer} failed: there is nothing to send", receiving.error)


def test_worker_that_fails_before_loading_vouches_for_nothing(monkeypatch):
    trainer, *others = groups(3)
    workers = [Worker(Engine(), other) for other in others]
    receiving = [Receiving(worker, syncs=2) for worker in workers]
    sender = WeightSender(trainer)
    sender.send_weights([("w", torch.ones(4))])
    assert all(worker.check_weights_changed() for worker in workers)
    monkeypatch.setattr(workers[1], "_load", lambda *_: torch.empty(1 << 60))
    with pytest.raises(WeightSyncError, match=r"engine worker 1 .* failed(.|\n)*can't allocate memory"):
        sender.send_weights([("w", torch.ones(4))])
    receiving[1].join(5)
    assert not workers[1].check_weights_changed()


def test_peer_that_stops_within_a_message_is_not_called_dead(monkeypatch):
    monkeypatch.setattr(link, "CONNECT_SECONDS", 1)
    ours, theirs = socket.socketpair()
    connection = link.Link(ours)
    theirs.sendall(b"\x00\x00\x00\x09half")
    with pytest.raises(WeightSyncError, match="the other side stopped in the middle of a message"):
        connection.recv(timeout=1)


def linked():
    """Both ends of a link."""
    return [link.Link(each) for each in socket.socketpair()]


@pytest.mark.parametrize("wait", ["for an answer", "for a transfer"])
@pytest.mark.parametrize("failing", [0, 1])
def test_any_peer_that_fails_ends_the_wait_for_the_others(wait, failing):
    ours, theirs = zip(*(linked() for _ in range(2)), strict=True)
    threading.Timer(0.2, theirs[failing].close, args=("no memory",)).start()
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match="the other side failed: no memory"):
        if wait == "for an answer":
            link.recv_all(ours, 20)
        else:
            link.wait_until(lambda: False, ours, started + 20)
    assert time.monotonic() - started < 5


def test_answers_keep_their_peers_and_silent_ones_are_named():
    ours, theirs = zip(*(linked() for _ in range(3)), strict=True)
    ours[2].peer = "engine worker 2"
    theirs[1].send(n=1)
    theirs[0].send(n=0)
    theirs[0].send(n=10)
    theirs[0].close()  # having answered
    with pytest.raises(WeightSyncError, match=r"engine worker 2 did not answer within 0\.1 s"):
        link.recv_all(ours, 0.1)
    theirs[2].send(n=2)
    assert link.recv_all(ours, 5, expected_soon=True) == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert ours[0].recv(1) == {"n": 10}


def test_limit_of_an_hour_is_given_in_whole_seconds():
    ours, _ = linked()
    ours.connection = SimpleNamespace(poll=lambda timeout: False)  # the hour is over
    with pytest.raises(WeightSyncError, match="did not answer within 3600 s"):
        ours.recv(3600.0)


def test_answer_that_is_there_counts_though_the_time_is_over():
    ours, theirs = linked()
    theirs.send(n=1)
    assert link.recv_all([ours], 0.0) == [{"n": 1}]


def test_messages_keep_their_order_though_the_link_was_watched():
    ours, theirs = linked()
    theirs.send(n=1)
    theirs.send(n=2)
    ours.watch()
    theirs.send(n=3)
    assert [ours.recv(1)["n"] for _ in range(3)] == [1, 2, 3]


def test_failed_send_says_what_the_peer_had_said():
    ours, theirs = linked()
    theirs.close("no memory")
    with pytest.raises(WeightSyncError, match="the other side failed: no memory"):
        ours.send(text="x" * (1 << 20))


def test_error_of_gloo_is_raised_though_its_work_is_complete(monkeypatch):
    def fails():
        raise RuntimeError("gloo's")

    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda *_, **__: SimpleNamespace(is_completed=lambda: True, wait=fails)
    )
    with pytest.raises(RuntimeError, match="gloo's"):
        Ranks(SimpleNamespace(size=lambda: 2)).texts("text", "cpu")


def test_error_of_gloo_gives_way_to_the_peers_own():
    def fails():
        raise RuntimeError("gloo's")

    ours, theirs = linked()
    threading.Timer(0.1, theirs.close, args=("no memory",)).start()
    with pytest.raises(WeightSyncError, match="the other side failed: no memory"):
        link.wait_until(fails, [ours], time.monotonic() + 5)


def channel_that_announces(announce):
    """Has one worker, and passes on what it would write in the group's store."""
    store = SimpleNamespace(host="127.0.0.1", set=lambda key, text: announce(json.loads(text)))
    return GroupChannel(SimpleNamespace(rank=0, world_size=2, group=SimpleNamespace(store=store)))


def test_communicator_is_destroyed_where_the_store_is_gone():
    def announce(_):
        raise torch.distributed.DistNetworkError("broken pipe")

    channel, destroyed = channel_that_announces(announce), []
    channel.communicator.destroy = lambda: destroyed.append(True)
    channel.close("a worker died")
    assert destroyed


def test_strangers_at_the_port_do_not_prolong_the_wait(monkeypatch):
    monkeypatch.setattr(channels, "CONNECT_SECONDS", 0.5)
    endpoint, started = {}, time.monotonic()

    def knock():
        while time.monotonic() < started + 5:
            with contextlib.suppress(OSError, KeyError):
                socket.create_connection((endpoint["host"], endpoint["port"])).close()
            time.sleep(0.1)

    threading.Thread(target=knock, daemon=True).start()
    with pytest.raises(WeightSyncError, match=r"1 of 1 engine workers did not connect within 0\.5 s: is receive"):
        channel_that_announces(endpoint.update).accept([], Ranks())
    assert time.monotonic() - started < 3


def test_worker_connects_to_the_host_where_it_found_the_group(monkeypatch):
    def announce(endpoint):  # by a name that the worker's node need not know
        said = json.dumps(endpoint | {"host": "trainer.invalid"})
        group = SimpleNamespace(store=SimpleNamespace(host="127.0.0.1", check=lambda keys: True, get=lambda key: said))
        threading.Thread(target=channels.connect_group, args=(group, [], lambda ranks: "worker", 5)).start()

    links = []
    monkeypatch.setattr(channels, "CONNECT_SECONDS", 5)
    channel_that_announces(announce).accept(links, Ranks())
    assert links[0].peer.startswith("worker (pid")


def test_buffer_is_filled_again_only_after_its_bucket_was_read(monkeypatch):
    count = 2 * buckets.STAGING_BUFFERS
    planned = plan_buckets([(str(i), "uint8", (ALIGN_BYTES,), [0, ALIGN_BYTES]) for i in range(count)], ALIGN_BYTES)
    begun = []
    staging = Staging(planned, [], [])
    staging.in_flight = buckets.STAGING_BUFFERS
    staging.start, staging.digest = lambda i: begun.append(i) or (lambda: True), lambda i, total: None
    for i in receiver._arrivals(staging, [], None):
        assert begun == list(range(min(i + buckets.STAGING_BUFFERS, count)))

    monkeypatch.setattr(buckets, "STAGING_BYTES", buckets.STAGING_BUFFERS * ALIGN_BYTES)
    trainer, other = groups(2)
    receiving, sender = Receiving(Worker(Engine(), other), syncs=2), WeightSender(trainer)
    tensors = [(str(i), torch.full((ALIGN_BYTES,), i, dtype=torch.uint8)) for i in range(count)]
    sender.send_weights(tensors)
    start, pack, sending = trainer.start, Packing.pack, []

    def packs(packing, i):
        assert all(each.done() for each in sending[: max(0, i - buckets.STAGING_BUFFERS + 1)])
        pack(packing, i)

    monkeypatch.setattr(trainer, "start", lambda *transfer: sending.append(start(*transfer)) or sending[-1])
    monkeypatch.setattr(Packing, "pack", packs)
    sender.send_weights(tensors)
    receiving.join(10)
    assert len(sending) == count


def test_tensors_not_sharded_alike_by_rows_are_an_error():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        mesh, row = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), torch.ones(1, 3)
        rows = DTensor.from_local(row, mesh, [Replicate(), Shard(0)])
        others = DTensor.from_local(row, mesh["a"], [Shard(0)])
        found = ranks_of({"rows": rows, "plain": row})
        assert (found.size, found.rank) == (2, 1)
        with pytest.raises(WeightSyncError, match="the tensors are sharded over different groups of ranks"):
            ranks_of({"rows": rows, "others": others})
        with pytest.raises(WeightSyncError, match=r"columns is placed as .*: a sync only sends shards of rows"):
            ranks_of({"rows": rows, "columns": DTensor.from_local(row, mesh["a"], [Shard(1)])})
    finally:
        torch.distributed.destroy_process_group()


def test_time_allowed_grows_with_the_bytes():
    allowed = [
        buckets.seconds_allowed(plan_buckets([(n, "uint8", (1 << 30,), [0, 1 << 30]) for n in "abcd"[:count]], 1 << 30))
        for count in (1, 4)
    ]
    assert allowed[0] > link.CONNECT_SECONDS
    assert allowed[1] - allowed[0] == pytest.approx(3 * (1 << 30) / buckets.SLOWEST_BYTES_PER_SECOND)


def test_views_of_one_storage_are_tied_only_if_equal():
    trainer, other = groups(2)
    receiving, whole = Receiving(Worker(Engine(), other)), torch.arange(32.0)
    sent = {"low": whole[:16], "high": whole[16:], "rows": whole[:16].view(4, 4), "columns": whole[:16].view(4, 4).t()}
    assert WeightSender(trainer).send_weights([*sent.items(), ("tied", whole[16:])]).tensors == 4
    receiving.join(10)
    received = receiving.worker.weight_model.weights
    assert received.keys() == sent.keys()
    assert all(same_bits(received[name], tensor.contiguous()) for name, tensor in sent.items())


@pytest.mark.parametrize(
    "greeting",
    [
        *[b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x02{}", b"\x00\x00\x00\x02[]", b"\x00\x00\x00\x03abc", b""],
        b'\x00\x00\x00\x22{"peer": "a stranger", "token":""}',
        b"\x00\x00\x0f\xa0" + b"[" * 4000,  # nested deeper than Python's parser goes
    ],
)
def test_strangers_at_the_port_do_not_disturb_a_sync(monkeypatch, greeting):
    monkeypatch.setattr(channels, "HELLO_SECONDS", 2.0)
    trainer, other = groups(2)
    syncing = threading.Thread(target=WeightSender(trainer).send_weights, args=([("w", torch.ones(4))],))
    syncing.start()
    other.group.store.wait([f"{LINK_KEY}/0"])
    port = json.loads(other.group.store.get(f"{LINK_KEY}/0"))["port"]
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(greeting)
        worker = Worker(Engine(), other)
        assert worker.receive_weights(timeout=5) == {"version": 1}
    syncing.join(5)
    assert worker.weight_model.weights["w"].equal(torch.ones(4))
