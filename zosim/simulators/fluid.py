"""Activities that progress at rates, which change only when the set of running activities does: under simpy's clock.

All starts and ends of one instant are taken in before rates are computed anew, by :func:`zosim.simulators.sharing.fill`. An
activity whose rate stays the same keeps the end that it was given, so that one that never shares anything takes exactly its
own seconds.

For activities by the thousand :mod:`zosim.simulators.rows` does the same on arrays.

Examples
--------
Two copies of 3 s over one link, each of which could fill it; the second starts a second later. They share the link from 1 s
to 5 s, when the first has had its 3 s; the second then has 1 s left.

>>> from zosim.hardware.machine import Activity
>>> env, copy = simpy.Environment(), Activity(3.0, uses=(("link", 1.0),))
>>> fluid, ends = Fluid(env, {"link": 1.0}), []
>>> def copies(number):
...     yield env.timeout(number)
...     yield fluid.run(copy, (number, 0))
...     ends.append((number, env.now))
>>> for number in (0, 1):
...     _ = env.process(copies(number))
>>> env.run()
>>> ends
[(0, 5.0), (1, 6.0)]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import simpy
from simpy.events import EventPriority

from zosim.hardware.machine import Activity
from zosim.simulators.sharing import SAME_INSTANT, fill

# Solutions kept; a network in which no set of flows comes twice must not fill the memory with them.
_MAX_REMEMBERED = 1 << 14
# After everything else that happens at the same instant.
_LAST = EventPriority(2)


@dataclass(slots=True, eq=False)
class _Running:
    """An activity under way.

    Attributes
    ----------
    key : tuple of (int, int)
        Rank and stream: those that arrive at one instant count as arrived in this order.
    done : simpy.Event
    since_s : float
        When its speed last changed.
    left_s : float
        Seconds that were left then at full speed.
    speed : float
        Part of its full speed.
    end_s : float
    """

    activity: Activity
    key: tuple[int, int]
    done: simpy.Event
    since_s: float
    left_s: float
    speed: float = 0.0
    end_s: float = math.inf


class Fluid:
    """Running activities, and the resources that they share.

    Parameters
    ----------
    env : simpy.Environment
    capacities : mapping of str to float
        Of the resources that can limit anybody.
    fifo : collection of str
        Resources that serve one activity at a time, in order of arrival: an activity runs once no earlier one,
        running or waiting, uses any of its own. The earliest is never held up, so nothing deadlocks.
    """

    def __init__(
        self, env: simpy.Environment, capacities: Mapping[str, float], fifo: Collection[str] = ()
    ) -> None:
        self._env = env
        self._number = {name: number for number, name in enumerate(capacities)}
        self._capacity = np.array(list(capacities.values()), dtype=np.float64)
        self._fifo = frozenset(fifo)
        self._speeds = lru_cache(_MAX_REMEMBERED)(self._solved)
        self._arrived: list[_Running] = []
        self._running: list[_Running] = []
        self._is_settled = True
        self._num_settled = 0

    def run(self, activity: Activity, key: tuple[int, int]) -> simpy.Event:
        """Start an activity of a rank and stream; the event happens when it ends."""
        done = self._env.event()
        self._arrived.append(_Running(activity, key, done, self._env.now, activity.seconds))
        self._settle_later()
        return done

    def _settle_later(self) -> None:
        if self._is_settled:
            self._is_settled = False
            self._call(self._settle, 0.0, _LAST)

    def _call(self, callback: Callable[[simpy.Event], None], delay_s: float, priority: EventPriority) -> None:
        event = self._env.event()
        event.callbacks.append(callback)
        event._ok, event._value = True, None
        self._env.schedule(event, priority, delay_s)

    def _settle(self, _: simpy.Event) -> None:
        """Give every running activity its speed from now on, and come back when the first of them ends."""
        self._is_settled = True
        self._num_settled += 1
        self._running += sorted(self._arrived, key=lambda item: item.key)
        self._arrived.clear()
        served, now_s = list(self._served()), self._env.now
        for item, speed in zip(served, self._speeds(tuple(item.activity for item in served)), strict=True):
            if speed != item.speed:
                item.left_s = max(item.left_s - (now_s - item.since_s) * item.speed, 0.0)
                item.since_s, item.speed = now_s, speed
                item.end_s = now_s + item.left_s / speed
        end_s, number = min((item.end_s for item in self._running), default=math.inf), self._num_settled
        if end_s < math.inf:
            self._call(lambda _: self._finish(number, end_s), max(end_s - now_s, 0.0), EventPriority(1))

    def _served(self) -> Iterator[_Running]:
        """Yield the activities that no earlier one keeps from a resource that serves one at a time."""
        taken: set[str] = set()
        for item in self._running:
            queues = self._fifo.intersection(name for name, _ in item.activity.uses)
            if taken.isdisjoint(queues):
                yield item
            taken |= queues

    def _finish(self, number: int, end_s: float) -> None:
        """End what is due, unless rates have changed since this was scheduled."""
        if number != self._num_settled:
            return
        until_s = end_s + SAME_INSTANT * abs(end_s)
        ended = [item for item in self._running if item.end_s <= until_s]
        self._running = [item for item in self._running if item.end_s > until_s]
        for item in sorted(ended, key=lambda item: item.key):
            item.done.succeed()
        self._settle_later()

    def _solved(self, activities: tuple[Activity, ...]) -> list[float]:
        """Return the part of its full speed at which each of these activities runs beside the others."""
        entries = [
            (row, self._number[name], use)
            for row, activity in enumerate(activities)
            for name, use in activity.uses
            if name in self._number
        ]
        speeds = np.ones(len(activities))
        if entries:
            rows, columns, uses = (np.array(column) for column in zip(*entries, strict=True))
            limited, dense = np.unique(rows, return_inverse=True)
            bounds, weights = np.array([(activities[row].bound, activities[row].weight) for row in limited]).T
            speeds[limited] = fill(bounds, weights, dense, columns, uses, self._capacity) / bounds
        return [float(speed) for speed in speeds]
