"""Files of JSON lines that survive being killed at any byte.

A line counts once its newline is there. What a dead writer left after the last newline is no line: readers leave
it out, and whoever goes on writing cuts it off first.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executors.runs.closing import Closing
from topology.errors import RunError
from topology.reading import parse_json, read_bytes

MAX_LOG_BYTES = 4 * 2**30
"""A run of ten million steps has less."""

LOCK_WAIT_S = 10.0
"""How long a writer waits for another to let go: one whose launcher was killed needs a moment to die."""


@dataclass(frozen=True)
class Line:
    """One complete line.

    Attributes
    ----------
    number : int
        From 1.
    end : int
        Byte after its newline.
    row : dict
    """

    number: int
    end: int
    row: dict[str, Any]


def read_lines(path: str | Path) -> list[Line]:
    """Return the complete lines of a file, none if there is no file.

    Raises
    ------
    RunError
        If the file cannot be read, or a complete line of it is no JSON object; the message names the line.
    """
    path = Path(path)
    if not path.exists():
        return []
    data = read_bytes(path, "log", RunError, max_bytes=MAX_LOG_BYTES)
    lines, end = [], 0
    for number, text in enumerate(data.split(b"\n")[:-1], start=1):
        end += len(text) + 1
        lines.append(Line(number, end, _object(path, number, text)))
    return lines


def _object(path: Path, number: int, text: bytes) -> dict[str, Any]:
    complaint = f"{path} line {number} is damaged"
    hint = "restore the file from a copy, or cut it before that line and resume from there"
    try:
        row = parse_json(text.decode(), complaint, RunError, hint=hint)
    except UnicodeDecodeError as error:
        raise RunError(f"{complaint}: it is not UTF-8 text, {error.reason}", hint=hint) from None
    if not isinstance(row, dict):
        raise RunError(f"{path} line {number} is damaged: it holds a JSON {type(row).__name__}")
    return row


class JsonLines(Closing):
    """A file of JSON lines that one process appends to.

    Parameters
    ----------
    path : path
    keep_bytes : int
        Length to cut the file to before the first line is appended.
    durable : bool
        Whether every append reaches the disk before it returns.

    Raises
    ------
    RunError
        If the file cannot be written, or another process is writing it.
    """

    def __init__(self, path: str | Path, *, keep_bytes: int = 0, durable: bool = True) -> None:
        self.path = Path(path)
        self._durable = durable
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                _lock(self._file, self.path)
                os.ftruncate(self._file, keep_bytes)
            except BaseException:
                os.close(self._file)
                raise
        except OSError as error:
            raise RunError(
                f"cannot write to {self.path}: {error.strerror}", hint="give an --out that can be written"
            ) from error

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows, all at once."""
        left = memoryview("".join(json.dumps(dict(row)) + "\n" for row in rows).encode())
        while left:
            left = left[os.write(self._file, left) :]
        if self._durable:
            os.fsync(self._file)

    def close(self) -> None:
        """End the file."""
        os.fsync(self._file)
        os.close(self._file)


def _lock(file: int, path: Path) -> None:
    """Hold a lock on an open file, which the system takes back when the process ends."""
    try:
        import fcntl
    except ImportError:  # Windows: a second writer is not noticed.
        return
    give_up = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > give_up:
                raise RunError(
                    f"another process is writing {path}", hint="wait for that run, or end it"
                ) from None
            time.sleep(0.05)
