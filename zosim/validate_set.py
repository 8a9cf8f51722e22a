"""What the programs of several ranks must keep together, beside the rules that each keeps by itself.

1. *Messages.* The members of a group run the same collectives, of the same sizes, in one order; what one rank sends
   another receives, in the order sent.
2. *Progress.* No two ranks wait for each other for ever.
3. *Shared memory.* Every two accesses of different ranks to common bytes of a shared buffer, of which one writes,
   are ordered, and whoever reads more than its share finds the others' shares at the version that it needs.
4. *End.* All ranks leave the same versions of what they have in common.

Ranks are judged in pairs of roles, one pair standing for all pairs of ranks that are alike. A circle of waiting among
three or more unlike roles, of which no two wait for each other, is left to the simulator, which stops at it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from topology.errors import Hazard, ProgramError
from zosim.order import HappensBefore
from zosim.program import (
    Access,
    Collective,
    Instruction,
    Operation,
    Placed,
    Program,
    Recv,
    Send,
    Stream,
)
from zosim.program_set import ProgramSet
from zosim.validate import NUM_UNROLLED_STEPS, absolute, same_contents, validate

_STREAMS = tuple(Stream)


def validate_set(programs: ProgramSet) -> None:
    """Refuse programs of which one could go wrong, alone or beside the others.

    Raises
    ------
    ProgramError
        If a program is invalid, or names what other ranks do not have.
    Hazard
        If one of the rules is broken; the message names the instructions and the ranks.
    """
    for program in programs.programs:
        validate(program)
    sides = [_Side(program) for program in programs.programs]
    for side in sides:
        side.refuse_unordered_collectives()
    for pair in _pairs(programs):
        _check(sides[pair.roles[0]], sides[pair.roles[1]], pair)


@dataclass(frozen=True)
class _Pair:
    """Two roles that meet, with the first two ranks that do.

    Attributes
    ----------
    roles, ranks : tuple of int
    offsets : mapping of str to int
        Groups in which the two are together, with the place of the second less that of the first.
    """

    roles: tuple[int, int]
    ranks: tuple[int, int]
    offsets: Mapping[str, int]

    @property
    def groups(self) -> frozenset[str]:
        """Groups in which the two are together."""
        return frozenset(self.offsets)

    def meets(self, side: int, op: Operation) -> bool:
        """Whether `op`, on the first (0) or the second rank, takes the other of the two."""
        if isinstance(op, Collective):
            return op.group in self.offsets
        if isinstance(op, Send | Recv):
            return self.offsets.get(op.group) == (op.offset if side == 0 else -op.offset)
        return False


def _pairs(programs: ProgramSet) -> Iterator[_Pair]:
    """Yield every unlike way in which two ranks meet, once."""
    seen: set[tuple[tuple[int, int], tuple[tuple[str, int], ...]]] = set()
    representatives: dict[tuple[int, ...], list[int]] = defaultdict(list)
    # Part and place of each rank, in groups that make it meet others.
    places = {
        name: {rank: (part[0], place) for part in parts if len(part) > 1 for place, rank in enumerate(part)}
        for name, parts in sorted(programs.groups.items())
    }
    for rank in range(programs.world_size):
        # Two members of a part with the same role are enough to stand for all of them.
        part = tuple(known[rank][0] for name, known in places.items() if name != "world" and rank in known)
        alike = representatives[programs.roles[rank], *part]
        if len(alike) < 2:
            alike.append(rank)
    ranks = sorted(rank for found in representatives.values() for rank in found)
    for position, first in enumerate(ranks):
        for second in ranks[position + 1 :]:
            offsets = {
                name: known[second][1] - known[first][1]
                for name, known in places.items()
                if first in known and second in known and known[first][0] == known[second][0]
            }
            roles = programs.roles[first], programs.roles[second]
            # How far apart two members of a large group are matters only to messages, which go to neighbours.
            near = tuple((name, max(-2, min(2, offset))) for name, offset in sorted(offsets.items()))
            if (roles, near) not in seen:
                seen.add((roles, near))
                yield _Pair(roles, (first, second), offsets)


class _Side:
    """One role's unrolled run."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.placed = program.unroll(NUM_UNROLLED_STEPS)

    @cached_property
    def index(self) -> dict[tuple[str, int, str], int]:
        """Position of every instruction by part, step and id."""
        return {(item.part, item.step, item.instruction.id): item.index for item in self.placed}

    @cached_property
    def streams(self) -> dict[Stream, list[Placed]]:
        """Instructions of each stream, in order."""
        found: dict[Stream, list[Placed]] = {stream: [] for stream in _STREAMS}
        for item in self.placed:
            found[item.instruction.stream].append(item)
        return found

    @cached_property
    def collectives(self) -> dict[str, list[Placed]]:
        """Collectives of each group, in order."""
        found: dict[str, list[Placed]] = defaultdict(list)
        for item in self.placed:
            if isinstance(item.instruction.op, Collective):
                found[item.instruction.op.group].append(item)
        return found

    @cached_property
    def meetings(self) -> dict[Operation, list[Placed]]:
        """Collectives, sends and receipts of each kind, in order."""
        found: dict[Operation, list[Placed]] = defaultdict(list)
        for item in self.placed:
            if isinstance(item.instruction.op, Collective | Send | Recv):
                found[_kind(item.instruction.op)].append(item)
        return found

    @cached_property
    def positions(self) -> dict[int, int]:
        """How many of its kind come before each of them."""
        return {item.index: at for items in self.meetings.values() for at, item in enumerate(items)}

    @cached_property
    def shared_accesses(self) -> dict[str, list[_Touch]]:
        """Accesses to each shared buffer, in order, steps counted from the beginning."""
        shared = {buffer.name for buffer in self.program.buffers if buffer.shared}
        found: dict[str, list[_Touch]] = defaultdict(list)
        for item in self.placed:
            for access in item.instruction.reads:
                if access.buffer in shared:
                    found[access.buffer].append(_Touch(item, absolute(access, item.step), writes=False))
            for access in item.instruction.writes:
                if access.buffer in shared:
                    found[access.buffer].append(_Touch(item, absolute(access, item.step), writes=True))
        return found

    def refuse_unordered_collectives(self) -> None:
        """Raise if two collectives of one group could start in either order.

        Raises
        ------
        Hazard
            Naming the two.
        """
        if not self.meetings:
            return
        order = HappensBefore(self.program.name, self.placed)
        for kind, items in self.meetings.items():
            for first, second in itertools.pairwise(items):
                if not order.ordered(first.index, second.index):
                    raise Hazard(
                        f"program {self.program.name}: nothing orders {_name(first)} and {_name(second)}, both of "
                        f"kind {kind.kind} in one group",
                        hint="put them on one stream",
                    )


