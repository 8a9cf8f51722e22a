"""Constants decided by a few printed numbers: the most probable values, and how far off they may be.

Minimises, over the logarithms ``x`` of the constants, ``Σ_i e_i(x)² + Σ_j ((x_j - x_j⁰)/σ_j)²``, where ``e_i`` is the error of printed number ``i`` in
units of its standard deviation and ``(x⁰, σ)`` is the prior of :class:`~studies.published.constants.FittedConstant`. The inverse of ``JᵀJ`` at the optimum
is taken for the covariance of ``x``. Tables of hundreds of cells, which machines have timed, have :mod:`studies.published.fitting`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict

from costmodel.rates.fitting import Floats, most_probable
from studies.published.constants import FittedConstant, Values, prior_of


class FoundConstant(BaseModel):
    """A constant with its value and 95 % interval."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    value: float
    low: float
    high: float
    unit: str
    meaning: str


class TableFit(BaseModel):
    """What the tables of one paper say about their constants."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    constants: tuple[FoundConstant, ...]
    # Of the 90 % interval of a prediction, in logs, from residuals of cells left out one by one.
    half_width: float
    num_cells: int

    @property
    def values(self) -> dict[str, float]:
        """Values by name."""
        return {constant.name: constant.value for constant in self.constants}


def found_constants(
    constants: Sequence[FittedConstant], x: Floats, sigmas: Floats
) -> tuple[FoundConstant, ...]:
    """Return constants with their values ``exp(x)`` and what lies two standard deviations to either side.

    `x`, `sigmas`: logarithms of the values, one for each constant, and their standard deviations.

    >>> rate = FittedConstant("rate", "byte/s", "copies", prior=1.0, sigma=1.0)
    >>> (found,) = found_constants([rate], np.log([8.0]), np.log([2.0]))
    >>> round(found.low, 9), round(found.value, 9), round(found.high, 9)
    (2.0, 8.0, 32.0)
    """
    return tuple(
        FoundConstant(
            name=constant.name,
            value=float(np.exp(at)),
            low=float(np.exp(at - 2 * sigma)),
            high=float(np.exp(at + 2 * sigma)),
            unit=constant.unit,
            meaning=constant.meaning,
        )
        for constant, at, sigma in zip(constants, x, sigmas, strict=True)
    )


@dataclass(frozen=True)
class Posterior:
    """What printed numbers say about constants."""

    constants: tuple[FittedConstant, ...]
    # x, sigmas: logarithms of the most probable values, and their standard deviations.
    x: Floats
    sigmas: Floats

    @property
    def values(self) -> dict[str, float]:
        """The most probable values by name."""
        return named(self.constants, self.x)

    @property
    def found(self) -> tuple[FoundConstant, ...]:
        """The constants with their intervals."""
        return found_constants(self.constants, self.x, self.sigmas)


def named(constants: Sequence[FittedConstant], x: Floats) -> dict[str, float]:
    """Return the values ``exp(x)`` by the names of their constants."""
    return dict(zip((constant.name for constant in constants), np.exp(x).tolist(), strict=True))


def posterior(
    constants: Sequence[FittedConstant],
    errors: Callable[[Values], Sequence[float]],
    *,
    diff_step: float | None = None,
) -> Posterior:
    """Return the most probable values of constants, and their uncertainty.

    - `errors`: from values to the error of each printed number, in units of its standard deviation.
    - `diff_step`: relative step of a derivative, where predictions change in steps themselves.

    A constant of 1 within a factor of e, and one number that says e² as surely: the truth is taken for e.

    >>> rate = FittedConstant("rate", "byte/s", "copies", prior=1.0, sigma=1.0)
    >>> found = posterior([rate], lambda values: [math.log(values["rate"]) - 2])
    >>> round(float(found.x[0]), 6), round(float(found.sigmas[0]), 6)
    (1.0, 0.707107)
    """
    x, jacobian = most_probable(
        prior_of(constants), lambda x: np.array(errors(named(constants, x))), diff_step=diff_step
    )
    covariance = np.linalg.inv(jacobian.T @ jacobian)
    return Posterior(tuple(constants), x, np.sqrt(np.diag(covariance)))


class _Valued(Protocol):
    """What a table prints a number of."""

    @property
    def value(self) -> float | None:
        """The number, or None where the cell is empty."""


Case = TypeVar("Case", bound=_Valued)


def log_error(case: Case, values: Values, predicted: Callable[[Case, Values], tuple[float, str]]) -> float:
    """Return ``log predicted - log printed``."""
    return math.log(predicted(case, values)[0] / (case.value or 1.0))


def left_out_errors(
    known: Sequence[Case],
    fitted: Callable[[Sequence[Case]], Mapping[str, float]],
    predicted: Callable[[Case, Values], tuple[float, str]],
) -> list[float]:
    """Return the :func:`log_error` of each case with the constants that all others decide."""
    return [
        log_error(case, fitted([other for other in known if other is not case]), predicted) for case in known
    ]
