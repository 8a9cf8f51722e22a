"""Cells of the papers' tables, as they are printed: what claims quote and studies predict.

They ship as CSV files, a row a cell, with all that the table, its caption and the section on its set-up say of the cell: tables of
times, memory and volumes in ``data``; scores, shapes and figures of the text, which nobody predicts, in ``data/unpredicted``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources

from topology.errors import ZosimError
from topology.validation import did_you_mean
from zosim.applications.validation.rows import TableRow, read_table

REQUIRED = (
    "paper", "table", "model", "method", "gpus", "gpu_type", "batch_size", "seq_len", "precision", "quantity", "unit",
)  # fmt: skip
"""Columns without which a row says too little; `value` and `note` may be left out like any other."""


class PrintedError(ZosimError):
    """What is said of a printed table does not fit the table, or is no expression."""


@cache
def printed_rows() -> tuple[TableRow, ...]:
    """Return the cells that can be predicted: tables in the order of their files' names, cells as they are printed.

    >>> cell = next(row for row in printed_rows() if row["paper"] == "ZO2")
    >>> cell["model"], cell["method"], cell["precision"], cell["quantity"], cell["value"], cell["unit"]
    ('OPT-1.3B', 'MeZO', 'fp32', 'memory', '8898', 'MB')
    """
    return tuple(_rows_of("data"))


def _rows_of(folder: str) -> Iterator[TableRow]:
    with resources.as_file(resources.files("proofs_checks") / folder) as path:
        for table in sorted(path.glob("*.csv")):
            yield from read_table(table, REQUIRED)


@cache
def _tables() -> Mapping[str, tuple[TableRow, ...]]:
    found: dict[str, list[TableRow]] = {}
    for row in (*printed_rows(), *_rows_of("data/unpredicted")):
        found.setdefault(f"{row['paper']} {row['table']}", []).append(row)
    return {name: tuple(rows) for name, rows in found.items()}


def table_rows(table: str) -> tuple[TableRow, ...]:
    """Return the cells of a table, by paper and number: ``"ZO2 1"``. Wrong cells are planted here.

    Raises PrintedError if no such table ships.
    """
    if table not in _tables():
        raise PrintedError(f"unknown printed table {table!r}", hint=did_you_mean(table, list(_tables())))
    return _tables()[table]


def printed_table(
    columns: Mapping[str, Mapping[str, str]], row: str = "{model}"
) -> dict[str, dict[str, TableRow]]:
    """Return cells by row and column, rows as they are printed. A row that lacks one of the columns is left out.

    - `columns`: by the name of a column, what the fields of its cells hold; ``table`` is paper and number.
    - `row`: what a row is called: words with the names of fields in braces.

    Raises PrintedError if there is no such table or field, a column has no cell, or two of a row.

    ZO2's table 1 prints tokens/s; MeZO cannot run models above 13B.

    >>> speed = {"table": "ZO2 1", "precision": "fp16", "quantity": "throughput"}
    >>> cells = printed_table({"mezo": {**speed, "method": "MeZO"}, "zo2": {**speed, "method": "ZO2"}})
    >>> {model: (found["mezo"]["value"], found["zo2"]["value"]) for model, found in cells.items()}
    {'OPT-1.3B': ('6629', '6448'), 'OPT-2.7B': ('4229', '4220'), 'OPT-13B': ('1326', '1251')}
    """
    found: dict[str, dict[str, TableRow]] = {}
    for column, wanted in columns.items():
        fields = {name: value for name, value in wanted.items() if name != "table"}
        cells = table_rows(wanted.get("table", ""))
        for name in fields:
            if name not in cells[0].fields:
                raise PrintedError(
                    f"column {column} selects by {name!r}, but {wanted['table']} has no such field",
                    hint=did_you_mean(name, list(cells[0].fields)),
                )
        cells = tuple(cell for cell in cells if all(cell[name] == value for name, value in fields.items()))
        if not cells:
            reported = ", ".join(f"{name} {value!r}" for name, value in fields.items())
            raise PrintedError(f"column {column} matches no cell of {wanted['table']}: {reported}")
        for cell in cells:
            try:
                label = row.format_map(cell.fields)
            except (KeyError, ValueError, IndexError):
                raise PrintedError(f"row {row!r} must name fields in braces, such as {{model}}") from None
            numbers = found.setdefault(label, {})
            if column in numbers:
                raise PrintedError(
                    f"row {row!r} gives the name {label!r} to two cells of column {column}: {cell.where}"
                )
            if cell["value"]:
                numbers[column] = cell
    return {label: numbers for label, numbers in found.items() if len(numbers) == len(columns)}
