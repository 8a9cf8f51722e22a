"""Collectives in closed form: a latency per message plus bytes over bandwidth (Hockney's alpha-beta model).

Every rank has one full-duplex link of the given bandwidth and all ranks start together. Where links are shared
or unlike each other these are lower bounds; the event simulation sends the chunks themselves.

.. [1] R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH",
   Int. J. High Performance Computing Applications 19(1), 2005, section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, log2
from types import MappingProxyType
from typing import Literal

CollectiveName = Literal["all_gather", "all_reduce", "reduce_scatter"]
"""Collectives that a program can have."""

MESSAGE_S: Mapping[str, float] = MappingProxyType({"cpu": 5.5e-5, "gpu": 0.0})
"""Time of a small message besides the links' latency, by type of device, where no calibration has measured it.

Processes of one host over gloo's loopback: an all_reduce of 8 bytes between two takes 0.11 ms, two messages. Between
GPUs the latencies of the catalogue's NVLinks and PCIe links are NCCL's own and hold the software's part.
"""

LOOPBACK_BYTES_PER_S = 2e9
"""Of a message between processes of a host over gloo's loopback, where no calibration has measured it: one core copies
into the socket, another out of it."""


def point_to_point_s(size_bytes: float, *, latency_s: float, bandwidth_bytes_per_s: float) -> float:
    """Return the seconds of one message.

    >>> point_to_point_s(1e9, latency_s=1.0, bandwidth_bytes_per_s=1e9)
    2.0
    """
    _check(1, size_bytes, latency_s, bandwidth_bytes_per_s)
    return latency_s + size_bytes / bandwidth_bytes_per_s


def ring_all_reduce_s(
    size_bytes: float, num_ranks: int, *, latency_s: float, bandwidth_bytes_per_s: float
) -> float:
    """Return the seconds of a ring all_reduce: ``2 (n - 1)`` rounds, each moving an n-th of the buffer.

    Four ranks, 1 GB at 1 GB/s: six rounds of 0.25 s.

    >>> ring_all_reduce_s(1e9, 4, latency_s=0.0, bandwidth_bytes_per_s=1e9)
    1.5
    """
    return 2 * ring_all_gather_s(
        size_bytes, num_ranks, latency_s=latency_s, bandwidth_bytes_per_s=bandwidth_bytes_per_s
    )


def ring_all_gather_s(
    size_bytes: float, num_ranks: int, *, latency_s: float, bandwidth_bytes_per_s: float
) -> float:
    """Return the seconds of a ring all_gather of `size_bytes` in total: ``n - 1`` rounds of an n-th each.

    A ring reduce_scatter of a buffer of `size_bytes` takes as long.
    """
    _check(num_ranks, size_bytes, latency_s, bandwidth_bytes_per_s)
    rounds = num_ranks - 1
    return rounds * (latency_s + size_bytes / num_ranks / bandwidth_bytes_per_s)


def doubling_all_gather_s(
    size_bytes: float, num_ranks: int, *, latency_s: float, bandwidth_bytes_per_s: float
) -> float:
    """Return the seconds of recursive doubling: ``ceil(log2 n)`` rounds that double what each rank holds.

    Eight ranks, 1 s a message: three rounds, in which seven eighths of 8 GB arrive.

    >>> doubling_all_gather_s(8e9, 8, latency_s=1.0, bandwidth_bytes_per_s=1e9)
    10.0
    """
    _check(num_ranks, size_bytes, latency_s, bandwidth_bytes_per_s)
    missing = size_bytes * (num_ranks - 1) / num_ranks
    return ceil(log2(num_ranks)) * latency_s + missing / bandwidth_bytes_per_s


def all_gather_s(
    size_bytes: float, num_ranks: int, *, latency_s: float, bandwidth_bytes_per_s: float
) -> float:
    """Return the seconds of the better of ring and recursive doubling, which libraries choose by size.

    The two move the same bytes; doubling needs fewer messages.
    """
    return min(
        algorithm(size_bytes, num_ranks, latency_s=latency_s, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
        for algorithm in (ring_all_gather_s, doubling_all_gather_s)
    )


def tree_all_reduce_s(
    size_bytes: float, num_ranks: int, *, latency_s: float, bandwidth_bytes_per_s: float
) -> float:
    """Return the seconds of recursive doubling: ``ceil(log2 n)`` rounds, each moving the whole buffer.

    It is what small buffers (the two losses of a step) take; rings win on large ones.
    """
    _check(num_ranks, size_bytes, latency_s, bandwidth_bytes_per_s)
    return ceil(log2(num_ranks)) * (latency_s + size_bytes / bandwidth_bytes_per_s)


def all_reduce_s(
    size_bytes: float, num_ranks: int, *, latency_s: float, bandwidth_bytes_per_s: float
) -> float:
    """Return the seconds of the better of ring and recursive doubling, which libraries choose by size."""
    return min(
        algorithm(size_bytes, num_ranks, latency_s=latency_s, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
        for algorithm in (ring_all_reduce_s, tree_all_reduce_s)
    )


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """What a collective moves, and in which time."""

    by_messages: Callable[..., float]  # its closed form, such as `all_gather_s`
    # How often a ring takes the buffer round: a sum is made in the first pass, and handed on in the second.
    num_passes: int = 1
    # Whether a pass brings a rank the shares of all others but its own, and not the whole buffer.
    is_shared: bool = True
    # Whether each rank is left with the parts of all, and not with one as long as its own.
    gathers: bool = False

    def whole(self, received: float, num_ranks: int) -> float:
        """Return the size of the whole buffer of which each of several ranks receives so much."""
        of_a_pass = received * num_ranks / (num_ranks - 1) if self.is_shared else received
        return of_a_pass / self.num_passes


COLLECTIVES: dict[CollectiveName, CollectiveCost] = {
    "all_reduce": CollectiveCost(all_reduce_s, num_passes=2),
    "all_gather": CollectiveCost(all_gather_s, gathers=True),
    # Shares are gathered the other way round.
    "reduce_scatter": CollectiveCost(all_gather_s),
}
"""The collectives of programs by name.

A method of that name of :class:`executors.ranks.communicator.Communicator` runs one; without it, a program is simulated only.
"""


def _check(num_ranks: int, size_bytes: float, latency_s: float, bandwidth_bytes_per_s: float) -> None:
    if num_ranks < 1 or size_bytes < 0 or latency_s < 0 or bandwidth_bytes_per_s <= 0:
        message = (
            f"num_ranks={num_ranks}, size_bytes={size_bytes}, latency_s={latency_s}, bandwidth_bytes_per_s="
            f"{bandwidth_bytes_per_s}: ranks and bandwidth must be positive, the others not negative"
        )
        raise ValueError(message)
