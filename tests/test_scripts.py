"""The flat scripts: rlhf.py, rlhf_colocate.py, rlhf_online_quant.py, rlhf_nccl.py.

pytest tests/test_scripts.py            their functions, against a plain computation, and a run of rlhf.py
pytest tests/test_scripts.py -m slow    a run of each of the others, and of rlhf.py with a killed worker
pytest tests/test_scripts.py -m long    other processes killed, in other phases
"""

import ast
import importlib
import math
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import ray
import torch
from conftest import HANGS_SECONDS, ROOT, SYNC, Script, copy, cpu_only, is_alive, title_of
from learners import long_model
from transformers import AutoModelForCausalLM

import rlhf
import rlhf_colocate
import rlhf_cpu
import rlhf_utils

SCRIPTS = ["rlhf", "rlhf_colocate", "rlhf_online_quant", "rlhf_nccl"]


# --- The learning step ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_model():
    return rlhf_cpu.small_model()


@pytest.fixture
def trainer(small_model):
    trainer = rlhf.Trainer()
    trainer.load(small_model, 1e-3, "cpu")
    return trainer


def samples_of(trainer, lengths: list[tuple[int, int]], distance: float = 0.0) -> list[rlhf.Sample]:
    """Samples with prompts and completions of these lengths, and log-probabilities that are so far from the trainer's
    on average."""
    samples = []
    for prompt_length, length in lengths:
        ids = torch.randint(2, 258, (prompt_length + length,))
        logprobs = plain_logprobs(trainer.model, ids, prompt_length).detach()
        noise = distance * torch.tensor([1.0, -1.0]).repeat(length)[:length]
        prompt_ids, own_ids = ids[:prompt_length].tolist(), ids[prompt_length:].tolist()
        samples.append(rlhf.Sample(prompt_ids, own_ids, (logprobs + noise).tolist(), ""))
    return samples


def plain_logprobs(model, ids: torch.Tensor, prompt_length: int) -> torch.Tensor:
    """The log-probabilities of one completion's tokens, by a pass of its own."""
    logprobs = (model(ids[None]).logits[0] / rlhf.TEMPERATURE).log_softmax(-1)
    return logprobs[prompt_length - 1 : -1].gather(1, ids[prompt_length:, None])[:, 0]


def lengths_taken(trainer) -> list[list[int]]:
    """The lengths of each micro-batch that the trainer takes from now on."""
    taken, logprobs = [], trainer.logprobs

    def recorded(samples):
        taken.append([len(sample.prompt_ids) + len(sample.ids) for sample in samples])
        return logprobs(samples)

    trainer.logprobs = recorded
    return taken


LENGTHS = [(5, 9), (7, 1), (3, 12), (30, 4), (5, 8)]


@pytest.mark.parametrize("script", SCRIPTS)
def test_importance_is_a_weight_and_learns_nothing(script):
    """The gradient of -min(p / p_engine, 2) * advantage * log p, with the first factor as a constant."""
    token_losses = importlib.import_module(script).token_losses
    logprobs = torch.tensor([[-1.0, -2.0, -0.5]], requires_grad=True)
    engine = torch.tensor([[-1.0, -1.0, -3.0]])
    losses = token_losses(logprobs, engine, torch.tensor([[0.5]]))
    importance = torch.tensor([[1.0, 1 / math.e, 2.0]])
    torch.testing.assert_close(losses.detach(), -importance * 0.5 * logprobs.detach())
    losses.sum().backward()
    torch.testing.assert_close(logprobs.grad, -importance * 0.5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_each_completion_alone(trainer, monkeypatch, temperature):
    monkeypatch.setattr(rlhf, "TEMPERATURE", temperature)
    samples = samples_of(trainer, LENGTHS)
    logprobs, engine_logprobs, mask = trainer.logprobs(samples)
    for sample, *rows in zip(samples, logprobs, engine_logprobs, mask.bool(), strict=True):
        own, engine, is_token = rows
        torch.testing.assert_close(own[is_token], torch.tensor(sample.logprobs))
        torch.testing.assert_close(engine[is_token], torch.tensor(sample.logprobs))
        assert engine[~is_token].eq(0).all()


def test_update_is_that_of_a_plain_computation(small_model, trainer, monkeypatch):
    """Over all tokens of the batch, in micro-batches of similar lengths."""
    monkeypatch.setattr(rlhf, "MICRO_BATCH_TOKENS", 70)
    monkeypatch.setattr(rlhf, "MAX_MISMATCH", 1)
    samples = samples_of(trainer, LENGTHS, distance=0.5)
    advantages = torch.tensor([1.0, -1.0, 0.5, 2.0, -0.3])
    taken = lengths_taken(trainer)

    plain = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32).eval()
    loss, tokens = 0.0, sum(len(sample.logprobs) for sample in samples)
    for sample, advantage in zip(samples, advantages, strict=True):
        logprobs = plain_logprobs(plain, torch.tensor(sample.prompt_ids + sample.ids), len(sample.prompt_ids))
        importance = (logprobs.detach() - torch.tensor(sample.logprobs)).exp().clamp(max=2)
        loss = loss - (importance * advantage * logprobs).sum() / tokens
    loss.backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0).step()

    assert trainer.learn(samples, advantages) == pytest.approx(0.5, abs=1e-3)
    assert taken == [[8, 13], [14, 15], [34]]
    for mine, other in zip(trainer.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("distance", "fits"), [(0.04, True), (0.2, False), (float("nan"), False)])
