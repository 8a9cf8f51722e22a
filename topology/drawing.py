"""A machine as a picture: hosts as boxes, links with their bandwidth."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from topology.errors import TopologyError
from topology.graph import Topology
from topology.printable import one_line
from topology.schema import Link, Node
from topology.units import format_bandwidth, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Picture

# A row per type, from the memory at the top down to the network; NVSwitches stand below the GPUs they join.
ROWS: Final = MappingProxyType(
    {
        "memory": 0,
        "cpu": 0,
        "numa": 1,
        "pcie_root": 2,
        "pcie_switch": 3,
        "nic": 4,
        "disk": 4,
        "gpu": 4,
        "nvswitch": 5,
    }
)
# Okabe and Ito's palette, which people with colour vision deficiencies can tell apart.
COLORS: Final = MappingProxyType(
    {
        "memory": "#f0e442",
        "cpu": "#56b4e9",
        "numa": "#dddddd",
        "pcie_root": "#cccccc",
        "pcie_switch": "#cccccc",
        "nic": "#cc79a7",
        "disk": "#e69f00",
        "gpu": "#4db892",
        "nvswitch": "#e69f00",
        "network": "#cc79a7",
    }
)
LINK_COLORS: Final = MappingProxyType(
    {
        "nvlink": "#009e73",
        "c2c": "#004d38",
        "pcie": "#0072b2",
        "socket": "#d55e00",
        "network": "#b0578d",
        "storage": "#e69f00",
        "fabric": "#999999",
        "memory": "#999999",
    }
)
NODE_WIDTH, NODE_HEIGHT, COLUMN, ROW = 1.55, 0.62, 1.95, 1.3
LEGEND_HEIGHT = 1.0
MAX_NODES = 600
FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Layout:
    """Where nodes stand, how wide they are, and the boxes of the hosts as (x, y, width, height)."""

    positions: dict[str, tuple[float, float]]
    widths: dict[str, float]
    boxes: dict[str, tuple[float, float, float, float]]


def draw(topology: Topology, path: str | Path) -> Path:
    """Draw a machine into a PNG, SVG or PDF file and return its path.

    Parameters
    ----------
    topology : Topology
        Machine of at most 600 nodes.
    path : str or Path
        File to write; its ending chooses the format.

    Raises
    ------
    TopologyError
        If the file's ending is no known format, the file cannot be written, or the machine has too many nodes.
    """
    file = Path(path)
    if file.suffix.lower() not in FORMATS:
        message = f"cannot draw to {str(path)!r}: unknown format {file.suffix!r}"
        raise TopologyError(message, hint=f"use a name that ends with one of {', '.join(FORMATS)}")
    if len(topology.nodes) > MAX_NODES:
        message = f"{topology.name!r} has {len(topology.nodes)} nodes, too many for a picture"
        raise TopologyError(message, hint=f"draw one of its hosts, with at most {MAX_NODES} nodes")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Picture

    layout = arrange(topology)
    xs, ys = zip(*layout.positions.values(), strict=True)
    left, right, top = min(xs) - 1.5, max(xs) + 1.5, max(ys) + 1.7
    # Arcs between GPUs reach below the lowest row, to where their host's box ends; the legend stands below all of it.
    bottom = min([min(ys) - NODE_HEIGHT, *(y for _, y, _, _ in layout.boxes.values())]) - LEGEND_HEIGHT
    picture = Picture(figsize=(max(6.5, 0.75 * (right - left)), max(4.0, 0.8 * (top - bottom) + 0.8)))
    FigureCanvasAgg(picture)
    axes = picture.add_axes((0, 0, 1, 1))
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)
    axes.axis("off")
    _draw_hosts(axes, topology, layout)
    _draw_links(axes, topology, layout)
    for node in topology.nodes:
        if node.id in layout.positions:
            _draw_node(axes, node, layout.positions[node.id], layout.widths[node.id])
    _write(axes, left + 0.45, top - 0.35, topology.name, fontsize=14, fontweight="bold", va="center")
    _legend(axes, topology)
    _save(picture, file)
    return file


def _save(picture: Picture, file: Path) -> None:
    try:
        picture.savefig(file, dpi=150)
    except OSError as error:
        raise TopologyError(f"cannot write {str(file)!r}: {error.strerror}") from error


def arrange(topology: Topology) -> Layout:
    """Place each host's nodes in rows by type, hosts side by side, networks below as bars."""
    layout = Layout({}, {}, {})
    offset = 0.0
    for host in topology.hosts:
        rows = _rows(topology, [node for node in topology.nodes if node.host == host.id])
        widest = COLUMN * max((len(names) for names in rows.values()), default=1)
        for depth, (_, names) in enumerate(sorted(rows.items())):
            for place, name in enumerate(names):
                layout.positions[name] = offset + widest * (place + 0.5) / len(names), -ROW * depth
                is_bar = topology.node(name).type == "nvswitch"
                layout.widths[name] = widest / len(names) - 0.4 if is_bar else NODE_WIDTH
        arcs = [
            abs(layout.positions[link.source][0] - layout.positions[link.target][0])
            for link in topology.links
            if _is_mesh(topology, link) and topology.node(link.source).host == host.id
        ]
        # Arcs between the host's GPUs reach below the lowest row.
        lowest = -ROW * max(len(rows) - 1, 0) - (_arc_depth(max(arcs)) + 0.1 if arcs else 0.0)
        layout.boxes[host.id] = (
            offset - 0.15,
            lowest - NODE_HEIGHT,
            widest + 0.3,
            -lowest + 2 * NODE_HEIGHT + 0.35,
        )
        offset += widest + 1.1
    bottom = min((box[1] for box in layout.boxes.values()), default=0.0)
    outside = [node.id for node in topology.nodes if node.host is None and node.type != "host"]
    for place, name in enumerate(outside):
        layout.positions[name] = (offset - 1.1) / 2, bottom - 1.1 - ROW * place
        layout.widths[name] = max(offset - 1.5, NODE_WIDTH)
    return layout


