"""What a machine did, as pairs of work and seconds that a profile is fitted to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from costmodel.estimate import CopyDirection
from costmodel.work import Work
from topology.errors import ProfileError

Statistic = Literal["median", "fastest"]


@dataclass(frozen=True)
class Measurement:
    """How long a piece of work took.

    For each compute format the fit needs:

    - matrix products from small to large (rate and ``matmul_half_dim``), and one that only reads (``memory_bandwidth``);
    - fused attention, and sampling of each distribution;
    - passes over parameters, and element-wise passes over buffers far larger and far smaller than ``cache_bytes``;
    - many tiny kernels (``dispatch_s``), and an empty instruction;
    - copies each way from tiny to large, and large and tiny allocations;
    - forwards of whole segments, which weigh all these as a model mixes them.

    What is missing keeps the base profile's value and interval.
    """

    name: str  # what was done. Its first word is its operation, by which reports are grouped
    work: Work
    seconds: float  # median duration; what the fit explains
    fastest_s: float  # shortest duration seen
    num_samples: int
    num_threads: int  # threads of the kernels; those of the profile that is fitted
    direction: CopyDirection = "h2d"  # which way `copy_bytes` went
    # Whether something else ran beside it on purpose. Such measurements are reported and not fitted.
    contended: bool = False
    weight: float = 1.0  # of it in a fit, from 0 to 1: less for what is a small part of all that was done
    # Whether the work was done as an instruction of a program, whose own cost is then part of it.
    is_instruction: bool = False
    # Whether others disturbed it all the time: the work takes no longer, and perhaps far less.
    is_bound: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and 0 < self.fastest_s <= self.seconds):
            message = (
                f"measurement {self.name!r} must have 0 < fastest ({self.fastest_s} s) <= median ({self.seconds} "
                "s)"
            )
            raise ProfileError(message, hint="use a clock that neither stands still nor runs backwards")
        if not 0 <= self.weight <= 1:
            raise ProfileError(f"measurement {self.name!r}: weight={self.weight} must lie between 0 and 1")

    @property
    def operation(self) -> str:
        """First word of the name."""
        return self.name.split(" ", 1)[0]

    def duration_s(self, statistic: Statistic) -> float:
        """Return the median or the shortest duration."""
        return self.seconds if statistic == "median" else self.fastest_s
