"""What other tools wrote becomes the machine they saw; damaged files are refused."""

from pathlib import Path

import pytest

from topology import (
    TopologyError,
    dump,
    from_hwloc_xml,
    from_nccl_xml,
    from_nvidia_smi_topo,
    load_preset,
    loads,
)
from topology.importers.smi import parse_topo_matrix
from topology.lint import lint

FIXTURES = Path(__file__).parent / "fixtures"


def text_of(name):
    return (FIXTURES / name).read_text(encoding="utf-8")


def nvlinks_of(machine):
    return {
        frozenset({link.source, link.target}): link.count
        for link in machine.links
        if link.type.technology == "nvlink"
    }


IMPORTED = {
    "dgx1v": lambda: from_nvidia_smi_topo(text_of("dgx1v_topo.txt")),
    "hgx_h100": lambda: from_nvidia_smi_topo(text_of("hgx_h100_topo.txt"), gpu="h100-80gb-sxm"),
    "pcie_tree": lambda: from_nvidia_smi_topo(text_of("pcie_tree_topo.txt"), gpu="NVIDIA GeForce RTX 4090"),
    "vm": lambda: from_nvidia_smi_topo(text_of("vm_topo.txt"), gpu="h200-141gb-sxm"),
    "nccl": lambda: from_nccl_xml(FIXTURES / "nccl_a100x4.xml"),
    "nccl_vm": lambda: from_nccl_xml(FIXTURES / "nccl_vm_h100x2.xml"),
    "hwloc": lambda: from_hwloc_xml(FIXTURES / "hwloc_workstation.xml"),
}


@pytest.mark.parametrize("name", IMPORTED)
def test_what_is_imported_lints_clean_and_survives_a_round_trip(name):
    machine = IMPORTED[name]()
    assert lint(machine) == ()
    assert loads(dump(machine)) == machine
    for device in machine.compute_devices:
        assert machine.route(machine.host_memory(device.id).id, device.id).links


def test_the_matrix_of_a_dgx_1v_is_the_preset():
    imported, preset = IMPORTED["dgx1v"](), load_preset("dgx-1v")
    assert nvlinks_of(imported) == nvlinks_of(preset)
    for pair in (("gpu0", "gpu4"), ("gpu0", "gpu1"), ("dram1", "gpu7")):
        assert imported.route(*pair).bandwidth_bytes_per_s == preset.route(*pair).bandwidth_bytes_per_s
    # The adapters beside them show that pairs of GPUs share a switch, which NV1 and NV2 hide.
    assert imported.route("dram0", "gpu0").node_ids == ("dram0", "numa0", "root0", "switch0", "gpu0")
    assert {"gpu0", "gpu1", "mlx5_0"} <= set(imported.graph.neighbors("switch0"))
    assert imported.host_memory("gpu4").id == "dram1"
    assert imported.node("cpu0").spec.num_cores == 20  # 0-19,40-59 are 20 cores of two threads


def test_equal_nvlinks_to_every_gpu_are_a_switch():
    machine = IMPORTED["hgx_h100"]()
    assert nvlinks_of(machine) == {frozenset({f"gpu{i}", "nvswitch0"}): 18 for i in range(8)}
    switch = machine.node("nvswitch0")
    assert machine.sums_in_switch(switch)  # of NVLinks of the fourth generation
    assert not machine.sums_in_switch(switch.model_copy(update={"in_switch_sums": False}))


def test_pix_pxb_phb_and_sys_become_the_tree_that_explains_them():
    machine = IMPORTED["pcie_tree"]()

    def common(a, b):
        """Nodes in which the ways from two GPUs up to their memory meet."""
        ways = [machine.route("dram0", name).node_ids for name in (a, b)]
        return {machine.node(name).type for name in set(ways[0]) & set(ways[1])} - {"memory", "numa"}

    assert common("gpu0", "gpu1") == {"pcie_switch", "pcie_root"}
    assert (
        len(set(machine.route("dram0", "gpu0").node_ids) & set(machine.route("dram0", "gpu1").node_ids)) == 5
    )
    assert (
        len(set(machine.route("dram0", "gpu0").node_ids) & set(machine.route("dram0", "gpu2").node_ids)) == 4
    )
    assert common("gpu0", "gpu3") == {"pcie_root"}
    assert common("gpu0", "gpu4") == set()
    assert machine.host_memory("gpu4").id == "dram1"


