"""The figures of a machine that money can change: link bandwidths, rates of devices, sizes of memories."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Any, Literal

from topology.figures import Figure
from topology.graph import Topology
from topology.schema import DeviceSpec, Link, Node
from topology.units import format_bandwidth, format_bytes

LeverType = Literal["link", "compute", "device memory bandwidth", "host memory bandwidth", "memory"]

# Pairs of a large mesh are alike; these suffice to see every kind of link between its devices.
_MAX_PAIRS = 64


@dataclass(frozen=True)
class Lever:
    """One figure, and the machine with that figure changed.

    Attributes
    ----------
    kind : str
    name : str
        The figure in words.
    now : str
        Its value in words.
    apply : callable
        From a topology and a factor to the topology in which every such figure is multiplied.
    """

    kind: LeverType
    name: str
    now: str
    apply: Callable[[Topology, float], Topology]


def levers(topology: Topology, devices: Sequence[str]) -> tuple[Lever, ...]:
    """Return the figures that a plan on these devices depends on.

    Parameters
    ----------
    topology : Topology
    devices : sequence of str
        Node of each rank.
    """
    memories = {topology.host_memory(device).id for device in devices}
    return (
        *_link_levers(topology, devices, memories),
        *_device_levers(topology, devices),
        *_memory_levers(topology, memories),
    )


def _link_levers(topology: Topology, devices: Sequence[str], memories: set[str]) -> Iterator[Lever]:
    ends = [(topology.host_memory(device).id, device) for device in devices if device not in memories]
    passed: dict[str, Link] = {}
    for source, target in (*ends, *islice(combinations(dict.fromkeys(devices), 2), _MAX_PAIRS)):
        for link in topology.route(source, target).links:
            if link.type.bandwidth is not None:
                passed.setdefault(_type_name(link), link)
    for name, link in passed.items():
        bandwidth = format_bandwidth(link.type.nominal_bandwidth_bytes_per_s)
        yield Lever("link", f"bandwidth of {name}", bandwidth, _links_changed(name))


def _type_name(link: Link) -> str:
    return link.type.name or link.id


def _links_changed(name: str) -> Callable[[Topology, float], Topology]:
    def apply(topology: Topology, factor: float) -> Topology:
        def changed(link: Link) -> Link:
            if _type_name(link) != name or link.type.bandwidth is None:
                return link
            wider = link.type.model_copy(update={"bandwidth": _times(link.type.bandwidth, factor)})
            return link.model_copy(update={"type": wider})

        return topology.model_copy(update={"links": tuple(map(changed, topology.links))})

    return apply


def _device_levers(topology: Topology, devices: Sequence[str]) -> Iterator[Lever]:
    specs = {spec.id: spec for node in devices if (spec := topology.node(node).spec) is not None}
    for spec in specs.values():
        peak = next(
            (kind for kind in ("fp16", "fp32") if kind in spec.peak_dense), next(iter(spec.peak_dense))
        )
        yield Lever(
            "compute",
            f"compute rate of {spec.name}",
            f"{spec.peak_dense[peak]} in {peak}",
            _specs_changed(
                spec.id,
                lambda device, factor: {
                    "peak_dense": {key: _times(value, factor) for key, value in device.peak_dense.items()}
                },
            ),
        )
        if spec.memory is None or spec.memory_bandwidth is None:
            continue
        yield Lever(
            "device memory bandwidth",
            f"memory bandwidth of {spec.name}",
            format_bandwidth(spec.memory_bandwidth_bytes_per_s),
            _specs_changed(
                spec.id,
                lambda device, factor: {"memory_bandwidth": _times(device.memory_bandwidth, factor)},
            ),
        )
        yield Lever(
            "memory",
            f"memory of {spec.name}",
            format_bytes(spec.memory_bytes),
            _specs_changed(spec.id, lambda device, factor: {"memory": _times(device.memory, factor)}),
        )


def _specs_changed(
    spec_id: str, update: Callable[[DeviceSpec, float], dict[str, Any]]
) -> Callable[[Topology, float], Topology]:
    def apply(topology: Topology, factor: float) -> Topology:
        def changed(node: Node) -> Node:
            if node.spec is None or node.spec.id != spec_id:
                return node
            return node.model_copy(update={"spec": node.spec.model_copy(update=update(node.spec, factor))})

        return topology.model_copy(update={"nodes": tuple(map(changed, topology.nodes))})

    return apply


def _memory_levers(topology: Topology, memories: set[str]) -> Iterator[Lever]:
    first = topology.node(min(memories))
    nominal = 0.0 if first.bandwidth is None else first.bandwidth.in_si("bandwidth")
    yield Lever(
        "host memory bandwidth",
        "bandwidth of host memory",
        format_bandwidth(nominal),
        _nodes_changed(memories, "bandwidth"),
    )
    yield Lever(
        "memory", "host memory", format_bytes(first.memory_bytes), _nodes_changed(memories, "capacity")
    )


def _nodes_changed(names: set[str], field: str) -> Callable[[Topology, float], Topology]:
    def apply(topology: Topology, factor: float) -> Topology:
        def changed(node: Node) -> Node:
            if node.id not in names:
                return node
            return node.model_copy(update={field: _times(getattr(node, field), factor)})

        return topology.model_copy(update={"nodes": tuple(map(changed, topology.nodes))})

    return apply


def _times(figure: Figure | None, factor: float) -> Figure:
    assert figure is not None
    return figure.model_copy(update={"value": figure.value * factor})
