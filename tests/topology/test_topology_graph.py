"""Routes against brute force, and what concurrent flows share."""

import itertools
import math

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topology import (
    Figure,
    Link,
    LinkType,
    MeasuredBandwidth,
    Node,
    Topology,
    TopologyError,
    catalogue,
    dump,
    load_preset,
    loads,
)
from topology.schema import FORWARDING_TYPES

CPU = catalogue().devices["epyc-7763"]


def machine_of(nodes, links, **fields):
    host = Node(id="host", type="host")
    cpu = Node(id="cpu", type="cpu", host="host", spec=CPU)
    return Topology(name="random", nodes=(host, cpu, *nodes), links=tuple(links), **fields)


@st.composite
def random_machines(draw):
    """Small multigraphs in which some nodes forward and some do not, with few distinct bandwidths."""
    num_nodes = draw(st.integers(2, 6))
    kinds = draw(
        st.lists(st.sampled_from(["numa", "pcie_switch", "disk"]), min_size=num_nodes, max_size=num_nodes)
    )
    nodes = [Node(id=f"n{i}", type=kind, host="host") for i, kind in enumerate(kinds)]
    pairs = list(itertools.combinations(range(num_nodes), 2))
    chosen = draw(st.lists(st.sampled_from(pairs), max_size=10))
    links = [
        Link(
            id=f"l{number}",
            source=f"n{a}",
            target=f"n{b}",
            type=LinkType(
                technology="pcie",
                bandwidth=f"{draw(st.integers(1, 4))} GB/s",
                # Sums of these are exact in any order.
                latency=Figure(value=draw(st.integers(0, 3)) / 2**20, unit="s"),
                duplex=draw(st.sampled_from(["full", "half"])),
            ),
        )
        for number, (a, b) in enumerate(chosen)
    ]
    return machine_of(nodes, links)


def all_paths(machine, source, target):
    """Every simple path whose inner nodes forward, as (minus its bandwidth, latency, number of links, names passed)."""
    graph = machine.graph
    for path in nx.all_simple_edge_paths(graph, source, target):
        if all(graph.nodes[node]["type"] in FORWARDING_TYPES for node, _, _ in path[1:]):
            edges = [graph.edges[edge] for edge in path]
            yield (
                max(-edge["bandwidth_bytes_per_s"] for edge in edges),
                sum(edge["latency_s"] for edge in edges),
                len(edges),
                [name for _, node, link in path for name in (node, link)],
            )


@given(random_machines(), st.data())
def test_a_route_is_the_widest_then_the_shortest_of_all_paths(machine, data):
    names = [node.id for node in machine.nodes if node.id.startswith("n")]
    source, target = data.draw(st.permutations(names))[:2]
    paths = list(all_paths(machine, source, target))
    if not paths:
        with pytest.raises(TopologyError, match="no route leads"):
            machine.route(source, target)
        return
    route = machine.route(source, target)
    assert route.bandwidth_bytes_per_s == min(link.bandwidth_bytes_per_s for link in route.links)
    names = [
        name for hop in zip(route.node_ids[1:], route.links, strict=True) for name in (hop[0], hop[1].id)
    ]
    assert (-route.bandwidth_bytes_per_s, route.latency_s, len(route.links), names) == min(paths)


@given(random_machines(), st.randoms(use_true_random=False))
def test_routes_do_not_depend_on_the_order_of_the_file(machine, random):
    nodes, links = list(machine.nodes), list(machine.links)
    random.shuffle(nodes)
    random.shuffle(links)
    shuffled = Topology(name="shuffled", nodes=tuple(nodes), links=tuple(links))
    for source, target in itertools.permutations([n.id for n in nodes if n.id.startswith("n")], 2):
        try:
            expected = machine.route(source, target)
        except TopologyError:
            with pytest.raises(TopologyError):
                shuffled.route(source, target)
        else:
            assert shuffled.route(source, target) == expected


@given(random_machines())
def test_full_duplex_is_two_resources_and_half_duplex_one(machine):
    half = sum(link.type.duplex == "half" for link in machine.links)
    assert len(machine.resources) == 2 * (len(machine.links) - half) + half
    for source, target in itertools.permutations([n.id for n in machine.nodes if n.id.startswith("n")], 2):
        try:
            there, back = machine.route(source, target), machine.route(target, source)
        except TopologyError:
            continue
        assert set(there.resource_ids) <= machine.resources.keys()
        assert len(set(there.resource_ids)) == len(there.resource_ids) == len(there.links)
        shared = set(there.resource_ids) & set(back.resource_ids)
        both = {link.id for link in there.links} & {link.id for link in back.links}
        duplex = {link.id: link.type.duplex for link in machine.links}
        assert shared == {name for name in both if duplex[name] == "half"}


def test_devices_do_not_forward():
    gpu = catalogue().devices["v100-32gb-sxm2"]
    nodes = [Node(id=name, type="gpu", host="host", spec=gpu) for name in ("a", "b", "c")]
    nvlink = catalogue().link_types["nvlink2"]
    links = [Link(source="a", target="b", type=nvlink), Link(source="b", target="c", type=nvlink)]
    machine = machine_of(nodes, links)
    assert machine.route("a", "b").links
    with pytest.raises(TopologyError, match="no route leads from 'a' to 'c'"):
        machine.route("a", "c")


