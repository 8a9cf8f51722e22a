"""Answers to rows of QuZO's tables."""

from __future__ import annotations

import math
from statistics import NormalDist

from studies.published.predicting import Z90, CellPrediction
from studies.published.quzo import (
    CAPACITY_GIB,
    FORMULAS,
    MEMORY,
    SECONDS,
    QuzoCase,
    QuzoFit,
    formula,
    peak_gib,
    quzo_case,
    step_s,
)
from studies.published.rows import PublishedRow, RowsError
from studies.published.sparq import NotPredicted

_LEAST_PROBABILITY = 0.05
"""Below it a peak is said not to fit."""

_SURE = 0.95
"""Above it what the GPU cannot hold makes no difference."""


def quzo_answer(row: PublishedRow, fit: QuzoFit) -> CellPrediction:
    """Return what is predicted for a row of QuZO's tables."""
    try:
        if row["quantity"] in MEMORY:
            return _memory(quzo_case(row), fit)
        if row["quantity"] == SECONDS:
            return _seconds(quzo_case(row), fit)
        if row["quantity"] in FORMULAS:
            return CellPrediction(note=f"formula: {formula(row)}")
    except (NotPredicted, RowsError) as reason:
        return CellPrediction(note=reason.message)
    return CellPrediction(note=f"{row['quantity']} is not predicted, only memory and seconds of a step")


def _memory(case: QuzoCase, fit: QuzoFit) -> CellPrediction:
    gib, largest = peak_gib(case, fit.values)
    capacity = CAPACITY_GIB * case.gpus
    spread = NormalDist(math.log(gib), fit.half_width / Z90)
    probability = spread.cdf(math.log(capacity))
    if probability < _LEAST_PROBABILITY:
        note = f"out of memory: needs {gib:.1f} GiB, the GPU has {capacity:g}"
        return CellPrediction(bottleneck=largest, note=note)
    # A printed number is of a run that fitted: quantiles of what is below the capacity.
    low, middle, high = (math.exp(spread.inv_cdf(part * probability)) for part in (0.05, 0.5, 0.95))
    note = ""
    if gib > capacity:
        note = f"out of memory is likelier: needs {gib:.1f} of {capacity:g} GiB; the number is of a run that fits"
    elif probability < _SURE:
        note = f"{gib:.1f} GiB if runs above {capacity:g} were printed, too"
    return CellPrediction(middle, low, high, largest, note)


def _seconds(case: QuzoCase, fit: QuzoFit) -> CellPrediction:
    if not fit.times:
        return CellPrediction(note="the profile was fitted without seconds of QuZO")
    seconds, largest = step_s(case, fit.values)
    factor = math.exp(fit.half_width)
    return CellPrediction(seconds, seconds / factor, seconds * factor, largest)
