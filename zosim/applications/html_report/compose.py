"""From plans and runs to a page: sentences first, then why, timelines, memory, links, curves, and the numbers of each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from topology.errors import TimelineError
from topology.reading import parse_json, read_json, read_text
from topology.units import format_bytes, format_seconds
from zosim import api
from zosim.analysis.compare import Comparison, slowest_rank
from zosim.analysis.critical_path import step_path
from zosim.analysis.pictures import Chart, chart_svg, timeline_svg, topology_svg
from zosim.applications.buying.sensitivity import effects_view, plan_effects
from zosim.applications.first_order.choice import choose_order
from zosim.applications.html_report.columns import aligned_at_s, timeline_columns
from zosim.applications.html_report.page import Illustration, ReportPage
from zosim.planning.planner import Decision
from zosim.planning.predict import PlannedRun, busy_shares
from zosim.planning.views import PlanComparison, candidates_svg, decision_view, simulation_view
from zosim.plans import Plan
from zosim.program.instructions import Space
from zosim.report import Bullets, Report, Reportable, Table
from zosim.timeline import Timeline

MAX_LOG_BYTES = 2**30


@dataclass(frozen=True)
class Reported:
    """A plan, or a run of one."""

    name: str
    planned: PlannedRun
    directory: Path | None = None

    @classmethod
    def of(cls, source: Decision | PlannedRun | Plan | str | Path, **where: Any) -> Reported:
        """Return a plan, or that of a file, or a run from its directory; `where` as for :func:`zosim.simulate`.

        Raises ZosimError if it is neither, or damaged.
        """
        if isinstance(source, Decision):
            source = source.chosen.planned
        if isinstance(source, PlannedRun):
            return cls(source.plan.model.name, source)
        if isinstance(source, Plan):
            return cls(source.model.name, api.simulate(source, **where))
        path = Path(source)
        if path.is_dir():
            api.refuse_irregular_run(path, TimelineError)
            return cls(path.name or str(path), api.planned_run_of(path, **where), path)
        return cls(path.stem, api.simulate(path, **where))

    @cached_property
    def measured(self) -> Timeline | None:
        """The run's timeline."""
        return None if self.directory is None else Timeline.load(self.directory / "timeline.json")

    @cached_property
    def rank(self) -> int:
        """The rank that ends its steps last."""
        return self.planned.prediction.slowest_rank if self.measured is None else slowest_rank(self.measured)

    @cached_property
    def comparison(self) -> Comparison | None:
        """The run against its prediction."""
        return None if self.measured is None else api.compared(self.planned, self.measured, self.rank)

    @cached_property
    def steps(self) -> list[Mapping[str, Any]]:
        """Rows of the run's log: losses and projected gradients of each perturbation.

        Raises TimelineError if a row is none of a log, or does not follow the one before it.
        """
        if self.directory is None:
            return []
        path = self.directory / "steps.jsonl"
        rows = list(log_rows(path))
        width = next((at for at, row in enumerate(rows) if row.get("step") != 0), len(rows)) or 1
        for at, row in enumerate(rows):
            step, perturbation = divmod(at, width)
            # Earlier logs say "query".
            names = row.get("step"), row.get("perturbation", row.get("query", 0))
            if names != (step, perturbation) or not isinstance(row.get("loss_plus"), int | float):
                wanted = f"step {step}, perturbation {perturbation}, with its loss"
                message = (
                    f"{path} line {at + 1} is damaged: it has to be {wanted}, and is {json.dumps(row)[:60]}"
                )
                raise TimelineError(message, hint="restore the file from a copy")
        return rows

    @cached_property
    def missing(self) -> str | None:
        """What the log lacks of what was run: its end, or steps; None if nothing."""
        if self.directory is None:
            return None
        path = self.directory / "steps.jsonl"
        if not path.exists():
            return f"{path} is not there, so no losses are shown"
        num_steps = 1 + self.steps[-1]["step"] if self.steps else 0
        header = read_json(self.directory / "run.json", "header", TimelineError)
        finished = header.get("finished") if isinstance(header, dict) else None
        wanted = finished.get("num_steps") if isinstance(finished, dict) else None
        if isinstance(wanted, int) and wanted != num_steps:
            return f"the log has {num_steps} steps, and the run says that it made {wanted}"
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 1))
            ends = file.read() in {b"", b"\n"}
        if not ends:
            return f"the log's last line has no end, as after a crash, and is left out; {num_steps} steps are shown"
        return None

    @cached_property
    def metrics(self) -> list[Mapping[str, Any]]:
        """Rows of the run's evaluations.

        Raises TimelineError if a row does not say after how many steps it was.
        """
        path = self.directory / "metrics.jsonl" if self.directory else None
        rows = list(log_rows(path)) if path else []
        for number, row in enumerate(rows, start=1):
            if not isinstance(row.get("num_steps"), int):
                message = f"{path} line {number} is damaged: it has no num_steps"
                raise TimelineError(message, hint="restore the file from a copy")
        return rows


