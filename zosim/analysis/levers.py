"""The figures of a machine that a plan depends on: links, rates of devices, sizes of memories."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Literal

from topology.changes import FigureChange, Quantity, times
from topology.graph import Topology
from topology.schema import Link
from topology.units import format_bandwidth, format_bytes, format_seconds

LeverType = Literal[
    "link", "latency", "compute", "device memory bandwidth", "host memory bandwidth", "memory"
]

# Pairs of a large mesh are alike; these suffice to see every kind of link between its devices.
_MAX_PAIRS = 64


@dataclass(frozen=True)
class Lever:
    """One figure, and the machine with that figure changed."""

    type: LeverType
    name: str
    now: str
    value: float  # the same in `unit`, an SI unit
    unit: str
    targets: frozenset[str]  # the nodes or links that have it
    quantity: Quantity

    def apply(self, topology: Topology, factor: float) -> Topology:
        """Return the topology in which every such figure is multiplied."""
        return FigureChange(self.targets, self.quantity, times(factor)).apply(topology)


def levers(
    topology: Topology, devices: Sequence[str], *, to_derive: bool = False, each: bool = False
) -> tuple[Lever, ...]:
    """Return the figures that a plan on these devices depends on.

    - `to_derive`: whether latencies of links are among them, and compute rates grow with the power that sustains them; money buys
      neither.
    - `each`: whether every link, device and memory has figures of its own, rather than all of one type together.
    """
    memories = {topology.host_memory(device).id for device in devices}
    return (
        *_link_levers(topology, devices, memories, to_derive=to_derive, each=each),
        *_device_levers(topology, devices, to_derive=to_derive, each=each),
        *_memory_levers(topology, memories, each=each),
    )


def _link_levers(
    topology: Topology, devices: Sequence[str], memories: set[str], *, to_derive: bool, each: bool
) -> Iterator[Lever]:
    ends = [(topology.host_memory(device).id, device) for device in devices if device not in memories]
    passed: dict[str, Link] = {}
    for source, target in (*ends, *islice(combinations(dict.fromkeys(devices), 2), _MAX_PAIRS)):
        for link in topology.route(source, target).links:
            if link.type.bandwidth is not None:
                passed.setdefault(_name(link, each=each), link)
    alike: dict[str, set[str]] = {}
    for link in topology.links:
        alike.setdefault(_name(link, each=each), set()).add(link.id)
    for name, link in passed.items():
        bandwidth, targets = link.type.nominal_bandwidth_bytes_per_s, frozenset(alike[name])
        now = format_bandwidth(bandwidth)
        yield Lever("link", f"bandwidth of {name}", now, bandwidth, "B/s", targets, "bandwidth")
        if to_derive and link.latency_s > 0:
            now = format_seconds(link.latency_s)
            yield Lever("latency", f"latency of {name}", now, link.latency_s, "s", targets, "latency")


def _name(link: Link, *, each: bool) -> str:
    return link.id if each else link.type.name or link.id


def _device_levers(
    topology: Topology, devices: Sequence[str], *, to_derive: bool, each: bool
) -> Iterator[Lever]:
    having: dict[str, set[str]] = {}
    for node in topology.nodes:
        if node.spec is not None:
            having.setdefault(node.id if each else node.spec.id, set()).add(node.id)
    used = {device if each else topology.node(device).spec.id: device for device in reversed(devices)}  # type: ignore[union-attr]
    for key, device in reversed(used.items()):
        spec, targets = topology.node(device).spec, frozenset(having[key])
        assert spec is not None
        name = device if each else spec.name
        peak = next(
            (dtype for dtype in ("fp16", "fp32") if dtype in spec.peak_dense), next(iter(spec.peak_dense))
        )
        rate, now = spec.peak_flop_per_s(peak), f"{spec.peak_dense[peak]} in {peak}"
        yield Lever(
            "compute",
            f"compute rate of {name}",
            now,
            rate,
            "flop/s",
            targets,
            "compute" if to_derive else "peak",
        )
        if spec.memory is None or spec.memory_bandwidth is None:
            continue
        bandwidth, size = spec.memory_bandwidth_bytes_per_s, spec.memory_bytes
        now = format_bandwidth(bandwidth)
        yield Lever(
            "device memory bandwidth",
            f"memory bandwidth of {name}",
            now,
            bandwidth,
            "B/s",
            targets,
            "bandwidth",
        )
        yield Lever("memory", f"memory of {name}", format_bytes(size), size, "B", targets, "memory")


def _memory_levers(topology: Topology, memories: Collection[str], *, each: bool) -> Iterator[Lever]:
    for names in [{name} for name in sorted(memories)] if each else [set(memories)]:
        node = topology.node(min(names))
        nominal = 0.0 if node.bandwidth is None else node.bandwidth.in_si("bandwidth")
        targets, where = frozenset(names), node.id if each else "host memory"
        now = format_bandwidth(nominal)
        yield Lever(
            "host memory bandwidth", f"bandwidth of {where}", now, nominal, "B/s", targets, "bandwidth"
        )
        size = node.memory_bytes
        name = f"memory of {where}" if each else where
        yield Lever("memory", name, format_bytes(size), size, "B", targets, "memory")
