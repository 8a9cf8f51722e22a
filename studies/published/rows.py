"""Cells of published tables: the rows that ship, rows that a user brings, and what makes two of them one measurement.

A row is one printed cell with everything that its table, caption and set-up section say about it. Papers print many
measurements several times; whoever splits rows into known and unknown ones must do it by :attr:`PublishedRow.setting`.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType

from topology.errors import ZosimError

REQUIRED = (
    "paper", "table", "model", "method", "gpus", "gpu_type", "batch_size", "seq_len", "precision", "quantity", "unit",
)  # fmt: skip
"""Columns without which a row says too little; `value` and `note` may be left out like any other."""

QUANTITIES = ("throughput", "memory", "memory_per_gpu", "upload_rate", "offload_rate")
"""What can be predicted."""

OUT_OF_MEMORY = "OOM"
"""What the note of a cell says that was printed as a failure to fit."""

NO_VALUE = ("", "-", "\N{EN DASH}", "\N{EM DASH}", OUT_OF_MEMORY, "N/A")
"""What stands in upper case where a table prints no number."""

_SURPLUS = "surplus"
"""Column that holds what a line has more of than the header."""


LARGEST_COUNT = 10**9
"""Above any number of GPUs, rows of a batch or tokens that a table prints."""


class RowsError(ZosimError):
    """Published rows that cannot be read, understood or written."""


@dataclass(frozen=True)
class PublishedRow:
    """One printed cell.

    Attributes
    ----------
    fields : mapping of str to str
        The row as it was read, every column of it.
    where : str
        File and line, for messages.
    """

    fields: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    where: str = ""

    def __getitem__(self, column: str) -> str:
        return self.fields.get(column, "").strip()

    def count(self, column: str) -> int:
        """Return a whole number above 0 and below :data:`LARGEST_COUNT`.

        Raises
        ------
        RowsError
            If the column holds something else.
        """
        text = self[column]
        if not text.isdecimal() or not 0 < (number := int(text[:12])) < LARGEST_COUNT:
            raise RowsError(f"{self.where}: {column} is {text!r}", hint="write a whole number above 0")
        return number

    @cached_property
    def value(self) -> float | None:
        """The printed number; None where nothing is printed.

        Raises
        ------
        RowsError
            If the column holds no number above 0.
        """
        text = self["value"]
        if text.upper() in NO_VALUE:
            return None
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if not 0 < number < float("inf"):
            raise RowsError(
                f"{self.where}: value is {text!r}", hint="write a number above 0, or leave it empty"
            )
        return number

    @property
    def is_out_of_memory(self) -> bool:
        """Whether the cell was printed as not fitting."""
        return self.value is None and OUT_OF_MEMORY in (self["note"] + self["value"]).upper()

    @property
    def is_predictable(self) -> bool:
        """Whether the quantity is one that can be predicted."""
        return self["quantity"] in QUANTITIES

    @property
    def kind(self) -> str:
        """``"throughput"``, ``"memory"`` or ``"transfer"``."""
        quantity = self["quantity"]
        return {"memory_per_gpu": "memory", "upload_rate": "transfer", "offload_rate": "transfer"}.get(
            quantity, quantity
        )

    @property
    def setting(self) -> tuple[str, ...]:
        """What all methods of one table row have in common: rows of equal setting are known or unknown together."""
        return tuple(self[name] for name in ("paper", "model", "batch_size", "seq_len", "precision"))

    @property
    def place(self) -> str:
        """Paper, table, cell."""
        return f"{self['paper']} Table {self['table']}, {self['cell'] or self['model']}"


def read_rows(path: str | Path) -> list[PublishedRow]:
    """Return the rows of a CSV file, in order. Empty lines are no rows.

    Raises
    ------
    RowsError
        If the file cannot be read, or lacks a column.
    """
    try:
        # Spreadsheets begin a file with a byte order mark.
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            lines = [(reader.line_num, line) for line in reader if line]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RowsError(f"the rows {path} cannot be read: {error}") from error
    columns = [name.strip() for name in lines[0][1]] if lines else []
    missing = [name for name in REQUIRED if name not in columns]
    if missing:
        raise RowsError(
            f"{path} lacks the columns {', '.join(missing)}", hint=f"columns needed are {', '.join(REQUIRED)}"
        )
    return [PublishedRow(_fields(columns, line), f"{path}, line {number}") for number, line in lines[1:]]


def _fields(columns: Sequence[str], line: Sequence[str]) -> Mapping[str, str]:
    fields = dict(zip_longest(columns, line[: len(columns)], fillvalue=""))
    if len(line) > len(columns):
        fields[_SURPLUS] = ",".join(line[len(columns) :])
    return MappingProxyType(fields)


def shipped_rows(paper: str | None = None) -> list[PublishedRow]:
    """Return the rows that ship with the project, of one paper or of all, tables in order."""
    folder = resources.files("studies.published") / "data"
    names = sorted(item.name for item in folder.iterdir() if item.name.endswith(".csv"))
    rows: list[PublishedRow] = []
    for name in names:
        with resources.as_file(folder / name) as path:
            rows += read_rows(path)
    return [row for row in rows if paper is None or row["paper"] == paper]


def write_rows(path: str | Path, rows: Sequence[PublishedRow], added: Sequence[Mapping[str, str]]) -> None:
    """Write `rows` with the columns of `added` behind their own, in the same order.

    Raises
    ------
    RowsError
        If the file cannot be written.
    """
    columns = _columns(row.fields for row in rows) or list(REQUIRED)
    more = [name for name in _columns(added) if name not in columns]
    try:
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(
                file, [*columns, *more], lineterminator="\n", restval="", extrasaction="ignore"
            )
            writer.writeheader()
            for row, extra in zip(rows, added, strict=True):
                writer.writerow({**row.fields, **extra})
    except OSError as error:
        raise RowsError(f"the predictions cannot be written to {path}: {error}") from error


def _columns(items: Iterable[Mapping[str, str]]) -> list[str]:
    names: dict[str, None] = {}
    for item in items:
        names.update(dict.fromkeys(item))
    return list(names)
