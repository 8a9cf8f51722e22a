"""NCCL's topology XML: what ``NCCL_TOPO_DUMP_FILE`` writes, and what clouds ship for ``NCCL_TOPO_FILE``."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path

from topology.building import (
    MAX_PROCESSORS,
    MachineBuilder,
    assumed_memory,
    cores_of,
    find_device,
    generic_cpu,
    nvlink_type,
    pcie_type,
    require_device,
    socket_type,
    xgmi_type,
)
from topology.documents import catalogue
from topology.errors import TopologyError
from topology.figures import Figure
from topology.graph import Topology
from topology.importers.pairs import join_switch
from topology.importers.pci import (
    BRIDGE,
    NETWORK,
    PCI_ID_TO_DEVICE,
    hexadecimal,
    is_gpu,
    link_above,
    pci_class,
)
from topology.importers.safe_xml import attribute, integer, parse_xml
from topology.schema import DeviceSpec, LinkType
from topology.validation import readable

GIGATRANSFERS_TO_GENERATION = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
SM_TO_NVLINK_GENERATION = {60: 1, 70: 2, 80: 3, 90: 4, 100: 5}
SWITCH_CLASS, POWER_CPU_CLASS = "0x0680", "0x068001"
_FEWEST_BEHIND_SWITCH = 3
"""GPUs of a board with sockets of its own (SXM) that a switch is assumed to join."""


@dataclass
class _NcclTree:
    """What has been found on the way through the tree."""

    builder: MachineBuilder
    path: str | Path
    gpus: dict[ET.Element, tuple[int, DeviceSpec]]
    carrying: set[ET.Element]
    """PCI devices that are GPUs or adapters, and what lies above them."""
    gpu_by_bus: dict[str, str] = field(default_factory=dict)
    nvlinks: list[tuple[str, str, ET.Element, LinkType]] = field(default_factory=list)
    """NVLinks, and what RCCL writes in their place, each with its GPU and that GPU's domain."""


def from_nccl_xml(
    path: str | Path,
    *,
    gpu: str | None = None,
    cpu: str | None = None,
    memory: str | None = None,
    memory_bandwidth: str | None = None,
) -> Topology:
    """The machine of an NCCL topology file.

    Parameters
    ----------
    path : str or Path
        File that NCCL wrote with ``NCCL_TOPO_DUMP_FILE``, or reads with ``NCCL_TOPO_FILE``.
    gpu, cpu : str, optional
        Catalogue names; the GPU is recognised by its PCI id where the file has it, the CPU is generic
        unless named.
    memory, memory_bandwidth : str, optional
        Of the host, such as ``"512 GiB"`` and ``"200 GB/s"``; NCCL does not tell, so they are assumed if
        left out.

    Raises
    ------
    TopologyError
        If the file is damaged or no such XML, has no GPU, or the GPU is unknown.

    Notes
    -----
    A file for ``NCCL_TOPO_FILE`` may have PCI devices alone, which NCCL completes on the machine: GPUs and adapters
    are then told by their PCI class, and numbered by their bus ids as the driver does. NVLinks are no part of such a file.
    """
    root = parse_xml(path, "system", "NCCL")
    domains = root.findall("cpu")
    if not domains:
        message = f"{str(path)!r} has no <cpu>"
        raise TopologyError(message, hint="dump it with NCCL_TOPO_DUMP_FILE while a job starts")
    if len({domain.get("host_hash") for domain in domains}) > 1:
        message = f"{str(path)!r} describes several hosts, which have different host_hash"
        raise TopologyError(message, hint="dump the topology of one host")
    indexes = [max(integer(domain, "numaid", path), 0) for domain in domains]
    builder = MachineBuilder(Path(path).stem)
    gpus = _find_gpus(root, path, gpu)
    tree = _NcclTree(builder, path, gpus, _carrying(root, gpus))
    specs = [spec for _, spec in tree.gpus.values()]
    numas = []
    for index, domain in zip(indexes, domains, strict=True):
        is_grace = domain.find(".//c2c") is not None
        fields = assumed_memory(memory, memory_bandwidth, len(domains), specs, is_grace=is_grace)
        numa = builder.add_numa(index, fields)
        numas.append(numa)
        builder.add_cpu(index, [numa], _cpu_spec(cpu, domain, index, path))
        for child in domain.findall("pci"):
            if child in tree.carrying:
                _add_pci(tree, child, builder.add_root(numa), numa)
        for nic in domain.findall("nic"):
            # NCCL puts an adapter without a PCI device of its own here, such as a virtual machine's.
            builder.join(numa, _add_nic(tree, nic), catalogue().link_types["fabric"])
    first = domains[0]
    model, family = (integer(first, name, path, default=6) for name in ("modelid", "familyid"))
    builder.join_numas(numas, socket_type(first.get("vendor", ""), model, family))
    _add_nvlinks(tree, root)
    if all(pci.find("gpu") is None for pci in tree.gpus):
        _assume_switch(tree)
    return builder.build_imported(f"Imported from the NCCL topology file {Path(path).name}.")


