"""Both ends of a weight sync: a trainer's parameters into every worker of a running vLLM engine.

    trainer process                            each engine worker
    WeightSender.send_weights(params)   --->   WorkerExtension.receive_weights()

The bytes travel by broadcast (NCCL between GPUs, gloo between CPUs), packed into a few large buckets, two in flight.
Beside them runs one small TCP connection per worker, the link. It carries what the two ends must agree on, it ends the
wait of either side when the other fails, and it breaks at once when a process dies. One sync, in order:

1. Preflight (first sync, and whenever the set of parameters changes). Each worker runs vLLM's own weight loaders over
   tensors without storage and notes what would be copied where. A parameter that the engine does not know, lacks or
   shapes otherwise is an error that names it, before a byte moves. The answer also says which dtype the engine keeps
   each parameter in; that is the dtype sent, so fp32 master weights travel as bf16 to a bf16 engine.
2. The buckets, inside one reload bracket of vLLM (`initialize_layerwise_reload` ... `finalize_layerwise_reload`), which
   is right for every model, quantization and device: layers are loaded, repacked or quantized as they complete.
3. Every worker takes a digest of what it now serves, raises its weight version and answers.

The engine must not be generating, and its prefix cache still holds keys and values of the old weights: the caller runs
`reset_prefix_cache` before the next prompt. If either side fails, both raise, the session is closed, and the engine's
weights are undefined until a later session has completed a sync.

The one-parameter protocol of vLLM's example (`init_weight_update_group`, `update_weight`, `check_weights_changed`)
works too, with `stateless_init_process_group` on the trainer's side. Imports need torch alone; vLLM is imported by the
functions that use it.
"""

import json
import logging
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "WeightSender",
    "WeightSyncError",
    "WorkerExtension",
    "stateless_init_process_group",
]

BUCKET_BYTES = 512 << 20  # each end stages LANES buckets: 1 GiB at most beyond the weights
LANES = 2  # buckets in flight
ALIGN_BYTES = 256  # tensors start at multiples of this, so that every copy is vectorized
CONNECT_SECONDS = 60.0  # the other side starts its half of a rendezvous within this time
SILENT_SECONDS = 20  # a link whose peer acknowledges nothing for this long is broken (dead node, cut network)
SLOWEST_BYTES_PER_SECOND = 50e6  # a sync slower than this is taken for stuck


class WeightSyncError(RuntimeError):
    """A weight sync that did not happen, with the reason of the side that failed."""


# --- The group that broadcasts ----------------------------------------------------------------------------------------


class GlooCommunicator:
    """PyNcclCommunicator's `broadcast`, for tensors on CPU."""

    def __init__(self, group):
        from torch.distributed import PrefixStore, ProcessGroupGloo

        self.group, self.rank, self.world_size = group, group.rank, group.world_size
        self.disabled = False
        self._gloo = ProcessGroupGloo(
            PrefixStore("gloo", group.store), group.rank, group.world_size, timeout=timedelta(seconds=CONNECT_SECONDS)
        )

    def start_broadcast(self, tensor: torch.Tensor, src: int):
        """Begin to broadcast a contiguous tensor in place; returns torch.distributed's Work."""
        from torch.distributed import BroadcastOptions

        if not tensor.is_contiguous():
            raise ValueError("broadcast needs a contiguous tensor")
        options = BroadcastOptions()
        options.rootRank = src
        return self._gloo.broadcast([tensor.detach().view(-1).view(torch.uint8)], options)

    def broadcast(self, tensor: torch.Tensor, src: int, stream=None) -> None:
        """Broadcast a contiguous tensor in place and wait for it; `stream` is PyNcclCommunicator's, unused on CPU."""
        self.start_broadcast(tensor, src).wait()


def stateless_init_process_group(master_address: str, master_port: int, rank: int, world_size: int, device):
    """Join a broadcast group of trainer (rank 0) and engine workers, apart from torch.distributed's global groups.

    Every rank calls this at about the same time. Returns vLLM's `PyNcclCommunicator` on a GPU, `GlooCommunicator` on
    `cpu`. Raises WeightSyncError where vLLM would build a disabled communicator, whose broadcasts do nothing.
    """
    from vllm.distributed.utils import StatelessProcessGroup

    group = StatelessProcessGroup.create(
        host=master_address, port=master_port, rank=rank, world_size=world_size, store_timeout=int(CONNECT_SECONDS)
    )
    if torch.device(device).type == "cpu":
        return GlooCommunicator(group)
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

    communicator = PyNcclCommunicator(group, device=device)
    if communicator.disabled:
        raise WeightSyncError(
            "vLLM built a disabled NCCL communicator, which would broadcast nothing: NCCL is absent or too old for this"
            " vLLM, VLLM_DISABLE_PYNCCL is set, or the group has one rank (world_size must count trainer and workers)"
        )
    return communicator


