"""``zosim plan``, ``lower``, ``simulate`` and ``compare``: thin over the planner and the simulator."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from topology.errors import PlanError
from topology.units import format_seconds
from zosim import api
from zosim.applications.first_order.settings import FirstOrder, FirstOrderName, first_order_of
from zosim.console import emit, stderr
from zosim.options import Json, PlanFile, ReportFile, options_of, with_settings
from zosim.report import Report


@with_settings(api.PlanOptions, like=api.plan)
def plan(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write the chosen plan to.", rich_help_panel="Output"),
    ] = None,
    report: ReportFile = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Show how the step time changes if a hardware figure doubles or halves, and which plans nearly tie.",
            rich_help_panel="Output",
        ),
    ] = False,
    front: Annotated[
        Path | None,
        typer.Option(
            help="File (.svg, .png or .pdf) for a picture of the Pareto front of step time, memory and money. Slow: bounds every plan.",
            rich_help_panel="Output",
        ),
    ] = None,
    compare: Annotated[
        Literal["first-order"] | None,
        typer.Option(
            help="Compare the plan with recipes of first-order fine-tuning on its devices.",
            rich_help_panel="Output",
        ),
    ] = None,
    zeroth_order_steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of steps to the target with the plan, for --compare.",
            rich_help_panel="Output",
        ),
    ] = None,
    first_order_steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of first-order steps to the same target, for --compare.",
            rich_help_panel="Output",
        ),
    ] = None,
    as_json: Json = False,
    **requested: Any,
) -> None:
    """Choose the fastest plan that fits the hardware, and explain the choice.

    For example:
      zosim plan --model my-model --hardware "2x rtx4090" --batch 8 --seq 512
      zosim plan --model opt-13b --max-device-memory 20GiB -o plan.json
    """
    if compare is None and (zeroth_order_steps or first_order_steps):
        raise PlanError("steps to a target need --compare", hint="add --compare first-order")
    decision = api.plan(**requested)
    if compare is not None:
        from zosim.applications.first_order.choice import compare_first_order

        decision = compare_first_order(
            decision, zeroth_order_steps=zeroth_order_steps, first_order_steps=first_order_steps
        )
    # Not before there is a plan: a help page needs none of it.
    from zosim.planning.views import decision_data, decision_view, front_data, front_view
    from zosim.planning.visibility import about_epsilon

    for warning in about_epsilon(decision.plan):
        stderr.print(f"warning: {warning}", soft_wrap=True)
    if output is not None:
        decision.plan.save(output)
        stderr.print(f"wrote {output}")
    data, view = decision_data(decision), decision_view(decision)
    if explain:
        from zosim.applications.buying.sensitivity import effects_view, near_ties, plan_effects

        effects = plan_effects(decision)
        data["figures"], data["near_ties"] = list(effects), near_ties(decision)
        view = Report("", view, effects_view(decision, effects))
    if front is not None:
        from zosim.applications.picture import draw_front

        stderr.print(f"wrote {draw_front(decision.front, front)}")
        data, view = data | front_data(decision), Report("", front_view(decision), view)
    if report is not None:
        from zosim.applications.html_report.command import write_report

        stderr.print(f"wrote {write_report(decision, output=report)}")
    emit(data, json=as_json, text=view)


@with_settings(FirstOrder)
def lower(
    plan_file: PlanFile,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File to write the programs to.",
            show_default="stdout",
            rich_help_panel="Output",
        ),
    ] = None,
    check: Annotated[
        Path | None, typer.Option(help="Program file to validate instead, perhaps edited by hand.")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Rank whose program to write.", show_default="all ranks")
    ] = None,
    first_order: Annotated[
        FirstOrderName | None,
        typer.Option(
            help="First-order step to write instead, on the same devices and split points.",
            rich_help_panel="Estimator and optimizer",
        ),
    ] = None,
    **settings: Any,
) -> None:
    """Write a plan's programs, one instruction per line, or validate edited ones."""
    planned, baseline = api.simulate(plan_file, program=check), first_order_of(first_order, **settings)
    if baseline is not None:
        from zosim.applications.first_order.report import baseline_run

        planned = baseline_run(planned, baseline)
    programs = planned.programs
    if rank is not None and rank >= programs.world_size:
        raise PlanError(
            f"--rank {rank} does not exist among {programs.world_size} ranks",
            hint="ranks are numbered from 0",
        )
    program = programs.program_of(rank or 0)
    if check is not None:
        several = f" on each of {programs.world_size} ranks" if programs.world_size > 1 else ""
        stderr.print(f"{check} is valid: {len(program.step)} instructions per step{several}")
        return
    text = programs.to_json() if rank is None else program.to_json()
    if output is None:
        typer.echo(text, nl=False)
        return
    output.write_text(text)
    several = f"; {len(programs.programs)} programs for {programs.world_size} ranks"
    stderr.print(
        (f"wrote {output}: {len(program.step)} instructions per step, {len(program.flush)} in the flush")
        + (several if rank is None and programs.world_size > 1 else "")
    )


