"""What the engine actors of all scripts have in common: options by hardware, who generates what, and rollouts of a real
engine.

pytest tests/test_engine.py
"""

import os
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import cpu_only
from pair import CORE_IN_PROCESS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlhf_utils import WeightSyncError
from trainer.errors import EngineError, RunError
from trainer.learning.sampling import SamplingConfig
from trainer.rollouts import engine
from trainer.rollouts.engine import EngineActor, EngineArguments, complete, engine_start, llm_options
from trainer.rollouts.teacher import TeacherActor
from trainer.tasks.dataset import Row
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
    ("usage: api_server.py\napi_server.py: error: unrecognized arguments: --a", "api_server.py: error: unrecognized"),
]


@pytest.mark.parametrize(("log", "reason"), LOGS, ids=["core", "worker", "killed worker", "server"])
def test_engine_that_cannot_start_says_what_its_processes_raised_first(capfd, log, reason):
    with pytest.raises(EngineError, match=f"^{re.escape(reason)}"), engine_start():
        print(log, file=sys.stderr, flush=True)
        raise RuntimeError("Engine core initialization failed. See root cause above.")


@cpu_only
@pytest.mark.slow
def test_run_whose_engine_cannot_start_says_why(script, tmp_path):
    no_memory = '{"kv_cache_memory_bytes": 1000}'
    run = script("rlhf.py", "--engine-args", no_memory, "--tensor-parallel-size", 1, "--output", "run")
    text = run.finish()
    run.assert_failed_cleanly(text, [])
    reason = "error: the engine cannot start: ValueError: No available memory for the cache blocks.*; more in "
    assert re.search(f"^{reason}{tmp_path}/run/run.log$", text.splitlines()[-1])


def test_gpu_engine_decodes_by_graphs_unless_told_otherwise(args):
    from vllm.config import CompilationConfig, CUDAGraphMode

    options, _ = llm_options(args, "cuda", [1])
    compilation = CompilationConfig(**options["compilation_config"])
    assert compilation.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY
    assert compilation.mode == 0
    assert "enforce_eager" not in options
    args.engine_args = '{"compilation_config": {"mode": 3}}'
    assert llm_options(args, "cuda", [1])[0]["compilation_config"] == {"mode": 3}
    args.engine_args = '{"enforce_eager": true}'
    assert llm_options(args, "cuda", [1])[0]["enforce_eager"]


def test_environment_of_an_engine_is_set_in_its_actor_alone(args, monkeypatch):
    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": ""})
    gpu, cpu = llm_options(args, "cuda", [1, 2])[1], llm_options(args, "cpu", [0])[1]
    assert gpu == {"VLLM_RAY_BUNDLE_INDICES": "1,2"}
    assert cpu.keys() == {"OMP_NUM_THREADS", "TORCH_COMPILE_DISABLE"}
    assert os.environ == {"CUDA_VISIBLE_DEVICES": ""}
    engine.set_environment(gpu)
    assert os.environ == gpu  # an actor without GPUs of its own sees those of vLLM's workers
    engine.set_environment(gpu | {"CUDA_VISIBLE_DEVICES": "3"})
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"


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
    prompt, texts = "the cat", [" did n't sit on the mat .", " sat</s> on the mat"]
    ends = [(encode(texts[0]), "length"), ([*encode(texts[1]), encode("mat")[-1]], "stop")]  # a word that ends it
    outputs = [
        SimpleNamespace(token_ids=ids, finish_reason=reason, logprobs=FlatLogprobs(logprobs=[-1.0] * len(ids)))
        for ids, reason in ends
    ]
    request = SimpleNamespace(prompt_token_ids=encode(prompt), outputs=outputs)
    asked = []

    def generate(prompts, params, **_):
        asked.append(params[0].logprobs)
        return [request]

    actor = EngineActor(0)
    actor.llm = llm = SimpleNamespace(get_tokenizer=lambda: tokenizer, generate=generate)
    sampling = [[engine.sampling_options(args, 0, 0, 0, evaluation)] for evaluation in (False, True)]
    rollouts = actor.sample([encode(prompt)], sampling[0])
    assert [(r.text, r.truncated) for r in rollouts] == [(texts[0], True), (" sat on the mat", False)]

    llm.reset_prefix_cache = lambda: asked.append("reset") or True
    llm.llm_engine = SimpleNamespace(reset_encoder_cache=lambda: asked.append("images"))
    assert [r.text for r in actor.sample([encode(prompt)], sampling[1], True)] == [r.text for r in rollouts]
    assert asked == [0, None, "reset", "images"]
    assert actor.sample([], []) == []  # there are more engines than prompts
    assert len(asked) == 4

    llm.reset_prefix_cache = lambda: False
    with pytest.raises(RunError, match="vLLM did not reset its prefix cache"):
        actor.sample([encode(prompt)], sampling[1], True)


