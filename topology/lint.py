"""Physics lint: what a description claims that hardware cannot do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from topology.errors import TopologyError
from topology.graph import Topology
from topology.schema import Link, Node
from topology.units import format_bandwidth

# Payload per lane and direction after line encoding: 8b/10b, 128b/130b, and from Gen6 on 242 of 256 bytes of
# a flit (PCI Express Base Specification).
PCIE_LANE_BYTES_PER_S: Final = MappingProxyType(
    {
        1: 2.5e9 * 8 / 10 / 8,
        2: 5e9 * 8 / 10 / 8,
        3: 8e9 * 128 / 130 / 8,
        4: 16e9 * 128 / 130 / 8,
        5: 32e9 * 128 / 130 / 8,
        6: 64e9 * 242 / 256 / 8,
        7: 128e9 * 242 / 256 / 8,
    }
)
# Per link and direction, https://www.nvidia.com/en-us/data-center/nvlink/
NVLINK_BYTES_PER_S: Final = MappingProxyType({1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9, 6: 100e9})
# Declared figures are rounded: 31.5 and 32 GB/s both name Gen4 x16.
ROUNDING = 1.02


@dataclass(frozen=True, slots=True)
class Finding:
    """Something in a description that does not hold together.

    Attributes
    ----------
    severity : {"error", "warning"}
        Errors contradict physics or leave a device unusable; warnings are unusual.
    rule : str
        Name of the rule, such as ``"pcie-speed"``.
    where : str
        The node or link.
    message : str
        What is wrong, with the values.
    hint : str
        What to do about it.
    """

    severity: Literal["error", "warning"]
    rule: str
    where: str
    message: str
    hint: str


def lint(topology: Topology) -> tuple[Finding, ...]:
    """Findings about a topology, errors first."""
    findings = [finding for rule in RULES for finding in rule(topology)]
    return tuple(sorted(findings, key=lambda finding: finding.severity != "error"))


def refuse_errors(topology: Topology) -> None:
    """Refuse a machine with figures that contradict physics.

    Parameters
    ----------
    topology : Topology
        Machine to check; warnings pass.

    Raises
    ------
    TopologyError
        Naming each error.
    """
    errors = [finding for finding in lint(topology) if finding.severity == "error"]
    if errors:
        lines = "\n  ".join(f"{finding.where}: {finding.message}" for finding in errors)
        message = f"topology {topology.name!r} contradicts physics:\n  {lines}"
        raise TopologyError(message, hint="; ".join(dict.fromkeys(finding.hint for finding in errors)))


def _pcie_speed(topology: Topology) -> Iterator[Finding]:
    for link in topology.links:
        width = link.type.pcie
        if width is None:
            if link.type.technology == "pcie":
                message = "no PCIe generation and lanes, so its bandwidth cannot be checked"
                hint = "add pcie: {generation: 4, lanes: 16}"
                yield Finding("warning", "pcie-width", link.id, message, hint)
            continue
        limit = width.lanes * PCIE_LANE_BYTES_PER_S[width.generation]
        if link.type.nominal_bandwidth_bytes_per_s > limit * ROUNDING:
            message = (
                f"{format_bandwidth(link.type.nominal_bandwidth_bytes_per_s)} is faster than PCIe "
                f"{width.generation}.0 x{width.lanes}, which carries {format_bandwidth(limit)} per direction"
            )
            hint = "datasheets often print both directions together"
            yield Finding("error", "pcie-speed", link.id, message, hint)


def _nvlink_speed(topology: Topology) -> Iterator[Finding]:
    for link in topology.links:
        generation = link.type.nvlink_generation
        if generation is None:
            continue
        limit = NVLINK_BYTES_PER_S[generation]
        if link.type.nominal_bandwidth_bytes_per_s > limit * ROUNDING:
            message = (
                f"{format_bandwidth(link.type.nominal_bandwidth_bytes_per_s)} is faster than one link of "
                f"NVLink {generation}, which carries {format_bandwidth(limit)} per direction"
            )
            hint = "give one link's bandwidth and the number of links as count"
            yield Finding("error", "nvlink-speed", link.id, message, hint)


def _connectors(topology: Topology) -> Iterator[Finding]:
    """GPUs with more or faster links than they have connectors for."""
    for node in topology.of_type("gpu"):
        links = topology.links_of(node.id)
        spec = node.spec
        num_nvlinks = sum(link.count for link in links if link.type.technology == "nvlink")
        if spec is not None and spec.nvlink is not None and num_nvlinks > spec.nvlink.num_links:
            message = f"{num_nvlinks} NVLinks leave it, but {spec.name} has {spec.nvlink.num_links}"
            hint = "GPUs that all reach each other at full speed hang on an nvswitch"
            yield Finding("error", "nvlink-count", node.id, message, hint)
        if spec is not None and spec.nvlink is None and spec.pcie is not None and num_nvlinks:
            message = f"{spec.name} has no NVLink"
            yield Finding("error", "nvlink-count", node.id, message, "join it by PCIe")
        for link in links:
            width = link.type.pcie
            if spec is not None and spec.pcie and width and width.generation > spec.pcie.generation:
                message = f"PCIe {width.generation}.0, but {spec.name} has PCIe {spec.pcie.generation}.0"
                hint = "a link runs at the lower generation of its ends"
                yield Finding("error", "pcie-connector", link.id, message, hint)


def _duplex(topology: Topology) -> Iterator[Finding]:
    for link in topology.links:
        if link.type.duplex == "half" and link.type.technology in {"pcie", "nvlink", "socket"}:
            message = f"half duplex, but {link.type.technology} links carry both directions at once"
            yield Finding("warning", "duplex", link.id, message, "duplex: full")


def _latency(topology: Topology) -> Iterator[Finding]:
    for link in topology.links:
        if link.latency_s == 0 and link.type.technology not in {"fabric", "memory"}:
            yield Finding("warning", "latency", link.id, "has no latency", 'such as latency: "1 us"')
        if link.latency_s > 1:
            message = f"latency of {link.latency_s:g} s is longer than a second"
            yield Finding("error", "latency", link.id, message, "PCIe and NVLink are near 1 us")


def _memory_channels(topology: Topology) -> Iterator[Finding]:
    for node in topology.of_type("memory"):
        if node.channels is None or node.bandwidth is None:
            continue
        limit, declared = node.channels.bandwidth_bytes_per_s, node.bandwidth.in_si("bandwidth")
        if declared > limit * ROUNDING:
            message = (
                f"{format_bandwidth(declared)} is more than its {node.channels.num_channels} channels of "
                f"{node.channels.transfer_rate} carry, {format_bandwidth(limit)}"
            )
            yield Finding("error", "memory-channels", node.id, message, "channels x transfers/s x 8 bytes")


def _reachable(topology: Topology) -> Iterator[Finding]:
    linked = {end for link in topology.links for end in (link.source, link.target)}
    for node in topology.nodes:
        if node.type in {"gpu", "cpu"}:
            try:
                topology.host_memory(node.id)
            except TopologyError:
                what = "no memory of its host reaches it" if node.id in linked else "nothing reaches it"
                message = f"{what}: this {node.type} cannot be used"
                near = "a pcie_root or numa node" if node.type == "gpu" else "its numa node"
                yield Finding("error", "unreachable", node.id, message, f"link it to {near}")
        elif node.type != "host" and node.id not in linked:
            message = f"no link joins this {node.type}"
            yield Finding("warning", "unlinked", node.id, message, "link it, or leave it out")


def _hosts_joined(topology: Topology) -> Iterator[Finding]:
    first_of_host: dict[str, Node] = {}
    for node in topology.compute_devices:
        first_of_host.setdefault(node.host or "", node)
    devices = list(first_of_host.values())
    for device in devices[1:]:
        try:
            topology.route(devices[0].id, device.id)
        except TopologyError:
            message = f"no route joins it with {devices[0].host!r}"
            hint = "link a nic of each host to a network node"
            yield Finding("warning", "separate-hosts", device.host or device.id, message, hint)


def _sparse_peaks(topology: Topology) -> Iterator[Finding]:
    specs = {node.spec.id: node.spec for node in topology.nodes if node.spec}
    for spec in specs.values():
        for dtype, figure in spec.peak_sparse.items():
            sparse = figure.in_si("compute")
            dense = spec.peak_flop_per_s(dtype) if dtype in spec.peak_dense else math.nan
            if not math.isclose(sparse, 2 * dense, rel_tol=0.02):
                message = f"sparse peak of {dtype} is {figure}, which is not twice the dense one"
                hint = "2:4 sparsity doubles the rate; datasheets often print the sparse peak only"
                yield Finding("warning", "sparse-peak", spec.id, message, hint)


def _measured(topology: Topology) -> Iterator[Finding]:
    for entry in topology.measured:
        route = topology.route(entry.source, entry.target)
        nominal = [link.nominal_bandwidth_bytes_per_s for link in route.links]
        measured = entry.bandwidth.in_si("bandwidth")
        if measured > min(nominal, default=math.inf) * ROUNDING:
            slowest: Link = min(route.links, key=lambda link: link.nominal_bandwidth_bytes_per_s)
            message = f"{format_bandwidth(measured)} was measured over a link declared slower, {slowest.id}"
            hint = "check the declared generation and lanes, and that the measurement was no cache's"
            yield Finding("warning", "measured", f"{entry.source}>{entry.target}", message, hint)


RULES: Final[tuple[Callable[[Topology], Iterator[Finding]], ...]] = (
    _pcie_speed,
    _nvlink_speed,
    _connectors,
    _duplex,
    _latency,
    _memory_channels,
    _reachable,
    _hosts_joined,
    _sparse_peaks,
    _measured,
)
