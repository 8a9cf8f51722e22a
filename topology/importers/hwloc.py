"""hwloc's XML, version 2, as ``lstopo machine.xml`` writes it."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from topology.building import (
    MAX_PROCESSORS,
    MachineBuilder,
    assumed_memory,
    figure,
    find_device,
    generic_cpu,
    nvlink_type,
    pcie_type,
    require_device,
    socket_type,
)
from topology.documents import catalogue
from topology.errors import TopologyError
from topology.graph import Topology
from topology.importers.pairs import join_switch
from topology.importers.pci import (
    DISPLAY,
    NETWORK,
    NVIDIA,
    NVSWITCH,
    PCI_ID_TO_DEVICE,
    PROCESSING,
    hexadecimal,
    is_gpu,
    link_above,
)
from topology.importers.safe_xml import attribute, integer, parse_xml
from topology.lint import NVLINK_BYTES_PER_S, PCIE_LANE_BYTES_PER_S
from topology.schema import DeviceSpec, LinkType
from topology.validation import readable

DISK_CLASS = "0108"
HOST_BRIDGE = "0-1"
VGA = "0300"
_GRACE_NVLINK_GENERATION = 4
"""Of the first GPUs that a Grace reaches by NVLink-C2C."""
_PCI_TYPE = re.compile(r"\s*([0-9a-fA-F]{4})\s*\[([0-9a-fA-F]{4}):([0-9a-fA-F]{4})\]")


@dataclass
class _HwlocTree:
    """What the file tells beside its tree, and what has been found."""

    builder: MachineBuilder
    path: str | Path
    gpu: str | None
    cpu: str | None
    numas: dict[int, str] = field(default_factory=dict)
    gpus: dict[ET.Element, DeviceSpec] = field(default_factory=dict)
    added: dict[str, DeviceSpec] = field(default_factory=dict)
    """GPUs by their nodes."""
    is_grace: bool = False
    """Whether GPUs are NUMA domains of their own, next to a Grace's."""
    node_of: dict[str, str] = field(default_factory=dict)
    """Nodes by the gp_index of their objects and of those inside them."""


def from_hwloc_xml(
    path: str | Path,
    *,
    gpu: str | None = None,
    cpu: str | None = None,
    memory: str | None = None,
    memory_bandwidth: str | None = None,
) -> Topology:
    """The machine of an hwloc XML file.

    Parameters
    ----------
    path : str or Path
        File that ``lstopo --of xml`` wrote, hwloc 2 or later.
    gpu, cpu : str, optional
        Catalogue names; recognised by their product names or PCI ids where the file has them.
    memory : str, optional
        Of the host, where the file does not tell its NUMA domains' memory; assumed if left out.
    memory_bandwidth : str, optional
        Of the host's memory; hwloc does not tell, so it is assumed if left out.

    Raises
    ------
    TopologyError
        If the file is damaged, of hwloc 1, or the GPU is unknown.
    """
    root = parse_xml(path, "topology", "hwloc")
    if not root.get("version", "1").startswith(("2", "3")):
        message = f"{str(path)!r} is from hwloc {root.get('version', '1.x')}"
        raise TopologyError(message, hint="write it with hwloc 2 or later")
    machine = root.find("object[@type='Machine']")
    if machine is None:
        message = f"{str(path)!r} has no object of type Machine"
        raise TopologyError(message, hint="write it with `lstopo machine.xml`")
    builder = MachineBuilder(Path(path).stem)
    tree = _HwlocTree(builder, path, gpu, cpu)
    for device in machine.iterfind(".//object[@type='PCIDev']"):
        spec = _gpu_spec(tree, device)
        if spec is not None:
            tree.gpus[device] = spec
    _add_numas(tree, machine, memory, memory_bandwidth)
    numas = list(tree.numas.values())
    _add_packages(tree, machine)
    if len(numas) > 1:
        package = machine.find(".//object[@type='Package']")
        vendor, model = (
            "" if package is None else _info(package, name) or "" for name in ("CPUVendor", "CPUModelNumber")
        )
        number = int(model) if model.isdigit() and len(model) < 6 else 0
        builder.join_numas(numas, socket_type(vendor, number))
        if not vendor:
            builder.notes.append("The link between NUMA domains is assumed to be that of AMD's Milan.")
    _add_bridges(tree, machine, numas[0])
    _add_nvlinks(tree, root, machine)
    if machine.find(".//object[@type='PCIDev']") is None:
        builder.notes.append("The file has no PCI devices: whether the machine has GPUs is unknown.")
    return builder.build_imported(f"Imported from the hwloc file {Path(path).name}.")


