"""All ranks of a run as the simulators see them: activities, what they share, and who waits for whom.

Ranks whose programs and machines are alike but for the names of their resources share a :class:`Template`, so that a
thousand ranks cost little more than one. :mod:`zosim.simulators.fold` goes further and keeps one rank of each class; the example there makes a world.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from costmodel.estimate import OperationCost
from costmodel.rates.profile import Bound
from topology.errors import ProgramError
from zosim.hardware.machine import Activity, Machine
from zosim.program import Program
from zosim.program.instructions import Phase
from zosim.program.operations import Collective, Recv, Send
from zosim.program.program_set import ProgramSet
from zosim.program.step_graph import Rendezvous

# A resource of which no more than this is ever asked limits nobody.
_ENOUGH = 1 + 1e-12


@dataclass(frozen=True)
class Template:
    """What ranks of one class do.

    - `activities`: Their resources are those of one of the ranks, by name.
    - `resources`: That rank's resources; another rank's stand at the same places of its own list.
    - `step_s`: Host time between two steps.
    """

    program: Program
    activities: Mapping[tuple[Phase, str], Activity]
    resources: tuple[str, ...]
    step_s: float

    def taking(
        self, uses_of: Callable[[Activity], tuple[tuple[str, float], ...]]
    ) -> dict[tuple[Phase, str], Activity]:
        """Return the activities with other uses of resources; what was one object stays one."""
        changed: dict[int, Activity] = {}
        for activity in self.activities.values():
            if id(activity) not in changed:
                changed[id(activity)] = replace(activity, uses=uses_of(activity))
        return {key: changed[id(activity)] for key, activity in self.activities.items()}

    @cached_property
    def most_requested(self) -> dict[str, float]:
        """The most that one rank asks of each resource at any time, its streams taken as independent."""
        by_stream: dict[tuple[str, str], float] = defaultdict(float)
        for phase, item in self.program.instructions():
            activity = self.activities[phase, item.id]
            requested: dict[str, float] = defaultdict(float)
            for name, use in activity.uses:
                requested[name] += use * activity.bound
            # A stream does one thing at a time, so its largest demand counts.
            for name, amount in requested.items():
                by_stream[name, item.stream] = max(by_stream[name, item.stream], amount)
        total: dict[str, float] = defaultdict(float)
        for (name, _), amount in by_stream.items():
            total[name] += amount
        return dict(total)


@dataclass(frozen=True)
class ProcessGroup:
    """A partition of the ranks into those that work together.

    - `doubled`: Ranks that stand for several of their subgroup, and so wait for themselves where they wait for the others.
    """

    subgroups: tuple[tuple[int, ...], ...]
    doubled: frozenset[int] = frozenset()

    @cached_property
    def subgroup_of(self) -> dict[int, int]:
        """Number of each rank's subgroup."""
        return {rank: number for number, phase in enumerate(self.subgroups) for rank in phase}

    def peers(self, rank: int) -> tuple[int, ...]:
        """Return whom `rank` waits for where a dependency names the group."""
        members = self.subgroups[self.subgroup_of[rank]]
        return tuple(other for other in members if other != rank or rank in self.doubled)

    def at_offset(self, rank: int, offset: int) -> int | None:
        """Return the member so many places after `rank` in its subgroup, None past either end."""
        members = self.subgroups[self.subgroup_of[rank]]
        index = members.index(rank) + offset
        return members[index] if 0 <= index < len(members) else None


