"""Checkpoints that take more than text, such as Qwen2.5-VL and Gemma 3. Their language model learns, from text.

Towers and projectors stay as they were loaded. They are sent, checked and saved with the rest.
"""

import torch


def is_multimodal(model_type: str) -> bool:
    """Whether transformers has a class for such models of this type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    return model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES


def auto_class(config):
    """The class of transformers that loads what a checkpoint with this configuration is, with its head."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    # AutoModelForCausalLM loads some of them as well, but the text alone, and under other names.
    return AutoModelForMultimodalLM if is_multimodal(config.model_type) else AutoModelForCausalLM


def learning_modules(model, new_head: str | None = None) -> tuple[torch.nn.Module, torch.nn.Module]:
    """What of a model may learn: its language model, and the submodule `new_head` or else its own head."""
    return model.get_decoder(), model.get_submodule(new_head) if new_head else model.get_output_embeddings()
