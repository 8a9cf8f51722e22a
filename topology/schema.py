"""What a machine is made of: devices with their specifications, memories, and links between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from topology.errors import TopologyError
from topology.figures import (
    Bandwidth,
    Bytes,
    Compute,
    Count,
    Efficiency,
    Figure,
    Latency,
    Power,
    TransferRate,
)
from topology.validation import FrozenModel, Location, RuleError, did_you_mean

Identifier = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:/-]*$", max_length=80)]
NodeType = Literal[
    "host", "numa", "cpu", "memory", "pcie_root", "pcie_switch", "gpu", "nvswitch", "nic", "network", "disk"
]
LinkTechnology = Literal["fabric", "memory", "pcie", "nvlink", "c2c", "socket", "network", "storage"]
Dtype = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8", "int4"]

# Traffic passes through these; a GPU, a CPU, a memory or a disk only starts or ends it: without software
# that forwards, two GPUs of a partial NVLink mesh do not reach each other through a third.
FORWARDING_TYPES: frozenset[str] = frozenset(
    {"numa", "pcie_root", "pcie_switch", "nvswitch", "nic", "network"}
)
HOSTLESS_TYPES: frozenset[str] = frozenset({"host", "network"})
# Links that may leave their bandwidth out: what they carry is limited by the memory or the ports they join.
UNLIMITED_TECHNOLOGIES: frozenset[str] = frozenset({"fabric", "memory"})


class PcieWidth(FrozenModel):
    """Generation and lanes of a PCIe link or of a device's connector."""

    generation: int = Field(ge=1, le=7)
    lanes: Literal[1, 2, 4, 8, 16, 32]


class NvlinkPorts(FrozenModel):
    """Generation and number of the NVLinks of a GPU.

    `bridge`: whether they need a bridge between two cards, which a machine may lack. `link`: their type in the catalogue,
    where it is not that of the generation.
    """

    generation: int = Field(ge=1, le=6)
    num_links: int = Field(gt=0)
    bridge: bool = False
    link: str | None = None


class DeviceSpec(FrozenModel):
    """What a processor can do, each figure with its source.

    Attributes
    ----------
    id, name : str
        Name in the device catalogue, and of the product.
    type : {"gpu", "cpu"}
        Type of the processor.
    peak_dense, peak_sparse : mapping of dtype to Figure
        Peak rates in flop/s (op/s for integers), without and with structured sparsity. Datasheets often
        print the sparse ones only; the roofline uses the dense ones.
    memory, memory_bandwidth : Figure or None
        Device memory; None for a CPU, whose memory is its host's DRAM.
    cores : Figure
        Streaming multiprocessors of a GPU, physical cores of a CPU that may be used.
    copy_engines : Figure
        Independent copy engines; with two, one direction each can run beside compute. Zero for a CPU,
        where cores do the copying.
    tdp : Figure or None
        Thermal design power in watts.
    pcie : PcieWidth or None
        What its connector can do; the slot may do less.
    nvlink : NvlinkPorts or None
        Generation and number of its NVLinks, for the lint.
    pcie_peer_to_peer : bool
        Whether two of these exchange data over PCIe directly; if not, copies are staged in host memory.
    """

    id: Identifier
    name: str = Field(max_length=255)
    type: Literal["gpu", "cpu"]
    peak_dense: Mapping[Dtype, Compute] = Field(default_factory=dict)
    peak_sparse: Mapping[Dtype, Compute] = Field(default_factory=dict)
    memory: Bytes | None = None
    memory_bandwidth: Bandwidth | None = None
    cores: Count
    copy_engines: Count
    tdp: Power | None = None
    pcie: PcieWidth | None = None
    nvlink: NvlinkPorts | None = None
    pcie_peer_to_peer: bool = True

    @model_validator(mode="after")
    def _gpu_has_memory(self) -> DeviceSpec:
        if self.type == "gpu" and (self.memory is None or self.memory_bandwidth is None):
            message = f"device {self.id!r} is a gpu without memory or memory_bandwidth"
            raise RuleError(message, hint="a CPU may leave them out: its memory is the host's")
        return self

    def peak_flop_per_s(self, dtype: Dtype, *, sparse: bool = False) -> float:
        """Peak rate of a dtype in flop/s.

        Parameters
        ----------
        dtype : str
            Format of the products, such as ``"bf16"``.
        sparse : bool, optional
            Whether to return the rate with structured sparsity.

        Raises
        ------
        TopologyError
            If no peak is declared for the dtype.
        """
        peaks = self.peak_sparse if sparse else self.peak_dense
        if dtype not in peaks:
            message = f"device {self.name!r} has no {'sparse' if sparse else 'dense'} peak for {dtype!r}"
            raise TopologyError(message, hint=f"declared: {', '.join(peaks) or 'none'}")
        return peaks[dtype].in_si("compute")

    @property
    def memory_bytes(self) -> int:
        """Capacity of the device memory in bytes."""
        return round(_required(self.memory, self.id, "memory").in_si("bytes"))

    @property
    def memory_bandwidth_bytes_per_s(self) -> float:
        """Peak bandwidth of the device memory, reads and writes together."""
        return _required(self.memory_bandwidth, self.id, "memory_bandwidth").in_si("bandwidth")

    @property
    def num_cores(self) -> int:
        """Streaming multiprocessors of a GPU, usable cores of a CPU."""
        return round(self.cores.in_si("count"))

    @property
    def num_copy_engines(self) -> int:
        """Copies that can run at the same time beside compute."""
        return round(self.copy_engines.in_si("count"))

    @property
    def tdp_watts(self) -> float | None:
        """Thermal design power, None if not declared."""
        return None if self.tdp is None else self.tdp.in_si("power")


