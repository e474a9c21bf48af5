"""The link: a socket between the trainer and one engine worker. It carries messages; the weights travel elsewhere.

A link breaks as soon as a process dies, so neither side waits for a dead peer.
"""

import errno
import json
import os
import socket
import struct
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait

CONNECT_SECONDS = 60.0  # limit for the peer to start its half of a rendezvous
ANSWER_SECONDS = 600.0  # limit for an answer outside a transfer, which has `seconds_allowed`
SILENT_SECONDS = 15  # a peer that acknowledges nothing for this long is gone (dead node, cut network)
BUSY_POLL_SECONDS = 0.02  # poll this long for a message that is due: sleeping and waking up would add 0.1 to 0.3 ms
UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)  # the errors of a socket whose peer is gone


class WeightSyncError(RuntimeError):
    """A weight sync failed. The message is the reason that the failing side gave."""


def reason_of(error: BaseException, links: Sequence["Link"] = ()) -> str:
    """The text for the other side: the message of a WeightSyncError, the traceback of any other error.

    If one of `links` says that its peer has failed, that is the reason of any other error: a trainer that ends a
    session frees the memory that its workers read.
    """
    if isinstance(error, WeightSyncError):
        return str(error)
    try:
        watch_all(links)
    except WeightSyncError as first:
        return str(first)
    return "".join(traceback.format_exception(error))


class Link:
    """A connection that carries JSON messages. Errors call the other end by the name in `peer`.

    It assumes a trusted network: neither messages nor weights are encrypted. The token keeps out processes that find
    the port by chance. It does not keep out anyone who reads the traffic, or the group's store, which holds the token.
    """

    def __init__(self, sock: socket.socket):
        sock.settimeout(None)
        limit = struct.pack("ll", int(CONNECT_SECONDS), 0)  # limit for the rest of a message that has begun
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A process that dies closes its socket. A node that vanishes does not, so TCP itself probes the peer.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_SECONDS * 1000)
        self.connection = Connection(sock.detach())
        self.peer = "the other side"
        self.pending: list[dict] = []  # messages that `watch` has read; `recv` returns them

    def send_hello(self, role: str, token: str, **more) -> None:
        """Introduce this side. The token shows that it belongs to the group."""
        self.send(peer=f"{role} (pid {os.getpid()} on {socket.gethostname()})", token=token, **more)

    def recv_hello(self, token: str, timeout: float, max_bytes: int | None = None) -> dict:
        """Learn the peer's name. Returns its hello. Raises WeightSyncError if it does not know the token."""
        hello = self.recv(timeout, max_bytes)
        if hello.get("token") != token:
            raise WeightSyncError("a stranger connected to the weight sync's port")
        self.peer = hello["peer"]
        return hello

    def send(self, **message) -> None:
        try:
            self.connection.send_bytes(json.dumps(message).encode())
        except OSError as error:
            self.watch()  # raises the peer's own reason, if it sent one
            raise self._gone(error) from error

    def recv(self, timeout: float, max_bytes: int | None = None) -> dict:
        """The next message, of at most `max_bytes` bytes, within `timeout` seconds.

        Raises WeightSyncError with the peer's own error, if that is the message, or if the peer is gone or silent.
        """
        if self.pending:
            return self.pending.pop(0)
        try:
            if not self.connection.poll(timeout):
                raise WeightSyncError(f"{self.peer} did not answer within {timeout:.5g} s")
            return self._read(max_bytes)
        except (EOFError, OSError) as error:
            raise self._gone(error) from error

    def watch(self) -> None:
        """Raise WeightSyncError if the peer has failed. Keeps its other messages for `recv`."""
        try:
            while self.connection.poll(0):
                self.pending.append(self._read())
        except (EOFError, OSError) as error:
            raise self._gone(error) from error

    def close(self, error: str | None = None) -> None:
        """End the session. A waiting peer raises `error`, or that this side closed the session."""
        try:
            self.send(**{"error": error} if error else {"closed": True})
        except WeightSyncError:
            pass  # the peer is already gone
        self.connection.close()

    def _read(self, max_bytes: int | None = None) -> dict:
        try:
            message = json.loads(self.connection.recv_bytes(max_bytes))
            if not isinstance(message, dict):
                raise ValueError(f"{message!r} is no JSON object")
        except (ValueError, RecursionError) as error:
            raise WeightSyncError(f"{self.peer} sent something that is not a message of the weight sync") from error
        if "error" in message:
            raise WeightSyncError(f"{self.peer} failed: {message['error']}")
        if "closed" in message:
            raise WeightSyncError(f"{self.peer} closed the weight sync session")
        return message

    def _gone(self, error: Exception) -> WeightSyncError:
        if getattr(error, "errno", None) in UNREACHABLE:
            return WeightSyncError(f"{self.peer} cannot be reached over the network: {error.strerror}")
        if isinstance(error, BlockingIOError):
            return WeightSyncError(f"{self.peer} stopped in the middle of a message")
        return WeightSyncError(f"{self.peer} died: its connection to the weight sync closed")


def address_family(host: str) -> socket.AddressFamily:
    """IPv4 if the host has an IPv4 address, else IPv6."""
    families = {family for family, *_ in socket.getaddrinfo(host, None)}
    return socket.AF_INET if socket.AF_INET in families else socket.AF_INET6


def host_and_port(host: str, port: int) -> str:
    """HOST:PORT, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_towards(host: str) -> str:
    """The address of this machine in the network over which it reaches the host. Nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def recv_all(links: list[Link], timeout: float, expected_soon: bool = False) -> list[dict]:
    """The next message of each link, within `timeout` seconds. With `expected_soon`, busy-polls at first.

    Raises WeightSyncError as `recv` does, for the first to fail.
    """
    started = time.monotonic()
    while silent := [link for link in links if not link.pending]:
        waited = time.monotonic() - started
        busy = expected_soon and waited < BUSY_POLL_SECONDS
        ready = wait([link.connection for link in silent], 0 if busy else max(0.0, timeout - waited))
        for link in silent:
            if link.connection in ready:
                link.pending.append(link.recv(0))
        if waited > timeout and not ready:
            raise WeightSyncError(f"{silent[0].peer} did not answer within {timeout:.5g} s")
    return [link.pending.pop(0) for link in links]


def wait_until(done: Callable[[], bool], links: list[Link], deadline: float) -> None:
    """Poll `done()` and watch the links. Raises a failed peer's error, or WeightSyncError after `deadline`."""
    try:
        while not done():
            watch_all(links)
            if time.monotonic() > deadline:
                raise WeightSyncError(
                    "the weight transfer is stuck: it ran into its deadline; is receive_weights running on every"
                    " worker, and send_weights on every rank that has shards?"
                )
            time.sleep(20e-6)
    except WeightSyncError:
        raise
    except RuntimeError:  # of gloo, for a closed connection; a link says whose, possibly a moment later
        watch_all(links, 5.0)
        raise


def watch_all(links: Sequence[Link], seconds: float = 0.0) -> None:
    """Raise WeightSyncError if a peer has failed, or does so within `seconds`. Keeps other messages for `recv`."""
    deadline = time.monotonic() + seconds
    while True:
        for link in links:
            link.watch()
        if not links or (left := deadline - time.monotonic()) <= 0:
            return
        wait([link.connection for link in links], left)
