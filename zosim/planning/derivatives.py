"""How a plan's step and memory change with each figure of its machine, and what limits the step when the first limit is gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zosim.analysis.compare import slowest_rank
from zosim.analysis.critical_path import Bottleneck, bottlenecks, step_path
from zosim.analysis.levers import Lever, levers
from zosim.console import LateBar
from zosim.planning.explain import ALIKE
from zosim.planning.predict import PlannedRun

_STEP = 0.01
"""Part by which a figure is changed: small beside a step's kinks, large beside rounding."""

_LARGEST = 64.0
"""Factor up to which the next limit is looked for."""

_HALVINGS = 4

_NUM_RIVALS = 3
"""Figures that are compared: those on which the step depends most."""


@dataclass(frozen=True)
class Derivative:
    """What one figure of a machine is to a plan."""

    lever: Lever
    # step_time_s, device_bytes, host_bytes: derivatives by the figure, in SI units: seconds, or bytes of the fullest device and host,
    # for each unit of it.
    step_time_s: float
    device_bytes: float
    host_bytes: float
    elasticity: float  # percent by which the step changes with a percent more of it

    @property
    def matters(self) -> bool:
        """Whether the step depends on it."""
        return abs(self.elasticity) > ALIKE


def derivatives(planned: PlannedRun, *, each: bool = False) -> tuple[Derivative, ...]:
    """Return what every figure is to a plan, those on which its step depends most first.

    `each`: whether links, devices and memories are looked at one by one, rather than all of one type together.

    Central differences of simulated steps, a percent to either side. A step time has kinks where another instruction becomes
    critical; at one of them this is the mean of the slopes on both sides.
    """
    topology, devices = planned.topology, planned.plan.placement.devices
    figures = levers(topology, devices, to_derive=True, each=each)
    listed = []
    with LateBar("deriving by figures") as bar:
        for lever in figures:
            if lever.value:
                listed.append(_derivative(planned, lever))
                bar.advance()
    return tuple(sorted(listed, key=lambda item: -abs(item.elasticity)))


def _derivative(planned: PlannedRun, lever: Lever) -> Derivative:
    less, more = _to_either_side(planned, lever)
    width = 2 * _STEP * lever.value
    step_s = (more.step_time_s - less.step_time_s) / width
    sizes = [(run.footprints.largest.device_bytes, run.footprints.fullest.size_bytes) for run in (less, more)]
    device, host = ((after - before) / width for before, after in zip(*sizes, strict=True))
    return Derivative(lever, step_s, device, host, step_s * lever.value / planned.step_time_s)


def _to_either_side(planned: PlannedRun, lever: Lever) -> tuple[PlannedRun, PlannedRun]:
    less, more = (planned.on(lever.apply(planned.topology, 1 + part)) for part in (-_STEP, _STEP))
    return less, more


def _weight(planned: PlannedRun, lever: Lever) -> float:
    """Return how much a step depends on a figure, whatever the sign."""
    less, more = _to_either_side(planned, lever)
    return abs(more.step_time_s - less.step_time_s)


def limits(planned: PlannedRun) -> tuple[Bottleneck, ...]:
    """Return what the critical path of the slowest rank consists of, the bottleneck first."""
    rank = slowest_rank(planned.timeline)
    path = step_path(planned.timeline_of(rank), planned.programs.program_of(rank), rank)
    return bottlenecks(path)


@dataclass(frozen=True)
class NextLimit:
    """What a step depends on most once another figure no longer holds it up."""

    # first, then: the figure on which it depends most now, and the one on which it does then.
    first: Lever
    then: Lever
    factor: float  # how many times as large the first (a latency: as small) has to be for that
    step_time_s: float


def next_limit(planned: PlannedRun, known: Sequence[Derivative]) -> NextLimit | None:
    """Return the limit after the first; None where a step depends on one figure alone."""
    rivals = [item.lever for item in known if item.matters][:_NUM_RIVALS]
    if len(rivals) < 2:
        return None
    first = rivals[0]

    def at(factor: float) -> tuple[PlannedRun, Lever]:
        """Return the run with the first figure better by a factor, and the figure on which it depends most."""
        better = 1 / factor if first.type == "latency" else factor
        run = planned.on(first.apply(planned.topology, better))
        return run, max(rivals, key=lambda lever: _weight(run, lever))

    low, high = 1.0, 2.0
    while at(high)[1] is first:
        low, high = high, 2 * high
        if high > _LARGEST:
            return None
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if at(middle)[1] is first else (low, middle)
    run, then = at(high)
    return NextLimit(first, then, high, run.step_time_s)
