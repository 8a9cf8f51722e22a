"""Hosts that are built alike, so that what is known of one need not be worked out for the others."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

from topology.schema import Link, MeasuredBandwidth, Node


class IsomorphicHosts:
    """For every node of a host, the first one of the topology that is placed just as it is.

    Two hosts are alike if their nodes, listed in the file's order, are, the same pairs of them are joined by the
    same links with the same measured bandwidths, and names are in the same order. What leaves a host is not looked at.
    """

    def __init__(
        self, nodes: Iterable[Node], links: Iterable[Link], measured: Iterable[MeasuredBandwidth] = ()
    ) -> None:
        members: dict[str, list[Node]] = {}
        for node in nodes:
            if node.host is not None:
                members.setdefault(node.host, []).append(node)
        indices = {node.id: (host, index) for host, own in members.items() for index, node in enumerate(own)}
        joined: dict[str, list[Hashable]] = {host: [] for host in members}
        inside: dict[str, list[Link]] = {host: [] for host in members}

        def join(source: str, target: str, key: Hashable) -> str | None:
            """Note what joins two nodes, by their places, if they are of one host, and return that."""
            one, other = indices.get(source), indices.get(target)
            if not (one and other and one[0] == other[0]):
                return None
            joined[one[0]].append((one[1], other[1], key))
            return one[0]

        for link in links:
            link_type = link.type
            key = (
                link_type.technology,
                link.bandwidth_bytes_per_s,
                link.latency_s,
                link_type.duplex,
                link_type.sharing,
            )
            if (host := join(link.source, link.target, key)) is not None:
                inside[host].append(link)
        for entry in measured:
            rate = entry.bandwidth.in_si("bandwidth")
            join(entry.source, entry.target, ("measured", rate))
        first: dict[Hashable, str] = {}
        self._representative: dict[str, str] = {}
        self._own_links: dict[str, Mapping[str, Link]] = {}
        """By host, its links by those of the host that stands for it."""
        for host, own in members.items():
            names = [node.id for node in own], [link.id for link in inside[host]]
            alike = tuple(map(_node_key, own)), tuple(joined[host]), *map(_order, names)
            original = first.setdefault(alike, host)
            like = [node.id for node in members[original]]
            self._representative |= dict(zip(names[0], like, strict=True))
            self._own_links[host] = {
                other.id: link for other, link in zip(inside[original], inside[host], strict=True)
            }

    def representative(self, node: str) -> str:
        """Return the first node that is placed as `node` is, itself perhaps."""
        return self._representative.get(node, node)

    def own_link(self, host: str, link: Link) -> Link | None:
        """Return the link of a host that stands where one of the host that is like it does; None for one that leaves it."""
        return self._own_links[host].get(link.id)


def _order(names: Sequence[str]) -> tuple[int, ...]:
    return tuple(sorted(range(len(names)), key=names.__getitem__))


def _node_key(node: Node) -> Hashable:
    figures = (node.capacity, node.bandwidth, node.efficiency)
    sizes = tuple(None if figure is None else (figure.value, figure.unit) for figure in figures)
    return node.type, None if node.spec is None else node.spec.id, node.index, sizes
