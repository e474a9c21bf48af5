"""What stands for an engine: both ends of a sync without vLLM, models that load as vLLM's do, and engine actors."""

import json
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import zmq
from torch.distributed import TCPStore

from rlhf_utils import ColocateWorkerExtension, LoRAWeight, WorkerExtension, share_tensor
from weight_sync.engine_model import EngineModel
from weight_sync.groups import GlooCommunicator, shared_buffer

# --- The wire ---------------------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.uint8]
SHAPES = [(), (1,), (7,), (3, 5), (64, 64), (1, 4097), (129, 33), (2, 3, 5)]


class Engine:
    """What the sync asks of a vLLM model, over a dictionary of tensors."""

    def __init__(self, dtypes=None, fail_at=None):
        self.dtypes, self.fail_at = dtypes or {}, fail_at
        self.weights, self.version, self.digest, self.expected = {}, 0, None, None

    def preflight(self, metadata):
        problems = [f"{name}: unknown" for name, _, _ in metadata if name.startswith("unknown")]
        return [self.dtypes.get(name, dtype) for name, dtype, _ in metadata], problems

    def reload(self, batches, expected):
        for weights in batches:
            for name, weight in weights:
                if name == self.fail_at:
                    raise ValueError(f"cannot load {name}")
                self.weights[name] = weight

    def record(self, steps, open_staging):
        return "a dictionary has no loader to record"

    def weights_digest(self):
        return 0

    def unchanged(self):
        return self.digest is not None


class Worker(WorkerExtension):
    device = torch.device("cpu")

    def __init__(self, engine, communicator, engine_size=None):
        self.weight_model, self.model_update_group = engine, communicator
        self.weight_place = {"size": engine_size or communicator.world_size - 1, "rank": communicator.rank}


class ColocatedWorker(ColocateWorkerExtension):
    device, rank = torch.device("cpu"), 0

    def __init__(self, engine, handles=None):
        self.weight_model, self.handles = engine, handles

    def receive_weights(self, timeout):
        return super().receive_weights(self.handles, timeout)


def communicator(store, rank, world_size):
    return GlooCommunicator(SimpleNamespace(store=store, rank=rank, world_size=world_size))


def groups(world_size):
    """One communicator a rank, made together."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    made = [None] * world_size

    def join(rank):
        store = server
        if rank:
            store = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=20))
        made[rank] = communicator(store, rank, world_size)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


class Receiving(threading.Thread):
    """A worker that takes part in some syncs, in a thread."""

    def __init__(self, worker, syncs=1):
        super().__init__(daemon=True)
        self.worker, self.syncs, self.error = worker, syncs, None
        self.start()

    def run(self):
        for _ in range(self.syncs):
            self.error = self.error or self.worker.receive_weights(timeout=20).get("error")


class PlainSender(threading.Thread):
    """A trainer that knows vLLM's example protocol and nothing else."""

    def __init__(self, address, tensors, buffer_bytes, heeds_answers=False):
        super().__init__(daemon=True)
        self.heeds_answers = heeds_answers
        self.address, self.tensors, self.buffer_bytes, self.answers = address, tensors, buffer_bytes, []
        self.start()

    def run(self):
        buffer = shared_buffer(self.buffer_bytes, torch.device("cpu"))
        with zmq.Context() as context, context.socket(zmq.REQ) as socket:
            socket.setsockopt(zmq.RCVTIMEO, 20_000)
            socket.bind(self.address)

            def ask(message):
                if not (self.heeds_answers and any(self.answers)):
                    socket.send_pyobj(message)
                    self.answers.append(socket.recv())

            ask(share_tensor(buffer))
            items, offset = [], 0
            for name, tensor in self.tensors.items():
                nbytes = -(-tensor.nbytes // 256) * 256
                if offset + nbytes > self.buffer_bytes:
                    ask(items)
                    items, offset = [], 0
                buffer[offset : offset + tensor.nbytes] = tensor.reshape(-1).view(torch.uint8)
                items.append({"name": name, "shape": tensor.shape, "dtype": tensor.dtype, "offset": offset})
                offset += nbytes
            ask(items)
            ask(None)


def random_tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for dtype in DTYPES:
        for shape in SHAPES:
            bits = torch.randint(0, 200, shape, generator=generator)
            tensors[f"{dtype}{list(shape)}"] = (bits.float() / 16 if dtype.is_floating_point else bits).to(dtype)
    return tensors


def same_bits(a, b):
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.reshape(-1).view(torch.uint8).equal(b.reshape(-1).view(torch.uint8))
    )


