"""The built-in model: a small OPT with random weights and a byte tokenizer, for machines without a GPU or network.

It is a Hugging Face model folder that transformers, vLLM and the scripts load like any other.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

from ..learning.multimodal import auto_class

# vLLM's attention on CPU needs a head size of at least 32.
HIDDEN_SIZE, HEADS, LAYERS, MAX_LENGTH = 128, 4, 2, 256
END = "</s>"  # the token that ends a text
BATCH, LEARNING_RATE = 128, 1e-3  # of supervised steps
NO_LABEL = -100  # of a position whose token is not taught, as transformers has it


class Part(NamedTuple):
    """A part of a text that `teach` takes: whether its tokens are taught, whether they count as an answer, and its
    image, for each of whose features it has a token."""

    text: str
    taught: bool = False
    counts: bool = False
    image: object = None  # a PIL.Image.Image


def build_tiny_base(folder: str | Path, seed: int = 0) -> Path:
    """The model for adapters, with larger random weights.

    With the usual ones, the head makes all tokens about equally likely from any hidden state, and no adapter changes
    the head.
    """
    return build_tiny_model(folder, seed, init_std=0.1)


def build_tiny_model(folder: str | Path, seed: int = 0, init_std: float = 0.02) -> Path:
    """Write the model to `folder` (about 0.5 million fp32 parameters, one token a byte) and return the folder."""
    tokenizer = byte_tokenizer()
    torch.manual_seed(seed)
    config = opt_config(tokenizer, HIDDEN_SIZE, 4 * HIDDEN_SIZE, LAYERS, HEADS, init_std=init_std)
    OPTForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


def opt_config(tokenizer, hidden_size: int, ffn_dim: int, layers: int, heads: int, **options) -> OPTConfig:
    """The configuration of an OPT of this size for this tokenizer."""
    return OPTConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        word_embed_proj_dim=hidden_size,
        ffn_dim=ffn_dim,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=MAX_LENGTH,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **options,
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each byte, a padding token and an end-of-text token."""
    tokens = ["<pad>", END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token=END, eos_token=END, model_max_length=MAX_LENGTH
    )


def teach(folder: Path, example: Callable[[], list[Part]], target: float) -> int:
    """Teach the model in this folder by supervised steps. Returns how many there were.

    `example()` makes a text in parts. The model gets it right if it would greedily choose all tokens that count, before
    it learns from them. The steps end when it gets a share `target` of the examples right, on average over the last ten
    steps or so. Examples without tokens that count are left out of that.
    """
    from transformers import AutoConfig, AutoProcessor, AutoTokenizer

    tokenizer, processor = AutoTokenizer.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    model = auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    steps, right, threads = 0, 0.0, torch.get_num_threads()
    torch.set_num_threads(1)  # there is no work for more
    while right < target:
        examples, rows = [example() for _ in range(BATCH)], []  # of tokens: id, label, whether it counts
        for parts in examples:
            tokens = [(i, part) for part in parts for i in tokenizer.encode(part.text)]
            rows.append(torch.tensor([(i, i if part.taught else NO_LABEL, part.counts) for i, part in tokens]))
        ids, labels, counts = (
            torch.nn.utils.rnn.pad_sequence([row[:, k] for row in rows], batch_first=True, padding_value=padding)
            for k, padding in enumerate((0, NO_LABEL, 0))
        )
        inputs, images = {}, [part.image for parts in examples for part in parts if part.image]
        if images:
            inputs = processor.image_processor(images, return_tensors="pt")
            inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
        output = model(input_ids=ids, labels=labels, **inputs)
        wrong = counts[:, 1:].bool() & (output.logits[:, :-1].argmax(-1) != ids[:, 1:])
        right_now = 1 - wrong.any(1)[counts.any(1)].float().mean()
        right, steps = 0.9 * right + 0.1 * float(right_now), steps + 1
        optimizer.zero_grad()
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    torch.set_num_threads(threads)
    model.save_pretrained(folder)
    return steps