def test_of_a_long_prompt_only_the_end_is_decoded(monkeypatch):
    """A conversation's prompt grows with each turn, and each of its completions is decoded with it."""
    tokenizer, decoded = spaced_tokenizer(), []
    decode = tokenizer.batch_decode
    monkeypatch.setattr(
        tokenizer, "batch_decode", lambda rows, **options: decoded.extend(map(len, rows)) or decode(rows, **options)
    )
    prompt, ids = tokenizer.encode("the cat sat " * 500), tokenizer.encode(" on the mat", add_special_tokens=False)
    output = SimpleNamespace(token_ids=ids, finish_reason="length", logprobs=None)
    (rollout,) = engine.rollouts_of([SimpleNamespace(prompt_token_ids=prompt, outputs=[output])], tokenizer)
    assert rollout.text == " on the mat"
    assert rollout.prompt_ids.tolist() == prompt
    assert sum(decoded) < 1000 < len(prompt)


def sampled(**changes):
    return SamplingConfig(**{"group_size": 1, "max_tokens": 64} | changes)


def test_engines_share_the_prompts_and_sample_what_one_would():
    rows, asked = [Row(f"{i}", {}, "", [i]) for i in range(5)], []

    def share(count: int) -> list[tuple]:
        """The prompts of each of so many engines, with the seeds of what they sample."""

        def call(phase, method, each):
            asked.append(each)
            return [[SimpleNamespace(prompt_ids=ids) for ids in prompts for _ in range(2)] for prompts, *_ in each]

        engines = type("Engines", (), {"__len__": lambda self: count})()
        engines.call = call
        batch = complete(engines, SimpleNamespace(seed=0, tools=None), rows, sampled(group_size=2), step=3)
        assert [[rollout.prompt_ids for rollout in group.rollouts] for group in batch.groups] == [
            [row.prompt_ids] * 2 for row in rows
        ]
        return [
            (prompt, options["seed"])
            for prompts, sampling, *_ in asked[-1]
            for prompt, options in zip(prompts, sampling, strict=True)
        ]

    assert share(1) == share(2) == share(7)
    assert len({seed for _, seed in share(1)}) == 5
    assert [[len(prompts) for prompts, *_ in each] for each in asked[:3]] == [[5], [2, 3], [0, 1, 1, 0, 1, 1, 1]]


def test_weights_are_served_if_every_worker_says_so():
    actor, answers = EngineActor(0), {"receive_weights": [{"version": 1}] * 2, "check_weights_changed": [True] * 2}
    actor.llm = SimpleNamespace(collective_rpc=lambda method, args=(): answers[method])
    assert actor.take_weights(60.0)
    answers["check_weights_changed"] = [True, False]
    assert not actor.take_weights(60.0)
    answers["receive_weights"] = [{"version": 1}, {"error": "engine worker 1 (pid 7) failed: no memory"}]
    with pytest.raises(WeightSyncError, match=r"^engine worker 1 \(pid 7\) failed: no memory$"):
        actor.take_weights(60.0)


