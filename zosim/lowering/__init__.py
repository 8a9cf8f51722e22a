"""From a plan to a program: the one place that knows what the axes of a plan mean.

``layout`` says which buffers there are, ``step`` lists the instructions, ``hazards`` connects them.
"""

from __future__ import annotations

from collections.abc import Iterator

from zosim.lowering.hazards import connect, without_implied
from zosim.lowering.layout import Layout
from zosim.lowering.step import StepWriter
from zosim.plan import Plan
from zosim.program import Access, Program

__all__ = ["lower"]


def lower(plan: Plan) -> Program:
    """Return the program that every rank of `plan` runs.

    Notes
    -----
    The outcome is not validated here; both interpreters do that with every program, lowered or edited.
    """
    step, flush = StepWriter(plan), StepWriter(plan)
    step.write_step()
    flush.write_flush()
    instructions, flushing = connect(step.instructions, flush.instructions, overlap=plan.residency.overlap)
    layout = Layout(plan)
    program = Program(
        name=f"{plan.model.name}/{plan.method}",
        buffers=layout.buffers(),
        initial=tuple(_initial(layout)),
        final=tuple(_at_rest(layout, delayed_by=0)),
        step=instructions,
        flush=flushing,
    )
    return without_implied(program)


def _at_rest(layout: Layout, *, delayed_by: int) -> Iterator[Access]:
    """Yield what the home of every group holds between steps."""
    for group in layout.model.groups:
        home = layout.home(group)
        dtype = layout.plan.precision.transfer if layout.is_offloaded(group) else None
        step = -delayed_by if layout.is_delayed(group) else 0
        yield from layout.weights(group, home, step, dtype=dtype)


def _initial(layout: Layout) -> Iterator[Access]:
    """Yield what is there before the first step; what belongs to the step before it is there and void."""
    yield from _at_rest(layout, delayed_by=1)
    estimator = layout.plan.estimator
    delayed = [group for group in layout.model.groups if layout.is_delayed(group) and group.num_trainable]
    for query in range(estimator.num_queries if delayed else 0):
        yield layout.gradient(query, -1)
        if estimator.rng == "mezo":
            yield from (layout.rng_before(group, query, -1) for group in delayed)
