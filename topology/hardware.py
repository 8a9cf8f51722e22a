"""The machine that a command line names."""

from __future__ import annotations

import re
from pathlib import Path

from topology.detection import detect
from topology.documents import load, load_preset, preset_names
from topology.errors import TopologyError
from topology.graph import Topology
from topology.validation import did_you_mean


def resolve(spec: str) -> Topology:
    """The machine that a command line names: ``host``, a preset, or a file.

    Raises
    ------
    TopologyError
        If it is none of these, or the file is not valid.
    """
    if spec == "host":
        return detect()
    if spec in preset_names():
        return load_preset(spec)
    if re.search(r"[/\\]|\.ya?ml$", spec) or Path(spec).is_file():
        return load(spec)
    close = did_you_mean(spec, ("host", *preset_names()))
    message = f"hardware {spec!r} is neither host, nor a preset, nor a file"
    raise TopologyError(message, hint=close)
