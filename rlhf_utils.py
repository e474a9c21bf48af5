"""The weight sync: a trainer's parameters into every worker of a running vLLM engine.

    trainer process                            each engine worker
    WeightSender.send_weights(params)   --->   WorkerExtension.receive_weights()             on other GPUs, or
                                               ColocateWorkerExtension.receive_weights(...)  on the trainer's own

Each rank of a sharded trainer (FSDP2) sends its own rows: nothing is gathered. On separate GPUs, the bytes travel in
buckets (NCCL; gloo between CPUs), several in flight, and each worker gets only what it needs from each rank. On shared
GPUs, which are all on one node, a worker maps the memory of all ranks (CUDA IPC) and reads what it needs: the trainer's
parameters, or of fp32 weights that several ranks hold, copies in bf16. Sockets from every rank to every worker, the
links, carry messages. If one side fails or dies, its link ends the others' wait. A sync has three phases:

1. Preflight, if names, dtypes, shapes or addresses have changed. Each worker runs vLLM's own weight loaders on tensors
   without storage and records what they would copy where. An unknown, missing or misshapen parameter is an error that
   names it, before a byte moves. The workers also report each parameter's dtype. The trainer casts to it, so fp32
   master weights travel as bf16 to a bf16 engine.
2. Each worker loads what arrives: in the first sync, all that any rank has. *Reload* hands the tensors to vLLM's loader
   inside vLLM's reload bracket (`initialize_layerwise_reload` ... `finalize_layerwise_reload`). It works for every
   quantization and device, and for every model whose loaders vLLM's reload can see; for others, the sync fails and says
   so. *Replay* repeats a recorded reload as copies straight from the buckets, plus vLLM's own processing of quantized
   layers. The first sync reloads, then loads other weights and replays. If the replay gives every worker the same bits
   as the reload, later syncs replay, and only what these copies read is sent.
3. Both ends digest every bucket: each rank what it packs for a worker, the worker what has arrived. If the digests are
   equal, the worker keeps the weight version and a digest of its weights, and answers. Where workers read the trainer's
   own memory, every reload is compared in this way, and of every 64th replay, what the worker serves with what the rank
   has.

The caller pauses the engine and resets its caches (`reset_prefix_cache`; of a multimodal model, `reset_encoder_cache`
too), since they hold what the old weights computed.
If either side fails, the trainer raises the reason, the workers return it, and the session is closed. The engine's
weights are then undefined until a later session completes a sync.

Code written for vLLM's examples runs unchanged. That covers one parameter at a time (`init_weight_update_group`,
`update_weight`), buckets over ZMQ and CUDA IPC (`update_weights_from_ipc`), handles by name
(`update_weights_from_ipc_handles`), and `check_weights_changed` after each of them. A worker keeps the weights that
arrive until it has all that the engine needs, and then loads all: this takes the memory of one more copy of them.

Where trainer and engine are Ray actors, `wait_for` and `end_with_children` end a run at the first death.

To copy the sync into a project, take this file and `weight_sync/`. They import torch; vLLM is imported only by the
functions that use it. With another version than 0.32 and 0.33, an engine's first worker logs a warning.
"""

import multiprocessing.connection
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from weight_sync.channels import SharedMemoryChannel, connect_group, connect_paths
from weight_sync.example_protocols import BroadcastProtocol, SharedMemoryProtocols
from weight_sync.groups import Wire, rebuild_ipc, share_tensor, stateless_init_process_group
from weight_sync.link import Link, WeightSyncError
from weight_sync.lora import LoRAWeight
from weight_sync.sender import SyncReport, WeightSender
from weight_sync.staging import Staging, TrainerMemory, WiredStaging

__all__ = [
    "ColocateWorkerExtension",
    "LoRAWeight",
    "SharedMemoryChannel",
    "SyncReport",
    "WeightSender",
    "WeightSyncError",
    "WorkerExtension",
    "end_with_children",
    "rebuild_ipc",
    "share_tensor",
    "stateless_init_process_group",
    "wait_for",
]


class WorkerExtension(BroadcastProtocol):
    """Methods for vLLM's workers, called by `collective_rpc`: `worker_extension_cls="rlhf_utils.WorkerExtension"`."""

    model_update_group = None

    def init_weight_update_group(self, master_address: str, master_port: int, rank_offset: int, world_size: int):
        """Join the group that the trainer opens as rank 0 with `stateless_init_process_group`.

        This worker's rank in the group is its rank in the engine plus `rank_offset`, the number of the trainer's ranks
        and of the workers of earlier engines. `world_size` counts all ranks and all workers of all engines. Raises
        WeightSyncError if the group cannot be joined. An exception here, or in `update_weight`, leaves vLLM's
        `collective_rpc` out of step with the workers' answers: restart the engine after one.
        """
        from vllm.distributed.parallel_state import get_world_group

        self.close_weight_update_group()
        rank = get_world_group().rank + rank_offset
        self.weight_place = {"size": get_world_group().world_size, "rank": rank}
        self.model_update_group = stateless_init_process_group(
            master_address, master_port, rank, world_size, self.device
        )

    def receive_weights(self, timeout: float = 3600.0) -> dict:
        """Take part in one `WeightSender.send_weights` that starts within `timeout` seconds.

        Returns {"version": n}, the version of the weights now served, or {"error": reason}. The side that failed gives
        the reason, and the trainer raises it as well.
        """

        def role_beside(ranks: int) -> str:
            size, number = self.weight_place["size"], self.weight_place["rank"] - ranks
            several_engines = self.model_update_group.world_size > ranks + size  # each as large as this one
            engine = f"engine {number // size}'s" if several_engines else "engine"
            return f"{engine} worker {number % size}"

        return self._receive(
            timeout, lambda links: connect_group(self._joined_group().group, links, role_beside, timeout)
        )

    def close_weight_update_group(self) -> None:
        """Leave the group and end the session."""
        self._close_links()

    def _close_links(self, error: str | None = None) -> None:
        super()._close_links(error)
        if hasattr(self.model_update_group, "destroy"):
            self.model_update_group.destroy()  # a transfer that will never end must not hold the GPU
        self.model_update_group = None

    def _joined_group(self):
        if self.model_update_group is None:
            raise WeightSyncError("no weight update group: init_weight_update_group was not called, or a sync failed")
        return self.model_update_group

    def _open_staging(self) -> Staging:
        self.weight_wire = Wire(self.model_update_group, self.device)
        bucket_bytes, ranks = self.weight_handshakes[0]["bucket_bytes"], len(self.weight_links)
        return WiredStaging.broadcast(self.weight_buckets, bucket_bytes, ranks, self.weight_wire)


