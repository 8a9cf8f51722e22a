"""Claims about printed tables as rows: which cells, what is asserted of them, and wrong cells that must be noticed.

An entry of a page's front matter says in ``cells`` which tables it reads, and in ``checks`` what comes out (see ``docs/reference/claims.md``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from proofs_checks.claims import Check, Role
from proofs_checks.outcomes import Context, Outcome, everything_holds
from proofs_checks.planting import Fault
from proofs_checks.printed.cells import PrintedError, printed_table, table_rows
from proofs_checks.printed.expressions import Figures, judged
from topology.validation import did_you_mean
from zosim.applications.validation.rows import TableRow


@dataclass(frozen=True)
class _Selection:
    """Columns of a table, or of several, that have their rows in common."""

    row: str  # what a row is called, with the names of fields in braces
    columns: Mapping[str, Mapping[str, str]]  # what the fields of a column's cells hold
    reads: Mapping[str, str]  # which field is read of them

    @classmethod
    def of(cls, reported: Any) -> _Selection:
        """Read an entry of ``cells``."""
        if (
            not isinstance(reported, dict)
            or not isinstance(columns := reported.get("columns"), dict)
            or not columns
        ):
            raise PrintedError(f"an entry of cells must have a table and columns, not {reported!r}")
        common = {key: str(value) for key, value in reported.items() if key not in ("row", "columns")}
        found, reads = {}, {}
        for name, own in ((str(name), own) for name, own in columns.items()):
            fields = {"method": own} if isinstance(own, str) else own
            if not isinstance(fields, dict):
                raise PrintedError(f"column {name} must be a method or a mapping of fields, not {own!r}")
            found[name] = common | {key: str(value) for key, value in fields.items()}
            reads[name] = found[name].pop("read", "value")
        return cls(str(reported.get("row", "{model}")), found, reads)

    def cells(self) -> dict[str, dict[str, TableRow]]:
        """Return the cells, by row and column."""
        found = printed_table(self.columns, self.row)
        if not found:
            raise PrintedError(f"no row has all columns: {', '.join(self.columns)}")
        return found

    def figures(self) -> dict[str, Figures]:
        """Return each column; a count beside the cell, such as its GPUs, is not rounded."""
        cells = self.cells()
        rows, found = tuple(cells), {}
        for name, field in self.reads.items():
            try:
                figures = Figures.rounded([cells[row][name][field] for row in rows], rows)
            except PrintedError as error:
                raise PrintedError(f"{field!r} of column {name}: {error.message}") from None
            exact = replace(figures, numbers=figures.numbers[[0, 0, 0]])
            found[name] = figures if field == "value" else exact
        return found


def checks_of(entry: Mapping[str, Any]) -> tuple[Check, ...]:
    """Return the checks that an entry states as rows; none where it has no ``checks``.

    Raises PrintedError if a table, a field, a column, a row or a form of an expression is unknown.
    """
    selections = tuple(_Selection.of(reported) for reported in entry.get("cells", ()))
    names = [name for selection in selections for name in selection.columns]
    if len(names) > len(set(names)):
        raise PrintedError(f"column names must differ: {', '.join(names)}")
    return tuple(_check(reported, selections) for reported in entry.get("checks", ()))


def _check(reported: Any, selections: tuple[_Selection, ...]) -> Check:
    row = _fields(reported, "a check", ("role", "title", "asserts"), ("faults",))
    roles = {role.name.lower(): role for role in Role}
    if (role := str(row["role"])) not in roles:
        raise PrintedError(f"unknown role {role!r}", hint=did_you_mean(role, list(roles)))
    if not isinstance(row["asserts"], list) or not row["asserts"]:
        raise PrintedError(f"asserts must be a list of comparisons, not {row['asserts']!r}")
    measure = partial(_measured, selections, tuple(map(str, row["asserts"])))
    measure(Context())  # names what is malformed while the page is read
    faults = tuple(_fault(each, selections) for each in row.get("faults", ()))
    return Check(roles[role], measure, faults, str(row["title"]))


def _measured(selections: tuple[_Selection, ...], asserts: tuple[str, ...], _context: Context) -> Outcome:
    columns = {name: figures for each in selections for name, figures in each.figures().items()}
    outcomes = {name: so for text in asserts for name, so in judged(text, columns).items()}
    return everything_holds(outcomes)


@dataclass(frozen=True)
class WrongCell:
    """A change of :func:`~proofs_checks.printed.cells.table_rows` in which one field of a cell holds something else."""

    where: str
    field: str
    value: str

    def __call__(self, shipped: Any, table: str) -> tuple[TableRow, ...]:
        """Return the rows of a table, one of them wrong."""
        wrong = {self.field: self.value}
        return tuple(
            replace(row, fields={**row.fields, **wrong}) if row.where == self.where else row
            for row in shipped(table)
        )


def wrong_cell(name: str, cell: TableRow, value: str, field: str = "value") -> Fault:
    """Return the fault of a printed cell that holds something else. Raises PrintedError if it holds that already."""
    if cell[field] == value:
        raise PrintedError(f"fault {name!r} changes nothing: {field} is {value} in {cell.where} already")
    words = f"{name} ({cell['paper']} {cell['table']}, {cell['cell']}: {value} for {cell[field]})"
    return Fault(words, f"{table_rows.__module__}:{table_rows.__name__}", WrongCell(cell.where, field, value))


def _fault(reported: Any, selections: tuple[_Selection, ...]) -> Fault:
    row = _fields(reported, "a fault", ("name", "column", "row", "value"))
    column, label = str(row["column"]), str(row["row"])
    for selection in selections:
        if column in selection.columns:
            cells = selection.cells()
            if label not in cells:
                raise PrintedError(
                    f"fault {row['name']!r}: unknown row {label!r}",
                    hint=did_you_mean(label, list(cells)),
                )
            cell, field = cells[label][column], selection.reads[column]
            return wrong_cell(row["name"], cell, _written(row["value"], cell[field]), field)
    raise PrintedError(f"fault {row['name']!r}: unknown column {column!r}")


def _written(value: Any, like: str) -> str:
    """Return a wrong value with the places of the cell: YAML forgets the last 0 of 0.570."""
    places = len(like.partition(".")[2])
    padded = f"{value:.{places}f}" if isinstance(value, float) else ""
    return padded if padded and float(padded) == value else str(value)


def _fields(
    reported: Any, what: str, needed: tuple[str, ...], others: tuple[str, ...] = ()
) -> Mapping[str, Any]:
    """Return a row of the front matter whose keys are these."""
    if not isinstance(reported, dict) or not set(needed) <= set(reported) <= {*needed, *others}:
        raise PrintedError(
            f"{what} must have the keys {', '.join(needed)}"
            + (f" and may have {', '.join(others)}" if others else "")
            + f", not {reported!r}"
        )
    return reported
