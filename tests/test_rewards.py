"""Rewards as TRL calls them, in this process. tests/test_reward_workers.py has those in processes of their own.

pytest tests/test_rewards.py
"""

import asyncio
import math
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import code_of
from fakes import MESSAGES, group, local_rewards, score, sums, write_lines
from transformers import TrainerState

from train_grpo import Arguments
from trainer.errors import TaskError
from trainer.flags import flags_in
from trainer.run.arguments import task_defaults
from trainer.tasks.dataset import Row
from trainer.tasks.rewards import Batch, Group, Rewards, exact, reward_metrics
from trainer.tasks.uppercase import uppercase


@pytest.fixture
def rewards(monkeypatch):
    """Rewards of these functions, by name, for rows with these columns."""

    def make(weights=None, columns=(), steps=1, timeout=20, **functions):
        monkeypatch.setitem(sys.modules, "graded", SimpleNamespace(**functions))
        rows = [Row("p", dict.fromkeys(columns), "row 7")]
        return Rewards([f"graded:{name}" for name in functions], weights, rows, steps, timeout=timeout)

    return make


def test_reward_gets_the_columns(load):
    Path("graded.py").write_text(
        "def reward(prompts, completions, answer, **_):\n"
        "    return [float(p + a == c) for p, a, c in zip(prompts, answer, completions)]\n"
    )
    write_lines("rows.jsonl", {"prompt": "a", "answer": "b"}, {"prompt": "c", "answer": "d"})
    task = load("--prompts", "rows.jsonl", "--reward", "graded:reward")
    groups = [Group(row, group(text).rollouts) for row, text in zip(task.rows, ("ab", "xx"), strict=True)]
    batch = score(task.rewards, *groups)
    assert sums(batch) == [1.0, 0.0]
    assert [rollout.rewards for rollout in batch.rollouts] == [{"reward": 1.0}, {"reward": 0.0}]
    assert batch.metrics == {"rewards/reward/mean": 0.5}


@pytest.mark.parametrize(
    ("takes", "problem"),
    [
        ("prompts, completions, answer, **_", None),
        ("completions, answer=None, *, prompts, **_", None),
        ("prompts, completions, solution, **_", "missing a required argument: 'solution'"),
        ("prompts, completions", "got an unexpected keyword argument"),
        ("prompts, answer, /, **_", "missing a required|parameter is positional"),
    ],
)
def test_reward_that_does_not_fit_the_columns_is_refused(rewards, takes, problem):
    module = {}
    exec(f"def reward({takes}): raise AssertionError", module)
    if problem is None:
        assert rewards(columns=["answer"], reward=module["reward"]).functions == {"reward": module["reward"]}
    else:
        with pytest.raises(TaskError, match=rf"cannot be called as reward\(prompts, .*, answer\).*({problem})"):
            rewards(columns=["answer"], reward=module["reward"])


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        *(
            (lambda returned=returned, **_: returned, f"returned {re.escape(repr(returned))}, and not a list")
            for returned in (1.0, None, "10", b"10", {0: 0.5, 1: 0.9}, {0.5, 0.9}, {0: 0.5, 1: 0.9}.keys())
        ),
        (
            lambda completions, **_: (int(text) for text in completions),
            r"raised ValueError: .* \(test_rewards.py, line ",
        ),
        (lambda **_: [1.0], "returned 1 values for 2 completions"),
        (lambda **_: [1.0, math.nan], r"returned nan, no finite number, for 'y' \(row 7\)"),
        (lambda **_: [1.0, -math.inf], r"returned -inf, no finite number, for 'y' \(row 7\)"),
        (lambda **_: [1.0, "a"], r"returned 'a', no finite number, for 'y' \(row 7\)"),
        (lambda **_: 1 / 0, r"raised ZeroDivisionError: division by zero \(test_rewards.py, line"),
        (
            lambda log_extra, **_: log_extra("step", [1, 1]),
            "raised ValueError: log_extra: completions have a column 'step'",
        ),
        (
            lambda log_extra, **_: log_extra("pairs", [{("a", "b"): 1}] * 2),
            "raised ValueError: log_extra: JSON cannot have the column 'pairs': keys must be str",
        ),
    ],
)
def test_reward_that_returns_nonsense(rewards, returned, message):
    with pytest.raises(TaskError, match=f"the reward mine {message}"):
        score(rewards(mine=returned), group("x", "y"))


