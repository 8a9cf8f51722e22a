"""The machine as a directed multigraph: routes, and the resources that flows share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import networkx as nx
from pydantic import Field, model_validator

from topology.errors import TopologyError
from topology.figures import Figure
from topology.routing import Hop, NoRoute, find_path
from topology.schema import (
    FORWARDING_KINDS,
    DeviceSpec,
    Link,
    MeasuredBandwidth,
    Node,
    unknown_node,
)
from topology.validation import FrozenModel, RuleError, did_you_mean


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
    """

    id: str
    bandwidth_bytes_per_s: float
    latency_s: float
    sharing: Literal["maxmin", "fifo"]


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


class Topology(FrozenModel):
    """A machine, or several: nodes, the links between them, and what was measured on it.

    Attributes
    ----------
    name : str
        Name of the preset or of the machine.
    description : str
        What it is, and what is assumed about it.
    nodes : tuple of Node
        Vertices.
    links : tuple of Link
        Links, each usable in both directions.
    measured : tuple of MeasuredBandwidth
        End-to-end bandwidths that override the declared ones.
    """

    name: str = Field(min_length=1)
    description: str = ""
    nodes: tuple[Node, ...] = Field(min_length=1)
    links: tuple[Link, ...] = ()
    measured: tuple[MeasuredBandwidth, ...] = ()

    @model_validator(mode="after")
    def _is_consistent(self) -> Topology:
        _refuse_duplicates("node", [node.id for node in self.nodes])
        _refuse_duplicates("link", [link.id for link in self.links])
        known = [node.id for node in self.nodes]
        for position, link in enumerate(self.links):
            for end in (link.source, link.target):
                if end not in known:
                    raise unknown_node(end, known, f"link {link.id!r}", ("links", position))
        for position, entry in enumerate(self.measured):
            for end in (entry.source, entry.target):
                if end not in known:
                    raise unknown_node(end, known, "a measured bandwidth", ("measured", position))
        self._check_hosts()
        _refuse_ambiguous("device", [(node.spec.id, node.spec) for node in self.nodes if node.spec])
        _refuse_ambiguous("link type", [(link.type.name, link.type) for link in self.links if link.type.name])
        if not any(node.spec for node in self.nodes):
            message = f"topology {self.name!r} has neither a gpu nor a cpu"
            raise RuleError(message)
        return self

    def _check_hosts(self) -> None:
        hosts = [node.id for node in self.nodes if node.kind == "host"]
        for position, node in enumerate(self.nodes):
            if node.host is not None and node.host not in hosts:
                message = f"node {node.id!r} names the unknown host {node.host!r}"
                hint = did_you_mean(node.host, hosts)
                raise RuleError(message, hint=hint, location=("nodes", position, "host"))

    @cached_property
    def _nodes_by_id(self) -> Mapping[str, Node]:
        return MappingProxyType({node.id: node for node in self.nodes})

    @cached_property
    def _links_by_id(self) -> Mapping[str, Link]:
        return MappingProxyType({link.id: link for link in self.links})

    @cached_property
    def graph(self) -> nx.MultiDiGraph[str]:
        """The links as a frozen networkx multigraph: two edges per link, keyed by its id.

        Edges carry ``link``, ``bandwidth_bytes_per_s``, ``latency_s`` and ``resource_id``; nodes carry
        ``node`` and ``kind``.
        """
        graph: nx.MultiDiGraph[str] = nx.MultiDiGraph(name=self.name)
        for node in self.nodes:
            graph.add_node(node.id, node=node, kind=node.kind)
        for link in self.links:
            for source, target in ((link.source, link.target), (link.target, link.source)):
                graph.add_edge(
                    source,
                    target,
                    key=link.id,
                    link=link,
                    bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
                    latency_s=link.latency_s,
                    resource_id=link_resource_id(link, source),
                )
        nx.freeze(graph)
        return graph

    def node(self, node_id: str) -> Node:
        """The node of that name.

        Raises
        ------
        TopologyError
            If there is none.
        """
        try:
            return self._nodes_by_id[node_id]
        except KeyError:
            message = f"topology {self.name!r} has no node {node_id!r}"
            raise TopologyError(message, hint=did_you_mean(node_id, self._nodes_by_id)) from None

    def of_kind(self, *kinds: str) -> tuple[Node, ...]:
        """Nodes of the given kinds, in file order."""
        return tuple(node for node in self.nodes if node.kind in kinds)

    @cached_property
    def hosts(self) -> tuple[Node, ...]:
        """Host nodes, in file order."""
        return self.of_kind("host")

    @cached_property
    def compute_devices(self) -> tuple[Node, ...]:
        """GPUs, host by host and by their index; the CPUs where there is no GPU."""
        devices = self.of_kind("gpu") or self.of_kind("cpu")
        host_order = {host.id: position for position, host in enumerate(self.hosts)}
        file_order = {node.id: position for position, node in enumerate(self.nodes)}

        def order(node: Node) -> tuple[int, float, int]:
            index = math.inf if node.index is None else node.index
            return host_order[node.host or ""], index, file_order[node.id]

        return tuple(sorted(devices, key=order))

    def host_of(self, node_id: str) -> Node:
        """The host that contains a node.

        Raises
        ------
        TopologyError
            If the node is unknown or belongs to no host.
        """
        node = self.node(node_id)
        if node.kind == "host":
            return node
        if node.host is None:
            message = f"node {node_id!r} of kind {node.kind} belongs to no host"
            raise TopologyError(message)
        return self.node(node.host)

    def host_memory(self, node_id: str) -> Node:
        """The host memory nearest to a node: of least latency, then of fewest links, then by name.

        Raises
        ------
        TopologyError
            If no memory of its host can be reached.
        """
        host_id = self.host_of(node_id).id
        candidates = []
        for memory in self._memories_of_host.get(host_id, ()):
            hops = self._path(memory.id, node_id)
            if hops is not None:
                latency_s = sum(hop.link.latency_s for hop in hops)
                candidates.append((latency_s, len(hops), memory.id))
        if not candidates:
            message = f"no host memory of {host_id!r} reaches {node_id!r}"
            raise TopologyError(message, hint="link it to a memory node, through a numa node for instance")
        return self.node(min(candidates)[2])

    @cached_property
    def _memories_of_host(self) -> Mapping[str | None, tuple[Node, ...]]:
        found: dict[str | None, tuple[Node, ...]] = {}
        for memory in self.of_kind("memory"):
            found[memory.host] = (*found.get(memory.host, ()), memory)
        return MappingProxyType(found)

    def device_spec(self, node_id: str) -> DeviceSpec:
        """Specification of a GPU or CPU; a CPU's memory is that of its nearest DRAM unless declared.

        Raises
        ------
        TopologyError
            If the node is no processor, or a CPU that reaches no memory.
        """
        node = self.node(node_id)
        if node.spec is None:
            message = f"node {node_id!r} is a {node.kind}, not a processor"
            processors = [other.id for other in self.nodes if other.spec]
            raise TopologyError(message, hint=f"processors: {', '.join(processors)}")
        if node.spec.memory is not None and node.spec.memory_bandwidth is not None:
            return node.spec
        memory = self.host_memory(node_id)
        reached = Figure(
            value=memory.bandwidth_bytes_per_s,
            unit="B/s",
            source=f"memory node {memory.id}",
            basis="declared",
        )
        return node.spec.model_copy(
            update={
                "memory": node.spec.memory or memory.capacity,
                "memory_bandwidth": node.spec.memory_bandwidth or reached,
            }
        )

    @cached_property
    def _link_routes(self) -> dict[tuple[str, str], tuple[Hop, ...] | None]:
        return {}

    def _path(self, source_id: str, target_id: str) -> tuple[Hop, ...] | None:
        """Widest path, computed once per pair; None if there is none."""
        pair = source_id, target_id
        if pair not in self._link_routes:
            self._link_routes[pair] = self._found_path(source_id, target_id)
        return self._link_routes[pair]

    def _found_path(self, source_id: str, target_id: str) -> tuple[Hop, ...] | None:
        ends = self.node(source_id).host, self.node(target_id).host
        # Traffic within a host stays there, even where its adapters are wider than its sockets' link.
        same_host = ends[0] == ends[1] is not None
        kinds = FORWARDING_KINDS - {"network"} if same_host else FORWARDING_KINDS
        # A third host forwards nothing where the two reach each other without it.
        for hosts in ({*ends, None}, None):
            with suppress(NoRoute):
                return find_path(self.graph, source_id, target_id, kinds, hosts)
        return None

    def route(self, source_id: str, target_id: str) -> Route:
        """The widest route between two nodes, among those the one of least latency, then fewest links.

        Only NUMA domains, PCIe roots and switches, NVSwitches, NICs and networks forward traffic, and
        traffic within a host does not leave it, nor pass a third one if there is a way without it. Two devices without peer-to-peer access over PCIe are joined through the host memory of the source.

        Raises
        ------
        TopologyError
            If either node is unknown, or none of the routes leads there.

        Notes
        -----
        Ties that remain are broken by the names of the nodes and links passed, so routes are the same in
        every process.
        """
        source, target = self.node(source_id), self.node(target_id)
        if self._must_be_staged(source, target):
            return self._staged_route(source_id, target_id)
        hops = self._path(source_id, target_id)
        if hops is None:
            message = f"no route leads from {source_id!r} to {target_id!r} in topology {self.name!r}"
            raise TopologyError(message, hint="`zosim topology validate` names the nodes nothing reaches")
        return self._make_route(source_id, target_id, hops, staged_in=None)

    def _must_be_staged(self, source: Node, target: Node) -> bool:
        specs = [node.spec for node in (source, target) if node.kind == "gpu" and node.spec]
        if len(specs) < 2 or source.id == target.id or all(spec.pcie_peer_to_peer for spec in specs):
            return False
        hops = self._path(source.id, target.id)
        return hops is not None and any(hop.link.type.kind == "pcie" for hop in hops)

    def _staged_route(self, source_id: str, target_id: str) -> Route:
        memory_id = self.host_memory(source_id).id
        hops = (self._path(source_id, memory_id) or ()) + (self._path(memory_id, target_id) or ())
        return self._make_route(source_id, target_id, hops, staged_in=memory_id)

    def _make_route(
        self, source_id: str, target_id: str, hops: tuple[Hop, ...], *, staged_in: str | None
    ) -> Route:
        declared = self._declared_resource_ids(source_id, target_id, hops, staged_in)
        measured_id = measured_resource_id(source_id, target_id)
        is_measured = (source_id, target_id) in self._measured_by_pair
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
        self, source_id: str, target_id: str, hops: tuple[Hop, ...], staged_in: str | None
    ) -> tuple[str, ...]:
        ends = (source_id, staged_in, target_id)
        memories = [end for end in ends if end is not None and self.node(end).kind in {"memory", "disk"}]
        links = [
            link_resource_id(hop.link, hop.source)
            for hop in hops
            if math.isfinite(hop.link.bandwidth_bytes_per_s)
        ]
        stored = [name for name in memories if self.node(name).bandwidth is not None]
        return tuple(dict.fromkeys([*stored, *links]))

    @cached_property
    def _measured_by_pair(self) -> Mapping[tuple[str, str], float]:
        return {(entry.source, entry.target): entry.bandwidth.in_si("bandwidth") for entry in self.measured}

    @cached_property
    def _declared_resources(self) -> Mapping[str, Resource]:
        resources = {}
        for node in self.of_kind("memory", "disk"):
            if node.bandwidth is not None:
                resources[node.id] = Resource(node.id, node.bandwidth_bytes_per_s, 0.0, "maxmin")
        for link in self.links:
            if not math.isfinite(link.bandwidth_bytes_per_s):
                continue
            for start in (link.source, link.target):
                name = link_resource_id(link, start)
                resources[name] = Resource(
                    name, link.bandwidth_bytes_per_s, link.latency_s, link.type.sharing
                )
        return MappingProxyType(resources)

    @cached_property
    def resources(self) -> Mapping[str, Resource]:
        """Everything that concurrent flows share, by name.

        A full-duplex link is two resources, a half-duplex one is one; reads and writes of a memory share
        one. A measured bandwidth is a resource of its own that its pair of nodes alone uses, and raises
        the capacity of declared resources on its way that were declared too small.
        """
        capacities = {name: item.bandwidth_bytes_per_s for name, item in self._declared_resources.items()}
        for (source_id, target_id), bandwidth_bytes_per_s in self._measured_by_pair.items():
            hops = self._path(source_id, target_id) or ()
            for name in self._declared_resource_ids(source_id, target_id, hops, None):
                capacities[name] = max(capacities[name], bandwidth_bytes_per_s)
        resources = {
            name: Resource(name, capacities[name], item.latency_s, item.sharing)
            for name, item in self._declared_resources.items()
        }
        for (source_id, target_id), bandwidth_bytes_per_s in self._measured_by_pair.items():
            name = measured_resource_id(source_id, target_id)
            resources[name] = Resource(name, bandwidth_bytes_per_s, 0.0, "maxmin")
        return MappingProxyType(resources)

    def with_measured_bandwidth(
        self, matrix: Mapping[tuple[str, str], float], *, source: str = "measured on this machine"
    ) -> Topology:
        """The same machine with measured end-to-end bandwidths in place of declared ones.

        Parameters
        ----------
        matrix : mapping of (source id, target id) to float
            Bandwidth in bytes per second that a single large transfer reached; one direction per entry.
        source : str, optional
            Where the numbers come from.

        Raises
        ------
        TopologyError
            If a node is unknown, no route joins a pair, or a bandwidth is not positive and finite.
        """
        known = dict(self._measured_by_pair) | dict(matrix)
        for (source_id, target_id), value in matrix.items():
            self.route(source_id, target_id)
            if not 0 < value < math.inf:
                message = f"measured bandwidth from {source_id!r} to {target_id!r} is {value} B/s"
                raise TopologyError(message, hint="it must be positive and finite")
        kept = {(entry.source, entry.target): entry for entry in self.measured}
        entries = tuple(
            kept[pair]
            if pair in kept and pair not in matrix
            else MeasuredBandwidth(
                source=pair[0],
                target=pair[1],
                bandwidth=Figure(value=float(value), unit="B/s", source=source, basis="measured"),
            )
            for pair, value in known.items()
        )
        return self.model_copy(update={"measured": entries})

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Topology:  # noqa: ARG002
        """A copy with some fields replaced, validated, and with nothing computed from the old ones.

        Parameters
        ----------
        update : mapping, optional
            Fields to replace.
        deep : bool, optional
            Without effect: everything in a topology is immutable.
        """
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**{**fields, **(update or {})})

    def to_yaml(self) -> str:
        """The machine as a file that :func:`topology.load` reads back as an equal one."""
        from topology.documents import dump

        return dump(self)


def link_resource_id(link: Link, start: str) -> str:
    """Name of the resource that a flow entering a link at a node occupies."""
    return link.id if link.type.duplex == "half" else f"{link.id}:{start}>{link.other_end(start)}"


def measured_resource_id(source_id: str, target_id: str) -> str:
    """Name of the resource that stands for a measured bandwidth."""
    return f"measured:{source_id}>{target_id}"


def _refuse_duplicates(what: str, names: list[str]) -> None:
    seen: set[str] = set()
    for position, name in enumerate(names):
        if name in seen:
            hint = "parallel links need an id each, or one link with a count" if what == "link" else None
            message = f"two {what}s have the id {name!r}"
            raise RuleError(message, hint=hint, location=(f"{what}s", position))
        seen.add(name)


def _refuse_ambiguous(what: str, named: Sequence[tuple[str, object]]) -> None:
    first: dict[str, object] = {}
    for name, value in named:
        if first.setdefault(name, value) != value:
            message = f"two different {what}s are called {name!r}"
            raise RuleError(message, hint="give each a name of its own")
