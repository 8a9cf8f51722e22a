"""Three predictors without a simulator, for comparison: the paper's own model, a regression, and neighbours.

* ``equations``: DistZO2's equations 3 and 4, ``max(N · T_block, T_comp)`` with its bandwidths and one rate of computing
  per format fitted;
* ``regression``: the logarithm as a robust linear function of those of parameters, batch and sequence, with a dummy per
  method and per precision;
* ``neighbours``: between the nearest known settings of the same method along one axis, linear in logarithms.

Each takes known cells and cells to predict, and returns numbers in the rows' unit, NaN where it has nothing to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import least_squares

from costmodel.formats import FORMATS
from studies.published.cells import Cell
from zosim.simulators.maxplus import Floats

Baseline = Callable[[Sequence[Cell], Sequence[Cell]], Floats]

_SCALE = 0.04


def equations(known: Sequence[Cell], requested: Sequence[Cell]) -> Floats:
    """Return what equations 3 and 4 predict, fitted to `known`."""
    rates = sorted({cell.row["precision"] for cell in (*known, *requested)})
    start = np.log([*(1e14 for _ in rates), 2e10, 2e11])

    def log_predicted(x: Floats, cells: Sequence[Cell]) -> Floats:
        return np.array(
            [
                _by_equations(cell, dict(zip(rates, np.exp(x), strict=False)), *np.exp(x[-2:]))
                for cell in cells
            ]
        )

    printed = _printed(known)
    solution = least_squares(
        lambda x: np.log(log_predicted(x, known)) - printed, start, loss="cauchy", f_scale=_SCALE
    )
    return log_predicted(solution.x, requested)


def _by_equations(cell: Cell, rates: dict[str, float], pcie: float, nvlink: float) -> float:
    plan = cell.case.plan
    mesh, model = plan.mesh, plan.model
    num_forwards = 2 / mesh.perturb * (plan.batch / mesh.data)
    compute_s = 2 * model.num_parameters * plan.seq * num_forwards / rates[cell.row["precision"]]
    blocks = cell.amount if cell.is_transfer else _block_parameters(cell)
    size = blocks * FORMATS[plan.transfer_dtype].element_bytes
    ranks = mesh.world_size
    transfer_s = size / (ranks * pcie) + (ranks - 1) * size / (ranks * nvlink)
    step_s = max(compute_s, transfer_s) if cell.case.method.is_offloaded else compute_s
    return plan.tokens_per_step / step_s


def _block_parameters(cell: Cell) -> float:
    groups = cell.case.plan.model.param_groups
    return float(sum(group.num_parameters for group in groups if group.segments[0].startswith("block")))


def regression(known: Sequence[Cell], requested: Sequence[Cell]) -> Floats:
    """Return what the robust log-linear regression predicts, fitted to `known`."""
    columns = sorted({name for cell in known for name in _dummies(cell)})
    printed = _printed(known)
    matrix = np.array([_features(cell, columns) for cell in known])
    start = np.linalg.lstsq(matrix, printed, rcond=None)[0]
    solution = least_squares(lambda x: matrix @ x - printed, start, loss="cauchy", f_scale=_SCALE)
    predictions = np.exp(np.array([_features(cell, columns) for cell in requested]) @ solution.x)
    is_known = [_dummies(cell) <= set(columns) for cell in requested]
    return np.where(is_known, predictions, np.nan)


def _dummies(cell: Cell) -> set[str]:
    return {f"method {_method(cell)}", f"precision {cell.row['precision']}"}


def _features(cell: Cell, columns: Sequence[str]) -> list[float]:
    plan = cell.case.plan
    sizes = [np.log(plan.model.num_parameters), np.log(plan.batch), np.log(plan.seq)]
    own = _dummies(cell)
    return [*sizes, *(float(name in own) for name in columns)]


def neighbours(known: Sequence[Cell], requested: Sequence[Cell]) -> Floats:
    """Return what lies between the nearest known settings of the same method, first by model size, then by the others."""
    return np.array([_between(cell, known) for cell in requested])


def _between(cell: Cell, known: Sequence[Cell]) -> float:
    for axis in range(3):
        same = [other for other in known if _same_but(cell, other, axis)]
        value = _interpolated(_place(cell)[axis], same, axis)
        if value is not None:
            return value
    return float("nan")


def _interpolated(at: float, same: Sequence[Cell], axis: int) -> float | None:
    points = sorted({_place(other)[axis]: other.printed for other in same}.items())
    below = [point for point in points if point[0] < at]
    above = [point for point in points if point[0] > at]
    pair = [below[-1], above[0]] if below and above else (below[-2:] or above[:2])
    if len(pair) < 2:
        return None
    (low, first), (high, second) = ((x, np.log(value)) for x, value in pair)
    return float(np.exp(first + (second - first) * (at - low) / (high - low)))


def _place(cell: Cell) -> tuple[float, float, float]:
    plan = cell.case.plan
    return np.log(plan.model.num_parameters), np.log(plan.batch), np.log(plan.seq)


def _same_but(cell: Cell, other: Cell, axis: int) -> bool:
    here, there = _place(cell), _place(other)
    rest = [here[k] == there[k] for k in range(3) if k != axis]
    alike = _method(cell) == _method(other) and cell.row["precision"] == other.row["precision"]
    return (
        all(rest)
        and alike
        and cell.case.plan.model.family == other.case.plan.model.family
        and here[axis] != there[axis]
    )


def _method(cell: Cell) -> str:
    return f"{cell.case.method.describe()} on {cell.row['gpus']}, {cell.row['quantity']}"


def _printed(cells: Sequence[Cell]) -> Floats:
    return np.log([cell.printed for cell in cells])


BASELINES: dict[str, Baseline] = {
    "the paper's Eq. 3-4, bandwidths fitted": equations,
    "log-linear regression": regression,
    "neighbour interpolation": neighbours,
}