def test_mismatch_that_grows_ends_the_run_before_the_update(trainer, distance, fits):
    trainer.learn(samples_of(trainer, LENGTHS, distance=0.02), torch.zeros(5))
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    samples = samples_of(trainer, LENGTHS, distance)
    if fits:
        trainer.learn(samples, torch.ones(5))
    else:
        with pytest.raises(RuntimeError, match="do not compute the same"):
            trainer.learn(samples, torch.ones(5))
    same = [now.equal(then) for now, then in zip(trainer.model.parameters(), before, strict=True)]
    assert all(same) != fits


@pytest.mark.parametrize(("distance", "printed"), [(0.6, r"0\.6 > 0\.2"), (float("nan"), "nan > nan")])
def test_first_mismatch_has_a_bound(trainer, distance, printed):
    with pytest.raises(RuntimeError, match=f"mismatch {printed}$"):
        trainer.learn(samples_of(trainer, LENGTHS, distance), torch.ones(5))


def test_reward_that_is_no_finite_number_ends_the_run_before_the_update(trainer):
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    with pytest.raises(RuntimeError, match="a reward is no finite number"):
        trainer.learn(samples_of(trainer, LENGTHS), torch.tensor([1.0, math.nan, 0.0, 0.0, 0.0]))
    assert all(torch.equal(old, new) for old, new in zip(before, trainer.model.parameters(), strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_divide_the_samples_and_take_equally_many_micro_batches(trainer, monkeypatch, ranks):
    """A rank that took more than the others would wait for them forever."""
    monkeypatch.setattr(rlhf_colocate, "MICRO_BATCH_TOKENS", 40)
    monkeypatch.setattr(rlhf_colocate.dist, "all_reduce", lambda _: None)
    samples = samples_of(trainer, [(1, 1 + i * i % 17) for i in range(32)])
    of_ranks = []
    for rank in range(ranks):
        own = object.__new__(rlhf_colocate.Trainer)
        vars(own).update(vars(trainer), rank=rank, ranks=ranks)
        of_ranks.append(lengths_taken(own))
        own.learn(samples, torch.zeros(32))
    assert {len(batches) for batches in of_ranks} == {len(of_ranks[0])}
    taken = [length for batches in of_ranks for batch in batches for length in batch]
    assert sorted(taken) == sorted(2 + i * i % 17 for i in range(32))
    for batch in (batch for batches in of_ranks for batch in batches):
        assert len(batch) * max(batch) <= 40


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("3 + 4 = 7", "7", 1.0),
        ("It is 1,234.", 1234, 1.0),
        ("10-3", "3", 1.0),
        ("-3", "-3.0", 1.0),
        ("1234", "1,234", 1.0),
        ("7 or 8", "7", 0.0),
        ("", "7", 0.0),
        ("aBC", None, 2 / 3),
    ],
)
def test_reward(text, answer, expected):
    assert rlhf.reward(text, answer) == pytest.approx(expected)


# --- Waiting ----------------------------------------------------------------------------------------------------------


