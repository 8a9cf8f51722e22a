"""Ranks that meet: which pairs of roles there are, and what has happened on both when an instruction of one starts."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from topology.errors import Hazard, ProgramError
from zosim.program import Program
from zosim.program.instructions import Access, Stream
from zosim.program.program_set import ProgramSet
from zosim.program.step_graph import Channel, Listed, StepGraph, channel_of
from zosim.program.validate import NUM_UNROLLED_STEPS, absolute, name_of

_STREAMS = tuple(Stream)


@dataclass(frozen=True)
class Pair:
    """Two roles that meet, with the first two ranks that do."""

    roles: tuple[int, int]
    ranks: tuple[int, int]
    # Groups in which the two are together, with the position of the second less that of the first.
    offsets: Mapping[str, int]

    def is_shared_by(self, side: int, channel: Channel | None) -> bool:
        """Whether what the first (0) or the second rank runs takes the other of the two."""
        if channel is None or channel.process_group not in self.offsets:
            return False
        offset = channel.peer_offset
        return not offset or self.offsets[channel.process_group] == (offset if side == 0 else -offset)


def pairs(programs: ProgramSet) -> Iterator[Pair]:
    """Yield each pair of ranks that stands for all pairs of the same roles as far from each other in the same groups."""
    seen: set[tuple[tuple[int, int], tuple[tuple[str, int], ...]]] = set()
    representatives: dict[tuple[int, ...], list[int]] = defaultdict(list)
    # Part and place of each rank, in groups that make it meet others.
    positions = {
        name: {
            rank: (subgroup[0], position)
            for subgroup in subgroups
            if len(subgroup) > 1
            for position, rank in enumerate(subgroup)
        }
        for name, subgroups in sorted(programs.process_groups.items())
    }
    for rank in range(programs.world_size):
        # Two members of a subgroup with the same role are enough to stand for all of them.
        subgroup = tuple(
            known[rank][0] for name, known in positions.items() if name != "world" and rank in known
        )
        alike = representatives[programs.roles[rank], *subgroup]
        if len(alike) < 2:
            alike.append(rank)
    ranks = sorted(rank for alike in representatives.values() for rank in alike)
    for position, first in enumerate(ranks):
        for second in ranks[position + 1 :]:
            offsets = {
                name: known[second][1] - known[first][1]
                for name, known in positions.items()
                if first in known and second in known and known[first][0] == known[second][0]
            }
            roles = programs.roles[first], programs.roles[second]
            # How far apart two members of a large group are matters only to messages, which go to neighbours.
            near = tuple((name, max(-2, min(2, offset))) for name, offset in sorted(offsets.items()))
            if (roles, near) not in seen:
                seen.add((roles, near))
                yield Pair(roles, (first, second), offsets)


class Side:
    """One role's unrolled run."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.run = StepGraph(program, NUM_UNROLLED_STEPS)

    @cached_property
    def index(self) -> dict[tuple[str, int, str], int]:
        """Position of every instruction by phase, step and id."""
        return {(item.phase, item.step, item.instruction.id): item.index for item in self.run.listed}

    @cached_property
    def streams(self) -> dict[Stream, list[Listed]]:
        """Instructions of each stream, in order."""
        by_stream: dict[Stream, list[Listed]] = {stream: [] for stream in _STREAMS}
        for item in self.run.listed:
            by_stream[item.instruction.stream].append(item)
        return by_stream

    @cached_property
    def exchanges(self) -> dict[Channel, list[Listed]]:
        """Collectives, sends and receipts of each channel, in order."""
        by_channel: dict[Channel, list[Listed]] = defaultdict(list)
        for item in self.run.listed:
            if channel := channel_of(item.instruction):
                by_channel[channel].append(item)
        return by_channel

    @cached_property
    def positions(self) -> dict[int, int]:
        """How many of its channel come before each of them."""
        return {item.index: at for items in self.exchanges.values() for at, item in enumerate(items)}

    @cached_property
    def shared_accesses(self) -> dict[str, list[Touch]]:
        """Accesses to each shared buffer, in order, steps counted from the beginning."""
        shared = {buffer.name for buffer in self.program.buffers if buffer.shared}
        by_buffer: dict[str, list[Touch]] = defaultdict(list)
        for item in self.run.listed:
            for accesses, writes in ((item.instruction.reads, False), (item.instruction.writes, True)):
                for access in (access for access in accesses if access.buffer in shared):
                    by_buffer[access.buffer].append(Touch(item, absolute(access, item.step), writes))
        return by_buffer

    def refuse_unordered_collectives(self) -> None:
        """Raise if two collectives of one group could start in either order.

        Raises Hazard: naming the two.
        """
        if not self.exchanges:
            return
        for items in self.exchanges.values():
            for first, second in itertools.pairwise(items):
                if not self.run.ordered(first.index, second.index):
                    raise Hazard(
                        f"program {self.program.name}: {name_of(first)} and {name_of(second)}, both "
                        f"{first.instruction.op.type} in one group, are not ordered",
                        hint="put them on one stream",
                    )


