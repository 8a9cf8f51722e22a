"""How far predictions are off, group by group."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from zosim.applications.validation.rows import Forecast, MeasuredRow

Outcome = tuple[MeasuredRow, Forecast | str]
"""A row, with what is predicted for it or why nothing is."""


@dataclass(frozen=True)
class Score:
    """Errors of the rows of one group.

    Attributes
    ----------
    name : str
    num_rows, num_blank : int
        Rows with a measurement, and those of them without prediction.
    errors : tuple of float
        ``predicted / measured - 1`` of the others.
    num_inside : int
        Of these, measured within the interval.
    widths : tuple of float
        High end over low end of each interval.

    Examples
    --------
    Two predictions that are a tenth too large, and one that is half of what was measured, outside its interval:

    >>> score = Score("copies", 3, 0, errors=(0.1, 0.1, -0.5), num_inside=2, widths=(1.2, 1.4, 1.3))
    >>> score.median, score.signed, round(score.coverage, 2), score.width
    (0.1, 0.1, 0.67, 1.3)
    """

    name: str
    num_rows: int
    num_blank: int
    errors: tuple[float, ...]
    num_inside: int
    widths: tuple[float, ...]

    @cached_property
    def median(self) -> float:
        """Median of the errors' sizes."""
        return statistics.median(map(abs, self.errors))

    @cached_property
    def p90(self) -> float:
        """Their 90th percentile, linear between neighbours."""
        return float(np.percentile(np.abs(self.errors), 90))

    @cached_property
    def signed(self) -> float:
        """Median error with its sign: above 0 where predictions are too large."""
        return statistics.median(self.errors)

    @property
    def coverage(self) -> float:
        """Part of the measurements that lie within their intervals."""
        return self.num_inside / len(self.errors)

    @cached_property
    def width(self) -> float:
        """Median width of the intervals, high over low."""
        return statistics.median(self.widths)


def scores(outcomes: Iterable[Outcome]) -> list[Score]:
    """Return the score of every group, of rows that have a measurement and no flag, in the order of their first rows."""
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for row, outcome in outcomes:
        if row.is_counted and row.measured is not None:
            groups[row.group].append((row, outcome))
    return [_score(name, members) for name, members in groups.items()]


def total(by_group: Iterable[Score]) -> Score:
    """Return the score of all groups' rows together."""
    members = list(by_group)
    return Score(
        "all",
        sum(score.num_rows for score in members),
        sum(score.num_blank for score in members),
        tuple(error for score in members for error in score.errors),
        sum(score.num_inside for score in members),
        tuple(width for score in members for width in score.widths),
    )


def _score(name: str, members: list[Outcome]) -> Score:
    pairs = [
        (row.measured, outcome)
        for row, outcome in members
        if isinstance(outcome, Forecast) and row.measured is not None
    ]
    return Score(
        name,
        len(members),
        len(members) - len(pairs),
        tuple(outcome.predicted / measured - 1 for measured, outcome in pairs),
        sum(outcome.low <= measured <= outcome.high for measured, outcome in pairs),
        tuple(outcome.high / outcome.low for _, outcome in pairs),
    )
