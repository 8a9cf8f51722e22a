"""From a plan to a program: the one place that knows what the axes of a plan mean.

Each axis is a module: the buffers that it needs, and the instructions that it writes. ``schedule`` calls the others in the order
of a step, ``rank`` knows what they all ask, ``hazards`` derives who waits for whom from what instructions touch.

Two blocks whose weights live on the host, on a device with one staging buffer for them:

>>> from costmodel import read_model_spec
>>> from zosim.plans import Placement, Plan, Residency
>>> from zosim.simulators.shortening import shortened
>>> plan = Plan(
...     model=shortened(read_model_spec("opt-125m")),
...     placement=Placement(topology="cpu-laptop", devices=("cpu0",)),
...     residency=Residency(blocks="offloaded", num_staging_buffers=1),
...     batch=1,
...     seq=16,
... )
>>> for item in lower(plan).step:
...     if item.segment == "block.1":
...         writes = ", ".join(f"{access.what} in {access.buffer}" for access in item.writes[:1])
...         after = ", ".join(edge.instruction for edge in item.after)
...         print(f"{item.stream:8}{item.id:23} writes {writes}{after and ', after ' + after}")
h2d     block.1/upload          writes block.1 in staging.0, after block.0/offload
compute block.1/sample[q0]      writes z:block.1@q0*eps in perturbations
compute block.1/perturb[q0+]    writes block.1@q0+ in staging.0, after block.1/upload
compute block.1/forward[q0+]    writes block.1:out@q0+ in hidden.q0+
compute block.1/perturb[q0-]    writes block.1@q0- in staging.0
compute block.1/forward[q0-]    writes block.1:out@q0- in hidden.q0-
compute block.1/restore[q0]     writes block.1 in staging.0
d2h     block.1/offload         writes block.1 in host.block.1, after block.1/restore[q0]
h2d     block.1/upload:update   writes block.1 in staging.0, after block.0/offload:update
compute block.1/sample[q0]:update writes z:block.1@q0 in perturbations
compute block.1/update[q0]      writes block.1 in staging.0, after block.1/upload:update
d2h     block.1/offload:update  writes block.1 in host.block.1, after block.1/update[q0]
"""

from __future__ import annotations

from zosim.lowering.buckets import alignment_of
from zosim.lowering.hazards import connect, without_implied
from zosim.lowering.schedule import StepWriter
from zosim.plans import Plan
from zosim.program import Program
from zosim.program.program_set import ProgramSet

__all__ = ["lower", "lower_all", "unordered"]


def lower(plan: Plan, rank: int = 0) -> Program:
    """Return the program that `rank` of `plan` runs.

    Notes
    -----
    The outcome is not validated here; both interpreters do that with every program, lowered or edited.
    """
    # The flush has a writer of its own: it follows any step, and can count on nothing that one has drawn.
    step, flush = StepWriter(plan, rank), StepWriter(plan, rank)
    step.write_step()
    flush.write_flush()
    buffers = step.buffers()
    # No axis says who waits for whom: that follows from what instructions touch.
    instructions, flushing = connect(
        step.instructions,
        flush.instructions,
        overlap=plan.residency.overlap,
        shared=frozenset(buffer.name for buffer in buffers if buffer.shared),
        group=step.homes.share_group,
    )
    program = Program(
        name=f"{plan.model.name}/{plan.method}",
        buffers=buffers,
        initial=tuple(step.initial()),
        final=tuple(step.homes.at_rest(delayed_by=0)),
        step=instructions,
        flush=flushing,
        process_groups=_process_group_sizes(plan, rank),
        alignment_bytes=alignment_of(plan),
    )
    # Edges that others imply would cost the simulators time and a reader the thread.
    return without_implied(program)


def unordered(plan: Plan, rank: int = 0) -> Program:
    """Return the step of `rank` as it is listed: what instructions touch and cost, before it is known who waits for whom.

    Estimates need no more, and this takes a fraction of :func:`lower`'s time.
    """
    writer = StepWriter(plan, rank)
    writer.write_step()
    return Program(
        name=f"{plan.model.name}/unordered",
        buffers=writer.buffers(),
        initial=(),
        final=(),
        step=tuple(writer.instructions),
        process_groups=_process_group_sizes(plan, rank),
        alignment_bytes=alignment_of(plan),
    )


def lower_all(plan: Plan) -> ProgramSet:
    """Return what all ranks of `plan` run.

    Ranks of one stage with as many sequences at the same points, in groups as large, share a program.
    """
    roles: dict[tuple[object, ...], int] = {}
    programs: list[Program] = []
    of_rank = []
    groups = plan.process_groups
    sizes = {name: {rank: len(part) for part in parts for rank in part} for name, parts in groups.items()}
    for rank in range(plan.placement.world_size):
        stage, eval_points, num_rows = (
            plan.mesh.coordinates(rank).stage,
            plan.eval_points_of(rank),
            len(plan.rows_of(rank)),
        )
        # Ranks that agree in these do the same, whatever their position in the mesh.
        role = (stage, eval_points, num_rows, *(of[rank] for of in sizes.values()))
        if role not in roles:
            roles[role] = len(programs)
            programs.append(lower(plan, rank))
        of_rank.append(roles[role])
    return ProgramSet(tuple(programs), tuple(of_rank), groups)


def _process_group_sizes(plan: Plan, rank: int) -> dict[str, int]:
    return {name: len(part) for name, parts in plan.process_groups.items() for part in parts if rank in part}
