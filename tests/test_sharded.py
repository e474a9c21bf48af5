"""A learner that is sharded over several ranks, against one on a single rank: the same weights, the same checkpoints.

pytest tests/test_sharded.py
"""

import json
import re
import threading
import weakref
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from learners import (
    CPU,
    config,
    gemma2,
    numbers,
    on_ranks,
    rollouts,
    rounding_learner,
    save,
    use_sgd,
    weights_of,
    whole,
)
from learners import write_model as write_random_model
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, modeling_utils

from trainer.errors import MismatchError, RunError
from trainer.learning import sharding
from trainer.learning.grpo import GRPOLearner
from trainer.learning.model import Model
from trainer.learning.named_tensors import NamedTensors
from trainer.learning.saving import load_state, write_model
from trainer.tasks.tiny_model import build_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model with tied weights whose rows neither 2 nor 3 ranks divide, as of one with an added token."""
    folder = build_tiny_model(tmp_path_factory.mktemp("model"))
    module = AutoModelForCausalLM.from_pretrained(folder)
    module.resize_token_embeddings(259)
    module.save_pretrained(folder)
    return str(folder)


KINDS = {
    "grpo": {"kl_coef": 0.1},  # one for each weighting of tokens
    "dr_grpo": {"advantage": "reinforce++", "mask_truncated_completions": True},
    "dapo": {"mismatch_correction": "sequence_mask", "num_mini_batches": 2},
    "gspo": {"clip_low": 0.2, "clip_high": 0.2},  # its own range ends at once with steps this large
    "cispo": {"num_epochs": 1},  # the pass of a step's only update gives the old log-probabilities as well
}


def learn_all_kinds(folder, model, batches):
    """Two steps with each kind of loss, all clipped to a short gradient, and their metrics."""
    results = {}
    for kind, changes in KINDS.items():
        settings = {"group_size": 3, "num_epochs": 2, "micro_batch_tokens": 25, "max_grad_norm": 0.01}
        learner = GRPOLearner(model, config(loss=kind, **settings | changes), CPU)
        use_sgd(learner)
        metrics = [numbers(learner.learn(batch)) for batch in batches]
        results[kind] = metrics, weights_of(learner)
        results[kind][0].append({"logprobs/mismatch": learner.mismatch(batches[0])})
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(results, folder / f"results-{learner.model.ranks}.pt")


def test_two_ranks_learn_from_unequal_shares_what_one_learns(model, tmp_path):
    batches = [rollouts(GRPOLearner(model, config(), CPU), seed=seed, count=9) for seed in range(2)]
    for batch in batches:  # of 3 groups, one teaches nothing, and with it one rollout of another
        batch[3:6] = [replace(rollout, reward=0.5) for rollout in batch[3:6]]
        batch[0] = replace(batch[0], truncated=True)
    learn_all_kinds(tmp_path, model, batches)
    on_ranks(2, learn_all_kinds, tmp_path, model, batches)
    ours, theirs = (torch.load(tmp_path / f"results-{ranks}.pt") for ranks in (1, 2))
    before = weights_of(GRPOLearner(model, config(), CPU))
    for kind, changes in KINDS.items():
        (metrics, weights), (sharded_metrics, sharded_weights) = ours[kind], theirs[kind]
        for row, sharded_row in zip(metrics, sharded_metrics, strict=True):
            if row is metrics[0]:  # of equal weights: rounding alone, of log-probabilities near -5 (last bit: 5e-7)
                assert max(row.pop("logprobs/mismatch"), sharded_row.pop("logprobs/mismatch")) < 5e-7
            assert sharded_row == pytest.approx(row, rel=1e-4, abs=1e-7)
        change = sum((weights[name] - before[name]).square().sum() for name in before).sqrt()
        difference = sum((weights[name] - sharded_weights[name]).square().sum() for name in before).sqrt()
        assert change > 0.01 * changes.get("num_epochs", 2)
        assert difference < 1e-5 * change
        assert metrics[0]["grad_norm"] > 0.01  # so clipping was seen


def learn_gathered(folder, model, batch):
    """Weights after a step, and how often the ranks have summed gradients: where weights stay gathered, and not."""
    results = []
    for fits in (True, False):
        with (
            patch("trainer.learning.model.fits_gathered", return_value=fits),
            patch("trainer.learning.sharding.fits_gathered", return_value=fits),
            patch.object(_fsdp_param_group, "foreach_reduce", wraps=_fsdp_param_group.foreach_reduce) as sums,
        ):
            learner = GRPOLearner(model, config(micro_batch_tokens=25, num_epochs=1), CPU)
            use_sgd(learner)
            learner.learn(batch)
            results.append((sums.call_count, weights_of(learner), learner.mismatch(batch)))
    if learner.model.rank == 0:
        torch.save(results, folder / "gathered.pt")


def test_gradients_are_summed_once_where_weights_stay_gathered(model, tmp_path):
    batch = rollouts(GRPOLearner(model, config(), CPU), count=12)
    on_ranks(2, learn_gathered, tmp_path, model, batch)
    (once, weights, mismatch), (often, others, other) = torch.load(tmp_path / "gathered.pt")
    assert often > 2 * once > 0
    assert mismatch == pytest.approx(other, rel=1e-4)  # of the new weights
    for name, tensor in weights.items():
        torch.testing.assert_close(others[name], tensor, rtol=0, atol=1e-6)


def learn_all_sizes(folder, models, batches):
    """Metrics of two steps with each model, and the weights that a sync would send after them."""
    results = []
    for model, (first, second) in zip(models, batches, strict=True):
        learner = GRPOLearner(model, config(), torch.device("cpu", 0))  # as in a run: loading ends with a move to it
        use_sgd(learner)
        metrics = [numbers(learner.learn(first))]
        learner.model.module.to("cpu")  # as between its turns on a device that it shares
        metrics += [numbers(learner.learn(second)), {"mismatch": learner.mismatch(first)}]
        named = {name: sharding.whole(tensor).clone() for name, tensor in learner.model.named_tensors().items()}
        results.append((metrics, named))
    if learner.model.rank == 0:
        torch.save(results, folder / f"sizes-{learner.model.ranks}.pt")


@pytest.mark.parametrize("ranks", [pytest.param(count, marks=pytest.mark.slow) for count in (2, 3)])
def test_ranks_share_tied_weights_of_any_number_of_rows(tmp_path, ranks):
    sizes = [(301, True), (261, True), (302, True), (2, True), (301, False)]
    models, batches = [], []
    for rows, tied in sizes:
        options = {"intermediate_size": 64, "vocab_size": rows, "tie_word_embeddings": tied, "pad_token_id": None}
        models.append(write_random_model("Llama", tmp_path / f"{rows}-{tied}", **options))
        learner = GRPOLearner(models[-1], config(), CPU)
        batches.append([rollouts(learner, seed=seed, count=6) for seed in range(2)])
    learn_all_sizes(tmp_path, models, batches)
    on_ranks(ranks, learn_all_sizes, tmp_path, models, batches)
    plain, sharded = (torch.load(tmp_path / f"sizes-{count}.pt") for count in (1, ranks))
    for size, (metrics, named), (sharded_metrics, sharded_named) in zip(sizes, plain, sharded, strict=True):
        for row, sharded_row in zip(metrics, sharded_metrics, strict=True):
            assert sharded_row == pytest.approx(row, rel=1e-4, abs=1e-6), size
        assert sharded_named.keys() == named.keys()
        for name, tensor in named.items():
            torch.testing.assert_close(sharded_named[name], tensor, rtol=0, atol=1e-5)


def learn_compiled(folder, model, batches, **changes):
    """Steps with compiled blocks. Saves the weights after each, and how many graphs were compiled."""
    torch._dynamo.reset()
    counters.clear()
    learner = GRPOLearner(model, config(micro_batch_tokens=60, **changes), CPU)
    use_sgd(learner)
    steps = [learner.learn(batch) and weights_of(learner) for batch in batches]
    if learner.model.rank == 0:
        torch.save((counters["stats"]["unique_graphs"], steps), folder / f"compiled-{learner.model.ranks}.pt")


@pytest.mark.long
def test_compiled_blocks_learn_the_same_on_two_ranks(model, tmp_path):
    batches = [rollouts(GRPOLearner(model, config(), CPU), seed=seed, count=8) for seed in range(2)]
    learner = GRPOLearner(model, config(), CPU)
    use_sgd(learner)
    before, plain = weights_of(learner), [learner.learn(batch) and weights_of(learner) for batch in batches]
    learn_compiled(tmp_path, model, batches, compile=True, gradient_checkpointing="true")
    on_ranks(2, partial(learn_compiled, compile=True), tmp_path, model, batches)
    for ranks in (1, 2):
        graphs, compiled = torch.load(tmp_path / f"compiled-{ranks}.pt")
        assert 1 <= graphs <= 2  # for all blocks, micro-batches and lengths; one more where a batch has one sequence
        for weights, expected in zip(compiled, plain, strict=True):
            assert weights.keys() == expected.keys()
            change = sum((expected[name] - before[name]).square().sum() for name in before).sqrt()
            difference = sum((weights[name] - expected[name]).square().sum() for name in before).sqrt()
            assert difference < 1e-5 * change


@pytest.fixture(scope="module", params=[pytest.param("Mixtral", marks=pytest.mark.slow), "Qwen3Moe"])
def mixture(request, tmp_path_factory, model):
    """A model of 5 experts, of which 2 ranks hold 3 and 2."""
    import transformers

    folder = tmp_path_factory.mktemp("mixture")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": len(tokenizer)}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2, "head_dim": 8}
    sizes |= {"moe_intermediate_size": 8, "num_experts": 5, "num_local_experts": 5, "initializer_range": 0.5}
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}Config")(**sizes)
    getattr(transformers, f"{request.param}ForCausalLM")(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def learn_mixture(folder, model, batch):
    learner = GRPOLearner(model, config(adam_eps=1e-8), CPU)
    metrics = numbers(learner.learn(batch))
    work = learner.model.work
    metrics |= dict(zip(("FLOPs", "tokens"), learner.model.sum_over_ranks(work.flops, work.tokens), strict=True))
    named = {name: sharding.whole(tensor).clone() for name, tensor in learner.model.named_tensors().items()}
    save(learner, folder / f"mixture-{learner.model.ranks}")
    if learner.model.rank == 0:
        torch.save((metrics, named), folder / f"mixture-{learner.model.ranks}.pt")


def test_mixtures_of_experts_learn_the_same_on_two_ranks(mixture, tmp_path):
    learner = GRPOLearner(mixture, config(), CPU)
    before, batch = learner.model.module.state_dict(), rollouts(learner, count=8)
    learn_mixture(tmp_path, mixture, batch)
    on_ranks(2, learn_mixture, tmp_path, mixture, batch)
    (metrics, named), (sharded_metrics, sharded) = (torch.load(tmp_path / f"mixture-{ranks}.pt") for ranks in (1, 2))
    assert sharded_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    assert named.keys() == sharded.keys()
    assert sum("experts.4" in name for name in named) == 2 * 3  # as the checkpoint calls them
    for name, tensor in named.items():
        torch.testing.assert_close(sharded[name], tensor, rtol=0, atol=2e-4)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "mixture-2").state_dict()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "mixture-1").state_dict()
    for name, tensor in loaded.items():
        torch.testing.assert_close(tensor, again[name], rtol=0, atol=2e-4)
        assert not tensor.equal(before[name])


def load_gemma2(folder):
    learner = GRPOLearner(str(folder), config(kl_coef=0.1), CPU)
    for model in learner.model, learner.reference:
        assert model.module.config._attn_implementation == "eager"
    assert "sdpa's logits are" in learner.model.attention[1]


def test_ranks_take_the_attention_that_computes_the_model(tmp_path):
    gemma2(tmp_path, 8.0)
    on_ranks(2, load_gemma2, tmp_path)


def load_watched(folder, model):
    """How many models that were loaded before are in memory when the next one is loaded."""
    loaded, alive, load = [], [], Model._from_pretrained

    def watched(self, *args, **options):
        alive.append(sum(model() is not None for model in loaded))
        module = load(self, *args, **options)
        loaded.append(weakref.ref(module))
        return module

    def warm_up(*_):
        raise AssertionError("on a GPU, this would allocate the whole model")

    Model._from_pretrained, modeling_utils.caching_allocator_warmup = watched, warm_up
    GRPOLearner(model, config(kl_coef=0.1), CPU)
    assert alive == [0, 0, 1]  # the policy, then sharded; the reference beside the policy


def test_ranks_load_one_model_at_a_time(model, tmp_path):
    on_ranks(2, load_watched, tmp_path, model)


def load_bounded(folder, model, bound):
    learner = rounding_learner(model, 1e-5)
    assert learner.max_mismatch == 2 * learner.model.rounding == pytest.approx(bound, rel=0.05)


def test_ranks_take_the_bound_that_the_first_one_measured(model, tmp_path):
    bound = rounding_learner(model, 1e-5).max_mismatch
    on_ranks(2, load_bounded, tmp_path, model, bound)


def learn_from_a_bad_share(folder, model, batch):
    learner = GRPOLearner(model, config(max_mismatch=1e-3), CPU)
    before = weights_of(learner)
    for method in (learner.learn, learner.mismatch):
        # 0.01 on one rollout of two is 0.005 on average, weighted by their lengths.
        with pytest.raises(MismatchError, match="The two compute different functions"):
            method(batch)
    assert all(before[name].equal(tensor) for name, tensor in weights_of(learner).items())
    learner.max_mismatch = 0.0099
    learner.learn(batch)


def test_mismatch_of_one_rank_stops_them_all(model, tmp_path):
    good, bad = rollouts(GRPOLearner(model, config(), CPU), count=2)
    bad = replace(bad, logprobs=[logprob - 0.01 for logprob in bad.logprobs])
    on_ranks(2, learn_from_a_bad_share, tmp_path, model, [good, bad])


def save_and_go_on(folder, model, batches):
    """A step, a checkpoint, another step; and the same with everything offloaded, once or after every update."""
    ends = []
    for name in ("plain", "offloaded", "offloading"):
        learner = GRPOLearner(model, config(adam_eps=1e-8, offload_optimizer=name == "offloading"), CPU)
        learner.learn(batches[0])
        if name == "offloaded":
            learner.release_memory(offload_optimizer=True)
            assert learner.model.module.lm_head.weight.grad is None
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
    learner = GRPOLearner(str(folder / "plain"), config(adam_eps=1e-8, offload_optimizer=True), CPU)
    learner.load_state(folder / "plain")
    assert learner.step == 1
    assert learner.offload.on_host
    save(learner, folder / f"again-{learner.model.ranks}")
    learner.learn(batches[1])
    end = torch.load(folder / "end.pt")
    for name, tensor in weights_of(learner).items():
        # Between ranks, sums in another order; Adam makes a bit of a small gradient a part of the learning rate.
        torch.testing.assert_close(tensor, end[name], rtol=0, atol=2e-4)
        assert (tensor - end[name]).abs().mean() < 1e-6


def learn_with_a_token_that_differs(folder, model, batch):
    learner = GRPOLearner(model, config(), CPU)
    learner.exact = "auto"
    with redirect_stdout(StringIO()) as printed:
        learner.learn(batch)
    (folder / f"printed-{learner.model.rank}").write_text(printed.getvalue())


def test_differing_tokens_of_any_rank_are_counted_once(model, tmp_path):
    batch = rollouts(GRPOLearner(model, config(), CPU), count=4)
    longest = sorted(range(4), key=lambda i: -len(batch[i].prompt_ids) - len(batch[i].completion_ids))
    own, tokens = longest[1], sum(len(rollout.completion_ids) for rollout in batch)  # which goes to the second rank
    batch[own] = replace(batch[own], logprobs=[logprob - 1e-3 for logprob in batch[own].logprobs])
    on_ranks(2, learn_with_a_token_that_differs, tmp_path, model, batch)
    first, second = ((tmp_path / f"printed-{rank}").read_text() for rank in range(2))
    differ = len(batch[own].completion_ids)
    assert f"not exact: {differ} of {tokens} log-probabilities are not the engine's bit for bit; importance" in first
    assert not second


@pytest.mark.parametrize(
    ("before", "after"), [pytest.param(*pair, marks=pytest.mark.slow) for pair in ((3, 1), (1, 3))]
)
def test_checkpoint_is_of_no_number_of_ranks(model, tmp_path, before, after):
    batches = [rollouts(GRPOLearner(model, config(), CPU), seed=seed) for seed in range(2)]
    for count, function, *args in ((before, save_and_go_on, model, batches), (after, resume_and_go_on, batches)):
        if count == 1:
            function(tmp_path, *args)
        else:
            on_ranks(count, function, tmp_path, *args)
    plain, moments = written(tmp_path / "plain", before)
    assert "lm_head.weight" not in plain  # tied
    assert json.loads((tmp_path / "plain" / "config.json").read_text())["architectures"] == ["OPTForCausalLM"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").state_dict()
    assert all(loaded[name].equal(tensor) for name, tensor in plain.items())
    assert all(tensor.abs().sum() > 0 for name, tensor in moments.items() if name[1] == "exp_avg")
    for name, ranks in (("offloaded", before), ("offloading", before), (f"again-{after}", after)):
        weights, others = written(tmp_path / name, ranks)
        for own, other in ((plain, weights), (moments, others)):
            assert own.keys() == other.keys()
            assert all(tensor.equal(other[key]) for key, tensor in own.items())


def written(folder, ranks):
    """The weights by name, and the optimizer's state by parameter and name, that so many ranks have written."""
    files = sorted(folder.glob("model*.safetensors")), sorted(folder.glob("trainer_state*.pt"))
    assert [len(own) for own in files] == [ranks, ranks]
    sizes = [file.stat().st_size for file in files[0]]
    assert max(sizes) < 2 * min(sizes)  # each rank its share
    weights = {name: tensor for file in files[0] for name, tensor in load_file(file).items()}
    parts = [torch.load(file) for file in files[1]]
    assert {part["step"] for part in parts} == {1}
    states = [part["optimizer"]["state"] for part in parts]
    moments = {(i, name): [state[i][name] for state in states] for i in states[0] for name in states[0][i]}
    assert all(type(tensor) is torch.Tensor for own in moments.values() for tensor in own)
    return weights, {key: torch.cat(own) if own[0].ndim else own[0] for key, own in moments.items()}


