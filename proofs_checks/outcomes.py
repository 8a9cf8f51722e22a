"""What a check is given, and what it measured."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Size = Literal["full", "quick"]

COARSEST = 0.25
"""Relative error that every comparison of random samples must notice, or it says ``not resolved``."""


@dataclass(frozen=True)
class Context:
    """What a check is given."""

    seed: int = 0  # decides every random number of the check
    # ``"full"``, or ``"quick"`` for samples that just suffice to catch the planted faults.
    size: Size = "full"

    def samples(self, full: int, quick: int) -> int:
        """Return the sample size."""
        return full if self.size == "full" else quick


@dataclass(frozen=True)
class Estimate:
    """A mean of a sample beside its theory."""

    name: str
    value: float
    theory: float
    # low, high: interval that misses the theory with the probability of a false alarm that the suite allows one
    # comparison.
    low: float
    high: float
    p_value: float  # probability of a mean this far off, were the theory true; two-sided
    # Smallest error, relative to the theory (to 1 where that is 0), that is noticed 999 times in 1000.
    resolution: float
    num_samples: int

    @property
    def varies(self) -> bool:
        """Whether the sample varied, so that chance has a say."""
        return self.resolution > _EXACT


@dataclass(frozen=True)
class Outcome:
    """What a check measured. What it asserts is so if the statistic does not exceed the bound."""

    statistic: float
    bound: float
    measured: str  # what the statistic is, with its unit and its sample size
    details: tuple[str, ...] = ()  # one line for each part of the check
    # What was compared with its theory by random samples; empty where a check is exact.
    estimates: tuple[Estimate, ...] = ()
    error: str = ""  # what was raised before anything could be measured; empty if nothing was
    # Inequalities of a theory that were held against cases: the inequality, and which part of its bound was measured.
    bounds: tuple[tuple[str, float], ...] = ()

    @property
    def passed(self) -> bool:
        """Whether what is asserted is so; a statistic that is not a number asserts nothing."""
        return self.statistic <= self.bound

    @property
    def resolution(self) -> float | None:
        """Relative error that every comparison of random samples notices 999 times in 1000, the coarsest one, too; None where there is none."""
        varying = [estimate.resolution for estimate in self.estimates if estimate.varies]
        return max(varying, default=None)

    @property
    def slack(self) -> float:
        """Largest over inequalities of the bound over what is measured, in the case of each that comes nearest to it; 1 if there is none."""
        nearest: dict[str, float] = {}
        for name, share in self.bounds:
            nearest[name] = max(share, nearest.get(name, 0.0))
        return max((1 / share if share > 0 else math.inf for share in nearest.values()), default=1.0)


_EXACT = 1e-6
"""Resolution of comparisons of what does not vary."""


def worst(outcomes: list[Outcome]) -> Outcome:
    """Return the outcome nearest to its bound, with the details of all; outcomes share their unit."""

    def share(outcome: Outcome) -> float:
        if math.isnan(outcome.statistic):
            return math.inf
        return outcome.statistic / outcome.bound if outcome.bound else outcome.statistic

    last = max(outcomes, key=share)
    details = tuple(line for outcome in outcomes for line in outcome.details)
    estimates = tuple(estimate for outcome in outcomes for estimate in outcome.estimates)
    return replace(last, details=details, estimates=estimates, bounds=_bounds(outcomes))


def everything_holds(outcomes: dict[str, Outcome]) -> Outcome:
    """Return how many of unlike assertions are not so, which must be none; names go before their details."""
    wrong = [name for name, outcome in outcomes.items() if not outcome.passed]
    details = tuple(
        f"{name}: {line}" if line else name
        for name, outcome in outcomes.items()
        for line in (
            outcome.details or (f"{outcome.statistic:.4g} (bound {outcome.bound:.4g}), {outcome.measured}",)
        )
    )
    estimates = tuple(estimate for outcome in outcomes.values() for estimate in outcome.estimates)
    return Outcome(
        float(len(wrong)),
        0.0,
        "assertions that are not so",
        details,
        estimates,
        bounds=_bounds(outcomes.values()),
    )


def _bounds(outcomes: Iterable[Outcome]) -> tuple[tuple[str, float], ...]:
    return tuple(bound for outcome in outcomes for bound in outcome.bounds)
