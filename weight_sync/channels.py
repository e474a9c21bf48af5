"""Channels connect a trainer rank with the workers: over a group, or through memory of the node that they share."""

import json
import shutil
import socket
import tempfile
import weakref

import torch

from .groups import device_id_of, refuse_expandable_segments
from .link import LINK_KEY, Link, WeightSyncError, accept, address_towards, listen
from .ranks import Ranks


class GroupChannel:
    """A channel to all workers of a communicator's group, whose first ranks are the trainer's."""

    def __init__(self, communicator):
        self.communicator = communicator

    def accept(self, links: list[Link], ranks: Ranks) -> None:
        """Append a link to each worker. Raises WeightSyncError if one does not connect, or for a wrong group."""
        rank, store = self.communicator.rank, self.communicator.group.store
        if rank != ranks.rank:
            raise WeightSyncError(
                f"trainer rank {ranks.rank} of {ranks.size} is rank {rank} of the group: each joins it with its own"
            )

        def announce(endpoint: dict) -> None:
            self._announce(endpoint | {"ranks": ranks.size})

        workers, hint = self.communicator.world_size - ranks.size, "is receive_weights running on every worker?"
        host = address_towards(store.host) if rank else store.host
        listen(host, workers, announce, links, "engine workers", hint, ranks.role)

    def close(self, error: str | None) -> None:
        if error:
            self._announce({"error": error})  # to a worker without a link
        if hasattr(self.communicator, "destroy"):
            self.communicator.destroy()  # neither memory nor a transfer that will never end must hold the GPU

    def _announce(self, message: dict) -> None:
        self.communicator.group.store.set(f"{LINK_KEY}/{self.communicator.rank}", json.dumps(message))


class SharedMemoryChannel:
    """A channel from a trainer rank to the engine worker on the same device, and to those beside the other ranks on the
    same node: CUDA IPC, or shared memory on CPU.

    If several engines share the device, `workers` says how many of their workers do. `handles` maps the device's id to
    this rank's socket, for `ColocateWorkerExtension.receive_weights`. On CPU all processes share one device, so the
    index of `device` names the worker: its rank in the engine. Raises WeightSyncError if torch allocates GPU memory
    that CUDA IPC cannot share.
    """

    def __init__(self, device: torch.device | str, workers: int = 1):
        device = torch.device(device)
        if device.type == "cuda":
            refuse_expandable_segments()
        self.device, self.workers = device, workers
        self.folder = tempfile.mkdtemp(prefix="weight-sync-")  # mode 0700: no other user reaches the socket
        self.remove_folder = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(f"{self.folder}/link")
        self.server.listen()
        self.handles = {device_id_of(device): f"{self.folder}/link"}

    def accept(self, links: list[Link], ranks: Ranks) -> None:
        """Append a link to each worker beside this rank, or beside another one on this node."""
        texts = ranks.texts(json.dumps([socket.gethostname(), f"{self.folder}/link"]), self.device.type)
        hosts, paths = zip(*map(json.loads, texts), strict=True)
        beside = [rank for rank, host in enumerate(hosts) if host == socket.gethostname()]
        # The rank on this node that holds what each rank has: itself, or for another node's a copy.
        self.holders = [rank if rank in beside else beside[rank % len(beside)] for rank in range(ranks.size)]
        names = f"engine workers on {device_id_of(self.device)}" + " and beside other ranks" * (len(beside) > 1)
        hint = "is receive_weights running there, with this rank's handle?"
        count, peers = self.workers * len(beside), [paths[rank] for rank in beside]
        accept(self.server, count, self.folder, links, names, hint, ranks.role, paths=peers)
        self._stop_listening()

    def close(self, error: str | None) -> None:
        self._stop_listening()

    def _stop_listening(self) -> None:
        self.server.close()
        self.remove_folder()
