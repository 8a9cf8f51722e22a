"""Streams of many ranks as arrays: what each runs, how far it is, at what speed, and when it ends.

The same sharing as :class:`zosim.simulators.simulate.Fluid`, for activities by the thousand: one row for each rank and stream, all rows of an
instant settled together. Rows that no resource joins, not even through others, are components of the network that do not touch; only those
parts are solved in which something started or ended, and sets of running activities that come again are not solved again.

Two ranks over one link of capacity 10, of which each asks for 8 at full speed (a rate of 1). Both have 4 s of work; they run
at 5/8 of it, and end after 6.4 s:

>>> from zosim.simulators.world import World
>>> world = World((), (), (), {"link": 10.0}, frozenset(), {}, (0, 1), (1, 1))
>>> table = FlowTable(world, np.arange(2))
>>> sends = Activity(seconds=4.0, uses=(("link", 8.0),))
>>> shared = table.class_of(sends, [{"link": "link"}] * 2, first_rank=0)
>>> table.start(np.arange(2), shared, 4.0, batch=0, now_s=0.0)
>>> table.settle(now_s=0.0)
>>> table.end_s[:2].tolist()
[6.4, 6.4]
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zosim.hardware.machine import Activity
from zosim.program.instructions import Stream
from zosim.simulators.sharing import fill
from zosim.simulators.world import World

Counts = npt.NDArray[np.int16]
Ints = npt.NDArray[np.intp]
Floats = npt.NDArray[np.float64]
Entries = tuple[Ints, Ints, Floats]
"""What rows take of resources: row, resource, use per unit of rate; sorted by row."""

NUM_STREAMS = len(Stream)
STREAM_NUMBER = {stream: number for number, stream in enumerate(Stream)}
_IDLE = -1
# Solutions kept; a run whose ranks drift apart must not fill the memory with them.
_MAX_REMEMBERED = 1 << 12


class SharedClass(NamedTuple):
    """Activities of one template that take the same of the same resources.

    - `resources`: shape (num_ranks, num_uses); Number of each resource used, by position among the template's ranks; -1 for
      what never limits.
    - `uses`: shape (num_uses,)
    """

    bound: float
    weight: float
    resources: Ints
    uses: Floats
    first_rank: int  # where the template's ranks begin


class FlowTable:
    """Rows of a world, stream by stream; within a stream, ranks in the order given.

    - `ranks`: shape (num_ranks,); Ranks of the world, those of one template together.

    - `end_s`: shape (num_rows,); When each ends as things are; infinity where nothing runs.
    - `is_settled`: Whether speeds are those of what is running now.
    """

    def __init__(self, world: World, ranks: Ints) -> None:
        num_rows = NUM_STREAMS * len(ranks)
        self.num_ranks = len(ranks)
        self.end_s = np.full(num_rows, math.inf)
        self.batch = np.full(num_rows, _IDLE, dtype=np.intp)
        self.is_settled = True
        self._running = np.zeros(num_rows, dtype=bool)
        self._left_s = np.zeros(num_rows)
        self._anchor_s = np.zeros(num_rows)
        self._speed = np.zeros(num_rows)
        self._arrival = np.zeros(num_rows, dtype=np.intp)
        self._num_arrivals = 0
        # Rows that arrive at one instant are served by rank, then by stream.
        self._tie = np.add.outer(np.arange(NUM_STREAMS), ranks * NUM_STREAMS).ravel()
        self._capacity = np.array(list(world.capacities.values()), dtype=np.float64)
        self._is_fifo = np.array([name in world.fifo for name in world.capacities], dtype=bool)
        self._component: Ints | None = None
        self._touched = np.zeros(0, dtype=bool)
        self._class = np.full(num_rows, _IDLE, dtype=np.int32)
        self._names = {name: number for number, name in enumerate(world.capacities)}
        self._classes: list[SharedClass] = []
        self._known: dict[object, int] = {}
        self._remembered: dict[bytes, Floats] = {}

    def class_of(self, activity: Activity, own: list[dict[str, str]], first_rank: int) -> int:
        """Return the number of an activity's class, -1 if nothing limits it on any rank of its template.

        - `activity`: of the template.
        - `own`: for each rank of the template, its resource by the template's.
        - `first_rank`: where the template's ranks begin.
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
                self._classes.append(SharedClass(activity.bound, activity.weight, numbers, uses, first_rank))
        return self._known[key]

    def start(self, rows: Ints, shared_class: int, seconds: float, batch: int, now_s: float) -> None:
        """Let an instruction of some ranks arrive."""
        self.batch[rows] = batch
        self._class[rows] = shared_class
        if shared_class < 0:
            self.end_s[rows] = now_s + seconds
            return
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
        # Only components of the network in which something started or ended have other speeds now.
        considered = np.flatnonzero(self._running & self._touched[self._components()])
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
        components = self._components()
        self._touched[components[rows]] = True
        self.is_settled = False

    def _components(self) -> Ints:
        """Return the part of the network that each row belongs to."""
        # Known once all activities are, which the first arrival tells.
        if self._component is None:
            rows, resources = self._joined()
            num_rows = len(self.end_s)
            size = num_rows + len(self._capacity)
            self._component = _component_of(rows, num_rows + resources, size)[:num_rows]
            self._touched = np.zeros(size, dtype=bool)
        return self._component

    def _speeds(self, considered: Ints) -> Floats:
        """Return the part of its full speed that each of these rows has."""
        # Who waits in a queue depends on arrivals, which the key does not hold.
        if self._is_fifo.any():
            return self._solved(considered)
        # Speeds follow from what runs where: a step asks for the same few sets again and again.
        key = considered.tobytes() + self._class[considered].tobytes()
        speeds = self._remembered.get(key)
        if speeds is None:
            if len(self._remembered) >= _MAX_REMEMBERED:
                self._remembered.clear()
            speeds = self._remembered[key] = self._solved(considered)
        return speeds

    def _solved(self, considered: Ints) -> Floats:
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
            classes = [self._classes[number] for number in self._class[active]]
            bound, weight = np.array([(item.bound, item.weight) for item in classes]).T
            dense = np.searchsorted(active, rows)
            speed[active] = fill(bound, weight, dense, resources, uses, self._capacity) / bound
        return speed[considered]

    def _waiting(self, rows: Ints, resources: Ints) -> Ints:
        """Return the rows that are not the first to use each of their first-in-first-out resources."""
        queued = self._is_fifo[resources]
        queue_position = np.empty(len(self._running), dtype=np.intp)
        # Place of each row in the queue: by arrival, those of one instant by rank and stream.
        queue_position[np.lexsort((self._tie, self._arrival))] = np.arange(len(self._running))
        first = np.full(len(self._capacity), len(self._running))
        np.minimum.at(first, resources[queued], queue_position[rows[queued]])
        held = first[resources[queued]] != queue_position[rows[queued]]
        return np.unique(rows[queued][held])

    def _entries(self, rows: Ints) -> Entries:
        """Return what some rows take."""
        classes = self._class[rows]
        components = [self._entries_of(int(one), rows[classes == one]) for one in np.unique(classes)]
        listed, resources, uses = (np.concatenate(column) for column in zip(*components, strict=True))
        order = np.argsort(listed, kind="stable")
        return listed[order], resources[order], uses[order]

    def _entries_of(self, number: int, rows: Ints) -> Entries:
        item = self._classes[number]
        resources = item.resources[rows % self.num_ranks - item.first_rank]
        there = resources >= 0
        shape = len(rows), len(item.uses)
        listed = np.broadcast_to(rows[:, None], shape)[there]
        return listed, resources[there], np.broadcast_to(item.uses, shape)[there]

    def _joined(self) -> tuple[Ints, Ints]:
        """Return (row, resource) of everything that can ever be."""
        rows, resources = [], []
        for number, item in enumerate(self._classes):
            # Whatever a rank does on any stream may be of any of its classes.
            ranks = np.arange(len(item.resources)) + item.first_rank
            for stream in range(NUM_STREAMS):
                listed, there, _ = self._entries_of(number, ranks + stream * self.num_ranks)
                rows.append(listed)
                resources.append(there)
        nothing = np.zeros(0, dtype=np.intp)
        return np.concatenate([nothing, *rows]), np.concatenate([nothing, *resources])


def _component_of(one: Ints, other: Ints, num_nodes: int) -> Ints:
    """Return, for every node of a graph with these edges, its component: the least of the nodes in it.

    (scipy has this, and takes as long to import as a plan does to make.)

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
