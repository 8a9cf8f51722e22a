"""Building a machine piece by piece, as detection and the importers do."""

from __future__ import annotations

import datetime
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from pydantic import TypeAdapter

from topology.documents import catalogue
from topology.errors import TopologyError
from topology.figures import Bandwidth, Basis, Bytes, Figure
from topology.graph import Topology
from topology.lint import NVLINK_BYTES_PER_S, PCIE_LANE_BYTES_PER_S
from topology.schema import DeviceSpec, Link, LinkType, Node, NvlinkPorts, PcieWidth
from topology.units import format_bandwidth, format_bytes
from topology.validation import did_you_mean, readable

DEFAULT_MEMORY = "256 GiB"
DEFAULT_MEMORY_BANDWIDTH = "100 GB/s"
# Of a socket of a server by the generation of PCIe that it came with: channels x transfers/s x 8 bytes.
SOCKET_BANDWIDTH_BYTES_PER_S = {3: 6 * 2666e6 * 8, 4: 8 * 3200e6 * 8, 5: 8 * 4800e6 * 8}
# Of a Grace by the generation of its GPU's NVLinks: LPDDR5X of a GH200 with 480 GB, and of a GB200.
# https://resources.nvidia.com/en-us-grace-cpu/grace-hopper-superchip, https://www.nvidia.com/en-us/data-center/gb200-nvl72/
GRACE_MEMORY_BYTES = 480e9
GRACE_BANDWIDTH_BYTES_PER_S = {4: 384e9, 5: 512e9}
UNIFIED = ("gb10",)
"""How the ids of GPUs begin whose memory is the host's."""
_MEMORY_FIGURES: dict[str, TypeAdapter[Figure]] = {
    "capacity": TypeAdapter(Bytes),
    "bandwidth": TypeAdapter(Bandwidth),
}
_STATE_MEMORY = "state yours with --memory and --memory-bandwidth of `zosim topology import`"
_logger = logging.getLogger(__name__)
MAX_NODES, MAX_LINKS = 4096, 2**16
"""Of one machine that is built piece by piece; the largest that exist have a few hundred nodes."""
MAX_PROCESSORS = 2**14
"""Logical processors that a list or a mask may name."""


