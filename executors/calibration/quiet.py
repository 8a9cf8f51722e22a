"""How much others disturb a measurement: processors that other processes keep busy meanwhile."""

from __future__ import annotations

import time

import psutil

SLOWER = 1.25
"""A sample slower than the fastest by more than this met another process, and does not count: with several threads,
which wait for each other, one such meeting costs a scheduler's time slice, many times what is measured."""


class OtherLoad:
    """Watches the machine's processors from the moment it is made.

    Notes
    -----
    Clocks of processors tick a hundred times a second: an interval of a second or more is told well. Children of this
    process count as others.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._began = self._read()

    def cores(self) -> float:
        """Return the mean number of processors that others have used since."""
        now_s, busy_s, own_s = (now - began for now, began in zip(self._read(), self._began, strict=True))
        return max(0.0, (busy_s - own_s) / now_s) if now_s > 0 else 0.0

    def _read(self) -> tuple[float, float, float]:
        times = psutil.cpu_times()
        idle_s = times.idle + getattr(times, "iowait", 0.0)
        own = self._process.cpu_times()
        return time.perf_counter(), float(sum(times) - idle_s), float(own.user + own.system)
