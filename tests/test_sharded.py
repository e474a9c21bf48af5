"""A learner that is sharded over several ranks, against one on a single rank: the same weights, the same checkpoints.

pytest tests/test_sharded.py
"""

import json
import os
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from test_learning import CPU, RoundingLearner, bounded_config, config, gemma2, rollouts
from torch._dynamo.utils import counters
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from recipe import grpo, sharding
from recipe.errors import MismatchError
from recipe.grpo import GRPOLearner
from recipe.sharding import shard
from recipe.tiny_model import build_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(build_tiny_model(tmp_path_factory.mktemp("model")))


def on_ranks(count, function, folder, *args):
    """Run function(folder, *args) on so many ranks, in processes of their own."""
    mp.spawn(_run_rank, (count, function, folder, *args), nprocs=count)


def _run_rank(rank, count, function, folder, *args):
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store-{getattr(function, '__name__', 'compiled')}-{count}"), count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    function(folder, *args)
    # Past Python's own way out: FSDP's caches keep the group, and with it gloo's threads, after destroy_process_group.
    # One that has yet to let go of the last collective's tensor needs the GIL for that. Python ends a thread that asks
    # for the GIL on the way out, and C++ answers that with abort().
    os._exit(0)


def weights_of(learner):
    return {name: whole(tensor) for name, tensor in learner.model.named_parameters()}


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


KINDS = {
    "grpo": {"kl_coef": 0.1},  # one for each weighting of tokens
    "dr_grpo": {"advantage": "reinforce++", "mask_truncated_completions": True},
    "dapo": {"mismatch_correction": "sequence_mask"},
    "gspo": {"clip_low": 0.2, "clip_high": 0.2},  # its own range ends at once with steps this large
}


def learn_all_kinds(folder, model, batches):
    """Two steps with each kind of loss, all clipped to a short gradient, and their metrics."""
    results = {}
    for kind, changes in KINDS.items():
        settings = {"group_size": 3, "updates": 2, "micro_batch_tokens": 25, "max_grad_norm": 0.01}
        learner = GRPOLearner(model, config(loss=kind, learning_rate=1.0, **settings, **changes), CPU)
        # Adam would blow differences in the last bit of a gradient near zero up to the size of the learning rate.
        learner.optimizer = torch.optim.SGD(learner.model.parameters(), lr=1.0)
        metrics = [learner.learn(batch) for batch in batches]
        results[kind] = metrics, weights_of(learner)
        results[kind][0].append({"logprobs/mismatch": learner.mismatch(batches[0])})
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(results, folder / f"results-{learner.ranks}.pt")


def test_two_ranks_learn_what_one_learns_also_from_shares_of_unequal_size(model, tmp_path):
    batches = [rollouts(GRPOLearner(model, config(), CPU), seed=seed, count=9) for seed in range(2)]
    for batch in batches:  # of 3 groups, one teaches nothing, and with it one rollout of another
        batch[3:6] = [replace(rollout, reward=0.5) for rollout in batch[3:6]]
        batch[0] = replace(batch[0], truncated=True)
    learn_all_kinds(tmp_path, model, batches)
    on_ranks(2, learn_all_kinds, tmp_path, model, batches)
    ours, theirs = (torch.load(tmp_path / f"results-{ranks}.pt") for ranks in (1, 2))
    before = weights_of(GRPOLearner(model, config(), CPU))
    for kind in KINDS:
        (metrics, weights), (sharded_metrics, sharded_weights) = ours[kind], theirs[kind]
        for row, sharded_row in zip(metrics, sharded_metrics, strict=True):
            if row is metrics[0]:  # of equal weights: rounding alone, of log-probabilities near -5 (last bit: 5e-7)
                assert max(row.pop("logprobs/mismatch"), sharded_row.pop("logprobs/mismatch")) < 5e-7
            assert sharded_row == pytest.approx(row, rel=1e-4, abs=1e-7)
        change = sum((weights[name] - before[name]).square().sum() for name in before).sqrt()
        difference = sum((weights[name] - sharded_weights[name]).square().sum() for name in before).sqrt()
        assert change > 0.02
        assert difference < 1e-5 * change
        assert metrics[0]["grad_norm"] > 0.01  # so clipping was seen


