"""Copies between tensors, prepared once and run at every weight sync, and digests of tensors.

On a GPU, a table lists the copies of a bucket as runs of consecutive 32-bit words. One kernel walks the table. It
copies hundreds of tensors, casts fp32 to bf16 on the way, and hashes each word while it is in a register, so the digest
needs no second pass over memory. torch copies what does not consist of whole words, and everything on CPU.

A digest is a multilinear hash: the sum, modulo 2**64, of every 32-bit word times a coefficient. Tensors are hashed in
blocks. A word's coefficient is a 32-bit hash of its position in the block, times an odd 64-bit hash of the tensor's
number and the block's. So a CPU computes only a block of coefficients, once. Digests add up: each of several processes
may hash some of the words. An accidental difference goes unseen with a probability of 2**-32. The digest is no
protection from an attacker: the coefficients are fixed, so whoever computes them can construct changes that cancel out.
"""

import functools
import itertools

import torch

WORD_BYTES = 4
BLOCK_WORDS = 1 << 15  # runs are cut at the blocks of a tensor, so that every multiprocessor gets some
TILING = {"BLOCK": 2048, "STAGES": 4, "num_warps": 4}  # BLOCK: words per iteration; STAGES: blocks in flight
SHORTEST_RUN = 512  # bytes; torch does copies of shorter runs, such as transpositions
MASK = 0xFFFFFFFF
MIX = ((16, 0x7FEB352D), (15, 0x846CA68B))  # shifts and factors of Wellons' lowbias32, a 32-bit hash
MIX_LONG = ((30, 0x3F58476D1CE4E5B9), (27, 0x14D049BB133111EB))  # of a 64-bit hash, in the manner of splitmix64
# Rows of runs: addresses and a length. A run with destination 0 is only hashed. Tables have two more rows: the
# multiplier of the run's block, 0 to hash nothing, and the input of the 32-bit hash for the run's first word.
SOURCE, DESTINATION, WORDS = range(3)


class BatchedCopy:
    """Many copies and fills as one operation.

    A copy is a (destination, source) of the same shape, a fill a (destination, value). A source may also be a function
    that writes to the destination it is given. The tables hold addresses, so the destinations must outlive this object.
    It keeps the sources alive itself.
    """

    def __init__(self, device: torch.device, pairs: list[tuple], fills: list[tuple] = ()):
        self.device, self.fills = device, fills
        self.sources = [source for _, source in pairs]
        self.computed = [pair for pair in pairs if callable(pair[1])]
        self.torch_copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        runs_by_cast = {False: [], True: []}
        for destination, source in (pair for pair in pairs if not callable(pair[1])):
            runs = runs_of(destination, source)
            if runs is None:
                self.torch_copies.append((destination, source))
            else:
                runs_by_cast[destination.dtype != source.dtype].append(runs)
        self.runs = {cast: torch.cat(runs, 1) for cast, runs in runs_by_cast.items() if runs}  # by whether they cast
        self.tables = [Table(runs, cast, device) for cast, runs in self.runs.items()]
        self.final_digest: Digester | Table | None = None  # hashes, after all copies, the words that no copy hashes

    def compute(self) -> None:
        """Run the sources that are functions."""
        for destination, write in self.computed:
            write(destination)

    def run(self, total: torch.Tensor | None = None) -> None:
        """Run in the current stream. After `digest_together`, adds the digest to `total`, int64 [1]."""
        for destination, value in self.fills:
            destination.fill_(value)
        self.compute()
        if self.torch_copies:
            # No public function of torch copies a list of tensors with few launches: `copy_` takes one for each.
            torch._foreach_copy_(*map(list, zip(*self.torch_copies, strict=True)))
        for table in self.tables:
            table.run(total)
        if self.final_digest and total is not None:
            self.final_digest.run(total)


