"""What a rank does in one step, as data that a simulator can time and an executor can do.

A :class:`Program` is a step graph in three parts, ``prologue | step | flush``. The step repeats; a dependency
carries an *iteration distance*, so that "the offload of this block in the step before" is an edge like any other.
Both interpreters run the same instructions under the same rules:

* instructions of one stream run in the order listed, and one step's before the next step's;
* an instruction starts when every instruction that it is ``after`` has finished.

Nothing else orders anything, so whatever those rules leave unordered may really overlap.
:mod:`zosim.validate` refuses a program in which that would matter.

Contents and steps
------------------
An :class:`Access` says which bytes of which buffer are touched, and what is (or will be) in them. Its ``step`` is
relative to the step being run: weights ``block.3`` at step 0 are those that this step's forwards must see, at
step -1 those that still lack the update of the step before, at step +1 those that the next step will see. When
one step ends and the next begins, every content's step falls by one. An update whose scalars belong to a step
before the first is the identity.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from costmodel.work import Work
from topology.errors import ProgramError
from topology.validation import raise_readable
from zosim.documents import read_document
from zosim.operations import (
    Allocate,
    Backward,
    Cast,
    Collective,
    Copy,
    Decode,
    Draw,
    Encode,
    Forward,
    Free,
    Load,
    Operation,
    Optimize,
    Perturb,
    Recv,
    Scalar,
    Send,
    Update,
)

__all__ = [
    "PROGRAM_VERSION",
    "Access",
    "Allocate",
    "Backward",
    "Buffer",
    "Cast",
    "Collective",
    "Copy",
    "Decode",
    "Dependency",
    "Draw",
    "Encode",
    "Forward",
    "Free",
    "Instruction",
    "Load",
    "Operation",
    "Optimize",
    "Part",
    "Perturb",
    "Placed",
    "Program",
    "Recv",
    "Scalar",
    "Send",
    "Space",
    "Stream",
    "Update",
]

PROGRAM_VERSION: Literal[1] = 1


class Stream(StrEnum):
    """Queues of one rank. Each runs one instruction at a time, in order."""

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    DRAW = "draw"
    LINK = "link"
    RECV = "recv"


class Space(StrEnum):
    """Where a buffer lives."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Buffer:
    """A named piece of memory.

    Attributes
    ----------
    name : str
    space : Space
    size_bytes : int
        Capacity.
    role : str
        What it is for, the name under which memory is reported: ``weights``, ``slots``, ``staging``,
        ``directions``, ``activations``, ``scalars``, ``rng``, ``batch``; of first-order steps also ``gradients``,
        ``optimizer state`` and ``kept messages``. ``weights``, ``slots``, ``staging`` and
        ``directions`` are flat arrays; ``activations`` are whatever tensor the forward that writes them returns.
    dtype : str
        Format of its elements.
    dynamic : bool
        Allocated at its first write and freed after its last read in each step, rather than for ever.
    shared : bool
        One for all ranks of a host, in memory that they share.
    """

    name: str
    space: Space
    size_bytes: int
    role: str
    dtype: str
    dynamic: bool = False
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes of a buffer, and what is in them.

    Attributes
    ----------
    buffer : str
    what : str
        Name of the contents, such as ``block.3``, ``z:block.3``, ``block.3:out``, ``loss``.
    step : int or None
        Step of the contents relative to the step being run; None for contents that never change.
    point : str
        Perturbation that the contents carry: ``""`` for none, ``"q0+"`` for query 0 at ``+ε``, ``"q0-"``; for
        a direction, the query alone.
    offset_bytes, size_bytes : int
        Range inside the buffer.
    share : str
        Group among whose members the range is cut into equal parts, of which only this rank's own is touched;
        empty for all of it. What else the range holds is then not said.
    """

    buffer: str
    what: str
    step: int | None
    size_bytes: int
    point: str = ""
    offset_bytes: int = 0
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
        return self if self.step is None else replace(self, step=self.step - steps)

    def describe(self) -> str:
        """Return the contents in words."""
        step = "" if self.step is None else f"[t{self.step:+d}]" if self.step else "[t]"
        point = f" at {self.point}" if self.point else ""
        share = f", a share by {self.share}" if self.share else ""
        return f"{self.what}{step}{point}{share}"


@dataclass(frozen=True, slots=True)
class Dependency:
    """Another instruction, of this step (``distance`` 0) or of the step before (1).

    A distance of 1 in the first step, and one that reaches from the flush into the last step, are both resolved
    by counting parts in the order in which they run; before the first there is nothing to wait for.

    Attributes
    ----------
    instruction : str
    distance : int
    group : str
        Empty for an instruction of this rank. Otherwise a group, on whose *other* members it must have finished.
    """

    instruction: str
    distance: int = 0
    group: str = ""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One operation with its stream, its dependencies, its operands and its work.

    Attributes
    ----------
    id : str
        Unique in its part.
    op : Operation
    stream : Stream
    label : str
        Span name under which time is reported: ``upload``, ``forward``, ``perturb``, ``restore`` ...
    segment : str
        Segment that it serves.
    after : tuple of Dependency
    reads, writes : tuple of Access
        An operand changed in place stands in both.
    work : Work
    """

    id: str
    op: Operation
    stream: Stream
    label: str
    segment: str
    after: tuple[Dependency, ...] = ()
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()
    work: Work = field(default_factory=Work)


