"""The link between trainer ranks and engines: how they connect, and a sync over it. All doors share this."""

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from rlhf_utils import SharedMemoryChannel, SyncReport, WeightSender, stateless_init_process_group
from weight_sync.link import address_towards

from ..errors import RunError
from ..learning.grpo import GRPOLearner
from ..learning.policy import Proof
from ..learning.rollout import Rollout
from ..rollouts.engine import EngineActor
from ..run.actors import ActorGroup, LearnerActor, LearnerProtocol
from ..run.folder import RunFolder
from ..run.models import Models

MAX_MISMATCH = {"cpu": 1e-5, "cuda": 0.02}  # mean |Δ logprob| that rounding explains, in fp32 and bf16
# The same if int8 or FP8 explains it: in FP8, random weights of Qwen2.5's shapes had up to 0.095. This bound cannot
# prove that a sync left no weight behind; `compare_weights` can, and does after the first sync. So the first batch may
# have more, which is the model's own: SmolLM2-135M-Instruct had 0.164 in FP8, and 0.212 in int8.
MAX_QUANTIZED_MISMATCH, FIRST_QUANTIZED_MISMATCH = 0.1, 0.5


def proof_of(engine, device: str) -> Proof:
    """What the mismatch with engines of these arguments means."""
    if engine.quantization:
        return Proof(MAX_QUANTIZED_MISMATCH, engine.exact, engine.tensor_parallel_size, FIRST_QUANTIZED_MISMATCH)
    return Proof(MAX_MISMATCH[device], engine.exact, engine.tensor_parallel_size)


class SendingActor(LearnerActor):
    """A Ray actor around one rank of a policy, which sends what it has of the weights."""

    def init_weight_update_group(self, address: str, port: int, world_size: int) -> None:
        """Join the group of all ranks and workers, to send by NCCL (gloo)."""
        group = stateless_init_process_group(address, port, self.rank, world_size, self.model.device)
        self.sender = WeightSender(group)

    def open_channel(self, tensor_parallel_size: int, workers: int) -> dict[str, str]:
        """Open the channel to so many workers on this device, which read its memory. Returns their handle, by device
        id."""
        device = self.model.device.type  # on CPU, which all ranks share, the worker's rank is the index
        index = 0 if device == "cuda" else self.rank % tensor_parallel_size
        channel = SharedMemoryChannel(torch.device(device, index), workers)
        self.sender = WeightSender(channel)
        return channel.handles

    def send_weights(self) -> SyncReport:
        return self.sender.send_weights(self.model.named_tensors().items())

    def compare_weights(self) -> int:
        return self.sender.compare_weights(self.model.named_tensors().items())

    # To servers, each of which has a sender of its own, and may come and go

    def init_server_group(self, name: str, host: str, world_size: int, timeout: float) -> tuple[str, int]:
        """Begin to open a group with the server of this name. Returns the address where its workers join."""
        address, port = address_towards(host), self.address()[1]

        def join() -> WeightSender:
            group = stateless_init_process_group(address, port, 0, world_size, self.model.device)
            return WeightSender(group, timeout=timeout)

        self.set_sender(name, join)  # in a thread, since `join` waits for the workers
        return address, port

    def set_sender(self, name: str, make_sender: Callable[[], WeightSender]) -> None:
        """From now on, the server of this name gets its weights by the sender that this function makes in a thread."""
        if not hasattr(self, "senders"):
            self.senders, self.threads = {}, ThreadPoolExecutor(64)
        if name in self.senders:
            self.threads.submit(lambda sender: sender.result().close(), self.senders.pop(name))
        self.senders[name] = self.threads.submit(make_sender)

    def send_to_servers(self, names: list[str], timeout: float) -> tuple[int, dict[str, SyncReport | str]]:
        """Send to these servers at the same time. Returns the version of the weights and, for each server, a report or
        the reason why there is none."""
        weights = list(self.model.named_tensors().items())

        def send(name: str) -> SyncReport | str:
            try:
                return self.senders[name].result(timeout).send_weights(weights)
            except (torch.OutOfMemoryError, torch.AcceleratorError):  # the trainer's own: no server is to blame
                raise
            except (RuntimeError, TimeoutError) as error:  # RuntimeError: WeightSyncError, and gloo's
                return str(error) or "its workers did not join their group"

        return self.learner.step, dict(zip(names, self.threads.map(send, names), strict=True))


