"""Fitting a profile to measurements: which constants make the estimates agree with what a machine did.

The measuring half needs tensors and lives with the executor. This half is a robust least-squares fit in log
space, so that ten microseconds and ten seconds weigh alike and constants stay positive.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from costmodel.estimate import combine_terms, work_terms
from costmodel.rates.fitting import Floats, Prior, most_probable, soft_l1
from costmodel.rates.measurement import Measurement, Statistic
from costmodel.rates.profile import CONSTANT_UNITS, Constant, DeviceType, Profile
from costmodel.scoring import Row, Score, scores
from topology.errors import ProfileError

NOISE = 0.05
"""Relative error of a good measurement: what the prior is weighed against."""

OUTLIER = 0.20
"""Log residual from which a measurement counts less and less (scale of the soft L1 loss)."""

_LOSS = soft_l1(OUTLIER)

IDENTIFIED = 0.5
"""A constant is identified if the data shrink its uncertainty to less than this part of the prior's."""

_VAGUE = 0.5
"""Least standard deviation of a bandwidth's prior, in logs."""

_NOT_FITTED = frozenset(
    {
        "cache_bytes",
        "copy_cores",
        "context_bytes",
        "pin_bandwidth",
        "allocator_slack",
        "allocation_granularity",
        "step_s",
        "reference_s",
        "slowdown",
        "slowdown_fraction",
    }
)
"""Constants that durations of single operations cannot tell."""


@dataclass(frozen=True)
class FitReport:
    """What a fit found."""

    residuals: tuple[Row, ...]  # seconds, in the order of the measurements; those beside others have a flag
    identified: tuple[str, ...]  # constants that the data determine
    # The others, each with the reason; they keep (close to) the base profile's value and its interval.
    unidentified: Mapping[str, str]
    # Ratio of the largest to the smallest singular value of the data's Jacobian over the identified constants.
    condition: float | None
    steps: tuple[Row, ...] = ()  # whole steps that were measured and not fitted, where there are any
    disturbances: tuple[str, ...] = ()  # what disturbed the measuring, in words

    @property
    def median_error(self) -> float:
        """Median of the absolute relative errors of what was fitted."""
        return Score.of(self.residuals).median

    def by_operation(self) -> list[Score]:
        """Return the scores of what was fitted, by the first word of its name."""
        return scores(self.residuals, key=lambda row: row.case.split(" ", 1)[0].split(".", 1)[0])

    def worst(self, count: int = 5) -> tuple[Row, ...]:
        """Return the rows with the largest log errors."""
        ranked = sorted(self.residuals, key=lambda row: -abs(math.log1p(row.error or 0.0)))
        return tuple(ranked[:count])


def fit_profile(
    measurements: Sequence[Measurement],
    base_profile: Profile,
    *,
    statistic: Statistic = "median",
    quantities: Collection[str] = CONSTANT_UNITS,
) -> tuple[Profile, FitReport]:
    """Return the profile that explains `measurements` best, and how well it does.

    - `base_profile`: where the fit starts, and what it falls back on. Its intervals are the prior.
    - `statistic`: which duration of a measurement to explain. The fastest is the machine's own where other processes disturbed
      the measuring; the median is what runs will meet if they are disturbed alike.
    - `quantities`: of constants that are fitted: others stay as they are.

    Raises ProfileError if there is nothing to fit, a measurement used another number of threads, or the profile lacks a rate for a format
    that was measured.

    A robust fit in log space (:mod:`costmodel.rates.fitting`) under the soft L1 loss. The base profile's values and half intervals,
    in logs, are the prior; measurements count by their weights over :data:`NOISE`. Intervals are twice the posterior's standard
    deviation, widened by the spread of the residuals that the constant matters to: a model that explains its data within 20 %
    must not claim 1 %. A measurement that is a bound counts only where the prediction exceeds it.
    """
    fitted = [m for m in measurements if not m.contended]
    if not fitted:
        message = "there are no measurements to fit a profile to"
        raise ProfileError(message, hint="measure the machine; rows of a busy machine do not count")
    for measurement in fitted:
        if base_profile.device_type == "cpu" and measurement.num_threads != base_profile.num_threads:
            message = (
                f"measurement {measurement.name!r} used {measurement.num_threads} threads, but the profile "
                f"is for {base_profile.num_threads}"
            )
            raise ProfileError(message, hint="measure with the number of threads that runs will use")
    problem = _CalibrationProblem(fitted, base_profile, statistic, quantities)
    return _outcome(problem, problem.solve(), measurements)