def log_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of a file of JSON lines, such as a run's log, without a last line that has no end."""
    if not path.exists():
        return
    lines = read_text(path, "log", TimelineError, max_bytes=MAX_LOG_BYTES).split("\n")[:-1]
    for number, line in enumerate(lines, start=1):
        row = parse_json(line, f"{path} line {number} is damaged", TimelineError)
        if not isinstance(row, dict):
            message = f"{path} line {number} is no JSON object: {json.dumps(row)[:80]}"
            raise TimelineError(message, hint="restore the file from a copy")
        yield row


# More spans of a prediction than these show nothing that fewer do not.
_MOST_PREDICTED_SPANS = 20_000
_MOST_ROWS = 40


def page_of(
    reported: Sequence[Reported], decision: Decision | None = None, results: Sequence[Reportable] = ()
) -> ReportPage:
    """Return the page of plans and runs.

    - `decision`: of which the first is the choice: its candidates, a scatter of these, its reasons, and what would change it
      are shown, too.
    - `results`: that are no single plan or run, such as an answer what to buy.

    Raises ZosimError if a run's files are damaged or of another program.
    """
    several = len(reported) > 1
    page = ReportPage(
        " and ".join([result.heading for result in results] or [item.name for item in reported]),
        [sentence for item in reported for sentence in _answer(item, several)],
    )
    if decision is not None:
        page.elements.append(
            Report("Why this plan", *decision_view(replace(decision, compared=None)).elements)
        )
        page.elements += _front(decision)
        changes = effects_view(decision, plan_effects(decision))
        page.elements.append(Report("What would change it", *changes.elements))
        compared = decision.compared or choose_order(decision)
        page.elements.append(Report("Zeroth or first order", *compared.view().elements))
    for result in results:
        first, *others = result.view().elements
        if isinstance(first, Bullets) and not reported:
            page.answer.extend(first.items)
        else:
            others.insert(0, first)
        page.elements.append(Report(result.heading if reported else "", *others))
    for item in reported[1:]:
        if item.planned.plan != reported[0].planned.plan and not results:
            table = PlanComparison(reported[0].planned, item.planned).table()
            page.elements.append(Report(f"{item.name} against {reported[0].name}", table))
    for item in reported:
        if item.comparison is not None:
            heading = f"{item.name}: predicted and measured" if several else "Predicted and measured"
            page.elements.append(Report(heading, item.comparison.view()))
    if reported:
        _add_timelines(page, reported)
    for number, item in enumerate(reported):
        if several or decision is None:
            page.elements.append(
                Report(f"{item.name}: prediction" if several else "Prediction", simulation_view(item.planned))
            )
        page.elements.append(_links(item, several))
        _add_curves(page, item, number)
    return page


def _answer(item: Reported, several: bool) -> Iterator[str]:
    planned, prediction = item.planned, item.planned.prediction
    plan, taken = planned.plan, prediction.footprints
    name = f"{item.name}: " if several else ""
    yield (
        f"{name}{plan.model.describe()} on {plan.placement.topology}, {plan.describe()}: a step of {plan.tokens_per_step:,} tokens is predicted to take "
        f"{prediction.interval}, with {format_bytes(taken.largest.device_bytes)} on the fullest device and "
        f"{format_bytes(taken.fullest.size_bytes)} of host memory."
    )
    limit = prediction.bottleneck
    yield f"{name}It is limited by {limit.description}: {limit.share:.0%} of the critical path."
    comparison = item.comparison
    if comparison is not None:
        error = comparison.step_error
        yield (
            f"{name}Measured, a step takes {format_seconds(comparison.measured_step_s)}"
            + ("." if error is None else f"; the prediction is off by {error:+.1%}.")
        )
    if item.missing:
        yield f"{name}The run's log is incomplete: {item.missing}."
    if item.steps:
        losses = [row["loss_plus"] for row in item.steps]
        yield f"{name}Loss {losses[0]:.4g} in the first of {1 + item.steps[-1]['step']} steps, {losses[-1]:.4g} in the last."


