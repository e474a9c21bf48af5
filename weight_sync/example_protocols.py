"""The protocols of vLLM's examples: one parameter at a time, buckets over ZMQ, handles by name.

A worker keeps the weights that arrive. Once it has all that the engine needs, it loads them in one reload. Until then
the engine serves its old weights, and the new ones take the memory of one more copy of what the worker was sent.
"""

import torch

from .groups import rebuild_ipc, synchronize
from .link import CONNECT_SECONDS, WeightSyncError, reason_of
from .receiver import WeightReceiver


class BroadcastProtocol(WeightReceiver):
    """The protocol of vLLM's example for engines on GPUs of their own."""

    def update_weight(self, name: str, dtype_name: str, shape) -> None:
        """Receive one parameter, named as in the checkpoint, which the trainer broadcasts from rank 0.

        `dtype_name` is a name in torch, such as "bfloat16". The engine serves the parameters when all are here. Raises
        WeightSyncError for a parameter that does not fit, and with the last one if vLLM's loader leaves something out.
        """
        weight = torch.empty(tuple(shape), dtype=getattr(torch, dtype_name), device=self.device)
        self._joined_group().broadcast(weight, src=0)
        self.load_parameter(name, weight)


class SharedMemoryProtocols(WeightReceiver):
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

        model, buffer, error, message = self.weight_model, None, None, ()
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
                        model.collect([(item["name"], _from_buffer(buffer, **item).clone()) for item in message])
                    elif message is None and not error:
                        model.load_if_complete()
                    synchronize(self.device)  # after the answer, the trainer overwrites the buffer
                except zmq.Again as silence:
                    raise error or WeightSyncError(f"the trainer sent nothing for {timeout:.5g} s") from silence
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
        handles, model = ipc_handles[self.report_device_id()], self.weight_model
        model.collect([(name, rebuild_ipc(handle, self.device.index).clone()) for name, handle in handles.items()])
        model.load_if_complete()
        synchronize(self.device)


def _from_buffer(buffer: torch.Tensor, name: str, shape, dtype: torch.dtype, offset: int, **_) -> torch.Tensor:
    """The tensor that lies at byte `offset` of a uint8 buffer."""
    nbytes = dtype.itemsize * torch.Size(shape).numel()
    return buffer[offset : offset + nbytes].view(dtype).view(torch.Size(shape))
