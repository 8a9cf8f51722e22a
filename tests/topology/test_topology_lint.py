"""One planted impossibility per rule, each found by its rule and by no other."""

import pytest

from topology import MeasuredBandwidth, TopologyError, dump, load_preset, loads, refuse_errors
from topology.lint import lint


def planted(preset, old, new, count=1):
    text = dump(load_preset(preset))
    assert old in text
    return loads(text.replace(old, new, count))


@pytest.mark.parametrize(
    ("preset", "old", "new", "rule", "severity", "words"),
    [
        # 64 GB/s is what brochures print for both directions of Gen4 x16.
        ("a100-80gb-milan", "value: 31.508", "value: 64", "pcie-speed", "error", "faster than PCIe 4.0 x16"),
        ("dgx-1v", "value: 25.0\n      unit: GB/s", "value: 50\n      unit: GB/s", "nvlink-speed", "error", "NVLink 2"),
        ("dgx-1v", "count: 2", "count: 3", "nvlink-count", "error", "7 NVLinks leave it"),
        ("a100-80gb-milan", "value: 204.8", "value: 409.6", "memory-channels", "error", "8 channels of 3200 MT/s"),
        ("a100-80gb-milan", "technology: pcie\n", "technology: pcie\n    duplex: half\n", "duplex", "warning", "half duplex"),
        ("a100-80gb-milan", "value: 0.5\n      unit: us", "value: 0\n      unit: us", "latency", "warning", "no latency"),
        ("a100-80gb-milan", "value: 0.5\n      unit: us", "value: 2\n      unit: s", "latency", "error", "longer than a second"),
    ],
)  # fmt: skip
def test_a_planted_impossibility_is_found(preset, old, new, rule, severity, words):
    findings = lint(planted(preset, old, new))
    assert {(finding.rule, finding.severity) for finding in findings} == {(rule, severity)}
    assert words in findings[0].message
    assert findings[0].where
    assert findings[0].hint


def without_links(preset, *ends):
    machine = load_preset(preset)
    kept = tuple(link for link in machine.links if not {link.source, link.target} & set(ends))
    return machine.model_copy(update={"links": kept})


def test_a_gpu_that_nothing_reaches_is_an_error():
    machine = without_links("h20-4x-milan", "gpu2")
    (finding,) = [item for item in lint(machine) if item.severity == "error"]
    assert (finding.rule, finding.where) == ("unreachable", "gpu2")
    assert "nothing reaches it" in finding.message
    with pytest.raises(TopologyError, match="contradicts physics:\n  gpu2: nothing reaches it"):
        refuse_errors(machine)


def test_a_cpu_without_memory_is_an_error():
    assert {item.rule for item in lint(without_links("cpu-laptop", "dram0"))} == {"unreachable", "unlinked"}


def test_hosts_that_no_network_joins_are_a_warning():
    findings = lint(without_links("a100-80gb-3x4", "network0"))
    assert {(item.rule, item.severity) for item in findings} == {
        ("separate-hosts", "warning"),
        ("unlinked", "warning"),
    }


def test_a_link_faster_than_the_gpus_connector_is_an_error():
    machine = load_preset("a100-80gb-milan")
    gen5 = load_preset("h200-1x").links[-1].type
    links = (*machine.links[:-1], machine.links[-1].model_copy(update={"type": gen5}))
    (finding,) = lint(machine.model_copy(update={"links": links}))
    assert finding.rule == "pcie-connector"
    assert "NVIDIA A100 80GB PCIe has PCIe 4.0" in finding.message


def test_nvlink_on_a_gpu_without_nvlink_is_an_error():
    machine = load_preset("rtx4090-2x")
    nvlink = load_preset("h20-4x-milan").route("gpu0", "gpu1").links[0]
    bridge = nvlink.model_copy(update={"id": "bridge", "source": "gpu0", "target": "gpu1"})
    findings = lint(machine.model_copy(update={"links": (*machine.links, bridge)}))
    assert {item.message for item in findings} == {"NVIDIA GeForce RTX 4090 has no NVLink"}


def test_a_sparse_peak_passed_off_as_dense_is_a_warning():
    machine = load_preset("h200-1x")
    gpu = machine.node("gpu0")
    mixed_up = gpu.spec.model_copy(update={"peak_dense": {**gpu.spec.peak_dense, **gpu.spec.peak_sparse}})
    nodes = tuple(n.model_copy(update={"spec": mixed_up}) if n.id == "gpu0" else n for n in machine.nodes)
    findings = lint(machine.model_copy(update={"nodes": nodes}))
    assert {item.rule for item in findings} == {"sparse-peak"}
    assert len(findings) == len(gpu.spec.peak_sparse)


def test_a_measurement_beyond_the_wire_is_a_warning():
    entry = MeasuredBandwidth(source="dram0", target="gpu0", bandwidth="50 GB/s")
    machine = load_preset("a100-80gb-milan").model_copy(update={"measured": (entry,)})
    (finding,) = lint(machine)
    assert (finding.rule, finding.severity) == ("measured", "warning")
    assert "root0--gpu0" in finding.message


def test_a_pcie_link_of_unknown_generation_is_a_warning():
    machine = load_preset("a100-80gb-milan")
    links = tuple(
        link.model_copy(update={"type": link.type.model_copy(update={"pcie": None})})
        for link in machine.links
    )
    (finding,) = lint(machine.model_copy(update={"links": links}))
    assert finding.rule == "pcie-width"
