"""Plan, simulate and run zeroth-order fine-tuning of large language models.

Names are loaded when they are first asked for, so that ``import zosim`` costs nothing::

    import zosim

    plan = zosim.Plan.load("plan.json")
    program = zosim.lower(plan)

Functions that bear their module's name are imported from it: ``from zosim.simulate import simulate``.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from topology.errors import ZosimError
    from zosim.compare import Comparison
    from zosim.lowering import lower
    from zosim.machine import Machine
    from zosim.plan import Estimator, Placement, Plan, Precision, Residency, Runtime
    from zosim.planner import Decision, Request, choose
    from zosim.predict import Prediction, Subject
    from zosim.program import Program
    from zosim.recurrence import step_time_bound
    from zosim.timeline import Timeline
    from zosim.trace import save_trace

_HOMES = {
    "Comparison": "zosim.compare",
    "Decision": "zosim.planner",
    "Estimator": "zosim.plan",
    "Machine": "zosim.machine",
    "Placement": "zosim.plan",
    "Plan": "zosim.plan",
    "Precision": "zosim.plan",
    "Prediction": "zosim.predict",
    "Program": "zosim.program",
    "Request": "zosim.planner",
    "Residency": "zosim.plan",
    "Runtime": "zosim.plan",
    "Subject": "zosim.predict",
    "Timeline": "zosim.timeline",
    "ZosimError": "topology.errors",
    "choose": "zosim.planner",
    "lower": "zosim.lowering",
    "save_trace": "zosim.trace",
    "step_time_bound": "zosim.recurrence",
}

try:
    __version__ = version("zosim")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

__all__ = [
    "Comparison",
    "Decision",
    "Estimator",
    "Machine",
    "Placement",
    "Plan",
    "Precision",
    "Prediction",
    "Program",
    "Request",
    "Residency",
    "Runtime",
    "Subject",
    "Timeline",
    "ZosimError",
    "__version__",
    "choose",
    "lower",
    "save_trace",
    "step_time_bound",
]


def __getattr__(name: str) -> Any:
    """Load what `name` stands for."""
    if name not in _HOMES:
        message = f"module 'zosim' has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(import_module(_HOMES[name]), name)
