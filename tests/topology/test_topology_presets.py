"""The machines that come with the package: sourced, physical, and what their makers built."""

import datetime
from importlib import resources

import pytest
import yaml

from topology import TopologyError, catalogue, dump, load_preset, loads, preset_names, resolve
from topology.lint import lint

DATA = resources.files("topology") / "data"
FILES = sorted(
    (entry for folder in ("presets", "catalogue") for entry in (DATA / folder).iterdir()),
    key=lambda entry: entry.name,
)
EXPECTED = {
    "a100-80gb-3x4": (3, 12),
    "a100-80gb-milan": (1, 1),
    "a40-1x": (1, 1),
    "a6000-2x": (1, 2),
    "cpu-cluster-1gbit": (4, 4),
    "cpu-laptop": (1, 1),
    "dgx-1v": (1, 8),
    "dgx-a100": (1, 8),
    "dgx-h100": (1, 8),
    "h20-4x-milan": (1, 4),
    "h200-1x": (1, 1),
    "hgx-h200": (1, 8),
    "rtx3090-1x": (1, 1),
    "rtx4090-1x-nvme": (1, 1),
    "rtx4090-2x": (1, 2),
    "t4-1x": (1, 1),
}


def test_the_presets_are_these():
    assert preset_names() == tuple(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_every_preset_loads_lints_clean_and_survives_a_round_trip(name):
    machine = load_preset(name)
    assert machine.name == name
    assert (len(machine.hosts), len(machine.compute_devices)) == EXPECTED[name]
    assert lint(machine) == ()
    assert loads(dump(machine)) == machine


FIGURE_KEYS = {"value", "unit", "source", "date", "basis", "note"}
# Numbers that count or name something rather than measure it.
PLAIN = {"format", "index", "count", "generation", "lanes", "num_channels", "num_links", "nvlink_generation"}


def unsourced(value, path=()):
    """Paths of numbers that stand outside a figure, and of figures without a source, a unit or a date."""
    if isinstance(value, dict):
        if "value" in value:
            complete = value.keys() <= FIGURE_KEYS and {"unit", "source", "date", "basis"} <= value.keys()
            if not (complete and len(value["source"]) > 10 and isinstance(value["date"], datetime.date)):
                yield path
            return
        for key, item in value.items():
            yield from unsourced(item, (*path, key))
    elif isinstance(value, list):
        for position, item in enumerate(value):
            yield from unsourced(item, (*path, position))
    elif isinstance(value, int | float) and not isinstance(value, bool) and path[-1] not in PLAIN:
        yield path
    elif isinstance(value, str) and value[:1].isdigit() and path[-1] != "label":
        yield path  # a quantity written as text has no source


@pytest.mark.parametrize("entry", FILES, ids=lambda entry: entry.name)
def test_every_figure_has_unit_source_and_date(entry):
    assert list(unsourced(yaml.safe_load(entry.read_text(encoding="utf-8")))) == []


def test_the_source_check_catches_a_planted_figure_without_source():
    planted = {"devices": {"x": {"tdp": {"value": 1, "unit": "W"}, "clock": 3.0, "memory": "80 GiB"}}}
    assert len(list(unsourced(planted))) == 3


@pytest.mark.parametrize("name", [name for name, spec in catalogue().devices.items() if spec.type == "gpu"])
def test_sparse_peaks_are_twice_the_dense_ones(name):
    spec = catalogue().devices[name]
    for dtype in spec.peak_sparse:
        dense, sparse = spec.peak_flop_per_s(dtype), spec.peak_flop_per_s(dtype, sparse=True)
        assert sparse == pytest.approx(2 * dense, rel=1e-3)


@pytest.mark.parametrize(
    ("device", "dtype", "teraflops"),
    [
        ("a100-80gb-pcie", "bf16", 312),
        ("a100-80gb-sxm", "tf32", 156),
        ("h100-80gb-sxm", "fp8", 1978.9),
        ("h20-96gb", "bf16", 148),
        ("v100-32gb-sxm2", "fp16", 125),
        ("rtx4090", "fp32", 82.6),
    ],
)
def test_dense_peaks_are_the_published_ones(device, dtype, teraflops):
    assert catalogue().devices[device].peak_flop_per_s(dtype) == pytest.approx(teraflops * 1e12)


# From `nvidia-smi topo -m` of a DGX-1V: NVLinks from each GPU to GPU0 ... GPU7.
DGX_1V_NVLINKS = [
    [0, 1, 1, 2, 2, 0, 0, 0],
    [1, 0, 2, 1, 0, 2, 0, 0],
    [1, 2, 0, 2, 0, 0, 1, 0],
    [2, 1, 2, 0, 0, 0, 0, 1],
    [2, 0, 0, 0, 0, 1, 1, 2],
    [0, 2, 0, 0, 1, 0, 2, 1],
    [0, 0, 1, 0, 1, 2, 0, 2],
    [0, 0, 0, 1, 2, 1, 2, 0],
]


def test_dgx_1v_is_the_hybrid_cube_mesh():
    graph = load_preset("dgx-1v").graph
    for row, counts in enumerate(DGX_1V_NVLINKS):
        found = [
            sum(
                edge["link"].count
                for edge in (graph.get_edge_data(f"gpu{row}", f"gpu{column}") or {}).values()
            )
            for column in range(8)
        ]
        assert found == counts
        assert sum(found) == 6  # NVLinks of a V100


def test_dgx_1v_routes_take_nvlink_where_there_is_one_and_the_sockets_link_elsewhere():
    machine = load_preset("dgx-1v")
    assert machine.route("gpu0", "gpu4").node_ids == ("gpu0", "gpu4")
    assert machine.route("gpu0", "gpu4").bandwidth_bytes_per_s == 2 * 20e9
    across = machine.route("gpu0", "gpu5")
    assert across.node_ids == ("gpu0", "switch0", "root0", "numa0", "numa1", "root2", "switch2", "gpu5")
    assert across.bandwidth_bytes_per_s == 6e9
    assert machine.host_memory("gpu5").id == "dram1"


def test_h20_pcie_is_milans():
    machine = load_preset("h20-4x-milan")
    route = machine.route("dram0", "gpu3")
    assert {link.type.pcie.generation for link in route.links if link.type.pcie} == {4}
    assert machine.route("gpu0", "gpu3").links[0].type.technology == "nvlink"


def test_copies_between_rtx_4090_are_staged_in_host_memory():
    machine = load_preset("rtx4090-2x")
    route = machine.route("gpu0", "gpu1")
    assert route.staged_in == "dram0"
    assert route.node_ids == ("gpu0", "root0", "numa0", "dram0", "numa0", "root1", "gpu1")
    assert "dram0" in route.resource_ids
    assert machine.route("gpu0", "gpu0").links == ()


def test_nodes_of_the_cluster_meet_over_the_network():
    machine = load_preset("a100-80gb-3x4")
    names = [node.id for node in machine.compute_devices]
    assert names == [f"node{host}/gpu{index}" for host in range(3) for index in range(4)]
    route = machine.route("node0/gpu1", "node2/gpu0")
    assert "network0" in route.node_ids
    assert route.bandwidth_bytes_per_s == pytest.approx(24e9)
    assert machine.host_of("node2/gpu0").id == "node2"
    assert machine.host_memory("node1/gpu2").id == "node1/dram0"
    with pytest.raises(TopologyError, match="has no host"):
        machine.host_of("network0")


def test_a_laptops_cpu_is_its_compute_device_with_the_hosts_memory():
    machine = load_preset("cpu-laptop")
    (cpu,) = machine.compute_devices
    spec = machine.device_spec(cpu.id)
    dram = machine.host_memory(cpu.id)
    assert spec.memory_bytes == dram.memory_bytes == 16 * 2**30
    assert spec.memory_bandwidth_bytes_per_s == pytest.approx(dram.bandwidth_bytes_per_s)
    assert spec.num_copy_engines == 0


@pytest.mark.parametrize(
    ("spec", "message", "hint"),
    [
        ("dgx-1", "not host, a preset, a file or GPUs", "dgx-1v"),
        ("two\nlines", "not host, a preset, a file or GPUs", "zosim topology list"),
        ("", "not host, a preset, a file or GPUs", "zosim topology list"),
        ("2x rtx4900", "unknown hardware '2x rtx4900'", "did you mean 'rtx4090'"),
        ("missing.yaml", "no topology file at", "list"),
        ("a/b", "no topology file at", "list"),
    ],
)
def test_hardware_that_is_not_there_is_refused(spec, message, hint):
    with pytest.raises(TopologyError, match=message) as caught:
        resolve(spec)
    assert hint in caught.value.hint


def test_gpus_are_also_named_as_presets_are():
    assert resolve("rtx4090-3x") == resolve("3x rtx4090")


def test_resolve_takes_a_preset_or_a_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(dump(load_preset("h200-1x")), encoding="utf-8")
    assert resolve(str(file)) == resolve("h200-1x")
    with pytest.raises(TopologyError, match="no preset"):
        load_preset("h200")


def test_a_list_whose_only_item_is_wrong_is_not_called_empty(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("name: x\nnodes:\n  - {id: gpu0, type: gpu, memory: 24}\n")
    with pytest.raises(TopologyError, match=r"is not valid: nodes\[0\].memory: unknown key"):
        resolve(str(file))
