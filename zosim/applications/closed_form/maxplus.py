"""Max-plus recurrences: vertices that each start after others and take their time, one step after the other.

    ``start(i, k) = max over what i waits for of end(j, k - distance)``, later by the host's own time where that lies between
    ``end(i, k)   = start(i, k) + seconds(i)``

Who waits for whom is apart from how long things take, so one order serves many durations; and a duration is a number, or an
array with one element for each of many configurations. The closed form of programs (:mod:`zosim.applications.closed_form.recurrence`), that of many
configurations (``studies.scale``) and that of the papers' cells (``studies.published``) are instances.

>>> up, go = Member(0, "upload"), Member(0, "forward")
>>> upload, forward = Vertex((up,), (Edge(1, go),)), Vertex((go,), (Edge(0, up), Edge(1, go)))
>>> run = MaxPlus({}, 0.0, max)
>>> [run.advance((upload, forward), (1.0, 2.0))[go] for _ in range(3)]
[3.0, 6.0, 9.0]

References
----------
.. [1] Baccelli, Cohen, Olsder and Quadrat, Synchronization and Linearity, chapter 3: such systems become periodic, with the
   period of the heaviest circuit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Time = TypeVar("Time", float, Floats)


class Member(NamedTuple):
    """An instruction of one rank, by the rank's position in its world."""

    rank: int
    instruction: str


class Edge(NamedTuple):
    """What a vertex waits for.

    Attributes
    ----------
    distance : int
        How many steps before.
    before : Member or None
        None for the beginning of the run.
    host : int or None
        The rank whose host takes its own time in between, if any does.
    """

    distance: int
    before: Member | None
    host: int | None = None


class Vertex(NamedTuple):
    """Something that starts and ends once a step.

    Attributes
    ----------
    members : tuple of Member
        More than one where several instructions start and end together.
    edges : tuple of Edge
    """

    members: tuple[Member, ...]
    edges: tuple[Edge, ...]


class MaxPlus(Generic[Time]):
    """A run.

    Parameters
    ----------
    hosts : mapping of int to seconds
        Each rank's host time between two steps.
    zero : seconds
        When the run begins. What would be waited for before its first step is over by then.
    latest : callable
        The later one of two times: ``max``, of arrays ``np.maximum``.

    Attributes
    ----------
    starts, ends : list of dict
        Of every step.
    """

    def __init__(self, hosts: Mapping[int, Time], zero: Time, latest: Callable[[Time, Time], Time]) -> None:
        self.starts: list[dict[Member, Time]] = []
        self.ends: list[dict[Member, Time]] = []
        self._hosts: Mapping[int, Time] = hosts
        self._zero: Time = zero
        self._latest: Callable[[Time, Time], Time] = latest

    def advance(self, vertices: Iterable[Vertex], seconds: Iterable[Time]) -> dict[Member, Time]:
        """Evaluate the next step and return its ends.

        Parameters
        ----------
        vertices : iterable of Vertex
            Each after those of its own step that it waits for.
        seconds : iterable
            What each takes.
        """
        step, latest = len(self.ends), self._latest
        starts: dict[Member, Time] = {}
        ends: dict[Member, Time] = {}
        self.starts.append(starts)
        self.ends.append(ends)
        for (members, edges), alone_s in zip(vertices, seconds, strict=True):
            start_s = self._zero
            for edge in edges:
                start_s = latest(start_s, self._released_s(edge, step))
            for member in members:
                starts[member], ends[member] = start_s, start_s + alone_s
        return ends

    def critical_path(
        self, edges: Mapping[Member, tuple[Edge, ...]], member: Member, step: int
    ) -> Iterator[tuple[Member, Edge | None]]:
        """Yield what an end is the sum of, the last first, each with what it waited for until it started."""
        while True:
            start_s = self.starts[step][member]
            released = (edge for edge in edges[member] if self._released_s(edge, step) == start_s)
            last = next(released, None) if start_s != self._zero else None
            if last is None or last.before is None or last.distance > step:
                yield member, None
                return
            yield member, last
            member, step = last.before, step - last.distance

    def _released_s(self, edge: Edge, step: int) -> Time:
        """Return from when on an edge no longer holds back a vertex of a step."""
        distance, before, host = edge
        end_s = self._zero if before is None or distance > step else self.ends[step - distance][before]
        return end_s if host is None else end_s + self._hosts[host]
