"""How data get from one node to another, and what flows on the way share."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from topology.errors import TopologyError
from topology.isomorphic_hosts import IsomorphicHosts
from topology.schema import FORWARDING_TYPES, Link, MeasuredBandwidth, Node

if TYPE_CHECKING:
    import networkx as nx


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
    technology : str
        Of the link that it is a direction of, such as ``"nvlink"``; empty for others.
    """

    id: str
    bandwidth_bytes_per_s: float
    latency_s: float
    sharing: Literal["maxmin", "fifo"]
    technology: str = ""


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
    def narrowest_technology(self) -> str:
        """Technology of the narrowest link; ``memory`` where no link is passed."""
        link = min(self.links, key=lambda link: link.bandwidth_bytes_per_s, default=None)
        return "memory" if link is None else link.type.technology


@dataclass(frozen=True, slots=True)
class RouteHop:
    """A link passed in one direction."""

    link: Link
    source: str
    target: str


class _Narrowness(float):
    """Minus the bandwidth of a path, as a cost: of two links in a row the narrower counts."""

    def __add__(self, other: float) -> _Narrowness:
        return max(self, _Narrowness(other))

    def __radd__(self, start: float) -> _Narrowness:
        return self


class _Length(tuple[float, int, tuple[str, ...]]):
    """Latency of a path, its links, and the names that it passes, as a cost: names tell any two paths apart."""

    __slots__ = ()

    def __add__(self, other: _Length) -> _Length:  # type: ignore[override]
        return _Length((self[0] + other[0], self[1] + other[1], self[2] + other[2]))

    def __radd__(self, start: float) -> _Length:
        return self


