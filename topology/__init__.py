"""The hardware as a graph: what a machine has, how data get around in it, and what flows share.

>>> machine = load_preset("dgx-1v")
>>> [link.type.name for link in machine.route("gpu0", "gpu4").links]
['nvlink2']
"""

from topology.documents import catalogue, load, load_preset, loads, preset_names, resolve
from topology.errors import TopologyError, ZosimError
from topology.figures import Figure
from topology.graph import Resource, Route, Topology
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

__all__ = [
    "DeviceSpec",
    "Dtype",
    "Figure",
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
    "load",
    "load_preset",
    "loads",
    "preset_names",
    "resolve",
]
