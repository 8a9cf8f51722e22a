"""How long visits of segments take when streams and slots are all that they wait for.

A step is a max-plus recurrence over visits, as :mod:`zosim.applications.closed_form.recurrence` is one over instructions; a visit that stands
for many blocks is run until it only repeats itself. It is written apart from :class:`~zosim.simulators.maxplus.MaxPlus`, whose
vertices are there before the run: here which visit comes next, and in which slot, is known only while it runs, and a
planner asks thousands of times (written with vertices it took ten times as long).

Examples
--------
Two streams and four blocks: each upload takes 1 s, each forward 2 s. With two slots uploads run beside forwards, and a step
takes the first upload and four forwards; with one slot nothing overlaps.

>>> up, go = STREAMS.index(Stream.H2D), STREAMS.index(Stream.COMPUTE)
>>> items = (Item(up, (), in_slot=True), Item(go, (0,), in_slot=True))
>>> block = Visit(0, 4, items, (1.0, 2.0), {})
>>> period_s([block], 2, 0.0), period_s([block], 1, 0.0)
(9.0, 12.0)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from zosim.program.instructions import Stream
from zosim.program.operations import Collective, Decode, Recv, Send

STREAMS = tuple(Stream)
# The first fills slots and streams; the others are as long as all that follow.
_NUM_STEPS = 3
# Shifts that differ by less, relative, are rounding.
_SAME = 1e-12
_COMPUTE = STREAMS.index(Stream.COMPUTE)


@dataclass(frozen=True)
class Item:
    """An instruction of a visit.

    Attributes
    ----------
    stream : int
    after : tuple of int
        Whom in the visit it waits for.
    in_slot : bool
        Whether it works in a slot.
    meets : type or None
        Send, Recv, Decode or Collective, if it is one: others take part in it, or what they sent.
    """

    stream: int
    after: tuple[int, ...]
    in_slot: bool
    meets: type | None = None


@dataclass(frozen=True)
class Visit:
    """Neighbouring instructions of one segment; those of a block stand for `count` blocks, one after the other.

    Attributes
    ----------
    block : int or None
        The first of the blocks.
    count : int
    items : tuple of Item
    seconds : tuple of float
        Of each of them.
    loads : dict
        What they take of each resource: seconds times rate.
    """

    block: int | None
    count: int
    items: tuple[Item, ...]
    seconds: tuple[float, ...]
    loads: dict[str, float]


def period_s(visits: Sequence[Visit], num_slots: int, step_s: float) -> float:
    """Return the seconds from the end of one step to that of the next, where streams run beside each other."""
    clock = _Clock(num_slots)
    ends = []
    for _ in range(_NUM_STEPS):
        clock.begin_step(step_s)
        for visit in visits:
            clock.run(visit)
        ends.append(clock.streams[_COMPUTE])
    return ends[-1] - ends[-2]


Stage = tuple[Sequence[Visit], float]
"""The visits of one rank of a pipeline, and the host's own seconds of a step."""


@dataclass
class _Arrivals:
    """When a stage's peers have sent it each message and come to the exchange, and when it has."""

    arrivals: list[float]
    exchange_s: float = 0.0
    sent: list[float] = field(default_factory=list)
    came_s: float = 0.0
    received: list[float] = field(default_factory=list)
    num_decoded: int = 0

    def not_before(self, item: Item) -> float:
        """Return when an instruction has what others sent."""
        if item.meets is not Decode:
            return 0.0
        self.num_decoded += 1
        return self.received[self.num_decoded - 1]

    def met(self, item: Item, end_s: float) -> float:
        """Return when an instruction that would end at `end_s` by itself ends."""
        if item.meets is Send:
            self.sent.append(end_s)
        elif item.meets is Recv:
            end_s = max(end_s, self.arrivals[len(self.received)])
            self.received.append(end_s)
        elif item.meets is Collective:
            self.came_s = end_s
            return max(end_s, self.exchange_s)
        return end_s


def pipelined_s(stages: Sequence[Stage], num_slots: int) -> float:
    """Return the seconds from the end of one step to that of the next, of the stage that ends last."""
    clocks = [_Clock(num_slots) for _ in stages]
    ends: list[list[float]] = []
    for _ in range(_NUM_STEPS):
        # Once to learn when all have come to the exchange, and once with what they wait for there.
        exchange_s = 0.0
        for is_known in (False, True):
            arrivals: list[float] = []
            # The first pass is thrown away but for when ranks came to the exchange.
            after = [clock.copy() for clock in clocks]
            came: list[float] = []
            for (visits, step_s), clock in zip(stages, after, strict=True):
                peers = _Arrivals(arrivals, exchange_s if is_known else 0.0)
                clock.begin_step(step_s)
                for visit in visits:
                    clock.run(visit, peers)
                arrivals = peers.sent
                came.append(peers.came_s)
            exchange_s = max(came)
        clocks = after
        ends.append([clock.streams[_COMPUTE] for clock in clocks])
    return float(max(last - before for before, last in zip(ends[-2], ends[-1], strict=True)))


