"""Perturbations rounded to few bits at random: what they are on average, and what an estimate with them is.

``û = clamp(⌊s·u⌋ + Bernoulli(s·u - ⌊s·u⌋), -c, c)/s`` for every element ``u`` of a perturbation, with ``c = 2^(b-1) - 1`` and
``s = c/r``. Given ``u`` its mean is ``clamp(u, -r, r)``. Elements are independent, so three moments say all that an estimate
of a linear loss needs [1]_:

* ``m₂ = E[û²]``. One rounding used twice (Q-RGE1) estimates ``m₂·∇``.
* ``c₂ = E[û₁·û₂] = E[clamp(u)²]`` of two independent roundings of one ``u`` (Q-RGE2), which estimate ``c₂·∇``.
* ``E[û⁴]`` and ``E[û₁²·û₂²]``, for the variance.

A sparse perturbation is 0 but in each row (output channel) with the probability ``q``, and there ``û/√q``: its second moments are the
same, its fourths ``1/q`` times as large.

.. [1] QuZO, equations 3 to 10, which leave out scales and clamping; docs/explanation/quantized-training.md has the derivation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

from costmodel.formats.distributions import DISTRIBUTIONS, Distribution, DistributionName

EstimatorName = Literal["normalised", "q-rge1", "q-rge2"]
"""What a projected gradient is multiplied by: see :meth:`RoundedPerturbation.mean_of`."""


class Moments(NamedTuple):
    """Moments of an element."""

    # second, fourth: `E[û²]` and `E[û⁴]` of one rounding.
    second: float
    fourth: float
    cross: float  # `E[û₁·û₂]` of two independent roundings of one number
    cross_fourth: float  # `E[û₁²·û₂²]` of the same


def moments_of(distribution: Distribution, levels: Sequence[float]) -> Moments:
    """Return the moments of an element rounded at random to ascending `levels`, and clamped to the outer two.

    Between neighbours ``a`` and ``b``, ``E[û² | u] = (a + b)·u - a·b`` and ``E[û⁴ | u]`` are linear in ``u``: every moment
    is a sum of the element's partial moments in each cell.

    .. [1] QuZO, equations 5 and 6: rounding at random, of which these are the moments with the clamp.
    """
    between = distribution.partial_moments
    assert between is not None
    tail, _, _ = between(levels[-1], math.inf)
    top = levels[-1]
    second, fourth = 2 * tail * top**2, 2 * tail * top**4
    cross, cross_fourth = second, fourth
    for low, high in pairwise(levels):
        mass, first, square = between(low, high)
        total, product = low + high, low * high
        second += total * first - product * mass
        up = (first - low * mass) / (high - low)
        fourth += low**4 * (mass - up) + high**4 * up
        cross += square
        cross_fourth += total**2 * square - 2 * total * product * first + product**2 * mass
    return Moments(second, fourth, cross, cross_fourth)


@cache
def reach_of(distribution: Distribution, bits: int) -> float:
    """Return the largest value of an element rounded to so many bits: that with the least mean squared error of a rounding.

    By golden section: ``E[(û - u)²]`` has one minimum in the range. Two decimals, since it is flat there.
    """
    low, high, ratio = 0.0, 8.0, (math.sqrt(5) - 1) / 2
    while high - low > 1e-4:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if _squared_error(distribution, bits, left) < _squared_error(distribution, bits, right):
            high = right
        else:
            low = left
    return round((low + high) / 2, 2)


def _squared_error(distribution: Distribution, bits: int, reach: float) -> float:
    """Return ``E[(û - u)²]`` of elements that are clamped at `reach`, of a symmetric distribution."""
    between, highest = distribution.partial_moments, 2 ** (bits - 1) - 1
    assert between is not None
    tail, tail_first, _ = between(reach, math.inf)
    # ``E[û²] - 2·E[û·u] + E[u²]``: where nothing is clamped, ``E[û | u] = u``.
    half = tail * reach**2 - 2 * reach * tail_first
    for low, high in pairwise(qvalue * reach / highest for qvalue in range(highest + 1)):
        mass, first, square = between(low, high)
        half += (low + high) * first - low * high * mass - 2 * square
    return 2 * half + distribution.second_moment


@dataclass(frozen=True)
class RoundedPerturbation:
    """A perturbation whose elements are rounded to a few bits, at random and without a bias where they are not clamped.

    >>> coarse = RoundedPerturbation("gaussian", 2)
    >>> coarse.highest, round(coarse.moments.second, 3), round(coarse.moments.cross, 3)
    (1, 0.65, 0.529)
    """

    distribution: DistributionName
    bits: int  # 2 to 8
    sparsity: float = 0.0  # probability `1 - q` that a row is 0

    @property
    def highest(self) -> int:
        """Largest quantized value, ``c``; the least is ``-c``."""
        return int(2 ** (self.bits - 1)) - 1

    @property
    def kept_format(self) -> str:
        """Format that quantized values are kept in: four or two share a byte where they fit."""
        return f"int{next(bits for bits in (2, 4, 8) if bits >= self.bits)}"

    @property
    def reach(self) -> float:
        """Largest number that is not clamped: 1 for signs, which are then not rounded at all."""
        distribution = DISTRIBUTIONS[self.distribution]
        return 1.0 if distribution.is_sign else reach_of(distribution, self.bits)

    @property
    def scale(self) -> float:
        """Quantized values per unit of what is rounded, ``s``."""
        return self.highest / self.reach

    @property
    def unit(self) -> float:
        """Value of a quantized value of 1, ``1/(s·√q)``."""
        return 1 / (self.scale * math.sqrt(1 - self.sparsity))

    @cached_property
    def moments(self) -> Moments:
        """Moments of an element."""
        distribution = DISTRIBUTIONS[self.distribution]
        if distribution.is_sign:
            dense = Moments(1.0, 1.0, 1.0, 1.0)
        else:
            dense = moments_of(
                distribution, [qvalue / self.scale for qvalue in range(-self.highest, self.highest + 1)]
            )
        kept = 1 - self.sparsity
        return dense._replace(fourth=dense.fourth / kept, cross_fourth=dense.cross_fourth / kept)

    def divisor(self, estimator: EstimatorName) -> float:
        """Return what the projected gradient is divided by before it goes into an update."""
        return self.moments.second if estimator == "normalised" else 1.0

    def mean_of(self, estimator: EstimatorName) -> float:
        """Return the factor between an estimate of a linear loss's gradient, on average, and the gradient."""
        return {"normalised": 1.0, "q-rge1": self.moments.second, "q-rge2": self.moments.cross}[estimator]

    def relative_energy(self, estimator: EstimatorName, num_elements: int, row_elements: int = 1) -> float:
        """Return ``E|ĝ|² / |E ĝ|²`` of an estimate of a linear loss's gradient, 1 plus its relative variance.

        With ``d`` elements, ``(m₄ + (d - 1)·m₂²)/m₂²`` for one rounding used twice, divided or not, and
        ``(E[û₁²û₂²] + (d - 1)·m₂²)/c₂²`` for two. Since ``m₂ >= c₂``, two roundings are the noisier but for very few elements.
        Elements of one row of `row_elements` are 0 together: of the ``d - 1`` others so many less one count ``1/q`` times.
        """
        together = row_elements - 1
        num_others = num_elements - 1 - together + together / (1 - self.sparsity)
        moments, others = self.moments, num_others * self.moments.second**2
        if estimator == "q-rge2":
            return (moments.cross_fourth + others) / moments.cross**2
        return (moments.fourth + others) / moments.second**2
