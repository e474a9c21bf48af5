"""A model that scores: log-probabilities, their gradients, memory, and the choice of attention and head.

pytest tests/test_model.py
"""

import math
from dataclasses import replace

import pytest
import torch
import transformers
from learners import CPU, MODELS, config, gemma2, rollouts, rounding_learner, write_model

from trainer.errors import RunError
from trainer.learning.batching import micro_batch_slices
from trainer.learning.grpo import GRPOLearner
from trainer.learning.logprobs import plain_head
from trainer.learning.objectives import advantages
from trainer.learning.precision import bf16_weights
from trainer.learning.rollout import Rollout
from trainer.tasks.tiny_model import build_tiny_model, byte_tokenizer


def test_log_probabilities_are_the_models_at_the_temperature(model):
    learner = GRPOLearner(model, config(temperature=0.7), CPU)
    rollout = Rollout([5, 6, 7], [8, 9], [], 0.0)
    longer = Rollout([4], [3, 3, 3, 3], [], 0.0)
    with torch.no_grad():
        logits = learner.model.module(torch.tensor([[5, 6, 7, 8, 9]])).logits[0] / 0.7
        logprobs, entropies = learner.model.score([rollout, longer], 4, entropy=True)
    expected = logits.log_softmax(-1)[[2, 3], [8, 9]]
    torch.testing.assert_close(logprobs[0], torch.cat([expected, torch.zeros(2)]))
    entropy = torch.distributions.Categorical(logits=logits[2]).entropy()
    torch.testing.assert_close(entropies[0, 0], entropy)


def test_micro_batches_hold_so_many_tokens_with_their_padding():
    def split(sizes, tokens):
        return [sizes[part] for part in micro_batch_slices([(b"", 0, size) for size in sizes], tokens)]

    assert split([9, 7, 5, 5, 3, 2, 1], 10) == [[9], [7], [5, 5], [3, 2, 1]]
    assert split([4, 4, 1], 3) == [[4], [4], [1]]  # no fewer than one sequence
    assert split([], 3) == []
    mixed = [(b"a", 4, 2), (b"", 0, 3), (b"b", 4, 2), (b"b", 4, 1)]  # a group, a sequence of its own, a group
    assert micro_batch_slices(mixed, 100) == [slice(0, 1), slice(1, 2), slice(2, 4)]


def plain_gradient(learner, batch):
    """Of the loss of a first update, whose terms are worked out one completion at a time from all of its logits."""
    config, loss, entropy = learner.config, 0, 0
    group_size, temperature = config.sampling.group_size, config.sampling.temperature
    tokens = sum(len(rollout.completion_ids) for rollout in batch)
    weights = advantages(torch.tensor([r.reward for r in batch]), group_size, config.loss.advantage)
    for rollout, weight in zip(batch, weights, strict=True):
        begin, targets = len(rollout.prompt_ids), torch.tensor(rollout.completion_ids)
        ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids])
        logits = learner.model.module(ids, use_cache=False).logits[0, begin - 1 : -1]
        distribution = torch.distributions.Categorical(logits=logits / temperature)
        logprobs = distribution.log_prob(targets)
        importance = (logprobs.detach() - torch.tensor(rollout.logprobs)).exp().clamp(max=2)
        loss -= (importance * weight * (logprobs - logprobs.detach()).exp()).sum() / tokens
        entropy += distribution.entropy().sum().item() / tokens
    loss.backward()
    return {name: p.grad for name, p in learner.model.module.named_parameters()}, loss.item(), entropy


def assert_gradient_is_the_plain_one(path, **changes):
    settings = {"temperature": 0.7, "max_grad_norm": 1e9, "learning_rate": 0.0, "micro_batch_tokens": 30}
    learner = GRPOLearner(path, config(**settings, **changes), CPU)
    batch = rollouts(learner, count=8)
    batch[2:4] = [replace(r, reward=0.5) for r in batch[2:4]]  # no gradient, but part of the means
    batch = [replace(r, logprobs=[logprob - 0.1 * i for logprob in r.logprobs]) for i, r in enumerate(batch)]
    expected, loss, entropy = plain_gradient(learner, batch)
    learner.model.module.zero_grad(set_to_none=True)
    metrics = learner.learn(batch)
    gradient = {name: parameter.grad for name, parameter in learner.model.module.named_parameters()}
    for name, tensor in expected.items():
        norm = tensor.norm()
        assert (gradient[name] - tensor).norm() <= 1e-5 * norm + 1e-7, name
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)  # what is left of fp32 terms of about 1
    assert metrics["entropy"] == pytest.approx(entropy, rel=1e-5)
    return learner


