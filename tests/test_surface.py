"""What this project uses of vLLM, transformers, torch, torchao, ray and peft that is not public: any release may change
it. It is looked for in their sources, which are not imported.

pytest tests/test_surface.py                            of what is installed
make test-surface WHEEL=vllm-0.33.0-...-x86_64.whl      of another vLLM: its wheel, as a file or unpacked
"""

import ast
import importlib.util
import os
import re
import zipfile
from functools import cache
from pathlib import Path

from conftest import ROOT

LIBRARIES = ("vllm", "transformers", "torch", "torchao", "ray", "peft")
PUBLIC = re.compile(r"\w+\.\w+$|torch\.(?!.*\b_)")
PYTHON = {"_exit", "_fd", "_replace", "_resource_tracker"}

# What imports do not show. Below each file of ours: a module, or a class in it, and what the file uses of that; of
# functions also the parameters that it gives, the positional ones in order and, after *, those by name.
# First, after !, what nobody would miss: names that are assigned, or looked up with a default.
SURFACE = """
trainer/rollouts/options.py
! vllm.v1.executor.uniproc_executor: UniProcExecutor
  vllm.engine.arg_utils.EngineArgs: return_sampling_mask
trainer/rollouts/sampling.py
  vllm.outputs.CompletionOutput: sampling_mask
  vllm.outputs.SamplingMask: token_ids
trainer/rollouts/engine.py
! torch._dynamo.config: TORCH_COMPILE_DISABLE
trainer/rollouts/engine_start.py
! vllm.v1.engine.utils: get_mp_context
! vllm.model_executor.models.registry: _run_in_subprocess
trainer/rollouts/preload.py
! torch._dynamo.device_interface.CudaInterface: is_triton_capable
trainer/rollouts/extensions.py
! vllm.model_executor.layers.linear: linear_batch_invariant
! vllm.model_executor.layers.vocab_parallel_embedding: linear_batch_invariant
! vllm.v1.worker.gpu.sample.sampler: compute_topk_scores
! torchao.quantization.quantize_.workflows.float8.float8_tensor: _choose_scale_float8; _quantize_affine_float8
weight_sync/engine_model.py
! vllm.model_executor.model_loader.reload.meta: SKIP_LOAD_TENSORS
! vllm.model_executor.model_loader.reload.utils: weight_loader_numel
! vllm.model_executor.layers.utils: cpu_linear
! vllm.model_executor.layers.linear.LinearBase: quant_method
! vllm.model_executor.layers.linear.RowParallelLinear: input_size_per_partition
! vllm.model_executor.layers.fused_moe.fused_moe_method_base.FusedMoEMethodBase: moe_kernel
! vllm.model_executor.layers.fused_moe.modular_kernel.FusedMoEKernel: fused_experts
! vllm.model_executor.layers.fused_moe.experts.cpu_moe: isa
! vllm.model_executor.layers.attention.attention.Attention: kv_cache
  torch.nn.modules.module.Module: _buffers; _parameters
  vllm.model_executor.model_loader.reload.types.LayerReloadingInfo: can_load(); load_numel; loaded_weights
  vllm.model_executor.model_loader.reload.types.LayerReloadingInfo: kernel_tensors
  vllm.v1.worker.worker_base.WorkerBase: rank; model_config; parallel_config; vllm_config; get_model()
weight_sync/trace.py
! vllm.model_executor.model_loader.reload.layerwise: online_process_loader
  torch.nn.modules.module.Module: _parameters
  torch.storage: _cdata
  torch._ops: _schema
weight_sync/replay.py
! vllm.model_executor.model_loader.reload.layerwise: _already_called_process_weights_after_loading
  torch.nn.modules.module.Module: _parameters
weight_sync/ranks.py
! torch.distributed.tensor._api.DTensor: _local_tensor
weight_sync/groups.py
  vllm.distributed.utils.StatelessProcessGroup: create(host, port, rank, world_size, *, store_timeout, listen_socket)
  vllm.distributed.utils.StatelessProcessGroup: store
  vllm.distributed.device_communicators.pynccl.PyNcclCommunicator: __init__(group, *, device); disabled
  vllm.distributed.device_communicators.pynccl.PyNcclCommunicator: group_start(); group_end()
  vllm.distributed.device_communicators.pynccl.PyNcclCommunicator: send(tensor, dst, *, stream)
  vllm.distributed.device_communicators.pynccl.PyNcclCommunicator: recv(tensor, src, *, stream)
  torch.multiprocessing.reductions: rebuild_cuda_tensor(tensor_cls, tensor_size, tensor_stride, tensor_offset,
    storage_cls, dtype, storage_device)
weight_sync/example_protocols.py
  vllm.distributed.device_communicators.pynccl.PyNcclCommunicator: broadcast(tensor, src)
weight_sync/copies.py
  torchgen/packaged/ATen/native/native_functions.yaml: _foreach_copy_
weight_sync/comparison.py
  torchao.quantization.quantize_.workflows.int8.int8_tensor.Int8Tensor: qdata; scale
  torchao.quantization.quantize_.workflows.float8.float8_tensor.Float8Tensor: qdata; scale
rlhf_utils.py
  vllm.v1.worker.worker_base.WorkerBase: rank; device
  vllm.distributed.device_communicators.pynccl.PyNcclCommunicator: destroy()
trainer/learning/exact.py
! transformers.models.qwen2.modeling_qwen2: apply_rotary_pos_emb(q, k, cos, sin)
! transformers.models.opt.modeling_opt.OPTAttention: scaling
! transformers.configuration_utils.PreTrainedConfig: _attn_implementation
  vllm.platforms.cuda.NvmlCudaPlatform: is_fully_connected(physical_device_ids)
  vllm.third_party.pynvml: nvmlInit(); nvmlDeviceGetCount()
  vllm.distributed.device_communicators.pynccl_wrapper.NCCLLibrary: ncclGetVersion()
  vllm.model_executor.layers.rotary_embedding: get_rope(head_size, *, max_position, rope_parameters, dtype)
  vllm.model_executor.layers.rotary_embedding.base: cos_sin_cache
  vllm.model_executor.determinism.batch_invariant: rms_norm_batch_invariant(input, weight, eps)
  vllm._custom_ops: fused_add_rms_norm(input, residual, weight, epsilon)
  vllm._custom_ops: rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox)
  vllm.model_executor.layers.rotary_embedding.mrope: triton_mrope(q, k, cos, sin, mrope_section, head_size, rotary_dim,
    mrope_interleaved, is_neox_style)
  vllm.vllm_flash_attn.flash_attn_interface: flash_attn_varlen_func(q, k, v, *, max_seqlen_q, cu_seqlens_q,
    max_seqlen_k, cu_seqlens_k, return_softmax_lse, softmax_scale, causal, window_size, fa_version, num_splits)
  vllm.v1.attention.ops.triton_unified_attention: unified_attention(q, k, v, out, cu_seqlens_q, max_seqlen_q,
    seqused_k, max_seqlen_k, softmax_scale, causal, window_size, block_table, softcap, q_descale, k_descale, v_descale)
  vllm.v1.worker.gpu.sample.gumbel: apply_temperature(logits, expanded_idx_mapping, temperature)
  vllm.v1.worker.gpu.sample.logprob: compute_token_logprobs(logits, token_ids)
  torchgen/packaged/ATen/native/native_functions.yaml: _flash_attention_forward; _flash_attention_backward
trainer/learning/exact_mlp.py
! transformers.configuration_utils.PreTrainedConfig: _experts_implementation
  vllm.model_executor.layers.fused_moe.router.fused_topk_router: fused_topk(hidden_states, gating_output, topk,
    renormalize)
  vllm.model_executor.layers.fused_moe.fused_moe: fused_experts(hidden_states, w1, w2, topk_weights, topk_ids)
trainer/learning/sharding.py
! transformers.modeling_utils: caching_allocator_warmup
! transformers.modeling_utils.PreTrainedModel: _no_split_modules
  transformers.distributed.fsdp: expand_fsdp_plan(model, fsdp_plan)
  transformers.distributed.configuration_utils.DistributedConfig: fsdp_size; fsdp_mixed_precision
  torch.distributed.fsdp._fully_shard._fully_shard.FSDPModule: _get_fsdp_state()
  torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState: _fsdp_param_group
  torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup: fsdp_params
  torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam: _module_info; _post_load_hook_handle
  torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam: sharded_param; _sharded_param_data
  torch.distributed.fsdp._fully_shard._fsdp_param.ParamModuleInfo: shared_modules; shared_param_names
trainer/learning/lora.py
! peft.tuners.tuners_utils: cast_input_dtype_enabled
! peft.tuners.lora.layer.LoraLayer: lora_A; lora_B; scaling
  peft.utils.other.ModulesToSaveWrapper: modules_to_save
trainer/learning/named_tensors.py
! peft.tuners.tuners_utils: base_layer
  transformers.core_model_loading: revert_weight_conversion(model, state_dict)
  transformers.modeling_utils.PreTrainedModel: all_tied_weights_keys
trainer/run/models.py
  transformers.models.auto.modeling_auto: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
  transformers.models.auto.modeling_auto: MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
  transformers.models.auto.modeling_auto: MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
trainer/run/session.py
! vllm.v1.engine.exceptions: EngineDeadError
trainer/rollouts/engine.py
  vllm.usage.usage_lib.UsageContext: LLM_CLASS
  vllm.sampling_params.RequestOutputKind: FINAL_ONLY
  vllm.v1.engine.async_llm.AsyncLLM: from_engine_args(*, usage_context); model_config; get_tokenizer()
  vllm.v1.engine.async_llm.AsyncLLM: generate(prompt, sampling_params, request_id, *, priority); shutdown()
  vllm.v1.engine.async_llm.AsyncLLM: reset_prefix_cache(*, reset_running_requests, reset_connector)
  vllm.v1.engine.async_llm.AsyncLLM: reset_encoder_cache(); collective_rpc(method, *, args)
  vllm.v1.engine.async_llm.AsyncLLM: sleep(*, level, mode); release_kv_cache_memory(); wake_up(*, tags)
  vllm.v1.engine.async_llm.AsyncLLM: update_weight_version(new_version); resume_generation()
trainer/rollouts/teacher.py
  vllm.v1.engine.async_llm.AsyncLLM: vllm_config
  vllm.config.vllm.VllmConfig: use_v2_model_runner
trainer/topologies/server.py
  vllm.entrypoints.rl.online.api_router: /pause; /is_paused; /get_world_size; /update_weight_version; /resume
  vllm.entrypoints.serve.dev.cache.api_router: reset_prefix_cache(*, reset_running_requests, reset_external)
  vllm.entrypoints.serve.dev.cache.api_router: /reset_prefix_cache; /reset_encoder_cache
  vllm.entrypoints.serve.dev.rpc.api_router: /collective_rpc
  vllm.entrypoints.scale_out.token_in_token_out.api_router: /inference/v1/generate
rlhf_colocate.py
  vllm.entrypoints.llm.LLM: release_kv_cache_memory()
rlhf_cpu.py
! vllm.v1.executor.uniproc_executor: UniProcExecutor
  vllm.distributed.weight_transfer.base: TrainerInitInfo; WeightTransferInitInfo
  vllm.distributed.weight_transfer.base: WeightTransferUpdateInfo; WeightTransferEngine; TrainerWeightTransferEngine
  vllm.distributed.weight_transfer.packed_tensor: pack_tensors(iterator, post_iter_func, buffer_size_bytes)
  vllm.distributed.weight_transfer.packed_tensor: unpack_tensor(packed_tensor, names, shapes, dtypes, tensor_sizes)
trainer/rollouts/conversation.py
  vllm.tool_parsers.abstract_tool_parser.ToolParser: extract_tool_calls(model_output, request)
tests/plain_worker.py
  vllm.model_executor.layers.utils: dispatch_cpu_unquantized_gemm(layer, remove_weight)
"""
USERS = re.findall(r"^(\w\S+)\n((?:[! ].*\n)+)", SURFACE, re.MULTILINE)
ROWS = [(user, *row[2:].split(": ", 1)) for user, rows in USERS for row in rows.replace("\n    ", " ").splitlines()]
MEMBERS = [(user, where, *member.partition("(")) for user, where, members in ROWS for member in members.split("; ")]
PRODUCT = [file for part in ("*.py", "trainer/**/*.py", "weight_sync/*.py") for file in ROOT.glob(part)]
TEXT = "".join(file.read_text() for file in (*PRODUCT, ROOT / "tests/plain_worker.py"))
NODES = [*ast.walk(ast.parse(TEXT))]


