"""Descriptions as clouds, superchips, virtual machines and containers make them; values worked out by hand."""

import logging
from pathlib import Path

import pytest

from topology import (
    TopologyError,
    dump,
    from_hwloc_xml,
    from_nccl_xml,
    from_nvidia_smi_topo,
    from_rocm_smi_topo,
    loads,
)
from topology.cli import guess_tool
from topology.hardware import resolve
from topology.lint import lint

PCIE4, PCIE5 = 31.508e9 * 0.8, 63.015e9 * 0.86  # x16, as large transfers reach


@pytest.fixture
def nccl(tmp_path):
    """Import the inside of NCCL's <system>."""
    return lambda body, **named: _read(from_nccl_xml, tmp_path, f'<system version="1">{body}</system>', named)


@pytest.fixture
def hwloc(tmp_path):
    """Import the objects of a machine, and what stands behind them."""

    def read(objects, behind="", attributes="", **named):
        machine = f'<object type="Machine" os_index="0" {attributes}>{objects}</object>'
        return _read(from_hwloc_xml, tmp_path, f'<topology version="2.0">{machine}{behind}</topology>', named)

    return read


def _read(reader, folder, text, named):
    (folder / "machine.xml").write_text(text, encoding="utf-8")
    machine = reader(folder / "machine.xml", **named)
    assert lint(machine) == ()
    assert loads(dump(machine)) == machine
    return machine


def kinds(machine):
    return [node.spec.id for node in machine.compute_devices]


def nvlinks(machine):
    return {
        (link.source, link.target): link.count for link in machine.links if link.type.technology == "nvlink"
    }


def rate(machine, source, target):
    return machine.route(source, target).bandwidth_bytes_per_s


# NCCL ---------------------------------------------------------------------------------------------------------


def pci(bus, of_class, inside="", speed="16 GT/s", width=16, more=""):
    return f'<pci busid="{bus}" class="{of_class}" link_speed="{speed}" link_width="{width}" {more}>{inside}</pci>'


def numa(index, inside, more='affinity="ffff" vendor="AuthenticAMD"'):
    return f'<cpu numaid="{index}" {more}>{inside}</cpu>'


# Four domains with a switch each, and on it two GPUs and two adapters, numbered by PCI domain as a cloud's hypervisor does.
ND_V4 = "".join(
    numa(
        domain,
        pci(
            f"ffff:ff:0{domain}.0",
            "0x060400",
            "".join(
                pci(f"{gpu:04x}:00:00.0", "0x030200") + pci(f"{0x100 + gpu:04x}:00:00.0", "0x020700")
                for gpu in gpus
            ),
        ),
    )
    for domain, gpus in enumerate([(3, 4), (1, 2), (0xD, 0xE), (0xB, 0xC)])
)


def test_gpus_and_adapters_of_a_cloud_s_file_are_told_by_their_class(nccl):
    machine = nccl(ND_V4, gpu="a100-80gb-sxm")
    assert kinds(machine) == ["a100-80gb-sxm"] * 8
    # Numbered as the driver does, by bus id: 0001, 0002 of the second domain come first.
    assert [machine.host_memory(f"gpu{i}").id for i in range(8)] == [
        f"dram{d}" for d in (1, 1, 0, 0, 3, 3, 2, 2)
    ]
    assert len(machine.of_type("nic")) == 8
    assert rate(machine, "dram1", "gpu0") == pytest.approx(PCIE4)
    assert machine.route("gpu0", "gpu1").node_ids == ("gpu0", "nvswitch0", "gpu1")
    assert set(nvlinks(machine).values()) == {12}
    assert "switch with 12 from each GPU is assumed" in machine.description


def test_what_a_cloud_s_gpus_are_is_asked_for(nccl):
    with pytest.raises(TopologyError, match="does not name its gpu") as caught:
        nccl(ND_V4)
    assert "--gpu" in caught.value.hint


def test_a_link_is_no_newer_than_the_gpu_on_it(nccl):
    """A cloud's file of V100s, which are of PCIe 3.0, says 16 GT/s."""
    machine = nccl(numa(0, pci("0001:00:00.0", "0x030200")), gpu="v100-32gb-sxm2")
    assert rate(machine, "dram0", "gpu0") == pytest.approx(15.754e9 * 0.762)
    assert "has PCIe 3.0: 15.8 GB/s are taken, not the 31.5 GB/s" in machine.description


def test_a_gpu_right_below_its_domain_is_one(nccl):
    """The example of the report that a machine without a GPU was made of."""
    machine = nccl(numa(0, pci("0001:00:00.0", "0x030200")), gpu="a100-80gb-pcie")
    assert kinds(machine) == ["a100-80gb-pcie"]
    assert rate(machine, "dram0", "gpu0") == pytest.approx(PCIE4)


@pytest.mark.parametrize(
    ("device", "spec"),
    [
        ("0x20b0", "a100-40gb-sxm"),
        ("0x2330", "h100-80gb-sxm"),
        ("0x1db1", "v100-16gb-sxm2"),
        ("0x27b8", "l4"),
    ],
)
def test_pci_ids_tell_what_a_gpu_is(nccl, device, spec):
    machine = nccl(
        numa(0, pci("0000:10:1c.0", "0x030200", more=f'vendor="0x10de" device="{device}"', speed="8 GT/s"))
    )
    assert kinds(machine) == [spec]