def _find_gpus(
    root: ET.Element, path: str | Path, model: str | None
) -> dict[ET.Element, tuple[int, DeviceSpec]]:
    """The PCI devices that are GPUs, each with its number and what it is."""
    devices = list(root.iter("pci"))
    for pci in devices:
        if (count := len(pci.findall("gpu"))) > 1:
            message = f"{str(path)!r} has {count} <gpu> in the <pci> {pci.get('busid', 'unnamed')}, parts of one GPU"
            hint = "dump it from a GPU that is not divided, or keep one <gpu> and plan on whole GPUs"
            raise TopologyError(message, hint=hint)
    numbers = {pci: integer(gpu, "dev", path) for pci in devices if (gpu := pci.find("gpu")) is not None}
    others = [
        pci
        for pci in devices
        if pci not in numbers and is_gpu(pci_class(pci.get("class")), hexadecimal(pci.get("vendor")))
    ]
    free = (number for number in range(len(devices) + len(numbers)) if number not in numbers.values())
    # The driver counts bus ids in the order of their numbers, whose parts may have different lengths.
    bus_ids = {pci: re.split("[:.]", attribute(pci, "busid", path).lower().strip()) for pci in others}
    others.sort(key=lambda pci: [(len(part), part) for part in bus_ids[pci]])
    numbers |= dict(zip(others, list(free), strict=False))
    if not numbers:
        reported = any(pci.get("class") for pci in devices)
        reason = (
            "none of its PCI devices has the class of one" if reported else "its PCI devices have no class"
        )
        message = f"{str(path)!r} has no GPU: {reason}"
        raise TopologyError(
            message, hint="dump it with NCCL_TOPO_DUMP_FILE on the machine while a job starts"
        )
    specs = {}
    for pci, number in numbers.items():
        vendor, device = hexadecimal(pci.get("vendor")) or 0x10DE, hexadecimal(pci.get("device"))
        spec = find_device(model or PCI_ID_TO_DEVICE.get((vendor, device or 0)) or "")
        if spec is None or spec.type != "gpu":
            spec = require_device(model, "gpu", f"{str(path)!r} (PCI device {pci.get('device', 'unnamed')})")
        specs[pci] = number, spec
    return specs


def _is_nic(pci: ET.Element) -> bool:
    return pci.find("nic") is not None or pci_class(pci.get("class")).startswith(NETWORK)


def _carrying(root: ET.Element, gpus: Container[ET.Element]) -> set[ET.Element]:
    """GPUs and adapters, and the bridges above them."""
    above = {child: parent for parent in root.iter() for child in parent}
    carrying: set[ET.Element] = set()
    for pci in root.iter("pci"):
        node = pci if pci in gpus or _is_nic(pci) else None
        while node is not None and node.tag == "pci" and node not in carrying:
            carrying.add(node)
            node = above.get(node)
    return carrying


def _cpu_spec(cpu: str | None, domain: ET.Element, index: int, path: str | Path) -> DeviceSpec:
    if cpu is not None:
        return require_device(cpu, "cpu", "the file")
    mask = domain.get("affinity", "").replace(",", "")
    bits = int(mask, 16) if re.fullmatch("[0-9a-fA-F]+", mask) else 0
    if bits.bit_length() > MAX_PROCESSORS:
        message = f"{str(path)!r}: the affinity of <cpu> names processor {bits.bit_length() - 1}"
        raise TopologyError(message, hint=f"no more than {MAX_PROCESSORS} are read")
    num_cores = cores_of(cpu for cpu in range(bits.bit_length()) if bits >> cpu & 1)
    return generic_cpu(index, num_cores, "affinity mask of the NCCL topology file")


def _add_pci(tree: _NcclTree, pci: ET.Element, parent: str, numa: str) -> None:
    if pci in tree.gpus:
        node = _add_gpu(tree, pci, numa)
    elif _is_nic(pci):
        node = _add_nic(tree, pci.find("nic"))
    elif pci in tree.carrying:
        node = tree.builder.add_next("switch", "pcie_switch")
    else:
        return  # a device that carries no traffic of ours, such as an NVSwitch's own PCI function
    tree.builder.join(parent, node, _link_type(tree, pci))
    for child in pci.findall("pci"):
        _add_pci(tree, child, node, numa)


