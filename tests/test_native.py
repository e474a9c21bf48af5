"""rlhf_nccl.py and the transport under it: vLLM's native weight transfer, and what it makes of faults.

pytest tests/test_native.py            functions, and the transport without the script
pytest tests/test_native.py -m slow    runs of the script
"""

import functools
import inspect
import os
import re
import time
from argparse import Namespace
from pathlib import Path

import pytest
import ray
import torch
from conftest import arguments_of, cpu_only, metrics_of
from learners import build
from pair import engine_environment, stop
from safetensors.torch import load_file

import rlhf_nccl
from rlhf_utils import WeightSyncError
from trainer.errors import MismatchError
from trainer.learning.grpo import GRPOConfig, GRPOLearner
from trainer.learning.rollout import Rollout
from trainer.rollouts import native_transfer
from trainer.rollouts.native_transfer import NativeSender, transfer_init_info, weight_source
from trainer.tasks.tiny_model import build_tiny_model

DEAD_SIDE_SECONDS = 30
BIAS, WEIGHT = "model.decoder.layers.0.fc1.bias", "model.decoder.layers.1.self_attn.q_proj.weight"


# --- The script, as a user runs it ------------------------------------------------------------------------------------


REWARD = """
from trainer.tasks.uppercase import uppercase

def reward(completions, **_):
    with open("calls", "a") as calls:
        calls.write(".")
    return uppercase(completions)
"""


@cpu_only
@pytest.mark.slow
def test_dummy_engine_gets_the_trainers_weights_and_learns(script, tmp_path):
    (tmp_path / "mine.py").write_text(REWARD)
    text = script("rlhf_nccl.py", "--reward", "mine:reward", "--output", "run").finish()
    assert text.splitlines()[-1].startswith("OK: reward "), text
    assert (tmp_path / "calls").read_text() == "." * 8 * 31  # of 30 steps and the last proof, no nonsense before them
    assert re.search(r"^(\d+) of \1 greedy tokens are the trainer's own", text, re.MULTILINE)
    metrics = metrics_of(tmp_path / "run")
    assert [row["step"] for row in metrics] == list(range(1, 31))
    assert metrics[0]["reward/mean"] < 0.25
    assert metrics[-1]["reward/mean"] > 0.75
    assert max(row["logprobs/mismatch"] for row in metrics) < 1e-5


@cpu_only
@pytest.mark.long
def test_mixture_of_experts_gets_the_trainers_weights(script, tmp_path):
    build("Qwen3Moe", tmp_path / "model")
    text = script("rlhf_nccl.py", "--model", "model", "--steps", 2, "--output", "run").finish()
    assert text.splitlines()[-1].startswith("OK: "), text


@pytest.fixture
def fault(tmp_path, monkeypatch):
    """The file that causes a fault in the engine of a script, by a plugin that vLLM finds on PYTHONPATH."""
    plugin = tmp_path / "plugin" / "fault-1.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: fault\nVersion: 1\n")
    (plugin / "entry_points.txt").write_text("[vllm.general_plugins]\nfault = engine_fault:register\n")
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, str(plugin.parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("ENGINE_FAULT", str(tmp_path / "fault"))
    return tmp_path / "fault"


@cpu_only
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        pytest.param(
            "raise",
            r"the weight transfer is stuck: .* run\.log has what the engine's processes logged",
            id="raises",
            marks=pytest.mark.long,
        ),
        pytest.param("hang", "the engine died", id="killed", marks=pytest.mark.long),
    ],
)
def test_worker_that_fails_in_mid_transfer_ends_the_run(script, tmp_path, fault, kind, message):
    run = script("rlhf_nccl.py", "--steps", 10_000, "--output", "run")
    run.wait_for_step(tmp_path / "run", 2)
    family = run.descendants()
    fault.write_text(kind)
    failed = time.monotonic()
    if kind == "hang":
        while not fault.with_name("hanging").exists():
            time.sleep(0.05)
        failed = time.monotonic()
        run.descendant("VLLM::Worker_TP1").kill()
    text = run.finish(60)
    assert time.monotonic() - failed < DEAD_SIDE_SECONDS
    print(text)
    run.assert_failed_cleanly(text, family)
    assert re.search(message, text.splitlines()[-1])
    if kind == "raise":
        assert 'raise ValueError("this worker cannot load")' in (tmp_path / "run" / "run.log").read_text()


def test_what_needs_a_gpu_says_so(monkeypatch):
    monkeypatch.setattr(rlhf_nccl.ray, "cluster_resources", lambda: {"CPU": 2.0})
    with pytest.raises(rlhf_nccl.RunError, match="--backend ipc and --quantization fp8 want a GPU"):
        rlhf_nccl.place(arguments_of(rlhf_nccl, quantization="fp8"))


