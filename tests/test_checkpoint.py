"""Checkpoints: what is written, what a resumed run goes on from, and which model that is.

pytest tests/test_checkpoint.py
"""

import errno
import json
import shutil
from dataclasses import replace

import pytest
from conftest import arguments_of
from learners import CPU, config, numbers, rollouts, write_model

import train_grpo
from trainer.errors import RunError
from trainer.flags import with_values
from trainer.learning.grpo import GRPOLearner
from trainer.learning.learner import learning_rate
from trainer.run import models as run_models
from trainer.run.checkpoint import last_checkpoint, write_checkpoint
from trainer.run.models import Models, choose_models
from trainer.tasks.tiny_model import build_tiny_model


@pytest.mark.parametrize(
    ("changes", "seed"),
    [
        ({}, 123),
        ({"kl_coef": 0.5}, 123),
        ({"lr_scheduler": "cosine", "warmup_steps": 1}, 123),
        ({"num_mini_batches": 2}, 0),  # which the run's seed draws
    ],
)
def test_resumed_update_is_bit_for_bit_the_uninterrupted_one(model, tmp_path, changes, seed):
    whole = GRPOLearner(model, config(**changes), CPU, steps=3)
    first, second = rollouts(whole, seed=1), rollouts(whole, seed=2)
    whole.learn(first)
    checkpoint = write_checkpoint(tmp_path, whole.step, whole.save)
    expected = numbers(whole.learn(second))

    resumed = GRPOLearner(str(checkpoint), config(**changes), CPU, seed=seed, initial=model, steps=3)
    resumed.load_state(checkpoint)
    assert resumed.step == 1
    assert numbers(resumed.learn(second)) == expected
    for (name, a), b in zip(whole.model.module.named_parameters(), resumed.model.module.parameters(), strict=True):
        assert a.equal(b), name


def test_resumed_optimizer_has_this_runs_epsilon(model, tmp_path):
    first = GRPOLearner(model, config(), CPU)
    first.learn(rollouts(first))
    checkpoint = write_checkpoint(tmp_path, 1, first.save)
    resumed = GRPOLearner(str(checkpoint), config(adam_eps=1e-3), CPU)
    resumed.load_state(checkpoint)
    assert [group["eps"] for group in resumed.optimizer.param_groups] == [1e-3]


def test_checkpoint_has_the_models_buffers(tmp_path):
    sizes = {"intermediate_size": 16, "moe_intermediate_size": 16, "q_lora_rank": 16, "kv_lora_rank": 16}
    sizes |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    path = write_model("DeepseekV3", tmp_path / "model", **sizes, num_key_value_heads=2, first_k_dense_replace=1)
    learner = GRPOLearner(path, config(), CPU)
    buffer = learner.model.module.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias")
    buffer.normal_()
    checkpoint = write_checkpoint(tmp_path, 1, learner.save)
    resumed = GRPOLearner(str(checkpoint), config(), CPU)
    assert resumed.model.module.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias").equal(buffer)


def test_checkpoint_that_is_cut_short_leaves_the_last_one(tmp_path):
    write_checkpoint(tmp_path, 1, lambda folder: (folder / "weights").write_text("one"))

    def dies(folder):
        (folder / "weights").write_text("tw")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path, 2, dies)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-000001"]
    copies = ["checkpoint-000001-good", "checkpoint-best"]  # a user's own
    for name in copies:
        (tmp_path / name).mkdir()
    for step in (2, 3):
        write_checkpoint(tmp_path, step, lambda folder: (folder / "weights").write_text("whole"))
    left = {"checkpoint-000002", "checkpoint-000003", *copies}
    assert {path.name for path in tmp_path.iterdir()} == left


