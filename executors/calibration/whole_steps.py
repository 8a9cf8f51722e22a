"""Whole steps of small models, measured and predicted: how far a fitted profile can be trusted.

Their shapes are kept apart from everything that predictions are judged on: no benchmark has models of these widths.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import numpy as np
import psutil
import torch
from scipy.stats import t as student_t
from scipy.stats import theilslopes

from costmodel.formats import DType
from costmodel.rates.profile import CONSTANT_UNITS, Constant, Profile
from executors.calibration.background_load import SLOWER, OtherLoad
from executors.calibration.probing import token_batch
from executors.formats import TORCH_DTYPES
from executors.models.model import Batch
from executors.models.random_models import random_model
from executors.models.spec import spec_of_model
from executors.reference_speed import UNDISTURBED, Reference
from executors.runs.session import Session
from topology.graph import Topology
from zosim.hardware.machine import Machine
from zosim.lowering import lower
from zosim.plans import Placement, Plan
from zosim.program import Program
from zosim.program.instructions import Stream
from zosim.simulators.simulate import simulate
from zosim.timeline import Span, Timeline

COVERAGE = 0.9
DISTURBING_CORES = 0.15
"""Cores in use by others: less is what any machine does besides, and what the clocks of processors can tell."""

_MOST_TRIES = 3
_LEAST_SCALE, _MOST_SCALE = 0.02, 50.0
_FAR = 3.0
_WAITS = 10.0
"""A pause that lasts so many times the median one is a wait for another stream."""

_WARM_STEPS = 3
_LEAST_STEPS, _MOST_STEPS = 4, 60
_LEAST_KEPT = 3
_LEAST_SHAPES = 6
_PATIENCE = 3.0
"""Times its part of the budget that a shape may take until it has seen steps at full speed."""


@dataclass(frozen=True)
class StepShape:
    """A model with random weights, a batch and a placement."""

    family: str
    hidden: int
    head_dim: int
    vocab: int
    batch: int
    seq: int
    dtype: DType
    axes: Mapping[str, Mapping[str, Any]]  # fields of the plan's axes
    num_blocks: int = 2


_IMMEDIATE = {"schedule": {"update": "immediate"}}
_DELAYED = {"schedule": {"update": "delayed"}}
_OFFLOADED = {"schedule": {"update": "delayed"}, "residency": {"blocks": "offloaded"}}
_FULL_PASS = {"schedule": {"traversal": "full"}}
_COUNTER = {"perturbations": {"rng": "counter"}, "schedule": {"update": "immediate"}}
_SIGNS = {"perturbations": {"distribution": "rademacher"}, "schedule": {"update": "delayed"}}

STEP_SHAPES = (
    StepShape("opt", 96, 32, 700, 3, 48, "float32", _DELAYED),
    StepShape("opt", 96, 32, 3000, 6, 232, "bfloat16", _OFFLOADED),
    StepShape("gpt2", 96, 48, 20000, 4, 56, "float32", _DELAYED),
    StepShape("gpt2", 160, 32, 2000, 4, 200, "bfloat16", _FULL_PASS),
    StepShape("llama", 160, 80, 9000, 2, 40, "float32", _COUNTER),
    StepShape("llama", 224, 56, 1500, 5, 96, "float32", _OFFLOADED),
    StepShape("opt", 224, 56, 7000, 1, 144, "bfloat16", _SIGNS),
    StepShape("gpt2", 320, 64, 400, 2, 136, "float32", _FULL_PASS),
    StepShape("opt", 320, 64, 6000, 3, 56, "bfloat16", _DELAYED),
    StepShape("llama", 320, 64, 30000, 1, 64, "float32", _SIGNS),
    StepShape("gpt2", 448, 64, 900, 4, 80, "bfloat16", _COUNTER),
    StepShape("opt", 448, 64, 2500, 2, 88, "float32", _OFFLOADED),
    StepShape("llama", 448, 64, 16000, 2, 128, "bfloat16", _DELAYED),
    StepShape("opt", 576, 64, 1200, 1, 104, "float32", _DELAYED),
    StepShape("gpt2", 576, 64, 5000, 1, 216, "bfloat16", _OFFLOADED),
    StepShape("llama", 704, 64, 600, 1, 72, "float32", _IMMEDIATE),
    StepShape("llama", 96, 48, 900, 2, 64, "bfloat16", _IMMEDIATE, num_blocks=12),
    StepShape("opt", 160, 32, 1100, 2, 80, "float32", _OFFLOADED, num_blocks=8),
)
"""Widths that no benchmark has, and as even as those of real models: kernels are slower on odd ones."""


def _quantized(
    perturbations: Mapping[str, Any], low_bits: Mapping[str, Any]
) -> Mapping[str, Mapping[str, Any]]:
    return _DELAYED | {"perturbations": {"rng": "counter", **perturbations}, "low_bits": low_bits}


_INT8 = {"weights": "int8"}
_BYTES = {"weights": "int8", "activations": "int8-token"}
_GROUPS = {"weights": "int4", "scales": "group", "group_elements": 32}
_4_BITS = {"perturbation_bits": 4}
_RANDOM_SIGNS = {"distribution": "rademacher"}

QUANTIZED_STEP_SHAPES = (
    StepShape("opt", 96, 32, 1500, 3, 72, "bfloat16", _quantized({}, _BYTES), num_blocks=4),
    StepShape("gpt2", 576, 64, 900, 2, 104, "float32", _quantized(_RANDOM_SIGNS, _BYTES), num_blocks=1),
    StepShape(
        "llama", 160, 32, 600, 4, 88, "bfloat16", _quantized(_RANDOM_SIGNS, _BYTES | {"sparsity": 0.97})
    ),
    StepShape(
        "opt", 448, 64, 1200, 3, 56, "float32", _quantized({}, _BYTES | {"sparsity": 0.9}), num_blocks=1
    ),
    StepShape("gpt2", 224, 56, 3000, 2, 120, "bfloat16", _quantized({}, _GROUPS), num_blocks=1),
    StepShape(
        "llama", 96, 48, 700, 1, 136, "float32", _quantized(_RANDOM_SIGNS, {"weights": "int4"}), num_blocks=4
    ),
    StepShape(
        "opt", 576, 64, 500, 2, 64, "bfloat16", _quantized(_RANDOM_SIGNS, _INT8 | _4_BITS), num_blocks=1
    ),
    StepShape("llama", 160, 32, 8000, 1, 112, "float32", _quantized({}, _BYTES | {"perturbation_bits": 2})),
    StepShape(
        "gpt2", 320, 64, 1300, 2, 80, "float32", _quantized({}, {"weights": "float8_e4m3"}), num_blocks=1
    ),
    StepShape("opt", 160, 32, 600, 2, 96, "bfloat16", _quantized({}, _GROUPS | {"weights": "float4_e2m1"})),
    StepShape(
        "opt",
        448,
        64,
        800,
        2,
        72,
        "float32",
        _quantized(_RANDOM_SIGNS, _INT8 | {"zero_point": True}),
        num_blocks=1,
    ),
    StepShape(
        "gpt2",
        96,
        48,
        700,
        3,
        64,
        "bfloat16",
        _quantized(_RANDOM_SIGNS, _INT8),
        num_blocks=4,
    ),
    StepShape("llama", 448, 64, 400, 2, 56, "float32", _quantized({"rng": "mezo"}, _INT8), num_blocks=1),
)
"""The same with quantized linear layers, a few of their formats."""


@dataclass(frozen=True)
class WholeStep:
    """One step as measured."""

    name: str
    program: Program
    seconds: float  # median time from the end of one step to the end of the next, of steps at full speed
    gap_s: float  # median time between the last computation of a step and the first of the next
    # Mean time between one computation of a step and the next, where it does not wait for anything else.
    pause_s: float = 0.0
    timeline: Timeline | None = None  # spans of the steps at full speed
    slowing: float = 1.0  # median of all steps' seconds over that of those at full speed
    references_s: tuple[float, ...] = ()  # what the reference took beside the steps
    # Cores that other processes kept busy meanwhile, beyond those that the kernels' threads leave free.
    foreign_cores: float = 0.0

    @property
    def is_disturbed(self) -> bool:
        """Whether others took so much of the machine that the step may take far less."""
        return self.foreign_cores > DISTURBING_CORES


def measure_steps(
    topology: Topology,
    node: str,
    *,
    device: str,
    budget_s: float,
    fast_s: float | None = None,
    shapes: Sequence[StepShape] = STEP_SHAPES,
    on_share: Callable[[float], None] | None = None,
) -> list[WholeStep]:
    """Return what whole steps take, with torch's present number of threads.

    - `node`: that `device` is.
    - `budget_s`: time for timed steps, of which each shape gets its part. Of the later shapes those are left out that a multiple
      of it has no time for.
    - `fast_s`: what the reference of :mod:`executors.reference_speed` takes at full speed, to tell which steps were taken at it.
    - `on_share`: called with the share of the shapes that are done.

    A shape whose steps others disturbed is measured again, at most twice while there is time, and the least disturbed counts.
    """
    steps: list[WholeStep] = []
    until = time.perf_counter() + _PATIENCE * budget_s
    for number, shape in enumerate(shapes, 1):
        if len(steps) >= _LEAST_SHAPES and time.perf_counter() > until:
            break
        tries = [_measured(shape, topology.name, node, device, budget_s / len(shapes), fast_s)]
        while tries[-1].is_disturbed and len(tries) < _MOST_TRIES and time.perf_counter() < until:
            tries.append(_measured(shape, topology.name, node, device, budget_s / len(shapes), fast_s))
        steps.append(min(tries, key=lambda step: step.foreign_cores))
        if on_share is not None:
            on_share(number / len(shapes))
    return steps


def _measured(
    shape: StepShape, topology: str, node: str, device: str, budget_s: float, fast_s: float | None
) -> WholeStep:
    model = random_model(
        shape.family,
        hidden=shape.hidden,
        num_blocks=shape.num_blocks,
        num_heads=shape.hidden // shape.head_dim,
        vocab=shape.vocab,
        max_positions=shape.seq,
    ).to(TORCH_DTYPES[shape.dtype])
    plan = Plan.model_validate(
        {
            "model": spec_of_model(model, name=f"{shape.family}-{shape.hidden}"),
            "placement": Placement(topology=topology, devices=(node,)),
            "batch": shape.batch,
            "seq": shape.seq,
            "weights": {"dtype": shape.dtype},
            **shape.axes,
        }
    )
    batch = token_batch(shape.batch, shape.seq, shape.vocab)
    with Session(
        plan, model, learning_rate=1e-7, device=device, num_sampling_threads=torch.get_num_threads()
    ) as session:
        others = OtherLoad()
        taken = _steps(session, batch, budget_s, fast_s)
        # An accelerator's host launches from one thread, whatever torch could use.
        num_busy = torch.get_num_threads() if device == "cpu" else 1
        spare = max(0, (psutil.cpu_count() or 1) - num_busy)
        foreign_cores = max(0.0, others.cores() - spare)
        timeline = session.timeline()
    name = f"step of {shape.family} {shape.hidden} wide, {shape.batch}x{shape.seq} {shape.dtype}, {plan.describe()}"
    kept = _at_full_speed(taken, fast_s)
    seconds = median(step.seconds for step in kept)
    gap_s, pause_s = _gaps(timeline, kept)
    numbers = [step.number for step in kept]
    spans = tuple(span for span in timeline.spans if span.step in numbers and span.phase == "step")
    timeline = replace(timeline, spans=spans, first_periodic_step=min(numbers))
    slowing = median(step.seconds for step in taken) / seconds
    references_s = () if fast_s is None else tuple(step.reference_s for step in taken)
    return WholeStep(
        name, lower(plan), seconds, gap_s, pause_s, timeline, max(1.0, slowing), references_s, foreign_cores
    )


@dataclass(frozen=True)
class _TimedStep:
    """A step that was taken, the reference beside it, and for how long the reference kept it waiting."""

    number: int
    seconds: float
    reference_s: float
    paused_s: float


def _steps(session: Session, batch: Batch, budget_s: float, fast_s: float | None) -> list[_TimedStep]:
    reference = None if fast_s is None else Reference()
    for _ in range(_WARM_STEPS):
        session.step(batch)
    taken: list[_TimedStep] = []
    began = ended = time.perf_counter()
    before_s = reference.seconds() if reference else 0.0
    while _goes_on(taken, ended - began, budget_s, fast_s):
        start = time.perf_counter()
        paused_s = start - ended if reference else 0.0
        start = start if reference else ended
        session.step(batch)
        ended = time.perf_counter()
        after_s = reference.seconds() if reference else 0.0
        taken.append(_TimedStep(session.num_steps - 1, ended - start, max(before_s, after_s), paused_s))
        before_s = after_s
    return taken


def _goes_on(taken: Sequence[_TimedStep], spent_s: float, budget_s: float, fast_s: float | None) -> bool:
    """Return whether to take another step: within the budget, and some time past it until a few had full pace."""
    if len(taken) < _LEAST_STEPS:
        return True
    if len(taken) >= _MOST_STEPS:
        return False
    return spent_s < budget_s or (
        spent_s < _PATIENCE * budget_s and len(_undisturbed(taken, fast_s)) < _LEAST_KEPT
    )


def _at_full_speed(taken: Sequence[_TimedStep], fast_s: float | None) -> list[_TimedStep]:
    """Return the steps that no background load disturbed, or the few that took least."""
    kept = _undisturbed(taken, fast_s)
    return kept if len(kept) >= _LEAST_KEPT else sorted(taken, key=lambda step: step.seconds)[:_LEAST_KEPT]


def _undisturbed(taken: Sequence[_TimedStep], fast_s: float | None) -> list[_TimedStep]:
    limit_s = SLOWER * min(step.seconds for step in taken)
    limit_reference_s = math.inf if fast_s is None else UNDISTURBED * fast_s
    return [step for step in taken if step.seconds <= limit_s and step.reference_s <= limit_reference_s]


def _gaps(timeline: Timeline, kept: Sequence[_TimedStep]) -> tuple[float, float]:
    """Return, of these steps, the median time since the last computation before, but for pauses, and the mean between two."""
    computing: dict[int, list[Span]] = defaultdict(list)
    for span in sorted(timeline.spans, key=lambda span: span.start_s):
        if span.stream == Stream.COMPUTE and span.phase == "step":
            computing[span.step].append(span)
    before = [
        computing[step.number][0].start_s - computing[step.number - 1][-1].end_s - step.paused_s
        for step in kept
    ]
    within = [b.start_s - a.end_s for step in kept for a, b in pairwise(computing[step.number])]
    return median(before), fmean(gap for gap in within if gap <= _WAITS * median(within))


def with_step_overhead(profile: Profile, steps: Sequence[WholeStep]) -> Profile:
    """Return `profile` with the host's time around computations, as it was measured.

    A step's instructions are issued before the first of them runs: the gap between steps grows with their number. That
    part of it, the slope of a robust line, is each instruction's own, as is the pause before it; the rest is the step's.
    """
    gaps = np.array([max(step.gap_s, 1e-7) for step in steps])
    numbers = np.array([len(step.program.step) for step in steps])
    # The slope's own interval, which nothing reads, has no value where many numbers tie.
    with np.errstate(invalid="ignore"):
        slope = float(theilslopes(gaps, numbers)[0]) if len(set(numbers)) > 1 else 0.0
    issuing_s = max(0.0, slope)
    low, value, high = (
        max(1e-7, float(q)) for q in np.quantile(gaps - issuing_s * numbers, (0.05, 0.5, 0.95))
    )
    step_s = Constant(
        name="step_s",
        value=value,
        low=low,
        high=high,
        unit=CONSTANT_UNITS["step_s"],
        source=f"median of {len(gaps)} measured steps",
    )
    pause_s = median(step.pause_s for step in steps) + issuing_s
    own = profile.constant("instruction_s")
    shifted = {name: getattr(own, name) + pause_s for name in ("low", "value", "high")}
    instruction_s = own.model_copy(
        update={**shifted, "source": f"{own.source}; and {pause_s * 1e6:.0f} us to issue it and begin"}
    )
    return profile.with_constants(step_s, instruction_s, origin="calibrated")


def interval_ratios(
    profile: Profile, topology: Topology, node: str, steps: Sequence[WholeStep]
) -> list[float]:
    """Return each step's log error, over the half interval of `profile` on its side."""
    machine = Machine.from_topology(topology, node, _with_scale(profile, 1.0))
    return [_ratio(step, machine) for step in steps]


