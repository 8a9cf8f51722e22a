"""Grids of quantized values, with rounding to the nearest value and unbiased stochastic rounding.

A grid has units of its own, which a scale turns into weights. Stochastic rounding of ``x`` between neighbours ``a <= x <= b`` gives
``b`` with probability ``(x - a)/(b - a)``. Its mean is ``x``, and its variance ``(x - a)·(b - x)``. Both roundings clamp at the ends.

.. [1] QuZO, equations 5 and 6.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from math import frexp, ldexp

import torch
from torch import Tensor

from costmodel.formats import FORMATS, QuantFormat


def towards_zero(numbers: Tensor) -> Tensor:
    """Truncate `numbers` in place, as ``trunc_`` does, which torch does not vectorise on every CPU."""
    return numbers.div_(1, rounding_mode="trunc")


def num_nonzero(numbers: Tensor) -> Tensor:
    """Count nonzero numbers; on a CPU as Booleans, which it counts faster."""
    return torch.count_nonzero(numbers.bool() if numbers.device.type == "cpu" else numbers)


class Grid(ABC):
    """The values of a format, symmetric about 0 or not."""

    # low, high: least and largest value.
    low: float
    high: float

    @abstractmethod
    def below(self, numbers: Tensor) -> Tensor:
        """Round each number down to the grid, which continues beyond its ends."""

    @abstractmethod
    def step(self, numbers: Tensor) -> Tensor | float:
        """Return the distance from :meth:`below` to the next value."""

    @abstractmethod
    def symbols(self, values: Tensor) -> Tensor:
        """Return grid values as they are stored: uint8, of which the lowest bits count."""

    @abstractmethod
    def values(self, symbols: Tensor) -> Tensor:
        """Return the grid values of stored `symbols`: int8, int16 or float32."""

    def clamped(self, numbers: Tensor) -> Tensor:
        """Clamp numbers to the range of the grid."""
        return numbers.clamp(self.low, self.high)

    def nearest(self, numbers: Tensor) -> Tensor:
        """Round to the nearest grid value; ties go down."""
        inside = self.clamped(numbers)
        below, step = self.below(inside), self.step(inside)
        return below.add_(((inside - below) / step).round_() * step)

    def at_random(self, numbers: Tensor, uniforms: Tensor) -> Tensor:
        """Round each number stochastically to one of its two neighbours.

        - `numbers`: float32 or float64.
        - `uniforms`: independent and uniform on [0, 1), one for each.
        """
        inside = self.clamped(numbers)
        below, step = self.below(inside), self.step(inside)
        return below.add_((uniforms * step < inside - below) * step)

    def variance(self, numbers: Tensor) -> Tensor:
        """Return the variance of :meth:`at_random`, whose mean is :meth:`clamped`."""
        inside = self.clamped(numbers)
        below, step = self.below(inside), self.step(inside)
        return (inside - below) * (below + step - inside)


@dataclass(frozen=True)
class Integers(Grid):
    """Integers from `low` to `high`, in two's complement if `low` is negative."""

    low: float
    high: float

    def below(self, numbers: Tensor) -> Tensor:
        """Round down."""
        return numbers.floor()

    def step(self, numbers: Tensor) -> Tensor | float:  # noqa: ARG002 - others differ along the grid
        """Return 1."""
        return 1.0

    def at_random(self, numbers: Tensor, uniforms: Tensor) -> Tensor:
        """Round stochastically in fewer passes: add the uniforms, then round down.

        The sum is rounded once, so a mean may be off by the last bit of the largest value. `uniforms` is overwritten.
        """
        return uniforms.add_(numbers).floor_().clamp_(self.low, self.high)

    def symbols(self, values: Tensor) -> Tensor:
        """Return the low byte of each number."""
        # By way of int16: what uint8 makes of a negative float is not defined.
        return values.to(torch.int16).to(torch.uint8)

    def values(self, symbols: Tensor) -> Tensor:
        """Return the integers: int8 if they are signed, else int16."""
        if self.low >= 0:
            return symbols.to(torch.int16)
        signed = symbols.view(torch.int8)
        # The sign is the highest of the bits that count.
        bits = round(self.high).bit_length() + 1
        if bits == 8:
            return signed
        return torch.bitwise_left_shift(signed, 8 - bits).bitwise_right_shift_(8 - bits)


