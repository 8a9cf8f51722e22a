"""Streams of many ranks as arrays: what each runs, how far it is, and when it ends.

One row per rank and stream. Sets of running activities that come again are not solved again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zosim.hardware.machine import Activity
from zosim.program.instructions import Stream
from zosim.simulators.rows import Entries, Floats, Ints, Rows
from zosim.simulators.world import World

Counts = npt.NDArray[np.int16]

NUM_STREAMS = len(Stream)
STREAM_NUMBER = {stream: number for number, stream in enumerate(Stream)}
_IDLE = -1
# Solutions kept; a run whose ranks drift apart must not fill the memory with them.
_MAX_REMEMBERED = 1 << 12


class SharedClass(NamedTuple):
    """Activities of one template that take the same of the same resources.

    Attributes
    ----------
    bound, weight : float
    resources : array of shape (num_ranks, num_uses)
        Number of each resource used, by position among the template's ranks; -1 for what never limits.
    uses : array of shape (num_uses,)
    first_rank : int
        Where the template's ranks begin.
    """

    bound: float
    weight: float
    resources: Ints
    uses: Floats
    first_rank: int


class FlowTable(Rows):
    """Rows of a world, stream by stream; within a stream, ranks in the order given.

    Parameters
    ----------
    world : World
    ranks : array of shape (num_ranks,)
        Ranks of the world, those of one template together.
    """

    def __init__(self, world: World, ranks: Ints) -> None:
        super().__init__(
            NUM_STREAMS * len(ranks),
            np.array(list(world.capacities.values()), dtype=np.float64),
            np.array([name in world.fifo for name in world.capacities], dtype=bool),
            # Rows that arrive at one instant are served by rank, then by stream.
            np.add.outer(np.arange(NUM_STREAMS), ranks * NUM_STREAMS).ravel(),
        )
        self.num_ranks = len(ranks)
        self.batch = np.full(len(self.end_s), _IDLE, dtype=np.intp)
        self._class = np.full(len(self.end_s), _IDLE, dtype=np.int32)
        self._names = {name: number for number, name in enumerate(world.capacities)}
        self._classes: list[SharedClass] = []
        self._known: dict[object, int] = {}
        self._remembered: dict[bytes, Floats] = {}

    def class_of(self, activity: Activity, own: list[dict[str, str]], first_rank: int) -> int:
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
                self._classes.append(SharedClass(activity.bound, activity.weight, numbers, uses, first_rank))
        return self._known[key]

    def start(self, rows: Ints, shared_class: int, seconds: float, batch: int, now_s: float) -> None:
        """Let an instruction of some ranks arrive."""
        self.batch[rows] = batch
        self._class[rows] = shared_class
        if shared_class < 0:
            self.end_s[rows] = now_s + seconds
        else:
            self.arrive(rows, seconds, now_s)

    def _speeds(self, considered: Ints) -> Floats:
        # Who waits in a queue depends on arrivals, which the key does not hold.
        if self._is_fifo.any():
            return super()._speeds(considered)
        # Speeds follow from what runs where: a step asks for the same few sets again and again.
        key = considered.tobytes() + self._class[considered].tobytes()
        speeds = self._remembered.get(key)
        if speeds is None:
            if len(self._remembered) >= _MAX_REMEMBERED:
                self._remembered.clear()
            speeds = self._remembered[key] = super()._speeds(considered)
        return speeds

    def _bounds_and_weights(self, rows: Ints) -> tuple[Floats, Floats]:
        classes = self._class[rows]
        bound = np.array([item.bound for item in self._classes])[classes]
        return bound, np.array([item.weight for item in self._classes])[classes]

    def _entries(self, rows: Ints) -> Entries:
        classes = self._class[rows]
        parts = [self._entries_of(int(one), rows[classes == one]) for one in np.unique(classes)]
        listed, resources, uses = (np.concatenate(column) for column in zip(*parts, strict=True))
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
