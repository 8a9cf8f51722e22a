"""Sample means against their theory, with error rates that are stated for all comparisons of the suite together.

One run of the whole suite on correct code raises a false alarm with a probability below :data:`FALSE_ALARMS`, by
Bonferroni's inequality over :data:`MOST_COMPARISONS`: that many comparisons may be made in one run, and a test counts
them. ``python -m proofs_checks.calibration`` holds the stated rate of every check against many seeds.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.stats import binom
from scipy.stats import t as student
from torch import Tensor

from proofs_checks.outcomes import Estimate, Outcome

FALSE_ALARMS = 1e-6
"""Probability that one run of all checks on correct code raises a false alarm."""

MOST_COMPARISONS = 20_000
"""Comparisons that one run of all checks may make."""

LEVEL = FALSE_ALARMS / MOST_COMPARISONS
"""Probability of a false alarm of one comparison."""

MISSED = 1e-3
"""Probability that a comparison does not notice an error of the size that it states."""

NUM_BATCHES = 256
"""Batches whose means are taken for normal: enough that Student's quantile is near the normal's."""


def threshold(num_batches: int = NUM_BATCHES) -> float:
    """Return the standard errors that a mean of so many batches may be off, two-sided.

    >>> round(threshold(256), 2), round(threshold(32), 2)
    (6.87, 9.81)
    """
    return float(student.isf(LEVEL / 2, num_batches - 1))


def batch_means(samples: Tensor) -> Tensor:
    """Return means of batches of neighbouring rows: at most :data:`NUM_BATCHES`, of one size.

    Rows that do not fill a batch are added to none; with fewer rows than batches each row is one.

    `samples`: shape (n, k).

    Returns
    -------
    torch.Tensor
        Shape (batches, k), float64.
    """
    size = max(1, len(samples) // NUM_BATCHES)
    count = len(samples) // size
    return samples[: count * size].double().reshape(count, size, -1).mean(1)


def estimates_of(
    name: str, samples: Tensor, expected: Tensor, *, scale: Tensor | float | None = None
) -> list[Estimate]:
    """Return every column's mean beside its theory.

    - `samples`: shape (n, k): rows are independent.
    - `expected`: shape (k,).
    - `scale`: what errors are relative to; by default the theory's magnitude, and 1 where that is 0.

    Batch means with their own standard error and Student's quantile. A column that never varies has no standard error:
    it is right where it equals its theory to float64's rounding.
    """
    means = batch_means(samples)
    expected = expected.double()
    count = len(means)
    centre = means.mean(0)
    error = means.std(0) / math.sqrt(count)
    rounding = 1e-9 * expected.abs().clamp(min=1.0)
    relative_to = (
        expected.abs() if scale is None else torch.as_tensor(scale, dtype=torch.float64).expand_as(expected)
    )
    relative_to = torch.where(relative_to > 0, relative_to, 1.0)
    limit = threshold(count)
    seen = limit + float(student.isf(MISSED, count - 1))
    estimates: list[Estimate] = []
    for value, theory, deviation, least, unit in zip(
        *(column.tolist() for column in (centre, expected, error, rounding, relative_to)), strict=True
    ):
        varies = deviation > least
        reach = limit * deviation if varies else least
        off = abs(value - theory)
        p_value = float(2 * student.sf(off / deviation, count - 1)) if varies else float(off <= least)
        resolution = (seen * deviation if varies else least) / unit
        label = f"{name} [{len(estimates)}]" if len(expected) > 1 else name
        estimates.append(
            Estimate(label, value, theory, value - reach, value + reach, p_value, resolution, len(samples))
        )
    return estimates


def compare_means(
    name: str,
    samples: Tensor,
    expected: Tensor,
    *,
    scale: Tensor | float | None = None,
    along: bool = True,
) -> Outcome:
    """Return the outcome of comparing every column's mean, and the mean along `expected`, with theory.

    - `name`: for the details.
    - `samples`: shape (n, k): rows are independent.
    - `expected`: shape (k,).
    - `scale`: what errors are relative to; by default the theory's magnitude, and 1 where that is 0.
    - `along`: whether the mean along `expected` is compared, too: not where columns are unlike quantities.

    The perturbation of the expectation is a comparison of its own: an error of the whole estimate's size shows there
    long before it shows in a single component.
    """
    samples, expected = samples.double(), expected.double()
    estimates = estimates_of(name, samples, expected, scale=scale)
    if along and len(expected) > 1 and float(expected.norm()):
        unit = expected / expected.norm()
        estimates += estimates_of(
            f"{name}, along its theory", (samples @ unit)[:, None], expected.norm()[None]
        )
    return outcome_of(name, estimates)


def outcome_of(name: str, estimates: list[Estimate]) -> Outcome:
    """Return the outcome of comparisons that were made: the smallest probability, as decades below which it alarms."""
    least = min(estimates, key=lambda estimate: _nan_first(estimate.p_value))
    statistic = -math.log10(least.p_value) if least.p_value > 0 else math.inf
    coarsest = max(estimate.resolution for estimate in estimates)
    line = (
        f"{name}: {least.value:.6g}, theory {least.theory:.6g}, interval [{least.low:.6g}, {least.high:.6g}] "
        f"(farthest of {len(estimates)}, n = {least.num_samples}); each notices {_percent(coarsest)}"
    )
    return Outcome(
        math.nan if math.isnan(least.p_value) else statistic,
        -math.log10(LEVEL),
        "decades below 1 of the probability of means this far off",
        (line,),
        tuple(estimates),
    )


def _nan_first(value: float) -> float:
    return -1.0 if math.isnan(value) else value


def _percent(part: float) -> str:
    return f"{100 * part:.2g} %"


def fitted_slope(x: list[float], y: list[float]) -> float:
    """Return the exponent ``p`` of ``y ~ x^p``, by least squares of logarithms.

    >>> round(fitted_slope([1.0, 2.0, 4.0], [3.0, 12.0, 48.0]), 6)
    2.0
    """
    slope, _ = np.polyfit(np.log(x), np.log(y), 1)
    return float(slope)


def compare_two_points(name: str, samples: Tensor, expected: Tensor) -> Outcome:
    """Return the outcome of comparing numbers rounded at random with what they round: no more than two values, right on average.

    - `samples`: shape (n, k): roundings of k numbers, n times, independently.
    - `expected`: shape (k,): the numbers.

    A number between two values is rounded to the upper one with a probability that its mean fixes, and so fixes its variance, too. How
    often is compared with the binomial distribution, exactly. Where only one value came up, the number is that value, or
    it is nearer to it than chance explains. Errors are relative to the number or to the step between the values, whichever is larger: a number
    near 0 is known to a part of a step, not of itself.
    """
    samples, expected = samples.double(), expected.double()
    low, high = samples.amin(0), samples.amax(0)
    num_upper = (samples == high).sum(0)
    others = len(samples) - num_upper - torch.where(high > low, (samples == low).sum(0), 0)
    estimates = []
    for number, (x, down, up, upper, other) in enumerate(
        zip(*(column.tolist() for column in (expected, low, high, num_upper, others)), strict=True)
    ):
        label = f"{name} [{number}]" if len(expected) > 1 else name
        estimates.append(_two_point_estimate(label, x, down, up, upper, other, len(samples)))
    return outcome_of(name, estimates)


def _two_point_estimate(
    label: str, x: float, down: float, up: float, upper: int, other: int, count: int
) -> Estimate:
    rounding = 1e-9 * max(1.0, abs(x))
    if up == down:  # never rounded the other way
        p_value = 1.0 if abs(up - x) <= rounding else 0.0
        return Estimate(
            label, up, x, up - rounding, up + rounding, p_value, rounding / (abs(x) or 1.0), count
        )
    probability = min(1.0, max(0.0, (x - down) / (up - down)))
    is_between = down - rounding <= x <= up + rounding and not other
    tails = binom.cdf(upper, count, probability), binom.sf(upper - 1, count, probability)
    p_value = min(1.0, 2 * float(min(tails))) if is_between else 0.0
    value = down + (up - down) * upper / count
    deviation = (up - down) * math.sqrt(max(probability * (1 - probability), 1 / count) / count)
    reach = threshold(count) * deviation
    resolution = (reach + float(student.isf(MISSED, count - 1)) * deviation) / max(abs(x), up - down)
    return Estimate(label, value, x, value - reach, value + reach, p_value, resolution, count)