def learn_reducing(folder, model, batch):
    """A step in one micro-batch, and in several with gradients reduced once an update, and after each micro-batch."""
    reductions, reduce = [], _fsdp_param_group.foreach_reduce
    _fsdp_param_group.foreach_reduce = lambda *args, **options: reductions.append(1) or reduce(*args, **options)
    ends = []
    for tokens, room in ((1000, True), (20, True), (20, False)):
        grpo.whole_gradients_fit = lambda *_, room=room: room
        changes = {"updates": 2, "micro_batch_tokens": tokens, "learning_rate": 1.0}
        learner = GRPOLearner(model, config(gradient_checkpointing=True, **changes), CPU)
        learner.optimizer = torch.optim.SGD(learner.model.parameters(), lr=1.0)
        reductions.clear()
        learner.learn(batch)
        ends.append((len(reductions), weights_of(learner)))
    (least, expected), (once, same), (each, also) = ends
    assert least == once == 2 * 3  # updates, and groups of weights: two blocks and the rest
    assert each >= 2 * once
    for name, tensor in expected.items():
        torch.testing.assert_close(same[name], tensor, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(also[name], tensor, rtol=1e-5, atol=1e-6)


def test_gradients_are_reduced_once_an_update_where_they_fit(model, tmp_path):
    on_ranks(2, learn_reducing, tmp_path, model, rollouts(GRPOLearner(model, config(), CPU), count=8))


def learn_compiled(folder, model, batches, **changes):
    """Steps with compiled blocks. Saves the weights after each, and how many graphs were compiled."""
    torch._dynamo.reset()
    counters.clear()
    learner = GRPOLearner(model, config(micro_batch_tokens=60, learning_rate=1.0, **changes), CPU)
    learner.optimizer = torch.optim.SGD(learner.model.parameters(), lr=1.0)
    steps = [learner.learn(batch) and weights_of(learner) for batch in batches]
    if learner.rank == 0:
        torch.save((counters["stats"]["unique_graphs"], steps), folder / f"compiled-{learner.ranks}.pt")


@pytest.mark.slow
def test_compiled_blocks_learn_the_same_on_one_rank_and_on_two(model, tmp_path):
    batches = [rollouts(GRPOLearner(model, config(), CPU), seed=seed, count=8) for seed in range(2)]
    learner = GRPOLearner(model, config(learning_rate=1.0), CPU)
    learner.optimizer = torch.optim.SGD(learner.model.parameters(), lr=1.0)
    before, plain = weights_of(learner), [learner.learn(batch) and weights_of(learner) for batch in batches]
    learn_compiled(tmp_path, model, batches, compile=True, gradient_checkpointing=True)
    on_ranks(2, partial(learn_compiled, compile=True), tmp_path, model, batches)
    for ranks in (1, 2):
        graphs, compiled = torch.load(tmp_path / f"compiled-{ranks}.pt")
        assert 1 <= graphs <= 2  # for all blocks, micro-batches and lengths; one more where a batch has one sequence
        for weights, expected in zip(compiled, plain, strict=True):
            assert weights.keys() == expected.keys()
            change = sum((expected[name] - before[name]).square().sum() for name in before).sqrt()
            difference = sum((weights[name] - expected[name]).square().sum() for name in before).sqrt()
            assert difference < 1e-5 * change


def test_fused_experts_are_not_sharded(tmp_path):
    from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    MixtralForCausalLM(MixtralConfig(**small, **heads)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="MixtralForCausalLM fuses its checkpoint's weights"):
        shard(AutoModelForCausalLM.from_pretrained(tmp_path), mesh=None)


def load_gemma2(folder):
    for model in (learner := GRPOLearner(str(folder), config(kl_coef=0.1), CPU)).model, learner.reference:
        assert model.config._attn_implementation == "eager"
    assert "sdpa's logits are" in learner.attention[1]


def test_ranks_take_the_attention_that_computes_the_model(tmp_path):
    gemma2(tmp_path, 8.0)
    on_ranks(2, load_gemma2, tmp_path)


def load_bounded(folder, model, bound):
    learner = RoundingLearner(model, bounded_config(1e-5), CPU)
    assert learner.max_mismatch == 2 * learner.rounding == pytest.approx(bound, rel=0.05)


def test_ranks_take_the_bound_that_the_first_one_measured(model, tmp_path):
    bound = RoundingLearner(model, bounded_config(1e-5), CPU).max_mismatch
    on_ranks(2, load_bounded, tmp_path, model, bound)


def learn_from_a_bad_share(folder, model, batch):
    learner = GRPOLearner(model, config(max_mismatch=1e-3), CPU)
    before = weights_of(learner)
    for method in (learner.learn, learner.mismatch):
        # 0.01 on one rollout of two is 0.005 on average, weighted by their lengths.
        with pytest.raises(MismatchError, match="The engine does not serve"):
            method(batch)
    assert all(before[name].equal(tensor) for name, tensor in weights_of(learner).items())
    learner.max_mismatch = 0.0099
    learner.learn(batch)


def test_a_mismatch_in_the_share_of_one_rank_stops_them_all(model, tmp_path):
    good, bad = rollouts(GRPOLearner(model, config(), CPU), count=2)
    bad = replace(bad, logprobs=[logprob - 0.01 for logprob in bad.logprobs])
    on_ranks(2, learn_from_a_bad_share, tmp_path, model, [good, bad])


def save_and_go_on(folder, model, batches):
    """A step, a checkpoint, another step; and the same with everything offloaded, once or after every update."""
    ends = []
    for name in ("plain", "offloaded", "offloading"):
        learner = GRPOLearner(model, config(offload_optimizer=name == "offloading"), CPU)
        learner.learn(batches[0])
        if name == "offloaded":
            learner.release_memory(offload_optimizer=True)
            assert learner.model.lm_head.weight.grad is None
        if name != "plain":
            memory = learner.offload.memory.untyped_storage().data_ptr()
            for state in learner.optimizer.state.values():
                assert state["exp_avg_sq"].untyped_storage().data_ptr() == memory
        save(learner, folder / name)
        learner.learn(batches[1])
        ends.append(weights_of(learner))
    assert all(ends[0][name].equal(tensor) for end in ends[1:] for name, tensor in end.items())
    torch.save(ends[0], folder / "end.pt")


def resume_and_go_on(folder, batches):
    learner = GRPOLearner(str(folder / "plain"), config(offload_optimizer=True), CPU)
    learner.load_state(folder / "plain")
    assert learner.step == 1
    assert learner.offload.on_host
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
    batches = [rollouts(GRPOLearner(model, config(), CPU), seed=seed) for seed in range(2)]
    for count, function, *args in ((before, save_and_go_on, model, batches), (after, resume_and_go_on, batches)):
        if count == 1:
            function(tmp_path, *args)
        else:
            on_ranks(count, function, tmp_path, *args)
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    state = torch.load(tmp_path / "plain" / "trainer_state.pt")
    assert "lm_head.weight" not in plain  # tied
    assert json.loads((tmp_path / "plain" / "config.json").read_text())["architectures"] == ["OPTForCausalLM"]
    for name in ("offloaded", "offloading", f"again-{after}"):
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


@pytest.mark.parametrize(("rank", "turn"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2)])
def test_ranks_of_different_nodes_load_at_the_same_time(monkeypatch, rank, turn):
    hosts = ["a", "b", "a", "b", "a"]
    monkeypatch.setattr(sharding.dist, "get_world_size", lambda: len(hosts))
    monkeypatch.setattr(sharding.dist, "get_rank", lambda: rank)
    monkeypatch.setattr(sharding.dist, "all_gather_object", lambda found, _: found.__setitem__(slice(None), hosts))
    assert sharding.turns_on_node() == (turn, 3)
