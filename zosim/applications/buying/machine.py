"""A job, and what a machine would take for it: bounded by the closed form, or simulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from costmodel.devices.datasheet import host_memory_at
from costmodel.devices.prices import Payment, Range
from costmodel.rates.profile import Bound, Profile
from topology.errors import PlanError
from topology.figures import Figure
from topology.graph import Topology
from topology.hardware import resolve as topology_named
from topology.schema import Node
from zosim.analysis.levers import Lever, levers
from zosim.config import PlanConfig, filled, merge
from zosim.planning.block_bound import BlockBounder
from zosim.planning.bounds import Bounds
from zosim.planning.planner import Candidate, Decision, choose
from zosim.planning.predict import Prediction, routed
from zosim.planning.request import Hardware, Request
from zosim.planning.split_options import SplitOptions
from zosim.plans import Mesh, Plan

_SECONDS_PER_HOUR = 3600.0
_NOTHING = 1e-6
"""Share of a domain that belongs to others; a memory of no bytes cannot be."""


@dataclass(frozen=True)
class Job:
    """What is to be done."""

    # What is set of its plans; without a format of the weights it is the checkpoint's, where a machine has units for it.
    config: PlanConfig
    num_steps: int
    # Where stages may split the model; by default between blocks alone.
    split_options: SplitOptions = field(default_factory=SplitOptions)

    def __post_init__(self) -> None:
        config = filled(self.config)
        object.__setattr__(self, "config", config)
        if (config.seq or 0) > config.spec.max_positions:
            raise PlanError(
                f"--seq {config.seq} exceeds the {config.spec.max_positions} positions of {config.spec.name}",
                hint=f"use --seq {config.spec.max_positions} or less",
            )

    @cached_property
    def bounder(self) -> BlockBounder:
        """Bounds known already: what a rank does is the same on all machines, and what it takes on those alike."""
        return BlockBounder(self.config.spec)

    def request(
        self, name: str, topology: Topology, num_devices: int, *, mesh: Mesh | None = None
    ) -> Request:
        """Return what the planner is asked for on a machine."""
        config = self.config if mesh is None else merge(self.config, PlanConfig(mesh=mesh))
        return Request.of(config, self._hardware(name, topology, num_devices), self.split_options)

    def decision(self, name: str, topology: Topology, num_devices: int) -> Decision:
        """Return the plan that the planner chooses on a machine, simulated, and what else it weighed."""
        return choose(self.request(name, topology, num_devices), self.bounder)

    def _hardware(self, name: str, topology: Topology, num_devices: int) -> Hardware:
        return Hardware.of(topology, name, max_ranks=num_devices, is_calibrated=False, known=self._profiles)

    @cached_property
    def _profiles(self) -> dict[Profile, Profile]:
        return {}

    def hours(self, step_s: Range) -> Range:
        """Return what the job takes at so many seconds a step."""
        return step_s * (self.num_steps / _SECONDS_PER_HOUR)


@dataclass(frozen=True)
class PricedMachine:
    """A machine with as many of its devices as a job may use, and what the job takes there."""

    name: str  # as the price table and the command line know it
    topology: Topology  # what the job has of it: all, or the share that comes with single devices
    num_devices: int  # that the plan uses, at most those that were asked for
    num_rented: int  # devices that are paid for where single ones are let
    payments: Collection[Payment]  # ways to pay in which the job has so much of the machine
    # Every placement that was bounded, those that fit first, fastest first.
    candidates: tuple[Candidate, ...]
    step_s: Range  # of the best that fits, from the closed form or simulated
    prediction: Prediction | None = None

    @property
    def best(self) -> Candidate:
        """The fastest placement that fits."""
        return self.candidates[0]

    @property
    def plan(self) -> Plan:
        """That placement as a plan."""
        return self.best.plan

    @cached_property
    def levers(self) -> tuple[Lever, ...]:
        """Figures that its plan depends on."""
        return levers(self.topology, self.plan.placement.devices)


def interval(job: Job, name: str, topology: Topology, best: Candidate) -> Range:
    """Return the closed form of a plan's step with every constant at its middle, and at either end of its interval."""
    request = job.request(name, topology, best.plan.placement.world_size)
    central, low, high = (
        Bounds(_at_end(request, end), bounder=job.bounder).of(routed(best.plan, end)).seconds
        for end in ("central", "low", "high")
    )
    return Range(best.seconds, best.seconds * low / central, best.seconds * high / central)


def _at_end(request: Request, end: Bound) -> Request:
    """Return a request with the first device's constants, and what is assumed of host memory, at one end of their intervals."""
    hardware = request.hardware
    topology = host_memory_at(hardware.topology, end)
    profile = _fixed(hardware.profile, end)
    return replace(request, hardware=replace(hardware, topology=topology, profile=profile, profiles=None))


def _fixed(profile: Profile, end: Bound) -> Profile:
    constants = [
        constant.model_copy(update=dict.fromkeys(("value", "low", "high"), constant.at(end)))
        for constant in profile.constants
    ]
    return profile.with_constants(*constants, origin=profile.origin)


def simulated(job: Job, machine: PricedMachine) -> PricedMachine:
    """Return a machine with the plan that the planner chooses there, simulated event by event, interval included."""
    decision = job.decision(machine.name, machine.topology, machine.num_rented)
    prediction = decision.prediction
    return replace(
        machine,
        num_devices=decision.plan.placement.world_size,
        candidates=(decision.chosen, *decision.others, *decision.rejected),
        step_s=Range(prediction.step_time_s, prediction.low_s, prediction.high_s),
        prediction=prediction,
    )


def share_of(topology: Topology, num_devices: int) -> Topology:
    """Return a machine of which a buyer has the first devices alone, and of each host what goes with them.

    A domain's memory, its bandwidth and its cores are shared out among the devices that lie at it. A domain whose devices are all
    let to others keeps next to nothing.
    """
    devices = [device.id for device in topology.compute_devices]
    memory_of = {
        node.id: topology.host_memory(node.id).id for node in topology.nodes if node.spec is not None
    }
    total = Counter(memory_of[device] for device in devices)
    held = Counter(memory_of[device] for device in devices[:num_devices])

    def shared(node: Node) -> Node:
        memory = node.id if node.type == "memory" else memory_of.get(node.id)
        if memory is None or node.id in devices:
            return node
        share = max(held[memory] / total[memory] if total[memory] else 0.0, _NOTHING)
        if node.spec is not None:
            cores = _times(node.spec.cores, max(share, 1 / node.spec.num_cores))
            share_id = f"{node.spec.id}-beside-{memory}"  # two that have other cores are two kinds
            return node.model_copy(
                update={"spec": node.spec.model_copy(update={"id": share_id, "cores": cores})}
            )
        return node.model_copy(
            update={field: _times(getattr(node, field), share) for field in ("capacity", "bandwidth")}
        )

    return topology.model_copy(update={"nodes": tuple(map(shared, topology.nodes))})


def _times(figure: Figure | None, factor: float) -> Figure:
    assert figure is not None
    return figure.model_copy(update={"value": figure.value * factor})


def machines_named(names: Sequence[str]) -> Iterator[tuple[str, Topology]]:
    """Yield the machines of these names.

    Raises TopologyError if a name is neither a preset nor a file.
    """
    for name in names:
        yield name, topology_named(name)
