"""Plans that earlier versions wrote, as this one reads them."""

from __future__ import annotations

from typing import Any, Literal

PLAN_VERSION: Literal[2] = 2

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
    ("runtime", "draw_ahead"): ("directions", "drawn_ahead"),
    ("runtime", "keep_directions"): ("directions", "kept"),
    ("runtime", "weights"): ("weights", "perturbation"),
}
"""Where the fields of version 1 have gone, by axis and name."""


def upgrade(data: dict[str, Any]) -> dict[str, Any]:
    """Return a plan that was saved as JSON in the fields of this version.

    Version 1 had two axes more, ``precision`` and ``runtime``, and formats that were always named.
    """
    if data.get("version") != 1:
        return data
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
