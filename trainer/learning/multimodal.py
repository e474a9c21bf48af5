"""Checkpoints that take more than text, such as Qwen2.5-VL and Gemma 3. Their language model learns, from text and
images.

Towers and projectors stay as they were loaded, unless --train-vision has them learn as well. They are sent, checked and
saved with the rest.
"""

import inspect

import torch

from ..errors import RunError
from ..images import Images
from .layout import to_device


def is_multimodal(model_type: str) -> bool:
    """Whether transformers has a class for such models of this type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    return model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES


def image_tokens(config) -> list[int]:
    """The tokens that stand for an image or a video, or for where one begins, in prompts for such a model."""
    names = ("image_token_id", "boi_token_id", "video_token_id")
    return [getattr(config, name) for name in names if getattr(config, name, None) is not None]


def auto_class(config):
    """The class of transformers that loads what a checkpoint with this configuration is, with its head."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    # AutoModelForCausalLM loads some of them as well, but the text alone, and under other names.
    return AutoModelForMultimodalLM if is_multimodal(config.model_type) else AutoModelForCausalLM


def load_tokenizer(path: str) -> tuple:
    """The tokenizer at this path, and what is saved with the model: a multimodal one's processor, or the tokenizer."""
    from transformers import AutoConfig, AutoProcessor, AutoTokenizer

    tokenizer = processor = AutoTokenizer.from_pretrained(path)
    if is_multimodal(AutoConfig.from_pretrained(path).model_type):
        processor = AutoProcessor.from_pretrained(path)
        # It may have the chat template in a file of its own, chat_template.json, which no tokenizer reads.
        tokenizer.chat_template = tokenizer.chat_template or processor.chat_template
    return tokenizer, processor


def learning_modules(model, new_head: str | None = None) -> tuple[torch.nn.Module, torch.nn.Module]:
    """What of a model learns from text: its language model, and the submodule `new_head` or else its own head."""
    return model.get_decoder(), model.get_submodule(new_head) if new_head else model.get_output_embeddings()


def image_inputs(processor, images: Images, device: torch.device) -> dict[str, torch.Tensor]:
    """What the model's tower takes of these images, as the engine prepares them."""
    inputs = processor.image_processor(images=images.decoded(), return_tensors="pt")
    return {name: to_device(tensor, device) for name, tensor in inputs.items()}


def states_with_images(
    model, input_ids: torch.Tensor, pixels: dict[str, torch.Tensor], prompt_length: int
) -> torch.Tensor:
    """The hidden states [rows, S, H] of sequences [rows, S] that begin with the same prompt, of `prompt_length`, with
    the images of `pixels`. The model's tower encodes them once. Raises RunError if this version of transformers cannot.
    """
    trunk, rows = model.base_model, len(input_ids)
    taken = inspect.signature(trunk.forward).parameters
    if "mm_encoder_outputs" not in taken:  # it would go into **kwargs, which transformers 5.17 leaves unread
        raise RunError(f"{type(trunk).__name__} of this version of transformers takes no encoded images")
    encoded = trunk.get_image_features(**pixels, return_dict=True)
    if encoded.get("pooler_output") is not None:
        encoded.pooler_output = _repeated(encoded.pooler_output, rows)
    if encoded.get("deepstack_features") is not None:  # of several layers
        encoded.deepstack_features = [_repeated(layer, rows) for layer in encoded.deepstack_features]
    # A sampled token may be the one that stands for a feature. Then the model sees padding, and embeds the token.
    seen = input_ids.clone()
    seen[:, prompt_length:].masked_fill_(seen[:, prompt_length:] == model.config.image_token_id, 0)
    of_images = (seen == model.config.image_token_id).int()
    inputs = {name: torch.cat([tensor] * rows) for name, tensor in pixels.items() if name != "pixel_values"}
    inputs |= {"mm_token_type_ids": of_images, "token_type_ids": of_images}
    inputs = {name: tensor for name, tensor in inputs.items() if name in taken}
    embedding = model.get_input_embeddings()
    hook = embedding.register_forward_pre_hook(lambda *_: (input_ids,))
    try:
        return trunk(input_ids=seen, mm_encoder_outputs={"image": encoded}, **inputs, use_cache=False).last_hidden_state
    finally:
        hook.remove()


def _repeated(features, rows: int):
    """These features of images, so many times: a tensor [images, ...], or a tensor for each image."""
    return torch.cat([features] * rows) if isinstance(features, torch.Tensor) else features * rows
