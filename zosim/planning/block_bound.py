"""What a rank's step takes at least, and how much memory, before its program is lowered in full.

Blocks are alike, so the instructions of a model with two blocks tell those of all: what the first and the second block
add to every stream, buffer and shared resource is known from them. A step is then a graph in which a block is a position
(:mod:`zosim.planning.block_graph`). Nothing waits here that does not wait in the program's own graph. So the period
is a lower bound of the closed form's, and with it of the simulated step. Peers, contention and dependencies between
distant blocks can only add to it. Memory is exact.

The lower bound of the twelve blocks of OPT-125M is made of the instructions of two. With nothing shared it says what the simulator says:

>>> from costmodel import read_model_spec
>>> from costmodel.devices.datasheet import datasheet_profile
>>> from topology import load_preset
>>> from zosim.planning.predict import PlannedRun
>>> from zosim.plans import Placement, Residency
>>> topology, model = load_preset("a100-80gb-milan"), read_model_spec("opt-125m")
>>> placement, profile = (
...     Placement(topology="a100-80gb-milan", devices=("gpu0",)),
...     datasheet_profile(topology, "gpu0"),
... )
>>> plan = Plan(model=model, batch=1, seq=128, placement=placement, residency=Residency(blocks="offloaded"))
>>> bound = BlockBounder(model).bound(plan, 0, Machine.from_topology(topology, "gpu0", profile))
>>> planned = PlannedRun(plan, topology, profile)
>>> round(bound.period_s / planned.step_time_s, 9), bound.footprint == planned.footprint
(1.0, True)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, groupby
from math import ceil, inf
from operator import mul
from typing import NamedTuple

from costmodel.estimate import OperationCost, estimate
from costmodel.models.model_spec import HEAD, ModelSpec, block_segment
from costmodel.work import Work
from topology.limits import whole_number
from zosim.eval_points import BASE, EvalPoint
from zosim.hardware.machine import Activity, Machine
from zosim.lowering import unordered
from zosim.lowering.hazards import connected_by_conflicts
from zosim.lowering.rank import Rank
from zosim.lowering.schedule import StepWriter
from zosim.planning.block_graph import (
    MOVES,
    REACH,
    BlockGraph,
    Execution,
    Seconds,
    StageStep,
    chained_s,
    period_s,
    written_out,
)
from zosim.planning.footprint import Footprint, footprint_of
from zosim.plans import Plan, Residency
from zosim.program import Program
from zosim.program.instructions import DISK_STREAMS, Access, Buffer, Instruction, Phase, Stream
from zosim.program.operations import Cast, Collective, Forward, Recv, Sample, Send
from zosim.program.program_set import ProgramSet
from zosim.program.step_graph import Edge
from zosim.simulators.fold import fold
from zosim.simulators.shortening import NUM_BLOCKS, shortened_stages, shortest, with_blocks
from zosim.simulators.world import World

_STAGING_ROLES = ("staging buffers", "transfer buffers")


_ALIKE = {"num_resident_blocks": None, "num_disk_blocks": None}
"""Of a residency where all blocks are alike."""


@dataclass(frozen=True)
class BlockBound:
    """One rank of a plan."""

    period_s: float  # seconds per step, at least
    # What a step takes of every resource of the rank's machine, in their order: seconds times rate.
    loads: tuple[float, ...]
    # Of these, what uploads take that nothing lets begin before losses are exchanged.
    loads_behind: tuple[float, ...]
    # Seconds of computation in a step until losses are exchanged; infinite where they are not.
    computed_s: float
    footprint: Footprint
    num_instructions: int


class BlockBounder:
    """Makes lower bounds of plans for one model, the same only once.

    What a rank does depends on how many points and sequences it forwards, not on which. Its time depends on its machine's
    figures, not on the names of its resources. So ranks and plans that agree in these share one bound.
    """

    def __init__(self, model: ModelSpec) -> None:
        self._model = model
        # Blocks that are unlike each other are written out.
        self._is_long = shortest(model) is not model
        self._numbers: dict[Hashable, int] = {}
        self._machines: dict[int, tuple[Machine, int, int]] = {}
        self._known_bounds: dict[Hashable, BlockBound] = {}
        self._two_blocks: dict[Hashable, _TwoBlocks] = {}
        self._tallies: dict[Hashable, _Tally] = {}
        self._paces: dict[Hashable, _Pace] = {}
        self._periods: dict[Hashable, float] = {}
        self._buffers: dict[Hashable, tuple[Buffer, ...]] = {}
        self._footprints: dict[Hashable, Footprint] = {}
        self._losses: dict[Hashable, Work] = {}
        self._loss_s: dict[Hashable, float] = {}
        self._activities: dict[Hashable, tuple[Machine, Program, Activity]] = {}
        self._costs: dict[Hashable, OperationCost] = {}
        self._passes_s: dict[Hashable, dict[tuple[EvalPoint, ...], float]] = {}
        self._pipelines: dict[Hashable, tuple[list[StageStep], float]] = {}
        self._few_blocks: dict[int, ModelSpec] = {}

    def pipeline_s(self, plan: Plan, ranks: Sequence[int], machines: Sequence[Machine]) -> float:
        """Return the seconds per step of stages that wait for each other's messages and losses, at least."""
        if not plan.copies_overlap:
            return 0.0
        stages = [self._stage(plan, rank, machines[rank], self._does(plan, rank))[0] for rank in ranks]
        # With the graphs and the seconds that the key names, which so stay alive.
        key = tuple((id(stage.graph), id(stage.seconds), stage.step_s) for stage in stages)
        if key not in self._pipelines:
            self._pipelines[key] = stages, period_s(stages)
        return self._pipelines[key][1]

    def loss_s(self, plan: Plan, rank: int, machine: Machine) -> float:
        """Return the seconds of one forward of the head, whose loss is taken as `plan` says."""
        key = len(plan.rows_of(rank)), plan.forward, plan.weights, plan.low_bits, self._alone(machine)[1]
        if key not in self._loss_s:
            self._loss_s[key] = estimate(StepWriter(plan, rank).loss_work(), machine.profile).seconds
        return self._loss_s[key]

    def passes_s(self, plan: Plan, rank: int, machine: Machine) -> float:
        """Return the seconds of a step's passes over the parameters of blocks, as far as ranks at some of its points were bounded."""
        own = set(plan.eval_points_of(rank))
        known = self._passes_s.get(_passes(plan, machine), {})
        return max((seconds for points, seconds in known.items() if own.issuperset(points)), default=0.0)

    def bound(self, plan: Plan, rank: int, machine: Machine) -> BlockBound:
        """Return what `rank` of `plan` takes on `machine`, at least."""
        does = self._does(plan, rank)
        # Ranks that do the same on machines alike but for names have one bound.
        key = does, self._alone(machine)[0]
        if key not in self._known_bounds:
            stage, pace = self._stage(plan, rank, machine, does)
            period_key = does, self._alone(machine)[1]
            if period_key not in self._periods:
                self._periods[period_key] = period_s([stage]) if plan.copies_overlap else chained_s(stage)
                if plan.num_stages == 1:
                    # They are the same whatever is forwarded, so they tell plans of other meshes something.
                    known = self._passes_s.setdefault(_passes(plan, machine), {})
                    known[plan.eval_points_of(rank)] = self._two_blocks[does.role].passes_s(stage.seconds)
            loads, behind = self._loads(self._tallies[does.of_blocks], self._two_blocks[does.role], machine)
            # The first blocks come up into buffers that are free by then.
            num_early = does.num_staging_buffers + NUM_BLOCKS
            num_offloaded = plan.residency.num_offloaded(plan.model.num_blocks) or 1
            fraction = max(0.0, 1 - num_early / num_offloaded)
            self._known_bounds[key] = BlockBound(
                self._periods[period_key],
                loads,
                tuple(amount * fraction for amount in behind),
                pace.computed_s,
                self._footprint(plan, rank, machine, does),
                self._tallies[does.of_blocks].num_instructions,
            )
        return self._known_bounds[key]

    def few_blocks(self, plan: Plan, rank: int, alike: Hashable) -> _TwoBlocks:
        """Return what a rank does with few blocks, with its loss as the plan takes it; `alike` tells it from those that do otherwise."""
        role = _role(plan, rank), alike, plan.forward.loss_chunk_tokens
        return self._two_blocks_of(plan, rank, role, plan)

    def footprint(self, plan: Plan, rank: int, machine: Machine) -> Footprint:
        """Return the memory that `rank` of `plan` takes on `machine`."""
        return self._footprint(plan, rank, machine, self._does(plan, rank))

    def _footprint(self, plan: Plan, rank: int, machine: Machine, does: _Does) -> Footprint:
        key = does, id(machine.profile)
        if key not in self._footprints:
            loss = self._loss_work(plan, rank, does)
            workspace_bytes = self._two_blocks_of(plan, rank, does.role).workspace_bytes(loss)
            whole = does._replace(loss_chunk_tokens=None)
            if whole not in self._buffers:
                self._buffers[whole] = tuple(self._all_buffers(plan, rank))
            self._footprints[key] = footprint_of(self._buffers[whole], workspace_bytes, machine.profile)
        return self._footprints[key]

    def _does(self, plan: Plan, rank: int) -> _Does:
        """Return what a rank does, with a number for its role: the same one for equal roles, which are long."""
        role = _role(plan, rank)
        return _Does(
            self._numbers.setdefault(role, len(self._numbers)),
            _shares(plan, rank),
            plan.forward.loss_chunk_tokens,
            plan.residency.num_staging_buffers,
        )

    def _alone(self, machine: Machine) -> tuple[int, int]:
        """Return numbers for what activities take alone on a machine, and for their seconds."""
        if id(machine) not in self._machines:
            alone, alone_s = (
                self._numbers.setdefault(key, len(self._numbers)) for key in (machine.alone, machine.alone_s)
            )
            self._machines[id(machine)] = machine, alone, alone_s  # which so stays alive
        return self._machines[id(machine)][1:]

    def _two_blocks_of(self, plan: Plan, rank: int, role: Hashable, taken: Plan | None = None) -> _TwoBlocks:
        if role not in self._two_blocks:
            # Not connected: executions know their order, and only conflicts within one are looked for.
            small, standing = self._shortened(taken or _at_once(plan), rank)
            # Blocks of stages are unlike each other: messages come and go with the first and the last.
            is_ahead = plan.perturbations.sampled_ahead and plan.num_stages == 1
            self._two_blocks[role] = _TwoBlocks(unordered(small, rank), standing, is_ahead=is_ahead)
        return self._two_blocks[role]

    def _all_buffers(self, plan: Plan, rank: int) -> Iterator[Buffer]:
        """Yield the buffers of a rank; where blocks are alike, one that stays and the last that moves stand for all others."""
        residency, num_blocks = plan.residency, plan.model.num_blocks
        num_moving = residency.num_offloaded(num_blocks) or num_blocks
        num_staying, num_few = num_blocks - num_moving, residency.num_staging_buffers + 1
        is_plain = self._is_long and plan.num_stages == 1 and not plan.split_points and not plan.uses_disks
        if not is_plain or num_few >= num_moving:
            yield from StepWriter(plan, rank).buffers()
            return
        few = num_few + (num_staying > 0)
        residency = residency.model_copy(update={"num_resident_blocks": 1 if num_staying else None})
        buffers = StepWriter(
            plan.model_copy(update={"model": self._with_few(few), "residency": residency}), rank
        ).buffers()
        if Rank(plan, rank).is_full_pass and any(buffer.role == "copies" for buffer in buffers):
            # One buffer holds a copy of the whole model.
            yield from StepWriter(plan, rank).buffers()
            return
        # The first block stays where one does.
        standing = {f".{block_segment(few - 1)}.": num_moving - num_few + 1}
        if num_staying:
            standing[f".{block_segment(0)}."] = num_staying
        for buffer in buffers:
            count = next((n for name, n in standing.items() if name in f".{buffer.name}."), 1)
            yield replace(buffer, size_bytes=count * buffer.size_bytes)

    def _with_few(self, num_blocks: int) -> ModelSpec:
        """Return the model with its first blocks alone."""
        if num_blocks not in self._few_blocks:
            self._few_blocks[num_blocks] = with_blocks(self._model, range(num_blocks))
        return self._few_blocks[num_blocks]

    def _stage(self, plan: Plan, rank: int, machine: Machine, does: _Does) -> tuple[StageStep, _Pace]:
        """Return who waits for whom in a step of a rank with what its instructions take.

        Of these the number of staging buffers changes the first alone, and chunks of the loss what the head's forwards take.
        """
        two_blocks = self._two_blocks_of(plan, rank, does.role)
        if does.of_blocks not in self._tallies:
            loss = self._loss_work(plan, rank, does)
            self._tallies[does.of_blocks] = _Tally(two_blocks, does.shares, loss, machine)
        key = does.of_blocks, self._alone(machine)[1]
        if key not in self._paces:
            tally = self._tallies[does.of_blocks]
            alone_s = [self._activity(item, two_blocks.program, machine).seconds for item in tally.items]
            # Where it is not known which blocks come from elsewhere, nothing is known to wait for that.
            is_known = _is_written_out(plan)
            seconds = [
                s if is_known or does.shares.of(item) == 1 else 0.0
                for s, item in zip(alone_s, tally.items, strict=True)
            ]
            self._paces[key] = _Pace(
                [[seconds[number] for number in numbers] for numbers in tally.numbers],
                sum(map(mul, alone_s, tally.computed)) if tally.is_exchanged else inf,
            )
        pace = self._paces[key]
        return StageStep(_graph(plan, two_blocks, does.shares), pace.seconds, machine.step_s()), pace

    def _loads(
        self, tally: _Tally, two_blocks: _TwoBlocks, machine: Machine
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return what a step takes of every resource of a machine, and what of it behind the exchange of losses."""
        # Every resource has a place, so that loads of machines alike can be added by position.
        loads = dict.fromkeys(machine.capacities, 0.0)
        behind = dict(loads)
        for item, count, count_behind in zip(tally.items, tally.counts, tally.behind, strict=True):
            for name, amount in self._activity(item, two_blocks.program, machine).loads():
                loads[name] += amount * count
                behind[name] += amount * count_behind
        return tuple(loads.values()), tuple(behind.values())

    def _loss_work(self, plan: Plan, rank: int, does: _Does) -> Work | None:
        """Return the work of a forward of the head that takes the loss in chunks; None for a loss at once."""
        if (num_tokens := does.loss_chunk_tokens) is None:
            return None
        if (does.role, num_tokens) not in self._losses:
            self._losses[does.role, num_tokens] = StepWriter(plan, rank).loss_work()
        return self._losses[does.role, num_tokens]

    def _activity(self, instruction: Instruction, program: Program, machine: Machine) -> Activity:
        # Equal work on one stream takes as long in every block.
        key: Hashable = id(machine), machine.direction(program, instruction), instruction.work
        if isinstance(instruction.op, Send | Recv | Collective):
            # What a message or an exchange takes depends on whom it reaches.
            key = id(machine), instruction.id, id(program)
        if key not in self._activities:
            # With the machine and the program that the key names, which so stay alive.
            activity = machine.activity(program, instruction, known=self._costs)
            self._activities[key] = machine, program, activity
        return self._activities[key][-1]

    def _shortened(self, plan: Plan, rank: int) -> tuple[Plan, dict[str, range]]:
        """Return a plan with fewer blocks, all where the furthest is, and the blocks that each of those left stands for."""
        residency = plan.residency.model_copy(update=_ALIKE)
        plan = plan.model_copy(update={"residency": residency})
        # Split points within one stage fall on certain blocks, which are then unlike the others.
        if not self._is_long or (plan.num_stages == 1 and plan.split_points):
            return plan, {}
        if plan.num_stages > 1:
            return shortened_stages(plan, rank)
        # What is drawn ahead meets that of two blocks before, in one of two halves that end as they do in the whole. The first is unlike.
        num_blocks = plan.model.num_blocks
        kept = REACH + 2 + num_blocks % 2 if plan.perturbations.sampled_ahead else NUM_BLOCKS
        last = min(kept, num_blocks) - 1
        small = plan.model_copy(update={"model": self._with_few(last + 1)})
        return small, {block_segment(last): range(last, num_blocks)}


def whole_world(plan: Plan, bounder: BlockBounder, machines: Sequence[Machine]) -> World | None:
    """Return one rank of each class, as a simulation folds them, with all blocks written out from few; None where few do not tell all.

    Programs of few blocks are folded, and those that are left are written out. What an instruction waits for and what it takes is as in the
    program that the plan is lowered to; what it touches is not.
    """
    if plan.num_stages > 1 or plan.split_points or plan.uses_disks or not plan.copies_overlap:
        return None
    # What is drawn ahead of full passes waits for the pass before, beyond forwards.
    if plan.perturbations.sampled_ahead and plan.is_full_pass:
        return None
    num_blocks, residency = plan.model.num_blocks, plan.residency
    # With fewer blocks a copy from the host's memory would wait for the last one to it.
    if plan.is_offloaded and residency.num_offloaded(num_blocks) <= residency.num_staging_buffers:
        return None
    # Ranks that agree in these do the same.
    sizes = [{rank: len(part) for part in parts for rank in part} for parts in plan.process_groups.values()]
    alike = [
        (plan.eval_points_of(rank), len(plan.rows_of(rank)), *(of[rank] for of in sizes))
        for rank in range(plan.placement.world_size)
    ]
    few = {key: bounder.few_blocks(plan, alike.index(key), key) for key in dict.fromkeys(alike)}
    roles = {key: number for number, key in enumerate(few)}
    programs = ProgramSet(
        tuple(each.program for each in few.values()),
        tuple(map(roles.__getitem__, alike)),
        plan.process_groups,
    )
    world = fold(World.of(programs, machines))
    written: dict[object, tuple[Program, dict[str, str]]] = {}
    templates = []
    for rank, template in zip(world.numbers, world.templates, strict=True):
        two_blocks = few[alike[rank]]
        if alike[rank] not in written:
            step, like = written_out(two_blocks.graph(residency.num_staging_buffers, (residency, num_blocks)))
            written[alike[rank]] = replace(template.program, step=step), like
        program, like = written[alike[rank]]
        activities: dict[tuple[Phase, str], Activity] = {
            ("step", own): template.activities["step", other] for own, other in like.items()
        }
        templates.append(replace(template, program=program, activities=activities))
    return replace(world, templates=tuple(templates))


def with_few_blocks(plan: Plan) -> Plan:
    """Return a plan with as many blocks as tell all that blocks do to each other; itself where that is not known.

    A block meets those beside it, and those in its staging buffer. Of blocks that stay among those that move about as large a share is kept.
    """
    num_offloaded, residency = 2 * plan.residency.num_staging_buffers + 1, plan.residency
    num_blocks = num_offloaded
    if kept := residency.num_resident_blocks:
        num_blocks += ceil(num_offloaded * kept / (plan.model.num_blocks - kept))
        residency = residency.model_copy(update={"num_resident_blocks": num_blocks - num_offloaded})
    is_plain = plan.num_stages == 1 and not plan.split_points and not plan.uses_disks
    if not is_plain or num_blocks >= plan.model.num_blocks or shortest(plan.model) is plan.model:
        return plan
    few = with_blocks(plan.model, range(num_blocks))
    return plan.model_copy(update={"model": few, "residency": residency})


def _role(plan: Plan, rank: int) -> Hashable:
    """Return what decides what a rank does, apart from the number of staging buffers and where single blocks live.

    Of its position in the mesh these are its points, sequences and segments; and among how many ranks.
    """
    stage = (plan.split, plan.segments_of(rank)) if plan.num_stages > 1 else ()
    eval_points = plan.eval_points_of(rank)
    # Staging buffers change the order of blocks, not what is done for one; chunks of the loss what the head takes alone.
    residency = plan.residency.model_copy(update={"num_staging_buffers": 1, **_ALIKE})
    return (
        len(eval_points),
        BASE in eval_points,
        len(plan.rows_of(rank)),
        plan.placement.world_size,
        stage,
        plan.num_shares,
        plan.placement.is_on_gpus,
        (residency, plan.schedule, plan.perturbations, plan.weights, plan.low_bits, _at_once(plan).forward),
    )


def _passes(plan: Plan, machine: Machine) -> Hashable:
    """Return what decides, with its points, how long a rank of a plan of one stage passes over the parameters of its blocks."""
    # Whether a block stays, and how many buffers there are, changes no pass over it.
    residency = plan.residency.model_copy(update={"num_staging_buffers": 1, **_ALIKE})
    axes = residency, plan.schedule, plan.perturbations, plan.weights, plan.low_bits, plan.forward
    return axes, id(machine.profile)


def _block_number(segment: str) -> int | None:
    return whole_number(segment.partition(".")[2].partition(".")[0])


class _Shares(NamedTuple):
    """Shares of the blocks of a rank: those that do not stay on the device, and those that lie on a drive."""

    offloaded: float
    on_disk: float

    def of(self, instruction: Instruction) -> float:
        """Return the share of the blocks that have such an instruction."""
        if instruction.stream in DISK_STREAMS:
            return self.on_disk
        is_move = instruction.label in MOVES and _block_number(instruction.segment) is not None
        return self.offloaded if is_move else 1.0


def _shares(plan: Plan, rank: int) -> _Shares:
    residency, num_blocks = plan.residency, plan.model.num_blocks
    if residency.num_resident_blocks is None and not plan.uses_disks:
        return _Shares(1.0, 0.0)
    own = [block for segment in plan.segments_of(rank) if (block := _block_number(segment)) is not None]
    if not own:
        return _Shares(1.0, 0.0)
    offloaded = sum(residency.offloaded(block, num_blocks) is not None for block in own)
    on_disk = sum(residency.on_disk(block, num_blocks) is not None for block in own)
    return _Shares(offloaded / len(own), on_disk / len(own))


def _is_written_out(plan: Plan) -> bool:
    """Whether it is known of each block whether it stays: stages, and drives, would have patterns of their own."""
    return plan.residency.num_resident_blocks is not None and plan.num_stages == 1 and not plan.uses_disks


def _graph(plan: Plan, two_blocks: _TwoBlocks, shares: _Shares) -> BlockGraph:
    num_staging_buffers = plan.residency.num_staging_buffers
    if _is_written_out(plan):
        return two_blocks.graph(num_staging_buffers, (plan.residency, plan.model.num_blocks))
    # A buffer comes round after as many blocks that move, among which are those that stay.
    return two_blocks.graph(ceil(num_staging_buffers / (shares.offloaded or 1)), None)


def _at_once(plan: Plan) -> Plan:
    """Return a plan whose loss is taken of all tokens at once."""
    if plan.forward.loss_chunk_tokens is None:
        return plan
    return plan.model_copy(update={"forward": plan.forward.model_copy(update={"loss_chunk_tokens": None})})


def _takes_loss(instruction: Instruction) -> bool:
    return isinstance(instruction.op, Forward) and instruction.segment == HEAD


class _Does(NamedTuple):
    """What a rank does: its role, by number, and what is known beside it."""

    role: int
    shares: _Shares
    loss_chunk_tokens: int | None
    num_staging_buffers: int

    @property
    def of_blocks(self) -> Hashable:
        """What decides what instructions there are, however many staging buffers."""
        return self[:3]


class _Pace(NamedTuple):
    """Seconds of a step's instructions, and of its computation until losses are exchanged."""

    seconds: Seconds
    computed_s: float


class _Tally:
    """The distinct instructions of a step, whatever the machine, and how often each comes; `machine` is any of them.

    Attributes
    ----------
    items : list of Instruction
        One of those that take the same.
    numbers : list of list of int
        Of each execution's instructions, which of them each is like.
    counts, behind, computed : list of float
        How often each comes in a step, of these uploads behind the exchange of losses, and computation before it.
    is_exchanged : bool
        Whether losses are exchanged.
    num_instructions : int
    """

    def __init__(self, two_blocks: _TwoBlocks, shares: _Shares, loss: Work | None, machine: Machine) -> None:
        self.items: list[Instruction] = []
        self.numbers: list[list[int]] = []
        self.counts: list[float] = []
        self.behind: list[float] = []
        self.computed: list[float] = []
        self.is_exchanged = False
        known: dict[Hashable, int] = {}
        for execution in two_blocks.executions:
            self.numbers.append([])
            for instruction in execution.instructions:
                item = instruction
                if loss is not None and _takes_loss(item):
                    item = replace(item, work=loss)
                share = shares.of(item)
                # What a message or an exchange takes depends on whom it reaches.
                key: Hashable = (
                    item.id
                    if isinstance(item.op, Send | Recv | Collective)
                    else (machine.direction(two_blocks.program, item), item.work, share)
                )
                number = known.setdefault(key, len(known))
                self.numbers[-1].append(number)
                if number == len(self.items):
                    self.items.append(item)
                    for counted in (self.counts, self.behind, self.computed):
                        counted.append(0.0)
                count = execution.count * share
                self.counts[number] += count
                self.is_exchanged |= item.label == "exchange"
                if self.is_exchanged and item.stream == Stream.H2D and execution.count > 1:
                    self.behind[number] += count
                if item.stream == Stream.COMPUTE and not self.is_exchanged:
                    self.computed[number] += count
        self.num_instructions = round(sum(self.counts))


class _TwoBlocks:
    """What a rank of a plan with few blocks does in a step, on whatever machine (`standing`: the blocks that a segment stands for).

    With `is_ahead` perturbations are drawn, or copies written, while others are used.
    """

    def __init__(self, program: Program, standing: Mapping[str, range], *, is_ahead: bool) -> None:
        self.program = program
        self.executions = list(_executions(program, standing, is_ahead=is_ahead))
        losses = [item.work.workspace_bytes for item in program.step if _takes_loss(item)]
        others = [item.work.workspace_bytes for item in program.step if not _takes_loss(item)]
        self._loss_bytes, self._other_bytes = max(losses, default=0), max(others, default=0)
        self._graphs: dict[Hashable, BlockGraph] = {}

    def workspace_bytes(self, loss: Work | None) -> int:
        """Return the largest workspace, of a loss that is taken so where the rank takes one."""
        has_loss = loss is not None and self._loss_bytes
        return max(self._other_bytes, loss.workspace_bytes if loss and has_loss else self._loss_bytes)

    def passes_s(self, seconds: Seconds) -> float:
        """Return the seconds of all computation for blocks but their forwards."""
        return sum(
            alone_s * execution.count
            for execution, own in zip(self.executions, seconds, strict=True)
            for item, alone_s in zip(execution.instructions, own, strict=True)
            if item.stream == Stream.COMPUTE
            # A block that stays on the device is not cast.
            and not isinstance(item.op, Forward | Cast)
            and _block_number(item.segment) is not None
        )

    def graph(self, num_staging_buffers: int, pattern: tuple[Residency, int] | None) -> BlockGraph:
        """Return who waits for whom with so many staging buffers, where a residency lets some of so many blocks stay."""
        kept = None if pattern is None else pattern[0].num_offloaded(pattern[1])
        if (key := (num_staging_buffers, kept)) not in self._graphs:
            offloaded = None if pattern is None else partial(pattern[0].offloaded, num_blocks=pattern[1])
            self._graphs[key] = BlockGraph(self.executions, num_staging_buffers, offloaded)
        return self._graphs[key]


def _executions(program: Program, standing: Mapping[str, range], *, is_ahead: bool) -> Iterator[Execution]:
    # A generator passes over what others draw on its way to a block: that belongs to the block.
    served: Iterator[Instruction] = accumulate(
        program.step, lambda before, item: before if _is_skip(item) else item
    )
    by_segment = groupby(zip(served, program.step, strict=True), key=lambda pair: pair[0].segment)
    listed = [tuple(item for _, item in grouped) for _, grouped in by_segment]
    behind = _behind(program, listed, standing) if is_ahead else {}
    for index, own in enumerate(listed):
        # What waits across executions, a stream or a staging buffer, is the graph's to know.
        instructions = connected_by_conflicts((), own)
        in_buffer = tuple(number for number, item in enumerate(instructions) if _is_staged(program, item))
        segment = own[0].segment
        block = _block_number(segment)
        blocks = standing.get(segment)
        first, count = (block, 1) if blocks is None else (blocks.start, len(blocks))
        before = behind.get(index, {})
        if count > 1:
            # What only the first of them waits for is known to be over for all others.
            before = {
                number: tuple(edge for edge in edges if edge[0] <= REACH) for number, edges in before.items()
            }
        yield Execution(first, count, instructions, in_buffer, before)


def _is_skip(item: Instruction) -> bool:
    return isinstance(item.op, Sample) and item.op.keep == "none"


def _is_staged(program: Program, item: Instruction) -> bool:
    return any(program.buffer(access.buffer).role in _STAGING_ROLES for access in (*item.reads, *item.writes))


def _behind(
    program: Program, listed: Sequence[Sequence[Instruction]], standing: Mapping[str, range]
) -> dict[int, dict[int, tuple[Edge, ...]]]:
    """Return what instructions wait for in the executions just before, by execution and number: buffers of what is drawn ahead.

    Between the last blocks of forwards and the first of updates are the head and the embedding.
    """

    def apart(accesses: Iterable[Access]) -> tuple[Access, ...]:
        turns = (*_STAGING_ROLES, "disk buffers")
        return tuple(each for each in accesses if program.buffer(each.buffer).role not in turns)

    many = [index for index, own in enumerate(listed) if own[0].segment in standing]

    def is_near(index: int, there: int) -> bool:
        """Whether what lies between stays as it is where blocks that stand for many are written out."""
        # The last two blocks come just before whatever follows them.
        crossed = [each for each in many if there < each < index]
        in_run = crossed == [there + 1] and _block_number(listed[there][0].segment) is not None
        return 0 < index - there <= 2 * REACH and (not crossed or in_run)

    place = {item.id: (index, number) for index, own in enumerate(listed) for number, item in enumerate(own)}
    moved = {item.id for own in listed for item in own if item.label in MOVES}
    step = [replace(item, reads=apart(item.reads), writes=apart(item.writes)) for item in program.step]
    behind: dict[int, dict[int, tuple[Edge, ...]]] = defaultdict(dict)
    for item in connected_by_conflicts((), step):
        index, number = place[item.id]
        edges = [place[edge.instruction] for edge in item.after if edge.instruction not in moved]
        near = tuple((index - there, source) for there, source in edges if is_near(index, there))
        if near and item.id not in moved:
            behind[index][number] = near
    return behind
