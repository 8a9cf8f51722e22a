"""The exercise: find the wrong constant behind a comparison. Start from ``stub.py``; :func:`check` says how it went."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from studies.exercises import Grade
from studies.reading_predictions.cases import TERMS, Reading, on_cpu, rows_of

Diagnose = Callable[[Sequence[Reading]], tuple[str, float]]
"""From a step's rows to the cause that is predicted wrongly, and how many times as long it takes."""

FUNCTION = "diagnose"
"""Name of the function in a solution's file."""

_CASES = (
    ("opt-125m", 64, "sampling", 3.0),
    ("opt-125m", 256, "matmul", 1.7),
    ("opt-125m", 64, "param_pass", 0.4),
    ("opt-10m", 64, "dispatch", 4.0),
    ("opt-10m", 256, "elementwise", 5.0),
    ("opt-125m", 64, "matmul", 0.6),
)
"""Model, tokens, and what is wrong: not always what takes longest, nor what is predicted too short."""

_TOLERANCE = 0.1


def check(diagnose: Diagnose) -> Grade:
    """Return whether `diagnose` names the wrong cause and its factor in several runs, and if not, what to look at."""
    for number, (model, seq, term, times) in enumerate(_CASES, start=1):
        rows = rows_of(on_cpu(model, seq=seq), term, times, seed=number)
        complaint = _complaint(diagnose(rows), rows, term, times)
        if complaint:
            return Grade(
                False,
                f"run {number} of {len(_CASES)} ({model}, {seq} tokens): {complaint}",
                (number - 1) / len(_CASES),
            )
    return Grade(True, f"{len(_CASES)} wrong constants found, each with its factor")


def _complaint(answer: object, rows: Sequence[Reading], term: str, times: float) -> str:
    """Return what is wrong with a diagnosis, or nothing."""
    if not (isinstance(answer, tuple | list) and len(answer) == 2 and isinstance(answer[1], int | float)):
        return "return a cause and a factor, such as ('sampling', 2.0)"
    named, factor = answer
    if named not in TERMS:
        return f"{named!r} is none of {', '.join(TERMS)}"
    if named != term:
        return _why_not(named, rows)
    if abs(factor / times - 1) <= _TOLERANCE:
        return ""
    whole = sum(row.measured_s for row in rows) / sum(row.predicted_s for row in rows)
    if abs(factor / whole - 1) < _TOLERANCE or factor == 0:
        return (
            f"{named} is it, but {factor:.3g} is the ratio of whole steps; what else is in the step is right"
        )
    if abs(factor * times - 1) < _TOLERANCE:
        return f"{named} is it, but {factor:.3g} is upside down: measured over predicted"
    return f"{named} is it, but it does not take {factor:.3g} times as long: take off what else is in each row first"


def _why_not(named: str, rows: Sequence[Reading]) -> str:
    """Return a row that speaks against a cause."""
    without = [row for row in rows if row.terms.get(named, 0.0) < 0.01 * row.predicted_s]
    off = max(without, key=lambda row: abs(row.measured_s - row.predicted_s), default=None)
    if off is not None and abs(off.measured_s / off.predicted_s - 1) > _TOLERANCE:
        return (
            f"it is not {named}: {off.instruction} has next to none of it, and was measured at "
            f"{off.measured_s / off.predicted_s:.2f} times its prediction"
        )
    most = max(rows, key=lambda row: row.terms.get(named, 0.0) / row.predicted_s)
    return (
        f"it is not {named}: look at {most.instruction}, which is {most.terms.get(named, 0.0) / most.predicted_s:.0%} "
        f"{named} and was measured at {most.measured_s / most.predicted_s:.2f} times its prediction, beside the others"
    )
