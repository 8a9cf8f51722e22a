"""The closed form of one program for many sets of constants at once.

What differs between sets of constants are durations alone, and most instructions of a program share theirs with the same
instruction of another block. Beside the recurrence stands what each shared resource must serve in a step: where streams
compete for one (allocations stop a device's kernels), the step takes at least as long as that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from zosim.hardware.machine import Activity, Machine
from zosim.program import Program
from zosim.program.instructions import Instruction
from zosim.program.step_graph import StepGraph
from zosim.simulators.maxplus import Floats, MaxPlus, Node, in_order

NUM_STEPS = 4
"""Steps that are evaluated; the last two are alike (tests compare with :func:`zosim.simulators.closed_form.step_time_bound`)."""


@dataclass(frozen=True)
class Compiled:
    """A program's periodic step."""

    program: Program
    representatives: tuple[Instruction, ...]  # one instruction of each kind of work
    kinds: tuple[int, ...]  # which of them each instruction of the step is like
    # The instructions of the step by their numbers, and the host's own work behind the last, each after what it waits
    # for.
    nodes: tuple[Node, ...]

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """How many instructions of the step are of each kind."""
        return np.bincount(self.kinds, minlength=len(self.representatives))

    def step_s(self, machines: Sequence[Machine]) -> Floats:
        """Return the seconds of a periodic step on each of `machines`, the second and later ones close to the first.

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

    def _critical(self, activities: Mapping[int, Activity], host_s: float) -> tuple[Floats, float]:
        """Return how often each kind counts towards a step's seconds, and how often the host's preparation does."""
        weights, num_prepared = self._path(activities, host_s)
        seconds = sum(weights[kind] * activity.seconds for kind, activity in activities.items())
        busy = self._busiest(activities)
        busy_s = sum(busy[kind] * activity.seconds for kind, activity in activities.items())
        return (busy, 0.0) if busy_s > seconds + num_prepared * host_s else (weights, num_prepared)

    def _path(self, activities: Mapping[int, Activity], host_s: float) -> tuple[Floats, float]:
        run: MaxPlus[float] = MaxPlus(0.0, max)
        seconds = [*(activities[kind].seconds for kind in self.kinds), host_s]
        for _ in range(NUM_STEPS):
            run.advance(self.nodes, (seconds[number] for number, _ in self.nodes))
        last, before = (self._counted(run, step) for step in (NUM_STEPS - 1, NUM_STEPS - 2))
        return last[0] - before[0], last[1] - before[1]

    def _counted(self, run: MaxPlus[float], step: int) -> tuple[Floats, float]:
        """Return the instructions of each kind on the longest path to a step's end, and the host's preparations on it."""
        counts, num_prepared = np.zeros(len(self.representatives)), 0.0
        host = len(self.kinds)
        latest = max(range(host), key=run.ends[step].__getitem__)
        for number, edge in run.critical_path(dict(self.nodes), latest, step):
            if number < host:
                counts[self.kinds[number]] += 1
            else:
                # What is before the first step is not waited for.
                num_prepared += edge is not None
        return counts, num_prepared

    def _busiest(self, activities: Mapping[int, Activity]) -> Floats:
        """Return the part of each kind's seconds that the busiest device's kernels are taken, times its count."""
        shares: dict[str, Floats] = {"": np.zeros(len(self.representatives))}
        for kind, activity in activities.items():
            for name, share in activity.uses:
                if name.endswith(":kernels"):
                    kernel_share = shares.setdefault(name, np.zeros(len(self.representatives)))
                    kernel_share[kind] += share * self.counts[kind]
        seconds = np.array([activities[kind].seconds for kind in range(len(self.representatives))])
        return max(shares.values(), key=lambda share: float(share @ seconds))


def compiled(program: Program) -> Compiled:
    """Return a program's step, ready to be evaluated. Its dependencies must reach back one step at most."""
    numbers: dict[tuple[object, ...], int] = {}
    representatives: list[Instruction] = []
    kinds = []
    for item in program.step:
        key = (item.work, item.stream, _space(program, item))
        if key not in numbers:
            numbers[key] = len(representatives)
            representatives.append(item)
        kinds.append(numbers[key])
    edges = StepGraph(program, 3, host_takes_time=True).before(3)
    return Compiled(program, tuple(representatives), tuple(kinds), tuple(in_order(edges)))


def _space(program: Program, item: Instruction) -> str:
    return program.buffer(item.writes[0].buffer).space if item.writes else ""
