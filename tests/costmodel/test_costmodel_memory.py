from __future__ import annotations

import pytest

from costmodel import memory
from costmodel.devices.datasheet import datasheet_profile
from costmodel.memory import HostLimits, MemoryComponent, preflight_host, runtime_components, total_bytes
from topology import load_preset

GPU = datasheet_profile(load_preset("h200-1x"), "gpu0")
CPU = datasheet_profile(load_preset("cpu-laptop"), "cpu0")
GIB = 2**30
ROOMY = HostLimits(64 * GIB, 8 * GIB, None)


def test_a_gpu_has_a_context_and_slack_and_a_cpu_neither():
    parts = runtime_components(GPU, 10 * GIB)
    assert {part.name for part in parts} == {"runtime context", "allocator slack"}
    assert 0.3e9 < parts[0].size_bytes < 1.2e9
    assert total_bytes(parts, "device") > parts[0].size_bytes
    assert total_bytes(parts, "host") == 0
    assert runtime_components(CPU, 10 * GIB) == ()
    with pytest.raises(ValueError, match="-1 bytes"):
        MemoryComponent("weights", -1, "device")


def test_a_plan_that_fits_raises_no_finding():
    assert preflight_host(GIB, pinned_bytes=GIB, shared_memory_bytes=GIB, limits=ROOMY) == []
    assert preflight_host(1) == []  # a byte fits anywhere


@pytest.mark.parametrize(
    ("limits", "name", "message"),
    [
        (
            HostLimits(GIB, GIB * 8, None),
            "host memory",
            r"needs 2 GiB of host memory, but 1 GiB are available \(RAM\)",
        ),
        (
            HostLimits(GIB, GIB * 8, None, "control group"),
            "host memory",
            "raise the container's memory limit",
        ),
        (HostLimits(64 * GIB, GIB * 8, 65536), "pinned memory", "RLIMIT_MEMLOCK allows 64 KiB"),
        (HostLimits(64 * GIB, 2**26, None), "shared memory", "64 MiB are free"),
        (HostLimits(64 * GIB, None, None), "shared memory", "there is none"),
    ],
)
def test_each_limit_is_named_with_what_to_do(limits, name, message):
    import re

    (finding,) = preflight_host(2 * GIB, pinned_bytes=GIB, shared_memory_bytes=GIB, limits=limits)
    assert finding.name == name
    assert re.search(message, str(finding))
    assert "hint: " in str(finding)
    assert finding.severity == ("warning" if name == "pinned memory" else "error")


def test_the_limits_of_this_machine_make_sense():
    limits = memory.host_limits()
    assert 0 < limits.available_bytes < 2**50
    assert limits.locked_bytes is None or limits.locked_bytes >= 0


@pytest.mark.parametrize("version", [1, 2])
def test_control_groups_are_read(tmp_path, version):
    folder = tmp_path if version == 2 else tmp_path / "memory"
    folder.mkdir(exist_ok=True)
    limit, used, cache = (
        ("memory.max", "memory.current", "inactive_file")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    (folder / used).write_text("700\n")
    (folder / limit).write_text("1000\n")
    assert memory._cgroup_headroom_bytes(tmp_path) == 300
    (folder / "memory.stat").write_text(f"anon 500\n{cache} 200\n")
    assert memory._cgroup_headroom_bytes(tmp_path) == 500
    (folder / limit).write_text("max\n" if version == 2 else "9223372036854771712\n")
    assert memory._cgroup_headroom_bytes(tmp_path) is None
    assert memory._cgroup_headroom_bytes(tmp_path / "none") is None
