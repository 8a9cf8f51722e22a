"""Machines by the names under which they are sold: valid, shaped as built, and extended by a user's file."""

import pytest

from topology import TopologyError, dump, loads, resolve
from topology.documents import load_preset
from topology.instances import instance_machine, instance_names
from topology.lint import lint


def test_every_instance_is_physical():
    for name in set(instance_names().values()):
        assert [finding for finding in lint(instance_machine(name)) if finding.severity == "error"] == [], (
            name
        )


def test_an_instance_survives_a_round_trip():
    machine = resolve("p3")
    assert loads(dump(machine)) == machine


def test_a_p4d_has_two_sockets_pairs_of_gpus_below_switches_and_four_adapters():
    machine = resolve("p4d")
    assert machine == resolve("P4D.24XLARGE")
    assert machine.route("dram1", "gpu7").node_ids == ("dram1", "numa1", "root3", "switch3", "gpu7")
    assert machine.route("gpu0", "gpu7").node_ids == ("gpu0", "nvswitch0", "gpu7")
    assert len(machine.of_type("nic")) == 4
    assert len(machine.of_type("disk")) == 8
    assert sum(node.memory_bytes for node in machine.of_type("memory")) == 1152 * 2**30


def test_a_slice_of_a_host_has_its_share_of_bandwidth_and_cores():
    slice_, whole = resolve("g6.xlarge"), resolve("g6.48xlarge")
    assert slice_.device_spec("cpu0").num_cores == 2
    rates = [
        sum(node.bandwidth.in_si("bandwidth") for node in machine.of_type("memory"))
        for machine in (slice_, whole)
    ]
    assert rates[0] / rates[1] == pytest.approx(2 / 96)


def test_what_a_seller_does_not_print_is_assumed():
    memory = resolve("p5").node("dram0")
    assert (memory.capacity.basis, memory.bandwidth.basis) == ("datasheet", "assumed")


def test_a_user_adds_instances_with_a_file(tmp_path, monkeypatch):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "instances:\n  our-node: {source: our order, gpu: l40s, gpus: 4, cpu: epyc-9354, cores: 32, memory: 768 GiB, channels: 12, rate: 4800}\n"
    )
    monkeypatch.setenv("ZOSIM_CATALOGUE", str(path))
    assert len(resolve("our-node").compute_devices) == 4
    path.write_text(
        "instances:\n  our-node: {source: our order, cpu: z80, cores: 1, memory: 64 KiB, channels: 1, rate: 1}\n"
    )
    with pytest.raises(TopologyError, match="no 'z80' among its devices"):
        resolve("our-node")


def test_eight_v100_are_joined_as_a_cube_mesh():
    """As in the preset of a DGX-1: six NVLinks a GPU, and none between some pairs."""
    links, known = (
        {(link.source, link.target): link.count for link in machine.links if link.type == "nvlink2"}
        for machine in (instance_machine("p3.16xlarge"), load_preset("dgx-1v"))
    )
    assert {tuple(sorted(pair)): count for pair, count in links.items()} == known
