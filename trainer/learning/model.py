"""A model that scores the tokens of rollouts: loaded, sharded, frozen or with adapters. learner.py makes it learn.

Weights that learn are fp32, since bf16 would lose updates of 1e-6. The compute is bf16 on a GPU and fp32 on CPU.

In a torch.distributed group, all ranks form one model: FSDP2 shards its weights, and each rank scores some of the
rollouts. All ranks are given the same rollouts. The result is that of a single rank, apart from rounding on a GPU.
"""

import gc
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..errors import RunError
from . import exact
from .attention import AttentionChoice, can_share_prompts, choose_attention, random_prompts
from .config import LearnerConfig
from .layout import SHARED, as_tensor, is_long, lay_out, prompt_key
from .logprobs import choose_head, scores_of_logits, token_scores
from .lora import adapted_layers, adapter_parameters, add_adapters
from .multimodal import auto_class, image_inputs, is_multimodal, learning_modules, load_tokenizer
from .named_tensors import NamedTensors
from .precision import bf16_weights, freeze
from .rollout import Rollout
from .sharding import (
    Checkpointing,
    add_method,
    compile_blocks,
    fits_gathered,
    keep_gathered,
    load_model,
    rank_and_ranks,
)

SPARE_SHARE = 0.1  # of a GPU's memory, for what grows later
MIN_KEPT_TOKENS = 4096  # with smaller micro-batches, a GPU would gain less by computing nothing again


@dataclass
class RankBatch:
    """The rollouts of a batch that one rank scores. Slices of them are its micro-batches."""

    rollouts: list[Rollout]
    tensors: dict[str, torch.Tensor]  # the rollouts' rows of tensors [B, ...]
    micro_batches: list[slice]  # of the rollouts that are learned from
    forward_only: list[slice]  # micro-batches of the others


