"""What a timeline lists: the time of an instruction, and the memory of a role."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from zosim.instructions import Part, Space, Stream


@dataclass(frozen=True, slots=True)
class Span:
    """One instruction's time.

    Attributes
    ----------
    rank : int
    part : str
        ``prologue``, ``step`` or ``flush``.
    step : int
        Number of the step from 0; the prologue's is 0, the flush's is one past the last.
    instruction : str
        Id of the instruction in its part.
    stream : Stream
    label : str
        Name under which time is reported, the instruction's own.
    segment : str
        Segment that it serves.
    start_s, end_s : float
        Seconds since the beginning of the run.
    limiter : str
        What a prediction says that its duration is limited by, such as ``dram``; empty where measured.
    size_bytes : int
        What a message had on the wire, where that was measured.
    """

    rank: int
    part: Part
    step: int
    instruction: str
    stream: Stream
    label: str
    segment: str
    start_s: float
    end_s: float
    limiter: str = ""
    size_bytes: int = 0

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s

    def shifted(self, seconds: float, steps: int = 0) -> Span:
        """Return the same span, later."""
        return replace(
            self, start_s=self.start_s + seconds, end_s=self.end_s + seconds, step=self.step + steps
        )


@dataclass(frozen=True, slots=True)
class MemorySample:
    """From a time on, a role takes so many bytes of a space.

    Attributes
    ----------
    rank : int
    space : Space
    role : str
        What it is for: ``weights``, ``slots``, ``directions``, ``workspace`` ...
    time_s : float
    size_bytes : int
        All that the role takes now, not the change.
    """

    rank: int
    space: Space
    role: str
    time_s: float
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Repeat:
    """Steps that happen again and again, of which a timeline lists only the first round.

    Attributes
    ----------
    first_step : int
        First step of the round that is listed.
    num_steps : int
        Steps in the round, usually 1.
    num_rounds : int
        Further rounds after the listed one that are left out.
    period_s : float
        Seconds by which each round is later than the one before.
    """

    first_step: int
    num_steps: int
    num_rounds: int
    period_s: float

    @property
    def first_omitted_step(self) -> int:
        """First step that is not listed."""
        return self.first_step + self.num_steps

    @property
    def num_omitted_steps(self) -> int:
        """Steps that are not listed."""
        return self.num_steps * self.num_rounds

    @property
    def omitted_s(self) -> float:
        """Seconds that the omitted steps take."""
        return self.num_rounds * self.period_s


@dataclass(frozen=True, slots=True)
class Peak:
    """The most memory that a rank takes in a space, and what it consists of."""

    rank: int
    space: Space
    size_bytes: int
    time_s: float
    parts: Mapping[str, int]