class _CalibrationProblem:
    """The fit as vectors: one entry per measurement, one per constant."""

    def __init__(
        self,
        measurements: Sequence[Measurement],
        profile: Profile,
        statistic: Statistic,
        quantities: Collection[str],
    ) -> None:
        constants = [
            constant
            for constant in profile.constants
            if constant.quantity in quantities
            and constant.quantity not in _NOT_FITTED
            and constant.value > 0
            and constant.low < constant.high
        ]
        self.measurements = tuple(measurements)
        self.profile = profile
        self.statistic = statistic
        self.names = tuple(constant.name for constant in constants)
        self.prior = Prior(
            np.log([constant.value for constant in constants]),
            np.array([_prior_sigma(constant, profile.device_type) for constant in constants]),
        )
        self.log_seconds: Floats = np.log([measurement.duration_s(statistic) for measurement in measurements])
        self.given_weights = np.array([measurement.weight for measurement in measurements])
        self.bounds = np.array([measurement.is_bound for measurement in measurements])

    def values(self, x: Floats) -> dict[str, float]:
        return {**self.profile.values(), **dict(zip(self.names, np.exp(x).tolist(), strict=True))}

    def log_ratios(self, x: Floats) -> Floats:
        """Return log predicted over measured, one per measurement."""
        values, device_type = self.values(x), self.profile.device_type
        predicted = [_predicted_s(measurement, values, device_type) for measurement in self.measurements]
        return np.log(predicted) - self.log_seconds

    def counted(self, log_ratios: Floats) -> Floats:
        """Return 1 for each measurement that says something here, 0 for bounds that the predictions keep."""
        return np.where(self.bounds & (log_ratios < 0), 0.0, 1.0)

    def residuals(self, x: Floats) -> Floats:
        """Return log predicted over measured, 0 where a bound is kept."""
        log_ratios = self.log_ratios(x)
        return self.counted(log_ratios) * log_ratios

    def residual_slopes(self, x: Floats) -> Floats:
        """Return the derivatives of :meth:`residuals`."""
        return self.counted(self.log_ratios(x))[:, None] * self.jacobian(x)

    def solve(self) -> Floats:
        start, sigma = self.prior.x, self.prior.sigma
        reach = np.maximum(8 * sigma, math.log(100.0))
        bounds = (start - reach, start + reach)
        weights = self.given_weights / NOISE
        return most_probable(
            self.prior,
            self.residuals,
            self.residual_slopes,
            weights=weights,
            loss=_LOSS,
            bounds=bounds,
            x_scale=sigma,
        )[0]

    def jacobian(self, x: Floats, step: float = 1e-3) -> Floats:
        """Return the central differences of the log predictions, measurements by constants."""
        derivatives, device_type = np.zeros((len(self.measurements), len(x))), self.profile.device_type
        for index, rows in enumerate(self._rows_of):
            shift = np.zeros_like(x)
            shift[index] = step
            above, below = self.values(x + shift), self.values(x - shift)
            for row in rows:
                measurement = self.measurements[row]
                ratio = _predicted_s(measurement, above, device_type) / _predicted_s(
                    measurement, below, device_type
                )
                derivatives[row, index] = math.log(ratio) / (2 * step)
        return derivatives

    @cached_property
    def _rows_of(self) -> list[list[int]]:
        """Measurements that each constant can matter to: on a CPU, where terms add up, those that it matters to now."""
        every = list(range(len(self.measurements)))
        if self.profile.device_type != "cpu":
            return [every] * len(self.names)
        values = self.values(self.prior.x)
        before = [_predicted_s(m, values, "cpu") for m in self.measurements]
        rows = []
        for name in self.names:
            changed = {**values, name: 2 * values[name]}
            rows.append([i for i in every if _predicted_s(self.measurements[i], changed, "cpu") != before[i]])
        return rows


def _prior_sigma(constant: Constant, device_type: DeviceType) -> float:
    """Return half the base interval in logs; one that reaches zero counts as a factor of ten.

    A narrow one of a bandwidth of a CPU is not believed: its memory may have been measured while others used it.
    """
    low = constant.low if constant.low > 0 else constant.value / 10
    least = _VAGUE if device_type == "cpu" and constant.unit == "byte/s" else 0.05
    return max(least, math.log(constant.high / low) / 2)


def _predicted_s(measurement: Measurement, values: Mapping[str, float], device_type: DeviceType) -> float:
    """Return the estimate of what was timed: the work, and the cost of a program's instruction if it was one."""
    terms = work_terms(measurement.work, values, measurement.direction)
    if measurement.work.link_bytes:
        return values["message_s"] + measurement.work.link_bytes / values["loopback_bandwidth"]
    if not measurement.is_instruction:
        terms.pop("overhead")
    return combine_terms(terms, device_type)