def _add_numas(
    tree: _HwlocTree, machine: ET.Element, memory: str | None, memory_bandwidth: str | None
) -> None:
    """Add NUMA domains.

    A domain that is a GPU's memory is none of the host's. One without memory, or whose memory may not be used, is a place that PCIe
    devices hang on; if no domain has memory, the file does not tell it, as those that hwloc makes from ``cpuid`` alone.
    """
    domains, of_gpus = [], 0
    for domain in machine.iterfind(".//object[@type='NUMANode']"):
        if domain.get("subtype") == "GPUMemory":
            of_gpus += 1
        else:
            domains.append(domain)
    if not domains:
        message = f"{str(tree.path)!r} has no NUMANode"
        raise TopologyError(message, hint="hwloc 2 always writes one; write the file again without filters")
    architecture = next((info.get("value") for info in machine.iterfind("info[@name='Architecture']")), "")
    tree.is_grace = bool(of_gpus) and architecture == "aarch64"
    allowed = _bitmap(machine.get("allowed_nodeset"))
    sizes = {
        integer(domain, "os_index", tree.path): integer(domain, "local_memory", tree.path, default=0)
        for domain in domains
    }
    usable = {index: size for index, size in sizes.items() if size and (not allowed or index in allowed)}
    with_memory = usable or sizes
    if usable and memory is not None:
        tree.builder.notes.append("--memory is ignored: the file tells the memory of each NUMA domain.")
    for index in sizes:
        if index not in with_memory:
            tree.numas[index] = tree.builder.add_node(f"numa{index}", "numa", host="host0")
            continue
        specs = list(tree.gpus.values())
        fields = assumed_memory(memory, memory_bandwidth, len(with_memory), specs, is_grace=tree.is_grace)
        if usable:
            fields["capacity"] = figure(usable[index], "B", "local_memory of the hwloc file", "measured")
        tree.numas[index] = tree.builder.add_numa(index, fields)


def _bitmap(text: str | None) -> frozenset[int]:
    """Members of a set of hwloc, such as ``0x3,0xffffffff``; empty where it is left out or has no end."""
    words = (text or "").split(",")
    # A set without an end has 0xf...f for its first word.
    is_finite = all(re.fullmatch("0x[0-9a-fA-F]{1,8}|", word) for word in words)
    if not is_finite or len(words) * 32 > MAX_PROCESSORS:
        return frozenset()
    bits = int("0" + "".join(word.removeprefix("0x").rjust(8, "0") for word in words), 16)
    return frozenset(number for number in range(bits.bit_length()) if bits >> number & 1)


def _add_packages(tree: _HwlocTree, machine: ET.Element) -> None:
    """Add processors: packages with cores that may be used, or the whole machine where the file has no packages."""
    packages = list(machine.iterfind(".//object[@type='Package']")) or [machine]
    allowed = _bitmap(machine.get("allowed_cpuset"))
    cores = {package: _num_cores(package, allowed) for package in packages}
    usable = [package for package in packages if cores[package]] or packages
    for index, package in enumerate(usable):
        inside = [tree.numas[number] for number in _domains_of(tree, package)] or list(tree.numas.values())[
            :1
        ]
        known = find_device(_info(package, "CPUModel") or "")
        if tree.cpu is not None:
            spec = require_device(tree.cpu, "cpu", str(tree.path))
        elif known is not None and known.type == "cpu":
            spec = known
        else:
            spec = generic_cpu(index, max(1, cores[package]), "hwloc's cores")
        tree.builder.add_cpu(index, inside, spec)
        if package is not machine:
            tree.node_of[f"Package:{package.get('gp_index')}"] = inside[0]


