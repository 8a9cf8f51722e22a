"""What is predicted for a measured row: its kind says what was done, its other cells how much of it."""

from __future__ import annotations

from collections.abc import Callable

from topology.errors import ZosimError
from topology.validation import did_you_mean
from zosim.applications.validation import kernels, links, passes, steps
from zosim.applications.validation.rows import Forecast, MeasuredRow
from zosim.applications.validation.site import Site, Sites

Predictor = Callable[[MeasuredRow, Site], Forecast]

PREDICTORS: dict[str, Predictor] = {
    **dict.fromkeys(kernels.WORKS, kernels.kernel),
    "copy": links.copy,
    "p2p": links.message,
    "all_reduce": links.all_reduce,
    "forward": passes.forward,
    "streamed_generation": passes.streamed_generation,
    "step": steps.step,
    "device_memory": steps.device_memory,
    "host_memory": steps.host_memory,
    "first_order_step": steps.first_order_step,
    "first_order_memory": steps.first_order_memory,
}
"""By the kind of a row."""


def outcome(row: MeasuredRow, sites: Sites) -> Forecast | str:
    """Return what is predicted for a row, or why nothing is. What its `measured` holds does not matter."""
    predictor = PREDICTORS.get(row["kind"])
    if predictor is None:
        return f"kind {row['kind']!r} is not predicted; {did_you_mean(row['kind'], PREDICTORS)}"
    if not row["hardware"]:
        return "the row names no hardware"
    try:
        return predictor(row, sites.of(row["hardware"]))
    except ZosimError as error:
        return " ".join(error.message.split())
    except (ValueError, ArithmeticError) as error:
        # Sizes that no model or machine has; one such row does not take the others along.
        return f"the row cannot be: {' '.join(str(error).split())[:200]}"
