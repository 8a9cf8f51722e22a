"""The machine as a multigraph of nodes and links."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from topology.errors import TopologyError
from topology.figures import Figure
from topology.isomorphic_hosts import IsomorphicHosts
from topology.routes import Resource, Route, Routes
from topology.schema import DeviceSpec, Link, MeasuredBandwidth, Node, unknown_node
from topology.validation import FrozenModel, RuleError, did_you_mean

if TYPE_CHECKING:
    import networkx as nx

MAX_HOSTS = 2048
MAX_HOST_WORK = 2_000_000


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
        known = dict.fromkeys(node.id for node in self.nodes)
        ends = [
            (end, f"link {link.id!r}", ("links", position))
            for position, link in enumerate(self.links)
            for end in (link.source, link.target)
        ]
        ends += [
            (end, "a measured bandwidth", ("measured", position))
            for position, entry in enumerate(self.measured)
            for end in (entry.source, entry.target)
        ]
        for end, where, location in ends:
            if end not in known:
                raise unknown_node(end, list(known), where, location)
        hosts = {node.id for node in self.nodes if node.type == "host"}
        for position, node in enumerate(self.nodes):
            if node.host is not None and node.host not in hosts:
                message = f"node {node.id!r} has the unknown host {node.host!r}"
                hint = did_you_mean(node.host, hosts)
                raise RuleError(message, hint=hint, location=("nodes", position, "host"))
        self._check_size()
        _refuse_ambiguous("device", [(node.spec.id, node.spec) for node in self.nodes if node.spec])
        _refuse_ambiguous("link type", [(link.type.name, link.type) for link in self.links if link.type.name])
        if not any(node.spec for node in self.nodes):
            raise RuleError(f"topology {self.name!r} has no gpu and no cpu")
        return self

    def links_of(self, node_id: str) -> Sequence[Link]:
        """Links at a node, in file order.

        Parameters
        ----------
        node_id : str
            Id of the node; an unknown one has no links.
        """
        return self._links_by_node.get(node_id, ())

    @cached_property
    def _links_by_node(self) -> Mapping[str, list[Link]]:
        at: dict[str, list[Link]] = {}
        for link in self.links:
            at.setdefault(link.source, []).append(link)
            at.setdefault(link.target, []).append(link)
        return at

    @cached_property
    def _nodes_by_id(self) -> Mapping[str, Node]:
        return {node.id: node for node in self.nodes}

    @cached_property
    def _nodes_by_type(self) -> Mapping[str, tuple[Node, ...]]:
        by_type: dict[str, list[Node]] = {}
        for node in self.nodes:
            by_type.setdefault(node.type, []).append(node)
        return {node_type: tuple(nodes) for node_type, nodes in by_type.items()}

    def _check_size(self) -> None:
        """Refuse what routes cannot be found in within seconds: every device looks for the nearest memory of its host."""
        node_types = Counter((node.host, "device" if node.spec else node.type) for node in self.nodes)
        host_of = {node.id: node.host for node in self.nodes}
        links = Counter(host_of[link.source] for link in self.links)
        for host in (node.id for node in self.nodes if node.type == "host"):
            work = node_types[host, "memory"] * node_types[host, "device"] * links[host]
            if work > MAX_HOST_WORK:
                message = (
                    f"host {host!r} has {node_types[host, 'memory']} memories, {node_types[host, 'device']} "
                    f"devices and {links[host]} links: too many to find routes"
                )
                raise RuleError(
                    message, hint=f"their product must be at most {MAX_HOST_WORK}; describe several hosts"
                )
        if node_types[None, "host"] > MAX_HOSTS:
            raise RuleError(f"{node_types[None, 'host']} hosts exceed the maximum of {MAX_HOSTS}")

    @cached_property
    def graph(self) -> nx.MultiGraph[str]:
        """The machine as a frozen networkx multigraph with an edge for each link, keyed by its id.

        Edges carry ``link``, ``bandwidth_bytes_per_s`` and ``latency_s``; nodes carry ``node`` and ``type``.
        """
        # networkx takes a quarter of a second to import, and who only reads or shows a file asks for no route.
        import networkx as nx

        graph: nx.MultiGraph[str] = nx.MultiGraph(name=self.name)
        for node in self.nodes:
            graph.add_node(node.id, node=node, type=node.type)
        for link in self.links:
            graph.add_edge(
                link.source,
                link.target,
                key=link.id,
                link=link,
                bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
                latency_s=link.latency_s,
            )
        nx.freeze(graph)
        return graph

    def node(self, node_id: str) -> Node:
        """The node with an id.

        Parameters
        ----------
        node_id : str
            Id of the node, such as ``"gpu0"``.

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

    def of_type(self, *node_types: str) -> tuple[Node, ...]:
        """Nodes of the given types, in file order.

        Parameters
        ----------
        *node_types : str
            Types such as ``"gpu"`` or ``"memory"``.
        """
        if len(node_types) == 1:
            return self._nodes_by_type.get(node_types[0], ())
        return tuple(node for node in self.nodes if node.type in node_types)

    def sums_in_switch(self, switch: Node) -> bool:
        """Return whether an NVSwitch adds up what GPUs send (NVLink SHARP).

        Parameters
        ----------
        switch : Node
            An nvswitch. If it does not declare ``in_switch_sums``, one with NVLinks of generation 4 or later does.
        """
        if switch.in_switch_sums is not None:
            return switch.in_switch_sums
        return any((link.type.nvlink_generation or 0) >= 4 for link in self.links_of(switch.id))

    @cached_property
    def hosts(self) -> tuple[Node, ...]:
        """Host nodes, in file order."""
        return self.of_type("host")

    @cached_property
    def compute_devices(self) -> tuple[Node, ...]:
        """GPUs, host by host and by their index; the CPUs where there is no GPU."""
        devices = self.of_type("gpu") or self.of_type("cpu")
        host_order = {host.id: position for position, host in enumerate(self.hosts)}
        file_order = {node.id: position for position, node in enumerate(self.nodes)}

        def order(node: Node) -> tuple[int, float, int]:
            index = math.inf if node.index is None else node.index
            return host_order[node.host or ""], index, file_order[node.id]

        return tuple(sorted(devices, key=order))

    def host_of(self, node_id: str) -> Node:
        """The host that contains a node.

        Parameters
        ----------
        node_id : str
            Id of the node, such as ``"gpu0"``.

        Raises
        ------
        TopologyError
            If the node is unknown or belongs to no host.
        """
        node = self.node(node_id)
        if node.type == "host":
            return node
        if node.host is None:
            raise TopologyError(f"node {node_id!r} of type {node.type} has no host")
        return self.node(node.host)

    def host_memory(self, node_id: str) -> Node:
        """The host memory nearest to a node: of least latency, then of fewest links, then by name.

        Parameters
        ----------
        node_id : str
            Id of the node, such as ``"gpu0"``.

        Raises
        ------
        TopologyError
            If no memory of its host can be reached.
        """
        candidates = []
        for memory in self.memories_of(node_id):
            hops = self._routes.path(memory.id, node_id)
            if hops is not None:
                latency_s = sum(hop.link.latency_s for hop in hops)
                candidates.append((latency_s, len(hops), memory.id))
        if not candidates:
            message = f"no host memory of {self.host_of(node_id).id!r} reaches {node_id!r}"
            raise TopologyError(message, hint="link it to a memory node, for instance through a numa node")
        return self.node(min(candidates)[2])

    def memories_of(self, node_id: str) -> tuple[Node, ...]:
        """Memories of the host that contains a node, in file order.

        Parameters
        ----------
        node_id : str
            Id of the node, such as ``"gpu0"``.
        """
        return self._memories_by_host.get(self.host_of(node_id).id, ())

    def disks_of(self, node_id: str) -> tuple[Node, ...]:
        """Disks of known bandwidth of the host that contains a node, in file order.

        Parameters
        ----------
        node_id : str
            Id of the node, such as ``"gpu0"``.
        """
        host = self.host_of(node_id).id
        return tuple(
            disk for disk in self.of_type("disk") if disk.host == host and disk.bandwidth is not None
        )

    @cached_property
    def _memories_by_host(self) -> Mapping[str | None, tuple[Node, ...]]:
        by_host: dict[str | None, tuple[Node, ...]] = {}
        for memory in self.of_type("memory"):
            by_host[memory.host] = (*by_host.get(memory.host, ()), memory)
        return by_host

    def device_spec(self, node_id: str) -> DeviceSpec:
        """Specification of a GPU or CPU; a CPU's memory is that of its nearest DRAM unless declared.

        Parameters
        ----------
        node_id : str
            Id of a GPU or a CPU.

        Raises
        ------
        TopologyError
            If the node is no processor, or a CPU that reaches no memory.
        """
        node = self.node(node_id)
        if node.spec is None:
            message = f"node {node_id!r} is a {node.type}, not a processor"
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
    def _routes(self) -> Routes:
        return Routes(self.graph, self.links, self.measured, self.isomorphic_hosts)

    @cached_property
    def isomorphic_hosts(self) -> IsomorphicHosts:
        """Which nodes are placed like others on hosts built alike."""
        return IsomorphicHosts(self.nodes, self.links, self.measured)

    def route(self, source_id: str, target_id: str) -> Route:
        """The widest route between two nodes; of equally wide ones that of least latency, then of fewest links.

        Only NUMA domains, PCIe roots and switches, NVSwitches, NICs and networks forward traffic, and
        traffic within a host does not leave it, nor pass a third one if there is a way without it. Two devices without
        peer-to-peer access over PCIe are joined through the host memory of the source.

        Parameters
        ----------
        source_id, target_id : str
            Ids of the two nodes.

        Raises
        ------
        TopologyError
            If either node is unknown, or none of the routes leads there.

        Notes
        -----
        Ties that remain are broken by the names of the nodes and links passed, so routes are the same in
        every process.
        """
        gpus = [node.spec for node in (self.node(source_id), self.node(target_id)) if node.type == "gpu"]
        direct = (
            len(gpus) < 2 or source_id == target_id or all(spec and spec.pcie_peer_to_peer for spec in gpus)
        )
        hops = () if direct else self._routes.path(source_id, target_id) or ()
        is_staged = any(hop.link.type.technology == "pcie" for hop in hops)
        memory = self.host_memory(source_id).id if is_staged else None
        return self._routes.route(source_id, target_id, staged_in=memory)

    @property
    def resources(self) -> Mapping[str, Resource]:
        """Everything that concurrent flows share, by name.

        A full-duplex link is two resources, a half-duplex one is one; reads and writes of a memory share
        one. A measured bandwidth is a resource of its own that its pair of nodes alone uses, and raises
        the capacity of declared resources on its way that were declared too small.
        """
        return self._routes.resources

    def with_assumed_memory(self, factor: float, reached: float | None = None) -> Topology:
        """Return the machine with another bandwidth of each host memory whose bandwidth is assumed.

        Parameters
        ----------
        factor : float
            Factor on the assumed bandwidths. A machine of which nothing changes is returned itself.
        reached : float, optional
            Part of its peak bandwidth that a memory reaches, where that is assumed or estimated; by default what the machine says.
        """
        nodes = list(self.nodes)
        for position, node in enumerate(nodes if factor != 1 or reached is not None else ()):
            update = {}
            if node.type == "memory" and node.bandwidth is not None and node.bandwidth.basis == "assumed":
                update["bandwidth"] = node.bandwidth.model_copy(
                    update={"value": node.bandwidth.value * factor}
                )
            known = node.efficiency
            if reached is not None and known is not None and known.basis in ("assumed", "estimated"):
                update["efficiency"] = known.model_copy(update={"value": reached})
            if update:
                nodes[position] = node.model_copy(update=update)
        return self if tuple(nodes) == self.nodes else self.model_copy(update={"nodes": tuple(nodes)})

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Topology:  # noqa: ARG002
        """Return a copy with some fields replaced: validated, and with nothing computed from the old ones.

        Parameters
        ----------
        update : mapping of str to Any, optional
            New values by field.
        deep : bool, optional
            Without effect, as nothing in a topology changes.
        """
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**{**fields, **(update or {})})


def _refuse_duplicates(what: str, names: list[str]) -> None:
    seen: set[str] = set()
    for position, name in enumerate(names):
        if name in seen:
            hint = "give parallel links an id each, or use one link with a count" if what == "link" else None
            raise RuleError(f"two {what}s have the id {name!r}", hint=hint, location=(f"{what}s", position))
        seen.add(name)


def _refuse_ambiguous(what: str, named: Sequence[tuple[str, object]]) -> None:
    first: dict[str, object] = {}
    for name, value in named:
        if first.setdefault(name, value) != value:
            raise RuleError(f"two different {what}s have the name {name!r}", hint="give each its own name")
