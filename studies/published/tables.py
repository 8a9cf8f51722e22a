"""Printed cells beside what is predicted for them: as rows of predicted against measured, and as the tables of a report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from costmodel.scoring import Row
from studies.published.audit import AuditFinding
from studies.published.predicting import CellPrediction
from studies.published.rows import PublishedRow
from zosim.report import Report, Table

Pair = tuple[PublishedRow, CellPrediction]

_HEADINGS = MappingProxyType(
    {
        "cell": "cell", "model": "model", "method": "method", "dataset": "data", "batch_size": "BS", "seq_len": "s",
        "precision": "format", "quantity": "what",
    }
)  # fmt: skip
"""Columns of the files of cells, and what tables of a report call them."""


def joined(row: PublishedRow, answer: CellPrediction, flag: str = "") -> Row:
    """Return a printed cell beside what is predicted for it, in the cell's unit."""
    return Row(
        case=row.place,
        what=row["quantity"],
        measured=row.value,
        predicted=answer.predicted,
        low=answer.low,
        high=answer.high,
        group=row["table"],
        flag=flag,
        provenance=answer.note,
    )


def rules_of(findings: Sequence[AuditFinding]) -> dict[str, str]:
    """Return why cells are set apart, by the place of each."""
    return {finding.places[0]: finding.rule for finding in findings if finding.sets_apart}


def tables_of(
    pairs: Sequence[Pair], columns: Sequence[str], rules: Mapping[str, str], *, digits: int = 4
) -> Iterator[Report]:
    """Yield a section for each printed table: published, predicted, 90 % interval, error and verdict of every cell.

    - `columns`: Columns of the file that say which cell it is.
    - `rules`: Of :func:`rules_of`.
    - `digits`: That are significant in predictions.
    """
    headings = [*(_HEADINGS[name] for name in columns), "published", "predicted", "90 %", "error", "verdict"]
    for number in dict.fromkeys(row["table"] for row, _ in pairs):
        lines = [
            (*(row[name] for name in columns), *_cells(row, answer, rules, digits))
            for row, answer in pairs
            if row["table"] == number
        ]
        shown = Table(headings, lines, numeric=("BS", "s", "published", "predicted", "error"))
        yield Report(f"Table {number}", shown)


def _cells(
    row: PublishedRow, answer: CellPrediction, rules: Mapping[str, str], digits: int
) -> tuple[str, ...]:
    # Of cells that hold a formula there is no number to compare.
    error = None if answer.predicted is None else joined(row, answer).error
    return (
        row["value"] or ("out of memory" if row.is_out_of_memory else ""),
        "" if answer.predicted is None else f"{answer.predicted:.{digits}g}",
        "" if answer.low is None else f"{answer.low:.{digits}g} to {answer.high:.{digits}g}",
        "" if error is None else f"{error:+.1%}",
        verdict(row, answer, rules),
    )


def verdict(row: PublishedRow, answer: CellPrediction, rules: Mapping[str, str]) -> str:
    """Return whether what is printed lies within what is predicted, or why that is not said; `rules` sets places apart."""
    if answer.note.startswith("formula"):
        return answer.note
    is_lacking = answer.note.startswith("out of memory")
    if row.is_out_of_memory:
        return "out of memory, as printed" if is_lacking else "printed as out of memory, predicted to fit"
    if row.place in rules:
        return f"apart: {rules[row.place]}"
    if answer.predicted is None:
        return f"not predicted: {answer.note}"
    if row.value is None or answer.low is None:
        return ""
    return "within" if joined(row, answer).is_inside else "outside"