@with_settings(FirstOrder, like=api.simulate)
def simulate(
    plan_file: PlanFile,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of steps to simulate.",
            show_default="until they repeat",
            rich_help_panel="Run",
        ),
    ] = None,
    code: Annotated[
        Literal["ours", "published"],
        typer.Option(
            help="Code to simulate: zosim's own (ours), or the eager Hugging Face code published with the "
            "methods (published), which samples and passes over the parameters more often.",
            rich_help_panel="Run",
        ),
    ] = "ours",
    trace: Annotated[
        Path | None,
        typer.Option(help="File to write a Chrome trace to, for Perfetto.", rich_help_panel="Output"),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            help="File to draw the timeline of one step to: .svg, .png or .pdf.", rich_help_panel="Output"
        ),
    ] = None,
    first_order: Annotated[
        FirstOrderName | None,
        typer.Option(
            help="First-order step to compare with, on the same devices and split points.",
            rich_help_panel="Estimator and optimizer",
        ),
    ] = None,
    first_order_trace: Annotated[
        Path | None,
        typer.Option(
            help="File to write a Chrome trace of the first-order step to.", rich_help_panel="Output"
        ),
    ] = None,
    as_json: Json = False,
    **requested: Any,
) -> None:
    """Predict a plan's step time and memory with a discrete-event simulation."""
    from zosim.applications.trace import save_trace
    from zosim.planning.views import prediction_data, simulation_view, stages_data

    first_order_settings = first_order_of(
        first_order, **{option.name: requested.pop(option.name) for option in options_of(FirstOrder)}
    )
    if first_order is None and first_order_trace is not None:
        raise PlanError("--first-order-trace needs --first-order", hint="such as --first-order sgd")
    planned = api.simulate(plan_file, **requested)
    if code == "published":
        from zosim.applications.published_code import all_as_published

        planned = replace(planned, edited=all_as_published(planned.programs, planned.plan))
    timeline = planned.timeline if steps is None else planned.simulated(num_steps=steps)
    if trace is not None:
        # Arrows follow one program; ranks of several have none.
        programs = planned.programs.programs
        save_trace(timeline, trace, programs[0] if len(programs) == 1 else None)
        stderr.print(f"wrote {trace}")
    if picture is not None:
        from zosim.applications.picture import draw_timeline

        stderr.print(f"wrote {draw_timeline(timeline, picture)}")
    prediction = planned.prediction
    data = (
        prediction_data(prediction)
        | stages_data(planned)
        | {
            "num_steps": timeline.num_steps,
            "makespan_s": timeline.makespan_s,
        }
    )
    view = simulation_view(planned)
    if first_order_settings is not None:
        from zosim.applications.first_order.report import baseline_run, comparison_data, comparison_view

        baseline = baseline_run(planned, first_order_settings)
        if first_order_trace is not None:
            save_trace(baseline.timeline, first_order_trace)
            stderr.print(f"wrote {first_order_trace}")
        data |= comparison_data(planned, baseline, first_order_settings)
        view = Report("", view, comparison_view(planned, baseline, first_order_settings))
    emit(data, json=as_json, text=view)
    if steps is not None and not as_json:
        stderr.print(f"{steps} steps and the flush: {format_seconds(timeline.makespan_s)}")


@with_settings(None, like=api.compare)
def compare(
    plan_or_run: Annotated[
        Path, typer.Argument(help="Directory of a run, or a plan file to compare with.", show_default=False)
    ],
    run: Annotated[
        Path | None,
        typer.Argument(
            help="Directory of a run, or a second plan file, to compare with the plan.", show_default=False
        ),
    ] = None,
    third: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN]", help="Directory of a run to compare with both plans.", show_default=False
        ),
    ] = None,
    report: ReportFile = None,
    as_json: Json = False,
    **requested: Any,
) -> None:
    """Compare a run with its prediction, or two plans with each other or with a run.

    Without a plan, the prediction is of the run's own: DIR/plan.json, or the plan in DIR/run.json.
    """
    if third is None and run is not None and plan_or_run.is_dir() and run.is_file():
        plan_or_run, run = run, plan_or_run
    plan_file, run = (None, plan_or_run) if run is None else (plan_or_run, run)
    second, run = (None, run) if third is None else (run, third)
    comparison = api.compare(run, plan_file, second=second, **requested)
    if report is not None:
        from zosim.applications.html_report.command import write_report

        sources = [one for one in (plan_file, second, run) if one is not None]
        where: dict[str, Any] = {name: requested.get(name) for name in ("hardware", "profile", "threads")}
        stderr.print(f"wrote {write_report(*sources, output=report, **where)}")
    emit(json.loads(comparison.to_json()), json=as_json, text=comparison)