def write_moments(folder, parts):
    """What ranks write of one parameter's optimizer state, of which each has this part."""
    groups = torch.optim.AdamW([torch.zeros(1)]).state_dict()["param_groups"]
    for rank, part in enumerate(parts):
        state = {0: {"step": torch.tensor(1.0), "exp_avg": part, "exp_avg_sq": part}}
        saved = {"optimizer": {"state": state, "param_groups": groups}, "step": 1}
        torch.save(saved, folder / f"trainer_state-0000{rank}.pt")


def test_adapters_moments_that_every_rank_wrote_are_read_once(tmp_path):
    parameter, whole = torch.nn.Parameter(torch.zeros(7, 2)), torch.arange(14.0).view(7, 2)
    write_moments(tmp_path, [whole, whole])
    optimizer = torch.optim.AdamW([parameter])
    load_state(tmp_path, [parameter], optimizer)
    assert optimizer.state[parameter]["exp_avg"].equal(whole)


def test_moments_of_two_ranks_are_read_by_three_and_one(tmp_path):
    whole = torch.arange(14.0).view(7, 2)
    write_moments(tmp_path, whole.chunk(2))
    for rank, rows in enumerate(whole.chunk(3)):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=3)
        try:
            mesh = init_device_mesh("cpu", (3,))
            parameter = torch.nn.Parameter(DTensor.from_local(rows, mesh, [Shard(0)], shape=(7, 2), stride=(2, 1)))
            optimizer = torch.optim.AdamW([parameter])
            load_state(tmp_path, [parameter], optimizer)
            assert optimizer.state[parameter]["exp_avg"].to_local().equal(rows)
        finally:
            dist.destroy_process_group()
    parameter = torch.nn.Parameter(torch.zeros(7, 2))  # and by a single one
    optimizer = torch.optim.AdamW([parameter])
    load_state(tmp_path, [parameter], optimizer)
    assert optimizer.state[parameter]["exp_avg"].equal(whole)


