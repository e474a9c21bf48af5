"""The built-in model: a small OPT with random weights and a byte tokenizer, for machines without a GPU or network.

    python recipe/tasks/tiny_model.py FOLDER [SEED]

writes a Hugging Face model folder that transformers, vLLM and the scripts load like any other.
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

# vLLM's attention on CPU needs a head size of at least 32.
HIDDEN_SIZE, HEADS, LAYERS, MAX_LENGTH = 128, 4, 2, 256


def build_tiny_base(folder: str | Path, seed: int = 0) -> Path:
    """The model for adapters, with larger random weights.

    With the usual ones, its head, which no adapter changes, makes all tokens about as likely from any hidden state.
    """
    return build_tiny_model(folder, seed, init_std=0.1)


def build_tiny_model(folder: str | Path, seed: int = 0, init_std: float = 0.02) -> Path:
    """Write the model to `folder` (about 0.5 million fp32 parameters, one token a byte) and return the folder."""
    tokenizer = byte_tokenizer()
    torch.manual_seed(seed)
    config = OPTConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN_SIZE,
        word_embed_proj_dim=HIDDEN_SIZE,
        ffn_dim=4 * HIDDEN_SIZE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=MAX_LENGTH,
        init_std=init_std,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    OPTForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each byte, a padding token and an end-of-text token."""
    tokens = ["<pad>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="</s>", eos_token="</s>", model_max_length=MAX_LENGTH
    )


if __name__ == "__main__":
    build_tiny_model(sys.argv[1], *map(int, sys.argv[2:]))
