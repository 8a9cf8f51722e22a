"""When flows end that share the links of a network.

A flow is a message with a route. Links share in one of two ways:

* ``maxmin``: the flows on it at any time share it max-min fairly, and data pass through as a fluid: bytes leave
  such a link as fast as they enter it.
* ``fifo``: the link sends one whole message after the other, at its full bandwidth, in order of arrival;
  messages that arrive at the same instant count as arrived in the order in which they were given. The next link
  sees a message when it has arrived as a whole: store and forward.

A route may mix them. It is cut into *parts*, one per ``fifo`` link and one per unbroken run of ``maxmin`` links, and
a message finishes a part before it starts the next.

Latency does not occupy a link and does not overlap the transfer: the first byte is sent at the start of the part,
the last one arrives the part's latency after it was sent. A lone flow over one part takes latency plus bytes over
the least bandwidth. A duplex link is two links, a half-duplex link is one that both directions name.

References
----------
.. [1] P. Velho and A. Legrand, "Accuracy study and improvement of network simulation in the SimGrid framework",
   SIMUTools 2009: what flow-level simulation leaves out (slow start, round-trip bias, reverse traffic).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from topology.errors import TrafficError
from topology.graph import Topology
from zosim.simulators.rows import Entries, Floats, Ints, Rows
from zosim.simulators.sharing import SAME_INSTANT


@dataclass(frozen=True, slots=True)
class NetworkLink:
    """One direction of a link, or all of a half-duplex one."""

    bandwidth_bytes_per_s: float
    latency_s: float = 0.0
    sharing: Literal["maxmin", "fifo"] = "maxmin"


@dataclass(frozen=True, slots=True)
class FlowPart:
    """Part of a route that a message crosses as a whole before it goes on: links by name, and their latency."""

    links: tuple[str, ...]
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Flow:
    """A message of `size_bytes` that starts at `start_s` and crosses one part after the other."""

    parts: tuple[FlowPart, ...]
    size_bytes: float
    start_s: float = 0.0


def parts_of(route: Iterable[str], links: Mapping[str, NetworkLink]) -> tuple[FlowPart, ...]:
    """Return the parts of a route: every ``fifo`` link alone, ``maxmin`` links in unbroken runs.

    Examples
    --------
    >>> links = {"a": NetworkLink(1e9), "b": NetworkLink(1e9), "q": NetworkLink(1e9, sharing="fifo")}
    >>> [part.links for part in parts_of(["a", "b", "q", "a"], links)]
    [('a', 'b'), ('q',), ('a',)]
    """
    parts: list[FlowPart] = []
    for is_fifo, run in itertools.groupby(route, key=lambda name: links[name].sharing == "fifo"):
        names = tuple(run)
        latencies = [links[name].latency_s for name in names]
        parts += (
            [FlowPart((name,), latency_s) for name, latency_s in zip(names, latencies, strict=True)]
            if is_fifo
            else [FlowPart(names, math.fsum(latencies))]
        )
    return tuple(parts)


def network_of(topology: Topology) -> dict[str, NetworkLink]:
    """Return what flows share in a topology: a link for each direction, memories, measured end-to-end limits."""
    return {
        name: NetworkLink(item.bandwidth_bytes_per_s, item.latency_s, item.sharing)
        for name, item in topology.resources.items()
    }


def parts_between(
    topology: Topology, links: Mapping[str, NetworkLink], source_id: str, target_id: str
) -> tuple[FlowPart, ...]:
    """Return the parts of the widest route between two nodes of a topology, whose network `links` is.

    The memory at either end is read while the first part is crossed and written while the last one is; a measured
    end-to-end bandwidth limits every part. Links that never limit only add their latency, after the last part.

    Raises
    ------
    TopologyError
        If a node is unknown, or no route joins them.
    """
    route = topology.route(source_id, target_id)
    if not route.resource_ids:
        return (FlowPart((), route.latency_s),) if route.links else ()
    ends = [name for name in (source_id, target_id) if name in route.resource_ids]
    measured = tuple(name for name in route.resource_ids if name.startswith("measured:"))
    crossed = [name for name in route.resource_ids if name not in {*ends, *measured}]
    parts = list(parts_of(crossed, links)) or [FlowPart(())]
    if source_id in ends:
        parts[0] = FlowPart((source_id, *parts[0].links), parts[0].latency_s)
    if target_id in ends and target_id != source_id:
        parts[-1] = FlowPart((*parts[-1].links, target_id), parts[-1].latency_s)
    rest_s = max(route.latency_s - math.fsum(part.latency_s for part in parts), 0.0)
    parts[-1] = FlowPart(parts[-1].links, parts[-1].latency_s + rest_s)
    return tuple(FlowPart((*part.links, *measured), part.latency_s) for part in parts)


def finish_times(flows: Sequence[Flow], links: Mapping[str, NetworkLink]) -> list[float]:
    """Return when each flow's last byte has arrived, in seconds.

    Parameters
    ----------
    flows : sequence of Flow
        Their order is the order of arrival of messages that reach a ``fifo`` link at the same instant.
    links : mapping of str to NetworkLink
        Every link that a part names.

    Notes
    -----
    Between two events (a start, an end) every flow progresses at its max-min fair rate; rates are computed anew
    only for flows that a used-up link joins with the one that started or ended.

    Raises
    ------
    TrafficError
        If a flow would take longer than a float can say.

    Examples
    --------
    1 GB and 3 GB share 1 GB/s until the first ends after 2 s; the other has the link to itself for its last 2 GB.

    >>> part = FlowPart(("a",))
    >>> finish_times([Flow((part,), 1e9), Flow((part,), 3e9)], {"a": NetworkLink(1e9)})
    [2.0, 4.0]
    """
    return _FlowRun(flows, links).finished() if flows else []


class _FlowParts(Rows):
    """Parts of flows: a row each, in the order of the flows."""

    def __init__(self, flows: Sequence[Flow], links: Mapping[str, NetworkLink]) -> None:
        number = {name: place for place, name in enumerate(links)}
        capacity = np.array([link.bandwidth_bytes_per_s for link in links.values()], dtype=np.float64)
        parts = [(flow, part) for flow in flows for part in flow.parts]
        # A link that a route crosses twice carries the flow twice.
        crossed = [Counter(number[name] for name in part.links) for _, part in parts]
        self._resources = np.array([link for counts in crossed for link in counts], dtype=np.intp)
        self._uses = np.array([count for counts in crossed for count in counts.values()], dtype=np.float64)
        sizes = [len(counts) for counts in crossed]
        self._rows = np.repeat(np.arange(len(parts)), sizes)
        super().__init__(
            len(parts),
            capacity,
            np.array([link.sharing == "fifo" for link in links.values()], dtype=bool),
            np.arange(len(parts)),
        )
        self._bound = np.full(len(parts), math.inf)
        np.minimum.at(self._bound, self._rows, capacity[self._resources] / self._uses)
        size = np.array([flow.size_bytes for flow, _ in parts], dtype=np.float64)
        with np.errstate(over="ignore"):
            self.seconds = size / self._bound
        self._instant = 0
        self._instant_s = -math.inf

    def arrive(self, rows: Ints, seconds: float | Floats, now_s: float) -> None:
        """Let parts arrive; those of one instant count as arrived together, however many links a flow crossed in it."""
        super().arrive(rows, seconds, now_s)
        if now_s > self._instant_s * (1 + SAME_INSTANT):
            self._instant, self._instant_s = self._num_arrivals, now_s
        self._arrival[rows] = self._instant

    def _entries(self, rows: Ints) -> Entries:
        wanted = np.zeros(len(self._bound), dtype=bool)
        wanted[rows] = True
        there = wanted[self._rows]
        return self._rows[there], self._resources[there], self._uses[there]

    def _bounds_and_weights(self, rows: Ints) -> tuple[Floats, Floats]:
        return self._bound[rows], np.ones(len(rows))

    def _joined(self) -> tuple[Ints, Ints]:
        return self._rows, self._resources


class _FlowRun:
    """One simulation, its clock counted from the first start."""

    def __init__(self, flows: Sequence[Flow], links: Mapping[str, NetworkLink]) -> None:
        self._flows = flows
        self._origin_s = min(flow.start_s for flow in flows)
        self._flow_parts = _FlowParts(flows, links)
        self._check_range()
        # The first row of each flow, and the flow of each row.
        self._first = np.cumsum([0] + [len(flow.parts) for flow in flows]).tolist()
        self._flow_of = [number for number, flow in enumerate(flows) for _ in flow.parts]
        self._ends_s = [math.nan] * len(flows)
        # Arrivals at a part: time, flow, part.
        self._arrivals = [(flow.start_s - self._origin_s, number, 0) for number, flow in enumerate(flows)]
        heapq.heapify(self._arrivals)

    def _check_range(self) -> None:
        latencies_s = (part.latency_s for flow in self._flows for part in flow.parts)
        bound_s = (
            max(flow.start_s for flow in self._flows)
            + sum(latencies_s)
            + float(self._flow_parts.seconds.sum())
        )
        if not math.isfinite(bound_s):
            raise TrafficError(
                "these flows may take longer than the largest number of seconds that a float holds",
                hint="check bytes, bandwidths (bytes per second) and latencies (seconds)",
            )

    def finished(self) -> list[float]:
        """Return the ends of all flows, on the callers' clock."""
        while (now_s := self._next_s()) < math.inf:
            until_s = now_s * (1 + SAME_INSTANT)
            for row in self._flow_parts.take_ended(until_s).tolist():
                number = self._flow_of[row]
                self._send_on(number, row - self._first[number], now_s)
            self._start_arrived(now_s, until_s)
            if not self._flow_parts.is_settled:
                self._flow_parts.settle(now_s)
        return [self._origin_s + end_s for end_s in self._ends_s]

    def _next_s(self) -> float:
        end_s = float(self._flow_parts.end_s.min(initial=math.inf))
        return min(self._arrivals[0][0] if self._arrivals else math.inf, end_s)

    def _send_on(self, number: int, part: int, now_s: float) -> None:
        arrival_s = now_s + self._flows[number].parts[part].latency_s
        heapq.heappush(self._arrivals, (arrival_s, number, part + 1))

    def _start_arrived(self, now_s: float, until_s: float) -> None:
        rows = []
        while self._arrivals and self._arrivals[0][0] <= until_s:
            arrival_s, number, part = heapq.heappop(self._arrivals)
            parts = self._flows[number].parts
            if part == len(parts):
                self._ends_s[number] = arrival_s
            elif parts[part].links:
                rows.append(self._first[number] + part)
            else:
                self._send_on(number, part, arrival_s)
        if rows:
            self._flow_parts.arrive(np.array(rows), self._flow_parts.seconds[rows], now_s)
