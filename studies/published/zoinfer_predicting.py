"""Answers to rows of ZOinfer's tables."""

from __future__ import annotations

import math

from studies.published.posterior import TableFit
from studies.published.predicting import CellPrediction
from studies.published.rows import PublishedRow, RowsError
from studies.published.sparq import NotPredicted
from studies.published.zoinfer import HOURS, SPEEDUPS, STEPS, predicted, zoinfer_case


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