class ColocateWorkerExtension(SharedMemoryProtocols):
    """Methods for workers that share their device with a trainer rank. The weights are mapped, not broadcast."""

    weight_path = ""

    def receive_weights(self, handles: dict[str, str], timeout: float = 3600.0) -> dict:
        """As `WorkerExtension.receive_weights`. `handles` has `SharedMemoryChannel.handles` of the trainer rank on this
        device; those of others beside it do no harm."""
        path = handles.get(self.report_device_id(), "")
        if path != self.weight_path:
            self._close_links()
            self.weight_path = path

        def connect(links: list[Link]) -> None:
            if not path:
                raise WeightSyncError(f"no trainer rank is on {self.report_device_id()}: they are on {[*handles]}")
            connect_paths(path, links, self.rank, timeout)

        return self._receive(timeout, connect)

    def empty_cache(self) -> None:
        """Free the GPU memory that torch caches."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _open_staging(self) -> Staging:
        handles = [handshake["handle"] for handshake in self.weight_handshakes]
        return TrainerMemory.mapped(self.weight_buckets, handles, self.device.index)


def wait_for(actors: list, *calls, timeout: float = 3600.0) -> list:
    """The results of these calls of Ray actors.

    Raises RuntimeError with a reason of one line if a call fails or one of `actors` dies, even one that is not called,
    and TimeoutError after `timeout` seconds.
    """
    import ray

    deadline = time.monotonic() + timeout
    try:
        while time.monotonic() < deadline:
            done, running = ray.wait([*calls], num_returns=len(calls), timeout=1)
            if not running:
                return ray.get([*calls])
            pings = [actor.__ray_ready__.remote() for actor in actors]  # a busy actor answers later
            ray.get(done + ray.wait(pings, num_returns=len(pings), timeout=0.1)[0])
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", error)  # what an actor raised
        reason = " ".join(str(cause).split())
        if reason[150:-350]:  # such as a traceback, which Ray gives of what it cannot pickle: the end says why
            reason = f"{reason[:150]} ... {reason[-350:]}"
        calls_of_actors = re.findall(r"ray::(\w+\.\w+)\(\)", str(error))  # the last one is where it was raised
        where = f" in {calls_of_actors[-1]}" if calls_of_actors else ""
        raise RuntimeError(f"{type(cause).__name__}{where}: {reason}") from error
    raise TimeoutError(f"not done within {timeout:g} s")


def end_with_children(unless: Callable[[], bool] = lambda: False) -> None:
    """End this process with the first of the child processes that it has now, unless `unless()` is true by then. If
    this process ends first, even by SIGKILL, they and the children that they have now end within three seconds.

    vLLM waits forever for an engine core that was killed. If an actor is gone, every wait for it ends. A core may
    outlive its actor, and a worker in an all-reduce its core: on a GPU, both would keep their memory.
    """
    import psutil

    if not (children := multiprocessing.active_children()):
        return
    parents = [psutil.Process(child.pid) for child in children]
    pids = [own.pid for parent in parents for own in [parent, *parent.children(recursive=True)]]
    # To each that is still the process that it was: days later, its number may be another's. By commands of the shell's
    # own: at a limit of processes it could start no others.
    send = "; ".join(
        f"read -r stat </proc/{pid}/stat && case $stat in *' {_started(pid)} '*) kill $1 {pid};; esac" for pid in pids
    )
    reader, _ = os.pipe()  # its other end closes when this process ends
    # By way of 3: what runs in the background has no standard input.
    watch = f"exec 3<&0; send() {{ {send}; }}; {{ read line; send -TERM; sleep 2; send -KILL; }} <&3 >/dev/null 2>&1 &"
    # An orphan in a session of its own, without the variable that Ray's children have: else it is ended with them.
    env = os.environ | {"RAY_RAYLET_PID": ""}
    subprocess.run(["sh", "-c", watch], check=True, stdin=reader, start_new_session=True, env=env)
    os.close(reader)

    def end() -> None:
        if multiprocessing.connection.wait([child.sentinel for child in children]):
            time.sleep(1)  # vLLM may be about to raise an error that says more
            if not unless():
                os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def _started(pid: int) -> str:
    """When this process was started, in ticks since the host was (proc(5), starttime); "none" if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return "none"
