"""How torchao quantizes an engine's weights as they are loaded."""

import json

AUTO = "auto"  # the value of --quantization for the default


def torchao_config(value: str) -> str:
    """Returns `value` if it is "auto", or the JSON of a torchao configuration, as `json.dumps(config_to_dict(config))`
    makes it. Raises ValueError if torchao cannot read it."""
    from torchao.core.config import AOBaseConfig, config_from_dict

    try:
        is_config = value == AUTO or isinstance(config_from_dict(json.loads(value)), AOBaseConfig)
    except Exception as error:  # torchao raises many types
        raise ValueError(f"neither {AUTO} nor the JSON of what config_to_dict of torchao gives ({error})") from error
    if not is_config:
        raise ValueError("that is no quantization")
    return value


def quantize_by_torchao(config: str = AUTO) -> tuple[dict, str]:
    """vLLM's options for weights quantized by `config`, from `torchao_config`, and the quantization's name. `AUTO`
    is FP8 if the hardware has it, else int8."""
    from torchao import quantization
    from torchao.core.config import config_to_dict
    from vllm.platforms import current_platform

    remark = ""
    if config == AUTO and current_platform.supports_fp8():
        default = quantization.Float8DynamicActivationFloat8WeightConfig(granularity=quantization.PerRow())
    elif config == AUTO:
        default = quantization.Int8DynamicActivationInt8WeightConfig()
        remark = ": FP8 takes a GPU of compute capability 8.9"
    if config == AUTO:
        config = json.dumps(config_to_dict(default))
    options = {"quantization": "torchao", "hf_overrides": {"quantization_config_dict_json": config}}
    return options, json.loads(config)["_type"] + remark
