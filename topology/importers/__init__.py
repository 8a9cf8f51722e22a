"""Machines that other tools have already described."""

from topology.importers.hwloc import from_hwloc_xml
from topology.importers.nccl import from_nccl_xml
from topology.importers.rocm import from_rocm_smi_topo
from topology.importers.smi import from_nvidia_smi_topo

__all__ = ["from_hwloc_xml", "from_nccl_xml", "from_nvidia_smi_topo", "from_rocm_smi_topo"]
