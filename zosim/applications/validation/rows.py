"""Measurements that somebody made, a row of a CSV file each: what was done on which machine, and how long it took.

Rows are kept as they were read, and checked where a number is asked for.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias, TypeVar

from costmodel.formats import COMPUTE_FORMATS, DType, format_name
from costmodel.scoring import Row
from topology.errors import ZosimError

SURPLUS = "surplus"
"""Column that holds what a line has more of than the header."""

LARGEST_COUNT = 10**18
"""Above any number of bytes, elements or tokens that is measured."""


class RowsError(ZosimError):
    """Rows of a table that cannot be read, understood or written."""


@dataclass(frozen=True)
class TableRow:
    """One row of a table."""

    fields: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    where: str = ""

    def __getitem__(self, column: str) -> str:
        return self.fields.get(column, "").strip()

    def count(self, column: str, below: int = LARGEST_COUNT) -> int:
        """Return a whole number above 0 and below `below`; spreadsheets write 8 as ``8.0`` and a million as ``1e6``.

        Raises RowsError if the column holds something else.
        """
        text = self[column]
        number = _whole(text)
        if not 0 < number < below:
            raise RowsError(f"{self.where}: {column} is {text!r}", hint="it must be a whole number above 0")
        return number

    def number(self, column: str, *, allows_zero: bool = False) -> float:
        """Return a finite number above 0, or 0 where that is allowed.

        Raises RowsError if the column holds something else.
        """
        text = self[column]
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if not 0 < number < float("inf") and not (allows_zero and number == 0):
            least = "0 or more" if allows_zero else "above 0"
            raise RowsError(
                f"{self.where}: {column} is {text!r}", hint=f"it must be a number {least}, or empty"
            )
        return number


def _whole(text: str) -> int:
    """Return the whole number that a cell holds, 0 if it holds none."""
    if not text.isascii() or len(text) > 20:
        return 0
    if text.isdecimal():
        return int(text)
    try:
        number = float(text)
    except ValueError:
        return 0
    return int(number) if number.is_integer() else 0


def read_table(path: str | Path, required: Sequence[str]) -> list[TableRow]:
    """Return the rows of a CSV file, as :func:`table_rows` yields them."""
    return list(table_rows(path, required))


def table_rows(path: str | Path, required: Sequence[str]) -> Iterator[TableRow]:
    """Yield the rows of a CSV file, in order. Empty lines are no rows.

    Raises RowsError if the file cannot be read, or lacks a column.
    """
    try:
        # Spreadsheets begin a file with a byte order mark.
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            columns = [name.strip() for name in next(filter(None, reader), [])]
            missing = [name for name in required if name not in columns]
            if missing:
                raise RowsError(
                    f"{path} lacks columns: {', '.join(missing)}",
                    hint=f"required columns: {', '.join(required)}",
                )
            for line in filter(None, reader):
                yield TableRow(_fields(columns, line), f"{path}, line {reader.line_num}")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RowsError(f"cannot read the rows {path}: {error}") from error


def _fields(columns: Sequence[str], line: Sequence[str]) -> Mapping[str, str]:
    fields = dict(zip_longest(columns, line[: len(columns)], fillvalue=""))
    if len(line) > len(columns):
        fields[SURPLUS] = ",".join(line[len(columns) :])
    return MappingProxyType(fields)


def write_table(
    path: str | Path,
    rows: Sequence[TableRow],
    added: Sequence[Mapping[str, str]],
    columns: Sequence[str] = (),
) -> None:
    """Write `rows` with the columns of `added` behind their own, in the same order.

    `columns`: heads of a file without rows.

    Raises RowsError if the file cannot be written.
    """
    own = _columns(row.fields for row in rows) or list(columns)
    more = [name for name in _columns(added) if name not in own]
    try:
        # A reason can name a file whose name is not UTF-8.
        with Path(path).open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
            writer = csv.DictWriter(
                file, [*own, *more], lineterminator="\n", restval="", extrasaction="ignore"
            )
            writer.writeheader()
            for row, extra in zip(rows, added, strict=True):
                writer.writerow({**row.fields, **extra})
    except OSError as error:
        raise RowsError(f"cannot write the predictions to {path}: {error}") from error


def _columns(items: Iterable[Mapping[str, str]]) -> list[str]:
    names: dict[str, None] = {}
    for item in items:
        names.update(dict.fromkeys(item))
    return list(names)


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
    """A predicted number with the interval that 90 of 100 measurements should lie in, in SI units."""

    predicted: float
    low: float
    high: float
    # What the row does not say and was assumed, such as `"dtype bfloat16"`.
    assumed: tuple[str, ...] = field(default=(), kw_only=True)

    @classmethod
    def of_rate(cls, amount: float, seconds: Forecast, spread: tuple[float, float]) -> Forecast:
        """Return an amount a second, between parts of that as in `spread`, or further where the seconds' interval reaches further."""
        rate = amount / seconds.predicted
        low, high = (part * rate for part in spread)
        return cls(rate, min(low, amount / seconds.high), max(high, amount / seconds.low))


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

        Raises Unpredictable if it is none, or none that computes.
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

        Raises Unpredictable if it is none of the known names.
        """
        name = self[column].lower()
        if name not in known:
            raise Unpredictable(f"{column} {self[column]!r} must be one of {', '.join(filter(None, known))}")
        return known[name]


def read_rows(path: str | Path) -> list[MeasuredRow]:
    """Return the measurements of a CSV file, in order.

    Raises RowsError if the file cannot be read, or lacks a column.
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
    """How often it was right whether runs fit, of rows that count."""

    num: int = 0
    num_right: int = 0
    num_wrongly_fitting: int = 0  # runs that ran out of memory and were predicted to fit

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
