"""Which instructions of an unrolled program have finished whenever another one starts.

Happens-before is kept as vector clocks with one component per stream: a stream runs in order, so how far each
stream has certainly come says everything.

Examples
--------
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

from collections.abc import Sequence

from topology.errors import ProgramError
from zosim.instructions import Stream
from zosim.unrolling import Placed


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
            _refuse_waiting_for_later(name, item, placed)
            self._append(item, last.get(item.instruction.stream))
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

    def _append(self, item: Placed, previous: int | None) -> None:
        before = [*item.after, *([] if previous is None else [previous])]
        clock = [0] * len(self._position)
        for index in before:
            clock = list(map(max, clock, self._clocks[index]))
        position = self._position[item.instruction.stream]
        count = 1 if previous is None else self._places[previous][1] + 1
        clock[position] = count
        self._clocks.append(clock)
        self._places.append((position, count))
        self._before_on_stream.append(previous)


def _refuse_waiting_for_later(name: str, item: Placed, placed: Sequence[Placed]) -> None:
    for index in item.after:
        if index >= item.index:
            message = (
                f"program {name}: {item.part}/{item.instruction.id} waits for "
                f"{placed[index].instruction.id}, which is listed after it"
            )
            raise ProgramError(message, hint="list instructions in an order that respects their dependencies")
