"""The trainer's end of a weight sync: its session with the workers. sending.py has the two ways in which bytes travel.

The messages between a trainer rank and a worker, after the hello of both (-> to the worker, <- from it):

-> prepare                                 a sync begins: stay awake
-> metadata                                handshake, if the tensors are not those of the last sync: (name, name of the
                                           dtype, shape, bounds) of each
<- dtypes, problems, version, size, rank   what the engine keeps them in; this worker's version, and place in the group
-> wire, bucket_bytes, routes, handle      the metadata with these dtypes; how they travel
-> mode, version                           a pass over the weights (see below)
-> digest                                  of what was sent in it: the worker compares it with its own
<- done | same | found | refused, regions  the worker's answer to the pass
<- again                                   instead: another rank asks for a handshake, so this one must as well
-> mode, replays                           "end" of the first sync, and whether all workers replay; <- done
<- error | closed ->                       this side has failed, for this reason; has ended the session

mode        what a worker does in the pass                            its answer
"record"    reload, and record it as copies: the first sync           refused: why not; regions: what it needs
"verify"    load other weights, replay                                same: whether it is what the reload left
"fallback"  reload, since some worker's replay was not the same       same
"replay"    replay                                                    done
"reload"    reload                                                    done
"compare"   compare its quantized weights with what was sent          found: the errors
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch

from .buckets import seconds_allowed
from .channels import GroupChannel, SharedMemoryChannel
from .comparison import check_errors
from .link import ANSWER_SECONDS, Link, WeightSyncError, reason_of, recv_all
from .lora import LoRAWeight
from .ranks import local_part
from .regions import Region
from .sending import GroupSending, MappedSending
from .weights import Weights, memory_of


@dataclass(frozen=True)
class SyncReport:
    """One completed sync, as the trainer saw it."""

    version: int  # of the engine's weights: 1 after the first sync
    tensors: int  # sent, tied ones once
    nbytes: int  # sent, in the engine's dtypes
    seconds: float  # from the call of `send_weights` to the last worker's answer
    loader: str  # of the next syncs: "replay", or "reload (REASON)"

    @property
    def gigabytes_per_second(self) -> float:
        return self.nbytes / self.seconds / 1e9


class WeightSender:
    """The trainer's end of a weight sync: one for each trainer rank.

    `channel` is the communicator that `stateless_init_process_group` returned to this rank, or this rank's
    `SharedMemoryChannel`. With `replay=False`, every sync is a reload. With a `timeout`, a worker has failed if an
    answer, or one pass over the weights, takes longer than so many seconds. Without, the limit depends on the size of
    the weights. A channel serves one sender: another one on it raises WeightSyncError. A sender keeps the tensors of
    its last sync alive until the next one, or until `close`.
    """

    def __init__(self, channel, replay: bool = True, timeout: float = math.inf):
        if channel is None:
            raise WeightSyncError(
                "this trainer rank has no communicator: each rank calls stateless_init_process_group with its own rank,"
                " and the workers' rank_offset is the number of ranks"
            )
        if getattr(channel, "has_sender", False):
            raise WeightSyncError("this channel has a WeightSender: call that one, or make a new channel on both sides")
        channel.has_sender = True
        maps = isinstance(channel, SharedMemoryChannel)  # workers map memory of the trainer's
        self.channel = channel if maps else GroupChannel(channel)
        self.make_sending = partial(MappedSending if maps else GroupSending, channel)
        self.sending: GroupSending | MappedSending | None = None  # what the last handshake agreed on
        self.replay, self.timeout, self.closed, self.version = replay, timeout, False, 0
        self.links: list[Link] = []  # to the workers
        self.weights: Weights | None = None  # of the last sync
        self.loader = ""  # as in `SyncReport`; "" before the first sync

    @torch.inference_mode(False)  # what one sync allocates, another one writes
    @torch.no_grad()
    def send_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor | LoRAWeight]]) -> SyncReport:
        """Send these weights to every engine worker. Names are those of the Hugging Face checkpoint; any dtype.

        The tensors are read after the iterable has ended, and until this returns. Meanwhile, `receive_weights` runs on
        every worker. Tied tensors travel once. DTensors must be sharded by rows, as FSDP2 shards them; all ranks that
        hold shards, with HSDP those of one replica, call this together, and each sends its own. Raises WeightSyncError
        with the reason of the side that failed. The session is then closed, and a new one needs new channels on both
        sides.
        """
        started = time.perf_counter()
        return self._in_session(named_tensors, lambda: self._sync(started))

    @torch.inference_mode(False)
    @torch.no_grad()
    def compare_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor | LoRAWeight]]) -> int:
        """Send the tensors of the last sync again. Every worker compares its quantized weights with them. Returns how
        many there are, on all workers.

        Runs while `compare_weights` runs on every worker, on every rank that calls `send_weights`. Raises
        WeightSyncError if a weight differs from what was sent by more than rounding to its format explains; a scale
        that is 1 % off does.
        """
        if not (self.loader or self.closed):
            raise WeightSyncError("compare_weights needs a sync before it")
        errors = self._in_session(named_tensors, self._compare, again=True)
        check_errors(errors)
        return len(errors)

    def close(self, error: str | None = None) -> None:
        """End the session, for good. With `error`, waiting workers raise it."""
        if self.closed:
            return
        self.closed = True
        for link in self.links:
            link.close(error)
        self.links, self.weights, self.sending = [], None, None
        self.channel.close(error)

    def _in_session(self, named_tensors: Iterable, send: Callable[[], object], again: bool = False) -> object:
        """Agree with the workers on these tensors, or `again` on those of the last sync, and send them.

        Any error ends the session.
        """
        if self.closed:
            raise WeightSyncError("this session is closed: make a new channel and a new WeightSender")
        try:
            self._tell(prepare=True)  # workers wake up while this side goes through its tensors
            named = dict(named_tensors)
            if again:
                named = {name: named[name] for name in self.weights.names}
            first = next(iter(named.values()), torch.empty(0))
            with torch.cuda.device_of(local_part(getattr(first, "base", first))):
                were_freed = self.weights is not None and self.weights.were_freed()
                if self.loader == "replay" and not again and not were_freed:
                    self.sending.start("replay", self.version + 1)  # a GPU works while this side checks its tensors
                memory = memory_of(named)
                if were_freed or self.weights is None or memory != self.weights.memory:
                    self._agree(Weights(named, memory, self.weights.ranks if self.weights else None))
                return send()
        except BaseException as error:  # KeyboardInterrupt as well: half a session must not be used again
            self.close(reason_of(error))
            raise

    def _agree(self, weights: Weights) -> None:
        """Send these weights from now on. Shake hands, unless they are as the last ones were, only elsewhere."""
        if self.weights and weights.metadata == self.weights.metadata and not self.sending.maps_tensors:
            self.sending.use(weights)
        else:
            self._handshake(weights)
        self.weights = weights

    def _handshake(self, weights: Weights) -> None:
        """The preflight: every worker checks names and shapes, and both ends agree on dtypes and buckets.

        Raises WeightSyncError with all problems.
        """
        self.sending = None  # free its memory before allocating anew
        if not self.links:
            self.channel.accept(self.links, weights.ranks)
            self.links.sort(key=lambda link: link.peer)  # on all ranks in the same order
        self._tell(metadata=weights.metadata)
        answers = recv_all(self.links, min(ANSWER_SECONDS, self.timeout))
        wire = in_engines_dtypes(weights.metadata, answers)
        self.sending = self.make_sending(weights, wire, answers, self.replay)
        self._tell(wire=wire, **self.sending.handshake)
        self.nbytes = sum(piece.nbytes for piece in chain(*self.sending.buckets))
        self.loader = "" if self.replay else "reload (replay is switched off)"
        self.version = max(answer["version"] for answer in answers)  # a failed sync may leave different ones

    def _sync(self, started: float) -> SyncReport:
        self.version += 1
        if self.loader and any("again" in answer for answer in self._transmit(self.loader.partition(" ")[0])):
            self._handshake(self.weights)  # the tensors of another rank have moved in memory
            self.version += 1
        if not self.loader:
            self._first_sync()
        seconds = time.perf_counter() - started
        return SyncReport(self.version, len(self.weights.tensors), self.nbytes, seconds, self.loader)

    def _compare(self) -> dict:
        """What `compare_quantized` returned on all workers, by weight and worker."""
        answers = zip(self.links, self._transmit("compare"), strict=True)
        return {f"{name} of {link.peer}": result for link, each in answers for name, result in each["found"].items()}

    def _first_sync(self) -> None:
        """Reload and record. If every worker could record, verify that replay gives the same bits as the reload did."""
        answers = self._transmit("record")
        if refused := next(filter(None, (answer["refused"] for answer in answers)), None):
            self.loader = f"reload ({refused})"
        else:
            pieces = list(chain(*self.sending.buckets))
            self.sending.route([[[Region.read(m, pieces) for m in b] for b in a["regions"]] for a in answers])
            if all(answer["same"] for answer in self._transmit("verify")):
                self.loader = "replay"
            elif all(answer["same"] for answer in self._transmit("fallback")):
                self.loader = "reload (replay did not reproduce it bit for bit)"
            else:
                raise WeightSyncError("a second reload of the same tensors gave other weights than the first")
        self._tell(mode="end", replays=self.loader == "replay")
        recv_all(self.links, min(ANSWER_SECONDS, self.timeout))

    def _transmit(self, mode: str) -> list[dict]:
        """Have the workers read everything once. Returns their answers."""
        deadline = time.monotonic() + min(seconds_allowed(self.sending.buckets), self.timeout)
        announce = partial(self._tell, mode=mode, version=self.version)
        digests = self.sending.send(mode, self.version, announce, self.links, deadline)
        for link, digest in zip(self.links, digests, strict=True):
            link.send(digest=digest)  # the worker compares it with its own
        return recv_all(self.links, max(0.0, deadline - time.monotonic()), expected_soon=True)

    def _tell(self, **message) -> None:
        """Send this to every worker."""
        for link in self.links:
            link.send(**message)


def in_engines_dtypes(metadata: list[tuple], answers: list[dict]) -> list[tuple]:
    """The metadata with the dtypes that the workers answered. Raises WeightSyncError with all problems."""
    problems, wire = sorted({problem for answer in answers for problem in answer["problems"]}), []
    workers_reject = bool(problems)  # which can leave a tensor without a dtype
    for i, (name, _, shape, bounds) in enumerate(metadata):
        dtypes = sorted({answer["dtypes"][i] for answer in answers} - {None})  # None: not on that worker
        if not dtypes and not workers_reject:
            problems.append(f"{name} {list(shape)}: the engine's loader ignores it")
        if len(dtypes) > 1:
            problems.append(f"{name}: workers keep it in different dtypes, {dtypes}")
        wire.append((name, *dtypes[:1], shape, bounds))
    if problems:
        raise WeightSyncError("preflight, nothing was sent:\n  " + "\n  ".join(problems))
    return wire
