"""The topology of hosts that are namespaces of this machine, and the machines of their ranks.

Hosts that are namespaces have the cores of one machine among them. The topology says what each sees; the machines that
simulations run on share one set of cores, so that ranks that are more than the cores wait for them, as they do. Memory
bandwidth is not shared in the model: two cores do not use up what the processor's memory gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

from costmodel.rates.profile import Profile
from studies.prediction.setting import model_of
from studies.shaped.cases import ShapedCase
from studies.shaped.network import FRAME_EFFICIENCY, rate_bits_per_s
from topology import Topology
from topology.building import figure
from topology.clusters import cluster
from topology.documents import catalogue
from topology.figures import Figure
from topology.schema import Link, LinkType, Node
from zosim.hardware.machine import Hop, Machine, Ring
from zosim.hardware.machines import machines_for
from zosim.plans import Mesh, Plan, Split

_CORES = "machine:cores"
_Path = TypeVar("_Path", Ring, Hop)


def topology_of(
    machine: Topology,
    num_hosts: int,
    rate: str,
    latency_s: float,
    bandwidth_bytes_per_s: float | None = None,
) -> Topology:
    """Return `num_hosts` hosts like `machine` on a switch.

    - `machine`: one host, as :func:`topology.detect` finds it.
    - `rate`: of each host's link, as ``tc`` writes it.
    - `latency_s`: of a small message from one host to another, besides what it takes within a host.
    - `bandwidth_bytes_per_s`: payload per second that the links were measured to carry; by default the rate less frames' headers.
    """
    declared = rate_bits_per_s(rate) / 8
    efficiency = FRAME_EFFICIENCY if bandwidth_bytes_per_s is None else bandwidth_bytes_per_s / declared
    host = machine.hosts[0].id
    numa = machine.of_type("numa")[0].id
    ethernet = LinkType(
        technology="network",
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
            Node(id=nic, type="nic", host=host),
            Node(id=switch, type="network", label="bridge of shaped veth pairs"),
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
    from executors.models.spec import spec_of_model
    from zosim.planning.resolve import even_split_points

    layout, setting, mesh = case.layout, case.setting, Mesh.model_validate(case.mesh)
    axes = {name: fields for name, fields in case.axes.items() if name != "densities"}
    split_points = even_split_points(setting.shape.num_blocks, mesh.stage) if mesh.stage > 1 else ()
    density = case.axes.get("densities", {}).get(setting.shape.name)
    densities = () if density is None else (density,)
    split = Split.model_validate(
        {"split_points": split_points, "densities": densities, **axes.get("split", {})}
    )
    hosts = [f"host{rank // layout.ranks_per_host}" for rank in range(layout.world_size)]
    name, devices = setting.shape.name, [f"{host}/{device}" for host in hosts]
    return Plan.model_validate(
        {
            "model": spec_of_model(model_of(setting.shape), name=name, split_blocks=split.split_blocks),
            "placement": {"topology": topology, "devices": devices, "hosts": hosts},
            "batch": setting.batch,
            "seq": setting.seq,
            "perturbations": {"rng": "counter"},
            "weights": {"dtype": setting.dtype},
            **axes,
            "mesh": mesh,
            "split": split,
        }
    )


def machines_of(
    topology: Topology,
    devices: Sequence[str],
    profile: Profile,
    groups: Mapping[str, Sequence[Sequence[int]]],
    num_cores: float | None = None,
    core_s_per_byte: float | None = None,
    busy_latency_s: float = 0.0,
) -> tuple[Machine, ...]:
    """Return the machine of every rank, all of whose cores are those of this machine.

    - `groups`: as for :func:`zosim.hardware.machines.machines_for`.
    - `num_cores`: cores' worth of work that the machine was measured to do for so many ranks; by default all cores'.
    - `core_s_per_byte`: what cores were measured to lose for a byte that goes from one host to another; by default as the profile
      has it.
    - `busy_latency_s`: what large exchanges between hosts were measured to wait for, while ranks compute.
    """
    return tuple(
        _sharing(machine, num_cores, core_s_per_byte, busy_latency_s)
        for machine in machines_for(topology, devices, profile, groups)
    )


def _sharing(
    machine: Machine, num_cores: float | None, core_s_per_byte: float | None, busy_latency_s: float
) -> Machine:
    capacities = {
        _CORES if name == machine.cores else name: value for name, value in machine.capacities.items()
    }
    if num_cores is not None:
        capacities[_CORES] = num_cores
    rings = {name: _carried(ring, core_s_per_byte, busy_latency_s) for name, ring in machine.rings.items()}
    channels = {op: _carried(hop, core_s_per_byte, busy_latency_s) for op, hop in machine.channels.items()}
    return replace(
        machine,
        capacities=MappingProxyType(capacities),
        cores=_CORES,
        rings=MappingProxyType(rings),
        channels=MappingProxyType(channels),
    )


def _carried(path: _Path, core_s_per_byte: float | None, busy_latency_s: float) -> _Path:
    """Return a path with what cores do for a byte on it, if it leads to another host."""
    if path.wire == "memory":
        return path
    own = path.core_s_per_byte if core_s_per_byte is None else core_s_per_byte
    return replace(path, core_s_per_byte=own, busy_latency_s=busy_latency_s)
