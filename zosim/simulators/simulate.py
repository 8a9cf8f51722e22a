"""A clock for programs: which instruction starts when, as discrete events.

One simpy process per rank and stream runs its instructions in order; an instruction starts when its stream is free
and all that it waits for is done, and then progresses at the rate that shared resources leave to it
(:class:`Fluid`). A collective starts when the last member of its group is there, and ends for all when the last
of their flows does; so does a message between its two ranks.

What happens at one instant is independent of the order in which it is handled, with one exception: activities that
arrive at a first-in-first-out resource at the same instant are served by rank, then by stream in the order of
:class:`~zosim.program.instructions.Stream`.

Steps that have become periodic are not simulated again (:mod:`zosim.simulators.periodic`): the time that a simulation takes grows
with the number of unlike steps.

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
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import simpy
from simpy.core import EmptySchedule
from simpy.events import EventPriority

from costmodel.rates.profile import Bound
from topology.errors import ProgramError
from zosim.hardware.machine import Activity, Machine
from zosim.program import Program
from zosim.program.instructions import Stream
from zosim.program.step_graph import RunNode
from zosim.simulators.assembly import run_simulator
from zosim.simulators.periodic import PeriodDetector, shortened_steps
from zosim.simulators.run_graph import RunGraph
from zosim.simulators.sharing import SAME_INSTANT, fill
from zosim.simulators.world import World
from zosim.timeline import Repeat, Span, Timeline

# Solutions kept; a network in which no set of flows comes twice must not fill the memory with them.
_MAX_REMEMBERED = 1 << 14
# After everything else that happens at the same instant.
_LAST = EventPriority(2)


def simulate(
    program: Program, machine: Machine, *, num_steps: int | None = None, bound: Bound = "central"
) -> Timeline:
    """Return the predicted timeline of a program on one rank.

    - `program`: If it is of several ranks, the others are taken to be in step with this one, and to share nothing with it.
    - `num_steps`: Steps of the run; unless given, as many as it takes until steps repeat, at most
      `zosim.simulators.assembly.MAX_UNLIKE_STEPS`.
    - `bound`: Which end of the profile's intervals.

    Raises ProgramError if a dependency names no instruction, instructions wait for each other in a circle, or `num_steps` is
    negative.
    Raises ProfileError if the profile has no rate for an instruction's formats.
    """
    return simulate_world(World.of_one(program, machine, bound), num_steps=num_steps)


def simulate_world(world: World, *, num_steps: int | None = None) -> Timeline:
    """Return the predicted timeline of all ranks of a world, one simpy process per rank and stream.

    Raises ProgramError as for :func:`simulate`.
    """
    return run_simulator(world, lambda steps: _SimpyRun(world, steps), num_steps)


class _SimpyRun:
    """One simulation of a fixed number of steps."""

    def __init__(self, world: World, num_steps: int) -> None:
        self.world = world
        self.num_steps = num_steps
        self.env = simpy.Environment()
        self.fluid = Fluid(self.env, world.capacities, world.fifo)
        self.graph = RunGraph(world, num_steps)
        self.ranks = [_SimulatedRank(self, rank) for rank in range(world.size)]
        # Steps that dependencies reach back: so many must be alike before all later ones are.
        self.depth = self.graph.max_distance
        self.detector = PeriodDetector(self.depth)
        self.cycle: Repeat | None = None
        self.shortened: int | None = None
        self._rendezvous: dict[tuple[object, ...], tuple[simpy.Event, list[int]]] = {}

    def run_to_end(self) -> None:
        """Run to the end, or until the rest is known; refuse instructions that wait for each other in a circle."""
        for rank in self.ranks:
            rank.start()
        with suppress(EmptySchedule):
            while self.shortened is None:
                self.env.step()
        if self.shortened is None:
            _refuse_deadlock(self)

    def await_peers(self, rank: int, node: RunNode, phase: str) -> simpy.Event:
        """Return the event of all who meet at `node` having come as far as `rank` now has."""
        participants, key = self.graph.participants(rank, node)
        event, there = self._rendezvous.setdefault((key, node.position, phase), (self.env.event(), []))
        there.append(rank)
        # The last to come lets all go on.
        if len(there) == len(participants):
            event.succeed()
        return event

    def missing(self, rank: int, node: RunNode) -> list[int]:
        """Return those who have not come to the start of a collective or message, where `rank` has."""
        participants, key = self.graph.participants(rank, node)
        there = self._rendezvous.get((key, node.position, "start"), (None, []))[1]
        return [other for other in participants if other not in there] if rank in there else []

    def step_completed(self, step: int) -> None:
        """Look whether the run has become periodic, whenever all ranks have completed another step."""
        # A step counts as completed when the slowest rank has completed it.
        if self.cycle is not None or any(rank.num_completed <= step for rank in self.ranks):
            return
        entered = max(rank.max_step for rank in self.ranks)
        times = np.concatenate([rank.step_times(step) for rank in self.ranks])
        others_until_s = max(rank.others_until_s for rank in self.ranks)
        self.cycle = self.detector.completed(times, entered - step, others_until_s)
        if self.cycle is not None:
            self.shortened = shortened_steps(self.cycle, self.num_steps, entered, self.depth)

    def spans(self) -> dict[int, list[Span]]:
        return {rank.index: rank.spans for rank in self.ranks}


class _SimulatedRank:
    """The streams of one rank."""

    def __init__(self, run: _SimpyRun, index: int) -> None:
        self.run = run
        self.index = index
        self.program = run.world.program(index)
        self.graph = run.graph.graphs[index]
        self.spans: list[Span] = []
        self.processes: list[simpy.Process] = []
        self.waiting: dict[Stream, RunNode] = {}
        self.done: set[RunNode] = set()
        self.num_completed = 0
        self.max_step = 0
        self.others_until_s = 0.0
        self._num_others_running = 0
        self._activities = run.world.activities(index)
        self._waiters: dict[RunNode, list[simpy.Event]] = {}
        self._times: dict[int, dict[str, tuple[float, float]]] = {}

    def start(self) -> None:
        used = {instruction.stream for _, instruction in self.program.instructions()}
        for number, stream in enumerate(Stream):
            if stream in used:
                self.processes.append(self.run.env.process(self._stream(stream, (self.index, number))))

    def _stream(self, stream: Stream, key: tuple[int, int]) -> Generator[simpy.Event, None, None]:
        env, graph, step_s = self.run.env, self.graph, self.run.world.template(self.index).step_s
        for node in self._nodes(stream):
            # The host reads the scalars of one step before it issues the next.
            if graph.opens_step(node):
                yield env.timeout(step_s)
            # Noted for the words of a deadlock.
            self.waiting[stream] = node
            for rank, needed in self.awaited(node):
                if needed not in rank.done:
                    yield rank.finished(needed)
            has_peers = graph.rendezvous(node) is not None
            if has_peers:
                yield self.run.await_peers(self.index, node, "start")
            del self.waiting[stream]
            start_s = env.now
            activity = self._activities[graph.phase(node.position), node.instruction]
            # Prologue and flush take resources, too: while they run, no step tells what later ones do.
            self._count_other(node, +1)
            yield self.run.fluid.run(activity, key)
            if has_peers:
                yield self.run.await_peers(self.index, node, "end")
            self._count_other(node, -1)
            self._finish(node, start_s, activity)

    def awaited(self, node: RunNode) -> Iterator[tuple[_SimulatedRank, RunNode]]:
        """Yield what an instruction waits for besides its stream, on this rank and on its peers."""
        return ((self.run.ranks[rank], there) for rank, there in self.run.graph.awaited(self.index, node))

    def finished(self, node: RunNode) -> simpy.Event:
        """Return an event that happens when an instruction of this rank has finished."""
        event = self.run.env.event()
        self._waiters.setdefault(node, []).append(event)
        return event

    def _nodes(self, stream: Stream) -> Iterator[RunNode]:
        for position in range(self.graph.num_steps + 2):
            for item in self.graph.instructions(position):
                if item.stream == stream:
                    if self.graph.phase(position) == "step":
                        self.max_step = max(self.max_step, position - 1)
                    yield RunNode(position, item.id)

    def _finish(self, node: RunNode, start_s: float, activity: Activity) -> None:
        instruction, end_s = self.graph.instruction(node), self.run.env.now
        phase, step = self.graph.phase(node.position), self.graph.step(node.position)
        self.spans.append(
            Span(
                self.run.world.numbers[self.index],
                phase,
                step,
                instruction.id,
                instruction.stream,
                instruction.label,
                instruction.segment,
                start_s,
                end_s,
                activity.limiter,
            )
        )
        self.done.add(node)
        for event in self._waiters.pop(node, ()):
            event.succeed()
        if phase == "step":
            self._count(step, instruction.id, start_s, end_s)

    def _count_other(self, node: RunNode, change: int) -> None:
        if self.graph.phase(node.position) != "step":
            self._num_others_running += change
            self.others_until_s = math.inf if self._num_others_running else self.run.env.now

    def _count(self, step: int, instruction: str, start_s: float, end_s: float) -> None:
        times = self._times.setdefault(step, {})
        times[instruction] = start_s, end_s
        if len(times) == len(self.program.step):
            # Streams run in order, so steps are completed in order.
            self.num_completed = step + 1
            self.run.step_completed(step)

    def step_times(self, step: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Return starts and ends of a completed step's instructions, in the program's order."""
        # Asked for once, when all ranks have completed the step.
        times = self._times.pop(step, {})
        return np.array([time for item in self.program.step for time in times[item.id]], dtype=np.float64)