@pytest.mark.parametrize("returned", [np.array([0.5, 1]), torch.tensor([0.5, 1]), (0.5, 1), {0: 0.5, 1: 1}.values()])
def test_reward_may_return_any_sequence_of_numbers(rewards, returned):
    assert sums(score(rewards(mine=lambda **_: returned), group("x", "y"))) == [0.5, 1]


def test_rewards_are_weighted_and_none_leaves_one_out(rewards):
    functions = rewards(
        weights=[2, 0.5],
        first=lambda completions, **_: [float(text) if text != "-" else None for text in completions],
        second=lambda completions, **_: [4.0 if text in ("1", "x") else None for text in completions],
    )
    with pytest.raises(TaskError, match="the reward first raised ValueError: could not convert string to float: 'x'"):
        score(functions, group("x"))
    batch = score(functions, group("1", "0.1", "0.1"), group("3", "5", "-"), group("-", "-"))
    assert sums(batch) == [2 * 1 + 0.5 * 4, 0.2, 0.2, 6, 10, None, None, None]  # what all leave out is not known
    assert batch.rollouts[1].rewards == {"first": 0.1, "second": None}
    assert [group.is_equal for group in batch.groups] == [False, False, True]
    assert batch.metrics == {"rewards/first/mean": pytest.approx(9.2 / 5), "rewards/second/mean": 4.0}
    assert reward_metrics(batch.groups[2:]) == {}
    assert [rollout.reward for rollout in batch.known_rollouts()] == [4, 0.2, 0.2, 6, 10]
    with pytest.raises(TaskError, match="the rewards of all completions of this step are None"):
        Batch(batch.groups[2:]).known_rollouts()


def test_completion_left_out_does_not_make_equal_rewards_unequal(rewards):
    mine = rewards(mine=lambda completions, **_: [None if text == "-" else 0.1 for text in completions])
    assert score(mine, group(*"aaaaaaa-")).groups[0].is_equal  # 7 * 0.1 / 7 is another number


def test_rewards_of_the_same_name_are_told_apart(load):
    for name in ("one", "two"):
        Path(f"{name}.py").write_text(f"def reward(completions, **_):\n    return [len('{name}')] * len(completions)\n")
    task = load("--reward", "one:reward", "--reward", "two:reward", "trainer.tasks.uppercase:uppercase")
    (rollout,) = score(task.rewards, group("A")).rollouts
    assert rollout.rewards == {"one:reward": 3.0, "two:reward": 3.0, "uppercase": 1.0}


def test_coroutines_run_together_in_one_event_loop_and_functions_one_by_one(rewards):
    everyone, loops, running, threads = threading.Barrier(4), [], [], []

    async def first(completions, **_):
        loops.append(asyncio.get_running_loop())
        return [await asyncio.to_thread(everyone.wait, 20) * 0.0]

    class Second:
        async def __call__(self, completions, **_):
            loops.append(asyncio.get_running_loop())
            return [await asyncio.to_thread(everyone.wait, 20) * 0.0]

    def third(completions, **_):
        threads.append(threading.current_thread())
        running.append(1)
        assert len(running) == 1
        time.sleep(0.05)
        running.pop()
        return [0.0]

    functions = local_rewards(rewards(third=third, first=first, fourth=third, second=Second()))
    for _ in range(2):  # the second time in the same loop
        batch = score(functions, group("a"), group("b"))
        assert list(batch.rollouts[0].rewards) == ["third", "first", "fourth", "second"]
    assert (len(loops), len(threads)) == (8, 8)
    assert len(set(loops)) == len(set(threads)) == 1


