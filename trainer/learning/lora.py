"""LoRA (Hu et al. 2021, arXiv:2106.09685), by peft: small adapters learn, while the model stays as it was loaded.

A layer computes base(x) + scaling * lora_B(lora_A(x)), with scaling = alpha / rank. The base is frozen, in bf16 on a
GPU; adapters are fp32. lora_B begins as 0, so the model begins as its base. The engine has no adapters: a sync sends it
merged weights (weight_sync/lora.py).
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from weight_sync.lora import LoRAWeight

from ..errors import RunError
from .config import ALL_LINEAR, LoRAArguments
from .multimodal import learning_modules
from .precision import freeze
from .sharding import whole

ADAPTER_NAME = "default"  # peft's name for a model's only adapter
WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."  # of the names in the weights' file: peft wraps the model, transformers does not


def add_adapters(model, args: LoRAArguments, dtype: torch.dtype, new_head: str | None = None) -> None:
    """Freeze the model, in this dtype, and give its layers fp32 adapters. The submodule `new_head` learns as well, in
    fp32 and without an adapter.

    Raises RunError, with the names of the linear layers, for a target that is none of them.
    """
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper
    from transformers.pytorch_utils import Conv1D

    language_model, head = learning_modules(model, new_head)
    modules = {module: name for name, module in model.named_modules()}
    linear = {m for m in modules if isinstance(m, (torch.nn.Linear, Conv1D)) and m is not head}
    layers = [modules[module] for module in language_model.modules() if module in linear]
    names = sorted({layer.rpartition(".")[2] for layer in layers})
    targets = names if args.lora_targets == ALL_LINEAR else args.lora_targets
    for target in targets or ALL_LINEAR:
        if not any(f".{layer}".endswith(f".{target}") for layer in layers):
            known = f"its linear layers are {', '.join(names)}" if names else "it has no linear layers that peft knows"
            raise RunError(f"lora_targets: {type(model).__name__} has no layer {target}; {known}")
    freeze(model, dtype, *[head] if new_head else [])
    options = {"r": args.lora_rank, "lora_alpha": args.lora_alpha}
    options |= {"modules_to_save": [new_head]} if new_head else {}
    if len(layers) < len(linear):  # towers may have layers of the same names
        options["exclude_modules"] = rf"(?!{re.escape(modules[language_model])}\.).*"
    model.add_adapter(LoraConfig(target_modules=targets, **options), ADAPTER_NAME)
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.cast_input_dtype_enabled = False  # autocast does that
        if isinstance(module, ModulesToSaveWrapper):  # every rank learns a whole copy: FSDP does not gather this one
            module.modules_to_save[ADAPTER_NAME].weight = torch.nn.Parameter(whole(module.weight.detach()).clone())
    for parameter in adapter_parameters(model):
        parameter.data = parameter.data.float()
    model.eval()  # peft adds them in training mode


def adapter_parameters(model) -> list[torch.nn.Parameter]:
    """The parameters of a model's adapters and of its new head; none if it has no adapters."""
    marks = ".lora_", ".modules_to_save."  # in peft's names
    return [parameter for name, parameter in model.named_parameters() if any(mark in name for mark in marks)]


def adapted_layers(model) -> str:
    """The names of the layers with adapters, and a remark if fused experts have none."""
    from peft.tuners.lora import LoraLayer

    adapted = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    fused = any(".experts.down_proj" in name for name, _ in model.named_parameters())
    return ", ".join(sorted(adapted)) + ("; its fused experts have none" if fused else "")


def adapted_weights(model) -> list[LoRAWeight]:
    """The weights of all layers with adapters."""
    from peft.tuners.lora import LoraLayer

    return [
        LoRAWeight(
            layer.base_layer.weight.detach(),
            layer.lora_A[ADAPTER_NAME].weight.detach(),
            layer.lora_B[ADAPTER_NAME].weight.detach(),
            layer.scaling[ADAPTER_NAME],
            transposed=layer.fan_in_fan_out,
        )
        for layer in model.modules()
        if isinstance(layer, LoraLayer)
    ]


@contextmanager
def without_adapters(model) -> Iterator[None]:
    """Inside, the model computes as its base does."""
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


def load_adapters(model, folder: Path) -> None:
    """Load adapters from a checkpoint in PEFT's format. Raises RunError if they belong to other layers.

    `check_adapters` has compared rank and alpha before.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict
    from safetensors.torch import load_file

    weights = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(folder / WEIGHTS_FILE).items()}
    if unmatched := weights.keys() ^ get_peft_model_state_dict(model).keys():
        raise RunError(f"{folder} has adapters of other lora_targets: {min(unmatched)} is not in both")
    set_peft_model_state_dict(model, weights, ADAPTER_NAME)


def adapted_model(checkpoint: Path) -> str | None:
    """The model that the adapters in this checkpoint adapt; None if it has no adapters."""
    file = checkpoint / CONFIG_FILE
    return json.loads(file.read_text())["base_model_name_or_path"] if file.exists() else None


def check_adapters(checkpoint: Path, args: LoRAArguments) -> None:
    """Raise RunError if the rank or alpha of this checkpoint's adapters, or whether it has any, is not as in `args`."""
    file = checkpoint / CONFIG_FILE
    saved = json.loads(file.read_text()) if file.exists() else {"r": None}
    if saved["r"] != args.lora_rank:
        has, asked = (f"adapters of rank {rank}" if rank else "a whole model" for rank in (saved["r"], args.lora_rank))
        raise RunError(f"{checkpoint} has {has}, and --resume cannot go on with {asked}: --lora-rank must be the same")
    if args.lora_rank and saved["lora_alpha"] != args.lora_alpha:
        raise RunError(f"{checkpoint} has adapters of lora_alpha {saved['lora_alpha']}, not {args.lora_alpha}")