def _domains_of(tree: _HwlocTree, element: ET.Element) -> list[int]:
    """Numbers of the NUMA domains that an object says it is near to."""
    near = _bitmap(element.get("nodeset")) & tree.numas.keys()
    inside = [
        number
        for domain in element.iterfind(".//object[@type='NUMANode']")
        if (number := integer(domain, "os_index", tree.path)) in tree.numas
    ]
    return sorted(near) or inside


def _num_cores(package: ET.Element, allowed: frozenset[int]) -> int:
    """Cores that may be used; threads where there are none, as in virtual machines."""
    for object_type in ("Core", "PU"):
        found = list(package.iterfind(f".//object[@type='{object_type}']"))
        if found:
            return sum(
                not allowed or not (own := _bitmap(item.get("cpuset"))) or bool(own & allowed)
                for item in found
            )
    return 0


def _info(element: ET.Element, name: str) -> str | None:
    info = element.find(f"info[@name='{name}']")
    return None if info is None else info.get("value")


def _add_bridges(tree: _HwlocTree, parent: ET.Element, numa: str) -> None:
    """Find host bridges below any object; those inside a NUMA domain's package or group belong to it."""
    own = _domains_of(tree, parent)
    here = tree.numas[own[0]] if own else numa
    pci = [child for child in parent.findall("object") if child.get("type") in {"Bridge", "PCIDev"}]
    if len(own) > 1 and any(device in tree.gpus for child in pci for device in child.iter()):
        near = ", ".join(tree.numas[number] for number in own[:8])
        tree.builder.notes.append(f"GPUs are near several NUMA domains ({near}); the first is assumed.")
    for child in parent.findall("object"):
        if child.get("type") == "Bridge" and child.get("bridge_type") == HOST_BRIDGE:
            if _has_devices(tree, child):
                _add_children(tree, child, tree.builder.add_root(here), here)
        elif child.get("type") == "PCIDev" and _is_wanted(tree, child):
            # Without bridges in the file, as in some virtual machines, a device hangs on its domain.
            _add_device(tree, child, tree.builder.add_root(here), here)
        elif child.get("type") != "PCIDev":
            _add_bridges(tree, child, here)


def _pci_type(device: ET.Element) -> tuple[str, int, int]:
    """Class, vendor and device of a PCI object; empty and zeros where they are unknown."""
    match = _PCI_TYPE.match(device.get("pci_type", ""))
    return ("", 0, 0) if match is None else (match[1].lower(), int(match[2], 16), int(match[3], 16))


def _is_wanted(tree: _HwlocTree, device: ET.Element) -> bool:
    return device in tree.gpus or _pci_type(device)[0].startswith((NETWORK, DISK_CLASS))


def _has_devices(tree: _HwlocTree, bridge: ET.Element) -> bool:
    return any(_is_wanted(tree, device) for device in bridge.iterfind(".//object[@type='PCIDev']"))


def _add_children(tree: _HwlocTree, parent: ET.Element, parent_id: str, numa: str) -> None:
    for child in parent.findall("object"):
        if child.get("type") == "PCIDev":
            _add_device(tree, child, parent_id, numa)
        elif child.get("type") == "Bridge" and _has_devices(tree, child):
            below = child.findall("object")
            if len(below) == 1:
                # A root port with one device or one switch behind it is a wire, not a switch.
                _add_children(tree, child, parent_id, numa)
                continue
            switch = tree.builder.add_next("switch", "pcie_switch")
            tree.builder.join(parent_id, switch, _link_type(tree, child))
            _add_children(tree, child, switch, numa)


