"""The matrix that ``nvidia-smi topo -m`` prints."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from topology.building import (
    MAX_PROCESSORS,
    MachineBuilder,
    assumed_memory,
    connector_type,
    cores_of,
    generic_cpu,
    require_device,
)
from topology.documents import catalogue
from topology.errors import TopologyError
from topology.graph import Topology
from topology.importers.pairs import Endpoint, Pair, attach, join_nvlinks
from topology.schema import DeviceSpec

CODES = ("X", "PIX", "PXB", "PHB", "NODE", "SYS")
OLDER_CODES = {"PSB": "PIX", "INT": "PIX", "SOC": "SYS", "NVB": "SYS"}
"""What other versions print: one switch on a board, the sockets' link, and NVLinks by way of a third GPU, which carry nothing
between these two."""
_HEADINGS = re.compile(r"\b(CPU Affinity|NUMA Affinity|GPU NUMA ID|Memory Affinity)\b")
_NOT_DEVICES = frozenset({"CPU", "NUMA", "GPU", "Memory"})
_CPU_LIST = re.compile(r"\d+([,-]\d+)*")
_CELL = re.compile(r"[A-Z]{1,4}|NV\d+|N/A|\d.*")
_COLUMN = re.compile(r"GPU\d+|CPU|NUMA|GPU")
_MAX_DIGITS = 9
_MOST_NUMBERED = 2**17
"""Numbers of processors end below."""
_ANSI = re.compile(r"(?:\x1b|\^\[)?\[[0-9;]*m")
"""Colours and underlines; a paste may have lost their first character."""
_CORES = 16
"""Assumed of a domain of which no GPU's row tells the processors."""


@dataclass(frozen=True, slots=True)
class TopoMatrix:
    """What ``nvidia-smi topo -m`` tells."""

    devices: tuple[str, ...]
    levels: dict[Pair, str]  # PIX, PXB, PHB, NODE or SYS; pairs joined by NVLink are missing
    nvlinks: dict[tuple[str, str], int]  # NVLinks of a pair of GPUs
    # NUMA domain of the GPUs for which one is printed, or that a list of processors tells apart.
    numa: dict[str, int]
    cores: dict[int, int]  # physical cores per NUMA domain
    # GPUs whose memory is a NUMA domain of its own (GPU NUMA ID), as behind NVLink-C2C.
    coherent: frozenset[str] = frozenset()

    @property
    def gpus(self) -> tuple[str, ...]:
        """Rows that are GPUs."""
        return tuple(name for name in self.devices if re.fullmatch(r"GPU\d+", name))


@dataclass
class _Table:
    """A matrix in a text: names and headings above it, and the cells of its rows."""

    columns: list[str]
    headings: list[str]
    rows: dict[str, list[str]] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)
    """Rows of GPUs that are no column."""


def parse_topo_matrix(text: str) -> TopoMatrix:
    """Read the output of ``nvidia-smi topo -m``.

    A paste may hold other matrices beside it: that of ``topo -p2p`` is passed over, that of ``topo -mp`` tells where in the PCIe
    tree pairs with NVLinks are.

    Raises TopologyError if there is no matrix, a row is short, or a code is unknown.
    """
    tables = _tables(text)
    first, *others = [table for table in tables if _is_of_codes(table)] or tables
    missing = [name for name in first.columns if name not in first.rows]
    if missing or first.others or len(set(first.columns)) < len(first.columns):
        what = f"no row for {', '.join(missing[:8])}" if missing else "two columns of one name"
        if first.others:
            what = f"a row for {', '.join(first.others[:8])}, but no such column: its lines may have been wrapped when they were copied"
        message = f"the nvidia-smi matrix has {what}"
        raise TopologyError(message, hint="paste the whole output of `nvidia-smi topo -m`")
    matrix = _read_rows(first)
    for other in others:
        if other.columns == first.columns and other.rows.keys() == first.rows.keys() and _is_of_codes(other):
            matrix.levels.update(_read_rows(other).levels)
    return matrix