def test_the_matrix_is_read_with_spaces_as_well():
    text = "GPU0 GPU1 CPU Affinity\nGPU0  X  NV12 0-7 0\nGPU1 NV12  X  0-7 0\n"
    matrix = parse_topo_matrix(text)
    assert matrix.nvlinks == {("GPU0", "GPU1"): 12}
    assert matrix.cores == {0: 8}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no matrix"),
        ("\tGPU0\tGPU1\nGPU0\t X \tNV1\n", "no row for GPU1"),
        ("\tGPU0\tGPU1\nGPU0\t X \nGPU1\tNV1\t X \n", "row GPU0 .* has 1 cells, not 2"),
        ("\tGPU0\tGPU1\nGPU0\t X \tFOO\nGPU1\tFOO\t X \n", "'FOO' between GPU0 and GPU1 is no code"),
        ("\tGPU0\tGPU1\nGPU0\t X \tPIX\nGPU1\tSYS\t X \n", "PIX between GPU0 and GPU1 in one row, SYS"),
        ("\tGPU0\tGPU0\nGPU0\t X \tPIX\nGPU0\tPIX\t X \n", "two columns of one name"),
    ],
)
def test_damaged_matrices_are_refused(text, message):
    with pytest.raises(TopologyError, match=message) as caught:
        parse_topo_matrix(text)
    assert caught.value.hint


def test_a_matrix_alone_does_not_tell_the_gpu():
    with pytest.raises(TopologyError, match="does not name its gpu") as caught:
        from_nvidia_smi_topo(text_of("hgx_h100_topo.txt"))
    assert "--gpu" in caught.value.hint
    with pytest.raises(TopologyError, match="the catalogue has no gpu 'h100'") as caught:
        from_nvidia_smi_topo(text_of("hgx_h100_topo.txt"), gpu="h100")
    assert "h100-80gb-sxm" in caught.value.hint


def test_nccl_xml_gives_the_tree_the_mesh_and_the_network():
    machine = IMPORTED["nccl"]()
    assert [node.spec.id for node in machine.compute_devices] == ["a100-80gb-sxm"] * 4
    assert len(nvlinks_of(machine)) == 6
    assert set(nvlinks_of(machine).values()) == {4}
    assert machine.route("gpu0", "gpu3").bandwidth_bytes_per_s == 4 * 20e9
    assert machine.route("dram0", "gpu1").node_ids == ("dram0", "numa0", "root0", "switch0", "gpu1")
    assert machine.host_memory("gpu2").id == "dram1"
    assert machine.route("gpu0", "network0").node_ids == ("gpu0", "switch0", "nic0", "network0")
    assert machine.resources["nic0--network0:nic0>network0"].bandwidth_bytes_per_s == 25e9
    assert (
        machine.node("cpu0").spec.num_cores == 32
    )  # two runs of 32 in the affinity mask: two threads a core


def test_a_virtual_machine_that_hides_its_links_gets_those_of_its_gpus_connectors():
    machine = IMPORTED["nccl_vm"]()
    assert machine.route("dram0", "gpu0").links[-1].type.name == "pcie5-x16"
    assert set(nvlinks_of(machine).values()) == {18}
    assert machine.node("numa0").host == "host0"


