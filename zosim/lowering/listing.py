"""The list that a step is written into."""

from __future__ import annotations

from costmodel.work import Work
from zosim.instructions import Access, Instruction, Stream
from zosim.operations import Operation


class Listing:
    """Instructions of one part of one rank's program, in an order that would be right on a single stream."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self._named: dict[str, int] = {}

    def emit(
        self,
        name: str,
        op: Operation,
        stream: Stream,
        label: str,
        segment: str,
        reads: tuple[Access, ...],
        writes: tuple[Access, ...],
        work: Work,
    ) -> None:
        """Add an instruction; a name that stands already is numbered."""
        count = self._named.get(name, 0) + 1
        self._named[name] = count
        unique = name if count == 1 else f"{name}#{count}"
        self.instructions.append(
            Instruction(unique, op, stream, label, segment, reads=reads, writes=writes, work=work)
        )
