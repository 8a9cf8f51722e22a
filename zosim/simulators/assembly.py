"""A run played by one of the engines, and the timeline of what was seen, with like steps left out."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from topology.errors import ProgramError
from zosim.simulators.memory_curve import memory_samples
from zosim.simulators.world import World
from zosim.timeline import Repeat, Span, Timeline

# Steps after which a run that never becomes periodic is cut, where the caller names no number of steps.
MAX_UNLIKE_STEPS = 32


class Playing(Protocol):
    """One simulation of a fixed number of steps.

    Attributes
    ----------
    cycle : Repeat or None
        How steps repeat from now on, once that is known.
    shortened : int or None
        Steps of a run that shows all there is to see, where some may be left out; the run then stops.
    """

    cycle: Repeat | None
    shortened: int | None

    def go(self) -> None:
        """Run to the end, or until the rest is known."""

    def spans(self) -> Mapping[int, Sequence[Span]]:
        """Return the spans of the ranks that are listed, by position in the world."""


def played(world: World, start: Callable[[int], Playing], num_steps: int | None) -> Timeline:
    """Return the timeline of a run, by the engine that `start` makes for a number of steps.

    Raises
    ------
    ProgramError
        If the number of steps is negative.
    """
    if num_steps is not None and num_steps < 0:
        message = f"cannot simulate {num_steps} steps"
        raise ProgramError(message, hint="num_steps counts from 0")
    wanted = MAX_UNLIKE_STEPS if num_steps is None else num_steps
    with without_garbage_collection():
        run = start(wanted)
        run.go()
        if run.shortened is None:
            return _assembled(world, run, wanted, run.cycle)
        # The same run with fewer like steps, whose last steps and flush only come later.
        short = start(run.shortened)
        short.go()
        omitted = 0 if num_steps is None else num_steps - run.shortened
        return _assembled(world, short, run.shortened, run.cycle, omitted)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Keep the collector from walking the many live events again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _assembled(
    world: World, run: Playing, num_steps: int, cycle: Repeat | None, num_omitted: int = 0
) -> Timeline:
    """Return the timeline of a run of so many steps, with further steps of a cycle put after its last step."""
    repeat = cycle and replace(cycle, num_rounds=num_omitted // cycle.num_steps)
    spans_by_rank = run.spans()
    # A flush instruction that waits for no step has run before steps became steady, and stays there.
    steady_s = max(
        (
            span.end_s
            for spans in spans_by_rank.values()
            for span in spans
            if cycle is not None and (span.part, span.step) == ("step", cycle.first_omitted_step - 1)
        ),
        default=0.0,
    )
    listed, memory = [], []
    for rank, spans in spans_by_rank.items():
        own = [_later(span, repeat, steady_s) for span in spans]
        listed += own
        memory += memory_samples(world.program(rank), own, num_steps + num_omitted, world.numbers[rank])
    return Timeline(
        program=world.program(0).name,
        source="simulated",
        num_steps=num_steps + num_omitted,
        spans=tuple(listed),
        memory=tuple(memory),
        first_steady_step=repeat.first_step if repeat else 1,
        repeat=repeat,
    )


def _later(span: Span, repeat: Repeat | None, steady_s: float) -> Span:
    """Return a span where it belongs when the omitted steps are put in before it."""
    if repeat is None or repeat.num_rounds == 0:
        return span
    if span.part == "flush":
        return span.shifted(repeat.omitted_s if span.start_s >= steady_s else 0.0, repeat.num_omitted_steps)
    comes_after = span.part == "step" and span.step >= repeat.first_omitted_step
    return span.shifted(repeat.omitted_s, repeat.num_omitted_steps) if comes_after else span
