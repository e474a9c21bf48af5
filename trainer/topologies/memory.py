"""What a model and an engine take of a GPU's memory, reckoned before either starts.

If vLLM is told how large its KV cache is to be, it measures no free memory. So engines on one GPU, and trainers beside
them, can start at the same time, and graphs are captured once.
"""

from dataclasses import dataclass

import torch

from ..learning.multimodal import auto_class

BATCHED_TOKENS = 16384  # the most that vLLM 0.33 computes at a time, with the usage context of vllm.LLM
SEQUENCES = 1024  # the most whose logits it has at a time
LOGIT_BYTES = 14  # of one: in bf16, in fp32, and what sampling makes of them
FIXED_BYTES = 3 << 30  # CUDA's contexts and graphs, NCCL, a sync's buffers
LEAST_SHARE = 0.25  # of an engine's memory: where less is left for the KV cache, vLLM had better measure
LOADING_BYTES = 6  # of each of a trainer's parameters: fp32, and what loading holds beside it
SPARE_SHARE = 0.1  # of a GPU, for what this does not count


@dataclass(frozen=True)
class ModelSize:
    """What memory depends on, of a model."""

    parameters: int
    vocabulary: int
    token_bytes: int  # of one token's activations in a block, in bf16

    @classmethod
    def of(cls, path: str) -> "ModelSize":
        """The size of the model in this folder, or on the hub. Loads no weights."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            parameters = sum(p.numel() for p in auto_class(config).from_config(config).parameters())
        text = config.get_text_config()
        inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
        return cls(parameters, text.vocab_size, 2 * (10 * text.hidden_size + 4 * inner))

    def kv_cache_bytes(self, engine_bytes: float, workers: int) -> int | None:
        """What each of so many workers, which may take `engine_bytes`, has for its KV cache. None if that is little."""
        logits = SEQUENCES * self.vocabulary * LOGIT_BYTES
        rest = engine_bytes - 2 * self.parameters / workers - BATCHED_TOKENS * self.token_bytes - logits - FIXED_BYTES
        return int(rest) if rest > LEAST_SHARE * engine_bytes else None

    def loads_beside(self, engine_bytes: float, gpu_bytes: int) -> bool:
        """Whether a trainer can load while engines hold so much of its GPU."""
        return LOADING_BYTES * self.parameters + engine_bytes <= (1 - SPARE_SHARE) * gpu_bytes
