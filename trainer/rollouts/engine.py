"""Engines: what the engine actors of all scripts share, vLLM's options by hardware and flags, and rollouts."""

import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import psutil
from annotated_types import Ge, Gt, Le
from pydantic import AfterValidator, ValidationError

from rlhf_utils import WeightSyncError

from ..errors import EngineError, RunError
from ..flags import arg
from ..functions import json_object
from ..images import Images
from ..learning.grpo import GRPOConfig
from ..learning.rollout import Rollout
from ..learning.sampling import SamplingConfig
from ..run.actors import ActorGroup
from ..run.session import die_with_children
from ..tasks.dataset import Row
from ..tasks.environment import together
from ..tasks.rewards import Batch, Group, reward_metrics
from ..tasks.task import Task
from ..tasks.tools import Tools
from .conversation import Conversation, Turn, converse, group_of

SEED_BYTES = 6  # vLLM takes 8, with a sign, and counts on from there
UNEXPLAINED = re.compile(r"(Engine core|WorkerProc) initialization failed")  # how vLLM refers to another process
LOG_PREFIX = re.compile(r"^\(\S+ pid=\d+\) (?:ERROR \S+ \S+ \[\S+\] ?)?", re.MULTILINE)
RAISED = re.compile(r"^((?:[\w.]*(?:Error|Exception)|\S+\.py: error): .*(?:\n  (?!File ).*)*)", re.MULTILINE)
DECODED_BEFORE = 256  # tokens of a prompt that are decoded with each completion
IN_ENGINE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"  # on CPU, vLLM takes "mp" for "uni"
# vLLM's default compiles the model as well, for a longer start and no faster rollouts.
DECODE_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
KEPT_PREFIX_CACHE = "vLLM did not reset its prefix cache, which holds keys and values of the old weights"


@dataclass
class EngineArguments:
    """How large an engine is, and how vLLM runs it."""

    tensor_parallel_size: Annotated[int, Ge(1)] = arg(
        2, help="GPUs that each engine is spread over (CPU: groups of cores)"
    )
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = arg(
        0.8, help="fraction of each of its GPUs' memory that an engine takes"
    )
    max_model_len: Annotated[int | None, Ge(1)] = arg(
        None, help="tokens that a prompt and its completion may have together (default: the model's limit)"
    )
    engine_args: Annotated[str, AfterValidator(json_object)] = arg(
        "{}", help="more options of vllm.LLM, as JSON, which override the script's: '{\"max_num_seqs\": 512}'"
    )


def unlink_shared_memory(parent: psutil.Process) -> None:
    """Remove the names of what vLLM's workers below this process share on a CPU, which no resource tracker knows. By
    now all of them have it open."""
    for process in parent.children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            for path in {mapping.path for mapping in process.memory_maps()}:
                if path.startswith("/dev/shm/vllm_dist_"):
                    Path(path).unlink(missing_ok=True)


@contextmanager
def engine_start() -> Iterator[None]:
    """Raise RunError, with vLLM's reason alone, if it refuses an engine's options, and EngineError, with what its
    processes have logged, if they cannot start."""
    try:
        yield
        unlink_shared_memory(psutil.Process())
    except ValidationError as error:
        raise RunError(f"vLLM refuses these options of the engine: {error.errors()[0]['msg']}") from error
    except TypeError as error:
        if "EngineArgs" not in str(error):
            raise
        raise RunError(f"--engine-args: {error}") from error
    except Exception as error:
        if not UNEXPLAINED.search(str(error)):
            raise
        raise EngineError(logged_reason()) from error


def logged_reason() -> str:
    """The first error that this actor and its child processes have logged: later ones only follow from it."""
    log = Path("/proc/self/fd/2")
    text = LOG_PREFIX.sub("", log.read_text(errors="replace")) if log.is_file() else ""
    reasons = (" ".join(found.split()) for found in RAISED.findall(text) if not UNEXPLAINED.search(found))
    return next(reasons, "one of vLLM's processes ended")


