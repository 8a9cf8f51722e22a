"""Closed forms of what papers state beside their lemmas: sharper bounds, errors of perturbations and shards, speedups."""

from __future__ import annotations

import math

from proofs_checks.oracles.registry import Count, NonNegative, Positive, Real, oracle


@oracle("SparQ Lemma 3 and Eq. 15, 16: the same proofs with exact moments of normals")
def sharp_smoothing_bounds(
    dimension: Count, epsilon: NonNegative, smoothness: NonNegative, gradient_norm: NonNegative = 0.0
) -> dict[str, float]:
    """Return bounds of |∇f_ε - ∇f| and E|ĝ|² below those that SparQ prints.

    ``εL·min(√(2/π)(d + 1)/2, √d)``, reached by ``Lx|x|/2`` at 0, and ``(ε²/2)L²d(d + 2)(d + 4) + 2(d + 2)|∇f|²``.

    >>> sharp_smoothing_bounds(2, 0.0, 1.0, 1.0)["mean_square"]
    8.0
    """
    d = dimension
    return {
        "gradient": epsilon * smoothness * min(math.sqrt(2 / math.pi) * (d + 1) / 2, math.sqrt(d)),
        "mean_square": epsilon**2 / 2 * smoothness**2 * d * (d + 2) * (d + 4)
        + 2 * (d + 2) * gradient_norm**2,
    }


@oracle("SparQ Eq. 17 to 19")
def smoothed_gradient_bounds(
    dimension: Count, epsilon: NonNegative, smoothness: NonNegative, other_norm: NonNegative = 0.0
) -> dict[str, float]:
    """Return bounds of |∇f_ε|² by |∇f| (and the reverse), and of the difference of both gaps to the minimum.

    `other_norm`: ``|∇f|``, or ``|∇f_ε|`` for the reverse.

    ``2b² + (ε²/2)L²(d + 3)³`` and ``ε²Ld``.

    >>> smoothed_gradient_bounds(1, 0.0, 1.0, 1.5)["square"]
    4.5
    """
    return {
        "square": 2 * other_norm**2 + epsilon**2 / 2 * smoothness**2 * (dimension + 3) ** 3,
        "excess": epsilon**2 * smoothness * dimension,
    }


@oracle("QuZO App. D.1 and DistZO2 Sec. 5.1: linear losses, normals, data of its own for each perturbation")
def perturbation_error(
    num_perturbations: Count, dimension: Count, num_shards: Count = 1, spread: NonNegative = 0.0
) -> float:
    """Return E|ĝ - ∇L|²/|∇L|² of a mean over perturbations, each over shards that share its perturbation.

    `spread`: ``v``, the mean squared distance of a shard's gradient from ``∇L`` over ``|∇L|²``.

    ``((d + 1) + (d + 2)·v/K)/Q``: shards lower the noise of data alone.

    >>> perturbation_error(10, 4)
    0.5
    """
    return ((dimension + 1) + (dimension + 2) * spread / num_shards) / num_perturbations


@oracle("QuZO App. D.4: L(w + εu)u/ε for a linear loss and normals")
def one_point_error(level: Real, gradient_norm: NonNegative, dimension: Count, epsilon: Positive) -> float:
    """Return E|L(w + εu)u/ε - ∇L|² = dL²/ε² + (d + 1)|∇L|².

    `level`: ``L(w)``.

    >>> one_point_error(1.0, 0.0, 4, 0.5)
    16.0
    """
    return dimension * level**2 / epsilon**2 + (dimension + 1) * gradient_norm**2


@oracle("zoinfer Eq. 9 to 12: an entry of UVᵀ/√r")
def low_rank_entry_moments(rank: Count) -> dict[str, float]:
    """Return variance and fourth moment of an entry, and E[z²z'²] of two entries of a row.

    1, ``3 + 6/r`` and ``1 + 2/r``: of the normal's scale at every rank, of its law in the limit.

    >>> low_rank_entry_moments(2)
    {'variance': 1.0, 'fourth_moment': 6.0, 'row_product': 2.0}
    """
    return {"variance": 1.0, "fourth_moment": 3 + 6 / rank, "row_product": 1 + 2 / rank}


@oracle("DistZO2 App. C: the second term of Eq. 3 over the first")
def exchange_share(num_ranks: Count, link_over_lane: Positive) -> float:
    """Return ``(n - 1)·B_PCIe/B_NVLink``, what the exchange between devices takes against the upload.

    >>> exchange_share(8, 14.0)
    0.5
    """
    return (num_ranks - 1) / link_over_lane


@oracle("DistZO2 Sec. 7.2: a pair of ranks, transfers beside forwards")
def pair_speedup(transfer: NonNegative, forward: Positive) -> float:
    """Return ``max(t, 2c)/max(t, c)``, the speedup of two ranks that forward at one point each.

    `transfer`, `forward`: seconds of a block's transfer, and of one of its forwards.

    >>> pair_speedup(0.0, 1.0), pair_speedup(1.5, 1.0), pair_speedup(9.0, 1.0)
    (2.0, 1.3333333333333333, 1.0)
    """
    return max(transfer, 2 * forward) / max(transfer, forward)


@oracle("SparQ Lemma 1 read for rounding at random: E[C(a)²]/2 - a²/2")
def rounded_square_excess(step: Positive, value: Real) -> float:
    """Return ``f(1 - f)s²/2``, what rounding an activation at random adds to half its square.

    - `step`: ``s``, of the grid.
    - `value`: ``a``; ``f`` is the fraction of ``a/s``.

    >>> rounded_square_excess(0.5, 0.25)
    0.03125
    """
    part = value / step - math.floor(value / step)
    return part * (1 - part) * step**2 / 2
