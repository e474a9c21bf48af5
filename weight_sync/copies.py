"""Copies between tensors, prepared once and run at every weight sync, and a digest of the tensors they write.

On a GPU, a table lists the copies of a bucket as runs of consecutive 32-bit words. One kernel walks the table. It
copies hundreds of tensors, casts fp32 to bf16 on the way, and hashes each word while it is in a register, so the digest
needs no second pass over memory. torch copies what does not consist of whole words, and everything on CPU.

The digest is a multilinear hash: the sum, modulo 2**64, of every 32-bit word times a 32-bit coefficient. The
coefficient is a hash of the word's tensor and of its position there. An accidental difference goes unseen with a
probability of 2**-32. The digest is no protection from an attacker: the coefficients are fixed, so whoever computes
them can construct changes that cancel out.
"""

import functools
import itertools
import random

import torch

RUN_WORDS = 1 << 15  # longer runs are cut, so that every multiprocessor gets a share
TILING = {"BLOCK": 1024, "STAGES": 4, "num_warps": 2}  # BLOCK: words per iteration; STAGES: blocks in flight
SHORTEST_RUN = 512  # bytes; torch does copies of shorter runs, such as transpositions
MASK = 0xFFFFFFFF
MIX = ((16, 0x7FEB352D), (15, 0x846CA68B))  # shifts and factors of Wellons' lowbias32, a 32-bit hash
SOURCE, DESTINATION, WORDS, MULTIPLIER, OFFSET = range(5)  # rows of a table; a run with destination 0 is only hashed


class Copies:
    """Many copies and fills as one operation.

    A copy is a (destination, source) of the same shape, a fill a (destination, number). A source may be a function that
    writes to the destination it is given. The tables hold addresses, so the destinations must outlive this object. It
    keeps the sources alive itself.
    """

    def __init__(self, device: torch.device, pairs: list[tuple], fills: list[tuple] = ()):
        self.device, self.fills = device, fills
        self.sources = [source for _, source in pairs]
        self.computed = [pair for pair in pairs if callable(pair[1])]
        self.plain: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.tables: list[_Table] = []
        runs = {False: [], True: []}
        for destination, source in (pair for pair in pairs if not callable(pair[1])):
            found = _runs(destination, source) if _has_kernel(device) else None
            if found is None:
                self.plain.append((destination, source))
            else:
                runs[destination.dtype != source.dtype].append(found)
        for cast, found in runs.items():
            if found:
                self.tables.append(_Table(_cut(torch.cat(found, 1), cast), cast, device))

    def writes(self) -> bool:
        """Whether `run` writes anything."""
        return bool(self.fills or self.computed or self.plain or any(table.runs.size(1) for table in self.tables))

    def run(self, digest: torch.Tensor | None = None) -> None:
        """Run in the current stream. After `digest_together`, adds the digest of the written words to int64 [1]."""
        for destination, number in self.fills:
            destination.fill_(number)
        for destination, write in self.computed:
            write(destination)
        if self.plain:
            torch._foreach_copy_(*map(list, zip(*self.plain, strict=True)))
        for table in self.tables:
            table.launch(digest)


