"""Files that are whole or not there, and directories that one process at a time writes to."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO

from topology.errors import RunError, refusal_of_machine

LOCK_NAME = ".lock"
LOCK_WAIT_S = 10.0
"""How long a writer waits for another to let go: one whose launcher was killed needs a moment to die."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let errors of the system name a file, which those of writing do not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def refuse_other_names(paths: Iterable[str | Path]) -> None:
    """Raise if a name is not UTF-8: JSON, safetensors and the programs that read them know no others.

    Raises
    ------
    RunError
    """
    for path in paths:
        try:
            str(path).encode()
        except UnicodeEncodeError:
            shown = os.fsencode(path).decode(errors="backslashreplace")
            raise RunError(
                f"the name {shown} is not UTF-8, so that no file of a run could hold it",
                hint="rename it, or give a link to it that has another name",
            ) from None


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Make a directory if need be, and be the only process that writes to it.

    The system takes the lock back when the process ends, however it ends; its file stays, and means nothing.

    Raises
    ------
    ZosimError
        If another process writes to it, or it cannot be written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / LOCK_NAME).open("a+")
    except OSError as error:
        raise refusal_of_machine(error) or error from error
    with file:
        _lock(file, directory)
        with suppress(OSError):  # who holds it is only said; a disk may be full
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
        yield


def _lock(file: IO[str], directory: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows: a second writer is not noticed.
        return
    end = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                file.seek(0)
                raise RunError(
                    f"another process ({file.read().strip() or 'of another host'}) is writing to {directory}",
                    hint="wait for that run, or end it; or give another --out",
                ) from None
            time.sleep(0.05)


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
        if isinstance(error, OSError):
            error.filename = error.filename or str(self._path)
        try:
            with naming(self._path), self._file:
                if kind is None:
                    self._file.flush()
                    os.fsync(self._file.fileno())
            if kind is None:
                self._partial.replace(self._path)
        finally:
            self._partial.unlink(missing_ok=True)
