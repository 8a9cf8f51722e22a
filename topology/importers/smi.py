"""The matrix that ``nvidia-smi topo -m`` prints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from topology.building import (
    MAX_PROCESSORS,
    MachineBuilder,
    assumed_memory,
    connector_type,
    cores_of,
    generic_cpu,
    pcie_type,
    require_device,
)
from topology.documents import catalogue
from topology.errors import TopologyError
from topology.graph import Topology
from topology.importers.pairs import Endpoint, Pair, attach, join_nvlinks

CODES = ("X", "PIX", "PXB", "PHB", "NODE", "SYS")
_DEVICE = re.compile(r"^(GPU\d+|NIC\d+|mlx\d+_\d+|(?:ib|roce|bnxt)\S*)$")
_MAX_DIGITS = 9
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class TopoMatrix:
    """What ``nvidia-smi topo -m`` tells.

    Attributes
    ----------
    devices : tuple of str
        Row names, GPUs and adapters.
    levels : mapping of pair to str
        PIX, PXB, PHB, NODE or SYS; pairs joined by NVLink are missing.
    nvlinks : mapping of (name, name) to int
        NVLinks of a pair of GPUs.
    numa : mapping of str to int
        NUMA domain of the GPUs for which one is printed.
    cores : mapping of int to int
        Physical cores per NUMA domain.
    """

    devices: tuple[str, ...]
    levels: dict[Pair, str]
    nvlinks: dict[tuple[str, str], int]
    numa: dict[str, int]
    cores: dict[int, int]

    @property
    def gpus(self) -> tuple[str, ...]:
        """Rows that are GPUs."""
        return tuple(name for name in self.devices if name.startswith("GPU"))


def parse_topo_matrix(text: str) -> TopoMatrix:
    """Read the output of ``nvidia-smi topo -m``.

    Raises
    ------
    TopologyError
        If there is no matrix, a row is short, or a code is unknown.
    """
    lines = [_ANSI.sub("", line).rstrip() for line in text.splitlines()]
    columns = _header(lines)
    known, rows = set(columns), {}
    for line in lines:
        name = line.split()[0] if line.split() else ""
        cells = _split(line)
        if name in known and len(cells) > 1 and cells[0] == name and cells[1] not in known:
            rows[name] = cells[1:]
    missing = [name for name in columns if name not in rows]
    if missing:
        message = f"the nvidia-smi matrix has no row for {', '.join(missing[:8])}"
        raise TopologyError(message, hint="paste the whole output of `nvidia-smi topo -m`")
    return _read_rows(columns, rows)


def _split(line: str) -> list[str]:
    """Cells of a row: by tabs where there are any, since affinity cells may be empty, else by spaces."""
    cells = line.split("\t") if "\t" in line else re.split(r"\s+", line.strip())
    return [cell.strip() for cell in cells]


def _header(lines: list[str]) -> list[str]:
    for line in lines:
        words = line.split()
        if words and words[0] == "GPU0" and not any(word in CODES for word in words):
            return [word for word in words if _DEVICE.match(word)]
    message = "there is no matrix that starts with GPU0 in the nvidia-smi output"
    raise TopologyError(message, hint="paste the output of `nvidia-smi topo -m`")


def _read_rows(columns: list[str], rows: dict[str, list[str]]) -> TopoMatrix:
    levels: dict[Pair, str] = {}
    nvlinks: dict[tuple[str, str], int] = {}
    numa: dict[str, int] = {}
    cpus: dict[int, int] = {}
    for name in columns:
        cells = rows[name]
        if len(cells) < len(columns):
            message = f"row {name} of the nvidia-smi matrix has {len(cells)} cells, not {len(columns)}"
            raise TopologyError(message, hint="a line may have been wrapped when it was copied")
        for other, code in zip(columns, cells, strict=False):
            _read_cell(name, other, code, levels, nvlinks)
        affinity, domain = _affinity(cells[len(columns) :])
        if domain is not None:
            numa[name] = domain
            cpus[domain] = max(cpus.get(domain, 0), affinity)
    return TopoMatrix(tuple(columns), levels, nvlinks, numa, cpus)


def _read_cell(
    name: str,
    other: str,
    code: str,
    levels: dict[Pair, str],
    nvlinks: dict[tuple[str, str], int],
) -> None:
    if re.fullmatch(r"NV\d+", code):
        if (other, name) not in nvlinks:
            nvlinks[name, other] = _number(code[2:], "NVLinks")
    elif code not in CODES:
        message = f"{code!r} between {name} and {other} is no code of nvidia-smi's matrix"
        raise TopologyError(message, hint=f"known: NV# and {', '.join(CODES)}")
    elif code != "X":
        levels[frozenset({name, other})] = code


def _affinity(cells: list[str]) -> tuple[int, int | None]:
    """Physical cores and NUMA domain printed after the matrix; None where there is none."""
    filled = [cell for cell in cells if cell]
    if not filled or not re.fullmatch(r"[\d,-]+", filled[0]):
        return 0, None
    num_cores = cores_of(parse_cpu_list(filled[0]))
    domain = re.match(r"\d+", filled[1] if len(filled) > 1 else "0")
    return num_cores, None if domain is None else _number(domain[0], "NUMA domains")


def _number(digits: str, what: str) -> int:
    """Return a number of the matrix.

    Raises
    ------
    TopologyError
        If it is too large for any machine.
    """
    if len(digits) > _MAX_DIGITS:
        message = f"{digits[:_MAX_DIGITS]}... is a number of more than {_MAX_DIGITS} digits, of {what} in the nvidia-smi matrix"
        raise TopologyError(message)
    return int(digits)


def parse_cpu_list(text: str) -> Iterator[int]:
    """Members of a list as the kernel writes it.

    Examples
    --------
    >>> list(parse_cpu_list("0-2,8"))
    [0, 1, 2, 8]

    Raises
    ------
    TopologyError
        If it names more processors than any machine has.
    """
    num_processors = 0
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        members = range(_number(first, "processors"), _number(last or first, "processors") + 1)
        num_processors += len(members)
        if num_processors > MAX_PROCESSORS:
            message = f"a list of processors names {num_processors} of them with {members[-1]}"
            raise TopologyError(message, hint=f"no more than {MAX_PROCESSORS} are read")
        yield from members


def from_nvidia_smi_topo(
    text: str,
    *,
    gpu: str | None = None,
    cpu: str | None = None,
    memory: str | None = None,
    memory_bandwidth: str | None = None,
    pcie_generation: int | None = None,
    name: str = "nvidia-smi",
) -> Topology:
    """The machine behind the output of ``nvidia-smi topo -m``.

    Parameters
    ----------
    text : str
        The output; lines of ``nvidia-smi -L`` in it tell the GPU.
    gpu, cpu : str, optional
        Catalogue or product names. Without `cpu` a generic one is taken.
    memory, memory_bandwidth : str, optional
        Of the host; assumed if left out.
    pcie_generation : int, optional
        Of the GPUs' links; that of the GPU's architecture if left out. Width is taken as x16.
    name : str, optional
        Name of the machine.

    Raises
    ------
    TopologyError
        If the text holds no such matrix, or the GPU is unknown.
    """
    matrix = parse_topo_matrix(text)
    listed = re.search(r"^GPU \d+: (.+?) \(UUID", text, re.MULTILINE)
    spec = require_device(gpu or (listed[1] if listed else None), "gpu", "the nvidia-smi matrix")
    builder = MachineBuilder(name)
    builder.add_node("host0", "host")
    num_domains = max([*matrix.numa.values(), 0]) + 1
    numas = [
        builder.add_numa(index, "host0", assumed_memory(memory, memory_bandwidth, num_domains))
        for index in range(num_domains)
    ]
    for index, numa in enumerate(numas):
        cores = max(1, matrix.cores.get(index, 16))
        spec_cpu = (
            require_device(cpu, "cpu", "the command")
            if cpu
            else generic_cpu(index, cores, "CPU affinity of the nvidia-smi matrix")
        )
        builder.add_cpu(index, "host0", [numa], spec_cpu)
    if len(numas) > 1:
        builder.join_numas(numas, catalogue().link_types["xgmi-milan"])
        builder.notes.append("The link between NUMA domains is assumed to be that of AMD's Milan.")
    link_type = connector_type(spec) if pcie_generation is None else pcie_type(pcie_generation, 16)
    endpoints = [
        Endpoint(
            device.lower(),
            {"kind": "gpu", "index": _number(device[3:], "GPUs"), "spec": spec}
            if device.startswith("GPU")
            else {"kind": "nic"},
            link_type,
            numas[_numa_of(device, matrix)],
        )
        for device in matrix.devices
    ]
    levels = {frozenset(name.lower() for name in pair): code for pair, code in matrix.levels.items()}
    attach(builder, endpoints, levels)
    nvlinks = {(a.lower(), b.lower()): count for (a, b), count in matrix.nvlinks.items()}
    if nvlinks:
        join_nvlinks(builder, nvlinks, spec.nvlink)
    return builder.build("Imported from `nvidia-smi topo -m`; PCIe widths are assumed.")


def _numa_of(device: str, matrix: TopoMatrix) -> int:
    """The NUMA domain of a device; that of the GPU nearest to it where none is printed."""
    if device in matrix.numa:
        return matrix.numa[device]
    for code in CODES[1:-1]:
        for gpu in matrix.gpus:
            if matrix.levels.get(frozenset({device, gpu})) == code and gpu in matrix.numa:
                return matrix.numa[gpu]
    return 0
