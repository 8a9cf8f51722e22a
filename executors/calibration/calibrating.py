"""A machine's calibration from beginning to end: measured, fitted, and held against whole steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import torch

from costmodel.devices.datasheet import datasheet_profile
from costmodel.rates.calibration import FitReport, fit_profile, with_copy_cores
from costmodel.rates.measurement import Measurement
from costmodel.rates.profile import Profile
from costmodel.rates.slowdown import Slowdown, off_slowdown, with_slowdown
from costmodel.scoring import Row
from executors.calibration.calibrate import DEFAULT_BUDGET_S, calibrate, calibrate_exchanges, threads_set
from executors.calibration.codec_calibration import with_codec_constants
from executors.calibration.core_contention import CrowdedCores, crowded_cores, with_crowded_cores
from executors.calibration.whole_steps import (
    QUANTIZED_STEP_SHAPES,
    STEP_SHAPES,
    StepShape,
    WholeStep,
    interval_ratios,
    measure_steps,
    with_interval_scale,
    with_step_overhead,
)
from executors.reference_speed import UNDISTURBED, full_speed_s
from topology.errors import RunError
from topology.graph import Topology
from zosim.applications.evidence.learning import measurements_of_spans
from zosim.hardware.machine import Machine
from zosim.program.program_set import ProgramSet
from zosim.simulators.simulate import simulate
from zosim.timeline import Timeline

_STEPS_SHARE = 0.4
"""Part of the time to measure for that goes to whole steps."""

_EXCHANGES_SHARE = 0.05
_QUANTIZED_SHARE, _QUANTIZED_ROUNDS = 0.25, 3
"""Besides, for steps with quantized weights, as often: of each shape the round counts in which it took least."""

_LONG_S = 10.0
"""Seconds from which processes are started thrice to see what they take from each other, and steps with quantized weights are taken."""

_LEAST_LEFT = 0.1
"""Least part of a machine that others are taken to have left for a step."""

_NUM_FOLDS = 2
_NAMED = 3
_FULL_WEIGHT_SHARE, _LEAST_WEIGHT = 0.1, 0.2
_HEED_ALONE = 0.5
"""What operations take again and again by themselves, caches warm, counts half as far as what they take in steps."""

BETWEEN_CALIBRATIONS = 0.055
"""Standard deviation, in logs, of what all predictions after one calibration are off together on the CPUs of virtual machines: signed medians
of -4.7, +0.8 and +8.4 % over the cases to choose from, in the reports of 2026-11-22 (quick and full) and 2026-11-23 (quick)."""

_NO_DURATION_TELLS = {
    "cache_bytes": "assumed; durations depend on it together with the bandwidths of cache and memory",
    "context_bytes": "memory, not time",
    "pin_bandwidth": "of no step; measured by itself",
    "allocator_slack": "memory, not time",
    "allocation_granularity": "memory, not time",
}


def calibrated(
    topology: Topology,
    node: str,
    *,
    device: str = "cpu",
    num_threads: int | None = None,
    budget_s: float = DEFAULT_BUDGET_S,
    step_shapes: Sequence[StepShape] = STEP_SHAPES,
    quantized_step_shapes: Sequence[StepShape] = QUANTIZED_STEP_SHAPES,
    on_share: Callable[[float], None] = lambda _: None,
) -> tuple[Profile, FitReport]:
    """Measure a device of this machine, and return what its operations cost, and how well that explains them.

    - `topology`: this machine.
    - `node`: that `device` is.
    - `device`: ``"cpu"`` or a CUDA device.
    - `num_threads`: threads of a CPU's kernels; all its cores if not given.
    - `budget_s`: seconds to measure for. Building what is measured, the least that is, and the fit take some forty more, steps
      with quantized weights on a CPU as much again, and looking for moments without background load as much as the budget once
      more.
    - `step_shapes`: of which whole steps are measured.
    - `quantized_step_shapes`: the same of quantized weights, on a CPU and where there are seconds for it.
    - `on_share`: called with the share of the work that is done.

    Raises RunError if the device is not there.

    Operations say what the constants are: by themselves, and as the instructions of whole steps of small models,
    where they find caches as runs do. How long whole steps take is fitted to nothing but the time between them: it
    says how wide intervals have to be.
    """
    base = datasheet_profile(topology, node, num_threads=num_threads)
    # A GPU's profile has one thread; those of its host are as torch has them.
    threads = base.num_threads if device == "cpu" else num_threads
    # Before, between and after: how much two cores do at once changes within seconds.
    crowding = _Crowding()
    if device == "cpu" and budget_s >= _LONG_S:
        crowding.measure()

    def kernels() -> tuple[list[Measurement], Slowdown | None]:
        return calibrate(
            device=device,
            dtypes=("float32", "bfloat16") if device == "cpu" else ("float32", "float16", "bfloat16"),
            num_threads=threads,
            budget_s=(1 - _STEPS_SHARE - _EXCHANGES_SHARE) * budget_s,
            on_round=lambda share: on_share((1 - _STEPS_SHARE) * share),
        )

    def taken(shapes: Sequence[StepShape], share: float, fast_s: float | None) -> list[WholeStep]:
        with threads_set(threads or torch.get_num_threads()):
            return measure_steps(
                topology,
                node,
                device=device,
                budget_s=share * budget_s,
                fast_s=fast_s,
                shapes=shapes,
                on_share=lambda done: on_share(1 - _STEPS_SHARE * (1 - done)),
            )

    def whole_steps(fast_s: float | None) -> list[WholeStep]:
        return taken(step_shapes, _STEPS_SHARE, fast_s)

    measurements, slowdown, steps, disturbances = at_one_slowdown(kernels, whole_steps)
    quantized: list[WholeStep] = []
    if device == "cpu" and budget_s >= _LONG_S:
        fast_s = slowdown.fast_s if slowdown else None
        rounds = [taken(quantized_step_shapes, _QUANTIZED_SHARE, fast_s) for _ in range(_QUANTIZED_ROUNDS)]
        quantized = [min(alike, key=lambda step: step.seconds) for alike in zip(*rounds, strict=False)]
        crowding.measure()
    if device == "cpu":
        num_threads = threads or torch.get_num_threads()
        try:
            measurements += calibrate_exchanges(num_threads, budget_s=_EXCHANGES_SHARE * budget_s)
        except RunError as error:
            crowding.failures.append(error.message)
    profile, fit = fitted(topology, node, base, measurements, steps, slowdown, quantized)
    if device == "cpu":
        crowding.measure()
        profile = with_crowded_cores(profile, crowding.measured)
    return with_codec_constants(profile), replace(fit, disturbances=(*disturbances, *crowding.failures))


@dataclass
class _Crowding:
    """What ranks on all cores take from each other, and why it could not be measured: no reason to lose all else."""

    measured: list[CrowdedCores] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def measure(self) -> None:
        """Measure once more, unless that has failed before: on a busy machine it takes minutes to fail."""
        if self.failures:
            return
        try:
            self.measured += crowded_cores()
        except RunError as error:
            self.failures.append(error.message)


def at_one_slowdown(
    kernels: Callable[[], tuple[list[Measurement], Slowdown | None]],
    whole_steps: Callable[[float | None], list[WholeStep]],
) -> tuple[list[Measurement], Slowdown | None, list[WholeStep], tuple[str, ...]]:
    """Return single operations and whole steps as one pace of the machine sees them, and in words what disturbed them.

    - `kernels`: measures single operations, and the pace meanwhile.
    - `whole_steps`: measures steps, given what the reference takes at full speed.

    Operations come first, steps after them. Where the machine's full pace changed in between, what was taken at the
    slower one is measured again, once. A pace that stays slower is one of those that predictions are made for, and counts
    for the width of intervals.
    """
    measurements, slowdown = kernels()
    steps = whole_steps(slowdown.fast_s if slowdown else None)
    disturbances: list[str] = []
    if slowdown is not None and (change := _change(slowdown, steps)) > UNDISTURBED:
        disturbances.append(
            f"the machine became {change:.2f} times as slow while it was measured: steps were measured again"
        )
        steps = min(steps, whole_steps(slowdown.fast_s), key=lambda some: _change(slowdown, some))
        still = _change(slowdown, steps)
        slowdown = replace(slowdown, ratio=max(slowdown.ratio, still), high=max(slowdown.high, still))
    elif slowdown is not None and change < 1 / UNDISTURBED:
        disturbances.append(
            f"the machine became {1 / change:.2f} times as fast while it was measured: operations were measured again"
        )
        measurements, slowdown = min((measurements, slowdown), kernels(), key=lambda item: item[1].fast_s)  # type: ignore[union-attr]
    return measurements, slowdown, steps, (*disturbances, *_disturbances(measurements, steps))


def _change(slowdown: Slowdown | None, steps: Sequence[WholeStep]) -> float:
    """Return what the reference took at its fastest beside steps, over what it takes at full speed."""
    references_s = [second for step in steps for second in step.references_s]
    return full_speed_s(references_s) / slowdown.fast_s if slowdown and references_s else 1.0


def _disturbances(measurements: Sequence[Measurement], steps: Sequence[WholeStep]) -> list[str]:
    """Return in words what others took of the machine."""
    disturbances = []
    if bounds := [measurement.name for measurement in measurements if measurement.is_bound]:
        named = ", ".join(bounds[:_NAMED]) + (", ..." if len(bounds) > _NAMED else "")
        disturbances.append(
            f"other processes disturbed every measurement of {len(bounds)} of {len(measurements)} operations ({named}): "
            "their times are upper bounds"
        )
    if disturbed := [step.foreign_cores for step in steps if step.is_disturbed]:
        disturbances.append(
            f"other processes kept {fmean(disturbed):.1f} cores busy during {len(disturbed)} of {len(steps)} whole steps, "
            "whose times are upper bounds"
        )
    return disturbances


def fitted(
    topology: Topology,
    node: str,
    base: Profile,
    measurements: Sequence[Measurement],
    steps: Sequence[WholeStep],
    slowdown: Slowdown | None = None,
    quantized: Sequence[WholeStep] = (),
) -> tuple[Profile, FitReport]:
    """Return the profile that single operations and whole steps say, and how well it explains them.

    Constants are fitted at full speed, and the profile is at the pace of the calibration, if one is given. Intervals hold
    steps as they were taken, disturbed or not, as they would have been in its faster and its slower seconds, and, on a CPU,
    as another calibration would have it: all predictions share that error, and the steps of this one cannot show it. The steps are parted in two. What the profile says of either part when it was fitted to the other alone is how
    far off it is for steps that it has not seen: that decides the width of its intervals, and is what is reported. Where others
    disturbed most steps, intervals reach down to what these would take with the cores that the others had.
    """
    profile, fit = _fitted(base, measurements, steps)
    if quantized:
        profile, fit = _with_quant_rates(profile, fit, quantized)
    ratios: list[float] = []
    residuals: list[Row] = []
    for number in range(_NUM_FOLDS):
        unseen = steps[number::_NUM_FOLDS]
        seen = [step for step in steps if step not in unseen]
        other, _ = _fitted(base, measurements, seen)
        there = _at_slowdown(other, slowdown)
        judges = _judges(unseen)
        taken = [*_as_taken(judges, there, slowdown), *_as_alone(judges, base.num_cores)]
        if base.device_type == "cpu":
            taken = _as_calibrated_again(taken)
        ratios += interval_ratios(there, topology, node, taken)
        machine = Machine.from_topology(topology, node, other)
        residuals += [
            Row(s.name, "step_s", s.seconds, simulate(s.program, machine).step_time_s) for s in unseen
        ]
    profile = with_interval_scale(_at_slowdown(profile, slowdown), ratios)
    share = disturbed_share(measurements, steps)
    return Profile(**{**dict(profile), "disturbed_share": share}), replace(fit, steps=tuple(residuals))


def disturbed_share(measurements: Sequence[Measurement], steps: Sequence[WholeStep]) -> float:
    """Return the share of operations or of whole steps that others disturbed, whichever is larger."""
    for_each = [m.is_bound for m in measurements], [step.is_disturbed for step in steps]
    return max((fmean(are_disturbed) for are_disturbed in for_each if are_disturbed), default=0.0)


def _judges(steps: Sequence[WholeStep]) -> Sequence[WholeStep]:
    """Return the steps that say how far off a profile is: those that nobody disturbed, if they are half of them."""
    undisturbed = [step for step in steps if not step.is_disturbed]
    return undisturbed if 2 * len(undisturbed) >= len(steps) else steps


def _as_taken(steps: Sequence[WholeStep], profile: Profile, slowdown: Slowdown | None) -> list[WholeStep]:
    """Return steps with the seconds that they took, and those at either end of the paces of the calibration."""
    slowings = [1.0]
    if slowdown is not None:
        slowings += [1 + off_slowdown(profile, ratio) for ratio in (slowdown.low, slowdown.high)]
    return [
        replace(step, seconds=slowing * step.slowing * step.seconds) for step in steps for slowing in slowings
    ]


def _as_alone(steps: Sequence[WholeStep], num_cores: int) -> list[WholeStep]:
    """Return the steps that others disturbed, as long as they would take at least with the cores that the others had."""
    return [
        replace(step, seconds=step.seconds * max(_LEAST_LEFT, 1 - step.foreign_cores / num_cores))
        for step in steps
        if step.is_disturbed
    ]


def _as_calibrated_again(steps: Sequence[WholeStep]) -> list[WholeStep]:
    """Return each step shorter and longer by what predictions after one calibration are off together."""
    return [
        replace(step, seconds=step.seconds * math.exp(sign * BETWEEN_CALIBRATIONS))
        for step in steps
        for sign in (-1, 1)
    ]


def _at_slowdown(profile: Profile, slowdown: Slowdown | None) -> Profile:
    return profile if slowdown is None else with_slowdown(profile, slowdown)


def _fitted(
    base: Profile, measurements: Sequence[Measurement], steps: Sequence[WholeStep]
) -> tuple[Profile, FitReport]:
    """Return a profile fitted to single operations, alone and as instructions of steps."""
    alone = [replace(measurement, weight=_HEED_ALONE) for measurement in measurements]
    profile, fit = fit_profile([*alone, *_within_steps(base, steps)], base)
    profile, unknown = with_copy_cores(profile, measurements)
    untold = {name: why for name, why in _NO_DURATION_TELLS.items() if name in profile.values()}
    reasons = {**fit.unidentified, **untold} | ({"copy_cores": unknown} if unknown else {})
    measured_apart = ("step_s",) if unknown else ("step_s", "copy_cores")
    profile = with_step_overhead(profile, steps)
    return profile, replace(fit, identified=(*fit.identified, *measured_apart), unidentified=reasons)


def _with_quant_rates(
    profile: Profile, fit: FitReport, steps: Sequence[WholeStep]
) -> tuple[Profile, FitReport]:
    """Return a profile with the rates of passes over quantized values that steps with quantized weights tell, all else as it is."""
    profile, quantized_fit = fit_profile(_within_steps(profile, steps), profile, quantities=("quant_rate",))
    known = {name: why for name, why in fit.unidentified.items() if not name.startswith("quant_rate")}
    return profile, replace(
        fit,
        residuals=(*fit.residuals, *quantized_fit.residuals),
        identified=(*fit.identified, *quantized_fit.identified),
        unidentified={**known, **quantized_fit.unidentified},
    )


def _within_steps(base: Profile, steps: Sequence[WholeStep]) -> list[Measurement]:
    """Return what the instructions of steps took on average: steps are sums of them."""
    return [
        replace(
            m,
            name=f"{m.name}: {step.name}",
            weight=_weight(m, step, step.timeline),
            is_bound=step.is_disturbed,
        )
        for step in steps
        if step.timeline is not None
        for m in measurements_of_spans(step.timeline, ProgramSet.of_one(step.program), base, fmean)
    ]


def _weight(measurement: Measurement, step: WholeStep, timeline: Timeline) -> float:
    """Return the weight of what spans of a step took in a fit: 1 if they are a tenth of it."""
    per_step = measurement.num_samples / len(timeline.periodic_steps)
    return min(1.0, max(_LEAST_WEIGHT, per_step * measurement.seconds / (_FULL_WEIGHT_SHARE * step.seconds)))
