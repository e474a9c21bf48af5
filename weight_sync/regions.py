"""Regions: the elements of a piece that one copy of a worker's loaders reads. It needs no others."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from .buckets import Piece, aligned
from .lora import LoRAWeight, Merge


class Region(NamedTuple):
    """Elements of a piece, in the order in which they are copied."""

    piece: Piece
    offset: int  # of the first element, in the piece
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def message(self) -> tuple:
        """What is sent of it: the other side has the same pieces."""
        return self.piece.number, *self[1:]

    @classmethod
    def read(cls, message: list, pieces: list[Piece]) -> "Region":
        number, offset, size, stride = message
        return cls(pieces[number], offset, tuple(size), tuple(stride))

    @property
    def numel(self) -> int:
        return torch.Size(self.size).numel()

    @property
    def nbytes(self) -> int:
        """The bytes that it takes in a payload."""
        return aligned(self.numel * self.piece.dtype.itemsize)


def whole(piece: Piece) -> Region:
    """All elements of a piece: [rows, row]."""
    return Region(piece, 0, (piece.count // piece.row, piece.row), (piece.row, 1))


def cut(destination: torch.Tensor, copied: torch.Tensor, piece: Piece) -> tuple[torch.Tensor, Region] | None:
    """What a traced copy reads from a piece, and the view of the destination that this is for; None if it is nothing.

    The trace saw `destination.copy_(copied)`, where `copied` is a view of a meta tensor of the full shape. Raises
    NotImplementedError if the piece has not all rows of the tensor, and these are not copied row by row.
    """
    begin = 0
    if piece.count < torch.Size(piece.shape).numel():
        row, begin = piece.row, piece.begin
        dims = [dim for dim, stride in enumerate(copied.stride()) if stride == row and copied.size(dim) > 1]
        across = [i for i in range(copied.dim()) if i not in dims]  # dimensions within a row
        first, column = divmod(copied.storage_offset(), row)
        last_column = column + sum((copied.size(dim) - 1) * copied.stride(dim) for dim in across)
        if len(dims) > 1 or last_column >= row:
            raise NotImplementedError(f"{piece.name}: it is cut, and not copied by rows")
        rows = copied.size(dims[0]) if dims else 1
        low = max(piece.begin // row, first)
        count = min((piece.begin + piece.count) // row, first + rows) - low
        if count <= 0:
            return None
        for dim in dims:
            destination, copied = (view.narrow(dim, low - first, count) for view in (destination, copied))
    if not copied.numel():
        return None
    return destination, Region(piece, copied.storage_offset() - begin, tuple(copied.size()), copied.stride())


def copy_of(
    destination: torch.Tensor, region: Region, elements: torch.Tensor, adapted: LoRAWeight | None = None
) -> tuple[torch.Tensor, torch.Tensor | Callable]:
    """The copy (destination, source) of a region, as `BatchedCopy` takes it. `elements` [count] are those of its piece,
    in any dtype: of the base, if the weight is `adapted`."""
    piece, columns, destination = region.piece, region.piece.row, destination.view(region.size)
    source = elements.as_strided(region.size, region.stride, elements.storage_offset() + region.offset)
    if adapted is None:
        return destination, source
    first_row, first_column = divmod(piece.begin + region.offset, columns)
    if region.stride == (columns, 1) and first_column + region.size[1] <= columns:
        return destination, Merge(adapted, source, first_row, first_column)
    if region.stride == (1, columns) and first_column + region.size[0] <= columns:
        turned = replace(adapted, transposed=not adapted.transposed)
        return destination, Merge(turned, source, first_column, first_row)

    def merge(out: torch.Tensor) -> None:  # of what is copied neither by rows nor by columns, such as every third row
        out.copy_(merged(piece, elements, adapted).as_strided(region.size, region.stride, region.offset))

    return destination, merge


def merged(piece: Piece, elements: torch.Tensor, adapted: LoRAWeight) -> torch.Tensor:
    """The elements [count] of an adapted weight's piece, a new tensor. `elements` [count] are the base's."""
    out = torch.empty(piece.count, dtype=piece.dtype, device=elements.device)
    rows, merge = copy_of(out, whole(piece), elements, adapted)
    merge(rows)
    return out
