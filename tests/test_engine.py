"""The engine: its options by hardware, who generates what, and rollouts of a real one.

pytest tests/test_engine.py
"""

import asyncio
import gc
import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from conftest import ROOT, cpu_only, is_alive
from fakes import Engines
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trainer.errors import EngineError, RunError
from trainer.learning.config import SamplingConfig
from trainer.rollouts import engine
from trainer.rollouts.engine import EngineActor
from trainer.rollouts.engine_start import EngineCoreProcess, engine_start, gpus_of
from trainer.rollouts.options import EngineArguments, EngineSetting, llm_options
from trainer.rollouts.rollouts import Rollouts
from trainer.rollouts.sampling import rollouts_of, sampling_options
from trainer.rollouts.teacher import TeacherActor
from trainer.tasks.dataset import Row
from trainer.tasks.task import TaskArguments
from trainer.tasks.tiny_model import MAX_LENGTH, build_tiny_model


@pytest.fixture
def args():
    return EngineArguments()


def test_options_that_vllm_refuses_are_errors_with_its_reason_alone(args, tmp_path):
    from vllm import EngineArgs

    model, unknown = str(build_tiny_model(tmp_path)), "unexpected keyword argument 'max_num_seqz'$"
    with pytest.raises(RunError, match=f"^--engine-args: .* {unknown}"), engine_start():
        EngineArgs(model, max_num_seqz=5)
    refused = "vLLM refuses these options of the engine: Value error, Total number of attention heads (4) must be"
    with pytest.raises(RunError, match=f"^{re.escape(refused)}"), engine_start():
        EngineArgs(model, tensor_parallel_size=3, enforce_eager=True).create_engine_config()


CORE, WORKER = (f"({name} pid=7) ERROR 11-26 13:44:41 [core.py:15] " for name in ("EngineCore", "Worker_TP0"))
LOGS = [
    (
        f"""(EngineCore pid=7) INFO 11-26 13:44:40 [core.py:5] loading
{CORE}EngineCore failed to start.
{CORE}Traceback (most recent call last):
{CORE}  File "core.py", line 1, in run
{CORE}ValueError: too long: decrease
{CORE}  `max_model_len`, see https://vllm.ai
Process EngineCore:""",
        "ValueError: too long: decrease `max_model_len`, see https://vllm.ai",
    ),
    (
        f"""{WORKER}  File "worker.py", line 1, in load
{WORKER}KeyError: 'fc1'
{CORE}  File "core.py", line 1, in run
{CORE}Exception: WorkerProc initialization failed""",
        "KeyError: 'fc1'",
    ),
    (f"{CORE}Exception: WorkerProc initialization failed", "one of vLLM's processes ended"),
]


@pytest.mark.parametrize(("log", "reason"), LOGS, ids=["core", "worker", "killed worker"])
def test_engine_that_cannot_start_says_what_its_processes_raised_first(capfd, log, reason):
    with pytest.raises(EngineError, match=f"^{re.escape(reason)}"), engine_start():
        print(log, file=sys.stderr, flush=True)
        raise RuntimeError("Engine core initialization failed. See root cause above.")


@cpu_only
@pytest.mark.long
def test_run_whose_engine_cannot_start_says_why(script, tmp_path):
    no_memory = '{"kv_cache_memory_bytes": 1000}'
    options = ["--topology", "separate", "--tensor-parallel-size", 1, "--output", "run"]
    run = script("train_grpo.py", "--engine-args", no_memory, *options)
    text = run.finish()
    run.assert_failed_cleanly(text, [])
    reason = "error: the engine cannot start: ValueError: No available memory for the cache blocks.*; more in "
    assert re.search(f"^{reason}{tmp_path}/run/run.log$", text.splitlines()[-1])
    assert not [*run.temporary.glob("pymp-*")]  # with the socket of a fork server


