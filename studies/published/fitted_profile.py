"""What a calibration on published rows found, as a checked JSON file: constants, their uncertainty, and intervals."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from studies.published.audit import audit, set_apart
from studies.published.cells import Cell, cells_of
from studies.published.constants import PAPERS, Domain
from studies.published.fitting import Solution, conformal_half_width, fit
from studies.published.posterior import FoundConstant, TableFit
from studies.published.quzo import QuzoFit, calibrate_quzo
from studies.published.rows import PublishedRow
from studies.published.sparq_fit import SparqFit, calibrate_sparq
from studies.published.zoinfer import calibrate_zoinfer
from topology.checksummed import save_checksummed, without_digest
from topology.errors import ProfileError
from topology.reading import read_json_object
from topology.renamed import with_present_names
from topology.validation import readable
from zosim.simulators.maxplus import Floats

LEAST_IN_GROUP = 10
"""Held-out residuals below which a group takes the quantile of its whole fit."""

_DEFAULT = "default_profile.json"

RENAMED = {"**.name=draw_rate": "sampling_rate"}
"""Names of constants that were renamed (:mod:`topology.renamed`)."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class IdentifiedConstant(FoundConstant):
    """A constant with the rows that identify it."""

    identified_by: str


class FoundFit(_Frozen):
    """One paper's constants of one domain."""

    paper: str
    domain: Domain
    constants: tuple[IdentifiedConstant, ...]
    covariance: tuple[tuple[float, ...], ...]  # of the logarithms of the values
    # Half width of the 90 % interval in logs by group of cells, from residuals held out by setting; ``""`` for others.
    half_widths: dict[str, float]
    num_cells: int

    @cached_property
    def values(self) -> dict[str, float]:
        """Values by name."""
        return {constant.name: constant.value for constant in self.constants}

    @property
    def matrix(self) -> Floats:
        """The covariance as an array."""
        return np.array(self.covariance)

    def half_width(self, group: str) -> float:
        """Return the half width of a group's interval."""
        return self.half_widths.get(group, self.half_widths[""])


class PublishedProfile(_Frozen):
    """All fits of one calibration on published rows."""

    format: Literal["zosim-published-profile"] = "zosim-published-profile"
    version: Literal[1] = 1
    fits: tuple[FoundFit, ...]  # of papers whose rows are timed on machines
    sparq: SparqFit | None = None  # of SparQ's volumes and memory; None where no row was there to fit it
    quzo: QuzoFit | None = None  # of QuZO's memory and seconds, likewise
    zoinfer: TableFit | None = None  # of ZOinfer's speed-ups and hours, likewise

    def fit(self, paper: str, domain: Domain) -> FoundFit | None:
        """Return the fit of a paper's domain; None where no row was there to fit it."""
        return next((item for item in self.fits if (item.paper, item.domain) == (paper, domain)), None)

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, with a digest that :func:`load_published_profile` checks.

        Raises ProfileError if the file cannot be written.
        """
        save_checksummed(self.model_dump(mode="json"), path, "profile", ProfileError)


def calibrate_on(rows: Sequence[PublishedRow]) -> PublishedProfile:
    """Return what `rows` say about all papers' machines and runs. Raises ProfileError if no row can be used."""
    cells, _, reasons = cells_of(rows)
    apart = set_apart(audit(rows))
    fits = []
    for paper in PAPERS:
        for domain in ("speed", "memory"):
            mine = [cell for cell in known_cells(cells, paper, domain) if cell.value is not None]
            if mine:
                fits.append(fitted_with_intervals(fit(mine, paper, domain), paper, domain, apart))
    sparq, quzo, zoinfer = calibrate_sparq(rows), calibrate_quzo(rows), calibrate_zoinfer(rows)
    if not fits and sparq is None and quzo is None and zoinfer is None:
        hint = next(iter(reasons.values()), "add rows with a value")
        raise ProfileError("no row can be fitted", hint=hint)
    return PublishedProfile(fits=tuple(fits), sparq=sparq, quzo=quzo, zoinfer=zoinfer)


def known_cells(cells: Sequence[Cell], paper: str, domain: Domain) -> list[Cell]:
    """Return the cells of a paper's domain."""
    return [
        cell
        for cell in cells
        if cell.row["paper"] == paper and (cell.row.kind == "memory") == (domain == "memory")
    ]


def fitted_with_intervals(
    solution: Solution, paper: str, domain: Domain, apart: frozenset[str] = frozenset()
) -> FoundFit:
    """Return a solution as it is kept. Cells at the places `apart` say nothing about how far others may be off."""
    groups: dict[str, list[float]] = {"": []}
    places = {cell.row.place for cell in solution.cells}
    for cell, residual in zip(solution.cells, solution.held_out().tolist(), strict=True):
        # Where nothing else was printed, what cannot be right is all that there is.
        if cell.row.place not in apart or places <= apart:
            groups[""].append(residual)
            groups.setdefault(cell.group, []).append(residual)
    spread = 2 * np.sqrt(np.diag(solution.covariance))
    constants = tuple(
        IdentifiedConstant(
            name=constant.name,
            value=float(np.exp(x)),
            low=float(np.exp(x - half)),
            high=float(min(np.exp(x + half), constant.high)),
            unit=constant.unit,
            meaning=constant.meaning,
            identified_by=_identified_by(solution, index),
        )
        for index, (constant, x, half) in enumerate(zip(solution.constants, solution.x, spread, strict=True))
    )
    return FoundFit(
        paper=paper,
        domain=domain,
        constants=constants,
        covariance=tuple(tuple(row) for row in solution.covariance.tolist()),
        half_widths={
            name: conformal_half_width(residuals)
            for name, residuals in groups.items()
            if not name or len(residuals) >= LEAST_IN_GROUP
        },
        num_cells=len(solution.cells),
    )


def _identified_by(solution: Solution, index: int) -> str:
    """Return the kinds of rows whose predictions a constant moves most, with their part of its information."""
    weights = solution.weights * solution.jacobian[:, index] ** 2
    total = float(weights.sum())
    prior = solution.constants[index].sigma ** -2
    if total < prior:
        return "its prior: rows depend on it too little"
    parts: dict[str, float] = {}
    for cell, weight in zip(solution.cells, weights.tolist(), strict=True):
        name = f"Table {cell.row['table']}, {cell.row['precision']} {cell.case.method.describe()}"
        parts[name] = parts.get(name, 0.0) + weight
    ranked = sorted(parts.items(), key=lambda part: -part[1])[:2]
    return "; ".join(f"{name} ({weight / total:.0%})" for name, weight in ranked)


def load_published_profile(path: str | Path | None = None) -> PublishedProfile:
    """Return the profile in a file; without one, that fitted to all rows that ship.

    Raises ProfileError if the file is unreadable, damaged, edited or something else.
    """
    source = Path(__file__).parent / "data" / _DEFAULT if path is None else path
    hint = "make one with `zosim calibrate --rows ROWS.csv -o PROFILE`"
    content = read_json_object(source, "profile of published rows", ProfileError, hint=hint)
    if content.get("format") != "zosim-published-profile":
        raise ProfileError(f"{source} is not a profile of published rows", hint=hint)
    content, is_unchanged = without_digest(content)
    if not is_unchanged:
        raise ProfileError(
            f"the profile {source} is damaged or was edited: its digest does not match its content",
            hint=hint,
        )
    with readable(f"the profile {source}", ProfileError, model=PublishedProfile):
        return PublishedProfile.model_validate(with_present_names(content, RENAMED))
