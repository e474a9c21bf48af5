"""rlhf_colocate.py as a user runs it on CPU, and what of it needs GPUs as far as that can be seen without them.

pytest tests/test_colocate.py
"""

import argparse
import json
import re
import shutil
import sys
import time

import pytest
import ray
from conftest import ROOT, Script, cpu_only
from pair import CORE_IN_PROCESS

import rlhf_colocate
from recipe.errors import RunError
from recipe.memory import measure, memory_table, sleep_level
from rlhf_utils import WeightSyncError

DEAD_SIDE_SECONDS = 30


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def default_run(tmp_path_factory):
    """The folder of a run with two ranks and two engines, and what it printed."""
    folder = tmp_path_factory.mktemp("default")
    options = ("--offload-optimizer", "--save-every", "30", "--output", "run")
    command = (sys.executable, str(ROOT / "rlhf_colocate.py"), *options)
    return folder / "run", Script(folder, *command, **CORE_IN_PROCESS).finish(240)


@cpu_only
def test_two_ranks_and_two_engines_learn(default_run):
    run, text = default_run
    assert text.splitlines()[-1].startswith("OK: reward "), text
    assert re.search(r"^first sync: \d+ tensors, .* GB, bit for bit what the engines had loaded", text, re.M)
    table = text[text.index("trainer  engine  worker") :].splitlines()[1:3]
    assert [line.split() for line in table] == [["cpu:0", "0", "0", "0"], ["cpu:0", "1", "1", "0"]]
    metrics = rows(run)
    assert [row["step"] for row in metrics] == list(range(1, 31))
    assert metrics[0]["reward/mean"] < 0.25
    assert metrics[-1]["reward/mean"] > 0.75
    assert max(row["logprobs/mismatch"] for row in metrics) < 1e-5
    assert all(row[f"time/{part}"] > 0 for row in metrics for part in ("rollout", "sleep", "train", "sync"))
    for phase in ("loading", "generating", "learning", "syncing"):
        assert 0.1 < metrics[-1][f"memory/{phase}/trainer"] < 4
        assert 0.1 < metrics[-1][f"memory/{phase}/engine"] < 16


@cpu_only
@pytest.mark.slow
def test_one_engine_goes_on_until_a_rank_is_killed(default_run, script, tmp_path):
    run = shutil.copytree(default_run[0], tmp_path / "run")
    options = ("--engines", 1, "--tensor-parallel-size", 2, "--steps", 10_000)
    process = script("rlhf_colocate.py", "--resume", "run", *options)
    process.wait_for_step(run, 33)
    for row in rows(run)[30:]:
        assert row["reward/mean"] > 0.75
        assert row["logprobs/mismatch"] < 1e-5

    family = process.descendants()
    victim = [child for child in family if child.cmdline() and child.cmdline()[0].startswith("ray::Trainer")][1]
    victim.kill()  # which the other rank may be waiting for, and a worker
    killed = time.monotonic()
    text = process.finish(60)
    assert time.monotonic() - killed < DEAD_SIDE_SECONDS
    process.assert_failed_cleanly(text, family)
    assert "the trainer" in text.splitlines()[-1], text
    assert "died" in text.splitlines()[-1], text


@pytest.fixture(scope="module")
def ray_with_four_gpus():
    ray.init(num_cpus=2, num_gpus=4, include_dashboard=False, object_store_memory=100 << 20, logging_level="error")
    yield
    ray.shutdown()


def topology(**changes):
    return rlhf_colocate.Arguments(**changes)


def test_ranks_and_workers_of_the_same_bundles_share_gpus(ray_with_four_gpus):
    @ray.remote
    class Actor:
        def gpus(self):
            return ray.get_runtime_context().get_accelerator_ids()["GPU"]

    args = topology()
    device, trainer_options, engine_options = rlhf_colocate.place(args)
    assert (device, args.engines, args.tensor_parallel_size) == ("cuda", 2, 2)
    trainers = [Actor.options(**options).remote() for options in trainer_options]
    # As vLLM's Ray executor places its workers.
    group = trainer_options[0]["scheduling_strategy"].placement_group
    workers = [
        Actor.options(
            scheduling_strategy=rlhf_colocate.PlacementGroupSchedulingStrategy(group, bundle),
            num_gpus=rlhf_colocate.GPU_SHARE,
            num_cpus=0,
        ).remote()
        for bundles, _ in engine_options
        for bundle in bundles
    ]
    seen = ray.get([actor.gpus.remote() for actor in trainers + workers], timeout=60)
    assert seen[:4] == seen[4:]
    assert len({gpu for (gpu,) in seen}) == 4
    for actor in trainers + workers:
        ray.kill(actor)
    ray.util.remove_placement_group(group)