@pytest.mark.parametrize(
    ("missing", "says"), [((0,), "lacks files"), ((1,), "lacks files"), ((0, 1), "has no trainer")]
)
def test_missing_file_of_training_state_is_an_error(tmp_path, missing, says):
    write_moments(tmp_path, torch.arange(14.0).view(7, 2).chunk(2))
    for rank in missing:
        (tmp_path / f"trainer_state-0000{rank}.pt").unlink()
    parameter = torch.nn.Parameter(torch.zeros(7, 2))
    with pytest.raises(RunError, match=says):
        load_state(tmp_path, [parameter], torch.optim.AdamW([parameter]))


@pytest.mark.slow
def test_training_state_in_one_file_is_read_by_two_ranks(model, tmp_path):
    """One rank's file is what any number of ranks wrote before each wrote a part."""
    learner = GRPOLearner(model, config(), CPU)
    learner.learn(rollouts(learner))
    save(learner, tmp_path / "old")
    on_ranks(2, read_old_state, tmp_path, model)


def read_old_state(folder, model):
    learner = GRPOLearner(str(folder / "old"), config(), CPU)
    learner.load_state(folder / "old")
    state = torch.load(folder / "old" / "trainer_state.pt")["optimizer"]["state"]
    for i, parameter in enumerate(learner.parameters):
        assert whole(learner.optimizer.state[parameter]["exp_avg"]).equal(state[i]["exp_avg"])


