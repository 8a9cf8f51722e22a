"""What a rank's step takes at least, and how much memory, before its program is lowered in full.

Blocks are alike, so the instructions of a model with two blocks tell those of all: what the first and the second block
add to every stream, buffer and shared resource is known from them. A step is then a max-plus recurrence over visits of
segments, as :mod:`zosim.engines.recurrence` is one over instructions. Nothing waits here that does not wait there, so the period
is a lower bound of the closed form's, and with it of the simulated step: peers, contention and dependencies between
distant visits can only add to it. Memory is exact.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from costmodel.model_spec import (
    ModelSpec,
    block_segment,
)
from zosim.instructions import Access, Instruction, Stream
from zosim.lowering.buffers import buffers_of
from zosim.lowering.layout import Layout
from zosim.lowering.step import StepWriter
from zosim.machine import Activity, Machine
from zosim.operations import Collective, Decode, Recv, Send
from zosim.plan import Plan
from zosim.planning.footprint import Footprint, footprint_of
from zosim.planning.shortening import NUM_BLOCKS, are_alike, shortened, shortened_stages
from zosim.program import Program

_NUM_STEPS = 3
_SAME = 1e-12
_STREAMS = tuple(Stream)
_COMPUTE = _STREAMS.index(Stream.COMPUTE)
_SLOT_ROLES = ("slots", "staging")


@dataclass(frozen=True)
class Sketch:
    """One rank of a plan.

    Attributes
    ----------
    period_s : float
        Seconds per step, at least.
    loads : tuple of float
        What a step takes of every resource of the rank's machine, in their order: seconds times rate.
    footprint : Footprint
    num_instructions : int
        Of a step.
    """

    period_s: float
    loads: tuple[float, ...]
    footprint: Footprint
    num_instructions: int


class Sketcher:
    """Makes sketches of plans for one model, the same only once.

    What a rank does depends on how many points and sequences it forwards, not on which, and its time on its machine's
    figures, not on the names of its resources.
    """

    def __init__(self, model: ModelSpec) -> None:
        # Blocks that are unlike each other are written out.
        self._is_long = model.num_blocks > NUM_BLOCKS and are_alike(model)
        self._small = shortened(model) if self._is_long else model
        self._sketches: dict[Hashable, Sketch] = {}
        self._drafts: dict[Hashable, _Draft] = {}
        self._activities: dict[Hashable, tuple[Machine, Activity]] = {}

    def pipeline_s(self, plan: Plan, ranks: Sequence[int], machines: Sequence[Machine]) -> float:
        """Return the seconds per step of stages that wait for each other's messages and losses, at least."""
        if not plan.residency.overlap:
            return 0.0
        stages = [
            _Stage(self._drafted(plan, rank, machines[rank])[0].visits, machines[rank].step_s())
            for rank in ranks
        ]
        return _pipelined_s(plan, stages)

    def sketch(self, plan: Plan, rank: int, machine: Machine) -> Sketch:
        """Return what `rank` of `plan` takes on `machine`, at least."""
        draft, point = self._drafted(plan, rank, machine)
        key = point, plan.residency.num_slots
        if key not in self._sketches:
            self._sketches[key] = _finished(draft, plan, rank, machine)
        return self._sketches[key]

    def _drafted(self, plan: Plan, rank: int, machine: Machine) -> tuple[_Draft, Hashable]:
        num_shares = len(plan.groups[plan.residency.share_group][0]) if plan.is_shared_out else 1
        residency = plan.residency.model_copy(update={"num_slots": 1})
        point = (
            machine.shape,
            *_part(plan, rank),
            num_shares,
            repr((residency, plan.runtime, plan.precision)),
        )
        if point not in self._drafts:
            self._drafts[point] = self._draft(plan, rank, machine)
        return self._drafts[point], point

    def _draft(self, plan: Plan, rank: int, machine: Machine) -> _Draft:
        """Return what the number of slots does not change."""
        small, standing = self._shortened(plan, rank)
        writer = StepWriter(small, rank)
        writer.write_step()
        groups = {name: len(part) for name, parts in plan.groups.items() for part in parts if rank in part}
        program = Program(
            "sketch", buffers_of(writer.layout), (), (), tuple(writer.instructions), groups=groups
        )
        return _Draft(
            tuple(_visits(program, _Costs(machine, self._activities), standing)),
            max((item.work.workspace_bytes for item in writer.instructions), default=0),
        )

    def _shortened(self, plan: Plan, rank: int) -> tuple[Plan, dict[str, range]]:
        """Return a plan with fewer blocks, and the blocks that each of those left stands for."""
        if not self._is_long or (plan.mesh.stage == 1 and plan.split.cuts):
            return plan, {}
        if plan.mesh.stage > 1:
            return shortened_stages(plan, rank)
        last = self._small.num_blocks - 1
        return plan.model_copy(update={"model": self._small}), {
            block_segment(last): range(last, plan.model.num_blocks)
        }


