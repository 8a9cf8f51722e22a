"""A weight as codes and scales, in memory of its own or in a program's buffer.

Rows are output channels. A value is ``(code - zero)·scale``, with one scale for the matrix, a row, or a group of neighbours in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from costmodel.low_bits import MOVED_ELEMENTS, Coding
from executors.formats import TORCH_DTYPES
from executors.low_bits.grids import Grid, Integers, grid_of
from topology.errors import ModelError

Chances = Callable[[int, int], Tensor]
"""Takes a first and a last element of a weight, and returns a float32 number in [0, 1) for each between."""

Rows = slice | Tensor
"""Some rows of a weight: neighbours, or those of ascending numbers."""

_PIECE_ELEMENTS = {"cpu": MOVED_ELEMENTS, "cuda": 1 << 22}
"""Elements that are coded or moved at a time: their temporaries stay in a CPU's cache, and are bounded on a GPU."""

SUFFIXES = ("", "_scale", "_zero")
"""Of the names of a weight's codes, scales and zero points in files."""


@dataclass
class Moved:
    """Updates of single codes, counted.

    Attributes
    ----------
    num : int
        Elements that were to move.
    unmoved : int
        Of these, such that chance left where they were.
    saturated : int
        Of these, such that would have left the grid.
    """

    num: int = 0
    unmoved: int = 0
    saturated: int = 0


