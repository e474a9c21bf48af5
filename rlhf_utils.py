"""The weight sync: a trainer's parameters into every worker of a running vLLM engine.

    trainer process                            each engine worker
    WeightSender.send_weights(params)   --->   WorkerExtension.receive_weights()             on other GPUs, or
                                               ColocateWorkerExtension.receive_weights(...)  on the trainer's own

Between GPUs, the trainer broadcasts the weights in buckets (NCCL; gloo between CPUs), several in flight. On one GPU,
both processes map the same memory (CUDA IPC): the trainer's parameters or, if the trainer is sharded, staging buffers
into which its ranks gather them. A small socket to each worker, the link, carries messages. If one side fails or dies,
the link ends the other side's wait. A sync goes like this:

1. Preflight, if names, dtypes, shapes or addresses have changed. Each worker runs vLLM's own weight loaders on tensors
   without storage and records what they would copy where. An unknown, missing or misshapen parameter is an error that
   names it, before a byte moves. The workers also report the dtype of each parameter. The trainer sends that dtype, so
   fp32 master weights travel as bf16 to a bf16 engine.
2. Each worker loads the buckets. *Reload* hands the tensors to vLLM's loader inside vLLM's reload bracket
   (`initialize_layerwise_reload` ... `finalize_layerwise_reload`). It works for every quantization and device, and for
   every model whose loaders vLLM's reload can see; for others, the sync fails and says so. *Replay* repeats a recorded
   reload as copies straight from the buckets, plus vLLM's own processing of quantized layers. The first sync reloads,
   then loads other weights and replays. If the replay gives every worker the same bits as the reload, later syncs
   replay.
3. Each worker keeps the weight version and a digest of its weights, and answers.

The caller pauses the engine and calls `reset_prefix_cache`: the cache holds keys and values of the old weights. If
either side fails, both raise the reason and the session is closed. The engine's weights are then undefined until a
later session completes a sync.

Code written for vLLM's examples runs unchanged. That covers one parameter at a time (`init_weight_update_group`,
`update_weight`), buckets over ZMQ and CUDA IPC (`update_weights_from_ipc`), handles by name
(`update_weights_from_ipc_handles`), and `check_weights_changed` after each of them.

To copy the sync into a project, take this file and `weight_sync/`. They import torch; vLLM is imported only by the
functions that use it.
"""

import torch

from weight_sync.buckets import staging_buffer_bytes, wire_of
from weight_sync.channels import BroadcastStaging, SharedMemoryChannel, SharedStaging, Staging, TrainerMemory
from weight_sync.groups import (
    broadcast,
    rebuild_ipc,
    share_tensor,
    stateless_init_process_group,
    synchronize,
    unpack_handle,
)
from weight_sync.link import CONNECT_SECONDS, Link, WeightSyncError, connect_group, connect_path, reason_of
from weight_sync.lora import LoRAWeight
from weight_sync.receiver import WeightReceiver
from weight_sync.sender import Comparison, SyncReport, WeightSender

__all__ = [
    "ColocateWorkerExtension",
    "Comparison",
    "LoRAWeight",
    "SharedMemoryChannel",
    "SyncReport",
    "WeightSender",
    "WeightSyncError",
    "WorkerExtension",
    "rebuild_ipc",
    "share_tensor",
    "stateless_init_process_group",
]


