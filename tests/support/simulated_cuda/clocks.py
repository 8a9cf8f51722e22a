"""Who knows of what: vector clocks, and which accesses to a byte nothing orders.

An *agent* is whatever does things in an order of its own: a stream of the device, or a thread of the host. Its n-th
action is known to another agent if the clock of that one says n or more of it.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace

Clock = dict[str, int]
"""Of every agent that is known of: its latest action that is."""


def merge(clock: Clock, other: Clock) -> None:
    """Let `clock` know what `other` knows."""
    for agent, number in other.items():
        if clock.get(agent, 0) < number:
            clock[agent] = number


@dataclass(frozen=True, slots=True)
class Use:
    """One action of an agent, and what it was in words."""

    agent: str
    number: int
    what: str

    def is_known_to(self, agent: str, clock: Clock) -> bool:
        """Whether an agent with this clock comes after the action."""
        return agent == self.agent or clock.get(self.agent, 0) >= self.number


@dataclass(slots=True)
class _Bytes:
    """A stretch of memory whose bytes were all used alike."""

    begin: int
    end: int
    write: Use | None = None
    reads: dict[str, Use] = field(default_factory=dict)

    def part(self, begin: int, end: int) -> _Bytes:
        return replace(self, begin=begin, end=end, reads=dict(self.reads))


class Shadow:
    """Of every byte of memory: the last write, and the reads since."""

    def __init__(self) -> None:
        self._stretches: list[_Bytes] = []

    def access(self, begin: int, end: int, use: Use, clock: Clock, *, writes: bool) -> list[tuple[str, Use]]:
        """Note a use of the bytes between two addresses, and return the earlier ones that it conflicts with.

        Two uses conflict if they are of one byte, one of them writes, and the later does not know of the earlier.

        Returns
        -------
        list of (str, Use)
            ``"read"`` or ``"write"``, and which one it was; each once.
        """
        conflicts: dict[tuple[str, Use], None] = {}
        for stretch in self._cut(begin, end):
            if stretch.write is not None and not stretch.write.is_known_to(use.agent, clock):
                conflicts["write", stretch.write] = None
            if not writes:
                stretch.reads[use.agent] = use
                continue
            for read in stretch.reads.values():
                if not read.is_known_to(use.agent, clock):
                    conflicts["read", read] = None
            stretch.write, stretch.reads = use, {}
        return list(conflicts)

    def forget(self, begin: int, end: int) -> None:
        """Let nobody have used the bytes between two addresses: they are of new memory."""
        gone = self._cut(begin, end)
        if gone:
            first = self._stretches.index(gone[0])
            del self._stretches[first : first + len(gone)]

    def _cut(self, begin: int, end: int) -> list[_Bytes]:
        """Return the stretches that make up the bytes between two addresses, cut there where need be."""
        first = bisect_right(self._stretches, begin, key=lambda stretch: stretch.begin)
        if first and self._stretches[first - 1].end > begin:
            first -= 1
        pieces: list[_Bytes] = []
        inside: list[_Bytes] = []
        at, last = begin, first
        while last < len(self._stretches) and (old := self._stretches[last]).begin < end:
            low, high = max(old.begin, begin), min(old.end, end)
            new = [_Bytes(at, low)] if at < low else []
            new.append(old.part(low, high))
            inside += new
            pieces += [old.part(old.begin, begin)] if old.begin < begin else []
            pieces += new
            pieces += [old.part(end, old.end)] if old.end > end else []
            at, last = high, last + 1
        if at < end:
            inside.append(_Bytes(at, end))
            pieces.append(inside[-1])
        self._stretches[first:last] = pieces
        return inside
