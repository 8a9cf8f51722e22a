"""Machines by the names under which clouds and makers sell them, built from what they consist of."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, Literal

from pydantic import Field

from topology.building import MachineBuilder, connector_type, nvlink_type
from topology.documents import catalogue, user_catalogue
from topology.errors import TopologyError
from topology.figures import Bandwidth, Basis, Figure
from topology.graph import Topology
from topology.importers.pairs import join_switch
from topology.reading import shipped_yaml
from topology.schema import DeviceSpec
from topology.units import parse_quantity
from topology.validation import FrozenModel, did_you_mean, readable

_NOT_PRINTED = ("channels", "rate", "gpus_per_switch")
_CUBE_MESH = (
    (0, 1, 1), (0, 2, 1), (0, 3, 2), (0, 4, 2), (1, 2, 2), (1, 3, 1), (1, 5, 2), (2, 3, 2),
    (2, 6, 1), (3, 7, 1), (4, 5, 1), (4, 6, 1), (4, 7, 2), (5, 6, 2), (5, 7, 1), (6, 7, 2),
)  # fmt: skip
"""NVLinks between eight V100 with six each: https://images.nvidia.com/content/pdf/dgx1-v100-system-architecture-whitepaper.pdf, figure 4."""


class Drive(FrozenModel):
    """What a drive reads, and the link that it sits on."""

    bandwidth: Bandwidth
    link: str


class Instance(FrozenModel):
    """What a machine consists of."""

    also: tuple[str, ...] = ()  # other names
    source: str = Field(min_length=1)
    gpu: str | None = None
    gpus: int = Field(default=0, ge=0, le=16)
    nvlinks: Literal["none", "pairs", "switch", "cube-mesh"] = "none"  # how the GPUs are joined
    # GPUs below one PCIe switch; 0 where each has a root of its own.
    gpus_per_switch: int = Field(default=0, ge=0)
    cpu: str
    sockets: int = Field(default=1, ge=1, le=8)
    # cores, host_cores: cores that are let, of those of the whole host; all if left out.
    cores: int = Field(ge=1)
    host_cores: int | None = None
    memory: str
    # channels, rate: memory channels of a socket, and their megatransfers a second.
    channels: int = Field(ge=1)
    rate: int = Field(ge=1)
    socket_link: str = "xgmi-milan"
    network: str | None = None
    adapters: int = Field(default=0, ge=0, le=64)
    drive: str | None = None
    drives: int = Field(default=0, ge=0, le=64)
    drive_size: str | None = None
    assumed: tuple[str, ...] = ()  # fields that the source does not state


class _Instances(FrozenModel):
    date: datetime.date | None = None
    sources: dict[str, str] = Field(default_factory=dict)
    drives: dict[str, Drive] = Field(default_factory=dict)
    instances: dict[str, Instance] = Field(default_factory=dict)


@cache
def _shipped() -> _Instances:
    folder = resources.files("topology") / "data" / "instances"
    return _Instances.model_validate(shipped_yaml((folder / "machines.yaml").read_text(encoding="utf-8")))


def _known() -> _Instances:
    """Machines that come with the package, and those of the user's catalogue."""
    own, shipped = user_catalogue(), _shipped()
    if not own:
        return shipped
    with readable("the user's catalogue", model=_Instances):
        read = _Instances.model_validate(
            {key: own[key] for key in ("date", "drives", "instances") if key in own}
        )
    return read.model_copy(
        update={"drives": shipped.drives | read.drives, "instances": shipped.instances | read.instances}
    )


def instance_names() -> Mapping[str, str]:
    """Names of all machines, other names included, in small letters, with the seller's name of each."""
    known = _known().instances
    return {
        name.casefold(): seller for seller, instance in known.items() for name in (seller, *instance.also)
    }


def instance_machine(name: str) -> Topology:
    """Build the machine of that name.

    Raises TopologyError if there is none, or what it consists of is not in the catalogue.
    """
    known = _known()
    names = instance_names()
    if name.casefold() not in names:
        raise TopologyError(f"no machine is sold as {name!r}", hint=did_you_mean(name, known.instances))
    seller = names[name.casefold()]
    return _Assembly(seller, known.instances[seller], known).machine()


