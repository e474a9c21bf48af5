"""A model that scores the tokens of rollouts: loaded, sharded, frozen or with adapters. Learning is learner.py's.

What learns has fp32 weights, since bf16 would lose updates of 1e-6. The compute is bf16 on a GPU and fp32 on CPU.

In a torch.distributed group, all ranks form one model: FSDP2 shards its weights, and each rank scores its share of the
rollouts. All ranks get the same rollouts, and the result is that of a single rank apart from rounding on a GPU.
"""

import gc
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
import torch.distributed as dist
from annotated_types import Ge
from transformers.hf_argparser import HfArg

from . import exact
from .attention import can_share_prompts, choose_attention, random_prompts
from .layout import SHARED, as_tensor, is_long, lay_out, prompt_key
from .logprobs import has_head_apart, scores_of_logits, token_scores
from .lora import LoRAArguments, adapted_layers, adapter_parameters, add_adapters
from .named_tensors import NamedTensors
from .precision import bf16_weights, freeze
from .rollout import Rollout
from .sharding import add_forward, checkpoint_blocks, compile_blocks, load_model


@dataclass
class ModelConfig(LoRAArguments):
    """How models compute."""

    temperature: Annotated[float, Ge(0.01)] = HfArg(default=1.0, help="temperature of sampling, at least 0.01")
    micro_batch_tokens: Annotated[int, Ge(1)] = HfArg(
        default=32768, help="tokens in a forward pass, at most, padding included; a longer sequence passes alone"
    )
    gradient_checkpointing: bool = HfArg(
        default=True, help="compute blocks again in backward, from their inputs: less memory, up to a third more time"
    )
    compile: bool = HfArg(default=False, help="compile the trainer's blocks: the first steps take longer")
    attention: Literal["sdpa", "eager"] | None = HfArg(
        default=None, help="the trainer's attention (default: sdpa, or eager if sdpa's logits differ)"
    )


@dataclass
class Share:
    """This rank's part of some rollouts, in micro-batches."""

    rollouts: list[Rollout]
    tensors: dict[str, torch.Tensor]  # their rows of tensors [B, ...]
    learned: list[slice]  # micro-batches of rollouts to learn from
    others: list[slice]  # and of the rest