Part = Literal["prologue", "step", "flush"]


@dataclass(frozen=True, slots=True)
class Placed:
    """An instruction at its place in an unrolled run.

    Attributes
    ----------
    index : int
        Position in the unrolled order.
    part : str
    step : int
        Number of the step, from 0. The prologue has that of the first step, the flush one past the last.
    instruction : Instruction
    after : tuple of int
        Indices of this rank's instructions that it waits for, its predecessor on its stream not among them.
    after_peers : tuple of (str, int)
        Groups, with indices of the instructions that it waits for on their other members.
    """

    index: int
    part: Part
    step: int
    instruction: Instruction
    after: tuple[int, ...]
    after_peers: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Program:
    """The step graph of one rank.

    Attributes
    ----------
    name : str
        For messages.
    buffers : tuple of Buffer
    initial : tuple of Access
        What the buffers hold when the first step begins.
    final : tuple of Access
        What they must hold after the flush, in the frame of the step that would come next.
    prologue, step, flush : tuple of Instruction
    groups : mapping of str to int
        Members of each group that the rank is one of.
    """

    name: str
    buffers: tuple[Buffer, ...]
    initial: tuple[Access, ...]
    final: tuple[Access, ...]
    step: tuple[Instruction, ...]
    prologue: tuple[Instruction, ...] = ()
    flush: tuple[Instruction, ...] = ()
    groups: Mapping[str, int] = field(default_factory=dict)
    version: Literal[1] = PROGRAM_VERSION

    @property
    def is_alone(self) -> bool:
        """Whether nothing in it takes another rank."""
        return all(size == 1 for size in self.groups.values())

    def share_bytes(self, access: Access) -> int:
        """Return the bytes that `access` really touches on one rank."""
        return access.size_bytes // self.groups[access.share] if access.share else access.size_bytes

    @cached_property
    def buffer_by_name(self) -> dict[str, Buffer]:
        """Buffers by name."""
        return {buffer.name: buffer for buffer in self.buffers}

    def buffer(self, name: str) -> Buffer:
        """Return the buffer called `name`.

        Raises
        ------
        ProgramError
            If there is none.
        """
        try:
            return self.buffer_by_name[name]
        except KeyError:
            raise ProgramError(
                f"program {self.name} names a buffer that it does not declare: {name!r}",
                hint="declare it under `buffers`, or correct the name",
            ) from None

    def instructions(self) -> Iterator[tuple[Part, Instruction]]:
        """Yield every instruction once, with the part that it stands in."""
        for part in ("prologue", "step", "flush"):
            for instruction in getattr(self, part):
                yield part, instruction

    def unroll(self, num_steps: int, *, flush: bool = True) -> list[Placed]:
        """Return the run of `num_steps` steps as one list with resolved dependencies.

        Raises
        ------
        ProgramError
            If an id stands twice in a part, or a dependency names no instruction.
        """
        parts: list[tuple[Part, int, tuple[Instruction, ...]]] = [("prologue", 0, self.prologue)]
        parts += [("step", step, self.step) for step in range(num_steps)]
        parts += [("flush", num_steps, self.flush)] if flush else []
        return list(_place(self.name, parts))

    def to_data(self) -> dict[str, Any]:
        """Return the program as what JSON can hold."""
        data = {"version": PROGRAM_VERSION, **_ADAPTER.dump_python(self, mode="json", exclude_defaults=True)}
        for part in ("prologue", "step", "flush"):
            for instruction, written in zip(getattr(self, part), data.get(part, ()), strict=False):
                written["op"] = {"kind": instruction.op.kind, **written["op"]}
        return data

    @classmethod
    def from_data(cls, data: Mapping[str, Any], where: str) -> Program:
        """Return the program that :meth:`to_data` made; `where` is for messages.

        Raises
        ------
        ProgramError
            If it is none.
        """
        try:
            return _ADAPTER.validate_python(data)
        except ValidationError as error:
            raise_readable(error, f"program {where}", ProgramError)

    def to_json(self) -> str:
        """Return the program as JSON, one instruction to a line so that it can be edited by hand."""
        lines = [f"  {json.dumps(key)}: {_json_lines(value)}" for key, value in self.to_data().items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def save(self, path: str | Path) -> None:
        """Write the program as JSON."""
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Program:
        """Read a program written by :meth:`save`, perhaps edited since.

        Raises
        ------
        ProgramError
            If the file is missing, is not JSON, or is not a program of this version.
        """
        data = read_document(
            path, "program", PROGRAM_VERSION, ProgramError, make="write one with `zosim lower plan.json`"
        )
        return cls.from_data(data, str(path))


_ADAPTER: TypeAdapter[Program] = TypeAdapter(Program)


def _json_lines(value: object) -> str:
    if not isinstance(value, list) or not value:
        return json.dumps(value)
    return "[\n    " + ",\n    ".join(json.dumps(item) for item in value) + "\n  ]"


def _place(name: str, parts: list[tuple[Part, int, tuple[Instruction, ...]]]) -> Iterator[Placed]:
    index = 0
    positions: list[dict[str, int]] = []
    for part, step, instructions in parts:
        here: dict[str, int] = {}
        for offset, instruction in enumerate(instructions):
            if instruction.id in here:
                raise ProgramError(f"program {name}: instruction {instruction.id!r} stands twice in {part}")
            here[instruction.id] = index + offset
        positions.append(here)
        for instruction in instructions:
            found = [(d.group, _resolve(name, part, instruction, d, positions)) for d in instruction.after]
            own = tuple(at for group, at in found if at is not None and not group)
            peers = tuple((group, at) for group, at in found if at is not None and group)
            yield Placed(index, part, step, instruction, own, peers)
            index += 1


def _resolve(
    name: str, part: Part, instruction: Instruction, dependency: Dependency, positions: list[dict[str, int]]
) -> int | None:
    if dependency.distance >= len(positions):
        return None
    try:
        return positions[-1 - dependency.distance][dependency.instruction]
    except KeyError:
        is_first_step = part == "step" and dependency.distance == len(positions) - 1
        if is_first_step:
            return None
        raise ProgramError(
            f"program {name}: {part}/{instruction.id} waits for {dependency.instruction!r} "
            f"(distance {dependency.distance}), which does not exist",
            hint="name an instruction of the same part, or of the step before with distance 1",
        ) from None