def chained_s(visits: Sequence[Visit], step_s: float) -> float:
    """Return the period of a step of which every instruction waits for the one before.

    What is listed before the first computation runs while the host prepares that.
    """
    first = next(
        n for n, item in enumerate(i for visit in visits for i in visit.items) if item.stream == _COMPUTE
    )
    seconds = [alone_s * visit.count for visit in visits for alone_s in visit.seconds]
    return max(step_s, sum(seconds[:first])) + sum(seconds[first:])


class _Clock:
    """When every stream is free again, and every slot, in seconds since the run began."""

    def __init__(self, num_slots: int) -> None:
        self.streams = [0.0] * len(STREAMS)
        self._slots = [0.0] * num_slots
        self._edge_s = 0.0

    def copy(self) -> _Clock:
        """Return another clock that shows the same."""
        made = _Clock(0)
        made.streams, made._slots, made._edge_s = self.streams.copy(), self._slots.copy(), self._edge_s
        return made

    def begin_step(self, step_s: float) -> None:
        """Let the host read the scalars of the step before: every stream waits for it."""
        # Losses are read when compute has ended.
        end_s = self.streams[_COMPUTE]
        self.streams = [max(free_s, end_s) for free_s in self.streams]
        self.streams[_COMPUTE] = end_s + step_s

    def run(self, visit: Visit, peers: _Arrivals | None = None) -> None:
        """Run a visit as often as it stands for, skipping what only repeats."""
        if visit.block is None:
            self._edge_s = self._run_items(visit, self._edge_s, peers)
            return
        block, last = visit.block, visit.block + visit.count
        before: list[float] = []
        shifts: list[float] = []
        while block < last:
            # Blocks take turns in the slots, as lowering has it.
            slot = block % len(self._slots)
            self._slots[slot] = self._run_items(visit, self._slots[slot], peers)
            block += 1
            # Once around the slots: if everything has moved by the same time twice, it goes on doing so.
            if (block - visit.block) % len(self._slots) == 0:
                state = [*self.streams, *self._slots]
                now = [a - b for a, b in zip(state, before, strict=True)] if before else []
                rounds = (last - block) // len(self._slots)
                if now and rounds and _is_uniform(now, shifts):
                    moved = [
                        # What stood still, such as a stream without work, stays where it is.
                        at + max(now) * rounds if moves > 0 else at
                        for at, moves in zip(state, now, strict=True)
                    ]
                    self.streams, self._slots = moved[: len(self.streams)], moved[len(self.streams) :]
                    block += rounds * len(self._slots)
                before, shifts = state, now

    def _run_items(self, visit: Visit, slot_s: float, peers: _Arrivals | None) -> float:
        """Run a visit once, in a slot that is free from `slot_s` on, and return when it is free again."""
        streams = self.streams
        ends: list[float] = []
        left_s, is_first = slot_s, True
        for item, seconds in zip(visit.items, visit.seconds, strict=True):
            start_s = streams[item.stream]
            for position in item.after:
                start_s = max(start_s, ends[position])
            # The slot is free when all that worked in it for another block has ended.
            if item.in_slot and is_first:
                start_s, is_first = max(start_s, slot_s), False
            if peers is not None and item.meets is not None:
                start_s = max(start_s, peers.not_before(item))
                end_s = peers.met(item, start_s + seconds)
            else:
                end_s = start_s + seconds
            streams[item.stream] = end_s
            ends.append(end_s)
            # It is free again behind the last of this block.
            if item.in_slot:
                left_s = max(left_s, end_s)
        return left_s


def _is_uniform(now: Sequence[float], before: Sequence[float]) -> bool:
    """Whether all that moves has moved by the same time, twice."""
    largest = max(now, default=0.0)
    return bool(before) and all(
        later == 0 == earlier
        or (math.isclose(later, largest, rel_tol=_SAME) and math.isclose(earlier, largest, rel_tol=_SAME))
        for later, earlier in zip(now, before, strict=True)
    )
