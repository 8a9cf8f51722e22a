"""The closed form of one program for many sets of constants at once.

The recurrence of :mod:`zosim.engines.recurrence`, over arrays: what differs between sets of constants are durations alone, and
most instructions of a program share theirs with the same instruction of another block. Beside it stands what each
shared resource must serve in a step: where streams compete for one (allocations stop a device's kernels), the step
takes at least as long as that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from zosim.hardware.machine import Activity, Machine
from zosim.instructions import Instruction
from zosim.places import Order, Place
from zosim.program import Program

Array = NDArray[np.float64]

NUM_STEPS = 4
"""Steps that are evaluated; the last two are alike (tests compare with :func:`zosim.engines.recurrence.step_time_bound`)."""


@dataclass(frozen=True)
class Compiled:
    """A program's steady step as indices.

    Attributes
    ----------
    program : Program
    representatives : tuple of Instruction
        One instruction of each kind of work.
    kinds : tuple of int
        Which of them each instruction of the step is like.
    edges : tuple of tuple of (int, int, bool)
        For each instruction its predecessors: distance in steps, index, and whether the host prepares the step between.
    """

    program: Program
    representatives: tuple[Instruction, ...]
    kinds: tuple[int, ...]
    edges: tuple[tuple[tuple[int, int, bool], ...], ...]

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """How many instructions of the step are of each kind."""
        return np.bincount(self.kinds, minlength=len(self.representatives))

    def step_s(self, machines: Sequence[Machine]) -> Array:
        """Return the seconds of a steady step on each of `machines`, the second and later ones close to the first.

        Notes
        -----
        The first is exact. For the others durations are added up along what was critical on the first: a lower bound,
        and equal wherever the same instructions stay critical, as they do for derivatives.
        """
        first = self._activities(machines[0], range(len(self.representatives)))
        weights, num_prepared = self._critical(first, machines[0].step_s())
        used = np.flatnonzero(weights)
        seconds_per_step = []
        for machine in machines:
            activities = first if machine is machines[0] else self._activities(machine, used.tolist())
            seconds = sum(float(weights[kind]) * activities[kind].seconds for kind in used.tolist())
            seconds_per_step.append(seconds + num_prepared * machine.step_s())
        return np.array(seconds_per_step)

    def seconds_by_cause(self, machine: Machine) -> dict[str, float]:
        """Return the seconds of the critical instructions of one step, by what each consists of mostly."""
        activities = self._activities(machine, range(len(self.representatives)))
        weights, _ = self._critical(activities, machine.step_s())
        causes: dict[str, float] = {}
        for kind, activity in activities.items():
            if weights[kind] > 0:
                cause = activity.limiter or "latency"
                causes[cause] = causes.get(cause, 0.0) + float(weights[kind]) * activity.seconds
        return causes

    def _activities(self, machine: Machine, kinds: Iterable[int]) -> dict[int, Activity]:
        return {kind: machine.activity(self.program, self.representatives[kind]) for kind in kinds}

    def _critical(self, activities: Mapping[int, Activity], host_s: float) -> tuple[Array, float]:
        """Return how often each kind counts towards a step's seconds, and how often the host's preparation does."""
        weights, num_prepared = self._path(activities, host_s)
        seconds = sum(weights[kind] * activity.seconds for kind, activity in activities.items())
        busy = self._busiest(activities)
        busy_s = sum(busy[kind] * activity.seconds for kind, activity in activities.items())
        return (busy, 0.0) if busy_s > seconds + num_prepared * host_s else (weights, num_prepared)

    def _path(self, activities: Mapping[int, Activity], host_s: float) -> tuple[Array, float]:
        durations = [activities[kind].seconds for kind in self.kinds]
        num = len(durations)
        before = [0.0] * num
        chosen: list[list[tuple[int, int, bool] | None]] = []
        last = []
        for _ in range(NUM_STEPS):
            here: list[float] = []
            links: list[tuple[int, int, bool] | None] = []
            for index in range(num):
                start, link = 0.0, None
                for edge in self.edges[index]:
                    time = before[edge[1]] if edge[0] else here[edge[1]]
                    time += host_s if edge[2] else 0.0
                    if time > start:
                        start, link = time, edge
                here.append(start + durations[index])
                links.append(link)
            chosen.append(links)
            last.append(max(range(num), key=here.__getitem__))
            before = here
        ends = [self._counted(chosen, step, last[step]) for step in (NUM_STEPS - 1, NUM_STEPS - 2)]
        return ends[0][0] - ends[1][0], ends[0][1] - ends[1][1]

    def _counted(
        self, chosen: Sequence[Sequence[tuple[int, int, bool] | None]], step: int, index: int
    ) -> tuple[Array, float]:
        """Return the instructions of each kind on the longest path to an instruction, and the preparations on it."""
        counts, num_prepared = np.zeros(len(self.representatives)), 0.0
        while True:
            counts[self.kinds[index]] += 1
            link = chosen[step][index]
            # What the first step waits for in a step before it is no wait.
            if link is None or step < link[0]:
                return counts, num_prepared
            distance, index, is_prepared = link
            step -= distance
            num_prepared += is_prepared

    def _busiest(self, activities: Mapping[int, Activity]) -> Array:
        """Return the part of each kind's seconds that the busiest device's kernels are taken, times its count."""
        shares: dict[str, Array] = {"": np.zeros(len(self.representatives))}
        for kind, activity in activities.items():
            for name, share in activity.uses:
                if name.endswith(":kernels"):
                    kernel_share = shares.setdefault(name, np.zeros(len(self.representatives)))
                    kernel_share[kind] += share * self.counts[kind]
        seconds = np.array([activities[kind].seconds for kind in range(len(self.representatives))])
        return max(shares.values(), key=lambda share: float(share @ seconds))


def compiled(program: Program) -> Compiled:
    """Return a program's step, ready to be evaluated. Its dependencies must reach back one step at most."""
    order = Order(program, 3)
    listed = [item.id for item in program.step]
    index = {name: position for position, name in enumerate(listed)}
    steady = 3
    edges = []
    for name in listed:
        place = Place(steady, name)
        follows = order.follows(place)
        edges.append(
            tuple(
                (steady - item.position, index[item.instruction], item == follows and order.opens_step(place))
                for item in order.predecessors(place)
            )
        )
    kinds: dict[tuple[object, ...], int] = {}
    representatives: list[Instruction] = []
    numbers = []
    for item in program.step:
        key = (item.work, item.stream, _space(program, item))
        if key not in kinds:
            kinds[key] = len(representatives)
            representatives.append(item)
        numbers.append(kinds[key])
    return Compiled(program, tuple(representatives), tuple(numbers), tuple(edges))


def _space(program: Program, item: Instruction) -> str:
    return program.buffer(item.writes[0].buffer).space if item.writes else ""
