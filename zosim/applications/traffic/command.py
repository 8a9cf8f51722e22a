"""``zosim traffic``: flows and links read from JSON, and when the flows end written as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from topology.errors import TopologyError, TrafficError
from topology.graph import Topology
from topology.hardware import resolve
from topology.reading import parse_json, read_json, read_stdin
from topology.validation import did_you_mean
from zosim.applications.traffic.finish import (
    Flow,
    NetworkLink,
    finish_times,
    network_of,
    parts_between,
    parts_of,
)
from zosim.console import emit, stderr

_FLOW_KEYS = ("id", "bytes", "start")
_LINK_KEYS = ("bandwidth", "latency", "sharing")


@dataclass(frozen=True, slots=True)
class Scenario:
    """Flows by their ids, and the links that they cross."""

    flows: Mapping[str | int, Flow]
    links: Mapping[str, NetworkLink]

    def finish_times(self) -> dict[str | int, float]:
        """Return when each flow ends, in seconds."""
        return dict(zip(self.flows, finish_times(list(self.flows.values()), self.links), strict=True))


def traffic(
    network: Annotated[
        str,
        typer.Argument(
            help="A scenario with links and flows; or a preset's name, a topology file or host.",
            show_default=False,
        ),
    ],
    flows: Annotated[
        Path | None, typer.Argument(help="Flows between nodes of the topology.", show_default=False)
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write finish times here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout, besides a file.")] = False,
) -> None:
    """Predict when flows end that share the links of a network."""
    scenario = read_scenario(_read(network)) if flows is None else scenario_on(resolve(network), _read(flows))
    ends = [{"id": name, "finish": finish_s} for name, finish_s in scenario.finish_times().items()]
    if output is not None:
        try:
            output.write_text(json.dumps({"flows": ends}, indent=2, allow_nan=False) + "\n")
        except OSError as error:
            raise TrafficError(f"cannot write {str(output)!r}: {error.strerror}") from error
        stderr.print(f"wrote {output}", markup=False)
    if output is None or as_json:
        emit({"flows": ends}, json=True)


def read_scenario(data: Any) -> Scenario:
    """Return a scenario of links and flows with routes from decoded JSON.

    Raises
    ------
    TrafficError
        If a link or a flow cannot be; the message names it and shows the value.
    """
    document = _object("the scenario", data, required=("links", "flows"))
    links = {name: _link(name, value) for name, value in _object("links", document["links"]).items()}
    flows: dict[str | int, Flow] = {}
    for where, name, item in _flows(document["flows"], ("route",)):
        route = item["route"]
        if not isinstance(route, list):
            raise TrafficError(f"{where}: route {route!r} is no list", hint='list links, as in ["a", "b"]')
        for link in route:
            if not isinstance(link, str) or link not in links:
                message = f"{where}: its route names the unknown link {link!r}"
                raise TrafficError(message, hint=did_you_mean(str(link), links) or "declare it under links")
        flows[name] = Flow(parts_of(route, links), *_size_and_start(where, item))
    return Scenario(flows, links)


def scenario_on(topology: Topology, data: Any) -> Scenario:
    """Return the scenario of flows between nodes of a topology from decoded JSON.

    Raises
    ------
    TrafficError
        If a flow cannot be; the message names it and shows the value.
    """
    document = _object("the flows", data, required=("flows",))
    links = network_of(topology)
    flows: dict[str | int, Flow] = {}
    for where, name, item in _flows(document["flows"], ("source", "destination")):
        try:
            parts = parts_between(topology, links, str(item["source"]), str(item["destination"]))
        except TopologyError as error:
            raise TrafficError(f"{where}: {error.message}", hint=error.hint) from error
        flows[name] = Flow(parts, *_size_and_start(where, item))
    return Scenario(flows, links)


def _read(path: str | Path) -> Any:
    hint = "zosim traffic SCENARIO.json, or zosim traffic TOPOLOGY FLOWS.json"
    if str(path) == "-":
        text = read_stdin("scenario", TrafficError)
        return parse_json(text, "standard input is not JSON", TrafficError, hint=hint)
    return read_json(path, "scenario of flows", TrafficError, hint=hint)


def _object(where: str, value: Any, required: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a JSON object that has the required keys, and if any are required, no others."""
    if not isinstance(value, dict):
        message = f"{where} must be a JSON object, got {_shown(value)}"
        raise TrafficError(message, hint=f"keys: {', '.join(required)}" if required else None)
    for key in required:
        if key not in value:
            hint = "name a topology before the flows" if key == "links" else f"keys: {', '.join(required)}"
            raise TrafficError(f"{where}: {key!r} is missing", hint=hint)
    if required:
        _refuse_unknown(where, value, required)
    return value


def _refuse_unknown(where: str, value: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in value:
        if key not in known:
            raise TrafficError(f"{where}: unknown key {key!r}", hint=did_you_mean(key, known))


def _flows(value: Any, own_keys: tuple[str, ...]) -> list[tuple[str, str | int, dict[str, Any]]]:
    """Return flows as (words for messages, id, object), each with the keys that it needs."""
    if not isinstance(value, list):
        raise TrafficError(f"flows must be a list, got {_shown(value)}")
    flows: dict[str | int, tuple[str, str | int, dict[str, Any]]] = {}
    for position, item in enumerate(value):
        name = item.get("id") if isinstance(item, dict) else None
        if not isinstance(name, str | int) or isinstance(name, bool):
            raise TrafficError(f"flow number {position} has no id: {_shown(item)}", hint='give it an "id"')
        where = f"flow {name!r}"
        if name in flows:
            raise TrafficError(f"two flows have the id {name!r}", hint="ids must be unique")
        _refuse_unknown(where, item, (*_FLOW_KEYS, *own_keys))
        for key in ("bytes", *own_keys):
            if key not in item:
                raise TrafficError(
                    f"{where}: {key!r} is missing", hint=f"keys: id, bytes, {', '.join(own_keys)}"
                )
        flows[name] = where, name, item
    return list(flows.values())


def _link(name: str, value: Any) -> NetworkLink:
    where = f"link {name!r}"
    item = value if isinstance(value, dict) else {"bandwidth": value}
    _refuse_unknown(where, item, _LINK_KEYS)
    if "bandwidth" not in item:
        raise TrafficError(f"{where} has no bandwidth", hint="in bytes per second")
    bandwidth = _number(where, "bandwidth", item["bandwidth"])
    if bandwidth == 0:
        raise TrafficError(f"{where}: bandwidth is 0", hint="it must be positive, in bytes per second")
    sharing = item.get("sharing", "maxmin")
    if sharing not in ("maxmin", "fifo"):
        raise TrafficError(f"{where}: sharing is {sharing!r}", hint="maxmin or fifo")
    return NetworkLink(bandwidth, _number(where, "latency", item.get("latency", 0.0)), sharing)


def _size_and_start(where: str, item: Mapping[str, Any]) -> tuple[float, float]:
    return _number(where, "bytes", item["bytes"]), _number(where, "start", item.get("start", 0.0))


def _number(where: str, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TrafficError(f"{where}: {key} is {_shown(value)}, not a number", hint=_UNITS[key])
    if not 0 <= value <= sys.float_info.max:
        raise TrafficError(f"{where}: {key} is {value}", hint=f"{_UNITS[key]}, finite and not negative")
    return float(value)


_UNITS = {
    "bandwidth": "a number in bytes per second",
    "latency": "a number in seconds",
    "bytes": "a number of bytes",
    "start": "a number in seconds",
}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"
