"""Activities that progress at rates, which change only when the set of running activities does.

All starts and ends of one instant are taken in before rates are computed anew, and only where something changed:
activities that a used-up resource joins, directly or through others, are one component, and a component that
nobody entered or left keeps its rates. An activity whose rate stays the same keeps the end that it was given, so
that one that never shares anything takes exactly its own seconds.

For activities by the thousand :mod:`zosim.engines.rows` does the same on arrays; both leave rates to
:func:`zosim.engines.sharing.fill`.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zosim.engines.sharing import Array, Indices, fill
from zosim.hardware.machine import Activity

# Ends closer than this, relative to the time, are one instant: rounding must not split what is simultaneous.
SAME_INSTANT = 1e-14
# A resource is used up when more than this is asked of it: rounding of a sum must not make it so.
_FULL = 1 + 1e-12
# Solutions kept; a network in which no set of flows comes twice must not fill the memory with them.
_MAX_REMEMBERED = 1 << 14
# Larger components hardly ever come again.
_MAX_MEMBERS = 64


@dataclass(slots=True, eq=False)
class _Running:
    """An activity under way: seconds left at full speed when its speed last changed."""

    kind: _FluidKind
    key: tuple[int, ...]
    tag: Any
    anchor_s: float
    left_s: float
    speed: float = 0.0
    end_s: float = math.inf
    # Of the search that found it last.
    search: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _FluidKind:
    """An activity, with the resources that can limit it.

    Attributes
    ----------
    number : int
        In the order in which activities were first seen.
    activity : Activity
    uses : tuple of (_FluidResource, float)
        What it asks of each at full speed.
    columns, amounts : array
        Numbers of these resources, and what a unit of rate takes of each.
    """

    number: int
    activity: Activity
    uses: tuple[tuple[_FluidResource, float], ...]
    columns: Indices
    amounts: Array


@dataclass(slots=True, eq=False)
class _FluidResource:
    """What the running activities ask of a resource, and who waits for it if it serves one at a time."""

    number: int
    capacity: float
    asked: dict[_Running, float] = field(default_factory=dict)
    queue: deque[_Running] | None = None
    # Of the search that came by last.
    search: int = 0

    @property
    def is_used_up(self) -> bool:
        """Whether less is there than is asked for."""
        return sum(self.asked.values()) > self.capacity * _FULL


class Fluid:
    """Running activities and the resources that they share.

    The caller keeps the clock: it starts activities, settles once an instant, and takes what has ended.

    Parameters
    ----------
    capacities : mapping of str to float
    fifo : collection of str
        Resources that serve one activity at a time, in order of arrival: an activity runs once no earlier one,
        running or waiting, uses any of its own. The earliest is never held up, so nothing deadlocks.

    Attributes
    ----------
    num_solves : int
        Times that rates of a component of several activities were computed, not remembered.
    """

    def __init__(self, capacities: Mapping[str, float], fifo: Iterable[str] = ()) -> None:
        self.num_solves = 0
        fifo = frozenset(fifo)
        limited = [name for name, capacity in capacities.items() if name in fifo or math.isfinite(capacity)]
        self._resources = {
            name: _FluidResource(number, capacities[name], queue=deque() if name in fifo else None)
            for number, name in enumerate(limited)
        }
        self._capacity = np.array([capacities[name] for name in limited], dtype=np.float64)
        self._arrived: list[_Running] = []
        self._changed: dict[_Running, None] = {}
        self._ends: list[tuple[float, int, _Running]] = []
        self._num_ends = 0
        self._num_searches = 0
        self._kinds: dict[int, _FluidKind] = {}
        self._remembered: dict[tuple[int, ...], list[float]] = {}

    def start(self, activity: Activity, key: tuple[int, ...], now_s: float, tag: Any) -> None:
        """Let an activity arrive; `tag` is handed back when it ends.

        Activities that arrive at the same instant count as arrived in the order of their keys.
        """
        kind = self._kinds.get(id(activity))
        if kind is None:
            kind = self._kinds[id(activity)] = self._kind(activity)
        self._arrived.append(_Running(kind, key, tag, now_s, activity.seconds))

    def settle(self, now_s: float) -> None:
        """Give every running activity its speed from now on."""
        if self._arrived:
            arrived, self._arrived = self._arrived, []
            for item in sorted(arrived, key=lambda item: item.key):
                self._arrive(item)
        while self._changed:
            item, _ = self._changed.popitem()
            self._solve(self._component(item), now_s)

    @property
    def next_end_s(self) -> float:
        """When the first running activity ends as things are, infinity if none does."""
        while self._ends and self._ends[0][0] != self._ends[0][2].end_s:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else math.inf

    def take_ended(self, until_s: float) -> list[Any]:
        """Remove the activities that end by then and return their tags, in the order of their keys."""
        ended = []
        while self.next_end_s <= until_s:
            _, _, item = heapq.heappop(self._ends)
            # Its entries that were overtaken by a change of speed are dropped when they surface.
            item.end_s = -math.inf
            ended.append(item)
        for item in ended:
            self._leave(item)
        for item in ended:
            self._changed.pop(item, None)
        return [item.tag for item in sorted(ended, key=lambda item: item.key)]

    def _kind(self, activity: Activity) -> _FluidKind:
        taken: dict[str, float] = {}
        for name, use in activity.uses:
            if name in self._resources:
                taken[name] = taken.get(name, 0.0) + use
        return _FluidKind(
            len(self._kinds),
            activity,
            tuple((self._resources[name], use * activity.bound) for name, use in taken.items()),
            np.array([self._resources[name].number for name in taken], dtype=np.intp),
            np.array(list(taken.values()), dtype=np.float64),
        )

    def _arrive(self, item: _Running) -> None:
        queues = [resource.queue for resource, _ in item.kind.uses if resource.queue is not None]
        for queue in queues:
            queue.append(item)
        if all(queue[0] is item for queue in queues):
            self._admit(item)

    def _admit(self, item: _Running) -> None:
        self._changed[item] = None
        for resource, asked in item.kind.uses:
            resource.asked[item] = asked

    def _leave(self, item: _Running) -> None:
        for resource, _ in item.kind.uses:
            if len(resource.asked) > 1 and resource.is_used_up:
                self._changed.update(dict.fromkeys(resource.asked))
            del resource.asked[item]
        for queue in [resource.queue for resource, _ in item.kind.uses if resource.queue is not None]:
            queue.popleft()
            if queue and self._is_first(queue[0]):
                self._admit(queue[0])

    def _is_first(self, item: _Running) -> bool:
        return all(resource.queue[0] is item for resource, _ in item.kind.uses if resource.queue)

    def _component(self, first: _Running) -> list[_Running]:
        """Return who is joined with an activity through used-up resources; they are no longer changed."""
        self._num_searches += 1
        search = first.search = self._num_searches
        component = [first]
        # The list grows while it is walked.
        for item in component:
            for resource, _ in item.kind.uses:
                if resource.search != search:
                    resource.search = search
                    if len(resource.asked) > 1 and resource.is_used_up:
                        for other in resource.asked:
                            if other.search != search:
                                other.search = search
                                component.append(other)
        for item in component:
            self._changed.pop(item, None)
        return component

    def _solve(self, items: list[_Running], now_s: float) -> None:
        if len(items) == 1:
            self._set_speed(items[0], _speed_alone(items[0]), now_s)
            return
        items.sort(key=lambda item: item.kind.number)
        signature = tuple(item.kind.number for item in items)
        speeds = self._remembered.get(signature)
        if speeds is None:
            self.num_solves += 1
            speeds = relative_speeds([item.kind for item in items], self._capacity)
            if len(items) <= _MAX_MEMBERS:
                if len(self._remembered) >= _MAX_REMEMBERED:
                    self._remembered.clear()
                self._remembered[signature] = speeds
        for item, speed in zip(items, speeds, strict=True):
            if speed != item.speed:
                self._set_speed(item, speed, now_s)

    def _set_speed(self, item: _Running, speed: float, now_s: float) -> None:
        if speed == item.speed:
            return
        item.left_s = max(item.left_s - (now_s - item.anchor_s) * item.speed, 0.0)
        item.anchor_s, item.speed = now_s, speed
        item.end_s = now_s + item.left_s / speed
        self._num_ends += 1
        heapq.heappush(self._ends, (item.end_s, self._num_ends, item))


def _speed_alone(item: _Running) -> float:
    """Part of its full speed that an activity has where others leave it all that it asks for."""
    asked = [(resource.capacity, amount) for resource, amount in item.kind.uses]
    return min((capacity / amount for capacity, amount in asked if amount > capacity * _FULL), default=1.0)


def relative_speeds(kinds: Sequence[_FluidKind], capacity: Array) -> list[float]:
    """Return the part of its full speed at which each activity runs beside the others.

    Parameters
    ----------
    kinds : sequence of _FluidKind
        Each uses at least one resource.
    capacity : array
        Of all resources.
    """
    bounds = np.array([kind.activity.bound for kind in kinds], dtype=np.float64)
    rates = fill(
        bounds,
        np.array([kind.activity.weight for kind in kinds], dtype=np.float64),
        np.repeat(np.arange(len(kinds)), [len(kind.columns) for kind in kinds]),
        np.concatenate([kind.columns for kind in kinds]),
        np.concatenate([kind.amounts for kind in kinds]),
        capacity,
    )
    speeds: list[float] = (rates / bounds).tolist()
    return speeds
