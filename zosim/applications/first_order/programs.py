"""A first-order step as programs: what split training by backpropagation does on the ranks of a plan.

The baseline that a zeroth-order plan is held against, per step and on the same devices, split points and batch. The model stays
on the devices. A stage keeps what its backwards need, sends activations on and their gradients back, and ranks of one
stage sum their gradients. It is lowered, validated and simulated as every program is; nothing executes it.

*Microbatches.* ``gpipe`` forwards all of them, then goes back; ``1f1b`` keeps as many as there are stages behind.
*AQ-SGD* [1]_ sends a few bits of what changed in a sample's activation since the sample was last seen, and keeps the last
message of every sample at both ends of a boundary, on the host.

References
----------
.. [1] J. Wang et al., "Fine-tuning Language Models over Slow Networks using Activation Compression with Guarantees",
   2022, algorithm 1.
.. [2] Y. Huang et al., "GPipe", 2019, section 2.3: the bubble's part of a step is ``(p - 1)/(m + p - 1)``.
"""

from __future__ import annotations

from topology.errors import PlanError
from zosim.applications.first_order.settings import PRESETS, FirstOrder
from zosim.applications.first_order.step import ENDS, REPLICAS, FirstOrderWriter
from zosim.lowering.buckets import alignment_of
from zosim.lowering.hazards import connect, without_implied
from zosim.plans import ForwardPass, Mesh, Plan, Residency, Weights
from zosim.program import Program
from zosim.program.program_set import ProgramSet

__all__ = ["PRESETS", "FirstOrder", "baseline_plan", "lower_first_order"]


def baseline_plan(plan: Plan) -> Plan:
    """Return the plan whose devices, split points, batch and formats a baseline of `plan` has.

    Ranks that forward other points of a zeroth-order step forward other sequences of a first-order one.

    Raises
    ------
    PlanError
        If there are fewer sequences than that takes, or part of the model is frozen.
    """
    if plan.model.num_trainable != plan.model.num_parameters:
        message = (
            f"{plan.model.num_parameters - plan.model.num_trainable} parameters of {plan.model.name} are "
            "frozen, but a first-order step tunes all"
        )
        raise PlanError(message, hint="plan with --tune all")
    return Plan(
        model=plan.model,
        placement=plan.placement,
        batch=plan.batch,
        seq=plan.seq,
        mesh=Mesh(data=len(plan.mesh.pipelines), stage=plan.num_stages),
        split=plan.split.model_copy(update={"codec": "none", "residual_codec": "none", "densities": ()}),
        residency=Residency(),
        weights=Weights(dtype=plan.storage_dtype),
        forward=ForwardPass(compute_dtype=plan.compute_dtype, attention=plan.forward.attention),
    )


def lower_first_order(plan: Plan, settings: FirstOrder) -> ProgramSet:
    """Return what all ranks of `plan` run in a first-order step.

    Raises
    ------
    PlanError
        If the plan cannot be its baseline's, or a rank has fewer sequences than microbatches.
    """
    plan = baseline_plan(plan)
    fewest = min(len(plan.rows_of(rank)) for rank in range(plan.placement.world_size))
    if settings.num_microbatches > fewest:
        message = (
            f"--microbatches {settings.num_microbatches} is more than the {fewest} sequences that one "
            "rank has"
        )
        raise PlanError(message, hint=f"use --microbatches {fewest} or less, or a larger batch")
    roles: dict[tuple[int, int], int] = {}
    programs: list[Program] = []
    of_rank = []
    for rank in range(plan.placement.world_size):
        role = (plan.mesh.coordinates(rank).stage, len(plan.rows_of(rank)))
        if role not in roles:
            roles[role] = len(programs)
            programs.append(_lower(plan, settings, rank))
        of_rank.append(roles[role])
    return ProgramSet(tuple(programs), tuple(of_rank), process_groups_of(plan))


def process_groups_of(plan: Plan) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the plan's groups, and those in which gradients are summed."""
    pipelines = plan.mesh.pipelines
    ends = [
        subgroup
        for pipeline in pipelines
        for subgroup in ((pipeline[0], pipeline[-1]), *((r,) for r in pipeline[1:-1]))
    ]
    if plan.num_stages == 1:
        ends = list(pipelines)
    return {**plan.process_groups, REPLICAS: tuple(zip(*pipelines, strict=True)), ENDS: tuple(sorted(ends))}


def _lower(plan: Plan, settings: FirstOrder, rank: int) -> Program:
    writer = FirstOrderWriter(plan, settings, rank)
    writer.write_step()
    step, _ = connect(writer.instructions, (), overlap=True)
    at_rest = tuple(writer.layout.at_rest())
    process_groups = process_groups_of(plan)
    return without_implied(
        Program(
            name=f"{plan.model.name}/{settings.optimizer}",
            buffers=writer.layout.buffers(writer.instructions),
            initial=at_rest,
            final=at_rest,
            step=step,
            process_groups={
                name: len(next(subgroup for subgroup in subgroups if rank in subgroup))
                for name, subgroups in process_groups.items()
            },
            alignment_bytes=alignment_of(plan),
        )
    )
