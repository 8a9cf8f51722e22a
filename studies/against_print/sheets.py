"""Predictions from data sheets alone: the hardware presets with nothing fitted, held against printed throughputs."""

from __future__ import annotations

from collections.abc import Sequence

from costmodel.rates.profile import Bound
from costmodel.scoring import Row, Score, scores
from studies.published.audit import set_apart
from studies.published.cells import Cell, preset_machine
from studies.published.constants import PAPERS
from studies.published.findings import AuditFinding
from zosim.analysis.scoreboard import score_table
from zosim.applications.closed_form import step_time_bound
from zosim.lowering import lower
from zosim.report import Report

GOAL = 25.0
"""Median absolute error in percent."""

_BOUNDS: tuple[Bound, ...] = ("central", "high", "low")


_PLANNED = "planned_tokens_per_s"


def sheet_rows(cells: Sequence[Cell], findings: Sequence[AuditFinding]) -> list[Row]:
    """Return what data sheets say about the throughputs among `cells` that are not set apart, two rows for each.

    Of the program with the works of the papers' code, with every constant in its middle, or at the end of its interval that
    makes the step longest, or shortest; and of the program that ``zosim plan`` would run.
    """
    apart = set_apart(findings)
    return [
        row
        for cell in cells
        if cell.value is not None and cell.row.kind == "throughput" and cell.row.place not in apart
        for row in _rows_of(cell)
    ]


def _rows_of(cell: Cell) -> tuple[Row, Row]:
    machine = preset_machine(cell.case.preset, cell.case.plan.placement.devices)
    predicted, low, high = (cell.amount / step_time_bound(cell.program, machine, bound) for bound in _BOUNDS)
    planned = cell.amount / step_time_bound(lower(cell.case.plan), machine)
    place, group = cell.row.place, cell.group
    return (
        Row(place, "tokens_per_s", cell.printed, predicted, low, high, group=group),
        Row(place, _PLANNED, cell.printed, planned, group=group),
    )


def sheets_section(rows: Sequence[Row]) -> Report:
    """Return the report's section on them."""
    words = f"""No constant is fitted: the machine is the preset's data sheet, with the fractions of peaks that
`costmodel/devices/datasheet.py` states, as for a machine that nobody has measured. The programs have the works of the
papers' code; the last two columns are of the programs that `zosim plan` would run instead. What was chosen after
seeing rows without being a number (listed above) is kept. Goal: a median of at most {GOAL:g} %. The interval has every
constant at the same end of its own, so it is wide, and meant to hold."""
    ours, planned = (
        _scores([row for row in rows if (row.what == _PLANNED) is is_planned]) for is_planned in (False, True)
    )
    more = {
        "planned: median %": {score.name: f"{100 * score.median:.1f}" for score in planned if score.errors},
        "planned: p90 %": {score.name: f"{100 * score.p90:.1f}" for score in planned if score.errors},
    }
    return Report("With data sheets alone", words, score_table(ours, "cells", more=more))


def _scores(rows: Sequence[Row]) -> list[Score]:
    found = []
    for paper in PAPERS:
        mine = sorted((row for row in rows if row.group.split()[0] == paper), key=lambda row: row.group)
        found += [Score.of(mine, f"**{paper} throughput**"), *scores(mine)]
    return [*found, Score.of(rows, "**both**")]
