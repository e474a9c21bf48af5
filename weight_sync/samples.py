"""Samples of a sync in which a worker reads the trainer's own memory. To digest all of it twice would take longer than
the sync. So both ends hash a few blocks, other ones in each sync, once the worker has answered: the trainer where they
come from, the worker where they are served.
"""

import torch

from .copies import BLOCK_WORDS, WORD_BYTES, Copies, Table, place, runs_of
from .lora import LoRAWeight, Merge, refuse_wrong

SAMPLED_BLOCKS = 64


class Samples:
    """Blocks that some copies read from tensors `read` and write to tensors `served`. A block that is merged counts as
    read from its base.

    What torch copies is not among them, nor what goes elsewhere first, as weights that are quantized do.
    """

    def __init__(self, copies: list[Copies], read: list[torch.Tensor], served: list[torch.Tensor]):
        sizes = {False: WORD_BYTES, True: 2 * WORD_BYTES}  # bytes that are read for a word, by whether a run casts
        found = [(cast, runs) for each in copies for cast, runs in each.runs.items()]
        merged = [pair for each in copies for pair in each.computed]
        found += [(out.dtype != merge.base.dtype, runs_of(out, merge.base)) for out, merge in merged]
        runs = [torch.cat([own, torch.full_like(own[:1], sizes[cast])]) for cast, own in found if own is not None]
        source, destination, words, size = torch.cat([torch.zeros(4, 0, dtype=torch.int64), *runs], 1)
        tensor, byte = place(source, size * words, read)
        target, _ = place(destination, WORD_BYTES * words, served)
        kept = ((tensor >= 0) & (target >= 0)).nonzero()[:, 0]
        kept = kept[tensor[kept].argsort(stable=True)]
        self.runs = torch.stack([tensor, byte, destination, words, size])[:, kept]
        _, self.counts = tensor[kept].unique_consecutive(return_counts=True)  # of each tensor's runs
        # What the trainer merges takes it a launch for each block.
        self.blocks = SAMPLED_BLOCKS // (4 if merged else 1) if len(self.counts) else 0
        self.device = served[0].device

    def draw(self, seed: int) -> tuple[list[list[int]], Table]:
        """Blocks as lists of tensors' numbers, bytes to begin at and words, and a table that hashes what is served.

        With consecutive seeds, every tensor's turn comes.
        """
        n = self.blocks
        run, block = torch.rand(2, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        which = (seed * n + torch.arange(n)) % max(1, len(self.counts))
        run = (self.counts.cumsum(0) - self.counts)[which] + (run * self.counts[which]).long()
        tensor, byte, destination, words, size = self.runs[:, run]
        begin = (block * (words / BLOCK_WORDS).ceil()).long() * BLOCK_WORDS
        words = (words - begin).clamp(max=BLOCK_WORDS)
        blocks = torch.stack([tensor, byte + size * begin, words])
        address, number = destination + WORD_BYTES * begin, torch.arange(n)
        return blocks.tolist(), Table.of_blocks(address, words, False, number, self.device)


def sample_digest(blocks: list[list[int]], weights: list[torch.Tensor | LoRAWeight], dtypes: list[torch.dtype]) -> int:
    """The digest of these blocks of the trainer's weights, in the dtypes in which they are served.

    Raises WeightSyncError if what the last one of them merges is wrong.
    """
    tensor, byte, words = torch.tensor(blocks)
    bases = [getattr(weight, "base", weight) for weight in weights]
    address = torch.tensor([base.data_ptr() for base in bases])[tensor] + byte
    casts = torch.tensor([base.dtype != dtype for base, dtype in zip(bases, dtypes, strict=True)])[tensor]
    merged = []  # rows that have the blocks, and must outlive the table
    for i, which in enumerate(tensor.tolist()):
        weight, dtype = weights[which], dtypes[which]
        if isinstance(weight, LoRAWeight):
            columns, begin = weight.shape[1], int(byte[i]) // weight.base.itemsize
            first, end = begin // columns, -(-(begin + int(words[i]) * WORD_BYTES // dtype.itemsize) // columns)
            merge = Merge(weight, weight.base[first:end], first)
            merged.append(torch.empty(end - first, columns, dtype=dtype, device=weight.base.device))
            merge(merged[-1])
            address[i], casts[i] = merged[-1].data_ptr() + (begin - first * columns) * dtype.itemsize, False
    refuse_wrong(int(merge.wrong(merged[-1], seed=int(byte[-1]))) if merged else 0)
    total = torch.zeros(1, dtype=torch.int64, device=bases[0].device)
    for cast in (False, True):
        own = (casts == cast).nonzero()[:, 0]
        Table.of_blocks(address[own], words[own], cast, own, total.device).run(total)
    return int(total)
