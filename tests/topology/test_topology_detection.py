"""Detection on recorded machines, with a stand-in for NVML, and on this one."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from topology import TopologyError, detect, dump, loads
from topology.detection.gpus import find_gpus, gpus_from_smi
from topology.detection.host import cpu_spec, flop_per_cycle, measure_copy_bandwidth, read_host
from topology.lint import lint

FIXTURES = Path(__file__).parent / "fixtures"
CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model name\t: Intel(R) Xeon(R) Platinum 8480C
cpu MHz\t\t: 2000.000
flags\t\t: fpu sse2 avx avx2 fma avx512f avx512_bf16 amx_bf16 amx_tile
"""


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")


@pytest.fixture
def server(tmp_path):
    """Two sockets, two NUMA domains, 4 cores with two threads each, 64 GiB, no limits."""
    files = {
        "proc/cpuinfo": CPUINFO,
        "proc/meminfo": f"MemTotal: {64 * 2**20} kB",
        "proc/self/cgroup": "0::/jobs/mine",
        "sys/devices/system/cpu/cpu0/cache/index3/size": "32768K",
        "sys/devices/system/cpu/cpu0/cache/index2/size": "2048K",
    }
    for cpu in range(8):
        core = cpu % 4
        folder = f"sys/devices/system/cpu/cpu{cpu}/topology"
        files[f"{folder}/physical_package_id"] = str(core // 2)
        files[f"{folder}/thread_siblings_list"] = f"{core},{core + 4}"
    for domain, cpus in enumerate(("0-1,4-5", "2-3,6-7")):
        files[f"sys/devices/system/node/node{domain}/cpulist"] = cpus
        meminfo = f"Node {domain} MemTotal:       {30 * 2**20} kB"
        files[f"sys/devices/system/node/node{domain}/meminfo"] = meminfo
    write(tmp_path, files)
    return tmp_path


def test_sockets_cores_and_domains_of_a_server(server):
    facts = read_host(server, cpus=range(8))
    assert [(p.index, p.num_cores, p.domains) for p in facts.packages] == [(0, 2, (0,)), (1, 2, (1,))]
    assert sum(domain.memory_bytes for domain in facts.domains) == facts.memory_bytes == 64 * 2**30
    assert facts.last_level_cache_bytes == 32 * 2**20
    assert (facts.cpu_model, facts.frequency_hz) == ("Intel(R) Xeon(R) Platinum 8480C", 2e9)


def test_affinity_leaves_cores_and_domains_out(server):
    facts = read_host(server, cpus=[0, 4])  # two threads of one core
    assert [(p.index, p.num_cores) for p in facts.packages] == [(0, 1)]
    assert [domain.index for domain in facts.domains] == [0]


@pytest.mark.parametrize(
    ("files", "num_cores"),
    [
        ({"sys/fs/cgroup/jobs/mine/cpu.max": "max 100000"}, 4),
        ({"sys/fs/cgroup/jobs/mine/cpu.max": "200000 100000"}, 2),
        ({"sys/fs/cgroup/jobs/cpu.max": "200000 100000"}, 2),  # a parent's limit counts as well
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/job\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "200000",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000",
            },
            2,
        ),
    ],
)
def test_cpu_quotas_of_control_groups_are_obeyed(server, files, num_cores):
    write(server, files)
    assert read_host(server, cpus=range(8)).num_cores == num_cores


@pytest.mark.parametrize(
    ("files", "size_gib"),
    [
        ({"sys/fs/cgroup/jobs/mine/memory.max": "max"}, 64),
        ({"sys/fs/cgroup/jobs/mine/memory.max": str(8 * 2**30)}, 8),
        ({"sys/fs/cgroup/jobs/memory.max": str(4 * 2**30), "sys/fs/cgroup/jobs/mine/memory.max": "max"}, 4),
        (
            {
                "proc/self/cgroup": "9:memory:/job",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(6 * 2**30),
            },
            6,
        ),
        (
            {
                "proc/self/cgroup": "9:memory:/job",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(2**63 - 4096),
            },
            64,
        ),
    ],
)
def test_memory_limits_of_control_groups_are_obeyed(server, files, size_gib):
    write(server, files)
    facts = read_host(server, cpus=range(8))
    assert facts.memory_bytes == size_gib * 2**30
    assert sum(domain.memory_bytes for domain in facts.domains) == size_gib * 2**30


def test_a_machine_that_tells_nothing_still_gets_a_description(tmp_path):
    facts = read_host(tmp_path, cpus=[0, 1])
    assert facts.num_cores == 2
    assert facts.memory_bytes > 0
    assert facts.frequency_source.startswith("assumed")
    machine = detect(root=tmp_path, nvml=no_gpus(), memory_bandwidth_bytes_per_s=1e10)
    assert lint(machine) == ()


