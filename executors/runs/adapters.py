"""LoRA adapters and prefixes of a run: attached to the model, read from a header, written without the base."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from torch import nn

from costmodel.models.configs import LoRA, Prefix, Subset
from executors.formats import TORCH_DTYPES
from executors.models.lora import attach_lora, block_linears, merge_lora, save_adapters
from executors.models.prefix import WEIGHTS_NAME, attach_prefix, load_prefix, save_prefix
from executors.models.quantized import save_own, save_quantized
from executors.models.weight_files import save_pretrained, weights_digest
from executors.runs.lazy_intervals import attach_intervals, lazy_intervals_of
from executors.runs.session import Session
from executors.runs.settings import SaveAs
from zosim.plans import Plan

Adapters = LoRA | Prefix
"""What is tuned in place of the base."""

Tuned = Adapters | Subset
"""The same, or part of the base's own parameters."""

ADAPTER_NAME = "adapter"
PREFIX_NAME = "prefix"
_INITIAL = Path(PREFIX_NAME) / "initial"


def attach(model: nn.Module, adapters: Tuned, *, run: Path | None = None, plan: Plan | None = None) -> None:
    """Freeze all of a model but the tuned part, or freeze it whole and add the adapters or the prefix that are tuned instead.

    Raises ModelError if they do not fit the model.

    - `run`: Directory of the run that is gone on with or replayed. The prefix that it began with is read from there, since a
      forward on another machine would make another one.
    - `plan`: What low-rank adapters are kept in; by default as the linears that they stand beside.
    """
    if isinstance(adapters, str):
        linears = {id(module.weight) for _, module, _, _ in block_linears(model)}
        for parameter in model.parameters():
            parameter.requires_grad_(
                id(parameter) in linears if adapters == "linears" else parameter.dim() == 2
            )
    elif isinstance(adapters, LoRA):
        dtype, quant_config = (
            (None, None) if plan is None else (TORCH_DTYPES[plan.storage_dtype], plan.storage.quant_config)
        )
        attach_lora(model, adapters, dtype=dtype, quant_config=quant_config)
        if adapters.lazy_steps is not None:
            attach_intervals(model, adapters)
    elif run is not None and (run / _INITIAL / WEIGHTS_NAME).is_file():
        load_prefix(model, run / _INITIAL)
    else:
        attach_prefix(model, adapters)


def keep_beginning(model: nn.Module, run: Path, dtype: str) -> None:
    """Write the prefix that a run begins with: computed from the base on another machine, it would have other bits."""
    save_prefix(model, run / _INITIAL, dtype)


def recorded_adapters(run: Mapping[str, Any]) -> Tuned | None:
    """Return what a header says was tuned; None for all of the model's own parameters."""
    if (subset := run.get("tuned", "all")) != "all":
        return TypeAdapter(Subset).validate_python(subset)
    if run.get("lora"):
        return LoRA.model_validate(run["lora"])
    return Prefix.model_validate(run["prefix"]) if run.get("prefix") else None


def save_adapters_only(
    model: nn.Module,
    directory: str | Path,
    adapters: Adapters,
    dtype: str,
    facts: Mapping[str, str] | None = None,
) -> None:
    """Write adapters or a prefix without the base, low-rank adapters with their metadata."""
    if isinstance(adapters, Prefix):
        save_prefix(model, directory, dtype)
        return
    intervals = lazy_intervals_of(model)
    error = {} if intervals is None else {"relative_error": repr(intervals.relative_error)}
    save_adapters(model, directory, dtype, {**(facts or {}), **error})


def save_tuned(
    out: str | Path, session: Session, adapters: Tuned | None, *, save_as: SaveAs = "numbers"
) -> None:
    """Write a session's weights as a model directory, and adapters or a prefix beside it.

    Low-rank adapters are merged into the model that is written; the session has ended then, since its model has become a
    plain one. A prefix has no place among a model's weights: it is written alone.
    """
    session.flush()
    model, storage = session.model, session.plan.storage_dtype
    if isinstance(adapters, Prefix):
        save_prefix(model, Path(out) / PREFIX_NAME, storage)
    elif isinstance(adapters, LoRA):
        # A server that loads the adapter has numbers for a base, never quantized values.
        is_plain = session.plan.storage.quant_config is None
        facts = {"base_digest": weights_digest(model, storage, base_only=True)} if is_plain else {}
        save_adapters_only(model, Path(out) / ADAPTER_NAME, adapters, storage, facts)
        with session.unsharded_model() as whole:
            merge_lora(whole)
            save_pretrained(whole, out, storage)
    else:
        writers = {"numbers": save_pretrained, "compressed-tensors": save_quantized, "zosim": save_own}
        writers[save_as](model, out, storage)
