"""What a plan will do: step time with an interval, memory by component, and what limits it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from costmodel.devices.datasheet import host_memory_at
from costmodel.rates.profile import Bound, Profile
from costmodel.rates.slowdown import at_slowdown, off_slowdown, slowdown_in
from topology.errors import ProgramError, TimelineError
from topology.graph import Topology
from topology.units import format_bytes, format_seconds
from zosim.analysis.compare import AtSlowdown, slowest_rank
from zosim.analysis.critical_path import Bottleneck, bottleneck, step_path
from zosim.hardware.machine import Machine
from zosim.hardware.machines import machines_for
from zosim.hardware.profiles import Profiles
from zosim.lowering import lower_all
from zosim.planning.footprint import Footprint, Footprints, Pinning, footprint, footprints, pinning
from zosim.planning.request import profiles_of
from zosim.plans import Plan
from zosim.program import Program
from zosim.program.program_set import ProgramSet
from zosim.program.validate_set import validate_set
from zosim.report import Report, Reportable, Table, frame
from zosim.simulators import Simulator
from zosim.simulators.closed_form import step_time_of
from zosim.simulators.fold import fold
from zosim.simulators.lockstep import simulate_many
from zosim.simulators.world import World
from zosim.timeline import Timeline

EXCHANGES = ("exchange", "gather")
"""Labels of what ranks send to each other: losses, and shares of blocks."""

_FEW_RANKS = 16


@dataclass(frozen=True)
class Contention:
    """Something that several ranks use."""

    resource: str
    ranks: tuple[int, ...]
    share: float  # part of a step's time for which it would be busy if it served them one after the other


@dataclass(frozen=True, repr=False)
class Prediction:
    """A predicted step.

    Attributes
    ----------
    step_time_s, low_s, high_s : float
        Periodic step time of the slowest rank. Its bounds have every constant of the profiles, and the routing of experts
        (:meth:`costmodel.models.experts.Experts.bounding`), at the fastest, or at the slowest end of its interval.
    tokens_per_s : float
        Each token counted once per step, although it is forwarded at every evaluation point.
    footprints : Footprints
        Of all ranks and hosts.
    bottleneck : Bottleneck
        Of the slowest rank.
    slowest_rank : int
        The last one to end a step.
    seconds_by_label : tuple of (str, float)
        Its busy seconds per step, the largest first; they overlap where streams do.
    contention : tuple of Contention
        What several ranks share, the busiest first.
    profile_origin : str
        ``calibrated`` or ``datasheet``.
    disturbed_share : float
        Share of the profile's calibration that others disturbed, if that is too much to rely on; else 0.
    pinning : Pinning or None
        What pinning memory takes before the first step, where any is pinned.
    """

    step_time_s: float
    low_s: float
    high_s: float
    tokens_per_s: float
    footprints: Footprints
    bottleneck: Bottleneck
    slowest_rank: int
    seconds_by_label: tuple[tuple[str, float], ...]
    contention: tuple[Contention, ...]
    profile_origin: str
    pinning: Pinning | None = None
    disturbed_share: float = 0.0

    def __repr__(self) -> str:
        size = format_bytes(self.footprints.largest.device_bytes)
        return f"Prediction({self.interval}, {size} on the fullest device)"

    @property
    def interval(self) -> str:
        """The step time in words, with the ends between which it lies."""
        middle, low, high = map(format_seconds, (self.step_time_s, self.low_s, self.high_s))
        return f"{middle}  (between {low} and {high})"

    def _repr_html_(self) -> str:
        from zosim.analysis.pictures import bars_svg, with_picture

        facts = [
            ("step time", self.interval),
            ("throughput", f"{self.tokens_per_s:,.0f} tokens/s"),
            (
                "bottleneck",
                f"{self.bottleneck.description}, {self.bottleneck.share:.0%} of the critical path",
            ),
            ("device memory", format_bytes(self.footprints.largest.device_bytes)),
            ("host memory", format_bytes(self.footprints.fullest.size_bytes)),
        ]
        bars = bars_svg({label: (seconds,) for label, seconds in self.seconds_by_label}, ("busy",))
        return with_picture(Report("", Table(("predicted", ""), facts)), bars)

    def to_pandas(self) -> Any:
        """Return the slowest rank's busy seconds per step by label as a pandas frame."""
        return frame({"label": label, "seconds": seconds} for label, seconds in self.seconds_by_label)

    @property
    def exchange_s(self) -> float:
        """Seconds per step that the slowest rank's link is busy with exchanges, waiting for the others included."""
        return sum(seconds for label, seconds in self.seconds_by_label if label in EXCHANGES)