def _required(figure: Figure | None, owner: str, field: str) -> Figure:
    if figure is None:
        message = f"{owner!r} declares no {field}"
        raise TopologyError(message, hint="ask Topology.device_spec, which fills in the host's memory")
    return figure


class MemoryChannels(FrozenModel):
    """Channels behind a memory, for the physics lint: each moves 8 bytes per transfer."""

    num_channels: int = Field(gt=0)
    transfer_rate: TransferRate

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """What the channels can carry at most."""
        return self.num_channels * 8 * self.transfer_rate.in_si("transfer_rate")


class Node(FrozenModel):
    """A vertex of the machine.

    Attributes
    ----------
    id : str
        Unique name, such as ``"gpu0"`` or ``"node1/gpu0"``.
    type : str
        Type of the component, such as ``"gpu"``, ``"memory"`` or ``"nic"``.
    host : str or None
        The host that contains it; hosts and networks have none.
    index : int or None
        Number of a GPU within its host, as its driver counts; file order if None.
    label : str or None
        Text that pictures and listings show beside the id.
    spec : DeviceSpec or None
        For GPUs and CPUs.
    capacity, bandwidth, efficiency : Figure or None
        For memories and disks. Reads and writes share the bandwidth; `efficiency` is the part of it that
        software reaches.
    write_bandwidth : Figure or None
        For disks that write at another rate than they read; of the time of a disk, a written byte takes its part.
    channels : MemoryChannels or None
        For memories, optional.
    in_switch_sums : bool or None
        Of an nvswitch: whether it adds up what GPUs send (NVLink SHARP). None: as its links tell,
        :meth:`~topology.graph.Topology.sums_in_switch`.
    """

    id: Identifier
    type: NodeType
    host: Identifier | None = None
    index: int | None = Field(default=None, ge=0)
    label: str | None = None
    spec: DeviceSpec | None = None
    capacity: Bytes | None = None
    bandwidth: Bandwidth | None = None
    write_bandwidth: Bandwidth | None = None
    efficiency: Efficiency | None = None
    channels: MemoryChannels | None = None
    in_switch_sums: bool | None = None

    @model_validator(mode="after")
    def _fits_its_type(self) -> Node:
        if self.type in {"gpu", "cpu"}:
            if self.spec is None or self.spec.type != self.type:
                given = "none" if self.spec is None else f"{self.spec.id!r} of type {self.spec.type}"
                message = f"node {self.id!r} needs the specification of a {self.type}, got {given}"
                raise RuleError(message, hint="name one of the catalogue, or of the file's own devices")
        elif self.spec is not None:
            message = f"node {self.id!r} of type {self.type} has a device specification"
            raise RuleError(message, hint="only gpu and cpu nodes have one")
        if self.type == "memory" and (self.capacity is None or self.bandwidth is None):
            message = f"memory {self.id!r} needs a capacity and a bandwidth"
            raise RuleError(message, hint='such as capacity: "512 GiB", bandwidth: "204.8 GB/s"')
        if self.type not in {"memory", "disk"} and (self.capacity or self.bandwidth or self.channels):
            message = f"node {self.id!r} of type {self.type} has a capacity, a bandwidth or channels"
            raise RuleError(message, hint="a GPU's belong to its device, a link's to the link")
        if self.write_bandwidth is not None and (self.type != "disk" or self.bandwidth is None):
            message = f"node {self.id!r} of type {self.type} has a write_bandwidth"
            raise RuleError(message, hint="only a disk with a bandwidth, that of its reads, has one")
        if self.in_switch_sums and self.type != "nvswitch":
            message = f"node {self.id!r} of type {self.type} has in_switch_sums"
            raise RuleError(message, hint="only an nvswitch adds up what GPUs send")
        if (self.host is None) != (self.type in HOSTLESS_TYPES) and self.type != "nvswitch":
            rule = "belongs to no host" if self.type in HOSTLESS_TYPES else "needs its host"
            raise RuleError(f"node {self.id!r} of type {self.type} {rule}, got host={self.host!r}")
        return self

    @property
    def memory_bytes(self) -> int:
        """Capacity of a memory or a disk, or of a GPU's memory, in bytes."""
        if self.spec is not None and self.capacity is None:
            return self.spec.memory_bytes
        return round(_required(self.capacity, self.id, "capacity").in_si("bytes"))

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Bandwidth that software reaches of a memory or a disk, or peak of a GPU's memory."""
        if self.spec is not None and self.bandwidth is None:
            return self.spec.memory_bandwidth_bytes_per_s
        peak = _required(self.bandwidth, self.id, "bandwidth").in_si("bandwidth")
        return peak * (1.0 if self.efficiency is None else self.efficiency.in_si("ratio"))

    @property
    def write_share(self) -> float:
        """Part of a disk's bandwidth, which is that of its reads, that writes reach."""
        if self.bandwidth is None or self.write_bandwidth is None:
            return 1.0
        return self.write_bandwidth.in_si("bandwidth") / self.bandwidth.in_si("bandwidth")