def digest_together(copies: list[Copies], served: list[torch.Tensor]) -> bool:
    """Make these copies compute the digest of `served` while they run.

    Each copy hashes the words it writes. The last one also reads and hashes the words of `served` that none of them
    writes. Returns False, and changes nothing, if some write bypasses the tables, overlaps another or lies outside
    `served`.
    """
    tables = [table for each in copies for table in each.tables]
    if not tables or any(each.plain for each in copies) or not all(map(_in_words, served)):
        return False
    written = torch.cat([table.runs.cpu() for table in tables], 1)
    starts = torch.tensor([tensor.data_ptr() for tensor in served])
    ends = starts + torch.tensor([tensor.nbytes for tensor in served])
    # Find the gaps between the runs. An empty run at both ends of every tensor also bounds the gaps there.
    begins = torch.cat([starts, ends, written[DESTINATION]])
    reached = torch.cat([starts, ends, written[DESTINATION] + 4 * written[WORDS]])
    order = begins.argsort(stable=True)
    begins, reached = begins[order][1:], reached[order].cummax(0).values[:-1]
    between = torch.isin(reached, ends) & ~torch.isin(reached, starts)
    rest = ((begins > reached) & ~between).nonzero()[:, 0]
    unwritten = torch.stack([reached[rest], torch.zeros_like(rest), (begins - reached)[rest] // 4])
    copies[-1].tables.append(_Table(_cut(unwritten), False, copies[-1].device))
    keyed = [_keyed(table.runs.cpu(), served) for table in [*tables, copies[-1].tables[-1]]]
    if (begins < reached).any() or any(runs is None for runs in keyed):
        copies[-1].tables.pop()
        return False
    for table, runs in zip([*tables, copies[-1].tables[-1]], keyed, strict=True):
        table.runs.copy_(runs)
    return True


@torch.no_grad()
def digest(tensors: list[torch.Tensor]) -> int | None:
    """The digest of these tensors, in this order; None if there are none. GPU and CPU give the same number."""
    if not tensors:
        return None
    flat = [tensor.contiguous().view(-1) for tensor in tensors]
    # Padding copies, to an address that words can be read from.
    flat = [t if _in_words(t) else torch.nn.functional.pad(t.view(torch.uint8), (0, -t.nbytes % 4)) for t in flat]
    if _has_kernel(flat[0].device):
        total = torch.zeros(1, dtype=torch.int64, device=flat[0].device)
        _reading_table(tuple((t.data_ptr(), t.nbytes) for t in flat), total.device).launch(total)
        return int(total) % 2**64
    total = 0
    for k, tensor in enumerate(flat):
        multiplier, offset = _key(k)
        for begin, words in enumerate(tensor.view(torch.int32).split(1 << 20)):
            x = (torch.arange(len(words)) + (begin << 20)) * multiplier + offset & MASK
            for shift, factor in MIX:
                x = (x ^ (x >> shift)) * factor & MASK
            total += int(((x ^ (x >> 16)) * (words.long() & MASK)).sum())
    return total % 2**64


def _has_kernel(device: torch.device) -> bool:
    return device.type == "cuda"


def _in_words(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.nbytes % 4 == 0 and tensor.data_ptr() % 4 == 0


def _runs(destination: torch.Tensor, source: torch.Tensor) -> torch.Tensor | None:
    """The copy as runs [3, n] (source, destination, words). None if it needs a partial word, or runs too short."""
    if source.dtype != destination.dtype and (source.dtype, destination.dtype) != (torch.float32, torch.bfloat16):
        return None
    dim, run = destination.dim(), 1
    while dim and (destination.size(dim - 1) == 1 or destination.stride(dim - 1) == source.stride(dim - 1) == run):
        dim -= 1
        run *= destination.size(dim)
    nbytes = run * destination.itemsize
    if nbytes % 4 or (dim and nbytes < SHORTEST_RUN):
        return None
    addresses = []
    for tensor in (source, destination):
        offsets = torch.zeros(1, dtype=torch.int64)
        for size, stride in zip(tensor.shape[:dim], tensor.stride(), strict=False):
            offsets = (offsets[:, None] + stride * torch.arange(size)).flatten()
        addresses.append(tensor.data_ptr() + tensor.itemsize * offsets)
    if any((each % 4).any() for each in addresses):
        return None
    return torch.stack([*addresses, torch.full_like(addresses[0], nbytes // 4)])


def _cut(runs: torch.Tensor, cast: bool = False) -> torch.Tensor:
    """The table [5, n] for runs [3, m]: long runs are cut, and the rows MULTIPLIER and OFFSET are still zero."""
    parts = -(-runs[WORDS] // RUN_WORDS)
    table = runs.repeat_interleave(parts, 1)
    begin = RUN_WORDS * (torch.arange(table.size(1)) - (parts.cumsum(0) - parts).repeat_interleave(parts))
    table[SOURCE] += (8 if cast else 4) * begin
    table[DESTINATION] += 4 * begin * (table[DESTINATION] != 0)
    table[WORDS] = (table[WORDS] - begin).clamp(max=RUN_WORDS)
    return torch.cat([table, torch.zeros(2, table.size(1), dtype=torch.int64)])


def _keyed(table: torch.Tensor, served: list[torch.Tensor]) -> torch.Tensor | None:
    """The table with MULTIPLIER and OFFSET of the served tensor that each run lies in. None if a run lies in none."""
    starts, order = torch.tensor([tensor.data_ptr() for tensor in served]).sort()
    ends = starts + torch.tensor([tensor.nbytes for tensor in served])[order]
    begins = torch.where(table[DESTINATION] == 0, table[SOURCE], table[DESTINATION])
    place = torch.searchsorted(starts, begins, right=True) - 1
    if (place < 0).any() or (begins + 4 * table[WORDS] > ends[place]).any():
        return None
    multiplier, offset = torch.tensor([_key(k) for k in range(len(served))])[order[place]].unbind(1)
    return torch.stack([*table[:3], multiplier, (offset + multiplier * ((begins - starts[place]) // 4)) & MASK])


@functools.cache
def _key(k: int) -> tuple[int, int]:
    """Multiplier (odd) and offset that turn a position in tensor `k` into the input of the 32-bit hash."""
    bits = random.Random(k).getrandbits(62)
    return bits >> 31 | 1, bits & MASK


@functools.lru_cache(maxsize=4)
def _reading_table(places: tuple[tuple[int, int], ...], device: torch.device) -> "_Table":
    """A table that only hashes: tensors, given as (address, bytes), in this order."""
    runs = torch.tensor([(address, 0, nbytes // 4, *_key(k)) for k, (address, nbytes) in enumerate(places)]).T
    table = _cut(runs[:3])
    parts = -(-runs[WORDS] // RUN_WORDS)
    first = (table[SOURCE] - runs[SOURCE].repeat_interleave(parts)) // 4
    table[MULTIPLIER] = runs[MULTIPLIER].repeat_interleave(parts)
    table[OFFSET] = (runs[OFFSET].repeat_interleave(parts) + table[MULTIPLIER] * first) & MASK
    return _Table(table, False, device)


class _Table:
    """A table of runs, int64 [5, n], on the device. With `cast`, its copies read fp32 and write bf16."""

    def __init__(self, runs: torch.Tensor, cast: bool, device: torch.device):
        self.cast, self.runs = cast, runs.to(device)
        self.aligned = not ((runs[:2] % 16).any() or (runs[WORDS] % 4).any())

    def launch(self, digest: torch.Tensor | None) -> None:
        if digest is None:
            digest = torch.empty(1, dtype=torch.int64, device=self.runs.device)
        n = self.runs.size(1)
        if n:
            _kernel()[(n,)](self.runs, digest, n, self.cast, self.aligned, **TILING)


def load_kernel(device: torch.device) -> None:
    """Compile and load every variant of the kernel. CUDA forbids that while a graph is captured."""
    no_words = torch.zeros(5, dtype=torch.int64, device=device)  # a table of one empty run
    for cast, aligned in itertools.product((False, True), repeat=2):
        _kernel()[(1,)](no_words, torch.zeros_like(no_words), 1, cast, aligned, **TILING)


@functools.cache
def _kernel():
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["runs"])
    def kernel(
        table, digest, runs, CAST: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
    ):
        column = table + tl.program_id(0)
        source = tl.load(column).to(tl.pointer_type(tl.float32 if CAST else tl.uint32))
        destination = tl.load(column + runs).to(tl.pointer_type(tl.uint32))
        words = tl.load(column + 2 * runs).to(tl.int32)
        if ALIGNED:  # the hint must be on the pointers, not on the integers, for loads of four words at once
            source, destination = tl.multiple_of(source, 16), tl.multiple_of(destination, 16)
            words = tl.multiple_of(words, 4)
        multiplier, offset = tl.load(column + 3 * runs).to(tl.uint32), tl.load(column + 4 * runs).to(tl.uint32)
        total = tl.zeros([BLOCK], tl.int64)
        for begin in tl.range(0, words, BLOCK, num_stages=STAGES):  # loads the next blocks while one is hashed
            i = begin + tl.arange(0, BLOCK)
            inside = i < words
            if CAST:
                j = 2 * begin + tl.arange(0, 2 * BLOCK)
                floats = tl.load(source + j, j < 2 * words, 0.0)
                halves = floats.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
                low, high = tl.split(tl.reshape(halves, (BLOCK, 2)))
                word = low | (high << 16)
            else:
                word = tl.load(source + i, inside, 0)
            if destination.to(tl.int64) != 0:
                tl.store(destination + i, word, inside)
            x = i.to(tl.uint32) * multiplier + offset
            x = (x ^ (x >> 16)) * 0x7FEB352D  # MIX
            x = (x ^ (x >> 15)) * 0x846CA68B
            x = x ^ (x >> 16)
            total += (x.to(tl.uint64) * word.to(tl.uint64)).to(tl.int64, bitcast=True)
        tl.atomic_add(digest, tl.sum(total))

    return kernel
