"""The report: errors by split and predictor, constants, and the cells that are scored apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from costmodel.rates.profile import Bound
from costmodel.scoring import Row, Score, scores
from studies.against_print.intervals import Coverage
from studies.against_print.splits import OURS, SPLITS, SplitOutcome, outcomes
from studies.kept_results import commit
from studies.published.audit import AuditFinding, audit, set_apart
from studies.published.cells import Cell, cells_of, preset_machine
from studies.published.constants import PAPERS
from studies.published.fitted_profile import known_cells, load_published_profile
from studies.published.rows import shipped_rows
from zosim.analysis.scoreboard import score_table
from zosim.lowering import lower
from zosim.report import Report, Table
from zosim.simulators.closed_form import step_time_bound

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


_HEAD = """Commit `{commit}`. Made by `python -m studies.against_print` from the rows that ship with the project.

Constants are fitted to printed rows through the closed form of the simulator. The plan of each row is lowered to a
program on the preset hardware. Its work is that of the papers' code (`zosim/applications/published_code.py`). The fit changes
only the constants listed below.

Rows are kept back by setting: all methods of one model, batch, sequence and precision
at once, in all tables. Or by model: all rows of one that lies between others. For every left-out
figure, the constants are fitted anew without those rows. Errors are absolute, in percent.

Cells that the audit sets apart are fitted like all others, under a loss that gives up on outliers. They are not in the figures; the last column of the
table has them."""

_ERRORS = """Leaving out the smallest or the largest model asks for extrapolation; "between" are the figures
without those two. The rank correlation is Spearman's, of the methods in a printed row, as a mean over rows. A row counts if four or more of its cells
are not set apart. What print does not tell apart counts as in the predicted order. In brackets: all cells
in, and equal numbers share the mean of their ranks."""


def written() -> str:
    """Return the report."""
    rows = shipped_rows()
    cells, _, _ = cells_of(rows)
    findings = audit(rows)
    all_outcomes: list[SplitOutcome] = []
    for split in SPLITS:
        mine = [cell for cell in known_cells(cells, split.paper, split.domain) if cell.value is not None]
        all_outcomes += outcomes(split, mine, findings)
    return Report(
        "Predictions against print: ZO2 and DistZO2",
        _HEAD.format(commit=commit()),
        Report("Errors", _ERRORS, _errors(all_outcomes), _misses(all_outcomes)),
        Report(
            "Constants",
            "Every number chosen after seeing a result row. Intervals are 95 %.",
            *_constants(),
            CHOICES,
        ),
        _coverage(all_outcomes),
        sheets_section(sheet_rows(cells, findings)),
        findings_table("Cells that cannot be right, or cannot all be", findings),
    ).to_markdown()


def _errors(results: Sequence[SplitOutcome]) -> Table:
    named = {item.score.name: item for item in results}
    goals = {
        name: item.split.goal
        for name, item in named.items()
        if item.predictor == OURS and item.split.goal is not None
    }
    more = {
        "between: median / p90 %": {
            name: f"{100 * item.inner.median:.2f} / {100 * item.inner.p90:.2f}"
            for name, item in named.items()
            if item.inner.errors
        },
        "rank correlation": {
            name: f"{item.rank_correlation:.2f} ({item.strict_correlation:.2f})"
            for name, item in named.items()
            if not math.isnan(item.rank_correlation)
        },
        "median of those apart %": {
            name: f"{100 * item.apart.median:.1f} ({len(item.apart.errors)})"
            for name, item in named.items()
            if item.apart.errors
        },
    }
    scored = [item.score for item in results]
    return score_table(scored, "split; predictor", goals=goals, more=more, digits=2)


def _misses(results: Sequence[SplitOutcome]) -> str:
    missed = [item.split.name for item in results if item.predictor == OURS and not item.meets_goal]
    return "Goals missed: " + ("; ".join(missed) if missed else "none") + "."


def _constants() -> Iterator[Table]:
    for fit in load_published_profile().fits:
        title = f"{fit.paper}, {fit.domain}: {len(fit.constants)} constants, {fit.num_cells} cells"
        yield constants_table(
            fit.constants, title, {"identified by": lambda constant: constant.identified_by}
        )


def constants_table(
    constants: Iterable[Any], title: str | None = None, more: dict[str, Callable[[Any], str]] | None = None
) -> Table:
    """Return fitted constants with their intervals, units and meanings, and `more` columns by heading."""
    columns: dict[str, Callable[[Any], str]] = {
        "constant": lambda constant: constant.name,
        "value": lambda constant: f"{constant.value:.4g}",
        "interval": lambda constant: f"{constant.low:.4g} to {constant.high:.4g}",
        "unit": lambda constant: constant.unit,
        "meaning": lambda constant: constant.meaning,
    }
    return Table.of(constants, columns | (more or {}), title=title, numeric=("value",))


CHOICES = """Choices that are no numbers, made after seeing rows, each with its reason in the code:

- ZO2's OPT rows store attention scores (`eager`). Qwen3's and DistZO2's rows do not (`sdpa`, masked half skipped).
- DistZO2's rows on four GPUs at sequences other than 2048 do not hide their uploads.
- ZO2's updates have weight decay, which leaves four copies of a tensor alive. DistZO2's have none.
- Float32 products of hidden sizes between 5120 and 9216 run at a rate between the two that are fitted. No row says where
  between them the slower rate of the widest models begins.
- OPT's code of ZO2's time keeps keys and values in MeZO's forwards, and logits in half precision. Later code does not.
- Rows of Qwen3 under ZO2 keep no second copy of the logits.
- A communicator for each axis of a mesh of two axes, and two more."""


def _coverage(results: Sequence[SplitOutcome]) -> Report:
    columns: dict[str, Callable[[tuple[SplitOutcome, Coverage]], str]] = {
        "split": lambda item: item[0].split.name,
        "cells": lambda item: f"{item[1].num_cells}",
        "within": lambda item: f"{item[1].cells:.0%}",
        "configurations": lambda item: f"{item[1].num_configurations}",
        "of these within": lambda item: f"{item[1].configurations:.0%}",
        "band": lambda item: f"{item[1].band[0]:.0%} to {item[1].band[1]:.0%}",
        "in band": lambda item: "yes" if item[1].is_in_band else "no",
        "width": lambda item: f"{item[1].width:.0%}",
    }
    rows = [(item, item.coverage) for item in results if item.coverage is not None]
    numeric = [name for name in columns if name not in ("split", "band", "in band")]
    return Report("Intervals", _INTERVALS, Table.of(rows, columns, numeric=numeric))


_INTERVALS = """Intervals are conformal by group of cells. The half width in logs covers nine tenths of the residuals of left-out settings (the
`⌈0.9 (n + 1)⌉`-th smallest). The uncertainty of the constants is added in quadrature, and so is the open rate of float32 products of
hidden sizes between 5120 and 9216. Below, half widths come from
other settings (or models) than the one in question, and for the extrapolations from known rows alone.

The band is where 95 % of outcomes lie if configurations held with probability 0.9 each. Methods of one configuration hold or fail
together, so it counts configurations. Width: median of high over low, minus 1."""


def findings_table(title: str, findings: Sequence[AuditFinding]) -> Report:
    """Return the audit as a section with that title."""
    columns: dict[str, Callable[[AuditFinding], str]] = {
        "what": lambda finding: finding.rule,
        "cells": lambda finding: "; ".join(finding.places),
        "apart": lambda finding: "yes" if finding.sets_apart else "no",
        "arithmetic": lambda finding: finding.arithmetic,
    }
    return Report(title, Table.of(findings, columns, numeric=()))