def test_display_adapters_compute_where_their_vendor_makes_gpus(nccl):
    board = pci("0000:02:00.0", "0x030000", more='vendor="0x1a03" device="0x2000"', speed="2.5 GT/s", width=1)
    card = pci("0000:41:00.0", "0x030000", more='vendor="0x10de" device="0x2684"')
    assert kinds(nccl(numa(0, board + card))) == ["rtx4090"]
    with pytest.raises(TopologyError, match="has no GPU: none of its PCI devices has the class of one"):
        nccl(numa(0, board), gpu="rtx4090")


@pytest.mark.parametrize("inside", ["", '<pci busid="0000:00:16.0"/>'])
def test_a_file_without_a_gpu_is_refused(nccl, inside):
    with pytest.raises(TopologyError, match="has no GPU: its PCI devices have no class") as caught:
        nccl(numa(0, inside), gpu="a10g")
    assert "NCCL_TOPO_DUMP_FILE" in caught.value.hint


def gpu_element(number, inside="", sm=90):
    return f'<gpu dev="{number}" sm="{sm}" rank="{number}" gdr="1">{inside}</gpu>'


def test_c2c_links_join_a_gpu_with_its_grace(nccl):
    c2c = '<c2c bw="43125" count="8"/>'
    body = pci(
        "0009:01:00.0",
        "0x030200",
        gpu_element(0, c2c),
        speed="2.5 GT/s",
        more='vendor="0x10de" device="0x2342"',
    )
    machine = nccl(numa(0, body, 'affinity="ff,ffffffff,ffffffff" arch="arm64"'))
    assert kinds(machine) == ["gh200-96gb"]
    assert rate(machine, "dram0", "gpu0") == rate(machine, "gpu0", "dram0") == 345e9
    assert machine.node("dram0").memory_bytes == 480e9
    assert machine.node("cpu0").spec.num_cores == 72


def test_two_gpus_of_a_grace_have_a_c2c_each_and_share_its_memory(nccl):
    def gpu(number, bus):
        inside = '<nvlink target="fffffff:ffff:ff" count="18" tclass="0x068000"/><c2c bw="43125" count="8"/>'
        more = 'vendor="0x10de" device="0x2941"'
        return pci(
            bus, "0x030200", gpu_element(number, inside, sm=100), speed="32.0 GT/s PCIe", width=1, more=more
        )

    first, second = (
        numa(domain, gpu(2 * domain, f"000{domain}:01:00.0") + gpu(2 * domain + 1, f"001{domain}:01:00.0"))
        for domain in (0, 1)
    )
    machine = nccl(first + second)
    assert kinds(machine) == ["gb200-186gb"] * 4
    assert {rate(machine, f"dram{gpu // 2}", f"gpu{gpu}") for gpu in range(4)} == {345e9}
    assert machine.node("dram0").bandwidth_bytes_per_s == 512e9
    assert rate(machine, "gpu0", "gpu3") == pytest.approx(18 * 50e9 * 0.802)


@pytest.mark.parametrize("width", [1, 2])
def test_a_virtual_bridge_is_not_believed(nccl, caplog, width):
    card = pci(
        "0000:06:00.0", "0x030200", gpu_element(0), "32.0 GT/s PCIe", more='vendor="0x10de" device="0x2330"'
    )
    bridge = pci("0000:05:00.0", "0x060400", card, "16.0 GT/s PCIe", width)
    with caplog.at_level(logging.WARNING):
        machine = nccl(numa(0, bridge))
    assert rate(machine, "dram0", "gpu0") == pytest.approx(PCIE5)
    assert "bridge 0000:05:00.0" in caplog.text
    assert "virtual" in machine.description


def test_a_switch_of_half_the_width_is_believed(nccl):
    cards = "".join(
        pci(f"0000:0{bus}:00.0", "0x030200", more='vendor="0x10de" device="0x20b5"') for bus in (6, 7)
    )
    machine = nccl(numa(0, pci("0000:05:00.0", "0x060400", cards, width=8)))
    assert rate(machine, "dram0", "gpu0") == pytest.approx(PCIE4 / 2)
    assert "virtual" not in machine.description


def test_an_nvlink_to_itself_is_left_out_and_an_adapter_may_have_no_pci_device(nccl):
    """As a cloud's file for cards with bridges has them, with links that are hidden."""
    itself = gpu_element(0, '<nvlink target="0001:00:00.0" count="12" tclass="0x030200"/>', sm=80)
    card = pci("0001:00:00.0", "0x030200", itself, speed="", width=0, more='vendor="0x10de" device="0x20b5"')
    net = '<nic><net name="eth0" dev="0" speed="100000" port="0" guid="0x0" maxconn="65536" gdr="0"/></nic>'
    machine = nccl(numa(0, card + net))
    assert nvlinks(machine) == {}
    assert rate(machine, "dram0", "gpu0") == pytest.approx(PCIE4)
    assert rate(machine, "dram0", "network0") == 12.5e9
    assert "NVLinks to itself are left out of gpu0" in machine.description
    assert "its connector's is assumed, pcie4-x16" in machine.description


def test_nvlinks_that_lead_nowhere_are_told(nccl):
    gpu = '<pci busid="0000:99:00.0" class="0x030000" vendor="0x10de" device="0x2230">{}</pci>'
    link = '<nvlink target="0000:bd:00.0" count="4" tclass="0x030000"/>'
    inside = gpu.format(f'<gpu dev="0" sm="86">{link}</gpu>')
    beside = gpu.format('<gpu dev="0" sm="86"/>') + link
    for body in (inside, beside):
        assert "no GPU of the file are left out, 1 of them" in nccl(numa(0, body)).description


