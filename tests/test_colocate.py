"""rlhf_colocate.py as a user runs it on CPU, and what of it needs GPUs as far as that can be seen without them.

pytest tests/test_colocate.py            placement, sleep, topology
pytest tests/test_colocate.py -m slow    the default run
"""

import re
from types import SimpleNamespace

import pytest
import ray
from conftest import arguments_of, cpu_only, metrics_of, settings_of
from pair import CORE_IN_PROCESS
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from transformers import LlamaConfig

import rlhf_colocate
from rlhf_utils import WeightSyncError
from trainer.errors import RunError
from trainer.run.actors import StepClock


@cpu_only
@pytest.mark.slow
def test_two_ranks_and_two_engines_learn(script, tmp_path):
    run = tmp_path / "run"
    text = script("rlhf_colocate.py", "--offload-optimizer", "--output", run, **CORE_IN_PROCESS).finish()
    assert text.splitlines()[-1].startswith("OK: reward "), text
    assert re.search(r"^first sync: \d+ tensors, .* GB, bit for bit what the engines had loaded", text, re.M)
    table = text[text.index("trainer  engine  worker") :].splitlines()[1:3]
    assert [line.split() for line in table] == [["cpu:0", "0", "0", "0"], ["cpu:0", "1", "1", "0"]]
    metrics = metrics_of(run)
    assert [row["step"] for row in metrics] == list(range(1, 31))
    assert metrics[0]["reward/mean"] < 0.25
    assert metrics[-1]["reward/mean"] > 0.75
    assert max(row["logprobs/mismatch"] for row in metrics) < 1e-5
    assert not [line for line in text.splitlines() if "pid=" in line], text
    assert all(row[f"time/{part}"] > 0 for row in metrics for part in ("rollout", "train", "sync", "wake"))


@cpu_only
@pytest.mark.long
def test_two_engines_on_a_device_serve_the_trainers_weights(script, tmp_path):
    flags = *settings_of(tmp_path, engines_per_gpu=2), "--steps", 3, "--save-every", 0, "--output", "run"
    text = script("rlhf_colocate.py", "--engines", 1, *flags, **CORE_IN_PROCESS).finish()
    assert text.splitlines()[-1].startswith("OK: reward "), text
    table = text[text.index("trainer  engine  worker") :].splitlines()[1:3]
    assert [line.split() for line in table] == [["cpu:0", "0", "0", "0"], ["cpu:0", "0", "1", "0"]]
    assert re.search(r"^first sync: .* bit for bit what the engines had loaded", text, re.M)
    metrics = metrics_of(tmp_path / "run")
    assert len(metrics) == 3
    assert max(row["logprobs/mismatch"] for row in metrics) < 1e-5


@pytest.fixture(scope="module")
def ray_with_four_gpus():
    ray.init(num_cpus=2, num_gpus=4, include_dashboard=False, object_store_memory=100 << 20, logging_level="error")
    yield
    ray.shutdown()


def place(**arguments):
    """The arguments as settled, and the seats of trainers and engines; they are free again."""
    device, args, trainers, engines = rlhf_colocate.place(arguments_of(rlhf_colocate, **arguments))
    assert device == "cuda"
    return args, trainers, engines


def group_of(seats):
    return seats[0].options["scheduling_strategy"].placement_group


def test_ranks_and_workers_of_the_same_bundles_share_gpus(ray_with_four_gpus):
    @ray.remote
    class Actor:
        def gpus(self):
            return ray.get_runtime_context().get_accelerator_ids()["GPU"]

    args, trainer_seats, engine_seats = place()
    assert (args.actors.engines, args.engine.tensor_parallel_size) == (2, 2)
    trainers, group = [Actor.options(**seat.options).remote() for seat in trainer_seats], group_of(trainer_seats)
    # As vLLM's Ray executor places its workers.
    workers = [
        Actor.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
            num_gpus=rlhf_colocate.GPU_SHARE,
            num_cpus=0,
        ).remote()
        for seat in engine_seats
        for bundle in seat.bundles
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
    args, trainers, engines = place(**given)
    assert (args.actors.engines, args.engine.tensor_parallel_size) == settled
    assert len(trainers) == 4
    assert [len(seat.bundles) for seat in engines] == [settled[1]] * settled[0]
    assert sorted(bundle for seat in engines for bundle in seat.bundles) == [0, 1, 2, 3]
    ray.util.remove_placement_group(group_of(trainers))


