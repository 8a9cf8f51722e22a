"""Which model answers a row: by the paper whose table it is of."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from studies.published.fitted_profile import PublishedProfile, load_published_profile
from studies.published.posterior import TableFit
from studies.published.predicting import CellPrediction, answers
from studies.published.quzo import PAPER as QUZO
from studies.published.quzo_predicting import quzo_answer
from studies.published.rows import PublishedRow, RowsError
from studies.published.sparq import PAPER as SPARQ
from studies.published.sparq import NotPredicted
from studies.published.sparq_predicting import sparq_answer
from studies.published.zoinfer import HOURS, SPEEDUPS, STEPS, predicted, zoinfer_case
from studies.published.zoinfer import PAPER as ZOINFER


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

    Parameters
    ----------
    profile : PublishedProfile
        Where it was fitted without rows of SparQ's, QuZO's or ZOinfer's tables, those that ship decide their constants.
    on_cell : callable, optional
        Told of each measurement that was predicted.
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
