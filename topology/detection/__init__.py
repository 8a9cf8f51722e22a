"""The machine that this process runs on."""

from __future__ import annotations

import logging
import platform
import shutil
from pathlib import Path
from types import ModuleType

from topology.building import MachineBuilder, figure
from topology.detection.gpus import Gpus, find_gpus
from topology.detection.host import HostFacts, cpu_spec, measure_copy_bandwidth, read_host
from topology.documents import catalogue
from topology.graph import Topology
from topology.importers.pairs import Endpoint, attach, join_nvlinks, join_switch

ASSUMED_DISK_BYTES_PER_S = 2e9
_logger = logging.getLogger(__name__)


def detect(
    *,
    root: Path = Path("/"),
    nvml: ModuleType | None = None,
    memory_bandwidth_bytes_per_s: float | None = None,
) -> Topology:
    """The machine that this process may use: its share of CPUs and memory, and its GPUs.

    CPU affinity and the limits of control groups are obeyed, so in a container the topology is the
    container's. The bandwidth of the memory is measured, within half a second.

    Parameters
    ----------
    root : Path, optional
        Root of the file system in which ``proc`` and ``sys`` are read.
    nvml : module, optional
        The NVML bindings; ``pynvml`` where it is installed if left out, then the ``nvidia-smi`` program.
    memory_bandwidth_bytes_per_s : float, optional
        Taken instead of a measurement.

    Raises
    ------
    TopologyError
        If a GPU is of an unknown model and only ``nvidia-smi`` is there to ask.
    """
    facts = read_host(root)
    measured = memory_bandwidth_bytes_per_s or measure_copy_bandwidth(
        facts.num_cores, facts.last_level_cache_bytes, facts.memory_bytes
    )
    builder = MachineBuilder(platform.node() or "host", label=facts.cpu_model)
    numas = _add_host(builder, facts, measured)
    gpus = find_gpus(nvml)
    if gpus is not None:
        _add_gpus(builder, gpus, root, numas)
    _add_disk(builder, root, next(iter(numas.values())))
    return builder.build("Detected on this machine.")


def _add_host(builder: MachineBuilder, facts: HostFacts, bandwidth_bytes_per_s: float) -> dict[int, str]:
    """Add CPUs and memory; the NUMA domains' ids by their numbers."""
    numas = {}
    how = f"copy in memory by {facts.num_cores} threads of numpy, reads and writes counted"
    share = round(bandwidth_bytes_per_s / len(facts.domains) / 1e9, 2)
    for domain in facts.domains:
        fields = {
            "capacity": figure(domain.memory_bytes, "B", facts.memory_source, "measured"),
            "bandwidth": figure(share, "GB/s", how, "measured"),
        }
        numas[domain.index] = builder.add_numa(domain.index, fields)
    for package in facts.packages:
        nearby = [numas[index] for index in package.domains]
        builder.add_cpu(package.index, nearby, cpu_spec(facts, package))
    socket = "xgmi-milan" if facts.vendor == "AuthenticAMD" else "upi-sapphire-rapids"
    builder.join_numas(list(numas.values()), catalogue().link_types[socket])
    return numas


def _add_disk(builder: MachineBuilder, root: Path, numa: str) -> None:
    """Add what files lie on as one drive, however many there are."""
    size = figure(shutil.disk_usage(root).total, "B", f"file system of {root}", "measured")
    speed = figure(
        ASSUMED_DISK_BYTES_PER_S / 1e9, "GB/s", "an NVMe drive of PCIe 3.0, or one of a cloud", "assumed"
    )
    disk = builder.add_next("disk", "disk", capacity=size, bandwidth=speed)
    builder.join(numa, disk, catalogue().link_types["fabric"])


def _add_gpus(builder: MachineBuilder, gpus: Gpus, root: Path, numas: dict[int, str]) -> None:
    builder.notes.extend(gpus.notes)
    first = next(iter(numas.values()))
    endpoints = []
    for gpu in gpus.devices:
        domain = gpu.numa if gpu.numa is not None else _sysfs_numa(root, gpu.bus_id)
        if domain not in numas:
            # A virtual machine that hides its PCI tree reports -1 or nothing.
            builder.notes.append("The NUMA domain of the GPUs is hidden; the first is assumed.")
        fields = {"node_type": "gpu", "index": gpu.index, "spec": gpu.spec}
        endpoints.append(Endpoint(gpu.id, fields, gpu.link_type, numas.get(domain, first)))
    attach(builder, endpoints, gpus.levels)
    ports = gpus.devices[0].spec.nvlink
    if gpus.nvlinks_to_switch:
        generation = gpus.nvlink_generation or (ports.generation if ports else 4)
        join_switch(builder, gpus.nvlinks_to_switch, generation)
    elif gpus.nvlinks:
        join_nvlinks(builder, gpus.nvlinks, ports)


def _sysfs_numa(root: Path, bus_id: str) -> int:
    # NVML writes the PCI domain with eight digits, the kernel with four.
    name = bus_id.lower()
    short = name[4:] if len(name.split(":", maxsplit=1)[0]) == 8 else name
    try:
        return int((root / "sys/bus/pci/devices" / short / "numa_node").read_text().strip())
    except (OSError, ValueError):
        _logger.debug("no numa_node for PCI device %s", short)
        return -1