def test_parts_of_a_gpu_in_one_device_are_refused(nccl):
    body = '<pci busid="0000:99:00.0" class="0x030200"><gpu dev="0" sm="94"/><gpu dev="1" sm="94"/></pci>'
    with pytest.raises(TopologyError, match=r"has 2 <gpu> in the <pci> 0000:99:00\.0"):
        nccl(numa(0, body), gpu="mi300x")


def test_nvlinks_of_a_power_processor_go_to_it(nccl):
    links = '<nvlink target="0000:00:00.0" count="3" tclass="0x068001"/>'
    card = pci(
        "0004:04:00.0",
        "0x030200",
        gpu_element(0, links, sm=70),
        more='vendor="0x10de" device="0x1db1"',
        speed="8 GT/s",
    )
    machine = nccl(numa(0, card, 'affinity="ffff" arch="ppc64"'))
    assert rate(machine, "dram0", "gpu0") == 3 * 25e9 * 0.8


@pytest.mark.parametrize(
    ("vendor", "model", "bytes_per_s"),
    [
        ("AuthenticAMD", 49, 24e9),
        ("GenuineIntel", 79, 6e9),
        ("GenuineIntel", 85, 10e9),
        ("GenuineIntel", 143, 22e9),
        ("GenuineIntel", 207, 40e9),
    ],
)
def test_the_link_of_two_sockets_is_that_of_their_processors(nccl, vendor, model, bytes_per_s):
    more = f'affinity="ff" vendor="{vendor}" familyid="6" modelid="{model}"'
    machine = nccl(numa(0, pci("0001:00:00.0", "0x030200"), more) + numa(1, "", more), gpu="t4")
    assert rate(machine, "dram1", "numa0") == bytes_per_s


@pytest.mark.parametrize(
    ("spec", "product", "link"), [("mi300x", "74a1", 64e9 * 0.75), ("mi250x-gcd", "7408", 50e9 * 0.72)]
)
def test_rccl_s_links_between_gpus_are_read(nccl, spec, product, link):
    def gpu(index, count):
        other = f'<xgmi target="0000:0{2 - index}:00.0" count="{count}" tclass="0x120000"/>'
        inside = f'<gpu dev="{index}" sm="304" gcn="gfx942" rank="{index}" gdr="1">{other}</gpu>'
        return pci(
            f"0000:0{index + 1}:00.0", "0x120000", inside, more=f'vendor="0x1002" device="0x{product}"'
        )

    machine = nccl(numa(0, gpu(0, 2) + gpu(1, 2)))
    assert kinds(machine) == [spec] * 2
    assert rate(machine, "gpu0", "gpu1") == pytest.approx(2 * link)


def test_all_ports_of_an_adapter_count(nccl):
    ports = "".join(
        f'<net name="mlx5_{i}" dev="{i}" speed="{speed}" port="{i + 1}"/>'
        for i, speed in enumerate([200000, 100000])
    )
    adapter = pci("0000:61:00.0", "0x020700", f"<nic>{ports}</nic>")
    machine = nccl(numa(0, pci("0000:01:00.0", "0x030200") + adapter), gpu="a100-80gb-sxm")
    [link] = [link for link in machine.links if link.type.technology == "network"]
    assert link.nominal_bandwidth_bytes_per_s == 300e9 / 8


def test_several_hosts_in_a_file_are_refused(nccl):
    body = "".join(
        numa(0, pci(f"000{host}:00:00.0", "0x030200"), f'host_hash="0x{host}" affinity="ff"')
        for host in (1, 2)
    )
    with pytest.raises(TopologyError, match="several hosts"):
        nccl(body, gpu="t4")


# Host memory that nobody told ----------------------------------------------------------------------------------


def test_a_server_is_assumed_around_a_server_s_gpu(nccl, caplog):
    with caplog.at_level(logging.WARNING):
        machine = nccl(ND_V4, gpu="a100-80gb-sxm")
    # Twice the GPUs' 640 GiB; eight channels of DDR4-3200 for each of two sockets: over four domains.
    assert [node.memory_bytes for node in machine.of_type("memory")] == [320 * 2**30] * 4
    assert machine.node("dram0").bandwidth_bytes_per_s == pytest.approx(2 * 8 * 3200e6 * 8 / 4)
    assert machine.node("dram0").capacity.basis == machine.node("dram0").bandwidth.basis == "assumed"
    for text in (machine.description, caplog.text):
        assert "memory is assumed, 1.25 TiB in all and 410 GB/s in all over 4 NUMA domains" in text
        assert "--memory and --memory-bandwidth" in text


def test_nothing_is_said_of_memory_that_the_user_states(nccl, caplog):
    with caplog.at_level(logging.WARNING):
        machine = nccl(ND_V4, gpu="a100-80gb-sxm", memory="900 GiB", memory_bandwidth="300 GB/s")
    assert machine.node("dram3").memory_bytes == 225 * 2**30
    assert "memory is assumed" not in machine.description + caplog.text


# nvidia-smi ----------------------------------------------------------------------------------------------------


def listing(*names):
    return "".join(
        f"GPU {i}: {name} (UUID: GPU-0000000{i}-aaaa-bbbb-cccc-000000000000)\n"
        for i, name in enumerate(names)
    )


