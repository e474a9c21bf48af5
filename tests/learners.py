"""Small models, learners of them, rollouts to learn from, and ranks to learn on."""

import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from conftest import arguments_of
from pair import DEVICE
from tokenizers.processors import TemplateProcessing
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.utils import _to_kwargs

import train_grpo
from trainer.learning import layout
from trainer.learning.grpo import GRPOLearner
from trainer.learning.model import Model
from trainer.learning.policy import PolicyLearner, Proof
from trainer.learning.rollout import Rollout
from trainer.tasks.tiny_model import byte_tokenizer

# --- Small models -----------------------------------------------------------------------------------------------------

SMALL = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 128}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
WINDOW = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}  # shorter than the prompts
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": 64}
ARCHITECTURES = {
    "OPT": {**SMALL, "num_attention_heads": 4, "word_embed_proj_dim": 128, "ffn_dim": 256},
    "GPT2": {"n_layer": 2, "n_embd": 128, "n_head": 4, "n_positions": 128},  # transposed linear weights
    "Llama": SMALL | HEADS,  # grouped queries
    "Qwen2": {**SMALL, **HEADS, "tie_word_embeddings": True},  # biases
    "Qwen3": SMALL | HEADS,  # normalized queries and keys
    "Gemma2": {**SMALL, **HEADS, **WINDOW, "query_pre_attn_scalar": 32},  # soft-capped attention
    "Gemma3Text": SMALL | HEADS | WINDOW,  # tied, scaled embeddings
    "Phi": {**SMALL, "num_attention_heads": 4},  # vLLM's Transformers backend, a new lm_head.bias in each load
    "Phi3": SMALL | HEADS,  # fused projections, in the checkpoint too
    "Mixtral": {**SMALL, **HEADS, "num_local_experts": 4},  # experts, which transformers fuses
}
# What comes before a dash is transformers' name.
MORE_ARCHITECTURES = {
    "Llama-linear": {**SMALL, **HEADS, "rope_parameters": LINEAR},
    "Llama-odd": {**SMALL, **HEADS, "vocab_size": 261, "tie_word_embeddings": True},  # vLLM pads the vocabulary
    "Mistral": {**SMALL, **HEADS, "sliding_window": 16},
    "Qwen3Moe": {**SMALL, **HEADS, "num_experts": 4, "moe_intermediate_size": 64, "num_experts_per_tok": 2},
    "Qwen2-window": {**SMALL, **HEADS, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0},
    "Gemma": SMALL | HEADS,
    "Granite": {**SMALL, "num_attention_heads": 4, "attention_multiplier": 0.05, "logits_scaling": 4.0},
    "Cohere": {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2},  # one norm beside both blocks
    "Olmo3": {**SMALL, "num_attention_heads": 4, **WINDOW},  # norms after the blocks
    "Falcon": {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4},  # one key for all heads
    "GPTJ": {"n_layer": 2, "n_embd": 128, "n_head": 4, "n_positions": 128, "rotary_dim": 16},
    "GPTNeoX": {**SMALL, "num_attention_heads": 4},
    "Nemotron": SMALL | HEADS,
    "Bloom": {"n_layer": 2, "hidden_size": 128, "n_head": 4},
    "Apertus": SMALL | HEADS,
    "Cohere2": SMALL | HEADS | WINDOW,
    # Experts of a size that vLLM pads on CPU.
    "Olmoe": {**SMALL, **HEADS, "intermediate_size": 240, "num_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": {**SMALL, **MLA, "num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 2},
}
LOUDNESS = 3 if DEVICE.type == "cpu" else 1  # of the weights: quiet ones hide what differs, loud ones what bf16 rounds


def build(architecture: str, folder, **changes) -> None:
    """Write a model of two small layers with random weights, and a byte tokenizer."""
    tokenizer = byte_tokenizer()
    special = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": 1, "eos_token_id": tokenizer.eos_token_id}
    config = getattr(transformers, architecture.split("-", maxsplit=1)[0] + "Config")(
        **{"vocab_size": len(tokenizer)} | special | (ARCHITECTURES | MORE_ARCHITECTURES)[architecture] | changes
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.mul_(LOUDNESS if parameter.dim() > 1 else 1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


LLAMA = {"num_key_value_heads": 1, "intermediate_size": 64}
MODELS = {  # with what they make of their heads' scores
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "Llama": LLAMA,
    "Gemma2": {**LLAMA, "head_dim": 32, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0},
    "Cohere": {**LLAMA, "logit_scale": 0.3},
    "Granite": {**LLAMA, "logits_scaling": 3.0},
}


def write_model(architecture, folder, **options):
    """A small model with random weights, three times as large as new ones are, so that its logits are well apart."""
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 258, "pad_token_id": 0}
    torch.manual_seed(0)
    config = getattr(transformers, f"{architecture}Config")(**small | options)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.mul_(3)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def long_model(folder) -> str:
    """A model that takes more tokens than the KV cache of an engine on a CPU holds."""
    return write_model("Llama", folder, **LLAMA, max_position_embeddings=2**20)


def gemma2(folder, scale: float, **options) -> str:
    """A model that soft-caps its attention, with a window shorter than its prompts, and this much larger weights."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 258}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "query_pre_attn_scalar": 32}
    torch.manual_seed(0)
    gemma = Gemma2ForCausalLM(Gemma2Config(**small | heads | options))
    for parameter in gemma.parameters():
        parameter.data.mul_(scale)
    gemma.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


CHAT_TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "{% if message.role not in ('system', 'user', 'assistant') %}{{ raise_exception('no such role') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{% if think is false %}<quick>{% endif %}"
)


def chat_tokenizer(folder="model", tokenizer=None):
    """Saves a tokenizer that begins each text with its BOS, as a chat template does that it has as well."""
    tokenizer = tokenizer or byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    bos = tokenizer.bos_token, tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    tokenizer.save_pretrained(folder)
    return tokenizer


# --- Learners ---------------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")
LOSSES = ("grpo", "dr_grpo", "dapo", "gspo", "cispo")


def config(**changes):
    return arguments_of(train_grpo, **{"group_size": 2, "max_tokens": 8, "learning_rate": 1e-3, **changes})


def rollouts(learner, seed=0, count=4):
    """Rollouts of random lengths, with the learner's own log-probabilities for the engine's."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = learner.model.module.config.get_text_config().vocab_size

    def draw(least):
        length = int(torch.randint(least, 8, (1,), generator=generator))
        return (torch.randint(2, 250, (length,), generator=generator) % vocabulary).tolist()

    drafts = [Rollout(draw(2), draw(1), [], float(torch.rand(1, generator=generator))) for _ in range(count)]
    width = max(len(draft.completion_ids) for draft in drafts)
    with torch.no_grad():
        logprobs, _ = learner.model.score(drafts, width)
    rows = (row[: len(draft.completion_ids)].tolist() for draft, row in zip(drafts, logprobs, strict=True))
    return [replace(draft, logprobs=row) for draft, row in zip(drafts, rows, strict=True)]


def use_sgd(learner, rate=1.0):
    """Adam would blow differences in the last bit of a gradient near zero up to the size of the learning rate."""
    learner.optimizer = torch.optim.SGD(learner.parameters, lr=rate)
    learner.rate = lambda step: rate


def vector_of(learner):
    """All of its weights, as they are now."""
    return torch.nn.utils.parameters_to_vector(learner.model.module.parameters()).detach().clone()


def numbers(metrics):
    """What pytest.approx takes of a step's metrics: no advantages; and nothing that depends on time."""
    return {name: value for name, value in metrics.items() if not isinstance(value, list) and "perf/" not in name}


def weights_of(learner):
    return {name: whole(tensor) for name, tensor in learner.model.module.named_parameters()}


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def save(learner, folder):
    folder.mkdir(exist_ok=True)
    learner.save(folder)


class RoundingModel(Model):
    """Computes in bf16, as on a GPU."""

    def autocast(self):
        return torch.autocast("cpu", dtype=torch.bfloat16)


class RoundingLearner(PolicyLearner):
    model_class = RoundingModel


def rounding_learner(path, bound, **changes):
    """A learner in bf16, of a script with this bound of the mismatch."""
    return RoundingLearner(path, config(**changes), CPU, proof=Proof(bound))


# --- Prompts that completions share, or rows of their own -------------------------------------------------------------

APART = 10**9  # tokens: no prompt is so long


def groups_of_three(learner, count=9, seed=0):
    """Rollouts in groups behind prompts of 8 to 12 tokens. The last group's is shorter, so that it passes in rows."""
    drafts = rollouts(learner, seed, count)
    lengths = [2 if row + 3 >= count else 8 + 2 * (row // 3) for row in range(count)]
    batch = [
        replace(d, prompt_ids=[row // 3 + 5] * length)
        for row, (d, length) in enumerate(zip(drafts, lengths, strict=True))
    ]
    batch = [replace(rollout, truncated=row == 0) for row, rollout in enumerate(batch)]
    logprobs = learner.model.score_all(batch)[0]
    return [replace(r, logprobs=row[: len(r.completion_ids)].tolist()) for r, row in zip(batch, logprobs, strict=True)]


def scores_and_gradients(model, group, entropy=True):
    model.module.zero_grad()
    logprobs, entropies = model.score(group, 8, entropy)
    logprobs.square().sum().backward()
    return (
        logprobs.detach(),
        entropies,
        {name: p.grad.clone() for name, p in model.module.named_parameters() if p.requires_grad},
    )


def learn_in_both_layouts(folder, model, batches, **changes):
    """Two steps, with shared prompts and without. The first rank saves weights and metrics."""
    results = []
    for layout.SHARED_TOKENS in (8, APART):
        learner = GRPOLearner(model, config(group_size=3, max_grad_norm=0.01, **changes), CPU)
        use_sgd(learner)
        results.append(([numbers(learner.learn(batch)) for batch in batches], weights_of(learner)))
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(results, folder / f"results-{learner.model.ranks}.pt")


def assert_same(results, atol=1e-6):
    (expected_metrics, expected), *others = results
    for metrics, weights in others:
        for row, expected_row in zip(metrics, expected_metrics, strict=True):
            assert row == pytest.approx(expected_row, rel=1e-4, abs=1e-6)
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=atol)


# --- Ranks ------------------------------------------------------------------------------------------------------------


def on_ranks(count, function, folder, *args, start_method="forkserver"):
    """Run function(folder, *args) on so many ranks, in processes of their own."""
    mp.start_processes(_run_rank, (count, function, folder, *args), nprocs=count, start_method=start_method)


def _run_rank(rank, count, function, folder, *args):
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store-{getattr(function, '__name__', 'compiled')}-{count}"), count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    _move_arguments()
    function(folder, *args)
    # Past Python's own way out: FSDP's caches keep the group, and with it gloo's threads, after destroy_process_group.
    # One that has yet to let go of the last collective's tensor needs the GIL for that. Python ends a thread that asks
    # for the GIL on the way out, and C++ answers that with abort().
    os._exit(0)


def _move_arguments():
    """Have FSDP move a forward pass's arguments to the device, as torch 2.11 does on a GPU."""
    pre_forward = FSDPState._root_pre_forward

    def moving_pre_forward(self, module, args, kwargs):
        all_args, all_kwargs = _to_kwargs(args, kwargs, torch.device("cpu"), False)
        return pre_forward(self, module, all_args[0], all_kwargs[0])

    FSDPState._root_pre_forward = moving_pre_forward
