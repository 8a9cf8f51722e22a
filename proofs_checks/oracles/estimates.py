"""Moments of gradient estimates ``ĝ = (1/q) Σ g_i·z_i`` of a quadratic loss."""

from __future__ import annotations

from typing import Literal

from proofs_checks.oracles.perturbations import Bits, Distribution, perturbation_moments
from proofs_checks.oracles.registry import Count, NonNegative, Positive, Real, oracle

Difference = Literal["central", "forward"]


@oracle("ZO2 Eq. 3 and 4; SparQ Eq. 3, 5 and 7; exact for quadratic losses (Isserlis' theorem)")
def estimate_moments(
    distribution: Distribution,
    difference: Difference = "central",
    dimension: Count = 1,
    gradient_norm: NonNegative = 1.0,
    hessian_trace: Real = 0.0,
    hessian_square: NonNegative = 0.0,
    hessian_diagonal_square: NonNegative = 0.0,
    epsilon: NonNegative = 0.0,
    num_perturbations: Count = 1,
    rows: Count = 1,
    columns: Count = 1,
    rank: Count = 1,
    bits: Bits = 4,
    scale: Positive = 1.0,
) -> dict[str, float]:
    """Return the factor E[ĝ] = factor·∇f, the mean square E|ĝ|² and the variance E|ĝ - E[ĝ]|² of a quadratic loss.

    - `gradient_norm`: ``|∇f|`` at the point.
    - `hessian_trace`, `hessian_square`: ``tr H`` and ``tr H²``; only a forward difference sees them.
    - `hessian_diagonal_square`: ``Σ H_ii²``; only signs see it.
    - `num_perturbations`: independent perturbations that are averaged.

    ``g = ∇f·z`` of a central difference, plus ``(ε/2)·zᵀHz`` of a forward one; the product of the two is odd. So ``E|g·z|²`` is the
    energy times ``|∇f|²``, plus ``(ε²/4)·E[(zᵀHz)²|z|²]``: ``(d + 4)((tr H)² + 2 tr H²)`` for normals, ``d((tr H)² + 2(tr H² - Σ H_ii²))`` for
    signs, ``d²((tr H)² + 2 tr H²)/(d + 2)`` on the sphere. Of ``q`` perturbations: ``(E|g·z|² - |E|²)/q + |E|²``.

    >>> estimate_moments("gaussian", dimension=8, num_perturbations=2)
    {'factor': 1.0, 'mean_square': 5.5, 'variance': 4.5}
    """
    moments = perturbation_moments(distribution, dimension, rows, columns, rank, bits, scale)
    square = moments["energy"] * gradient_norm**2
    if difference == "forward" and epsilon and (hessian_trace or hessian_square):
        d, form = float(dimension), hessian_trace**2 + 2 * hessian_square
        if distribution == "gaussian":
            fourth = (d + 4) * form
        elif distribution == "rademacher":
            fourth = d * (form - 2 * hessian_diagonal_square)
        elif distribution == "sphere":
            fourth = d**2 * form / (d + 2)
        else:
            raise ValueError(f"a forward difference has no closed form for {distribution} perturbations")
        square += epsilon**2 / 4 * fourth
    factor = moments["second_moment"]
    mean = (factor * gradient_norm) ** 2
    variance = (square - mean) / num_perturbations
    return {"factor": factor, "mean_square": variance + mean, "variance": variance}


@oracle("ZO2 Alg. 3; one step of ZO-SGD with a fixed rate on ½|θ - t|², exact")
def quadratic_contraction(
    dimension: Count, learning_rate: Positive, num_perturbations: Count = 1, num_steps: Count = 1
) -> float:
    """Return E|θ_T - t|²/|θ_0 - t|² after T steps with normals on the loss ½|θ - t|².

    A step multiplies it by ``1 - 2η + η²((d + 1)/q + 1)``.

    >>> round(quadratic_contraction(8, 0.1), 6)
    0.9
    """
    return float(
        (1 - 2 * learning_rate + learning_rate**2 * ((dimension + 1) / num_perturbations + 1)) ** num_steps
    )


@oracle(
    "QuZO Eq. 8 and 10: Q-RGE1 uses one rounding twice, Q-RGE2 two independent roundings of one perturbation"
)
def quantized_estimate_factor(kind: Literal["q-rge1", "q-rge2"], bits: Bits, scale: Positive) -> float:
    """Return the factor in E[ĝ] = factor·∇f of a linear loss, for perturbations rounded at random to few bits.

    ``E[Q(u)²]`` for Q-RGE1; ``E[Q₁(u)Q₂(u)] = E[clamp(u)²]`` for Q-RGE2, which is 1 where nothing is clamped.

    >>> round(quantized_estimate_factor("q-rge2", 8, 127 / 6), 6)
    1.0
    """
    from proofs_checks.oracles.perturbations import rounded_normal_moments
    from proofs_checks.oracles.rounding import clamped_normal_square

    if kind == "q-rge1":
        return rounded_normal_moments(bits, scale)[0]
    return float(clamped_normal_square((2 ** (bits - 1) - 1) / scale))


@oracle("SparQ Alg. 1 to 3 read literally: every node resets one generator to the same seed")
def shared_seed_mean(own_gradient: Real, other_gradient: Real) -> float:
    """Return the mean of g·u of one element whose number two stages both draw: the sum of both gradients.

    >>> shared_seed_mean(1.0, -0.25)
    0.75
    """
    return own_gradient + other_gradient