@pytest.mark.parametrize(
    ("given", "settled"), [({"tensor_parallel_size": 1}, (4, 1)), ({"engines": 1, "tensor_parallel_size": 4}, (1, 4))]
)
def test_topology_is_what_was_asked_for(ray_with_four_gpus, given, settled):
    args = topology(**given)
    _, trainer_options, engine_options = rlhf_colocate.place(args)
    assert (args.engines, args.tensor_parallel_size) == settled
    assert len(trainer_options) == 4
    assert [len(bundles) for bundles, _ in engine_options] == [settled[1]] * settled[0]
    ray.util.remove_placement_group(trainer_options[0]["scheduling_strategy"].placement_group)


def test_more_workers_than_gpus_is_an_error_that_says_how_many_there_are(ray_with_four_gpus):
    with pytest.raises(RunError, match=r"wants 6 GPUs.* 3 engines, and there are 4"):
        rlhf_colocate.place(topology(engines=3, tensor_parallel_size=2))


def test_expandable_segments_are_refused_before_anything_starts(ray_with_four_gpus, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(WeightSyncError, match="PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True"):
        rlhf_colocate.place(topology())


class RecordedLLM:
    """What an engine asks of vLLM while it sleeps, wakes and is synced, in order."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.calls.append(" ".join(map(str, [name, *args[:1], *kwargs.values()])))
            return [{"version": 1}] if args == ("receive_weights",) else [True]

        return call


KV = "sleep 0, release_kv_cache_memory, collective_rpc empty_cache, SYNC, wake_up ['kv_cache']"


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("auto", KV),
        ("kv", KV),
        ("weights", "sleep 2, wake_up ['weights'], SYNC, wake_up ['kv_cache']"),
        ("none", "SYNC"),
    ],
)
def test_engine_sleeps_as_asked_and_wakes_in_the_order_that_needs_least_memory(level, expected):
    engine = object.__new__(rlhf_colocate.Engine)
    engine.llm = RecordedLLM()
    sync = "collective_rpc receive_weights ({},)"
    for _ in range(2):
        engine.llm.calls.clear()
        engine.sleep(level)
        served, waking = engine.receive_weights({})
        assert served
        assert 0 < waking < 1
        calls = [call if call != sync else "SYNC" for call in engine.llm.calls]
        assert ", ".join(calls) == f"reset_prefix_cache, {expected}, collective_rpc check_weights_changed"
    engine.llm.calls.clear()
    engine.receive_weights({})  # without a sleep before
    assert not any("wake_up" in call for call in engine.llm.calls)


@pytest.mark.parametrize(
    ("trainer", "engine", "level"),
    [(40.0, 60.0, "none"), (40.0, 86.0, "none"), (40.0, 87.0, "kv"), (87.0, 40.0, "kv"), (120.0, 30.0, "kv")],
)
def test_engines_sleep_unless_they_and_the_trainers_leave_a_tenth_of_the_smallest_gpu(trainer, engine, level):
    def on(device, own, kept, used, gpu):
        return {"device": device, "own": own, "kept": kept, "used": used, "gpu": gpu}

    # Of what was measured, the trainer's peak while learning and the engine's memory while awake count.
    answers = {
        "generating": [on("a", 30.0, 2.0, engine + 2.0, 140.0), on("b", 9.0, 1.0, 6.0, 150.0)],
        "learning": [on("a", 5.0, 5.0, 14.0, 140.0), on("b", trainer, trainer, trainer + 8.0, 150.0)],
    }
    metrics = {"reward/mean": 0.5}
    for phase, ranks in answers.items():
        memories = {"trainer0": ranks[0], "trainer1": ranks[1], "engine0": {"own": 0.0}}
        actors = {
            name: argparse.Namespace(memory=argparse.Namespace(remote=lambda answer=answer: answer))
            for name, answer in memories.items()
        }
        session = argparse.Namespace(actors=actors, wait=lambda _, **answers: [*answers.values()])
        metrics |= measure(session, phase)
    said = []
    run = argparse.Namespace(say=said.append)
    assert sleep_level(run, "auto", metrics) == sleep_level(run, level, metrics) == level
    reason = f"learning takes {trainer:.1f} GB and an engine awake {engine:.1f} GB of 140.0"
    assert said == [f"--sleep {level} from now on: {reason}"]
    assert [line.split() for line in memory_table(metrics).splitlines()] == [
        ["GB", "trainer", "engine"],
        ["generating", "30.0", f"{engine}"],
        ["learning", f"{trainer}", "9.0"],
    ]


def test_memory_of_an_engine_is_what_no_rank_on_its_gpu_has():
    def rank(**sizes):
        answer = {"device": "a", "used": 50.0, "gpu": 140.0} | sizes
        return argparse.Namespace(memory=argparse.Namespace(remote=lambda: answer))

    actors = {"trainer0": rank(own=30.0, kept=20.0), "critic0": rank(own=9.0, kept=5.0)}
    session = argparse.Namespace(actors=actors, wait=lambda _, **answers: [*answers.values()])
    measured = {"memory/train/trainer": 30.0, "memory/train/critic": 9.0, "memory/train/engine": 25.0}
    assert measure(session, "train") == measured | {"memory/gpu": 140.0}
    actors["engine"] = argparse.Namespace(memory=argparse.Namespace(remote=dict))  # it has GPUs of its own
    del measured["memory/train/engine"]
    assert measure(session, "train") == measured | {"memory/gpu": 140.0}


def test_trainers_free_their_memory_only_for_an_engine_that_sleeps():
    freed = []
    trainer = object.__new__(rlhf_colocate.Trainer)
    trainer.learner = argparse.Namespace(learn=lambda rollouts: {}, release_memory=lambda: freed.append(make_room))
    for make_room in (False, True):
        trainer.learn([], make_room)
    assert freed == [True]


@pytest.mark.parametrize(
    ("level", "phases"),
    [
        ("kv", [("sleeping", ["engine0"]), ("learning", ["trainer0", "engine0"])]),
        ("none", [("learning", ["trainer0", "engine0"])]),
    ],
)
def test_trainers_wait_for_engines_only_if_those_release_memory(monkeypatch, level, phases):
    monkeypatch.setattr(rlhf_colocate.ray, "put", lambda rollouts: rollouts)
    waited, called = [], []

    def wait(phase, **refs):
        waited.append((phase, [*refs]))
        return [{"loss": 0.5}, None]

    def call(*args):
        called.append(args)

    actor = argparse.Namespace(sleep=argparse.Namespace(remote=call), learn=argparse.Namespace(remote=call))
    metrics = rlhf_colocate.learn(argparse.Namespace(wait=wait), [actor], [actor], [], level)
    assert waited == phases
    assert called == [(level,), ([], level != "none")]
    assert metrics.keys() == {"loss", "time/sleep", "time/train"}


@pytest.mark.parametrize("sleep_weights", [False, True])
def test_what_a_sleep_lost_is_seen_where_the_first_sync_brings_the_same_weights(sleep_weights):
    engine = object.__new__(rlhf_colocate.Engine)
    engine.llm = RecordedLLM()
    engine.llm.collective_rpc = lambda method, **_: engine.digests
    engine.llm.model_config = argparse.Namespace(max_model_len=16)
    engine.digests = [(1, 2), (3, 4)]
    engine.start("weights" if sleep_weights else "kv")
    assert engine.serves_checkpoint()
    engine.digests = [(1, 2), (5, 6)]
    assert not engine.serves_checkpoint()  # other weights, so that the other tensors may be others as well
    engine.digests = [(1, 2), (3, 5)]
    if sleep_weights:
        with pytest.raises(RunError, match="vLLM loses in its sleep"):
            engine.serves_checkpoint()
    else:
        assert engine.serves_checkpoint()


def test_rank_and_worker_on_different_devices_are_refused(tmp_path):
    class Session:
        def wait(self, phase, **refs):
            return [["GPU-a", "GPU-b"], ["GPU-c", "GPU-d"]]

    class Run:
        said = ""

        def say(self, text):
            self.said = text

    engines, run = [argparse.Namespace(device_ids=argparse.Namespace(remote=lambda: None))] * 2, Run()
    handles = [{"GPU-b": "/b"}, {"GPU-a": "/a"}, {"GPU-c": "/c"}, {"GPU-d": "/d"}]
    beside = rlhf_colocate.connect(Session(), run, engines, handles)
    assert beside == [{"GPU-a": "/a", "GPU-b": "/b"}, {"GPU-c": "/c", "GPU-d": "/d"}]
    assert [line.split() for line in run.said.splitlines()[1:3]] == [["GPU-b", "0", "0", "1"], ["GPU-a", "1", "0", "0"]]
    handles[3] = {"GPU-a": "/a"}
    with pytest.raises(RunError, match=r"engine 1 runs on \['GPU-c', 'GPU-d'\], and its trainer ranks on"):
        rlhf_colocate.connect(Session(), run, engines, handles)
