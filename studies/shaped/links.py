"""What one network and its ranks are like, measured with messages and work that are no case's."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, log2
from statistics import median

import psutil
import torch

from executors.calibration.crowd import cores_together
from executors.ranks.communicator import WORLD, Communicator

_NUM_MESSAGES = 300
_NUM_BULKS = 3
_BULK_S = 0.5
"""Seconds of the link that the bandwidth is measured with."""


@dataclass(frozen=True)
class LinkFigures:
    """What was measured of one network.

    Attributes
    ----------
    message_s : float
        Median seconds of a round of an all_gather of 8 bytes, of as many rounds as doubling takes.
    bandwidth_bytes_per_s : float
        Of a large all_gather: what each rank sends over the seconds.
    core_s_per_byte : float
        Seconds for which cores were busy with it, over the bytes that all ranks sent.
    num_cores : float
        Cores' worth of work that all ranks do at once, where they exchange a number every now and then: less than there
        are, for ranks wait for the slowest, and those that share a core for their turns and its caches.
    """

    message_s: float
    bandwidth_bytes_per_s: float
    core_s_per_byte: float
    num_cores: float


def measure_link(ranks: Communicator, rate_bytes_per_s: float) -> LinkFigures:
    """Return what this network is like; all ranks call it together."""
    tiny = torch.zeros(1, dtype=torch.float64)
    exchange_s = median(_gathers_s(ranks, tiny, _NUM_MESSAGES))
    num_others = ranks.world_size - 1
    bulk = torch.zeros(int(rate_bytes_per_s * _BULK_S) // num_others, dtype=torch.uint8)
    busy_before = _busy_s()
    bulk_s = _gathers_s(ranks, bulk, _NUM_BULKS)
    # One more than are timed, between which ranks come together.
    num_sent = (_NUM_BULKS + 1) * bulk.numel() * num_others * ranks.world_size
    core_s_per_byte = (_busy_s() - busy_before) / num_sent
    return LinkFigures(
        exchange_s / ceil(log2(ranks.world_size)),
        bulk.numel() * num_others / min(bulk_s),
        core_s_per_byte,
        _num_cores(ranks),
    )


def _gathers_s(ranks: Communicator, own: torch.Tensor, count: int) -> list[float]:
    whole = own.new_zeros(own.numel() * ranks.world_size)
    ends = []
    for _ in range(count + 1):
        ranks.all_gather(WORLD, whole, own, "measuring the network")
        ends.append(time.perf_counter())
    return [end - begin for begin, end in pairwise(ends)]


def _busy_s() -> float:
    """Return the seconds for which the machine's processors have been busy, the kernel's for the network included."""
    found = psutil.cpu_times()
    return float(found.user + found.nice + found.system + found.irq + found.softirq)


def _num_cores(ranks: Communicator) -> float:
    """Return what :func:`executors.calibration.crowd.cores_together` finds."""

    def gather(number: float) -> list[float]:
        return list(ranks.gathered(torch.tensor(number, dtype=torch.float64), "measuring cores").tolist())

    return cores_together(gather, ranks.rank, ranks.world_size)
