"""Samples of a sync in which a worker reads the trainer's own memory.

To digest all of it on both ends would take longer than the sync. So both ends hash a few blocks, other ones in each
sync: the trainer in its own weights, the worker in those that it serves. On a GPU, hashing takes 0.02 ms, but drawing
and preparing take a millisecond of CPU time or two, and processes take turns there. So the worker draws the next sync's
sample while its GPU copies. The trainer prepares it while the worker returns, and hashes it before those copies begin.
"""

import torch

from .copies import BLOCK_WORDS, WORD_BYTES, BatchedCopy, Table, locate, runs_of
from .lora import LoRAWeight, Merge, refuse_wrong

SAMPLED_BLOCKS = 64


class Samples:
    """Blocks that copies read from tensors `read` and write to tensors `served`.

    A block that is merged counts as read from its base. There are no blocks of what torch copies, nor of what is copied
    to other tensors first, as are weights that are quantized.
    """

    def __init__(self, copies: list[BatchedCopy], read: list[torch.Tensor], served: list[torch.Tensor]):
        merges = [pair for copy in copies for pair in copy.computed]
        runs_by_cast = [item for copy in copies for item in copy.runs.items()]
        runs_by_cast += [(out.dtype != merge.base.dtype, runs_of(out, merge.base)) for out, merge in merges]
        rows = [torch.zeros(4, 0, dtype=torch.int64)]
        for cast, runs in runs_by_cast:
            if runs is not None:
                read_bytes = torch.full_like(runs[:1], 2 * WORD_BYTES if cast else WORD_BYTES)  # for a word
                rows.append(torch.cat([runs, read_bytes]))
        source, destination, words, read_bytes = torch.cat(rows, 1)
        tensor, byte = locate(source, read_bytes * words, read)
        served_tensor, _ = locate(destination, WORD_BYTES * words, served)
        kept = ((tensor >= 0) & (served_tensor >= 0)).nonzero()[:, 0]
        kept = kept[tensor[kept].argsort(stable=True)]
        self.runs = torch.stack([tensor, byte, destination, words, read_bytes])[:, kept]
        _, self.counts = tensor[kept].unique_consecutive(return_counts=True)  # of each tensor's runs
        # To merge a block takes the trainer a kernel launch.
        self.blocks = SAMPLED_BLOCKS // (4 if merges else 1) if len(self.counts) else 0
        self.device = served[0].device

    def draw(self, seed: int) -> tuple[list[list[int]], Table]:
        """Draw blocks: lists of their tensors' numbers, first bytes and words, and a table that hashes what is served.

        With consecutive seeds, every tensor has its turn.
        """
        n = self.blocks
        run, block = torch.rand(2, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        turn = (seed * n + torch.arange(n)) % max(1, len(self.counts))
        run = (self.counts.cumsum(0) - self.counts)[turn] + (run * self.counts[turn]).long()
        tensor, byte, destination, words, read_bytes = self.runs[:, run]
        begin = (block * (words / BLOCK_WORDS).ceil()).long() * BLOCK_WORDS
        words = (words - begin).clamp(max=BLOCK_WORDS)
        blocks = torch.stack([tensor, byte + read_bytes * begin, words])
        address, number = destination + WORD_BYTES * begin, torch.arange(n)
        return blocks.tolist(), Table.of_blocks(address, words, False, number, self.device)


class TrainerSample:
    """Blocks of the trainer's weights, as `Samples.draw` lists them, in the dtypes that are served."""

    def __init__(self, blocks: list[list[int]], weights: list[torch.Tensor | LoRAWeight], dtypes: list[torch.dtype]):
        device = getattr(weights[0], "base", weights[0]).device
        self.merges: list[tuple[Merge, torch.Tensor]] = []  # of rows that have a block
        self.seed, runs = sum(blocks[1]), {}
        for number, (tensor, byte, words) in enumerate(zip(*blocks, strict=True)):
            weight, dtype = weights[tensor], dtypes[tensor]
            if isinstance(weight, LoRAWeight):
                columns, begin = weight.shape[1], byte // weight.base.itemsize
                first, end = begin // columns, -(-(begin + words * WORD_BYTES // dtype.itemsize) // columns)
                rows = torch.empty(end - first, columns, dtype=dtype, device=device)
                self.merges.append((Merge(weight, weight.base[first:end], first), rows))
                address, cast = rows.data_ptr() + (begin - first * columns) * dtype.itemsize, False
            else:
                address, cast = weight.data_ptr() + byte, weight.dtype != dtype
            runs.setdefault(cast, []).append((address, words, number))
        self.tables = []
        for cast, addressed in runs.items():
            address, words, numbers = torch.tensor(addressed).T
            self.tables.append(Table.of_blocks(address, words, cast, numbers, device))
        self.total = torch.zeros(1, dtype=torch.int64, device=device)

    def digest(self) -> int:
        """The digest of what the blocks hold. Call it once.

        Raises WeightSyncError if the last one of them that is merged is wrong.
        """
        for merge, rows in self.merges:
            merge(rows)
        if self.merges:
            refuse_wrong(int(merge.count_wrong(rows, self.seed)))
        for table in self.tables:
            table.run(self.total)
        return int(self.total)
