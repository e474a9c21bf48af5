"""A model that scores the tokens of rollouts. learner.py makes it learn.

Weights that learn are fp32, since bf16 would lose updates of 1e-6. The compute is bf16 on a GPU and fp32 on CPU.

In a torch.distributed group, all ranks form one model: FSDP2 shards its weights, and each rank scores some of the
rollouts. All ranks are given the same rollouts. The result is that of a single rank, apart from rounding on a GPU.
"""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from . import exact
from .attention import AttentionChoice, can_share_prompts, choose_attention
from .batching import RankBatch, rank_batch, tokens
from .checkpointing import Checkpointing, tokens_in_memory
from .config import LearnerConfig
from .flops import Work
from .layout import SHARED, lay_out, padded, to_device
from .loading import make_savable, prepare
from .logprobs import Allowed, choose_head, scores_of_logits, token_scores
from .lora import adapted_layers, adapter_parameters
from .multimodal import auto_class, image_inputs, load_tokenizer
from .named_tensors import NamedTensors
from .precision import bf16_weights
from .rollout import Rollout
from .rounding import prompt_logprobs, random_prompts
from .sharding import add_method, fits_gathered, keep_gathered, load_model, rank_and_ranks

MIN_KEPT_TOKENS = 4096  # with smaller micro-batches, a GPU would gain less by computing nothing again


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
        self.is_cut = bool(config.sampling.cuts)
        self.rank, self.ranks = rank_and_ranks()
        self.tokenizer, self.processor = load_tokenizer(path)
        self.attention: AttentionChoice | None = like.attention if like else None
        self.head: Callable | None = like.head if like else None
        self.rounding = 0.0  # how far bf16 moves the log-probabilities on average, measured if the model learns
        self.exact_workers = 0  # of the engine as which the model computes, bit for bit; 0: of none
        self.scores_of_logits = self._choose_scores_of_logits()
        self.checkpointing: Checkpointing | None  # of a model that learns
        self.micro_batch_tokens, self.longest_sequence = self.config.micro_batch_tokens, 0
        self._load(path, learns, seed)
        self.keeps_gathered = learns and self.ranks > 1 and fits_gathered(self.module, self.device)
        self.named_tensors = NamedTensors(self.module)
        self.adapters = adapter_parameters(self.module)
        self.work = Work(self.module, self.new_head) if learns else None
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

    def differentiating(self) -> AbstractContextManager[None]:
        """For the call of `backward`. What is computed again in it keeps the engine's kernels: other bits could choose
        other experts."""
        return exact.any_kernels() if self.exact_workers and not self.computes_again else nullcontext()

    def autocast(self) -> AbstractContextManager[None]:
        """For each forward pass."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda")

    def score(
        self, rollouts: list[Rollout], width: int, entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probabilities [b, width] of the tokens that the policy sampled, and zeros elsewhere, for one micro-batch
        of b rollouts. If `entropy`, also the entropies [b, width]; else None. With --top-p, --top-k or --min-p, both
        are of the tokens that each was sampled from."""
        options = self.temperature, entropy, self.head, self.scores_of_logits, self.computes_again
        allowed = Allowed.of(rollouts, self.device) if self.is_cut else None
        return self.score_tokens(self.module.score, rollouts, width, *options, allowed)

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
        """This rank's part of B rollouts, as in batching.py."""
        self.longest_sequence = max(self.longest_sequence, *map(tokens, rollouts))
        if self.checkpointing and self.longest_sequence > self.micro_batch_tokens:  # there may be no memory for it
            self.checkpointing.start()
            self.micro_batch_tokens = self.config.micro_batch_tokens
        ranks = self.rank, self.ranks
        return rank_batch(rollouts, learned, tensors, *ranks, self.micro_batch_tokens, self.shares_prompts)

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

    def settle_checkpointing(self) -> str:
        """After the first step, with gradient_checkpointing auto: keep all activations and logits from now on, if there
        is memory for them. Returns what to tell the user, if this changes anything."""
        if not (self.checkpointing and self.checkpointing.block_bytes):
            return ""
        token_bytes = self.checkpointing.token_bytes()
        most, self.checkpointing.block_bytes = self.config.micro_batch_tokens, 0.0
        tokens = min(most, tokens_in_memory(self.module, token_bytes, self.ranks, self.keeps_gathered, self.device))
        if tokens < max(self.longest_sequence, min(MIN_KEPT_TOKENS, most)):
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
        measures_rounding, is_like_another = learns and self.has_engine, self.attention is not None
        if not is_like_another:
            module = self._from_pretrained(path).to(self.device)
            self._choose_computation(module)
            fp32_logprobs = prompt_logprobs(module, self.temperature) if measures_rounding else None
            if self.ranks > 1:
                choices = [self.attention, self.head]
                dist.broadcast_object_list(choices, device=self.device)
                self.attention, self.head = choices
                module = None
                gc.collect()  # its methods refer to it, so it would still be in memory
        if is_like_another or self.ranks > 1:
            # Again: the first forward pass has fixed FSDP's precision, and what learns.
            frozen = bool(not learns or self.config.lora_rank)
            module = self._from_pretrained(path, mixed_precision=True, frozen=frozen).to(self.device)
        self.checkpointing = prepare(module, self.config, self.device, learns, seed, self.new_head)
        module.config._attn_implementation = self.attention.name
        self.module = module
        if measures_rounding:
            # Eager, because compiling takes longer than this one pass.
            with self.computing(), self.autocast(), torch.compiler.set_stance("force_eager"):
                distances = (prompt_logprobs(module, self.temperature) - fp32_logprobs).abs()
            # By the tokens' probability. An engine rounds as much, in its own way: they may be twice as far apart.
            self.rounding = self.sum_over_ranks((fp32_logprobs.exp() * distances).sum(-1).mean())[0] / self.ranks

    def _from_pretrained(self, path: str, **loading: bool):
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(path)
        module, _ = load_model(auto_class(config), path, config, self.device, **loading)
        make_savable(module.generation_config)
        add_method(module, "score", token_scores)
        return module

    def _choose_computation(self, module) -> None:
        """Find out by which attention and which head this fp32 model, and all models `like` it, compute."""
        prompts = random_prompts(module)
        self.head = choose_head(module, prompts)
        self.attention = choose_attention(module)
        if self.attention.name == "sdpa" and can_share_prompts(module, prompts, self.head):
            self.attention = self.attention._replace(name=SHARED)

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
        rows, columns = padded([rollout.mask for rollout in rollouts]).nonzero(as_tuple=True)
        if self.work:
            self.work.add(rollouts, layout.groups, len(rows))
        tensors = (*layout.tokens(rows, columns), rows, columns)
        targets, states_at, rows, columns = (to_device(tensor, self.device) for tensor in tensors)
        inputs = layout.inputs_on(self.device)
        if images := rollouts[0].images:  # of all of them: a micro-batch has one group
            inputs["pixels"] = image_inputs(self.processor, images, self.device)
            inputs["prompt_length"] = len(rollouts[0].prompt_ids)
        with self.autocast():
            scores = score(inputs, targets, states_at, *args)
        zeros = torch.zeros(len(rollouts), width, device=self.device)
        return tuple(None if values is None else zeros.index_put((rows, columns), values) for values in scores)