@pytest.mark.parametrize("gradient_checkpointing", ["false", "true"])
@pytest.mark.parametrize("architecture", MODELS)
def test_gradient_is_that_of_all_logits(tmp_path, monkeypatch, architecture, gradient_checkpointing):
    monkeypatch.setattr("trainer.learning.logprobs.CHUNK", 7)
    path = write_model(architecture, tmp_path, **MODELS[architecture])
    learner = assert_gradient_is_the_plain_one(path, gradient_checkpointing=gradient_checkpointing)
    assert (learner.model.head is plain_head) == (architecture in ("OPT", "Llama"))
    assert (learner.model.attention[0] == "eager") == (architecture == "Gemma2")


def test_model_without_a_trunk_is_refused(model, monkeypatch):
    monkeypatch.setattr(transformers.OPTForCausalLM, "get_decoder", lambda self: self)  # as Llama 4's text model
    with pytest.raises(RunError, match=r"trunk and its head separately, and OPTForCausalLM has no such trunk"):
        GRPOLearner(model, config(), CPU)


def test_only_completions_go_through_the_head_and_again_in_backward(model, monkeypatch):
    monkeypatch.setattr("trainer.learning.logprobs.CHUNK", 7)
    learner, sizes = GRPOLearner(model, config(), CPU), []
    batch = rollouts(learner, count=4)
    learner.model.module.lm_head.register_forward_hook(
        lambda module, inputs, output: sizes.append(inputs[0].shape[:-1].numel())
    )
    logprobs, _ = learner.model.score(batch, 8)
    tokens = sum(len(rollout.completion_ids) for rollout in batch)
    assert sizes == [7] * (tokens // 7) + [tokens % 7] * (tokens % 7 > 0)
    logprobs.sum().backward()
    assert sum(sizes) == 2 * tokens


def test_checkpointed_blocks_run_again_in_backward(model):
    runs = {}
    for on in ("false", "true", "auto"):  # auto measures only on a GPU
        learner, count = GRPOLearner(model, config(gradient_checkpointing=on), CPU), []
        attention = learner.model.module.model.decoder.layers[0].self_attn
        attention.register_forward_hook(lambda *_, count=count: count.append(1))
        logprobs, _ = learner.model.score([Rollout([5], [6, 7], [], 0.0)], 2)
        logprobs.sum().backward()
        runs[on] = len(count)
    assert runs == {"false": 1, "true": 2, "auto": 2}


@pytest.mark.parametrize(("free", "tokens"), [(10**9, 30_000), (132 * 10**6, 6_000), (50 * 10**6, None)])
def test_blocks_keep_activations_once_there_is_memory_for_them(model, monkeypatch, free, tokens):
    used = iter(range(0, 10**9, 100_000))  # each look at the memory finds 100,000 bytes more in use
    memory = {"mem_get_info": lambda: (free, 10**6), "memory_reserved": lambda: 0}
    for name, value in {**memory, "memory_allocated": lambda: next(used)}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    learner = GRPOLearner(model, config(gradient_checkpointing="true", micro_batch_tokens=30_000), CPU)
    batch = [replace(rollouts(learner, count=1)[0], reward=reward) for reward in (0.0, 1.0)]
    *others, last = learner.model.checkpointing.forwards
    learner.model.checkpointing.measure()
    counts = {block: [] for block in (last, others[0])}
    for block, count in counts.items():
        block.self_attn.register_forward_hook(lambda *_, count=count: count.append(1))
    heads = []
    learner.model.module.lm_head.register_forward_hook(lambda *_: heads.append(1))
    learner.learn(batch)
    assert [len(count) for count in counts.values()] == [1, 2]
    assert len(heads) == 2
    learner.learn(batch)
    assert [len(count) for count in counts.values()] == ([2, 3] if tokens else [2, 4])
    assert len(heads) == (3 if tokens else 4)
    assert learner.model.micro_batch_tokens == pytest.approx(tokens or 30_000, rel=0.1)


def test_a_sequence_longer_than_what_was_measured_is_computed_again(model):
    learner = GRPOLearner(model, config(gradient_checkpointing="true"), CPU)
    batch = rollouts(learner, count=2)
    learner.model.checkpointing.stop()
    learner.model.micro_batch_tokens = 1
    assert not learner.model.computes_again
    learner.learn(batch)
    assert learner.model.computes_again
    assert learner.model.micro_batch_tokens == learner.config.model.micro_batch_tokens


@pytest.mark.parametrize("architecture", MODELS)
def test_bf16_weights_compute_in_bf16_and_fp32_ones_get_gradients(tmp_path, architecture):
    path = write_model(architecture, tmp_path, **MODELS[architecture])
    learner, peer = GRPOLearner(path, config(gradient_checkpointing="true"), CPU), GRPOLearner(path, config(), CPU)
    weights, batch = list(learner.model.module.parameters()), rollouts(learner)
    for weight in peer.model.module.parameters():  # not buffers: rotary frequencies stay fp32
        weight.data = weight.data.bfloat16()
    with bf16_weights(learner.model.module):
        for _ in range(2):  # as two micro-batches do
            logprobs, _ = learner.model.score(batch, 8)
            logprobs.sum().backward()
    expected, _ = peer.model.score(batch, 8)
    expected.sum().backward()
    assert logprobs.equal(expected)
    assert all(mine is weight for mine, weight in zip(learner.model.module.parameters(), weights, strict=True))
    for mine, other in zip(weights, peer.model.module.parameters(), strict=True):
        assert mine.grad.dtype == torch.float32
        assert mine.grad.equal(2 * other.grad.float())


@pytest.mark.parametrize("scale", [3.5, 8.0])  # whose log-probabilities are 7e-6 and 2e-3 off
def test_attention_that_leaves_something_out_is_not_taken(tmp_path, scale):
    path = gemma2(tmp_path, scale)
    learner = GRPOLearner(path, config(kl_coef=0.1), CPU)
    assert "eager, which is slower: sdpa's logits are" in learner.model.attention[1]
    for model in learner.model, learner.reference:
        assert model.module.config._attn_implementation == "eager"
        assert model.module.config.sliding_window == 4096


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_attention_that_is_right_stays(tmp_path, scale):
    learner = GRPOLearner(gemma2(tmp_path, scale, attn_logit_softcapping=None), config(), CPU)
    assert learner.model.attention == ("sdpa", "sdpa, whose logits are eager's but for rounding")


def test_attention_of_a_model_whose_eager_is_wrong_stays(tmp_path):
    from transformers import FalconConfig, FalconForCausalLM

    FalconForCausalLM(
        FalconConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=258, alibi=True)
    ).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    assert GRPOLearner(str(tmp_path), config(), CPU).model.attention == ("sdpa", "sdpa")


