"""The closed form beside the event engine: when instructions run if nothing is shared.

A max-plus recurrence (:mod:`zosim.applications.closed_form.maxplus`) whose vertices are instructions. A collective is one vertex for all members of its
group: it starts after the latest of them and takes as long as the slowest of their flows. A message is one vertex for its two
ranks.

So steps become periodic, with the period of the heaviest circuit of dependencies. Sharing only makes durations longer, and later starts never make anything end earlier. The period is
therefore a lower bound of the simulated step time, and equal to it wherever nothing is shared. It lies between the
busiest stream's seconds and the seconds of all streams together.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from graphlib import CycleError, TopologicalSorter

import numpy as np

from costmodel.rates.profile import Bound
from topology.errors import ProgramError
from zosim.applications.closed_form.maxplus import Edge, MaxPlus, Member, Vertex
from zosim.hardware.machine import Machine
from zosim.program import Program
from zosim.program.step_graph import Place, StepGraph
from zosim.simulators.steady import SteadyDetector
from zosim.simulators.world import World

# Steps after which the period of a recurrence that has not become periodic is taken from its second half.
MAX_STEPS = 64


Times = dict[Member, tuple[float, float]]


def step_time_bound(program: Program, machine: Machine, bound: Bound = "central") -> float:
    """Return the seconds per step in the steady state, as if nothing were shared.

    Parameters
    ----------
    program : Program
        If it is of several ranks, the others are taken to be in step with this one.
    machine : Machine
    bound : {"central", "low", "high"}
        Which end of the profile's intervals.

    Raises
    ------
    ProgramError
        If a dependency names no instruction, or instructions wait for each other in a circle.
    ProfileError
        If the profile has no rate for an instruction's formats.
    """
    return step_time_bound_of(World.of_one(program, machine, bound))


def step_time_bound_of(world: World) -> float:
    """Return the seconds per step of several ranks in the steady state, as if nothing were shared.

    Ranks that behave alike where nothing is shared take the same, so the bound of a folded world is the bound of the
    whole.

    Raises
    ------
    ProgramError
        As for :func:`step_time_bound`.
    """
    if not any(template.program.step for template in world.templates):
        return 0.0
    recurrence = Recurrence(world, MAX_STEPS)
    detector = SteadyDetector(depth=recurrence.max_distance)
    ends = []
    recurrence.advance()
    for _ in range(MAX_STEPS):
        times = np.array(list(recurrence.advance().values())).ravel()
        cycle = detector.completed(times)
        if cycle is not None:
            return cycle.period_s / cycle.num_steps
        ends.append(float(times.max()))
    return second_half_s(ends[-1], ends[MAX_STEPS // 2 - 1])


def second_half_s(last_s: float, middle_s: float) -> float:
    """Return the seconds per step from the ends of the last step and of the middle one."""
    return (last_s - middle_s) / (MAX_STEPS - MAX_STEPS // 2)


class Precedence:
    """Who waits for whom at every position of a run.

    Parameters
    ----------
    graphs : sequence of StepGraph
        Of each rank.
    hosts : collection of int
        Ranks whose host takes time of its own between two steps.
    world : World, optional
        Knows who meets whom, and who is whose peer; without it every rank is by itself.
    """

    def __init__(
        self, graphs: Sequence[StepGraph], hosts: Collection[int] = (0,), world: World | None = None
    ) -> None:
        self.graphs = graphs
        self.max_distance = max(graph.max_distance for graph in graphs)
        self._hosts = hosts
        self._world = world

    @classmethod
    def of_world(cls, world: World, num_steps: int) -> Precedence:
        """Return the precedence in a run of all ranks."""
        ranks = range(world.size)
        graphs = [StepGraph(world.program(rank), num_steps) for rank in ranks]
        return cls(graphs, [rank for rank in ranks if world.template(rank).step_s > 0], world)

    def vertices(self, position: int) -> list[Vertex]:
        """Return what runs at a position, each after what it waits for there.

        Raises
        ------
        ProgramError
            If instructions wait for each other in a circle.
        """
        together: dict[Hashable, list[Member]] = {}
        for rank, graph in enumerate(self.graphs):
            for item in graph.instructions(position):
                member = Member(rank, item.id)
                together.setdefault(self._meeting(member, position) or member, []).append(member)
        vertices = [
            Vertex(tuple(members), tuple(dict.fromkeys(self._edges(members, position))))
            for members in together.values()
        ]
        number = {member: place for place, vertex in enumerate(vertices) for member in vertex.members}
        sorter: TopologicalSorter[int] = TopologicalSorter()
        for place, vertex in enumerate(vertices):
            here = (edge.before for edge in vertex.edges if edge.distance == 0 and edge.before is not None)
            sorter.add(place, *map(number.__getitem__, here))
        try:
            return [vertices[place] for place in sorter.static_order()]
        except CycleError as error:
            circle = " waits for ".join(
                self._name(vertices[place], position) for place in reversed(error.args[1])
            )
            message = f"program {self.graphs[0].program.name} can never go on: {circle}"
            raise ProgramError(
                message, hint="remove one of these dependencies, or reorder a stream"
            ) from None

    def _meeting(self, member: Member, position: int) -> Hashable:
        """Return what is the same for all who meet at an instruction; None if it meets nobody."""
        if self._world is None:
            return None
        meeting = self.graphs[member.rank].meeting(Place(position, member.instruction))
        return meeting and self._world.party(member.rank, meeting)[1]

    def _edges(self, members: Iterable[Member], position: int) -> Iterator[Edge]:
        for rank, instruction in members:
            graph, place = self.graphs[rank], Place(position, instruction)
            follows = graph.follower(place)
            host = rank if rank in self._hosts and graph.opens_step(place) else None
            if follows is None and host is not None:
                yield Edge(0, None, host)
            for item in graph.predecessors(place):
                before = Member(rank, item.instruction)
                yield Edge(position - item.position, before, host if item == follows else None)
            if self._world is None:
                continue
            for group, item in graph.awaited(place):
                for peer in self._world.groups[group].peers(rank) if group else ():
                    if self.graphs[peer].has(item):
                        yield Edge(position - item.position, Member(peer, item.instruction))

    def _name(self, vertex: Vertex, position: int) -> str:
        rank, instruction = vertex.members[0]
        name = f"{self.graphs[0].part(position)}/{instruction}"
        if self._world is None or self._world.size == 1:
            return name
        return f"{name} of rank {self._world.numbers[rank]}"


class Recurrence:
    """Positions of a run (prologue, steps, flush), evaluated one after the other.

    Parameters
    ----------
    world : World
    num_steps : int

    Raises
    ------
    ProgramError
        If a dependency names no instruction, or instructions wait for each other in a circle.
    """

    def __init__(self, world: World, num_steps: int) -> None:
        self._world = world
        self._num_steps = num_steps
        self._precedence = Precedence.of_world(world, num_steps)
        self.max_distance = self._precedence.max_distance
        hosts = {rank: world.template(rank).step_s for rank in range(world.size)}
        self._run: MaxPlus[float] = MaxPlus(hosts, 0.0, max)
        self._steady: tuple[list[Vertex], list[float]] | None = None

    def advance(self) -> Times:
        """Evaluate the next position and return start and end of its instructions."""
        ends = self._run.advance(*self._at(len(self._run.ends)))
        starts = self._run.starts[-1]
        return {member: (starts[member], end_s) for member, end_s in ends.items()}

    def _at(self, position: int) -> tuple[list[Vertex], list[float]]:
        """Return the vertices at a position and their seconds; steps that reach back no further than steps all look alike."""
        is_like_others = self.max_distance < position <= self._num_steps
        if is_like_others and self._steady is not None:
            return self._steady
        vertices = self._precedence.vertices(position)
        part = self._precedence.graphs[0].part(position)
        seconds = [
            max(
                self._world.template(rank).activities[part, instruction].seconds
                for rank, instruction in vertex.members
            )
            for vertex in vertices
        ]
        if is_like_others:
            self._steady = vertices, seconds
        return vertices, seconds
