"""Cases whose steps were predicted and then run on this machine: as rows, and what reports say of them.

A machine's pace changes within minutes (docs/decisions/0017-slowdown-of-a-machine.md). So a case has two predictions: for the pace of the
calibration, and for the one that was found just before it ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from costmodel.scoring import Row, Score
from zosim.analysis.scoreboard import score_table
from zosim.report import Table

SLOWDOWN_CHANGED = 0.1
"""Part by which the pace after a case may differ from that before it."""


@dataclass(frozen=True, kw_only=True)
class TimedCase:
    """One case, predicted and measured."""

    name: str
    # predicted_s, low_s, high_s: step time, with the constants' intervals.
    predicted_s: float
    low_s: float
    high_s: float
    measured_s: float
    foreign_cores: float  # cores that other processes used while this was measured
    slowed_s: float  # step time predicted for the pace that the machine had before the case
    # slowdown_before, slowdown_after: seconds of a fixed piece of work before and after, over what it takes at full pace.
    slowdown_before: float
    slowdown_after: float

    @property
    def step(self) -> Row:
        """The step time, as it is predicted from the calibration."""
        return Row(self.name, "step_s", self.measured_s, self.predicted_s, self.low_s, self.high_s)

    @property
    def paced(self) -> Row:
        """The step time, as it is predicted for the pace before the case."""
        return Row(self.name, "step_at_pace_s", self.measured_s, self.slowed_s)

    @property
    def is_disturbed(self) -> bool:
        """Whether the pace after the step differs from that before it by more than :data:`SLOWDOWN_CHANGED`."""
        return abs(self.slowdown_after / self.slowdown_before - 1) > SLOWDOWN_CHANGED


CaseT = TypeVar("CaseT", bound=TimedCase)
Groups = Mapping[str, Callable[[CaseT], bool]]
"""By name, which cases belong to a group; a case may belong to several."""


def grouped(cases: Sequence[CaseT], groups: Groups[CaseT]) -> dict[str, list[CaseT]]:
    """Return the cases of every group that has any."""
    lists = {name: [case for case in cases if belongs(case)] for name, belongs in groups.items()}
    return {name: chosen for name, chosen in lists.items() if chosen}


def scored(lists: Mapping[str, Sequence[CaseT]], row_of: Callable[[CaseT], Row]) -> list[Score]:
    """Return the score of one quantity over each list that has cases."""
    return [Score.of(map(row_of, cases), name) for name, cases in lists.items() if cases]


def step_tables(lists: Mapping[str, Sequence[CaseT]], goal: tuple[float, float]) -> Iterator[Table]:
    """Yield scores of step times over lists of cases: as calibrated, with the goal of the first list, and at the pace before each case."""
    goals = {next(iter(lists)): goal}
    yield score_table(scored(lists, lambda case: case.step), "cases", goals=goals, title="Step time")
    paced = scored(lists, lambda case: case.paced)
    yield score_table(paced, "cases", title="Step time, at the pace before each case")


def describe_slowdown(own: str, cases: Sequence[TimedCase]) -> str:
    """Return what the slowdown is, and what it was while calibrating (`own`) and before cases."""
    return (
        "The slowdown is the time of a reference computation over its time on an undisturbed core: "
        f"{own} while calibrating, {median(case.slowdown_before for case in cases):.2f} in the median before "
        f"cases. In undisturbed cases it changed by at most {SLOWDOWN_CHANGED:.0%}."
    )


def case_columns() -> dict[str, Callable[[TimedCase], str]]:
    """Return columns of a table of cases, beside what is predicted and measured."""
    return {
        "pace before": lambda case: f"{case.slowdown_before:.2f}",
        "after": lambda case: f"{case.slowdown_after:.2f}",
        "at that pace": lambda case: f"{case.paced.error:+.1%}",
    }
