"""Threads beside torch's own: several that draw at once, and torch's ended before others need their cores.

libgomp's threads wait for their next piece of work in a loop, for milliseconds: on a machine of few cores they take
from whatever runs beside them what it needs.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path

import torch

from topology.errors import RunError

_SOFT = 1
"""``omp_pause_soft``: threads may end, all else is kept."""


def use_threads(num_threads: int) -> None:
    """Have torch's kernels on a CPU use so many threads.

    Raises RunError if the system does not start as many. OpenMP would end the process instead.
    """
    if num_threads > (os.cpu_count() or 1):
        _refuse_what_cannot_start(num_threads)
    torch.set_num_threads(num_threads)


def _refuse_what_cannot_start(num_threads: int) -> None:
    may_end = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(num_threads):
            thread = threading.Thread(target=may_end.wait)
            thread.start()
            started.append(thread)
    except RuntimeError:
        raise RunError(
            f"the system refuses {num_threads} threads in this process",
            hint="reduce --threads; more than the number of processors do not help",
        ) from None
    finally:
        may_end.set()
        for thread in started:
            thread.join()


def end_waiting_threads() -> None:
    """Let the threads that wait for the caller's next parallel operation end; it starts them anew.

    OpenMP 5.0's ``omp_pause_resource_all``. Where torch brings another runtime than libgomp, or lives on another
    system than Linux, nothing happens.
    """
    pause = _pause()
    if pause is not None:
        pause(_SOFT)


@cache
def _pause() -> Callable[[int], int] | None:
    maps = Path("/proc/self/maps")
    loaded = maps.read_text().split() if maps.exists() else []
    library = next((word for word in loaded if Path(word).name.startswith("libgomp")), None)
    return getattr(ctypes.CDLL(library), "omp_pause_resource_all", None) if library else None


Task = Callable[[], object]


class SamplingThreads:
    """The caller and a few threads beside it.

    `num_threads`: tasks that run at once.

    A task must keep its torch operations below 32768 elements, or to operations that torch never shares among
    threads (random numbers on a CPU): torch would start as many threads again for each of the others.
    """

    def __init__(self, num_threads: int = 1) -> None:
        self.num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads - 1, "zosim-draw") if num_threads > 1 else None

    def run(self, tasks: Sequence[Task]) -> None:
        """Do all tasks; where some fail, raise what one of them raised once all have ended."""
        if self._pool is None or len(tasks) < 2:
            for task in tasks:
                task()
            return
        end_waiting_threads()
        running = [self._pool.submit(task) for task in tasks[1:]]
        try:
            tasks[0]()
        finally:
            wait(running)
        for task_of_others in running:
            task_of_others.result()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def even_ranges(num_items: int, num_shares: int) -> list[range]:
    """Return `num_items` positions in at most `num_shares` consecutive ranges, none of them empty."""
    length = max(1, -(-num_items // num_shares))
    return [range(begin, min(begin + length, num_items)) for begin in range(0, num_items, length)]
