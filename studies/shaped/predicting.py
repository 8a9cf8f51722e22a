"""Predictions of the cases of a network, joined with what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from costmodel.rates.profile import Bound, Profile
from costmodel.rates.slowdown import at_slowdown, slowdown_in
from costmodel.scoring import Row
from studies.shaped.cases import HostLayout, ShapedCase, cases_of
from studies.shaped.hosts import machines_of, plan_of, topology_of
from studies.shaped.worker import NetworkSteps
from studies.timed_cases import TimedCase
from topology import Topology
from zosim.lowering import lower_all
from zosim.simulators.fold import fold
from zosim.simulators.lockstep import simulate_many
from zosim.simulators.world import World
from zosim.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class ShapedRow(TimedCase):
    """One case, predicted on links of the declared rate, and measured."""

    rate: str
    strategy: str
    layout: str
    measured_link_s: float  # step time predicted on links of the bandwidth that one large all_gather reached
    fastest_s: float  # least of the timed steps, of which the measured time is the median
    num_steps: int
    # Busy seconds of a step of rank 0 by label, predicted and measured, those first that differ most.
    labels: tuple[tuple[str, float, float], ...]

    @property
    def on_measured_link(self) -> Row:
        """The step time, as it is predicted on the link as it was measured."""
        return Row(self.name, "step_s", self.measured_s, self.measured_link_s)


def predict(
    rate: str,
    layout: HostLayout,
    measured_steps: NetworkSteps,
    latency_s: float,
    machine: Topology,
    profile: Profile,
) -> list[ShapedRow]:
    """Return a row per case of a network.

    - `measured_steps`: what was measured on it.
    - `latency_s`: of a small message between hosts, besides what the profile says that one within a host takes.
    - `machine`: this machine, of which the hosts are parts.
    - `profile`: of one thread.
    """
    declared = topology_of(machine, layout.num_hosts, rate, latency_s)
    reached = topology_of(
        machine, layout.num_hosts, rate, latency_s, measured_steps.link.bandwidth_bytes_per_s
    )
    cores = (
        measured_steps.link.num_cores,
        measured_steps.link.core_s_per_byte,
        measured_steps.link.busy_latency_s,
    )
    measured = {item.name: item for item in measured_steps.cases}
    rows = []
    for case in (case for case in cases_of(rate, layout) if case.name in measured):
        steps = measured[case.name]
        central = _simulated(case, declared, profile, cores)
        slowdowns = slowdown_in(profile, steps.before_s), slowdown_in(profile, steps.after_s)
        low_s, high_s = (
            _simulated(case, declared, profile, cores, end).step_time_s for end in ("low", "high")
        )
        rows.append(
            ShapedRow(
                rate=rate,
                strategy=case.strategy,
                layout=layout.name,
                name=case.name,
                predicted_s=central.step_time_s,
                low_s=low_s,
                high_s=high_s,
                measured_link_s=_simulated(case, reached, profile, cores).step_time_s,
                measured_s=median(steps.step_s),
                fastest_s=min(steps.step_s),
                num_steps=len(steps.step_s),
                foreign_cores=steps.foreign_cores,
                slowed_s=_simulated(case, declared, at_slowdown(profile, slowdowns[0]), cores).step_time_s,
                slowdown_before=slowdowns[0],
                slowdown_after=slowdowns[1],
                labels=_labels(central.seconds_by_label(0), steps.seconds_by_label),
            )
        )
    return rows


def _simulated(
    case: ShapedCase,
    topology: Topology,
    profile: Profile,
    cores: tuple[float, float, float],
    bound: Bound = "central",
) -> Timeline:
    plan = plan_of(case, topology.name)
    programs = lower_all(plan)
    machines = machines_of(topology, plan.placement.devices, profile, programs.process_groups, *cores)
    return simulate_many(fold(World.of(programs, machines, bound=bound)))


def _labels(predicted: dict[str, float], measured: dict[str, float]) -> tuple[tuple[str, float, float], ...]:
    names: Sequence[str] = sorted({*predicted, *measured})
    rows = [(name, predicted.get(name, 0.0), measured.get(name, 0.0)) for name in names]
    return tuple(sorted(rows, key=lambda row: -abs(row[1] - row[2])))