def test_each_call_has_one_prompt_and_coroutines_run_at_once(rewards):
    everyone, calls = threading.Barrier(3), []

    async def judge(prompts, **_):
        await asyncio.to_thread(everyone.wait, 20)
        return [1.0] * len(prompts)

    def plain(completions, answer, **_):
        calls.append((completions, answer))
        return [0.0] * len(completions)

    groups = [group("a", "b", answer=1), group("c", answer=2), group("d", answer=3)]
    batch = score(rewards(columns=["answer"], judge=judge, plain=plain), *groups)
    assert calls == [(["a", "b"], [1, 1]), (["c"], [2]), (["d"], [3])]
    assert sums(batch) == [1.0] * 4


def test_reward_that_fails_ends_the_run_although_others_go_on(rewards):
    ended, started = threading.Event(), time.monotonic()

    def quick(**_):
        return [1.0]

    def slow(**_):
        ended.wait(60)

    async def waiting(**_):
        await asyncio.sleep(60)

    def leaves(**_):
        sys.exit(3)

    async def fails(**_):
        raise KeyError("no")

    with pytest.raises(TaskError, match=r"the reward mine raised SystemExit: 3 \(test_rewards.py, line"):
        score(rewards(quick=quick, waiting=waiting, mine=leaves, slow=slow), group("a"))
    with pytest.raises(TaskError, match=r"the reward mine raised KeyError: 'no' \(test_rewards.py, line"):
        score(rewards(quick=quick, slow=slow, waiting=waiting, mine=fails), group("a"))
    assert time.monotonic() - started < 30
    ended.set()


def never(**_):
    threading.Event().wait()


async def never_either(**_):
    await asyncio.Event().wait()


def test_ctrl_c_ends_a_run_whose_reward_never_returns(rewards):
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
        score(rewards(mine=never), group("a"))


def test_all_prompts_rewards_may_take_longer_than_one(rewards):
    def mine(**_):
        time.sleep(0.6)
        return [1.0]

    assert sums(score(rewards(timeout=3, mine=mine), *[group("a")] * 6)) == [1.0] * 6


def test_what_a_reward_changes_is_its_own_copy(rewards):
    def takes(prompts, completions, completion_ids, tests, **_):
        """How much is left, when this has taken all of it."""
        counts = []
        for prompt, completion, ids, (own,) in zip(prompts, completions, completion_ids, tests, strict=True):
            counts.append(len(prompt) + len(completion) + len(ids) + len(own))
            for entries in (prompt, completion, ids, own):
                entries.clear()
        return counts

    async def takes_later(**arguments):
        return takes(**arguments)

    functions = rewards(columns=["tests"], takes=takes, again=takes, later=takes_later, later_again=takes_later)
    one = group("ab", "cd", prompt=[*MESSAGES], tests=[["1", "2", "3"]])
    for _ in range(2):  # as in two epochs
        batch = score(functions, one)
        assert [list(rollout.rewards.values()) for rollout in batch.rollouts] == [[1 + 1 + 2 + 3] * 4] * 2
    assert (one.row.prompt, one.row.columns) == (MESSAGES, {"tests": [["1", "2", "3"]]})


def test_column_that_cannot_be_copied_is_an_error(rewards):
    with pytest.raises(TaskError, match=r"the reward mine raised TypeError: .*_thread\.lock"):
        score(rewards(columns=["lock"], mine=lambda **_: [1.0]), group("x", lock=threading.Lock()))


def test_messages_give_conversational_completions_and_what_trl_passes(rewards):
    def mine(prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric):
        assert prompts == [MESSAGES] * 2
        assert completions == [[{"role": "assistant", "content": text}] for text in ("ab", "c")]
        assert completion_ids == [[97, 98], [99]]
        assert answer == ["1", "1"]
        assert (trainer_state.global_step, trainer_state.max_steps) == (4, 9)
        log_extra("length", [len(ids) for ids in completion_ids])
        for value in (1, 2):
            log_metric("longest", value)
        return [1, True]

    functions = rewards(mine=mine, columns=["answer"], steps=9)
    for _ in range(2):  # nothing is left for the next step
        scored = score(functions, group("ab", "c", prompt=MESSAGES, answer="1"), steps_done=4)
        assert sums(scored) == [1.0, 1.0]
        assert [rollout.extra for rollout in scored.rollouts] == [{"length": 2}, {"length": 1}]
        assert scored.metrics == {"longest": 1.5, "rewards/mine/mean": 1.0}