def matrix(cells, tails, headings="CPU Affinity\tNUMA Affinity\tGPU NUMA ID", names=None):
    names = names or [f"GPU{i}" for i in range(len(cells))]
    rows = ["\t" + "\t".join([*names, headings])]
    rows += ["\t".join([name, *row, tail]) for name, row, tail in zip(names, cells, tails, strict=True)]
    return "\n".join(rows) + "\n"


PAIR = [["X", "SYS"], ["SYS", "X"]]


def test_each_gpu_is_of_its_own_kind():
    text = listing("NVIDIA A100 80GB PCIe", "NVIDIA L40S") + matrix(PAIR, ["0-15\t0\tN/A", "16-31\t1\tN/A"])
    assert kinds(from_nvidia_smi_topo(text)) == ["a100-80gb-pcie", "l40s"]
    assert kinds(from_nvidia_smi_topo(text, gpu="l4")) == ["l4", "l4"]
    three = matrix([["X", "SYS", "SYS"], ["SYS", "X", "SYS"], ["SYS", "SYS", "X"]], ["0-15\t0"] * 3)
    with pytest.raises(TopologyError, match="not what GPU2 is"):
        from_nvidia_smi_topo(listing("NVIDIA A100 80GB PCIe", "NVIDIA L40S") + three)


@pytest.mark.parametrize(
    ("headings", "tails"),
    [
        ("CPU Affinity", ["0-19,40-59", "20-39,60-79"]),
        ("CPU Affinity\tNUMA Affinity", ["0-19,40-59\tN/A", "20-39,60-79\tN/A"]),
        ("CPU Affinity\tNUMA Affinity\tGPU NUMA ID", ["0-19,40-59\tN/A\t\tN/A", "20-39,60-79\tN/A\t\tN/A"]),
    ],
)
def test_two_lists_of_processors_are_two_domains(headings, tails):
    machine = from_nvidia_smi_topo(matrix(PAIR, tails, headings), gpu="t4")
    assert [machine.host_memory(f"gpu{i}").id for i in (0, 1)] == ["dram0", "dram1"]
    assert [machine.node(f"cpu{i}").spec.num_cores for i in (0, 1)] == [20, 20]


def test_without_a_domain_the_processors_count():
    machine = from_nvidia_smi_topo(matrix([["X"]], ["0-23\tN/A\t\tN/A"]), gpu="l4")
    assert machine.node("cpu0").spec.num_cores == 24


@pytest.mark.parametrize("separate", ["\t", "  "])
def test_processors_that_may_not_be_used_leave_their_cell_empty(separate):
    tails = ["0-3\t0\t\tN/A", "\t1\t\tN/A"]
    text = matrix(PAIR, tails).replace("\t", separate)
    machine = from_nvidia_smi_topo(text, gpu="t4")
    assert [machine.host_memory(f"gpu{i}").id for i in (0, 1)] == ["dram0", "dram1"]
    assert machine.node("cpu0").spec.num_cores == 4


@pytest.mark.parametrize(
    "other",
    [
        matrix([["X", "OK"], ["OK", "X"]], ["", ""], ""),
        matrix([["X", "NS"], ["NS", "X"]], ["", ""], ""),
        matrix([["X", "CNS"], ["CNS", "X"]], ["", ""], "").replace("\t", "  "),
    ],
)
@pytest.mark.parametrize("before", [True, False])
def test_a_matrix_of_what_pairs_can_do_is_passed_over(other, before):
    shown = matrix([["X", "NV4"], ["NV4", "X"]], ["0-7\t0\tN/A"] * 2)
    machine = from_nvidia_smi_topo(other + shown if before else shown + "\n" + other, gpu="a40")
    assert nvlinks(machine) == {("gpu0", "gpu1"): 4}


def test_a_matrix_of_the_pcie_tree_tells_what_nvlinks_hide():
    linked = matrix([["X", "NV12"], ["NV12", "X"]], ["0-7\t0\tN/A"] * 2)
    tree = matrix([["X", "PIX"], ["PIX", "X"]], ["0-7\t0\tN/A"] * 2)
    machine = from_nvidia_smi_topo(linked + tree, gpu="a100-80gb-pcie")
    assert nvlinks(machine) == {("gpu0", "gpu1"): 12}
    assert "switch0" in machine.route("dram0", "gpu0").node_ids
    assert "switch0" not in from_nvidia_smi_topo(linked, gpu="a100-80gb-pcie").graph


@pytest.mark.parametrize(("code", "shared"), [("SOC", set()), ("NVB", set()), ("PSB", {"root0", "switch0"})])
def test_codes_of_other_versions(code, shared):
    machine = from_nvidia_smi_topo(
        matrix([["X", code], [code, "X"]], ["0-7\t0", "0-7\t0"]), gpu="v100-16gb-sxm2"
    )
    ways = [set(machine.route("dram0", f"gpu{i}").node_ids) for i in (0, 1)]
    assert ways[0] & ways[1] - {"dram0", "numa0"} == shared


def test_more_cells_than_columns_are_passed_over():
    machine = from_nvidia_smi_topo("GPU0\nGPU0 X 0-7 0 N/A 5 6 7\n", gpu="l4")
    assert machine.node("cpu0").spec.num_cores == 8