def _part(plan: Plan, rank: int) -> tuple[Hashable, ...]:
    """Return what of a step is a rank's: points, sequences, segments; and among how many ranks."""
    stage = (plan.split, plan.segments_of(rank)) if plan.mesh.stage > 1 else ()
    points = plan.points_of(rank)
    return len(points), "" in points, len(plan.rows_of(rank)), plan.placement.world_size, stage


def _finished(draft: _Draft, plan: Plan, rank: int, machine: Machine) -> Sketch:
    loads = dict.fromkeys(machine.capacities, 0.0)
    for visit in draft.visits:
        for name, amount in visit.loads.items():
            loads[name] += amount * visit.count
    return Sketch(
        _period_s(plan, draft.visits, machine.step_s()),
        tuple(loads.values()),
        footprint_of(buffers_of(Layout(plan, rank)), draft.workspace_bytes, machine.profile),
        sum(len(visit.items) * visit.count for visit in draft.visits),
    )


@dataclass(frozen=True)
class _Item:
    """An instruction of a visit.

    Attributes
    ----------
    stream : int
    seconds : float
    after : tuple of int
        Whom in the visit it waits for.
    in_slot : bool
        Whether it works in a slot.
    meets : type or None
        Send, Recv, Decode or Collective, if it is one: others take part in it, or what they sent.
    """

    stream: int
    seconds: float
    after: tuple[int, ...]
    in_slot: bool
    meets: type | None = None


@dataclass(frozen=True)
class _Visit:
    """Neighbouring instructions of one segment; those of a block stand for `count` blocks, one after the other."""

    block: int | None
    items: tuple[_Item, ...]
    loads: dict[str, float]
    count: int = 1


@dataclass(frozen=True)
class _Draft:
    """The visits of a step, and the largest workspace."""

    visits: tuple[_Visit, ...]
    workspace_bytes: int


@dataclass(frozen=True)
class _Costs:
    """Activities of a machine, those of equal work looked up; each keeps the machine that its key names."""

    machine: Machine
    known: dict[Hashable, tuple[Machine, Activity]]

    def activity(self, program: Program, instruction: Instruction) -> Activity:
        """Return an instruction's activity."""
        if isinstance(instruction.op, Send | Recv | Collective):
            return self.machine.activity(program, instruction)
        key = id(self.machine), self.machine.direction(program, instruction), instruction.work
        if key not in self.known:
            self.known[key] = self.machine, self.machine.activity(program, instruction)
        return self.known[key][1]


def _visits(program: Program, machine: _Costs, standing: Mapping[str, range]) -> Iterable[_Visit]:
    """Yield the visits of a step, in order, each with the blocks that it stands for."""
    for segment, items in groupby(program.step, key=lambda item: item.segment):
        visit, blocks = _visit(program, machine, segment, list(items)), standing.get(segment)
        yield visit if blocks is None else replace(visit, block=blocks.start, count=len(blocks))


def _visit(program: Program, machine: _Costs, segment: str, instructions: Sequence[Instruction]) -> _Visit:
    loads: dict[str, float] = defaultdict(float)
    items = []
    for position, instruction in enumerate(instructions):
        activity = machine.activity(program, instruction)
        for name, use in activity.uses:
            loads[name] += use * activity.bound * activity.seconds
        items.append(
            _Item(
                _STREAMS.index(instruction.stream),
                activity.seconds,
                tuple(_conflicts(instructions[:position], instruction)),
                any(
                    program.buffer(access.buffer).role in _SLOT_ROLES
                    for access in (*instruction.reads, *instruction.writes)
                ),
                type(instruction.op)
                if isinstance(instruction.op, Send | Recv | Decode | Collective)
                else None,
            )
        )
    number = segment.partition(".")[2].partition(".")[0]
    block = int(number) if number.isdecimal() else None
    return _Visit(block, tuple(items), dict(loads))


def _conflicts(before: Sequence[Instruction], later: Instruction) -> Iterable[int]:
    """Yield the positions of the instructions on other streams that `later` must come after."""
    for position, earlier in enumerate(before):
        if earlier.stream != later.stream and (
            _meet(earlier.writes, (*later.reads, *later.writes)) or _meet(earlier.reads, later.writes)
        ):
            yield position


def _meet(some: Iterable[Access], others: Iterable[Access]) -> bool:
    return any(access.overlaps(other) for access in some for other in others)


def _period_s(plan: Plan, visits: Sequence[_Visit], step_s: float) -> float:
    """Return the seconds from the end of one step to that of the next."""
    if not plan.residency.overlap:
        return _chained_s(visits, step_s)
    clock = _Clock(plan.residency.num_slots)
    ends = []
    for _ in range(_NUM_STEPS):
        clock.begin_step(step_s)
        for visit in visits:
            clock.run(visit)
        ends.append(clock.streams[_COMPUTE])
    return ends[-1] - ends[-2]


@dataclass(frozen=True)
class _Stage:
    """One rank of a pipeline."""

    visits: tuple[_Visit, ...]
    step_s: float


