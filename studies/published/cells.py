"""Measurements behind printed cells: rows that print the same one, with what is needed to predict it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache

from costmodel.devices.datasheet import datasheet_profile
from costmodel.models.model_spec import EMBED, HEAD
from costmodel.rates.profile import CONSTANT_UNITS, Constant, Profile
from studies.published.constants import Values, profile_values
from studies.published.conventions import (
    ABLATIONS,
    UNITS,
    PublishedCase,
    UnknownRow,
    case_of,
    decays,
    prefetches,
    transfer_case_of,
)
from studies.published.grid import Compiled, compiled
from studies.published.rows import PublishedRow
from topology.documents import load_preset
from topology.errors import ZosimError
from zosim.applications.published_code import as_published, only
from zosim.hardware.machine import Machine
from zosim.hardware.machines import machines_for
from zosim.lowering import lower
from zosim.program import Program
from zosim.simulators.maxplus import Floats

UPLOAD, OFFLOAD = ("upload", "gather"), ("offload",)


@dataclass(frozen=True)
class Cell:
    """One measurement, however often it is printed."""

    row: PublishedRow  # the first row that prints it
    case: PublishedCase
    # What rows print for it, the first as in `row`; more than one if they disagree.
    values: tuple[float, ...] = ()
    rows: tuple[PublishedRow, ...] = ()  # all rows that print it

    def printed_in(self, row: PublishedRow) -> Cell:
        """Return the cell as it is known after one more row that prints it."""
        assert row.value is not None
        values = self.values if row.value in self.values else (*self.values, row.value)
        return replace(self, row=self.row if self.values else row, values=values, rows=(*self.rows, row))

    @property
    def value(self) -> float | None:
        """The first printed number."""
        return self.values[0] if self.values else None

    @property
    def printed(self) -> float:
        """The first printed number of a cell that has one."""
        assert self.values
        return self.values[0]

    @property
    def key(self) -> tuple[object, ...]:
        """What tells measurements apart."""
        plan, row = self.case.plan, self.row
        return (row["paper"], row["quantity"], row["gpu_type"], self.case.method, plan.mesh, plan.model.name, plan.batch,
                plan.seq, plan.weights, plan.compute_dtype, plan.residency, plan.placement.world_size)  # fmt: skip

    @property
    def group(self) -> str:
        """Kind of cell and class of methods within which errors are taken to be alike."""
        row, paper = self.row, self.row["paper"]
        if row.kind != "throughput":
            return f"{paper} {row.kind}"
        if paper == "DistZO2":
            if self.case.plan.placement.world_size != 4:
                return "DistZO2 throughput, 1D"
            hidden = prefetches(self.case)
            return f"DistZO2 throughput, 2D, uploads {'hidden' if hidden else 'not hidden'}"
        if self.case.method.option in ABLATIONS:
            return "ZO2 throughput, ablations"
        return f"ZO2 throughput, {'fp32' if row['precision'] == 'fp32' else 'half'}"

    @property
    def waits(self) -> bool:
        """Whether the host waits for every copy."""
        return self.case.method.option == ABLATIONS[0]

    @property
    def is_transfer(self) -> bool:
        """Whether it is a rate of transfers alone."""
        return self.row.kind == "transfer"

    @property
    def _isolated(self) -> str:
        return self.row["quantity"] if self.is_transfer else ""

    @cached_property
    def program(self) -> Program:
        """What rank 0 runs, with the works of the papers' code."""
        case = self.case
        program = lower(case.plan)
        if self._isolated:
            return only(program, *(UPLOAD if self._isolated == "upload_rate" else OFFLOAD))
        return as_published(program, case.plan, prefetches=prefetches(case), decays=decays(case.paper))

    @cached_property
    def compiled(self) -> Compiled:
        """Its step, ready to be evaluated."""
        return compiled(self.program)

    @property
    def amount(self) -> float:
        """What one step handles, in the row's unit times seconds: tokens, or 1e9 parameters of offloaded blocks."""
        if not self.is_transfer:
            return float(self.case.plan.tokens_per_step)
        groups = self.case.plan.model.param_groups
        return sum(group.num_parameters for group in groups if group.segments[0] not in (EMBED, HEAD)) / 1e9

    def machine(self, values: Values) -> Machine:
        """Return rank 0's machine with the fitted constants."""
        plan = self.case.plan
        return _machine(
            self.case.preset,
            plan.placement.devices,
            self.row["paper"],
            tuple(values.items()),
            plan.model.hidden_size,
            self.waits,
            self._isolated,
        )

    def predictions(self, sets: Sequence[Values]) -> Floats:
        """Return what each set of constants predicts, in the row's unit."""
        return self.amount / self.compiled.step_s([self.machine(values) for values in sets])


def cells_of(rows: Iterable[PublishedRow]) -> tuple[list[Cell], dict[int, Cell], dict[int, str]]:
    """Return the measurements behind `rows`, the one behind each row by index, and why the others have none."""
    by_key: dict[tuple[object, ...], Cell] = {}
    of_row: dict[int, tuple[object, ...]] = {}
    reasons: dict[int, str] = {}
    for index, row in enumerate(rows):
        try:
            cell = _cell(row)
        except ZosimError as error:
            reasons[index] = error.message
            continue
        known = by_key.setdefault(cell.key, cell)
        if row.value is not None:
            by_key[cell.key] = known.printed_in(row)
        of_row[index] = cell.key
    return list(by_key.values()), {index: by_key[key] for index, key in of_row.items()}, reasons


def _cell(row: PublishedRow) -> Cell:
    if not row.is_predictable:
        raise UnknownRow(f"{row['quantity']} is not predicted, only throughput, memory and transfer rates")
    if row["paper"] not in ("ZO2", "DistZO2"):
        raise UnknownRow(f"{row['paper']} has no model here")
    if row["unit"] and row["unit"] not in UNITS[row.kind]:
        raise UnknownRow(f"unit {row['unit']!r} is not that of the tables: {UNITS[row.kind][0]}")
    return Cell(row, transfer_case_of(row) if row.kind == "transfer" else case_of(row))


@cache
def preset_machine(preset: str, devices: tuple[str, ...]) -> Machine:
    """Return rank 0's machine as data sheets describe it, with its place among these devices."""
    topology = load_preset(preset)
    ranks = tuple(range(len(devices)))
    sheet = datasheet_profile(topology, devices[0])
    machine = machines_for(topology, devices, sheet, {"world": (ranks,), "host": (ranks,)})[0]
    # The constants were fitted beside exchanges that cost their links alone, and hold what NCCL takes besides.
    rings = {name: replace(ring, nccl=None) for name, ring in machine.rings.items()}
    return replace(machine, rings=rings)


@lru_cache(maxsize=1024)
def _machine(
    preset: str,
    devices: tuple[str, ...],
    paper: str,
    values: tuple[tuple[str, float], ...],
    hidden_size: int,
    waits: bool,
    isolated: str,
) -> Machine:
    frame = preset_machine(preset, devices)
    constants = profile_values(
        paper,
        dict(values),
        hidden_size=hidden_size,
        ranks=len(devices),
        waits=waits,
        isolated=isolated,
    )
    return replace(frame, profile=_with_values(frame.profile, constants))


def _with_values(profile: Profile, values: Values) -> Profile:
    constants = [
        Constant(
            name=name,
            value=value,
            low=value,
            high=value,
            unit=CONSTANT_UNITS[name.split(".", 1)[0]],
            source="fitted to published rows",
        )
        for name, value in values.items()
    ]
    return profile.with_constants(*constants, origin="calibrated")
