"""Plan, simulate and run zeroth-order fine-tuning of large language models.

Names are loaded when they are first asked for, so that ``import zosim`` costs nothing::

    import zosim

    plan = zosim.Plan.load("plan.json")
    program = zosim.lower(plan)

Functions that bear their module's name are imported from it: ``from zosim.engines.simulate import simulate``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from topology.lazy import lazy_names

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

    __version__: str
    run: Callable[..., dict[str, Any]]
else:

    def _version() -> str:
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("zosim")
        except PackageNotFoundError:  # a source tree that was never installed
            return "0+unknown"

    def _run() -> Any:
        from zosim.registry import FUNCTIONS, load, registered

        return load(registered(FUNCTIONS)["run"])

    __getattr__, __all__ = lazy_names(__name__, __file__, __version__=_version, run=_run)
