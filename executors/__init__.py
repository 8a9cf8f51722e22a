"""Runs what was planned: the only package that needs torch.

Names are loaded when they are first asked for, so that listing commands stays fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from executors.models.loading import load_model
    from executors.models.spec import plan_of_model, spec_of_model
    from executors.ranks.launch import launch
    from executors.runs.records import StepRecord
    from executors.runs.session import Session

__all__ = ["Session", "StepRecord", "launch", "load_model", "plan_of_model", "spec_of_model"]

_HOMES = {
    "Session": "runs.session",
    "StepRecord": "runs.records",
    "launch": "ranks.launch",
    "load_model": "models.loading",
    "plan_of_model": "models.spec",
    "spec_of_model": "models.spec",
}


def __getattr__(name: str) -> Any:
    """Load what `name` stands for."""
    try:
        module = import_module(f"executors.{_HOMES[name]}")
    except KeyError:
        message = f"module 'executors' has no attribute {name!r}"
        raise AttributeError(message) from None
    return getattr(module, name)
