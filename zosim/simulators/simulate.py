"""A clock for programs: which instruction starts when, as discrete events.

One simpy process per rank and stream runs its instructions in graph; an instruction starts when its stream is free
and all that it waits for is done, and then progresses at the rate that shared resources leave to it
(:mod:`zosim.simulators.fluid`). A collective starts when the last member of its group is there, and ends for all when the last
of their flows does; so does a message between its two ranks.

What happens at one instant is independent of the graph in which it is handled, with one exception: activities that
arrive at a first-in-first-out resource at the same instant are served by rank, then by stream in the graph of
:class:`~zosim.program.instructions.Stream`.

Steps that have become periodic are not simulated again (:mod:`zosim.simulators.steady`): the time that a simulation takes grows
with the number of unlike steps.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from contextlib import suppress

import numpy as np
import simpy
from simpy.core import EmptySchedule

from costmodel.rates.profile import Bound
from topology.errors import ProgramError
from zosim.hardware.machine import Activity, Machine
from zosim.program import Program
from zosim.program.instructions import Stream
from zosim.program.step_graph import Place, StepGraph
from zosim.simulators.assembly import played
from zosim.simulators.fluid import Fluid
from zosim.simulators.steady import SteadyDetector, shortened_steps
from zosim.simulators.world import World
from zosim.timeline import Repeat, Span, Timeline


def simulate(
    program: Program, machine: Machine, *, num_steps: int | None = None, bound: Bound = "central"
) -> Timeline:
    """Return the predicted timeline of a program on one rank.

    Parameters
    ----------
    program : Program
        If it is of several ranks, the others are taken to be in step with this one, and to share nothing with it.
    machine : Machine
    num_steps : int, optional
        Steps of the run; unless given, as many as it takes until steps repeat, at most `zosim.simulators.assembly.MAX_UNLIKE_STEPS`.
    bound : {"central", "low", "high"}
        Which end of the profile's intervals.

    Raises
    ------
    ProgramError
        If a dependency names no instruction, instructions wait for each other in a circle, or `num_steps` is
        negative.
    ProfileError
        If the profile has no rate for an instruction's formats.
    """
    return simulate_world(World.of_one(program, machine, bound), num_steps=num_steps)


def simulate_world(world: World, *, num_steps: int | None = None) -> Timeline:
    """Return the predicted timeline of all ranks of a world, one simpy process per rank and stream.

    Raises
    ------
    ProgramError
        As for :func:`simulate`.
    """
    return played(world, lambda steps: _SimpyRun(world, steps), num_steps)


class _SimpyRun:
    """One simulation of a fixed number of steps."""

    def __init__(self, world: World, num_steps: int) -> None:
        self.world = world
        self.num_steps = num_steps
        self.env = simpy.Environment()
        self.fluid = Fluid(self.env, world.capacities, world.fifo)
        self.ranks = [_SimulatedRank(self, rank) for rank in range(world.size)]
        self.depth = max(rank.graph.max_distance for rank in self.ranks)
        self.detector = SteadyDetector(self.depth)
        self.cycle: Repeat | None = None
        self.shortened: int | None = None
        self._meetings: dict[tuple[object, ...], tuple[simpy.Event, list[int]]] = {}

    def go(self) -> None:
        """Run to the end, or until the rest is known.

        Raises
        ------
        ProgramError
            If instructions wait for each other in a circle.
        """
        for rank in self.ranks:
            rank.start()
        with suppress(EmptySchedule):
            while self.shortened is None:
                self.env.step()
        if self.shortened is None:
            _refuse_deadlock(self)

    def meet(self, rank: int, place: Place, phase: str) -> simpy.Event:
        """Return the event of all who meet at `place` having come as far as `rank` now has."""
        party, key = self._meeting(rank, place, phase)
        event, there = self._meetings.setdefault(key, (self.env.event(), []))
        there.append(rank)
        if len(there) == len(party):
            event.succeed()
        return event

    def missing(self, rank: int, place: Place) -> list[int]:
        """Return those who have not come to the start of a collective or message, where `rank` has."""
        party, key = self._meeting(rank, place, "start")
        there = self._meetings.get(key, (None, []))[1]
        return [other for other in party if other not in there] if rank in there else []

    def _meeting(self, rank: int, place: Place, phase: str) -> tuple[tuple[int, ...], tuple[object, ...]]:
        meeting = self.ranks[rank].graph.meeting(place)
        assert meeting is not None
        party, key = self.world.party(rank, meeting)
        return party, (key, place.position, phase)

    def step_completed(self, step: int) -> None:
        """Look whether the run has become periodic, whenever all ranks have completed another step."""
        if self.cycle is not None or any(rank.num_completed <= step for rank in self.ranks):
            return
        entered = max(rank.max_step for rank in self.ranks)
        times = np.concatenate([rank.step_times(step) for rank in self.ranks])
        others_until_s = max(rank.others_until_s for rank in self.ranks)
        self.cycle = self.detector.completed(times, entered - step, others_until_s)
        if self.cycle is not None:
            self.shortened = shortened_steps(self.cycle, self.num_steps, entered, self.depth)

    def spans(self) -> dict[int, list[Span]]:
        """Return the spans of all ranks."""
        return {rank.index: rank.spans for rank in self.ranks}


class _SimulatedRank:
    """The streams of one rank."""

    def __init__(self, run: _SimpyRun, index: int) -> None:
        self.run = run
        self.index = index
        self.program = run.world.program(index)
        self.graph = StepGraph(self.program, run.num_steps)
        self.spans: list[Span] = []
        self.processes: list[simpy.Process] = []
        self.waiting: dict[Stream, Place] = {}
        self.done: set[Place] = set()
        self.num_completed = 0
        self.max_step = 0
        self.others_until_s = 0.0
        self._num_others_running = 0
        self._activities = run.world.activities(index)
        self._waiters: dict[Place, list[simpy.Event]] = {}
        self._times: dict[int, dict[str, tuple[float, float]]] = {}

    def start(self) -> None:
        """Create the stream processes."""
        used = {instruction.stream for _, instruction in self.program.instructions()}
        for number, stream in enumerate(Stream):
            if stream in used:
                self.processes.append(self.run.env.process(self._stream(stream, (self.index, number))))

    def _stream(self, stream: Stream, key: tuple[int, int]) -> Generator[simpy.Event, None, None]:
        env, graph, step_s = self.run.env, self.graph, self.run.world.template(self.index).step_s
        for place in self._places(stream):
            if graph.opens_step(place):
                yield env.timeout(step_s)
            self.waiting[stream] = place
            for rank, needed in self.awaited(place):
                if needed not in rank.done:
                    yield rank.finished(needed)
            meets = graph.meeting(place) is not None
            if meets:
                yield self.run.meet(self.index, place, "start")
            del self.waiting[stream]
            start_s = env.now
            activity = self._activities[graph.part(place.position), place.instruction]
            self._count_other(place, +1)
            yield self.run.fluid.run(activity, key)
            if meets:
                yield self.run.meet(self.index, place, "end")
            self._count_other(place, -1)
            self._finish(place, start_s, activity)

    def awaited(self, place: Place) -> Iterator[tuple[_SimulatedRank, Place]]:
        """Yield what an instruction waits for besides its stream, on this rank and on its peers."""
        for group, needed in self.graph.awaited(place):
            peers = self.run.world.groups[group].peers(self.index) if group else (self.index,)
            for rank in (self.run.ranks[peer] for peer in peers):
                if not group or rank.graph.has(needed):
                    yield rank, needed

    def finished(self, place: Place) -> simpy.Event:
        """Return an event that happens when an instruction of this rank has finished."""
        event = self.run.env.event()
        self._waiters.setdefault(place, []).append(event)
        return event

    def _places(self, stream: Stream) -> Iterator[Place]:
        for position in range(self.graph.num_steps + 2):
            for item in self.graph.instructions(position):
                if item.stream == stream:
                    if self.graph.part(position) == "step":
                        self.max_step = max(self.max_step, position - 1)
                    yield Place(position, item.id)

    def _finish(self, place: Place, start_s: float, activity: Activity) -> None:
        instruction, end_s = self.graph.instruction(place), self.run.env.now
        part, step = self.graph.part(place.position), self.graph.step(place.position)
        self.spans.append(
            Span(
                self.run.world.numbers[self.index],
                part,
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
        self.done.add(place)
        for event in self._waiters.pop(place, ()):
            event.succeed()
        if part == "step":
            self._count(step, instruction.id, start_s, end_s)

    def _count_other(self, place: Place, change: int) -> None:
        if self.graph.part(place.position) != "step":
            self._num_others_running += change
            self.others_until_s = math.inf if self._num_others_running else self.run.env.now

    def _count(self, step: int, instruction: str, start_s: float, end_s: float) -> None:
        times = self._times.setdefault(step, {})
        times[instruction] = start_s, end_s
        if len(times) == len(self.program.step):
            # Streams run in graph, so steps are completed in graph.
            self.num_completed = step + 1
            self.run.step_completed(step)

    def step_times(self, step: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Return starts and ends of a completed step's instructions, in the program's graph."""
        times = self._times.pop(step, {})
        return np.array([time for item in self.program.step for time in times[item.id]], dtype=np.float64)


