"""What a user may be told went wrong.

::

    ZosimError
    ├── TopologyError      a hardware description that cannot be
    ├── ModelError         a model that zosim cannot read, split point or run
    │   └── UnknownFamily  a model whose shape its configuration alone does not tell
    ├── PlanError          a plan that contradicts itself
    │   └── DoesNotFit     a plan whose memory exceeds a device or a host
    ├── ProgramError       a program that an interpreter must refuse
    │   └── Hazard         an access that finds the wrong contents or is not ordered
    ├── TimelineError      spans that cannot be, or a timeline file that cannot be read
    ├── ProfileError       a calibration profile that is damaged or foreign
    ├── TrafficError       flows that cannot be
    ├── DataError          training data that cannot be read
    ├── CodecError         values that a codec cannot carry, or a message that is damaged
    ├── RunError           a run that could not go on
    ├── DependencyError    a package that ignores an argument
    └── MachineError       a disk or a memory that refused

Each names the thing, shows the value and offers the fix. The command line prints it without a traceback;
anything else that escapes is our own mistake and keeps its traceback.
"""

from __future__ import annotations

import contextlib
import errno
import re
import traceback
import warnings
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

_ROOT = Path(__file__).parents[1]


class ZosimError(Exception):
    """A user's mistake or a machine's limit, worded for the user.

    Parameters
    ----------
    message : str
        What is wrong, naming the thing and showing the value.
    hint : str, optional
        What to do about it, printed on a line of its own.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n\nhint: {self.hint}"

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows: where its cell is, and the message, without the frames of packages."""
        frames = traceback.extract_tb(self.__traceback__)
        before = takewhile(lambda frame: not Path(frame.filename).is_relative_to(_ROOT), frames)
        own = [frame for frame in before if "site-packages" not in frame.filename]
        return [*"".join(traceback.format_list(own)).splitlines(), f"{type(self).__name__}: {self}"]


class TopologyError(ZosimError):
    """A hardware description that cannot be."""


class ModelError(ZosimError):
    """A model that zosim cannot read, split point or run."""


class UnknownFamily(ModelError):  # noqa: N818 - reads as the statement it makes
    """A model whose shape its configuration alone does not tell."""


class PlanError(ZosimError):
    """A plan that contradicts itself or the hardware it names."""


class DoesNotFit(PlanError):  # noqa: N818 - reads as the statement it makes
    """A plan whose memory exceeds a device or a host."""


class ProgramError(ZosimError):
    """A program that an interpreter must refuse."""


class Hazard(ProgramError):  # noqa: N818 - the field's word
    """An access that finds the wrong contents, or that nothing orders."""


class TimelineError(ZosimError):
    """Spans that cannot be, or a timeline file that cannot be read."""


class ProfileError(ZosimError):
    """A calibration profile that is damaged or foreign."""


class TrafficError(ZosimError):
    """Flows, or the links that they cross, that cannot be."""


class DataError(ZosimError):
    """Training data that cannot be read."""


class CodecError(ZosimError):
    """Values that a codec cannot carry, or a message that is damaged."""


class RunError(ZosimError):
    """A run that could not go on."""


class DependencyError(ZosimError):
    """A package of another version than zosim was written for, which ignores an argument."""


class MachineError(ZosimError):
    """A disk or a memory that refused."""


_HINTS = {
    errno.ENOENT: "make that directory, or choose another path",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "a link leads back to itself there; choose another path",
    errno.ENOSPC: "free some space there, or choose another directory; continue a run with --resume",
    errno.EDQUOT: "free some space within your quota, or choose another directory; continue a run with --resume",
    errno.EFBIG: "raise the limit of files (ulimit -f), or choose a file system that allows larger ones",
    errno.EROFS: "choose a directory that can be written to",
    errno.EACCES: "choose a directory that you may write to",
    errno.EPERM: "choose a directory that you may write to",
    errno.EEXIST: "a file has that name; choose another",
    errno.ENOTDIR: "a file stands where a directory is needed; choose another path",
    errno.EISDIR: "a directory stands where a file is needed; choose another path",
    errno.EIO: "the disk failed; look at the system's log",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "end other processes: the system has as many open files as it may",
    errno.ENOMEM: "end other processes, or choose a smaller batch or an offloaded plan",
}


def refusal_of_machine(error: Exception) -> MachineError | None:
    """Return a refusal by a disk or a memory in words; None for what must have another cause.

    >>> refusal_of_machine(FileExistsError(errno.EEXIST, "File exists", "runs/first")).message
    'runs/first: File exists'
    >>> refusal_of_machine(ValueError("ours")) is None
    True
    """
    if isinstance(error, MemoryError):
        return MachineError("memory is exhausted", hint=_HINTS[errno.ENOMEM])
    if not isinstance(error, OSError) or error.errno not in _HINTS:
        return None
    where = "" if error.filename is None else f"{error.filename}: "
    return MachineError(f"{where}{error.strerror}", hint=_HINTS[error.errno])


_IGNORED = r"(?s:.*)\bignor(?:e[ds]?|ing)\b"


@contextlib.contextmanager
def refusing_ignored() -> Iterator[None]:
    """Let it be an error that a package warns of something that it ignores: numbers would be wrong without a word.

    Raises DependencyError with what the package says.
    """
    with warnings.catch_warnings():
        for category in (UserWarning, FutureWarning):
            warnings.filterwarnings("error", _IGNORED, category)
        try:
            yield
        except (UserWarning, FutureWarning) as warning:
            if not re.match(_IGNORED, str(warning), re.IGNORECASE):
                raise
            raise DependencyError(
                f"a package ignores an argument: {warning}",
                hint="install the tested versions, from requirements.txt in a clone of zosim",
            ) from warning
