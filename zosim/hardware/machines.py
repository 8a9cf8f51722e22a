"""The machines of all ranks, with the rings that join them."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from costmodel.devices.collectives import LOOPBACK_BYTES_PER_S, MESSAGE_S
from costmodel.devices.gpus import architecture_of
from costmodel.devices.nccl import NVLINK_MESSAGE_FRACTION, Communicator
from costmodel.rates.profile import Profile
from topology.errors import TopologyError
from topology.graph import Topology
from topology.rings import RingSet, edge_disjoint_rings
from topology.routes import link_resource_id
from topology.schema import Link
from zosim.hardware.machine import Hop, Machine, Ring
from zosim.program.operations import Recv, Send

_Subgroups = Sequence[Sequence[int]]
_NEIGHBOURS = (-1, 1)
_LINE = "pipeline"
"""The group whose neighbours send each other messages."""
_Hops = tuple[Hop, ...]


def machines_for(
    topology: Topology,
    devices: Sequence[str],
    profiles: Profile | Sequence[Profile],
    process_groups: Mapping[str, _Subgroups] = MappingProxyType({}),
    known: KnownPaths | None = None,
    processes: Sequence[int] | None = None,
) -> tuple[Machine, ...]:
    """Return the machine of every rank.

    - `devices`: node of each rank's device. CPU ranks may share one.
    - `profiles`: what operations cost, on all devices or of each rank.
    - `process_groups`: partitions of the ranks into those that work together (see
      :attr:`~zosim.program.program_set.ProgramSet.process_groups`).
    - `known`: what was found for other ranks on the same topology; more is added.
    - `processes`: number of the process that drives each rank's device, whose one thread issues the copies of all its GPUs; by
      default ranks are processes, as in runs.

    Raises TopologyError if there is no such device, or no path between two that work together.
    Raises ProfileError if a profile is of another type of device.

    The members of a group form a ring in rank order, each sending to the next over the route between their
    devices (between host memories for CPUs of several hosts; within one host's memory, a copy). GPUs of a group that
    edge-disjoint rings of NVLinks join spread what they send over these, in both directions, as NCCL does. A message
    takes the route between two devices alone.
    """
    builder = _Builder(topology, devices, profiles, known or KnownPaths())
    machines = [builder.machine_of(rank) for rank in range(len(devices))]
    num_driven = Counter(processes or ())
    for rank, process in enumerate(processes or ()):
        if machines[rank].routes and num_driven[process] > 1:
            machines[rank] = machines[rank].issued_by(f"process{process}:copies")
    for name, subgroups in process_groups.items():
        for subgroup in subgroups:
            if len(subgroup) > 1:
                for rank, ring in zip(subgroup, builder.rings(subgroup), strict=True):
                    machine = _reaching(machines[rank], [item for item, _ in ring.uses], topology)
                    rings = MappingProxyType({**machine.rings, name: ring})
                    machines[rank] = replace(machine, rings=rings)
            if name == _LINE:
                for rank, offset, sent, received in builder.messages(subgroup):
                    machines[rank] = _with_neighbour(machines[rank], name, offset, (sent, received), topology)
    return tuple(machines)


def _with_neighbour(
    machine: Machine, group: str, offset: int, hops: tuple[_Hops, _Hops], topology: Topology
) -> Machine:
    """Return a machine with the hops to a neighbour and back, from device to device and from host to host."""
    sent, received = hops
    machine = _reaching(machine, [item for hop in sent for item, _ in hop.uses], topology)
    for kind, there, back in zip(("channels", "host_channels"), sent, received, strict=False):
        both = {Send(group, offset): there, Recv(group, offset): replace(back, uses=())}
        changed: dict[str, Any] = {kind: MappingProxyType({**getattr(machine, kind), **both})}
        machine = replace(machine, **changed)
    return machine


def _reaching(machine: Machine, names: Sequence[str], topology: Topology) -> Machine:
    """Return a machine with the capacities of these resources added."""
    capacities = dict(machine.capacities)
    for name in names:
        capacities.setdefault(name, topology.resources[name].bandwidth_bytes_per_s)
    fifo = machine.fifo | {name for name in names if topology.resources[name].sharing == "fifo"}
    return replace(machine, capacities=MappingProxyType(capacities), fifo=fifo)


@dataclass
class KnownPaths:
    """Machines and hops of one topology, each looked up once; profiles must outlive it."""

    machines: dict[tuple[str, int, bool], Machine] = field(default_factory=dict)
    hops: dict[tuple[int, str, str, bool], Hop] = field(default_factory=dict)
    host_hops: dict[tuple[str, str], Hop] = field(default_factory=dict)
    board_rings: dict[tuple[str, ...], list[Hop] | None] = field(default_factory=dict)
    rings_alike: dict[Hashable, tuple[RingSet, tuple[Link, ...]]] = field(default_factory=dict)
    nvlinks: dict[str, list[Link]] = field(default_factory=dict)


class _Builder:
    """Machines and hops of some ranks."""

    def __init__(
        self,
        topology: Topology,
        devices: Sequence[str],
        profiles: Profile | Sequence[Profile],
        known: KnownPaths,
    ) -> None:
        self._topology = topology
        self._devices = devices
        self._profiles = [profiles] * len(devices) if isinstance(profiles, Profile) else profiles
        self._known = known
        self._num_beside = Counter(topology.host_of(device).id for device in devices)

    def machine_of(self, rank: int) -> Machine:
        """Return the machine of a rank, without rings."""
        device, profile = self._devices[rank], self._profiles[rank]
        is_crowded = self._num_beside[self._topology.host_of(device).id] > 1
        key = device, id(profile), is_crowded
        if key not in self._known.machines:
            machine = Machine.from_topology(self._topology, device, profile)
            self._known.machines[key] = machine.among_ranks() if is_crowded else machine
        return self._known.machines[key]

    def rings(self, subgroup: Sequence[int]) -> list[Ring]:
        """Return the place of each member of a subgroup in its ring."""
        devices = [self._devices[rank] for rank in subgroup]
        hops = (
            self._over_nvlinks(devices)
            or self._over_rails(subgroup, devices)
            or [
                self._hop(self._profiles[rank], *ends)
                for rank, ends in zip(subgroup, itertools.pairwise((*devices, devices[0])), strict=True)
            ]
        )
        latency_s = max(hop.latency_s for hop in hops)
        bandwidth = min(hop.bandwidth_bytes_per_s for hop in hops)
        nccl = self._communicator(devices, hops, bandwidth)
        slowest = {"latency_s": latency_s, "bandwidth_bytes_per_s": bandwidth, "nccl": nccl}
        own = [{item.name: getattr(hop, item.name) for item in fields(Hop)} for hop in hops]
        return [Ring(**{**hop, **slowest}, num_ranks=len(subgroup)) for hop in own]

    def _communicator(
        self, devices: Sequence[str], hops: Sequence[Hop], bandwidth: float
    ) -> Communicator | None:
        """Return what NCCL knows of GPUs that exchange data over these hops; None where one of them is no GPU."""
        specs = [self._topology.device_spec(device) for device in devices]
        if any(spec.type != "gpu" for spec in specs) or len(set(devices)) < len(devices):
            return None
        hosts = {self._topology.host_of(device).id for device in devices}
        known = architecture_of(specs[0])
        return Communicator(
            num_ranks=len(devices),
            num_hosts=len(hosts),
            wire="nvlink"
            if any(
                self._topology.resources[name].technology == "nvlink" for hop in hops for name, _ in hop.uses
            )
            else "pcie",
            generation="volta" if known is None else known.nccl,
            bandwidth_bytes_per_s=bandwidth,
            in_switch_sums=any(
                self._topology.sums_in_switch(node)
                for node in self._topology.of_type("nvswitch")
                if node.host in hosts
            ),
        )

    def _over_rails(self, subgroup: Sequence[int], devices: Sequence[str]) -> list[Hop] | None:
        """Return each GPU's sends in rings over several hosts, None where a host has but one of them.

        NCCL makes a ring for each network adapter, which leaves a host by it and passes all its GPUs. So every adapter
        carries a part of the bytes; on NVLinks or PCIe a rank sends all of them to its neighbour. Hosts with fewer of the GPUs
        than others let fewer rings through.
        """
        hosts: dict[str, list[int]] = {}
        for position, device in enumerate(devices):
            if self._topology.node(device).type != "gpu":
                return None
            hosts.setdefault(self._topology.host_of(device).id, []).append(position)
        members = list(hosts.values())
        num_rings = min(len(positions) for positions in members)
        if len(members) == 1 or num_rings == 1:
            return None
        sends: list[dict[str, float]] = [{} for _ in devices]
        latency_s, bandwidth = 0.0, math.inf
        for number, positions in enumerate(members):
            following = members[(number + 1) % len(members)]
            rails: dict[str, float] = {}
            for here, there in zip(positions[:num_rings], following[:num_rings], strict=True):
                across = self._hop(self._profiles[subgroup[here]], devices[here], devices[there])
                narrowest = min(
                    (name for name, _ in across.uses),
                    key=lambda name: self._topology.resources[name].bandwidth_bytes_per_s,
                )
                rails[narrowest] = across.bandwidth_bytes_per_s
                latency_s = max(latency_s, across.latency_s)
                for name, _ in across.uses:
                    sends[here][name] = sends[here].get(name, 0.0) + 1 / num_rings
            bandwidth = min(bandwidth, sum(rails.values()))
            ring = [devices[position] for position in positions]
            within = self._over_nvlinks(ring) or [
                self._hop(self._profiles[subgroup[position]], *ends)
                for position, ends in zip(positions, itertools.pairwise((*ring, ring[0])), strict=True)
            ]
            bandwidth = min(bandwidth, *(hop.bandwidth_bytes_per_s for hop in within))
            for position, hop in zip(positions, within, strict=True):
                for name, share in hop.uses:
                    sends[position][name] = sends[position].get(name, 0.0) + share
        return [Hop(latency_s, bandwidth, tuple(taken.items()), "network") for taken in sends]

    def messages(self, subgroup: Sequence[int]) -> Iterator[tuple[int, int, _Hops, _Hops]]:
        """Yield every member with the offset of each neighbour, and the hops there and back, of each kind."""
        for position, rank in enumerate(subgroup):
            for offset in _NEIGHBOURS:
                if 0 <= position + offset < len(subgroup):
                    other = subgroup[position + offset]
                    here, there = self._devices[rank], self._devices[other]
                    sent = self._hops_between(self._profiles[rank], here, there)
                    yield rank, offset, sent, self._hops_between(self._profiles[other], there, here)

    def _hops_between(self, profile: Profile, here: str, there: str) -> _Hops:
        """Return the hop from device to device, and for GPUs that from host memory to host memory, too."""
        direct = self._hop(profile, here, there)
        if profile.device_type == "cpu":
            return (direct,)
        key = here, there
        if key not in self._known.host_hops:
            self._known.host_hops[key] = self._between_hosts(here, there)
        return direct, self._known.host_hops[key]

    def _between_hosts(self, here: str, there: str) -> Hop:
        """Return the hop of gloo's messages, whose ends are processes of the hosts."""
        topology = self._topology
        if topology.host_of(here) == topology.host_of(there):
            return Hop(MESSAGE_S["cpu"], LOOPBACK_BYTES_PER_S)
        route = topology.route(topology.host_memory(here).id, topology.host_memory(there).id)
        uses = tuple((name, 1.0) for name in route.resource_ids)
        bandwidth = min(route.bandwidth_bytes_per_s, LOOPBACK_BYTES_PER_S)
        return Hop(MESSAGE_S["cpu"] + route.latency_s, bandwidth, uses, route.narrowest_technology)

    def _over_nvlinks(self, devices: Sequence[str]) -> list[Hop] | None:
        """Return each GPU's sends over the rings of NVLinks that join them all, None where there are none."""
        key = tuple(devices)
        if key not in self._known.board_rings:
            nodes = [self._topology.node(device) for device in devices]
            is_board = all(node.type == "gpu" and node.host == nodes[0].host for node in nodes)
            is_apart = len(set(devices)) == len(devices)
            self._known.board_rings[key] = self._nvlink_hops(key) if is_board and is_apart else None
        return self._known.board_rings[key]

    def _nvlink_hops(self, devices: tuple[str, ...]) -> list[Hop] | None:
        rings, links = self._rings_of(devices)
        if not rings.rings:
            return None
        sends: dict[str, dict[str, float]] = {device: {} for device in devices}
        for ring in rings.rings:
            fraction = ring.bandwidth_bytes_per_s / rings.both_ways_bytes_per_s
            order = (*ring.gpu_ids, ring.gpu_ids[0])
            # Two GPUs go there and back over one link.
            link_ids = ring.link_ids * 2 if len(devices) == 2 else ring.link_ids
            for (here, there), link_id in zip(itertools.pairwise(order), link_ids, strict=True):
                for sender in (here, there)[: rings.num_directions]:
                    name = link_resource_id(links[link_id], sender)
                    sends[sender][name] = sends[sender].get(name, 0.0) + fraction
        latency_s = max(links[link_id].latency_s for ring in rings.rings for link_id in ring.link_ids)
        latency_s += MESSAGE_S["gpu"]
        return [
            Hop(latency_s, rings.both_ways_bytes_per_s, tuple(sends[device].items()), "nvlink")
            for device in devices
        ]

    def _rings_of(self, devices: tuple[str, ...]) -> tuple[RingSet, dict[str, Link]]:
        """Return the rings over GPUs of one host with their links; boards that are joined alike are searched once."""
        position = {device: number for number, device in enumerate(devices)}
        links = tuple(
            link
            for link in self._nvlinks(self._topology.host_of(devices[0]).id)
            if link.source in position and link.target in position
        )
        figures = attrgetter("count", "bandwidth_bytes_per_s", "latency_s")
        board = (
            len(devices),
            tuple((position[link.source], position[link.target], figures(link)) for link in links),
        )
        if board not in self._known.rings_alike:
            self._known.rings_alike[board] = edge_disjoint_rings(self._topology, devices), links
        alike_rings, alike = self._known.rings_alike[board]
        gpu = dict(zip(alike_rings.gpu_ids, devices, strict=True))
        link_id = {one.id: other.id for one, other in zip(alike, links, strict=True)}
        rings = tuple(
            replace(
                ring,
                gpu_ids=tuple(gpu[name] for name in ring.gpu_ids),
                link_ids=tuple(link_id[name] for name in ring.link_ids),
            )
            for ring in alike_rings.rings
        )
        return RingSet(devices, rings), {link.id: link for link in links}

    def _nvlinks(self, host: str) -> list[Link]:
        """Return the NVLinks between GPUs of a host, in the topology's order."""
        by_host = self._known.nvlinks
        if not by_host:
            for link in self._topology.links:
                host_of = self._topology.node(link.source).host
                if link.type.technology == "nvlink" and host_of is not None:
                    by_host.setdefault(host_of, []).append(link)
        return by_host.get(host, [])

    def _is_full(self, profile: Profile, device: str) -> bool:
        """Whether the ranks of a CPU's host have threads for all its cores."""
        if profile.device_type != "cpu":
            return False
        num_ranks = self._num_beside[self._topology.host_of(device).id]
        return num_ranks * profile.num_threads >= profile.num_cores

    def _hop(self, profile: Profile, here: str, there: str) -> Hop:
        key = id(profile), here, there, self._is_full(profile, here)
        if key not in self._known.hops:
            self._known.hops[key] = self._looked_up_hop(profile, here, there)
        return self._known.hops[key]

    def _looked_up_hop(self, profile: Profile, here: str, there: str) -> Hop:
        topology, message_s = self._topology, profile.values()["message_s"]
        is_cpu = profile.device_type == "cpu"
        if here == there or (is_cpu and topology.host_of(here) == topology.host_of(there)):
            bandwidth = profile.values()["loopback_bandwidth"]
            hop = Hop(message_s, bandwidth, core_s_per_byte=1 / bandwidth)
            if not self._is_full(profile, here):
                return hop
            waits_s, core_s = (profile.values().get(name, 0.0) for name in ("busy_latency_s", "busy_core_s"))
            return replace(hop, busy_latency_s=waits_s, busy_core_s=core_s)
        if is_cpu:
            here, there = topology.host_memory(here).id, topology.host_memory(there).id
        route = topology.route(here, there)
        if not route.resource_ids:
            message = f"the route from {here!r} to {there!r} has no bandwidth"
            raise TopologyError(message, hint="give a bandwidth to one of its links")
        narrowest = min(route.links, key=lambda link: link.bandwidth_bytes_per_s)
        uses = tuple((name, 1.0) for name in route.resource_ids)
        # Sockets of two hosts cost what those of one do, and there they take a core.
        core_s_per_byte = 1 / profile.values()["loopback_bandwidth"] if is_cpu else 0.0
        latency_s = message_s + route.latency_s
        hop = Hop(latency_s, route.bandwidth_bytes_per_s, uses, narrowest.type.technology, core_s_per_byte)
        nccl = None if is_cpu else self._communicator((here, there), [hop], hop.bandwidth_bytes_per_s)
        if nccl is None:
            return hop
        reached = narrowest.type.efficiency
        if narrowest.type.technology == "nvlink" and reached is not None:
            nominal = hop.bandwidth_bytes_per_s / reached.in_si("ratio")
            nccl = replace(nccl, message_bytes_per_s=nominal * NVLINK_MESSAGE_FRACTION)
        return replace(hop, nccl=nccl)
