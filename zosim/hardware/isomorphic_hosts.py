"""Hosts that are built alike, so that what is known of one need not be worked out for the others."""

from __future__ import annotations

from collections.abc import Hashable

from topology.graph import Topology


class IsomorphicHosts:
    """For every device, the first one of the topology that is placed just as it is.

    Two hosts are alike if their nodes, listed in the file's order, are, and the same pairs of them are joined by the
    same links with the same measured bandwidths. What leaves a host is not looked at.
    """

    def __init__(self, topology: Topology) -> None:
        members: dict[str, list[str]] = {}
        for node in topology.nodes:
            if node.host is not None:
                members.setdefault(node.host, []).append(node.id)
        indices = {name: (host, index) for host, names in members.items() for index, name in enumerate(names)}
        joined: dict[str, list[Hashable]] = {host: [] for host in members}

        def join(source: str, target: str, key: Hashable) -> None:
            """Note what joins two nodes, by their places, if they are of one host."""
            one, other = indices.get(source), indices.get(target)
            if one and other and one[0] == other[0]:
                joined[one[0]].append((one[1], other[1], key))

        for link in topology.links:
            link_type = link.type
            key = (
                link_type.technology,
                link.bandwidth_bytes_per_s,
                link.latency_s,
                link_type.duplex,
                link_type.sharing,
            )
            join(link.source, link.target, key)
        for entry in topology.measured:
            measured = entry.bandwidth.in_si("bandwidth")
            join(entry.source, entry.target, ("measured", measured))
        first: dict[Hashable, str] = {}
        self._representative: dict[str, str] = {}
        for host, names in members.items():
            nodes = tuple(_node_key(topology, name) for name in names)
            original = first.setdefault((nodes, tuple(joined[host])), host)
            self._representative |= dict(zip(names, members[original], strict=True))

    def representative(self, device: str) -> str:
        """Return the first device that is placed as `device` is, itself perhaps."""
        return self._representative.get(device, device)


def _node_key(topology: Topology, name: str) -> Hashable:
    node = topology.node(name)
    figures = (node.capacity, node.bandwidth, node.efficiency)
    sizes = tuple(None if figure is None else (figure.value, figure.unit) for figure in figures)
    return node.type, None if node.spec is None else node.spec.id, node.index, sizes
