"""What a plan of several stages is like in numbers: how long each stage idles, and what crosses each boundary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from topology.units import format_bytes
from zosim.analysis.counts import step_counts
from zosim.planning.predict import PlannedRun
from zosim.program.instructions import Stream
from zosim.program.operations import Send


@dataclass(frozen=True)
class BoundaryTraffic:
    """What crosses one boundary in a step, over all pipelines."""

    split_point: str
    num_messages: int
    size_bytes: int  # as expected
    most_bytes: int  # never exceeded


@dataclass(frozen=True)
class Pipelining:
    """A step of several stages."""

    # For each stage, the part of the step in which it does nothing, on the first pipeline: neither computes nor draws and writes ahead
    # what it computes with.
    bubbles: tuple[float, ...]
    boundaries: tuple[BoundaryTraffic, ...]
    num_losses: int  # evaluation points whose losses all ranks get, once per step


def pipelining(planned: PlannedRun) -> Pipelining:
    """Return the figures of a plan with several stages."""
    plan = planned.plan
    traffic = []
    for number, split_point in enumerate(plan.split_points):
        sends = [
            item
            for pipeline in plan.mesh.pipelines
            for item in planned.programs.program_of(pipeline[number]).step
            if isinstance(item.op, Send)
        ]
        traffic.append(
            BoundaryTraffic(
                split_point,
                len(sends),
                sum(item.work.link_bytes for item in sends),
                sum(access.size_bytes for item in sends for access in item.reads),
            )
        )
    first = plan.mesh.pipelines[0]
    bubbles = tuple(1 - _working(planned, rank) for rank in first)
    return Pipelining(bubbles, tuple(traffic), len(plan.eval_points))


def _working(planned: PlannedRun, rank: int) -> float:
    """Return the part of a step for which a rank works; what its peers take of shared resources is no work of its own."""
    program, machine = planned.programs.program_of(rank), planned.machines[rank]
    # Two streams overlap, so their seconds cannot be added up: the timeline says when either works.
    if any(item.stream == Stream.SAMPLE for item in program.step):
        return planned.timeline_of(rank).busy((Stream.COMPUTE, Stream.SAMPLE), rank)
    compute_s = sum(
        machine.activity(program, item).seconds for item in program.step if item.stream == Stream.COMPUTE
    )
    return compute_s / planned.step_time_s


def about_stages(planned: PlannedRun) -> Iterator[str]:
    """Yield how long stages idle and what crosses, in words."""
    plan, figures, counts = planned.plan, pipelining(planned), step_counts(planned.programs)
    idle = ", ".join(f"{max(share, 0.0):.0%}" for share in figures.bubbles)
    yield f"pipeline bubble: the compute of the stages is idle for {idle} of a step"
    for boundary in figures.boundaries:
        each = format_bytes(boundary.size_bytes // boundary.num_messages)
        yield (
            f"sent across {boundary.split_point} per step: {boundary.num_messages} messages of {each}, "
            f"{format_bytes(boundary.size_bytes)} in all (at most {format_bytes(boundary.most_bytes)})"
        )
    pipelines = plan.num_batch_shards
    # SparQ counts for one pipeline.
    num_boundaries = pipelines * (plan.num_stages - 1)
    formula = f"{plan.estimator.points_formula}(M - 1)"
    each = f" for each of {pipelines} shards" if pipelines > 1 else ""
    yield (
        f"activations sent forward per step: {counts.num_activations}; SparQ's formula {formula} gives "
        f"{plan.estimator.num_eval_points * num_boundaries}{each}"
    )
    yield (
        f"scalars sent back per step: {counts.num_scalars}, for {figures.num_losses} losses in one exchange; SparQ's formula "
        f"P(M - 1) gives {plan.estimator.num_perturbations * num_boundaries}"
    )