# --- The link: messages between the trainer and one worker ------------------------------------------------------------


class _Link:
    """One TCP connection with JSON messages; `peer` is how errors call the other end."""

    def __init__(self, sock: socket.socket):
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A process that dies closes its socket; a node that vanishes does not, so let TCP itself probe the peer.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_SECONDS * 1000)
        self.connection = Connection(sock.detach())
        self.peer = "the other side"
        self.early: list[dict] = []  # messages that arrived while this side watched for failures

    def greet(self, role: str, token: str) -> None:
        """Exchange names; a peer that does not know the token is not of this group."""
        self.send(peer=f"{role} (pid {os.getpid()} on {socket.gethostname()})", token=token)
        hello = self.recv(CONNECT_SECONDS)
        if hello.get("token") != token:
            raise WeightSyncError("a stranger connected to the weight sync's port")
        self.peer = hello["peer"]

    def send(self, **message) -> None:
        try:
            self.connection.send_bytes(json.dumps(message).encode())
        except OSError as error:
            raise self._gone() from error

    def recv(self, timeout: float) -> dict:
        """The next message, within `timeout` seconds. Raises the peer's own error if it reports one."""
        if self.early:
            return self.early.pop(0)
        try:
            if not self.connection.poll(timeout):
                raise WeightSyncError(f"{self.peer} did not answer within {timeout:.0f} s")
            return self._read()
        except (EOFError, OSError) as error:
            raise self._gone() from error

    def watch(self) -> None:
        """Raise if the peer has failed; keep what else it said for `recv`."""
        try:
            while self.connection.poll(0):
                self.early.append(self._read())
        except (EOFError, OSError) as error:
            raise self._gone() from error

    def close(self) -> None:
        self.connection.close()

    def _read(self) -> dict:
        message = json.loads(self.connection.recv_bytes())
        if "error" in message:
            raise WeightSyncError(f"{self.peer} failed: {message['error']}")
        return message

    def _gone(self) -> WeightSyncError:
        return WeightSyncError(f"{self.peer} died: its connection to the weight sync closed")


def _listen(group) -> tuple[list[_Link], socket.socket]:
    """Trainer's side: open one link to every other rank of the group, in no particular order."""
    token = os.urandom(16).hex()
    with socket.create_server(("", 0), family=socket.AF_INET, backlog=group.world_size) as server:
        server.settimeout(CONNECT_SECONDS)
        group.store.set("rlhf_utils/link", f"{server.getsockname()[1]} {token}")
        links = []
        try:
            while len(links) < group.world_size - 1:
                links.append(_Link(server.accept()[0]))
                links[-1].greet("the trainer", token)
        except TimeoutError as error:
            missing = group.world_size - 1 - len(links)
            raise WeightSyncError(
                f"{missing} of {group.world_size - 1} engine workers did not connect within {CONNECT_SECONDS:.0f} s: is"
                " receive_weights running on every worker?"
            ) from error
    return links


def _connect(group, rank: int) -> _Link:
    """A worker's side of `_listen`."""
    try:
        port, token = group.store.get("rlhf_utils/link").decode().split()
        link = _Link(socket.create_connection((group.store.host, int(port)), timeout=CONNECT_SECONDS))
    except (OSError, RuntimeError) as error:  # TCPStore raises RuntimeErrors of its own
        raise WeightSyncError(f"the trainer did not open the weight sync's link: {error}") from error
    link.greet(f"engine worker {rank - 1}", token)
    return link


def _wait_until(done: Callable[[], bool], links: list[_Link], deadline: float) -> None:
    """Poll `done()` while watching the links, so that a transfer whose peer failed ends with that peer's error."""
    try:
        while not done():
            for link in links:
                link.watch()
            if time.monotonic() > deadline:
                raise WeightSyncError("the weight transfer is stuck: it ran into its deadline")
            time.sleep(20e-6)
    except WeightSyncError:
        raise
    except RuntimeError:  # gloo's own, of a closed connection: a link knows whose, at once or a moment later
        wait([link.connection for link in links], timeout=1.0)
        for link in links:
            link.watch()
        raise


