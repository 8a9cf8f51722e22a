"""The hardware as a graph: what a machine has, how data get around in it, and what flows share.

>>> machine = load_preset("dgx-1v")
>>> [link.type.name for link in machine.route("gpu0", "gpu4").links]
['nvlink2']
"""

from topology.detection import detect
from topology.documents import catalogue, dump, load, load_preset, loads, preset_names
from topology.drawing import draw
from topology.errors import TopologyError, ZosimError
from topology.figures import Figure
from topology.graph import Topology
from topology.hardware import resolve
from topology.importers import from_hwloc_xml, from_nccl_xml, from_nvidia_smi_topo
from topology.lint import Finding, lint, refuse_errors
from topology.routes import Resource, Route
from topology.schema import (
    DeviceSpec,
    Dtype,
    Link,
    LinkKind,
    LinkType,
    MeasuredBandwidth,
    Node,
    NodeKind,
)
from topology.text import render_text

__all__ = [
    "DeviceSpec",
    "Dtype",
    "Figure",
    "Finding",
    "Link",
    "LinkKind",
    "LinkType",
    "MeasuredBandwidth",
    "Node",
    "NodeKind",
    "Resource",
    "Route",
    "Topology",
    "TopologyError",
    "ZosimError",
    "catalogue",
    "detect",
    "draw",
    "dump",
    "from_hwloc_xml",
    "from_nccl_xml",
    "from_nvidia_smi_topo",
    "lint",
    "load",
    "load_preset",
    "loads",
    "preset_names",
    "refuse_errors",
    "render_text",
    "resolve",
]