def test_what_is_not_public_is_where_it_was():
    gone = [" ".join(member) for member in MEMBERS if not is_there(*member[1:])]
    assert not gone, "\n".join(gone)


def test_what_is_imported_is_where_it_was():
    imports = [node for node in NODES if isinstance(node, ast.ImportFrom) and not node.level]
    names = {(node.module, alias.name) for node in imports for alias in node.names}
    deep = {name for name in names if name[0].startswith(LIBRARIES) and not PUBLIC.match(".".join(name))}
    gone = {name for name in deep if not is_there(*name) and not nodes_of(".".join(name))}
    assert not gone, gone


def test_environment_variables_are_vllms():
    assert {*re.findall(r"\"(VLLM_\w+)\"", TEXT)} - contents("vllm.envs")[0] == set()


def test_the_table_has_what_is_used_and_nothing_else():
    """As far as private attributes show."""
    assert [row for row in MEMBERS if not re.search(rf"(?<!\w){row[2]}\b", (ROOT / row[0]).read_text())] == []
    used = {node.attr for node in NODES if isinstance(node, ast.Attribute) and re.match("_[a-zA-Z]", node.attr)}
    own = {*re.findall(r"(?:def |class |self\.)(_\w+)(?=[(:]|.* = )", TEXT)}
    assert used - own - PYTHON - {row[2] for row in MEMBERS} == set()


