"""What the benchmarks share: the shapes of the models that they make with random weights, and this machine's GPUs."""

import subprocess
from dataclasses import dataclass, field

from trainer.rollouts.options import QuantizedEngineArguments
from trainer.run.arguments import RunArguments

QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32768}
QWEN3_MOE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "max_position_embeddings": 32768}
OPT = {"model_type": "opt", "architectures": ["OPTForCausalLM"]}
SHAPES = {
    "tiny": OPT
    | {"hidden_size": 256, "word_embed_proj_dim": 256, "ffn_dim": 1024, "num_hidden_layers": 4}
    | {"num_attention_heads": 4, "vocab_size": 4096, "max_position_embeddings": 256},
    "opt-125m": OPT | {"word_embed_proj_dim": 768},
    "qwen2.5-0.5b": QWEN2
    | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    | {"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "qwen2.5-1.5b": QWEN2
    | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
    | {"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "qwen2.5-7b": QWEN2
    | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    | {"num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
    "qwen2.5-32b": QWEN2
    | {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40}
    | {"num_key_value_heads": 8, "vocab_size": 152064, "tie_word_embeddings": False},
    "qwen3-30b-a3b-4l": QWEN3_MOE  # 4 of its 48 layers
    | {"hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 32}
    | {"num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
    | {"vocab_size": 151936, "tie_word_embeddings": False, "norm_topk_prob": True},
}
# Whole, with towers.
MULTIMODAL = {
    "tiny-vl": {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "tie_word_embeddings": True,
        "image_token_id": 4094,
        "video_token_id": 4095,
        "text_config": {
            **{"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4},
            **{"num_key_value_heads": 2, "vocab_size": 4096, "max_position_embeddings": 1024},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]},
        },
        "vision_config": {"hidden_size": 64, "out_hidden_size": 128, "intermediate_size": 256, "depth": 2}
        | {"num_heads": 2, "fullatt_block_indexes": [1]},
    },
    "qwen2.5-vl-3b": {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "tie_word_embeddings": True,
        "text_config": {
            **{"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16},
            **{"num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 128000},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        "vision_config": {"hidden_size": 1280, "out_hidden_size": 2048},
    },
}


@dataclass
class BenchmarkArguments(RunArguments):
    """A run without learning steps, so these are no flags."""

    steps: int = field(default=1, init=False)
    save_every: int = field(default=0, init=False)
    report_to: list[str] = field(default_factory=list, init=False)
    resume: None = field(default=None, init=False)


@dataclass
class BenchmarkEngineArguments(QuantizedEngineArguments):
    """An engine whose log-probabilities nobody compares, so this is no flag."""

    exact: str = field(default="off", init=False)


def device_kind() -> str:
    """The name of this machine's GPUs, or "CPU"."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError):
        return "CPU"
