"""Weighted robust least squares with priors: the one way in which constants are fitted to measurements.

Over the logarithms ``x`` of constants it minimises

``Σ w_i² ρ(r_i(x)) + Σ ((x_j - x_j⁰) / σ_j)²``

with residuals ``r`` in logs, so that ten microseconds and ten seconds weigh alike; weights ``w``, one over the relative error of
a good measurement; the prior ``(x⁰, σ)``, which holds only what data leave open; and a loss ``ρ``, under which a measurement
counts less and less the farther it lies off.

.. [1] B. Triggs et al., "Bundle Adjustment: A Modern Synthesis", 2000, section 3: robust losses in nonlinear least
   squares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class RobustLoss:
    """A loss that is a square near zero and grows more slowly from a scale on."""

    scale: float  # residual from which a measurement counts less and less
    of_square: Callable[[Floats], Floats]  # the loss of a scaled residual, given its square
    # Its derivative by that square: how much a residual counts, 1 at zero.
    slope_of_square: Callable[[Floats], Floats]

    def soften(self, residuals: Floats) -> Floats:
        """Return numbers whose squares are the loss of `residuals`."""
        square = (residuals / self.scale) ** 2
        return np.asarray(np.sign(residuals) * self.scale * np.sqrt(self.of_square(square)))

    def softened_slope(self, residuals: Floats) -> Floats:
        """Return the derivatives of :meth:`soften`."""
        size = np.abs(residuals) / self.scale
        softened = np.sqrt(self.of_square(size**2))
        slope = size * self.slope_of_square(size**2) / np.where(softened > 0, softened, 1.0)
        return np.where(softened > 0, slope, 1.0)

    def curvature(self, residuals: Floats) -> Floats:
        """Return how much each measurement counts at its residual, 1 at zero: the weight of its square."""
        return np.asarray(self.slope_of_square((residuals / self.scale) ** 2))


def soft_l1(scale: float) -> RobustLoss:
    """Return ``2 (sqrt(1 + r²) - 1)`` of scaled residuals: convex, so that a search finds its one minimum."""
    # Without the difference of two numbers near 1, which would leave little of small residuals.
    return RobustLoss(scale, lambda s: 2 * s / (np.sqrt(1 + s) + 1), lambda s: 1 / np.sqrt(1 + s))


def cauchy(scale: float) -> RobustLoss:
    """Return ``log(1 + r²)`` of scaled residuals, which gives up on outliers; it has many minima."""
    return RobustLoss(scale, np.log1p, lambda s: 1 / (1 + s))


@dataclass(frozen=True)
class Prior:
    """What is known of constants before a measurement."""

    # x, sigma: logarithms of values, and their standard deviations.
    x: Floats
    sigma: Floats

    def information(self, jacobian: Floats, weights: Floats) -> Floats:
        """Return the inverse of the constants' covariance, given the derivatives of data and the inverses of their variances."""
        return np.asarray((jacobian * weights[:, None]).T @ jacobian + np.diag(self.sigma**-2))


def most_probable(
    prior: Prior,
    residuals: Callable[[Floats], Floats],
    jacobian: Callable[[Floats], Floats] | None = None,
    *,
    weights: Floats | float = 1.0,
    loss: RobustLoss | None = None,
    start: Floats | None = None,
    **options: Any,
) -> tuple[Floats, Floats]:
    """Return the constants that explain data best, and the derivatives of all terms of the sum there.

    - `residuals`, `jacobian`: from constants to the residuals of data, and to their derivatives; without the latter they are
      differences.
    - `weights`: one over the standard deviation of each residual.
    - `loss`: a square by default.
    - `start`: where the search begins; the prior by default.
    - `**options`: of :func:`scipy.optimize.least_squares`, such as ``bounds`` and ``xtol``.

    A constant of 1 within a factor of e, and one number that says e² as surely: the truth is taken for e.

    >>> prior = Prior(np.zeros(1), np.ones(1))
    >>> x, _ = most_probable(prior, lambda x: x - 2)
    >>> round(float(x[0]), 6)
    1.0
    """

    def terms(x: Floats) -> Floats:
        errors = residuals(x)
        softened = errors if loss is None else loss.soften(errors)
        return np.concatenate([weights * softened, (x - prior.x) / prior.sigma])

    if jacobian is not None:
        slope_of = jacobian

        def slopes(x: Floats) -> Floats:
            errors = residuals(x)
            softening = np.ones(len(errors)) if loss is None else loss.softened_slope(errors)
            return np.vstack([(weights * softening)[:, None] * slope_of(x), np.diag(1 / prior.sigma)])

        options["jac"] = slopes
    solution = least_squares(terms, prior.x if start is None else start, **options)
    return np.asarray(solution.x, dtype=np.float64), np.asarray(solution.jac, dtype=np.float64)