class Call:
    """A call of a Ray actor, by what it has returned or raised; None: it is running."""

    def __init__(self, answer=None):
        self.answer = answer

    @classmethod
    def wait(cls, calls: list, num_returns: int, timeout: float) -> tuple[list, list]:
        return [call for call in calls if call.answer], [call for call in calls if not call.answer]

    @classmethod
    def get(cls, calls: list) -> list:
        for call in calls:
            if isinstance(call.answer, Exception):
                raise call.answer
        return [call.answer for call in calls]


@pytest.fixture
def actors(monkeypatch):
    """Two actors, by the answer to a ping: one is busy, the other one idle."""
    monkeypatch.setattr(ray, "wait", Call.wait)
    monkeypatch.setattr(ray, "get", Call.get)
    return [SimpleNamespace(__ray_ready__=SimpleNamespace(remote=lambda ping=ping: ping)) for ping in (Call(), Call(1))]


def test_wait_ends_with_the_results(actors):
    assert rlhf_utils.wait_for(actors, Call("first"), Call("second")) == ["first", "second"]


def test_wait_ends_with_the_reason_of_an_actor_in_one_line(actors):
    error = ray.exceptions.RayTaskError("Engine.load", "a traceback", ValueError("9 heads\n  do not divide by 2"))
    with pytest.raises(RuntimeError, match=r"^ValueError: 9 heads do not divide by 2$"):
        rlhf_utils.wait_for(actors, Call(), Call(error.as_instanceof_cause()))


def test_reason_names_the_call_that_raised(actors):
    """It may have been called by another actor."""
    traceback = (
        "ray::Trainer.send_weights() (pid=1)\n  ray.get(call)\nray::Engine.call() (pid=2)\nValueError: cancelled"
    )
    error = ray.exceptions.RayTaskError("Trainer.send_weights", traceback, ValueError("cancelled"))
    with pytest.raises(RuntimeError, match=r"^ValueError in Engine\.call: cancelled$"):
        rlhf_utils.wait_for(actors, Call(error.as_instanceof_cause()))


def test_long_reason_keeps_its_beginning_and_its_end(actors):
    error = ray.exceptions.RayTaskError("Engine.load", "a traceback", ValueError("a" * 150 + "b" + "a" * 350))
    with pytest.raises(RuntimeError, match=rf"^ValueError: {'a' * 150} \.\.\. {'a' * 350}$"):
        rlhf_utils.wait_for(actors, Call(), Call(error.as_instanceof_cause()))
    error = ray.exceptions.RayTaskError("Engine.load", "a traceback", ValueError("a" * 501))
    with pytest.raises(RuntimeError, match=rf"^ValueError: {'a' * 150} \.\.\. {'a' * 350}$"):
        rlhf_utils.wait_for(actors, Call(), Call(error.as_instanceof_cause()))


FEW = "--prompts-per-step, --max-tokens and --steps are at least 1"


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    ("lines", "flags", "message"),
    [
        ('{"prompt": "a"}\n\n', "--prompts rows.jsonl", "a step takes 8 lines of --prompts"),
        ('{"answer": 5}', "--prompts rows.jsonl --prompts-per-step 1", "with texts as `prompt`, or with chats"),
        ('"prompt"', "--prompts rows.jsonl --prompts-per-step 1", "with texts as `prompt`, or with chats"),
        ('{"prompt": "a"}\n{"prompt": []}', "--prompts rows.jsonl --prompts-per-step 2", "or with chats"),
        ("prompt: a", "--prompts rows.jsonl", "--prompts: rows.jsonl: Expecting value: line 1 column 1"),
        ("", "--prompts none.jsonl", "--prompts: none.jsonl: [Errno 2] No such file or directory"),
        ("", "--group-size 1", "--group-size is at least 2"),
        ("", "--steps 0", FEW),
        ("", "--max-tokens 0", FEW),
    ],
)
def test_what_cannot_be_is_a_usage_error(tmp_path, monkeypatch, capsys, script, lines, flags, message):
    (tmp_path / "rows.jsonl").write_text(lines)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, *flags.split()])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / f"{script}.py"), run_name="__main__")
    assert message in capsys.readouterr().err


def test_wait_ends_with_the_death_of_an_actor_that_is_not_called(actors):
    died = Call(ray.exceptions.ActorDiedError())
    actors[1].__ray_ready__.remote = lambda: died
    with pytest.raises(RuntimeError, match=r"^ActorDiedError: The actor died"):
        rlhf_utils.wait_for(actors, Call())