def test_gpu_engine_decodes_by_graphs_unless_told_otherwise(args):
    from vllm.config import CompilationConfig, CUDAGraphMode

    setting = EngineSetting("cuda", sequences=40)
    options, _ = llm_options(args, "model", setting, [1])
    compilation = CompilationConfig(**options["compilation_config"])
    assert compilation.cudagraph_capture_sizes == [1, 2, 4, 8, 16, 24, 32, 40]
    assert compilation.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY
    assert compilation.mode == 0
    assert "enforce_eager" not in options
    args.engine_args = '{"compilation_config": {"mode": 3}}'
    assert llm_options(args, "model", setting, [1])[0]["compilation_config"] == {"mode": 3}
    args.engine_args = '{"enforce_eager": true}'
    assert llm_options(args, "model", setting, [1])[0]["enforce_eager"]


def test_engine_on_a_cpu_takes_as_many_tokens_as_its_kv_cache_holds(args):
    def limit(device):
        return llm_options(args, "model", EngineSetting(device), [1])[0]["max_model_len"]

    assert limit("cpu") == -1  # as tests/test_scripts.py runs it
    assert limit("cuda") is None
    args.max_model_len = 99
    assert limit("cpu") == limit("cuda") == 99


def test_environment_of_an_engine_is_set_in_its_actor_alone(args, monkeypatch):
    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": ""})
    monkeypatch.setattr(engine, "import_vllm", lambda: None)

    async def gpus_of(bundles):
        return ",".join(map(str, bundles))

    monkeypatch.setattr(engine, "gpus_of", gpus_of)
    gpu = llm_options(args, "model", EngineSetting("cuda"), [1, 2])[1]
    cpu = llm_options(args, "model", EngineSetting("cpu"), [0])[1]
    assert gpu == {}
    assert cpu.keys() == {"OMP_NUM_THREADS"}
    assert os.environ == {"CUDA_VISIBLE_DEVICES": ""}
    for own, seen in ([], "1,2"), (["3"], "3"):
        os.environ["CUDA_VISIBLE_DEVICES"] = "".join(own)
        monkeypatch.setattr(engine.ray, "get_gpu_ids", lambda own=own: own)
        asyncio.run(EngineActor(0).prepare("cuda", [1, 2]))
        assert os.environ == {"CUDA_VISIBLE_DEVICES": seen}  # an actor that reserves none sees its workers'
    asyncio.run(EngineActor(0).prepare("cpu", [1, 2]))
    assert os.environ == {"CUDA_VISIBLE_DEVICES": "3", "TORCH_COMPILE_DISABLE": "1"}


@pytest.mark.parametrize(
    ("module", "slow"),
    [
        ("trainer.rollouts.engine", {"transformers", "torch._dynamo", "torch.distributed.tensor", "vllm"}),
        ("train_grpo", {"transformers", "torch._dynamo", "torch.distributed.tensor", "vllm"}),
    ],
)
def test_start_does_not_wait_for_imports_that_it_can_do_without(module, slow):
    code = f"import sys, {module}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not slow & set(run.stdout.split())


def test_an_engine_on_two_nodes_is_an_error(monkeypatch):
    places = {1: ("node a", "3"), 2: ("node a", "0"), 4: ("node b", "0")}

    async def task(bundle):
        return places[bundle]

    def remote(**resources):
        by_bundle = lambda scheduling_strategy: SimpleNamespace(remote=lambda: task(scheduling_strategy))  # noqa: E731
        return lambda function: SimpleNamespace(options=by_bundle)

    fake = SimpleNamespace(remote=remote, util=SimpleNamespace(get_current_placement_group=lambda: "placement"))
    monkeypatch.setattr("trainer.rollouts.engine_start.ray", fake)
    where = "trainer.rollouts.engine_start.PlacementGroupSchedulingStrategy"
    monkeypatch.setattr(where, lambda placement, bundle: bundle)
    assert asyncio.run(gpus_of([1, 2])) == "3,0"
    with pytest.raises(RunError, match="on two nodes"):
        asyncio.run(gpus_of([2, 4]))