class Model:
    """A causal language model of transformers, or one rank of it. All ranks call every method together.

    `path` is a Hugging Face model or a checkpoint; with adapters, always the model that they adapt. A model that does
    not learn is frozen and has no adapters. If another model is given as `like`, this one computes with the same
    attention.
    """

    new_head: str | None = None  # the head that a subclass adds: beside adapters, it learns without one
    has_engine = True  # whether an engine computes the same as the model

    def __init__(
        self,
        path: str,
        config: LearnerConfig,
        device: torch.device,
        learns: bool = False,
        seed: int = 0,
        like: "Model | None" = None,
    ):
        torch.manual_seed(seed)
        self.config, self.temperature, self.device = config.model, config.sampling.temperature, device
        self.rank, self.ranks = rank_and_ranks()
        self.tokenizer, self.processor = load_tokenizer(path)
        self.attention: AttentionChoice | None = like.attention if like else None
        self.head: Callable | None = like.head if like else None
        self.rounding = 0.0  # how far bf16 moves the log-probabilities on average, measured if the model learns
        self.exact_workers = 0  # of the engine as which the model computes, bit for bit; 0: of none
        self.scores_of_logits = self._choose_scores_of_logits()
        self.checkpointing: Checkpointing | None = None  # of a model that learns
        self.micro_batch_tokens, self.longest_sequence = self.config.micro_batch_tokens, 0
        self._load(path, learns, seed)
        self.keeps_gathered = learns and self.ranks > 1 and fits_gathered(self.module, self.device)
        self.named_tensors = NamedTensors(self.module)
        self.adapters = adapter_parameters(self.module)
        if like and like.exact_workers:
            self.make_exact(like.exact_workers)

    def remarks(self) -> str:
        """Lines to print at the start of a run."""
        text = f"the trainer's attention: {self.attention.remark}"
        if self.adapters:
            text += f"\nadapters of rank {self.config.lora_rank} on {adapted_layers(self.module)}"
        return text

    @property
    def shares_prompts(self) -> bool:
        """Whether a long prompt passes once for the completions that share it (layout.py)."""
        return self.attention.name == SHARED

    @property
    def computes_again(self) -> bool:
        """Whether backward computes activations and logits again."""
        return self.checkpointing is not None and self.checkpointing.active

    def computing(self) -> AbstractContextManager[None]:
        """For all passes, backward included: inside, one rank on a GPU computes in bf16. On several, FSDP2 does."""
        return bf16_weights(self.module) if self.device.type == "cuda" and self.ranks == 1 else nullcontext()

    def autocast(self) -> AbstractContextManager[None]:
        """For each forward pass."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda")

    def score(
        self, rollouts: list[Rollout], width: int, entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probabilities [b, width] of the tokens that the policy sampled, and zeros elsewhere, for one micro-batch
        of b rollouts. If `entropy`, also the entropies [b, width]; else None."""
        options = self.temperature, entropy, self.head, self.scores_of_logits, self.computes_again
        return self.score_tokens(self.module.score, rollouts, width, *options)

    @torch.no_grad()
    def score_all(self, rollouts: list[Rollout], **options) -> list[torch.Tensor]:
        """The tensors of `score` for B rollouts, [B, T] on the CPU. Every rank gets all rows."""
        width = max(len(rollout.completion_ids) for rollout in rollouts)  # T
        rows = {"row": torch.arange(1, len(rollouts) + 1, device=self.device)}  # row 0 takes the scores of fillers
        batch = self.rank_batch(rollouts, [True] * len(rollouts), rows)
        all_scores = []
        with self.computing():
            for micro_batch in batch.micro_batches:
                scores = self.score(batch.rollouts[micro_batch], width, **options)
                scores = [tensor for tensor in scores if tensor is not None]
                all_scores = all_scores or [torch.zeros(len(rollouts) + 1, width, device=self.device) for _ in scores]
                for all_rows, micro_batch_rows in zip(all_scores, scores, strict=True):
                    all_rows[batch.tensors["row"][micro_batch]] = micro_batch_rows
        if self.ranks > 1:
            for all_rows in all_scores:
                dist.all_reduce(all_rows)
        return [all_rows[1:].cpu() for all_rows in all_scores]

    def rank_batch(self, rollouts: list[Rollout], learned: list[bool], tensors: dict[str, torch.Tensor]) -> RankBatch:
        """This rank's part of B rollouts and of tensors [B, ...]. Some rollouts are `learned` from.

        All ranks get equally many rollouts and slice them alike, so that their passes through the sharded model match:
        the k-th rollouts of all ranks are similar in length, and belong to the same group where groups share prompts.
        If the ranks do not divide a group, copies of its shortest rollout fill up; their rows of the tensors are 0.
        """
        lengths = [len(rollout.prompt_ids) + len(rollout.completion_ids) for rollout in rollouts]
        self.longest_sequence = max(self.longest_sequence, *lengths)
        if self.checkpointing and self.longest_sequence > self.micro_batch_tokens:  # there may be no memory for it
            self.checkpointing.start()
            self.micro_batch_tokens = self.config.micro_batch_tokens
        rows, tensor_rows = [], []  # of a filler, row B of the tensors
        micro_batches = {True: [], False: []}
        for with_learning, slices in micro_batches.items():
            groups = defaultdict(list)  # rows by the prompt, or its images, that they share; by b"" if they share none
            for row in sorted(range(len(rollouts)), key=lambda row: -lengths[row]):
                if learned[row] == with_learning:
                    together = rollouts[row].images or (self.shares_prompts and is_long(rollouts[row]))
                    groups[prompt_key(rollouts[row]) if together else b""].append(row)
            sizes = []
            for key, group in groups.items():
                shares_prompt = key and not rollouts[group[0]].images
                shared_tokens = len(rollouts[group[0]].prompt_ids) if shares_prompt else 0
                fillers = -len(group) % self.ranks
                filled_group = group + fillers * [group[-1]]
                # The first rank's rollout is the longest. All ranks slice by its size, and so alike.
                sizes += [(key, shared_tokens, lengths[row] - shared_tokens) for row in filled_group[:: self.ranks]]
                rows += filled_group[self.rank :: self.ranks]
                tensor_rows += (group + fillers * [len(rollouts)])[self.rank :: self.ranks]
            first = len(rows) - len(sizes)
            for micro_batch in micro_batch_slices(sizes, self.micro_batch_tokens):
                slices.append(slice(first + micro_batch.start, first + micro_batch.stop))
        tensors = {name: torch.cat([t, torch.zeros_like(t[:1])])[tensor_rows] for name, t in tensors.items()}
        return RankBatch([rollouts[row] for row in rows], tensors, micro_batches[True], micro_batches[False])

    def sum_over_ranks(self, *values: float | torch.Tensor) -> list[float]:
        """Each value's sum over the ranks, in float64."""
        sums = torch.tensor([float(value) for value in values], dtype=torch.float64, device=self.device)
        if self.ranks > 1:
            dist.all_reduce(sums)
        return sums.tolist()

    def make_exact(self, workers: int) -> None:
        """From now on, compute as an engine of so many workers does, bit for bit (exact.py), or with 0, as transformers
        does."""
        self.exact_workers = workers
        if workers:
            exact.make_exact(self.module, workers)
        else:
            exact.make_plain(self.module, self.attention.name)
        self.scores_of_logits = self._choose_scores_of_logits()

    def start_checkpointing(self) -> None:
        """From now on, keep only each block's inputs. With --gradient-checkpointing auto, measure what that saves."""
        self.checkpointing.start()
        if self.config.gradient_checkpointing == "auto" and self.device.type == "cuda":
            self.checkpointing.measure()

    def settle_checkpointing(self) -> str:
        """After the first step, with gradient_checkpointing auto: keep all activations and logits from now on, in
        micro-batches for which every rank has memory, with a tenth of the GPU to spare. Returns what to tell the user,
        if this changes anything."""
        if not (self.checkpointing and self.checkpointing.block_bytes):
            return ""
        head = self.module.get_output_embeddings()
        token_bytes = self.checkpointing.token_bytes() + (2 * len(head.weight) if head else 0)  # logits are bf16
        self.checkpointing.block_bytes = 0.0
        # In memory now are gradients and the optimizer's state, but no bf16 copies of weights, nor what ranks gather.
        learning = sum(parameter.numel() for parameter in self.module.parameters() if parameter.requires_grad)
        copies = learning * (2 if self.ranks == 1 else 6 if self.keeps_gathered else 0)
        free, total = torch.cuda.mem_get_info()
        free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        room = torch.tensor((free - copies - SPARE_SHARE * total) / token_bytes, device=self.device)
        if self.ranks > 1:
            dist.all_reduce(room, op=dist.ReduceOp.MIN)
        tokens = min(int(room), self.config.micro_batch_tokens)
        if tokens < max(self.longest_sequence, min(MIN_KEPT_TOKENS, self.config.micro_batch_tokens)):
            return ""
        self.checkpointing.stop()
        self.micro_batch_tokens = tokens
        size = tokens * token_bytes / 1e9
        return f"backward computes nothing again from now on: {size:.1f} GB for micro-batches of {tokens:,} tokens"

    def keep_gathered(self, after_forward: bool, after_backward: bool) -> None:
        """As in sharding.py, if the ranks have memory for it."""
        if self.keeps_gathered:
            keep_gathered(self.module, after_forward, after_backward)

    def release_memory(self) -> None:
        """Give back the GPU memory that torch caches."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.ipc_collect()  # what an engine no longer maps, such as the buffers of a closed sync
            torch.cuda.empty_cache()

    def _load(self, path: str, learns: bool, seed: int) -> None:
        """Load the model, or this rank's shards of it. What learns is fp32, the rest has the compute's precision."""
        measures_rounding = learns and self.has_engine
        module = None
        if self.attention is None:
            module = self._from_pretrained(path).to(self.device)
            self._choose_computation(module)
            fp32_logprobs = self._prompt_logprobs(module) if measures_rounding else None
            if self.ranks > 1:
                choices = [self.attention, self.head]
                dist.broadcast_object_list(choices, device=self.device)
                self.attention, self.head = choices
                # Load again: the first forward pass has fixed FSDP's precision, and which weights learn.
                module = None
                gc.collect()  # its methods refer to it, so it would still be in memory
        if module is None:
            frozen = bool(not learns or self.config.lora_rank)
            module = self._from_pretrained(path, mixed_precision=True, frozen=frozen).to(self.device)
        module.eval()  # no dropout: ratios compare log-probabilities by the same function
        self._prepare(module, learns, seed)
        module.config._attn_implementation = self.attention.name
        self.module = module
        if measures_rounding:
            self._measure_rounding(fp32_logprobs)

    def _prepare(self, module, learns: bool, seed: int) -> None:
        """Freeze what does not learn, or give the model adapters; compile its blocks, and checkpoint them."""
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        if self.config.train_vision and (self.config.lora_rank or not is_multimodal(module.config.model_type)):
            raise RunError("--train-vision is for multimodal models, without adapters")
        if not learns:
            freeze(module, dtype)
        elif self.config.lora_rank:
            torch.manual_seed(seed)  # the same adapters on all ranks
            add_adapters(module, self.config, dtype, self.new_head)
        elif not self.config.train_vision:
            freeze(module, dtype, *learning_modules(module, self.new_head))
        if self.config.compile:
            compile_blocks(module)
        if learns and self.config.gradient_checkpointing != "false":
            self.checkpointing = Checkpointing(module)  # around what is compiled: torch compiles nothing inside
            self.start_checkpointing()

    def _from_pretrained(self, path: str, **loading: bool):
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(path)
        module, _ = self._load_as(auto_class(config), path, config, **loading)
        _make_savable(module.generation_config)
        add_method(module, "score", token_scores)
        return module

    def _load_as(self, auto_class, path: str, config, mixed_precision: bool = False, frozen: bool = False) -> tuple:
        """As `load_model`, with fp32 weights. With `mixed_precision`, a sharded model computes in bf16 on a GPU, and
        `frozen` weights are bf16 there."""
        mixed_precision = mixed_precision and self.device.type == "cuda"
        options = {"dtype": torch.bfloat16 if mixed_precision and frozen else torch.float32}
        return load_model(auto_class, path, config, self.device, mixed_precision, **options)

    def _choose_computation(self, module) -> None:
        """Find out by which attention and which head this fp32 model, and all models `like` it, compute."""
        prompts = random_prompts(module)
        self.head = choose_head(module, prompts)
        self.attention = choose_attention(module)
        if self.attention.name == "sdpa" and can_share_prompts(module, prompts, self.head):
            self.attention = self.attention._replace(name=SHARED)

    def _measure_rounding(self, fp32_logprobs: torch.Tensor) -> None:
        """Measure how far log-probabilities in the model's own precision are from these in fp32, on average over tokens
        by their probability. An engine rounds as much, in its own way: the two may be twice as far apart."""
        # Eager, because compiling takes longer than this one pass.
        with self.computing(), self.autocast(), torch.compiler.set_stance("force_eager"):
            logprobs = self._prompt_logprobs(self.module)
        distance = (fp32_logprobs.exp() * (logprobs - fp32_logprobs).abs()).sum(-1).mean()
        self.rounding = self.sum_over_ranks(distance)[0] / self.ranks

    @torch.no_grad()
    def _prompt_logprobs(self, module) -> torch.Tensor:
        """Log-probabilities [2, 64, vocabulary] of all tokens, after each token of random prompts."""
        ids = random_prompts(module)
        logits = module(input_ids=ids, use_cache=False).logits
        return (logits.float() / self.temperature).log_softmax(-1)

    def _choose_scores_of_logits(self) -> Callable:
        if self.exact_workers:
            return exact.scores_of_logits
        if self.config.compile or self.device.type == "cuda":  # fewer passes over the logits, the largest tensor
            return torch.compile(scores_of_logits, dynamic=True)
        return scores_of_logits

    def score_tokens(
        self, score: Callable, rollouts: list[Rollout], width: int, *args
    ) -> tuple[torch.Tensor | None, ...]:
        """What a method of the module, such as `token_scores`, gives for the tokens that the policy sampled: tensors
        [b, width] with zeros elsewhere."""
        layout = lay_out(rollouts, self.shares_prompts)
        masks = [
            torch.nn.functional.pad(as_tensor(rollout.mask), (0, width - len(rollout.mask))) for rollout in rollouts
        ]
        rows, columns = torch.stack(masks).nonzero(as_tuple=True)
        tensors = (*layout.tokens(rows, columns), rows, columns)
        # Without waiting for the micro-batch before: a blocking copy would leave the GPU idle until the next launch.
        targets, states_at, rows, columns = (tensor.to(self.device, non_blocking=True) for tensor in tensors)
        inputs = layout.inputs_on(self.device)
        if images := rollouts[0].images:  # of all of them: a micro-batch has one group
            inputs["pixels"] = image_inputs(self.processor, images, self.device)
            inputs["prompt_length"] = len(rollouts[0].prompt_ids)
        with self.autocast():
            scores = score(inputs, targets, states_at, *args)
        zeros = torch.zeros(len(rollouts), width, device=self.device)
        return tuple(None if values is None else zeros.index_put((rows, columns), values) for values in scores)


def micro_batch_slices(sizes: list[tuple[bytes, int, int]], max_tokens: int) -> list[slice]:
    """Slices of sequences with these sizes: each has at most `max_tokens`, padding included, or a single sequence.

    A size is a group's key, the tokens that the group shares, and the sequence's own tokens. A group's sequences are
    neighbours, and the first is the longest. A group that shares no tokens is in slices of its own.
    """
    slices, begin, tokens, group, group_shares, width = [], 0, 0, None, 0, 0
    for row, (key, shared_tokens, own_tokens) in enumerate(sizes):
        new_group = key != group
        added = shared_tokens + own_tokens if new_group else width
        if row > begin and (tokens + added > max_tokens or (new_group and 0 in (shared_tokens, group_shares))):
            slices.append(slice(begin, row))
            begin, tokens, new_group, added = row, 0, True, shared_tokens + own_tokens
        if new_group:
            group, group_shares, width = key, shared_tokens, own_tokens
        tokens += added
    return [*slices, slice(begin, len(sizes))] if sizes else []


def _make_savable(generation_config) -> None:
    """Set `do_sample` if a temperature needs it: some models lack it, and transformers refuses to save them."""
    try:
        generation_config.validate(strict=True)
    except ValueError:
        generation_config.do_sample = True
        generation_config.validate(strict=True)  # anything else that is wrong ends the run here, not at a checkpoint
