"""What one network and its ranks are like, measured with messages and work that are no case's."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, log2
from statistics import median

import torch

from executors.calibration.core_contention import Gather, cores_together, lost_beside
from executors.ranks.communicator import WORLD, Communicator

_NUM_MESSAGES = 300
_NUM_BULKS = 3
_BULK_S = 0.5
"""Seconds of the link that the bandwidth is measured with."""

_CHUNK_BYTES = 1 << 18
_CHUNKS_S = 0.8
"""Of the link, in chunks that are gathered one after the other while ranks compute."""


@dataclass(frozen=True)
class LinkFigures:
    """What was measured of one network."""

    # Median seconds of a round of an all_gather of 8 bytes, of as many rounds as doubling takes.
    message_s: float
    bandwidth_bytes_per_s: float  # of a large all_gather: what each rank sends over the seconds
    # Work that all ranks lose, in seconds of a core, where they gather chunks while they compute and meet, over the bytes
    # that they send.
    core_s_per_byte: float
    busy_latency_s: float  # seconds of such a chunk beyond those of its bytes: threads wait for a core's turn
    # Cores' worth of work that all ranks do at once, where they exchange a number every now and then: less than there
    # are, for ranks wait for the slowest, and those that share a core for their turns and its caches.
    num_cores: float


def measure_link(ranks: Communicator, rate_bytes_per_s: float) -> LinkFigures:
    """Return what this network is like; all ranks call it together."""
    tiny = torch.zeros(1, dtype=torch.float64)
    exchange_s = median(_gathers_s(ranks, tiny, _NUM_MESSAGES))
    num_others = ranks.world_size - 1
    bulk = torch.zeros(int(rate_bytes_per_s * _BULK_S) // num_others, dtype=torch.uint8)
    bandwidth = bulk.numel() * num_others / min(_gathers_s(ranks, bulk, _NUM_BULKS))
    num_cores = cores_together(_gathering(ranks), ranks.rank, ranks.world_size)
    return LinkFigures(
        exchange_s / ceil(log2(ranks.world_size)),
        bandwidth,
        *_beside_work(ranks, bandwidth, num_cores),
        num_cores,
    )


def _beside_work(ranks: Communicator, bandwidth_bytes_per_s: float, num_cores: float) -> tuple[float, float]:
    """Return what cores lose for a byte, and what a gather waits for beside its bytes, while ranks compute."""
    own = torch.zeros(_CHUNK_BYTES, dtype=torch.uint8)
    sent_bytes = _CHUNK_BYTES * (ranks.world_size - 1)
    chunk_s = sent_bytes / bandwidth_bytes_per_s
    gather = _gathering(ranks)
    # Each has measured a bandwidth of its own; that of the first decides.
    number = int(gather(max(1, round(_CHUNKS_S / chunk_s)))[0])
    lost, taken_s = lost_beside(lambda: _gathers_s(ranks, own, number - 1), gather)
    core_s = max(0.0, lost) * num_cores * taken_s
    return core_s / (sent_bytes * ranks.world_size * number), max(0.0, taken_s / number - chunk_s)


def _gathers_s(ranks: Communicator, own: torch.Tensor, count: int) -> list[float]:
    whole = own.new_zeros(own.numel() * ranks.world_size)
    ends = []
    for _ in range(count + 1):
        ranks.all_gather(WORLD, whole, own, "measuring the network")
        ends.append(time.perf_counter())
    return [end - begin for begin, end in pairwise(ends)]


def _gathering(ranks: Communicator) -> Gather:
    def gather(number: float) -> list[float]:
        return list(
            ranks.all_gather_host(torch.tensor(number, dtype=torch.float64), "measuring cores").tolist()
        )

    return gather
