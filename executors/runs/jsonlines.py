"""Files of JSON lines that survive being killed at any byte.

A line counts once its newline is there. What a dead writer left after the last newline is no line: readers leave
it out, and whoever goes on writing cuts it off first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from executors.files import naming, open_own
from topology.errors import RunError
from topology.reading import parse_json, read_bytes
from topology.renamed import with_present_names

RENAMED: Mapping[str, str] = {"query": "perturbation"}
"""Keys that were renamed of the rows of a run's logs (:mod:`topology.renamed`)."""

MAX_LOG_BYTES = 4 * 2**30
"""A run of ten million steps has less."""

DAMAGED_LINE = "restore the file from a copy, or truncate it before that line and resume"
"""Hint about a line of a log that contradicts itself or the run."""


@dataclass(frozen=True)
class Line:
    """One complete line."""

    number: int  # from 1
    end: int  # byte after its newline
    row: dict[str, Any]


def read_lines(path: str | Path) -> list[Line]:
    """Return the complete lines of a file, none if there is no file.

    Raises RunError if the file cannot be read, or a complete line of it is no JSON object; the message names the line.
    """
    path = Path(path)
    if not path.exists():
        return []
    data = read_bytes(path, "log", RunError, max_bytes=MAX_LOG_BYTES)
    lines, end = [], 0
    # What stands behind the last newline is no line.
    for number, text in enumerate(data.split(b"\n")[:-1], start=1):
        end += len(text) + 1
        complaint = f"{path} line {number} is damaged"
        try:
            row = parse_json(text.decode(), complaint, RunError, hint=DAMAGED_LINE)
        except UnicodeDecodeError as error:
            raise RunError(f"{complaint}: it is not UTF-8 text, {error.reason}", hint=DAMAGED_LINE) from None
        if not isinstance(row, dict):
            raise RunError(f"{complaint}: it holds a JSON {type(row).__name__}", hint=DAMAGED_LINE)
        lines.append(Line(number, end, with_present_names(row, RENAMED)))
    return lines


class JsonLines:
    """A file of JSON lines that one process appends to; the lock of its directory keeps others out.

    - `keep_bytes`: length to truncate the file to before the first line is appended.
    - `durable`: whether every append reaches the disk before it returns.

    Raises RunError if the file cannot be written; while it is appended to, if it is no longer where it was.
    """

    def __init__(self, path: str | Path, *, keep_bytes: int = 0, durable: bool = True) -> None:
        self.path = Path(path)
        self._durable = durable
        try:
            self._file = open_own(self.path, os.O_RDWR | os.O_APPEND)
            os.ftruncate(self._file, keep_bytes)
        except OSError as error:
            raise RunError(
                f"cannot write to {self.path}: {error.strerror}", hint="give a writable --out"
            ) from error

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows with one write."""
        left = memoryview("".join(json.dumps(dict(row)) + "\n" for row in rows).encode())
        self.refuse_moved()
        with naming(self.path):
            while left:  # a write may take a part: where the disk is full, the next one says so
                left = left[os.write(self._file, left) :]
            if self._durable:
                os.fsync(self._file)

    def refuse_moved(self) -> None:
        """Raise if the path no longer leads to the open file: appended lines would be lost."""
        try:
            is_same = os.path.samestat(os.fstat(self._file), self.path.stat())
        except OSError:
            is_same = False
        if not is_same:
            raise RunError(
                f"{self.path} was removed, moved or replaced while the run wrote it",
                hint="put it back, or start again with another --out; a moved run continues from its new place "
                "with --resume",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def truncate(self, keep_bytes: int) -> None:
        """Keep the first `keep_bytes` bytes."""
        os.ftruncate(self._file, keep_bytes)
        os.fsync(self._file)

    def close(self) -> None:
        """Sync and close the file."""
        try:
            with naming(self.path):
                os.fsync(self._file)
        finally:
            os.close(self._file)