def _is_mesh(topology: Topology, link: Link) -> bool:
    """Whether a link joins two GPUs of one row."""
    ends = [topology.node(end) for end in (link.source, link.target)]
    return all(end.type == "gpu" for end in ends) and ends[0].host == ends[1].host


def _arc_depth(span: float) -> float:
    return 0.5 + 0.28 * span / COLUMN


def _rows(topology: Topology, members: list[Node]) -> dict[int, list[str]]:
    """Nodes per row, each row ordered by where the nodes that its own hang on stand."""
    rows: dict[int, list[str]] = {}
    for node in members:
        rows.setdefault(ROWS[node.type], []).append(node.id)
    place: dict[str, float] = {}
    # NUMA domains keep file order and give the order to what stands above and below them.
    for row in sorted(rows, key=lambda row: (abs(row - 1), row)):
        names = rows[row]
        order = {}
        for position, name in enumerate(names):
            links = [
                link
                for link in topology.links_of(name)
                if link.type.technology in {"pcie", "fabric", "memory"}
            ]
            near = [place[end] for link in links if (end := link.other_end(name)) in place]
            order[name] = sum(near) / len(near) if near else float(position)
        rows[row] = sorted(names, key=lambda name: (order[name], names.index(name)))
        for position, name in enumerate(rows[row]):
            place[name] = (position + 0.5) / len(names)
    return rows


