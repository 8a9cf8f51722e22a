"""hwloc's XML, version 2, as ``lstopo machine.xml`` writes it."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from pathlib import Path

from topology.building import (
    MachineBuilder,
    assumed_memory,
    figure,
    find_device,
    generic_cpu,
    pcie_type,
    require_device,
)
from topology.documents import catalogue
from topology.errors import TopologyError
from topology.graph import Topology
from topology.importers.safe_xml import attribute, integer, parse_xml
from topology.lint import PCIE_LANE_BYTES_PER_S
from topology.schema import DeviceSpec, LinkType

GPU_CLASSES, NIC_CLASSES, DISK_CLASSES = ("03",), ("02",), ("0108",)
HOST_BRIDGE = "0-1"


@dataclass
class _HwlocTree:
    """What the file tells beside its tree, and how many of each have been found."""

    builder: MachineBuilder
    path: str | Path
    gpu: str | None
    cpu: str | None
    memory_bandwidth: str | None
    num_domains: int
    counts: dict[str, int] = field(default_factory=dict)

    def next_id(self, prefix: str) -> tuple[str, int]:
        """A fresh id with its number."""
        number = self.counts.get(prefix, 0)
        self.counts[prefix] = number + 1
        return f"{prefix}{number}", number


def from_hwloc_xml(
    path: str | Path,
    *,
    gpu: str | None = None,
    cpu: str | None = None,
    memory_bandwidth: str | None = None,
) -> Topology:
    """The machine of an hwloc XML file.

    Parameters
    ----------
    path : str or Path
        File that ``lstopo --of xml`` wrote, hwloc 2 or later.
    gpu, cpu : str, optional
        Catalogue names; recognised by their product names where the file has them.
    memory_bandwidth : str, optional
        Of the host's memory; hwloc does not tell, so it is assumed if left out.

    Raises
    ------
    TopologyError
        If the file is damaged, of hwloc 1, or the GPU is unknown.
    """
    root = parse_xml(path, "topology", "hwloc")
    if not root.get("version", "1").startswith(("2", "3")):
        message = f"{str(path)!r} is of hwloc {root.get('version', '1.x')}"
        raise TopologyError(message, hint="write it with hwloc 2 or later")
    machine = root.find("object[@type='Machine']")
    if machine is None:
        message = f"{str(path)!r} has no object of type Machine"
        raise TopologyError(message, hint="write it with `lstopo machine.xml`")
    builder = MachineBuilder(Path(path).stem)
    builder.add_node("host0", "host")
    domains = list(machine.iterfind(".//object[@type='NUMANode']"))
    if not domains:
        message = f"{str(path)!r} has no NUMANode"
        raise TopologyError(message, hint="hwloc 2 always writes one; was the file filtered?")
    walk = _HwlocTree(builder, path, gpu, cpu, memory_bandwidth, len(domains))
    numas = [_add_numa(walk, domain) for domain in domains]
    for package in machine.iterfind(".//object[@type='Package']"):
        _add_package(walk, package)
    if len(numas) > 1:
        builder.join_numas(numas, catalogue().link_types["xgmi-milan"])
        builder.notes.append("The link between NUMA domains is assumed to be that of AMD's Milan.")
    _add_bridges(walk, machine, numas[0])
    return builder.build(f"Imported from the hwloc file {Path(path).name}.")


def _add_numa(walk: _HwlocTree, domain: ET.Element) -> str:
    index = integer(domain, "os_index", walk.path)
    fields = assumed_memory(None, walk.memory_bandwidth, walk.num_domains)
    size_bytes = integer(domain, "local_memory", walk.path)
    fields["capacity"] = figure(size_bytes, "B", "local_memory of the hwloc file", "measured")
    return walk.builder.add_numa(index, "host0", fields)


def _add_package(walk: _HwlocTree, package: ET.Element) -> None:
    _, index = walk.next_id("cpu")
    inside = [f"numa{domain.get('os_index')}" for domain in package.iterfind(".//object[@type='NUMANode']")]
    walk.builder.add_cpu(index, "host0", inside or ["numa0"], _cpu_spec(walk, package, index))


def _cpu_spec(walk: _HwlocTree, package: ET.Element, index: int) -> DeviceSpec:
    if walk.cpu is not None:
        return require_device(walk.cpu, "cpu", str(walk.path))
    known = find_device(_info(package, "CPUModel") or "")
    if known is not None and known.kind == "cpu":
        return known
    num_cores = len(list(package.iterfind(".//object[@type='Core']")))
    return generic_cpu(index, max(1, num_cores), "hwloc's cores")


def _info(element: ET.Element, name: str) -> str | None:
    info = element.find(f"info[@name='{name}']")
    return None if info is None else info.get("value")


def _add_bridges(walk: _HwlocTree, parent: ET.Element, numa: str) -> None:
    """Find host bridges below any object; those inside a NUMA domain's package or group belong to it."""
    own = parent.find("object[@type='NUMANode']")
    here = numa if own is None else f"numa{own.get('os_index')}"
    for child in parent.findall("object"):
        if child.get("type") == "Bridge" and child.get("bridge_type") == HOST_BRIDGE:
            if _has_devices(child):
                root, _ = walk.next_id("root")
                walk.builder.add_node(root, "pcie_root", host="host0")
                walk.builder.join(here, root, catalogue().link_types["fabric"])
                _add_children(walk, child, root)
        else:
            _add_bridges(walk, child, here)


