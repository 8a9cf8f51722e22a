"""What is left of a gradient whose activations cross a boundary in few bits."""

from __future__ import annotations

import math
from typing import Literal

from proofs_checks.oracles.registry import NonNegative, Positive, Real, oracle


@oracle("SparQ Lemma 1 and Remark 1: the smoothing radius against the step of the grid; Poisson's sum")
def straight_through(radius_in_steps: Positive, value_in_steps: Real) -> float:
    """Return ∂/∂x E[C(x + μu)] for rounding to the nearest: what is left of a derivative of 1.

    - `radius_in_steps`: ``μ/s``, with the step ``s`` of the grid.
    - `value_in_steps`: ``x/s``.

    ``Σ_k s·φ_μ(x - (k + ½)s) = 1 + 2 Σ_m (-1)^m exp(-2π²m²μ²/s²) cos(2πmx/s)``. The first sum converges fast for a small radius,
    the second for a large one.

    >>> round(straight_through(1.0, 0.0), 6), round(straight_through(0.1, 0.0), 6)
    (1.0, 3e-05)
    """
    radius, value = radius_in_steps, value_in_steps
    if radius < 0.5:
        nearest = math.floor(value)
        return math.fsum(
            math.exp(-(((value - k - 0.5) / radius) ** 2) / 2) / (radius * math.sqrt(2 * math.pi))
            for k in range(nearest - 22, nearest + 23)
        )
    return 1 + 2 * math.fsum(
        (-1.0) ** m * math.exp(-2 * (math.pi * m * radius) ** 2) * math.cos(2 * math.pi * m * value)
        for m in range(1, 60)
    )


@oracle("SparQ Eq. 4 through stochastic rounding and a linear rest")
def codec_gradient_variance(
    weights: list[Real],
    plus: list[Real],
    minus: list[Real],
    step_plus: Positive,
    step_minus: Positive,
    epsilon: Positive,
    random_numbers: Literal["independent", "shared"] = "independent",
) -> float:
    """Return Var[g] of g = Σ w_i (C(a⁺_i) - C(a⁻_i))/2ε for activations rounded at random.

    ``Σ w²(v⁺ + v⁻ - 2c)/4ε²``, with ``v = f(1 - f)s²``, and ``c = s⁺s⁻(min(f⁺, f⁻) - f⁺f⁻)`` where both roundings use the same random
    numbers.

    >>> round(codec_gradient_variance([1.0], [0.5], [0.5], 1.0, 1.0, 0.5), 6)
    0.5
    """
    if not len(weights) == len(plus) == len(minus):
        raise ValueError("weights, plus and minus must have the same length")
    total = 0.0
    for w, high, low in zip(weights, plus, minus, strict=True):
        up = high / step_plus - math.floor(high / step_plus)
        down = low / step_minus - math.floor(low / step_minus)
        together = step_plus * step_minus * (min(up, down) - up * down) if random_numbers == "shared" else 0.0
        total += w**2 * (step_plus**2 * up * (1 - up) + step_minus**2 * down * (1 - down) - 2 * together)
    return total / (2 * epsilon) ** 2


@oracle(
    "Top-k and other contractions used without error feedback: a compressor with E[C(x)] = (1 - b)x on average"
)
def biased_compression_floor(bias: NonNegative, gradient_norm: NonNegative) -> dict[str, float]:
    """Return the factor that a compressor of relative bias b leaves of a gradient, and the error that no averaging removes.

    >>> biased_compression_floor(0.25, 2.0)
    {'factor': 0.75, 'error': 0.5}
    """
    return {"factor": 1 - bias, "error": bias * gradient_norm}
