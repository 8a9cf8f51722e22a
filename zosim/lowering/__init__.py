"""From a plan to a program: the one place that knows what the axes of a plan mean.

``layout`` says where everything lies, ``buffers`` what memory that takes, ``step`` lists the instructions, ``hazards`` connects them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from zosim.instructions import Access
from zosim.lowering.buffers import buffers_of
from zosim.lowering.hazards import connect, without_implied
from zosim.lowering.layout import Layout
from zosim.lowering.step import StepWriter
from zosim.plans import Plan
from zosim.program import Program
from zosim.program_set import ProgramSet

__all__ = ["lower", "lower_all"]


def lower(plan: Plan, rank: int = 0) -> Program:
    """Return the program that `rank` of `plan` runs.

    Notes
    -----
    The outcome is not validated here; both interpreters do that with every program, lowered or edited.
    """
    layout = Layout(plan, rank)
    step, flush = StepWriter(plan, rank), StepWriter(plan, rank)
    step.write_step()
    flush.write_flush()
    buffers = buffers_of(layout)
    instructions, flushing = connect(
        step.instructions,
        flush.instructions,
        overlap=plan.residency.overlap,
        shared=frozenset(buffer.name for buffer in buffers if buffer.shared),
        group=layout.share,
    )
    program = Program(
        name=f"{plan.model.name}/{plan.method}",
        buffers=buffers,
        initial=tuple(_initial(layout)),
        final=tuple(_at_rest(layout, delayed_by=0)),
        step=instructions,
        flush=flushing,
        groups=_group_sizes(plan, rank),
    )
    return without_implied(program)


def lower_all(plan: Plan) -> ProgramSet:
    """Return what all ranks of `plan` run.

    Ranks of one stage with as many sequences at the same points, in groups as large, share a program.
    """
    roles: dict[tuple[object, ...], int] = {}
    programs: list[Program] = []
    of_rank = []
    groups = plan.groups
    sizes = {name: {rank: len(part) for part in parts for rank in part} for name, parts in groups.items()}
    for rank in range(plan.placement.world_size):
        stage, points, num_rows = (
            plan.mesh.coordinates(rank).stage,
            plan.points_of(rank),
            len(plan.rows_of(rank)),
        )
        role = (stage, points, num_rows, *(of[rank] for of in sizes.values()))
        if role not in roles:
            roles[role] = len(programs)
            programs.append(lower(plan, rank))
        of_rank.append(roles[role])
    return ProgramSet(tuple(programs), tuple(of_rank), groups)


def _group_sizes(plan: Plan, rank: int) -> dict[str, int]:
    return {name: len(_members(parts, rank)) for name, parts in plan.groups.items()}


def _members(parts: Iterable[tuple[int, ...]], rank: int) -> tuple[int, ...]:
    return next(part for part in parts if rank in part)


def _at_rest(layout: Layout, *, delayed_by: int) -> Iterator[Access]:
    """Yield what the home of every group holds between steps: before the first all of it, later perhaps a share."""
    for group in layout.groups:
        home = layout.home(group)
        dtype = layout.plan.transfer_dtype if layout.is_offloaded(group) else None
        step = -delayed_by if layout.is_delayed(group) else 0
        held = layout.weights(group, home, step, dtype=dtype)
        yield from layout.shared_out(held) if layout.is_offloaded(group) and not delayed_by else held


def _initial(layout: Layout) -> Iterator[Access]:
    """Yield what is there before the first step; what belongs to the step before it is there and void."""
    yield from _at_rest(layout, delayed_by=1)
    plan = layout.plan
    delayed = [group for group in layout.groups if layout.is_delayed(group) and group.num_trainable]
    for query in range(plan.estimator.num_queries if delayed else 0):
        yield layout.gradient(query, -1)
        if plan.directions.kept:
            yield from (layout.direction(group, query, -1, offset_bytes=0) for group in delayed)
        elif plan.directions.rng == "mezo":
            yield from (layout.rng_before(group, query, -1) for group in delayed)
