"""The topologies of train_grpo.py: where trainers and engines run, who sleeps, how they connect; as far as that can be
seen without GPUs.

pytest tests/test_topologies.py
"""

import asyncio
from types import SimpleNamespace

import pytest
import ray
from conftest import arguments_of
from transformers import LlamaConfig

import train_grpo
from rlhf_utils import WeightSyncError
from trainer.errors import RunError, TaskError
from trainer.rollouts.engine import EngineActor
from trainer.rollouts.engine_start import gpus_of
from trainer.rollouts.options import EngineSetting
from trainer.run import actors
from trainer.run.actors import StepClock
from trainer.run.models import Models
from trainer.run.timeline import Timeline
from trainer.topologies import choose, link, separate, servers
from trainer.topologies.base import Topology
from trainer.topologies.choose import choose_topology
from trainer.topologies.link import TrainerActor, connect_by_memory, say_first_sync
from trainer.topologies.separate import Separate
from trainer.topologies.servers import Servers
from trainer.topologies.shared import Shared


def made(cls=Shared, **attributes):
    """A topology with these attributes, which has placed nothing."""
    topology = object.__new__(cls)
    vars(topology).update({"args": arguments_of(train_grpo)} | attributes)
    return topology


def placed_for(cls, **arguments):
    """A topology of this class that has placed its actors."""
    args = arguments_of(train_grpo, **arguments)
    return cls(args, SimpleNamespace(args=args.task, eval_rows=[]), None, None)


# --- Which topology ---------------------------------------------------------------------------------------------------


@pytest.fixture
def chosen(monkeypatch):
    """The topology that is chosen for these flags, and what the run says of it."""
    for name in choose.TOPOLOGIES:
        monkeypatch.setitem(choose.TOPOLOGIES, name, lambda *_, name=name: SimpleNamespace(name=name, remark=""))
    task = SimpleNamespace(refuse_images=lambda reason: None)

    def choose_for(task=task, **flags):
        said = []
        topology = choose_topology(arguments_of(train_grpo, **flags), task, SimpleNamespace(say=said.append), None)
        return topology.name, *filter(None, said)

    return choose_for


@pytest.mark.parametrize(
    ("flags", "name", "reason"),
    [
        ({}, "shared", ""),
        ({"max_staleness": 1}, "separate", ", for --max-staleness"),
        ({"trainers": 2}, "separate", ", for --trainers"),
        ({"engine_url": ["http://a:1"]}, "servers", ", for --engine-url"),
        ({"engine_url": ["http://a:1"], "max_staleness": 1}, "servers", ", for --engine-url"),
        ({"topology": "servers", "trainers": 1}, "servers", ""),
        ({"topology": "separate"}, "separate", ""),
    ],
)
def test_flags_choose_a_topology_and_the_run_says_why(chosen, flags, name, reason):
    assert chosen(**flags) == (name, f"--topology {name}{reason}")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"topology": "shared", "max_staleness": 1}, "shared: --max-staleness is for engines that generate while"),
        ({"topology": "shared", "trainers": 2}, "shared: --trainers is for GPUs of their own"),
        ({"topology": "servers", "trainers": 2}, "servers: --trainers: one trainer sends to servers"),
        ({"topology": "separate", "engine_url": ["http://a:1"]}, "separate: --engine-url is for servers"),
        ({"topology": "separate", "engines_per_gpu": 2}, "separate: engines_per_gpu is for shared GPUs"),
        ({"topology": "servers", "quantization": "auto"}, "servers: --quantization: servers have their own"),
    ],
)
def test_flags_that_a_topology_does_not_have_are_refused(chosen, flags, message):
    with pytest.raises(RunError, match=f"^--topology {message}"):
        chosen(**flags)


def test_images_do_not_go_to_servers(chosen):
    def refuse_images(reason):
        raise TaskError(reason)

    task = SimpleNamespace(refuse_images=refuse_images)
    assert chosen(task)[0] == "shared"
    with pytest.raises(TaskError, match="servers get token ids alone"):
        chosen(task, topology="servers")


# --- Places on shared devices -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ray_with_four_gpus():
    ray.init(num_cpus=2, num_gpus=4, include_dashboard=False, object_store_memory=100 << 20, logging_level="error")
    yield
    ray.shutdown()


