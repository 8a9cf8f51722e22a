"""Moments of random perturbations."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from proofs_checks.oracles.registry import Count, Positive, oracle

Distribution = Literal["gaussian", "rademacher", "sphere", "low-rank", "quantized-gaussian"]
Bits = Annotated[int, Field(ge=2, le=16, strict=True)]


@oracle("Isserlis' theorem; QuZO Eq. 5 (rounded); moments of Wishart matrices (low rank)")
def perturbation_moments(
    distribution: Distribution,
    dimension: Count = 1,
    rows: Count = 1,
    columns: Count = 1,
    rank: Count = 1,
    bits: Bits = 4,
    scale: Positive = 1.0,
) -> dict[str, float]:
    """Return mean, second and fourth moment of an element, and the energy E[(a·z)²|z|²] for a unit vector a.

    - `distribution`: the sphere's radius is ``√dimension``; ``low-rank`` is ``UVᵀ/√r`` of `rows` by `columns`;
      ``quantized-gaussian`` is a normal rounded at random to grid values of `bits`, `scale` grid values per unit, one rounding
      used twice.
    - `dimension`: of all but ``low-rank``.

    >>> perturbation_moments("rademacher", dimension=8)
    {'mean': 0.0, 'second_moment': 1.0, 'fourth_moment': 1.0, 'energy': 8.0}
    >>> perturbation_moments("low-rank", rows=3, columns=4, rank=1)["energy"]
    30.0
    """
    d = float(dimension)
    if distribution == "gaussian":
        second, fourth, total = 1.0, 3.0, d + 2
    elif distribution == "rademacher":
        second, fourth, total = 1.0, 1.0, d
    elif distribution == "sphere":
        second, fourth, total = 1.0, 3 * d / (d + 2), d
    elif distribution == "low-rank":
        # Σ_k u_k v_k / √r: given u and v independent, E[z⁴] = 3(r + 2)/r.
        second, fourth = 1.0, 3.0 + 6.0 / rank
        total = rows * columns + 2 + 2 * (rows + columns + 1) / rank
    else:
        second, fourth = rounded_normal_moments(bits, scale)
        total = fourth + (d - 1) * second**2
    return {"mean": 0.0, "second_moment": second, "fourth_moment": fourth, "energy": total}


@oracle(
    "ZO2 Eq. 3 with a linear loss; Nesterov and Spokoiny (2017), section 3, bounds the Gaussian's by d + 4"
)
def energy(
    distribution: Distribution,
    dimension: Count = 1,
    rows: Count = 1,
    columns: Count = 1,
    rank: Count = 1,
    bits: Bits = 4,
    scale: Positive = 1.0,
) -> float:
    """Return E[(a·z)²|z|²] for a unit vector a: the mean square of an estimate g·z, in squares of the gradient.

    >>> energy("gaussian", dimension=8)
    10.0
    """
    return perturbation_moments(distribution, dimension, rows, columns, rank, bits, scale)["energy"]


def rounded_normal_moments(bits: int, scale: float) -> tuple[float, float]:
    """Return E[q²] and E[q⁴] of a normal rounded at random to ``2^(b-1) - 1`` grid values on either side of 0.

    Within a cell ``[k, k + 1]/s`` the rounded number is ``k/s`` with probability ``k + 1 - sx`` and ``(k + 1)/s`` with ``sx - k``; beyond
    the last grid value it is that.
    """
    highest = 2 ** (bits - 1) - 1
    second = fourth = 0.0
    for k in range(highest):
        low, high = k / scale, (k + 1) / scale
        mass = (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))) / 2
        first = normal_density(low) - normal_density(high)
        up = scale * first - k * mass
        for level, probability in ((low, mass - up), (high, up)):
            second += 2 * level**2 * probability
            fourth += 2 * level**4 * probability
    tail = math.erfc(highest / scale / math.sqrt(2))
    return second + (highest / scale) ** 2 * tail, fourth + (highest / scale) ** 4 * tail


def normal_density(x: float) -> float:
    """Return the standard normal density."""
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