def test_what_a_reward_logs_by_name_arrives(rewards):
    """TRL's rewards may: log_extra(column=..., values=...)."""

    def mine(log_extra, log_metric, **_):
        log_extra(column="length", values=[7])
        log_metric(name="longest", value=0.5)
        return [1.0]

    scored = score(rewards(mine=mine), group("x"))
    assert (scored.rollouts[0].extra, scored.metrics["longest"]) == ({"length": 7}, 0.5)


def test_only_rewards_that_name_environments_get_them(monkeypatch):
    def takes(environments, **_):
        raise AssertionError

    module = SimpleNamespace(takes=takes, leaves=lambda **_: [], builtin=dict)
    monkeypatch.setitem(sys.modules, "graded", module)
    graded = Rewards([f"graded:{name}" for name in vars(module)], None, [Row("p", {}, "row 7")], environments=True)
    own = group("x")
    own.environments = [SimpleNamespace(instance="it")]
    calls = {call.name: call.arguments.get("environments") for call in graded.calls(own, 0)}
    assert calls == {"takes": ["it"], "leaves": None, "builtin": None}


def test_trls_own_rewards_run_unchanged(load):
    Path("shaped.py").write_text(
        "from trl import rewards\n"
        "overlong = rewards.get_soft_overlong_punishment(max_completion_len=40, soft_punish_cache=20)\n"
        "repetition = rewards.get_repetition_penalty_reward(ngram_size=2)\n"
        "cosine = rewards.get_cosine_scaled_reward(max_len=100)\n"
    )
    write_lines("rows.jsonl", {"prompt": MESSAGES, "solution": "$1$"}, {"prompt": MESSAGES, "solution": ""})
    names = ["think_format_reward", "accuracy_reward", "reasoning_accuracy_reward"]
    names = [f"trl.rewards:{name}" for name in names] + ["shaped:overlong", "shaped:repetition", "shaped:cosine"]
    task = load("--prompts", "rows.jsonl", "--reward", *names)
    right, wrong = r"<think>half</think>So $\boxed{1}$", r"<think>$\boxed{2}$"
    groups = [Group(row, group(right, wrong).rollouts) for row in task.rows]
    first, second, unknown, _ = score(task.rewards, *groups).rollouts
    assert first.rewards == {
        "think_format_reward": 1.0,
        "accuracy_reward": 1.0,
        "reasoning_accuracy_reward": 1.0,
        "overlong": pytest.approx((20 - len(right)) / 20),
        "repetition": pytest.approx(-5 / (len(right) - 1)),  # th, hi, in, nk and k>
        "cosine": pytest.approx(0.5 + 0.25 * (1 + math.cos(math.pi * len(right) / 100))),
    }
    assert (second.rewards["accuracy_reward"], second.rewards["think_format_reward"]) == (0.0, 0.0)
    assert second.rewards["cosine"] < 0
    assert unknown.rewards["accuracy_reward"] is None  # as TRL leaves out what has no parseable solution
    assert first.extra["answer_parsed"] != "[skipped]" == unknown.extra["answer_parsed"]


