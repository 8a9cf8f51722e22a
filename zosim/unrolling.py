"""A run of some steps as one list, in which what an instruction waits for is a place and not a name.

Examples
--------
A step of two instructions, the first of which waits for the second of the step before; in the first step there is none:

>>> from zosim.instructions import Stream
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
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from topology.errors import ProgramError
from zosim.instructions import Dependency, Instruction, Part


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