def test_what_the_files_do_not_tell_is_taken_from_the_user_or_marked_as_assumed():
    given = from_nccl_xml(
        FIXTURES / "nccl_a100x4.xml", memory="2 TiB", memory_bandwidth="400 GB/s", cpu="epyc-7763"
    )
    assert given.node("dram0").memory_bytes == 2**40
    assert given.node("dram1").bandwidth_bytes_per_s == 200e9
    assert given.node("cpu0").spec.id == "epyc-7763"
    assert IMPORTED["nccl"]().node("dram0").bandwidth.basis == "assumed"
    assert "link between NUMA domains is assumed" in IMPORTED["dgx1v"]().description
    with pytest.raises(TopologyError, match="cannot be a bandwidth"):
        from_nccl_xml(FIXTURES / "nccl_a100x4.xml", memory_bandwidth="400 GB")


def test_hwloc_xml_gives_memory_cores_and_the_pcie_tree():
    machine = IMPORTED["hwloc"]()
    assert [node.memory_bytes for node in machine.of_type("memory")] == [128 * 2**30] * 2
    assert machine.node("cpu1").spec.num_cores == 2
    # The board's display adapter (ASPEED) is no compute device; a root port with one device is no switch.
    assert [node.spec.id for node in machine.compute_devices] == ["rtx4090"]
    assert machine.route("dram0", "gpu0").node_ids == ("dram0", "numa0", "root0", "gpu0")
    assert machine.route("dram0", "gpu0").links[-1].type.name == "pcie4-x16"
    assert machine.route("dram0", "disk0").node_ids == ("dram0", "numa0", "root0", "switch0", "disk0")
    assert machine.host_memory("gpu0").id == "dram0"


BOMB = '<!DOCTYPE lolz [<!ENTITY lol "lol">]><system version="1"><cpu numaid="0"/></system>'
UNKNOWN_GPU = """<system><cpu numaid="0">
<pci busid="1" device="0x1" link_speed="8 GT/s" link_width="16"><gpu dev="0"/></pci></cpu></system>"""
EXTERNAL = '<!DOCTYPE system SYSTEM "file:///etc/passwd"><system version="1"/>'


@pytest.mark.parametrize(
    ("read", "content", "message"),
    [
        (from_nccl_xml, BOMB, "declares a document type or entities"),
        (from_nccl_xml, EXTERNAL, "declares a document type or entities"),
        (from_hwloc_xml, BOMB.replace("system", "topology"), "declares a document type"),
        (from_nccl_xml, "<system", "is not XML"),
        (from_nccl_xml, "<topology/>", "starts with <topology>, not <system>"),
        (from_nccl_xml, "<system/>", "has no <cpu>"),
        (from_nccl_xml, "<system><cpu/></system>", "<cpu> has no attribute 'numaid'"),
        (from_nccl_xml, '<system><cpu numaid="zero"/></system>', "numaid='zero' of <cpu> is no whole number"),
        (
            from_nccl_xml,
            UNKNOWN_GPU,
            r"PCI device 0x1\) does not name its gpu",
        ),
        (from_hwloc_xml, "<topology/>", "is from hwloc 1.x"),
        (from_hwloc_xml, '<topology version="2.0"/>', "no object of type Machine"),
        (from_hwloc_xml, '<topology version="2.0"><object type="Machine"/></topology>', "has no NUMANode"),
    ],
)
def test_damaged_or_hostile_xml_is_refused(tmp_path, read, content, message):
    file = tmp_path / "machine.xml"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(TopologyError, match=message):
        read(file)


def test_files_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(TopologyError, match="no file of NCCL at"):
        from_nccl_xml(tmp_path / "none.xml")
    (tmp_path / "binary.xml").write_bytes(b"\xff\xfe")
    with pytest.raises(TopologyError, match="not UTF-8"):
        from_hwloc_xml(tmp_path / "binary.xml")


def test_the_table_of_plain_nvidia_smi_is_recognised() -> None:
    row = "|   {}  NVIDIA GeForce RTX 4090        Off |   00000000:0{}:00.0 Off |                  Off |"
    with pytest.raises(TopologyError) as refused:
        from_nvidia_smi_topo("\n".join(row.format(gpu, gpu + 1) for gpu in range(2)))
    assert "--hardware '2x NVIDIA GeForce RTX 4090'" in str(refused.value)