def _front(decision: Decision) -> Iterator[Illustration]:
    """Yield step time against device memory of all that fit."""
    if not (svg := candidates_svg(decision)):
        return
    points = [
        (c.describe(), c.footprints.largest.device_bytes, c.seconds)
        for c in (decision.chosen, *decision.others)
    ]
    front = [
        each for each in points if not any(o[1] <= each[1] and o[2] <= each[2] and o != each for o in points)
    ]
    rows = [(name, format_bytes(size), format_seconds(s)) for name, size, s in front[:_MOST_ROWS]]
    table = Table(
        ("placement", "device memory", "step"),
        rows,
        title="none is better in both",
        numeric=("device memory", "step"),
    )
    yield Illustration(
        "",
        "Step time and device memory of all plans that fit",
        svg,
        Report("", table),
    )


def _add_timelines(page: ReportPage, reported: Sequence[Reported]) -> None:
    shown: dict[str, tuple[Timeline, PlannedRun, int]] = {}
    for item in reported:
        # What it is stands first: the end of a long name is cut off.
        name = f": {item.name}" if len(reported) > 1 else ""
        predicted = item.planned.timeline_of(item.rank)
        if item.measured is not None and len(predicted.spans) < _MOST_PREDICTED_SPANS:
            # As many steps as were measured, while they are few enough to look at.
            per_step = max(1, len(predicted.spans) // max(1, len(predicted.listed_steps)))
            num_steps = min(item.measured.num_steps, _MOST_PREDICTED_SPANS // per_step)
            rank = None if item.rank in item.planned.timeline.ranks else item.rank
            predicted = item.planned.simulated(num_steps=max(1, num_steps), rank=rank).expanded()
        shown[f"predicted{name}"] = predicted, item.planned, item.rank
        if item.measured is not None:
            shown[f"measured{name}"] = item.measured, item.planned, item.rank
    timelines = {name: timeline for name, (timeline, _, _) in shown.items()}
    page.step_s = max(timeline.step_time_s for timeline in timelines.values())
    page.timelines += [
        timeline_columns(timeline, planned, name) for name, (timeline, planned, _) in shown.items()
    ]
    seconds = {name: timeline.seconds_by_label(rank) for name, (timeline, _, rank) in shown.items()}
    labels = dict.fromkeys(label for by_label in seconds.values() for label in by_label)
    rows = [
        (label, *(format_seconds(each[label]) if label in each else "" for each in seconds.values()))
        for label in labels
    ]
    tables = [
        Table(("busy in a step", *seconds), rows, numeric=tuple(seconds), title="of the rank that ends last"),
        *(_path_table(timeline, planned, rank, name) for name, (timeline, planned, rank) in shown.items()),
    ]
    page.elements.append(Illustration("timeline", "Timeline", timeline_svg(timelines), Report("", *tables)))
    for name, (timeline, _, rank) in shown.items():
        for space in Space:
            root = f"memory-{len(page.memory)}"
            chart = memory_chart(timeline, space, rank, root, name)
            if chart is None:
                continue
            page.memory.append(chart)
            peak = timeline.peak_memory(space, rank)
            at_peak = [(role, format_bytes(size)) for role, size in peak.components.items()]
            table = Table(
                ("at the peak", "bytes"),
                [*at_peak, ("in all", format_bytes(peak.size_bytes))],
                numeric=("bytes",),
            )
            page.elements.append(_figure(chart, Report("", table)))


def _path_table(timeline: Timeline, planned: PlannedRun, rank: int, name: str) -> Table:
    path = step_path(timeline, planned.programs.program_of(rank), rank)
    by_label: dict[str, float] = {}
    for segment in path.segments:
        by_label[segment.label] = by_label.get(segment.label, 0.0) + segment.duration_s
    rows = [
        (label, format_seconds(s / max(1, path.num_steps)), f"{s / path.duration_s:.0%}")
        for label, s in sorted(by_label.items(), key=lambda item: -item[1])
    ]
    columns = ("critical path", "in a step", "share")
    return Table(columns, rows, numeric=columns[1:], title=name)


def _links(item: Reported, several: bool) -> Illustration:
    """Return the machine with how busy the plan keeps each link, the busiest in a table."""
    busy = busy_shares(item.planned)
    rows = [
        (resource, f"{share:.1%}")
        for resource, share in sorted(busy.items(), key=lambda pair: -pair[1])[:_MOST_ROWS]
        if share
    ]
    title = f"{item.name}: hardware" if several else "Hardware, and how busy each link is"
    table = Table(
        ("resource", "busy"), rows, numeric=("busy",), title="share of a step, if served one after the other"
    )
    return Illustration("", title, topology_svg(item.planned.topology, busy), Report("", table))


def _add_curves(page: ReportPage, item: Reported, number: int) -> None:
    for name, title, columns in (
        ("loss", "Loss at each evaluation point", by_perturbation(item.steps, ("loss_plus", "loss_minus"))),
        ("gradient", "Projected gradient", by_perturbation(item.steps, ("projected_grad",))),
        ("evaluation", "Evaluations", _metrics(item.metrics)),
    ):
        drawn = {label: points for label, points in columns.items() if points}
        if not drawn:
            continue
        chart = curve_chart(f"{name}-{number}", f"{item.name}: {title}", drawn)
        page.curves.append(chart)
        steps = chart.columns[0]
        every = max(1, len(steps) // _MOST_ROWS)
        rows = [
            tuple("" if value is None else f"{value:.6g}" for value in row)
            for row in list(zip(*chart.columns, strict=True))[::every]
        ]
        columns_shown = ("step", *chart.names)
        page.elements.append(_figure(chart, Report("", Table(columns_shown, rows, numeric=columns_shown))))


def by_perturbation(
    rows: Sequence[Mapping[str, Any]], keys: Sequence[str]
) -> dict[str, list[tuple[int, float]]]:
    """Return each number of the log over steps: the first perturbation's, of which a step has one at least."""
    first = [row for row in rows if not row.get("perturbation")]
    return {
        key: [(row["step"], row[key]) for row in first if isinstance(row.get(key), int | float)]
        for key in keys
    }


def _metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    names = ("accuracy", "exact_match", "f1", "loss")
    return {
        name: [(row["num_steps"], row[name]) for row in rows if isinstance(row.get(name), int | float)]
        for name in names
    }


def _figure(chart: Chart, numbers: Report) -> Illustration:
    return Illustration(chart.root, chart.title, chart_svg(chart), numbers)


MOST_POINTS = 2_000
"""Of more points each mean (of a curve) or largest total (of memory) of several is shown."""


def memory_chart(timeline: Timeline, space: Space, rank: int, root: str, name: str) -> Chart | None:
    """Return the memory of a rank in a space over time, stacked by what it is for; None where there is none."""
    curve = timeline.memory_curve(space, rank)
    if not curve:
        return None
    # A last point, so that the last level reaches to the end of the run.
    curve = [*curve, (max(timeline.end_s, curve[-1][0]), curve[-1][1])]
    every = -(-len(curve) // MOST_POINTS)
    chosen = [
        max(curve[begin : begin + every], key=lambda point: sum(point[1].values()))
        for begin in range(0, len(curve), every)
    ]
    roles = sorted(
        {role for _, sizes in chosen for role, size in sizes.items() if size},
        key=lambda role: -max(sizes.get(role, 0) for _, sizes in chosen),
    )
    if not roles:
        return None
    shift_s = aligned_at_s(timeline)
    times_s = tuple(time_s - shift_s for time_s, _ in chosen)
    values = [tuple(sizes.get(role, 0) for _, sizes in chosen) for role in roles]
    title = f"{space.value.capitalize()} memory of rank {rank}, {name}"
    return Chart(root, title, "time", "s", "bytes", tuple(roles), (times_s, *values), stacked=True)


def curve_chart(root: str, title: str, columns: Mapping[str, Sequence[tuple[int, float]]]) -> Chart:
    """Return lines over the steps of a run, each a sequence of (step, value); means where there are too many."""
    thinned = {name: dict(_thinned(points)) for name, points in columns.items()}
    steps = sorted({step for line in thinned.values() for step in line})
    values = [tuple(line.get(step) for step in steps) for line in thinned.values()]
    return Chart(root, title, "step", "", "", tuple(thinned), (tuple(steps), *values))


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    every = -(-len(points) // MOST_POINTS)
    chunks = [points[begin : begin + every] for begin in range(0, len(points), every)]
    return [(chunk[0][0], fmean(value for _, value in chunk)) for chunk in chunks]
