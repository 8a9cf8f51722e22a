"""Plan, simulate and run zeroth-order fine-tuning of large language models.

Names are loaded when they are first asked for, so that ``import zosim`` costs nothing::

    import zosim

    plan = zosim.Plan.load("plan.json")
    program = zosim.lower(plan)

Functions that bear their module's name are imported from it: ``from zosim.engines.simulate import simulate``.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from topology.errors import ZosimError
    from zosim.analysis.compare import Comparison
    from zosim.applications.buying.answer import buy
    from zosim.applications.closed_form.recurrence import step_time_bound
    from zosim.applications.trace import save_trace
    from zosim.face import compare, plan, simulate
    from zosim.hardware.machine import Machine
    from zosim.lowering import lower
    from zosim.planning.planner import Decision, Request, choose
    from zosim.planning.predict import Prediction, Subject
    from zosim.plans import (
        Directions,
        Estimator,
        ForwardPass,
        Mesh,
        Placement,
        Plan,
        Residency,
        Schedule,
        Split,
        Weights,
    )
    from zosim.program import Program
    from zosim.timeline import Timeline

    run: Callable[..., dict[str, Any]]

_HOMES = {
    "buy": "zosim.applications.buying.answer",
    "compare": "zosim.face",
    "plan": "zosim.face",
    "simulate": "zosim.face",
    "Comparison": "zosim.analysis.compare",
    "Decision": "zosim.planning.planner",
    "Directions": "zosim.plans",
    "Estimator": "zosim.plans",
    "ForwardPass": "zosim.plans",
    "Machine": "zosim.hardware.machine",
    "Mesh": "zosim.plans",
    "Placement": "zosim.plans",
    "Plan": "zosim.plans",
    "Prediction": "zosim.planning.predict",
    "Program": "zosim.program",
    "Request": "zosim.planning.planner",
    "Residency": "zosim.plans",
    "Schedule": "zosim.plans",
    "Split": "zosim.plans",
    "Subject": "zosim.planning.predict",
    "Timeline": "zosim.timeline",
    "Weights": "zosim.plans",
    "ZosimError": "topology.errors",
    "choose": "zosim.planning.planner",
    "lower": "zosim.lowering",
    "save_trace": "zosim.applications.trace",
    "step_time_bound": "zosim.applications.closed_form.recurrence",
}

try:
    __version__ = version("zosim")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

__all__ = [
    "Comparison",
    "Decision",
    "Directions",
    "Estimator",
    "ForwardPass",
    "Machine",
    "Mesh",
    "Placement",
    "Plan",
    "Prediction",
    "Program",
    "Request",
    "Residency",
    "Schedule",
    "Split",
    "Subject",
    "Timeline",
    "Weights",
    "ZosimError",
    "__version__",
    "buy",
    "choose",
    "compare",
    "lower",
    "plan",
    "run",
    "save_trace",
    "simulate",
    "step_time_bound",
]


def __getattr__(name: str) -> Any:
    """Load what `name` stands for."""
    if name == "run":
        from zosim.registry import FUNCTIONS, load, registered

        return load(registered(FUNCTIONS)["run"])
    if name not in _HOMES:
        message = f"module 'zosim' has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(import_module(_HOMES[name]), name)
