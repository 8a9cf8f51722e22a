"""Rounding to few bits that is right on average."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from topology.errors import PlanError

_BITS = range(2, 9)
_CODES = range(-128, 256)
"""What one signed or unsigned byte holds."""


@dataclass(frozen=True, slots=True)
class StochasticRounding:
    """Numbers rounded to integer codes: down, or up with the probability of the fraction cut off.

    Attributes
    ----------
    bits : int
        2 to 8. Codes run from ``-(2^(b-1) - 1)`` to ``2^(b-1) - 1``: symmetric, so that no sign is favoured.
    scale : float
        Codes per unit, ``s``.
    zero_point : int
        Added to a code that is stored, ``z0``; it changes no value.

    Raises
    ------
    PlanError
        If a field is out of range, or the shifted codes fit no byte.

    Notes
    -----
    ``code(x) = clamp(⌊s·x⌋ + Bernoulli(s·x - ⌊s·x⌋), -c, c) + z0``, and the value of a code is
    ``(code - z0)/s``. The expected value is ``x`` where ``|x| <= c/s``, and ``±c/s`` beyond.

    References
    ----------
    .. [1] QuZO, equation 5; Connolly, Higham and Mary (2021), Stochastic rounding and its probabilistic backward
       error analysis.

    Examples
    --------
    >>> StochasticRounding(bits=2, scale=0.5).levels
    (-2.0, 0.0, 2.0)
    """

    bits: int
    scale: float
    zero_point: int = 0

    def __post_init__(self) -> None:
        if self.bits not in _BITS:
            raise PlanError(
                f"bits={self.bits} must be from 2 to 8", hint="wider formats have no need of codes"
            )
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise PlanError(
                f"scale={self.scale} must be positive and finite", hint="it counts codes per unit"
            )
        if self.zero_point - self.highest not in _CODES or self.zero_point + self.highest not in _CODES:
            raise PlanError(
                f"zero_point={self.zero_point} moves codes of {self.bits} bits out of a byte",
                hint=f"use 0 for signed codes, {self.highest} for unsigned ones",
            )

    @property
    def highest(self) -> int:
        """Largest code before the zero point is added, ``c``."""
        return int(2 ** (self.bits - 1) - 1)

    @property
    def levels(self) -> tuple[float, ...]:
        """Every value that can come out, in ascending order."""
        return tuple(code / self.scale for code in range(-self.highest, self.highest + 1))

    def codes(self, values: Tensor, generator: Generator) -> Tensor:
        """Return the codes of floating-point `values`, in int16."""
        scaled = values.to(_at_least_float32(values.dtype)) * self.scale
        rounded = rounded_at_random(scaled, generator)
        return rounded.clamp_(-self.highest, self.highest).to(torch.int16) + self.zero_point

    def values(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values of `codes` in `dtype`."""
        return ((codes - self.zero_point).to(_at_least_float32(dtype)) / self.scale).to(dtype)

    def rounded(self, values: Tensor, generator: Generator) -> Tensor:
        """Return `values` as their codes keep them, in their own format."""
        return self.values(self.codes(values, generator), values.dtype)


def rounded_at_random(numbers: Tensor, generator: Generator) -> Tensor:
    """Return `numbers` rounded to integers: down, or up with the probability of the fraction cut off."""
    below = numbers.floor()
    chance = torch.rand(numbers.shape, dtype=numbers.dtype, device=numbers.device, generator=generator)
    return below.add_(chance < numbers - below)


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the format to round in: half precision would make the chances coarse and the rounding biased."""
    return dtype if dtype == torch.float64 else torch.float32
