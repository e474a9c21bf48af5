"""Prepared copies and digests: every bit arrives, every flip and swap is seen, the kernel does what torch does.

pytest tests/test_copies.py
"""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from weight_sync.copies import BLOCK_WORDS, TILING, BatchedCopy, CopiesDigester, Digester, _kernel, digest

CPU = torch.device("cpu")


def test_digest_sees_every_flip_and_swap():
    tensor, other = torch.randn(5, 9).bfloat16(), torch.randn(3)
    whole = digest([tensor, other])
    assert digest([tensor.clone(), other.clone()]) == whole
    for i in range(5):
        for j in range(9):
            flipped = tensor.clone()
            flipped.view(torch.int16)[i, j] ^= 1
            assert digest([flipped, other]) != whole
    assert digest([tensor[[1, 0, 2, 3, 4]], other]) != whole
    assert digest([tensor[:, torch.tensor([1, 0, 2, 3, 4, 5, 6, 7, 8])], other]) != whole
    assert digest([other, tensor]) != whole
    long = torch.randn(2 * BLOCK_WORDS + 3)
    blocks = long.clone()
    blocks[: 2 * BLOCK_WORDS] = long[: 2 * BLOCK_WORDS].view(2, -1).flip(0).view(-1)
    last = long.clone()
    last[-1] += 1
    assert len({digest([each]) for each in (long, blocks, last)}) == 3
    square = torch.randn(256, 256)
    numbers = {digest([t]) for t in (square, 2 * square, square * 0, square * 0 + 1, square * math.nan)}
    assert len(numbers) == 5
    assert digest([]) is None


@pytest.mark.parametrize("begin", [1, 2, 4])
def test_digest_does_not_depend_on_where_a_tensor_begins(begin):
    part = torch.arange(32, dtype=torch.uint8)[begin : begin + 16]
    assert digest([part]) == digest([part.clone()])


def test_digest_of_one_element_does_not_depend_on_its_strides():
    tensor = torch.randn(3, 5).bfloat16().t()[:1, :1]
    assert digest([tensor]) == digest([torch.full((1,), tensor.item()).bfloat16()])


def test_digests_of_parts_add_up_and_tell_a_parts_place():
    tensors, totals = [torch.randn(40_000), torch.randn(7)], torch.zeros(3, 1, dtype=torch.int64)
    for number, tensor in enumerate(tensors):
        Digester([tensor], number).run(totals[0])
        Digester([tensor], 1 - number).run(totals[1])
    Digester(tensors, 1).run(totals[2])
    assert int(totals[0]) == digest(tensors)
    assert len(set(totals.flatten().tolist())) == 3


def test_digest_of_copies_is_that_of_what_they_write():
    sources = torch.randn(8, 8)[:, 4:], torch.randn(3, 5).t(), lambda out: out.fill_(3)
    written = sources[0].bfloat16(), sources[1].clone(), torch.full((7,), 3.0)
    copies = [(torch.empty(w.shape, dtype=w.dtype, device="meta"), s) for w, s in zip(written, sources, strict=True)]
    totals = torch.zeros(2, 1, dtype=torch.int64)
    CopiesDigester(CPU, copies, 5).run(totals[0])
    Digester([*written], 5).run(totals[1])
    assert totals[0] == totals[1]


def test_copies_and_fills_are_repeated_with_other_values():
    source, destination = torch.randn(8, 8), torch.zeros(10, 4)
    copies = BatchedCopy(CPU, [(destination[:8], source[:, 4:])], [(destination[8:], 3)])
    for _ in range(2):
        copies.run()
        assert destination[:8].equal(source[:, 4:])
        assert (destination[8:] == 3).all()
        source.normal_()


