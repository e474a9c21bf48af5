"""A weight sync with the weight-transfer API of vLLM 0.32 and 0.33, for rlhf_nccl.py.

On GPUs the transports are vLLM's: "nccl" and "ipc". `NativeSender` is the trainer's end. It adds deadlines, since vLLM
has none. vLLM has no transport for CPU, so the last section plugs in "gloo". It also shows how to write your own
transport, with one half for the trainer and one for each worker of the engine.
"""

import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch

from rlhf_utils import SyncReport, WeightSyncError, stateless_init_process_group
from weight_sync.buckets import SLOWEST_BYTES_PER_SECOND, dtype_name
from weight_sync.engine_model import pack_experts_when_loaded, repack_tied_layers
from weight_sync.groups import refuse_disabled, refuse_expandable_segments
from weight_sync.link import CONNECT_SECONDS
from weight_sync.lora import LoRAWeight, materialized

PACK_BYTES = 1 << 30  # the size of a pack of tensors, unless one tensor is larger
STUCK_SECONDS = 15  # a transfer fails if nothing moves for so long, beyond the time that the bytes in flight take
ENGINE_DIED = ("ActorDiedError", "EngineDeadError", "failed: cancelled")  # in errors of Ray and vLLM on a dead process


class NativeSender:
    """The trainer's end of a sync with vLLM's own API, and the client through which vLLM calls the engine.

    `call(method, *args)` calls a method of the engine's `vllm.LLM` and raises its errors. `named_tensors()` returns the
    weights, named as in the checkpoint; they travel as `dtype`. Rank 0 of their group is here, at `address`; the other
    `world_size - 1` ranks are the workers.

    vLLM looks at the answer to `update_weights` only after it has sent everything, and a broadcast to a failed worker
    never ends. So a wait here ends with the engine's first error, and when the transfer is stuck. Both raise
    WeightSyncError, and leave the engine's weights undefined.
    """

    def __init__(self, call: Callable, named_tensors: Callable, dtype: torch.dtype, backend: str, address, world_size):
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        self.call, self.version, self.thread = call, 0, ThreadPoolExecutor(1)
        self.engine_error = Future()  # done, with an exception, once the engine has failed
        self.source = weight_source(named_tensors, dtype)
        self.sizes = [tensor.numel() * dtype.itemsize for tensor in named_tensors().values()]
        pack_bytes = max(*self.sizes, min(PACK_BYTES, sum(self.sizes)))
        # vLLM keeps up to two packs in flight, and a pack may be one tensor larger than `pack_bytes`.
        in_flight = min(2 * (pack_bytes + max(self.sizes)), sum(self.sizes))
        self.seconds_allowed = STUCK_SECONDS + in_flight / SLOWEST_BYTES_PER_SECOND
        init_info = transfer_init_info(backend, address, world_size, pack_bytes)
        self.transfer = self._watched(
            lambda: WeightTransferTrainerFactory.trainer_init(init_info, client=self, source=self.source),
            CONNECT_SECONDS,
        )
        if backend == "nccl":
            refuse_disabled(self.transfer.model_update_group)

    def send_weights(self) -> SyncReport:
        """Send all weights. vLLM calls `start_weight_update`, `update_weights` and `finish_weight_update`."""
        started = time.perf_counter()
        self.version += 1
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # vLLM packs in its own streams, which do not wait for the optimizer
        self._watched(self.transfer.send_weights, self.seconds_allowed)
        return SyncReport(
            self.version, len(self.sizes), sum(self.sizes), time.perf_counter() - started, "reload (it is vLLM's)"
        )

    def _watched(self, step: Callable, seconds: float):
        """The result of `step()`, which may hang. Raises WeightSyncError if the engine fails, or nothing moves for so
        many seconds."""
        self.source.last_taken = time.monotonic()
        running = self.thread.submit(step)
        while not wait([running, self.engine_error], timeout=1, return_when=FIRST_COMPLETED).done:
            if time.monotonic() - self.source.last_taken > seconds:
                raise WeightSyncError(
                    f"the weight transfer is stuck: nothing has moved for {seconds:.3g} s; run.log has what the"
                    " engine's processes logged"
                )
        if running.done() and running.exception():
            wait([self.engine_error], timeout=5)  # it would be the cause, and may arrive later
        return (self.engine_error if self.engine_error.done() else running).result()

    # vLLM's protocol `VLLMWeightSyncClient`

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        self._call("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: dict) -> None:
        self._call("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update", str(self.version))

    def _call(self, method: str, *args) -> None:
        try:
            self.call(method, *args)
        except Exception as error:
            died = any(words in f"{type(error).__name__}: {error}" for words in ENGINE_DIED)
            cause = getattr(error, "cause", None) or error  # Ray wraps what an actor raised
            reason = "died: one of vLLM's processes ended" if died else f"failed, with a traceback in run.log: {cause}"
            if not self.engine_error.done():  # keep the first error, which causes the later ones
                self.engine_error.set_exception(WeightSyncError(f"the engine {reason}"))
            raise


def weight_source(named_tensors: Callable[[], dict[str, torch.Tensor | LoRAWeight]], dtype: torch.dtype):
    """The tensors, named as in the checkpoint, as a vLLM `WeightSource` that casts each one to `dtype`."""
    from vllm.distributed.weight_transfer import ParamMeta, WeightSource

    class NamedTensors(WeightSource):
        last_taken = 0.0  # time.monotonic() when vLLM took the last tensor

        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(name, dtype, tuple(tensor.shape)) for name, tensor in named_tensors().items()]

        if hasattr(WeightSource, "iter_full"):  # vLLM 0.33, where it is a property
            metadata = functools.cached_property(metadata)

        def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in named_tensors().items():
                self.last_taken = time.monotonic()
                yield name, materialized(tensor).detach().to(dtype)

        __iter__ = iter_full  # vLLM 0.32

    return NamedTensors()