@dataclass(frozen=True, repr=False)
class PlannedRun(Reportable):
    """A plan on the hardware that it is predicted for, with its programs.

    Attributes
    ----------
    plan : Plan
        Plan to predict.
    topology : Topology
        Machine that has the plan's devices.
    profile : Profile
        What operations cost on the first rank's device.
    edited : ProgramSet, optional
        Programs to use in place of what the plan is lowered to.
    profiles : Profiles, optional
        What operations cost on every rank's device; by default as on the first one's.
    one_process : bool
        Whether one process of each host drives all its devices, as published systems do, so that one thread issues the
        copies of all. In runs every rank is a process.
    simulator : {"lockstep", "simpy"}
        See :data:`~zosim.simulators.Simulator`.
    is_validated : bool
        Whether the validator judges the programs; off where many plans are compared, of which the chosen one is judged.
    """

    plan: Plan
    topology: Topology
    profile: Profile
    edited: ProgramSet | None = None
    profiles: Profiles | None = None
    one_process: bool = False
    simulator: Simulator = "lockstep"
    is_validated: bool = True

    def __repr__(self) -> str:
        return f"PlannedRun({self.plan.model.name}: {self.plan.method} on {self.topology.name}, {self.prediction.interval})"

    def view(self) -> Report:
        """Return the prediction, and what several ranks cost each other."""
        from zosim.planning.views import simulation_view

        return simulation_view(self)

    def _repr_html_(self) -> str:
        from zosim.analysis.pictures import timeline_svg, with_picture

        timeline = self.timeline_of(self.prediction.slowest_rank)
        return with_picture(self.view(), timeline_svg({"predicted": timeline}))

    def to_pandas(self) -> Any:
        """Return the spans of the slowest rank's timeline as a pandas frame."""
        return frame(asdict(span) for span in self.timeline_of(self.prediction.slowest_rank).spans)

    @cached_property
    def programs(self) -> ProgramSet:
        """The programs of all ranks, validated unless that is left to others.

        Raises
        ------
        ProgramError
            If the validator refuses one, or all together, or they are of another number of ranks.
        """
        programs = self.edited or lower_all(self.plan)
        if programs.world_size != self.plan.placement.world_size:
            message = (
                f"the programs are for {programs.world_size} ranks, but the plan has "
                f"{self.plan.placement.world_size}"
            )
            raise ProgramError(message, hint="lower this plan with `zosim lower`, and edit that")
        if self.is_validated:
            validate_set(programs)
        return programs

    @property
    def program(self) -> Program:
        """The program of the first rank."""
        return self.programs.program_of(0)

    @cached_property
    def rank_profiles(self) -> tuple[Profile, ...]:
        """What operations cost on every rank's device."""
        return profiles_of(self.plan.placement, self.profile, self.profiles)

    @cached_property
    def machines(self) -> tuple[Machine, ...]:
        """What the simulator knows about every rank's hardware."""
        return self._machines_of(self.topology)

    @cached_property
    def near_machines(self) -> tuple[Machine, ...]:
        """The machines, whatever their hosts' nearest memory holds; a planner that knows them sets them."""
        return self._near_machines(self.topology)

    def _near_machines(self, topology: Topology) -> tuple[Machine, ...]:
        devices, groups = self.plan.placement.devices, self.programs.process_groups
        hosts = [topology.host_of(device).id for device in devices]
        # A thread that issues copies for several devices is one resource of all of them.
        processes = [hosts.index(host) for host in hosts] if self.one_process else None
        return machines_for(topology, devices, self.rank_profiles, groups, processes=processes)

    def _machines_of(self, topology: Topology) -> tuple[Machine, ...]:
        near = self.near_machines if topology is self.topology else self._near_machines(topology)
        devices, shares = self.plan.placement.devices, self.far_shares
        return tuple(
            machine.spilled(topology, devices[rank], shares[rank]) if rank in shares else machine
            for rank, machine in enumerate(near)
        )

    @cached_property
    def far_shares(self) -> Mapping[int, float]:
        """Share of a host's bytes that lie beyond the NUMA domains of its ranks' GPUs, by rank; of ranks where there is one."""
        shares: dict[int, float] = {}
        for host in self.footprints.hosts:
            devices = [self.plan.placement.devices[rank] for rank in host.ranks]
            # A CPU's ranks are planned for the memory next to them alone.
            if any(self.topology.node(device).type != "gpu" for device in devices):
                continue
            near = {self.topology.host_memory(device).id for device in devices}
            near_bytes = sum(self.topology.node(memory).memory_bytes for memory in near)
            if host.size_bytes > near_bytes and len(self.topology.memories_of(devices[0])) > len(near):
                shares |= dict.fromkeys(host.ranks, 1 - near_bytes / host.size_bytes)
        return shares

    @cached_property
    def footprints(self) -> Footprints:
        """Memory of all ranks and hosts."""
        known: dict[tuple[int, int], Footprint] = {}
        ranks = []
        for role, profile in zip(self.programs.roles, self.rank_profiles, strict=True):
            # Ranks of one role on like devices take the same memory.
            key = (role, id(profile))
            if key not in known:
                known[key] = footprint(self.programs.programs[role], profile)
            ranks.append(known[key])
        hosts: dict[str, list[int]] = defaultdict(list)
        for rank, device in enumerate(self.plan.placement.devices):
            hosts[self.topology.host_of(device).id].append(rank)
        return footprints(ranks, hosts)

    @property
    def footprint(self) -> Footprint:
        """Memory of the rank that takes most of its device."""
        return self.footprints.largest

    @cached_property
    def world(self) -> World:
        """All ranks as the simulator sees them."""
        return World.of(self.programs, self.machines)

    def bounding_step_s(self, bound: Bound) -> float:
        """Return the seconds per step with every constant, and what is assumed of the host's memory, at one end of its interval.

        Parameters
        ----------
        bound : {"central", "low", "high"}
            End of the intervals of the profile's constants; the values themselves if ``central``.
        """
        # Memory that nobody has measured is part of what is uncertain, where a step depends on it.
        uses_memory = self.plan.is_offloaded or not self.plan.placement.is_on_gpus
        topology = host_memory_at(self.topology, bound) if uses_memory else self.topology
        machines = self.machines if topology is self.topology else self._machines_of(topology)
        return self._periodic_step_s(World.of(self._programs_at(bound), machines, bound))

    def _programs_at(self, bound: Bound) -> ProgramSet:
        """Return the programs with the routing of experts at one end of its interval; edited ones as they are."""
        plan = routed(self.plan, bound)
        return self.programs if plan is self.plan or self.edited is not None else lower_all(plan)

    @cached_property
    def step_time_s(self) -> float:
        """Seconds per step once steps repeat, that of the slowest rank."""
        return self._periodic_step_s(self.world)

    def _periodic_step_s(self, world: World) -> float:
        # The reference simulator gets every rank: folding is what it is to be held against.
        return self._by_simpy(world).step_time_s if self.simulator == "simpy" else step_time_of(fold(world))

    def _by_simpy(self, world: World, num_steps: int | None = None) -> Timeline:
        from zosim.simulators.simulate import simulate_world

        return simulate_world(world, num_steps=num_steps)

    def on(self, topology: Topology) -> PlannedRun:
        """Return the same plan and programs on a changed machine.

        Parameters
        ----------
        topology : Topology
            The machine with changed figures.

        Raises
        ------
        TopologyError
            If it has a device of the plan no more, or no way between two.
        """
        devices = self.plan.placement.devices
        profiles = (self.profiles or Profiles(self.topology)).on(topology)
        profile = profiles.of(devices[0], devices.count(devices[0]))
        changed = replace(self, topology=topology, profile=profile, profiles=profiles)
        # They depend on the plan alone, and take the most time.
        changed.__dict__["programs"] = self.programs
        return changed

    def at_slowdown_of(self, measured: Timeline) -> AtSlowdown | None:
        """Return the step at the clock rate that the machine had before a run.

        None where the run or the profile does not know a pace, and where devices are unlike: one of them was looked at.

        Parameters
        ----------
        measured : Timeline
            Timeline of the run, which has the pace of the machine before it.
        """
        reference_s = measured.reference_s
        if reference_s is None or "reference_s" not in self.profile.values():
            return None
        if any(profile != self.profile for profile in self.rank_profiles):
            return None
        ratio = slowdown_in(self.profile, reference_s)
        there = replace(self, profile=at_slowdown(self.profile, ratio), profiles=None)
        return AtSlowdown(off_slowdown(self.profile, ratio), there.step_time_s)

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated run, until its steps repeat; of many ranks one of each class."""
        return self.simulated()

    def simulated(self, *, num_steps: int | None = None, rank: int | None = None) -> Timeline:
        """Return the simulated run.

        Parameters
        ----------
        num_steps : int, optional
            By default until steps repeat.
        rank : int, optional
            The only one to list; by default all, or of many one of each class.
        """
        if self.simulator == "simpy":
            return self._by_simpy(self.world, num_steps)
        # Of many ranks nobody reads every timeline.
        if rank is None and self.world.size > _FEW_RANKS:
            return simulate_many(fold(self.world), num_steps=num_steps)
        return simulate_many(self.world, num_steps=num_steps, ranks=None if rank is None else [rank])

    def timeline_of(self, rank: int) -> Timeline:
        """Return the simulated run with that rank in it.

        Raises
        ------
        TimelineError
            If there is no such rank.
        """
        if not 0 <= rank < self.plan.placement.world_size:
            message = f"the plan has no rank {rank}"
            hint = f"ranks are numbered from 0 to {self.plan.placement.world_size} - 1"
            raise TimelineError(message, hint=hint)
        return self.timeline if rank in self.timeline.ranks else self.simulated(rank=rank)

    @cached_property
    def prediction(self) -> Prediction:
        """The periodic step in numbers."""
        low_s, high_s = self.bounding_step_s("low"), self.bounding_step_s("high")
        rank, step_time_s = slowest_rank(self.timeline), self.step_time_s
        return Prediction(
            step_time_s=step_time_s,
            low_s=low_s,
            high_s=high_s,
            tokens_per_s=self.plan.tokens_per_step / step_time_s,
            footprints=self.footprints,
            bottleneck=bottleneck(step_path(self.timeline, self.programs.program_of(rank), rank)),
            slowest_rank=rank,
            seconds_by_label=tuple(self.timeline.seconds_by_label(rank).items()),
            contention=tuple(contention(self.programs, self.machines, step_time_s)),
            profile_origin=self.rank_profiles[rank].origin,
            pinning=pinning(self.programs, self.rank_profiles[rank]),
            disturbed_share=max(
                (p.disturbed_share for p in self.rank_profiles if p.is_disturbed), default=0.0
            ),
        )


def routed(plan: Plan, bound: Bound) -> Plan:
    """Return a plan whose model's experts are visited as at one end of the interval of their routing.

    Parameters
    ----------
    plan : Plan
    bound : {"central", "low", "high"}
        ``low`` visits the fewest experts.
    """
    if (experts := plan.model.experts) is None or experts.bounding(bound) == experts:
        return plan
    model = plan.model.model_copy(update={"experts": experts.bounding(bound)})
    return plan.model_copy(update={"model": model})


def contention(programs: ProgramSet, machines: Sequence[Machine], step_time_s: float) -> Iterable[Contention]:
    """Return how busy ranks keep what they share, the busiest first."""
    shared = [
        Contention(name, tuple(by_rank), sum(by_rank.values()) / step_time_s)
        for name, by_rank in _busy_s(programs, machines).items()
        if len(by_rank) > 1
    ]
    return sorted(shared, key=lambda item: -item.share)


def busy_shares(planned: PlannedRun) -> dict[str, float]:
    """Return the share of a step for which each resource would be busy if it served its ranks one after the other."""
    busy_s = _busy_s(planned.programs, planned.machines)
    return {name: sum(by_rank.values()) / planned.step_time_s for name, by_rank in busy_s.items()}


def link_bytes(planned: PlannedRun) -> dict[str, float]:
    """Return the bytes that all ranks send over each link direction, and move in each host memory, in a step."""
    machines = planned.machines
    return {
        name: sum(seconds * machines[rank].capacities[name] for rank, seconds in by_rank.items())
        for name, by_rank in _busy_s(planned.programs, machines).items()
        if name in planned.topology.resources
    }


def _busy_s(programs: ProgramSet, machines: Sequence[Machine]) -> Mapping[str, Mapping[int, float]]:
    """Return the seconds of a step for which each rank keeps each resource busy, by resource and rank."""
    loads: dict[tuple[int, object], list[float]] = {}
    busy_s: dict[str, dict[int, float]] = defaultdict(dict)
    for rank, (role, machine) in enumerate(zip(programs.roles, machines, strict=True)):
        key = (role, machine.shape)
        if key not in loads:
            taken = dict.fromkeys(machine.capacities, 0.0)
            for instruction in programs.programs[role].step:
                for name, amount in machine.activity(programs.programs[role], instruction).loads():
                    taken[name] += amount
            loads[key] = list(taken.values())
        # Machines of one shape differ in the names of their resources alone.
        for amount, (name, capacity) in zip(loads[key], machine.capacities.items(), strict=True):
            if amount:
                busy_s[name][rank] = amount / capacity
    return busy_s