def is_there(where: str, name: str, called: str = "", parameters: str = "") -> bool:
    bound, functions = contents(where)
    positional, by_name = (re.findall(r"\w+", some) for some in parameters.partition("*")[::2])
    takes = [parameters for function, parameters in functions if function == name]
    matches = [taken[: len(positional)] == positional and {*by_name} <= {*taken} for taken in takes]
    return any(matches) if called else name in bound


@cache
def contents(where: str) -> tuple[set, list[tuple[str, list[str]]]]:
    """The names that a module or a class binds, and its texts; its functions, with their parameters."""
    module, _, cls = where.rpartition(".")
    if cls == "yaml":
        return {*re.findall(r"\w+", (folder_of("torchgen") / where).read_text())}, []
    nodes = nodes_of(module if cls[0].isupper() else where)
    if cls[0].isupper():
        classes = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == cls]
        nodes = [node for each in classes for node in ast.walk(each)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {*map(bound_by, nodes)}, [(function.name, parameters_of(function.args)) for function in functions]


@cache
def nodes_of(module: str) -> list[ast.AST]:
    library, path = module.partition(".")[0], module.replace(".", "/")
    files = [folder_of(library) / file for file in (f"{path}.py", f"{path}/__init__.py")]
    return [node for file in files if file.is_file() for node in ast.walk(ast.parse(file.read_text("utf-8")))]


@cache
def folder_of(library: str) -> Path | zipfile.Path:
    """The folder that this library's package lies in."""
    if library == "vllm" and (wheel := os.environ.get("WHEEL")):
        return zipfile.Path(wheel) if zipfile.is_zipfile(wheel) else Path(wheel)
    return Path(importlib.util.find_spec(library).origin).parents[1]


def bound_by(node: ast.AST) -> object:
    """The name that a definition, an assignment or an import binds; the value of a constant."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return name
        case ast.alias():
            return node.asname or node.name
        case ast.Constant():
            return node.value
    return getattr(node, "name", None)


def parameters_of(taken: ast.arguments) -> list[str]:
    names = [argument.arg for argument in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]
