"""The trainer's end of a weight sync by vLLM's own weight-transfer API: what rlhf_nccl.py needs around it.

The transports are vLLM's, "nccl" and "ipc", or rlhf_utils.py's "gloo". Here are their settings, and an end to waits
that have none in vLLM.
"""

import functools
import inspect
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import torch

from rlhf_utils import SyncReport, known_api, register_gloo_trainer
from weight_transport import (
    CONNECT_SECONDS,
    SLOWEST_BYTES_PER_SECOND,
    WeightSyncError,
    refuse_disabled,
    refuse_expandable_segments,
)

PACK_BYTES = 1 << 30  # in which tensors are packed, if none of them is larger
STUCK_SECONDS = 15  # a transfer in which nothing has moved for so long, and the time of what is on the wire, has failed
ENGINE_DIED = ("ActorDiedError", "EngineDeadError", "failed: cancelled")  # what Ray and vLLM say of a dead process
WORKER_FAILED = "WorkerProc hit an exception."  # what a worker of vLLM logs before a traceback


class NativeSender:
    """The trainer's end of a sync by vLLM's own API, and the client by which vLLM drives the engine.

    `call(method, *args)` calls that method of the engine's `vllm.LLM`, by whatever means, and raises what it raises.
    `named_tensors()` are the weights, named as in the checkpoint; they travel as `dtype`. The group that they travel in
    has its rank 0 here, at `address`, and `world_size - 1` workers.

    vLLM's own waits have no end: it looks at how `update_weights` went once all is sent, and to a worker that has
    failed all never is. Here the engine's first error ends a wait, and so does too long a silence. Every method raises
    WeightSyncError, and the engine's weights are undefined then.
    """

    def __init__(self, call: Callable, named_tensors: Callable, dtype: torch.dtype, backend: str, address, world_size):
        check_native_api()
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        self.call, self.version, self.failed, self.thread = call, 0, Future(), ThreadPoolExecutor(1)
        self.source = weight_source(named_tensors, dtype)
        self.sizes = [tensor.numel() * dtype.itemsize for tensor in named_tensors().values()]
        pack_bytes = max(*self.sizes, min(PACK_BYTES, sum(self.sizes)))
        # vLLM takes the next tensor once two packs are through, and a pack has one tensor more than fits.
        on_the_wire = min(2 * (pack_bytes + max(self.sizes)), sum(self.sizes))
        self.seconds_allowed = STUCK_SECONDS + on_the_wire / SLOWEST_BYTES_PER_SECOND
        init_info = transfer_init_info(backend, address, world_size, pack_bytes)
        self.transfer = self._watched(
            lambda: WeightTransferTrainerFactory.trainer_init(init_info, client=self, source=self.source),
            CONNECT_SECONDS,
        )
        if backend == "nccl":
            refuse_disabled(self.transfer.model_update_group)

    def send_weights(self) -> SyncReport:
        """Start, update, finish, all by vLLM."""
        started = time.perf_counter()
        self.version += 1
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # vLLM packs in streams of its own, which do not wait for the optimizer
        self._watched(self.transfer.send_weights, self.seconds_allowed)
        return SyncReport(
            self.version, len(self.sizes), sum(self.sizes), time.perf_counter() - started, "reload: it is vLLM's"
        )

    def _watched(self, step: Callable, seconds: float):
        """The result of a step that may wait for ever, unless the engine fails or nothing moves for some seconds."""
        self.source.taken = time.monotonic()
        running = self.thread.submit(step)
        while not wait([running, self.failed], timeout=1, return_when=FIRST_COMPLETED).done:
            if time.monotonic() - self.source.taken > seconds:
                raise WeightSyncError(
                    f"the weight transfer is stuck: nothing has moved for {seconds:.3g} s; what the engine's processes"
                    " said is in run.log"
                )
        if running.done() and running.exception():
            wait([self.failed], timeout=5)  # the engine's error explains this one, and may come a moment later
        return (self.failed if self.failed.done() else running).result()

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
            died = any(said in f"{type(error).__name__}: {error}" for said in ENGINE_DIED)
            cause = getattr(error, "cause", None) or error  # what an actor raised is in Ray's own error
            reason = "died: one of vLLM's processes ended" if died else f"failed, with a traceback in run.log: {cause}"
            if not self.failed.done():  # the first error explains those that follow
                self.failed.set_exception(WeightSyncError(f"the engine {reason}"))
            raise


