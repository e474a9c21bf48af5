"""What is compared of memory that both ends map.

To digest all of it at both ends would take longer than the sync. So each sync digests every SYNCS-th region whole, at
the trainer and as the engine serves it, the next sync the next ones: SYNCS syncs compare every byte.
"""

import torch

from .copies import WORD_BYTES, Digester, Table, runs_of

SYNCS = 64  # so that digests take about a thirtieth of a sync's time


class Rotation:
    """Regions, as copies (destination, source) of `BatchedCopy` to meta tensors, whose dtypes are those that travel.
    They have the numbers from `first_number` on at both ends."""

    def __init__(self, device: torch.device, regions: list[tuple], first_number: int = 0):
        self.device, self.others = device, [[] for _ in range(SYNCS)]  # by turn: what no kernel hashes where it is
        runs = [{} for _ in range(SYNCS)]  # by turn, and by whether they are cast
        for i, (place, source) in enumerate(regions):
            number, turn = first_number + i, i % SYNCS
            found = None if callable(source) else runs_of(place, source)
            if found is None:
                self.others[turn].append((number, place, source))
            else:
                address, byte, words = found
                hashed = [address, torch.zeros_like(byte), words, torch.full_like(words, number), byte // WORD_BYTES]
                runs[turn].setdefault(source.dtype != place.dtype, []).append(torch.stack(hashed))
        by_cast = [[(torch.cat(rows, 1), cast) for cast, rows in each.items()] for each in runs]
        self.tables = [[Table(rows[:3], cast, device, *rows[3:]) for rows, cast in each] for each in by_cast]

    def add(self, version: int, total: torch.Tensor) -> None:
        """Add the digest of this sync's regions to `total`, int64 [1], on a GPU after what is queued so far."""
        for table in self.tables[version % SYNCS]:
            table.run(total)
        for number, place, source in self.others[version % SYNCS]:
            packed = torch.empty_like(place, device=self.device)
            source(packed) if callable(source) else packed.copy_(source)
            Digester([packed], number).run(total)
