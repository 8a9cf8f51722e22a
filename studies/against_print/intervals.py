"""What the simulator says about cells that no constant was fitted to, and how often its intervals hold them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from costmodel.scoring import coverage_band
from studies.published.cells import Cell
from studies.published.constants import Domain
from studies.published.fitted_profile import LEAST_IN_GROUP, fitted_with_intervals, load_published_profile
from studies.published.fitting import COVERAGE, Solution, conformal_half_width, fit, refitted
from studies.published.predicting import Z90, interval
from zosim.simulators.maxplus import Floats


@dataclass(frozen=True)
class PredictedCells:
    """Predictions with their intervals."""

    predicted: Floats  # in the rows' unit
    half_widths: Floats  # of the 90 % intervals, in logs


@dataclass(frozen=True)
class Coverage:
    """How often 90 % intervals hold what is printed."""

    # num_cells, num_configurations: without the cells set apart. A configuration is all methods of one setting.
    num_cells: int
    num_configurations: int
    # cells, configurations: part of the cells that lie within theirs, and the mean of that part over configurations.
    cells: float
    configurations: float
    band: tuple[float, float]  # where 95 % of parts lie if each configuration held with probability 0.9
    width: float  # median of high over low, less 1

    @property
    def is_in_band(self) -> bool:
        """Whether the configurations' part lies within the band."""
        return self.band[0] <= self.configurations <= self.band[1]


def left_out(
    cells: Sequence[Cell],
    requested: Sequence[Cell],
    paper: str,
    domain: Domain,
    group: Callable[[Cell], Hashable],
    apart: frozenset[str],
) -> PredictedCells:
    """Return what is said about `requested` when each one's group of cells was left out of the fit.

    Half widths, too, come from the residuals of the other groups alone.
    """
    shipped = load_published_profile().fit(paper, domain)
    # It was fitted to the same rows, so the search begins where it ends.
    solution = fit(cells, paper, domain, start=shipped.values if shipped else None)
    residuals = refitted(solution, domain, group)
    place = {id(cell): index for index, cell in enumerate(solution.cells)}
    indices = [place[id(cell)] for cell in requested]
    predicted = [
        cell.printed * np.exp(residuals[index]) for cell, index in zip(requested, indices, strict=True)
    ]
    groups = [group(cell) for cell in solution.cells]
    widths = [_half_width(solution, residuals, index, groups, apart) for index in indices]
    return PredictedCells(np.array(predicted), np.array(widths))


def _half_width(
    solution: Solution, residuals: Floats, index: int, groups: Sequence[Hashable], apart: frozenset[str]
) -> float:
    cell, slopes = solution.cells[index], solution.jacobian[index]
    others = [
        other
        for other, known in enumerate(solution.cells)
        if groups[other] != groups[index] and known.row.place not in apart
    ]
    alike = [other for other in others if solution.cells[other].group == cell.group]
    chosen = alike if len(alike) >= LEAST_IN_GROUP else others
    uncertainty = Z90 * np.sqrt(float(slopes @ solution.covariance @ slopes))
    return float(np.hypot(conformal_half_width(residuals[chosen].tolist()), uncertainty))


def beyond(
    known: Sequence[Cell], requested: Sequence[Cell], paper: str, domain: Domain, apart: frozenset[str]
) -> PredictedCells:
    """Return what a profile of the `known` cells says about `requested`."""
    fitted = fitted_with_intervals(fit(known, paper, domain), paper, domain, apart)
    reported = [interval(cell, fitted) for cell in requested]
    return PredictedCells(np.array([item[0] for item in reported]), np.array([item[1] for item in reported]))


def coverage_of(reported: PredictedCells, requested: Sequence[Cell], apart: frozenset[str]) -> Coverage:
    """Return how often the intervals hold what the cells print."""
    printed = np.log([cell.printed for cell in requested])
    holds = np.abs(np.log(reported.predicted) - printed) <= reported.half_widths
    counts = np.array([cell.row.place not in apart for cell in requested])
    by_setting: dict[tuple[str, ...], list[bool]] = {}
    for index in np.flatnonzero(counts).tolist():
        by_setting.setdefault(requested[index].row.setting, []).append(bool(holds[index]))
    number = len(by_setting)
    return Coverage(
        num_cells=int(counts.sum()),
        num_configurations=number,
        cells=float(holds[counts].mean()),
        configurations=float(np.mean([np.mean(part) for part in by_setting.values()])),
        band=coverage_band(number, COVERAGE),
        width=float(np.median(np.asarray(np.exp(2 * reported.half_widths[counts]) - 1))),
    )