class _Assembly:
    """One machine while it is put together."""

    def __init__(self, name: str, instance: Instance, known: _Instances) -> None:
        self._name, self._instance, self._known = name, instance, known
        self._builder = MachineBuilder(name)
        self._switches: list[str] = []

    def machine(self) -> Topology:
        instance, builder = self._instance, self._builder
        numas = [self._socket(index) for index in range(instance.sockets)]
        builder.join_numas(numas, self._of_catalogue("link_types", instance.socket_link))
        if instance.gpu is not None:
            self._add_gpus(numas)
        self._add_adapters(numas)
        self._add_drives(numas)
        assumed = sorted({*instance.assumed, *(name for name in _NOT_PRINTED if getattr(instance, name))})
        return builder.build(
            f"{self._name}, as its seller lists it ({instance.source}). Assumed: {', '.join(assumed)}.",
            state_memory=f"state yours in the file that `zosim topology show {self._name} -o FILE` writes",
        )

    def _of_catalogue(self, section: Literal["devices", "link_types"], name: str) -> Any:
        entries: Mapping[str, Any] = getattr(catalogue(), section)
        if name not in entries:
            message = f"{self._name}: the catalogue has no {name!r} among its {section.replace('_', ' ')}"
            raise TopologyError(message, hint=did_you_mean(name, entries))
        return entries[name]

    def _figure(self, value: float, unit: str, field: str, note: str | None = None) -> Figure:
        basis: Basis = "assumed" if field in {*self._instance.assumed, *_NOT_PRINTED} else "datasheet"
        return Figure(
            value=value,
            unit=unit,
            source=self._instance.source,
            date=self._known.date,
            basis=basis,
            note=note,
        )

    def _quantity(self, text: str, field: str) -> Figure:
        with readable(f"{field} of {self._name}"):
            return self._figure(parse_quantity(text, "bytes") / 2**30, "GiB", field, text)

    def _socket(self, index: int) -> str:
        """Add a socket with its share of memory, and return its NUMA domain."""
        instance = self._instance
        let = instance.cores / max(instance.host_cores or instance.cores, instance.cores)
        # A slice on one socket of a host of two has the channels of one.
        shared = min(1.0, let * (2 if instance.sockets == 1 and let < 1 else 1))
        rate = self._figure(instance.rate, "MT/s", "rate")
        whole = self._quantity(instance.memory, "memory")
        note = f"{instance.channels} channels x {instance.rate} MT/s x 8 B" + (
            f", {shared:.3g} of them" if shared < 1 else ""
        )
        numa = self._builder.add_numa(
            index,
            {
                "capacity": whole.model_copy(update={"value": whole.value / instance.sockets}),
                "bandwidth": self._figure(instance.channels * instance.rate * 8e-3 * shared, "GB/s", "channels", note),
                "efficiency": self._figure(0.85, "1", "channels", "STREAM reaches 80-90 % of the channels' peak"),
                "channels": {"num_channels": instance.channels, "transfer_rate": rate},
            },
        )  # fmt: skip
        cpu: DeviceSpec = self._of_catalogue("devices", instance.cpu)
        num_cores = max(1, instance.cores // instance.sockets)
        self._builder.add_cpu(index, [numa], _with_cores(cpu, num_cores))
        return numa

    def _add_gpus(self, numas: list[str]) -> None:
        instance, builder = self._instance, self._builder
        gpu: DeviceSpec = self._of_catalogue("devices", instance.gpu or "")
        names = []
        for index in range(instance.gpus):
            numa = numas[index * len(numas) // instance.gpus]
            if not instance.gpus_per_switch:
                parent = builder.add_root(numa)
            elif index % instance.gpus_per_switch == 0:
                parent = builder.add_next("switch", "pcie_switch")
                builder.join(builder.add_root(numa), parent, connector_type(gpu))
                self._switches.append(parent)
            names.append(builder.add_node(f"gpu{index}", "gpu", host="host0", index=index, spec=gpu))
            builder.join(parent, names[-1], connector_type(gpu))
        if gpu.nvlink is None or instance.nvlinks == "none":
            return
        if instance.nvlinks == "switch":
            join_switch(builder, dict.fromkeys(names, gpu.nvlink.num_links), gpu.nvlink.generation)
        elif instance.nvlinks == "cube-mesh":
            for one, other, num_links in _CUBE_MESH:
                builder.join(names[one], names[other], nvlink_type(gpu.nvlink.generation), num_links)
        else:
            for first, second in zip(names[::2], names[1::2], strict=False):
                builder.join(first, second, nvlink_type(gpu.nvlink.generation), gpu.nvlink.num_links)

    def _add_adapters(self, numas: list[str]) -> None:
        instance, builder = self._instance, self._builder
        if instance.network is None:
            return
        builder.add_node("network0", "network")
        for index in range(instance.adapters):
            parents = self._switches or numas
            parent = parents[index * len(parents) // instance.adapters]
            at = parent if self._switches else builder.add_root(parent)
            adapter = builder.add_next("nic", "nic")
            builder.join(at, adapter, self._of_catalogue("link_types", "pcie4-x16"))
            builder.join(adapter, "network0", self._of_catalogue("link_types", instance.network))

    def _add_drives(self, numas: list[str]) -> None:
        instance, builder = self._instance, self._builder
        if instance.drive is None:
            return
        if instance.drive not in self._known.drives:
            message = f"{self._name}: there is no drive {instance.drive!r}"
            raise TopologyError(message, hint=did_you_mean(instance.drive, self._known.drives))
        drive = self._known.drives[instance.drive]
        size = (
            {}
            if instance.drive_size is None
            else {"capacity": self._quantity(instance.drive_size, "drive_size")}
        )
        for index in range(instance.drives):
            disk = builder.add_next("disk", "disk", bandwidth=drive.bandwidth, **size)
            root = builder.add_root(numas[index * len(numas) // instance.drives])
            builder.join(root, disk, self._of_catalogue("link_types", drive.link))


def _with_cores(cpu: DeviceSpec, num_cores: int) -> DeviceSpec:
    """Return a processor of which only some cores are there, with their part of its peaks."""
    if num_cores == cpu.num_cores:
        return cpu
    part = num_cores / cpu.num_cores
    scaled = {
        dtype: peak.model_copy(update={"value": peak.value * part}) for dtype, peak in cpu.peak_dense.items()
    }
    cores = cpu.cores.model_copy(update={"value": num_cores})
    return cpu.model_copy(update={"id": f"{cpu.id}-{num_cores}", "peak_dense": scaled, "cores": cores})
