"""Rows of predicted against measured as people read them: a table of scores, a table of rows, and both as data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from costmodel.scoring import Row, Score
from zosim.report import Table

Item = TypeVar("Item")

SCORE_COLUMNS = ("rows", "blank", "median %", "p90 %", "signed %", "inside", "high/low")
_GOAL_COLUMNS = ("goal", "met")

_UNITS: Mapping[str, tuple[float, str, str]] = {"s": (1e3, "ms", ".1f"), "bytes": (2**-20, "MiB", ".2f")}
"""By the end of a quantity's name: what it is multiplied by, the unit that comes of it, and how it is written."""


def _unit_of(what: str) -> tuple[float, str, str]:
    """Return what a quantity is multiplied by, its unit and how it is written; a rate, or an unknown unit, is shown as it is."""
    amount, per, time = what.rpartition("_per_")
    unit = what.rpartition("_")[2]
    return (
        (1.0, f"{amount.rpartition('_')[2]}/{time}", ".4g") if per else _UNITS.get(unit, (1.0, unit, ".4g"))
    )


def score_table(
    scores: Iterable[Score],
    head: str = "group",
    *,
    goals: Mapping[str, tuple[float, float]] | None = None,
    more: Mapping[str, Mapping[str, str]] | None = None,
    digits: int = 1,
    title: str | None = None,
) -> Table:
    """Return errors in percent, a line for each score.

    - `head`: heading of their names.
    - `goals`: largest median and 90th percentile that are aimed at, by the name of the score; with it come two columns that say
      which were met.
    - `more`: further columns: by heading, a text for each name of a score.
    - `digits`: behind the point.
    """
    others = more or {}
    columns = (head, *SCORE_COLUMNS, *(() if goals is None else _GOAL_COLUMNS), *others)
    lines = [
        (
            score.name,
            *_cells(score, digits),
            *(() if goals is None else _goal(score, goals)),
            *(texts.get(score.name, "") for texts in others.values()),
        )
        for score in scores
    ]
    return Table(columns, lines, numeric=(*SCORE_COLUMNS, *others), title=title)


def _cells(score: Score, digits: int) -> tuple[str, ...]:
    counts = (str(score.num_rows), str(score.num_blank))
    if not score.errors:
        return (*counts, *("",) * (len(SCORE_COLUMNS) - len(counts)))
    errors = (f"{100 * score.median:.{digits}f}", f"{100 * score.p90:.{digits}f}")
    signed = f"{100 * score.signed:+.{digits}f}"
    inside = (f"{100 * score.coverage:.0f} %", f"{score.width:.2f}") if score.widths else ("", "")
    return (*counts, *errors, signed, *inside)


def _goal(score: Score, goals: Mapping[str, tuple[float, float]]) -> tuple[str, str]:
    goal = goals.get(score.name)
    if goal is None or not score.errors:
        return "", ""
    return f"{100 * goal[0]:g} / {100 * goal[1]:g}", "yes" if score.meets(goal) else "no"


def score_data(score: Score) -> dict[str, Any]:
    """Return a score as JSON has it; a group without predictions has counts alone."""
    known: dict[str, Any] = {"group": score.name, "rows": score.num_rows, "blank": score.num_blank}
    if score.errors:
        known |= {"median": score.median, "p90": score.p90, "signed": score.signed}
    if score.widths:
        known |= {"coverage": score.coverage, "width": score.width}
    return known


def rows_table(
    items: Iterable[Item],
    more: Mapping[str, Callable[[Item], str]] | None = None,
    *,
    row_of: Callable[[Item], Row] = lambda item: item,  # type: ignore[assignment,return-value]
    title: str | None = None,
) -> Table:
    """Return rows of one quantity, the largest errors first, and `more` columns by heading.

    - `items`: rows, or what `row_of` makes a row of.
    - `more`: of an item, what stands in a further column.

    >>> rows = [Row("a", "step_s", 0.01, 0.011, 0.009, 0.012), Row("b", "step_s", 0.02, 0.03)]
    >>> print(rows_table(rows).to_markdown())
    | case | predicted (ms) | interval | measured (ms) | error |
    | --- | ---: | ---: | ---: | ---: |
    | b | 30.0 |  | 20.0 | +50.0% |
    | a | 11.0 | 9.0–12.0 | 10.0 | +10.0% |
    """
    pairs = sorted(((row_of(item), item) for item in items), key=lambda pair: -abs(pair[0].error or 0.0))
    factor, unit, format_spec = _unit_of(pairs[0][0].what) if pairs else (1.0, "", "")

    def shown(number: float | None) -> str:
        return "" if number is None else format(factor * number, format_spec)

    columns: dict[str, Callable[[Row], str]] = {
        "case": lambda row: row.case,
        f"predicted ({unit})": lambda row: shown(row.predicted),
        "interval": lambda row: "" if row.low is None else f"{shown(row.low)}–{shown(row.high)}",
        f"measured ({unit})": lambda row: shown(row.measured),
        "error": lambda row: "" if row.error is None else f"{row.error:+.1%}",
    }
    others = more or {}
    lines = [
        (*(cell(row) for cell in columns.values()), *(cell(item) for cell in others.values()))
        for row, item in pairs
    ]
    return Table((*columns, *others), lines, numeric=(*list(columns)[1:], *others), title=title)
