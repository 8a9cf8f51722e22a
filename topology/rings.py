"""Rings of NVLinks: what bounds the bandwidth of a ring collective among GPUs that are joined pair by pair.

A ring visits every GPU once. Rings that share no physical link run beside each other, so what counts is the best
set of such rings: edge-disjoint Hamiltonian cycles of the multigraph of NVLinks. Some sets of GPUs have none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

import numpy as np
import numpy.typing as npt

from topology.errors import TopologyError
from topology.graph import Topology
from topology.schema import Link

MAX_CYCLES = 25_000
"""Cycles that the exact search chooses from: all of a complete graph of nine GPUs, many more than a real board has."""
MAX_TRIED = 2_000_000
"""Beginnings of cycles that it follows, whether or not they close."""
MAX_BRANCHES = 10_000
"""Of the integer program; those of real boards take a handful."""
# Rings that are put together in search of a set that uses all links of a GPU, which real boards have.
_MOST_TRIED = 1_000
# Sums of bandwidths that differ by less, relative, are equal.
_SAME = 1e-9

_Cycle = tuple[tuple[str, ...], tuple["_SharedWire", ...]]
"""GPUs in order, and what joins each to the next."""


@dataclass(frozen=True, slots=True)
class LinkRing:
    """A cycle of NVLinks."""

    gpu_ids: tuple[str, ...]
    link_ids: tuple[str, ...]  # the link from each GPU to the next, one of its physical links
    bandwidth_bytes_per_s: float  # of the slowest physical link, in one direction


@dataclass(frozen=True, slots=True)
class RingSet:
    """Rings that share no physical link."""

    gpu_ids: tuple[str, ...]  # whom all rings visit
    rings: tuple[LinkRing, ...]  # none where the GPUs have none

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Sum over the rings of the slowest link's bandwidth in one direction."""
        return sum(ring.bandwidth_bytes_per_s for ring in self.rings)

    @property
    def num_directions(self) -> int:
        """Ways round a ring that do not share a wire: two, except between two GPUs, where they are the same."""
        return 2 if len(self.gpu_ids) > 2 else 1

    @property
    def both_ways_bytes_per_s(self) -> float:
        """Bandwidth with every ring used in both directions at once, as NCCL does on full-duplex links."""
        return self.num_directions * self.bandwidth_bytes_per_s

    def all_reduce_s(self, size_bytes: float) -> float:
        """Return the seconds of a large all_reduce, its data divided over the rings: ``2 (n - 1) / n · S / B``.

        Raises TopologyError if there is no ring.
        """
        if not self.rings:
            message = f"no ring of NVLinks visits {', '.join(self.gpu_ids)}"
            raise TopologyError(message, hint="a collective among them goes over PCIe")
        num = len(self.gpu_ids)
        return 2 * (num - 1) / num * size_bytes / self.both_ways_bytes_per_s


@dataclass(frozen=True)
class _SharedWire:
    """Physical links of one bandwidth between two GPUs."""

    ends: frozenset[str]
    bandwidth_bytes_per_s: float
    links: tuple[Link, ...]

    @property
    def num_links(self) -> int:
        return sum(link.count for link in self.links)


def edge_disjoint_rings(topology: Topology, gpu_ids: Sequence[str]) -> RingSet:
    """Return the set of edge-disjoint rings of NVLinks among GPUs that has the largest bandwidth.

    Raises TopologyError if a node is unknown or no GPU, stands twice, or there are too many cycles to choose from.

    Exact: every cycle is listed. Rings that use all links of one GPU are the best; where none are found, an integer program
    chooses how often each is used, ``max Σ b_c x_c`` with ``Σ_{c ∋ e} x_c ≤ links of e``.
    What a ring takes: P. Patarasuk, X. Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations", 2009.

    >>> from topology.documents import load_preset
    >>> rings = edge_disjoint_rings(load_preset("dgx-1v"), [f"gpu{i}" for i in range(8)])
    >>> len(rings.rings)
    3
    """
    for gpu_id in gpu_ids:
        if topology.node(gpu_id).type != "gpu":
            message = f"{gpu_id!r} is a {topology.node(gpu_id).type}, not a gpu"
            gpus = ", ".join(node.id for node in topology.of_type("gpu"))
            raise TopologyError(message, hint=f"gpus: {gpus or 'none'}")
    if len(set(gpu_ids)) != len(gpu_ids) or len(gpu_ids) < 2:
        message = f"a ring needs two different GPUs at least, got {', '.join(gpu_ids) or 'none'}"
        raise TopologyError(message, hint="name each GPU once")
    cycles = list(islice(_cycles(tuple(gpu_ids), _joints(topology, set(gpu_ids))), MAX_CYCLES + 1))
    if len(cycles) > MAX_CYCLES:
        message = f"more than {MAX_CYCLES} rings of NVLinks visit these GPUs"
        raise TopologyError(message, hint="ask for fewer GPUs")
    if not cycles:
        return RingSet(tuple(gpu_ids), ())
    slowest = np.array([min(joint.bandwidth_bytes_per_s for joint in path) for _, path in cycles])
    chosen = _filling([path for _, path in cycles], slowest.tolist())
    if chosen is None:
        chosen = _largest(cycles, slowest)
    rings = [
        LinkRing(order, tuple(joint.links[0].id for joint in path), float(slowest[number]))
        for number in chosen
        for order, path in [cycles[number]]
    ]
    return RingSet(tuple(gpu_ids), tuple(rings))


