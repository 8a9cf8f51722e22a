"""A PCIe tree from what is known of each pair of devices, as ``nvidia-smi topo -m`` and NVML tell it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from topology.building import MachineBuilder, nvlink_type
from topology.schema import LinkType, NvlinkPorts

Pair = frozenset[str]
# From the nearest common ancestor upwards: one switch, several switches, one root complex.
ONE_SWITCH, SWITCHES, ROOT = ("PIX",), ("PIX", "PXB"), ("PIX", "PXB", "PHB")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A GPU or an adapter to be hung into the tree: its node's id and further fields, its PCIe link and its NUMA domain."""

    id: str
    fields: Mapping[str, Any]
    link_type: LinkType
    numa: str


def attach(builder: MachineBuilder, endpoints: Iterable[Endpoint], levels: Mapping[Pair, str]) -> None:
    """Hang devices into the PCIe tree that explains their common ancestors.

    `levels`: PIX, PXB or PHB per pair; other codes do not place a device below a common root.

    Where two GPUs share NVLinks, ``nvidia-smi`` prints those instead of their position in the tree; only an
    adapter beside them can then show that they share a switch.
    """
    devices = {endpoint.id: endpoint for endpoint in endpoints}
    for endpoint in devices.values():
        builder.add_node(endpoint.id, host="host0", **endpoint.fields)
    for under_root in _groups(devices, levels, ROOT):
        root = builder.add_root(devices[under_root[0]].numa)
        for cascade in _groups(under_root, levels, SWITCHES):
            leaves = _groups(cascade, levels, ONE_SWITCH)
            types = (devices[name].link_type for name in cascade)
            widest = max(types, key=lambda link: link.nominal_bandwidth_bytes_per_s)
            parent = root
            if len(leaves) > 1:
                parent = builder.add_next("switch", "pcie_switch")
                builder.join(root, parent, widest)
            for leaf in leaves:
                above = parent
                if len(leaf) > 1:
                    above = builder.add_next("switch", "pcie_switch")
                    builder.join(parent, above, widest)
                for name in leaf:
                    builder.join(above, name, devices[name].link_type)


def _groups(names: Iterable[str], levels: Mapping[Pair, str], codes: tuple[str, ...]) -> list[list[str]]:
    """Return the devices that pairs with one of the codes connect, in the order given."""
    import networkx as nx

    order = {name: number for number, name in enumerate(names)}
    near: nx.Graph[str] = nx.Graph()
    near.add_nodes_from(order)
    for pair, code in levels.items():
        if code in codes and pair <= order.keys():
            near.add_edge(*pair)
    groups = (sorted(group, key=order.__getitem__) for group in nx.connected_components(near))
    return sorted(groups, key=lambda group: order[group[0]])


def join_nvlinks(
    builder: MachineBuilder, counts: Mapping[tuple[str, str], int], ports: NvlinkPorts | None
) -> None:
    """Join GPUs by the NVLinks counted per pair: directly, or by a switch where they cannot all be direct.

    - `counts`: NVLinks per pair.
    - `ports`: the NVLinks of one GPU; those of the fourth generation if it is not known.

    Behind NVSwitches every pair is reported with all the links of a GPU. If the links of one GPU, summed
    over its peers, are more than it has, a switch is what explains them: one for each group that no NVLinks join to another.
    """
    ports = ports or NvlinkPorts(generation=4, num_links=18)
    totals: dict[str, int] = {}
    most: dict[str, int] = {}
    for pair, count in counts.items():
        for name in pair:
            totals[name] = totals.get(name, 0) + count
            most[name] = max(most.get(name, 0), count)
    for group in _groups(totals, {frozenset(pair): "NV" for pair in counts}, ("NV",)):
        if max(totals[name] for name in group) > ports.num_links:
            join_switch(builder, {name: most[name] for name in group}, ports.generation)
            continue
        for (source, target), count in counts.items():
            if source in group:
                builder.join(source, target, nvlink_type(ports), count)


def join_switch(builder: MachineBuilder, counts: Mapping[str, int], generation: int) -> None:
    """Join GPUs with an NVSwitch, each by its number of NVLinks."""
    switch = builder.add_next("nvswitch", "nvswitch")
    for name, count in counts.items():
        builder.join(name, switch, nvlink_type(generation), count)
