"""Quantities with units: the only place where "31.5 GB/s" becomes a number, and back.

Decimal and binary prefixes are told apart (1 GB = 10**9 B, 1 GiB = 2**30 B), and so are bytes and bits:
link speeds in bits are written ``Gbit/s``, because ``Gb/s`` is read as gigabytes by half of its readers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

from topology.errors import TopologyError

Dimension = Literal[
    "bytes", "bandwidth", "time", "compute", "power", "frequency", "transfer_rate", "count", "ratio"
]

DECIMAL_PREFIXES: Final = MappingProxyType(
    {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
)
BINARY_PREFIXES: Final = MappingProxyType(
    {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
)
SECONDS_PER_UNIT: Final = MappingProxyType(
    {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
)
COUNT_UNITS: Final = ("1", "", "core", "cores", "SM", "SMs", "engine", "engines", "link", "links", "channels")

_BYTES = {f"{prefix}B": scale for prefix, scale in (DECIMAL_PREFIXES | BINARY_PREFIXES).items()}


def _decimal(*units: str, size: float = 1.0) -> dict[str, float]:
    return {prefix + unit: scale * size for unit in units for prefix, scale in DECIMAL_PREFIXES.items()}


_SCALES: Final[MappingProxyType[Dimension, Mapping[str, float]]] = MappingProxyType(
    {
        "bytes": _BYTES,
        "bandwidth": {f"{unit}/s": scale for unit, scale in _BYTES.items()} | _decimal("bit/s", size=1 / 8),
        "time": SECONDS_PER_UNIT,
        "compute": _decimal("flop/s", "FLOP/s", "FLOPS", "op/s", "OPS"),
        "power": _decimal("W"),
        "frequency": _decimal("Hz"),
        "transfer_rate": _decimal("T/s"),
        "count": dict.fromkeys(COUNT_UNITS, 1.0),
        "ratio": {"": 1.0, "1": 1.0, "%": 0.01},
    }
)
"""SI units in one of each unit that a dimension can be written in."""
_NAMES: Final[MappingProxyType[Dimension, str]] = MappingProxyType(
    {"bytes": "size", "compute": "rate of computing", "transfer_rate": "transfer rate"}
)
_EXAMPLES: Final[MappingProxyType[Dimension, str]] = MappingProxyType(
    {
        "bytes": "80 GiB",
        "bandwidth": "31.5 GB/s",
        "time": "2 us",
        "compute": "312 Tflop/s",
        "power": "300 W",
        "frequency": "2.45 GHz",
        "transfer_rate": "3200 MT/s",
        "count": "108 SM",
        "ratio": "0.8",
    }
)
_MAX_LENGTH = 60
_QUANTITY: Final = re.compile(
    r"\s*(?P<value>[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(?P<unit>[^\s\d]\S*)?\s*"
)


class QuantityError(TopologyError, ValueError):
    """A quantity that cannot be read; a ``ValueError`` too, so that pydantic reports where it stands."""


def parse_quantity(text: str, dimension: Dimension) -> float:
    """Value in SI units of a quantity such as ``"31.5 GB/s"``.

    `dimension`: what is expected: bytes, bandwidth (B/s), time (s), compute (flop/s), power (W), frequency (Hz), transfer_rate
    (transfers/s), count or ratio.

    Raises QuantityError if there is no number, no unit where one is needed, or a unit of another dimension.

    >>> parse_quantity("31.5 GB/s", "bandwidth")
    31500000000.0
    >>> parse_quantity("2 GiB", "bytes")
    2147483648.0
    """
    value, unit = split_quantity(text, dimension)
    return value * unit_scale(unit, dimension)


def split_quantity(text: str, dimension: Dimension) -> tuple[float, str]:
    """Number and unit of a quantity, the unit not yet checked."""
    # Longer ones are none, and would take the pattern quadratic time.
    match = _QUANTITY.fullmatch(text) if len(text) <= _MAX_LENGTH else None
    if match is None:
        message = f"{text[:_MAX_LENGTH]!r} is not a quantity"
        raise QuantityError(message, hint=f'write a number and a unit, such as "{_EXAMPLES[dimension]}"')
    return float(match["value"].replace("_", "")), match["unit"] or ""


def unit_scale(unit: str, dimension: Dimension) -> float:
    """How many SI units of the dimension one of these units is.

    Raises QuantityError if the unit is missing or of another dimension.
    """
    scale = _SCALES[dimension].get(unit.strip())
    if scale is None:
        what = f"unit {unit!r}" if unit else "a number without a unit"
        message = f"{what} cannot be a {_NAMES.get(dimension, dimension)}"
        raise QuantityError(message, hint=_unit_hint(unit, dimension))
    return scale


def _unit_hint(unit: str, dimension: Dimension) -> str:
    if unit.startswith("K") and not unit.startswith("Ki"):
        return f"1000 is k and 1024 is Ki: k{unit[1:]} or Ki{unit[1:]}"
    if unit.endswith(("b", "b/s", "bps")):
        return "say B for bytes or bit for bits, such as GB/s or Gbit/s"
    if dimension == "bandwidth" and unit in _SCALES["bytes"]:
        return f"a bandwidth is per second: {unit}/s"
    return f'write it like "{_EXAMPLES[dimension]}"'


def parse_bytes(text: str) -> int:
    """Whole bytes of a size such as ``"20GiB"``.

    Raises QuantityError if it is no size, or a negative one.
    """
    size_bytes = parse_quantity(text, "bytes")
    if not 0 <= size_bytes < math.inf:
        message = f"{text!r} is not a size in bytes"
        raise QuantityError(message, hint='sizes are zero or more, such as "20 GiB"')
    return round(size_bytes)


def _with_prefix(value: float, unit: str, prefixes: MappingProxyType[str, float], digits: int) -> str:
    if not math.isfinite(value):
        return f"{'unlimited' if value > 0 else value} {unit}"
    scaled, prefix = value, ""
    for name, factor in prefixes.items():
        if abs(value) >= factor * (1 - 0.5 * 10**-digits):
            scaled, prefix = value / factor, name
    return f"{_significant(scaled, digits)} {prefix}{unit}"


def _significant(value: float, digits: int) -> str:
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_count(value: float, digits: int = 4) -> str:
    """A number of things, never in powers of ten.

    >>> format_count(13862.4), format_count(640), format_count(487.42)
    ('13,862', '640', '487.4')
    """
    whole, point, rest = _significant(value, digits).partition(".")
    return f"{int(whole):,}{point}{rest}"


def format_bytes(size_bytes: float, digits: int = 4) -> str:
    """A size with a binary prefix.

    >>> format_bytes(80 * 2**30)
    '80 GiB'
    """
    return _with_prefix(size_bytes, "B", MappingProxyType({"": 1.0, **BINARY_PREFIXES}), digits)


def format_bandwidth(bandwidth_bytes_per_s: float, digits: int = 3) -> str:
    """A bandwidth with a decimal prefix, as datasheets write it.

    >>> format_bandwidth(31.5e9)
    '31.5 GB/s'
    """
    return _with_prefix(bandwidth_bytes_per_s, "B/s", DECIMAL_PREFIXES, digits)


def format_flops(flop_per_s: float, digits: int = 4) -> str:
    """A compute rate with a decimal prefix.

    >>> format_flops(312e12)
    '312 Tflop/s'
    """
    return _with_prefix(flop_per_s, "flop/s", DECIMAL_PREFIXES, digits)


def format_seconds(duration_s: float, digits: int = 3) -> str:
    """A duration in the largest unit that keeps the number at one or more, from ns to h.

    >>> format_seconds(0.0042)
    '4.2 ms'
    """
    if not math.isfinite(duration_s):
        return f"{duration_s} s"
    units = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
    scaled, unit = duration_s, "s"
    for name, factor in units.items():
        # Minutes only from two on: "90 s" reads better than "1.5 min".
        if abs(duration_s) >= factor * (2 if name in {"min", "h"} else 1 - 0.5 * 10**-digits):
            scaled, unit = duration_s / factor, name
    return f"{_significant(scaled, digits)} {unit}"