def _add_device(tree: _HwlocTree, device: ET.Element, parent: str, numa: str) -> None:
    if device in tree.gpus:
        spec = tree.gpus[device]
        node = tree.builder.add_next("gpu", "gpu", index=len(tree.added), spec=spec)
        tree.added[node] = spec
        if tree.is_grace and spec.nvlink is not None and spec.nvlink.generation >= _GRACE_NVLINK_GENERATION:
            tree.builder.join(numa, node, catalogue().link_types["nvlink-c2c"])
    elif _is_wanted(tree, device):
        object_type = "nic" if _pci_type(device)[0].startswith(NETWORK) else "disk"
        node = tree.builder.add_next(object_type, object_type)
    else:
        return
    tree.builder.join(parent, node, _link_type(tree, device))
    for item in device.iter("object"):
        tree.node_of[f"{item.get('type')}:{item.get('gp_index')}"] = node


def _gpu_spec(tree: _HwlocTree, device: ET.Element) -> DeviceSpec | None:
    """The GPU's specification; None for a device that does not compute."""
    attribute(device, "pci_type", tree.path)
    class_digits, vendor, product = _pci_type(device)
    if not is_gpu(class_digits, vendor):
        if class_digits in {"0380", PROCESSING}:
            tree.builder.notes.append(
                f"{_left_out(device)} is left out: only GPUs of NVIDIA and AMD are read."
            )
        return None
    models = [_info(part, "GPUModel") for part in device.iterfind("object[@type='OSDev']")]
    model = next((name for name in models if name), None)
    known = PCI_ID_TO_DEVICE.get((vendor, product))
    if tree.gpu is None and find_device(model or "") is None and known is not None:
        return require_device(known, "gpu", str(tree.path))
    if tree.gpu is None and model is None and vendor != NVIDIA and class_digits.startswith(DISPLAY):
        if class_digits != VGA:
            tree.builder.notes.append(f"{_left_out(device)} is left out: it may be a processor's own.")
        return None
    name = tree.gpu or model or _info(device, "PCIDevice")
    return require_device(name, "gpu", f"{str(tree.path)!r} ({device.get('pci_type', '')[:16]})")


def _left_out(device: ET.Element) -> str:
    return f"The accelerator {device.get('pci_busid', 'unnamed')} ({device.get('pci_type', '')[:16]})"


def _link_type(tree: _HwlocTree, device: ET.Element) -> LinkType:
    found = device.iterfind(".//object[@type='PCIDev']") if device.get("type") == "Bridge" else ()
    bridge = re.search(r"\[([0-9a-fA-F]{4}):", device.get("pci_type", ""))
    return link_above(
        tree.builder,
        device.get("pci_busid", "unnamed"),
        _reported_link(device, tree.path),
        gpu=tree.gpus.get(device),
        below=[_link_type(tree, child) for child in found if _is_wanted(tree, child)],
        vendor=hexadecimal(bridge[1]) if bridge else None,
    )


def _reported_link(device: ET.Element, path: str | Path) -> LinkType | None:
    """The link of the speed that hwloc reports in GB/s; None where it reports none."""
    text = device.get("pci_link_speed", "0")
    try:
        speed_bytes_per_s = float(text) * 1e9
    except ValueError as error:
        raise TopologyError(f"{str(path)!r}: pci_link_speed={text!r} is not a number") from error
    if not speed_bytes_per_s > 0:
        return None
    candidates = [(gen, lanes) for lanes in (16, 8, 4, 2, 1) for gen in PCIE_LANE_BYTES_PER_S]
    generation, lanes = min(
        candidates, key=lambda width: abs(width[1] * PCIE_LANE_BYTES_PER_S[width[0]] - speed_bytes_per_s)
    )
    return pcie_type(generation, lanes)


