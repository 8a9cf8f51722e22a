"""What a rank's step takes at least, and how much memory, before its program is lowered in full.

Blocks are alike, so the instructions of a model with two blocks tell those of all: what the first and the second block
add to every stream, buffer and shared resource is known from them. A step is then a max-plus recurrence over visits of
segments, as :mod:`zosim.applications.closed_form.recurrence` is one over instructions. Nothing waits here that does not wait there, so the period
is a lower bound of the closed form's, and with it of the simulated step: peers, contention and dependencies between
distant visits can only add to it. Memory is exact.

Examples
--------
A sketch of the twelve blocks of OPT-125M is made of the instructions of two. With nothing shared it says what the engine says:

>>> from costmodel import read_model_spec
>>> from costmodel.devices.datasheet import datasheet_profile
>>> from topology import load_preset
>>> from zosim.planning.predict import Subject
>>> from zosim.plans import Placement, Residency
>>> topology, model = load_preset("a100-80gb-milan"), read_model_spec("opt-125m")
>>> place, profile = (
...     Placement(topology="a100-80gb-milan", devices=("gpu0",)),
...     datasheet_profile(topology, "gpu0"),
... )
>>> plan = Plan(model=model, batch=1, seq=128, placement=place, residency=Residency(blocks="offloaded"))
>>> sketch = Sketcher(model).sketch(plan, 0, Machine.from_topology(topology, "gpu0", profile))
>>> subject = Subject(plan, topology, profile)
>>> round(sketch.period_s / subject.step_time_s, 9), sketch.footprint == subject.footprint
(1.0, True)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from costmodel.models.model_spec import ModelSpec, block_segment
from topology.limits import whole_number
from zosim.hardware.machine import Activity, Machine
from zosim.lowering import unordered
from zosim.lowering.hazards import connected_by_conflicts
from zosim.lowering.schedule import StepWriter
from zosim.planning.footprint import Footprint, footprint_of
from zosim.planning.visits import STREAMS, Item, Visit, chained_s, period_s, pipelined_s
from zosim.plans import Plan
from zosim.points import BASE
from zosim.program import Program
from zosim.program.instructions import Buffer, Instruction
from zosim.program.operations import Collective, Decode, Recv, Send
from zosim.simulators.shortening import shortened_stages, shortest

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
        self._small = shortest(model)
        self._is_long = self._small is not model
        self._sketches: dict[Hashable, Sketch] = {}
        self._visits: dict[Hashable, tuple[Visit, ...]] = {}
        self._outlines: dict[Hashable, _Outline] = {}
        self._buffers: dict[Hashable, tuple[Buffer, ...]] = {}
        self._activities: dict[Hashable, tuple[Machine, Program, Activity]] = {}

    def pipeline_s(self, plan: Plan, ranks: Sequence[int], machines: Sequence[Machine]) -> float:
        """Return the seconds per step of stages that wait for each other's messages and losses, at least."""
        if not plan.copies_overlap:
            return 0.0
        stages = [
            (self._visits_of(_part(plan, rank), plan, rank, machines[rank]), machines[rank].step_s())
            for rank in ranks
        ]
        return pipelined_s(stages, plan.residency.num_slots)

    def sketch(self, plan: Plan, rank: int, machine: Machine) -> Sketch:
        """Return what `rank` of `plan` takes on `machine`, at least."""
        part, num_slots = _part(plan, rank), plan.residency.num_slots
        # Ranks that do the same on machines alike but for names have one sketch.
        key = part, num_slots, machine.shape
        if key not in self._sketches:
            if (part, num_slots) not in self._buffers:
                self._buffers[part, num_slots] = StepWriter(plan, rank).buffers()
            visits = self._visits_of(part, plan, rank, machine)
            workspace_bytes = self._outlines[part].workspace_bytes
            memory = footprint_of(self._buffers[part, num_slots], workspace_bytes, machine.profile)
            self._sketches[key] = _finished(visits, plan, memory, machine)
        return self._sketches[key]

    def _visits_of(self, part: Hashable, plan: Plan, rank: int, machine: Machine) -> tuple[Visit, ...]:
        """Return the visits of a step on a machine, which the number of slots does not change."""
        key = part, machine.shape
        if key not in self._visits:
            if part not in self._outlines:
                small, standing = self._shortened(plan, rank)
                # Not connected: visits know their order, and only conflicts within one are looked for.
                program = unordered(small, rank)
                workspace_bytes = max((item.work.workspace_bytes for item in program.step), default=0)
                self._outlines[part] = _Outline(
                    program, tuple(_stretches(program, standing)), workspace_bytes
                )
            outline = self._outlines[part]
            self._visits[key] = tuple(
                self._priced(stretch, outline.program, machine) for stretch in outline.stretches
            )
        return self._visits[key]

    def _priced(self, stretch: _Stretch, program: Program, machine: Machine) -> Visit:
        """Return a stretch as a machine does it; activities of equal work are looked up."""
        loads: dict[str, float] = defaultdict(float)
        seconds = []
        for instruction in stretch.instructions:
            # Equal work on one stream takes as long in every block.
            key: Hashable = id(machine), machine.direction(program, instruction), instruction.work
            if isinstance(instruction.op, Send | Recv | Collective):
                # What a message or an exchange takes depends on whom it reaches.
                key = id(machine), instruction.id, id(program)
            if key not in self._activities:
                # With the machine and the program that the key names, which so stay alive.
                self._activities[key] = machine, program, machine.activity(program, instruction)
            activity = self._activities[key][-1]
            seconds.append(activity.seconds)
            for name, amount in activity.loads():
                loads[name] += amount
        return Visit(stretch.block, stretch.count, stretch.items, tuple(seconds), dict(loads))

    def _shortened(self, plan: Plan, rank: int) -> tuple[Plan, dict[str, range]]:
        """Return a plan with fewer blocks, and the blocks that each of those left stands for."""
        # Cuts within one stage fall on certain blocks, which are then unlike the others.
        if not self._is_long or (plan.num_stages == 1 and plan.cuts):
            return plan, {}
        if plan.num_stages > 1:
            return shortened_stages(plan, rank)
        last = self._small.num_blocks - 1
        return plan.model_copy(update={"model": self._small}), {
            block_segment(last): range(last, plan.model.num_blocks)
        }