class Model:
    """A causal language model of transformers, or one rank of it: every method runs on all ranks together.

    `path` is a Hugging Face model or a checkpoint; with adapters, always the model that they adapt. A model that does
    not learn is frozen, and has no adapters. It computes `like` another model, if one is given: with the same
    attention, and its head apart from its trunk or not.
    """

    new_head: str | None = None  # a subclass's, which no causal model has: beside adapters, it learns as it is
    has_engine = True  # an engine computes the same

    def __init__(
        self,
        path: str,
        config: ModelConfig,
        device: torch.device,
        learns: bool = False,
        seed: int = 0,
        like: "Model | None" = None,
    ):
        from transformers import AutoTokenizer

        torch.manual_seed(seed)
        self.config, self.device = config, device
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.attention, self.head_apart = (like.attention, like.head_apart) if like else (None, None)
        self.rounding = 0.0  # how far bf16 moves the log-probabilities of what learns, on average
        self.exact = False  # it computes what an engine computes, bit for bit
        self.module = self._load(path, learns, seed)
        self.named_tensors = NamedTensors(self.module)
        self.adapters = adapter_parameters(self.module)

    def remarks(self) -> str:
        """Lines to print at the start of a run."""
        text = f"the trainer's attention: {self.attention[1]}"
        if self.adapters:
            text += f"\nadapters of rank {self.config.lora_rank} on {adapted_layers(self.module)}"
        return text

    @property
    def shares_prompts(self) -> bool:
        """Whether the completions of a long prompt pass behind it in one row (layout.py)."""
        return self.attention[0] == SHARED

    def computing(self) -> AbstractContextManager[None]:
        """Around all passes, backward included: on a GPU the model computes in bf16."""
        return bf16_weights(self.module) if self.device.type == "cuda" and self.ranks == 1 else nullcontext()

    def autocast(self) -> AbstractContextManager[None]:
        """Around each forward pass."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda")

    def score(
        self, rollouts: list[Rollout], width: int, entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probabilities [b, width] of the completions' sampled tokens of one micro-batch, and zeros elsewhere; and
        entropies as well if asked for."""
        return self._token_scores(rollouts, width, self.config.temperature, entropy)

    @torch.no_grad()
    def score_all(self, rollouts: list[Rollout], **options) -> list[torch.Tensor]:
        """What `score` returns of B rollouts, as tensors [B, T] on the CPU: every rank gets all."""
        width = longest(rollouts)
        rows = {"row": torch.arange(1, len(rollouts) + 1, device=self.device)}  # row 0: of the ranks' fillers
        share, found = self.share(rollouts, [True] * len(rollouts), rows), []
        with self.computing():
            for part in share.learned:
                scores = [score for score in self.score(share.rollouts[part], width, **options) if score is not None]
                found = found or [torch.zeros(len(rollouts) + 1, width, device=self.device) for _ in scores]
                for every, score in zip(found, scores, strict=True):
                    every[share.tensors["row"][part]] = score
        if self.ranks > 1:
            for every in found:
                dist.all_reduce(every)
        return [every[1:].cpu() for every in found]

    def share(self, rollouts: list[Rollout], learned: list[bool], tensors: dict[str, torch.Tensor]) -> Share:
        """This rank's part of B rollouts, of which some are `learned` from, and of tensors [B, ...].

        All ranks get as many, and split them alike, so that their passes through the sharded model match: their k-th
        rollouts are neighbours in length, and share a prompt if they do so on one rank. Where the ranks do not divide a
        group, its shortest rollout fills up, with rows of zeros.
        """
        lengths = [len(rollout.prompt_ids) + len(rollout.completion_ids) for rollout in rollouts]
        chosen, rows, parts = [], [], {True: [], False: []}
        for wanted, slices in parts.items():
            groups = defaultdict(list)  # by prompt, if it passes once, and all others
            for row in sorted(range(len(rollouts)), key=lambda row: -lengths[row]):
                if learned[row] == wanted:
                    once = self.shares_prompts and is_long(rollouts[row])
                    groups[prompt_key(rollouts[row]) if once else b""].append(row)
            sizes = []
            for key, group in groups.items():
                shared, fillers = len(rollouts[group[0]].prompt_ids) if key else 0, -len(group) % self.ranks
                of_ranks = group + fillers * [group[-1]]
                sizes += [(key, shared, lengths[row] - shared) for row in of_ranks[:: self.ranks]]
                chosen += of_ranks[self.rank :: self.ranks]
                rows += (group + fillers * [len(rollouts)])[self.rank :: self.ranks]
            first = len(chosen) - len(sizes)
            for part in micro_batches(sizes, self.config.micro_batch_tokens):
                slices.append(slice(first + part.start, first + part.stop))
        mine = {name: torch.cat([tensor, torch.zeros_like(tensor[:1])])[rows] for name, tensor in tensors.items()}
        return Share([rollouts[row] for row in chosen], mine, parts[True], parts[False])

    def sum(self, *values: float | torch.Tensor) -> list[float]:
        """The sums of these values over the ranks."""
        sums = torch.tensor([float(value) for value in values], dtype=torch.float64, device=self.device)
        if self.ranks > 1:
            dist.all_reduce(sums)
        return sums.tolist()

    def make_exact(self, exactly: bool) -> None:
        """From now on, compute as an engine does, bit for bit (exact.py), or as transformers does."""
        self.exact = exactly
        if exactly:
            exact.make_exact(self.module)
        else:
            exact.make_plain(self.module, self.attention[0])
        self._add_scores(self.module)

    def release_memory(self) -> None:
        """Give back the GPU memory that torch caches."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.ipc_collect()  # what an engine had mapped and has let go, such as the buffers of a closed sync
            torch.cuda.empty_cache()

    def _load(self, path: str, learns: bool, seed: int):
        """The model, or this rank's shards of it. Weights that learn are fp32, others have the compute's precision."""
        settles, measures, precise = self.attention is None, learns and self.has_engine, None
        module = self._from_pretrained(path).to(self.device)
        module.eval()  # no dropout: the ratios compare log-probabilities of one and the same function
        if settles:
            self._settle(module)
        if measures:
            precise = self._prompt_logprobs(module)
        if self.ranks > 1:
            choices = [self.attention, self.head_apart]
            dist.broadcast_object_list(choices, device=self.device)
            self.attention, self.head_apart = choices
            # Again: in its first forward pass, FSDP has settled the precision, and which weights learn.
            module = None  # first: it would be there twice
            module = self._from_pretrained(path, rounds=True, frozen=bool(not learns or self.config.lora_rank))
            module.eval()
        self._prepare(module, learns, seed)
        module.config._attn_implementation = self.attention[0]
        self._add_scores(module)
        self.module = module
        if measures:
            self._measure_rounding(precise)
        return module

    def _prepare(self, module, learns: bool, seed: int) -> None:
        """Freeze the model, or give it adapters; compile its blocks, and checkpoint them."""
        computing = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        if not learns:
            freeze(module, computing)
        elif self.config.lora_rank:
            torch.manual_seed(seed)  # the same adapters on all ranks
            add_adapters(module, self.config, computing, self.new_head)
        if self.config.compile:
            compile_blocks(module)
        if learns and self.config.gradient_checkpointing:  # around what is compiled: torch compiles nothing inside
            checkpoint_blocks(module)

    def _from_pretrained(self, path: str, **loading: bool):
        from transformers import AutoConfig, AutoModelForCausalLM

        module, _ = self._load_as(AutoModelForCausalLM, path, AutoConfig.from_pretrained(path), **loading)
        _make_savable(module.generation_config)
        return module

    def _load_as(self, auto_class, path: str, config, rounds: bool = False, frozen: bool = False) -> tuple:
        """As `load_model`. Weights are fp32. If the model `rounds` and is sharded, it computes in bf16 on a GPU, and
        weights that are `frozen` are bf16 themselves."""
        rounds = rounds and self.device.type == "cuda"
        options = {"dtype": torch.bfloat16 if rounds and frozen else torch.float32}
        return load_model(auto_class, path, config, rounds, attn_implementation=self.config.attention, **options)

    def _settle(self, module) -> None:
        """Settle how this fp32 model computes, and all models `like` it."""
        self.attention = choose_attention(module, self.config.attention)
        add_forward(module, "has_head_apart", has_head_apart)
        self.head_apart = module.has_head_apart()
        add_forward(module, "can_share_prompts", can_share_prompts)
        if self.attention[0] == "sdpa" and module.can_share_prompts(self.head_apart):
            self.attention = (SHARED, self.attention[1])

    def _measure_rounding(self, precise: torch.Tensor) -> None:
        """Measure how far the log-probabilities, as the model computes them, are from the `precise` ones in fp32. An
        engine rounds as much, in its own way: the two may be twice as far apart."""
        # Eager, because compiling takes longer than this one pass.
        with self.computing(), self.autocast(), torch.compiler.set_stance("force_eager"):
            logprobs = self._prompt_logprobs(self.module)
        distance = (precise.exp() * (logprobs - precise).abs()).sum(-1).mean()
        self.rounding = self.sum(distance)[0] / self.ranks

    @torch.no_grad()
    def _prompt_logprobs(self, module) -> torch.Tensor:
        """Log-probabilities [2, 64, vocabulary] of each token after random prompts."""
        ids = random_prompts(module)
        return (module(input_ids=ids, use_cache=False)[0].float() / self.config.temperature).log_softmax(-1)

    def _add_scores(self, module) -> None:
        """Give the module the method `token_scores`."""
        scores = exact.token_scores if self.exact else scores_of_logits
        if not self.exact and (self.config.compile or self.device.type == "cuda"):
            scores = torch.compile(scores, dynamic=True)  # reads and writes the logits, the largest tensor, fewer times
        add_forward(module, "token_scores", partial(token_scores, head_apart=self.head_apart, scores=scores))

    def _token_scores(self, rollouts: list[Rollout], width: int, *args) -> tuple[torch.Tensor | None, ...]:
        """What `token_scores` returns of the completions' sampled tokens: [b, width], and zeros elsewhere."""
        layout = lay_out(rollouts, self.shares_prompts)
        masks = [
            torch.nn.functional.pad(as_tensor(rollout.mask), (0, width - len(rollout.mask))) for rollout in rollouts
        ]
        rows, columns = torch.stack(masks).nonzero(as_tuple=True)
        tensors = (*layout.tokens(rows, columns), rows, columns)
        targets, states_at, rows, columns = (tensor.to(self.device) for tensor in tensors)
        with self.autocast():
            scores = self.module.token_scores(layout.inputs_on(self.device), targets, states_at, *args)
        padding = torch.zeros(len(rollouts), width, device=self.device)
        return tuple(None if score is None else padding.index_put((rows, columns), score) for score in scores)