class TrainerActor(SendingActor):
    """A Ray actor around one rank of a learner, which a door's subclass names."""

    learner_class: type[GRPOLearner]

    def make_learner(self, models: Models, args, device: torch.device, proof: Proof) -> LearnerProtocol:
        """The learner of this rank, on this device. It may be your own."""
        options = {"initial": models.initial, "proof": proof}
        return self.learner_class(models.loaded, args, device, args.run.seed, args.run.steps, **options)

    def load(
        self, address: tuple[str, int], ranks: int, models: Models, args, device: str, frees_memory: bool
    ) -> tuple[int, str]:
        """Join the other ranks, and load. Returns the number of steps done, and lines to print about the learner."""
        torch_device = self.join(address, ranks, device, args.engine.exact)
        self.learner = self.make_learner(models, args, torch_device, proof_of(args.engine, device))
        resumed = self.resume(models.checkpoint)
        if frees_memory:
            self.learner.release_memory()  # loading held whole tensors
            gc.freeze()  # what is here now stays: `release_memory` need not look through it at every step
        return resumed

    def learn(self, rollouts: list[Rollout], proof_rollouts: list[Rollout], frees_memory: bool) -> dict[str, float]:
        metrics = self.learner.learn(rollouts, proof_rollouts)
        if frees_memory:
            self.learner.release_memory()  # for the engine
        return metrics


def connect_by_group(trainers: ActorGroup, engines: ActorGroup, tensor_parallel_size: int) -> None:
    """Join the trainer's ranks and, after them, the workers of all engines in one group."""
    address = trainers.call("connecting", LearnerActor.address)[0]
    world_size = len(trainers) + len(engines) * tensor_parallel_size
    rank_offsets = [(len(trainers) + i * tensor_parallel_size,) for i in range(len(engines))]
    joining = trainers.begin(SendingActor.init_weight_update_group, *address, world_size)
    following = engines.begin(EngineActor.init_weight_update_group, *address, world_size, each=rank_offsets)
    trainers.session.wait("connecting", joining, following)


def connect_by_memory(run: RunFolder, trainers: ActorGroup, engines: ActorGroup, workers: int) -> list[tuple]:
    """Check that each trainer rank shares its device with so many workers, print who is where, and open channels.

    Returns for each engine the handles of the ranks beside its workers, by device id, as a tuple of one.
    """
    devices = engines.call("connecting", EngineActor.device_ids)  # of each engine's workers
    tp = len(devices[0])
    opened = trainers.call("connecting", SendingActor.open_channel, tp, workers)
    ranks = [(rank, *handle) for rank, handles in enumerate(opened) for handle in handles.items()]
    arguments, lines = [], [f"{'device':40}  trainer  engine  worker"]
    for i, device_ids in enumerate(devices):
        first = i * tp % len(ranks)  # several engines may be on the same devices
        beside = ranks[first : first + tp]
        handles = {device_id: path for _, device_id, path in beside}
        if handles.keys() != set(device_ids):
            raise RunError(f"engine {i} runs on {sorted(device_ids)}, and its trainer ranks on {sorted(handles)}")
        lines += [f"{device:40}  {rank:7}  {i:6}  {device_ids.index(device):6}" for rank, device, _ in beside]
        arguments.append((handles,))
    run.say("\n".join(lines))
    return arguments


def sync(trainers: ActorGroup, engines: ActorGroup, version: int, each: list[tuple]) -> SyncReport:
    """Send the trainer's weights, of this version, to the engines. `each` has what the `receive_weights` of each one's
    workers takes."""
    receiving = engines.begin(EngineActor.receive_weights, version, each=each)
    reports, served = trainers.session.wait("syncing", trainers.begin(SendingActor.send_weights), receiving)
    if not all(served):
        raise RunError(f"after sync {reports[0].version}, an engine does not serve what was sent")
    return reports[0]


def say_first_sync(run: RunFolder, report: SyncReport, engines: ActorGroup) -> None:
    """Print what the first sync has sent, and whether the engines had it already."""
    same = all(engines.call("comparing", EngineActor.serves_checkpoint))
    run.say(
        f"first sync: {report.tensors} tensors, {report.nbytes / 1e9:.3f} GB, {'' if same else 'not '}bit for bit"
        f" what the engines had loaded from disk; from now on by {report.loader}"
    )
