"""Predictions of cases from calibrated profiles, joined with what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from costmodel.rates.pace import at_pace, pace_in
from costmodel.rates.profile import Profile
from studies.prediction.measuring import MeasuredSteps
from topology import Topology
from zosim.analysis.compare import ComparedLine, compare
from zosim.hardware.machine import Machine
from zosim.lowering import lower
from zosim.planning.predict import Subject
from zosim.program.instructions import Space
from zosim.simulators.simulate import simulate

_LEAST_CHOICES = 2
PACE_CHANGED = 0.1
"""Part by which the pace after a case may differ from that before it."""


class Paced:
    """A measured step, with how fast the machine was just before it and just after it.

    Attributes
    ----------
    paced_s, measured_s : float
        Step time predicted for the pace before it, and measured.
    pace_before, pace_after : float
        Seconds of a fixed piece of work, over what it takes at full pace: 1 or more.
    """

    paced_s: float
    measured_s: float
    pace_before: float
    pace_after: float

    @property
    def paced_error(self) -> float:
        """Step time that was predicted for the pace before it, over the measured one, less 1."""
        return self.paced_s / self.measured_s - 1

    @property
    def is_disturbed(self) -> bool:
        """Whether the pace after the step differs from that before it by more than :data:`PACE_CHANGED`."""
        return abs(self.pace_after / self.pace_before - 1) > PACE_CHANGED


@dataclass(frozen=True)
class PredictedCase(Paced):
    """One case, predicted and measured.

    Attributes
    ----------
    name, placement : str
    predicted_s, low_s, high_s : float
        Step time, with the constants' intervals.
    measured_s : float
    foreign_cores : float
        Cores that other processes used while this was measured.
    predicted_bytes, measured_bytes : int
        Peak memory of the device.
    limiter : str
        What the predicted step spends most of its critical path on.
    lines : tuple of ComparedLine
        The instructions' labels, those first that contribute most to the error of the step.
    paced_s : float
        Step time predicted for the pace that the machine had before the case.
    pace_before, pace_after : float
        What the reference took before the rounds of the case and after them, as times what it takes at full pace.
    """

    name: str
    placement: str
    predicted_s: float
    low_s: float
    high_s: float
    measured_s: float
    foreign_cores: float
    predicted_bytes: int
    measured_bytes: int
    limiter: str
    lines: tuple[ComparedLine, ...]
    paced_s: float
    pace_before: float
    pace_after: float

    @property
    def step_error(self) -> float:
        """Predicted over measured step time, less 1."""
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float:
        """Predicted over measured peak, less 1."""
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def is_covered(self) -> bool:
        """Whether the measured step time lies in the predicted interval."""
        return self.low_s <= self.measured_s <= self.high_s


def predict(
    measured: Sequence[MeasuredSteps], profiles: Mapping[int, Profile], topology: Topology, device: str
) -> list[PredictedCase]:
    """Return a row per case, predicted with the profile of its number of threads."""
    machines = {
        threads: Machine.from_topology(topology, device, profile) for threads, profile in profiles.items()
    }
    rows = []
    for item in measured:
        profile = profiles[item.case.num_threads]
        paces = _paces(item, profile)
        there = Machine.from_topology(topology, device, at_pace(profile, paces[0]))
        paced_s = simulate(lower(item.plan), there).step_time_s
        rows.append(_row(item, machines[item.case.num_threads], paced_s, paces))
    return rows


def _paces(item: MeasuredSteps, profile: Profile) -> tuple[float, float]:
    """Return the machine's pace before a case and after it."""
    before_s, after_s = item.references_s
    return pace_in(profile, before_s), pace_in(profile, after_s)


def predict_ranks(
    measured: Sequence[MeasuredSteps], profile: Profile, topology: Topology
) -> list[PredictedCase]:
    """Return a row per case of several ranks, predicted with the profile of one thread."""
    return [_row_of_ranks(item, topology, profile) for item in measured]


def _row_of_ranks(item: MeasuredSteps, topology: Topology, profile: Profile) -> PredictedCase:
    subject, paces = Subject(item.plan, topology, profile), _paces(item, profile)
    prediction = subject.prediction
    compared = compare(subject.timeline, item.timeline, subject.program)
    return PredictedCase(
        name=item.case.name,
        placement=item.case.placement,
        predicted_s=prediction.step_time_s,
        low_s=prediction.low_s,
        high_s=prediction.high_s,
        measured_s=item.step_s,
        foreign_cores=item.foreign_cores,
        predicted_bytes=subject.footprints.ranks[0].device_bytes,
        measured_bytes=item.device_bytes,
        limiter=prediction.bottleneck.words,
        lines=compared.labels,
        paced_s=Subject(item.plan, topology, at_pace(profile, paces[0])).timeline.step_time_s,
        pace_before=paces[0],
        pace_after=paces[1],
    )


@dataclass(frozen=True)
class Choice:
    """One configuration under all placements that there were to choose from.

    Attributes
    ----------
    rows : tuple of PredictedCase
    limit_bytes : int or None
        Memory of each device, where it is limited.
    again : PredictedCase or None
        One of them measured once more, in turn with all.
    """

    rows: tuple[PredictedCase, ...]
    limit_bytes: int | None = None
    again: PredictedCase | None = None

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


def _row(item: MeasuredSteps, machine: Machine, paced_s: float, paces: tuple[float, float]) -> PredictedCase:
    program = lower(item.plan)
    central = simulate(program, machine)
    low, high = (simulate(program, machine, bound=bound).step_time_s for bound in ("low", "high"))
    compared = compare(central, item.timeline, program)
    return PredictedCase(
        name=item.case.name,
        placement=item.case.placement,
        predicted_s=central.step_time_s,
        low_s=low,
        high_s=high,
        measured_s=item.step_s,
        foreign_cores=item.foreign_cores,
        predicted_bytes=central.peak_memory(Space.DEVICE).size_bytes,
        measured_bytes=item.device_bytes,
        limiter=compared.predicted_bottleneck,
        lines=compared.labels,
        paced_s=paced_s,
        pace_before=paces[0],
        pace_after=paces[1],
    )
