"""Flags and settings, and those of a run that goes on.

pytest tests/test_flags.py
"""

import json
import re
import sys

import pytest
from conftest import settings_of

import train_distill
import train_grpo
import train_ppo
from trainer.flags import flags_in
from trainer.run.arguments import of_today, resumed
from trainer.run.folder import RunFolder


def test_flags_have_both_spellings_lists_grow_and_false_turns_off(flags):
    given = ["--group_size", "4", "--train-vision", "false", "--offload-optimizer", "--tools", "a:b", "--tools", "c:d"]
    args = flags(train_grpo, *given)
    assert (args.sampling.group_size, args.model.train_vision, args.optimizer.offload_optimizer) == (4, False, True)
    assert args.tools.tools == ["a:b", "c:d"]
    assert args.run.given.keys() == {"group_size", "train_vision", "offload_optimizer", "tools"}


def test_settings_come_from_a_task_alone(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "with_settings", raising=False)
    task = settings_of(tmp_path, importance_cap=3, chat_template_kwargs="[]")
    with pytest.raises(SystemExit):
        flags(train_grpo, *task)
    wrong = "DEFAULTS of --task with_settings: chat_template_kwargs: Value error, a JSON object is wanted"
    assert wrong in capsys.readouterr().err
    monkeypatch.delitem(sys.modules, "with_settings")
    args = flags(train_grpo, *settings_of(tmp_path, importance_cap="3"))
    assert args.loss.importance_cap == 3
    assert args.run.given.keys() == {"task"}
    monkeypatch.delitem(sys.modules, "with_settings")


def test_flags_that_need_others_are_taken_with_them(flags, tmp_path):
    args = flags(train_grpo, "--output", tmp_path, "--eval-samples", 4, "--eval-every", 5, "--eval-share", 0.5)
    assert args.task.eval_samples == 4
    with RunFolder(args.run, "test") as run:
        run.start_metrics(0, args)
    assert flags(train_grpo, "--resume", tmp_path, "--eval-every", 0).task.eval_samples == 4  # it cannot go
    options = '{"max_num_seqs":5,"kv_cache_dtype":"fp8"}'
    assert flags(train_grpo, "--engine-args", options).engine.engine_args == options


@pytest.mark.parametrize("script", [train_grpo, train_ppo])
def test_help_has_every_flag_once_under_what_it_belongs_to(flags, capsys, script):
    with pytest.raises(SystemExit):
        flags(script, "--help")
    text = capsys.readouterr().out
    heads = re.findall(r"^(\S.*):$", text, re.M)
    assert {"Prompts and rewards", "Which model, how many steps, where the results go"} <= set(heads)
    assert len(heads) == len(set(heads))
    names = re.findall(r"^  (--[\w-]+)", text, re.M)
    taken = flags_in(script.Arguments)
    assert {name.removeprefix("--").replace("-", "_") for name in names} == {
        n for n in taken if not taken[n].is_setting
    }
    (settings,) = re.findall(r"DEFAULTS of a task \(docs/tasks.md\) may also set: (.*)", " ".join(text.split()))
    assert set(re.findall(r"(\w+) \(", settings)) == {name for name in taken if taken[name].is_setting}
    assert len(names) == len(set(names))
    parts = dict(zip(heads, re.split(r"^\S.*:$", text, flags=re.M)[1:], strict=True))
    assert "--dataset" in parts["Prompts and rewards"]
    assert "--kl-coef" not in parts["Prompts and rewards"]
    assert "a longer sequence passes alone (default: 32768)" in " ".join(text.split())
    assert "default: None" not in text


def test_resume_keeps_what_was_given_and_takes_this_scripts_defaults(flags, tmp_path):
    run = str(tmp_path / "run")
    left_out = ["that run had --sleep, which this script does not know: left out"]
    for script, share, given, remarks in (
        (train_grpo, None, ["--output", run, "--group-size", "4", "--learning-rate", "1e-6", "--sleep", "kv"], []),
        (train_distill, 0.8, ["--resume", run], left_out),
        (train_grpo, None, ["--resume", run], []),
    ):
        args = flags(script, *given)
        assert (args.sampling.group_size, args.engine.gpu_memory_utilization) == (4, share)
        # Also one that is what the default is:
        assert set(args.run.given) - {"sleep"} == {"group_size", "learning_rate"}
        assert args.run.remarks == remarks
        with RunFolder(args.run, "test") as folder:
            folder.start_metrics(0, args)
    assert flags(train_grpo, "--resume", run, "--group-size", "2").sampling.group_size == 2


