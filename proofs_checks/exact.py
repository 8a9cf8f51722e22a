"""Expectations without samples: all signs of a small dimension, Gauss-Hermite nodes, and the shipped arithmetic at each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from executors.steps.arithmetic import ParamPass, projected_gradient
from proofs_checks.outcomes import Outcome

Array = npt.NDArray[np.float64]
Loss = Callable[[Tensor], Tensor]
"""From parameters of shape (d,) to a scalar."""

ROUNDING = 1e-9
"""What float64 may make of an identity, relative."""


@cache
def normal_nodes(dimension: int, order: int) -> tuple[Array, Array]:
    """Return nodes of shape (order^d, d) and weights that integrate polynomials against N(0, I).

    Exact for degrees up to ``2·order - 1`` in each coordinate.

    >>> nodes, weights = normal_nodes(2, 4)
    >>> bool(abs(weights @ (nodes[:, 0] ** 4 * nodes[:, 1] ** 2) - 3) < 1e-12)
    True
    """
    points, probabilities = np.polynomial.hermite_e.hermegauss(order)
    probabilities = probabilities / probabilities.sum()
    nodes = np.array(list(itertools.product(points, repeat=dimension)))
    weights = np.array([math.prod(each) for each in itertools.product(probabilities, repeat=dimension)])
    return nodes, weights


@cache
def sign_nodes(dimension: int) -> tuple[Array, Array]:
    """Return all sign vectors of a dimension, shape (2^d, d), and their common weight."""
    nodes = np.array(list(itertools.product((-1.0, 1.0), repeat=dimension)))
    return nodes, np.full(len(nodes), 1.0 / len(nodes))


def shipped_estimate(loss: Loss, theta: Tensor, z: Tensor, epsilon: float, *, central: bool) -> Tensor:
    """Return ``g·z`` as the shipped perturbations, projected gradient and update make it, along a given `z`.

    `theta`, `z`: shape (d,), of one format.
    """
    param_pass, weights = ParamPass(), theta.clone()
    base = loss(weights)
    param_pass.perturb(weights, z, 1, epsilon)
    plus = loss(weights)
    if central:
        param_pass.perturb(weights, z, -2, epsilon)
        other = loss(weights)
        gradient = projected_gradient(plus, other, epsilon, central=True).item()
    else:
        gradient = projected_gradient(plus, base, epsilon, central=False).item()
    moved = torch.zeros_like(theta)
    param_pass.update(moved, z, gradient=gradient, learning_rate=1.0, weight_decay=None)
    return -moved


def mean_estimate(
    loss: Loss,
    theta: Sequence[float],
    epsilon: float,
    *,
    central: bool,
    nodes: tuple[Array, Array] | None = None,
    order: int = 6,
) -> Tensor:
    """Return the expectation of ``g·z`` over normals, or over given `nodes` with their weights.

    Exact for losses that are polynomials of a degree that the nodes integrate.
    """
    return moments_of_estimate(loss, theta, epsilon, central=central, nodes=nodes, order=order)[0]


def moments_of_estimate(
    loss: Loss,
    theta: Sequence[float],
    epsilon: float,
    *,
    central: bool,
    nodes: tuple[Array, Array] | None = None,
    order: int = 6,
) -> tuple[Tensor, float]:
    """Return ``E[g·z]`` and ``E|g·z|²``; see :func:`mean_estimate`."""
    where = torch.tensor(theta, dtype=torch.float64)
    perturbations, weights = normal_nodes(len(where), order) if nodes is None else nodes
    mean, square = torch.zeros_like(where), 0.0
    for z, weight in zip(torch.from_numpy(perturbations), weights.tolist(), strict=True):
        estimate = shipped_estimate(loss, where, z.contiguous(), epsilon, central=central)
        mean += weight * estimate
        square += weight * float(estimate @ estimate)
    return mean, square


def equal(measured: Sequence[float] | Tensor | float, theory: Sequence[float] | Tensor | float, *, what: str,
          tolerance: float = ROUNDING) -> Outcome:  # fmt: skip
    """Return how far numbers are from their theory, relative to the largest of it."""
    first, second = (torch.as_tensor(side, dtype=torch.float64).reshape(-1) for side in (measured, theory))
    size = float(second.abs().max()) or 1.0
    off = float((first - second).abs().max()) / size
    shown = ", ".join(f"{value:.6g}" for value in first.tolist()[:4])
    expected = ", ".join(f"{value:.6g}" for value in second.tolist()[:4])
    return Outcome(off, tolerance, "relative distance to theory", (f"{what}: {shown}; theory {expected}",))


def at_most(measured: float, bound: float, *, what: str, slack: float = ROUNDING) -> Outcome:
    """Return a quantity over the bound that a theory gives it, which must not exceed 1.

    Some case of every inequality, of which `what` is the name, must come within a factor of its bound:
    :data:`~proofs_checks.claims.MOST_SLACK`. For errors that should be 0 there is :func:`within`.
    """
    outcome = within(measured, bound, what=what, slack=slack)
    share = 1.0 if measured == bound == 0 else outcome.statistic
    return replace(outcome, bounds=((what, share),))


def within(measured: float, tolerance: float, *, what: str, slack: float = ROUNDING) -> Outcome:
    """Return a quantity over what is tolerated of it, which must not exceed 1; it may be far below."""
    share = measured / tolerance if tolerance else (0.0 if measured <= 0 else math.inf)
    return Outcome(share, 1 + slack, "part of the bound", (f"{what}: {measured:.6g} <= {tolerance:.6g}",))


def exceeds(measured: float, bound: float, *, what: str, factor: float = 1.0) -> Outcome:
    """Return whether a quantity is above `factor` times a bound, as a counterexample needs it."""
    share = factor * bound / measured if measured > 0 else math.inf
    line = f"{what}: {measured:.6g} > {bound:.6g}"
    return Outcome(share, 1 - ROUNDING, f"{factor:g} times the bound over what is measured", (line,))


def is_true(value: bool, *, what: str) -> Outcome:
    """Return whether something is so, as an outcome."""
    return Outcome(0.0 if value else 1.0, 0.0, "assertions that are not so", (what,))
