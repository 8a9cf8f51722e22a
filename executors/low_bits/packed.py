"""Rounded perturbations of fewer than 8 bits, of which several values share a byte; read and written by ranges or rows.

Neighbours share a byte, the lowest bits the first. So blocks of a perturbation that threads draw by themselves, each of a multiple
of four elements, have bytes of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from costmodel.formats.low_bits import PACKED_ELEMENTS

CHUNK_ELEMENTS = {"cpu": PACKED_ELEMENTS, "cuda": 1 << 22}
"""Values that are unpacked or packed at a time, so that temporaries fit a CPU's cache, and are bounded on a GPU."""

_WIDE = {4: torch.int16, 2: torch.int32}
"""What holds as many bytes as a byte holds quantized values."""

_SHIFTS = {4: (4,), 2: (12, 6)}
"""Shifts, with :data:`_MASKS`, by which the quantized values of a byte go to the lowest bits of bytes of their own, half of them at a time."""

_MASKS = {4: (0x0F0F,), 2: (0x000F000F, 0x03030303)}


@dataclass(frozen=True)
class PackedValues:
    """Packed values from ``-2^(bits-1)`` to ``2^(bits-1) - 1``, read and written as int8 tensors.

    >>> qvalues = PackedValues(torch.zeros(3, dtype=torch.uint8), torch.Size((2, 3)), 4)
    >>> qvalues[:] = torch.tensor([[1, -2, 3], [-8, 7, 0]], dtype=torch.int8)
    >>> qvalues.memory.tolist(), qvalues[1:].tolist()
    ([225, 131, 7], [[-8, 7, 0]])
    """

    memory: Tensor  # uint8, one-dimensional
    shape: torch.Size
    bits: int  # 2 or 4

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self.memory.device

    def numel(self) -> int:
        """Return the number of values."""
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]

    def view(self, *shape: int) -> PackedValues:
        """Return the same values in another shape; one dimension may be -1."""
        given = prod(size for size in shape if size >= 0)
        sizes = (self.numel() // max(1, given) if size < 0 else size for size in shape)
        return PackedValues(self.memory, torch.Size(sizes), self.bits)

    def split(self, num: int) -> list[PackedValues]:
        """Split one dimension into chunks of `num` values, a multiple of four, and a last chunk."""
        ends = [*range(0, self.numel(), num), self.numel()]
        return [
            PackedValues(self._bytes(begin, end), torch.Size((end - begin,)), self.bits)
            for begin, end in pairwise(ends)
        ]

    def zero_(self) -> PackedValues:
        """Set all values to 0."""
        self.memory.zero_()
        return self

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        """Return some rows, or elements where there is one dimension, as a tensor of their own."""
        if isinstance(rows, slice):
            first, last, _ = rows.indices(len(self))
            begin, end = first * self._row_elements, last * self._row_elements
            kept = begin % self._per_byte  # rows may begin within a byte
            qvalues = self._taken_out(self._bytes(begin, end))[kept : kept + end - begin]
            return qvalues.view(last - first, *self.shape[1:])
        if self._row_elements % self._per_byte:  # no row is a number of bytes
            return self[:][rows]
        chosen = self.memory.view(len(self), -1)[rows]
        return self._taken_out(chosen.view(-1)).view(len(rows), *self.shape[1:])

    def __setitem__(self, rows: slice | Tensor, qvalues: Tensor) -> None:
        """Write integers to some rows, or to a range that begins with a byte."""
        if isinstance(rows, slice):
            first, last, _ = rows.indices(len(self))
            begin, end = first * self._row_elements, last * self._row_elements
            # Whoever else writes to a byte at the ends would lose its quantized values, or these.
            assert begin % self._per_byte == 0
            assert end % self._per_byte == 0 or end == self.numel()
            self._put_in(qvalues.reshape(-1), self._bytes(begin, end))
        elif self._row_elements % self._per_byte:
            whole = self[:]
            whole[rows] = qvalues.to(torch.int8)
            self[:] = whole
        else:
            packed = self.memory.new_empty((len(rows), self._row_elements // self._per_byte))
            self._put_in(qvalues.reshape(-1), packed.view(-1))
            self.memory.view(len(self), -1)[rows] = packed

    @property
    def _per_byte(self) -> int:
        return 8 // self.bits

    @property
    def _row_elements(self) -> int:
        return prod(self.shape[1:])

    def _bytes(self, begin: int, end: int) -> Tensor:
        """Return the bytes that hold some elements."""
        return self.memory[begin // self._per_byte : -(-end // self._per_byte)]

    def _chunks(self, num_bytes: int) -> Iterator[slice]:
        length = CHUNK_ELEMENTS.get(self.device.type, 1 << 22) // self._per_byte
        for begin in range(0, num_bytes, length):
            yield slice(begin, begin + length)

    def _taken_out(self, packed: Tensor) -> Tensor:
        """Unpack all values of some bytes."""
        qvalues = packed.new_empty(len(packed) * self._per_byte, dtype=torch.int8)
        spread, sign = qvalues.view(_WIDE[self.bits]), 1 << self.bits - 1
        for chunk in self._chunks(len(packed)):
            # Half of a byte's quantized values go where they belong at a time, with those of all bytes of the chunk.
            here = spread[chunk].copy_(packed[chunk])
            for shift, mask in zip(_SHIFTS[self.bits], _MASKS[self.bits], strict=True):
                here.bitwise_or_(here << shift).bitwise_and_(mask)
            # Two's complement of few bits in that of eight.
            here.view(torch.int8).bitwise_xor_(sign).sub_(sign)
        return qvalues

    def _put_in(self, qvalues: Tensor, packed: Tensor) -> None:
        """Pack values, and zeros into the rest of the last byte."""
        whole = len(qvalues) // self._per_byte
        for chunk in self._chunks(whole):
            self._join(
                qvalues[chunk.start * self._per_byte : min(chunk.stop, whole) * self._per_byte],
                packed[chunk.start : min(chunk.stop, whole)],
            )
        if missing := -len(qvalues) % self._per_byte:
            self._join(
                torch.nn.functional.pad(qvalues[whole * self._per_byte :], (0, missing)), packed[whole:]
            )

    def _join(self, qvalues: Tensor, packed: Tensor) -> None:
        here = torch.empty_like(qvalues, dtype=torch.int8).copy_(qvalues).bitwise_and_((1 << self.bits) - 1)
        joined = here.view(_WIDE[self.bits])
        for shift in reversed(_SHIFTS[self.bits]):
            joined.bitwise_or_(joined >> shift)
        packed.copy_(joined.bitwise_and_(255))


QValues = Tensor | PackedValues
"""A rounded perturbation: int8, or packed."""


def packed_shape_bytes(shape: Sequence[int], bits: int) -> int:
    """Return the bytes of packed values in a shape."""
    return -(-prod(shape) * bits // 8)
