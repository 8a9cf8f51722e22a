"""The hardware as a graph: what a machine has, how data get around in it, and what flows share.

>>> from topology import load_preset
>>> machine = load_preset("dgx-1v")
>>> [link.type.name for link in machine.route("gpu0", "gpu4").links]
['nvlink2']
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from topology.lazy import lazy_names

if TYPE_CHECKING:
    from topology.detection import detect as detect
    from topology.documents import catalogue as catalogue
    from topology.documents import dump as dump
    from topology.documents import load as load
    from topology.documents import load_preset as load_preset
    from topology.documents import loads as loads
    from topology.documents import preset_names as preset_names
    from topology.drawing import draw as draw
    from topology.errors import TopologyError as TopologyError
    from topology.errors import ZosimError as ZosimError
    from topology.figures import Figure as Figure
    from topology.graph import Topology as Topology
    from topology.hardware import resolve as resolve
    from topology.importers.hwloc import from_hwloc_xml as from_hwloc_xml
    from topology.importers.nccl import from_nccl_xml as from_nccl_xml
    from topology.importers.rocm import from_rocm_smi_topo as from_rocm_smi_topo
    from topology.importers.smi import from_nvidia_smi_topo as from_nvidia_smi_topo
    from topology.lint import Finding as Finding
    from topology.lint import refuse_errors as refuse_errors
    from topology.routes import Resource as Resource
    from topology.routes import Route as Route
    from topology.schema import DeviceSpec as DeviceSpec
    from topology.schema import Dtype as Dtype
    from topology.schema import Link as Link
    from topology.schema import LinkTechnology as LinkTechnology
    from topology.schema import LinkType as LinkType
    from topology.schema import MeasuredBandwidth as MeasuredBandwidth
    from topology.schema import Node as Node
    from topology.schema import NodeType as NodeType
    from topology.text import render_text as render_text
else:
    __getattr__, __all__ = lazy_names(__name__, __file__)