def test_attention_that_does_not_know_the_window_is_not_taken(tmp_path, monkeypatch):
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    path = gemma2(tmp_path, 1.0, attn_logit_softcapping=None)
    assert GRPOLearner(path, config(), CPU).model.attention[0] == "sdpa"

    def without_mask(module, query, key, value, attention_mask, **options):
        return sdpa_attention_forward(module, query, key, value, None, **options)

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", without_mask)
    assert GRPOLearner(path, config(), CPU).model.attention[0] == "eager"


def test_mixture_that_returns_its_routers_loss_is_measured_by_its_logits(tmp_path, monkeypatch):
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    sizes = {"num_key_value_heads": 1, "intermediate_size": 64, "num_local_experts": 4}
    path = write_model("Mixtral", tmp_path, output_router_logits=True, **sizes)
    learner = rounding_learner(path, 1e-5)
    assert learner.model.attention[0] != "eager"
    assert learner.model.rounding > 0
    for parameter in (module := learner.model.module).parameters():
        if parameter.shape == (4, 64):
            parameter.data.zero_()  # the router's: now its loss is the same for all prompts
    module.save_pretrained(tmp_path)

    def doubled(*args, **options):
        return 2 * sdpa_attention_forward(*args, **options)[0], None

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", doubled)
    assert GRPOLearner(path, config(), CPU).model.attention[0] == "eager"


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_weights_that_are_not_finite_are_named_at_loading(tmp_path, value):
    folder = build_tiny_model(tmp_path)
    module = transformers.AutoModelForCausalLM.from_pretrained(folder)
    module.model.decoder.layers[1].fc1.bias.data[3] = value
    module.save_pretrained(folder)
    with pytest.raises(RunError, match=r"model\.decoder\.layers\.1\.fc1\.bias has values that are not finite"):
        GRPOLearner(str(folder), config(), CPU)


def test_byte_tokenizer_round_trips():
    tokenizer = byte_tokenizer()
    text = "Grüße, 世界!\n"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_named_tensors_are_made_again_where_a_tensor_moved(tmp_path):
    learner = GRPOLearner(str(build_tiny_model(tmp_path)), config(), CPU)
    name, parameter = next(iter(learner.model.module.named_parameters()))
    sent = learner.model.named_tensors()
    assert learner.model.named_tensors() is sent
    with torch.no_grad():
        parameter.add_(1)
    assert learner.model.named_tensors()[name].equal(parameter)
    for move in ("storage", "parameter"):
        if move == "storage":
            parameter.data = parameter.data.clone()
        else:
            parameter = torch.nn.Parameter(parameter.detach().clone())
            learner.model.module.get_submodule(name.rpartition(".")[0]).register_parameter("weight", parameter)
        moved = learner.model.named_tensors()
        assert moved is not sent
        assert moved[name].data_ptr() == parameter.data_ptr()
        assert learner.model.named_tensors() is moved
        sent = moved


def test_tensors_that_a_conversion_computes_are_computed_for_every_sync(tmp_path, monkeypatch):
    learner = GRPOLearner(str(build_tiny_model(tmp_path)), config(), CPU)
    name, parameter = next(iter(learner.model.module.named_parameters()))
    monkeypatch.setattr(
        "transformers.core_model_loading.revert_weight_conversion", lambda model, tensors: {name: 2 * tensors[name]}
    )
    for _ in range(2):
        with torch.no_grad():
            parameter.add_(1)
        assert learner.model.named_tensors()[name].equal(2 * parameter)
