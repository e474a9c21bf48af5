"""Requests and answers of an engine: vLLM's sampling options with their seeds, and rollouts of what it returns."""

import hashlib
import itertools
from dataclasses import replace
from functools import partial

import numpy as np

from ..errors import RunError
from ..learning.config import SamplingConfig
from ..learning.rollout import Rollout, SamplingMask
from ..run.folder import RunFolder
from .conversation import Turn
from .options import EngineArguments

SEED_BYTES = 6  # vLLM takes 8, with a sign, and counts on from there
DECODED_BEFORE = 32  # tokens of a prompt that are decoded with each completion
LARGEST_CUT = 1024  # tokens that --top-p or --min-p alone leave at most: vLLM wants a top-k of each request


def settle_sampling(
    run: RunFolder, config: SamplingConfig, args: EngineArguments, device: str | None
) -> tuple[SamplingConfig, EngineArguments]:
    """Both with what --top-p, --top-k or --min-p take: the trainer normalizes over the tokens that they have left, and
    so an engine returns which these were. Says what is more than was asked for. Raises RunError if engines on this
    `device` cannot; None: others have started them."""
    if not config.cuts:
        return config, args
    if device == "cpu":
        raise RunError(
            f"{config.cuts[0]}: vLLM does not say on a CPU which tokens it has left, over which the trainer would"
            " normalize: this flag wants a GPU"
        )
    if not config.top_k:
        why = "vLLM returns which tokens it has left, and wants a bound"
        run.say(f"{config.cuts[0]} comes with --top-k {LARGEST_CUT}, which cuts as well: {why}")
        config = replace(config, top_k=LARGEST_CUT)
    return config, replace(args, sampling_mask=True)


def sampling_options(
    config: SamplingConfig,
    seed: int,
    step: int,
    number: int,
    evaluation: bool = False,
    round_number: int = 0,
    turn: Turn | None = None,
) -> dict:
    """vLLM's options for `group_size` completions of the prompt of this number, in this round of a step or evaluation.
    With a `turn`, they are for one turn of the completion of this number.

    What is sampled depends on the request alone, and not on the engine that does it. Completions for an `evaluation`
    have no log-probabilities, which take time.
    """
    temperature, cut = config.temperature, {}
    if config.cuts:
        cut = {"top_p": config.top_p, "top_k": config.top_k, "min_p": config.min_p}
        if not temperature:  # greedy; an engine that returns sampling masks takes no temperature of 0
            temperature, cut["top_k"] = 1.0, 1
    return {
        "n": 1 if turn else config.group_size,
        "temperature": temperature,
        **cut,
        "max_tokens": turn.max_tokens if turn else config.max_tokens,
        "logprobs": None if evaluation else 0,
        "detokenize": False,  # vLLM decodes token by token, and `_texts` once
        "seed": request_seed(seed, evaluation, step, round_number, turn.index if turn else 0, number),
    } | (turn.options if turn else {})


def request_seed(*place: int) -> int:
    """The seed of the request in this place of a run: no other that is learned from has it. vLLM adds the sibling's
    number to it."""
    return int.from_bytes(hashlib.blake2b(repr(place).encode(), digest_size=SEED_BYTES).digest())


def rollouts_of(requests: list, tokenizer) -> list[Rollout]:
    """The completions of finished vllm.RequestOutputs, in order, without rewards. The engine has labelled each token
    with the version of its weights."""

    def versions_of(spans: list) -> np.ndarray:
        versions = np.array([int(span.version) for span in spans], np.int32)
        return np.repeat(versions, [span.end - span.start for span in spans])

    def mask_of(output) -> SamplingMask | None:
        if not (output.logprobs and output.sampling_mask):  # of an evaluation, nobody asks for it
            return None
        ids = output.sampling_mask.token_ids  # a list for each token
        counts = np.fromiter(map(len, ids), np.int32, len(ids))
        return SamplingMask(np.fromiter(itertools.chain(*ids), np.int32, counts.sum()), counts)

    outputs = [(list(request.prompt_token_ids), output) for request in requests for output in request.outputs]
    texts = _texts(tokenizer, outputs) if outputs else []  # of no sequences, a tokenizer makes one text
    return [
        Rollout(
            np.array(prompt_ids, np.int32),
            np.array(output.token_ids, np.int32),
            np.array(output.logprobs.logprobs if output.logprobs else [], np.float32),
            text=text,
            truncated=output.finish_reason == "length",
            versions=versions_of(output.weight_versions),
            sampling_mask=mask_of(output),
        )
        for (prompt_ids, output), text in zip(outputs, texts, strict=True)
    ]


def _texts(tokenizer, outputs: list[tuple]) -> list[str]:
    """The texts of (prompt ids, vllm.CompletionOutput), equal to those that vLLM decodes token by token.

    A completion is decoded together with the end of its prompt, because some tokenizers drop a space where a text
    begins. Left out are the token that ended the completion, and an incomplete last character.
    """
    prompts, sequences = [], []
    for prompt_ids, output in outputs:
        prompts.append(prompt_ids[-DECODED_BEFORE:])
        sequences.append(prompts[-1] + list(output.token_ids[: -1 if output.finish_reason == "stop" else None]))
    decode = partial(tokenizer.batch_decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    texts = zip(decode(prompts), decode(sequences), strict=True)
    return [sequence[len(prompt) :].rstrip("\ufffd") for prompt, sequence in texts]


def in_parts(items: list, count: int) -> list[list]:
    """These items, in order, in `count` parts whose sizes differ by 1 at most."""
    bounds = [i * len(items) // count for i in range(count + 1)]
    return [items[begin:end] for begin, end in itertools.pairwise(bounds)]
