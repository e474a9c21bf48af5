"""Fill the parts of each step that this rank sends, and digest what was packed."""

import torch

from .copies import BatchedCopy, digest_together

Fill = tuple[torch.Tensor, list[tuple]]  # a part, uint8 [n], and the copies (destination, source) that fill it


class Packing:
    """The copies that fill the parts of each step, several if workers get different ones. The staging buffers and the
    sources must outlive it. `numbers[i]` is the number of step i's parts in their digests."""

    def __init__(self, device: torch.device, fills: list[list[Fill]], numbers: list[int]):
        self.copies = [[BatchedCopy(device, pairs) for _, pairs in parts] for parts in fills]
        for number, copies, parts in zip(numbers, self.copies, fills, strict=True):
            for copy, (part, _) in zip(copies, parts, strict=True):
                digest_together([copy], [part], number)
        self.totals = torch.zeros(len(fills[0]), dtype=torch.int64, device=device)  # of the digests, by part

    def pack(self, i: int) -> None:
        """Fill the parts of step i."""
        for part, copy in enumerate(self.copies[i]):
            copy.run(self.totals[part : part + 1])

    def digests(self) -> list[int]:
        """The digest of what was packed for each part since the last call."""
        digests = self.totals.tolist()
        self.totals.zero_()  # now, so that the next sync need not
        return digests
