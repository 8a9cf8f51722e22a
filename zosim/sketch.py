"""What a rank's step takes at least, and how much memory, before its program is lowered in full.

Blocks are alike, so the instructions of a model with two blocks tell those of all: what the first and the second block
add to every stream, buffer and shared resource is known from them. A step is then a max-plus recurrence over visits of
segments, as :mod:`zosim.recurrence` is one over instructions. Nothing waits here that does not wait there, so the period
is a lower bound of the closed form's, and with it of the simulated step: peers, contention and dependencies between
distant visits can only add to it. Memory is exact.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from costmodel.model_spec import ModelSpec, ParameterGroup, block_segment
from zosim.footprint import Footprint, footprint_of
from zosim.lowering.layout import Layout
from zosim.lowering.step import StepWriter
from zosim.machine import Machine
from zosim.plan import Plan
from zosim.program import Access, Instruction, Program, Stream

_NUM_BLOCKS = 2
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
        is_long = model.num_blocks > _NUM_BLOCKS and are_alike(model)
        self._small = shortened(model) if is_long else model
        self._sketches: dict[Hashable, Sketch] = {}
        self._drafts: dict[Hashable, _Draft] = {}

    def sketch(self, plan: Plan, rank: int, machine: Machine) -> Sketch:
        """Return what `rank` of `plan` takes on `machine`, at least."""
        num_shares = len(plan.groups[plan.residency.share_group][0]) if plan.is_shared_out else 1
        residency = plan.residency.model_copy(update={"num_slots": 1})
        point = (
            machine.shape,
            *_part(plan, rank),
            num_shares,
            repr((residency, plan.runtime, plan.precision)),
        )
        if (point, plan.residency.num_slots) not in self._sketches:
            if point not in self._drafts:
                self._drafts[point] = self._draft(plan, rank, machine)
            made = _finished(self._drafts[point], plan, rank, machine)
            self._sketches[point, plan.residency.num_slots] = made
        return self._sketches[point, plan.residency.num_slots]

    def _draft(self, plan: Plan, rank: int, machine: Machine) -> _Draft:
        """Return what the number of slots does not change."""
        # Stages hold unlike parts of the model.
        small = self._small if plan.mesh.stage == 1 else plan.model
        writer = StepWriter(plan.model_copy(update={"model": small}), rank)
        writer.write_step()
        groups = {name: len(part) for name, parts in plan.groups.items() for part in parts if rank in part}
        program = Program(
            "sketch", writer.layout.buffers(), (), (), tuple(writer.instructions), groups=groups
        )
        left_out = plan.model.num_blocks - small.num_blocks
        return _Draft(
            tuple(_visits(program, machine, last=small.num_blocks - 1, left_out=left_out)),
            max((item.work.workspace_bytes for item in writer.instructions), default=0),
        )


def _part(plan: Plan, rank: int) -> tuple[Hashable, ...]:
    """Return what of a step is a rank's: points, sequences, segments; and among how many ranks."""
    stage = (plan.split, plan.segments_of(rank)) if plan.mesh.stage > 1 else ()
    return len(plan.points_of(rank)), len(plan.rows_of(rank)), plan.placement.world_size, stage


def _finished(draft: _Draft, plan: Plan, rank: int, machine: Machine) -> Sketch:
    loads = dict.fromkeys(machine.capacities, 0.0)
    for visit in draft.visits:
        for name, amount in visit.loads.items():
            loads[name] += amount * visit.count
    return Sketch(
        _period_s(plan, draft.visits, machine.step_s()),
        tuple(loads.values()),
        footprint_of(Layout(plan, rank).buffers(), draft.workspace_bytes, machine.profile),
        sum(len(visit.items) * visit.count for visit in draft.visits),
    )


@dataclass(frozen=True)
class _Item:
    """An instruction of a visit: its stream, its seconds, whom in the visit it waits for, whether it is in a slot."""

    stream: int
    seconds: float
    after: tuple[int, ...]
    in_slot: bool


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


def are_alike(model: ModelSpec) -> bool:
    """Whether all blocks of a model are built alike, and none is cut."""
    blocks: dict[str, list[ParameterGroup]] = defaultdict(list)
    for group in model.groups:
        for segment in group.segments:
            blocks[segment].append(group)
    kinds = {
        tuple(group.model_copy(update={"name": "", "segments": ()}) for group in blocks[block_segment(index)])
        for index in range(model.num_blocks)
    }
    are_whole = set(model.segments) == {"embed", "head", *map(block_segment, range(model.num_blocks))}
    return are_whole and len(kinds) == 1


def shortened(model: ModelSpec) -> ModelSpec:
    """Return a model of which only the first two blocks are left."""
    kept = {"embed", "head", *(block_segment(index) for index in range(_NUM_BLOCKS))}
    groups = tuple(group for group in model.groups if set(group.segments) <= kept)
    # Not model_copy, which would take the cached values along.
    return ModelSpec(**{**dict(model), "num_blocks": _NUM_BLOCKS, "groups": groups})


def _visits(program: Program, machine: Machine, *, last: int, left_out: int) -> Iterable[_Visit]:
    """Yield the visits of a step, in order; the last block stands for those that were left out."""
    for segment, items in groupby(program.step, key=lambda item: item.segment):
        visit = _visit(program, machine, segment, list(items))
        yield replace(visit, count=1 + left_out) if visit.block == last else visit


def _visit(program: Program, machine: Machine, segment: str, instructions: Sequence[Instruction]) -> _Visit:
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

    def begin_step(self, step_s: float) -> None:
        """Let the host read the scalars of the step before: every stream waits for it."""
        end_s = self.streams[_COMPUTE]
        self.streams = [max(free_s, end_s) for free_s in self.streams]
        self.streams[_COMPUTE] = end_s + step_s

    def run(self, visit: _Visit) -> None:
        """Run a visit as often as it stands for, skipping what only repeats."""
        if visit.block is None:
            self._edge_s = self._run_items(visit, self._edge_s)
            return
        block, last = visit.block, visit.block + visit.count
        before: list[float] = []
        shifts: list[float] = []
        while block < last:
            slot = block % len(self._slots)
            self._slots[slot] = self._run_items(visit, self._slots[slot])
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

    def _run_items(self, visit: _Visit, slot_s: float) -> float:
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
