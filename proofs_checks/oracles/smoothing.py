"""Smoothed losses ``f_ε(θ) = E f(θ + εz)``, their gradients, and what a difference of finite ε leaves of a derivative."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from proofs_checks.oracles.registry import Count, NonNegative, Positive, Real, oracle

Loss = Literal["linear", "quadratic", "cubic", "quartic", "exponential", "sine", "absolute"]


@oracle("Nesterov and Spokoiny (2017), section 2; ZO2 App. C. Losses φ(t) with t = a·θ along normals")
def smoothed_loss(loss: Loss, t: Real, width: NonNegative) -> dict[str, float]:
    """Return E φ(t + w·ξ) for a standard normal ξ, and its derivative in t; w = ε|a|.

    - `loss`: ``φ(t)``: the power of degree k is ``t^k/k!``, whose k-th derivative is 1 (linear t, quadratic t²/2, cubic t³/6,
      quartic t⁴/24); exponential, sine, and absolute ``|t|``.
    - `t`: ``a·θ``.
    - `width`: ``w = ε|a|``.

    With ``f(θ) = φ(a·θ)``, ``E[g·z] = derivative·a`` for central and forward differences alike.

    >>> smoothed_loss("quartic", 1.0, 2.0)["derivative"]
    2.1666666666666665
    """
    w = width
    if loss == "linear":
        value, slope = t, 1.0
    elif loss == "quadratic":
        value, slope = (t * t + w * w) / 2, t
    elif loss == "cubic":
        value, slope = (t**3 + 3 * t * w * w) / 6, (t * t + w * w) / 2
    elif loss == "quartic":
        value, slope = (t**4 + 6 * t * t * w * w + 3 * w**4) / 24, (t**3 + 3 * t * w * w) / 6
    elif loss == "exponential":
        value = slope = math.exp(t + w * w / 2)
    elif loss == "sine":
        shrunk = math.exp(-w * w / 2)
        value, slope = math.sin(t) * shrunk, math.cos(t) * shrunk
    elif w == 0:
        value, slope = abs(t), float((t > 0) - (t < 0))
    else:
        slope = math.erf(t / (w * math.sqrt(2)))
        value = t * slope + w * math.sqrt(2 / math.pi) * math.exp(-t * t / (2 * w * w))
    return {"value": value, "derivative": slope}


@oracle("ZO2 App. C: `as ε approaches 0`; the bias of finite ε")
def estimate_bias(loss: Loss, t: Real, width: NonNegative) -> float:
    """Return the derivative of the smoothed loss less that of the loss: the bias of g·z along a, per unit of a.

    ``w²φ'''(t)/2 + O(w⁴)``: of second order in ε, for central and forward differences alike.

    >>> round(estimate_bias("quartic", 1.0, 2.0), 9)
    2.0
    """
    exact = smoothed_loss(loss, t, 0.0)["derivative"]
    return float(smoothed_loss(loss, t, width)["derivative"] - exact)


@oracle("Signs in place of normals: the fundamental theorem of calculus along one coordinate")
def rademacher_expected_gradient(a: list[Real], t: Real, epsilon: Positive) -> list[float]:
    """Return E[g·z] of the loss exp(a·θ) along random signs, with t = a·θ.

    ``exp(t)·Π_j cosh(εa_j)·tanh(εa_i)/ε``.

    >>> [round(x, 6) for x in rademacher_expected_gradient([1.0, 0.0], 0.0, 0.5)]
    [1.042191, 0.0]
    """
    product = math.exp(t) * math.prod(math.cosh(epsilon * x) for x in a)
    return [product * math.tanh(epsilon * x) / epsilon for x in a]


@oracle("Nesterov and Spokoiny (2017), theorem 1 and lemma 3; SparQ Lemma 3, Eq. 12 to 15")
def smoothing_bounds(
    dimension: Positive, epsilon: NonNegative, smoothness: NonNegative, gradient_norm: NonNegative = 0.0
) -> dict[str, float]:
    """Return bounds of |f_ε - f|, |∇f_ε - ∇f| and E|ĝ|² for a loss with L-Lipschitz gradient.

    ``ε²Ld/2``, ``εL(d + 3)^{3/2}/2`` and ``ε²L²(d + 6)³/2 + 2(d + 4)|∇f|²``.

    >>> smoothing_bounds(6, 0.1, 1.0)["value"]
    0.030000000000000006
    """
    d, e, s = dimension, epsilon, smoothness
    return {
        "value": e**2 * s * d / 2,
        "gradient": e * s * (d + 3) ** 1.5 / 2,
        "mean_square": e**2 * s**2 * (d + 6) ** 3 / 2 + 2 * (d + 4) * gradient_norm**2,
    }


@oracle(
    "E|g·z|² of losses φ(a·θ) along normals: |z|² is ξ² and an independent chi-squared of d - 1 degrees of freedom"
)
def ridge_estimate_moments(
    loss: Literal["linear", "quadratic", "cubic", "quartic", "exponential", "sine"],
    t: Real,
    slope_norm: Positive,
    epsilon: Positive,
    dimension: Count,
    difference: Literal["central", "forward"] = "central",
    num_perturbations: Count = 1,
) -> dict[str, float]:
    """Return the mean of an estimate along a, its mean square and its variance, for a loss φ(a·θ) with t = a·θ.

    `slope_norm`: ``|a|``.

    ``g`` is a function of ``ξ = a·z/|a|`` alone: ``E|g·z|² = E[g²(ξ² + d - 1)]``, by Gauss-Hermite quadrature with 60 nodes.

    >>> ridge_estimate_moments("linear", 0.0, 2.0, 0.1, 8)["mean_square"]
    40.0
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = weights / weights.sum()
    phi = _FUNCTIONS[loss]
    step = epsilon * slope_norm * nodes
    other = phi(t - step) if difference == "central" else phi(np.full_like(step, t))
    g = (phi(t + step) - other) / (2 * epsilon if difference == "central" else epsilon)
    mean = float(weights @ (g * nodes))
    one = float(weights @ (g**2 * (nodes**2 + dimension - 1)))
    variance = (one - mean**2) / num_perturbations
    return {
        "mean": round(mean, 12),
        "mean_square": round(variance + mean**2, 12),
        "variance": round(variance, 12),
    }


_FUNCTIONS: Mapping[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "linear": lambda t: t,
    "quadratic": lambda t: t**2 / 2,
    "cubic": lambda t: t**3 / 6,
    "quartic": lambda t: t**4 / 24,
    "exponential": np.exp,
    "sine": np.sin,
}
