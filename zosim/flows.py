"""Streams of many ranks as arrays: what each runs, how far it is, and when it ends.

The same sharing as :mod:`zosim.fluid`, for ranks by the thousand: one row per rank and stream, all rows of an instant
settled together. Sets of running activities that come again are not solved again.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from zosim.machine import Activity
from zosim.program import Stream
from zosim.sharing import fill
from zosim.world import World

Ints = npt.NDArray[np.intp]
Counts = npt.NDArray[np.int16]
Floats = npt.NDArray[np.float64]

NUM_STREAMS = len(Stream)
STREAM_NUMBER = {stream: number for number, stream in enumerate(Stream)}
_IDLE = -1
# Solutions kept; a run whose ranks drift apart must not fill the memory with them.
_MAX_REMEMBERED = 1 << 12


class SharedClass:
    """Activities of one template that take the same of the same resources.

    Attributes
    ----------
    bound, weight : float
    resources : array of shape (num_ranks, num_uses)
        Number of each resource used, by position among the template's ranks; -1 for what never limits.
    uses : array of shape (num_uses,)
    """

    def __init__(self, activity: Activity, resources: Ints, uses: Floats) -> None:
        self.bound = activity.bound
        self.weight = activity.weight
        self.resources = resources
        self.uses = uses


class FlowTable:
    """Rows of a world, stream by stream; within a stream, ranks in the order given.

    Parameters
    ----------
    world : World
    ranks : array of shape (num_ranks,)
        Ranks of the world, those of one template together.
    """

    def __init__(self, world: World, ranks: Ints) -> None:
        num_rows = NUM_STREAMS * len(ranks)
        self.num_ranks = len(ranks)
        self.end_s = np.full(num_rows, math.inf)
        self.batch = np.full(num_rows, _IDLE, dtype=np.intp)
        self.num_solves = 0
        self.is_settled = True
        self._left_s = np.zeros(num_rows)
        self._anchor_s = np.zeros(num_rows)
        self._speed = np.zeros(num_rows)
        self._kind = np.full(num_rows, _IDLE, dtype=np.int32)
        # Rows that arrive at one instant are served by rank, then by stream.
        self._arrival = np.zeros(num_rows, dtype=np.intp)
        self._num_arrivals = 0
        self._tie = np.add.outer(np.arange(NUM_STREAMS), ranks * NUM_STREAMS).ravel()
        self._names = {name: number for number, name in enumerate(world.capacities)}
        self._capacity = np.array(list(world.capacities.values()), dtype=np.float64)
        self._is_fifo = np.array([name in world.fifo for name in world.capacities], dtype=bool)
        self._classes: list[SharedClass] = []
        self._first_rank: list[int] = []
        self._known: dict[object, int] = {}
        self._remembered: dict[bytes, Floats] = {}

    def kind_of(self, activity: Activity, own: list[dict[str, str]], first_rank: int) -> int:
        """Return the number of an activity's class, -1 if nothing limits it on any rank of its template.

        Parameters
        ----------
        activity : Activity
            Of the template.
        own : list of dict
            For each rank of the template, its resource by the template's.
        first_rank : int
            Where the template's ranks begin.
        """
        key = activity.bound, activity.weight, activity.uses, first_rank
        if key not in self._known:
            numbers = np.array(
                [[self._names.get(names[name], _IDLE) for name, _ in activity.uses] for names in own],
                dtype=np.intp,
            ).reshape(len(own), len(activity.uses))
            is_limited = bool((numbers >= 0).any())
            self._known[key] = len(self._classes) if is_limited else _IDLE
            if is_limited:
                uses = np.array([use for _, use in activity.uses], dtype=np.float64)
                self._classes.append(SharedClass(activity, numbers, uses))
                self._first_rank.append(first_rank)
        return self._known[key]

    def start(self, rows: Ints | slice, kind: int, seconds: float, batch: int, now_s: float) -> None:
        """Let an instruction of some ranks arrive."""
        self.batch[rows] = batch
        if kind < 0:
            self.end_s[rows] = now_s + seconds
            return
        self._left_s[rows] = seconds
        self._anchor_s[rows] = now_s
        self._speed[rows] = 0.0
        self._kind[rows] = kind
        self._arrival[rows] = self._num_arrivals
        self.is_settled = False

    def take_ended(self, until_s: float) -> Ints:
        """Make the rows that end by then idle, and return them."""
        rows = np.flatnonzero(self.end_s <= until_s)
        self.end_s[rows] = math.inf
        if self._classes:
            if (self._kind[rows] >= 0).any():
                self.is_settled = False
            self._kind[rows] = _IDLE
        return rows

    def settle(self, now_s: float) -> None:
        """Give every running row its speed from now on."""
        self.is_settled = True
        self._num_arrivals += 1
        speed = self._solved()
        rows = np.flatnonzero((speed != self._speed) & (self._kind >= 0))
        elapsed_s = now_s - self._anchor_s[rows]
        left_s = np.maximum(self._left_s[rows] - elapsed_s * self._speed[rows], 0.0)
        self._left_s[rows], self._anchor_s[rows], self._speed[rows] = left_s, now_s, speed[rows]
        with np.errstate(divide="ignore", invalid="ignore"):
            self.end_s[rows] = np.where(speed[rows] > 0, now_s + left_s / speed[rows], math.inf)

    def _solved(self) -> Floats:
        if self._is_fifo.any():
            return self._solve()
        key = self._kind.tobytes()
        found = self._remembered.get(key)
        if found is None:
            if len(self._remembered) >= _MAX_REMEMBERED:
                self._remembered.clear()
            found = self._remembered[key] = self._solve()
        return found

    def _solve(self) -> Floats:
        self.num_solves += 1
        speed = np.ones(len(self._kind))
        rows, resources, uses = self._entries()
        if self._is_fifo.any():
            waiting = self._waiting(rows, resources)
            speed[waiting] = 0.0
            runs = ~np.isin(rows, waiting)
            rows, resources, uses = rows[runs], resources[runs], uses[runs]
        if not rows.size:
            return speed
        active, dense = np.unique(rows, return_inverse=True)
        kinds = self._kind[active]
        bound = np.array([item.bound for item in self._classes])[kinds]
        weight = np.array([item.weight for item in self._classes])[kinds]
        speed[active] = fill(bound, weight, dense, resources, uses, self._capacity) / bound
        return speed

    def _entries(self) -> tuple[Ints, Ints, Floats]:
        """Return (row, resource, use) of everything that is running, sorted by row."""
        parts: list[tuple[Ints, Ints, Floats]] = []
        for kind in np.unique(self._kind[self._kind >= 0]):
            item = self._classes[kind]
            rows = np.flatnonzero(self._kind == kind)
            resources = item.resources[rows % self.num_ranks - self._first_rank[kind]]
            there = resources >= 0
            width = len(item.uses)
            listed = np.broadcast_to(rows[:, None], (len(rows), width))[there]
            parts.append((listed, resources[there], np.broadcast_to(item.uses, (len(rows), width))[there]))
        if not parts:
            nothing = np.zeros(0, dtype=np.intp)
            return nothing, nothing, np.zeros(0)
        rows, resources, uses = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.argsort(rows, kind="stable")
        return rows[order], resources[order], uses[order]

    def _waiting(self, rows: Ints, resources: Ints) -> Ints:
        """Return the rows that are not the first to use each of their first-in-first-out resources."""
        queued = self._is_fifo[resources]
        place = np.empty(len(self._kind), dtype=np.intp)
        place[np.lexsort((self._tie, self._arrival))] = np.arange(len(self._kind))
        first = np.full(len(self._capacity), len(self._kind))
        np.minimum.at(first, resources[queued], place[rows[queued]])
        held = first[resources[queued]] != place[rows[queued]]
        return np.unique(rows[queued][held])
