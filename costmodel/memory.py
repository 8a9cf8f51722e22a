"""Memory in named components, what a runtime adds to them, and whether a host can give what a plan asks.

The components of a plan (weights, staging buffers, activations ...) are counted where the plan is lowered. Here is the rest: the
context of a GPU's runtime, the allocator's rounding and slack, and the limits of the machine at hand.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from costmodel.rates.profile import Bound, Profile
from topology.units import format_bytes

Where = Literal["device", "host", "disk"]

SHARED_MEMORY_PATH = Path("/dev/shm")
CGROUP_PATH = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60
"""Control groups of version 1 write a number above this where they mean no limit."""


@dataclass(frozen=True)
class MemoryComponent:
    """One named part of the memory that a plan takes.

    Attributes
    ----------
    name : str
        What the memory holds.
    size_bytes : int
        Its size in bytes, at least 0.
    where : {"device", "host", "disk"}
        Memory that it takes.
    """

    name: str
    size_bytes: int
    where: Where

    def __post_init__(self) -> None:
        if self.size_bytes < 0:
            raise ValueError(f"memory component {self.name!r} has {self.size_bytes} bytes")


def total_bytes(components: Iterable[MemoryComponent], where: Where) -> int:
    """Return the sum of the components in one place."""
    return sum(component.size_bytes for component in components if component.where == where)


def runtime_components(
    profile: Profile, temporary_bytes: int, bound: Bound = "central"
) -> tuple[MemoryComponent, ...]:
    """Return what the device's runtime takes beside tensors: its context, and what its allocator loses among temporaries.

    Tensors that stay are allocated once, one behind the other. Temporaries of unlike sizes come and go, and leave blocks
    behind that fit none of the next.

    Both are zero on a CPU, where the interpreter's own memory is reported apart.
    """
    values = profile.values(bound)
    components = (
        MemoryComponent(CONTEXT, round(values["context_bytes"]), "device"),
        MemoryComponent(SLACK, round(values["allocator_slack"] * temporary_bytes), "device"),
    )
    return tuple(component for component in components if component.size_bytes)


CONTEXT, SLACK = "runtime context", "allocator slack"


@dataclass(frozen=True)
class HostLimits:
    """What a host has left to give."""

    available_bytes: int  # RAM that a new process can have without swapping, within its control group
    shared_memory_bytes: int | None  # free bytes of the shared memory file system; None where there is none
    locked_bytes: int | None  # most memory that a process may pin; None where it is not limited
    limited_by: Literal["RAM", "control group"] = "RAM"  # `"RAM"` or `"control group"`


@dataclass(frozen=True)
class MemoryShortage:
    """Something that the host cannot give."""

    name: str  # `"host memory"`, `"pinned memory"` or `"shared memory"`
    message: str
    hint: str
    severity: Literal["error", "warning"] = "error"  # a warning may turn out harmless

    def __str__(self) -> str:
        return f"{self.message}\n\nhint: {self.hint}"


def host_limits() -> HostLimits:
    """Return the limits of the machine that this runs on."""
    import psutil  # not above: a plan for other hardware asks for none of this

    locked = None
    try:
        import resource
    except ImportError:  # not a POSIX system: nothing to ask
        pass
    else:
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        locked = None if soft == resource.RLIM_INFINITY else soft
    available = psutil.virtual_memory().available
    group = _cgroup_headroom_bytes()
    shared = shutil.disk_usage(SHARED_MEMORY_PATH).free if SHARED_MEMORY_PATH.is_dir() else None
    limited = group is not None and group < available
    return HostLimits(
        available_bytes=min(available, group) if group is not None else available,
        shared_memory_bytes=shared,
        locked_bytes=locked,
        limited_by="control group" if limited else "RAM",
    )


def pinned_slabs(sizes: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Return how to cut buffers that stay out of as little pinned memory as powers of two allow.

    `sizes`: bytes of each buffer, in any order.

    Returns
    -------
    list of (int, list of int)
        Slabs: their bytes, and those of the buffers in each.

    Notes
    -----
    torch rounds pinned memory up to a power of two, so each of forty blocks of 0.6 GiB would take a GiB. At each step there
    are two choices: one slab for all that is left, or the largest power of two below that, filled, and the rest divided in
    the same way. The one that wastes less is taken.

    References
    ----------
    .. [1] torch, CachingHostAllocator: sizes are rounded to powers of two.

    Examples
    --------
    >>> pinned_slabs([300, 300, 300, 300])
    [(1024, [300, 300, 300]), (512, [300])]
    >>> sum(size for size, _ in pinned_slabs([630] * 40)), 40 * 1024
    (25600, 40960)
    """
    left = sorted((size for size in sizes if size), reverse=True)
    if not left:
        return []
    whole = _power_of_two(sum(left))
    in_one = [(whole, left)]
    slab = max(whole // 2, _power_of_two(left[0]))
    if slab >= whole:
        return in_one
    taken: list[int] = []
    rest: list[int] = []
    for size in left:
        (taken if sum(taken) + size <= slab else rest).append(size)
    in_several = [(slab, taken), *pinned_slabs(rest)]
    return min(in_one, in_several, key=lambda slabs: sum(size for size, _ in slabs))


def pinned_bytes(own: Sequence[int], shared: Sequence[int] = ()) -> int:
    """Return the memory that one process pins for buffers of these sizes: its own in slabs, shared ones as they are."""
    return sum(size for size, _ in pinned_slabs(own)) + sum(shared)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def preflight_host(
    required_host_bytes: int,
    *,
    pinned_bytes: int = 0,
    shared_memory_bytes: int = 0,
    limits: HostLimits | None = None,
) -> list[MemoryShortage]:
    """Return what stands in the way of a plan on this host; nothing if nothing does.

    Parameters
    ----------
    required_host_bytes : int
        All host memory that the ranks on this host take together, pinned and shared memory included.
    pinned_bytes : int
        Page-locked memory of the rank that pins most.
    shared_memory_bytes : int
        What the ranks put into shared memory.
    limits : HostLimits, optional
        Those of this machine if not given.
    """
    limits = limits or host_limits()
    shortages = []
    if required_host_bytes > limits.available_bytes:
        hint = "store weights in a narrower format, run fewer ranks on this host, or end other processes"
        if limits.limited_by == "control group":
            hint = "raise the container's memory limit, or store weights in a narrower format"
        message = (
            f"the plan needs {format_bytes(required_host_bytes)} of host memory, but "
            f"{format_bytes(limits.available_bytes)} are available ({limits.limited_by})"
        )
        shortages.append(MemoryShortage("host memory", message, hint))
    if limits.locked_bytes is not None and pinned_bytes > limits.locked_bytes:
        message = (
            f"the plan pins {format_bytes(pinned_bytes)} in one process, but RLIMIT_MEMLOCK allows "
            f"{format_bytes(limits.locked_bytes)}"
        )
        hint = (
            "raise it with `ulimit -l unlimited` or the container's --ulimit memlock=-1; CUDA's driver "
            "often pins outside this limit, mlock and RDMA never do"
        )
        shortages.append(MemoryShortage("pinned memory", message, hint, severity="warning"))
    free = limits.shared_memory_bytes
    if shared_memory_bytes > (free or 0):
        available = "there is none" if free is None else f"{format_bytes(free)} are free"
        message = (
            f"the plan needs {format_bytes(shared_memory_bytes)} in {SHARED_MEMORY_PATH}, but {available}"
        )
        enlarge = f"enlarge it with `mount -o remount,size=... {SHARED_MEMORY_PATH}`"
        shortages.append(
            MemoryShortage("shared memory", message, f"{enlarge}, or start the container with --shm-size")
        )
    return shortages


def _cgroup_headroom_bytes(root: Path = CGROUP_PATH) -> int | None:
    """Return what the control group still allows: version 2 first, then version 1; None if it sets no limit."""
    layouts = (
        (root, "memory.max", "memory.current", "inactive_file"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    for folder, limit_name, used_name, cache_name in layouts:
        try:
            limit, used = (
                (folder / name).read_text(encoding="ascii").strip() for name in (limit_name, used_name)
            )
        except OSError:
            continue
        if limit.isdecimal() and int(limit) < _NO_LIMIT:
            reclaimable = 0
            # The kernel gives up file cache before it refuses memory.
            with contextlib.suppress(OSError):
                rows = map(str.split, (folder / "memory.stat").read_text(encoding="ascii").splitlines())
                reclaimable = next((int(row[1]) for row in rows if row[0] == cache_name), 0)
            return max(0, int(limit) - int(used) + reclaimable)
    return None