@dataclass(frozen=True)
class Coded:
    """A weight.

    Attributes
    ----------
    coding : Coding
    shape : torch.Size
        Outputs and inputs.
    codes : torch.Tensor
        uint8, shape (outputs, bytes of a row).
    scales : torch.Tensor
        Shape (1, 1), (outputs, 1) or (outputs, groups).
    zeros : torch.Tensor or None
        uint8, of the same shape.
    """

    coding: Coding
    shape: torch.Size
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None

    @classmethod
    def empty(cls, coding: Coding, shape: torch.Size, device: torch.device) -> Coded:
        """Return one in memory of its own."""
        shapes = shapes_of(coding, shape)
        tensors = [torch.zeros(of, dtype=dtype, device=device) for of, dtype in shapes]
        return cls(coding, shape, *tensors)

    @classmethod
    def of_symbols(
        cls, coding: Coding, symbols: Tensor, scales: Tensor, zeros: Tensor | None = None
    ) -> Coded:
        """Return one whose codes are uint8 `symbols` of a byte each, shape (outputs, inputs); those of 8 bits are not copied."""
        return cls(coding, symbols.shape, _joined(symbols, coding.container_bits), scales, zeros)

    def symbols(self) -> Tensor:
        """Return the codes as uint8 numbers of a byte each, of which the lowest bits count."""
        return _parted(self.codes, self.coding.container_bits, self.shape[1])

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Codes, scales and zero points by the suffixes of their names."""
        held = (self.codes, self.scales, self.zeros)
        return {suffix: tensor for suffix, tensor in zip(SUFFIXES, held, strict=True) if tensor is not None}

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.codes.device

    @property
    def grid(self) -> Grid:
        """What codes stand for."""
        coding = self.coding
        return grid_of(
            coding.format, has_zero_point=coding.has_zero_point, is_full_range=coding.is_full_range
        )

    def to(self, device: torch.device) -> Coded:
        """Return it on another device; itself where it is there."""
        if self.device == device:
            return self
        moved = [tensor.to(device) for tensor in self.tensors.values()]
        return Coded(self.coding, self.shape, *moved)

    def copy_(self, other: Coded) -> None:
        """Take over codes, scales and zero points."""
        for mine, theirs in zip(self.tensors.values(), other.tensors.values(), strict=True):
            mine.copy_(theirs)

    # -- values ------------------------------------------------------------------------------------------------

    def levels(self, rows: Rows = slice(None)) -> Tensor:
        """Return what the codes of some rows stand for, before zero point and scale: int8 or int16, or float32."""
        symbols = _parted(self.codes[rows], self.coding.container_bits, self.shape[1])
        return self.grid.values(symbols)

    def values(self, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
        """Return the weights of some rows."""
        levels = self.levels(rows)
        grouped = levels.view(levels.shape[0], -1, self._group)
        if self.zeros is not None:
            grouped = grouped - self._of(self.zeros, rows)
        return torch.mul(
            grouped, self._of(self.scales, rows), out=grouped.new_empty(grouped.shape, dtype=dtype)
        ).view(levels.shape)

    def encode(self, weights: Tensor, name: str = "") -> None:
        """Take the scales that span `weights`, and the codes nearest to them.

        Raises
        ------
        ModelError
            If a weight is not finite.
        """
        for rows in self._pieces(self.shape[0], all_rows=self.coding.scales == "tensor"):
            part = weights[rows].to(torch.float32)
            if not bool(torch.isfinite(part).all()):
                raise ModelError(
                    f"{name or 'a weight'} holds numbers that are infinite or not numbers, for which there is no code",
                    hint="copy or convert the model again",
                )
            self._fit(part, rows)
            self._write(rows, self.grid.nearest(self._scaled(part, rows)))

    def _fit(self, part: Tensor, rows: slice) -> None:
        """Take the scales, and zero points, with which the grid spans some rows."""
        grid = self.grid
        grouped = (
            part.reshape(1, 1, -1)
            if self.coding.scales == "tensor"
            else part.view(len(part), -1, self._group)
        )
        least, most = grouped.amin(-1), grouped.amax(-1)
        if self.zeros is None:
            spans = torch.maximum(-least, most) / grid.high
        else:
            least, most = least.clamp(max=0), most.clamp(min=0)
            spans = (most - least) / grid.high
        # Weights that are all 0 have a scale, too: that of a grid up to 1.
        scales = torch.where(spans > 0, spans, torch.full_like(spans, 1 / grid.high)).to(self.scales.dtype)
        scales.clamp_(min=torch.finfo(scales.dtype).tiny)
        scope = slice(None) if self.coding.scales == "tensor" else rows
        self.scales[scope] = scales
        if self.zeros is not None:
            self.zeros[scope] = (-least / scales.float()).round_().clamp_(0, grid.high).to(torch.uint8)

    def _scaled(self, part: Tensor, rows: slice) -> Tensor:
        """Return where on the grid the weights of some rows lie."""
        grouped = part.view(len(part), -1, self._group) / self._of(self.scales, rows).float()
        if self.zeros is not None:
            grouped = grouped + self._of(self.zeros, rows)
        return grouped.view(part.shape)

    # -- updates -----------------------------------------------------------------------------------------------

    def move(
        self,
        direction: Tensor,
        factor: float,
        chances: Chances,
        *,
        rows: Tensor | None = None,
        decay: float = 0.0,
        counted: Moved | None = None,
    ) -> None:
        """Change the weights by ``-factor·direction - decay·weights``, rounded at random to the grid, scales as they are.

        Parameters
        ----------
        direction : torch.Tensor
            int8 or floating-point, in the shape of the weight.
        factor, decay : float
        chances : callable
            Of the elements of these rows, one after the other.
        rows : torch.Tensor, optional
            Numbers of the rows that change; by default all.
        counted : Moved, optional
            Is added to.

        Notes
        -----
        The mean of the change is exact but for codes that saturate, and for the resolution of `chances`. On integers the
        change is rounded by itself, so that one of a millionth of a step is not lost in the float32 of the code.
        """
        num_rows, width = self.shape if rows is None else (len(rows), self.shape[1])
        for piece in self._pieces(num_rows):
            chosen = piece if rows is None else rows[piece]
            levels = self.levels(chosen).float()
            grouped = levels.view(len(levels), -1, self._group)
            change = direction[chosen].view(grouped.shape) * (factor / self._of(self.scales, chosen).float())
            if decay:
                origin = self._of(self.zeros, chosen) if self.zeros is not None else 0.0
                change += decay * (grouped - origin)
            change = change.view(levels.shape)
            chance = chances(piece.start * width, piece.stop * width).view(levels.shape)
            num = 0 if counted is None else int(torch.count_nonzero(change))
            if isinstance(self.grid, Integers):
                # Away from 0 where the change and its chance reach the next whole number together.
                wanted = levels - chance.copysign_(change).add_(change).trunc_()
                moved = self.grid.clamped(wanted)
            else:
                wanted = levels - change
                moved = self.grid.at_random(wanted, chance)
            if counted is not None:
                beyond = wanted - self.grid.clamped(wanted)
                counted.num += num
                counted.saturated += int(torch.count_nonzero(beyond))
                # What saturates would have moved.
                counted.unmoved += num - int(torch.count_nonzero(moved - levels + beyond))
            self._write(chosen, moved)

    def _write(self, rows: Rows, levels: Tensor) -> None:
        self.codes[rows] = _joined(self.grid.symbols(levels), self.coding.container_bits)

    # -- pieces ------------------------------------------------------------------------------------------------

    @property
    def _group(self) -> int:
        return self.coding.group_elements if self.coding.scales == "group" else self.shape[1]

    def _of(self, scales: Tensor, rows: Rows) -> Tensor:
        """Return the scales or zero points of some rows, to broadcast over (rows, groups, elements)."""
        return (scales if self.coding.scales == "tensor" else scales[rows])[..., None]

    def _pieces(self, num_rows: int, *, all_rows: bool = False) -> Iterator[slice]:
        """Yield some of so many rows after the other."""
        num = (
            num_rows if all_rows else max(1, _PIECE_ELEMENTS.get(self.device.type, 1 << 20) // self.shape[1])
        )
        for begin in range(0, num_rows, num):
            yield slice(begin, min(begin + num, num_rows))


def shapes_of(coding: Coding, shape: torch.Size) -> list[tuple[tuple[int, int], torch.dtype]]:
    """Return shape and format of codes, scales and, where there are any, zero points of a weight."""
    outputs, inputs = shape
    scaled = {"tensor": (1, 1), "channel": (outputs, 1), "group": (outputs, inputs // coding.group_elements)}
    shapes = [
        ((outputs, coding.code_bytes((1, inputs))), torch.uint8),
        (scaled[coding.scales], TORCH_DTYPES[coding.dtype]),
    ]
    return [*shapes, (scaled[coding.scales], torch.uint8)] if coding.has_zero_point else shapes


def _joined(symbols: Tensor, bits: int) -> Tensor:
    """Return symbols of a byte each with as many in a byte as have room.

    Lowest bits hold the first part of a row, higher ones the next: passes over neighbours stay passes over neighbours.
    """
    if bits == 8:
        return symbols
    per_byte = 8 // bits
    missing = -symbols.shape[1] % per_byte
    padded = torch.nn.functional.pad(symbols, (0, missing)) if missing else symbols
    lanes = padded.view(len(symbols), per_byte, -1)
    joined = lanes[:, 0].bitwise_and(2**bits - 1)
    for lane in range(1, per_byte):
        joined |= lanes[:, lane].bitwise_and(2**bits - 1) << (lane * bits)
    return joined


def _parted(joined: Tensor, bits: int, num: int) -> Tensor:
    """Return the first `num` symbols of every row."""
    if bits == 8:
        return joined
    per_byte = 8 // bits
    lanes = joined.new_empty((len(joined), per_byte, joined.shape[1]))
    for lane in range(per_byte):
        torch.bitwise_right_shift(joined, lane * bits, out=lanes[:, lane])
    return lanes.bitwise_and_(2**bits - 1).view(len(joined), -1)[:, :num]