def load_and_write(folder):
    """A model, with the most memory that loading and writing it took beside what the process had: in MB."""
    from transformers import AutoConfig, AutoTokenizer

    tokenizer, config, peak = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder), [0]
    before, done = anonymous_memory(), threading.Event()

    def look():
        peak[0] = max(peak[0], anonymous_memory() - before)

    def watch():
        while not done.wait(0.002):
            look()

    def save_and_look(*args, save=safetensors.torch.save_file, **options):  # a watcher alone may miss the end
        look()
        save(*args, **options)

    safetensors.torch.save_file = save_and_look
    watching = threading.Thread(target=watch)
    watching.start()
    module, _ = sharding.load_model(AutoModelForCausalLM, str(folder), config, CPU)
    look()
    loading, peak[0] = peak[0], 0
    before = anonymous_memory()
    write_model(module, NamedTensors(module)(), tokenizer, folder / "written")
    done.set()
    watching.join()
    torch.save((loading, peak[0]), folder / f"peaks-{dist.get_rank()}")


def anonymous_memory():
    return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1000


@pytest.mark.slow
def test_rank_never_holds_more_than_its_share_and_a_tensor(model, tmp_path, monkeypatch):
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "vocab_size": 300}
    whole_model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=8, num_key_value_heads=8))
    whole_model.bfloat16().save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path)
    tensors = [4e-6 * tensor.numel() for tensor in whole_model.parameters()]  # in fp32
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # or glibc keeps what is freed
    on_ranks(2, load_and_write, tmp_path, start_method="spawn")  # whose environment has that
    for rank in range(2):
        for peak in torch.load(tmp_path / f"peaks-{rank}"):
            # Three tensors more, since gloo copies what it gathers.
            assert sum(tensors) / 4 < peak < sum(tensors) / 2 + 3 * max(tensors)
    loaded = Qwen2ForCausalLM.from_pretrained(tmp_path / "written").state_dict()
    assert all(loaded[name].equal(tensor.float()) for name, tensor in whole_model.state_dict().items())


def find_a_copy(folder, model):
    sharding._merge_tied_shards = lambda model: None
    learner = GRPOLearner(model, config(), CPU)
    padded = ["model.decoder.embed_tokens.weight"] if learner.model.rank else []  # where there are fewer rows
    assert sharding.stray_weights(learner.model.module, learner.parameters) == padded


def test_tied_weight_of_which_updates_reach_one_copy_is_named(model, tmp_path):
    on_ranks(2, find_a_copy, tmp_path, model)