@dataclass
class _Peers:
    """When a stage's peers have sent it each message and come to the exchange, and when it has."""

    arrivals: list[float]
    exchange_s: float = 0.0
    sent: list[float] = field(default_factory=list)
    came_s: float = 0.0
    received: list[float] = field(default_factory=list)
    num_decoded: int = 0

    def not_before(self, item: _Item) -> float:
        """Return when an instruction has what others sent."""
        if item.meets is not Decode:
            return 0.0
        self.num_decoded += 1
        return self.received[self.num_decoded - 1]

    def met(self, item: _Item, end_s: float) -> float:
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


def _pipelined_s(plan: Plan, stages: Sequence[_Stage]) -> float:
    """Return the seconds from the end of one step to that of the next, of the stage that ends last."""
    clocks = [_Clock(plan.residency.num_slots) for _ in stages]
    ends: list[list[float]] = []
    for _ in range(_NUM_STEPS):
        # Once to learn when all have come to the exchange, and once with what they wait for there.
        exchange_s = 0.0
        for is_known in (False, True):
            arrivals: list[float] = []
            after = [clock.copy() for clock in clocks]
            came: list[float] = []
            for stage, clock in zip(stages, after, strict=True):
                peers = _Peers(arrivals, exchange_s if is_known else 0.0)
                clock.begin_step(stage.step_s)
                for visit in stage.visits:
                    clock.run(visit, peers)
                arrivals = peers.sent
                came.append(peers.came_s)
            exchange_s = max(came)
        clocks = after
        ends.append([clock.streams[_COMPUTE] for clock in clocks])
    return float(max(last - before for before, last in zip(ends[-2], ends[-1], strict=True)))


def _chained_s(visits: Sequence[_Visit], step_s: float) -> float:
    """Return the period of a step of which every instruction waits for the one before.

    What is listed before the first computation runs while the host prepares that.
    """
    items = [(item, visit.count) for visit in visits for item in visit.items]
    first = next(position for position, (item, _) in enumerate(items) if item.stream == _COMPUTE)
    seconds = [item.seconds * count for item, count in items]
    return max(step_s, sum(seconds[:first])) + sum(seconds[first:])


class _Clock:
    """When every stream is free again, and every slot."""

    def __init__(self, num_slots: int) -> None:
        self.streams = [0.0] * len(_STREAMS)
        self._slots = [0.0] * num_slots
        self._edge_s = 0.0

    def copy(self) -> _Clock:
        """Return another clock that shows the same."""
        made = _Clock(0)
        made.streams, made._slots, made._edge_s = self.streams.copy(), self._slots.copy(), self._edge_s
        return made

    def begin_step(self, step_s: float) -> None:
        """Let the host read the scalars of the step before: every stream waits for it."""
        end_s = self.streams[_COMPUTE]
        self.streams = [max(free_s, end_s) for free_s in self.streams]
        self.streams[_COMPUTE] = end_s + step_s

    def run(self, visit: _Visit, peers: _Peers | None = None) -> None:
        """Run a visit as often as it stands for, skipping what only repeats."""
        if visit.block is None:
            self._edge_s = self._run_items(visit, self._edge_s, peers)
            return
        block, last = visit.block, visit.block + visit.count
        before: list[float] = []
        shifts: list[float] = []
        while block < last:
            slot = block % len(self._slots)
            self._slots[slot] = self._run_items(visit, self._slots[slot], peers)
            block += 1
            if (block - visit.block) % len(self._slots) == 0:
                state = [*self.streams, *self._slots]
                now = [a - b for a, b in zip(state, before, strict=True)] if before else []
                rounds = (last - block) // len(self._slots)
                if now and rounds and _is_uniform(now, shifts):
                    self._shift(max(now) * rounds, now)
                    block += rounds * len(self._slots)
                before, shifts = state, now

    def _shift(self, seconds: float, moving: Sequence[float]) -> None:
        state = [*self.streams, *self._slots]
        moved = [at + seconds if moves > 0 else at for at, moves in zip(state, moving, strict=True)]
        self.streams, self._slots = moved[: len(self.streams)], moved[len(self.streams) :]

    def _run_items(self, visit: _Visit, slot_s: float, peers: _Peers | None) -> float:
        """Run a visit once, in a slot that is free from `slot_s` on, and return when it is free again."""
        streams = self.streams
        ends: list[float] = []
        left_s, is_first = slot_s, True
        for item in visit.items:
            start_s = streams[item.stream]
            for position in item.after:
                start_s = max(start_s, ends[position])
            if item.in_slot and is_first:
                start_s, is_first = max(start_s, slot_s), False
            if peers is not None and item.meets is not None:
                start_s = max(start_s, peers.not_before(item))
                end_s = peers.met(item, start_s + item.seconds)
            else:
                end_s = start_s + item.seconds
            streams[item.stream] = end_s
            ends.append(end_s)
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
