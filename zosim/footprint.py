"""How much memory a program takes, with its parts named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from costmodel.memory import MemoryPart, runtime_parts, total_bytes
from costmodel.profile import Profile
from topology.units import format_bytes
from zosim.program import Program, Space

WORKSPACE = "workspace"


@dataclass(frozen=True)
class Footprint:
    """Memory of one rank, on its device and on its host.

    Attributes
    ----------
    parts : tuple of MemoryPart
        Buffers by role, the largest workspace of any instruction, and what the runtime takes.
    """

    parts: tuple[MemoryPart, ...]

    @property
    def device_bytes(self) -> int:
        """Bytes on the device."""
        return total_bytes(self.parts, "device")

    @property
    def host_bytes(self) -> int:
        """Bytes on the host."""
        return total_bytes(self.parts, "host")

    def largest(self, where: str = "device") -> MemoryPart:
        """Return the largest part in one place."""
        return max((part for part in self.parts if part.where == where), key=lambda part: part.size_bytes)

    def describe(self, where: str = "device") -> str:
        """Return the parts in one place in words, the largest first."""
        parts = sorted(
            (part for part in self.parts if part.where == where), key=lambda part: -part.size_bytes
        )
        return ", ".join(f"{part.name} {format_bytes(part.size_bytes)}" for part in parts if part.size_bytes)


def footprint(program: Program, profile: Profile) -> Footprint:
    """Return the most memory that `program` takes at any time on a device of `profile`.

    Notes
    -----
    Every buffer is counted as if all were alive at once, together with the largest workspace. Only buffers that
    are allocated anew and hidden states at the edges of a step are ever absent, so this is an upper bound on what
    a timeline's memory curve shows, and close to it.
    """
    buffers = list(_buffer_parts(program))
    workspace = max((i.work.workspace_bytes for _, i in program.instructions()), default=0)
    parts = [*buffers, MemoryPart(WORKSPACE, workspace, "device")]
    return Footprint((*parts, *runtime_parts(profile, total_bytes(parts, "device"))))


def _buffer_parts(program: Program) -> Iterator[MemoryPart]:
    sizes: dict[tuple[str, Space], int] = {}
    for buffer in program.buffers:
        key = (buffer.role, buffer.space)
        sizes[key] = sizes.get(key, 0) + buffer.size_bytes
    for (role, space), size in sizes.items():
        yield MemoryPart(role, size, "device" if space is Space.DEVICE else "host")
