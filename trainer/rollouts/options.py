"""Options of an engine: the flags, and what vLLM gets of them on this hardware."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le
from pydantic import AfterValidator

from ..flags import arg
from ..functions import json_object
from .quantization import torchao_config

IN_ENGINE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"  # on CPU, vLLM takes "mp" for "uni"
# vLLM's default compiles the model as well, for a longer start and no faster rollouts.
DECODE_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
LARGEST_GRAPH = 512  # sequences, as in vLLM; a larger batch decodes without a graph
GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448)
EXTENSIONS = "trainer.rollouts.extensions"
WEIGHTLESS = ("ngram", "[ngram]", "ngram_gpu", "suffix")  # drafts of speculative decoding that no weights make


def engine_options(text: str) -> str:
    """As `json_object`. Raises ValueError for options with which the engine would see other images than the trainer, or
    have weights that no sync brings."""
    options = json.loads(json_object(text))
    if "mm_processor_kwargs" in options:
        where = "the model's preprocessor_config.json, for the trainer as well"
        raise ValueError(f"what mm_processor_kwargs would set belongs in {where}")
    draft = options.get("speculative_config") or {}
    if not isinstance(draft, dict):
        raise ValueError(f"speculative_config must be an object, and is {draft!r}")
    if draft and (method := draft.get("method") or draft.get("model")) not in WEIGHTLESS:
        raise ValueError(
            f"no sync brings the draft's weights (speculative_config: {method}); ngram and suffix have none"
        )
    return text


@dataclass
class EngineArguments:
    """How large an engine is, and how vLLM runs it."""

    tensor_parallel_size: Annotated[int | None, Ge(1)] = arg(
        None,
        help="GPUs that each engine is spread over (CPU: groups of cores; default: 2; on an odd number of shared GPUs,"
        " or a shared CPU: 1)",
    )
    gpu_memory_utilization: Annotated[float | None, Gt(0), Le(1)] = arg(
        None, help="fraction of each of its GPUs' memory that an engine takes (default: 0.8; on shared GPUs: 0.4)"
    )
    max_model_len: Annotated[int | None, Ge(1)] = arg(
        None,
        help="tokens that a prompt and its completion may have together (default: the model's limit; CPU: that, or what"
        " fits into 256 MiB)",
    )
    exact: Literal["auto", "on", "off"] = arg(
        "auto",
        help="whether trainers compute the engines' log-probabilities bit for bit (docs/exact.md): if they can (auto),"
        " or else the run ends (on), or not (off)",
    )
    engine_args: Annotated[str, AfterValidator(engine_options)] = arg(
        "{}", help="more options of vllm.LLM, as JSON, which override the script's: '{\"max_num_seqs\": 512}'"
    )
    quantization: str | None = None  # no flag: a run that takes one compares what its engines serve
    sampling_mask: bool = False  # no flag: whether engines return from which tokens they have sampled (sampling.py)


@dataclass
class QuantizedEngineArguments(EngineArguments):
    """How an engine's weights are quantized."""

    quantization: Annotated[str | None, AfterValidator(torchao_config)] = arg(
        None,
        help="quantize the engines' weights as they arrive: auto (FP8; CPU: int8), or the JSON of a torchao"
        " configuration of int8 or FP8",
    )


@dataclass(frozen=True)
class EngineSetting:
    """What a topology asks of each of its engines."""

    device: str  # "cuda" or "cpu"
    extension: str | None = None  # of rlhf_utils; None: no weights are sent to this engine
    engines: int = 1  # of this size, which share the cores of a CPU
    sequences: int = LARGEST_GRAPH  # that it generates at a time, at most
    kv_cache_bytes: int | None = None  # of each worker; None: vLLM measures what is free
    options: dict = field(default_factory=dict)  # more options of vLLM


def graph_sizes(sequences: int) -> list[int]:
    """The batch sizes of decode graphs for up to so many sequences. vLLM pads to the next one; a graph takes a quarter
    of a second of the start."""
    largest = min(sequences, LARGEST_GRAPH)
    return [size for size in GRAPH_SIZES if size < largest] + [largest]


def llm_options(
    args: EngineArguments, model: str, setting: EngineSetting, bundles: Sequence[int]
) -> tuple[dict, dict[str, str]]:
    """The options of a vllm.LLM, and the environment variables that it and its workers want. The engine's workers use
    these `bundles` of its placement group."""
    workers = setting.engines * len(bundles)
    options = {
        "tensor_parallel_size": len(bundles),
        "max_model_len": args.max_model_len,
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from, with the temperature
    }
    if setting.device == "cuda":
        # Workers are processes of the engine's own, which start sooner than Ray's actors. In the engine's process, one
        # would wait for vLLM's scheduler: rollouts of a small model took a quarter longer (135M, one H200).
        environment, options["distributed_executor_backend"] = {}, "mp"
        options |= {"dtype": "bfloat16", "gpu_memory_utilization": args.gpu_memory_utilization}
        options["kv_cache_memory_bytes"] = setting.kv_cache_bytes
        options["compilation_config"] = DECODE_GRAPHS | {"cudagraph_capture_sizes": graph_sizes(setting.sequences)}
    else:
        # One worker computes in its engine's process: that starts sooner. Several are that process's children, each
        # bound to its cores.
        cores = sorted(os.sched_getaffinity(0))
        cores_of_workers = [cores[bundle % workers :: workers] or cores for bundle in bundles]
        if len(bundles) == 1:
            executor = IN_ENGINE_PROCESS
            environment = {"OMP_NUM_THREADS": str(len(cores_of_workers[0]))}
        else:
            executor = "mp"
            environment = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, ids)) for ids in cores_of_workers)}
        options |= {"dtype": "float32", "distributed_executor_backend": executor, "kv_cache_memory_bytes": 256 << 20}
        options["max_model_len"] = args.max_model_len or -1  # the model's own, or what the KV cache holds
        # For a prompt in two parts, vLLM would rewind the seed's generator, which a CPU's cannot do.
        options |= {"enforce_eager": True, "enable_chunked_prefill": False}
    if setting.extension:
        options |= {"return_sampling_mask": True} if args.sampling_mask else {}
        options["worker_extension_cls"] = f"rlhf_utils.{setting.extension}"
        if args.quantization:
            options |= {"worker_extension_cls": f"{EXTENSIONS}.Quantized{setting.extension}", "dtype": "bfloat16"}
        elif args.exact != "off":
            from transformers import AutoConfig

            from ..learning.exact import attention_backend  # with all that learns: an engine imports it late

            options["worker_extension_cls"] = f"{EXTENSIONS}.Exact{setting.extension}"
            options["attention_backend"] = attention_backend(AutoConfig.from_pretrained(model))
            environment["VLLM_BATCH_INVARIANT"] = "1"
    return options | setting.options | json.loads(args.engine_args), environment
