"""A clock for programs: which instruction starts when, as discrete events.

One simpy process per rank and stream runs its instructions in order; an instruction starts when its stream is free
and all that it waits for is done, and then progresses at the rate that shared resources leave to it
(:mod:`zosim.fluid`).

What happens at one instant is independent of the order in which it is handled, with one exception: activities that
arrive at a first-in-first-out resource at the same instant are served by rank, then by stream in the order of
:class:`~zosim.program.Stream`.

Steps that have become periodic are not simulated again (:mod:`zosim.steady`): the time that a simulation takes grows
with the number of unlike steps.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np
import simpy
from simpy.core import EmptySchedule
from simpy.events import EventPriority

from costmodel.profile import Bound
from topology.errors import ProgramError
from zosim.fluid import SAME_INSTANT, Fluid
from zosim.machine import Activity, Machine
from zosim.memory_curve import memory_samples
from zosim.places import Order, Place
from zosim.program import Part, Program, Stream
from zosim.steady import Cycle, SteadyDetector
from zosim.timeline import Repeat, Span, Timeline

# Steps after which a run that never becomes periodic is cut, where the caller names no number of steps.
MAX_UNLIKE_STEPS = 32


def simulate(
    program: Program, machine: Machine, *, num_steps: int | None = None, bound: Bound = "central"
) -> Timeline:
    """Return the predicted timeline of a program on one rank.

    Parameters
    ----------
    program : Program
    machine : Machine
    num_steps : int, optional
        Steps of the run; unless given, as many as it takes until steps repeat, at most `MAX_UNLIKE_STEPS`.
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
    return simulate_ranks([program], [machine], num_steps=num_steps, bound=bound)


def simulate_ranks(
    programs: Sequence[Program],
    machines: Sequence[Machine],
    *,
    num_steps: int | None = None,
    bound: Bound = "central",
) -> Timeline:
    """Return the predicted timeline of several ranks that share the resources of equal names.

    Parameters
    ----------
    programs, machines : sequence
        One per rank.
    num_steps, bound
        As for :func:`simulate`.

    Raises
    ------
    ProgramError, ProfileError
        As for :func:`simulate`.
    """
    if not programs or len(programs) != len(machines):
        message = f"{len(programs)} programs for {len(machines)} machines"
        raise ProgramError(message, hint="give one program and one machine per rank")
    if num_steps is not None and num_steps < 0:
        message = f"cannot simulate {num_steps} steps"
        raise ProgramError(message, hint="num_steps counts from 0")
    wanted = MAX_UNLIKE_STEPS if num_steps is None else num_steps
    with _without_garbage_collection():
        activities = [_activities(*pair, bound) for pair in zip(programs, machines, strict=True)]
        run = _Run(programs, machines, activities, wanted, bound)
        run.go()
        if run.shortened is None:
            return run.timeline(run.cycle)
        # The same run with fewer like steps, whose last steps and flush only come later.
        short = _Run(programs, machines, activities, run.shortened, bound)
        short.go()
        return short.timeline(run.cycle, 0 if num_steps is None else num_steps - run.shortened)


Activities = dict[tuple[Part, str], Activity]


def _activities(program: Program, machine: Machine, bound: Bound) -> Activities:
    return {(part, item.id): machine.activity(program, item, bound) for part, item in program.instructions()}