def _add_gpu(tree: _NcclTree, pci: ET.Element, numa: str) -> str:
    index, spec = tree.gpus[pci]
    node = tree.builder.add_node(f"gpu{index}", "gpu", host="host0", index=index, spec=spec)
    tree.gpu_by_bus[attribute(pci, "busid", tree.path).lower()] = node
    gpu = pci.find("gpu")
    if gpu is None:
        return node
    sm = max(integer(gpu, "sm", tree.path, default=90), min(SM_TO_NVLINK_GENERATION))
    generation = max(gen for known, gen in SM_TO_NVLINK_GENERATION.items() if known <= sm)
    link_type = nvlink_type(spec.nvlink or generation)
    tree.nvlinks.extend((node, numa, nvlink, link_type) for nvlink in gpu.findall("nvlink"))
    tree.nvlinks.extend((node, numa, xgmi, xgmi_type(spec)) for xgmi in gpu.findall("xgmi"))
    for c2c in gpu.findall("c2c"):
        with readable(f"the C2C link of {node} in {str(tree.path)!r}"):
            rate = integer(c2c, "bw", tree.path)
            bandwidth = Figure(value=rate, unit="MB/s", source="c2c of the NCCL topology file")
            latency = catalogue().link_types["nvlink-c2c"].latency
            link_type = LinkType(technology="c2c", bandwidth=bandwidth, latency=latency)
        tree.builder.join(numa, node, link_type, integer(c2c, "count", tree.path))
    return node


def _add_nic(tree: _NcclTree, nic: ET.Element | None) -> str:
    node = tree.builder.add_next("nic", "nic")
    ports = [] if nic is None else nic.findall("net")
    if ports:
        if "network0" not in tree.builder:
            tree.builder.add_node("network0", "network")
        speed = sum(integer(net, "speed", tree.path) for net in ports)
        latency = catalogue().link_types["infiniband-hdr"].latency
        with readable(f"the network of {node} in {str(tree.path)!r}"):
            bandwidth = Figure(value=speed, unit="Mbit/s", source="speed of the NCCL topology file")
            link_type = LinkType(technology="network", bandwidth=bandwidth, latency=latency)
        tree.builder.join(node, "network0", link_type)
    return node


def _link_type(tree: _NcclTree, pci: ET.Element) -> LinkType:
    match = re.match(r"\s*([0-9]+(?:\.[0-9]+)?)\s*GT/s", pci.get("link_speed", ""))
    generation = GIGATRANSFERS_TO_GENERATION.get(float(match[1])) if match else None
    lanes = integer(pci, "link_width", tree.path, default=0)
    # A virtual machine reports "Unknown", or a width of 0.
    reported = None if generation is None or lanes < 1 else pcie_type(generation, lanes)
    children = [] if pci in tree.gpus else pci.findall("pci")
    below = [_link_type(tree, child) for child in children if child in tree.carrying]
    return link_above(
        tree.builder,
        pci.get("busid", "unnamed"),
        reported,
        gpu=tree.gpus[pci][1] if pci in tree.gpus else None,
        below=below if pci_class(pci.get("class")) in {"", BRIDGE} else (),
        vendor=hexadecimal(pci.get("vendor")),
    )


def _add_nvlinks(tree: _NcclTree, root: ET.Element) -> None:
    seen: set[frozenset[str]] = set()
    to_switch: dict[str, tuple[int, LinkType]] = {}
    to_itself: list[str] = []
    nowhere = len(list(root.iter("nvlink"))) + len(list(root.iter("xgmi"))) - len(tree.nvlinks)
    for node, numa, nvlink, link_type in tree.nvlinks:
        count, target_class = integer(nvlink, "count", tree.path), attribute(nvlink, "tclass", tree.path)
        if target_class.startswith(POWER_CPU_CLASS):
            tree.builder.join(numa, node, link_type, count)
            continue
        if target_class.startswith(SWITCH_CLASS):
            to_switch[node] = count + to_switch.get(node, (0, None))[0], link_type
            continue
        target = tree.gpu_by_bus.get(attribute(nvlink, "target", tree.path).lower())
        nowhere += target is None
        if target == node:
            to_itself.append(node)
        elif target is not None and frozenset({node, target}) not in seen:
            seen.add(frozenset({node, target}))
            tree.builder.join(node, target, link_type, count)
    if to_itself:
        tree.builder.notes.append(f"NVLinks to itself are left out of {', '.join(to_itself)}.")
    if nowhere:
        tree.builder.notes.append(f"NVLinks to or from no GPU of the file are left out, {nowhere} of them.")
    if to_switch:
        tree.builder.add_node("nvswitch0", "nvswitch", host="host0")
    for node, (count, link_type) in to_switch.items():
        tree.builder.join(node, "nvswitch0", link_type, count)


def _assume_switch(tree: _NcclTree) -> None:
    """Join GPUs of a board by a switch, as boards of A100s and later do; the file leaves NVLinks to NCCL."""
    boards = {
        f"gpu{index}": spec.nvlink for index, spec in tree.gpus.values() if spec.nvlink and "sxm" in spec.id
    }
    if not boards:
        return
    ports = next(iter(boards.values()))
    assumed = "none are assumed"
    if ports.generation >= 3 and len(boards) >= _FEWEST_BEHIND_SWITCH:
        join_switch(tree.builder, dict.fromkeys(boards, ports.num_links), ports.generation)
        assumed = f"a switch with {ports.num_links} from each GPU is assumed"
    tree.builder.notes.append(f"The file has no NVLinks, which NCCL finds on the machine: {assumed}.")
