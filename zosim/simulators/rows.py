"""Shared activities as arrays: how far each is, at what speed it runs, and when it ends.

The same sharing as :class:`zosim.simulators.simulate.Fluid`, for activities by the thousand: one row each, all rows of an instant settled
together. Rows that no resource joins, not even through others, are parts of the network that do not touch; only those
parts are solved in which something started or ended.

Examples
--------
Two rows over one resource of capacity 10, each of which asks for 8 of it at full speed (a rate of 1). Both have 4 s of work;
they run at 5/8 of it, and end after 6.4 s:

>>> class Two(Rows):
...     def _entries(self, rows):
...         return rows, np.zeros(len(rows), int), np.full(len(rows), 8.0)
...
...     def _bounds_and_weights(self, rows):
...         return np.ones(len(rows)), np.ones(len(rows))
...
...     def _joined(self):
...         return np.arange(2), np.zeros(2, int)
>>> rows = Two(2, np.array([10.0]), np.array([False]), np.arange(2))
>>> rows.arrive(np.arange(2), 4.0, now_s=0.0)
>>> rows.settle(now_s=0.0)
>>> rows.end_s.tolist()
[6.4, 6.4]
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from zosim.simulators.sharing import fill

Ints = npt.NDArray[np.intp]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Entries = tuple[Ints, Ints, Floats]
"""What rows take of resources: row, resource, use per unit of rate; sorted by row."""


class Rows(ABC):
    """Activities that share resources, a row each.

    Parameters
    ----------
    num_rows : int
    capacity : array
        Of every resource.
    is_fifo : array of bool
        Which serve one activity at a time, in order of arrival.
    tie : array of int
        Rows that arrive at one instant count as arrived in this order.

    Attributes
    ----------
    end_s : array of shape (num_rows,)
        When each ends as things are; infinity where nothing runs.
    is_settled : bool
        Whether speeds are those of what is running now.
    """

    def __init__(self, num_rows: int, capacity: Floats, is_fifo: Bools, tie: Ints) -> None:
        self.end_s = np.full(num_rows, math.inf)
        self.is_settled = True
        self._running = np.zeros(num_rows, dtype=bool)
        self._left_s = np.zeros(num_rows)
        self._anchor_s = np.zeros(num_rows)
        self._speed = np.zeros(num_rows)
        self._arrival = np.zeros(num_rows, dtype=np.intp)
        self._num_arrivals = 0
        self._tie = tie
        self._capacity = capacity
        self._is_fifo = is_fifo
        self._part: Ints | None = None
        self._touched = np.zeros(0, dtype=bool)

    @abstractmethod
    def _entries(self, rows: Ints) -> Entries:
        """Return what some rows take."""

    @abstractmethod
    def _bounds_and_weights(self, rows: Ints) -> tuple[Floats, Floats]:
        """Return the largest rate of each row, and its weight."""

    @abstractmethod
    def _joined(self) -> tuple[Ints, Ints]:
        """Return (row, resource) of everything that can ever be."""

    def arrive(self, rows: Ints, seconds: float | Floats, now_s: float) -> None:
        """Let activities arrive, of so many seconds at full speed."""
        # Speeds come with the next settling: until then nothing has progressed.
        self._left_s[rows] = seconds
        self._anchor_s[rows] = now_s
        self._speed[rows] = 0.0
        self._running[rows] = True
        self._arrival[rows] = self._num_arrivals
        self._touch(rows)

    def take_ended(self, until_s: float) -> Ints:
        """Make the rows that end by then idle, and return them."""
        rows = (self.end_s <= until_s).nonzero()[0]
        self.end_s[rows] = math.inf
        shared = rows[self._running[rows]]
        if shared.size:
            self._running[shared] = False
            self._touch(shared)
        return rows

    def settle(self, now_s: float) -> None:
        """Give every running row its speed from now on."""
        self.is_settled = True
        self._num_arrivals += 1
        # Only parts of the network in which something started or ended have other speeds now.
        considered = np.flatnonzero(self._running & self._touched[self._parts()])
        self._touched[:] = False
        if not considered.size:
            return
        speed = self._speeds(considered)
        # Who keeps its speed keeps its end: computed anew, rounding would move it.
        changed = speed != self._speed[considered]
        rows, speed = considered[changed], speed[changed]
        elapsed_s = now_s - self._anchor_s[rows]
        left_s = np.maximum(self._left_s[rows] - elapsed_s * self._speed[rows], 0.0)
        self._left_s[rows], self._anchor_s[rows], self._speed[rows] = left_s, now_s, speed
        end_s = np.full(len(rows), math.inf)
        np.divide(left_s, speed, out=end_s, where=speed > 0)
        self.end_s[rows] = now_s + end_s

    def _touch(self, rows: Ints) -> None:
        parts = self._parts()
        self._touched[parts[rows]] = True
        self.is_settled = False

    def _parts(self) -> Ints:
        """Return the part of the network that each row belongs to."""
        # Known once all activities are, which the first arrival tells.
        if self._part is None:
            rows, resources = self._joined()
            num_rows = len(self.end_s)
            size = num_rows + len(self._capacity)
            self._part = _component_of(rows, num_rows + resources, size)[:num_rows]
            self._touched = np.zeros(size, dtype=bool)
        return self._part

    def _speeds(self, considered: Ints) -> Floats:
        """Return the part of its full speed that each of these rows has."""
        speed = np.ones(len(self._running))
        rows, resources, uses = self._entries(considered)
        if self._is_fifo.any():
            waiting = self._waiting(rows, resources)
            speed[waiting] = 0.0
            runs = speed[rows] > 0
            rows, resources, uses = rows[runs], resources[runs], uses[runs]
        if rows.size:
            # Entries are sorted by row: each row once.
            active = rows[np.flatnonzero(np.diff(rows, prepend=-1))]
            bound, weight = self._bounds_and_weights(active)
            dense = np.searchsorted(active, rows)
            speed[active] = fill(bound, weight, dense, resources, uses, self._capacity) / bound
        return speed[considered]

    def _waiting(self, rows: Ints, resources: Ints) -> Ints:
        """Return the rows that are not the first to use each of their first-in-first-out resources."""
        queued = self._is_fifo[resources]
        place = np.empty(len(self._running), dtype=np.intp)
        # Place of each row in the queue: by arrival, those of one instant by rank and stream.
        place[np.lexsort((self._tie, self._arrival))] = np.arange(len(self._running))
        first = np.full(len(self._capacity), len(self._running))
        np.minimum.at(first, resources[queued], place[rows[queued]])
        held = first[resources[queued]] != place[rows[queued]]
        return np.unique(rows[queued][held])


def _component_of(one: Ints, other: Ints, num_nodes: int) -> Ints:
    """Return, for every node of a graph with these edges, its component: the least of the nodes in it.

    (scipy has this, and takes as long to import as a plan does to make.)

    Examples
    --------
    >>> _component_of(np.array([0, 1, 3]), np.array([4, 4, 5]), 6).tolist()
    [0, 0, 2, 3, 0, 3]
    """
    component = np.arange(num_nodes)
    while True:
        before = component
        component = before.copy()
        least = np.minimum(before[one], before[other])
        for ends in (one, other):
            np.minimum.at(component, before[ends], least)
        component = component[component]
        if (component == before).all():
            return component