@pytest.fixture
def place(ray_with_four_gpus, monkeypatch):
    """A topology on shared devices that has chosen the seats. They are free again after the test."""
    placed = []
    monkeypatch.setattr(Topology, "start_actors", lambda *_: None)

    def place_for(**arguments):
        placed.append(placed_for(Shared, **arguments))
        assert placed[-1].device == "cuda"
        placed[-1].start_actors(None, "model")
        return placed[-1]

    yield place_for
    for topology in placed:
        ray.util.remove_placement_group(topology.placement)


@pytest.mark.parametrize(("ranks", "given"), [(2, {}), (1, {"engines_per_gpu": 2})])
def test_ranks_and_workers_of_the_same_bundles_share_gpus(place, ranks, given):
    @ray.remote
    class Actor:
        async def gpus(self, bundles):
            return ray.get_runtime_context().get_accelerator_ids()["GPU"] or (await gpus_of(bundles)).split(",")

    topology = place(engines=1, tensor_parallel_size=ranks, **given)
    trainers = [Actor.options(**seat.options).remote() for seat in topology.trainer_seats]
    assert {seat.options["num_gpus"] for seat in topology.engine_seats} == {0.2 if given else 0}
    engines = [Actor.options(**seat.options).remote() for seat in topology.engine_seats]
    seats = topology.trainer_seats + topology.engine_seats
    calls = [actor.gpus.remote(seat.bundles) for actor, seat in zip(trainers + engines, seats, strict=True)]
    seen = [gpu for gpus in ray.get(calls, timeout=60) for gpu in gpus]
    assert seen[ranks:] == seen[:ranks] * given.get("engines_per_gpu", 1)
    assert len({*seen}) == ranks
    for actor in trainers + engines:
        ray.kill(actor)


@pytest.mark.parametrize(
    ("given", "settled"),
    [
        ({}, (2, 2)),
        ({"tensor_parallel_size": 1, "engines_per_gpu": 1}, (4, 1)),
        ({"engines": 1, "tensor_parallel_size": 4}, (1, 4)),
    ],
)
def test_topology_is_what_was_asked_for(place, given, settled):
    topology = place(**given)
    args, engines = topology.args, topology.engine_seats
    assert (args.placement.engines, args.engine.tensor_parallel_size) == settled
    assert args.engine.gpu_memory_utilization == topology.memory_share == 0.4
    assert len(topology.trainer_seats) == 4
    assert [len(seat.bundles) for seat in engines] == [settled[1]] * settled[0]
    assert sorted(bundle for seat in engines for bundle in seat.bundles) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("device", "workers", "size", "engines"),
    [("cuda", 1, 64, 2), ("cuda", 1, 8192, 1), ("cuda", 2, 64, 1), ("cpu", 1, 64, 1)],
)
def test_small_models_get_two_engines_on_each_gpu(tmp_path, device, workers, size, engines):
    LlamaConfig(hidden_size=size, intermediate_size=4 * size, num_hidden_layers=2).save_pretrained(tmp_path)
    args, said = arguments_of(train_grpo, tensor_parallel_size=workers), []
    topology = made(args=args, run=SimpleNamespace(say=said.append), device=device)
    assert topology._engines_per_gpu(str(tmp_path)) == engines
    assert bool(said) == (engines == 2)


def shared_by_engines(kv_cache_bytes):
    """A topology with two engines on each of two pairs of GPUs, and their actors, which answer with their number."""

    def engine(number):
        return SimpleNamespace(start=SimpleNamespace(remote=lambda *args: (number, *args[1:])))

    def begin(method, *args, each):
        calls = zip(actors.items(), each, strict=True)
        return {name: getattr(actor, method.__name__).remote(*args, *own) for (name, actor), own in calls}

    actors, bundles = {f"engine {i}": engine(i) for i in range(4)}, [([0, 1],), ([2, 3],)] * 2
    args = arguments_of(train_grpo, engines=2, engines_per_gpu=2, tensor_parallel_size=2)
    return made(
        args=args,
        engines=SimpleNamespace(actors=actors, bundles=bundles, begin=begin),
        gpu=SimpleNamespace(memory=80e9),
        size=SimpleNamespace(kv_cache_bytes=lambda memory, workers: kv_cache_bytes and kv_cache_bytes(memory, workers)),
        setting=EngineSetting("cuda"),
        memory_share=0.2,
        level="kv",
        session=SimpleNamespace(timeline=Timeline()),
    )


