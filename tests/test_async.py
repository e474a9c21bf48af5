"""rlhf_async.py: what steps learn from, which weights each token comes from, and whole runs.

pytest tests/test_async.py            functions, and the script's own engine and trainer without Ray
pytest tests/test_async.py -m slow    runs of the script
"""

import asyncio
import json
import shutil
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import ray
import torch
from conftest import cpu_only
from test_learning import CPU, config, rollouts

import rlhf_async
from recipe import async_rollouts
from recipe.async_rollouts import InFlight, RolloutsAhead
from recipe.checkpoint import Models
from recipe.dataset import Row
from recipe.errors import MismatchError, RunError, TaskError
from recipe.grpo import GRPOLearner
from recipe.learner import Rollout
from recipe.ray_session import RaySession
from recipe.tiny_model import build_tiny_model, byte_tokenizer

MAX_MISMATCH = rlhf_async.MAX_MISMATCH["cpu"]
MAX_GROWTH = 48 << 20  # bytes, in 60 syncs: of the weights alone that is 120 MiB


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(build_tiny_model(tmp_path_factory.mktemp("model")))


# What a step learns from: without an engine


class Ahead(RolloutsAhead):
    """With an engine that answers at once: `begun` are the steps that it got prompts of."""

    def __init__(self, score=lambda groups, *_: groups, **arguments):
        args = rlhf_async.Arguments(group_size=2, prompts_per_step=2, steps=6, **arguments)
        self.version, self.steps, self.lengths, self.waiting = 0, [], [], []
        engine = SimpleNamespace(sample=SimpleNamespace(remote=self.sample))
        session = RaySession(SimpleNamespace(tick=lambda *_: None), None)
        session.wait = lambda _, engine: [engine.result()]
        session._note_shared_memory, session._tell_heir = lambda: None, lambda *_: None
        task = SimpleNamespace(
            draw=lambda step: [Row(f"{step}", "", {}, [step])] * 2,
            draw_others=lambda step, count, drawn: [Row("other", "", {}, [99])] * count,
            rewards=SimpleNamespace(score=score, metrics=lambda groups: {}),
        )
        super().__init__(session, engine, task, args, 0)

    def sample(self, prompts, args, seed, first, evaluation, waits=False):
        self.steps.append(prompts[0][0])
        self.lengths.append(args.max_tokens)
        self.waiting.append(waits)
        answer = Future()
        answer.future = lambda: answer
        answer.set_result([Rollout(ids, [7], [0.0], 1.0, versions=[self.version]) for ids in prompts for _ in range(2)])
        return answer


@pytest.mark.parametrize(
    ("max_staleness", "begun"), [(0, [1, 2, 3, 4, 5, 6, 7]), (2, [3, 4, 5, 6, 6, 6, 7]), (9, [6, 6, 6, 6, 6, 6, 7])]
)
def test_the_engine_begins_with_what_will_not_be_too_old_and_with_nothing_else(max_staleness, begun):
    ahead = Ahead(max_staleness=max_staleness)
    for step, last in enumerate(begun, 1):
        batch = ahead.take(step)
        assert {group.row.prompt_ids[0] for group in batch.groups} == {step}  # in the order of the data
        assert ahead.steps == list(range(1, last + 1))
        oldest = step - 1 - batch.rollouts[0].versions[0]
        assert batch.metrics == {"async/staleness_mean": oldest, "async/staleness_max": oldest}
        ahead.version = step  # learned and synced
    assert oldest == 0  # of what proves the last sync


@pytest.mark.parametrize(("version", "ages"), [(3, "-3 to -3"), (-3, "3 to 3")])
def test_labels_that_cannot_be_are_an_error(version, ages):
    ahead = Ahead(max_staleness=2)
    ahead.version = version
    with pytest.raises(RunError, match=rf"step 1: .* tokens are {ages} updates old, and not 0 to 2"):
        ahead.take(1)


def test_a_reward_that_raises_ends_the_step_that_it_belongs_to():
    def score(groups, step, steps):
        if step == 2:
            raise TaskError("no luck")
        return groups

    ahead = Ahead(score, max_staleness=2)
    ahead.take(1)
    with pytest.raises(TaskError, match="no luck"):
        ahead.take(2)


def test_a_reward_that_does_not_return_stops_neither_the_engine_nor_the_run():
    ahead = Ahead(lambda groups, step, steps: threading.Event().wait(), max_staleness=2, reward_timeout=0.5)
    with pytest.raises(TaskError, match=r"the rewards of step 1 took longer than 0.5 s: --reward-timeout"):
        ahead.take(1)
    assert ahead.steps == [1, 2, 3]


