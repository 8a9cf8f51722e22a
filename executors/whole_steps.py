"""Whole steps of small models, measured and predicted: how far a fitted profile can be trusted.

Their shapes are kept apart from everything that predictions are judged on: no benchmark has models of these widths.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import torch
from scipy.stats import t as student_t

from costmodel.profile import CONSTANT_UNITS, Constant, Profile
from costmodel.work import DType
from executors.buffers import TORCH_DTYPES
from executors.model import Batch
from executors.probing import random_opt, token_batch
from executors.session import Session
from executors.spec import spec_of_model
from topology.graph import Topology
from zosim.explain import describe
from zosim.lowering import lower
from zosim.machine import Machine
from zosim.plan import Estimator, Placement, Plan, Precision, Residency, Runtime
from zosim.program import Program, Stream
from zosim.simulate import simulate
from zosim.timeline import Timeline

COVERAGE = 0.9
_LEAST_SCALE, _MOST_SCALE = 0.02, 1.0
"""With the second, all constants lie at one end together; what is farther off was disturbed rather than mispredicted."""

_WARM_STEPS = 3


@dataclass(frozen=True)
class StepShape:
    """A model with random weights, a batch and a placement.

    Attributes
    ----------
    hidden, vocab, batch, seq : int
    dtype : str
    axes : mapping
        Fields of the plan's axes.
    """

    hidden: int
    vocab: int
    batch: int
    seq: int
    dtype: DType
    axes: Mapping[str, Mapping[str, Any]]


_DELAYED = {"runtime": {"update": "delayed"}}
_OFFLOADED = {"runtime": {"update": "delayed"}, "residency": {"blocks": "offloaded"}}
_SWEEP = {"runtime": {"traversal": "sweep"}}
_COUNTER = {"runtime": {"update": "immediate"}, "estimator": {"rng": "counter"}}
_SIGNS = {"runtime": {"update": "delayed"}, "estimator": {"direction": "rademacher"}}

STEP_SHAPES = (
    StepShape(96, 700, 3, 48, "float32", _DELAYED),
    StepShape(96, 3000, 2, 120, "bfloat16", _OFFLOADED),
    StepShape(160, 2000, 4, 72, "bfloat16", _SWEEP),
    StepShape(160, 9000, 2, 40, "float32", _COUNTER),
    StepShape(240, 1500, 5, 96, "float32", _OFFLOADED),
    StepShape(240, 7000, 1, 144, "bfloat16", _SIGNS),
    StepShape(288, 400, 2, 136, "float32", _SWEEP),
    StepShape(288, 6000, 3, 56, "bfloat16", _DELAYED),
    StepShape(360, 4000, 1, 64, "float32", _SIGNS),
    StepShape(360, 900, 4, 80, "bfloat16", _COUNTER),
    StepShape(448, 2500, 2, 88, "float32", _OFFLOADED),
    StepShape(544, 1200, 1, 104, "float32", _DELAYED),
)


@dataclass(frozen=True)
class WholeStep:
    """One step as measured.

    Attributes
    ----------
    name : str
    program : Program
    seconds : float
        Median time from the end of one step to the end of the next.
    gap_s : float
        Median time between the last computation of a step and the first of the next.
    """

    name: str
    program: Program
    seconds: float
    gap_s: float


def measure_steps(
    topology: Topology,
    node: str,
    *,
    device: str,
    budget_s: float,
    shapes: Sequence[StepShape] = STEP_SHAPES,
    on_share: Callable[[float], None] | None = None,
) -> list[WholeStep]:
    """Return what whole steps take, with torch's present number of threads.

    Parameters
    ----------
    topology : Topology
    node : str
        That `device` is.
    budget_s : float
        Time for timed steps, of which each shape gets its part and two at least.
    on_share : callable, optional
        Told of the share of the shapes that are done.
    """
    found = []
    for number, shape in enumerate(shapes, 1):
        found.append(_measured(shape, topology.name, node, device, budget_s / len(shapes)))
        if on_share is not None:
            on_share(number / len(shapes))
    return found


def _measured(shape: StepShape, topology: str, node: str, device: str, budget_s: float) -> WholeStep:
    model = random_opt(shape.hidden, shape.vocab, shape.seq).to(TORCH_DTYPES[shape.dtype])
    plan = Plan(
        model=spec_of_model(model, name=f"opt-{shape.hidden}"),
        placement=Placement(topology=topology, devices=(node,)),
        batch=shape.batch,
        seq=shape.seq,
        estimator=Estimator(**shape.axes.get("estimator", {})),
        residency=Residency(**shape.axes.get("residency", {})),
        precision=Precision(storage=shape.dtype, compute=shape.dtype, transfer=shape.dtype),  # type: ignore[arg-type]
        runtime=Runtime(**shape.axes.get("runtime", {})),
    )
    batch = token_batch(shape.batch, shape.seq, shape.vocab)
    with Session(
        plan, model, learning_rate=1e-7, device=device, num_draw_threads=torch.get_num_threads()
    ) as session:
        ends = _step_ends(session, batch, budget_s)
        timeline = session.timeline()
    name = f"step of {shape.hidden} wide, {shape.batch}x{shape.seq} {shape.dtype}, {describe(plan)}"
    return WholeStep(name, lower(plan), median(_lengths(ends)), _gap_s(timeline))


def _step_ends(session: Session, batch: Batch, budget_s: float) -> list[float]:
    for _ in range(_WARM_STEPS):
        session.step(batch)
    ends = [time.perf_counter()]
    while len(ends) < 3 or ends[-1] - ends[0] < budget_s:
        session.step(batch)
        ends.append(time.perf_counter())
    return ends


def _lengths(ends: Sequence[float]) -> list[float]:
    return [end - begin for begin, end in pairwise(ends)]


def _gap_s(timeline: Timeline) -> float:
    """Return the median time between two steps' computations."""
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    for span in timeline.spans:
        if span.stream == Stream.COMPUTE and span.part == "step" and span.step >= timeline.first_steady_step:
            begins[span.step] = min(begins.get(span.step, math.inf), span.start_s)
            ends[span.step] = max(ends.get(span.step, 0.0), span.end_s)
    return median(begins[step] - ends[step - 1] for step in begins if step - 1 in ends)