@pytest.mark.parametrize(
    ("vendor", "family", "flags", "fp32", "bf16"),
    [
        ("GenuineIntel", 6, "avx2 fma avx512f avx512_bf16 amx_bf16", 64, 1024),
        ("AuthenticAMD", 25, "avx2 fma avx512f avx512_bf16", 32, 64),  # Zen 4: two pipes of 256 bits
        ("AuthenticAMD", 26, "avx2 fma avx512f avx512_bf16", 64, 128),  # Zen 5: of 512 bits
        ("GenuineIntel", 6, "avx2 fma", 32, None),
        ("", 0, "asimd", 16, None),
    ],
)
def test_peak_per_cycle_follows_from_the_instruction_set(server, vendor, family, flags, fp32, bf16):
    cpuinfo = f"vendor_id : {vendor}\ncpu family : {family}\nmodel name : X\nflags : {flags}\ncpu MHz : 3000"
    write(server, {"proc/cpuinfo": cpuinfo})
    facts = read_host(server, cpus=range(8))
    rates = flop_per_cycle(facts)
    assert rates["fp32"][0] == fp32
    assert rates.get("bf16", (None,))[0] == bf16
    spec = cpu_spec(facts, facts.packages[0])
    assert spec.peak_flop_per_s("fp32") == pytest.approx(2 * 3e9 * fp32)
    assert spec.peak_dense["fp32"].basis == "estimated"
    assert "2 cores x 3.00 GHz" in spec.peak_dense["fp32"].source


def test_a_server_without_gpus_becomes_a_topology_of_cpus(server):
    machine = detect(root=server, nvml=no_gpus(), memory_bandwidth_bytes_per_s=2e11)
    names = [node.id for node in machine.compute_devices]
    assert set(names) <= {"cpu0", "cpu1"}
    assert machine.node("dram0").bandwidth.basis == "measured"


# --- GPUs ---------------------------------------------------------------------------------------------------


class NVMLError(Exception):
    """The bindings' exception."""


def nvml_of(gpus, nvlinks=(), levels=None, **more):
    """A stand-in for the bindings: GPUs as dictionaries of what NVML would answer."""

    def get(key):
        def ask(handle, *_):
            if key not in gpus[handle]:
                raise NVMLError(key)
            return gpus[handle][key]

        return ask

    def remote(handle, link):
        peers = [peer for a, peer, count in nvlinks if a == handle for _ in range(count)]
        if link >= len(peers):
            raise NVMLError(link)
        return peers[link]

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(gpus),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=get("name"),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=gpus[handle]["total"]),
        nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId=gpus[handle]["bus"].encode()),
        nvmlDeviceGetMaxPcieLinkGeneration=get("generation"),
        nvmlDeviceGetMaxPcieLinkWidth=get("width"),
        nvmlDeviceGetNumaNodeId=get("numa"),
        nvmlDeviceGetCudaComputeCapability=get("capability"),
        nvmlDeviceGetNumGpuCores=get("cores"),
        nvmlDeviceGetMaxClockInfo=lambda handle, kind: gpus[handle]["clocks"][kind],
        nvmlDeviceGetMemoryBusWidth=get("bits"),
        nvmlDeviceGetPowerManagementDefaultLimit=get("milliwatts"),
        nvmlDeviceGetTopologyCommonAncestor=lambda a, b: (levels or {}).get((a, b), 50),
        nvmlDeviceGetNvLinkState=lambda handle, link: bool(remote(handle, link)) or 1,
        nvmlDeviceGetNvLinkVersion=lambda handle, link: 5,
        nvmlDeviceGetNvLinkRemotePciInfo=lambda handle, link: SimpleNamespace(
            busId=remote(handle, link).encode()
        ),
        **more,
    )


def no_gpus():
    def fail():
        raise NVMLError("driver not loaded")

    return SimpleNamespace(NVMLError=NVMLError, nvmlInit=fail)


def gpu(index, name="NVIDIA A100-SXM4-80GB", total=81920 * 2**20, **more):
    return {
        "name": name,
        "total": total,
        "bus": f"0000000{index}:01:00.0",
        "generation": 4,
        "width": 16,
        **more,
    }


def detect_with(nvml, root):
    return detect(root=root, nvml=nvml, memory_bandwidth_bytes_per_s=2e11)


def test_no_driver_is_no_gpu():
    assert find_gpus(no_gpus()) is None
    assert find_gpus(nvml_of([])) is None


def test_known_gpus_with_direct_nvlinks(server):
    write(server, {"sys/bus/pci/devices/0000:01:00.0/numa_node": "0"})
    links = [(0, "00000001:01:00.0", 4), (1, "00000000:01:00.0", 4)]
    machine = detect_with(nvml_of([gpu(0), gpu(1, numa=0)], links), server)
    assert machine.node("gpu0").spec.name == "NVIDIA A100-SXM4-80GB"
    assert machine.node("gpu0").spec.peak_flop_per_s("bf16") == 312e12
    assert machine.route("gpu0", "gpu1").bandwidth_bytes_per_s == 4 * 20e9
    assert machine.route("dram0", "gpu0").links[-1].type.name == "pcie4-x16"
    assert lint(machine) == ()
    assert loads(dump(machine)) == machine


