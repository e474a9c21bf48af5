"""Rewards in processes of their own: with a Ray of its own, without an engine. tests/test_rewards.py: what rewards are.

pytest tests/test_reward_workers.py            processes, coroutines, errors, the reward model's scores
pytest tests/test_reward_workers.py -m slow    processes that die
"""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import HANGS_SECONDS
from fakes import session_without_ray

from trainer.errors import RunError, TaskError
from trainer.learning.rollout import Rollout
from trainer.learning.value_models import RewardModel
from trainer.rollouts.reward_workers import RewardWorkers
from trainer.run.arguments import RunArguments
from trainer.run.session import RaySession
from trainer.tasks.dataset import Row, load_rows
from trainer.tasks.rewards import Batch, Group, Rewards

FUNCTIONS = """
import asyncio, os, signal, sys, threading, time

imported, begun = time.time(), []

def where(prompts, completions, log_extra, log_metric, **_):
    log_extra("pid", [os.getpid()] * len(prompts))
    log_extra("imported", [imported] * len(prompts))
    log_metric("torch is there", "torch" in sys.modules)
    return [float(len(c)) for c in completions]

def has_little_time(completions, **_):
    def give_up(*_):
        raise TimeoutError
    signal.signal(signal.SIGALRM, give_up)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        while True:
            pass
    except TimeoutError:
        return [0.25] * len(completions)

async def all_at_once(completions, log_extra, **_):
    begun.append(1)
    while len(begun) < 3:
        await asyncio.sleep(0.01)
    log_extra("loop", [id(asyncio.get_running_loop())] * len(completions))
    return [0.5] * len(completions)

def sees(images, **_):
    return [float(image.getpixel((0, 0))[0]) for (image,) in images]

def raises(completions, **_):
    raise ValueError("no luck")

def short(completions, log_extra, **_):
    log_extra("one", [1])
    return [0.0] * len(completions)

def never(completions, **_):
    threading.Event().wait()

def dies_once(completions, **_):
    if not os.path.exists("died"):
        open("died", "w").close()
        os._exit(1)
    return [1.0] * len(completions)

def dies(completions, **_):
    print("called", file=open("calls", "a"), flush=True)
    os._exit(1)
"""


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """A session in a working folder that has these functions."""
    folder, before = tmp_path_factory.mktemp("rewards"), Path.cwd()
    (folder / "functions.py").write_text(FUNCTIONS)
    os.chdir(folder)
    with RaySession(RunArguments(timeout=HANGS_SECONDS), lambda *_: None) as session:
        yield session
    os.chdir(before)


def workers(session, *names, timeout=HANGS_SECONDS, **options):
    return RewardWorkers(
        Rewards([f"functions:{name}" for name in names], None, [], timeout=timeout, **options), session
    )


def groups(*prompts):
    """For each prompt two completions, "" and "x"."""
    return Batch([Group(Row(p, {}, "row"), [Rollout([5], [6], [0.0], None, t) for t in ("", "x")]) for p in prompts])


@pytest.mark.slow
def test_functions_have_the_main_thread_of_a_process_that_has_imported_them(session):
    rewards = workers(session, "where", "has_little_time")
    time.sleep(3)  # in which engines would start
    first, second = (rewards.compute(groups("a", "b", "c"), step) for step in range(2))
    assert [rollout.reward for rollout in first.rollouts] == [0.25, 1.25] * 3
    assert first.metrics == second.metrics
    assert first.metrics == {
        "torch is there": 0.0, "rewards/where/mean": 0.5, "rewards/has_little_time/mean": 0.25,
    }  # fmt: skip
    processes = {(rollout.extra["pid"], rollout.extra["imported"]) for rollout in [*first.rollouts, *second.rollouts]}
    ((pid, _),) = processes
    assert pid != os.getpid()


def test_coroutines_of_all_prompts_run_at_once_in_one_loop(session):
    rewards = workers(session, "all_at_once")
    first, second = (rewards.compute(groups("a", "b", "c"), step) for step in range(2))
    assert [rollout.reward for rollout in first.rollouts] == [0.5] * 6
    assert len({rollout.extra["loop"] for rollout in [*first.rollouts, *second.rollouts]}) == 1


def test_images_arrive_as_pils(session, tmp_path):
    import PIL.Image

    PIL.Image.new("RGB", (2, 2), (7, 0, 0)).save(tmp_path / "red.png")
    row = {"prompt": [{"role": "user", "content": "?"}], "image": str(tmp_path / "red.png")}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (row,) = load_rows(str(tmp_path / "rows.jsonl"), None, "train", None, [])
    batch = Batch([Group(row, groups("a").rollouts)])
    assert [rollout.reward for rollout in workers(session, "sees").compute(batch, 0).rollouts] == [7.0, 7.0]


def test_error_in_another_process_is_one_line(session):
    with pytest.raises(TaskError, match=r"^the reward raises raised ValueError: no luck \(functions.py, line \d+\)$"):
        workers(session, "where", "raises").compute(groups("a"), 0)
    with pytest.raises(TaskError, match=r"^the reward short raised ValueError: zip\(\) argument 2 is shorter"):
        workers(session, "short").compute(groups("a"), 0)


def test_reward_that_never_returns_ends_the_wait(session):
    rewards = workers(session, "never", timeout=20)
    rewards.compute(groups(), 0)
    rewards.rewards.timeout = 1.0
    with pytest.raises(TaskError, match=r"^the reward never took longer than 1 s .*: --reward-timeout$"):
        rewards.compute(groups("a", "b"), 0)


def test_run_that_ends_calls_no_more_rewards(session):
    rewards = workers(session, "where")
    session.ending = True
    try:
        with pytest.raises(RunError, match="the run has ended"):
            rewards.compute(groups("a"), 0)
    finally:
        session.ending = False


@pytest.mark.slow
def test_call_of_a_process_that_dies_is_made_again(session):
    assert [rollout.reward for rollout in workers(session, "dies_once").compute(groups("a", "b"), 0).rollouts] == [
        1
    ] * 4
    with pytest.raises(RunError, match=r"^the reward dies (died|failed) while rewarding"):
        workers(session, "dies").compute(groups("a"), 0)
    assert Path("calls").read_text() == "called\n" * 4


def test_reward_model_scores_content_in_parts_as_text():
    calls = []

    def agreed(phase, method, *texts):
        calls.append((phase, method, *texts))
        return [10.0, 20.0]

    rewards = Rewards([], [3.0], [], models=["reward_model"])
    prompt = [{"role": "user", "content": [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]}]
    batch = Batch([Group(Row(prompt, {}, "row"), groups("a").rollouts)])
    scored = RewardWorkers(rewards, session_without_ray(), SimpleNamespace(agreed=agreed)).compute(batch, 0)
    assert [rollout.reward for rollout in scored.rollouts] == [30.0, 60.0]
    assert scored.metrics == {"rewards/reward_model/mean": 15.0}
    prompts = [[{"role": "user", "content": "Hi there"}]] * 2
    completions = [[{"role": "assistant", "content": text}] for text in ("", "x")]
    assert calls == [("rewarding", RewardModel.rewards, prompts, completions)]