class EngineActor:
    """A Ray actor around vllm.LLM. It reserves no GPU: vLLM's workers use bundles of its placement group."""

    def __init__(self, number: int):
        self.asleep, self.leaving = "none", False

    def load(self, model: str, options: dict, environment: dict[str, str]) -> int:
        """Start the engine, with what `llm_options` returns. Returns the tokens that a prompt and its completion may
        have."""
        set_environment(environment)
        from vllm import LLM

        with engine_start():
            self.llm = LLM(model, **options)
        die_with_children(unless=lambda: self.leaving)
        return self.llm.model_config.max_model_len

    def sample(
        self,
        prompts: list[list[int]],
        sampling: list[dict],
        evaluation: bool = False,
        images: Sequence[Images | None] | None = None,
    ) -> list[Rollout]:
        """The completions of prompts, given as token ids, in order and without rewards. `sampling` has the options of
        each prompt, and `images` its images. The prompt has a token for each.

        After an `evaluation`, the prefix cache is reset: a run that is resumed there has none, and must compute the
        same.
        """
        if not prompts:
            return []
        inputs = [*map(engine_prompt, prompts, images or [None] * len(prompts))]
        requests = self.llm.generate(inputs, [*map(sampling_params, sampling)], use_tqdm=False)
        if evaluation:
            self.reset_caches()
        return rollouts_of(requests, self.llm.get_tokenizer())

    def reset_caches(self) -> None:
        """Drop the keys and values of the old weights, and what their tower made of images. Raises RunError if vLLM
        does not."""
        if not self.llm.reset_prefix_cache():
            raise RunError(KEPT_PREFIX_CACHE)
        self.llm.llm_engine.reset_encoder_cache()

    def take_weights(self, *args) -> bool:
        """Have every worker take part in a sync, with these arguments of `receive_weights`. Returns whether all of them
        serve exactly what was sent. Raises WeightSyncError if the sync fails."""
        for result in self.llm.collective_rpc("receive_weights", args=args):
            if "error" in result:
                raise WeightSyncError(result["error"])
        return all(self.llm.collective_rpc("check_weights_changed"))

    def shutdown(self) -> None:
        self.leaving = True
        self.llm.llm_engine.engine_core.shutdown()

    # For engines that share their devices with trainers

    def remember_weights(self) -> None:
        """Note what was loaded from disk, for `serves_checkpoint` after the first sync."""
        self.from_disk, self.slept = self.llm.collective_rpc("weight_digests"), False

    def sleep(self, level: str) -> None:
        """Drop the prefix cache, and release memory until `wake`: that of the KV cache ("kv"), that of the weights as
        well ("weights"), or none ("none"). Nothing is generated until then, so the prefix cache stays empty."""
        self.reset_caches()
        if level == "weights":
            self.llm.sleep(level=2)  # which keeps no copy of the weights: a sync brings them
            self.slept = True
        elif level != "none":
            self.llm.sleep(level=0)
            self.llm.release_kv_cache_memory()
            self.llm.collective_rpc("empty_cache")  # which level 2 does itself
        self.asleep = level

    def wake(self, what: str) -> None:
        """Take back the memory of the "weights", before a sync, or that of the "kv_cache", after it."""
        if self.asleep == "weights" and what == "weights":
            self.llm.wake_up(tags=["weights"])
        if self.asleep != "none" and what == "kv_cache":
            if not self.llm.wake_up(tags=["kv_cache"]):
                raise RunError("vLLM did not wake up")
            self.asleep = "none"

    def device_ids(self) -> list[str]:
        return self.llm.collective_rpc("report_device_id")

    def serves_checkpoint(self) -> bool:
        """Whether the first sync brought, bit for bit, the weights that this engine had loaded from disk.

        It may not if the trainer's weights have another dtype, and a loader of vLLM computes with them. Raises RunError
        if tensors of the layers were lost in a sleep: of level 2, vLLM restores only parameters and buffers.
        """
        digests = self.llm.collective_rpc("weight_digests")  # of each worker: of its parameters, and of all tensors
        same = all(now == before for (now, _), (before, _) in zip(digests, self.from_disk, strict=True))
        if same and self.slept and digests != self.from_disk:
            raise RunError("this model's layers keep tensors that vLLM loses in its sleep: --sleep weights cannot work")
        return same


def set_environment(environment: dict[str, str]) -> None:
    """Set these variables of an engine's actor, before it imports vLLM. The engine's processes inherit them."""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray hides the GPUs from an actor that asked for none
    os.environ.update(environment)