def test_nvlinks_that_end_nowhere_known_are_a_switch(server):
    links = [(index, "ffffffff:ff:ff.f", 12) for index in range(2)]
    machine = detect_with(nvml_of([gpu(0), gpu(1)], links), server)
    assert machine.route("gpu0", "gpu1").node_ids == ("gpu0", "nvswitch0", "gpu1")
    assert machine.route("gpu0", "gpu1").links[0].count == 12


def test_a_virtual_machine_that_hides_everything_gets_the_connectors_link_and_says_so(server):
    hidden = {"name": "NVIDIA H200", "total": 143771 * 2**20, "bus": "00000000:00:05.0"}
    machine = detect_with(nvml_of([hidden]), server)
    assert machine.route("dram0", "gpu0").links[-1].type.name == "pcie5-x16"
    assert "NUMA domain of the GPUs is hidden" in machine.description


def test_a_shared_switch_is_found_by_the_common_ancestor(server):
    machine = detect_with(nvml_of([gpu(0), gpu(1), gpu(2)], levels={(0, 1): 10}), server)
    shared = set(machine.route("dram0", "gpu0").resource_ids) & set(
        machine.route("dram0", "gpu1").resource_ids
    )
    assert "root0--switch0:root0>switch0" in shared
    assert not set(machine.route("dram0", "gpu0").resource_ids) & set(
        machine.route("dram0", "gpu2").resource_ids
    ) - {"dram0"}


def test_gpus_without_peer_access_are_staged(server):
    nvml = nvml_of([gpu(0), gpu(1)], nvmlDeviceGetP2PStatus=lambda a, b, index: 1, NVML_P2P_STATUS_OK=0)
    assert detect_with(nvml, server).route("gpu0", "gpu1").staged_in == "dram0"


def test_an_unknown_gpu_is_estimated_from_its_clocks(server):
    # An A40 under a name that no data sheet has: 84 SM at 1740 MHz, 48 GB; its datasheet says 37.4 Tflop/s, 149.7 (fp16) and 696 GB/s.
    a40 = gpu(
        0,
        "NVIDIA A41",
        46068 * 2**20,
        capability=(8, 6),
        cores=10752,
        clocks={1: 1740, 2: 7251},
        bits=384,
        milliwatts=300000,
    )
    spec = detect_with(nvml_of([a40]), server).node("gpu0").spec
    assert spec.peak_flop_per_s("fp32") == pytest.approx(37.4e12, rel=0.01)
    assert spec.memory_bandwidth_bytes_per_s == pytest.approx(696e9, rel=0.01)
    assert (spec.num_cores, spec.tdp_watts) == (84, 300)
    assert {figure.basis for figure in spec.peak_dense.values()} == {"estimated"}


def test_a_slice_of_a_known_gpu_is_not_taken_for_the_whole(server):
    part = gpu(0, total=20 * 2**30, capability=(8, 0), cores=6912, clocks={1: 1410, 2: 1512}, bits=5120)
    assert detect_with(nvml_of([part]), server).node("gpu0").spec.memory_bytes == 20 * 2**30


LISTING = "\n".join(f"{i}, Tesla V100-SXM2-32GB, 32510, 3, 16, 00000000:{6 + i:02x}:00.0" for i in range(8))


def test_nvidia_smi_alone_is_enough():
    gpus = gpus_from_smi(LISTING, (FIXTURES / "dgx1v_topo.txt").read_text(encoding="utf-8"))
    assert [device.numa for device in gpus.devices] == [0] * 4 + [1] * 4
    assert gpus.nvlinks["gpu0", "gpu4"] == 2
    assert {device.link_type.name for device in gpus.devices} == {"pcie3-x16"}
    hidden = gpus_from_smi("0, NVIDIA H200, 143771, [N/A], [N/A], 00000000:00:05.0", "")
    assert hidden.devices[0].link_type.name == "pcie5-x16"


@pytest.mark.parametrize(
    ("listing", "message"),
    [
        ("0, Brand New GPU, 1, 5, 16, 0:0", "the catalogue has no GPU 'Brand New GPU'"),
        ("No devices were found", "instead of six fields"),
    ],
)
def test_what_nvidia_smi_cannot_tell_is_refused(listing, message):
    with pytest.raises(TopologyError, match=message) as caught:
        gpus_from_smi(listing, "")
    assert "zosim[gpu]" in caught.value.hint


# --- this machine -------------------------------------------------------------------------------------------


def test_this_machine_is_described_within_its_limits():
    machine = detect()
    cpus = [machine.device_spec(node.id) for node in machine.of_type("cpu")]
    assert 1 <= sum(spec.num_cores for spec in cpus) <= (os.cpu_count() or 1)
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < sum(node.memory_bytes for node in machine.of_type("memory")) <= total_bytes
    assert machine.compute_devices
    assert not [finding for finding in lint(machine) if finding.severity == "error"]
    assert loads(dump(machine)) == machine


def test_the_bandwidth_measurement_is_bounded_and_plausible():
    bandwidth = measure_copy_bandwidth(2, 2**20, 2**34)
    assert 1e6 < bandwidth < 1e13