@dataclass(frozen=True)
class _Touch:
    item: Placed
    access: Access
    writes: bool

    def conflicts(self, other: _Touch) -> bool:
        """Whether the two, of different ranks, touch common bytes of which one is written."""
        are_apart = bool(self.access.share) and self.access.share == other.access.share
        return (self.writes or other.writes) and self.access.overlaps(other.access) and not are_apart


def _check(first: _Side, second: _Side, pair: _Pair) -> None:
    for group in sorted(pair.groups):
        _refuse_unlike_collectives(first, second, group, pair)
    for sender, receiver, flipped in ((first, second, False), (second, first, True)):
        _refuse_unlike_messages(sender, receiver, pair, flipped=flipped)
    joint = _Joint((first, second), pair)
    joint.run()
    if "host" in pair.groups:
        for mine, other, flipped in ((first, second, False), (second, first, True)):
            _refuse_shared_hazards(mine, other, joint, flipped=flipped, pair=pair)
    left, right = _versions(first.program), _versions(second.program)
    if any(left[what] != right[what] for what in set(left) & set(right)):
        raise Hazard(
            f"programs of ranks {pair.ranks[0]} and {pair.ranks[1]} promise other contents after the flush",
            hint="every rank must end with the same version of every parameter",
        )


def _versions(program: Program) -> dict[str, tuple[int | None, str]]:
    return {access.what: (access.step, access.point) for access in program.final}


def _kind(op: Operation) -> Operation:
    """Return what collectives of one group, or messages one way, have in common."""
    return Collective("all_gather", op.group) if isinstance(op, Collective) else op


