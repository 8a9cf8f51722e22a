"""A run of one of the simulators, and what it shows: its timeline, with like steps left out, and memory over time.

A staging buffer of 64 bytes for the whole run, and a hidden state of 8 that is there from the first instruction that touches it to the
last:

>>> from zosim.program.contents import Named
>>> from zosim.program.instructions import Access, Buffer, Stream
>>> from zosim.program.operations import Load
>>> staging = Buffer("staging.0", Space.DEVICE, 64, "staging buffers", "float32")
>>> hidden = Buffer("hidden", Space.DEVICE, 8, "activations", "float32", dynamic=True)
>>> left = (Access("hidden", Named("batch"), 0, 8),)
>>> step = (Instruction("work", Load(), Stream.COMPUTE, "load", "embed", writes=left),)
>>> span = Span(0, "step", 0, "work", Stream.COMPUTE, "load", "embed", start_s=1.0, end_s=3.0)
>>> for sample in memory_samples(Program("example", (staging, hidden), (), (), step), [span], num_steps=1):
...     print(sample.time_s, sample.role, sample.size_bytes)
1.0 activations 8
1.0 staging buffers 64
3.0 activations 0
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from topology.errors import ProgramError
from zosim.program import Program
from zosim.program.instructions import Instruction, Space
from zosim.program.operations import Allocate, Free
from zosim.program.step_graph import RunNode, StepGraph
from zosim.simulators.world import World
from zosim.timeline import MemorySample, Repeat, Span, Timeline

# Steps after which a run that never becomes periodic ends, where the caller names no number of steps.
MAX_UNLIKE_STEPS = 32

WORKSPACE = "workspace"

_Change = tuple[float, Space, str, int]


class SimulatorRun(Protocol):
    """One simulation of a fixed number of steps."""

    cycle: Repeat | None  # how steps repeat from now on, once that is known
    # Steps of a run that shows all there is to see, where some may be left out; the run then stops.
    shortened: int | None

    def run_to_end(self) -> None:
        """Run to the end, or until the rest is known."""

    def spans(self) -> Mapping[int, Sequence[Span]]:
        """Return the spans of the ranks that are listed, by position in the world."""


def run_simulator(world: World, start: Callable[[int], SimulatorRun], num_steps: int | None) -> Timeline:
    """Return the timeline of a run, by the simulator that `start` makes for a number of steps.

    Raises ProgramError if the number of steps is negative.
    """
    if num_steps is not None and num_steps < 0:
        message = f"cannot simulate {num_steps} steps"
        raise ProgramError(message, hint="num_steps must be 0 or more")
    wanted = MAX_UNLIKE_STEPS if num_steps is None else num_steps
    with without_garbage_collection():
        run = start(wanted)
        run.run_to_end()
        if run.shortened is None:
            return _assembled(world, run, wanted, run.cycle)
        # The same run with fewer like steps, whose last steps and flush only come later.
        short = start(run.shortened)
        short.run_to_end()
        omitted = 0 if num_steps is None else num_steps - run.shortened
        return _assembled(world, short, run.shortened, run.cycle, omitted)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Keep the collector from traversing the many live events again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _assembled(
    world: World, run: SimulatorRun, num_steps: int, cycle: Repeat | None, num_omitted: int = 0
) -> Timeline:
    """Return the timeline of a run of so many steps, with further steps of a cycle put after its last step."""
    repeat = cycle and replace(cycle, num_rounds=num_omitted // cycle.num_steps)
    spans_by_rank = run.spans()
    # A flush instruction that waits for no step has run before steps became periodic, and stays there.
    periodic_s = max(
        (
            span.end_s
            for spans in spans_by_rank.values()
            for span in spans
            if cycle is not None and (span.phase, span.step) == ("step", cycle.first_omitted_step - 1)
        ),
        default=0.0,
    )
    listed, memory = [], []
    for rank, spans in spans_by_rank.items():
        own = [_later(span, repeat, periodic_s) for span in spans]
        listed += own
        memory += memory_samples(world.program(rank), own, num_steps + num_omitted, world.numbers[rank])
    return Timeline(
        program=world.program(0).name,
        source="simulated",
        num_steps=num_steps + num_omitted,
        spans=tuple(listed),
        memory=tuple(memory),
        first_periodic_step=repeat.first_step if repeat else 1,
        repeat=repeat,
    )


def _later(span: Span, repeat: Repeat | None, periodic_s: float) -> Span:
    """Return a span where it belongs when the omitted steps are put in before it."""
    if repeat is None or repeat.num_rounds == 0:
        return span
    if span.phase == "flush":
        return span.shifted(repeat.omitted_s if span.start_s >= periodic_s else 0.0, repeat.num_omitted_steps)
    comes_after = span.phase == "step" and span.step >= repeat.first_omitted_step
    return span.shifted(repeat.omitted_s, repeat.num_omitted_steps) if comes_after else span


def memory_samples(
    program: Program, spans: Iterable[Span], num_steps: int, rank: int = 0
) -> list[MemorySample]:
    """Return how much each role takes of each space, from the spans of one rank.

    Parameters
    ----------
    program : Program
    spans : iterable of Span
        With their real times, of the rank alone.
    num_steps : int
        Steps of the run.

    Returns
    -------
    list of MemorySample
        In order of time.

    Notes
    -----
    A static buffer is there for the whole run. A dynamic one is taken when the first instruction of a step that
    touches it starts, and given back when the last one ends. One that the program allocates itself is taken when
    ``Allocate`` starts and given back when ``Free`` ends; it is there from the beginning if the run begins with
    contents in it. An instruction's workspace, on the device, lasts as long as the instruction.
    """
    # A span names its instruction; what that touches stands in the program.
    graph = StepGraph(program, num_steps)
    listed = [
        (span, graph.instruction(RunNode(graph.position(span.phase, span.step), span.instruction)))
        for span in spans
    ]
    begin_s = min((span.start_s for span, _ in listed), default=0.0)
    changes = list(_static(program, begin_s))
    changes += _dynamic(program, listed)
    changes += _allocated(program, listed)
    for span, instruction in listed:
        if instruction.work.workspace_bytes:
            size = instruction.work.workspace_bytes
            changes.append((span.start_s, Space.DEVICE, WORKSPACE, size))
            changes.append((span.end_s, Space.DEVICE, WORKSPACE, -size))
    return list(_accumulated(changes, rank))


def _static(program: Program, begin_s: float) -> Iterator[_Change]:
    allocated = {item.op.buffer for _, item in program.instructions() if isinstance(item.op, Allocate)}
    # What the program allocates itself is there from the start only if the run begins with contents in it.
    filled = {access.buffer for access in program.initial}
    for buffer in program.buffers:
        if not buffer.dynamic and (buffer.name not in allocated or buffer.name in filled):
            yield begin_s, buffer.space, buffer.role, buffer.size_bytes


def _dynamic(program: Program, listed: list[tuple[Span, Instruction]]) -> Iterator[_Change]:
    uses: dict[tuple[str, str, int], tuple[float, float]] = {}
    for span, instruction in listed:
        for name in {access.buffer for access in (*instruction.reads, *instruction.writes)}:
            if program.buffer(name).dynamic:
                # A part of its own each time: what a dynamic buffer holds never outlives a step.
                key = name, span.phase, span.step
                first_s, last_s = uses.get(key, (span.start_s, span.end_s))
                uses[key] = min(first_s, span.start_s), max(last_s, span.end_s)
    for (name, _, _), (first_s, last_s) in uses.items():
        buffer = program.buffer(name)
        yield first_s, buffer.space, buffer.role, buffer.size_bytes
        yield last_s, buffer.space, buffer.role, -buffer.size_bytes


def _allocated(program: Program, listed: list[tuple[Span, Instruction]]) -> Iterator[_Change]:
    for span, instruction in listed:
        if isinstance(instruction.op, Allocate | Free):
            buffer, takes = program.buffer(instruction.op.buffer), isinstance(instruction.op, Allocate)
            size = buffer.size_bytes if takes else -buffer.size_bytes
            yield span.start_s if takes else span.end_s, buffer.space, buffer.role, size


def _accumulated(changes: list[_Change], rank: int) -> Iterator[MemorySample]:
    # What one role takes and gives back at one instant never shows as a peak.
    at_once: dict[tuple[float, Space, str], int] = defaultdict(int)
    for time_s, space, role, size in changes:
        at_once[time_s, space, role] += size
    totals: dict[tuple[Space, str], int] = defaultdict(int)
    for (time_s, space, role), size in sorted(at_once.items(), key=lambda item: item[0]):
        if size:
            totals[space, role] += size
            yield MemorySample(rank, space, role, time_s, totals[space, role])
