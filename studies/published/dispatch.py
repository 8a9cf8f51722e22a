"""What is predicted for a row, by the paper whose table it is of; ZO2's and DistZO2's are in ``predicting``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

from studies.published.fitted_profile import PublishedProfile, load_published_profile
from studies.published.posterior import TableFit
from studies.published.predicting import Z90, CellPrediction, answers
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
from studies.published.quzo import PAPER as QUZO
from studies.published.rows import PublishedRow, RowsError
from studies.published.sparq import (
    KEPT,
    MESSAGES,
    VOLUME,
    NotPredicted,
    VolumeCase,
    volume_case,
)
from studies.published.sparq import PAPER as SPARQ
from studies.published.sparq_fit import SparqFit
from studies.published.sparq_memory import PEAK, peak_case
from studies.published.sparq_memory import peak_gib as sparq_peak_gib
from studies.published.sparq_volumes import predicted_volume
from studies.published.zoinfer import HOURS, SPEEDUPS, STEPS, predicted, zoinfer_case
from studies.published.zoinfer import PAPER as ZOINFER


def sparq_answer(row: PublishedRow, fit: SparqFit) -> CellPrediction:
    """Return what is predicted for a row of SparQ's tables."""
    try:
        if row["quantity"] in (VOLUME, KEPT):
            return _volume_answer(volume_case(row), fit)
        if row["quantity"] == PEAK:
            return _peak_answer(row, fit)
    except (NotPredicted, RowsError) as reason:
        return CellPrediction(note=reason.message)
    return CellPrediction(note=f"{row['quantity']} is not predicted, only communication volumes and memory")


def _volume_answer(case: VolumeCase, fit: SparqFit) -> CellPrediction:
    if fit.volumes is None:
        return CellPrediction(note="the profile was fitted without communication volumes of SparQ")
    volume = predicted_volume(case, fit.volumes)
    unit = "whole GB" if case.digits == 0 else f"{10.0**-case.digits:g} GB"
    note = f"{volume.exact:.3g} GB before it is printed in {unit}"
    return CellPrediction(volume.printed, volume.low, volume.high, _CARRIED[case.method], note)


_CARRIED = {
    "FO-SGD": "activations and their gradients, 16 bits each",
    "AQ-SGD": "gradients back, 8 of 12 bits",
    "ZO-SGD": "activations of 2P points, 16 bits",
    "SparQ": "activations of P + 1 points, quantized",
    MESSAGES: "last messages of all samples",
}


def _peak_answer(row: PublishedRow, fit: SparqFit) -> CellPrediction:
    if fit.peaks is None:
        return CellPrediction(note="the profile was fitted without memory of SparQ")
    gib, largest = sparq_peak_gib(peak_case(row), fit.peaks.values)
    factor = math.exp(fit.peaks.half_width)
    note = f"{gib:.3g} GiB before it is printed in whole ones"
    low, high = max(math.floor(gib / factor), 1), math.ceil(gib * factor)
    return CellPrediction(max(round(gib), 1), low, high, largest, note)


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


def zoinfer_answer(row: PublishedRow, fit: TableFit) -> CellPrediction:
    """Return what is predicted for a row of ZOinfer's tables."""
    if row["quantity"] not in (*SPEEDUPS, HOURS):
        return CellPrediction(note=f"{row['quantity']} is not predicted, only speed-ups and hours")
    try:
        case = zoinfer_case(row)
    except (NotPredicted, RowsError) as reason:
        return CellPrediction(note=reason.message)
    number, largest = predicted(case, fit.values)
    number *= STEPS / 3600 if row["quantity"] == HOURS else 1
    factor = math.exp(fit.half_width)
    return CellPrediction(number, number / factor, number * factor, largest)


def answers_of_all(
    rows: Sequence[PublishedRow], profile: PublishedProfile, *, on_cell: Callable[[], None] | None = None
) -> list[CellPrediction]:
    """Return what is predicted for each row, in order, whatever table it is of.

    - `profile`: where it was fitted without rows of SparQ's, QuZO's or ZOinfer's tables, those that ship decide their constants.
    - `on_cell`: told of each measurement that was predicted.
    """
    shipped = load_published_profile()
    sparq, quzo, zoinfer = (
        profile.sparq or shipped.sparq,
        profile.quzo or shipped.quzo,
        profile.zoinfer or shipped.zoinfer,
    )
    assert sparq is not None, "the profile that ships has a part of every paper"
    assert quzo is not None, "the profile that ships has a part of every paper"
    assert zoinfer is not None, "the profile that ships has a part of every paper"
    timed = [row for row in rows if row["paper"] not in (SPARQ, QUZO, ZOINFER)]
    reported = iter(answers(timed, profile, on_cell=on_cell))

    def answer(row: PublishedRow) -> CellPrediction:
        if row["paper"] == SPARQ:
            return sparq_answer(row, sparq)
        if row["paper"] == ZOINFER:
            return zoinfer_answer(row, zoinfer)
        return quzo_answer(row, quzo) if row["paper"] == QUZO else next(reported)

    return [answer(row) for row in rows]
