"""Descriptions validate themselves, and their errors name the thing, the line, the rule and the fix."""

import pytest
from pydantic import ValidationError

from topology import Figure, Link, LinkType, Node, Topology, TopologyError, dump, load, loads
from topology.validation import FrozenModel, readable

SMALL = """\
name: small
devices:
  toy:
    name: A toy GPU
    type: gpu
    peak_dense: {fp32: 10 Tflop/s}
    memory: 8 GiB
    memory_bandwidth: 400 GB/s
    cores: 16
    copy_engines: 2
nodes:
  - {id: host0, type: host}
  - {id: numa0, type: numa, host: host0}
  - {id: dram0, type: memory, host: host0, capacity: 32 GiB, bandwidth: 50 GB/s}
  - {id: gpu0, type: gpu, host: host0, spec: toy}
links:
  - {source: numa0, target: dram0, technology: memory}
  - {source: numa0, target: gpu0, technology: pcie, bandwidth: 15.75 GB/s, latency: 1 us, pcie: {generation: 3, lanes: 16}}
"""


def edited(old, new):
    assert old in SMALL
    return SMALL.replace(old, new)


def test_a_small_file_reads_as_declared():
    machine = loads(SMALL)
    gpu, dram = machine.node("gpu0"), machine.host_memory("gpu0")
    assert gpu.memory_bytes == 8 * 2**30
    assert dram.bandwidth_bytes_per_s == 50e9
    assert machine.device_spec("gpu0").peak_flop_per_s("fp32") == 10e12
    assert machine.route("dram0", "gpu0").bandwidth_bytes_per_s == 15.75e9
    assert machine.route("dram0", "gpu0").latency_s == 1e-6


def test_a_file_written_back_is_the_same_machine():
    machine = loads(SMALL)
    assert loads(dump(machine)) == machine


