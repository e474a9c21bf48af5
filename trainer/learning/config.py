"""What a learner is told: how completions are sampled and models compute, what the loss is, how weights are updated."""

from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

from annotated_types import Ge, Gt, Le, Lt

from ..flags import arg, setting
from .objectives import PolicyLossConfig

ALL_LINEAR = ["all-linear"]


@dataclass
class SamplingConfig:
    """How completions are sampled."""

    temperature: Annotated[float, Ge(0.01)] = arg(1.0, help="sampling temperature, at least 0.01")
    top_p: Annotated[float, Gt(0), Le(1)] = arg(
        1.0, help="sample from the likeliest tokens whose probabilities add up to this; 1: from all"
    )
    top_k: Annotated[int, Ge(0)] = arg(
        0, help="sample from so many likeliest tokens; 0: from all (with --top-p or --min-p: 1024)"
    )
    min_p: Annotated[float, Ge(0), Lt(1)] = arg(
        0.0, help="sample from tokens whose probability is at least this times the likeliest one's; 0: from all"
    )
    max_tokens: Annotated[int, Ge(1)] = arg(16, help="largest number of tokens in a completion (T)")
    group_size: Annotated[int, Ge(1)] = arg(8, help="completions of each prompt (G)")

    @property
    def cuts(self) -> list[str]:
        """The flags that keep tokens from being sampled. With one, every rollout has a `sampling_mask`."""
        cut = {"--top-p": self.top_p < 1, "--top-k": self.top_k > 0, "--min-p": self.min_p > 0}
        return [flag for flag, cuts in cut.items() if cuts]


@dataclass
class LoRAArguments:
    """LoRA adapters, which learn in place of the whole model."""

    lora_rank: Annotated[int | None, Ge(1)] = arg(
        None, help="train LoRA adapters of this rank, and freeze the model (default: train all weights)"
    )
    lora_alpha: Annotated[int, Ge(1)] = setting(32, help="LoRA's alpha: adapters are scaled by alpha / rank")
    lora_targets: list[str] = setting(
        ALL_LINEAR.copy,
        help="names of the layers that get adapters, such as q_proj v_proj; all-linear: all linear layers but the head",
    )
    save_merged: bool = setting(
        False, help="with --lora-rank: also write the model with merged adapters to each checkpoint"
    )


@dataclass
class ModelConfig(LoRAArguments):
    """How the trainer's models compute."""

    micro_batch_tokens: Annotated[int, Ge(1)] = arg(
        32768,
        help="largest number of tokens in one of the trainer's forward passes, padding included; a longer sequence"
        " passes alone",
    )
    gradient_checkpointing: Literal["auto", "true", "false"] = setting(
        "auto",
        help="keep only the inputs of the trainer's blocks, and compute the rest again in the backward pass: less"
        " memory, up to a third more time (auto: unless the first step finds memory for the rest, with smaller"
        " micro-batches if need be)",
    )
    train_vision: bool = arg(False, help="of a multimodal model, all weights learn, and not the language model's alone")
    compile: bool = setting(False, help="compile the trainer's blocks with torch.compile; the first steps take longer")


@dataclass
class OptimizerConfig:
    """How a model learns: the optimizer and its updates."""

    learning_rate: Annotated[float | None, Gt(0)] = arg(
        None, help="AdamW's learning rate (default: 1e-6; adapters: 1e-5; the built-in model: 3e-3)"
    )
    adam_eps: Annotated[float, Gt(0)] = setting(
        1e-15, help="AdamW's epsilon; the default is from ScaleRL, arXiv:2510.13786"
    )
    lr_scheduler: Literal["constant", "linear", "cosine"] = setting(
        "constant", help="the learning rate after the warm-up; linear and cosine reach 0 at the end of the run"
    )
    warmup_steps: Annotated[int, Ge(0)] = setting(
        0, help="number of steps at the start in which the learning rate rises from 0"
    )
    max_grad_norm: Annotated[float, Gt(0)] = setting(
        1.0, help="a gradient whose norm is larger is scaled down to this norm"
    )
    num_epochs: Annotated[int, Ge(1)] = arg(1, help="times that a step goes through its rollouts")
    num_mini_batches: Annotated[int, Ge(1)] = arg(
        1, help="mini-batches into which an epoch divides the rollouts, at most one for each; each makes an update"
    )
    offload_optimizer: bool = arg(False, help="keep the optimizer's state in host memory between updates")


class LearnerConfig(Protocol):
    """The sections of a script's `Arguments` that learners and models read."""

    sampling: SamplingConfig
    model: ModelConfig
    loss: PolicyLossConfig
    optimizer: OptimizerConfig
