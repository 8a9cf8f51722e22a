"""Widest-then-shortest paths."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import networkx as nx

from topology.schema import Link


class NoRoute(LookupError):  # noqa: N818 - reads as the statement it makes
    """No path joins two nodes."""


@dataclass(frozen=True, slots=True)
class Hop:
    """A link passed in one direction."""

    link: Link
    source: str
    target: str


def find_path(
    graph: nx.MultiDiGraph[str], source_id: str, target_id: str, forwarding_kinds: Collection[str]
) -> tuple[Hop, ...]:
    """The widest path; among those the one of least latency, then fewest links, then first by name.

    Parameters
    ----------
    graph : networkx.MultiDiGraph
        Edges carry ``link``, ``bandwidth_bytes_per_s`` and ``latency_s``; nodes carry ``kind``.
    source_id, target_id : str
        The ends.
    forwarding_kinds : collection of str
        Kinds of nodes that a path may pass through.

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
    width = _widest(graph, source_id, target_id, forwarding_kinds)
    return _shortest(graph, source_id, target_id, forwarding_kinds, width)


def _edges(
    graph: nx.MultiDiGraph[str], node_id: str, source_id: str, forwarding_kinds: Collection[str]
) -> Iterator[tuple[str, Link]]:
    if node_id != source_id and graph.nodes[node_id]["kind"] not in forwarding_kinds:
        return
    for _, target, data in graph.out_edges(node_id, data=True):
        yield target, data["link"]


def _widest(
    graph: nx.MultiDiGraph[str], source_id: str, target_id: str, forwarding_kinds: Collection[str]
) -> float:
    queue = [(-math.inf, source_id)]
    done: set[str] = set()
    while queue:
        negative_width, node_id = heapq.heappop(queue)
        if node_id == target_id:
            return -negative_width
        if node_id in done:
            continue
        done.add(node_id)
        for target, link in _edges(graph, node_id, source_id, forwarding_kinds):
            if target not in done:
                heapq.heappush(queue, (max(negative_width, -link.bandwidth_bytes_per_s), target))
    raise NoRoute(source_id, target_id)


def _shortest(
    graph: nx.MultiDiGraph[str],
    source_id: str,
    target_id: str,
    forwarding_kinds: Collection[str],
    width: float,
) -> tuple[Hop, ...]:
    # An entry is (latency, links, names passed); the names are unique, so the hops are never compared.
    start: tuple[float, int, tuple[str, ...], str, tuple[Hop, ...]] = (0.0, 0, (), source_id, ())
    queue = [start]
    done: set[str] = set()
    while queue:
        latency_s, num_links, names, node_id, hops = heapq.heappop(queue)
        if node_id == target_id:
            return hops
        if node_id in done:
            continue
        done.add(node_id)
        for target, link in _edges(graph, node_id, source_id, forwarding_kinds):
            if target not in done and link.bandwidth_bytes_per_s >= width:
                entry = (
                    latency_s + link.latency_s,
                    num_links + 1,
                    (*names, target, link.id),
                    target,
                    (*hops, Hop(link, node_id, target)),
                )
                heapq.heappush(queue, entry)
    raise NoRoute(source_id, target_id)