@dataclass(frozen=True)
class Floats(Grid):
    """Signed binary floating-point numbers, with subnormals and without infinities."""

    mantissa_bits: int
    smallest_exponent: int  # of a normal number
    high: float

    @property
    def low(self) -> float:  # type: ignore[override]
        """Least value."""
        return -self.high

    def step(self, numbers: Tensor) -> Tensor:
        """Return the distance between the neighbours of each number, constant between powers of two."""
        # frexp gives a mantissa below 1, and so an exponent one too high.
        exponents = torch.frexp(numbers)[1].sub_(1).clamp_(min=self.smallest_exponent)
        return torch.ldexp(torch.ones_like(numbers), exponents - self.mantissa_bits)

    def below(self, numbers: Tensor) -> Tensor:
        """Round down to the grid."""
        step = self.step(numbers)
        return (numbers / step).floor_().mul_(step)

    def symbols(self, values: Tensor) -> Tensor:
        """Return the bits of each number."""
        wide = self._wide_type
        if wide is not None:  # the cast rounds nothing: these are values of the grid
            return values.to(wide).view(torch.uint8)
        magnitudes = values.abs().contiguous()
        symbols = torch.bucketize(magnitudes, self._magnitudes(values), out_int32=True).to(torch.uint8)
        return symbols.add_(torch.signbit(values).to(torch.uint8).mul_(len(self._levels)))

    def values(self, symbols: Tensor) -> Tensor:
        """Return the numbers, in float32."""
        wide = self._wide_type
        if wide is not None:
            return symbols.view(wide).to(torch.float32)
        magnitudes = self._magnitudes(symbols)
        both = torch.cat([magnitudes, -magnitudes])
        # Numbers of 32 bits, since an index of 64 would take twice as much as what is made.
        chosen = symbols.bitwise_and(2 * len(self._levels) - 1).int()
        return both.index_select(0, chosen.view(-1)).view(symbols.shape)

    @property
    def num_finite(self) -> int:
        """Number of nonnegative finite values, in formats that also have NaNs or infinities; else 0."""
        wide = self._wide_type
        return 0 if wide is None else {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}[wide]

    @property
    def _wide_type(self) -> torch.dtype | None:
        """The torch dtype of the format, if it has eight bits."""
        bytes_of_torch = {(3, -6): torch.float8_e4m3fn, (2, -14): torch.float8_e5m2}
        return bytes_of_torch.get((self.mantissa_bits, self.smallest_exponent))

    @property
    def _levels(self) -> tuple[float, ...]:
        """Magnitudes in ascending order, subnormals first.

        >>> Floats(1, 0, 6.0)._levels
        (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
        """
        steps = 2**self.mantissa_bits
        digits = [(0, number) for number in range(steps)]
        exponents = range(frexp(self.high)[1] - self.smallest_exponent)
        digits += [(exponent, steps + number) for exponent in exponents for number in range(steps)]
        levels = (ldexp(digit / steps, self.smallest_exponent + exponent) for exponent, digit in digits)
        return tuple(level for level in levels if level <= self.high)

    def _magnitudes(self, like: Tensor) -> Tensor:
        # From pinned memory, so that the host does not wait for the device.
        levels = torch.tensor(self._levels, dtype=torch.float32, pin_memory=like.device.type != "cpu")
        return levels.to(like.device, non_blocking=True)


@cache
def grid_of(name: QuantFormat, *, has_zero_point: bool = False, is_full_range: bool = False) -> Grid:
    """Return the grid of a format, in units of its scale.

    - `name`: such as ``"int4"``.
    - `has_zero_point`: whether integers start at 0, with a zero point to subtract; else they are symmetric about 0.
    - `is_full_range`: whether symmetric integers have one more negative value, such as -8 of int4.
    """
    if name in _FLOATS:
        return _FLOATS[name]
    bits = FORMATS[name].bits
    if has_zero_point:
        return Integers(0, 2**bits - 1)
    highest = 2 ** (bits - 1) - 1
    return Integers(-highest - is_full_range, highest)


_FLOATS: dict[str, Grid] = {
    "float8_e4m3": Floats(3, -6, 448.0),
    "float8_e5m2": Floats(2, -14, 57344.0),
    "float4_e2m1": Floats(1, 0, 6.0),
}
