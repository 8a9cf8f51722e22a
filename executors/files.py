"""Files that are whole or not there, and directories that one process at a time writes to.

The directory of a run may be untrusted: nothing in it is opened that is no regular file, and no link in it is followed. The
directory itself may be a link, which is the user's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO

from topology.errors import RunError, refusal_of_machine
from topology.reading import irregular, refuse_irregular

LOCK_NAME = ".lock"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
RUN_FILES = (
    LOCK_NAME,
    "run.json",
    "steps.jsonl",
    "steps-refused.jsonl",
    "metrics.jsonl",
    "digests.jsonl",
    "plan.json",
    "program.json",
    "timeline.json",
    "tuning.json",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "quantized.safetensors",
    "codes.safetensors",  # as an earlier version called it
    *TOKENIZER_FILES,
)
"""Files that a run, or a tuning, reads or writes in its directory."""
RUN_FOLDERS = ("checkpoints", "best", "prefix", "adapter", "tensorboard")
_LINK_HINT = (
    "a run follows no link in its directory, and opens nothing but files; the directory itself may be a link"
)
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
    """Raise RunError if a name is not UTF-8: JSON, safetensors and the programs that read them know no others."""
    for path in paths:
        try:
            str(path).encode()
        except UnicodeEncodeError:
            shown = os.fsencode(path).decode(errors="backslashreplace")
            raise RunError(
                f"the name {shown} is not UTF-8, so it cannot be recorded",
                hint="rename it, or use a symbolic link with another name",
            ) from None


def refuse_irregular_run(directory: Path) -> None:
    """Raise RunError, naming it, if something that a run reads or writes in a directory is no regular file, or no directory of its own."""
    refuse_irregular((directory / name for name in RUN_FILES), RunError, hint=_LINK_HINT)
    for name in RUN_FOLDERS:
        folder = directory / name
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            kind = irregular(folder.lstat()) or "a file"
            raise RunError(f"{folder} is {kind}, not a directory", hint=_LINK_HINT)
        for path, folders, files in os.walk(folder):
            inside = [name for name in folders if Path(path, name).is_symlink()]
            refuse_irregular((Path(path, name) for name in (*inside, *files)), RunError, hint=_LINK_HINT)


def open_own(path: Path, flags: int) -> int:
    """Return a descriptor of a file in the directory of a run, which is made if need be; no link is followed.

    Raises
    ------
    RunError
        If it is no regular file, or has another name elsewhere that would be written to as well.
    OSError
    """
    # A named pipe without a reader is then refused rather than waited for.
    flags |= os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    refuse_irregular([path], RunError, hint=_LINK_HINT)
    file = os.open(path, flags, 0o644)
    status = os.fstat(file)
    if irregular(status) is None and status.st_nlink <= 1:
        return file
    os.close(file)
    kind = irregular(status) or f"a file of {status.st_nlink} names (hard links)"
    raise RunError(
        f"{path} is {kind}, not a regular file", hint="copy the directory (cp -r), and use the copy"
    )


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Make a directory if need be, and be the only process that writes to it.

    The system takes the lock back when the process ends, however it ends; its file stays, and means nothing.

    Raises ZosimError if another process writes to it, it cannot be written to, or something in it is no file of a run.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        refuse_irregular_run(directory)
        file = os.fdopen(open_own(directory / LOCK_NAME, os.O_RDWR | os.O_APPEND), "a+")
    except OSError as error:
        raise refusal_of_machine(error) or error from error
    with file:
        _lock(file, directory)
        with suppress(OSError):  # the holder is only reported; a disk may be full
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
                    hint="wait for that run or end it, or give another --out",
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
        # Whatever has this name is not written to, a link least of all.
        with naming(self._path):
            self._partial.unlink(missing_ok=True)
        self._file = self._partial.open("xb")
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