def test_engines_of_a_gpu_start_one_after_another_if_vllm_measures_free_memory():
    """Ray begins a call once the answers among its arguments are there."""
    starting = shared_by_engines(None).start_engines("model")
    assert list(starting) == [f"engine {i}" for i in range(4)]
    started = [*starting.values()]
    numbers, engines, settings, levels, bundles, before = zip(*started, strict=True)
    assert numbers == (0, 1, 2, 3)
    assert bundles == ([0, 1], [2, 3], [0, 1], [2, 3])
    assert before == (None, None, started[0], started[1])
    assert {args.gpu_memory_utilization for args in engines} == {0.2}
    assert {setting.kv_cache_bytes for setting in settings} == {None}
    assert set(levels) == {"kv"}


def test_engines_whose_kv_cache_is_reckoned_start_at_once():
    topology = shared_by_engines(lambda memory, workers: (memory, workers))
    topology.settle_kv_cache()
    starting = topology.start_engines("model")
    assert [(number, bundles) for number, *_, bundles in starting.values()] == [
        (0, [0, 1]), (1, [2, 3]), (2, [0, 1]), (3, [2, 3]),
    ]  # fmt: skip
    assert {setting.kv_cache_bytes for _, _, setting, *_ in starting.values()} == {(0.2 * 80e9, 2)}


@pytest.mark.parametrize(
    ("level", "kv_cache_bytes", "fits", "phases"),
    [
        ("none", 8e9, False, [("starting", ["trainer 0", "engine 0", "prepared"])]),
        ("kv", 8e9, True, [("starting", ["trainer 0", "engine 0", "prepared"])]),
        ("kv", 8e9, False, [("starting", ["engine 0", "prepared"]), ("loading", ["trainer 0"])]),
        ("kv", None, True, [("starting", ["engine 0", "prepared"]), ("loading", ["trainer 0"])]),
        ("none", None, True, [("starting", ["engine 0", "prepared"]), ("loading", ["trainer 0"])]),
    ],
)
def test_trainers_load_after_engines_unless_there_is_room_for_both(level, kv_cache_bytes, fits, phases):
    """And after vLLM has measured the free memory, if it does."""

    def wait(phase, *groups):
        waited.append((phase, [name for calls in groups for name in calls]))
        return [[*calls.values()] for calls in groups]

    waited = []
    size = SimpleNamespace(
        loads_beside=lambda engines, gpu: fits and (engines, gpu) == (0.4 * 80e9, 80e9),
        kv_cache_bytes=lambda memory, workers: kv_cache_bytes,
    )
    args = arguments_of(train_grpo, gpu_memory_utilization=0.4, tensor_parallel_size=1)
    setting = EngineSetting("cuda")
    gpu = SimpleNamespace(memory=80e9)
    topology = made(args=args, gpu=gpu, size=size, setting=setting, memory_share=0.4, level=level)
    topology.session, topology.preparing = SimpleNamespace(wait=wait), {"prepared": None}
    topology.load_trainers = lambda models: {"trainer 0": (3, "remarks")}
    topology.start_engines = lambda model: {"engine 0": 64}
    assert topology.start(Models("model", "model", None)) == (3, "remarks", 64)
    assert waited == phases


def test_more_workers_than_gpus_is_an_error_with_both_numbers(place):
    with pytest.raises(RunError, match=r"wants 6 GPUs.* 3 engines, and there are 4"):
        place(engines=3, tensor_parallel_size=2)