@pytest.mark.parametrize(
    ("backend", "workers", "message"),
    [("nccl", None, r"wants 3 GPUs.*there\s+are 1.*--backend ipc"), ("ipc", 2, "--tensor-parallel-size must be 1")],
)
def test_one_gpu(monkeypatch, backend, workers, message):
    monkeypatch.setattr(rlhf_nccl.ray, "cluster_resources", lambda: {"GPU": 1.0})
    with pytest.raises(rlhf_nccl.RunError, match=message):
        rlhf_nccl.place(arguments_of(rlhf_nccl, backend=backend, tensor_parallel_size=workers))


# --- The transport and the source, in this process --------------------------------------------------------------------


class Pair:
    """A trainer and an engine with one worker. It is the client as well, by the four methods that vLLM calls."""

    def __init__(self, model: Path):
        from vllm import LLM

        with engine_environment(workers=1):
            self.llm = LLM(
                model=str(model),
                dtype="float32",
                enforce_eager=True,
                distributed_executor_backend="mp",
                kv_cache_memory_bytes=128 << 20,
                logprobs_mode="processed_logprobs",
                load_format="dummy",
                weight_transfer_config={"backend": "gloo"},
                worker_extension_cls="trainer.rollouts.native_transfer.GlooTransferWorker",
            )
        config = GRPOConfig(group_size=2, max_tokens=8, max_mismatch=1e-5)
        self.learner = GRPOLearner(str(model), config, torch.device("cpu"))

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self.llm.start_weight_update()

    def update_weights(self, update_info: dict) -> None:
        self.buckets += 1
        self.llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.llm.finish_weight_update("7")

    def sync(self, source, buffer_bytes: int = 1 << 20) -> None:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        init_info = transfer_init_info("gloo", "127.0.0.1", 2, buffer_bytes)
        self.buckets = 0
        WeightTransferTrainerFactory.trainer_init(init_info, client=self, source=source).send_weights()
        assert self.llm.reset_prefix_cache()

    def rollouts(self, temperature: float) -> list[Rollout]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=temperature, seed=1, max_tokens=8, logprobs=0)
        rollouts = []
        for request in self.llm.generate(["Hello, my name is", "a"], params, use_tqdm=False):
            ids = list(request.outputs[0].token_ids)
            logprobs = [row[token].logprob for row, token in zip(request.outputs[0].logprobs, ids, strict=True)]
            rollouts.append(Rollout(list(request.prompt_token_ids), ids, logprobs, 0.0))
        return rollouts

    def mismatch(self) -> float:
        """Raises MismatchError if the engine does not serve the trainer's weights."""
        return self.learner.mismatch(self.rollouts(temperature=1))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    pair = Pair(build_tiny_model(tmp_path_factory.mktemp("model")))
    yield pair
    stop(pair.llm)


@pytest.fixture
def trainer():
    """The script's trainer actor, but for what needs an engine."""
    trainer = rlhf_nccl.Trainer(0)
    trainer.precision = "cpu"
    return trainer


@cpu_only
def test_source_that_disagrees_with_the_engine(pair, trainer):
    trainer.learner, trainer.model = pair.learner, pair.learner.model
    module, named_tensors = pair.learner.model.module, pair.learner.model.named_tensors
    tensors = dict(module.named_parameters())
    with pytest.raises(MismatchError):
        pair.mismatch()  # dummy weights
    with pytest.raises(MismatchError):
        trainer.prove_greedy(pair.rollouts(temperature=0))
    pair.sync(weight_source(named_tensors, torch.float32), buffer_bytes=1 << 18)  # the size of the largest tensor
    assert pair.buckets > 4
    assert pair.mismatch() < 1e-5
    assert trainer.prove_greedy(pair.rollouts(temperature=0)).startswith("16 of 16 greedy tokens")
    assert pair.llm.get_weight_version() == "7"

    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_((parameter + 0.02 * torch.randn_like(parameter)).bfloat16())
    pair.sync(weight_source(named_tensors, torch.bfloat16))
    assert pair.buckets == 1
    assert pair.mismatch() < 1e-5

    path, rank = module.name_or_path, {"lora_rank": 4, "max_mismatch": 1e-5}
    adapted = GRPOLearner(path, GRPOConfig(group_size=2, max_tokens=8, **rank), torch.device("cpu"))
    for name, parameter in adapted.model.module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    pair.sync(weight_source(adapted.model.named_tensors, torch.float32))
    assert adapted.mismatch(pair.rollouts(temperature=1)) < 1e-5
    with pytest.raises(MismatchError):
        pair.mismatch()

    with torch.no_grad():
        tensors[WEIGHT].mul_(2)
    del tensors[WEIGHT]
    pair.sync(weight_source(lambda: tensors, torch.float32))  # vLLM has nothing to say about a missing name
    with pytest.raises(MismatchError):
        pair.mismatch()
    for name, tensor, message in [
        ("model.decoder.layers.0.fc9.bias", torch.ones(3), "There is no module or parameter named"),
        (BIAS, torch.ones(7), "exceeds dimension size"),
        (WEIGHT, torch.ones(128, 64), "AssertionError"),
    ]:
        with pytest.raises(Exception, match=re.escape(f"{name} {list(tensor.shape)}: ") + f".*{message}"):
            pair.sync(weight_source(lambda sent={name: tensor}: sent, torch.float32))


