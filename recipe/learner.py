"""A model that learns: its weights, its optimizer, and the log-probabilities that it gives to tokens of rollouts.

Master weights are fp32, since bf16 would lose updates of 1e-6. The compute is bf16 on a GPU and fp32 on CPU.
Gradient clipping comes before AdamW.

In a torch.distributed group, all ranks form one learner. FSDP2 shards weights, gradients and optimizer state, and each
rank computes its share of the rollouts. All ranks get the same rollouts, and the result is that of a single rank apart
from rounding on a GPU (sharding.py).
"""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import torch.distributed as dist
from annotated_types import Ge, Gt
from torch.distributed.device_mesh import init_device_mesh
from transformers.hf_argparser import HfArg

from .errors import DivergenceError, MismatchError
from .logprobs import add_token_scores, has_head_apart
from .lora import LoRAArguments, adapted_layers, adapter_parameters, add_adapters, load_adapters, save_merged
from .named_tensors import NamedTensors
from .precision import bf16_weights, freeze
from .sharding import (
    Offload,
    checkpoint_blocks,
    compile_blocks,
    gather_states,
    load_optimizer_state,
    shard,
    turns_on_node,
    whole,
)

STATE_FILE = "trainer_state.pt"
MERGED = "merged"  # a checkpoint's folder with the whole model, of --save-merged
MAX_ROUNDING = 4  # times the measured rounding by which two implementations of the same attention may differ


