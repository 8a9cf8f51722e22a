"""Which model answers a row: by the paper whose table it is of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from studies.published.fitted_profile import PublishedProfile, load_published_profile
from studies.published.predicting import CellPrediction, answers
from studies.published.rows import PublishedRow
from studies.published.sparq import PAPER
from studies.published.sparq_predicting import sparq_answer


def answers_of_all(
    rows: Sequence[PublishedRow], profile: PublishedProfile, *, on_cell: Callable[[], None] | None = None
) -> list[CellPrediction]:
    """Return what is predicted for each row, in order, whatever table it is of.

    Parameters
    ----------
    rows : sequence of PublishedRow
    profile : PublishedProfile
        Where it was fitted without rows of SparQ's tables, those that ship decide their constants.
    on_cell : callable, optional
        Told of each measurement that was predicted.
    """
    fit = profile.sparq or load_published_profile().sparq
    assert fit is not None, "the profile that ships has a part of every paper"
    others = [row for row in rows if row["paper"] != PAPER]
    said = iter(answers(others, profile, on_cell=on_cell))
    return [sparq_answer(row, fit) if row["paper"] == PAPER else next(said) for row in rows]