LATER = """
import multiprocessing.forkserver, os
from trainer.rollouts.engine_start import EngineCoreContext
multiprocessing.forkserver.ensure_running()
os.environ |= {"VLLM_TEST": "set later", "OMP_NUM_THREADS": "3"}
code = "import os, torch; print(os.environ['VLLM_TEST'], torch.get_num_threads())"
process = EngineCoreContext().Process(target=exec, args=(code,))
process.start()
process.join()
"""


@pytest.mark.slow
def test_a_forked_engine_core_has_the_environment_of_its_start():
    assert subprocess.check_output([sys.executable, "-c", LATER], text=True, cwd=ROOT).endswith("set later 3\n")


PARENT = """
import time
from trainer.rollouts.engine_start import EngineCoreContext
process = EngineCoreContext().Process(target=time.sleep, args=(600,))
process.start()
print(process.pid, flush=True)
time.sleep(600)
"""


def test_a_forked_engine_core_ends_with_its_actor():
    actor = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    core = psutil.Process(int(actor.stdout.readline()))
    assert core.parent().pid != actor.pid
    actor.kill()
    actor.wait()
    deadline = time.monotonic() + 10
    while is_alive(core):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_what_the_fork_server_imports_is_frozen_and_has_read_no_variable_of_an_exact_engine():
    code = "import gc, sys, trainer.rollouts.preload as own; own = own.SamplingParams.for_sampler_warmup()\n"
    code += "print(own.top_k, own.top_p, own.logprobs, gc.isenabled(), gc.get_freeze_count(), *sys.modules)"
    words = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    top_k, top_p, logprobs, enabled, frozen, *imported = words
    assert (top_k, top_p, logprobs) == ("0", "1.0", "5")  # an engine's start compiles no kernel of top-k and top-p
    assert enabled == "True"
    assert int(frozen) > 100_000  # those that are forked do not search it for garbage
    assert "vllm.v1.engine.core" in imported  # what the fork saves
    root = Path(importlib.util.find_spec("vllm").origin).parent
    at_import = [path for path in root.rglob("*.py") if re.search(r"^\w+ = .*BATCH_INVARIANT", path.read_text(), re.M)]
    assert len(at_import) >= 3
    readers = {".".join(path.relative_to(root.parent).with_suffix("").parts) for path in at_import}
    assert not readers & {*imported}


INSPECTED = """
import subprocess
from trainer.rollouts.engine_start import import_vllm
import_vllm()
from vllm.model_executor.models import ModelRegistry
subprocess.run = None
print(ModelRegistry.models["OPTForCausalLM"].inspect_model_cls().architecture)
"""


@pytest.mark.slow
def test_no_third_process_imports_vllm_to_look_at_the_models_class(tmp_path):
    fresh = os.environ | {"VLLM_CACHE_ROOT": str(tmp_path)}  # in which no earlier run has left the answer
    output = subprocess.check_output([sys.executable, "-c", INSPECTED], text=True, cwd=ROOT, env=fresh)
    assert output.endswith("OPTForCausalLM\n")


