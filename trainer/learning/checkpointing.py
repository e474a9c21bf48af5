"""Gradient checkpointing, where memory asks for it: blocks keep their inputs, and backward computes the rest again."""

from functools import partial

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from .sharding import blocks

SPARE_SHARE = 0.1  # of a GPU's memory, for what grows later


class Checkpointing:
    """Keeps only the inputs of each block for backward, which computes the rest again.

    transformers' own way needs modules in training mode, with their dropout.
    """

    def __init__(self, model, measures: bool = False):
        """With `measures`, the last block keeps its activations until `stop`, so that their size is known."""
        self.model, self.measures = model, measures
        self.forwards = {block: block.forward for block in blocks(model, "gradient_checkpointing")}
        self.last_block = next(reversed(self.forwards))  # of the language model: towers come first
        self.block_bytes = 0.0  # of what a block keeps for backward, per token; 0: not measured
        self.reset()

    def reset(self) -> None:
        """As at first."""
        self.start()
        if self.measures:
            self.measure()

    def start(self) -> None:
        """From now on, keep only each block's inputs."""
        self.active = True
        for block, forward in self.forwards.items():
            block.forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)

    def measure(self) -> None:
        """From now on, have the last block keep its activations, and measure how many bytes that takes on a GPU."""

        def forward(hidden_states: torch.Tensor, *args, **options):
            before = torch.cuda.memory_allocated()
            outputs = self.forwards[self.last_block](hidden_states, *args, **options)
            if torch.is_grad_enabled():
                kept = torch.cuda.memory_allocated() - before
                self.block_bytes = max(self.block_bytes, kept / hidden_states.shape[:-1].numel())
            return outputs

        self.last_block.forward = forward

    def token_bytes(self) -> float:
        """What all blocks keep of a token for backward if they keep their activations, the gradients of one block, and
        logits, in bf16."""
        head = self.model.get_output_embeddings()
        return self.block_bytes * (len(self.forwards) + 1) + (2 * len(head.weight) if head else 0)

    def stop(self) -> None:
        """From now on, have all blocks keep their activations."""
        self.active = False
        for block, forward in self.forwards.items():
            block.forward = forward


def tokens_in_memory(model, token_bytes: float, ranks: int, keeps_gathered: bool, device: torch.device) -> int:
    """How many tokens of this size every rank's GPU has memory for, with a tenth to spare. In memory now are gradients
    and the optimizer's state, but no bf16 copies of weights, nor what ranks gather."""
    learning = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    copies = learning * (2 if ranks == 1 else 6 if keeps_gathered else 0)
    free, total = torch.cuda.mem_get_info()
    free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    tokens = torch.tensor((free - copies - SPARE_SHARE * total) / token_bytes, device=device)
    if ranks > 1:
        dist.all_reduce(tokens, op=dist.ReduceOp.MIN)
    return int(tokens)