def test_uploads_to_all_gpus_share_the_memory_but_not_their_own_links():
    machine = load_preset("h20-4x-milan")
    routes = [machine.route("dram0", f"gpu{i}") for i in range(4)]
    assert set.intersection(*(set(route.resource_ids) for route in routes)) == {"dram0"}
    down = machine.route("gpu0", "dram0")
    assert set(down.resource_ids) & set(routes[0].resource_ids) == {"dram0"}


def test_gpus_under_one_switch_share_its_upstream_link():
    machine = load_preset("dgx-1v")
    shared = set(machine.route("dram0", "gpu0").resource_ids) & set(
        machine.route("dram0", "gpu1").resource_ids
    )
    assert shared == {"dram0", "root0--switch0:root0>switch0"}


def test_a_route_to_itself_takes_no_time():
    route = load_preset("cpu-laptop").route("cpu0", "cpu0")
    assert (route.links, route.latency_s, route.bandwidth_bytes_per_s) == ((), 0, math.inf)


def measured(machine, matrix):
    entries = [
        MeasuredBandwidth(source=source, target=target, bandwidth=Figure(value=value, unit="B/s"))
        for (source, target), value in matrix.items()
    ]
    return machine.model_copy(update={"measured": tuple(entries)})


def test_measured_bandwidth_overrides_the_declared_one_in_its_direction():
    machine = load_preset("a100-80gb-milan")
    declared = machine.route("dram0", "gpu0").bandwidth_bytes_per_s
    slower = measured(machine, {("dram0", "gpu0"): 11e9})
    assert slower.route("dram0", "gpu0").bandwidth_bytes_per_s == 11e9
    assert slower.route("gpu0", "dram0").bandwidth_bytes_per_s == declared
    faster = measured(machine, {("dram0", "gpu0"): 11e9, ("gpu0", "dram0"): 26.5e9})
    assert faster.route("gpu0", "dram0").bandwidth_bytes_per_s == 26.5e9
    assert faster.route("dram0", "gpu0").bandwidth_bytes_per_s == 11e9
    assert loads(dump(faster)) == faster
    assert machine.route("dram0", "gpu0").bandwidth_bytes_per_s == declared


@given(
    st.dictionaries(
        st.permutations(range(4)).map(lambda p: (f"gpu{p[0]}", f"gpu{p[1]}")), st.floats(1e6, 1e12)
    )
)
def test_every_measured_pair_reaches_exactly_what_was_measured(matrix):
    machine = measured(load_preset("h20-4x-milan"), matrix)
    for pair, bandwidth in matrix.items():
        assert machine.route(*pair).bandwidth_bytes_per_s == bandwidth


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_impossible_measurements_are_refused(value):
    with pytest.raises(ValueError, match=r"must be more than zero|is not a valid figure"):
        measured(load_preset("h200-1x"), {("dram0", "gpu0"): value})


def test_a_copy_is_staged_where_the_memory_reaches_both_ends_or_refused():
    gpu = catalogue().devices["rtx4090"]
    assert not gpu.pcie_peer_to_peer
    gpus = [Node(id=name, type="gpu", host="host", spec=gpu) for name in ("a", "b")]
    places = [Node(id="numa", type="numa", host="host"), Node(id="switch", type="pcie_switch", host="host")]
    dram = Node(id="dram", type="memory", host="host", capacity="1 GiB", bandwidth="50 GB/s")
    pcie, bus = catalogue().link_types["pcie4-x16"], catalogue().link_types["dram-bus"]
    links = [
        Link(source="numa", target="dram", type=bus),
        Link(source="numa", target="a", type=pcie),
        Link(source="switch", target="a", type=pcie),
        Link(source="switch", target="b", type=pcie),
    ]
    with pytest.raises(TopologyError, match="no route leads from 'dram' to 'b'"):
        machine_of([*gpus, *places, dram], links).route("a", "b")
    links.append(Link(source="numa", target="switch", type=pcie))
    staged = machine_of([*gpus, *places, dram], links).route("a", "b")
    assert (staged.staged_in, staged.node_ids) == ("dram", ("a", "numa", "dram", "numa", "switch", "b"))


def test_the_graph_is_a_frozen_multigraph_with_an_edge_for_each_link():
    machine = load_preset("dgx-1v")
    assert isinstance(machine.graph, nx.MultiGraph)
    edges = {(frozenset(ends), link) for *ends, link in machine.graph.edges(data="link")}
    assert edges == {(frozenset({link.source, link.target}), link) for link in machine.links}
    assert machine.graph.number_of_edges() == len(machine.links)
    with pytest.raises(nx.NetworkXError, match=r"[Ff]rozen"):
        machine.graph.add_node("x")


def test_gpus_are_ordered_by_host_then_index():
    gpu = catalogue().devices["rtx4090"]
    nodes = [
        Node(id="second", type="gpu", host="host", index=1, spec=gpu),
        Node(id="unnumbered", type="gpu", host="host", spec=gpu),
        Node(id="first", type="gpu", host="host", index=0, spec=gpu),
    ]
    assert [node.id for node in machine_of(nodes, []).compute_devices] == ["first", "second", "unnumbered"]


def test_a_changed_copy_computes_everything_anew():
    machine = load_preset("h20-4x-milan")
    before = machine.route("gpu0", "gpu1")
    without = machine.model_copy(
        update={"links": tuple(x for x in machine.links if x.type.technology != "nvlink")}
    )
    assert without.route("gpu0", "gpu1").bandwidth_bytes_per_s < before.bandwidth_bytes_per_s
    assert len(without.resources) == len(machine.resources) - 8
