"""Alternatives timed in turns, so that a machine that slows down slows all of them.

A core does less while another tenant shares its hardware, and clocks fall as a machine gets warm. So what is compared is timed round after
round, every alternative once in each, and medians over rounds are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from zosim.report import Table

Way = Callable[[int], object]
"""Does its work, given the number of the call, from 0 on. Returns :class:`Took` where another process measured the seconds."""


@dataclass(frozen=True)
class Took:
    """What a call took, measured inside another process."""

    seconds: float


@dataclass(frozen=True)
class TurnTimes:
    """Seconds of one alternative, a round each."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """Median over rounds."""
        return median(self.seconds)

    @property
    def fastest_s(self) -> float:
        """Least over rounds."""
        return min(self.seconds)


def in_turns(
    ways: Mapping[str, Way],
    num_rounds: int,
    *,
    num_untimed: int = 0,
    num_warm_rounds: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    finish: Callable[[], object] = lambda: None,
) -> dict[str, TurnTimes]:
    """Return what each way took in each round.

    - `num_rounds`: that are timed, at least 1.
    - `num_untimed`: calls of a way in its turn before the one that is timed: what its memory and caches became while others ran
      is then no part of it.
    - `num_warm_rounds`: rounds before those that count.
    - `clock`: ``time.process_time`` counts seconds of cores, which a busy machine changes less.
    - `finish`: waits for what a way only began, such as kernels of a GPU.

    >>> calls = []
    >>> times = in_turns({"a": lambda n: calls.append(f"a{n}"), "b": lambda n: calls.append(f"b{n}")}, 1)
    >>> calls, len(times["a"].seconds)
    (['a0', 'b0', 'a1', 'b1'], 1)
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    num_calls = num_untimed + 1
    for turn in range(num_warm_rounds + num_rounds):
        for name, way in ways.items():
            for number in range(num_untimed):
                way(turn * num_calls + number)
            finish()
            begin = clock()
            done = way(turn * num_calls + num_untimed)
            finish()
            took_s = clock() - begin
            if turn >= num_warm_rounds:
                seconds[name].append(done.seconds if isinstance(done, Took) else took_s)
    return {name: TurnTimes(tuple(taken)) for name, taken in seconds.items()}


def end_to_end(step: Callable[[], object], num_steps: int) -> tuple[float, ...]:
    """Return the seconds of steps, each from the end of the one before it to its own, as a training loop sees them.

    Copies that a step leaves behind, which slow the next, are so counted.
    """
    ends = [time.perf_counter()]
    for _ in range(num_steps):
        step()
        ends.append(time.perf_counter())
    return tuple(end - begin for begin, end in pairwise(ends))


def turn_table(
    times: Mapping[str, TurnTimes],
    beside: Mapping[str, Callable[[TurnTimes], float]],
    *,
    digits: int = 2,
) -> Table:
    """Return milliseconds of each way, and numbers `beside` them by heading, such as ratios of medians."""
    columns = ("", "median (ms)", "fastest (ms)", *beside)
    lines = [
        (
            name,
            f"{1e3 * taken.median_s:.1f}",
            f"{1e3 * taken.fastest_s:.1f}",
            *(f"{number(taken):.{digits}f}" for number in beside.values()),
        )
        for name, taken in times.items()
    ]
    return Table(columns, lines, numeric=columns[1:])