def _partner(op: Operation) -> Operation:
    """Return the kind of what the other rank runs meanwhile."""
    if isinstance(op, Send):
        return Recv(op.group, -op.offset)
    return Send(op.group, -op.offset) if isinstance(op, Recv) else _kind(op)


def _refuse_unlike_messages(sender: _Side, receiver: _Side, pair: _Pair, *, flipped: bool) -> None:
    """Raise unless all that `sender` sends to `receiver` is received as it is sent."""
    source, target = reversed(pair.ranks) if flipped else pair.ranks
    kinds = {op for op in sender.meetings if isinstance(op, Send)}
    kinds |= {Send(op.group, -op.offset) for op in receiver.meetings if isinstance(op, Recv)}
    for kind in sorted(kinds, key=lambda op: (op.group, op.offset)):
        if not pair.meets(1 if flipped else 0, kind):
            continue
        sent, received = sender.meetings.get(kind, []), receiver.meetings.get(_partner(kind), [])
        for one, other in zip(sent, received, strict=False):
            if _message(one.instruction.reads) != _message(other.instruction.writes):
                raise Hazard(
                    f"{_name(one)} on rank {source} sends {_describe(one.instruction.reads)}, but {_name(other)} on rank "
                    f"{target} takes it for {_describe(other.instruction.writes)}",
                    hint="messages between two ranks are taken in the order in which they are sent",
                )
        if len(sent) != len(received):
            raise Hazard(
                f"rank {source} sends {len(sent)} messages to rank {target}, which receives {len(received)}",
                hint="every message needs its receiver",
            )


def _message(accesses: Sequence[Access]) -> list[tuple[str, int | None, str, int]]:
    return [(access.what, access.step, access.point, access.size_bytes) for access in accesses]


def _describe(accesses: Sequence[Access]) -> str:
    return ", ".join(f"{access.describe()} of up to {access.size_bytes} bytes" for access in accesses)


def _refuse_unlike_collectives(first: _Side, second: _Side, group: str, pair: _Pair) -> None:
    mine, others = first.collectives.get(group, []), second.collectives.get(group, [])
    for one, other in zip(mine, others, strict=False):
        if _signature(one.instruction) != _signature(other.instruction):
            raise Hazard(
                f"collectives of {group} do not match: rank {pair.ranks[0]} runs {_name(one)} "
                f"({_sizes(one.instruction)}) where rank {pair.ranks[1]} runs {_name(other)} "
                f"({_sizes(other.instruction)})",
                hint="all members of a group must run the same collectives, of the same sizes, in one order",
            )
    if len(mine) != len(others):
        alone = (mine or others)[min(len(mine), len(others))] if mine and others else (mine or others)[0]
        raise Hazard(
            f"rank {pair.ranks[0]} runs {len(mine)} collectives of {group}, rank {pair.ranks[1]} runs {len(others)}: "
            f"{_name(alone)} has no partner",
            hint="all members of a group must run the same collectives",
        )


def _signature(instruction: Instruction) -> tuple[object, ...]:
    reads = tuple((access.what, access.size_bytes, access.share) for access in instruction.reads)
    return instruction.op, reads, tuple(access.size_bytes for access in instruction.writes)


def _sizes(instruction: Instruction) -> str:
    return f"{instruction.op.kind} of {sum(access.size_bytes for access in instruction.reads)} bytes"