class LinkType(FrozenModel):
    """What links of a type carry.

    Attributes
    ----------
    name : str or None
        Name in the link catalogue.
    technology : str
        Technology, such as ``"pcie"``, ``"nvlink"`` or ``"ethernet"``.
    bandwidth : Figure or None
        Nominal bandwidth of one link in one direction, after line encoding. None where the link is never
        what limits: on-die fabrics, and the attachment of a memory that has its own bandwidth.
    latency : Figure
        One-way latency of a small message.
    duplex : {"full", "half"}
        Full: each direction has the whole bandwidth. Half: the two share it.
    sharing : {"maxmin", "fifo"}
        Concurrent flows share fairly, or are stored and forwarded one after the other.
    efficiency : Figure or None
        Part of the nominal bandwidth that large transfers reach.
    pcie : PcieWidth or None
        Generation and number of lanes, for the lint.
    nvlink_generation : int or None
        Version of NVLink, from 1; tells the lint what a link can carry.
    """

    name: Identifier | None = None
    technology: LinkTechnology
    bandwidth: Bandwidth | None = None
    latency: Latency = Figure(value=0, unit="s")
    duplex: Literal["full", "half"] = "full"
    sharing: Literal["maxmin", "fifo"] = "maxmin"
    efficiency: Efficiency | None = None
    pcie: PcieWidth | None = None
    nvlink_generation: int | None = Field(default=None, ge=1, le=6)

    @model_validator(mode="after")
    def _fits_its_type(self) -> LinkType:
        if self.bandwidth is None and self.technology not in UNLIMITED_TECHNOLOGIES:
            message = f"link type {self.name or self.technology!r} needs a bandwidth"
            raise RuleError(message, hint='per direction, such as bandwidth: "31.5 GB/s"')
        if self.pcie is not None and self.technology != "pcie":
            raise RuleError(f"link of {self.technology!r} has a PCIe generation", hint="technology: pcie")
        if self.nvlink_generation is not None and self.technology != "nvlink":
            message = f"link of {self.technology!r} has an NVLink generation"
            raise RuleError(message, hint="technology: nvlink")
        return self

    @property
    def nominal_bandwidth_bytes_per_s(self) -> float:
        """Declared bandwidth of one link per direction; infinite where it never limits."""
        return math.inf if self.bandwidth is None else self.bandwidth.in_si("bandwidth")


class Link(FrozenModel):
    """A link between two nodes, usable in both directions.

    Attributes
    ----------
    id : str
        Unique name; ``source--target`` if left out.
    source, target : str
        Ids of the nodes at its ends.
    type : LinkType
        What one physical link carries.
    count : int
        Number of identical physical links that act as one, such as an NVLink bundle.
    """

    id: Identifier = ""
    source: Identifier
    target: Identifier
    type: LinkType
    count: int = Field(default=1, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _name_itself(cls, data: object) -> object:
        if isinstance(data, dict) and not data.get("id") and {"source", "target"} <= data.keys():
            return {**data, "id": f"{data['source']}--{data['target']}"}
        return data

    @model_validator(mode="after")
    def _joins_two(self) -> Link:
        if self.source == self.target:
            raise RuleError(f"link {self.id!r} joins {self.source!r} with itself")
        return self

    @property
    def nominal_bandwidth_bytes_per_s(self) -> float:
        """Declared bandwidth per direction of all its physical links."""
        return self.count * self.type.nominal_bandwidth_bytes_per_s

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Bandwidth per direction that large transfers reach."""
        efficiency = 1.0 if self.type.efficiency is None else self.type.efficiency.in_si("ratio")
        return self.nominal_bandwidth_bytes_per_s * efficiency

    @property
    def latency_s(self) -> float:
        """One-way latency of a small message."""
        return self.type.latency.in_si("time")

    def other_end(self, node_id: str) -> str:
        """The id of the node at the other end.

        Parameters
        ----------
        node_id : str
            Id of one end.
        """
        return self.target if node_id == self.source else self.source


class MeasuredBandwidth(FrozenModel):
    """End-to-end bandwidth measured from one node to another; it overrides what is declared.

    Attributes
    ----------
    source, target : str
        Ids of the two nodes.
    bandwidth : Figure
        Bandwidth of one large transfer in that direction.
    """

    source: Identifier
    target: Identifier
    bandwidth: Bandwidth


def unknown_node(node_id: str, known: list[str], where: str, location: Location) -> RuleError:
    """The error for a name that no node has."""
    message = f"{where} names the unknown node {node_id!r}"
    return RuleError(message, hint=did_you_mean(node_id, known), location=location)
