"""A process's place among the ranks, and the directory in which the ranks of a host note what they are doing.

Every rank keeps a line with the instruction that it is running in a small file that is mapped into memory, so that
the line is there even when the process is killed.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import stat
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from executors.ranks.stale_files import hold, remove_stale_files
from topology.errors import RunError, ZosimError
from topology.reading import read_json_object

_STAGE_BYTES, _LINE_BYTES = 256, 256
DIRECTORY_VARIABLE = "ZOSIM_LAUNCH_DIRECTORY"
PREFIX = "zosim-launch-"


@dataclass(frozen=True)
class RankInfo:
    """Place of this process among the ranks."""

    rank: int
    local_rank: int
    world_size: int

    @classmethod
    def here(cls) -> RankInfo:
        """Return what torch's launcher set in the environment; a lone rank if there is no launcher."""
        read = {name: int(os.environ.get(name, default)) for name, default in _ENVIRONMENT.items()}
        return cls(read["RANK"], read["LOCAL_RANK"], read["WORLD_SIZE"])


_ENVIRONMENT = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


def is_launched() -> bool:
    """Whether torchrun or our launcher has started this process as a rank."""
    return "RANK" in os.environ and (DIRECTORY_VARIABLE in os.environ or "MASTER_ADDR" in os.environ)


def rank_0_keeps_the_store() -> bool:
    """Whether the process of rank 0 keeps the ranks' store: neither a file nor a launcher does."""
    return DIRECTORY_VARIABLE not in os.environ and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def is_on_one_host() -> bool:
    """Whether the launcher says that all ranks are on this host."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE", "1")


@dataclass(frozen=True)
class LastReport:
    """What a rank left."""

    stage: str = ""  # its stage in words, "" where the model is not split
    line: str = ""  # the last instruction that it began, "" if none

    def of(self, rank: int) -> str:
        """Describe the rank, with its stage."""
        return f"rank {rank}" + (f" ({self.stage})" if self.stage else "")


class Progress:
    """A file with a rank's stage and the instruction that it is running (`path`: of a file of fixed size, overwritten in place)."""

    def __init__(self, path: str | Path) -> None:
        with Path(path).open("w+b") as file:
            file.truncate(_STAGE_BYTES + _LINE_BYTES)
            self._memory = mmap.mmap(file.fileno(), _STAGE_BYTES + _LINE_BYTES)

    def stage(self, text: str) -> None:
        """Note which stage of the model this rank holds."""
        self._memory[:_STAGE_BYTES] = _padded(text, _STAGE_BYTES)

    def note(self, text: str) -> None:
        """Note the instruction that this rank is running."""
        self._memory[_STAGE_BYTES:] = _padded(text, _LINE_BYTES)

    @staticmethod
    def read(path: str | Path) -> LastReport:
        """Return what a process noted; empty where there is no file."""
        try:
            content = Path(path).read_bytes()
        except OSError:
            return LastReport()
        parts = content[:_STAGE_BYTES], content[_STAGE_BYTES:]
        return LastReport(*(part.rstrip(b"\0").decode(errors="replace") for part in parts))


def _padded(text: str, size: int) -> bytes:
    return text.encode()[:size].ljust(size, b"\0")


def progress_of_this_rank() -> Progress | None:
    """Return this rank's progress file; None without a launcher."""
    directory = launch_directory()
    return Progress(note_path(directory, "progress", RankInfo.here().rank)) if directory else None


def last_report(rank: int) -> LastReport:
    """Return the last words of a rank that the same launcher started on this host."""
    directory = launch_directory()
    return Progress.read(note_path(directory, "progress", rank)) if directory else LastReport()


def launch_directory() -> Path | None:
    """Return a directory that the ranks of this host share for as long as their launcher lives; None for a rank alone.

    Raises RunError if another user has made it, or may enter it.
    """
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if directory:
        return Path(directory)
    if not is_launched():
        return None
    # The ranks of a host have one parent: torchrun.
    return _shared_directory(
        Path(tempfile.gettempdir()) / f"{PREFIX}{os.getppid()}-{os.environ['MASTER_PORT']}"
    )


@cache
def _shared_directory(path: Path) -> Path:
    remove_stale_files(path.parent, PREFIX)
    while True:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise RunError(
                f"{path} must be a directory that only this user can access (mode 0700)",
                hint="remove it, start with another --master-port, or set TMPDIR to a directory of your own",
            )
        with suppress(FileNotFoundError):  # another process took it for a stale one before it was locked
            hold(path)
            return path


def leave() -> None:
    """Remove this rank's files when its work is done; the last rank under torchrun removes the directory."""
    if DIRECTORY_VARIABLE in os.environ or (directory := launch_directory()) is None:
        return
    note_path(directory, "progress", RankInfo.here().rank).unlink(missing_ok=True)
    with suppress(OSError):  # others are still there
        directory.rmdir()


def give_up(ranks: Sequence[int], why: str) -> None:
    """Kill ranks of this launch that this one waited for in vain, and note why.

    One that is stopped does not end when its launcher asks it to, and one that is killed cannot say why.
    """
    if DIRECTORY_VARIABLE not in os.environ:
        return
    directory, own = Path(os.environ[DIRECTORY_VARIABLE]), RankInfo.here().rank
    for rank in ranks:
        note_path(directory, "given-up", rank).write_text(json.dumps({"by": own, "why": why}))
        with suppress(OSError, ValueError):
            os.kill(int(note_path(directory, "pid", rank).read_text()), signal.SIGKILL)


def read_note(path: Path) -> Mapping[str, Any] | None:
    """Return the note in a file; None if there is none, or the rank ended while writing it."""
    with suppress(ZosimError):
        return read_json_object(path, "note of a rank", ZosimError)
    return None


def note_path(directory: Path, what: Literal["progress", "pid", "given-up"], rank: int) -> Path:
    """Return the path of a rank's progress file, process id, or the reason why another rank killed it."""
    return directory / f"{what}-{rank}"