@pytest.mark.slow  # importing TRL's trainer takes ten seconds
def test_rewards_are_called_as_trls_trainer_calls_them(rewards, monkeypatch):
    from trl.trainer import grpo_trainer

    calls = []

    def spy(completions, **arguments):
        calls.append(arguments | {"completions": completions})
        return [{"ab": 1.0, "c": None, "d": 3.0, "e": 0.5}[message["content"]] for (message,) in completions]

    async def other(completions, **_):
        return [{"ab": 1, "c": 2, "d": 3, "e": 4}[message["content"]] for (message,) in completions]

    groups = [group("ab", "c", prompt=MESSAGES, answer=1), group("d", "e", prompt=MESSAGES, answer=None)]
    scored = score(rewards(columns=["answer"], spy=spy, other=other), *groups)
    once = {"trainer_state", "log_extra", "log_metric"}  # and of all else an entry for each completion
    ours = {name: value if name in once else value + calls[1][name] for name, value in calls[0].items()}
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    monkeypatch.setattr(grpo_trainer, "gather", lambda tensor: tensor)
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device=torch.device("cpu"), is_main_process=False),
        args=SimpleNamespace(report_to=[]),
        reward_funcs=[spy, other],
        reward_processing_classes=[None, None],
        reward_func_names=["spy", "other"],
        state=TrainerState(max_steps=1),
        environments=None,
        async_loop=loop,
        _log_completion_extra=None,
        _log_metric=None,
    )
    inputs = [{"prompt": MESSAGES, "answer": answer} for answer in ours["answer"]]
    values = grpo_trainer.GRPOTrainer._calculate_rewards(
        trainer, inputs, ours["prompts"], ours["completions"], ours["completion_ids"]
    )
    loop.call_soon_threadsafe(loop.stop)
    (theirs,) = calls[2:]
    assert theirs.keys() == ours.keys()
    assert vars(ours["trainer_state"]).items() <= vars(theirs["trainer_state"]).items()
    for name in ours.keys() - once:
        assert theirs[name] == ours[name], name
    own = [[math.nan if value is None else value for value in rollout.rewards.values()] for rollout in scored.rollouts]
    torch.testing.assert_close(values, torch.tensor(own, dtype=torch.float32), equal_nan=True)
    assert sums(scored) == values.nansum(1).tolist()


def test_code_of_the_documentation_runs_as_printed(load):
    task, short, _, reward, shaped, *_ = code_of("docs/tasks.md")
    Path("arithmetic.py").write_text(task)
    Path("logged.py").write_text(reward)
    Path("shaped.py").write_text(shaped)
    Path("short.py").write_text(short)
    assert task_defaults("short", flags_in(Arguments), {})["clip_high"] == 0.4
    task = load("--task", "arithmetic", "--reward", "arithmetic:right", "logged:reward", "shaped:overlong")
    assert {row.prompt for row in task.eval_rows}.isdisjoint(row.prompt for row in task.rows)
    row = task.rows[0]
    right = row.columns["answer"]
    batch = score(task.rewards, Group(row, group(f"{right} is it", "?").rollouts))
    assert [list(rollout.rewards.values()) for rollout in batch.rollouts] == [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    assert batch.metrics["completions/chars"] == (len(right) + 7) / 2


def test_modules_of_the_working_folder_take_no_packages_place(load, monkeypatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    Path("colorsys.py").write_text("raise AssertionError")
    Path("trainer.py").write_text("raise AssertionError")
    Path("graded.py").write_text("import colorsys, trainer\ndef reward(**_): return colorsys.rgb_to_hls(0, 0, 0)[:1]\n")
    assert sums(score(load("--reward", "graded:reward").rewards, group("a"))) == [0.0]
    for name, file in (("colorsys", "lib/.*/colorsys.py"), ("trainer", "trainer/__init__.py")):
        with pytest.raises(TaskError, match=rf"--reward {name}:mine: {name} has no function mine \(/.*{file}\)"):
            load("--reward", f"{name}:mine")


def test_exact_reward_takes_whole_numbers_as_written_and_no_answer_for_unknown():
    answers = [7, 7.0, 7.0, 7.5, "7.0", "7", None, None, True, math.inf, 1e22]
    said = ["7", "7", "7.0", "7.5", "7", "7.0", "None", "7", "1", "inf", "1" + "0" * 22]
    assert exact(said, answers) == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, None, None, 0.0, 1.0, 1.0]


def test_built_in_reward():
    assert uppercase(["ABcd", "", [{"role": "assistant", "content": "É!"}]]) == [0.5, 0.0, 0.0]
