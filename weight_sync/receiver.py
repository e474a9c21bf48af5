"""The worker's end of a weight sync."""

import time
from collections.abc import Callable, Iterable, Iterator

import torch

from .buckets import Piece, dtype_name, seconds_allowed, staging_buffer_bytes, wire_buckets, wire_of
from .channels import Staging
from .comparison import compare_quantized
from .engine_model import EngineModel
from .groups import device_id_of
from .link import ANSWER_SECONDS, Link, WeightSyncError, reason_of, wait_until
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


class WeightReceiver:
    """The worker's end of a `WeightSender`'s syncs. Subclasses add the channel."""

    channel = ""  # how weights come: "broadcast" or "shared memory"
    weight_link: Link | None = None
    weight_staging: Staging | None = None
    collected_weights: CollectedWeights | None = None  # until a sync of a `WeightSender`, or the end of a session

    def check_weights_changed(self) -> bool:
        """Whether this worker serves, bit for bit, what the last completed sync left.

        False before the first sync, after a partial one (some parameters sent, others not), and for a model without
        parameters.
        """
        return self._engine_model().unchanged()

    def report_device_id(self) -> str:
        """The UUID of this worker's GPU, as nvidia-smi prints it; on CPU "cpu:" and the worker's rank in the engine."""
        return device_id_of(torch.device("cpu", self.rank) if self.device.type == "cpu" else self.device)

    def report_channel(self) -> str:
        """How weights come to this worker: by "broadcast", or through "shared memory" of the trainer's device."""
        return self.channel

    def weight_digests(self) -> tuple[int | None, int | None]:
        """Two digests: of the parameters that this worker serves, and of all tensors that its model's layers keep."""
        model = self._engine_model()
        return model.weights_digest(buffers=False), model.state_digest()

    def load_parameter(self, name: str, tensor: torch.Tensor) -> None:
        """Take one whole tensor, named as in the checkpoint. The last one completes the next weight version.

        Keeps the tensor itself until then: do not overwrite it. Raises WeightSyncError for a tensor that does not fit,
        and with the last one if vLLM's loader leaves something out.
        """
        collected = self._collection()
        collected.add([(name, tensor)])
        collected.load_if_complete()

    def compare_weights(self) -> None:
        """Take part in one `WeightSender.compare_weights`. Errors are raised by the trainer, not here."""
        try:
            if self._message(ANSWER_SECONDS).get("mode") != "compare":
                raise WeightSyncError("compare_weights needs the tensors of the last sync, and got others")
            self.weight_link.send(found=self._read(self._compare))
        except Exception as error:
            self._close_link(reason_of(error))

    def _receive(self, timeout: float, connect: Callable[[], Link]) -> dict:
        # Return errors, never raise: vLLM stops reading the workers' answers at the first exception and then takes the
        # unread ones for answers to its next call.
        try:
            return {"version": self._run_sync(timeout, connect)}
        except Exception as error:
            self._close_link(reason_of(error))
            return {"error": reason_of(error)}

    def _run_sync(self, timeout: float, connect: Callable[[], Link]) -> int:
        """Take part in one sync. Returns the version of the weights."""
        self.collected_weights, model = None, self._engine_model()
        if self.weight_link is None:
            self.weight_link = connect()
        link = self.weight_link
        message = self._message(timeout)
        if "metadata" in message:
            dtypes, problems = model.preflight(message["metadata"])
            link.send(dtypes=dtypes, problems=problems, version=model.version)
            handshake = link.recv(ANSWER_SECONDS)
            model.replay_steps = self.weight_staging = None  # free their memory before allocating anew
            self.weight_buckets = wire_buckets(handshake["wire"], handshake["bucket_bytes"])
            self.weight_staging = self._open_staging(handshake)
            message = link.recv(ANSWER_SECONDS)
        mode = message["mode"]
        model.digest = None  # until all weights are here: this worker may fail before it loads a byte
        version = message["version"]
        loaded = self._load(mode) if self.weight_staging.is_digested(mode) else self._replay_mapped(version)
        model.mark_complete(version, loaded)
        if mode == "record":
            self._record(loaded)
        else:
            link.send(done=True)
        return version

    def _record(self, loaded: int | None) -> None:
        """Record the load that has left weights of digest `loaded`, and prove a replay, as the trainer asks for it."""
        model, link = self._engine_model(), self.weight_link
        refused = model.record(self.weight_buckets, self.weight_staging)
        reloaded = None if refused else model.state_digest()
        link.send(refused=refused)
        while (mode := (message := link.recv(ANSWER_SECONDS))["mode"]) != "end":
            if mode == "verify":  # load other weights first, so that an element which replay misses is wrong
                self._load_other_weights()
            else:
                model.replay_steps = None
            same = self._load(mode) == loaded == model.weights_digest() and model.state_digest() == reloaded
            model.digest = loaded if same else None
            link.send(same=same)
        if not message["replays"]:
            model.replay_steps = self.weight_staging.samples = None
        samples = self.weight_staging.samples
        link.send(blocks=samples and samples.blocks.tolist())

    def _message(self, timeout: float) -> dict:
        """The trainer's next message. Skips "prepare", which announces it."""
        message = self.weight_link.recv(timeout)
        return self.weight_link.recv(timeout, expected_soon=True) if "prepare" in message else message

    def _load(self, mode: str) -> int | None:
        """Load all buckets as they arrive, by reload or replay. Returns the digest of the loaded weights."""
        return self._read(self._engine_model().replay if mode in ("replay", "verify") else self._reload)

    def _reload(self, arrivals: Iterator[int]) -> int | None:
        model = self._engine_model()
        model.reload(_batches(self.weight_buckets, self.weight_staging, arrivals), model.expected)
        return model.weights_digest()

    def _compare(self, arrivals: Iterator[int]) -> dict:
        batches = _batches(self.weight_buckets, self.weight_staging, arrivals)
        tensors = (pair for batch in batches for pair in batch)
        return compare_quantized(self._engine_model(), wire_of(self.weight_buckets), tensors)

    def _read(self, read: Callable[[Iterator[int]], object]) -> object:
        """Have `read` read all buckets as they arrive, and return its result.

        Raises WeightSyncError if something else arrived than the trainer sent.
        """
        total = torch.zeros(1, dtype=torch.int64, device=self.device)
        result = read(_arrivals(self.weight_buckets, self.weight_staging, self.weight_link, total))
        if self.weight_link.recv(ANSWER_SECONDS)["digest"] != int(total):
            raise WeightSyncError("the weights that arrived are not those that the trainer sent: their digests differ")
        return result

    def _replay_mapped(self, version: int) -> int | None:
        """Replay from the trainer's own memory, and compare a sample. Returns the digest of the loaded weights."""
        samples = self.weight_staging.samples

        def arrivals() -> Iterator[int]:
            yield from range(len(self.weight_buckets))
            samples.hash(version)  # queued behind the copies

        loaded = self._engine_model().replay(arrivals())
        if self.weight_link.recv(ANSWER_SECONDS)["digest"] != int(samples.total):
            raise WeightSyncError("a sample of what the engine now serves is not what the trainer has")
        return loaded

    def _load_other_weights(self) -> None:
        model, buckets = self._engine_model(), self.weight_buckets
        model.reload(_batches(buckets, _OtherWeights(self.device), range(len(buckets))), model.expected)

    def _close_link(self, error: str | None = None) -> None:
        """Leave the session. With `error`, a waiting trainer raises it."""
        if self.weight_link is not None:
            self.weight_link.close(error)
        self.weight_link = self.weight_staging = self.collected_weights = None
        if hasattr(self, "weight_model"):
            self.weight_model.replay_steps = None

    def _collection(self) -> CollectedWeights:
        if self.collected_weights is None:
            self.collected_weights = CollectedWeights(self._engine_model())
        return self.collected_weights

    def _engine_model(self) -> EngineModel:
        if not hasattr(self, "weight_model"):
            self.weight_model = EngineModel(self)
        return self.weight_model


