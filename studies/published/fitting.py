"""Fitting few constants to published rows, and intervals from what was held out.

A robust fit in log space (:mod:`costmodel.rates.fitting`), with a Cauchy loss, since some cells cannot be right and nobody knows all of
them beforehand, and the prior of :mod:`studies.published.constants`. Methods of one setting are off together, so a setting's
weight grows with the square root of the number of its cells only; weights are 1 on average, over :data:`NOISE`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodel.rates.fitting import Floats, cauchy, most_probable, soft_l1
from studies.published.cells import Cell
from studies.published.constants import Domain, FittedConstant, Values, constants_of, prior_of
from studies.published.memory import predicted_mib
from topology.errors import ProfileError

NOISE = 0.02
"""Relative error of a good row: what the prior is weighed against."""

OUTLIER = 0.04
"""Log residual from which a row counts less and less."""

_SOFT, _CAUCHY = soft_l1(OUTLIER), cauchy(OUTLIER)

COVERAGE = 0.90
_STEP = 1e-3
_MAX_EVALUATIONS = 25
_MAX_STEPS = 8
_LEAST_STEP = 3e-3

Predictor = Callable[[Cell, list[Values]], Floats]


@dataclass(frozen=True)
class Solution:
    """What a fit found."""

    constants: tuple[FittedConstant, ...]
    x: Floats  # logarithms of their values
    cells: tuple[Cell, ...]  # what was fitted
    residuals: Floats  # ``log predicted - log printed`` of each
    jacobian: Floats  # derivatives of the log predictions, cells by constants
    covariance: Floats  # of `x`

    @property
    def values(self) -> dict[str, float]:
        """Values by name."""
        return _named(self.constants, self.x)

    @property
    def weights(self) -> Floats:
        """How much each cell counts, as an inverse variance of its logarithm."""
        return np.asarray(setting_weights(self.cells) * _CAUCHY.curvature(self.residuals) / NOISE**2)

    def held_out(self) -> Floats:
        """Return the residual of each cell if its setting (all methods of its table row) were left out of the fit.

        One Gauss-Newton step from the optimum without the setting's rows, which is exact for a linear model.
        """
        weights = self.weights
        slopes = weights * self.residuals
        hessian = prior_of(self.constants).information(self.jacobian, weights)
        settings = np.array(["|".join(cell.row.setting) for cell in self.cells])
        residuals = self.residuals.copy()
        for setting in np.unique(settings):
            mine = settings == setting
            own = self.jacobian[mine]
            # The gradient is zero at the optimum, so without these rows it is minus theirs.
            step = np.linalg.solve(hessian - (own * weights[mine][:, None]).T @ own, own.T @ slopes[mine])
            residuals[mine] += own @ step
        return residuals


def fit(cells: Sequence[Cell], paper: str, domain: Domain, *, start: Values | None = None) -> Solution:
    """Return the constants of a paper that explain `cells` best.

    Raises ProfileError if there is nothing to fit.

    - `cells`: Those with a printed value count.
    - `start`: Constants near the optimum, where they are known; by default it is searched for from the prior.
    """
    known = tuple(cell for cell in cells if cell.value is not None)
    if not known:
        raise ProfileError(f"no row has a {domain} value of {paper}", hint="add rows with a value")
    constants = constants_of(paper, domain)
    problem = _FitProblem(known, constants, predictor(domain))
    x = None if start is None else np.log([start[constant.name] for constant in constants])
    return problem.solution(problem.solve(x))


def refitted(solution: Solution, domain: Domain, group: Callable[[Cell], Hashable]) -> Floats:
    """Return the residual of each cell with the constants fitted anew without its group of cells.

    Gauss-Newton steps from the optimum of all cells until they end, so that no outlier moves a fit to another minimum;
    residuals are those of each step, derivatives those of the optimum.
    """
    predict = predictor(domain)
    residuals = solution.residuals.copy()
    groups = [group(cell) for cell in solution.cells]
    for left_out in dict.fromkeys(groups):
        is_mine = np.array([other == left_out for other in groups])
        values = _named(solution.constants, _without(solution, is_mine, predict))
        for index in np.flatnonzero(is_mine).tolist():
            cell = solution.cells[index]
            residuals[index] = np.log(float(predict(cell, [values])[0]) / cell.printed)
    return residuals


def _without(solution: Solution, is_left_out: NDArray[np.bool_], predict: Predictor) -> Floats:
    """Return the logarithms of the constants that explain the other cells best."""
    cells = tuple(
        cell for cell, is_out in zip(solution.cells, is_left_out.tolist(), strict=True) if not is_out
    )
    jacobian, residuals, x = solution.jacobian[~is_left_out], solution.residuals[~is_left_out], solution.x
    weights = setting_weights(cells) / NOISE**2
    prior = prior_of(solution.constants)
    low, high = _bounds(solution.constants)
    for _ in range(_MAX_STEPS):
        curved = weights * _CAUCHY.curvature(residuals)
        hessian = prior.information(jacobian, curved)
        gradient = jacobian.T @ (curved * residuals) + (x - prior.x) / prior.sigma**2
        step = np.clip(x - np.linalg.solve(hessian, gradient), low, high) - x
        x = x + step
        if np.abs(step).max() < _LEAST_STEP:
            break
        values = _named(solution.constants, x)
        residuals = np.array([np.log(float(predict(cell, [values])[0]) / cell.printed) for cell in cells])
    return np.asarray(x)


def predictor(domain: Domain) -> Predictor:
    """Return what predicts a cell for several sets of constants."""
    return predicted_mib if domain == "memory" else lambda cell, sets: cell.predictions(sets)


class _FitProblem:
    """The fit as vectors."""

    def __init__(
        self, cells: tuple[Cell, ...], constants: tuple[FittedConstant, ...], predict: Predictor
    ) -> None:
        self.cells, self.constants, self.predict = cells, constants, predict
        self.prior = prior_of(constants)
        self.printed = np.log([cell.printed for cell in cells])
        self.weights = setting_weights(cells)
        self._at: Floats | None = None
        self._found: tuple[Floats, Floats] | None = None

    def solve(self, start: Floats | None = None) -> Floats:
        """Return the optimum, or the one next to `start`."""
        low, high = _bounds(self.constants)
        x = np.clip(self.prior.x if start is None else start, low + 1e-6, high - 1e-6)
        # The Cauchy loss has many minima: the convex one leads to the right one.
        for loss in (_SOFT, _CAUCHY) if start is None else (_CAUCHY,):
            x, _ = most_probable(
                self.prior,
                lambda x: self._linear(x)[0],
                lambda x: self._linear(x)[1],
                weights=np.sqrt(self.weights) / NOISE,
                loss=loss,
                start=x,
                bounds=(low, high),
                max_nfev=_MAX_EVALUATIONS,
                xtol=1e-4,
                ftol=1e-5,
            )
        return x

    def solution(self, x: Floats) -> Solution:
        residuals, jacobian = self._linear(x)
        weights = self.weights * _CAUCHY.curvature(residuals) / NOISE**2
        information = self.prior.information(jacobian, weights)
        return Solution(
            self.constants,
            x,
            self.cells,
            residuals,
            jacobian,
            np.asarray(np.linalg.inv(information), dtype=np.float64),
        )

    def _linear(self, x: Floats) -> tuple[Floats, Floats]:
        """Return residuals and their derivatives at `x`; asked for twice in a row, so the last answer is kept."""
        if self._found is None or self._at is None or not np.array_equal(self._at, x):
            points = [x, *(x + _STEP * unit for unit in np.eye(len(x)))]
            sets: list[Values] = [_named(self.constants, point) for point in points]
            predicted = np.log(np.array([self.predict(cell, sets) for cell in self.cells]))
            self._at = x.copy()
            self._found = (
                predicted[:, 0] - self.printed,
                (predicted[:, 1:] - predicted[:, :1]) / _STEP,
            )
        return self._found


def setting_weights(cells: Sequence[Cell]) -> Floats:
    """Return the weight of each cell: the inverse root of the number of cells of its setting, 1 on average."""
    settings = ["|".join(cell.row.setting) for cell in cells]
    counts = np.array([settings.count(setting) for setting in settings])
    weights = 1 / np.sqrt(counts)
    return np.asarray(weights / weights.mean())


def _bounds(constants: Sequence[FittedConstant]) -> tuple[Floats, Floats]:
    """Return the logarithms of the bounds that physics sets."""
    with np.errstate(divide="ignore"):
        low = np.log([constant.low for constant in constants])
    return np.asarray(low), np.log([constant.high for constant in constants])


def _named(constants: Sequence[FittedConstant], x: Floats) -> dict[str, float]:
    return dict(zip((constant.name for constant in constants), np.exp(x).tolist(), strict=True))


def conformal_half_width(residuals: Sequence[float]) -> float:
    """Return the half width, in logs, that covers a new residual like these with probability :data:`COVERAGE`.

    The ``⌈(n + 1) · coverage⌉``-th smallest absolute residual; the largest where there are too few.

    >>> conformal_half_width([0.01 * k for k in range(1, 20)])
    0.18
    """
    ranked = np.sort(np.abs(np.asarray(residuals, dtype=np.float64)))
    place = int(np.ceil((len(ranked) + 1) * COVERAGE))
    return float(round(ranked[min(place, len(ranked)) - 1], 12))