def _tables(text: str) -> list[_Table]:
    """Matrices of a text, each from its line of names to the next."""
    tables: list[_Table] = []
    for line in (_ANSI.sub("", line).rstrip() for line in text.splitlines()):
        words = line.split()
        # A line that begins with GPU0 is a row if a cell of the matrix follows, else the line of names.
        is_row = len(words) > 1 and _CELL.fullmatch(words[1]) and not _COLUMN.fullmatch(words[1])
        if words and words[0] == "GPU0" and not is_row:
            devices = list(itertools.takewhile(lambda word: word not in _NOT_DEVICES, words))
            tables.append(_Table(devices, _HEADINGS.findall(line)))
        elif words and tables and words[0] in tables[-1].columns:
            # By tabs where there are any, since cells of affinities may be empty.
            cells = [cell.strip() for cell in (line.split("\t") if "\t" in line else words)]
            if cells[0] == words[0] and len(cells) > 1:
                tables[-1].rows.setdefault(words[0], cells[1:])
        elif (
            tables
            and re.fullmatch(r"GPU\d+", "".join(words[:1]))
            and _is_codes(words[1 : 1 + len(tables[-1].columns)])
        ):
            tables[-1].others.append(words[0])
    if not tables:
        message = "there is no matrix of nvidia-smi, rocm-smi or amd-smi in it: no line begins with GPU0"
        gpus = Counter(
            re.findall(r"^(?:\| +\d+ +(?=NVIDIA)|GPU \d+: )(.+?)(?: {2,}| \(UUID)", text, re.MULTILINE)
        )
        names = " or ".join(f"--hardware '{count}x {name}'" for name, count in gpus.items())
        listed = f"this lists GPUs alone: plan with {names}, or " if names else ""
        hint = f"{listed}paste the output of `nvidia-smi topo -m`; other tools' are read as XML of hwloc (lstopo) or NCCL"
        raise TopologyError(message, hint=hint)
    return tables


def _is_of_codes(table: _Table) -> bool:
    """Whether the cells are codes of how devices are joined, not of what they can do to each other."""
    cells = [cell for name, row in table.rows.items() for cell in row[: len(table.columns)] if name]
    return _is_codes(cells) and (set(cells) != {"X"} or len(table.columns) == 1)


def _is_codes(cells: list[str]) -> bool:
    return all(cell in CODES or cell in OLDER_CODES or re.fullmatch(r"NV\d+", cell) for cell in cells)


def _read_rows(table: _Table) -> TopoMatrix:
    levels: dict[Pair, str] = {}
    nvlinks: dict[tuple[str, str], int] = {}
    numa: dict[str, int] = {}
    cpus: dict[str, frozenset[int]] = {}
    coherent = set()
    columns = table.columns
    for name in columns:
        cells = table.rows[name]
        if len(cells) < len(columns):
            message = f"row {name} of the nvidia-smi matrix has {len(cells)} cells, not {len(columns)}"
            raise TopologyError(message, hint="a line may have been wrapped when it was copied")
        for other, cell in zip(columns, cells, strict=False):
            code, pair = OLDER_CODES.get(cell, cell), frozenset({name, other})
            if re.fullmatch(r"NV\d+", code):
                count = _number(code[2:], "NVLinks")
                if nvlinks.get((other, name), count) != count:
                    _refuse_contradiction(other, name, f"NV{nvlinks[other, name]}", code)
                if (other, name) not in nvlinks and name != other:
                    nvlinks[name, other] = count
            elif code not in CODES:
                message = f"{code!r} between {name} and {other} is no code of nvidia-smi's matrix"
                raise TopologyError(message, hint=f"known: NV# and {', '.join(CODES)}")
            elif code != "X" and name != other and levels.setdefault(pair, code) != code:
                _refuse_contradiction(other, name, levels[pair], code)
            if pair in levels and (links := nvlinks.get((other, name)) or nvlinks.get((name, other))):
                _refuse_contradiction(other, name, f"NV{links}", levels[pair])
        tail = _affinities(cells[len(columns) :], table.headings)
        if _CPU_LIST.fullmatch(listed := tail.get("CPU Affinity", "")):
            cpus[name] = frozenset(parse_cpu_list(listed))
        if printed := re.match(r"\d+", tail.get("NUMA Affinity", "")):
            numa[name] = _number(printed[0], "NUMA domains")
        if re.fullmatch(r"\d+", tail.get("GPU NUMA ID", "")):
            coherent.add(name)
    cores = {domain: cores_of(members) for domain, members in _domains(numa, cpus).items() if members}
    return TopoMatrix(tuple(columns), levels, nvlinks, numa, cores, frozenset(coherent))


def _refuse_contradiction(first: str, second: str, one: str, other: str) -> NoReturn:
    message = f"the nvidia-smi matrix has {one} between {first} and {second} in one row, {other} in the other"
    raise TopologyError(message, hint="paste the whole output of `nvidia-smi topo -m`")


