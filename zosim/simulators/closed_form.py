"""The closed form beside the event simulator: when instructions run if nothing is shared.

A max-plus recurrence (:mod:`zosim.simulators.maxplus`) over the graph of all ranks (:mod:`zosim.simulators.run_graph`). A collective is one node
for all members of its group: it starts after the latest of them and takes as long as the slowest of their flows. A message is one node for its
two ranks.

So steps become periodic, with the period of the heaviest circuit of dependencies. Sharing only makes durations longer, and later starts never make anything end earlier. The period is
therefore a lower bound of the simulated step time, and equal to it wherever nothing is shared. It lies between the
busiest stream's seconds and the seconds of all streams together.
"""

from __future__ import annotations

import numpy as np

from costmodel.rates.profile import Bound
from zosim.hardware.machine import Machine
from zosim.program import Program
from zosim.program.instructions import Phase
from zosim.simulators.assembly import without_garbage_collection
from zosim.simulators.lockstep import periodic_step_s
from zosim.simulators.maxplus import MaxPlus
from zosim.simulators.periodic import PeriodDetector
from zosim.simulators.run_graph import Member, RunGraph
from zosim.simulators.world import World, at_own_speeds

# Steps after which the period of a recurrence that has not become periodic is taken from its second half.
MAX_STEPS = 64


def step_time_bound(program: Program, machine: Machine, bound: Bound = "central") -> float:
    """Return the seconds per step in the steady state, as if nothing were shared.

    Parameters
    ----------
    program : Program
        If it is of several ranks, the others are taken to be in step with this one.
    machine : Machine
        Hardware of the rank.
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

    Raises ProgramError as for :func:`step_time_bound`.
    """
    period_s, ends = _run(world)
    return second_half_s(ends[-1], ends[MAX_STEPS // 2 - 1]) if period_s is None else period_s


@without_garbage_collection()
def step_time_of(world: World) -> float:
    """Return the seconds per step in the steady state: by the closed form where it is exact, else by events.

    - `world`: Best a folded one (:func:`~zosim.simulators.fold.fold`).

    Raises ProgramError: as for :func:`step_time_bound`.
    """
    alone = at_own_speeds(world)
    period_s = None if alone is None else _run(alone)[0]
    return periodic_step_s(world) if period_s is None else period_s


def _run(world: World) -> tuple[float | None, list[float]]:
    """Return the seconds per step, None where steps never repeat, and when each of the steps ended."""
    ends: list[float] = []
    if not any(template.program.step for template in world.templates):
        return 0.0, ends
    recurrence = Recurrence(world, MAX_STEPS)
    detector = PeriodDetector(depth=recurrence.graph.max_distance)
    recurrence.advance()
    for _ in range(MAX_STEPS):
        times = np.array(list(recurrence.advance().values())).ravel()
        cycle = detector.completed(times)
        if cycle is not None:
            return cycle.period_s / cycle.num_steps, ends
        ends.append(float(times.max()))
    return None, ends


def second_half_s(last_s: float, middle_s: float) -> float:
    """Return the seconds per step from the ends of the last step and of the middle one."""
    return (last_s - middle_s) / (MAX_STEPS - MAX_STEPS // 2)


class Recurrence:
    """Positions of a run (prologue, steps, flush), evaluated one after the other.

    Raises ProgramError if a dependency names no instruction, or instructions wait for each other in a circle.
    """

    def __init__(self, world: World, num_steps: int) -> None:
        self.graph = RunGraph(world, num_steps)
        self._run: MaxPlus[float] = MaxPlus(0.0, max)
        self._seconds = {
            phase: [max(self._alone_s(phase, member) for member in members) for members in nodes]
            for phase, nodes in self.graph.members.items()
        }

    def advance(self) -> dict[tuple[int, str], tuple[float, float]]:
        """Evaluate the next position and return start and end of its instructions, by rank and id."""
        position = len(self._run.ends)
        phase, nodes = self.graph.graphs[0].phase(position), self.graph.nodes(position)
        ends = self._run.advance(nodes, [self._seconds[phase][number] for number, _ in nodes])
        starts = self._run.starts[-1]
        # The host's own nodes are no instructions.
        return {
            (rank, ids[own]): (starts[number], end_s)
            for number, end_s in ends.items()
            for rank, own in self.graph.members[phase][number]
            if own < len(ids := self.graph.graphs[rank].ids[phase])
        }

    def _alone_s(self, phase: Phase, member: Member) -> float:
        rank, number = member
        template, ids = self.graph.world.template(rank), self.graph.graphs[rank].ids[phase]
        return template.activities[phase, ids[number]].seconds if number < len(ids) else template.step_s
