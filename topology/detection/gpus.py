"""GPUs as NVML or ``nvidia-smi`` report them."""

from __future__ import annotations

import importlib
import logging
import shutil
import subprocess
from dataclasses import dataclass, field, replace
from itertools import combinations
from types import ModuleType
from typing import Any

from topology.building import connector_type, figure, find_device, pcie_type
from topology.errors import TopologyError
from topology.importers.pairs import Pair
from topology.importers.smi import parse_topo_matrix
from topology.schema import DeviceSpec, Dtype, LinkType

_logger = logging.getLogger(__name__)

# Flop per cycle and streaming multiprocessor of dense fp16 matrices, and CUDA cores per multiprocessor, by
# compute capability: Nvidia's whitepapers on Volta, Turing, Ampere, Ada and Hopper.
TENSOR_FLOP_PER_CYCLE = {(7, 0): 1024, (7, 5): 1024, (8, 0): 2048, (8, 6): 512, (8, 9): 512, (9, 0): 4096}
CORES_PER_SM = {(7, 0): 64, (7, 5): 64, (8, 0): 64, (8, 6): 128, (8, 9): 128, (9, 0): 128}
# nvmlGpuTopologyLevel_t
_LEVELS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_REMOTE_IS_SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH
# nvmlNvlinkVersion_t numbers 1, 2, 2.2, 3, 3.1, 4 and 5 from 1 on
_NVLINK_GENERATIONS = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5}


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU and how it hangs on its host."""

    index: int
    spec: DeviceSpec
    bus_id: str
    link_type: LinkType
    numa: int | None

    @property
    def id(self) -> str:
        """Its node's id."""
        return f"gpu{self.index}"


@dataclass
class Gpus:
    """All GPUs of a host and what joins them."""

    devices: list[Gpu]
    levels: dict[Pair, str] = field(default_factory=dict)
    nvlinks: dict[tuple[str, str], int] = field(default_factory=dict)
    nvlinks_to_switch: dict[str, int] = field(default_factory=dict)
    nvlink_generation: int | None = None
    notes: list[str] = field(default_factory=list)


