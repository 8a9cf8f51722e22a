"""Predicted against measured: the row that both stand in, and how far predictions of many rows are off.

Every comparison of a prediction with a measurement is rows of this kind, whoever measured and whatever is predicted; every
summary of such rows is a :class:`Score` (docs/decisions/0035-one-table-of-predicted-and-measured.md).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Row:
    """One number, predicted and measured.

    >>> row = Row("opt, 4x128", "step_s", measured=0.2, predicted=0.25, low=0.15, high=0.3)
    >>> row.error, row.is_inside
    (0.25, True)
    """

    case: str  # what was done: the name of a configuration, a kernel, a printed cell
    what: str  # the quantity, which ends in its unit: `step_s`, `device_bytes`
    # measured, predicted: none where nothing was measured, or nothing is predicted.
    measured: float | None = None
    predicted: float | None = None
    # low, high: ends of the interval of the prediction, where it has one.
    low: float | None = None
    high: float | None = None
    group: str = ""  # rows of one group are scored together
    flag: str = ""  # why the row does not count; empty where it does
    provenance: str = ""  # who measured it, or why nothing is predicted

    @property
    def is_counted(self) -> bool:
        """Whether there is a measurement that nothing speaks against."""
        return not self.flag and self.measured is not None

    @property
    def error(self) -> float | None:
        """Predicted over measured, less 1; None if either is missing or nothing was measured."""
        return relative_error(self.predicted, self.measured)

    @property
    def is_inside(self) -> bool:
        """Whether the measurement lies in the interval."""
        if self.measured is None or self.low is None or self.high is None:
            return False
        return self.low <= self.measured <= self.high


def relative_error(predicted: float | None, measured: float | None) -> float | None:
    """Return predicted over measured, less 1; None if either is missing or nothing was measured."""
    return predicted / measured - 1 if predicted is not None and measured else None


@dataclass(frozen=True)
class Score:
    """How far the predictions of some rows are off.

    Two predictions that are a tenth too large, and one that is half of what was measured, outside its interval:

    >>> score = Score("copies", 3, 0, errors=(0.1, 0.1, -0.5), num_inside=2, widths=(1.2, 1.4, 1.3))
    >>> score.median, score.signed, round(score.coverage, 2), score.width
    (0.1, 0.1, 0.67, 1.3)
    """

    name: str
    # num_rows, num_blank: rows that count, and those of them without a prediction.
    num_rows: int
    num_blank: int
    errors: tuple[float, ...]  # relative errors of the others
    num_inside: int = 0  # of these, measured within the interval
    widths: tuple[float, ...] = ()  # high end over low end of each interval

    @classmethod
    def of(cls, rows: Iterable[Row], name: str = "") -> Score:
        """Return the score of the rows that count."""
        counted = [row for row in rows if row.is_counted]
        errors = tuple(row.error for row in counted if row.error is not None)
        ends = [(row.low, row.high) for row in counted if row.error is not None]
        return cls(
            name,
            len(counted),
            len(counted) - len(errors),
            errors,
            sum(row.is_inside for row in counted),
            tuple(high / low for low, high in ends if low and high is not None),
        )

    @classmethod
    def of_errors(cls, errors: Sequence[float], name: str = "") -> Score:
        """Return the score of relative errors whose rows are not at hand."""
        return cls(name, len(errors), 0, tuple(errors))

    @cached_property
    def median(self) -> float:
        """Median of the errors' sizes."""
        return statistics.median(map(abs, self.errors))

    @cached_property
    def p90(self) -> float:
        """Their 90th percentile, linear between neighbours."""
        import numpy as np  # not every command that knows rows scores them

        return float(np.percentile(np.abs(self.errors), 90))

    @cached_property
    def signed(self) -> float:
        """Median error with its sign: above 0 where predictions are too large."""
        return statistics.median(self.errors)

    @property
    def largest(self) -> float:
        """The error of the largest size, with its sign."""
        return max(self.errors, key=abs)

    @property
    def coverage(self) -> float:
        """Part of the measurements that lie within their intervals."""
        return self.num_inside / len(self.errors)

    @cached_property
    def width(self) -> float:
        """Median width of the intervals, high over low."""
        return statistics.median(self.widths)

    def meets(self, goal: tuple[float, float]) -> bool:
        """Whether median and 90th percentile are at most those of a goal."""
        return self.median <= goal[0] and self.p90 <= goal[1]


def coverage_band(number: int, promised: float = 0.9) -> tuple[float, float]:
    """Return between which parts 95 in 100 coverages of `number` intervals lie, if each holds with the probability that is promised."""
    from scipy.stats import binom  # takes a while to import

    low, high = binom.interval(0.95, number, promised)
    return float(low) / number, float(high) / number


def scores(rows: Iterable[Row], key: Callable[[Row], str] = lambda row: row.group) -> list[Score]:
    """Return the score of every group of rows that count, in the order of their first rows."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.is_counted:
            groups.setdefault(key(row), []).append(row)
    return [Score.of(members, name) for name, members in groups.items()]


def mean_over_groups(by_group: Iterable[Score]) -> tuple[float, float] | None:
    """Return the means of groups' medians and 90th percentiles, so that a group counts once however many rows it has."""
    scored = [score for score in by_group if score.errors]
    if not scored:
        return None
    return statistics.fmean(s.median for s in scored), statistics.fmean(s.p90 for s in scored)
