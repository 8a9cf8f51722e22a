"""Rounding: at random, to the nearest, clamped; and what it leaves of weights."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from proofs_checks.oracles.perturbations import Bits, normal_density
from proofs_checks.oracles.registry import Count, NonNegative, Positive, Real, oracle

Format = Literal["float64", "float32", "float16", "bfloat16"]
_MANTISSA_BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}


@oracle("QuZO Eq. 5 and 6; Connolly, Higham and Mary (2021)")
def rounding_moments(
    value: Real,
    bits: Bits,
    scale: Positive,
    rounding: Literal["stochastic", "nearest"] = "stochastic",
    clamped: bool = True,
) -> dict[str, float]:
    """Return mean, bias, variance and mean squared error of a number rounded to grid values, `scale` of them per unit.

    - `bits`: quantized values run from ``-(2^(b-1) - 1)`` to ``2^(b-1) - 1``.
    - `clamped`: without it there is no largest grid value.

    ``E[Q(x)] = clamp(x)`` and ``Var[Q(x)] = f(1 - f)/s²``, with ``f`` the fraction of ``s·clamp(x)``.

    >>> rounding_moments(0.3, 4, 1.0)
    {'mean': 0.3, 'bias': 0.0, 'variance': 0.21, 'mean_squared_error': 0.21}
    >>> rounding_moments(9.0, 4, 1.0)["mean"]
    7.0
    """
    limit = (2 ** (bits - 1) - 1) / scale
    kept = max(-limit, min(limit, value)) if clamped else value
    cells = kept * scale
    fraction = cells - math.floor(cells)
    if rounding == "stochastic":
        mean, variance = kept, fraction * (1 - fraction) / scale**2
    else:
        mean, variance = round(cells) / scale, 0.0
    bias = mean - value
    return {"mean": mean, "bias": bias, "variance": variance, "mean_squared_error": variance + bias**2}


@oracle("QuZO Eq. 5: what is clamped of a normal perturbation")
def clamped_normal_square(limit: Positive) -> float:
    """Return E[clamp(u, -limit, limit)²] of a standard normal.

    >>> round(clamped_normal_square(2.0), 6)
    0.920537
    """
    inside = math.erf(limit / math.sqrt(2))
    return inside - 2 * limit * normal_density(limit) + limit**2 * (1 - inside)


@oracle(
    "MeZO's walk θ + εz - 2εz + εz (ZO2 Alg. 3); Higham (2002), section 2.2: the standard model of rounding"
)
def restore_drift_bound(
    weight: Real, perturbation: Real, epsilon: Positive, dtype: Format = "float32"
) -> float:
    """Return the most that one walk to +ε, -ε and back can change a weight.

    ``u·(|θ + εz| + |θ - εz| + |θ|)``, to first order in the unit roundoff ``u``: products cancel exactly, three additions round.

    >>> restore_drift_bound(1.0, 0.0, 1e-3, "bfloat16")
    0.01171875
    """
    unit = 2.0 ** -_MANTISSA_BITS[dtype]
    step = epsilon * perturbation
    return unit * (abs(weight + step) + abs(weight - step) + abs(weight))


@oracle("MeZO's walk θ + εz - 2εz + εz (ZO2 Alg. 3), for εz that spans many units in the last place")
def restore_drift_deviation(
    weight: Real, num_steps: Count, num_perturbations: Count = 1, dtype: Format = "float32"
) -> float:
    """Return the standard deviation of a weight after so many walks to +ε, -ε and back.

    ``ulp(θ)·√(nq/2)``. The weight lies on its grid, so that with ``p = εz/ulp`` a walk moves it by ``2·round(p) - round(2p)`` units: by
    -1, 0 or 1 with probabilities ¼, ½ and ¼ where the fraction of ``p`` is uniform. (Independent errors of three additions would
    give half that variance: the first and the last are the same.) No power of two may be crossed on the way.

    >>> restore_drift_deviation(1.5, 8, dtype="bfloat16")
    0.015625
    """
    if weight == 0:
        return 0.0
    ulp = 2.0 ** (math.floor(math.log2(abs(weight))) - _MANTISSA_BITS[dtype] + 1)
    return ulp * math.sqrt(num_steps * num_perturbations / 2)


@oracle("Updates that formats lose: θ - η·g·z rounded to the nearest")
def smallest_kept_update(weight: Real, dtype: Format = "bfloat16") -> float:
    """Return the size from which on an update that moves a weight away from 0 changes it, rounded to the nearest.

    >>> smallest_kept_update(1.0, "bfloat16")
    0.00390625
    """
    if weight == 0:
        return 0.0
    return 2.0 ** (math.floor(math.log2(abs(weight))) - _MANTISSA_BITS[dtype])


@oracle("Symmetric grids fitted to the largest magnitude; SparQ Asm. 5")
def nearest_contraction(
    squares: Positive, largest: Positive, bits: Annotated[int, Field(ge=2, le=16)], numel: Count
) -> dict[str, float]:
    """Return bounds of κ² in |x - C(x)|² <= κ²|x|² for rounding to the nearest on a symmetric grid per tensor.

    `squares`, `largest`: ``|x|²`` and ``max |x_i|``.

    ``1 - max²/|x|²`` (no value is farther from its code than from 0, and the largest is a grid value), and ``(n - 1)(s/2)²/|x|²`` with
    the step ``s``, whichever is smaller.

    >>> nearest_contraction(4.0, 1.0, 4, 16)["kappa_squared"] < 0.02
    True
    """
    if largest**2 > squares * (1 + 1e-12):
        raise ValueError("the largest magnitude must not exceed the norm")
    step = largest / (2 ** (bits - 1) - 1)
    by_zero, by_step = 1 - largest**2 / squares, (numel - 1) * step**2 / 4 / squares
    return {"kappa_squared": min(by_zero, by_step), "by_zero": by_zero, "by_step": by_step}


@oracle(
    "Stochastic rounding of a standard normal on a fine grid of step s; SparQ Asm. 5 with an unbiased compressor"
)
def stochastic_expansion(step: NonNegative) -> float:
    """Return κ² = E|x - C(x)|²/E|x|² of normals rounded at random on a grid of this step, not clamped.

    ``E[f(1 - f)]s²``, which is ``s²/6`` on a fine grid.

    >>> round(stochastic_expansion(0.5), 6), stochastic_expansion(4.0) > 1
    (0.041667, True)
    """
    if step == 0:
        return 0.0
    reach = math.ceil(12 / step) + 1
    total = 0.0
    for k in range(-reach, reach):
        low, high = k * step, (k + 1) * step
        mass = (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))) / 2
        first = normal_density(low) - normal_density(high)
        second = mass + low * normal_density(low) - high * normal_density(high)
        total += -second + (low + high) * first - low * high * mass  # E[(x - low)(high - x)]
    return total
