"""How much others disturb a measurement: processors that other processes keep busy meanwhile, and waiting for one."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import psutil

_THREADS = Path("/proc/self/task")

SLOWER = 1.25
"""A sample slower than the fastest by more than this met another process, and does not count: with several threads,
which wait for each other, one such synchronization costs a scheduler's time slice, many times what is measured."""


class OtherLoad:
    """Watches the machine's processors from the moment it is made.

    Clocks of processors tick a hundred times a second: an interval of a second or more is measured well. Children of this
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


def waited_s() -> float:
    """Return how long this process's threads have been ready to run and waited for a processor, added up; 0 where only Linux tells.

    A thread that computes alone waits for nobody and loses little to a busy neighbour. Several that compute together
    wait for the last of them: where it gets no processor, a kernel of microseconds takes a scheduler's time slice.
    """
    total_ns = 0
    with suppress(OSError, ValueError):
        for thread in _THREADS.iterdir():
            # A thread may end between being listed and being read.
            with suppress(FileNotFoundError, ProcessLookupError):
                total_ns += int((thread / "schedstat").read_text().split()[1])
    return total_ns * 1e-9