class Routes:
    """Routes in the graph of one topology, each found once, and the resources that they take."""

    def __init__(
        self,
        graph: nx.MultiGraph[str],
        links: Sequence[Link],
        measured: Iterable[MeasuredBandwidth],
        isomorphic: IsomorphicHosts,
    ) -> None:
        self._graph = graph
        self._isomorphic = isomorphic
        self._links = {link.id: link for link in links}
        self._nodes: dict[str, Node] = {name: data["node"] for name, data in graph.nodes.items()}
        self._paths: dict[tuple[str, str], tuple[RouteHop, ...] | None] = {}
        self._steps: dict[tuple[str, str], list[tuple[_Length, _Narrowness]]] = {}
        """The links from a node to the next as costs, shortest first."""
        self._pairs: dict[frozenset[str | None], list[tuple[str, str]]] = {}
        """Nodes that links join, by the hosts that they belong to."""
        self._graphs: dict[frozenset[str | None], nx.Graph[str]] = {}
        for link in links:
            narrowness = _Narrowness(-link.bandwidth_bytes_per_s)
            for pair in ((link.source, link.target), (link.target, link.source)):
                length = _Length((link.latency_s, 1, (pair[1], link.id)))
                insort(self._steps.setdefault(pair, []), (length, narrowness))
            ends = link.source, link.target
            of_hosts = frozenset(self._nodes[end].host for end in ends)
            self._pairs.setdefault(of_hosts, []).append(ends)
        self._widest = {pair: min(narrow for _, narrow in steps) for pair, steps in self._steps.items()}
        self.measured_by_pair: Mapping[tuple[str, str], float] = {
            (entry.source, entry.target): entry.bandwidth.in_si("bandwidth") for entry in measured
        }

    def route(self, source_id: str, target_id: str, *, staged_in: str | None = None) -> Route:
        """The route that :meth:`topology.graph.Topology.route` describes, by way of a memory if one is named.

        Raises TopologyError if there is none.
        """
        ends = (source_id, target_id) if staged_in is None else (source_id, staged_in, target_id)
        hops: tuple[RouteHop, ...] = ()
        for start, end in pairwise(ends):
            path = self.path(start, end)
            if path is None:
                message = f"no route leads from {start!r} to {end!r} in topology {self._graph.name!r}"
                raise TopologyError(message, hint="`zosim topology validate` names the nodes nothing reaches")
            hops += path
        resource_ids = self._declared_resource_ids(source_id, target_id, hops, staged_in)
        if (source_id, target_id) in self.measured_by_pair:
            resource_ids += (measured_resource_id(source_id, target_id),)
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

    def path(self, source_id: str, target_id: str) -> tuple[RouteHop, ...] | None:
        """Links passed between two nodes, the widest way; None if there is none."""
        pair = source_id, target_id
        if pair not in self._paths:
            hosts = {self._nodes[source_id].host, self._nodes[target_id].host}
            # Traffic within a host stays there, even where its adapters are wider than its sockets' link.
            stays = len(hosts) == 1 and None not in hosts
            node_types = FORWARDING_TYPES - {"network"} if stays else FORWARDING_TYPES
            hops = self._like_another(source_id, target_id) if stays else None
            if hops is None:
                hops = self._widest_path(source_id, target_id, node_types, {*hosts, None})
            # A third host forwards nothing where the two reach each other without it.
            self._paths[pair] = self._widest_path(source_id, target_id, node_types) if hops is None else hops
        return self._paths[pair]

    def _like_another(self, source_id: str, target_id: str) -> tuple[RouteHop, ...] | None:
        """The path within a host that is built like another one before it; None where there is none, or where it leaves the host."""
        like = tuple(map(self._isomorphic.representative, (source_id, target_id)))
        host = self._nodes[source_id].host
        if like == (source_id, target_id) or host is None or self._joins_hosts:
            return None
        links = [self._isomorphic.own_link(host, hop.link) for hop in self.path(*like) or ()]
        here, hops = source_id, list[RouteHop]()
        for link in links:
            if link is None:
                return None
            there = link.target if link.source == here else link.source
            hops.append(RouteHop(link, here, there))
            here = there
        return tuple(hops) or None

    @cached_property
    def _joins_hosts(self) -> bool:
        """Whether something of no host forwards traffic as nodes of a host do, so that a path within a host may lead through it."""
        return any(
            node.host is None and node.type in FORWARDING_TYPES - {"network"} for node in self._nodes.values()
        )

    def _widest_path(
        self,
        source_id: str,
        target_id: str,
        node_types: Collection[str],
        hosts: Collection[str | None] | None = None,
    ) -> tuple[RouteHop, ...] | None:
        """The widest path through nodes of some types and hosts; of these the one of least latency, then fewest links, then names.

        Dijkstra's algorithm, twice, as no single cost orders paths so: a wider beginning may have a worse end. The first
        maximises the least bandwidth on the way; the second, over links at least that wide, adds up latencies, links and names.
        """
        import networkx as nx

        def is_open(source: str, target: str) -> bool:
            """Whether a path may go from a node to the next."""
            # networkx compares costs with that of the source, which is the number 0: no path comes back to it.
            return target != source_id and (source == source_id or self._nodes[source].type in node_types)

        def narrowness(source: str, target: str, _: object) -> Any:
            return self._widest[source, target] if is_open(source, target) else None

        def length(source: str, target: str, _: object) -> Any:
            steps = self._steps[source, target] if is_open(source, target) else ()
            return next((length for length, narrow in steps if narrow <= narrowest), None)

        if source_id == target_id:
            return ()
        graph = self._graph if hosts is None else self._among(frozenset(hosts))
        try:
            narrowest = nx.dijkstra_path_length(graph, source_id, target_id, narrowness)
        except (nx.NetworkXNoPath, nx.NodeNotFound):
            return None
        total: Any = nx.dijkstra_path_length(graph, source_id, target_id, length)
        nodes, links = total[2][::2], total[2][1::2]
        return tuple(map(RouteHop, map(self._links.__getitem__, links), (source_id, *nodes), nodes))

    def _among(self, hosts: frozenset[str | None]) -> nx.Graph[str]:
        """Return the nodes of some hosts that links join: a network of a thousand adapters is passed by those of two hosts alone."""
        import networkx as nx

        if hosts not in self._graphs:
            graph = self._graphs[hosts] = nx.Graph()
            for ends in {frozenset(ends) for ends in product(hosts, repeat=2)}:
                graph.add_edges_from(self._pairs.get(ends, ()))
        return self._graphs[hosts]

    def _declared_resource_ids(
        self, source_id: str, target_id: str, hops: tuple[RouteHop, ...], staged_in: str | None
    ) -> tuple[str, ...]:
        """Memories and disks at which a flow starts, ends or stops on the way, and directions of links that can limit it."""
        stores = [
            end
            for end in (source_id, staged_in, target_id)
            if end is not None
            and self._nodes[end].type in {"memory", "disk"}
            and self._nodes[end].bandwidth is not None
        ]
        links = [
            link_resource_id(hop.link, hop.source)
            for hop in hops
            if math.isfinite(hop.link.bandwidth_bytes_per_s)
        ]
        return tuple(dict.fromkeys([*stores, *links]))

    @cached_property
    def _declared_resources(self) -> Mapping[str, Resource]:
        resources = {}
        for node in self._nodes.values():
            if node.type in {"memory", "disk"} and node.bandwidth is not None:
                resources[node.id] = Resource(node.id, node.bandwidth_bytes_per_s, 0.0, "maxmin")
        for link in self._links.values():
            if not math.isfinite(link.bandwidth_bytes_per_s):
                continue
            for start in (link.source, link.target):
                name = link_resource_id(link, start)
                resources[name] = Resource(
                    name, link.bandwidth_bytes_per_s, link.latency_s, link.type.sharing, link.type.technology
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