@pytest.mark.parametrize("precision", ["cpu", "fp8"])
def test_nan_is_no_greedy_token(trainer, precision):
    logits, targets = torch.zeros(2, 5), torch.tensor([3, 4])
    trainer.model = Namespace(score_tokens=lambda *args: [rlhf_nccl.greedy_gaps(logits, targets)[0][None]])
    trainer.precision, rollouts = precision, [Rollout([1, 2], [3, 4], [0.0, 0.0], 0.0)]
    assert trainer.prove_greedy(rollouts) == "2 of 2 greedy tokens are the trainer's own"
    logits[1] = torch.nan
    with pytest.raises(MismatchError, match="by logits of nan"):
        trainer.prove_greedy(rollouts)


@pytest.mark.parametrize("architecture", ["Mixtral", "Qwen3Moe", "OPT"])
def test_source_has_the_checkpoints_names(tmp_path, architecture):
    build(architecture, tmp_path)
    learner = GRPOLearner(str(tmp_path), GRPOConfig(group_size=2, max_tokens=8), torch.device("cpu"))
    saved = load_file(tmp_path / "model.safetensors")
    source = weight_source(learner.model.named_tensors, torch.bfloat16)
    metadata = source.metadata() if callable(source.metadata) else source.metadata
    assert {(meta.name, meta.shape) for meta in metadata} == {(name, tuple(t.shape)) for name, t in saved.items()}
    assert all(tensor.equal(saved[name].bfloat16()) for name, tensor in source)


# --- The sender, with a transport that does what a test says ----------------------------------------------------------

TENSORS = {"small": torch.ones(3), "large": torch.ones(1000)}


class Transport:
    """vLLM's trainer side and its communicator, and the engine."""

    disabled = False

    def __init__(self, monkeypatch):
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        def trainer_init(init_info, *, client, source):
            self.init_info, self.model_update_group = init_info, self
            return self

        monkeypatch.setattr(WeightTransferTrainerFactory, "trainer_init", trainer_init)

    def send_weights(self) -> None:
        pass

    def call(self, method: str, *args) -> None:
        pass

    def sender(self, backend: str = "nccl") -> NativeSender:
        return NativeSender(self.call, lambda: TENSORS, torch.bfloat16, backend, "127.0.0.1", 3)


@pytest.fixture
def transport(monkeypatch):
    return Transport(monkeypatch)


def test_pack_holds_the_largest_tensor(transport, monkeypatch):
    monkeypatch.setattr(native_transfer, "PACK_BYTES", 100)
    transport.sender()
    assert transport.init_info.packed_buffer_size_bytes == 2000
    monkeypatch.setattr(native_transfer, "PACK_BYTES", 1 << 30)
    transport.sender()
    assert transport.init_info.packed_buffer_size_bytes == 2006


def test_disabled_communicator_is_refused(transport):
    transport.disabled = True
    with pytest.raises(WeightSyncError, match="disabled NCCL communicator, which would broadcast nothing"):
        transport.sender()
    transport.sender("ipc")  # has none


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_that_ipc_cannot_share_is_refused(transport, monkeypatch, name):
    monkeypatch.setenv(name, "expandable_segments:True")
    with pytest.raises(WeightSyncError, match=f"{name} has expandable_segments:True"):
        transport.sender("ipc")
    transport.sender("nccl")


