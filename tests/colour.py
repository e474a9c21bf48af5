"""A task of the tests, `--task colour`: a small model learns which colour a square has, as seen on held-out images.

    PYTHONPATH=tests python train_grpo.py --task colour

An image has a square of one of six colours somewhere on a grey background. The model is made on the spot: a Qwen2.5-VL
of two layers with a tower of two. Supervised steps have taught it three of the colours, and mixed the others up. It
learns to tell them apart from the reward alone.
"""

import random
from pathlib import Path

import torch

from trainer.tasks.tiny_model import END, HEADS, HIDDEN_SIZE, LAYERS, MAX_LENGTH, Part, byte_tokenizer, teach

COLOURS = {"red": "#c02020", "green": "#20a020", "blue": "#2020c0", "yellow": "#c0c020", "white": "#f0f0f0"}
COLOURS["black"] = "#101010"
MIXED_UP = {"yellow": "white", "white": "black", "black": "yellow"}  # of these, supervised steps mostly teach the wrong
TAUGHT_RIGHT = 0.4  # name, and in this share of the examples the right one
SIDE, SQUARE, FEATURES = 56, 20, 4  # of an image: pixels, pixels of its square, and features, one for 28 x 28
ROWS, HELD_OUT = 1000, 120  # images to learn from, and to evaluate on
RIGHT = 0.95  # the share of right answers, to squares of a known colour, at which the supervised steps end
TOKENS = {"image_token": "<image>", "video_token": "<video>", "vision_start_token": "<", "vision_end_token": ">"}
TEMPLATE = """
{%- for message in messages %}
    {%- for part in message.content if message.content is not string %}
        {{- "<image>" if part.type == "image" else part.text }}
    {%- else %}
        {{- message.content }}
    {%- endfor %}
{%- endfor %}"""


def squares(split: str) -> list[dict]:
    """Rows with an image each: those to evaluate on (`split` "test"), or the others."""
    rng = random.Random(split)
    return [square(rng) for _ in range(HELD_OUT if split == "test" else ROWS)]


def square(rng: random.Random) -> dict:
    """A question about an image, the image, and the answer."""
    from PIL import Image

    name, grey = rng.choice([*COLOURS]), rng.randrange(96, 160)
    image = Image.new("RGB", (SIDE, SIDE), (grey,) * 3)
    image.paste(Image.new("RGB", (SQUARE, SQUARE), COLOURS[name]), tuple(rng.randrange(SIDE - SQUARE) for _ in "xy"))
    return {"prompt": [{"role": "user", "content": "?"}], "images": [image], "answer": name}


def build_model(folder: Path, seed: int) -> None:
    """Write the model to `folder`, taught until the share `RIGHT` of its answers about known colours is right."""
    build_tiny_vision_model(folder, seed)
    rng = random.Random(seed)

    def example() -> list[Part]:
        row = square(rng)
        wrong = MIXED_UP.get(row["answer"])
        name = wrong if wrong and rng.random() > TAUGHT_RIGHT else row["answer"]
        question = Part("<image>" * FEATURES + "?", image=row["images"][0])
        return [question, Part(name + END, taught=True, counts=not wrong)]

    print(f"{teach(folder, example, RIGHT)} supervised steps have taught a small model colours, and mixed some up")


def build_tiny_vision_model(folder: Path, seed: int) -> None:
    """Write a Qwen2.5-VL (about 0.6 million fp32 parameters, one token a byte and one each 28 x 28 pixels) to
    `folder`."""
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    plain = byte_tokenizer()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer,
        **plain.special_tokens_map,
        extra_special_tokens=TOKENS,
        model_max_length=MAX_LENGTH,
        chat_template=TEMPLATE,
    )
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 4 * HIDDEN_SIZE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": MAX_LENGTH,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    tower = {"depth": LAYERS, "hidden_size": 64, "intermediate_size": 256, "num_heads": 2}
    tower |= {"out_hidden_size": HIDDEN_SIZE, "fullatt_block_indexes": list(range(LAYERS))}
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in TOKENS.items()}
    torch.manual_seed(seed)
    config = Qwen2_5_VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=True, **ids)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    pixels = {"min_pixels": 28 * 28, "max_pixels": SIDE * SIDE}
    images, videos = Qwen2VLImageProcessor(**pixels), Qwen2VLVideoProcessor(**pixels)
    Qwen2_5_VLProcessor(images, tokenizer, videos, chat_template=TEMPLATE).save_pretrained(folder)


DEFAULTS = {
    "dataset": "colour:squares",
    "eval_split": "test",
    "reward": ["trainer.tasks.rewards:exact"],
    "model": "colour:build_model",
    "max_tokens": 8,  # the longest name and the end
    "steps": 60,
    "prompts_per_step": 32,
    "learning_rate": 3e-4,
    "save_every": 20,
    "eval_every": 5,
}