def test_resumed_run_names_flags_that_are_gone_or_differ(flags, tmp_path, capsys):
    args = flags(
        train_grpo, "--output", tmp_path, "--group-size", 4, "--reward", "a:b", "c:d", "--reward-weights", 1, 2
    )
    with RunFolder(args.run, "test") as run:
        run.start_metrics(0, args)
    saved = json.loads((tmp_path / "args.json").read_text())
    saved |= {"updates": 2, "lora_dropout": 0.1, "advantage": "rloo"}
    saved["given"] += ["updates", "lora_dropout", "advantage"]
    (tmp_path / "args.json").write_text(json.dumps(saved))
    capsys.readouterr()

    args = flags(train_grpo, "--resume", tmp_path, "--group-size", 2, "--steps", 40)
    assert (args.sampling.group_size, args.task.reward, args.task.reward_weights) == (2, ["a:b", "c:d"], [1, 2])
    assert args.loss.advantage == "grpo"
    with RunFolder(args.run, "test"):
        pass
    assert capsys.readouterr().out.splitlines() == [
        "that run had --lora-dropout, --updates, --advantage rloo, which this script does not know: left out",
        "not as in that run: --group-size 2 (4), --steps 40 (30)",
    ]
    args = flags(train_grpo, "--resume", tmp_path, "--reward", "e:f")  # whose weight is another matter
    assert (args.task.reward, args.task.reward_weights) == (["e:f"], None)
    assert args.run.remarks[1:] == ["not as in that run: --reward ['e:f'] (['a:b', 'c:d'])"]


GRPO = {"steps": 30, "group_size": 4, "dynamic_sampling": 0, "tensor_parallel_size": 2, "lora_alpha": 32}
INT8 = '{"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}'
ASYNC = GRPO | {"max_staleness": 2, "in_flight": None}


@pytest.mark.parametrize(
    ("saved", "given", "expected"),
    [
        (GRPO, [], {"topology": "separate"}),  # rlhf.py
        (ASYNC, [], {"topology": "separate", "max_staleness": 2}),
        (ASYNC | {"max_staleness": 5}, ["max_staleness"], {"topology": "separate", "max_staleness": 5}),
        (ASYNC | {"engine_url": ["http://a:1"]}, [], {"topology": "servers", "max_staleness": 2}),
        (GRPO | {"engines_per_gpu": None, "sleep": "auto"}, [], {"topology": "shared"}),
        (GRPO | {"quantization_config": None}, [], {"topology": "separate", "quantization": "auto"}),
        (
            GRPO | {"quantization_config": INT8},
            ["quantization_config"],
            {"topology": "separate", "quantization": INT8},
        ),
        ({"placement": "colocated", "group_size": 4}, [], {"topology": "shared"}),  # rlhf_ppo.py
        ({"placement": "split", "group_size": 4}, ["placement"], {"topology": "separate"}),
        (GRPO | {"topology": "shared", "max_staleness": 0}, ["topology"], {"topology": "shared"}),  # train_grpo.py
        (
            GRPO | {"reward": ["recipe.tasks.gsm8k:correct", "mine:recipe"], "map": "recipe.tasks.gsm8k:to_chat"},
            ["reward", "map"],
            {"topology": "separate", "reward": ["trainer.tasks.gsm8k:correct", "mine:recipe"]}
            | {"map": "trainer.tasks.gsm8k:to_chat"},
        ),
        (GRPO | {"lora_alpha": 64}, ["lora_alpha"], {"topology": "separate", "lora_alpha": 64}),  # now a setting
        (GRPO | {"enforce_eager": False}, ["enforce_eager"], {"topology": "separate"}),
    ],
)
def test_runs_of_older_scripts_have_todays_flags(saved, given, expected):
    flags = flags_in(train_grpo.Arguments)
    assert resumed(flags, of_today(flags, saved | {"given": given}), {})[0] == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enforce_eager", True),
        ("kl_target", 0.1),
        ("attention", "eager"),
        ("reward_workers", 4),
        ("reward_resources", "{}"),
    ],
)
def test_flag_that_is_gone_is_named_if_it_had_another_value(flags, tmp_path, capsys, name, value):
    (tmp_path / "args.json").write_text(json.dumps(GRPO | {name: value, "given": [name]}))
    with pytest.raises(SystemExit):
        flags(train_grpo, "--resume", tmp_path)
    error = capsys.readouterr().err
    assert f"that run had --{name.replace('_', '-')} {value}. The flag is gone: " in error
    assert f'without "{name}" among those "given" in args.json, the run goes on' in error
