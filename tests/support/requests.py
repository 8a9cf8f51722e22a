"""Requests to the planner in few words."""

from __future__ import annotations

from typing import Any

from costmodel.models.model_spec import ModelSpec
from topology.graph import Topology
from zosim.config import PlanConfig, Search, merge
from zosim.hardware.profiles import Profiles
from zosim.planning.request import Hardware, Request
from zosim.planning.split_options import SplitOptions
from zosim.plans import AXES

SEARCH = tuple(Search.model_fields)


def set_in(**fields: Any) -> PlanConfig:
    """Return a config of these fields: batch, seq, axes (as such or as mappings), and those of the search."""
    search = {name: fields.pop(name) for name in SEARCH if name in fields}
    axes = {
        name: kind.model_construct(**dict(value)) if isinstance(value := fields[name], dict) else value
        for name, kind in AXES.items()
        if name in fields
    }
    return PlanConfig.model_construct(**{**fields, **axes}, search=Search(**search))


def request_for(
    model: ModelSpec,
    topology: Topology,
    *,
    device: str | None = None,
    max_ranks: int = 1,
    profile: Any = None,
    split_options: SplitOptions | None = None,
    fixed: Any = None,
    **fields: Any,
) -> Request:
    """Return a request for plans of a model on the first devices of a machine, as its data sheets describe it."""
    profiles, first = Profiles(topology), device or topology.compute_devices[0].id
    hardware = Hardware(topology, topology.name, first, profile or profiles.of(first), profiles, max_ranks)
    config = merge(set_in(**fields), set_in(**(fixed or {})))
    return Request(merge(PlanConfig(model=model), config), hardware, split_options or SplitOptions())
