"""Plan, simulate and run zeroth-order fine-tuning of large language models.

Functions that do what the commands of their names do, with the same options::

    import zosim

    decision = zosim.plan("opt-13b", "a100-80gb-milan")  # the fastest placement that fits, and why
    zosim.simulate(decision)  # step time and memory of a plan, event by event
    zosim.run(decision, model="path/to/opt-13b", data="train.jsonl", steps=100, out="runs/first")
    zosim.compare("runs/first")  # what was predicted beside what was measured
    zosim.write_report(decision, "runs/first", output="report.html")  # both as one page, with charts
    zosim.buy("opt-66b", budget="500 USD")  # which machine, and what would change the answer
    zosim.whatif(decision, drop=["gpu3"])  # a plan on a changed machine, and what its step depends on
    zosim.sweep("configurations.csv")  # many configurations planned, and kept in a database

Names are loaded when they are first used, so that ``import zosim`` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from topology.lazy import lazy_names

if TYPE_CHECKING:
    from collections.abc import Callable

    from topology.errors import ZosimError as ZosimError
    from zosim.analysis.compare import Comparison as Comparison
    from zosim.api import compare as compare
    from zosim.api import plan as plan
    from zosim.api import simulate as simulate
    from zosim.applications.buying.answer import buy as buy
    from zosim.applications.first_order.choice import choose_order as choose_order
    from zosim.applications.first_order.choice import compare_first_order as compare_first_order
    from zosim.applications.html_report.command import write_report as write_report
    from zosim.applications.sweep.sweeping import sweep as sweep
    from zosim.applications.trace import save_trace as save_trace
    from zosim.applications.whatif.answer import whatif as whatif
    from zosim.hardware.machine import Machine as Machine
    from zosim.lowering import lower as lower
    from zosim.planning.planner import Decision as Decision
    from zosim.planning.planner import Request as Request
    from zosim.planning.planner import choose as choose
    from zosim.planning.predict import PlannedRun as PlannedRun
    from zosim.planning.predict import Prediction as Prediction
    from zosim.plans import Estimator as Estimator
    from zosim.plans import ForwardPass as ForwardPass
    from zosim.plans import Mesh as Mesh
    from zosim.plans import Perturbations as Perturbations
    from zosim.plans import Placement as Placement
    from zosim.plans import Plan as Plan
    from zosim.plans import Residency as Residency
    from zosim.plans import Schedule as Schedule
    from zosim.plans import Split as Split
    from zosim.plans import Weights as Weights
    from zosim.program import Program as Program
    from zosim.simulators.closed_form import step_time_bound as step_time_bound
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

    def __dir__() -> list[str]:
        return __all__