@pytest.mark.parametrize(
    ("device", "workers", "size", "engines"),
    [("cuda", 1, 64, 2), ("cuda", 1, 8192, 1), ("cuda", 2, 64, 1), ("cpu", 1, 64, 1)],
)
def test_small_models_get_two_engines_on_each_gpu(tmp_path, device, workers, size, engines):
    LlamaConfig(hidden_size=size, intermediate_size=4 * size, num_hidden_layers=2).save_pretrained(tmp_path)
    args, said = arguments_of(rlhf_colocate, tensor_parallel_size=workers), []
    run = SimpleNamespace(say=said.append)
    assert rlhf_colocate.choose_engines_per_gpu(run, args, str(tmp_path), device) == engines
    assert bool(said) == (engines == 2)


def test_engines_of_a_gpu_start_one_after_another():
    """Ray begins a call once the answers among its arguments are there."""

    def engine(number):
        return SimpleNamespace(start=SimpleNamespace(remote=lambda *args: (number, *args[3:])))

    calls = {}
    session = SimpleNamespace(wait=lambda phase, started: calls.update(started) or [["tokens"]])
    bundles = [([0, 1],), ([2, 3],)] * 2
    engines = SimpleNamespace(actors={f"engine {i}": engine(i) for i in range(4)}, bundles=bundles, session=session)
    args = arguments_of(rlhf_colocate, engines=2, engines_per_gpu=2)
    assert rlhf_colocate.start(engines, "model", args, "cuda") == "tokens"
    first, second = (0, [0, 1], None), (1, [2, 3], None)
    assert list(calls.values()) == [first, second, (2, [0, 1], first), (3, [2, 3], second)]
    assert list(calls) == list(engines.actors)


def test_more_workers_than_gpus_is_an_error_with_both_numbers(ray_with_four_gpus):
    with pytest.raises(RunError, match=r"wants 6 GPUs.* 3 engines, and there are 4"):
        place(engines=3, tensor_parallel_size=2)


