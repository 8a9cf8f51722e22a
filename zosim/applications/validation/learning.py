"""Measurements of kernels and copies, a row each, as what a calibration learns from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from costmodel.devices.datasheet import sustained
from costmodel.estimate import CopyDirection, device_s, estimate
from costmodel.param_passes import copy_work
from costmodel.rates.calibration import FitReport, fit_profile
from costmodel.rates.measurement import Measurement
from costmodel.rates.profile import Constant, Profile
from topology.errors import ProfileError, ZosimError
from zosim.applications.validation import kernels
from zosim.applications.validation.measured_machines import MeasuredMachine, MeasuredMachines
from zosim.applications.validation.rows import MeasuredRow, read_rows

_LAUNCHING = ("dispatch_s", "product_s")
"""What rows of kernels leave out: they count no launches."""


@dataclass(frozen=True)
class Lesson:
    """What measurements say about one constant."""

    name: str
    unit: str
    before: float
    after: float
    sources: Counter[str]  # how many of the measurements that depend on it each source published

    @property
    def source(self) -> str:
        """Sources with their numbers of measurements, most first."""
        return ", ".join(f"{source} ({count})" for source, count in self.sources.most_common())


def learned_from_rows(path: Path, hardware: str | None = None) -> tuple[Profile, FitReport, list[Lesson]]:
    """Return the profile that rows of one device teach, how well it explains them, and what was learnt from what.

    - `path`: rows as ``zosim validate`` takes them; topology files that they name lie beside it.
    - `hardware`: learn from the rows of this machine alone.

    Raises ProfileError if no row is of a kernel or a copy, or they are of several devices.
    Raises RowsError or TopologyError if rows or machines cannot be read.

    The fit starts from the data sheet, whose intervals hold what rows leave open. Rows with a flag are not learnt from,
    nor are whole passes and steps: what a framework adds to them is no property of the device.
    """
    measured_machines = MeasuredMachines(path.parent)
    rows = [row for row in read_rows(path) if _teaches(row) and hardware in (None, row["hardware"])]
    by_device: dict[str, list[MeasuredRow]] = {}
    for row in rows:
        by_device.setdefault(measured_machines.of(row["hardware"]).profile.device_name, []).append(row)
    if not by_device:
        of = "" if hardware is None else f" of {hardware}"
        raise ProfileError(
            f"{path} has no measured kernel or copy{of} to fit rates to",
            hint=f"types of rows: {', '.join((*kernels.WORKS, 'copy'))}; rows with a flag are ignored",
        )
    if len(by_device) > 1:
        counts = ", ".join(f"{name} ({len(own)})" for name, own in by_device.items())
        raise ProfileError(
            f"{path} has rows of several devices: {counts}", hint="choose one machine with --hardware"
        )
    measured_machine = measured_machines.of(rows[0]["hardware"])
    base = _without_launches(measured_machine.burst_profile)
    measurements = [_measurement(row, measured_machine.profile.num_threads) for row in rows]
    fitted, report = fit_profile(measurements, base)
    lessons = list(_lessons(base, fitted, report, list(zip(rows, measurements, strict=True))))
    return _as_profile(fitted, measured_machine, lessons), report, lessons


def _teaches(row: MeasuredRow) -> bool:
    """Whether a row is of a kernel or of a copy between a device and its host."""
    is_copy = row["kind"] == "copy" and row["direction"] in get_args(CopyDirection)
    return row.is_counted and row.measured is not None and (is_copy or row["kind"] in kernels.WORKS)


def _measurement(row: MeasuredRow, num_threads: int) -> Measurement:
    seconds = row.number("measured")
    try:
        work = copy_work(row.count("bytes")) if row["kind"] == "copy" else kernels.WORKS[row["kind"]](row)
    except ZosimError as error:
        raise ProfileError(f"cannot fit rates to {row.name}: {error.message}", hint=error.hint) from error
    return Measurement(
        name=f"{row['kind']} {row.name}",
        work=work,
        seconds=seconds,
        fastest_s=seconds,
        num_samples=1,
        num_threads=num_threads,
        direction="d2h" if row["direction"] == "d2h" else "h2d",
    )


def _without_launches(profile: Profile) -> Profile:
    return profile.with_constants(
        *(
            constant.model_copy(update=dict.fromkeys(("value", "low", "high"), 0.0))
            for constant in profile.constants
            if constant.quantity in _LAUNCHING
        ),
        origin=profile.origin,
    )


def _lessons(
    base: Profile, fitted: Profile, report: FitReport, taught: Sequence[tuple[MeasuredRow, Measurement]]
) -> Iterator[Lesson]:
    """Yield the constants that measurements determine, with those that depend on each."""
    seconds = [_seconds(measurement, fitted) for _, measurement in taught]
    for name in report.identified:
        constant = fitted.constant(name)
        changed = fitted.with_constants(
            constant.model_copy(
                update={"value": 1.1 * constant.value, "high": max(constant.high, 1.1 * constant.value)}
            ),
            origin=fitted.origin,
        )
        sources = Counter(
            row["source"] or "no source"
            for (row, measurement), before_s in zip(taught, seconds, strict=True)
            if abs(_seconds(measurement, changed) / before_s - 1) > _MATTERS
        )
        yield Lesson(name, constant.unit, base.constant(name).value, constant.value, sources)


_MATTERS = 0.001
"""Part by which a tenth more of a constant must change a prediction to count."""


def _seconds(measurement: Measurement, profile: Profile) -> float:
    cost = estimate(measurement.work, profile, direction=measurement.direction)
    return device_s(cost, profile.device_type)


def _as_profile(fitted: Profile, measured_machine: MeasuredMachine, lessons: Sequence[Lesson]) -> Profile:
    """Return the fitted profile with launches as on the data sheet, long steps slowed as there, and sources named."""
    reported = {lesson.name: lesson.source for lesson in lessons}
    changed: list[Constant] = [
        constant.model_copy(update={"source": f"{constant.source}: {reported[constant.name]}"})
        for constant in fitted.constants
        if constant.name in reported
    ]
    launching = [
        constant for constant in measured_machine.profile.constants if constant.quantity in _LAUNCHING
    ]
    return sustained(fitted.with_constants(*changed, *launching, origin="calibrated"))
