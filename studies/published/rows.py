"""Cells of published tables: the rows that ship, rows that a user brings, and what makes two of them one measurement.

A row is one printed cell with everything that its table, caption and set-up section say about it. Papers print many
measurements several times; whoever splits rows into known and unknown ones must do it by :attr:`PublishedRow.setting`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from proofs_checks.printed.cells import REQUIRED, printed_rows
from zosim.applications.validation.rows import RowsError, TableRow, read_table, write_table

__all__ = ["PublishedRow", "RowsError", "read_rows", "shipped_rows", "write_rows"]

QUANTITIES = ("throughput", "memory", "memory_per_gpu", "upload_rate", "offload_rate")
"""What can be predicted."""

OUT_OF_MEMORY = "OOM"
"""What the note of a cell says that was printed as a failure to fit."""

NO_VALUE = ("", "-", "\N{EN DASH}", "\N{EM DASH}", OUT_OF_MEMORY, "N/A")
"""What stands in upper case where a table prints no number."""

LARGEST_COUNT = 10**9
"""Above any number of GPUs, rows of a batch or tokens that a table prints."""


class PublishedRow(TableRow):
    """One printed cell."""

    def count(self, column: str, below: int = LARGEST_COUNT) -> int:
        """Return a whole number above 0 and below :data:`LARGEST_COUNT`."""
        return super().count(column, below)

    @cached_property
    def value(self) -> float | None:
        """The printed number; None where nothing is printed. Raises RowsError if the column holds no number above 0."""
        return None if self["value"].upper() in NO_VALUE else self.number("value")

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

    Raises RowsError if the file cannot be read, or lacks a column.
    """
    return [PublishedRow(row.fields, row.where) for row in read_table(path, REQUIRED)]


def shipped_rows(paper: str | None = None) -> list[PublishedRow]:
    """Return the rows that ship with the project, of one paper or of all, tables in order."""
    return [
        PublishedRow(row.fields, row.where)
        for row in printed_rows()
        if paper is None or row["paper"] == paper
    ]


def write_rows(path: str | Path, rows: Sequence[PublishedRow], added: Sequence[Mapping[str, str]]) -> None:
    """Write `rows` with the columns of `added` behind their own, in the same order.

    Raises RowsError if the file cannot be written.
    """
    write_table(path, rows, added, REQUIRED)