def _add_nvlinks(tree: _HwlocTree, root: ET.Element, machine: ET.Element) -> None:
    """Join GPUs as matrices of bandwidths say, or by the NVSwitches among the PCI devices."""
    to_switch: dict[str, int] = {}
    joined: set[frozenset[str]] = set()
    is_reported = False
    for first, second, rate_bytes_per_s, matrix in _pairs(tree, root):
        is_reported = True
        node, other = tree.node_of.get(first), tree.node_of.get(second)
        if node is None or node not in tree.added or node == other:
            continue
        if frozenset({node, other or ""}) in joined:
            continue  # matrices have both directions of a pair
        if other is None and not second.startswith("PCIDev:"):
            continue  # a processor that may not be used
        if matrix == "XGMIBandwidth":
            latency, count = catalogue().link_types["nvlink-c2c"].latency, 1
            source = "XGMIBandwidth of the hwloc file"
            with readable(f"XGMIBandwidth in {str(tree.path)!r}"):
                bandwidth = figure(rate_bytes_per_s / 1e9, "GB/s", source, "declared")
                link_type = LinkType(technology="c2c", bandwidth=bandwidth, latency=latency)
        else:
            ports = tree.added[node].nvlink
            # Of a GPU that the catalogue lacks, the generation whose bandwidth the rate is a multiple of.
            fitting = (gen for gen in (5, 4, 1) if rate_bytes_per_s % NVLINK_BYTES_PER_S[gen] == 0)
            generation = next(fitting, 4) if ports is None else ports.generation
            link_type = nvlink_type(ports or generation)
            count = max(1, round(rate_bytes_per_s / link_type.nominal_bandwidth_bytes_per_s))
        if other is None:
            to_switch[node] = to_switch.get(node, 0) + count
        else:
            joined.add(frozenset({node, other}))
            tree.builder.join(*((node, other) if other in tree.added else (other, node)), link_type, count)
    ports_of = {
        node: spec.nvlink for node, spec in tree.added.items() if spec.nvlink and not spec.nvlink.bridge
    }
    newest = max((ports.generation for ports in ports_of.values()), default=2)
    if to_switch:
        join_switch(tree.builder, to_switch, newest)
    if is_reported or not ports_of:
        return
    devices = map(_pci_type, machine.iterfind(".//object[@type='PCIDev']"))
    if any(found[:2] == (NVSWITCH, NVIDIA) for found in devices):
        join_switch(tree.builder, {node: ports.num_links for node, ports in ports_of.items()}, newest)
        tree.builder.notes.append(
            f"The file has NVSwitches and does not tell what hangs on them: all NVLinks of all {len(ports_of)} GPUs are assumed."
        )
    elif len(ports_of) > 1 and any("sxm" in spec.id for spec in tree.added.values()):
        tree.builder.notes.append(
            "The file does not tell NVLinks (lstopo writes them where it is built with NVML): none are assumed."
        )


def _pairs(tree: _HwlocTree, root: ET.Element) -> Iterator[tuple[str, str, float, str]]:
    """Yield pairs of objects with the bandwidth between them, in bytes per second, and the matrix's name."""
    for matrix in (*root.iterfind("distances2hetero"), *root.iterfind("distances2")):
        name = matrix.get("name", "")
        if name not in {"NVLinkBandwidth", "XGMIBandwidth"}:
            continue
        objects = [word for part in matrix.iterfind("indexes") for word in (part.text or "").split()]
        values = [word for part in matrix.iterfind("u64values") for word in (part.text or "").split()]
        if object_type := matrix.get("type"):
            objects = [f"{object_type}:{word}" for word in objects]
        if len(values) != len(objects) ** 2 or not all(word.isdigit() and len(word) < 20 for word in values):
            message = f"{str(tree.path)!r}: {name} has {len(values)} values for {len(objects)} objects"
            raise TopologyError(message, hint="write it again with hwloc")
        for row, first in enumerate(objects):
            for column, second in enumerate(objects):
                rate = int(values[row * len(objects) + column])
                if row != column and rate:
                    yield first, second, rate * 1e6, name
