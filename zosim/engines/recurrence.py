"""The closed form beside the event engine: when instructions run if nothing is shared.

    ``start(i, k) = max(end of the stream's predecessor, ends of what i waits for)``
    ``end(i, k)   = start(i, k) + seconds of i alone``

A collective is one instruction of all members of its group: it starts after the latest of them and takes as long as
the slowest of their flows. A message is one instruction of its two ranks.

This is linear in the max-plus algebra, so steps become periodic, with the period of the heaviest circuit of
dependencies; sharing only makes durations longer, and later starts never make anything end earlier. The period is
therefore a lower bound of the simulated step time, and equal to it wherever nothing is shared. It lies between the
busiest stream's seconds and the seconds of all streams together.

References
----------
.. [1] Baccelli, Cohen, Olsder and Quadrat, Synchronization and Linearity, chapter 3: max-plus linear systems and
   their eventual periodicity.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

import numpy as np

from costmodel.profile import Bound
from topology.errors import ProgramError
from zosim.engines.steady import SteadyDetector
from zosim.engines.world import World
from zosim.hardware.machine import Machine
from zosim.instructions import Part
from zosim.places import Order, Place
from zosim.program import Program

# Steps after which the period of a recurrence that has not become periodic is taken from its second half.
MAX_STEPS = 64


class Member(NamedTuple):
    """An instruction of one rank, by the rank's position in its world."""

    rank: int
    instruction: str


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


def run_times(
    program: Program, machine: Machine, num_steps: int, bound: Bound = "central"
) -> dict[Place, tuple[float, float]]:
    """Return start and end of every instruction of a run, as if nothing were shared.

    Raises
    ------
    ProgramError, ProfileError
        As for :func:`step_time_bound`.
    """
    return {
        place: times
        for (_, place), times in run_times_of(World.of_one(program, machine, bound), num_steps).items()
    }


def run_times_of(world: World, num_steps: int) -> dict[tuple[int, Place], tuple[float, float]]:
    """Return start and end of every instruction of a run of several ranks, as if nothing were shared.

    Raises
    ------
    ProgramError
        As for :func:`step_time_bound`.
    """
    recurrence = Recurrence(world, num_steps)
    return {
        (member.rank, Place(position, member.instruction)): times
        for position in range(num_steps + 2)
        for member, times in recurrence.advance().items()
    }


@dataclass(frozen=True, slots=True)
class RecurrenceNode:
    """An instruction, or a collective or message as one instruction of all who meet.

    Attributes
    ----------
    members : tuple of Member
    earliest_s : float
        Before this it does not start, whatever has finished.
    edges : tuple of (int, Member, float)
        What it waits for: positions before, the instruction, and a delay after its end.
    seconds : float
    """

    members: tuple[Member, ...]
    earliest_s: float
    edges: tuple[tuple[int, Member, float], ...]
    seconds: float


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
        self.world = world
        self.num_steps = num_steps
        self.orders = [Order(world.program(rank), num_steps) for rank in range(world.size)]
        self.max_distance = max(order.max_distance for order in self.orders)
        self._times: list[Times] = []
        self._steady_nodes: list[RecurrenceNode] = []

    def advance(self) -> Times:
        """Evaluate the next position and return start and end of its instructions."""
        position = len(self._times)
        here: Times = {}
        self._times.append(here)
        for node in self.nodes(position):
            start_s = node.earliest_s
            for distance, before, delay_s in node.edges:
                start_s = max(start_s, self._times[position - distance][before][1] + delay_s)
            for member in node.members:
                here[member] = start_s, start_s + node.seconds
        return here

    def nodes(self, position: int) -> list[RecurrenceNode]:
        """Return what runs at a position, each after what it waits for there.

        Steps that reach back no further than other steps all look alike.
        """
        is_like_others = self.max_distance < position <= self.num_steps
        if is_like_others and self._steady_nodes:
            return self._steady_nodes
        nodes_here = self._ordered_nodes(position)
        if is_like_others:
            self._steady_nodes = nodes_here
        return nodes_here

    def _ordered_nodes(self, position: int) -> list[RecurrenceNode]:
        together: dict[Hashable, list[Member]] = {}
        for rank, order in enumerate(self.orders):
            for item in order.instructions(position):
                member = Member(rank, item.id)
                together.setdefault(self._meeting(member, position) or member, []).append(member)
        nodes = [self._node(tuple(members), position) for members in together.values()]
        number = {member: place for place, node in enumerate(nodes) for member in node.members}
        sorter: TopologicalSorter[int] = TopologicalSorter()
        for place, node in enumerate(nodes):
            sorter.add(place, *(number[before] for distance, before, _ in node.edges if distance == 0))
        try:
            return [nodes[place] for place in sorter.static_order()]
        except CycleError as error:
            circle = " waits for ".join(
                self._name(nodes[place], position) for place in reversed(error.args[1])
            )
            message = f"program {self.world.program(0).name} can never go on: {circle}"
            raise ProgramError(
                message, hint="remove one of these dependencies, or reorder a stream"
            ) from None

    def _meeting(self, member: Member, position: int) -> Hashable:
        """Return what is the same for all who meet at an instruction; None if it meets nobody."""
        meeting = self.orders[member.rank].meeting(Place(position, member.instruction))
        return meeting and self.world.party(member.rank, meeting)[1]

    def _node(self, members: tuple[Member, ...], position: int) -> RecurrenceNode:
        part = self.orders[0].part(position)
        earliest_s, edges = 0.0, []
        for member in members:
            host_s, own_edges = self._waits(member, position)
            earliest_s = max(earliest_s, host_s)
            edges += own_edges
        seconds = max(
            self.world.template(rank).activities[part, instruction].seconds for rank, instruction in members
        )
        return RecurrenceNode(members, earliest_s, tuple(dict.fromkeys(edges)), seconds)

    def _waits(self, member: Member, position: int) -> tuple[float, list[tuple[int, Member, float]]]:
        """Return the earliest start of an instruction, and its edges."""
        rank, order = member.rank, self.orders[member.rank]
        place = Place(position, member.instruction)
        follows = order.follows(place)
        host_s = self.world.template(rank).step_s if order.opens_step(place) else 0.0
        edges = [
            (position - item.position, Member(rank, item.instruction), host_s if item == follows else 0.0)
            for item in order.predecessors(place)
        ]
        for group, item in order.waits_for_peers(place):
            edges += [
                (position - item.position, Member(peer, item.instruction), 0.0)
                for peer in self.world.groups[group].peers(rank)
                if self.orders[peer].has(item)
            ]
        return (host_s if follows is None else 0.0), edges

    def _name(self, node: RecurrenceNode, position: int) -> str:
        rank, instruction = node.members[0]
        name = f"{self._part(position)}/{instruction}"
        if self.world.size == 1:
            return name
        return f"{name} of rank {self.world.numbers[rank]}"

    def _part(self, position: int) -> Part:
        return self.orders[0].part(position)
