"""Predictions of cases from calibrated profiles, joined with what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from costmodel.rates.profile import Profile
from costmodel.rates.slowdown import at_slowdown, slowdown_in
from costmodel.scoring import Row
from studies.prediction.measuring import MeasuredSteps
from studies.timed_cases import TimedCase
from topology import Topology
from zosim.analysis.compare import ComparedLine, compare
from zosim.planning.predict import PlannedRun
from zosim.program.instructions import Space

_LEAST_CHOICES = 2


@dataclass(frozen=True, kw_only=True)
class PredictedCase(TimedCase):
    """One case, predicted and measured."""

    placement: str
    # predicted_bytes, measured_bytes: peak memory of the device.
    predicted_bytes: int
    measured_bytes: int
    limiter: str  # what the predicted step spends most of its critical path on
    # The instructions' labels, those first that contribute most to the error of the step.
    lines: tuple[ComparedLine, ...]

    @property
    def memory(self) -> Row:
        """Peak memory of the device."""
        return Row(self.name, "device_bytes", self.measured_bytes, self.predicted_bytes)


def predict(
    measured: Sequence[MeasuredSteps], profiles: Mapping[int, Profile], topology: Topology
) -> list[PredictedCase]:
    """Return a row per case, predicted with the profile of its number of threads."""
    return [_predicted(item, profiles[item.case.num_threads], topology) for item in measured]


def _predicted(item: MeasuredSteps, profile: Profile, topology: Topology) -> PredictedCase:
    before, after = (slowdown_in(profile, seconds) for seconds in item.references_s)
    planned = PlannedRun(item.plan, topology, profile)
    prediction = planned.prediction
    return PredictedCase(
        name=item.case.name,
        placement=item.case.placement,
        predicted_s=prediction.step_time_s,
        low_s=prediction.low_s,
        high_s=prediction.high_s,
        measured_s=item.step_s,
        foreign_cores=item.foreign_cores,
        predicted_bytes=planned.timeline.peak_memory(Space.DEVICE).size_bytes,
        measured_bytes=item.device_bytes,
        limiter=prediction.bottleneck.description,
        lines=compare(planned.timeline, item.timeline, planned.program).labels,
        slowed_s=PlannedRun(item.plan, topology, at_slowdown(profile, before)).timeline.step_time_s,
        slowdown_before=before,
        slowdown_after=after,
    )


def case_rows(content: Sequence[Mapping[str, Any]]) -> list[PredictedCase]:
    """Return cases from what JSON has of them; benchmarks of earlier commits have less of each line."""
    known = {field.name for field in fields(PredictedCase)}
    return [
        PredictedCase(
            **{key: row[key] for key in known & row.keys()}
            | {"lines": tuple(ComparedLine(**line) for line in row["lines"])}
        )
        for row in content
    ]


@dataclass(frozen=True)
class Choice:
    """One configuration under all placements that there were to choose from."""

    rows: tuple[PredictedCase, ...]
    limit_bytes: int | None = None  # memory of each device, where it is limited
    again: PredictedCase | None = None  # one of them measured once more, in turn with all

    @classmethod
    def with_and_without_limit(
        cls, rows: tuple[PredictedCase, ...], again: PredictedCase | None = None
    ) -> tuple[Choice, ...]:
        """Return the choice among all, and among the half that needs least memory, as it was predicted."""
        if len(rows) < _LEAST_CHOICES:
            return ()
        middle = sorted(row.predicted_bytes for row in rows)[(len(rows) - 1) // 2]
        return cls(rows, None, again), cls(rows, middle, again)

    @property
    def chosen(self) -> PredictedCase:
        """The placement that was predicted to fit and to be the fastest."""
        return min(self._within(lambda row: row.predicted_bytes), key=lambda row: row.predicted_s)

    @property
    def best(self) -> PredictedCase:
        """The placement that did fit and was the fastest; where none did, the chosen one."""
        fitting = self._within(lambda row: row.measured_bytes) or [self.chosen]
        return min(fitting, key=lambda row: row.measured_s)

    @property
    def keeps_limit(self) -> bool:
        """Whether the chosen placement did fit."""
        return self.limit_bytes is None or self.chosen.measured_bytes <= self.limit_bytes

    @property
    def noise(self) -> float | None:
        """Slower over faster of two measurements of one plan, if there are two: what no prediction can tell apart."""
        if self.again is None:
            return None
        first = next(row for row in self.rows if row.name == self.again.name)
        pair = sorted((first.measured_s, self.again.measured_s))
        return pair[1] / pair[0]

    def _within(self, size_of: Callable[[PredictedCase], int]) -> list[PredictedCase]:
        return [row for row in self.rows if self.limit_bytes is None or size_of(row) <= self.limit_bytes]

    @property
    def regret(self) -> float:
        """Measured time of the chosen placement over that of the best."""
        return self.chosen.measured_s / self.best.measured_s