def worker_error(log: str) -> str | None:
    """The exception, without its traceback, of the first worker that failed in this log of vLLM's processes.

    vLLM waits for its workers in the order of their ranks. While the first ones wait for the rest of a broadcast, a
    later one's exception reaches the log and nothing else.
    """
    lines = re.sub(r"\x1b\[\d*m", "", log).splitlines()
    failed = next((line for line in lines if line.endswith(WORKER_FAILED)), None)
    if failed is None:
        return None
    begin = failed.removesuffix(WORKER_FAILED)  # process, time and place, with which all lines of the message begin
    said = [line.removeprefix(begin) for line in lines if line.startswith(begin)]
    return [line for line in said if re.match(r"(?!Traceback)\S", line)][-1]


def check_native_api() -> None:
    """Raise a WeightSyncError if this vLLM lacks a part of what rlhf_nccl.py and this module use of its API."""
    with known_api():
        from vllm import LLM
        from vllm.distributed import weight_transfer
        from vllm.distributed.weight_transfer import packed_tensor
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
        from vllm.model_executor.model_loader import reload

        for owner, name, arguments in [
            (LLM, "init_weight_transfer_engine", 2),
            (LLM, "start_weight_update", 1),
            (LLM, "update_weights", 2),
            (LLM, "finish_weight_update", 2),
            (LLM, "get_weight_version", 1),
            (LLM, "sleep", 2),
            (LLM, "wake_up", 2),
            (weight_transfer.WeightTransferEngineFactory, "register_engine", 2),
            (weight_transfer.WeightTransferTrainerFactory, "register_engine", 2),
            (weight_transfer, "ParamMeta", 3),
            (packed_tensor, "pack_tensors", 3),
            (packed_tensor, "unpack_tensor", 5),
            (reload, "initialize_layerwise_reload", 1),
            (reload, "finalize_layerwise_reload", 2),
        ]:
            inspect.signature(getattr(owner, name)).bind(*range(arguments))
        trainer_init = weight_transfer.WeightTransferTrainerFactory.trainer_init
        inspect.signature(trainer_init).bind(None, client=None, source=weight_transfer.WeightSource)
        inspect.signature(EngineArgs).bind(weight_transfer_config=None)
        if "fp8_per_tensor" not in QUANTIZATION_METHODS:
            raise AttributeError("it has no quantization 'fp8_per_tensor'")


def weight_source(named_tensors: Callable[[], dict[str, torch.Tensor]], dtype: torch.dtype):
    """Tensors named as in the checkpoint, as vLLM's trainer side takes them: each cast on its way."""
    with known_api():
        from vllm.distributed.weight_transfer import ParamMeta, WeightSource

        class NamedTensors(WeightSource):
            taken = 0.0  # when the last tensor was, on time.monotonic's clock

            def metadata(self) -> list[ParamMeta]:
                return [ParamMeta(name, dtype, tuple(tensor.shape)) for name, tensor in named_tensors().items()]

            if hasattr(WeightSource, "iter_full"):  # vLLM 0.33, which also wants this:
                metadata = functools.cached_property(metadata)

            def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
                for name, tensor in named_tensors().items():
                    self.taken = time.monotonic()
                    yield name, tensor.detach().to(dtype)

            __iter__ = iter_full  # vLLM 0.32

        return NamedTensors()


def transfer_init_info(backend: str, address: str, world_size: int, pack_bytes: int):
    """What vLLM's trainer side is told of a transport ("nccl", "ipc", "gloo"), and tells the workers.

    Tensors travel in packs; one that is larger than `pack_bytes` fails with "ipc". Raises WeightSyncError if this
    process's memory cannot be shared, for "ipc".
    """
    with known_api():
        from vllm.distributed.weight_transfer import WeightSource
        from vllm.utils.network_utils import get_open_port

        if backend == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            refuse_expandable_segments()
            return IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=pack_bytes)
        if backend == "gloo":
            InitInfo, more = register_gloo_trainer(), {}
        else:
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo as InitInfo

            # A worker of vLLM 0.32 loads a pack on its buffer's stream, without waiting for the other buffer's. Of a
            # layer that is in two packs it would read the first half while that may still be arriving.
            more = {} if hasattr(WeightSource, "iter_full") else {"packed_num_buffers": 1}
        port = get_open_port()
        return InitInfo(address, port, world_size, rank=0, packed_buffer_size_bytes=pack_bytes, **more)
