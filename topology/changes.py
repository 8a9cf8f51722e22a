"""A machine otherwise than it is: some of its figures multiplied or set, and nodes or links lost.

>>> from topology.documents import load_preset
>>> board = load_preset("dgx-h100")
>>> slow = changed(board, ["gpu2.speed=0.5", "pcie.bandwidth=8 GB/s"], drop=["gpu3"])
>>> whole, half = (slow.device_spec(name).peak_flop_per_s("bf16") for name in ("gpu1", "gpu2"))
>>> half / whole
0.5
>>> len(slow.of_type("gpu"))
7
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from topology.errors import TopologyError
from topology.figures import Figure
from topology.graph import Topology
from topology.schema import DeviceSpec, Link, LinkType, MeasuredBandwidth, Node
from topology.units import Dimension, QuantityError, split_quantity, unit_scale
from topology.validation import did_you_mean, readable

Quantity = Literal["speed", "compute", "peak", "bandwidth", "latency", "memory"]
"""What can be changed. Of a processor, `peak` is its peak rates; `compute` these and its rated power, which limits the rates that
it sustains; and `speed` these and the bandwidth of its memory."""

_DIMENSIONS: Mapping[Quantity, Dimension] = {
    "bandwidth": "bandwidth",
    "latency": "time",
    "memory": "bytes",
}
_FACTORS: tuple[Quantity, ...] = ("speed", "compute", "peak")
"""Of several figures: multiplied alone."""

_CHANGE = re.compile(r"\s*(?P<target>[^=\s]+)\.(?P<quantity>\w+)\s*=\s*(?P<value>[^=]+?)\s*")
_FACTOR = re.compile(r"(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_HINT = "such as gpu2.speed=0.5, pcie.bandwidth=0.5x, nvlink.latency=10us or gpu0.memory=40GiB"

By = Callable[[Figure], Figure]
AnyModel = TypeVar("AnyModel", DeviceSpec, LinkType)


def times(factor: float) -> By:
    """Return what multiplies a figure."""
    return lambda figure: figure.model_copy(update={"value": figure.value * factor})


@dataclass(frozen=True)
class FigureChange:
    """One figure of some nodes or links, multiplied or set."""

    targets: frozenset[str]
    quantity: Quantity  # see `Quantity`
    by: By  # from the figure to the changed one

    def apply(self, topology: Topology) -> Topology:
        """Return the machine with the figure changed. Devices and link types that differ now have names of their own.

        Raises TopologyError if no target has such a figure, or it would be none.
        """
        with readable(f"the changed {self.quantity}", TopologyError):
            nodes = _renamed_nodes(topology, tuple(map(self._node, topology.nodes)))
            links = _renamed_links(topology, tuple(map(self._link, topology.links)))
            if nodes == topology.nodes and links == topology.links:
                return topology
            then = topology.model_copy(update={"nodes": nodes, "links": links})
            measured = tuple(_measured(topology, then, entry) for entry in topology.measured)
            return then if measured == topology.measured else then.model_copy(update={"measured": measured})

    def _node(self, node: Node) -> Node:
        if node.id not in self.targets:
            return node
        fields = {"bandwidth": node.bandwidth, "capacity": node.capacity} if node.spec is None else {}
        name = "capacity" if self.quantity == "memory" else self.quantity
        update: dict[str, Any] = {name: self.by(figure)} if (figure := fields.get(name)) else {}
        if node.spec is not None and (spec := self._spec(node.spec)) != node.spec:
            update["spec"] = spec
        return Node.model_validate({**dict(node), **update}) if update else node

    def _spec(self, spec: DeviceSpec) -> DeviceSpec:
        update: dict[str, Any] = {}
        if self.quantity in ("speed", "compute") and spec.tdp is not None:
            update["tdp"] = self.by(spec.tdp)
        if self.quantity in ("speed", "compute", "peak"):
            for name in ("peak_dense", "peak_sparse"):
                update[name] = {dtype: self.by(rate) for dtype, rate in getattr(spec, name).items()}
        if self.quantity in ("speed", "bandwidth") and spec.memory_bandwidth is not None:
            update["memory_bandwidth"] = self.by(spec.memory_bandwidth)
        if self.quantity == "memory" and spec.memory is not None:
            update["memory"] = self.by(spec.memory)
        return DeviceSpec.model_validate({**dict(spec), **update}) if update else spec

    def _link(self, link: Link) -> Link:
        figure = getattr(link.type, self.quantity, None) if link.id in self.targets else None
        if figure is None:
            return link
        fields = {**dict(link.type), self.quantity: self.by(figure)}
        return link.model_copy(update={"type": type(link.type).model_validate(fields)})


def _renamed_nodes(topology: Topology, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Return nodes whose changed devices have names of their own, unless all devices of the name have changed alike."""
    known = {
        node.spec.id: node.spec
        for node, before in zip(nodes, topology.nodes, strict=True)
        if node.spec is not None and node.spec == before.spec
    }
    return tuple(
        node if node.spec is None else node.model_copy(update={"spec": _named(node.spec, "id", known)})
        for node in nodes
    )


def _renamed_links(topology: Topology, links: tuple[Link, ...]) -> tuple[Link, ...]:
    known = {
        link.type.name: link.type
        for link, before in zip(links, topology.links, strict=True)
        if link.type.name and link.type == before.type
    }
    return tuple(
        link.model_copy(update={"type": _named(link.type, "name", known)}) if link.type.name else link
        for link in links
    )


def _named(value: AnyModel, field: str, known: dict[str, AnyModel]) -> AnyModel:
    """Return a device or link type under a name that stands for no other: its own one, or with a number behind it."""
    name = re.sub(r"-changed-\d+$", "", getattr(value, field))
    for number in itertools.count(2):
        named = value.model_copy(update={field: name})
        if known.setdefault(name, named) == named:
            return named
        name = f"{name.partition('-changed-')[0]}-changed-{number}"
    raise AssertionError("names do not end")