def llm_options(
    args: EngineArguments, device: str, bundles: Sequence[int], engines: int = 1, **options
) -> tuple[dict, dict[str, str]]:
    """The options of a vllm.LLM, and the environment variables that it and its workers want.

    The engine's workers use these `bundles` of its placement group. On CPU, `engines` of this size share the cores.
    `options` are the script's own.
    """
    workers = engines * len(bundles)
    options = {
        "tensor_parallel_size": len(bundles),
        "max_model_len": args.max_model_len,
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from, with the temperature
    } | options
    if device == "cuda":
        environment = {"VLLM_RAY_BUNDLE_INDICES": ",".join(map(str, bundles))}
        hardware = {"dtype": "bfloat16", "distributed_executor_backend": "ray"}
        hardware |= {"gpu_memory_utilization": args.gpu_memory_utilization}
        hardware |= {"compilation_config": DECODE_GRAPHS}
    else:
        # vLLM has no Ray executor on CPU. One worker computes in its engine's process: that starts sooner. Several are
        # that process's children, each bound to its cores.
        cores = sorted(os.sched_getaffinity(0))
        cores_of_workers = [cores[bundle % workers :: workers] or cores for bundle in bundles]
        environment = {"TORCH_COMPILE_DISABLE": "1"}  # compiling takes longer than such a run
        if len(bundles) == 1:
            executor = IN_ENGINE_PROCESS
            environment["OMP_NUM_THREADS"] = str(len(cores_of_workers[0]))
        else:
            executor = "mp"
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, ids)) for ids in cores_of_workers)
        hardware = {"dtype": "float32", "distributed_executor_backend": executor, "kv_cache_memory_bytes": 256 << 20}
        # For a prompt in two parts, vLLM would rewind the seed's generator, which a CPU's cannot do.
        hardware |= {"enforce_eager": True, "enable_chunked_prefill": False}
    return hardware | options | json.loads(args.engine_args), environment


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
    # No top-p and no top-k: the log-probabilities are over the whole vocabulary, as the trainer's are.
    return {
        "n": 1 if turn else config.group_size,
        "temperature": config.temperature,
        "max_tokens": turn.max_tokens if turn else config.max_tokens,
        "logprobs": None if evaluation else 0,
        "detokenize": False,  # vLLM decodes token by token, and `_texts` once
        "seed": request_seed(seed, evaluation, step, round_number, turn.index if turn else 0, number),
    }


def request_seed(*place: int) -> int:
    """The seed of the request in this place of a run: no other that is learned from has it. vLLM adds the sibling's
    number to it."""
    return int.from_bytes(hashlib.blake2b(repr(place).encode(), digest_size=SEED_BYTES).digest())


def sampling_params(options: dict):
    """The vllm.SamplingParams with these options."""
    from vllm import SamplingParams

    return SamplingParams(flat_logprobs=True, **options)  # lists instead of an object per token


def engine_prompt(ids: list[int], images: Images | None):
    """The vllm.TokensPrompt of these ids. It has the `images` decoded."""
    from vllm import TokensPrompt

    data = {"multi_modal_data": {"image": images.decoded()}} if images else {}
    return TokensPrompt(prompt_token_ids=ids, **data)


