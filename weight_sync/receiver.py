"""The worker's end of a weight sync."""

import time
from collections.abc import Callable, Iterator

import torch

from .buckets import STAGING_BUFFERS, Piece, seconds_allowed, staging_buffer_bytes, wire_buckets
from .channels import Staging
from .engine_model import EngineModel
from .groups import device_id_of
from .link import ANSWER_SECONDS, Link, reason_of, wait_until


class WeightReceiver:
    """The worker's end of a `WeightSender`'s syncs. Subclasses add the channel."""

    weight_link: Link | None = None
    weight_staging: Staging | None = None

    def check_weights_changed(self) -> bool:
        """Whether this worker serves, bit for bit, what the last completed sync left.

        False before the first sync, after a partial one (some parameters sent, others not), and for a model without
        parameters.
        """
        return self._engine_model().unchanged()

    def report_device_id(self) -> str:
        """The UUID of this worker's GPU, as nvidia-smi prints it; on CPU "cpu:" and the worker's rank in the engine."""
        return device_id_of(torch.device("cpu", self.rank) if self.device.type == "cpu" else self.device)

    def weight_digests(self) -> tuple[int | None, int | None]:
        """Two digests: of the parameters that this worker serves, and of all tensors that its model's layers keep."""
        model = self._engine_model()
        return model.weights_digest(buffers=False), model.state_digest()

    def _receive(self, timeout: float, connect: Callable[[], Link]) -> dict:
        # Return errors, never raise: vLLM stops reading the workers' answers at the first exception and then takes the
        # unread ones for answers to its next call.
        try:
            return {"version": self._take_part(timeout, connect)}
        except Exception as error:
            self._close_link(reason_of(error))
            return {"error": reason_of(error)}

    def _take_part(self, timeout: float, connect: Callable[[], Link]) -> int:
        model = self._engine_model()
        if model.loading:
            model.finish()  # close a bracket that a failed sync, or an update one parameter at a time, left open
        if self.weight_link is None:
            self.weight_link = connect()
        link = self.weight_link
        message = link.recv(timeout)
        if "prepare" in message:
            message = link.recv(timeout, expected_soon=True)
        if "metadata" in message:
            dtypes, problems = model.preflight(message["metadata"])
            link.send(dtypes=dtypes, problems=problems, version=model.version)
            handshake = link.recv(ANSWER_SECONDS)
            model.loaded_buffers |= model.sent.buffers
            model.replay_steps = self.weight_staging = None  # free their memory before allocating anew
            self.weight_buckets = wire_buckets(handshake["wire"], handshake["bucket_bytes"])
            self.weight_staging = self._open_staging(link, handshake)
            message = link.recv(ANSWER_SECONDS)
        mode = message["mode"]
        model.digest = None  # until all weights are here: this worker may fail before it loads a byte
        loaded = self._load(mode)
        model.mark_complete(message["version"], loaded)
        if mode != "record":
            link.send(done=True)
            return model.version
        refused = model.record(self.weight_buckets, self.weight_staging)
        reloaded = None if refused else model.state_digest()
        link.send(refused=refused)
        while (mode := link.recv(ANSWER_SECONDS)["mode"]) != "end":
            if mode == "verify":  # load other weights first, so that an element which replay misses is wrong
                self._load_other_weights()
            else:
                model.replay_steps = None
            same = self._load(mode) == loaded == model.weights_digest() and model.state_digest() == reloaded
            model.digest = loaded if same else None
            link.send(same=same)
        return model.version

    def _load(self, mode: str) -> int | None:
        """Load all buckets as they arrive, by reload or replay. Returns the digest of the weights."""
        arrivals = _arrivals(self.weight_buckets, self.weight_staging, self.weight_link)
        if mode in ("replay", "verify"):
            return self._engine_model().replay(arrivals)
        _reload(self._engine_model(), self.weight_buckets, self.weight_staging, arrivals)
        return self._engine_model().weights_digest()

    def _load_other_weights(self) -> None:
        buckets = self.weight_buckets
        _reload(self._engine_model(), buckets, _OtherWeights(self.device), range(len(buckets)))

    def _close_link(self, error: str | None = None) -> None:
        """Leave the session. With `error`, a waiting trainer raises it."""
        if self.weight_link is not None:
            self.weight_link.close(error)
        self.weight_link = self.weight_staging = None
        if hasattr(self, "weight_model"):
            self.weight_model.replay_steps = None
            self.weight_model.bracket, self.weight_model.written_regions = None, set()  # the next trainer starts over

    def _engine_model(self) -> EngineModel:
        if not hasattr(self, "weight_model"):
            self.weight_model = EngineModel(self)
        return self.weight_model


def _arrivals(buckets: list[list[Piece]], staging: Staging, link: Link) -> Iterator[int]:
    """The receive loop: yields each bucket's number once the bucket has arrived, while the next ones are in flight.

    The caller must have read the bucket, or on a GPU have queued its reads in the current stream, before it asks for
    the next number.
    """
    deadline = time.monotonic() + seconds_allowed(buckets)
    arriving: list[Callable[[], bool]] = []
    for i in range(len(buckets)):
        while len(arriving) < min(i + STAGING_BUFFERS, len(buckets)):
            arriving.append(staging.start(len(arriving)))
        wait_until(arriving[i], [link], deadline)
        yield i
        staging.release(i)


class _OtherWeights(Staging):
    """Stands in for buckets of other weights, all one constant. Takes no memory."""

    def __init__(self, device: torch.device):
        super().__init__([], [])
        self.device = device

    def view(self, i: int, piece: Piece) -> torch.Tensor:
        return torch.full((), 0.5, dtype=piece.dtype, device=self.device).expand(piece.count)


def _reload(model: EngineModel, buckets: list[list[Piece]], staging: Staging, arrivals: Iterator[int]) -> None:
    """Hand the tensors to vLLM's loader, about a bucket at a time.

    They are copied out of the staging buffers first, since the reload bracket keeps them until their layer is complete.
    """
    incomplete, weights, waiting_bytes = {}, [], 0
    for i in arrivals:
        for piece in buckets[i]:
            view = staging.view(i, piece)
            if piece.name not in incomplete:
                incomplete[piece.name] = torch.empty(piece.shape, dtype=piece.dtype, device=view.device)
            whole = incomplete[piece.name]
            whole.view(-1)[piece.begin : piece.begin + piece.count].copy_(view)
            waiting_bytes += piece.nbytes
            if piece.begin + piece.count == whole.numel():
                weights.append((piece.name, incomplete.pop(piece.name)))
            if weights and (piece is buckets[i][-1] or waiting_bytes > staging_buffer_bytes()):
                model.load(weights)
                weights, waiting_bytes = [], 0
    model.finish(complete=True)
