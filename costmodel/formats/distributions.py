"""Distributions of random perturbations, and what drawing from them takes: all that is known of them without torch.

A distribution is declared here; :mod:`executors.randomness.samplers` says how its numbers are drawn.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

DistributionName = Literal["gaussian", "rademacher", "factorised", "lozo", "lozo-released"]
"""Distributions that a plan can ask for."""

SamplingClass = Literal["normal", "rademacher"]
"""Kinds of draws whose seconds per element are measured."""

RNG_STATE_BYTES = 5056
"""State of torch's CPU generator (a CUDA generator's is smaller)."""

NUM_RNG_MARKS = 8
"""Generator states kept at equal distances within a group, so that as many threads can draw the group again."""

SHARED_SAMPLING_ELEMENTS = 1 << 16
"""Groups of at least this many elements keep such states, and are drawn again by several threads at once."""

JUMP_RAW = 1 << 19
"""Raw outputs that a CPU's generator passes over in the time that a jump takes, or a longer one."""

COUNTER_BLOCK_ELEMENTS = 1 << 14
"""Elements on a CPU that one generator of the ``counter`` discipline makes, times the distribution's `block_factor`."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution of tensors whose elements are alike and uncorrelated.

    .. [1] S. Malladi et al., "Fine-Tuning Language Models with Just Forward Passes", 2023, arXiv:2305.17333,
       algorithm 1. Its perturbations are normal.
    .. [2] Y. Chen et al., "Enhancing Zeroth-order Fine-tuning for Language Models with Low-rank Structures", 2024,
       arXiv:2410.07698, algorithm 1.
    """

    name: str
    sampling_class: SamplingClass = "normal"  # what an element costs like
    mean: float = 0.0  # expectation of an element
    second_moment: float = 1.0
    is_sign: bool = False  # whether every element is 1 or -1
    # Given two numbers, the probability that an element lies between them, and its mean and mean square as far as it does: what
    # elements rounded to few bits are on average. None of signs, which are never rounded, and of factors.
    partial_moments: Callable[[float, float], tuple[float, float, float]] | None = None
    smallest: float = 0.0  # below every element but 0, in size
    # Whether one thread draws while others have nothing to do, so that several may draw at once.
    is_single_threaded: bool = True
    # On a CPU, a draw split at multiples of this equals the whole draw, if no chunk is shorter.
    granularity: int = sys.maxsize
    # How many times longer than others its `counter` blocks are on a CPU: more where an element costs less.
    block_factor: int = 1
    # Whether a matrix is the product `U·Vᵀ` of two tall ones of independent elements, times a power of their rank `r`; tensors of other
    # shapes are drawn element by element. Moments are then those of an element of `U` or `V`.
    is_factored: bool = False
    # rank_power, update_rank_power: a matrix is `U·Vᵀ·r^rank_power`; an update goes along it times `r^update_rank_power`.
    rank_power: float = 0.0
    update_rank_power: float = 0.0
    # Whether the update samples the factors again, from a sequence that holds `U` alone. In a step that samples `V` anew, that is
    # another `U`.
    is_resampled: bool = False

    def has_rows_apart(self, width: int) -> bool:
        """Whether rows of a table are drawn one by one, and not chunk by chunk with their neighbours."""
        return self.is_single_threaded and width % self.granularity == 0

    @property
    def counter_elements(self) -> int:
        """Elements of a block of the ``counter`` discipline on a CPU."""
        return COUNTER_BLOCK_ELEMENTS * self.block_factor


def _normal_between(low: float, high: float) -> tuple[float, float, float]:
    """Return the partial moments of a standard normal."""
    mass = (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))) / 2
    at_low, at_high = _normal_density(low), _normal_density(high)
    # Infinity times no density at all is nothing.
    square = mass + (low * at_low if at_low else 0.0) - (high * at_high if at_high else 0.0)
    return mass, at_low - at_high, square


def _normal_density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


DISTRIBUTIONS: dict[DistributionName, Distribution] = {
    "gaussian": Distribution("gaussian", partial_moments=_normal_between, smallest=1e-25, granularity=16),
    "rademacher": Distribution(
        "rademacher",
        "rademacher",
        is_sign=True,
        smallest=1.0,
        is_single_threaded=False,
        granularity=64,
        block_factor=32,
    ),
    "factorised": Distribution("factorised", is_factored=True, rank_power=-0.5),
    "lozo": Distribution("lozo", is_factored=True, update_rank_power=-1.0),
    "lozo-released": Distribution("lozo-released", is_factored=True, is_resampled=True),
}
"""The distributions of plans by name.

``lozo`` perturbs by ``ε·U·Vᵀ`` and updates along ``U·Vᵀ/r`` [1]_: of matrices it is ``factorised`` at ``ε·√r``.
``lozo-released`` is what the released loop does: it leaves ``1/r`` out, and in a step that draws ``V`` anew it updates along another
``U`` than it perturbed by.

References
----------
.. [1] Chen et al., "Enhancing Zeroth-order Fine-tuning for Language Models with Low-rank Structures", 2024.
"""
