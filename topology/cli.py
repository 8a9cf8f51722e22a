"""``zosim topology``: list, show, validate, detect, draw and import hardware descriptions."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from topology.documents import dump, load_preset, preset_names
from topology.errors import TopologyError
from topology.graph import Topology
from topology.hardware import resolve
from topology.instances import instance_machine, instance_names
from topology.limits import whole_number
from topology.lint import lint, refuse_errors
from topology.printable import one_line, printable
from topology.reading import read_stdin, read_text

app = typer.Typer(
    name="topology",
    help="Describe hardware: presets, this machine, files, and the output of other tools.",
    no_args_is_help=True,
    add_completion=False,
)
Hardware = Annotated[
    str,
    typer.Argument(
        help="Hardware: a name that `zosim topology list` prints, such as dgx-h100; GPUs, such as '2x rtx4090'; a topology file; or host (this machine)."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Topology file to write.")]


Tool = Literal["nccl", "hwloc", "smi", "rocm"]
"""Tools whose descriptions can be imported."""


@app.command("list")
def list_presets(as_json: Json = False) -> None:
    """List the machines that come with zosim: presets, then instances of clouds and machines as they are sold."""
    presets = [load_preset(name) for name in preset_names()]
    presets += [instance_machine(name) for name in dict.fromkeys(instance_names().values())]
    if as_json:
        _print_json([summary(preset) for preset in presets])
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("preset", "compute devices", "what it is"):
        table.add_column(heading, no_wrap=heading != "what it is")
    for preset in presets:
        first_sentence = preset.description.split(". ")[0].rstrip(".")
        devices = Counter(node.spec.name for node in preset.compute_devices if node.spec)
        counted = ", ".join(f"{count} x {name}" for name, count in devices.items())
        table.add_row(preset.name, counted, first_sentence)
    Console().print(table)


@app.command()
def show(hardware: Hardware, output: Output = None, as_json: Json = False) -> None:
    """Show a machine as a tree; --output writes its topology file, to edit."""
    _deliver(resolve(hardware), output, as_json)


@app.command()
def validate(hardware: Hardware, as_json: Json = False) -> None:
    """Check the figures of a machine against physical limits."""
    topology = resolve(hardware)
    findings = lint(topology)
    if as_json:
        _print_json({"name": topology.name, "findings": [dataclasses.asdict(item) for item in findings]})
    else:
        for finding in findings:
            if finding.severity == "warning":
                _print(f"warning: {finding.where}: {finding.message}\n  hint: {finding.hint}")
    refuse_errors(topology)
    if not as_json:
        counted = f"{len(topology.nodes)} nodes, {len(topology.links)} links, {len(findings)} warnings"
        _print(f"{one_line(topology.name)} is valid: {counted}")


@app.command()
def detect(output: Output = None, as_json: Json = False) -> None:
    """Detect this machine, and measure its memory bandwidth for half a second."""
    _deliver(resolve("host"), output, as_json)


@app.command()
def draw(
    hardware: Hardware,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to draw to: .png, .svg or .pdf.")],
    as_json: Json = False,
) -> None:
    """Draw a machine as a graph."""
    from topology.drawing import draw as draw_topology

    written = draw_topology(resolve(hardware), output)
    if as_json:
        _print_json({"path": str(written)})
    else:
        _print(str(written))


@app.command()
def rings(
    hardware: Hardware,
    gpus: Annotated[
        str | None,
        typer.Option(
            help="GPUs of the rings, such as 0-3, 0,2,5 or names of nodes.",
            show_default="the first 2, 3 and so on of the first host",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the NVLink rings that share no link, which bound ring collectives."""
    from topology.rings import edge_disjoint_rings

    topology = resolve(hardware)
    ring_sets = [edge_disjoint_rings(topology, ids) for ids in _gpu_sets(topology, gpus)]
    if as_json:
        data = [
            {
                "gpus": list(item.gpu_ids),
                "num_rings": len(item.rings),
                "bandwidth_bytes_per_s": item.bandwidth_bytes_per_s,
                "both_ways_bytes_per_s": item.both_ways_bytes_per_s,
                "rings": [dataclasses.asdict(ring) for ring in item.rings],
            }
            for item in ring_sets
        ]
        _print_json(data)
        return
    for item in ring_sets:
        one_way, both_ways = item.bandwidth_bytes_per_s / 1e9, item.both_ways_bytes_per_s / 1e9
        counted = f"{len(item.rings)} ring{'s' if len(item.rings) > 1 else ''}"
        shown = (
            f"{counted}, {one_way:.1f} GB/s, {both_ways:.1f} both ways"
            if item.rings
            else "no ring of NVLinks"
        )
        _print(f"{len(item.gpu_ids)} gpus ({', '.join(item.gpu_ids)}): {shown}")
        for ring in item.rings:
            typer.echo(f"  {' - '.join(ring.gpu_ids)}")


def _gpu_sets(topology: Topology, wanted: str | None) -> list[tuple[str, ...]]:
    """GPUs that an option names by number or by node, or the first two and more of the first host's."""
    known = [node.id for node in topology.compute_devices if node.type == "gpu"]
    if wanted is None:
        first = [name for name in known if topology.host_of(name) == topology.host_of(known[0])]
        if len(first) < 2:
            raise TopologyError(f"{topology.name!r} has no host with two GPUs", hint="a ring needs two GPUs")
        return [tuple(first[:count]) for count in range(2, len(first) + 1)]
    named: list[str] = []
    for word in (part.strip() for part in wanted.split(",")):
        low, dash, high = word.partition("-")
        begin, end = whole_number(low), whole_number(high if dash else low)
        if begin is not None and end is not None:
            numbers = range(begin, end + 1)
            if not numbers or numbers[-1] >= len(known):
                message = f"--gpus {word} names GPUs that {topology.name!r} does not have"
                raise TopologyError(message, hint=f"it has {len(known)}, numbered from 0")
            named += [known[number] for number in numbers]
        else:
            named.append(topology.node(word).id)
    return [tuple(named)]