class MachineBuilder:
    """Nodes and links of a machine of one host, ``host0``, that is put together piece by piece, and notes on what had to be assumed."""

    def __init__(self, name: str, label: str | None = None) -> None:
        self.name = name
        self.notes: list[str] = []
        self._nodes: dict[str, Node] = {}
        self._links: dict[str, Link] = {}
        self._counts: Counter[str] = Counter()
        self.add_node("host0", "host", label=label)

    def __contains__(self, node_id: str) -> bool:
        return node_id in self._nodes

    def add_node(self, node_id: str, node_type: str, **fields: Any) -> str:
        """Add a node and return its id; a second of the same id is refused.

        Raises TopologyError if the id is taken, a field is not valid, or there are too many nodes.
        """
        if len(self._nodes) == MAX_NODES:
            raise TopologyError(f"{self.name}: it has more than the maximum of {MAX_NODES} devices")
        if node_id in self._nodes:
            raise TopologyError(f"{self.name}: two devices have the name {node_id!r}")
        with readable(f"node {node_id!r} of {self.name}"):
            self._nodes[node_id] = Node.model_validate({"id": node_id, "type": node_type, **fields})
        return node_id

    def add_next(self, prefix: str, node_type: str, **fields: Any) -> str:
        """Add a node of ``host0`` under the next number of a prefix and return its id."""
        self._counts[prefix] += 1
        return self.add_node(f"{prefix}{self._counts[prefix] - 1}", node_type, host="host0", **fields)

    def add_root(self, numa: str) -> str:
        """Add a PCIe root to a NUMA domain and return its id."""
        root = self.add_next("root", "pcie_root")
        self.join(numa, root, catalogue().link_types["fabric"])
        return root

    def join(self, source: str, target: str, link_type: LinkType, count: int = 1) -> None:
        """Add a link between two nodes.

        Raises TopologyError if they are the same, `count` is not positive, or there are too many links.
        """
        if len(self._links) == MAX_LINKS:
            raise TopologyError(f"{self.name}: it has more than the maximum of {MAX_LINKS} links")
        with readable(f"the link of {source!r} with {target!r} in {self.name}"):
            link = Link(source=source, target=target, type=link_type, count=count)
        self._links[link.id] = link

    def add_numa(self, index: int, memory: Mapping[str, Any]) -> str:
        """Add a NUMA domain with its memory, of which the fields are given, and return its id."""
        numa, dram = self.add_node(f"numa{index}", "numa", host="host0"), f"dram{index}"
        self.add_node(dram, "memory", host="host0", **memory)
        self.join(numa, dram, catalogue().link_types["dram-bus"])
        return numa

    def add_cpu(self, index: int, numas: list[str], spec: DeviceSpec) -> None:
        """Add a CPU socket that is joined to its NUMA domains."""
        cpu = self.add_node(f"cpu{index}", "cpu", host="host0", spec=spec)
        for numa in numas:
            self.join(numa, cpu, catalogue().link_types["fabric"])

    def join_numas(self, numas: list[str], link_type: LinkType) -> None:
        """Join every pair of NUMA domains."""
        for source, target in combinations(numas, 2):
            self.join(source, target, link_type)

    def build(self, description: str = "", *, state_memory: str | None = None) -> Topology:
        """The finished machine; what had to be assumed is appended to the description.

        `state_memory`: how a user states the host's memory where it is assumed; the importers' options if left out.

        Raises TopologyError if it is not consistent.
        """
        unified = [node for node in self._nodes.values() if node.spec and node.spec.id.startswith(UNIFIED)]
        if unified:
            self._join_unified([node.id for node in unified])
            shared = f"The memory of {', '.join(node.id for node in unified[:8])} is the host's as well"
            self.notes.append(f"{shared}: what one of them holds, the other has not.")
        self.notes += memory_notes(self._nodes.values(), state_memory or _STATE_MEMORY)
        notes = " ".join(dict.fromkeys(self.notes))
        with readable(self.name):
            return Topology(
                name=self.name,
                description=f"{description} {notes}".strip(),
                nodes=tuple(self._nodes.values()),
                links=tuple(self._links.values()),
            )

    def _join_unified(self, gpus: Sequence[str]) -> None:
        """Join GPUs in one package with their processor to its memory, where no file told that link."""
        joined = [link for link in self._links.values() if link.type.technology == "c2c"]
        for gpu in gpus:
            if all(gpu not in {link.source, link.target} for link in joined) and "numa0" in self:
                self.join("numa0", gpu, catalogue().link_types["nvlink-c2c-gb10"])

    def build_imported(self, description: str) -> Topology:
        """The finished machine; what had to be assumed, or was not believed, is logged as well."""
        machine = self.build(description)
        for note in dict.fromkeys(self.notes):
            _logger.warning("warning: %s", note)
        return machine


def memory_notes(nodes: Iterable[Node], how: str) -> list[str]:
    """What is assumed of a host's memory, in a sentence; empty if nothing is.

    - `nodes`: of one host.
    - `how`: how a user states it.
    """
    memories = [node for node in nodes if node.type == "memory"]
    sizes = [node for node in memories if node.capacity and node.capacity.basis == "assumed"]
    speeds = [node for node in memories if node.bandwidth and node.bandwidth.basis == "assumed"]
    parts = []
    if sizes:
        parts.append(f"{format_bytes(sum(node.memory_bytes for node in sizes))} in all")
    if speeds:
        parts.append(f"{format_bandwidth(sum(node.bandwidth_bytes_per_s for node in speeds))} in all")
    if not parts:
        return []
    what = "memory" if sizes else "memory bandwidth"
    domains = f" over {len(memories)} NUMA domains" if len(memories) > 1 else ""
    return [f"The host's {what} is assumed, {' and '.join(parts)}{domains}: {how}."]


def figure(value: float, unit: str, source: str, basis: Basis) -> Figure:
    """A figure read now."""
    return Figure(value=value, unit=unit, source=source, basis=basis, date=datetime.date.today())


