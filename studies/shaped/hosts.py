"""The topology of hosts that are namespaces of this machine, and the machines of their ranks.

Hosts that are namespaces have the cores of one machine among them. The topology says what each sees; the machines that
simulations run on share one set of cores, so that ranks that are more than the cores wait for them, as they do. Memory
bandwidth is not shared in the model: two cores do not use up what the processor's memory gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from costmodel.profile import Profile
from studies.prediction.setting import model_of
from studies.shaped.cases import ShapedCase
from studies.shaped.network import FRAME_EFFICIENCY, rate_bits_per_s
from topology import Topology
from topology.building import figure
from topology.clusters import cluster
from topology.documents import catalogue
from topology.figures import Figure
from topology.schema import Link, LinkType, Node
from zosim.machine import Machine
from zosim.machines import machines_for
from zosim.plan import Estimator, Mesh, Placement, Plan, Precision, Residency, Runtime

_CORES = "machine:cores"


def topology_of(
    machine: Topology,
    num_hosts: int,
    rate: str,
    latency_s: float,
    bandwidth_bytes_per_s: float | None = None,
) -> Topology:
    """Return `num_hosts` hosts like `machine` on a switch.

    Parameters
    ----------
    machine : Topology
        One host, as :func:`topology.detect` finds it.
    num_hosts : int
    rate : str
        Of each host's link, as ``tc`` writes it.
    latency_s : float
        Of a small message from one host to another, besides what it takes within a host.
    bandwidth_bytes_per_s : float, optional
        Payload per second that the links were measured to carry; by default the rate less frames' headers.
    """
    declared = rate_bits_per_s(rate) / 8
    efficiency = FRAME_EFFICIENCY if bandwidth_bytes_per_s is None else bandwidth_bytes_per_s / declared
    host = machine.hosts[0].id
    numa = machine.of_kind("numa")[0].id
    ethernet = LinkType(
        kind="network",
        bandwidth=figure(declared * 8 / 1e6, "Mbit/s", "tc tbf", "declared"),
        latency=Figure(value=latency_s / 2 * 1e6, unit="us", source="small messages", basis="measured"),
        efficiency=figure(min(1.0, efficiency), "1", "headers of frames, or measured", "estimated"),
    )
    nic, switch = "nic0", "network0"
    one = Topology(
        name=f"{rate} hosts",
        description=machine.description,
        nodes=(
            *machine.nodes,
            Node(id=nic, kind="nic", host=host),
            Node(id=switch, kind="network", label="bridge of shaped veth pairs"),
        ),
        links=(
            *machine.links,
            Link(source=numa, target=nic, type=catalogue().link_types["fabric"]),
            Link(source=nic, target=switch, type=ethernet),
        ),
    )
    return cluster(one, num_hosts)


def plan_of(case: ShapedCase, topology: str = "shaped", device: str = "cpu0") -> Plan:
    """Return the plan of a case; every host's device is called `device`."""
    from executors.spec import spec_of_model

    layout, setting = case.layout, case.setting
    hosts = [rank // layout.ranks_per_host for rank in range(layout.world_size)]
    dtype = setting.dtype
    return Plan(
        model=spec_of_model(model_of(setting.shape), name=setting.shape.name),
        placement=Placement(
            topology=topology,
            devices=tuple(f"host{host}/{device}" for host in hosts),
            hosts=tuple(f"host{host}" for host in hosts),
        ),
        batch=setting.batch,
        seq=setting.seq,
        mesh=Mesh.model_validate(case.mesh),
        estimator=Estimator(rng="counter"),
        residency=Residency(**case.axes.get("residency", {})),
        precision=Precision.model_validate(dict.fromkeys(("storage", "compute", "transfer"), dtype)),
        runtime=Runtime(**case.axes.get("runtime", {})),
    )


def machines_of(
    topology: Topology,
    devices: Sequence[str],
    profile: Profile,
    groups: Mapping[str, Sequence[Sequence[int]]],
) -> tuple[Machine, ...]:
    """Return the machine of every rank, all of whose cores are those of this machine."""
    return tuple(_sharing(machine) for machine in machines_for(topology, devices, profile, groups))


def _sharing(machine: Machine) -> Machine:
    capacities = {
        _CORES if name == machine.cores else name: value for name, value in machine.capacities.items()
    }
    return replace(machine, capacities=MappingProxyType(capacities), cores=_CORES)
