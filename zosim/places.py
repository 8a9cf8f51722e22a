"""Who waits for whom in a run, at any step, without unrolling the run.

:meth:`Program.unroll` lists every instruction of every step; a run of ten thousand steps is too long for that.
The rules are the same: a *position* counts parts in the order in which they run (0 the prologue, 1 the first
step, one past the last step the flush), and a dependency reaches back by its distance in positions.

Examples
--------
The same two instructions as in :mod:`zosim.order`, in a run of ten thousand steps. What the last step's load waits for is
known without listing the others:

>>> from zosim.instructions import Dependency
>>> from zosim.operations import Load
>>> load = Instruction("load", Load(), Stream.H2D, "load", "embed", after=(Dependency("mean", distance=1),))
>>> mean = Instruction("mean", Load(), Stream.COMPUTE, "scalar", "head", after=(Dependency("load"),))
>>> order = Order(Program("example", (), (), (), (load, mean)), num_steps=10_000)
>>> order.predecessors(Place(10_000, "load"))
(Place(position=9999, instruction='load'), Place(position=9999, instruction='mean'))
>>> order.predecessors(Place(1, "load"))
()
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from zosim.instructions import PARTS, Instruction, Part, Stream
from zosim.operations import Collective, Recv, Send
from zosim.program import Program


class Place(NamedTuple):
    """An instruction of a run: the position of its part, and its id."""

    position: int
    instruction: str


class Meeting(NamedTuple):
    """Where an instruction meets those of other ranks, which start and end with it.

    Attributes
    ----------
    group : str
    offset : int
        Of a message, the receiver's place in the group less the sender's; 0 for a collective, in which all meet.
    number : int
        How many such there are before it in its part; ranks meet at those of equal numbers.
    sends : bool
        Whether this side sends.
    """

    group: str
    offset: int
    number: int
    sends: bool = False

    @property
    def shared(self) -> tuple[str, int, int]:
        """What is the same for all who meet."""
        return self.group, self.offset, self.number


def channel_of(instruction: Instruction) -> tuple[str, int, bool] | None:
    """Return with whom an instruction meets others, as group, offset and side; None if it meets nobody."""
    op = instruction.op
    if isinstance(op, Collective):
        return op.group, 0, False
    if isinstance(op, Send):
        return op.group, op.offset, True
    return (op.group, -op.offset, False) if isinstance(op, Recv) else None


class Order:
    """The two rules of a program's order, for a run of `num_steps` steps.

    Raises
    ------
    ProgramError
        If an id stands twice in a part, or a dependency names no instruction.
    """

    def __init__(self, program: Program, num_steps: int) -> None:
        self.program = program
        self.num_steps = num_steps
        # Deeper positions only repeat what these resolve, so this refuses exactly what a whole run would.
        program.unroll(min(num_steps, self.max_distance + 1))

    @cached_property
    def max_distance(self) -> int:
        """Largest iteration distance of any dependency, at least 1 for the stream's own order."""
        distances = (edge.distance for _, item in self.program.instructions() for edge in item.after)
        return max(distances, default=1) or 1

    def part(self, position: int) -> Part:
        """Part that stands at a position."""
        if position == 0:
            return "prologue"
        return "step" if position <= self.num_steps else "flush"

    def step(self, position: int) -> int:
        """Step number under which a position's spans are reported."""
        return max(position - 1, 0)

    def instructions(self, position: int) -> tuple[Instruction, ...]:
        """Instructions of the part at a position, in order."""
        listed: tuple[Instruction, ...] = getattr(self.program, self.part(position))
        return listed

    def position(self, part: Part, step: int) -> int:
        """Position of a part; `step` counts only for steps."""
        return {"prologue": 0, "step": step + 1, "flush": self.num_steps + 1}[part]

    @cached_property
    def _by_part(self) -> dict[Part, dict[str, Instruction]]:
        return {part: {item.id: item for item in getattr(self.program, part)} for part in PARTS}

    @cached_property
    def _before(self) -> dict[Part, dict[str, str]]:
        """Per part, the instruction just before each on its stream."""
        before: dict[Part, dict[str, str]] = {}
        for part, items in self._by_part.items():
            latest: dict[Stream, str] = {}
            before[part] = {}
            for item in items.values():
                if item.stream in latest:
                    before[part][item.id] = latest[item.stream]
                latest[item.stream] = item.id
        return before

    @cached_property
    def _last(self) -> dict[Part, dict[Stream, str]]:
        return {
            part: {item.stream: item.id for item in items.values()} for part, items in self._by_part.items()
        }

    def has(self, place: Place) -> bool:
        """Whether the run has an instruction at a place."""
        in_run = 0 <= place.position <= self.num_steps + 1
        return in_run and place.instruction in self._by_part[self.part(place.position)]

    def instruction(self, place: Place) -> Instruction:
        """Return the instruction at a place."""
        return self._by_part[self.part(place.position)][place.instruction]

    def waits_for(self, place: Place) -> tuple[Place, ...]:
        """Places of this rank named by the instruction's ``after``, those before the run left out."""
        return tuple(there for group, there in self.awaited(place) if not group)

    def awaited(self, place: Place) -> list[tuple[str, Place]]:
        """Places named by the instruction's ``after``, each with the group whose other members it is on, "" for this rank.

        Those before the run are left out.
        """
        part = self.part(place.position)
        awaited = []
        for edge in self._by_part[part][place.instruction].after:
            position = place.position - edge.distance
            if position < 0:
                continue
            # What the first step waits for in "the step before" need not be in the prologue.
            if part == "step" and position == 0 and edge.instruction not in self._by_part["prologue"]:
                continue
            awaited.append((edge.group, Place(position, edge.instruction)))
        return awaited

    def follows(self, place: Place) -> Place | None:
        """Return the place just before this one on its stream, None for the first."""
        part = self.part(place.position)
        same_part = self._before[part].get(place.instruction)
        if same_part is not None:
            return Place(place.position, same_part)
        stream = self._by_part[part][place.instruction].stream
        # A part without instructions on the stream is passed over: behind the part before there is the prologue.
        for position in (place.position - 1, 0):
            if 0 <= position < place.position and (last := self._last[self.part(position)].get(stream)):
                return Place(position, last)
        return None

    def meeting(self, place: Place) -> Meeting | None:
        """Return where an instruction meets those of other ranks, None if it is neither collective nor message."""
        return self.meeting_at(self.part(place.position), place.instruction)

    def meeting_at(self, part: Part, instruction: str) -> Meeting | None:
        """Return the same for an instruction of a part."""
        return self._meetings[part].get(instruction)

    @cached_property
    def _meetings(self) -> dict[Part, dict[str, Meeting]]:
        """Per part, collectives and messages, each kind numbered in order."""
        meetings: dict[Part, dict[str, Meeting]] = {}
        for part, items in self._by_part.items():
            counts: dict[tuple[str, int, bool], int] = {}
            meetings[part] = {}
            for item in items.values():
                channel = channel_of(item)
                if channel is not None:
                    group, offset, sends = channel
                    number = counts.get(channel, 0)
                    counts[channel] = number + 1
                    meetings[part][item.id] = Meeting(group, offset, number, sends)
        return meetings

    def opens_step(self, place: Place) -> bool:
        """Whether a place is the first computation of a step, which the host prepares."""
        if self.part(place.position) != "step" or self.instruction(place).stream != Stream.COMPUTE:
            return False
        return place.instruction not in self._before["step"]

    def predecessors(self, place: Place) -> tuple[Place, ...]:
        """All of this rank that must finish before an instruction starts: its stream's predecessor first."""
        follows = self.follows(place)
        waits = self.waits_for(place)
        return waits if follows is None else (follows, *(item for item in waits if item != follows))
