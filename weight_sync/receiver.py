"""The worker's end of a weight sync."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import ClassVar

import torch

from .buckets import Piece, largest_bucket, plan_buckets, seconds_allowed, wire_of
from .comparison import compare_quantized
from .copies import CopiesDigester
from .engine_model import EngineModel
from .groups import device_id_of
from .link import ANSWER_SECONDS, Link, WeightSyncError, reason_of, recv_all, wait_until
from .regions import Region
from .staging import RANK_NUMBERS, Staging, WiredStaging, compares


class WeightReceiver:
    """The worker's end of a `WeightSender`'s syncs. Subclasses add the channel."""

    weight_place: ClassVar[dict] = {"size": 1, "rank": 0}  # the engine's workers, and this one's rank in the group
    weight_links: Sequence[Link] = ()  # to the trainer's ranks
    weight_staging: Staging | None = None  # for whole buckets, or the trainer's memory
    weight_routing: WiredStaging | None = None  # for what this worker needs

    def check_weights_changed(self) -> bool:
        """Whether this worker serves, bit for bit, what the last completed sync left.

        False before the first sync, after a partial one (some parameters sent, others not), and for a model without
        parameters.
        """
        return self.weight_model.unchanged()

    def report_device_id(self) -> str:
        """The UUID of this worker's GPU, as nvidia-smi prints it; on CPU "cpu:" and the worker's rank in the engine."""
        return device_id_of(torch.device("cpu", self.rank) if self.device.type == "cpu" else self.device)

    def weight_digests(self) -> tuple[int | None, int | None]:
        """Two digests: of the parameters that this worker serves, and of all tensors that its model's layers keep."""
        model = self.weight_model
        return model.weights_digest(buffers=False), model.state_digest()

    def weight_bytes(self) -> tuple[int, int]:
        """The bytes of this worker's weights: as it stores them, and as it would without quantization."""
        model = self.weight_model
        stored = sum(tensor.nbytes for tensor in model.served_tensors())
        return stored, sum(parameter.nbytes for parameter in model.model.parameters())

    def load_parameter(self, name: str, tensor: torch.Tensor) -> None:
        """Take one whole tensor, named as in the checkpoint. The last one completes the next weight version.

        Keeps the tensor itself until then: do not overwrite it. Raises WeightSyncError for a tensor that does not fit,
        and with the last one if vLLM's loader leaves something out.
        """
        model = self.weight_model
        model.collect([(name, tensor)])
        model.load_if_complete()

    def compare_weights(self) -> None:
        """Take part in one `WeightSender.compare_weights`. Errors are raised by the trainer, not here."""
        try:
            if self._messages(ANSWER_SECONDS)[0].get("mode") != "compare":
                raise WeightSyncError("compare_weights needs the tensors of the last sync, and got others")
            buckets, elements = self.weight_buckets, self._staging("compare").elements

            def compare(arrivals: Iterator[int]) -> dict:
                tensors = chain.from_iterable(_batches(buckets, elements, arrivals))
                return compare_quantized(self.weight_model, wire_of(buckets), tensors)

            self._answer(found=self._read("compare", compare))
            if self.weight_routing:
                self.weight_staging = None  # syncs need no whole buckets
        except Exception as error:
            self._close_links(reason_of(error, self.weight_links))

    def _receive(self, timeout: float, connect: Callable[[list[Link]], None]) -> dict:
        """Take part in one sync. Returns {"version": n} or {"error": reason}."""
        try:
            model = self.weight_model
            model.collected = {}
            if not self.weight_links:
                self.weight_links = []
                connect(self.weight_links)
            messages = self._messages(timeout)
            if any("metadata" in message for message in messages):
                messages = self._agree(messages)
            mode, version = messages[0]["mode"], messages[0]["version"]
            model.digest = None  # until all weights are here: this worker may fail before it loads a byte
            loaded = self._load(mode, version)
            model.version, model.digest = version, loaded
            if mode == "record":
                self._record(loaded)
            else:
                self._answer(done=True)
            return {"version": version}
        except Exception as error:
            # Never raise: vLLM stops reading the workers' answers at the first exception and then takes the unread ones
            # for answers to its next call.
            reason = reason_of(error, self.weight_links)
            self._close_links(reason)
            return {"error": reason}

    def _agree(self, messages: list[dict]) -> list[dict]:
        """The handshake with all ranks, which at least one asks for. Returns their messages after it."""
        model, links = self.weight_model, self.weight_links
        metadata, *others = map(self._metadata, links, messages)
        for link, other in zip(links[1:], others, strict=True):
            if other != metadata:
                raise WeightSyncError(f"{link.peer} sends other tensors than {links[0].peer}")
        dtypes, problems = model.preflight([(name, dtype, shape) for name, dtype, shape, _ in metadata])
        self._answer(dtypes=dtypes, problems=problems, version=model.version, **self.weight_place)
        self.weight_handshakes, self.weight_digesters = recv_all(links, ANSWER_SECONDS), []
        model.replay_steps = self.weight_staging = self.weight_routing = None  # free memory before allocating anew
        self.weight_buckets = plan_buckets(self.weight_handshakes[0]["wire"], self.weight_handshakes[0]["bucket_bytes"])
        return recv_all(links, ANSWER_SECONDS)

    def _metadata(self, link: Link, message: dict) -> list | None:
        """What a rank will send. A rank does not say so if only another one's mapped tensors have moved: ask it."""
        if "metadata" not in message and self._staging("reload").is_mapped:
            link.recv(ANSWER_SECONDS)  # the digest that follows
            link.send(again=True)
            message = link.recv(ANSWER_SECONDS)
        return message.get("metadata")

    def _record(self, loaded: int | None) -> None:
        """Record the load that has left weights of digest `loaded`, and prove a replay, as the trainer asks for it."""
        model, links = self.weight_model, self.weight_links
        refused = model.record(self.weight_buckets, self._open_routing)
        reloaded = None if refused else model.state_digest()
        for i, link in enumerate(links):
            regions = [] if refused else self._regions_from(i)
            link.send(refused=refused, regions=[[region.message for region in bucket] for bucket in regions])
        while (mode := (message := recv_all(links, ANSWER_SECONDS)[0])["mode"]) != "end":
            if mode == "verify":  # load other weights first, so that an element which replay misses is wrong
                self._load_other_weights()
            else:
                model.replay_steps = None
            same = self._load(mode) == loaded == model.weights_digest() and model.state_digest() == reloaded
            model.digest = loaded if same else None
            self._answer(same=same)
        if not message["replays"]:
            model.replay_steps = self.weight_routing = None
        self._answer(done=True)

    def _open_routing(self, needs: list[list[Region]]) -> Staging:
        """The staging from which a replay reads, if this worker needs these regions of each bucket."""
        if not all(handshake["routes"] for handshake in self.weight_handshakes):
            return self._staging("reload")
        self.weight_staging = None  # free its memory before allocating anew
        self.weight_routing = WiredStaging.of_worker(
            self.weight_buckets, needs, len(self.weight_links), self.weight_wire
        )
        return self.weight_routing

    def _regions_from(self, i: int) -> list[list[Region]]:
        """What this worker needs of rank `i`, by bucket or, of memory that it maps, what is compared."""
        if self.weight_routing:
            return self.weight_routing.needs[i]
        if not self._staging("reload").is_mapped:
            return []
        compared = [(region, served) for region, served in self.weight_model.compared if region.piece.rank == i]
        served = [(torch.empty(t.shape, dtype=t.dtype, device="meta"), t) for _, t in compared]
        self.weight_digesters.append(CopiesDigester(self.device, served, i * RANK_NUMBERS))
        return [[region for region, _ in compared]]

    def _messages(self, timeout: float) -> list[dict]:
        """The next message of each rank. Skips "prepare", which announces it."""
        messages = recv_all(self.weight_links, timeout)
        return recv_all(self.weight_links, timeout, expected_soon=True) if "prepare" in messages[0] else messages

    def _answer(self, **message) -> None:
        """Send this to every rank."""
        for link in self.weight_links:
            link.send(**message)

    def _staging(self, mode: str) -> Staging:
        """Where the bytes of a pass over the weights arrive. Opens the staging buffers for whole buckets if need be."""
        if self.weight_routing and mode in ("replay", "verify"):
            return self.weight_routing
        if self.weight_staging is None:
            self.weight_staging = self._open_staging()
        return self.weight_staging

    def _load(self, mode: str, version: int = 0) -> int | None:
        """Load everything as it arrives, by reload or replay. Returns the digest of the loaded weights."""
        model, buckets, elements = self.weight_model, self.weight_buckets, self._staging(mode).elements
        if mode in ("replay", "verify"):
            return self._read(mode, model.replay, version)
        self._read(mode, lambda arrivals: model.reload(_batches(buckets, elements, arrivals), model.expected))
        return model.weights_digest()

    def _read(self, mode: str, read: Callable[[Iterator[int]], object], version: int = 0) -> object:
        """Have `read` read all buckets as they arrive, and return its result.

        Raises WeightSyncError if something else arrived than the trainer sent or, of a replay from the trainer's
        memory, if the engine does not serve it.
        """
        staging, total = self._staging(mode), torch.zeros(1, dtype=torch.int64, device=self.device)
        if mode == "replay" and staging.is_mapped:
            difference = "what the engine now serves is not what the trainer has"
            result = read(self._mapped(version, total))
        else:
            difference = "what arrived is not what the trainer sent"
            result = read(_arrivals(staging, self.weight_links, total))
        digests = [message["digest"] for message in recv_all(self.weight_links, ANSWER_SECONDS)]
        if int(torch.tensor(digests).sum()) != int(total):  # both modulo 2**64
            raise WeightSyncError(f"{difference}: their digests differ")
        return result

    def _mapped(self, version: int, total: torch.Tensor) -> Iterator[int]:
        """The only bucket of the trainer's own memory, for a replay. Of some versions, digests what this worker serves
        after it."""
        yield 0
        for digester in self.weight_digesters if compares(version) else ():  # queued behind the copies
            digester.run(total)

    def _load_other_weights(self) -> None:
        """Load tensors of the same shapes that are all one constant, which takes no memory."""

        def constant(piece: Piece) -> torch.Tensor:
            return torch.full((), 0.5, dtype=piece.dtype, device=self.device).expand(piece.count)

        model, buckets = self.weight_model, self.weight_buckets
        model.reload(_batches(buckets, constant, range(len(buckets))), model.expected)

    def _close_links(self, error: str | None = None) -> None:
        """Leave the session. With `error`, waiting trainer ranks raise it."""
        for link in self.weight_links:
            link.close(error)
        self.weight_links = []
        self.weight_staging = self.weight_routing = None
        if "weight_model" in vars(self):
            self.weight_model.replay_steps, self.weight_model.collected = None, {}

    @cached_property
    def weight_model(self) -> EngineModel:
        """This worker's model, which vLLM has not yet loaded when it makes the worker."""
        return EngineModel(self)


