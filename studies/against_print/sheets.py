"""Predictions from data sheets alone: the hardware presets with nothing fitted, held against printed throughputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from costmodel.rates.profile import Bound
from studies.published.audit import set_apart
from studies.published.cells import Cell, preset_machine
from studies.published.constants import PAPERS
from studies.published.findings import AuditFinding
from zosim.applications.closed_form.recurrence import step_time_bound
from zosim.lowering import lower
from zosim.report import Report, Table

GOAL = 25.0
"""Median absolute error in percent."""

_BOUNDS: tuple[Bound, ...] = ("central", "high", "low")


@dataclass(frozen=True)
class SheetOutcome:
    """What data sheets say about one cell.

    Attributes
    ----------
    group : str
        Kind of cell.
    printed : float
        Tokens/s.
    predicted, low, high : float
        Of the program with the works of the papers' code, with every constant in its middle, or at the end of its
        interval that makes the step longest, or shortest.
    planned : float
        Of the program that ``zosim plan`` would run.
    """

    group: str
    printed: float
    predicted: float
    low: float
    high: float
    planned: float


def sheet_outcomes(cells: Sequence[Cell], findings: Sequence[AuditFinding]) -> list[SheetOutcome]:
    """Return what data sheets say about the throughputs among `cells` that are not set apart."""
    apart = set_apart(findings)
    return [
        _outcome(cell)
        for cell in cells
        if cell.value is not None and cell.row.kind == "throughput" and cell.row.place not in apart
    ]


def _outcome(cell: Cell) -> SheetOutcome:
    machine = preset_machine(cell.case.preset, cell.case.plan.placement.devices)
    predicted, low, high = (cell.amount / step_time_bound(cell.program, machine, bound) for bound in _BOUNDS)
    planned = cell.amount / step_time_bound(lower(cell.case.plan), machine)
    return SheetOutcome(cell.group, cell.printed, predicted, low, high, planned)


def sheets_section(outcomes: Sequence[SheetOutcome]) -> Report:
    """Return the report's section on them."""
    words = f"""No constant is fitted: the machine is the preset's data sheet, with the fractions of peaks that
`costmodel/devices/datasheet.py` states, as for a machine that nobody has measured. The programs have the works of the
papers' code; the last two columns are of the programs that `zosim plan` would run instead. What was chosen after
seeing rows without being a number (listed above) is kept. Goal: a median of at most {GOAL:g} %. The interval has every
constant at the same end of its own, so it is wide, and meant to hold."""
    columns = ("cells", "count", "median", "90 %", "signed median", "interval holds", "high / low, median")
    planned = ("planned: median", "planned: 90 %")
    return Report(
        "With data sheets alone",
        words,
        Table((*columns, *planned), _rows(outcomes), numeric=(*columns[1:], *planned)),
    )


def _rows(outcomes: Sequence[SheetOutcome]) -> Iterator[tuple[str, ...]]:
    for paper in PAPERS:
        mine = [item for item in outcomes if item.group.split()[0] == paper]
        yield _row(f"**{paper} throughput**", mine)
        for group in sorted({item.group for item in mine}):
            yield _row(group, [item for item in mine if item.group == group])
    yield _row("**both**", outcomes)


def _row(name: str, items: Sequence[SheetOutcome]) -> tuple[str, ...]:
    printed = np.array([item.printed for item in items])
    errors = 100 * (np.array([item.predicted for item in items]) / printed - 1)
    planned = 100 * np.abs(np.array([item.planned for item in items]) / printed - 1)
    holds = np.mean([item.low <= item.printed <= item.high for item in items])
    width = np.median([item.high / item.low for item in items])
    size = np.abs(errors)
    mine = (f"{np.median(size):.1f}", f"{np.percentile(size, 90):.1f}", f"{np.median(errors):+.1f}")
    interval = (f"{100 * holds:.0f} %", f"{width:.2f}")
    return (
        name,
        f"{len(items)}",
        *mine,
        *interval,
        f"{np.median(planned):.1f}",
        f"{np.percentile(planned, 90):.1f}",
    )