def test_nvlinks_to_itself_in_a_matrix_are_left_out():
    machine = from_nvidia_smi_topo(matrix([["NV4", "SYS"], ["SYS", "NV4"]], ["0-7\t0\tN/A"] * 2), gpu="a40")
    assert nvlinks(machine) == {}


def test_adapters_of_any_name_are_columns():
    names = ["GPU0", "mlx5_bond_0", "rdmap16s27"]
    cells = [["X", "PIX", "SYS"], ["PIX", "X", "SYS"], ["SYS", "SYS", "X"]]
    machine = from_nvidia_smi_topo(matrix(cells, ["0-7\t0\t\tN/A", "", ""], names=names), gpu="l40s")
    assert {node.id for node in machine.of_type("nic")} == {"mlx5_bond_0", "rdmap16s27"}
    assert "switch0" in machine.route("gpu0", "mlx5_bond_0").node_ids


def test_a_gpu_whose_memory_is_a_numa_domain_has_a_c2c():
    cells = [["X" if i == j else "NV18" for j in range(4)] for i in range(4)]
    tails = ["0-71\t0,2-17\t\t2", "0-71\t0,2-17\t\t10", "72-143\t1,18-33\t\t18", "72-143\t1,18-33\t\t26"]
    text = listing(*["NVIDIA GB200"] * 4) + matrix(cells, tails)
    machine = from_nvidia_smi_topo(text)
    assert [node.id for node in machine.of_type("memory")] == ["dram0", "dram1"]
    assert [machine.host_memory(f"gpu{i}").id for i in range(4)] == ["dram0", "dram0", "dram1", "dram1"]
    rates = [rate(machine, f"dram{i // 2}", f"gpu{i}") for i in range(4)]
    assert rates == pytest.approx([345e9] * 4, rel=1e-3)
    assert [machine.node(f"cpu{i}").spec.num_cores for i in (0, 1)] == [72, 72]
    assert lint(machine) == ()


def test_one_gpu_of_a_grace():
    machine = from_nvidia_smi_topo(listing("NVIDIA GH200 480GB") + matrix([["X"]], ["0-71\t0\t\t1"]))
    assert rate(machine, "dram0", "gpu0") == pytest.approx(345e9, rel=1e-3)


