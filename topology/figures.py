"""A figure of a datasheet: a value, its unit, and where it comes from."""

from __future__ import annotations

import datetime
import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from topology.units import Dimension, QuantityError, split_quantity, unit_scale
from topology.validation import FrozenModel, RuleError

SMALLEST, LARGEST = 1e-15, 1e27
"""Of a figure in SI units, unless it is zero: quotients of two stay finite."""

Basis = Literal["datasheet", "paper", "specification", "measured", "estimated", "assumed", "declared"]


class Figure(FrozenModel):
    """A value with its unit and its source.

    Attributes
    ----------
    value : float
        The number as the source writes it.
    unit : str
        Its unit, such as ``"GB/s"``; GB and GiB are different.
    source : str
        A link or the name of a document; a derivation where the figure is estimated.
    date : datetime.date or None
        When the source was read.
    basis : Basis
        What kind of knowledge it is; ``assumed`` means that no source states it.
    note : str or None
        What a reader should know, such as the clock that a peak refers to.
    """

    value: float
    unit: str
    source: str = Field(default="declared", min_length=1)
    date: datetime.date | None = None
    basis: Basis = "declared"
    note: str | None = None

    @model_validator(mode="after")
    def _is_a_number(self) -> Figure:
        if not math.isfinite(self.value):
            message = f"{self.value} is not a valid figure"
            raise RuleError(message, hint="leave it out where there is no limit")
        return self

    def in_si(self, dimension: Dimension) -> float:
        """Value in SI units of the dimension.

        Raises
        ------
        QuantityError
            If the unit is of another dimension.
        """
        return self.value * unit_scale(self.unit, dimension)

    def __str__(self) -> str:
        return f"{self.value:g} {self.unit}".strip()


def _from_text(dimension: Dimension) -> BeforeValidator:
    def read(value: Any) -> Any:
        if isinstance(value, str):
            number, unit = split_quantity(value, dimension)
            return {"value": number, "unit": unit}
        if isinstance(value, int | float) and not isinstance(value, bool):
            # A bare number has no unit; counts and ratios need none, the others are refused by the unit check.
            return {"value": value, "unit": ""}
        return value

    return BeforeValidator(read)


def _check(dimension: Dimension, *, positive: bool, at_most: float = math.inf) -> AfterValidator:
    def check(figure: Figure) -> Figure:
        value = figure.in_si(dimension)
        if value < 0 or (positive and value == 0):
            raise QuantityError(f"{figure} must be {'more than zero' if positive else 'zero or more'}")
        if value and not SMALLEST <= value <= LARGEST:
            message = f"{figure} is beyond any hardware: {value:g} in SI units"
            raise QuantityError(message, hint="check the unit and the exponent")
        if value > at_most:
            raise QuantityError(f"{figure} must be at most {at_most:g}")
        return figure

    return AfterValidator(check)


Bytes = Annotated[Figure, _from_text("bytes"), _check("bytes", positive=True)]
Bandwidth = Annotated[Figure, _from_text("bandwidth"), _check("bandwidth", positive=True)]
Latency = Annotated[Figure, _from_text("time"), _check("time", positive=False)]
Compute = Annotated[Figure, _from_text("compute"), _check("compute", positive=True)]
Power = Annotated[Figure, _from_text("power"), _check("power", positive=True)]
TransferRate = Annotated[Figure, _from_text("transfer_rate"), _check("transfer_rate", positive=True)]
Count = Annotated[Figure, _from_text("count"), _check("count", positive=False)]
Efficiency = Annotated[Figure, _from_text("ratio"), _check("ratio", positive=True, at_most=1.0)]
