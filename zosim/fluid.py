"""Activities that progress at rates, inside a simpy environment.

Rates change only when the set of running activities does. All starts and ends of one instant are taken in before
rates are computed anew, and an activity whose rate stays the same keeps the end that it was given, so that one
that never shares anything takes exactly its own seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import simpy
from simpy.events import EventPriority

from zosim.machine import Activity
from zosim.sharing import admitted, max_min_rates

# After everything else that happens at the same instant.
_LAST = EventPriority(2)
# Ends closer than this, relative to the time, are one instant: rounding must not split what is simultaneous.
_SAME_INSTANT = 1e-14


@dataclass(slots=True)
class _Running:
    """An activity under way: seconds left at full speed when its speed last changed."""

    activity: Activity
    key: tuple[int, int]
    done: simpy.Event
    arrived_s: float
    anchor_s: float
    left_s: float
    speed: float = 0.0
    end_s: float = math.inf


class Fluid:
    """Running activities and the resources that they share.

    Parameters
    ----------
    env : simpy.Environment
    capacities : mapping of str to float
    fifo : collection of str
        Resources that serve one activity at a time, in order of arrival.
    """

    def __init__(self, env: simpy.Environment, capacities: Mapping[str, float], fifo: frozenset[str]) -> None:
        self.env = env
        self.num_solves = 0
        self._capacities = capacities
        self._fifo = fifo
        self._running: list[_Running] = []
        self._is_dirty = False
        self._timer = 0
        self._speeds: dict[tuple[Activity, ...], list[float]] = {}

    def run(self, activity: Activity, key: tuple[int, int]) -> simpy.Event:
        """Start an activity; the event happens when it ends.

        Activities that arrive at the same instant count as arrived in the order of their keys.
        """
        done = self.env.event()
        now_s = self.env.now
        self._running.append(_Running(activity, key, done, now_s, now_s, activity.seconds))
        self._touch()
        return done

    def _touch(self) -> None:
        if not self._is_dirty:
            self._is_dirty = True
            self._call(self._update, delay_s=0.0, priority=_LAST)

    def _call(self, callback: Any, *, delay_s: float, priority: EventPriority) -> None:
        event = self.env.event()
        event.callbacks.append(callback)
        event._ok, event._value = True, None
        self.env.schedule(event, priority, delay_s)

    def _update(self, _: simpy.Event) -> None:
        """Give every running activity its speed, and wait for the first to end."""
        self._is_dirty = False
        if not self._running:
            return
        now_s = self.env.now
        self._running.sort(key=lambda item: (item.arrived_s, item.key))
        for item, speed in zip(self._running, self._solve(), strict=True):
            if speed != item.speed:
                item.left_s = max(item.left_s - (now_s - item.anchor_s) * item.speed, 0.0)
                item.anchor_s, item.speed = now_s, speed
                item.end_s = now_s + item.left_s / speed if speed > 0 else math.inf
        first_s = min(item.end_s for item in self._running)
        self._timer += 1
        number = self._timer
        self._call(
            lambda _: self._finish(number, first_s),
            delay_s=max(first_s - now_s, 0.0),
            priority=EventPriority(1),
        )

    def _finish(self, number: int, first_s: float) -> None:
        """End what is due, unless rates have changed since this was scheduled."""
        if number != self._timer:
            return
        until_s = first_s + _SAME_INSTANT * abs(first_s)
        due = [item for item in self._running if item.end_s <= until_s]
        self._running = [item for item in self._running if item.end_s > until_s]
        for item in sorted(due, key=lambda item: item.key):
            item.done.succeed()
        self._touch()

    def _solve(self) -> list[float]:
        """Return each activity's part of its full speed, remembered for sets that come again."""
        activities = tuple(item.activity for item in self._running)
        if activities not in self._speeds:
            self.num_solves += 1
            self._speeds[activities] = relative_speeds(activities, self._capacities, self._fifo)
        return self._speeds[activities]


def relative_speeds(
    activities: Sequence[Activity], capacities: Mapping[str, float], fifo: frozenset[str]
) -> list[float]:
    """Return the part of its full speed at which each activity runs beside the others.

    Parameters
    ----------
    activities : sequence of Activity
        In order of arrival.
    capacities : mapping of str to float
    fifo : frozenset of str
        Resources that serve one activity at a time.
    """
    names = sorted({name for item in activities for name, _ in item.uses})
    use = np.array([[dict(item.uses).get(name, 0.0) for name in names] for item in activities])
    may_run = _may_run(use, names, fifo)
    bounds = np.array([item.bound for item in activities])
    if names and may_run.any():
        rates = max_min_rates(
            bounds[may_run],
            use[may_run],
            [capacities[name] for name in names],
            [item.weight for item in np.array(activities, dtype=object)[may_run]],
        )
        bounds_of_running, bounds[may_run] = bounds[may_run], rates
        bounds[may_run] /= bounds_of_running
    else:
        bounds[:] = 1.0
    return [float(speed) if runs else 0.0 for speed, runs in zip(bounds, may_run, strict=True)]


def _may_run(use: npt.NDArray[np.float64], names: list[str], fifo: frozenset[str]) -> npt.NDArray[np.bool_]:
    columns = [number for number, name in enumerate(names) if name in fifo]
    if not columns:
        return np.ones(len(use), dtype=bool)
    return admitted(use[:, columns] > 0)