def _measured(topology: Topology, then: Topology, entry: MeasuredBandwidth) -> MeasuredBandwidth:
    """Return a measured bandwidth as what lies on its way has changed; it would override that otherwise."""
    route = topology.route(entry.source, entry.target)
    changed_links = {link.id: link for link in then.links}
    ratios = [
        changed_links[link.id].bandwidth_bytes_per_s / link.bandwidth_bytes_per_s
        for link in route.links
        if link.type.bandwidth is not None
    ]
    ratios += [
        then.node(end).bandwidth_bytes_per_s / topology.node(end).bandwidth_bytes_per_s
        for end in (entry.source, entry.target)
        if topology.node(end).bandwidth is not None
    ]
    # What is slower limits; what is faster helps where nothing on the way is slower.
    ratio = min(ratios, default=1.0)
    return entry if ratio == 1 else entry.model_copy(update={"bandwidth": times(ratio)(entry.bandwidth)})


def changed(topology: Topology, changes: Sequence[str] = (), drop: Sequence[str] = ()) -> Topology:
    """Return a machine with figures changed, and nodes or links lost.

    - `changes`: ``TARGET.QUANTITY=VALUE``: the id of a node or link, the name of a device or of a kind of link, or a type of node
      or technology of link; a :data:`Quantity`; a factor such as ``0.5x``, or a value such as ``8 GB/s``.
    - `drop`: nodes and links; with a host goes all that it contains.

    Raises TopologyError if a text is no change, or the machine has no such thing.
    """
    for text in changes:
        topology = _read(topology, text).apply(topology)
    for name in drop:
        topology = without(topology, name)
    return topology


def _read(topology: Topology, text: str) -> FigureChange:
    match = _CHANGE.fullmatch(text)
    if match is None or match["quantity"] not in get_args(Quantity):
        raise TopologyError(f"--set {text} is no change: write TARGET.QUANTITY=VALUE", hint=_HINT)
    quantity: Quantity = match["quantity"]  # type: ignore[assignment]
    targets = targets_of(topology, match["target"], quantity)
    value = match["value"]
    factor = value.removesuffix("x").strip() if value.endswith("x") or quantity in _FACTORS else ""
    if factor:
        if not _FACTOR.fullmatch(factor) or not 0 < float(factor) < float("inf"):
            raise TopologyError(f"--set {text}: {value} is no factor above 0", hint=_HINT)
        return FigureChange(targets, quantity, times(float(factor)))
    try:
        number, unit = split_quantity(value, _DIMENSIONS[quantity])
        unit_scale(unit, _DIMENSIONS[quantity])
    except QuantityError as error:
        raise TopologyError(f"--set {text}: {error.message}", hint=error.hint) from None
    return FigureChange(targets, quantity, lambda old: old.model_copy(update={"value": number, "unit": unit}))


def targets_of(topology: Topology, target: str, quantity: Quantity) -> frozenset[str]:
    """Return the nodes or links that a text names and that have the figure.

    Raises TopologyError if there are none.
    """
    named: dict[str, list[Node | Link]] = {}
    for node in topology.nodes:
        names = (node.id, *((node.spec.id, node.spec.name) if node.spec else ()), node.type)
        for name in dict.fromkeys(names):
            named.setdefault(name, []).append(node)
    for link in topology.links:
        for name in dict.fromkeys((link.id, link.type.name or link.id, link.type.technology)):
            named.setdefault(name, []).append(link)
    if target not in named:
        message = f"{topology.name} has no node, device or link called {target!r}"
        raise TopologyError(message, hint=did_you_mean(target, named))
    having = frozenset(item.id for item in named[target] if quantity in _quantities(item))
    if not having:
        has = dict.fromkeys(quantity for item in named[target] for quantity in _quantities(item))
        raise TopologyError(
            f"{target} of {topology.name} has no {quantity}", hint=f"it has: {', '.join(has) or 'no figure'}"
        )
    return having


def _quantities(item: Node | Link) -> list[Quantity]:
    if isinstance(item, Link):
        return ["bandwidth", "latency"] if item.type.bandwidth is not None else ["latency"]
    quantities: list[Quantity] = list(_FACTORS) if item.spec is not None else []
    bandwidth = item.bandwidth if item.spec is None else item.spec.memory_bandwidth
    size = item.capacity if item.spec is None else item.spec.memory
    quantities += ["bandwidth"] if bandwidth is not None else []
    quantities += ["memory"] if size is not None else []
    return quantities


def without(topology: Topology, name: str) -> Topology:
    """Return a machine without a node, all that a host contains, or a link.

    Raises TopologyError if there is no such node or link, or no processor is left.
    """
    if name in {link.id for link in topology.links}:
        return topology.model_copy(
            update={"links": tuple(link for link in topology.links if link.id != name)}
        )
    lost = {node.id for node in topology.nodes if name in (node.id, node.host)}
    if not lost:
        known = [*(node.id for node in topology.nodes), *(link.id for link in topology.links)]
        raise TopologyError(
            f"{topology.name} has no node or link {name!r} to drop", hint=did_you_mean(name, known)
        )
    with readable(f"{topology.name} without {name}", TopologyError):
        return topology.model_copy(
            update={
                "nodes": tuple(node for node in topology.nodes if node.id not in lost),
                "links": tuple(link for link in topology.links if not _ends(link) & lost),
                "measured": tuple(entry for entry in topology.measured if not _ends(entry) & lost),
            }
        )


def _ends(item: Link | MeasuredBandwidth) -> set[str]:
    return {item.source, item.target}
