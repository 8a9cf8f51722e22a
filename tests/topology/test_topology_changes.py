"""Machines otherwise than they are: what a change reaches, and what it leaves alone."""

import pytest

from topology import load_preset
from topology.changes import changed
from topology.errors import TopologyError
from topology.figures import Figure
from topology.schema import MeasuredBandwidth

BOARD = load_preset("dgx-h100")


def flop_per_s(topology, device):
    return topology.device_spec(device).peak_flop_per_s("bf16")


def test_one_device_is_slowed_and_its_likes_are_not():
    slow = changed(BOARD, ["gpu2.speed=0.5"])
    assert flop_per_s(slow, "gpu2") == flop_per_s(BOARD, "gpu2") / 2
    before, after = (machine.device_spec("gpu2") for machine in (BOARD, slow))
    assert after.memory_bandwidth_bytes_per_s == before.memory_bandwidth_bytes_per_s / 2
    assert (after.memory_bytes, after.name) == (before.memory_bytes, before.name)
    assert slow.device_spec("gpu3") == BOARD.device_spec("gpu3")
    assert slow.links == BOARD.links
    # Two that are slowed alike are of one kind, which the others are not.
    both = changed(BOARD, ["gpu2.speed=0.5", "gpu3.speed=0.5"])
    assert both.device_spec("gpu2") == both.device_spec("gpu3")
    assert len({both.device_spec(f"gpu{index}").id for index in range(8)}) == 2
    assert changed(BOARD, ["gpu.speed=0.5", "gpu.speed=2"]) == BOARD


def test_links_are_named_one_by_one_by_type_and_by_technology():
    pcie = [link for link in BOARD.links if link.type.technology == "pcie"]
    one, all_of_them = (changed(BOARD, [f"{name}.bandwidth=0.5x"]) for name in (pcie[0].id, "pcie"))
    ratios = [
        [
            then.nominal_bandwidth_bytes_per_s / now.nominal_bandwidth_bytes_per_s
            for now, then in zip(BOARD.links, machine.links, strict=True)
            if now.type.technology == "pcie"
        ]
        for machine in (one, all_of_them)
    ]
    assert sorted(ratios[0]) == [0.5, *[1.0] * (len(pcie) - 1)]
    assert set(ratios[1]) == {0.5}
    set_ = changed(BOARD, [f"{pcie[0].type.name}.bandwidth=8 GB/s", "nvlink.latency=10us"])
    assert {8e9} == {
        link.nominal_bandwidth_bytes_per_s for link in set_.links if link.type.name == pcie[0].type.name
    }
    (latency_s,) = {link.latency_s for link in set_.links if link.type.technology == "nvlink"}
    assert latency_s == pytest.approx(1e-5)


def test_what_was_measured_changes_with_what_lies_on_its_way():
    memory = BOARD.host_memory("gpu0").id
    figure = Figure(value=50, unit="GB/s", basis="measured")
    entries = tuple(
        MeasuredBandwidth(source=memory, target=gpu, bandwidth=figure) for gpu in ("gpu0", "gpu1")
    )
    machine = BOARD.model_copy(update={"measured": entries})
    (link, *_) = [link.id for link in machine.route(memory, "gpu0").links if "gpu0" in link.id]
    slow = changed(machine, [f"{link}.bandwidth=0.5x"])
    assert slow.route(memory, "gpu0").bandwidth_bytes_per_s == 25e9
    assert slow.route(memory, "gpu1").bandwidth_bytes_per_s == 50e9


def test_what_is_lost_takes_its_links_and_a_host_all_that_it_contains():
    fewer = changed(BOARD, drop=["gpu3"])
    assert [node.id for node in fewer.compute_devices] == [f"gpu{i}" for i in (0, 1, 2, 4, 5, 6, 7)]
    assert not [link for link in fewer.links if "gpu3" in (link.source, link.target)]
    with pytest.raises(TopologyError, match="without"):
        changed(BOARD, drop=[BOARD.hosts[0].id])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("gpu2.speed", "is no change"),
        ("gpu2.colour=2", "is no change"),
        ("gpu2.speed=fast", "fast is no factor"),
        ("gpu2.speed=0", "0 is no factor"),
        ("gpu9.speed=2", "called 'gpu9'"),
        ("pcie.memory=2x", "pcie of .* has no memory"),
        ("pcie.bandwidth=8", "without a unit"),
        ("gpu0.memory=1e30x", "beyond any hardware"),
    ],
)
def test_a_change_that_is_none_is_refused(change, message):
    with pytest.raises(TopologyError, match=message) as refusal:
        changed(BOARD, [change])
    assert refusal.value.hint