KERNEL = """
import torch
from weight_sync import copies
from weight_sync.copies import BatchedCopy, CopiesDigester, Digester, digest, digest_together

CPU = torch.device("cpu")
tensors = [torch.randn(70_001), torch.randn(300, 7).bfloat16(), torch.randn(10), torch.randn(5, 9).bfloat16()]
expected = digest(tensors)
copies._has_kernel = lambda device: True
copies.load_kernel(CPU)  # which touches no memory
assert digest(tensors) == expected

served = [torch.ones(64, 1024).bfloat16(), torch.ones(40, 2048), torch.ones(8), torch.ones(4, 4).bfloat16()]
rows, columns, narrow = torch.randn(32, 2048).bfloat16(), torch.randn(40, 4096), torch.randn(4, 4).bfloat16()
master = torch.randn(32, 1024).bfloat16().float()  # the interpreter truncates where a GPU rounds
first = BatchedCopy(CPU, [(served[0][:30], rows[:30, 1024:])])
last = BatchedCopy(CPU, [(served[0][32:], master), (served[1], columns[:, 2048:])], [(served[0][30:32], 3.0)])
assert not first.torch_copies and not last.torch_copies
assert digest_together([first, last], served)
assert not isinstance(last.final_digest, Digester)  # what the kernel writes is not read again
for _ in range(2):
    total = torch.zeros(1, dtype=torch.int64)
    first.run(total)
    last.run(total)
    assert int(total) == digest(served)
    assert served[0][:30].equal(rows[:30, 1024:]) and (served[0][30:32] == 3).all()
    assert served[0][32:].equal(master.bfloat16()) and served[1].equal(columns[:, 2048:]) and (served[2] == 1).all()
    rows.normal_(), columns.normal_(), served[2].fill_(1)

# A digest without the copies.
sources = [rows[:30, 1024:], master, columns[:, 2048:], narrow.t()]
written = [rows[:30, 1024:], master.bfloat16(), columns[:, 2048:], narrow.t()]
copies_digester = CopiesDigester(CPU, [(w.to("meta").contiguous(), s) for w, s in zip(written, sources)], 5)
assert len(copies_digester.others) == 1
total, alone = torch.zeros(2, 1, dtype=torch.int64)
copies_digester.run(total)
Digester(written, 5).run(alone)
assert total == alone

# The last element of an odd tensor, and a cast of more than a block.
long = torch.randn(3 * copies.BLOCK_WORDS + 100).bfloat16().float()
for source in (torch.randn(45).bfloat16(), long):
    target = torch.zeros(source.shape).bfloat16()
    BatchedCopy(CPU, [(target, source)]).run()
    assert target.equal(source.bfloat16())

# Transposed, or half a word off: torch copies. A word that is written twice, or elsewhere: read in the end.
other, outside, twice = torch.ones(17).bfloat16()[1:].view(4, 4), torch.empty(8), [(served[2], torch.ones(8))] * 2
for pairs in ([(served[3], narrow.t())], [(served[3], other)], [(outside, torch.ones(8))], twice):
    first, last = BatchedCopy(CPU, [(served[0][:30], rows[:30, 1024:])]), BatchedCopy(CPU, pairs)
    assert bool(last.torch_copies) == (pairs[0][0] is served[3])
    assert digest_together([first, last], served, 5)
    total = torch.zeros(1, dtype=torch.int64)
    first.run(total)
    last.run(total)
    assert all(destination.equal(source) for destination, source in pairs)
    alone = torch.zeros(1, dtype=torch.int64)
    Digester(served, 5).run(alone)
    assert total == alone != digest(served)
assert not digest_together([first], [*served, torch.ones(3).bfloat16()])
"""


def test_kernel_copies_casts_and_digests():
    # Triton's interpreter runs the kernel here; without a GPU there is nothing else to run it on.
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    subprocess.run([sys.executable, "-c", KERNEL], env=environment, check=True)


@pytest.mark.parametrize("cast", [False, True])
def test_compiled_kernel_moves_16_aligned_bytes_at_once(cast):
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = TILING | {"CAST": cast}
    options = {"num_warps": constants.pop("num_warps")}
    signature = {"table": "*i64", "digest": "*i64", "runs": "i32"} | dict.fromkeys([*constants, "ALIGNED"], "constexpr")
    for aligned in (False, True):
        source = ASTSource(_kernel(), signature, constants | {"ALIGNED": aligned})
        ptx = compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
        assert bool(re.search(r"cp\.async\.cg\.shared\.global .*0x10", ptx)) == aligned  # of words only 4 bytes
        assert ("st.global.v4.b32" in ptx) == aligned