@pytest.mark.parametrize(
    ("old", "new", "message", "hint"),
    [
        ("15.75 GB/s", "-3 GB/s", r"links\[1\].*-3 GB/s must be more than zero \(line 18\)", None),
        ("15.75 GB/s", "15.75 GB", "unit 'GB' cannot be a bandwidth", "GB/s"),
        ("15.75 GB/s", "15.75", "a number without a unit cannot be a bandwidth", "31.5 GB/s"),
        ("15.75 GB/s", ".inf", "inf is not a valid figure", "leave it out"),
        ("target: gpu0", "target: gpu1", r"names the unknown node 'gpu1' \(line 18\)", "did you mean 'gpu0'"),
        ("id: dram0", "id: gpu0", r"two nodes have the id 'gpu0' \(line 15\)", None),
        ("spec: toy", "spec: toyy", r"line 15.*unknown device 'toyy'", "did you mean 'toy'"),
        ("spec: toy", "spec: epyc-7763", "needs the specification of a gpu.*type cpu", "catalogue"),
        ("type: numa, host: host0", "type: numa, host: hostO", r"unknown host 'hostO' \(line 13\)", "did you mean 'host0'"),
        ("type: numa, host: host0", "type: numa", "'numa0' of type numa needs its host", None),
        ("type: gpu, host", "type: gpus, host", "must be one of", "did you mean 'gpu'"),
        ("capacity: 32 GiB", "capcity: 32 GiB", r"unknown key.*line 14", "did you mean 'capacity'"),
        ("latency: 1 us", "latencies: 1 us", "unknown key", "did you mean 'latency'"),
        ("latency: 1 us", "latency: -1 us", "must be zero or more", None),
        ("lanes: 16", "lanes: 12", r"must be one of.*value 12", None),
        ("    memory: 8 GiB\n", "", "gpu without memory", None),
        ("memory_bandwidth: 400 GB/s", "memory_bandwith: 400 GB/s", "unknown key", "did you mean 'memory_bandwidth'"),
        ("name: small", "nam: small", "name: missing", "did you mean 'name'"),
        ("technology: pcie, bandwidth: 15.75 GB/s,", "technology: pcie,", "needs a bandwidth", "per direction"),
        ("technology: pcie, bandwidth", "type: pcie9-x16, bandwidth", "unknown type 'pcie9-x16'", "pcie"),
        ("source: numa0, target: gpu0", "source: gpu0, target: gpu0", "joins 'gpu0' with itself", None),
        ("bandwidth: 50 GB/s", "bandwidth: [50]", "dram0|nodes", None),
        ("name: small", "format: 2\nname: small", "format: must be one of 1", None),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_fix(old, new, message, hint):
    with pytest.raises(TopologyError, match=message) as caught:
        loads(edited(old, new), what="small.yaml")
    assert "small.yaml" in str(caught.value)
    if hint is not None:
        assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: [unclosed", r"not YAML, line \d"),
        ("a: b: c", "not YAML, line 1, column 5"),
        ("", "empty, but must be a mapping"),
        ("- 1\n- 2\n", "a list, but must be a mapping"),
        ("!!python/object/apply:os.system ['true']", "not YAML.*could not determine a constructor"),
        ("name: x\nnodes: [1, 2]\n", r"nodes\[0\]"),
        ("name: x\nnodes: []\n", "at least 1"),
        ("name: x\nnodes: [{id: h, type: host}]\n", "no gpu and no cpu"),
    ],
)
def test_what_is_no_topology_file_is_refused(text, message):
    with pytest.raises(TopologyError, match=message):
        loads(text)


def test_files_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(TopologyError, match=r"no topology file at .*none\.yaml"):
        load(tmp_path / "none.yaml")
    with pytest.raises(TopologyError, match="directory"):
        load(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TopologyError, match="not UTF-8"):
        load(tmp_path / "binary.yaml")


def test_types_are_frozen():
    machine = loads(SMALL)
    with pytest.raises(ValidationError, match="frozen"):
        machine.nodes[0].id = "other"
    with pytest.raises(ValidationError, match="frozen"):
        machine.name = "other"


def test_unknown_names_are_refused_with_a_suggestion():
    machine = loads(SMALL)
    with pytest.raises(TopologyError, match="no node 'gpu1'") as caught:
        machine.node("gpu1")
    assert caught.value.hint == "did you mean 'gpu0'?"
    with pytest.raises(TopologyError, match="'dram0' is a memory, not a processor"):
        machine.device_spec("dram0")
    with pytest.raises(TopologyError, match="no dense peak for 'bf16'") as caught:
        machine.device_spec("gpu0").peak_flop_per_s("bf16")
    assert caught.value.hint == "declared: fp32"


def test_parallel_links_need_names_of_their_own():
    host = Node(id="h", type="host")
    ends = [Node(id=name, type="numa", host="h") for name in "ab"]
    cpu = loads(SMALL).model_copy().nodes[3]
    kind = LinkType(technology="pcie", bandwidth="1 GB/s")
    with pytest.raises(ValidationError, match="two links have the id 'a--b'"):
        Topology(
            name="x",
            nodes=(host, *ends, cpu.model_copy(update={"host": "h"})),
            links=(Link(source="a", target="b", type=kind), Link(source="a", target="b", type=kind)),
        )


def test_one_name_means_one_thing():
    machine = loads(SMALL)
    other = machine.nodes[3].spec.model_copy(update={"name": "another"})
    twin = Node(id="gpu1", type="gpu", host="host0", spec=other)
    with pytest.raises(ValidationError, match="two different devices have the name 'toy'"):
        Topology(name="x", nodes=(*machine.nodes, twin), links=machine.links)


def test_a_bundle_of_links_has_the_sum_of_their_bandwidth_and_software_reaches_a_part():
    kind = LinkType(technology="nvlink", bandwidth="25 GB/s", efficiency="80 %")
    link = Link(source="a", target="b", type=kind, count=4)
    assert link.nominal_bandwidth_bytes_per_s == 100e9
    assert link.bandwidth_bytes_per_s == pytest.approx(80e9)


def test_figures_keep_value_unit_and_source():
    figure = Figure(value=80, unit="GiB", source="a datasheet", basis="datasheet")
    assert figure.in_si("bytes") == 80 * 2**30
    assert str(figure) == "80 GiB"


class _Inner(FrozenModel):
    weight: int


class _Outer(FrozenModel):
    parts: tuple[_Inner, ...] = ()
    named: dict[str, _Inner] | None = None


@pytest.mark.parametrize(
    ("data", "message", "hint"),
    [
        ({"parts": [{"weigth": 1}]}, "parts[0].weigth: unknown key", "did you mean 'weight'?"),
        ({"named": {"a": {"weigth": 1}}}, "named.a.weigth: unknown key", "did you mean 'weight'?"),
        ({"part": []}, "part: unknown key, value []", "did you mean 'parts'?"),
    ],
)
def test_readable_errors_suggest_keys_at_any_depth(data, message, hint):
    with pytest.raises(TopologyError) as caught, readable("thing"):
        _Outer.model_validate(data)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_readable_errors_shorten_long_lists():
    with pytest.raises(TopologyError, match="and 4 more"), readable("thing"):
        _Outer.model_validate({"parts": [{"weight": "x"}] * 10})
