"""First-order runs by recipe: the memory that they take, whether they fit, and how many tokens they train on a second."""

from __future__ import annotations

import math
from statistics import NormalDist

from costmodel.models.recipes import recipe_of
from costmodel.models.training import LIBRARY_BYTES, Checkpointing, Sharding, TrainingRun
from topology.errors import PlanError
from zosim.applications.first_order.recipes import adapter_shapes, step_seconds
from zosim.applications.validation.codes import code_of
from zosim.applications.validation.measured_machines import MeasuredMachine, bounded
from zosim.applications.validation.models import model_of
from zosim.applications.validation.rows import Forecast, MeasuredRow, Unpredictable
from zosim.applications.validation.steps import attention_of

_SHARDINGS: dict[str, Sharding] = {
    "": "none", "none": "none", "fsdp": "fsdp", "zero-1": "zero-1", "zero-2": "zero-2", "zero-3": "zero-3",
}  # fmt: skip
_CHECKPOINTINGS: dict[str, Checkpointing] = {
    "": "full", "none": "none", "full": "full", "full-offloaded": "full-offloaded",
}  # fmt: skip
_YES_OR_NO = {"yes": True, "no": False, "": False}
_BITSANDBYTES = ("qlora-nf4", "qlora-nf4-dq")
"""Recipes for which PEFT makes norms, embedding and head float32, unless a script leaves that out."""

_SPREADS = {"torch allocated peak": (0.88, 1.12), "torch reserved peak": (0.78, 1.25), "host": (0.7, 1.4)}
_USUAL_SPREAD = (0.85, 1.2)
"""Between which parts of the prediction nine in ten published runs were found, by what was counted."""
_USABLE = 0.98
_USABLE_ZERO3, _USABLE_ZERO3_TRAINED = 0.91, 0.895
"""Part of a device's memory that a run can have, beside its context. ZeRO's third stage wants space for what it exchanges, more of it
where gradients of all weights go along. Fitted between published runs that fitted and one that did not."""
_DOUBT = 0.001
_FITS_SPREAD = 0.06
"""Standard deviation of the logarithm of what a run needs over what is predicted."""
_TIME_SPREAD = (0.72, 1.12)
"""Nine in ten of published runs, predicted without constants that their own source or machine had a say in, lie between these parts."""


def training_run(row: MeasuredRow, measured_machine: MeasuredMachine) -> TrainingRun:
    """Return what a row says of a first-order run.

    Raises Unpredictable if its recipe, sharding, checkpointing or targets are none that is predicted.
    """
    try:
        recipe = recipe_of(row["recipe"])
    except PlanError as error:
        raise Unpredictable(f"{error.message}; {error.hint}") from error
    model, code = model_of(row), code_of(row["code"])
    sharding = row.choice("sharding", _SHARDINGS)
    quirks = code.training(recipe, sharding)
    names_targets = recipe.has_adapters and (row["lora_targets"] or not row["trainable"])
    shapes = adapter_shapes(model, row["lora_targets"]) if names_targets else []
    is_counted = shapes and (row["lora_rank"] or not row["trainable"])
    counted = model.num_blocks * row.count("lora_rank") * sum(map(sum, shapes)) if is_counted else 0
    return TrainingRun(
        model,
        recipe,
        row.count("batch"),
        row.count("seq"),
        row.count_or("accumulation", 1),
        dtype=row.dtype,
        num_devices=row.count_or("devices", 1),
        sharding=sharding,
        num_adapter_parameters=row.count_or("trainable", counted)
        if recipe.trained == "adapters"
        else counted,
        adapter_inputs=sum(inputs for inputs, _ in shapes),
        adapter_outputs=sum(outputs for _, outputs in shapes),
        adapter_dtype=row.adapter_dtype,
        wide_norms=row.choice("fp32_norms_head", {**_YES_OR_NO, "": recipe.name in _BITSANDBYTES}),
        checkpointing=row.choice("checkpointing", _CHECKPOINTINGS),
        chunks_loss=row.choice("loss_chunk", _YES_OR_NO),
        unlike_lengths=row["packed"] == "no",
        attention=attention_of(row, measured_machine),
        quirks=quirks,
    )


def memory(row: MeasuredRow, measured_machine: MeasuredMachine) -> Forecast:
    """Return the bytes that a first-order run takes, by the counter that the row names, on all devices."""
    run, quantity = training_run(row, measured_machine), row["quantity"].lower()
    if quantity == "host":
        if not run.host_bytes:
            raise Unpredictable("the recipe keeps nothing in host memory")
        low, high = _SPREADS["host"]
        return Forecast(run.host_bytes, low * run.host_bytes, high * run.host_bytes)
    context = measured_machine.profile.values("central")["context_bytes"]
    usable = measured_machine.device.memory_bytes - context
    reserved = max(min(run.reserved_bytes, usable), run.allocated_bytes)
    size = {"torch allocated peak": run.allocated_bytes, "torch reserved peak": reserved}.get(
        quantity, min(reserved + context + LIBRARY_BYTES, max(usable + context, run.allocated_bytes))
    )
    low, high = _SPREADS.get(quantity, _USUAL_SPREAD)
    assumed = () if quantity in _SPREADS or quantity == "driver" else ("quantity driver",)
    size *= run.num_devices
    return Forecast(size, low * size, high * size, assumed=assumed)


def fits(row: MeasuredRow, measured_machine: MeasuredMachine) -> Forecast:
    """Return the probability that a run does not run out of the device's memory, or of the host's."""
    run = training_run(row, measured_machine)
    context = measured_machine.profile.values("central")["context_bytes"]
    usable, least = _USABLE, run.allocated_bytes
    if run.sharding == "zero-3":
        usable = _USABLE_ZERO3 if run.recipe.has_adapters else _USABLE_ZERO3_TRAINED
        least = run.reserved_bytes
    there = usable * (measured_machine.device.memory_bytes - context)
    probability = NormalDist().cdf(math.log(there / least) / _FITS_SPREAD)
    return Forecast(min(max(probability, _DOUBT), 1 - _DOUBT), 0.0, 1.0)


def throughput(row: MeasuredRow, measured_machine: MeasuredMachine) -> Forecast:
    """Return the tokens a second of all devices."""
    run = training_run(row, measured_machine)
    devices = measured_machine.devices_of(row, run.num_devices)
    tokens = run.num_devices * run.tokens * run.accumulation
    begin_s = code_of(row["code"]).begin_s
    seconds = bounded(
        lambda bound: (
            begin_s + step_seconds(run, measured_machine.topology, devices, measured_machine.profile, bound)
        )
    )
    return Forecast.of_rate(tokens, seconds, _TIME_SPREAD)
