"""Channels connect a trainer rank with the workers: over a group, or through memory of the node that they share."""

import json
import os
import shutil
import socket
import tempfile
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

import torch

from .groups import device_id_of, refuse_expandable_segments
from .link import CONNECT_SECONDS, Link, WeightSyncError, address_family, address_towards
from .ranks import Ranks

HELLO_SECONDS = 5.0  # limit for the first message of a new connection
HELLO_BYTES = 1 << 12  # largest first message
FOLDER_CHARS = 80  # of the folder for temporary files; the path of a socket in it has at most 107
LINK_KEY = "rlhf_utils/link"  # with "/" and a trainer rank, the key in a group's store of where that rank listens


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
        workers, hint = self.communicator.world_size - ranks.size, "is receive_weights running on every worker?"
        host, token = address_towards(store.host) if rank else store.host, os.urandom(16).hex()
        with socket.create_server((host, 0), family=address_family(host), backlog=workers) as server:
            self._announce({"host": host, "port": server.getsockname()[1], "token": token, "ranks": ranks.size})
            accept(server, workers, token, links, "engine workers", hint, ranks.role)

    def close(self, error: str | None) -> None:
        if error:
            with suppress(RuntimeError):  # rank 0, which keeps the store, may be gone
                self._announce({"error": error})  # to a worker without a link
        if hasattr(self.communicator, "destroy"):
            self.communicator.destroy()  # neither memory nor a transfer that will never end must hold the GPU

    def _announce(self, message: dict) -> None:
        self.communicator.group.store.set(f"{LINK_KEY}/{self.communicator.rank}", json.dumps(message))


class SharedMemoryChannel:
    """A channel from a trainer rank to the engine worker on the same device, and to those beside the other ranks, which
    must be on the same node: CUDA IPC, or shared memory on CPU.

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
        parent = "/tmp" if len(tempfile.gettempdir()) > FOLDER_CHARS else None
        self.folder = tempfile.mkdtemp(prefix="weight-sync-", dir=parent)  # mode 0700: no other user reaches the socket
        self.remove_folder = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(f"{self.folder}/link")
        self.server.listen()
        self.handles = {device_id_of(device): f"{self.folder}/link"}

    def accept(self, links: list[Link], ranks: Ranks) -> None:
        """Append a link to each worker beside this rank or another one. Raises WeightSyncError if one does not connect,
        or if the ranks are on several nodes."""
        texts = ranks.texts(json.dumps([socket.gethostname(), f"{self.folder}/link"]), self.device.type)
        hosts, paths = zip(*map(json.loads, texts), strict=True)
        for rank, host in enumerate(hosts):
            if host != socket.gethostname():
                raise WeightSyncError(
                    f"{ranks.role} is on the node {socket.gethostname()}, and trainer rank {rank} on {host}: ranks that"
                    " share GPUs with engines must be on one node, or with HSDP those of each replica"
                )
        names = f"engine workers on {device_id_of(self.device)}" + " and beside other ranks" * (ranks.size > 1)
        hint = "is receive_weights running there, with this rank's handle?"
        accept(self.server, self.workers * ranks.size, self.folder, links, names, hint, ranks.role, paths=paths)
        self.close()  # each worker connects once

    def close(self, error: str | None = None) -> None:
        """Stop listening."""
        self.server.close()
        self.remove_folder()


def accept(
    server: socket.socket, count: int, token: str, links: list[Link], peers: str, hint: str, role: str, **hello
) -> None:
    """Append a link to each of `count` peers that connect and know the token. They learn this side's `role`, and
    `hello`.

    Raises WeightSyncError if they have not all connected within CONNECT_SECONDS. It calls them `peers` and adds a hint.
    """
    deadline = time.monotonic() + CONNECT_SECONDS
    while len(links) < count:
        server.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            link = Link(server.accept()[0])
        except TimeoutError as error:
            raise WeightSyncError(
                f"{count - len(links)} of {count} {peers} did not connect within {CONNECT_SECONDS:.3g} s: {hint}"
            ) from error
        try:
            link.recv_hello(token, HELLO_SECONDS, HELLO_BYTES)
            link.send_hello(role, token, **hello)
            links.append(link)
        except WeightSyncError:
            link.close()  # a stranger, or a peer whose own limit has passed: keep listening


def connect_group(group, links: list[Link], role_beside: Callable[[int], str], timeout: float) -> None:
    """Append a link from a worker to each trainer rank. Rank 0 must start to listen within `timeout` seconds.

    `role_beside(ranks)` is what errors call the worker of a trainer with so many ranks.
    """
    first = _endpoint(group, 0, timeout)
    for rank in range(first["ranks"]):
        endpoint = _endpoint(group, rank, CONNECT_SECONDS) if rank else first
        host = endpoint["host"] if rank else group.store.host  # by which this node may know rank 0 alone
        _connect(links, (host, endpoint["port"]), role_beside(first["ranks"]), endpoint["token"], CONNECT_SECONDS)


def _endpoint(group, rank: int, timeout: float) -> dict:
    """Where a trainer rank listens. Raises WeightSyncError if it has failed, or says nothing for so long."""
    deadline, key = time.monotonic() + timeout, f"{LINK_KEY}/{rank}"
    try:
        while not group.store.check([key]):
            if time.monotonic() > deadline:
                raise WeightSyncError(f"no trainer called send_weights within {timeout:.5g} s")
            time.sleep(0.01)
        endpoint = json.loads(group.store.get(key))
    except WeightSyncError:
        raise
    except RuntimeError as error:  # of TCPStore
        raise WeightSyncError(f"the trainer is gone: {error}") from error
    if "error" in endpoint:
        raise WeightSyncError(f"the trainer failed: {endpoint['error']}")
    return endpoint


def connect_paths(path: str, links: list[Link], rank: int, timeout: float) -> None:
    """The worker's side of `SharedMemoryChannel.accept`: append a link to the trainer rank at this socket, which must
    accept within `timeout` seconds, and to the others that it names, in their order."""
    role = f"engine worker {rank}"
    paths = _connect(links, path, role, os.path.dirname(path), timeout)["paths"]
    for other in paths:
        if other != path:
            _connect(links, other, role, os.path.dirname(other), CONNECT_SECONDS)
    links.insert(paths.index(path), links.pop(0))


def _connect(links: list[Link], address: tuple[str, int] | str, role: str, token: str, timeout: float) -> dict:
    """Append a link to whoever listens at this host and port, or socket. Returns the other side's hello."""
    family = socket.AF_UNIX if isinstance(address, str) else address_family(address[0])
    sock = socket.socket(family)
    sock.settimeout(timeout)
    try:
        sock.connect(address)
    except OSError as error:
        raise WeightSyncError(f"the trainer is gone or on another node, or its channel was used: {error}") from error
    links.append(Link(sock))
    links[-1].send_hello(role, token)
    return links[-1].recv_hello(token, timeout)
