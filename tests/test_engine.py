"""What the engine actors of all scripts have in common: options by hardware, and rollouts of a real engine.

pytest tests/test_engine.py
"""

import os
from types import SimpleNamespace

import pytest
from conftest import cpu_only
from pair import CORE_IN_PROCESS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from recipe.engine import EngineArguments, llm_options, sample
from recipe.tiny_model import build_tiny_model


@pytest.fixture
def args(monkeypatch):
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "TORCH_COMPILE_DISABLE", "VLLM_RAY_BUNDLE_INDICES"):
        monkeypatch.setenv(name, "")  # so that what is set below goes again
        monkeypatch.delenv(name)
    args = EngineArguments(tensor_parallel_size=1)
    args.seed = 0
    return args


def test_gpu_engine_decodes_by_graphs_unless_told_otherwise(args):
    from vllm.config import CompilationConfig, CUDAGraphMode

    options = llm_options(args, "cuda", [1])
    compilation = CompilationConfig(**options["compilation_config"])
    assert compilation.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY
    assert compilation.mode == 0
    assert not options["enforce_eager"]
    args.engine_args = '{"compilation_config": {"mode": 3}}'
    assert llm_options(args, "cuda", [1])["compilation_config"] == {"mode": 3}
    args.enforce_eager = True
    assert llm_options(args, "cuda", [1])["enforce_eager"]


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

    tokenizer, args = spaced_tokenizer(), SimpleNamespace(group_size=2, temperature=1, max_tokens=9, prompts_per_step=1)
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

    llm = SimpleNamespace(get_tokenizer=lambda: tokenizer, generate=generate)
    rollouts = sample(llm, [encode(prompt)], args, 0)
    assert [(r.text, r.truncated) for r in rollouts] == [(texts[0], True), (" sat on the mat", False)]

    llm.reset_prefix_cache = lambda: asked.append("reset") or True
    assert [r.text for r in sample(llm, [encode(prompt)], args, 0, evaluation=True)] == [r.text for r in rollouts]
    assert asked == [0, None, "reset"]


@cpu_only
def test_rollouts_are_what_vllm_generates_and_decodes_by_itself(tmp_path, monkeypatch, args):
    for name, value in CORE_IN_PROCESS.items():
        monkeypatch.setenv(name, value)
    options = llm_options(args, "cpu", [0], distributed_executor_backend="uni")
    from vllm import LLM, SamplingParams

    llm, generate = LLM(str(build_tiny_model(tmp_path)), **options), LLM.generate
    plain = []

    def generate_both(prompts, params, **options):
        """What is asked for, having generated the same with nothing set that is to be fast."""
        for own in params:
            assert own.flat_logprobs
            assert not own.detokenize
        slow = [
            SamplingParams(n=p.n, temperature=p.temperature, max_tokens=p.max_tokens, logprobs=0, seed=p.seed)
            for p in params
        ]
        plain.extend(o for request in generate(llm, prompts, slow, **options) for o in request.outputs)
        return generate(llm, prompts, params, **options)

    monkeypatch.setattr(llm, "generate", generate_both)
    try:
        run = SimpleNamespace(group_size=32, temperature=1.0, max_tokens=64, prompts_per_step=2)
        prompts = [llm.get_tokenizer().encode(text) for text in ("Read the sign: ", "Grüße, 世界: ")]
        rollouts, evaluated = sample(llm, prompts, run, 1), sample(llm, prompts, run, 1, evaluation=True)
    finally:
        llm.llm_engine.engine_core.shutdown()
    assert [(r.completion_ids, r.logprobs) for r in evaluated] == [(r.completion_ids, []) for r in rollouts]
    assert len(rollouts) == len(plain[:64]) == 64
    for rollout, output in zip(rollouts, plain[:64], strict=True):
        ids = rollout.completion_ids
        assert ids == list(output.token_ids)
        expected = [position[token].logprob for position, token in zip(output.logprobs, ids, strict=True)]
        assert rollout.logprobs == pytest.approx(expected, abs=1e-5)
        assert rollout.text == output.text
        assert rollout.truncated == (output.finish_reason == "length")
    assert [rollout.prompt_ids for rollout in rollouts] == [ids for ids in prompts for _ in range(32)]
    assert {output.finish_reason for output in plain} == {"stop", "length"}
    assert os.environ["TORCH_COMPILE_DISABLE"] == "1"
