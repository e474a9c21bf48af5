"""Groups of actors, and the session that waits for them: with a Ray of its own, without an engine.

pytest tests/test_actors.py
"""

import asyncio
import itertools
import os
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import psutil
import pytest
import ray
from conftest import HANGS_SECONDS, ROOT, Script, assert_removed, is_alive, spans_of, timeline_of
from fakes import local_rewards
from ray import cloudpickle
from ray.exceptions import ActorUnavailableError

from rlhf_utils import WeightSyncError
from trainer.errors import EngineError, RunError, TaskError
from trainer.learning.config import SamplingConfig
from trainer.learning.rollout import Rollout
from trainer.rollouts.rollouts import Rollouts
from trainer.rollouts.teacher import score
from trainer.run import actors
from trainer.run import session as run_session
from trainer.run.actors import ActorGroup, Seat, StepClock, reserve, seat
from trainer.run.arguments import RunArguments
from trainer.run.session import RaySession, explain, one_line
from trainer.run.timeline import Timeline
from trainer.tasks.dataset import Row
from trainer.tasks.rewards import Batch, Group, Rewards
from trainer.tasks.task import TaskArguments

FAULT_SECONDS = 30


@pytest.fixture(scope="module")
def ray_session():
    with RaySession(RunArguments(timeout=HANGS_SECONDS), lambda *_: None) as session:
        yield session


@pytest.fixture
def session(ray_session, monkeypatch):
    """The session, without actors. What it says of its progress is in `said`."""
    said = []
    monkeypatch.setattr(ray_session, "progress", lambda *progress: said.append(progress))
    ray_session.said = said
    yield ray_session
    ray_session.end(dict(ray_session.actors), patience=0)


@pytest.fixture(scope="module", autouse=True)
def pickled_by_value():
    """What Ray sends of this module to actors, which do not find it."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


class Actor:
    """Does as it is told."""

    def __init__(self, number: int):
        self.number = number

    def answer(self, *args) -> tuple:
        return self.number, *args

    def pid(self) -> int:
        return os.getpid()

    def sleep(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.number

    def fail(self, error: Exception | type[Exception]) -> None:
        raise error

    def die(self, seconds: float = 0) -> None:
        """Now, or so long after the answer."""
        threading.Timer(seconds, os._exit, [1]).start() if seconds else os._exit(1)

    def rollouts(self, count: int) -> list:
        return [rollout() for _ in range(count)]


class UnpicklableError(Exception):
    """What Ray can pass on only as text: it is made from other arguments than it has."""

    def __init__(self):
        super().__init__("no template; see https://hf.co/docs\nfor more")


class Receiver(Actor):
    """An engine that waits for a trainer's weights."""

    def receive(self, trainer: int, ended: Path) -> None:
        self.ended = ended
        while psutil.pid_exists(trainer):
            time.sleep(0.05)

    def shutdown(self) -> None:
        self.ended.touch()


class Engines(Actor):
    """Has the trainer send, as the pool of servers does."""

    async def take_weights(self, trainer) -> None:
        await trainer.sleep.remote(60)


class AsyncActor(Actor):
    def __init__(self, number: int):
        self.synced = asyncio.Event()

    async def sample(self) -> None:
        await self.synced.wait()

    async def sync(self) -> None:
        self.synced.set()


class Sampler:
    """An engine that dies of the second step's prompts."""

    def __init__(self, number: int):
        pass

    async def sample(self, prompts, sampling, *_) -> list:
        if prompts == [[2]]:
            os._exit(1)
        return [rollout() for _ in range(sampling[0]["n"])]


class Scorer:
    """A teacher's engine that dies of a completion of nine tokens."""

    def __init__(self, number: int):
        pass

    def score(self, completions) -> list:
        if any(len(ids) == 9 for _, ids in completions):
            os._exit(1)
        return [-ids for _, ids in completions]


def rollout():
    from trainer.learning.rollout import Rollout  # takes seconds, which most actors need not spend

    ids = np.zeros(1, np.int32)
    return Rollout(ids, ids, ids, text="A", versions=ids)