def _arrivals(staging: Staging, links: list[Link], total: torch.Tensor) -> Iterator[int]:
    """The receive loop: yields each bucket's number once it has arrived. Others may be in flight meanwhile.

    Adds the digest of what arrived to `total`, int64 [1]. The caller must have read the bucket, or on a GPU have queued
    its reads in the current stream, before it asks for the next number.
    """
    count, deadline = len(staging.buckets), time.monotonic() + seconds_allowed(staging.buckets)
    arriving: list[Callable[[], bool]] = []
    for i in range(count):
        while len(arriving) < min(i + staging.in_flight, count):
            arriving.append(staging.start(len(arriving)))
        wait_until(arriving[i], links, deadline)
        staging.digest(i, total)
        yield i


def _batches(
    buckets: list[list[Piece]], elements: Callable[[Piece], torch.Tensor], arrivals: Iterable[int]
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Whole tensors for vLLM's loader, about a bucket at a time. `elements` returns those of a piece that has arrived.

    They are copied out of the staging buffers, since the reload bracket keeps them until their layer is complete.
    """
    incomplete, missing, weights, waiting_bytes = {}, {}, [], 0
    for i in arrivals:
        for piece in buckets[i]:
            arrived = elements(piece)
            if piece.name not in incomplete:
                incomplete[piece.name] = torch.empty(piece.shape, dtype=piece.dtype, device=arrived.device)
                missing[piece.name] = incomplete[piece.name].numel()
            incomplete[piece.name].view(-1)[piece.begin : piece.begin + piece.count].copy_(arrived)
            missing[piece.name] -= piece.count
            waiting_bytes += piece.nbytes
            if not missing[piece.name]:
                weights.append((piece.name, incomplete.pop(piece.name)))
            if weights and (piece is buckets[i][-1] or waiting_bytes > largest_bucket()):
                yield weights
                weights, waiting_bytes = [], 0
