"""Answers to rows of SparQ's tables."""

from __future__ import annotations

import math

from studies.published.predicting import CellPrediction
from studies.published.rows import PublishedRow, RowsError
from studies.published.sparq import (
    KEPT,
    MESSAGES,
    VOLUME,
    NotPredicted,
    VolumeCase,
    volume_case,
)
from studies.published.sparq_fit import SparqFit
from studies.published.sparq_memory import PEAK, peak_case, peak_gib
from studies.published.sparq_volumes import predicted_volume


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
    gib, largest = peak_gib(peak_case(row), fit.peaks.values)
    factor = math.exp(fit.peaks.half_width)
    note = f"{gib:.3g} GiB before it is printed in whole ones"
    low, high = max(math.floor(gib / factor), 1), math.ceil(gib * factor)
    return CellPrediction(max(round(gib), 1), low, high, largest, note)