@dataclass(frozen=True)
class Rollout:
    """One sampled completion."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]  # the engine's, of each completion token, at the sampling temperature
    reward: float | None  # None: not to learn from
    text: str = ""
    truncated: bool = False  # it reached `max_tokens` and has no end
    rewards: dict[str, float | None] = field(default_factory=dict)  # by name; `reward` is their weighted sum
    extra: dict = field(default_factory=dict)  # what a reward says of this completion (TRL's log_extra)
    versions: list[int] | None = None  # of each token's weights: learning steps behind them; None: the learner's own


@dataclass
class LearnerConfig(LoRAArguments):
    """How a model learns, whatever its objective."""

    temperature: Annotated[float, Ge(0.01)] = HfArg(default=1.0, help="of sampling; vLLM takes 0.01 at least")
    learning_rate: Annotated[float, Gt(0)] = HfArg(default=1e-6, help="AdamW's (the built-in model's: 3e-3)")
    lr_scheduler: Literal["constant", "linear", "cosine", "inverse_sqrt"] = HfArg(
        default="constant", help="the learning rate after the warm-up; linear and cosine reach 0 at the end of the run"
    )
    warmup_steps: Annotated[int, Ge(0)] = HfArg(default=0, help="steps in which the learning rate rises, from 0")
    max_grad_norm: Annotated[float, Gt(0)] = HfArg(default=1.0, help="gradients are clipped to this norm")
    micro_batch_tokens: Annotated[int, Ge(1)] = HfArg(
        default=32768, help="tokens in one forward pass, at most, unless one sequence has more"
    )
    gradient_checkpointing: bool = HfArg(
        default=True, help="compute blocks again in backward, from their inputs: less memory, up to a third more time"
    )
    offload_optimizer: bool = HfArg(default=False, help="keep the optimizer's state in host memory between updates")
    compile: bool = HfArg(default=False, help="compile the trainer's blocks, which takes a while in the first steps")
    attention: Literal["sdpa", "eager"] | None = HfArg(
        default=None, help="the trainer's attention (default: sdpa, or eager if sdpa's logits differ)"
    )
    max_mismatch: Annotated[float | None, Gt(0)] = HfArg(
        default=None,
        help="largest mean |Δ logprob| of engine and trainer (default: the script's, or twice bf16's rounding)",
    )
    default_max_mismatch: float | None = field(default=None, init=False)  # the script's, for this precision
    weights_proven: bool = field(default=False, init=False)  # after every sync, bit for bit, by the script


def micro_batches(lengths: list[int], tokens: int) -> list[slice]:
    """Slices of sequences of these lengths, longest first: each of at most so many tokens with its padding, or of one
    sequence."""
    parts, begin = [], 0
    while begin < len(lengths):
        end = min(begin + max(1, tokens // lengths[begin]), len(lengths))
        parts.append(slice(begin, end))
        begin = end
    return parts


class Learner:
    """A causal language model and its optimizer, or one rank of it: every method runs on all ranks together.

    `path` is a Hugging Face model, or a checkpoint that `save` wrote; with adapters (lora.py), always the model that
    they adapt. `steps` are the run's: a schedule of the learning rate that ends wants to know when. A model that
    does not learn only scores.
    """

    new_head: str | None = None  # a subclass's, which no causal model has: beside adapters, it learns as it is

    def __init__(
        self,
        path: str,
        config: LearnerConfig,
        device: torch.device,
        seed: int = 0,
        steps: int | None = None,
        learns: bool = True,
    ):
        from transformers import AutoTokenizer

        torch.manual_seed(seed)
        self.config, self.device, self.seed = config, device, seed
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.attention: tuple[str, str] | None = None  # its name, and what is to be said of it
        self.head_apart: bool | None = None  # its trunk can run without it (logprobs.py)
        self.max_mismatch, self.rounding = config.max_mismatch, 0.0
        self.model = self._load(path, learns)
        self.named_tensors = NamedTensors(self.model)
        self.adapters = adapter_parameters(self.model)
        self.parameters = self.adapters or list(self.model.parameters())  # what learns
        self.optimizer = torch.optim.AdamW(  # fused: it makes no temporary copies of the weights
            self.parameters, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.rate = rate_schedule(config, steps)
        self.offload = Offload(self.optimizer)
        self.step = 0
        self.own_state: dict[str, float] = {}  # of a subclass: what else a checkpoint keeps, by name

    def _load(self, path: str, learns: bool):
        """A model, or this rank's shards of it. Weights that learn are fp32, others have the precision of the compute.
        The first model that is loaded settles how all compute."""
        mesh = init_device_mesh(self.device.type, (self.ranks,)) if self.ranks > 1 else None
        exact, bounded = None, not self.attention and self._needs_bound()
        own_turn, turns = turns_on_node() if mesh else (0, 1)
        for turn in range(turns):  # one rank of a node after the other: it holds one whole model at a time
            if turn == own_turn:
                model = self._from_pretrained(path)
                model.eval()  # no dropout: the ratios compare log-probabilities of one and the same function
                model = model if mesh else model.to(self.device)
                if self.rank == 0 and not self.attention:  # in fp32, before it is sharded
                    self._examine(model)
                    exact = self._prompt_logprobs(model) if bounded else None
                self._prepare(model, learns)  # only now: what it compiles would compile for the comparisons above
                model = shard(model, mesh, adapter_parameters(model)) if mesh else model
            if mesh:
                dist.barrier()
        if mesh:
            choices = [self.attention, self.head_apart]
            dist.broadcast_object_list(choices, device=self.device)
            self.attention, self.head_apart = choices
        model.config._attn_implementation = self.attention[0]
        self._add_scores(model)
        if bounded:
            self._set_bound(model, exact)
        return model

    def _prepare(self, model, learns: bool) -> None:
        """Freeze this whole model, or give it adapters; compile its blocks, and checkpoint them."""
        computing = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        if not learns:
            freeze(model, computing)
        elif self.config.lora_rank:
            torch.manual_seed(self.seed)  # the same adapters on all ranks
            add_adapters(model, self.config, computing, self.new_head)
        if self.config.compile:
            compile_blocks(model)
        if learns and self.config.gradient_checkpointing:  # around what is compiled: torch compiles nothing inside
            checkpoint_blocks(model, has_dropout=self.config.lora_dropout > 0)

    def _from_pretrained(self, path: str):
        """The whole model, in fp32, on the CPU. With the next two methods, a subclass has another head."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation=self.config.attention
        )
        _make_savable(model.generation_config)
        return model

    def _examine(self, model) -> None:
        """Settle how this whole model, and all that are loaded later, compute."""
        self.attention = choose_attention(model, self.config.attention)
        self.head_apart = has_head_apart(model)

    def _needs_bound(self) -> bool:
        """Whether the bound of the mismatch is the script's, or this model's own."""
        return self.config.max_mismatch is None and self.config.default_max_mismatch is not None

    def _set_bound(self, model, exact: torch.Tensor | None) -> None:
        """Set the bound of the mismatch: the script's, or twice this model's own rounding, if that is more.

        Rounding is how far the log-probabilities are, as the model computes them, from the `exact` ones that the first
        rank computed in fp32. The engine rounds as much, in its own way: so the two may be twice as far apart.
        """
        # Eager, because compiling takes longer than this one pass.
        with self._computing(model), self._autocast(), torch.compiler.set_stance("force_eager"):
            logprobs = self._prompt_logprobs(model)
        if exact is not None:
            exact = exact.to(logprobs)
            self.rounding = float((exact.exp() * (logprobs - exact).abs()).sum(-1).mean())
        (self.rounding,) = self._sum(self.rounding)
        self.max_mismatch = max(self.config.default_max_mismatch, 2 * self.rounding)

    @torch.no_grad()
    def _prompt_logprobs(self, model) -> torch.Tensor:
        """Log-probabilities [2, 64, vocabulary] of each token after random prompts."""
        ids = random_prompts(model)
        return (model(input_ids=ids, use_cache=False)[0].float() / self.config.temperature).log_softmax(-1)

    def remarks(self) -> str:
        """What is to be said at the start: how it computes attention, and which mismatch its rounding explains."""
        text = f"the trainer's attention: {self.attention[1]}"
        if self.adapters:
            text += f"\nadapters of rank {self.config.lora_rank} on {adapted_layers(self.model)}"
        if self.max_mismatch == 2 * self.rounding:
            text += f"\nbf16 moves the model's log-probabilities by {self.rounding:.2g} on average:"
            text += f" the bound of the mismatch is {self.max_mismatch:.2g}"
        return text

    def _add_scores(self, model) -> None:
        """Give the model the method `token_scores`."""
        add_token_scores(model, self.head_apart, self.config.compile or self.device.type == "cuda")

    def _seed_dropout(self) -> None:
        """What adapters drop depends on the seed, the step and the rank alone, so that a resumed run drops the same."""
        torch.manual_seed(((self.seed * 1_000_003 + self.step) * self.ranks + self.rank) % 2**63)

    def _update(self) -> float:
        """An optimizer step with the gradients that there are, clipped. Returns their norm. Raises DivergenceError."""
        if self.adapters and self.ranks > 1:  # every rank has all of them: FSDP leaves them alone
            gradients = [parameter.grad for parameter in self.adapters]
            total = torch.nn.utils.parameters_to_vector(gradients)
            dist.all_reduce(total)
            torch.nn.utils.vector_to_parameters(total / self.ranks, gradients)
        norm = whole(torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm))
        if not norm.isfinite():
            raise DivergenceError(f"step {self.step + 1}: the gradient is not finite; lower --learning-rate")
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(self.step)
        self.offload.to_device()
        self.optimizer.step()
        if self.config.offload_optimizer:
            self.offload.to_host()
        return float(norm)

    def mismatch(self, rollouts: list[Rollout]) -> float:
        """Mean distance of the engine's log-probabilities from the trainer's. Raises MismatchError as `learn` does."""
        return self._proven(self._distance_of(rollouts))

    @torch.no_grad()
    def _distance_of(self, rollouts: list[Rollout]) -> torch.Tensor:
        tensors = self._completion_tensors(rollouts)
        parts, _, mine, mask, engine_logprobs, current = self._share(rollouts, [True] * len(rollouts), *tensors)
        return distance_of(self._all_logprobs(parts, mine, mask, self.model), engine_logprobs, current)

    def _proven(self, distance: torch.Tensor) -> float:
        distance, tokens = self._sum(*distance)
        if not tokens:
            raise MismatchError("no token comes from the weights that the trainer holds: the last sync has no proof")
        mismatch = distance / tokens
        if self.max_mismatch and not mismatch <= self.max_mismatch:  # a NaN does not pass
            if self.config.weights_proven:
                known = "Both hold the same weights, as the sync proved bit for bit, and compute different functions."
            else:
                known = "The engine does not serve the trainer's weights, or the two compute different functions."
            raise MismatchError(
                f"the engine's log-probabilities are {mismatch:.3g} from the trainer's on average, over the bound of"
                f" {self.max_mismatch:g}. {known} Functions usually differ by the attention's implementation"
                " (--attention) or soft-capping, the variant of GELU, or a scale that one side leaves out; where that"
                " is known (docs/guarantees.md lists families), a larger --max-mismatch accepts it"
            )
        return mismatch

    def _completion_tensors(self, rollouts: list[Rollout]) -> list[torch.Tensor]:
        """The mask of the completions' tokens, the engine's log-probabilities, and the mask of the tokens that weights
        of this learner's version sampled: all [B, T], right-padded with zeros."""
        logprobs = [_tensor(rollout.logprobs).float() for rollout in rollouts]
        mask = [torch.ones_like(row) for row in logprobs]
        current = [
            row if rollout.versions is None else _tensor(rollout.versions).eq(self.step).float()
            for row, rollout in zip(mask, rollouts, strict=True)
        ]
        pad = torch.nn.utils.rnn.pad_sequence
        return [pad(rows, batch_first=True).to(self.device) for rows in (mask, logprobs, current)]

    def _share(self, rollouts: list[Rollout], learned: list[bool], *tensors: torch.Tensor) -> tuple:
        """This rank's part of the rollouts and of tensors [B, ...]: micro-batches (slices) of those that are `learned`
        from, of the others, the rollouts, and their rows of the tensors.

        All ranks get as many, and split them alike, so that their passes through the sharded model match: their k-th
        ones are neighbours in length. Where the ranks do not divide a number, the shortest rollout fills up, with rows
        of zeros.
        """
        lengths = [len(rollout.prompt_ids) + len(rollout.completion_ids) for rollout in rollouts]
        filler = len(rollouts)
        rollouts, lengths = [*rollouts, rollouts[lengths.index(min(lengths))]], [*lengths, min(lengths)]
        tensors = [torch.cat([tensor, torch.zeros_like(tensor[:1])]) for tensor in tensors]
        rows, parts = [], ([], [])
        for wanted, slices in zip((True, False), parts, strict=True):
            order = sorted((row for row in range(filler) if learned[row] == wanted), key=lambda row: -lengths[row])
            order += [filler] * (-len(order) % self.ranks)
            for part in micro_batches([lengths[row] for row in order[:: self.ranks]], self.config.micro_batch_tokens):
                slices.append(slice(len(rows) + part.start, len(rows) + part.stop))
            rows += order[self.rank :: self.ranks]
        return *parts, [rollouts[row] for row in rows], *(tensor[rows] for tensor in tensors)

    def _sum(self, *values: float | torch.Tensor) -> list[float]:
        """The sums of these values over the ranks."""
        sums = torch.tensor([float(value) for value in values], dtype=torch.float64, device=self.device)
        if self.ranks > 1:
            dist.all_reduce(sums)
        return sums.tolist()

    @torch.no_grad()
    def _all_logprobs(self, parts: list[slice], rollouts: list[Rollout], mask: torch.Tensor, model) -> torch.Tensor:
        """`token_logprobs` of all micro-batches, shaped as the mask."""
        with self._computing(model):
            return torch.cat([self.token_logprobs(rollouts[part], mask.shape[1], model)[0] for part in parts])

    def _computing(self, model) -> AbstractContextManager[None]:
        """Around all passes through this model, backward included: on a GPU it computes in bf16."""
        return bf16_weights(model) if self.device.type == "cuda" and self.ranks == 1 else nullcontext()

    def _autocast(self) -> AbstractContextManager[None]:
        """Around each forward pass."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda")

    def token_logprobs(
        self, rollouts: list[Rollout], width: int, model=None, entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probabilities [B, width] of the completions' tokens, right-padded with zeros, and entropies as well."""
        return self._token_scores(rollouts, width, model or self.model, self.config.temperature, entropy)

    def _token_scores(self, rollouts: list[Rollout], width: int, model, *args) -> tuple[torch.Tensor | None, ...]:
        """What the model's `token_scores` returns of the completions' tokens: [B, width], right-padded with zeros."""
        sequences = [_tensor(rollout.prompt_ids + rollout.completion_ids) for rollout in rollouts]
        ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        begins = torch.tensor([len(rollout.prompt_ids) for rollout in rollouts])
        lengths = torch.tensor([len(rollout.completion_ids) for rollout in rollouts])
        rows, columns = (torch.arange(width) < lengths[:, None]).nonzero(as_tuple=True)
        places = rows * ids.shape[1] + begins[rows] + columns  # in ids.flatten()
        ids, rows, columns, places = (tensor.to(self.device) for tensor in (ids, rows, columns, places))
        with self._autocast():
            scores = model.token_scores(ids, places, *args)
        padding = torch.zeros(len(rollouts), width, device=self.device)
        return tuple(None if score is None else padding.index_put((rows, columns), score) for score in scores)

    def release_memory(self, offload_optimizer: bool = False) -> None:
        """Free what the next `learn` makes anew; with `offload_optimizer`, its state moves to host memory."""
        self.optimizer.zero_grad(set_to_none=True)
        if offload_optimizer:
            self.offload.to_host()
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.ipc_collect()  # what an engine had mapped and has let go, such as the buffers of a closed sync
            torch.cuda.empty_cache()

    def save(self, folder: Path | None) -> None:
        """Write the model or its adapters, and the tokenizer, in Hugging Face format, and beside them what `load_state`
        needs.

        The first rank writes; the others, whose folder is None, help to gather. Any number of ranks can go on from it.
        """
        weights, optimizer = gather_states(self.model, self.parameters, self.optimizer, self.rank)
        merged = self.adapters and self.config.save_merged
        if merged:
            save_merged(self.model, self.named_tensors(), folder and folder / MERGED)
        if folder is None:
            return
        self.model.save_pretrained(folder, state_dict=weights)
        for place in (folder, folder / MERGED) if merged else (folder,):
            self.tokenizer.save_pretrained(place)
        torch.save({"step": self.step, "optimizer": optimizer} | self.own_state, folder / STATE_FILE)

    def load_state(self, folder: Path) -> None:
        """Go on from a checkpoint whose model this learner was made from: adapters, optimizer, step."""
        if self.adapters:
            load_adapters(self.model, folder)
        state = torch.load(folder / STATE_FILE, map_location="cpu", mmap=True, weights_only=True)
        self.step = state["step"]
        self.own_state |= {name: state[name] for name in self.own_state if name in state}
        load_optimizer_state(self.parameters, self.optimizer, state["optimizer"])
        if self.config.offload_optimizer:
            self.offload.to_host()