@pytest.mark.parametrize(("busy", "whose"), [(False, "the evaluation after step 1"), (True, "step 1")])
def test_an_evaluation_waits_no_longer_for_rewards_than_a_step_does(busy, whose):
    ahead = Ahead(lambda *_: threading.Event().wait(), max_staleness=2, reward_timeout=0.5, eval_every=1)
    ahead.task.eval_rows = [Row("held out", "", {}, [5])]
    if busy:  # with the rewards of step 1, which come first
        with pytest.raises(TaskError):
            ahead.take(1)
    with pytest.raises(TaskError, match=rf"^the rewards of {whose} took longer than 0.5 s: --reward-timeout"):
        ahead.evaluate(1)


def test_groups_with_equal_rewards_are_replaced_while_others_are_on_their_way():
    def score(groups, *_):
        return [
            replace(group, rollouts=[replace(each, reward=float(i)) for i, each in enumerate(group.rollouts)])
            if group.row.prompt == "other"
            else group
            for group in groups
        ]

    ahead = Ahead(score, max_staleness=1, dynamic_sampling=1)
    batch = ahead.take(1)
    assert [group.row.prompt for group in batch.groups] == ["other", "other"]
    assert [rollout.prompt_ids for rollout in batch.rollouts] == [[99]] * 4
    assert ahead.waiting[:3] == [True, True, False]  # two steps', and the others, which are wanted first
    assert batch.metrics["dynamic_sampling/replaced"] == 2


def test_what_is_left_to_score_when_a_run_ends_does_not_start_ray_anew():
    """ray.get and ray.wait do, and a call of an actor does."""
    may_go_on = threading.Event()

    def score(groups, *_):
        may_go_on.wait()
        return groups

    ahead = Ahead(score, max_staleness=2, reward_timeout=0.5, dynamic_sampling=1)
    with pytest.raises(TaskError, match="--reward-timeout"):
        ahead.take(1)
    ahead.session.leaving = time.monotonic(), None
    may_go_on.set()
    for step in ahead.ahead:  # whose groups have equal rewards, so that others are drawn
        with pytest.raises(RunError, match="the run has ended"):
            step.result.result(timeout=30)
    assert not ray.is_initialized()


def test_a_batch_with_few_new_tokens_gets_more_to_prove_the_sync(monkeypatch):
    monkeypatch.setattr(async_rollouts, "PROOF_TOKENS", 10)
    ahead = Ahead(max_staleness=1)
    new, old = ahead.take(1), ahead.take(2)
    ahead.version = 1
    assert [rollout.versions for rollout in ahead.proof(2, old)] == [[1]] * 4
    assert ahead.lengths == [16, 16, 16, 3]  # four completions of so many tokens are enough
    monkeypatch.setattr(async_rollouts, "PROOF_TOKENS", 4)
    assert ahead.proof(1, new) == []
    assert len(ahead.lengths) == 4


def test_tokens_of_the_trainers_own_weights_prove_a_batch(model):
    learner = GRPOLearner(model, config(max_mismatch=1e-5), CPU)
    learner.step = 3
    batch = rollouts(learner)

    def labelled(*rows: list[int]) -> list[Rollout]:
        """The batch with these labels, in turns. The log-probabilities of tokens labelled 2 are other weights' own."""
        return [
            replace(
                rollout,
                versions=(labels := [rows[i % len(rows)][j % 2] for j in range(len(rollout.logprobs))]),
                logprobs=[own - (label == 2) / 10 for own, label in zip(rollout.logprobs, labels, strict=True)],
            )
            for i, rollout in enumerate(batch)
        ]

    mixed, old = labelled([2, 3], [2, 2], [3, 3]), labelled([2, 2])
    assert learner.mismatch(mixed) < 1e-6
    wrong = [replace(rollout, versions=[3] * len(rollout.versions)) for rollout in mixed]
    with pytest.raises(MismatchError, match="over the bound"):
        learner.learn(wrong)
    with pytest.raises(MismatchError, match="no token comes from the weights that the trainer holds"):
        learner.learn(old)
    with pytest.raises(MismatchError, match="over the bound"):
        learner.learn(old, proof=wrong)
    assert learner.step == 3
    assert learner.learn(old, proof=mixed)["logprobs/mismatch"] < 1e-6
    learner.step = 3
    assert learner.learn([replace(rollout, versions=None) for rollout in rollouts(learner)])["logprobs/mismatch"] < 1e-6


