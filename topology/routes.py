"""How data get from one node to another, and what flows on the way share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, Protocol

from topology.errors import TopologyError
from topology.routing import DirectedLink, NoRoute, RouteHop, find_path
from topology.schema import FORWARDING_KINDS, Link, Node

if TYPE_CHECKING:
    from topology.schema import MeasuredBandwidth


@dataclass(frozen=True, slots=True)
class Resource:
    """What concurrent flows share: a link's direction, a half-duplex link, or a memory.

    Attributes
    ----------
    id : str
        Name, such as ``"root0--gpu0:root0>gpu0"``, ``"dram0"`` or ``"measured:dram0>gpu0"``.
    bandwidth_bytes_per_s : float
        Capacity; infinite where it never limits.
    latency_s : float
        One-way latency.
    sharing : {"maxmin", "fifo"}
        How concurrent flows share it.
    kind : str
        Of the link that it is a direction of, such as ``"nvlink"``; empty for others.
    """

    id: str
    bandwidth_bytes_per_s: float
    latency_s: float
    sharing: Literal["maxmin", "fifo"]
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Route:
    """How data get from one node to another.

    Attributes
    ----------
    source, target : str
        The ends.
    node_ids : tuple of str
        The nodes passed, ends included.
    links : tuple of Link
        The links passed, in order.
    resource_ids : tuple of str
        The resources that a flow over this route occupies, each once.
    bandwidth_bytes_per_s : float
        What a single large transfer reaches: the least of the resources', or the measured value.
    latency_s : float
        Sum over the links.
    staged_in : str or None
        The host memory in which a copy between two devices without peer-to-peer access is staged.
    """

    source: str
    target: str
    node_ids: tuple[str, ...]
    links: tuple[Link, ...]
    resource_ids: tuple[str, ...]
    bandwidth_bytes_per_s: float
    latency_s: float
    staged_in: str | None = None

    @property
    def narrowest_kind(self) -> str:
        """Kind of the narrowest link; ``memory`` where no link is passed."""
        link = min(self.links, key=lambda link: link.bandwidth_bytes_per_s, default=None)
        return "memory" if link is None else link.type.kind


class Routable(Protocol):
    """What routes are found in: a :class:`topology.graph.Topology`, which asks for them."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def links(self) -> tuple[Link, ...]:
        """Every link, each once."""

    @property
    def measured(self) -> tuple[MeasuredBandwidth, ...]:
        """End-to-end bandwidths that were measured."""

    @property
    def links_from(self) -> Mapping[str, Sequence[DirectedLink]]:
        """Links by the node that they are entered at, each for both directions."""

    def node(self, node_id: str) -> Node:
        """Return the node of that id."""

    def of_kind(self, *kinds: str) -> tuple[Node, ...]:
        """Return the nodes of these kinds."""

    def host_memory(self, node_id: str) -> Node:
        """Return the host memory nearest to a node."""