def rate_schedule(config: LearnerConfig, steps: int | None) -> Callable[[int], float]:
    """The learning rate of each step (the first is 0), by a schedule of transformers.

    It depends on the step alone, so that a checkpoint need not have it: a run resumed with another rate, schedule or
    number of steps goes on with what a whole run with those would have from there.
    """
    from transformers import get_scheduler

    name = "constant_with_warmup" if config.lr_scheduler == "constant" else config.lr_scheduler
    stand_in = torch.optim.SGD([torch.zeros(1)], lr=config.learning_rate)
    (factor,) = get_scheduler(name, stand_in, config.warmup_steps, steps).lr_lambdas
    return lambda step: config.learning_rate * factor(step)


def random_prompts(model) -> torch.Tensor:
    """The ids [2, 64] of two prompts, always the same, on the model's device."""
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(vocabulary, (2, 64), generator=torch.Generator().manual_seed(0)).to(model.device)


@torch.no_grad()
def choose_attention(model, asked: str | None = None) -> tuple[str, str]:
    """The attention that this fp32 model is to compute with, and what is to be said of it: its own if its logits of
    random prompts are eager's, or if it was asked for; else eager.

    transformers' fast attention leaves out what it does not know, without a word, such as Gemma 2's soft-capping.

    Rounding is measured, as what eager's logits change by when every element of the embeddings becomes a neighbouring
    float. In 40 families, of whatever depth and scale, equal implementations differ by 0.2 to 1.4 times that; Gemma 2
    by 7 with weights so small that its log-probabilities are only 2e-6 off, by thousands with larger ones.
    """
    own, config = model.config._attn_implementation, model.config.get_text_config()
    if own == "eager" or getattr(config, "alibi", False):  # Falcon's eager adds ALiBi twice, as of transformers 5.19
        return own, own
    ids, generator = random_prompts(model), torch.Generator().manual_seed(1)
    window = getattr(config, "sliding_window", None)
    if window:
        config.sliding_window = min(window, ids.shape[1] // 4)  # for both: it is at work in a short prompt as well

    def logits(attention: str) -> torch.Tensor:
        model.config._attn_implementation = attention  # its setter reaches models that set_attn_implementation refuses
        return model(input_ids=ids, use_cache=False)[0]  # of a trunk alone, its hidden states

    def nudge(module, inputs, embeddings: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(2, embeddings.shape, generator=generator).to(embeddings) * 2 - 1
        return embeddings * (1 + signs * torch.finfo(torch.float32).eps)

    eager = logits("eager")
    distance = (logits(own) - eager).abs().mean()
    hook = model.get_input_embeddings().register_forward_hook(nudge)
    rounding = (logits("eager") - eager).abs().mean()
    hook.remove()
    if window:
        config.sliding_window = window
    if distance <= MAX_ROUNDING * rounding:
        return own, f"{own}, whose logits are eager's but for rounding"
    off = f"{distance:.1g} from eager's, {distance / rounding:.0f} times what rounding explains"
    if asked:
        return own, f"{own}, as asked for; its logits are {off}"
    return "eager", f"eager, which is slower: {own}'s logits are {off} (--attention {own} takes it all the same)"


def _make_savable(generation_config) -> None:
    """A temperature without `do_sample`, as some models come with, is what transformers loads but refuses to save."""
    try:
        generation_config.validate(strict=True)
    except ValueError:
        generation_config.do_sample = True
        generation_config.validate(strict=True)  # what else is wrong ends the run here, not at its first checkpoint


def _tensor(numbers: list) -> torch.Tensor:
    """As torch.tensor(numbers), which takes four times as long: the GPU waits for a step's first tensors."""
    return torch.from_numpy(np.array(numbers))


def distance_of(logprobs: torch.Tensor, engine_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The sum of the distances of these log-probabilities where the mask is 1, and of how many they are."""
    return torch.stack([((logprobs - engine_logprobs).abs() * mask).sum(), mask.sum()])