# --- What travels -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """Elements [begin, begin + count) of one flattened tensor, at byte `offset` of a bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    count: int
    offset: int

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


def plan_buckets(metadata: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], bucket_bytes: int) -> list[list[Piece]]:
    """Lay tensors, in order, into buckets of at most `bucket_bytes` bytes; one that does not fit is cut at rows.

    `bucket_bytes` is a multiple of ALIGN_BYTES. Both ends compute this from the same metadata, so only bytes travel.
    """
    buckets, offset = [[]], 0
    for name, dtype, shape in metadata:
        numel = torch.Size(shape).numel()
        row = max(1, numel // shape[0]) if shape else 1
        begin = 0
        while begin < numel:
            room = (bucket_bytes - offset) // dtype.itemsize
            count = min(numel - begin, room)
            if count < numel - begin:
                # Start in a fresh bucket rather than cut, and cut only what no bucket can hold.
                if offset:
                    buckets.append([])
                    offset = 0
                    continue
                count = max(count // row * row, min(count, row))
            buckets[-1].append(Piece(name, dtype, tuple(shape), begin, count, offset))
            begin += count
            offset += -(-count * dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES
    return buckets


def _bucket_nbytes(bucket: list[Piece]) -> int:
    return bucket[-1].offset + bucket[-1].nbytes


def _view(buffer: torch.Tensor, piece: Piece) -> torch.Tensor:
    return buffer[piece.offset : piece.offset + piece.nbytes].view(piece.dtype)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Lanes:
    """The staging buffers: one bucket is on the wire while the other is packed or loaded."""

    def __init__(self, communicator, buckets: list[list[Piece]], device: torch.device):
        self.communicator = communicator
        nbytes = max(map(_bucket_nbytes, buckets))
        count = min(LANES, len(buckets))
        self.buffers = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(count)]
        self.streams = [torch.cuda.Stream(device) for _ in range(count)] if device.type == "cuda" else []

    def start(self, i: int, nbytes: int) -> Callable[[], bool]:
        """Begin to broadcast bucket `i` from or into its buffer; returns a poll that is true once it is through."""
        buffer = self.buffers[i % LANES][:nbytes]
        if self.streams:
            stream = self.streams[i % LANES]
            stream.wait_stream(torch.cuda.current_stream())  # packing, or loading the bucket before, is queued there
            self.communicator.broadcast(buffer, src=0, stream=stream)
            event = torch.cuda.Event()
            event.record(stream)
            return event.query
        work = self.communicator.start_broadcast(buffer, src=0)
        return lambda: work.is_completed() and work.wait()


# --- The trainer's end ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SyncReport:
    """One completed sync, as the trainer saw it: from weights ready to every worker's answer."""

    version: int  # of the engine's weights: 1 after the first sync
    tensors: int
    nbytes: int  # sent, in the engine's dtypes
    seconds: float

    @property
    def gigabytes_per_second(self) -> float:
        return self.nbytes / self.seconds / 1e9


@dataclass
class _Session:
    """What the two ends of the trainer's links have agreed on."""

    links: list[_Link] = field(default_factory=list)
    metadata: list = field(default_factory=list)
    buckets: list[list[Piece]] = field(default_factory=list)
    lanes: _Lanes | None = None


class WeightSender:
    """The trainer's end of the sync. `communicator` is `stateless_init_process_group`'s, with rank 0."""

    def __init__(self, communicator):
        self.communicator = communicator
        self.session: _Session | None = _Session()

    def send_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> SyncReport:
        """Bring every engine worker to these weights, named as in the Hugging Face checkpoint, any dtype.

        Runs while `receive_weights` runs on every worker. Tied tensors travel once. Raises WeightSyncError, also with
        the workers' own errors; the session is closed then, and a new one needs new groups on both sides.
        """
        if self.session is None:
            raise WeightSyncError("this weight sync session was closed by an earlier error")
        started = time.perf_counter()
        try:
            tensors = _without_ties(named_tensors)
            if not self.session.links:
                self.session.links = _listen(self.communicator.group)
            self._agree(tensors)
            self._transmit(tensors)
            allowed = _seconds_allowed(self.session.buckets)
            versions = {link.recv(allowed)["version"] for link in self.session.links}
            if len(versions) != 1:
                raise WeightSyncError(f"engine workers disagree about the weight version: {sorted(versions)}")
        except Exception as error:
            self.close(_reason(error))
            raise
        nbytes = sum(piece.nbytes for bucket in self.session.buckets for piece in bucket)
        return SyncReport(versions.pop(), len(tensors), nbytes, time.perf_counter() - started)

    def close(self, error: str | None = None) -> None:
        """End the session; with `error`, workers that are waiting raise it."""
        session, self.session = self.session, None
        for link in session.links if session else []:
            try:
                if error:
                    link.send(error=error)
            except WeightSyncError:
                pass  # that worker is the one that is gone
            link.close()
        if error and hasattr(self.communicator, "destroy"):
            self.communicator.destroy()  # a broadcast that will never end must not hold the GPU

    def _agree(self, tensors: dict[str, torch.Tensor]) -> None:
        """Preflight, unless the last one still holds; then tell every worker to listen."""
        session = self.session
        metadata = [(name, _dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors.items()]
        if metadata == session.metadata:
            for link in session.links:
                link.send(go=True)
            return
        for link in session.links:
            link.send(metadata=metadata)
        answers = [link.recv(CONNECT_SECONDS) for link in session.links]
        dtypes, problems = [], sorted({problem for answer in answers for problem in answer["problems"]})
        for i, (name, _, shape) in enumerate(metadata):
            wanted = {answer["dtypes"][i] for answer in answers} - {None}
            if not wanted and not problems:
                problems.append(f"{name} {list(shape)}: the engine's loader ignores it")
            if len(wanted) > 1:
                problems.append(f"{name}: workers keep it in different dtypes, {sorted(wanted)}")
            dtypes.append(next(iter(wanted), None))
        if problems:
            raise WeightSyncError("preflight, nothing was sent:\n  " + "\n  ".join(problems))
        wire = [(name, dtype, shape) for (name, _, shape), dtype in zip(metadata, dtypes, strict=True)]
        for link in session.links:
            link.send(go=True, wire=wire, bucket_bytes=BUCKET_BYTES)
        session.buckets = _wire_buckets(wire, BUCKET_BYTES)
        session.lanes = _Lanes(self.communicator, session.buckets, next(iter(tensors.values())).device)
        session.metadata = metadata

    @torch.no_grad()
    def _transmit(self, tensors: dict[str, torch.Tensor]) -> None:
        session, sent = self.session, []
        deadline = time.monotonic() + _seconds_allowed(session.buckets)
        flat = {name: tensor.reshape(-1) for name, tensor in tensors.items()}
        for i, bucket in enumerate(session.buckets):
            if i >= LANES:
                _wait_until(sent[i - LANES], session.links, deadline)
            views = [_view(session.lanes.buffers[i % LANES], piece) for piece in bucket]
            torch._foreach_copy_(views, [flat[p.name][p.begin : p.begin + p.count] for p in bucket])
            sent.append(session.lanes.start(i, _bucket_nbytes(bucket)))
        for done in sent[-LANES:]:
            _wait_until(done, session.links, deadline)


def _without_ties(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The tensors by name, the first name only where two share their memory."""
    tensors, seen = {}, set()
    for name, tensor in named_tensors:
        memory = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape)
        if tensor.numel() and memory not in seen:
            seen.add(memory)
            tensors[name] = tensor.detach()
    if not tensors:
        raise WeightSyncError("there is nothing to send: the model has no parameters")
    return tensors


def _wire_buckets(wire: list, bucket_bytes: int) -> list[list[Piece]]:
    metadata = [(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in wire]
    return plan_buckets(metadata, bucket_bytes)


# --- The worker's end -------------------------------------------------------------------------------------------------


class _CopyTrace(TorchDispatchMode):
    """Lets weight loaders run without effect: what they would write is noted instead."""

    def __init__(self):
        super().__init__()
        self.writes: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # (destination, source or None for a constant)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.writes.append((args[0], args[1]))
            return args[0]
        if func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            self.writes.append((args[0], None))
            return args[0]
        return func(*args, **(kwargs or {}))


def _memory(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage, also where it has no address (meta tensors)."""
    return tensor.untyped_storage()._cdata


class _EngineModel:
    """What a sync needs of the model inside a vLLM worker: preflight, loading, digest."""

    def __init__(self, worker):
        self.worker = worker
        self.model = worker.model_runner.get_model()
        self.loading = False
        self.required: dict[str, int] = {}  # elements by parameter that a sync must write, known after a trace
        self.covered: set[tuple] = set()  # regions written one parameter at a time since the last completed sync
        self.digest: int | None = None  # of what a completed sync left, None where there was none
        self.version = 0

    def preflight(self, metadata: list) -> tuple[list[str | None], list[str]]:
        """Returns per tensor the dtype in which the engine keeps it (None: not on this worker), and the problems."""
        traced, problems = self._trace(metadata)
        dtypes = [next((_dtype_name(dtype) for _, dtype in traced.get(name, [])), None) for name, _, _ in metadata]
        missing = self.required.keys() - self._complete({region for writes in traced.values() for region, _ in writes})
        if missing and not problems:
            problems = [f"nothing is sent for the engine's {name}" for name in sorted(missing)]
        return dtypes, problems

    def load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Load tensors, which the reload keeps until their layer is complete."""
        with self._context():
            if not self.loading:
                from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

                self.digest = None
                self.loading = True
                initialize_layerwise_reload(self.model)
            self.model.load_weights(weights)

    def finish(self) -> None:
        """Close the reload bracket: what was loaded is what the engine serves."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with self._context():
            finalize_layerwise_reload(self.model, self.worker.model_config)
            self._repack_tied_layers()
        self.loading = False

    def complete(self) -> None:
        """Every parameter was written: a new version of the weights is in place."""
        self.covered.clear()
        self.digest = self.take_digest()
        self.version += 1

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        """The one-parameter protocol: load, and serve as soon as no layer is half written."""
        traced, problems = self._trace([(name, _dtype_name(weight.dtype), tuple(weight.shape))])
        if problems:
            raise WeightSyncError(problems[0])
        self.load([(name, weight)])
        self.covered |= {region for region, _ in traced[name]}
        unwritten = self.required.keys() - self._complete(self.covered)
        if not {_layer_of(name) for name in unwritten} & {_layer_of(name) for name, *_ in self.covered}:
            self.finish()
            if not unwritten:
                self.complete()

    def unchanged(self) -> bool:
        return self.digest is not None and not self.loading and self.take_digest() == self.digest

    def _trace(self, metadata: list) -> tuple[dict[str, list], list[str]]:
        """Run the loaders without effect: {tensor name: [(region of an engine parameter, dtype), ...]}, problems."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        traced, problems = {}, []
        with self._context():
            if not self.loading:
                optional = self._optional_parameters()
                initialize_layerwise_reload(self.model)
                parameters = self.model.named_parameters(remove_duplicate=False)
                self.required = {name: p.numel() for name, p in parameters if name not in optional}
            parameters = dict(self.model.named_parameters(remove_duplicate=False))
            owners = {_memory(parameter): name for name, parameter in parameters.items()}
            with _unwrapped_loaders(parameters.values()):
                for name, dtype, shape in metadata:
                    source = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
                    try:
                        with _CopyTrace() as trace:
                            self.model.load_weights([(name, source)])
                    except Exception as error:  # whatever a loader raises for a name or a shape that it cannot take
                        reason = f"{type(error).__name__}: {error}".splitlines()[0][:120]
                        problems.append(f"{name} {list(shape)}: the engine cannot load it ({reason})")
                        continue
                    traced[name] = self._regions(trace.writes, source, owners)
            if not self.loading:
                finalize_layerwise_reload(self.model, self.worker.model_config)
        return traced, problems

    def _regions(self, writes: list, source: torch.Tensor, owners: dict[int, str]) -> list[tuple]:
        regions = []
        for destination, copied in writes:
            if owner := owners.get(_memory(destination)):
                # A loader that computes on its way gets the model's dtype; one that copies gets the parameter's own.
                plain = copied is None or _memory(copied) == _memory(source)
                region = (owner, destination.storage_offset(), destination.size(), destination.stride())
                regions.append((region, destination.dtype if plain else self.worker.model_config.dtype))
        return regions

    def _optional_parameters(self) -> set[str]:
        """Parameters that need no write: tied ones but for their first name, and the attention layers' scales."""
        from vllm.model_executor.layers.attention import is_deferred_attention_layer

        scaled = {name for name, module in self.model.named_modules() if is_deferred_attention_layer(module)}
        firsts = {name for name, _ in self.model.named_parameters()}
        names = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        return {name for name in names if name not in firsts or _layer_of(name) in scaled}

    def _complete(self, regions: set[tuple]) -> set[str]:
        """Names of the parameters that these regions cover."""
        written = {}
        for name, _, size, _ in regions:
            written[name] = written.get(name, 0) + size.numel()
        return {name for name, numel in self.required.items() if written.get(name, 0) >= numel}

    def _repack_tied_layers(self) -> None:
        """A layer tied to another receives no weights of its own; on CPU its packed copy must be made again."""
        owners = {}
        for module in self.model.modules():
            weight = getattr(module, "weight", None)
            tied = weight is not None and owners.setdefault(id(weight), module) is not module
            if tied and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)

    @torch.no_grad()
    def take_digest(self) -> int | None:
        """A number that any changed, moved or swapped element changes; None for a model without parameters."""
        digests = [_digest(tensor) for tensor in self._served_tensors()]
        if not digests:
            return None
        return hash(tuple(torch.stack(digests).tolist()))

    def _served_tensors(self) -> Iterator[torch.Tensor]:
        for parameter in self.model.parameters():
            if parameter.numel():
                yield from _plain_tensors(parameter.detach())
        for module in self.model.modules():
            # On CPU, vLLM keeps linear weights packed in a form that cannot be read: read them by what they compute.
            if hasattr(module, "cpu_linear") and not module.weight.numel():
                identity = torch.eye(module.input_size_per_partition, dtype=module.weight.dtype)
                yield module.cpu_linear(identity, module.weight, None)

    @contextmanager
    def _context(self):
        from vllm.config import set_current_vllm_config

        # vLLM warns of every layer that a bracket leaves as it was, which a trace or a single parameter does to most.
        logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            with torch.no_grad(), set_current_vllm_config(self.worker.vllm_config):
                yield
        finally:
            logger.setLevel(level)


def _layer_of(parameter_name: str) -> str:
    return parameter_name.rpartition(".")[0]


@contextmanager
def _unwrapped_loaders(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Take the bracket's wrappers, which count and process, off the weight loaders, which only copy."""
    wrapped = []
    for parameter in parameters:
        loader = getattr(parameter, "weight_loader", None)
        if getattr(loader, "__name__", "") == "online_process_loader":
            wrapped.append((parameter, loader))
            while loader.__name__ == "online_process_loader":
                loader = loader.__wrapped__
            parameter.weight_loader = loader
    try:
        yield
    finally:
        for parameter, loader in wrapped:
            parameter.weight_loader = loader


def _plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that a quantized tensor consists of, or the tensor itself."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain_tensors(getattr(tensor, name))
    else:
        yield tensor.as_subclass(torch.Tensor)


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """A scalar (int64) over a tensor's bits: its sums along both axes, each weighted by position."""
    words = tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
    matrix = words.reshape(-1, words.shape[-1] if words.dim() else 1)
    columns, rows = matrix.sum(0, dtype=torch.int64), matrix.sum(1, dtype=torch.int64)
    odd = 2 * torch.arange(max(matrix.shape), device=tensor.device) + 1
    return (columns * odd[: len(columns)]).sum() + 31 * (rows * odd[: len(rows)]).sum() + tensor.numel()


class WorkerExtension:
    """Methods for vLLM's workers (`worker_extension_cls="rlhf_utils.WorkerExtension"`), run by `collective_rpc`."""

    model_update_group = None
    weight_link: _Link | None = None

    def init_weight_update_group(self, master_address: str, master_port: int, rank_offset: int, world_size: int):
        """Join the group that the trainer opens as rank 0 with `stateless_init_process_group`.

        This worker's rank is its rank in the engine plus `rank_offset` (1 behind a single trainer); `world_size`
        counts the trainer and all workers of all engines.
        """
        from vllm.distributed.parallel_state import get_world_group

        self.close_weight_update_group()
        rank = get_world_group().rank + rank_offset
        self.model_update_group = stateless_init_process_group(
            master_address, master_port, rank, world_size, self.device
        )

    def receive_weights(self, timeout: float = 3600.0) -> dict:
        """Take part in one `WeightSender.send_weights` that starts within `timeout` seconds.

        Returns {"version": n}, n counting the weights served from now on, or {"error": reason} with the trainer's
        error if that is what failed; the trainer in turn raises this worker's. An exception would break the engine:
        vLLM reads no worker's answer beyond the first exception, and takes what is left for answers to its next call.
        """
        try:
            return {"version": self._receive_weights(timeout)}
        except Exception as error:
            self.close_weight_update_group(_reason(error))
            return {"error": _reason(error)}

    def _receive_weights(self, timeout: float) -> int:
        model, group = self._engine_model(), self._joined_group()
        if self.weight_link is None:
            self.weight_link = _connect(group.group, group.rank)
        link = self.weight_link
        message = link.recv(timeout)
        if "metadata" in message:
            dtypes, problems = model.preflight(message["metadata"])
            link.send(dtypes=dtypes, problems=problems)
            message = link.recv(CONNECT_SECONDS)
            self.weight_buckets = _wire_buckets(message["wire"], message["bucket_bytes"])
            self.weight_lanes = _Lanes(group, self.weight_buckets, self.device)
        for weights in _received(self.weight_buckets, self.weight_lanes, link):
            model.load(weights)
        model.finish()
        model.complete()
        link.send(version=model.version)
        return model.version

    def update_weight(self, name: str, dtype_name: str, shape) -> None:
        """Receive one parameter, which the trainer broadcasts from rank 0, and load it."""
        weight = torch.empty(tuple(shape), dtype=getattr(torch, dtype_name), device=self.device)
        group = self._joined_group()
        if self.device.type == "cuda":
            group.broadcast(weight, src=0, stream=torch.cuda.current_stream())
        else:
            group.broadcast(weight, src=0)
        self._engine_model().load_one(name, weight)

    def check_weights_changed(self) -> bool:
        """Whether every element served is, bit for bit, what the last completed sync left.

        False before a sync, while one is partial (some parameters sent, others not), and without parameters.
        """
        return self._engine_model().unchanged()

    def close_weight_update_group(self, error: str | None = None) -> None:
        """Leave the group; with `error`, a trainer that is waiting raises it."""
        if self.weight_link is not None:
            try:
                if error:
                    self.weight_link.send(error=error)
            except WeightSyncError:
                pass  # the trainer is the side that is gone
            self.weight_link.close()
        if hasattr(self.model_update_group, "destroy"):
            self.model_update_group.destroy()  # a broadcast that will never end must not hold the GPU
        self.weight_link = self.model_update_group = self.weight_lanes = None

    def _joined_group(self):
        if self.model_update_group is None:
            raise WeightSyncError("no weight update group: init_weight_update_group was not called, or a sync failed")
        return self.model_update_group

    def _engine_model(self) -> _EngineModel:
        if not hasattr(self, "weight_model"):
            self.weight_model = _EngineModel(self)
        return self.weight_model


def _received(buckets: list[list[Piece]], lanes: _Lanes, link: _Link) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yield the tensors of one bucket after another, in memory of their own, while the next is on the wire."""
    deadline = time.monotonic() + _seconds_allowed(buckets)
    arriving = [lanes.start(0, _bucket_nbytes(buckets[0]))]
    partial: dict[str, torch.Tensor] = {}
    for i, bucket in enumerate(buckets):
        if i + 1 < len(buckets):
            arriving.append(lanes.start(i + 1, _bucket_nbytes(buckets[i + 1])))
        _wait_until(arriving[i], [link], deadline)
        weights = []
        for piece in bucket:
            view = _view(lanes.buffers[i % LANES], piece)
            whole = partial.setdefault(piece.name, torch.empty(piece.shape, dtype=piece.dtype, device=view.device))
            whole.view(-1)[piece.begin : piece.begin + piece.count].copy_(view)
            if piece.begin + piece.count == whole.numel():
                weights.append((piece.name, partial.pop(piece.name)))
        yield weights


def _seconds_allowed(buckets: list[list[Piece]]) -> float:
    return CONNECT_SECONDS + sum(map(_bucket_nbytes, buckets)) / SLOWEST_BYTES_PER_SECOND


def _reason(error: Exception) -> str:
    """What the other side is told: this package's own words, or the traceback of anything else."""
    return str(error) if isinstance(error, WeightSyncError) else "".join(traceback.format_exception(error))