def digest_together(copies: list[BatchedCopy], tensors: list[torch.Tensor], first_number: int = 0) -> bool:
    """Make these copies compute the digest of `tensors`, as numbers `first_number` and up, while they run.

    Each copy hashes the words that its kernel writes. The last one then reads all other words. Returns False, and
    changes nothing, if some of the tensors do not consist of whole words.
    """
    if not all(map(_in_words, tensors)):
        return False
    device, written = copies[-1].device, [runs for copy in copies for runs in copy.runs.values()]
    unwritten = _unwritten(written, tensors) if _has_kernel(device) else None
    if unwritten is None:
        copies[-1].final_digest = Digester(tensors, first_number)
        return True

    def table(runs: torch.Tensor, cast: bool, hashed: int) -> Table:
        """A table of these runs. `hashed` is the row of the addresses that lie in `tensors`."""
        number, byte = locate(runs[hashed], WORD_BYTES * runs[WORDS], tensors)
        return Table(runs, cast, device, first_number + number, byte // WORD_BYTES)

    for copy in copies:
        copy.tables = [table(runs, cast, DESTINATION) for cast, runs in copy.runs.items()]
    copies[-1].final_digest = table(unwritten, False, SOURCE) if unwritten.size(1) else None
    return True


def _unwritten(written: list[torch.Tensor], tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """The words of `tensors` that no run writes, as runs [3, n] that are only hashed.

    None if the runs write a word twice, or one outside `tensors`.
    """
    starts = torch.tensor([tensor.data_ptr() for tensor in tensors])
    ends = starts + torch.tensor([tensor.nbytes for tensor in tensors])
    runs = torch.cat([torch.zeros(3, 0).long(), *written], 1)
    begins, nbytes = runs[DESTINATION], WORD_BYTES * runs[WORDS]
    outside = locate(begins, nbytes, tensors)[0] < 0
    # An empty run at both ends of every tensor. In the order of memory, what lies between two runs is then unwritten,
    # and wholly in a tensor or wholly outside.
    begins, reached = torch.cat([starts, ends, begins]), torch.cat([starts, ends, begins + nbytes])
    order = begins.argsort(stable=True)
    gaps = reached[order][:-1]  # where they begin
    sizes = begins[order][1:] - gaps
    if outside.any() or (sizes < 0).any():
        return None
    found = (sizes > 0) & (locate(gaps, sizes, tensors)[0] >= 0)
    return torch.stack([gaps, torch.zeros_like(gaps), sizes // WORD_BYTES])[:, found]


class Digester:
    """Computes the digest of tensors, as numbers `first_number` and up.

    It reads them in place. It keeps a copy of a tensor that is not contiguous, or begins or ends within a word.
    """

    def __init__(self, tensors: list[torch.Tensor], first_number: int = 0):
        # Not view(-1): of one element, that keeps the stride, and torch views only a stride of 1 as bytes.
        flat = [tensor.contiguous().as_strided((tensor.numel(),), (1,)) for tensor in tensors]
        pad = torch.nn.functional.pad  # copies, to an address that words can be read from
        flat = [t if _in_words(t) else pad(t.view(torch.uint8), (0, -t.nbytes % WORD_BYTES)) for t in flat]
        self.words, self.table = [t.view(torch.int32) for t in flat], None
        device = flat[0].device
        if _has_kernel(device):
            self.table = _digest_table(tuple((w.data_ptr(), len(w)) for w in self.words), first_number, device)
            return
        blocks = [torch.arange(-(-len(words) // BLOCK_WORDS)) for words in self.words]
        numbers = [torch.full_like(block, number) for number, block in enumerate(blocks, first_number)]
        self.multipliers = _multipliers(torch.cat(numbers), torch.cat(blocks))

    def run(self, total: torch.Tensor) -> None:
        """Add the digest to `total`, int64 [1]."""
        if self.table:
            self.table.run(total)
            return
        coefficients, sums = _coefficients(), []
        for words in self.words:
            end = len(words) // BLOCK_WORDS * BLOCK_WORDS  # of the whole blocks
            sums += [chunk.view(-1, BLOCK_WORDS).long().mv(coefficients) for chunk in words[:end].split(1 << 20)]
            if len(words) > end:
                sums.append(words[end:].long().dot(coefficients[: len(words) - end]).view(1))
        total += torch.cat(sums).dot(self.multipliers)


class CopiesDigester:
    """Computes the digest that `Digester` would compute of the destinations of copies, and copies nothing.

    Copies are as in `BatchedCopy`. Their destinations are meta tensors, each in one piece.
    """

    def __init__(self, device: torch.device, copies: list[tuple], first_number: int = 0):
        self.device, self.others, runs = device, [], {}  # others: what no kernel hashes where it is; runs by cast
        for number, (destination, source) in enumerate(copies, first_number):
            found = None if callable(source) else runs_of(destination, source)
            if found is None:
                self.others.append((number, destination, source))
            else:
                address, byte, words = found  # a meta tensor's address is 0, so `byte` is that of the destination
                hashed = [address, torch.zeros_like(byte), words, torch.full_like(words, number), byte // WORD_BYTES]
                runs.setdefault(source.dtype != destination.dtype, []).append(torch.stack(hashed))
        joined = [(cast, torch.cat(each, 1)) for cast, each in runs.items()]
        self.tables = [Table(each[:3], cast, device, *each[3:]) for cast, each in joined]

    def run(self, total: torch.Tensor) -> None:
        """Add the digest to `total`, int64 [1], on a GPU after what is queued so far."""
        for table in self.tables:
            table.run(total)
        for number, destination, source in self.others:
            written = torch.empty_like(destination, device=self.device)
            source(written) if callable(source) else written.copy_(source)
            Digester([written], number).run(total)


@torch.no_grad()
def digest(tensors: list[torch.Tensor]) -> int | None:
    """The digest of these tensors, in this order; None if there are none. GPU and CPU give the same number."""
    if not tensors:
        return None
    total = torch.zeros(1, dtype=torch.int64, device=tensors[0].device)
    Digester(tensors).run(total)
    return int(total)


def _has_kernel(device: torch.device) -> bool:
    return device.type == "cuda"


def _in_words(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.nbytes % WORD_BYTES == 0 and tensor.data_ptr() % WORD_BYTES == 0


def runs_of(destination: torch.Tensor, source: torch.Tensor) -> torch.Tensor | None:
    """The copy as runs [3, n]. None if it needs a part of a word, a cast that the kernel lacks, or runs too short, or
    where there is no kernel."""
    if not _has_kernel(source.device):
        return None
    if source.dtype != destination.dtype and (source.dtype, destination.dtype) != (torch.float32, torch.bfloat16):
        return None
    dim, run = destination.dim(), 1  # dimensions before a run, and its elements
    while dim and (destination.size(dim - 1) == 1 or destination.stride(dim - 1) == source.stride(dim - 1) == run):
        dim -= 1
        run *= destination.size(dim)
    nbytes = run * destination.itemsize
    if nbytes % WORD_BYTES or (dim and nbytes < SHORTEST_RUN):
        return None
    addresses = []
    for tensor in (source, destination):
        offsets = torch.zeros(1, dtype=torch.int64)
        for size, stride in zip(tensor.shape[:dim], tensor.stride(), strict=False):
            offsets = (offsets[:, None] + stride * torch.arange(size)).flatten()
        addresses.append(tensor.data_ptr() + tensor.itemsize * offsets)
    if any((address % WORD_BYTES).any() for address in addresses):
        return None
    return torch.stack([*addresses, torch.full_like(addresses[0], nbytes // WORD_BYTES)])


def locate(
    address: torch.Tensor, nbytes: torch.Tensor, tensors: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the tensors in which these ranges of memory lie.

    Returns the number of each range's tensor, -1 if none holds all of it, and the byte of that tensor where it begins.
    """
    starts, order = torch.tensor([tensor.data_ptr() for tensor in tensors]).sort()
    ends = starts + torch.tensor([tensor.nbytes for tensor in tensors])[order]
    nearest = torch.searchsorted(starts, address, right=True) - 1  # the last tensor that starts at or before it
    inside = (nearest >= 0) & (address + nbytes <= ends[nearest])
    return torch.where(inside, order[nearest], -1), address - starts[nearest]


def _multipliers(number: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """Odd 64-bit numbers for these blocks of tensors."""
    x = (number << 32 | block) * MIX_LONG[0][1]
    for shift, factor in MIX_LONG:
        x = (x ^ (x >> shift)) * factor
    return x ^ (x >> 32) | 1


@functools.cache
def _coefficients() -> torch.Tensor:
    """The coefficients of a block's words, on the CPU: 32-bit numbers as int64. None of them is 0."""
    x = MASK - torch.arange(BLOCK_WORDS)
    for shift, factor in MIX:
        x = (x ^ (x >> shift)) * factor & MASK
    return (x ^ (x >> 16)).int().long()


@functools.lru_cache(maxsize=4)
def _digest_table(words_at: tuple[tuple[int, int], ...], first_number: int, device: torch.device) -> "Table":
    """A table that only hashes tensors, given as (address, words)."""
    address, words = torch.tensor(words_at).T
    numbers = first_number + torch.arange(len(words_at))
    return Table(torch.stack([address, torch.zeros_like(address), words]), False, device, numbers)


class Table:
    """The runs [3, n], cut at the ends of blocks, as rows int64 [5, m] on the device.

    With `cast`, copies read fp32 and write bf16. A run is hashed as words of tensor `number`, from its word `word`
    on; both are [n], or `word` is 0 for all runs. Without `number`, nothing is hashed.
    """

    def __init__(self, runs, cast: bool, device: torch.device, number=None, word: torch.Tensor | int = 0):
        word = word + torch.zeros_like(runs[WORDS])
        first_block, end = word // BLOCK_WORDS, word + runs[WORDS]
        counts = -(-end // BLOCK_WORDS) - first_block  # of the blocks that each run reaches into
        block = first_block.repeat_interleave(counts)
        block += torch.arange(len(block)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        source, destination, _, word, end = torch.stack([*runs, word, end]).repeat_interleave(counts, 1)
        begin = (block * BLOCK_WORDS).maximum(word)
        rows = [
            source + (2 if cast else 1) * WORD_BYTES * (begin - word),
            destination + WORD_BYTES * (begin - word) * (destination != 0),
            ((block + 1) * BLOCK_WORDS).minimum(end) - begin,
            torch.zeros_like(block) if number is None else _multipliers(number.repeat_interleave(counts), block),
            MASK - begin % BLOCK_WORDS,
        ]
        rows = torch.stack(rows)
        self.cast, self.aligned = cast, not ((rows[:2] % 16).any() or (rows[WORDS] % 4).any())
        self.rows = rows.to(device)

    def run(self, total: torch.Tensor | None) -> None:
        """Copy, in the current stream, and add the digest to `total`, int64 [1]."""
        if total is None:
            total = torch.empty(1, dtype=torch.int64, device=self.rows.device)
        if runs := self.rows.size(1):
            _kernel()[(runs,)](self.rows, total, runs, self.cast, self.aligned, **TILING)


def load_kernel(device: torch.device) -> None:
    """Compile and load every variant of the kernel. CUDA forbids that while a graph is captured."""
    if not _has_kernel(device):
        return
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
        multiplier, first = tl.load(column + 3 * runs), tl.load(column + 4 * runs).to(tl.uint32)
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
            x = first - i.to(tl.uint32)
            x = (x ^ (x >> 16)) * 0x7FEB352D  # MIX
            x = (x ^ (x >> 15)) * 0x846CA68B
            x = x ^ (x >> 16)
            # Both signed, so that one instruction multiplies them.
            total += x.to(tl.int32, bitcast=True).to(tl.int64) * word.to(tl.int32, bitcast=True).to(tl.int64)
        tl.atomic_add(digest, tl.sum(total) * multiplier)

    return kernel