@app.command("import")
def import_description(
    path: Annotated[Path, typer.Argument(help="File to import; - for a matrix on stdin.")],
    tool: Annotated[
        Tool | None,
        typer.Option("--from", help="Tool that wrote the file.", show_default="recognised from the content"),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="GPU model, as a catalogue or product name such as h100-80gb-sxm.")
    ] = None,
    cpu: Annotated[str | None, typer.Option(help="CPU model, as a catalogue or product name.")] = None,
    memory: Annotated[str | None, typer.Option(help='Size of the host memory, such as "512 GiB".')] = None,
    memory_bandwidth: Annotated[
        str | None, typer.Option(help='Bandwidth of the host memory, such as "200 GB/s".')
    ] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Import the output of NCCL, RCCL, hwloc, nvidia-smi, rocm-smi or amd-smi as a topology.

    For example:
      nvidia-smi topo -m > topo.txt
      zosim topology import topo.txt --gpu rtx4090 --memory "64 GiB" -o mine.yaml
    """
    from topology import from_hwloc_xml, from_nccl_xml, from_nvidia_smi_topo, from_rocm_smi_topo
    from topology.importers.safe_xml import MAX_BYTES

    what = "matrix or XML file"
    if str(path) == "-":
        text = read_stdin(what, TopologyError, max_bytes=MAX_BYTES)
    else:
        hint = "name a file that another tool wrote, such as that of `nvidia-smi topo -m > topo.txt`"
        text = read_text(path, what, TopologyError, hint=hint, max_bytes=MAX_BYTES)
    named: dict[str, Any] = {"gpu": gpu, "cpu": cpu, "memory": memory, "memory_bandwidth": memory_bandwidth}
    name = "stdin" if str(path) == "-" else path.stem
    match tool or guess_tool(path, text):
        case "nccl":
            topology = from_nccl_xml(path, **named)
        case "hwloc":
            topology = from_hwloc_xml(path, **named)
        case "smi":
            topology = from_nvidia_smi_topo(text, name=name, **named)
        case "rocm":
            topology = from_rocm_smi_topo(text, name=name, **named)
    _deliver(topology, output, as_json)


def guess_tool(path: Path, text: str) -> Tool:
    """The tool that wrote a text, by its first element; a text that is no XML is rocm-smi's if it says so, else nvidia-smi's.

    Raises TopologyError if it is XML of another kind, or comes from stdin.
    """
    from topology.importers.rocm import is_rocm

    if not text.lstrip().startswith("<"):
        return "rocm" if is_rocm(text) else "smi"
    if str(path) == "-":
        raise TopologyError(
            "standard input is XML, which can only be read from a file", hint="give the file's name"
        )
    first = re.sub(r"<!--.*?-->|<[?!][^>]*>", "", text[: 2**16], flags=re.DOTALL).lstrip()
    if first.startswith("<topology"):
        return "hwloc"
    if first.startswith("<system"):
        return "nccl"
    message = f"{str(path)!r} is XML from neither NCCL nor hwloc"
    raise TopologyError(message, hint="NCCL's begins with <system>, hwloc's with <topology>")


def _deliver(topology: Topology, output: Path | None, as_json: bool) -> None:
    if output is not None:
        try:
            output.write_text(dump(topology), encoding="utf-8")
        except OSError as error:
            raise TopologyError(f"cannot write {str(output)!r}: {error.strerror}") from error
        typer.echo(printable(f"wrote {output}"), err=True)
    if as_json:
        _print_json(describe(topology))
        return
    from rich.console import Console

    from topology.text import render_text

    console = Console()
    color = console.is_terminal and not console.no_color
    text = render_text(
        topology, width=max(console.width, 80), color=color, encoding=getattr(sys.stdout, "encoding", None)
    )
    print(text, end="")


def summary(topology: Topology) -> dict[str, Any]:
    """A machine in a few JSON values."""
    return {
        "name": topology.name,
        "description": topology.description,
        "hosts": len(topology.hosts),
        "compute_devices": [
            {"id": node.id, "name": node.spec.name} for node in topology.compute_devices if node.spec
        ],
    }


def describe(topology: Topology) -> dict[str, Any]:
    """Everything about a machine as JSON values: as declared, and the resources that follow from it."""
    dumped = topology.model_dump(mode="json", exclude_defaults=True)
    dumped["resources"] = {
        name: {
            "bandwidth_bytes_per_s": resource.bandwidth_bytes_per_s,
            "latency_s": resource.latency_s,
            "sharing": resource.sharing,
        }
        for name, resource in topology.resources.items()
    }
    dumped["host_to_device"] = {}
    for node in topology.compute_devices:
        memory = topology.host_memory(node.id)
        route = topology.route(memory.id, node.id)
        bandwidth = route.bandwidth_bytes_per_s
        dumped["host_to_device"][node.id] = {
            "memory": memory.id,
            "nodes": list(route.node_ids),
            "bandwidth_bytes_per_s": bandwidth if math.isfinite(bandwidth) else None,
            "latency_s": route.latency_s,
        }
    return dumped


def _print(text: str) -> None:
    typer.echo(printable(text))


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, allow_nan=False))
