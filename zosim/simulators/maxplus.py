"""When the nodes of a graph start and end if they wait for each other alone: a max-plus recurrence, position by position.

    ``start(n, k) = max over the edges (d, m) of n of end(m, k - d)``
    ``end(n, k)   = start(n, k) + seconds(n)``

Nodes and edges are those of :class:`~zosim.program.step_graph.StepGraph`, by number, so one order serves many durations; and a duration
is a number, or an array with one element for each of many configurations. The planner's bound of a step, the closed form of programs, that
of many configurations (``studies.scale``) and that of the papers' cells (``studies.published``) are instances.

>>> upload, forward = (0, ((1, 1),)), (1, ((0, 0), (1, 1)))
>>> run = MaxPlus(0.0, max)
>>> [run.advance((upload, forward), (1.0, 2.0))[1] for _ in range(3)]
[3.0, 6.0, 9.0]

References
----------
.. [1] Baccelli, Cohen, Olsder and Quadrat, Synchronization and Linearity, chapter 3: such systems become periodic, with the
   period of the heaviest circuit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from graphlib import TopologicalSorter
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from zosim.program.step_graph import Edge

Floats = npt.NDArray[np.float64]
Time = TypeVar("Time", float, Floats)

Node = tuple[int, Sequence[Edge]]
"""A node's number, and what it waits for: positions before, and a number there."""


def in_order(edges: Sequence[Sequence[Edge]]) -> list[Node]:
    """Return the nodes of a position, each after those of its own position that it waits for.

    Raises CycleError: of `graphlib`, if they wait for each other in a circle.
    """
    here = {n: [before for distance, before in awaited if not distance] for n, awaited in enumerate(edges)}
    return [(number, edges[number]) for number in TopologicalSorter(here).static_order()]


class MaxPlus(Generic[Time]):
    """A run.

    - `zero`: When the run begins. What would be waited for before its first position is over by then.
    - `latest`: The later one of two times: ``max``, of arrays ``np.maximum``.

    - `starts`, `ends`: Of every position, by number.
    """

    def __init__(self, zero: Time, latest: Callable[[Time, Time], Time]) -> None:
        self.starts: list[dict[int, Time]] = []
        self.ends: list[dict[int, Time]] = []
        self._zero: Time = zero
        self._latest: Callable[..., Time] = latest

    def advance(self, nodes: Iterable[Node], seconds: Iterable[Time]) -> dict[int, Time]:
        """Evaluate the next position and return its ends.

        - `nodes`: Each after those of its own position that it waits for.
        - `seconds`: What each takes.
        """
        position, latest, all_ends = len(self.ends), self._latest, self.ends
        is_plain: bool = latest is max
        starts: dict[int, Time] = {}
        ends: dict[int, Time] = {}
        self.starts.append(starts)
        all_ends.append(ends)
        if not is_plain:
            for (number, edges), alone_s in zip(nodes, seconds, strict=True):
                awaited = (all_ends[position - distance][n] for distance, n in edges if distance <= position)
                starts[number] = start_s = reduce(latest, awaited, self._zero)
                ends[number] = start_s + alone_s
            return ends
        # Most of a bound's time goes here: no calls.
        for (number, edges), alone_s in zip(nodes, seconds, strict=True):
            start_s = self._zero
            for distance, n in edges:
                if distance <= position and (end_s := all_ends[position - distance][n]) > start_s:
                    start_s = end_s
            starts[number], ends[number] = start_s, start_s + alone_s
        return ends

    def shifts(self, period: int) -> list[float]:
        """Return by how much each end of the last `period` positions is later than as many positions before."""
        pairs = zip(self.ends[-period:], self.ends[-2 * period : -period], strict=True)
        return [float(end_s - before[number]) for ends, before in pairs for number, end_s in ends.items()]

    def repeat(self, period: int, rounds: int, shift_s: float) -> None:
        """Let the last `period` positions come again, each time so much later; only the last time is noted."""
        for noted in (self.starts, self.ends):
            last = noted[-period:]
            noted.extend({} for _ in range(period * (rounds - 1)))
            noted.extend(
                {number: time + shift_s * rounds for number, time in times.items()} for times in last
            )

    def critical_path(
        self, edges: Mapping[int, Sequence[Edge]], number: int, position: int
    ) -> Iterator[tuple[int, Edge | None]]:
        """Yield what an end is the sum of, the last first, each with what it waited for until it started."""
        while True:
            start_s = self.starts[position][number]
            released = (
                (distance, before)
                for distance, before in edges[number]
                if distance <= position and self.ends[position - distance][before] == start_s
            )
            last = next(released, None) if start_s != self._zero else None
            yield number, last
            if last is None:
                return
            position, number = position - last[0], last[1]