@dataclass(frozen=True)
class Touch:
    """An access of an instruction, steps counted from the beginning."""

    item: Listed
    access: Access
    writes: bool

    def conflicts(self, other: Touch) -> bool:
        """Whether the two, of different ranks, touch common bytes of which one is written."""
        are_apart = bool(self.access.share) and self.access.share == other.access.share
        return (self.writes or other.writes) and self.access.overlaps(other.access) and not are_apart


class Joint:
    """Two ranks side by side: what has happened on both whenever an instruction of one starts."""

    def __init__(self, sides: tuple[Side, Side], pair: Pair) -> None:
        self._sides = sides
        self._pair = pair
        self._clocks: list[dict[int, tuple[int, ...]]] = [{}, {}]
        self._positions: list[dict[int, tuple[int, int]]] = [{}, {}]
        self._waiting = [{stream: deque(items) for stream, items in side.streams.items()} for side in sides]
        self._latest: list[dict[Stream, tuple[int, ...]]] = [{}, {}]
        self._num_run = [dict.fromkeys(_STREAMS, 0), dict.fromkeys(_STREAMS, 0)]

    def ordered(self, earlier: tuple[int, int], later: tuple[int, int]) -> bool:
        """Whether instruction `earlier` (side, index) has finished whenever `later` starts."""
        position, count = self._positions[earlier[0]][earlier[1]]
        return self._clocks[later[0]][later[1]][position] >= count

    def run(self) -> None:
        """Run both to their ends.

        Raises Hazard if they come to wait for each other.
        """
        moved = True
        while moved:
            moved = False
            for number in (0, 1):
                for stream, queue in self._waiting[number].items():
                    while queue and self._advance(number, stream):
                        moved = True
        stuck = [queue[0] for waiting in self._waiting for queue in waiting.values() if queue]
        if stuck:
            names = " and ".join(name_of(item) for item in stuck[:2])
            raise Hazard(
                f"deadlock between ranks {self._pair.ranks[0]} and {self._pair.ranks[1]}: {names} wait for "
                "each other",
                hint="run collectives in the same order on all ranks, and avoid waits for each other's later "
                "work",
            )

    def _advance(self, number: int, stream: Stream) -> bool:
        """Run the head of one stream, if what it waits for is done."""
        item = self._waiting[number][stream][0]
        clock = self._clock_before(number, item)
        if clock is None:
            return False
        if not self._pair.is_shared_by(number, channel_of(item.instruction)):
            self._finish(number, stream, clock)
            return True
        return self._arrive(number, stream, clock)

    def _arrive(self, number: int, stream: Stream, clock: tuple[int, ...]) -> bool:
        """Run a collective or a message on both sides, if the other is there."""
        other, item = 1 - number, self._waiting[number][stream][0]
        channel = channel_of(item.instruction)
        assert channel is not None
        partners = self._sides[other].exchanges[channel.other_side]
        partner = partners[self._sides[number].positions[item.index]]
        queue = self._waiting[other][partner.instruction.stream]
        if not queue or queue[0] is not partner:
            return False
        other_clock = self._clock_before(other, partner)
        if other_clock is None:
            return False
        together = tuple(map(max, clock, other_clock))
        self._finish(number, stream, together)
        self._finish(other, partner.instruction.stream, together)
        return True

    def _finish(self, number: int, stream: Stream, before: tuple[int, ...]) -> None:
        item = self._waiting[number][stream].popleft()
        position = number * len(_STREAMS) + _STREAMS.index(stream)
        self._num_run[number][stream] += 1
        count = self._num_run[number][stream]
        clock = (*before[:position], count, *before[position + 1 :])
        self._clocks[number][item.index] = self._latest[number][stream] = clock
        self._positions[number][item.index] = position, count

    def _clock_before(self, number: int, item: Listed) -> tuple[int, ...] | None:
        """Return what has happened when `item` starts; None while something that it waits for has not."""
        stream = item.instruction.stream
        clocks: list[tuple[int, ...] | None] = [
            self._latest[number].get(stream, (0,) * (2 * len(_STREAMS))),
            *(self._clocks[number].get(index) for index in item.after),
        ]
        for group, index in item.after_peers:
            if group in self._pair.offsets:
                clocks.append(self._clocks[1 - number].get(self._namesake(number, index)))
        known = [clock for clock in clocks if clock is not None]
        if len(known) < len(clocks):
            return None
        return tuple(map(max, *known)) if len(known) > 1 else known[0]

    def _namesake(self, number: int, index: int) -> int:
        """Return the position on the other side of what stands at `index` on this one."""
        wanted = self._sides[number].run.listed[index]
        try:
            return self._sides[1 - number].index[wanted.phase, wanted.step, wanted.instruction.id]
        except KeyError:
            message = (
                f"rank {self._pair.ranks[number]} waits for {name_of(wanted)} on rank "
                f"{self._pair.ranks[1 - number]}, which has no such instruction"
            )
            raise ProgramError(
                message, hint="wait only for instructions that every member of the group runs"
            ) from None