@pytest.fixture
def llm(tmp_path, monkeypatch, args):
    """A real engine of the built-in model, with the options that all scripts give it on a CPU."""
    options, environment = llm_options(args, "cpu", [0])
    for name, value in (CORE_IN_PROCESS | environment).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch._dynamo.config.disable", True)  # which has read its variable before
    from vllm import LLM

    llm = LLM(str(build_tiny_model(tmp_path)), **options)
    yield llm
    llm.llm_engine.engine_core.shutdown()


@cpu_only
def test_rollouts_are_what_vllm_generates_and_decodes_by_itself(llm, monkeypatch):
    from vllm import SamplingParams

    generate, plain = llm.generate, []

    def generate_both(prompts, params, **options):
        """What is asked for, having generated the same with nothing set that is to be fast."""
        for own in params:
            assert own.flat_logprobs
            assert not own.detokenize
        slow = [
            SamplingParams(n=p.n, temperature=p.temperature, max_tokens=p.max_tokens, logprobs=0, seed=p.seed)
            for p in params
        ]
        plain.extend(o for request in generate(prompts, slow, **options) for o in request.outputs)
        return generate(prompts, params, **options)

    actor, run = EngineActor(0), sampled(group_size=32)
    actor.llm = llm
    monkeypatch.setattr(llm, "generate", generate_both)
    prompts = [llm.get_tokenizer().encode(text) for text in ("Read the sign: ", "Grüße, 世界: ")]
    options = lambda run, evaluation=False: [  # noqa: E731
        engine.sampling_options(run, 0, 1, i) | ({"logprobs": None} if evaluation else {}) for i in range(len(prompts))
    ]
    rollouts, evaluated = (actor.sample(prompts, options(run, it), it) for it in (False, True))
    assert [r.completion_ids.tolist() for r in evaluated] == [r.completion_ids.tolist() for r in rollouts]
    assert not any(len(rollout.logprobs) for rollout in evaluated)
    assert len(rollouts) == len(plain[:64]) == 64
    for rollout, output in zip(rollouts, plain[:64], strict=True):
        ids = rollout.completion_ids.tolist()
        assert ids == list(output.token_ids)
        expected = [position[token].logprob for position, token in zip(output.logprobs, ids, strict=True)]
        assert rollout.logprobs == pytest.approx(np.array(expected), abs=1e-5)
        assert rollout.text == output.text
        assert rollout.truncated == (output.finish_reason == "length")
        arrays = rollout.prompt_ids, rollout.completion_ids, rollout.logprobs
        assert [array.dtype for array in arrays] == [np.int32, np.int32, np.float32]
    assert [rollout.prompt_ids.tolist() for rollout in rollouts] == [ids for ids in prompts for _ in range(32)]
    assert {output.finish_reason for output in plain} == {"stop", "length"}
    teacher = TeacherActor(0)
    teacher.llm = llm  # of the same weights, so it gives the sampled tokens the same log-probabilities
    scores = teacher.score([(rollout.prompt_ids, rollout.completion_ids) for rollout in rollouts])
    for rollout, of_teacher in zip(rollouts, scores, strict=True):
        assert of_teacher.dtype == np.float32
        assert of_teacher == pytest.approx(rollout.logprobs, abs=1e-5)

    # More tokens than vLLM takes in one batch. A prompt in two parts ended every engine on a CPU.
    monkeypatch.setattr(llm, "generate", generate)
    prompts = [[2 + (i + j) % 250 for j in range(61)] for i in range(128)]
    assert llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens < 128 * 61
    rollouts = actor.sample(prompts, options(sampled(max_tokens=4)))
    assert [rollout.prompt_ids.tolist() for rollout in rollouts] == prompts
    assert {len(rollout.completion_ids) for rollout in rollouts} <= {1, 2, 3, 4}
    (longest,) = actor.sample([[5] * (MAX_LENGTH - 1)], options(sampled())[:1])
    assert len(longest.completion_ids) == 1
