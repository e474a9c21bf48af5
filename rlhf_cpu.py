"""What rlhf.py and its siblings need without a GPU: a small model, vLLM's options, and gloo for rlhf_nccl.py.

The scripts import this file only there. Copy it along with them if some of your machines have no GPU.
"""

import argparse
import atexit
import functools
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from rlhf_utils import stateless_init_process_group
from weight_sync.engine_model import repack_tied_layers

HIDDEN_SIZE, HEADS, LAYERS, MAX_LENGTH = 128, 4, 2, 256  # vLLM's attention on CPU needs a head size of at least 32
GLOO_TRANSFER = {  # what engine_options lacks for rlhf_nccl.py
    "weight_transfer_config": {"backend": "gloo"},
    "worker_extension_cls": "rlhf_cpu.GlooTransferWorker",
}
IN_ENGINE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"  # on CPU, vLLM takes "mp" for "uni"


def complete(args: argparse.Namespace) -> None:
    """Set those arguments of a script that the user has not given."""
    if args.learning_rate is None and not args.model:
        args.learning_rate = 3e-3
    args.model = args.model or small_model()
    args.tensor_parallel_size = args.tensor_parallel_size or 1  # a single process starts soonest


def small_model() -> str:
    """The folder of a new OPT with half a million random weights, and one token for each byte.

    transformers and vLLM load it like any other model. It is removed when this process ends, unless it is killed.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

    folder = tempfile.mkdtemp(prefix="rlhf-model-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    tokens = ["<pad>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "</s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=MAX_LENGTH, **special).save_pretrained(folder)
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=len(tokens),
        hidden_size=HIDDEN_SIZE,
        word_embed_proj_dim=HIDDEN_SIZE,
        ffn_dim=4 * HIDDEN_SIZE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=MAX_LENGTH,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    OPTForCausalLM(config).save_pretrained(folder)
    return folder


def engine_options(tensor_parallel_size: int) -> dict:
    """Options of vllm.LLM. Sets the environment variables that go with them: call this before you import vLLM."""
    cores = sorted(os.sched_getaffinity(0))
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # compiling takes longer than such a run
    if tensor_parallel_size == 1:  # all in this process: each one takes long to import vLLM
        executor = IN_ENGINE_PROCESS
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["OMP_NUM_THREADS"] = str(len(cores))
    else:
        executor = "mp"
        of_workers = [cores[i::tensor_parallel_size] or cores for i in range(tensor_parallel_size)]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, own)) for own in of_workers)
    return {
        "distributed_executor_backend": executor,
        "dtype": "float32",
        "enforce_eager": True,
        "kv_cache_memory_bytes": 256 << 20,
        "max_model_len": -1,  # the model's own, or as many tokens as the KV cache holds
        "enable_chunked_prefill": False,
    }


# --- gloo, as a transport of vLLM's weight-transfer API ---------------------------------------------------------------
#
# vLLM has a factory for each half, which finds it by the transport's name. The trainer's half drives both:
#
# init_weight_transfer_engine  once: trainer and workers join a group
# start_weight_update          the workers open vLLM's reload bracket
# update_weights               once per pack: the call describes the tensors, a broadcast carries their bytes
# finish_weight_update         the workers close the bracket and serve the new weights


class GlooTransferWorker:
    """A worker extension (`worker_extension_cls`) that registers the transport "gloo" in vLLM's workers.

    A worker must know its transport before it loads the model. An installed package would register it in an entry point
    of the group `vllm.general_plugins`, which vLLM runs in all its processes. A copied module has no entry point, but
    vLLM imports it for its extension class, and creates the worker from that class.
    """

    def __new__(cls, *args, **kwargs):
        register_gloo_worker()
        return super().__new__(cls)


def register_gloo_worker() -> None:
    """Register the workers' half for `weight_transfer_config={"backend": "gloo"}`."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory, base
    from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    @dataclass
    class InitInfo(base.WeightTransferInitInfo):
        master_address: str
        master_port: int
        world_size: int  # the trainer and all workers

    @dataclass
    class UpdateInfo(base.WeightTransferUpdateInfo):
        tensors: list[tuple[str, str, list[int], int]]  # name, dtype, shape and bytes of each, in packing order

    class WorkerTransfer(base.WeightTransferEngine):
        init_info_cls, update_info_cls = InitInfo, UpdateInfo

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            rank = 1 + self.parallel_config.rank  # the trainer is rank 0
            self.group = stateless_init_process_group(
                init_info.master_address, init_info.master_port, rank, init_info.world_size, self.device
            )

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: UpdateInfo) -> None:
            # New memory for each pack: the reload bracket keeps views of it until their layers are complete.
            names, dtype_names, shapes, sizes = zip(*update_info.tensors, strict=True)
            packed = torch.empty(sum(sizes), dtype=torch.uint8)
            self.group.broadcast(packed, src=0)
            dtypes = [getattr(torch, name) for name in dtype_names]
            self.model.load_weights(unpack_tensor(packed, names, shapes, dtypes, sizes))

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)
            repack_tied_layers(self.model)  # which the bracket leaves out

        def shutdown(self) -> None:
            self.group = None

    WeightTransferEngineFactory.register_engine("gloo", WorkerTransfer)


@functools.cache
def register_gloo_trainer() -> type:
    """Register the trainer's half. Returns its init info class, by which `WeightTransferTrainerFactory` finds it."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory, base
    from vllm.distributed.weight_transfer.packed_tensor import pack_tensors

    @dataclass
    class TrainerInitInfo(base.TrainerInitInfo):
        backend = "gloo"
        master_address: str
        master_port: int
        world_size: int
        packed_buffer_size_bytes: int = 1 << 30

    class TrainerTransfer(base.TrainerWeightTransferEngine):
        init_info_cls = TrainerInitInfo

        @classmethod
        def trainer_init(cls, init_info: TrainerInitInfo, *, client, source=None) -> "TrainerTransfer":
            transfer = cls(client=client, source=source)
            transfer.buffer_bytes = init_info.packed_buffer_size_bytes
            transfer.calls = ThreadPoolExecutor(1)  # runs the workers' half of a collective during the trainer's
            address = {name: getattr(init_info, name) for name in ("master_address", "master_port", "world_size")}
            joining = transfer.calls.submit(client.init_weight_transfer_engine, address)
            transfer.group = stateless_init_process_group(**address, rank=0, device="cpu")
            joining.result()
            return transfer

        def send_weights(self) -> None:
            weights = self.source.iter_full() if hasattr(self.source, "iter_full") else iter(self.source)  # 0.33, 0.32
            self.client.start_weight_update()
            while pack := pack_tensors(weights, lambda item: item[1], self.buffer_bytes):
                dtype_names = [str(dtype).removeprefix("torch.") for dtype in pack.dtypes]
                tensors = list(zip(pack.names, dtype_names, pack.shapes, pack.tensor_sizes, strict=True))
                loading = self.calls.submit(self.client.update_weights, {"tensors": tensors})
                self.group.broadcast(pack.packed_tensor, src=0)
                loading.result()
            self.client.finish_weight_update()

        def shutdown(self) -> None:
            self.group = None

    WeightTransferTrainerFactory.register_engine("gloo", TrainerTransfer)
    return TrainerInitInfo