def test_expandable_segments_are_refused_before_anything_starts(place, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(WeightSyncError, match="PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True"):
        place()


# --- Places on separate devices ---------------------------------------------------------------------------------------


@pytest.fixture
def placed(monkeypatch):
    """A topology on so many GPUs, and the bundles that it has reserved."""

    def place(cls, gpus, order=(), **arguments):
        reserved, module = [], {Separate: separate, Servers: servers}[cls]
        monkeypatch.setattr(module.ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": float(gpus)})
        monkeypatch.setattr(module, "reserve", lambda bundles, strategy: reserved.append((bundles, strategy)))
        monkeypatch.setattr(module, "by_node", lambda _: order or list(range(gpus)), raising=False)
        return reserved, placed_for(cls, **arguments)

    return place


def bundle_of(seat) -> int:
    return seat.options["scheduling_strategy"].placement_group_bundle_index


def test_every_rank_and_every_worker_has_a_gpu(placed):
    reserved, topology = placed(Separate, 8, trainers=3, engines=2, tensor_parallel_size=2)
    assert reserved == [([{"GPU": 1}] * 7, "PACK")]
    assert topology.remark == "1 GPUs stay unused: --trainers and --engines take more"
    assert [bundle_of(seat) for seat in topology.trainer_seats] == [0, 1, 2]
    assert [seat.bundles for seat in topology.engine_seats] == [[3, 4], [5, 6]]
    assert [bundle_of(seat) for seat in topology.engine_seats] == [3, 5]
    assert {seat.options["num_gpus"] for seat in topology.trainer_seats} == {1}
    assert {seat.options["num_gpus"] for seat in topology.engine_seats} == {0}  # its workers have them
    _, alone = placed(Separate, 2, tensor_parallel_size=1)
    assert [seat.options["num_gpus"] for seat in alone.engine_seats] == [1]  # for the worker, its child


def test_single_actors_take_the_node_that_has_no_room_for_an_engine(monkeypatch):
    table = {"bundles_to_node_id": dict(enumerate("bbabb"))}  # Ray has put the third bundle on the other node
    monkeypatch.setattr(actors, "placement_group_table", lambda placement: table)
    assert actors.by_node("placement") == [2, 0, 1, 3, 4]


def test_workers_of_an_engine_are_on_one_node(placed):
    order = [1, 3, 5, 0, 2, 4]  # Ray has put every other bundle on the other node
    _, topology = placed(Separate, 6, order, trainers=1, engines=1, tensor_parallel_size=2)
    assert [bundle_of(seat) for seat in topology.trainer_seats] == [1]
    assert [seat.bundles for seat in topology.engine_seats] == [[3, 5]]
    assert [bundle_of(seat) for seat in topology.engine_seats] == [3]


def test_without_gpus_trainers_and_engines_share_a_core_each(placed):
    reserved, topology = placed(Separate, 0, trainers=2, engines=4)
    assert reserved == [([{"CPU": 0.5}] * 2 + [{"CPU": 0.25}] * 4, "SPREAD")]
    assert "no GPU" in topology.remark
    assert [bundle_of(seat) for seat in topology.trainer_seats + topology.engine_seats] == [0, 1, 2, 3, 4, 5]
    assert [seat.bundles for seat in topology.engine_seats] == [[2, 3], [4, 5], [6, 7], [8, 9]]  # of cores


def test_too_few_gpus_is_an_error_with_their_number(placed):
    with pytest.raises(RunError, match=r"wants 3 GPUs, 1 .* 2 .*there\s+are 2.*--topology shared"):
        placed(Separate, 2)
    with pytest.raises(RunError, match=r"wants 6 GPUs, 2 .* 2 .*there\s+are 5"):
        placed(Separate, 5, trainers=2, engines=2)


@pytest.mark.parametrize(("gpus", "resource"), [(5, "GPU"), (0, "CPU")])
def test_trainer_of_servers_has_a_device_and_they_have_theirs(placed, gpus, resource):
    reserved, topology = placed(Servers, gpus, engine_url=["http://a:1"])
    assert reserved == [([{resource: 1}], "PACK")]
    assert topology.trainer_seats[0].options[f"num_{resource.lower()}s"] == 1
    assert topology.engine_seats[0].options["num_gpus"] == 0
    with pytest.raises(RunError, match=r"^--topology servers: --engine-url is missing"):
        placed(Servers, gpus)


# --- Who sleeps -------------------------------------------------------------------------------------------------------


class RecordedLLM:
    """What an engine asks of vLLM while it sleeps, wakes and is synced, in order."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        async def call(*args, **kwargs):
            self.calls.append(" ".join(map(str, [name, *args[:1], *kwargs.values()])))
            return [{"version": 1}] if args == ("receive_weights",) else [True]

        return call


def recorded_engine():
    engine = EngineActor(0)
    engine.llm, engine.since, engine.resumed = RecordedLLM(), 0.0, 0.0
    return engine


RESET = "reset_prefix_cache True True, reset_encoder_cache"
KV = "sleep 0, release_kv_cache_memory, collective_rpc empty_cache, SYNC, wake_up ['kv_cache'], RESUME"


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("auto", KV),
        ("kv", KV),
        ("weights", "sleep 2, wake_up ['weights'], SYNC, wake_up ['kv_cache'], RESUME"),
        ("none", "sleep 0, SYNC, RESUME"),  # which pauses it
    ],
)
def test_engine_sleeps_and_wakes_in_the_order_of_least_memory(level, expected):
    engine = recorded_engine()

    async def sync(sleeps: bool) -> str:
        engine.llm.calls.clear()
        engine.cached = True  # as after rollouts
        if sleeps:
            await engine.sleep(level)
        assert await engine.receive_weights(7, {"GPU-a": "/a"}, 60.0)
        calls = ", ".join(engine.llm.calls)
        sync = "collective_rpc receive_weights ({'GPU-a': '/a'}, 60.0), collective_rpc check_weights_changed"
        calls = calls.replace(f"{sync}, update_weight_version 7", "SYNC")
        return calls.replace("sleep 0 keep", "PAUSE").replace("resume_generation", "RESUME")

    for _ in range(2):
        assert asyncio.run(sync(sleeps=True)) == f"{RESET}, {expected}"
    assert asyncio.run(sync(sleeps=False)) == f"PAUSE, {RESET}, SYNC, RESUME"


@pytest.mark.parametrize("sleep_weights", [False, True])
def test_what_a_sleep_lost_is_seen_at_the_first_sync(sleep_weights):
    engine = recorded_engine()

    async def weight_digests(method, **_):
        return engine.digests

    def serves_checkpoint():
        return asyncio.run(engine.serves_checkpoint())

    asyncio.run(engine.sleep("weights" if sleep_weights else "kv"))
    engine.llm.collective_rpc = weight_digests
    engine.from_disk = engine.digests = [(1, 2), (3, 4)]
    assert serves_checkpoint()
    engine.digests = [(1, 2), (5, 6)]
    assert not serves_checkpoint()  # other weights, so that the other tensors may be others as well
    engine.digests = [(1, 2), (3, 5)]
    if sleep_weights:
        with pytest.raises(RunError, match="vLLM loses in its sleep"):
            serves_checkpoint()
    else:
        assert serves_checkpoint()


def level_after(metrics, asked="auto", level="auto", step=2):
    """How engines sleep after this step, at which they slept at `level`, and what the run says of it."""
    said = []
    args, run = arguments_of(train_grpo, sleep=asked), SimpleNamespace(say=said.append)
    topology = made(args=args, run=run, level=level, first_step=1)
    for _ in range(2):
        assert topology.after_step(step, metrics) == {}
    return topology.level, said


@pytest.mark.parametrize(
    ("trainer", "engine", "level"),
    [(40.0, 60.0, "none"), (40.0, 86.0, "none"), (40.0, 87.0, "kv"), (87.0, 40.0, "kv"), (120.0, 30.0, "kv")],
)
def test_engines_sleep_unless_a_tenth_of_memory_is_free(trainer, engine, level):
    # Of what was measured, the trainer's peak while learning and the engine's memory while awake count.
    metrics = {"memory/gpu": 140.0, "memory/rollout/trainer": 30.0, "memory/rollout/engine": engine}
    metrics |= {"memory/train/trainer": trainer, "memory/train/engine": 9.0, "reward/mean": 0.5}
    reason = f"learning takes {trainer:.1f} GB and an engine awake {engine:.1f} GB of 140.0"
    assert level_after(metrics) == (level, [f"--sleep {level} from now on: {reason}"])
    assert level_after(metrics, step=1) == ("auto", [])  # which makes Adam's moments


def test_engines_that_slept_for_memory_do_so_for_good():
    plenty = {"memory/gpu": 140.0, "memory/train/trainer": 1.0, "memory/rollout/engine": 1.0}
    assert level_after(plenty, "auto", "kv") == ("kv", [])
    for asked in ("kv", "weights", "none"):
        assert level_after(plenty, asked, asked) == (asked, [])


def test_trainers_free_their_memory_only_for_an_engine_that_sleeps():
    freed = []
    trainer = TrainerActor(0)
    trainer.learner = SimpleNamespace(
        learn=lambda rollouts, proof: {"learned": [*rollouts, *proof]}, release_memory=lambda: freed.append(frees)
    )
    for frees in (False, True):
        assert trainer.learn([1], [2], frees) == {"learned": [1, 2]}
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
            [("sleeping", ["engine 0"]), ("learning", ["trainer 0", "trainer 1"])],
            ["time/sleep", "time/train"],
        ),
        ("none", [("learning", ["trainer 0", "trainer 1", "engine 0"])], ["time/train"]),
    ],
)
def test_trainers_wait_for_engines_only_if_those_release_memory(level, phases, timed):
    trainers, engines = groups({"learn": [{"loss": 0.5}] * 2}, {"sleep": [None]})
    clock = StepClock()
    topology = made(Topology, trainers=trainers, engines=engines, session=trainers.session, level=level)
    assert topology.learn(["rollout"], ["proof"], clock) == {"loss": 0.5}
    assert trainers.session.waited == phases
    assert engines.called == [("sleep", level)]
    assert trainers.called == [("learn", ["rollout"], ["proof"], level != "none")]
    assert [*clock.metrics] == timed


# --- The link ---------------------------------------------------------------------------------------------------------


def test_sync_counts_only_if_every_engine_serves_it():
    report = SimpleNamespace(version=3)
    answers = {"receive_weights": [True, True]}
    trainers, engines = groups({"send_weights": [report, report]}, answers, engines=2)
    each = [({"GPU-a": "/a"}, 60.0), ({"GPU-b": "/b"}, 60.0)]
    assert link.sync(trainers, engines, 7, each) is report
    assert engines.called == [("receive_weights", 7, each)]
    answers["receive_weights"] = [True, False]
    with pytest.raises(RunError, match="after sync 3, an engine does not serve what was sent"):
        link.sync(trainers, engines, 7, each)


def test_first_sync_says_whether_engines_had_the_weights():
    said, answers = [], {"serves_checkpoint": [True, True]}
    run, (_, engines) = SimpleNamespace(say=said.append), groups({}, answers, engines=2)
    report = SimpleNamespace(tensors=3, nbytes=10**9, loader="replay")
    say_first_sync(run, report, engines)
    answers["serves_checkpoint"] = [True, False]
    say_first_sync(run, report, engines)
    had, then = "bit for bit what the engines had loaded from disk", "from now on by replay"
    assert said == [f"first sync: 3 tensors, 1.000 GB, {are}{had}; {then}" for are in ("", "not ")]


TWO_EACH = [(0, 1), (2, 3)] * 2  # ranks beside the workers of four engines


def test_rank_and_worker_on_different_devices_are_refused():
    handles = [{"GPU-b": "/b"}, {"GPU-a": "/a"}, {"GPU-c": "/c"}, {"GPU-d": "/d"}]
    ids, said = [["GPU-a", "GPU-b"], ["GPU-c", "GPU-d"]], []
    trainers, engines = groups({"open_channel": handles}, {"device_ids": ids}, 4, 2)
    run = SimpleNamespace(say=said.append)
    beside = connect_by_memory(run, trainers, engines, 1)
    assert trainers.called == [("open_channel", 2, 1)]
    assert beside == [({"GPU-a": "/a", "GPU-b": "/b"},), ({"GPU-c": "/c", "GPU-d": "/d"},)]
    assert [line.split() for line in said[0].splitlines()[1:3]] == [["GPU-b", "0", "0", "1"], ["GPU-a", "1", "0", "0"]]
    ids.extend(ids)  # two engines on each pair of GPUs
    trainers, engines = groups({"open_channel": handles}, {"device_ids": ids}, 4, 4)
    assert connect_by_memory(run, trainers, engines, 2) == beside * 2
    assert trainers.called == [("open_channel", 2, 2)]
    rows = [line.split() for line in said[1].splitlines()[1:]]
    assert [row[1:3] for row in rows] == [[str(rank), str(engine)] for engine in range(4) for rank in TWO_EACH[engine]]
    handles[3] = {"GPU-a": "/a"}
    with pytest.raises(RunError, match=r"engine 1 runs on \['GPU-c', 'GPU-d'\], and its trainer ranks on"):
        connect_by_memory(run, trainers, engines, 2)