def group(session: RaySession, name: str, count: int = 1, cls: type = Actor, **options) -> ActorGroup:
    return ActorGroup(session, name, cls, [Seat({"num_cpus": 0, **options}, [i]) for i in range(count)])


def await_start(session: RaySession) -> None:
    """Wait until all actors have started, so that what is timed afterwards does not have their start."""
    ray.get([actor.__ray_ready__.remote() for actor in session.actors.values()], timeout=HANGS_SECONDS)


@pytest.mark.slow
def test_a_worker_of_ray_starts_without_torch(session):
    """All of them run `start_tracker`, whatever they do: an import of torch would take seconds in each."""
    assert not ray.get(ray.remote(lambda: "torch" in sys.modules).remote())


FINDING = """
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec

import ray
from trainer.run.arguments import RunArguments
from trainer.run.session import RaySession

@ray.remote
def found():
    names = ["trainer", "weight_sync", "datasets", "mine", "beside"]
    child = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))  # as vLLM's processes are
    specs = [*map(find_spec, names), *child.map(find_spec, names)]
    return [os.getcwd(), *(os.path.realpath(spec.origin) for spec in specs)]

with RaySession(RunArguments(), lambda *_: None):
    print(*ray.get(found.remote()))
"""


@pytest.mark.parametrize(
    "own",
    [pytest.param("trainer.py", marks=pytest.mark.slow), pytest.param("trainer/__init__.py", marks=pytest.mark.long)],
)
def test_modules_of_the_working_folder_come_last_in_workers_and_their_processes(tmp_path, own):
    folder, script = tmp_path / "here", tmp_path / "script" / "main.py"
    for file in (folder / own, folder / "weight_sync.py", folder / "datasets.py", folder / "mine.py"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    script.parent.mkdir()
    script.write_text(FINDING)
    (script.parent / "beside.py").touch()
    text = Script(folder, sys.executable, "../script/main.py", PYTHONPATH=str(ROOT)).finish(120)
    origins = [ROOT / "trainer/__init__.py", ROOT / "weight_sync/__init__.py", datasets.__file__, folder / "mine.py"]
    assert text.splitlines()[-1].split() == [
        *map(os.path.realpath, [folder, *[*origins, script.parent / "beside.py"] * 2])
    ]


ENDING = """
import multiprocessing, subprocess, time
from multiprocessing.shared_memory import SharedMemory

import ray
from trainer.run.arguments import RunArguments
from trainer.run.session import RaySession

def worker(writer):
    memory = SharedMemory(create=True, size=1)
    writer.send(memory.name)
    time.sleep(1000)

def core(writer):  # Ray ends an actor's children, and not theirs
    multiprocessing.Process(target=worker, args=[writer]).start()

class Engine:
    def start(self):
        reader, writer = multiprocessing.Pipe(duplex=False)
        multiprocessing.get_context("fork").Process(target=core, args=[writer]).start()
        return reader.recv()

    def shutdown(self):
        subprocess.run(["sh", "-c", "setsid sh -c 'echo $$ > started; exec sleep 1000' &"], check=True)
        time.sleep(1)

with RaySession(RunArguments(), lambda *_: None) as session:
    session.actors["engine"] = ray.remote(Engine).remote()
    print(ray.get(session.actors["engine"].start.remote()))
"""


@pytest.mark.slow
def test_what_an_engine_starts_as_it_ends_is_ended_and_what_its_workers_shared_is_removed(tmp_path):
    (tmp_path / "main.py").write_text(ENDING)
    name = Script(tmp_path, sys.executable, "main.py", PYTHONPATH=str(ROOT)).finish(120).splitlines()[-1]
    assert name.startswith("psm_")
    assert not is_alive(int((tmp_path / "started").read_text()))
    assert_removed({f"/dev/shm/{name}"})


def test_call_goes_to_all_actors_and_answers_keep_their_order(session):
    trainers, engine = group(session, "trainer", 2), group(session, "engine")
    assert (len(trainers), len(engine)) == (2, 1)
    assert [*session.actors] == ["trainer 0", "trainer 1", "engine"]
    assert trainers.call("learning", Actor.answer, "a", [1]) == [(0, "a", [1]), (1, "a", [1])]
    assert trainers.call("learning", Actor.answer, "a", each=[("x",), ("y", 2)]) == [(0, "a", "x"), (1, "a", "y", 2)]
    assert trainers.agreed("learning", Actor.answer, "a") == (0, "a")
    assert engine.call("learning", Actor.answer, each=[("own",)]) == [(0, "own")]

    slow, fast = engine.begin(Actor.sleep, 1), trainers.begin(Actor.answer)
    assert ([*slow], [*fast]) == (["engine"], ["trainer 0", "trainer 1"])
    assert session.wait("learning", slow, fast) == [[0], [(0,), (1,)]]


@pytest.fixture
def unpickled(monkeypatch):
    """The rollouts that arrive in this process."""
    arrived = []

    def note(rollout, state) -> None:
        arrived.append(rollout)
        vars(rollout).update(state)

    monkeypatch.setattr(Rollout, "__setstate__", note, raising=False)
    return arrived


def test_an_answer_is_fetched_once(session, unpickled):
    (answer,) = group(session, "engine").call("generating", Actor.rollouts, 5)
    assert len(answer) == len(unpickled) == 5


def one(completions, **_):
    return [1.0] * len(completions)


def test_rollouts_are_fetched_once_and_a_death_ends_the_step(session, unpickled):
    task = SimpleNamespace(
        draw=lambda step: [Row(f"{step}", {}, "", [step])] * 2,
        rewards=local_rewards(Rewards([f"{__name__}:one"], None, [])),
        tools=None,
        args=TaskArguments(prompts_per_step=2),
        seed=0,
        steps=2,
    )
    with Rollouts(group(session, "engine", 2, Sampler), task, SamplingConfig(group_size=2), 0) as rollouts:
        assert len(rollouts.take(1).rollouts) == len(unpickled) == 4
        with pytest.raises(RunError, match=r"^the engine [01] died while generating$"):
            rollouts.take(2)


def test_teachers_share_the_completions_and_one_that_dies_is_named(session):
    def batch(*lengths):
        return Batch([Group(None, [Rollout([1], np.arange(length), []) for length in lengths]) for _ in range(2)])

    teachers = group(session, "teacher", 2, Scorer)
    scored = score(teachers, batch(2, 1, 0, 3)).rollouts
    known = [own.teacher_logprobs.tolist() for own in scored if len(own.completion_ids)]
    assert known == [[0, -1], [0], [0, -1, -2]] * 2
    with pytest.raises(RunError, match=r"^the teacher [01] died while scoring$"):
        score(teachers, batch(2, 9, 3))


@pytest.mark.parametrize("waiting_for", ["actor", "thread"])
def test_death_of_an_idle_actor_ends_the_wait(session, waiting_for):
    trainer, engine = group(session, "trainer"), group(session, "engine")
    pid = engine.agreed("generating", Actor.pid)
    trainer.call("learning", Actor.answer)
    psutil.Process(pid).kill()
    started = time.monotonic()
    with pytest.raises(RunError, match=r"^the engine died while learning$"):
        if waiting_for == "thread":
            session.wait_for_thread(Future(), lambda: "learning")
        else:
            trainer.call("learning", Actor.sleep, 60)
    assert time.monotonic() - started < FAULT_SECONDS


def test_timeline_has_the_calls_that_were_answered_and_the_waits_for_them(session, monkeypatch, tmp_path):
    engines, trainers = group(session, "engine", 2), group(session, "trainer")
    await_start(session)
    monkeypatch.setattr(session, "timeline", Timeline(tmp_path / "timeline.json"))
    engines.begin(Actor.sleep, 60)  # nobody waits for it
    trainers.call("learning", Actor.sleep, 0.2)
    session.timeline.close()
    ((begin, end),) = spans_of(spans := timeline_of(tmp_path), "trainer", "sleep")
    ((waits, waited),) = spans_of(spans, "driver", "learning")
    assert 0.2e6 < end - begin < 30e6
    assert waits < end < waited
    assert len(spans) == 2


def test_death_is_not_blamed_on_who_waited_for_the_dead(session):
    trainer, engines = group(session, "trainer"), group(session, "engines", cls=Engines)
    pid = trainer.agreed("starting", Actor.pid)
    threading.Timer(1, lambda: psutil.Process(pid).kill()).start()
    with pytest.raises(RunError, match=r"^the trainer died while syncing$"):
        engines.call("syncing", Engines.take_weights, trainer.actors["trainer"])


def test_actor_that_ray_cannot_reach_has_died(monkeypatch):
    """Ray waits for a second for the news of a death, and then it does not know."""
    out_of_reach, follows = ActorUnavailableError("connection refused", None), WeightSyncError("a connection closed")
    assert str(explain("generating", "engine", out_of_reach)) == "the engine died while generating"
    monkeypatch.setattr(run_session, "_answer", lambda call: call)
    monkeypatch.setattr(run_session.ray, "wait", lambda *_, **__: None)
    session = RaySession(RunArguments(), lambda *_: None)
    error = session._blame("syncing", {follows: "trainer", out_of_reach: "engine"})
    assert str(error) == "the engine died while syncing"


@pytest.mark.slow
def test_death_after_an_answer_ends_the_wait(session):
    trainer, engine = group(session, "trainer"), group(session, "engine")
    await_start(session)
    started = time.monotonic()
    with pytest.raises(RunError, match=r"^the engine died while starting$"):
        session.wait("starting", engine.begin(Actor.die, 1) | trainer.begin(Actor.sleep, 60))
    assert time.monotonic() - started < FAULT_SECONDS


def test_a_sync_does_not_wait_behind_a_thousand_requests(session):
    engine = group(session, "engine", cls=AsyncActor)
    sampling = [engine.begin(AsyncActor.sample) for _ in range(1001)]
    engine.call("syncing", AsyncActor.sync)
    for calls in sampling:
        session.wait("sampling", calls)


def test_engine_that_waits_has_time_to_end_by_itself(session, tmp_path):
    trainer, engine = group(session, "trainer"), group(session, "engine", cls=Receiver)
    await_start(session)
    engine.begin(Receiver.receive, trainer.agreed("asking", Actor.pid), tmp_path / "ended")
    session.end(dict(session.actors), patience=10)
    assert (tmp_path / "ended").exists()
    assert not session.actors


def test_death_outranks_a_failed_sync_and_that_all_others(session):
    trainer, engine, critic = (group(session, name) for name in ("trainer", "engine", "critic"))
    await_start(session)
    sync, other = WeightSyncError("the engine's connection closed"), ValueError("of another kind")
    for begin, error, message in (
        (
            lambda: critic.begin(Actor.fail, other) | trainer.begin(Actor.fail, sync),
            WeightSyncError,
            "the engine's connection closed",
        ),
        (
            lambda: critic.begin(Actor.fail, other) | engine.begin(Actor.fail, TaskError("my words")),
            TaskError,
            "my words",
        ),
        (
            lambda: critic.begin(Actor.fail, other),
            RunError,
            "the critic failed while syncing: ValueError: of another kind",
        ),
        (lambda: trainer.begin(Actor.fail, sync) | engine.begin(Actor.die), RunError, "the engine died while syncing"),
    ):
        with pytest.raises(error) as raised:
            session.wait("syncing", begin())
        assert str(raised.value) == message
        shown = getattr(raised.value, "details", "")  # of what nobody expected
        assert ("test_actors.py" in shown and "raise error" in shown) == ("of another kind" in message)


def test_error_is_told_by_its_type_and_its_message(session):
    critic, lines = group(session, "critic"), "no template; see https://hf.co/docs\nfor more"
    text = lines.replace("\n", " ")
    for error, said in (
        (ValueError(lines), f"the critic failed while starting: ValueError: {text}"),
        (UnpicklableError, f"the critic failed while starting: test_actors.UnpicklableError: {text}"),
        (AssertionError, "the critic failed while starting: AssertionError"),
        (EngineError("no memory"), f"the critic cannot start: no memory; more in {sys.stderr.name}"),
    ):
        with pytest.raises(RunError) as raised:
            critic.call("starting", Actor.fail, error)
        assert str(raised.value) == said
    assert one_line(OSError(28, "No space left", "/run")) == "[Errno 28] No space left: '/run'"
    assert one_line(KeyError()) == "KeyError"


@pytest.fixture
def clock(session, monkeypatch):
    """The session's clock: a second later at each look, however busy this machine is. The timeout is 2.5 of them."""
    monkeypatch.setattr(run_session, "time", SimpleNamespace(monotonic=itertools.count().__next__))
    monkeypatch.setattr(session, "timeout", 2.5)


@pytest.mark.parametrize("waiting_for", ["actor", "thread"])
def test_phase_that_takes_longer_than_the_timeout_is_named(session, waiting_for, clock):
    started = time.monotonic()
    with pytest.raises(RunError, match=r"^learning was not done within 2\.5 s \(--timeout\)$"):
        if waiting_for == "thread":
            session.wait_for_thread(Future(), lambda: "learning")
        else:
            group(session, "trainer").call("learning", Actor.sleep, 60)
    actors = [] if waiting_for == "thread" else ["trainer"]
    assert session.said == [("learning", 1, actors), ("learning", 2, actors)]
    assert time.monotonic() - started > 2.9  # it looks every second


def test_each_phase_of_a_thread_has_its_own_time(session, clock):
    phases, done = ["generating", "generating", "rewarding", "rewarding"], Future()

    def phase() -> str:
        if len(phases) == 1:
            done.set_result("batch")
        return phases.pop(0)

    session.wait_for_thread(done, phase)
    assert session.said == [("generating", 1, []), ("generating", 2, []), ("rewarding", 1, []), ("rewarding", 2, [])]


def test_what_ray_lacks_is_said_and_not_waited_for(session, monkeypatch):
    monkeypatch.setattr(actors, "RESERVE_SECONDS", 1)
    with pytest.raises(
        RunError, match=r"^Ray could not reserve \[\{'GPU': 1\}\] within 1 s: another run may hold them"
    ):
        reserve([{"GPU": 1}], "PACK")


def test_actor_and_its_workers_take_their_seats_bundles(session):
    bundles = reserve([{"CPU": 0.5}, {"CPU": 0.25}], "PACK")
    try:
        own = seat(bundles, 1, num_cpus=0.25)
        assert (own.bundles, seat(bundles, 0, [0, 1]).bundles) == ([1], [0, 1])
        assert group(session, "trainer", **own.options).agreed("starting", Actor.answer) == (0,)
    finally:
        ray.util.remove_placement_group(bundles)


# What a step takes


def ranks_of(*memories: dict[str, float]):
    """A group of trainers whose GPUs have this memory."""
    return SimpleNamespace(call=lambda phase, method: [*memories])


def test_clock_has_seconds_and_memory_of_each_phase(monkeypatch):
    now = [10.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    on_gpus = ranks_of({"trainer": 30.0, "engine": 50.0, "gpu": 150.0}, {"trainer": 9.0, "engine": 60.0, "gpu": 140.0})
    measured = on_gpus.call
    on_gpus.call = lambda *args: now.append(now.pop() + 100.0) or measured(*args)  # it takes long
    largest = {"trainer": 30.0, "engine": 60.0}
    for trainers, memory in ((None, {}), (ranks_of({}, {}), {}), (on_gpus, largest)):  # on CPU, there is no memory
        clock = StepClock(trainers, phase_began=now[0])
        expected = {"memory/gpu": 140.0} if memory else {}
        for phase, seconds in (("rollout", 3.0), ("train", 2.0)):
            now[0] += seconds
            clock.end(phase)
            expected |= {f"time/{phase}": seconds} | {f"memory/{phase}/{name}": size for name, size in memory.items()}
        assert clock.metrics == expected