def _write(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    """Write a name as it is: no formula, and nothing that a picture cannot hold."""
    axes.text(x, y, one_line(text), parse_math=False, **style)


def _draw_hosts(axes: Axes, topology: Topology, layout: Layout) -> None:
    from matplotlib.patches import FancyBboxPatch

    for host in topology.hosts:
        x, y, width, height = layout.boxes[host.id]
        style = "round,pad=0.08,rounding_size=0.2"
        box = FancyBboxPatch(
            (x, y), width, height, boxstyle=style, fc="#f7f7f7", ec="#888888", lw=1.2, zorder=0
        )
        axes.add_patch(box)
        title = host.id if host.label is None else f"{host.id}: {host.label}"
        _write(axes, x + 0.1, y + height - 0.02, title, fontsize=10, va="top", color="#444444", zorder=5)


def _draw_node(axes: Axes, node: Node, position: tuple[float, float], width: float) -> None:
    from matplotlib.patches import FancyBboxPatch

    x, y = position
    style = "round,pad=0.02,rounding_size=0.1"
    corner = (x - width / 2, y - NODE_HEIGHT / 2)
    colors: dict[str, Any] = {"fc": COLORS[node.type], "ec": "#444444"}
    axes.add_patch(FancyBboxPatch(corner, width, NODE_HEIGHT, boxstyle=style, lw=0.8, zorder=3, **colors))
    name, detail = node.id.rsplit("/", maxsplit=1)[-1], _detail(node)
    centred: dict[str, Any] = {"ha": "center", "va": "center", "zorder": 4}
    _write(axes, x, y + (0.12 if detail else 0), name, fontsize=9, fontweight="bold", **centred)
    if detail:
        _write(axes, x, y - 0.15, detail, fontsize=6.5, **centred)


def _detail(node: Node) -> str:
    if node.type == "memory":
        return f"{format_bytes(node.memory_bytes)}, {format_bandwidth(node.bandwidth_bytes_per_s)}"
    if node.spec is not None:
        name = node.spec.name
        for brand in ("NVIDIA GeForce ", "NVIDIA ", "AMD ", "Intel "):
            name = name.removeprefix(brand)
        return name if len(name) <= 24 else f"{name[:23]}…"
    return node.label or {"pcie_root": "PCIe root", "pcie_switch": "PCIe switch"}.get(node.type, "")


def _draw_links(axes: Axes, topology: Topology, layout: Layout) -> None:
    # In a wide row one label stands for all links of a type; alone, each link has its own.
    crowded = Counter((link.type.name, _depths(link, layout)) for link in topology.links)
    labelled: set[object] = set()
    for link in topology.links:
        key = (link.type.name, link.count, _depths(link, layout), topology.node(link.source).host)
        is_mesh = _is_mesh(topology, link)
        wanted = is_mesh or crowded[link.type.name, _depths(link, layout)] <= 4 or key not in labelled
        labelled.add(key)
        if is_mesh:
            _draw_arc(axes, link, layout)
        else:
            _draw_line(axes, link, layout, wanted and math.isfinite(link.bandwidth_bytes_per_s))


def _depths(link: Link, layout: Layout) -> tuple[float, float]:
    low, high = sorted(layout.positions[end][1] for end in (link.source, link.target))
    return low, high


def _draw_line(axes: Axes, link: Link, layout: Layout, labelled: bool) -> None:
    (x0, y0), (x1, y1) = layout.positions[link.source], layout.positions[link.target]
    at = 0.5
    # A bar is met straight above or below the other end, and its links are labelled next to it.
    if layout.widths[link.target] > NODE_WIDTH:
        x1, at = x0, 1 - 0.65 / max(abs(y1 - y0), 1.3)
    elif layout.widths[link.source] > NODE_WIDTH:
        x0, at = x1, 0.65 / max(abs(y1 - y0), 1.3)
    axes.plot([x0, x1], [y0, y1], color=LINK_COLORS[link.type.technology], lw=_line_width(link), zorder=1)
    if labelled:
        _label(axes, link, x0 + at * (x1 - x0), y0 + at * (y1 - y0))


def _draw_arc(axes: Axes, link: Link, layout: Layout) -> None:
    """A link between two GPUs of a row, as an arc below them whose depth grows with their distance."""
    import numpy as np

    (x0, y0), (x1, _) = sorted(layout.positions[end] for end in (link.source, link.target))
    depth = _arc_depth(x1 - x0)
    angle = np.linspace(0, np.pi, 60)
    x = (x0 + x1) / 2 - (x1 - x0) / 2 * np.cos(angle)
    y = y0 - NODE_HEIGHT / 2 - depth * np.sin(angle)
    axes.plot(x, y, color=LINK_COLORS[link.type.technology], lw=_line_width(link), zorder=1, alpha=0.85)
    _label(axes, link, (x0 + x1) / 2, y0 - NODE_HEIGHT / 2 - depth)


def _line_width(link: Link) -> float:
    if math.isinf(link.bandwidth_bytes_per_s):
        return 1.0
    return min(5.0, 0.8 + 0.7 * math.log10(max(link.bandwidth_bytes_per_s / 1e9, 1.0)) * 1.6)


def _label(axes: Axes, link: Link, x: float, y: float) -> None:
    text = format_bandwidth(link.bandwidth_bytes_per_s)
    box = {"boxstyle": "round,pad=0.12", "fc": "white", "ec": "none", "alpha": 0.85}
    color = LINK_COLORS[link.type.technology]
    _write(axes, x, y, text, fontsize=6.5, ha="center", va="center", color=color, bbox=box, zorder=2)


def _legend(axes: Axes, topology: Topology) -> None:
    from matplotlib.lines import Line2D

    technologies = dict.fromkeys(link.type.technology for link in topology.links)
    handles = [
        Line2D([], [], color=LINK_COLORS[technology], lw=2.5, label=technology)
        for technology in technologies
        if technology not in {"fabric", "memory"}
    ]
    if handles:
        handles.append(Line2D([], [], color=LINK_COLORS["fabric"], lw=1, label="on-die, not limiting"))
        axes.legend(
            handles=handles,
            loc="lower right",
            ncols=len(handles),
            fontsize=8,
            frameon=False,
            title="bandwidth per direction that large transfers reach",
            title_fontsize=8,
        )