def _filling(paths: Sequence[tuple[_SharedWire, ...]], slowest: Sequence[float]) -> list[int] | None:
    """Return numbers of cycles that use all that the GPU with the least bandwidth has, which no set exceeds; None if few tries find none."""
    wires = list(dict.fromkeys(wire for path in paths for wire in path))
    numbered = [tuple(map(wires.index, path)) for path in paths]
    left = [wire.num_links for wire in wires]
    # A ring enters and leaves a GPU; between two it goes there and back over one link.
    num_ends = min(2, len(paths[0]))
    widths: dict[str, list[float]] = defaultdict(list)
    for wire in wires:
        for gpu in wire.ends:
            widths[gpu] += [wire.bandwidth_bytes_per_s] * wire.num_links
    most = min(
        sum(sorted(own, reverse=True)[: len(own) // num_ends * num_ends]) / num_ends
        for own in widths.values()
    )
    in_order = sorted(range(len(paths)), key=lambda number: -slowest[number])
    tried = count()

    def filled(begin: int, chosen: list[int]) -> list[int] | None:
        if sum(slowest[number] for number in chosen) >= most * (1 - _SAME):
            return chosen
        for place in range(begin, len(in_order)):
            number = in_order[place]
            if min(map(left.__getitem__, numbered[number])) > 0 and next(tried) < _MOST_TRIED:
                for wire in numbered[number]:
                    left[wire] -= 1
                if (found := filled(place, [*chosen, number])) is not None:
                    return found
                for wire in numbered[number]:
                    left[wire] += 1
        return None

    return filled(0, [])


def _largest(cycles: Sequence[_Cycle], slowest: npt.NDArray[np.float64]) -> list[int]:
    """Return numbers of the cycles of the best set, by an integer program."""
    # Hardly a board needs it, and scipy takes a while to import.
    from scipy.optimize import Bounds, LinearConstraint, milp

    listed = list(dict.fromkeys(joint for _, path in cycles for joint in path))
    incidence = np.array([[path.count(joint) for _, path in cycles] for joint in listed], dtype=np.float64)
    capacity = np.array([joint.num_links for joint in listed], dtype=np.float64)
    solution = milp(
        -slowest / slowest.max(),
        constraints=LinearConstraint(incidence, ub=capacity),
        integrality=np.ones(len(cycles)),
        bounds=Bounds(0, np.inf),
        options={"node_limit": MAX_BRANCHES},
    )
    if not solution.success:
        message = f"the best set of rings among {len(cycles[0][0])} GPUs was not found: {solution.message}"
        raise TopologyError(message, hint="ask for fewer GPUs")
    return [number for number, times in enumerate(solution.x) for _ in range(round(times))]


def _joints(topology: Topology, gpu_ids: set[str]) -> dict[str, list[tuple[str, _SharedWire]]]:
    """Return, for each GPU, its neighbours among the others with what joins them."""
    alike: dict[tuple[frozenset[str], float], list[Link]] = defaultdict(list)
    for link in topology.links:
        if link.type.technology == "nvlink" and {link.source, link.target} <= gpu_ids:
            ends = frozenset((link.source, link.target))
            alike[ends, link.bandwidth_bytes_per_s / link.count].append(link)
    neighbours: dict[str, list[tuple[str, _SharedWire]]] = defaultdict(list)
    for (ends, bandwidth), links in alike.items():
        joint = _SharedWire(ends, bandwidth, tuple(links))
        one, other = sorted(ends)
        neighbours[one].append((other, joint))
        neighbours[other].append((one, joint))
    return neighbours


def _cycles(
    gpu_ids: tuple[str, ...], neighbours: dict[str, list[tuple[str, _SharedWire]]]
) -> Iterator[_Cycle]:
    """Yield every cycle once."""
    if len(gpu_ids) == 2:
        # There and back over the two directions of one link.
        yield from ((gpu_ids, (joint,)) for _, joint in neighbours[gpu_ids[0]])
        return
    first = gpu_ids[0]
    index = {gpu_id: number for number, gpu_id in enumerate(gpu_ids)}
    tried = count()

    def extend(order: tuple[str, ...], path: tuple[_SharedWire, ...]) -> Iterator[_Cycle]:
        if next(tried) > MAX_TRIED:
            message = f"these {len(gpu_ids)} GPUs can be visited in too many orders to look for rings"
            raise TopologyError(message, hint="ask for fewer GPUs")
        for other, joint in neighbours[order[-1]]:
            # Of the two directions of a cycle the one that starts with the earlier neighbour is listed.
            if other == first and len(order) == len(gpu_ids) and index[order[1]] < index[order[-1]]:
                yield order, (*path, joint)
            elif other not in order:
                yield from extend((*order, other), (*path, joint))

    yield from extend((first,), ())