def spaced_tokenizer():
    """A tokenizer of words with spaces before them, which it drops where a text begins."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(spaces)
    trainer = trainers.BpeTrainer(vocab_size=100, special_tokens=["<unk>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(["the cat sat on the mat , did n't it ? it did ."], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def test_text_of_a_completion_is_what_follows_the_prompt():
    from vllm.logprobs import FlatLogprobs

    tokenizer, args = spaced_tokenizer(), sampled(group_size=2, max_tokens=9)
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    prompt_text, texts = "the cat", [" did n't sit on the mat .", " sat</s> on the mat"]
    ends = [(encode(texts[0]), "length"), ([*encode(texts[1]), encode("mat")[-1]], "stop")]  # a word that ends it
    outputs = [
        SimpleNamespace(
            token_ids=ids,
            finish_reason=reason,
            logprobs=FlatLogprobs(logprobs=[-1.0] * len(ids)),
            weight_versions=[SimpleNamespace(version="3", start=0, end=len(ids))],
            sampling_mask=None,
        )
        for ids, reason in ends
    ]
    asked = []

    async def generate(prompt, params, name, priority):
        asked.append((prompt["prompt_token_ids"], params.logprobs))
        assert params.flat_logprobs
        assert not params.detokenize
        yield SimpleNamespace(prompt_token_ids=encode(prompt_text), outputs=outputs)

    actor = EngineActor(0)
    actor.llm = SimpleNamespace(get_tokenizer=lambda: tokenizer, generate=generate)
    for evaluation in (False, True):
        sampling = [sampling_options(args, 0, 0, 0, evaluation)]
        rollouts = asyncio.run(actor.sample([encode(prompt_text)], sampling))
        assert [(r.text, r.truncated) for r in rollouts] == [(texts[0], True), (" sat on the mat", False)]
        assert [r.versions.tolist() for r in rollouts] == [[3] * len(ids) for ids, _ in ends]
    assert asked == [(encode(prompt_text), 0), (encode(prompt_text), None)]
    assert asyncio.run(actor.sample([], [])) == []  # there are more engines than prompts


def test_of_a_long_prompt_only_the_end_is_decoded(monkeypatch):
    """A conversation's prompt grows with each turn, and each of its completions is decoded with it."""
    tokenizer, decoded = spaced_tokenizer(), []
    decode = tokenizer.batch_decode
    monkeypatch.setattr(
        tokenizer, "batch_decode", lambda rows, **options: decoded.extend(map(len, rows)) or decode(rows, **options)
    )
    prompt, ids = tokenizer.encode("the cat sat " * 500), tokenizer.encode(" on the mat", add_special_tokens=False)
    output = SimpleNamespace(token_ids=ids, finish_reason="length", logprobs=None, weight_versions=[])
    (rollout,) = rollouts_of([SimpleNamespace(prompt_token_ids=prompt, outputs=[output])], tokenizer)
    assert rollout.text == " on the mat"
    assert rollout.prompt_ids.tolist() == prompt
    assert sum(decoded) < 1000 < len(prompt)


def sampled(**changes):
    return SamplingConfig(**{"group_size": 1, "max_tokens": 64} | changes)


def test_engines_share_the_prompts_and_sample_what_one_would():
    """In the order of the data, and the same in every run. All begin at once: in_flight is for what is generated
    ahead."""
    rows = [Row(f"{i}", {}, "", [ord(f"{i}")]) for i in range(5)]
    args = TaskArguments(prompts_per_step=1)
    task = SimpleNamespace(seed=0, tools=None, steps=9, args=args, draw=lambda step: rows)

    def share(count: int) -> tuple[list, list]:
        """What so many engines are asked for, in the order of the calls, and the number of each one's prompts."""
        engines = Engines(*[lambda text, i: text] * count, version=2)
        batch = Rollouts(engines, task, sampled(group_size=2), steps_done=2, rewarded=False).take(3)
        assert [[own.text for own in group.rollouts] for group in batch.groups] == [[row.prompt] * 2 for row in rows]
        assert not any(call.low_priority for call in engines.calls)
        numbers = [call.engine for call in engines.calls]
        asked = [(*call.prompts, *call.sampling) for call in engines.calls]
        return asked, [numbers.count(number) for number in range(count)]

    (one, all_prompts), (two, halves), (seven, parts) = share(1), share(2), share(7)
    assert one == two == seven
    assert [prompt for prompt, _ in one] == [row.prompt_ids for row in rows]
    assert len({options["seed"] for _, options in one}) == 5
    assert (all_prompts, halves, parts) == ([5], [2, 3], [0, 1, 1, 0, 1, 1, 1])


