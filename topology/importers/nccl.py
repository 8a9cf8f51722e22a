"""NCCL's topology XML, as ``NCCL_TOPO_DUMP_FILE`` writes it."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from pathlib import Path

from topology.building import (
    MAX_PROCESSORS,
    MachineBuilder,
    adds_up,
    assumed_memory,
    cores_of,
    find_device,
    generic_cpu,
    nvlink_type,
    pcie_type,
    require_device,
)
from topology.documents import catalogue
from topology.errors import TopologyError
from topology.figures import Figure
from topology.graph import Topology
from topology.importers.safe_xml import attribute, integer, parse_xml
from topology.schema import DeviceSpec, LinkType
from topology.validation import readable

GIGATRANSFERS_TO_GENERATION = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
SM_TO_NVLINK_GENERATION = {60: 1, 70: 2, 80: 3, 90: 4, 100: 5}
# PCI device ids of vendor 0x10de, https://admin.pci-ids.ucw.cz/read/PC/10de
PCI_ID_TO_DEVICE = {
    "0x1db5": "v100-32gb-sxm2",
    "0x20b2": "a100-80gb-sxm",
    "0x20b5": "a100-80gb-pcie",
    "0x2330": "h100-80gb-sxm",
    "0x2335": "h200-141gb-sxm",
    "0x2329": "h20-96gb",
    "0x2684": "rtx4090",
}
SWITCH_CLASS = "0x0680"


@dataclass
class _NcclTree:
    """What has been found on the way through the tree."""

    builder: MachineBuilder
    path: str | Path
    gpu: str | None
    gpu_by_bus: dict[str, str] = field(default_factory=dict)
    nvlinks: list[tuple[str, ET.Element, int]] = field(default_factory=list)
    num_roots: int = 0
    num_switches: int = 0
    num_nics: int = 0


def from_nccl_xml(
    path: str | Path,
    *,
    gpu: str | None = None,
    cpu: str | None = None,
    memory: str | None = None,
    memory_bandwidth: str | None = None,
) -> Topology:
    """The machine of an NCCL topology dump.

    Parameters
    ----------
    path : str or Path
        File that NCCL wrote with ``NCCL_TOPO_DUMP_FILE``.
    gpu, cpu : str, optional
        Catalogue names; the GPU is recognised by its PCI id where the file has it, the CPU is generic
        unless named.
    memory, memory_bandwidth : str, optional
        Of the host, such as ``"512 GiB"`` and ``"200 GB/s"``; NCCL does not tell, so they are assumed if
        left out.

    Raises
    ------
    TopologyError
        If the file is damaged or no such XML, or the GPU is unknown.
    """
    root = parse_xml(path, "system", "NCCL")
    domains = root.findall("cpu")
    if not domains:
        message = f"{str(path)!r} has no <cpu>"
        raise TopologyError(message, hint="dump it with NCCL_TOPO_DUMP_FILE while a job starts")
    builder = MachineBuilder(Path(path).stem)
    builder.add_node("host0", "host")
    walk = _NcclTree(builder, path, gpu)
    numas = []
    for domain in domains:
        index = integer(domain, "numaid", path)
        numa = builder.add_numa(
            max(index, 0), "host0", assumed_memory(memory, memory_bandwidth, len(domains))
        )
        numas.append(numa)
        builder.add_cpu(max(index, 0), "host0", [numa], _cpu_spec(cpu, domain, max(index, 0), path))
        for child in domain.findall("pci"):
            _add_root(walk, child, numa)
    builder.join_numas(numas, _socket_type(domains[0], path))
    _add_nvlinks(walk)
    return builder.build(f"Imported from the NCCL topology file {Path(path).name}.")


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


def _socket_type(domain: ET.Element, path: str | Path) -> LinkType:
    """The link between sockets, by CPU vendor and model as NCCL tells them apart."""
    types = catalogue().link_types
    if domain.get("vendor") == "AuthenticAMD":
        return types["xgmi-milan"]
    is_recent_intel = integer(domain, "modelid", path, default=0) >= 143
    return types["upi-sapphire-rapids" if is_recent_intel else "qpi-broadwell"]


def _add_root(walk: _NcclTree, pci: ET.Element, numa: str) -> None:
    root = walk.builder.add_node(f"root{walk.num_roots}", "pcie_root", host="host0")
    walk.num_roots += 1
    walk.builder.join(numa, root, catalogue().link_types["fabric"])
    _add_pci(walk, pci, root)


def _add_pci(walk: _NcclTree, pci: ET.Element, parent: str) -> None:
    gpu, nic = pci.find("gpu"), pci.find("nic")
    children = pci.findall("pci")
    if gpu is not None:
        node = _add_gpu(walk, pci, gpu)
    elif nic is not None:
        node = _add_nic(walk, nic)
    elif children:
        node = walk.builder.add_node(f"switch{walk.num_switches}", "pcie_switch", host="host0")
        walk.num_switches += 1
    else:
        return  # a device that carries no traffic of ours, such as an NVSwitch's own PCI function
    walk.builder.join(parent, node, _link_type(pci, walk.path))
    for child in children:
        _add_pci(walk, child, node)


def _add_gpu(walk: _NcclTree, pci: ET.Element, gpu: ET.Element) -> str:
    index = integer(gpu, "dev", walk.path)
    known = PCI_ID_TO_DEVICE.get(pci.get("device", ""))
    spec = find_device(walk.gpu or known or "")
    if spec is None:
        where = f"{str(walk.path)!r} (PCI device {pci.get('device', 'unnamed')})"
        spec = require_device(walk.gpu, "gpu", where)
    node = walk.builder.add_node(f"gpu{index}", "gpu", host="host0", index=index, spec=spec)
    walk.gpu_by_bus[attribute(pci, "busid", walk.path).lower()] = node
    sm = integer(gpu, "sm", walk.path, default=90)
    walk.nvlinks.extend((node, nvlink, sm) for nvlink in gpu.findall("nvlink"))
    return node


def _add_nic(walk: _NcclTree, nic: ET.Element) -> str:
    node = walk.builder.add_node(f"nic{walk.num_nics}", "nic", host="host0")
    walk.num_nics += 1
    net = nic.find("net")
    if net is not None:
        if "network0" not in walk.builder:
            walk.builder.add_node("network0", "network")
        speed = integer(net, "speed", walk.path)
        source = "speed of the NCCL topology file"
        latency = catalogue().link_types["infiniband-hdr"].latency
        with readable(f"the network of {node} in {str(walk.path)!r}"):
            bandwidth = Figure(value=speed, unit="Mbit/s", source=source)
            link_type = LinkType(kind="network", bandwidth=bandwidth, latency=latency)
        walk.builder.join(node, "network0", link_type)
    return node


def _link_type(pci: ET.Element, path: str | Path) -> LinkType:
    speed = attribute(pci, "link_speed", path)
    match = re.match(r"\s*([0-9]+(?:\.[0-9]+)?)\s*GT/s", speed)
    generation = GIGATRANSFERS_TO_GENERATION.get(float(match[1])) if match else None
    lanes = integer(pci, "link_width", path)
    if generation is None or lanes < 1:
        # Virtual machines report "Unknown" or a width of 0; NCCL itself then takes Gen3 x16.
        return pcie_type(3, 16)
    return pcie_type(generation, lanes)


def _add_nvlinks(walk: _NcclTree) -> None:
    seen: set[frozenset[str]] = set()
    to_switch: dict[str, tuple[int, LinkType]] = {}
    for node, nvlink, sm in walk.nvlinks:
        generation = max(gen for known, gen in SM_TO_NVLINK_GENERATION.items() if known <= max(sm, 60))
        link_type, count = nvlink_type(generation), integer(nvlink, "count", walk.path)
        if attribute(nvlink, "tclass", walk.path).startswith(SWITCH_CLASS):
            total = count + to_switch.get(node, (0, link_type))[0]
            to_switch[node] = total, link_type
            continue
        target = walk.gpu_by_bus.get(attribute(nvlink, "target", walk.path).lower())
        if target is not None and frozenset({node, target}) not in seen:
            seen.add(frozenset({node, target}))
            walk.builder.join(node, target, link_type, count)
    if to_switch:
        (generation, *_) = {link_type.nvlink_generation or 0 for _, link_type in to_switch.values()}
        walk.builder.add_node("nvswitch0", "nvswitch", host="host0", in_switch_sums=adds_up(generation))
    for node, (count, link_type) in to_switch.items():
        walk.builder.join(node, "nvswitch0", link_type, count)
