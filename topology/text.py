"""A machine as a tree for the terminal."""

from __future__ import annotations

import io
import math

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from topology.graph import Topology
from topology.printable import one_line, printable
from topology.schema import Dtype, Link, Node
from topology.units import format_bandwidth, format_bytes, format_flops, format_seconds

_MAIN_DTYPES: tuple[Dtype, ...] = ("fp32", "bf16", "fp16")


def render_text(
    topology: Topology, *, width: int = 110, color: bool = False, encoding: str | None = None
) -> str:
    """The machine as text: a tree per host, then the links that are no part of a tree.

    Parameters
    ----------
    topology : Topology
        The machine.
    width : int, optional
        Columns.
    color : bool, optional
        Whether to use terminal colours.
    encoding : str, optional
        Of the stream that the text is for; UTF-8 if left out. Lines of the tree are made of ASCII where it has no others.
    """
    # rich draws trees with what the encoding of its file has.
    written = io.BytesIO()
    page = io.TextIOWrapper(written, encoding=encoding or "utf-8", errors="backslashreplace", newline="")
    console = Console(
        file=page, width=width, force_terminal=color, no_color=not color, highlight=False, emoji=False
    )
    console.print(f"[bold]{_shown(topology.name)}[/bold]")
    if topology.description:
        console.print(printable(topology.description), style="dim", markup=False)
    console.print()
    drawn: set[str] = set()
    for host in topology.hosts:
        console.print(_host_tree(topology, host, drawn))
    rest = [link for link in topology.links if link.id not in drawn]
    if rest:
        console.print()
        table = Table(title="Other links", title_justify="left", box=None, pad_edge=False)
        for heading in ("from", "to", "link", "latency"):
            table.add_column(heading)
        for link in rest:
            table.add_row(link.source, link.target, describe_link(link), format_seconds(link.latency_s))
        console.print(table)
    page.flush()
    text = written.getvalue().decode(page.encoding)
    return "\n".join(line.rstrip() for line in text.split("\n")[:-1]) + "\n"


def _host_tree(topology: Topology, host: Node, drawn: set[str]) -> Tree:
    """NUMA domains with what hangs on them, found by a search from the domains outwards."""
    tree = Tree(f"[bold]{host.id}[/bold]" + (f"  {_shown(host.label)}" if host.label else ""))
    members = {node.id for node in topology.nodes if node.host == host.id}
    numas = [node for node in topology.of_type("numa") if node.host == host.id]
    seen = {node.id for node in numas}
    for numa in numas:
        _add_below(topology, numa, tree.add(_describe(numa)), members, seen, drawn)
    for node in topology.nodes:
        if node.id in members and node.id not in seen:
            seen.add(node.id)
            tree.add(_describe(node))
    return tree


def _add_below(
    topology: Topology, node: Node, branch: Tree, members: set[str], seen: set[str], drawn: set[str]
) -> None:
    below = []
    for link in topology.links_of(node.id):
        if link.type.technology in {"nvlink", "socket"}:
            continue
        other = link.other_end(node.id)
        if other in members and other not in seen:
            seen.add(other)
            drawn.add(link.id)
            below.append((topology.node(other), link))
    for child, link in below:
        speed = f"  [cyan]{describe_link(link)}[/cyan]" if math.isfinite(link.bandwidth_bytes_per_s) else ""
        _add_below(topology, child, branch.add(_describe(child) + speed), members, seen, drawn)


def _shown(name: str) -> str:
    return escape(one_line(name))


def _describe(node: Node) -> str:
    parts = [f"[bold]{node.id}[/bold]"]
    if node.spec is not None:
        parts.append(_shown(node.spec.name))
        unit = "SM" if node.type == "gpu" else "cores"
        parts.append(f"{node.spec.num_cores} {unit}")
        if node.type == "gpu":
            parts.append(
                f"{format_bytes(node.memory_bytes)} at {format_bandwidth(node.bandwidth_bytes_per_s)}"
            )
        shown = [dtype for dtype in _MAIN_DTYPES if dtype in node.spec.peak_dense][:2]
        parts.extend(f"{dtype} {format_flops(node.spec.peak_flop_per_s(dtype), 3)}" for dtype in shown)
    elif node.type == "memory":
        texts = [format_bytes(node.memory_bytes), format_bandwidth(node.bandwidth_bytes_per_s)]
        for position, figure in enumerate((node.capacity, node.bandwidth)):
            if figure is not None and figure.basis == "assumed":
                texts[position] += " (assumed)"
        parts.append(" at ".join(texts))
    elif node.label:
        parts.append(_shown(node.label))
    return "  ".join(parts)


def describe_link(link: Link) -> str:
    """A link in a few words: its technology and the bandwidth that large transfers reach."""
    name = link.type.name or link.type.technology
    times = f"{link.count} x " if link.count > 1 else ""
    return f"{times}{name}, {format_bandwidth(link.bandwidth_bytes_per_s)}"
