"""The closed form for many configurations at once: a plan's step time over batch sizes, lengths, rates and bandwidths.

What a configuration changes is how long instructions take, not which there are or who waits for whom. So the order is
worked out once, every kind of instruction is costed only for those values that its cost depends on, and the recurrence
(:mod:`zosim.simulators.closed_form`) runs on arrays, one element per configuration. Every element equals what
:func:`~zosim.simulators.closed_form.step_time_bound` says of that configuration alone.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from costmodel.estimate import work_terms
from costmodel.rates.profile import CONSTANT_UNITS, Profile
from costmodel.work import Work
from topology.errors import PlanError
from topology.validation import did_you_mean
from zosim.hardware.machine import Machine
from zosim.lowering import lower, unordered
from zosim.plans import Plan
from zosim.program import Program
from zosim.program.instructions import Instruction
from zosim.simulators.closed_form import MAX_STEPS, second_half_s
from zosim.simulators.maxplus import Floats, MaxPlus, Node
from zosim.simulators.periodic import MAX_CYCLE, TOLERANCE
from zosim.simulators.run_graph import RunGraph
from zosim.simulators.shortening import shortest
from zosim.simulators.world import World

LINKS = "links"
"""Axis of the bandwidth of everything on the way of a copy."""


def scaled(machine: Machine, factors: Mapping[str, float]) -> Machine:
    """Return a machine with some of its rates multiplied.

    `factors`: by constant (:data:`~costmodel.rates.profile.CONSTANT_UNITS`; all its formats alike), or ``"links"`` for the
    capacities of whatever copies cross. Positive.

    Raises PlanError if there is no such constant, or a factor is not positive.
    """
    for name, factor in factors.items():
        if name != LINKS and name not in CONSTANT_UNITS:
            message = f"unknown constant {name!r}"
            raise PlanError(message, hint=did_you_mean(name, [LINKS, *CONSTANT_UNITS]))
        if not 0 < factor < math.inf:
            message = f"factor {factor} of {name} must be positive and finite"
            raise PlanError(message, hint="1 leaves it as it is")
    used = {name for route in machine.routes.values() for name in route}
    capacities = {
        name: capacity * (factors.get(LINKS, 1.0) if name in used else 1.0)
        for name, capacity in machine.capacities.items()
    }
    changed = [
        constant.model_copy(
            update={
                end: getattr(constant, end) * factors[constant.quantity] for end in ("value", "low", "high")
            }
        )
        for constant in machine.profile.constants
        if constant.quantity in factors
    ]
    profile = machine.profile
    if changed:
        profile = profile.with_constants(*changed, origin=profile.origin)
    return replace(machine, profile=profile, capacities=MappingProxyType(capacities))


# Configurations evaluated together: as many as leave the times of a step in the cache.
_CHUNK = 2048


def step_time_bounds(
    plan: Plan,
    machine: Machine,
    *,
    batches: Sequence[int] = (),
    seqs: Sequence[int] = (),
    factors: Mapping[str, Sequence[float]] = MappingProxyType({}),
) -> Floats:
    """Return the seconds per step of the first rank of all combinations, as if nothing were shared.

    - `machine`: of that rank; what others do is left out.
    - `batches`, `seqs`: sequences per step and tokens per sequence; the plan's own unless given.
    - `factors`: axes of constants and links, each with what the machine's are multiplied by (see :func:`scaled`).

    Raises PlanError if a batch cannot be planned, or an axis does not exist.

    Returns
    -------
    array of shape (num_batches, num_seqs, *lengths of the axes in their order)
    """
    batches, seqs = tuple(batches) or (plan.batch,), tuple(seqs) or (plan.seq,)
    shape = tuple(len(values) for values in factors.values())
    order = _GridOrder.of(lower(plan), machine)
    works = _Works(plan, order.program)
    costs = _GridCosts(machine, factors, order.program)
    seconds_per_step = np.empty((len(batches), len(seqs), *shape))
    for (i, batch), (j, seq) in itertools.product(enumerate(batches), enumerate(seqs)):
        seconds = costs.of(works.at(batch, seq))
        seconds_per_step[i, j] = order.step_times(seconds, costs.step_s).reshape(shape)
    return seconds_per_step


class _Works:
    """The work of every instruction at other batch sizes and lengths."""

    def __init__(self, plan: Plan, program: Program) -> None:
        self._plan = plan
        self._program = program
        self._model = shortest(plan.model)
        # Blocks are alike: what is not among the first two is as the second.
        self._namesake: Callable[[str], str] = _second_block
        if self._model is plan.model or not self._tells(plan.batch, plan.seq):
            self._model, self._namesake = plan.model, str

    def at(self, batch: int, seq: int) -> list[Work]:
        """Return the works of the step, in its order."""
        by_id = self._listed(batch, seq)
        try:
            return [by_id[self._namesake(item.id)] for item in self._program.step]
        except KeyError as error:
            message = f"batch={batch}, seq={seq} need another program, without {error.args[0]}"
            raise PlanError(message, hint="plan this configuration on its own") from None

    def _tells(self, batch: int, seq: int) -> bool:
        by_id = self._listed(batch, seq)
        return all(by_id.get(self._namesake(item.id)) == item.work for item in self._program.step)

    def _listed(self, batch: int, seq: int) -> dict[str, Work]:
        fields = {**dict(self._plan), "batch": batch, "seq": seq, "model": self._model}
        return {item.id: item.work for item in unordered(Plan(**fields)).step}


def _second_block(name: str) -> str:
    return re.sub(r"\bblock\.(?!0\b)\d+", "block.1", name)


class _GridCosts:
    """Seconds of instructions along the axes, each costed only for the values that it depends on."""

    def __init__(self, machine: Machine, factors: Mapping[str, Sequence[float]], program: Program) -> None:
        self._machine = machine
        self._factors = {name: tuple(values) for name, values in factors.items()}
        self._program = program
        self._machines: dict[tuple[tuple[str, float], ...], Machine] = {}
        self._known: dict[object, Floats] = {}
        self.shape = tuple(len(values) for values in self._factors.values())
        for name, values in self._factors.items():
            for value in values:
                scaled(machine, {name: value})

    @cached_property
    def step_s(self) -> Floats:
        """Host time between two steps, for every configuration."""
        return self._along({"step_s"}, lambda machine: machine.step_s())

    def of(self, works: Sequence[Work]) -> list[Floats]:
        """Return the seconds of the step's instructions, for every configuration."""
        return [self._seconds(*pair) for pair in zip(self._program.step, works, strict=True)]

    def _seconds(self, instruction: Instruction, work: Work) -> Floats:
        direction = self._machine.direction(self._program, instruction)
        key = work, direction, instruction.op.type == "collective" and instruction.op
        if key not in self._known:
            read = _Read(self._machine.profile)
            work_terms(work, read, direction)
            names = read.constant_groups | ({LINKS} if work.copy_bytes else set())
            changed = replace(instruction, work=work)
            self._known[key] = self._along(
                names, lambda machine: machine.activity(self._program, changed).seconds
            )
        return self._known[key]

    def _along(self, names: set[str], value: Callable[[Machine], float]) -> Floats:
        """Return a value for every configuration, worked out along those axes alone."""
        axes = {name: values for name, values in self._factors.items() if name in names}
        flat = [
            value(self._scaled(tuple(zip(axes, point, strict=True))))
            for point in itertools.product(*axes.values())
        ]
        lengths = [len(values) if name in axes else 1 for name, values in self._factors.items()]
        return np.ascontiguousarray(np.broadcast_to(np.array(flat).reshape(lengths), self.shape)).ravel()

    def _scaled(self, point: tuple[tuple[str, float], ...]) -> Machine:
        if point not in self._machines:
            self._machines[point] = scaled(self._machine, dict(point))
        return self._machines[point]


