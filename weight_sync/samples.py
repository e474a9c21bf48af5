"""Samples of a sync in which a worker reads the trainer's own memory.

To digest all of it on both ends would take longer than the sync. So both ends hash a few blocks, other ones in each
sync: the trainer in its own weights, the worker in those that it serves. Drawing and preparing a sample takes one or
two milliseconds of CPU time, so the first sync does it for SYNCS syncs. A later sync only launches the kernel and, if
there are adapters, merges the sampled rows.
"""

import random
from collections.abc import Iterable

import torch

from .copies import BLOCK_WORDS, WORD_BYTES, BatchedCopy, Table, locate, runs_of
from .lora import LoRAWeight, Merge, refuse_wrong

SAMPLED_BLOCKS = 64  # of each sync
SYNCS = 1024  # with samples of their own; after them, the first comes again


class Samples:
    """Blocks that copies read from tensors `read` and write to tensors `served`, drawn for SYNCS syncs.

    A block that is merged counts as read from its base. There are no blocks of what torch copies, nor of what is copied
    to other tensors first, as are weights that are quantized.
    """

    def __init__(self, copies: list[BatchedCopy], read: list[torch.Tensor], served: list[torch.Tensor]):
        merges = [pair for copy in copies for pair in copy.computed]
        runs_by_cast = [item for copy in copies for item in copy.runs.items()]
        runs_by_cast += [
            (out.dtype != merge.base.dtype, runs_of(out, merge.base))
            for out, merge in merges
            if merge.weight.shape[1] * out.itemsize % WORD_BYTES == 0  # or some rows would begin within a word
        ]
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
        runs = torch.stack([tensor, byte, destination, words, read_bytes])[:, kept]
        _, counts = tensor[kept].unique_consecutive(return_counts=True)  # of each tensor's runs

        # To merge a block takes the trainer a kernel launch. Every tensor has its turn.
        count = SAMPLED_BLOCKS // (4 if merges else 1) if len(counts) else 0  # of each sync
        number = torch.arange(SYNCS * count)
        turn = number % max(1, len(counts))
        generator = torch.Generator()
        generator.seed()  # so that no two sessions have the same blocks
        run, block = torch.rand(2, len(number), dtype=torch.float64, generator=generator)
        run = (counts.cumsum(0) - counts)[turn] + (run * counts[turn]).long()
        tensor, byte, destination, words, read_bytes = runs[:, run]
        begin = (block * -(-words // BLOCK_WORDS)).long() * BLOCK_WORDS
        words = (words - begin).clamp(max=BLOCK_WORDS)
        # The number of each block's tensor, its first byte there and its words: int64 [3, SYNCS * count].
        self.blocks = torch.stack([tensor, byte + read_bytes * begin, words])
        self.table = Table.of_blocks(destination + WORD_BYTES * begin, words, False, number, served[0].device)
        self.total = torch.zeros(1, dtype=torch.int64, device=served[0].device)  # of all syncs since the first

    def hash(self, sync: int) -> None:
        """Queue the hashing of what is served: add the digest of a sync's blocks to `total`."""
        self.table.run(self.total, columns_of(sync, self.blocks))


class TrainerSamples:
    """The blocks that `Samples` has drawn, of the trainer's weights, in the dtypes that are served."""

    def __init__(self, blocks: list, weights: list[torch.Tensor | LoRAWeight], dtypes: list[torch.dtype]):
        self.blocks, self.weights, self.dtypes = torch.tensor(blocks, dtype=torch.int64), weights, dtypes
        bases = [getattr(weight, "base", weight) for weight in weights]
        tensor, byte, words = self.blocks
        number, n, device = torch.arange(len(tensor)), len(tensor) // SYNCS, bases[0].device

        def of_blocks(values: Iterable) -> torch.Tensor:  # from those of the tensors
            return torch.tensor(list(values))[tensor]

        address = of_blocks(base.data_ptr() for base in bases) + byte
        cast = of_blocks(base.dtype != dtype for base, dtype in zip(bases, dtypes, strict=True))
        merged = of_blocks(isinstance(weight, LoRAWeight) for weight in weights)
        self.rows: torch.Tensor | None = None  # uint8 [n, m]: slots for the rows, merged, in which a sync's blocks lie
        if merged.any():
            itemsize, columns = of_blocks(d.itemsize for d in dtypes), of_blocks(base.size(-1) for base in bases)
            first = byte // of_blocks(base.itemsize for base in bases) % columns  # where the block begins, in its row
            nbytes = WORD_BYTES * words + itemsize * (first + columns)  # at most: up to the end of the last row
            self.rows = torch.empty(n, int(nbytes[merged].max()) // 16 * 16 + 16, dtype=torch.uint8, device=device)
            slot = self.rows.data_ptr() + number % n * self.rows.size(1)
            address, cast = torch.where(merged, slot + itemsize * first, address), cast & ~merged
        self.tables = [  # with a column for every block, which has 0 words if the other table hashes it
            Table.of_blocks(address, words * (cast == kind), kind, number, device) for kind in cast.unique().tolist()
        ]
        self.total = torch.zeros(1, dtype=torch.int64, device=device)
        if self.rows is not None:
            self._merge(0)  # or the next sync would wait for the kernel's compilation

    def digest(self, sync: int) -> int:
        """Add a sync's blocks. Returns the sum so far, which must be the worker's `Samples.total`.

        Raises WeightSyncError if one of the merged weights is wrong.
        """
        if self.rows is not None:
            self._merge(sync)
        for table in self.tables:
            table.run(self.total, columns_of(sync, self.blocks))
        return int(self.total)

    def _merge(self, sync: int) -> None:
        merges = []
        for slot, (tensor, byte, words) in zip(
            self.rows, self.blocks[:, columns_of(sync, self.blocks)].T.tolist(), strict=True
        ):
            weight, dtype = self.weights[tensor], self.dtypes[tensor]
            if isinstance(weight, LoRAWeight):
                columns, begin = weight.shape[1], byte // weight.base.itemsize
                first, end = begin // columns, -(-(begin + words * WORD_BYTES // dtype.itemsize) // columns)
                rows = slot.view(dtype)[: (end - first) * columns].view(end - first, columns)
                merges.append((Merge(weight, weight.base[first:end], first), rows))
                merges[-1][0](rows)
        if merges:
            merge, rows = random.Random(sync).choice(merges)
            refuse_wrong(int(merge.count_wrong(rows, sync)))


def columns_of(sync: int, blocks: torch.Tensor) -> slice:
    """The columns of a sync's blocks, in tables that have one for each of `blocks`."""
    count = blocks.size(1) // SYNCS
    return slice(sync % SYNCS * count, (sync % SYNCS + 1) * count)