def _part(plan: Plan, rank: int) -> Hashable:
    """Return what decides what a rank does, apart from the number of slots.

    Of its place in the mesh these are its points, sequences and segments; and among how many ranks.
    """
    stage = (plan.split, plan.segments_of(rank)) if plan.num_stages > 1 else ()
    points = plan.points_of(rank)
    # Slots change the order of visits, not what a visit does.
    residency = plan.residency.model_copy(update={"num_slots": 1})
    return (
        len(points),
        BASE in points,
        len(plan.rows_of(rank)),
        plan.placement.world_size,
        stage,
        plan.num_shares,
        plan.placement.is_on_gpus,
        repr((residency, plan.schedule, plan.directions, plan.weights, plan.low_bits, plan.forward)),
    )


def _finished(visits: Sequence[Visit], plan: Plan, memory: Footprint, machine: Machine) -> Sketch:
    # Every resource has a place, so that loads of machines alike can be added by position.
    loads = dict.fromkeys(machine.capacities, 0.0)
    for visit in visits:
        for name, amount in visit.loads.items():
            loads[name] += amount * visit.count
    step_s = machine.step_s()
    period = (
        period_s(visits, plan.residency.num_slots, step_s)
        if plan.copies_overlap
        else chained_s(visits, step_s)
    )
    num_instructions = sum(len(visit.items) * visit.count for visit in visits)
    return Sketch(period, tuple(loads.values()), memory, num_instructions)


@dataclass(frozen=True)
class _Stretch:
    """Neighbouring instructions of one segment, and the blocks that they stand for."""

    block: int | None
    count: int
    instructions: tuple[Instruction, ...]
    items: tuple[Item, ...]


@dataclass(frozen=True)
class _Outline:
    """What a rank of a plan with few blocks does in a step, on whatever machine, and the largest workspace."""

    program: Program
    stretches: tuple[_Stretch, ...]
    workspace_bytes: int


def _stretches(program: Program, standing: Mapping[str, range]) -> Iterable[_Stretch]:
    """Yield the stretches of a step, in order."""
    for segment, grouped in groupby(program.step, key=lambda item: item.segment):
        instructions = tuple(grouped)
        block = whole_number(segment.partition(".")[2].partition(".")[0])
        blocks = standing.get(segment)
        start, count = (block, 1) if blocks is None else (blocks.start, len(blocks))
        yield _Stretch(start, count, instructions, tuple(_items(program, instructions)))


def _items(program: Program, instructions: Sequence[Instruction]) -> Iterable[Item]:
    position = {instruction.id: number for number, instruction in enumerate(instructions)}
    # Within a visit; what waits across visits, a stream or a slot, is the clock's to know.
    for instruction in connected_by_conflicts((), instructions):
        accesses = (*instruction.reads, *instruction.writes)
        meets = isinstance(instruction.op, Send | Recv | Decode | Collective)
        yield Item(
            STREAMS.index(instruction.stream),
            tuple(position[edge.instruction] for edge in instruction.after),
            any(program.buffer(access.buffer).role in _SLOT_ROLES for access in accesses),
            type(instruction.op) if meets else None,
        )
