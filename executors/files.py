"""Files that are whole or not there: written beside their place, and put there in one instant."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import IO


def write_atomically(path: Path, text: str) -> None:
    """Replace a file by `text`, in one instant."""
    with replacing(path) as file:
        file.write(text.encode())


class replacing:  # noqa: N801 - reads as the context that it is
    """Opens a temporary file beside `path` and puts it in its place if all goes well."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = path.with_name(f".{path.name}.{os.getpid()}.partial")

    def __enter__(self) -> IO[bytes]:
        self._file = self._partial.open("wb")
        return self._file

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            with self._file:
                if kind is None:
                    self._file.flush()
                    os.fsync(self._file.fileno())
            if kind is None:
                self._partial.replace(self._path)
        finally:
            self._partial.unlink(missing_ok=True)
