"""What an instruction is: an operation with its stream, its operands, its dependencies and its work.

An :class:`Access` says which bytes of which buffer are touched, and what is (or will be) in them. Its ``step`` is
relative to the step being run: weights ``block.3`` at step 0 are those that this step's forwards must see, at
step -1 those that still lack the update of the step before, at step +1 those that the next step will see. When
one step ends and the next begins, every content's step falls by one. An update whose scalars belong to a step
before the first is the identity.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from costmodel.work import Work
from zosim.program.contents import WrittenContents, name_and_state
from zosim.program.operations import Operation


class Stream(StrEnum):
    """Queues of one rank. Each runs one instruction at a time, in order."""

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    SAMPLE = "sample"
    LINK = "link"
    RECV = "recv"
    DISK_READ = "disk_read"
    DISK_WRITE = "disk_write"


DISK_STREAMS = frozenset({Stream.DISK_READ, Stream.DISK_WRITE})
"""Streams whose instructions the host runs itself, whatever the device."""


class Space(StrEnum):
    """Where a buffer lives."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Buffer:
    """A named range of memory."""

    name: str
    space: Space
    size_bytes: int  # capacity
    # What it is for, the name under which memory is reported: `weights`, `staging buffers`, `transfer buffers`, `disk buffers`,
    # `perturbations`, `activations`, `scalars`, `rng`, `batch`; of first-order steps also `gradients`, `optimizer state` and `kept
    # messages`. All up to `perturbations` are flat arrays; `activations` are whatever tensor the forward that writes them returns.
    role: str
    dtype: str  # format of its elements
    # Allocated at its first write and freed after its last read in each step, rather than for ever.
    dynamic: bool = False
    shared: bool = False  # one for all ranks of a host, in memory that they share


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes of a buffer, and what is in them.

    - `offset_bytes`, `size_bytes`: Range inside the buffer.
    """

    buffer: str
    # One of `zosim.program.contents`, which files have as text: `block.3@q0+`, `z:block.3@q0`, `loss@q0-`.
    what: WrittenContents
    # Step of the contents relative to the step being run; None for contents that never change.
    step: int | None
    size_bytes: int
    offset_bytes: int = 0
    # Process group among whose members the range is split into equal shares, of which only this rank's own is touched; empty for all of
    # it. What the other shares hold is then unspecified.
    share: str = ""

    @property
    def end_bytes(self) -> int:
        """One past the last byte."""
        return self.offset_bytes + self.size_bytes

    def overlaps(self, other: Access) -> bool:
        """Whether the two touch a common byte."""
        return (
            self.buffer == other.buffer
            and self.offset_bytes < other.end_bytes
            and other.offset_bytes < self.end_bytes
        )

    def shifted(self, steps: int) -> Access:
        """Return the same access, seen from `steps` steps later."""
        if self.step is None or not steps:
            return self
        # Not by `replace`, which takes twice as long: a planner shifts tens of thousands.
        step = self.step - steps
        return Access(self.buffer, self.what, step, self.size_bytes, self.offset_bytes, self.share)

    def describe(self) -> str:
        """Return the contents in words."""
        step = "" if self.step is None else f"[t{self.step:+d}]" if self.step else "[t]"
        name, state = name_and_state(self.what)
        share = f", a share by {self.share}" if self.share else ""
        return f"{name}{step}{f' at {state}' if state else ''}{share}"


@dataclass(frozen=True, slots=True)
class Dependency:
    """Another instruction, of this step (``distance`` 0) or of the step before (1).

    A distance of 1 in the first step, and one that reaches from the flush into the last step, are both resolved
    by counting phases in the order in which they run; before the first there is nothing to wait for.
    """

    instruction: str
    distance: int = 0
    # Empty for an instruction of this rank. Otherwise a process group, on whose *other* members it must have finished.
    process_group: str = ""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One operation with its stream, its dependencies, its operands and its work."""

    id: str
    op: Operation
    stream: Stream
    label: str  # span name under which time is reported: `upload`, `forward`, `perturb`, `restore` ...
    segment: str
    after: tuple[Dependency, ...] = ()
    # reads, writes: an operand changed in place stands in both.
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()
    work: Work = field(default_factory=Work)


Phase = Literal["prologue", "step", "flush"]
PHASES: tuple[Phase, ...] = ("prologue", "step", "flush")
"""The phases of a program, in the order in which they run."""
