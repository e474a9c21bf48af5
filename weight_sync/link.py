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
HELLO_SECONDS = 5.0  # limit for the first message of a new connection
HELLO_BYTES = 1 << 12  # largest first message
SILENT_SECONDS = 15  # a peer that acknowledges nothing for this long is gone (dead node, cut network)
BUSY_POLL_SECONDS = 0.02  # poll this long for a message that is due: sleeping and waking up would add 0.1 to 0.3 ms
LINK_KEY = "rlhf_utils/link"  # the key, in a group's store, of the port where the trainer listens
UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)  # the errors of a socket whose peer is gone


class WeightSyncError(RuntimeError):
    """A weight sync failed. The message is the reason that the failing side gave."""


def reason_of(error: BaseException) -> str:
    """The text for the other side: the message of a WeightSyncError, the traceback of any other error."""
    return str(error) if isinstance(error, WeightSyncError) else "".join(traceback.format_exception(error))


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

    def send_hello(self, role: str, token: str) -> None:
        """Introduce this side. The token shows that it belongs to the group."""
        self.send(peer=f"{role} (pid {os.getpid()} on {socket.gethostname()})", token=token)

    def recv_hello(self, token: str, timeout: float = CONNECT_SECONDS) -> None:
        """Learn the peer's name. Raises WeightSyncError if it does not know the token."""
        hello = self.recv(timeout, HELLO_BYTES)
        if hello.get("token") != token:
            raise WeightSyncError("a stranger connected to the weight sync's port")
        self.peer = hello["peer"]

    def send(self, **message) -> None:
        try:
            self.connection.send_bytes(json.dumps(message).encode())
        except OSError as error:
            self.watch()  # raises the peer's own reason, if it sent one
            raise self._gone(error) from error

    def recv(self, timeout: float, max_bytes: int | None = None, expected_soon: bool = False) -> dict:
        """The next message, of at most `max_bytes` bytes, within `timeout` seconds.

        Raises WeightSyncError with the peer's own error, if that is the message, or if the peer is gone or silent. With
        `expected_soon`, busy-polls at first.
        """
        if self.pending:
            return self.pending.pop(0)
        try:
            busy_until = time.monotonic() + (BUSY_POLL_SECONDS if expected_soon else 0)
            while time.monotonic() < busy_until and not self.connection.poll(0):
                pass
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

    def received(self, **message) -> bool:
        """Whether `watch` has read this message. Removes it."""
        if message not in self.pending:
            return False
        self.pending.remove(message)
        return True

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
        except ValueError as error:
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


def listen(host: str, count: int, announce: Callable[[dict], None], links: list[Link], peers: str, hint: str) -> None:
    """Listen on `host`, `announce` the endpoint, and append a link to each of `count` peers as they connect.

    Raises WeightSyncError if they have not all connected within CONNECT_SECONDS. It calls them `peers` and adds a hint.
    """
    token = os.urandom(16).hex()
    with socket.create_server((host, 0), family=address_family(host), backlog=count) as server:
        announce({"host": host, "port": server.getsockname()[1], "token": token})
        accept(server, count, token, links, peers, hint)


def accept(server: socket.socket, count: int, token: str, links: list[Link], peers: str, hint: str) -> None:
    """Append a link to each of `count` peers that connect and know the token. Raises as `listen` does."""
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
            link.recv_hello(token, HELLO_SECONDS)
            link.send_hello("the trainer", token)
            links.append(link)
        except WeightSyncError:
            link.close()  # a stranger, or a peer whose own limit has passed: keep listening


def connect(endpoint: dict, role: str) -> Link:
    """The other side of `listen`: connect, as `role`, to the announced endpoint. Raises WeightSyncError if it fails."""
    if "error" in endpoint:
        raise WeightSyncError(f"the trainer failed: {endpoint['error']}")
    try:
        link = Link(socket.create_connection((endpoint["host"], endpoint["port"]), timeout=CONNECT_SECONDS))
    except OSError as error:
        raise WeightSyncError(f"the trainer is gone: {error}") from error
    link.send_hello(role, endpoint["token"])
    link.recv_hello(endpoint["token"])
    return link


def connect_group(group, role: str, timeout: float) -> Link:
    """Connect a worker to the trainer, which must start to listen within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    try:
        while not group.store.check([LINK_KEY]):
            if time.monotonic() > deadline:
                raise WeightSyncError(f"no trainer called send_weights within {timeout:.5g} s")
            time.sleep(0.01)
        # This node may know the trainer by another address than the trainer itself.
        endpoint = json.loads(group.store.get(LINK_KEY)) | {"host": group.store.host}
    except WeightSyncError:
        raise
    except RuntimeError as error:  # of TCPStore
        raise WeightSyncError(f"the trainer is gone: {error}") from error
    return connect(endpoint, role)


def connect_path(path: str, rank: int, timeout: float) -> Link:
    """The worker's side of `SharedMemoryChannel.accept`. The trainer must accept within `timeout` seconds."""
    socket_ = socket.socket(socket.AF_UNIX)
    socket_.settimeout(timeout)
    try:
        socket_.connect(path)
    except OSError as error:
        raise WeightSyncError(f"the trainer is gone, or this channel was used before: {error}") from error
    link = Link(socket_)
    link.send_hello(f"engine worker {rank}", os.path.dirname(path))
    link.recv_hello(os.path.dirname(path), timeout)
    return link


def recv_all(links: list[Link], timeout: float, others: Sequence[Link] = (), expected_soon: bool = False) -> list[dict]:
    """The next message of each link, within `timeout` seconds.

    Raises WeightSyncError as `recv` does, for the first to fail of the links and `others`. With `expected_soon`,
    busy-polls at first.
    """
    started = time.monotonic()
    while silent := [link for link in links if not link.pending]:
        waited = time.monotonic() - started
        busy = expected_soon and waited < BUSY_POLL_SECONDS
        ready = wait([link.connection for link in (*silent, *others)], 0 if busy else max(0.0, timeout - waited))
        for link in silent:
            if link.connection in ready:
                link.pending.append(link.recv(0))
        for link in others:
            link.watch()
        if waited > timeout and not ready:
            raise WeightSyncError(f"{silent[0].peer} did not answer within {timeout:.5g} s")
    return [link.pending.pop(0) for link in links]


def wait_until(done: Callable[[], bool], links: list[Link], deadline: float) -> None:
    """Poll `done()` and watch the links. Raises a failed peer's error, or WeightSyncError after `deadline`."""
    try:
        while not done():
            for link in links:
                link.watch()
            if time.monotonic() > deadline:
                raise WeightSyncError(
                    "the weight transfer is stuck: it ran into its deadline; is receive_weights running on every"
                    " worker, and send_weights on every rank that has shards?"
                )
            time.sleep(20e-6)
    except WeightSyncError:
        raise
    except RuntimeError:  # of gloo, for a closed connection; a link says whose, possibly a moment later
        wait([link.connection for link in links], timeout=1.0)
        for link in links:
            link.watch()
        raise