def find_gpus(nvml: ModuleType | None = None) -> Gpus | None:
    """The host's GPUs, or None if it has none that NVIDIA's driver knows.

    Raises TopologyError if a GPU is of an unknown model and only ``nvidia-smi`` is there to ask.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return _from_smi()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        _logger.debug("NVML is installed but does not start: %s", error)
        return None
    try:
        gpus = _from_nvml(nvml)
    finally:
        nvml.nvmlShutdown()
    return gpus if gpus.devices else None


def _ask(nvml: Any, name: str, *arguments: Any) -> Any:
    """An NVML answer, or None where the driver, the device or the bindings do not give it."""
    function = getattr(nvml, name, None)
    if function is None:
        return None
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _from_nvml(nvml: Any) -> Gpus:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    # Every pair of GPUs can read each other's memory where the driver does not say that it cannot.
    reading = getattr(nvml, "NVML_P2P_CAPS_INDEX_READ", 0)
    reported = [_ask(nvml, "nvmlDeviceGetP2PStatus", *pair, reading) for pair in combinations(handles, 2)]
    peer_to_peer = set(reported) <= {None, getattr(nvml, "NVML_P2P_STATUS_OK", 0)}
    gpus = Gpus([])
    for index, handle in enumerate(handles):
        spec = _spec(nvml, handle, peer_to_peer)
        pci = _ask(nvml, "nvmlDeviceGetPciInfo", handle)
        generation = _ask(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle)
        lanes = _ask(nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle)
        gpu = Gpu(
            index=index,
            spec=spec,
            bus_id="" if pci is None else _text(pci.busId),
            link_type=_pcie_or_assumed(spec, generation, lanes),
            numa=_ask(nvml, "nvmlDeviceGetNumaNodeId", handle),
        )
        gpus.devices.append(gpu)
    for (first, one), (second, other) in combinations(enumerate(handles), 2):
        code = _ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", one, other)
        if code in _LEVELS:
            gpus.levels[frozenset({f"gpu{first}", f"gpu{second}"})] = _LEVELS[code]
    if len(handles) > 1:
        _count_nvlinks(nvml, handles, gpus)
    return gpus


def _pcie_or_assumed(spec: DeviceSpec, generation: int | None, lanes: int | None) -> LinkType:
    """The reported PCIe link; that of its connector where a virtual machine hides it."""
    if generation in {1, 2, 3, 4, 5, 6, 7} and lanes in {1, 2, 4, 8, 16, 32}:
        return pcie_type(generation, lanes)
    return connector_type(spec)


def _spec(nvml: Any, handle: Any, peer_to_peer: bool) -> DeviceSpec:
    name = _text(nvml.nvmlDeviceGetName(handle))
    total_bytes = nvml.nvmlDeviceGetMemoryInfo(handle).total
    known = find_device(name)
    # A part of a GPU (MIG, vGPU) goes by another name, or by the same with less memory.
    if known is not None and abs(known.memory_bytes - total_bytes) < 0.05 * known.memory_bytes:
        return known.model_copy(
            update={
                "memory": figure(total_bytes / 2**20, "MiB", "NVML", "measured"),
                "pcie_peer_to_peer": known.pcie_peer_to_peer and peer_to_peer,
            }
        )
    return _estimate_spec(nvml, handle, name, total_bytes, peer_to_peer)


def _estimate_spec(nvml: Any, handle: Any, name: str, total_bytes: int, peer_to_peer: bool) -> DeviceSpec:
    """A specification from clocks and counts, for a model that the catalogue does not have."""
    capability = tuple(_ask(nvml, "nvmlDeviceGetCudaComputeCapability", handle) or (8, 0))
    nearest = max((known for known in CORES_PER_SM if known <= capability), default=(7, 0))
    num_cores = _ask(nvml, "nvmlDeviceGetNumGpuCores", handle) or 64 * CORES_PER_SM[nearest]
    megahertz = _ask(nvml, "nvmlDeviceGetMaxClockInfo", handle, 1) or 1400
    num_sms = max(1, num_cores // CORES_PER_SM[nearest])
    how = f"estimate: {num_sms} SM x {megahertz} MHz, rates of compute capability {nearest[0]}.{nearest[1]}"
    fp32 = num_cores * 2 * megahertz * 1e-6
    tensor = num_sms * TENSOR_FLOP_PER_CYCLE[nearest] * megahertz * 1e-6
    rates: dict[Dtype, float] = {"fp32": fp32, "fp16": tensor}
    if nearest >= (8, 0):
        rates |= {"tf32": tensor / 2, "bf16": tensor}
    memory_megahertz = _ask(nvml, "nvmlDeviceGetMaxClockInfo", handle, 2)
    bits = _ask(nvml, "nvmlDeviceGetMemoryBusWidth", handle)
    bandwidth = figure(500, "GB/s", "assumed: NVML does not tell", "assumed")
    if memory_megahertz and bits:
        # Two transfers a clock.
        rate = round(2 * memory_megahertz * bits / 8 / 1000, 1)
        bandwidth = figure(rate, "GB/s", f"estimate: 2 x {memory_megahertz} MHz x {bits} bit", "estimated")
    milliwatts = _ask(nvml, "nvmlDeviceGetPowerManagementDefaultLimit", handle)
    power = figure(milliwatts / 1000, "W", "default power limit of NVML", "measured") if milliwatts else None
    return DeviceSpec(
        id="detected-" + "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-")[:60],
        name=name,
        type="gpu",
        peak_dense={
            dtype: figure(round(rate, 2), "Tflop/s", how, "estimated") for dtype, rate in rates.items()
        },
        memory=figure(total_bytes / 2**20, "MiB", "NVML", "measured"),
        memory_bandwidth=bandwidth,
        cores=figure(num_sms, "SM", "NVML", "measured"),
        copy_engines=figure(2, "engines", "assumed: one per direction", "assumed"),
        tdp=power,
        pcie_peer_to_peer=peer_to_peer,
    )


def _count_nvlinks(nvml: Any, handles: list[Any], gpus: Gpus) -> None:
    by_bus = {gpu.bus_id.lower(): gpu.id for gpu in gpus.devices}
    for gpu, handle in zip(gpus.devices, handles, strict=True):
        for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18)):
            if not _ask(nvml, "nvmlDeviceGetNvLinkState", handle, link):
                continue
            version = _ask(nvml, "nvmlDeviceGetNvLinkVersion", handle, link)
            gpus.nvlink_generation = _NVLINK_GENERATIONS.get(version) or gpus.nvlink_generation
            remote = _ask(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
            other = None if remote is None else by_bus.get(_text(remote.busId).lower())
            remote_type = _ask(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
            if other is not None and gpu.id < other:
                gpus.nvlinks[gpu.id, other] = gpus.nvlinks.get((gpu.id, other), 0) + 1
            elif other is None and remote_type in {None, _REMOTE_IS_SWITCH}:
                gpus.nvlinks_to_switch[gpu.id] = gpus.nvlinks_to_switch.get(gpu.id, 0) + 1


def _from_smi() -> Gpus | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    fields = "index,name,memory.total,pcie.link.gen.max,pcie.link.width.max,pci.bus_id"
    listing = _run([program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"])
    if not listing:
        return None
    return gpus_from_smi(listing, _run([program, "topo", "-m"]) or "")


def _run(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        _logger.debug("%s failed: %s", command[0], error)
        return None
    return done.stdout


def gpus_from_smi(listing: str, matrix_text: str) -> Gpus:
    """GPUs from the output of ``nvidia-smi``.

    - `listing`: CSV rows of index, name, memory.total, pcie.link.gen.max, pcie.link.width.max, pci.bus_id.
    - `matrix_text`: output of ``nvidia-smi topo -m``; may be empty.

    Raises TopologyError if a model is unknown: ``nvidia-smi`` tells too little to estimate its peaks.
    """
    gpus = Gpus([_gpu_from_row(line) for line in listing.strip().splitlines()])
    if matrix_text.strip():
        matrix = parse_topo_matrix(matrix_text)
        gpus.levels = {
            frozenset(name.lower() for name in pair): code
            for pair, code in matrix.levels.items()
            if pair <= set(matrix.gpus)
        }
        gpus.nvlinks = {(a.lower(), b.lower()): count for (a, b), count in matrix.nvlinks.items()}
        gpus.devices = [replace(gpu, numa=matrix.numa.get(gpu.id.upper())) for gpu in gpus.devices]
    return gpus


def _gpu_from_row(line: str) -> Gpu:
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != 6 or not cells[0].isdigit():
        message = f"nvidia-smi printed {line!r} instead of six fields of a GPU"
        raise TopologyError(message, hint="install zosim[gpu] to ask the driver directly")
    index, name, _, generation, lanes, bus_id = cells
    spec = find_device(name)
    if spec is None:
        message = f"the catalogue has no GPU {name!r}"
        raise TopologyError(message, hint="install zosim[gpu], which estimates its peaks from NVML")
    reported = [int(cell) if cell.isdigit() else None for cell in (generation, lanes)]
    link_type = _pcie_or_assumed(spec, *reported)
    return Gpu(int(index), spec, bus_id, link_type, None)