def test_run_goes_on_if_an_old_checkpoint_cannot_be_removed(tmp_path, monkeypatch):
    def busy(path, **options):
        raise OSError(errno.EBUSY, "Device or resource busy", path)

    def write(*steps):
        for step in steps:
            write_checkpoint(tmp_path, step, lambda folder: (folder / "weights").write_text("whole"))
        return sorted(int(path.name[-6:]) for path in tmp_path.iterdir())

    with monkeypatch.context() as patch:
        patch.setattr("os.unlink", busy)
        assert write(1, 2, 3) == [1, 2, 3]
    assert write(4) == [3, 4]


def test_run_without_checkpoint_cannot_be_resumed(tmp_path):
    with pytest.raises(RunError, match="no checkpoint"):
        last_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changes", "default", "builtin"),
    [
        ({}, 1e-6, 3e-3),
        ({"lora_rank": 4}, 1e-5, 3e-3),
        ({"learning_rate": 1e-6}, 1e-6, 1e-6),
        ({"learning_rate": 1e-4, "lora_rank": 4}, 1e-4, 1e-4),
    ],
)
def test_learning_rate_depends_on_what_learns_unless_it_is_given(model, tmp_path, changes, default, builtin):
    for name, used in ((model, default), (None, builtin)):
        args = arguments_of(train_grpo, model=name, **changes)
        _, optimizer = choose_models(tmp_path, args, "cpu")
        assert learning_rate(replace(args, optimizer=optimizer)) == used
        assert args == arguments_of(train_grpo, model=name, **changes)  # what the user said stays as it is


def test_run_goes_on_after_folder_and_model_moved(model, tmp_path):
    run, base = tmp_path / "run", shutil.copytree(model, tmp_path / "base")
    write_checkpoint(run, 1, GRPOLearner(str(base), config(), CPU).save)
    run, args = run.rename(tmp_path / "moved"), arguments_of(train_grpo, model=str(base), steps=9)
    args.run.resume, last = run, str(run / "checkpoint-000001")
    base.rename(tmp_path / "new base")
    with pytest.raises(RunError, match=f"cannot load the model {base}: no such folder"):
        choose_models(run, args, "cpu")
    args.run.model = str(tmp_path / "new base")
    assert choose_models(run, args, "cpu")[0] == Models(args.run.model, last, run / last)


def test_finished_run_is_not_resumed(tmp_path):
    model = build_tiny_model(tmp_path / "model")
    write_checkpoint(tmp_path / "run", 7, lambda folder: shutil.copytree(model, folder, dirs_exist_ok=True))
    args = arguments_of(train_grpo, model=str(model), resume=tmp_path / "run", steps=7)
    with pytest.raises(RunError, match="that run has done its 7 steps: ask for more with --steps"):
        choose_models(tmp_path / "run", args, "cpu")
    models, _ = choose_models(tmp_path / "run", with_values(args, {"steps": 8}), "cpu")
    assert models.loaded.endswith("checkpoint-000007")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("builtin", "rate"), [(False, 1e-6), (True, 3e-3)])
def test_run_goes_on_with_its_default_model_on_other_hardware(tmp_path, monkeypatch, device, builtin, rate):
    run = tmp_path / "run"
    model = build_tiny_model(run / "model" if builtin else tmp_path / "default")
    monkeypatch.setattr(run_models, "DEFAULT_MODEL", str(model))
    write_checkpoint(run, 7, lambda folder: shutil.copytree(model, folder, dirs_exist_ok=True))
    args = arguments_of(train_grpo, resume=run, steps=8)
    models, optimizer = choose_models(run, args, device)
    last = run / "checkpoint-000007"
    assert models == Models(str(model), str(last), last)
    assert learning_rate(replace(args, optimizer=optimizer)) == rate


def test_model_that_transformers_loads_but_would_not_save_is_saved(model, tmp_path):
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"temperature": 0.9}')
    GRPOLearner(str(tmp_path / "model"), config(), CPU).save(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["temperature"] == 0.9
    (tmp_path / "model" / "generation_config.json").write_text('{"early_stopping": true}')
    with pytest.raises(ValueError, match="`early_stopping`: `num_beams`"):  # now, not at the first checkpoint
        GRPOLearner(str(tmp_path / "model"), config(), CPU)
