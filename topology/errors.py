"""What a user may be told went wrong.

::

    ZosimError
    ├── TopologyError      a hardware description that cannot be
    ├── ModelError         a model that zosim cannot read, cut or run
    ├── PlanError          a plan that contradicts itself
    │   └── DoesNotFit     a plan whose memory exceeds a device or a host
    ├── ProgramError       a program that an interpreter must refuse
    │   └── Hazard         an access that finds the wrong contents or is not ordered
    ├── TimelineError      spans that cannot be, or a timeline file that cannot be read
    ├── ProfileError       a calibration profile that is damaged or foreign
    ├── TrafficError       flows that cannot be
    ├── DataError          training data that cannot be read
    ├── CodecError         values that a codec cannot carry, or a message that is damaged
    └── RunError           a run that could not go on

Each names the thing, shows the value and offers the fix. The command line prints it without a traceback;
anything else that escapes is our own mistake and keeps its traceback.
"""

from __future__ import annotations


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


class TopologyError(ZosimError):
    """A hardware description that cannot be."""


class ModelError(ZosimError):
    """A model that zosim cannot read, cut or run."""


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