def _refuse_deadlock(run: _SimpyRun) -> None:
    """Raise for the first rank of which a stream can never go on."""
    for rank in run.ranks:
        if rank.waiting:
            circle = " waits for ".join(_circle(run, rank))
            message = f"deadlock in program {rank.program.name}: {circle}"
            raise ProgramError(message, hint="remove one of these dependencies, or reorder a stream")


def _circle(run: _SimpyRun, rank: _SimulatedRank) -> list[str]:
    """Return the instructions that wait for each other, the first again at the end."""
    # Somebody undone waits for somebody undone: following them leads into the circle.
    node = rank, min(rank.waiting.values())
    path: list[tuple[_SimulatedRank, RunNode]] = []
    while node not in path:
        path.append(node)
        undone = _undone(run, *node)
        if not undone:
            return [*(run.graph.name(one.index, here) for one, here in path), "a partner that never comes"]
        node = undone[0]
    return [run.graph.name(one.index, here) for one, here in (*path[path.index(node) :], node)]


def _undone(run: _SimpyRun, rank: _SimulatedRank, node: RunNode) -> list[tuple[_SimulatedRank, RunNode]]:
    """Return what an instruction that has not started still waits for."""
    needed = [(rank, before) for before in rank.graph.predecessors(node)] + list(rank.awaited(node))
    undone = [(other, before) for other, before in needed if before not in other.done]
    # Nobody it depends on holds it up, so it is a partner that has not come.
    if undone or rank.graph.rendezvous(node) is None:
        return undone
    partners = [run.ranks[number] for number in run.missing(rank.index, node)]
    wanted = rank.graph.rendezvous(node)
    assert wanted is not None
    return [
        (other, here)
        for other in partners
        for item in other.graph.instructions(node.position)
        if (met := other.graph.rendezvous(here := RunNode(node.position, item.id)))
        and met.shared == wanted.shared
        and (not wanted.offset or met.sends != wanted.sends)
    ]