def rollouts_of(requests: list, tokenizer, labelled: bool = False) -> list[Rollout]:
    """The completions of finished vllm.RequestOutputs, in order, without rewards. `labelled` says whether the
    engine has labelled each token with the version of its weights; then the rollouts have these versions."""

    def versions_of(spans: list) -> np.ndarray:
        return np.array([int(span.version) for span in spans for _ in range(span.start, span.end)], np.int32)

    outputs = [(list(request.prompt_token_ids), output) for request in requests for output in request.outputs]
    texts = _texts(tokenizer, outputs) if outputs else []  # of no sequences, a tokenizer makes one text
    return [
        Rollout(
            np.array(prompt_ids, np.int32),
            np.array(output.token_ids, np.int32),
            np.array(output.logprobs.logprobs if output.logprobs else [], np.float32),
            text=text,
            truncated=output.finish_reason == "length",
            versions=versions_of(output.weight_versions) if labelled else None,
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


def complete(
    engines: ActorGroup,
    task: Task,
    rows: list[Row],
    config: SamplingConfig,
    step: int,
    evaluation: bool = False,
    round_number: int = 0,
) -> Batch:
    """`group_size` completions of each of these rows of the task, without rewards. The rows are divided among the
    engines. If the task has tools, completions are conversations. Each round of a step, or of an evaluation, has its
    own seeds."""
    sampling = partial(sampling_options, config, task.seed, step, evaluation=evaluation, round_number=round_number)
    size, phase = config.group_size, "evaluating" if evaluation else "generating"
    if task.tools:
        return complete_by_tools(engines, task.tools, rows, config, sampling, evaluation, phase)
    parts = in_parts([*enumerate(rows)], len(engines))
    images = [row.images and row.images.read() for row in rows]
    each = [
        ([row.prompt_ids for _, row in part], [sampling(i) for i, _ in part], evaluation, [images[i] for i, _ in part])
        for part in parts
    ]
    rollouts = [*itertools.chain(*engines.call(phase, EngineActor.sample, each=each))]
    of_rows = [rollouts[i * size : (i + 1) * size] for i in range(len(rows))]
    return Batch([Group(row, with_images(own, image)) for row, own, image in zip(rows, of_rows, images, strict=True)])


def with_images(rollouts: list[Rollout], images: Images | None) -> list[Rollout]:
    """These rollouts of one prompt, with its images."""
    return [replace(rollout, images=images) for rollout in rollouts] if images else rollouts


def complete_by_tools(
    engines: ActorGroup,
    tools: Tools,
    rows: list[Row],
    config: SamplingConfig,
    sampling: Callable[..., dict],
    evaluation: bool,
    phase: str,
) -> Batch:
    """As `complete`, by conversations in lock-step. Each stays with one engine, which has its keys and values in its
    cache."""
    size, images = config.group_size, [row.images and row.images.read() for row in rows]
    conversations = [
        Conversation(tools, row, images[i], i * size + k, config.max_tokens, evaluation)
        for i, row in enumerate(rows)
        for k in range(size)
    ]
    numbers = in_parts([conversation.number for conversation in conversations], len(engines))

    async def sample(turns: list[Turn]) -> list[Rollout]:
        parts = [[turn for turn in turns if turn.number in own] for own in numbers]
        each = [
            (
                [turn.prompt_ids for turn in part],
                [sampling(turn.number, turn=turn) for turn in part],
                evaluation,
                [turn.images for turn in part],
            )
            for part in parts
        ]
        calls = engines.begin(EngineActor.sample, each=each)
        return [*itertools.chain(*await engines.session.answers(phase, calls))]

    conversing = together([converse(conversations, sample)])
    engines.session.wait_for_thread(conversing, lambda: phase)
    conversing.result()
    return Batch([group_of(conversations[i : i + size]) for i in range(0, len(conversations), size)])


def resample(engines: ActorGroup, task: Task, batch: Batch, config: GRPOConfig, step: int) -> Batch:
    """The batch, in which groups whose rewards are all equal are replaced by groups of other prompts, in at most
    --dynamic-sampling rounds (Yu et al. 2025, arXiv:2503.14476). What is still equal after that stays."""

    def complete_and_reward(rows: list[Row], round_number: int) -> Batch:
        batch = complete(engines, task, rows, config, step, round_number=round_number)
        return task.rewards.compute(batch, step - 1)

    return replace_equal_groups(task, batch, config.dynamic_sampling, step, complete_and_reward)


def replace_equal_groups(
    task: Task, batch: Batch, rounds: int, step: int, complete_and_reward: Callable[[list[Row], int], Batch]
) -> Batch:
    """As `resample`, where `complete_and_reward(rows, round_number)` returns the completions of rows, with rewards. The
    step's own prompts were round 0."""
    groups, drawn, replaced = list(batch.groups), [group.row for group in batch.groups], 0
    for round_number in range(1, rounds + 1):
        equal = [i for i, group in enumerate(groups) if group.is_equal]
        rows = task.draw_others(step, len(equal), drawn)
        if not rows:  # no group is equal, or all prompts have been tried
            break
        drawn = drawn + rows
        completed = complete_and_reward(rows, round_number)
        unequal = [group for group in completed.groups if not group.is_equal]
        for i, group in zip(equal, unequal, strict=False):
            groups[i] = group
            replaced += 1
    return Batch(groups, {"dynamic_sampling/replaced": replaced} | reward_metrics(groups))
