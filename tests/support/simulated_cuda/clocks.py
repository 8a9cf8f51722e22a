"""Who knows of what: vector clocks, and which accesses to a byte nothing orders.

An *agent* is whatever does things in an order of its own: a stream of the device, or a thread of the host. Its n-th
action is known to another agent if the clock of that one says n or more of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from zosim.program.ranges import Ranges

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
    """The last write of some bytes, and the reads since."""

    write: Use | None = None
    reads: dict[str, Use] = field(default_factory=dict)

    def copy(self) -> _Bytes:
        return _Bytes(self.write, dict(self.reads))


class Shadow:
    """Of every byte of memory: the last write, and the reads since."""

    def __init__(self) -> None:
        self._bytes = Ranges(_Bytes(), _Bytes.copy)

    def access(self, begin: int, end: int, use: Use, clock: Clock, *, writes: bool) -> list[tuple[str, Use]]:
        """Note a use of the bytes between two addresses, and return the earlier ones that it conflicts with.

        Two uses conflict if they are of one byte, one of them writes, and the later does not know of the earlier.

        Returns
        -------
        list of (str, Use)
            ``"read"`` or ``"write"``, and which one it was; each once.
        """
        conflicts: dict[tuple[str, Use], None] = {}
        for known in self._bytes.within(begin, end):
            if known.write is not None and not known.write.is_known_to(use.agent, clock):
                conflicts["write", known.write] = None
            if not writes:
                known.reads[use.agent] = use
                continue
            for read in known.reads.values():
                if not read.is_known_to(use.agent, clock):
                    conflicts["read", read] = None
        if writes:
            self._bytes.put(begin, end, _Bytes(use))
        return list(conflicts)

    def forget(self, begin: int, end: int) -> None:
        """Let nobody have used the bytes between two addresses: they are of new memory."""
        self._bytes.put(begin, end, _Bytes())