class WorkerExtension(WeightReceiver):
    """Methods for vLLM's workers, called by `collective_rpc`: `worker_extension_cls="rlhf_utils.WorkerExtension"`."""

    model_update_group = None

    def init_weight_update_group(self, master_address: str, master_port: int, rank_offset: int, world_size: int):
        """Join the group that the trainer opens as rank 0 with `stateless_init_process_group`.

        This worker's rank in the group is its rank in the engine plus `rank_offset` (1 with a single trainer).
        `world_size` counts the trainer and all workers of all engines. Raises WeightSyncError if the group cannot be
        joined. An exception here, or in `update_weight`, leaves vLLM's `collective_rpc` out of step with the workers'
        answers: restart the engine after one.
        """
        from vllm.distributed.parallel_state import get_world_group

        self.close_weight_update_group()
        rank = get_world_group().rank + rank_offset
        self.model_update_group = stateless_init_process_group(
            master_address, master_port, rank, world_size, self.device
        )

    def receive_weights(self, timeout: float = 3600.0) -> dict:
        """Take part in one `WeightSender.send_weights` that starts within `timeout` seconds.

        Returns {"version": n}, the version of the weights now served, or {"error": reason}. The side that failed gives
        the reason, and the trainer raises it as well.
        """

        def connect() -> Link:
            group = self._joined_group().group
            return connect_group(group, group.rank, timeout)

        answer = self._receive(timeout, connect)
        if "error" in answer:
            self.close_weight_update_group()
        return answer

    def update_weight(self, name: str, dtype_name: str, shape) -> None:
        """Receive and load one parameter, named as in the checkpoint, which the trainer broadcasts from rank 0.

        `dtype_name` is a name in torch, such as "bfloat16". Raises WeightSyncError for a parameter that does not fit.
        """
        weight = torch.empty(tuple(shape), dtype=getattr(torch, dtype_name), device=self.device)
        self._joined_group().broadcast(weight, src=0)
        self.load_parameter(name, weight)

    def load_parameter(self, name: str, tensor: torch.Tensor) -> None:
        """Load one whole tensor, named as in the checkpoint. After the last one, the next weight version is complete.

        Generate only between layers: one of which some parameters have come, such as q but not k, has no weights.
        Raises WeightSyncError for a tensor that does not fit, or that vLLM's loader leaves out.
        """
        self._engine_model().load_partial([(name, tensor)])

    def close_weight_update_group(self) -> None:
        """Leave the group and end the session."""
        self._close_link()
        if hasattr(self.model_update_group, "destroy"):
            self.model_update_group.destroy()  # a broadcast that will never end must not hold the GPU
        self.model_update_group = None

    def compare_weights(self) -> None:
        """Take part in one `WeightSender.compare_weights`. The trainer raises any error from here."""
        try:
            group, wire = self._joined_group(), wire_of(self.weight_buckets)

            def receive(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
                broadcast(group, tensor, [self.weight_link])
                return tensor

            self.weight_link.send(comparison=self._engine_model().compare(wire, receive))
        except Exception as error:
            self._close_link(reason_of(error))
            self.close_weight_update_group()

    def _joined_group(self):
        if self.model_update_group is None:
            raise WeightSyncError("no weight update group: init_weight_update_group was not called, or a sync failed")
        return self.model_update_group

    def _open_staging(self, link: Link, handshake: dict) -> Staging:
        return BroadcastStaging(self.model_update_group, self.weight_buckets, self.device)


class ColocateWorkerExtension(WeightReceiver):
    """Methods for workers that share their device with a trainer rank. The weights are mapped, not broadcast."""

    weight_path = ""

    def receive_weights(self, handles: dict[str, str], timeout: float = 3600.0) -> dict:
        """As `WorkerExtension.receive_weights`. `handles` merges `SharedMemoryChannel.handles` of all trainer ranks."""
        path = handles.get(self.report_device_id(), "")
        if path != self.weight_path:
            self._close_link()
            self.weight_path = path

        def connect() -> Link:
            if not path:
                raise WeightSyncError(f"no trainer rank is on {self.report_device_id()}: they are on {[*handles]}")
            return connect_path(path, self.rank, timeout)

        return self._receive(timeout, connect)

    def empty_cache(self) -> None:
        """Free the GPU memory that torch caches."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

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

        buffer, error, message = None, None, ()
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
                        weights = [(item["name"], _from_buffer(buffer, **item).clone()) for item in message]
                        self._engine_model().load_partial(weights)
                    synchronize(self.device)  # after the answer, the trainer overwrites the buffer
                except zmq.Again as silence:
                    raise error or WeightSyncError(f"the trainer sent nothing for {timeout:.3g} s") from silence
                except Exception as failure:
                    error = error or failure
                    # A trainer that ignores the answers goes on to the end. Another may stop: wait less for it.
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
        weights, nbytes = [], 0
        for name, handle in ipc_handles[self.report_device_id()].items():
            shared = rebuild_ipc(handle, self.device.index)
            if weights and nbytes + shared.nbytes > staging_buffer_bytes():
                self._engine_model().load_partial(weights)
                weights, nbytes = [], 0
            weights.append((name, shared.clone()))
            nbytes += shared.nbytes
        self._engine_model().load_partial(weights)
        synchronize(self.device)

    def _open_staging(self, link: Link, handshake: dict) -> Staging:
        def map_handles(texts: list[str]) -> list[torch.Tensor]:
            return [rebuild_ipc(unpack_handle(text), self.device.index) for text in texts]

        if "memory" in handshake:
            names = [name for name, *_ in handshake["wire"]]
            return TrainerMemory(dict(zip(names, map_handles(handshake["memory"]), strict=True)))
        return SharedStaging(
            link, map_handles(handshake["buffers"]), self.weight_buckets, sends="emptied", awaits="filled"
        )


def _from_buffer(buffer: torch.Tensor, name: str, shape, dtype: torch.dtype, offset: int, **_) -> torch.Tensor:
    """The tensor that lies at byte `offset` of a uint8 buffer."""
    nbytes = dtype.itemsize * torch.Size(shape).numel()
    return buffer[offset : offset + nbytes].view(dtype).view(torch.Size(shape))
