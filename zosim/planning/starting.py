"""What a run takes once, before its first step."""

from __future__ import annotations

from typing import NamedTuple

from costmodel.memory import pinned_bytes
from costmodel.profile import Bound, Profile
from topology.units import format_bytes, format_seconds
from zosim.instructions import Space
from zosim.program import Program
from zosim.program_set import ProgramSet


def pinned_by(program: Program) -> int:
    """Return the memory of the host that a rank pins for the buffers of its program, as torch takes it."""
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
    def words(self) -> str:
        """Size and seconds."""
        seconds, low, high = map(format_seconds, self[1:])
        return (
            f"{format_bytes(self.size_bytes)} of the host are pinned in {seconds}  (between {low} and {high})"
        )


def pinning(programs: ProgramSet, profile: Profile) -> Pinning | None:
    """Return what pinning takes before the first step; None on a CPU, and where the profile does not know how fast it is.

    Ranks of one host are taken to pin at once without holding each other up, which a system that has one lock for all of its
    memory may not let them.
    """
    if profile.device_kind != "gpu" or "pin_bandwidth" not in profile.values():
        return None
    size = max(map(pinned_by, programs.programs))

    def at(bound: Bound) -> float:
        return size / profile.values(bound)["pin_bandwidth"]

    return Pinning(size, at("central"), at("low"), at("high"))