class _Run:
    """One simulation of a fixed number of steps."""

    def __init__(
        self,
        programs: Sequence[Program],
        machines: Sequence[Machine],
        activities: Sequence[Activities],
        num_steps: int,
        bound: Bound,
    ) -> None:
        self.num_steps = num_steps
        self.programs = programs
        self.machines = machines
        self.bound: Bound = bound
        self.env = simpy.Environment()
        self.fluid = _FluidProcess(self.env, Fluid(_merged_capacities(machines), _merged_fifo(machines)))
        self.ranks = [
            _Rank(self, number, *known) for number, known in enumerate(zip(programs, activities, strict=True))
        ]
        self.depth = max(rank.order.max_distance for rank in self.ranks)
        self.detector = SteadyDetector(self.depth)
        self.cycle: Cycle | None = None
        self.shortened: int | None = None

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
            _refuse_deadlock(self.ranks)

    def step_completed(self, step: int) -> None:
        """Look whether the run has become periodic, whenever all ranks have completed another step."""
        if self.cycle is not None or any(rank.num_completed <= step for rank in self.ranks):
            return
        entered = max(rank.max_step for rank in self.ranks)
        times = np.concatenate([rank.step_times(step) for rank in self.ranks])
        if times.min() < self._others_until_s():
            # Prologue and flush share resources, too: what runs beside them says nothing about later steps.
            self.detector.restart()
            return
        self.cycle = self.detector.completed(times, entered - step)
        if self.cycle is not None:
            # Streams must still have a step to go before the flush, and the flush must not reach back to here.
            kept = entered + 1 + self.depth
            cycles = (self.num_steps - kept) // self.cycle.num_steps
            if cycles > 0:
                self.shortened = self.num_steps - cycles * self.cycle.num_steps

    def _others_until_s(self) -> float:
        """Return when the last instruction that is of no step ended, infinity while one is running."""
        return max(rank.others_until_s for rank in self.ranks)

    def timeline(self, cycle: Cycle | None, num_omitted: int = 0) -> Timeline:
        """Return what happened, with `num_omitted` further steps of the cycle put after its last step."""
        repeat = None
        if cycle is not None:
            rounds = num_omitted // cycle.num_steps
            repeat = Repeat(cycle.first_step, cycle.num_steps, rounds, cycle.period_s)
        num_steps = self.num_steps + num_omitted
        # A flush instruction that waits for no step has run before steps became steady, and stays there.
        ends = [span.end_s for rank in self.ranks for span in rank.spans if _is_of_step(span, cycle)]
        steady_s = max(ends, default=0.0)
        spans, memory = [], []
        for rank in self.ranks:
            own = [_later(span, repeat, steady_s) for span in rank.spans]
            spans += own
            memory += memory_samples(rank.program, own, num_steps, rank.number)
        return Timeline(
            program=self.programs[0].name,
            source="simulated",
            num_steps=num_steps,
            spans=tuple(spans),
            memory=tuple(memory),
            first_steady_step=repeat.first_step if repeat else 1,
            repeat=repeat,
        )


# After everything else that happens at the same instant.
_LAST = EventPriority(2)


class _FluidProcess:
    """Activities under simpy's clock: settled after all else of an instant, taken when they end."""

    def __init__(self, env: simpy.Environment, fluid: Fluid) -> None:
        self.env = env
        self.fluid = fluid
        self._is_settled = True
        self._timer = 0

    def run(self, activity: Activity, key: tuple[int, int]) -> simpy.Event:
        """Start an activity; the event happens when it ends."""
        done = self.env.event()
        self.fluid.start(activity, key, self.env.now, done)
        self._touch()
        return done

    def _touch(self) -> None:
        if self._is_settled:
            self._is_settled = False
            self._call(self._settle, 0.0, _LAST)

    def _call(self, callback: Callable[[simpy.Event], None], delay_s: float, priority: EventPriority) -> None:
        event = self.env.event()
        event.callbacks.append(callback)
        event._ok, event._value = True, None
        self.env.schedule(event, priority, delay_s)

    def _settle(self, _: simpy.Event) -> None:
        self._is_settled = True
        now_s = self.env.now
        self.fluid.settle(now_s)
        end_s = self.fluid.next_end_s
        self._timer += 1
        number = self._timer
        if end_s < math.inf:
            self._call(lambda _: self._finish(number, end_s), max(end_s - now_s, 0.0), EventPriority(1))

    def _finish(self, number: int, end_s: float) -> None:
        """End what is due, unless rates have changed since this was scheduled."""
        if number != self._timer:
            return
        for done in self.fluid.take_ended(end_s + SAME_INSTANT * abs(end_s)):
            done.succeed()
        self._touch()


