"""A learner that is sharded over several ranks, against one on a single rank: the same weights, the same checkpoints.

pytest tests/test_sharded.py
"""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from test_learning import CPU, config, rollouts

from grpo import Learner, MismatchError
from sharding import shard
from tiny_model import build_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(build_tiny_model(tmp_path_factory.mktemp("model")))


def on_ranks(count, function, folder, *args):
    """Run function(folder, *args) on so many ranks, in processes of their own."""
    mp.spawn(_run_rank, (count, function, folder, *args), nprocs=count)


def _run_rank(rank, count, function, folder, *args):
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store-{function.__name__}-{count}"), count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    function(folder, *args)
    dist.destroy_process_group()


def weights_of(learner):
    return {name: whole(tensor) for name, tensor in learner.model.named_parameters()}


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


KINDS = ["grpo", "dr_grpo", "reinforce++"]  # one for each weighting of tokens


def learn_all_kinds(folder, model, batches):
    """Two steps with each kind of advantage, all clipped to a short gradient, and their metrics."""
    results = {}
    for kind in KINDS:
        changes = {"advantage": kind, "group_size": 3, "kl_coef": 0.1, "updates": 2, "micro_batch_size": 2}
        learner = Learner(model, config(**changes, max_grad_norm=0.01), CPU)
        # Adam would blow differences in the last bit of a gradient near zero up to the size of the learning rate.
        learner.optimizer = torch.optim.SGD(learner.model.parameters(), lr=1.0)
        metrics = [learner.learn(batch) for batch in batches]
        results[kind] = metrics, weights_of(learner)
        results[kind][0].append({"logprobs/mismatch": learner.mismatch(batches[0])})
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(results, folder / f"results-{learner.ranks}.pt")


def test_two_ranks_learn_what_one_learns_also_from_shares_of_unequal_size(model, tmp_path):
    batches = [rollouts(Learner(model, config(), CPU), seed=seed, count=9) for seed in range(2)]
    learn_all_kinds(tmp_path, model, batches)
    on_ranks(2, learn_all_kinds, tmp_path, model, batches)
    ours, theirs = (torch.load(tmp_path / f"results-{ranks}.pt") for ranks in (1, 2))
    before = weights_of(Learner(model, config(), CPU))
    for kind in KINDS:
        (metrics, weights), (sharded_metrics, sharded_weights) = ours[kind], theirs[kind]
        for row, sharded_row in zip(metrics, sharded_metrics, strict=True):
            assert sharded_row == pytest.approx(row, rel=1e-4, abs=1e-7)
        change = sum((weights[name] - before[name]).square().sum() for name in before).sqrt()
        difference = sum((weights[name] - sharded_weights[name]).square().sum() for name in before).sqrt()
        assert change > 0.02
        assert difference < 1e-5 * change
        assert metrics[0]["grad_norm"] > 0.01  # so clipping was seen


def test_fused_experts_are_not_sharded(tmp_path):
    from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    MixtralForCausalLM(MixtralConfig(**small, **heads)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="MixtralForCausalLM fuses its checkpoint's weights"):
        shard(AutoModelForCausalLM.from_pretrained(tmp_path), mesh=None)


def learn_from_a_bad_share(folder, model, batch):
    learner = Learner(model, config(max_mismatch=1e-3), CPU)
    before = weights_of(learner)
    for method in (learner.learn, learner.mismatch):
        # 0.01 on one rollout of two is 0.005 on average, weighted by their lengths.
        with pytest.raises(MismatchError, match="the engine does not serve"):
            method(batch)
    assert all(before[name].equal(tensor) for name, tensor in weights_of(learner).items())
    learner.config = replace(learner.config, max_mismatch=0.0099)
    learner.learn(batch)


def test_a_mismatch_in_the_share_of_one_rank_stops_them_all(model, tmp_path):
    good, bad = rollouts(Learner(model, config(), CPU), count=2)
    bad = replace(bad, logprobs=[logprob - 0.01 for logprob in bad.logprobs])
    on_ranks(2, learn_from_a_bad_share, tmp_path, model, [good, bad])


def save_and_go_on(folder, model, batches):
    """A step, a checkpoint, another step; and the same with everything that can be offloaded."""
    ends = []
    for name in ("plain", "offloaded"):
        learner = Learner(model, config(), CPU)
        learner.learn(batches[0])
        if name == "offloaded":
            learner.release_memory(offload_optimizer=True)
            assert learner.model.lm_head.weight.grad is None
            memory = learner.offload.memory.untyped_storage().data_ptr()
            for state in learner.optimizer.state.values():
                assert state["exp_avg_sq"].untyped_storage().data_ptr() == memory
        save(learner, folder / name)
        learner.learn(batches[1])
        ends.append(weights_of(learner))
    assert all(ends[0][name].equal(tensor) for name, tensor in ends[1].items())
    torch.save(ends[0], folder / "end.pt")


def resume_and_go_on(folder, batches):
    learner = Learner(str(folder / "plain"), config(), CPU)
    learner.load_state(folder / "plain")
    assert learner.step == 1
    save(learner, folder / f"again-{learner.ranks}")
    learner.learn(batches[1])
    end, change = torch.load(folder / "end.pt"), torch.load(folder / "plain" / "trainer_state.pt")
    assert change["step"] == 1
    for name, tensor in weights_of(learner).items():
        # Between ranks, sums in another order; Adam makes a bit of a small gradient a part of the learning rate.
        torch.testing.assert_close(tensor, end[name], rtol=0, atol=2e-4)
        assert (tensor - end[name]).abs().mean() < 1e-6


def save(learner, folder):
    folder.mkdir(exist_ok=True)
    learner.save(folder if learner.rank == 0 else None)


@pytest.mark.parametrize(("before", "after"), [(3, 1), (1, 3)])
def test_checkpoint_is_of_no_number_of_ranks(model, tmp_path, before, after):
    batches = [rollouts(Learner(model, config(), CPU), seed=seed) for seed in range(2)]
    for count, function, *args in ((before, save_and_go_on, model, batches), (after, resume_and_go_on, batches)):
        if count == 1:
            function(tmp_path, *args)
        else:
            on_ranks(count, function, tmp_path, *args)
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    state = torch.load(tmp_path / "plain" / "trainer_state.pt")
    assert "lm_head.weight" not in plain  # tied
    assert json.loads((tmp_path / "plain" / "config.json").read_text())["architectures"] == ["OPTForCausalLM"]
    for name in ("offloaded", f"again-{after}"):
        weights = load_file(tmp_path / name / "model.safetensors")
        assert weights.keys() == plain.keys()
        assert all(weights[key].equal(plain[key]) for key in plain)
        other = torch.load(tmp_path / name / "trainer_state.pt")
        assert other["optimizer"]["state"].keys() == state["optimizer"]["state"].keys()
        for i, moments in state["optimizer"]["state"].items():
            assert moments["exp_avg"].abs().sum() > 0
            for key, value in moments.items():
                assert type(value) is torch.Tensor
                assert value.equal(other["optimizer"]["state"][i][key])
