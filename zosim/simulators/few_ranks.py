"""The event simulator for few ranks, whose steps alone are wanted: most worlds that a planner folds have one to eight.

The same rules as :mod:`zosim.simulators.lockstep`, over the graph of all ranks (:mod:`zosim.simulators.run_graph`): instructions that start and end
together are one node, and what one takes is a number and not an array. Of two ranks an event takes a tenth of the time.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf

import numpy as np

from zosim.hardware.machine import Activity
from zosim.program.instructions import Phase, Stream
from zosim.simulators.periodic import PeriodDetector
from zosim.simulators.run_graph import Member, RunGraph
from zosim.simulators.sharing import SAME_INSTANT, fill
from zosim.simulators.world import World
from zosim.timeline import Repeat

_Node = tuple[int, int]
"""A position of the run, and the number of a node there."""


@dataclass(slots=True, eq=False)
class _Flow:
    """What a rank takes of shared resources while an instruction runs."""

    node: _Node
    shared: _Shared
    left_s: float  # seconds that were left at full speed when its speed last changed
    since_s: float
    speed: float = 0.0  # part of its full speed
    end_s: float = inf


@dataclass(frozen=True, slots=True)
class _Shared:
    """An activity of a rank that may be slowed down."""

    row: int  # its rank and stream
    number: int  # equal for those that take the same of the same resources
    component: int  # of the network: components have no resource in common
    seconds: float


@dataclass(slots=True)
class _Position:
    """The nodes at a position, by number: what each still waits for, who waits for it, how much of it still runs, and when it ran."""

    waits: list[int]
    successors: list[list[_Node]]
    running: list[int]
    start_s: list[float]
    end_s: list[float]
    num_unfinished: int


class FewRanks:
    """One simulation of a world without queues, until its steps repeat."""

    def __init__(self, world: World, num_steps: int) -> None:
        self._graph = RunGraph(world, num_steps)
        self._last = num_steps + 1
        self._network = _Network(world)
        self._takes = {
            phase: [self._taken(phase, members) for members in nodes]
            for phase, nodes in self._graph.members.items()
        }
        # Times of the host's own nodes are not compared.
        ids = [graph.ids["step"] for graph in self._graph.graphs]
        self._timed = [
            number
            for number, members in enumerate(self._graph.members["step"])
            if members[0][1] < len(ids[members[0][0]])
        ]
        self._positions: dict[int, _Position] = {}
        self._ready: list[_Node] = []
        self._detector = PeriodDetector(self._graph.max_distance)
        self._entered = 0
        self._num_others, self._others_until_s = 0, 0.0

    def _taken(self, phase: Phase, members: tuple[Member, ...]) -> tuple[float | None, list[_Shared]]:
        """Return the seconds of those members of a node that nothing slows down, None for none, and what the others take."""
        alone: list[float] = []
        shared: list[_Shared] = []
        for rank, number in members:
            template, ids = self._graph.world.template(rank), self._graph.graphs[rank].ids[phase]
            if number == len(ids):
                alone.append(template.step_s)
                continue
            item = getattr(template.program, phase)[number]
            taken = self._network.taken(rank, item.stream, template.activities[phase, item.id])
            if taken is None:
                alone.append(template.activities[phase, item.id].seconds)
            else:
                shared.append(taken)
        return max(alone, default=None), shared

    def cycle(self) -> Repeat | None:
        """Return how steps repeat; None where they have not by the last of them, or never go on."""
        for position in sorted({0, 1, self._last}):
            self._open(position)
        network = self._network
        now_s = 0.0
        while True:
            while self._ready:
                self._start(self._ready.pop(), now_s)
            network.settle(now_s)
            ended = network.take_ended()
            if ended is None:
                return None
            now_s, nodes = ended
            for node in nodes:
                cycle = self._end(node, now_s)
                if cycle is not None:
                    return cycle

    def _open(self, position: int) -> None:
        """Let the nodes at a position wait for what has not ended."""
        if position in self._positions:
            return
        edges_of = self._graph.edges(position)
        num = len(edges_of)
        waits = [0] * num
        self._positions[position] = _Position(
            waits, [[] for _ in range(num)], [0] * num, [0.0] * num, [inf] * num, num
        )
        for number, edges in enumerate(edges_of):
            for distance, before in edges:
                there = self._positions.get(position - distance)
                if there is None:  # the flush waits for steps that are far off
                    waits[number] += 1
                elif there.end_s[before] == inf:
                    waits[number] += 1
                    there.successors[before].append((position, number))
            if not waits[number]:
                self._ready.append((position, number))

    def _start(self, node: _Node, now_s: float) -> None:
        position, number = node
        phase = self._graph.graphs[0].phase(position)
        at = self._positions[position]
        at.start_s[number] = now_s
        if phase == "step":
            self._entered = max(self._entered, position - 1)
        else:
            self._num_others += 1
            self._others_until_s = inf
        alone_s, shared = self._takes[phase][number]
        at.running[number] = len(shared) + (alone_s is not None)
        if alone_s is not None:
            self._network.wait(node, now_s + alone_s)
        for taken in shared:
            self._network.start(node, taken, now_s)

    def _end(self, node: _Node, now_s: float) -> Repeat | None:
        """Take in that a part of a node has ended, and return how steps repeat where that is known with it."""
        position, number = node
        at = self._positions[position]
        at.running[number] -= 1
        if at.running[number]:
            return None
        at.end_s[number] = now_s
        at.num_unfinished -= 1
        is_step = 0 < position < self._last
        if not is_step:
            self._num_others -= 1
            self._others_until_s = inf if self._num_others else now_s
        elif position + 1 < self._last:
            # Streams run in order, so nothing there could have begun before.
            self._open(position + 1)
        for there, successor in at.successors[number]:
            waits = self._positions[there].waits
            waits[successor] -= 1
            if not waits[successor]:
                self._ready.append((there, successor))
        if not is_step or at.num_unfinished:
            return None
        times = np.array([*map(at.start_s.__getitem__, self._timed), *map(at.end_s.__getitem__, self._timed)])
        return self._detector.completed(times, self._entered + 1 - position, self._others_until_s)


class _Network:
    """What runs, and when it ends at the speeds of now."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._resource = {name: number for number, name in enumerate(world.capacities)}
        self._capacity = np.array(list(world.capacities.values()), dtype=np.float64)
        self._own = [
            dict(zip(world.template(rank).resources, world.resources[rank], strict=True))
            for rank in range(world.size)
        ]
        self._component_of = _components(world, self._own)
        self._numbers: dict[object, int] = {}
        self._activities: list[tuple[Activity, list[tuple[int, float]]]] = []
        self._running: dict[int, dict[int, _Flow]] = defaultdict(dict)
        self._touched: set[int] = set()
        self._speeds: dict[tuple[int, ...], list[float]] = {}
        self._ends: list[tuple[float, int, _Flow | None, _Node]] = []
        self._order = count()

    def taken(self, rank: int, stream: Stream, activity: Activity) -> _Shared | None:
        """Return what an activity of a rank takes; None where nothing can slow it down."""
        own = self._own[rank]
        uses = [
            (self._resource[own[name]], use) for name, use in activity.uses if own[name] in self._resource
        ]
        if not uses:
            return None
        key = activity.bound, activity.weight, tuple(uses)
        if key not in self._numbers:
            self._numbers[key] = len(self._activities)
            self._activities.append((activity, uses))
        row = rank * len(Stream) + list(Stream).index(stream)
        return _Shared(row, self._numbers[key], self._component_of[uses[0][0]], activity.seconds)

    def wait(self, node: _Node, end_s: float) -> None:
        """Let something end at a time."""
        heappush(self._ends, (end_s, next(self._order), None, node))

    def start(self, node: _Node, taken: _Shared, now_s: float) -> None:
        """Let a flow begin; its speed comes with the next settling."""
        self._running[taken.component][taken.row] = _Flow(node, taken, taken.seconds, now_s)
        self._touched.add(taken.component)

    def settle(self, now_s: float) -> None:
        """Give every flow its speed from now on, where something began or ended beside it."""
        for component in self._touched:
            flows = [flow for _, flow in sorted(self._running[component].items())]
            key = tuple(flow.shared.number for flow in flows)
            if key not in self._speeds:
                self._speeds[key] = self._solved(key)
            for flow, speed in zip(flows, self._speeds[key], strict=True):
                # Who keeps its speed keeps its end: computed anew, rounding would move it.
                if speed != flow.speed:
                    flow.left_s = max(flow.left_s - (now_s - flow.since_s) * flow.speed, 0.0)
                    flow.since_s, flow.speed, flow.end_s = now_s, speed, now_s + flow.left_s / speed
                    heappush(self._ends, (flow.end_s, next(self._order), flow, flow.node))
        self._touched.clear()

    def take_ended(self) -> tuple[float, list[_Node]] | None:
        """Return the next instant at which something ends, and the node of each that does; None if nothing runs."""
        ends, now_s = self._ends, inf
        nodes: list[_Node] = []
        # Ends that differ by rounding alone are one instant.
        while ends and (not nodes or ends[0][0] <= now_s + SAME_INSTANT * now_s):
            end_s, _, flow, node = heappop(ends)
            if flow is not None:
                if flow.end_s != end_s:
                    continue  # its speed has changed since
                flow.end_s = -inf
                del self._running[flow.shared.component][flow.shared.row]
                self._touched.add(flow.shared.component)
            now_s = end_s if not nodes else now_s
            nodes.append(node)
        return (now_s, nodes) if nodes else None

    def _solved(self, numbers: tuple[int, ...]) -> list[float]:
        """Return the part of its full speed at which each of these runs beside the others."""
        if not numbers:
            return []
        activities = [self._activities[number] for number in numbers]
        entries = [(row, *use) for row, (_, uses) in enumerate(activities) for use in uses]
        rows, columns, uses = (np.array(column) for column in zip(*entries, strict=True))
        bounds, weights = np.array([(activity.bound, activity.weight) for activity, _ in activities]).T
        speeds: list[float] = (fill(bounds, weights, rows, columns, uses, self._capacity) / bounds).tolist()
        return speeds


def _components(world: World, own: list[dict[str, str]]) -> list[int]:
    """Return, for each resource, the first of those that something joins it to, even through others."""
    number = {name: number for number, name in enumerate(world.capacities)}
    component = list(range(len(number)))
    for rank in range(world.size):
        for activity in {id(each): each for each in world.template(rank).activities.values()}.values():
            joined = {
                component[number[own[rank][name]]] for name, _ in activity.uses if own[rank][name] in number
            }
            component = [min(joined) if each in joined else each for each in component]
    return component