def assumed_memory(
    capacity: str | None = None,
    bandwidth: str | None = None,
    num_domains: int = 1,
    gpus: Sequence[DeviceSpec] = (),
    *,
    is_grace: bool = False,
) -> dict[str, Any]:
    """Fields of a memory node whose figures a user gave for the host, or that are assumed.

    - `capacity`, `bandwidth`: of all the host's memory, such as ``"512 GiB"`` and ``"200 GB/s"``.
    - `num_domains`: NUMA domains among which they are divided.
    - `gpus`: the host's GPUs: a server is assumed around those made for servers.
    - `is_grace`: whether the domain is a Grace's, which its GPUs reach by NVLink-C2C.

    A server has at least twice the memory of its GPUs, and the channels of its time: two sockets where there are several
    domains.
    """
    assumed = {
        "capacity": (DEFAULT_MEMORY, "the imported file does not tell"),
        "bandwidth": (DEFAULT_MEMORY_BANDWIDTH, "the imported file does not tell"),
    }
    if is_grace and gpus:
        generation = min(max((spec.nvlink.generation for spec in gpus if spec.nvlink), default=4), 5)
        rate = GRACE_BANDWIDTH_BYTES_PER_S[max(generation, 4)]
        assumed["capacity"] = f"{GRACE_MEMORY_BYTES * num_domains:g} B", "480 GB of LPDDR5X beside a Grace"
        assumed["bandwidth"] = f"{rate * num_domains:g} B/s", "the LPDDR5X of a Grace"
    elif gpus and all(spec.id.startswith(UNIFIED) for spec in gpus):
        assumed["capacity"] = "8 GiB", "what an operating system leaves of memory that is the GPU's"
        rate = sum(spec.memory_bandwidth_bytes_per_s for spec in gpus)
        assumed["bandwidth"] = f"{rate:g} B/s", "that of the GPU, with whose memory it is one"
    elif any(not spec.id.startswith(("rtx", "titan", "detected")) for spec in gpus):
        # GPUs that are not named for games or desks stand in a server.
        twice = 2 * sum(spec.memory_bytes for spec in gpus)
        generation = min(max((spec.pcie.generation for spec in gpus if spec.pcie), default=4), 5)
        rate = SOCKET_BANDWIDTH_BYTES_PER_S[max(generation, 3)]
        if twice > 256 * 2**30:
            assumed["capacity"] = f"{twice} B", "twice the memory of the GPUs, as servers have"
        assumed["bandwidth"] = (
            f"{min(num_domains, 2) * rate:g} B/s",
            f"memory channels of a server of PCIe {generation}.0",
        )
    fields: dict[str, Any] = {}
    for key, given in (("capacity", capacity), ("bandwidth", bandwidth)):
        value, why = assumed[key]
        with readable(f"host memory {key}"):
            read = _MEMORY_FIGURES[key].validate_python(given or value)
        source = "given by the user" if given else f"assumed: {why}"
        basis: Basis = "declared" if given else "assumed"
        fields[key] = figure(read.value / num_domains, read.unit, source, basis)
    return fields


def find_device(name: str) -> DeviceSpec | None:
    """The catalogue's device of that id or product name, however it is spelt; None if it has none.

    >>> [
    ...     find_device(name).id
    ...     for name in ("RTX 3090", "geforce rtx3090", "NVIDIA A100-SXM4-80GB", "Instinct MI300X")
    ... ]
    ['rtx3090', 'rtx3090', 'a100-80gb-sxm', 'mi300x']
    >>> find_device("A100") is None  # 40 or 80 GB, on a board or a card?
    True
    """
    devices = catalogue().devices
    if name in devices:
        return devices[name]
    wanted = _OTHER_NAMES.get(_bare(name), _bare(name))
    return next((spec for spec in devices.values() if wanted in (_bare(spec.id), _bare(spec.name))), None)


_OTHER_NAMES = {
    "v100sxm332gbh": "v100sxm332gb",
    "b300sxm6ac": "b300sxm6",
    "mi300xoam": "mi300x",
    "mi325oam": "mi325x",
    "mi325xoam": "mi325x",
}
"""Names of the same GPU elsewhere, such as a DGX-2H, and what drivers call some."""
_BRANDS = re.compile(r"\b(nvidia|geforce|tesla|amd|instinct)\b")


def _bare(name: str) -> str:
    """A name's letters and digits without its maker's brands."""
    return re.sub(r"[^a-z0-9]", "", _BRANDS.sub("", name.casefold()))


def require_device(name: str | None, device_type: str, where: str) -> DeviceSpec:
    """The catalogue's device of that name.

    Raises TopologyError if no name is given, or the catalogue has none of it.
    """
    known = [spec.id for spec in catalogue().devices.values() if spec.type == device_type]
    if name is None:
        message = f"{where} does not name its {device_type}"
        raise TopologyError(message, hint=f"give it with --{device_type}; known: {', '.join(sorted(known))}")
    spec = find_device(name)
    if spec is None or spec.type != device_type:
        raise TopologyError(f"the catalogue has no {device_type} {name!r}", hint=did_you_mean(name, known))
    return spec


