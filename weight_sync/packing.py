"""Fill the buckets with this rank's share of the tensors, and digest what was packed."""

import torch
from torch.distributed.tensor import DTensor

from .buckets import Piece, piece_of
from .channels import Staging
from .copies import BatchedCopy, digest_together
from .link import Link
from .lora import LoRAWeight, Merge, refuse_wrong
from .ranks import Ranks, ShardedPart


class Packing:
    """The copies that fill each bucket. The staging buffers and the tensors must outlive it.

    `adapted` holds the weights that have adapters, by name; `tensors` has their bases.
    """

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        adapted: dict[str, LoRAWeight],
        buckets: list[list[Piece]],
        staging: Staging,
        ranks: Ranks,
    ):
        self.buckets, self.staging, self.ranks, self.adapted = buckets, staging, ranks, adapted
        self.copies: list[BatchedCopy] = []  # by bucket
        device = next(iter(tensors.values())).device
        for i, bucket in enumerate(buckets):
            pairs = [self._copy(tensors[p.name], p, staging.view(i, p)) for p in bucket]
            words = [staging.words(i, piece) for piece in bucket]
            paddings = [(w[p.nbytes :], 0) for p, w in zip(bucket, words, strict=True) if p.nbytes < len(w)]
            self.copies.append(BatchedCopy(device, [pair for pair in pairs if pair], paddings))
            digest_together(self.copies[-1:], words, bucket[0].number)
        self.merges: list[tuple[int, torch.Tensor, Merge]] = [  # bucket, destination and source
            (i, *pair) for i, copy in enumerate(self.copies) for pair in copy.computed
        ]
        # int64 [2]: the digest of what was packed since `digest`, and how many sampled elements of merges were wrong.
        self.total = torch.zeros(2, dtype=torch.int64, device=device)

    def pack(self, i: int, version: int, links: list[Link], deadline: float) -> None:
        """Fill bucket `i`. With shards, each rank packs its own bytes over zeros, and the ranks sum the buckets.

        A sum moves more bytes than a gather. But it works in place, without a second buffer or copy, and the ranks'
        shares of a bucket may differ in size.
        """
        bucket = self.staging.buffer(i)
        if self.ranks.size > 1:
            bucket.zero_()
        self.copies[i].run(self.total[:1])
        if self.merges:
            sampled_bucket, merged, merge = self.merges[version % len(self.merges)]  # another one in each sync
            if sampled_bucket == i:
                self.total[1] += merge.count_wrong(merged, version)
        self.ranks.sum(bucket, links, deadline)

    def digest(self, links: list[Link], deadline: float) -> int:
        """The digest of what all ranks have packed since the last call. Ranks that help rank 0 get another number.

        Raises WeightSyncError if a sample of what was merged is wrong.
        """
        self.ranks.sum(self.total, links, deadline)
        digest, wrong = self.total.tolist()
        self.total.zero_()  # now, so that the next sync need not
        refuse_wrong(wrong)
        return digest

    def _copy(self, tensor: torch.Tensor, piece: Piece, destination: torch.Tensor) -> tuple | None:
        """The copy (destination, source) that packs this rank's elements of a piece, or None if it has none.

        `destination` [count] is the piece in the bucket. A tensor that is not sharded is packed by the first rank.
        """
        begin, row = piece.begin, torch.Size(tensor.shape[1:]).numel()
        if isinstance(tensor, DTensor):
            tensor = ShardedPart(tensor, 0, tensor.shape)
        if isinstance(tensor, ShardedPart):
            first, local = tensor.local(self.ranks.rank, self.ranks.size)
            begin, end = max(piece.begin, first), min(piece.begin + piece.count, first + len(local))
            if begin >= end:
                return None
            destination = destination[begin - piece.begin : end - piece.begin]
            source = local[begin - first : end - first]
        elif self.ranks.rank:
            return None
        else:
            source = piece_of(tensor, piece)
        if piece.name in self.adapted:
            source = source.reshape(-1, row)
            return destination.view(source.shape), Merge(self.adapted[piece.name], source, begin // row)
        return destination.view(source.shape), source
