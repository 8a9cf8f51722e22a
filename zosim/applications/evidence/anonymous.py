"""What evidence reports of a run: not who ran it, where, or on which files."""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from costmodel.models.configs import shipped_models
from costmodel.models.model_spec import ModelSpec
from costmodel.rates.profile import Profile
from topology.documents import preset_names
from topology.errors import ZosimError
from topology.figures import Figure
from topology.graph import Topology
from zosim.planning.predict import PlannedRun
from zosim.program.program_set import ProgramSet
from zosim.timeline import Timeline

MACHINE = "the machine of the run"
_DECLARED = "stated by whoever ran it"
_PATH = re.compile(
    r"(?:^|[\"'\s(=])(?:(?:~|/(?:home|Users|root|tmp|mnt|data|scratch|work))[/\\]\S*|[A-Za-z]:\\+\S+)"
)
# What machines and nodes are called everywhere tells nothing.
_GENERIC = re.compile(r"(localhost|host|node|gpu|cpu|server|machine)?[-.\d]*")


class Anonymous:
    """A plan on its hardware under names that tell nothing.

    Presets and shipped sizes keep their names. Any other machine loses its name, the names of its nodes, labels,
    descriptions and where its figures come from; any other model is called by its family and size.
    """

    def __init__(self, planned: PlannedRun) -> None:
        self._planned = planned
        name = planned.plan.placement.topology
        self._is_preset = name in preset_names()

    @cached_property
    def planned(self) -> PlannedRun:
        """The same plan, programs, profile and machine."""
        plan, renamed = self._planned.plan, self._renamed
        placement = plan.placement.model_copy(
            update={
                "topology": plan.placement.topology if self._is_preset else MACHINE,
                "devices": tuple(renamed[device] for device in plan.placement.devices),
                "hosts": tuple(renamed[host] for host in plan.placement.hosts),
            }
        )
        return PlannedRun(
            plan.model_copy(update={"model": self._model, "placement": placement}),
            self._topology,
            _without_sources(self._planned.profile),
            self._programs,
        )

    def timeline(self, measured: Timeline) -> Timeline:
        """Return a measured timeline under the program's new name."""
        return replace(measured, program=self._program_name(measured.program))

    @cached_property
    def _model(self) -> ModelSpec:
        model = self._planned.plan.model
        if model.name in shipped_models():
            return model
        # Not model_copy, which would take the cached values along.
        return ModelSpec(**{**dict(model), "name": f"{model.family}-{model.num_parameters}"})

    def _program_name(self, name: str) -> str:
        """Return a program's name with the model's new one: what it is called after is the model's name and a slash."""
        return f"{self._model.name}/{name.rpartition('/')[2]}"

    @cached_property
    def _programs(self) -> ProgramSet:
        programs = self._planned.programs
        return replace(
            programs,
            programs=tuple(replace(item, name=self._program_name(item.name)) for item in programs.programs),
        )

    @cached_property
    def _renamed(self) -> Mapping[str, str]:
        """New names of nodes: what they are, counted."""
        nodes = self._planned.topology.nodes
        if self._is_preset:
            return {node.id: node.id for node in nodes}
        counted: Counter[str] = Counter()
        names = {}
        for node in nodes:
            names[node.id] = f"{node.type}{counted[node.type]}"
            counted[node.type] += 1
        return names

    @cached_property
    def _topology(self) -> Topology:
        topology, renamed = self._planned.topology, self._renamed
        if self._is_preset:
            return topology
        data = topology.model_dump(mode="json")
        for number, link in enumerate(data["links"]):
            link["id"] = f"link{number}"
        _rename(data, renamed)
        data |= {"name": MACHINE, "description": ""}
        return Topology.model_validate(data)


def _rename(data: Any, renamed: Mapping[str, str]) -> None:
    """Replace node names, and take out labels, notes and sources, in place."""
    items = data if isinstance(data, list) else list(data.values()) if isinstance(data, dict) else ()
    for item in items:
        _rename(item, renamed)
    if not isinstance(data, dict):
        return
    for key in ("id", "host", "source", "target"):
        if data.get(key) in renamed:
            data[key] = renamed[data[key]]
    if "label" in data:
        data["label"] = None
    if set(Figure.model_fields) <= data.keys():
        data |= {"source": _DECLARED, "note": None}


def _without_sources(profile: Profile) -> Profile:
    """Return a profile whose constants name no file where they say where they come from."""
    constants = [
        constant.model_copy(update={"source": _PATH.sub(" (a file)", constant.source)})
        for constant in profile.constants
    ]
    return profile.with_constants(*constants, origin=profile.origin)


def refuse_private(text: str, error: type[ZosimError]) -> None:
    """Refuse a text that names this machine, or a place in its files.

    Raises ZosimError of type `error`, saying what stands in it.
    """
    hint = "rename it in the topology or the profile"
    name = platform.node()
    if not _GENERIC.fullmatch(name) and re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text):
        raise error(f"the evidence would contain this machine's name, {name!r}", hint=hint)
    if (home := str(Path.home())) != "/" and home in text:
        raise error(f"the evidence would contain the path {home!r}", hint=hint)
    if match := _PATH.search(text):
        raise error(f"the evidence would contain the path {match[0].strip()!r}", hint=hint)