def _domains(numa: dict[str, int], cpus: Mapping[str, frozenset[int]]) -> dict[int, frozenset[int]]:
    """The processors of each NUMA domain; GPUs without a printed one are put into that of their processors."""
    members: dict[int, frozenset[int]] = {}
    for name, domain in numa.items():
        members[domain] = members.get(domain, frozenset()) | cpus.get(name, frozenset())
    rest = [name for name in cpus if name not in numa and cpus[name]]
    for name in sorted(rest, key=lambda name: min(cpus[name])):
        near = (domain for domain, known in members.items() if known & cpus[name])
        fresh = (number for number in itertools.count() if number not in members)
        numa[name] = next(itertools.chain(near, fresh))
        members[numa[name]] = members.get(numa[name], frozenset()) | cpus[name]
    return members


def _affinities(cells: list[str], headings: list[str]) -> dict[str, str]:
    """What is printed after the matrix, by its heading.

    ``nvidia-smi`` leaves a cell empty where none of the processors near a GPU may be used, and has a tab too many before the last
    column. Without tabs, an empty cell is told by what the next one looks like.
    """
    names = ["CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]
    filled = [cell for cell in cells if cell][: len(names)]
    if len(filled) > len(headings):
        headings = names[: len(filled)]
    if len(filled) == len(headings):
        return dict(zip(headings, filled, strict=True))
    if "".join(cells[:1]) and len(cells) > len(filled):
        last = [cell for cell in cells[2:] if cell][-1:] if len(headings) == len(names) else []
        return {**dict(zip(headings, cells[:2], strict=False)), **dict(zip(names[2:], last, strict=False))}
    from_left = bool(filled) and re.search(r"[,-]", filled[0].removeprefix("N/A")) is not None
    kept = headings[: len(filled)] if from_left else headings[len(headings) - len(filled) :]
    return dict(zip(kept, filled, strict=True))


def _number(digits: str, what: str) -> int:
    """Return a number of the matrix.

    Raises TopologyError if it is too large for any machine.
    """
    if len(digits) > _MAX_DIGITS:
        message = f"{digits[:_MAX_DIGITS]}... is a number of more than {_MAX_DIGITS} digits, of {what} in the nvidia-smi matrix"
        raise TopologyError(message)
    return int(digits)


def parse_cpu_list(text: str) -> Iterator[int]:
    """Members of a list as the kernel writes it.

    >>> list(parse_cpu_list("0-2,8"))
    [0, 1, 2, 8]

    Raises TopologyError if it names more processors than any machine has.
    """
    num_processors = 0
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        members = range(_number(first, "processors"), _number(last or first, "processors") + 1)
        num_processors += len(members)
        if num_processors > MAX_PROCESSORS or members.stop > _MOST_NUMBERED:
            message = f"a list of processors names {num_processors} of them with {members.stop - 1}"
            raise TopologyError(message, hint=f"no more than {MAX_PROCESSORS} are read")
        yield from members


def from_nvidia_smi_topo(
    text: str,
    *,
    gpu: str | None = None,
    cpu: str | None = None,
    memory: str | None = None,
    memory_bandwidth: str | None = None,
    name: str = "nvidia-smi",
) -> Topology:
    """The machine behind the output of ``nvidia-smi topo -m``.

    Parameters
    ----------
    text : str
        The output; lines of ``nvidia-smi -L`` in it tell the GPUs.
    gpu, cpu : str, optional
        Catalogue or product names; `gpu` is that of all GPUs. Without `cpu` a generic one is taken.
    memory, memory_bandwidth : str, optional
        Of the host; assumed if left out.
    name : str, optional
        Name of the machine.

    Raises
    ------
    TopologyError
        If the text holds no such matrix, or a GPU is unknown.
    """
    matrix = parse_topo_matrix(text)
    # As `nvidia-smi -L` has them, or as torch and others list their environment: "GPU 0,1: NVIDIA L4".
    lines = re.findall(r"^GPU (\d[\d,]*): (.+?)(?: \(UUID.*)?$", text, re.MULTILINE)
    listed = {f"GPU{index}": model for indices, model in lines for index in indices.split(",")}
    specs = gpu_specs(matrix.gpus, listed, gpu, "the nvidia-smi matrix")
    builder = MachineBuilder(name)
    if parts := re.findall(r"^\s*MIG \S+\s+Device", text, re.MULTILINE):
        builder.notes.append(f"GPUs are divided (MIG) into {len(parts)} parts; whole GPUs are described.")
    build_matrix(builder, matrix, specs, cpu, memory, memory_bandwidth)
    return builder.build_imported("Imported from `nvidia-smi topo -m`; PCIe widths are assumed.")


def gpu_specs(
    gpus: tuple[str, ...], listed: Mapping[str, str], gpu: str | None, where: str
) -> dict[str, DeviceSpec]:
    """What each GPU is: what the user names, or what a listing says of it; all as one where it has one kind.

    Raises TopologyError if a GPU is neither named nor listed, or not in the catalogue.
    """
    models = set(listed.values())
    only = models.pop() if len(models) == 1 else None
    unlisted = [name for name in gpus if name not in listed]
    if gpu is None and unlisted and models:
        message = f"{where} lists several kinds of GPU, and not what {', '.join(unlisted[:8])} is"
        raise TopologyError(message, hint="paste the whole output of `nvidia-smi -L` with it")
    return {name: require_device(gpu or listed.get(name, only), "gpu", where) for name in gpus}


def build_matrix(
    builder: MachineBuilder,
    matrix: TopoMatrix,
    specs: Mapping[str, DeviceSpec],
    cpu: str | None,
    memory: str | None,
    memory_bandwidth: str | None,
) -> None:
    """Add a host with all that a matrix tells of it; parameters as of :func:`from_nvidia_smi_topo`.

    `specs`: by the rows that are GPUs.

    Raises TopologyError if there are too many devices, or something is not known to the catalogue.
    """
    types = catalogue().link_types
    hidden = [name for name in matrix.gpus if name not in matrix.numa]
    if hidden:
        what = ", ".join(hidden[:8]) if len(hidden) < len(matrix.gpus) else "the GPUs"
        builder.notes.append(f"The NUMA domain of {what} is hidden; the first is assumed.")
    num_domains = max([*matrix.numa.values(), 0]) + 1
    domain_of = {device: _numa_of(device, matrix) for device in matrix.devices}
    # A GPU whose memory is a NUMA domain hangs on a Grace from the fourth generation of NVLink on, before on a POWER.
    behind_c2c = [
        name
        for name in matrix.gpus
        if name in matrix.coherent and (ports := specs[name].nvlink) and ports.generation >= 4
    ]
    graces = {domain_of[name] for name in behind_c2c}
    numas = []
    for index in range(num_domains):
        is_grace = index in graces
        fields = assumed_memory(
            memory, memory_bandwidth, num_domains, list(specs.values()), is_grace=is_grace
        )
        numas.append(builder.add_numa(index, fields))
        if cpu:
            processor = require_device(cpu, "cpu", "the command")
        else:
            processor = generic_cpu(index, matrix.cores.get(index, _CORES), "CPU affinity of the matrix")
        builder.add_cpu(index, numas[-1:], processor)
    if len(numas) > 1:
        builder.join_numas(numas, types["xgmi-milan"])
        builder.notes.append("The link between NUMA domains is assumed to be that of AMD's Milan.")
    first_spec = next(iter(specs.values()))
    endpoints = []
    for device in matrix.devices:
        fields = {"node_type": "nic"}
        if device in specs:
            fields = {"node_type": "gpu", "index": _number(device[3:], "GPUs"), "spec": specs[device]}
        # The slot of an adapter is taken to be as that of the first GPU.
        slot = connector_type(specs.get(device, first_spec))
        endpoints.append(Endpoint(device.lower(), fields, slot, numas[domain_of[device]]))
    levels = {frozenset(name.lower() for name in pair): code for pair, code in matrix.levels.items()}
    attach(builder, endpoints, levels)
    for device in behind_c2c:
        builder.join(numas[domain_of[device]], device.lower(), types["nvlink-c2c"])
    nvlinks = {(a.lower(), b.lower()): count for (a, b), count in matrix.nvlinks.items()}
    if nvlinks:
        lacking = sorted({spec.name for spec in specs.values() if spec.nvlink is None})
        if lacking:
            builder.notes.append(
                f"The matrix has NVLinks, and {', '.join(lacking)} has none: is this the right GPU?"
            )
        known = (specs[name].nvlink for pair in matrix.nvlinks for name in pair if name in specs)
        join_nvlinks(builder, nvlinks, next(filter(None, known), None))


def _numa_of(device: str, matrix: TopoMatrix) -> int:
    """The NUMA domain of a device; that of the GPU nearest to it where none is printed."""
    if device in matrix.numa:
        return matrix.numa[device]
    for code in CODES[1:-1]:
        for gpu in matrix.gpus:
            if matrix.levels.get(frozenset({device, gpu})) == code and gpu in matrix.numa:
                return matrix.numa[gpu]
    return 0