class HeldLLM:
    """Generates one token for each prompt, once `goes_on` is set. `begun` are the prompts that it has begun with.

    A generation, a pause and a resumption take a second each of the `clock`.
    """

    def __init__(self):
        self.begun, self.goes_on, self.clock = [], asyncio.Event(), 0.0
        self.priorities, self.engine_core = [], SimpleNamespace(pause_scheduler_async=self.pause)

    async def generate(self, prompt, params, name, priority):
        self.begun.append(prompt["prompt_token_ids"])
        self.priorities.append(priority)
        await self.goes_on.wait()
        self.clock += 1
        span, logprobs = SimpleNamespace(version="4", start=0, end=1), SimpleNamespace(logprobs=[-1.0])
        output = SimpleNamespace(token_ids=[70], finish_reason="length", logprobs=logprobs, weight_versions=[span])
        yield SimpleNamespace(prompt_token_ids=self.begun[-1], outputs=[output])

    async def pause(self, mode, clear_cache):
        self.clock += 1

    async def update_weight_version(self, version):
        pass

    async def resume_generation(self):
        self.clock += 1

    def get_tokenizer(self):
        return byte_tokenizer()


def test_no_more_groups_are_in_flight_than_asked_for_but_those_that_do_not_wait():
    async def run():
        llm, args = HeldLLM(), rlhf_async.Arguments(group_size=1)
        in_flight = InFlight(llm, 2)

        async def begun_after(prompts: list, waits: bool) -> tuple[asyncio.Task, list]:
            call = asyncio.create_task(in_flight.sample(prompts, args, 0, 0, False, waits))
            for _ in range(100):
                await asyncio.sleep(0)  # let all that can begin do so
            return call, list(llm.begun)

        many, begun = await begun_after([[i] for i in range(5)], waits=True)
        assert begun == [[0], [1]]
        proof, begun = await begun_after([[7]], waits=False)
        assert begun == [[0], [1], [7]]
        llm.goes_on.set()
        assert [rollout.versions for rollout in await proof] == [[4]]
        assert len(await many) == 5
        assert llm.begun == [[0], [1], [7], [2], [3], [4]]
        assert llm.priorities == [0, 0, -1, 0, 0, 0]  # the lowest number goes first

    asyncio.run(run())


def test_an_engine_is_idle_in_a_sync_and_while_it_has_nothing_to_generate(monkeypatch):
    async def run():
        llm = HeldLLM()
        monkeypatch.setattr(async_rollouts, "time", SimpleNamespace(perf_counter=lambda: llm.clock))
        in_flight, shares = InFlight(llm, 2), []
        await in_flight.resume(0)
        call = asyncio.create_task(in_flight.sample([[5]], rlhf_async.Arguments(group_size=1), 0, 0, False, waits=True))
        while not llm.begun:
            await asyncio.sleep(0)
        for _ in range(2):
            llm.clock += 2
            await in_flight.pause()
            await in_flight.resume(1)
            shares.append(in_flight.idle_share)
            llm.goes_on.set()
            await call
        return shares

    assert asyncio.run(run()) == [1 / 4, 4 / 5]  # it generates in the first three seconds, then in one


# Which weights tokens come from: the script's trainer in this process, its engine in an event loop of a thread


class Pair:
    def __init__(self, model: str):
        self.args = rlhf_async.Arguments(
            tensor_parallel_size=1,
            group_size=2,
            prompts_per_step=2,
            max_tokens=200,
            max_mismatch=MAX_MISMATCH,
            engine_args='{"kv_cache_memory_bytes": 8388608}',  # which is soon touched as a whole
        )
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.engine = rlhf_async.Engine(model, self.args, "cpu")
        self.trainer = rlhf_async.Trainer(Models(model, model, None), self.args, "cpu")
        self.learner = self.trainer.learner
        self.original = {name: weight.detach().clone() for name, weight in self.learner.model.named_parameters()}
        from vllm.utils.network_utils import get_open_port

        group = "127.0.0.1", get_open_port(), 2
        joining = self.start(self.engine.init_weight_update_group(*group))
        self.trainer.init_weight_update_group(*group)
        joining.result()
        self.sync(0)

    def start(self, call) -> Future:
        return asyncio.run_coroutine_threadsafe(call, self.loop)

    def sample(self, seed: int, prompts=((5, 6, 7, 8), (9, 10, 11))) -> Future:
        return self.start(self.engine.sample([list(ids) for ids in prompts], self.args, seed, 0, False))

    @torch.no_grad()
    def hold(self, version: int) -> None:
        """Make the trainer's weights those of this version."""
        self.learner.step = version
        for name, weight in self.learner.model.named_parameters():
            weight.copy_(self.original[name] * (1 + version / 100))

    def sync(self, version: int, label: int | None = None) -> None:
        self.hold(version)
        receiving = self.start(self.engine.receive_weights(version if label is None else label))
        self.trainer.send_weights()
        assert receiving.result()


