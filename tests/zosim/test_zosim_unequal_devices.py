"""Devices of unequal speed: the answer depends on what they are, not on the order in which a file lists them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel import read_model_spec
from topology import Topology, load_preset
from topology.documents import catalogue
from topology.schema import Link, Node
from zosim.config import PlanConfig, Search
from zosim.planning.planner import choose
from zosim.planning.request import Hardware, Request
from zosim.planning.split_options import SplitOptions
from zosim.plans import Mesh, Weights

DESKTOP = load_preset("rtx4090-2x")


def of_host(number, gpu):
    """Return nodes and links of a desktop whose cards are of a model of the catalogue, with a network adapter."""
    specs, links = catalogue().devices, catalogue().link_types
    at = f"host{number}"

    def named(name):
        return name if name is None else f"{at}/{name}"

    nodes = [
        node.model_copy(
            update={"id": named(node.id), "host": named(node.host)}
            | ({"spec": specs[gpu]} if node.type == "gpu" else {})
        )
        for node in DESKTOP.nodes
    ]
    joined = [
        link.model_copy(
            update={"id": named(link.id), "source": named(link.source), "target": named(link.target)}
        )
        for link in DESKTOP.links
    ]
    nic = Node(id=named("nic"), type="nic", host=named("host0"))
    joined.append(Link(source=named("numa0"), target=nic.id, type=links["fabric"]))
    joined.append(Link(source=nic.id, target="network", type=links["infiniband-hdr"]))
    return [*nodes, nic], joined


def cluster(*gpus):
    parts = [of_host(number, gpu) for number, gpu in enumerate(gpus)]
    network = Node(id="network", type="network")
    nodes = [node for part, _ in parts for node in part]
    links = [link for _, part in parts for link in part]
    return Topology(name="two-kinds", nodes=(network, *nodes), links=tuple(links))


def with_slow_card(slow):
    """Return a desktop of which one card has four lanes, the other eight."""
    narrow = catalogue().link_types["pcie3-x4"]
    links = tuple(
        link.model_copy(update={"type": narrow}) if link.target == slow else link for link in DESKTOP.links
    )
    return DESKTOP.model_copy(update={"links": links})


def chosen(topology, model, max_ranks=None, **fields):
    hardware = Hardware.of(topology, topology.name, max_ranks=max_ranks)
    config = PlanConfig(model=read_model_spec(model), weights=Weights(dtype="float16"), **fields)
    return choose(Request.of(config, hardware, SplitOptions()))


def kinds_of(decision, topology):
    return [topology.device_spec(device).id for device in decision.plan.placement.devices]


@pytest.mark.slow
def test_a_card_on_a_slow_link_is_not_taken_for_being_the_first():
    times = {}
    for slow, fast in (("gpu0", "gpu1"), ("gpu1", "gpu0")):
        decision = chosen(with_slow_card(slow), "llama-3-8b", 1, batch=1, seq=128)
        assert decision.plan.is_offloaded or decision.plan.placement.devices == (fast,)
        assert decision.plan.placement.devices == (fast,)
        times[slow] = decision.prediction.step_time_s
    assert times["gpu0"] == pytest.approx(times["gpu1"], rel=1e-9)


@pytest.mark.slow
def test_hosts_of_two_kinds_may_be_listed_in_any_order():
    gpus, found = ("a100-80gb-pcie", "rtx4090"), []
    for order in (gpus, gpus[::-1]):
        topology = cluster(*order)
        decision = chosen(topology, "opt-13b", batch=2, seq=512)
        found.append((decision.prediction.step_time_s, decision.plan.mesh, kinds_of(decision, topology)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-9)
    assert found[0][1:] == found[1][1:]


def test_stages_are_as_long_as_their_devices_are_fast():
    splits = []
    for slow in ("gpu0", "gpu1"):
        spec = {"spec": catalogue().devices["t4"]}
        nodes = tuple(node.model_copy(update=spec) if node.id == slow else node for node in DESKTOP.nodes)
        topology = DESKTOP.model_copy(update={"nodes": nodes})
        decision = chosen(topology, "opt-1.3b", batch=2, seq=128, mesh=Mesh(stage=2))
        assert kinds_of(decision, topology) == ["rtx4090", "t4"]
        splits.append(decision.plan.split_points)
        of_fast, of_slow = (len(decision.plan.segments_of(rank)) for rank in (0, 1))
        assert of_fast > 1.5 * of_slow
    assert splits[0] == splits[1]


def test_a_device_that_is_named_comes_first():
    topology = cluster("rtx4090", "a100-80gb-pcie")
    named = Hardware.of(topology, topology.name, device="host0/gpu1")
    assert next(iter(named.device_choice.selections()))["host0/host0"][0] == "host0/gpu1"
    assert Hardware.of(topology, topology.name).device == "host1/gpu0"


def test_shares_of_a_batch_follow_the_speed_of_devices():
    """No other shares of two kinds of cards are faster, and even ones take almost twice as long."""
    topology = cluster("a100-80gb-pcie", "rtx3090")
    search = Search(method="ddp", ranks=4)
    decision = chosen(topology, "opt-1.3b", 4, batch=12, seq=512, search=search)
    fast, slow = 5, 1
    assert decision.plan.mesh.num_sequences == (fast, fast, slow, slow)

    def seconds(shares):
        mesh = Mesh(data=4, num_sequences=shares)
        return replace(
            decision.chosen.planned, plan=decision.plan.model_copy(update={"mesh": mesh})
        ).step_time_s

    assert seconds(None) > 1.9 * decision.chosen.seconds
    assert min(map(seconds, ((4, 4, 2, 2), (5, 4, 2, 1), (6, 4, 1, 1)))) > decision.chosen.seconds
