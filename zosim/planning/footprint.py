"""How much memory programs take, on every rank's device and on every host, with its components named; and how long to pin it.

Two ranks of one host, each with 8 bytes of its own there and 64 that both share, take 80 of it:

>>> parts = (MemoryComponent("rng", 8, "host"), MemoryComponent("weights", 64, "host"))
>>> rank = Footprint(parts, shared=parts[1:])
>>> HostFootprint.of("host0", (0, 1), (rank, rank)).size_bytes
80
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from costmodel.memory import MemoryComponent, pinned_bytes, runtime_components, total_bytes
from costmodel.rates.profile import Bound, Profile
from topology.units import format_bytes, format_seconds
from zosim.program import Program
from zosim.program.instructions import Buffer, Space
from zosim.program.program_set import ProgramSet

WORKSPACE = "workspace"
ARENAS = "device memory of the ranks"


@dataclass(frozen=True)
class Footprint:
    """Memory of one rank, on its device and on its host."""

    # Buffers by role, the largest workspace of any instruction, and what the runtime takes.
    components: tuple[MemoryComponent, ...]
    # Those of the host's components that all ranks of the host have in common.
    shared: tuple[MemoryComponent, ...] = ()
    is_cpu: bool = False  # whether the device is a CPU, whose memory is the host's

    @property
    def device_bytes(self) -> int:
        """Bytes on the device."""
        return total_bytes(self.components, "device")

    @property
    def host_bytes(self) -> int:
        """Bytes on the host, what is shared included."""
        return total_bytes(self.components, "host")

    @property
    def disk_bytes(self) -> int:
        """Bytes on the drives of the host."""
        return total_bytes(self.components, "disk")

    def describe(self, most: int | None = None) -> str:
        """Return the components on the device in words, the largest first, and of many only the first `most`."""
        on_device = (component for component in self.components if component.where == "device")
        return describe_components(on_device, most)


@dataclass(frozen=True)
class HostFootprint:
    """Memory that the ranks of one host take of it together."""

    host: str  # its node, or nothing where the plan does not name hosts
    ranks: tuple[int, ...]
    # Buffers by role, those that ranks share counted once; where the devices are CPUs, their memory too.
    components: tuple[MemoryComponent, ...]
    disk_bytes: int = 0  # what the ranks keep on the drives of the host

    @classmethod
    def of(cls, host: str, ranks: Sequence[int], taken: Sequence[Footprint]) -> HostFootprint:
        """Return the memory that ranks, each of which takes so much, take of their host together."""
        sizes: Counter[str] = Counter()
        arenas = 0
        once: dict[str, int] = {}
        for one, count in Counter(taken).items():
            # Ranks of a class take the same; what they share they take once.
            shared = {component.name: component.size_bytes for component in one.shared}
            for component in one.components:
                if component.where == "host":
                    sizes[component.name] += count * (component.size_bytes - shared.get(component.name, 0))
            once |= {name: max(size, once.get(name, 0)) for name, size in shared.items()}
            arenas += count * one.device_bytes if one.is_cpu else 0
        components = [MemoryComponent(name, size + once.get(name, 0), "host") for name, size in sizes.items()]
        components += [MemoryComponent(ARENAS, arenas, "host")] if arenas else []
        return cls(host, tuple(ranks), tuple(components), sum(one.disk_bytes for one in taken))

    @property
    def size_bytes(self) -> int:
        """Bytes of all components."""
        return total_bytes(self.components, "host")

    def describe(self, most: int | None = None) -> str:
        """Return the components in words, the largest first, and of many only the first `most`."""
        return describe_components(self.components, most)


@dataclass(frozen=True)
class Footprints:
    """Memory of all ranks."""

    ranks: tuple[Footprint, ...]  # in rank order
    hosts: tuple[HostFootprint, ...]

    @cached_property
    def largest_rank(self) -> int:
        """The rank that takes most of its device; the first of several."""
        return max(range(len(self.ranks)), key=lambda rank: (self.ranks[rank].device_bytes, -rank))

    @property
    def largest(self) -> Footprint:
        """Memory of that rank."""
        return self.ranks[self.largest_rank]

    @cached_property
    def fullest(self) -> HostFootprint:
        """The host of which most is taken; the first of several."""
        return max(self.hosts, key=lambda host: (host.size_bytes, -host.ranks[0]))


def describe_components(components: Iterable[MemoryComponent], most: int | None = None) -> str:
    """Return components in words, the largest first, and of many only the first `most`."""
    taken = [component for component in components if component.size_bytes]
    listed = sorted(taken, key=lambda component: -component.size_bytes)[:most]
    named = [f"{component.name} {format_bytes(component.size_bytes)}" for component in listed]
    return ", ".join(named + ["smaller ones"] * (len(named) < len(taken)))


def footprint(program: Program, profile: Profile, bound: Bound = "central") -> Footprint:
    """Return the most memory that `program` takes at any time on a device of `profile`.

    Every buffer is counted as if all were alive at once, together with the largest workspace. This is an upper bound on
    what a timeline's memory curve shows, and close to it. Only buffers that are allocated anew, and hidden states at the
    edges of a step, are ever absent.
    """
    workspace = max((i.work.workspace_bytes for _, i in program.instructions()), default=0)
    return footprint_of(program.buffers, workspace, profile, bound)


def footprint_of(
    buffers: Sequence[Buffer], workspace_bytes: int, profile: Profile, bound: Bound = "central"
) -> Footprint:
    """Return the memory of a rank with these buffers, as :func:`footprint` does."""
    components = [*_components_by_role(buffers), MemoryComponent(WORKSPACE, workspace_bytes, "device")]
    # What comes and goes leaves gaps behind, which the runtime's slack counts.
    moving = workspace_bytes + sum(
        buffer.size_bytes for buffer in buffers if buffer.dynamic and buffer.space is Space.DEVICE
    )
    return Footprint(
        (*components, *runtime_components(profile, moving, bound)),
        tuple(_components_by_role(buffer for buffer in buffers if buffer.shared)),
        profile.device_type == "cpu",
    )


def footprints(ranks: Sequence[Footprint], hosts: Mapping[str, Sequence[int]]) -> Footprints:
    """Return the memory of all ranks, and of their hosts.

    - `ranks`: in rank order.
    - `hosts`: ranks of each host.
    """
    of_hosts = [
        HostFootprint.of(host, members, [ranks[rank] for rank in members]) for host, members in hosts.items()
    ]
    return Footprints(tuple(ranks), tuple(of_hosts))


def _components_by_role(buffers: Iterable[Buffer]) -> Iterator[MemoryComponent]:
    sizes: dict[tuple[str, Space], int] = {}
    for buffer in buffers:
        key = (buffer.role, buffer.space)
        sizes[key] = sizes.get(key, 0) + buffer.size_bytes
    for (role, space), size in sizes.items():
        yield MemoryComponent(role, size, space.value)


def pinned_by(program: Program) -> int:
    """Return the memory of the host that a rank pins for the buffers of its program, as torch takes it."""
    # Host buffers that copies go to and from are pinned, so that copies run beside compute.
    held = [buffer for buffer in program.buffers if buffer.space is Space.HOST]
    return pinned_bytes(
        [buffer.size_bytes for buffer in held if not buffer.shared],
        [buffer.size_bytes for buffer in held if buffer.shared],
    )


class Pinning(NamedTuple):
    """Memory of the host that the rank pins that pins most, and how long it takes: at the rate of the profile, and its ends."""

    size_bytes: int
    seconds: float
    low_s: float
    high_s: float

    @property
    def description(self) -> str:
        """Size and seconds."""
        seconds, low, high = map(format_seconds, self[1:])
        return (
            f"{format_bytes(self.size_bytes)} of the host are pinned in {seconds}  (between {low} and {high})"
        )


def pinning(programs: ProgramSet, profile: Profile) -> Pinning | None:
    """Return what pinning takes before the first step; None on a CPU, and where the profile does not know how fast it is.

    Ranks of one host are taken to pin at the same time without slowing each other down. A system with one lock for all of
    its memory is slower.
    """
    if profile.device_type != "gpu" or "pin_bandwidth" not in profile.values():
        return None
    size = max(map(pinned_by, programs.programs))

    def at(bound: Bound) -> float:
        return size / profile.values(bound)["pin_bandwidth"]

    return Pinning(size, at("central"), at("low"), at("high"))
