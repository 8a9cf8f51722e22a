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

    from topology.errors import ZosimError as ZosimError
    from zosim.analysis.compare import Comparison as Comparison
    from zosim.applications.buying.answer import buy as buy
    from zosim.applications.closed_form.recurrence import step_time_bound as step_time_bound
    from zosim.applications.trace import save_trace as save_trace
    from zosim.face import compare as compare
    from zosim.face import plan as plan
    from zosim.face import simulate as simulate
    from zosim.hardware.machine import Machine as Machine
    from zosim.lowering import lower as lower
    from zosim.planning.planner import Decision as Decision
    from zosim.planning.planner import Request as Request
    from zosim.planning.planner import choose as choose
    from zosim.planning.predict import Prediction as Prediction
    from zosim.planning.predict import Subject as Subject
    from zosim.plans import Directions as Directions
    from zosim.plans import Estimator as Estimator
    from zosim.plans import ForwardPass as ForwardPass
    from zosim.plans import Mesh as Mesh
    from zosim.plans import Placement as Placement
    from zosim.plans import Plan as Plan
    from zosim.plans import Residency as Residency
    from zosim.plans import Schedule as Schedule
    from zosim.plans import Split as Split
    from zosim.plans import Weights as Weights
    from zosim.program import Program as Program
    from zosim.timeline import Timeline as Timeline

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

__all__ = sorted(("__version__", "run", *_HOMES))  # noqa: PLE0605 - names of what is loaded when asked for


def __getattr__(name: str) -> Any:
    """Load what `name` stands for."""
    if name == "run":
        from zosim.registry import FUNCTIONS, load, registered

        return load(registered(FUNCTIONS)["run"])
    if name not in _HOMES:
        message = f"module 'zosim' has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(import_module(_HOMES[name]), name)
