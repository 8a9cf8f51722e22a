"""Processes that evaluate configurations, some of which may be killed, and any other executor in their place."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from multiprocessing.connection import wait as wait_for
from typing import Any, NamedTuple

from topology.errors import RunError, ZosimError
from zosim.applications.sweep.results import WORKER_DIED, Outcome

Evaluate = Callable[[Mapping[str, Any]], Mapping[str, Any]]

_AHEAD = 4
"""Configurations that wait for each worker, so that none has to wait for this process."""

_MOST_DEATHS = 3
"""After which a configuration is held to kill its process."""


class SweepTask(NamedTuple):
    """A configuration to evaluate, under its key."""

    key: str
    settings: Mapping[str, Any]


def outcome_of(evaluate: Evaluate, settings: Mapping[str, Any]) -> Outcome:
    """Return the figures of a configuration, or its error in one line. Runs in the workers."""
    try:
        return dict(evaluate(settings))
    except ZosimError as error:
        return f"{type(error).__name__}: {error.message}"
    except Exception as error:  # noqa: BLE001 - a failing configuration is a row, not the end of the sweep
        return f"{type(error).__name__}: {error}"


def outcomes(
    tasks: Iterable[SweepTask], evaluate: Evaluate, num_workers: int, executor: Executor | None = None
) -> Iterator[list[tuple[SweepTask, Outcome]]]:
    """Yield what became of tasks as they end, those together that have ended at the same time.

    - `evaluate`: a function that workers can import.
    - `executor`: what runs them; by default processes of this machine, which are replaced if they are killed.

    Raises RunError if an executor that was given breaks.
    """
    if executor is not None:
        yield from _until_done(tasks, evaluate, num_workers, executor, [])
        return
    rest = iter(tasks)
    while True:
        lost: list[SweepTask] = []
        with _pool(num_workers) as pool:
            yield from _until_done(rest, evaluate, num_workers, pool, lost)
        if not lost:
            return
        for outcome in _one_by_one(lost, evaluate):
            yield [outcome]


def _until_done(
    tasks: Iterable[SweepTask],
    evaluate: Evaluate,
    num_workers: int,
    executor: Executor,
    lost: list[SweepTask],
) -> Iterator[list[tuple[SweepTask, Outcome]]]:
    """Yield outcomes until the tasks have ended, or our own pool breaks, which leaves what was in flight in `lost`."""
    running: dict[Future[Outcome], SweepTask] = {}
    is_own = isinstance(executor, _Pool)

    def done() -> list[tuple[SweepTask, Outcome]]:
        ended, _ = wait(running, return_when=FIRST_COMPLETED)
        results: list[tuple[SweepTask, Outcome]] = []
        for future in ended:
            task, error = running.pop(future), future.exception()
            if isinstance(error, BrokenExecutor):
                lost.append(task)
            elif error is not None:  # the executor's own, such as a worker that it gave up
                results.append((task, f"{WORKER_DIED}: {type(error).__name__}: {error}"))
            else:
                results.append((task, future.result()))
        return results

    try:
        for task in tasks:
            try:
                running[executor.submit(outcome_of, evaluate, task.settings)] = task
            except BrokenExecutor:
                lost.append(task)
            while len(running) >= _AHEAD * num_workers and not lost:
                yield done()
            if lost:
                break
        while running:
            yield done()
    finally:
        for future in running:
            future.cancel()
    if lost and not is_own:
        raise RunError(
            f"the executor broke with {len(lost)} configurations in flight",
            hint="the results so far are kept: start another and run the same sweep again",
        )


def _one_by_one(tasks: list[SweepTask], evaluate: Evaluate) -> Iterator[tuple[SweepTask, Outcome]]:
    """Yield outcomes of tasks of which one may kill its process: alone it shows it, and the others come to no harm."""
    num_deaths = 0
    while tasks:
        with _pool(1) as pool:
            while tasks:
                try:
                    outcome = pool.submit(outcome_of, evaluate, tasks[0].settings).result()
                except BrokenExecutor:
                    num_deaths += 1
                    if num_deaths < _MOST_DEATHS:
                        break
                    outcome = f"{WORKER_DIED}: its process was killed {num_deaths} times; memory may be short"
                yield tasks.pop(0), outcome
                num_deaths = 0
                if isinstance(outcome, str) and outcome.startswith(WORKER_DIED):
                    break


class _Pool(ProcessPoolExecutor):
    """Processes of this machine; when left early, what has not begun is dropped."""

    def __exit__(self, *_: object) -> None:
        self.shutdown(wait=True, cancel_futures=True)


def _pool(num_workers: int) -> _Pool:
    # New Pythons: a copy of this process would have its threads' locks, and the locks of its database.
    context = multiprocessing.get_context("spawn")
    return _Pool(num_workers, mp_context=context, initializer=_end_with_parent)


def _end_with_parent() -> None:
    """End this worker when the process that started it is gone: nobody would read what it computes."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait_for([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