def micro_batches(sizes: list[tuple[bytes, int, int]], tokens: int) -> list[slice]:
    """Slices of sequences with these sizes, each of at most so many tokens with its padding, or of one sequence.

    A size is the key of a group, the tokens that it has in common, and the sequence's own. Groups are neighbours, with
    the longest first. Sequences of b"" have nothing in common, and pass without others.
    """
    parts, begin, used, group, widest = [], 0, 0, None, 0
    for row, (key, shared, own) in enumerate(sizes):
        apart = key != group
        more = shared + own if apart else widest
        if row > begin and (used + more > tokens or (apart and b"" in (key, group))):
            parts.append(slice(begin, row))
            begin, used, apart, more = row, 0, True, shared + own
        used, group, widest = used + more, key, own if apart else widest
    return [*parts, slice(begin, len(sizes))] if sizes else []


def longest(rollouts: list[Rollout]) -> int:
    """T: the tokens of the longest completion."""
    return max(len(rollout.completion_ids) for rollout in rollouts)


def _make_savable(generation_config) -> None:
    """A temperature without `do_sample`, as some models come with, is what transformers loads but refuses to save."""
    try:
        generation_config.validate(strict=True)
    except ValueError:
        generation_config.do_sample = True
        generation_config.validate(strict=True)  # what else is wrong ends the run here, not at its first checkpoint