class _Read(dict[str, float]):
    """A profile's constants, with a note of which were asked for."""

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile.values())
        self.constant_groups: set[str] = set()

    def __getitem__(self, name: str) -> float:
        self.constant_groups.add(name.partition(".")[0])
        return super().__getitem__(name)

    def get(self, name: str, default: float | None = None) -> float | None:  # type: ignore[override]
        self.constant_groups.add(name.partition(".")[0])
        return super().get(name, default)


class _Chain(NamedTuple):
    """A node, or nodes that wait for each other alone as one, with its instructions by their place in the step."""

    node: Node
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class _GridOrder:
    """Who waits for whom in the steps of one rank."""

    program: Program
    first: tuple[tuple[_Chain, ...], ...]  # the steps that reach back into the prologue, in order
    usual: tuple[_Chain, ...]  # every later step
    carried: tuple[int, ...]  # whom later steps wait for: where they shift alike, everything does

    @classmethod
    def of(cls, program: Program, machine: Machine) -> _GridOrder:
        """Return the order of a program; of the machine it matters only whether the host takes time of its own.

        Raises PlanError if it has a prologue, whose durations would be the plan's own.
        """
        if program.prologue:
            message = f"program {program.name} has a prologue, which a grid does not support"
            raise PlanError(message, hint="call step_time_bound for each configuration")
        graph = RunGraph(World.of_one(program, machine), MAX_STEPS)
        listed = [graph.nodes(position) for position in range(1, graph.max_distance + 2)]
        carried = {before for nodes in listed for _, edges in nodes for distance, before in edges if distance}
        *first, usual = listed
        return cls(
            program,
            tuple(tuple(_chains(nodes, carried, fused=False)) for nodes in first),
            tuple(_chains(usual, carried, fused=True)),
            tuple(sorted(carried)),
        )

    def step_times(self, seconds: Sequence[Floats], step_s: Floats) -> Floats:
        """Return the periodic seconds per step of every configuration.

        - `seconds`: of every instruction, each of shape (num_configurations,).
        - `step_s`: host time between two steps.
        """
        if not self.usual:
            return np.zeros_like(step_s)
        # The host's own work is the node behind the last instruction.
        seconds = [*seconds, step_s]
        sums: dict[tuple[int, ...], Floats] = {}
        known: dict[tuple[int, ...], Floats] = {}
        for chain in itertools.chain(self.usual, *self.first):
            # Chains of like blocks have like parts, and those are the same arrays.
            key = tuple(id(seconds[number]) for number in chain.numbers)
            if key not in known:
                known[key] = np.sum([seconds[number] for number in chain.numbers], axis=0)
            sums[chain.numbers] = known[key]
        pieces = [
            self._chunk(
                {k: v[begin : begin + _CHUNK] for k, v in sums.items()}, min(_CHUNK, len(step_s) - begin)
            )
            for begin in range(0, len(step_s), _CHUNK)
        ]
        return np.concatenate(pieces)

    def _chunk(self, seconds: Mapping[tuple[int, ...], Floats], num_points: int) -> Floats:
        result = np.full(num_points, np.nan)
        run: MaxPlus[Floats] = MaxPlus(np.zeros(num_points), np.maximum)
        carried: list[Floats] = []
        depth = len(self.first)
        for step in range(MAX_STEPS):
            chains = self.first[step] if step < depth else self.usual
            ends = run.advance((c.node for c in chains), (seconds[c.numbers] for c in chains))
            carried.append(np.stack([ends[number] for number in self.carried]))
            for period_s in _periods(carried, depth):
                result = np.where(np.isnan(result), period_s, result)
            if not np.isnan(result).any():
                return result
            if step >= depth:
                run.starts[step], run.ends[step - depth] = {}, {}
        late = second_half_s(carried[-1].max(axis=0), carried[MAX_STEPS // 2 - 1].max(axis=0))
        return np.where(np.isnan(result), late, result)


def _chains(nodes: Sequence[Node], carried: Container[int], *, fused: bool) -> Iterable[_Chain]:
    """Return nodes in their order, chains of them as one if they may be."""
    num_successors = Counter(before for _, edges in nodes for distance, before in edges if distance == 0)
    chains: dict[int, _Chain] = {}
    for number, edges in nodes:
        chain = _Chain((number, edges), (number,))
        if fused and len(edges) == 1 and edges[0][0] == 0:
            before = edges[0][1]
            if before in chains and num_successors[before] == 1 and before not in carried:
                first = chains.pop(before)
                chain = _Chain((number, first.node[1]), first.numbers + chain.numbers)
        chains[number] = chain
    return chains.values()


def _periods(carried: Sequence[Floats], depth: int) -> Iterator[Floats]:
    """Yield the seconds per step of configurations that repeat every 1, 2 ... steps, NaN for the others."""
    last = len(carried) - 1
    tolerance_s = TOLERANCE * np.abs(carried[last]).max(axis=0)
    for num_steps in range(1, MAX_CYCLE + 1):
        if last - (depth - 1) - num_steps < 0:
            return
        period_s = carried[last].max(axis=0) - carried[last - num_steps].max(axis=0)
        off_s = np.zeros_like(period_s)
        for back in range(depth):
            shift_s = carried[last - back] - carried[last - back - num_steps]
            np.maximum(off_s, np.abs(shift_s - period_s).max(axis=0), out=off_s)
        yield np.where(off_s <= tolerance_s, period_s / num_steps, np.nan)