def transfer_init_info(backend: str, address: str, world_size: int, pack_bytes: int):
    """The settings of a transport ("nccl", "ipc", "gloo") for vLLM's trainer side, which passes them to the workers.

    Tensors travel in packs. With "ipc", a tensor larger than `pack_bytes` fails. Raises WeightSyncError for "ipc" if
    this process's memory cannot be shared.
    """
    from vllm.distributed.weight_transfer import WeightSource
    from vllm.utils.network_utils import get_open_port

    if backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        refuse_expandable_segments()
        return IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=pack_bytes)
    if backend == "gloo":
        InitInfo, options = register_gloo_trainer(), {}
    else:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo as InitInfo

        # A worker of vLLM 0.32 loads each pack on the stream of its buffer, without waiting for the other buffer's
        # stream. If a layer is split over two packs, it would read the first half before that has arrived.
        options = {} if hasattr(WeightSource, "iter_full") else {"packed_num_buffers": 1}
    port = get_open_port()
    return InitInfo(address, port, world_size, rank=0, packed_buffer_size_bytes=pack_bytes, **options)


# --- Your own transport: gloo -----------------------------------------------------------------------------------------
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
            pack_experts_when_loaded(self.model)
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
            for name, tensor in unpack_tensor(packed, names, shapes, dtypes, sizes):
                try:
                    self.model.load_weights([(name, tensor)])
                except Exception as error:  # vLLM passes on only the text, which may be empty
                    raise WeightSyncError(f"{name} {list(tensor.shape)}: {error!r}") from error

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
        packed_buffer_size_bytes: int

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
            weights = iter(self.source)
            self.client.start_weight_update()
            while pack := pack_tensors(weights, lambda item: item[1], self.buffer_bytes):
                dtype_names = [dtype_name(dtype) for dtype in pack.dtypes]
                tensors = list(zip(pack.names, dtype_names, pack.shapes, pack.tensor_sizes, strict=True))
                loading = self.calls.submit(self.client.update_weights, {"tensors": tensors})
                self.group.broadcast(pack.packed_tensor, src=0)
                loading.result()
            self.client.finish_weight_update()

        def shutdown(self) -> None:
            self.group = None

    WeightTransferTrainerFactory.register_engine("gloo", TrainerTransfer)
    return TrainerInitInfo
