"""Measurements that somebody made, a row each: what was done on which machine, and how long it took."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeAlias, TypeVar

from costmodel.formats import COMPUTE_FORMATS, DType, format_name
from costmodel.scoring import Row
from topology.errors import ZosimError
from zosim.applications.validation.tables import TableRow, read_table

_Choice = TypeVar("_Choice")
_YES = ("true", "1", "yes")

REQUIRED = ("kind", "hardware")
"""Columns without which nothing can be predicted."""

ADDED = ("predicted", "low", "high", "why")
"""Columns that predictions append."""

FITS = "first_order_fits"
"""Kind of a row that says whether a run fitted: 1, or 0 where it ran out of memory."""

_EIGHT_BITS: DType = "float8_e4m3"
_EIGHT_BIT_FLOATS = ("float8", "fp8", "e4m3", "e5m2")
"""What floats of 8 bits are called, of whose formats devices multiply one as fast as the other."""


class Unpredictable(ZosimError):  # noqa: N818 - reads as the statement it makes
    """A row that says too little, or measures what is not modelled, with the reason."""


@dataclass(frozen=True)
class Forecast:
    """A predicted number with the interval that 90 of 100 measurements should lie in, in SI units.

    Attributes
    ----------
    assumed : tuple of str
        What the row does not say and was assumed, such as ``"dtype bfloat16"``.
    """

    predicted: float
    low: float
    high: float
    assumed: tuple[str, ...] = field(default=(), kw_only=True)


Outcome: TypeAlias = "Forecast | str"
"""What is predicted for a row, or why nothing is."""


class MeasuredRow(TableRow):
    """One measurement."""

    @property
    def name(self) -> str:
        """What reports call it."""
        return self["id"] or self.where

    @property
    def group(self) -> str:
        """Rows that are judged together: the column of that name, or else the kind."""
        return self["group"] or self["kind"]

    @property
    def is_counted(self) -> bool:
        """Whether nothing speaks against the measurement (an empty `flag`)."""
        return not self["flag"]

    @cached_property
    def measured(self) -> float | None:
        """The measurement; None where the cell is empty."""
        return self.number("measured", allows_zero=self["kind"] == FITS) if self["measured"] else None

    @property
    def dtype(self) -> DType:
        """Format of weights, activations and products.

        Raises
        ------
        Unpredictable
            If it is none, or none that computes.
        """
        name = format_name(self["dtype"].lower().removeprefix("torch.").removeprefix("amp_"))
        name = _EIGHT_BITS if name.startswith(_EIGHT_BIT_FLOATS) else name
        known = next((dtype for dtype in COMPUTE_FORMATS if dtype == name), None)
        if known is None:
            raise Unpredictable(f"dtype {self['dtype']!r} must be one of {', '.join(COMPUTE_FORMATS)}")
        return known

    @property
    def adapter_dtype(self) -> DType:
        """Format of adapters: float32 where the cell is empty, as PEFT makes them."""
        return MeasuredRow({"dtype": self["adapter_dtype"] or "float32"}, self.where).dtype

    def count_or(self, column: str, default: int) -> int:
        """Return a whole number, `default` where the cell is empty."""
        return self.count(column) if self[column] else default

    def flag(self, column: str) -> bool:
        """Return whether a cell says ``true``; empty is ``false``."""
        return self[column].lower() in _YES

    def choice(self, column: str, known: Mapping[str, _Choice]) -> _Choice:
        """Return what a cell means, by what people call it, in small letters.

        Raises
        ------
        Unpredictable
            If it is none of the known names.
        """
        name = self[column].lower()
        if name not in known:
            raise Unpredictable(f"{column} {self[column]!r} must be one of {', '.join(filter(None, known))}")
        return known[name]


def read_rows(path: str | Path) -> list[MeasuredRow]:
    """Return the measurements of a CSV file, in order.

    Raises
    ------
    RowsError
        If the file cannot be read, or lacks a column.
    """
    return [MeasuredRow(row.fields, row.where) for row in read_table(path, REQUIRED)]


def columns_of(outcome: Outcome) -> dict[str, str]:
    """Return the cells that are appended for a forecast, or for the reason why there is none."""
    if isinstance(outcome, str):
        return dict(zip(ADDED, ("", "", "", outcome), strict=True))
    numbers = (outcome.predicted, outcome.low, outcome.high)
    why = f"assumed: {', '.join(outcome.assumed)}" if outcome.assumed else ""
    return dict(zip(ADDED, (*(f"{number:.6g}" for number in numbers), why), strict=True))


def joined(row: MeasuredRow, outcome: Outcome) -> Row:
    """Return a measurement beside what is predicted for it."""
    forecast = outcome if isinstance(outcome, Forecast) else None
    return Row(
        case=row.name,
        what=row["kind"],
        measured=row.measured if row.is_counted else None,  # a flagged cell may hold anything
        predicted=None if forecast is None else forecast.predicted,
        low=None if forecast is None else forecast.low,
        high=None if forecast is None else forecast.high,
        group=row.group,
        flag=row["flag"],
        provenance=row["source"],
    )


@dataclass(frozen=True)
class Verdicts:
    """How often it was right whether runs fit, of rows that count.

    Attributes
    ----------
    num_wrongly_fitting : int
        Runs that ran out of memory and were predicted to fit.
    """

    num: int = 0
    num_right: int = 0
    num_wrongly_fitting: int = 0

    @classmethod
    def of(cls, outcomes: Iterable[tuple[MeasuredRow, Outcome]]) -> Verdicts:
        """Return the verdicts on rows of that kind; one without a prediction is not right."""
        pairs = [
            (bool(row.measured), forecast.predicted >= _LEAST if isinstance(forecast, Forecast) else None)
            for row, forecast in outcomes
            if row["kind"] == FITS and row.is_counted and row.measured is not None
        ]
        return cls(
            len(pairs),
            sum(fitted == foreseen for fitted, foreseen in pairs),
            sum(not fitted and bool(foreseen) for fitted, foreseen in pairs),
        )

    def to_data(self) -> dict[str, int]:
        """Return them as JSON has them."""
        return {"rows": self.num, "right": self.num_right, "wrongly_fits": self.num_wrongly_fitting}

    def __str__(self) -> str:
        wrong = f"; {self.num_wrongly_fitting} that ran out of memory predicted to fit"
        return f"whether runs fit: {self.num_right} of {self.num} right{wrong}"


_LEAST = 0.5
"""Probability from which a run is predicted to fit."""