class _Rank:
    """The streams of one rank."""

    def __init__(self, run: _Run, number: int, program: Program, activities: Activities) -> None:
        self.run = run
        self.number = number
        self.program = program
        self.order = Order(program, run.num_steps)
        self.spans: list[Span] = []
        self.processes: list[simpy.Process] = []
        self.waiting: dict[Stream, Place] = {}
        self.num_completed = 0
        self.max_step = 0
        self.others_until_s = 0.0
        self._num_others_running = 0
        self._activities = activities
        self._done: set[Place] = set()
        self._waiters: dict[Place, list[simpy.Event]] = {}
        self._left: dict[int, int] = {}
        self._times: dict[int, dict[str, tuple[float, float]]] = {}

    def start(self) -> None:
        """Create the stream processes."""
        used = {instruction.stream for _, instruction in self.program.instructions()}
        for number, stream in enumerate(Stream):
            if stream in used:
                self.processes.append(self.run.env.process(self._stream(stream, (self.number, number))))

    def _stream(self, stream: Stream, key: tuple[int, int]) -> Generator[simpy.Event, None, None]:
        env, order = self.run.env, self.order
        for place in self._places(stream):
            if order.opens_step(place):
                yield env.timeout(self.run.machines[self.number].step_s(self.run.bound))
            self.waiting[stream] = place
            for needed in order.waits_for(place):
                if needed not in self._done:
                    event = env.event()
                    self._waiters.setdefault(needed, []).append(event)
                    yield event
            del self.waiting[stream]
            start_s = env.now
            activity = self._activities[order.part(place.position), place.instruction]
            self._count_other(place, +1)
            yield self.run.fluid.run(activity, key)
            self._count_other(place, -1)
            self._finish(place, start_s, activity.limiter)

    def _places(self, stream: Stream) -> Iterator[Place]:
        own = {
            part: [item.id for item in getattr(self.program, part) if item.stream == stream]
            for part in ("prologue", "step", "flush")
        }
        for name in own["prologue"]:
            yield Place(0, name)
        if own["step"]:
            for step in range(self.order.num_steps):
                self.max_step = max(self.max_step, step)
                for name in own["step"]:
                    yield Place(step + 1, name)
        for name in own["flush"]:
            yield Place(self.order.num_steps + 1, name)

    def _finish(self, place: Place, start_s: float, limiter: str) -> None:
        instruction, end_s = self.order.instruction(place), self.run.env.now
        part, step = self.order.part(place.position), self.order.step(place.position)
        self.spans.append(
            Span(
                self.number,
                part,
                step,
                instruction.id,
                instruction.stream,
                instruction.label,
                instruction.segment,
                start_s,
                end_s,
                limiter,
            )
        )
        self._done.add(place)
        for event in self._waiters.pop(place, ()):
            event.succeed()
        if part == "step":
            self._count(step, instruction.id, start_s, end_s)

    def _count_other(self, place: Place, change: int) -> None:
        if self.order.part(place.position) != "step":
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
        times = self._times.pop(step, {})
        return np.array([time for item in self.program.step for time in times[item.id]], dtype=np.float64)


def _is_of_step(span: Span, cycle: Cycle | None) -> bool:
    return cycle is not None and span.part == "step" and span.step == cycle.last_step


def _later(span: Span, repeat: Repeat | None, steady_s: float) -> Span:
    """Return a span where it belongs when the omitted steps are put in before it."""
    if repeat is None or repeat.num_rounds == 0:
        return span
    if span.part == "flush":
        return span.shifted(repeat.omitted_s if span.start_s >= steady_s else 0.0, repeat.num_omitted_steps)
    comes_after = span.part == "step" and span.step >= repeat.first_omitted_step
    return span.shifted(repeat.omitted_s, repeat.num_omitted_steps) if comes_after else span


def _merged_capacities(machines: Sequence[Machine]) -> dict[str, float]:
    capacities: dict[str, float] = {}
    for machine in machines:
        for name, capacity in machine.capacities.items():
            capacities[name] = max(capacity, capacities.get(name, 0.0))
    return capacities


def _merged_fifo(machines: Sequence[Machine]) -> frozenset[str]:
    return frozenset().union(*(machine.fifo for machine in machines))


def _refuse_deadlock(ranks: Sequence[_Rank]) -> None:
    """Raise for the first rank of which a stream can never go on."""
    for rank in ranks:
        if rank.waiting:
            message = f"program {rank.program.name} can never go on: {' waits for '.join(_circle(rank))}"
            raise ProgramError(message, hint="remove one of these dependencies, or reorder a stream")


def _circle(rank: _Rank) -> list[str]:
    """Return the instructions that wait for each other, the first again at the end."""
    place = min(rank.waiting.values())
    path: list[Place] = []
    while place not in path:
        path.append(place)
        undone = [item for item in rank.order.predecessors(place) if item not in rank._done]
        place = undone[0]
    circle = [*path[path.index(place) :], place]
    return [f"{rank.order.part(item.position)}/{item.instruction}" for item in circle]


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Keep the collector from walking the many live events again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
