"""Symbols that a codec makes of a tensor: how many are kept and how they are distributed, counted, measured or expected."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from pydantic import BaseModel, ConfigDict, Field

from topology.errors import PlanError

_ONE_SIGN = 0.5


class TensorSymbols(BaseModel):
    """What is known of the symbols of one tensor that crosses a boundary."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    density: float = Field(ge=0, le=1)  # part of them that is not the most frequent one
    # Entropy of a symbol; None to expect it from the density.
    entropy_bits: float | None = Field(default=None, ge=0, le=8)


class BoundarySymbols(BaseModel):
    """What is known of the tensors that cross one boundary."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    first: TensorSymbols  # of the MLP's activation; behind a block of the hidden state
    # Of the residual stream beside an activation; None takes it to be normal.
    residual: TensorSymbols | None = None


@dataclass(frozen=True, slots=True)
class SymbolStatistics:
    """What decides the size of a message."""

    num_elements: int
    num_columns: int  # length of the last dimension
    bits: int
    num_kept: int  # elements whose symbol is not the background, `k`
    # How often each symbol occurs. Without it, kept symbols count as equally frequent, which is the worst case.
    histogram: tuple[int, ...] | None = None
    # Entropy of a symbol where it was measured and the histogram was not.
    measured_entropy_bits: float | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.num_kept <= self.num_elements
        assert self.histogram is None or sum(self.histogram) == self.num_elements

    @property
    def density(self) -> float:
        """Part of the elements that is kept."""
        return self.num_kept / self.num_elements if self.num_elements else 0.0

    @property
    def num_rows(self) -> int:
        """Number of rows of `num_columns` elements."""
        return self.num_elements // self.num_columns if self.num_columns else 0

    @property
    def counts(self) -> tuple[float, ...]:
        """How often each symbol occurs, or is taken to occur."""
        if self.histogram is not None:
            return self.histogram
        others = 2**self.bits - 1
        return (self.num_elements - self.num_kept, *(self.num_kept / others for _ in range(others)))

    @property
    def entropy_bits(self) -> float:
        """Entropy of a symbol in bits, ``-Σ p·log2 p``."""
        if self.measured_entropy_bits is not None:
            return self.measured_entropy_bits
        total = self.num_elements
        return sum(-n / total * math.log2(n / total) for n in self.counts if n) if total else 0.0


def statistics_of_density(
    shape: Sequence[int], *, bits: int, density: float, histogram: tuple[int, ...] | None = None
) -> SymbolStatistics:
    """Return the statistics of a tensor of `shape` of which a part `density` is kept.

    Raises PlanError if the density is not from 0 to 1.
    """
    if not 0 <= density <= 1:
        raise PlanError(
            f"density={density} must be from 0 to 1",
            hint="a density is the fraction of values that are not zero",
        )
    numel = math.prod(shape)
    return SymbolStatistics(numel, shape[-1] if shape else 1, bits, round(density * numel), histogram)


def activation_statistics(
    shape: Sequence[int], *, bits: int, known: TensorSymbols | None = None
) -> SymbolStatistics:
    """Return the statistics of a tensor of which this is known; None for what is dense, as a residual stream.

    Numbers are taken to be normal, of deviation 1, and the largest of ``N`` to be ``sqrt(2 ln N)``. The largest symbol of
    the symmetric grid stands for it: with ``c = 2^(b-1) - 1`` symbols to a side, a symbol is ``round(x c / sqrt(2 ln N))``. What is kept of an activation has their frequencies. Up to a half it is taken to be of one
    sign, as behind a ReLU; beyond, the density says how far apart the symbols are. Where the entropy is known, too, it
    decides what an entropy coder takes.
    """
    numel, most = math.prod(shape), 2 ** (bits - 1) - 1
    density = None if known is None else known.density
    entropy_bits = None if known is None else known.entropy_bits
    if most == 0 or numel < 2:
        flat = statistics_of_density(shape, bits=bits, density=1.0 if density is None else density)
        return replace(flat, measured_entropy_bits=entropy_bits)
    step = math.sqrt(2 * math.log(numel)) / most
    if density is not None and _ONE_SIGN < density < 1:
        step = 2 * NormalDist().inv_cdf(1 - density / 2)
    tails = [math.erfc((k - 0.5) * step / math.sqrt(2)) for k in range(1, most + 1)]
    if density is None:
        density = tails[0]
    masses = [here - further for here, further in itertools.pairwise([*tails, 0.0])]
    signs = 1 if density <= _ONE_SIGN else 2
    kept = statistics_of_density(shape, bits=bits, density=density).num_kept
    counts = [int(kept * mass / tails[0] / signs) for mass in masses for _ in range(signs)]
    counts[0] += kept - sum(counts)
    statistics = statistics_of_density(shape, bits=bits, density=density, histogram=(numel - kept, *counts))
    return replace(statistics, measured_entropy_bits=entropy_bits)


def boundary_statistics(
    known: BoundarySymbols | None, shape: Sequence[int], *, bits: int, has_side_path: bool
) -> SymbolStatistics:
    """Return the statistics of a tensor that crosses a boundary of which this is known; None counts all symbols alike.

    `has_side_path`: whether it is the residual stream beside an activation.
    """
    if known is None:
        return statistics_of_density(shape, bits=bits, density=1.0)
    return activation_statistics(shape, bits=bits, known=known.residual if has_side_path else known.first)
