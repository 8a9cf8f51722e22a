"""Tables of measurements as CSV files: rows kept as they were read, checked where a number is asked for."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType

from topology.errors import ZosimError

SURPLUS = "surplus"
"""Column that holds what a line has more of than the header."""

LARGEST_COUNT = 10**18
"""Above any number of bytes, elements or tokens that is measured."""


class RowsError(ZosimError):
    """Rows of a table that cannot be read, understood or written."""


@dataclass(frozen=True)
class TableRow:
    """One row of a table."""

    fields: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    where: str = ""

    def __getitem__(self, column: str) -> str:
        return self.fields.get(column, "").strip()

    def count(self, column: str, below: int = LARGEST_COUNT) -> int:
        """Return a whole number above 0 and below `below`; spreadsheets write 8 as ``8.0`` and a million as ``1e6``.

        Raises
        ------
        RowsError
            If the column holds something else.
        """
        text = self[column]
        number = _whole(text)
        if not 0 < number < below:
            raise RowsError(f"{self.where}: {column} is {text!r}", hint="it must be a whole number above 0")
        return number

    def number(self, column: str, *, allows_zero: bool = False) -> float:
        """Return a finite number above 0, or 0 where that is allowed.

        Raises
        ------
        RowsError
            If the column holds something else.
        """
        text = self[column]
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if not 0 < number < float("inf") and not (allows_zero and number == 0):
            least = "0 or more" if allows_zero else "above 0"
            raise RowsError(
                f"{self.where}: {column} is {text!r}", hint=f"it must be a number {least}, or empty"
            )
        return number


def _whole(text: str) -> int:
    """Return the whole number that a cell holds, 0 if it holds none."""
    if not text.isascii() or len(text) > 20:
        return 0
    if text.isdecimal():
        return int(text)
    try:
        number = float(text)
    except ValueError:
        return 0
    return int(number) if number.is_integer() else 0


def read_table(path: str | Path, required: Sequence[str]) -> list[TableRow]:
    """Return the rows of a CSV file, as :func:`table_rows` yields them."""
    return list(table_rows(path, required))


def table_rows(path: str | Path, required: Sequence[str]) -> Iterator[TableRow]:
    """Yield the rows of a CSV file, in order. Empty lines are no rows.

    Raises
    ------
    RowsError
        If the file cannot be read, or lacks a column.
    """
    try:
        # Spreadsheets begin a file with a byte order mark.
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            columns = [name.strip() for name in next(filter(None, reader), [])]
            missing = [name for name in required if name not in columns]
            if missing:
                raise RowsError(
                    f"{path} lacks columns: {', '.join(missing)}",
                    hint=f"required columns: {', '.join(required)}",
                )
            for line in filter(None, reader):
                yield TableRow(_fields(columns, line), f"{path}, line {reader.line_num}")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RowsError(f"cannot read the rows {path}: {error}") from error


def _fields(columns: Sequence[str], line: Sequence[str]) -> Mapping[str, str]:
    fields = dict(zip_longest(columns, line[: len(columns)], fillvalue=""))
    if len(line) > len(columns):
        fields[SURPLUS] = ",".join(line[len(columns) :])
    return MappingProxyType(fields)


def write_table(
    path: str | Path,
    rows: Sequence[TableRow],
    added: Sequence[Mapping[str, str]],
    columns: Sequence[str] = (),
) -> None:
    """Write `rows` with the columns of `added` behind their own, in the same order.

    Parameters
    ----------
    columns : sequence of str
        Heads of a file without rows.

    Raises
    ------
    RowsError
        If the file cannot be written.
    """
    own = _columns(row.fields for row in rows) or list(columns)
    more = [name for name in _columns(added) if name not in own]
    try:
        # A reason can name a file whose name is not UTF-8.
        with Path(path).open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
            writer = csv.DictWriter(
                file, [*own, *more], lineterminator="\n", restval="", extrasaction="ignore"
            )
            writer.writeheader()
            for row, extra in zip(rows, added, strict=True):
                writer.writerow({**row.fields, **extra})
    except OSError as error:
        raise RowsError(f"cannot write the predictions to {path}: {error}") from error


def _columns(items: Iterable[Mapping[str, str]]) -> list[str]:
    names: dict[str, None] = {}
    for item in items:
        names.update(dict.fromkeys(item))
    return list(names)
