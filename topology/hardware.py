"""The machine that a command line names."""

from __future__ import annotations

import re
from pathlib import Path

from topology.building import (
    MachineBuilder,
    assumed_memory,
    connector_type,
    find_device,
    generic_cpu,
    nvlink_type,
)
from topology.documents import catalogue, load, load_preset, preset_names
from topology.errors import TopologyError
from topology.graph import Topology
from topology.importers.pairs import join_switch
from topology.instances import instance_machine, instance_names
from topology.schema import DeviceSpec
from topology.validation import did_you_mean

_SEVERAL = re.compile(r"(?:(\d{1,2}) ?x )?(.*)", re.DOTALL)
_AS_PRESETS = re.compile(r"(.*)-(\d{1,2})x", re.DOTALL)
_MOST = 16
_CORES = 16


def resolve(spec: str) -> Topology:
    """Return the machine that a command line names.

    Parameters
    ----------
    spec : str
        ``"host"`` for this machine, a preset, a topology file, a cloud instance such as ``"p4d"``, or a number of GPUs of
        the catalogue, such as ``"4x l40s"`` or ``"l40s-4x"``.

    Raises
    ------
    TopologyError
        If it is none of these, or the file is not valid.
    """
    if spec == "host":
        # Reading /proc, the driver and a matrix of nvidia-smi takes six modules that no file and no preset needs.
        from topology.detection import detect

        return detect()
    if spec in preset_names():
        return load_preset(spec)
    if re.search(r"[/\\]|\.ya?ml$", spec) or Path(spec).is_file():
        return load(spec)
    if spec.casefold() in instance_names():
        return instance_machine(spec)
    several = _AS_PRESETS.sub(r"\2x \1", spec.strip())
    count, name = _SEVERAL.fullmatch(several).groups()  # type: ignore[union-attr]
    device = find_device(name)
    if device is not None and device.type == "gpu" and 0 < int(count or 1) <= _MOST:
        return assumed_machine(device, int(count or 1))
    gpus = [known.id for known in catalogue().devices.values() if known.type == "gpu"]
    message = f"unknown hardware {spec!r}: not host, a preset, a file or GPUs such as '2x rtx4090'"
    known = gpus if count else ("host", *preset_names(), *instance_names(), *gpus)
    hint = did_you_mean(name if count else spec, known) or ""
    end = "" if hint.endswith("?") else ";"
    raise TopologyError(message, hint=f"{hint}{end} `zosim topology list` shows the presets")


def assumed_machine(gpu: DeviceSpec, count: int = 1) -> Topology:
    """The machine that is assumed where only its GPUs are known: a host of 16 cores, a PCIe root for each GPU, and its NVLinks.

    `count`: GPUs of one host. Two are joined by all of their NVLinks, more by a switch.
    """
    builder = MachineBuilder(gpu.id if count == 1 else f"{count}x-{gpu.id}")
    is_grace = re.match("g[hb][23]00-", gpu.id) is not None
    numa = builder.add_numa(0, assumed_memory(gpus=[gpu] * count, is_grace=is_grace))
    builder.add_cpu(0, [numa], generic_cpu(0, _CORES, "the GPU's name", "assumed"))
    names = []
    for index in range(count):
        root = builder.add_root(numa)
        names.append(builder.add_node(f"gpu{index}", "gpu", host="host0", index=index, spec=gpu))
        builder.join(root, names[-1], connector_type(gpu))
        if is_grace:
            builder.join(numa, names[-1], catalogue().link_types["nvlink-c2c"])
    if gpu.nvlink is not None and gpu.nvlink.bridge and count > 1:
        builder.notes.append("No NVLink bridges are assumed.")
    elif gpu.nvlink is not None and count == 2:
        builder.join(names[0], names[1], nvlink_type(gpu.nvlink), gpu.nvlink.num_links)
    elif gpu.nvlink is not None and count > 2:
        join_switch(builder, dict.fromkeys(names, gpu.nvlink.num_links), gpu.nvlink.generation)
    how = f"state yours in the file that `zosim topology show '{count}x {gpu.id}' -o FILE` writes"
    return builder.build("Assumed from the GPUs alone.", state_memory=how)
