"""Topology files: YAML in, YAML out.

A file has ``name``, ``description``, ``nodes`` and ``links``, and may define ``devices`` and ``link_types`` of
its own; names that it does not define are looked up in the catalogue that comes with the package.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field

from topology.errors import TopologyError
from topology.graph import Topology
from topology.reading import MAX_YAML_BYTES, parse_yaml, read_text, shipped_yaml
from topology.renamed import with_present_names
from topology.schema import DeviceSpec, LinkType
from topology.validation import FrozenModel, Location, did_you_mean, readable

FORMAT_VERSION = 1
RENAMED: Mapping[str, str] = {
    "nodes.kind": "type",
    "devices.*.kind": "type",
    "link_types.*.kind": "technology",
    "links.kind": "technology",
    "links.type.kind": "technology",
}
"""Keys and values of topology files that were renamed (:mod:`topology.renamed`)."""

_LINK_KEYS = frozenset({"id", "source", "target", "count", "type"})


class Catalogue(FrozenModel):
    """Devices and link types by name."""

    devices: dict[str, DeviceSpec] = Field(default_factory=dict)
    link_types: dict[str, LinkType] = Field(default_factory=dict)


class _Document(FrozenModel):
    """Top level of a file, before its names are resolved."""

    format: Literal[1] = 1
    name: str = Field(min_length=1)
    description: str = ""
    devices: dict[str, Any] = Field(default_factory=dict)
    link_types: dict[str, Any] = Field(default_factory=dict)
    sources: dict[str, str] = Field(default_factory=dict)
    nodes: list[dict[str, Any]]
    links: list[dict[str, Any]] = Field(default_factory=list)
    measured: list[dict[str, Any]] = Field(default_factory=list)


USER_CATALOGUE = "ZOSIM_CATALOGUE"
"""Environment variable that names a YAML file of the user's with `devices`, `link_types`, `drives` and `instances`."""


def user_catalogue() -> dict[str, Any]:
    """What the user's own catalogue has, empty if there is none.

    Raises TopologyError if it cannot be read, or is no mapping.
    """
    path = os.environ.get(USER_CATALOGUE)
    if not path:
        return {}
    what = f"{USER_CATALOGUE} {path}"
    hint = "it has devices, link_types, drives or instances, each as the files in topology/data have them"
    text = read_text(path, what, TopologyError, hint=hint, max_bytes=MAX_YAML_BYTES)
    data, _ = parse_yaml(text, what, TopologyError, hint=hint)
    if not isinstance(data, dict):
        raise TopologyError(f"{what} is not a mapping", hint=hint)
    return data


@cache
def catalogue() -> Catalogue:
    """Devices and link types that come with the package, and the user's own."""
    merged: dict[str, dict[str, Any]] = {"devices": {}, "link_types": {}}
    folder = resources.files("topology") / "data" / "catalogue"
    for entry in sorted(folder.iterdir(), key=lambda item: item.name):
        if entry.name.endswith(".yaml"):
            data = shipped_yaml(entry.read_text(encoding="utf-8"))
            for section, items in merged.items():
                items.update(data.get(section, {}))
    own = with_present_names(user_catalogue(), RENAMED)
    for section, items in merged.items():
        items.update(own.get(section) or {})
    return _read_catalogue(merged, "the catalogue", locate=None)


def _read_catalogue(
    data: dict[str, dict[str, Any]], what: str, locate: Callable[[Location], str | None] | None
) -> Catalogue:
    named = {
        "devices": {key: _with(value, "id", key) for key, value in data["devices"].items()},
        "link_types": {key: _with(value, "name", key) for key, value in data["link_types"].items()},
    }
    with readable(what, locate=locate):
        return Catalogue.model_validate(named)


def _with(value: Any, key: str, name: str) -> Any:
    return {key: name, **value} if isinstance(value, dict) else value


def load(path: str | Path) -> Topology:
    """Return the machine that a topology file describes.

    Parameters
    ----------
    path : str or Path
        YAML file, of at most 8 MiB.

    Raises
    ------
    TopologyError
        If the file cannot be read, is no YAML, or describes no valid machine; the message names the node
        or link, its line, the rule and what to do.
    """
    hint = "`zosim topology list` shows the presets"
    text = read_text(path, "topology file", TopologyError, hint=hint, max_bytes=MAX_YAML_BYTES)
    return loads(text, what=str(path))


def loads(text: str, *, what: str = "topology") -> Topology:
    """Return the machine that YAML text describes.

    Parameters
    ----------
    text : str
        The file's content.
    what : str, optional
        Name of the source in messages.

    Raises
    ------
    TopologyError
        As :func:`load`.
    """
    data, locate = _parse_yaml(text, what)
    data = with_present_names(data, RENAMED)
    with readable(what, locate=locate):
        document = _Document.model_validate(data)
    own = _read_catalogue({"devices": document.devices, "link_types": document.link_types}, what, locate)
    shared = catalogue()
    devices = shared.devices | own.devices
    link_types = shared.link_types | own.link_types
    resolved = {
        "name": document.name,
        "description": document.description,
        "nodes": [
            _resolve_node(node, devices, _described(what, locate, ("nodes", position, "spec")))
            for position, node in enumerate(document.nodes)
        ],
        "links": [
            _resolve_link(link, link_types, _described(what, locate, ("links", position, "type")))
            for position, link in enumerate(document.links)
        ],
        "measured": document.measured,
    }
    with readable(what, locate=locate):
        return Topology.model_validate(resolved)


