"""Threads that share what torch does on one thread alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from executors.steps.openmp import end_waiting_threads

Task = Callable[[], object]


class Crew:
    """The caller and a few threads beside it.

    Parameters
    ----------
    num_threads : int
        Tasks that run at once.

    Notes
    -----
    A task must keep its torch operations below 32768 elements, or to operations that torch never shares among
    threads (random numbers on a CPU): torch would start as many threads again for each of the crew's.
    """

    def __init__(self, num_threads: int = 1) -> None:
        self.num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads - 1, "zosim-crew") if num_threads > 1 else None

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


def shared(num_items: int, num_shares: int) -> list[range]:
    """Return `num_items` positions in at most `num_shares` consecutive ranges, none of them empty."""
    length = max(1, -(-num_items // num_shares))
    return [range(begin, min(begin + length, num_items)) for begin in range(0, num_items, length)]
