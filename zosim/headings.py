"""Headings of help pages, in the order in which people decide."""

from __future__ import annotations

from typing import Literal, get_args

Heading = Literal[
    "Model and data",
    "Hardware",
    "Estimator and optimizer",
    "Placement",
    "Precision",
    "Randomness",
    "Run",
    "Output",
]

HEADINGS: tuple[Heading, ...] = get_args(Heading)

COMMANDS = {
    "Plan": ("plan", "simulate", "report", "whatif", "sweep", "slack", "lower"),
    "Hardware": ("topology", "calibrate", "buy"),
    "Train": ("run", "compare", "replay", "probe", "adapter", "evidence", "demo"),
    "Serve": ("serve", "adapt", "canary"),
    "Learn and check": ("study", "check", "predict", "validate"),
}
"""Commands of ``zosim`` by heading, the usual ones first."""

LEADING = (
    "--model",
    "--data",
    "--template",
    "--label-words",
    "--batch",
    "--seq",
    "--steps",
    "--resume",
    "--lr",
    "--lr-schedule",
    "--warmup",
    "--weight-decay",
    "--eps",
    "--num-perturbations",
    "--method",
    "--out",
)
"""Options that come first under their headings, in this order: what nearly everybody decides."""
