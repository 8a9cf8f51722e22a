"""Runs what was planned: the only package that needs torch.

Names are loaded when they are first asked for, so that listing commands stays fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from topology.lazy import lazy_names

if TYPE_CHECKING:
    from executors.models.loading import load_model as load_model
    from executors.models.spec import plan_of_model as plan_of_model
    from executors.models.spec import spec_of_model as spec_of_model
    from executors.ranks.launch import launch as launch
    from executors.runs.records import StepRecord as StepRecord
    from executors.runs.session import Session as Session
else:
    __getattr__, __all__ = lazy_names(__name__, __file__)
