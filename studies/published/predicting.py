"""Predictions for rows: a number with an interval in the row's unit and what limits it, or the reason for none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from studies.published.cells import Cell, cells_of
from studies.published.constants import Domain, Values, undecided
from studies.published.conventions import MEBIBYTE, prefetches
from studies.published.fitted_profile import FoundFit, PublishedProfile
from studies.published.fitting import predictor
from studies.published.memory import parts_of, predicted_mib
from studies.published.rows import PublishedRow

_STEP = 1e-3
Z90 = 1.645

COLUMNS = ("predicted", "low", "high", "bottleneck", "prediction_note")

CAUSES = {
    "matmul": "matrix products",
    "attention": "attention",
    "elementwise": "passes over activations",
    "exponential": "exponentials",
    "param_pass": "passes over parameters",
    "sampling": "random numbers",
    "kernels": "kernel starts",
    "dispatch": "kernel launches",
    "allocation": "allocation",
    "pcie": "PCIe copies",
    "nvlink": "NVLink exchange",
    "overhead": "host",
}
"""What a limiter is called in predictions."""


@dataclass(frozen=True)
class CellPrediction:
    """What is predicted for one row."""

    # predicted, low, high: in the row's unit, with the ends of the 90 % interval; None where there is no prediction.
    predicted: float | None = None
    low: float | None = None
    high: float | None = None
    bottleneck: str = ""  # what takes most of the step, or most of the memory
    note: str = ""  # why there is no prediction, or what to know about it

    def columns(self) -> dict[str, str]:
        """Return the columns that predictions append to a row."""
        numbers = [
            "" if number is None else f"{number:.6g}" for number in (self.predicted, self.low, self.high)
        ]
        return dict(zip(COLUMNS, (*numbers, self.bottleneck, self.note), strict=True))


def answers(
    rows: Sequence[PublishedRow], profile: PublishedProfile, *, on_cell: Callable[[], None] | None = None
) -> list[CellPrediction]:
    """Return what is predicted for each row, in order. What their `value` holds does not matter.

    `on_cell`: told of each measurement that was predicted.
    """
    cells, of_row, reasons = cells_of([replace(row, fields={**row.fields, "value": ""}) for row in rows])
    by_key: dict[tuple[object, ...], CellPrediction] = {}
    for cell in cells:
        by_key[cell.key] = _answer(cell, profile)
        if on_cell is not None:
            on_cell()
    return [
        by_key[of_row[index].key] if index in of_row else CellPrediction(note=reasons[index])
        for index in range(len(rows))
    ]


def _answer(cell: Cell, profile: PublishedProfile) -> CellPrediction:
    domain: Domain = "memory" if cell.row.kind == "memory" else "speed"
    fit = profile.fit(cell.row["paper"], domain)
    if fit is None:
        return CellPrediction(note=f"the profile was fitted without rows on {domain} of {cell.row['paper']}")
    lacking = "" if cell.is_transfer else _lacking(cell, profile)
    if lacking and domain == "speed":
        return CellPrediction(bottleneck="device memory", note=lacking)
    predicted, half = interval(cell, fit)
    return CellPrediction(
        predicted,
        predicted * float(np.exp(-half)),
        predicted * float(np.exp(half)),
        _bottleneck(cell, fit),
        lacking or _remark(cell),
    )


def interval(cell: Cell, fit: FoundFit) -> tuple[float, float]:
    """Return the prediction and the half width of its 90 % interval in logs.

    Residuals of rows like this one, the uncertainty of the constants, and what no row decides add up as independent
    errors.
    """
    names = list(fit.values)
    x = np.log([fit.values[name] for name in names])
    points = [x, *(x + _STEP * unit for unit in np.eye(len(x)))]
    sets: list[Values] = [dict(zip(names, np.exp(point).tolist(), strict=True)) for point in points]
    predicted = predictor(fit.domain)(cell, sets)
    slopes = (np.log(predicted[1:]) - np.log(predicted[0])) / _STEP
    variance = float(slopes @ fit.matrix @ slopes)
    known = np.hypot(fit.half_width(cell.group), Z90 * np.sqrt(variance))
    return float(predicted[0]), float(np.hypot(known, _undecided_half_width(cell, fit, float(predicted[0]))))


def _undecided_half_width(cell: Cell, fit: FoundFit, predicted: float) -> float:
    if fit.domain == "memory":
        return 0.0
    plan = cell.case.plan
    others = undecided(
        cell.row["paper"], fit.values, hidden_size=plan.model.hidden_size, compute=plan.compute_dtype
    )
    predictions = [float(cell.predictions([values])[0]) for values in others]
    return float(max((abs(np.log(other / predicted)) for other in predictions), default=0.0))


def _lacking(cell: Cell, profile: PublishedProfile) -> str:
    """Return why the cell does not fit its device; nothing if it does, or if that is not known."""
    fit = profile.fit(cell.row["paper"], "memory")
    if fit is None:
        return ""
    needed = float(predicted_mib(cell, [fit.values])[0])
    available = cell.case.capacity_bytes / MEBIBYTE
    if needed <= available:
        return ""
    return f"out of memory: needs {needed:,.0f} MiB, the GPU has {available:,.0f} MiB"


def _bottleneck(cell: Cell, fit: FoundFit) -> str:
    if fit.domain == "memory":
        return parts_of(cell.case).largest(fit.values)
    causes = cell.compiled.seconds_by_cause(cell.machine(fit.values))
    largest = max(causes, key=causes.__getitem__)
    return CAUSES.get(largest, largest)


def _remark(cell: Cell) -> str:
    if cell.is_transfer or prefetches(cell.case):
        return ""
    return "uploads taken as not hidden, as in this table's other rows"
