"""The pace of a machine: how long a reference computation takes now, against its shortest.

A core that shares its hardware with another tenant's does less: on virtual machines, a physical core's two threads may belong to
two guests, and nothing tells a guest (no load, no stolen time) but its own speed. It changes within tenths of a second, and
how often, within minutes. So measurements are kept apart by the slowdown around them, and predictions are made for a pace.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import fmean, median

import numpy as np
import torch

UNDISTURBED = 1.15
"""Times the shortest that the reference takes at most at full speed; at half a core's hardware it takes 1.5 times as long."""

_SHORTEST = 0.01
"""Part of the references that are taken to be at full speed, whatever the rest."""

_NUM, _NUM_PASSES = 1 << 14, 20
"""Half of what torch gives a thread at least, and in a core's own cache."""

_FAR = 4.0
INTERVAL_S = 0.1
"""About a step: a step sees the mean pace of so long."""

_SPELL = 10
"""Intervals in about a second, of which a run's steps see the median slowdown."""


class Reference:
    """A fifth of a millisecond of one thread's arithmetic, in a core's own cache.

    Several threads would tell of more cores, but also of what it takes to get them together after other work.
    """

    def __init__(self) -> None:
        self._numbers = torch.linspace(0, 1, _NUM)
        self.seconds()

    def seconds(self) -> float:
        """Return what it takes now, caches warm."""
        # In place: where two buffers lie within pages would decide how long it takes. It ends near 0.66, wherever it began.
        self._numbers.sigmoid_()
        begin = time.perf_counter()
        for _ in range(_NUM_PASSES):
            self._numbers.sigmoid_()
        return time.perf_counter() - begin


def full_speed_s(seconds: Sequence[float]) -> float:
    """Return what the reference takes at full speed, where it took these `seconds` at various times.

    The median of all that nobody disturbed: rates are medians over the samples beside these, which are some per cent slower than
    the fastest. Held against the fastest, predictions for the pace of the calibration would count those per cent twice.
    """
    fastest_s = float(np.quantile(seconds, _SHORTEST))
    return float(np.median([second for second in seconds if second <= UNDISTURBED * fastest_s]))


def slowdown_of(intervals: Sequence[float]) -> tuple[float, float, float]:
    """Return the median slowdown of windows of time, and the range of about a second's, all but a twentieth on either side."""
    ratios = np.maximum(intervals, 1.0)
    spells = [float(np.median(spell)) for spell in np.array_split(ratios, max(1, len(ratios) // _SPELL))]
    low, high = np.quantile(spells, (0.05, 0.95))
    return float(np.median(ratios)), float(low), float(high)


def intervals_of(seconds: Sequence[float], fast_s: float, num_each: int) -> list[float]:
    """Return the mean pace of each so many references, one after the other."""
    ratios = np.minimum(np.asarray(seconds) / fast_s, _FAR)
    return [float(part.mean()) for part in np.array_split(ratios, max(1, len(ratios) // num_each))]


def reference_now_s(budget_s: float) -> float:
    """Return what the reference takes now: the median over windows of time of its means (`budget_s`: how long to measure)."""
    reference, intervals = Reference(), []
    for _ in range(max(1, round(budget_s / INTERVAL_S))):
        until, references = time.perf_counter() + min(budget_s, INTERVAL_S), []
        while time.perf_counter() < until:
            references.append(reference.seconds())
        shortest_s = min(references)
        intervals.append(shortest_s * fmean(intervals_of(references, shortest_s, len(references))))
    return median(intervals)