def with_step_overhead(profile: Profile, steps: Sequence[WholeStep]) -> Profile:
    """Return `profile` with the time between steps as it was measured."""
    gaps = [max(step.gap_s, 1e-7) for step in steps]
    low, value, high = (float(np.quantile(gaps, part)) for part in (0.05, 0.5, 0.95))
    return profile.with_constants(
        Constant(
            name="step_s",
            value=value,
            low=low,
            high=high,
            unit=CONSTANT_UNITS["step_s"],
            source=f"median of {len(gaps)} measured steps",
        ),
        origin="calibrated",
    )


def with_interval_scale(
    profile: Profile, topology: Topology, node: str, steps: Sequence[WholeStep]
) -> Profile:
    """Return `profile` with the part of its intervals that holds whole steps as often as :data:`COVERAGE` says.

    Notes
    -----
    Each step's log error is divided by the half interval, in logs, that it lies in. If these are normal around 0, a
    new one lies within ``t · sqrt(mean square)`` with probability :data:`COVERAGE`, where ``t`` is Student's
    quantile with as many degrees of freedom as there are steps: few steps cannot promise narrow intervals.
    """
    whole = Profile(**{**dict(profile), "interval_scale": 1.0})
    machine = Machine.from_topology(topology, node, whole)
    ratios = [_ratio(step, machine) for step in steps]
    quantile = float(student_t.ppf((1 + COVERAGE) / 2, len(ratios)))
    scale = quantile * math.sqrt(sum(ratio**2 for ratio in ratios) / len(ratios))
    return Profile(**{**dict(profile), "interval_scale": min(_MOST_SCALE, max(_LEAST_SCALE, scale))})


def _ratio(step: WholeStep, machine: Machine) -> float:
    """Return a step's log error over the half interval on its side."""
    central_s = simulate(step.program, machine).step_time_s
    error = math.log(step.seconds / central_s)
    end_s = simulate(step.program, machine, bound="high" if error > 0 else "low").step_time_s
    return error / math.log(end_s / central_s) if error else 0.0
