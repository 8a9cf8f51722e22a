"""What ``rocm-smi --showtopo`` prints, matrices between GPUs and the NUMA domain of each, and the matrices of ``amd-smi topology``."""

from __future__ import annotations

import re

from topology.building import MachineBuilder, xgmi_type
from topology.errors import TopologyError
from topology.graph import Topology
from topology.importers.smi import TopoMatrix, build_matrix, gpu_specs

_TYPES = re.compile("Link Type between two GPUs|LINK TYPE TABLE:")
_COLUMN = re.compile(r"GPU\d{1,4}|[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]")
_LINE = r"^\s*GPU ?\[?(\d{1,4})\]?\s*:\s*"
_SIGNS = re.compile(rf"ROCm System Management Interface|{_TYPES.pattern}|\(Topology\) Numa")


def is_rocm(text: str) -> bool:
    """Whether a text is the output of ``rocm-smi`` or ``amd-smi``."""
    return _SIGNS.search(text) is not None


def from_rocm_smi_topo(
    text: str,
    *,
    gpu: str | None = None,
    cpu: str | None = None,
    memory: str | None = None,
    memory_bandwidth: str | None = None,
    name: str = "rocm-smi",
) -> Topology:
    """The machine behind the output of ``rocm-smi --showtopo`` or ``amd-smi topology``.

    Parameters
    ----------
    text : str
        The output; that of ``rocm-smi --showproductname`` or ``amd-smi static`` in it tells the GPUs.
    gpu, cpu : str, optional
        Catalogue or product names; `gpu` is that of all GPUs. Without `cpu` a generic one is taken.
    memory, memory_bandwidth : str, optional
        Of the host; assumed if left out.
    name : str, optional
        Name of the machine.

    Raises
    ------
    TopologyError
        If the text has no matrix of link types, or a GPU is unknown.
    """
    columns, rows = _link_types(text)
    # Older versions write "GPU 0 :"; a virtual machine that hides its domains has -1, or its bits without a sign.
    found = re.findall(rf"{_LINE}\(Topology\) Numa (?:Node|Affinity): (\d{{1,4}})\s*$", text, re.MULTILINE)
    numa = {f"GPU{index}": int(domain) for index, domain in found}
    series = re.findall(rf"{_LINE}Card (?:[Ss]eries|[Mm]odel):\s*(\S.*?)\s*$", text, re.MULTILINE)
    series += enumerate(re.findall(r"^\s*MARKET_NAME:\s*(\S.*?)\s*$", text, re.MULTILINE))
    listed = {f"GPU{index}": model for index, model in reversed(series)}
    specs = gpu_specs(columns, listed, gpu, "the rocm-smi output")
    builder = MachineBuilder(name)
    build_matrix(builder, TopoMatrix(columns, {}, {}, numa, {}), specs, cpu, memory, memory_bandwidth)
    for position, first in enumerate(columns):
        for second in columns[position + 1 :]:
            if rows[first][columns.index(second)] == "XGMI":
                builder.join(first.lower(), second.lower(), xgmi_type(specs[first]))
    if any("XGMI" in row for row in rows.values()):
        builder.notes.append(
            "How many links a pair of GPUs has, the matrix does not tell: one each is assumed."
        )
    builder.notes.append("How GPUs share PCIe switches, and their processors, the matrix does not tell.")
    return builder.build_imported(
        "Imported from rocm-smi's or amd-smi's matrix of links; PCIe widths are assumed."
    )


def _link_types(text: str) -> tuple[tuple[str, ...], dict[str, list[str]]]:
    """GPUs, and how each is joined to every other: ``XGMI`` or ``PCIE``.

    Raises TopologyError if there is no such matrix, or a row of it is missing or short.
    """
    title = _TYPES.search(text)
    lines = text[title.end() :].splitlines()[1:] if title else []
    columns: tuple[str, ...] = ()
    rows: dict[str, list[str]] = {}
    for words in (line.split() for line in lines):
        if not columns and words and all(map(_COLUMN.fullmatch, words)):
            columns = tuple(words)
        elif columns and words and words[0] in columns:
            rows[words[0]] = words[1:]
        elif words and columns:
            break
    damaged = [name for name in columns if len(rows.get(name, ())) != len(columns)]
    if not columns or damaged:
        where = f"it lacks the row of {damaged[0]}" if damaged else "there is none"
        message = f"the rocm-smi output has no whole matrix of link types: {where}"
        raise TopologyError(message, hint="paste the output of `rocm-smi --showtopo` or `amd-smi topology`")
    known = {"XGMI", "PCIE", "0", "N/A", "SELF"}
    unknown = sorted({cell for row in rows.values() for cell in row} - known)
    if unknown:
        message = f"{unknown[0]!r} is no type of link of rocm-smi's matrix"
        raise TopologyError(message, hint="known: XGMI and PCIE")
    # amd-smi has bus ids, in the order of its numbers.
    names = [name if name.startswith("GPU") else f"GPU{index}" for index, name in enumerate(columns)]
    return tuple(names), dict(zip(names, (rows[name] for name in columns), strict=True))
