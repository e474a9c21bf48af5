"""Engines whose weights torchao quantizes as they are loaded."""

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import AfterValidator

from rlhf_utils import WorkerExtension

from ..flags import arg

AUTO = "auto"


def torchao_config(value: str) -> str:
    """The JSON of a torchao configuration, as `json.dumps(config_to_dict(config))` makes it. `value` is the JSON or a
    file with it. `AUTO` stays as it is. Raises ValueError if torchao cannot read the value.
    """
    from torchao.core.config import AOBaseConfig, config_from_dict

    if value == AUTO:
        return value
    is_json = value.lstrip().startswith("{")
    if not is_json and not Path(value).is_file():
        raise ValueError("neither JSON nor a file: it takes what torchao's config_to_dict(config) gives, as JSON")
    try:
        text = value if is_json else Path(value).read_text()
        if not isinstance(config_from_dict(json.loads(text)), AOBaseConfig):
            raise ValueError("that is no quantization")
    except Exception as error:  # torchao raises many types
        raise ValueError(str(error)) from error
    return text


@dataclass
class QuantizationArguments:
    """How torchao quantizes the engines' weights."""

    quantization: Annotated[str | None, AfterValidator(torchao_config)] = arg(
        None,
        help="how torchao quantizes the engines' weights: auto (FP8; CPU: int8), or the JSON of its configuration, or a"
        " file with it (default: not at all)",
    )


def quantize_by_torchao(config: str) -> tuple[dict, str]:
    """vLLM's options for weights quantized by `config`, which is from `torchao_config`, and the quantization's name.

    `AUTO` is FP8 if the hardware has it, else int8.
    """
    from torchao import quantization
    from torchao.core.config import config_to_dict
    from vllm.platforms import current_platform

    remark = ""
    if config == AUTO and current_platform.supports_fp8():
        config = json.dumps(
            config_to_dict(quantization.Float8DynamicActivationFloat8WeightConfig(granularity=quantization.PerRow()))
        )
    elif config == AUTO:
        config = json.dumps(config_to_dict(quantization.Int8DynamicActivationInt8WeightConfig()))
        remark = ": FP8 takes a GPU of compute capability 8.9"
    options = {"quantization": "torchao", "hf_overrides": {"quantization_config_dict_json": config}}
    return options, json.loads(config)["_type"] + remark


class FusedQuantization:
    """A part of a worker extension: torchao quantizes weights and activations to FP8 by compiled functions."""

    def __new__(cls, *args, **options):  # vLLM creates the worker before it loads the model
        fuse_quantization()
        return super().__new__(cls)


class QuantizedWorkerExtension(FusedQuantization, WorkerExtension):
    """`WorkerExtension`, for an engine that torchao quantizes."""


def fuse_quantization() -> None:
    """Compile torchao's quantization to FP8. Otherwise it passes over each weight ten times, with a kernel each time:
    for a 7B on an H200, that takes 70 ms instead of 8.5."""
    module = importlib.import_module("torchao.quantization.quantize_.workflows.float8.float8_tensor")
    for name in ("_choose_scale_float8", "_quantize_affine_float8"):
        setattr(module, name, torch.compile(getattr(module, name), dynamic=True))