@dataclass(slots=True, eq=False)
class _Running:
    """An activity under way."""

    activity: Activity
    key: tuple[int, int]  # rank and stream: those that arrive at one instant count as arrived in this order
    done: simpy.Event
    since_s: float  # when its speed last changed
    left_s: float  # seconds that were left then at full speed
    speed: float = 0.0  # part of its full speed
    end_s: float = math.inf


class Fluid:
    """Activities that progress at rates, which change only when the set of running activities does.

    All starts and ends of one instant are taken in before rates are computed anew, by :func:`zosim.simulators.sharing.fill`. An
    activity whose rate stays the same keeps the end that it was given, so that one that never shares anything takes exactly its
    own seconds. :mod:`zosim.simulators.flows` does the same on arrays.

    - `capacities`: Of the resources that can limit anybody.
    - `fifo`: Resources that serve one activity at a time, in order of arrival: an activity runs once no earlier one, running
      or waiting, uses any of its own. The earliest is never held up, so nothing deadlocks.
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
            # Behind everything else of this instant, so that rates are computed once for all of it.
            self._call(self._settle, 0.0, _LAST)

    def _call(self, callback: Callable[[simpy.Event], None], delay_s: float, priority: EventPriority) -> None:
        event = self._env.event()
        event.callbacks.append(callback)
        # An event that has happened already: simpy has no public way to schedule one with a priority.
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
            # Who keeps its speed keeps its end: computed anew, rounding would move it.
            if speed != item.speed:
                item.left_s = max(item.left_s - (now_s - item.since_s) * item.speed, 0.0)
                item.since_s, item.speed = now_s, speed
                item.end_s = now_s + item.left_s / speed
        # Only the first end is scheduled: the others may move when it is taken in.
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
        # Ends that differ by rounding alone are one instant.
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
            # Activities without a resource that can limit them run at full speed.
            limited, dense = np.unique(rows, return_inverse=True)
            bounds, weights = np.array([(activities[row].bound, activities[row].weight) for row in limited]).T
            speeds[limited] = fill(bounds, weights, dense, columns, uses, self._capacity) / bounds
        return [float(speed) for speed in speeds]