async def generated(llm, prompt: list[int], options: dict) -> list:
    """What vLLM generates with nothing set that is to be fast."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    wanted = {name: options[name] for name in ("n", "temperature", "max_tokens", "logprobs", "seed")}
    params = SamplingParams(**wanted, output_kind=RequestOutputKind.FINAL_ONLY)
    (request,) = [output async for output in llm.generate({"prompt_token_ids": prompt}, params, f"plain {len(prompt)}")]
    return request.outputs


@cpu_only
def test_rollouts_are_what_vllm_generates_and_decodes_by_itself(args, tmp_path, monkeypatch):
    for name in (*llm_options(args, "model", EngineSetting("cpu"), [0])[1], "TORCH_COMPILE_DISABLE"):
        monkeypatch.setenv(name, "")  # so that what the engine sets goes again
    monkeypatch.setattr(engine, "end_with_children", lambda unless: None)  # this process is not an actor
    monkeypatch.setattr(engine, "get_temp_dir", lambda: "none")  # other tests need theirs

    async def run():
        actor = TeacherActor(0)  # of the same weights, so it gives the sampled tokens the same log-probabilities
        await actor.start(str(build_tiny_model(tmp_path)), args, EngineSetting("cpu"), "none", [0])
        try:
            (core,) = actor.llm.engine_core.resources.engine_manager.processes
            assert isinstance(core, EngineCoreProcess)
            assert gc.get_freeze_count()  # collecting garbage is short
            await actor.llm.update_weight_version("7")  # as a sync does
            await compare(actor)
        finally:
            gc.unfreeze()
            await actor.shutdown()

    async def compare(actor):
        sampling = sampled(group_size=32)
        prompts = [actor.llm.get_tokenizer().encode(text) for text in ("Read the sign: ", "Grüße, 世界: ")]
        options, evaluation = (
            [sampling_options(sampling, 0, 1, i) | logprobs for i in range(len(prompts))]
            for logprobs in ({}, {"logprobs": None})
        )
        rollouts = await actor.sample(prompts, options)
        evaluated = await actor.sample(prompts, evaluation)
        assert [r.completion_ids.tolist() for r in evaluated] == [r.completion_ids.tolist() for r in rollouts]
        assert not any(len(rollout.logprobs) for rollout in evaluated)
        plain = [output for each in zip(prompts, options, strict=True) for output in await generated(actor.llm, *each)]
        assert len(rollouts) == len(plain) == 64
        for rollout, output in zip(rollouts, plain, strict=True):
            ids = rollout.completion_ids.tolist()
            assert ids == list(output.token_ids)
            expected = [position[token].logprob for position, token in zip(output.logprobs, ids, strict=True)]
            assert rollout.logprobs == pytest.approx(np.array(expected), abs=1e-5)
            assert rollout.text == output.text
            assert rollout.truncated == (output.finish_reason == "length")
            assert rollout.versions.tolist() == [7] * len(ids)
            arrays = rollout.prompt_ids, rollout.completion_ids, rollout.logprobs, rollout.versions
            assert [array.dtype for array in arrays] == [np.int32, np.int32, np.float32, np.int32]
        assert [rollout.prompt_ids.tolist() for rollout in rollouts] == [ids for ids in prompts for _ in range(32)]
        assert {output.finish_reason for output in plain} == {"stop", "length"}
        scores = await actor.score([(rollout.prompt_ids, rollout.completion_ids) for rollout in rollouts])
        for rollout, of_teacher in zip(rollouts, scores, strict=True):
            assert of_teacher.dtype == np.float32
            assert of_teacher == pytest.approx(rollout.logprobs, abs=1e-5)

        # More tokens than vLLM takes in one batch. A prompt in two parts ended every engine on a CPU.
        prompts = [[2 + (i + j) % 250 for j in range(61)] for i in range(128)]
        assert actor.llm.vllm_config.scheduler_config.max_num_batched_tokens < 128 * 61
        short = [sampling_options(sampled(max_tokens=4), 0, 1, i) for i in range(len(prompts))]
        rollouts = await actor.sample(prompts, short)
        assert [rollout.prompt_ids.tolist() for rollout in rollouts] == prompts
        assert {len(rollout.completion_ids) for rollout in rollouts} <= {1, 2, 3, 4}
        (longest,) = await actor.sample([[5] * (MAX_LENGTH - 1)], [sampling_options(sampled(), 0, 1, 0)])
        assert len(longest.completion_ids) == 1

    asyncio.run(run())
