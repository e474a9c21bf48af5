"""What is compared of memory that both ends map.

To digest all of it at both ends would take longer than the sync. So each sync digests every SYNCS-th region whole, at
the trainer and as the engine serves it, the next sync the next ones: SYNCS syncs compare every byte.
"""

import torch

from .copies import WORD_BYTES, Digester, Table, runs_of
from .lora import Merge

SYNCS = 64  # so that digests take about a thirtieth of a sync's time


class Rotation:
    """Regions, as (tensor or Merge, dtype that travels). They have the numbers from `first_number` on at both ends."""

    def __init__(
        self, device: torch.device, regions: list[tuple[torch.Tensor | Merge, torch.dtype]], first_number: int = 0
    ):
        self.others = [[] for _ in range(SYNCS)]  # by turn: regions that no kernel hashes where they are
        runs = [{} for _ in range(SYNCS)]  # by turn, and by whether they are cast
        for i, (source, dtype) in enumerate(regions):
            number, turn, found = first_number + i, i % SYNCS, None
            if not isinstance(source, Merge):
                found = runs_of(torch.empty(source.shape, dtype=dtype, device="meta"), source)
            if found is None:
                self.others[turn].append((number, source, dtype))
            else:
                address, place, words = found
                hashed = [address, torch.zeros_like(place), words, torch.full_like(words, number), place // WORD_BYTES]
                runs[turn].setdefault(source.dtype != dtype, []).append(torch.stack(hashed))
        by_cast = [[(torch.cat(rows, 1), cast) for cast, rows in each.items()] for each in runs]
        self.tables = [[Table(rows[:3], cast, device, *rows[3:]) for rows, cast in each] for each in by_cast]

    def add(self, version: int, total: torch.Tensor) -> None:
        """Add the digest of this sync's regions to `total`, int64 [1], on a GPU after what is queued so far."""
        for table in self.tables[version % SYNCS]:
            table.run(total)
        for number, source, dtype in self.others[version % SYNCS]:
            if isinstance(source, Merge):
                packed = torch.empty(source.base.shape, dtype=dtype, device=source.base.device)
                source(packed)
            else:
                packed = source.to(dtype)
            Digester([packed], number).run(total)
