"""When requests arrive: at random, in bursts, or as a recorded trace says."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from topology.errors import TrafficError

Times = NDArray[np.float64]

_COLUMNS = ("timestamp", "time", "arrival", "arrival_s", "arrived_at")
"""What public traces call the column, in lower case."""

_LARGEST = 10_000_000
"""Arrivals of one simulation, which take a minute."""


def poisson(rate_per_s: float, duration_s: float, seed: int, *, burst: float = 1.0) -> Times:
    """Return arrivals at random.

    Parameters
    ----------
    burst : float
        Mean number of requests that arrive together, geometrically distributed; 1 for a Poisson process.

    Raises
    ------
    TrafficError
        If a number is not positive, or there would be too many.
    """
    if not (rate_per_s > 0 and duration_s > 0 and burst >= 1):
        raise TrafficError(
            f"--rate {rate_per_s}, --burst {burst} and --duration {duration_s} give no arrivals",
            hint="use a rate and a duration above 0, and bursts of 1 or more",
        )
    if rate_per_s * duration_s > _LARGEST:
        message = f"{rate_per_s * duration_s:.3g} requests are more than the maximum of {_LARGEST}"
        raise TrafficError(message, hint="reduce --duration")
    if burst > _LARGEST:
        raise TrafficError(f"--burst {burst:g} is more than the maximum of {_LARGEST} requests")
    random = np.random.default_rng(seed)
    num = int(random.poisson(rate_per_s * duration_s / burst))
    starts = np.sort(random.uniform(0, duration_s, num))
    return np.repeat(starts, random.geometric(1 / burst, num)) if burst > 1 else starts


def recorded(path: str | Path) -> Times:
    """Return the arrivals in a CSV file, in seconds after the first.

    Raises
    ------
    TrafficError
        If the file cannot be read, or has no such column or no arrivals.
    """
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            times = list(_parsed(csv.DictReader(file), path))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TrafficError(f"cannot read the trace {path}: {error}") from error
    if not times:
        raise TrafficError(f"the trace {path} has no arrivals")
    seconds = np.sort(np.array(times))
    first: Times = seconds - seconds[0]
    return first


def _parsed(rows: csv.DictReader[str], path: str | Path) -> Iterator[float]:
    names = {name.strip().lower(): name for name in rows.fieldnames or ()}
    column = next((names[name] for name in _COLUMNS if name in names), None)
    if column is None:
        raise TrafficError(
            f"the trace {path} has no column of arrival times; its columns: {', '.join(names) or 'none'}",
            hint=f"name the column one of {', '.join(_COLUMNS)}",
        )
    for row in rows:
        if rows.line_num > _LARGEST:
            raise TrafficError(
                f"the trace {path} has more than the maximum of {_LARGEST} lines", hint="cut it"
            )
        text = (row[column] or "").strip()
        try:
            number = float(text)
        except ValueError:
            try:
                number = datetime.fromisoformat(text).timestamp()
            except (ValueError, OverflowError):
                message = (
                    f"{path}, line {rows.line_num}: {text!r:.60} is neither a number of seconds nor a date with "
                    "a time"
                )
                raise TrafficError(message) from None
        if not np.isfinite(number):
            raise TrafficError(f"{path}, line {rows.line_num}: {text!r:.60} is not a finite time")
        yield number
