"""Timelines from what a simulation saw of a run, with like steps left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zosim.engines.memory_curve import memory_samples
from zosim.engines.steady import Cycle
from zosim.engines.world import World
from zosim.spans import Repeat, Span
from zosim.timeline import Timeline


def assemble(
    world: World,
    spans_by_rank: Mapping[int, Sequence[Span]],
    num_steps: int,
    cycle: Cycle | None,
    num_omitted: int = 0,
) -> Timeline:
    """Return the timeline of a run, with further steps of a cycle put after its last step.

    Parameters
    ----------
    world : World
    spans_by_rank : mapping of int to sequence of Span
        By position in the world, under the numbers of the ranks.
    num_steps : int
        Steps simulated.
    cycle : Cycle or None
    num_omitted : int
        Steps to be put in.
    """
    repeat = None
    if cycle is not None:
        rounds = num_omitted // cycle.num_steps
        repeat = Repeat(cycle.first_step, cycle.num_steps, rounds, cycle.period_s)
    # A flush instruction that waits for no step has run before steps became steady, and stays there.
    ends = [span.end_s for spans in spans_by_rank.values() for span in spans if _is_of_step(span, cycle)]
    steady_s = max(ends, default=0.0)
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