def pcie_type(generation: int, lanes: int) -> LinkType:
    """The link type of a PCIe generation and width, from the catalogue where it has it."""
    known = catalogue().link_types.get(f"pcie{generation}-x{lanes}")
    if known is not None:
        return known
    value = lanes * PCIE_LANE_BYTES_PER_S[generation] / 1e9
    with readable(f"PCIe {generation}.0 x{lanes}"):
        return LinkType(
            name=f"pcie{generation}-x{lanes}",
            technology="pcie",
            pcie=PcieWidth.model_validate({"generation": generation, "lanes": lanes}),
            bandwidth=figure(value, "GB/s", "PCI Express Base Specification", "specification"),
            latency=catalogue().link_types["pcie4-x16"].latency,
            efficiency=catalogue().link_types["pcie4-x16"].efficiency,
        )


def nvlink_type(ports: NvlinkPorts | int) -> LinkType:
    """The link type of one NVLink of a GPU or of a generation, from the catalogue where it has it."""
    generation = ports if isinstance(ports, int) else ports.generation
    name = f"nvlink{generation}" if isinstance(ports, int) else ports.link or f"nvlink{generation}"
    known = catalogue().link_types.get(name)
    if known is not None:
        return known
    source = "https://www.nvidia.com/en-us/data-center/nvlink/"
    with readable(f"NVLink {generation}"):
        return LinkType(
            name=f"nvlink{generation}",
            technology="nvlink",
            nvlink_generation=generation,
            bandwidth=figure(NVLINK_BYTES_PER_S[generation] / 1e9, "GB/s", source, "datasheet"),
            latency=catalogue().link_types["nvlink4"].latency,
        )


def xgmi_type(gpu: DeviceSpec) -> LinkType:
    """The link type of one of AMD's links between GPUs; an MI300X's of a GPU whose own the catalogue lacks."""
    return catalogue().link_types["xgmi-mi250x" if gpu.id.startswith("mi250x") else "xgmi-mi300x"]


def socket_type(vendor: str, model: int, family: int = 6) -> LinkType:
    """The link between sockets, by CPU vendor and model as NCCL tells them apart; AMD's where they are not known."""
    types = catalogue().link_types
    if vendor != "GenuineIntel" or family != 6:
        return types["xgmi-milan"]
    newest_first = ((0xCF, "upi-emerald-rapids"), (0x8F, "upi-sapphire-rapids"), (0x55, "upi-skylake"))
    return types[next((name for first, name in newest_first if model >= first), "qpi-broadwell")]


def connector_type(spec: DeviceSpec) -> LinkType:
    """The PCIe link of a GPU in a slot that does it justice; Gen4 x16 if its connector is not known."""
    return pcie_type(4, 16) if spec.pcie is None else pcie_type(spec.pcie.generation, spec.pcie.lanes)


def cores_of(cpus: Iterable[int]) -> int:
    """Physical cores behind logical processors of one socket.

    Kernels number the second hardware threads after all first ones, so two runs of equal length are one run
    of cores with two threads each.

    >>> cores_of([0, 1, 2, 3, 8, 9, 10, 11]), cores_of([0, 1, 2])
    (4, 3)
    """
    # Neighbouring numbers differ from their positions by the same.
    runs = list(Counter(cpu - position for position, cpu in enumerate(sorted(cpus))).values())
    return runs[0] if len(runs) == 2 and runs[0] == runs[1] else max(1, sum(runs))


def generic_cpu(index: int, num_cores: int, source: str, basis: Basis = "declared") -> DeviceSpec:
    """A CPU of which at most the number of cores is known: 2.5 GHz and AVX2 are assumed."""
    rate = num_cores * 2.5 * 32
    how = f"assumed: {num_cores} cores x 2.5 GHz x 32 flop (AVX2, two pipes); {source} does not tell"
    return DeviceSpec(
        id=f"generic-cpu{index}",
        name=f"CPU with {num_cores} cores",
        type="cpu",
        peak_dense={
            "fp32": figure(rate, "Gflop/s", how, "assumed"),
            "fp64": figure(rate / 2, "Gflop/s", how, "assumed"),
        },
        cores=figure(num_cores, "cores", source, basis),
        copy_engines=figure(0, "engines", "a CPU's cores copy", "specification"),
    )
