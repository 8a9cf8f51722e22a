"""What is known and what is asked: between settings, and beyond them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.stats import spearmanr

from costmodel.scoring import Row, Score
from studies.against_print.intervals import Coverage, beyond, coverage_of, left_out
from studies.published.audit import AuditFinding, set_apart
from studies.published.baselines import BASELINES, Baseline
from studies.published.cells import Cell
from studies.published.constants import Domain
from studies.published.rows import PublishedRow
from zosim.simulators.maxplus import Floats

OURS = "simulator's closed form"

LEAST_METHODS = 4
"""Cells of a printed row below which their order says little."""

_OUTERMOST = ("OPT-1.3B", "OPT-175B", "Qwen3-1.7B", "Qwen3-32B")
_SMALL = ("OPT-1.3B", "OPT-2.7B", "OPT-6.7B", "Qwen3-1.7B", "Qwen3-4B")


def _setting(cell: Cell) -> Hashable:
    return cell.row.setting


def _model(cell: Cell) -> Hashable:
    return cell.row["model"]


def _any(_: Cell) -> bool:
    return True


def _is_between(cell: Cell) -> bool:
    return cell.row["model"] not in _OUTERMOST


@dataclass(frozen=True)
class HeldOutSplit:
    """A way of keeping rows back."""

    name: str
    paper: str
    domain: Domain
    goal: tuple[float, float] | None  # median and 90th percentile of the absolute error
    # Which cells are known; None to leave out one group of cells at a time.
    knows: Callable[[Cell], bool] | None = None
    group: Callable[[Cell], Hashable] = _setting  # what tells groups apart: by default settings
    asks: Callable[[Cell], bool] = _any  # which of the cells that are not known are asked for


SPLITS = (
    HeldOutSplit("DistZO2 throughput, one setting left out", "DistZO2", "speed", (0.015, 0.045)),
    HeldOutSplit(
        "DistZO2 throughput, from s = 2048 and BS 4-6",
        "DistZO2",
        "speed",
        (0.03, 0.1),
        lambda cell: cell.is_transfer or (cell.case.plan.seq == 2048 and 4 <= cell.case.plan.batch <= 6),
    ),
    HeldOutSplit(
        "DistZO2 throughput, from 6.7B and less",
        "DistZO2",
        "speed",
        (0.03, 0.1),
        lambda cell: cell.row["model"] in _SMALL,
    ),
    HeldOutSplit("ZO2 throughput, one setting left out", "ZO2", "speed", (0.03, 0.09)),
    HeldOutSplit(
        "DistZO2 throughput, one model left out", "DistZO2", "speed", None, group=_model, asks=_is_between
    ),
    HeldOutSplit("ZO2 throughput, one model left out", "ZO2", "speed", None, group=_model, asks=_is_between),
    HeldOutSplit("DistZO2 memory, one setting left out", "DistZO2", "memory", (0.02, 0.07)),
    HeldOutSplit("ZO2 memory, one setting left out", "ZO2", "memory", (0.04, 0.12)),
)


@dataclass(frozen=True)
class SplitOutcome:
    """Errors of one predictor on one split."""

    split: HeldOutSplit
    predictor: str
    score: Score  # of the cells that can be right, under the names of split and predictor
    apart: Score  # of the cells that are scored apart
    # Of those that can be right and whose model is neither the smallest nor the largest of its paper: what lies between
    # others.
    inner: Score
    # Mean over printed rows of Spearman's correlation of the methods in a row, four or more of them that can be right;
    # what print does not tell apart counts as in the order predicted.
    rank_correlation: float
    strict_correlation: float  # the same with all cells in, equal numbers sharing the mean of their ranks
    coverage: Coverage | None = None  # of the 90 % intervals, where the predictor has any

    @property
    def meets_goal(self) -> bool:
        """Whether median and 90th percentile are within the goal; also where there is none."""
        return self.split.goal is None or self.score.meets(self.split.goal)


def outcomes(
    split: HeldOutSplit, cells: Sequence[Cell], findings: Sequence[AuditFinding]
) -> list[SplitOutcome]:
    """Return how each predictor does on a split; `cells` are those of its paper and domain with printed values."""
    requested = [
        cell
        for cell in cells
        if not cell.is_transfer and split.asks(cell) and (split.knows is None or not split.knows(cell))
    ]
    apart = set_apart(findings)
    if split.knows is None:
        reported = left_out(cells, requested, split.paper, split.domain, split.group, apart)
    else:
        reported = beyond(
            [cell for cell in cells if split.knows(cell)], requested, split.paper, split.domain, apart
        )
    results = [
        replace(
            _outcome(split, OURS, requested, reported.predicted, apart),
            coverage=coverage_of(reported, requested, apart),
        )
    ]
    if split.domain == "speed":
        for name, baseline in BASELINES.items():
            results.append(
                _outcome(split, name, requested, _theirs(split, cells, requested, baseline), apart)
            )
    return results


def _theirs(
    split: HeldOutSplit, cells: Sequence[Cell], requested: Sequence[Cell], baseline: Baseline
) -> Floats:
    rates = [cell for cell in cells if not cell.is_transfer]
    if split.knows is not None:
        return baseline([cell for cell in rates if split.knows(cell)], requested)
    predictions = np.full(len(requested), np.nan)
    groups = [split.group(cell) for cell in requested]
    for group in dict.fromkeys(groups):
        mine = [index for index, other in enumerate(groups) if other == group]
        known = [cell for cell in rates if split.group(cell) != group]
        predictions[mine] = baseline(known, [requested[index] for index in mine])
    return predictions


def _outcome(
    split: HeldOutSplit, name: str, requested: Sequence[Cell], predicted: Floats, apart: frozenset[str]
) -> SplitOutcome:
    reported = [value if np.isfinite(value) else None for value in predicted.tolist()]
    rows = [
        Row(cell.row.place, cell.row["quantity"], cell.printed, value)
        for cell, value in zip(requested, reported, strict=True)
    ]
    possible = [row for row in rows if row.case not in apart]
    inner = {cell.row.place for cell in requested if _is_between(cell)}
    return SplitOutcome(
        split,
        name,
        Score.of(possible, f"{split.name}; {name}"),
        Score.of(row for row in rows if row.case in apart),
        Score.of(row for row in possible if row.case in inner),
        mean_rank_correlation(requested, predicted, apart),
        mean_rank_correlation(requested, predicted, frozenset(), is_strict=True),
    )


def mean_rank_correlation(
    requested: Sequence[Cell], predicted: Floats, apart: frozenset[str], *, is_strict: bool = False
) -> float:
    """Return the mean over printed rows of Spearman's correlation of printed and predicted numbers.

    - `predicted`: NaN where nothing is.
    - `apart`: places of cells that are not ranked.
    - `is_strict`: whether equal numbers share the mean of their ranks in print too. Otherwise what print does not tell apart
      counts as in the order predicted.
    """
    rows: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for cell, value in zip(requested, predicted.tolist(), strict=True):
        if np.isfinite(value) and cell.row.place not in apart:
            for row in cell.rows:
                assert row.value is not None
                rows.setdefault(_printed_row(row), []).append((row.value, value))
    correlations = [
        _correlation(np.array(pairs), is_strict=is_strict)
        for pairs in rows.values()
        if len(pairs) >= LEAST_METHODS and all(len(set(column)) > 1 for column in zip(*pairs, strict=True))
    ]
    return float(np.mean(correlations)) if correlations else float("nan")


def _printed_row(row: PublishedRow) -> tuple[str, ...]:
    return (*row.setting, row["table"], row["cell"].partition("c")[0])


def _correlation(pairs: Floats, *, is_strict: bool) -> float:
    """Return Spearman's correlation of printed and predicted numbers, given as pairs."""
    # Sorted by print first, then as predicted; places in that order stand for what is printed.
    _, order = np.unique(pairs, axis=0, return_inverse=True)
    return float(spearmanr(pairs[:, 0] if is_strict else order.ravel(), pairs[:, 1]).statistic)