def test_wait_for_vllm_ends(transport, monkeypatch):
    sender = transport.sender()
    report = sender.send_weights()  # a transfer that does not finish leaves the engine at the version before this one
    assert (report.nbytes, report.version) == (2006, 1)
    transport.send_weights = functools.partial(int, "of the trainer's own")
    with pytest.raises(ValueError, match="of the trainer's own"):
        sender.send_weights()

    transport.send_weights = functools.partial(time.sleep, 1.5)
    monkeypatch.setattr(native_transfer, "STUCK_SECONDS", 0.5)
    with pytest.raises(WeightSyncError, match=r"nothing has moved for 0\.5 s"):
        transport.sender().send_weights()
    monkeypatch.setattr(native_transfer, "SLOWEST_BYTES_PER_SECOND", 500)
    transport.sender().send_weights()  # a slow network takes 4 s for what is on the wire

    for call in (functools.partial(time.sleep, 1.5), functools.partial(int, "the connection closed")):
        transport.send_weights, sender = call, transport.sender()
        sender.engine_error.set_exception(WeightSyncError("the engine died"))
        with pytest.raises(WeightSyncError, match="the engine died"):
            sender.send_weights()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ray.exceptions.RayTaskError("update", "Traceback ...", ValueError("the worker's")), "run.log: the worker's"),
        (ray.exceptions.ActorDiedError(), "the engine died: one of vLLM's processes ended"),
        (RuntimeError("EngineDeadError: it ended"), "the engine died: one of vLLM's processes ended"),
        (ray.exceptions.RaySystemError("no cause"), "no cause"),
        (ray.exceptions.GetTimeoutError("too late"), "run.log: too late"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_first_error_of_the_engine_ends_the_sync(transport, error, message):
    def call(method: str, *args) -> None:
        raise error if method == "start_weight_update" else ValueError("that follows from it")

    def send_weights() -> None:
        with pytest.raises(type(error)):
            sender.start_weight_update()
        time.sleep(1.5)

    transport.call, transport.send_weights = call, send_weights
    sender = transport.sender()
    with pytest.raises(WeightSyncError, match=message):
        sender.send_weights()
    with pytest.raises(ValueError, match="that follows from it"):
        sender.finish_weight_update()


# --- Versions of vLLM -------------------------------------------------------------------------------------------------


@pytest.fixture
def later_source(monkeypatch):
    """What vLLM 0.33 asks of a source and 0.32 does not."""
    from vllm.distributed import weight_transfer

    class LaterSource:
        def __init_subclass__(cls):
            if not isinstance(cls.__dict__["metadata"], functools.cached_property):
                raise TypeError("metadata must be a cached_property")

        def iter_full(self):
            raise NotImplementedError

    monkeypatch.setattr(weight_transfer, "WeightSource", LaterSource)


def test_source_is_what_either_version_takes(later_source):
    source = weight_source(lambda: TENSORS, torch.bfloat16)
    assert [(meta.name, meta.shape) for meta in source.metadata] == [("small", (3,)), ("large", (1000,))]
    sent = [(name, tensor.dtype) for name, tensor in source.iter_full()]
    assert sent == [("small", torch.bfloat16), ("large", torch.bfloat16)]
    assert transfer_init_info("nccl", "127.0.0.1", 3, 1).packed_num_buffers == 2


def test_one_buffer_where_two_are_not_kept_apart(monkeypatch):
    from vllm.distributed import weight_transfer

    monkeypatch.setattr(weight_transfer, "WeightSource", object)  # without vLLM 0.33's iter_full
    assert transfer_init_info("nccl", "127.0.0.1", 3, 1).packed_num_buffers == 1


def test_this_vllm_has_the_api_that_is_used():
    """A contract with vLLM: all that rlhf_nccl.py and native_transfer.py call, with as many arguments."""
    from vllm import LLM
    from vllm.distributed import weight_transfer
    from vllm.distributed.weight_transfer import packed_tensor
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
    from vllm.model_executor.model_loader import reload

    for owner, name, arguments in [
        (LLM, "init_weight_transfer_engine", 2),
        (LLM, "start_weight_update", 1),
        (LLM, "update_weights", 2),
        (LLM, "finish_weight_update", 2),
        (LLM, "get_weight_version", 1),
        (LLM, "sleep", 2),
        (LLM, "wake_up", 2),
        (weight_transfer.WeightTransferEngineFactory, "register_engine", 2),
        (weight_transfer.WeightTransferTrainerFactory, "register_engine", 2),
        (weight_transfer, "ParamMeta", 3),
        (packed_tensor, "pack_tensors", 3),
        (packed_tensor, "unpack_tensor", 5),
        (reload, "initialize_layerwise_reload", 1),
        (reload, "finalize_layerwise_reload", 2),
    ]:
        inspect.signature(getattr(owner, name)).bind(*range(arguments))
    trainer_init = weight_transfer.WeightTransferTrainerFactory.trainer_init
    inspect.signature(trainer_init).bind(None, client=None, source=weight_transfer.WeightSource)
    inspect.signature(EngineArgs).bind(weight_transfer_config=None)
    assert "fp8_per_tensor" in QUANTIZATION_METHODS


@pytest.mark.parametrize("backend", ["nccl", "ipc", "gloo"])
def test_transfer_is_packed_in_buffers_of_the_size_asked_for(backend):
    init_info = transfer_init_info(backend, "127.0.0.1", 3, 12_345)
    assert (init_info.backend, init_info.packed_buffer_size_bytes) == (backend, 12_345)
    assert backend == "gloo" or init_info.packed
