"""Widest-then-shortest paths."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from topology.schema import Link, Node


class NoRoute(LookupError):  # noqa: N818 - reads as the statement it makes
    """No path joins two nodes."""


@dataclass(frozen=True, slots=True)
class RouteHop:
    """A link passed in one direction."""

    link: Link
    source: str
    target: str


class DirectedLink(NamedTuple):
    """A link as it is passed from one of its ends to the other."""

    source: Node
    target: Node
    link: Link
    bandwidth_bytes_per_s: float
    latency_s: float


def find_path(
    links_from: Mapping[str, Sequence[DirectedLink]],
    source_id: str,
    target_id: str,
    forwarding_kinds: Collection[str],
    hosts: Collection[str | None] | None = None,
) -> tuple[RouteHop, ...]:
    """The widest path; among those the one of least latency, then fewest links, then first by name.

    Parameters
    ----------
    links_from : mapping of str to sequence of DirectedLink
        By node.
    source_id, target_id : str
        The ends.
    forwarding_kinds : collection of str
        Kinds of nodes that a path may pass through.
    hosts : collection of str or None, optional
        Hosts whose nodes a path may touch, None for nodes of no host; all unless given.

    Raises
    ------
    NoRoute
        If there is no path.

    Notes
    -----
    Two passes of Dijkstra's algorithm: the first maximises the least bandwidth on the way, the second
    minimises (latency, links, names) over edges at least that wide. Both orders are preserved when a path
    is extended, which is what makes the algorithm exact.
    """
    onward = _Onward(
        links_from, source_id, frozenset(forwarding_kinds), None if hosts is None else frozenset(hosts)
    )
    return _shortest(onward, source_id, target_id, _widest(onward, source_id, target_id))


@dataclass(frozen=True, slots=True)
class _Onward:
    """Where a path may go on from a node."""

    links_from: Mapping[str, Sequence[DirectedLink]]
    source_id: str
    forwarding_kinds: frozenset[str]
    hosts: frozenset[str | None] | None

    def links(self, node_id: str) -> Iterator[tuple[str, DirectedLink]]:
        """Yield the links that a path can take next, by the nodes that they lead to."""
        for edge in self.links_from.get(node_id, ()):
            if node_id != self.source_id and edge.source.kind not in self.forwarding_kinds:
                return
            if self.hosts is None or edge.target.host in self.hosts:
                yield edge.target.id, edge


def _widest(onward: _Onward, source_id: str, target_id: str) -> float:
    queue = [(-math.inf, source_id)]
    done: set[str] = set()
    while queue:
        negative_width, node_id = heapq.heappop(queue)
        if node_id == target_id:
            return -negative_width
        if node_id in done:
            continue
        done.add(node_id)
        for target, edge in onward.links(node_id):
            if target not in done:
                heapq.heappush(queue, (max(negative_width, -edge.bandwidth_bytes_per_s), target))
    raise NoRoute(source_id, target_id)


def _shortest(onward: _Onward, source_id: str, target_id: str, width: float) -> tuple[RouteHop, ...]:
    # An entry is (latency, links, names passed); the names are unique, so the hops are never compared.
    start: tuple[float, int, tuple[str, ...], str, tuple[RouteHop, ...]] = (0.0, 0, (), source_id, ())
    queue = [start]
    done: set[str] = set()
    while queue:
        latency_s, num_links, names, node_id, hops = heapq.heappop(queue)
        if node_id == target_id:
            return hops
        if node_id in done:
            continue
        done.add(node_id)
        for target, edge in onward.links(node_id):
            if target not in done and edge.bandwidth_bytes_per_s >= width:
                entry = (
                    latency_s + edge.latency_s,
                    num_links + 1,
                    (*names, target, edge.link.id),
                    target,
                    (*hops, RouteHop(edge.link, node_id, target)),
                )
                heapq.heappush(queue, entry)
    raise NoRoute(source_id, target_id)