def test_expandable_segments_are_refused_before_anything_starts(ray_with_four_gpus, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(WeightSyncError, match="PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True"):
        place()


class RecordedLLM:
    """What an engine asks of vLLM while it sleeps, wakes and is synced, in order."""

    def __init__(self):
        self.calls, self.llm_engine = [], self

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
def test_engine_sleeps_and_wakes_in_the_order_of_least_memory(level, expected):
    engine = rlhf_colocate.Engine(0)
    engine.llm = RecordedLLM()
    engine.remember_weights()
    for _ in range(2):
        engine.llm.calls.clear()
        engine.sleep(level)
        served, waking = engine.receive_weights(60.0, {"GPU-a": "/a"})
        assert served
        assert 0 < waking < 1
        calls = ", ".join(engine.llm.calls)
        sync = "collective_rpc receive_weights ({'GPU-a': '/a'}, 60.0), collective_rpc check_weights_changed"
        assert calls.replace(sync, "SYNC") == f"reset_prefix_cache, reset_encoder_cache, {expected}"
    engine.llm.calls.clear()
    engine.receive_weights(60.0, {})  # without a sleep before
    assert not any("wake_up" in call for call in engine.llm.calls)


@pytest.mark.parametrize(
    ("trainer", "engine", "level"),
    [(40.0, 60.0, "none"), (40.0, 86.0, "none"), (40.0, 87.0, "kv"), (87.0, 40.0, "kv"), (120.0, 30.0, "kv")],
)
def test_engines_sleep_unless_a_tenth_of_memory_is_free(trainer, engine, level):
    # Of what was measured, the trainer's peak while learning and the engine's memory while awake count.
    metrics = {"memory/gpu": 140.0, "memory/rollout/trainer": 30.0, "memory/rollout/engine": engine}
    metrics |= {"memory/train/trainer": trainer, "memory/train/engine": 9.0, "reward/mean": 0.5}
    said = []
    run, args = SimpleNamespace(say=said.append), arguments_of(rlhf_colocate, sleep="auto")
    settled = rlhf_colocate.sleep_level(run, args, "auto", metrics)
    assert settled == rlhf_colocate.sleep_level(run, args, settled, metrics) == level
    reason = f"learning takes {trainer:.1f} GB and an engine awake {engine:.1f} GB of 140.0"
    assert said == [f"--sleep {level} from now on: {reason}"]


def test_engines_that_slept_for_memory_do_so_for_good():
    plenty = {"memory/gpu": 140.0, "memory/train/trainer": 1.0, "memory/rollout/engine": 1.0}
    assert rlhf_colocate.sleep_level(None, arguments_of(rlhf_colocate, sleep="auto"), "kv", plenty) == "kv"
    for asked in ("kv", "weights", "none"):
        assert rlhf_colocate.sleep_level(None, arguments_of(rlhf_colocate, sleep=asked), asked, plenty) == asked


def test_trainers_free_their_memory_only_for_an_engine_that_sleeps():
    freed = []
    trainer = rlhf_colocate.Trainer(0)
    trainer.learner = SimpleNamespace(learn=lambda rollouts: {}, release_memory=lambda: freed.append(frees))
    for frees in (False, True):
        trainer.learn([], frees)
    assert freed == [True]


class Group:
    """Actors that note what they are asked, and the phases in which somebody waits for them."""

    def __init__(self, name: str, count: int, answers: dict, session=None):
        self.names = [f"{name} {i}" for i in range(count)]
        self.answers, self.called = answers, []
        self.session = session or SimpleNamespace(waited=[], wait=self.wait)

    def __len__(self) -> int:
        return len(self.names)

    def begin(self, method, *args, each=None):
        self.called.append((method.__name__, *args, *([each] if each else [])))
        return dict(zip(self.names, self.answers[method.__name__], strict=True))

    def call(self, phase, method, *args, each=None):
        return self.session.wait(phase, self.begin(method, *args, each=each))[0]

    def wait(self, phase, *groups):
        self.session.waited.append((phase, [name for calls in groups for name in calls]))
        return [[*calls.values()] for calls in groups]


def groups(trainer_answers, engine_answers, ranks=2, engines=1):
    trainers = Group("trainer", ranks, trainer_answers)
    return trainers, Group("engine", engines, engine_answers, trainers.session)


@pytest.mark.parametrize(
    ("level", "phases", "timed"),
    [
        (
            "kv",
            [("sleeping", ["engine 0"]), ("learning", ["trainer 0", "trainer 1", "engine 0"])],
            ["time/sleep", "time/train"],
        ),
        ("none", [("learning", ["trainer 0", "trainer 1", "engine 0"])], ["time/train"]),
    ],
)
def test_trainers_wait_for_engines_only_if_those_release_memory(level, phases, timed):
    trainers, engines = groups({"learn": [{"loss": 0.5}] * 2}, {"sleep": [None]})
    clock = StepClock()
    assert rlhf_colocate.learn(trainers, engines, ["rollout"], level, clock) == {"loss": 0.5}
    assert trainers.session.waited == phases
    assert engines.called == [("sleep", level)]
    assert trainers.called == [("learn", ["rollout"], level != "none")]
    assert [*clock.metrics] == timed


def test_sync_takes_the_slowest_engines_seconds_if_all_serve_it():
    report = SimpleNamespace(version=3)
    answers = {"receive_weights": [(True, 0.5), (True, 1.5)]}
    trainers, engines = groups({"send_weights": [report, report]}, answers, engines=2)
    handles, args = [({"GPU-a": "/a"},), ({"GPU-b": "/b"},)], arguments_of(rlhf_colocate, timeout=60.0)
    assert rlhf_colocate.sync(trainers, engines, handles, args) == (report, 1.5)
    assert engines.called == [("receive_weights", 60.0, handles)]
    answers["receive_weights"] = [(True, 0.5), (False, 0.5)]
    with pytest.raises(RunError, match="after sync 3, an engine does not serve what was sent"):
        rlhf_colocate.sync(trainers, engines, handles, args)


@pytest.mark.parametrize("sleep_weights", [False, True])
def test_what_a_sleep_lost_is_seen_at_the_first_sync(sleep_weights):
    engine = rlhf_colocate.Engine(0)
    engine.llm = RecordedLLM()
    engine.llm.collective_rpc = lambda method, **_: engine.digests
    engine.digests = [(1, 2), (3, 4)]
    engine.remember_weights()
    engine.sleep("weights" if sleep_weights else "kv")
    assert engine.serves_checkpoint()
    engine.digests = [(1, 2), (5, 6)]
    assert not engine.serves_checkpoint()  # other weights, so that the other tensors may be others as well
    engine.digests = [(1, 2), (3, 5)]
    if sleep_weights:
        with pytest.raises(RunError, match="vLLM loses in its sleep"):
            engine.serves_checkpoint()
    else:
        assert engine.serves_checkpoint()


TWO_EACH = [(0, 1), (2, 3)] * 2  # ranks beside the workers of four engines


def test_rank_and_worker_on_different_devices_are_refused(monkeypatch):
    handles = [{"GPU-b": "/b"}, {"GPU-a": "/a"}, {"GPU-c": "/c"}, {"GPU-d": "/d"}]
    ids, said = [["GPU-a", "GPU-b"], ["GPU-c", "GPU-d"]], []
    trainers, engines = groups({"open_channel": handles}, {"device_ids": ids, "serves_checkpoint": [True] * 2}, 4, 2)
    report = SimpleNamespace(tensors=3, nbytes=10**9, loader="replay")
    monkeypatch.setattr(rlhf_colocate, "sync", lambda *_: (report, 0.0))
    run, args = SimpleNamespace(say=said.append), arguments_of(rlhf_colocate, tensor_parallel_size=2)
    beside = rlhf_colocate.connect(run, trainers, engines, args)
    assert beside == [({"GPU-a": "/a", "GPU-b": "/b"},), ({"GPU-c": "/c", "GPU-d": "/d"},)]
    assert [line.split() for line in said[0].splitlines()[1:3]] == [["GPU-b", "0", "0", "1"], ["GPU-a", "1", "0", "0"]]
    assert said[1].startswith(
        "first sync: 3 tensors, 1.000 GB, bit for bit what the engines had loaded from disk; from"
    )
    ids.extend(ids)  # two engines on each pair of GPUs
    trainers, engines = groups({"open_channel": handles}, {"device_ids": ids, "serves_checkpoint": [True] * 4}, 4, 4)
    assert rlhf_colocate.connect(run, trainers, engines, args) == beside * 2
    rows = [line.split() for line in said[2].splitlines()[1:]]
    assert [row[1:3] for row in rows] == [[str(rank), str(engine)] for engine in range(4) for rank in TWO_EACH[engine]]
    handles[3] = {"GPU-a": "/a"}
    with pytest.raises(RunError, match=r"engine 1 runs on \['GPU-c', 'GPU-d'\], and its trainer ranks on"):
        rlhf_colocate.connect(run, trainers, engines, args)