class FakeDTensor:
    """A tensor of which a rank holds some rows, as FSDP2 divides them; without a torch.distributed group."""

    def __init__(self, whole, rank, ranks):
        rows = -(-len(whole) // ranks)
        self.rank, self.ranks = rank, ranks
        self._local_tensor = whole[rank * rows : (rank + 1) * rows].clone()
        self.shape, self.dtype, self.device = whole.shape, whole.dtype, whole.device


# --- Models that load as vLLM's do ------------------------------------------------------------------------------------

HIDDEN, VOCABULARY, RANKS = 16, 40, 2
MODEL_SHAPES = {
    "embed": (VOCABULARY, HIDDEN),
    "q": (HIDDEN, HIDDEN),
    "k": (HIDDEN // 2, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "fc": (HIDDEN, 4 * HIDDEN),
    "bias": (4 * HIDDEN,),
    "norm": (HIDDEN,),
}
PADDING = 4  # rows behind each rank's share of the vocabulary


class Model(torch.nn.Module):
    """One rank's shards: rows, fused rows, columns, a transposed weight, and a padded vocabulary."""

    size = RANKS

    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        shapes = {
            "embed": (VOCABULARY // self.size + PADDING, HIDDEN),
            "qk": (HIDDEN // self.size + HIDDEN // 2 // self.size, HIDDEN),
            "o": (HIDDEN, HIDDEN // self.size),
            "fc": (4 * HIDDEN // self.size, HIDDEN),
            "bias": (4 * HIDDEN // self.size,),
            "norm": (HIDDEN,),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape), requires_grad=False))

    def share(self, weight, dim):
        size = weight.size(dim) // self.size
        return weight.narrow(dim, self.rank * size, size)

    def load_weights(self, weights):
        for name, weight in weights:
            getattr(self, f"load_{name}")(weight)

    def load_embed(self, weight):
        share = self.share(weight, 0)
        self.embed[: len(share)].data.copy_(share)
        self.embed[len(share) :].data.fill_(0)

    def load_q(self, weight):
        self.qk.data.narrow(0, 0, HIDDEN // self.size).copy_(self.share(weight, 0))

    def load_k(self, weight):
        self.qk.data.narrow(0, HIDDEN // self.size, HIDDEN // 2 // self.size).copy_(self.share(weight, 0))

    def load_o(self, weight):
        self.o.data.copy_(self.share(weight, 1))

    def load_fc(self, weight):
        self.fc.data.copy_(self.share(weight.t(), 0))

    def load_bias(self, weight):
        self.bias.data.copy_(self.share(weight, 0))

    def load_norm(self, weight):
        self.norm.data.copy_(weight)

    def process_weights(self):
        pass


class ModelEngine(EngineModel):
    """The real preflight, record, replay and digest, over such a model instead of vLLM's."""

    def __init__(self, model):
        worker = SimpleNamespace(get_model=lambda: model, device=torch.device("cpu"))
        worker.model_config = SimpleNamespace(dtype=torch.float32)
        worker.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(mode=0))
        worker.parallel_config = SimpleNamespace(tensor_parallel_size=getattr(model, "size", RANKS))
        super().__init__(worker)
        self.loads = 0
        self.required_elements = {name: parameter.numel() for name, parameter in model.named_parameters()}

    def reload(self, batches, expected):
        self.digest = None
        self.loaded_buffers |= {name for name, *_ in expected} & dict(self.model.named_buffers()).keys()
        for weights in batches:
            self.loads += 1
            self.model.load_weights(weights)
        self.model.process_weights()

    def _loadable_parameters(self):
        return nullcontext(dict(self.model.named_parameters()) | dict(self.model.named_buffers()))


def model_tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in MODEL_SHAPES.items()}


def materialized(weight):
    """The tensor itself, or the merged weight in fp32, in the shape of its base."""
    return weight.merge(weight.base) if isinstance(weight, LoRAWeight) else weight


def adapted(base):
    """This weight with an adapter of whole numbers, whose products no order of summation rounds."""
    rows, columns = base.shape
    return LoRAWeight(base, torch.randint(-4, 5, (3, columns)).float(), torch.randint(-4, 5, (rows, 3)).float(), 0.5)


QUANTIZED = {"qk": (12, HIDDEN), "o": (8, HIDDEN), "fc": (8, HIDDEN)}


class PerRow:
    """Quantizes as vLLM's methods do: the weight that was loaded gives way to its int8 form and its rows' scales."""

    def process_weights_after_loading(self, layer):
        scale = layer.weight.abs().amax(1, keepdim=True) / 127
        layer.weight = torch.nn.Parameter((layer.weight / scale).round().to(torch.int8), requires_grad=False)
        layer.scale = torch.nn.Parameter(scale, requires_grad=False)


class Quantized(torch.nn.Module):
    """One rank's rows of `q` and `k`, fused, of `o` and of `fc`; all quantized, `o` with a bias that is not."""

    size = RANKS

    def __init__(self, rank, method=PerRow):
        super().__init__()
        self.rank = rank
        self.loadable = {f"{name}.weight": torch.zeros(shape) for name, shape in QUANTIZED.items()}
        for name, shape in QUANTIZED.items():
            layer = torch.nn.Module()
            layer.quant_method = method()
            layer.weight = torch.nn.Parameter(torch.zeros(shape), requires_grad=False)
            self.add_module(name, layer)
        self.o.bias = torch.nn.Parameter(torch.zeros(8), requires_grad=False)
        self.process_weights()

    def load_weights(self, weights):
        targets = self.loadable
        places = {"q": targets["qk.weight"][:8], "k": targets["qk.weight"][8:], "bias": self.o.bias.data}
        places |= {"o": targets["o.weight"], "fc": targets["fc.weight"]}
        for name, weight in weights:
            share = len(weight) // RANKS
            places[name].copy_(weight[self.rank * share : (self.rank + 1) * share])

    def process_weights(self):
        for name in QUANTIZED:
            layer, loaded = getattr(self, name), torch.nn.Module()
            loaded.weight = torch.nn.Parameter(self.loadable[f"{name}.weight"], requires_grad=False)
            layer.quant_method.process_weights_after_loading(loaded)
            for kind in ("weight", "scale"):
                if hasattr(layer, kind) and getattr(layer, kind).dtype == getattr(loaded, kind).dtype:
                    getattr(layer, kind).data.copy_(getattr(loaded, kind))
                else:
                    setattr(layer, kind, getattr(loaded, kind))


class QuantizedEngine(ModelEngine):
    def __init__(self, model):
        super().__init__(model)
        self.required_elements = {"o.bias": 8} | {name: tensor.numel() for name, tensor in model.loadable.items()}

    def _context(self):
        return nullcontext()

    def _loadable_parameters(self):
        return nullcontext({"o.bias": self.model.o.bias.data} | self.model.loadable)


def quantizable(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (16, HIDDEN), "k": (8, HIDDEN), "o": (16, HIDDEN), "bias": (16,), "fc": (16, HIDDEN)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


# --- Engines that complete prompts ------------------------------------------------------------------------------------


def session_without_ray():
    """A session that waits for threads alone."""
    from trainer.run.session import RaySession  # not above: processes that only sync start sooner

    return RaySession(SimpleNamespace(ray_address=None, timeout=60), lambda *_: None)


def local_rewards(rewards):
    """`RewardWorkers` of these rewards, which call every function in this process: so it may be the test's own."""
    from trainer.rollouts.reward_workers import RewardWorkers, UserThread, partial

    class LocalRewards(RewardWorkers):
        def _start(self, cls, names):
            return [partial(self._by_thread, UserThread())] * (1000 if cls.__name__ == "CoroutineWorker" else 1)

    return LocalRewards(rewards, session_without_ray())


class Engines:
    """Stands for a group of engine actors. Each has an answer: answer(text, i) is the i-th completion of a prompt with
    this text, a token of weights of this `version`. `calls` are those of their `sample`, in order. While the engines
    are `free`, they answer one call after another."""

    def __init__(self, *answers, version=0):
        self.answers, self.version, self.calls, self.drops = answers, version, [], 0
        self.session = session_without_ray()
        self.free, self.one_by_one = threading.Event(), ThreadPoolExecutor(1)
        self.free.set()
        self.actors = {f"engine {i}": self.actor(i) for i in range(len(answers))}

    def actor(self, number):
        return SimpleNamespace(
            sample=SimpleNamespace(remote=partial(self.sample, number)),
            drop_caches=SimpleNamespace(remote=self.drop_caches),
        )

    def __len__(self):
        return len(self.answers)

    def call(self, phase, method, *args):
        return [getattr(actor, method.__name__).remote(*args).result(timeout=30) for actor in self.actors.values()]

    def sample(self, number, prompts, sampling, images, low_priority=False):
        call = {"engine": number, "prompts": prompts, "sampling": sampling, "images": images}
        call = SimpleNamespace(**call, low_priority=low_priority)
        self.calls.append(call)
        answer = Future()
        answer.future = lambda: answer  # as Ray's ObjectRef has
        self.one_by_one.submit(self.answer, answer, call)
        return answer

    def drop_caches(self):
        self.drops += 1
        return self.one_by_one.submit(bool)

    def answer(self, answer, call):
        self.free.wait()
        try:
            completions = map(self.complete, repeat(call.engine), call.prompts, call.sampling)
            answer.set_result([*chain.from_iterable(completions)])
        except Exception as error:
            answer.set_exception(error)

    def complete(self, number, prompt_ids, options):
        """The completions of a prompt."""
        text = "".join(map(chr, prompt_ids))
        return [self.rollout(prompt_ids, self.answers[number](text, i)) for i in range(options["n"])]

    def rollout(self, prompt_ids, text):
        from trainer.learning.rollout import Rollout

        ids, versions = np.array([7], np.int32), np.array([self.version], np.int32)
        return Rollout(np.array(prompt_ids, np.int32), ids, np.zeros(1, np.float32), text=text, versions=versions)


# --- Prompts, completions and rewards ---------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "What is 1/2 + 1/2?"}]


def write_lines(name, *rows):
    """JSON lines, in the working folder."""
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def group(*texts, prompt="p", **columns):
    """Completions with these texts, without rewards; their ids are their bytes."""
    from trainer.learning.rollout import Rollout
    from trainer.tasks.dataset import Row
    from trainer.tasks.rewards import Group

    return Group(Row(prompt, columns, "row 7"), [Rollout([1], list(text.encode()), [], None, text) for text in texts])


def score(rewards, *groups, steps_done=0):
    """The batch of these groups with the rewards of these functions, in this process, or of these workers."""
    from trainer.tasks.rewards import Batch, Rewards

    workers = local_rewards(rewards) if isinstance(rewards, Rewards) else rewards
    return workers.compute(Batch(list(groups)), steps_done)


def sums(batch):
    return [rollout.reward for rollout in batch.rollouts]