def _has_devices(bridge: ET.Element) -> bool:
    wanted = (*GPU_CLASSES, *NIC_CLASSES, *DISK_CLASSES)
    devices = bridge.iterfind(".//object[@type='PCIDev']")
    return any(device.get("pci_type", "").startswith(wanted) for device in devices)


def _add_children(walk: _HwlocTree, parent: ET.Element, parent_id: str) -> None:
    for child in parent.findall("object"):
        if child.get("type") == "PCIDev":
            _add_device(walk, child, parent_id)
        elif child.get("type") == "Bridge" and _has_devices(child):
            below = child.findall("object")
            if len(below) == 1 and below[0].get("type") == "PCIDev":
                # A root port with one device behind it is a wire, not a switch.
                _add_children(walk, child, parent_id)
                continue
            switch, _ = walk.next_id("switch")
            walk.builder.add_node(switch, "pcie_switch", host="host0")
            walk.builder.join(parent_id, switch, _link_type(child, walk.path))
            _add_children(walk, child, switch)


def _add_device(walk: _HwlocTree, device: ET.Element, parent: str) -> None:
    pci_class = attribute(device, "pci_type", walk.path)
    if pci_class.startswith(GPU_CLASSES):
        spec = _gpu_spec(walk, device)
        if spec is None:
            return
        node, index = walk.next_id("gpu")
        walk.builder.add_node(node, "gpu", host="host0", index=index, spec=spec)
    elif pci_class.startswith(NIC_CLASSES):
        node, _ = walk.next_id("nic")
        walk.builder.add_node(node, "nic", host="host0")
    elif pci_class.startswith(DISK_CLASSES):
        node, _ = walk.next_id("disk")
        walk.builder.add_node(node, "disk", host="host0")
    else:
        return
    walk.builder.join(parent, node, _link_type(device, walk.path))


def _gpu_spec(walk: _HwlocTree, device: ET.Element) -> DeviceSpec | None:
    """The GPU's specification; None for a display adapter that does not compute."""
    models = [_info(part, "GPUModel") for part in device.iterfind("object[@type='OSDev']")]
    model = next((name for name in models if name), None)
    if model is None and walk.gpu is None:
        if "10de" not in device.get("pci_type", ""):
            return None
        model = _info(device, "PCIDevice")
    return require_device(walk.gpu or model, "gpu", str(walk.path))


def _link_type(device: ET.Element, path: str | Path) -> LinkType:
    """The PCIe link whose speed hwloc reports in GB/s; Gen3 x16 where a virtual machine hides it."""
    text = device.get("pci_link_speed", "0")
    try:
        speed_bytes_per_s = float(text) * 1e9
    except ValueError as error:
        message = f"{str(path)!r}: pci_link_speed={text!r} is no number"
        raise TopologyError(message) from error
    if speed_bytes_per_s <= 0:
        return pcie_type(3, 16)
    candidates = [(gen, lanes) for lanes in (16, 8, 4, 2, 1) for gen in PCIE_LANE_BYTES_PER_S]
    generation, lanes = min(
        candidates, key=lambda width: abs(width[1] * PCIE_LANE_BYTES_PER_S[width[0]] - speed_bytes_per_s)
    )
    return pcie_type(generation, lanes)