def with_interval_scale(profile: Profile, ratios: Sequence[float]) -> Profile:
    """Return `profile` with the part of its intervals that holds whole steps as often as :data:`COVERAGE` says.

    `ratios`: of steps that the profile, or one like it, was not fitted to: see :func:`interval_ratios`.

    If the ratios are normal around 0, a new one lies within ``t · sqrt(mean square)`` with probability
    :data:`COVERAGE`, where ``t`` is Student's quantile with as many degrees of freedom as there are steps: few
    steps cannot promise narrow intervals. What lies farther off than :data:`_FAR` medians counts as if it lay there:
    with several threads, one step that others disturbed would widen every interval without bound. Beyond :data:`_MOST_SCALE` an
    interval says nothing any more, and its ends are no numbers.
    """
    far = _FAR * median(map(abs, ratios))
    ratios = [min(abs(ratio), far) for ratio in ratios]
    quantile = float(student_t.ppf((1 + COVERAGE) / 2, len(ratios)))
    scale = quantile * math.sqrt(sum(ratio**2 for ratio in ratios) / len(ratios))
    return _with_scale(profile, min(_MOST_SCALE, max(_LEAST_SCALE, scale)))


def _with_scale(profile: Profile, scale: float) -> Profile:
    return Profile(**{**dict(profile), "interval_scale": scale})


def _ratio(step: WholeStep, machine: Machine) -> float:
    """Return a step's log error over the half interval on its side."""
    central_s = simulate(step.program, machine).step_time_s
    error = math.log(step.seconds / central_s)
    end_s = simulate(step.program, machine, bound="high" if error > 0 else "low").step_time_s
    return error / math.log(end_s / central_s) if error else 0.0
