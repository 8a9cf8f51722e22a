"""Directions beyond independent normals and signs: of low rank, of few bits.

They stand under the interface of :mod:`executors.randomness.directions`, each knowing its moments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Generator, Tensor

from costmodel.formats.distributions import DISTRIBUTIONS, Distribution
from costmodel.formats.roundings import moments_of
from executors.randomness.directions import Direction, Gaussian
from executors.randomness.low_rank import fill_product
from executors.randomness.quantisers import StochasticRounding
from topology.errors import PlanError

_NORMALS = Gaussian()


class LowRank(Direction):
    """A matrix ``U·Vᵀ/√r`` with standard normal ``U`` (m, r) and ``V`` (n, r); normals for tensors of other shapes.

    Parameters
    ----------
    rank : int
        ``r``.

    Notes
    -----
    Elements are uncorrelated with second moment 1; the division by ``√r`` is what makes it so.
    """

    def __init__(self, rank: int) -> None:
        if rank < 1:
            raise PlanError(f"rank={rank} must be at least 1", hint="LoZO uses ranks from 1 to 8")
        self.rank = rank
        self.distribution = Distribution(f"low-rank-{rank}")

    def fill(self, out: Tensor, generator: Generator) -> None:
        """Fill `out`, drawing ``U`` before ``V``."""
        if out.dim() != 2:
            _NORMALS.fill(out, generator)
            return
        num_rows, num_columns = out.shape
        left, right = (out.new_empty((length, self.rank)) for length in (num_rows, num_columns))
        _NORMALS.fill(left, generator)
        _NORMALS.fill(right, generator)
        fill_product(out, left, right, math.sqrt(self.rank))

    def energy(self, shape: Sequence[int]) -> float:
        """Return ``mn + 2 + 2·(m + n + 1)/r`` for a matrix, ``d + 2`` for other shapes.

        Notes
        -----
        Given ``V``, the form is Gaussian in ``U``: ``m·|AV|²·|V|² + 2·tr(A·V·VᵀV·Vᵀ·Aᵀ)``. The expectations over
        ``V`` are ``|A|²·r·(nr + 2)`` and, by Wishart's second moment, ``|A|²·r·(r + n + 1)``.
        """
        if len(shape) != 2:
            return _NORMALS.energy(shape)
        m, n = shape
        return m * n + 2 + 2 * (m + n + 1) / self.rank


class QuantisedGaussian(Direction):
    """Standard normals rounded to few bits, independently element by element.

    Parameters
    ----------
    rounding : StochasticRounding

    Attributes
    ----------
    moments : Moments
    distribution : Distribution
        Its second moment is that of one rounding, ``E[Q(u)²]``: what an estimate that uses a rounding twice is scaled by. It exceeds 1 by
        the variance of the rounding, and falls short by what is clamped.
    cross_moment : float
        Of two roundings of one normal, ``E[Q₁(u)·Q₂(u)] = E[clamp(u)²]``: 1 where nothing is clamped.
    """

    def __init__(self, rounding: StochasticRounding) -> None:
        self.rounding = rounding
        self.moments = moments_of(DISTRIBUTIONS["gaussian"], rounding.levels)
        self.distribution = Distribution(f"gaussian-int{rounding.bits}", second_moment=self.moments.second)
        self.cross_moment = self.moments.cross

    def fill(self, out: Tensor, generator: Generator) -> None:
        """Fill `out` with normals, rounded."""
        _NORMALS.fill(out, generator)
        out.copy_(self.rounding.rounded(out, generator))

    def fill_pair(self, first: Tensor, second: Tensor, generator: Generator) -> None:
        """Fill both with roundings of the same normals, independent of each other."""
        _NORMALS.fill(first, generator)
        second.copy_(self.rounding.rounded(first, generator))
        first.copy_(self.rounding.rounded(first, generator))

    def energy(self, shape: Sequence[int]) -> float:
        """Return ``E[q⁴] + (d - 1)·E[q²]²`` of an element ``q``, one rounding used twice."""
        return self.moments.fourth + (math.prod(shape) - 1) * self.distribution.second_moment**2