def _refuse_deadlock(run: _SimpyRun) -> None:
    """Raise for the first rank of which a stream can never go on."""
    for rank in run.ranks:
        if rank.waiting:
            circle = " waits for ".join(_circle(run, rank))
            message = f"program {rank.program.name} can never go on: {circle}"
            raise ProgramError(message, hint="remove one of these dependencies, or reorder a stream")


def _circle(run: _SimpyRun, rank: _SimulatedRank) -> list[str]:
    """Return the instructions that wait for each other, the first again at the end."""
    node = rank, min(rank.waiting.values())
    path: list[tuple[_SimulatedRank, Place]] = []
    while node not in path:
        path.append(node)
        undone = _undone(run, *node)
        if not undone:
            return [*map(_name, path), "a partner that never comes"]
        node = undone[0]
    return [_name(item) for item in (*path[path.index(node) :], node)]


def _undone(run: _SimpyRun, rank: _SimulatedRank, place: Place) -> list[tuple[_SimulatedRank, Place]]:
    """Return what an instruction that has not started still waits for."""
    needed = [(rank, before) for before in rank.graph.predecessors(place)] + list(rank.awaited(place))
    undone = [(other, before) for other, before in needed if before not in other.done]
    if undone or rank.graph.meeting(place) is None:
        return undone
    partners = [run.ranks[number] for number in run.missing(rank.index, place)]
    wanted = rank.graph.meeting(place)
    assert wanted is not None
    return [
        (other, here)
        for other in partners
        for item in other.graph.instructions(place.position)
        if (met := other.graph.meeting(here := Place(place.position, item.id)))
        and met.shared == wanted.shared
        and (not wanted.offset or met.sends != wanted.sends)
    ]


def _name(node: tuple[_SimulatedRank, Place]) -> str:
    rank, place = node
    name = f"{rank.graph.part(place.position)}/{place.instruction}"
    return name if rank.run.world.size == 1 else f"{name} of rank {rank.run.world.numbers[rank.index]}"
