"""CPUs and memory that this process may use, read from ``/proc`` and ``/sys``."""

from __future__ import annotations

import math
import os
import platform
import re
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from topology.building import figure, find_device
from topology.figures import Figure
from topology.importers.smi import parse_cpu_list
from topology.schema import DeviceSpec, Dtype

DEFAULT_FREQUENCY_HZ = 2.0e9
MEASURE_LIMIT_S = 0.35


@dataclass(frozen=True, slots=True)
class NumaDomain:
    """A NUMA domain and the memory in it that may be used."""

    index: int
    cpus: frozenset[int]
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Package:
    """A socket: its usable physical cores and its NUMA domains."""

    index: int
    num_cores: int
    domains: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What a process may use of its host."""

    cpu_model: str
    vendor: str
    family: int  # family number of an x86 processor; 0 elsewhere
    flags: frozenset[str]  # instruction set extensions
    frequency_hz: float  # base clock where it is known
    frequency_source: str
    packages: tuple[Package, ...]
    domains: tuple[NumaDomain, ...]
    memory_bytes: int  # usable memory, limits of control groups included
    memory_source: str
    last_level_cache_bytes: int  # largest cache of the first usable processor; 0 if unknown

    @property
    def num_cores(self) -> int:
        """Usable physical cores of all sockets."""
        return sum(package.num_cores for package in self.packages)


def read_host(root: Path = Path("/"), *, cpus: Iterable[int] | None = None) -> HostFacts:
    """What this process may use of its host.

    - `root`: root of the file system with ``proc`` and ``sys``.
    - `cpus`: logical processors; those of the process's affinity if left out.
    """
    usable = frozenset(usable_cpus() if cpus is None else cpus)
    # Fields of the first processor; the others are like it.
    first = (_read(root / "proc/cpuinfo") or "").split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    info = {key.strip(): value.strip() for key, _, value in pairs}
    memory_bytes, memory_source = _memory_limit(root)
    frequency_hz, frequency_source = _frequency(root, info.get("cpu MHz", ""))
    domains = _domains(root, usable, memory_bytes)
    caches = root / f"sys/devices/system/cpu/cpu{min(usable, default=0)}/cache"
    cache_sizes = [_read(index / "size") or "" for index in caches.glob("index*")]
    kibibytes = [int(size[:-1]) for size in cache_sizes if re.fullmatch(r"\d+K", size)]
    return HostFacts(
        # The file names no model on ARM.
        cpu_model=info.get("model name") or platform.processor() or platform.machine() or "CPU",
        vendor=info.get("vendor_id", ""),
        family=int(family) if (family := info.get("cpu family", "")).isdigit() else 0,
        flags=frozenset((info.get("flags") or info.get("Features") or "").split()),
        frequency_hz=frequency_hz,
        frequency_source=frequency_source,
        packages=_packages(root, usable, domains, _cpu_quota(root)),
        domains=domains,
        memory_bytes=memory_bytes,
        memory_source=memory_source,
        last_level_cache_bytes=max(kibibytes, default=0) * 1024,
    )


def usable_cpus() -> frozenset[int]:
    """Logical processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _read_int(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text is not None and re.fullmatch(r"-?\d+", text) else None


def _frequency(root: Path, megahertz: str) -> tuple[float, str]:
    """Clock in Hz and where it was read, from sysfs or else from what ``/proc/cpuinfo`` says in MHz."""
    folder = root / "sys/devices/system/cpu/cpu0/cpufreq"
    for name in ("base_frequency", "cpuinfo_max_freq"):
        kilohertz = _read_int(folder / name)
        if kilohertz:
            return kilohertz * 1e3, f"sysfs {name}"
    if re.fullmatch(r"\d+(\.\d+)?", megahertz):
        return float(megahertz) * 1e6, "/proc/cpuinfo"
    return DEFAULT_FREQUENCY_HZ, "assumed, the machine does not tell"


def _domains(root: Path, usable: frozenset[int], memory_bytes: int) -> tuple[NumaDomain, ...]:
    """NUMA domains in which the process has processors, sharing the usable memory by their size."""
    domains = []
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*"), key=_number):
        cpus = frozenset(parse_cpu_list(_read(folder / "cpulist") or "")) & usable
        match = re.search(r"MemTotal:\s+(\d+) kB", _read(folder / "meminfo") or "")
        if cpus and match and int(match[1]) > 0:
            domains.append(NumaDomain(_number(folder), cpus, int(match[1]) * 1024))
    if not domains:
        return (NumaDomain(0, usable, memory_bytes),)
    # The kernel's totals per domain may leave out hot-plugged memory: only their proportion is used.
    share = memory_bytes / sum(domain.memory_bytes for domain in domains)
    return tuple(NumaDomain(d.index, d.cpus, int(d.memory_bytes * share)) for d in domains)


def _number(path: Path) -> int:
    match = re.search(r"(\d+)$", path.name)
    return int(match[1]) if match else 0


def _packages(
    root: Path, usable: frozenset[int], domains: tuple[NumaDomain, ...], quota: float
) -> tuple[Package, ...]:
    """Sockets with their usable physical cores; a CPU quota takes the same part of each."""
    cores: dict[int, set[str]] = {}
    domain_ids: dict[int, set[int]] = {}
    for cpu in sorted(usable):
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        package = max(_read_int(folder / "physical_package_id") or 0, 0)
        siblings = _read(folder / "thread_siblings_list") or str(cpu)
        cores.setdefault(package, set()).add(siblings)
        near = {domain.index for domain in domains if cpu in domain.cpus} or {domains[0].index}
        domain_ids.setdefault(package, set()).update(near)
    share = min(1.0, quota / sum(map(len, cores.values())))
    return tuple(
        Package(index, max(1, math.ceil(len(cores[index]) * share)), tuple(sorted(domain_ids[index])))
        for index in sorted(cores)
    )


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the process's control group and those above it; version 2, then version 1."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controller
        else:
            continue
        folder = base / path.lstrip("/")
        yield from (folder, *folder.parents[: len(folder.relative_to(base).parts)])


def _memory_limit(root: Path) -> tuple[int, str]:
    """Usable memory in bytes, and what set it."""
    match = re.search(r"MemTotal:\s+(\d+) kB", _read(root / "proc/meminfo") or "")
    total = int(match[1]) * 1024 if match else psutil.virtual_memory().total
    limits = [
        limit
        for folder in _cgroup_folders(root, "memory")
        for name in ("memory.max", "memory.limit_in_bytes")
        if (limit := _read_int(folder / name)) is not None
    ]
    if limits and min(limits) < total:
        return min(limits), "memory limit of the control group"
    return total, "MemTotal of /proc/meminfo"


def _cpu_quota(root: Path) -> float:
    """CPU time that the control group may use, in processors; infinite if it has no limit."""
    quotas = [math.inf]
    for folder in _cgroup_folders(root, "cpu"):
        parts = (_read(folder / "cpu.max") or "").split()
        if len(parts) == 2 and parts[0] != "max":
            quotas.append(int(parts[0]) / int(parts[1]))
        quota, period = (_read_int(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if quota is not None and period is not None and quota > 0:
            quotas.append(quota / period)
    return min(quotas)


def flop_per_cycle(facts: HostFacts) -> dict[Dtype, tuple[int, str]]:
    """Peak flop per cycle and core by dtype, with the derivation, from the instruction set.

    Lanes x 2 (fused multiply-add) x pipes. Two pipes are assumed throughout, and AMD's cores before
    family 26 are known to run AVX-512 on two pipes of 256 bits. A wrong guess is off by two, which is
    what calibration is for.
    """
    flags = facts.flags
    if "avx512f" in flags and not (facts.vendor == "AuthenticAMD" and facts.family < 26):
        lanes, name = 16, "AVX-512"
    elif "avx512f" in flags or {"avx2", "fma"} <= flags:
        lanes, name = 8, "256-bit"
    elif "avx" in flags:
        lanes, name = 4, "AVX without fused multiply-add"
    else:
        lanes, name = 4, "128-bit"
    fp32 = lanes * 2 * 2
    rates: dict[Dtype, tuple[int, str]] = {
        "fp32": (fp32, f"{name}, {lanes} lanes x 2 x 2 pipes"),
        "fp64": (fp32 // 2, f"{name}, {lanes // 2} lanes x 2 x 2 pipes"),
    }
    if "amx_bf16" in flags:
        rates["bf16"] = 1024, "AMX tiles"
    elif "avx512_bf16" in flags:
        rates["bf16"] = fp32 * 2, f"{name} bf16 dot products"
    return rates


def cpu_spec(facts: HostFacts, package: Package) -> DeviceSpec:
    """Specification of a detected socket, its peaks estimated from clock, cores and instruction set."""
    known = find_device(facts.cpu_model)
    if known is not None and known.num_cores == package.num_cores:
        return known
    gigahertz = facts.frequency_hz / 1e9
    peaks: dict[Dtype, Figure] = {}
    for dtype, (per_cycle, how) in flop_per_cycle(facts).items():
        rate = round(package.num_cores * gigahertz * per_cycle, 3)
        source = (
            f"estimate: {package.num_cores} cores x {gigahertz:.2f} GHz ({facts.frequency_source}) x "
            f"{per_cycle} flop per cycle ({how})"
        )
        peaks[dtype] = figure(rate, "Gflop/s", source, "estimated")
    return DeviceSpec(
        id=f"detected-cpu{package.index}",
        name=facts.cpu_model,
        type="cpu",
        peak_dense=peaks,
        cores=figure(package.num_cores, "cores", "CPU affinity and control group limits", "measured"),
        copy_engines=figure(0, "engines", "a CPU's cores copy", "specification"),
    )


def measure_copy_bandwidth(num_threads: int, cache_bytes: int, memory_bytes: int) -> float:
    """Bandwidth in bytes per second that a copy in memory reaches, reads and writes counted.

    - `cache_bytes`: last-level cache; the buffers are four times as large where memory allows.
    - `memory_bytes`: usable memory, of which at most a 32nd is taken.

    The best of the repeats that fit into the time limit: other load only makes a repeat slower.
    """
    import numpy as np

    threads = max(1, min(num_threads, 32))
    wanted = min(max(128 * 2**20, 4 * cache_bytes), 512 * 2**20, max(memory_bytes // 32, 2**20))
    num_items = max(wanted // threads // 2 // 8, 1024)
    stop_s = time.perf_counter() + MEASURE_LIMIT_S
    # Writing once places the pages; untouched ones would all be the same page of zeros.
    sources = [np.ones(num_items) for _ in range(threads)]
    targets = [np.ones(num_items) for _ in range(threads)]
    best_s = math.inf
    with ThreadPoolExecutor(threads) as pool:
        while best_s == math.inf or time.perf_counter() + best_s < stop_s:
            start_s = time.perf_counter()
            list(pool.map(np.copyto, targets, sources))
            best_s = min(best_s, time.perf_counter() - start_s)
    return 2 * threads * num_items * 8 / best_s