class Routes:
    """Routes of one topology, each found once, and the resources that they take."""

    def __init__(self, topology: Routable) -> None:
        self._topology = topology
        self._paths: dict[tuple[str, str], tuple[RouteHop, ...] | None] = {}

    def route(self, source_id: str, target_id: str) -> Route:
        """The route that :meth:`topology.graph.Topology.route` describes."""
        source, target = self._topology.node(source_id), self._topology.node(target_id)
        if self._must_be_staged(source, target):
            return self._staged_route(source_id, target_id)
        hops = self.path(source_id, target_id)
        if hops is None:
            message = (
                f"no route leads from {source_id!r} to {target_id!r} in topology {self._topology.name!r}"
            )
            raise TopologyError(message, hint="`zosim topology validate` names the nodes nothing reaches")
        return self._make_route(source_id, target_id, hops, staged_in=None)

    def path(self, source_id: str, target_id: str) -> tuple[RouteHop, ...] | None:
        """Links passed between two nodes, the widest way; None if there is none."""
        pair = source_id, target_id
        if pair not in self._paths:
            self._paths[pair] = self._found_path(source_id, target_id)
        return self._paths[pair]

    def _found_path(self, source_id: str, target_id: str) -> tuple[RouteHop, ...] | None:
        ends = self._topology.node(source_id).host, self._topology.node(target_id).host
        # Traffic within a host stays there, even where its adapters are wider than its sockets' link.
        same_host = ends[0] == ends[1] is not None
        kinds = FORWARDING_KINDS - {"network"} if same_host else FORWARDING_KINDS
        # A third host forwards nothing where the two reach each other without it.
        for hosts in ({*ends, None}, None):
            with suppress(NoRoute):
                return find_path(self._topology.links_from, source_id, target_id, kinds, hosts)
        return None

    def _must_be_staged(self, source: Node, target: Node) -> bool:
        specs = [node.spec for node in (source, target) if node.kind == "gpu" and node.spec]
        if len(specs) < 2 or source.id == target.id or all(spec.pcie_peer_to_peer for spec in specs):
            return False
        hops = self.path(source.id, target.id)
        return hops is not None and any(hop.link.type.kind == "pcie" for hop in hops)

    def _staged_route(self, source_id: str, target_id: str) -> Route:
        memory_id = self._topology.host_memory(source_id).id
        hops = (self.path(source_id, memory_id) or ()) + (self.path(memory_id, target_id) or ())
        return self._make_route(source_id, target_id, hops, staged_in=memory_id)

    def _make_route(
        self, source_id: str, target_id: str, hops: tuple[RouteHop, ...], *, staged_in: str | None
    ) -> Route:
        declared = self._declared_resource_ids(source_id, target_id, hops, staged_in)
        measured_id = measured_resource_id(source_id, target_id)
        is_measured = (source_id, target_id) in self.measured_by_pair
        resource_ids = (*declared, measured_id) if is_measured else declared
        capacities = [self.resources[name].bandwidth_bytes_per_s for name in resource_ids]
        return Route(
            source=source_id,
            target=target_id,
            node_ids=(source_id, *(hop.target for hop in hops)),
            links=tuple(hop.link for hop in hops),
            resource_ids=resource_ids,
            bandwidth_bytes_per_s=min(capacities, default=math.inf),
            latency_s=sum(hop.link.latency_s for hop in hops),
            staged_in=staged_in,
        )

    def _declared_resource_ids(
        self, source_id: str, target_id: str, hops: tuple[RouteHop, ...], staged_in: str | None
    ) -> tuple[str, ...]:
        ends = (source_id, staged_in, target_id)
        memories = [
            end for end in ends if end is not None and self._topology.node(end).kind in {"memory", "disk"}
        ]
        links = [
            link_resource_id(hop.link, hop.source)
            for hop in hops
            if math.isfinite(hop.link.bandwidth_bytes_per_s)
        ]
        stored = [name for name in memories if self._topology.node(name).bandwidth is not None]
        return tuple(dict.fromkeys([*stored, *links]))

    @cached_property
    def measured_by_pair(self) -> Mapping[tuple[str, str], float]:
        """Measured bandwidths, bytes per second, by their ends."""
        return {
            (entry.source, entry.target): entry.bandwidth.in_si("bandwidth")
            for entry in self._topology.measured
        }

    @cached_property
    def _declared_resources(self) -> Mapping[str, Resource]:
        resources = {}
        for node in self._topology.of_kind("memory", "disk"):
            if node.bandwidth is not None:
                resources[node.id] = Resource(node.id, node.bandwidth_bytes_per_s, 0.0, "maxmin")
        for link in self._topology.links:
            if not math.isfinite(link.bandwidth_bytes_per_s):
                continue
            for start in (link.source, link.target):
                name = link_resource_id(link, start)
                resources[name] = Resource(
                    name, link.bandwidth_bytes_per_s, link.latency_s, link.type.sharing, link.type.kind
                )
        return MappingProxyType(resources)

    @cached_property
    def resources(self) -> Mapping[str, Resource]:
        """Everything that concurrent flows share, by name, as :attr:`topology.graph.Topology.resources` says."""
        capacities = {name: item.bandwidth_bytes_per_s for name, item in self._declared_resources.items()}
        for (source_id, target_id), bandwidth_bytes_per_s in self.measured_by_pair.items():
            hops = self.path(source_id, target_id) or ()
            for name in self._declared_resource_ids(source_id, target_id, hops, None):
                capacities[name] = max(capacities[name], bandwidth_bytes_per_s)
        resources = {
            name: replace(item, bandwidth_bytes_per_s=capacities[name])
            for name, item in self._declared_resources.items()
        }
        for (source_id, target_id), bandwidth_bytes_per_s in self.measured_by_pair.items():
            name = measured_resource_id(source_id, target_id)
            resources[name] = Resource(name, bandwidth_bytes_per_s, 0.0, "maxmin")
        return MappingProxyType(resources)


def link_resource_id(link: Link, start: str) -> str:
    """Name of the resource that a flow entering a link at a node occupies."""
    return link.id if link.type.duplex == "half" else f"{link.id}:{start}>{link.other_end(start)}"


def measured_resource_id(source_id: str, target_id: str) -> str:
    """Name of the resource that stands for a measured bandwidth."""
    return f"measured:{source_id}>{target_id}"