def _arrivals(buckets: list[list[Piece]], staging: Staging, link: Link, total: torch.Tensor) -> Iterator[int]:
    """The receive loop: yields each bucket's number once the bucket has arrived. Others may be in flight meanwhile.

    Adds the digest of what arrived to `total`, int64 [1]. The caller must have read the bucket, or on a GPU have
    queued its reads in the current stream, before it asks for the next number.
    """
    deadline = time.monotonic() + seconds_allowed(buckets)
    arriving: list[Callable[[], bool]] = []
    in_flight = len(staging.buffers) or 1  # without buffers, all is in the trainer's memory
    for i in range(len(buckets)):
        while len(arriving) < min(i + in_flight, len(buckets)):
            arriving.append(staging.start(len(arriving)))
        wait_until(arriving[i], [link], deadline)
        staging.digest(i, total)
        yield i
        staging.release(i)


class _OtherWeights(Staging):
    """Stands in for buckets of other weights, all one constant. Takes no memory."""

    def __init__(self, device: torch.device):
        super().__init__([], [])
        self.device = device

    def view(self, i: int, piece: Piece) -> torch.Tensor:
        return torch.full((), 0.5, dtype=piece.dtype, device=self.device).expand(piece.count)


def _batches(
    buckets: list[list[Piece]], staging: Staging, arrivals: Iterable[int]
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Whole tensors for vLLM's loader, about a bucket at a time.

    They are copied out of the staging buffers, since the reload bracket keeps them until their layer is complete.
    """
    incomplete, weights, waiting_bytes = {}, [], 0
    for i in arrivals:
        for piece in buckets[i]:
            view = staging.view(i, piece)
            if piece.name not in incomplete:
                incomplete[piece.name] = torch.empty(piece.shape, dtype=piece.dtype, device=view.device)
            weight = incomplete[piece.name]
            weight.view(-1)[piece.begin : piece.begin + piece.count].copy_(view)
            waiting_bytes += piece.nbytes
            if piece.begin + piece.count == weight.numel():
                weights.append((piece.name, incomplete.pop(piece.name)))
            if weights and (piece is buckets[i][-1] or waiting_bytes > staging_buffer_bytes()):
                yield weights
                weights, waiting_bytes = [], 0
