"""The protocols of vLLM's examples: one parameter at a time, buckets over ZMQ, handles by name.

A worker keeps the weights that arrive. Once it has all that the engine needs, it loads them in one reload. Until then
the engine serves its old weights, and the new ones take the memory of one more copy of what the worker was sent.
"""

from collections.abc import Callable

import torch

from .buckets import dtype_name
from .engine_model import EngineModel
from .groups import rebuild_ipc, synchronize
from .link import CONNECT_SECONDS, Link, WeightSyncError, reason_of
from .receiver import WeightReceiver
from .trace import Write


class CollectedWeights:
    """The tensors that have arrived so far. One that arrives again replaces the first."""

    def __init__(self, model: EngineModel):
        self.model, self.weights = model, {}
        self.traced: dict[str, list[Write]] = {}  # what loading each of them writes

    def add(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Keep these tensors. Raises WeightSyncError for one that the engine cannot load."""
        traced, problems = self.model.trace([(name, dtype_name(w.dtype), tuple(w.shape)) for name, w in weights])
        if problems:
            raise WeightSyncError(problems[0])
        for name, weight in weights:
            if traced[name]:  # else the weight is not for this worker
                self.traced[name], self.weights[name], self.model.digest = traced[name], weight, None

    def load_if_complete(self) -> None:
        """Load the weights if none is missing. Raises WeightSyncError if vLLM's loader leaves something out."""
        expected = self.model.expected_writes(self.traced)
        if self.weights and not self.model.missing(expected):
            weights = list(self.weights.items())
            self.weights, self.traced = {}, {}
            self.model.reload([weights], expected)
            self.model.mark_complete(self.model.version + 1, self.model.weights_digest())


class CollectingReceiver(WeightReceiver):
    """Keeps weights until they are complete. A sync of a `WeightSender`, or the end of a session, drops them."""

    collected_weights: CollectedWeights | None = None

    def load_parameter(self, name: str, tensor: torch.Tensor) -> None:
        """Take one whole tensor, named as in the checkpoint. The last one completes the next weight version.

        Keeps the tensor itself until then: do not overwrite it. Raises WeightSyncError for a tensor that does not fit,
        and with the last one if vLLM's loader leaves something out.
        """
        collected = self._collection()
        collected.add([(name, tensor)])
        collected.load_if_complete()

    def _collection(self) -> CollectedWeights:
        if self.collected_weights is None:
            self.collected_weights = CollectedWeights(self._engine_model())
        return self.collected_weights

    def _run_sync(self, timeout: float, connect: Callable[[], Link]) -> int:
        self.collected_weights = None
        return super()._run_sync(timeout, connect)

    def _close_link(self, error: str | None = None) -> None:
        super()._close_link(error)
        self.collected_weights = None


class BroadcastProtocol(CollectingReceiver):
    """The protocol of vLLM's example for engines on GPUs of their own."""

    def update_weight(self, name: str, dtype_name: str, shape) -> None:
        """Receive one parameter, named as in the checkpoint, which the trainer broadcasts from rank 0.

        `dtype_name` is a name in torch, such as "bfloat16". The engine serves the parameters when all are here. Raises
        WeightSyncError for a parameter that does not fit, and with the last one if vLLM's loader leaves something out.
        """
        weight = torch.empty(tuple(shape), dtype=getattr(torch, dtype_name), device=self.device)
        self._joined_group().broadcast(weight, src=0)
        self.load_parameter(name, weight)


class SharedMemoryProtocols(CollectingReceiver):
    """The protocols of vLLM's examples for engines on the trainer's GPUs."""

    def update_weights_from_ipc(self, zmq_handles: dict[str, str], timeout: float = 600.0) -> None:
        """Load weights from a buffer that the trainer shares, by the protocol of vLLM's colocation example.

        `zmq_handles` maps a device id to the address of the trainer's REQ socket. The trainer sends a handle of a uint8
        buffer (from `reduce_tensor` or `share_tensor`). Each time it has filled the buffer, it sends a list that
        describes the tensors in it: name, shape, dtype, and offset in bytes. At the end it sends None. This method
        answers each message with b"", or after an error with its traceback, and raises the error at the end. Messages
        are pickles, so the address must be private. Raises WeightSyncError if the trainer is silent for `timeout`
        seconds.
        """
        import zmq

        collected, buffer, error, message = self._collection(), None, None, ()
        with zmq.Context() as context, context.socket(zmq.REP) as socket_:
            socket_.setsockopt(zmq.RCVTIMEO, int(timeout * 1000))
            socket_.setsockopt(zmq.LINGER, 1000)
            socket_.connect(zmq_handles[self.report_device_id()])
            while message is not None:
                try:
                    message = socket_.recv_pyobj()
                    if isinstance(message, tuple):
                        buffer = rebuild_ipc(message, self.device.index)
                    elif message and not error:
                        collected.add([(item["name"], _from_buffer(buffer, **item).clone()) for item in message])
                    elif message is None and not error:
                        collected.load_if_complete()
                    synchronize(self.device)  # after the answer, the trainer overwrites the buffer
                except zmq.Again as silence:
                    raise error or WeightSyncError(f"the trainer sent nothing for {timeout:.3g} s") from silence
                except Exception as failure:
                    error = error or failure
                    # A trainer that ignores the answers goes on to the end. Another one may stop: wait less for it.
                    socket_.setsockopt(zmq.RCVTIMEO, int(min(timeout, CONNECT_SECONDS) * 1000))
                if message is None:
                    buffer = None
                socket_.send(reason_of(error).encode() if error else b"")
        if error:
            raise error

    def update_weights_from_ipc_handles(self, ipc_handles: dict[str, dict[str, tuple]]) -> None:
        """Load weights from the trainer's memory on this device.

        `ipc_handles` maps device ids to {parameter name: handle}, with handles from `reduce_tensor` or `share_tensor`.
        vLLM passes such arguments to its workers only with VLLM_ALLOW_INSECURE_SERIALIZATION=1.
        """
        handles, collected = ipc_handles[self.report_device_id()], self._collection()
        collected.add([(name, rebuild_ipc(handle, self.device.index).clone()) for name, handle in handles.items()])
        collected.load_if_complete()
        synchronize(self.device)


def _from_buffer(buffer: torch.Tensor, name: str, shape, dtype: torch.dtype, offset: int, **_) -> torch.Tensor:
    """The tensor that lies at byte `offset` of a uint8 buffer."""
    nbytes = dtype.itemsize * torch.Size(shape).numel()
    return buffer[offset : offset + nbytes].view(dtype).view(torch.Size(shape))