def test_wait_has_a_limit(actors):
    with pytest.raises(TimeoutError, match=r"not done within 0\.1 s"):
        rlhf_utils.wait_for(actors, Call(), timeout=0.1)


def test_process_ends_with_its_children():
    code = "import multiprocessing, time, rlhf_utils\n"
    code += "child = multiprocessing.get_context('fork').Process(target=time.sleep, args=[100])\n"
    code += "child.start(), rlhf_utils.end_with_children(), child.kill(), time.sleep(100)\n"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT, timeout=90).returncode == 1


FAMILY = """
import multiprocessing, os, signal, sys, time, rlhf_utils

def child(pipe):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as if it computed, and did not look at the signal
    if (grandchild := os.fork()):
        pipe.send(grandchild)
    time.sleep(100)

ours, pipe = multiprocessing.Pipe()
process = multiprocessing.get_context("fork").Process(target=child, args=[pipe])
process.start()
grandchild = ours.recv()
if "others" in sys.argv:
    rlhf_utils._started = lambda pid: "of another process"
rlhf_utils.end_with_children()
print(process.pid, grandchild, flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize("whose", ["children", "others"])
def test_children_end_with_a_killed_process_and_not_those_that_have_their_numbers_by_then(whose):
    parent = subprocess.Popen([sys.executable, "-c", FAMILY, whose], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    family = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    assert len(family) == 2
    assert all(map(is_alive, family))
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + (10 if whose == "children" else 4)
    while (left := [own for own in family if is_alive(own)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for own in left:
        own.kill()
    parent.stdout.close()
    assert left == ([] if whose == "children" else family)


# --- The files --------------------------------------------------------------------------------------------------------

# What is told otherwise where the diff is the lesson; all else that two scripts share is the same, word for word.
DIFFERENT = {
    "rlhf_online_quant": {"main", "Engine.load"},
    "rlhf_colocate": {
        "Engine.load",
        "Engine.generate",
        "Engine.receive_weights",
        "Trainer.load",
        "Trainer.learn",
        "main",
    },
    "rlhf_nccl": {"Engine.load", "Trainer.connect", "Trainer.send_weights", "main"},
}


def definitions(script: str) -> dict[str, str]:
    """Functions and methods of a script, by name, as their syntax trees without docstrings."""
    found = {}
    for node in ast.parse((ROOT / f"{script}.py").read_text()).body:
        functions = node.body if isinstance(node, ast.ClassDef) else [node]
        of_class = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        found |= {of_class + each.name: ast.dump(each) for each in functions if isinstance(each, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("script", DIFFERENT)
def test_what_scripts_share_is_the_same_word_for_word(script):
    first, other = definitions("rlhf"), definitions(script)
    assert {name for name in first.keys() & other.keys() if first[name] != other[name]} == DIFFERENT[script]


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_imports_what_is_copied_along(script):
    tree = ast.parse((ROOT / f"{script}.py").read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    libraries = {"torch", "vllm", "ray", "transformers", "torchao", "rlhf_utils", "rlhf_cpu"}
    assert {name.split(".")[0] for name in names} - sys.stdlib_module_names <= libraries


# --- Runs -------------------------------------------------------------------------------------------------------------


def run_of(tmp_path, script: str, *flags, **environment) -> Script:
    """A run of a copy of the script, in a folder that has nothing but what is to be copied along."""
    copied = copy(tmp_path / "copied", f"{script}.py", "rlhf_cpu.py", *SYNC)
    return Script(copied, sys.executable, f"{script}.py", *map(str, flags), **environment)


@cpu_only
@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("rlhf", []),
        pytest.param("rlhf_colocate", [], marks=pytest.mark.slow),
        pytest.param("rlhf_colocate", ["--tensor-parallel-size", 2], marks=pytest.mark.slow),
        pytest.param("rlhf_online_quant", [], marks=pytest.mark.slow),
        pytest.param("rlhf_nccl", [], marks=pytest.mark.slow),
    ],
)
def test_copied_script_learns(tmp_path, script, flags):
    """In fewer steps than the default, which is for reading along, by larger ones."""
    text = run_of(tmp_path, script, "--steps", 10, "--learning-rate", 1e-2, *flags).finish()
    last_line = text.splitlines()[-1]
    assert last_line.startswith("OK: reward "), text
    first, last = (float(word) for word in last_line.split()[2:5:2])
    assert first < 0.2
    assert last > 0.9


@cpu_only
@pytest.mark.slow
def test_model_may_take_more_tokens_than_the_kv_cache_holds(tmp_path):
    text = run_of(tmp_path, "rlhf", "--model", long_model(tmp_path / "model"), "--steps", 1).finish()
    assert text.splitlines()[-1].startswith("OK: "), text


@cpu_only
@pytest.mark.long
def test_last_line_says_what_vllm_refuses(tmp_path):
    """The small model has four heads."""
    text = run_of(tmp_path, "rlhf", "--tensor-parallel-size", 3).finish()
    reason = ".*ValidationError.* attention heads .4. must be divisible by tensor parallel size .3."
    assert re.match(f"RuntimeError: {reason}", text.splitlines()[-1]), text


# --- Faults: the run ends within a minute, names the cause, and leaves no process -------------------------------------

FAULT_SECONDS = 60
LONG = ["--steps", 10_000, "--group-size", 16, "--max-tokens", 64]  # phases in which there is time for a fault
IN_SYNC = "ray::Engine.receive_weights"
KILLS = [  # the script, the title of a process in the phase of the fault, whom it kills, the run's last line
    ("rlhf", IN_SYNC, "VLLM::Worker_TP1", r"engine worker 1 \(pid .*\) died|Engine", pytest.mark.slow),
    ("rlhf", "ray::Engine.generate", "VLLM::EngineCore", "Engine", pytest.mark.long),
    ("rlhf", "ray::Engine.generate", "ray::Trainer", "Trainer", pytest.mark.long),
    ("rlhf", "ray::Trainer.learn", "ray::Engine", "Engine|engine worker . .* died", pytest.mark.long),
    ("rlhf", "ray::Engine.load", "ray::Trainer", "Trainer", pytest.mark.long),
    ("rlhf", "VLLM::Worker_TP1", "VLLM::EngineCore", "Engine", pytest.mark.long),
    ("rlhf_colocate", "ray::Trainer.learn", "ray::Trainer", "Trainer", pytest.mark.long),
    ("rlhf_colocate", IN_SYNC, "VLLM::EngineCore", "Engine|engine worker . .* died", pytest.mark.long),
    ("rlhf_nccl", "ray::Trainer.send_weights", "ray::Trainer", "Trainer", pytest.mark.long),
    ("rlhf_online_quant", "ray::Engine.generate", "Ctrl-C", "KeyboardInterrupt", pytest.mark.long),
]


@cpu_only
@pytest.mark.parametrize(
    ("script", "phase", "victim", "message"),
    [pytest.param(*kill[:4], id=" ".join(kill[:3]), marks=kill[4]) for kill in KILLS],
)
def test_run_ends_at_a_fault(tmp_path, script, phase, victim, message):
    run = run_of(tmp_path, script, *LONG, "--tensor-parallel-size", 2)
    if not phase.startswith(("ray::Engine.load", "VLLM")):  # which are of the start
        run.wait_for("step 2/")
    deadline = time.monotonic() + HANGS_SECONDS
    awaited = [phase] if victim == "Ctrl-C" else [phase, victim]
    while True:
        run.process.send_signal(signal.SIGSTOP)  # so that it begins no other phase before the fault
        family = run.descendants()
        found = [[own for own in family if title in title_of(own)] for title in awaited]
        if all(found):
            break
        run.process.send_signal(signal.SIGCONT)
        assert run.process.poll() is None, run.text()
        assert time.monotonic() < deadline, run.text()
        time.sleep(0.05)
    failed = time.monotonic()
    if victim == "Ctrl-C":
        os.killpg(run.process.pid, signal.SIGINT)
    else:
        found[1][0].kill()
    run.process.send_signal(signal.SIGCONT)
    text = run.finish(FAULT_SECONDS)
    assert run.process.returncode == 1
    reason = message if victim == "Ctrl-C" else f"RuntimeError: .*({message})"
    assert re.match(reason, text.splitlines()[-1]), text
    while left := [process for process in family if is_alive(process)]:
        assert time.monotonic() - failed < FAULT_SECONDS, left
        time.sleep(0.1)