class _Joint:
    """Two ranks side by side: what has happened on both whenever an instruction of one starts."""

    def __init__(self, sides: tuple[_Side, _Side], pair: _Pair) -> None:
        self._sides = sides
        self._pair = pair
        self._clocks: list[dict[int, tuple[int, ...]]] = [{}, {}]
        self._places: list[dict[int, tuple[int, int]]] = [{}, {}]
        self._waiting = [{stream: deque(items) for stream, items in side.streams.items()} for side in sides]
        self._latest: list[dict[Stream, tuple[int, ...]]] = [{}, {}]
        self._num_run = [dict.fromkeys(_STREAMS, 0), dict.fromkeys(_STREAMS, 0)]

    def ordered(self, earlier: tuple[int, int], later: tuple[int, int]) -> bool:
        """Whether instruction `earlier` (side, index) has finished whenever `later` starts."""
        position, count = self._places[earlier[0]][earlier[1]]
        return self._clocks[later[0]][later[1]][position] >= count

    def run(self) -> None:
        """Run both to their ends.

        Raises
        ------
        Hazard
            If they come to wait for each other.
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
            names = " and ".join(_name(item) for item in stuck[:2])
            raise Hazard(
                f"ranks {self._pair.ranks[0]} and {self._pair.ranks[1]} can never go on: {names} wait for each other",
                hint="run collectives in one order on all ranks, and let no two ranks wait for each other's later work",
            )

    def _advance(self, number: int, stream: Stream) -> bool:
        """Run the head of one stream, if what it waits for is done."""
        item = self._waiting[number][stream][0]
        clock = self._clock_before(number, item)
        if clock is None:
            return False
        if not self._pair.meets(number, item.instruction.op):
            self._finish(number, stream, clock)
            return True
        return self._meet(number, stream, clock)

    def _meet(self, number: int, stream: Stream, clock: tuple[int, ...]) -> bool:
        """Run a collective or a message on both sides, if the other is there."""
        other, item = 1 - number, self._waiting[number][stream][0]
        partners = self._sides[other].meetings[_partner(item.instruction.op)]
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
        self._places[number][item.index] = position, count

    def _clock_before(self, number: int, item: Placed) -> tuple[int, ...] | None:
        """Return what has happened when `item` starts; None while something that it waits for has not."""
        stream = item.instruction.stream
        clocks: list[tuple[int, ...] | None] = [
            self._latest[number].get(stream, (0,) * (2 * len(_STREAMS))),
            *(self._clocks[number].get(index) for index in item.after),
        ]
        for group, index in item.after_peers:
            if group in self._pair.groups:
                clocks.append(self._clocks[1 - number].get(self._namesake(number, index)))
        known = [clock for clock in clocks if clock is not None]
        return tuple(map(max, zip(*known, strict=True))) if len(known) == len(clocks) else None

    def _namesake(self, number: int, index: int) -> int:
        """Return the position on the other side of what stands at `index` on this one."""
        wanted = self._sides[number].placed[index]
        try:
            return self._sides[1 - number].index[wanted.part, wanted.step, wanted.instruction.id]
        except KeyError:
            message = (
                f"rank {self._pair.ranks[number]} waits for {_name(wanted)} on rank {self._pair.ranks[1 - number]}, "
                "which has no such instruction"
            )
            raise ProgramError(message, hint="wait only for what every member of the group runs") from None


def _refuse_shared_hazards(mine: _Side, other: _Side, joint: _Joint, *, flipped: bool, pair: _Pair) -> None:
    """Raise if what `mine` does to shared memory is not safe beside what `other` does."""
    here, there = (1, 0) if flipped else (0, 1)
    for buffer, touches in mine.shared_accesses.items():
        others = other.shared_accesses.get(buffer, [])
        for touch in touches:
            earlier = []
            for theirs in filter(touch.conflicts, others):
                if joint.ordered((there, theirs.item.index), (here, touch.item.index)):
                    earlier.append(theirs)
                elif not joint.ordered((here, touch.item.index), (there, theirs.item.index)):
                    raise Hazard(
                        f"nothing orders {_name(touch.item)} on rank {pair.ranks[here]} and {_name(theirs.item)} on "
                        f"rank {pair.ranks[there]}: both touch {buffer}, which they share",
                        hint="make one wait for the other (an entry in its `after` with a group)",
                    )
            _refuse_stale(touch, earlier, pair.ranks[here], pair.ranks[there])


def _refuse_stale(touch: _Touch, earlier: Sequence[_Touch], rank: int, other: int) -> None:
    """Raise if a read of more than a share finds another rank's share at another version."""
    writes = [theirs for theirs in earlier if theirs.writes]
    if touch.writes or not writes or same_contents(writes[-1].access, touch.access):
        return
    step = touch.item.step
    raise Hazard(
        f"{_name(touch.item)} on rank {rank} needs {touch.access.shifted(step).describe()} of {touch.access.buffer}, "
        f"but finds {writes[-1].access.shifted(step).describe()} in the share of rank {other}, left by "
        f"{_name(writes[-1].item)}",
        hint="wait for the peers' write of that version, and let them wait for this read before the next",
    )


def _name(item: Placed) -> str:
    return f"{item.part}[{item.step}]/{item.instruction.id}"
