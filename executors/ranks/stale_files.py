"""Temporary files and directories of this user's processes, and the removal of those that a killed process left.

A process locks what it makes (flock). The kernel drops the lock with the process, however it ends; what nobody has locked is
stale. A process id would not say so: ids are given out again, and another container counts its own.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def held_directory(prefix: str) -> Iterator[Path]:
    """Make a temporary directory that only this user may enter (mode 0700), for the length of the block.

    What a process was killed over that made one with the same prefix is removed first.
    """
    remove_stale_files(Path(tempfile.gettempdir()), prefix)
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-"))
        with suppress(FileNotFoundError):
            lock = hold(path)
            break
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


@contextmanager
def held_file(folder: Path, prefix: str) -> Iterator[tuple[Path, int]]:
    """Make a file that only this user may open (mode 0600), for the length of the block; also return a descriptor of it."""
    while True:
        descriptor, name = tempfile.mkstemp(prefix=f"{prefix}{os.getpid()}-", dir=folder)
        try:
            lock = hold(Path(name))
            break
        except FileNotFoundError:
            os.close(descriptor)
        except OSError:  # too many open files
            os.close(descriptor)
            Path(name).unlink(missing_ok=True)
            raise
    try:
        yield Path(name), descriptor
    finally:
        Path(name).unlink(missing_ok=True)
        os.close(lock)
        os.close(descriptor)


def hold(path: Path) -> int:
    """Keep `path` from being removed as stale, until the descriptor that is returned is closed.

    Raises FileNotFoundError if another process took it for a stale one before it could be locked.
    """
    import fcntl

    lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with suppress(OSError):  # a file system without locks, where nobody removes what he cannot lock either
        fcntl.flock(lock, fcntl.LOCK_SH)
    if not path.exists():
        os.close(lock)
        raise FileNotFoundError(path)
    return lock


def remove_stale_files(folder: Path, prefix: str) -> None:
    """Remove what this user's processes made in `folder`, its names beginning with `prefix`, and no longer hold."""
    import fcntl

    for path in folder.glob(f"{prefix}*"):
        with suppress(OSError):  # held, another user's, or gone
            lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            finally:
                os.close(lock)