@dataclass(frozen=True)
class World:
    """The ranks of a run.

    - `template_of`: Of each rank.
    - `resources`: Of each rank, in the order of its template's.
    - `capacities`: Of the resources that can limit anybody.
    - `fifo`: Those that serve one activity at a time.
    - `numbers`: Under which ranks are reported.
    - `counts`: How many ranks each stands for.
    """

    templates: tuple[Template, ...]
    template_of: tuple[int, ...]
    resources: tuple[tuple[str, ...], ...]
    capacities: Mapping[str, float]
    fifo: frozenset[str]
    process_groups: Mapping[str, ProcessGroup]
    numbers: tuple[int, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, programs: ProgramSet, machines: Sequence[Machine], bound: Bound = "central") -> World:
        """Return the world of a program set.

        - `programs`: That :func:`~zosim.program.validate_set.validate_set` lets pass.
        - `machines`: One per rank. Ranks share the resources of equal names.
        - `bound`: Which end of the profiles' intervals.

        Raises ProgramError if there is not one machine per rank.
        Raises ProfileError if a profile has no rate for an instruction's formats.
        """
        if len(machines) != programs.world_size or not machines:
            message = f"{len(machines)} machines are given for {programs.world_size} ranks"
            raise ProgramError(message, hint="give one machine per rank")
        process_groups = {
            name: ProcessGroup(tuple(subgroups)) for name, subgroups in programs.process_groups.items()
        }
        return cls._made(programs.programs, programs.roles, machines, process_groups, bound)

    @classmethod
    def of_one(cls, program: Program, machine: Machine, bound: Bound = "central") -> World:
        """Return the world of one rank, whose peers, if it has any, are taken to be in step with it.

        Raises ProfileError if the profile has no rate for an instruction's formats.
        """
        process_groups = {
            name: ProcessGroup(((0,),), frozenset({0}) if size > 1 else frozenset())
            for name, size in program.process_groups.items()
        }
        return cls._made((program,), (0,), (machine,), process_groups, bound)

    @classmethod
    def _made(
        cls,
        programs: Sequence[Program],
        roles: Sequence[int],
        machines: Sequence[Machine],
        process_groups: dict[str, ProcessGroup],
        bound: Bound,
    ) -> World:
        templates: dict[object, Template] = {}
        costs: dict[Hashable, OperationCost] = {}
        capacities: dict[str, float] = {}
        keys = [(role, machine.shape) for role, machine in zip(roles, machines, strict=True)]
        for key, machine in zip(keys, machines, strict=True):
            # Machines of one shape differ in the names of resources alone.
            if key not in templates:
                templates[key] = _template(programs[key[0]], machine, bound, costs)
            for name, capacity in machine.capacities.items():
                capacities[name] = max(capacity, capacities.get(name, 0.0))
        numbers = {key: number for number, key in enumerate(templates)}
        world = cls(
            tuple(templates.values()),
            tuple(numbers[key] for key in keys),
            tuple(tuple(machine.capacities) for machine in machines),
            capacities,
            frozenset().union(*(machine.fifo for machine in machines)),
            MappingProxyType(process_groups),
            tuple(range(len(machines))),
            (1,) * len(machines),
        )
        return world.with_limits_only()

    @property
    def size(self) -> int:
        """Number of ranks simulated."""
        return len(self.numbers)

    def template(self, rank: int) -> Template:
        """Return the template of a rank."""
        return self.templates[self.template_of[rank]]

    def program(self, rank: int) -> Program:
        """Return the program of a rank."""
        return self.template(rank).program

    def activities(self, rank: int) -> dict[tuple[Phase, str], Activity]:
        """Return what a rank's instructions are, with its own resources."""
        template = self.template(rank)
        if self.resources[rank] == template.resources:
            return dict(template.activities)
        own = dict(zip(template.resources, self.resources[rank], strict=True))
        return template.taking(lambda activity: tuple((own[name], use) for name, use in activity.uses))

    def participants(self, rank: int, rendezvous: Rendezvous) -> tuple[tuple[int, ...], Hashable]:
        """Return who meets where `rank` does, and what tells this rendezvous from others at its position.

        A message whose other side is not simulated has one member: that side is taken to be in step.
        """
        group = self.process_groups[rendezvous.process_group]
        if not rendezvous.offset:
            members = group.subgroups[group.subgroup_of[rank]]
            return members, (members, rendezvous)
        other = group.at_offset(rank, rendezvous.offset if rendezvous.sends else -rendezvous.offset)
        if other is None:
            return (rank,), (rank, rendezvous)
        # Both sides name the message alike: sender first.
        members = (rank, other) if rendezvous.sends else (other, rank)
        return members, (members, rendezvous.shared)

    def with_limits_only(self) -> World:
        """Return the same world without the resources of which there is always enough for all who ask."""
        requested: dict[str, float] = defaultdict(float)
        for rank, resources in enumerate(self.resources):
            own = dict(zip(self.template(rank).resources, resources, strict=True))
            for name, amount in self.template(rank).most_requested.items():
                requested[own[name]] += amount
        limits = {
            name: capacity
            for name, capacity in self.capacities.items()
            # A queue serves one at a time, however wide it is.
            if name in self.fifo or requested[name] > capacity * _ENOUGH
        }
        return replace(self, capacities=limits)


def at_own_speeds(world: World) -> World | None:
    """Return a world whose activities take as long as resources let each take alone; None where two may slow each other down.

    Where streams together never ask more of a resource than it has, none gets less of it than alone.
    """
    requested: dict[str, float] = defaultdict(float)
    users: dict[str, int] = defaultdict(int)
    templates = []
    for rank in range(world.size):
        template, own = world.template(rank), world.activities(rank)
        alone: dict[int, Activity] = {}
        by_stream: dict[tuple[str, str], float] = defaultdict(float)
        for activity, stream in {
            (id(own[key]), item.stream): (own[key], item.stream)
            for phase, item in template.program.instructions()
            for key in [(phase, item.id)]
        }.values():
            rates: dict[str, float] = defaultdict(float)
            for name, use in activity.uses:
                if name in world.capacities:
                    rates[name] += use * activity.bound
            speed = min((1.0, *(world.capacities[name] / rate for name, rate in rates.items())))
            alone[id(activity)] = replace(activity, seconds=activity.seconds / speed, uses=())
            for name, rate in rates.items():
                by_stream[name, stream] = max(by_stream[name, stream], rate * speed)
        for (name, _), rate in by_stream.items():
            requested[name] += rate
            users[name] += 1
        activities = {key: alone[id(activity)] for key, activity in own.items()}
        templates.append(Template(template.program, activities, (), template.step_s))
    is_shared = any(
        requested[name] > capacity * _ENOUGH or (name in world.fifo and users[name] > 1)
        for name, capacity in world.capacities.items()
    )
    if is_shared:
        return None
    return replace(
        world,
        templates=tuple(templates),
        template_of=tuple(range(world.size)),
        resources=((),) * world.size,
        capacities={},
        fifo=frozenset(),
    )


def _template(
    program: Program, machine: Machine, bound: Bound, costs: dict[Hashable, OperationCost]
) -> Template:
    known: dict[object, Activity] = {}
    activities = {}
    for phase, item in program.instructions():
        # Of operations on links, the cost depends on whom they reach.
        reached = item.op if isinstance(item.op, Collective | Send | Recv) else None
        key = item.work, machine.direction(program, item), reached
        if key not in known:
            known[key] = machine.activity(program, item, bound, costs)
        activities[phase, item.id] = known[key]
    return Template(program, activities, tuple(machine.capacities), machine.step_s(bound))
