"""Results of a sweep in SQLite: one process writes, and what it has committed survives its death."""

from __future__ import annotations

import csv
import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from topology.errors import ZosimError
from zosim.applications.validation.rows import RowsError

Outcome = Mapping[str, Any] | str
"""The figures of a configuration, or the error that ended it."""

WORKER_DIED = "WorkerDied"
"""Begins the error of a configuration whose process was killed each time; such a row is tried again."""

_APPLICATION, _VERSION = 0x7A6F7377, 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS results (
    key TEXT PRIMARY KEY,   -- hash of the canonical inputs and of the code's version
    inputs TEXT NOT NULL,   -- JSON: the row as it was written
    result TEXT,            -- JSON: its figures
    error TEXT              -- in place of a result
) WITHOUT ROWID
"""


class ResultRow(NamedTuple):
    """A row of the table."""

    key: str
    inputs: Mapping[str, Any]
    outcome: Outcome


class Results:
    """The database of a sweep, open for its only writer; used as a context manager.

    `path`: created if there is none.

    Raises RowsError if the file is something else, or another process writes to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_open = False
        try:
            self._database = sqlite3.connect(path, isolation_level=None, timeout=0)
            # The lock goes with the process, however that ends. A journal, and no write-ahead log, works on shared file systems, too.
            self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._database.execute("BEGIN IMMEDIATE")
            self._check()
            self._database.execute("COMMIT")
        except sqlite3.DatabaseError as error:
            raise _refusal(path, error) from None

    def _check(self) -> None:
        (application,) = self._database.execute("PRAGMA application_id").fetchone()
        (num_tables,) = self._database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        (version,) = self._database.execute("PRAGMA user_version").fetchone()
        if (num_tables and application != _APPLICATION) or version not in (0, _VERSION):
            raise RowsError(f"{self.path} holds no results of a sweep", hint="choose another --output")
        self._database.execute(f"PRAGMA application_id = {_APPLICATION}")
        self._database.execute(f"PRAGMA user_version = {_VERSION}")
        self._database.execute(_SCHEMA)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.commit()
        self._database.close()

    def __contains__(self, key: str) -> bool:
        return self._database.execute("SELECT 1 FROM results WHERE key = ?", (key,)).fetchone() is not None

    def add(self, key: str, inputs: Mapping[str, Any], outcome: Outcome) -> None:
        """Append a row, which :meth:`commit` makes lasting.

        Raises RowsError if the machine's disk refuses.
        """
        is_error = isinstance(outcome, str)
        result = None if is_error else json.dumps(outcome, sort_keys=True)
        row = (key, json.dumps(inputs), result, outcome if is_error else None)
        try:
            if not self._is_open:
                self._database.execute("BEGIN")
                self._is_open = True
            self._database.execute("INSERT INTO results VALUES (?, ?, ?, ?)", row)
        except sqlite3.OperationalError as error:
            raise _refusal(self.path, error) from None

    def commit(self) -> None:
        """Make what was added last."""
        if self._is_open:
            try:
                self._database.execute("COMMIT")
            except sqlite3.OperationalError as error:
                raise _refusal(self.path, error) from None
            self._is_open = False

    def forget_died(self) -> None:
        """Remove the rows of configurations whose process was killed, so that they are tried again."""
        self._database.execute("DELETE FROM results WHERE error LIKE ?", (f"{WORKER_DIED}:%",))

    def merge(self, path: Path) -> int:
        """Add the rows of another database, all or none, and return how many there were that this one did not have.

        Raises RowsError if it cannot be read, or a row has the key of one of these and another result.
        """
        if not path.is_file():
            raise RowsError(f"no results at {path}", hint="name the output of another shard")
        self.commit()
        num_added = 0
        with Results(path) as others:
            self._database.execute("BEGIN")
            self._is_open = True
            try:
                for row in others.rows():
                    num_added += self._merge_row(row, path)
            except RowsError:
                self._database.execute("ROLLBACK")
                self._is_open = False
                raise
        self.commit()
        return num_added

    def _merge_row(self, row: ResultRow, path: Path) -> bool:
        known = self.get(row.key)
        if known is None:
            self.add(row.key, row.inputs, row.outcome)
            return True
        if known.outcome != row.outcome:
            raise RowsError(
                f"{path} and {self.path} have other results for the same inputs: "
                f"{_difference(known.outcome, row.outcome)} of {dict(row.inputs)} (key {row.key[:12]})",
                hint="one of them is damaged, or its machine computes otherwise; sweep that shard again",
            )
        return False

    def get(self, key: str) -> ResultRow | None:
        """Return the row of a key."""
        row = self._database.execute("SELECT * FROM results WHERE key = ?", (key,)).fetchone()
        return None if row is None else _row(row)

    def rows(self) -> Iterator[ResultRow]:
        """Yield all rows in the order of their keys, one at a time."""
        yield from map(_row, self._database.execute("SELECT * FROM results ORDER BY key"))


def _row(row: Sequence[Any]) -> ResultRow:
    key, inputs, result, error = row
    return ResultRow(key, json.loads(inputs), error if result is None else json.loads(result))


def _difference(first: Outcome, second: Outcome) -> str:
    """Return the first figure in which two outcomes differ."""
    if isinstance(first, str) or isinstance(second, str):
        return f"{first!r} and {second!r}"
    name = next(name for name in {**first, **second} if first.get(name) != second.get(name))
    return f"{name} {first.get(name)!r} and {second.get(name)!r}"


def write_csv(path: Path, rows: Callable[[], Iterator[ResultRow]]) -> None:
    """Write rows as a CSV file: inputs, figures, and the error. They are listed twice, as the first pass finds the columns."""
    inputs: dict[str, None] = {}
    figures: dict[str, None] = {}
    for row in rows():
        inputs |= dict.fromkeys(row.inputs)
        figures |= dict.fromkeys({} if isinstance(row.outcome, str) else row.outcome)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*inputs, *figures, "error"])
        for row in rows():
            values, error = ({}, row.outcome) if isinstance(row.outcome, str) else (row.outcome, "")
            writer.writerow([*map(row.inputs.get, inputs), *map(values.get, figures), error])


def _refusal(path: Path, error: sqlite3.Error) -> ZosimError:
    if getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return RowsError(
            f"another process writes to {path}", hint="wait for its end, or give each shard its own --output"
        )
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_NOTADB:
        return RowsError(f"{path} holds no results of a sweep", hint="choose another --output")
    return RowsError(f"{path}: {error}", hint="choose another --output, or free some space")
