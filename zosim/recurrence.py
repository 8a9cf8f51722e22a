"""The closed form beside the event engine: when instructions run if nothing is shared.

    ``start(i, k) = max(end of the stream's predecessor, ends of what i waits for)``
    ``end(i, k)   = start(i, k) + seconds of i alone``

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

from graphlib import CycleError, TopologicalSorter

import numpy as np

from costmodel.profile import Bound
from topology.errors import ProgramError
from zosim.machine import Machine
from zosim.places import Order, Place
from zosim.program import Part, Program, Stream
from zosim.steady import SteadyDetector

# Steps after which the period of a recurrence that has not become periodic is taken from its second half.
MAX_STEPS = 64

Times = dict[str, tuple[float, float]]
# An instruction, its earliest start, and its predecessors as (distance, id, delay after their end).
_Edges = tuple[str, float, list[tuple[int, str, float]]]


def step_time_bound(program: Program, machine: Machine, bound: Bound = "central") -> float:
    """Return the seconds per step in the steady state, as if nothing were shared.

    Parameters
    ----------
    program : Program
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
    if not program.step:
        return 0.0
    recurrence = Recurrence(program, machine, MAX_STEPS, bound)
    detector = SteadyDetector(depth=recurrence.order.max_distance)
    ends = []
    recurrence.advance()
    for _ in range(MAX_STEPS):
        times = recurrence.advance()
        found = np.array([time for item in program.step for time in times[item.id]])
        cycle = detector.completed(found)
        if cycle is not None:
            return cycle.period_s / cycle.num_steps
        ends.append(float(found.max()))
    half = MAX_STEPS // 2
    return (ends[-1] - ends[half - 1]) / (MAX_STEPS - half)


def run_times(
    program: Program, machine: Machine, num_steps: int, bound: Bound = "central"
) -> dict[Place, tuple[float, float]]:
    """Return start and end of every instruction of a run, as if nothing were shared.

    Raises
    ------
    ProgramError, ProfileError
        As for :func:`step_time_bound`.
    """
    recurrence = Recurrence(program, machine, num_steps, bound)
    return {
        Place(position, name): times
        for position in range(num_steps + 2)
        for name, times in recurrence.advance().items()
    }


class Recurrence:
    """Positions of a run (prologue, steps, flush), evaluated one after the other.

    Parameters
    ----------
    program : Program
    machine : Machine
    num_steps : int
    bound : {"central", "low", "high"}

    Raises
    ------
    ProgramError
        If a dependency names no instruction, or instructions wait for each other in a circle.
    """

    def __init__(self, program: Program, machine: Machine, num_steps: int, bound: Bound = "central") -> None:
        self.order = Order(program, num_steps)
        self._listed = {part: _evaluation_order(program, part) for part in _PARTS}
        self._seconds = {
            (part, item.id): machine.activity(program, item, bound).seconds
            for part, item in program.instructions()
        }
        self._step_s = machine.step_s(bound)
        self._times: list[Times] = []
        self._steady_edges: list[_Edges] = []

    def advance(self) -> Times:
        """Evaluate the next position and return start and end of its instructions."""
        position = len(self._times)
        part = self.order.part(position)
        here: Times = {}
        self._times.append(here)
        for name, earliest_s, edges in self._edges_at(position):
            start_s = earliest_s
            for distance, before, delay_s in edges:
                start_s = max(start_s, self._times[position - distance][before][1] + delay_s)
            here[name] = start_s, start_s + self._seconds[part, name]
        return here

    def _edges_at(self, position: int) -> list[_Edges]:
        part = self.order.part(position)
        # Steps that reach back no further than other steps all look alike.
        is_like_others = part == "step" and position > self.order.max_distance
        if is_like_others and self._steady_edges:
            return self._steady_edges
        found = [self._edges_of(Place(position, name)) for name in self._listed[part]]
        if is_like_others:
            self._steady_edges = found
        return found

    def _edges_of(self, place: Place) -> _Edges:
        follows = self.order.follows(place)
        host_s = self._step_s if self.order.opens_step(place) else 0.0
        edges = [
            (place.position - item.position, item.instruction, host_s if item == follows else 0.0)
            for item in self.order.predecessors(place)
        ]
        return place.instruction, host_s if follows is None else 0.0, edges


_PARTS: tuple[Part, ...] = ("prologue", "step", "flush")


def _evaluation_order(program: Program, part: Part) -> list[str]:
    """Return a part's instructions, each after those of the same part that it needs."""
    sorter: TopologicalSorter[str] = TopologicalSorter()
    latest: dict[Stream, str] = {}
    for item in getattr(program, part):
        before = [edge.instruction for edge in item.after if edge.distance == 0]
        if item.stream in latest:
            before.append(latest[item.stream])
        latest[item.stream] = item.id
        sorter.add(item.id, *before)
    try:
        return list(sorter.static_order())
    except CycleError as error:
        circle = " waits for ".join(f"{part}/{name}" for name in reversed(error.args[1]))
        message = f"program {program.name} can never go on: {circle}"
        raise ProgramError(message, hint="remove one of these dependencies, or reorder a stream") from None
