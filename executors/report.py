"""What ``zosim run`` and ``calibrate`` print."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from topology.units import format_bytes, format_seconds
from zosim.report import Report, Table, frame

if TYPE_CHECKING:
    from collections.abc import Sequence

    from costmodel.rates.calibration import FitReport
    from costmodel.rates.profile import Profile
    from costmodel.scoring import Row
    from executors.calibration.device_facts import DeviceFacts
    from zosim.applications.validation.learning import Lesson


class RunSummary(dict[str, Any]):
    """What a run came to, by name; a notebook shows it with the losses of its log."""

    def _repr_html_(self) -> str:
        if "out" not in self:  # the lines that start ranks on other hosts
            return Report("", Table(("", ""), self.items())).to_html()
        from zosim.analysis.pictures import chart_svg, with_picture
        from zosim.applications.html_report.compose import by_perturbation, curve_chart

        losses = by_perturbation(self._log(), ("loss_plus", "loss_minus"))
        drawn = {name: points for name, points in losses.items() if points}
        svg = chart_svg(curve_chart("loss", "loss", drawn)) if drawn else ""
        return with_picture(Report("", summary_view(self)), svg)

    def report(self, path: str | Path) -> Path:
        """Write the run as one HTML file that needs no network, and return its path.

        Raises ZosimError if the run's files are damaged, or the file cannot be written.
        """
        import zosim

        return zosim.write_report(self["out"], output=path)

    def to_pandas(self) -> Any:
        """Return the run's log as a pandas frame: a row for each perturbation of each step."""
        return frame(self._log())

    def _log(self) -> list[Mapping[str, Any]]:
        from zosim.applications.html_report.compose import log_rows

        return list(log_rows(Path(self["out"]) / "steps.jsonl"))


def summary_view(summary: dict[str, Any]) -> Table:
    """Return what a run came to."""
    rows = [
        ("steps", f"{summary['num_steps']}"),
        ("loss", f"{summary['first_loss']:.5g} at first, {summary['last_loss']:.5g} over the last ten steps"),
        ("step time", f"{format_seconds(summary['step_time_s'])}  ({summary['tokens_per_s']:,.0f} tokens/s)"),
        ("device memory", f"{format_bytes(summary['device_bytes'])} at most"),
        ("host memory", format_bytes(summary["host_bytes"])),
        ("process", f"{format_bytes(summary['peak_rss_bytes'])} resident at most"),
    ]
    if (sent := summary["messages"]) is not None:
        size = format_bytes(sent["bytes_per_step"])
        rows.append(("messages", f"{sent['num_per_step']:g} between stages per step, {size} in all"))
    if summary["lost_updates"] is not None:
        rows.append(("updates lost", _describe_lost(summary["lost_updates"])))
    if summary.get("quantized_updates"):
        rows.append(("quantized updates", _describe_updates(summary["quantized_updates"])))
    for name, title in (("evaluation", "last evaluation"), ("best_evaluation", "best evaluation")):
        if summary[name] is not None:
            rows.append((title, _describe_evaluation(summary[name])))
    return Table(("run", summary["out"]), rows)


def _describe_lost(lost: dict[str, Any]) -> str:
    """Return how many updates rounding undid, and where."""
    text = f"{lost['lost_in_storage']:.1%} left a {lost['storage']} weight unchanged"
    if lost["transfer"] == lost["storage"]:
        return text
    return f"{lost['lost_in_transfer']:.1%} vanished in rounding to {lost['transfer']}; {text}"


def _describe_updates(updated: dict[str, Any]) -> str:
    """Return what became of updates of quantized weights."""
    num = max(1, updated["num"])
    return (
        f"{updated['unchanged'] / num:.1%} left unchanged by rounding, {updated['saturated'] / num:.2%} stopped at the "
        "end of the grid; no drift: forwards leave quantized values alone"
    )


def _describe_evaluation(metrics: dict[str, Any]) -> str:
    names = ("accuracy", "exact_match", "f1", "perplexity", "loss")
    shown = ", ".join(f"{name} {metrics[name]:.4g}" for name in names if name in metrics)
    return f"{shown} after {metrics['num_steps']} steps"


def _residual_row(row: Row) -> tuple[str, str, str, str]:
    measured, predicted = format_seconds(row.measured or 0.0), format_seconds(row.predicted or 0.0)
    return row.case, measured, predicted, "" if row.error is None else f"{row.error:+.1%}"


def facts_table(facts: DeviceFacts) -> Table:
    """Return what was measured of an accelerator beside its profile."""
    rows = [
        ("launch of a kernel", f"{facts.launch_s * 1e6:.1f} us"),
        ("launch and wait", f"{facts.synchronise_s * 1e6:.1f} us"),
        *((f"copy {which}", f"{rate / 1e9:.1f} GB/s") for which, rate in facts.copy_bytes_per_s.items()),
        ("pinning host memory", f"{facts.pin_bytes_per_s / 1e9:.1f} GB/s"),
        ("memory of the runtime", format_bytes(facts.context_bytes)),
        *(
            (f"attention, {kernel}", f"{seconds * 1e6:.1f} us")
            for kernel, seconds in facts.attention_s.items()
        ),
        *((f"all-gather of {size} bytes each", f"{s * 1e6:.1f} us") for size, s in facts.exchange_s.items()),
        *(
            (f"{when} measuring", f"{state.clock_mhz} MHz, {state.power_w:.0f} W, {state.temperature_c} C")
            for when, state in zip(("before", "after"), facts.states, strict=False)
        ),
    ]
    return Table(("of the device", "measured"), rows, numeric=("measured",))


def calibration_view(profile: Profile, fit: FitReport, lessons: Sequence[Lesson] = ()) -> Report:
    """Return the constants of a fitted profile, how well they explain what was measured, and what taught them."""
    taught = [
        (each.name, f"{each.before:.4g}", f"{each.after:.4g}", each.unit, each.source) for each in lessons
    ]
    constants = [
        (c.name, f"{c.value:.4g}", f"{c.low:.4g} to {c.high:.4g}", c.unit, fit.unidentified.get(c.name, ""))
        for c in profile.constants
    ]
    operations = [
        (operation.name, f"{operation.num_rows}", f"{operation.median:.1%}", f"{operation.largest:+.1%}")
        for operation in fit.by_operation()
    ]
    parts = [
        ("least well explained", "fitted", fit.worst()),
        ("whole steps, not fitted", "predicted", fit.steps),
    ]
    return Report(
        "",
        Table(
            ("constant", "value", "interval", "unit", "not identified because"),
            constants,
            title=f"{profile.device_name}, {profile.num_threads} threads",
            numeric=("value",),
        ),
        Table(
            ("measured, by operation", "number", "median error", "largest error"),
            operations,
            numeric=("number", "median error", "largest error"),
        ),
        *(
            Table(
                (title, "measured", verb, "error"),
                [_residual_row(row) for row in rows],
                numeric=("measured", verb, "error"),
            )
            for title, verb, rows in parts
            if rows
        ),
        *(
            [Table(("learnt", "before", "after", "unit", "from"), taught, numeric=("before", "after"))]
            if taught
            else []
        ),
        f"median error of the fit: {fit.median_error:.1%} over {len(fit.residuals)} measurements",
        *(f"disturbed: {text}; calibrate again when the machine is idle" for text in fit.disturbances),
    )
