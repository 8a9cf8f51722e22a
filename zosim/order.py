"""A run of some steps as one list, and which of its instructions have finished whenever another one starts.

In the list what an instruction waits for is a place and not a name.

Happens-before is kept as vector clocks with one component per stream: a stream runs in order, so how far each
stream has certainly come says everything.

Examples
--------
A step of two instructions, the first of which waits for the second of the step before; in the first step there is none:

>>> from zosim.instructions import Dependency, Instruction, Part, Stream
>>> from zosim.operations import Load
>>> load = Instruction("load", Load(), Stream.H2D, "load", "embed", after=(Dependency("mean", distance=1),))
>>> mean = Instruction("mean", Load(), Stream.COMPUTE, "scalar", "head", after=(Dependency("load"),))
>>> steps = [("step", 0, (load, mean)), ("step", 1, (load, mean))]
>>> for item in unrolled("example", steps):
...     print(item.index, item.step, item.instruction.id, item.after)
0 0 load ()
1 0 mean (0,)
2 1 load (1,)
3 1 mean (2,)

An upload and a forward on streams of their own, of which the second waits for the first, and another upload:

>>> from types import SimpleNamespace
>>> upload, forward, next_upload = (
...     Placed(index, "step", 0, SimpleNamespace(stream=stream), after)
...     for index, (stream, after) in enumerate([(Stream.H2D, ()), (Stream.COMPUTE, (0,)), (Stream.H2D, ())])
... )
>>> order = HappensBefore("two streams", [upload, forward, next_upload])
>>> order.ordered(0, 1), order.ordered(0, 2), order.ordered(1, 2)
(True, True, False)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from topology.errors import ProgramError
from zosim.instructions import Dependency, Instruction, Part, Stream


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


def unrolled(name: str, parts: Iterable[tuple[Part, int, tuple[Instruction, ...]]]) -> Iterator[Placed]:
    """Yield the instructions of parts, each with the number of its step, one after the other with resolved dependencies.

    Raises
    ------
    ProgramError
        If an id stands twice in a part, or a dependency names no instruction; `name` is the program's.
    """
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
            awaited = [(d.group, _resolve(name, part, instruction, d, positions)) for d in instruction.after]
            own = tuple(at for group, at in awaited if at is not None and not group)
            peers = tuple((group, at) for group, at in awaited if at is not None and group)
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


class HappensBefore:
    """The order that streams and dependencies impose on an unrolled program.

    Parameters
    ----------
    name : str
        The program's, for messages.
    placed : sequence of Placed
        As :meth:`zosim.program.Program.unroll` returns them.

    Raises
    ------
    ProgramError
        If an instruction waits for one that is listed after it.
    """

    def __init__(self, name: str, placed: Sequence[Placed]) -> None:
        self._position = {stream: position for position, stream in enumerate(Stream)}
        self._clocks: list[list[int]] = []
        self._places: list[tuple[int, int]] = []
        self._before_on_stream: list[int | None] = []
        last: dict[Stream, int] = {}
        for item in placed:
            for index in item.after:
                if index >= item.index:
                    message = (
                        f"program {name}: {item.part}/{item.instruction.id} waits for "
                        f"{placed[index].instruction.id}, which is listed after it"
                    )
                    hint = "list instructions in an order that respects their dependencies"
                    raise ProgramError(message, hint=hint)
            previous = last.get(item.instruction.stream)
            clock = [0] * len(self._position)
            for index in (*item.after, *(() if previous is None else (previous,))):
                clock = list(map(max, clock, self._clocks[index]))
            position = self._position[item.instruction.stream]
            count = 1 if previous is None else self._places[previous][1] + 1
            clock[position] = count
            self._clocks.append(clock)
            self._places.append((position, count))
            self._before_on_stream.append(previous)
            last[item.instruction.stream] = item.index

    def ordered(self, earlier: int, later: int) -> bool:
        """Whether instruction `earlier` has finished whenever `later` starts."""
        position, count = self._places[earlier]
        return self._clocks[later][position] >= count

    def needed(self, item: Placed) -> list[int]:
        """Return the dependencies of `item` that no other dependency and no stream implies."""
        implied_by = self._before_on_stream[item.index]
        kept = sorted(set(item.after))
        for index in tuple(kept):
            others = [other for other in (*kept, implied_by) if other is not None and other != index]
            if index == implied_by or any(self.ordered(index, other) for other in others):
                kept.remove(index)
        return kept