@pytest.fixture(scope="module")
def pair(model):
    with pytest.MonkeyPatch.context() as patch:
        for name in ("VLLM_CPU_OMP_THREADS_BIND", "TORCH_COMPILE_DISABLE"):
            patch.setenv(name, "")  # so that what the engine sets goes again
        patch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8")  # or it grows with each new length of a prompt
        patch.setattr(rlhf_async, "die_with_children", lambda: None)  # this process is not an actor
        pair = Pair(model)
        yield pair
        pair.engine.llm.shutdown()
        del pair.engine  # while vLLM can still end it once more


@cpu_only
@pytest.mark.parametrize("syncs", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_every_token_has_the_weights_that_its_label_says(pair, syncs):
    """Also where a completion has begun under others. All are generated across syncs, which leave memory as it was."""
    family, memory, sampled = psutil.Process().children(recursive=True), [], []
    running = {seed: pair.sample(seed) for seed in range(2)}
    for version in range(1, syncs + 1):
        time.sleep(0.02)  # a few tokens
        pair.sync(version)
        for seed in [seed for seed, call in running.items() if call.done()]:
            sampled += running.pop(seed).result()
            running[seed + 2] = pair.sample(seed + 2)
        if version % 20 == 0:
            memory.append(sum(process.memory_full_info().uss for process in family))
    sampled += [rollout for call in running.values() for rollout in call.result()]
    assert len(memory) < 2 or memory[-1] - memory[1] < MAX_GROWTH  # the first forty take what is kept for the others
    assert all(rollout.versions == sorted(rollout.versions) for rollout in sampled)
    assert max(len(set(rollout.versions)) for rollout in sampled) > 5
    seen = {version for rollout in sampled for version in rollout.versions}
    assert len(seen) > syncs / 2
    for version in seen:
        pair.hold(version)
        assert pair.learner.mismatch([rollout for rollout in sampled if version in rollout.versions]) < MAX_MISMATCH


@cpu_only
def test_a_label_without_its_weights_is_noticed(pair):
    pair.sync(3)
    call = pair.sample(1)
    time.sleep(0.1)
    pair.sync(4, label=5)
    pair.hold(5)
    with pytest.raises(MismatchError, match="over the bound"):
        pair.learner.mismatch(call.result())


@cpu_only
def test_a_tensor_that_a_sync_leaves_as_it_was_is_noticed(pair, monkeypatch):
    """The engine serves what was sent, bit for bit, and it is not what the trainer holds."""
    pair.sync(6)
    named_tensors, (name, *_) = pair.learner.named_tensors, pair.original
    stale = {name: named_tensors()[name].clone()}
    monkeypatch.setattr(pair.learner, "named_tensors", lambda: named_tensors() | stale)
    call = pair.sample(1)
    pair.sync(7)
    with pytest.raises(MismatchError, match="over the bound"):
        pair.learner.mismatch(call.result())


# Runs


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@cpu_only
@pytest.mark.slow
def test_run_learns_and_no_token_is_too_old_in_a_hundred_updates(script, tmp_path):
    text = script("rlhf_async.py", "--steps", 100, "--save-every", 0, "--output", "run").finish(300)
    assert text.splitlines()[-1].startswith("OK: reward "), text
    metrics = rows(tmp_path / "run")
    assert metrics[35]["reward/mean"] > 0.95  # rlhf.py has as much after 30 steps
    assert [row["async/staleness_max"] for row in metrics[:3]] == [0, 1, 2]
    assert all(0 <= row["async/staleness_mean"] <= row["async/staleness_max"] <= 2 for row in metrics)
    assert max(row["logprobs/mismatch"] for row in metrics) < 1e-5
    assert all(0 <= row[f"async/{side}_idle"] <= 1 for row in metrics for side in ("engine", "trainer"))


@cpu_only
@pytest.mark.slow
def test_without_staleness_it_goes_on_as_rlhf_does(script, tmp_path):
    script("rlhf.py", "--tensor-parallel-size", 1, "--steps", 4, "--save-every", 2, "--output", "run").finish(180)
    expected = rows(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-000004")
    script("rlhf_async.py", "--max-staleness", 0, "--resume", "run").finish(180)
    resumed = rows(tmp_path / "run")
    same = [name for name in expected[0] if not name.startswith(("time/", "sync/", "tokens/"))]
    assert [[row[name] for name in same] for row in resumed] == [[row[name] for name in same] for row in expected]
    assert [row["async/staleness_max"] for row in resumed[2:]] == [0, 0]
