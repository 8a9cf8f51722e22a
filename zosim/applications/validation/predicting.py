"""What is predicted for a measured row: its kind says what was done, its other cells how much of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from costmodel.devices.collectives import COLLECTIVES
from costmodel.devices.gpus import is_widened, multiplies_float8
from topology.errors import ZosimError
from topology.validation import did_you_mean
from zosim.applications.validation import first_order, kernels, passes, steps
from zosim.applications.validation.codes import CODES
from zosim.applications.validation.measured_machines import MeasuredMachine, MeasuredMachines
from zosim.applications.validation.models import likeness
from zosim.applications.validation.rows import Forecast, MeasuredRow, RowsError

Predictor = Callable[[MeasuredRow, MeasuredMachine], Forecast]
"""Raises RowsError where a cell that it needs is empty or no number, ModelError where the model is unknown, and Unpredictable where a
row measures what is not modelled."""


def _first_order_memory(row: MeasuredRow, measured_machine: MeasuredMachine) -> Forecast:
    """Return the bytes of a run of a recipe, or of a step that a row describes by its optimizer."""
    return (first_order.memory if row["recipe"] else steps.first_order_memory)(row, measured_machine)


PREDICTORS: dict[str, Predictor] = {
    **dict.fromkeys(kernels.WORKS, kernels.kernel),
    "copy": kernels.copy,
    "p2p": kernels.message,
    **dict.fromkeys(COLLECTIVES, kernels.collective),
    "forward": passes.forward,
    "streamed_generation": passes.streamed_generation,
    "step": steps.step,
    "device_memory": steps.device_memory,
    "host_memory": steps.host_memory,
    "first_order_step": steps.first_order_step,
    "first_order_memory": _first_order_memory,
    "first_order_fits": first_order.fits,
    "moe_forward": passes.moe_forward,
    "nvme_streamed": passes.nvme_streamed,
    "first_order_throughput": first_order.throughput,
}
"""By the kind of a row."""

_OF_MODELS = frozenset(PREDICTORS.values()) - {
    kernels.kernel,
    kernels.copy,
    kernels.message,
    kernels.collective,
}
"""Those that predict what models do."""

_ASSUMED: Mapping[str, Mapping[str, str]] = {
    "attention": {"batch": "1"},
    "attention_backward": {"batch": "1"},
    "copy": {"direction": "h2d"},
    "forward": {"batch": "1"},
    "streamed_generation": {"batch": "1"},
    **{key: {"batch": "1", "method": "mezo"} for key in ("step", "device_memory", "host_memory")},
    **{key: {"batch": "1"} for key in ("first_order_step", "first_order_memory")},
}
"""What is taken for an empty cell, by kind; beside the format, and all devices where ranks are not counted."""

_ANY_FORMAT = frozenset({"elementwise", "copy", "p2p", *COLLECTIVES})
"""Kinds to which only bytes matter."""


def outcome(row: MeasuredRow, measured_machines: MeasuredMachines) -> Forecast | str:
    """Return what is predicted for a row, or why nothing is. What its `measured` holds does not matter."""
    predictor = PREDICTORS.get(row["kind"])
    if predictor is None:
        return f"kind {row['kind']!r} is not predicted; {did_you_mean(row['kind'], PREDICTORS)}"
    if not row["hardware"]:
        return "the row names no hardware"
    try:
        measured_machine = measured_machines.of(row["hardware"])
        is_float8 = _multiplies(row) and row.dtype == "float8_e4m3"
        if (
            is_float8
            and measured_machine.device.type == "gpu"
            and not multiplies_float8(measured_machine.device)
        ):
            return f"{measured_machine.device.name} has no units for floats of 8 bits, and torch does not multiply them there"
        missing = {
            column: value
            for column, value in _likely(row["kind"], measured_machine).items()
            if not row[column]
        }
        forecast = predictor(MeasuredRow({**row.fields, **missing}, row.where), measured_machine)
        assumed = [f"{column} {value}" for column, value in missing.items()]
        if _multiplies(row) and is_widened(measured_machine.device, row.dtype):
            assumed.append(f"{row.dtype} multiplied in float32")
        if (
            row["kind"] == "matmul"
            and row["dtype"].lower() == "int8"
            and not measured_machine.multiplies_int8
        ):
            assumed.append("int8 multiplied as float16")
        if predictor in _OF_MODELS:
            assumed += filter(None, [likeness(row)])
            if row["code"].lower() not in CODES:
                assumed.append(f"code {row['code']} does as torch does")
        return replace(forecast, assumed=(*assumed, *forecast.assumed))
    except RowsError as error:
        return "; ".join(filter(None, (error.message, error.hint)))
    except ZosimError as error:
        return " ".join(error.message.split())
    except (ValueError, ArithmeticError, LookupError) as error:
        # Sizes that no model or machine has; one such row does not take the others along.
        return f"the row cannot be: {' '.join(str(error).split())[:200]}"


def _multiplies(row: MeasuredRow) -> bool:
    """Whether a row is of products in a format that it names."""
    return row["kind"] not in _ANY_FORMAT | {"draw"} and row["dtype"].lower() not in ("", "int8")


def _likely(kind: str, measured_machine: MeasuredMachine) -> dict[str, str]:
    """Return what a row of a kind most likely means where it says nothing."""
    likely = dict(_ASSUMED.get(kind, {}))
    if kind not in _ANY_FORMAT:
        device = measured_machine.device
        on_gpu = "bfloat16" if "bf16" in device.peak_dense else "float16"
        likely["dtype"] = on_gpu if device.type == "gpu" else "float32"
    if kind in COLLECTIVES:
        likely["ranks"] = str(len(measured_machine.devices))
    return likely