def _described(what: str, locate: Callable[[Location], str | None], location: Location) -> str:
    where = locate(location)
    return f"{what} ({where})" if where else what


def _resolve_node(node: dict[str, Any], devices: dict[str, DeviceSpec], where: str) -> dict[str, Any]:
    name = node.get("spec")
    if not isinstance(name, str):
        return node
    if name not in devices:
        message = f"{where}: node {node.get('id')!r} has the unknown device {name!r}"
        raise TopologyError(message, hint=did_you_mean(name, devices))
    return {**node, "spec": devices[name]}


def _resolve_link(link: dict[str, Any], link_types: dict[str, LinkType], where: str) -> dict[str, Any]:
    name = link.get("type")
    if name is None:
        # The type's fields stand in the link itself.
        own = {key: value for key, value in link.items() if key in _LINK_KEYS}
        return {**own, "type": {key: value for key, value in link.items() if key not in _LINK_KEYS}}
    if not isinstance(name, str):
        return link
    if name not in link_types:
        message = (
            f"{where}: the link from {link.get('source')!r} to {link.get('target')!r} has the unknown "
            f"type {name!r}"
        )
        raise TopologyError(message, hint=did_you_mean(name, link_types))
    return {**link, "type": link_types[name]}


def _parse_yaml(text: str, what: str) -> tuple[dict[str, Any], Callable[[Location], str | None]]:
    data, root = parse_yaml(text, what, TopologyError, hint="check indentation, colons and quotes there")
    if not isinstance(data, dict):
        found = "empty" if data is None else f"a {type(data).__name__}"
        message = f"{what} is {found}, but must be a mapping with name, nodes and links"
        raise TopologyError(message, hint="`zosim topology show NAME -o FILE` writes an example")
    return data, lambda location: _line_of(root, location)


def _line_of(root: yaml.Node | None, location: Location) -> str | None:
    """The line of the deepest part of a location that the file has."""
    node, line = root, None
    for part in location:
        child = _child(node, part)
        if child is None:
            # A link's type may be written inside the link itself.
            if part == "type":
                continue
            break
        node = child
        line = child.start_mark.line + 1
    return None if line is None else f"line {line}"


def _child(node: yaml.Node | None, part: int | str) -> yaml.Node | None:
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        child: yaml.Node = node.value[part]
        return child
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == str(part):
                return value  # type: ignore[no-any-return]
    return None


def dump(topology: Topology) -> str:
    """A topology as YAML that holds everything it needs, catalogue entries included."""
    document = {
        "format": FORMAT_VERSION,
        "name": topology.name,
        "description": topology.description,
        "devices": {
            node.spec.id: _plain(node.spec, leave_out={"id"}) for node in topology.nodes if node.spec
        },
        "link_types": {
            link.type.name: _plain(link.type, leave_out={"name"}) for link in topology.links if link.type.name
        },
        "nodes": [
            _plain(node, leave_out={"spec"}) | ({"spec": node.spec.id} if node.spec else {})
            for node in topology.nodes
        ],
        "links": [
            _plain(link, leave_out={"type"})
            | ({"type": link.type.name} if link.type.name else _plain(link.type))
            for link in topology.links
        ],
        "measured": [_plain(entry) for entry in topology.measured],
    }
    filled = {key: value for key, value in document.items() if value}
    return yaml.safe_dump(filled, sort_keys=False, allow_unicode=True, width=110)


def _plain(model: FrozenModel, leave_out: set[str] | None = None) -> dict[str, Any]:
    return model.model_dump(mode="json", exclude_defaults=True, exclude=leave_out)


def preset_names() -> tuple[str, ...]:
    """Names of the machines that come with the package."""
    folder = resources.files("topology") / "data" / "presets"
    return tuple(
        sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))
    )


@cache
def load_preset(name: str) -> Topology:
    """Return a machine that comes with the package.

    Parameters
    ----------
    name : str
        One of :func:`preset_names`, such as ``"dgx-1v"``.

    Raises
    ------
    TopologyError
        If there is none of that name.

    Examples
    --------
    >>> machine = load_preset("dgx-1v")
    >>> len(machine.compute_devices), machine.device_spec("gpu0").memory_bytes
    (8, 34089205760)
    """
    if name not in preset_names():
        raise TopologyError(f"there is no preset {name!r}", hint=did_you_mean(name, preset_names()))
    entry = resources.files("topology") / "data" / "presets" / f"{name}.yaml"
    return loads(entry.read_text(encoding="utf-8"), what=f"preset {name}")
