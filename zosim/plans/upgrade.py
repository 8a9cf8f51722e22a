"""Plans that earlier versions wrote, as this one reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from topology.errors import PlanError
from topology.renamed import with_present_names
from topology.validation import without_removed

PLAN_VERSION: Literal[2] = 2

RENAMED: Mapping[str, str] = {
    "residency.num_slots": "num_staging_buffers",
    "residency.reuse_slots": "reuse_staging_buffers",
    "directions.drawn_ahead": "sampled_ahead",
    "split.cuts": "split_points",
    "residency.edges": "embedding_and_head",
    "directions": "perturbations",
    "low_bits.direction_bits": "perturbation_bits",
    "low_bits.update_rounding=query": "perturbation",
    "estimator.num_queries": "num_perturbations",
    "schedule.traversal=sweep": "full",
    "low_bits.kernel=dequantise": "dequantize",
}
"""Axes, fields and values that were renamed (:mod:`topology.renamed`); a plan of version 1 is read as one of version 2 before."""

_MOVED = {
    ("estimator", "direction"): ("directions", "distribution"),
    ("estimator", "rng"): ("directions", "rng"),
    ("estimator", "order"): ("directions", "order"),
    ("precision", "storage"): ("weights", "dtype"),
    ("precision", "compute"): ("forward", "compute_dtype"),
    ("precision", "transfer"): ("residency", "transfer_dtype"),
    ("runtime", "traversal"): ("schedule", "traversal"),
    ("runtime", "update"): ("schedule", "update"),
    ("runtime", "attention"): ("forward", "attention"),
    ("runtime", "loss_chunk_tokens"): ("forward", "loss_chunk_tokens"),
    ("runtime", "draw_ahead"): ("directions", "sampled_ahead"),
    ("runtime", "keep_directions"): ("directions", "kept"),
    ("runtime", "weights"): ("weights", "perturbation"),
}
"""Where the fields of version 1 have gone, by axis and name."""

_REMOVED_FIELDS: Mapping[str, Mapping[str, object]] = {
    "residency": {"share_group": "host"},
    "low_bits": {
        "parts": "blocks",
        "full_range": False,
        "outliers": 0.0,
        "adapter_span": 2.0,
    },
}
"""Fields that were removed, by axis and name: the value that says what holds for every plan now."""

_REMOVED_VALUES: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "low_bits": {"weights": ("best8", "best4"), "adapters": ("best8", "best4")},
    "schedule": {"traversal": ("querywise",)},
}
"""Values that were removed of fields that stay, by axis and name."""


def upgrade(data: dict[str, Any]) -> dict[str, Any]:
    """Return a plan that was saved as JSON in the fields of this version.

    Raises PlanError if it needs what was removed since.
    """
    upgraded = with_present_names(_of_version_1(data) if data.get("version") == 1 else dict(data), RENAMED)
    for axis in {*_REMOVED_FIELDS, *_REMOVED_VALUES}:
        if isinstance(fields := upgraded.get(axis), dict):
            if axis == "low_bits" and _is_full_range(upgraded.get("model")):
                fields = fields | {"full_range": False}  # the model says it
            upgraded[axis] = without_removed(
                fields,
                axis,
                PlanError,
                names=_REMOVED_FIELDS.get(axis, {}),
                values=_REMOVED_VALUES.get(axis, {}),
            )
    return upgraded


def _is_full_range(model: object) -> bool:
    """Whether the quantized values in a model's files use their lowest number, which plans once stated, too."""
    stored = model.get("stored") if isinstance(model, dict) else None
    return isinstance(stored, dict) and stored.get("full_range") is True


def _of_version_1(data: dict[str, Any]) -> dict[str, Any]:
    """Return a plan of version 1, which had two axes more, ``precision`` and ``runtime``, and formats that were always named."""
    upgraded: dict[str, Any] = {"version": PLAN_VERSION}
    for axis, fields in data.items():
        if axis == "version":
            continue
        if axis not in ("estimator", "precision", "runtime") or not isinstance(fields, dict):
            moved_here = upgraded.get(axis, {})
            upgraded[axis] = fields | moved_here if isinstance(fields, dict) else fields
            continue
        for name, value in fields.items():
            new_axis, new_name = _MOVED.get((axis, name), (axis, name))
            fields_there = upgraded.setdefault(new_axis, {})
            if isinstance(fields_there, dict):  # what is no axis is refused as what it is
                fields_there[new_name] = value
    return upgraded