def _outcome(
    problem: _CalibrationProblem, x: Floats, measurements: Sequence[Measurement]
) -> tuple[Profile, FitReport]:
    log_ratios = problem.log_ratios(x)
    counted = problem.counted(log_ratios)
    everywhere = problem.jacobian(x)
    jacobian = everywhere * counted[:, None]
    weights = problem.given_weights * counted * _LOSS.curvature(log_ratios)
    noise = NOISE
    if weights.any():
        noise = max(NOISE, float(np.sqrt(np.average(log_ratios**2, weights=weights**2))))
    information = problem.prior.information(jacobian, weights / noise**2)
    posterior = np.sqrt(np.diag(np.linalg.inv(information)))
    spread = _spread(jacobian, log_ratios, weights)
    constants, reasons = [], {}
    for index, name in enumerate(problem.names):
        base = problem.profile.constant(name)
        reason = _open_reason(
            jacobian[:, index], everywhere[:, index], posterior[index] / problem.prior.sigma[index]
        )
        value = math.exp(x[index])
        if reason:
            # It stays at the value that the others were fitted beside.
            reasons[name] = reason
            source = f"not identified by calibration; {base.source}"
            low, high = min(base.low, value), max(base.high, value)
        else:
            half = math.hypot(2 * posterior[index], spread[index])
            count = int(np.sum(np.abs(jacobian[:, index]) > 0.05))
            source = f"fitted to {count} measurement{'s' if count != 1 else ''}"
            low, high = math.exp(x[index] - half), math.exp(x[index] + half)
        constants.append(Constant(name=name, value=value, low=low, high=high, unit=base.unit, source=source))
    profile = problem.profile.with_constants(*constants, origin="calibrated")
    identified = [index for index, name in enumerate(problem.names) if name not in reasons]
    condition = float(np.linalg.cond(jacobian[:, identified])) if identified else math.inf
    report = FitReport(
        residuals=tuple(_residual(m, profile, problem.statistic) for m in measurements),
        identified=tuple(problem.names[index] for index in identified),
        unidentified=reasons,
        # JSON has no number for it where a column depends on others.
        condition=condition if math.isfinite(condition) else None,
    )
    return profile, report


def _spread(jacobian: Floats, log_ratios: Floats, weights: Floats) -> Floats:
    """Return per constant the root mean square residual of the measurements that it matters to."""
    influence = (jacobian**2) * (weights**2)[:, None]
    total = influence.sum(axis=0)
    mean_square = (influence * (log_ratios**2)[:, None]).sum(axis=0) / np.where(total > 0, total, 1.0)
    return np.asarray(np.sqrt(mean_square), dtype=np.float64)


def _open_reason(column: Floats, everywhere: Floats, shrinkage: float) -> str:
    """Return why a constant is not identified, or nothing if it is; `everywhere` has the slopes of bounds, too."""
    if float(np.abs(everywhere).max()) < 0.01:
        return "no measurement depends on it"
    if float(np.abs(column).max()) < 0.01:
        return "others disturbed every measurement that depends on it"
    if shrinkage > IDENTIFIED:
        return "measurements depend on it too little, or only together with others"
    return ""


def _residual(measurement: Measurement, profile: Profile, statistic: Statistic) -> Row:
    predicted_s = _predicted_s(measurement, profile.values(), profile.device_type)
    flag = "beside others" if measurement.contended else ""
    return Row(measurement.name, "seconds", measurement.duration_s(statistic), predicted_s, flag=flag)


_BESIDE = " beside a "
"""In the name of a contended measurement, between what was timed and what ran meanwhile."""
_NOTICED_LOSS = 0.05
_LEAST_CORES, _MOST_CORES = 0.1, 2.0


def with_copy_cores(profile: Profile, measurements: Sequence[Measurement]) -> tuple[Profile, str]:
    """Return a CPU's profile with the cores that a copy takes from kernels beside it, and why it is not known, or nothing if it is.

    `measurements`: among them a product and a copy, each alone, and contended beside the other.

    While a copy runs, a product that wants all ``n`` cores loses a part ``L = 1 - alone / beside`` of its speed. It does so
    for ``r`` times as long as the copy takes alone. Where threads share cores evenly, a copy that takes ``c`` of them makes both
    slower by ``(n + c) / n``. The product then loses ``c / n`` of the copy's time: ``c = n L r``.
    """
    alone = {m.name: m.seconds for m in measurements if not m.contended}
    slowed = {m.work.copy_bytes > 0: m for m in measurements if m.contended}
    if profile.device_type != "cpu" or set(slowed) != {False, True}:
        return profile, "no copy was measured beside a product"
    if profile.num_threads < profile.num_cores:
        return profile, "with a core to spare, a copy takes nothing from kernels"
    product, copy = (
        slowed[is_copy].seconds / alone[slowed[is_copy].name.partition(_BESIDE)[0]]
        for is_copy in (False, True)
    )
    lost = 1 - 1 / product
    if lost < _NOTICED_LOSS:
        return profile, "the product did not lose speed to the copy"
    cores = min(_MOST_CORES, max(_LEAST_CORES, profile.num_cores * lost * copy))
    constant = profile.constant("copy_cores").model_copy(
        update={
            "value": cores,
            "low": cores / 1.5,
            "high": cores * 1.5,
            "source": "a product and a copy, each beside the other",
        }
    )
    return profile.with_constants(constant, origin=profile.origin), ""