@pytest.mark.parametrize(("spec", "links"), [("h200-141gb-sxm", 18), ("a100-80gb-sxm", 12)])
def test_islands_of_nvlinks_have_a_switch_each(spec, links):
    cells = [
        ["X" if i == j else f"NV{links}" if i // 4 == j // 4 else "SYS" for j in range(8)] for i in range(8)
    ]
    machine = from_nvidia_smi_topo(
        matrix(cells, [f"{i // 4 * 8}-{i // 4 * 8 + 7}\t{i // 4}" for i in range(8)]), gpu=spec
    )
    assert nvlinks(machine) == {(f"gpu{i}", f"nvswitch{i // 4}"): links for i in range(8)}
    assert "numa1" in machine.route("gpu0", "gpu7").node_ids


def test_underlines_that_lost_their_escape_are_passed_over():
    text = matrix([["X", "NV18"], ["NV18", "X"]], ["0-7\t0", "0-7\t0"])
    head, _, rows = text.partition("\n")
    pasted = f"\t[4m{head.strip()}[0m\n{rows}"
    assert nvlinks(from_nvidia_smi_topo(pasted, gpu="h200-141gb-sxm")) == {("gpu0", "gpu1"): 18}


def test_a_matrix_that_was_wrapped_or_contradicts_itself_is_refused():
    text = matrix([["X", "PIX"], ["PIX", "X"]], ["0-7\t0", "0-7\t0"])
    with pytest.raises(TopologyError, match="a row for GPU1, but no such column"):
        from_nvidia_smi_topo(text.replace("GPU0\tGPU1\tCPU", "GPU0\n\tGPU1\tCPU", 1), gpu="l4")
    for first, second in (("NV4", "NV2"), ("NV4", "PIX"), ("PIX", "NV4"), ("PIX", "SYS")):
        with pytest.raises(TopologyError, match=r"between GPU0 and GPU1 in one row, \w+ in the other"):
            from_nvidia_smi_topo(matrix([["X", first], [second, "X"]], ["0-7\t0"] * 2), gpu="rtx3090")


def test_nvlinks_of_a_gpu_that_has_none_are_told():
    cells = matrix([["X", "NV4"], ["NV4", "X"]], ["0-7\t0"] * 2)
    assert "RTX 4090 has none" in from_nvidia_smi_topo(cells, gpu="rtx4090").description


def test_nvlinks_on_a_bridge_between_two_cards(nccl):
    cells = matrix([["X", "NV4"], ["NV4", "X"]], ["0-7\t0"] * 2)
    inside = '<gpu dev="{}" sm="86"><nvlink target="0000:{}:00.0" count="4" tclass="0x030000"/></gpu>'
    a6000 = pci("0000:{}:00.0", "0x030000", inside, more='vendor="0x10de" device="0x2230"')
    machines = [
        from_nvidia_smi_topo(cells, gpu="rtx3090"),
        nccl(numa(0, a6000.format("99", 0, "bd") + a6000.format("bd", 1, "99"))),
    ]
    for machine in machines:
        assert nvlinks(machine) == {("gpu0", "gpu1"): 4}
        assert rate(machine, "gpu0", "gpu1") == pytest.approx(48e9, rel=1e-3)  # four times NCCL's 12 GB/s
        assert "has none" not in machine.description
        assert lint(machine) == ()
    # Cards alone do not tell whether there is a bridge.
    assert nvlinks(resolve("2x rtx3090")) == {}


def test_a_listing_without_ids_tells_the_gpus_and_alone_is_no_matrix():
    listed = "GPU 0,1: NVIDIA B300 SXM6 AC\nGPU 0,1 Compute Capability: 10.3\n"
    assert kinds(from_nvidia_smi_topo(listed + matrix(PAIR, ["0-7\t0"] * 2))) == ["b300-288gb-sxm"] * 2
    with pytest.raises(TopologyError, match="no line begins with GPU0") as refused:
        from_nvidia_smi_topo(listing("NVIDIA L4", "NVIDIA L4"))
    assert "plan with --hardware '2x NVIDIA L4'" in refused.value.hint


def test_a_gpu_whose_memory_is_the_host_s_leaves_little_beside_it():
    machine = from_nvidia_smi_topo(listing("NVIDIA GB10") + matrix([["X"]], ["0-19\t0\t\tN/A"]))
    # A copy within one memory reads and writes it, whatever C2C carries.
    assert rate(machine, "dram0", "gpu0") == pytest.approx(273e9 / 2, rel=1e-3)
    [host] = machine.of_type("memory")
    assert host.memory_bytes == 8 * 2**30
    assert host.bandwidth_bytes_per_s == 273e9
    assert "memory of gpu0 is the host's as well" in machine.description


def test_parts_of_a_gpu_and_hidden_domains_are_told():
    parts = "  MIG 1g.10gb     Device  0: (UUID: MIG-1)\n  MIG 1g.10gb     Device  1: (UUID: MIG-2)\n"
    text = listing("NVIDIA A100-SXM4-80GB") + parts + matrix([["X"]], ["N/A\tN/A"])
    description = from_nvidia_smi_topo(text).description
    assert "divided (MIG) into 2 parts" in description
    assert "NUMA domain of the GPUs is hidden" in description


# rocm-smi ------------------------------------------------------------------------------------------------------


def rocm(kinds, domains):
    count = len(kinds)
    head = "       " + "  ".join(f"GPU{i}" for i in range(count))

    def table(title, cell):
        rows = [f"GPU{i}   " + "  ".join("0" if i == j else cell for j in range(count)) for i in range(count)]
        return "\n".join([f"=== {title} ===", head, *rows, ""])

    numa_lines = "".join(
        f"GPU[{i}]\t\t: (Topology) Numa Node: {d}\nGPU[{i}]\t\t: (Topology) Numa Affinity: {d}\n"
        for i, d in enumerate(domains)
    )
    series = "".join(f"GPU[{i}]\t\t: Card Series: \t\t{kind}\n" for i, kind in enumerate(kinds) if kind)
    parts = [table("Weight between two GPUs", "15"), table("Hops between two GPUs", "1")]
    parts += [table("Link Type between two GPUs", "XGMI"), "=== Numa Nodes ===", numa_lines, series]
    return "=== ROCm System Management Interface ===\n" + "\n".join(parts) + "=== End of ROCm SMI Log ===\n"


def test_rocm_smi_s_output_is_read_as_what_it_is():
    machine = from_rocm_smi_topo(rocm(["AMD Instinct MI300X"] * 8, [0] * 4 + [1] * 4))
    assert kinds(machine) == ["mi300x"] * 8
    assert machine.host_memory("gpu5").id == "dram1"
    assert rate(machine, "gpu0", "gpu7") == 64e9 * 0.75
    assert sum(link.type.technology == "c2c" for link in machine.links) == 8 * 7 / 2
    assert lint(machine) == ()


def test_rocm_smi_s_output_that_does_not_tell_or_is_cut():
    with pytest.raises(TopologyError, match="does not name its gpu"):
        from_rocm_smi_topo(rocm([None] * 2, [0, 0]))
    with pytest.raises(TopologyError, match="no whole matrix of link types: it lacks the row of GPU1"):
        from_rocm_smi_topo(rocm(["mi300x"] * 2, [0, 0]).replace("GPU1   XGMI  0", ""))
    with pytest.raises(TopologyError, match="no code of nvidia-smi"):
        from_nvidia_smi_topo(rocm(["mi300x"] * 2, [0, 0]), gpu="mi300x")


def test_rocm_smi_s_older_lines_and_hidden_domains():
    text = rocm(["mi300x"] * 2, [0, 1])
    older = text.replace("GPU[0]", "GPU 0 ").replace("GPU[1]", "GPU 1 ")
    assert from_rocm_smi_topo(older).host_memory("gpu1").id == "dram1"
    for hidden in (-1, 2**32 - 1):
        machine = from_rocm_smi_topo(rocm(["mi300x"] * 2, [hidden] * 2))
        assert len(machine.of_type("memory")) == 1
        assert "NUMA domain of the GPUs is hidden" in machine.description


def test_links_of_an_mi250x_are_its_own():
    machine = from_rocm_smi_topo(rocm([None] * 2, [0, 0]), gpu="mi250x-gcd")
    assert rate(machine, "gpu0", "gpu1") == 50e9 * 0.72
    assert "one each is assumed" in machine.description


def test_amd_smi_s_matrix_is_read():
    buses = ["0000:0c:00.0", "0000:22:00.0", "0000:38:00.0"]
    cells = [["SELF", "XGMI", "PCIE"], ["XGMI", "SELF", "PCIE"], ["PCIE", "PCIE", "SELF"]]
    table = "\n".join(
        [" " * 13 + " ".join(buses), *(f"{b} {'  '.join(c)}" for b, c in zip(buses, cells, strict=True))]
    )
    text = f"ACCESS TABLE:\n{table.replace('SELF', 'ENABLED')}\nLINK TYPE TABLE:\n{table}\nNUMA BW TABLE:\n{table}\n"
    machine = from_rocm_smi_topo(text + "        MARKET_NAME: AMD Instinct MI300X\n")
    assert kinds(machine) == ["mi300x"] * 3
    assert [(k.source, k.target) for k in machine.links if k.type.technology == "c2c"] == [("gpu0", "gpu1")]
    assert guess_tool(Path("topology.txt"), text) == "rocm"


# hwloc ---------------------------------------------------------------------------------------------------------


def package(index, inside="", memory=' local_memory="68719476736"', cores=4):
    nodes = f'<object type="NUMANode" os_index="{index}" nodeset="{1 << index:#010x}"{memory}/>'
    mask = [1 << (index * cores + core) for core in range(cores)]
    found = "".join(
        f'<object type="Core" os_index="{i}" cpuset="{bit:#010x}"/>' for i, bit in enumerate(mask)
    )
    return f'<object type="Package" os_index="{index}" nodeset="{1 << index:#010x}" gp_index="{90 + index}">{nodes}{found}{inside}</object>'


def bridge(inside, speed="", kind="0-1", vendor="1022"):
    reported = f' pci_link_speed="{speed}" pci_type="0604 [{vendor}:1483]"' if speed else ""
    return f'<object type="Bridge" bridge_type="{kind}"{reported}>{inside}</object>'


def device(pci_type, gp_index=0, speed="31.507692", inside=""):
    return f'<object type="PCIDev" pci_type="{pci_type}" gp_index="{gp_index}" pci_busid="0000:01:00.0" pci_link_speed="{speed}">{inside}</object>'


def gpu_device(gp_index, product="20b2", speed="31.507692"):
    nvml = f'<object type="OSDev" gp_index="{gp_index + 100}" name="nvml0" subtype="NVML" osdev_type="5"/>'
    return device(f"0302 [10de:{product}] [10de:1463] a1", gp_index, speed, nvml)


def distances(objects, values, tag="distances2hetero", more=""):
    flat = " ".join(str(value) for row in values for value in row)
    return f'<{tag} nbobjs="{len(objects)}" kind="25" name="NVLinkBandwidth" {more}><indexes length="9">{" ".join(objects)} </indexes><u64values length="9">{flat} </u64values></{tag}>'


def test_domains_whose_memory_is_not_told_get_what_a_host_has(hwloc):
    machine = hwloc(package(0, memory="") + package(1, memory=""))
    assert [node.memory_bytes for node in machine.of_type("memory")] == [128 * 2**30] * 2
    assert "memory is assumed" in machine.description
    given = hwloc(package(0, memory="") + package(1, memory=""), memory="1 TiB")
    assert given.node("dram1").memory_bytes == 512 * 2**30


def test_a_domain_without_memory_beside_those_with_it_has_none(hwloc):
    machine = hwloc(package(0) + package(1, bridge(gpu_device(1)), memory=""))
    assert [node.id for node in machine.of_type("memory")] == ["dram0"]
    assert machine.host_memory("gpu0").id == "dram0"
    assert "numa1" in machine.route("dram0", "gpu0").node_ids


def test_processors_and_memory_that_may_not_be_used_do_not_count(hwloc):
    limits = 'allowed_cpuset="0x00000073" allowed_nodeset="0x00000002"'
    machine = hwloc(package(0) + package(1), attributes=limits)
    assert [machine.node(f"cpu{i}").spec.num_cores for i in (0, 1)] == [2, 3]
    assert [node.id for node in machine.of_type("memory")] == ["dram1"]


def test_a_machine_without_packages_is_one_processor(hwloc):
    node = '<object type="NUMANode" os_index="3" local_memory="1073741824"/>'
    machine = hwloc(node + "".join(f'<object type="PU" os_index="{i}"/>' for i in range(6)))
    assert machine.node("cpu0").spec.num_cores == 6
    assert machine.host_memory("cpu0").id == "dram3"


def test_nvlinks_to_switches_are_read_from_their_matrix(hwloc):
    gpus, switches = [1, 2], [50, 51]
    parts = bridge(gpu_device(1, "1db8", "15.753846") + gpu_device(2, "1db8", "15.753846"))
    parts += bridge("".join(device("0680 [10de:1ac2]", gp) for gp in switches))
    objects = [f"OSDev:{gp + 100}" for gp in gpus] + [f"PCIDev:{gp}" for gp in switches]
    rates = [[0, 0, 75000, 75000], [0, 0, 75000, 75000], [75000, 75000, 0, 0], [75000, 75000, 0, 0]]
    machine = hwloc(package(0, parts), distances(objects, rates))
    assert kinds(machine) == ["v100-32gb-sxm3"] * 2
    assert nvlinks(machine) == {("gpu0", "nvswitch0"): 6, ("gpu1", "nvswitch0"): 6}


@pytest.mark.parametrize("own", [0, 1000000])
def test_nvlinks_between_gpus_are_read_from_their_matrix(hwloc, own):
    cards = bridge("".join(gpu_device(gp) for gp in (1, 2, 3)))
    rates = [[own, 100000, 200000], [100000, own, 0], [200000, 0, own]]
    written = distances(["101", "102", "103"], rates, "distances2", 'type="OSDev" indexing="gp"')
    assert nvlinks(hwloc(package(0, cards), written)) == {("gpu0", "gpu1"): 4, ("gpu0", "gpu2"): 8}


def test_nvlinks_to_a_processor_reach_its_memory(hwloc):
    rates = [[1000000, 40000], [40000, 1000000]]
    machine = hwloc(
        package(0, bridge(gpu_device(1, "15f9", "15.753846"))), distances(["OSDev:101", "Package:90"], rates)
    )
    assert nvlinks(machine) == {("numa0", "gpu0"): 2}


def test_a_damaged_matrix_of_nvlinks_is_refused(hwloc):
    with pytest.raises(TopologyError, match="NVLinkBandwidth has 2 values for 2 objects"):
        hwloc(package(0, bridge(gpu_device(1))), distances(["OSDev:101", "OSDev:102"], [[0, 1]]))


def test_nvswitches_without_a_matrix_join_the_gpus(hwloc):
    cards = bridge("".join(gpu_device(gp, "2330", "63.0") for gp in range(1, 9)))
    switches = bridge("".join(device("0680 [10de:22a3] [10de:1796] a1", gp) for gp in range(20, 24)))
    machine = hwloc(package(0, cards + switches))
    assert set(nvlinks(machine).values()) == {18}
    assert rate(machine, "gpu0", "gpu7") == pytest.approx(18 * 25e9 * 0.824)
    assert "all NVLinks of all 8 GPUs are assumed" in machine.description
    alone = hwloc(package(0, cards))
    assert nvlinks(alone) == {}
    assert "does not tell NVLinks" in alone.description


def test_a_grace_s_gpu_memory_is_none_of_the_host_s(hwloc):
    own = '<object type="NUMANode" os_index="1" subtype="GPUMemory" local_memory="102005473280"/>'
    arm = '<info name="Architecture" value="aarch64"/>'
    grace = package(0, bridge(gpu_device(1, "2342", "63.0")) + own, ' local_memory="515396075520"')
    machine = hwloc(arm + grace)
    assert [node.id for node in machine.of_type("memory")] == ["dram0"]
    assert rate(machine, "dram0", "gpu0") == pytest.approx(345e9, rel=1e-3)


def test_a_virtual_machine_s_bridges_and_a_sleeping_link_are_not_believed(hwloc):
    pair = gpu_device(1, "2330", "63.015385") + device("0200 [15b3:101e]", 2, "63.015385")
    virtual = hwloc(package(0, bridge(bridge(pair, "1.969231", "1-1", "1b36"))))
    assert rate(virtual, "dram0", "gpu0") == pytest.approx(PCIE5)
    assert "virtual machine's" in virtual.description
    asleep = hwloc(package(0, bridge(gpu_device(1, "2330", "4.0"))))
    assert rate(asleep, "dram0", "gpu0") == pytest.approx(PCIE5)
    assert "sleeps" in asleep.description
    hidden = hwloc(package(0, bridge(gpu_device(1, "2330", "0.0"))))
    assert rate(hidden, "dram0", "gpu0") == pytest.approx(PCIE5)


def test_bridges_of_any_hypervisor_are_not_believed(hwloc):
    pair = gpu_device(1, "2330", "63.015385") + device("0200 [1d0f:efa2]", 2, "15.753846")
    machine = hwloc(package(0, bridge(bridge(pair, "15.753846", "1-1", "1d0f"))))
    assert rate(machine, "dram0", "gpu0") == pytest.approx(PCIE5)
    assert "virtual machine's" in machine.description


def test_what_is_near_several_domains_is_told(hwloc):
    machine = hwloc(package(0) + package(1) + bridge(gpu_device(1)))
    assert machine.host_memory("gpu0").id == "dram0"
    assert "GPUs are near several NUMA domains (numa0, numa1)" in machine.description


def test_accelerators_are_of_any_class(hwloc):
    mi300x = bridge(device("1200 [1002:74a1]", 1, "63.015385"))
    assert kinds(hwloc(package(0, mi300x))) == ["mi300x"]
    with pytest.raises(TopologyError, match="does not name its gpu"):
        hwloc(package(0, bridge(device("1200 [1002:75a0]", 1))))
    for left_out in ("1200 [1da3:1020]", "0380 [8086:0bd5]", "0380 [1002:15bf]"):
        machine = hwloc(package(0, bridge(device(left_out, 1))))
        assert f"({left_out}) is left out" in machine.description


def test_a_board_s_display_adapter_is_no_gpu_whatever_it_is_called(hwloc):
    board = bridge(device("0300 [1a03:2000] [10de:1796] 41", 3, "0.5"))
    machine = hwloc(package(0, bridge(gpu_device(1)) + board), gpu="a100-40gb-sxm")
    assert kinds(machine) == ["a100-40gb-sxm"]


def test_a_bridge_of_a_package_belongs_to_the_package_s_domain(hwloc):
    inner = '<object type="Die"><object type="NUMANode" os_index="1" local_memory="68719476736"/></object>'
    second = (
        f'<object type="Package" os_index="1" nodeset="0x00000002">{inner}{bridge(gpu_device(1))}</object>'
    )
    assert hwloc(package(0) + second).host_memory("gpu0").id == "dram1"
