"""Bounds of SparQ's lemmas and theorems, as printed and as corrected."""

from __future__ import annotations

import math
from typing import Literal

from proofs_checks.oracles.registry import Count, NonNegative, Positive, oracle


@oracle("SparQ Lemma 1 (Lemma 4 of the appendix)")
def compressed_gradient_bound(
    first_gradient: NonNegative, rest_smoothness: NonNegative, kappa: NonNegative, output_bound: NonNegative
) -> float:
    """Return (1 + C²)·L₂²·κ²·L_S², the bound of |∇f - ∇f̂|².

    - `first_gradient`: ``C``, of the first submodel.
    - `rest_smoothness`: ``L₂``: as printed in the parameters alone, for which the bound does not hold; as corrected in activation
      and parameters.
    - `kappa`: of the compressor.
    - `output_bound`: ``L_S``, the largest norm of what crosses.

    >>> compressed_gradient_bound(2.0, 1.0, 0.5, 2.0)
    5.0
    """
    return (1 + first_gradient**2) * rest_smoothness**2 * kappa**2 * output_bound**2


@oracle("SparQ inequality 41, for Thm. 1 (two nodes)")
def sparq_stationarity_bound(
    horizon: Count,
    dimension: Count,
    gap: NonNegative,
    learning_rate: Positive,
    radius: NonNegative,
    smoothness: NonNegative,
    compression: NonNegative = 0.0,
    sigma: NonNegative = 0.0,
) -> float:
    """Return what SparQ's inequality 41 allows the mean of E|∇f(x_t)|² over T steps to be.

    - `gap`: ``D = f(x_0) - f*``.
    - `compression`: ``B``, the bound of lemma 1.
    - `sigma`: of the noise in the data.

    ``8D/Tη + 8μ²Ld/Tη + 7μ²L²(d + 3)³ + 12B + 4Lη(μ²L²(d + 6)³ + 4(d + 4)(2B + σ²))``. The term ``12B`` does not fall with ``T``.

    >>> sparq_stationarity_bound(8, 1, 1.0, 1.0, 0.0, 0.0, compression=0.25)
    4.0
    """
    d, drift = dimension, radius**2 * smoothness**2
    return (
        8 * gap / (horizon * learning_rate)
        + 8 * radius**2 * smoothness * d / (horizon * learning_rate)
        + 7 * drift * (d + 3) ** 3
        + 12 * compression
        + 4 * smoothness * learning_rate * (drift * (d + 6) ** 3 + 4 * (d + 4) * (2 * compression + sigma**2))
    )


@oracle("SparQ Thm. 1: η <= 1/(32(d + 4)L) and μ <= 1/((d + 6)√T)")
def sparq_admissible(dimension: Count, smoothness: Positive, horizon: Count) -> dict[str, float]:
    """Return the largest learning rate and smoothing radius that theorem 1 allows.

    >>> sparq_admissible(4, 1.0, 100)
    {'learning_rate': 0.00390625, 'radius': 0.01}
    """
    return {
        "learning_rate": 1 / (32 * (dimension + 4) * smoothness),
        "radius": 1 / ((dimension + 6) * math.sqrt(horizon)),
    }


@oracle("SparQ Sec. 3 and App. C.3; what the executor sends beside what the paper counts")
def sparq_messages(
    num_perturbations: Count, num_stages: Count, difference: Literal["forward", "central"] = "forward"
) -> dict[str, int]:
    """Return activations and scalars that cross between stages in a step: as the paper counts them, and losses as zosim sends them.

    >>> sparq_messages(2, 4)
    {'activations': 9, 'scalars_printed': 6, 'losses_sent': 9}
    """
    points = num_perturbations + 1 if difference == "forward" else 2 * num_perturbations
    num_boundaries = num_stages - 1
    return {
        "activations": points * num_boundaries,
        "scalars_printed": num_perturbations * num_boundaries,
        "losses_sent": points * num_boundaries,
    }


@oracle("SparQ Lemma 5 and Thm. 2 (more than two nodes): neither holds, since lemma 5 fails")
def sparq_multinode_bounds(
    horizon: Count,
    dimension: Count,
    num_nodes: Count,
    gap: NonNegative,
    learning_rate: Positive,
    radius: NonNegative,
    smoothness: NonNegative,
    kappa: NonNegative = 0.0,
    output_bound: NonNegative = 0.0,
    psi: NonNegative = 0.0,
    sigma: NonNegative = 0.0,
) -> dict[str, float]:
    """Return lemma 5's bound of |∇f - ∇f̂|², and what theorem 2 allows the mean of E|∇f(x_t)|² to be, as printed and with its own factor.

    `num_nodes`, `kappa`, `output_bound`, `psi`: ``M``, ``κ``, ``L_S`` and ``Ψ``.

    ``2Mκ²L_S²Ψ``; inequality 41 with it for ``B``, in which the print has ``12Mκ²L_S²Ψ`` where ``12B = 24Mκ²L_S²Ψ`` follows.

    >>> sparq_multinode_bounds(8, 1, 3, 1.0, 1.0, 0.0, 0.0, kappa=0.5, output_bound=1.0, psi=1.0)
    {'lemma_5': 1.5, 'theorem_2': 10.0, 'theorem_2_corrected': 19.0}
    """
    lemma = 2 * num_nodes * kappa**2 * output_bound**2 * psi
    corrected = sparq_stationarity_bound(
        horizon, dimension, gap, learning_rate, radius, smoothness, lemma, sigma
    )
    return {"lemma_5": lemma, "theorem_2": corrected - 6 * lemma, "theorem_2_corrected": corrected}
