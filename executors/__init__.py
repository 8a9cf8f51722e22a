"""Runs what was planned: the only package that needs torch.

Names are loaded when they are first asked for, so that listing commands stays fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from executors.launch import launch
    from executors.loading import load_model
    from executors.records import StepRecord
    from executors.session import Session
    from executors.spec import plan_of_model, spec_of_model

__all__ = ["Session", "StepRecord", "launch", "load_model", "plan_of_model", "spec_of_model"]

_HOMES = {
    "Session": "session",
    "StepRecord": "records",
    "launch": "launch",
    "load_model": "loading",
    "plan_of_model": "spec",
    "spec_of_model": "spec",
}


def __getattr__(name: str) -> Any:
    """Load what `name` stands for."""
    try:
        module = import_module(f"executors.{_HOMES[name]}")
    except KeyError:
        message = f"module 'executors' has no attribute {name!r}"
        raise AttributeError(message) from None
    return getattr(module, name)
